"""The GPU kernels: results against their references, equal bits for a row in every batch, compiled graphs, and
compilation ahead of time. Without a GPU they run in Triton's interpreter, on CPU tensors and few sizes."""

import copy
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import NARROW, WIDE, attention_case, delta_inputs, delta_state, numbers, quantized
from conftest import INTERPRET, ROOT, greedy, only_torch, random_prompts
from test_experts import fill, layer_of, sparse_model

tl = pytest.importorskip("triton.language")
with INTERPRET:
    import kernels_triton as kt

import kernels
from backend import Backend
from config import Config, Experts, RopeScaling
from cpu.build import load_kernels
from formats import Quantization, QuantizedEmbedding, QuantizedLinear, Scheme, StackedLinear, pack, quantize_model
from kernels import attention_reference
from layers import Linear, RMSNorm
from load import install_kernels, load_model
from mixers.recurrent import gated_delta
from positions import rope_table, rotate
from quantize import quantize_checkpoint

CHOOSE, ops = kt.choose_tiles, torch.ops.fastpath
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.slow
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
# For rounding the result, and a little for sums. The interpreter truncates to bfloat16 where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 7e-4}
F32, BF16, F16 = TOLERANCE


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """In the interpreter, run fewer programs: 64 that are mostly idle take seconds. On a GPU, change nothing.

    The C++ kernels are loaded before, because those that a test loads would be forgotten with its KERNELS."""
    load_kernels()
    if not ON_GPU:
        monkeypatch.setattr(kt, "SPLITS", tl.constexpr(4))
        monkeypatch.setattr(kt, "choose_tiles", lambda *shape: tiles_of(1, 128))
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # parts of Triton are imported at the first launch
    with torch.library._scoped_library("fastpath", "IMPL") as library:
        if not ON_GPU:
            kt.register(library, "CPU")  # replaces the C++ kernels if they are loaded
        monkeypatch.setattr(kernels, "KERNELS", {})
        kernels.find_kernels(DEVICE)
        yield


@pytest.fixture
def ordered_products(monkeypatch):
    """Replace the interpreter's products by sums over columns in a fixed order, as on a tensor core. numpy's products,
    which it uses, round a row differently at other positions in the matrix."""

    def matmul(a, b, dtype=None):
        total = np.zeros((a.shape[0], b.shape[1]), dtype)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[k]
        return total

    if not ON_GPU:
        monkeypatch.setattr(np, "matmul", matmul)


def tiles_of(cuts, block=32):
    return {"BLOCK_N": block, "SPLIT_K": cuts, "num_warps": block // 16, "num_stages": 3}


def on_device(arguments):
    return [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments]


def close(found, expected, tolerance):
    assert found.shape == expected.shape
    assert (found.float() - expected).abs().max() <= tolerance * (expected.abs().max() + 1e-6)


# ---------------------------------------------------------------- attention

# dtype  B  S  K group E   T   window slopes rows ragged; caches hold NaN in every slot that no token of the row sees
CASES = [
    (F32, 3, 1, 2, 3, 64, 300, None, False, True, False), (BF16, 2, 1, 1, 8, 128, 530, None, False, False, False),
    (F16, 1, 5, 2, 4, 80, 130, 7, True, False, True), (F32, 2, 16, 1, 4, 96, 40, None, True, True, True),
    (BF16, 1, 16, 3, 1, 31, 300, 140, True, False, False), (F32, 2, 2, 1, 1, 10, 5, 1, False, False, False),
    (F32, 2, 17, 2, 1, 16, 20, None, False, False, True), (BF16, 2, 75, 1, 3, 80, 300, 64, False, True, True),
    (F16, 1, 40, 1, 8, 128, 130, None, True, True, False), (F32, 3, 140, 1, 4, 64, 300, None, True, False, True),
    (F32, 1, 130, 2, 1, 31, 180, 7, True, False, False), (BF16, 2, 3, 1, 4, 512, 90, None, False, True, True),
    (BF16, 1, 40, 1, 2, 512, 70, 30, False, False, False), (F32, 1, 3, 2, 1, 260, 40, 9, False, True, True),
]  # fmt: skip


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda x: "-".join(str(y).removeprefix("torch.") for y in x))


@each(CASES)
def test_attention(case):
    dtype, *sizes = case
    q, k_cache, v_cache, *places = on_device(attention_case(sum(sizes[:6]), dtype, *sizes))
    found = ops.attention(q, k_cache, v_cache, *places)
    assert found.dtype == dtype
    close(found, attention_reference(q.float(), k_cache.float(), v_cache.float(), *places), TOLERANCE[dtype])


