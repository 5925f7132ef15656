"""Rooflines against torch's FLOP counter, and against the known numbers of a 176B model."""

import pytest
import torch
from conftest import ROOT, only_torch
from programs import main
from torch.utils.flop_counter import FlopCounterMode

import report
from cli import UserError
from formats import Quantization
from load import load_model
from quantize import quantize_checkpoint
from report import roofline, weight_bytes


@pytest.mark.parametrize("name", ["llama-gqa-biased", "qwen3-gqa", "bloom-7-post", "bloom-2-untied"])
def test_roofline_counts_what_a_decode_step_does(tiny, name):
    """The FLOPs are those that torch counts in one step, the bytes those of the loaded model."""
    # torch counts only its own operations, and not our kernels.
    model, context = load_model(tiny(name)[2], dtype=torch.float32, kernels="torch"), 37
    model.setup_caches(3, 64)
    token, at = torch.tensor([[5], [6], [7]]), torch.full((3, 1), context - 1)
    with only_torch(), FlopCounterMode(display=False) as counter:
        model(token, at)
    found = roofline(model.config, 2e9, torch.float32, context, rows=3)
    assert found["flops_per_token"] * 3 == counter.get_total_flops()
    weights, kv = weight_bytes(model, 3), model.kv_bytes([context] * 3)
    assert (found["weight_bytes_per_token"], found["kv_bytes_per_token"]) == (weights / 3, kv / 3)
    assert found["bound_tokens_per_s"] == pytest.approx(3 * 2e9 / (weights + kv))


def test_roofline_of_a_window_sees_no_further(tiny_model):
    config = tiny_model("mistral-window").config
    near, far = (roofline(config, 1e9, context=context) for context in (config.sliding_window, 200))
    assert near == far != roofline(config, 1e9, context=3)
    model = tiny_model("qwen2-sliding")
    config = model.config
    seen = 37 + 3 * config.sliding_window  # the first of four layers has no window
    assert model.kv_bytes([37]) == seen * 2 * config.n_kv_head * config.head_dim * 4


def test_a_roofline_needs_no_weights(tmp_path, tiny, capsys, monkeypatch):
    """The roofline of a config.json alone, Hugging Face's (BLOOM-176B) or ours, equals that beside its weights."""
    (tmp_path / "config.json").write_bytes((ROOT / "tests/data/configs/bigscience__bloom.json").read_bytes())
    shown, _ = main(capsys, monkeypatch, "--checkpoint_path", tmp_path, "--roofline", 1555, "--devices", 16)
    assert shown.splitlines()[-1].split() == ["2048", "360.689", "352,494.5", "8,220.8", "69.0"]
    with pytest.raises(UserError, match=r"no weights to measure the bandwidth with; give one, as in --roofline 100"):
        main(capsys, monkeypatch, "--checkpoint_path", tmp_path, "--roofline")

    whole = tmp_path / "whole"
    quantize_checkpoint(tiny("llama-gqa-biased")[2], whole, Quantization("int4", 32, "int8"))
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    for options in (["--batch_size", 3], ["--dequantize"]):
        texts = [
            main(capsys, monkeypatch, "--checkpoint_path", directory, "--roofline", 7, *options)[0]
            for directory in (whole, tmp_path)
        ]
        assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    "accepted, expected", [(0, "2 tokens, 9.5 tokens/s"), (5, "2 tokens, 9.5 tokens/s, 7 of 24 drafted")]
)
def test_the_line_of_a_run_counts_drafted_tokens_only_if_some_were_accepted(accepted, expected):
    """By default, lookup proposes a token now and then, of which nobody needs to hear."""
    drafts = [{"proposed_tokens": 11, "accepted_tokens": accepted}, {"proposed_tokens": 13, "accepted_tokens": 2}]
    result = {"samples": [{"token_ids": [5, 6]}], "decode_tokens_per_s": 9.5, "prefill_tokens_per_s": None}
    result |= {
        "speculation": {"drafts": drafts if accepted else [drafts[0]]},
        "peak_memory_bytes": 7e6,
        "recompiles": 0,
    }
    assert report.short_report(result, None).startswith(expected)
    assert ("drafted" in report.short_report(result, None)) == bool(accepted)
