"""Speculative decoding: several tokens for one reading of the weights, and the same text law as without it.

A draft proposes k tokens a row; the model looks at all of them in one pass, which costs little more than that of one
token, for both are bound by reading the weights. Of each proposal the model keeps as long a beginning as its own law
allows and adds one token of its own (arXiv:2211.17192, arXiv:2302.01318).

Read down: verify and accept (exactness lives there), the drafts, Pace (how far to look ahead), Speculation (a step).
Knows models and sampling, nothing of text or of the command line.

Why it is exact. Token x was drawn from p_draft and is kept with probability min(1, p_target(x) / p_draft(x)); if not,
one is drawn from max(0, p_target - p_draft), made to sum to 1. Then x comes out with probability
  p_draft(x) min(1, p_target(x)/p_draft(x)) + P(rejected) max(0, p_target(x) - p_draft(x)) / sum = p_target(x),
for the first term is min(p_draft, p_target)(x), and P(rejected) is just the sum that the second is divided by. A draft
without chance (a token found in a text) is p_draft = 1 at its token. Temperature 0 is p_target = 1 at the likeliest: a
token is kept where it is that one. Nothing is divided by a probability anywhere.

What it is worth. If each proposed token is kept with probability a, a step gives 1 + a + ... + a^k =
(1 - a^(k+1)) / (1 - a) tokens, and takes k c + v times as long as a plain one: c is what the draft costs for a token, v
the pass over k + 1 tokens. `Pace` measures a, c and v while it runs.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Transformer
from report import kv_bytes, weight_bytes
from sampling import Sampling, exponential_noise, known, penalized, probabilities

MOST_K = 15  # with the token before them 16, up to which a pass is bound by reading weights
AUTO_K = 7  # the most that --speculate_k auto proposes
PAYS = 1.05  # times plain steps by the formula: less may be noise
DRAFT, ACCEPT = 1, 2  # streams of noise; what the model itself draws has plain decoding's, 0

# ---------------------------------------------------------------- the one verification


def verify(model, token, position, rows, settings: Sampling, seen, drafted, lengths, p_draft):
    """The model's pass over each row's token and the tokens drafted after it.

    token (B,) at position (B,), -1 where the row has ended; rows (B,) or None; drafted (B,k), of which the first
    lengths (B,) count; p_draft (B,k,V) float32, the laws they were drawn from, or None where there was no chance in it.
    seen (B,V) bool as `sample` takes it. Returns the tokens found, (B,k+1), -1 after the last; and the hidden state
    from which the last came, (B,D).
    """
    k = drafted.shape[1]
    ahead = torch.arange(k + 1, device=token.device)
    there = (position >= 0)[:, None] & (ahead <= lengths[:, None])
    x = model.hidden(torch.cat([token[:, None], drafted], 1), torch.where(there, position[:, None] + ahead, -1), rows)
    found = accept(known(model.head(x), model.config.n_token), position + 1, settings, seen, drafted, lengths, p_draft)
    found = found if model.split is None else model.split.decided(found)
    last = (found >= 0).sum(1) - 1
    return found, x[torch.arange(len(x), device=x.device), last]


def accept(logits, position, settings: Sampling, seen, drafted, lengths, p_draft) -> Tensor:
    """The tokens (B,k+1), -1 after the last: those of drafted (B,k) that are kept and one of the model's own.

    logits (B,k+1,V), for what comes at position (B,) and after it. The others as in verify.
    """
    B, k = drafted.shape
    ahead = torch.arange(k + 1, device=logits.device)
    seen = None if seen is None else seen_along(seen, drafted)
    every = settings.rows(torch.arange(B, device=logits.device).repeat_interleave(k + 1))  # B (k+1) rows
    if settings.temperature is None:
        own = penalized(logits.flatten(0, 1), every, seen).argmax(1).view(B, k + 1)
        kept = leading(drafted == own[:, :k], lengths)
        last = own.gather(1, kept[:, None])
    else:
        p_target = probabilities(logits.flatten(0, 1), every, seen).view(B, k + 1, -1)
        if p_draft is None:
            p_draft = torch.zeros_like(p_target[:, :k]).scatter(2, drafted[..., None], 1.0)
        p, q = (law[:, :k].gather(2, drafted[..., None])[..., 0] for law in (p_target, p_draft))  # (B,k)
        places = (position[:, None] + ahead[:k]).flatten()
        column = torch.zeros(B * k, 1, dtype=torch.int64, device=logits.device)
        seeds = settings.seed.repeat_interleave(k)
        chance = torch.exp(-exponential_noise(seeds, places, column, ACCEPT)).view(B, k)  # uniform in (0,1)
        kept = leading(chance * q < p, lengths)
        p_draft = F.pad(p_draft, (0, 0, 0, 1)) * (ahead < lengths[:, None])[..., None]  # 0 where nothing was proposed
        row = torch.arange(B, device=logits.device)
        p, q = p_target[row, kept], p_draft[row, kept]  # (B,V)
        rest = (p - q).clamp(min=0)
        rest = torch.where(rest.amax(1, keepdim=True) > 0, rest, p)  # the two are equal but for rounding
        ids = torch.arange(p.shape[1], device=logits.device).expand_as(p)
        last = (rest / exponential_noise(settings.seed, position + kept, ids)).argmax(1, keepdim=True)
    kept = kept[:, None]
    return torch.where(ahead < kept, F.pad(drafted, (0, 1)), torch.where(ahead == kept, last, -1))


def leading(right: Tensor, lengths: Tensor) -> Tensor:
    """How many of the first lengths (B,) are right (B,k) before the first that is not, (B,)."""
    ahead = torch.arange(right.shape[1], device=right.device)
    return (right & (ahead < lengths[:, None])).long().cumprod(1).sum(1)


def seen_along(seen: Tensor, drafted: Tensor) -> Tensor:
    """seen (B,V) as it is at each of the k + 1 places: with the tokens drafted before it; (B (k+1),V)."""
    along = [seen]
    for i in range(drafted.shape[1]):
        along.append(along[-1].scatter(1, drafted[:, i : i + 1], True))
    return torch.stack(along, 1).flatten(0, 1)


# ---------------------------------------------------------------- drafts
#
# A draft has `begin(texts)`, which hears of the texts that are to be continued, by cache row, and
#   propose(batch, texts, k, hidden) -> (drafted (B,k), lengths (B,), p_draft (B,k,V) or None), as `verify` takes them,
# or None where it has nothing to propose for any row; `kept` tells it what became of that, and `reads` says how much
# memory it took: (bytes of weights, of KV cache) for k tokens after texts of these lengths. batch is generate.py's
# Batch; texts grow as tokens are found; hidden (B,D) is the state that the last token came from, where there is one.


class ModelDraft:
    """A smaller model with the same vocabulary and KV caches of its own, filled by read(draft, texts by row, how many
    tokens of each row they hold). Or with read=None the same model in fewer bits, which works in the model's own
    caches: it has no prompt to read and nothing to catch up with, and what it writes the model's pass writes anew.
    """

    def __init__(self, model: Transformer, draft: Transformer, compiled: Callable, read: Callable | None):
        self.model, self.draft, self.read, self.shares_caches = model, draft, read, read is None
        self.draw = compiled(draw)
        self.weight_bytes = weight_bytes(draft, 1)
        self.texts: list[list[int]] = []  # of the last generation
        self.cached: list[int] = []  # of each row's text, how many tokens its own caches hold

    def begin(self, texts: list[list[int]]):
        theirs = self.model.blocks[0].attention.k_cache
        mine = self.draft.blocks[0].attention._buffers.get("k_cache")
        if self.shares_caches:
            if mine is not theirs:
                share_caches(self.model, self.draft)
            return
        if mine is None or (len(mine), mine.shape[2]) != (len(theirs), theirs.shape[2]):
            self.draft.setup_caches(len(theirs), theirs.shape[2] - 8)
            self.texts = []
        held = [text[:n] for text, n in zip(self.texts, self.cached)] + [[]] * len(texts)  # by rows
        self.cached = [in_common(a, b) for a, b in zip(held, texts)]
        self.texts = texts
        self.catch_up(list(range(len(texts))), texts)

    def propose(self, batch, texts: list[list[int]], k: int, hidden: Tensor | None):
        """k tokens a row, each from the draft's law after those before it.

        Its first pass in caches of its own reads two tokens: of those that the last step found it has seen all but the
        last, or where all were accepted all but the last two, and to read one again changes nothing.
        """
        token, position, seen, settings = batch.token, batch.position, batch.seen, batch.settings
        lengths = torch.where(position < 0, 0, (batch.slots - 1 - position).clamp(max=k))  # as far as the cache goes
        tokens, places = token[:, None], position[:, None]
        if not self.shares_caches:
            self.catch_up(batch.numbers, texts)
            for row in batch.numbers:
                self.cached[row] = len(texts[row])  # after the first pass
            tokens, places = torch.stack([batch.before, token], 1), torch.stack([position - 1, position], 1)
            tokens = tokens.clamp(max=self.draft.config.vocab_size - 1)  # what its table does not have
            places = torch.where(position[:, None] < 0, -1, places)
        drafted, laws, V = [], [], self.model.config.vocab_size
        for i in range(k):
            at = position + 1 + i  # of the token to be drawn
            new, law = self.draw(self.draft, tokens, places, batch.rows, settings, seen, at, V)
            drafted.append(new.clone())  # a CUDA graph reuses its outputs
            laws.append(law if law is None else law.clone())
            seen = None if seen is None else seen.scatter(1, drafted[-1][:, None], True)
            tokens, places = drafted[-1][:, None], torch.where(i + 1 < lengths, at, -1)[:, None]
        drafted = torch.stack(drafted, 1)
        if self.model.split is not None:
            drafted = self.model.split.decided(drafted)
        return drafted, lengths, None if laws[0] is None else torch.stack(laws, 1)

    def catch_up(self, rows: list[int], texts: list[list[int]]):
        """Read the rows of which its caches lack more than the last two tokens, up to the last one."""
        last_id = self.draft.config.vocab_size - 1
        late = [row for row in rows if self.cached[row] < len(texts[row]) - 2]
        lacking = {row: [min(token, last_id) for token in texts[row][:-1]] for row in late}
        if lacking:
            self.read(self.draft, lacking, self.cached)
        for row, text in lacking.items():
            self.cached[row] = len(text)

    def kept(self, rows: list[int], counts: list[int], k: int):
        """Of its proposals this many were kept, and with them what it wrote for them: for all but the last of k."""
        for row, n in zip(rows, counts) if not self.shares_caches else ():
            self.cached[row] += min(n, k - 1)

    def reads(self, k: int, lengths: list[int]) -> tuple[float, float]:
        return k * self.weight_bytes, k * kv_bytes(self.draft, lengths)


def in_common(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def share_caches(model: Transformer, draft: Transformer):
    for name in ("rope_cos", "rope_sin"):
        draft.register_buffer(name, getattr(model, name), persistent=False)
    for mine, theirs in zip(draft.blocks, model.blocks):
        for name in ("k_cache", "v_cache", "slopes"):
            mine.attention.register_buffer(name, getattr(theirs.attention, name), persistent=False)


def draw(draft, tokens, places, rows, settings: Sampling, seen, at, V: int):
    """One token (B,) for place `at` (B,) after tokens (B,S) at places (B,S), and the law (B,V) that it was drawn from;
    None for the law where all rows are greedy. V is the model's: a draft's table may be padded otherwise."""
    logits = known(draft(tokens, places, rows), draft.config.n_token)[:, :V]
    logits = F.pad(logits, (0, V - logits.shape[1]), value=-torch.inf)
    if settings.temperature is None:
        return penalized(logits, settings, seen).argmax(1), None
    law = probabilities(logits, settings, seen)
    ids = torch.arange(V, device=law.device).expand_as(law)
    return (law / exponential_noise(settings.seed, at, ids, DRAFT)).argmax(1), law


class Lookup:
    """What followed when the newest tokens stood somewhere before: in the row itself, prompt included, or in other
    texts (retrieval). The longest match counts, of equals the latest. No second model, and no chance in it."""

    def __init__(self, sources: list[list[int]] = ()):
        self.sources = [Source(tokens) for tokens in sources]
        self.rows: list[Index] = []

    def begin(self, texts: list[list[int]]):
        self.rows = [Index(text) for text in texts]

    def propose(self, batch, texts: list[list[int]], k: int, hidden: Tensor | None):
        found = []
        for row in batch.numbers:
            room = min(k, batch.slots - len(texts[row]))
            matches = [index.match(texts[row], room) for index in (self.rows[row], *self.sources)]
            found.append(max(matches, key=lambda match: match[0])[1] if row in batch.live else [])
        if not any(found):
            return None
        device = batch.token.device
        drafted = torch.tensor([tokens + [0] * (k - len(tokens)) for tokens in found], device=device)
        return drafted, torch.tensor([len(tokens) for tokens in found], device=device), None

    def kept(self, rows: list[int], counts: list[int], k: int):
        pass

    def reads(self, k: int, lengths: list[int]) -> tuple[float, float]:
        return 0.0, 0.0


class Index:
    """Where each pair of tokens of a growing text stands."""

    LONGEST, LATEST = 8, 32  # tokens that may match, of which two have to; of the places, how many are looked at

    def __init__(self, text: list[int]):
        self.text, self.done, self.ends = text, 1, {}  # tokens that are in it; pair -> where it ends, rising

    def places(self, pair: tuple[int, int]) -> list[int]:
        """Where it ends, rising, for the latest of these places that something follows."""
        for end in range(self.done + 1, len(self.text)):
            self.ends.setdefault((self.text[end - 2], self.text[end - 1]), []).append(end)
        self.done = max(self.done, len(self.text) - 1)
        return self.ends.get(pair, [])[-self.LATEST :]

    def following(self, where: int, most: int) -> list[int]:
        """What follows, and goes on with itself beyond the end of the text, as a loop does."""
        found = self.text[where : where + most]
        while len(found) < most:
            found.append(found[len(found) - (len(self.text) - where)])
        return found

    def match(self, tail: list[int], most: int) -> tuple[int, list[int]]:
        """(how many tokens match the end of tail, at most this many that follow): (0, []) where fewer than two do."""
        best, where = 0, 0
        for end in reversed(self.places(tuple(tail[-2:]))) if most > 0 and len(tail) > 1 else ():
            limit, size = min(self.LONGEST, end, len(tail)), 2
            while size < limit and self.text[end - size - 1] == tail[-size - 1]:
                size += 1
            if size > best:
                best, where = size, end
        return (best, self.following(where, most)) if best else (0, [])


class Source(Index):
    """The same of a text that is there as a whole, in 16 bytes a token."""

    def __init__(self, text: list[int]):
        self.text = text
        tokens = torch.tensor(text, dtype=torch.int64)
        self.pairs, order = (tokens[:-2] << 32 | tokens[1:-1]).sort(stable=True)  # but the last, which nothing follows
        self.order = order + 2

    def places(self, pair: tuple[int, int]) -> list[int]:
        key = torch.tensor(pair[0] << 32 | pair[1])
        first, stop = (int(torch.searchsorted(self.pairs, key, right=right)) for right in (False, True))
        return self.order[max(first, stop - self.LATEST) : stop].tolist()

    def following(self, where: int, most: int) -> list[int]:
        return self.text[where : where + most]


# ---------------------------------------------------------------- how far to look ahead


def typical(seconds) -> float:
    """The lower quartile: what a step takes when nothing else disturbs it."""
    return sorted(seconds)[len(seconds) // 4]


def recent():
    return field(default_factory=lambda: deque(maxlen=8))


@dataclass
class Pace:
    """How many tokens to propose: always k, or what pays best by what has been measured, up to k.

    A step of k tokens gives (1 - a^(k+1)) / (1 - a) and takes k draft_s + verify_s. Where no k gives PAYS times the
    tokens a second of plain steps, it tries 1, 2 and 4 in turn, and none while two steps and 1 % of the time are lost.
    """

    k: int
    automatic: bool
    fixed_width: bool  # verify's cost does not depend on k
    kept: float = 0.0  # tokens proposed and kept, and proposed and looked at; older steps count less
    looked_at: float = 0.0
    lost_s: float = 0.0  # to plain steps, less what was won; and all time, in the last hundred steps or so
    all_s: float = 0.0
    plain: deque = recent()  # seconds of the latest plain steps
    draft: deque = recent()  # of a drafted token
    verify: deque = recent()  # of the rest of a step: a pass over k + 1 tokens, and what happens between steps
    widths: deque = recent()  # their k
    tries: int = 0
    since_plain: int = 0  # steps: what a plain one takes changes with the length of the texts, and with the machine

    def choose(self) -> int:
        """The number of tokens to propose in the next step; 0: none."""
        if not self.automatic:
            return self.k
        if len(self.plain) < 4 or self.since_plain >= 64:
            return 0
        if self.lost_s > 2 * typical(self.plain) + 0.01 * self.all_s:
            return 0
        if len(self.verify) >= 2:
            rates = [expected_tokens(self.acceptance, k) / seconds for k, seconds in enumerate(self.step_seconds())]
            best = max(range(1, self.k + 1), key=rates.__getitem__)
            if rates[best] > PAYS * rates[0]:
                return best
        self.tries += 1
        return min(self.k, 1 << (self.tries - 1) % 3)

    @property
    def acceptance(self) -> float:
        return min(0.99, (self.kept + 1) / (self.looked_at + 1.5))

    def step_seconds(self) -> list[float]:
        """What a step takes by what has been measured: a plain one, and with 1 to self.k tokens proposed."""
        plain_s, draft_s, verify_s = map(typical, (self.plain, self.draft, self.verify))
        further_s = max(0.0, verify_s - plain_s)
        width = 0 if self.fixed_width else sorted(self.widths)[len(self.widths) // 2]  # what it is in proportion to
        costs = [k * draft_s + plain_s + further_s * (k / width if width else 1) for k in range(1, self.k + 1)]
        return [plain_s, *costs]

    def note(self, seconds: float, k: int = 0, draft_s: float = 0.0, kept: list[int] = (), lengths: list[int] = ()):
        """A step's time, and of it the draft's; of each row how many tokens were kept of how many. k = 0: plain."""
        if k == 0:
            self.plain.append(seconds)
            self.since_plain = 0
            return self.pass_time(seconds, 0.0)
        self.since_plain += 1
        looked_at = sum(min(n + 1, length) for n, length in zip(kept, lengths))
        self.kept, self.looked_at = 0.9 * self.kept + sum(kept), 0.9 * self.looked_at + looked_at
        self.draft.append(draft_s / k)
        self.verify.append(seconds - draft_s)
        self.widths.append(k)
        if self.plain:
            tokens = sum(n + 1 for n in kept) / len(kept)
            took = min(seconds, 4 * self.step_seconds()[k])  # a draft may have had to catch up; or the machine hung
            self.pass_time(took, took - tokens * typical(self.plain))

    def pass_time(self, seconds: float, lost_s: float):
        self.all_s = 0.99 * self.all_s + seconds
        self.lost_s = max(-0.1 * self.all_s, 0.99 * self.lost_s + lost_s)


def expected_tokens(a: float, k: int) -> float:
    """Of a step, where each proposed token is kept with probability a < 1."""
    return (1 - a ** (k + 1)) / (1 - a)


# ---------------------------------------------------------------- a step


class Clock:
    """Marks in time, by the device's own clock where it runs ahead of the program."""

    def __init__(self, device: torch.device):
        self.on_device = device.type == "cuda"

    def mark(self):
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, a, b) -> float:
        """From one mark to another, which the device must have passed."""
        return a.elapsed_time(b) * 1e-3 if self.on_device else b - a