def test_attention_far_beyond_the_live_length():
    """A cache of 3000 slots of which 70 are live, with as many splits as on a GPU."""
    q, k_cache, v_cache = numbers(1, 1, 3, 16), *torch.full((2, 1, 1, 3008, 16), float("nan"))
    k_cache[:, :, :70], v_cache[:, :, :70] = numbers(1, 1, 70, 16, seed=1), numbers(1, 1, 70, 16, seed=2)
    arguments = on_device([q, k_cache, v_cache, torch.tensor([[69]]), None, None, None, 0.25])
    with mock.patch.object(kt, "SPLITS", tl.constexpr(64)):
        close(ops.attention(*arguments), attention_reference(*arguments), TOLERANCE[F32])


@pytest.mark.parametrize("dtype, window, slopes", [(BF16, None, False), (F32, 200, True)])
def test_attention_of_a_token_has_the_same_bits_in_every_batch(ordered_products, dtype, window, slopes):
    """Alone or among up to 16 tokens of its row, beside other rows, in a cache of another length, and also with windows
    that begin in different chunks."""
    shapes = (2, 16, 3, 80), (2, 1, 300, 80), (2, 1, 300, 80)
    q, k_cache, v_cache = (numbers(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    input_pos = torch.stack([torch.arange(255, 271), torch.arange(40, 56)])
    bias = torch.rand(3) / 99 if slopes else None
    q, k_cache, v_cache, input_pos, bias = on_device([q, k_cache, v_cache, input_pos, bias])
    together = ops.attention(q, k_cache, v_cache, input_pos, None, bias, window, 0.1)
    longer = [F.pad(cache, (0, 0, 0, 500), value=float("nan")) for cache in (k_cache, v_cache)]
    for b, tokens in ((0, slice(0, 1)), (0, slice(9, 10)), (1, slice(7, 12))):
        row = torch.tensor([b], device=DEVICE)
        found = ops.attention(q[b : b + 1, tokens], *longer, input_pos[b : b + 1, tokens], row, bias, window, 0.1)
        assert torch.equal(found, together[b : b + 1, tokens])


# ---------------------------------------------------------------- products

# dtype format group  M   N    K   bias  norm   gated  cuts
PRODUCTS = [
    (F32, "int8", 32, 1, 37, 300, True, False, False, 1), (F32, "int4", 32, 9, 70, 1100, True, True, True, 2),
    (BF16, "int4", 64, 3, 37, 515, True, True, False, 1), (BF16, "int4", 128, 16, 24, 1030, False, False, True, 2),
    (BF16, "int4", 0, 2, 40, 300, True, True, True, 2), (F16, "int4", 32, 5, 70, 256, True, False, False, 1),
    (F16, "int8", 64, 17, 37, 515, False, False, True, 4), (BF16, "int8", 128, 4, 33, 300, True, True, True, 1),
    (F32, "int8", 0, 7, 24, 150, False, True, False, 1), (BF16, None, 0, 1, 37, 300, True, True, False, 2),
    (F32, None, 0, 12, 70, 45, True, True, True, 1), (F16, None, 0, 16, 24, 128, False, False, False, 1),
]  # fmt: skip


def gpu_layer(format, N, K, group, bias, dtype):
    """(a layer with the kernels, the float32 matrix that it stands for)."""
    if format is None:
        layer = Linear(K, N, bias).to(DEVICE, dtype)
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=N + i) * K**-0.5)
        return layer, layer.weight.float()
    layer, matrix = quantized(format, N, K, group, bias, dtype, seed=N)
    return kt.PackedLinear(layer.to(DEVICE)), matrix.to(DEVICE)


def norm_layer(K, dtype):
    norm = RMSNorm(K, 1e-5).to(DEVICE, dtype)
    norm.weight.copy_(numbers(K, seed=2) * 0.3 + 1)
    return norm


def tiles(cuts):
    return mock.patch.object(kt, "choose_tiles", lambda *shape: tiles_of(cuts))


@each(PRODUCTS)
def test_products_with_few_rows(case):
    """With everything that is fused into a product: RMSNorm before, bias, and SwiGLU or the residual after it."""
    dtype, format, group, M, N, K, bias, normed, gated, cuts = case
    layer, matrix = gpu_layer(format, 2 * N if gated else N, K, group, bias, dtype)
    x, residual = numbers(M, K, seed=K, dtype=dtype).to(DEVICE), numbers(M, N, seed=M, dtype=dtype).to(DEVICE)
    norm = norm_layer(K, dtype) if normed else None
    with tiles(cuts):
        found = kt.apply_linear(layer, x, norm, None if gated else residual, gated)
    h = F.rms_norm(x.float(), (K,), norm.weight.float(), 1e-5) if normed else x.float()
    y, size = F.linear(h, matrix, layer.bias.float() if bias else None), h.abs() @ matrix.abs().T
    if gated:
        gate, up = y.chunk(2, -1)
        y, size = F.silu(gate) * up, (size[:, :N] + 1) * (size[:, N:] + 1)  # the factors' errors and the product's
    else:
        y, size = y + residual.float(), size + residual.float().abs()
    assert found.dtype == dtype and ((found.float() - y).abs() <= TOLERANCE[dtype] * size).all()


