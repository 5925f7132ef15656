"""Are greedy tokens and their log-probabilities the same bits, however a request is run?

`python benchmarks/exactness.py --models A.gguf B.gguf` runs the same eight prompts (the beginnings of
pages of docs/, 5 to 600 tokens) in each model under the conditions below, and compares each answer
with that of the base run: cold, alone, with default options. EOS tokens are ignored. The peers that
are named (--llama_server, --ik_llama_server, --transformers) are compared with their own base runs.

  again                      the base run, a second time
  without log-probabilities  nothing but tokens is asked for, so a step may skip logits (tokens only)
  warm                       two thirds of the prompt were read before, and are reused
  reread                     a prompt is followed by the first half of its answer, so that prefill
                             reads what decode wrote; the second half is compared
  beside seven others        the eight requests come at once
  joining one by one         each comes some steps after the one before it
  other chunks               the prompt is read in smaller pieces
  1 thread, 2 threads        in each step
  prompt lookup ... int4-self  speculation with 4 proposed tokens; what a model lacks is left out
  compiled                   with --compile and --compile_prefill
  over HTTP                  from a server with default options, one by one and all at once

A cell is "same", or says in how many prompts tokens or log-probabilities ("bits") differ, and where
first. "(not used)": nothing was reused or drafted. The cost is the time of a step divided by that of
a version without the promise. There is no such version yet, so it is "-".

Read down: Answers and their comparison; our engine; servers; transformers; the table.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import measure
import torch
from decode import load_transformers
from measure import CPU, GREEDY, PEERS, ROOT

from checkpoint import is_ours
from cli import UserError, print_status, run_command
from compile import warm_up
from engine import Engine, Request, common_prefix_length, generate
from load import is_own_draft, load_engine, open_checkpoint
from options import ModelOptions
from server.api import ServedModel

LENGTHS = (5, 11, 23, 48, 97, 180, 320, 600)  # of the prompts, in tokens
ROWS = len(LENGTHS)
THREADS = {"1 thread": 1, "2 threads": 2}
CHUNK = 37  # tokens; no multiple of a kernel's tile
APART = 3  # steps between requests that join one by one
K = 4  # proposed tokens: with "auto", a draft that does not pay off would never be verified
DRAFTS = {"prompt lookup": "prompt-lookup", "mtp": "mtp", "medusa": "medusa", "int4-self": "int4-self"}
PEER_OPTIONS = {"other chunks": ["-b", "64", "-ub", "32"], "1 thread": ["-t", "1"], "2 threads": ["-t", "2"]}

# ---------------------------------------------------------------- answers


@dataclass
class Answers:
    """The answers to all prompts under one condition."""

    tokens: list[list]  # of each prompt: ids, or texts if a server gives no ids
    logprobs: list[list[float]] | None = None  # None: not asked for, or not computed
    used: int | None = None  # tokens that were reused or proposed; None: the condition does neither


Condition = tuple[str, Answers | str]  # its name, and the answers or why it is left out


def difference(base: Iterable[list], others: Iterable[list]) -> dict:
    """The number of prompts whose lists differ, and the first place of a difference, or None."""
    pairs = list(zip(base, others, strict=True))
    places = [common_prefix_length(a, b) for a, b in pairs if a != b]
    return {"differing": len(places), "first": min(places, default=None)}


def compare(base: Answers, answers: Answers | str) -> dict:
    """The differences of a condition from the base run. answers: a text says why it is left out."""
    if isinstance(answers, str):
        return {"left_out": answers}
    found = {"prompts": len(base.tokens), "used": answers.used}
    found["tokens"] = difference(base.tokens, answers.tokens)
    if answers.logprobs is not None and base.logprobs is not None:
        found["logprobs"] = difference(bits(base), bits(answers))
    return found


def bits(answers: Answers) -> list[list[str]]:
    """Numbers as texts that are equal if and only if their bits are (except for NaN)."""
    return [[float(number).hex() for number in line] for line in answers.logprobs]


def cell(found: dict) -> str:
    """The result of `compare` in a few words."""
    if "left_out" in found:
        return "left out"
    parts = []
    for key, word in {"tokens": "token", "logprobs": "bits"}.items():
        one = found.get(key, {"differing": 0})
        if one["differing"]:
            parts.append(f"{word} {one['first']} ({one['differing']}/{found['prompts']})")
    text = ", ".join(parts) or "same"
    if "logprobs" not in found:
        text += " (tokens only)"
    return f"{text} (not used)" if found["used"] == 0 else text


def page_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The beginnings of the longest pages of docs/, one for each of LENGTHS."""
    texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    texts.sort(key=len)
    return [encode(text)[:n] for text, n in zip(texts[-ROWS:], LENGTHS)]


