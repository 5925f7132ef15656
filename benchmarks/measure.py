"""What the benchmarks share: turns, ratios, an engine's rates, generate.py as a process, the machine, the JSON file.

Absolute times vary on a machine that does other work, too. So every contestant runs once in a round, each round begins
with another contestant, and two are compared by the median over the rounds of the ratio within a round. The smallest
and the largest of these ratios are its spread. A script that imports this file can import the repository's programs.
CUDA_VISIBLE_DEVICES="" hides the GPUs from all of them.
"""

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from cli import ArgumentParser, HelpFormatter, UserError, number, print_status
from engine import Engine, Request, generate
from linear import Quantization
from quantize import quantize_checkpoint
from report import Timing, compile_counts, synchronize
from sampling import SamplingParams

BF16, CPU, GREEDY = torch.bfloat16, torch.device("cpu"), SamplingParams(temperature=0.0)
FORMATS = ("bf16", "int8", "int4")
RATES = DECODE, PREFILL = "decode_tokens_per_s", "prefill_tokens_per_s"
SHORT_PROMPT = 5  # tokens before decode is measured

# ---------------------------------------------------------------- turns and ratios


def take_turns(contestants: dict[str, Callable], rounds: int, warm_up: int = 1) -> tuple[dict[str, list], dict]:
    """Call every contestant once per round, each round beginning with another one; warm-up rounds do not count.

    Returns the results of each contestant, one per round; and, by name, the error of those that raised a UserError,
    which are left out of all rounds. UserError if none is left.
    """
    results, left_out, names = {name: [] for name in contestants}, {}, list(contestants)
    for i in range(-warm_up, rounds):
        print_status(f"round {i + 1} of {rounds}" if i >= 0 else "warm-up")
        gc.collect()
        first = max(0, i) % len(names)
        for name in names[first:] + names[:first]:
            if name in left_out:
                continue
            before = compile_counts()
            try:
                result = contestants[name]()
            except UserError as error:
                left_out[name] = str(error)
                del results[name]
                print_status(f"{name} is left out: {error}")
                continue
            if i >= 0:
                results[name].append(result)
                if compile_counts() != before:
                    print_status(f"{name} was compiling in this round: its rates are too low")
    if not results:
        name, line = next(iter(left_out.items()))
        raise UserError(f"nothing ran to its end; {name}: {line}")
    return results, left_out


def ratio(name: str, ours: Sequence[float], others: Sequence[float]) -> dict:
    """The median of the ratios within the rounds as `name`, and the smallest and largest as `name`_spread."""
    ratios = [a / b for a, b in zip(ours, others)]
    return {name: median(ratios), f"{name}_spread": [min(ratios), max(ratios)]}


def column(rounds: list[dict], key: str) -> list[float]:
    return [one[key] for one in rounds]


def medians(rounds: list[dict]) -> dict:
    """The median of each key over the rounds, and the rounds themselves."""
    return {key: median(column(rounds, key)) for key in rounds[0]} | {"rounds": rounds}


def seconds(work: Callable, times: int = 1, device: torch.device = CPU) -> float:
    """The median of the seconds that work() takes, called `times` times in a row."""
    measured = []
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        measured.append(time.perf_counter() - start)
    return median(measured)


# ---------------------------------------------------------------- an engine's rates


def time_prompt(engine: Engine, prompt: list[int], new_tokens: int) -> Timing:
    """Run the prompt in all rows of the engine, greedily, with nothing reused from the cache."""
    engine.clear()
    return run_rows(engine, prompt, new_tokens)


def time_decode(engine: Engine, context: int, steps: int) -> Timing:
    """Decode after `context` positions that are not read first: the cache holds whatever it holds."""
    prompt = [0] * (context + 1)
    for row in engine.rows:
        row.tokens = prompt[:-1]
    return run_rows(engine, prompt, steps + 1)


def run_rows(engine: Engine, prompt: list[int], new_tokens: int) -> Timing:
    engine.timing = Timing()
    requests = [Request(list(prompt), GREEDY, new_tokens) for _ in engine.rows]
    generate(engine, requests)
    assert all(len(request.new_tokens) == new_tokens for request in requests), requests[0].error
    return engine.timing


def random_caches(engine: Engine):
    """Fill the caches with random numbers, which cost as much as any others."""
    for block in engine.model.blocks:
        block.attention.k_cache.normal_()
        block.attention.v_cache.normal_()


def synthetic_prompt(n: int, V: int) -> list[int]:
    """As generate.py --synthetic_prompt makes it."""
    return [(7 + 31 * i) % V for i in range(n)]


# ---------------------------------------------------------------- programs as processes of their own


def run_program(program: Path, *arguments, **environment: str) -> str:
    """What a program of this project prints on stdout; UserError with its last line if it fails."""
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)  # killed on Ctrl-C
    if done.returncode < 0:
        raise UserError(f"{program.name} was ended by signal {-done.returncode} (9: too little memory)")
    if done.returncode:
        line = (done.stderr.strip() or f"{program.name} failed ({done.returncode})").splitlines()[-1]
        raise UserError(line.removeprefix(f"{program.name}: error: "))
    return done.stdout


