"""Two checkouts of this repository against each other: `python benchmarks/trees.py ../old .`

Only through the command line (generate.py --json), because what is inside may differ. A case is a format of the
weights, eager or --compile, and a number of rows, each with the same prompt. In a round every case runs once in either
tree, one process at a time, and the tree that goes first changes from round to round: old, new, new, old. Reported are
the ratios new / old: the median of the rounds' own ratios, the least and the greatest. Prefill leaves out the first
sample of each process, which also pays for memory that is touched for the first time; compilation is in no rate.
"""

import itertools
import shlex
import tempfile
from pathlib import Path
from statistics import median

from measure import FORMATS, Ratio, about_run, count, make_parser, run_generate, run_program, save

from cli import UserError, print_status, run_command

SAMPLES = 3  # in each process
MODES = {"eager": "", "compiled": "--compile"}
RATES = {"decode": "decode_tokens_per_s", "prefill": "warm_prefill_tokens_per_s"}


def find_checkpoints(args, folder: Path) -> dict[str, str]:
    """format -> the option that names its checkpoint. The old tree makes what was not given: both can read that."""
    source = ["--checkpoint_path", args.checkpoint_path] if args.checkpoint_path else []
    found = {"bf16": shlex.join(source)}
    for format in ("int8", "int4"):
        directory = getattr(args, format)
        if directory is None and format in args.formats:
            print_status(f"quantizing to {format}")
            directory = folder / format
            run_program(args.old / "quantize.py", *source, "--mode", format, "--out", directory)
        found[format] = shlex.join(["--checkpoint_path", str(directory)])
    return found


def run_case(args, tree: Path, options: str, rows: int) -> dict[str, float]:
    options += f" --device {args.device}" * (args.device is not None)
    result = run_generate(tree, options, args.prompt_tokens, args.new_tokens, SAMPLES, rows)
    return {kind: result[key] for kind, key in RATES.items()}


def measure(args, checkpoints: dict[str, str]) -> list[dict]:
    """A row for each case, with all rounds' rates; those that failed in a tree have an "error" instead."""
    trees = {"old": args.old, "new": args.new}
    rows = []
    for format, mode, n in itertools.product(args.formats, args.modes, args.rows):
        rates = {tree: {kind: [] for kind in RATES} for tree in trees}
        rows.append({"format": format, "mode": mode, "rows": n, "rates": rates})
    for i in range(args.rounds):
        for row in (row for row in rows if "error" not in row):
            name = f"{row['format']}, {row['mode']}, rows: {row['rows']}"
            for tree in ("old", "new") if i % 2 == 0 else ("new", "old"):
                print_status(f"round {i + 1} of {args.rounds}: {name}, {tree}")
                options = f"{checkpoints[row['format']]} {MODES[row['mode']]}"
                try:
                    for kind, rate in run_case(args, trees[tree], options, row["rows"]).items():
                        row["rates"][tree][kind].append(rate)
                except UserError as error:
                    row["error"] = f"{tree}: {error}"
                    print_status(f"left out: {row['error']}")
                    break
    return rows


def main():
    parser = make_parser(__doc__, rounds=6)
    add = parser.add_argument
    add("old", type=Path, help="a checkout")
    add("new", type=Path, help="another")
    for format in ("int8", "int4"):
        add(f"--{format}", type=Path, metavar="DIR", help=f"{format} checkpoint (made by the old tree's quantize.py)")
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="bf16, int8, int4 (all)")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="eager, compiled (both)")
    add("--rows", nargs="+", type=count, default=[1, 8], help="(1 8)")
    add("--prompt_tokens", type=count, default=512, help="of each row (512)")
    add("--new_tokens", type=count, default=64, help="of each row (64)")
    add("--device", help="cpu, cuda ...; without it the fastest there is")
    args = parser.parse_args()
    for tree in (args.old, args.new):
        if not (tree / "generate.py").exists():
            raise UserError(f"{tree} is no checkout: it has no generate.py")
    if args.new_tokens < 2:
        raise UserError("--new_tokens must be at least 2: the first is prefill's")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, find_checkpoints(args, Path(folder)))
    for row in rows:
        line = f"{row['format']:5} {row['mode']:9} rows: {row['rows']:<3}"
        for kind in RATES if "error" not in row else ():
            old, new = (row["rates"][tree][kind] for tree in ("old", "new"))
            ratio = Ratio.of(new, old)
            row |= ratio.fields(f"{kind}_new_over_old")
            line += f"  {kind} {median(old):8.1f} -> {median(new):8.1f}  {ratio}"
        print(line + (f"  {row['error']}" if "error" in row else ""))
    counts = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    save(about_run() | counts | {"rows": rows}, args.out, "trees")


if __name__ == "__main__":
    run_command(main)
