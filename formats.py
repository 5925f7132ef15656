"""The quantized formats: how weights are packed into 8 and 4 bits, and the layers that hold packed weights.

Read down: Quantization (a checkpoint's settings), the two formats (`pack`), the quantized layers, and `swap`, which
puts these layers into a model. Knows nothing of files.

A weight matrix (N,K) has N rows (outputs) and K columns (inputs). Each row is divided into G groups of `groupsize`
columns; the last group may be shorter.
  int8  symmetric:  w = q * scale,        q -127..127;  weight int8 (N,K), scales float16 (N,G)
  int4  asymmetric: w = q * scale + min,  q 0..15;      packed uint8 (N,ceil(K/2)), the low nibble the even column;
                                                        scales, mins float16 (N,G)
This is the layout on disk, the same for every device. A groupsize of 0 means one group per row (per channel).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels import linear_int4, linear_int8, unpack_int4, unpack_int8
from model import Embedding, Linear, Transformer

MODES = ("int8", "int4", "int4-gptq")
FORMATS = ("int8", "int4", "none")
GROUPSIZES = (0, 32, 64, 128)
PACKED_AT_ONCE = 1 << 20  # weights packed at once, to bound memory: packing makes several float32 copies of them


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized: `mode` is for the linear layers, `head` for the embedding and the output head."""

    mode: str
    groupsize: int
    head: str
    exceptions: dict[str, str] = field(default_factory=dict)  # module name to format, for mixed GGUF files

    def __post_init__(self):
        for name, known in (("mode", MODES), ("groupsize", GROUPSIZES), ("head", FORMATS)):
            if getattr(self, name) not in known or type(getattr(self, name)) is not type(known[0]):
                raise ValueError(f"quantization {name} must be one of {known}, not {getattr(self, name)!r}")
        if not isinstance(self.exceptions, dict) or not set(self.exceptions.values()) <= set(FORMATS):
            raise ValueError(f"quantization exceptions must name formats of {FORMATS}, not {self.exceptions!r}")

    def format(self, name: str) -> str:
        """The format of the module with this name: "int8", "int4" or "none"."""
        default = self.head if name in ("embedding", "output") else self.mode.removesuffix("-gptq")
        return self.exceptions.get(name, default)


class Packed(NamedTuple):
    """A quantized matrix: its unpacked shape, and the packed tensors by name."""

    shape: torch.Size
    parts: dict[str, Tensor]


# ---------------------------------------------------------------- the formats


def split_groups(w: Tensor, groupsize: int) -> Tensor:
    """Reshape w (N,K) to (N,G,groupsize) float32; a shorter last group is padded with copies of its last column."""
    N, K = w.shape
    size = groupsize or K
    missing = -K % size
    w = torch.cat([w, w[:, -1:].expand(N, missing)], 1) if missing else w
    return w.float().reshape(N, -1, size)


def round_up_to_half(x: Tensor) -> Tensor:
    """Round x (float32, >= 0) up to float16. A scale that was rounded down could not reach a group's largest weight."""
    half = x.to(torch.float16)
    return torch.where(half.float() < x, torch.nextafter(half, torch.full_like(half, float("inf"))), half)


def check_finite(w: Tensor, *stored: Tensor):
    """Raise ValueError if the weights w, or the float16 tensors that are stored for them, are not finite."""
    if not torch.isfinite(w).all():
        raise ValueError("holds NaN or infinity")
    if not all(torch.isfinite(tensor).all() for tensor in stored):
        raise ValueError("holds weights too large for float16 scales")


def pack_int8(w: Tensor, groupsize: int) -> dict[str, Tensor]:
    """Quantize w (N,K) to {"weight" int8 (N,K), "scales" float16 (N,G)}; raises ValueError if w is not finite."""
    g = split_groups(w, groupsize)
    scales = round_up_to_half(g.abs().amax(2) / 127)
    check_finite(w, scales)
    steps = scales.float()[:, :, None]
    q = torch.where(steps > 0, g / steps, 0).round_().clamp_(-127, 127).to(torch.int8)
    return {"weight": q.flatten(1)[:, : w.shape[1]].contiguous(), "scales": scales}


def int4_grid(w: Tensor, groupsize: int) -> tuple[Tensor, Tensor]:
    """Returns scales and mins, float16 (N,G): 16 levels span the smallest to the largest weight of each group of w."""
    g = split_groups(w, groupsize)
    mins = g.amin(2).to(torch.float16)
    scales = round_up_to_half(((g.amax(2) - mins.float()) / 15).clamp(min=0))
    check_finite(w, scales, mins)
    return scales, mins


def pack_int4(w: Tensor, groupsize: int) -> dict[str, Tensor]:
    """Quantize w (N,K) to the nearest levels: {"packed", "scales", "mins"}; raises ValueError if w is not finite."""
    scales, mins = int4_grid(w, groupsize)
    steps = scales.float()[:, :, None]
    q = torch.where(steps > 0, (split_groups(w, groupsize) - mins.float()[:, :, None]) / steps, 0)
    q = q.round_().clamp_(0, 15).to(torch.uint8).flatten(1)[:, : w.shape[1]]
    return {"packed": pack_nibbles(q), "scales": scales, "mins": mins}


