"""The time of a decode step: its matrix products beside torch's, and the effect of context, cache size and rows.

products  all products of a step for each number of --rows, one operation after the other, so that each reads its
          weights from memory. torch's products are F.linear in bfloat16, _weight_int8pack_mm (one scale per row) and
          _weight_int4pack_mm_for_cpu (groups of 32), of random weights. "exact" products do not round the activations
          to 8 bits. share_of_bandwidth is relative to a plain read of as many bytes as the bfloat16 weights have.
step_s    a whole step by the engine's loop, compiled and greedy, at 20 tokens: the mean of 40 steps in a row
context   the extra time of a step at --context tokens, relative to reading the extra keys and values at the rate at
          which a short step reads its weights
cache     a step at 20 tokens with a cache of --cache positions, relative to one with 512
rows      a step of 8 rows, relative to a step of one

products_s are our products for the first number of rows. They may take longer than a step, because all blocks in one
operation can save more time than everything else in a step takes.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import measure
import torch
import torch.nn.functional as F
from measure import BF16, FORMATS, count

from checkpoint import empty_model, read_config
from cli import keep_freed_memory, run_command
from engine import Engine
from kernels_cpu import linears_of
from load import compiled_steps, load_model
from report import kv_bytes, weight_bytes

SHORT, ROWS, STEPS = 20, 8, 40  # tokens of a short context, rows, consecutive steps

# ---------------------------------------------------------------- products

Products = tuple[float, list[Callable]]  # bytes of weights, and a function of x for each product


def our_products(directory: Path, exact: bool) -> Products:
    model = load_model(directory, exact_activations=exact)
    return weight_bytes(model, 1), [*(layer for block in model.blocks for layer in linears_of(block)), model.head]


def torch_products(format: str, shapes: list[tuple[int, int]]) -> Products:
    if format == "bf16":
        weights = [torch.randn(shape).to(BF16) for shape in shapes]
        return sum(w.nbytes for w in weights), [partial(F.linear, weight=w) for w in weights]
    if format == "int8":
        weights = [torch.randint(-127, 128, shape, dtype=torch.int8) for shape in shapes]
        scales = [torch.rand(N).to(BF16) for N, _ in shapes]
        functions = [lambda x, w=w, s=s: torch._weight_int8pack_mm(x, w, s) for w, s in zip(weights, scales)]
    else:
        aten, levels = torch.ops.aten, [torch.randint(0, 16, shape, dtype=torch.int32) for shape in shapes]
        weights = [aten._convert_weight_to_int4pack_for_cpu(w, 1) for w in levels]
        scales = [torch.rand(K // 32, N, 2).to(BF16) for N, K in shapes]  # and zero points
        functions = [lambda x, w=w, s=s: aten._weight_int4pack_mm_for_cpu(x, w, 32, s) for w, s in zip(weights, scales)]
    return sum(tensor.nbytes for tensor in weights + scales), functions


def run_all(functions: list[Callable], xs: list[torch.Tensor]):
    for function, x in zip(functions, xs):
        function(x)


def compare_products(args, directory: Path, format: str) -> list[dict]:
    """A row of the table for each number of rows, for torch's products, ours, and ours without rounding."""
    model = empty_model(read_config(directory))
    layers = [layer for block in model.blocks for layer in linears_of(block)] + [model.output or model.embedding]
    shapes = [tuple(layer.weight.shape) for layer in layers]
    contestants = {f"torch {format}": torch_products(format, shapes), f"ours {format}": our_products(directory, False)}
    if format != "bf16":
        contestants[f"ours {format} exact"] = our_products(directory, True)
    numbers, table = torch.ones(sum(N * K for N, K in shapes) // 2), []  # as many bytes as in bfloat16
    for M in args.rows:
        inputs = {K: torch.randn(M, K).to(BF16) for _, K in shapes}
        xs = [inputs[K] for _, K in shapes]
        turns = {name: partial(measure.seconds, partial(run_all, each, xs)) for name, (_, each) in contestants.items()}
        turns["read"] = partial(measure.seconds, numbers.sum)
        times = measure.take_turns(turns, 2 * args.rounds, warm_up=2)
        for name, (size, _) in contestants.items():
            row = {"rows": M, "name": name, "seconds": median(times[name]), "bytes": size}
            row["share_of_bandwidth"] = size / row["seconds"] * median(times["read"]) / numbers.nbytes
            table.append(row | measure.ratio("over_torch", times[f"torch {format}"], times[name]))
    return table


# ---------------------------------------------------------------- whole steps


def step_s(engine: Engine, context: int) -> float:
    return measure.time_decode(engine, context, STEPS).decode_s / STEPS


def measure_steps(args, directory: Path) -> dict:
    def engine(rows: int, positions: int) -> Engine:  # with its own model, whose caches the engine sets up
        return Engine(load_model(directory), rows, positions, compiled_steps(not args.eager, False))

    one, long, many = engine(1, 512), engine(1, args.cache), engine(ROWS, 512)
    cases = {
        "short": partial(step_s, one, SHORT),
        "short, long cache": partial(step_s, long, SHORT),
        "long": partial(step_s, long, args.context),
        "rows": partial(step_s, many, SHORT),
    }
    times = measure.take_turns(cases, args.rounds)
    rounds = [dict(zip(times, each)) for each in zip(*times.values())]
    weights = weight_bytes(one.model, 1)
    extra = kv_bytes(long.model, [args.context]) - kv_bytes(long.model, [SHORT])
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
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats of the weights (all)")
    add("--rows", type=count, nargs="+", default=[1, 8, 16], help="numbers of rows for the products (1, 8 and 16)")
    add("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    keep_freed_memory()
    result, products = {}, []
    for format in args.formats:
        directory = measure.quantized(args.checkpoint_path, format)
        rows = compare_products(args, directory, format)
        products_s = next(row["seconds"] for row in rows if row["name"] == f"ours {format}")
        result[format] = {"products_s": products_s} | measure_steps(args, directory)
        products += rows
    columns = {"rows": "", "name": "", "seconds": ".5f", "bytes": ".2e", "share_of_bandwidth": ".0%"}
    measure.print_table(products, columns | {"over_torch": ".2f", "over_torch_spread": ".2f"})
    columns = {"format": "", "step_s": ".5f", "products_s": ".5f"} | dict.fromkeys(("context", "cache", "rows"), ".2f")
    measure.print_table([{"format": format} | result[format] for format in args.formats], columns)
    about = {"context": args.context, "cache": args.cache, "products": products}
    measure.save("step", about | result, args.out)


if __name__ == "__main__":
    run_command(main)
