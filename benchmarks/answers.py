"""What exactness.py compares: the answers of each program to the same prompts, under several conditions.

A program yields its conditions (`Condition`), the first of which is the base run. Read down: Answers
and prompts; our engine; servers, ours and the peers'; transformers.
"""

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import measure
import torch
from decode import load_transformers
from measure import CPU, GREEDY, ROOT

from checkpoint import Checkpoint
from cli import UserError
from compile import warm_up
from engine import Engine, Request, generate
from load import is_own_draft, load_engine, open_checkpoint
from options import ModelOptions
from server.api import ServedModel

LENGTHS = (5, 11, 23, 48, 97, 180, 320, 600)  # of the prompts, in tokens
ROWS = len(LENGTHS)
THREADS = {"1 thread": 1, "2 threads": 2}
K = 4  # proposed tokens: with a number that is tuned, a slow draft would never be verified
CHUNK = 37  # tokens; no multiple of a kernel's tile
APART = 3  # steps between requests that join one by one
DRAFTS = {"prompt lookup": "prompt-lookup", "MTP": "mtp", "Medusa": "medusa", "int4-self": "int4-self"}
ANSWER_S = 600.0  # the longest that an answer may take

# ---------------------------------------------------------------- answers and prompts


@dataclass
class Answers:
    """The answers to all prompts under one condition."""

    tokens: list[list]  # of each prompt: ids, or texts if a server gives no ids
    logprobs: list[list[float]] | None = None  # of these tokens; None: not asked for, or not computed
    used: int | None = None  # tokens that were reused or proposed; None if the condition does neither


Condition = tuple[str, Answers | str]  # its name, and the answers or the reason why it is left out


def page_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The beginnings of the longest pages of docs/, one for each of LENGTHS."""
    texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    texts.sort(key=len)
    return [encode(text)[:n] for text, n in zip(texts[-ROWS:], LENGTHS)]


def prefix(prompt: list[int]) -> list[int]:
    """The part of a prompt that is read before it, so that the cache is warm."""
    return prompt[: len(prompt) * 2 // 3]


def reread(run: Callable[..., Answers], base: Answers, prompts: list, new: int) -> Answers:
    """The first halves of the base's answers, and what run(prompts, new) writes after them."""
    n = new // 2
    found = run([prompt + tokens[:n] for prompt, tokens in zip(prompts, base.tokens)], new - n)
    tokens = [a[:n] + b for a, b in zip(base.tokens, found.tokens)]
    logprobs = [a[:n] + b for a, b in zip(base.logprobs or [], found.logprobs or [])]
    return Answers(tokens, logprobs or None)


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


def attempt(run: Callable[..., Answers], *args, **kwargs) -> Answers | str:
    """What run returns, or why it failed."""
    try:
        return run(*args, **kwargs)
    except UserError as error:
        return str(error)


def run_compiled(load: Callable[..., Engine], prompts: list, new: int) -> Answers:
    torch._dynamo.reset()  # the graphs of the models before this one count towards a limit
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
    yield "with the likeliest tokens", run_alone(engine, prompts, new, logprobs=5)
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
        yield name, attempt(run, prompts, new)
    yield from our_server(source, checkpoint, base, prompts, new, log)


# ---------------------------------------------------------------- servers


@contextmanager
def running(command: Sequence, log: Path):
    """Run a server until the end of the block. Yields its port."""
    port = measure.free_port()
    with measure.server([*command, "--port", port], log, port):
        yield port


def post(port: int, path: str, body: dict) -> dict:
    """The answer of a server. UserError if it refuses the request."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.load(answer)
    except OSError as error:
        raise UserError(f"{path} failed: {error}") from None


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


def spec_types(program: Path) -> list[str]:
    """The kinds of speculation without a draft model that a llama-server has, according to its help."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True)
    text = done.stdout + done.stderr
    if "--spec-type" not in text:
        return []
    return sorted(set(re.findall(r"\bngram-[a-z0-9]+(?:-[a-z0-9]+)*\b", text)), key=text.index)


