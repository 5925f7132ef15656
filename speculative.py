"""Speculative decoding: several tokens per pass over the weights, with the same output distribution as plain decoding.

A draft proposes k tokens for each row; the model looks at all of them in one pass, which costs little more than that of
one token, for both are bound by reading the weights. Of each proposal the model keeps the longest prefix that its own
distribution allows and adds one token of its own (arXiv:2211.17192, arXiv:2302.01318).

Read down: verify and accept (exactness is decided there), the drafts, DraftLengthController (how many tokens to
propose), Speculation (a step, as the engine calls it). Knows models and sampling, nothing of text.

Why it is exact. A token x was drawn from p_draft and is kept with probability min(1, p_target(x) / p_draft(x)); if not,
one is drawn from max(0, p_target - p_draft), normalized. Then x comes out with probability
  p_draft(x) min(1, p_target(x) / p_draft(x)) + P(rejected) max(0, p_target(x) - p_draft(x)) / sum = p_target(x),
because the first term is min(p_draft, p_target)(x), and P(rejected) is just the sum that the second is divided by.
A draft that is deterministic (a token found in a text, or the likeliest) is p_draft = 1 at its token. Then the rule is:
draw the model's own token, with the noise of plain decoding, and keep the proposed one if it is the same. So with such
drafts the tokens themselves, not only their distribution, are those of plain decoding.

What it is worth. If each proposed token is kept with probability a, a step gives 1 + a + ... + a^k =
(1 - a^(k+1)) / (1 - a) tokens, and takes k c + v times as long as a plain one: c is the cost of a drafted token, v that
of the pass over k + 1 tokens. The controller measures a, c and v while it runs.
"""

import os
import time
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import exponential_noise
from model import Transformer
from report import kv_bytes, weight_bytes
from sampling import Sampling, probabilities, sample

MAX_K = 15  # with the token before them 16, up to which a pass is bound by reading weights
AUTO_K = 7  # the most that --speculate_k auto proposes
WIDTHS = (2, 4, 8, 16)  # tokens of a pass, where shapes are fixed
MIN_GAIN = 1.05  # over plain steps, by the formula: less may be noise
CATCH_UP_TOKENS = 512  # that a draft model reads of each row in a step, where it lags behind
DRAFT_SEED = 0x5851F42D4C957F2D  # makes the draft's noise another one than the model's
ACCEPT = 1  # the stream of noise that decides what is kept; the model's own draws have stream 0

# ---------------------------------------------------------------- the one verification


def verify(model, inputs: Tensor, drafted: Tensor, lengths: Tensor, p_draft: Tensor | None, sampling: Sampling):
    """The model's pass over each row's last token and the tokens drafted after it.

    inputs (3,B) as engine.decode takes them; drafted (B,k) int64, of which the first lengths (B,) count; p_draft
    (B,k,V) float32, the distributions they were drawn from, or None: the draft is deterministic.
    Returns tokens (B,k+1), of which the first count (B,) are found: those kept and one of the model's own; their
    log-probabilities (B,k+1), the logits (B,k+1,V).
    """
    token, position, rows = inputs.unbind(0)
    ahead = torch.arange(drafted.shape[1] + 1, device=token.device)
    there = (position >= 0)[:, None] & (ahead <= lengths[:, None])
    x = model.hidden(torch.cat([token[:, None], drafted], 1), torch.where(there, position[:, None] + ahead, -1), rows)
    logits = model.head(x)[..., : model.config.n_token]  # (B,k+1,V)
    if p_draft is None:
        tokens, logprobs = sample(logits, rows, position + 1, drafted, sampling)
        tokens = tokens if model.split is None else model.split.decided(tokens)
        return tokens, leading(drafted == tokens[:, :-1], lengths) + 1, logprobs, logits
    p_target = probabilities(logits, rows, position + 1, drafted, sampling)
    tokens, count = accept(p_target, p_draft, drafted, lengths, position + 1, sampling.seed[rows])
    if model.split is not None:
        tokens, count = model.split.decided(tokens), model.split.decided(count)
    logprobs = logits.float().log_softmax(-1).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    return tokens, count, logprobs, logits


