"""The number of threads: on simulated machines, and with the bits of real steps under changes of the number."""

import random
import threading

import pytest
import torch
from cases import read_model

from cpu import threads
from cpu.threads import CpuTimes, ThreadCount, Threads, powers_of_two
from engine import Engine, EngineOptions, Request, generate
from formats import Quantization, quantize_model
from load import install_kernels
from report import others_text, threads_text
from sampling import SamplingParams


class Machine:
    """A simulated machine: `step` takes the time that `seconds(n, t)` says for n threads at time t."""

    def __init__(self, monkeypatch, counts, seconds, can_run=lambda n: None):
        self.now, self.seconds, self.random = 0.0, seconds, random.Random(5)
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now)
        self.counts = ThreadCount(counts, counts[-1], can_run)

    def run(self, until, work="decode"):
        """The steps until then, as (time of the start, number of threads, seconds)."""
        steps = []
        while self.now < until:
            n = self.counts.choose(work)
            seconds = self.seconds(n, self.now) * self.random.uniform(0.95, 1.05)
            steps.append((self.now, n, seconds))
            self.now += seconds
            self.counts.add(seconds)
        return steps


def rate(steps):
    return len(steps) / sum(seconds for *_, seconds in steps)


@pytest.mark.parametrize("most, scaling", [(2, 0.9), (5, 0.95), (16, 0.9), (64, 0.8)])
def test_on_an_idle_machine_most_threads_stay(monkeypatch, most, scaling):
    """Where more threads are always faster, looking for a better number costs at most 1 % and a few first steps."""
    machine = Machine(monkeypatch, powers_of_two(most), lambda n, t: 0.003 / n**scaling)
    machine.run(0.5)
    assert rate(machine.run(20)) > 0.98 * most**scaling / 0.003


def test_a_short_run_on_an_idle_machine_makes_no_trial(monkeypatch):
    """Its first steps are slow, so that a smaller number of threads might look better."""
    machine = Machine(monkeypatch, [1, 2], lambda n, t: 0.004 / n + 0.002 * (t < 0.02), can_run=lambda n: True)
    assert {n for _, n, _ in machine.run(0.2)} == {2}


@pytest.mark.parametrize("best", [1, 2, 4, 8, 16])
def test_the_best_number_is_found_from_any_number(monkeypatch, best):
    """Also between the extremes, for work that many threads only slow down."""
    machine = Machine(monkeypatch, powers_of_two(16), lambda n, t: 0.002 * max(n / best, best / n) ** 0.5)
    machine.run(10)
    assert rate(machine.run(40)) > 0.98 / 0.002


def test_a_busy_processor_and_its_end(monkeypatch):
    """From second 5 to 15 another program takes a processor: steps in two threads are then fast or very slow."""
    busy = lambda t: 5 < t < 15  # noqa: E731
    machine = Machine(
        monkeypatch,
        [1, 2],
        lambda n, t: 0.0045 if n == 1 else 0.03 if busy(t) and machine.random.random() < 0.6 else 0.0026,
        lambda n: n < (1.5 if busy(machine.now) else 2.5),
    )
    assert rate(machine.run(5)) > 0.97 / 0.0026
    machine.run(5.5)
    assert rate(machine.run(15)) > 0.95 / 0.0045  # 0.95 of one thread, which is the better number
    machine.run(16)
    assert rate(machine.run(30)) > 0.97 / 0.0026


def test_single_slow_steps_change_nothing(monkeypatch):
    """A step that hangs now and then, whatever the number of threads."""
    hangs = lambda: 0.5 if machine.random.random() < 0.002 else 0.0  # noqa: E731
    machine = Machine(monkeypatch, [1, 2], lambda n, t: 0.005 / n + hangs())
    steps = machine.run(60)
    assert sum(n == 2 for _, n, _ in steps) > 0.95 * len(steps)


def test_only_steps_of_the_same_work_are_compared(monkeypatch):
    """Steps of 8 rows take four times as long as those of one row; with both in turns, two threads stay best."""
    machine = Machine(monkeypatch, [1, 2], lambda n, t: work * 0.003 / n)
    for i in range(400):
        work = 4 if i % 2 else 1
        machine.run(machine.now + 0.05, work)
    assert machine.counts.count == 2
    machine.run(machine.now + 5, work)
    assert len(machine.counts.average_s) == 2
    machine.counts.choose(7)
    assert not machine.counts.average_s, "nothing is known of other work yet"