@dataclass
class Report:
    """Counts and seconds over all steps."""

    steps: int = 0  # with a proposal
    plain_steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    plain_s: float = 0.0
    kept: list[int] = field(default_factory=list)  # by place in the proposal
    looked_at: list[int] = field(default_factory=list)
    rows: int = 0  # with a proposal, over all steps
    proposed: int = 0  # tokens

    def note(self, kept: list[int], lengths: list[int]):
        most = max(lengths)
        for counts in (self.kept, self.looked_at):
            counts += [0] * (most - len(counts))
        self.steps += 1
        for n, length in zip(kept, lengths):
            self.rows += length > 0
            self.proposed += length
            for i in range(min(n + 1, length)):
                self.looked_at[i] += 1
                self.kept[i] += i < n

    def numbers(self, decode_s: float) -> dict:
        """For --json: tokens kept a proposal, the share kept at each place of those that came to it, shares of time."""
        rows = max(1, self.rows)
        seconds = {"draft": self.draft_s, "verify": self.verify_s + self.plain_s}
        shares = {name: s / decode_s for name, s in seconds.items()} if decode_s else {}
        return {
            "mean_accepted_tokens": sum(self.kept) / rows,
            "speculation": {
                "steps": self.steps,
                "plain_steps": self.plain_steps,
                "mean_proposed_tokens": self.proposed / rows,
                "acceptance_by_place": [a / b for a, b in zip(self.kept, self.looked_at) if b],
                "share_of_time": shares | ({"rest": 1 - sum(shares.values())} if shares else {}),
            },
        }


