"""The controller chooses what gives the most tokens per second, and tries nothing that cannot pay."""

import random

import pytest

from costs import WeightReads
from drafts.controller import BATCH_MARGIN, LONGER, MARGIN, MEMORY, PRIOR, WINDOW, Candidate, Controller, Rate, Recent
from drafts.draft_model import SelfDraft


def candidates(ks, draft=0, rows=1, draft_cost=0.0):
    """Those of a draft that has to be asked."""
    return [Candidate(draft, k, rows * k, None, draft_cost) for k in ks]


def found(likely, draft=0):
    """Those of a draft that knows that its first, second ... token is accepted with these probabilities."""
    return [Candidate(draft, n, n, sum(likely[:n])) for n in range(1, len(likely) + 1)]


class Machine:
    """Steps that take known times: a pass 1 s and `token_s` for each extra token, a proposal draft_s for a token."""

    def __init__(self, token_s: float, draft_s: float = 0.0, prior_s: float | None = None, drafts: int = 1):
        self.token_s, self.draft_s, self.rng = token_s, draft_s, random.Random(2)
        self.controller = Controller([PRIOR] * drafts)
        self.controller.token_s = token_s if prior_s is None else prior_s
        self.spent, self.tokens, self.chosen, self.slow = 0.0, 0, [], 1.0

    def step(self, options: list[Candidate], acceptance: float, rows: int = 1):
        choice = self.controller.choose(rows, options)
        k = choice.k if choice else 0
        accepted = [next((i for i in range(k) if self.rng.random() > acceptance), k) for _ in range(rows)]
        drafting, verifying = k * self.draft_s, 1.0 + self.token_s * (choice.tokens if choice else 0)
        self.controller.update(rows, choice, (drafting * self.slow, verifying * self.slow), accepted)
        self.spent += drafting + verifying
        self.tokens += rows + sum(accepted)
        self.chosen.append(k)


def drive(acceptance, token_s: float, draft_s: float, steps: int = 4000) -> tuple[float, int]:
    """How many times faster than plain steps, and the usual number of tokens in the end. Now and then a step is
    measured as a thousand times too slow, as if the machine had paused."""
    machine = Machine(token_s, draft_s)
    for step in range(steps):
        machine.slow = 1000 if step in (0, 5, 301, 302) else 1
        machine.step(candidates((1, 3, 7), draft_cost=draft_s), acceptance(step))
    return machine.tokens / machine.spent, sorted(machine.chosen[-100:])[50]


def test_it_finds_the_best_length():
    gain, k = drive(lambda step: 0.95, 0.07, 0.3)
    assert gain > 1.6 and k == 7
    gain, k = drive(lambda step: 0.55, 0.06, 0.1)
    assert gain > 1.2 and 1 <= k <= 3
    gain, _ = drive(lambda step: 0.97 * (step % 1000 > 500), 0.09, 0.2)  # the acceptance rate changes
    assert gain > 1.05
    _, k = drive(lambda step: 0.9 if step < 3000 else 0.1, 0.06, 0.05)  # a long history does not count forever
    assert k == 0


@pytest.mark.parametrize("a, token_s, draft_s", [(0.0, 0.14, 0.3), (0.3, 0.14, 1.0), (0.9, 0.14, 2.0), (0.0, 0.5, 0.0)])
@pytest.mark.parametrize("steps", [64, 256, 4000])
def test_a_draft_that_does_not_pay_costs_little(a, token_s, draft_s, steps):
    gain, k = drive(lambda step: a, token_s, draft_s, steps)
    assert gain > 0.97 and k == 0


def test_what_cannot_pay_is_never_tried():
    """Not even once: prefill has measured what a token costs."""
    machine = Machine(0.4)
    for _ in range(1000):
        machine.step(found([0.3, 0.09, 0.03]) + candidates((1, 3, 7), rows=8, draft_cost=2.0), 0.3)
    assert set(machine.chosen) == {0}
    machine.step(found([0.3, 0.09]), 1.0, rows=8)  # nor for other numbers of rows
    assert machine.chosen[-1] == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("a, least", [(0.94, 1.2), (0.3, 0.92)])
