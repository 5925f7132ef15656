"""Tunes the number of CPU threads while the engine runs, because the load of other programs changes.

The threads of a step wait for each other at some hundred barriers. If another program occupies one
of their cores, a wait may last until the operating system schedules the late thread again: two
threads are then many times slower than one. What the CPU kernels compute does not depend on the
number of threads, so the number may change between any two steps. Steps whose results would depend
on it keep the largest number.

A cgroup's quota (docker run --cpus=1.5) limits the processor time of all threads together. A program
that has used it up is stopped until the next period of 100 ms. A few steps in many threads may end
before that, and seem to be fast. So a step counts as the longer of two times: the time that it took,
and the time in which the quota allows as much processor time as it used.

Read down: ThreadCount, which finds the fastest number of threads for one kind of step; Threads, the
context manager that the engine puts around each step; CpuTimes, which measures how much processor
time other programs use.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

# Trials of other numbers of threads may cost this share of the time of all steps, plus a constant
# number of seconds.
TRIAL_SHARE = 0.01
TRIAL_ALLOWANCE_S = 0.01
FAILED_TRIAL_PAUSE_S = 1.0  # after a trial that was not faster, no trial is considered for this long
PAUSE_S = 0.25  # the same after any other decision whether to start a trial
TRIAL_STEPS = 4  # steps that a trial measures, after a first step that may have had to wake threads
LONG_STEP_S = 0.05  # a step of this length needs no repetition to be a reliable measurement


@dataclass
class Spent:
    """The time that steps have taken. It limits the next trials."""

    total_s: float = 0.0  # all steps
    trials_s: float = 0.0  # the time lost by trials of slower numbers of threads


@dataclass
class ThreadCount:
    """The number of threads for one kind of step, such as decode steps or prefill passes.

    Most steps use `count`, the fastest number known so far. About once a second, a trial runs a few
    steps with the next smaller or larger number of `counts`, and `count` becomes that number if it
    was faster. Only steps with the same amount of work are compared. If steps become slower,
    because another program has started, the next trial starts sooner. A larger number is rarely
    tried while other programs use the processors that it needs.
    """

    counts: list[int]  # the numbers of threads to choose from, ascending
    count: int  # the current choice
    # can_run(n): whether n processors are free for this program; None if that is unknown.
    can_run: Callable[[int], bool | None] = lambda n: None
    spent: Spent = field(default_factory=Spent)  # may be shared with other kinds of steps
    work: Hashable = None  # the amount of work of the last step, such as (rows, tokens)
    # For each number of threads, the average seconds of a step with this amount of work.
    average_s: dict[int, float] = field(default_factory=dict)
    baseline_s: float = float("inf")  # smallest average_s[count] since a trial was last considered
    steps: int = 0  # steps since `work` or `count` changed
    trying: int | None = None  # the number of threads of the trial that is running
    trial_s: list[float] = field(default_factory=list)  # seconds of each step of the trial
    upwards: bool = False  # whether the trial considered last was of a larger number
    next_trial: float = 0.0  # no trial is considered before this time, unless steps become slower
    considered: int = 0  # how often a trial was considered since the last one

    def choose(self, work: Hashable) -> int:
        """The number of threads for the next step."""
        if work != self.work:
            self.work = work
            self.trying = None
            self.average_s = {}
            self._set_count(self.count)
        if self.trying is None and len(self.counts) > 1 and self._is_measured():
            self._consider_trial()
        return self.trying or self.count

    def add(self, seconds: float):
        """Record the time of a step that ran with the number of threads from `choose`."""
        self.spent.total_s += seconds
        if self.trying is not None:
            return self._add_trial(seconds)
        self.steps += 1
        if self.steps == 1 and seconds < LONG_STEP_S:
            return  # the first step is slower, with cold caches and sleeping threads

        before = self.average_s.get(self.count, seconds)
        limited = min(seconds, 3 * before)  # so that a few slow steps have little weight
        average = before + 0.15 * (limited - before)
        self.average_s[self.count] = average
        self.baseline_s = min(average, self.baseline_s)

        best = min(self.average_s, key=self.average_s.get)
        if self._is_measured() and self.average_s[best] < 0.9 * average:
            self._set_count(best)

    def _is_measured(self) -> bool:
        """Whether enough steps were measured for average_s[count] to be reliable."""
        return self.steps > 4 or self.steps * self.average_s.get(self.count, 0.0) > LONG_STEP_S

    def _consider_trial(self):
        """Start a trial of the next larger or smaller number, if one is due and worth its cost."""
        now = time.perf_counter()
        average = self.average_s[self.count]
        if now < self.next_trial and average < 1.5 * self.baseline_s:
            return
        self.next_trial = now + PAUSE_S
        self.baseline_s = average
        self.considered += 1

        index = self.counts.index(self.count)
        self.upwards = index == 0 or (not self.upwards and index + 1 < len(self.counts))
        other = self.counts[index + 1 if self.upwards else index - 1]
        free = self.can_run(max(self.count, other))

        budget_s = TRIAL_SHARE * self.spent.total_s - self.spent.trials_s  # left for trials
        if self.upwards or not free:  # a short run on an idle machine tries no smaller number
            budget_s += TRIAL_ALLOWANCE_S
        if self.upwards:
            worthwhile = free or (budget_s > 0 and (free is None or self.considered > 8))
        elif free is False:
            worthwhile = budget_s > 0
        else:
            worthwhile = budget_s > average  # with half of the threads, a step may take twice as long

        if worthwhile:
            self.trying = other
            self.considered = 0
            self.trial_s = []

    def _add_trial(self, seconds: float):
        """Record a step of a trial. A trial ends after a few steps, or when one is clearly slower."""
        average = self.average_s[self.count]
        lost = min(seconds, 8 * average) - average  # a longer delay has other causes
        self.spent.trials_s += max(0.0, lost)
        self.trial_s.append(seconds)

        first = len(self.trial_s) == 1 and seconds < LONG_STEP_S  # it may have had to wake threads
        slow = seconds > (3 if first else 1.2) * average
        if not slow and len(self.trial_s) <= TRIAL_STEPS and sum(self.trial_s) < LONG_STEP_S:
            return

        measured = self.trial_s[1:] or self.trial_s
        mean = sum(measured) / len(measured)
        self.average_s[self.trying] = mean
        if not slow and mean < 0.97 * average:
            self._set_count(self.trying)
        else:
            self.next_trial = time.perf_counter() + FAILED_TRIAL_PAUSE_S
        self.trying = None

    def _set_count(self, count: int):
        self.count = count
        self.steps = 0
        self.baseline_s = float("inf")


class Threads:
    """Sets the number of threads of each step of an engine: `with threads.of("decode", work):` runs
    the step.

    The largest number is torch.get_num_threads() outside of steps. It follows the quota. If `fixed`,
    every step uses that number, whatever the quota is.
    """

    def __init__(self, fixed: bool = False):
        self.fixed = fixed
        self.trials = 0  # steps so far that ran with a number of threads that was being tried
        self.usable = usable_processors()
        self.next_look = 0.0  # the quota is read again after this time
        self.forget()

    def forget(self):
        """Discard all measurements, for example after a compilation or when the largest number has
        changed."""
        self.kinds: dict[str, ThreadCount] = {}
        self.spent = Spent()
        self.most = torch.get_num_threads()
        self.steps: dict[str, Counter] = {}  # first word of the kind -> number of threads -> steps
        self.start = CpuTimes.now()  # the first measurement of processor time
        self.cpu_times = self.start  # the last measurement
        self.free = float(self.most)  # the processors that other programs had left to us by then

    @contextmanager
    def of(self, kind: str, work: Hashable, fixed: bool = False):
        """A context that runs one step of this kind with the number of threads that is fastest for
        this work.

        kind: a word, such as "decode". Steps whose times must not be compared have different kinds,
            such as "verify 4" and "verify 8".
        fixed: use the largest number, because the results of this step depend on the number of
            threads.
        """
        if time.perf_counter() > self.next_look and not self.fixed:
            self.next_look = time.perf_counter() + 1.0
            self.usable = follow_quota(self.usable)
        if torch.get_num_threads() != self.most:  # the program or the quota has changed it
            self.forget()
        if kind not in self.kinds:
            counts = powers_of_two(self.most)
            self.kinds[kind] = ThreadCount(counts, self.most, self.can_run, self.spent)
        tuned = self.kinds[kind]
        fixed = fixed or self.fixed

        n = self.most
        if not fixed:
            n = tuned.choose(work)
            self.trials += n != tuned.count
        start = time.perf_counter()
        cpu_start = time.process_time()
        torch.set_num_threads(n)
        try:
            yield
        finally:
            torch.set_num_threads(self.most)

        self.steps.setdefault(kind.partition(" ")[0], Counter())[n] += 1
        if not fixed:
            tuned.add(max(time.perf_counter() - start, (time.process_time() - cpu_start) / self.usable))

    def used(self) -> dict[str, dict[int, int]]:
        """How many steps ran with each number of threads, by the first word of their kind. The most
        frequent number comes first."""
        return {kind: dict(steps.most_common()) for kind, steps in self.steps.items()}

    def others(self) -> float | None:
        """How many processors other programs have used on average since `forget`; None if that is
        unknown."""
        return CpuTimes.now().others_since(self.start)

    def can_run(self, n: int) -> bool:
        """Whether other programs have recently left about n processors to this one, and the quota
        allows them. All processors count as free until this is measured."""
        now = CpuTimes.now()
        others = now.others_since(self.cpu_times)
        if others is not None:
            self.cpu_times = now
            self.free = processors() - others
        return n < min(self.free, self.usable) + 0.5


def share_processors():
    """Limit the number of threads to the processors that this process may use.

    If torchrun has started several ranks on this machine, this is the rank's share of them. torchrun
    sets OMP_NUM_THREADS=1 for its ranks if the user has not set it. Whether the user has set it is
    seen in the environment of the torchrun process, which is the parent of this one.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks < 2:
        follow_quota(processors())
        return
    share = max(1, int(usable_processors()))
    set_by_user = True
    with suppress(OSError):
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
        set_by_user = b"\0OMP_NUM_THREADS=" in b"\0" + environment
    if set_by_user:
        share = min(share, torch.get_num_threads())
    torch.set_num_threads(share)


