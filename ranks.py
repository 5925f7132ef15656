"""The processes of one run, as torchrun starts them: they begin alike, keep together and end together.

Read down: `run_together`, which is checkpoint.run_command for all of them; Ranks, what one process knows of the others;
the watch, a thread that learns of an error or a death elsewhere and ends this process, whatever it is waiting for.
Knows nothing of models; how a model is split is in tp.py.

Rank 0 alone reads the command line and the prompt, asks the user and prints. How the others hear of an end:
  an error      whoever has it leaves a note in torchrun's store; rank 0 says what it is, and all leave
  a death       every rank leaves a sign of life in the store every half second; who sees none of another's for QUIET_S,
                or HURT_S after a broken connection, leaves the note
  Ctrl-C        torchrun passes it on to all; it ends them at once
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cli import UserError, first_line, run_command
from tp import Shard

TICK_S, QUIET_S, HURT_S = 0.5, 20.0, 4.0
START_S = 300.0  # until every rank has shown up: importing torch from a cold disk takes its time
PATIENCE = timedelta(days=7)  # of collectives: a user may think for long, and deaths are the watch's business


def run_together(main: Callable):
    """Run main(Ranks) in every rank and exit, all with one code: run_command's, or 1 for what it does not know."""
    ranks = Ranks()
    last_words = []
    try:
        run_command(lambda: ranks.run(main), last_words.append)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        if code:
            ranks.end(code, "\n".join(last_words))
    except Exception as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            ranks.wait_for_the_reason()
        ranks.end(1, traceback.format_exc())
    ranks.part()


