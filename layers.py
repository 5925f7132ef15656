"""The layers that a model is made of: Linear, Embedding, ExpertStack, Router, RMSNorm, LayerNorm.

Read down: Units, which say what the rows and columns of a weight matrix consist of, so that other
files can stack and split a matrix without knowing what it is for; MatrixLayer and the layers with a
matrix; the norms; TokenMixer and FeedForward, the two parts of a model.Block.

The layers of torch.nn are not used, because they initialize their weights. That takes time, and on
the meta device it imports torch's compiler (1.2 s). The layers here are built on the meta device, and
a checkpoint's tensors are assigned to them.

Sources: RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config
from kernels import layer_norm, linear, rms_norm


def empty_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


LAYER_TABLE = "layer_inputs.table"  # the name of the table of model.LayerInputs
VOCABULARY = "vocab_size"  # the name of Units that are padded with zeros, so that all ranks have equally many


@dataclass(frozen=True)
class Units:
    """Equal units, such as heads, whose rows (or columns) follow each other in a matrix. If the model
    is split (tp.py), each rank has some of the units."""

    name: str  # what is counted, in messages
    n: int
    width: int = 1  # rows of a unit
    # How many units share the same rows: the query heads of a group share a key and value head.
    shared_by: int = 1
    even: bool = True  # all ranks have equally many

    @property
    def size(self) -> int:
        """The number of all rows."""
        return self.n // self.shared_by * self.width


Rows = Sequence[Sequence[Units]]


class MatrixLayer(nn.Module):
    """A layer with a weight matrix of out_features rows and in_features columns.

    Its subclasses store the matrix in different ways: plain (Linear, Embedding), quantized
    (formats.py), or packed for the kernels of a device. They add its tensors and `bias`.
    """

    stored_as: str | None = None  # the matrix's format, a name of formats.FORMATS; None if it is not quantized
    n_expert = 1  # how many matrices of equal sizes are stacked by rows: see ExpertStack
    # The matrices that are stacked in the rows (of each expert), and the units of each, in their order.
    # Empty if the rows are not divided into units.
    rows: Rows = ()
    columns: Sequence[Units] = ()  # the units of the columns, if they are divided into units

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def take_description(self, other: "MatrixLayer"):
        """Take over what another layer of the same matrix says about its rows and columns."""
        self.n_expert = other.n_expert
        self.rows = other.rows
        self.columns = other.columns

    def first_rows(self, n: int) -> "MatrixLayer | None":
        """A linear layer without bias that has the first n rows of the matrix, in the same memory. None
        if these rows are not contiguous. n is a multiple of 16, or the number of rows."""
        return None

    def multiply_rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """x (...,C) times rows start..stop of the matrix: (...,stop - start)."""
        raise NotImplementedError

    def multiply_expert(self, x: Tensor, e: int) -> Tensor:
        """x times the matrix of expert e."""
        N = self.out_features // self.n_expert
        return self.multiply_rows(x, e * N, (e + 1) * N)


class Linear(MatrixLayer):
    """y = x weight^T + bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool, rows: Rows = (), columns: Sequence[Units] = ()):
        super().__init__(in_features, out_features)
        self.rows = rows
        self.columns = columns
        self.weight = empty_parameter(out_features, in_features)
        self.register_parameter("bias", empty_parameter(out_features) if bias else None)

    def forward(self, x: Tensor):
        return linear(x, self.weight, self.bias)

    def multiply_rows(self, x: Tensor, start: int, stop: int):
        return linear(x, self.weight[start:stop])

    def first_rows(self, n: int):
        with torch.device("meta"):
            layer = Linear(self.in_features, n, bias=False)
        layer.load_state_dict({"weight": self.weight[:n]}, assign=True)
        return layer


class Embedding(Linear):
    """The embedding table. If the output head is tied to it, `logits` computes the head with the
    same weights."""

    logits = Linear.forward

    def __init__(self, vocab_size: int, dim: int):
        super().__init__(dim, vocab_size, bias=False, rows=[[Units(VOCABULARY, vocab_size)]])

    def forward(self, tokens: Tensor):
        return F.embedding(tokens, self.weight)


