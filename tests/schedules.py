"""Random requests, and an engine to which they come at random times."""

import random

import torch
from conftest import random_prompts

from engine import Engine, Request
from sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def random_params(chance: random.Random) -> SamplingParams:
    if chance.random() < 0.3:
        return GREEDY
    return SamplingParams(
        temperature=chance.choice([0.0, 0.6, 1.3]),
        top_k=chance.choice([0, 0, 1, 17]),
        top_p=chance.choice([1.0, 1.0, 0.8]),
        min_p=chance.choice([0.0, 0.05]),
        repetition_penalty=chance.choice([1.0, 1.0, 1.4]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.7]),
        presence_penalty=chance.choice([0.0, 0.0, -0.4]),
        logit_bias=chance.choice([(), (), ((7, 4.0), (9, -3.0))]),
        seed=chance.randrange(1000),
    )


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
    finished = []
    while waiting or engine.has_requests:
        while waiting and chance.random() < 0.35:
            engine.add(waiting.pop(0))
        running = [row.request for row in engine.rows if row.request]
        if chance.random() < cancel and running:
            engine.cancel(chance.choice(running))
        finished += engine.step()

    assert sorted(map(id, finished)) == sorted(map(id, requests)), "each request ends once"


class NoMultiplesOfThree:
    """A grammar in which a token u may follow a token t if t + u is not a multiple of 3.

    The answer is complete after n tokens.
    """

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
