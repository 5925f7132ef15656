"""The quantized formats: how weights are stored in few bits, and the layers that hold such weights.

Read down: what a format consists of; the decoders; the encoders; the table FORMATS; Quantization,
which says how each matrix of a checkpoint is stored; the layers; `swap`, which puts these layers into a model.
Knows nothing of files.

A weight matrix (N,C) has N rows (outputs) and C columns (inputs). Each row is divided into G groups
of `groupsize` columns; the last group may be shorter, and a groupsize of 0 means one group per row
(per channel). (For formats of GGUF files, `groupsize` is the columns of a block of the file. In the
K-quants, 256 columns are a block, and 16 or 32 of them a group: Format.group.) A weight is
    level * scale + min,  or  table[level] * scale
Each weight has its own level, an integer of few bits; its group shares the scale and, in some
formats, the min. Each of these quantized parts is a tensor, the same in files for every device: the
kernels of a device pack them again at load, in a layout of their own.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cli import print_status
from layers import Embedding, Linear, MatrixLayer
from model import Transformer

PACKED_AT_ONCE = 1 << 20  # weights quantized at once: quantizing makes several float32 copies of them
UNPACK_BLOCK = 1 << 22  # weights unpacked at once: few enough to stay in the CPU's cache until they are multiplied

# ---------------------------------------------------------------- what a format consists of


class Part(NamedTuple):
    """A part of a quantized matrix (N,C): a tensor of `count` elements for each `columns` columns of
    each row."""

    name: str
    dtype: torch.dtype
    columns: int  # 0: the columns of a group
    count: int = 1

    def width(self, C: int, groupsize: int) -> int:
        """The number of elements of a row."""
        return -(-C // (self.columns or groupsize)) * self.count


SCALES = Part("scales", torch.float16, 0)
MINS = Part("mins", torch.float16, 0)


class Decoded(NamedTuple):
    """What rows of quantized weights consist of. A weight is level * scale + min."""

    levels: Tensor  # (...,C)
    scales: Tensor  # (...,G)
    mins: Tensor | None  # (...,G)


@dataclass(frozen=True)
class Format:
    """A row of FORMATS.

    decode: gets the parts (...,n) of some rows by name, and C.
    quantize: makes the parts of a matrix w (N,C) for a groupsize, and raises ValueError if w is not
    finite. It is None for formats that are only read.
    """

    bits: int  # the bits of a level
    parts: tuple[Part, ...]
    decode: Callable[[dict[str, Tensor], int], Decoded]
    quantize: Callable[[Tensor, int], dict[str, Tensor]] | None = None
    groupsizes: tuple[int, ...] = (0, 32, 64, 128)  # of GGUF's formats: the columns of a block
    group: int = 0  # the columns that share a scale after `decode`, if fewer than the groupsize (K-quants)
    halves_at: tuple[int, ...] = ()  # the bytes of a block at which float16 numbers begin

    def unpack(self, parts: dict[str, Tensor], groupsize: int, C: int) -> Tensor:
        """The weights (...,C) float32 of rows of the parts (...,n). This is the specification of
        the format.

        groupsize: columns of a group, as in Part; C if a row is one group.
        """
        levels, scales, mins = self.decode(parts, C)
        size = self.group or groupsize
        w = levels.float() * repeat_groups(scales, size, C)
        return w if mins is None else w + repeat_groups(mins, size, C)

    def is_finite(self, parts: dict[str, Tensor]) -> bool:
        """Whether all scales and mins are finite numbers."""
        numbers = [part for part in parts.values() if part.is_floating_point()]
        if self.halves_at:
            blocks = parts["blocks"].unflatten(-1, (-1, self.parts[0].count))
            numbers = [halves(blocks, at) for at in self.halves_at]
        return all(torch.isfinite(x).all() for x in numbers)


def repeat_groups(x: Tensor, groupsize: int, C: int) -> Tensor:
    """Repeats each group's value for its columns: (...,G) -> (...,C) float32. The last group may be
    shorter."""
    if C % groupsize == 0:
        return x.float()[..., None].expand(*x.shape, groupsize).flatten(-2)
    # An index, because torch 2.13 compiles `expand` and a slice to reads beyond the end.
    return x.float()[..., torch.arange(C, device=x.device) // groupsize]


# ---------------------------------------------------------------- our own formats: levels, scales and mins are tensors


def unpack_nibbles(packed: Tensor, C: int) -> Tensor:
    """uint8 (...,ceil(C/2)) -> uint8 (...,C) in 0..15; the low nibble holds the even column."""
    q = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    if C % 2:
        q = q[..., :C]
    return q


def pack_nibbles(q: Tensor) -> Tensor:
    """Pack uint8 (N,C) in 0..15 to (N,ceil(C/2)); the low nibble holds the even column."""
    q = F.pad(q, (0, q.shape[1] % 2))
    return q[:, 0::2] | q[:, 1::2] << 4


def decode_int8(parts: dict[str, Tensor], C: int) -> Decoded:
    return Decoded(parts["weight"], parts["scales"], None)  # levels -128..127


def decode_int4(parts: dict[str, Tensor], C: int) -> Decoded:
    return Decoded(unpack_nibbles(parts["packed"], C), parts["scales"], parts["mins"])  # levels 0..15


# ---------------------------------------------------------------- the formats of GGUF files
#
# Such a format has one part, the blocks of the file: uint8 (N, C / columns * bytes). Each block
# begins or ends with float16 numbers. These functions get blocks (...,bytes) and return levels,
# scales and mins of each block. The layouts are from ggml-common.h of llama.cpp. The products
# are exact in float32, so the weights equal the gguf package's, to the bit.


def block_format(
    bits: int,
    block: tuple[int, int],
    decode: Callable,
    group: int = 32,
    halves_at=(0,),
    quantize: Callable | None = None,
) -> Format:
    """The Format of blocks of a GGUF file.

    block: how many columns a block has, and how many bytes. decode: from blocks (...,bytes) to
    levels (...,columns), scales, and mins or None. The other arguments are fields of Format.
    """
    columns, nbytes = block

    def decode_rows(parts: dict[str, Tensor], C: int) -> Decoded:
        levels, scales, mins = decode(parts["blocks"].unflatten(-1, (-1, nbytes)))
        G = -(-C // group)
        if mins is not None:
            mins = mins.flatten(-2)[..., :G]
        return Decoded(levels.flatten(-2)[..., :C], scales.flatten(-2)[..., :G], mins)

    part = Part("blocks", torch.uint8, columns, nbytes)
    return Format(bits, (part,), decode_rows, quantize, (columns,), group, halves_at)


def halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 number that begins at byte `at` of each block (...,bytes), as (...,1)."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def nibbles(x: Tensor) -> Tensor:
    """Bytes (...,n) -> (...,2n): first all low nibbles, then all high nibbles."""
    return torch.cat([x & 15, x >> 4], -1)


def bits(x: Tensor, count: int, width: int) -> Tensor:
    """Numbers of `width` bits from bytes (...,n), `count` from each, beginning with the lowest
    bits: (...,count,n)."""
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8, device=x.device)
    return x[..., None, :] >> shifts[:, None] & (1 << width) - 1


def decode_q4_0(blocks: Tensor):
    return nibbles(blocks[..., 2:]).to(torch.int8) - 8, halves(blocks, 0), None


def decode_q4_1(blocks: Tensor):
    return nibbles(blocks[..., 4:]), halves(blocks, 0), halves(blocks, 2)


def five_bits(fifth: Tensor, low: Tensor) -> Tensor:
    """The fifth bits of 32 columns, as the bits of 4 bytes (...,4), and the nibbles (...,16) ->
    levels (...,32)."""
    return nibbles(low) | bits(fifth, 8, 1).transpose(-1, -2).flatten(-2) << 4


def decode_q5_0(blocks: Tensor):
    return five_bits(blocks[..., 2:6], blocks[..., 6:]).to(torch.int8) - 16, halves(blocks, 0), None


def decode_q5_1(blocks: Tensor):
    return five_bits(blocks[..., 4:8], blocks[..., 8:]), halves(blocks, 0), halves(blocks, 2)


def decode_q8_0(blocks: Tensor):
    return blocks[..., 2:].contiguous().view(torch.int8), halves(blocks, 0), None


def six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and mins (...,8) of Q4_K and Q5_K: numbers of 6 bits in bytes 4 to 15, in units of two
    float16 numbers."""
    a, b, c = blocks[..., 4:16].split(4, -1)
    scales = torch.cat([a & 63, c & 15 | a >> 6 << 4], -1)
    mins = torch.cat([b & 63, c >> 4 | b >> 6 << 4], -1)
    return halves(blocks, 0).float() * scales, -halves(blocks, 2).float() * mins


