"""Tensor parallelism: one model over several processes (ranks), each with a part of every large matrix.

Read down: SPLIT, the table of what is split how; Shard, one rank's part of a model; the checks; the collectives. How
the processes find each other and end together is in ranks.py. Knows nothing of text or of the command line.

A block needs two all-reduces (Megatron-LM, arXiv:1909.08053): the matrices that read the block's input are split by
their outputs, so that each rank has whole heads and whole hidden units; those that write to the residual are split by
their inputs, and the sum over the ranks is the all-reduce. Embedding and head are split by vocabulary.

A model is split in two steps, between which its weights are loaded: `cut` leaves of each tensor what this rank has,
and says which part of the checkpoint's tensor that is; `connect` puts the all-reduces in.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cli import UserError
from model import Config, Transformer
from sampling import Sampling, known, ordered, penalized, sample

# What becomes of a module's weight (N,K), N outputs and K inputs, and of its bias (N,), by the end of its name.
#   heads    by outputs: the rows of this rank's query heads, then those of the key and value heads that they look at
#   outputs  by outputs: an Nth of the rows of each of so many matrices that are stored as one
#   inputs   by inputs; an all-reduce adds the ranks' products up, and rank 0 alone has the bias
#   vocab    by rows, filled up with zeros where the ranks do not divide V
#   whole    on every rank
# A family with modules of other names needs its lines here: what the table does not know is refused.
SPLIT = {
    "embedding": ("vocab", 1),
    "attention.qkv": ("heads", 1),
    "attention.out": ("inputs", 1),
    "mlp.gate_up": ("outputs", 2),
    "mlp.up": ("outputs", 1),
    "mlp.down": ("inputs", 1),
    "output": ("vocab", 1),
    "embedding_norm": ("whole", 1),
    "attention_norm": ("whole", 1),
    "attention.q_norm": ("whole", 1),  # of one head's width, and every head's the same
    "attention.k_norm": ("whole", 1),
    "mlp_norm": ("whole", 1),
    "norm": ("whole", 1),
}


def apply_tp(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Split a model that all ranks of a group have loaded whole, before kernels are installed and caches set up;
    returns it, this rank's part. (load_model with a Shard never holds the whole.)"""
    shard = Shard.of(group)
    shard.cut(model)
    shard.connect(model)
    return model


# ---------------------------------------------------------------- a rank's part