class Speculation:
    """What generate() calls in the place of a plain step."""

    def __init__(self, model: Transformer, draft, steps, k: int, automatic: bool):
        assert 1 <= k <= MOST_K, k
        self.model, self.draft, self.steps = model, draft, steps
        self.verify = steps.compiled(verify)
        self.pace = Pace(k, automatic, steps.fixed_shapes)
        self.clock = Clock(model.norm.weight.device)
        self.report, self.hidden = Report(), None
        self.last: tuple | None = None  # of the last step: its first mark, and what `Pace` will hear of it
        self.rehearsing = False  # every path is taken, so that all is compiled, and nothing is measured

    def begin(self, texts: list[list[int]]):
        self.hidden = self.last = None
        self.draft.begin(texts)

    def step(self, batch, texts: list[list[int]], timing) -> tuple[Tensor, list[list[int]]]:
        """The next tokens of every row, (B,n) with -1 after the last of each, and the same as lists without these."""
        start = self.clock.mark()
        k = self.pace.k if self.rehearsing else self.pace.choose()
        if self.pace.automatic and self.model.split is not None:  # each rank has a clock of its own
            k = self.model.split.decided_number(k)
        proposal = self.draft.propose(batch, texts, k, self.hidden) if k else None
        drafted = self.clock.mark()
        if self.rehearsing and proposal is None:
            proposal = torch.zeros_like(batch.token)[:, None].expand(-1, k).contiguous(), batch.position * 0, None
        if proposal is None:
            found = self.plain_step(batch)
        else:
            found, lengths = self.look(batch, *proposal)
        verified = self.clock.mark()
        ids = [[token for token in row if token >= 0] for row in found.tolist()]
        if self.rehearsing:
            self.plain_step(batch)  # the tokens that follow are any
            return found, ids
        if proposal is not None:
            weights, kv = self.draft.reads(k, [len(texts[row]) for row in batch.live])
            timing.draft_bytes, timing.kv_bytes = timing.draft_bytes + weights, timing.kv_bytes + kv
        self.note(batch, ids, k, (start, drafted, verified), None if proposal is None else lengths.tolist())
        return found, ids

    def plain_step(self, batch) -> Tensor:
        self.hidden = None
        arguments = (batch.token, batch.position, batch.rows, batch.settings, batch.seen)
        return self.steps.decode(self.model, *arguments).clone()[:, None]  # a CUDA graph reuses its output

    def look(self, batch, drafted: Tensor, lengths: Tensor, p_draft: Tensor | None) -> tuple[Tensor, Tensor]:
        """The model's verdict (B,n) on a proposal, and the proposal's lengths."""
        if self.steps.fixed_shapes:  # one graph for proposals of any length
            missing = self.pace.k - drafted.shape[1]
            drafted = F.pad(drafted, (0, missing))
            p_draft = None if p_draft is None else F.pad(p_draft, (0, 0, 0, missing))
        arguments = (batch.token, batch.position, batch.rows, batch.settings, batch.seen, drafted, lengths, p_draft)
        found, hidden = self.verify(self.model, *arguments)
        self.hidden = hidden.clone()
        return found.clone(), lengths

    def note(self, batch, ids: list[list[int]], k: int, marks: tuple, lengths: list[int] | None):
        """Count what the step found. `Pace` hears of the one before: the time from one start to the next, whole."""
        start, drafted, verified = marks
        draft_s = self.clock.seconds(start, drafted)
        self.report.draft_s += draft_s
        step_s = self.clock.seconds(drafted, verified)
        if self.last is not None:
            self.pace.note(self.clock.seconds(self.last[0], start), *self.last[1:])
        self.last = (start,)
        if lengths is None:
            self.report.plain_steps += 1
            self.report.plain_s += step_s
            return
        self.report.verify_s += step_s
        self.draft.kept(batch.numbers, [len(row) - 1 for row in ids], k)
        live = [i for i, row in enumerate(batch.numbers) if row in batch.live]
        kept, lengths = [len(ids[i]) - 1 for i in live], [lengths[i] for i in live]
        self.last = (start, k, draft_s, kept, lengths)
        self.report.note(kept, lengths)