def accept(p_target: Tensor, p_draft: Tensor, drafted: Tensor, lengths: Tensor, position: Tensor, seed: Tensor):
    """The rule above. p_target (B,k+1,V) and p_draft (B,k,V) float32 are the distributions at the k + 1 places, drafted
    (B,k) was drawn from p_draft, of which lengths (B,) count; position (B,) is that of the first of them, seed (B,).

    Returns tokens (B,k+1) and count (B,), as verify does; -1 where p_target is not finite.
    """
    B, k = drafted.shape
    ahead = torch.arange(k + 1, device=drafted.device)
    p, q = (probs[:, :k].gather(2, drafted[..., None])[..., 0] for probs in (p_target, p_draft))  # (B,k)
    zero = torch.zeros_like(drafted)
    uniform = torch.exp(-exponential_noise(seed[:, None], position[:, None] + ahead[:k], zero, ACCEPT))  # (B,k)
    kept = leading(uniform * q < p, lengths)  # (B,)
    p_draft = F.pad(p_draft, (0, 0, 0, 1)) * (ahead < lengths[:, None])[..., None]  # 0 where nothing was proposed
    row = torch.arange(B, device=drafted.device)
    p, q = p_target[row, kept], p_draft[row, kept]  # (B,V)
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.amax(1, keepdim=True) > 0, rest, p)  # the two are equal but for rounding
    ids = torch.arange(p.shape[1], device=drafted.device)
    last = (rest / exponential_noise(seed[:, None], (position + kept)[:, None], ids)).argmax(1)  # (B,)
    last = torch.where(p.sum(1).isfinite(), last, -1)
    return torch.where(ahead == kept[:, None], last[:, None], F.pad(drafted, (0, 1))), kept + 1


def leading(right: Tensor, lengths: Tensor) -> Tensor:
    """How many of the first lengths (B,) are right (B,k) before the first that is not, (B,)."""
    ahead = torch.arange(right.shape[1], device=right.device)
    return (right & (ahead < lengths[:, None])).long().cumprod(1).sum(1)


# ---------------------------------------------------------------- drafts
#
# A draft's rows live and die with the engine's:
#   begin(engine)          once
#   add(row, tokens)       a request has begun in this row: its prompt and the first new token
#   propose(batch, k)      Proposal for the rows of a Batch, or None where there is nothing to propose
#   accepted(row, tokens)  a step has found these, the last one by the model itself
#   remove(row)
#   reads(k, lengths)      bytes of (weights, KV cache) read for k tokens after texts of these lengths


@dataclass
class Batch:
    """The rows of a decode step (engine.Row), and its input (3,B) as engine.decode takes it, perhaps with padding."""

    rows: list
    inputs: Tensor

    @property
    def random(self) -> bool:
        """Whether any row is drawn at random, not greedily."""
        return any(row.request.params.temperature > 0 for row in self.rows)


@dataclass
class Proposal:
    drafted: Tensor  # (B,k) int64
    lengths: Tensor  # (B,) int64: how many of them count
    p_draft: Tensor | None = None  # (B,k,V) float32; None: the draft is deterministic


