"""Chooses the draft and the draft length with the most expected tokens per second.

Read down: Recent and Rate, which estimate times and acceptance rates from the latest steps;
Candidate, a choice; Controller. Knows numbers only: no model, no tokens.

The cost of a step is estimated before it is tried. A pass over one token per row takes as long as a
plain step, which is measured first. Each extra token of the pass adds about as much as a token of a
prompt takes, which prefill has measured if the prompt was not short; somewhat more in a pass over
many tokens. In a model with experts, it adds at least as much as reading the experts that no other
token of the pass has chosen. A draft takes as long as a plain step that reads as many bytes.
Measurements replace these prior estimates, which apply again when the measurements are old. So a
proposal that cannot pay off by these estimates is never tried.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

WINDOW = 7  # a time is the median of this many measurements
MEMORY = 256  # steps after which a measurement is forgotten; rates fade with this time constant
FIRST_PLAIN_STEPS = 2  # the first steps with each number of rows, which measure a plain step
# Estimates err, so a proposal must promise this many times the tokens per second of plain steps.
MARGIN = 1.08
# The same for several rows: those that get ahead end sooner, and fewer rows share the later steps.
BATCH_MARGIN = 1.2
FEW_TOKENS = 8  # in a pass over at most this many, an extra token takes as long as in prefill
LONGER = 1.4  # the relative cost of an extra token in a longer pass (measured: 1.1 to 1.6)
# An estimate for prompts too short to measure it: an extra token takes this share of a plain step.
EXTRA_TOKEN = 0.2
# The acceptance rate of a draft without measurements, and how many tokens this estimate counts as
PRIOR = (0.5, 2.0)
DECAY = 0.98  # older counts are multiplied by this when a new one is added


class Recent:
    """The median of the latest measurements. A prior estimate counts as one more measurement."""

    def __init__(self):
        self.values: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # (step, measurement)
        # (prior estimate, median) of the last call, until the measurements change
        self.latest: tuple[float | None, float | None] | None = None

    def add(self, step: int, value: float):
        self.values.append((step, value))
        self.latest = None

    def median(self, step: int, prior: float | None = None) -> float | None:
        """None if there is neither a measurement nor a prior estimate. If two values are in the
        middle, the smaller one: other programs that interrupt this one make measurements too long,
        never too short."""
        while self.values and self.values[0][0] < step - MEMORY:
            self.values.popleft()
            self.latest = None
        if self.latest is None or self.latest[0] != prior:
            values = [value for _, value in self.values]
            if prior is not None:
                values.append(prior)
            values.sort()
            middle = values[(len(values) - 1) // 2] if values else None
            self.latest = (prior, middle)
        return self.latest[1]


class Rate:
    """The share of expected tokens that were accepted. Older ones count less, and it begins at a
    prior estimate."""

    def __init__(self, prior: float, weight: float):
        """weight: the number of tokens that the prior estimate counts as."""
        self.prior = prior
        self.weight = weight
        self.accepted = prior * weight
        self.expected = weight

    @property
    def value(self) -> float:
        return self.accepted / self.expected

    def add(self, accepted: float, expected: float):
        self.accepted = DECAY * self.accepted + accepted
        self.expected = DECAY * self.expected + expected

    def fade(self):
        """Move both counts a little towards the prior estimate, so that old tokens are forgotten."""
        self.accepted += (self.prior * self.weight - self.accepted) / MEMORY
        self.expected += (self.weight - self.expected) / MEMORY


class Candidate(NamedTuple):
    """A proposal that may be made."""

    draft: int  # the index of the draft
    # How many tokens to propose for each row. For a free draft (Draft.is_free) without fixed
    # shapes, it is the number for all rows together.
    k: int
    # How many tokens the verifying pass has beyond one for each row, padding included
    tokens: int
    # How many of the proposed tokens will probably be accepted; None: the draft's rate estimates it
    accepted: float | None = None
    # The time of proposing relative to a plain step, by the bytes that both read: k times the c of
    # arXiv:2211.17192
    draft_cost: float = 0.0


class Controller:
    """`choose` before each step, and `update` after it.

    priors: for each draft, the expected acceptance rate of its tokens, and the number of tokens
    that this expectation counts as. extra_share(rows, tokens): how many bytes of weights each of
    these extra tokens adds to a plain step of these rows, divided by the bytes of the plain step; it
    does not grow with the number of tokens.
    """

    def __init__(
        self,
        priors: list[tuple[float, float]],
        extra_share: Callable[[int, int], float] = lambda rows, tokens: 0.0,
    ):
        self.extra_share = extra_share
        # The seconds that a token of a prompt takes, which speculative.py sets; None if they are not known
        self.token_s: float | None = None
        self.steps = 0
        # rows -> the seconds of a plain step
        self.plain: defaultdict[int, Recent] = defaultdict(Recent)
        # (rows, extra tokens) -> the seconds that each extra token adds to a pass. The keys are the
        # bit lengths of both numbers, so 4 to 7 rows, for example, share a measurement.
        self.extra_token_s: defaultdict[tuple, Recent] = defaultdict(Recent)
        # (rows, draft, k) -> the seconds of proposing
        self.drafting: defaultdict[tuple, Recent] = defaultdict(Recent)
        self.acceptance = [Rate(*prior) for prior in priors]

    def choose(self, rows: int, candidates: Iterable[Candidate]) -> Candidate | None:
        """The candidate with the most new tokens per second, or None if none has clearly more than
        a plain step."""
        plain_s = self.plain[rows].median(self.steps)
        if plain_s is None or len(self.plain[rows].values) < FIRST_PLAIN_STEPS:
            return None

        margin = MARGIN if rows == 1 else BATCH_MARGIN
        best = margin * rows / plain_s
        choice = None
        for candidate in candidates:
            seconds = plain_s + self.extra_s(rows, candidate.tokens, plain_s)
            if candidate.accepted is None:
                prior = candidate.draft_cost * plain_s
                drafting = self.drafting[rows, candidate.draft, candidate.k]
                seconds += drafting.median(self.steps, prior)
            rate = self.new_tokens(rows, candidate) / seconds
            if rate > best:
                best = rate
                choice = candidate
        return choice

    def new_tokens(self, rows: int, candidate: Candidate) -> float:
        """The expected number of new tokens of a step with this candidate."""
        if candidate.accepted is not None:
            return rows + candidate.accepted
        a = min(self.acceptance[candidate.draft].value, 0.999)  # the probability that a token is accepted
        return rows * ((1 - a ** (candidate.k + 1)) / (1 - a))

    def extra_s(self, rows: int, tokens: int, plain_s: float) -> float:
        """The seconds that this many extra tokens add to a pass over one token per row."""
        prior = EXTRA_TOKEN * plain_s if self.token_s is None else self.token_s
        if rows + tokens > FEW_TOKENS:
            prior *= LONGER
        prior = max(prior, self.extra_share(rows, tokens) * plain_s)
        recent = self.extra_token_s[rows.bit_length(), tokens.bit_length()]
        return tokens * recent.median(self.steps, prior)

    def update(self, rows: int, choice: Candidate | None, seconds: tuple, accepted: list[int]):
        """Learn from a step: what was chosen, the seconds of draft and target, and how many tokens
        each row accepted."""
        self.steps += 1
        draft_s, target_s = seconds
        for rate in self.acceptance:
            rate.fade()  # so that a draft that is not used is tried again
        if choice is None:
            self.plain[rows].add(self.steps, target_s)
            return

        plain_s = self.plain[rows].median(self.steps)
        if plain_s is not None:
            recent = self.extra_token_s[rows.bit_length(), choice.tokens.bit_length()]
            recent.add(self.steps, max(0.0, target_s - plain_s) / choice.tokens)
        if choice.accepted is None:
            self.drafting[rows, choice.draft, choice.k].add(self.steps, draft_s)
            # A proposal of fewer than k tokens counts as if its next token had been rejected
            verified = sum(min(n + 1, choice.k) for n in accepted)
            self.acceptance[choice.draft].add(sum(accepted), verified)