def decode_q4_k(blocks: Tensor):
    return nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), *six_bit_scales(blocks)


def decode_q5_k(blocks: Tensor):
    low = nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return low | bits(blocks[..., 16:48], 8, 1).flatten(-2) << 4, *six_bit_scales(blocks)


def decode_q6_k(blocks: Tensor):
    low = nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 4, 2).flatten(-3)
    scales = halves(blocks, 208).float() * blocks[..., 192:208].contiguous().view(torch.int8)
    return (low | high << 4).to(torch.int8) - 32, scales, None


# The 16 levels of llama.cpp's IQ4_NL: closer together around 0, where most weights are.
IQ4_NL_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def from_table(q: Tensor) -> Tensor:
    return torch.tensor(IQ4_NL_TABLE, dtype=torch.int8, device=q.device)[q.long()]


def decode_iq4_nl(blocks: Tensor):
    return from_table(nibbles(blocks[..., 2:])), halves(blocks, 0), None


def decode_iq4_xs(blocks: Tensor):
    high = bits(blocks[..., 2:4], 4, 2).transpose(-1, -2).flatten(-2)  # two bits of each scale
    low = bits(blocks[..., 4:8], 2, 4).transpose(-1, -2).flatten(-2)
    scales = halves(blocks, 0).float() * ((low | high << 4).to(torch.int8) - 32)
    return from_table(nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)), scales, None