def test_a_draft_that_is_expected_to_be_good_is_tried(a, least, seed):
    """A token of it takes half a plain step, which pays if nearly all are accepted. Otherwise few steps are lost."""
    machine, options = Machine(0.08), candidates((1, 3, 7), draft_cost=0.5)
    machine.rng, machine.draft_s = random.Random(seed), 0.5
    machine.controller = Controller([SelfDraft.prior])
    machine.controller.token_s = 0.08
    for _ in range(300):
        machine.step(options, a)
    assert machine.tokens / machine.spent >= least and any(machine.chosen)


@pytest.mark.parametrize("token_s, least", [(0.05, 1.4), (1.0, 0.92)])
def test_a_good_draft_is_tried_after_a_short_prompt(token_s, least):
    """Which does not say what an extra token takes. If that is long, few steps are lost."""
    machine, options = Machine(token_s, draft_s=0.35), candidates((1, 3, 7), draft_cost=0.35)
    machine.controller = Controller([SelfDraft.prior])
    for _ in range(200):
        machine.step(options, 0.95)
    assert machine.tokens / machine.spent >= least and any(machine.chosen)


def test_known_probabilities_decide_how_many_tokens():
    machine = Machine(0.1)
    for likely, n in (([0.9, 0.8, 0.7, 0.2, 0.1], 3), ([0.1, 0.05], 0), ([0.99] * 15, 15), ([], 0), ([0.9], 1)):
        for _ in range(3):
            machine.step(found(likely), 0.5)
        assert machine.chosen[-1] == n


@pytest.mark.parametrize("prior_s, real_s, k", [(0.01, 1.2, 0), (0.3, 0.1, 7)])
def test_a_wrong_prior_estimate_is_corrected(prior_s, real_s, k):
    """Within few steps, if what it allows is tried at all."""
    machine = Machine(real_s, prior_s=prior_s)
    for _ in range(20):
        machine.step(found([0.9**n for n in range(1, 8)]), 0.9)
    assert machine.chosen[-5:] == [k] * 5


def test_each_number_of_rows_has_its_own_plain_steps():
    controller = Controller([PRIOR])
    controller.token_s = 0.1
    for rows, plain_s in ((1, 1.0), (8, 3.0)):
        for _ in range(2):
            assert controller.choose(rows, found([0.9] * 3)) is None, "the first steps are plain"
            controller.update(rows, None, (0.0, plain_s), [0] * rows)
    least = 1.1 * MARGIN - 1  # accepted, so that there are MARGIN times as many a second in 1.1 s as 1 in 1 s
    assert controller.choose(1, found([least - 0.01])) is None and controller.choose(1, found([least + 0.01]))
    longer_s = 3.0 + LONGER * 0.1  # for nine tokens are not few
    least = BATCH_MARGIN * 8 / 3 * longer_s - 8  # accepted, the same for 8 tokens in 3 s
    assert controller.choose(8, found([least - 0.01])) is None and controller.choose(8, found([least + 0.01]))


def test_a_slow_machine_changes_no_choice():
    machine, options = Machine(0.1), found([0.9, 0.8, 0.7, 0.05])
    for slow in (1.0, 1.6, 0.7):
        machine.slow = slow
        for _ in range(30):
            machine.step(options, 0.8)
        assert machine.chosen[-20:] == [3] * 20


def test_it_chooses_between_drafts():
    """Between one that costs time and is often right, and one whose proposals have known probabilities."""
    machine, model = Machine(0.06, draft_s=0.1, drafts=2), candidates((1, 3), draft=1, draft_cost=0.1)
    for _ in range(30):
        machine.step(model, 0.95)
    for likely, expected in (([0.2, 0.1, 0.1], (1, 3)), ([0.99, 0.98, 0.97, 0.96], (0, 4)), ([0.0, 0.0], (1, 3))):
        choice = machine.controller.choose(1, found(likely) + model)
        assert (choice.draft, choice.k) == expected
    assert machine.controller.choose(1, []) is None, "no draft has a proposal"


