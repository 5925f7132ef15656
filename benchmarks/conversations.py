"""Eight conversations with a server: prompt lookup, its default draft, beside `--draft none`.

Each conversation has several turns, greedy, and sends the next one as soon as the last one is
answered. Half of them ask open questions, half ask for code or text to be repeated or edited. Every
round starts a fresh server of each kind, in turns, with a row for each conversation. The rate is
the number of all new tokens divided by the time from the first request to the last answer, reading
the prompts included.
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
from speculation import OPEN_PROMPTS

from cli import print_status, run_command
from load import choose_device, open_checkpoint

TURNS = {
    "open": ["Why is that so?", "Give an example.", "What would somebody say who disagrees?"],
    "copying": [
        "Write the same once more, with a comment in front.",
        "And again, without it.",
        "Once more, please.",
    ],
}
PATIENCE_S = 600


def converse(port: int, kind: str, first: str, args) -> list[str]:
    """The answers of a conversation."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    settings = {"max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True}
    messages = []
    answers = []
    for text in [first, *TURNS[kind][: args.turns - 1]]:
        messages.append({"role": "user", "content": text})
        body = json.dumps({"messages": messages} | settings).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answers.append(json.load(response)["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def run(args, path, kinds: list[str], draft: str) -> dict:
    """The rate of a fresh server with conversations of these kinds, and their texts."""
    port = measure.free_port()
    command = [sys.executable, ROOT / "serve.py", "--checkpoint_path", path, "--port", port]
    command += ["--max_batch_size", args.conversations, "--max_seq_length", 4096, "--draft", draft]
    prompts = {"open": OPEN_PROMPTS, "copying": copying_prompts()}
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
    add = parser.add_argument
    add("--format", choices=measure.WITH_FILE, default="file", help="format of the weights (file)")
    args = parser.parse_args()

    path = quantized(args.checkpoint_path, args.format)
    n = args.conversations
    alternating = [("open", "copying")[i % 2] for i in range(n)]
    mixes = {"open": ["open"] * n, "copying": ["copying"] * n, "both": alternating}
    table = []
    for name, kinds in mixes.items():
        turns = {draft: partial(run, args, path, kinds, draft) for draft in ("none", "prompt-lookup")}
        rounds = measure.take_turns(turns, args.rounds, warm_up=0)
        pairs = list(zip(rounds["none"], rounds["prompt-lookup"]))
        ratios = [lookup["rate"] / plain["rate"] for plain, lookup in pairs]
        rate = median(measure.column(rounds["none"], "rate"))
        same_texts = all(plain["texts"] == lookup["texts"] for plain, lookup in pairs)
        gain = median(ratios)
        print_status(f"{name}: {gain:.2f}x of {rate:.0f} tokens/s")
        row = {"conversations": name, "plain": rate, "over_plain": gain, "least": min(ratios)}
        table.append(row | {"same_texts": same_texts})

    columns = {"conversations": "", "plain": ".0f", "over_plain": ".2f", "least": ".2f"}
    measure.print_table(table, columns | {"same_texts": ""})
    about = {"model": open_checkpoint(str(path)).name, "turns": args.turns}
    about |= {"new_tokens": args.new_tokens, "format": args.format, "rows": table}
    measure.save("conversations", about, args.out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
