"""Tensor parallelism: the single process is the oracle of every split, on gloo; what torchrun starts ends together.

All splits run in one launch of four processes (tp_worker.py), two, three or four of which share a model.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, VOCABULARY
from tp_worker import PROMPTS, outcome

from checkpoint import UserError, Writer, empty_model, load_model, read_config, read_quantization
from model import Config
from quantize import Quantization, quantize_checkpoint
from ranks import QUIET_S, TICK_S
from tp import SPLIT, Shard, Part, check, split_of

LOGITS = 1e-4  # sums of float32 in another order; the logits are of the order of 1 to 10
LAUNCH_S = 60  # to start and end a few ranks on a busy machine
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

# Sizes are pairwise different within a model as far as the splits allow.
LLAMA = {"n_layer": 2, "vocab_size": VOCABULARY, "max_seq_length": 256}
QWEN2 = LLAMA | {"qkv_bias": True}
QWEN3 = LLAMA | {"qk_norm": True}
WINDOW = LLAMA | {"sliding_window": 7}
BLOOM = LLAMA | {"norm": "layer", "mlp": "gelu", "alibi": True, "embedding_norm": True, "n_token": 95}
BLOOM |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}

# name: (ranks, family, H, K, E, D, F, tied, quantization or None, kernels, compiled)
# Pairwise over ranks, family, format, tied or not, how K goes into the ranks, kernels, compiled or not.
CASES = {
    "2 llama, MHA": (2, LLAMA, 6, 6, 10, 44, 58, False, None, "auto", False),
    "2 qwen2, K copied, int8": (2, QWEN2, 6, 3, 32, 52, 128, True, ("int8", 32, "int8"), "torch", False),
    "2 bloom, int4 in whole rows": (2, BLOOM, 10, 10, 6, 50, 84, True, ("int4", 0, "int4"), "auto", False),
    "2 window, int4": (2, WINDOW, 4, 2, 48, 60, 192, False, ("int4", 32, "none"), "torch", False),
    "2 qwen3, K on both, compiled": (2, QWEN3, 4, 1, 14, 38, 46, False, None, "auto", True),
    "3 llama, K split, int4": (3, LLAMA, 9, 3, 32, 46, 192, True, ("int4", 32, "int8"), "auto", False),
    "3 qwen3, K copied": (3, QWEN3, 6, 2, 12, 40, 54, False, None, "torch", False),
    "3 bloom, residuals after the norm": (3, BLOOM | {"post_norm_residual": True}, 9, 9, 5, 55, 66, False, None, "auto", False),
    "3 window, K on all, int8 in whole rows": (3, WINDOW, 3, 1, 20, 42, 69, False, ("int8", 0, "int8"), "auto", False),
    "4 llama, K on two each, int8": (4, LLAMA, 8, 2, 16, 56, 256, False, ("int8", 32, "int8"), "auto", False),
    "4 qwen2, K split, int4": (4, QWEN2, 12, 4, 64, 70, 256, True, ("int4", 64, "int4"), "auto", False),
    "4 qwen3, K copied": (4, QWEN3, 12, 6, 10, 48, 76, True, None, "auto", False),
    "4 bloom, int8": (4, BLOOM, 8, 8, 16, 64, 128, True, ("int8", 32, "none"), "torch", False),
    "4 window, K split": (4, WINDOW, 8, 4, 22, 58, 68, True, None, "torch", False),
}  # fmt: skip


def make(folder: Path, case) -> Path:
    """The checkpoint of a case, every weight random."""
    _, family, H, K, E, D, F, tied, quantization, *_ = case
    config = Config(n_head=H, n_kv_head=K, head_dim=E, dim=D, hidden_dim=F, tied_embeddings=tied, **family)
    chance = torch.Generator().manual_seed(H * 1000 + D)
    with Writer(folder / "whole") as writer:
        for name, tensor in empty_model(config).state_dict().items():
            scale = 0.3 if tensor.dim() == 1 else 1.2 * tensor.shape[-1] ** -0.5
            weight = torch.randn(tensor.shape, generator=chance) * scale + ("norm" in name and "bias" not in name)
            writer.add(name, weight)
        writer.add_config(config)
        writer.add_json("tokenizer_config.json", {"bos_token_id": 1})
    if quantization is None:
        return folder / "whole"
    quantize_checkpoint(folder / "whole", folder / "quantized", Quantization(*quantization))
    return folder / "quantized"


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """name -> what the ranks found, and the checkpoint of the case."""
    folder = tmp_path_factory.mktemp("tp")
    cases = {}
    for i, (name, case) in enumerate(CASES.items()):
        (folder / str(i)).mkdir()
        cases[name] = {"ranks": case[0], "path": make(folder / str(i), case), "kernels": case[-2], "compiled": case[-1]}
    torch.save(cases, folder / "cases.pt")
    command = [sys.executable, str(ROOT / "tests" / "tp_worker.py"), "cases", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "WORLD_SIZE": "4"}
    ranks = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(4)]
    try:
        assert [process.wait(300) for process in ranks] == [0] * 4
    finally:
        for process in ranks:
            process.kill()
    found = torch.load(folder / "found.pt", weights_only=False)
    return {name: (found[name], cases[name]) for name in cases}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_the_single_process_s(launched, name):
    found, case = launched[name]
    model = load_model(case["path"], dtype=torch.float32, kernels=case["kernels"])
    expected = outcome(model)
    for kind in found.keys() - {"logits", "sizes"}:
        assert found[kind] == expected[kind], kind
    if "logits" in found:
        apart = [float((a - b).abs().max()) for a, b in zip(found["logits"], expected["logits"])]
        assert len(apart) == len(PROMPTS) and max(apart) < LOGITS
    assert len({id for ids, _ in expected["greedy"] for id in ids}) > 3, "a model that says something"
