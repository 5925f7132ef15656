"""The ladder: the same model, one idea after another, each step a command line of generate.py that anybody can run.

The steps are the table below; each has everything that the one above it has. A step is measured by two runs of
generate.py, greedy and in one row, because prefill and decode must never be mixed:
  decode   tokens/s of --new_tokens steps after 5 tokens of prompt, over all samples (--num_samples)
  prefill  tokens/s of a prompt of --prompt_tokens, up to the first new token, over all samples but the first, which
           also pays for memory that is touched for the first time

Steps run in turns; rates are medians over rounds, a gain is the median of the rounds' own ratios. Nothing else may be
running on the machine. Compilation is in no rate: `compile s` is what both runs together took to compile in the last
round (in the first it was whatever torch had in its cache on disk, up to minutes). `peak MB` is the larger of the two
runs'. A step that fails is left out, with the line it said.
"""

import re
import shlex
from functools import partial
from pathlib import Path
from statistics import median

import measure
from measure import BLUE, ORANGE, ROOT, Panel, Ratio, count

from cli import print_status, run_command
from convert_hf_checkpoint import DEFAULT_NAME, ensure_checkpoint
from load import choose_device

STEPS = {  # name: (what it changes, the flags of generate.py); {} is the checkpoint
    "float32 eager": ("plain PyTorch, 4 bytes a weight", "--kernels torch --dtype float32"),
    "bf16 eager": ("2 bytes a weight: half as many to read", "--dtype bfloat16 --kernels torch"),
    "compiled decode": ("the whole decode step is one graph", "--dtype bfloat16 --kernels torch --compile"),
    "compiled prefill": ("and prefill another", "--dtype bfloat16 --kernels torch --compile --compile_prefill"),
    "C++ kernels": ("products of one row at the speed of memory", "--dtype bfloat16 --compile --compile_prefill"),
    "int8": ("1 byte a weight", "--checkpoint_path {}-int8-g32 --compile --compile_prefill"),
    "int4": ("half a byte a weight, 1 in the head", "--checkpoint_path {}-int4-g32 --compile --compile_prefill"),
    "prompt lookup": (
        "several tokens per pass over the weights, where the text repeats itself",
        "--checkpoint_path {}-int4-g32 --compile --compile_prefill --draft prompt-lookup",
    ),
}
SHORT_PROMPT, SAMPLES = 5, 4  # tokens before decode; samples in each run of generate.py
RATES = {"decode": "decode_tokens_per_s", "prefill": "prefill_tokens_per_s"}

# ---------------------------------------------------------------- measuring


def run_step(args, name: str) -> dict:
    """One round of a step: both of its runs."""
    print_status(name)
    _, flags = STEPS[name]
    if "{}" in flags:
        source = ensure_checkpoint(args.checkpoint_path)
        measure.quantized(source, re.search(r"\{\}-(\w+)-g32", flags)[1])
        flags = flags.format(shlex.quote(str(source)))
    elif args.checkpoint_path is not None:
        flags += f" --checkpoint_path {shlex.quote(args.checkpoint_path)}"
    flags += f" --device {args.device}" * (args.device is not None)
    decode = measure.run_generate(ROOT, flags, SHORT_PROMPT, args.new_tokens + 1, SAMPLES)  # prefill makes one of them
    prefill = measure.run_generate(ROOT, flags, args.prompt_tokens, 1, SAMPLES)
    keys = ("decode_tokens_per_s", "weight_bytes_per_token", "kv_bytes_per_token")
    keys += ("bandwidth_bytes_per_s", "read_bandwidth_bytes_per_s")
    return {key: decode[key] for key in keys} | {
        "prefill_tokens_per_s": prefill["warm_prefill_tokens_per_s"],
        "compile_s": decode["compile_s"] + prefill["compile_s"],
        "peak_memory_bytes": max(decode["peak_memory_bytes"], prefill["peak_memory_bytes"]),
    }


