"""The ladder runs to its end and writes what it says; what it measures here means nothing."""

import json
import signal
import sys
from statistics import median

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # last: a program there is called as a file here

import ladder

from cli import run_command

PROGRAM = str(ROOT / "benchmarks" / "ladder.py")
RATES = ("decode_tokens_per_s", "prefill_tokens_per_s")


def main(monkeypatch, *arguments):
    """The exit code of the command, in this process; what it starts runs on the CPU in one thread."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several would starve beside another busy process
    monkeypatch.setattr(sys, "argv", [PROGRAM, *map(str, arguments)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest needs its own handlers
    with pytest.raises(SystemExit) as end:
        run_command(ladder.main)
    return end.value.code or 0


def one_round(decode, prefill, compile_s=0.0):
    return {**dict(zip(RATES, (decode, prefill))), "compile_s": compile_s, "peak_memory_bytes": 5e8}


@pytest.mark.full
def test_three_eager_steps(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ladder.STEPS, "eager int8", ("bytes", "int8", ""))
    checkpoint, out = tiny("llama-mha")[2], tmp_path / "out.json"
    arguments = ["--checkpoint_path", checkpoint, "--rounds", 1, "--prompt_tokens", 19, "--new_tokens", 4]
    arguments += ["--steps", "eager int8", "bf16 eager", "float32 eager"]  # not the table's order
    assert main(monkeypatch, "--out", out, *arguments) == 0
    stdout, stderr = capsys.readouterr()
    result = json.loads(out.read_text())

    assert [row["name"] for row in result["steps"]] == ["float32 eager", "bf16 eager", "eager int8"]
    first, second, third = result["steps"]
    assert (checkpoint.parent / f"{checkpoint.name}-int8-g32" / "config.json").exists()
    assert third["weight_bytes_per_token"] < 0.65 * second["weight_bytes_per_token"]  # 17/32 and padding
    for row in (first, second, third):
        [of_round] = row["rounds"]
        assert min(row[rate] for rate in RATES) > 0 and row["peak_memory_bytes"] > 1e7 and row["compile_s"] == 0
        assert {key: row[key] for key in of_round} == of_round
    assert first["weight_bytes_per_token"] == 2 * second["weight_bytes_per_token"]
    # Keys and values of 2 layers, 6 heads of width 10; after 5 tokens come 4 steps that read 6, 7, 8 and 9 positions.
    assert first["kv_bytes_per_token"] == 2 * 2 * 6 * 10 * 4 * 7.5
    for kind, rate in zip(("decode", "prefill"), RATES):
        assert first[f"{kind}_over_before"] is None
        assert second[f"{kind}_over_before"] == pytest.approx(second[rate] / first[rate])
        assert f"{second[rate]:.1f}" in stdout and f"{second[f'{kind}_over_before']:.2f}" in stdout
    assert (first["model"], result["prompt_tokens"], result["new_tokens"]) == (checkpoint.name, 19, 4)


@pytest.mark.slow
def test_a_step_that_fails_ends_the_ladder(tiny, tmp_path, monkeypatch, capsys):
    arguments = ["--checkpoint_path", tiny("llama-mha")[2], "--prompt_tokens", 999, "--steps", "bf16 eager"]
    assert main(monkeypatch, "--out", tmp_path / "out.json", *arguments, "--new_tokens", 4) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("ladder.py: error: ") and "the prompt has 999 tokens, the context is 256" in line


def test_gains_are_medians_of_the_rounds_own_ratios():
    """A round in which the machine was slow changes the rates, but not the gains."""
    a, b, c = list(ladder.STEPS)[:3]
    rates = {a: [(10, 100), (20, 300), (30, 100)], b: [(20, 50), (20, 150), (90, 50)]}
    rounds = {name: [one_round(*pair) for pair in pairs] for name, pairs in rates.items()}
    rounds[c] = [one_round(30, 200, 60.0), one_round(60, 450, 6.0), one_round(45, 200, 7.0)]
    first, second, third = ladder.summary(rounds)
    assert [row["name"] for row in (first, second, third)] == [a, b, c]
    assert [row["decode_tokens_per_s"] for row in (first, second, third)] == [20, 20, 45]
    assert second["decode_over_before"] == median((20 / 10, 20 / 20, 90 / 30))
    assert third["decode_over_before"] == median((30 / 20, 60 / 20, 45 / 90))
    assert third["prefill_over_before"] == median((200 / 50, 450 / 150, 200 / 50))
    assert third["compile_s"] == 7 and third["rounds"] == rounds[c]