def ask_peer(port: int, prompts: list, new: int, warm: bool = False, workers: int = 1, drafts: bool = False) -> Answers:
    """All prompts, `workers` at a time.

    warm: a prefix of each is read before it. drafts: whether the server speculates.
    """
    body = {"n_predict": new, "temperature": 0, "repeat_penalty": 1.0, "ignore_eos": True, "n_probs": 1}
    body |= {"return_tokens": True, "cache_prompt": warm}
    if workers == 1:
        body["id_slot"] = 0

    def ask(prompt: list[int]) -> dict:
        if warm and prefix(prompt):
            post(port, "/completion", body | {"prompt": prefix(prompt), "n_predict": 1})
        return post(port, "/completion", body | {"prompt": prompt})

    with ThreadPoolExecutor(workers) as pool:
        answers = list(pool.map(ask, prompts))
    entries = [answer.get("completion_probabilities", []) for answer in answers]
    tokens = []
    for answer, line in zip(answers, entries):  # ik_llama.cpp gives texts and no ids
        tokens.append(answer.get("tokens") or [one["id"] if "id" in one else one["content"] for one in line])
    logprobs = [[probability(one) for one in line] for line in entries]
    if not any(map(any, logprobs)):  # with speculation, llama.cpp writes zeros
        logprobs = None

    used = None
    timings = [answer["timings"] for answer in answers]
    if warm:
        used = sum(len(prompt) - one["prompt_n"] for prompt, one in zip(prompts, timings))
    if drafts:  # the field is missing if nothing was proposed
        used = sum(one.get("draft_n", 0) for one in timings)
    return Answers(tokens, logprobs, used)


def probability(entry: dict) -> float:
    """The log-probability of a token. Older servers give the probability, whose bits serve as well."""
    return entry["logprob"] if "logprob" in entry else entry["probs"][0]["prob"]


def peer_conditions(program: Path, options: str, gguf: Path, prompts: list, new: int, log: Path) -> Iterator[Condition]:
    """What a llama-server answers. options: more of its options."""
    length = max(map(len, prompts)) + new + 64
    command = [program.resolve(), "-m", gguf, "-np", ROWS, "-c", ROWS * length, *shlex.split(options)]
    usual = [*command, "-t", torch.get_num_threads()]
    with running(usual, log) as port:
        base = ask_peer(port, prompts, new)
        yield "base", base
        ask = partial(ask_peer, port)
        yield "again", attempt(ask, prompts, new)
        yield "warm", attempt(ask, prompts, new, warm=True)
        if isinstance(base.tokens[0][0], int):
            yield "reread", attempt(reread, ask, base, prompts, new)
        else:
            yield "reread", "the server gives no ids of tokens"
        yield "beside seven others", attempt(ask, prompts, new, workers=ROWS)

    variants = {"other chunks": [*usual, "-b", 64, "-ub", 32]}
    variants |= {name: [*command, "-t", n] for name, n in THREADS.items()}
    if kinds := spec_types(program):
        variants["prompt lookup"] = [*usual, "--spec-type", kinds[0]]
    for name, variant in variants.items():
        try:
            with running(variant, log) as port:
                yield name, ask_peer(port, prompts, new, drafts="--spec-type" in variant)
        except UserError as error:
            yield name, str(error)


# ---------------------------------------------------------------- transformers


def transformers_conditions(source: str | None, prompts: list, new: int) -> Iterator[Condition]:
    """What transformers answers in bf16. Its batches are padded on the left."""
    model = load_transformers(source, CPU)

    def batch(some: list, n: int, **more) -> Answers:
        longest = max(map(len, some))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in some])
        how = {"max_new_tokens": n, "output_logits": True, "return_dict_in_generate": True}
        with torch.no_grad():
            found = model.generate(ids, attention_mask=mask, **how, **more)
        tokens = found.sequences[:, longest:]
        logprobs = torch.stack(found.logits, 1).float().log_softmax(-1)  # (B,n,V)
        own = logprobs.gather(2, tokens[..., None])[..., 0]
        return Answers(tokens.tolist(), own.tolist())

    def alone(some: list, n: int, **more) -> Answers:
        found = [batch([prompt], n, **more) for prompt in some]
        return Answers([one.tokens[0] for one in found], [one.logprobs[0] for one in found])

    base = alone(prompts, new)
    yield "base", base
    yield "again", alone(prompts, new)
    yield "reread", reread(alone, base, prompts, new)
    yield "beside seven others", batch(prompts, new)
    for name, n in THREADS.items():
        with threads(n):
            yield name, alone(prompts, new)
    yield "prompt lookup", alone(prompts, new, prompt_lookup_num_tokens=K)
