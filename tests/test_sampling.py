"""Sampling: the reference, the C++ operation and the Triton kernel.

Filters are tested against plain Python, and draws against the exact distribution. Rows must be
independent of their neighbours, and the kernels must draw the tokens that the reference draws.
"""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import INTERPRET

import sampling
from cpu.build import load_kernels
from kernels import KERNELS
from sampling import Sampling, SamplingParams, exponential_noise, scramble

DRAWS = 10_000
P_VALUE = 1e-3  # of chi-square tests; seeds are fixed, so a test always passes or always fails
ROUNDING = 5e-6  # of (log-)probabilities: float32 sums of thousands of numbers

ops = torch.ops.fastpath
REFERENCE = SimpleNamespace(sample=sampling.sample_reference, probabilities=sampling.probabilities_reference)
load_kernels()
IMPLEMENTATIONS = {"reference": REFERENCE} | ({"C++": ops} if "sample" in KERNELS.get("cpu", ()) else {})
needs_cpp = pytest.mark.skipif("C++" not in IMPLEMENTATIONS, reason="the kernels need AVX2 and a compiler")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


def make(B, V, params, prompt=(), width=0):
    """Settings of B rows. params: the same for all rows, or a list with one for each row."""
    settings = Sampling.make(B, V + width)
    for row, p in enumerate(params if isinstance(params, list) else [params] * B):
        settings.set_row(row, p, list(prompt))
    return settings


def arguments(logits, settings, position=7, drafted=None, rows=None):
    """The arguments of the operations for logits (B,V) or (B,S,V). rows: the row of `settings` of each batch row."""
    logits = logits[:, None] if logits.dim() == 2 else logits
    B, S = logits.shape[:2]
    position = torch.full((B,), position) if isinstance(position, int) else position
    drafted = torch.zeros(B, S - 1, dtype=torch.int64) if drafted is None else drafted
    rows = torch.arange(B) if rows is None else rows
    return logits, rows, position, drafted, *settings


