"""From options to a model: which module has the kernels."""

import pytest
import torch

import load
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