def follow_quota(before: float) -> float:
    """If the usable processors are not as many as before, change the number of threads. Returns
    usable_processors().

    The number stays if OMP_NUM_THREADS is set. torchrun sets it for all ranks, whose number stays, too:
    they must change it in the same step, because the results of some steps depend on it.
    """
    usable = usable_processors()
    if usable != before and "OMP_NUM_THREADS" not in os.environ:
        # Torch may have begun with fewer threads than processors: one for each physical core.
        torch.set_num_threads(math.ceil(min(usable, torch.get_num_threads() + max(0.0, usable - before))))
    return usable


def usable_processors() -> float:
    """How many processors this process may use at a time, on average. It is a fraction if the quota of
    its cgroup, or of a cgroup around that, is less than processors(). Ranks share them equally.

    A line of /proc/self/cgroup is number:controllers:path. Version 2 of cgroups names no controllers,
    and is mounted at /sys/fs/cgroup, or at unified/ beside version 1. In a container, the path may be
    the host's path: then the limits are at the mount, which is one of the path's parents here.
    Source: the Linux kernel's cgroup-v2.rst and sched-bwc.rst.
    """
    limits = [float(processors())]
    with suppress(OSError, ValueError):
        mounts = [
            Path(f"/sys/fs/cgroup/{mount}/{path}")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            for _, controllers, path in [line.split(":", 2)]
            for mount in (controllers or "unified", *controllers.split(","))
            if not controllers or "cpu" in controllers.split(",")
        ]
        for folder in {parent for path in mounts for parent in (path, *path.parents)}:
            for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
                with suppress(OSError, ValueError, ZeroDivisionError):  # "max" is not a number
                    quota, period = " ".join((folder / name).read_text() for name in names).split()
                    limits.append(int(quota) / int(period))  # -1 / period without a quota
    return min(limit for limit in limits if limit > 0) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def processors() -> int:
    """The number of processors on which this program may run, whatever its quota is."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def powers_of_two(most: int) -> list[int]:
    """The powers of two below `most`, and `most`, ascending."""
    return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i < most)})


# ---------------------------------------------------------------- other programs


@dataclass(frozen=True)
class CpuTimes:
    """Processor time in seconds that was used up to one moment.

    The difference of two moments tells how many processors other programs have used in between.
    """

    wall: float  # wall-clock seconds
    # The time of all programs, on the processors that this program may use; None without a /proc.
    all: float | None
    own: float  # the time of this program

    @staticmethod
    def now() -> "CpuTimes":
        own = time.process_time()
        used = None
        with suppress(OSError, AttributeError, ValueError, IndexError):
            allowed = {f"cpu{i}" for i in os.sched_getaffinity(0)}
            lines = Path("/proc/stat").read_text().splitlines()
            rows = [line.split() for line in lines if line.startswith("cpu")]
            # The columns are user, nice, system, idle, iowait, irq, softirq, steal: all except
            # columns 3 and 4 are busy.
            ticks = [[int(x) for x in row[1:9]] for row in rows if row[0] in allowed]
            busy = sum(sum(row) - row[3] - row[4] for row in ticks)
            if ticks:
                used = busy / os.sysconf("SC_CLK_TCK")
        return CpuTimes(time.perf_counter(), used, own)

    def others_since(self, before: "CpuTimes") -> float | None:
        """How many processors other programs have used on average since an earlier moment; None if
        that is unknown."""
        wall = self.wall - before.wall
        if self.all is None or before.all is None or wall < 0.1:
            return None  # /proc/stat counts in hundredths of a second, too coarse for a shorter time
        others = self.all - before.all - (self.own - before.own)
        return max(0.0, others) / wall
