"""The command: perplexity and distance on a text, and what it refuses."""

import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT


def run(*args):
    command = [sys.executable, str(ROOT / "evaluate.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command(default_checkpoint, tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 12 + "Ende: süß.\n", encoding="utf-8")
    done = run("--text", text, "--reference_checkpoint_path", default_checkpoint, "--json", "--window", 50)
    result = json.loads(done.stdout)
    assert set(result) >= {"perplexity", "bits_per_byte", "kl_nats", "kl_ci95", "top1_agreement", "top1_ci95", "tokens"}
    assert result["kl_nats"] == 0 and result["top1_agreement"] == 1 and 1 < result["perplexity"] < 20
    bits = math.log2(result["perplexity"]) * result["tokens"]
    assert result["bits_per_byte"] == pytest.approx(bits / (len(text.read_bytes()) - len("The")))
    assert result["kl_ci95"] is not None
    one = run("--text", text, "--reference_checkpoint_path", default_checkpoint, "--json", "--max_tokens", 9)
    assert json.loads(one.stdout)["kl_ci95"] is None, "a single window has no interval"
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for args, why in (
        (["--text", tmp_path / "empty"], "has 0 tokens; at least 2 are needed"),
        (["--text", tmp_path / "binary"], "cannot be read"),
        (["--text", text, "--stride", 60, "--window", 50], "--stride 60 is no less than the window of 50"),
        (["--text", text, "--window", 1], "must be at least 2"),
        (["--text", text, "--limit", 3], "are about --tasks"),
        (["--text", text, "--reference_checkpoint_path", tiny("llama-mha")[2]], "vocabularies of 49152 and 131"),
    ):
        bad = run(*args)
        assert bad.returncode == 2 and why in bad.stderr and len(bad.stderr.splitlines()) == 1, bad.stderr
