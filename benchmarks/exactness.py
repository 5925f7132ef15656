"""Are greedy tokens and their log-probabilities the same bits, however a request is run?

`python benchmarks/exactness.py --models A.gguf B.gguf` runs the same eight prompts (the beginnings of
pages of docs/, 5 to 600 tokens) in each model under the conditions below, and compares each answer
with that of the base run: cold, alone, with default options. EOS tokens are ignored. The peers that
are named (--llama_server, --ik_llama_server, --transformers) are compared with their own base runs.

  again                        the base run, a second time
  without log-probabilities    nothing but tokens is asked for, so a step may skip logits
  with the likeliest tokens    their log-probabilities are asked for as well
  warm                         two thirds of a prompt were read before, and are reused
  reread                       prompt and half of its answer are the prompt: prefill reads what decode
                               wrote, and the other half is compared
  beside seven others          the eight requests come at once
  joining one by one           each request comes some steps after the one before it
  other chunks                 a prompt is read in smaller pieces
  1 thread, 2 threads          in each step
  prompt lookup ... int4-self  speculation with 4 proposed tokens; a model may lack the draft
  compiled                     with --compile and --compile_prefill
  over HTTP                    from a server with its default options, one by one and all at once

A cell is "same", or says where the first token or log-probability ("bits") differs, and in how many
prompts. "not used" means that nothing was reused or proposed.

The price of the promise (--price) is what our steps take, divided by the time of a version that is
free to add in any order: the same weights in bf16, whose prefill oneDNN computes, or plain PyTorch.
Below 1, the promise costs nothing that these could give back. Decode reads fewer bytes than bf16 does,
so only passes of many tokens, which arithmetic limits, are compared.

Read down: the comparison; the price; the table. What each program answers is in answers.py.
"""

import re
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import measure
import torch
from answers import LENGTHS, Answers, Condition, our_conditions, page_prompts, peer_conditions, transformers_conditions
from measure import PEERS, WITH_FILE

from checkpoint import Checkpoint, is_ours
from cli import UserError, print_status, run_command
from engine import Engine, Request, common_prefix_length, generate
from load import load_engine, open_checkpoint
from options import ModelOptions

# ---------------------------------------------------------------- the comparison


def difference(base: Iterable[list], others: Iterable[list]) -> dict:
    """The number of prompts whose lists differ, and the first place of a difference, or None."""
    pairs = zip(base, others, strict=True)
    places = [common_prefix_length(a, b) for a, b in pairs if a != b]
    return {"differing": len(places), "first": min(places, default=None)}


def bits(logprobs: list[list[float]]) -> list[list[str]]:
    """Numbers as texts. Two texts are equal if and only if the bits are (except for NaN)."""
    return [[float(number).hex() for number in line] for line in logprobs]


def compare(base: Answers, answers: Answers | str) -> dict:
    """The differences of a condition from the base run. answers: a text says why it is left out."""
    if isinstance(answers, str):
        return {"left_out": re.sub(r"/\S+/", "", answers)}  # without folders, which say nothing elsewhere
    found = {"prompts": len(base.tokens), "used": answers.used, "logprobs": None}
    found["tokens"] = difference(base.tokens, answers.tokens)
    if base.logprobs is not None and answers.logprobs is not None:
        found["logprobs"] = difference(bits(base.logprobs), bits(answers.logprobs))
    return found


def compare_all(conditions: Iterator[Condition]) -> dict[str, dict]:
    """The result of `compare` for each condition after the base run."""
    _, base = next(conditions)
    found = {}
    for name, answers in conditions:
        found[name] = compare(base, answers)
        print_status(f"{name}: {found[name].get('left_out') or cell(found[name])}")
    return found


def cell(found: dict) -> str:
    """The result of `compare` in a few words."""
    if "left_out" in found:
        return "left out"
    parts = []
    for word, one in {"token": found["tokens"], "bits": found["logprobs"]}.items():
        if one and one["differing"]:
            parts.append(f"{word} {one['first']} ({one['differing']}/{found['prompts']})")
    words = [", ".join(parts) or "same"]
    if found["logprobs"] is None:
        words.append("(tokens only)")
    if found["used"] == 0:
        words.append("(not used)")
    return " ".join(words)


# ---------------------------------------------------------------- the price

FREE = {"bf16": {"dequantize": True}, "plain PyTorch": {"dequantize": True, "kernels": "torch"}}


