"""Conversion of every kind of source: what is supported, what is refused, and that nothing half-written is left."""

import copy
import dataclasses
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from functools import reduce
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from cases import STRANGE_VALUES, plain_twin, read_model
from conftest import ROOT, SCALED_QUERIES, TINY, hf_greedy, random_prompts, save_tiny
from gguf_writer import bpe_fields, llama3_divisors, sentencepiece_fields, write_gguf
from programs import main
from safetensors.torch import load_file, save, save_file
from texts import strings
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

import convert_hf_checkpoint
from checkpoint import read_config, read_quantization, remove_abandoned
from cli import UserError
from config import Config, RopeScaling
from convert_hf_checkpoint import convert
from engine import Engine, Request, generate
from formats import FORMATS, Quantization
from load import load_model
from quantize import quantize_checkpoint
from sampling import SamplingParams
from sources import hf_directory
from sources.families import FAMILIES
from sources.gguf_file import GgufFile
from sources.hf_directory import hf_config
from sources.opening import open_gguf, open_hf, open_named
from sources.wheels import default_gguf
from text.tokenizer import Tokenizer, read_tokenizer_files
from tp import Shard

CONFIGS = ROOT / "tests" / "data" / "configs"


def weights(directory):
    return {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}


def same(one, other):
    one, other = weights(one), weights(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def edit(directory, **fields):
    path = directory / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not Ellipsis}))


@pytest.fixture
def hf(tiny, tmp_path):
    """A copy of a tiny Hugging Face directory, for tests that damage it."""
    shutil.copytree(tiny("llama-gqa-biased")[1], tmp_path / "hf")
    return tmp_path / "hf"


# ---------------------------------------------------------------- real config files

REAL = json.loads((CONFIGS.parent / "real_configs.json").read_text())


@pytest.mark.parametrize("name", REAL)
def test_real_configs_are_read_without_a_warning(name, tmp_path, capsys):
    """Their fields that are not a Config's defaults are in tests/data/real_configs.json."""
    shutil.copyfile(CONFIGS / f"{name}.json", tmp_path / "config.json")
    fields = dataclasses.asdict(hf_config(tmp_path))
    sizes = {"n_layer", "n_head", "n_kv_head", "head_dim", "dim", "hidden_dim", "vocab_size", "max_seq_length"}
    found = {name: value for name, value in fields.items() if name in sizes or value != getattr(Config, name)}
    assert json.loads(json.dumps(found)) == REAL[name]
    assert capsys.readouterr().err == ""


