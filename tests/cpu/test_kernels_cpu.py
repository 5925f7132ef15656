"""The C++ kernels: results against float32 arithmetic, equal bits for a row in every batch, and the build."""

import copy
import gc
import itertools
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases import attention_case, numbers, quantized
from conftest import ROOT, SKYLAKE, greedy, only_torch, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import printed_lines
from safetensors.torch import load_file, save_file

import cli
from checkpoint import Writer, empty_model
from cli import UserError
from config import Config
from cpu import build
from cpu.install import MAX_CONV_WIDTH, STATE_TENSORS, FusedBlocks
from cpu.layers import GROUP, LANES, PackedEmbedding, PackedLinear
from formats import FORMATS, Quantization, QuantizedEmbedding, QuantizedLinear, Scheme
from kernels import DELTA_WINDOW, KERNELS, MAX_DECODE_TOKENS, attention_reference
from layers import Embedding, Linear
from load import choose_installer, install_kernels, load_model
from mixers.recurrent import L2_EPS
from quantize import quantize_checkpoint
from sampling import Sampling, SamplingParams

if not build.load_kernels():
    pytest.skip("the kernels need AVX2 and a C++ compiler", allow_module_level=True)

ops = torch.ops.fastpath
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}  # tolerances
sizes = {"M": st.sampled_from([*range(1, 18), 45, 300]), "N": st.integers(1, 70), "K": st.integers(1, 150)}
threads = st.integers(1, 3)
OTHER = "EXPECTED_BITS" in os.environ  # this process runs in test_other_instruction_sets, as one with quick tests
takes_seconds = pytest.mark.quick if OTHER else pytest.mark.slow