# ---------------------------------------------------------------- the encoders


def split_groups(w: Tensor, groupsize: int) -> Tensor:
    """Reshape w (N,C) to (N,G,groupsize) float32; a shorter last group is padded with copies of its
    last column."""
    N, C = w.shape
    size = groupsize or C
    w = F.pad(w.float(), (0, -C % size), mode="replicate")
    return w.reshape(N, -1, size)


def round_up_to_half(x: Tensor) -> Tensor:
    """Round x (float32, >= 0) up to float16. A scale that was rounded down could not reach a
    group's largest weight."""
    half = x.to(torch.float16)
    return torch.where(half.float() < x, torch.nextafter(half, torch.full_like(half, float("inf"))), half)


def check_finite(w: Tensor, *stored: Tensor):
    """Raise ValueError if the weights w, or the float16 tensors that are stored for them, are not
    finite."""
    if not torch.isfinite(w).all():
        raise ValueError("holds NaN or infinity")
    if not all(torch.isfinite(tensor).all() for tensor in stored):
        raise ValueError("holds weights too large for float16 scales")


def nearest_levels(distance: Tensor, scales: Tensor, low: int, high: int, C: int) -> Tensor:
    """The levels (N,C) in low..high nearest to `distance` (N,G,groupsize), in steps of scales
    (N,G)."""
    steps = scales.float()[:, :, None]
    return torch.where(steps > 0, distance / steps, 0).round_().clamp_(low, high).flatten(1)[:, :C]


def quantize_int8(w: Tensor, groupsize: int) -> dict[str, Tensor]:
    """Symmetric: levels -127..127 reach from the largest weight of a group to its negative."""
    g = split_groups(w, groupsize)
    scales = round_up_to_half(g.abs().amax(2) / 127)
    check_finite(w, scales)
    levels = nearest_levels(g, scales, -127, 127, w.shape[1])
    return {"weight": levels.to(torch.int8).contiguous(), "scales": scales}


def int4_grid(w: Tensor, groupsize: int) -> tuple[Tensor, Tensor]:
    """Scales and mins, float16 (N,G): 16 levels span the smallest to the largest weight of each
    group of w."""
    g = split_groups(w, groupsize)
    mins = g.amin(2).to(torch.float16)
    scales = round_up_to_half(((g.amax(2) - mins.float()) / 15).clamp(min=0))
    check_finite(w, scales, mins)
    return scales, mins


def quantize_int4(w: Tensor, groupsize: int) -> dict[str, Tensor]:
    """Asymmetric: levels 0..15 reach from the smallest to the largest weight of a group."""
    scales, mins = int4_grid(w, groupsize)
    distance = split_groups(w, groupsize) - mins.float()[:, :, None]
    levels = nearest_levels(distance, scales, 0, 15, w.shape[1]).to(torch.uint8)
    return {"packed": pack_nibbles(levels), "scales": scales, "mins": mins}