def test_long_passes_are_tried_with_fewer_threads_only_if_processors_are_taken(monkeypatch):
    """A trial of a prefill costs as much as a pass, so on an idle machine there is none for long."""
    idle = Machine(monkeypatch, [1, 2], lambda n, t: 0.5 / n, lambda n: True)
    assert {n for _, n, _ in idle.run(20)} == {2}
    taken = Machine(monkeypatch, [1, 2], lambda n, t: 0.5 if n == 1 else 0.9, lambda n: n < 2)
    taken.run(3)
    assert rate(taken.run(30)) > 0.95 / 0.5


def test_kinds_share_what_trials_may_cost(monkeypatch):
    """Steps of three kinds in turns: one thread is slower, and its first trials cost no more than with one kind."""
    seconds = {"verify 1": 0.004, "verify 2": 0.005, "verify 4": 0.007}
    spent, now = threads.Spent(), [0.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    counts = {kind: ThreadCount([1, 2], 2, spent=spent) for kind in seconds}
    lost = 0.0
    while now[0] < 0.8:
        for kind, count in counts.items():
            n = count.choose(1)
            took = seconds[kind] * 2 / n
            lost += took - seconds[kind]
            now[0] += took
            count.add(took)
    assert 0 < lost < 0.025


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_torchs_number_is_the_bound_and_comes_back(two_threads):
    found, inside = Threads(), []
    for most in (2, 3):
        torch.set_num_threads(most)
        for _ in range(20):
            with found.of("decode", 1):
                inside.append(torch.get_num_threads())
            assert torch.get_num_threads() == most
        assert max(inside) == most
    with pytest.raises(ValueError), found.of("decode", 1):
        raise ValueError
    assert torch.get_num_threads() == 3
    assert sum(found.used()["decode"].values()) == 20  # since the bound has changed


def test_fixed_numbers_stay(two_threads):
    with Threads(fixed=True).of("decode", 1):
        assert torch.get_num_threads() == 2
    found = Threads()
    for _ in range(50):
        with found.of("prefill", 1, fixed=True):
            assert torch.get_num_threads() == 2
    assert found.used() == {"prefill": {2: 50}}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [None, "int4"])
def test_bits_under_random_numbers_of_threads(tiny, two_threads, monkeypatch, mode, dtype):
    """The number changes between any two steps; tokens and their log-probabilities are those of one thread."""
    model = read_model(tiny("llama-gqa-biased")[2], dtype=dtype)
    model = install_kernels(quantize_model(model, Quantization(mode, 32, "int8")) if mode else model)
    draw, params = random.Random(3), SamplingParams(temperature=0.0)

    def run(choose):
        monkeypatch.setattr(ThreadCount, "choose", lambda self, work: choose())
        engine = Engine(model, 3, 96, options=EngineOptions(chunk_tokens=19))
        requests = [Request([5 + i, *range(7, 7 + n)], params, 23, logprobs=2) for i, n in enumerate((3, 40, 31, 18))]
        generate(engine, requests)
        return [(request.new_tokens, request.token_logprobs) for request in requests]

    expected = run(lambda: 1)
    assert all(run(lambda: draw.randint(1, 4)) == expected for _ in range(2))


def test_processor_time_of_others():
    """What other programs use is what all use less our own. Our own threads do not count."""
    before, end = CpuTimes.now(), threading.Event()
    worker = threading.Thread(target=lambda: [None for _ in iter(end.is_set, True)])
    worker.start()
    end.wait(0.4)
    end.set()
    worker.join()
    others = CpuTimes.now().others_since(before)
    assert before.all is None or 0 <= others <= threads.processors()
    for now, own_before, expected in (
        (CpuTimes(1.0, 10.0, 4.0), 3.5, 0.5),
        (CpuTimes(1.0, 10.0, 4.0), 2.0, 0),
        (CpuTimes(1.0, None, 4.0), 2.0, None),
        (CpuTimes(0.05, 10.0, 4.0), 2.0, None),  # too short
    ):
        assert now.others_since(CpuTimes(0.0, 9.0, own_before)) == expected


