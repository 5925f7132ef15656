"""What each step of the BLOOM story is worth here, by itself: the same work before and after, in turns.

Shapes of bloom-560m (24 layers, D 1024, 16 heads of 64) in bfloat16, one row at --context tokens. Each pair of
functions does one thing for all layers of a decode step (or, where it says so, of a prefill of 512 tokens). A round
runs every function once; times are medians over rounds, gains medians of the rounds' own ratios. Steps that are not
here are measured elsewhere: compilation and the whole model by decode.py and ladder.py.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from decode import ROOT, circumstances

from cli import ArgumentParser, keep_freed_memory, number, print_status, run_command
from kernels import attention
from model import alibi_slopes

LAYERS, D, H, E = 24, 1024, 16, 64
BF16 = torch.bfloat16
REPEATS = 5  # of each function in a round


def gelu_in_steps(x):
    """tanh-GELU as a formula: eager torch makes six passes over memory of it."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def make_pairs(context: int) -> dict:
    """name -> (what changes, before, after): functions without arguments."""
    T = context + 8
    q = torch.randn(1, 1, H, E).to(BF16)
    k_cache, v_cache = (torch.randn(1, H, T, E).to(BF16) for _ in range(2))
    position = torch.tensor([[context - 1]])
    slopes = alibi_slopes(H)
    new = torch.randn(1, 1, H, E).to(BF16)
    where = (torch.arange(1)[:, None], slice(None), position)
    grown = k_cache[:, :, : context - 1].clone()  # what a growing cache holds before this token
    by_token = torch.randn(1, context, H, E).to(BF16)  # a cache in the order in which the projection writes it
    by_head = by_token.transpose(1, 2).contiguous()
    query = q.transpose(1, 2)
    hidden, hidden_512 = torch.randn(1, 1, 4 * D).to(BF16), torch.randn(1, 512, 4 * D).to(BF16)
    compiled = torch.compile(gelu_in_steps, dynamic=False)

    def write_in_place():
        k_cache[where] = new
        v_cache[where] = new

    def layers(work):
        def run():
            for _ in range(LAYERS):
                work()

        return run

    return {
        "ALiBi": (
            "slopes made once, not in every layer",
            layers(lambda: attention(q, k_cache, v_cache, position, None, alibi_slopes(H))),
            layers(lambda: attention(q, k_cache, v_cache, position, None, slopes)),
        ),
        "cache": (
            "written in place, not grown by cat",
            layers(lambda: (torch.cat([grown, new.transpose(1, 2)], 2), torch.cat([grown, new.transpose(1, 2)], 2))),
            layers(write_in_place),
        ),
        "layout": (
            "heads before positions in the cache: no copy before the product",
            layers(lambda: query @ by_token.permute(0, 2, 3, 1).reshape(1, H, E, context)),
            layers(lambda: query @ by_head.transpose(2, 3)),
        ),
        "GELU": (
            "one fused pass by the compiler",
            layers(lambda: gelu_in_steps(hidden)),
            layers(lambda: compiled(hidden)),
        ),
        "GELU, prefill of 512": (
            "one fused pass by the compiler",
            layers(lambda: gelu_in_steps(hidden_512)),
            layers(lambda: compiled(hidden_512)),
        ),
    }


def seconds(work) -> float:
    start = time.perf_counter()
    for _ in range(REPEATS):
        work()
    return (time.perf_counter() - start) / REPEATS


def measure(pairs: dict, rounds: int) -> list[dict]:
    times = {name: ([], []) for name in pairs}
    for i in range(rounds + 1):
        print_status(f"round {i} of {rounds}" if i else "warm-up")
        for name, (_, before, after) in pairs.items():
            taken = seconds(before), seconds(after)
            if i:
                for series, value in zip(times[name], taken):
                    series.append(value)
    rows = []
    for name, (what, *_) in pairs.items():
        before, after = times[name]
        gain = median(b / a for b, a in zip(before, after))
        rows.append({"name": name, "changes": what, "before_s": median(before), "after_s": median(after), "gain": gain})
    return rows


def main():
    count = number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=9, help="that count (9)")
    parser.add_argument("--context", type=count, default=1024, help="tokens in the cache (1024)")
    default = ROOT / "benchmarks" / "results" / "bloom_story_cpu.json"
    parser.add_argument("--out", type=Path, default=default, help="the JSON (benchmarks/results/bloom_story_cpu.json)")
    args = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    with torch.no_grad():
        rows = measure(make_pairs(args.context), args.rounds)
    for row in rows:
        line = f"{row['name']:22}{row['before_s'] * 1e3:8.2f} ms ->{row['after_s'] * 1e3:8.2f} ms   {row['gain']:6.2f}x"
        print(f"{line}   {row['changes']}")
    args.out.write_text(json.dumps(circumstances(torch.device("cpu"), []) | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    run_command(main)
