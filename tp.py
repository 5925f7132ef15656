"""Tensor parallelism: one model over several processes (ranks), each with a slice of every large matrix.

Read down: SPLIT, the table that says how each module is split; Shard, one rank's share of a model; the checks whether a
model can be split. Knows nothing of text. ranks.py manages the processes that torchrun has started.

A block needs two all-reduces (Megatron-LM, arXiv:1909.08053). The matrices that read the block's input are split by
outputs (column-parallel), so that each rank has whole heads and whole hidden units. The matrices that write to the
residual stream are split by inputs (row-parallel), and the all-reduce adds up the ranks' products. Embedding and head
are split by vocabulary.

A rank builds a model of its own size (`Shard.config`), and fills it with its slices of the checkpoint's tensors
(`Shard.slices`). The model calls the collectives of its Shard. Every rank gathers all logits and draws the same tokens
from them.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cli import UserError
from config import Config
from formats import QuantizedLinear
from model import Transformer

# How the weight (N,C) of a module, with N outputs and C inputs, and its bias (N,) are split. The keys are the ends of
# the modules' names; the values are (how, number of matrices that are stored as one):
#   heads        by outputs: the rows of this rank's query heads, then those of the key and value heads that they
#                attend to
#   query heads, key heads    only those of the query heads, or of the key (or value) heads
#   hidden       by outputs: the rows of this rank's hidden units, of each of the matrices that are stored as one
#   from heads   by inputs, the outputs of the heads; an all-reduce adds up the ranks' products, and the bias is zero
#                but on rank 0
#   from hidden  the same, by hidden units
#   vocab        by rows, padded with zeros if V is not a multiple of the number of ranks
#   whole        on every rank
# A family whose modules have other names needs lines of its own: a module that is not in the table is refused.
SPLIT = {
    "embedding": ("vocab", 1),
    "attention.qkv": ("heads", 1),
    "attention.qkv.0": ("query heads", 1),  # where q, k and v are stored in different formats
    "attention.qkv.1": ("key heads", 1),
    "attention.qkv.2": ("key heads", 1),
    "attention.out": ("from heads", 1),
    "mlp.gate_up": ("hidden", 2),
    "mlp.gate_up.0": ("hidden", 1),
    "mlp.gate_up.1": ("hidden", 1),
    "mlp.up": ("hidden", 1),
    "mlp.down": ("from hidden", 1),
    "output": ("vocab", 1),
    "embedding_norm": ("whole", 1),
    "attention_norm": ("whole", 1),
    "attention.q_norm": ("whole", 1),  # one vector of width E, which all heads share; if longer, see Shard._slice
    "attention.k_norm": ("whole", 1),
    "attention_post_norm": ("whole", 1),
    "mlp_norm": ("whole", 1),
    "mlp_post_norm": ("whole", 1),
    "norm": ("whole", 1),
}


# ---------------------------------------------------------------- one rank's share


@dataclass(frozen=True)
class Slice:
    """The part of a tensor that one rank has: ranges of its rows, concatenated, and a range of its columns."""

    rows: tuple[range, ...]
    columns: range | None = None  # None: all columns, or a tensor with one dimension
    height: int = 0  # zero rows are appended up to this number of rows

    def cut(self, source) -> Tensor:
        """The slice of a tensor, or of a safetensors get_slice, which then reads only that part of the file."""
        columns = () if self.columns is None else (slice(self.columns.start, self.columns.stop),)
        pieces = [source[(slice(r.start, r.stop), *columns)] for r in self.rows]
        out = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        missing = self.height - len(out)
        return torch.cat([out, out.new_zeros(missing, *out.shape[1:])]) if missing > 0 else out


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model: rank `rank` of `ranks`. A split model has it as `model.shard`, where others have a
    model.WholeModel.

    group: the process group for tensors on the model's device.
    """

    rank: int
    ranks: int
    hidden_block: int = 1  # hidden units that are not separated: see `fit`
    group: Any = None  # the group's name, which the functional collectives take; `slices` needs no group

    @classmethod
    def in_group(cls, group: dist.ProcessGroup) -> "Shard":
        return cls(group.rank(), group.size(), group=group.group_name)

    def fit(self, model: Transformer) -> "Shard":
        """This share of a whole model (it may be on meta): no block of a quantized format is cut through.

        Raises UserError if the model cannot be split over this number of ranks.
        """
        check(model, self.ranks)
        return dataclasses.replace(self, hidden_block=hidden_block_of(model))

    def own(self, n: int) -> range:
        """This rank's range of n items."""
        return range(self.rank * n // self.ranks, (self.rank + 1) * n // self.ranks)

    def _own_hidden(self, F: int) -> range:
        """This rank's range of F hidden units, in whole blocks."""
        blocks, size = self.own(-(-F // self.hidden_block)), self.hidden_block
        return range(min(F, blocks.start * size), min(F, blocks.stop * size))

    def _kv_heads(self, config: Config) -> list[int]:
        """The key and value heads that this rank keeps, in the order of its query heads.

        Each of them serves the same number of query heads. If neither K nor the number of ranks is a multiple of the
        other, the ranks cut through groups of query heads, and each query head gets its own copy.
        """
        H, K = config.n_head, config.n_kv_head
        heads = [head // (H // K) for head in self.own(H)]
        return heads if K % self.ranks and self.ranks % K else sorted(set(heads))

    def config(self, config: Config) -> Config:
        """The Config of this rank's part of a model."""
        return dataclasses.replace(
            config,
            n_head=len(self.own(config.n_head)),
            n_kv_head=len(self._kv_heads(config)),
            hidden_dim=len(self._own_hidden(config.hidden_dim)),
            vocab_size=-(-config.vocab_size // self.ranks),
            n_token=None,
        )

    def slices(self, model: Transformer) -> dict[str, Slice]:
        """This rank's slice of each tensor of a whole model, by the tensors' names. Call `fit` before."""
        names = [name.rpartition(".") for name in model.state_dict()]
        return {
            f"{module}.{kind}": self._slice(model.config, module, model.get_submodule(module), kind)
            for module, _, kind in names
        }

    def _slice(self, config: Config, name: str, module: nn.Module, kind: str) -> Slice:
        """This rank's slice of a module's tensor (kind: "weight", "bias", "scales" ...)."""
        how, count = split_of(name)
        if config.qk_norm_whole and name.endswith(("q_norm", "k_norm")):
            how = "query heads" if name.endswith("q_norm") else "key heads"
        N = len(getattr(module, kind))
        if how in ("heads", "query heads", "key heads"):
            H, K, E = config.heads
            starts = {"heads": (H, H + K), "query heads": (), "key heads": (0,)}[how]
            rows = [range(E * self.own(H).start, E * self.own(H).stop)] if how != "key heads" else []
            rows += [range(E * (i + head), E * (i + head + 1)) for i in starts for head in self._kv_heads(config)]
            return Slice(tuple(rows))
        if how == "hidden":
            own, F = self._own_hidden(config.hidden_dim), config.hidden_dim
            return Slice(tuple(range(own.start + i * F, own.stop + i * F) for i in range(count)))
        if how == "vocab":
            height = -(-N // self.ranks)
            start = min(self.rank * height, N)
            return Slice((range(start, min(start + height, N)),), height=height)
        if how == "whole":
            return Slice((range(N),))
        if kind == "bias":  # the others have zeros
            return Slice((range(N if self.rank == 0 else 0),), height=N)
        own = self._own_hidden(config.hidden_dim) if how == "from hidden" else self.own(config.n_head)
        width = 1 if how == "from hidden" else config.head_dim
        columns, count = columns_of(module, kind)
        return Slice((range(N),), range(own.start * width // columns * count, -(-own.stop * width // columns) * count))

    # The functional collectives, which torch.compile traces into its graph. They are called as operations because the
    # Python functions around them wrap their results in a lazy tensor.

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", self.group))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over a dimension of which each rank has an equal part. (If some key heads are on several ranks, then
        all of them are, on equally many.)"""
        mean = self.all_reduce(x.float().square().mean(-1, keepdim=True)) / self.ranks
        return (x.float() * torch.rsqrt(mean + eps) * weight).to(x.dtype)

    def embed(self, table: nn.Module, rows: int, tokens: Tensor) -> Tensor:
        """The vectors (B,S,D) of tokens (B,S), from a table of which each rank has `rows` rows: one rank has the
        vector of a token, the others add zeros to it."""
        row = tokens - self.rank * rows
        here = (row >= 0) & (row < rows)
        return self.all_reduce(table(torch.where(here, row, 0)) * here[..., None])

    def gather(self, logits: Tensor, V: int) -> Tensor:
        """Gather the logits of all ranks, (...,V/ranks) each, in order and without the padding: (...,V)."""
        columns = logits.movedim(-1, 0).contiguous()  # all_gather concatenates along the first dimension
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(columns, self.ranks, self.group))[:V].movedim(0, -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Broadcast rank 0's tensor: ranks may round differently."""
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.broadcast(x, 0, self.group))


# ---------------------------------------------------------------- what cannot be split


def split_of(name: str) -> tuple[str, int]:
    """The entry of SPLIT with the longest key that matches a module's name."""
    fitting = [key for key in SPLIT if name == key or name.endswith("." + key)]
    return SPLIT[max(fitting, key=len)] if fitting else ("unknown", 0)


def columns_of(module: nn.Module, kind: str) -> tuple[int, int]:
    """(columns, count): a tensor of a module (kind: "weight", "scales" ...) has `count` elements for each `columns`
    columns of the module's matrix."""
    if not isinstance(module, QuantizedLinear):
        return 1, 1
    part = next(part for part in module.format.parts if part.name == kind)
    return part.columns or module.groupsize, part.count


def block_columns(module: nn.Module) -> int:
    """How many columns of a module's matrix cannot be separated, because some of its parts have one value for them.
    A value for a whole row is no obstacle: every rank has it."""
    if not isinstance(module, QuantizedLinear):
        return 1
    sizes = [columns_of(module, part.name)[0] for part in module.format.parts]
    return math.lcm(*(size for size in sizes if size < module.in_features))


def hidden_block_of(model: Transformer) -> int:
    """How many hidden units of a whole model cannot be separated."""
    return math.lcm(*(block_columns(block.mlp.down) for block in model.blocks))


def obstacles(model: Transformer, ranks: int) -> list[str]:
    """The reasons why a model cannot be split over this number of ranks; empty if it can."""
    config, reasons = model.config, []
    if config.n_head % ranks:
        reasons.append(f"n_head {config.n_head} is not a multiple of {ranks}")
    size = hidden_block_of(model)
    pieces = -(-config.hidden_dim // size)
    if pieces < ranks:
        reasons.append(f"mlp.down: {config.hidden_dim} columns in blocks of {size} are {pieces} blocks")
    columns = config.n_head * config.head_dim // ranks
    for i, block in enumerate(model.blocks):
        size = block_columns(block.attention.out)
        if ranks > 1 and columns % size:
            reasons.append(
                f"blocks.{i}.attention.out: {columns} columns per rank are no multiple of its block of {size}"
            )
    return reasons


def check(model: Transformer, ranks: int):
    for name in model.state_dict():
        assert split_of(name.rpartition(".")[0])[0] != "unknown", f"SPLIT has no line for {name}"
    if reasons := obstacles(model, ranks):
        possible = [n for n in range(1, model.config.n_head + 1) if not obstacles(model, n)]
        raise UserError(f"the model cannot be split over {ranks} ranks: {reasons[0]}; {possible} ranks are possible")