class ModelDraft:
    """A smaller model with the same vocabulary, and KV caches of its own. Or, with shares_caches, the same model in
    fewer bits, which works in the model's own caches: it has no prompts to read, and the model's pass overwrites what
    it writes."""

    def __init__(self, draft: Transformer, shares_caches: bool):
        self.draft, self.shares_caches = draft, shares_caches
        self.weight_bytes = weight_bytes(draft, 1)
        self.held: list[list[int]] = []  # the tokens that each of its own cache rows holds
        self.fed: dict[int, int] = {}  # of each row, how many proposed tokens it has read itself

    def begin(self, engine):
        self.engine, self.sampling = engine, engine.sampling
        self.next_token = engine.steps.compile(next_token)
        if self.shares_caches:
            return share_caches(engine.model, self.draft)
        self.draft.setup_caches(len(engine.rows), engine.length)
        self.held = [[] for _ in engine.rows]

    def add(self, row: int, tokens: list[int]):
        if not self.shares_caches:
            self.held[row] = os.path.commonprefix([self.held[row], tokens[:-1]])

    def remove(self, row: int):
        self.fed.pop(row, None)

    def accepted(self, row: int, tokens: list[int]):
        if not self.shares_caches:
            self.held[row] = self.held[row] + tokens[:-1][: self.fed.pop(row, 0)]

    def propose(self, batch, k: int) -> Proposal | None:
        """k tokens a row, each from the draft's distribution after those before it.

        In caches of its own the first pass reads two tokens: of what the last step found it has read all but the last
        token, or where all were accepted all but the last two, and to read one again changes nothing.
        """
        token, position, rows = batch.inputs.unbind(0)
        tokens, places = token[:, None], position[:, None]  # (B,1)
        ready = position >= 0
        if not self.shares_caches:
            self.catch_up(batch.rows)
            late = [len(self.held[row.index]) < len(row.tokens) - 1 for row in batch.rows]
            late += [True] * (len(token) - len(late))
            ready = ~torch.tensor(late, device=token.device)
            before = [row.tokens[-1] for row in batch.rows] + [0] * (len(token) - len(batch.rows))
            tokens = torch.stack([torch.tensor(before, device=token.device), token], 1)  # (B,2)
            tokens = tokens.clamp(max=self.draft.config.vocab_size - 1)  # ids that its table does not have
            places = torch.where(ready[:, None], torch.stack([position - 1, position], 1), -1)
        lengths = torch.where(ready, (self.engine.length - 1 - position).clamp(max=k), 0)  # as far as the cache goes
        V = self.engine.model.config.n_token or self.engine.model.config.vocab_size
        random = batch.random
        drafted, probs = [], []
        for i in range(k):
            at = position + 1 + i  # of the token to be drawn
            new, p = self.next_token(self.draft, tokens, places, rows, self.sampling, V, random)
            drafted.append(new.clone())  # a CUDA graph reuses its outputs
            probs.append(p.clone() if random else None)
            tokens, places = drafted[-1][:, None], torch.where(i + 1 < lengths, at, -1)[:, None]
        if not self.shares_caches:
            for row, length in zip(batch.rows, lengths.tolist()):
                if length:
                    self.held[row.index] = (
                        self.held[row.index] + [*row.tokens, row.request.new_tokens[-1]][len(self.held[row.index]) :]
                    )
                    self.fed[row.index] = length - 1
        drafted = torch.stack(drafted, 1)
        if self.engine.model.split is not None:
            drafted = self.engine.model.split.decided(drafted)
        return Proposal(drafted, lengths, torch.stack(probs, 1) if random else None)

    def catch_up(self, rows: list):
        """Read some of what its own caches lack, where that is more than the last two tokens."""
        late = [row for row in rows if len(self.held[row.index]) < len(row.tokens) - 1]
        parts = [row.tokens[len(self.held[row.index]) :][:CATCH_UP_TOKENS] for row in late]
        if not late:
            return
        start = time.perf_counter()
        width, device = max(map(len, parts)), self.draft.device
        tokens, input_pos = torch.zeros(len(late), width, dtype=torch.int64), torch.full((len(late), width), -1)
        for i, (row, part) in enumerate(zip(late, parts)):
            held = self.held[row.index]
            tokens[i, : len(part)] = torch.tensor(part).clamp(max=self.draft.config.vocab_size - 1)
            input_pos[i, : len(part)] = torch.arange(len(held), len(held) + len(part))
            self.held[row.index] = held + part
        index = torch.tensor([row.index for row in late], device=device)
        self.draft(tokens.to(device), input_pos.to(device), index)
        seconds = time.perf_counter() - start  # is prefill, in the middle of a decode step
        self.engine.timing.prefill_s += seconds
        self.engine.timing.decode_s -= seconds

    def reads(self, k: int, lengths: list[int]) -> tuple[float, float]:
        return k * self.weight_bytes, k * kv_bytes(self.draft, lengths)


