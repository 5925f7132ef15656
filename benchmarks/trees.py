"""Compares the speed of two checkouts of this repository: `python benchmarks/trees.py ../old .`

It uses only their command line (generate.py --json), because their code may differ. Both must be able to read the
checkpoints that this checkout writes. A case is a format of the weights, eager or --compile, and a number of rows, each
with the same prompt. In each round of a case, each checkout runs once, one process at a time. The checkout that goes
first changes from round to round: old, new, new, old. A ratio new / old is the median of the ratios within the rounds.
The prefill rate leaves out the first sample of each process, and no rate includes compilation.
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
    add("old", type=Path, help="the directory of a checkout")
    add("new", type=Path, help="the directory of the other checkout")
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats of the weights (all)")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="eager, compiled (both)")
    add("--rows", nargs="+", type=count, default=[1, 8], help="batch sizes (1 and 8)")
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
