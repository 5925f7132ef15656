"""What the benchmarks share: rounds and ratios, timing, running programs, tables and JSON files.

Absolute times vary on a machine that does other work, too. So the contestants take turns: every
contestant runs once in a round, and each round begins with another contestant. Two contestants are
compared by the ratio within each round, and the median over the rounds is reported. The spread is
the smallest and the largest of these ratios. A script that imports this file can import the
repository's programs.
"""

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from backend import synchronize
from checkpoint import CHECKPOINTS, is_ours
from cli import ArgumentParser, UserError, positive, print_status
from compile import compile_counts
from convert_hf_checkpoint import convert
from engine import Engine, Request, Timing, generate
from formats import Quantization
from load import open_checkpoint
from quantize import quantize_checkpoint
from sampling import SamplingParams
from sources.wheels import default_gguf

BF16 = torch.bfloat16
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
FORMATS = ("bf16", "int8", "int4")
WITH_FILE = (*FORMATS, "file")  # file: a GGUF file in its own format
DECODE = "decode_tokens_per_s"
PREFILL = "prefill_tokens_per_s"
RATES = (DECODE, PREFILL)
SAMPLES = 4  # --num_samples in each run of generate.py
START_S = 120.0  # a server that has not started within this time has failed


class Peer(NamedTuple):
    """A program that reads GGUF files. Of several settings, the best one counts."""

    prefix: str  # the first word of the options that name its programs
    settings: tuple[str, ...]  # options of its llama-bench
    batched: tuple[str, ...]  # options of its llama-batched-bench


IK_SETTINGS = ("-fa 0 -rtr 0", "-fa 0 -rtr 1", "-fa 1 -rtr 0", "-fa 1 -rtr 1")
IK_BATCHED = ("-no-fa", "-no-fa -rtr", "-fa on", "-fa on -rtr")
PEERS = {
    "llama.cpp": Peer("llama", ("-fa 0", "-fa 1"), ("-fa off", "-fa on")),
    "ik_llama.cpp": Peer("ik_llama", IK_SETTINGS, IK_BATCHED),
}

# ---------------------------------------------------------------- turns and ratios


def take_turns(contestants: dict[str, Callable], rounds: int, warm_up: int = 1) -> dict[str, list]:
    """The results of every contestant, one per round.

    Each round begins with another contestant. The results of warm-up rounds are dropped.
    """
    results = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(-warm_up, rounds):
        print_status("warm-up" if i < 0 else f"round {i + 1} of {rounds}")
        gc.collect()
        compiled = compile_counts()
        first = i % len(names)
        for name in names[first:] + names[:first]:
            result = contestants[name]()
            if i >= 0:
                results[name].append(result)
        if i >= 0 and compile_counts() != compiled:
            print_status("something was compiled in this round: its rates are too low")
    return results


def column(rounds: list[dict], key: str) -> list[float]:
    return [one[key] for one in rounds]


def medians(rounds: list[dict]) -> dict:
    """The median of each key over the rounds, and the rounds themselves."""
    return {key: median(column(rounds, key)) for key in rounds[0]} | {"rounds": rounds}


def ratio(name: str, ours: Sequence[float], others: Sequence[float]) -> dict:
    """The median of the ratios within the rounds, and as `name`_spread the smallest and largest."""
    ratios = [a / b for a, b in zip(ours, others)]
    return {name: median(ratios), f"{name}_spread": [min(ratios), max(ratios)]}


def rate_ratios(suffix: str, ours: list[dict], others: list[dict]) -> dict:
    """The ratios of both rates as decode`suffix` and prefill`suffix`, with their spreads."""
    decode = ratio(f"decode{suffix}", column(ours, DECODE), column(others, DECODE))
    return decode | ratio(f"prefill{suffix}", column(ours, PREFILL), column(others, PREFILL))


# ---------------------------------------------------------------- what is measured in this process


def in_a_row(works: Sequence[Callable]) -> Callable:
    """One function that calls all of these and frees each result before the next call."""

    def call_all():
        for work in works:
            work()

    return call_all


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


def time_decode(engine: Engine, context: int, steps: int) -> Timing:
    """Decode in all rows, greedily, after `context` positions with random states.

    A fresh cache would not do: pages that were never written are not read from memory.
    """
    for block in engine.model.blocks:
        for tensor in block.mixer.state.buffers():
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.fill_(context)  # the positions of recurrent states
    for row in engine.rows:
        row.tokens = [0] * context

    engine.reset_timing()
    prompt = [0] * (context + 1)
    generate(engine, [Request(prompt, GREEDY, steps + 1) for _ in engine.rows])
    return engine.timing