def gemma4_config(directory, layers=3, **changes):
    """The Config of Gemma 4 31B with these fields in its text_config; ... leaves a field out."""
    fields = json.loads((CONFIGS / "transformers5__Gemma-4-31B.json").read_text())
    kinds = fields["text_config"]["layer_types"][6 - layers : 6]
    text = fields["text_config"] | {"num_hidden_layers": layers, "layer_types": kinds, "per_layer_config": ...}
    text |= changes
    fields["text_config"] = {name: value for name, value in text.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return hf_config(directory)


PUBLISHED = {"global_head_dim": 48, "num_global_key_value_heads": 2}  # names in published files
GEMMA4_HEADS = {
    "published": (PUBLISHED, (48, 2)),
    "the default": ({}, (512, 16)),
    "null": (PUBLISHED | {"num_global_key_value_heads": None, "rope_parameters": None}, (48, 16)),
    "no heads of their own without k = v": (PUBLISHED | {"attention_k_eq_v": False}, (48, 16)),
    "saved": ({"per_layer_config": {"02": {"head_dim": 40, "num_key_value_heads": 8}}}, (40, 8)),
    "saved, all alike": ({"per_layer_config": {}}, (256, 16)),
}


@pytest.mark.parametrize("fields, expected", GEMMA4_HEADS.values(), ids=GEMMA4_HEADS)
def test_heads_of_gemma4(tmp_path, fields, expected):
    config = gemma4_config(tmp_path, **fields)
    text = transformers.AutoConfig.from_pretrained(tmp_path).text_config.per_layer_config
    assert (text[2].head_dim, text[2].num_key_value_heads) == expected
    assert [config.heads(i) for i in range(3)] == [(32, 16, 256), (32, 16, 256), (32, expected[1], expected[0])]


def test_the_last_layer_of_gemma4_does_not_slide(tmp_path):
    config = gemma4_config(tmp_path, layer_types=["sliding_attention"] * 3)
    assert [config.window(i) for i in range(3)] == [1024, 1024, None]
    assert transformers.AutoConfig.from_pretrained(tmp_path).text_config.layer_types[2] == "full_attention"


@pytest.mark.parametrize("shared, double", [(3, True), (3, False), (0, True)])
def test_layers_of_gemma4_that_share_keys_and_values(tmp_path, shared, double):
    fields = {"num_kv_shared_layers": shared, "use_double_wide_mlp": double, "layer_types": ["sliding_attention"] * 6}
    fields["layer_types"][1] = "full_attention"
    config = gemma4_config(tmp_path, 6, **fields, hidden_size_per_layer_input=...)
    text = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    stored = {kind: i for i, kind in enumerate(text.layer_types) if text.kv_sharing_modes[i] == "store"}
    reused = [i for i, mode in enumerate(text.kv_sharing_modes) if mode == "reuse"]
    assert len(reused) == shared and [config.kv_layer(i) for i in reused] == [
        stored[text.layer_types[i]] for i in reused
    ]
    widths = [text.intermediate_size * (2 if double and i in reused else 1) for i in range(6)]
    assert [config.mlp_width(i) for i in range(6)] == widths and config.per_layer_dim == 256


@pytest.mark.parametrize("fields, why", [
    ({"hidden_size_per_layer_input": ..., "vocab_size_per_layer_input": 5}, "_input = 5 is not the vocab_size 262144"),
    ({"num_kv_shared_layers": 1}, "shared_kv_layers: layer 2 has no earlier layer of its kind"),
    ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention = "all" is not supported'),
    ({"per_layer_config": {"0": {"head_dim": 40}}}, "per_layer_config = .* must change the heads of all layers"),
    ({"per_layer_config": {"2": {"sliding_window": 4}}}, "per_layer_config = .* must change the heads of all layers"),
    ({"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "wrong type or size"),
])  # fmt: skip
def test_fields_of_gemma4_that_are_refused(tmp_path, fields, why):
    with pytest.raises(UserError, match=why):
        gemma4_config(tmp_path, **fields)


# The fields of LFM2's files, besides those that transformers 5 writes. Some of them have two names.
OLD_LFM2 = {"block_dim": 2048, "conv_dim": 2048, "conv_dim_out": 2048, "num_heads": 32, "block_norm_eps": 1e-5}
OLD_LFM2 |= {"block_mlp_init_scale": 1.0, "block_out_init_scale": 1.0, "block_use_swiglu": True, "use_pos_enc": True}
OLD_LFM2 |= {"block_use_xavier_init": True, "conv_use_xavier_init": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
OLD_LFM2 |= {"layer_types": ..., "rope_parameters": ..., "rope_theta": 1e6, "tie_word_embeddings": ...}


def lfm2_config(directory, **changes):
    """The Config of LFM2-1.2B with these fields; ... leaves a field out."""
    fields = json.loads((CONFIGS / "transformers5__LFM2-1.2B.json").read_text()) | changes
    fields = {name: value for name, value in fields.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return hf_config(directory)


def test_older_fields_of_lfm2(tmp_path, capsys):
    plain = lfm2_config(tmp_path)
    assert lfm2_config(tmp_path, **OLD_LFM2) == plain
    assert lfm2_config(tmp_path, **OLD_LFM2, block_ff_dim=12288, intermediate_size=...) == plain
    assert not lfm2_config(tmp_path, **OLD_LFM2, tie_embedding=False).tied_embeddings
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("layers", [{"layer_types": None}, {"layer_types": None, "full_attn_idxs": None}, {}])
@pytest.mark.parametrize("multiplier", [1.0, 1.3])
@pytest.mark.parametrize("adjusted", [True, False])
def test_sizes_of_lfm2_are_those_of_transformers(tmp_path, layers, multiplier, adjusted):
    changes = layers | {"block_ffn_dim_multiplier": multiplier, "block_auto_adjust_ff_dim": adjusted}
    changes |= {"block_multiple_of": 8, "block_ff_dim": 80}
    ours = lfm2_config(tmp_path, **changes)
    fields = json.loads((tmp_path / "config.json").read_text())
    theirs = transformers.Lfm2Config(**fields)
    theirs.vocab_size = 9
    with torch.device("meta"):
        layer = transformers.Lfm2ForCausalLM(theirs).model.layers[1]
    assert ours.hidden_dim == layer.feed_forward.w1.out_features
    assert ours.has_attention(1) == layer.is_attention_layer


@pytest.mark.parametrize("fields, why", [
    ({"block_use_swiglu": False}, "block_use_swiglu = false changes"),
    ({"layer_types": ["conv"] * 15}, "must be full_attention or conv for each of 16"),
    ({"layer_types": ["sliding_attention"] * 16}, "must be full_attention or conv for each of 16"),
    ({"conv_L_cache": 1}, "conv_width 1 is too small"),
    ({"conv_bias": "no"}, "bias must be true or false, not 'no'"),
    ({"block_ffn_dim_multiplier": None}, "wrong type or size"),
    ({"model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "use_expert_bias": 1}, "choice_bias must be"),
], ids=str)  # fmt: skip
def test_fields_of_lfm2_that_are_refused(tmp_path, fields, why):
    with pytest.raises(UserError, match=why):
        lfm2_config(tmp_path, **fields)


@pytest.mark.parametrize("name, why", {
    "google__gemma-2-2b-it": "Gemma2ForCausalLM .*known: LlamaForCausalLM, Mistral",
    "ibm-granite__granite-3.3-8b-instruct-FP8": "quantization_config = .*compressed-tensors.* changes",
    "microsoft__phi-2": "PhiForCausalLM",
    "mistralai__Devstral-2-123B-Instruct-2512": 'quantization_config = .*"quant_method": "fp8".* is not supported',
}.items())  # fmt: skip
def test_real_configs_that_are_not_supported_are_refused(name, why, tmp_path):
    shutil.copyfile(CONFIGS / f"{name}.json", tmp_path / "config.json")
    with pytest.raises(UserError, match=why):
        hf_config(tmp_path)


def test_ministral3_needs_the_original_context(tiny, tmp_path):
    fields = json.loads((tiny("ministral3-gqa")[1] / "config.json").read_text())
    for rope, why in (({"llama_4_scaling_beta": 0.1}, "needs a RoPE scaling with the original"), (None, "wrong type")):
        (tmp_path / "config.json").write_text(json.dumps(fields | {"rope_parameters": rope}))
        with pytest.raises(UserError, match=why):
            hf_config(tmp_path)


@pytest.mark.parametrize("fields, why", [
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu" changes'),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'; known: default, lin"),
    ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
    ({"rope_parameters": SCALED_QUERIES}, "has llama_4_scaling_beta, which is not supported with 'yarn'"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section, which is not supp"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "a part of each head"),
    ({"num_local_experts": 8}, "num_local_experts = 8 changes"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"model_type": "bert"}, "model_type bert"), ({"hidden_size": "36"}, "config.json"),
    ({"num_hidden_layers": 10**9}, "n_layer must be a positive integer of at most 10000, not 1000000000"),
    ({"num_key_value_heads": 5}, "n_head 6 is not a multiple of n_kv_head 5"),
    ({"vocab_size": ...}, "lacks vocab_size"), ({"head_dim": 15}, "head_dim 15 is odd"),
], ids=str)  # fmt: skip
def test_fields_that_change_the_model_and_are_not_supported_are_refused(hf, fields, why):
    edit(hf, **fields)
    with pytest.raises(UserError, match=why):
        hf_config(hf)


def places(values, path=()):
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def test_strange_values_of_published_configs_end_in_one_line(tmp_path):
    """Any value in the place of any field, also in nested ones: a config is read or refused."""
    chance = random.Random(6)
    for file in sorted((CONFIGS).glob("*.json")):
        values = json.loads(file.read_text())
        every = list(itertools.product(places(values), STRANGE_VALUES))
        for path, value in chance.sample(every, 8):
            changed = copy.deepcopy(values)
            reduce(dict.__getitem__, path[:-1], changed)[path[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                hf_config(tmp_path)
            except UserError as error:
                assert len(str(error)) < 700 and "\n" not in str(error)


def test_harmless_fields_are_ignored_and_unknown_ones_warned_about(hf, capsys):
    before = hf_config(hf)
    edit(hf, pretraining_tp=4, slow_tokenizer_note=7, num_beams=3, use_sliding_window=False, logits_scaling=1.0)
    assert hf_config(hf) == before
    err = capsys.readouterr().err
    assert "slow_tokenizer_note = 7 is unknown" in err and "pretraining_tp" not in err and "beams" not in err


def test_both_spellings_of_rope(hf):
    theirs = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    edit(hf, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **theirs})
    new = hf_config(hf)
    for key in ("rope_type", "type"):
        edit(hf, rope_parameters=..., rope_theta=5e5, rope_scaling={key: "llama3", **theirs})
        assert hf_config(hf) == new
    assert new.rope_scaling == RopeScaling("llama3", 8.0, 64, 1.0, 4.0) and new.rope_base == 5e5


def test_sliding_layers(tmp_path):
    config = transformers.Qwen2Config(
        num_hidden_layers=5, use_sliding_window=True, sliding_window=9, max_window_layers=3
    )
    config.save_pretrained(tmp_path)
    edit(tmp_path, architectures=["Qwen2ForCausalLM"])
    c = hf_config(tmp_path)
    assert [c.window(i) for i in range(5)] == [None, None, None, 9, 9]
    edit(tmp_path, layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"])
    assert [hf_config(tmp_path).window(i) for i in range(5)] == [9, None, 9, None, 9]
    edit(tmp_path, layer_types=...)
    assert [hf_config(tmp_path).window(i) for i in range(5)] == [None, None, None, 9, 9], "by max_window_layers"
    edit(tmp_path, use_sliding_window=False)
    assert [hf_config(tmp_path).window(i) for i in range(5)] == [None] * 5


def test_layers_without_rope(tmp_path):
    """They are listed in no_rope_layers, in which 0 means "without", or are every fourth layer, or every n-th."""
    transformers.SmolLM3Config(num_hidden_layers=9).save_pretrained(tmp_path)
    edit(tmp_path, architectures=["SmolLM3ForCausalLM"])
    for fields, expected in (
        ({}, (3, 7)),
        ({"no_rope_layers": None}, (3, 7)),
        ({"no_rope_layer_interval": 2}, (1, 3, 5, 7)),
        ({"no_rope_layers": [1, 0] * 5, "layer_types": ...}, (1, 3, 5, 7)),
    ):
        edit(tmp_path, **fields)
        c = hf_config(tmp_path)
        assert c.layers_without_rope == expected and c.sliding_window is None
    edit(tmp_path, use_sliding_window=True, sliding_window=7)
    assert [c.window(i) for c in [hf_config(tmp_path)] for i in range(4)] == [None, 7, None, 7], "those without RoPE"
    edit(tmp_path, use_sliding_window=False, layer_types=["sliding_attention"] * 9)
    with pytest.raises(UserError, match="has sliding_attention, but use_sliding_window is not set"):
        hf_config(tmp_path)
    edit(tmp_path, no_rope_layers=[1, 0])
    with pytest.raises(UserError, match="config.json has a value of the wrong type or size: list index out of range"):
        hf_config(tmp_path)


def test_a_huge_number_of_layers_is_refused_before_they_are_listed(tmp_path):
    """A list of 10^9 layers would take a minute and 13 GB."""
    transformers.Qwen2Config(use_sliding_window=True, sliding_window=9, max_window_layers=3).save_pretrained(tmp_path)
    edit(tmp_path, architectures=["Qwen2ForCausalLM"], layer_types=..., num_hidden_layers=10**9)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))  # a MemoryError if such a list is made
    try:
        with pytest.raises(UserError, match="n_layer must be a positive integer of at most 10000"):
            hf_config(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---------------------------------------------------------------- weights: formats and faults


def test_bin_files_whose_tensors_alternate(tmp_path, monkeypatch):
    state = {str(i): torch.full((3,), i) for i in range(8)}
    weight_map = {name: f"{int(name) % 2}.bin" for name in state}
    for file in ("0.bin", "1.bin"):
        torch.save({name: state[name] for name in state if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened = mock.Mock(wraps=hf_directory.read_pickle)
    monkeypatch.setattr(hf_directory, "read_pickle", opened)
    files = hf_directory.HfFiles(tmp_path, FAMILIES["llama"].layout)
    assert files.shapes() == dict.fromkeys(state, (3,))
    assert all(torch.equal(files.read(name), state[name]) for name in state)
    assert opened.call_count == 2


def test_our_own_shards(tiny, tmp_path, monkeypatch):
    expected = tiny("llama-mha")[2]
    monkeypatch.setattr("checkpoint.SHARD_BYTES", 20_000)
    out = convert(open_hf(tiny("llama-mha")[1]), tmp_path / "out", torch.float32)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert same(out, expected)
    one, other = load_model(out).state_dict(), load_model(expected).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in other)
    (out / files[2]).unlink()
    with pytest.raises(UserError, match=f"{files[2]} is missing"):
        load_model(out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype(tiny, tmp_path, dtype):
    out = weights(convert(open_hf(tiny("llama-mha")[1]), tmp_path / "out", dtype))
    expected = weights(tiny("llama-mha")[2])
    assert all(torch.equal(out[name], expected[name].to(dtype)) for name in expected)


def change(hf, **tensors):
    """Replace or add tensors in a directory's model.safetensors, or remove those that are None."""
    state = load_file(hf / "model.safetensors") | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({k: v for k, v in state.items() if v is not None}, hf / "model.safetensors", metadata={"format": "pt"})


K, HEAD = "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"  # config.json calls the head tied


@pytest.mark.parametrize(
    "tensors, why",
    [
        ({K: None}, f"lacks tensor {K}"),
        ({"model.extra.weight": torch.ones(3)}, "holds tensor model.extra.weight .3,., which the model does not have"),
        ({K: torch.ones(41, 36)}, rf"{K} is \(41, 36\), but by its config it should be \(42, 36\)"),
        ({K: torch.full((42, 36), float("nan"))}, f"{K} holds NaN or infinity"),
        ({"model.norm.weight": torch.full((36,), 1e39, dtype=torch.float64)}, "norm.weight holds NaN or infinity"),
        ({K: torch.ones(42, 36).to(torch.float8_e4m3fn)}, f"{K} holds float8_e4m3fn, expected floating-point numbers"),
        ({HEAD: torch.full((131, 36), float("nan"))}, f"{HEAD} holds NaN or infinity"),
        ({HEAD: torch.ones(262, 36)}, rf"{HEAD} is \(262, 36\), but by its config it should be \(131, 36\)"),
        ({HEAD: torch.ones(131, 36).to(torch.float8_e4m3fn)}, f"{HEAD} holds float8_e4m3fn, expected floating-point"),
    ],
    ids=["missing", "left over", "misshapen", "NaN", "overflow", "float8", "NaN head", "rows of a head", "float8 head"],
)
def test_wrong_tensors_are_named(hf, tmp_path, tensors, why):
    change(hf, **tensors)
    with pytest.raises(UserError, match=why):
        convert(open_hf(hf), tmp_path / "out", torch.float32)
    assert os.listdir(tmp_path) == ["hf"], "nothing half-written"


def test_unneeded_tensors_are_skipped(hf, tiny, tmp_path):
    change(hf, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(7)})
    assert same(convert(open_hf(hf), tmp_path / "out", torch.float32), tiny("llama-gqa-biased")[2])


def test_damaged_safetensors(hf, tmp_path):
    path = hf / "model.safetensors"
    whole = path.read_bytes()
    for damaged, why in (
        (whole[:-100], "is truncated, or not a readable safetensors file: .* not fully covered"),
        (whole[:300], "not a readable safetensors file"),
        (b"", "not a readable safetensors file"),
        (os.urandom(4096), "not a readable safetensors file"),
        (whole[:8] + b"}" + whole[9:], "not a readable safetensors file"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=why):
            convert(open_hf(hf), tmp_path / "out", torch.float32)
    path.unlink()
    with pytest.raises(UserError, match="has no model.safetensors, model.safetensors.index.json or pytorch_model.bin"):
        open_hf(hf)


def test_a_dtype_that_torch_does_not_have(hf):
    path = hf / "model.safetensors"
    others = {name: tensor for name, tensor in load_file(path).items() if name != "model.norm.weight"}
    raw = save(others)
    start = 8 + int.from_bytes(raw[:8], "little")
    data = raw[start:] + bytes(27)
    header = json.loads(raw[8:start])
    header["model.norm.weight"] = {"dtype": "F6_E2M3", "shape": [36], "data_offsets": [len(data) - 27, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(UserError, match="model.safetensors: model.norm.weight cannot be read: .*F6_E2M3"):
        load_model(open_hf(hf))


def test_a_tensor_in_two_shards_and_a_shard_that_is_missing(tmp_path):
    save_tiny("qwen2-gqa", tmp_path / "hf", max_shard_size="30KB")
    first, gone, *_, last = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: 2 * tensor}, last, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"holds tensor {name} twice"):
        open_hf(tmp_path / "hf")
    gone.unlink()
    with pytest.raises(UserError, match=f"{gone.name} is missing, though model.safetensors.index.json names it"):
        open_hf(tmp_path / "hf")


def test_the_index_of_an_older_model_is_ignored(tmp_path):
    """Where a model is saved over an older one that had shards, transformers reads the single file, and so do we."""
    one, other = tmp_path / "one", tmp_path / "other"
    save_tiny("qwen2-gqa", one)
    expected = convert(open_hf(one), tmp_path / "expected", torch.float32)
    save_tiny("qwen2-gqa", other, max_shard_size="30KB")
    for path in sorted(other.glob("model-*.safetensors")):
        save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, other / path.name)
        shutil.copyfile(path, one / path.name)
    shutil.copyfile(other / "model.safetensors.index.json", one / "model.safetensors.index.json")
    assert same(convert(open_hf(one), tmp_path / "out", torch.float32), expected)


class Malicious:
    def __reduce__(self):
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code(hf, tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    (hf / "model.safetensors").unlink()
    torch.save({"x": Malicious()}, hf / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match="pytorch_model.bin was not loaded: it is damaged, or it holds code"):
        convert(open_hf(hf), tmp_path / "out", torch.float32)
    assert not (tmp_path / "hacked").exists()
    for damaged in (b"", b"garbage", (hf / "pytorch_model.bin").read_bytes()[:50]):
        (hf / "pytorch_model.bin").write_bytes(damaged)
        with pytest.raises(UserError, match="pytorch_model.bin (is not a readable|was not loaded)"):
            convert(open_hf(hf), tmp_path / "out", torch.float32)


def test_special_tokens_are_found_in_every_file(tmp_path, byte_level):
    """EOS tokens in generation_config.json and in the tokenizer; names in either of the tokenizer's two files."""

    def settings(config, tokenizer_config, generation=None, special_map=None):
        files = {"config": config, "tokenizer_config": tokenizer_config, "generation_config": generation}
        for name, value in (files | {"special_tokens_map": special_map}).items():
            (tmp_path / f"{name}.json").unlink(missing_ok=True)
            if value is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return hf_directory.hf_tokenizer_files(tmp_path).settings

    shutil.copy(byte_level / "tokenizer.json", tmp_path)  # <|begin|> is 0, <|end|> 1
    found = settings({"eos_token_id": 7}, {"eos_token": "<|end|>"}, {"eos_token_id": [9, 7]})
    assert found["eos_token_ids"] == [9, 7, 1] and found["eos_token"] == "<|end|>" and found["bos_token"] is None
    found = settings({"eos_token_id": 1}, {}, None, {"bos_token": {"content": "<|begin|>"}, "pad_token": "<|end|>"})
    assert found["eos_token_ids"] == [1] and found["bos_token_id"] == 0
    assert (found["bos_token"], found["pad_token"]) == ("<|begin|>", "<|end|>")
    assert settings({"bos_token_id": 0}, {"bos_token": None, "eos_token": "nowhere"})["eos_token_ids"] == []
    added = {"added_tokens_decoder": {"0": {"content": "<s>"}, "5": {"content": "</s>"}}}
    found = settings({"bos_token_id": 0, "eos_token_id": 5}, added)
    assert (found["bos_token"], found["eos_token"]) == ("<s>", "</s>"), "named by their ids"


# ---------------------------------------------------------------- GGUF


def greedy(directory, prompts, n):
    return continued(directory, prompts, n, SamplingParams(temperature=0.0))


def vocabulary(byte_level, pre="gpt-2", **more):
    return bpe_fields(Library.from_file(str(byte_level / "tokenizer.json")), pre, **more)


def continued(directory, prompts, n, params):
    engine = Engine(load_model(directory, dtype=torch.float32), len(prompts), 256)
    requests = [Request(prompt, params, n) for prompt in prompts]
    generate(engine, requests)
    return [request.new_tokens for request in requests]


@pytest.mark.parametrize(
    "name",
    ["llama-mha", "llama-mqa-linear", "mistral-gqa", "qwen2-gqa", "qwen3-gqa", "qwen3-mqa-biased", "smollm3-tied"],
)
def test_gguf_equals_hugging_face(tiny, tmp_path, byte_level, name):
    oracle, _, expected = tiny(name)
    extra = {}
    if name == "llama-mqa-linear":
        extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0}
    fields = vocabulary(byte_level)
    write_gguf(tmp_path / "x.gguf", oracle, fields, extra=extra)
    out = convert(open_gguf(tmp_path / "x.gguf", dequantize=True), tmp_path / "out", torch.float32)
    assert same(out, expected)
    assert read_config(out) == read_config(expected)


def test_gguf_llama3_scaling_is_a_tensor(tiny, tmp_path, byte_level):
    oracle, _, expected = tiny("llama-llama3")
    config = read_config(expected)
    fields = vocabulary(byte_level, "llama-bpe", bos_token_id=0)
    write_gguf(tmp_path / "x.gguf", oracle, fields, tensors={"rope_freqs.weight": llama3_divisors(config)})
    out = convert(open_gguf(tmp_path / "x.gguf", dequantize=True), tmp_path / "out", torch.float32)
    assert same(out, expected) and read_config(out).rope_scaling.kind == "factors"
    prompt = random_prompts((90,))[0]
    assert greedy(out, [prompt], 40) == [hf_greedy(oracle, prompt, 40)]
    assert Tokenizer(out).encode("x")[0] == 0, "llama-bpe begins with its BOS token"


Q = gguf.GGMLQuantizationType


def mixed(name):
    kinds = {"token_embd": Q.Q8_0, "output": None, "ffn_down": Q.Q8_0, "attn_output": Q.Q5_0, "attn_v": Q.Q4_1}
    if name.startswith("blk.1."):
        kinds = {"attn_v": Q.Q8_0, "ffn_up": Q.IQ4_NL, "ffn_gate": Q.Q4_0, "ffn_down": Q.BF16}
    return kinds.get(name.split(".")[-2], Q.Q4_0)


def mixed_k(name):
    """As in Q4_K_M files: some values and down projections have more bits. The file's head is larger, too."""
    kinds = {"token_embd": Q.Q4_K, "output": Q.Q6_K, "attn_q": Q.Q5_K, "attn_output": Q.IQ4_XS}
    kinds |= (
        {"ffn_gate": Q.Q5_1, "ffn_up": None} if name.startswith("blk.1.") else {"attn_v": Q.Q6_K, "ffn_down": Q.Q6_K}
    )
    return kinds.get(name.split(".")[-2], Q.Q4_K)


def scheme_text(scheme):
    if isinstance(scheme, list):
        return "+".join(map(scheme_text, scheme))
    return scheme.format if scheme else "none"


MATRICES = ["attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"]
KEPT = {kind.name: (lambda name, kind=kind: kind, kind.name.lower(), kind.name.lower()) for kind in (
    Q.Q4_0, Q.Q5_0, Q.Q8_0, Q.IQ4_NL, Q.Q5_K, Q.Q6_K, Q.IQ4_XS,
)}  # fmt: skip
KEPT |= {
    "default": (lambda name: Q.Q8_0 if name == "token_embd.weight" else Q.Q4_1, "q4_1", "q8_0"),
    "mixed": (mixed, "q4_0+q4_0+q4_1 q5_0 q4_0 q8_0 q4_0+q4_0+q8_0 q4_0 q4_0+iq4_nl none", "q8_0 none"),
    "mixed_k": (mixed_k, "q5_k+q4_k+q6_k iq4_xs q4_k q6_k q5_k+q4_k+q4_k iq4_xs q5_1+none q4_k", "q4_k q6_k"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kinds, blocks, tables", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_quantized_tensors_are_kept(tmp_path, byte_level, family, kinds, blocks, tables):
    kind = transformers.LlamaConfig if family == "llama" else transformers.Qwen2Config
    tied = " " not in tables
    config = kind(
        vocab_size=131, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, intermediate_size=512,
        num_hidden_layers=2, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    fields = vocabulary(byte_level)
    write_gguf(tmp_path / "x.gguf", model, fields, quantize=kinds)
    kept = convert(open_gguf(tmp_path / "x.gguf"), tmp_path / "kept", torch.float32)
    plain = convert(open_gguf(tmp_path / "x.gguf", dequantize=True), tmp_path / "plain", torch.float32)
    found = read_quantization(kept)
    expected = dict(zip(["embedding", "output"], tables.split()))
    names = [f"blocks.{layer}.{name}" for layer in range(2) for name in MATRICES]
    expected |= dict(zip(names, blocks.split() * (8 // len(blocks.split()))))
    assert {name: scheme_text(found.scheme(name)) for name in expected} == expected
    state = plain_twin(kept).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights(plain).items())
    prompts = random_prompts((5, 30))
    assert greedy(kept, prompts, 16) == greedy(plain, prompts, 16)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1, Q.Q6_K])
def test_gguf_with_nan_is_refused_by_name(tmp_path, byte_level, kind):
    path = small_gguf(tmp_path / "x.gguf", byte_level, kind)
    info = GgufFile(path).infos["blk.0.ffn_down.weight"]
    raw, format = bytearray(path.read_bytes()), FORMATS[kind.name.lower()]
    at = info.start + format.parts[0].count + format.halves_at[-1]  # of the second block
    raw[at : at + 2] = b"\xff\x7f"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=rf"blk\.0\.ffn_down\.weight \({kind.name}\) holds NaN or infinity"):
        convert(open_gguf(path), tmp_path / "out", torch.float32)
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_gguf_of_other_types_is_dequantized_and_says_so(tmp_path, byte_level, capsys):
    path = small_gguf(tmp_path / "x.gguf", byte_level, Q.TQ1_0)
    assert open_gguf(path).quantization is None
    assert re.search("TQ1_0 cannot be kept: dequantized, which takes more memory", capsys.readouterr().err)
    convert(open_gguf(path), tmp_path / "out", torch.float32)
    argv = ["convert_hf_checkpoint.py", "--keep_quantized", str(path)]
    with mock.patch.object(sys, "argv", argv), pytest.raises(UserError, match="has none"):
        convert_hf_checkpoint.main()


def small_gguf(path, byte_level, kind):
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=256, num_attention_heads=4, intermediate_size=256, num_hidden_layers=1
    )
    fields = vocabulary(byte_level)
    write_gguf(path, transformers.LlamaForCausalLM(config), fields, quantize=lambda name: kind)
    return path


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "deepseek-r1-qwen"])
def test_gguf_byte_level_tokenizers(tmp_path, byte_level, tiny, pre):
    """The ids equal those of transformers' tokenizer for the same file; test_gguf.py has other kinds."""
    write_gguf(tmp_path / "x.gguf", tiny("llama-mha")[0], vocabulary(byte_level, pre, bos_token_id=0))
    out = convert(open_gguf(tmp_path / "x.gguf", dequantize=True), tmp_path / "out", torch.float32)
    ours = Tokenizer(out)
    assert ours.bos_id == 0 and ours.eos_ids == (1,) and not ours.add_bos
    oracle = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="x.gguf")
    for text in strings(["<|end|>"]):
        theirs = text if pre == "gpt-2" else unicodedata.normalize("NFC", text)  # as Qwen's own tokenizer.json does
        ids = oracle(theirs, add_special_tokens=False).input_ids
        assert ours.vocabulary.encode(text) == ids, repr(text)


def test_a_second_template_for_tools_is_read_and_kept(hf, tiny, tmp_path, byte_level):
    """It is named tool_use in a GGUF file, in a list in tokenizer_config.json, and in a directory of its own."""

    def templates(source):
        files = source.tokenizer_files
        out = read_tokenizer_files(convert(source, tmp_path / "out", torch.float32))
        assert (out.template, out.tool_template) == (files.template, files.tool_template)
        shutil.rmtree(tmp_path / "out")
        return files.template, files.tool_template

    fields = vocabulary(byte_level)
    fields |= {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use", "rag"]}
    fields |= {"tokenizer.chat_template.tool_use": "tools ä", "tokenizer.chat_template.rag": "documents"}
    write_gguf(tmp_path / "x.gguf", tiny("llama-mha")[0], fields)
    assert templates(open_gguf(tmp_path / "x.gguf", dequantize=True)) == ("plain", "tools ä")

    assert templates(open_hf(hf)) == (None, None)
    library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(byte_level / "tokenizer.json"))
    library.chat_template = {"default": "plain", "rag": "documents", "tool_use": "tools ä"}
    library.save_pretrained(hf)
    assert (hf / "additional_chat_templates").is_dir()
    assert templates(open_hf(hf)) == ("plain", "tools ä")
    shutil.rmtree(hf / "additional_chat_templates")
    (hf / "chat_template.jinja").unlink()
    settings = json.loads((hf / "tokenizer_config.json").read_text())
    listed = [{"name": name, "template": text} for name, text in library.chat_template.items()]
    for several, expected in ((listed, ("plain", "tools ä")), (listed[:1], ("plain", None)), ("one", ("one", None))):
        (hf / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": several}))
        assert templates(open_hf(hf)) == expected


def test_gguf_sentencepiece_tokenizer(tmp_path, sentencepiece_folder, tiny):
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    write_gguf(tmp_path / "x.gguf", tiny("llama-mha")[0], sentencepiece_fields(library))
    ours = Tokenizer(convert(open_gguf(tmp_path / "x.gguf", dequantize=True), tmp_path / "out", torch.float32))
    for text in strings():
        assert ours.encode(text) == [1, *library.encode(text)], repr(text)
        assert ours.decode(ours.encode(text)) == library.decode(library.encode(text))
    assert 1 in ours.encode("a<s>b")[1:]


def character_level() -> Library:
    """A small BPE on characters with bytes for unknown ones, as in Gemma's tokenizer.json."""
    library = Library(models.BPE())
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.pre_tokenizer = pre_tokenizers.Split(Regex("\n+|\u2581*[^\n\u2581]*"), "isolated")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", '<|"|>']
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, limit_alphabet=90, show_progress=False)
    library.train_from_iterator(strings(n=150), trainer)
    description = json.loads(library.to_str())
    vocabulary = description["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    description["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    description["added_tokens"][-1]["special"] = False
    library = Library.from_str(json.dumps(description))
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


@pytest.mark.parametrize("kind, pre", [("gemma4", None), ("llama", "gemma4")])  # the second is Ollama's
def test_gguf_tokenizer_on_characters(tmp_path, tiny, kind, pre):
    library = character_level()
    fields = bpe_fields(library, pre, model=kind, bos_token_id=2, add_bos_token=False)
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = {'<|"|>': 4} | {token: 6 for token in tokens if token.startswith("<0x")}
    fields["tokenizer.ggml.token_type"] = [kinds.get(token, 3 if i < 5 else 1) for i, token in enumerate(tokens)]
    write_gguf(tmp_path / "x.gguf", tiny("llama-mha")[0], fields)
    ours = Tokenizer(convert(open_gguf(tmp_path / "x.gguf"), tmp_path / "out", torch.float32))
    for text in [*strings(["<turn|>", '<|"|>']), "a\n\n\nb", "\u2581 <0x41>"]:
        expected = library.encode(text).ids
        assert ours.encode(text) == [2, *expected], repr(text)
        assert ours.decode(expected) == library.decode(expected), repr(text)
    assert ours.eos_ids == (1, 4)
    assert any(tokens[i] in kinds for i in ours.encode("\U0001f600"))


@pytest.mark.parametrize("changes", [
    {"unknown_token_id": 60000, "remove_extra_whitespaces": True},
], ids=str)  # fmt: skip
def test_what_a_gguf_sentencepiece_tokenizer_may_leave_out(tmp_path, sentencepiece_folder, tiny, changes):

    def tokenizer(fields):
        opened.metadata = {name: value for name, value in fields.items() if value is not None}
        return Tokenizer(opened.tokenizer_files())

    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    write_gguf(tmp_path / "x.gguf", tiny("llama-mha")[0], sentencepiece_fields(library))
    opened = GgufFile(tmp_path / "x.gguf")
    whole = opened.metadata
    expected = tokenizer(whole)
    found = tokenizer(whole | {f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    for text in [*strings()[:90], "a<s>b</s> c<unk>"]:
        assert found.encode(text) == expected.encode(text), repr(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert found.encode("x")[0] == 1 and found.eos_ids == (2,)
    with pytest.raises(UserError, match="scores does not have a number for each token"):
        tokenizer(whole | {"tokenizer.ggml.scores": [0.0] * 599})


@pytest.mark.parametrize("extra, tensors, why", [
    ({"tokenizer.ggml.pre": "viking"}, {}, "tokenizer.ggml.pre 'viking' is not known; known: dbrx"),
    ({"tokenizer.ggml.model": "bert"}, {}, "tokenizer kind 'bert' is not known; known: gpt2, llama, gemma4"),
    ({"llama.rope.dimension_count": 4}, {}, "rope.dimension_count = 4 rotates a part"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, {}, "longrope"),
    ({}, {"blk.1.ffn_up.weight": None}, "lacks tensor blk.1.ffn_up.weight"),
    ({}, {"blk.1.strange.weight": np.ones(3, np.float32)}, "holds tensor blk.1.strange.weight"),
    ({}, {"blk.0.attn_k.weight": np.ones((61, 60), np.float32)}, r"blk.0.attn_k.weight is \(61, 60\)"),
])  # fmt: skip
def test_gguf_faults(tiny, tmp_path, byte_level, extra, tensors, why):
    path = tmp_path / "x.gguf"
    write_gguf(path, tiny("llama-mha")[0], vocabulary(byte_level), extra=extra, tensors=tensors)
    with pytest.raises(UserError, match=why):
        convert(open_gguf(path, dequantize=True), tmp_path / "out", torch.float32)
    assert os.listdir(tmp_path) == ["x.gguf"]


# ---------------------------------------------------------------- where sources come from, and where they go


def test_a_weights_file_stands_for_its_directory(tiny):
    ours = tiny("llama-mha")[2]
    for name in ("", "model.safetensors", "model.pth"):  # the last as in gpt-fast
        assert open_named(str(ours / name)).path == ours


def converter(*args, **options):
    command = [sys.executable, str(ROOT / "convert_hf_checkpoint.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.slow
def test_command(hf, tmp_path, tiny, monkeypatch):
    done = converter(hf, "--out", tmp_path / "out", "--dtype", "float32")
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'out'}\n"
    assert done.stderr.endswith(f"to run it: python generate.py --checkpoint_path {tmp_path / 'out'}\n")
    assert same(tmp_path / "out", tiny("llama-gqa-biased")[2])
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "all files have the permissions of the user's umask"

    def convert_again(*args):  # in this process
        monkeypatch.setattr(sys, "argv", ["convert_hf_checkpoint.py", *map(str, args)])
        convert_hf_checkpoint.main()

    convert_again(hf, "--out", tmp_path / "out", "--dtype", "bfloat16")
    assert weights(tmp_path / "out")["norm.weight"].dtype == torch.bfloat16
    for args in ((hf, "--out", hf), (tmp_path / "nowhere",), (hf, "--dtype", "int3")):
        with pytest.raises(UserError):
            convert_again(*args)


@pytest.mark.slow
def test_a_full_disk(hf, tmp_path):
    """A limit on the size of files stands for a full disk, since it needs no special rights and fails the same way."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = converter(hf, "--out", tmp_path / "out", preexec_fn=limit)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "nothing was left behind" in done.stderr
    assert os.listdir(tmp_path) == ["hf"]


def test_a_disk_that_is_too_small_is_refused_at_once(hf, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 5_000, 5_000))
    with pytest.raises(UserError, match="has 0.00 GB free, but the checkpoint needs 0.00 GB"):
        convert(open_hf(hf), tmp_path / "out", torch.float32)
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.slow
def test_killed_in_the_middle(hf, tmp_path, monkeypatch):
    """Nothing is left, except after SIGKILL a hidden directory, which a conversion an hour later removes."""
    ends = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    processes = {}
    for how in ends:
        (tmp_path / how.name).mkdir()
        command = [sys.executable, str(ROOT / "convert_hf_checkpoint.py"), str(default_gguf())]
        command += ["--out", str(tmp_path / how.name / "out")]
        processes[how] = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    killed = set()
    while len(killed) < len(processes):
        for how, process in processes.items():
            if how not in killed and (process.poll() is not None or list((tmp_path / how.name).iterdir())):
                process.send_signal(how)
                killed.add(how)
        time.sleep(0.005)

    for how, process in processes.items():
        out, err = process.communicate(timeout=60)
        assert process.returncode == ends[how]
        assert out == "" and "Traceback" not in err
    assert os.listdir(tmp_path / "SIGTERM") == os.listdir(tmp_path / "SIGINT") == []

    folder = tmp_path / "SIGKILL"
    assert [path.name[:5] for path in folder.iterdir()] == [".out."]
    convert(open_hf(hf), folder / "out", torch.float32)
    assert len(os.listdir(folder)) == 2
    monkeypatch.setattr("checkpoint.ABANDONED_S", 0.0)
    remove_abandoned(folder / "out")
    assert os.listdir(folder) == ["out"]


def test_every_family_is_in_the_tests():
    only_multimodal = {"qwen3_vl_text", "qwen3_vl_moe_text"}  # tests/sources/test_families.py
    assert {kind[0].model_type for kind in TINY.values()} | only_multimodal == set(FAMILIES)


# ---------------------------------------------------------------- a head that config.json calls tied

# Each way to name the head and the table, and to store the weights
TIED = {
    "llama-gqa-biased": "safetensors", "mistral-gqa": "shards", "qwen2-gqa": "bin", "qwen35-grouped": "bins",
    "lfm2-tied": "old bin", "gemma3-tied": "bin", "bloom-5": "bins",
}  # fmt: skip


def store(directory, state, how):
    """Replace the weights of a Hugging Face directory. "shards" and "bins" have the head and the table apart."""
    (directory / "model.safetensors").unlink()
    parts = {"1": {name: state[name] for name in state if name != HEAD}, "2": {HEAD: state[HEAD]}}
    if how == "safetensors":
        return save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    if not how.endswith("s"):
        return torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=how != "old bin")
    stem, end = ("model", "safetensors") if how == "shards" else ("pytorch_model", "bin")
    for number, part in parts.items():
        path = directory / f"{stem}-{number}.{end}"
        save_file(part, path, metadata={"format": "pt"}) if how == "shards" else torch.save(part, path)
    weight_map = {name: f"{stem}-{number}.{end}" for number, part in parts.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{stem}.{end}.index.json").write_text(json.dumps(index))


def with_head(tiny, name, directory, change_head, how="safetensors", remove_table=False):
    """A copy of a tiny Hugging Face directory with a head that change_head(table) returns."""
    shutil.copytree(tiny(name)[1], directory)
    state = load_file(directory / "model.safetensors")
    table = next(name for name in state if name.endswith(("embed_tokens.weight", "word_embeddings.weight")))
    state[HEAD] = change_head(state[table])
    if remove_table:
        del state[table]
    store(directory, state, how)
    return directory


def other_values(table):
    return table.roll(1, 0) * 1.5


def oracle_of(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    ).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name, how", TIED.items())
def test_a_head_of_other_values_is_kept(tiny, tmp_path, capsys, name, how):
    directory = with_head(tiny, name, tmp_path / "hf", other_values, how)
    capsys.readouterr()  # the progress bars of transformers
    out = convert(open_hf(directory), tmp_path / "out", torch.float32)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"tied to the embedding table (tie_word_embeddings), but {HEAD} has other" in lines[0]
    assert not read_config(out).tied_embeddings
    found, expected = weights(out), weights(tiny(name)[2])
    assert torch.equal(found.pop("output.weight"), other_values(expected["embedding.weight"]))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    oracle = oracle_of(directory)
    prompts = random_prompts((3, 17))
    expected = [hf_greedy(oracle, prompt, 9) for prompt in prompts]
    assert continued(out, prompts, 9, SamplingParams(temperature=0.0)) == expected
    assert expected != [hf_greedy(tiny(name)[0], prompt, 9) for prompt in prompts], "the head matters"


@pytest.mark.parametrize("how", ["safetensors", "shards", "bin", "bins", "old bin"])
@pytest.mark.parametrize("change_head", [torch.clone, torch.Tensor.double], ids=["same dtype", "float64"])
def test_a_head_of_equal_values_is_tied(tiny, tmp_path, capsys, how, change_head):
    directory = with_head(tiny, "qwen2-gqa", tmp_path / "hf", change_head, how)
    oracle = oracle_of(directory)
    assert oracle.lm_head.weight is oracle.get_input_embeddings().weight
    capsys.readouterr()  # the progress bars of transformers
    source = open_hf(directory)
    assert same(convert(source, tmp_path / "out", torch.float32), tiny("qwen2-gqa")[2])
    assert source.config.tied_embeddings and load_model(source).output is None
    assert capsys.readouterr().err == ""


def padded(table):
    """Equal to the table, but for the last rows, which pad the vocabulary."""
    return torch.cat([table[:-3], torch.zeros_like(table[-3:])])


@pytest.mark.parametrize("name", ["llama-llama3", "bloom-12"])
@pytest.mark.parametrize("change_head", [padded, torch.Tensor.bfloat16], ids=["the last rows", "rounded"])
def test_a_head_of_nearly_equal_values_is_kept(tiny, tmp_path, name, change_head):
    directory = with_head(tiny, name, tmp_path / "hf", change_head)
    oracle, model = oracle_of(directory), load_model(open_hf(directory), dtype=torch.float32)
    assert torch.equal(model.output.weight, oracle.lm_head.weight)
    assert not torch.equal(model.output.weight, model.embedding.weight)


@pytest.mark.parametrize(
    "name, how", [("llama-gqa-biased", "safetensors"), ("bloom-1", "bin"), ("gemma3-tied", "bins")]
)
def test_a_tied_head_without_its_table_is_the_table(tiny, tmp_path, name, how):
    """safetensors.torch.save_model writes the first name only of tensors that are one."""
    directory = with_head(tiny, name, tmp_path / "hf", other_values, how, remove_table=True)
    out = convert(open_hf(directory), tmp_path / "out", torch.float32)
    assert read_config(out).tied_embeddings and "output.weight" not in weights(out)
    assert torch.equal(weights(out)["embedding.weight"], oracle_of(directory).get_input_embeddings().weight)


def test_a_head_of_its_own_is_quantized_split_and_counted(tiny, tmp_path, capsys, monkeypatch):
    directory = with_head(tiny, "llama-gqa-biased", tmp_path / "hf", other_values)
    source = open_hf(directory)
    assert quantize_checkpoint(source, tmp_path / "q", Quantization("int8", 32, "int8"))
    assert read_quantization(tmp_path / "q").scheme("output") and not read_config(tmp_path / "q").tied_embeddings
    head = load_file(directory / "model.safetensors")[HEAD]
    parts = [read_model(source, dtype=torch.float32, shard=Shard(rank, 3)).output.weight for rank in range(3)]
    assert torch.equal(torch.cat(parts)[:131], head) and torch.cat(parts)[131:].eq(0).all()
    convert(source, tmp_path / "out", torch.float32)
    reports = []
    for path in (directory, tmp_path / "out"):
        args = ("--checkpoint_path", path, "--prompt_ids", "5,9", "--max_new_tokens", 7, "--dtype", "float32", "--json")
        reports.append(main(capsys, monkeypatch, *args)[0])
    names = ("samples", "weight_bytes_per_token", "kv_bytes_per_token")
    assert [reports[0][name] for name in names] == [reports[1][name] for name in names]


# ---------------------------------------------------------------- BLOOM


def test_bloom_tensors_in_every_layout_they_were_published_in(tiny, tmp_path):
    """Names with and without "transformer.", one file and 72 files give the same bits."""
    _, hf, expected = tiny("bloom-12")
    tensors = load_file(hf / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert len(tensors) > 40 and "h.0.self_attention.query_key_value.weight" in bare
    fields = json.loads((hf / "config.json").read_text())
    old = fields | {"architectures": ["BloomModel"], "n_embed": fields.pop("hidden_size"), "slow_but_exact": True}
    old["num_attention_heads"], old["num_hidden_layers"] = old.pop("n_head"), old.pop("n_layer")

    def directory(name, config):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    save_file(bare, directory("bare", old) / "model.safetensors")
    sharded, weight_map = directory("sharded", old), {}
    for i, name in enumerate(bare):
        shard = f"pytorch_model_{i % 72 + 1:05}-of-00072.bin"  # as bigscience/bloom names them
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        torch.save({name: bare[name] for name in bare if weight_map[name] == shard}, sharded / shard)
    (sharded / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in ("bare", "sharded"):
        out = convert(open_hf(tmp_path / name), tmp_path / f"{name} out", torch.float32)
        assert same(out, expected) and read_config(out) == read_config(expected)
    for directory in (expected, tmp_path / "bare"):  # our config.json is told from BLOOM's, which has n_layer too
        assert open_named(str(directory)).config == read_config(expected)


@pytest.mark.slow
def test_bloom_shards_are_in_memory_one_at_a_time(tmp_path):
    """The converter needs little more memory than one of 71 shards and the tensor that it writes."""
    config = transformers.BloomConfig(
        vocab_size=6000, hidden_size=336, n_head=7, n_layer=70, architectures=["BloomModel"]
    )
    config.save_pretrained(tmp_path)
    state, weight_map = transformers.BloomModel(config).state_dict(), {}
    for name in state:
        weight_map[name] = f"pytorch_model_{name.split('.')[1] if name.startswith('h.') else 'rest'}.bin"
    for shard in set(weight_map.values()):
        torch.save({name: state[name].clone() for name in state if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    script = """
import resource, sys, torch
import checkpoint
from convert_hf_checkpoint import convert
from sources.opening import open_hf
checkpoint.SHARD_BYTES = 20_000_000
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
start = peak()
convert(open_hf(checkpoint.Path(sys.argv[1])), checkpoint.Path(sys.argv[2]), torch.float32)
print(peak() - start)
"""
    command = [sys.executable, "-c", script, str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    total = sum(path.stat().st_size for path in tmp_path.glob("*.bin")) / 2**20
    assert total > 370 and float(done.stdout) < total / 3


def test_ids_that_pad_blooms_table_are_never_sampled(byte_level, tmp_path):
    library = Library.from_file(str(byte_level / "tokenizer.json"))
    known = library.get_vocab_size()
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=known + 41, hidden_size=36, n_head=3, n_layer=2)
    oracle = transformers.BloomForCausalLM(config).eval()
    with torch.no_grad():
        oracle.transformer.word_embeddings.weight.normal_()
        oracle.transformer.word_embeddings.weight[known:] *= 30
    oracle.save_pretrained(tmp_path / "hf")
    library.save(str(tmp_path / "hf" / "tokenizer.json"))
    ours = convert(open_hf(tmp_path / "hf"), tmp_path / "ours", torch.float32)
    assert read_config(ours).n_token == known
    prompts = random_prompts((3, 17, 40), V=known)
    assert max(hf_greedy(oracle, prompts[1], 12)) >= known, "transformers samples them"
    for params in (SamplingParams(temperature=0.0), SamplingParams(repetition_penalty=1.3, temperature=2.0, seed=1)):
        assert max(map(max, continued(ours, prompts, 20, params))) < known


def test_sources_of_the_wrong_type_are_one_line(tiny, tmp_path):
    """Values that are valid in JSON or pickle, but not in a checkpoint."""
    _, hf, _ = tiny("bloom-5")
    for i, (fields, why) in enumerate(
        [
            ({"architectures": 5}, "architecture 5 .model_type bloom. is not known"),
            ({"model_type": []}, r"model_type \[\]. is not known"),
            ({"tie_word_embeddings": "false"}, "tied_embeddings must be true or false, not 'false'"),
            ({"apply_residual_connection_post_layernorm": [1]}, "post_norm_residual must be true or false"),
        ]
    ):
        shutil.copytree(hf, tmp_path / str(i))
        config = json.loads((hf / "config.json").read_text()) | fields
        (tmp_path / str(i) / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=why):
            convert(open_hf(tmp_path / str(i)), tmp_path / "out", torch.float32)
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(hf / "model.safetensors").items()}
    bad, name = tmp_path / "bin", "h.0.self_attention.query_key_value.weight"
    bad.mkdir()
    shutil.copy(hf / "config.json", bad)
    for change, why in (
        ({1: torch.ones(2)}, "does not hold tensors by name"),
        ({name: [1.0]}, "does not hold tensors by name"),
        ({name: torch.tensor(1.0)}, r"is \(\), but by its config it should be"),
        ({name: tensors[name].to(torch.complex64)}, "holds complex64, expected floating"),
        ({name: tensors[name].to(torch.int32)}, "holds int32, expected floating"),
    ):
        torch.save(tensors | change, bad / "pytorch_model.bin")
        with pytest.raises(UserError, match=why):
            convert(open_hf(bad), tmp_path / "out", torch.float32)
    (bad / "pytorch_model.bin").unlink()  # beside it, the index would be ignored
    for weight_map in ("x", 5, {"a": 1}, {"a": None}, {"a": "../../etc/passwd"}):
        (bad / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match="weight_map does not say which file"):
            open_hf(bad)
    assert not (tmp_path / "out").exists()
