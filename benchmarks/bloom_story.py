"""What each step of the BLOOM story is worth here, by itself: the same work before and after, in turns.

Shapes of bloom-560m (24 layers, D 1024, 16 heads of 64) in bfloat16, one row at --context tokens. Each pair of
functions does one thing for all layers of a decode step (or, where it says so, of a prefill of 512 tokens). Steps that
are not here are measured elsewhere: compilation and the whole model by decode.py and ladder.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from measure import BF16, Ratio, about_run, count, make_parser, save, seconds, take_turns

from cli import keep_freed_memory, run_command
from kernels import attention
from model import alibi_slopes

LAYERS, D, H, E = 24, 1024, 16, 64
REPEATS = 5  # of each function in a round


@dataclass
class Pair:
    name: str
    changes: str
    before: Callable  # of one layer
    after: Callable


def gelu_in_steps(x):
    """tanh-GELU as a formula: eager torch makes six passes over memory of it."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def make_pairs(context: int) -> list[Pair]:
    T = context + 8
    q, new = torch.randn(1, 1, H, E).to(BF16), torch.randn(1, 1, H, E).to(BF16)
    k_cache, v_cache = (torch.randn(1, H, T, E).to(BF16) for _ in range(2))
    position, slopes = torch.tensor([[context - 1]]), alibi_slopes(H)
    where = (torch.arange(1)[:, None], slice(None), position)
    grown = k_cache[:, :, : context - 1].clone()  # what a growing cache holds before this token
    by_token = torch.randn(1, context, H, E).to(BF16)  # a cache in the order in which the projection writes it
    by_head, query = by_token.transpose(1, 2).contiguous(), q.transpose(1, 2)
    hidden, hidden_512 = torch.randn(1, 1, 4 * D).to(BF16), torch.randn(1, 512, 4 * D).to(BF16)
    compiled = torch.compile(gelu_in_steps, dynamic=False)

    def attend(slopes):
        attention(q, k_cache, v_cache, position, None, slopes)

    def grow():
        for _ in ("keys", "values"):
            torch.cat([grown, new.transpose(1, 2)], 2)

    def write_in_place():
        k_cache[where] = new
        v_cache[where] = new

    def multiply_by_token():
        return query @ by_token.permute(0, 2, 3, 1).reshape(1, H, E, context)

    fused = "one fused pass by the compiler"
    return [
        Pair("ALiBi", "slopes made once, not in every layer", lambda: attend(alibi_slopes(H)), lambda: attend(slopes)),
        Pair("cache", "written in place, not grown by cat", grow, write_in_place),
        Pair(
            "layout",
            "heads before positions in the cache: no copy before the product",
            multiply_by_token,
            lambda: query @ by_head.transpose(2, 3),
        ),
        Pair("GELU", fused, lambda: gelu_in_steps(hidden), lambda: compiled(hidden)),
        Pair("GELU, prefill of 512", fused, lambda: gelu_in_steps(hidden_512), lambda: compiled(hidden_512)),
    ]


def all_layers(work: Callable):
    for _ in range(LAYERS):
        work()


@torch.no_grad()
def measure(pairs: list[Pair], rounds: int) -> list[dict]:
    runs = {}
    for pair in pairs:
        runs |= {f"{pair.name}, before": pair.before, f"{pair.name}, after": pair.after}
    turns = {name: partial(seconds, partial(all_layers, run), REPEATS) for name, run in runs.items()}
    times, _ = take_turns(turns, rounds)
    rows = []
    for pair in pairs:
        before, after = times[f"{pair.name}, before"], times[f"{pair.name}, after"]
        row = {"name": pair.name, "changes": pair.changes, "before_s": median(before), "after_s": median(after)}
        gain = Ratio.of(before, after)
        line = f"{pair.name:22}{row['before_s'] * 1e3:8.2f} ms ->{row['after_s'] * 1e3:8.2f} ms   {gain}"
        print(f"{line}   {pair.changes}")
        rows.append(row | gain.fields("gain"))
    return rows


def main():
    parser = make_parser(__doc__, rounds=9, checkpoint=False)
    parser.add_argument("--context", type=count, default=1024, help="tokens in the cache (1024)")
    args = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    save(about_run() | {"rows": measure(make_pairs(args.context), args.rounds)}, args.out, "bloom_story")


if __name__ == "__main__":
    run_command(main)
