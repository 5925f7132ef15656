"""What a decode step costs beside the weights that it reads: context, cache, rows, what is no product, the draw.

Compiled, greedy, on the default checkpoint or another. A round measures every case, and each number is the median of
the rounds' own differences or ratios; a time is the median of 40 in a row. A step is the body of generate()'s loop, the
token on the host at its end; what stands in the cache is random numbers, which cost what any others cost.
  context  the further time of a step at --context tokens, as a multiple of what its further bytes of keys and values
           take at the rate at which a short step reads its weights
  cache    a step at 20 tokens with a cache of --cache slots, as a multiple of one with 512
  rows     a step of 8 rows as a multiple of a step of one
  rest     a step less its products, which are timed by themselves, one operation after the other; negative where what
           the step saves by doing all blocks in one operation is more than everything else in it
  draws    `sample` compiled by itself, for one row and for 8, per row
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from decode import BF16, ROOT, circumstances, quantized

from checkpoint import read_config
from cli import ArgumentParser, UserError, keep_freed_memory, number, print_status, run_command
from convert_hf_checkpoint import ensure_checkpoint
from generate import compiled_steps
from load import load_model
from report import kv_bytes, weight_bytes
from sampling import Sampling, sample

SHORT, ROWS, TIMES = 20, 8, 40
DRAWS = {"top-k 200": {"top_k": 200}, "top-p 0.9": {"top_p": 0.9}, "both": {"top_k": 200, "top_p": 0.9}}


def seconds(work: Callable) -> float:
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def make_model(directory: Path, rows: int, slots: int):
    model = load_model(directory, "cpu", BF16)
    model.setup_caches(rows, slots)
    for block in model.blocks:
        block.attention.k_cache.normal_()
        block.attention.v_cache.normal_()
    return model


def step(model, decode: Callable, rows: int, context: int) -> Callable:
    settings, token = Sampling.make(rows, temperature=0.0), torch.zeros(rows, dtype=torch.int64)
    position = torch.full((rows,), context)
    return lambda: decode(model, token, position, None, settings, None).tolist()


def products(model) -> Callable:
    """All of one step, of one row."""
    c, layers = model.config, [(model.head, model.config.dim)]
    for block in model.blocks:
        up = block.mlp.gate_up if block.mlp.gated else block.mlp.up
        layers += [(block.attention.qkv, c.dim), (block.attention.out, c.n_head * c.head_dim)]
        layers += [(up, c.dim), (block.mlp.down, c.hidden_dim)]
    xs = [torch.randn(1, K).to(BF16) for _, K in layers]
    return lambda: [layer(x) for (layer, _), x in zip(layers, xs)]


def draw(settings: dict, rows: int, V: int) -> Callable:
    made = Sampling.make(rows, temperature=0.8, **settings)
    logits, position = 3 * torch.randn(rows, V).to(BF16), torch.full((rows,), SHORT)
    return partial(torch.compile(sample, fullgraph=True), logits, made, position)


def make_cases(args, directory: Path) -> tuple[dict[str, Callable], dict]:
    """What a round times, by name, and how many bytes are in it."""
    compiled, V = compiled_steps(decoding=True, prefilling=False).decode, read_config(directory).vocab_size
    one, long, many = (make_model(directory, *sizes) for sizes in ((1, 512), (1, args.cache), (ROWS, 512)))
    cases = {
        "short": step(one, compiled, 1, SHORT),
        "short, long cache": step(long, compiled, 1, SHORT),
        "long": step(long, compiled, 1, args.context),
        "rows": step(many, compiled, ROWS, SHORT),
        "products": products(one),
    }
    cases |= {(name, rows): draw(how, rows, V) for rows in (1, ROWS) for name, how in DRAWS.items()}
    kv = kv_bytes(long, [args.context + 1]) - kv_bytes(long, [SHORT + 1])
    return cases, {"weight_bytes": weight_bytes(one, 1), "further_kv_bytes": kv}


@torch.no_grad()
def measure(args, directory: Path) -> dict:
    cases, sizes = make_cases(args, directory)
    rounds = []
    for i in range(args.rounds + 1):
        print_status(f"round {i} of {args.rounds}" if i else "warm-up")
        rounds.append({name: seconds(work) for name, work in cases.items()})
    rounds = rounds[1:]

    def middle(of: Callable) -> float:
        return median(of(times) for times in rounds)

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
    draws = [
        {"how": name, "rows": rows, "s_per_row": middle(lambda t, case=(name, rows): t[case]) / rows}
        for name in DRAWS
        for rows in (1, ROWS)
    ]
    return found | {"draws": draws, "rounds": [{str(k): s for k, s in times.items()} for times in rounds]}


def print_result(args, format: str, found: dict):
    step_ms, products_ms = found["step_s"] * 1e3, found["products_s"] * 1e3
    print(f"{format}: a step {step_ms:.2f} ms, its products by themselves {products_ms:.2f}")
    print(f"  at {args.context} tokens {found['context']:.2f}x what the further keys and values take to read")
    print(f"  with a cache of {args.cache} slots {found['cache']:.3f}x, with {ROWS} rows {found['rows']:.2f}x the time")
    for row in found["draws"]:
        print(f"  drawing by {row['how']}, rows: {row['rows']}: {row['s_per_row'] * 1e3:.2f} ms a row")


def main():
    count = number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, out = parser.add_argument, ROOT / "benchmarks" / "results" / "step_cpu.json"
    add("--checkpoint_path", help="whatever generate.py takes (SmolLM2-135M-Instruct)")
    formats = ("bf16", "int8", "int4")
    add("--formats", nargs="+", choices=formats, default=formats, help="bf16, int8, int4 (all)")
    add("--context", type=count, default=4096, help="tokens (4096)")
    add("--cache", type=count, default=8192, help="slots (8192)")
    add("--rounds", type=count, default=7, help="that count (7)")
    add("--out", type=Path, default=out, help="the JSON file")
    args = parser.parse_args()
    if not SHORT < args.context < args.cache:
        raise UserError(f"--context {args.context} must be above {SHORT} and below --cache {args.cache}")
    keep_freed_memory()
    directory, result = ensure_checkpoint(args.checkpoint_path), {}
    for format in args.formats:
        result[format] = measure(args, directory if format == "bf16" else quantized(directory, format))
        print_result(args, format, result[format])
    about = {"model": directory.name, "context": args.context, "cache": args.cache}
    args.out.write_text(json.dumps(circumstances(torch.device("cpu"), []) | about | result, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
