"""Prompt lookup beside plain decoding, each time the first run of a fresh process: what a user of generate.py sees.

Twelve prompts are open: they ask questions. Twelve ask for code or text to be repeated or edited. In
each round a prompt runs with `--draft prompt-lookup` and, before and after it, with `--draft none`.
The ratio of the decode rates counts, to the mean of the two plain runs; "control" is the ratio of
these two, and shows how much such runs vary by themselves. With --rows 8, all rows have the same
prompt and different seeds (with --temperature 0 they also have the same text).
"""

import json
import math
import shlex
import sys
from statistics import median

import measure
from measure import DECODE, ROOT, column, quantized
from speculation import OPEN_PROMPTS

from cli import print_status, run_command
from load import choose_device, open_checkpoint

EDITS = [
    "Add type annotations to every function of this code, and print the whole code",
    "Rename the variable x to value everywhere in this code, and print the whole code",
    "Fix the typing errors in this code if there are any, and print the whole code again",
    "Write this out again, exactly as it is",
]
FILES = ("sampling.py", "engine.py", "README.md")


def copying_prompts() -> list[str]:
    """Each request of EDITS for a piece of each of FILES."""
    texts = [(ROOT / name).read_text() for name in FILES]
    return [f"{edit}:\n\n{text[3000:3900]}" for text in texts for edit in EDITS]


def run(args, path, prompt: str, draft: str) -> dict:
    """Run generate.py once."""
    command = [sys.executable, ROOT / "generate.py", "--checkpoint_path", path, "--chat", "--json"]
    command += ["--prompt", prompt, "--batch_size", args.rows, "--draft", draft, "--ignore_eos"]
    command += ["--max_new_tokens", args.new_tokens, "--temperature", args.temperature]
    result = json.loads(measure.run_program(*command, *shlex.split(args.options)))
    return {"rate": result[DECODE], "tokens": column(result["samples"], "token_ids")}


def compare(args, path, prompt: str) -> dict:
    """The medians of the ratios of the rounds with one prompt."""
    rounds = []
    for _ in range(args.rounds):
        before = run(args, path, prompt, "none")
        lookup = run(args, path, prompt, "prompt-lookup")
        after = run(args, path, prompt, "none")
        row = {"over_plain": 2 * lookup["rate"] / (before["rate"] + after["rate"])}
        row |= {"control": after["rate"] / before["rate"], "plain": before["rate"]}
        row["same_tokens"] = before["tokens"] == lookup["tokens"] == after["tokens"]
        rounds.append(row)

    found = {key: median(column(rounds, key)) for key in ("over_plain", "control", "plain")}
    return found | {"same_tokens": all(column(rounds, "same_tokens"))}


def summarize(rows: list[dict]) -> dict:
    """The ratios of all prompts of one kind."""
    ratios = column(rows, "over_plain")
    controls = column(rows, "control")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {
        "geometric_mean": mean,
        "median": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "control": median(controls),
        "least_control": min(controls),
        "same_tokens": all(column(rows, "same_tokens")),
    }


def main():
    parser = measure.make_parser(__doc__, {"--new_tokens": 64, "--rows": 1, "--prompts": 12, "--rounds": 3})
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, help="default: 0.0, greedy")
    add("--options", default="", help="further options of generate.py, for example --options=--compile")
    add("--format", choices=measure.WITH_FILE, default="file", help="format of the weights (file)")
    args = parser.parse_args()

    path = quantized(args.checkpoint_path, args.format)
    rows = []
    table = []
    for kind, prompts in {"open": OPEN_PROMPTS, "copying": copying_prompts()}.items():
        of_kind = []
        for prompt in prompts[: args.prompts]:
            row = {"prompts": kind} | compare(args, path, prompt)
            print_status(f"{kind}: {row['over_plain']:.2f}x of {row['plain']:.0f} tokens/s")
            of_kind.append(row)
        rows += of_kind
        table.append({"prompts": kind} | summarize(of_kind))

    columns = {"prompts": "", "geometric_mean": ".3f", "median": ".2f", "least": ".2f"}
    columns |= {"most": ".2f", "control": ".2f", "least_control": ".2f", "same_tokens": ""}
    measure.print_table(table, columns)
    shown = ("new_tokens", "rows", "rounds", "temperature", "options", "format")
    about = {key: getattr(args, key) for key in shown}
    about |= {"model": open_checkpoint(str(path)).name, "summary": table, "runs": rows}
    measure.save("first_run", about, args.out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
