"""The ladder: the same model, one idea after another, each step a command line of generate.py that anybody can run.

The steps are the table below; each has everything that the one above it has. A step is measured by two runs of
generate.py, greedy and in one row, because prefill and decode must never be mixed:
  decode   tokens/s of --new_tokens steps after 5 tokens of prompt, over all samples (--num_samples)
  prefill  tokens/s of a prompt of --prompt_tokens, up to the first new token, over all samples but the first
The first pass of a process also pays for memory that is touched for the first time. A compiled step has had passes by
then (they compile), an eager one has not; so prefill leaves its first sample out, whose time generate.py reports.
Decode's cannot be taken out of the sum, where it is 1 of 4.

Steps run in turns: a round runs every step once, and each round begins with another. Rates are medians over rounds; a
gain is the median of the rounds' own ratios. Nothing else may be running on the machine. Compilation is in no rate:
`compile s` is what both runs together took to compile in the last round. In the first it was whatever torch had in its
cache on disk, up to minutes. `peak MB` is the larger of the two runs'; a run that converts or compiles anew needs more.
A step that fails is left out, with the line it said.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import chart
from decode import ROOT, SHORT_PROMPT, circumstances, quantized

from checkpoint import read_json
from cli import ArgumentParser, UserError, number, print_status, run_command
from convert_hf_checkpoint import DEFAULT_NAME, ensure_checkpoint
from generate import choose_device

STEPS = {  # name: (what it changes, the flags of generate.py); {} is the checkpoint
    "float32 eager": ("plain PyTorch, 4 bytes a weight", "--kernels torch --dtype float32"),
    "bf16 eager": ("2 bytes a weight: half as many to read", "--dtype bfloat16 --kernels torch"),
    "compiled decode": ("the whole decode step is one graph", "--dtype bfloat16 --kernels torch --compile"),
    "compiled prefill": ("and prefill another", "--dtype bfloat16 --kernels torch --compile --compile_prefill"),
    "C++ kernels": ("products of one row at the speed of memory", "--dtype bfloat16 --compile --compile_prefill"),
    "int8": ("1 byte a weight", "--checkpoint_path {}-int8-g32 --compile --compile_prefill"),
    "int4": ("half a byte a weight, 1 in the head", "--checkpoint_path {}-int4-g32 --compile --compile_prefill"),
    "prompt lookup": (
        "several tokens for one reading, where the text repeats itself",
        "--checkpoint_path {}-int4-g32 --compile --compile_prefill --draft prompt-lookup",
    ),
}
SAMPLES = 4  # in each run of generate.py


# ---------------------------------------------------------------- measuring


def run_generate(args, flags: str, prompt: int, new: int) -> dict:
    """What generate.py --json says after this many tokens of prompt; UserError with its last line if it fails."""
    command = [sys.executable, str(ROOT / "generate.py"), "--synthetic_prompt", str(prompt), "--max_new_tokens"]
    command += [str(new), "--num_samples", str(SAMPLES), "--ignore_eos", "--temperature", "0", "--json"]
    for name in ("checkpoint_path", "device"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name}", str(value)]
    done = subprocess.run(command + shlex.split(flags), capture_output=True, text=True)  # kills it on Ctrl-C
    if done.returncode < 0:
        raise UserError(f"generate.py was ended by signal {-done.returncode} (9: too little memory)")
    if done.returncode:
        line = (done.stderr.strip() or f"generate.py failed ({done.returncode})").splitlines()[-1]
        raise UserError(line.removeprefix("generate.py: error: "))
    result = json.loads(done.stdout)
    made = min(len(sample["token_ids"]) for sample in result["samples"])
    if made < new:
        raise UserError(f"the model's context holds {made} tokens after {prompt}, not {new}; take less --new_tokens")
    if result["recompiles"]:
        print_status(f"{result['recompiles']} graphs were compiled while it was measured: its rates are too low")
    return result


def run_step(args, name: str) -> dict:
    """One round of a step: both of its runs."""
    _, flags = STEPS[name]
    if "{}" in flags:
        source = ensure_checkpoint(args.checkpoint_path)
        quantized(source, re.search(r"\{\}-(\w+)-g32", flags)[1])
        flags = flags.format(shlex.quote(str(source)))
    decode = run_generate(args, flags, SHORT_PROMPT, args.new_tokens + 1)  # prefill makes one of them
    prefill = run_generate(args, flags, args.prompt_tokens, 1)
    all_s = SAMPLES * args.prompt_tokens / prefill["prefill_tokens_per_s"]
    later_s = all_s - prefill["time_to_first_token_s"]  # which is all of the first sample
    keys = ("decode_tokens_per_s", "weight_bytes_per_token", "kv_bytes_per_token")
    keys += ("bandwidth_bytes_per_s", "read_bandwidth_bytes_per_s")
    return {key: decode[key] for key in keys} | {
        "prefill_tokens_per_s": (SAMPLES - 1) * args.prompt_tokens / later_s,
        "compile_s": decode["compile_s"] + prefill["compile_s"],
        "peak_memory_bytes": max(decode["peak_memory_bytes"], prefill["peak_memory_bytes"]),
    }


def take_turns(args, names: list[str]) -> tuple[dict, dict]:
    """Of each step that ran to its end its rounds, of the others the line they said."""
    rounds, left_out = {name: [] for name in names}, {}
    for i in range(args.rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            if name in left_out:
                continue
            print_status(f"round {i + 1} of {args.rounds}: {name}")
            try:
                rounds[name].append(run_step(args, name))
            except UserError as error:
                del rounds[name]
                left_out[name] = str(error)
                print_status(f"{name} is left out: {error}")
    if not rounds:
        name, line = next(iter(left_out.items()))
        raise UserError(f"no step ran to its end; {name}: {line}")
    return rounds, left_out


def summary(rounds: dict[str, list[dict]]) -> list[dict]:
    """A row a step: medians over its rounds, gains over the step before and over the first, and the rounds."""
    rows, names = [], list(rounds)
    for i, name in enumerate(names):
        change, flags = STEPS[name]
        mine = rounds[name]
        row = {"name": name, "change": change, "flags": flags}
        row |= {key: median(one[key] for one in mine) for key in mine[0]} | {"compile_s": mine[-1]["compile_s"]}
        for kind in ("decode", "prefill"):
            for over, other in (("before", names[i - 1]), ("first", names[0])):
                ratios = [a[f"{kind}_tokens_per_s"] / b[f"{kind}_tokens_per_s"] for a, b in zip(mine, rounds[other])]
                row[f"{kind}_over_{over}"] = median(ratios) if i else None
        rows.append(row | {"rounds": mine})
    return rows


# ---------------------------------------------------------------- the report


def public(argument: str) -> str:
    """An argument as the JSON may show it: a path is told from the repository on, or by its name alone."""
    flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value).expanduser()
    if path.is_absolute():
        path = path.resolve()
        value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return flag + equals + value


def gain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def print_table(result: dict):
    def line(name, change, *cells):
        print(f"{name:{wide}}  {change:{wider}}" + "".join(f"{cell:>9}" for cell in cells))

    wide, wider = (max(len(row[key]) for row in result["steps"]) for key in ("name", "change"))
    rate = ("tok/s", "gain", "in all")
    line("", "", "decode", "", "", "prefill", "", "", "compile", "peak")
    line("step", "what it changes", *rate, *rate, "s", "MB")
    for row in result["steps"]:
        cells = []
        for kind in ("decode", "prefill"):
            cells.append(f"{row[f'{kind}_tokens_per_s']:.1f}")
            cells += [gain(row[f"{kind}_over_before"]), gain(row[f"{kind}_over_first"])]
        cells += [f"{row['compile_s']:.1f}", f"{row['peak_memory_bytes'] / 1e6:.0f}"]
        line(row["name"], row["change"], *cells)
    for name, reason in result["left_out"].items():
        print(f"{name} is left out: {reason}")


def draw(result: dict, path: Path):
    """The rates as horizontal bars, decode beside prefill, into a PNG; UserError without matplotlib."""
    rows, machine = result["steps"], result["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, threads: {machine['threads']}"
    titles = {"decode": "decode, tokens/s", "prefill": f"prefill of {result['prompt_tokens']}, tokens/s"}
    panels = []
    for kind, colour in zip(titles, (chart.BLUE, chart.ORANGE)):
        rates = [row[f"{kind}_tokens_per_s"] for row in rows]
        gains = [gain(row[f"{kind}_over_before"]) for row in rows]
        labels = [f"{rate:.{1 if rate < 100 else 0}f}  {times}" for rate, times in zip(rates, gains)]
        panels.append(chart.Panel(titles[kind], rates, labels, [colour] * len(rows)))
    footnote = "x: times the step before, the median of the rounds' own ratios"
    names = [row["name"] for row in rows]
    chart.draw(path, f"{result['model']}\n{where}, {result['date']}", names, panels, footnote)


# ---------------------------------------------------------------- command line


def parse_arguments():
    count = number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint_path", help=f"whatever generate.py takes ({DEFAULT_NAME})")
    add("--rounds", type=count, default=3, help="how often every step is measured (3)")
    add("--prompt_tokens", type=count, default=512, help="of prefill (512)")
    add("--new_tokens", type=count, default=64, help="of decode (64)")
    add("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME", help=f"of: {', '.join(STEPS)} (all)")
    add("--device", help="cpu, cuda ...; without it the fastest there is")
    add("--out", type=Path, help="the JSON (benchmarks/results/ladder_DEVICE.json)")
    add("--png", type=Path, help="the chart (beside the JSON)")
    add("--draw", type=Path, metavar="JSON", help="only draw what was measured")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.draw:
        result = read_json(args.draw)
        if "steps" not in result:
            raise UserError(f"{args.draw} was not written by this program")
        return draw(result, args.png or args.draw.with_suffix(".png"))
    device = choose_device(args.device)
    out = args.out or ROOT / "benchmarks" / "results" / f"ladder_{device.type}.json"
    for path in filter(None, (out, args.png)):  # better told now than after the measurement
        if path.is_dir():
            raise UserError(f"{path} is a directory, expected a file to write")
        path.parent.mkdir(parents=True, exist_ok=True)
    png = args.png or out.with_suffix(".png")
    if out == png:
        raise UserError(f"{out} cannot be both the JSON and the chart")
    rounds, left_out = take_turns(args, [name for name in STEPS if name in args.steps])
    result = circumstances(device, []) | {"command": shlex.join(["python", *map(public, sys.argv)])}
    result |= {"model": Path(args.checkpoint_path or DEFAULT_NAME).resolve().name}
    result |= {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    result |= {"steps": summary(rounds), "left_out": left_out}
    print_table(result)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print_status(f"written to {out}")
    try:
        draw(result, png)
        print_status(f"drawn in {png}")
    except UserError as error:
        print_status(str(error))


if __name__ == "__main__":
    run_command(main)