def quantize_iq4_nl(w: Tensor, groupsize: int) -> dict[str, Tensor]:
    """Non-linear: a group's levels are the nearest in a table, for the scale that fits its weights
    best.

    Some scales are tried, which map the largest weight to one end of the table or near it. For
    each, the nearest levels are chosen, and then the scale with the least squared error for these
    levels, in which large weights count more.
    """
    g = split_groups(w, groupsize)  # (N,G,32)
    table = torch.tensor(IQ4_NL_TABLE, dtype=torch.float32)
    middles = (table[1:] + table[:-1]) / 2
    largest = g.gather(2, g.abs().argmax(2, keepdim=True))
    x = torch.where(largest == 0, 0, g / largest)  # -1..1, so that no product overflows

    scales = torch.zeros_like(largest)
    best = torch.zeros_like(largest)
    for end in (*range(-134, -119), 113, 127):
        values = table[torch.bucketize(x * end, middles)]
        weighted = x * x * values
        products = (weighted * x).sum(2, keepdim=True)
        squares = (weighted * values).sum(2, keepdim=True)
        gain = torch.where(squares > 0, products * products / squares, 0)  # how much smaller the squared error is
        scales = torch.where(gain > best, products / squares, scales)
        best = torch.maximum(gain, best)

    scales = (scales * largest)[..., 0].to(torch.float16)
    check_finite(w, scales)
    steps = scales.float()[:, :, None]
    levels = torch.bucketize(torch.where(steps != 0, g / steps, 0), middles)
    q = levels.to(torch.uint8)  # (N,G,32)
    blocks = torch.cat([scales[..., None].view(torch.uint8), q[..., :16] | q[..., 16:] << 4], -1)
    return {"blocks": blocks.flatten(1)}


# ---------------------------------------------------------------- the table

FORMATS = {
    "int8": Format(8, (Part("weight", torch.int8, 1), SCALES), decode_int8, quantize_int8),
    "int4": Format(4, (Part("packed", torch.uint8, 2), SCALES, MINS), decode_int4, quantize_int4),
    "q4_0": block_format(4, (32, 18), decode_q4_0),
    "q4_1": block_format(4, (32, 20), decode_q4_1, halves_at=(0, 2)),
    "q5_0": block_format(5, (32, 22), decode_q5_0),
    "q5_1": block_format(5, (32, 24), decode_q5_1, halves_at=(0, 2)),
    "q8_0": block_format(8, (32, 34), decode_q8_0),
    "q4_k": block_format(4, (256, 144), decode_q4_k, halves_at=(0, 2)),
    "q5_k": block_format(5, (256, 176), decode_q5_k, halves_at=(0, 2)),
    "q6_k": block_format(6, (256, 210), decode_q6_k, group=16, halves_at=(208,)),
    "iq4_nl": block_format(4, (32, 18), decode_iq4_nl, quantize=quantize_iq4_nl),
    "iq4_xs": block_format(4, (256, 136), decode_iq4_xs),
}

GPTQ = "int4-gptq"  # a mode of Quantization, in the format int4


