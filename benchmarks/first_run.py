"""Prompt lookup beside plain decoding, each time the first run of a fresh process: what a user of generate.py sees.

Twelve open prompts, which ask questions, and twelve that ask for code or text to be repeated or edited. In each round a
prompt runs with `--draft prompt-lookup` and, before and after it, with `--draft none`. The ratio of the decode rates
counts, to the mean of the two plain runs; "control" is the ratio of these two, and shows how much such runs vary by
themselves. With --rows 8, all rows have the same prompt and different seeds (with --temperature 0 they also have the
same text).
"""

import json
import math
import shlex
import sys
from statistics import median

import measure
from measure import DECODE, ROOT, quantized
from speculation import OPEN

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
    """One run of generate.py."""
    command = ["--checkpoint_path", path, "--chat", "--prompt", prompt, "--batch_size", args.rows, "--draft", draft]
    command += ["--max_new_tokens", args.new_tokens, "--temperature", args.temperature, "--ignore_eos", "--json"]
    result = json.loads(measure.run_program(sys.executable, ROOT / "generate.py", *command, *shlex.split(args.options)))
    return {"rate": result[DECODE], "tokens": [sample["token_ids"] for sample in result["samples"]]}


def compare(args, path, prompt: str) -> dict:
    """One prompt: the medians of the rounds' ratios."""
    rounds = []
    for _ in range(args.rounds):
        runs = [run(args, path, prompt, draft) for draft in ("none", "prompt-lookup", "none")]
        rates, tokens = measure.column(runs, "rate"), measure.column(runs, "tokens")
        control, over_plain = rates[2] / rates[0], 2 * rates[1] / (rates[0] + rates[2])
        same = tokens[0] == tokens[1] == tokens[2]
        rounds.append({"over_plain": over_plain, "control": control, "plain": rates[0], "same_tokens": same})
    found = {key: median(measure.column(rounds, key)) for key in ("over_plain", "control", "plain")}
    return found | {"same_tokens": all(measure.column(rounds, "same_tokens"))}


def summarize(rows: list[dict]) -> dict:
    """Over the prompts of a kind."""
    ratios, controls = measure.column(rows, "over_plain"), measure.column(rows, "control")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    about = {"geometric_mean": mean, "median": median(ratios), "least": min(ratios), "most": max(ratios)}
    about |= {"control": median(controls), "least_control": min(controls)}
    return about | {"same_tokens": all(row["same_tokens"] for row in rows)}


def main():
    parser = measure.make_parser(__doc__, {"--new_tokens": 64, "--rows": 1, "--prompts": 12, "--rounds": 3})
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0.0, greedy")
    parser.add_argument("--options", default="", help="further options of generate.py, for example --options=--compile")
    parser.add_argument("--format", choices=measure.WITH_FILE, default="file", help="of the weights (file)")
    args = parser.parse_args()
    path, rows = quantized(args.checkpoint_path, args.format), []
    kinds = {"open": OPEN.replace("\n", "|").split("|"), "copying": copying_prompts()}
    for kind, prompts in kinds.items():
        for prompt in prompts[: args.prompts]:
            rows.append({"prompts": kind} | compare(args, path, prompt))
            print_status(f"{kind}: {rows[-1]['over_plain']:.2f}x of {rows[-1]['plain']:.0f} tokens/s")
    table = [{"prompts": kind} | summarize([row for row in rows if row["prompts"] == kind]) for kind in kinds]
    columns = {"prompts": "", "geometric_mean": ".3f", "median": ".2f", "least": ".2f", "most": ".2f"}
    columns |= {"control": ".2f", "least_control": ".2f"}
    measure.print_table(table, columns | {"same_tokens": ""})
    options = {key: getattr(args, key) for key in ("new_tokens", "rows", "rounds", "temperature", "options", "format")}
    about = {"model": open_checkpoint(str(path)).name, "summary": table, "runs": rows}
    measure.save("first_run", options | about, args.out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