class Ranks:
    """This process among the others."""

    def __init__(self):
        environment = {name: int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self.rank, self.size, self.local_rank = environment.values()
        self.host, self.port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
        self.hurt = False  # a connection broke: a silence means more then
        self.done, self.telling = threading.Event(), threading.Lock()
        if self.rank:  # what they have to say they say through rank 0
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def connect(self):
        """Meet the others: the store, the watch, and a process group for tensors on the CPU."""
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun; else by rank 0
        self.store = self._client(START_S, hosts=self.rank == 0 and not hosted)
        self.store.set(f"alive {self.rank}", "0")
        try:
            self.store.wait([f"alive {rank}" for rank in range(self.size)], timedelta(seconds=START_S))
        except dist.DistStoreError:
            missing = [rank for rank in range(self.size) if not self.store.check([f"alive {rank}"])]
            raise UserError(f"of {self.size} ranks {missing} did not start within {START_S:.0f} s") from None
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()
        shown = os.dup(1)  # gloo greets on stdout, where --json has one object and nothing else
        os.dup2(2, 1)
        try:
            group = dist.PrefixStore("group", self.store)
            dist.init_process_group("gloo", store=group, rank=self.rank, world_size=self.size, timeout=PATIENCE)
        finally:
            os.dup2(shown, 1)
            os.close(shown)
        self.control = dist.group.WORLD

    def _client(self, seconds: float = 5.0, hosts: bool = False) -> dist.Store:
        """A connection to the store, which waits so long for anything. One that waits keeps other threads out, so the
        watch has its own."""
        options = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False, "multi_tenant": True}
        store = dist.TCPStore(self.host, self.port, self.size, hosts, **options)
        return dist.PrefixStore(f"fastpath {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def run(self, main: Callable):
        """main(self) among the others. Signals end it at once: handlers of Python's wait for a collective to return."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.connect()
        return main(self)

    def shard(self, device: torch.device) -> Shard:
        """This rank's part of a model on its device."""
        dist.barrier(self.control)  # all have seen by now that there is memory for it
        group = self.control
        if device.type == "cuda":
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl", timeout=PATIENCE)
        return Shard.of(group, self.control)

    def portion(self, device: torch.device) -> float:
        """How much of the model is on this device, which on CPU all ranks of a machine share."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
        return here / self.size

    def device(self, name: str | None) -> str | None:
        """--device for this rank: each GPU of a machine has one."""
        if name is None and not torch.cuda.is_available():
            return "cpu"
        if name in (None, "cuda"):
            return f"cuda:{self.local_rank}"
        if name != "cpu":
            raise UserError(f"--device {name} cannot be shared by {self.size} ranks: give cuda (a GPU each) or cpu")
        return name

    # ------------------------------------------------------------ keeping together

    def share(self, work: Callable = lambda: None):
        """What work() returns on rank 0, which alone does it."""
        box = [work() if self.rank == 0 else None]
        dist.broadcast_object_list(box, group_src=0, group=self.control)
        return box[0]

    def collect(self, value) -> list:
        """Everybody's values, by rank."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def in_turn(self, work: Callable):
        """What work() returns: the first rank of every machine does it before the others, which find it done."""
        result = work() if self.local_rank == 0 else None
        dist.barrier(self.control)
        return work() if self.local_rank else result

    def check_same(self, directory: Path):
        """UserError where a rank's checkpoint directory has another config.json or other weight files than rank 0's."""
        files = sorted((path.name, path.stat().st_size) for path in directory.glob("*.safetensors*"))
        digest = hashlib.sha256((directory / "config.json").read_bytes() + repr(files).encode()).hexdigest()
        digests = self.collect(digest)
        if other := [rank for rank, found in enumerate(digests) if found != digests[0]]:
            raise UserError(
                f"{directory} of rank {other[0]} is not rank 0's: config.json, or the names or sizes of the "
                "*.safetensors files differ; copy one to all machines"
            )

    # ------------------------------------------------------------ ending together

    def part(self):
        """The good end. Exits at once: what C++ tears down after Python's end has been seen to abort."""
        try:
            dist.barrier(self.control)
            self.done.set()
            self.watch.join()
            dist.barrier(self.control)  # the store may be rank 0's: it goes after everybody's watch
            dist.destroy_process_group()
        except Exception:
            self.wait_for_the_reason()
            self.end(1, traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def wait_for_the_reason(self):
        """A connection broke: somebody else ended, and the watch will find out who, and end us."""
        self.hurt = True
        self.watch.join(QUIET_S)  # no more of it, if it has ended itself

    def end(self, code: int, text: str):
        """End all ranks, for this reason if there is no other yet, and leave."""
        if self.rank:
            time.sleep(TICK_S)  # an error that all have is better told by rank 0 as its own
        note = json.dumps([code, self.rank, text])
        try:
            note = self._client().compare_set("end", "", note)
        except dist.DistError:  # nobody will read it
            pass
        self._leave(*json.loads(note))

    def _leave(self, code: int, who: int, text: str):
        if not self.telling.acquire(blocking=False):
            threading.Event().wait()  # the other thread is about to exit
        lowest = self.rank == 0 or (who == 0 and self.local_rank == 0)  # if rank 0 itself is dead
        if text and lowest:
            name = f"{Path(sys.argv[0]).name}: error: "
            text = name + f"rank {who}: " * (who != self.rank) + text.removeprefix(name)
            print(text, file=sys.__stderr__, flush=True)  # the real one
        try:
            sys.stdout.flush()
            store = self._client()
            if self.rank == 0:
                store.set("told", "")
            else:
                store.wait(["told"])  # torchrun ends all as soon as one has left
        except Exception:  # a store or a reader that is gone
            pass
        os._exit(code or 1)

    def _watch(self):
        store = self._client()
        others = [rank for rank in range(self.size) if rank != self.rank]
        signs, since = {}, dict.fromkeys(others, 0.0)
        try:
            for tick in range(1 << 60):
                if self.done.wait(TICK_S):
                    return
                store.set(f"alive {self.rank}", str(tick))
                found = store.multi_get([f"alive {rank}" for rank in others])
                for rank, sign in zip(others, found):  # in ticks of our own: a machine may have slept
                    since[rank] = since[rank] + TICK_S if signs.get(rank) == sign else 0.0
                    signs[rank] = sign
                if silent := [rank for rank in others if since[rank] >= (HURT_S if self.hurt else QUIET_S)]:
                    text = f"ended without a word (no sign of rank {', '.join(map(str, silent))} any more)"
                    store.compare_set("end", "", json.dumps([1, silent[0], text]))
                if store.check(["end"]):
                    self._leave(*json.loads(store.get("end")))
        except Exception as error:
            self._leave(1, 0, f"its store has gone, with torchrun or rank 0 ({first_line(error)})")