def examples(n):
    """How many examples hypothesis tries: n; fewer where the same tests have run with the best instruction set."""
    return n // 3 if OTHER else n


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Fill new tensors with NaN, so that the tests notice elements that are not written."""
    before = torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before)


def fitting_size(format, groupsize, C):
    """A groupsize that the format has, near this one, for C columns."""
    sizes = FORMATS[format].groupsizes
    return (groupsize if groupsize < C else 0) if len(sizes) > 1 else sizes[0]


def unquantized(N, K, bias, seed=0, kind=Linear):
    """A layer of `kind` in bfloat16."""
    layer = Embedding(N, K) if kind is Embedding else Linear(K, N, bias)
    layer.weight.data = numbers(N, K, seed=seed, dtype=torch.bfloat16)
    if bias:
        layer.bias.data = numbers(N, seed=seed + 1, dtype=torch.bfloat16)
    return layer


needs_amx = pytest.mark.skipif(not build.allow_amx(), reason="needs a CPU and a compiler with AMX")


def close(found, expected, tolerance):
    assert found.dtype in DTYPES and found.shape == expected.shape
    assert (found.float() - expected).abs().max() <= tolerance * (expected.abs().max() + 1e-6)


def check_product(found, x, w, b, rounding=0.0):
    """rounding: what the activations lose in 8 bits."""
    bias = torch.zeros(len(w)) if b is None else b.float()
    error = (found.float() - F.linear(x.float(), w.float(), bias)).abs() - rounding
    size = x.float().abs() @ w.float().abs().T + bias.abs() + 6e-5  # float16 has steps of 6e-8 where it is smallest
    assert found.dtype == x.dtype and (error <= DTYPES[x.dtype] * size).all()


@settings(max_examples=examples(150), deadline=None)
@given(**sizes, dtype=st.sampled_from(list(DTYPES)), bias=st.booleans(), n=threads, offset=st.integers(0, 3))
@pytest.mark.slow
def test_linear(M, N, K, dtype, bias, n, offset):
    torch.set_num_threads(n)
    x, w = (numbers(*shape, seed=N, dtype=dtype, offset=offset) for shape in ((M, K), (N, K)))
    b = numbers(N, seed=K, dtype=dtype) if bias else None
    check_product(ops.linear(x, w, b), x, w, b)


@settings(max_examples=examples(250), deadline=None)
@given(
    **sizes, dtype=st.sampled_from(list(DTYPES)), format=st.sampled_from(list(FORMATS)), n=threads,
    groupsize=st.sampled_from([0, 32, 64, 128]), bias=st.booleans(), exact=st.booleans(), offset=st.integers(0, 3),
)  # fmt: skip
@pytest.mark.slow
def test_quantized_linear(M, N, K, dtype, format, n, groupsize, bias, exact, offset):
    torch.set_num_threads(n)
    layer, matrix = quantized(format, N, K, fitting_size(format, groupsize, K), bias, dtype, seed=N)
    x = numbers(M, K, seed=K, dtype=dtype, offset=offset)
    rounding = 0.0
    if not exact and dtype != torch.float32:  # half of 1/127 of the largest
        rounding = 1.01 * x.float().abs().amax(1, keepdim=True) * matrix.abs().sum(1) / 254
    check_product(PackedLinear(layer, exact)(x), x, matrix, layer.bias, rounding)


@needs_amx
@settings(max_examples=examples(150), deadline=None)
@given(sizes["M"], st.integers(1, 5), st.integers(1, 5), st.booleans(), threads, st.integers(0, 3))
def test_packed_bfloat16_linear(M, blocks, groups, bias, n, offset):
    torch.set_num_threads(n)
    N, K = 16 * blocks, 32 * groups
    layer, x = unquantized(N, K, bias, seed=N), numbers(M, K, seed=K, dtype=torch.bfloat16, offset=offset)
    w = layer.weight.clone()  # packing takes the weight away
    check_product(PackedLinear(layer, False)(x), x, w, layer.bias)


@settings(max_examples=examples(60), deadline=None)
@given(M=sizes["M"], D=st.integers(1, 2100), dtype=st.sampled_from(list(DTYPES)), n=threads, offset=st.integers(0, 3))
def test_norms(M, D, dtype, n, offset):
    torch.set_num_threads(n)
    x = numbers(M, D, seed=D, dtype=dtype, offset=offset) * 3 + 1
    w, b = (numbers(D, seed=i, dtype=dtype, offset=offset) for i in range(2))
    expected = F.rms_norm(x.float(), (D,), w.float(), 1e-5)
    close(ops.rms_norm(x, w, 1e-5), expected, DTYPES[dtype])
    expected = F.layer_norm(x.float(), (D,), w.float(), b.float(), 1e-5)
    close(ops.layer_norm(x, w, b, 1e-5), expected, 5 * DTYPES[dtype])  # subtraction of nearly equal numbers


def every_operation(C, N, dtype):
    """name -> each operation as a function of x (M,C)."""
    w, b, norm, shift = (numbers(*s, seed=i, dtype=dtype) for i, s in enumerate([(N, C), (N,), (C,), (C,)]))
    found = {
        "linear": lambda x: ops.linear(x, w, b),
        "rms_norm": lambda x: ops.rms_norm(x, norm, 1e-5),
        "layer_norm": lambda x: ops.layer_norm(x, norm, shift, 1e-5),
    }
    for format in FORMATS:
        for exact in (False, True) if format in ("int8", "int4") else (False,):
            found[f"{format} {exact}"] = PackedLinear(quantized(format, N, C, 32, True, dtype)[0], exact)
    if dtype == torch.bfloat16 and build.allow_amx() and N % 16 == C % 32 == 0:
        found["packed"] = PackedLinear(unquantized(N, C, True), False)
    return found


SIZES = [(45, 37), (1056, 528), (2048, 530), (96, 48)][: 2 if OTHER else 4]  # K and N


@takes_seconds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, N", SIZES)
def test_a_row_has_the_same_bits_in_every_batch(dtype, K, N):
    """Alone, at any position among any number of rows, and with any number of threads."""
    x = numbers(39, K, dtype=dtype)
    for name, operation in every_operation(K, N, dtype).items():
        torch.set_num_threads(1)
        alone = torch.cat([operation(row[None]) for row in x])
        for n in (1, 3) if K > 1000 or OTHER else (1, 2, 3):
            torch.set_num_threads(n)
            for rows in (slice(0, 39), slice(3, 5), slice(1, 8), slice(0, 16), slice(5, 22)):
                assert torch.equal(operation(x[rows]), alone[rows]), f"{name}, {n} threads, {rows}"
            batch = x[:21].view(7, 3, K)
            assert torch.equal(operation(batch).flatten(0, 1), alone[:21]), name


def with_and_without_amx(function) -> list:
    try:
        return [function() for allowed in (True, False) if ops.allow_amx(allowed) == allowed]
    finally:
        ops.allow_amx(True)


@needs_amx
@settings(max_examples=examples(250), deadline=None)
@given(
    M=st.sampled_from([*range(1, 18), 37, 257, 300]), N=sizes["N"], K=st.integers(1, 600), n=threads,
    format=st.sampled_from(list(FORMATS)), groupsize=st.sampled_from([0, 32, 64, 128]), bias=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_quantized_products_have_the_same_bits_with_amx(M, N, K, n, format, groupsize, bias, dtype):
    torch.set_num_threads(n)
    layer, _ = quantized(format, N, K, fitting_size(format, groupsize, K), bias, dtype, seed=N)
    packed, x = PackedLinear(layer, False), numbers(M, K, seed=K, dtype=dtype)
    one, other = with_and_without_amx(lambda: packed(x))
    assert torch.equal(one, other)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(dtype, value):
    for K, N in ((70, 21), (96, 48)):
        x = numbers(9, K, dtype=dtype)
        broken = x.clone()
        broken[4, 69] = value
        for name, operation in every_operation(K, N, dtype).items():
            found, expected = operation(broken), operation(x)
            assert not found[4].isfinite().all(), name
            keep = [0, 1, 2, 3, 5, 6, 7, 8]
            assert torch.equal(found[keep], expected[keep]), name


def test_rows_of_extreme_size():
    """Zeros, and numbers so small that 1 / scale would overflow."""
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-38), torch.full((64,), 3e38)]).bfloat16()
    layer, matrix = quantized("int8", 19, 64, 32, False, torch.bfloat16)
    layer.scales *= 1e-3
    found = PackedLinear(layer, False)(x).float()
    assert not found[0].any() and found[1].abs().max() < 1e-35 and found[2].isfinite().all()
    assert torch.allclose(found[2], (x[2].float() / 1e3) @ matrix.T, rtol=0.05, atol=1e33)


def test_levels_that_only_other_programs_write():
    """GGUF files may contain -128 and negative scales."""
    layer = QuantizedLinear(32, 3, False, Scheme("int8", 32))
    layer.weight.copy_(torch.tensor([[-128] * 32, [127] * 32, [-128, 127] * 16]))
    layer.scales.copy_(torch.tensor([[-1.0], [0.5], [2.0]]))
    x = torch.full((1, 32), 2.0)
    for exact in (True, False):
        found = PackedLinear(layer, exact)(x.bfloat16()).float()
        assert torch.allclose(found, torch.tensor([[8192.0, 4064.0, -64.0]]), rtol=0.01)


def test_cpp_and_python_have_the_same_numbers():
    """Those that stand in both, because neither can read them from the other."""
    text = "".join(path.read_text() for path in sorted((ROOT / "cpu").glob("*.h")))
    numbers = {name: int(value) for name, value in re.findall(r"^constexpr int(?:64_t)? (\w+) = (\d+);", text, re.M)}
    ours = {"LANES": LANES, "GROUP": GROUP, "MAX_DECODE_TOKENS": MAX_DECODE_TOKENS}
    ours |= {"DELTA_WINDOW": DELTA_WINDOW, "MAX_CONV_WIDTH": MAX_CONV_WIDTH}
    assert ours.items() <= numbers.items()
    assert re.search(r"L2_EPS = (\S+)f;", text)[1] == str(L2_EPS).replace("e-0", "e-")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("N, K, groupsize", [(33, 45, 32), (16, 64, 0), (50, 129, 64)])
def test_lookup_in_packed_tables(format, N, K, groupsize):
    groupsize = groupsize if groupsize in FORMATS[format].groupsizes else 32
    plain = QuantizedEmbedding(K, N, False, Scheme(format, groupsize))
    plain.load_state_dict(quantized(format, N, K, groupsize, False, torch.float32)[0].parts())
    table = PackedEmbedding(plain, True)
    tokens = torch.randint(0, N, (2, 7))
    assert torch.equal(table(tokens), plain(tokens))
    x = numbers(2, 3, K)
    assert torch.allclose(table.logits(x), plain.logits(x), atol=1e-4)


@needs_amx
@pytest.mark.parametrize("N, K", [(48, 96), (16, 64)])
def test_lookup_in_packed_bfloat16_tables(N, K):
    plain = unquantized(N, K, False, kind=Embedding)
    x, tokens = numbers(2, 3, K).bfloat16(), torch.randint(0, N, (2, 7))
    rows, logits = plain(tokens), plain.logits(x).float()
    table = PackedEmbedding(plain, False)  # uses the memory of `plain`
    assert torch.equal(table(tokens), rows)
    close(table.logits(x), logits, DTYPES[x.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    x, w, b = numbers(3, 40, dtype=dtype), numbers(21, 40, dtype=dtype), numbers(21, dtype=dtype)
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(ops.linear, (x, w, b))
    torch.library.opcheck(ops.linear, (numbers(2, 17, 40, dtype=dtype), w, None))
    torch.library.opcheck(ops.rms_norm, (x, w[0], 1e-5))
    torch.library.opcheck(ops.layer_norm, (x, w[0], w[1], 1e-5))
    for format in FORMATS:
        packed = PackedLinear(quantized(format, 21, 40, 32, False, dtype)[0], False)
        torch.library.opcheck(ops.linear_packed, (x, packed.prepared.handle, 21))
    if dtype == torch.bfloat16 and build.allow_amx():
        packed = PackedLinear(unquantized(48, 64, True), False)
        torch.library.opcheck(ops.linear_packed, (numbers(3, 64, dtype=dtype), packed.prepared.handle, 48))
    torch.library.opcheck(ops.attention, attention_case(0, dtype, 2, 3, 1, 2, 16, 20, None, True, True, True))


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa-biased",
        "ministral3-gqa",
        "gemma4-tied",
        "gemma4-inputs",
        "gemma4-moe-5",
        "qwen35-grouped",
        "lfm2-tied",
        "qwen35-moe-5",
    ],
)
@pytest.mark.slow
def test_opcheck_of_blocks(tiny, name):
    model = load_model(tiny(name)[2], dtype=torch.float32)
    model.setup_caches(2, 8)
    input_pos = torch.tensor([[0, 1], [0, -1]])
    cos, sin = zip(*model.positions.ropes(input_pos))
    tables = (list(cos), list(sin), None, model.positions.query_scales)
    states = [block.mixer.state for block in model.blocks]
    recurrent = [state for state in states if state.is_recurrent]
    kept = [state for state in states if not state.is_recurrent]
    caches = [[cache.k for cache in kept], [cache.v for cache in kept]]
    for tensor in STATE_TENSORS:
        caches.append([getattr(state, tensor) for state in recurrent if hasattr(state, tensor)])
    caches.append([layer.counts for block in model.blocks for layer in block.sparse])
    x = numbers(2, 2, model.config.dim)
    torch.use_deterministic_algorithms(False)
    own = None
    if model.layer_inputs is not None:
        own = model.layer_inputs(torch.tensor([[3, 4], [5, 0]]), x)
    torch.library.opcheck(ops.blocks, (x, input_pos, None, *tables, *caches, own, model.backend.run_blocks.handles))
    for counts in caches[-1][:1]:
        experts = next(layer for block in model.blocks for layer in block.sparse)
        torch.library.opcheck(ops.sparse_mlp, (x, input_pos, counts, experts.run.handle))


def test_shapes_that_do_not_fit_are_refused():
    x, w = numbers(2, 40), numbers(3, 40)
    p = PackedLinear(quantized("int4", 21, 40, 32, False, torch.float32)[0], True)
    parts = [torch.zeros(21, 20, dtype=torch.uint8), *(torch.zeros(21, 2, dtype=torch.float16) for _ in range(2))]
    block, to = [torch.zeros(21, 21, dtype=torch.uint8)], torch.empty(2176, dtype=torch.uint8)
    for operation, arguments, said in (
        (ops.linear, (x, numbers(3, 41), None), r"weight: expected \[3, 40\] in Float.*; got \[3, 41\]"),
        (ops.linear, (x, w, numbers(4)), r"bias: expected \[3\] .* got \[4\]"),
        (ops.prepare_layer, ("int4", p.weight, None, 40, 40, 32, True), r"expected \[1920\] .* got \[1280\]"),
        (ops.prepare_layer, ("int3", p.weight, None, 21, 40, 32, True), "there are no kernels for the format int3"),
        (ops.pack_layer, ("int4", parts, 40, 32, p.weight[1:]), r"packed weight: expected \[1280\] .* got \[1279\]"),
        (ops.pack_layer, ("int8", parts, 40, 32, to), "int8 has 2 parts, not 3"),
        (ops.pack_layer, ("q4_0", block, 40, 32, to[:1152]), "q4_0: 21 bytes for 40 columns"),
        (ops.linear_packed, (x[:, :39], p.prepared.handle, 21), "a layer of 21 outputs and 40 inputs, not 21 and 39"),
        (ops.linear_packed, (x, 10**6, 21), "there is no handle 1000000"),
    ):
        with pytest.raises(RuntimeError, match=said):
            operation(*arguments)


# ---------------------------------------------------------------- attention


@takes_seconds
@settings(max_examples=examples(250), deadline=None)
@given(
    seed=st.integers(0, 2**31), dtype=st.sampled_from(list(DTYPES)), B=st.integers(1, 3), K=st.integers(1, 3),
    S=st.sampled_from([1, 2, 5, 16, 17, 40, 75]), group=st.sampled_from([1, 3, 4, 8]), n=threads,
    E=st.sampled_from([10, 16, 31, 64, 80, 128, 512]), T=st.sampled_from([1, 5, 17, 64, 130, 300]),
    window=st.sampled_from([None, 1, 7, 64, 140]), slopes=st.booleans(), rows=st.booleans(), ragged=st.booleans(),
)  # fmt: skip
def test_attention(seed, dtype, B, S, K, group, E, T, window, slopes, rows, ragged, n):
    torch.set_num_threads(n)
    q, k_cache, v_cache, *places = attention_case(seed, dtype, B, S, K, group, E, T, window, slopes, rows, ragged)
    found = ops.attention(q, k_cache, v_cache, *places)
    tolerance = DTYPES[dtype] + slopes * T * 1e-7  # the reference adds biases of up to T to scores in float32
    close(found, attention_reference(q.float(), k_cache.float(), v_cache.float(), *places), tolerance)


@pytest.mark.parametrize("window, slopes", [(None, False), (150, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_token_has_the_same_bits_in_every_batch(dtype, window, slopes):
    """Among few or many tokens of its row, in any row of a batch, and with any number of threads."""
    case = attention_case(3, dtype, 3, 45, 2, 3, 80, 330, window, slopes, False, False)
    q, k_cache, v_cache, input_pos, _, bias, _, scale = case
    together = ops.attention(*case)
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        assert torch.equal(ops.attention(*case), together)
        for b in range(3):
            for tokens in (slice(0, 1), slice(44, 45), slice(7, 23), slice(3, 45)):
                rows = torch.tensor([b])
                part = q[b : b + 1, tokens], k_cache, v_cache, input_pos[b : b + 1, tokens], rows, bias, window
                assert torch.equal(ops.attention(*part, scale), together[b : b + 1, tokens])


@pytest.mark.parametrize("window, slopes", [(None, False), (30, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, S", [(1, 5), (30, 5), (2, 45)])
def test_what_is_not_finite_reaches_only_tokens_that_see_it(dtype, window, slopes, B, S):
    """The others have the same bits as with any number in its place: queries that share chunks, and tiles."""
    case = attention_case(5, dtype, B, S, 2, 3, 80, 140, window, slopes, False, False)
    q, k_cache, v_cache, input_pos = case[:4]
    clean = ops.attention(*case)
    for b, cache in zip(range(B), itertools.cycle([v_cache, k_cache])):
        cache[b, :, input_pos[b, 3]] = float("nan")
    found = ops.attention(*case)
    assert torch.equal(found[:, :3], clean[:, :3])
    sees = input_pos[:, 3:] - input_pos[:, 3:4] < (window or S)
    assert torch.equal(found[:, 3:].isnan().all(3).all(2), sees)
    assert torch.equal(found[:, 3:][~sees], clean[:, 3:][~sees])


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**31), S=st.integers(2, 20), K=st.integers(1, 2), group=st.sampled_from([1, 2, 3, 5, 8]),
    E=st.sampled_from([10, 16, 31, 48, 64, 80, 128]), T=st.sampled_from([21, 64, 97, 200]), slopes=st.booleans(),
    window=st.sampled_from([None, 3, 70]), exponents=st.sampled_from([(0, 0, 0), (4, 0, -90), (125, -128, 0)]),
)  # fmt: skip
def test_few_queries_get_the_same_bits_as_many(seed, S, K, group, E, T, slopes, window, exponents):
    """Other instructions may compute them. With a factor of 2^-128, most numbers are denormal."""
    case = attention_case(seed, torch.bfloat16, 1, S, K, group, E, T, window, slopes, False, False)
    check_bits_of_few_queries(*(x * 2.0**exponent for x, exponent in zip(case, exponents)), *case[3:])


@pytest.mark.parametrize("E, T", [(64, 200), (48, 97), (31, 64), (128, 130)])
def test_few_queries_get_the_same_bits_as_many_where_sums_cancel(E, T):
    """Such sums have few correct bits, so the other bits tell the order of the additions."""
    q, k_cache, v_cache, *rest = attention_case(0, torch.bfloat16, 1, 19, 2, 3, E, T, None, False, False, False)
    q, half = (q[..., :1] * 2.0**10).expand_as(q).contiguous(), E // 2
    k_cache[..., E - half :] = -k_cache[..., :half].flip(-1)
    k_cache[..., half : E - half] = 0
    check_bits_of_few_queries(q, k_cache * 2.0**10, v_cache, *rest)
    # All weights are 1, and of each 64 slots the second 32 have large values that cancel.
    v_cache[:, :, 1::2] = -v_cache[:, :, ::2][:, :, : v_cache[:, :, 1::2].shape[2]]
    small = torch.arange(v_cache.shape[2]) % 64 < 32
    v_cache[:, :, small] = numbers(*v_cache[:, :, small].shape).bfloat16() * 2.0**-10
    check_bits_of_few_queries(torch.zeros_like(q), k_cache, v_cache, *rest)


def check_bits_of_few_queries(q, k_cache, v_cache, input_pos, *rest):
    together = ops.attention(q, k_cache, v_cache, input_pos, *rest)
    assert together.isfinite().all()
    for n in (1, 2):
        parts = [ops.attention(x, k_cache, v_cache, at, *rest) for x, at in zip(q.split(n, 1), input_pos.split(n, 1))]
        assert torch.equal(torch.cat(parts, 1), together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window, start, T", [(None, 8000, 8100), (16, 0, 8200), (100, 8000, 8200), (16, 8000, 8200)])
def test_queries_that_see_nothing_beside_others_that_do(dtype, window, start, T):
    """A row has 4 tokens and 12 of padding, so whole tiles of queries see none of the slots that the row sees."""
    torch.set_num_threads(1)
    q, cache = numbers(1, 16, 8, 16).to(dtype), numbers(2, 1, 1, T, 16, seed=1).to(dtype)
    input_pos = torch.full((1, 16), -1)
    input_pos[:, :4] = torch.arange(start, start + 4)
    found = ops.attention(q, *cache, input_pos, None, None, window, 0.25)
    alone = ops.attention(q[:, :4].contiguous(), *cache, input_pos[:, :4].contiguous(), None, None, window, 0.25)
    assert torch.equal(found[:, :4], alone) and (found[:, 4:] == 0).all()


def test_attention_refuses_what_lies_outside_the_cache():
    case = attention_case(0, torch.float32, 2, 3, 1, 2, 16, 20, None, False, False, False)
    q, k, v, at, *rest = case
    for k_cache, v_cache, input_pos, rows, said in (
        (k, v, torch.where(at == at[1, 2], 28, at), None, "position 28 of 28"),
        (k, v, torch.where(at == at[1, 2], -2, at), None, "position -2 of 28"),
        (k, v, at, torch.tensor([0, 3]), "row 3 of 3"),
        (k[:1], v[:1], at, None, "a cache of .* for 2 rows"),
        (k, v[:, :, 1:], at, None, "v_cache: expected"),
    ):
        with pytest.raises(RuntimeError, match=said):
            ops.attention(q, k_cache, v_cache, input_pos, rows, *rest[1:])


# ---------------------------------------------------------------- in models

MODELS = [("llama-gqa-biased", None), ("bloom-5", None), ("qwen3-gqa", Quantization("int4", 32, "int8"))]
MODELS += [("mistral-gqa", Quantization("iq4_nl", 32, "iq4_nl"))]
MODELS += [("bloom-7-post", Quantization("int8", 32, "int4")), ("qwen2-gqa", Quantization("int8", 0, "none"))]
MODELS += [("gemma4-untied", None), ("gemma4-tied", None), ("gemma4-inputs", None)]
MODELS += [("gemma4-e4b", Quantization("int8", 0, "int8"))]
# Models in which rounding grows from block to block.
BLOCKWISE = [("gemma4-moe-5", None), ("gemma4-moe-8", None), ("gemma4-moe-5", Quantization("int4", 32, "int8"))]
BLOCKWISE += [("gemma4-e2b", None)]


def write_aligned(directory: Path, tied: bool):
    """Write a random model whose sizes are multiples of what packed bfloat16 weights need; returns the directory."""
    config = Config(
        n_layer=3, n_head=4, n_kv_head=2, head_dim=24, dim=96, hidden_dim=160, vocab_size=272, max_seq_length=64,
        tied_embeddings=tied, qkv_bias=tied, qk_norm=not tied,
    )  # fmt: skip
    with Writer(directory) as writer:
        for i, (name, weight) in enumerate(empty_model(config).state_dict().items()):
            values = numbers(*weight.shape, seed=i, dtype=torch.bfloat16)
            writer.add(name, values * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1 + values / 4)
        writer.add_config(config)
    return directory


@pytest.fixture
def checkpoint(tiny, tmp_path):
    def get(name, quantization):
        if name.startswith("aligned"):
            return write_aligned(tmp_path / name, name == "aligned-tied")
        if quantization is not None:
            quantize_checkpoint(tiny(name)[2], tmp_path / "q", quantization)
        return tiny(name)[2] if quantization is None else tmp_path / "q"

    return get


def plain_tokens(directory, prompts, n):
    """The greedy tokens by PyTorch's operations only."""
    with only_torch():
        return greedy(load_model(directory, dtype=torch.float32, kernels="torch"), prompts, n)


