"""Speculative decoding: several tokens per pass over the weights, with the same output distribution as plain decoding.

A draft proposes k tokens for each row, and the target model reads all of them in one pass. That pass costs much less
than k + 1 passes over one token, because it reads the weights once. The target model accepts a prefix of each proposal
and adds one token of its own (arXiv:2211.17192, arXiv:2302.01318).

Read down: verify and accept, on which exactness depends; what a draft is; Controller, which decides who proposes how
many tokens; Speculation, whose `step` the engine calls. The drafts are in drafts/: draft_model.py (another model),
retrieval.py (earlier text), heads.py (trained heads). Knows nothing of text.

Why it is exact. A token x that was drawn from p_draft is accepted with probability min(1, p_target(x) / p_draft(x)). If
it is rejected, a token is drawn from the residual max(0, p_target - p_draft), normalized. So x comes out with
probability
  p_draft(x) min(1, p_target(x) / p_draft(x)) + P(rejected) max(0, p_target(x) - p_draft(x)) / sum = p_target(x),
because the first term is min(p_draft, p_target)(x), and P(rejected) equals the sum by which the residual is normalized.
For a deterministic draft (retrieval, heads, or a greedy draft model), p_draft is 1 at its token. Then the rule is:
sample from the target model, with the same noise as plain decoding, and accept the proposed token if it is the sampled
one. So with a deterministic draft even the tokens themselves, not only their distribution, are those of plain decoding.

What it gains. If each proposed token is accepted with probability a, a step yields 1 + a + ... + a^k =
(1 - a^(k+1)) / (1 - a) tokens. It takes k c + v times as long as a plain step, where c is the time of drafting one
token, and v that of the target's pass over k + 1 tokens, both relative to a plain step. The controller measures a, c
and v while it runs.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import exponential_noise
from report import synchronize
from sampling import Sampling, probabilities, sample

MAX_K = 15  # the verifying pass then has 16 tokens per row, the most that the CPU kernels take in one decode pass
WIDTHS = (1, 2, 4, 8, 16)  # tokens per row of a pass of the target with fixed shapes: k + 1 is rounded up to one
ACCEPT = 1  # the `stream` of the noise that decides what is accepted; tokens are drawn with stream 0

# ---------------------------------------------------------------- verification


def verify(model, inputs: Tensor, drafted: Tensor, lengths: Tensor, p_draft: Tensor | None, sampling: Sampling):
    """Run the target model over the last token and the drafted tokens of each row, and decide which ones to accept.

    inputs (3,B) int64 are those of engine.decode. drafted (B,k) int64: the first lengths (B,) tokens of each row are
    its proposal, the rest is padding. p_draft (B,k,V) float32 are the distributions that the tokens were drawn from, or
    None if the draft is deterministic. With k = 0 this is a plain decode step.

    Returns tokens (B,k+1), count (B,), log-probabilities (B,k+1), logits (B,k+1,V) and hidden states (B,D). The first
    `count` tokens of a row are its new tokens: the accepted tokens and one token of the target model, which was sampled
    from the row's hidden state.
    """
    token, position, rows = inputs.unbind(0)
    offsets = torch.arange(drafted.shape[1] + 1, device=token.device)
    is_real = (position >= 0)[:, None] & (offsets <= lengths[:, None])  # (B,k+1); the rest is padding
    input_pos = torch.where(is_real, position[:, None] + offsets, -1)
    x = model.hidden(torch.cat([token[:, None], drafted], 1), input_pos, rows)
    logits = model.head(x)[..., : model.config.n_token]  # (B,k+1,V)
    if p_draft is None:
        tokens, logprobs = sample(logits, rows, position + 1, drafted, sampling)
        tokens = tokens if model.shard is None else model.shard.broadcast(tokens)
        count = count_leading(drafted == tokens[:, :-1], lengths) + 1
        return tokens, count, logprobs, logits, at_last_token(x, count)
    p_target = probabilities(logits, rows, position + 1, drafted, sampling)
    tokens, count = accept(p_target, p_draft, drafted, lengths, position + 1, sampling.seed[rows])
    if model.shard is not None:
        tokens, count = model.shard.broadcast(tokens), model.shard.broadcast(count)
    logprobs = logits.float().log_softmax(-1).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    return tokens, count, logprobs, logits, at_last_token(x, count)


def at_last_token(x: Tensor, count: Tensor) -> Tensor:
    """The hidden state (B,D) at each row's last accepted token. x (B,S,D), count (B,) as `verify` returns it."""
    return x[torch.arange(len(x), device=x.device), count - 1]


