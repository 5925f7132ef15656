"""What the benchmarks share: turns, ratios with their spread, an engine's rates, the machine, the JSON file, charts.

On a machine that does other work, too, absolute times are noise. So every contestant runs once in a round, each round
begins with another one, and two are compared by the median over the rounds of the ratio within a round; the least and
the greatest of these ratios are its spread. A script that imports this file can import the repository's programs.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from checkpoint import read_json
from cli import ArgumentParser, UserError, number, print_status
from engine import Engine, Request, generate
from linear import Quantization
from quantize import quantize_checkpoint
from report import Timing, compile_counts, synchronize
from sampling import SamplingParams

BF16, CPU, GREEDY = torch.bfloat16, torch.device("cpu"), SamplingParams(temperature=0.0)
FORMATS = ("bf16", "int8", "int4")
NO_CHART = "the chart needs matplotlib: pip install -r requirements-bench.txt"

# ---------------------------------------------------------------- turns and ratios


def take_turns(contestants: dict[str, Callable], rounds: int, warm_up: int = 1) -> tuple[dict[str, list], dict]:
    """Call every contestant once a round, each round beginning with another one; the warm-up rounds do not count.

    Returns what each returned in every round, and of those that raised a UserError, which are left out of all rounds,
    its line. UserError if nobody is left.
    """
    found, left_out, names = {name: [] for name in contestants}, {}, list(contestants)
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
                del found[name]
                print_status(f"{name} is left out: {error}")
                continue
            if i >= 0:
                found[name].append(result)
                if compile_counts() != before:
                    print_status(f"{name} was compiling in this round: its rates are too low")
    if not found:
        name, line = next(iter(left_out.items()))
        raise UserError(f"nothing ran to its end; {name}: {line}")
    return found, left_out


@dataclass(frozen=True)
class Ratio:
    """Of two contestants: the median of the rounds' own ratios, and the least and the greatest of these."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], others: Sequence[float]) -> "Ratio":
        each = [a / b for a, b in zip(ours, others)]
        return cls(median(each), min(each), max(each))

    def __str__(self):
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"

    def fields(self, name: str) -> dict:
        """For the JSON."""
        return {name: self.median, f"{name}_spread": [self.low, self.high]}


def seconds(work: Callable, times: int = 1, device: torch.device = CPU) -> float:
    """The median of the seconds that work() takes, called so many times in a row."""
    found = []
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found)


# ---------------------------------------------------------------- an engine's rates


def time_prompt(engine: Engine, prompt: list[int], new_tokens: int) -> Timing:
    """What the engine takes for this prompt in all its rows, read from the beginning; greedy."""
    engine.clear()
    return run_rows(engine, prompt, new_tokens)


def time_decode(engine: Engine, context: int, steps: int) -> Timing:
    """The same of decode steps after `context` positions that nobody has read: the cache holds whatever it holds."""
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
    """Fill the caches with random numbers, which cost what any others cost."""
    for block in engine.model.blocks:
        block.attention.k_cache.normal_()
        block.attention.v_cache.normal_()


def synthetic_prompt(n: int, V: int) -> list[int]:
    """As generate.py --synthetic_prompt makes it."""
    return [(7 + 31 * i) % V for i in range(n)]