@pytest.mark.parametrize("name, quantization", MODELS + BLOCKWISE)
def test_the_same_tokens_as_plain_torch(checkpoint, name, quantization):
    directory, prompts = checkpoint(name, quantization), random_prompts((3, 40, 17))
    model = load_model(directory, dtype=torch.float32)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    all_packed = quantization is not None and quantization.head != "none"
    assert len(model.backend.run_blocks.handles) > 0 and model.backend.chunk_invariant == all_packed
    assert greedy(model, prompts, 24) == plain_tokens(directory, prompts, 24)


INVARIANT = [("qwen3-gqa", Quantization("int8", 32, "int4")), ("qwen3-gqa", Quantization("int4", 32, "int8"))]
INVARIANT += [("gemma4-unified", Quantization("int8", 0, "int8")), ("gemma4-e2b", Quantization("int4", 0, "int8"))]
INVARIANT += [("gemma4-moe-5", Quantization("int4", 0, "int8"))]
INVARIANT += [pytest.param(name, None, marks=needs_amx) for name in ("aligned-tied", "aligned-untied")]


@needs_amx
@pytest.mark.parametrize("name", ["aligned-tied", "aligned-untied"])
@pytest.mark.parametrize("S", [1, 16, 61])
def test_packed_bfloat16_models_are_close_to_plain_torch(checkpoint, name, S):
    """Other models' matrices, whose sizes are not multiples of 16 and 32, would grow, and are not packed."""
    other = load_model(checkpoint("qwen3-gqa", None))
    assert not any(isinstance(layer, PackedLinear) for layer in other.modules())
    directory, found = checkpoint(name, None), []
    for kernels in ("auto", "torch"):
        model = load_model(directory, kernels=kernels)
        model.setup_caches(2, 64)
        tokens = torch.tensor(random_prompts((S, S), V=272))
        found.append(model(tokens, torch.arange(S).expand(2, S).contiguous(), all_logits=True))
        is_packed = [isinstance(layer, PackedLinear) for layer in model.modules()]
        assert sum(is_packed) == (13 if kernels == "auto" else 0)
    close(found[0], found[1].float(), 0.03)


