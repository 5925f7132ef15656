"""Random requests, and an engine to which they come at random times."""

import copy
import random

import torch
from conftest import random_prompts

from drafts.draft import Draft, Proposal
from engine import Engine, EngineOptions, Request, generate
from sampling import SamplingParams
from speculative import Speculation

GREEDY = SamplingParams(temperature=0.0)


def random_params(chance: random.Random) -> SamplingParams:
    if chance.random() < 0.3:
        return GREEDY
    fields = {"temperature": [0.0, 0.6, 1.3], "top_k": [0, 0, 1, 17], "top_p": [1.0, 1.0, 0.8], "min_p": [0.0, 0.05]}
    fields |= {"repetition_penalty": [1.0, 1.0, 1.4], "frequency_penalty": [0.0, 0.0, 0.7]}
    fields |= {"presence_penalty": [0.0, 0.0, -0.4], "logit_bias": [(), (), ((7, 4.0), (9, -3.0))]}
    return SamplingParams(**{name: chance.choice(some) for name, some in fields.items()}, seed=chance.randrange(1000))


def random_requests(n: int, seed: int, longest: int = 40) -> list[Request]:
    chance = random.Random(seed)
    shared = random_prompts([23], seed=seed + 1)[0]
    requests = []
    for prompt in random_prompts([chance.randrange(1, longest) for _ in range(n)], seed=seed):
        if chance.random() < 0.4:  # some begin with the same tokens
            prompt = shared[: chance.randrange(1, 23)] + prompt[: longest - 23]
        requests.append(Request(prompt, random_params(chance), chance.randrange(1, 18)))
    return requests


def run_randomly(engine: Engine, requests: list[Request], seed: int, cancel: float = 0.1):
    """Add the requests at random steps, and cancel some."""
    chance = random.Random(seed)
    waiting = list(requests)
    finished, cancelled = [], set()
    while waiting or engine.has_requests:
        while waiting and chance.random() < 0.35:
            engine.add(waiting.pop(0))
        running = [row.request for row in engine.rows if row.request]
        if chance.random() < cancel and running:
            request = chance.choice(running)
            cancelled.add(request)
            engine.cancel(request)
        finished += engine.step()
    assert sorted(map(id, finished)) == sorted(map(id, requests)), "each request ends once"
    assert {request for request in requests if request.finish_reason == "cancelled"} <= cancelled


class NoMultiplesOfThree:
    """A grammar in which a token u may follow a token t if t + u is no multiple of 3. An answer has n tokens."""

    def __init__(self, n: int):
        self.n = n
        self.tokens = [1]

    def fill(self, masks, drafted=()):
        ids = torch.arange(32 * masks.shape[1]).view(-1, 32)
        for mask, token in zip(masks, [self.tokens[-1], *drafted]):
            mask.copy_((((token + ids) % 3 > 0).long() << torch.arange(32)).sum(1).int())

    def accept(self, token: int) -> bool:
        assert (self.tokens[-1] + token) % 3
        self.tokens.append(token)
        return len(self.tokens) > self.n


def masked_requests(n: int, seed: int = 0) -> list[Request]:
    """Random requests. Every second one has a grammar."""
    chance = random.Random(seed)
    prompts = random_prompts([chance.randrange(1, 40) for _ in range(n)], seed=seed)
    requests = [Request(prompt, random_params(chance), chance.randrange(5, 18)) for prompt in prompts]
    for request in requests[::2]:
        request.grammar = NoMultiplesOfThree(chance.randrange(3, 20))
    return requests


class NoisyDraft(Draft):
    """Proposes the tokens that a fresh engine has found, some of them replaced."""

    name = "noisy"

    def __init__(self, choose: random.Random):
        self.choose = choose
        self.expected: dict[int, list[int]] = {}  # of each request

    def propose(self, batch, k):
        proposed = []
        for row in batch.rows:
            room = self.engine.length - 1 - len(row.tokens)
            tokens = self.expected[id(row.request)][len(row.request.new_tokens) :][: min(k, room)]
            proposed.append([7 if self.choose.random() < 0.3 else token for token in tokens])
        return Proposal(proposed, k) if any(proposed) else None


def random_request(choose: random.Random, texts: list[list[int]]) -> Request:
    """A request that shares a prefix with one of these texts."""
    text = choose.choice(texts)
    cut = choose.choice([len(text), choose.randint(1, len(text)), max(1, len(text) - choose.randint(0, 20))])
    prompt = text[:cut] + random_prompts((choose.randint(1, 25),), seed=choose.randint(0, 99))[0]
    params = SamplingParams(temperature=choose.choice([0.0, 0.9]), seed=choose.randint(0, 99))
    return Request(prompt[:180], params, choose.randint(0, 12))


def fuzz_states(model, seed, make_draft=NoisyDraft):
    """A random schedule: several rows, shared prefixes, edits of earlier turns, cancels, few or no snapshots, drafted
    tokens of which some are rejected. Each answer is that of a fresh engine."""
    choose = random.Random(seed)
    draft = make_draft(choose)
    chunk_tokens, always_chunk = choose.choice([1, 9, 40, None]), choose.random() < 0.5
    snapshot_bytes = choose.choice([None, 0, 40_000, 200_000])
    options = EngineOptions(chunk_tokens, always_chunk=always_chunk, snapshot_bytes=snapshot_bytes)
    fresh = copy.deepcopy(model)
    decoding = Speculation([draft], choose.randint(1, 15), automatic=False) if choose.random() < 0.7 else None
    engine = Engine(model, choose.choice([1, 2, 3]), 220, None, decoding, options)
    snapshots, texts = model.snapshots, random_prompts((90, 41, 17, 3), seed=seed)
    slots = snapshots and set(snapshots.free)
    for _ in range(8):
        batch = [random_request(choose, texts) for _ in range(choose.randint(1, 3))]
        for request in batch:
            expected = Request(request.prompt, request.params, request.max_new_tokens)
            generate(Engine(fresh, 1, 220), [expected])
            draft.expected[id(request)] = expected.new_tokens
            engine.add(request)
        for _ in range(choose.randint(0, 30)):
            engine.step()
        if choose.random() < 0.2:
            engine.cancel(batch[0])
        while engine.has_requests:
            engine.step()
        for request in batch:
            expected = draft.expected[id(request)]
            assert request.new_tokens == expected[: len(request.new_tokens)], (seed, request.cached_tokens)
            assert request.finish_reason == "cancelled" or len(request.new_tokens) == len(expected)
        if snapshots:
            taken = {snapshot.slot for row in snapshots.rows for snapshot in row}
            assert not taken & {*snapshots.free} and taken | {*snapshots.free} == slots, "each slot is free or in use"
        texts += [request.prompt + request.new_tokens for request in batch]