@dataclass(frozen=True)
class Part:
    """Which part of a tensor a rank has: ranges of its rows, one after the other, and a range of its columns."""

    rows: tuple[range, ...]
    columns: range | None = None  # None: all; there may be no second dimension
    height: int = 0  # fewer rows than this are filled up with zeros

    def of(self, source) -> Tensor:
        """source: a tensor, or a slice of a safetensors file, of which no more than the part is read."""
        at = () if self.columns is None else (slice(self.columns.start, self.columns.stop),)
        parts = [source[(slice(r.start, r.stop), *at)] for r in self.rows]
        part = torch.cat(parts) if len(parts) > 1 else parts[0]
        missing = self.height - len(part)
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing > 0 else part


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks`. group: the process group of the model's tensors; control: one for tensors on the CPU.

    A model that it is connected to has it as `split`: `head` then gives this rank's columns of the logits, or, unless
    told otherwise, gathers all of them.
    """

    rank: int
    ranks: int
    group: Any = None  # the name, as the collectives have it; cutting needs none
    control: Any = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, control: dist.ProcessGroup | None = None) -> "Shard":
        return cls(group.rank(), group.size(), group.group_name, control or group)

    def own(self, n: int) -> range:
        """This rank's of n things, which the ranks divide."""
        return range(self.rank * n // self.ranks, (self.rank + 1) * n // self.ranks)

    def kv_heads(self, config: Config) -> list[int]:
        """The key and value heads that this rank keeps, in the order of its query heads, each for equally many.

        Where neither K nor the number of ranks is a multiple of the other, groups are torn at different places on
        different ranks, and each query head gets a copy of its own.
        """
        H, K = config.n_head, config.n_kv_head
        heads = [head // (H // K) for head in self.own(H)]
        return heads if K % self.ranks and self.ranks % K else sorted(set(heads))

    def config(self, config: Config) -> Config:
        """The Config of this rank's blocks."""
        sizes = {"n_head": len(self.own(config.n_head)), "n_kv_head": len(self.kv_heads(config))}
        return dataclasses.replace(config, hidden_dim=len(self.own(config.hidden_dim)), **sizes)

    def cut(self, model: Transformer) -> dict[str, Part]:
        """Leave of each tensor (which may be on meta) what this rank has; returns, by the tensors' names, which part
        that is. UserError where the model cannot be split like that."""
        check(model, self.ranks)
        parts = {}
        for name, module in model.named_modules():
            how, count = split_of(name)
            for kind, tensor in weights(module).items():
                part, own = self._part(model.config, how, count, kind, tensor, module), None
                if part is not None:
                    parts[f"{name}.{kind}"], own = part, part.of(tensor).clone()  # so that the whole tensor can go
                is_parameter = isinstance(tensor, nn.Parameter) and own is not None
                setattr(module, kind, nn.Parameter(own, requires_grad=False) if is_parameter else own)
            self._resize(module, how)
        for block in model.blocks:
            block.attention.config = self.config(model.config)
        return parts

    def _part(self, config: Config, how: str, count: int, kind: str, tensor: Tensor, module) -> Part | None:
        """What this rank has of one tensor of a module; None: nothing."""
        N = len(tensor)
        if how == "heads":
            H, K, E = config.n_head, config.n_kv_head, config.head_dim
            heads = self.kv_heads(config)
            rows = [range(E * self.own(H).start, E * self.own(H).stop)]
            rows += [range(E * (first + head), E * (first + head + 1)) for first in (H, H + K) for head in heads]
            return Part(tuple(rows))
        if how == "outputs":
            own = self.own(N // count)
            return Part(tuple(range(own.start + i * (N // count), own.stop + i * (N // count)) for i in range(count)))
        if how == "vocab":
            height = -(-N // self.ranks)
            start = min(self.rank * height, N)
            return Part((range(start, min(start + height, N)),), height=height)
        if how == "whole" or (kind == "bias" and self.rank == 0):
            return Part((range(N),))
        if kind == "bias":
            return None
        own = self.own(module.in_features)
        if kind == "packed":
            own = range(own.start // 2, -(-own.stop // 2))
        elif kind in ("scales", "mins"):  # no group is cut, as check has seen, but for one that is the whole row
            own = range(own.start // module.groupsize, -(-own.stop // module.groupsize))
        return Part((range(N),), own)

    def _resize(self, module: nn.Module, how: str):
        """The sizes that a linear layer notes besides its tensors."""
        if how == "inputs":
            K = len(self.own(module.in_features))
            if getattr(module, "groupsize", 0) == module.in_features:  # one group a row
                module.groupsize = K
            module.in_features = K
        elif how != "whole" and hasattr(module, "out_features"):
            module.out_features = len(next(iter(weights(module).values())))

    def connect(self, model: Transformer):
        """Put the collectives into a model that was cut."""
        for block in model.blocks:
            block.attention.out = SumOverRanks(block.attention.out, self.group)
            block.mlp.down = SumOverRanks(block.mlp.down, self.group)
        model.embedding = SplitEmbedding(model.embedding, self, model.config.vocab_size)
        model.split = self

    # ------------------------------------------------------------ what the ranks tell each other

    def gather(self, logits: Tensor, V: int) -> Tensor:
        """Everybody's columns of logits (...,V/ranks), in order, without padding: (...,V)."""
        columns = logits.movedim(-1, 0).contiguous()  # gathered along the first dimension
        return all_gather(columns, self.ranks, self.group)[:V].movedim(0, -1)

    def choose(self, config: Config, logits: Tensor, settings: Sampling, position: Tensor, seen: Tensor | None):
        """generate.choose by this rank's columns of the logits: the same ids (B,) on every rank.

        Greedy, each rank contributes its best logit and that one's id, in one int64, so that the maximum over the
        ranks is the largest logit and among equals the lowest id. Else all logits are gathered, and rank 0 draws.
        """
        V, real = config.vocab_size, config.n_token or config.vocab_size
        if settings.temperature is not None:
            logits = known(self.gather(logits, V), config.n_token)
            return self.decided(sample(logits, settings, position, seen))
        ids = self.rank * logits.shape[1] + torch.arange(logits.shape[1], device=logits.device)
        x = penalized(logits, settings, None if seen is None else seen[:, ids.clamp(max=V - 1)])
        order = ordered(x) * 2**32 + (2**32 - 1 - ids)
        best = torch.where(ids < real, order, -(2**63)).amax(1)  # (B,)
        return 2**32 - 1 - (all_reduce(best, self.group, "max") & 0xFFFFFFFF)

    def decided(self, x: Tensor) -> Tensor:
        """Rank 0's, of what every rank has worked out, perhaps with other roundings."""
        return broadcast(x, self.group)

    def decided_number(self, n: int) -> int:
        number = torch.tensor([n])
        dist.broadcast(number, group_src=0, group=self.control)
        return int(number)

    def agree(self, going: list[int], rows: int) -> list[int]:
        """Which of the rows go on, by rank 0, which alone may know: it looks for stop strings, and asks the user."""
        flags = torch.zeros(rows, dtype=torch.uint8)
        flags[going] = 1
        dist.broadcast(flags, group_src=0, group=self.control)
        return flags.nonzero().flatten().tolist()


class SumOverRanks(nn.Module):
    """A linear layer that has some of its inputs."""

    def __init__(self, linear: nn.Module, group: Any):
        super().__init__()
        self.linear, self.group = linear, group

    def forward(self, x: Tensor):
        return all_reduce(self.linear(x), self.group)


class SplitEmbedding(nn.Module):
    """A table of which each rank has some rows. Of a token looked up one rank has the vector, the others have zeros."""

    def __init__(self, table: nn.Module, shard: Shard, V: int):
        super().__init__()
        self.table, self.group, self.rows = table, shard.group, -(-V // shard.ranks)
        self.first = shard.rank * self.rows

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D)
        row = tokens - self.first
        here = (row >= 0) & (row < self.rows)
        return all_reduce(self.table(torch.where(here, row, 0)) * here[..., None], self.group)

    def logits(self, x: Tensor):  # (...,D) to this rank's (...,V/ranks)
        return self.table.logits(x)


# ---------------------------------------------------------------- what cannot be split


def split_of(name: str) -> tuple[str, int]:
    """The line of SPLIT for a module; modules without weights have none and need none."""
    found = [key for key in SPLIT if name == key or name.endswith("." + key)]
    return SPLIT[max(found, key=len)] if found else ("unknown", 0)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has of a module itself."""
    found = module._parameters | module._buffers
    return {k: t for k, t in found.items() if t is not None and k not in module._non_persistent_buffers_set}


def obstacles(model: Transformer, ranks: int) -> list[str]:
    """Why a model cannot be split over so many ranks; empty where it can."""
    config = model.config
    sizes = {"n_head": config.n_head, "hidden_dim": config.hidden_dim}
    found = [f"{name} {n} is no multiple of {ranks}" for name, n in sizes.items() if n % ranks]
    for name, module in model.named_modules():
        if found or ranks == 1 or split_of(name)[0] != "inputs" or not hasattr(module, "groupsize"):
            continue
        K, size = module.in_features // ranks, module.groupsize
        if K % size and module.scales.shape[1] > 1:
            found.append(f"{name}: {K} columns a rank are no multiple of the quantization group of {size}")
        elif K % 2 and hasattr(module, "packed"):
            found.append(f"{name}: {K} columns a rank are odd, and 4-bit weights are stored in pairs")
    return found


def check(model: Transformer, ranks: int):
    for name, module in model.named_modules():
        assert not weights(module) or split_of(name)[0] != "unknown", f"SPLIT has no line for {name}"
    if why := obstacles(model, ranks):
        possible = [n for n in range(1, model.config.n_head + 1) if not obstacles(model, n)]
        raise UserError(f"the model cannot be split over {ranks} ranks: {why[0]}; {possible} ranks are possible")


# ---------------------------------------------------------------- collectives
#
# The functional ones, which torch.compile traces into its graph; called as operations, because the functions around
# them wrap their results in a lazy tensor of Python's. All wait for the result.


def all_reduce(x: Tensor, group: Any, operation: str = "sum") -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, operation, group))


def all_gather(x: Tensor, ranks: int, group: Any) -> Tensor:
    """(n,...) of each rank to (ranks*n,...)."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, ranks, group))


def broadcast(x: Tensor, group: Any) -> Tensor:
    """Rank 0's."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.broadcast(x, 0, group))