@pytest.mark.parametrize("name, quantization", INVARIANT)
def test_chunk_invariant_models_are_chunk_invariant(checkpoint, name, quantization):
    """In bfloat16, the bits of logits, keys and values do not depend on the chunks in which the row was read."""
    model, tokens = load_model(checkpoint(name, quantization)), torch.tensor(random_prompts((45,)))
    assert model.backend.chunk_invariant
    found = []
    for cuts in ((0, 45), (0, 1, 3, 20, 45), (0, 44, 45)):
        model.setup_caches(1, 45)
        parts = [model(tokens[:, a:b], torch.arange(a, b)[None], all_logits=True) for a, b in zip(cuts, cuts[1:])]
        caches = [cache for block in model.blocks for cache in (block.attention.cache.k, block.attention.cache.v)]
        found.append([torch.cat(parts, 1), *(cache[:, :, :45] for cache in caches)])
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, quantization", [*MODELS, ("mistral-window", None), ("aligned-untied", None)])
def test_fused_blocks_equal_single_blocks(checkpoint, name, quantization, dtype):
    """Two passes over rows of different lengths, one of which has ended before the second pass."""
    model = load_model(checkpoint(name, quantization), dtype=dtype)
    x, rows = numbers(3, 5, model.config.dim, dtype=dtype), torch.tensor([2, 0, 3])
    found = []

    own = None
    if model.layer_inputs is not None:
        own = model.layer_inputs(torch.tensor(random_prompts((5,) * 3)), x)

    def single(blocks, x, ropes, input_pos, rows, own):
        for i, block in enumerate(blocks):
            x = block(x, ropes[block.rope_table], input_pos, rows, None if own is None else own[:, :, i])
        return x

    for run in (model.backend.run_blocks, single):
        model.setup_caches(4, 40)
        found.append([])
        first, then = [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1], [-1] * 5], [[5, 6, -1, -1, -1], [-1] * 5, [0, 1, 2, 3, 4]]
        for positions in (first, then):
            input_pos = torch.tensor(positions)
            ropes = model.positions.ropes(input_pos)
            y = run(model.blocks, x, ropes, input_pos, rows, own)
            found[-1] += [y[input_pos >= 0], *(block.attention.cache.k[:, :, :40].clone() for block in model.blocks)]
    for one, other in zip(*found):
        close(one, other.float(), 1e-5 if dtype == torch.float32 else 0.05)
        assert one[one != 0].numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, quantization", BLOCKWISE)