def pack_nibbles(q: Tensor) -> Tensor:
    """Pack uint8 (N,K) in 0..15 to (N,ceil(K/2)); the low nibble holds the even column."""
    q = torch.nn.functional.pad(q, (0, q.shape[1] % 2))
    return q[:, 0::2] | q[:, 1::2] << 4


PACK = {"int8": pack_int8, "int4": pack_int4}


def pack(w: Tensor, format: str, groupsize: int) -> dict[str, Tensor]:
    """Quantize w (N,K) with pack_int8 or pack_int4, in blocks of rows to need little memory besides w."""
    parts = [PACK[format](rows, groupsize) for rows in w.split(max(1, PACKED_AT_ONCE // w.shape[1]))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# ---------------------------------------------------------------- the layers


class Int8Linear(nn.Module):
    """y = x W^T + bias, where W is unpack_int8(weight, scales)."""

    def __init__(self, K: int, N: int, bias: bool, groupsize: int):
        super().__init__()
        self.in_features, self.out_features, self.groupsize = K, N, groupsize or K
        self.register_buffer("weight", torch.empty(N, K, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(N, -(-K // self.groupsize), dtype=torch.float16))
        self.register_buffer("bias", torch.empty(N) if bias else None)

    def forward(self, x: Tensor):
        return linear_int8(x, self.weight, self.scales, self.groupsize, self.bias)


class Int4Linear(nn.Module):
    """y = x W^T + bias, where W is unpack_int4(packed, scales, mins)."""

    def __init__(self, K: int, N: int, bias: bool, groupsize: int):
        super().__init__()
        self.in_features, self.out_features, self.groupsize = K, N, groupsize or K
        self.register_buffer("packed", torch.empty(N, -(-K // 2), dtype=torch.uint8))
        for name in ("scales", "mins"):
            self.register_buffer(name, torch.empty(N, -(-K // self.groupsize), dtype=torch.float16))
        self.register_buffer("bias", torch.empty(N) if bias else None)

    def forward(self, x: Tensor):
        return linear_int4(x, self.packed, self.scales, self.mins, self.groupsize, self.bias)


class Int8Embedding(Int8Linear):
    """An 8-bit embedding; if the output head is tied to it, `logits` computes the head with the same weights."""

    logits = Int8Linear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32
        return unpack_int8(self.weight[tokens], self.scales[tokens], self.groupsize)


class Int4Embedding(Int4Linear):
    """A 4-bit embedding; if the output head is tied to it, `logits` computes the head with the same weights."""

    logits = Int4Linear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32
        rows = self.packed[tokens], self.scales[tokens], self.mins[tokens]
        return unpack_int4(*rows, self.groupsize, self.in_features)


LINEAR = {"int8": Int8Linear, "int4": Int4Linear}
EMBEDDING = {"int8": Int8Embedding, "int4": Int4Embedding}


def matrices(model: Transformer) -> list[tuple[str, nn.Module]]:
    """(name, module) of the modules that can be quantized: the linear layers and the embedding."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, (Linear, Embedding))]


def swap(model: Transformer, quantization: Quantization | None) -> Transformer:
    """Replace the model's layers by quantized ones on the meta device, which have no weights yet; returns the model."""
    for name, module in matrices(model) if quantization else ():
        format = quantization.format(name)
        if format == "none":
            continue
        N, K = module.weight.shape
        kind = EMBEDDING[format] if isinstance(module, Embedding) else LINEAR[format]
        with torch.device("meta"):
            layer = kind(K, N, getattr(module, "bias", None) is not None, quantization.groupsize)
        model.set_submodule(name, layer)
    return model


def quantize_model(model: Transformer, quantization: Quantization) -> Transformer:
    """Quantize a loaded model layer by layer. Layers that are int8 already are quantized again. Returns the model.

    Kernels are installed afterwards: they pack the layers, and packed layers are left as they are.
    """
    for name, module in list(model.named_modules()):
        is_int8 = isinstance(module, Int8Linear)
        format = quantization.format(name)
        if format == "none" or not (is_int8 or isinstance(module, (Linear, Embedding))):
            continue
        is_embedding = isinstance(module, (Embedding, Int8Embedding))
        w = unpack_int8(module.weight, module.scales, module.groupsize) if is_int8 else module.weight
        N, K = w.shape
        bias = getattr(module, "bias", None)
        layer = (EMBEDDING if is_embedding else LINEAR)[format](K, N, False, quantization.groupsize)
        layer.load_state_dict(pack(w, format, quantization.groupsize), assign=True)
        layer.bias = bias
        model.set_submodule(name, layer)
    return model
