"""From logits to probabilities to token ids. Each row has its own settings.

Read down: SamplingParams (what a request asks for), Sampling (the settings of all rows as tensors),
`sample`, the penalties and filters, top-k and top-p, the noise. Knows nothing of models or text.

The token that a row samples depends only on its logits, settings, seed and position: not on the
other rows, nor on whether the code is compiled. Therefore the noise is a hash of (seed, position,
token id) instead of the output of a random generator with state, and the sums that decide which
tokens are kept are integer sums, which are exact in any order. Nothing is sorted: the top-k and
top-p thresholds are found with histograms.

All settings are always present, as tensors, so that one compiled step serves any mix of requests.
The fast kernels skip the settings that a row does not use. The functions here are the reference
that they must match.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cli import print_status, printable
from kernels import MAX_DECODE_TOKENS, define, has_kernel

# ---------------------------------------------------------------- settings


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are sampled. Raises ValueError for a value that is out of range.

    The settings apply in the order of the fields. Every filter keeps the likeliest token: min_p
    compares with it, and the C++ draw begins with it.

    The repetition penalty (arXiv:1909.05858) changes the logits of tokens that occur in the prompt
    or the answer: it divides positive logits and multiplies negative ones. The frequency and
    presence penalties are as in OpenAI's API: the first is subtracted from a token's logit once
    for each occurrence in the answer, the second once if the token occurs in the answer at all.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each id once
    temperature: float = 1.0  # 0: greedy, exactly the argmax of the logits
    top_k: int = 0  # sample from the k likeliest tokens; 0: from all
    top_p: float = 1.0  # sample from the fewest tokens that have this probability together (arXiv:1904.09751)
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest
    seed: int = 0

    def __post_init__(self):
        for name, value in self.numbers().items():
            low, high = RANGES[name]
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if name in ("top_k", "seed"):
                if not is_int or not low <= value <= high:
                    raise ValueError(f"{name} must be an integer from {low} to {high}: {value!r}")
            elif not (is_int or isinstance(value, float)) or not low <= value <= high:
                raise ValueError(f"{name} must be a number from {low} to {high}: {value!r}")
        if not all(type(token) is int and abs(bias) <= MAX_BIAS for token, bias in self.logit_bias):
            raise ValueError(f"logit_bias must have pairs of a token id and a number from -{MAX_BIAS} to {MAX_BIAS}")

    def numbers(self) -> dict:
        """The settings that are numbers: all except logit_bias."""
        return {name: value for name, value in vars(self).items() if name != "logit_bias"}

    def recommended(self) -> dict:
        """The settings that a model's files may recommend."""
        return {name: getattr(self, name) for name in RECOMMENDED}

    @property
    def needs_all_logits(self) -> bool:
        """Whether more logits than the largest ones may decide which token is drawn. Settings that
        drawable_logits does not know count as such."""
        known = "temperature", "top_k", "top_p", "min_p", "seed"
        if any(value != getattr(SamplingParams, name) for name, value in vars(self).items() if name not in known):
            return True
        return self.temperature > 0 and (self.top_k > FEW_TOKENS or (self.top_p < 1 and self.top_k == 0))

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


MAX_BIAS = 1000
FEW_TOKENS = 128  # a top_k up to which finding these tokens costs little
MASKED_POSITIONS = MAX_DECODE_TOKENS  # positions of a row that have a mask: as many as a step with speculation samples

