"""Lost wake-ups and steps that hang: made on purpose, in the barrier, in OpenMP's threads, in a server."""

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter

import pytest
from conftest import ROOT
from servers import LONG, running, wait_for

import watchdog
from cpu.build import find_compiler
from engine import Engine, Plan, Request, Timing

pytestmark = pytest.mark.slow

LIBC = ctypes.CDLL(None)
BARRIER_H = ROOT / "cpu" / "barrier.h"
needs_futexes = pytest.mark.skipif(watchdog.FUTEX_CALL is None, reason="not Linux on x86-64 or ARM")

# ---------------------------------------------------------------- the barrier

# Each thread writes the number of the round, and after the barrier reads what the others have written. In the barrier,
# syscall is replaced: it loses one wake-up of every LOSE.
BARRIER_TEST = r"""
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

static std::atomic<long> waits{0}, wakes{0}, unlimited{0};
static int lose;

static long lossy(long number, void* address, int operation, int value, const timespec* limit, void*, int) {
  if (operation == FUTEX_WAIT_PRIVATE) {
    waits++;
    unlimited += limit == nullptr || limit->tv_sec > 0;
  } else if (++wakes % lose == 0) {
    return 0;
  }
  return syscall(number, address, operation, value, limit, nullptr, 0);
}
#define syscall lossy
#include "barrier.h"

int main(int argc, char** argv) {
  const int threads = atoi(argv[1]);
  const long least = atol(argv[2]);
  lose = atoi(argv[3]);
  fastpath::Barrier barrier;
  std::vector<long> written(threads);
  std::atomic<long> wrong{0}, rounds{0};
  const auto run = [&](int thread) {
    for (long round = 1;; round++) {
      written[thread] = round;
      barrier.wait(threads);
      for (const long other : written) wrong += other != round;
      if (thread == 0) rounds = waits >= least ? -1 : round;  // -1: the end, which all threads see at the same time
      barrier.wait(threads);
      if (rounds < 0) return;
    }
  };
  std::vector<std::thread> all;
  for (int i = 0; i < threads; i++) all.emplace_back(run, i);
  for (auto& thread : all) thread.join();
  printf("wrong %ld unlimited %ld waits %ld wakes %ld\n", wrong.load(), unlimited.load(), waits.load(), wakes.load());
}
"""