def pack(w: Tensor, format: str, groupsize: int) -> dict[str, Tensor]:
    """Quantize w (N,C) to the quantized parts of a format, in blocks of rows to need little memory besides w."""
    blocks = w.split(max(1, PACKED_AT_ONCE // w.shape[1]))
    packed = [FORMATS[format].quantize(rows, groupsize) for rows in blocks]
    return {name: torch.cat([parts[name] for parts in packed]) for name in packed[0]}


class Scheme(NamedTuple):
    """How one matrix is stored: the name of its format, and the columns of a group, or for a format of
    GGUF files of a block (0: a whole row)."""

    format: str
    groupsize: int


@dataclass(frozen=True)
class Quantization:
    """How the matrices of a checkpoint are stored.

    mode: the format of the matrices in the blocks, or "int4-gptq": int4, made with GPTQ.
    groupsize: as in Scheme.
    head: the format of the embedding, the output head, and the table and projection of model.LayerInputs.
    exceptions: module name -> format, for all modules that have another one. If q, k and v, or gate
    and up, have different formats, the exception for the module that holds them names them all
    ("q4_k+q4_k+q6_k").

    head and exceptions are formats with the same groupsize, or with one of their own ("int4-g64"),
    or "none" for matrices that are not quantized.
    """

    mode: str
    groupsize: int
    head: str
    exceptions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        modes = (*FORMATS, GPTQ)
        if self.mode not in modes:
            raise ValueError(f"quantization mode must be one of {modes}, not {self.mode!r}")
        if not isinstance(self.exceptions, dict):
            raise ValueError(f"quantization exceptions must name formats of modules, not {self.exceptions!r}")

        known = rf"none|({'|'.join(FORMATS)})(-g[0-9]{{1,4}})?"
        texts = [("mode", self.format), ("head", self.head)]
        texts += [(name, piece) for name, text in self.exceptions.items() for piece in str(text).split("+")]
        for name, text in texts:
            if not re.fullmatch(known, str(text)):
                raise ValueError(f"quantization {name} must be one of {(*FORMATS, 'none')}, not {text!r}")
            if text == "none":
                continue
            format, size = self._parse(text)
            sizes = FORMATS[format].groupsizes
            if type(size) is not int or size not in sizes:
                raise ValueError(f"quantization groupsize of {name} ({format}) must be one of {sizes}, not {size!r}")

    def _parse(self, text: str) -> Scheme | None:
        name, _, size = text.partition("-g")
        if name == "none":
            return None
        if size:
            return Scheme(name, int(size))
        sizes = FORMATS[name].groupsizes
        if len(sizes) == 1 and name != self.mode:  # GGUF's formats have one groupsize, whatever the mode's groupsize is
            return Scheme(name, sizes[0])
        return Scheme(name, self.groupsize)

    @property
    def format(self) -> str:
        """The format of the matrices in the blocks."""
        return "int4" if self.mode == GPTQ else self.mode

    @property
    def bits(self) -> int:
        """The bits of a level in the blocks."""
        return FORMATS[self.format].bits

    def usual(self, name: str) -> str:
        """The format of the module with this name, unless it is one of the exceptions."""
        in_blocks = not name.startswith(("embedding", "output", "layer_inputs."))
        return self.format if in_blocks else self.head

    def scheme(self, name: str) -> Scheme | list[Scheme | None] | None:
        """How the module with this name is stored; None if it is not quantized, a list if its
        pieces differ."""
        text = self.exceptions.get(name, self.usual(name))
        pieces = [self._parse(piece) for piece in text.split("+")]
        return pieces if len(pieces) > 1 else pieces[0]


# ---------------------------------------------------------------- the layers


class QuantizedLinear(MatrixLayer):
    """y = x W^T + bias. The parts of W are buffers."""

    def __init__(self, C: int, N: int, bias: bool, scheme: Scheme):
        super().__init__(C, N)
        self.scheme = scheme
        self.format = FORMATS[scheme.format]
        self.groupsize = scheme.groupsize or C
        self.stored_as = scheme.format
        for part in self.format.parts:
            self.register_buffer(part.name, torch.empty(N, part.width(C, self.groupsize), dtype=part.dtype))
        self.register_buffer("bias", torch.empty(N) if bias else None)

    def parts(self, rows=slice(None)) -> dict[str, Tensor]:
        """The parts of these rows, by name."""
        return {part.name: getattr(self, part.name)[rows] for part in self.format.parts}

    def weights(self, rows=slice(None)) -> Tensor:
        """These rows of W, (...,C) float32."""
        return self.format.unpack(self.parts(rows), self.groupsize, self.in_features)

    def forward(self, x: Tensor):
        """The reference."""
        y = self.multiply_rows(x, 0, self.out_features)
        return y if self.bias is None else y + self.bias

    def multiply_rows(self, x: Tensor, start: int, stop: int):
        """Unpacks W in blocks of rows, so that W is never in memory whole. A compiled graph fuses the
        unpacking with the product, without blocks."""
        step = max(1, UNPACK_BLOCK // self.in_features)
        if torch.compiler.is_compiling():
            step = stop - start

        pieces = []
        for first in range(start, stop, step):
            weights = self.weights(slice(first, min(first + step, stop)))
            pieces.append(F.linear(x, weights.to(x.dtype)))
        return torch.cat(pieces, dim=-1)

    def first_rows(self, n: int):
        with torch.device("meta"):
            layer = QuantizedLinear(self.in_features, n, False, self.scheme)
        layer.load_state_dict(self.parts(slice(n)), assign=True)
        return layer


class QuantizedEmbedding(QuantizedLinear):
    """The embedding table. If the output head is tied to it, `logits` computes the head with the
    same weights."""

    logits = QuantizedLinear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32
        return self.weights(tokens)


class StackedLinear(nn.ModuleList):
    """Several layers without bias as one linear layer, which concatenates their outputs: q, k and v,
    or gate and up, in different formats."""

    columns = ()

    def __init__(self, pieces: Iterable[MatrixLayer], bias: Tensor | None):
        super().__init__(pieces)
        self.in_features = self[0].in_features
        self.n_expert = self[0].n_expert
        self.rows = [units for piece in self for units in piece.rows]
        self.out_features = sum(piece.out_features for piece in self)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor):
        y = torch.cat([piece(x) for piece in self], -1)
        return y if self.bias is None else y + self.bias

    def multiply_expert(self, x: Tensor, e: int) -> Tensor:
        """x times the matrices of expert e, if the pieces have an expert's gate and up."""
        return torch.cat([piece.multiply_expert(x, e) for piece in self], -1)


def piece_rows(layer: MatrixLayer) -> list[int]:
    """How many rows of a layer's matrix belong to each of the matrices that are stacked in it."""
    return [layer.n_expert * sum(units.size for units in piece) for piece in layer.rows]


def make_stack(plain: Linear, schemes: list[Scheme | None]) -> StackedLinear:
    """An empty StackedLinear for the matrices that are stacked in a Linear."""
    rows = piece_rows(plain)
    if len(schemes) != len(rows):
        raise ValueError(f"{len(schemes)} formats for {len(rows)} matrices")

    C = plain.in_features
    pieces = []
    for N, units, scheme in zip(rows, plain.rows, schemes):
        piece = Linear(C, N, False) if scheme is None else QuantizedLinear(C, N, False, scheme)
        piece.n_expert = plain.n_expert
        piece.rows = [units]
        pieces.append(piece)
    bias = None if plain.bias is None else torch.empty(plain.bias.shape)
    return StackedLinear(pieces, bias)


def make_layer(plain: Linear | QuantizedLinear, scheme: Scheme) -> QuantizedLinear:
    """An empty quantized layer for the matrix of another one."""
    kind = QuantizedEmbedding if isinstance(plain, (Embedding, QuantizedEmbedding)) else QuantizedLinear
    layer = kind(plain.in_features, plain.out_features, plain.bias is not None, scheme)
    layer.take_description(plain)
    return layer


# Formats whose values int4 or int8 can hold exactly: format -> (int4 or int8, the level that stands
# for 0).
SAME_VALUES = {"q4_0": ("int4", -8), "q4_1": ("int4", 0), "q8_0": ("int8", 0)}


class Repacking:
    """Replaces the layers whose formats a device does not support, one after the other.

    A layer becomes int4 or int8, where that is supported and can hold the same values. Otherwise it
    is unpacked to `dtype`.
    """

    def __init__(self, supported: Iterable[str], dtype: torch.dtype, why: str = "no kernels"):
        """why: what the line that `report` prints begins with."""
        self.supported = frozenset(supported)
        self.dtype = dtype
        self.why = why
        self.extra = 0  # bytes
        self.unpacked: set[str] = set()  # formats

    def replace(self, model: nn.Module, name: str):
        """Replace the layer with this name, if its format is not supported."""
        layer = model.get_submodule(name)
        if not isinstance(layer, (QuantizedLinear, StackedLinear)):
            return
        pieces = layer if isinstance(layer, StackedLinear) else [layer]
        unsupported = {piece.stored_as for piece in pieces} - {None, *self.supported}
        if not unsupported:
            return
        if isinstance(layer, QuantizedLinear) and SAME_VALUES.get(layer.stored_as, (None, 0))[0] in self.supported:
            model.set_submodule(name, convert_layer(layer))
            return
        dense = dense_layer(layer, self.dtype)
        self.extra += dense.weight.nbytes - sum(buffer.nbytes for buffer in layer.buffers())
        self.unpacked |= unsupported
        model.set_submodule(name, dense)

    def report(self):
        """Print what it has cost."""
        if self.unpacked:
            formats = ", ".join(sorted(self.unpacked))
            print_status(f"{self.why} for {formats}: unpacked, which takes {self.extra / 1e6:.1f} MB more")


def whole_layers(model: nn.Module) -> list[str]:
    """The names of all layers with a matrix. The pieces of a StackedLinear belong to it."""
    kinds = (MatrixLayer, StackedLinear)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    return [name for name in names if not isinstance(parents[name], kinds)]


def convert_layer(layer: QuantizedLinear) -> QuantizedLinear:
    """The same weights in int4 or int8, for a format of SAME_VALUES."""
    format, zero = SAME_VALUES[layer.scheme.format]
    converted = make_layer(layer, Scheme(format, layer.groupsize))
    levels, scales, mins = layer.format.decode(layer.parts(), layer.in_features)
    converted.scales = scales
    if format == "int8":
        converted.weight = levels
    else:
        converted.packed = pack_nibbles((levels - zero).to(torch.uint8))
        converted.mins = scales * zero if mins is None else mins
    converted.bias = layer.bias
    return converted


def dense_layer(layer: QuantizedLinear | StackedLinear, dtype: torch.dtype) -> Linear:
    """The Linear or Embedding with the weights of a quantized layer, in dtype, unpacked in blocks
    of rows."""
    N = layer.out_features
    C = layer.in_features
    X = layer.n_expert
    weight = torch.empty(N, C, dtype=dtype, device=next(layer.buffers()).device)
    pieces = layer if isinstance(layer, StackedLinear) else [layer]
    # In a stack of experts, each piece has as many rows of every expert.
    sizes = [piece.out_features // X for piece in pieces]
    for piece, targets in zip(pieces, weight.view(X, N // X, C).split(sizes, 1)):
        for e, target in enumerate(targets):
            unpack_rows(piece, e * len(target), target)

    state = {"weight": weight}
    if layer.bias is not None:
        state["bias"] = layer.bias
    with torch.device("meta"):
        if isinstance(layer, QuantizedEmbedding):
            dense = Embedding(N, C)
        else:
            dense = Linear(C, N, layer.bias is not None)
    dense.load_state_dict(state, assign=True)
    dense.take_description(layer)
    return dense


def unpack_rows(layer: QuantizedLinear | Linear, first: int, target: Tensor):
    """Write the weights of the rows from `first` on to target (rows,C)."""
    step = max(1, UNPACK_BLOCK // layer.in_features)
    for start in range(0, len(target), step):
        part = target[start : start + step]
        rows = slice(first + start, first + start + len(part))
        part.copy_(layer.weights(rows) if isinstance(layer, QuantizedLinear) else layer.weight[rows])


def matrices(model: Transformer) -> list[tuple[str, Linear]]:
    """(name, module) of the modules that can be quantized: the linear layers and the embedding."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Linear)]


def swap(model: Transformer, scheme_of: Callable[[str], Scheme | None]) -> Transformer:
    """Replace the model's layers by quantized ones on the meta device, which have no weights yet;
    returns the model.

    scheme_of: how the module with a name is stored, such as Quantization.scheme.
    """
    for name, module in matrices(model):
        scheme = scheme_of(name)
        with torch.device("meta"):
            if isinstance(scheme, list):
                model.set_submodule(name, make_stack(module, scheme))
            elif scheme is not None:
                model.set_submodule(name, make_layer(module, scheme))
    return model


def quantize_model(model: Transformer, quantization: Quantization) -> Transformer:
    """Quantize a loaded model layer by layer, also layers that are quantized with more bits.
    Returns the model.

    Call it before kernels are installed: layers that they have packed are skipped.
    """
    for name, module in list(model.named_modules()):
        is_quantized = isinstance(module, QuantizedLinear)
        scheme = quantization.scheme(name)
        if scheme is None or not (is_quantized or isinstance(module, Linear)):
            continue
        if is_quantized and module.format.bits <= FORMATS[scheme.format].bits:
            continue

        weights = module.weights() if is_quantized else module.weight
        layer = make_layer(module, scheme)
        layer.load_state_dict(pack(weights, scheme.format, scheme.groupsize), assign=True, strict=False)
        layer.bias = module.bias
        model.set_submodule(name, layer)
    return model
