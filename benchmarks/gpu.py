"""All that needs a GPU, in ten minutes: the kernels' tests, tuning, and times beside torch's own.

    python benchmarks/gpu.py [--minutes 10] [--out JSON] [--write_page]
    python benchmarks/gpu.py --smoke        # without a GPU: tiny sizes in Triton's interpreter

Each part is a process of its own. What fails in it, even by a crash, is reported, and the others go
on. What a part leaves of its time, the next ones get. The JSON file is written after each part.

environment the GPU, and what it can do: bytes per second of a copy (read plus written), FLOPs per
            second of a large product in bfloat16
tests       the kernels' tests. If one fails, the output of pytest is kept beside the JSON file
tuning      the tiles of each product. The fastest are stored where the kernels look for them. A
            second run tries more, because Triton keeps what was compiled
kernels     attention of one token over 1k to 128k live positions of a cache of 131072, and of a
            prompt (torch: SDPA over the live positions); all products of the models for 1, 4 and
            16 rows (torch: the same layer, compiled)
models      decode steps of one row at 0, 8k and 32k positions, and prefill, of models with random
            weights; then decode steps without our kernels

A share is bytes (of weights and of live keys and values) or FLOPs per second divided by what the GPU
can do. The time of a kernel is the median of replays of a CUDA graph of calls on copies of the
weights or caches, which are four times as large as the L2 cache: all data comes from memory.
"""

import argparse
import copy
import gc
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

START = time.time()
SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import measure
import torch
from measure import BF16, GREEDY, ROOT
from torch.nn.functional import scaled_dot_product_attention as SDPA

try:
    import triton.language as tl
    from triton.testing import do_bench_cudagraph
except ModuleNotFoundError:
    sys.exit("gpu.py: error: triton is missing: it comes with PyTorch for CUDA, and with requirements-dev.txt")

import kernels_triton as kt
from cli import UserError, and_more, first_line, print_status, printable, run_command
from compile import compiled_steps
from config import Config
from costs import roofline, weight_bytes
from engine import Engine, Request, generate
from formats import Quantization, QuantizedLinear, swap
from kernels import KERNELS
from layers import MatrixLayer
from load import install_kernels
from model import Transformer

DEVICE = torch.device("cpu" if SMOKE else "cuda")
SHARES = {"environment": 2, "tests": 5, "tuning": 4, "kernels": 3, "models": 6}  # of the time
TESTS = ["tests/test_kernels_triton.py", "tests/test_sampling.py::test_triton_draws_what_the_reference_draws"]
PAGE = ROOT / "docs" / "gpus.md"
MARKS = ("<!-- measured -->", "<!-- end of what was measured -->")
CONFIGS = {  # layers  H  K   E    D     F      V      context
    "Llama-3.2-1B": Config(16, 32, 8, 64, 2048, 8192, 128256, 131072, 1e-5, tied_embeddings=True),
    "Llama-3.1-8B": Config(32, 32, 8, 128, 4096, 14336, 128256, 131072, 1e-5),
    "tiny": Config(2, 6, 3, 10, 44, 76, 131, 64, 1e-5),
}
SIZES = {
    "models": (("Llama-3.1-8B", "bf16"), ("Llama-3.1-8B", "int8"), ("Llama-3.1-8B", "int4"), ("Llama-3.2-1B", "bf16")),
    "contexts": (0, 8192, 32768), "prompt": 2048, "steps": 100, "rounds": 3, "copy": 2**31, "square": 8192,
    "heads": (32, 8, 128), "cache": 131072 + 8, "rows": (1, 4, 16),  # heads: H, K, E
    "decode": (1024, 8192, 32768, 131072), "prefill": (2048, 8192, 32768),
}  # fmt: skip
# A warp has 16 or 32 outputs: one or two operands of the tensor cores.
BLOCKS_AND_WARPS = ((16, 1), (32, 2), (32, 1), (64, 4), (64, 2), (128, 8), (128, 4))
SPACE = [
    {"BLOCK_N": block, "SPLIT_K": cuts, "num_warps": warps, "num_stages": stages}
    for (block, warps), cuts, stages in itertools.product(BLOCKS_AND_WARPS, (1, 2, 4, 8), (3, 4, 6))
]
if SMOKE:
    SIZES = {
        "models": (("tiny", "int4"),), "contexts": (0, 40), "prompt": 17, "steps": 1, "rounds": 1, "copy": 2**20,
        "square": 64, "heads": (4, 2, 16), "cache": 136, "rows": (1, 3), "decode": (70,), "prefill": (40,),
    }  # fmt: skip
    SPACE = SPACE[::40]
    kt.SPLITS = tl.constexpr(4)  # 64 programs that are mostly idle take seconds


