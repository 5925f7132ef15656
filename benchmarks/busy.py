"""Decode and prefill on a CPU that other programs also use: fixed numbers of threads, the engine's choice, the peers.

The other programs are --loops endless loops of Python, each on a processor of its own if there are
enough. In each round every contestant runs once, one after another, while the loops go on.
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

# A Python program that keeps one processor busy until its parent ends.
LOOP = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() > 1: pass"


@contextlib.contextmanager
def busy(loops: int):
    """Run this number of endless loops: on the last processor, on the one before it, and so on."""
    cpus = sorted(os.sched_getaffinity(0), reverse=True)
    chosen = [str(cpus[i % len(cpus)]) for i in range(loops)]
    programs = [subprocess.Popen([sys.executable, "-c", LOOP, cpu]) for cpu in chosen]
    try:
        time.sleep(0.5 if programs else 0)
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run_engine(args, engine: Engine, threads: int | None = None) -> dict:
    """Return the rates of an engine with up to this number of threads. Decoding lasts --seconds."""
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
            request = Request(prompt[:5], GREEDY, args.new_tokens)
            request.on_token = lambda _: time.perf_counter() > until
            generate(engine, [request])
    finally:
        torch.set_num_threads(most)

    timing = engine.timing
    return {
        DECODE: timing.decode_tokens / timing.decode_s,
        PREFILL: prefill.prefill_tokens / prefill.prefill_s,
        "steps": engine.threads.used()["decode"],
    }


def measure_case(args, fixed_engine: Engine, engine: Engine, loops: int) -> dict:
    """Run all contestants beside `loops` loops, and compare the engine's choice with the others."""
    numbers = powers_of_two(torch.get_num_threads())
    turns: dict[str, Callable] = {f"{n} threads": partial(run_engine, args, fixed_engine, n) for n in numbers}
    turns["chosen"] = partial(run_engine, args, engine)
    few_tokens = argparse.Namespace(**vars(args) | {"new_tokens": 16, "batched": False})
    turns |= measure.llama_benches(few_tokens, args.gguf)
    with busy(loops):
        rounds = measure.take_turns(turns, args.rounds, warm_up=0)

    case = {"loops": loops, "peers": measure.keep_best_settings(rounds)}
    for kind, rate in zip(("decode", "prefill"), RATES):
        chosen = column(rounds["chosen"], rate)
        fixed = [column(rounds[f"{n} threads"], rate) for n in numbers]
        case |= ratio(f"{kind}_to_best_fixed", chosen, max(fixed, key=median))
        for peer in case["peers"]:
            case |= ratio(f"{kind}_to_{peer}", chosen, column(rounds[peer], rate))
    return case | rounds


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
    measure.save("busy", {"format": args.format, "compiled": args.compile, "cases": cases}, args.out)


if __name__ == "__main__":
    run_command(main)