def accept(p_target: Tensor, p_draft: Tensor, drafted: Tensor, lengths: Tensor, position: Tensor, seed: Tensor):
    """Accept drafted tokens or resample (arXiv:2211.17192, algorithm 1). Returns tokens and count as `verify` does.

    p_target (B,k+1,V) float32 are the target's distributions; p_draft, drafted and lengths are as in `verify`. position
    (B,) int64: the position of the first drafted token; seed (B,) int64: the row's seed. If p_target is not finite, the
    row's last new token is -1.
    """
    B, k = drafted.shape
    offsets = torch.arange(k + 1, device=drafted.device)
    target, draft = (p[:, :k].gather(2, drafted[..., None])[..., 0] for p in (p_target, p_draft))  # (B,k)
    zero = torch.zeros_like(drafted)
    uniform = torch.exp(-exponential_noise(seed[:, None], position[:, None] + offsets[:k], zero, ACCEPT))  # (B,k)
    accepted = count_leading(uniform * draft < target, lengths)  # (B,)
    p_draft = F.pad(p_draft, (0, 0, 0, 1)) * (offsets < lengths[:, None])[..., None]  # 0 where nothing was proposed
    row = torch.arange(B, device=drafted.device)
    target, draft = p_target[row, accepted], p_draft[row, accepted]  # (B,V), at the first token that is not accepted
    residual = (target - draft).clamp(min=0)
    residual = torch.where(residual.amax(1, keepdim=True) > 0, residual, target)  # all 0: equal but for rounding
    ids = torch.arange(target.shape[1], device=drafted.device)
    last = (residual / exponential_noise(seed[:, None], (position + accepted)[:, None], ids)).argmax(1)  # (B,)
    last = torch.where(target.sum(1).isfinite(), last, -1)
    return torch.where(offsets == accepted[:, None], last[:, None], F.pad(drafted, (0, 1))), accepted + 1


def count_leading(is_right: Tensor, lengths: Tensor) -> Tensor:
    """The number of True values before the first False, among the first lengths (B,) values of each row of is_right."""
    offsets = torch.arange(is_right.shape[1], device=is_right.device)
    wrong_at = torch.where(is_right, is_right.shape[1], offsets)
    return torch.cat([wrong_at, lengths[:, None]], 1).amin(1)


# ---------------------------------------------------------------- drafts
#
# A draft is an object with these functions:
#   begin(engine)            is called once, by Speculation.begin
#   add(row, tokens)         a request has started in this cache row; tokens are its prompt and its first new token
#   propose(batch, k)        returns a Proposal of up to k tokens for each row of a Batch, or None if it has none at all
#   accepted(row, tokens)    the row has these new tokens after a step; the last one is the target model's own
#   remove(row)              the request in this cache row has ended
#   bytes_read(k, positions) returns the bytes of weights and of KV cache that drafting k tokens reads; positions: the
#                            number of filled cache positions of each row
#   choices(k)               returns the numbers of tokens, up to k, that are worth choosing from, ascending
#   observe(rows, hidden)    optional: each step's rows, and the hidden states (B,D) that their last tokens come from
# and `name`, what the report calls it, and `is_free`: whether proposing takes next to no time, and its proposals have
# `chances`. Then the proposal is made first, and decides whether it is used.


@dataclass
class Batch:
    """The rows (engine.Row) of a decode step, and its inputs (3,B) as in engine.decode; B may include padding rows."""

    rows: list
    inputs: Tensor

    @property
    def random(self) -> bool:
        """Whether any row samples at random instead of greedily."""
        return any(row.request.params.temperature > 0 for row in self.rows)


