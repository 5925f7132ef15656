"""The same requests under several conditions, by llama-server and transformers: for exactness.py.

A program yields conditions (`Condition`), the first of which is its base run. Read down: Answers;
prompts; servers; the peers' llama-server; transformers.
"""

import json
import re
import shlex
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import measure
import torch
from decode import load_transformers
from measure import CPU, ROOT

from cli import UserError

LENGTHS = (5, 11, 23, 48, 97, 180, 320, 600)  # of the prompts, in tokens
ROWS = len(LENGTHS)
THREADS = {"1 thread": 1, "2 threads": 2}
K = 4  # proposed tokens: with a number that is tuned, a slow draft would never be verified
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


def spec_types(program: Path) -> list[str]:
    """The kinds of speculation without a draft model that a llama-server has, according to its help."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True)
    text = done.stdout + done.stderr
    if "--spec-type" not in text:
        return []
    return sorted(set(re.findall(r"\bngram-[a-z0-9]+(?:-[a-z0-9]+)*\b", text)), key=text.index)


def ask_peer(port: int, prompts: list, new: int, warm: bool = False, workers: int = 1) -> Answers:
    """All prompts, `workers` at a time. warm: a prefix of each is read before it."""
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
    tokens = [answer.get("tokens") or [one.get("id") for one in line] for answer, line in zip(answers, entries)]
    logprobs = [[probability(one) for one in line] for line in entries]
    if not any(map(any, logprobs)):  # with speculation, llama.cpp writes zeros
        logprobs = None

    used = None
    timings = [answer["timings"] for answer in answers]
    if warm:
        used = sum(len(prompt) - one["prompt_n"] for prompt, one in zip(prompts, timings))
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
        yield "again", ask_peer(port, prompts, new)
        yield "warm", ask_peer(port, prompts, new, warm=True)
        yield "reread", reread(partial(ask_peer, port), base, prompts, new)
        yield "beside seven others", ask_peer(port, prompts, new, workers=ROWS)

    variants = {"other chunks": [*usual, "-b", 64, "-ub", 32]}
    variants |= {name: [*command, "-t", n] for name, n in THREADS.items()}
    if kinds := spec_types(program):
        variants["prompt lookup"] = [*usual, "--spec-type", kinds[0]]
    for name, variant in variants.items():
        try:
            with running(variant, log) as port:
                yield name, ask_peer(port, prompts, new)
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
