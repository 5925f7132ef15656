"""The layers whose weights are packed for the C++ kernels of this folder.

Read down: what can be packed; PreparedLayer, which the kernels know; the packed layers; the packing of weights.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cpu.build import FORMATS_WITH_KERNELS

LANES, GROUP = 16, 32  # rows in a packed block; columns in a packed group


def is_quantized(module: nn.Module) -> bool:
    """Whether this is a formats.QuantizedLinear. (formats.py is imported for quantized checkpoints only.)"""
    return hasattr(module, "scheme")


def has_format(module: nn.Module) -> bool:
    """Whether this is a QuantizedLinear in a format that has kernels."""
    return is_quantized(module) and module.scheme.format in FORMATS_WITH_KERNELS


def is_stack(module: nn.Module) -> bool:
    """Whether this is a formats.StackedLinear."""
    return isinstance(module, nn.ModuleList) and hasattr(module, "bias")


def biases(module: nn.Module) -> Tensor | None:
    return getattr(module, "bias", None)


class PreparedLayer:
    """A layer that the kernels know by its handle, which is released with this object."""

    def __init__(self, operation: str, *arguments):
        """operation: prepare_layer or stack_layers, whose argument `layers` is a list of PreparedLayers here."""
        self.arguments = (operation, *arguments)
        handles = ([one.handle for one in given] if isinstance(given, list) else given for given in arguments)
        self.handle = getattr(torch.ops.fastpath, operation)(*handles)
        weakref.finalize(self, torch.ops.fastpath.release_layers, [self.handle]).atexit = False

    def __reduce__(self):  # a copy gets a handle of its own
        return PreparedLayer, self.arguments

    @classmethod
    def of(cls, layer: nn.Module) -> "PreparedLayer":
        """Of a packed layer, or of a Linear or an Embedding as it is."""
        if isinstance(layer, PackedLinear):
            return layer.prepared
        return cls("prepare_layer", "dense", layer.weight, biases(layer), *layer.weight.shape, 0, True)


class PackedLinear(nn.Module):
    """A linear layer, with its weights packed for the kernels. empty: makes the memory for them."""

    def __init__(self, plain: nn.Module, exact: bool, empty: Callable = torch.empty):
        super().__init__()
        self.register_buffer("bias", biases(plain))
        self.stored_as = getattr(plain, "stored_as", None)
        if is_stack(plain):
            # A piece that is not quantized stays as it is.
            pieces = [PackedLinear(piece, exact, empty) if is_quantized(piece) else piece for piece in plain]
            self.pieces = nn.ModuleList(pieces)
            prepared = [PreparedLayer.of(piece) for piece in pieces]
            self.out_features = sum(piece.out_features for piece in pieces)
            self.in_features = pieces[0].in_features
            self.prepared = PreparedLayer("stack_layers", prepared, self.bias)
            return
        if is_quantized(plain):
            self.out_features, self.in_features = plain.out_features, plain.in_features
            format, groupsize = plain.scheme.format, plain.groupsize
            weight = empty((packed_bytes(plain),), dtype=torch.uint8)
            parts = [part.contiguous() for part in plain.parts().values()]
            torch.ops.fastpath.pack_layer(format, parts, self.in_features, groupsize, weight)
        else:
            self.out_features, self.in_features = plain.weight.shape
            format, groupsize = "tiles", 0
            weight = plain.weight.detach().contiguous()
            packed = pack_bfloat16(weight)
            weight = weight.view(packed.shape).copy_(packed)  # in place: two copies may not fit into memory
        self.register_buffer("weight", weight)
        sizes = (self.out_features, self.in_features, groupsize, exact)
        self.prepared = PreparedLayer("prepare_layer", format, weight, self.bias, *sizes)

    def forward(self, x: Tensor):
        return torch.ops.fastpath.linear_packed.default(x, self.prepared.handle, self.out_features)


class PackedEmbedding(PackedLinear):
    """An embedding; if the output head is tied to it, `logits` computes the head with the same weights."""

    logits = PackedLinear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32, or bfloat16 if the weights are
        if self.weight.dtype != torch.bfloat16:
            return torch.ops.fastpath.embed_packed.default(tokens, self.prepared.handle, self.in_features)
        return self.weight[tokens // LANES, :, :, tokens % LANES].flatten(-3)


# ---------------------------------------------------------------- packing
#
# formats.h and products.h describe the layouts. Nb: blocks of 16 rows (LANES); Kb: groups of 32 columns (GROUP).


def packed_bytes(plain: nn.Module) -> int:
    """Of the packed matrix of a QuantizedLinear, or of those in a StackedLinear; 0 for other layers."""
    if is_stack(plain):
        return sum(map(packed_bytes, plain))
    if not is_quantized(plain):
        return 0
    sizes = (plain.out_features, plain.in_features, plain.groupsize)
    return torch.ops.fastpath.packed_bytes(plain.scheme.format, *sizes)


def pack_bfloat16(weight: Tensor) -> Tensor:
    """Pack bfloat16 (N,K) to (Nb,Kb,16,16,2): of each group 16 times 2 columns, for 16 rows. N and K are multiples."""
    return weight.view(-1, LANES, weight.shape[1] // GROUP, 16, 2).permute(0, 2, 3, 1, 4).contiguous()
