"""The benchmarks run to their end and write what they say; what they measure here means nothing."""

import json
import os
import stat
import subprocess
import sys
from importlib.util import find_spec
from statistics import median

import pytest
from conftest import ROOT

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


def run_decode(python, out, *arguments):
    command = [*python, str(ROOT / "benchmarks" / "decode.py"), "--device", "cpu", "--out", str(out), *arguments]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # several would starve beside another busy process
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=one_thread)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"date", "machine", "versions", "command", "rows", "ratios"} <= result.keys()
    assert {"cpu", "cores", "threads", "gpu", "memory_bytes"} == result["machine"].keys()
    assert result["machine"]["threads"] == 1
    assert {"python", "torch", "llama_bench"} <= result["versions"].keys()
    assert result["command"].endswith(" ".join(arguments))
    for row in result["rows"]:
        assert row["name"] in done.stdout
    return result, done


@pytest.mark.slow
@pytest.mark.quick
def test_decode_of_a_shape(python, tmp_path):
    result, _ = run_decode(python, tmp_path / "new" / "out.json", "--smoke")
    assert [(row["name"], row["context"]) for row in result["rows"]] == [("tiny eager bf16", n) for n in (0, 16, 600)]
    assert [row["beyond_context"] for row in result["rows"]] == [False, False, True]
    for row in result["rows"]:
        assert row["bytes_per_s"] == pytest.approx((row["weight_bytes"] + row["kv_bytes"]) / row["step_s"])
        assert row["share"] == pytest.approx(row["bytes_per_s"] / result["copy_bytes_per_s"])
        assert row["tokens_per_s"] == pytest.approx(1 / row["step_s"])
    # Keys and values of 2 layers, 3 heads of width 10, in bf16, halfway through 5 steps.
    assert [row["kv_bytes"] for row in result["rows"]] == [2 * 2 * 3 * 10 * 2 * (n + 3) for n in (0, 16, 600)]
    assert result["rows"][0]["growth"] is None and result["rows"][2]["growth"] is not None


@pytest.mark.slow
@pytest.mark.quick
def test_decode_beside_llama_bench(python, tiny, tmp_path):
    program, gguf = tmp_path / "llama-bench", tmp_path / "some.gguf"
    program.write_text(LLAMA_BENCH.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    gguf.touch()
    arguments = ["--checkpoint_path", str(tiny("llama-mha")[2]), "--rounds", "3", "--prompt_tokens", "19"]
    arguments += ["--new_tokens", "4", "--llama_bench", str(program), "--gguf", str(gguf)]
    result, done = run_decode(python, tmp_path / "out.json", *arguments)
    assert "without transformers" in done.stderr  # a converted checkpoint is nothing that it could load

    assert {"dram", "cache"} == result["read_bytes_per_s"].keys() and "plain reads" in done.stdout
    assert find_spec("matplotlib") is None or (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    ours, llama = result["rows"]
    assert (ours["name"], llama["name"]) == ("fastpath eager bf16", "llama.cpp some.gguf")
    assert (llama["decode_tokens_per_s"], llama["prefill_tokens_per_s"]) == (50, 200)  # the better of each
    assert result["versions"]["llama_bench"] == "abc (build 7)"
    [ratio] = result["ratios"]
    for kind, peer in (("decode", 50), ("prefill", 200)):
        assert len(ours[f"{kind}_rounds"]) == 3
        assert ours[f"{kind}_tokens_per_s"] == median(ours[f"{kind}_rounds"])
        assert ratio[kind] == pytest.approx(median(rate / peer for rate in ours[f"{kind}_rounds"]))


@pytest.mark.full  # nine graphs are compiled
def test_what_a_step_costs(python, tiny, tmp_path):
    """Differences and ratios are the medians of the rounds' own."""
    program, out = str(ROOT / "benchmarks" / "step.py"), tmp_path / "out.json"
    arguments = ["--checkpoint_path", tiny("llama-mha")[2], "--formats", "bf16", "--context", "90", "--cache", "128"]
    command = [*python, program, *map(str, arguments), "--rounds", "3", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["bf16"]
    rounds = found["rounds"]
    assert len(rounds) == 3 and found["cache"] == median(t["short, long cache"] / t["short"] for t in rounds)
    assert found["further_kv_bytes"] == 2 * 2 * 6 * 10 * 2 * (90 - 20)  # 2 layers, 6 heads of width 10
    for t in rounds:
        t["growth"] = (t["long"] - t["short, long cache"]) / t["short, long cache"]
    growth = median(t["growth"] for t in rounds) * found["weight_bytes"] / found["further_kv_bytes"]
    assert found["context"] == pytest.approx(growth)
    assert "8 rows" in done.stdout and "top-p 0.9, rows: 8" in done.stdout
    done = subprocess.run([*command, "--cache", "50"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "below --cache 50" in done.stderr


@pytest.mark.slow
def test_what_speculation_is_worth(python, tiny, tmp_path):
    program = str(ROOT / "benchmarks" / "speculation.py")
    command = [*python, program, "--checkpoint_path", str(tiny("llama-mha")[2]), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "has no chat template" in done.stderr


@pytest.mark.slow
def test_gpu_kernels(python, tmp_path):
    """Tiny sizes in Triton's interpreter, tuning included, whose result is then found."""
    pytest.importorskip("triton")
    command = [*python, str(ROOT / "benchmarks" / "gpu_kernels.py"), "--smoke", "--out", str(tmp_path / "out.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([*command, "--tune"], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["copy_bytes_per_s"] > 0 and all(row["ours_s"] > 0 for row in result["rows"])
    kinds = [row["name"].split(",")[0] for row in result["rows"]]
    assert len([kind for kind in kinds if kind.endswith("gate_up 64x48")]) == 3 * 2
    assert {"attention", "mask", "packing int4: gate_up"} <= set(kinds)
    [tuned] = (tmp_path / "fastpath").glob("triton-*.json")
    assert set(json.loads(tuned.read_text())) == {
        f"{bits} bits, groups of {group}, 2 x 24 x 64" for bits, group in ((16, 0), (8, 32), (4, 32))
    }


@pytest.mark.slow
@pytest.mark.quick
def test_decode_of_a_shape_in_every_format(python, tmp_path):
    result, _ = run_decode(python, tmp_path / "out.json", "--smoke", "--formats", "int8", "int4")
    names = [row["name"] for row in result["rows"]]
    assert names == ["tiny eager int8"] * 3 + ["tiny eager int4"] * 3
    assert result["rows"][0]["weight_bytes"] > result["rows"][3]["weight_bytes"]
