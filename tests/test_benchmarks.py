"""The benchmarks run to their end and write correct files. The rates measured here mean nothing."""

import json
import os
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from statistics import median

import pytest
from conftest import ROOT, random_prompts

sys.path.insert(0, str(ROOT / "benchmarks"))

import measure
import speculation
import trees

from cli import UserError
from engine import StepFunctions
from speculative import LookupDraft

PNG = b"\x89PNG\r\n\x1a\n"

# A stand-in for llama.cpp's llama-bench: one prefill (n_prompt) and one decode test (n_gen) for each of -fa 0,1.
LLAMA_BENCH = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["-r"] == options["-t"] == "1" and options["-fa"] == "0,1" and options["-o"] == "json", options
p, n = int(options["-p"]), int(options["-n"])
about = {{"build_commit": "abc", "build_number": 7, "model_type": "llama tiny"}}
tests = [(p, 0, 100.0), (0, n, 50.0), (p, 0, 200.0), (0, n, 40.0)]
print(json.dumps([about | {{"n_prompt": p, "n_gen": n, "avg_ts": rate}} for p, n, rate in tests]))
"""


def run_benchmark(python, name, out, *arguments, **environment):
    """The JSON that a benchmark writes and its output. It has one thread: several would starve on a busy machine."""
    command = [*python, str(ROOT / "benchmarks" / name), "--out", str(out), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"date", "machine", "versions", "command", "read_bytes_per_s"} <= result.keys()
    assert {"cpu", "cores", "threads", "gpu", "memory_bytes"} == result["machine"].keys()
    assert result["machine"]["threads"] == 1 and {"python", "torch"} <= result["versions"].keys()
    assert result["read_bytes_per_s"].keys() == {"dram", "cache"}
    assert result["command"].startswith(f"python benchmarks/{name} --out out.json")
    return result, done


# ---------------------------------------------------------------- what they share


def test_turns():
    """Each round begins with another program. One that fails in a later round is left out of all rounds."""
    went = []

    def run(name):
        went.append(name)
        if went.count("b") == 3 and name == "b":
            raise UserError("too little memory")
        return len(went)

    found, left_out = measure.take_turns({name: lambda name=name: run(name) for name in "abcd"}, rounds=3)
    assert "".join(went) == "abcd" + "abcd" + "bcda" + "cda"  # the first round is warm-up
    assert found == {"a": [5, 12, 15], "c": [7, 10, 13], "d": [8, 11, 14]} and left_out == {"b": "too little memory"}


def test_turns_of_which_none_ends():
    def fail():
        raise UserError("no such kernel")

    with pytest.raises(UserError, match="nothing ran to its end; a: no such kernel"):
        measure.take_turns({"a": fail}, rounds=3)


def test_a_ratio_is_the_median_of_the_rounds_own():
    """A round in which the machine was slow changes the rates, but not the ratios."""
    ratio = measure.Ratio.of([10, 2, 30], [5, 1, 10])
    assert ratio == measure.Ratio(2, 2, 3) and str(ratio) == "2.00x (2.00-3.00)"
    assert ratio.fields("decode") == {"decode": 2, "decode_spread": [2, 3]}


@pytest.mark.parametrize(
    "argument, shown",
    [
        (str(ROOT / "benchmarks" / "ladder.py"), "benchmarks/ladder.py"),
        ("/home/somebody/models/m.gguf", "m.gguf"),
        ("--out=/home/a=b/c.json", "--out=c.json"),
        ("~/models/m", "m"),
        ("bf16 eager", "bf16 eager"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_the_command_shows_no_absolute_path(argument, shown):
    assert measure.public(argument) == shown


def test_how_a_program_failed_is_reported(tmp_path):
    """A killed run is reported with its signal, one that ended in a traceback with the last line."""
    program = tmp_path / "generate.py"
    program.write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match="ended by signal 9"):
        measure.run_program(program)
    program.write_text("raise RuntimeError('no kernel')")
    with pytest.raises(UserError, match="^RuntimeError: no kernel$"):
        measure.run_program(program)
    program.write_text("import sys; sys.exit('generate.py: error: no such file')")
    with pytest.raises(UserError, match="^no such file$"):
        measure.run_program(program)


def test_prefill_leaves_the_first_sample_out(tmp_path, capsys):
    """Four samples of 2 rows with 50 tokens. The first takes 5 s and the others 1 s each."""
    result = {"samples": [{"token_ids": [7]}] * 8, "recompiles": 2, "time_to_first_token_s": 5.0}
    result["prefill_tokens_per_s"] = 400 / 8
    (tmp_path / "generate.py").write_text(f"import json; print(json.dumps({result}))")
    found = measure.run_generate(tmp_path, "", prompt=50, new=1, samples=4, rows=2)
    assert found["warm_prefill_tokens_per_s"] == pytest.approx(100)
    assert "2 graphs were compiled while it was measured" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds 1 tokens after 50, not 2; take fewer --new_tokens"):
        measure.run_generate(tmp_path, "", prompt=50, new=2, samples=4)


@pytest.mark.parametrize("name, key", [("decode", "ratios"), ("ladder", "steps")])
def test_charts_are_drawn_from_any_measurements(name, key, tmp_path):
    module, path = __import__(name), tmp_path / f"{name}.json"
    shutil.copy(ROOT / "benchmarks" / "results" / f"{name}_cpu.json", path)
    if find_spec("matplotlib"):
        measure.draw_again(path, key, module.draw)
        assert path.with_suffix(".png").read_bytes().startswith(PNG)
    path.write_text("{}")
    with pytest.raises(UserError, match="was not written by this program"):
        measure.draw_again(path, key, module.draw)


def test_draw_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # which makes importing it fail
    panel = measure.Panel("a rate", [1.0], ["1"], [measure.BLUE])
    measure.save({}, tmp_path / "a.json", "a", draw=lambda _, path: measure.draw_bars(path, "", ["x"], [panel], ""))
    assert (tmp_path / "a.json").exists() and measure.NO_CHART in capsys.readouterr().err
    assert (ROOT / "requirements-bench.txt").read_text().count("matplotlib==") == 2  # one more line for Python 3.10


# ---------------------------------------------------------------- each of them


@pytest.mark.slow
@pytest.mark.quick
def test_shapes_in_every_format(python, tmp_path):
    out = tmp_path / "new" / "out.json"
    result, _ = run_benchmark(python, "shapes.py", out, "--smoke", "--formats", "bf16", "int4", "--device", "cpu")
    rows = result["rows"]
    assert [row["name"] for row in rows] == ["tiny eager bf16"] * 3 + ["tiny eager int4"] * 3
    assert [(row["context"], row["beyond_context"]) for row in rows[:3]] == [(0, False), (16, False), (600, True)]
    assert rows[0]["weight_bytes"] > rows[3]["weight_bytes"]
    for row in rows:
        assert row["bytes_per_s"] == pytest.approx((row["weight_bytes"] + row["kv_bytes"]) / row["step_s"])
        assert row["share"] == pytest.approx(row["bytes_per_s"] / result["copy_bytes_per_s"])
        assert row["tokens_per_s"] == pytest.approx(1 / row["step_s"])
    # Keys and values of 2 layers, 3 heads of width 10, in bf16; the middle one of 5 steps reads context + 3 positions
    # after the token that ended the prompt.
    assert [row["kv_bytes"] for row in rows[:3]] == [2 * 2 * 3 * 10 * 2 * (n + 4) for n in (0, 16, 600)]
    assert rows[0]["growth"] is None and rows[2]["growth"] is not None


@pytest.mark.slow
@pytest.mark.quick
def test_decode_beside_llama_bench(python, tiny, tmp_path):
    program, gguf = tmp_path / "llama-bench", tmp_path / "some.gguf"
    program.write_text(LLAMA_BENCH.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    gguf.touch()
    arguments = ["--checkpoint_path", str(tiny("llama-mha")[2]), "--rounds", "3", "--prompt_tokens", "19"]
    arguments += ["--new_tokens", "4", "--llama_bench", str(program), "--gguf", str(gguf), "--device", "cpu"]
    result, done = run_benchmark(python, "decode.py", tmp_path / "out.json", *arguments)
    assert "without transformers" in done.stderr  # transformers cannot load our checkpoints

    assert "plain reads" in done.stdout
    assert find_spec("matplotlib") is None or (tmp_path / "out.png").read_bytes().startswith(PNG)
    ours, llama = result["rows"]
    assert (ours["name"], llama["name"]) == ("fastpath eager bf16", "llama.cpp some.gguf")
    assert (llama["decode_tokens_per_s"], llama["prefill_tokens_per_s"]) == (50, 200)  # the better of both settings
    assert result["versions"]["llama_bench"] == "abc (build 7)"
    [ratio] = result["ratios"]
    for kind, peer in (("decode", 50), ("prefill", 200)):
        rates = ours[f"{kind}_rounds"]
        assert len(rates) == 3 and ours[f"{kind}_tokens_per_s"] == median(rates)
        assert ratio[kind] == pytest.approx(median(rates) / peer)
        assert ratio[f"{kind}_spread"] == pytest.approx([min(rates) / peer, max(rates) / peer])


@pytest.mark.slow
def test_what_a_step_costs(python, tiny, tmp_path):
    """Differences and ratios are computed in each round, and their medians are reported."""
    arguments = ["--checkpoint_path", tiny("llama-mha")[2], "--formats", "bf16", "--context", 90, "--cache", 140]
    result, done = run_benchmark(python, "step.py", tmp_path / "out.json", *arguments, "--rounds", 3, "--eager")
    found = result["bf16"]
    rounds = found["rounds"]
    assert len(rounds) == 3 and found["cache"] == median(t["short, long cache"] / t["short"] for t in rounds)
    assert found["further_kv_bytes"] == 2 * 2 * 6 * 10 * 2 * (90 - 20)  # 2 layers, 6 heads of width 10
    growth = median((t["long"] - t["short, long cache"]) / t["short, long cache"] for t in rounds)
    assert found["context"] == pytest.approx(growth * found["weight_bytes"] / found["further_kv_bytes"])
    assert "8 rows" in done.stdout and "top-p 0.9, rows: 8" in done.stdout


def test_what_speculation_is_worth(tiny_model, monkeypatch):
    """Every draft runs every prompt once after an uncounted warm-up, and gives the tokens of plain steps."""
    prompts, drafts = random_prompts([9, 14, 11]), {"lookup": (LookupDraft(), 3), "auto": (LookupDraft(), None)}
    plain, lookup, auto = speculation.measure(tiny_model("llama-mha"), StepFunctions(), drafts, prompts, 24)
    assert [row["draft"] for row in (plain, lookup, auto)] == ["plain", "lookup", "auto"]
    for row in (plain, lookup, auto):
        assert row["same_text"] == row["of"] == len(row["ratios"]) == 3
        assert row["over_plain"] == median(row["ratios"])
    # Except the first, every token comes from a pass of the model itself or is an accepted proposal.
    assert lookup["steps"] + lookup["plain_steps"] <= 3 * 23
    assert lookup["predicted_over_plain"] > 0 and "mean_accepted_tokens" not in plain


@pytest.mark.slow
def test_speculation_needs_a_chat_template(python, tiny, tmp_path):
    program = str(ROOT / "benchmarks" / "speculation.py")
    command = [*python, program, "--checkpoint_path", str(tiny("llama-mha")[2]), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "has no chat template" in done.stderr


@pytest.mark.slow
def test_gpu_kernels(python, tmp_path):
    """Tiny sizes in Triton's interpreter, with tuning, whose result is then used."""
    pytest.importorskip("triton")
    arguments = ["--smoke", "--tune"]
    result, _ = run_benchmark(python, "gpu_kernels.py", tmp_path / "out.json", *arguments, XDG_CACHE_HOME=str(tmp_path))
    assert result["copy_bytes_per_s"] > 0 and all(row["ours_s"] > 0 for row in result["rows"])
    kinds = [row["name"].split(",")[0] for row in result["rows"]]
    assert len([kind for kind in kinds if kind.endswith("gate_up 64x48")]) == 3 * 2
    assert {"attention", "mask", "packing int4: gate_up"} <= set(kinds)
    [tuned] = (tmp_path / "fastpath").glob("triton-*.json")
    assert set(json.loads(tuned.read_text())) == {
        f"{bits} bits, groups of {group}, 2 x 24 x 64" for bits, group in ((16, 0), (8, 32), (4, 32))
    }