def draws_with_each_seed(implementation, logits, params, seeds, position=7):
    """One token for each of many seeds or positions, drawn from the same logits (V,)."""
    settings = Sampling.make(len(seeds), 1)
    for name, value in params.numbers().items():
        getattr(settings, name)[:] = value
    settings.seed[:] = seeds
    neutral = torch.zeros(len(seeds), len(logits))
    settings = settings._replace(counts=neutral.int(), logit_bias=neutral)
    settings = settings._replace(masks=torch.zeros(len(seeds), 1, len(logits) // 32 + 1, dtype=torch.int32))
    return implementation.sample(*arguments(logits.expand(len(seeds), -1), settings, position))[0][:, 0]


def oracle(logits, params, counts):
    """The probabilities of one row (a list of floats), computed by sorting, in plain Python with float64."""
    x = list(logits)
    for i, count in enumerate(counts):
        if count:
            x[i] = x[i] * params.repetition_penalty if x[i] < 0 else x[i] / params.repetition_penalty
        x[i] -= (count // 2) * params.frequency_penalty + (count > 1) * params.presence_penalty
    for i, bias in params.logit_bias:
        x[i] += bias
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.temperature == 0:
        return [float(i == order[0]) for i in range(len(x))]
    weight = [math.exp((value - x[order[0]]) / params.temperature) for value in x]
    if params.top_k:
        order = order[: params.top_k]
    total, before, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if before < params.top_p * total or not kept:
            kept.append(i)
        before += weight[i]
    kept = {i for i in kept if weight[i] >= params.min_p}
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(x))]


PARAMS = [
    dict(temperature=0.7), dict(temperature=0.0), dict(temperature=1.3, top_k=1), dict(top_p=0.97, temperature=2.0),
    dict(min_p=0.1), dict(min_p=1.0), dict(min_p=1.0, temperature=1e-3, top_p=0.9),
    dict(top_k=9, top_p=0.8, min_p=0.05, temperature=0.6), dict(top_k=10_000), dict(top_p=1e-6), dict(top_p=0.0),
    dict(repetition_penalty=1.7, top_k=7), dict(frequency_penalty=0.4, presence_penalty=-0.3, temperature=0.0),
    dict(presence_penalty=0.7), dict(repetition_penalty=0.8, frequency_penalty=0.2, presence_penalty=0.9, top_p=0.9),
    dict(logit_bias=((3, 2.5), (52, -4.0)), top_k=9),
    dict(logit_bias=((3, 2.5), (17, 100.0)), repetition_penalty=1.5, temperature=0.0),
]  # fmt: skip


@pytest.mark.parametrize("ties", [False, True])
def test_filters_and_penalties_equal_plain_python(implementation, ties):
    """Settings differ from row to row, so this also tests that rows do not mix."""
    torch.manual_seed(7)
    params = [SamplingParams(**kwargs) for kwargs in PARAMS]
    B, V = len(params), 53
    logits = torch.randn(B, V) * 3
    if ties:
        logits = logits.round()  # few distinct values, so that filters cut between equal logits
    settings = make(B, V, params, prompt=[3, 17, 40])
    answers = torch.randint(0, V, (B, 12))
    settings.count(list(enumerate(answers.tolist())))
    probs = implementation.probabilities(*arguments(logits, settings))[:, 0]
    for row in range(B):
        counts = [2 * answers[row].tolist().count(i) + (i in (3, 17, 40)) for i in range(V)]
        expected = torch.tensor(oracle(logits[row].tolist(), params[row], counts))
        assert torch.equal(probs[row] > 0, expected > 0), params[row]
        assert torch.allclose(probs[row], expected.float(), atol=ROUNDING)


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
def test_draws_follow_the_distribution(implementation, kwargs, vary):
    """With neutral filters, the distribution is softmax."""
    torch.manual_seed(1)
    logits, params = torch.randn(23), SamplingParams(**kwargs)
    numbers = torch.arange(1, DRAWS + 1)
    varied = (numbers, 7) if vary == "seed" else (torch.full_like(numbers, 42), numbers)
    drawn = draws_with_each_seed(implementation, logits, params, *varied).bincount(minlength=23)
    probs = implementation.probabilities(*arguments(logits[None], make(1, 23, params)))[0, 0]
    assert kwargs or torch.allclose(probs, logits.softmax(0), atol=ROUNDING)
    assert chi_square_holds(drawn, probs)
    slightly_wrong = probs * torch.where(torch.arange(23) % 2 == 0, 1.2, 1.0)
    assert not chi_square_holds(drawn, slightly_wrong / slightly_wrong.sum())


def test_successive_draws_are_independent(implementation):
    """The joint distribution of two draws is a product: at positions p and p + 1, at two places, for two seeds."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seeds = torch.arange(DRAWS)
    logits, params = probs.log(), SamplingParams()
    first = draws_with_each_seed(implementation, logits, params, seeds, 9)
    noise = exponential_noise(seeds[:, None], torch.full((DRAWS, 1), 9), torch.arange(4), stream=1)
    others = [draws_with_each_seed(implementation, logits, params, seeds, 10)]
    others += [draws_with_each_seed(implementation, logits, params, seeds + 1, 9), (probs / noise).argmax(1)]
    for other in others:
        assert chi_square_holds((first * 4 + other).bincount(minlength=16), (probs[:, None] * probs).flatten())


def test_noise_is_exponential_and_the_hash_a_bijection():
    noise = exponential_noise(torch.tensor([3]), torch.tensor([5]), torch.arange(100_000)[None])[0]
    assert noise.min() > 0 and noise.isfinite().all()
    assert abs(noise.mean() - 1) < 0.02 and abs(noise.var() - 1) < 0.03
    ends = torch.tensor([0, 1, 2, 2**31, 2**32 - 1])
    some = torch.cat([torch.randint(0, 2**32, (100_000,), generator=torch.Generator().manual_seed(0)), ends]).unique()
    assert len(scramble(some).unique()) == len(some)
    assert scramble(some).min() >= 0 and scramble(some).max() < 2**32


def random_case(seed, max_V=5000):
    """Random arguments: mixed settings, dtypes, strides, ties, -inf, drafted tokens, padding, NaN and infinity."""
    choose = random.Random(seed).choice
    torch.manual_seed(seed)
    V = min(max_V, choose([1, 2, 15, 16, 17, 255, 256, 257, 1021, 4999]))
    B, S, R = choose([1, 2, 4]), choose([1, 1, 2, 5]), 6
    settings = Sampling.make(R, V + choose([0, 3]))
    for row in range(R):
        params = SamplingParams(
            repetition_penalty=choose([1.0, 1.0, 1.3, 0.8]), frequency_penalty=choose([0, 0, 0.3]),
            presence_penalty=choose([0.0, 0.0, 0.7, -1]), top_k=choose([0, 0, 1, 2, 50, 300, 4000, 10**6]),
            top_p=choose([1.0, 0.9, 0.5, 1e-6, 0.999999]), min_p=choose([0, 0.05]),
            temperature=choose([0, 0.1, 0.7, 1.0, 5.0, 1e-40, 1e30]), seed=choose([-(2**63), -1, 0, 1234, 2**63 - 1]),
            logit_bias=choose([(), (), ((0, 3.0), (V - 1, -2.5))]) if V > 1 else (),
        )  # fmt: skip
        settings.set_row(row, params, torch.randint(0, V, (5,)).tolist())
    rows, tokens = torch.randint(0, R, (20,)), torch.randint(0, V, (20, 1))
    settings.count(list(zip(rows.tolist(), tokens.tolist())))
    logits = torch.randn(B, S, V + 7) * choose([0, 1, 3, 10])
    if choose([True, False]):
        logits = logits.round()
    if choose([True, False]):
        logits[torch.rand_like(logits) < 0.3] = -math.inf
    if choose([True, False, False]):
        logits[0, 0, choose(range(V))] = choose([math.nan, math.inf])
    logits = logits.to(choose([torch.float32, torch.bfloat16, torch.float16]))[..., :V]  # a slice of a wider tensor
    position = torch.randint(-1, 6, (B,)) * choose([1, 2**35])
    rows = torch.randint(0, R, (B,))
    mask_some_rows(settings, rows.tolist(), position.tolist(), S)
    return logits, rows, position, torch.randint(-1, V, (B, S - 1)), *settings


def mask_some_rows(settings, rows, position, S):
    """Random masks for some of the rows that occur once in a batch, from a position up to 16 - S before theirs on."""
    shape = settings.masks.shape
    bits = [torch.randint(-(2**31), 2**31, shape, dtype=torch.int32) for _ in range(2)]
    settings.masks.copy_(bits[0] & bits[1])
    for row, place in zip(rows, position):
        if rows.count(row) == 1 and place > 0 and torch.rand(()) < 0.5:
            settings.mask_start[row] = max(0, place - int(torch.randint(0, shape[1] - S + 1, ())))


def assert_same_draws(found, expected):
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1], expected[1], atol=ROUNDING, rtol=ROUNDING, equal_nan=True)


@needs_cpp
@pytest.mark.parametrize("seed", range(8))
def test_cpp_draws_what_the_reference_draws(seed):
    """Hundreds of rows with mixed settings, with one thread and with two."""
    before = torch.get_num_threads()
    try:
        for case in range(40):
            args = random_case(1000 * seed + case)
            torch.set_num_threads(1)
            drawn, probs = ops.sample(*args), ops.probabilities(*args)
            assert_same_draws(drawn, REFERENCE.sample(*args))
            expected = REFERENCE.probabilities(*args)
            assert torch.equal(probs > 0, expected > 0)
            assert torch.allclose(probs, expected, atol=ROUNDING, equal_nan=True)
            torch.set_num_threads(2)
            again = (*ops.sample(*args), ops.probabilities(*args))
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip((*drawn, probs), again))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_triton_draws_what_the_reference_draws(monkeypatch):
    pytest.importorskip("triton")
    with INTERPRET:
        import kernels_triton as kt
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        monkeypatch.setattr(kt, "SAMPLE_BLOCK", 64)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    for seed in range(200) if on_gpu else (*range(8), 13, 18):  # the last two have presence penalties that matter
        args = random_case(seed, max_V=150)
        found = kt.sample(*[x.cuda() if on_gpu else x for x in args])
        assert_same_draws([x.cpu() for x in found], REFERENCE.sample(*args))


@pytest.mark.slow
def test_compiled_draws_are_the_eager_ones():
    compiled = torch.compile(sampling.sample_reference, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.manual_seed(5)
    logits = (torch.randn(5, 2, 1021) * 3).bfloat16()
    position, drafted = torch.tensor([0, 3, 900, 2**40, 7]), torch.randint(0, 1021, (5, 1))
    for seed in range(8):
        choose = random.Random(seed).choice
        penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.1, "presence_penalty": 0.2}
        filters = {"temperature": [0, 0.7, 1.5], "top_k": [0, 3, 50], "top_p": [1.0, 0.9], "min_p": [0.0, 0.02]}
        chosen = [{name: choose(values) for name, values in filters.items()} for _ in range(5)]
        params = [SamplingParams(**penalties, **one, seed=seed) for one in chosen]
        args = arguments(logits, make(5, 1021, params, [1, 2, 3]), position, drafted)
        assert_same_draws(compiled(*args), sampling.sample_reference(*args))


@needs_cpp
@pytest.mark.slow
def test_operations_are_declared_as_they_are():
    """Checks the declared shapes and dtypes, and that torch.compile keeps each operation as one node."""
    args = arguments(torch.randn(3, 2, 50), make(3, 50, SamplingParams(top_k=5)))
    torch.library.opcheck(ops.sample, args)
    torch.library.opcheck(ops.probabilities, args)
    compiled = torch.compile(lambda *args: ops.sample(*args), fullgraph=True, backend="aot_eager")
    assert_same_draws(compiled(*args), ops.sample(*args))


def test_rows_are_independent_of_neighbours_and_order(implementation):
    torch.manual_seed(3)
    params = [SamplingParams(seed=11 * i - 5, **kwargs) for i, kwargs in enumerate(PARAMS)]
    R, V = len(params), 101
    logits = (torch.randn(R, V) * 4).round() / 2
    settings, position = make(R, V, params, [1, 2, 3]), torch.arange(1, R + 1) * 3
    together = implementation.sample(*arguments(logits, settings, position))
    order = torch.randperm(R)
    shuffled = implementation.sample(*arguments(logits[order], settings, position[order], rows=order))
    for found, expected in zip(shuffled, together):
        assert torch.equal(found, expected[order])
    for i in range(R):
        row = torch.tensor([i])
        alone = implementation.sample(*arguments(logits[row], settings, position[row], rows=row))
        assert alone[0].item() == together[0][i].item()
        # log_softmax of one row and of several may round differently
        assert torch.allclose(alone[1], together[1][row], atol=ROUNDING)


def test_logits_without_a_distribution(implementation):
    """NaN, infinity, rows of only -inf and padding give -1. The rows beside them do not change."""
    torch.manual_seed(6)
    logits = torch.randn(7, 300)
    settings = make(7, 300, [SamplingParams(temperature=row % 2, seed=3) for row in range(7)])
    clean = implementation.sample(*arguments(logits, settings))[0]
    bad = logits.clone()
    bad[1, 299], bad[2, 0], bad[3, 7], bad[4] = math.nan, math.nan, math.inf, -math.inf
    bad[5], bad[0, 3] = math.nan, -math.inf
    position = torch.tensor([7, 7, 7, 7, 7, 0, 7])
    ids, logprobs = implementation.sample(*arguments(bad, settings, position))
    assert ids[1:6, 0].tolist() == [-1] * 5 and logprobs[1:6].isnan().all()
    assert ids[6] == clean[6] and logprobs[6].isfinite()
    probs = implementation.probabilities(*arguments(bad, settings, position))[:, 0]
    assert probs[1:5].isnan().all() and not probs[5].any()
    assert torch.allclose(probs[[0, 6]].sum(-1), torch.ones(2), atol=ROUNDING)


@pytest.mark.parametrize("ids", [[2, 2, 4], [2, -1, 2]])
def test_places_count_the_tokens_drafted_before_them(implementation, ids):
    """Each place gives what a row of its own gives, whose answer contains these tokens."""
    torch.manual_seed(8)
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    logits, params = torch.randn(1, 4, 9), SamplingParams(**penalties)
    drafted = implementation.probabilities(*arguments(logits, make(1, 9, params, [2]), drafted=torch.tensor([ids])))
    for place in range(4):
        settings = make(1, 9, params, [2])
        before = torch.tensor([i for i in ids[:place] if i >= 0], dtype=torch.int64)
        settings.count([(0, before.tolist())])
        alone = implementation.probabilities(*arguments(logits[:, place], settings))
        assert torch.equal(drafted[:, place], alone[:, 0])
        before = torch.tensor([[-1] * (3 - place) + ids[:place]])  # more tokens than positions
        settings = make(1, 9, params, [2])
        one = implementation.probabilities(*arguments(logits[:, place], settings, 7 + place, before))
        assert torch.equal(drafted[:, place], one[:, 0])


@needs_cpp
def test_cpp_refuses_what_would_be_read_out_of_bounds():
    settings = make(2, 9, SamplingParams())
    valid = dict(zip(sampling.ARGUMENTS, arguments(torch.randn(2, 3, 9), settings), strict=True))

    def refused(said, **changed):
        for operation in (ops.sample, ops.probabilities):
            with pytest.raises(RuntimeError, match=said):
                operation(**(valid | changed))

    refused("row 2 of 2", rows=torch.tensor([0, 2]))
    refused("rows: expected", rows=torch.tensor([0, 1]).int())
    refused("position: expected", position=torch.tensor([1]))
    refused("drafted token 9 of 9", drafted=torch.tensor([[1, 2], [3, 9]]))
    refused("1 drafted tokens for 3 positions", drafted=torch.tensor([[1], [3]]))
    refused("temperature: expected", seed=settings.seed[:1])  # whose length is the number of rows
    refused("top_k: expected", top_k=settings.top_k.int())
    refused("counts of 8 tokens for logits of 9", counts=settings.counts[:, :8].contiguous())
    refused("biases of 8 tokens for logits of 9", logit_bias=settings.logit_bias[:, :8].contiguous())
    refused("masks of 0 words for logits of 9", masks=settings.masks[:, :, :0].contiguous())
    refused("bfloat16, float16 or float32", logits=torch.randn(2, 3, 9).double())
    refused("logits", logits=torch.randn(2, 9))
    beyond = torch.tensor([99, 5 + settings.masks.shape[1] - 2])
    refused("no mask for position", position=beyond, mask_start=torch.tensor([-1, 5]))


class EveryThird:
    """A grammar that allows the tokens i with i % 3 == n for n = 0, then 1, and so on."""

    def fill(self, masks, drafted=()):
        ids = torch.arange(32 * masks.shape[1]).view(-1, 32)
        for n, mask in enumerate(masks):
            bits = (ids % 3 == n % 3).long() << torch.arange(32)
            mask.copy_(bits.sum(1).int())


def test_masks_forbid_tokens_and_leave_log_probabilities(implementation):
    """Rows 0 and 2 have masks from positions 5 and 9 on, row 1 has none."""
    torch.manual_seed(3)
    V, S = 71, 4
    for temperature in (0.0, 1.5):
        settings, logits = make(3, V, SamplingParams(temperature=temperature, top_k=20, seed=5)), torch.randn(3, S, V)
        settings.set_masks([(0, 5, EveryThird(), [1] * (S - 1)), (2, 9, EveryThird(), [1] * (S - 1))])
        args = arguments(logits, settings, torch.tensor([5, 5, 9]))
        (ids, logprobs), probs = implementation.sample(*args), implementation.probabilities(*args)
        assert torch.equal(ids[[0, 2]] % 3, torch.tensor([[0, 1, 2, 0]] * 2))
        allowed = torch.arange(V) % 3 == torch.arange(S)[:, None] % 3
        assert not probs[0][~allowed].any() and torch.allclose(probs.sum(-1), torch.ones(3, S))
        raw = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        assert torch.allclose(logprobs, raw, atol=ROUNDING)
        plain = make(3, V, SamplingParams(temperature=temperature, top_k=20, seed=5))
        alone = implementation.sample(*arguments(logits, plain, torch.tensor([5, 5, 9])))
        assert torch.equal(alone[0][1], ids[1])
        drafts = settings.without_masks()
        assert torch.equal(implementation.sample(*arguments(logits, drafts, torch.tensor([5, 5, 9])))[0], alone[0])
        settings.set_row(0, SamplingParams(temperature=temperature, top_k=20, seed=5), [])  # a new request
        again = implementation.sample(*arguments(logits, settings, torch.tensor([5, 5, 9])))
        assert torch.equal(again[0][0], alone[0][0])


@pytest.mark.parametrize("kwargs", [
    dict(temperature=-0.1), dict(temperature=math.nan), dict(temperature=math.inf), dict(top_k=-1), dict(top_k=2.0),
    dict(top_p=1.1), dict(min_p=-0.1), dict(repetition_penalty=0.0), dict(frequency_penalty=1e4),
    dict(presence_penalty=-1e4), dict(seed=2**63), dict(seed=1.5), dict(top_k=True),
    dict(logit_bias=((1, 1e4),)), dict(logit_bias=((1.0, 2),)), dict(logit_bias=((1, math.nan),)),
], ids=str)  # fmt: skip
def test_params_refuse_what_is_out_of_range(kwargs):
    with pytest.raises(ValueError, match=f"^{next(iter(kwargs))} must"):  # the server reads the first word
        SamplingParams(**kwargs)


def test_log_probabilities_do_not_depend_on_how_many_are_asked_for():
    """The fast kernel's log-probability and softmax's differ in the last bits."""
    logits = 3 * torch.randn(7, 301)
    ids = torch.randint(301, (7,)).tolist()
    own = logits.log_softmax(-1)[range(7), ids].nextafter(torch.tensor(0.0))
    for n in (0, 1, 5):
        found = sampling.top_logprobs(logits, ids, n, own)
        assert [one for one, _ in found] == own.tolist()
        for line, token, (one, best) in zip(logits, ids, found):
            assert [i for i, _ in best] == line.topk(n).indices.tolist() and dict(best).get(token, one) == one