def prefill_s(engine: Engine, tokens: int) -> float:
    """The seconds of a step that reads a prompt and makes one token."""
    engine.clear()
    prompt = torch.randint(300, 4000, (tokens,)).tolist()
    return measure.seconds(partial(generate, engine, [Request(prompt, measure.GREEDY, 1)]))


def prices(checkpoint: Checkpoint, rounds: int) -> dict[str, dict]:
    """For each number of tokens, the time of our prefill divided by that of the fastest version of FREE."""
    names = {"promise": {}} | FREE
    engines = {name: load_engine(checkpoint, ModelOptions(**options), 1, 1024) for name, options in names.items()}
    found = {}
    for tokens in (64, 512):
        work = {name: partial(prefill_s, engine, tokens) for name, engine in engines.items()}
        times = measure.take_turns(work, rounds)
        best = min(FREE, key=lambda name: median(times[name]))
        found[f"prefill of {tokens}"] = {"free": best} | measure.ratio("price", times["promise"], times[best])
    return found


# ---------------------------------------------------------------- the table


def programs(args, source: str | None, checkpoint: Checkpoint, log: Path) -> Iterator[tuple[str, Iterator[Condition]]]:
    """The name of each program that runs a model, and its conditions."""
    prompts = page_prompts(checkpoint.tokenizer.encode)
    new = args.new_tokens
    file = checkpoint.path
    for format in args.formats:
        path = measure.quantized(source, format)
        yield f"fastpath {format}", our_conditions(str(path), prompts, new, log)
    for name, program in measure.peer_programs(args, "server").items():
        options = getattr(args, f"{PEERS[name].prefix}_options")
        if file.suffix == ".gguf":
            yield name, peer_conditions(program, options, file, prompts, new, log)
        else:
            print_status(f"{name} is left out: {file.name} is not a GGUF file")
    if args.transformers and not (file.is_dir() and is_ours(file)):
        yield "transformers bf16", transformers_conditions(str(file), prompts, new)


def print_columns(columns: list[dict]):
    """A row for each condition, first those in which we differ, and a column for each program and model."""
    rows = {name: {"condition": name} for column in columns for name in column["conditions"]}
    for column in columns:
        for name, found in column["conditions"].items():
            rows[name][f"{column['program']}, {column['model']}"] = cell(found)
    titles = [f"{column['program']}, {column['model']}" for column in columns]
    ours = [title for title in titles if title.startswith("fastpath")]

    def all_same(row: dict) -> bool:
        return all(row.get(title, "same").startswith(("same", "left out")) for title in ours)

    measure.print_table(sorted(rows.values(), key=all_same), dict.fromkeys(["condition", *titles], ""))


def main():
    parser = measure.make_parser(__doc__, {"--new_tokens": 64, "--rounds": 5})
    add = parser.add_argument
    add("--models", nargs="+", help="several models, each as for --checkpoint_path")
    add("--formats", nargs="+", choices=WITH_FILE, default=["file"], help="of our weights (file: the model's own)")
    for name, peer in PEERS.items():
        add(f"--{peer.prefix}_server", metavar="PROGRAM", type=Path, help=f"{name}'s llama-server")
        add(f"--{peer.prefix}_options", metavar="OPTIONS", default="", help="more options for it")
    add("--transformers", action="store_true", help="also transformers, in bf16")
    add("--price", action="store_true", help="also measure what the promise costs")
    args = parser.parse_args()

    checkpoints = {source: open_checkpoint(source) for source in args.models or [args.checkpoint_path]}
    columns = []
    about = {"prompt_tokens": LENGTHS, "new_tokens": args.new_tokens, "columns": columns, "prices": {}}
    with tempfile.TemporaryDirectory() as folder:
        for source, checkpoint in checkpoints.items():
            for program, conditions in programs(args, source, checkpoint, Path(folder) / "server.log"):
                print_status(f"{program}, {checkpoint.name}")
                try:
                    compared = compare_all(conditions)
                except (UserError, ValueError) as error:  # a peer does not know the model, for example
                    print_status(f"{program} is left out: {error}")
                    continue
                columns.append({"program": program, "model": checkpoint.name, "conditions": compared})
                measure.save("exactness", about, args.out)
            if args.price:
                about["prices"][checkpoint.name] = prices(checkpoint, args.rounds)
                measure.save("exactness", about, args.out)
    print_columns(columns)
    for model, found in about["prices"].items():
        measure.print_table(
            [{"model": model, "pass": name} | one for name, one in found.items()],
            {"model": "", "pass": "", "free": "", "price": ".2f", "price_spread": ".2f"},
        )


if __name__ == "__main__":
    run_command(main)