# ---------------------------------------------------------------- programs as processes of their own


def run_program(*command, with_stderr: bool = False) -> str:
    """Run a program and return its stdout, or both outputs. If it fails, raise a UserError with its stderr."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)  # killed on Ctrl-C
    if done.returncode:
        raise UserError(f"{shlex.join(done.args)} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout + with_stderr * done.stderr


def run_generate(tree: Path, flags: list, prompt: int, new: int, rows: int = 1, samples: int = SAMPLES) -> dict:
    """The JSON of a checkout's generate.py, greedy, after `prompt` tokens.

    The first prefill of a process also pays for memory that is touched for the first time, so the
    rate of prefill is that of the other samples.
    """
    command = [sys.executable, tree / "generate.py", "--num_samples", samples, "--batch_size", rows]
    command += ["--synthetic_prompt", prompt, "--max_new_tokens", new]
    command += ["--ignore_eos", "--temperature", 0, "--json", *flags]
    result = json.loads(run_program(*command))
    if result["recompiles"]:
        print_status(f"{result['recompiles']} graphs were compiled while it was measured: its rates are too low")

    tokens = rows * prompt
    later_s = samples * tokens / result[PREFILL] - result["time_to_first_token_s"]
    return result | {PREFILL: (samples - 1) * tokens / later_s}


def decode_and_prefill(args, source: str | None, format: str, flags: str, tree: Path = ROOT, rows: int = 1) -> dict:
    """Both rates of generate.py for a checkpoint in one format, with bytes and memory.

    Each rate is from a run of its own, except with --batched.
    """
    print_status(f"{format} {flags}")
    with_path = [*flags.split(), "--checkpoint_path", quantized(source, format)]
    new_tokens = args.new_tokens + 1  # prefill makes the first of them
    if getattr(args, "batched", False):
        decode = run_generate(tree, with_path, args.prompt_tokens, new_tokens, rows, samples=2)
        prefill = decode
    else:
        decode = run_generate(tree, with_path, 5, new_tokens, rows)
        prefill = run_generate(tree, with_path, args.prompt_tokens, 1, rows)
    return {
        DECODE: decode[DECODE],
        "weight_bytes_per_token": decode["weight_bytes_per_token"],
        "kv_bytes_per_token": decode["kv_bytes_per_token"],
        PREFILL: prefill[PREFILL],
        "compile_s": decode["compile_s"] + prefill["compile_s"],
        "peak_memory_bytes": max(decode["peak_memory_bytes"], prefill["peak_memory_bytes"]),
    }


def quantized(source: str | None, format: str) -> Path:
    """The directory of a model in bf16, or in int8 or int4 in groups of 32.

    It is written if it does not exist. With the format "file" it is the source itself, such as a
    GGUF file in its own format.
    """
    if format == "file":
        return Path(source or default_gguf())
    opened = open_checkpoint(source, dequantize=True)
    folder = CHECKPOINTS
    if opened.path.is_dir() and is_ours(opened.path):
        folder = opened.path.resolve().parent
    suffix = "" if format == "bf16" else f"-{format}-g32"
    out = folder / f"{opened.name}{suffix}"
    if out.exists():
        return out
    print_status(f"writing {out.name}")
    if format == "bf16":
        return convert(opened, out, BF16)
    quantize_checkpoint(opened, out, Quantization(format, 32, "int8"))
    return out


def format_of(path: Path) -> str:
    """The format in the name of a file or directory.

    For example, it is Q4_0 in MODEL.Q4_0.gguf and int4 in MODEL-int4-g32.
    """
    found = re.findall(r"[.-]((?:bf|f|i?q|int)\d\w*)", path.name.removesuffix(".gguf"), re.I)
    return found[-1] if found else "file"


def weight_bits(name: str) -> int | None:
    """The bits of a weight according to the last word of a contestant's name.

    For example, "transformers bf16" has 16 bits and "llama.cpp Q4_0" has 4.
    """
    match = re.match(r"[a-z]+(\d+)", name.split()[-1], re.I)
    return int(match[1]) if match else None


def run_llama_bench(args, program: str, gguf: Path, settings: Sequence[str]) -> dict[str, dict]:
    """Both rates of a peer's llama-bench for one row in each of its settings.

    A setting with which it fails is left out.
    """
    command = [program, "-m", gguf, "-p", args.prompt_tokens, "-n", args.new_tokens]
    command += ["-t", torch.get_num_threads(), "-r", 1, "-o", "json"]
    found = {}
    for setting in settings:
        print_status(f"{program} {gguf.name} {setting}")
        try:
            printed = run_program(*command, *setting.split())
            # ik_llama.cpp prints lines of its own in between.
            tests = json.loads(re.sub(r"^llm_.*$", "", printed, flags=re.M))
        except (UserError, ValueError) as error:
            print_status(f"left out: {str(error)[:300]}")
            continue
        found[setting] = {DECODE if test["n_gen"] else PREFILL: test["avg_ts"] for test in tests}
        found[setting]["build"] = tests[0]["build_commit"]
    return found


def run_batched_bench(args, program: str, gguf: Path, settings: Sequence[str]) -> dict[str, dict]:
    """Both rates of a peer's llama-batched-bench in each of its settings: all rows read prompts, then decode.

    A setting with which it fails is left out.
    """
    sizes = {"-npp": args.prompt_tokens, "-ntg": args.new_tokens, "-npl": args.rows}
    sizes["-c"] = args.rows * (args.prompt_tokens + args.new_tokens)
    command = [program, "-m", gguf, "-t", torch.get_num_threads(), *itertools.chain(*sizes.items())]
    found = {}
    for setting in settings:
        print_status(f"{program} {gguf.name} {setting}")
        try:
            printed = run_program(*command, *setting.split(), with_stderr=True)  # where ik_llama.cpp's table is
        except UserError as error:
            print_status(f"left out: {str(error)[-300:]}")
            continue
        # the columns are the prompt, the new tokens, rows and positions; seconds and rate of prefill, and of decode
        if line := re.search(rf"^\| *{args.prompt_tokens} \|.*$", printed, re.M):
            cells = line[0].strip("|").split("|")
            found[setting] = {PREFILL: float(cells[5]), DECODE: float(cells[7]), "build": None}
    return found


def keep_best_settings(rounds: dict[str, list]) -> dict[str, dict]:
    """Replace the results of each peer by its two rates, each in its best setting.

    The best setting has the highest median over the rounds. (The highest rate of each round would
    flatter a program that has many settings.) A peer without a setting that worked in every round
    is left out. Return these settings and the build of each peer.
    """
    about = {}
    for name in [name for name in rounds if name.split()[0] in PEERS]:
        mine = rounds.pop(name)
        settings = [setting for setting in mine[0] if all(setting in one for one in mine)]
        if not settings:
            print_status(f"{name} is left out: it had no setting that worked in every round")
            continue

        best = {rate: best_setting(mine, settings, rate) for rate in RATES}
        rounds[name] = [{rate: one[best[rate]][rate] for rate in RATES} for one in mine]
        about[name] = {"settings": best, "build": mine[0][settings[0]]["build"]}
    return about


def best_setting(rounds: list[dict], settings: list[str], rate: str) -> str:
    return max(settings, key=lambda setting: median(one[setting][rate] for one in rounds))


def peer_programs(args, kind: str) -> dict:
    """The programs of the peers that were named. kind: "bench" or "server"."""
    programs = {name: getattr(args, f"{peer.prefix}_{kind}") for name, peer in PEERS.items()}
    return {name: program for name, program in programs.items() if program}


def llama_benches(args, ggufs: Sequence[Path]) -> dict[str, Callable[[], dict]]:
    """The contestants "PEER FORMAT": the peers that were named, on these files.

    Their results are those of run_llama_bench, for `keep_best_settings`.
    """
    benches = {}
    for (name, program), path in itertools.product(peer_programs(args, "bench").items(), ggufs):
        found = shutil.which(program)
        if found is None:
            raise UserError(f"{program} is not a program")
        key = f"{name} {format_of(path)}"
        if key in benches:
            raise UserError(f"the names of two files say that they are in the same format: {path}")
        if args.batched:
            benches[key] = partial(run_batched_bench, args, found, path, PEERS[name].batched)
        else:
            benches[key] = partial(run_llama_bench, args, found, path, PEERS[name].settings)
    return benches


# ---------------------------------------------------------------- servers


@contextmanager
def server(command: list, log: Path, port: int):
    """Run a server on a port of this machine until the end of the block."""
    with log.open("w") as file:
        process = subprocess.Popen([*map(str, command)], stdout=file, stderr=file, stdin=subprocess.DEVNULL)

    try:
        end = time.monotonic() + START_S
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > end:
                printed = log.read_text(errors="replace").strip() or "nothing printed"
                raise UserError(f"{Path(command[0]).name} did not start: {printed.splitlines()[-1]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@contextmanager
def all_servers(args, directory: Path, out: Path, streams: int, length: int, options: Sequence = ()):
    """Run our server and those of the peers that were named until the end of the block.

    Each has rows for `streams` requests of `length` tokens, and none speculates. Yields the port of each server by its
    name.
    """
    programs = peer_programs(args, "server")
    if bool(programs) != (args.gguf is not None):
        raise UserError("a peer's server and --gguf belong together")

    ports = {}
    with ExitStack() as servers:

        def start(name: str, *command):
            ports[name] = free_port()
            log = out.with_suffix(f".{name}.log")
            servers.enter_context(server([*command, "--port", ports[name]], log, ports[name]))

        command = [sys.executable, ROOT / "serve.py", "--checkpoint_path", directory]
        command += ["--max_batch_size", streams, "--max_seq_length", length, "--draft", "none"]
        start("fastpath", *command, *options)
        for name, program in programs.items():
            command = [program.resolve(), "-m", args.gguf, "-t", torch.get_num_threads()]
            command += ["-np", streams, "-c", streams * length]
            start(name, *command, *shlex.split(getattr(args, f"{PEERS[name].prefix}_options")))
        yield ports

    for name in ports:
        out.with_suffix(f".{name}.log").unlink(missing_ok=True)


# ---------------------------------------------------------------- options, the table and the JSON file


def make_parser(description: str, counts: dict[str, int]) -> ArgumentParser:
    """A parser with --out, --checkpoint_path, and the script's own counts with their defaults."""
    parser = ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="the JSON file to write (benchmarks/results/PROGRAM_DEVICE.json)")
    add("--checkpoint_path", help="as for generate.py (SmolLM2-135M-Instruct)")
    for option, default in counts.items():
        add(option, type=positive, default=default, help=f"default: {default}")
    return parser


