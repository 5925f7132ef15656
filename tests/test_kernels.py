"""The versions of attention against plain Python loops in float64, and the AMX guard with child processes that die."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import backend
import kernels
from backend import survives
from kernels import attention_eager_cpu, attention_reference, attention_torch

VERSIONS = (attention_reference, attention_torch, attention_eager_cpu)

FLOAT32 = 2e-5  # sums of up to 97 products of order 1, summed in another order
BFLOAT16 = 3e-2  # 8 bits of mantissa in the inputs, the weights and the output


def naive(q, k_cache, v_cache, input_pos, rows, slopes, window, scale):
    """Attention of one query at a time, in float64."""
    B, S, H, E = q.shape
    group = H // k_cache.shape[1]
    out = torch.zeros(B, S, H, E, dtype=torch.float64)
    for b in range(B):
        row = b if rows is None else rows[b]
        for s in range(S):
            p = int(input_pos[b, s])
            first = 0 if window is None else max(0, p - window + 1)
            for h in range(H if p >= 0 else 0):
                k, v = (cache[row, h // group, first : p + 1].double() for cache in (k_cache, v_cache))
                scores = k @ q[b, s, h].double() * scale
                if slopes is not None:
                    scores -= slopes[h].double() * (p - torch.arange(first, p + 1))
                out[b, s, h] = scores.softmax(0) @ v
    return out


def case(B=3, S=5, H=6, K=2, E=10, T=97, R=5, dtype=torch.float32, starts=(0, 40, 11), lengths=None):
    generator = torch.Generator().manual_seed(B * S + H)
    q = torch.randn(B, S, H, E, generator=generator).to(dtype)
    k, v = (torch.randn(R, K, T, E, generator=generator).to(dtype) for _ in range(2))
    input_pos = torch.tensor(starts[:B])[:, None] + torch.arange(S)
    for b, length in enumerate(lengths or ()):
        input_pos[b, length:] = -1
    for b in range(B):
        k[b, :, input_pos[b].max() + 1 :] = v[b, :, input_pos[b].max() + 1 :] = float("nan")
    return q, k, v, input_pos


CASES = {
    "ragged": dict(), "decode": dict(S=1, H=9, K=3, E=64), "multi-head": dict(H=4, K=4, E=16, S=7),
    "multi-query": dict(H=5, K=1, E=22), "long": dict(S=41, starts=(0, 56, 3)), "padded": dict(lengths=(5, 2, 0)),
    "long padded": dict(S=37, lengths=(37, 3, 0)), "one row": dict(B=1, S=3, starts=(90,)),
    "a single slot": dict(B=1, S=1, T=1, starts=(0,)), "full": dict(B=1, S=17, starts=(80,)),
    "nothing at all": dict(B=2, S=2, lengths=(0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize("alibi", [False, True])
def test_attention_equals_naive(name, dtype, window, alibi):
    q, k, v, input_pos = case(dtype=dtype, **CASES[name])
    slopes = torch.linspace(0.7, 0.05, q.shape[2]) if alibi else None
    rows = None
    if name in ("multi-head", "long", "one row"):  # other rows of the caches than those of the queries
        rows = (torch.arange(len(q)) + 3) % len(k)
        k, v = (cache.roll(3, 0) for cache in (k, v))
    places = (input_pos, rows, slopes, window, 0.4)
    expected = naive(q, k, v, *places)
    for version in VERSIONS:
        out = version(q, k, v, *places)
        assert out.dtype == dtype and out.shape == q.shape
        assert (out.double() - expected).abs().max() < (FLOAT32 if dtype == torch.float32 else BFLOAT16), version
        assert (out[input_pos < 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window, alibi", [(None, False), (8, True)])
@pytest.mark.parametrize("starts", [(0, 40, 11), (7, 7, 7)], ids=["ragged", "equally long"])
@pytest.mark.parametrize("S", [5, 41])
def test_what_is_not_finite_reaches_only_tokens_that_see_it(dtype, window, alibi, starts, S):
    """Tokens of one pass stand before and behind a slot with NaN, or have a query with NaN."""
    q, k, v, input_pos = case(S=S, starts=starts, dtype=dtype)
    k[0, 1, starts[0] + 3] = float("nan")
    v[1, 0, starts[1] + 2] = float("inf")
    q[2, 4] = float("nan")
    slopes = torch.linspace(0.7, 0.05, q.shape[2]) if alibi else None
    places = (input_pos, None, slopes, window, 0.4)
    expected = naive(q, k, v, *places)
    sees = ~expected.isfinite().all(3).all(2)  # (B,S)
    assert 0 < sees.sum() < sees.numel()
    for version in VERSIONS:
        out = version(q, k, v, *places)
        assert torch.equal(~out.isfinite().all(3).all(2), sees), version
        tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16
        assert (out.double() - expected)[~sees].abs().max() < tolerance, version


@pytest.mark.slow
def test_attention_compiled():
    """In one graph with a decode step and a prefill, which are computed in different ways."""

    def both(attend, cases):
        return [attend(*arguments, None, None, 8, 0.3) for arguments in cases]

    cases = case(S=1), case(S=20)
    compiled = torch.compile(both, fullgraph=True)
    for found, expected in zip(compiled(kernels.attention, cases), both(attention_reference, cases)):
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("T", [4, 5])
def test_padding_does_not_reach_other_rows(T):
    """In bfloat16 with an odd number of slots, PyTorch's product lets NaN of one row into the row before."""
    q = torch.randn(1, 17, 6, 10).bfloat16()  # (B,S,H,E)
    k, v = torch.randn(2, 1, 3, 20, 10).bfloat16()  # (B,K,T,E)
    input_pos = torch.full((1, 17), -1)
    input_pos[0, :T] = torch.arange(T)
    rest = (None, None, None, 0.3)
    expected = attention_reference(q[:, :T], k, v, input_pos[:, :T], *rest)
    for version in VERSIONS:
        out = version(q, k, v, input_pos, *rest)
        assert torch.equal(out[:, T:], torch.zeros_like(out[:, T:]))
        torch.testing.assert_close(out[:, :T], expected, rtol=0.02, atol=0.02)  # bfloat16


def test_survives_tells_how_a_child_ended():
    assert survives(lambda: None)
    assert not survives(lambda: os.kill(os.getpid(), signal.SIGILL))
    start = time.monotonic()
    assert not survives(lambda: time.sleep(60), timeout_s=0.3)
    assert time.monotonic() - start < 30


def test_guard_limits_onednn_only_where_amx_kills(monkeypatch):
    def outcome(supported, alive, **environment):
        monkeypatch.setattr(os, "environ", environment)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: supported)
        monkeypatch.setattr(backend, "survives", lambda work: alive)
        backend.guard_amx()
        return environment.get("ONEDNN_MAX_CPU_ISA")

    assert outcome(True, False) == "AVX512_CORE_FP16"
    assert outcome(True, True) is None
    assert outcome(False, False) is None
    assert outcome(True, False, ONEDNN_MAX_CPU_ISA="AVX2") == "AVX2"


@pytest.mark.slow
def test_a_bfloat16_matmul_works_after_the_import():
    code = "import kernels, torch; a = torch.ones(300, 300, dtype=torch.bfloat16); print((a @ a)[0, 0].item())"
    folder = os.path.dirname(kernels.__file__)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.stdout.strip() == "300.0", done.stderr