def share_caches(model: Transformer, draft: Transformer):
    for name in ("rope_cos", "rope_sin"):
        draft.register_buffer(name, getattr(model, name), persistent=False)
    for mine, theirs in zip(draft.blocks, model.blocks):
        for name in ("k_cache", "v_cache", "slopes"):
            mine.attention.register_buffer(name, getattr(theirs.attention, name), persistent=False)


def next_token(draft, tokens, places, rows, sampling: Sampling, V: int, random: bool):
    """One token (B,) after tokens (B,S) at places (B,S) of cache rows (B,), among the V that the model has; and if it
    is drawn at random, the distribution (B,V) that it was drawn from."""
    logits = draft(tokens, places, rows)[:, None, : draft.config.n_token][
        ..., :V
    ]  # (B,1,V), or less of a shorter table
    sampling = sampling._replace(seed=sampling.seed ^ DRAFT_SEED)
    arguments = (logits, rows, places[:, -1] + 1, tokens[:, :0], sampling)
    token = sample(*arguments)[0][:, 0].clamp(min=0)
    if not random:
        return token, None
    probs = probabilities(*arguments)[:, 0]
    return token, F.pad(probs, (0, V - probs.shape[1]))


class LookupDraft:
    """What followed when the newest tokens stood somewhere before: in the row itself, prompt included, or in other
    texts (retrieval). The longest match counts, of equals the latest. There is no second model."""

    def __init__(self, texts: list[list[int]] = ()):
        self.texts = [StaticIndex(tokens) for tokens in texts]
        self.rows: dict[int, BigramIndex] = {}

    def begin(self, engine):
        config = engine.model.config
        self.length, self.vocab_size = engine.length, config.n_token or config.vocab_size

    def add(self, row: int, tokens: list[int]):
        self.rows[row] = BigramIndex(list(tokens))

    def remove(self, row: int):
        self.rows.pop(row, None)

    def accepted(self, row: int, tokens: list[int]):
        self.rows[row].tokens += tokens

    def propose(self, batch, k: int) -> Proposal | None:
        found = []
        for row in batch.rows:
            index = self.rows[row.index]
            room = min(k, self.length - len(index.tokens))
            matches = [other.match(index.tokens, room) for other in (index, *self.texts)]
            tokens = max(matches, key=lambda match: match[0])[1]
            padding = next((i for i, token in enumerate(tokens) if token >= self.vocab_size), None)
            found.append(tokens[:padding])  # a prompt may hold ids that only pad the table; the model never says them
        if not any(found):
            return None
        device = batch.inputs.device
        found += [[]] * (batch.inputs.shape[1] - len(found))
        drafted = torch.tensor([tokens + [0] * (k - len(tokens)) for tokens in found], device=device)
        return Proposal(drafted, torch.tensor([len(tokens) for tokens in found], device=device))

    def reads(self, k: int, lengths: list[int]) -> tuple[float, float]:
        return 0.0, 0.0


class BigramIndex:
    """Where each pair of neighbouring tokens of a growing text stands."""

    MAX_MATCH, MAX_PLACES = 8, 32  # tokens that may match, of which two have to; places that are looked at

    def __init__(self, tokens: list[int]):
        self.tokens, self.indexed = tokens, 1  # tokens that are in the index
        self.ends: dict[tuple[int, int], list[int]] = {}

    def end_positions(self, pair: tuple[int, int]) -> list[int]:
        """The latest end positions of this bigram, ascending, of those that something follows."""
        for end in range(self.indexed + 1, len(self.tokens)):
            self.ends.setdefault((self.tokens[end - 2], self.tokens[end - 1]), []).append(end)
        self.indexed = max(self.indexed, len(self.tokens) - 1)
        return self.ends.get(pair, [])[-self.MAX_PLACES :]

    def following(self, end: int, n: int) -> list[int]:
        """The n tokens from a position on; beyond the end of the text they repeat, as a loop does."""
        found = self.tokens[end : end + n]
        while len(found) < n:
            found.append(found[len(found) - (len(self.tokens) - end)])
        return found

    def match(self, tail: list[int], n: int) -> tuple[int, list[int]]:
        """(how many tokens match the end of tail, at most n that follow them): (0, []) where fewer than two match."""
        best, best_end = 0, 0
        for end in reversed(self.end_positions(tuple(tail[-2:]))) if n > 0 and len(tail) > 1 else ():
            limit, size = min(self.MAX_MATCH, end, len(tail)), 2
            while size < limit and self.tokens[end - size - 1] == tail[-size - 1]:
                size += 1
            if size > best:
                best, best_end = size, end
        return (best, self.following(best_end, n)) if best else (0, [])