@dataclass
class Proposal:
    drafted: Tensor  # (B,k) int64
    lengths: Tensor  # (B,) int64: how many tokens of each row are proposed; the rest is padding
    p_draft: Tensor | None = None  # (B,k,V) float32: their distributions; None if the draft is deterministic
    # (B,k) float32: the estimated probability that each token is accepted if those before it are (padding: 0), or None
    chances: Tensor | None = None

    def cut(self, k: int) -> "Proposal":
        """The first k tokens of each row, without their chances."""
        if k >= self.drafted.shape[1]:
            return self
        # A copy with the strides of a new tensor: for others, compiled graphs would be compiled again.
        parts = [
            None if x is None else x[:, :k].clone(memory_format=torch.contiguous_format)
            for x in (self.drafted, self.p_draft)
        ]
        return Proposal(parts[0], self.lengths.clamp(max=k), parts[1])

    def expected_accepted(self) -> list[float]:
        """How many of the first 1, 2, ... k tokens will probably be accepted, summed over the rows."""
        rows = [accumulate(accumulate(chances, mul)) for chances in self.chances.tolist()]
        return [sum(column) for column in zip(*rows)]


# ---------------------------------------------------------------- what to propose

OPTIMISM = 1.0025  # what was not measured in a step is assumed to have become better by this factor
FIRST_OPTIMISM = 1.03  # replaces OPTIMISM while there are fewer than FIRST_MEASUREMENTS, so that they are made soon
FIRST_MEASUREMENTS = 4
FIRST_FACTOR = 0.6  # of a single measurement: it is much too long, as code and data have to be read into the caches
FIRST_PLAIN_STEPS = 2  # the first steps are plain, to measure them
MEASUREMENTS = 8  # a usual duration is an average of about so many
SLOWNESS_RATE = 0.2  # how fast the estimated slowness of the machine follows the measurements
OUTLIER = 1.5  # longer or shorter durations than expected count as if they differed by this factor
RECENT = 0.9  # of the counts of accepted tokens in the last steps, so much remains after another step
LONG_RECENT = 0.99  # the same for a longer time
AVERAGE_WEIGHT = 10  # the acceptance rate of the longer time counts like so many tokens of the last steps


def expected_tokens(a: float, k: int) -> float:
    """The mean number of new tokens of a step with k proposed tokens, each accepted with probability a < 1."""
    return (1 - a ** (k + 1)) / (1 - a)


def width_of(k: int) -> int:
    """The tokens per row of the pass that verifies k proposed tokens: the next of WIDTHS."""
    return next(width for width in WIDTHS if width > k)


def full_width_choices(k: int) -> list[int]:
    """The numbers of tokens up to k that fill one of WIDTHS, and k: a compiled pass over fewer tokens would cost as
    much, and of few choices each is measured sooner."""
    return sorted({width - 1 for width in WIDTHS if 1 < width <= k} | {k})


def optimism(age: int, factor: float = OPTIMISM) -> float:
    """How much better something is assumed to have become that was not tried for so many steps."""
    return factor ** min(age, 1000)


class Durations:
    """Estimated seconds of several pieces of work: their usual seconds, times the present slowness of the machine.

    All pieces share the slowness, as other programs and longer contexts slow all of them down. So pieces remain
    comparable that were measured at different times. A piece is a pair (what, size). The longer ago it was measured,
    the faster it is assumed to be (OPTIMISM), because that may have changed, too.
    """

    def __init__(self):
        self.slowness, self.steps = 1.0, 0
        self.usual: dict[tuple, float] = {}  # piece -> seconds
        self.measurements = Counter()  # piece -> how many there were
        self.measured_at: dict[tuple, int] = {}  # piece -> the step of the last one

    def add(self, piece: tuple, seconds: float):
        """Add a measurement of this step."""
        self.measurements[piece] += 1
        self.measured_at[piece] = self.steps
        usual = max(seconds, 1e-9) / self.slowness
        if self.measurements[piece] <= FIRST_MEASUREMENTS:  # some are much too long: the shortest one counts
            self.usual[piece] = min(usual, self.usual.get(piece, usual))
            return
        ratio = min(OUTLIER, max(1 / OUTLIER, usual / self.usual[piece]))
        self.usual[piece] *= ratio ** (1 / min(self.measurements[piece], MEASUREMENTS))
        self.slowness *= ratio**SLOWNESS_RATE

    def of(self, piece: tuple) -> float | None:
        """The estimated seconds of a piece, or None if it was never measured."""
        if piece not in self.usual:
            return None
        seconds, age = self.usual[piece] * self.slowness, self.steps - self.measured_at[piece]
        if self.measurements[piece] >= FIRST_MEASUREMENTS:
            return seconds / optimism(age)
        return (FIRST_FACTOR if self.measurements[piece] == 1 else 1) * seconds / optimism(age, FIRST_OPTIMISM)


