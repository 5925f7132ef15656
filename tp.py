"""Tensor parallelism: one model over several processes (ranks), each with a slice of every matrix.

Read down: SPLIT, the table that says how each module is split; Shard, one rank's share of a model;
the checks whether a model can be split; `run_together` and Ranks, the processes that torchrun has
started. This file knows nothing of text.

A block needs two all-reduces (Megatron-LM, arXiv:1909.08053). The matrices that read the block's
input are split by outputs (column-parallel), so that each rank has whole heads and whole hidden
units. The matrices that write to the residual stream are split by inputs (row-parallel), and the
all-reduce adds up the ranks' products. Embedding and head are split by vocabulary.

A rank builds a model of its own size (`Shard.config`), and fills it with its slices of the
checkpoint's tensors (`Shard.slices`). The model calls the collectives of its Shard. Every rank
gathers all logits and draws the same tokens from them.
"""

import dataclasses
import itertools
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import Checkpoint
from cli import UserError, first_line, run_command
from config import Config
from formats import QuantizedLinear
from model import Transformer

# How the weight (N,C) of a module, with N outputs and C inputs, and its bias (N,) are split. The
# keys are the ends of the modules' names. The values are
#   parts        by outputs: the parts of the matrix, one below the other. Each rank has in each part
#                the rows of its units:
#     queries      its query heads
#     gates        the same heads of their gates; models without these gates lack this part
#     kv           the key (or value) heads that its query heads attend to
#     hidden       its hidden units; a matrix of experts has these parts for each expert
#     channels     its channels of a short convolution
#     keys         its key heads of a gated delta net
#     values       the value heads of these key heads
#     numbers      a single row for each of these value heads
#   from a part  by inputs, which are the outputs of such units: an all-reduce adds up the ranks'
#                products, and only rank 0 has a bias that is not zero
#   vocab        by rows, padded with zeros if V is not a multiple of the number of ranks
#   whole        every rank has the whole tensor
# A family whose modules have other names needs lines of its own: a module that is not in the table
# is refused.
SPLIT = {
    "embedding": "vocab",
    "attention.qkv": "queries gates kv kv",
    "attention.qkv.0": "queries gates",  # where q, k and v are stored in different formats
    "attention.qkv.1": "kv",
    "attention.qkv.2": "kv",
    "attention.out": "from queries",
    "delta_net.inputs": "keys keys values values numbers numbers",
    "delta_net.inputs.0": "keys keys values",
    "delta_net.inputs.1": "values",
    "delta_net.inputs.2": "numbers",
    "delta_net.inputs.3": "numbers",
    "delta_net.conv": "keys keys values",
    "delta_net.decay": "numbers",
    "delta_net.norm": "whole",
    "delta_net.out": "from values",
    "short_conv.inputs": "channels channels channels",
    "short_conv.conv": "channels",
    "short_conv.out": "from channels",
    "mlp.gate_up": "hidden hidden",
    "mlp.gate_up.0": "hidden",
    "mlp.gate_up.1": "hidden",
    "mlp.up": "hidden",
    "mlp.down": "from hidden",
    # All ranks must choose the same experts for a token. They do: the router's inputs are made from
    # sums of all ranks (`all_reduce`), which have the same bits everywhere.
    "experts.router": "whole",
    "experts.gate_up": "hidden hidden",
    "experts.gate_up.0": "hidden",
    "experts.gate_up.1": "hidden",
    "experts.down": "from hidden",
    "experts.shared_gate": "whole",
    "shared.gate_up": "hidden hidden",
    "shared.gate_up.0": "hidden",
    "shared.gate_up.1": "hidden",
    "shared.down": "from hidden",
    "output": "vocab",
    "embedding_norm": "whole",
    "attention_norm": "whole",
    "attention.q_norm": "whole",  # width E, shared by all heads; or H * E: see Shard._slice
    "attention.k_norm": "whole",
    "attention_post_norm": "whole",
    "mlp_norm": "whole",
    "mlp_post_norm": "whole",
    "norm": "whole",
    "proj": "whole",  # of mtp.DraftLayer
    "hidden_norm": "whole",
}

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
    # Kind of MLP (see mlp_kind) -> how many hidden units must stay together, if more than one: see `fit`
    hidden_blocks: dict[str, int] = field(default_factory=dict)
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
        """This rank's range of the hidden units of an MLP (see mlp_kind), in whole blocks."""
        F = hidden_width(config, kind)
        size = self.hidden_blocks.get(kind, 1)
        blocks = self.own(-(-F // size))
        return range(min(F, blocks.start * size), min(F, blocks.stop * size))

    def _part(self, config: Config, name: str, part: str) -> tuple[list[range], int]:
        """This rank's rows of a part (see SPLIT) of the module with this name, and the number of all its
        rows."""
        H, K, E = config.heads
        if part in ("queries", "gates"):
            return [times(self.own(H), E)], H * E
        if part == "kv":
            return [range(E * head, E * (head + 1)) for head in self._kv_heads(config)], K * E
        if part == "hidden":
            kind = mlp_kind(name)
            return [self._own_hidden(config, kind)], hidden_width(config, kind)
        if part == "channels":
            return [self.own(config.dim)], config.dim

        net = config.delta_net
        n = net.n_key_head
        own = self.own(n)
        if part == "keys":
            return [times(own, net.key_dim)], net.keys_width
        width = net.value_dim if part == "values" else 1
        # A key head has the value heads with its own number and with every n-th number after it.
        starts = range(0, net.n_value_head, n)
        return [times(range(start + own.start, start + own.stop), width) for start in starts], net.n_value_head * width

    def _rows(self, config: Config, name: str, parts: list[str]) -> Slice:
        """This rank's rows of a matrix that consists of these parts."""
        rows = []
        start = 0  # of the part
        for part in parts:
            own, height = self._part(config, name, part)
            rows += [range(start + some.start, start + some.stop) for some in own]
            start += height
        return Slice(tuple(rows))

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
        own = {
            "n_head": len(self.own(config.n_head)),
            "n_kv_head": len(self._kv_heads(config)),
            "hidden_dim": len(self._own_hidden(config, "mlp")) or 1,  # 0 only if no layer has such an MLP
            "vocab_size": -(-config.vocab_size // self.ranks),
            "n_token": None,
        }
        net = config.delta_net
        if net is not None:
            n = len(self.own(net.n_key_head))
            m = n * (net.n_value_head // net.n_key_head)
            own["delta_net"] = dataclasses.replace(net, n_key_head=n, n_value_head=m)
        conv = config.short_conv
        if conv is not None:
            own["short_conv"] = dataclasses.replace(conv, conv_channels=len(self.own(conv.conv_channels)))
        if config.experts is not None:
            hidden_dim = len(self._own_hidden(config, "experts"))
            shared_dim = len(self._own_hidden(config, "experts.shared"))
            own["experts"] = dataclasses.replace(config.experts, hidden_dim=hidden_dim, shared_dim=shared_dim)
        return dataclasses.replace(config, **own)

    def slices(self, model: Transformer) -> dict[str, Slice]:
        """This rank's slice of each tensor of a whole model, by name. Call `fit` before."""
        return {name: self._slice(model, name) for name in model.state_dict()}

    def _slice(self, model: Transformer, tensor_name: str) -> Slice:
        config = model.config
        name, _, kind = tensor_name.rpartition(".")  # the kind is "weight", "bias", "scales" ...
        module = model.get_submodule(name)
        N = len(getattr(module, kind))
        how = split_of(name)
        if config.qk_norm_whole:
            how = {"q_norm": "queries", "k_norm": "kv"}.get(name.rpartition(".")[2], how)

        if how == "whole":
            return Slice((range(N),))
        if how == "vocab":
            height = -(-N // self.ranks)
            start = min(self.rank * height, N)
            return Slice((range(start, min(start + height, N)),), height=height)
        if not how.startswith("from "):
            parts = [part for part in how.split() if part != "gates" or config.attention_gate]
            matrices = config.experts.n_expert if how.startswith("hidden") and mlp_kind(name) == "experts" else 1
            return self._rows(config, name, parts * matrices)

        # The columns are split.
        if kind == "bias":  # it is added once, by rank 0; the other ranks have zeros
            rows = range(N) if self.rank == 0 else range(0)
            return Slice((rows,), height=N)
        own, _ = self._part(config, name, how.removeprefix("from "))
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


def split_of(name: str) -> str:
    """The value in SPLIT of the longest key that matches a module's name, or "unknown"."""
    fitting = [key for key in SPLIT if name == key or name.endswith("." + key)]
    return SPLIT[max(fitting, key=len)] if fitting else "unknown"


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
    """The kind of MLP that a module belongs to, by its name. Each kind has its own hidden width."""
    if ".shared." in name:
        return "experts.shared"
    return "experts" if ".experts." in name else "mlp"


def hidden_width(config: Config, kind: str) -> int:
    """The number of hidden units of this kind of MLP."""
    if kind == "mlp":
        return config.hidden_dim
    return config.experts.hidden_dim if kind == "experts" else config.experts.shared_dim


def hidden_blocks_of(model: Transformer) -> dict[str, int]:
    """How many consecutive hidden units must stay on one rank, for each kind of MLP of a whole model."""
    sizes = {}
    for name, module in model.named_modules():
        if split_of(name) == "from hidden":
            kind = mlp_kind(name)
            sizes[kind] = math.lcm(sizes.get(kind, 1), block_columns(module))
    return sizes


def obstacles(model: Transformer, ranks: int) -> list[str]:
    """The reasons why a model cannot be split over this number of ranks; empty if it can."""
    config = model.config
    net = config.delta_net
    counts = {"n_head": config.n_head}
    if net is not None:
        counts["n_key_head"] = net.n_key_head
    if config.short_conv is not None:
        counts["dim"] = config.dim
    reasons = [f"{name} {n} is not a multiple of {ranks}" for name, n in counts.items() if n % ranks]
    for kind, size in hidden_blocks_of(model).items():
        F = hidden_width(config, kind)
        pieces = -(-F // size)
        if pieces < ranks:
            reasons.append(f"{kind}.down: {F} columns in blocks of {size} are {pieces} blocks")

    for name, module in model.named_modules():
        how = split_of(name)
        if ranks > 1 and how.startswith("from ") and how != "from hidden":
            own, _ = Shard(0, ranks)._part(config, name, how.removeprefix("from "))
            size = block_columns(module)
            if len(own[0]) % size:
                what = f"{len(own[0])} columns per rank are not a multiple of its block of {size}"
                reasons.append(f"{name}: {what}")
    return reasons


def check(model: Transformer, ranks: int):
    for name in model.state_dict():
        assert split_of(name.rpartition(".")[0]) != "unknown", f"SPLIT has no line for {name}"
    if reasons := obstacles(model, ranks):
        possible = [n for n in range(1, model.config.n_head + 1) if not obstacles(model, n)]
        raise UserError(f"the model cannot be split over {ranks} ranks: {reasons[0]}; {possible} ranks are possible")


# ---------------------------------------------------------------- the processes

# Only rank 0 reads the command line and the prompts, and prints. If one rank ends, all ranks end:
#   an error   the rank with the error notes it in torchrun's store and prints it, and all ranks exit
#   a crash    every rank sets a heartbeat in the store twice a second. A rank that sees no new
#              heartbeat of another rank for TIMEOUT_S, or for BROKEN_TIMEOUT_S after a connection
#              broke, reports this as an error
#   Ctrl-C     torchrun passes the signal on to all ranks, which exit at once

HEARTBEAT_S = 0.5
TIMEOUT_S = 20.0
BROKEN_TIMEOUT_S = 4.0
MESSAGE_BYTES = 2048  # size of the first broadcast of a message; a longer message needs two
START_S = 300.0  # time limit for the start of all ranks; importing torch from a cold disk is slow
# The limit is long, because a user may be idle. The watch thread notices a dead rank.
COLLECTIVE_TIMEOUT = timedelta(days=7)


def run_together(main: Callable):
    """Run main(Ranks) in every rank, then exit. All ranks exit with the code of run_command, or
    with 1 after a traceback."""
    ranks = Ranks()
    errors = []

    def run():
        ranks.connect()
        return main(ranks)

    try:
        run_command(run, errors.append)
    except SystemExit as end:
        if isinstance(end.code, int) and end.code:
            ranks.abort(end.code, "\n".join(errors))
    except Exception as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            ranks.wait_for_reason()
        ranks.abort(1, traceback.format_exc())
    ranks.finish()


class Ranks:
    """This process, one of the ranks of a run."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # among the ranks of this machine
        self.timeout_s = TIMEOUT_S
        self.done = threading.Event()  # the run has ended without an error
        if self.rank:  # only rank 0 prints
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            sys.stderr = sys.stdout

    def connect(self):
        """Set up the store, the watch thread, and a process group for tensors on the CPU. Signals end
        the process at once: a Python handler would wait for the end of a collective."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_S)))
        except dist.DistError as error:
            reason = first_line(error)
            raise UserError(f"not all of {self.size} ranks started within {START_S:.0f} s: {reason}") from None
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        self.store = dist.PrefixStore(f"fastpath {restarts}", store)
        group_store = self.store.clone()
        self.store.set_timeout(timedelta(seconds=5))
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

        # gloo prints a line to stdout, where --json must print one object and nothing else.
        stdout = os.dup(1)
        os.dup2(2, 1)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("group", group_store),
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
            )
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        self.control = dist.group.WORLD

    def shard(self, device: torch.device) -> Shard:
        """This rank's Shard of a model on its device."""
        dist.barrier(self.control)  # wait until every rank has checked that it has enough memory
        group = self.control
        if device.type == "cuda":
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl", timeout=COLLECTIVE_TIMEOUT)
        return Shard.in_group(group)

    def portion(self, device: torch.device) -> float:
        """The fraction of the model on this device. On CPU all ranks of a machine share the memory."""
        if device.type != "cpu":
            return 1 / self.size
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / self.size

    def device(self, name: str | None) -> str | None:
        """--device for this rank: one GPU for each rank of a machine."""
        if name is None and not torch.cuda.is_available():
            return "cpu"
        if name in (None, "cuda"):
            return f"cuda:{self.local_rank}"
        if name != "cpu":
            raise UserError(f"--device {name} cannot be shared by {self.size} ranks: give cuda (a GPU each) or cpu")
        return name

    # ------------------------------------------------------------ synchronization

    def share(self, work: Callable = lambda: None):
        """Call work() on rank 0 only, and return its result on every rank. A short result takes one
        broadcast. If it ends the process, as --help does, all ranks end."""
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            try:
                result = work()
            except SystemExit as end:
                result = end
            data = pickle.dumps(result)
            data = len(data).to_bytes(8, "little") + data
            message = torch.frombuffer(bytearray(data.ljust(MESSAGE_BYTES)), dtype=torch.uint8)

        dist.broadcast(message[:MESSAGE_BYTES], group_src=0, group=self.control)
        end = 8 + int.from_bytes(bytes(message[:8].tolist()), "little")
        if end > MESSAGE_BYTES:
            message = F.pad(message, (0, end - len(message)))  # rank 0 already has all of it
            dist.broadcast(message[MESSAGE_BYTES:], group_src=0, group=self.control)

        result = pickle.loads(message[8:end].numpy().tobytes())
        if isinstance(result, SystemExit):
            raise result
        return result

    def open(self, work: Callable[[], Checkpoint]) -> Checkpoint:
        """Call work() on every rank, first on one rank per machine, so that the others find the files
        that it wrote. Raises UserError if the config or the sizes of the files of the checkpoint differ
        between ranks."""
        if self.local_rank == 0:
            checkpoint = work()
        dist.barrier(self.control)
        if self.local_rank != 0:
            checkpoint = work()

        everyone = [None] * self.size
        about = repr((checkpoint.config, checkpoint.quantization, checkpoint.files.sizes()))
        dist.all_gather_object(everyone, about, group=self.control)
        if other := [rank for rank, value in enumerate(everyone) if value != everyone[0]]:
            raise UserError(
                f"{checkpoint.path} of rank {other[0]} is not rank 0's: its config, or the names or "
                "sizes of its files differ; copy one to all machines"
            )
        return checkpoint

    # ------------------------------------------------------------ shutdown

    def finish(self):
        """Exit with code 0 when all ranks are done. os._exit does not run C++ destructors, which
        have been seen to abort the process at Python's exit."""
        try:
            dist.barrier(self.control)
            self.done.set()
            self.watch.join()
            dist.barrier(self.control)  # a store on rank 0 must outlive all watch threads
            dist.destroy_process_group()
        except Exception:
            self.wait_for_reason()
            self.abort(1, traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def wait_for_reason(self):
        """Wait, after a connection broke because another rank ended, until the watch thread knows
        which one, and exits."""
        self.timeout_s = BROKEN_TIMEOUT_S
        self.watch.join(TIMEOUT_S)  # with a limit, in case the watch thread itself has ended

    def abort(self, code: int, text: str):
        """End all ranks because of an error of this one, and exit."""
        if self.rank:
            time.sleep(HEARTBEAT_S)  # if all ranks have the same error, rank 0 should report it
        self._end(code, self.rank, text)

    def _end(self, code: int, who: int, text: str):
        """Tell all ranks to end because of an error of rank `who`, and exit. The first rank that does this
        prints the error."""
        own = str(self.rank)
        first = own
        with suppress(dist.DistError):  # the store has gone
            first = self.store.clone().compare_set("end", "", own).decode()
        if first == own and text:
            name = f"{Path(sys.argv[0]).name}: error: "
            text = text.removeprefix(name)
            if who:
                text = f"rank {who}: {text}"
            print(name + text, file=sys.__stderr__, flush=True)  # sys.stderr may be /dev/null
        with suppress(OSError):  # the reader of stdout has gone
            sys.stdout.flush()
        os._exit(code)

    def _watch(self):
        """Set this rank's heartbeat, and exit the process when the store holds a reason to. This is
        the work of the watch thread."""
        store = self.store.clone()  # a waiting call blocks other threads on the same connection
        others = [rank for rank in range(self.size) if rank != self.rank]
        last = {}
        silence = dict.fromkeys(others, 0.0)
        try:
            for beat in itertools.count():
                if self.done.wait(HEARTBEAT_S):
                    return
                store.set(f"alive {self.rank}", str(beat))

                beats = store.multi_get([f"alive {rank}" for rank in others])
                for rank, value in zip(others, beats):
                    silence[rank] += HEARTBEAT_S  # not by a clock, because the machine may sleep
                    if value != last.get(rank):
                        silence[rank] = 0.0
                    last[rank] = value

                if silent := [rank for rank in others if silence[rank] >= self.timeout_s]:
                    names = ", ".join(map(str, silent))
                    text = f"ended without an error message (no heartbeat of rank {names})"
                    self._end(1, silent[0], text)
                if store.check(["end"]):
                    time.sleep(HEARTBEAT_S)  # the rank that has set this prints the reason
                    os._exit(1)
        except Exception as error:
            text = f"its store has gone, with torchrun or rank 0 ({first_line(error)})"
            self._end(1, 0, text if self.local_rank == 0 else "")
