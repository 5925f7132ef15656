"""How many threads compute a step on a CPU: chosen while running, because other programs come and go.

Threads that share a product wait for each other some hundred times a step. Where another program takes one of their
cores, each wait may last until the system lets the thread run again, and two threads are then many times slower than
one. The results do not depend on the number of threads, so it may change between any two steps.

Read down: ThreadCount, which finds the best number for one kind of work; Threads, which the engine puts around each
step; CpuTimes, which measures what other programs take.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

SHARE, GRACE_S = 0.01, 0.01  # trials may cost this share of all time, and so many seconds more
FAILED_S, LOOK_S = 1.0, 0.25  # from a trial that failed, and from any other look around, to the next
TRIAL_STEPS = 4
LONG_STEP_S = 0.05  # one step that takes so long is enough to judge by


@dataclass
class ThreadCount:
    """The number of threads for one kind of work: decode steps, or prefill passes.

    Most steps use `count`, the fastest number known. About once a second the next smaller or larger one of `counts` is
    tried for a few steps, and taken if it was faster. Only steps of equal `work` are compared: what they compute, say
    the number of rows and tokens. A step that grows slow, because another program has begun, brings the next trial
    forward. A larger number is rarely tried while other programs use the processors that it would need.
    """

    counts: list[int]  # that may be taken, ascending
    count: int
    can_run: Callable[[int], bool | None] = lambda n: None  # whether other programs leave us so many processors
    work: Hashable = None
    typical_s: dict[int, float] = field(default_factory=dict)  # of a step of this work, by number of threads
    usual_s: float = float("inf")  # the smallest that typical_s[count] has been since the last look
    steps: int = 0  # since work or count have changed
    trying: int | None = None
    trial_s: list[float] = field(default_factory=list)
    upwards: bool = False  # where the last trial looked
    next_look: float = 0.0
    skipped: int = 0  # looks since the last trial
    total_s: float = 0.0  # of all steps
    trials_s: float = 0.0  # lost by trials

    def choose(self, work: Hashable) -> int:
        """The number of threads for the next step."""
        if work != self.work:
            self.work, self.typical_s, self.trying = work, {}, None
            self._settle(self.count)
        if self.trying is None and len(self.counts) > 1 and self._is_known():
            self._look()
        return self.count if self.trying is None else self.trying

    def add(self, seconds: float):
        """What the step took that `choose` was asked for."""
        self.total_s += seconds
        if self.trying is not None:
            return self._add_trial(seconds)
        self.steps += 1
        if self.steps == 1 and seconds < LONG_STEP_S:
            return  # the first step finds cold caches and sleeping threads
        before = self.typical_s.get(self.count, seconds)
        typical = before + 0.15 * (min(seconds, 3 * before) - before)  # a few hitches shall not count for much
        self.typical_s[self.count], self.usual_s = typical, min(typical, self.usual_s)
        best = min(self.typical_s, key=self.typical_s.get)
        if self._is_known() and self.typical_s[best] < 0.9 * typical:
            self._settle(best)

    def _is_known(self) -> bool:
        return self.steps > 4 or self.steps * self.typical_s.get(self.count, 0.0) > LONG_STEP_S

    def _look(self):
        """Begin a trial of a neighbouring number, if it is time for one and it is worth its cost."""
        now, typical = time.perf_counter(), self.typical_s[self.count]
        if now < self.next_look and typical < 1.5 * self.usual_s:
            return
        at, self.next_look, self.usual_s = self.counts.index(self.count), now + LOOK_S, typical
        self.upwards = at == 0 or (not self.upwards and at + 1 < len(self.counts))
        other = self.counts[at + 1 if self.upwards else at - 1]
        left = GRACE_S + SHARE * self.total_s - self.trials_s  # what trials may still cost
        free = self.can_run(max(self.count, other))
        self.skipped += 1
        if self.upwards:
            worthwhile = free or (left > 0 and (free is None or self.skipped > 8))
        else:  # half of the threads may take twice the time
            worthwhile = left > (0.0 if free is False else typical)
        if worthwhile:
            self.trying, self.trial_s, self.skipped = other, [], 0

    def _add_trial(self, seconds: float):
        """Judge a trial by its steps: it ends with the first one that is much slower than usual."""
        usual = self.typical_s[self.count]
        self.trials_s += max(0.0, min(seconds, 8 * usual) - usual)  # of a hitch no more is the trial's fault
        self.trial_s.append(seconds)
        first = len(self.trial_s) == 1 and seconds < LONG_STEP_S  # which may have had to wake threads
        slow = seconds > (3 if first else 1.2) * usual
        if not slow and len(self.trial_s) <= TRIAL_STEPS and sum(self.trial_s) < LONG_STEP_S:
            return
        judged = self.trial_s[1:] or self.trial_s
        mean = sum(judged) / len(judged)
        self.typical_s[self.trying], other, self.trying = mean, self.trying, None
        if not slow and mean < 0.97 * usual:
            self._settle(other)
        else:
            self.next_look = time.perf_counter() + FAILED_S

    def _settle(self, count: int):
        self.count, self.steps, self.usual_s = count, 0, float("inf")


class Threads:
    """The number of threads of each step of an engine: `with threads.of("decode", work):` around it.

    The most that it takes is torch.get_num_threads(), and that is what it always takes if `fixed`.
    """

    def __init__(self, fixed: bool = False):
        self.fixed = fixed
        self.forget()

    def forget(self):
        """Start to measure anew, as after a compilation."""
        self.kinds: dict[str, ThreadCount] = {}
        self.most = torch.get_num_threads()
        self.steps: dict[str, Counter] = {}  # of each kind, by number of threads
        self.cpu_times, self.free = (
            CpuTimes.now(),
            float(self.most),
        )  # when last looked at; processors for us since then

    @contextmanager
    def of(self, kind: str, work: Hashable, fixed: bool = False):
        """fixed: this step takes the most, because its results depend on the number."""
        if torch.get_num_threads() != self.most:  # set by somebody else
            self.forget()
        fixed = fixed or self.fixed
        if kind not in self.kinds:
            self.kinds[kind] = ThreadCount(powers_of_two(self.most), self.most, self.can_run)
            self.steps[kind] = Counter()
        n, start = self.most if fixed else self.kinds[kind].choose(work), time.perf_counter()
        torch.set_num_threads(n)
        try:
            yield
        finally:
            torch.set_num_threads(self.most)
        self.steps[kind][n] += 1
        if not fixed:
            self.kinds[kind].add(time.perf_counter() - start)

    def used(self) -> dict[str, dict[int, int]]:
        """Steps of each kind by their number of threads, the most frequent number first."""
        return {kind: dict(steps.most_common()) for kind, steps in self.steps.items()}

    def can_run(self, n: int) -> bool | None:
        """Whether other programs have left about n processors to us lately; None if that is unknown."""
        now = CpuTimes.now()
        others = now.others_since(self.cpu_times)
        if others is not None:
            self.cpu_times, self.free = now, processors() - others
        return None if self.free is None else n < self.free + 0.5


def share_processors():
    """Of several ranks that torchrun has started on this machine, bound each to its share of the processors.

    torchrun sets OMP_NUM_THREADS to 1 if nobody has set it, which its own environment shows.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks < 2:
        return
    share, by_user = max(1, processors() // ranks), True
    with suppress(OSError):
        by_user = b"\0OMP_NUM_THREADS=" in b"\0" + Path(f"/proc/{os.getppid()}/environ").read_bytes()
    torch.set_num_threads(min(share, torch.get_num_threads()) if by_user else share)


def processors() -> int:
    """How many this program may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i < most)})


# ---------------------------------------------------------------- other programs


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of processor time at one moment: of all programs on the processors that this one may use, and its own."""

    wall: float
    all: float | None  # None where the system does not tell
    own: float

    @staticmethod
    def now() -> "CpuTimes":
        own, used = time.process_time(), None
        with suppress(OSError, AttributeError, ValueError, IndexError):
            allowed = {f"cpu{i}" for i in os.sched_getaffinity(0)}
            lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
            # user, nice, system, then idle and waiting for disks, then interrupts of two kinds and other machines
            ticks = [[int(x) for x in line[1:9]] for line in lines if line[0] in allowed]
            used = sum(sum(row) - row[3] - row[4] for row in ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
        return CpuTimes(time.perf_counter(), used, own)

    def others_since(self, before: "CpuTimes") -> float | None:
        """How many processors other programs have used on average since an earlier moment; None if that is unknown."""
        if self.all is None or before.all is None or self.wall - before.wall < 0.1:
            return None  # the system counts in hundredths of a second
        return max(0.0, self.all - before.all - (self.own - before.own)) / (self.wall - before.wall)
