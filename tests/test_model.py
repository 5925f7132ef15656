"""The model against transformers, and against itself: cached, chunked, batched, with `rows`, full, compiled."""

import copy
import dataclasses
import math

import pytest
import torch
from cases import SPARSE, read_model, write_random
from conftest import SHORT_CONTEXT, TINY, for_long_rows, greedy, hf_greedy, only_torch, random_prompts

from config import Config, DeltaNet, RopeScaling, ShortConv
from formats import Quantization, quantize_model
from load import install_kernels, load_model
from model import Transformer, pad_rows
from positions import rope_frequencies, rope_table

LOGITS = 1e-4  # float32 sums in another order, for logits of order 1
SAME = 2e-5  # the same weights and the same arithmetic, but other shapes of the same matrix products


def positions(B, S, start=0):
    return torch.arange(start, start + S).expand(B, S)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_equals_transformers(tiny, tiny_model, name):
    """20 greedy tokens after 5 prompts of different lengths in one batch, and all logits of the longest sequence."""
    oracle = for_long_rows(tiny(name)[0])
    model = tiny_model(name, rows=1, length=160)
    prompts = random_prompts((1, 9, 17, 60, 126), seed=1)
    expected = [hf_greedy(oracle, prompt, 20) for prompt in prompts]
    assert greedy(model, prompts, 20) == expected
    model.setup_caches(1, 146)
    assert len({tuple(ids) for ids in expected}) >= 4, "the oracle should continue the prompts differently"
    sequence = torch.tensor([prompts[-1] + expected[-1]])
    with torch.no_grad():
        theirs, exact = oracle(sequence).logits, copy.deepcopy(oracle).double()(sequence).logits
        difference = theirs - model(sequence, positions(1, sequence.shape[1]), all_logits=True)
    rounding = (theirs - exact).abs().max()  # transformers' own error, which we may have too
    assert difference.abs().max() < max(LOGITS, 2 * rounding)


@pytest.mark.parametrize("name", ["phi3-longrope", "phi3-longrope-partial"])
def test_longrope_has_the_factors_of_the_rows_length(tiny, tiny_model, name):
    """Rows of the original context equal transformers as it is, and rows of one more position its long factors."""
    oracle, prompts = tiny(name)[0], random_prompts((1, 13, 64), seed=1)
    [context] = SHORT_CONTEXT.values()
    for length, theirs in ((context, oracle), (context + 1, for_long_rows(oracle))):
        model = tiny_model(name, rows=1, length=length)
        assert greedy(model, prompts, 32, length=length) == [hf_greedy(theirs, prompt, 32) for prompt in prompts]
        sequence = torch.tensor(random_prompts((length,), seed=2))
        with torch.no_grad():
            difference = theirs(sequence).logits - model(sequence, positions(1, length), all_logits=True)
        assert difference.abs().max() < LOGITS


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_fused_blocks_and_operations_equal_plain_torch(tiny, tiny_model, name):
    """Fused blocks, single operations with kernels and plain torch give the same greedy tokens."""
    model, prompts = tiny_model(name), random_prompts((3, 40, 17, 1))
    if model.backend.run_blocks is None:
        pytest.skip("no kernels for this machine")
    fused = greedy(model, prompts, 12)
    model.backend = dataclasses.replace(model.backend, run_blocks=None)
    assert greedy(model, prompts, 12) == fused
    with only_torch():
        assert greedy(load_model(tiny(name)[2], dtype=torch.float32, kernels="torch"), prompts, 12) == fused


