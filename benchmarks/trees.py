"""Two checkouts of this repository against each other: `python benchmarks/trees.py ../old .`

Only through the command line (generate.py --json), because what is inside may differ; both must be able to read the
checkpoints that this checkout writes. A case is a format of the weights, eager or --compile, and a number of rows, each
with the same prompt. In each round of a case, either tree runs once, one process at a time, and the tree that goes
first changes from round to round: old, new, new, old. A ratio new / old is the median of the ratios within the rounds.
Prefill leaves out the first sample of each process, and compilation is in no rate.
"""

import itertools
from functools import partial
from pathlib import Path

import measure
from measure import FORMATS, RATES, column, count, ratio

from cli import print_status, run_command

MODES = {"eager": [], "compiled": ["--compile"]}


def run_tree(args, tree: Path, flags: list, rows: int) -> dict:
    result = measure.run_generate(tree, flags, args.prompt_tokens, args.new_tokens, rows)
    return {rate: result[rate] for rate in RATES}


def measure_case(args, format: str, mode: str, rows: int) -> dict:
    """Rates of both trees and their ratios."""
    print_status(f"{format}, {mode}, rows: {rows}")
    flags = [*MODES[mode], "--checkpoint_path", measure.quantized(args.checkpoint_path, format)]
    turns = {name: partial(run_tree, args, getattr(args, name), flags, rows) for name in ("old", "new")}
    rounds = measure.take_turns(turns, args.rounds, warm_up=0)
    case = {"format": format, "mode": mode, "rows": rows}
    for kind, rate in zip(("decode", "prefill"), RATES):
        case |= ratio(f"{kind}_new_over_old", column(rounds["new"], rate), column(rounds["old"], rate))
    return case | {tree: measure.medians(rounds[tree]) for tree in rounds}


def main():
    parser = measure.make_parser(__doc__, {"--rounds": 6, "--prompt_tokens": 512, "--new_tokens": 64})
    add = parser.add_argument
    add("old", type=Path, help="a checkout")
    add("new", type=Path, help="another")
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the weights; all")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="both")
    add("--rows", nargs="+", type=count, default=[1, 8], help="of a batch; 1 and 8")
    args = parser.parse_args()
    cases = [measure_case(args, *case) for case in itertools.product(args.formats, args.modes, args.rows)]
    columns = {"format": "", "mode": "", "rows": ""}
    for kind in ("decode", "prefill"):
        columns |= {f"{kind}_new_over_old": ".2f", f"{kind}_new_over_old_spread": ".2f"}
    measure.print_table(cases, columns)
    about = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    measure.save("trees", about | {"rows": cases}, args.out)


if __name__ == "__main__":
    run_command(main)
