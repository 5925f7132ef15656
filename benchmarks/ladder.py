"""The ladder: one optimization after another, each a command line of generate.py that anybody can run.

STEPS lists them; each has everything that the one above it has. In a round, every step takes its turn with two runs of
generate.py, greedy and in one row, so that prefill and decode are never mixed:
  decode   tokens/s of --new_tokens steps after 5 tokens of prompt
  prefill  tokens/s of a prompt of --prompt_tokens, up to the first new token

A run takes 4 samples, the first of which does not count for prefill. Rates are medians over the rounds, gains over the
step before medians of the ratios within the rounds. Compilation is in no rate: compile_s is what both runs together
took to compile. Nothing else may be running on the machine. charts.py draws the result.
"""

import shlex
from functools import partial
from pathlib import Path

import measure
from measure import DECODE, PREFILL, RATES, ROOT, SHORT_PROMPT, column, ratio

from cli import print_status, run_command
from convert_hf_checkpoint import DEFAULT_NAME, ensure_checkpoint
from load import choose_device

BOTH = "--compile --compile_prefill"
STEPS = {  # name: (what it changes, format of the weights, flags of generate.py)
    "float32 eager": ("plain PyTorch, 4 bytes a weight", "bf16", "--kernels torch --dtype float32"),
    "bf16 eager": ("2 bytes a weight: half as many to read", "bf16", "--kernels torch"),
    "compiled decode": ("the whole decode step is one graph", "bf16", "--kernels torch --compile"),
    "compiled prefill": ("and prefill another", "bf16", f"--kernels torch {BOTH}"),
    "C++ kernels": ("products of one row at the speed of memory", "bf16", BOTH),
    "int8": ("1 byte a weight", "int8", BOTH),
    "int4": ("half a byte a weight, 1 in the head", "int4", BOTH),
    "prompt lookup": ("several tokens per pass, where the text repeats", "int4", f"{BOTH} --draft prompt-lookup"),
}
SAMPLES = 4  # in each run of generate.py


def run_step(args, name: str) -> dict:
    """One round of a step: both of its runs."""
    print_status(name)
    _, format, flags = STEPS[name]
    path = args.checkpoint_path
    if format != "bf16":
        path = measure.quantized(ensure_checkpoint(path), format)
    if path is not None:
        flags += f" --checkpoint_path {shlex.quote(str(path))}"
    decode = measure.run_generate(ROOT, flags, SHORT_PROMPT, args.new_tokens + 1, SAMPLES)  # prefill makes one of them
    prefill = measure.run_generate(ROOT, flags, args.prompt_tokens, 1, SAMPLES)
    keys = (DECODE, "weight_bytes_per_token", "kv_bytes_per_token", "bandwidth_bytes_per_s")
    return {key: decode[key] for key in keys} | {
        PREFILL: prefill[PREFILL],
        "compile_s": decode["compile_s"] + prefill["compile_s"],
        "peak_memory_bytes": max(decode["peak_memory_bytes"], prefill["peak_memory_bytes"]),
    }


def summary(rounds: dict[str, list[dict]]) -> list[dict]:
    """A row for each step: medians over its rounds, gains over the step before, and the rounds."""
    rows, before = [], None
    for name, mine in rounds.items():
        change, format, flags = STEPS[name]
        row = {"name": name, "change": change, "format": format, "flags": flags} | measure.medians(mine)
        for rate in RATES:
            gain = rate.replace("tokens_per_s", "over_before")
            row |= {gain: None} if before is None else ratio(gain, column(mine, rate), column(before, rate))
        rows.append(row)
        before = mine
    return rows


def main():
    parser = measure.make_parser(__doc__, rounds=3, prompt_tokens=512, new_tokens=64)
    names = list(STEPS)
    parser.add_argument("--steps", nargs="+", choices=names, default=names, metavar="NAME", help="names of STEPS")
    args = parser.parse_args()
    # No warm-up round: each run is a process of its own, and warms up by itself.
    turns = {name: partial(run_step, args, name) for name in STEPS if name in args.steps}
    rounds, left_out = measure.take_turns(turns, args.rounds, warm_up=0)
    device = choose_device(None)
    result = measure.about_run(device) | {"model": Path(args.checkpoint_path or DEFAULT_NAME).resolve().name}
    result |= {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    result |= {"steps": summary(rounds), "left_out": left_out}
    columns = {"name": "", "change": "", DECODE: ".1f", "decode_over_before": ".2f", PREFILL: ".1f"}
    columns |= {"prefill_over_before": ".2f", "compile_s": ".1f", "peak_memory_bytes": ".2e"}
    measure.print_table(result["steps"], columns)
    measure.save(result, args.out, "ladder", device)


if __name__ == "__main__":
    run_command(main)