@pytest.mark.parametrize("how", ["plain", "int8"])
@pytest.mark.parametrize("inputs", [None, 22])
def test_layers_that_share_keys_and_values_read_only_the_last_token_of_a_prompt(tmp_path, inputs, how):
    """Ragged rows and two chunks: the logits are those of a pass that reads all tokens in all layers."""
    config = Config(5, 4, 2, 12, 40, 57, 131, 256, sliding_window=7, sliding_layers=(1, 2), sliding_rope_base=1e3)
    more = {"shared_kv_layers": 3, "shared_kv_hidden_dim": 71, "per_layer_dim": inputs, "logits_softcap": 5.0}
    folder = write_random(tmp_path / "model", dataclasses.replace(config, **more))
    model, whole = [read_model(folder, torch.float32 if how == "plain" else torch.bfloat16) for _ in range(2)]
    if how == "int8":
        model, whole = (install_kernels(quantize_model(one, Quantization("int8", 0, "int8"))) for one in (model, whole))
    seen = []
    model.blocks[1].register_forward_hook(lambda block, inputs, y: seen.append(y.shape[:2]))
    model.blocks[2].register_forward_hook(lambda block, inputs, y: seen.append(y.shape[:2]))
    for one in (model, whole):
        one.setup_caches(3, 50)
    with torch.no_grad():
        for lengths, starts in (((9, 23, 1), (0, 0, 0)), ((17, 1, 30), (9, 23, 1))):
            prompts = random_prompts(lengths, seed=sum(lengths))
            tokens, at = pad_rows([[token % 131 for token in prompt] for prompt in prompts], list(starts))
            logits = whole(tokens, at, all_logits=True)[range(3), [n - 1 for n in lengths]]
            torch.testing.assert_close(model(tokens, at), logits, rtol=0, atol=0 if how == "int8" else 2e-5)
            assert seen in ([], [tokens.shape, (3, 1)])  # fused blocks call no hooks
            seen.clear()


def test_unseen_slots_have_no_effect(tiny_model):
    """NaN in slots that no token may see: after each row's tokens, before a window, in rows outside the batch."""
    for name in ("llama-mqa-linear", "mistral-window", "bloom-8"):
        clean, poisoned = tiny_model(name), tiny_model(name)
        for block in poisoned.blocks:
            block.attention.cache.k.fill_(float("nan"))
            block.attention.cache.v.fill_(float("nan"))
        prompts = random_prompts((3, 41, 18))
        assert greedy(poisoned, prompts, 20, length=None) == greedy(clean, prompts, 20)
        window = poisoned.config.sliding_window
        if window is not None:
            for block in poisoned.blocks:
                block.attention.cache.k[0, :, : 60 - window + 1] = float("nan")
                block.attention.cache.v[0, :, : 60 - window + 1] = float("nan")
                for t in (block.attention.cache.k, block.attention.cache.v):
                    t[0, :, 60 - window + 1 : 60] = 0.5
            token, at = torch.tensor([[5]]), torch.tensor([[60]])
            assert poisoned(token, at).isfinite().all()


def test_padding_is_harmless(tiny_model):
    """Neither rows of padding only nor padding on the right change the other tokens."""
    model = tiny_model("qwen2-gqa")
    tokens = torch.tensor(random_prompts((9, 9, 9)))
    at = positions(3, 9).clone()
    at[1, 4:] = -1
    at[2] = -1
    logits = model(tokens, at)
    alone = tiny_model("qwen2-gqa")
    assert (logits[:1] - alone(tokens[:1], positions(1, 9))).abs().max() < SAME
    assert (logits[1:2] - alone(tokens[1:2, :4], positions(1, 4))).abs().max() < SAME
    assert logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3-window", "bloom-3"])
def test_compiled_equals_eager(tiny_model, name):
    """Prefill and decoding, for prompts of lengths on both sides of every branch. After warm-up nothing is compiled."""
    torch._dynamo.reset()
    model = tiny_model(name)
    # Each gets its own code object, to which compiled graphs belong.
    prefill = torch.compile(lambda *inputs: model(*inputs), fullgraph=True, dynamic=True)
    decode = torch.compile(lambda *inputs: model(*inputs), fullgraph=True, dynamic=False)
    many = [random_prompts(lengths, seed=i) for i, lengths in enumerate([(3, 40, 18, 1, 25), (33, 4, 21, 19, 1)])]
    eager = [greedy(model, prompts, 40) for prompts in many]
    greedy(model, many[0], 40, prefill, decode)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert count > 0
    assert [greedy(model, prompts, 40, prefill, decode) for prompts in many] == eager
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count
    assert not torch._dynamo.utils.counters["graph_break"]


def test_long_prompt_builds_no_logits_it_does_not_need():
    config = Config(1, 2, 1, 4, 6, 10, 50_001, 4096)
    model = Transformer(config)
    model.setup_caches(1, 64)
    shapes = []
    hook = model.output.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    model(torch.zeros(1, 33, dtype=torch.int64), positions(1, 33))
    hook.remove()
    assert shapes == [(1, 50_001)]


