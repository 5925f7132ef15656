"""Rooflines against torch's FLOP counter, and against the known numbers of a 176B model."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import NARROW, SPARSE, read_model, write_random
from conftest import ROOT, only_torch, random_prompts
from programs import main
from torch.utils.flop_counter import FlopCounterMode

import report
from checkpoint import empty_model
from cli import UserError
from config import Config
from costs import roofline, total_weight_bytes, weight_bytes
from engine import Engine, Request, StepFunctions, generate
from formats import Quantization
from load import load_model
from mixers.experts import run_experts
from quantize import quantize_checkpoint
from report import measurements
from sampling import SamplingParams


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
    assert replace(config, sliding_layers=()).window(0) is None, "no layer; None would be all"


def test_the_bound_of_heads_that_differ_by_layer(tiny_model):
    """Five layers with windows of 13 have 3 key heads of width 12, two have 2 of width 20; 6 query heads."""
    model = tiny_model("gemma4-tied")
    assert model.kv_bytes([37, 4]) == 2 * 4 * (5 * (13 + 4) * 3 * 12 + 2 * (37 + 4) * 2 * 20)
    more, few = (roofline(model.config, 1e9, context=n)["flops_per_token"] for n in (37, 0))
    assert more - few == 4 * 6 * (5 * 13 * 12 + 2 * 37 * 20)
    assert model.cache_bytes(2, 24, torch.float32) == 2 * 32 * 2 * 4 * (5 * 3 * 12 + 2 * 2 * 20)


def test_the_bound_counts_the_states_of_all_rows():
    found = roofline(Config(3, 4, 2, 6, 35, 44, 97, 900, delta_net=NARROW), 1e9, context=9, rows=3)
    read = sum(found[f"{part}_bytes_per_token"] for part in ("weight", "kv", "state"))
    assert found["state_bytes_per_token"] > 0 and found["bound_tokens_per_s"] == pytest.approx(1e9 / read)


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
        options = ["--roofline", 7, *options]
        with_weights, _ = main(capsys, monkeypatch, "--checkpoint_path", whole, *options)
        assert main(capsys, monkeypatch, "--checkpoint_path", tmp_path, *options)[0] == with_weights != ""


def test_the_line_of_a_run_counts_drafted_tokens_only_if_some_were_accepted():
    """By default, lookup proposes a token now and then, of which nobody needs to hear."""
    result = {"samples": [{"token_ids": [5, 6]}], "decode_tokens_per_s": 9.5, "prefill_tokens_per_s": None}
    result |= {"peak_memory_bytes": 7e6, "recompiles": 0}
    for proposed, accepted, line, asked in (
        (11, 5, ", 5 of 11 drafted tokens accepted", ", 5 of 11 drafted tokens accepted"),
        (11, 0, "", ", 0 of 11 drafted tokens accepted"),
        (0, 0, "", ", no tokens drafted"),
    ):
        result["speculation"] = {"drafts": [{"proposed_tokens": proposed, "accepted_tokens": accepted}]}
        assert report.short_report(result, None) == f"2 tokens, 9.5 tokens/s{line}; 7 MB"
        assert report.short_report(result, None, asked=True) == f"2 tokens, 9.5 tokens/s{asked}; 7 MB"


# ---------------------------------------------------------------- experts

# One expert's bytes in float32: gate, up and down
EXPERT = 3 * SPARSE.dim * SPARSE.experts.hidden_dim * 4


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("sparse") / "x", SPARSE)


def test_roofline_counts_the_experts_of_a_token(sparse, monkeypatch):
    model = read_model(sparse, torch.float32)
    model.setup_caches(3, 64)
    # torch does not count in an operation of ours.
    monkeypatch.setattr(torch.ops.fastpath.experts, "default", run_experts)
    with only_torch(), FlopCounterMode(display=False) as counter:
        model(torch.tensor([[5], [6], [7]]), torch.full((3, 1), 36))
    assert roofline(SPARSE, 2e9, torch.float32, 37, rows=3)["flops_per_token"] * 3 == counter.get_total_flops()


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_several_tokens_read_the_experts_that_any_of_them_uses(sparse, tokens):
    """The mean over all choices that they may make."""
    pairs = list(itertools.combinations(range(5), 2))
    choices = itertools.product(pairs, repeat=tokens)
    chosen = [len({e for pair in choice for e in pair}) for choice in choices]
    mean = sum(chosen) / len(chosen)
    model = read_model(sparse, torch.float32)
    all_used = SPARSE.experts.n_expert * 2 * EXPERT  # in two layers
    dense = sum(tensor.nbytes for tensor in model.state_dict().values()) - all_used - model.embedding.weight.nbytes
    read = dense + tokens * SPARSE.dim * 4 + mean * 2 * EXPERT
    assert weight_bytes(model, tokens) == pytest.approx(read)
    found = roofline(SPARSE, 1e9, torch.float32, 1, tokens)
    assert found["weight_bytes_per_token"] * tokens == pytest.approx(read)


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_the_report_counts_the_experts_that_decode_steps_read(sparse, fixed_shapes):
    """Not those of prefill, nor of padding, nor of an earlier run."""
    model = read_model(sparse, torch.float32)
    engine = Engine(model, 3, 100, StepFunctions(fixed_shapes=fixed_shapes))
    generate(engine, [Request([5, 6, 7], max_new_tokens=9)])
    engine.reset_timing()
    read = []  # how many experts each pass of a sparse layer has read
    used = [Counter(), Counter()]

    def watch(i, layer, inputs):
        x, input_pos = inputs
        if x.shape[1] > 1:
            return  # a prefill
        ids = layer.choose(x)[0][input_pos >= 0]
        read.append(len(set(ids.flatten().tolist())))
        used[i].update(ids.flatten().tolist())

    for i, block in enumerate((model.blocks[0], model.blocks[2])):
        block.experts.register_forward_pre_hook(partial(watch, i))
    requests = [Request(prompt, SamplingParams(seed=n), n) for n, prompt in zip((3, 9, 14), random_prompts((7, 20, 9)))]
    generate(engine, requests)

    steps = engine.timing.decode_steps
    tokens = engine.timing.decode_tokens
    assert len(read) == 2 * steps and tokens == 2 + 8 + 13
    found = measurements(engine, profiled=False, in_full=False)
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert found["experts"]["weight_bytes_total"] == total
    assert found["experts"]["expert_bytes_per_token"] == pytest.approx(sum(read) * EXPERT / tokens)
    dense = total - 10 * EXPERT - model.embedding.weight.nbytes
    expected = (dense * steps + sum(read) * EXPERT) / tokens + SPARSE.dim * 4
    assert found["weight_bytes_per_token"] == pytest.approx(expected)
    busiest = sum(max(counter.values()) / (2 * tokens / 5) for counter in used) / 2
    assert found["experts"]["busiest_expert"] == pytest.approx(busiest) and busiest > 1
    assert found["experts"]["unused_experts"] == (10 - len(used[0]) - len(used[1])) / 2


def test_the_report_of_a_model_with_experts(sparse, tmp_path, capsys, monkeypatch):
    options = ["--checkpoint_path", sparse, "--prompt_ids", "5,6,7", "--max_new_tokens", 9, "--kernels", "torch"]
    shown, said = main(capsys, monkeypatch, *options, "--json", "--report", "--dtype", "float32")
    experts = shown["experts"]
    assert experts["expert_bytes_per_token"] == 4 * EXPERT, "two experts in each of two layers"
    [line] = [line for line in said.splitlines() if line.startswith("experts: ")]
    sizes = f"each token reads {4 * EXPERT / 1e6:.1f} MB of them; all weights have"
    assert sizes in line and f"the busiest expert has {experts['busiest_expert']:.1f} times its even share of 8" in line
    _, said = main(capsys, monkeypatch, *options[:-4], "--max_new_tokens", 1, "--kernels", "torch", "--report")
    assert "experts: " not in said, "nothing was decoded"


@pytest.mark.parametrize("mode", [None, "int4"])
def test_the_bytes_of_all_weights(sparse, tmp_path, mode):
    """Those of a loaded model: the routers stay float32."""
    quantization = mode and Quantization(mode, 32, "int8")
    if mode:
        quantize_checkpoint(sparse, tmp_path / "q", quantization)
    model = read_model(tmp_path / "q" if mode else sparse)
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert total_weight_bytes(empty_model(SPARSE, quantization), torch.bfloat16) == total
    plain = load_model(tmp_path / "q" if mode else sparse, dequantize=True, kernels="torch")
    total = sum(tensor.nbytes for tensor in plain.state_dict().values())
    assert total_weight_bytes(empty_model(SPARSE, quantization), torch.bfloat16, unpacked=True) == total
    found = roofline(SPARSE, 1e9, torch.bfloat16, 1, 3, quantization)["weight_bytes_per_token"]
    assert found * 3 == pytest.approx(weight_bytes(model, 3))
