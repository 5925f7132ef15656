"""Checks of the README and the other pages: links, files, commands and their options, and numbers in tables.

The pages are README.md, CONTRIBUTING.md and docs/. A number that was measured must equal a number of a file in
benchmarks/results, rounded to the digits that are shown.
"""

import ast
import importlib
import json
import re
import shlex
import shutil
import sys
import tokenize
from contextlib import nullcontext
from functools import cache
from io import StringIO
from statistics import median

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from test_house import FILES, PATHS, PROGRAMS

from costs import roofline
from formats import FORMATS, Quantization
from generate import parse_arguments
from sources.families import FAMILIES
from sources.hf_directory import hf_config

PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
PAGES |= {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
README = PAGES["README.md"]
TORCHRUN = {"--standalone", "--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint"}

# ---------------------------------------------------------------- links and files


def anchors(text: str) -> set[str]:
    """The anchors of a page, which GitHub makes from its headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", PAGES[page])
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
    assert links and (not page.startswith("docs/") or f"]({page})" in README), "the README leads to every page"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CONTRIBUTING.md"])
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|cpp))`|`(benchmarks/results/[\w.]+)`", PAGES[page]):
        assert (ROOT / "".join(name)).exists(), name


def named_things() -> set[tuple[str, str]]:
    """(file, name) of each "`name` in `file`" or "`name` (`file`)" of the pages. Several names may stand together."""
    found = set()
    for text in PAGES.values():
        names = r"((?:`[\w.-]+`,? (?:and |or )?)*`[\w-]+(?:\.\w+)?`)"
        for several, path in re.findall(rf"{names} (?:in |of |\()`([\w/]+\.(?:py|h|cpp))`", " ".join(text.split())):
            found |= {(path, name) for name in re.findall("`([^`]+)`", several) if not name.endswith(".py")}
    return found


@cache
def defined_names(path: str) -> set[str]:
    """The names that a file defines: at the top level, in classes (also as Class.member), as options. C++: anywhere."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".py"):
        return set(re.findall(r"^ *(?!return)(?:#define |[\w:<>,&* ]+[ &*])(\w+)\b", text, re.M))
    found, tree = set(re.findall(r'"(--\w+)"', text)), ast.parse(text)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, scope in [("", tree), *((f"{node.name}.", node) for node in classes)]:
        for node in scope.body:
            is_block = isinstance(node, ast.ClassDef | ast.FunctionDef)
            names = [node.name] if is_block else [name.id for name in stored(node, ast.Name)]
            found |= {*names, *(prefix + name for name in names)}
    return found | {f"{node.name}.{member.attr}" for node in classes for member in stored(node, ast.Attribute)}


def stored(tree: ast.AST, kind: type) -> list:
    """The names or attributes to which something is assigned anywhere in a tree."""
    return [node for node in ast.walk(tree) if isinstance(node, kind) and isinstance(node.ctx, ast.Store)]


def test_names_are_in_the_files_that_the_pages_say():
    things = named_things()
    assert len(things) > 15
    assert [(path, name) for path, name in sorted(things) if name not in defined_names(path)] == []


def test_members_are_in_their_classes():
    every = set().union(*(defined_names(str(path.relative_to(ROOT))) for path in PATHS))
    named = {name for text in PAGES.values() for name in re.findall(r"`([A-Z]\w+\.\w+)\b[^`]*`", text)}
    assert len(named) > 8 and named - every == set()


@pytest.mark.parametrize("path", [*PATHS, *PROGRAMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_comments_are_in_their_modules(path):
    """Where a comment or a docstring says module.name or room.module.name; in backticks this may be any code."""
    tokens = tokenize.generate_tokens(StringIO(path.read_text(encoding="utf-8")).readline)
    comments = [one.string for one in tokens if one.type == tokenize.COMMENT or one.string.startswith('"""')]
    modules = "|".join(map(re.escape, sorted(FILES, key=len, reverse=True)))
    no_file = r"(?!(?:py|h|txt|json|model|safetensors)\b)"
    named = re.findall(rf"(?<![\w./`])({modules})\.{no_file}([A-Za-z_]\w*)", "\n".join(comments))
    assert [pair for pair in named if pair[1] not in defined_names(str(FILES[pair[0]].relative_to(ROOT)))] == []


def test_families_are_those_of_the_converter():
    listed = [cells[1].strip("`") for cells in table("docs/checkpoints.md", "| family |")]
    assert sorted(listed) == sorted(FAMILIES)


# ---------------------------------------------------------------- commands


def commands() -> list[str]:
    """The commands of the pages that run one of our programs, from the program's name on."""
    found = []
    for text in PAGES.values():
        for line in re.findall(r"^ {4,}(.*)$", text.replace("\\\n", ""), re.M):
            found += [part for part in line.split("&&") if re.search(r"(python|torchrun) .*\.py", part)]
    return found


def offered_options(program: str, capsys, monkeypatch) -> set[str]:
    """The options of a program: from its --help, or if it would be slow to import, from the sources."""
    if "/" in program:
        files = (program, "benchmarks/measure.py", "training/common.py")
        sources = [(ROOT / path).read_text(encoding="utf-8") for path in files]
        text = "".join(sources)
        ends = re.findall(r'f"--\{peer\.prefix\}(_\w+)"', text)  # of options of each peer
        prefixes = re.findall(r'Peer\("(\w+)"', text)
        return {*re.findall(r'"(--\w+)"', text), *(f"--{prefix}{end}" for prefix in prefixes for end in ends)}
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(program.removesuffix(".py")).main()
    return set(re.findall(r"--\w+", capsys.readouterr().out))


def test_commands_have_the_options_that_they_use(capsys, monkeypatch):
    known = {}
    for command in commands():
        words = [word for word in shlex.split(command, comments=True) if word not in ("python", "torchrun")]
        program = next(word for word in words if word.endswith(".py"))
        if program not in known:
            known[program] = offered_options(program, capsys, monkeypatch)
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= known[program] | (TORCHRUN if command.lstrip().startswith("torchrun") else set()), command
    assert {"generate.py", "quantize.py", "evaluate.py", "convert_hf_checkpoint.py"} <= known.keys()


@pytest.mark.parametrize("command", [command for command in commands() if "python generate.py" in command])
def test_generate_commands_parse(command):
    words = shlex.split(command, comments=True)
    with pytest.raises(SystemExit) if "--list" in words else nullcontext():
        parse_arguments(words[words.index("generate.py") + 1 :])


def test_the_test_command_is_that_of_ci():
    assert "pip install -r requirements.txt && python generate.py" in README
    command = "pip install -r requirements-dev.txt && python -m pytest"
    assert command in README and (ROOT / ".ci" / "run").read_text().rstrip().endswith(command)


@pytest.mark.slow
def test_the_python_examples_run(capsys):
    """The second goes on where the first has ended, as a reader would paste it."""
    first, second = re.findall(r"```python\n(.*?)```", README, re.S)
    for example in (first, second):
        assert len([line for line in example.splitlines() if line and "import" not in line]) <= 10
    names = {}
    exec(first, names)
    said = capsys.readouterr().out
    assert "Once upon a time" in said and "The sea is" in said and ("length" in said or "stop" in said)
    assert all(request.stop_ids == set(names["tokenizer"].eos_ids) for request in names["requests"])

    exec(second, names)
    asked, one, then, other = names["messages"]
    assert [message["role"] for message in names["messages"]] == ["user", "assistant"] * 2
    assert capsys.readouterr().out == f"{one['content']}\n{other['content']}\n" and one["content"] and other["content"]
    reused = names["request"].cached_tokens
    assert reused > len(names["template"].encode([asked])), "the second turn reads only what is new"


def requirements(path) -> list[Requirement]:
    """What a file of requirements or constraints names, without the files that it includes."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-r ")]


def test_requirements_are_ranges_and_constraints_pin_them():
    """pip leaves an installed version alone that a range allows. CI takes the version that constraints.txt names. The
    README's command takes out torch and nothing else, so that a newer one can be kept."""
    assert 'export PIP_CONSTRAINT="$PWD/constraints.txt"' in (ROOT / ".ci" / "run").read_text()
    assert "`sed -i /^torch/d requirements.txt`" in README
    assert {one.name for one in requirements(ROOT / "requirements.txt") if one.name.startswith("torch")} <= {"torch"}
    files = [path for path in ROOT.glob("requirements*.txt") if path.name != "requirements-clients.txt"]
    ranges = {one.name: one.specifier for path in files for one in requirements(path)}
    pins = requirements(ROOT / "constraints.txt")
    assert {pin.name for pin in pins} == ranges.keys() | {"torch"}  # which who keeps a newer one has taken out
    for name, allowed in ranges.items():
        assert {one.operator for one in allowed} == {">=", "<"}, name
        exact = [str(pin.specifier) for pin in pins if pin.name == name]
        assert all(pin.startswith("==") and allowed.contains(pin.removeprefix("==")) for pin in exact), name
        assert len(exact) == 1 or all(pin.marker for pin in pins if pin.name == name), name
    assert all(str(one.specifier).startswith("==") for one in requirements(ROOT / "requirements-clients.txt"))


# ---------------------------------------------------------------- numbers


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose first line begins with this text."""
    lines = PAGES[page].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]


def results(name: str, page: str) -> dict:
    """The content of a file of benchmarks/results, whose date the page must give."""
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert result["date"] in PAGES[page], f"{page} does not give the date of {name}.json"
    return result


def rates_of(row: dict) -> tuple[float, float]:
    return row["decode_tokens_per_s"], row["prefill_tokens_per_s"]


def sentence(page: str, pattern: str) -> tuple[str, ...]:
    """The numbers in the sentence of a page that this text fits, in which # stands for a number."""
    parts = [re.escape(part) for part in pattern.split("#")]
    [found] = re.findall(r"(\d[\d,]*(?:\.\d+)?)".join(parts), " ".join(PAGES[page].split()))
    return found


def best_ratios(result: dict) -> dict[tuple[str, str], dict]:
    """The ratios to the best peer of each of our rows: (model, name) -> decode, prefill and so on."""
    return {(pair["model"], pair["ours"]): pair for pair in result["ratios"] if pair["peer"] == "the best peer"}


def decode_numbers(page="README.md"):
    result = results("decode_cpu", page)
    rows = {row["model"]: row for row in result["rows"] if row["name"].startswith("fastpath")}
    machines = [best_ratios(result), best_ratios(results("decode_zen4_cpu", page))]
    for model, *cells in table(page, "| | decode, tokens/s | prefill of 512 tokens, tokens/s | decode"):
        name = rows[model]["name"]
        ratios = [best[model, name][kind] for best in machines for kind in ("decode", "prefill")]
        yield from zip(cells, (*rates_of(rows[model]), *ratios), strict=True)


def more_decode_numbers(page="docs/how-it-gets-fast.md"):
    """A row's model is the one of our rows whose names begin alike, in the file that the row names."""
    names = {"135M, bf16": "bf16", "135M, int8": "int8", "Gemma 3": "gemma-3", "Gemma 4": "Gemma-4", "4B-A1B": "4B-A1B"}
    names |= {"Qwen2.5": "Qwen2.5", "Qwen3.5": "Qwen3.5", "135M, Q4_0": "Q4_0"}
    for label, *cells, file in table(page, "| model | decode | prefill | file"):
        [name] = [name for start, name in names.items() if label.startswith(start)]
        best = best_ratios(results(file.strip("`").removesuffix(".json"), page))
        [pair] = [pair for key, pair in best.items() if name in " ".join(key)]
        yield from zip(cells, (pair["decode"], pair["prefill"]), strict=True)
    best = best_ratios(results("decode_135m_cpu", page))
    zen5 = [best["SmolLM2-135M-Instruct", f"fastpath eager {format}"] for format in ("bf16", "int8")]
    said = sentence(page, "On a Zen 5, 135M has #x and #x in bf16, and #x and #x in int8")
    yield from zip(said, [one[kind] for one in zen5 for kind in ("decode", "prefill")], strict=True)


def question_numbers(page="docs/checkpoints.md"):
    rows = results("questions_cpu", page)["rows"]
    values = [row[f"temperature {setting}"] for setting in ("0", "0.3") for row in rows]
    text = "Instruct answered # correctly at temperature 0, and qwen2.5-coder-1.5b #. At the default of 0.3, "
    text += "asked three times, they answered # and # of 72"
    yield from zip(sentence(page, text), values, strict=True)


def ladder_numbers(page="docs/how-it-gets-fast.md"):
    steps = {}
    for step in results("ladder_cpu", page)["steps"]:
        steps.setdefault(step["name"], []).append(step)  # one of each model
    for cells, (name, of_models) in zip(table(page, "| step |"), steps.items(), strict=True):
        assert cells[0] == name
        for step, rate, gain in zip(of_models, cells[2::2], cells[3::2], strict=True):
            yield rate, step["decode_tokens_per_s"]
            if step["decode_over_before"] is not None:
                yield gain, step["decode_over_before"]


MODELS = {"135M": "", "1.5B": "_1.5b"}  # model -> what the names of its files end with


def shadow_numbers(page="docs/how-it-gets-fast.md"):
    gemma = results("shadow_cpu", page)["head"][-1]
    needed = gemma["weight_bytes"] - (1 - gemma["mean_share"]) * gemma["head_bytes"] + gemma["shadow_bytes"]
    values = [needed / 1e6, gemma["weight_bytes"] / 1e6]
    values += [results(f"decode_shadow_{name}cpu", page)["ratios"][0]["decode"] for name in ("gemma_", "", "hybrid_")]
    text = "reads # of # MB (2026-11-29, `benchmarks/results/shadow_cpu.json`), and decodes #x as fast; "
    text += "the default model gains #x"
    said = (*sentence(page, text), sentence(page, "with 248,320 tokens, gains #x"))
    yield from zip(said, values, strict=True)


def busy_numbers(page="docs/how-it-gets-fast.md"):
    case = results("busy_cpu", page)["cases"][1]  # one loop, on one of two processors
    runs = [case[who] for who in ("2 threads", "1 threads", "chosen")]
    rates = [median(one["decode_tokens_per_s"] for one in rounds) for rounds in runs]
    text = "decoded # tokens/s with two threads, # with one, and # with the number"
    yield from zip(sentence(page, text), rates, strict=True)


def serving_numbers(page="docs/serving.md"):
    small, large = (results(f"serving{end}", page) for end in MODELS.values())
    rows, peers = [(result, n) for result in (small, large) for n in ("1", "8")], ("llama.cpp", "ik_llama.cpp")
    for (_, *cells), (result, n) in zip(table(page, "| tokens/s | `serve.py`"), rows, strict=True):
        rates = [result["servers"][f"{who} {n}"]["tokens_per_s"] for who in ("fastpath", *peers)]
        yield from zip(cells, (*rates, *(result["ratios"][f"{n}_streams_over_{peer}"] for peer in peers)), strict=True)
    keys = ("reused_s", "new_s")
    times = [result["second_turn"][key] for key in keys for result in (small, large)]
    text = "begins after # s (1.5B: # s), without reuse after # s (# s)"
    yield from zip(sentence(page, text), times, strict=True)


def structured_numbers(page="docs/serving.md"):
    ratios = [results(f"structured{end}", page)["ratios"]["fastpath_8_masked_over_plain"] for end in MODELS.values()]
    yield from zip(sentence(page, "with a schema each run at #x (#x)"), ratios, strict=True)


def quantization_numbers(page="docs/quantization.md"):
    result = results("quantization_1.5b_cpu", page)
    rows = {(row["mode"], str(row["groupsize"] or "row"), row["head"]): row for row in result["rows"]}
    original, *found = table(page, "| 1.5B: mode | group")
    yield original[3], result["reference"]["bytes"] / 1e6
    yield original[6], result["reference"]["perplexity"]
    for cells in found:
        row = rows[tuple(cells[:3])]
        values = [row["bytes"] / 1e6, row["kl_nats"], row["kl_ci95"], 100 * row["top1_agreement"]]
        values += [100 * row["top1_ci95"], row["perplexity"] / result["reference"]["perplexity"]]
        yield from zip([part for cell in cells[3:] for part in cell.split("±")], values, strict=True)


def gain_numbers(page="docs/speculation.md"):
    drafts = ("prompt-lookup", "medusa", "int4-self", "all")
    for model, format, kind, *cells in table(page, "| model | format | prompts |"):
        rows = results(f"speculation{MODELS[model]}_cpu", page)["rows"]
        mine = [row for row in rows if (row["target"], row["prompts"]) == (format, kind)]
        gains = {row["draft"].removesuffix(", auto"): row["over_plain"] for row in mine}
        assert all(row["same_text"] == row["of"] for row in mine)
        shown = {draft: cell for draft, cell in zip(drafts, cells, strict=True) if cell}
        assert shown.keys() == gains.keys() & set(drafts)
        yield from ((cell, gains[draft]) for draft, cell in shown.items())


def more_quantization_numbers(page="docs/quantization.md"):
    result = results("quantization_cpu", page)
    rows = {row["mode"]: row for row in result["rows"] if (row["groupsize"], row["head"]) == (128, "int8")}
    values = [rows[mode]["perplexity"] / result["reference"]["perplexity"] for mode in ("int4", "int4-gptq")]
    yield from zip(sentence(page, "multiply the perplexity by #, with GPTQ by #"), values, strict=True)


def draft_layer_numbers(page="docs/speculation.md"):
    runs = list(results("draft_layer_cpu", page)["by_agreement"]["1"].values())
    said = sentence(page, "The gain is #x if # % of the tokens are accepted, and #x for # %")
    for gain, accepted, run in zip(said[::2], said[1::2], (runs[2], runs[4]), strict=True):
        yield from ((gain, run["over_plain"]), (accepted, 100 * run["accepted"]))


def experts_numbers(page="docs/experts.md"):
    rows = {row["rows"]: row for row in results("experts_cpu", page)["rows"]}
    values = [rows[1]["sparse_bytes_per_token"] / 1e6, rows[1]["over_dense"], rows[8]["over_dense"]]
    said = sentence(page, "One token uses # of its ")
    said = (said, *sentence(page, "is # of the sparse model's with one row, and # with eight rows"))
    yield from zip(said, values, strict=True)


def life_numbers(page="docs/life-of-a-token.md"):
    both = [results(f"life_{name}_cpu", page) for name in ("1.5b", "hybrid")]
    for (_, *cells), result in zip(table(page, "||blocks"), both, strict=True):
        yield from zip(cells, list(result["letters"].values())[: len(cells)], strict=True)
    units = {"MB": 1e6, "kB": 1e3, "GB": 1e9}
    for part, header in (("prompt", "prompt"), ("step", "decode step"), ("request", "request")):
        for result, column in zip(both, (2, 4)):
            measured = result["parts"][part]
            *shown, rest, whole = [cells for cells in table(page, f"|a {header}") if cells[column + 1]]
            hops = [(f"`{hop['function']}` (`{hop['file']}`)", hop["shape"]) for hop in measured["hops"]]
            assert hops == [tuple(cells[:2]) for cells in shown]
            yield from (
                (rest[column + 1].lstrip("-"), abs(measured["rest_us"])),
                (whole[column + 1], measured["wall_us"]),
            )
            for cells, hop in zip(shown, measured["hops"]):
                yield cells[column + 1], hop["us"]
                size, _, unit = cells[column].partition(" ")
                yield size or "0", hop["bytes"] / units[unit or "MB"]


def more_life_numbers(page="docs/life-of-a-token.md"):
    steps = [results(f"life_{name}_cpu", page)["parts"]["step"] for name in ("1.5b", "hybrid")]
    requests = [results(f"life_{name}_cpu", page)["parts"]["request"] for name in ("1.5b", "hybrid")]
    rest_share = max(abs(step["rest_share"]) for step in steps)
    assert rest_share <= 0.03
    yield sentence(page, "minus all rows above: at most # % of a step"), 100 * rest_share
    ups = [hop for step in steps for hop in step["hops"] if hop["key"] == "up"]
    texts = {
        "gate and up come at # GB/s (hybrid: #)": [hop["bytes"] / hop["us"] / 1e3 for hop in ups],
        "it makes a step # % longer (hybrid: # %)": [100 * step["clock_share"] for step in steps],
        "besides # % of its own blocks (hybrid: # %)": [100 * step["head_share"] for step in steps],
        "which takes it # µs (hybrid: #)": [request["http_us_per_token"] for request in requests],
    }
    for text, values in texts.items():
        yield from zip(sentence(page, text), values, strict=True)


def price_numbers(page="docs/engine.md"):
    prices = results("exactness_price", page)["prices"].values()
    said = sentence(page, "takes # of the time of the fastest version without it, which is in bf16 (Qwen3.5-0.8B: #;")
    yield from zip(said, [one["prefill of 512"]["price"] for one in prices], strict=True)


NUMBERS = [price_numbers, decode_numbers, more_decode_numbers, ladder_numbers, busy_numbers, quantization_numbers]
NUMBERS += [more_quantization_numbers, gain_numbers, draft_layer_numbers, question_numbers]
NUMBERS += [shadow_numbers, experts_numbers, serving_numbers, structured_numbers, life_numbers, more_life_numbers]


def test_the_table_of_exactness_says_what_was_seen():
    """A cell says in how many models tokens or log-probabilities differed. Ours never did, in any condition."""
    page = "docs/engine.md"
    seen: dict[tuple[str, str], list[bool]] = {}
    for column in results("exactness_cpu", page)["columns"]:
        for name, found in column["conditions"].items():
            if "left_out" not in found and found["used"] != 0:
                differ = [one["differing"] for one in (found["tokens"], found["logprobs"]) if one]
                seen.setdefault((name, column["program"]), []).append(any(differ))

    programs = ("fastpath file", "llama.cpp", "transformers bf16")
    ours = {name: models for (name, program), models in seen.items() if program == programs[0]}
    assert not any(map(any, ours.values()))
    assert sentence(page, "the same bits in all # conditions") == str(len(ours))
    rows = table(page, "| condition | fastpath |")
    assert {row[0] for row in rows} == {name for name, program in seen if program != programs[0]}
    for name, *cells in rows:
        for program, cell in zip(programs, cells, strict=True):
            models = seen.get((name, program), [])
            differing = f"differs in {sum(models)} of {len(models)}" if any(models) else "same"
            assert cell == (differing if models else ""), (name, program)


def test_every_format_gives_the_same_bits():
    page, differing = "docs/engine.md", {}
    for column in results("exactness_formats_cpu", page)["columns"]:
        name = column["model"].split(".")[-1] if column["program"] == "fastpath file" else column["program"].split()[1]
        found = {name: one for name, one in column["conditions"].items() if "left_out" not in one}
        assert len(found) > 13
        for kind in ("tokens", "logprobs"):
            differing[name.lower(), kind] = [way for way, one in found.items() if one[kind] and one[kind]["differing"]]
    assert differing.pop(("bf16", "logprobs")) == ["reread", "compiled"] and not any(differing.values())
    assert {name for name, _ in differing} == {*FORMATS, "bf16"}
    assert sentence(page, "Each of the # quantized formats") == str(len(FORMATS))


@pytest.mark.parametrize("numbers", NUMBERS)
def test_pages_say_what_was_measured(numbers):
    found = list(numbers())
    assert len(found) >= 2
    for said, value in found:
        check_rounded(said, value)


def check_rounded(said: str, value: float):
    digits = re.search(r"\d+(?:,\d+)*(?:\.(\d+))?", said)
    half = 0.5 * 10 ** -len(digits[1] or "")
    assert abs(float(digits[0].replace(",", "")) - value) <= half * (1 + 1e-9), f"{said} is {value}"


def test_bounds_of_a_model_with_experts(tmp_path):
    shutil.copyfile(ROOT / "tests/data/configs/transformers5__Qwen3.5-35B-A3B.json", tmp_path / "config.json")
    quantization = Quantization("q4_k", 256, "q6_k")
    model = hf_config(tmp_path)
    bounds = [roofline(model, 80e9, context=2048, rows=rows, quantization=quantization) for rows in (1, 8)]
    rates = sentence("docs/experts.md", "at most # tokens/s with one row, and # with eight rows")
    sizes = sentence("docs/experts.md", "reads # MB of weights and # MB of states")
    states = bounds[0]["kv_bytes_per_token"] + bounds[0]["state_bytes_per_token"]
    values = [*(one["bound_tokens_per_s"] for one in bounds), bounds[0]["weight_bytes_per_token"] / 1e6, states / 1e6]
    for said, value in zip((*rates, *sizes), values, strict=True):
        check_rounded(said, value)
