"""A model that is a table, so that the distribution of its texts is known exactly."""

from types import SimpleNamespace

import torch

from model import WHOLE_MODEL
from sampling import Sampling, SamplingParams, probabilities

V = 11
ROWS = 20_000
SETTINGS = [
    {}, {"temperature": 0.5}, {"temperature": 1.7, "top_k": 4}, {"top_p": 0.7},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.8},
    {"min_p": 0.15, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": -0.3},
    {"temperature": 1.3, "masked": True}, {"top_p": 0.9, "logit_bias": ((4, 1.5), (7, -1.0)), "masked": True},
]  # fmt: skip
# With "masked", a token u may follow a token t if t + u is not a multiple of 3.
FOLLOWERS = [sum(1 << u for u in range(V) if (t + u) % 3) for t in range(V)]
MASKS = torch.tensor(FOLLOWERS, dtype=torch.int32)


class Table:
    """A model whose logits depend only on the last token t: they are row t of a table (V,V)."""

    config = SimpleNamespace(n_token=None)
    shard = WHOLE_MODEL

    def __init__(self, noise: float):
        torch.manual_seed(3)
        self.logits = 1.5 * torch.randn(V, V)
        self.logits = self.logits + noise * torch.randn(V, V)

    def hidden(self, tokens, input_pos, rows):
        return tokens

    def head(self, tokens):
        return self.logits[tokens]

    def __call__(self, tokens, input_pos, rows):
        return self.logits[tokens[:, -1]]


MODEL = Table(0.0)
DRAFT = Table(1.2)


def settings_of(rows: int, how: dict) -> Sampling:
    """The same settings for all rows, with different seeds and the prompt [0]."""
    settings = Sampling.make(rows, V)
    params = SamplingParams(**{name: value for name, value in how.items() if name != "masked"})
    for name, value in params.numbers().items():
        getattr(settings, name).fill_(value)
    for token, bias in params.logit_bias:
        settings.biased.fill_(True)
        settings.logit_bias[:, token] = bias
    settings.seed.copy_(torch.arange(rows))
    settings.counts[:, 0] = 1
    return settings


def count(settings: Sampling, rows: torch.Tensor, tokens: torch.Tensor):
    settings.counts.index_put_((rows, tokens), settings.counts.new_full((1,), 2), accumulate=True)


def mask(settings: Sampling, how: dict, rows: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor):
    """If `how` has "masked": the masks of what may follow each of these tokens (N,n), the first one at `position`."""
    if how.get("masked"):
        settings.masks[rows, : tokens.shape[1], 0] = MASKS[tokens]
        settings.mask_start[rows] = position


def probabilities_after(answers: torch.Tensor, how: dict) -> torch.Tensor:
    """The model's distribution (N,V) after the prompt [0] and these answers (N,n)."""
    N, n = answers.shape
    settings = settings_of(N, how)
    rows = torch.arange(N)
    for i in range(n):
        count(settings, rows, answers[:, i])
    last = answers[:, -1] if n else torch.zeros(N, dtype=torch.int64)
    empty = torch.zeros(N, 0, dtype=torch.int64)
    position = torch.full((N,), n + 1)
    mask(settings, how, rows, position, last[:, None])
    logits = MODEL.logits[last][:, None]
    return probabilities(logits, rows, position, empty, settings)[:, 0].double()


def p_value(tokens: torch.Tensor, how: dict) -> float:
    """The p-value of a chi-square test of the joint distribution of three tokens against the exact one."""
    answers = torch.zeros(1, 0, dtype=torch.int64)
    expected = torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        expected = (expected[:, None] * probabilities_after(answers, how)).flatten()
        new = torch.arange(V).repeat(len(answers))[:, None]
        answers = torch.cat([answers.repeat_interleave(V, 0), new], 1)
    expected = ROWS * expected
    cells = tokens[:, 0] * V * V + tokens[:, 1] * V + tokens[:, 2]
    counts = torch.bincount(cells, minlength=V**3).double()
    if (counts[expected == 0] > 0).any():
        return 0.0
    usual = expected >= 5  # cells with a small count are merged into one
    counts = torch.cat([counts[usual], counts[~usual].sum()[None]])
    expected = torch.cat([expected[usual], expected[~usual].sum()[None]])
    counts = counts[expected > 0]
    expected = expected[expected > 0]
    chi2 = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), chi2 / 2))
