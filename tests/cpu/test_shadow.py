"""The shadow of the output head: the tokens drawn from a part of the logits are those drawn from all of them."""

import pytest
import torch
from cases import numbers
from conftest import random_prompts

from cpu import shadow
from cpu.build import load_kernels
from cpu.layers import PackedLinear
from cpu.shadow import ShadowHead, make_shadow
from drafts.retrieval import RetrievalDraft
from engine import Engine, Request, generate
from formats import Quantization, QuantizedLinear, Scheme, pack, quantize_model
from kernels import has_kernel
from load import install_kernels, load_model
from model import soft_cap
from sampling import Sampling, SamplingParams, sample
from speculative import Speculation

CPU = torch.device("cpu")
BF16, F16 = torch.bfloat16, torch.float16
TEMPERATURES = (0.0, 1e-3, 0.3, 0.8, 1.0, 2.0, 1e-30, 1e30)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(shadow, "MAX_ROWS", 16)
    monkeypatch.setattr(shadow, "MOST_READ", 1.0)
    if not load_kernels("auto") or not has_kernel("head_logits", CPU):
        pytest.skip("no kernels for this machine")


def packed(matrix, groupsize=32):
    with torch.device("meta"):
        layer = QuantizedLinear(matrix.shape[1], len(matrix), False, Scheme("int8", groupsize))
    layer.load_state_dict(pack(matrix, "int8", groupsize), assign=True)
    return PackedLinear(layer, exact=False)


def rows_of(layer):
    """The weights of a packed matrix, float32."""
    return torch.ops.fastpath.embed_packed(torch.arange(layer.out_features), layer.prepared.handle, layer.in_features)


def draw(logits, params, position):
    settings = Sampling.make(len(logits), logits.shape[1], CPU)
    for row, one in enumerate(params):
        settings.set_row(row, one, [])
    return sample(logits[:, None], torch.arange(len(logits)), position, None, settings)[0][:, 0]


FILTERS = ({}, {"top_k": 1}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05}, {"top_k": 7, "min_p": 0.3}, {"min_p": 1.0})


def settings_of(params):
    """The arguments of ShadowHead between the hidden states and the positions."""
    dtypes = {"temperature": torch.float32, "seed": torch.int64, "top_k": torch.int64, "min_p": torch.float32}
    return [torch.tensor([getattr(one, name) for one in params], dtype=dtypes[name]) for name in dtypes]


def check(head, x, usual, n_token=None, seeds=6, softcap=None):
    """Draw with many settings, alone and in batches. Returns the share of blocks that were read."""
    n_token = n_token or head.out_features
    ours = ShadowHead(head, usual, n_token, softcap)
    whole = soft_cap(head(x)[:, :n_token], softcap)
    for temperature in TEMPERATURES:
        for seed in range(seeds):
            filters = [FILTERS[(seed + row) % len(FILTERS)] for row in range(len(x))]
            params = [
                SamplingParams(temperature=temperature, seed=1000 * seed + row, **one)
                for row, one in enumerate(filters)
            ]
            position = torch.arange(5, 5 + len(x)) + seed
            expected = draw(whole, params, position)
            settings = settings_of(params)
            together = ours(x, *settings, position)[:, :n_token]
            assert torch.equal(draw(together, params, position), expected)
            known = together > -float("inf")
            assert torch.equal(together[known], whole[known])
            row = seed % len(x)
            alone = ours(x[row : row + 1], *[one[row : row + 1] for one in settings], position[row : row + 1])
            assert draw(alone[:, :n_token], params[row : row + 1], position[row : row + 1]) == expected[row]
    return ours.share_read


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("V, D, M", [(1037, 70, 1), (700, 131, 3), (1600, 96, 16)])
def test_tokens_and_logits_are_those_of_the_whole_head(V, D, M, dtype):
    x = 3 * numbers(M, D, seed=V).to(dtype)
    share = check(packed(numbers(V, D, seed=D)), x, x.float().abs().mean(0) + 0.01, n_token=V - 3)
    assert 0 < share < 1


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 7.0, 30.0, 1e4])
def test_a_soft_cap(softcap, dtype):
    """Caps far below the logits, which make many of them equal, and far above."""
    x = numbers(3, 131, seed=2).to(dtype)
    x[0] /= 50
    head = packed(numbers(1100, 131, seed=3))
    share = check(head, x, x.float().abs().mean(0) + 0.01, n_token=1097, softcap=softcap)
    assert 0 < share < (1 if softcap > 20 else 1.01)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("softcap", [None, 1e-3, 7.0, 30.0, 1e7])
