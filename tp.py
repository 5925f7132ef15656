"""Tensor parallelism: one model over several processes (ranks), each with a slice of every matrix.

Read down: SPLIT, the table that says how each module is split; Shard, one rank's share of a model;
the checks whether a model can be split. This file knows nothing of text. ranks.py manages the
processes that torchrun has started.

A block needs two all-reduces (Megatron-LM, arXiv:1909.08053). The matrices that read the block's
input are split by outputs (column-parallel), so that each rank has whole heads and whole hidden
units. The matrices that write to the residual stream are split by inputs (row-parallel), and the
all-reduce adds up the ranks' products. Embedding and head are split by vocabulary.

A rank builds a model of its own size (`Shard.config`), and fills it with its slices of the
checkpoint's tensors (`Shard.slices`). The model calls the collectives of its Shard. Every rank
gathers all logits and draws the same tokens from them.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cli import UserError
from config import Config, DeltaNet
from formats import QuantizedLinear
from model import Transformer

# How the weight (N,C) of a module, with N outputs and C inputs, and its bias (N,) are split. The
# keys are the ends of the modules' names. The values are (how, the number of matrices that are
# stored as one), where `how` means:
#   heads        by outputs: each rank has the rows of its query heads, then those of the key and
#                value heads that they attend to
#   query heads  by outputs: each rank has the rows of its query heads
#   key heads    by outputs: each rank has the rows of the key (or value) heads of its query heads
#   hidden       by outputs: each rank has the rows of its hidden units, in each of the matrices
#                that are stored as one; if the module holds experts, in those of each expert
#   from heads   by inputs, which are the outputs of the heads: an all-reduce adds up the ranks'
#                products, and only rank 0 has a bias that is not zero
#   channels     by outputs: each rank has the rows of its channels of a short convolution, in each of
#                the matrices that are stored as one
#   from hidden  the same as "from heads", where the inputs are hidden units
#   from values  the same, where the inputs are the value heads of a gated delta net
#   from channels  the same, where the inputs are the channels of a short convolution
#   a key of DELTA_PARTS  by outputs: each rank has the rows of its heads, in each of these parts
#   vocab        by rows, padded with zeros if V is not a multiple of the number of ranks
#   whole        every rank has the whole tensor
# A family whose modules have other names needs lines of its own: a module that is not in the table
# is refused.
SPLIT = {
    "embedding": ("vocab", 1),
    "attention.qkv": ("heads", 1),
    "attention.qkv.0": ("query heads", 1),  # where q, k and v are stored in different formats
    "attention.qkv.1": ("key heads", 1),
    "attention.qkv.2": ("key heads", 1),
    "attention.out": ("from heads", 1),
    "delta_net.inputs": ("delta inputs", 1),
    "delta_net.inputs.0": ("delta qkv", 1),
    "delta_net.inputs.1": ("delta gate", 1),
    "delta_net.inputs.2": ("delta numbers", 1),
    "delta_net.inputs.3": ("delta numbers", 1),
    "delta_net.conv": ("delta qkv", 1),
    "delta_net.decay": ("delta numbers", 1),
    "delta_net.norm": ("whole", 1),
    "delta_net.out": ("from values", 1),
    "short_conv.inputs": ("channels", 3),
    "short_conv.conv": ("channels", 1),
    "short_conv.out": ("from channels", 1),
    "mlp.gate_up": ("hidden", 2),
    "mlp.gate_up.0": ("hidden", 1),
    "mlp.gate_up.1": ("hidden", 1),
    "mlp.up": ("hidden", 1),
    "mlp.down": ("from hidden", 1),
    # All ranks must choose the same experts for a token. They do: the router's inputs are made from
    # sums of all ranks (`all_reduce`), which have the same bits everywhere.
    "experts.router": ("whole", 1),
    "experts.gate_up": ("hidden", 2),
    "experts.gate_up.0": ("hidden", 1),
    "experts.gate_up.1": ("hidden", 1),
    "experts.down": ("from hidden", 1),
    "experts.shared_gate": ("whole", 1),
    "shared.gate_up": ("hidden", 2),
    "shared.gate_up.0": ("hidden", 1),
    "shared.gate_up.1": ("hidden", 1),
    "shared.down": ("from hidden", 1),
    "output": ("vocab", 1),
    "embedding_norm": ("whole", 1),
    "attention_norm": ("whole", 1),
    "attention.q_norm": ("whole", 1),  # width E, shared by all heads; or H * E: see Shard._slice
    "attention.k_norm": ("whole", 1),
    "attention_post_norm": ("whole", 1),
    "mlp_norm": ("whole", 1),
    "mlp_post_norm": ("whole", 1),
    "norm": ("whole", 1),
    "proj": ("whole", 1),  # of mtp.DraftLayer
    "hidden_norm": ("whole", 1),
}
# What the rows of the tensors of a gated delta net consist of. keys: key_dim rows for each key head;
# values: value_dim rows for each value head; numbers: one for each value head.
DELTA_PARTS = {
    "delta qkv": ("keys", "keys", "values"),
    "delta gate": ("values",),
    "delta numbers": ("numbers",),
    "delta inputs": ("keys", "keys", "values", "values", "numbers", "numbers"),
}


class PerMLP(NamedTuple):
    """A number for each kind of MLP that a model may have. Each kind has its own hidden width."""

    dense: int = 1  # the MLPs of layers without experts
    experts: int = 1  # the experts, each
    shared: int = 1  # the shared experts


MLPS = PerMLP("mlp", "experts", "experts.shared")  # the names of these modules in a block

# ---------------------------------------------------------------- one rank's share


@dataclass(frozen=True)
class Slice:
    """The part of a tensor that one rank has: ranges of its rows, concatenated, and of these rows
    ranges of columns, concatenated."""

    rows: tuple[range, ...]
    columns: tuple[range, ...] | None = None  # None: all columns, or the tensor has one dimension
    height: int = 0  # zero rows are appended up to this number of rows

    def cut(self, source) -> Tensor:
        """The slice of a tensor, or of a safetensors get_slice, which then reads only that part of
        the file."""
        pieces = [self._piece(source, rows) for rows in self.rows]
        missing = self.height - sum(len(piece) for piece in pieces)
        if missing > 0:
            pieces.append(pieces[0].new_zeros(missing, *pieces[0].shape[1:]))
        if len(pieces) == 1:
            return pieces[0]  # torch.cat would copy it
        return torch.cat(pieces)

    def _piece(self, source, rows: range) -> Tensor:
        if self.columns is None:
            return source[rows.start : rows.stop]
        pieces = [source[rows.start : rows.stop, columns.start : columns.stop] for columns in self.columns]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model. A split model has it as `model.shard`, where others have a
    model.WholeModel."""

    rank: int
    ranks: int
    hidden_blocks: PerMLP = PerMLP()  # how many hidden units must stay together: see `fit`
    # The name of the process group for tensors on the model's device, which the functional
    # collectives take. `slices` needs no group.
    group: Any = None

    @classmethod
    def in_group(cls, group: dist.ProcessGroup) -> "Shard":
        return cls(group.rank(), group.size(), group=group.group_name)

    def fit(self, model: Transformer) -> "Shard":
        """Return this share of a whole model (which may be on the meta device), with hidden units
        divided so that no block of a quantized format is cut.

        Raises UserError if the model cannot be split over this number of ranks.
        """
        check(model, self.ranks)
        return dataclasses.replace(self, hidden_blocks=hidden_blocks_of(model))

    def own(self, n: int) -> range:
        """This rank's range of n items."""
        return range(self.rank * n // self.ranks, (self.rank + 1) * n // self.ranks)

    def _own_hidden(self, config: Config, kind: str) -> range:
        """This rank's range of the hidden units of an MLP, in whole blocks. kind: a field of PerMLP."""
        F = getattr(hidden_widths(config), kind)
        size = getattr(self.hidden_blocks, kind)
        blocks = self.own(-(-F // size))
        return range(min(F, blocks.start * size), min(F, blocks.stop * size))

    def _hidden_rows(self, config: Config, name: str, count: int) -> list[range]:
        """This rank's rows of a module that holds `count` matrices with a row for each hidden unit,
        or as many for each of its experts."""
        kind = mlp_kind(name)
        F = getattr(hidden_widths(config), kind)
        own = self._own_hidden(config, kind)
        if kind == "experts":
            count *= config.experts.n_expert
        return [range(i * F + own.start, i * F + own.stop) for i in range(count)]

    def _own_queries(self, config: Config) -> range:
        """This rank's range of the H * E outputs of the query heads."""
        return times(self.own(config.n_head), config.head_dim)

    def _query_rows(self, config: Config) -> list[range]:
        """This rank's rows of the queries' matrix, with those of their gates if there are any."""
        own = self._own_queries(config)
        if not config.attention_gate:
            return [own]
        gates = config.n_head * config.head_dim
        return [own, range(gates + own.start, gates + own.stop)]

    def _value_heads(self, net: DeltaNet) -> list[range]:
        """This rank's value heads: those of its key heads, which are one range for each value head
        that a key head has."""
        own = self.own(net.n_key_head)
        return [range(start + own.start, start + own.stop) for start in range(0, net.n_value_head, net.n_key_head)]

    def _delta_rows(self, net: DeltaNet, parts: tuple[str, ...]) -> list[range]:
        """This rank's rows of a tensor of a gated delta net. parts: see DELTA_PARTS."""
        kinds = {
            "keys": ([self.own(net.n_key_head)], net.key_dim, net.keys_width),
            "values": (self._value_heads(net), net.value_dim, net.values_width),
            "numbers": (self._value_heads(net), 1, net.n_value_head),
        }
        rows = []
        start = 0  # of the part
        for part in parts:
            heads, width, height = kinds[part]
            for own in heads:
                scaled = times(own, width)
                rows.append(range(start + scaled.start, start + scaled.stop))
            start += height
        return rows

    def _kv_heads(self, config: Config) -> list[int]:
        """The key and value heads that this rank keeps, in the order of its query heads.

        Each of them serves the same number of query heads. If neither K nor the number of ranks is
        a multiple of the other, the ranks' ranges of query heads cut through groups, and each
        query head gets its own copy of its key and value head.
        """
        H = config.n_head
        K = config.n_kv_head
        heads = [head // (H // K) for head in self.own(H)]
        if K % self.ranks and self.ranks % K:
            return heads
        return sorted(set(heads))

    def config(self, config: Config) -> Config:
        """The Config of this rank's part of a model."""
        net = config.delta_net
        if net is not None:
            n = len(self.own(net.n_key_head))
            m = n * (net.n_value_head // net.n_key_head)
            net = dataclasses.replace(net, n_key_head=n, n_value_head=m)
        conv = config.short_conv
        if conv is not None:
            conv = dataclasses.replace(conv, conv_channels=len(self.own(conv.conv_channels)))
        experts = config.experts
        if experts is not None:
            hidden_dim = len(self._own_hidden(config, "experts"))
            shared_dim = len(self._own_hidden(config, "shared"))
            experts = dataclasses.replace(experts, hidden_dim=hidden_dim, shared_dim=shared_dim)
        return dataclasses.replace(
            config,
            delta_net=net,
            short_conv=conv,
            experts=experts,
            n_head=len(self.own(config.n_head)),
            n_kv_head=len(self._kv_heads(config)),
            hidden_dim=len(self._own_hidden(config, "dense")) or 1,  # 0 only if no layer has such an MLP
            vocab_size=-(-config.vocab_size // self.ranks),
            n_token=None,
        )

    def slices(self, model: Transformer) -> dict[str, Slice]:
        """This rank's slice of each tensor of a whole model, by name. Call `fit` before."""
        return {name: self._slice(model, name) for name in model.state_dict()}

    def _slice(self, model: Transformer, tensor_name: str) -> Slice:
        config = model.config
        name, _, kind = tensor_name.rpartition(".")  # the kind is "weight", "bias", "scales" ...
        module = model.get_submodule(name)
        N = len(getattr(module, kind))
        how, count = split_of(name)
        if config.qk_norm_whole and name.endswith("q_norm"):
            how = "query heads"
        if config.qk_norm_whole and name.endswith("k_norm"):
            how = "key heads"

        if how == "whole":
            return Slice((range(N),))
        if how == "vocab":
            height = -(-N // self.ranks)
            start = min(self.rank * height, N)
            return Slice((range(start, min(start + height, N)),), height=height)
        if how in ("heads", "query heads", "key heads"):
            H, K, E = config.heads
            before = 2 * H if config.attention_gate else H  # the heads before the first key head
            starts = {"heads": (before, before + K), "query heads": (), "key heads": (0,)}[how]
            heads = [start + head for start in starts for head in self._kv_heads(config)]
            rows = [range(E * head, E * (head + 1)) for head in heads]
            if how != "key heads":
                rows = self._query_rows(config) + rows
            return Slice(tuple(rows))
        if how in DELTA_PARTS:
            return Slice(tuple(self._delta_rows(config.delta_net, DELTA_PARTS[how])))
        if how == "hidden":
            return Slice(tuple(self._hidden_rows(config, name, count)))
        if how == "channels":
            D = config.dim
            own = self.own(D)
            return Slice(tuple(range(i * D + own.start, i * D + own.stop) for i in range(count)))

        # The columns are split.
        if kind == "bias":  # it is added once, by rank 0; the other ranks have zeros
            rows = range(N) if self.rank == 0 else range(0)
            return Slice((rows,), height=N)
        own = [self._own_queries(config)]
        if how == "from hidden":
            own = [self._own_hidden(config, mlp_kind(name))]
        elif how == "from channels":
            own = [self.own(config.dim)]
        elif how == "from values":
            own = [times(heads, config.delta_net.value_dim) for heads in self._value_heads(config.delta_net)]
        columns, count = columns_of(module, kind)
        ranges = [range(part.start // columns * count, -(-part.stop // columns) * count) for part in own]
        return Slice((range(N),), tuple(dict.fromkeys(ranges)))  # equal ones: a value for a whole row

    # The functional collectives, which torch.compile traces into its graph. They are called as
    # operations because the Python functions around them wrap their results in a lazy tensor.

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", self.group))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over a dimension of which each rank has an equal part. (If some key heads are on
        several ranks, then all of them are, each on the same number of ranks.)"""
        mean = self.all_reduce(x.float().square().mean(-1, keepdim=True)) / self.ranks
        return (x.float() * torch.rsqrt(mean + eps) * weight).to(x.dtype)

    def embed(self, table: nn.Module, rows: int, tokens: Tensor) -> Tensor:
        """The vectors (B,S,D) of tokens (B,S), from a table of which each rank has `rows` rows. One
        rank has the vector of a token, and the others add zeros to it."""
        row = tokens - self.rank * rows
        here = (row >= 0) & (row < rows)
        return self.all_reduce(table(torch.where(here, row, 0)) * here[..., None])

    def gather(self, logits: Tensor, V: int) -> Tensor:
        """Gather the logits of all ranks, (...,V/ranks) each, to (...,V), without the padding."""
        columns = logits.movedim(-1, 0).contiguous()  # all_gather concatenates the first dimension
        ops = torch.ops._c10d_functional
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(columns, self.ranks, self.group))
        return gathered[:V].movedim(0, -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Broadcast rank 0's tensor: ranks may round differently."""
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.broadcast(x, 0, self.group))


def times(heads: range, width: int) -> range:
    """The rows of some heads of this width."""
    return range(heads.start * width, heads.stop * width)


# ---------------------------------------------------------------- what cannot be split


def split_of(name: str) -> tuple[str, int]:
    """The entry of SPLIT with the longest key that matches a module's name."""
    fitting = [key for key in SPLIT if name == key or name.endswith("." + key)]
    if not fitting:
        return "unknown", 0
    return SPLIT[max(fitting, key=len)]


def columns_of(module: nn.Module, kind: str) -> tuple[int, int]:
    """(columns, count): a module's tensor (kind: "weight", "scales" ...) has `count` elements for
    each `columns` columns of the module's matrix."""
    if not isinstance(module, QuantizedLinear):
        return 1, 1
    part = next(part for part in module.format.parts if part.name == kind)
    return part.columns or module.groupsize, part.count


def block_columns(module: nn.Module) -> int:
    """How many consecutive columns of a module's matrix must stay on one rank, because one of its
    tensors has one value for all of them. A value for a whole row does not count: every rank has
    it."""
    if not isinstance(module, QuantizedLinear):
        return 1
    sizes = [columns_of(module, part.name)[0] for part in module.format.parts]
    return math.lcm(*(size for size in sizes if size < module.in_features))


def mlp_kind(name: str) -> str:
    """The field of PerMLP for a module of an MLP, by its name."""
    if ".shared." in name:
        return "shared"
    return "experts" if ".experts." in name else "dense"


def hidden_widths(config: Config) -> PerMLP:
    """The numbers of hidden units of the MLPs."""
    experts = config.experts
    if experts is None:
        return PerMLP(config.hidden_dim, 0, 0)
    return PerMLP(config.hidden_dim, experts.hidden_dim, experts.shared_dim)


def hidden_blocks_of(model: Transformer) -> PerMLP:
    """How many consecutive hidden units of the MLPs of a whole model must stay on one rank."""
    sizes = {kind: [1] for kind in PerMLP._fields}
    for name, module in model.named_modules():
        if split_of(name) == ("from hidden", 1):
            sizes[mlp_kind(name)].append(block_columns(module))
    return PerMLP(**{kind: math.lcm(*found) for kind, found in sizes.items()})


def mlp_obstacles(model: Transformer, ranks: int) -> list[str]:
    """The MLPs that have fewer blocks of hidden units than there are ranks."""
    reasons = []
    for kind, F, size in zip(MLPS, hidden_widths(model.config), hidden_blocks_of(model)):
        used = any(name.endswith(f"{kind}.down") for name, _ in model.named_modules())
        pieces = -(-F // size)
        if used and pieces < ranks:
            reasons.append(f"{kind}.down: {F} columns in blocks of {size} are {pieces} blocks")
    return reasons


def obstacles(model: Transformer, ranks: int) -> list[str]:
    """The reasons why a model cannot be split over this number of ranks; empty if it can."""
    config = model.config
    reasons = []
    if config.n_head % ranks:
        reasons.append(f"n_head {config.n_head} is not a multiple of {ranks}")
    reasons += mlp_obstacles(model, ranks)

    net = config.delta_net
    if net is not None and net.n_key_head % ranks:
        reasons.append(f"n_key_head {net.n_key_head} is not a multiple of {ranks}")
    if config.short_conv is not None and config.dim % ranks:
        reasons.append(f"dim {config.dim} is not a multiple of {ranks}")

    for i, block in enumerate(model.all_blocks):
        if block.attention is not None:
            name = "attention.out"
            columns = config.n_head * config.head_dim // ranks
        elif net is not None:
            name = "delta_net.out"
            columns = net.n_key_head * net.value_dim // ranks
        else:
            name = "short_conv.out"
            columns = config.dim // ranks
        out = block.get_submodule(name)
        size = block_columns(out)
        if ranks > 1 and columns % size:
            what = f"{columns} columns per rank are not a multiple of its block of {size}"
            reasons.append(f"blocks.{i}.{name}: {what}")
    return reasons


def check(model: Transformer, ranks: int):
    for name in model.state_dict():
        assert split_of(name.rpartition(".")[0])[0] != "unknown", f"SPLIT has no line for {name}"
    if reasons := obstacles(model, ranks):
        possible = [n for n in range(1, model.config.n_head + 1) if not obstacles(model, n)]
        raise UserError(f"the model cannot be split over {ranks} ranks: {reasons[0]}; {possible} ranks are possible")
