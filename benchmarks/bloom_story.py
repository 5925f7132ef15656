"""The gain of each step of the BLOOM story: the same work before and after the step, measured alternately.

The shapes are those of bloom-560m (24 layers, D 1024, 16 heads of 64) in bfloat16, one row at 1,024
tokens. Each pair of functions does one thing for all layers of a decode step, and the last pair for
a prefill of 512 tokens. The other steps of the story, compilation and the whole model, are measured
by decode.py and ladder.py.
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

LAYERS = 24
CONTEXT = 1024
D = 1024
H = 16
E = D // H
REPEATS = 5  # calls of each function in a round


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def gelu_formula(x):
    """tanh-GELU as a formula, for which eager torch makes six passes over memory."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def make_pairs() -> dict[str, tuple[Callable, Callable]]:
    """For each step of the story, two functions: the work of one layer before the step and after it."""
    q = randn(1, 1, H, E)
    new = randn(1, 1, H, E)
    k_cache = randn(1, H, CONTEXT + 8, E)
    v_cache = randn(1, H, CONTEXT + 8, E)
    position = torch.tensor([[CONTEXT - 1]])
    index = (torch.arange(1)[:, None], slice(None), position)
    layer_slopes = alibi_slopes(H)
    grown = k_cache[:, :, : CONTEXT - 1].clone()  # what a growing cache holds before this token
    by_token = randn(1, CONTEXT, H, E)  # a cache in the order in which the projection writes it
    by_head = by_token.transpose(1, 2).contiguous()
    query = q.transpose(1, 2)
    hidden = randn(1, 1, 4 * D)
    hidden_512 = randn(1, 512, 4 * D)
    compiled = torch.compile(gelu_formula, dynamic=False)

    def attend(slopes):
        attention(q, k_cache, v_cache, position, None, slopes, None, E**-0.5)

    def concatenate():
        for _ in ("keys", "values"):
            torch.cat([grown, new.transpose(1, 2)], 2)

    def write_in_place():
        k_cache[index] = new
        v_cache[index] = new

    def multiply_by_token():
        return query @ by_token.permute(0, 2, 3, 1).reshape(1, H, E, CONTEXT)

    def multiply_by_head():
        return query @ by_head.transpose(2, 3)

    return {
        "ALiBi: slopes made once, not in every layer": (
            lambda: attend(alibi_slopes(H)),
            lambda: attend(layer_slopes),
        ),
        "cache: written in place, not grown by cat": (concatenate, write_in_place),
        "layout: heads before positions, so no copy before the product": (
            multiply_by_token,
            multiply_by_head,
        ),
        "GELU: one fused pass by the compiler": (
            lambda: gelu_formula(hidden),
            lambda: compiled(hidden),
        ),
        "GELU, prefill of 512": (lambda: gelu_formula(hidden_512), lambda: compiled(hidden_512)),
    }


@torch.no_grad()
def main():
    args = measure.make_parser(__doc__, {"--rounds": 9}).parse_args()
    keep_freed_memory()
    pairs = make_pairs()
    turns = {}
    for name, (before, after) in pairs.items():
        for when, work in (("before", before), ("after", after)):
            layers = measure.in_a_row([work] * LAYERS)
            turns[f"{name}, {when}"] = partial(measure.seconds, layers, REPEATS)
    times = measure.take_turns(turns, args.rounds)

    rows = []
    for name in pairs:
        before = times[f"{name}, before"]
        after = times[f"{name}, after"]
        row = {"name": name, "before_s": median(before), "after_s": median(after)}
        rows.append(row | measure.ratio("gain", before, after))
    columns = {"name": "", "before_s": ".5f", "after_s": ".5f", "gain": ".2f", "gain_spread": ".2f"}
    measure.print_table(rows, columns)
    measure.save("bloom_story", {"rows": rows}, args.out)


if __name__ == "__main__":
    run_command(main)
