"""What a decode step costs besides the weights that it reads: context, cache size, rows, and what is not a product.

Compiled, greedy, by the engine's own loop; the caches hold random numbers, which cost as much as any others. Each
number is the median of the differences or ratios within the rounds; a time in a round is that of 40 steps in a row.
  context  the extra time of a step at --context tokens, relative to reading the extra keys and values at the rate at
           which a short step reads its weights
  cache    a step at 20 tokens with a cache of --cache positions, relative to one with 512
  rows     a step of 8 rows, relative to a step of one
  rest_s   a step less its products, which are timed by themselves, one operation after the other; negative where all
           blocks in one operation save more than everything else in the step takes
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import measure
import torch
from measure import BF16, FORMATS, count

from cli import UserError, keep_freed_memory, run_command
from convert_hf_checkpoint import ensure_checkpoint
from engine import Engine
from load import compiled_steps, load_model
from report import kv_bytes, weight_bytes

SHORT, ROWS, TIMES = 20, 8, 40  # tokens of context, rows, steps in a row


def make_engine(args, directory: Path, rows: int, positions: int) -> Engine:
    """With a model of its own, because an engine sets up its model's caches."""
    engine = Engine(load_model(directory), rows, positions, compiled_steps(not args.eager, False))
    measure.random_caches(engine)
    return engine


def step_s(engine: Engine, context: int) -> float:
    return measure.time_decode(engine, context, TIMES).decode_s / TIMES


def products(model) -> Callable[[], float]:
    """The seconds of all matrix products of one step, for one row."""
    c, layers = model.config, [(model.head, model.config.dim)]
    for block in model.blocks:
        up = block.mlp.gate_up if block.mlp.gated else block.mlp.up
        layers += [(block.attention.qkv, c.dim), (block.attention.out, c.n_head * c.head_dim)]
        layers += [(up, c.dim), (block.mlp.down, c.hidden_dim)]
    inputs = [(layer, torch.randn(1, K).to(BF16)) for layer, K in layers]
    return lambda: measure.seconds(lambda: [layer(x) for layer, x in inputs], TIMES)


@torch.no_grad()
def measure_format(args, directory: Path) -> dict:
    one, long, many = (make_engine(args, directory, *sizes) for sizes in ((1, 512), (1, args.cache), (ROWS, 512)))
    cases = {
        "short": partial(step_s, one, SHORT),
        "short, long cache": partial(step_s, long, SHORT),
        "long": partial(step_s, long, args.context),
        "rows": partial(step_s, many, SHORT),
        "products": products(one.model),
    }
    times, _ = measure.take_turns(cases, args.rounds)
    rounds = [dict(zip(times, each)) for each in zip(*times.values())]
    weights = weight_bytes(one.model, 1)
    extra = kv_bytes(long.model, [args.context]) - kv_bytes(long.model, [SHORT])
    growth = [(t["long"] / t["short, long cache"] - 1) * weights / extra for t in rounds]
    return {
        "weight_bytes": weights,
        "extra_kv_bytes": extra,
        "step_s": median(times["short"]),
        "products_s": median(times["products"]),
        "rest_s": median(t["short"] - t["products"] for t in rounds),
        "context": median(growth),
        "cache": median(t["short, long cache"] / t["short"] for t in rounds),
        "rows": median(t["rows"] / t["short"] for t in rounds),
        "rounds": rounds,
    }


def main():
    parser = measure.make_parser(__doc__, rounds=7)
    add = parser.add_argument
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the weights")
    add("--context", type=count, default=4096, help="tokens of a long context")
    add("--cache", type=count, default=8192, help="positions of a large cache")
    add("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    if not SHORT < args.context < args.cache - TIMES:
        raise UserError(f"--context {args.context} must be above {SHORT} and {TIMES} below --cache {args.cache}")
    keep_freed_memory()
    directory = ensure_checkpoint(args.checkpoint_path)
    result = measure.about_run() | {"model": directory.name, "context": args.context, "cache": args.cache}
    for format in args.formats:
        result[format] = measure_format(args, measure.quantized(directory, format))
    seconds, ratios = ("step_s", "products_s", "rest_s"), ("context", "cache", "rows")
    columns = {"format": ""} | dict.fromkeys(seconds, ".5f") | dict.fromkeys(ratios, ".2f")
    measure.print_table([{"format": format} | result[format] for format in args.formats], columns)
    measure.save(result, args.out, "step")


if __name__ == "__main__":
    run_command(main)