@pytest.fixture(scope="module")
def barrier_test(tmp_path_factory):
    """The path of the compiled test. Its threads do not spin, so that they sleep at most barriers."""
    folder = tmp_path_factory.mktemp("barrier")
    text = BARRIER_H.read_text().replace("SPINS = 2000", "SPINS = 0")
    assert "SPINS = 0" in text
    (folder / "barrier.h").write_text(text)
    (folder / "test.cpp").write_text(BARRIER_TEST)
    command = [find_compiler(), "-std=c++20", "-O2", "test.cpp", "-o", "test", "-lpthread"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return folder / "test"


@pytest.mark.parametrize("threads, sleeps", [(2, 20000), (3, 20000), (7, 5000)])
def test_a_barrier_that_loses_wake_ups(barrier_test, threads, sleeps):
    """No thread passes it too early, none stays, and no sleep is without a time limit."""
    command = [barrier_test, str(threads), str(sleeps), "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3000)
    wrong, unlimited, waits, wakes = map(int, re.findall(r"\d+", done.stdout))
    assert wrong == unlimited == 0 and waits >= sleeps and wakes > 0


# ---------------------------------------------------------------- OpenMP's threads


@needs_futexes
def test_a_sleeping_thread_compares_its_futex_again():
    """A thread that waits as OpenMP's do, and whose wake-up is lost, goes on; one whose futex is unchanged stays."""
    values, ended = [ctypes.c_int(0), ctypes.c_int(0)], [threading.Event(), threading.Event()]

    def sleep(i):
        while values[i].value == 0:
            LIBC.syscall(int(watchdog.FUTEX_CALL), ctypes.byref(values[i]), 128, 0, None, None, 0)
        ended[i].set()

    before = signal.getsignal(watchdog.INTERRUPT)
    signal.signal(watchdog.INTERRUPT, signal.SIG_DFL)
    watchdog.watch(EngineStub())
    assert signal.getsignal(watchdog.INTERRUPT) is watchdog.ignore
    try:
        for i in range(2):
            threading.Thread(target=sleep, args=(i,), daemon=True).start()
        time.sleep(0.3)  # until both sleep
        values[1].value = 1
        assert not ended[1].wait(0.3)
        watchdog.recheck_futexes()
        assert ended[1].wait(30)
        assert not ended[0].wait(0.3)

        values[0].value = 1
        watchdog.recheck_futexes()
        assert ended[0].wait(30)
    finally:
        signal.signal(watchdog.INTERRUPT, before)


# Generates twice, and the second time the kernel wakes nobody where a program wants to wake all threads that sleep on
# a futex: futex(address, FUTEX_WAKE_PRIVATE, INT_MAX) returns 0 at once. OpenMP's threads sleep without spinning.
WITHOUT_WAKE_UPS = """
import ctypes, struct, sys
import watchdog
from engine import Request, generate
from load import ModelOptions, load_engine, open_checkpoint
from sampling import SamplingParams

watchdog.INTERVAL_S = 0.02
options = ModelOptions(threads=2, dtype="float32")
engine = load_engine(open_checkpoint(sys.argv[1]), options, rows=3, length=64)

def tokens():
    engine.clear()
    prompts = [range(2, 30), range(5, 12), range(3, 6)]
    requests = [Request(list(prompt), SamplingParams(temperature=0), max_new_tokens=6) for prompt in prompts]
    generate(engine, requests)
    return [request.new_tokens for request in requests]

def lose_wake_ups():
    load, equal, give = 0x20, 0x15, 0x06
    number, operation, count = 0, 24, 32  # offsets in struct seccomp_data
    program = [
        (load, 0, 0, number), (equal, 0, 5, int(watchdog.FUTEX_CALL)), (load, 0, 0, operation), (equal, 0, 3, 129),
        (load, 0, 0, count), (equal, 0, 1, 0x7FFFFFFF),
        (give, 0, 0, 0x00050000), (give, 0, 0, 0x7FFF0000),  # 0 without a call; the call
    ]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    seccomp = {"202": 317, "98": 277}[watchdog.FUTEX_CALL]
    if libc.syscall(seccomp, 1, 1, described) != 0:  # for all threads
        print("no seccomp")

before = tokens()
lose_wake_ups()
print(before == tokens(), len(before[0]))
"""


@needs_futexes
def test_the_same_tokens_though_every_wake_up_is_lost(checkpoints):
    """Without the watchdog, this would never end."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "0"}
    command = [sys.executable, "-c", WITHOUT_WAKE_UPS, checkpoints[None]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "6"], done.stderr


# ---------------------------------------------------------------- the report


class EngineStub:
    """What the watchdog sees of an engine."""

    def __init__(self, prefill_s=0.0, prefill_tokens=0, decode_s=0.0, decode_steps=0, chunk=0, decoding=0):
        self.timing = Timing(prefill_s, prefill_tokens, decode_s, 0, decode_steps)
        self.plan = Plan([], [], {0: chunk} if chunk else {}, list(range(decoding)))
        self.step_started = None


@pytest.mark.parametrize("limit_s, engine", [
    (30, EngineStub(decode_s=8.0, decode_steps=400, decoding=3)),
    (40, EngineStub(decode_s=8.0, decode_steps=20, decoding=3)),  # steps take 0.4 s
    (600, EngineStub(decode_s=8.0, decode_steps=400, chunk=9)),  # the first prefill
    (600, EngineStub(prefill_s=8.0, prefill_tokens=400, chunk=9, decoding=1)),  # the first decoding
    (306, EngineStub(1.0, 100, 1.0, 2, chunk=256, decoding=2)),  # a long prompt
])  # fmt: skip
def test_how_long_a_step_may_take(limit_s, engine):
    assert watchdog.longest_step(engine) == pytest.approx(limit_s)
    engine.plan = None  # it is being made, or other ranks are awaited
    assert watchdog.longest_step(engine) == float("inf")


@pytest.fixture
def engine(monkeypatch):
    """An engine that is looked after by an impatient watchdog, which ends with the test."""
    for name, value in (("INTERVAL_S", 0.02), ("ALARM_S", 0.2), ("ALARM_FACTOR", 10)):
        monkeypatch.setattr(watchdog, name, value)
    engines = [EngineStub(decode_s=0.005, decode_steps=5, decoding=1)]
    watcher = threading.Thread(target=watchdog.look_after, args=(lambda: engines[0] if engines else None,), daemon=True)
    watcher.start()
    yield engines[0]
    engines.clear()
    watcher.join(30)
    assert not watcher.is_alive()


def a_step_that_hangs(engine):
    engine.step_started = time.perf_counter()
    time.sleep(2)
    engine.step_started = None


def test_a_step_that_hangs_is_reported_once(engine, capsys):
    """Two steps hang in the same way. The report names the function that hangs."""
    time.sleep(0.5)  # no step is running: no alarm
    assert capsys.readouterr().err == ""
    a_step_that_hangs(engine)
    first = capsys.readouterr().err
    assert first.startswith("a step has been running for 0 s, far longer than others. All threads:")
    assert "in a_step_that_hangs" in first
    a_step_that_hangs(engine)
    assert capsys.readouterr().err == ""


def test_the_time_of_a_stopped_process_does_not_count(engine, capsys, monkeypatch):
    """The watchdog counts its looks, and makes none while the process is stopped."""
    looks = Counter()  # of each thread: watchers of earlier tests' engines may still run

    def sleep(seconds):
        looks[threading.get_ident()] += 1
        real_sleep(1.2 if looks[threading.get_ident()] == 3 else seconds)  # stopped at the third look

    real_sleep = time.sleep
    monkeypatch.setattr(watchdog, "ALARM_S", 1.0)  # longer than a busy machine may delay this thread
    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    engine.step_started = time.perf_counter()
    real_sleep(1.3)
    engine.step_started = None
    assert max(looks.values()) > 2 and capsys.readouterr().err == ""


def test_compiling_is_no_alarm(engine, capsys):
    """Nor is the step in which something was compiled, before it takes long itself."""
    scope = {}
    source = "def convert(inside):\n    inside()\n"
    exec(compile(source, "/x/site-packages/torch/_dynamo/convert_frame.py", "exec"), scope)
    engine.step_started = time.perf_counter()
    printed = []
    scope["convert"](lambda: printed.append((time.sleep(1), capsys.readouterr().err)))
    assert printed == [(None, "")]
    time.sleep(2)
    assert "a step has been running" in capsys.readouterr().err


def test_an_engine_goes_with_its_last_reference(tiny_model):
    """The watchdog does not keep it alive, and ends."""
    engine = Engine(tiny_model("llama-mha"), 2, 16)
    reference = weakref.ref(engine)
    before = set(threading.enumerate())
    watchdog.watch(engine)
    (watcher,) = set(threading.enumerate()) - before
    del engine
    gc.collect()
    watcher.join(30)
    assert reference() is None and not watcher.is_alive()


def test_an_engine_says_when_its_step_has_started(tiny_model):
    """During a step, on_token sees its start and its plan; afterwards, also after an error, no step is running."""
    engine = Engine(tiny_model("llama-mha"), 2, 16)
    seen = []

    def note(token):
        seen.append((engine.step_started, engine.plan))

    engine.add(Request([3, 4, 5, 6, 7], max_new_tokens=3, on_token=note))
    before = time.perf_counter()
    while engine.has_requests:
        engine.step()
        assert engine.step_started is None
    starts = [started for started, _ in seen]
    assert before < starts[0] < starts[1] < starts[2] < time.perf_counter()
    assert [(plan.chunk, plan.decoding) for _, plan in seen] == [({0: 5}, []), ({}, [0]), ({}, [0])]
    assert engine.plan is None

    engine.make_plan = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.step_started is None


# ---------------------------------------------------------------- a server

# Runs serve.py with a short limit. It prints the ids of the threads that Python does not know, such as OpenMP's.
IMPATIENT = """
import os, runpy, sys, threading
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
import serve, watchdog
watchdog.ALARM_S = 3
Shutdown = serve.Shutdown
def begin(seconds):
    known = {str(thread.native_id) for thread in threading.enumerate()}
    print("threads", *(set(os.listdir("/proc/self/task")) - known), flush=True)
    return Shutdown(seconds)
serve.Shutdown = begin
if __name__ == "__main__":
    from cli import run_command
    run_command(serve.main)
"""
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17


@pytest.mark.full
def test_a_server_one_of_whose_threads_stops(checkpoints, tmp_path, monkeypatch):
    """It says so once, with the stacks, and its health is bad until the thread goes on."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    options = ["--dtype", "float32", "--max_batch_size", 3, "--threads", 2]
    launcher = (sys.executable, "-c", IMPATIENT)
    with running(tmp_path / "log", "--checkpoint_path", checkpoints[None], *options, launcher=launcher) as server:
        ids = re.search(r"^threads (.*)$", server.log.read_text(), re.M)[1].split()
        body = LONG | {"max_tokens": 100}
        server.post("/v1/completions", body)
        assert server.metric("last_step_age_seconds") < 5
        for thread in map(int, ids):
            assert LIBC.ptrace(PTRACE_SEIZE, thread, None, None) == 0
            assert LIBC.ptrace(PTRACE_INTERRUPT, thread, None, None) == 0

        client = threading.Thread(target=server.request, args=("POST", "/v1/completions", body))
        client.start()
        wait_for(lambda: server.health() == (503, "broken"), "the health to be bad", 30)
        assert server.metric("last_step_age_seconds") > 5
        wait_for(lambda: "a step has been running for" in server.log.read_text(), "the report", 30)
        time.sleep(2)
        for thread in map(int, ids):
            os.waitpid(thread, 0x40000000)  # __WALL
            assert LIBC.ptrace(PTRACE_DETACH, thread, None, None) == 0
        wait_for(lambda: server.health() == (200, "ready"), "the engine to go on")
        client.join()
        text = server.log.read_text()
        assert text.count("a step has been running for") == text.count("until it does, /health answers 503") == 1
        assert re.search(r"File .*engine\.py\", line \d+, in step", text)


@pytest.mark.full
def test_many_sleeps_under_load(barrier_test):
    """10 million sleeps, while two programs take the processors, and the process is stopped again and again."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    barrier = subprocess.Popen([barrier_test, "2", "10000000", "1000000000"], stdout=subprocess.PIPE, text=True)
    try:
        while barrier.poll() is None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                barrier.send_signal(number)
                time.sleep(0.02 if number == signal.SIGSTOP else 1)
    finally:
        for process in (*busy, barrier):
            process.kill()
            process.wait()
    assert barrier.stdout.read().startswith("wrong 0 unlimited 0 ")


@pytest.mark.full
def test_kernels_whose_barrier_loses_wake_ups(tmp_path):
    """The default model's answer is the same, in a build that loses one wake-up of 100 and hardly spins."""
    kernels = tmp_path / "cpu"
    kernels.mkdir()
    for path in BARRIER_H.parent.glob("*.[hc]*"):
        (kernels / path.name).write_text(path.read_text())
    text = BARRIER_H.read_text().replace("SPINS = 2000", "SPINS = 10")
    lossy = "void wake_sleepers() { static std::atomic<int> n{0}; if (n++ % 100) "
    text = text.replace("void wake_sleepers() { ", lossy)
    assert lossy in text and "SPINS = 10" in text
    (kernels / "barrier.h").write_text(text)

    script = "import pathlib, sys, cpu.build, generate\nif sys.argv[1]: cpu.build.SOURCES = pathlib.Path(sys.argv[1])\n"
    script += "from cli import run_command\ndel sys.argv[1]\nrun_command(generate.main)"
    options = ["--prompt", "The sea", "--temperature", "0", "--max_new_tokens", "200"]
    answers = []
    for sources in ("", kernels):
        command = [sys.executable, "-c", script, sources, *options, "--threads", "2", "--quiet"]
        environment = os.environ | {"OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1] and len(answers[0]) > 200
