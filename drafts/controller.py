"""Chooses the draft and the draft length with the most expected tokens per second.

Read down: Recent and Rate, which estimate times and acceptance rates from the latest steps; Candidate, a choice;
Controller. Knows numbers only: no model, no tokens.

The cost of a step is estimated before it is tried. A pass over one token per row takes as long as a plain step, which
is measured first. Each extra token of the pass adds about as much as a token of a prompt takes, which prefill has
measured if the prompt was not short; somewhat more in a pass over many tokens. A draft takes as long as a plain step
that reads as many bytes. Measurements replace these prior estimates, which apply again when the measurements are old.
So a proposal that cannot pay off by these estimates is never tried.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

WINDOW = 7  # measurements, of which the median counts
MEMORY = 256  # steps after which a measurement is forgotten; rates decay with this time constant
FIRST_PLAIN_STEPS = 2  # with each number of rows
MARGIN = 1.08  # estimates err, so a proposal must promise this many times the tokens per second of plain steps
BATCH_MARGIN = 1.2  # the same for several rows: those that get ahead end sooner, and fewer rows share the later steps
FEW_TOKENS = 8  # in a pass, up to which an extra token takes no longer than in prefill
EXTRA_TOKEN = 0.2  # of a plain step: an estimate of what an extra token adds, after a prompt too short to measure it
LONGER = 1.4  # in longer passes, an extra token takes this many times as long as in prefill (measured: 1.1 to 1.6)
PRIOR = 0.5, 2.0  # for a draft without measurements: its acceptance rate, and how many tokens this counts as
DECAY = 0.98  # older counts are multiplied by this when a new one is added


class Recent:
    """The median of the latest measurements. It begins at a prior estimate, which counts as one of them."""

    def __init__(self):
        self.values: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # (step, measurement)
        self.latest: tuple[float | None, float | None] | None = None  # the latest prior estimate, and its median

    def add(self, step: int, value: float):
        self.values.append((step, value))
        self.latest = None

    def median(self, step: int, prior: float | None = None) -> float | None:
        """None if there is neither a measurement nor a prior estimate. Of an even number of values, the smaller one in
        the middle: interruptions by other programs make measurements too long, never too short."""
        while self.values and self.values[0][0] < step - MEMORY:
            self.values.popleft()
            self.latest = None
        if self.latest is None or self.latest[0] != prior:
            values = sorted([value for _, value in self.values] + ([] if prior is None else [prior]))
            self.latest = prior, values[(len(values) - 1) // 2] if values else None
        return self.latest[1]


class Rate:
    """The share of expected tokens that were accepted. Older ones count less, and it begins at a prior estimate."""

    def __init__(self, prior: float, weight: float):
        """weight: the number of tokens that the prior estimate counts as."""
        self.prior, self.weight = prior, weight
        self.accepted, self.expected = prior * weight, weight

    @property
    def value(self) -> float:
        return self.accepted / self.expected

    def add(self, accepted: float, expected: float):
        self.accepted = DECAY * self.accepted + accepted
        self.expected = DECAY * self.expected + expected

    def fade(self):
        """Forget a little, and go back towards the prior estimate."""
        self.accepted += (self.prior * self.weight - self.accepted) / MEMORY
        self.expected += (self.weight - self.expected) / MEMORY


class Candidate(NamedTuple):
    """A proposal that may be made."""

    draft: int  # its index
    k: int  # tokens to propose for each row; of a draft that finds tokens, without fixed shapes, for all rows together
    tokens: int  # in the pass that verifies it, beyond one for each row; padding included
    accepted: float | None = None  # how many of them will probably be accepted; None: by the draft's rate of acceptance
    # The time of proposing, relative to that of a plain step: k times the c of arXiv:2211.17192. By the bytes read.
    draft_cost: float = 0.0


def expected_tokens(a: float, k: int) -> float:
    """The mean number of new tokens of a step with k proposed tokens, each accepted with probability a < 1."""
    return (1 - a ** (k + 1)) / (1 - a)


class Controller:
    """`choose` before each step, and `update` after it.

    priors: for each draft, the expected acceptance rate of its tokens, and the number of tokens that this expectation
    counts as. token_s: a function that returns the seconds that a token of a prompt takes, or None if it is not known.
    """

    def __init__(self, priors: list[tuple[float, float]], token_s: Callable[[], float | None]):
        self.token_s, self.steps = token_s, 0
        self.plain: defaultdict[int, Recent] = defaultdict(Recent)  # rows -> seconds of a plain step
        # Seconds that each extra token adds to a pass; separate for 1, 2 to 3, 4 to 7 ... rows and extra tokens.
        self.extra_token_s: defaultdict[tuple, Recent] = defaultdict(Recent)
        self.drafting: defaultdict[tuple, Recent] = defaultdict(Recent)  # (rows, draft, k) -> seconds of proposing
        self.acceptance = [Rate(*prior) for prior in priors]

    def choose(self, rows: int, candidates: Iterable[Candidate]) -> Candidate | None:
        """The candidate with the most new tokens per second, or None if none has clearly more than a plain step."""
        plain_s = self.plain[rows].median(self.steps)
        if plain_s is None or len(self.plain[rows].values) < FIRST_PLAIN_STEPS:
            return None
        best, choice = (MARGIN if rows == 1 else BATCH_MARGIN) * rows / plain_s, None
        for candidate in candidates:
            seconds = plain_s + self.extra_s(rows, candidate.tokens, plain_s)
            if candidate.accepted is None:
                prior = candidate.draft_cost * plain_s
                seconds += self.drafting[rows, candidate.draft, candidate.k].median(self.steps, prior)
            rate = self.new_tokens(rows, candidate) / seconds
            if rate > best:
                best, choice = rate, candidate
        return choice

    def could_gain(self, rows: int, k: int) -> bool:
        """Whether a proposal of up to k tokens per row would pay off if all of them were accepted. If not, a draft need
        not look for any."""
        most = rows * k
        sizes = {most, min(most, max(1, FEW_TOKENS - rows)), *(2**i - 1 for i in range(1, most.bit_length()))}
        return self.choose(rows, [Candidate(0, n, n, n) for n in sizes]) is not None

    def new_tokens(self, rows: int, candidate: Candidate) -> float:
        """The expected number of new tokens of a step with this candidate."""
        if candidate.accepted is not None:
            return rows + candidate.accepted
        return rows * expected_tokens(min(self.acceptance[candidate.draft].value, 0.999), candidate.k)

    def extra_s(self, rows: int, tokens: int, plain_s: float) -> float:
        """The seconds that this many extra tokens add to a pass over one token per row."""
        token_s = self.token_s()
        prior = (EXTRA_TOKEN * plain_s if token_s is None else token_s) * (LONGER if rows + tokens > FEW_TOKENS else 1)
        return tokens * self.extra_token_s[rows.bit_length(), tokens.bit_length()].median(self.steps, prior)

    def update(self, rows: int, choice: Candidate | None, seconds: tuple[float, float], accepted: list[int]):
        """Learn from a step: what was chosen, the seconds of draft and target, how many tokens each row accepted."""
        self.steps += 1
        draft_s, target_s = seconds
        for rate in self.acceptance:
            rate.fade()  # so that a draft that is not used is tried again
        if choice is None:
            return self.plain[rows].add(self.steps, target_s)
        plain_s = self.plain[rows].median(self.steps)
        if plain_s is not None:
            extra_token_s = max(0.0, target_s - plain_s) / choice.tokens
            self.extra_token_s[rows.bit_length(), choice.tokens.bit_length()].add(self.steps, extra_token_s)
        if choice.accepted is None:
            self.drafting[rows, choice.draft, choice.k].add(self.steps, draft_s)
            verified = sum(min(n + 1, choice.k) for n in accepted)  # shorter proposals count as rejected
            self.acceptance[choice.draft].add(sum(accepted), verified)
