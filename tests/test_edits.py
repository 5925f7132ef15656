"""Edits of Python code that kernels stand for take effect. See edits.py."""

import json
import shutil
import subprocess
import sys
from functools import wraps

import pytest
import torch
from conftest import ROOT, random_prompts

import edits
from engine import Engine, Request, generate
from formats import Quantization, quantize_model
from load import install_kernels, load_model
from sampling import SamplingParams

# Functions that these runs do not call, or not by a name that can be patched.
NOT_CALLED = {
    "kernels.attention_torch", "kernels.zero_bad", "kernels.rms_norm", "formats.StackedLinear.multiply_expert",
    "formats.StackedLinear.forward", "sampling.probabilities_reference", "mixers.experts.run_experts",
    "mixers.mtp.MTPLayer.read", "mixers.mtp.MTPLayer.join",
}  # fmt: skip
# The beginnings of functions' names -> a tiny model that needs these functions
MODELS = {
    "mixers.recurrent.runs_of": "qwen35-grouped", "mixers.recurrent.outer": "qwen35-grouped",
    "mixers.recurrent.delta": "qwen35-grouped", "mixers.recurrent.gated": "qwen35-grouped",
    "mixers.recurrent.Short": "lfm2-biased",
    "mixers.recurrent.ConvState": "lfm2-biased", "mixers.recurrent": "qwen35-grouped", "mixers.experts": "qwen35-moe-5",
    "layers.MatrixLayer": "mixtral-3", "layers.Linear.multiply_rows": "mixtral-3", "layers.Layer": "bloom-3",
    "layers.Router": "qwen35-moe-5",
    "kernels.layer_norm": "bloom-3", "kernels.alibi": "bloom-3", "model.Attention.normalize": "qwen3-gqa",
    "model.LayerInput": "gemma4-e2b", "model.soft_cap": "nanochat-gqa",
}  # fmt: skip


def test_fingerprints_are_those_of_the_code():
    recorded = edits.recorded_fingerprints()
    changed = [name for name in recorded if edits.is_edited(name)]
    assert not changed, f"{changed}: change the kernels that stand for these functions, too; then run: python edits.py"
    assert [line.split()[0] for line in edits.current_fingerprints().splitlines()] == list(recorded)


def load(tiny, name, quantized):
    model = load_model(tiny(name)[2], dtype=torch.float32, kernels="torch" if quantized else "auto")
    return install_kernels(quantize_model(model, Quantization("int8", 32, "int8"))) if quantized else model


def patch(monkeypatch, name, function):
    """Replace a function wherever a module of fastpath has it."""
    original = edits.function_at(name)
    if name.count(".") > edits.module_of(name).count(".") + 1:
        monkeypatch.setattr(edits.function_at(name.rpartition(".")[0]), name.rpartition(".")[2], function)
    for module in list(sys.modules.values()):
        for key, value in list(vars(module).items()):
            if value is original:
                monkeypatch.setattr(module, key, function)


@pytest.mark.parametrize("name", sorted(edits.recorded_fingerprints().keys() - NOT_CALLED))
def test_a_patched_function_runs(name, tiny, monkeypatch, capsys):
    """The wrapper claims to be the original, as functools.wraps makes it."""
    family = next((family for begin, family in MODELS.items() if name.startswith(begin)), "llama-gqa-biased")
    original = edits.function_at(name)
    calls = []

    @wraps(original)
    def wrapper(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    edits.say_once.cache_clear()
    quantized = name.startswith("formats")
    expected = run(load(tiny, family, quantized))
    assert "edited" not in capsys.readouterr().err
    patch(monkeypatch, name, wrapper)
    found = run(load(tiny, family, quantized))
    assert calls and f"{name} was edited: " in capsys.readouterr().err
    assert found == expected


def test_a_kernel_comes_back_with_its_function(monkeypatch):
    known = {"linear_packed", "attention"}
    for function, expected in ((abs, {"linear_packed"}), (edits.function_at("kernels.zero_bad"), set(known))):
        monkeypatch.setattr("kernels.zero_bad", function)
        edits.set_aside(known, "a device")
        assert known == expected


def test_an_edited_file_is_noticed_and_a_comment_is_not(tmp_path, tiny):
    """A copy of the tree, whose attention is edited: first only in its comments and its docstring, and then so that
    it gives nothing."""
    for path in ROOT.iterdir():
        if path.name in ("cpu", "drafts", "mixers", "sources", "text") or path.suffix in (".py", ".json"):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    line = "        q, gate = self.read(x, rope, input_pos, rows)\n"
    end = "        return self.out(y.flatten(2))\n"
    source = (tmp_path / "model.py").read_text()
    assert line in source and end in source
    command = [sys.executable, "generate.py", "--checkpoint_path", tiny("llama-mha")[2], "--prompt_ids", "5,9,20"]
    command += ["--temperature", "0", "--max_new_tokens", "9", "--json", "--dtype", "float32"]

    def generated(source):
        (tmp_path / "model.py").write_text(source)
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        return json.loads(done.stdout)["samples"], done.stderr

    commented = source.replace(line, '        """A docstring does not count."""\n\n        # Nor a comment.\n' + line)
    before, errors = generated(commented)
    assert "was edited" not in errors
    after, errors = generated(commented.replace(end, end.replace("y.flatten(2)", "0 * y.flatten(2)")))
    assert "model.Attention.forward was edited: the blocks run operation by operation" in errors
    assert before != after


def run(model):
    engine = Engine(model, 2, 128)
    params = SamplingParams(temperature=1e-3, top_k=9, top_p=0.999, min_p=1e-9, frequency_penalty=1e-9)
    requests = [Request(prompt, params, 6) for prompt in random_prompts([5, 23])]
    generate(engine, requests)
    return [request.new_tokens for request in requests]