def test_rope_table_is_correctly_rounded():
    """torch's float32 cosine differs in a few percent of the elements, and in some processes in others of them."""
    freqs = rope_frequencies(74, 5e5, None)
    cos, sin = rope_table(freqs, None, positions(2, 211, 4099))
    angles = ((4099 + torch.arange(211.0))[:, None] * freqs).tolist()  # float32, as in transformers
    for table, function in ((cos, math.cos), (sin, math.sin)):
        exact = torch.tensor([[function(angle) for angle in row] for row in angles], dtype=torch.float64).float()
        assert table[:, :, 0, 37:].equal(exact.expand(2, -1, -1))


def test_config_refuses_impossible_sizes():
    good = dict(n_layer=1, n_head=4, n_kv_head=2, head_dim=8, dim=12, hidden_dim=20, vocab_size=9, max_seq_length=7)
    bad = {"n_kv_head": 3, "head_dim": 7, "dim": 0, "n_layer": "2", "rope_base": -1, "norm": "batch", "alibi": 1}
    bad |= {"n_token": 10, "sliding_window": 0, "sliding_layers": (1,), "norm_eps": math.nan}
    bad |= {"layers_without_rope": (1,), "tied_embeddings": "no", "full_kv_head": 3, "full_head_dim": 6}
    bad |= {"per_layer_dim": 0, "shared_kv_layers": 1}
    for field, value in bad.items():
        with pytest.raises(ValueError, match=field):
            Config(**good | {field: value})
    with pytest.raises(ValueError, match="full_head_dim 9 is odd"):
        Config(**good, full_head_dim=9, sliding_window=2, sliding_layers=(0,), sliding_rope_base=1e4)
    net, conv = DeltaNet((0,), 1, 2, 4, 4), ShortConv((0,), 12)
    with pytest.raises(ValueError, match="delta_net and short_conv are both given; a model has one kind"):
        Config(**good, delta_net=net, short_conv=conv)
    with pytest.raises(ValueError, match="short_conv must be a ShortConv, not a dict; is it missing in PARTS"):
        Config(**good, short_conv={"layers": (0,), "conv_channels": 12})
    with pytest.raises(ValueError, match="3 factors for 8 dimensions"):
        Config(**good, rope_scaling=RopeScaling("factors", factors=(1.0, 2.0, 3.0)))
    wrong = [{"kind": "yarn", "factor": 4.0}, {"kind": "linear", "factor": "2"}, {"kind": "factors", "factors": ("a",)}]
    for kwargs in [*wrong, {"kind": "llama3", "original_max_seq_length": 64, "low_freq_factor": 4.0}]:
        with pytest.raises(ValueError, match="positive|low_freq_factor"):
            RopeScaling(**kwargs)
    with pytest.raises(ValueError, match="kind must be one of linear, .*, not 'dynamic'"):
        RopeScaling("dynamic")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return read_model(write_random(tmp_path_factory.mktemp("sparse") / "x", SPARSE), torch.float32)


def test_a_model_with_experts_is_one_graph(sparse):
    """With the same tokens and the same counts of experts."""
    prompts = random_prompts((3, 20, 11))
    expected = greedy(sparse, prompts, 12)
    counts = sparse.expert_counts.tolist()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: sparse(*x), fullgraph=True, dynamic=False, backend="aot_eager")
    assert greedy(sparse, prompts, 12, decode=compiled) == expected
    assert sparse.expert_counts.tolist() == counts


def test_a_copy_of_a_model_has_experts_of_its_own(sparse):
    prompts = random_prompts((9, 4))
    expected = greedy(sparse, prompts, 5)
    other = copy.deepcopy(sparse)
    before = sparse.expert_counts.clone()
    for weight in (other.blocks[0].experts.gate_up.weight, other.blocks[0].experts.down.weight):
        weight.data.mul_(-1)
    assert greedy(other, prompts, 5, length=None) != expected
    assert torch.equal(sparse.expert_counts, before) and not torch.equal(other.expert_counts, before)
    del other
    assert greedy(sparse, prompts, 5) == expected


def test_a_model_without_caches_or_positions_says_what_to_do(tiny):
    model = load_model(tiny("llama-mha")[2], dtype=torch.float32)
    tokens = torch.tensor([[5, 6, 7]])
    calls = [lambda: model(tokens), lambda: model(tokens, torch.arange(3)[None])]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"no caches yet.*; call model.setup_caches\(rows, length\) once"):
            call()
    model.setup_caches(1, 8)
    assert calls[1]().shape == (1, model.config.vocab_size)
    with pytest.raises(RuntimeError, match=r"the call no positions; .* model\(tokens, input_pos\)"):
        calls[0]()
