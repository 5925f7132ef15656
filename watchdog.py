"""Watches the engine's steps, in a thread: it helps a step that hangs, and reports it if that is in vain.

Read down: `watch`; `look_after`, its loop; how long a step may take; `recheck_futexes`.

The threads that compute a step sleep between its operations, each on a futex: a number that another
thread changes before it tells the kernel to wake the sleepers. If such a wake-up is lost, they sleep
for ever. This was seen once in many hundred runs (cpu/barrier.h names a possible cause). The kernels
of cpu/ sleep with a time limit, but torch's OpenMP threads do not. So once a step has been running for
a second or two, the sleeping threads are interrupted by a signal, every second. After it, the kernel
begins their system call again, and thereby compares the number again, so a thread whose wake-up was
lost goes on.

The watchdog needs Python's global interpreter lock (GIL). Operations release it, but not the C++ that
torch.compile generates: a thread that hangs there is neither helped nor reported.
"""

import ctypes
import os
import platform
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cli import print_status
from engine import Engine

INTERVAL_S = 1.0  # between two looks at the engine
ALARM_S = 30.0  # a step is reported if it takes longer than this,
ALARM_FACTOR = 100  # and this many times as long as such steps have taken so far
FIRST_ALARM_S = 600.0  # the same if there was no such step before
# A thread whose stack has one of these files compiles, which may take minutes.
COMPILERS = ("torch/_dynamo/convert_frame.py", "triton/compiler/compiler.py", "triton/runtime/autotuner.py")
# The numbers of two system calls; the first one as /proc writes it
FUTEX_CALL = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
TGKILL_CALL = {"x86_64": 234, "aarch64": 131}.get(platform.machine())
INTERRUPT = getattr(signal, "SIGURG", None)  # ignored by default, so that a late one does no harm


def watch(engine: Engine):
    """Look after an engine's steps until the engine is garbage-collected.

    Steps that hang are only reported, and not helped, if this is not Python's main thread, which alone
    can handle signals, or if the program handles the signal itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    unused = (signal.SIG_DFL, signal.SIG_IGN)
    if in_main_thread and INTERRUPT is not None and signal.getsignal(INTERRUPT) in unused:
        signal.signal(INTERRUPT, ignore)
        signal.siginterrupt(INTERRUPT, False)  # the kernel begins interrupted system calls again
    threading.Thread(target=look_after, args=(weakref.ref(engine),), daemon=True, name="watchdog").start()


def ignore(*_):
    """A signal handler. Signals without one (SIG_IGN) do not interrupt system calls."""


def look_after(reference: Callable[[], Engine | None]):
    """Look at the engine once in INTERVAL_S. reference: a weakref.ref to it."""
    last_step = None  # when the step that ran at the last look had started
    looks = 0  # that have seen this step, so that the time when the process was stopped does not count
    is_reported = False
    while (engine := reference()) is not None:
        started = engine.step_started
        limit_s = longest_step(engine)
        del engine  # this thread must not keep it alive

        looks = looks + 1 if started == last_step else 0
        last_step = started
        if started is not None and looks > 0:
            recheck_futexes()
            if any(map(compiles, sys._current_frames().values())):
                looks = 0
            if looks * INTERVAL_S > limit_s and not is_reported:
                is_reported = True
                report(looks * INTERVAL_S)
        time.sleep(INTERVAL_S)


# ---------------------------------------------------------------- how long a step may take


def longest_step(engine: Engine) -> float:
    """How many seconds the step that is running may take, by the average of earlier ones."""
    timing = engine.timing
    plan = engine.plan
    if plan is None:  # a step may wait long for other ranks
        return float("inf")
    usual_s = 0.0
    parts = [
        (sum(plan.chunk.values()), timing.prefill_s, timing.prefill_tokens),
        (1 if plan.decoding else 0, timing.decode_s, timing.decode_steps),
    ]
    for units, seconds, units_before in parts:
        if units and not units_before:
            return FIRST_ALARM_S
        if units:
            usual_s += units * seconds / units_before
    return max(ALARM_S, ALARM_FACTOR * usual_s)


def compiles(frame) -> bool:
    """Whether torch.compile or Triton compiles something in a thread, of which this is the innermost
    frame."""
    return any(one.f_code.co_filename.endswith(COMPILERS) for one, _ in traceback.walk_stack(frame))


def report(seconds: float):
    """Print what all threads are doing."""
    stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
    text = "\n".join(stacks)
    print_status(f"a step has been running for {seconds:.0f} s, far longer than others. All threads:\n{text}")


# ---------------------------------------------------------------- sleeping threads


def recheck_futexes():
    """Interrupt every thread of this process that sleeps on a futex, and thereby let it compare the
    futex's value again. If the value has not changed, the thread sleeps on: programs must expect
    that anyway. Does nothing without Linux's /proc, or if the program handles the signal itself."""
    if FUTEX_CALL is None or signal.getsignal(INTERRUPT) is not ignore:
        return
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread may have ended, and not every system has the file
            if (task / "syscall").read_text().split()[0] == FUTEX_CALL:
                ctypes.CDLL(None).syscall(TGKILL_CALL, os.getpid(), int(task.name), INTERRUPT)