def test_logits_that_are_nearly_equal(softcap, dtype):
    """The errors of the rows lie along x, so that the bound of a logit is the logit; and the last tokens are the
    likeliest before the cap, but the first ones may be as likely after it."""
    matrix = torch.zeros(1500, 64)
    for least in (0.97, 0.9999):
        matrix[:, 0] = torch.linspace(least, 1, 1500)
        head, x = packed(matrix), torch.zeros(2, 64)
        for size in (1e-4, 0.5, 4.0, 20.0, 70.0):
            x[:, 0] = torch.tensor([size, -size])
            check(head, x.to(dtype), torch.ones(64), seeds=2, softcap=softcap)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_ten_million_draws(seed):
    """A quarter of a million draws from each of 40 random heads, with random settings in each row."""
    generator = torch.Generator().manual_seed(seed)
    V, D = 300 + 37 * seed, 33 + 5 * seed
    spread = numbers(D, seed=seed).exp()  # some columns are large, as in real models
    x = (numbers(16, D, seed=seed + 1) * spread).to(BF16)
    head = packed(numbers(V, D, seed=seed + 2) * torch.rand(V, 1, generator=generator) / D**0.5)
    ours, whole = ShadowHead(head, spread, V), head(x)
    rows, settings = torch.arange(16), Sampling.make(16, V, CPU)
    for first in range(0, 250_000, 16):
        if first % 16_000 == 0:
            for row in rows.tolist():
                temperature = TEMPERATURES[torch.randint(8, (), generator=generator)]
                choice = FILTERS[(row + first) % len(FILTERS)]
                settings.set_row(row, SamplingParams(temperature=temperature, seed=first + row, **choice), [])
        position = torch.full((16,), 1 + first)
        few = ours(x, settings.temperature, settings.seed, settings.top_k, settings.min_p, position)
        drawn = [sample(logits[:, None], rows, position, None, settings)[0] for logits in (few, whole)]
        assert torch.equal(*drawn), f"after {first} draws"


