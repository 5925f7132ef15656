"""The ladder: one optimization after another, each a command line of generate.py.

STEPS lists them; each step includes all steps above it. Every step is measured as decode.py
measures fastpath, in one row, with the default model and with each GGUF file of --files. A gain
over the step before is the median of the ratios within the rounds. No other program may be busy on
the machine. charts.py draws the result.
"""

from functools import partial

import measure
from measure import DECODE, PREFILL

from cli import print_status, run_command
from load import choose_device, open_checkpoint

BOTH = "--compile --compile_prefill"
STEPS = {  # name: (what it changes, format of the weights, flags of generate.py)
    "float32 eager": ("plain PyTorch, 4 bytes a weight", "bf16", "--kernels torch --dtype float32"),
    "bf16 eager": ("2 bytes a weight: half as many to read", "bf16", "--kernels torch"),
    "compiled decode": ("the whole decode step is one graph", "bf16", "--kernels torch --compile"),
    "compiled prefill": ("prefill is another graph", "bf16", f"--kernels torch {BOTH}"),
    "C++ kernels": ("matrix-vector products at the memory bandwidth", "bf16", BOTH),
    "int8": ("1 byte a weight", "int8", BOTH),
    "4 bits": ("about half a byte a weight: a GGUF file as it is", "file", BOTH),
    "prompt lookup": (
        "several tokens per pass, where the text repeats",
        "file",
        f"{BOTH} --draft prompt-lookup",
    ),
}


def summary(rounds: dict[str, list[dict]]) -> list[dict]:
    """A row for each step: medians over its rounds, gains over the step before, and the rounds."""
    rows = []
    before = None
    for name, mine in rounds.items():
        change, format, flags = STEPS[name]
        row = {"name": name, "change": change, "format": format, "flags": flags}
        row |= measure.medians(mine)
        row |= {"decode_over_before": None, "prefill_over_before": None}
        if before is not None:
            row |= measure.rate_ratios("_over_before", mine, before)
        rows.append(row)
        before = mine
    return rows


def main():
    parser = measure.make_parser(__doc__, {"--rounds": 3, "--prompt_tokens": 512, "--new_tokens": 64})
    add = parser.add_argument
    add("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="names of STEPS")
    add("--files", nargs="+", default=[], help="GGUF files of more models (bf16 and int8 copies are made)")
    args = parser.parse_args()

    rows = []
    for source in (args.checkpoint_path, *args.files):
        model = open_checkpoint(source).name
        print_status(model)
        turns = {}
        for name, (_, format, flags) in STEPS.items():
            if name in args.steps:
                turns[name] = partial(measure.decode_and_prefill, args, source, format, flags)
        # No warm-up round: each run is a process of its own, and warms up by itself.
        rounds = measure.take_turns(turns, args.rounds, warm_up=0)
        rows += [{"model": model} | row for row in summary(rounds)]

    columns = {"model": "", "name": "", "change": "", DECODE: ".1f", "decode_over_before": ".2f"}
    columns |= {PREFILL: ".1f", "prefill_over_before": ".2f", "compile_s": ".1f"}
    measure.print_table(rows, columns | {"peak_memory_bytes": ".2e"})
    about = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens, "steps": rows}
    measure.save("ladder", about, args.out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