@pytest.mark.parametrize("set_by_user, given, expected", [(False, 1, 2), (True, 1, 1), (True, 7, 2)])
def test_a_rank_takes_its_share_of_the_processors(two_threads, monkeypatch, tmp_path, set_by_user, given, expected):
    environ = tmp_path / "environ"
    environ.write_bytes(b"A=1\0OMP_NUM_THREADS=1\0" if set_by_user else b"A=1\0XOMP_NUM_THREADS=1\0")
    monkeypatch.setattr(threads, "Path", lambda path: environ)
    monkeypatch.setattr(threads, "processors", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    torch.set_num_threads(given)
    threads.share_processors()
    assert torch.get_num_threads() == expected


# ---------------------------------------------------------------- quotas


@pytest.fixture
def system(monkeypatch, tmp_path):
    """A function that writes files of /proc and /sys, which are the only ones that cpu/threads.py then reads. The
    processors are 8, and torch has 8 threads."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    before = torch.get_num_threads()
    torch.set_num_threads(8)
    monkeypatch.setattr(threads, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(threads, "processors", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    yield write
    torch.set_num_threads(before)


def v2(lines="0::/", **quotas):
    """The files of version 2: the folder "a_b" stands for a/b, and "_" for the mount."""
    folders = {name: "/".join(["sys/fs/cgroup", *filter(None, name.split("_"))]) for name in quotas}
    return {"proc/self/cgroup": lines + "\n"} | {f"{folders[name]}/cpu.max": text for name, text in quotas.items()}


def v1(lines, **quotas):
    """The files of version 1: the quota and the period of the folders below sys/fs/cgroup."""
    files = {"proc/self/cgroup": lines + "\n"}
    for name, text in quotas.items():
        folder = "/".join(["sys/fs/cgroup", *name.split("_")]).replace("both", "cpu,cpuacct")
        quota, period = text.split()
        files |= {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}
    return files


CGROUPS = {
    "no cgroups": ({}, 8),
    "v2, in a container": (v2(_="50000 100000\n"), 0.5),
    "v2, no quota": (v2(_="max 100000\n"), 8),
    "v2, the parent has less": (v2("0::/a/b", a="150000 100000", a_b="400000 100000"), 1.5),
    "v2, the child has less": (v2("0::/a/b", a="400000 100000", a_b="75000 50000"), 1.5),
    "v1": (v1("4:memory:/m\n2:cpu:/x", cpu_x="250000 100000"), 2.5),
    "v1, no quota": (v1("2:cpu:/x", cpu="-1 100000", cpu_x="-1 100000"), 8),
    "v1, the parent has less": (v1("2:cpu:/x/y", cpu_x="100000 100000", cpu_x_y="-1 100000"), 1),
    "v1, with cpuacct": (v1("2:cpu,cpuacct:/x", both_x="100000 50000"), 2),
    "v1, another controller's path": (v1("2:cpu:/\n3:cpuset:/x", cpu_x="100000 100000"), 8),
    "v1 and v2": (v1("2:cpu:/x\n0::/x", cpu_x="300000 100000") | {"sys/fs/cgroup/unified/x/cpu.max": "2 1"}, 2),
    "v2, the path has a colon": (v2("0::/a:b", **{"a:b": "200000 100000"}), 2),
    "no period": (v2(_="100000 0"), 8),
    "a broken child": (v2("0::/a/b", a="300000 100000", a_b="?"), 3),
    "broken lines": (v2("0", _="100000 100000"), 8),
}


def test_waiting_for_disks_is_no_work(system):
    allowed = threads.os.sched_getaffinity(0)
    system({"proc/stat": "".join(f"cpu{i} 1 2 4 800 1600 8 16 32 64 128\n" for i in (*allowed, 99_999))})
    assert CpuTimes.now().all * threads.os.sysconf("SC_CLK_TCK") == pytest.approx(63 * len(allowed))


@pytest.mark.parametrize("name", CGROUPS)
def test_the_smallest_quota_of_the_cgroups_around_this_process_counts(system, name):
    files, expected = CGROUPS[name]
    system(files)
    assert threads.usable_processors() == expected


@pytest.mark.parametrize("quota, expected", [("max", 8), ("50000", 1), ("100000", 1), ("650000", 7), ("900000", 8)])
def test_the_number_of_threads_is_the_quota_rounded_up(system, monkeypatch, quota, expected):
    system(v2(_=f"{quota} 100000"))
    threads.share_processors()
    assert torch.get_num_threads() == expected
    torch.set_num_threads(5)
    threads.share_processors()
    assert torch.get_num_threads() == min(5, expected), "torch's own number is a bound"
    torch.set_num_threads(5)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    threads.share_processors()
    assert torch.get_num_threads() == 5


@pytest.mark.parametrize("quota, ranks, expected", [("300000", 2, 1), ("50000", 2, 1), ("600000", 2, 3), ("max", 3, 2)])
def test_ranks_share_the_quota(system, monkeypatch, quota, ranks, expected):
    """Together they have no more threads than the quota allows, except that each has one."""
    system(v2(_=f"{quota} 100000"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    system({f"proc/{threads.os.getppid()}/environ": "A=1\0"})
    threads.share_processors()
    assert torch.get_num_threads() == expected


class Throttled:
    """A simulated machine with a quota. In each 100 ms, all threads together may run for 100 ms times the quota; then
    they stop until the next 100 ms begin. A step takes 5 ms in one thread, and 0.55 of the time in twice as many."""

    def __init__(self, monkeypatch, quota):
        self.now, self.used, self.quota, self.left = 0.0, 0.0, quota, 0.1 * quota
        self.random = random.Random(5)
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(threads.time, "process_time", lambda: self.used)

    def step(self, n):
        seconds = 0.005 * n**-0.86 * self.random.uniform(0.97, 1.03)
        while seconds > 0:
            period_end = (self.now // 0.1 + 1) * 0.1 + 1e-9
            runs = min(seconds, self.left / n, period_end - self.now)
            seconds -= runs
            self.used += n * runs
            self.left -= n * runs
            self.now += runs
            if seconds > 0:
                self.now, self.left = period_end, 0.1 * self.quota

    def run(self, found, until):
        """The numbers of threads of the steps until then, and the steps per second."""
        numbers, start = [], self.now
        while self.now < until:
            with found.of("decode", 1):
                numbers.append(torch.get_num_threads())
                self.step(numbers[-1])
        return numbers, len(numbers) / (self.now - start)


@pytest.mark.parametrize("quota, best", [(0.5, 1), (1, 1), (1.5, 2), (2, 2), (3.5, 4)])
def test_throttling_is_noticed(system, monkeypatch, quota, best):
    """The user allows more threads than the quota, and no file says what other programs use. For 50 ms, more threads
    are faster; throttled, they are not."""
    system(v2(_=f"{int(quota * 100_000)} 100000"))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    machine, found = Throttled(monkeypatch, quota), Threads()
    machine.run(found, 3)
    numbers, speed = machine.run(found, 30)
    torch.set_num_threads(best)
    expected = Throttled(monkeypatch, quota).run(Threads(fixed=True), 30)[1]
    assert speed > 0.96 * expected
    assert sum(n == best for n in numbers) > 0.8 * len(numbers)  # twice as many need only 1.1 of the processor time


def test_the_number_follows_a_quota_that_changes(system, monkeypatch):
    machine = Throttled(monkeypatch, 8)
    system(v2(_="200000 100000"))
    threads.share_processors()
    found = Threads()
    assert max(machine.run(found, 3)[0]) == 2
    for quota, most in (("max", 8), ("50000", 1), ("350000", 4), ("max", 8)):
        system(v2(_=f"{quota} 100000"))
        machine.run(found, machine.now + 1.1)
        assert max(machine.run(found, machine.now + 5)[0]) == most
        with found.of("prefill", 1, fixed=True):
            assert torch.get_num_threads() == most


@pytest.mark.parametrize("variable, fixed", [("OMP_NUM_THREADS", False), ("A", True)])
def test_the_users_number_stays_when_the_quota_changes(system, monkeypatch, variable, fixed):
    """fixed: with --threads 4."""
    machine = Throttled(monkeypatch, 8)
    monkeypatch.setenv(variable, "4")
    torch.set_num_threads(4)
    system(v2(_="200000 100000"))
    found = Threads(fixed)
    for quota in ("200000", "max", "100000"):
        system(v2(_=f"{quota} 100000"))
        numbers, _ = machine.run(found, machine.now + 3)
        assert torch.get_num_threads() == 4
        assert not fixed or set(numbers) == {4}


def test_the_quota_is_read_about_once_a_second(system, monkeypatch):
    machine, reads = Throttled(monkeypatch, 8), []
    real = threads.usable_processors
    monkeypatch.setattr(threads, "usable_processors", lambda: reads.append(machine.now) or real())
    machine.run(Threads(), 10)
    assert 9 <= len(reads) <= 12


def test_the_report_in_words():
    assert threads_text({"prefill": {2: 1}, "decode": {2: 97, 1: 3}}) == "prefill 2, decode 2 (97%) or 1 (3%)"
    assert [others_text(cpus) for cpus in (None, 0.04, 1.26)] == ["", "", "; other programs used 1.3 processors"]


def test_trials_are_counted(two_threads):
    threads = Threads()
    for trying, trials in ((None, 0), (1, 1), (None, 1), (1, 2)):
        with threads.of("decode", 1):
            pass
        threads.kinds["decode"].trying = trying
        with threads.of("decode", 1):
            pass
        assert threads.trials == trials
        with threads.of("decode", 1, fixed=True):
            assert threads.trials == trials
        threads.kinds["decode"].trying = None