@pytest.mark.parametrize("format, group, dtype", [("int4", 32, BF16), ("int8", 0, F32), (None, 0, BF16)])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(ordered_products, format, group, dtype):
    layer, _ = gpu_layer(format, 2 * 37, 300, group, True, dtype)
    norm = norm_layer(300, dtype)
    x = numbers(17, 300, dtype=dtype).to(DEVICE)
    with tiles(2):
        together = kt.apply_linear(layer, x, norm, None, True)
        for rows in (slice(0, 1), slice(3, 14), slice(16, 17)):
            assert torch.equal(kt.apply_linear(layer, x[rows], norm, None, True), together[rows]), rows


@pytest.mark.parametrize("format, group, dtype", [("int4", 32, BF16), ("int4", 0, F32), ("int8", 64, F16)])
def test_products_with_many_rows(format, group, dtype):
    layer, matrix = gpu_layer(format, 37, 300, group, True, dtype)
    x = numbers(2, 35, 300, dtype=dtype).to(DEVICE)
    expected, size = F.linear(x.float(), matrix, layer.bias.float()), x.float().abs() @ matrix.abs().T
    assert ((layer(x).float() - expected).abs() <= TOLERANCE[dtype] * size).all()


@pytest.mark.parametrize("format, group", [("int8", 32), ("int8", 0), ("int4", 64), ("int4", 0)])
@pytest.mark.parametrize("K", [45, 300])
def test_packed_weights_are_the_same_numbers(format, group, K):
    """Looked up as in an embedding; also with negative scales and -128, which only other programs write."""
    scheme = Scheme(format, group if group < K else 0)
    plain = QuantizedEmbedding(K, 29, False, scheme)
    plain.load_state_dict(pack(numbers(29, K), *scheme))
    if format == "int8":
        plain.weight[3, 7], plain.scales[3] = -128, -plain.scales[3]
    tokens = torch.randint(0, 29, (2, 7))
    assert torch.equal(kt.PackedEmbedding(plain.to(DEVICE))(tokens.to(DEVICE)), plain(tokens.to(DEVICE)))
    assert torch.equal(
        kt.unpack_words(kt.pack_words(torch.arange(-128, 127).int()[None].to(torch.int8), 8), 8, 255)[0],
        torch.arange(-128, 127, dtype=torch.int32),
    )


# ---------------------------------------------------------------- sparse layers

# dtype formats of gate_up and down, group, X  k  D   F  normalized shared, then scoring, choice_bias, scale,
# expert_scales, beside_mlp; the layers with these two have GeGLU
SPARSE = [
    (F32, None, None, 0, 5, 2, 40, 24, True, 33), (BF16, None, None, 0, 9, 3, 40, 24, False, 12),
    (F32, "int4", "int8", 32, 9, 2, 40, 70, False, 0), (BF16, "int4", "int4", 64, 5, 2, 300, 24, True, 0),
    (BF16, "int8", "int4", 0, 9, 3, 150, 24, True, 0), (F16, "int8", None, 128, 5, 1, 130, 24, False, 20),
    (F32, "int4", "int4", 0, 1, 1, 40, 24, True, 0), (F32, None, None, 0, 9, 4, 40, 24, True, 0, "sigmoid", True, 2.5),
    (F32, None, None, 0, 6, 2, 40, 24, False, 20, "sigmoid"),
    (F32, "int4", None, 32, 7, 3, 40, 24, True, 0, "softmax", False, 1.5, True, True),
]  # fmt: skip


