"""What a model costs: the bytes of its weights, caches and states, and what a pass reads of them.

Read down: WeightReads, what a pass reads; the roofline; the memory that a model needs, and whether
a device has it. Nothing is measured here: report.py does that.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from checkpoint import empty_model, tensor_dtypes
from cli import UserError
from config import Config
from formats import QuantizedLinear
from layers import LAYER_TABLE, MappedTable, MatrixLayer
from model import Transformer


class WeightReads(NamedTuple):
    """The bytes of weights that a pass of a model reads."""

    dense: float  # of the weights that each pass reads
    row: float = 0.0  # of a token's vector, if the embedding table is only looked up
    experts: tuple[float, ...] = ()  # of one expert of each sparse layer
    n_expert: int = 1  # X
    n_active: int = 1  # the experts that a token uses

    def total(self, tokens: float) -> float:
        """The bytes of a pass over this many tokens."""
        return self.dense + tokens * self.row + self.of_experts(tokens)

    def of_experts(self, tokens: float) -> float:
        """The expected bytes of experts of a pass over this many tokens, if each of them chooses its
        experts at random. Several tokens read an expert once, so a pass reads
        X (1 - (1 - k / X)^tokens) experts per sparse layer."""
        chosen = self.n_expert * (1 - (1 - self.n_active / self.n_expert) ** tokens)
        return chosen * sum(self.experts)


def reads_of(layers: Iterable[nn.Module], sparse: Sequence[nn.Module]) -> WeightReads:
    """What a pass reads of these layers. sparse: the sparse layers in them (Block.sparse)."""
    total = sum(tensor.nbytes for layer in layers for tensor in layer.state_dict().values())
    if not sparse:
        return WeightReads(total)
    X = sparse[0].X
    experts = []
    for layer in sparse:
        tensors = [*layer.gate_up.state_dict().values(), *layer.down.state_dict().values()]
        experts.append(sum(tensor.nbytes for tensor in tensors) / X)
    return WeightReads(total - X * sum(experts), 0.0, tuple(experts), X, sparse[0].k)


def weight_reads(model: Transformer) -> WeightReads:
    """What a decode step reads.

    It reads all weights once, except for the experts that no token has chosen, an embedding table that
    is not tied to the output head, and the table of model.LayerInputs: of these tables, it reads one
    vector per row. The MTP layer does not count.
    """
    layers = dict(model.named_children())
    layers.pop("mtp", None)
    row = layer_table_bytes(model) / model.config.vocab_size
    if model.output is not None:
        table = sum(tensor.nbytes for tensor in layers.pop("embedding").state_dict().values())
        row += table / model.config.vocab_size
    if layers.pop("layer_inputs", None) is not None:
        layers |= {"proj": model.layer_inputs.proj, "norm": model.layer_inputs.norm}
    reads = reads_of(layers.values(), [layer for block in model.blocks for layer in block.sparse])
    return reads._replace(row=row)


def layer_table_bytes(model: Transformer) -> int:
    """The bytes of the table of model.LayerInputs, of which a token reads one row. 0 if there is none. On CPUs they are
    in a mapped file, not in the memory of the process."""
    if model.layer_inputs is None:
        return 0
    table = model.layer_inputs.table
    layer = table.layer if isinstance(table, MappedTable) else table
    return sum(tensor.nbytes for tensor in layer.state_dict().values())


def weight_bytes(model: Transformer, rows: float) -> float:
    """Bytes of weights that one decode step of this many rows reads: see `weight_reads`."""
    return weight_reads(model).total(rows)


def roofline(config: Config, bandwidth: float, dtype=torch.bfloat16, context=0, rows=1, quantization=None) -> dict:
    """FLOPs and bytes per token of a decode step of `rows` rows with `context` positions each.

    bound_tokens_per_s is the upper bound on a machine that reads `bandwidth` bytes per second.
    There are two FLOPs for each weight of a matrix, four for each element of a query and each
    position that it attends to, and seven for each element of a gated delta net's matrices. Only
    the experts that a token uses count.
    """
    model = empty_model(replace(config, mtp=False), quantization)
    model.activation_dtype = dtype
    dtypes = tensor_dtypes(model, dtype)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        tensor.data = tensor.to(dtypes[name])

    state = model.recurrent_bytes
    flops = 2 * multiplied_weights(model) + sum(block.mixer.flops(context) for block in model.blocks)
    weights = weight_bytes(model, rows)
    kv = model.kv_bytes([context] * rows)
    return {
        "flops_per_token": flops,
        "weight_bytes_per_token": weights / rows,
        "kv_bytes_per_token": kv / rows,
        "state_bytes_per_token": state,
        "bandwidth_bytes_per_s": bandwidth,
        "bound_tokens_per_s": bandwidth * rows / (weights + kv + rows * state),
    }


def multiplied_weights(model: Transformer) -> int:
    """How many weights a token is multiplied with."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MatrixLayer)}
    layers.pop(LAYER_TABLE, None)  # its rows are looked up, and it is not multiplied
    if model.output is not None:
        layers.pop("embedding")  # the same
    total = 0
    for layer in layers.values():
        active = model.config.experts.n_active if layer.n_expert > 1 else 1
        total += layer.in_features * layer.out_features // layer.n_expert * active
    return total


# ---------------------------------------------------------------- memory


def total_weight_bytes(
    model: Transformer, dtype: torch.dtype, unpacked: bool = False, device: torch.device | None = None
) -> int:
    """The bytes of all weights of a model on the meta device, if weights that are not quantized get
    `dtype`. unpacked: quantized weights are unpacked to it. device: only the bytes in the memory of this device."""
    dtypes = tensor_dtypes(model, dtype)
    is_mapped = str(device) == "cpu"
    state = {name: one for name, one in model.state_dict().items() if not (is_mapped and name.startswith(LAYER_TABLE))}
    total = sum(tensor.numel() * dtypes[name].itemsize for name, tensor in state.items())
    return total + unpacking_bytes(model, dtype) if unpacked else total


def unpacking_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """How many more bytes the quantized weights take when they are unpacked to `dtype`."""
    layers = [one for name, one in model.named_modules() if isinstance(one, QuantizedLinear) and name != LAYER_TABLE]
    dense = sum(layer.in_features * layer.out_features * dtype.itemsize for layer in layers)
    return dense - sum(tensor.nbytes for layer in layers for tensor in layer.parts().values())


def available_memory(device) -> int:
    """The bytes that can still be allocated on a device, without swap.

    On Linux, the limit of the cgroup is respected.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return free
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The page cache counts as used, but is freed when memory is needed.
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
        return min(free, int(limit) - used + cached)
    except (OSError, ValueError, KeyError):
        return free


def shadow_bytes(model: Transformer) -> int:
    """The bytes of a shadow of the output head (cpu/shadow.py), which a head of 6 or 8 bits has on CPUs."""
    head = model.embedding if model.output is None else model.output
    bits = {"q8_0": 5.5, "int8": 5.5, "q6_k": 4.5}.get(head.stored_as, 0) if model.config.vocab_size >= 16384 else 0
    return int(head.out_features * head.in_features * bits / 8)


def check_memory(weights: float, caches: float, device):
    """UserError, with the bytes needed and free, if weights and caches of these bytes do not fit on a device."""
    free = available_memory(device)
    if weights + caches > free:
        raise UserError(
            f"the model needs {(weights + caches) / 1e9:.2f} GB on {device} ({weights / 1e9:.2f} weights, "
            f"{caches / 1e9:.2f} KV cache), but {free / 1e9:.2f} GB are free; "
            "take a smaller model, dtype, batch or --max_seq_length"
        )
