"""Are greedy tokens and their log-probabilities the same bits, however a request is run?

`python benchmarks/exactness.py --models A.gguf B.gguf` runs the same eight prompts (the beginnings of
pages of docs/, 5 to 600 tokens) in each model under the conditions below, and compares each answer
with that of the base run: cold, alone, with default options. EOS tokens are ignored. The peers that
are named (--llama_server, --ik_llama_server, --transformers) are compared with their own base runs.

  again                        the base run, a second time
  without log-probabilities    nothing but tokens is asked for, so a step may skip logits
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
prompts. "not used" means that nothing was reused or proposed. The cost is the time of our steps
divided by their time without the promise; there is no version without it yet ("-").

Read down: the comparison; our engine; our server; the table. The peers are in answers.py.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import measure
from answers import (
    ROWS,
    THREADS,
    Answers,
    Condition,
    K,
    page_prompts,
    peer_conditions,
    post,
    prefix,
    reread,
    running,
    threads,
    transformers_conditions,
)
from measure import GREEDY, PEERS, ROOT, WITH_FILE

from checkpoint import Checkpoint, is_ours
from cli import UserError, print_status, run_command
from compile import warm_up
from engine import Engine, Request, common_prefix_length, generate
from load import is_own_draft, load_engine, open_checkpoint
from options import ModelOptions
from server.api import ServedModel

CHUNK = 37  # tokens; no multiple of a kernel's tile
APART = 3  # steps between requests that join one by one
DRAFTS = {"prompt lookup": "prompt-lookup", "MTP": "mtp", "Medusa": "medusa", "int4-self": "int4-self"}

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
        return {"left_out": answers}
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


# ---------------------------------------------------------------- our engine


def answers_of(requests: list[Request], used: int | None = None) -> Answers:
    if failed := [request.error for request in requests if request.error]:
        raise UserError(f"a request failed: {failed[0]}")
    logprobs = None
    if requests[0].logprobs is not None:
        logprobs = [[own for own, _ in request.token_logprobs] for request in requests]
    return Answers([request.new_tokens for request in requests], logprobs, used)


def run_alone(engine: Engine, prompts: list, new: int, warm: bool = False, logprobs: int | None = 0) -> Answers:
    """Each prompt alone. warm: a prefix of it was read before."""
    requests = []
    for prompt in prompts:
        engine.clear()
        if warm and prefix(prompt):
            generate(engine, [Request(prefix(prompt), GREEDY, 0)])
        requests.append(Request(prompt, GREEDY, new, logprobs=logprobs))
        generate(engine, requests[-1:])
    return answers_of(requests, sum(request.cached_tokens for request in requests) if warm else None)


def run_beside(engine: Engine, prompts: list, new: int, apart: int = 0) -> Answers:
    """All prompts together. apart: the steps after which the next request joins."""
    engine.clear()
    requests = [Request(prompt, GREEDY, new, logprobs=0) for prompt in prompts]
    for request in requests:
        engine.add(request)
        for _ in range(apart):
            engine.step()
    while engine.has_requests:
        engine.step()
    return answers_of(requests)


def run_drafted(load: Callable[..., Engine], checkpoint: Checkpoint, draft: str, prompts: list, new: int) -> Answers:
    """Each prompt alone, with a draft. UserError if the model cannot have it."""
    if is_own_draft(checkpoint, ModelOptions(draft=[draft])):
        raise UserError("the file would be the draft of its dequantized weights, which are another model")
    engine = load(draft=[draft], speculate_k=K)
    found = run_alone(engine, prompts, new)
    counts = engine.decoding.draft_counts.values()
    return replace(found, used=sum(count["proposed_tokens"] for count in counts))


def run_compiled(load: Callable[..., Engine], prompts: list, new: int) -> Answers:
    engine = load(compile=True, compile_prefill=True)
    warm_up(engine, prompts[:1], random=False)
    return run_alone(engine, prompts, new)


def our_conditions(source: str, prompts: list, new: int, log: Path) -> Iterator[Condition]:
    """What our engine and our server answer. log: a file for what the server prints."""
    checkpoint = open_checkpoint(source)
    length = max(map(len, prompts)) + new

    def load(**options) -> Engine:
        return load_engine(checkpoint, ModelOptions(**options), ROWS, length)

    engine = load()
    base = run_alone(engine, prompts, new)
    yield "base", base
    yield "again", run_alone(engine, prompts, new)
    yield "without log-probabilities", run_alone(engine, prompts, new, logprobs=None)
    yield "warm", run_alone(engine, prompts, new, warm=True)
    yield "reread", reread(partial(run_alone, engine), base, prompts, new)
    yield "beside seven others", run_beside(engine, prompts, new)
    yield "joining one by one", run_beside(engine, prompts, new, APART)
    default = engine.options
    engine.options = replace(default, chunk_tokens=CHUNK, always_chunk=True)
    yield "other chunks", run_alone(engine, prompts, new)
    engine.options = default
    engine.threads.fixed = True
    for name, n in THREADS.items():
        with threads(n):
            yield name, run_alone(engine, prompts, new)
    del engine  # before the next one is loaded

    runs = {name: partial(run_drafted, load, checkpoint, draft) for name, draft in DRAFTS.items()}
    runs["compiled"] = partial(run_compiled, load)
    for name, run in runs.items():
        try:
            yield name, run(prompts, new)
        except UserError as error:
            yield name, str(error)
    yield from our_server(source, checkpoint, base, prompts, new, log)


def our_server(
    source: str, checkpoint: Checkpoint, base: Answers, prompts: list, new: int, log: Path
) -> Iterator[Condition]:
    """What our server answers. It gives the texts of tokens: a text that is not the base's becomes the id -1."""
    length = max(map(len, prompts)) + new
    served = ServedModel(checkpoint.config, checkpoint.tokenizer_files, "", length)
    body = {"max_tokens": new, "temperature": 0, "ignore_eos": True, "logprobs": 0}

    def ask(port: int, prompt: list[int]) -> dict:
        return post(port, "/v1/completions", body | {"prompt": prompt})["choices"][0]["logprobs"]

    def ids_of(texts: list[str], ids: list[int]) -> list[int]:
        return [i if served.token_text(i) == text else -1 for text, i in zip(texts, ids)]

    command = [sys.executable, ROOT / "serve.py", "--checkpoint_path", source]
    with running([*command, "--max_batch_size", ROWS, "--max_seq_length", length], log) as port:
        for name, workers in {"over HTTP": 1, "over HTTP, all at once": ROWS}.items():
            with ThreadPoolExecutor(workers) as pool:
                found = list(pool.map(partial(ask, port), prompts))
            tokens = [ids_of(one["tokens"], ids) for one, ids in zip(found, base.tokens)]
            yield name, Answers(tokens, [one["token_logprobs"] for one in found])


