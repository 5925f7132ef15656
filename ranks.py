"""The processes (ranks) that torchrun has started for one run: their start-up, synchronization and
shutdown.

Read `run_together` first. Only rank 0 reads the command line and the prompts and prints. If one
rank ends, all ranks end:
  an error   the rank with the error writes it to torchrun's store; rank 0 prints it, and all ranks
             exit
  a crash    every rank sets a heartbeat in the store twice a second. A rank that sees no new
             heartbeat of another rank for TIMEOUT_S, or for BROKEN_TIMEOUT_S after a connection
             broke, writes this as an error to the store
  Ctrl-C     torchrun passes the signal on to all ranks, which exit at once
tp.py says how a model is split over the ranks.
"""

import itertools
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from checkpoint import Checkpoint
from cli import UserError, first_line, run_command
from tp import Shard

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
        self.host = os.environ.get("MASTER_ADDR", "localhost")
        self.port = int(os.environ.get("MASTER_PORT", "29500"))
        self.timeout_s = TIMEOUT_S
        self.done = threading.Event()  # the run has ended without an error
        self.exiting = threading.Lock()  # held by the thread that exits the process
        if self.rank:  # only rank 0 prints
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            sys.stderr = sys.stdout

    def connect(self):
        """Set up the store, the watch thread, and a process group for tensors on the CPU. Signals end
        the process at once: a Python handler would wait for the end of a collective."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts the store
        self.store = self._client(START_S, hosts=self.rank == 0 and not hosted)
        self.store.set(f"alive {self.rank}", "0")
        everyone = [f"alive {rank}" for rank in range(self.size)]
        try:
            self.store.wait(everyone, timedelta(seconds=START_S))
        except dist.DistStoreError:
            missing = [rank for rank in range(self.size) if not self.store.check([f"alive {rank}"])]
            raise UserError(f"ranks {missing} of {self.size} did not start within {START_S:.0f} s") from None

        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

        # gloo prints a line to stdout, where --json must print one object and nothing else.
        stdout = os.dup(1)
        os.dup2(2, 1)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
            )
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        self.control = dist.group.WORLD

    def _client(self, seconds: float = 5.0, hosts: bool = False) -> dist.Store:
        """A connection to the store, with this timeout for each call.

        A waiting call blocks other threads on the same connection, so the watch thread has its own
        connection.
        """
        store = dist.TCPStore(
            self.host,
            self.port,
            self.size,
            hosts,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        return dist.PrefixStore(f"fastpath {restarts}", store)

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
        """End all ranks and exit, with this error or the one that is already in the store."""
        if self.rank:
            time.sleep(HEARTBEAT_S)  # if all ranks have the same error, rank 0 should report it
        reason = json.dumps([code, self.rank, text])
        with suppress(dist.DistError):  # the store has gone, so nobody can read the reason
            reason = self._client().compare_set("end", "", reason)
        self._exit(*json.loads(reason))

    def _exit(self, code: int, who: int, text: str):
        """Exit because of an error of rank `who`. Rank 0 prints it first; if rank 0 itself has died,
        the first rank of each machine does."""
        if not self.exiting.acquire(blocking=False):
            threading.Event().wait()  # the other thread is about to exit

        if text and (self.rank == 0 or (who == 0 and self.local_rank == 0)):
            name = f"{Path(sys.argv[0]).name}: error: "
            text = text.removeprefix(name)
            if who != self.rank:
                text = f"rank {who}: {text}"
            print(name + text, file=sys.__stderr__, flush=True)  # sys.stderr may be /dev/null

        with suppress(Exception):  # the store, or the reader of stdout, has gone
            sys.stdout.flush()
            store = self._client()
            if self.rank == 0:
                store.set("reported", "")
            else:
                store.wait(["reported"])  # torchrun ends all ranks as soon as one has exited
        os._exit(code or 1)

    def _watch(self):
        """Set this rank's heartbeat, and exit the process when the store holds a reason to. This is
        the work of the watch thread."""
        store = self._client()
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
                    store.compare_set("end", "", json.dumps([1, silent[0], text]))
                if store.check(["end"]):
                    self._exit(*json.loads(store.get("end")))
        except Exception as error:
            text = f"its store has gone, with torchrun or rank 0 ({first_line(error)})"
            self._exit(1, 0, text)
