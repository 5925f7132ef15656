"""Checkpoint directories of an earlier version are read as they are, and give the tokens that it recorded for them.

data/checkpoints/README.md says how they were written.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import greedy, only_torch

from load import load_model

DIRECTORIES = Path(__file__).parent / "data" / "checkpoints"
RECORDED = json.loads((DIRECTORIES / "tokens.json").read_text(encoding="utf-8"))


def test_every_directory_has_recorded_tokens():
    assert sorted(path.parent.name for path in DIRECTORIES.glob("*/config.json")) == sorted(RECORDED["tokens"])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", RECORDED["tokens"])
def test_a_directory_gives_the_recorded_greedy_tokens(name, kernels):
    """In float32, in which two operations that round differently choose the same tokens here."""
    expected = RECORDED["tokens"][name]
    model = load_model(DIRECTORIES / name, dtype=torch.float32, kernels=kernels)
    with only_torch() if kernels == "torch" else nullcontext():
        assert greedy(model, RECORDED["prompts"], len(expected[0])) == expected