def run_generate(tree: Path, options: str, prompt: int, new: int, samples: int, rows: int = 1, **environment) -> dict:
    """The JSON of a checkout's generate.py, greedy, after `prompt` tokens.

    The first prefill of a process also pays for memory that is touched for the first time. So with several samples,
    the rate of prefill is that of all but the first.
    """
    arguments = ["--synthetic_prompt", prompt, "--max_new_tokens", new, "--num_samples", samples, "--batch_size", rows]
    arguments += ["--ignore_eos", "--temperature", "0", "--json", *shlex.split(options)]
    result = json.loads(run_program(tree / "generate.py", *arguments, **environment))
    made = min(len(sample["token_ids"]) for sample in result["samples"])
    if made < new:
        raise UserError(f"the model's context holds {made} tokens after {prompt}, not {new}; take fewer --new_tokens")
    if result["recompiles"]:
        print_status(f"{result['recompiles']} graphs were compiled while it was measured: its rates are too low")
    if samples > 1:
        tokens = rows * prompt
        later_s = samples * tokens / result[PREFILL] - result["time_to_first_token_s"]
        result[PREFILL] = (samples - 1) * tokens / later_s
    return result


def quantized(directory: Path, format: str) -> Path:
    """The checkpoint itself for bf16; else in groups of 32 with an int8 head, made beside it unless it is there."""
    out = directory if format == "bf16" else directory.with_name(f"{directory.name}-{format}-g32")
    if not out.exists():
        print_status(f"quantizing to {out.name}")
        quantize_checkpoint(directory, out, Quantization(format, 32, "int8"))
    return out


# ---------------------------------------------------------------- the machine and the JSON file


def read_rates(device: torch.device = CPU) -> dict[str, float]:
    """Bytes per second of plain sums, the best of several, over what lies in DRAM and over what lies in the caches."""
    rates = {}
    for name, size, times in (("dram", 2**28, 3), ("cache", 2**20, 300)):
        numbers = torch.ones(size // 8, dtype=torch.int64, device=device)
        rates[name] = size / min(seconds(numbers.sum, device=device) for _ in range(times))
    return rates


def about_run(device: torch.device = CPU) -> dict:
    """Date, machine, versions, command and read bandwidth, with which every JSON file begins."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    machine = {
        "cpu": next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    peers = ("transformers", "triton")  # where they are installed
    versions |= {d.name: d.version for d in importlib.metadata.distributions() if d.name in peers}
    command = shlex.join(["python", *map(without_home, sys.argv)])
    about = {"date": datetime.date.today().isoformat(), "machine": machine, "versions": versions, "command": command}
    return about | {"read_bytes_per_s": read_rates(device)}


def without_home(argument: str) -> str:
    """An argument with a path relative to the repository, or with its last name alone if it lies elsewhere."""
    flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value).expanduser()
    if path.is_absolute():
        path = path.resolve()
        value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return flag + equals + value


def save(result: dict, out: Path | None, name: str, device: torch.device = CPU):
    """Write the JSON, to results/NAME_DEVICE.json unless `out` is given."""
    out = out or ROOT / "benchmarks" / "results" / f"{name}_{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print_status(f"written to {out}")


# ---------------------------------------------------------------- the command line and the table

count = number(int, "at least 1", lambda n: n >= 1)
COUNTS = {
    "--rounds": "rounds that count",
    "--prompt_tokens": "tokens that prefill reads",
    "--new_tokens": "tokens to decode in each run",
}


class Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults, and the description as it is."""


def make_parser(description: str, checkpoint: bool = True, **counts: int) -> ArgumentParser:
    """A parser with the options that benchmarks share: --out, and those of COUNTS that a default is given for."""
    parser = ArgumentParser(description=description, formatter_class=Formatter)
    parser.add_argument("--out", type=json_file, help="the JSON; without it benchmarks/results/PROGRAM_DEVICE.json")
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=count, default=default, help=COUNTS[f"--{name}"])
    if checkpoint:
        parser.add_argument("--checkpoint_path", help="as for generate.py; without it SmolLM2-135M-Instruct")
    return parser


def json_file(text: str) -> Path:
    """An argparse type, so that a path that cannot be written is refused before anything is measured."""
    path = Path(text)
    if path.is_dir() or path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{path} must be a file that ends in .json")
    return path


def print_table(rows: list[dict], columns: dict[str, str]):
    """A Markdown table of these keys of the rows, each in its format; what a row does not have is left empty."""

    def cell(value, spec: str) -> str:
        if value is None:
            return ""
        return "-".join(format(one, spec) for one in value) if isinstance(value, list) else format(value, spec)

    lines = [list(columns), *([cell(row.get(key), spec) for key, spec in columns.items()] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("|", " | ".join(text.ljust(width) for text, width in zip(line, widths)), "|")
