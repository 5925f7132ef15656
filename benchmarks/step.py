"""What a decode step costs beside the weights that it reads: context, cache, rows, what is no product, the draw.

Compiled, greedy, on the default checkpoint or another, by the engine's own loop; what stands in the cache is random
numbers, which cost what any others cost. Each number is the median of the rounds' own differences or ratios; a time in
a round is that of 40 steps in a row.
  context  the further time of a step at --context tokens, as a multiple of what its further bytes of keys and values
           take at the rate at which a short step reads its weights
  cache    a step at 20 tokens with a cache of --cache positions, as a multiple of one with 512
  rows     a step of 8 rows as a multiple of a step of one
  rest     a step less its products, which are timed by themselves, one operation after the other; negative where what
           the step saves by doing all blocks in one operation is more than everything else in it
  draws    `sample` by itself, for one row and for 8, per row
"""

from collections.abc import Callable
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
from sampling import Sampling, SamplingParams, sample

SHORT, ROWS, TIMES = 20, 8, 40
DRAWS = {"top-k 200": {"top_k": 200}, "top-p 0.9": {"top_p": 0.9}, "both": {"top_k": 200, "top_p": 0.9}}


def make_engine(args, directory: Path, rows: int, positions: int) -> Engine:
    """With a model of its own: an engine sets up its model's caches."""
    engine = Engine(load_model(directory), rows, positions, compiled_steps(not args.eager, False))
    measure.random_caches(engine)
    return engine


def step(engine: Engine, context: int) -> Callable[[], float]:
    return lambda: measure.time_decode(engine, context, TIMES).decode_s / TIMES


def products(model) -> Callable[[], float]:
    """All of one step, of one row."""
    c, layers = model.config, [(model.head, model.config.dim)]
    for block in model.blocks:
        up = block.mlp.gate_up if block.mlp.gated else block.mlp.up
        layers += [(block.attention.qkv, c.dim), (block.attention.out, c.n_head * c.head_dim)]
        layers += [(up, c.dim), (block.mlp.down, c.hidden_dim)]
    xs = [torch.randn(1, K).to(BF16) for _, K in layers]
    return lambda: measure.seconds(lambda: [layer(x) for (layer, _), x in zip(layers, xs)], TIMES)


def draw(settings: dict, rows: int, V: int) -> Callable[[], float]:
    sampling = Sampling.make(rows, V)
    for row in range(rows):
        sampling.set_row(row, SamplingParams(temperature=0.8, seed=row, **settings), [])
    logits, drafted = 3 * torch.randn(rows, 1, V).to(BF16), torch.zeros(rows, 0, dtype=torch.int64)
    arguments = logits, torch.arange(rows), torch.full((rows,), SHORT), drafted, sampling
    return lambda: measure.seconds(lambda: sample(*arguments), TIMES) / rows


def make_cases(args, directory: Path) -> tuple[dict[str, Callable], dict]:
    """What a round times, by name, and how many bytes are in it."""
    one, long, many = (make_engine(args, directory, *sizes) for sizes in ((1, 512), (1, args.cache), (ROWS, 512)))
    cases = {
        "short": step(one, SHORT),
        "short, long cache": step(long, SHORT),
        "long": step(long, args.context),
        "rows": step(many, SHORT),
        "products": products(one.model),
    }
    V = one.model.config.vocab_size
    cases |= {f"{how}, {rows}": draw(DRAWS[how], rows, V) for rows in (1, ROWS) for how in DRAWS}
    further = kv_bytes(long.model, [args.context]) - kv_bytes(long.model, [SHORT])
    return cases, {"weight_bytes": weight_bytes(one.model, 1), "further_kv_bytes": further}


@torch.no_grad()
def measure_format(args, directory: Path) -> dict:
    cases, sizes = make_cases(args, directory)
    times, _ = measure.take_turns(cases, args.rounds)
    rounds = [dict(zip(times, each)) for each in zip(*times.values())]

    def middle(of: Callable[[dict], float]) -> float:
        return median(map(of, rounds))

    def growth(t: dict) -> float:
        rate = sizes["weight_bytes"] / t["short, long cache"]
        return (t["long"] - t["short, long cache"]) * rate / sizes["further_kv_bytes"]

    found = sizes | {
        "step_s": middle(lambda t: t["short"]),
        "products_s": middle(lambda t: t["products"]),
        "rest_s": middle(lambda t: t["short"] - t["products"]),
        "context": middle(growth),
        "cache": middle(lambda t: t["short, long cache"] / t["short"]),
        "rows": middle(lambda t: t["rows"] / t["short"]),
    }
    draws = [(how, rows) for how in DRAWS for rows in (1, ROWS)]
    found["draws"] = [{"how": h, "rows": n, "s_per_row": middle(lambda t, n=n, h=h: t[f"{h}, {n}"])} for h, n in draws]
    return found | {"rounds": rounds}


def print_result(args, format: str, found: dict):
    step_ms, products_ms = found["step_s"] * 1e3, found["products_s"] * 1e3
    print(f"{format}: a step {step_ms:.2f} ms, its products by themselves {products_ms:.2f}")
    print(f"  at {args.context} tokens {found['context']:.2f}x what the further keys and values take to read")
    print(f"  with a cache of {args.cache} {found['cache']:.3f}x, with {ROWS} rows {found['rows']:.2f}x the time")
    for row in found["draws"]:
        print(f"  drawing by {row['how']}, rows: {row['rows']}: {row['s_per_row'] * 1e3:.2f} ms a row")


def main():
    parser = measure.make_parser(__doc__, rounds=7)
    add = parser.add_argument
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="bf16, int8, int4 (all)")
    add("--context", type=count, default=4096, help="tokens (4096)")
    add("--cache", type=count, default=8192, help="positions (8192)")
    add("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    if not SHORT < args.context < args.cache - TIMES:
        raise UserError(f"--context {args.context} must be above {SHORT} and {TIMES} below --cache {args.cache}")
    keep_freed_memory()
    directory = ensure_checkpoint(args.checkpoint_path)
    result = measure.about_run() | {"model": directory.name, "context": args.context, "cache": args.cache}
    for format in args.formats:
        result[format] = measure_format(args, measure.quantized(directory, format))
        print_result(args, format, result[format])
    measure.save(result, args.out, "step")


if __name__ == "__main__":
    run_command(main)