# ---------------------------------------------------------------- the table


def programs(args, source: str | None, prompts: list, log: Path) -> Iterator[tuple[str, Iterator[Condition]]]:
    """The name of each program that runs a model, and its conditions."""
    for format in args.formats:
        path = measure.quantized(source, format)
        yield f"fastpath {format}", our_conditions(str(path), prompts, args.new_tokens, log)
    gguf = measure.quantized(source, "file")
    for name, program in measure.peer_programs(args, "server").items():
        options = getattr(args, f"{PEERS[name].prefix}_options")
        if gguf.suffix == ".gguf":
            yield name, peer_conditions(program, options, gguf, prompts, args.new_tokens, log)
        else:
            print_status(f"{name} is left out: {gguf.name} is not a GGUF file")
    if args.transformers and not (gguf.is_dir() and is_ours(gguf)):
        yield "transformers bf16", transformers_conditions(source, prompts, args.new_tokens)


def print_columns(columns: list[dict]):
    """A row for each condition, a column for each program and model, and the cost of the promise."""
    names = dict.fromkeys(name for column in columns for name in column["conditions"])
    rows = []
    for name in names:
        row = {"condition": name, "cost": "-"}
        for column in columns:
            if name in column["conditions"]:
                row[f"{column['program']}, {column['model']}"] = cell(column["conditions"][name])
        rows.append(row)
    titles = [f"{column['program']}, {column['model']}" for column in columns]
    measure.print_table(rows, dict.fromkeys(["condition", *titles, "cost"], ""))


def main():
    parser = measure.make_parser(__doc__, {"--new_tokens": 64})
    add = parser.add_argument
    add("--models", nargs="+", help="several models, each as for --checkpoint_path")
    add("--formats", nargs="+", choices=WITH_FILE, default=["file"], help="of our weights (file: the model's own)")
    for name, peer in PEERS.items():
        add(f"--{peer.prefix}_server", metavar="PROGRAM", type=Path, help=f"{name}'s llama-server")
        add(f"--{peer.prefix}_options", metavar="OPTIONS", default="", help="more options for it")
    add("--transformers", action="store_true", help="also transformers, in bf16")
    args = parser.parse_args()

    columns = []
    with tempfile.TemporaryDirectory() as folder:
        for source in args.models or [args.checkpoint_path]:
            checkpoint = open_checkpoint(source)
            prompts = page_prompts(checkpoint.tokenizer.encode)
            for program, conditions in programs(args, source, prompts, Path(folder) / "server.log"):
                print_status(f"{program}, {checkpoint.name}")
                column = {"program": program, "model": checkpoint.name, "cost": None}
                columns.append(column | {"conditions": compare_all(conditions)})
                about = {"prompt_tokens": [len(prompt) for prompt in prompts], "new_tokens": args.new_tokens}
                measure.save("exactness", about | {"columns": columns}, args.out)
    print_columns(columns)


if __name__ == "__main__":
    run_command(main)