def test_a_fused_block_equals_a_single_one(checkpoint, name, quantization, dtype):
    """With the same inputs for each block: where rounding changes them, a token may choose other experts."""
    model = load_model(checkpoint(name, quantization), dtype=dtype)
    model.setup_caches(8, 40)
    x, rows = numbers(8, 5, model.config.dim, dtype=dtype), torch.arange(8)
    input_pos = torch.arange(5).repeat(8, 1)
    input_pos[3, 2:] = -1
    ropes = model.positions.ropes(input_pos)
    own = None
    if model.layer_inputs is not None:
        own = model.layer_inputs(torch.tensor(random_prompts((5,) * 8)), x)  # (8,5,layers,P)
    for i, block in enumerate(model.blocks):
        own_input = None if own is None else own[:, :, i]
        own_inputs = None if own is None else own[:, :, i : i + 1].contiguous()
        fused = FusedBlocks([block], dtype)([block], x, ropes, input_pos, rows, own_inputs)
        counts = [layer.counts.clone() for layer in block.sparse]
        single = block(x, ropes[block.rope_table], input_pos, rows, own_input)
        for layer, count in zip(block.sparse, counts):
            assert torch.equal(layer.counts, 2 * count)
        close(fused[input_pos >= 0], single[input_pos >= 0].float(), 1e-5 if dtype == torch.float32 else 0.05)


def test_blocks_of_another_model_are_refused(tiny):
    model = load_model(tiny("llama-gqa-biased")[2], dtype=torch.float32)
    model.setup_caches(1, 8)
    x, at = torch.zeros(1, 1, model.config.dim), torch.tensor([[0]])
    with pytest.raises(RuntimeError, match="has D .* not x"):
        model.backend.run_blocks(model.blocks, x[..., 1:], model.positions.ropes(at), at, None)
    handles, model.backend.run_blocks.handles = model.backend.run_blocks.handles, [10**6] * len(model.blocks)
    with pytest.raises(RuntimeError, match="there is no handle 1000000"):
        model.backend.run_blocks(model.blocks, x, model.positions.ropes(at), at, None)
    model.backend.run_blocks.handles = handles
    weight = weakref.ref(model.blocks[0].attention.qkv.weight)
    del model
    gc.collect()
    assert weight() is None, "the kernels hold what nobody else does"


@pytest.mark.slow
def test_compiled_equals_eager(checkpoint):
    """A quantized model. (tests/test_model.py compiles models with plain weights.)"""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    model = load_model(checkpoint(*MODELS[2]), dtype=torch.float32)
    prefill, decode = (torch.compile(lambda *x: model(*x), fullgraph=True, dynamic=each) for each in (True, False))
    prompts = random_prompts((3, 40, 18))
    assert greedy(model, prompts, 20, prefill, decode) == greedy(model, prompts, 20)


# ---------------------------------------------------------------- instruction sets