class Acceptance:
    """The estimated probability that a proposed token is accepted: the rate of the last steps, drawn towards that of a
    longer time, because few tokens say little. Older steps count less."""

    def __init__(self):
        self.accepted = self.judged = 0.0  # in the last steps
        self.long_accepted = self.long_judged = 0.0

    @property
    def rate(self) -> float:
        average = (self.long_accepted + 1) / (self.long_judged + 2)  # Laplace's rule of succession
        return (self.accepted + AVERAGE_WEIGHT * average) / (self.judged + AVERAGE_WEIGHT)

    def add(self, accepted: list[int], k: int):
        """Add a step in which k tokens were proposed, and the rows accepted so many of them."""
        yes, judged = sum(accepted), sum(min(n + 1, k) for n in accepted)  # shorter proposals count as rejected
        self.accepted, self.judged = RECENT * self.accepted + yes, RECENT * self.judged + judged
        self.long_accepted = LONG_RECENT * self.long_accepted + yes
        self.long_judged = LONG_RECENT * self.long_judged + judged


class Controller:
    """Decides which draft proposes, and how many tokens, so that the new tokens per second are the most.

    A step with k proposed tokens takes the draft's time for k tokens and the time of a pass over k + 1 tokens. It
    yields one token per row and those that are accepted. How many that will be is known from the proposal, if the draft
    estimates the chances of its tokens, and otherwise from the share that was accepted before.

    Only what is chosen is measured, and texts change. So the longer something was not chosen, the better it is assumed
    to be (OPTIMISM), until it is tried again.

    The first step after a change (to another draft, or between drafts and plain steps) is slower, because weights and
    code have left the caches. So it is repeated at once, and is measured only while measurements are few. Proposals
    with known chances are neither repeated nor left out.
    """

    def __init__(self, drafts: int):
        # Of passes ("pass", width), and of drafting (index of the draft, k). 1, 2 to 3, 4 to 7 ... rows have their own.
        self.durations_of_rows: defaultdict[int, Durations] = defaultdict(Durations)
        self.durations = self.durations_of_rows[1]  # those of the present number of rows
        self.steps = 0
        self.last: tuple[int, int] | None = None  # the last choice; None after a proposal with known chances
        self.must_repeat = False  # the last step was the first after a change
        self.acceptance = [Acceptance() for _ in range(drafts)]
        self.used_at = [0] * drafts  # the last step in which each was chosen

    def choose(self, rows: int, options: list[tuple[list[int], list[float] | None]]) -> tuple[int, int]:
        """The draft to use and the number of tokens to propose for `rows` rows; 0 tokens mean a plain step.

        options: for each draft, the numbers of tokens that it can propose, ascending, and if it has proposed already,
        how many of the first 1, 2, ... tokens will probably be accepted, summed over the rows; otherwise None.
        """
        self.durations = self.durations_of_rows[rows.bit_length()]
        if self.durations.measurements["pass", 1] < FIRST_PLAIN_STEPS:
            return 0, 0
        best, choice = rows / self.durations.of(("pass", 1)), (0, 0)
        for draft, (choices, gains) in enumerate(options):
            a, bonus = self.acceptance[draft].rate, optimism(self.steps - self.used_at[draft])
            if gains is None and not any(piece[0] == draft for piece in self.durations.usual):
                choices = choices[:1]  # a slow draft is noticed at the least cost
            for k in reversed(choices):
                if gains is not None:
                    rate = (rows + gains[k - 1]) / self.pass_s(width_of(k))
                else:
                    seconds = self.pass_s(width_of(k)) + self.draft_s(draft, k, choices)
                    rate = rows * expected_tokens(a, k) / seconds * bonus
                if rate > best:
                    best, choice = rate, (draft, k)
        has_chances = choice[1] > 0 and options[choice[0]][1] is not None
        if not self.must_repeat or has_chances:
            return choice
        draft, k = self.last
        return self.last if k == 0 or k in options[draft][0] else choice

    def pass_s(self, width: int) -> float:
        """Seconds of a pass. One that was never measured is assumed to take as long as the next smaller one: that is
        too little, so it is tried."""
        return self.durations.of(("pass", width)) or self.pass_s(width // 2)

    def draft_s(self, draft: int, k: int, choices: list[int]) -> float:
        """Seconds of drafting k tokens. If they were never measured, they are assumed to take as long per token as a
        larger number of tokens, or else as a smaller one; 0 if there is none."""
        known = [other for other in choices if (draft, other) in self.durations.usual]
        other = next((other for other in known if other >= k), known[-1] if known else None)
        return self.durations.of((draft, other)) * k / other if other else 0.0

    def update(self, choice: tuple[int, int], seconds: tuple[float, float], accepted: list[int], has_chances: bool):
        """Update the estimates with a step: what `choose` chose, the seconds of draft and target, how many tokens each
        row accepted, and whether the chances of the proposed tokens were known."""
        (draft, k), (draft_s, target_s) = choice, seconds
        self.steps += 1
        self.durations.steps += 1
        pieces = {("pass", width_of(k)): target_s} | ({(draft, k): draft_s} if k else {})
        after_change = self.last is None or (draft, k > 0) != (self.last[0], self.last[1] > 0)
        self.must_repeat = after_change and not has_chances
        for piece, piece_s in pieces.items():
            if not self.must_repeat or self.durations.measurements[piece] < FIRST_MEASUREMENTS:
                self.durations.add(piece, piece_s)
        self.last = None if has_chances else choice
        if k:
            self.acceptance[draft].add(accepted, k)
            self.used_at[draft] = self.steps


# ---------------------------------------------------------------- a step


@dataclass
class Report:
    """Counts and seconds, summed over all steps."""

    steps: int = 0  # with a proposal
    plain_steps: int = 0
    proposed: int = 0  # tokens
    draft_s: float = 0.0
    target_s: float = 0.0  # of the target model's passes, those of plain steps included
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_K)  # tokens, by their place in the proposal
    judged: list[int] = field(default_factory=lambda: [0] * MAX_K)  # accepted tokens, and the first rejected of a row
    # By the draft's name: "steps" that verified its proposals, "proposed_tokens", "accepted_tokens", and "seconds" in
    # which it proposed, also what was not used then
    drafts: dict[str, Counter] = field(default_factory=dict)

    def count(self, draft: str, **counts):
        """Add to the counts of the draft with this name."""
        self.drafts.setdefault(draft, Counter()).update(counts)

    def add(self, draft: str, accepted: list[int], lengths: list[int]):
        """Count a step. accepted, lengths: how many tokens each row accepted, and how many the draft proposed to it."""
        self.steps += 1
        self.proposed += sum(lengths)
        self.count(draft, steps=1, proposed_tokens=sum(lengths), accepted_tokens=sum(accepted))
        for n, length in zip(accepted, lengths):
            for place in range(min(n + 1, length)):
                self.accepted[place] += place < n
                self.judged[place] += 1

    def numbers(self, decode_s: float) -> dict:
        """The fields of --json (docs/speculation.md): means per proposal, acceptance rates by place, shares of decode_s
        seconds, and the counts of each draft."""
        proposals = max(1, self.judged[0])  # the first token of each proposal is always judged
        shares = {"draft": self.draft_s / decode_s, "verify": self.target_s / decode_s} if decode_s else {}
        speculation = {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "mean_proposed_tokens": self.proposed / proposals,
            "acceptance_by_place": [a / b for a, b in zip(self.accepted, self.judged) if b],
            "share_of_time": shares and shares | {"rest": 1 - sum(shares.values())},
            "drafts": [
                {"name": name}
                | {key: counts[key] for key in ("steps", "proposed_tokens", "accepted_tokens")}
                | {"share_of_time": counts["seconds"] / decode_s if decode_s else None}
                for name, counts in self.drafts.items()
            ],
        }
        return {"mean_accepted_tokens": sum(self.accepted) / proposals, "speculation": speculation}