class MappedTable(nn.Module):
    """An embedding table that stays in its mapped file: a pass reads the vectors of its tokens there. It is not in
    the model's state_dict, because whoever reads that reads all of it."""

    def __init__(self, layer: MatrixLayer):
        """layer: an Embedding or a formats.QuantizedEmbedding, whose tensors are parts of a mapped file."""
        super().__init__()
        self.layers = (layer,)  # in a tuple, nn.Module does not see it

    @property
    def layer(self) -> MatrixLayer:
        return self.layers[0]

    def forward(self, tokens: Tensor):
        return self.layer(tokens)


class ExpertStack(Linear):
    """A matrix (N,C) for each of X experts, one below the other in a matrix (X*N,C), which is stored,
    quantized and split like any other matrix."""

    def __init__(
        self, in_features: int, out_features: int, n_expert: int, rows: Rows = (), columns: Sequence[Units] = ()
    ):
        """out_features: N, of one expert."""
        super().__init__(in_features, n_expert * out_features, False, rows, columns)
        self.n_expert = n_expert


class Router(MatrixLayer):
    """x W^T in float32: the logits of the experts, or of the shared expert's gate."""

    bias = None
    is_float32 = True

    def __init__(self, dim: int, n: int):
        super().__init__(dim, n)
        self.weight = empty_parameter(n, dim)  # float32

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.float(), self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight.

    normalize: computes it, as kernels.rms_norm does. In a split model, where each rank has a part
    of the dimension, it is the method rms_norm of tp.Shard, which takes the mean over all ranks.
    """

    bias = None  # so that code for both norms, such as cpu/install.py, need not tell them apart

    def __init__(self, dim: int, eps: float, normalize: Callable = rms_norm, rows: Rows = ()):
        """rows: the units of the dimension, if ranks divide it."""
        super().__init__()
        self.rows = rows
        self.weight = empty_parameter(dim)
        self.eps = eps
        self.normalize = normalize

    def forward(self, x: Tensor):
        return self.normalize(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = empty_parameter(dim)
        self.bias = empty_parameter(dim)
        self.eps = eps

    def forward(self, x: Tensor):
        return layer_norm(x, self.weight, self.bias, self.eps)


def gated(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """The hidden units of a gated MLP: SwiGLU or GeGLU (arXiv:2002.05202). kind: as in Config.mlp."""
    gate = F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")
    return gate * up


class Scale(nn.Module):
    """A number (1,), by which a block multiplies its result."""

    def __init__(self):
        super().__init__()
        self.weight = empty_parameter(1)


NORMS = {"rms": RMSNorm, "layer": LayerNorm}


def make_norm(config: Config) -> nn.Module:
    """A norm over the model's width, of the kind that Config.norm names."""
    return NORMS[config.norm](config.dim, config.norm_eps)


# ---------------------------------------------------------------- the two parts of a block


class TokenMixer(nn.Module):
    """What lets a token see the tokens before it: attention, or a recurrent layer.

    forward(x, input_pos, rows, rope): x (B,S,D) to (B,S,D). input_pos (B,S) and rows (B,) as in
    Transformer.forward; rope: the cos and sin of the block's table of positions, or None.
    """

    name: str  # the block's name of this module, with which the names of its tensors begin
    state: nn.Module  # what it remembers of each row: model.KVCache, mixers.recurrent.ConvState
    positions: nn.Module  # the tables of positions, from Transformer.setup_caches
    kv_kind: tuple | None = None  # layers with equal ones have equal kv_bytes

    @property
    def linears(self) -> list[nn.Module]:
        """The linear layers in the order in which fused kernels take them: of the inputs, of the output."""
        raise NotImplementedError

    def kv_bytes(self, lengths: list[int], dtype: torch.dtype) -> int:
        """The bytes of keys and values that a decode step reads. lengths: the filled positions of each row."""
        return 0

    def flops(self, context: int) -> int:
        """The FLOPs of a token after `context` other tokens, without the products with weights."""
        return 0

    def block_arguments(self) -> dict:
        """What the kernels of `blocks` need besides the linear layers: arguments of `prepare_block`."""
        raise NotImplementedError


class FeedForward(nn.Module):
    """What a block computes for each token by itself: one MLP, or experts.

    forward(x, input_pos): x (B,S,D) to (B,S,D).
    """

    name: str  # as in TokenMixer

    @property
    def linears(self) -> list[nn.Module]:
        """The linear layers in the order in which fused kernels take them."""
        raise NotImplementedError
