"""From logits to probabilities to token ids, each row by its own settings.

Read down: SamplingParams (what a request asks for), Sampling (the settings of all rows as tensors), sample, the
filters. Knows nothing of models or text.

A row's draw depends on its logits, settings, seed and position and on nothing else: not on the other rows, nor on
whether the code is compiled. So there is no random generator with a hidden state: the noise is a hash of (seed,
position, stream, token id), and wherever a sum decides which tokens are kept it is a sum of integers, which is the same
in any order. Nothing is ever sorted: the top-k and top-p thresholds are found with histograms.

Settings are always present, as tensors: a compiled step serves every mix of requests. The fast kernels skip, row by
row, what a row does not use; the functions here are their specification.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import define, exponential_noise, float_to_sortable_int, has_kernels, top_mass

# ---------------------------------------------------------------- settings


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn, in plain numbers; ValueError for one that is out of range.

    Filters apply in the order of the fields. Repetition penalty (arXiv:1909.05858): logits of tokens that stand in the
    prompt or the answer are divided by it, negative ones multiplied. OpenAI's penalties are subtracted from a token's
    logit: frequency for each time that it stands in the answer, presence once if it does at all.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    temperature: float = 1.0  # 0: the likeliest token, exactly
    top_k: int = 0  # draw from the k likeliest; 0: all
    top_p: float = 1.0  # draw from the fewest tokens that make up this probability (arXiv:1904.09751)
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest
    seed: int = 0

    def __post_init__(self):
        for name, low, high in RANGES:
            value = getattr(self, name)
            whole = name in ("top_k", "seed")
            kinds = (int,) if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise ValueError(f"{name} must be {'an integer' * whole or 'a number'} from {low} to {high}: {value!r}")
        if self.top_p == 0 or self.min_p == 1:
            raise ValueError("top_p must be above 0 and min_p below 1")

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


# Penalties beyond these bounds would overflow float32 for logits that occur.
RANGES = [("repetition_penalty", 1e-3, 1e3), ("frequency_penalty", -1e3, 1e3), ("presence_penalty", -1e3, 1e3)]
RANGES += [("temperature", 0, 1e30), ("top_k", 0, 2**31), ("top_p", 0, 1), ("min_p", 0, 1)]
RANGES += [("seed", -(2**63), 2**63 - 1)]


class Sampling(NamedTuple):
    """The settings of R cache rows: (R,) tensors, as in SamplingParams."""

    seed: Tensor  # int64
    temperature: Tensor  # float32, as all that follow but top_k
    top_k: Tensor  # int64
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    counts: Tensor  # (R,V) int32: twice the times that a token stands in the answer, plus 1 if it is in the prompt

    @classmethod
    def make(cls, R: int, V: int, device="cpu") -> "Sampling":
        """Rows that are greedy and use nothing else."""
        values = [getattr(SamplingParams(temperature=0.0), name) for name in cls._fields[:-1]]
        dtypes = {int: torch.int64, float: torch.float32}
        fields = [torch.full((R,), value, dtype=dtypes[type(value)], device=device) for value in values]
        return cls(*fields, torch.zeros(R, V, dtype=torch.int32, device=device))

    def set_row(self, row: int, params: SamplingParams, prompt: list[int]):
        """Give a row the settings of a request with this prompt."""
        for name in self._fields[:-1]:
            getattr(self, name)[row] = getattr(params, name)
        if params.penalizes:  # else nobody looks at the counts
            self.counts[row] = 0
            self.counts[row, torch.tensor(prompt, dtype=torch.int64, device=self.counts.device)] = 1

    def count(self, found: list[tuple[int, list[int]]]):
        """The answers of these rows have these tokens more; -1 is none."""
        if pairs := [(row, token) for row, tokens in found for token in tokens if token >= 0]:
            rows, tokens = torch.tensor(pairs, device=self.counts.device).unbind(1)
            self.counts.index_put_((rows, tokens), self.counts.new_full((1,), 2), accumulate=True)


# ---------------------------------------------------------------- sampling

ARGUMENTS = ", ".join(f"Tensor {name}" for name in ("logits", "rows", "position", "drafted", *Sampling._fields))


def shape_of_ids(logits, rows, position, drafted, seed, temperature, *rest):
    return seed.new_empty(logits.shape[:2]), temperature.new_empty(logits.shape[:2])


define(f"sample({ARGUMENTS}) -> (Tensor, Tensor)", shape_of_ids)
define(f"probabilities({ARGUMENTS}) -> Tensor", lambda x, *rest: x.new_empty(x.shape, dtype=torch.float32))


def sample(logits: Tensor, rows: Tensor, position: Tensor, drafted: Tensor, settings: Sampling) -> tuple:
    """Draw a token for each of S places of B rows.

    logits (B,S,V) bfloat16, float16 or float32, -inf for tokens that must not be drawn. rows (B,) int64: the row of
    `settings` that each belongs to. position (B,) int64: that of the token drawn at place 0; 0 or less is padding, and
    its logits may be anything. drafted (B,S-1) int64: the token drafted for each place but the last; the penalties of
    later places count it. A negative one is none.

    Returns ids (B,S) int64, -1 for padding and where the largest logit is not finite (NaN anywhere, or infinity); and
    the log-probability of each by the logits as they came, (B,S) float32, NaN where the id is -1.
    """
    operation = torch.ops.fastpath.sample if has_kernels(logits.device) else sample_reference
    return operation(logits, rows, position, drafted, *settings)


def probabilities(logits: Tensor, rows: Tensor, position: Tensor, drafted: Tensor, settings: Sampling) -> Tensor:
    """The distribution that `sample`, with the same arguments, draws from, (B,S,V) float32: zero for what the filters
    drop, one-hot where a row is greedy; all zero for padding, all NaN where the largest logit is not finite."""
    operation = torch.ops.fastpath.probabilities if has_kernels(logits.device) else probabilities_reference
    return operation(logits, rows, position, drafted, *settings)


def sample_reference(logits, rows, position, drafted, *settings) -> tuple[Tensor, Tensor]:
    settings = Sampling(*settings)
    x = penalized(logits.float(), rows, drafted, settings)  # (B,S,V)
    largest, ids = x.max(-1)  # of equal logits the lowest id
    random = settings.temperature[rows] > 0  # (B,)
    if any_row(random):
        weights = filtered(x, rows, settings).exp()
        place, token = (torch.arange(n, device=logits.device) for n in logits.shape[1:])
        at = position[:, None, None] + place[:, None]  # (B,S,1)
        noise = exponential_noise(settings.seed[rows, None, None], at, token)  # (B,S,V)
        drawn = (weights / noise).argmax(-1)  # argmax(p / Exponential(1)) is a sample from p, normalized or not
        ids = torch.where(random[:, None], drawn, ids)
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    valid = largest.isfinite() & (position > 0)[:, None]
    return torch.where(valid, ids, -1), logprobs.masked_fill(~valid, float("nan"))


def probabilities_reference(logits, rows, position, drafted, *settings) -> Tensor:
    settings = Sampling(*settings)
    x = penalized(logits.float(), rows, drafted, settings)  # (B,S,V)
    largest, ids = x.max(-1, keepdim=True)
    greedy = torch.zeros_like(x).scatter(-1, ids, 1.0)
    random = settings.temperature[rows, None, None] > 0
    probs = torch.where(random, torch.softmax(filtered(x, rows, settings), -1), greedy)
    return probs.masked_fill(~largest.isfinite(), float("nan")).masked_fill((position <= 0)[:, None, None], 0)


def top_logprobs(logits: Tensor, ids: list[int], n: int, logprobs: Tensor | None = None) -> list:
    """Of each of ids (m), drawn after logits (m,V): (log-probability, [(id, log-probability), ...] of the n likeliest).

    logprobs (m,): the ids' own, where they have been worked out already.
    """
    if logprobs is not None and n == 0:
        return [(own, []) for own in logprobs[: len(ids)].tolist()]
    all_logprobs = logits[: len(ids)].float().log_softmax(-1)  # (m,V)
    own = [float(line[token]) if 0 <= token < len(line) else float("-inf") for line, token in zip(all_logprobs, ids)]
    values, best = all_logprobs.topk(max(0, min(n, logits.shape[1])), dim=1)
    return [(p, list(zip(*pair))) for p, *pair in zip(own, best.tolist(), values.tolist())]


# ---------------------------------------------------------------- filters


def any_row(used: Tensor) -> bool:
    """Whether any row uses a setting. Always True in a compiled graph and on a GPU, where asking would mean waiting."""
    return torch.compiler.is_compiling() or used.device.type != "cpu" or bool(used.any())


def penalized(x: Tensor, rows: Tensor, drafted: Tensor, settings: Sampling) -> Tensor:
    """Logits x (B,S,V) float32 after the penalties."""
    repetition, frequency, presence = (penalty[rows, None, None] for penalty in settings[5:8])  # (B,1,1)
    if not any_row((repetition != 1) | (frequency != 0) | (presence != 0)):
        return x
    counts = settings.counts[rows, None, : x.shape[2]].repeat(1, x.shape[1], 1)  # (B,S,V)
    for i in range(drafted.shape[1]):  # place s follows drafted[:, :s]
        ids = drafted[:, i, None, None].expand(-1, x.shape[1] - i - 1, 1)
        counts[:, i + 1 :].scatter_add_(2, ids.clamp(min=0), (2 * (ids >= 0)).int())
    x = torch.where(counts > 0, torch.where(x < 0, x * repetition, x / repetition), x)
    return x - (counts >> 1) * frequency - (counts > 1) * presence


def filtered(x: Tensor, rows: Tensor, settings: Sampling) -> Tensor:
    """Logits x (B,S,V) float32 minus their maximum, by temperature; -inf for what top_k, top_p and min_p drop."""
    temperature, top_k, top_p, min_p = (setting[rows, None, None] for setting in settings[1:5])  # (B,1,1)
    order = float_to_sortable_int(x) if any_row((top_k > 0) | (top_p < 1)) else None
    x = (x - x.amax(-1, keepdim=True)) * (1 / temperature).clamp(max=torch.finfo(x.dtype).max)  # 0 * inf would be NaN
    if any_row(top_k > 0):
        target = torch.where(top_k > 0, top_k, x.shape[2]).expand(*x.shape[:2], 1)
        x = x.masked_fill(~top_mass(order, torch.ones_like(order), target), float("-inf"))
    if any_row(top_p < 1):
        mass = (x.exp() * 2.0**40).long()  # fixed point: sums of it are exact
        target = (mass.sum(-1, keepdim=True).float() * top_p).long().clamp(min=1)
        x = x.masked_fill((top_p < 1) & ~top_mass(order, mass, target), float("-inf"))
    return x.masked_fill(x.exp() < min_p, float("-inf"))  # the likeliest has x = 0