def add_bench_options(parser: ArgumentParser):
    add = parser.add_argument
    for name, peer in PEERS.items():
        add(f"--{peer.prefix}_bench", metavar="PROGRAM", help=f"{name}'s llama-bench")
    add("--gguf", nargs="+", type=Path, default=[], help="the model in files for the peers")


def add_server_options(parser: ArgumentParser):
    add = parser.add_argument
    add("--format", choices=WITH_FILE, default="int4", help="format of the weights; file: that of the source")
    for name, peer in PEERS.items():
        add(f"--{peer.prefix}_server", metavar="PROGRAM", type=Path, help=f"{name}'s llama-server")
        add(f"--{peer.prefix}_options", metavar="OPTIONS", default="", help="more options for it")
    add("--gguf", type=Path, help="the model in a file for the peers")


def print_table(rows: list[dict], columns: dict[str, str]):
    """Print a Markdown table. Missing values are left empty.

    columns: the keys of the rows to show, and the formats of their values.
    """

    def cell(value, spec: str) -> str:
        if value is None:
            return ""
        values = value if isinstance(value, list) else [value]
        return "-".join(format(one, spec) for one in values)

    lines = [list(columns)]
    lines += [[cell(row.get(key), spec) for key, spec in columns.items()] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    lines.insert(1, ["".ljust(width, "-") for width in widths])
    for line in lines:
        padded = [text.ljust(width) for text, width in zip(line, widths)]
        print("|", " | ".join(padded), "|")


def without_folders(argument: str) -> str:
    """An argument of the command line, without the folders of an absolute path.

    They would say nothing on other machines.
    """
    path = Path(argument)
    return path.name if path.is_absolute() else argument


def processor() -> str:
    """The processor's name, for example "AMD EPYC, family 25, model 17", which is a Zen 4."""
    text = Path("/proc/cpuinfo").read_text()
    found = [re.search(rf"^{field}\s*: (.*)$", text, re.M) for field in ("model name", "cpu family", "model")]
    if not all(found):
        return platform.machine()
    return "{}, family {}, model {}".format(*(one[1] for one in found))


def save(name: str, result: dict, out: Path | None, device: torch.device = CPU):
    """Write the result with date, machine, versions and command.

    The file is results/NAME_DEVICE.json unless `out` is given.
    """
    machine = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
    imported = [sys.modules[name] for name in ("torch", "transformers", "triton") if name in sys.modules]
    command = ["python", f"benchmarks/{name}.py", *map(without_folders, sys.argv[1:])]
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    about = {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
        "machine": machine,
        "versions": {module.__name__: module.__version__ for module in imported},
        "command": shlex.join(command),
    }

    out = out or ROOT / "benchmarks" / "results" / f"{name}_{device.type}.json"
    out.write_text(json.dumps(about | result, indent=1) + "\n")
    print_status(f"written to {out}")
