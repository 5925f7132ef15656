"""From logits to probabilities to token ids, each row by its own settings.

Read down: Sampling (a batch's settings), sample, candidates, the filters, the noise. Knows nothing of models or text.

A row's draw depends on its logits, settings, seed and position and on nothing else: not on its neighbours, nor on
whether the code is compiled. So there is no generator with hidden state (which would not trace either): the noise is a
hash of (seed, position, stream, token id), and wherever a sum decides what is kept, it is a sum of integers, which is
the same in any order. And never a full sort, the slowest way: top-k takes the k largest, top-p alone looks for its
threshold.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import nucleus

# ---------------------------------------------------------------- settings


@dataclass
class Sampling:
    """The settings of B rows, each a (B,) tensor, or None where no row uses it (it then costs nothing).

    Filters apply in the order of the fields: repetition_penalty float32 > 0 (arXiv:1909.05858; logits of tokens seen
    before are divided by it, negative ones multiplied), temperature float32, top_k int64 (0 is off), top_p float32 in
    (0,1], min_p float32 in [0,1) (tokens less likely than min_p times the likeliest go). seed int64.
    """

    seed: Tensor
    repetition_penalty: Tensor | None = None
    temperature: Tensor | None = None  # None: every row is greedy, and the filters below are not looked at
    top_k: Tensor | None = None
    most_k: int = 0  # the largest top_k of any row
    every_k: bool = False  # every row has a top_k
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @classmethod
    def make(cls, B, seed=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, device="cpu"):
        """From numbers, for all rows alike, or lists, one entry a row. A row of temperature 0 is greedy."""

        def column(value, dtype):
            values = value if isinstance(value, (list, tuple)) else [value] * B
            assert len(values) == B, f"{len(values)} values for {B} rows"
            return torch.tensor(values, dtype=dtype)

        temperature, top_k = column(temperature, torch.float32), column(top_k, torch.int64)
        top_p, min_p = column(top_p, torch.float32), column(min_p, torch.float32)
        penalty = column(repetition_penalty, torch.float32)
        settings = cls(column(seed, torch.int64), penalty if (penalty != 1).any() else None)
        greedy = temperature == 0
        if not greedy.all():
            top_k = top_k.masked_fill(greedy, 1)  # among equals the lowest id, as argmax has it
            settings.temperature = temperature.masked_fill(greedy, 1)
            settings.most_k, settings.every_k = int(top_k.max()), bool((top_k > 0).all())
            settings.top_k = top_k if settings.most_k else None
            settings.top_p = top_p if (top_p < 1).any() else None
            settings.min_p = min_p if (min_p > 0).any() else None
        return settings._map(lambda tensor: tensor.to(device))

    def rows(self, index: Tensor) -> "Sampling":
        """The settings of some of the rows, index (B',) int64."""
        return self._map(lambda tensor: tensor[index])

    def _map(self, change):
        return Sampling(**{k: change(v) if isinstance(v, Tensor) else v for k, v in vars(self).items()})


# ---------------------------------------------------------------- sampling


def sample(logits: Tensor, settings: Sampling, position: Tensor, seen: Tensor | None = None) -> Tensor:
    """Draw one token a row.

    logits (B,V); position (B,) int64, that of the token drawn, so that every step has noise of its own; seen (B,V)
    bool, the tokens that repetition_penalty counts. Returns ids (B,) int64.
    """
    if settings.temperature is None:
        return penalized(logits, settings, seen).argmax(1)
    probs, ids = candidates(logits, settings, seen)  # (B,C)
    race = probs / exponential_noise(settings.seed, position, ids)  # the exponential race: the winner's law is probs
    return ids.gather(1, race.argmax(1, keepdim=True)).squeeze(1)


def known(logits: Tensor, n_token: int | None) -> Tensor:
    """Logits (...,V), -inf for the ids that only pad the table."""
    if n_token is None:
        return logits
    return torch.where(torch.arange(logits.shape[-1], device=logits.device) < n_token, logits, float("-inf"))


def probabilities(logits: Tensor, settings: Sampling, seen: Tensor | None = None) -> Tensor:
    """The law that `sample` draws from: (B,V) float32, zero for what the filters drop; one-hot for greedy rows."""
    if settings.temperature is None:
        ids = penalized(logits, settings, seen).argmax(1, keepdim=True)  # (B,1)
        probs = torch.ones_like(ids, dtype=torch.float32)
    else:
        probs, ids = candidates(logits, settings, seen)
    return torch.zeros_like(logits, dtype=torch.float32).scatter(1, ids, probs)


def candidates(logits: Tensor, settings: Sampling, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """probs (B,C) float32 and ids (B,C): C is V, or the largest top_k where every row has one."""
    B, V = logits.shape
    x = penalized(logits, settings, seen) / settings.temperature[:, None]
    x = x - x.amax(1, keepdim=True)
    ids = torch.arange(V, device=x.device).expand(B, V)
    if settings.top_k is not None:
        rank = ordered(x) * 2**32 + (V - 1 - ids)  # no two alike: of equal logits the lower id is first
        best = rank.topk(min(settings.most_k, V), dim=1).values  # (B,most_k), falling
        last = best.gather(1, settings.top_k.clamp(1, best.shape[1])[:, None] - 1)  # (B,1)
        last = last.masked_fill(settings.top_k[:, None] == 0, -(2**63))
        if settings.every_k:
            ids = V - 1 - (best & 0xFFFFFFFF)  # (B,most_k)
            x, rank = x.gather(1, ids), best
        x = x.masked_fill(rank < last, float("-inf"))
    if settings.top_p is not None:
        x = x.masked_fill(~in_top_p(x, settings.top_p[:, None], settings.every_k), float("-inf"))
    if settings.min_p is not None:
        x = x.masked_fill(x.exp() < settings.min_p[:, None], float("-inf"))  # the likeliest has x = 0
    return torch.softmax(x, dim=1), ids


# ---------------------------------------------------------------- filters


def penalized(logits: Tensor, settings: Sampling, seen: Tensor | None) -> Tensor:
    """Logits in float32 after the repetition penalty."""
    x = logits.float()
    if settings.repetition_penalty is None:
        return x
    penalty = settings.repetition_penalty[:, None]
    return torch.where(seen, torch.where(x < 0, x * penalty, x / penalty), x)


def in_top_p(x: Tensor, top_p: Tensor, falling: bool = False) -> Tensor:
    """Which entries of x (B,C), unnormalized log-probabilities with maximum 0, are in the nucleus; (B,C) bool.

    The nucleus (arXiv:1904.09751) is the shortest run of the likeliest tokens whose probability reaches top_p (B,1);
    of equals the first come first. `falling` says that x is sorted.
    """
    mass = (x.exp() * 2.0**40).long()  # fixed point: these sums are exact
    target = (mass.sum(1, keepdim=True).float() * top_p).long().clamp(min=1)  # (B,1)
    if falling:
        return mass.cumsum(1) - mass < target
    return nucleus(ordered(x) + 2**31, mass, target)


def ordered(x: Tensor) -> Tensor:
    """float32 to int64 in [-2^31, 2^31) with the same order, exactly."""
    bits = (x + 0.0).view(torch.int32).long()  # -0.0 and 0.0 are equals
    return bits ^ ((bits >> 63) & 0x7FFFFFFF)  # negative floats count downwards


# ---------------------------------------------------------------- noise


def exponential_noise(seed: Tensor, position: Tensor, ids: Tensor, stream: int = 0) -> Tensor:
    """Exponential(1) variates (B,C) float32, one for each token of ids (B,C); a pure function of its arguments.

    seed, position (B,) int64. stream separates uses that need noise of their own at the same position.
    """
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    keys = []
    for start in (0x3C6EF372, 0x1B873593):  # two chains: a row's key has 64 bits
        key = low ^ start
        for value in (high, position, torch.full_like(position, stream)):
            key = scramble(key) ^ value
        keys.append(scramble(key)[:, None])  # (B,1)
    bits = scramble(scramble(ids ^ keys[0]) ^ keys[1])  # (B,C), 32 bits each
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)  # fine-grained near zero, where races are won


def scramble(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, held in int64, that flips each output bit half the time for any input bit.

    Its constants (the "lowbias32" search of hash-prospector) are below 2^31, so that no product leaves int64.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
