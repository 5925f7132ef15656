"""Decode and prefill on a CPU that other programs use, too: fixed numbers of threads, the engine's choice, the peers.

The other programs are --loops endless loops of Python, each on a processor of its own if there are enough. In each
round every contestant runs once, one after another, while the loops go on. At the end one request decodes while a loop
on one processor ends: recovery_s is the time until all steps have as many threads as on the idle machine again.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import measure
import torch
from measure import DECODE, GREEDY, PREFILL, RATES, column, ratio

from cli import run_command
from compile import compiled_steps
from cpu.threads import powers_of_two, processors
from engine import Engine, EngineOptions, Request, generate
from load import load_model


@contextlib.contextmanager
def busy(loops: int):
    """Runs this number of endless loops, on the last processor, on the one before it, and so on, in turn."""
    cpus = sorted(os.sched_getaffinity(0), reverse=True)
    code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() > 1: pass"
    programs = [subprocess.Popen([sys.executable, "-c", code, str(cpus[i % len(cpus)])]) for i in range(loops)]
    try:
        time.sleep(0.5 if loops else 0)
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run_engine(args, engine: Engine, threads: int | None = None) -> dict:
    """Rates of an engine with up to this number of threads. Decoding lasts --seconds."""
    most = torch.get_num_threads()
    torch.set_num_threads(threads or most)
    engine.reset_timing()
    engine.threads.forget()
    prompt = [5 + i % 100 for i in range(args.prompt_tokens)]
    try:
        for _ in range(3):
            engine.clear()
            generate(engine, [Request(prompt, GREEDY, 0)])
        prefill = engine.timing
        engine.reset_timing()
        until = time.perf_counter() + args.seconds
        while time.perf_counter() < until:
            request = Request(prompt[:5], GREEDY, args.new_tokens, on_token=lambda _: time.perf_counter() > until)
            generate(engine, [request])
    finally:
        torch.set_num_threads(most)
    timing = engine.timing
    found = {DECODE: timing.decode_tokens / timing.decode_s, PREFILL: prefill.prefill_tokens / prefill.prefill_s}
    return found | {"steps": engine.threads.used()["decode"]}


def measure_case(args, fixed_engine: Engine, engine: Engine, loops: int) -> dict:
    """All contestants while `loops` loops run, and the ratios of the engine's choice to the others."""
    numbers = powers_of_two(torch.get_num_threads())
    turns: dict[str, Callable] = {f"{n} threads": partial(run_engine, args, fixed_engine, n) for n in numbers}
    turns["chosen"] = partial(run_engine, args, engine)
    few_tokens = argparse.Namespace(**vars(args) | {"new_tokens": 16})
    peers = measure.llama_benches(few_tokens, args.gguf)
    with busy(loops):
        rounds = measure.take_turns(turns | peers, args.rounds, warm_up=0)
    case = {"loops": loops, "peers": measure.keep_best_settings(rounds)}
    for kind, rate in zip(("decode", "prefill"), RATES):
        fixed = [column(rounds[f"{n} threads"], rate) for n in numbers]
        case |= ratio(f"{kind}_to_best_fixed", column(rounds["chosen"], rate), max(fixed, key=median))
        for peer in case["peers"]:
            case |= ratio(f"{kind}_to_{peer}", column(rounds["chosen"], rate), column(rounds[peer], rate))
    return case | rounds


def recovery_s(engine: Engine) -> float:
    """Seconds from the end of another program to the last step that had fewer threads than on an idle machine."""
    engine.threads.forget()
    steps, end = [], None
    with busy(1) as programs:
        engine.add(Request([5, 6, 7], GREEDY, 10**6))
        start = time.perf_counter()
        while end is None or time.perf_counter() < end + 5:
            if end is None and time.perf_counter() > start + 3:
                programs[0].kill()
                end = time.perf_counter()
            engine.step()
            if not engine.has_requests:  # the cache is full
                engine.add(Request([5, 6, 7], GREEDY, 10**6))
            kinds = engine.threads.kinds
            steps.append((time.perf_counter(), kinds["decode"].count if "decode" in kinds else None))
    for request in [row.request for row in engine.rows if row.request is not None]:
        engine.cancel(request)
    engine.step()
    most = torch.get_num_threads()
    return max((at - end for at, n in steps if at > end and n != most), default=0.0)


def main():
    counts = {"--rounds": 3, "--prompt_tokens": 512, "--new_tokens": 300, "--seconds": 3}
    parser = measure.make_parser(__doc__, counts)
    add = parser.add_argument
    loops = [0, 1, 2 * processors()]
    add("--loops", nargs="+", type=int, default=loops, help="numbers of other programs (0, 1, and two per processor)")
    add("--format", choices=measure.WITH_FILE, default="int4", help="format of the weights (int4)")
    add("--compile", action="store_true", help="compile the decode step")
    measure.add_bench_options(parser)
    args = parser.parse_args()
    model = load_model(measure.quantized(args.checkpoint_path, args.format))
    steps = compiled_steps(args.compile, False)
    fixed_engine = Engine(model, 1, 1024, steps, options=EngineOptions(fixed_threads=True))
    engine = Engine(model, 1, 1024, steps)  # uses the same caches, at other times
    generate(engine, [Request([5, 6, 7], GREEDY, 8)])  # compiles
    cases = [measure_case(args, fixed_engine, engine, loops) for loops in args.loops]
    measure.print_table(cases, {"loops": ""} | {key: ".2f" for key in cases[0] if "_to_" in key})
    recovery = [recovery_s(engine) for _ in range(args.rounds)]
    print("full speed again after", ", ".join(f"{seconds:.2f}" for seconds in recovery), "s")
    about = {"format": args.format, "compiled": args.compile, "recovery_s": recovery, "cases": cases}
    measure.save("busy", about, args.out)


if __name__ == "__main__":
    run_command(main)
