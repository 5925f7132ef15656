"""Sampling: each filter against a plain reference, draws against the exact distribution, rows independent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import Sampling, exponential_noise, in_top_p, ordered, probabilities, sample, scramble

DRAWS = 100_000
P_VALUE = 1e-3  # chi-square with fixed seeds: it either holds or not, always


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, penalty=1.0, seen=()):
    """Probabilities of one row (a list of floats) by sorting, in plain Python with float64."""
    x = [value / penalty if i in seen and value >= 0 else value * penalty if i in seen else value
         for i, value in enumerate(logits)]  # fmt: skip
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if temperature == 0:
        return [float(i == order[0]) for i in range(len(x))]
    weight = [math.exp((value - x[order[0]]) / temperature) for value in x]
    if top_k:
        order = order[:top_k]
    total, before, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if before < top_p * total:
            kept.append(i)
        before += weight[i]
    kept = [i for i in kept if weight[i] >= min_p * weight[order[0]]]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(x))]


def near(probs, expected):
    """Equal to float32 rounding, and exactly the same tokens kept."""
    expected = torch.tensor(expected)
    assert torch.equal(probs > 0, expected > 0), (probs, expected)
    assert torch.allclose(probs, expected.float(), atol=1e-6, rtol=1e-4)


SETTINGS = [
    dict(temperature=0.7),
    dict(temperature=0.0),
    dict(temperature=1.3, top_k=1),
    dict(top_k=5),
    dict(top_p=0.4),
    dict(top_p=0.97, temperature=2.0),
    dict(min_p=0.1),
    dict(top_k=9, top_p=0.8, min_p=0.05, temperature=0.6),
    dict(top_k=10_000),
    dict(top_p=1e-6),
    dict(repetition_penalty=1.7, top_k=7),
]


@pytest.mark.parametrize("kwargs", SETTINGS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_each_filter_equals_a_plain_reference(kwargs, ties):
    torch.manual_seed(7)
    logits = torch.randn(6, 53) * 3
    if ties:
        logits = logits.round()  # a few values only: every edge cuts through equals
    seen = torch.zeros(6, 53, dtype=torch.bool)
    seen[:, [3, 17, 40]] = True
    probs = probabilities(logits, Sampling.make(6, **kwargs), seen)
    plain = {k: v for k, v in kwargs.items() if k != "repetition_penalty"}
    plain |= {"penalty": kwargs.get("repetition_penalty", 1.0), "seen": (3, 17, 40)}
    for row, values in zip(probs, logits.tolist()):
        near(row, reference(values, **plain))


def test_rows_have_their_own_settings():
    """A batch of all settings at once gives each row what it gets alone, and draws the same token."""
    torch.manual_seed(3)
    logits = (torch.randn(len(SETTINGS), 101) * 4).round() / 2  # bfloat16 logits have ties as well
    seen = torch.rand(logits.shape) < 0.2
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    defaults = (1.0, 0, 1.0, 0.0, 1.0)
    lists = {name: [s.get(name, default) for s in SETTINGS] for name, default in zip(names, defaults)}
    seeds, position = [11 * i - 5 for i in range(len(SETTINGS))], torch.arange(len(SETTINGS)) * 3
    together = Sampling.make(len(SETTINGS), seeds, **lists)
    probs, drawn = probabilities(logits, together, seen), sample(logits, together, position, seen)
    for i, kwargs in enumerate(SETTINGS):
        alone = Sampling.make(1, seeds[i], **kwargs)
        row = slice(i, i + 1)
        assert torch.equal(probabilities(logits[row], alone, seen[row]) > 0, probs[row] > 0)
        assert torch.allclose(probabilities(logits[row], alone, seen[row]), probs[row], atol=1e-6)
        assert sample(logits[row], alone, position[row], seen[row]).item() == drawn[i]
        subset = together.rows(torch.tensor([i]))
        assert sample(logits[row], subset, position[row], seen[row]).item() == drawn[i]


@given(st.lists(st.integers(-6, 6), min_size=2, max_size=40), st.integers(1, 45))
@settings(deadline=None, max_examples=60)
def test_top_k_keeps_exactly_k(values, k):
    logits = torch.tensor([values], dtype=torch.float32)
    kept = probabilities(logits, Sampling.make(1, top_k=k))[0] > 0
    assert kept.sum() == min(k, len(values))
    assert torch.equal(probabilities(logits, Sampling.make(1, top_k=1)).argmax(1), logits.argmax(1))


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=60), st.floats(0.01, 0.999))
@settings(deadline=None, max_examples=100)
def test_nucleus_is_the_shortest_run_that_reaches_top_p(values, top_p):
    x = torch.tensor([values]) - max(values)
    kept = in_top_p(x, torch.tensor([[top_p]]))[0]
    weight = x[0].double().exp()
    mass, total = weight[kept].sum(), weight.sum()
    assert mass >= top_p * total * (1 - 1e-6)
    assert mass - weight[kept].min() < top_p * total * (1 + 1e-6)
    assert not (~kept).any() or weight[kept].min() >= weight[~kept].max() * (1 - 1e-6)


def test_top_k_1_and_temperature_0_are_greedy_at_every_seed():
    torch.manual_seed(0)
    logits = torch.randn(40, 67).round()
    logits[0, 5], logits[0, 9] = 0.0, -0.0
    position = torch.arange(40)
    for kwargs in (dict(top_k=1), dict(temperature=0.0), dict(temperature=0.0, top_p=0.5), dict(top_k=1, top_p=0.1)):
        for seed in (0, 1, -(2**61), 2**61):
            assert torch.equal(sample(logits, Sampling.make(40, seed, **kwargs), position), logits.argmax(1))
    greedy_and_not = Sampling.make(40, 5, temperature=[0.0, 2.0] * 20)
    assert torch.equal(sample(logits, greedy_and_not, position)[::2], logits.argmax(1)[::2])
    assert not torch.equal(sample(logits, greedy_and_not, position)[1::2], logits.argmax(1)[1::2])


def chi_square_holds(counts, probs):
    """Pearson's test that counts were drawn from probs; the tail probability by the Wilson-Hilferty approximation."""
    if counts[probs == 0].any():
        return False
    expected = probs[probs > 0].double() * counts.sum()
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return 0.5 * math.erfc(z / 2**0.5) > P_VALUE


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("kwargs", [dict(), dict(temperature=0.5, top_k=9), dict(top_p=0.8), dict(top_k=13, min_p=0.1)])
def test_draws_follow_the_distribution(kwargs, vary):
    torch.manual_seed(1)
    logits = torch.randn(23).expand(DRAWS, 23)
    numbers = torch.arange(DRAWS)
    seeds = numbers.tolist() if vary == "seed" else 42
    position = numbers if vary == "position" else torch.zeros_like(numbers)
    drawn = sample(logits, Sampling.make(DRAWS, seeds, **kwargs), position)
    probs = probabilities(logits[:1], Sampling.make(1, **kwargs))[0]
    assert chi_square_holds(drawn.bincount(minlength=23), probs)
    slightly_wrong = probs * torch.where(torch.arange(23) % 2 == 0, 1.05, 1.0)
    assert not chi_square_holds(drawn.bincount(minlength=23), slightly_wrong / slightly_wrong.sum())


