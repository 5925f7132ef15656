"""The benchmarks run to their end and write correct files. The rates measured here mean nothing."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from conftest import INTERPRET, ROOT, random_prompts

sys.path.append(str(ROOT / "benchmarks"))  # last: a program there is called as a file here

import decode
import ladder
import life
import measure
import speculation

from cli import UserError
from drafts.retrieval import RetrievalDraft
from engine import StepFunctions

pytestmark = pytest.mark.slow

# A stand-in for a peer's llama-bench: one prefill (n_prompt) and one decode test (n_gen), whose rates depend on the
# setting. Of ik_llama.cpp, with -rtr, one setting fails.
LLAMA_BENCH = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["-r"] == options["-t"] == "1" and options["-o"] == "json", options
p, n = int(options["-p"]), int(options["-n"])
fa, rtr = int(options["-fa"]), int(options.get("-rtr", 0))
if fa and rtr:
    sys.exit("assertion failed")
about = {{"build_commit": "abc", "build_number": 7, "model_type": "llama tiny"}}
tests = [(p, 0, 100.0 + 100 * fa + 300 * rtr), (0, n, 50.0 - 10 * fa - 20 * rtr)]
print(json.dumps([about | {{"n_prompt": p, "n_gen": n, "avg_ts": rate}} for p, n, rate in tests]))
"""

# A stand-in for llama-batched-bench.
LLAMA_BATCHED_BENCH = """#!{python}
import sys
assert " ".join(sys.argv[-8:-2]) == "-ntg 9 -npl 3 -c 147" or sys.argv[-1] == "--none", sys.argv
if sys.argv[-1] == "off":
    sys.exit("no V cache")
if sys.argv[-1] == "on":
    sys.stdout = sys.stderr  # as ik_llama.cpp
    print("|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |")
    print("|    40 |      9 |    3 |    147 |    1.472 |    81.50 |    2.204 |    12.25 |    3.676 |    40.00 |")
"""

# A stand-in for generate.py of another checkout: prefill takes half a second for each of four samples of 2 x 19 tokens.
OLD_GENERATE = """
import json, sys
assert sys.argv[sys.argv.index("--batch_size") + 1] == "2", sys.argv
rates = {"decode_tokens_per_s": 25.0, "prefill_tokens_per_s": 76.0, "time_to_first_token_s": 0.5, "recompiles": 0}
sizes = dict.fromkeys(("weight_bytes_per_token", "kv_bytes_per_token", "peak_memory_bytes"), 7)
print(json.dumps(rates | sizes | {"compile_s": 0.0}))
"""


def run_benchmark(python, name, out, *arguments, **environment):
    """Its JSON and what it printed. On the CPU, in one thread: several would starve beside another busy process."""
    command = [*python, str(ROOT / "benchmarks" / name), "--out", str(out), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["machine"].keys() == {"cpu", "cores", "threads", "gpu"} and result["machine"]["threads"] == 1
    assert "torch" in result["versions"] and len(result["date"]) == len("2026-11-21")
    assert result["command"].startswith(f"python benchmarks/{name} --out ")
    return result, done


# ---------------------------------------------------------------- what they share


def test_turns():
    """Each round begins with another contestant, and the first round is warm-up."""
    went = []

    def run(name):
        went.append(name)
        return len(went)

    found = measure.take_turns({name: lambda name=name: run(name) for name in "abc"}, rounds=2)
    assert "".join(went) == "cab" + "abc" + "bca" and found == {"a": [4, 9], "b": [5, 7], "c": [6, 8]}


def test_the_table(capsys):
    rows = [{"name": "a", "gain": 1.234, "gain_spread": [1, 2]}, {"name": "long", "gain": None, "more": 3}]
    measure.print_table(rows, {"name": "", "gain": ".2f", "gain_spread": ".1f"})
    head, line, first, second = capsys.readouterr().out.splitlines()
    assert head == "| name | gain | gain_spread |" and set(line) == set("|- ")
    assert " ".join(first.split()) == "| a | 1.23 | 1.0-2.0 |" and " ".join(second.split()) == "| long | | |"


def test_prefill_leaves_the_first_sample_out(tmp_path, capsys):
    """Four samples of 2 rows with 50 tokens. The first takes 5 s and the others 1 s each."""
    result = {"recompiles": 2, "time_to_first_token_s": 5.0, "prefill_tokens_per_s": 400 / 8}
    (tmp_path / "generate.py").write_text(f"import json; print(json.dumps({result}))")
    found = measure.run_generate(tmp_path, [], prompt=50, new=1, rows=2)
    assert found["prefill_tokens_per_s"] == pytest.approx(100)
    assert "2 graphs were compiled while it was measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["decode_cpu", "ladder_cpu", "speculation_cpu", "draft_layer_cpu", "experts_cpu", "ramp", "life_1.5b_cpu"]
)
def test_charts_are_drawn_from_the_measurements_that_there_are(name, tmp_path):
    pytest.importorskip("matplotlib")
    import charts

    path = tmp_path / f"{name}.json"
    shutil.copy(ROOT / "benchmarks" / "results" / f"{name}.json", path)
    charts.draw(path)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