def reread(run: Callable, base: Answers, prompts: list[list[int]], new: int) -> Answers:
    """The answers, the second halves of which run(prompts, new) writes after the first halves of the base."""
    n = new // 2
    found = run([prompt + tokens[:n] for prompt, tokens in zip(prompts, base.tokens)], new - n)
    tokens = [a[:n] + b for a, b in zip(base.tokens, found.tokens)]
    logprobs = [a[:n] + b for a, b in zip(base.logprobs, found.logprobs)]
    return Answers(tokens, logprobs)


@contextmanager
def threads(n: int):
    """A context in which torch has n threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- our engine


def run_alone(engine: Engine, prompts: list, new: int, warm: bool = False, logprobs: int | None = 0) -> Answers:
    """Each prompt alone. warm: two thirds of it were read before."""
    requests = []
    for prompt in prompts:
        engine.clear()
        if warm:
            generate(engine, [Request(prompt[: len(prompt) * 2 // 3], max_new_tokens=0)])
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


def answers_of(requests: list[Request], used: int | None = None) -> Answers:
    if failed := [request.error for request in requests if request.error]:
        raise UserError(f"a request failed: {failed[0]}")
    logprobs = None
    if requests[0].logprobs is not None:
        logprobs = [[own for own, _ in request.token_logprobs] for request in requests]
    return Answers([request.new_tokens for request in requests], logprobs, used)


def our_conditions(source: str, prompts: list, new: int, log: Path) -> Iterator[Condition]:
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
    del engine  # its memory is that of the next one

    for name, draft in DRAFTS.items():
        try:
            yield name, run_drafted(load, checkpoint, draft, prompts, new)
        except UserError as error:
            yield name, str(error)
    try:
        yield "compiled", run_compiled(load, prompts, new)
    except UserError as error:
        yield "compiled", str(error)
    yield from our_server(source, checkpoint, prompts, new, log)


def run_drafted(load: Callable[..., Engine], checkpoint, draft: str, prompts: list, new: int) -> Answers:
    """Each prompt alone, with a draft. UserError if the model cannot have it."""
    if is_own_draft(checkpoint, ModelOptions(draft=[draft])):
        raise UserError("the file would be the draft of its dequantized weights, which is another model")
    engine = load(draft=[draft], speculate_k=K)
    found = run_alone(engine, prompts, new)
    counts = engine.decoding.draft_counts.values()
    return replace(found, used=sum(count["proposed_tokens"] for count in counts))


def run_compiled(load: Callable[..., Engine], prompts: list, new: int) -> Answers:
    engine = load(compile=True, compile_prefill=True)
    warm_up(engine, prompts[:1], random=False)
    return run_alone(engine, prompts, new)


# ---------------------------------------------------------------- servers


def post(port: int, path: str, body: dict) -> dict:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


@contextmanager
def running(command: Sequence, log: Path):
    """Run a server until the end of the block. Yields its port."""
    port = measure.free_port()
    with measure.server([*command, "--port", port], log, port):
        yield port


def our_server(source: str, checkpoint, prompts: list, new: int, log: Path) -> Iterator[Condition]:
    """Its answers have the texts of tokens, so the base run's ids become texts, too."""
    length = max(map(len, prompts)) + new
    command = [sys.executable, ROOT / "serve.py", "--checkpoint_path", source]
    command += ["--max_batch_size", ROWS, "--max_seq_length", length]
    body = {"max_tokens": new, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    with running(command, log) as port:

        def ask(prompt: list[int]) -> dict:
            answer = post(port, "/v1/completions", body | {"prompt": prompt})
            return answer["choices"][0]["logprobs"]

        for name, workers in {"over HTTP": 1, "over HTTP, all at once": ROWS}.items():
            with ThreadPoolExecutor(workers) as pool:
                found = list(pool.map(ask, prompts))
            yield name, Answers([one["tokens"] for one in found], [one["token_logprobs"] for one in found])


def spec_types(program: Path) -> list[str]:
    """The kinds of speculation without a draft model that a llama-server knows, by its help."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True)
    text = done.stdout + done.stderr
    names = re.findall(r"\bngram-[a-z0-9]+(?:-[a-z0-9]+)*\b", text)
    return list(dict.fromkeys(names)) if "--spec-type" in text else []


def ask_peer(port: int, prompts: list, new: int, warm: bool = False, workers: int = 1) -> Answers:
    """All prompts, `workers` at a time. warm: as in run_alone."""
    body = {"n_predict": new, "temperature": 0, "repeat_penalty": 1.0, "ignore_eos": True, "n_probs": 1}
    body |= {"return_tokens": True, "cache_prompt": warm}
    if workers == 1:
        body["id_slot"] = 0

    def ask(prompt: list[int]) -> dict:
        if warm:
            post(port, "/completion", body | {"prompt": prompt[: len(prompt) * 2 // 3], "n_predict": 1})
        return post(port, "/completion", body | {"prompt": prompt})

    with ThreadPoolExecutor(workers) as pool:
        answers = list(pool.map(ask, prompts))
    used = None
    if warm:
        used = sum(len(prompt) - answer["timings"]["prompt_n"] for prompt, answer in zip(prompts, answers))
    return peer_answers(answers, used)


def peer_answers(answers: list[dict], used: int | None) -> Answers:
    """The ids and log-probabilities. An older server gives probabilities, which serve as well here."""
    tokens = []
    logprobs = []
    for answer in answers:
        entries = answer.get("completion_probabilities", [])
        scores = [one.get("logprob", one.get("probs", [{}])[0].get("prob", 0.0)) for one in entries]
        logprobs.append(scores)
        tokens.append(answer.get("tokens") or [one.get("id", one.get("content")) for one in entries])
    if not any(map(any, logprobs)):
        logprobs = None  # with speculation, llama.cpp writes zeros
    return Answers(tokens, logprobs, used)


def peer_conditions(program: Path, options: str, gguf: Path, prompts: list, new: int, log: Path) -> Iterator[Condition]:
    length = max(map(len, prompts)) + new + 64
    command = [program.resolve(), "-m", gguf, "-np", ROWS, "-c", ROWS * length, *shlex.split(options)]
    usual = ["-t", torch.get_num_threads()]
    with running([*command, *usual], log) as port:
        base = ask_peer(port, prompts, new)
        yield "base", base
        yield "again", ask_peer(port, prompts, new)
        yield "warm", ask_peer(port, prompts, new, warm=True)
        yield "reread", reread(partial(ask_peer, port), base, prompts, new)
        yield "beside seven others", ask_peer(port, prompts, new, workers=ROWS)
    variants = {name: [*usual, *more] for name, more in PEER_OPTIONS.items()}
    variants |= {"prompt lookup": [*usual, "--spec-type", kind] for kind in spec_types(program)[:1]}
    for name, more in variants.items():
        try:
            with running([*command, *more], log) as port:
                yield name, ask_peer(port, prompts, new)
        except UserError as error:
            yield name, str(error)
