"""Eight conversations with a server: prompt lookup, its default draft, beside `--draft none`.

Each conversation has several turns, greedy, and sends the next one as soon as the last one is answered. Half of them
ask open questions, half ask for code or text to be repeated or edited. Every round starts a fresh server of each kind,
in turns, with a row for each conversation. The rate is that of all new tokens from the first request to the last
answer, reading the prompts included.
"""

import json
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import measure
from first_run import copying_prompts
from measure import ROOT, quantized
from speculation import OPEN

from cli import print_status, run_command
from load import choose_device, open_checkpoint

TURNS = {
    "open": ["Why is that so?", "Give an example.", "What would somebody say who disagrees?"],
    "copying": ["Write the same once more, with a comment in front.", "And again, without it.", "Once more, please."],
}
PATIENCE_S = 600


def converse(port: int, kind: str, first: str, args) -> list[str]:
    """The answers of a conversation."""
    messages, answers = [], []
    for text in [first, *TURNS[kind][: args.turns - 1]]:
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True}
        url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answers.append(json.load(response)["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def run(args, path, kinds: list[str], draft: list[str]) -> dict:
    """The rate of a fresh server with conversations of these kinds, and their texts."""
    port = measure.free_port()
    options = ["--max_batch_size", args.conversations, "--max_seq_length", 4096, *draft]
    command = [sys.executable, ROOT / "serve.py", "--checkpoint_path", path, "--port", port, *options]
    prompts = {"open": OPEN.replace("\n", "|").split("|"), "copying": copying_prompts()}
    chosen = [(kind, prompts[kind][i]) for i, kind in enumerate(kinds)]
    with (
        tempfile.TemporaryDirectory() as folder,
        measure.server(command, Path(folder) / "log", port),
        ThreadPoolExecutor(len(chosen)) as users,
    ):
        start = time.perf_counter()
        texts = list(users.map(lambda one: converse(port, *one, args), chosen))
        seconds = time.perf_counter() - start
    return {"rate": len(chosen) * args.turns * args.new_tokens / seconds, "texts": texts}


def main():
    counts = {"--rounds": 2, "--conversations": 8, "--turns": 3, "--new_tokens": 96}
    parser = measure.make_parser(__doc__, counts)
    parser.add_argument("--format", choices=measure.WITH_FILE, default="file", help="of the weights (file)")
    args = parser.parse_args()
    path, table = quantized(args.checkpoint_path, args.format), []
    n, half = args.conversations, args.conversations // 2
    mixes = {"open": ["open"] * n, "copying": ["copying"] * n, "both": ["open", "copying"] * half + ["open"] * (n % 2)}
    for name, kinds in mixes.items():
        turns = {draft: partial(run, args, path, kinds, ["--draft", draft]) for draft in ("none", "prompt-lookup")}
        rounds = measure.take_turns(turns, args.rounds, warm_up=0)
        pairs = list(zip(rounds["none"], rounds["prompt-lookup"]))
        ratios = [lookup["rate"] / plain["rate"] for plain, lookup in pairs]
        plain = median(measure.column(rounds["none"], "rate"))
        row = {"conversations": name, "plain": plain, "over_plain": median(ratios), "least": min(ratios)}
        row["same_texts"] = all(plain["texts"] == lookup["texts"] for plain, lookup in pairs)
        print_status(f"{name}: {row['over_plain']:.2f}x of {row['plain']:.0f} tokens/s")
        table.append(row)
    columns = {"conversations": "", "plain": ".0f", "over_plain": ".2f", "least": ".2f", "same_texts": ""}
    measure.print_table(table, columns)
    about = {"turns": args.turns, "new_tokens": args.new_tokens, "format": args.format, "rows": table}
    measure.save("conversations", {"model": open_checkpoint(str(path)).name} | about, args.out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