# ---------------------------------------------------------------- each of them


@pytest.mark.slow
def test_decode_beside_llama_bench_and_another_checkout(python, tiny, tmp_path):
    program, gguf, old = tmp_path / "llama-bench", tmp_path / "tiny.BF16.gguf", tmp_path / "old"
    program.write_text(LLAMA_BENCH.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    gguf.touch()
    old.mkdir()
    (old / "generate.py").write_text(OLD_GENERATE)
    arguments = ["--checkpoint_path", str(tiny("llama-mha")[2]), "--rounds", "2", "--prompt_tokens", "19", "--rows", 2]
    arguments += ["--new_tokens", "4", "--llama_bench", program, "--ik_llama_bench", program, "--gguf", gguf]
    result, done = run_benchmark(python, "decode.py", tmp_path / "out.json", *arguments, "--old", old)
    rows = {row["name"]: row for row in result["rows"]}  # without transformers, which cannot load our checkpoints
    # The better of all settings: flash attention helps prefill, and -rtr as well.
    peers = {"old eager bf16": (25, 76), "llama.cpp BF16": (50, 200), "ik_llama.cpp BF16": (50, 400)}
    assert list(rows) == ["fastpath eager bf16", *peers] and "left out: " in done.stderr
    for name in list(peers)[1:]:
        assert (rows[name]["decode_tokens_per_s"], rows[name]["prefill_tokens_per_s"]) == peers[name]
    ours = rows["fastpath eager bf16"]
    assert ours["weight_bytes_per_token"] > 0 and result["read_bytes_per_s"]["dram"] > 0
    peers["the best peer"] = 50, 400
    for ratio, (name, rates_of_peer) in zip(result["ratios"], peers.items(), strict=True):
        assert (ratio["ours"], ratio["peer"]) == ("fastpath eager bf16", name)
        for kind, peer in zip(("decode", "prefill"), rates_of_peer):
            rates = [one[f"{kind}_tokens_per_s"] for one in ours["rounds"]]
            assert len(rates) == 2 and ours[f"{kind}_tokens_per_s"] == median(rates)
            assert ratio[kind] == pytest.approx(median(rates) / peer)
            assert ratio[f"{kind}_spread"] == pytest.approx([min(rates) / peer, max(rates) / peer])


def test_batched_peers(tmp_path):
    """The table of llama-batched-bench is read. It fails in one setting and prints no row in another."""
    program = tmp_path / "llama-batched-bench"
    program.write_text(LLAMA_BATCHED_BENCH.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    args = SimpleNamespace(prompt_tokens=40, new_tokens=9, rows=3)
    found = measure.run_batched_bench(args, program, Path("m.gguf"), ["-fa on", "-fa off", "--none"])
    assert found == {"-fa on": {measure.PREFILL: 81.5, measure.DECODE: 12.25, "build": None}}


def test_the_best_peer_has_as_many_bits():
    def rates(*pairs):
        return [{measure.DECODE: decode, measure.PREFILL: prefill} for decode, prefill in pairs]

    rounds = {"fastpath eager int8": rates((30, 600), (40, 500)), "fastpath eager odd": rates((1, 1), (1, 1))}
    rounds |= {"llama.cpp Q8_0": rates((20, 300), (20, 300)), "ik_llama.cpp Q8_0": rates((10, 400), (10, 400))}
    rounds |= {"llama.cpp IQ4_NL": rates((90, 900), (90, 900))}
    [better, odd] = [row for row in decode.compare(rounds) if row["peer"] == "the best peer"]
    assert (better["decode_peer"], better["prefill_peer"]) == ("llama.cpp Q8_0", "ik_llama.cpp Q8_0")
    assert (better["decode"], better["prefill"]) == (1.75, 1.375) and odd["decode_peer"] == "llama.cpp IQ4_NL"


def test_what_speculation_gains(tiny_model):
    """Every draft sees every prompt once, after a warm-up that does not count, and finds the tokens of plain steps."""
    prompts, drafts = random_prompts([9, 14, 11]), {"lookup": ([RetrievalDraft()], 3)}
    drafts["auto"] = [RetrievalDraft()], None
    plain, lookup, auto = speculation.compare(tiny_model("llama-mha"), StepFunctions(), drafts, prompts, 24)
    assert [row["draft"] for row in (plain, lookup, auto)] == ["plain", "lookup", "auto"]
    for row in (plain, lookup, auto):
        assert row["same_text"] == row["of"] == len(row["rates"]) == 3
        assert row["over_plain"] == median(a / b for a, b in zip(row["rates"], plain["rates"]))
    # All tokens but the first of each prompt are the model's passes' own or proposed ones that were accepted.
    assert lookup["steps"] + lookup["plain_steps"] <= 3 * 23
    assert "mean_accepted_tokens" in lookup and "mean_accepted_tokens" not in plain


def test_the_life_of_a_token(python, tmp_path, checkpoints):
    """All hops of a plain model are measured in all parts, and what they do not account for is the rest of the time."""
    sizes = ["--rounds", 2, "--prompt_tokens", 40, "--new_tokens", 6, "--checkpoint_path", checkpoints["int4"]]
    result, done = run_benchmark(python, "life.py", tmp_path / "out.json", *sizes)
    found = {name: [hop["key"] for hop in part["hops"]] for name, part in result["parts"].items()}
    # Neither delta nets, nor experts, nor a shadow of the output head; and one thread waits for no other.
    others = {"recurrent", "experts", "Transformer.drawable_logits", "shadow", "head", "waiting"}
    every = [hop.key or hop.function for hop in life.PASS]
    usual = [key for key in every if key not in others]
    of_prompt = ("Tokenizer.encode", "Engine._read", "Engine._prefill")
    of_step = ("Engine._decode", "PlainDecoding.step")
    assert found["step"] == [key for key in usual if key not in of_prompt]
    assert found["prompt"] == [key for key in usual if key not in of_step]
    assert found["request"] == [hop.key or hop.function for hop in life.REQUEST]
    for part in result["parts"].values():
        us = [hop["us"] for hop in part["hops"]]
        assert min(us) > 0 and part["rest_us"] == pytest.approx(part["wall_us"] - sum(us))
        with_clock_us = part["wall_us"] + part["clock_us"]
        assert sum(us) <= with_clock_us * (1 + 1e-9), "no time counts twice"
    D, F, L = (result["letters"][letter] for letter in ("D", "F", "blocks"))
    step = {hop["key"]: hop["bytes"] for hop in result["parts"]["step"]["hops"]}
    assert step["norm"] == 4 * L * D * 2 and step["up"] > L * 2 * F * D / 2 and not list(tmp_path.glob("*.log"))
    assert f"| {'Engine._decode':<29} | engine.py" in done.stdout


def test_means_are_of_the_pairs_in_the_middle():
    """Of four pairs the fastest and the slowest do not count, nor does a hop that none of them has."""
    hops = [life.Hop("a", "a.py", ""), life.Hop("b", "b.py", "", "c"), life.Hop("d", "d.py", "")]
    pairs = [
        (1.0, 1.5, {"a": 0.5, "c": 0.25}),
        (9.0, 9.0, {"a": 9.0}),
        (3.0, 3.5, {"a": 1.5, "c": 0.75}),
        (0.5, 0.5, {}),
    ]
    found = life.summary(hops, pairs, {"c": 7.4})
    assert [(row["key"], row["us"], row["bytes"]) for row in found["hops"]] == [("a", 1e6, 0), ("c", 5e5, 7)]
    assert (found["wall_us"], found["rest_us"], found["clock_us"]) == (2e6, 5e5, 5e5)
    assert (found["rest_share"], found["clock_share"]) == (0.25, 0.25)


def test_all_that_needs_a_gpu(python, tmp_path):
    """Tiny sizes in Triton's interpreter. A test that fails is reported, and the parts after it go on."""
    pytest.importorskip("triton")
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_good():\n    pass\n\n\ndef test_bad():\n    assert 1 == 2, 'not equal'\n")
    out = tmp_path / "out.json"
    result, done = run_benchmark(python, "gpu.py", out, "--smoke", "--tests", tests, XDG_CACHE_HOME=str(tmp_path))
    parts = result["parts"]
    assert list(parts) == ["environment", "tests", "tuning", "kernels", "models"]
    failed = {name: [row["name"] for row in part["rows"] if "error" in row] for name, part in parts.items()}
    [bad] = failed.pop("tests")
    assert bad.endswith("test_two.py::test_bad") and not any(failed.values()), done.stderr
    assert [name for name, part in parts.items() if part["error"]] == ["tests"]
    assert parts["tests"]["counts"] == {"passed": 1, "failed": 1}
    assert "not equal" in out.with_suffix(".tests.log").read_text()
    [can] = parts["environment"]["rows"]
    rows = {row["name"]: row for part in ("kernels", "models") for row in parts[part]["rows"]}
    for row in rows.values():
        unit = "bytes" if "bytes" in row else "flops"
        assert row["share"] == pytest.approx(row[unit] / row["s"] / can[f"{unit}_per_s"])
    assert {"attention, decode at 70", "attention, prefill of 40", "int4 gate_up 44x152, 3 rows"} <= rows.keys()
    # A model of 2 layers, 3 heads of width 10, in bf16. The only step reads context + 2 positions.
    short, long = (rows[f"tiny int4 at {n}, ours"]["bytes"] for n in (0, 40))
    assert long - short == 2 * 2 * 3 * 10 * 2 * 40
    [tuned] = (tmp_path / "fastpath").glob("triton-*.json")
    tiles = {row["key"]: row["tiles"] for row in parts["tuning"]["rows"]}
    assert json.loads(tuned.read_text()) == tiles and "4 bits, groups of 32, 2 x 76 x 44" in tiles
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert any(line.startswith("| tiny int4 at 40, ours") for line in printed)
    assert printed[-1].startswith("- tests, ") and printed[-1].endswith("::test_bad: AssertionError: not equal")


def test_parts_of_a_gpu_run_that_fail_or_have_no_time(python, tmp_path):
    pytest.importorskip("triton")
    with INTERPRET:
        import gpu

    def fails():
        yield {"s": 1.0}
        raise ValueError("a kernel fails")

    rows = {}
    gpu.run_works({"one": fails, "two": lambda: iter([{"s": 2.0}])}, lambda row: rows.update({row["name"]: row}))
    assert "in fails" in rows["one"].pop("traceback")
    assert rows["one"] == {"name": "one", "s": 1.0, "error": "a kernel fails"}
    assert rows["two"] == {"name": "two", "s": 2.0}

    start = time.monotonic()
    result, done = run_benchmark(python, "gpu.py", tmp_path / "out.json", "--smoke", "--minutes", 0.01)
    assert time.monotonic() - start < 60
    assert all("its time was over" in part["error"] and not part["rows"] for part in result["parts"].values())
    assert done.stdout.count("its time was over") == 5


# ---------------------------------------------------------------- the ladder


def climb(monkeypatch, out, *arguments):
    """What the ladder writes. What it starts runs on the CPU in one thread."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "ladder.py"), "--out", *map(str, (out, *arguments))])
    ladder.main()
    return json.loads(out.read_text())


@pytest.mark.full
def test_three_eager_steps(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ladder.STEPS, "eager int8", ("bytes", "int8", ""))
    checkpoint = tiny("llama-mha")[2]
    arguments = ["--checkpoint_path", checkpoint, "--rounds", 1, "--prompt_tokens", 19, "--new_tokens", 4]
    arguments += ["--steps", "eager int8", "bf16 eager", "float32 eager"]  # not the table's order
    result, stdout = climb(monkeypatch, tmp_path / "out.json", *arguments), capsys.readouterr().out
    assert [row["name"] for row in result["steps"]] == ["float32 eager", "bf16 eager", "eager int8"]
    first, second, third = result["steps"]
    assert third["weight_bytes_per_token"] < 0.65 * second["weight_bytes_per_token"]  # 17/32 and padding
    for row in (first, second, third):
        [of_round] = row["rounds"]
        assert isinstance(row[measure.DECODE], float) and isinstance(row[measure.PREFILL], float)  # of a busy machine
        assert row["compile_s"] == 0
        assert row["peak_memory_bytes"] > 1e7 and of_round.items() <= row.items()
    assert first["weight_bytes_per_token"] == 2 * second["weight_bytes_per_token"]
    for kind, rate in (("decode", measure.DECODE), ("prefill", measure.PREFILL)):
        assert first[f"{kind}_over_before"] is None
        assert second[f"{kind}_over_before"] == pytest.approx(second[rate] / first[rate])
        assert f"{second[rate]:.1f}" in stdout and f"{second[f'{kind}_over_before']:.2f}" in stdout
    assert (first["model"], result["prompt_tokens"], result["new_tokens"]) == (checkpoint.name, 19, 4)


def test_a_step_that_fails_ends_the_ladder(tiny, tmp_path, monkeypatch):
    arguments = ["--checkpoint_path", tiny("llama-mha")[2], "--prompt_tokens", 999, "--steps", "bf16 eager"]
    with pytest.raises(UserError, match="the prompt has 999 tokens, the context is 256"):
        climb(monkeypatch, tmp_path / "out.json", *arguments, "--new_tokens", 4)


def test_gains_are_medians_of_the_rounds_own_ratios():
    """A round in which the machine was slow changes the rates, but not the gains over the step before."""
    a, b, c = list(ladder.STEPS)[:3]
    rates = {a: [(10, 100), (20, 300), (30, 100)], b: [(20, 50), (20, 150), (90, 50)]}
    rates[c] = [(30, 200), (60, 450), (45, 200)]
    rounds = {name: [{measure.DECODE: d, measure.PREFILL: p} for d, p in pairs] for name, pairs in rates.items()}
    rows = ladder.summary(rounds)
    assert [row["name"] for row in rows] == [a, b, c] and rows[2]["rounds"] == rounds[c]
    assert [row["decode_tokens_per_s"] for row in rows] == [20, 20, 45]
    assert [row["decode_over_before"] for row in rows] == [None, 2, 1.5]
    assert rows[2]["prefill_over_before"] == median((200 / 50, 450 / 150, 200 / 50))


# ---------------------------------------------------------------- the server

# A stand-in for a peer's llama-server, which streams the tokens that it is asked for without a model.
QUICK_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["-m"] == "tiny.gguf" and options["-np"] == "8" and int(options["-c"]) >= 8 * 60, options

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, events):
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

    def do_GET(self):
        self.answer([])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n, token = body["max_tokens"], {{"choices": [{{"text": "a"}}]}}
        self.answer([token] * n + [{{"choices": [], "usage": {{"completion_tokens": n}}}}])

ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def llama_server(tmp_path):
    program = tmp_path / "llama-server"
    program.write_text(QUICK_SERVER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_serving(python, tmp_path, checkpoints):
    sizes = ["--prompt_tokens", 5, "--new_tokens", 6, "--long_prompt", 60, "--history", 30, "--prefill_chunk", 16]
    others = ["--checkpoint_path", checkpoints[None], "--format", "bf16", "--rounds", 1]
    program = llama_server(tmp_path)
    others += ["--llama_server", program, "--ik_llama_server", program, "--ik_llama_options=-no-fa 1"]
    result, done = run_benchmark(python, "serving.py", tmp_path / "out.json", *sizes, *others, "--gguf", "tiny.gguf")
    names = {f"{server} {n}" for server in ("fastpath", "llama.cpp", "ik_llama.cpp") for n in (1, 8)}
    assert result["servers"].keys() == names and len(result["ratios"]) == 2 * (4 + 4)
    assert all(server["tokens_per_s"] > 0 for server in result["servers"].values())
    assert result["second_turn"]["reused_s"] > 0 and result["short_beside_long"]["chunk_s"] > 0
    assert sorted(os.listdir(tmp_path)) == ["llama-server", "out.json"]


@pytest.mark.full
def test_the_load_test(python, tmp_path, checkpoints):
    """A server has 8 rows, and 4 requests for each may wait. So of 60 users 20 are always refused, by ours."""
    sizes = ["--users", 2, 60, "--seconds", 4, "--prompt_words", 2, "--new_tokens", 3, "--max_seq_length", 400]
    others = ["--checkpoint_path", checkpoints[None], "--format", "bf16", "--gguf", "tiny.gguf"]
    others += ["--llama_server", llama_server(tmp_path)]
    result, done = run_benchmark(python, "load_test.py", tmp_path / "out.json", *sizes, *others)
    assert result["servers"].keys() == {"fastpath", "llama.cpp"}
    for name, (few, many) in result["servers"].items():
        assert (few["users"], many["users"]) == (2, 60) and few["failures"] == many["failures"] == 0, done.stderr
        assert few["refusals"] == 0 and few["refusal_p99_s"] is None and (many["refusals"] > 0) == (name == "fastpath")
        assert many["refused_share"] == many["refusals"] / (many["refusals"] + many["answers"])
        for row in (few, many):
            assert 4 * row["answers_per_s"] == row["answers"] > 0
            assert 2 <= row["tokens_per_s"] / row["answers_per_s"] <= 30  # tokens of each
            for kind in ("first", "later"):
                assert 0 < row[f"{kind}_token_p50_s"] <= row[f"{kind}_token_p95_s"]
    assert result["servers"]["fastpath"][1]["refusal_p99_s"] > 0