def test_successive_draws_are_independent():
    """The joint law of two steps is the product: pairs of tokens at positions p and p + 1, and of seeds s and s + 1."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    numbers = torch.arange(DRAWS)
    logits = probs.log().expand(DRAWS, 4)
    for second in ("position", "seed", "stream"):
        seeds, at = (numbers + (second == "seed")).tolist(), torch.full_like(numbers, 9 + (second == "position"))
        first = sample(logits, Sampling.make(DRAWS, numbers.tolist()), torch.full_like(numbers, 9))
        other = sample(logits, Sampling.make(DRAWS, seeds), at)
        if second == "stream":
            ids = torch.arange(4).expand(DRAWS, 4)
            other = (probs / exponential_noise(numbers, at, ids, stream=1)).argmax(1)
        assert chi_square_holds((first * 4 + other).bincount(minlength=16), (probs[:, None] * probs).flatten())


@pytest.mark.slow
def test_compiled_draws_are_the_eager_ones():
    torch.manual_seed(5)
    logits = (torch.randn(5, 1_021) * 3).bfloat16()
    seen = torch.rand(5, 1_021) < 0.1
    position = torch.tensor([0, 3, 900, 2**40, 7])
    compiled = torch.compile(sample, fullgraph=True)
    lists = dict(
        temperature=[0.0, 0.7, 1.0, 1.5, 1.0],
        top_k=[0, 50, 3, 200, 0],
        top_p=[1.0, 0.9, 0.5, 1.0, 0.95],
        min_p=[0.0, 0.0, 0.1, 0.02, 0.0],
        repetition_penalty=[1.0, 1.3, 1.0, 0.8, 1.0],
    )
    for kwargs in (lists, lists | {"top_k": 40}):
        for seed in range(20):
            rows = Sampling.make(5, seed, **kwargs)
            assert torch.equal(compiled(logits, rows, position, seen), sample(logits, rows, position, seen))


def test_noise_is_exponential_and_the_hash_a_bijection():
    ids = torch.arange(DRAWS)[None]
    noise = exponential_noise(torch.tensor([3]), torch.tensor([5]), ids)[0]
    assert noise.min() > 0 and noise.isfinite().all()
    assert abs(noise.mean() - 1) < 0.02 and abs(noise.var() - 1) < 0.03
    ends = torch.tensor([0, 1, 2, 2**31, 2**32 - 1])
    some = torch.cat([torch.randint(0, 2**32, (DRAWS,), generator=torch.Generator().manual_seed(0)), ends]).unique()
    assert len(scramble(some).unique()) == len(some)
    assert scramble(some).min() >= 0 and scramble(some).max() < 2**32


def test_ordered_keeps_the_order_of_floats():
    x = torch.tensor([-float("inf"), -3e38, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3e38, float("inf")])
    assert (ordered(x).diff() > 0).all()
    assert ordered(torch.tensor(-0.0)) == ordered(torch.tensor(0.0)) == 0
