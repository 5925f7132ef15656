"""The layers whose weights are packed for the C++ kernels of this folder.

Read down: what can be packed; PreparedLayer, which gives the kernels a layer; the packed layers; the
packing of weights.
"""

import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Experts
from cpu.build import FORMATS_WITH_KERNELS
from formats import QuantizedLinear, StackedLinear
from layers import Linear, MatrixLayer

LANES = 16  # rows in a packed block
GROUP = 32  # columns in a packed group


def has_format(module: nn.Module) -> bool:
    """Whether this is a QuantizedLinear in a format that has kernels."""
    return isinstance(module, QuantizedLinear) and module.stored_as in FORMATS_WITH_KERNELS


class Registered:
    """What the kernels have registered under handles, until this object is gone. A copy gets handles of
    its own."""

    def keep(self, release: Callable, handles: list[int], *arguments):
        """release: the operation that releases the handles. arguments: of the class."""
        self.arguments = arguments
        weakref.finalize(self, release, handles).atexit = False

    def __reduce__(self):
        return type(self), self.arguments


class PreparedLayer(Registered):
    """A layer that the kernels have registered under a handle."""

    def __init__(self, operation: str, *arguments):
        """operation: prepare_layer, or stack_layers with a list of PreparedLayers as `layers`."""
        given = list(arguments)
        if operation == "stack_layers":
            given[0] = [layer.handle for layer in arguments[0]]
        self.handle = getattr(torch.ops.fastpath, operation)(*given)
        self.keep(torch.ops.fastpath.release_layers, [self.handle], operation, *arguments)


def prepare(layer: MatrixLayer) -> PreparedLayer:
    """The PreparedLayer of a packed layer, or of one whose weights are not packed."""
    if isinstance(layer, PackedLinear):
        return layer.prepared
    N, C = layer.weight.shape
    return PreparedLayer("prepare_layer", "dense", layer.weight, layer.bias, N, C, 0, True)


class PreparedExperts(Registered):
    """The experts of a sparse layer that the kernels have registered under a handle. It runs the layer
    for experts.SparseMLP.run."""

    def __init__(self, layers: list[nn.Module], config: Experts, dtype: torch.dtype, more: dict):
        """layers: router, gate_up, down, and with a shared expert its gate, gate_up and down.
        dtype: of the activations. more: further arguments of prepare_experts."""
        router, gate_up, down, *shared = map(prepare, layers)
        if shared:
            router = PreparedLayer("stack_layers", [router, shared[0]], None)
        shared_gate_up, shared_down = [layer.handle for layer in shared[1:]] or (None, None)
        self.handle = torch.ops.fastpath.prepare_experts(  # the experts keep the layers
            router.handle, gate_up.handle, down.handle, shared_gate_up, shared_down, config.n_expert, config.n_active,
            config.normalized, dtype, config.scoring, scale=config.scale, **more,
        )  # fmt: skip
        # The SparseMLP itself is no argument: its copy contains a copy of this object.
        self.keep(torch.ops.fastpath.release_experts, [self.handle], layers, config, dtype, more)

    def __call__(self, x: Tensor, input_pos: Tensor, counts: Tensor) -> Tensor:
        return torch.ops.fastpath.sparse_mlp.default(x, input_pos, counts, self.handle)


