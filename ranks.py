"""The processes (ranks) that torchrun has started for one run: their start-up, synchronization and
shutdown.

Read `run_together` first. Only rank 0 reads the command line and the prompts and prints. If one
rank ends, all ranks end:
  an error   the rank with the error notes it in torchrun's store and prints it, and all ranks exit
  a crash    every rank sets a heartbeat in the store twice a second. A rank that sees no new
             heartbeat of another rank for TIMEOUT_S, or for BROKEN_TIMEOUT_S after a connection
             broke, reports this as an error
  Ctrl-C     torchrun passes the signal on to all ranks, which exit at once
tp.py says how a model is split over the ranks.
"""

import itertools
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
