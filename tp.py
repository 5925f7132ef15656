"""Tensor parallelism: one model over several processes (ranks), each with a slice of every large matrix.

Read down: SPLIT, the table that says how each module is split; Shard, one rank's share of a model; the checks whether a
model can be split; run_together and Ranks, which manage the processes that torchrun has started. Knows nothing of text.

A block needs two all-reduces (Megatron-LM, arXiv:1909.08053). The matrices that read the block's input are split by
outputs (column-parallel), so that each rank has whole heads and whole hidden units. The matrices that write to the
residual stream are split by inputs (row-parallel), and the all-reduce adds up the ranks' products. Embedding and head
are split by vocabulary.

A model is split in two steps, and its weights are loaded between them: `cut` shrinks each tensor to this rank's slice
and returns which slices of the checkpoint's tensors these are; `connect` inserts the all-reduces. Every rank gathers
all logits and draws the same tokens from them.
"""

import dataclasses
import hashlib
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cli import UserError, first_line, run_command
from model import Config, Transformer

# How the weight (N,K) of a module, with N outputs and K inputs, and its bias (N,) are split. The keys are the ends of
# the modules' names; the values are (how, number of matrices that are stored as one):
#   heads    by outputs: the rows of this rank's query heads, then those of the key and value heads that they attend to
#   outputs  by outputs: the same share of the rows of each of the matrices that are stored as one
#   inputs   by inputs; an all-reduce adds up the ranks' products, and only rank 0 has the bias
#   vocab    by rows, padded with zeros if V is not a multiple of the number of ranks
#   whole    on every rank
# A family whose modules have other names needs lines of its own: a module that is not in the table is refused.
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
    "attention.q_norm": ("whole", 1),  # one vector of width E, which all heads share
    "attention.k_norm": ("whole", 1),
    "mlp_norm": ("whole", 1),
    "norm": ("whole", 1),
}


# ---------------------------------------------------------------- one rank's share