def sparse_layer(case):
    """(a sparse layer with the kernels, the same layer in float32 and plain torch)."""
    dtype, up_format, down_format, group, X, k, D, hidden, normalized, shared, *scoring = case
    experts = Experts((0,), X, k, hidden, normalized, shared, *scoring)
    mlp = "geglu" if experts.expert_scales else "swiglu"
    plain = fill(layer_of(Config(1, 2, 1, 20, D, 44, 97, 64, experts=experts, mlp=mlp)), X)
    ours = copy.deepcopy(plain)
    for name, format in (("gate_up", up_format), ("down", down_format)):
        stack = getattr(plain, name)
        if format is not None:
            layer, matrix = quantized(format, stack.out_features, stack.in_features, group, False, dtype, seed=X)
            layer.n_expert = X
            layer = kt.PackedLinear(layer)
            stack.weight.copy_(matrix)
        else:
            layer = getattr(ours, name).to(dtype)
            stack.weight.copy_(layer.weight)
        setattr(ours, name, layer)
    if shared:
        plain.shared.to(dtype).float()
        ours.shared.to(dtype)
    kt.prepare_experts(ours.to(DEVICE))
    ours.set_counts(plain.counts.to(DEVICE).clone())
    return ours, plain.to(DEVICE)


@each(SPARSE)
def test_sparse_layers(case):
    """A pass of few tokens, some of them padding, and prefill, which is the loop over the experts with our products."""
    dtype = case[0]
    D = case[6]
    ours, plain = sparse_layer(case)
    for B, S, seed in ((2, 8, 0), (1, 17, 1)):
        x = numbers(B, S, D, seed=seed, dtype=dtype).to(DEVICE)
        input_pos = torch.arange(S, device=DEVICE).expand(B, S).clone()
        input_pos[0, S - 1] = -1
        with only_torch():
            expected = plain(x.float(), input_pos)
        found = ours(x, input_pos)
        assert found.dtype == dtype
        close(found, expected, 3 * TOLERANCE[dtype])  # three products after each other
        assert torch.equal(ours.counts, plain.counts)


@pytest.mark.parametrize("case", [SPARSE[1], SPARSE[2]], ids=["dense", "int4"])
def test_a_token_of_a_sparse_layer_has_the_same_bits_in_every_batch(ordered_products, case):
    """Experts have more tokens than a tile, or one."""
    layer, _ = sparse_layer(case)
    x = numbers(2, 16, case[6], dtype=case[0]).to(DEVICE)
    input_pos = torch.arange(16, device=DEVICE).expand(2, 16).clone()
    input_pos[0, 11:] = -1
    together = layer(x, input_pos)
    assert layer.counts[:-1].max() > 8
    for b, tokens in ((0, slice(0, 1)), (1, slice(13, 16))):
        assert torch.equal(layer(x[b : b + 1, tokens], input_pos[b : b + 1, tokens]), together[b : b + 1, tokens])


@pytest.mark.filterwarnings("ignore:invalid value")  # NaN in the interpreter
def test_of_equal_logits_those_of_lower_numbers_are_chosen():
    """Infinities and NaN are ordered too, so that ids name experts, and no expert is chosen twice."""
    inf = float("inf")
    rows = [[1, 2, 2, 0, 2], [3, 3, 3, 3, 3], [-inf, -inf, 1, -inf, 0], [torch.nan] * 5, [0.0, -0.0, 5, 5, inf]]
    logits = torch.tensor(rows, device=DEVICE)[None]  # the last column is not one of an expert
    input_pos = torch.tensor([[0, 1, 2, 3, 4]], device=DEVICE)
    ids, weights = ops.choose_experts(logits, input_pos, 4, 3, True)
    assert ids[0].tolist() == [[1, 2, 0], [0, 1, 2], [2, 0, 1], [0, 1, 2], [2, 3, 0]]
    close(weights[0, :3], logits[0, :3, :4].gather(-1, ids[0, :3]).softmax(-1), 1e-6)
    assert weights[0, 3].isnan().all()


