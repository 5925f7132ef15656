"""Watches the engine's steps, in a thread: a step that hangs is helped or reported.

Read down: `watch`; `look_after`, its loop; how long a step may take; `recheck_futexes`.

The threads that compute a step sleep between its operations, each on a futex: a number that another
thread changes before it tells the kernel to wake the sleepers. If such a wake-up is lost, they sleep
for ever. It was seen once in many hundred runs, and the cause is not known. The kernels of cpu/ sleep
with a time limit, but torch's OpenMP threads do not. So if a step takes longer than a second, the
sleeping threads are interrupted: the kernel then compares the number again, and a thread whose
wake-up was lost goes on.
"""

import ctypes
import faulthandler
import os
import platform
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cli import print_status
from engine import Engine, Timing

INTERVAL_S = 1.0  # between two looks at the engine
ALARM_S = 30.0  # a step is reported if it takes longer than this,
ALARM_FACTOR = 100  # and this many times as long as such steps have taken so far
# A thread in one of these files compiles, which may take minutes.
COMPILERS = ("torch/_dynamo/convert_frame.py", "triton/compiler/compiler.py", "triton/runtime/autotuner.py")
FUTEX_CALL = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())  # the number of the system call
TGKILL_CALL = {"x86_64": 234, "aarch64": 131}.get(platform.machine())
INTERRUPT = signal.SIGURG  # which is ignored by default, so that a late one does no harm


def watch(engine: Engine):
    """Look after an engine's steps until the engine is garbage-collected. If this is not Python's main
    thread, which alone can handle signals, steps that hang are only reported."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(INTERRUPT) == signal.SIG_DFL:
        signal.signal(INTERRUPT, ignore)
        signal.siginterrupt(INTERRUPT, False)  # system calls go on after it
    threading.Thread(target=look_after, args=(weakref.ref(engine),), daemon=True, name="watchdog").start()


def ignore(*_):
    """A signal handler. Unlike SIG_IGN, it lets the signal interrupt system calls."""


def look_after(reference: Callable[[], Engine | None]):
    """Look at the engine once in INTERVAL_S. reference: a weakref.ref to it."""
    last_step = None  # when the step that ran at the last look had started
    is_reported = False
    while (engine := reference()) is not None:
        started = engine.step_started
        usual_s = usual_seconds(engine.timing, engine.plan)
        del engine  # this thread must not keep it alive

        if started is not None and started == last_step:
            recheck_futexes()
            seconds = time.perf_counter() - started
            if not is_reported and is_alarming(seconds, usual_s):
                is_reported = True
                report(seconds, usual_s)
        last_step = started
        time.sleep(INTERVAL_S)


# ---------------------------------------------------------------- how long a step may take


def usual_seconds(timing: Timing, plan) -> float | None:
    """How long a step with this plan (an engine.Plan) should take, by the average of earlier ones;
    None if there were none."""
    seconds = 0.0
    if plan.chunk:
        if not timing.prefill_tokens:
            return None
        seconds += timing.prefill_s / timing.prefill_tokens * sum(plan.chunk.values())
    if plan.decoding:
        if not timing.decode_steps:
            return None
        seconds += timing.decode_s / timing.decode_steps
    return seconds


def is_alarming(seconds: float, usual_s: float | None) -> bool:
    if usual_s is None or seconds < max(ALARM_S, ALARM_FACTOR * usual_s):
        return False
    return not any(compiles(frame) for frame in sys._current_frames().values())


def compiles(frame) -> bool:
    """Whether torch.compile or Triton compiles something in a thread, of which this is the innermost
    frame."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(COMPILERS):
            return True
        frame = frame.f_back
    return False


def report(seconds: float, usual_s: float):
    """Print what all threads are doing."""
    usually = f"such steps have taken {usual_s:.3g} s on average"
    print_status(f"a step has been running for {seconds:.0f} s; {usually}. The stacks of all threads:")
    with suppress(OSError, ValueError):  # stderr may be closed
        faulthandler.dump_traceback(file=2, all_threads=True)


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
                interrupt(int(task.name))


def interrupt(thread: int):
    """Send INTERRUPT to a thread of this process. thread: the system's id of it."""
    ctypes.CDLL(None).syscall(TGKILL_CALL, os.getpid(), thread, INTERRUPT)