def test_what_was_in_vain_is_tried_again_later_but_seldom():
    machine, options = Machine(0.1, draft_s=0.05), candidates((3,), draft_cost=0.05)
    for _ in range(2000):
        machine.step(options, 0.0)
    tries = [step for step, k in enumerate(machine.chosen) if k]
    assert 4 < len(tries) < 60 and tries[-1] > 1500
    for _ in range(300):
        machine.step(options, 0.95)
    assert machine.chosen[-100:].count(3) > 90


def test_measurements_are_forgotten():
    recent = Recent()
    assert recent.median(0) is None and recent.median(0, 5.0) == 5.0
    recent.add(1, 9.0)
    assert recent.median(1) == 9.0 and recent.median(1, 5.0) == 5.0, "a single one is rather too long"
    for step in range(2, 2 + WINDOW):
        recent.add(step, 7.0)
    assert recent.median(50, 5.0) == 7.0
    assert recent.median(2 + WINDOW + MEMORY, 5.0) == 5.0 and recent.median(10_000) is None
    rate = Rate(0.5, 2.0)
    for _ in range(50):
        rate.add(3, 3)
    assert rate.value > 0.95
    for _ in range(3_000):
        rate.fade()
    assert rate.value == pytest.approx(0.5, abs=0.001)


def share_of(reads: WeightReads):
    """The bytes of experts that an extra token adds, as a share of those of a plain step."""

    def share(rows, tokens):
        return (reads.of_experts(rows + tokens) - reads.of_experts(rows)) / tokens / reads.total(rows)

    return share


# 40 layers of 256 experts, of which a token uses 8; the second model has large dense weights besides
ALL_EXPERTS = WeightReads(0.3, experts=(1 / 320,) * 40, n_expert=256, n_active=8)
FEW_EXPERTS = WeightReads(8.0, experts=(1 / 320,) * 40, n_expert=256, n_active=8)


class SparseMachine(Machine):
    """A pass takes the time of its bytes, and prefill, in which tokens share experts, next to none for a token."""

    def __init__(self, reads: WeightReads, token_s: float | None):
        super().__init__(0.0)
        self.share = share_of(reads)
        self.controller = Controller([PRIOR], self.share)
        self.controller.token_s = token_s

    def step(self, options, acceptance, rows=1):
        choice = self.controller.choose(rows, options)
        self.token_s = self.share(rows, choice.tokens) if choice else 0.0
        super().step(options, acceptance, rows)


@pytest.mark.parametrize("token_s", [0.01, None])
@pytest.mark.parametrize("rows, likely", [(1, [0.7, 0.5, 0.3]), (8, [0.6] * 8)])
def test_experts_that_an_extra_token_reads_are_never_read_in_vain(rows, likely, token_s):
    """Each extra token reads nearly as much as a plain step of its row."""
    machine = SparseMachine(ALL_EXPERTS, token_s)
    for _ in range(500):
        machine.step(found(likely) + candidates((1, 3), rows=rows, draft_cost=0.1), 0.6, rows)
    assert set(machine.chosen) == {0}


def test_experts_that_are_a_small_part_of_the_weights():
    machine = SparseMachine(FEW_EXPERTS, 0.01)
    for _ in range(100):
        machine.step(candidates((1, 3, 7), draft_cost=0.05), 0.9)
    assert machine.tokens / machine.spent > 1.8 and machine.chosen[-1] == 7


def test_an_extra_token_takes_at_least_the_share_of_its_experts():
    """Also if prefill was faster; and if it was slower, the time of prefill."""
    for token_s, reads in ((0.01, ALL_EXPERTS), (0.5, FEW_EXPERTS)):
        controller = Controller([PRIOR], share_of(reads))
        controller.token_s = token_s
        expected = max(token_s, share_of(reads)(2, 3))
        assert controller.extra_s(2, 3, 1.0) == pytest.approx(3 * expected)
        assert (expected == token_s) == (reads is FEW_EXPERTS)