class PackedLinear(MatrixLayer):
    """A linear layer, with its weights packed for the kernels."""

    def __init__(
        self,
        plain: Linear | QuantizedLinear | StackedLinear,
        exact: bool,
        empty: Callable = torch.empty,
    ):
        """exact: do not quantize the activations. empty: a function like torch.empty, which makes
        the memory for packed weights."""
        super().__init__(plain.in_features, plain.out_features)
        self.n_expert = plain.n_expert
        self.register_buffer("bias", plain.bias)
        if isinstance(plain, StackedLinear):
            # A piece that is not quantized is not packed.
            self.pieces = nn.ModuleList(
                piece if isinstance(piece, Linear) else PackedLinear(piece, exact, empty) for piece in plain
            )
            prepared = [prepare(piece) for piece in self.pieces]
            self.prepared = PreparedLayer("stack_layers", prepared, self.bias)
            return

        N = packed_rows(plain)
        C = self.in_features
        format = "tiles"
        groupsize = 0
        if isinstance(plain, QuantizedLinear):
            self.stored_as = plain.stored_as
            format = plain.stored_as
            groupsize = plain.groupsize
            weight = empty((packed_bytes(plain),), dtype=torch.uint8)
            parts = [pad_experts(part, plain.n_expert) for part in plain.parts().values()]
            torch.ops.fastpath.pack_layer(format, parts, C, groupsize, weight)
        else:
            weight = plain.weight.detach().contiguous()
            packed = pack_bfloat16(weight)
            weight = weight.view(packed.shape).copy_(packed)  # two copies may not fit into memory
        self.register_buffer("weight", weight)
        self.prepared = PreparedLayer("prepare_layer", format, weight, self.bias, N, C, groupsize, exact)

    def forward(self, x: Tensor):
        return torch.ops.fastpath.linear_packed.default(x, self.prepared.handle, self.out_features)

    def first_rows(self, n: int):
        return FirstRows(self, n)


class FirstRows(MatrixLayer):
    """The first n rows of a PackedLinear, in its memory: blocks of 16 rows follow each other there."""

    def __init__(self, layer: PackedLinear, n: int):
        super().__init__(layer.in_features, n)
        self.stored_as = layer.stored_as
        operation, format, weight, _, N, C, groupsize, exact = layer.prepared.arguments
        size = len(weight) // blocks_of(N)  # of a block
        self.register_buffer("weight", weight[: size * blocks_of(n)])
        self.prepared = PreparedLayer(operation, format, self.weight, None, n, C, groupsize, exact)

    forward = PackedLinear.forward


def blocks_of(N: int) -> int:
    """The number of blocks of a matrix with N rows."""
    return -(-N // LANES)


class PackedEmbedding(PackedLinear):
    """An embedding. If the output head is tied to it, `logits` computes the head with the same
    weights."""

    logits = PackedLinear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32, or bfloat16 if the weights are
        if self.weight.dtype != torch.bfloat16:
            embed = torch.ops.fastpath.embed_packed.default
            return embed(tokens, self.prepared.handle, self.in_features)
        return self.weight[tokens // LANES, :, :, tokens % LANES].flatten(-3)


# ---------------------------------------------------------------- packing
#
# formats.h and products.h describe the layouts. Nb is the number of blocks of 16 rows (LANES), and
# Cb the number of groups of 32 columns (GROUP).


def packed_rows(plain: MatrixLayer) -> int:
    """The rows of a matrix when it is packed: each expert of a layers.ExpertStack begins a new block."""
    if plain.n_expert == 1:
        return plain.out_features
    return plain.n_expert * blocks_of(plain.out_features // plain.n_expert) * LANES


def pad_experts(part: Tensor, n_expert: int) -> Tensor:
    """A part of a quantized matrix, with the rows of each expert padded with zeros to whole blocks."""
    if n_expert == 1:
        return part.contiguous()
    rows = part.view(n_expert, -1, part.shape[1])  # (X,N,...)
    missing = -rows.shape[1] % LANES
    return F.pad(rows, (0, 0, 0, missing)).flatten(0, 1) if missing else part.contiguous()


def packed_bytes(plain: QuantizedLinear) -> int:
    """The bytes of a quantized matrix when it is packed."""
    N = packed_rows(plain)
    C = plain.in_features
    return torch.ops.fastpath.packed_bytes(plain.stored_as, N, C, plain.groupsize)


def pack_bfloat16(weight: Tensor) -> Tensor:
    """Pack bfloat16 (N,C) to (Nb,Cb,16,16,2). The last three dimensions are 16 pairs of columns of a
    group, the 16 rows of a block, and the two columns of a pair. N must be a multiple of 16, and C
    of 32."""
    pairs = weight.view(-1, LANES, weight.shape[1] // GROUP, GROUP // 2, 2)  # (Nb,16,Cb,16,2)
    return pairs.permute(0, 2, 3, 1, 4).contiguous()