# ---------------------------------------------------------------- two checkouts


def trees_arguments(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["trees.py", str(ROOT), str(ROOT), *map(str, arguments)])


def test_trees_take_turns(tmp_path, monkeypatch, capsys):
    """The order is old, new, new, old. A case that fails in one tree is left out, with the reason."""
    went, out = [], tmp_path / "out.json"

    def run_case(args, tree, options, rows):
        went.append(options.strip() or "bf16")
        if rows == 8 and len(went) == 4:
            raise UserError("out of memory")
        return {"decode": float(len(went)), "prefill": 100.0}

    monkeypatch.setattr(trees, "run_case", run_case)
    trees_arguments(monkeypatch, "--formats", "bf16", "--modes", "eager", "--rounds", 2, "--out", out)
    trees.main()
    one, eight = json.loads(out.read_text())["rows"]
    assert one["rates"]["old"]["decode"] == [1, 6] and one["rates"]["new"]["decode"] == [2, 5]
    assert one["decode_new_over_old"] == (2 / 1 + 5 / 6) / 2 and one["decode_new_over_old_spread"] == [5 / 6, 2]
    assert eight["error"] == "new: out of memory" and "decode_new_over_old" not in eight
    assert "1.42x (0.83-2.00)" in capsys.readouterr().out


@pytest.mark.slow
def test_trees(python, tiny, tmp_path):
    checkpoint = tiny("llama-mha")[2]
    arguments = [ROOT, ROOT, "--checkpoint_path", checkpoint, "--formats", "bf16", "int8", "--modes", "eager"]
    arguments += ["--rows", 2, "--rounds", 1, "--prompt_tokens", 19, "--new_tokens", 4, "--device", "cpu"]
    result, done = run_benchmark(python, "trees.py", tmp_path / "out.json", *arguments)
    assert [(row["format"], row["rows"]) for row in result["rows"]] == [("bf16", 2), ("int8", 2)]
    for row in result["rows"]:
        for kind in ("decode", "prefill"):
            [old], [new] = row["rates"]["old"][kind], row["rates"]["new"][kind]
            assert row[f"{kind}_new_over_old"] == pytest.approx(new / old) and f"{new:.1f}" in done.stdout