def products_of_integers() -> dict[str, torch.Tensor]:
    """Products of weights in every format with activations in 8 bits, for decode and for prefill."""
    found = {}
    for format, (N, K, groupsize) in itertools.product(FORMATS, [(37, 45, 32), (50, 320, 64), (33, 96, 0)]):
        layer = quantized(format, N, K, fitting_size(format, groupsize, K), True, torch.bfloat16, seed=N)[0]
        packed = PackedLinear(layer, False)
        for M in (1, 3, 16, 61):
            found[f"{format} {N} {K} {M}"] = packed(numbers(M, K, seed=M, dtype=torch.bfloat16))
    return found


def samples() -> dict[str, torch.Tensor]:
    """Tokens, log-probabilities and distributions of rows with every setting."""
    rows = Sampling.make(5, 777)
    choices = [
        {"temperature": 0}, {}, {"top_k": 40, "temperature": 0.8}, {"top_p": 0.9, "min_p": 0.01},
        {"top_k": 300, "top_p": 0.99, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    ]  # fmt: skip
    for row, choice in enumerate(choices):
        rows.set_row(row, SamplingParams(seed=row, **choice), [3, 1, 4, 1, 5])
    where = torch.arange(5), torch.arange(5) + 7, torch.full((5, 1), 9)
    arguments = numbers(5, 2, 777, seed=3, dtype=torch.bfloat16) * 3, *where, *rows
    names = ("ids", "logprobs", "probabilities")
    return dict(zip(names, (*ops.sample(*arguments), ops.probabilities(*arguments))))


@pytest.mark.skipif(not OTHER, reason="runs in test_other_instruction_sets")
def test_bits_are_those_of_the_best_instruction_set():
    expected = load_file(os.environ["EXPECTED_BITS"])
    found = products_of_integers() | samples()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", [
    "avx2", *(pytest.param(name, marks=pytest.mark.full) for name in ("avx2-vnni", "avx512-skylake"))
])  # fmt: skip
@pytest.mark.slow
@pytest.mark.skipif(OTHER, reason="this process tests another instruction set already")
def test_other_instruction_sets(tmp_path, python, name):
    """The tests of this file, of experts and of sampling once more, in a process with other kernels."""
    save_file(products_of_integers() | samples(), tmp_path / "expected.safetensors")
    options = ["-x", "-p", "no:cacheprovider", "--kernels", name, "-m", "quick", "-k", "not opcheck and not reference"]
    files = [__file__, *(str(ROOT / "tests" / name) for name in ("mixers/test_experts.py", "test_sampling.py"))]
    command = [*python, "-m", "pytest", *options, *files]
    environment = os.environ | {"EXPECTED_BITS": str(tmp_path / "expected.safetensors")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


def instructions_of(library: Path) -> list[tuple[str, str]]:
    """(bytes in hexadecimal, text) of all instructions of a library."""
    lines = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^ *[0-9a-f]+:\t((?:[0-9a-f]{2} )+) *\t(.*)$", lines, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump, which comes with GCC")
@pytest.mark.parametrize("instructions", [
    build.AVX2, *(pytest.param(one, marks=pytest.mark.full) for one in (build.AVX2_VNNI, SKYLAKE))
], ids=lambda one: one.name)  # fmt: skip
def test_no_instruction_that_the_instruction_set_lacks(instructions):
    """All instructions of AVX-512 begin with the byte 62, and only AVX-VNNI has vpdpbusd without it."""
    library = build.build_library(build.find_compiler(), instructions)
    found = instructions_of(library)
    has_avx512 = any("zmm" in text or code.startswith("62 ") for code, text in found)
    assert len(found) > 10_000 and has_avx512 == (instructions is SKYLAKE)
    assert any("vpdpbusd" in text for _, text in found) == ("avx_vnni" in instructions.needs)
    assert any("vpmaddubsw" in text for _, text in found) != ("avx_vnni" in instructions.needs)
    assert not any("dpbf16ps" in text for _, text in found)


@pytest.mark.parametrize("processor, chosen", [
    ("avx2 fma f16c bmi2 avx512f", "avx2"), ("avx2 fma f16c bmi2 avx_vnni", "avx2-vnni"),
    ("avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl", "avx512"),  # Skylake-X: without VNNI and BF16
    ("avx fma", "the CPU kernels need AVX2, and this processor lacks avx2, bmi2, f16c"),
])  # fmt: skip
def test_which_instruction_set_is_chosen(monkeypatch, processor, chosen):
    monkeypatch.setattr(build, "processor_flags", lambda: frozenset(processor.split()))
    monkeypatch.setattr(build, "INSTRUCTION_SETS", [build.AVX512, build.AVX2_VNNI, build.AVX2])
    if "need" in chosen:
        with pytest.raises(UserError, match=chosen):
            build.choose_instruction_set("auto")
    else:
        assert build.choose_instruction_set("auto").name == chosen
        assert build.choose_instruction_set("avx2").name == chosen.replace("avx512", "avx2")


def test_other_systems_get_one_line(monkeypatch, capsys):
    for machine, system in (("aarch64", "linux"), ("AMD64", "win32")):
        monkeypatch.setattr(build.platform, "machine", lambda: machine)  # noqa: B023
        monkeypatch.setattr(build.sys, "platform", system)
        assert build.try_to_load.__wrapped__("auto") is False
        (line,) = capsys.readouterr().err.splitlines()
        assert f"not for {machine} under {system}" in line and "PyTorch's own operations run instead" in line


def test_a_process_has_one_set_of_kernels():
    loaded = build.LOADED[0].name
    assert build.load_kernels(loaded) and build.load_kernels()
    other = "avx512" if loaded.startswith("avx2") else "avx2"
    with pytest.raises(UserError, match=f"--kernels {other}: this process has loaded those for {loaded}"):
        build.load_kernels(other)


# ---------------------------------------------------------------- the build

SAY = "import torch; from cpu import build; print(build.load_kernels()); print(torch.ops.fastpath.linear)"
# Writes what a compiler has written before, a little later, so that processes must wait for each other.
SLOW_COPY = """#!/bin/sh
[ "$1" != --version ] || exit 0
while [ "$1" != -o ]; do [ "$1" != -shared ] || library={}; shift; done
sleep 0.5
cp "${{library:-/dev/null}}" "$2"
"""


def start(cache: Path, code: str = SAY, **environment):
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, **pipes)