def hard_heads():
    V, D = 512, 64
    equal = numbers(1, D).expand(V, D).clone()
    last_bits = equal.clone()
    last_bits[:, 0] += torch.arange(V) % 7 * 1e-3
    outliers = numbers(V, D, seed=1)
    outliers[77] *= 300
    outliers[:, 5] *= 50
    pairs = numbers(V, D, seed=2)
    pairs[V // 2 :] = pairs[: V // 2]
    return {"equal": equal, "last bits": last_bits, "zeros": torch.zeros(V, D), "outliers": outliers, "pairs": pairs}


@pytest.mark.parametrize("name", hard_heads())
def test_hard_heads(name):
    head = packed(hard_heads()[name])
    x = numbers(3, 64, seed=9)
    x[1, 5] = 1e4
    x[2] = 0
    for usual in (torch.ones(64), torch.logspace(-3, 3, 64)):
        check(head, x.to(BF16), usual)


def test_hidden_states_that_are_not_finite_give_no_token():
    head = packed(numbers(512, 64))
    x = numbers(3, 64, seed=9).to(BF16)
    x[0, 3] = torch.nan
    x[1, 60] = torch.inf
    ours = ShadowHead(head, torch.ones(64), 512)
    params = [SamplingParams(temperature=0.5, seed=row) for row in range(3)]
    position = torch.arange(4, 7)
    few = ours(x, *settings_of(params), position)
    expected = draw(head(x), params, position)
    assert torch.equal(draw(few, params, position), expected) and expected.tolist()[:2] == [-1, -1]


def test_the_bound_holds_for_each_logit():
    """In float64, for hidden states along the error of a row, where Cauchy and Schwarz's inequality is an equality."""
    matrix, usual = numbers(300, 96, seed=4), numbers(96, seed=5).abs() + 0.1
    ours = ShadowHead(packed(matrix), usual, 300)
    weights, near = rows_of(ours.head).double(), rows_of(ours.shadow).double()
    inverse = ours.inverse_scales.double()
    for v in range(0, 300, 7):
        x = (weights - near)[v] / inverse**2
        difference = ((weights - near) @ x).abs()
        bound = ours.norms.double() * (x * inverse).norm()
        assert (difference <= bound).all() and difference[v] > 0.99 * bound[v]


def test_the_shadow_is_near_the_head():
    matrix = numbers(40, 77)
    layer, scale = packed(matrix), numbers(77, seed=1).abs()
    ours = ShadowHead(layer, torch.ones(77), 40)
    weights, near = rows_of(layer), rows_of(ours.shadow)
    assert (near - weights).abs().max() < matrix.abs().max() / 30
    norms = torch.ops.fastpath.quantize_head(layer.prepared.handle, 5, scale)[1]
    expected = torch.stack([(weights * scale).norm(dim=1), ((weights - near) * scale).norm(dim=1)], 1)
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["qwen2-gqa", "gemma3-untied", "lfm2-tied", "nanochat-gqa"])
def test_an_engine_with_a_shadow_gives_the_same_tokens(tiny, monkeypatch, name):
    """Greedy and random requests, alone and together, some with settings that need all logits, with lookup."""
    monkeypatch.setattr(shadow, "MIN_TOKENS", 1)
    settings = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5}, {"temperature": 1.0, "top_k": 9, "seed": 2}]
    settings += [{"temperature": 1.5, "seed": 1}, {"temperature": 0.0, "repetition_penalty": 1.3}]
    prompts = random_prompts((3, 17, 30, 9, 21), seed=8)

    def run(rows, with_shadow, speculates, logprobs=None):
        model = load_model(tiny(name)[2], dtype=BF16, kernels="torch")
        model = install_kernels(quantize_model(model, Quantization("int8", 0, "int8")))
        decoding = Speculation([RetrievalDraft()], 4, automatic=False) if speculates else None
        engine = Engine(model, rows, 120, None, decoding)
        if with_shadow:
            made = make_shadow(model)
            model.backend = model.backend.__class__(**vars(model.backend) | {"drawable_logits": made})
        requests = [Request(p, SamplingParams(**s), 30, logprobs=logprobs) for p, s in zip(prompts, settings)]
        generate(engine, requests)
        if with_shadow and logprobs is None and rows == 1:  # no other row needs all logits
            assert made.counts[:, 1].all()
        return [(request.new_tokens, request.token_logprobs) for request in requests]

    for rows, speculates in ((1, False), (4, False), (3, True)):
        assert run(rows, True, speculates) == run(rows, False, speculates)
    assert run(2, True, False, logprobs=3) == run(2, False, False, logprobs=3)


def test_a_shadow_that_shows_little_is_not_used(monkeypatch):
    """Of equal rows, each can be the likeliest; then all are read, and soon the shadow is not asked any more."""
    monkeypatch.setattr(shadow, "MOST_READ", 0.25)
    ours, x = ShadowHead(packed(hard_heads()["equal"]), torch.ones(64), 512), numbers(1, 64).to(BF16)
    settings = settings_of([SamplingParams(temperature=0.0)])
    passes = [ours(x, *settings, torch.tensor([5])) is not None for _ in range(2 * shadow.ENOUGH_PASSES)]
    assert passes[0] and not any(passes[shadow.ENOUGH_PASSES :]) and ours.share_read == 1.0
    other = settings_of([SamplingParams(temperature=1.0, top_k=3)])
    assert ours(x, *other, torch.tensor([5])) is not None


def test_models_without_a_shadow(tiny, monkeypatch):
    """Heads that are not in 8 bits, and small vocabularies."""
    monkeypatch.setattr(shadow, "MIN_TOKENS", 1)

    def shadow_of(name, head):
        model = load_model(tiny(name)[2], dtype=BF16, kernels="torch")
        model = install_kernels(quantize_model(model, Quantization("int8", 0, head)))
        model.setup_caches(1, 50)
        return make_shadow(model)

    assert shadow_of("qwen2-gqa", "int8") is not None
    assert shadow_of("qwen2-gqa", "int4") is None
    monkeypatch.setattr(shadow, "MIN_TOKENS", 16384)
    assert shadow_of("qwen2-gqa", "int8") is None