# ---------------------------------------------------------------- generate.py as a process of its own


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
    """The JSON of a checkout's generate.py, greedy, after this many tokens of prompt.

    Its first prefill also pays for memory that is touched for the first time; the rate that is added here leaves the
    first sample out.
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
        later_s = samples * tokens / result["prefill_tokens_per_s"] - result["time_to_first_token_s"]
        result["warm_prefill_tokens_per_s"] = (samples - 1) * tokens / later_s
    return result


# ---------------------------------------------------------------- checkpoints


def quantized(directory: Path, format: str) -> Path:
    """The checkpoint itself for bf16, or in groups of 32 with an int8 head, made beside it where it is not there."""
    out = directory if format == "bf16" else directory.with_name(f"{directory.name}-{format}-g32")
    if not out.exists():
        print_status(f"quantizing to {out.name}")
        quantize_checkpoint(directory, out, Quantization(format, 32, "int8"))
    return out


# ---------------------------------------------------------------- the machine, the JSON file


def read_rates(device: torch.device = CPU) -> dict[str, float]:
    """Bytes a second of plain sums, the best of several: over what lies in DRAM and what lies in the caches."""
    found = {}
    for name, size, times in (("dram", 2**28, 3), ("cache", 2**20, 300)):
        numbers = torch.ones(size // 8, dtype=torch.int64, device=device)
        found[name] = size / min(seconds(numbers.sum, device=device) for _ in range(times))
    return found


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second, read plus written, of the best of 10 copies of `size` bytes within the device's memory."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(seconds(lambda: target.copy_(source), device=device) for _ in range(10))


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
    command = shlex.join(["python", *map(public, sys.argv)])
    about = {"date": datetime.date.today().isoformat(), "machine": machine, "versions": versions, "command": command}
    return about | {"read_bytes_per_s": read_rates(device)}


def public(argument: str) -> str:
    """An argument as the JSON may show it: a path is told from the repository on, or by its name alone."""
    flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value).expanduser()
    if path.is_absolute():
        path = path.resolve()
        value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return flag + equals + value


def save(result: dict, out: Path | None, name: str, device: torch.device = CPU, draw: Callable | None = None):
    """Write the JSON, to results/NAME_DEVICE.json unless `out` says where, and beside it what draw(result, path) draws,
    where matplotlib is installed."""
    out = out or ROOT / "benchmarks" / "results" / f"{name}_{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print_status(f"written to {out}")
    if draw is not None:
        try:
            draw(result, out.with_suffix(".png"))
        except UserError as error:
            print_status(f"{error}; then --draw {out} makes it")


def draw_again(path: Path, key: str, draw: Callable[[dict, Path], None]):
    """The chart of a JSON that this program has written, which then holds `key`."""
    result = read_json(path)
    if key not in result:
        raise UserError(f"{path} was not written by this program")
    draw(result, path.with_suffix(".png"))


# ---------------------------------------------------------------- command line

count = number(int, "at least 1", lambda n: n >= 1)


def make_parser(description: str, rounds: int | None, checkpoint: bool = True) -> ArgumentParser:
    """A parser with the options that the benchmarks share."""
    parser = ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=out_file, help="the JSON (benchmarks/results/PROGRAM_DEVICE.json)")
    if rounds is not None:
        parser.add_argument("--rounds", type=count, default=rounds, help=f"that count ({rounds})")
    if checkpoint:
        parser.add_argument("--checkpoint_path", help="whatever generate.py takes (SmolLM2-135M-Instruct)")
    return parser


def out_file(text: str) -> Path:
    """A path that can be a file, which is better told now than after the measurement."""
    path = Path(text)
    if path.is_dir() or path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{path} must be a file that ends in .json")
    return path


# ---------------------------------------------------------------- charts

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"  # of Okabe and Ito, safe for colour-blind eyes


@dataclass
class Panel:
    """Bars of one unit: for each name a value, what stands behind it, a colour, and perhaps a mark beyond it."""

    title: str
    values: list[float]
    labels: list[str]
    colours: list[str]
    marks: list[float | None] | None = None


def draw_bars(path: Path, title: str, names: list[str], panels: list[Panel], footnote: str):
    """Horizontal bars in panels side by side, the first name on top, into a PNG; UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(NO_CHART) from None
    figure = Figure(figsize=(9, 1.5 + 0.42 * len(names)), dpi=200, layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=11)
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        bars = axes.barh(names, panel.values, color=panel.colours, height=0.65)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # a mark
        axes.bar_label(bars, panel.labels, padding=4, fontsize=10, bbox=behind)
        marks = panel.marks or [None] * len(names)
        for y, mark in enumerate(marks):
            if mark is not None:
                axes.plot([mark, mark], [y - 0.42, y + 0.42], color="black", linewidth=1.5, linestyle=(0, (2, 1)))
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_xlim(0, 1.45 * max([*panel.values, *filter(None, marks)]))  # room for the labels
        axes.set_xticks([])  # the labels say more
        axes.tick_params(length=0, labelsize=10)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.invert_yaxis()  # all panels'
    figure.supxlabel(footnote, fontsize=8, color="0.35")
    figure.savefig(path, format="png")