@pytest.mark.slow
def test_processes_that_start_together_build_once(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(SLOW_COPY.format(build.build_library(os.environ.get("CXX") or "g++", build.LOADED[0])))
    compiler.chmod(0o755)
    processes = [start(tmp_path, CXX=str(compiler)) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in processes]
    assert all(out.startswith("True\n") for out, _ in said), said
    assert sum("building the CPU kernels:" in err for _, err in said) == 1
    assert len(list((tmp_path / "fastpath").glob("*.so"))) == 1
    out, err = start(tmp_path, CXX=str(compiler)).communicate(timeout=300)
    assert out.startswith("True\n") and not printed_lines(err), "the next start builds nothing"


def fake_compiler(path: Path, *lines: bytes) -> str:
    """A compiler that runs these lines of shell, and otherwise writes an empty file. Returns its path."""
    write = b'while [ "$1" != -o ] && [ $# -gt 1 ]; do shift; done; [ "$1" != -o ] || echo > "$2"'
    path.write_bytes(b"\n".join([b"#!/bin/sh", *lines, write, b""]))
    path.chmod(0o755)
    return str(path)


def test_what_a_compiler_prints_may_be_no_utf8(tmp_path, monkeypatch, capsys):
    """The references run, and one line says why, also where messages are translated or there are none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LC_ALL", "de_DE.ISO-8859-1")
    for line, why in (
        (b"[ $LC_ALL = C ] && printf 'caf\\351: error' >&2 || echo 'Fehler' >&2; exit 1", "caf\ufffd: error"),
        (b"printf '\\376\\377' >&2; exit 1", "the compiler failed"),
    ):
        monkeypatch.setenv("CXX", fake_compiler(tmp_path / "compiler", line))
        assert build.try_to_load.__wrapped__("auto") is False
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"(GCC 11 or clang 14 can): {why}; PyTorch's own operations run instead" in said


HOLD = """if True:
    import fcntl, sys
    lock = open(sys.argv[1], "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.readline()
    open(sys.argv[2], "w").write("from the other process")"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_that_waits_for_the_build_says_so(tmp_path, monkeypatch, capsys, killed):
    """It takes the library of the other process, or builds it after the other one was killed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "SILENT_S", 0.2)
    compiler = fake_compiler(tmp_path / "compiler")
    path = build.build_library(compiler, build.AVX2)
    path.unlink()
    assert "waiting" not in capsys.readouterr().err, "nobody else builds"
    command = [sys.executable, "-c", HOLD, str(path.parent / "kernels.lock"), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"

        class Watch(cli.Stopwatch):
            def __enter__(self):
                super().__enter__()
                if self.what.startswith("waiting"):  # what it waits for ends now
                    other.kill() if killed else other.stdin.close()

        monkeypatch.setattr(cli, "Stopwatch", Watch)
        assert build.build_library(compiler, build.AVX2) == path
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "waiting for another process that builds the CPU kernels ..."
    assert any(line.startswith("building the CPU kernels") for line in lines) == killed
    assert path.read_text() == ("\n" if killed else "from the other process")


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    """The library is built in a temporary folder that belongs to the user, and never in somebody else's folder."""
    compiler = fake_compiler(tmp_path / "compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/x")
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    first, again = (build.build_library(compiler, build.AVX2) for _ in range(2))
    assert first == again and first.parent == tmp_path / f"fastpath-{os.getuid()}" and first.exists()
    first.parent.chmod(0o777)
    with pytest.raises(OSError, match="lets others write"):
        build.build_library(compiler, build.AVX2)


@pytest.mark.slow
def test_without_a_compiler_torch_is_used(tiny, tmp_path):
    code = "import torch; from load import load_model; m = load_model(%r, dtype=torch.float32); m.setup_caches(1, 9)"
    code = code % str(tiny("llama-mha")[2]) + "; print(m(torch.tensor([[5]]), torch.tensor([[0]])).shape)"
    out, err = start(tmp_path, code, PATH="/nowhere", CXX="").communicate(timeout=300)
    assert out == "torch.Size([1, 131])\n" and "no C++ compiler" in err and len(err.splitlines()) == 1


def test_a_format_without_kernels_is_unpacked(tiny, tmp_path, monkeypatch, capsys):
    """A forker's new row of FORMATS runs before it has a C++ struct, in the dtype of the model."""
    monkeypatch.setitem(FORMATS, "new", FORMATS["int4"])
    quantize_checkpoint(tiny("llama-mha")[2], tmp_path / "q", Quantization("new", 32, "int8"))
    model, prompts = load_model(tmp_path / "q", dtype=torch.float32), random_prompts((3, 20))
    assert "no kernels for new: unpacked, which takes" in capsys.readouterr().err
    assert type(model.blocks[1].mlp.down) is Linear and model.backend.run_blocks is not None
    assert greedy(model, prompts, 12) == plain_tokens(tmp_path / "q", prompts, 12)


@pytest.mark.slow
def test_kernels_are_known_per_operation(tiny):
    """With kernels for products and attention only, these are used, and everything else runs its reference."""
    prompts, calls = random_prompts((3, 40, 17)), []
    for name in ("llama-gqa-biased", "bloom-5"):
        expected = greedy(load_model(tiny(name)[2], dtype=torch.float32), prompts, 24)
        with mock.patch.dict(KERNELS, {"cpu": {"linear", "prepare_layer", "linear_packed", "attention"}}):
            model = load_model(tiny(name)[2], dtype=torch.float32)
            assert model.backend.run_blocks is None and model.backend.thread_invariant
            with torch.profiler.profile() as profiler:
                assert greedy(model, prompts, 24) == expected
        calls.append({event.key for event in profiler.key_averages() if event.key.startswith("fastpath::")})
    assert calls == [{"fastpath::linear", "fastpath::attention"}] * 2


CHANGED = {  # operation: a part of its schema, and another one in its place
    "attention": ("float scale) -> Tensor", "float scale, float softcap=0.0) -> Tensor"),
    "linear_packed": ("linear_packed(Tensor x, int layer, int N)", "linear_packed(Tensor x, int layer, int N, int M)"),
}


@pytest.mark.slow
def test_a_schema_that_was_changed_in_python_only(tiny, tmp_path, python):
    """It gives one line, and its reference runs. What fused it is not used any more."""
    quantize_checkpoint(tiny("llama-gqa-biased")[2], tmp_path / "int8", Quantization("int8", 32, "int8"))
    code = "import torch; from load import load_model; m = load_model('../int8', dtype=torch.float32)"
    code += "; m.setup_caches(1, 9); print(m(torch.tensor([[5]]), torch.tensor([[0]])).shape, m.backend.run_blocks)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = {}
    for name, (old, new) in CHANGED.items():
        copied = tmp_path / name
        for folder in ("cpu", "mixers", "text"):
            shutil.copytree(ROOT / folder, copied / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.glob("*.py"):
            shutil.copy(path, copied)
        text = (copied / "kernels.py").read_text()
        assert text.count(old) == 1
        (copied / "kernels.py").write_text(text.replace(old, new))
        processes[name] = subprocess.Popen([*python, "-c", code], cwd=copied, **pipes)

    for name, process in processes.items():
        out, err = process.communicate(timeout=300)
        assert out == "torch.Size([1, 131]) None\n", err
        first, *others = printed_lines(err)
        assert first.endswith(f"the references run: {name}")
        unpacked = name == "linear_packed"  # once, at load, because its reference is slow
        assert len(others) == unpacked and all("no kernels for int8: unpacked" in line for line in others)


def test_without_the_file_torch_is_used(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cpu.install", None)
    uncached = choose_installer.__wrapped__  # it has been called with this device before
    monkeypatch.setattr("load.choose_installer", uncached)
    model = install_kernels(load_model(tiny("llama-mha")[2], kernels="torch"))
    assert model.backend.run_blocks is None and "cpu.install is missing: torch's own" in capsys.readouterr().err


@pytest.mark.full  # a build with sanitizers takes a minute
@pytest.mark.parametrize("kernels", ["auto", "avx2"])
def test_under_sanitizers(tmp_path, kernels):
    """Every operation under ASan and UBSan, at sizes where the last elements end with their storage."""
    compiler = os.environ.get("CXX") or "g++"
    code = """if True:
        import sys, torch
        sys.path.insert(0, "tests")
        from cases import quantized
        from cpu import build
        from cpu.install import CpuInstaller
        from cpu.layers import PackedEmbedding, PackedLinear, PreparedLayer
        import formats
        from checkpoint import Writer, empty_model
        from config import Config, Experts
        from load import install_kernels

        build.FLAGS += ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        assert build.load_kernels(KERNELS)
        ops = torch.ops.fastpath
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for N, K in ((1, 1), (17, 33), (37, 96), (16, 150), (35, 31)):
                w, b, norm = torch.randn(N, K).to(dtype), torch.randn(N).to(dtype), torch.randn(K).to(dtype)
                layers = []
                for name, format in formats.FORMATS.items():
                    for size in (0, 32, 64) if len(format.groupsizes) > 1 else format.groupsizes:
                        size = size if len(format.groupsizes) == 1 or size < K else 0
                        plain = quantized(name, N, K, size, True, dtype)[0]
                        layers += [PackedLinear(plain, exact) for exact in (False, True)]
                        other = formats.Linear(K, 5, False).to(dtype)
                        stack = formats.StackedLinear([plain, other], b.new_zeros(N + 5))
                        plain.bias = None
                        layers.append(PackedLinear(stack, False))
                        table = formats.QuantizedEmbedding(K, N, False, plain.scheme)
                        table.load_state_dict(plain.parts())
                        PackedEmbedding(table, False)(torch.tensor([[0, N - 1]]))
                for M in (1, 2, 3, 5, 8, 13, 45):
                    x = torch.randn(M, K).to(dtype)
                    ops.linear(x, w, b), ops.rms_norm(x, norm, 1e-5), ops.layer_norm(x, norm, norm, 1e-5)
                    for layer in layers:
                        layer(x)
            for H, K, E, S, T in ((3, 1, 10, 1, 1), (4, 2, 33, 5, 70), (3, 3, 16, 17, 130), (8, 1, 96, 40, 64)):
                q, k, v = (torch.randn(shape).to(dtype) for shape in ((2, S, H, E), (2, K, T + 1, E), (2, K, T + 1, E)))
                for start in (0, max(0, T - S)):
                    pos = torch.arange(start, start + S).clamp(max=T).expand(2, S)
                    for window, slopes in ((None, None), (7, torch.rand(H))):
                        ops.attention(q, k, v, pos, None, slopes, window, 0.3)
            for D, F, W in ((33, 45, 37), (10, 1, 1)):
                layers = []
                for N, K in ((2 * F, 2 * D), (D, F), (W, D)):
                    plain = formats.QuantizedLinear(K, N, False, formats.Scheme("int8", 32))
                    plain.load_state_dict(formats.pack(torch.randn(N, K), "int8", 32))
                    layers.append(PackedLinear(plain, False))
                rows = torch.randn(131, D).to(dtype)
                table = PreparedLayer("prepare_layer", "dense", rows, None, 131, D, 0, True)
                handles = [table.handle, *(layer.prepared.handle for layer in layers)]
                tokens = torch.tensor([130, 0, 7])
                ops.medusa(torch.randn(3, D).to(dtype), tokens, torch.arange(W), *handles, 3)
        pos = torch.cat([torch.arange(500, 504), torch.full((12,), -1)])[None]  # whole tiles of queries are padding
        for start, window in ((0, None), (500, 16)):
            q, k, v = torch.randn(1, 16, 8, 16), torch.randn(1, 1, 600, 16), torch.randn(1, 1, 600, 16)
            q, k, v, at = q.bfloat16(), k.bfloat16(), v.bfloat16(), (pos - start).clamp(min=-1)
            ops.attention(q, k, v, at, None, None, window, 0.3)
        sparse = {"experts": Experts((0,), 5, 3, 17, False, 50), "norm_placement": "both"}
        for switches in ({"qk_norm": True, "qkv_bias": True}, {"norm": "layer", "mlp": "gelu", "alibi": True}, sparse):
            config = Config(2, 6, 3, 10, 33, 45, 131, 20, **switches)
            for mode in (None, "int8", "int4"):
                quantization = mode and formats.Quantization(mode, 0 if mode == "int4" else 32, mode)
                model = empty_model(config, quantization).to_empty(device="cpu")
                for tensor in model.state_dict().values():
                    tensor.normal_() if tensor.is_floating_point() else tensor.random_(0, 100)
                install_kernels(model, installer=CpuInstaller(model))
                model.setup_caches(2, 20)
                for S, start in ((3, 0), (1, 19), (16, 3)):
                    pos = torch.arange(start, start + S).expand(2, S)
                    model(torch.ones(2, S, dtype=torch.int64), pos, torch.tensor([1, 0]))
        print("clean")""".replace("KERNELS", repr(kernels))
    libraries = [
        subprocess.run([compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    options = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    out, err = start(tmp_path, code, **options).communicate(timeout=600)
    assert out == "clean\n", err[-3000:]


# ---------------------------------------------------------------- copies of a model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3-gqa", "gemma4-moe-5", "lfm2-tied", "qwen35-wide", "mixtral-3", "qwen35-moe-5"])
def test_a_copy_is_a_model_of_its_own(tiny, name, dtype):
    """It computes the same bits, also without the original, and other weights change only the model they are in."""
    model = load_model(tiny(name)[2], dtype=dtype)
    model.setup_caches(2, 64)
    assert model.backend.run_blocks is not None
    inputs = torch.randint(0, 97, (2, 9)), torch.arange(9).expand(2, 9)
    with torch.no_grad():
        expected = model(*inputs)
        clean = copy.deepcopy(model)
        changed = copy.deepcopy(clean)
        for parameter in [*changed.blocks.parameters(), *changed.blocks.buffers()]:
            if parameter.dtype == dtype and parameter.dim() > 1:
                parameter.mul_(1.5)
        clear(clean, changed)
        assert not torch.equal(changed(*inputs), expected)
        assert torch.equal(clean(*inputs), expected)
        del model, changed
        gc.collect()
        clear(clean)
        assert torch.equal(clean(*inputs), expected)


def clear(*models):
    """Make the caches as if they had just been allocated."""
    for model in models:
        model.setup_caches(2, 64)
