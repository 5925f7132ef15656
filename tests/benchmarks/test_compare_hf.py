"""compare_hf.py finds equal models equal, and finds the first tensor that a planted fault changes."""

import json
import shutil

import compare_hf
import pytest
from safetensors.torch import load_file, save_file

from cli import UserError


def copy_with(checkpoint, out, config=None, change=lambda weights: None):
    """A copy of a checkpoint with other fields in config.json, whose tensors change(weights) has modified."""
    shutil.copytree(checkpoint, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(fields | (config or {})))
    return out


def compare(capsys, checkpoint, source, *options):
    """(exit code, the lines printed)."""
    code = compare_hf.main([str(checkpoint), str(source), *options])
    return code, capsys.readouterr().out.splitlines()


def expect_fault(capsys, checkpoint, source, label, *options):
    """Assert that the first difference is at label, and that only this line has an arrow."""
    code, lines = compare(capsys, checkpoint, source, *options)
    assert code == 1
    assert lines[-1].startswith(f"they part at {label}: ")
    assert [line.split("  ")[0] for line in lines if "<--" in line] == [label]


@pytest.mark.parametrize("name, shown", [
    ("qwen3-gqa", ["attention.k_norm", "mlp.gate"]), ("mistral-window", ["attention.k_cache", "mlp.down.input"]),
    ("llama-yarn-mscale", ["attention.out.input"]), ("qwen35-grouped", ["delta_net.out", "attention.out"]),
    ("lfm2-biased", ["short_conv.out", "attention.q"]), ("qwen35-moe-5", ["experts", "delta_net.out"]),
])  # fmt: skip
def test_same(tiny, capsys, name, shown):
    """Also where layers have other modules, or queries and keys in another order."""
    source, checkpoint = tiny(name)[1:]
    code, lines = compare(capsys, checkpoint, source, "--prompt_ids", ",".join(map(str, range(3, 28))))
    assert (code, lines[-1]) == (0, "the same within 1e-04 everywhere")
    assert not any("<--" in line for line in lines)
    assert all(any(f", {tensor} " in line for line in lines if "only in" not in line) for tensor in shown)


def test_other_dtypes_are_as_close_as_their_rounding(tiny, capsys):
    source, checkpoint = tiny("llama-gqa-biased")[1:]
    assert compare(capsys, checkpoint, source, "--dtype", "bfloat16")[0] == 1
    assert compare(capsys, checkpoint, source, "--dtype", "bfloat16", "--tolerance", "0.1")[0] == 0


@pytest.mark.parametrize("tensor, row, label", [
    ("embedding.weight", 7, "embedding"),  # 7 is the first default id
    ("blocks.0.attention_norm.weight", 5, "layer 0, attention_norm"),
    ("blocks.1.attention.qkv.weight", 6 * 18 + 3, "layer 1, attention.k"),
    ("blocks.1.attention.qkv.weight", -1, "layer 1, attention.v"),
    ("blocks.2.attention.k_norm.weight", 4, "layer 2, attention.k_norm"),
    ("blocks.1.mlp.gate_up.weight", 38, "layer 1, mlp.up"),
    ("norm.weight", 51, "norm"), ("output.weight", 2, "logits"),
])  # fmt: skip
def test_finds_a_wrong_row(tiny, capsys, tmp_path, tensor, row, label):
    source, checkpoint = tiny("qwen3-gqa")[1:]

    def change(weights):
        weights[tensor][row] += 0.05

    expect_fault(capsys, copy_with(checkpoint, tmp_path / "faulty", change=change), source, label)


@pytest.mark.parametrize("name, config, label", [
    ("qwen3-gqa", {"norm_eps": 1e-2}, "layer 0, attention_norm"),
    ("qwen3-gqa", {"rope_base": 10001.0 * 2}, "layer 0, attention.k_cache"),
    ("mistral-window", {"sliding_window": 8}, "layer 0, attention.out.input"),
])  # fmt: skip
def test_finds_a_wrong_config(tiny, capsys, tmp_path, name, config, label):
    source, checkpoint = tiny(name)[1:]
    expect_fault(capsys, copy_with(checkpoint, tmp_path / "faulty", config), source, label)


def test_nan_is_a_difference(tiny, capsys, tmp_path):
    source, checkpoint = tiny("llama-mha")[1:]

    def change(weights):
        weights["blocks.1.mlp_norm.weight"][:] = 3e38  # this overflows, while NaN would be refused at load

    faulty = copy_with(checkpoint, tmp_path / "faulty", change=change)
    expect_fault(capsys, faulty, source, "layer 1, mlp_norm", "--tolerance", "1e9")


def test_mistakes_are_named(tiny, tmp_path):
    source, checkpoint = map(str, tiny("llama-mha")[1:])
    cut = shutil.copytree(source, tmp_path / "cut")
    weights = load_file(cut / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, cut / "model.safetensors", metadata={"format": "pt"})
    for arguments, message in {
        (str(tmp_path / "none"), source): "none",
        (checkpoint, str(tmp_path / "none")): f"{tmp_path / 'none'} is neither a directory nor a .gguf file",
        (checkpoint, checkpoint): "transformers cannot load",
        (checkpoint, str(cut)): "lacks tensor model.layers.1.mlp.up_proj.weight",
        (checkpoint, source, "--prompt", "Hello"): "has no tokenizer",
        (checkpoint, source, "--prompt_ids", "5,131"): "token id 131 is outside the vocabulary of 131",
        (checkpoint, source, "--prompt_ids", ""): "the prompt is empty",
        (checkpoint, source, "--tolerance", "nan"): "must be at least 0",
    }.items():
        with pytest.raises(UserError, match=message) as caught:
            compare_hf.main(list(arguments))
        assert "\n" not in str(caught.value)