# The smallest and largest value of each setting. Larger penalties would overflow float32 with
# ordinary logits.
RANGES = {
    "repetition_penalty": (1e-3, 1e3),
    "frequency_penalty": (-1e3, 1e3),
    "presence_penalty": (-1e3, 1e3),
    "temperature": (0, 1e30),
    "top_k": (0, 2**31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "seed": (-(2**63), 2**63 - 1),
}


NEUTRAL = SamplingParams()
# The settings of a request that names none, in all programs, where the model's files recommend nothing. No other
# settings that were tried let models answer more questions of benchmarks/questions.py. Only the temperature is set, so
# that a client that names one gets what it asks for.
DEFAULTS = SamplingParams(temperature=0.3)
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def recommended_params(fields: dict) -> SamplingParams:
    """The settings that a model's files recommend, completed from DEFAULTS.

    fields: the fields of transformers' generation_config.json. If a value is out of range, a warning is
    printed, and the settings are DEFAULTS.
    """
    found = {name: fields[name] for name in RECOMMENDED if fields.get(name) not in (None, -1)}
    if fields.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        return replace(DEFAULTS, **found)
    except ValueError as error:
        print_status(f"warning: the settings that the model's files recommend are ignored: {printable(str(error))}")
        return DEFAULTS


class Sampling(NamedTuple):
    """The settings of R cache rows: (R,) tensors by the names of SamplingParams, the counts and
    biases of tokens, and the masks of rows whose request has a grammar.

    This is also the order of the arguments of the operations `sample` and `probabilities`. Kernels
    that do not take exactly these arguments are not used.
    """

    seed: Tensor  # int64
    temperature: Tensor  # float32, like all fields without a comment
    top_k: Tensor  # int64
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    counts: Tensor  # (R,V) int32: twice the occurrences of a token in the answer, plus 1 if it is in the prompt
    biased: Tensor  # bool: whether logit_bias is used
    logit_bias: Tensor  # (R,V)
    # (R,n,W) int32: row r may sample token i at position mask_start[r] + s if bit i % 32 of
    # masks[r, s, i // 32] is set
    masks: Tensor
    mask_start: Tensor  # int64; -1 if the row has no masks

    @classmethod
    def make(cls, R: int, V: int, device="cpu") -> "Sampling":
        """Settings of R greedy rows without penalties or filters."""
        settings = {}
        for name, value in SamplingParams(temperature=0.0).numbers().items():
            dtype = torch.int64 if isinstance(value, int) else torch.float32
            settings[name] = torch.full((R,), value, dtype=dtype, device=device)
        return cls(
            **settings,
            counts=torch.zeros(R, V, dtype=torch.int32, device=device),
            biased=torch.zeros(R, dtype=torch.bool, device=device),
            logit_bias=torch.zeros(R, V, device=device),
            masks=torch.zeros(R, MASKED_POSITIONS, (V + 31) // 32, dtype=torch.int32, device=device),
            mask_start=torch.full((R,), -1, device=device),
        )

    def set_row(self, row: int, params: SamplingParams, prompt: list[int]):
        """Give a row the settings of a request with this prompt."""
        for name, value in params.numbers().items():
            values = getattr(self, name)
            # float(): torch assigns a Python integer as an int64, and 10**20 is a temperature, too
            values[row] = float(value) if values.is_floating_point() else value
        if params.penalizes:  # else the counts are not used
            self.counts[row] = 0
            self.counts[row, torch.tensor(prompt, dtype=torch.int64, device=self.counts.device)] = 1
        self.mask_start[row] = -1
        self.biased[row] = bool(params.logit_bias)
        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias)
            self.logit_bias[row] = 0
            self.logit_bias[row, list(tokens)] = self.logit_bias.new_tensor(biases)

    def set_masks(self, masked: list[tuple[int, int, object, list[int]]]):
        """Mask the tokens that grammars (as in engine.Request) forbid.

        masked has (row, position, grammar, drafted tokens). The grammar writes a mask for the
        position, and for the position after each drafted token.
        """
        is_cpu = self.masks.device.type == "cpu"
        on_cpu = self.masks if is_cpu else torch.empty_like(self.masks, device="cpu")
        for row, _, grammar, drafted in masked:
            grammar.fill(on_cpu[row], drafted)

        rows, positions = torch.tensor([(row, position) for row, position, *_ in masked]).t()
        if not is_cpu:
            n = 1 + max(len(drafted) for *_, drafted in masked)
            self.masks[rows, :n] = on_cpu[rows, :n].to(self.masks.device)
        self.mask_start[rows] = positions.to(self.mask_start.device)

    def without_masks(self) -> "Sampling":
        """The same settings, for drafts: what a draft proposes need not fit a grammar."""
        return self._replace(mask_start=torch.full_like(self.mask_start, -1))

    def count(self, new_tokens: list[tuple[int, list[int]]]):
        """Add new tokens, given as (row, tokens), to the counts of their rows. An id of -1 is not
        counted."""
        pairs = [(row, token) for row, tokens in new_tokens for token in tokens if token >= 0]
        if pairs:
            rows, tokens = torch.tensor(pairs, device=self.counts.device).unbind(1)
            self.counts.index_put_((rows, tokens), self.counts.new_full((1,), 2), accumulate=True)


# ---------------------------------------------------------------- sampling

ARGUMENTS = ["logits", "rows", "position", "drafted", *Sampling._fields]
SCHEMA = ", ".join(f"Tensor {name}" for name in ARGUMENTS)


def fake_sample(logits, rows, *rest):
    return rows.new_empty(logits.shape[:2]), logits.new_empty(logits.shape[:2], dtype=torch.float32)


define(f"sample({SCHEMA}) -> (Tensor, Tensor)", fake_sample)
define(f"probabilities({SCHEMA}) -> Tensor", lambda x, *rest: x.new_empty(x.shape, dtype=torch.float32))


def sample(logits: Tensor, rows: Tensor, position: Tensor, drafted: Tensor | None, settings: Sampling) -> tuple:
    """Sample a token for each of S consecutive positions of B rows.

    logits: (B,S,V) bfloat16, float16 or float32, -inf for tokens that must not be sampled.
    rows: (B,) int64, the row of `settings` that each batch row uses.
    position: (B,) int64, the position of the first sampled token. It is 0 or less for padding,
    whose last token is at position -1, and whose logits may be anything.
    drafted: (B,n) int64 with n >= S - 1, or None if S = 1. With speculation, the drafted tokens
    before the last position, so that the penalties count them; negative ids are not counted.

    Returns ids (B,S) int64, and the log-probability of each id in the unmodified logits, (B,S)
    float32. For padding, and where the largest logit that no mask forbids is not finite (a logit is
    NaN or inf, or all are -inf), these are -1 and NaN.
    """
    if drafted is None:
        drafted = rows.new_empty(len(rows), 0)
    if has_kernel("sample", logits.device):
        return torch.ops.fastpath.sample(logits, rows, position, drafted, *settings)
    return sample_reference(logits, rows, position, drafted, *settings)


def probabilities(logits: Tensor, rows: Tensor, position: Tensor, drafted: Tensor, settings: Sampling) -> Tensor:
    """The distribution (B,S,V) float32 that `sample` draws from with the same arguments.

    It is zero for tokens that the filters drop, one-hot for a greedy row, all zero for padding, all
    NaN where the largest logit is not finite.
    """
    if has_kernel("probabilities", logits.device):
        return torch.ops.fastpath.probabilities(logits, rows, position, drafted, *settings)
    return probabilities_reference(logits, rows, position, drafted, *settings)


def sample_reference(logits, rows, position, drafted, *settings) -> tuple[Tensor, Tensor]:
    settings = Sampling(*settings)
    x = adjusted(logits.float(), rows, position, drafted, settings)  # (B,S,V)
    largest, ids = x.max(-1)  # the lowest id of equal logits
    random = settings.temperature[rows] > 0  # (B,)
    if any_row(random):
        weights = filtered(x, rows, settings).exp()
        offset = torch.arange(logits.shape[1], device=logits.device)
        token = torch.arange(logits.shape[2], device=logits.device)
        positions = position[:, None, None] + offset[:, None]  # (B,S,1)
        noise = exponential_noise(settings.seed[rows, None, None], positions, token)  # (B,S,V)
        drawn = (weights / noise).argmax(-1)  # argmax(p / Exponential(1)) is a sample from p, normalized or not
        ids = torch.where(random[:, None], drawn, ids)

    logprobs = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    valid = largest.isfinite() & (position > 0)[:, None]
    return torch.where(valid, ids, -1), logprobs.masked_fill(~valid, float("nan"))


def probabilities_reference(logits, rows, position, drafted, *settings) -> Tensor:
    settings = Sampling(*settings)
    x = adjusted(logits.float(), rows, position, drafted, settings)  # (B,S,V)
    largest, ids = x.max(-1, keepdim=True)
    greedy = torch.zeros_like(x).scatter(-1, ids, 1.0)
    random = settings.temperature[rows, None, None] > 0
    probs = torch.where(random, torch.softmax(filtered(x, rows, settings), -1), greedy)
    return probs.masked_fill(~largest.isfinite(), float("nan")).masked_fill((position <= 0)[:, None, None], 0)


def top_logprobs(logits: Tensor, ids: list[int], n: int, logprobs: Tensor | None = None) -> list:
    """For each of m ids and its logits (m,V): (log-probability, [(id, log-probability), ...] of the
    n likeliest ids).

    logprobs (m,): the log-probabilities of the m ids, if the caller has them already.
    """
    if logprobs is not None and n == 0:
        return [(own, []) for own in logprobs[: len(ids)].tolist()]

    V = logits.shape[1]
    logits = logits[: len(ids)].float()
    if logprobs is None:
        all_logprobs = logits.log_softmax(-1)  # (m,V)
    else:  # the others fit to those that the caller has, so that these are the same bits for every n
        own_ids = torch.tensor(ids, device=logits.device)[:, None]  # (m,1)
        own = logprobs[: len(ids), None]
        all_logprobs = (logits - (logits.gather(1, own_ids) - own)).scatter(1, own_ids, own)
    values, best = all_logprobs.topk(max(0, min(n, V)), dim=1)
    result = []
    for line, token, likeliest, numbers in zip(all_logprobs, ids, best.tolist(), values.tolist()):
        own = float(line[token]) if 0 <= token < V else float("-inf")
        result.append((own, list(zip(likeliest, numbers))))
    return result


# ---------------------------------------------------------------- filters


def any_row(used: Tensor) -> bool:
    """Whether any row uses a setting. Always True in a compiled graph and on a GPU, where reading
    the tensor would wait for the device."""
    return torch.compiler.is_compiling() or used.device.type != "cpu" or bool(used.any())


def adjusted(x: Tensor, rows: Tensor, position: Tensor, drafted: Tensor, settings: Sampling) -> Tensor:
    """Logits x (B,S,V) float32 after penalties and biases; -inf for masked tokens."""
    x = penalized(x, rows, drafted, settings)
    biased = settings.biased[rows, None, None]
    if any_row(biased):
        x = torch.where(biased, x + settings.logit_bias[rows, None, : x.shape[2]], x)
    start = settings.mask_start[rows, None]  # (B,1)
    if not any_row(start >= 0):
        return x

    offset = torch.arange(x.shape[1], device=x.device)
    token = torch.arange(x.shape[2], device=x.device)
    place = (position[:, None] + offset - start).clamp(0, MASKED_POSITIONS - 1)  # (B,S)
    words = settings.masks[rows[:, None], place][:, :, token // 32]  # (B,S,V)
    forbidden = (words >> (token % 32) & 1) == 0
    return x.masked_fill(forbidden & (start >= 0)[..., None], float("-inf"))


def penalized(x: Tensor, rows: Tensor, drafted: Tensor, settings: Sampling) -> Tensor:
    """Logits x (B,S,V) float32 after the penalties."""
    repetition = settings.repetition_penalty[rows, None, None]  # (B,1,1)
    frequency = settings.frequency_penalty[rows, None, None]
    presence = settings.presence_penalty[rows, None, None]
    if not any_row((repetition != 1) | (frequency != 0) | (presence != 0)):
        return x

    S, V = x.shape[1:]
    counts = settings.counts[rows, None, :V].repeat(1, S, 1)  # (B,S,V)
    for i, ids in enumerate(drafted.unbind(1), S - drafted.shape[1]):
        start = max(0, i)  # the first position that this drafted token comes before
        ids = ids[:, None, None].expand(-1, S - start, 1)
        counts[:, start:].scatter_add_(2, ids.clamp(min=0), (2 * (ids >= 0)).int())
    x = torch.where(counts > 0, torch.where(x < 0, x * repetition, x / repetition), x)
    return x - (counts >> 1) * frequency - (counts > 1) * presence


def filtered(x: Tensor, rows: Tensor, settings: Sampling) -> Tensor:
    """Logits x (B,S,V) float32 minus their maximum, divided by temperature; -inf for dropped
    tokens."""
    temperature = settings.temperature[rows, None, None]  # (B,1,1)
    top_k = settings.top_k[rows, None, None]
    top_p = settings.top_p[rows, None, None]
    min_p = settings.min_p[rows, None, None]
    order = float_to_sortable_int(x) if any_row((top_k > 0) | (top_p < 1)) else None

    # The factor is finite, because the likeliest token's 0 times infinity would be NaN.
    inverse = (1 / temperature).clamp(max=torch.finfo(x.dtype).max)
    x = (x - x.amax(-1, keepdim=True)) * inverse
    if any_row(top_k > 0):
        target = torch.where(top_k > 0, top_k, x.shape[2]).expand(*x.shape[:2], 1)
        x = x.masked_fill(~top_mass(order, torch.ones_like(order), target), float("-inf"))
    if any_row(top_p < 1):
        mass = (x.exp() * 2.0**40).long()  # fixed point, so that sums are exact
        # This product is in float32 everywhere, so that all implementations round it alike.
        target = (mass.sum(-1, keepdim=True).float() * top_p).long().clamp(min=1)
        x = x.masked_fill((top_p < 1) & ~top_mass(order, mass, target), float("-inf"))
    return x.masked_fill(x.exp() < min_p, float("-inf"))  # x.exp() is 1 for the likeliest token


# ---------------------------------------------------------------- top-k and top-p


def top_mass(order, mass, target):
    """A mask (...,V) of the fewest largest entries whose total mass reaches `target`. Of equal
    entries, the ones with lower indices are kept first.

    order (...,V) int64 in [0,2^32), the values to compare; mass (...,V) int64 >= 0; target (...,1)
    int64 >= 1. If every mass is 1, this is top-k; if masses are probabilities, it is top-p. Equal
    entries may have different masses here, but not in the C++. Integer sums do not depend on their
    order, so all implementations agree exactly. Nothing is sorted: a radix select finds the
    smallest entry that is kept, 8 bits at a time, with a histogram of the mass.
    """
    inside = torch.ones_like(order, dtype=torch.bool)  # entries that share the bits chosen so far
    above = torch.zeros_like(target)  # the mass of all larger entries
    for bits in (24, 16, 8, 0):
        bucket = (order >> bits) & 0xFF
        histogram = mass.new_zeros(*order.shape[:-1], 256).scatter_add(-1, bucket, mass * inside)
        # The mass above each bucket (...,256), which falls as the bucket rises. The chosen bucket
        # is the one in which the sum reaches the target.
        higher = above + histogram.flip(-1).cumsum(-1).flip(-1) - histogram
        chosen = 256 - (higher < target).sum(-1, keepdim=True)
        above = higher.gather(-1, chosen)
        inside = inside & (bucket == chosen)

    lowest = order.masked_fill(~inside, -1).amax(-1, keepdim=True)  # all entries inside are equal by now
    ties = mass * inside
    return (order > lowest) | (inside & (above + ties.cumsum(-1) - ties < target))


def float_to_sortable_int(x):
    """Maps float32 to int64 in [0, 2^32) with the same order; -0.0 and 0.0 are equal."""
    bits = (x + 0.0).view(torch.int32).long()  # the sum turns -0.0 into 0.0
    return (bits ^ ((bits >> 63) & 0x7FFFFFFF)) + 2**31  # the bits of negative floats ascend as the floats descend


# ---------------------------------------------------------------- noise


def exponential_noise(seed, position, ids, stream=0):
    """Exponential(1) variates (float32): a pure function of seed, position and token ids, int64
    tensors that broadcast.

    Different values of `stream` (int) give independent noise for the same position.
    """
    low = seed & 0xFFFFFFFF
    high = (seed >> 32) & 0xFFFFFFFF
    keys = []
    for start in (0x3C6EF372, 0x1B873593):  # two keys of 32 bits each
        key = low ^ start
        for value in (high, position, torch.full_like(position, stream)):
            key = scramble(key) ^ value
        keys.append(scramble(key))
    bits = scramble(scramble(ids ^ keys[0]) ^ keys[1])
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)  # most precise near zero, because argmax(p / noise) selects small noise


def scramble(x):
    """A hash of 32-bit integers, held in int64: a bijection where each input bit flips every output
    bit half the time.

    The constants, from the project hash-prospector (lowbias32), are below 2^31, so that no product
    overflows int64.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