class Speculation:
    """Runs the decode steps of the engine with drafts: propose, verify, and choose what to propose next.

    k is the number of tokens to propose, or if `automatic` the largest number. With a fixed k, the first of the drafts
    that has a proposal is used. While `rehearsing` is True, as in load.warm_up, every step runs all graphs that a later
    step may need, so that they are compiled.
    """

    def __init__(self, drafts: list, k: int = MAX_K, automatic: bool = True):
        assert 1 <= k <= MAX_K and drafts, k
        self.drafts, self.k, self.automatic = drafts, k, automatic
        self.controller, self.report, self.rehearsing = Controller(len(drafts)), Report(), False
        for i, draft in enumerate(drafts):
            if draft.name in self.report.drafts:  # a draft model's directory may be called medusa
                draft.name = f"{draft.name} ({i + 1})"
            self.report.count(draft.name)  # so that drafts that never propose are reported, too

    def begin(self, engine):
        self.engine, self.model, self.steps = engine, engine.model, engine.steps
        self.verify = engine.steps.compile(verify)
        for draft in self.drafts:
            draft.begin(engine)

    def add(self, row: int, tokens: list[int]):
        for draft in self.drafts:
            draft.add(row, tokens)

    def remove(self, row: int):
        for draft in self.drafts:
            draft.remove(row)

    def step(self, rows: list, inputs: Tensor) -> tuple[list[list[int]], Tensor, Tensor]:
        """The new tokens of each row, their log-probabilities (B,n) and the logits (B,n,V). Arguments as in Batch."""
        batch, timing = Batch(rows, inputs), self.engine.timing
        if self.rehearsing:
            self._rehearse(batch)
        start, trials = time.perf_counter() - timing.prefill_s, self.engine.threads.trials
        index, proposal = self._propose(batch)
        start += timing.prefill_s  # the time in which a draft model read a prompt counts as prefill, not here
        drafted = time.perf_counter()
        tokens, count, logprobs, logits, hidden = self._verify(batch, proposal or self._empty_proposal(batch))
        new_tokens = [line[:n] for line, n in zip(tokens.tolist(), count.tolist())][: len(rows)]
        for draft in self.drafts:
            if hasattr(draft, "observe"):
                draft.observe(rows, hidden)
            for row, new in zip(rows, new_tokens):
                draft.accepted(row.index, new)
        if not self.rehearsing:
            accepted = [len(new) - 1 for new in new_tokens]
            seconds = drafted - start, time.perf_counter() - drafted
            self._measure(rows, index, proposal, accepted, seconds, is_trial=self.engine.threads.trials > trials)
        return new_tokens, logprobs, logits

    def _propose(self, batch: Batch) -> tuple[int, Proposal | None]:
        """The chosen draft's index, and its proposal, or None for a plain step."""
        if self.rehearsing:  # _rehearse has run every draft; accepted tokens could end the request before it has all
            return 0, None
        if not self.automatic:
            proposals = ((i, self._ask(i, batch, self.k)) for i in range(len(self.drafts)))
            return next((found for found in proposals if found[1] is not None), (0, None))
        options, proposals = [], {}
        for i, draft in enumerate(self.drafts):
            gains, choices = None, draft.choices(self.k)
            if draft.is_free:
                proposals[i] = self._ask(i, batch, self.k)
                gains = proposals[i] and proposals[i].expected_accepted()
                choices = [] if gains is None else [k for k in choices if k <= len(gains)]
            options.append((choices, gains))
        index, k = self._choice_of_rank_0(self.controller.choose(len(batch.rows), options))
        if k == 0:
            return index, None
        proposal = proposals[index] if index in proposals else self._ask(index, batch, k)
        return index, proposal and proposal.cut(k)

    def _ask(self, index: int, batch: Batch, k: int) -> Proposal | None:
        """The proposal of a draft. The report counts its time, without that of reading prompts."""
        draft, timing = self.drafts[index], self.engine.timing
        start = time.perf_counter() - timing.prefill_s
        proposal = draft.propose(batch, k)
        synchronize(self.model.device)
        self.report.count(draft.name, seconds=time.perf_counter() - timing.prefill_s - start)
        return proposal

    def _most(self) -> int:
        """The largest number of tokens that any draft proposes."""
        return max(k for draft in self.drafts for k in draft.choices(self.k)) if self.automatic else self.k

    def _choice_of_rank_0(self, choice: tuple[int, int]) -> tuple[int, int]:
        """Rank 0's choice: the other ranks have measured other times."""
        if self.model.shard is None:
            return choice
        return tuple(self.model.shard.broadcast(torch.tensor(choice, device=self.model.device)).tolist())

    def _empty_proposal(self, batch: Batch) -> Proposal:
        """A proposal of no tokens, with which `verify` is a plain step."""
        drafted = torch.zeros(batch.inputs.shape[1], 0, dtype=torch.int64, device=batch.inputs.device)
        return Proposal(drafted, drafted.new_zeros(len(drafted)))

    def _measure(self, rows: list, index: int, proposal, accepted: list[int], seconds, is_trial: bool):
        """Add a step to the report, the engine's timing, and the controller's estimates, unless it was a trial of
        another number of threads. seconds: of the draft and of the target."""
        self.report.draft_s += seconds[0]
        self.report.target_s += seconds[1]
        k = 0 if proposal is None else proposal.drafted.shape[1]
        lengths = [] if proposal is None else proposal.lengths.tolist()[: len(rows)]
        if not is_trial and (k == 0 or any(lengths)):  # a draft model that still reads the prompts proposes nothing
            self.controller.update((index if k else 0, k), seconds, accepted, k > 0 and self.drafts[index].is_free)
        if k == 0:
            self.report.plain_steps += 1
            return
        self.report.add(self.drafts[index].name, accepted, lengths)
        weights, kv = self.drafts[index].bytes_read(k, [len(row.tokens) for row in rows])
        self.engine.timing.draft_bytes += weights
        self.engine.timing.kv_bytes += kv

    def _verify(self, batch, proposal: Proposal):
        """Call `verify`. With fixed shapes, first pad the proposal to the next of WIDTHS."""
        drafted, p_draft = proposal.drafted, proposal.p_draft
        if self.steps.fixed_shapes:
            missing = width_of(drafted.shape[1]) - 1 - drafted.shape[1]
            drafted = F.pad(drafted, (0, missing))
            p_draft = None if p_draft is None else F.pad(p_draft, (0, 0, 0, missing))
        kind, fixed = f"verify {drafted.shape[1] + 1}", not self.model.backend.thread_invariant
        with self.engine.threads.of(kind, len(batch.rows), fixed):
            return self.verify(self.model, batch.inputs, drafted, proposal.lengths, p_draft, self.engine.sampling)

    def _rehearse(self, batch):
        """Run each draft in each length, and the verification in each width that k can need, with empty proposals.

        The arguments are new tensors: a slice would have other strides, and the graph would be compiled again for them.
        """
        proposals = [draft.propose(batch, k) for draft in self.drafts for k in {*draft.choices(self.k), self._most()}]
        random = [proposal for proposal in proposals if proposal is not None and proposal.p_draft is not None]
        most = self._most()
        for width in WIDTHS:
            zero = torch.zeros(batch.inputs.shape[1], width - 1, dtype=torch.int64, device=batch.inputs.device)
            if width == 1 or (width // 2 <= most and (not random or len(self.drafts) > 1)):
                self._verify(batch, Proposal(zero, zero.new_zeros(len(zero))))
            if random and 1 <= width // 2 <= most:
                p_draft = random[0].p_draft[:, :1].repeat(1, width - 1, 1)
                self._verify(batch, Proposal(zero, zero.new_zeros(len(zero)), p_draft))
