"""Two checkouts of this repository against each other: `python benchmarks/trees.py ../old .`

Only through the command line (generate.py --json), because what is inside may differ. A case is a format of the
weights, eager or --compile, and a number of rows, each with the same prompt. In each round of a case, either tree runs
once, one process at a time, and the tree that goes first changes from round to round: old, new, new, old. A ratio
new / old is the median of the ratios within the rounds. Prefill leaves out the first sample of each process, and
compilation is in no rate.
"""

import itertools
import shlex
import tempfile
from functools import partial
from pathlib import Path

import measure
from measure import FORMATS, RATES, column, count, ratio

from cli import UserError, print_status, run_command

SAMPLES = 3  # in each process
MODES = {"eager": "", "compiled": "--compile"}


def checkpoint_option(args, format: str, folder: Path) -> str:
    """The option of generate.py that names the checkpoint. The old tree quantizes, so both can read the result."""
    source = ["--checkpoint_path", args.checkpoint_path] if args.checkpoint_path else []
    if format == "bf16":
        return shlex.join(source)
    directory = folder / format
    if not directory.exists():
        print_status(f"quantizing to {format}")
        measure.run_program(args.old / "quantize.py", *source, "--mode", format, "--out", directory)
    return shlex.join(["--checkpoint_path", str(directory)])


def measure_case(args, options: str, rows: int) -> dict:
    """Rates of both trees and their ratios; an "error" if one of the trees fails."""

    def run(tree: Path) -> dict:
        result = measure.run_generate(tree, options, args.prompt_tokens, args.new_tokens, SAMPLES, rows)
        return {rate: result[rate] for rate in RATES}

    turns = {name: partial(run, getattr(args, name)) for name in ("old", "new")}
    try:
        rounds, left_out = measure.take_turns(turns, args.rounds, warm_up=0)
    except UserError as error:
        return {"error": str(error)}
    if left_out:
        [(tree, line)] = left_out.items()
        return {"error": f"{tree}: {line}"}
    case = {}
    for kind, rate in zip(("decode", "prefill"), RATES):
        new, old = column(rounds["new"], rate), column(rounds["old"], rate)
        case |= ratio(f"{kind}_new_over_old", new, old)
    return case | {tree: measure.medians(rounds[tree]) for tree in rounds}


def main():
    parser = measure.make_parser(__doc__, rounds=6, prompt_tokens=512, new_tokens=64)
    add = parser.add_argument
    add("old", type=Path, help="a checkout")
    add("new", type=Path, help="another")
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the weights")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="eager or compiled")
    add("--rows", nargs="+", type=count, default=[1, 8], help="of a batch")
    args = parser.parse_args()
    for tree in (args.old, args.new):
        if not (tree / "generate.py").exists():
            raise UserError(f"{tree} is not a checkout: it has no generate.py")
    if args.new_tokens < 2:
        raise UserError("--new_tokens must be at least 2: the first is prefill's")
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for format, mode, rows in itertools.product(args.formats, args.modes, args.rows):
            print_status(f"{format}, {mode}, rows: {rows}")
            options = f"{checkpoint_option(args, format, Path(folder))} {MODES[mode]}"
            cases.append({"format": format, "mode": mode, "rows": rows} | measure_case(args, options, rows))
    columns = {"format": "", "mode": "", "rows": ""}
    for kind in ("decode", "prefill"):
        columns |= {f"{kind}_new_over_old": ".2f", f"{kind}_new_over_old_spread": ".2f"}
    measure.print_table(cases, columns | {"error": ""})
    counts = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    measure.save(measure.about_run() | counts | {"rows": cases}, args.out, "trees")


if __name__ == "__main__":
    run_command(main)
