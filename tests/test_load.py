"""From options to a model: which module has the kernels, and which draft is the default."""

import pytest
import torch

import generate
import load
import serve
import start
from checkpoint import open_directory
from load import Checkpoint, ModelOptions


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_module_of_kernels_is_looked_up_once(tiny, monkeypatch, kernels):
    """With the kernels of the options: on a GPU, Triton is not imported for --kernels torch."""
    found, kernels_module = [], load.kernels_module

    def record(device, kernels):
        found.append(kernels)
        return kernels_module(device, kernels)

    for module in (load, start):
        monkeypatch.setattr(module, "kernels_module", record)
    options = ModelOptions(device="cpu", dtype=torch.float32, kernels=kernels)
    start.load_engine(Checkpoint(open_directory(tiny("llama-mha")[2]), options), 1, 16)
    assert found == [kernels]


@pytest.mark.parametrize("line, looks_up", [
    ("", True), ("--draft none", False), ("--draft int4-self", False), ("--draft_checkpoint_path x", False),
    ("--compile", False),
])  # fmt: skip
def test_prompt_lookup_is_the_default_draft_of_conversations(line, looks_up):
    args = serve.parse_arguments(line.split())
    assert args.model.lookup_by_default == looks_up and not (looks_up and args.model.speculates)
    for chat in ("--chat", "--interactive"):
        assert generate.parse_arguments([chat, *line.split()]).model.lookup_by_default == looks_up
    assert not generate.parse_arguments(line.split()).model.lookup_by_default


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_default_draft_needs_kernels_that_round_alike(tiny, kernels):
    options = ModelOptions(device="cpu", kernels=kernels, lookup_by_default=True)
    engine = start.load_engine(Checkpoint(open_directory(tiny("llama-mha")[2]), options), 1, 16)
    assert (engine.speculation is not None) == engine.model.backend.thread_invariant == (kernels == "auto")