@pytest.mark.parametrize("R, X", [(300, 9), (700, 3), (5, 40), (64, 64)])
def test_the_plan_has_each_choice_once(R, X):
    """In tiles of 8 choices of one expert, in ascending order. Some experts have none, and some choices are padding."""
    generator = torch.Generator().manual_seed(R)
    ids = torch.randint(-1, X, (R // 5, 5), generator=generator)
    ids[ids == 1] = -1
    counts = torch.arange(X + 1)
    device_ids, device_counts = on_device([ids, counts.clone()])
    experts, choices = kt.plan_experts(device_ids, device_counts)
    ids = ids.flatten().tolist()
    expected = []
    for e in range(X):
        own = [choice for choice, expert in enumerate(ids) if expert == e]
        tiles = [own[start : start + 8] for start in range(0, len(own), 8)]
        expected += [(e, tile + [-1] * (8 - len(tile))) for tile in tiles]
        counts[e] += len(own)
        counts[X] += len(own) > 0
    used = len(expected)
    assert list(zip(experts[:used].tolist(), choices[:used].tolist())) == expected
    assert experts[used:].eq(-1).all()
    assert torch.equal(device_counts.cpu(), counts)


def test_experts_whose_gate_and_up_have_different_formats_run_in_the_loop():
    X, D, hidden = 3, 40, 24
    plain = layer_of(Config(1, 2, 1, 20, D, 44, 97, 64, experts=Experts((0,), X, 2, hidden, True, 0)))
    pieces = [quantized(format, X * hidden, D, 32, False, F32, seed=1)[0] for format in ("int4", "int8")]
    for piece in pieces:
        piece.n_expert = X
    plain.gate_up = StackedLinear(pieces, None)
    ours = copy.deepcopy(plain).to(DEVICE)
    ours.gate_up = StackedLinear([kt.PackedLinear(piece.to(DEVICE)) for piece in ours.gate_up], None)
    kt.prepare_experts(ours)
    x = numbers(1, 4, D)
    input_pos = torch.arange(4)[None]
    with only_torch():
        expected = plain(x, input_pos)
    close(ours(*on_device([x, input_pos])).cpu(), expected, 3 * TOLERANCE[F32])


def sparse_models(mode):
    """(a model of dense and sparse blocks with the kernels, the same model in plain torch)."""
    plain = sparse_model("5-2")
    if mode is not None:
        plain = quantize_model(plain, Quantization(mode, 32, "int8"))
    plain.to(DEVICE)
    ours = copy.deepcopy(plain)
    install_kernels(ours, installer=kt.TritonInstaller(ours))
    assert ours.backend.run_blocks is kt.fused_blocks
    return ours, plain


@pytest.mark.parametrize("mode", [None, pytest.param("int4", marks=pytest.mark.full)])
def test_models_with_experts(mode):
    """Prefill, and decoding in fused blocks, which are compiled as one graph."""
    torch._dynamo.reset()
    ours, plain = sparse_models(mode)
    prompts = random_prompts((3, 17), V=97)
    with only_torch():
        expected = greedy(plain, prompts, 2, length=40)
    step = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=False)
    assert greedy(ours, prompts, 2, decode=step, length=40) == expected
    assert torch.equal(ours.expert_counts, plain.expert_counts)


# ---------------------------------------------------------------- positions and norms


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("qk_norm, roped", [(True, True), (False, True), (False, False)])
def test_rotary_with_cache_write(dtype, qk_norm, roped):
    B, S, H, K, E, T = 2, 3, 6, 2, 22, 19
    qkv, rows = numbers(B, S, (H + 2 * K) * E, dtype=dtype), torch.tensor([2, 0])
    input_pos = torch.tensor([[4, 5, 6], [16, -1, -1]])
    freqs = torch.rand(E // 2, generator=torch.Generator().manual_seed(1))
    rope = rope_table(freqs, RopeScaling("yarn", 2.0, 8, attention_factor=0.7), input_pos) if roped else None
    norms = [numbers(E, seed=i, dtype=dtype) for i in (5, 6)] if qk_norm else [None, None]
    caches = [torch.zeros(3, K, T, E, dtype=dtype, device=DEVICE) for _ in range(2)]
    cos_sin = rope or (None, None)
    arguments = on_device([qkv, *cos_sin, *norms, input_pos, rows, *caches, H, 1e-6])
    q = ops.rotary(*arguments).cpu()

    qk, v = qkv.view(B, S, -1, E).split([H + K, K], 2)
    if qk_norm:
        parts = qk.split([H, K], 2)
        qk = torch.cat([F.rms_norm(x, (E,), w, 1e-6) for x, w in zip(parts, norms)], 2)
    qk = qk if rope is None else rotate(qk, rope)
    tolerance = 4 * TOLERANCE[dtype]  # rounded twice
    close(q, qk[:, :, :H].float(), tolerance)
    for cache, expected in zip(caches, (qk[:, :, H:], v)):
        written = torch.zeros_like(cache, device="cpu")
        written[rows[:, None], :, input_pos] = expected
        close(cache.cpu()[:, :, :-1], written[:, :, :-1].float(), tolerance)
        assert cache[2, :, -1].eq(0).all() and cache[0, :, -1].ne(0).any(), "padding lands in the scratch slot"


# (tokens, how many of them are accepted) for each of two rows, in each pass. Up to 16 tokens are added one by one, and
# more in chunks of 16. The first chunk may be partly empty, and one row may have fewer chunks than the other.
PASSES = [
    ((37, 35), (20, 20)), ((1, 1), (0, 0)), ((5, 2), (3, 0)), ((16, 16), (16, 9)),
    ((8, 0), (1, 1)), ((48, 40), (7, 3)), ((19, 19), (0, 0)), ((16, 9), (17, 17)),
]  # fmt: skip


@pytest.mark.parametrize("net", [NARROW, WIDE], ids=["narrow", "wide"])
def test_the_gated_delta_rule(net):
    tokens = delta_inputs(net, 2, 140, seed=1)
    rejected = delta_inputs(net, 2, 50, seed=2)
    rows = torch.tensor([2, 0])
    state, expected = delta_state(net, 3, partial(torch.zeros, device=DEVICE)), delta_state(net, 3)
    done = [0, 0]
    for sizes in PASSES:
        S = max(count for count, _ in sizes)
        positions = torch.full((2, S), -1)
        parts = [x[:, :S].clone() for x in rejected]
        for b, (count, kept) in enumerate(sizes):
            positions[b, :count] = torch.arange(done[b], done[b] + count)
            for part, right in zip(parts, tokens):
                part[b, :kept] = right[b, done[b] : done[b] + kept]
                part[b, count:] = torch.nan
            done[b] += kept
        device_parts = on_device([*parts, positions, rows])
        y = gated_delta(*device_parts[:5], state, *device_parts[5:]).cpu()
        with only_torch():
            theirs = gated_delta(*parts, expected, positions, rows)
        close(y, theirs, 2e-5)
    for name, stored in expected.named_buffers():
        found = getattr(state, name).cpu()
        close(found[[0, 2]], stored[[0, 2]].float(), 2e-5)
        assert found[1].eq(0).all(), "no other row is written"


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("D", [45, 600])
def test_norms(dtype, D):
    x, w, b = (numbers(*shape, seed=D, dtype=dtype).to(DEVICE) * 2 + 1 for shape in ((3, 5, D), (D,), (D,)))
    found = ops.rms_norm(x, w, 1e-5)
    close(found, F.rms_norm(x.float(), (D,), w.float(), 1e-5), TOLERANCE[dtype])
    assert torch.equal(ops.rms_norm(x[1, 2:3], w, 1e-5), found[1, 2:3])
    expected = F.layer_norm(x.float(), (D,), w.float(), b.float(), 1e-5)
    close(ops.layer_norm(x, w, b, 1e-5), expected, 5 * TOLERANCE[dtype])


def test_opcheck():
    """Checks the schemas, the shapes for the compiler, and that in-place writes are declared."""
    check = torch.library.opcheck
    q, k_cache, v_cache, *places = on_device(attention_case(0, F32, 1, 3, 1, 2, 16, 20, None, True, True, True))
    check(ops.attention, (q, k_cache, v_cache, *places))
    x, residual = numbers(2, 3, 64).to(DEVICE), numbers(2, 3, 24).to(DEVICE)
    plain, packed = (gpu_layer(format, 24, 64, 32, True, F32)[0] for format in (None, "int4"))
    check(ops.linear, (x, plain.weight, plain.bias))
    tensors = (packed.weight, packed.scales, packed.bias)
    check(ops.fused_linear, (x, *tensors, x[0, 0], residual, 24, 4, 32, False, 1e-5))
    check(ops.fused_linear, (numbers(1, 17, 64).to(DEVICE), *tensors, None, None, 24, 4, 32, False, 0.0))
    state = delta_state(NARROW, 2, partial(torch.zeros, device=DEVICE))
    stored = (state.matrix, state.base, state.keys, state.deltas, state.decays)
    check(ops.gated_delta, tuple(on_device([*delta_inputs(NARROW, 1, 3), *stored, torch.tensor([[0, 1, 2]]), None])))
    sparse = sparse_layer(SPARSE[1])[0]
    stacks = (sparse.gate_up.weight, None, sparse.down.weight, None)
    x = numbers(1, 2, 40, dtype=BF16).to(DEVICE)
    logits, where = on_device([numbers(1, 2, 10), torch.tensor([[0, -1]])])
    check(ops.choose_experts, (logits, where, 9, 3, True))
    chosen = ops.choose_experts(logits, where, 9, 3, True)
    check(ops.expert_mlp, (x, *chosen, sparse.counts, *stacks, x, logits, 24, [16, 16], [0, 0]))
    x = numbers(2, 3, 64).to(DEVICE)
    check(ops.rms_norm, (x, x[0, 0], 1e-5))
    check(ops.layer_norm, (x, x[0, 0], x[0, 1], 1e-5))
    input_pos = torch.tensor([[4, 5, -1]])
    rope = rope_table(torch.rand(8), None, input_pos)
    qkv = numbers(1, 3, 4 * 16)
    arguments = [qkv, *rope, None, None, input_pos, None, k_cache.nan_to_num(), v_cache.nan_to_num(), 2, 1e-6]
    check(ops.rotary, tuple(on_device(arguments)))


# ---------------------------------------------------------------- the choice of tiles


def test_fixed_choices_fill_the_processors():
    """For Llama-3.1-8B on 132 multiprocessors, K is cut only if N alone does not fill them, and never too finely."""
    for bits in (4, 8, 16):
        for N, K in ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)):
            found = kt.default_tiles(bits, N, K, 132)
            programs = -(-N // found["BLOCK_N"]) * found["SPLIT_K"]
            assert programs >= 132 and (found["SPLIT_K"] == 1 or programs // 2 < 165)
            assert found["SPLIT_K"] == 1 or K * bits // 1024 // found["SPLIT_K"] >= kt.MIN_TILES_PER_SPLIT


def test_tuned_choices_are_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kt, "choose_tiles", CHOOSE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device, shape = torch.device("cpu"), (4, 32, 640, 512, False)
    path = kt.tuning_file(device)
    path.parent.mkdir(parents=True)
    for text, expected in (("{broken", False), (json.dumps({kt.tile_key(*shape): {"BLOCK_N": 16}}), True)):
        path.write_text(text)
        kt.tuned_tiles.cache_clear()
        assert (kt.choose_tiles(*shape, device) == {"BLOCK_N": 16}) == expected
    kt.tuned_tiles.cache_clear()


# ---------------------------------------------------------------- in models

MODELS = [("mistral-gqa", None), ("qwen3-gqa", Quantization("int4", 32, "int8"))]
MORE_MODELS = [("bloom-7-post", Quantization("int8", 32, "int4")), ("qwen2-gqa", Quantization("int8", 0, "none"))]
MORE_MODELS += [("mistral-window", None), ("llama-yarn", Quantization("int4", 32, "int4")), ("smollm3-tied", None)]
MORE_MODELS += [("llama-gqa-biased", None), ("phi3-partial", Quantization("int4", 32, "int8"))]
NOT_FUSED = ("bloom", "gemma", "granite", "lfm2", "ministral3", "olmo", "qwen35")  # these run operation by operation
MORE_MODELS += [("gemma3-untied", None), ("gemma3-tied", Quantization("int4", 32, "int8")), ("olmo2-gqa", None)]
MORE_MODELS += [("gemma4-tied", None), ("gemma4-e2b", None), ("gemma4-unified", Quantization("int4", 32, "int8"))]
MORE_MODELS += [("olmo3-yarn", Quantization("int8", 32, "int8")), ("granite-biased", None)]
MORE_MODELS += [("ministral3-gqa", None), ("qwen35-grouped", None), ("lfm2-tied", None)]


@pytest.fixture
def models(tiny, tmp_path):
    """(a tiny model with the kernels, the same model in plain torch)."""

    def get(name, quantization, dtype=F32):
        directory = tiny(name)[2]
        if quantization is not None:
            quantize_checkpoint(directory, tmp_path / "q", quantization)
            directory = tmp_path / "q"
        ours, plain = (load_model(directory, device=DEVICE, dtype=dtype, kernels="torch") for _ in range(2))
        install_kernels(ours, installer=kt.TritonInstaller(ours))
        assert (ours.backend.run_blocks is not None) == (not name.startswith(NOT_FUSED))
        assert not any(isinstance(module, QuantizedLinear) for module in ours.modules())
        return ours, plain

    return get


@pytest.mark.parametrize(
    "name, quantization", [*MODELS, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_MODELS)]
)
def test_the_same_tokens_as_plain_torch(models, name, quantization):
    """Prefill of more than 16 tokens per row, then decoding, for rows of different lengths."""
    ours, plain = models(name, quantization)
    prompts = random_prompts((17,) if quantization else (3, 17))
    with only_torch():
        expected = greedy(plain, prompts, 3, length=40)
    assert greedy(ours, prompts, 3, length=40) == expected
    if (name, quantization) not in MODELS:
        ours.backend = Backend()
        assert greedy(ours, prompts, 3, length=40) == expected


def test_verification_gives_the_bits_of_decoding(ordered_products, models):
    """The logits of two tokens in one pass, beside another row, equal those of the tokens one by one."""
    model, _ = models("mistral-gqa", Quantization("int4", 32, "int8"), BF16)
    tokens = torch.tensor(random_prompts((2, 2)), device=DEVICE)
    position = torch.arange(2, device=DEVICE).expand(2, 2)
    model.setup_caches(2, 40)
    together = model(tokens, position, all_logits=True)
    model.setup_caches(2, 90)
    row = torch.tensor([1], device=DEVICE)
    for t in range(2):
        alone = model(tokens[1:, t : t + 1], position[1:, t : t + 1], row)
        assert torch.equal(alone[0], together[1, t])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_equals_eager(models, backend):
    """One graph, which also writes the caches."""
    torch._dynamo.reset()
    model, _ = models(*MODELS[0])
    step = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    prompts = random_prompts((2,))
    assert greedy(model, prompts, 3, decode=step) == greedy(model, prompts, 3)


@needs_gpu
@pytest.mark.parametrize("name, quantization", MODELS + MORE_MODELS)
def test_graph_replays_at_changing_positions(models, name, quantization):
    """A captured step, replayed at other positions and lengths, also with ended rows, equals the eager step."""
    torch._dynamo.reset()
    model, _ = models(name, quantization, BF16)
    step, logits = torch.compile(model, fullgraph=True, mode="reduce-overhead"), []
    positions = [[0, 0, 0], [1, 1, -1], [2, 70, 1], [3, 71, -1], [150, 72, 2]]
    if name.startswith(("qwen35", "lfm2")):  # recurrent states cannot jump
        positions = [[0, 0, 0], [1, 1, -1], [2, 2, 1]]
    for run in (step, model):
        model.setup_caches(3, 200)
        generator = torch.Generator(DEVICE).manual_seed(0)
        for block in model.blocks:
            if not block.mixer.state.is_recurrent:
                block.mixer.state.k.normal_(generator=generator)
                block.mixer.state.v.normal_(generator=generator)
        logits.append([])
        for _ in range(2):  # the first round warms up and captures
            for at in positions:
                token = torch.tensor([[5], [6], [7]], device=DEVICE)
                position = torch.tensor(at, device=DEVICE)[:, None]
                logits[-1].append(run(token, position)[position[:, 0] >= 0].clone())
    for compiled, eager in zip(*logits):
        close(compiled, eager.float(), 0.03)  # Inductor keeps float32 where eager torch rounds to bfloat16


@needs_gpu
def test_models_on_a_gpu_have_the_kernels(tiny):
    load = partial(load_model, tiny("llama-mha")[2], device="cuda")
    assert load(kernels="auto").backend.run_blocks is kt.fused_blocks
    assert load(kernels="torch").backend.run_blocks is None


def test_models_on_a_cpu_do_not_need_triton(tiny):
    """Neither Triton nor its kernels are imported."""
    with mock.patch.dict(sys.modules, {"kernels_triton": None, "triton": None}):
        assert load_model(tiny("llama-mha")[2]).backend.run_blocks is not kt.fused_blocks


def test_a_format_without_kernels_is_unpacked_to_bfloat16(models, capsys):
    ours, plain = models("llama-mha", Quantization("iq4_nl", 32, "int8"), BF16)
    assert "no kernels for iq4_nl: unpacked" in capsys.readouterr().err
    assert type(ours.blocks[1].mlp.down) is Linear and isinstance(ours.embedding, kt.PackedEmbedding)
    assert torch.equal(ours.blocks[1].mlp.down.weight.cpu(), plain.blocks[1].mlp.down.weights().bfloat16().cpu())
    tokens, positions = torch.tensor(random_prompts((2, 2)), device=DEVICE), torch.arange(2, device=DEVICE)
    logits = []
    for model, context in ((ours, nullcontext()), (plain, only_torch())):
        model.setup_caches(2, 8)
        with context:
            logits.append(model(tokens, positions.expand(2, 2)))
    close(logits[0], logits[1].float(), 0.03)


# ---------------------------------------------------------------- ahead of time


SHARED_MEMORY = {"sm_80": 99 * 1024, "sm_90": 227 * 1024}  # what sm_80 compiles also runs on sm_86 and sm_89


def compile_all(*arguments):
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    spilling = [name for name, what in found.items() if what.get("spills")]
    assert not [name for name in spilling if name.split()[1] in ("linear", "delta", "expert")]
    shared = {name: what["shared"] for name, what in found.items() if "shared" in what}
    too_large = [name for name, size in shared.items() if size > SHARED_MEMORY[name.split()[0]]]
    assert set(too_large) <= {"sm_80 decode E 256 fp32"}
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers are there for Linux only")
def test_kernels_compile_ahead_of_time():
    found = compile_all()
    kernels = {name.split()[1] for name in found}
    named = {name.removesuffix("_kernel").split("_")[0] for name in vars(kt) if name.endswith("_kernel")}
    assert {name.split("_")[0] for name in kernels} == named
    assert {name.split()[0] for name in found} == {"sm_80", "sm_90"}


@pytest.mark.full
def test_every_configuration_compiles():
    found = compile_all("--all")
    assert {name.split()[0] for name in found} == {"sm_80", "sm_90", "gfx942"}