def summary(rounds: dict[str, list[dict]]) -> list[dict]:
    """A row a step: medians over its rounds, gains over the step before and over the first, and the rounds."""
    rows, names = [], list(rounds)
    for i, name in enumerate(names):
        change, flags = STEPS[name]
        mine = rounds[name]
        row = {"name": name, "change": change, "flags": flags}
        row |= {key: median(one[key] for one in mine) for key in mine[0]} | {"compile_s": mine[-1]["compile_s"]}
        for kind, rate in RATES.items():
            for over, other in (("before", names[max(0, i - 1)]), ("first", names[0])):
                ratio = Ratio.of([one[rate] for one in mine], [one[rate] for one in rounds[other]])
                row |= ratio.fields(f"{kind}_over_{over}") if i else {f"{kind}_over_{over}": None}
        rows.append(row | {"rounds": mine})
    return rows


# ---------------------------------------------------------------- the report


def gain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def print_table(result: dict):
    def line(name, change, *cells):
        print(f"{name:{wide}}  {change:{wider}}" + "".join(f"{cell:>9}" for cell in cells))

    wide, wider = (max(len(row[key]) for row in result["steps"]) for key in ("name", "change"))
    line("", "", "decode", "", "", "prefill", "", "", "compile", "peak")
    line("step", "what it changes", *("tok/s", "gain", "in all") * 2, "s", "MB")
    for row in result["steps"]:
        cells = []
        for kind, rate in RATES.items():
            cells += [f"{row[rate]:.1f}", gain(row[f"{kind}_over_before"]), gain(row[f"{kind}_over_first"])]
        line(row["name"], row["change"], *cells, f"{row['compile_s']:.1f}", f"{row['peak_memory_bytes'] / 1e6:.0f}")
    for name, reason in result["left_out"].items():
        print(f"{name} is left out: {reason}")


def draw(result: dict, path: Path):
    """The rates as horizontal bars, decode beside prefill."""
    rows, machine = result["steps"], result["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, threads: {machine['threads']}"
    titles, panels = ("decode, tokens/s", f"prefill of {result['prompt_tokens']}, tokens/s"), []
    for kind, title, colour in zip(RATES, titles, (BLUE, ORANGE)):
        rates = [row[RATES[kind]] for row in rows]
        gains = [gain(row[f"{kind}_over_before"]) for row in rows]
        labels = [f"{rate:.{1 if rate < 100 else 0}f}  {times}" for rate, times in zip(rates, gains)]
        panels.append(Panel(title, rates, labels, [colour] * len(rows)))
    footnote = "x: times the step before, the median of the rounds' own ratios"
    title, names = f"{result['model']}\n{where}, {result['date']}", [row["name"] for row in rows]
    measure.draw_bars(path, title, names, panels, footnote)


def main():
    parser = measure.make_parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--prompt_tokens", type=count, default=512, help="of prefill (512)")
    add("--new_tokens", type=count, default=64, help="of decode (64)")
    add("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME", help=f"of: {', '.join(STEPS)} (all)")
    add("--device", help="cpu, cuda ...; without it the fastest there is")
    add("--draw", type=Path, metavar="JSON", help="only draw what was measured, beside it")
    args = parser.parse_args()
    if args.draw:
        return measure.draw_again(args.draw, "steps", draw)
    device = choose_device(args.device)
    # No warm-up round: each run is a process of its own, and warms up by itself.
    turns = {name: partial(run_step, args, name) for name in STEPS if name in args.steps}
    rounds, left_out = measure.take_turns(turns, args.rounds, warm_up=0)
    result = measure.about_run(device) | {"model": Path(args.checkpoint_path or DEFAULT_NAME).resolve().name}
    result |= {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    result |= {"steps": summary(rounds), "left_out": left_out}
    print_table(result)
    measure.save(result, args.out, "ladder", device, draw)


if __name__ == "__main__":
    run_command(main)