class StaticIndex(BigramIndex):
    """The same of a text that does not grow, in 16 bytes a token."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        ids = torch.tensor(tokens, dtype=torch.int64)
        self.pairs, order = (ids[:-2] << 32 | ids[1:-1]).sort(stable=True)  # nothing follows the last pair
        self.order = order + 2

    def end_positions(self, pair: tuple[int, int]) -> list[int]:
        key = torch.tensor(pair[0] << 32 | pair[1])
        first, stop = (int(torch.searchsorted(self.pairs, key, right=right)) for right in (False, True))
        return self.order[max(first, stop - self.MAX_PLACES) : stop].tolist()

    def following(self, end: int, n: int) -> list[int]:
        return self.tokens[end : end + n]


# ---------------------------------------------------------------- how many tokens to propose


def typical(seconds) -> float:
    """The lower quartile: what a step takes when nothing else disturbs it."""
    return sorted(seconds)[len(seconds) // 4]


def recent():
    return field(default_factory=lambda: deque(maxlen=8))


@dataclass
class DraftLengthController:
    """How many tokens to propose: always k, or what pays best by what has been measured, up to k.

    A step with k tokens gives (1 - a^(k+1)) / (1 - a) tokens and takes k draft_s + verify_s. Where no k gives MIN_GAIN
    times the tokens a second of plain steps, it tries 1, 2 and 4 in turn, and stops trying while the time lost that way
    is more than two plain steps and 1 % of all time.
    """

    k: int
    automatic: bool
    accepted: float = 0.0  # tokens proposed and accepted, and proposed and judged; older steps count less
    judged: float = 0.0
    lost_s: float = 0.0  # compared with plain steps, less what was won; and all time, in the last hundred steps or so
    total_s: float = 0.0
    plain_s: deque = recent()  # of the latest plain steps
    draft_s: deque = recent()  # of a drafted token
    verify_s: deque = recent()  # of the rest of a step: the pass over k + 1 tokens, and what happens between steps
    lengths: deque = recent()  # their k
    tries: int = 0
    since_plain: int = 0  # steps: what a plain one takes changes with the length of the texts, and with the machine

    def choose(self) -> int:
        """The number of tokens to propose in the next step; 0: none."""
        if not self.automatic:
            return self.k
        if len(self.plain_s) < 4 or self.since_plain >= 64:
            return 0
        if self.lost_s > 2 * typical(self.plain_s) + 0.01 * self.total_s:
            return 0
        if len(self.verify_s) >= 2:
            rates = [expected_tokens(self.acceptance, k) / seconds for k, seconds in enumerate(self.step_seconds())]
            best = max(range(1, self.k + 1), key=rates.__getitem__)
            if rates[best] > MIN_GAIN * rates[0]:
                return best
        self.tries += 1
        return min(self.k, 1 << (self.tries - 1) % 3)

    @property
    def acceptance(self) -> float:
        return min(0.99, (self.accepted + 1) / (self.judged + 1.5))

    def step_seconds(self) -> list[float]:
        """What a step takes by what has been measured: a plain one, and with 1 to self.k tokens proposed."""
        plain_s, draft_s, verify_s = map(typical, (self.plain_s, self.draft_s, self.verify_s))
        extra_s = max(0.0, verify_s - plain_s)
        measured_k = sorted(self.lengths)[len(self.lengths) // 2]  # the extra time is in proportion to k
        return [plain_s] + [k * draft_s + plain_s + extra_s * k / measured_k for k in range(1, self.k + 1)]

    def note(self, seconds: float, k: int = 0, draft_s: float = 0.0, kept: list[int] = (), lengths: list[int] = ()):
        """A step's time, and of it the draft's; how many tokens of each row were kept of how many. k = 0: plain."""
        if k == 0:
            self.plain_s.append(seconds)
            self.since_plain = 0
            return self.pass_time(seconds, 0.0)
        self.since_plain += 1
        judged = sum(min(n + 1, length) for n, length in zip(kept, lengths))
        self.accepted, self.judged = 0.9 * self.accepted + sum(kept), 0.9 * self.judged + judged
        self.draft_s.append(draft_s / k)
        self.verify_s.append(seconds - draft_s)
        self.lengths.append(k)
        if self.plain_s:
            tokens = sum(n + 1 for n in kept) / len(kept)
            took = min(seconds, 4 * self.step_seconds()[k])  # a draft may have had to catch up, or the machine hung
            self.pass_time(took, took - tokens * typical(self.plain_s))

    def pass_time(self, seconds: float, lost_s: float):
        self.total_s = 0.99 * self.total_s + seconds
        self.lost_s = max(-0.1 * self.total_s, 0.99 * self.lost_s + lost_s)


def expected_tokens(a: float, k: int) -> float:
    """Of a step, where each proposed token is kept with probability a < 1."""
    return (1 - a ** (k + 1)) / (1 - a)


# ---------------------------------------------------------------- a step


@dataclass
class Report:
    """Counts and seconds over all steps."""

    steps: int = 0  # with a proposal
    plain_steps: int = 0
    draft_s: float = 0.0
    step_s: float = 0.0  # of the model's passes
    accepted: list[int] = field(default_factory=list)  # by place in the proposal
    judged: list[int] = field(default_factory=list)
    rows: int = 0  # with a proposal, over all steps
    proposed: int = 0  # tokens

    def note(self, kept: list[int], lengths: list[int]):
        self.steps += 1
        for counts in (self.accepted, self.judged):
            counts += [0] * (max(lengths) - len(counts))
        for n, length in zip(kept, lengths):
            self.rows += length > 0
            self.proposed += length
            for i in range(min(n + 1, length)):
                self.judged[i] += 1
                self.accepted[i] += i < n

    def numbers(self, decode_s: float) -> dict:
        """For --json: tokens accepted a proposal, the share accepted at each place of those judged, shares of time."""
        rows = max(1, self.rows)
        seconds = {"draft": self.draft_s, "verify": self.step_s}
        shares = {name: s / decode_s for name, s in seconds.items()} if decode_s else {}
        return {
            "mean_accepted_tokens": sum(self.accepted) / rows,
            "speculation": {
                "steps": self.steps,
                "plain_steps": self.plain_steps,
                "mean_proposed_tokens": self.proposed / rows,
                "acceptance_by_place": [a / b for a, b in zip(self.accepted, self.judged) if b],
                "share_of_time": shares | ({"rest": 1 - sum(shares.values())} if shares else {}),
            },
        }


class Speculation:
    """A draft, how many tokens it proposes, and the verification: what the engine calls in place of a plain step.

    k: tokens to propose, or with automatic the most. rehearsing: every graph is run, so that all are compiled.
    """

    def __init__(self, draft, k: int = AUTO_K, automatic: bool = True):
        assert 1 <= k <= MAX_K, k
        self.draft, self.controller = draft, DraftLengthController(k, automatic)
        self.report, self.rehearsing = Report(), False
        self.last: tuple | None = None  # when the last step began, and what the controller is to be told about it

    def begin(self, engine):
        self.engine, self.model, self.steps = engine, engine.model, engine.steps
        self.verify = engine.steps.compile(verify)
        self.draft.begin(engine)

    def choose_length(self) -> int:
        return self.controller.k if self.rehearsing else self.controller.choose()

    def add(self, row: int, tokens: list[int]):
        self.draft.add(row, tokens)
        self.last = None  # the time until the next step is not that of decoding alone

    def remove(self, row: int):
        self.draft.remove(row)
        self.last = None

    def step(self, rows: list, inputs: Tensor, k: int) -> tuple[list[list[int]], Tensor, Tensor]:
        """New tokens of each row, their log-probabilities (B,n), the logits (B,n,V). Arguments as in Batch."""
        start, batch = time.perf_counter(), Batch(rows, inputs)
        proposal = self.draft.propose(batch, k) if k else None
        self._synchronize()
        drafted = time.perf_counter()
        if self.rehearsing:
            return self._rehearse(batch, proposal)
        if proposal is None:
            tokens, logprobs, logits = self.steps.decode(self.model, batch.inputs, self.engine.sampling)
            found, lengths = tokens.tolist()[: len(batch.rows)], []
        else:
            tokens, count, logprobs, logits = self._look(batch, proposal)
            found = [line[:n] for line, n in zip(tokens.tolist(), count.tolist())][: len(batch.rows)]
            lengths = proposal.lengths.tolist()[: len(batch.rows)]
        for row, new in zip(batch.rows, found):
            self.draft.accepted(row.index, new)
        self._note(batch, found, k, lengths, start, drafted)
        return found, logprobs, logits

    def _look(self, batch, proposal: Proposal):
        drafted, p_draft = proposal.drafted, proposal.p_draft
        if self.steps.fixed_shapes:
            width = next(width for width in WIDTHS if width > drafted.shape[1])
            missing = width - 1 - drafted.shape[1]
            drafted = F.pad(drafted, (0, missing))
            p_draft = None if p_draft is None else F.pad(p_draft, (0, 0, 0, missing))
        return self.verify(self.model, batch.inputs, drafted, proposal.lengths, p_draft, self.engine.sampling)

    def _rehearse(self, batch, proposal: Proposal | None):
        """Run the verification in each of its widths, none of whose tokens count; then a plain step.

        Its arguments are new tensors: a part of another keeps that one's strides, with which a graph is compiled anew.
        """
        for width in WIDTHS:
            if width // 2 <= self.controller.k:
                zero = torch.zeros(batch.inputs.shape[1], width - 1, dtype=torch.int64, device=batch.inputs.device)
                p_draft = None
                if proposal is not None and proposal.p_draft is not None:
                    p_draft = proposal.p_draft[:, :1].repeat(1, width - 1, 1)
                lengths = zero.new_zeros(len(zero))
                self._look(batch, Proposal(zero, lengths, p_draft))
        tokens, logprobs, logits = self.steps.decode(self.model, batch.inputs, self.engine.sampling)
        found = tokens.tolist()[: len(batch.rows)]
        for row, new in zip(batch.rows, found):
            self.draft.accepted(row.index, new)
        return found, logprobs, logits

    def _synchronize(self):
        if self.model.device.type == "cuda":  # the draft's time is measured, which costs less than a hundredth of it
            torch.cuda.synchronize()

    def _note(self, batch, found: list[list[int]], k: int, lengths: list[int], start: float, drafted: float):
        """Count what the step found. The controller hears of the one before: whole, from one start to the next."""
        if self.last is not None:
            self.controller.note(start - self.last[0], *self.last[1:])
        self.report.draft_s += drafted - start
        self.report.step_s += time.perf_counter() - drafted
        if not lengths:
            self.report.plain_steps += 1
            self.last = (start,)
            return
        kept = [len(tokens) - 1 for tokens in found]
        self.report.note(kept, lengths)
        self.last = (start, k, drafted - start, kept, lengths)
        weights, kv = self.draft.reads(k, [len(row.tokens) for row in batch.rows])
        self.engine.timing.draft_bytes += weights
        self.engine.timing.kv_bytes += kv
