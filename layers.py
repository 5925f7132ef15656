"""The layers that a model is made of: Linear, Embedding, ExpertStack, RMSNorm, LayerNorm.

Those of torch.nn are not used, because they initialize their weights. That takes time, and on the
meta device it imports torch's compiler (1.2 s). These are built on the meta device, and a
checkpoint's tensors are assigned to them.

Sources: RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config
from kernels import layer_norm, linear, rms_norm


def empty_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class MatrixLayer(nn.Module):
    """A layer with a weight matrix of out_features rows and in_features columns.

    Its subclasses store the matrix in different ways: plain (Linear, Embedding), quantized
    (formats.py), or packed for the kernels of a device. They add its tensors and `bias`.
    """

    stored_as: str | None = None  # the matrix's format, a name of formats.FORMATS; None if it is not quantized
    n_expert = 1  # how many matrices of equal sizes stand one below the other: see ExpertStack

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def first_rows(self, n: int) -> "MatrixLayer | None":
        """A linear layer without bias that has the first n rows of the matrix, in the same memory. None
        if they do not stand together there. n is a multiple of 16, or the number of rows."""
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

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__(in_features, out_features)
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
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor):
        return F.embedding(tokens, self.weight)


class ExpertStack(Linear):
    """A matrix (N,C) for each of X experts: one matrix (X*N,C), with an expert's rows after those of
    the expert before it. So it is stored, quantized and split like any other matrix."""

    def __init__(self, in_features: int, out_features: int, n_expert: int):
        """out_features: N, of one expert."""
        super().__init__(in_features, n_expert * out_features, bias=False)
        self.n_expert = n_expert


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight.

    normalize: computes it, as kernels.rms_norm does. In a split model, where each rank has a part
    of the dimension, it is the method rms_norm of tp.Shard, which takes the mean over all ranks.
    """

    bias = None  # so that code for both norms, such as cpu/install.py, need not tell them apart

    def __init__(self, dim: int, eps: float, normalize: Callable = rms_norm):
        super().__init__()
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


NORMS = {"rms": RMSNorm, "layer": LayerNorm}


def make_norm(config: Config) -> nn.Module:
    """A norm over the model's width, of the kind that Config.norm names."""
    return NORMS[config.norm](config.dim, config.norm_eps)