def seconds(calls: list[Callable]) -> float:
    """The time of one of these calls, which do the same work on different memory."""
    all_calls = measure.in_a_row(calls)
    if SMOKE:
        return measure.seconds(all_calls) / len(calls)
    return do_bench_cudagraph(all_calls, return_mode="median") / 1e3 / len(calls)


def copies(size: int) -> int:
    """How many copies of `size` bytes are together four times as large as the L2 cache."""
    if SMOKE:
        return 1
    return max(2, -(-4 * torch.cuda.get_device_properties(DEVICE).L2_cache_size // size))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16)


def fill(tensors):
    """Fill tensors with random numbers so small that nothing overflows."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.normal_(0, 0.01)
        else:
            tensor.random_()


def empty_model(config: Config, format: str) -> Transformer:
    """A model on the meta device, in bf16 or quantized in groups of 32 with an int8 head."""
    with torch.device("meta"):
        model = Transformer(config).to(BF16)
    if format != "bf16":
        swap(model, Quantization(format, 32, "int8").scheme)
    return model


def measure_device() -> Iterator[dict]:
    yield {"cuda": torch.version.cuda}
    source = torch.ones(SIZES["copy"], dtype=torch.uint8, device=DEVICE)
    yield {"bytes_per_s": 2 * source.nbytes / seconds([partial(torch.empty_like(source).copy_, source)])}
    x = randn(SIZES["square"], SIZES["square"])
    yield {"flops_per_s": 2 * len(x) ** 3 / seconds([partial(torch.matmul, x, x)])}
    if not SMOKE:
        properties = torch.cuda.get_device_properties(DEVICE)
        yield {"multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory}
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        yield {"driver": subprocess.run(command, capture_output=True, text=True).stdout.strip()}


# ---------------------------------------------------------------- products


def all_products() -> dict[str, MatrixLayer]:
    """The different matrices of the models, on the meta device, by name."""
    found = {}
    for name, format in SIZES["models"]:
        model = empty_model(replace(CONFIGS[name], n_layer=1, tied_embeddings=False), format)
        for kind, layer in zip(("qkv", "out", "gate_up", "down", "head"), [*model.blocks[0].linears, model.output]):
            found[f"{layer.stored_as or 'bf16'} {kind} {layer.in_features}x{layer.out_features}"] = layer
    return found


def random_layers(empty: MatrixLayer) -> tuple[list[MatrixLayer], int]:
    """As many layers of random numbers as `copies` says, and the bytes of one."""
    layers = []
    size = sum(tensor.nbytes for tensor in empty.state_dict().values())
    for _ in range(copies(size)):
        layers.append(copy.deepcopy(empty).to_empty(device=DEVICE))
        fill(layers[-1].state_dict().values())
    return layers, size


def our_calls(layers: list[MatrixLayer], x: torch.Tensor, gated: bool) -> list[Callable]:
    if isinstance(layers[0], QuantizedLinear):
        layers = [kt.PackedLinear(layer) for layer in layers]
    return [partial(kt.apply_linear, layer, x, gated=gated) for layer in layers]


def time_product(empty: MatrixLayer, gated: bool, M: int) -> Iterator[dict]:
    """gated: ours with SwiGLU, as a model has it; torch's without."""
    layers, size = random_layers(empty)
    x = randn(M, empty.in_features)
    yield {"bytes": size, "s": seconds(our_calls(layers, x, gated))}

    def multiply(layer, x):
        return layer(x)

    torch.compiler.reset()
    if not SMOKE:  # on a CPU compiling takes too long
        multiply = torch.compile(multiply, dynamic=False)
    yield {"torch_s": seconds([partial(multiply, layer, x) for layer in layers])}


def tuning(until: float) -> dict[str, Callable]:
    products = all_products()
    left = itertools.count(len(products), -1)
    return {name: partial(tune, products[name], "gate_up" in name, until, n) for name, n in zip(products, left)}


def tune(empty: MatrixLayer, gated: bool, until: float, left: int) -> Iterator[dict]:
    """Store the fastest tiles of SPACE for one row. The kernels use them for all numbers of rows up to 16.

    The tiles of the fixed rule are tried first, and then those that differ from them least, until this product's
    part of the time is over; `left` products share it. (Products of the same format share compiled kernels, so
    the later ones try more tiles.)
    """
    stop = time.time() + (until - time.time()) / (left + 1)
    calls = our_calls(random_layers(empty)[0], randn(1, empty.in_features), gated)
    layer = calls[0].args[0]
    bits, groupsize, _ = kt.storage_of(layer)
    N = layer.out_features // 2 if gated else layer.out_features
    C = layer.in_features
    rule = kt.default_tiles(bits, N, C, kt.multiprocessors(DEVICE))
    space = [rule] + sorted(SPACE, key=lambda tiles: sum(tiles[name] != rule[name] for name in rule))
    times = []
    for tiles in space:
        if times and time.time() > stop:
            break
        with mock.patch.object(kt, "choose_tiles", lambda *shape, tiles=tiles: tiles):
            try:
                times.append(seconds(calls))
            except Exception as error:  # for instance, if these tiles need more shared memory than there is
                print_status(f"{tiles}: {first_line(error)}")
                times.append(float("inf"))

    if min(times) == float("inf"):
        raise RuntimeError("no tiles work")
    best = space[times.index(min(times))]
    key = kt.tile_key(bits, groupsize, N, C, gated)
    path = kt.tuning_file(DEVICE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kt.tuned_tiles(DEVICE) | {key: best}, indent=1))
    kt.tuned_tiles.cache_clear()
    yield {"key": key, "tiles": best, "tried": len(times), "best_s": min(times), "rule_s": times[0]}


# ---------------------------------------------------------------- kernels


def kernels(until: float) -> dict[str, Callable]:
    works = {f"attention, decode at {T}": partial(time_attention, 1, T) for T in SIZES["decode"]}
    works |= {f"attention, prefill of {S}": partial(time_attention, S, S) for S in SIZES["prefill"]}
    for M, (name, layer) in itertools.product(SIZES["rows"], all_products().items()):
        works[f"{name}, {M} rows"] = partial(time_product, layer, "gate_up" in name, M)
    return works


def time_attention(S: int, T: int) -> Iterator[dict]:
    """Attention of S tokens, the last of T positions."""
    H, K, E = SIZES["heads"]
    slots = SIZES["cache"] if S == 1 else S + 8
    q = randn(1, S, H, E)
    input_pos = torch.arange(T - S, T, device=DEVICE)[None]
    size = 4 * T * K * E
    ours = []
    theirs = []
    for _ in range(min(copies(size), 24)):
        k = randn(1, K, slots, E)
        v = randn(1, K, slots, E)
        ours.append(partial(kt.attention, q, k, v, input_pos, None, None, None, E**-0.5))
        live = (q.transpose(1, 2), k[:, :, :T], v[:, :, :T])
        theirs.append(partial(SDPA, *live, is_causal=S > 1, enable_gqa=True))
    work = {"bytes": size} if S == 1 else {"flops": 2 * H * E * S * (S + 1)}
    yield work | {"s": seconds(ours)}
    yield {"torch_s": seconds(theirs)}


# ---------------------------------------------------------------- whole models


def models(until: float) -> dict[str, Callable]:
    works = {}
    engines = {}  # at most one, so that its memory is free for the next
    for who, (name, format) in itertools.product(("ours", "torch"), SIZES["models"]):
        # Torch's attention reads the whole cache, so each context would need an engine of its own.
        contexts = SIZES["contexts"] if who == "ours" else SIZES["contexts"][:1]
        get = partial(get_engine, engines, (who, name, format), max(contexts) + SIZES["steps"] + 1)
        for context in contexts:
            works[f"{name} {format} at {context}, {who}"] = partial(time_steps, get, context)
        if who == "ours":
            works[f"{name} {format}, prefill, ours"] = partial(time_prefill, get)
    return works


def get_engine(engines: dict, which: tuple[str, str, str], length: int) -> Engine:
    """The engine of a model of random weights. which: who, the model's name and its format."""
    if which in engines:
        return engines[which]
    engines.clear()
    torch.compiler.reset()  # frees CUDA graphs
    gc.collect()
    torch.cuda.empty_cache()

    who, name, format = which
    model = empty_model(CONFIGS[name], format).to_empty(device=DEVICE).eval()
    fill(model.state_dict().values())
    KERNELS.clear()  # of the operations that run outside of fused blocks
    if who == "ours":
        install_kernels(model, installer=kt.TritonInstaller(model))
    engines[which] = Engine(model, 1, -(-length // 512) * 512, compiled_steps(not SMOKE, False))
    return engines[which]


def time_steps(get: Callable[[], Engine], context: int) -> Iterator[dict]:
    """One decode step. The warm-up round compiles, and records a CUDA graph."""
    engine = get()
    steps = SIZES["steps"]
    times = [measure.time_decode(engine, context, steps).decode_s / steps for _ in range(SIZES["rounds"] + 1)]
    if engine.timing.decode_steps != steps:
        raise RuntimeError(f"only {engine.timing.decode_steps} of {steps} steps were done")
    size = weight_bytes(engine.model, 1) + engine.timing.kv_bytes / steps
    yield {"bytes": size, "s": median(times[1:]), "tokens_per_s": 1 / median(times[1:])}


def time_prefill(get: Callable[[], Engine]) -> Iterator[dict]:
    engine = get()
    config = engine.model.config
    S = SIZES["prompt"]
    times = []
    for _ in range(SIZES["rounds"] + 1):
        engine.clear()
        engine.reset_timing()
        generate(engine, [Request([1] * S, GREEDY, 1)])
        times.append(engine.timing.prefill_s)
    head = 2 * config.vocab_size * config.dim  # computed for the last token only
    flops = S * (roofline(config, 1.0, context=S // 2)["flops_per_token"] - head) + head
    yield {"flops": flops, "s": median(times[1:]), "tokens_per_s": S / median(times[1:])}


# ---------------------------------------------------------------- the parts

# What a part measures, once it is told when its time is over: functions that yield fields of the row of their name
PARTS = {
    "environment": lambda until: {"device": measure_device},
    "tuning": tuning,
    "kernels": kernels,
    "models": models,
}


def run_works(works: dict[str, Callable], write: Callable[[dict], None]):
    """Write a row of each work; of two rows with the same name, the later one counts."""
    for name in works:
        write({"name": name, "error": "not reached"})
    for name, run in works.items():
        print_status(name)
        row = {"name": name}
        try:
            for found in run():
                row |= found
                write(row)
        except Exception as error:
            print_status(f"{name} failed: {first_line(error)}")
            write(row | {"error": printable(first_line(error)), "traceback": traceback.format_exc()})


def run_child(command: list, until: float, **options) -> str | None:
    """Run a program until a time at most. Returns what went wrong, or None."""
    process = subprocess.Popen([*map(str, command)], start_new_session=True, **options)
    try:
        code = process.wait(max(0, until - time.time()))
        return f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        return "stopped when its time was over"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started
        process.wait()


def run_part(part: str, until: float, path: Path) -> dict:
    """The rows of a part, which a process of its own writes to a file."""
    path.touch()
    options = ["--smoke"] if SMOKE else []
    error = run_child([sys.executable, __file__, "--part", part, "--until", until, "--out", path, *options], until)
    lines = path.read_text().split("\n")[:-1]  # the last one may be incomplete
    rows = {row["name"]: row for row in map(json.loads, lines)}
    return {"error": error, "rows": list(rows.values())}


def run_tests(tests: list[str], until: float, log: Path) -> dict:
    """The counts of the kernels' tests, and a row of each that failed."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "-n", min(6, os.cpu_count())]
    command += ["-m", "not full", "-k", "not ahead_of_time", *tests]  # those need no GPU, and take long
    environment = os.environ | {"COLUMNS": "400"}  # in fewer, pytest leaves reasons out
    with log.open("w") as file:
        error = run_child(command, until, stdout=file, stderr=file, cwd=ROOT, env=environment)
    printed = log.read_text()
    outcomes = re.findall(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (.*\S)", printed, re.M)
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) (.*?) - (.*)", printed, re.M))
    rows = [{"name": name, "error": reasons.get(name, what)} for what, name in outcomes if what in ("FAILED", "ERROR")]
    if error is None:
        log.unlink()
    elif not outcomes:
        error = f"{error}: {printable(printed)}"
    return {"error": error, "counts": Counter(what.lower() for what, _ in outcomes), "rows": rows}


def add_shares(parts: dict):
    """Add to the rows the shares of what the GPU can do, where that is known."""
    can = next(iter(parts["environment"]["rows"]), {})
    rows = [row for part in parts.values() for row in part["rows"]]
    for row, unit, who in itertools.product(rows, ("bytes", "flops"), ("", "torch_")):
        if unit in row and f"{who}s" in row and f"{unit}_per_s" in can:
            row[f"{who}share"] = row[unit] / row[f"{who}s"] / can[f"{unit}_per_s"]


def report(result: dict) -> str:
    """Markdown: the environment, the table of the models, and what has failed."""
    parts = result["parts"]
    facts = [str(result["machine"]["gpu"]), result["date"]]
    facts += [f"{name} {version}" for name, version in result["versions"].items()]
    can = next(iter(parts["environment"]["rows"]), {})
    facts += [f"{key} {value:.3g}" for key, value in can.items() if isinstance(value, float)]
    facts += [f"{n} tests {what}" for what, n in parts["tests"]["counts"].items()]
    with redirect_stdout(io.StringIO()) as text:
        print(", ".join(facts) + "\n")
        rows = [row for row in parts["models"]["rows"] if "s" in row]
        measure.print_table(rows, {"name": "", "tokens_per_s": ".1f", "share": ".0%"})
        print()
        for name, part in parts.items():
            failed = {part["error"]: ["the part"]}
            for row in part["rows"]:
                failed.setdefault(row.get("error"), []).append(row["name"])
            failed.pop(None, None)  # what did not fail
            print("".join(f"- {name}, {and_more(names)}: {error}\n" for error, names in failed.items()), end="")
    return text.getvalue()


def measure_all(args):
    gpu = "interpreter" if SMOKE else torch.cuda.get_device_name(DEVICE).replace(" ", "-")
    results = Path(tempfile.gettempdir()) if SMOKE else ROOT / "benchmarks" / "results"
    out = args.out or results / f"gpu_{gpu}.json"
    parts = {}
    left = sum(SHARES.values())
    with tempfile.TemporaryDirectory() as folder:
        for part, share in SHARES.items():
            limit_s = max(0.0, START + 60 * args.minutes - time.time()) * share / left
            until = time.time() + limit_s
            left -= share
            print_status(f"---- {part}: at most {limit_s:.0f} s")
            if part == "tests":
                parts[part] = run_tests(args.tests, until, out.with_suffix(".tests.log"))
            else:
                parts[part] = run_part(part, until, Path(folder, part))
            add_shares(parts)
            measure.save("gpu", {"parts": parts}, out, DEVICE)

    columns = {"name": "", "s": ".3g", "share": ".0%", "torch_s": ".3g", "torch_share": ".0%"}
    measure.print_table([row for row in parts["kernels"]["rows"] if "s" in row], columns)
    text = report(json.loads(out.read_text()))
    print(f"\n{text}", end="")
    if args.write_page:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{rest.partition(MARKS[1])[2]}")


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {})
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="the time of all parts together (10)")
    add("--tests", nargs="+", default=TESTS, help="arguments of pytest (the kernels' tests)")
    add("--write_page", action="store_true", help="put the table into docs/gpus.md")
    add("--smoke", action="store_true", help="tiny sizes, in the interpreter, on the CPU")
    add("--part", choices=PARTS, help=argparse.SUPPRESS)  # in the process of a part
    add("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not SMOKE and not torch.cuda.is_available():
        raise UserError("there is no GPU that torch can use; --smoke runs tiny sizes without one")
    if not args.part:
        return measure_all(args)
    if SMOKE:
        kt.register(kt.LIBRARY, "CPU")
    with args.out.open("a", buffering=1) as file:  # each line is written at once
        run_works(PARTS[args.part](args.until), lambda row: file.write(json.dumps(row) + "\n"))


if __name__ == "__main__":
    run_command(main)
