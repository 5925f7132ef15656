"""The time of a decode step: its matrix products beside torch's, and the effect of context, cache size and rows.

products  all products of a step for each number of --rows, one operation after the other, so that
          each reads its weights from memory. torch's are F.linear in bfloat16, _weight_int8pack_mm
          (one scale per row) and _weight_int4pack_mm_for_cpu (groups of 32; also beside the format
          file, a GGUF file in its own format), of random weights. "exact" products do not round the
          activations to 8 bits. share_of_bandwidth is relative to a plain read of as many bytes as
          the bfloat16 weights have.
step_s    a whole step by the engine's loop, compiled and greedy, at 20 tokens: the mean of 40 steps
          in a row
context   the extra time of a step at --context tokens, relative to reading the extra keys and values
          at the rate at which a short step reads its weights
cache     a step at 20 tokens with a cache of --cache positions, relative to one with 512
rows      a step of 8 rows, relative to a step of one

products_s is the time of our products for the first number of rows. It may be more than step_s,
because a step runs all blocks as one operation.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import measure
import torch
import torch.nn.functional as F
from measure import BF16, FORMATS

from checkpoint import Checkpoint
from cli import positive, run_command
from compile import compiled_steps
from cpu.install import linears_of
from engine import Engine
from load import load_model, open_checkpoint
from model import Transformer
from report import weight_bytes

SHORT = 20  # tokens of a short context
ROWS = 8
STEPS = 40  # consecutive steps

# ---------------------------------------------------------------- products


def torch_product(format: str, N: int, C: int) -> tuple[int, Callable]:
    """The bytes of a matrix of random numbers, and torch's product with it as a function of x."""
    if format == "bf16":
        weight = torch.randn(N, C).to(BF16)
        return weight.nbytes, partial(F.linear, weight=weight)
    if format == "int8":
        weight = torch.randint(-127, 128, (N, C), dtype=torch.int8)
        scales = torch.rand(N).to(BF16)
        return weight.nbytes + scales.nbytes, lambda x: torch._weight_int8pack_mm(x, weight, scales)

    levels = torch.randint(0, 16, (N, C), dtype=torch.int32)
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    scales = torch.rand(C // 32, N, 2).to(BF16)  # with the zero points
    size = weight.nbytes + scales.nbytes
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    return size, lambda x: multiply(x, weight, 32, scales)


def products_of(model: Transformer) -> list[Callable]:
    return [*(layer for block in model.blocks for layer in linears_of(block)), model.head]


def compare_products(args, source: Checkpoint, format: str) -> list[dict]:
    """A row of the table for each number of rows, for torch's products, ours, and ours without rounding."""
    model = load_model(source)
    shapes = [(layer.out_features, layer.in_features) for layer in products_of(model)[:-1]]
    shapes.append((model.config.vocab_size, model.config.dim))
    sizes, theirs = zip(*(torch_product(format, N, C) for N, C in shapes))
    contestants = {f"torch {format}": theirs, f"ours {format}": products_of(model)}
    if format != "bf16":
        contestants[f"ours {format} exact"] = products_of(load_model(source, exact_activations=True))
    bytes_read = dict.fromkeys(contestants, weight_bytes(model, 1))
    bytes_read[f"torch {format}"] = sum(sizes)
    # As many bytes as the weights have in bfloat16.
    numbers = torch.ones(sum(N * C for N, C in shapes) // 2)

    table = []
    for M in args.rows:
        inputs = {C: torch.randn(M, C).to(BF16) for _, C in shapes}
        turns = {"read": partial(measure.seconds, numbers.sum)}
        for name, functions in contestants.items():
            calls = [partial(f, inputs[C]) for f, (_, C) in zip(functions, shapes)]
            turns[name] = partial(measure.seconds, measure.in_a_row(calls))
        times = measure.take_turns(turns, 2 * args.rounds, warm_up=2)

        read_bandwidth = numbers.nbytes / median(times["read"])
        for name, size in bytes_read.items():
            seconds = median(times[name])
            row = {"rows": M, "name": name, "seconds": seconds, "bytes": size}
            row["share_of_bandwidth"] = size / seconds / read_bandwidth
            table.append(row | measure.ratio("over_torch", times[f"torch {format}"], times[name]))
    return table


# ---------------------------------------------------------------- whole steps


def step_s(engine: Engine, context: int) -> float:
    return measure.time_decode(engine, context, STEPS).decode_s / STEPS


def measure_steps(args, source: Checkpoint) -> dict:
    def engine(rows: int, positions: int) -> Engine:
        """An engine with a model of its own, whose caches it sets up."""
        return Engine(load_model(source), rows, positions, compiled_steps(not args.eager, False))

    one = engine(1, 512)
    many = engine(ROWS, 512)
    long = engine(1, args.cache)
    turns = {
        "short": partial(step_s, one, SHORT),
        "short, long cache": partial(step_s, long, SHORT),
        "long": partial(step_s, long, args.context),
        "rows": partial(step_s, many, SHORT),
    }
    times = measure.take_turns(turns, args.rounds)
    rounds = [dict(zip(times, each)) for each in zip(*times.values())]

    weights = weight_bytes(one.model, 1)
    extra = long.model.kv_bytes([args.context]) - long.model.kv_bytes([SHORT])
    return {
        "weight_bytes": weights,
        "extra_kv_bytes": extra,
        "step_s": median(times["short"]),
        "context": median((t["long"] / t["short, long cache"] - 1) * weights / extra for t in rounds),
        "cache": median(t["short, long cache"] / t["short"] for t in rounds),
        "rows": median(t["rows"] / t["short"] for t in rounds),
        "rounds": rounds,
    }


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {"--rounds": 7, "--context": 4096, "--cache": 8192})
    add = parser.add_argument
    add("--formats", nargs="+", choices=measure.WITH_FILE, default=list(FORMATS), help="of the weights (all but file)")
    add("--rows", type=positive, nargs="+", default=[1, 8, 16], help="numbers of rows for the products (1, 8 and 16)")
    add("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()

    result = {}
    products = []
    for format in args.formats:
        source = open_checkpoint(str(measure.quantized(args.checkpoint_path, format)))
        rows = compare_products(args, source, format)
        products_s = next(row["seconds"] for row in rows if row["name"] == f"ours {format}")
        result[format] = {"products_s": products_s} | measure_steps(args, source)
        products += rows

    columns = {"rows": "", "name": "", "seconds": ".5f", "bytes": ".2e"}
    columns |= {"share_of_bandwidth": ".0%", "over_torch": ".2f", "over_torch_spread": ".2f"}
    measure.print_table(products, columns)
    columns = {"format": "", "step_s": ".5f", "products_s": ".5f"}
    columns |= {"context": ".2f", "cache": ".2f", "rows": ".2f"}
    measure.print_table([{"format": format} | row for format, row in result.items()], columns)
    about = {"model": open_checkpoint(args.checkpoint_path).name, "context": args.context}
    about |= {"cache": args.cache, "products": products} | result
    measure.save("step", about, args.out)


if __name__ == "__main__":
    run_command(main)
