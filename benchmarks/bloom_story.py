"""The gain of each step of the BLOOM story by itself: the same work before and after the step, measured alternately.

Shapes of bloom-560m (24 layers, D 1024, 16 heads of 64) in bfloat16, one row at 1,024 tokens. Each pair of functions
does one thing for all layers of a decode step (one pair: of a prefill of 512 tokens). The other steps of the story,
compilation and the whole model, are measured by decode.py and ladder.py.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import measure
import torch
from measure import BF16

from cli import run_command
from cpu.memory import keep_freed_memory
from kernels import attention
from positions import alibi_slopes

LAYERS, CONTEXT = 24, 1024
D, H = 1024, 16
E = D // H
REPEATS = 5  # calls of each function in a round


def gelu_formula(x):
    """tanh-GELU as a formula, for which eager torch makes six passes over memory."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def make_pairs() -> dict[str, tuple[Callable, Callable]]:
    """For each step, two functions: the work of one layer before the step and after it."""
    q, new = torch.randn(1, 1, H, E).to(BF16), torch.randn(1, 1, H, E).to(BF16)
    k_cache, v_cache = (torch.randn(1, H, CONTEXT + 8, E).to(BF16) for _ in range(2))
    position, slopes = torch.tensor([[CONTEXT - 1]]), alibi_slopes(H)
    index = (torch.arange(1)[:, None], slice(None), position)
    grown = k_cache[:, :, : CONTEXT - 1].clone()  # what a growing cache holds before this token
    by_token = torch.randn(1, CONTEXT, H, E).to(BF16)  # a cache in the order in which the projection writes it
    by_head, query = by_token.transpose(1, 2).contiguous(), q.transpose(1, 2)
    hidden, hidden_512 = torch.randn(1, 1, 4 * D).to(BF16), torch.randn(1, 512, 4 * D).to(BF16)
    compiled = torch.compile(gelu_formula, dynamic=False)

    def attend(slopes):
        attention(q, k_cache, v_cache, position, None, slopes, None, E**-0.5)

    def concatenate():
        for _ in ("keys", "values"):
            torch.cat([grown, new.transpose(1, 2)], 2)

    def write_in_place():
        k_cache[index] = v_cache[index] = new

    def multiply_by_token():
        return query @ by_token.permute(0, 2, 3, 1).reshape(1, H, E, CONTEXT)

    return {
        "ALiBi: slopes made once, not in every layer": (lambda: attend(alibi_slopes(H)), lambda: attend(slopes)),
        "cache: written in place, not grown by cat": (concatenate, write_in_place),
        "layout: heads before positions, so no copy before the product": (
            multiply_by_token,
            lambda: query @ by_head.transpose(2, 3),
        ),
        "GELU: one fused pass by the compiler": (lambda: gelu_formula(hidden), lambda: compiled(hidden)),
        "GELU, prefill of 512": (lambda: gelu_formula(hidden_512), lambda: compiled(hidden_512)),
    }


@torch.no_grad()
def main():
    args = measure.make_parser(__doc__, {"--rounds": 9}).parse_args()
    keep_freed_memory()
    pairs = make_pairs()
    works = {(name, i): measure.in_a_row([pair[i]] * LAYERS) for name, pair in pairs.items() for i in range(2)}
    turns = {key: partial(measure.seconds, work, REPEATS) for key, work in works.items()}
    times, rows = measure.take_turns(turns, args.rounds), []
    for name in pairs:
        before, after = times[name, 0], times[name, 1]
        row = {"name": name, "before_s": median(before), "after_s": median(after)}
        rows.append(row | measure.ratio("gain", before, after))
    measure.print_table(rows, {"name": "", "before_s": ".5f", "after_s": ".5f", "gain": ".2f", "gain_spread": ".2f"})
    measure.save("bloom_story", {"rows": rows}, args.out)


if __name__ == "__main__":
    run_command(main)
