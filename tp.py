"""Tensor parallelism: one model over several processes (ranks), each with a slice of every matrix.

Read down: Slice and Shard, one rank's share of a model; the checks whether a model can be split;
`run_together` and Ranks, the processes that torchrun has started. This file knows nothing of text,
and of no kind of layer: each layer says what its rows and columns consist of (layers.Units).

A block needs two all-reduces (Megatron-LM, arXiv:1909.08053), or three if experts are beside its MLP.
The matrices that read the block's input are split by outputs (column-parallel), so that each rank has
whole heads and whole hidden units. The matrices that write to the residual stream are split by inputs
(row-parallel), and the all-reduce adds up the ranks' products. Embedding and head are split by
vocabulary.

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
from collections.abc import Callable, Iterable
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
from config import PARTS, Config
from formats import QuantizedLinear
from layers import VOCABULARY, Linear, Units
from model import Transformer

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
    """One rank's share of a model. It is `model.shard` of a split model; a model that is not split has a
    model.WholeModel there."""

    rank: int
    ranks: int
    # Kind of MLP -> how many hidden units must stay together, if more than one: see `fit`. The kinds are
    # "mlp", "experts" and "experts.shared".
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

    def own_hidden(self, kind: str, F: int) -> range:
        """This rank's range of the F hidden units of an MLP (see hidden_blocks), in whole blocks."""
        size = self.hidden_blocks.get(kind, 1)
        blocks = self.own(-(-F // size))
        return range(min(F, blocks.start * size), min(F, blocks.stop * size))

    def own_heads(self, n: int, shared_by: int) -> list[int]:
        """The key and value heads that this rank keeps, in the order of its part of n query heads.
        shared_by: how many query heads share a key and value head.

        Each of them serves the same number of query heads. If neither the number of key and value heads
        nor the number of ranks is a multiple of the other, the ranks' ranges of query heads cut through
        groups, and each query head gets its own copy of its key and value head.
        """
        heads = [head // shared_by for head in self.own(n)]
        K = n // shared_by
        if K % self.ranks and self.ranks % K:
            return heads
        return sorted(set(heads))

    def config(self, config: Config) -> Config:
        """The Config of this rank's part of a model."""
        H = config.n_head
        own = {
            "n_head": len(self.own(H)),
            "n_kv_head": len(self.own_heads(H, H // config.n_kv_head)),
            "full_kv_head": config.full_kv_head and len(self.own_heads(H, H // config.full_kv_head)),
            "hidden_dim": len(self.own_hidden("mlp", config.hidden_dim)) or 1,  # 0 only if no layer has such an MLP
            "shared_kv_hidden_dim": config.shared_kv_hidden_dim
            and len(self.own_hidden("mlp", config.shared_kv_hidden_dim)),
            "vocab_size": -(-config.vocab_size // self.ranks),
            "n_token": None,
        }
        parts = {name: getattr(config, name) for name in PARTS}
        own |= {name: part.of_rank(self) for name, part in parts.items() if part is not None}
        return dataclasses.replace(config, **own)

    def own_units(self, units: Units, start: int) -> list[range]:
        """This rank's rows of units that begin at row `start` of a matrix."""
        if units.shared_by > 1:
            heads = self.own_heads(units.n, units.shared_by)
            return [range(start + head * units.width, start + (head + 1) * units.width) for head in heads]
        own = self.own(units.n) if units.even else self.own_hidden(units.name, units.n)
        return [range(start + own.start * units.width, start + own.stop * units.width)]

    def own_parts(self, parts: Iterable[Units]) -> list[range]:
        """This rank's rows (or columns) of a matrix that consists of these units."""
        found = []
        start = 0
        for units in parts:
            found += self.own_units(units, start)
            start += units.size
        return found

    def slices(self, model: Transformer) -> dict[str, Slice]:
        """This rank's slice of each tensor of a whole model, by name. Call `fit` before."""
        return {name: self._slice(model, name) for name in model.state_dict()}

    def _slice(self, model: Transformer, tensor_name: str) -> Slice:
        name, _, kind = tensor_name.rpartition(".")  # the kind is "weight", "bias", "scales" ...
        module = model.get_submodule(name)
        N = len(getattr(module, kind))
        rows = [units for piece in getattr(module, "rows", ()) for units in piece]
        columns = getattr(module, "columns", ())

        if rows and rows[0].name == VOCABULARY:
            height = -(-N // self.ranks)
            start = min(self.rank * height, N)
            return Slice((range(start, min(start + height, N)),), height=height)
        if rows:
            return Slice(tuple(self.own_parts(rows * getattr(module, "n_expert", 1))))
        if not columns:
            return Slice((range(N),))
        if kind == "bias":  # it is added once, by rank 0; the other ranks have zeros
            return Slice((range(N) if self.rank == 0 else range(0),), height=N)
        width, count = columns_of(module, kind)
        own = self.own_parts(columns)
        ranges = [range(part.start // width * count, -(-part.stop // width) * count) for part in own]
        return Slice(
            (range(N),), tuple(dict.fromkeys(ranges))
        )  # without duplicates, which a value for a whole row would give

    # The functional collectives, which torch.compile traces into its graph. They are called as
    # operations because the Python functions around them wrap their results in a lazy tensor.

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", self.group))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over a dimension of which each rank has an equal part. (If one key head is on
        several ranks, then each of them is, on the same number of ranks.)"""
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


# ---------------------------------------------------------------- what cannot be split


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


def by_columns(model: Transformer) -> list[tuple[str, nn.Module]]:
    """(name, module) of the layers whose columns are split."""
    return [(name, module) for name, module in model.named_modules() if getattr(module, "columns", ())]


def hidden_blocks_of(model: Transformer) -> dict[str, int]:
    """How many consecutive hidden units must stay on one rank, for each kind of MLP of a whole model."""
    sizes = {}
    for _, module in by_columns(model):
        units = module.columns[0]
        if not units.even:
            sizes[units.name] = math.lcm(sizes.get(units.name, 1), block_columns(module))
    return sizes


def obstacles(model: Transformer, ranks: int) -> list[str]:
    """The reasons why a model cannot be split over this number of ranks; empty if it can."""
    blocks = hidden_blocks_of(model)
    reasons = []
    counts = {"n_head": model.config.n_head}
    for name, module in by_columns(model):
        units = module.columns[0]
        if units.even:
            counts[units.name] = units.n
            size = block_columns(module)
            own = sum(map(len, Shard(0, ranks).own_units(units, 0)))
            if ranks > 1 and own % size:
                reasons.append(f"{name}: {own} columns per rank are not a multiple of its block of {size}")
            continue
        size = blocks[units.name]
        pieces = -(-units.n // size)
        if pieces < ranks:
            reasons.append(f"{units.name}.down: {units.n} columns in blocks of {size} are {pieces} blocks")
    return [f"{name} {n} is not a multiple of {ranks}" for name, n in counts.items() if n % ranks] + reasons


def check(model: Transformer, ranks: int):
    for block in model.all_blocks:
        for name, module in block.named_modules():
            is_split = isinstance(module, (Linear, QuantizedLinear)) and not name.startswith("layer_input.")
            silent = is_split and not module.rows and not module.columns
            assert not silent, f"{name} does not say what its rows or columns consist of"
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
        self.store.set(f"alive {self.rank}", "")  # the others wait for it, but not for long
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
