"""Sparse layers: the router, the loop over the experts, and the kernel, which computes the same."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import numbers, quantized
from conftest import only_torch

from backend import FUSED_FIELDS, uses_only
from config import Config, Experts
from cpu.install import CpuInstaller
from formats import FORMATS, Quantization, StackedLinear, dense_layer, quantize_model
from kernels import has_kernel
from layers import ExpertStack
from load import install_kernels
from mixers.experts import PREFILL_ROWS, SparseMLP
from model import MLP, Transformer

NEAR = 2e-6  # float32 sums in another order, relative to the largest number
CPU = torch.device("cpu")
SIZES = {"n_layer": 3, "n_head": 6, "n_kv_head": 3, "head_dim": 10, "hidden_dim": 44, "vocab_size": 97}
# D, then those of Experts: n_expert, n_active, hidden_dim, normalized, shared_dim, scoring, choice_bias, scale,
# expert_scales, beside_mlp; the layers with these two have GeGLU
CASES = {
    "3-1": (36, 3, 1, 20, True, 0), "5-2": (40, 5, 2, 33, False, 24), "8-3": (70, 8, 3, 16, True, 50),
    "33-8": (96, 33, 8, 64, False, 0), "9-4": (50, 9, 4, 28, True, 0, "sigmoid", True, 2.5),
    "7-3": (46, 7, 3, 26, False, 0, "sigmoid", True), "6-2": (44, 6, 2, 22, True, 38, "sigmoid"),
    "7-4": (54, 7, 4, 30, True, 0, "softmax", False, 1.5, True, True),
}  # fmt: skip


def make_config(name):
    D, *sizes = CASES[name]
    experts = Experts((0, 2), *sizes)
    mlp = "geglu" if experts.expert_scales else "swiglu"
    return Config(**SIZES, dim=D, max_seq_length=128, experts=experts, mlp=mlp)


def fill(module, seed, dtype=torch.float32):
    """Random weights, so that routing differs from token to token."""
    state = {}
    for i, (name, tensor) in enumerate(module.state_dict().items()):
        weight = numbers(*tensor.shape, seed=1000 * seed + i) * tensor.shape[-1] ** -0.5
        if name.endswith(("norm.weight", "scales.weight")):
            weight = weight + 1
        is_float32 = ("router.weight", "router_norm.weight", "shared_gate.weight", "scales.weight", "choice.bias")
        state[name] = weight if name.endswith(is_float32) else weight.to(dtype)
    module.load_state_dict(state, assign=True)
    return module


def sparse_layer(name):
    return layer_of(make_config(name))


def layer_of(config):
    shared = config.experts.shared_dim
    with torch.device("meta"):
        layer = SparseMLP(config, MLP(config, shared) if shared else None)
    fill(layer, 0)
    layer.set_counts(torch.zeros(layer.X + 1, dtype=torch.int64))
    return layer


def sparse_model(name, seed=0, dtype=torch.float32):
    with torch.device("meta"):
        model = Transformer(make_config(name))
    return fill(model, seed, dtype).eval()


def with_kernels(layer, dtype=torch.float32, exact=False):
    """The layer with packed weights, and the kernels that run it."""
    holder = torch.nn.ModuleDict({"experts": layer})
    install_kernels(holder, installer=CpuInstaller(holder, exact_activations=exact))
    if not has_kernel("sparse_mlp", CPU):
        pytest.skip("no kernels for this machine")
    from cpu.install import prepare_experts

    prepare_experts(layer, dtype)
    return layer


def positions(B, S):
    return torch.arange(S).expand(B, S).clone()


def specification(layer, x):
    """One token after the other, and one expert after the other, in float64."""
    experts = layer.k
    y = torch.zeros(x.shape, dtype=torch.float64)
    for at in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        token = x[tuple(at)].double()
        routed = token
        if layer.config.beside_mlp:
            routed = F.rms_norm(token, token.shape, layer.router_norm.weight.double(), layer.norm.eps)
            token = F.rms_norm(token, token.shape, layer.norm.weight.double(), layer.norm.eps)
        logits = layer.router.weight.double() @ routed
        scores = logits.sigmoid() if layer.config.scoring == "sigmoid" else logits.softmax(0)
        preferred = scores if layer.choice is None else scores + layer.choice.bias
        ids = sorted(range(layer.X), key=lambda e: (-preferred[e], e))[:experts]
        weights = scores[ids] * layer.config.scale
        if layer.normalized:
            weights = weights / (scores[ids].sum() + (1e-6 if layer.config.scoring == "sigmoid" else 0))
        if layer.scales is not None:
            weights = weights * layer.scales.weight[ids]
        activation = F.silu if layer.kind == "swiglu" else partial(F.gelu, approximate="tanh")
        for e, weight in zip(ids, weights):
            gate, up = layer.gate_up.weight.view(layer.X, -1, len(token))[e].double().mv(token).chunk(2)
            down = layer.down.weight.view(layer.X, len(token), -1)[e].double()
            y[tuple(at)] += weight * down.mv(activation(gate) * up)
        if layer.shared is not None:
            gate, up = layer.shared.gate_up.weight.double().mv(token).chunk(2)
            shared = layer.shared.down.weight.double().mv(F.silu(gate) * up)
            y[tuple(at)] += torch.sigmoid(layer.shared_gate.weight[0].double() @ token) * shared
    return y


def test_fused_operations_refuse_a_field_of_experts_that_they_do_not_know():
    fields = [("invented", float, 1.0)]
    config = make_config("5-2")
    for value, is_known in ((1.0, True), (2.0, False)):
        more = dataclasses.make_dataclass("More", fields, bases=(Experts,), frozen=True)
        experts = more(**dataclasses.asdict(config.experts), invented=value)
        with torch.device("meta"):
            model = Transformer(dataclasses.replace(config, experts=experts))
        fill(model, 0)
        for layer in [layer for block in model.blocks for layer in block.sparse]:
            layer.set_counts(torch.zeros(layer.X + 1, dtype=torch.int64))
        install_kernels(model)
        runs = [layer.run for block in model.blocks for layer in block.sparse]
        assert all(run is not None for run in runs) == is_known
        assert (model.backend.run_blocks is not None) == is_known
        assert uses_only(model.config, (*FUSED_FIELDS, "experts")) == is_known  # what Triton's installer asks


def assert_near(found, expected, tolerance=NEAR):
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_the_sum_over_its_experts(name, kernels):
    layer = sparse_layer(name)
    shapes = [(1, 1), (5, 3), (2, 17), (1, 90)]
    inputs = [numbers(B, S, CASES[name][0], seed=B + S) for B, S in shapes]
    expected = [specification(layer, x) for x in inputs]
    if kernels:
        with_kernels(layer).max_run_tokens = 1000
    for x, y in zip(inputs, expected):
        assert_near(layer(x, positions(*x.shape[:2])), y, 4 * NEAR)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_of_equal_logits_those_of_lower_numbers_are_chosen(kernels):
    """The outputs of experts with equal weights do not tell, so the counts do."""
    layer = sparse_layer("8-3")
    layer.router.weight[5] = layer.router.weight[2]
    layer.router.weight[[1, 6, 7]] = layer.router.weight[[3]]
    x = numbers(1, 90, 70)
    logits = x[0] @ layer.router.weight.T
    used = torch.zeros(8, dtype=torch.int64)
    for token in logits:
        for e in sorted(range(8), key=lambda e: (-token[e], e))[:3]:
            used[e] += 1
    if kernels:
        with_kernels(layer).max_run_tokens = 1000
    layer(x, positions(1, 90))
    assert layer.counts[:8].tolist() == used.tolist()
    assert layer.counts[8] == (used > 0).sum()


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_padding_uses_no_expert_and_changes_nothing(kernels):
    layer = sparse_layer("5-2")
    x = numbers(3, 4, 40)
    where = positions(3, 4)
    if kernels:
        with_kernels(layer)
    alone = layer(x[1:2, :2], where[1:2, :2])
    layer.counts.zero_()
    where[1, 2:] = -1
    where[2] = -1
    torch.testing.assert_close(layer(x, where)[1, :2], alone[0], rtol=0, atol=0)
    assert layer.counts[:5].sum() == 6 * layer.k


@pytest.mark.parametrize("exact", [False, True], ids=["quantized activations", "exact"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_kernel_of_each_format_equals_torch(format, exact):
    """Sizes that leave the last block of 16 rows of each expert incomplete, where the format allows it."""
    D, X, k, N = (256, 3, 2, 256) if FORMATS[format].quantize is None else (70, 5, 3, 33)
    layer = layer_of(Config(**SIZES, dim=D, max_seq_length=128, experts=Experts((0, 2), X, k, N)))
    groupsize = FORMATS[format].groupsizes[0] or 32
    layer.gate_up = quantized(format, X * 2 * N, D, groupsize, False, torch.float32, seed=1)[0]
    layer.down = quantized(format, X * D, N, groupsize, False, torch.float32, seed=2)[0]
    layer.gate_up.n_expert = layer.down.n_expert = X
    dtype = torch.float32 if exact else torch.bfloat16
    x = numbers(2, 7, D, dtype=dtype)
    expected = copy.deepcopy(layer)(x.float(), positions(2, 7))
    found = with_kernels(layer, dtype, exact)(x, positions(2, 7))
    assert_near(found, expected, 4 * NEAR if exact else 0.05)


def test_gate_and_up_may_have_different_formats():
    D, X, N = 256, 3, 40
    layer = layer_of(Config(**SIZES, dim=D, max_seq_length=128, experts=Experts((0, 2), X, 2, N)))
    formats = ["q4_k", "q6_k"]
    pieces = [quantized(f, X * N, D, 256, False, torch.float32, seed=i)[0] for i, f in enumerate(formats)]
    for piece in pieces:
        piece.n_expert = X
    layer.gate_up = StackedLinear(pieces, None)
    x = numbers(1, 9, D)
    expected = copy.deepcopy(layer)(x, positions(1, 9))
    gates = [pieces[0].weights(slice(e * N, (e + 1) * N)) for e in range(X)]
    ups = [pieces[1].weights(slice(e * N, (e + 1) * N)) for e in range(X)]
    layer_of_floats = copy.deepcopy(layer)
    layer_of_floats.gate_up = ExpertStack(D, 2 * N, X)
    both = torch.cat([torch.cat(pair) for pair in zip(gates, ups)])
    layer_of_floats.gate_up.load_state_dict({"weight": both}, assign=True)
    assert torch.equal(dense_layer(layer.gate_up, torch.float32).weight, both)
    assert_near(layer_of_floats(x, positions(1, 9)), expected)
    assert_near(with_kernels(layer)(x, positions(1, 9)), expected, 4 * NEAR)


@pytest.mark.parametrize("mode", ["int4", "int8"])
def test_the_bits_of_a_token_do_not_depend_on_others_or_on_threads(mode):
    """In a whole model: a prompt alone and beside others, in one pass and in parts, with any number of threads."""
    model = quantize_model(sparse_model("33-8", dtype=torch.bfloat16), Quantization(mode, 32, "int8"))
    install_kernels(model)
    if not model.backend.chunk_invariant:
        pytest.skip("no kernels for this machine")
    model.setup_caches(4, 100)
    tokens = torch.randint(0, 97, (3, 61), generator=torch.Generator().manual_seed(0))
    where = positions(3, 61)
    whole = model(tokens, where, all_logits=True)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for row in range(3):
                assert torch.equal(model(tokens[row : row + 1], where[:1], all_logits=True)[0], whole[row])
    finally:
        torch.set_num_threads(before)
    rows = torch.tensor([3])
    parts = [slice(0, 1), slice(1, 6), slice(6, 50), slice(50, 61)]
    found = [model(tokens[1:2, part], where[1:2, part], rows, all_logits=True) for part in parts]
    assert torch.equal(torch.cat(found, 1)[0], whole[1])


@pytest.mark.parametrize("D, sizes", [(130, (33, 3, 72)), (512, (20, 2, 200))])
def test_no_product_of_a_prefill_has_few_rows(monkeypatch, D, sizes):
    """torch sums in another order for a few rows, so an expert's products would depend on how many tokens it has."""
    layer = layer_of(Config(**SIZES, dim=D, max_seq_length=128, experts=Experts((0, 2), *sizes)))
    rows = []
    multiply = ExpertStack.multiply_expert

    def watch(stack, x, e):
        rows.append(x.shape[-2])
        return multiply(stack, x, e)

    monkeypatch.setattr(ExpertStack, "multiply_expert", watch)
    x = numbers(2, 61, D, seed=5)
    whole = layer(x, positions(2, 61))
    part = layer(x[1:, :33], positions(1, 33))
    assert min(rows) >= PREFILL_ROWS and max(rows) < 61
    assert_near(part, whole[1:, :33])


@pytest.mark.parametrize("name", CASES)
def test_the_fused_step_equals_one_operation_after_the_other(name):
    plain = sparse_model(name)
    with only_torch():
        reference = copy.deepcopy(plain)
        reference.setup_caches(3, 60)
        tokens = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(1))
        where = positions(3, 40)
        where[1, 30:] = -1
        expected = reference(tokens, where, all_logits=True)
    install_kernels(plain)
    plain.setup_caches(3, 60)
    parts = [slice(i, i + 10) for i in range(0, 40, 10)]  # short enough for the fused step
    found = torch.cat([plain(tokens[:, part], where[:, part], all_logits=True) for part in parts], 1)
    assert_near(found[where >= 0], expected[where >= 0], 10 * NEAR)
    assert torch.equal(plain.expert_counts[:, :-1], reference.expert_counts[:, :-1])
