"""The layers whose weights are packed for the C++ kernels of this folder.

Read down: what can be packed; PreparedLayer, which the kernels know; the packed layers; the packing of weights.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cpu.build import FORMATS_WITH_KERNELS
from formats import QuantizedLinear, StackedLinear
from layers import Linear, MatrixLayer

LANES, GROUP = 16, 32  # rows in a packed block; columns in a packed group


def has_format(module: nn.Module) -> bool:
    """Whether this is a QuantizedLinear in a format that has kernels."""
    return isinstance(module, QuantizedLinear) and module.stored_as in FORMATS_WITH_KERNELS


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


def prepare(layer: MatrixLayer) -> PreparedLayer:
    """The PreparedLayer of a packed layer, or of one whose weights stay as they are."""
    if isinstance(layer, PackedLinear):
        return layer.prepared
    return PreparedLayer("prepare_layer", "dense", layer.weight, layer.bias, *layer.weight.shape, 0, True)


class PackedLinear(MatrixLayer):
    """A linear layer, with its weights packed for the kernels. empty: makes the memory for them."""

    def __init__(self, plain: Linear | QuantizedLinear | StackedLinear, exact: bool, empty: Callable = torch.empty):
        super().__init__(plain.in_features, plain.out_features)
        self.register_buffer("bias", plain.bias)
        if isinstance(plain, StackedLinear):
            # A piece that is not quantized stays as it is.
            self.pieces = nn.ModuleList(
                piece if isinstance(piece, Linear) else PackedLinear(piece, exact, empty) for piece in plain
            )
            self.prepared = PreparedLayer("stack_layers", [prepare(piece) for piece in self.pieces], self.bias)
            return
        if isinstance(plain, QuantizedLinear):
            self.stored_as = plain.stored_as
            format, groupsize = plain.stored_as, plain.groupsize
            weight = empty((packed_bytes(plain),), dtype=torch.uint8)
            parts = [part.contiguous() for part in plain.parts().values()]
            torch.ops.fastpath.pack_layer(format, parts, self.in_features, groupsize, weight)
        else:
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
# formats.h and products.h describe the layouts. Nb: blocks of 16 rows (LANES); Cb: groups of 32 columns (GROUP).


def packed_bytes(plain: QuantizedLinear) -> int:
    """The bytes of a quantized matrix when it is packed."""
    sizes = (plain.out_features, plain.in_features, plain.groupsize)
    return torch.ops.fastpath.packed_bytes(plain.stored_as, *sizes)


def pack_bfloat16(weight: Tensor) -> Tensor:
    """Pack bfloat16 (N,C) to (Nb,Cb,16,16,2): of each group 16 times 2 columns, for 16 rows. N and C are multiples."""
    return weight.view(-1, LANES, weight.shape[1] // GROUP, GROUP // 2, 2).permute(0, 2, 3, 1, 4).contiguous()