@dataclass(frozen=True)
class Slice:
    """The part of a tensor that one rank has: ranges of its rows, concatenated, and a range of its columns."""

    rows: tuple[range, ...]
    columns: range | None = None  # None: all columns, or a tensor with one dimension
    height: int = 0  # zero rows are appended up to this number of rows

    def of(self, source) -> Tensor:
        """The slice of a tensor, or of a safetensors get_slice, which then reads only that part of the file."""
        columns = () if self.columns is None else (slice(self.columns.start, self.columns.stop),)
        pieces = [source[(slice(r.start, r.stop), *columns)] for r in self.rows]
        out = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        missing = self.height - len(out)
        return torch.cat([out, out.new_zeros(missing, *out.shape[1:])]) if missing > 0 else out


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model: rank `rank` of `ranks`. A split model has it as `model.split`.

    group: the process group for tensors on the model's device; control: the process group for tensors on the CPU.
    """

    rank: int
    ranks: int
    group: Any = None  # the group's name, which the functional collectives take; `cut` needs no group
    control: Any = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, control: dist.ProcessGroup | None = None) -> "Shard":
        return cls(group.rank(), group.size(), group.group_name, control or group)

    def own(self, n: int) -> range:
        """This rank's range of n items, where n is a multiple of the number of ranks."""
        return range(self.rank * n // self.ranks, (self.rank + 1) * n // self.ranks)

    def kv_heads(self, config: Config) -> list[int]:
        """The key and value heads that this rank keeps, in the order of its query heads.

        Each of them serves the same number of query heads. If neither K nor the number of ranks is a multiple of the
        other, the ranks cut through groups of query heads, and each query head gets its own copy.
        """
        H, K = config.n_head, config.n_kv_head
        heads = [head // (H // K) for head in self.own(H)]
        return heads if K % self.ranks and self.ranks % K else sorted(set(heads))

    def config(self, config: Config) -> Config:
        """The Config of this rank's blocks."""
        sizes = {"n_head": len(self.own(config.n_head)), "n_kv_head": len(self.kv_heads(config))}
        return dataclasses.replace(config, hidden_dim=len(self.own(config.hidden_dim)), **sizes)

    def cut(self, model: Transformer) -> dict[str, Slice]:
        """Shrink each tensor (it may be on meta) to this rank's slice, and return the slices by the tensors' names.

        Raises UserError if the model cannot be split over this number of ranks.
        """
        check(model, self.ranks)
        slices = {}
        for name, module in model.named_modules():
            for kind, tensor in weights(module).items():
                mine, own = self._slice(model.config, name, module, kind), None
                if mine is not None:
                    slices[f"{name}.{kind}"] = mine
                    own = mine.of(tensor).clone()  # a copy, so that the whole tensor can be freed
                is_parameter = isinstance(tensor, nn.Parameter) and own is not None
                setattr(module, kind, nn.Parameter(own, requires_grad=False) if is_parameter else own)
            self._resize(module, split_of(name)[0])
        for block in model.blocks:
            block.attention.config = self.config(model.config)
        return slices

    def _slice(self, config: Config, name: str, module: nn.Module, kind: str) -> Slice | None:
        """This rank's slice of a module's tensor (kind: "weight", "bias", "scales" ...), or None if it has none."""
        how, count = split_of(name)
        N = len(getattr(module, kind))
        if how == "heads":
            H, K, E = config.n_head, config.n_kv_head, config.head_dim
            heads = self.kv_heads(config)
            rows = [range(E * self.own(H).start, E * self.own(H).stop)]
            rows += [range(E * (first + head), E * (first + head + 1)) for first in (H, H + K) for head in heads]
            return Slice(tuple(rows))
        if how == "outputs":
            own = self.own(N // count)
            return Slice(tuple(range(own.start + i * (N // count), own.stop + i * (N // count)) for i in range(count)))
        if how == "vocab":
            height = -(-N // self.ranks)
            start = min(self.rank * height, N)
            return Slice((range(start, min(start + height, N)),), height=height)
        if how == "whole" or (kind == "bias" and self.rank == 0):
            return Slice((range(N),))
        if kind == "bias":
            return None
        own = self.own(module.in_features)
        if kind == "packed":
            own = range(own.start // 2, -(-own.stop // 2))
        elif kind in ("scales", "mins"):  # `check` refuses to cut a group, unless it is the whole row
            own = range(own.start // module.groupsize, -(-own.stop // module.groupsize))
        return Slice((range(N),), own)

    def _resize(self, module: nn.Module, how: str):
        """Adapt the sizes that a linear layer keeps besides its tensors."""
        if how == "inputs":
            K = len(self.own(module.in_features))
            if getattr(module, "groupsize", 0) == module.in_features:  # one group per row
                module.groupsize = K
            module.in_features = K
        elif how != "whole" and hasattr(module, "out_features"):
            module.out_features = len(next(iter(weights(module).values())))

    def connect(self, model: Transformer):
        """Insert the collectives into a model that `cut` has shrunk."""
        for block in model.blocks:
            block.attention.out = SumOverRanks(block.attention.out, self.group)
            block.mlp.down = SumOverRanks(block.mlp.down, self.group)
        model.embedding = SplitEmbedding(model.embedding, self, model.config.vocab_size)
        model.split = self

    # The functional collectives, which torch.compile traces into its graph. They are called as operations because the
    # Python functions around them wrap their results in a lazy tensor.

    def gather(self, logits: Tensor, V: int) -> Tensor:
        """Gather the logits of all ranks, (...,V/ranks) each, in order and without the padding: (...,V)."""
        columns = logits.movedim(-1, 0).contiguous()  # all_gather concatenates along the first dimension
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(columns, self.ranks, self.group))[:V].movedim(0, -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Broadcast rank 0's tensor: ranks may round differently."""
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.broadcast(x, 0, self.group))


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum of x over the ranks."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group))


class SumOverRanks(nn.Module):
    """A linear layer that is split by its inputs (row-parallel): an all-reduce adds up the ranks' products."""

    def __init__(self, linear: nn.Module, group: Any):
        super().__init__()
        self.linear, self.group = linear, group

    def forward(self, x: Tensor):
        return all_reduce(self.linear(x), self.group)


class SplitEmbedding(nn.Module):
    """An embedding table that is split by rows: one rank has the vector of a token, the others add zeros to it."""

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
    """The entry of SPLIT with the longest key that matches a module's name. Modules without weights need none."""
    fitting = [key for key in SPLIT if name == key or name.endswith("." + key)]
    return SPLIT[max(fitting, key=len)] if fitting else ("unknown", 0)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers that are part of a checkpoint."""
    tensors = module._parameters | module._buffers
    return {k: t for k, t in tensors.items() if t is not None and k not in module._non_persistent_buffers_set}


def obstacles(model: Transformer, ranks: int) -> list[str]:
    """The reasons why a model cannot be split over this number of ranks; empty if it can."""
    config = model.config
    sizes = {"n_head": config.n_head, "hidden_dim": config.hidden_dim}
    reasons = [f"{name} {n} is not a multiple of {ranks}" for name, n in sizes.items() if n % ranks]
    for name, module in model.named_modules():
        if reasons or ranks == 1 or split_of(name)[0] != "inputs" or not hasattr(module, "groupsize"):
            continue
        K, size = module.in_features // ranks, module.groupsize
        if K % size and module.scales.shape[1] > 1:
            reasons.append(f"{name}: {K} columns per rank are not a multiple of the quantization group of {size}")
        elif K % 2 and hasattr(module, "packed"):
            reasons.append(f"{name}: {K} columns per rank are odd, and 4-bit weights are stored in pairs")
    return reasons


def check(model: Transformer, ranks: int):
    for name, module in model.named_modules():
        assert not weights(module) or split_of(name)[0] != "unknown", f"SPLIT has no line for {name}"
    if reasons := obstacles(model, ranks):
        possible = [n for n in range(1, model.config.n_head + 1) if not obstacles(model, n)]
        raise UserError(f"the model cannot be split over {ranks} ranks: {reasons[0]}; {possible} ranks are possible")


# ---------------------------------------------------------------- the processes of one run
#
# Start-up, synchronization and shutdown of the ranks under torchrun. Only rank 0 reads the command line and the
# prompts and prints. If one rank ends, all ranks end:
#   an error   the rank with the error writes it to torchrun's store; rank 0 prints it, and all ranks exit
#   a crash    every rank sets a heartbeat in the store twice a second; a rank that sees no new heartbeat of another
#              rank for TIMEOUT_S, or BROKEN_TIMEOUT_S after a connection broke, writes this as an error to the store
#   Ctrl-C     torchrun passes the signal on to all ranks, which exit at once

HEARTBEAT_S, TIMEOUT_S, BROKEN_TIMEOUT_S = 0.5, 20.0, 4.0
MESSAGE_BYTES = 2048  # size of the first broadcast of a message; a longer message needs a second one
START_S = 300.0  # time limit for the start of all ranks; importing torch from a cold disk is slow
COLLECTIVE_TIMEOUT = timedelta(days=7)  # long, because a user may be idle; the watch thread notices a dead rank


def run_together(main: Callable):
    """Run main(Ranks) in every rank, then exit. All ranks exit with the code of run_command, or 1 after a traceback."""
    ranks = Ranks()
    errors = []
    try:
        run_command(lambda: ranks.run(main), errors.append)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        if code:
            ranks.abort(code, "\n".join(errors))
    except Exception as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            ranks.wait_for_reason()
        ranks.abort(1, traceback.format_exc())
    ranks.finish()


class Ranks:
    """This process, one of the ranks of a run."""

    def __init__(self):
        numbers = [int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        self.rank, self.size, self.local_rank = numbers
        self.host, self.port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
        self.connection_broke = False  # then a missing heartbeat is noticed sooner
        self.timeout_s = TIMEOUT_S
        self.done, self.exiting = threading.Event(), threading.Lock()
        if self.rank:  # only rank 0 prints
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def connect(self):
        """Set up the store, the watch thread, and a process group for tensors on the CPU."""
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts the store, or else rank 0
        self.store = self._client(START_S, hosts=self.rank == 0 and not hosted)
        self.store.set(f"alive {self.rank}", "0")
        try:
            self.store.wait([f"alive {rank}" for rank in range(self.size)], timedelta(seconds=START_S))
        except dist.DistStoreError:
            missing = [rank for rank in range(self.size) if not self.store.check([f"alive {rank}"])]
            raise UserError(f"of {self.size} ranks {missing} did not start within {START_S:.0f} s") from None
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()
        stdout = os.dup(1)  # gloo prints a line to stdout, where --json must print one object and nothing else
        os.dup2(2, 1)
        try:
            group = dist.PrefixStore("group", self.store)
            dist.init_process_group(
                "gloo", store=group, rank=self.rank, world_size=self.size, timeout=COLLECTIVE_TIMEOUT
            )
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        self.control = dist.group.WORLD

    def _client(self, seconds: float = 5.0, hosts: bool = False) -> dist.Store:
        """A connection to the store, with this timeout for each call.

        A waiting call blocks other threads on the same connection, so the watch thread has its own connection.
        """
        options = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False, "multi_tenant": True}
        store = dist.TCPStore(self.host, self.port, self.size, hosts, **options)
        return dist.PrefixStore(f"fastpath {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def run(self, main: Callable):
        """Connect, and return main(self). Signals end the process at once: a Python handler would wait for the end of a
        collective."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.connect()
        return main(self)

    def shard(self, device: torch.device) -> Shard:
        """This rank's Shard of a model on its device."""
        dist.barrier(self.control)  # wait until every rank has checked that it has enough memory
        group = self.control
        if device.type == "cuda":
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl", timeout=COLLECTIVE_TIMEOUT)
        return Shard.of(group, self.control)

    def portion(self, device: torch.device) -> float:
        """The fraction of the model on this device. On CPU all ranks of a machine share the memory."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
        return here / self.size

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
        """Call work() on rank 0 only, and return its result on every rank. A short result takes one broadcast."""
        message, data = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), b""  # the length in 8 bytes, then the pickle
        if self.rank == 0:
            data = pickle.dumps(work())
            data = len(data).to_bytes(8, "little") + data
            message[: len(data)] = torch.frombuffer(bytearray(data[:MESSAGE_BYTES]), dtype=torch.uint8)
        dist.broadcast(message, group_src=0, group=self.control)
        n = int.from_bytes(bytes(message[:8].tolist()), "little")
        if n + 8 > MESSAGE_BYTES:
            rest = torch.frombuffer(bytearray(data[MESSAGE_BYTES:] or n + 8 - MESSAGE_BYTES), dtype=torch.uint8)
            dist.broadcast(rest, group_src=0, group=self.control)
            message = torch.cat([message, rest])
        return pickle.loads(message[8 : 8 + n].numpy().tobytes())

    @contextmanager
    def repeat(self, work: Callable):
        """A context in which rank 0 shares work() once a second, so that the others' collectives do not time out."""
        done = threading.Event()

        def send():
            while not done.wait(1.0):
                self.share(work)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def in_turn(self, work: Callable):
        """Call work() on every rank, first on one rank per machine, so that the others find the files that it wrote."""
        result = work() if self.local_rank == 0 else None
        dist.barrier(self.control)
        return work() if self.local_rank else result

    def check_same(self, directory: Path):
        """Raise UserError if config.json or the weight files of a checkpoint directory differ between ranks."""
        files = sorted((path.name, path.stat().st_size) for path in directory.glob("*.safetensors*"))
        digest = hashlib.sha256((directory / "config.json").read_bytes() + repr(files).encode()).hexdigest()
        digests = [None] * self.size
        dist.all_gather_object(digests, digest, group=self.control)
        if other := [rank for rank, value in enumerate(digests) if value != digests[0]]:
            raise UserError(
                f"{directory} of rank {other[0]} is not rank 0's: config.json, or the names or sizes of the "
                "*.safetensors files differ; copy one to all machines"
            )

    # ------------------------------------------------------------ shutdown

    def finish(self):
        """Exit with code 0 when all ranks are done, by os._exit: C++ destructors at Python's exit have been seen to
        abort the process."""
        try:
            dist.barrier(self.control)
            self.done.set()
            self.watch.join()
            dist.barrier(self.control)  # rank 0 may host the store, so it must outlive all watch threads
            dist.destroy_process_group()
        except Exception:
            self.wait_for_reason()
            self.abort(1, traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def wait_for_reason(self):
        """A connection broke because another rank ended: wait until the watch thread knows which one and exits."""
        self.connection_broke = True
        self.watch.join(TIMEOUT_S)  # bounded, in case the watch thread itself has ended

    def abort(self, code: int, text: str):
        """End all ranks and exit, with this error or the one that is already in the store."""
        if self.rank:
            time.sleep(HEARTBEAT_S)  # if all ranks have the same error, rank 0 should be the one to report it
        reason = json.dumps([code, self.rank, text])
        try:
            reason = self._client().compare_set("end", "", reason)
        except dist.DistError:  # the store has gone, so nobody can read the reason
            pass
        self._exit(*json.loads(reason))

    def _exit(self, code: int, who: int, text: str):
        """Exit. Rank 0 first prints the error of rank `who`; if it is itself dead, each machine's first rank does."""
        if not self.exiting.acquire(blocking=False):
            threading.Event().wait()  # the other thread is about to exit
        if text and (self.rank == 0 or (who == 0 and self.local_rank == 0)):
            name = f"{Path(sys.argv[0]).name}: error: "
            text = name + f"rank {who}: " * (who != self.rank) + text.removeprefix(name)
            print(text, file=sys.__stderr__, flush=True)  # sys.stderr is the null device, except on rank 0
        try:
            sys.stdout.flush()
            store = self._client()
            if self.rank == 0:
                store.set("reported", "")
            else:
                store.wait(["reported"])  # torchrun ends all ranks as soon as one has exited
        except Exception:  # the store, or the reader of stdout, has gone
            pass
        os._exit(code or 1)

    def _watch(self):
        """The watch thread: sets this rank's heartbeat, and exits the process when the store holds a reason to."""
        store = self._client()
        others = [rank for rank in range(self.size) if rank != self.rank]
        last, silence = {}, dict.fromkeys(others, 0.0)
        try:
            for beat in range(1 << 60):
                if self.done.wait(HEARTBEAT_S):
                    return
                store.set(f"alive {self.rank}", str(beat))
                beats = store.multi_get([f"alive {rank}" for rank in others])
                for rank, value in zip(others, beats):  # silence counts our own beats: the machine may sleep
                    silence[rank] = silence[rank] + HEARTBEAT_S if last.get(rank) == value else 0.0
                    last[rank] = value
                limit = BROKEN_TIMEOUT_S if self.connection_broke else self.timeout_s
                if silent := [rank for rank in others if silence[rank] >= limit]:
                    text = f"ended without an error message (no heartbeat of rank {', '.join(map(str, silent))})"
                    store.compare_set("end", "", json.dumps([1, silent[0], text]))
                if store.check(["end"]):
                    self._exit(*json.loads(store.get("end")))
        except Exception as error:
            self._exit(1, 0, f"its store has gone, with torchrun or rank 0 ({first_line(error)})")
