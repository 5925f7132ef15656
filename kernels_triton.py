"""The operations of kernels.py as Triton kernels for GPUs, and TritonInstaller, which makes a model
use them.

Read down: attention, products with few rows and with many, sparse layers, rotary embedding and
norms, the gated delta rule, the choice of tiles, the operations, sampling, packing, TritonInstaller,
the fused block.
kernels.py and model.py say what each operation computes, and name the shapes. In addition:
HEADS_PER_KV query heads share a key/value head; a product has M rows of activations, N outputs and
C columns of the weight matrix.

**Attention.** In plain PyTorch, these two lines stand between the two products of attention:
    scores = torch.where(visible, scores * scale + bias, float("-inf"))  # reads S*T, writes S*T
    weights = torch.softmax(scores.float(), dim=-1).to(v.dtype)          # the same, and the casts too
Here the scores never leave the registers: `attend` does both products, the mask, ALiBi and the
softmax, in float32. This is possible because softmax can be computed in blocks of slots. For each
block, with scores a and values v, let
    m = max(a),    l = sum exp(a - m),    acc = sum exp(a - m) v
Two blocks are merged by m' = max(m1, m2), c = exp(m - m') and
    l' = c1 l1 + c2 l2,    acc' = c1 acc1 + c2 acc2,    softmax(a) v = acc' / l'
This is exact for any division into blocks. Prefill computes the blocks one after the other
(FlashAttention-2, arXiv:2307.08691). Decode computes them on many multiprocessors, and then merges
the results (flash-decoding). With S = T = 8192 and 32 heads, the two lines and the products around
them would read or write every score six times, 26 GB in bfloat16; q, k, v and the result are 0.2 GB.
Decode reads each live key and value once, 2 T K E elements, and nothing beyond the row's own length.
Positions are read on the device, so that one captured CUDA graph serves every length.

**Products** with at most 16 new tokens a row are limited by reading the weights: N C bits / 8 bytes,
and 2 or 4 more bytes a group. Each weight is read once for 8 rows, 128 bytes of a matrix row at a
time, and unpacked in registers. Operations next to the product are fused with it: RMSNorm (its
division applies to a whole row, so it can follow the sum), bias, SwiGLU and the residual. A Llama
block takes 7 launches: qkv, rotary with cache write, attention, its merge, out, gate_up, down; and
one more for each product whose columns are split.

Every result is summed in an order that does not depend on the batch, the other tokens of its row, or
the length of the cache: a tile has 8 rows of M whatever M is, the position of a chunk in the cache
alone decides to which split it belongs, and with do_not_specialize one compiled kernel serves all
these sizes. So a batch, and the verification of drafts, give the same bits as plain decoding. The
price: every 8 rows read the weights again, from the L2 cache. More than 16 new tokens a row (prefill)
are computed by other kernels, which round differently.
"""

import functools
import json
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

import sampling
from backend import FUSED_EXPERT_FIELDS, FUSED_FIELDS, Backend, Installer, uses_only
from cli import print_status
from config import Config
from edits import set_aside, unusable_operations
from formats import QuantizedEmbedding, QuantizedLinear, StackedLinear, repeat_groups
from kernels import DELTA_WINDOW, KERNELS, LIBRARY, MAX_DECODE_TOKENS, attention_torch, find_kernels
from layers import MatrixLayer
from model import Block, Transformer

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E); the hardware computes exp2
# Rows of activations in a tile: the fewest that a tensor core takes. Missing rows are zeros.
TILE_M = tl.constexpr(8)
CHUNK = tl.constexpr(64)  # cache slots in a step of attention
# Programs that share the chunks of a row in decode: chunk c belongs to split c % SPLITS.
SPLITS = tl.constexpr(64)

# TRITON_INTERPRET=1 runs the kernels on CPU tensors, for tests.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """acc + a b in float32; float32 inputs are not rounded to TF32."""
    if INTERPRETED:  # the interpreter has no bfloat16 products
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


# ---------------------------------------------------------------- attention: kernels.attention


@triton.jit
def attend(
    q, acc, m, l, k_base, v_base, pos, slope, chunk, stop, first, last, scale, window, E,
    STEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, MASKED: tl.constexpr,
    ALIBI: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Update the softmax state (acc, m, l) of each query with the chunks range(chunk, stop, STEP),
    of WIDTH slots each.

    q (Q,BLOCK_E). m (Q,) is the largest score so far, times LOG2E; l (Q,) is the sum of
    exp(score - m); acc (Q,BLOCK_E) is the sum of exp(score - m) * value. No query sees slots outside
    first..last. MASKED: some slots of these chunks are not visible to all queries.
    """
    e = tl.arange(0, BLOCK_E)
    for c in range(chunk, stop, STEP):
        t = c * WIDTH + tl.arange(0, WIDTH)
        where = t[:, None] * E + e[None, :]
        inside = (e < E)[None, :]
        if MASKED:
            inside = ((t >= first) & (t <= last))[:, None] & inside  # other slots may hold NaN
        k = tl.load(k_base + where, mask=inside, other=0.0)  # (WIDTH,BLOCK_E)
        scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], WIDTH), tl.float32)) * scale
        if ALIBI:
            scores += slope[:, None] * (t[None, :] - pos[:, None]).to(tl.float32)
        if MASKED:
            visible = t[None, :] <= pos[:, None]
            if WINDOW:
                visible &= t[None, :] > pos[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))

        m_new = tl.maximum(m, tl.max(scores, 1))
        # While no slot was visible, m_new is -inf, and -inf - -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores - m_safe[:, None])
        rescale = tl.exp2(m - m_safe)
        l = l * rescale + tl.sum(weights, 1)
        v = tl.load(v_base + where, mask=inside, other=0.0)
        acc = dot(weights.to(v.dtype), v, acc * rescale[:, None])
        m = m_new
    return acc, m, l


@triton.jit
def load_queries(
    q, input_pos, slopes, b, head, at, S, H, E, HEADS_PER_KV: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Load the queries with the indices `at` (Q,), which count the heads of a group within each
    token.

    Returns their values, positions, ALiBi slopes, indices in (B,S,H), and whether each query exists.
    """
    token = at // HEADS_PER_KV
    h = head * HEADS_PER_KV + at % HEADS_PER_KV
    valid = token < S
    pos = tl.load(input_pos + b * S + token, mask=valid, other=-1).to(tl.int32)
    place = (b * S + token) * H + h
    e = tl.arange(0, BLOCK_E)
    inside = valid[:, None] & (e < E)[None, :]
    values = tl.load(q + place[:, None] * E + e[None, :], mask=inside, other=0.0)
    slope = tl.zeros_like(pos)
    if slopes is not None:
        slope = tl.load(slopes + h, mask=valid, other=0.0) * LOG2E
    return values, pos, slope, place, valid


@triton.jit
def cache_row(rows, b):
    """The row of the cache that batch row b uses, as int64."""
    row = b
    if rows is not None:
        row = tl.load(rows + b)
    return row.to(tl.int64)


@triton.jit(do_not_specialize=["S", "T"])
def decode_kernel(
    q, k_cache, v_cache, input_pos, rows, slopes, parts, stats, S, T, H, E, scale, window,
    HEADS_PER_KV: tl.constexpr, BLOCK_E: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Flash-decoding: a tile of queries of one key/value head attends to one split of the chunks of
    its row.

    Grid (SPLITS, tiles of queries, B * K). Writes acc to parts (B,S,H,SPLITS,E), m and l to stats
    (B,S,H,SPLITS,2).
    """
    split = tl.program_id(0)
    K = H // HEADS_PER_KV
    b = tl.program_id(2) // K
    head = tl.program_id(2) % K
    at = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    q, pos, slope, place, valid = load_queries(q, input_pos, slopes, b, head, at, S, H, E, HEADS_PER_KV, BLOCK_E)

    last = tl.max(pos, 0)
    first = 0
    if WINDOW:
        oldest = tl.min(tl.where(pos < 0, last, pos), 0)  # the first position that is not padding
        first = tl.maximum(oldest - window + 1, 0)
    begin = first // CHUNK
    chunk = begin + (split + SPLITS - begin % SPLITS) % SPLITS  # the first chunk of this split
    stop = (last + CHUNK) // CHUNK

    place = place.to(tl.int64) * SPLITS + split
    m = tl.full((QUERIES,), float("-inf"), tl.float32)
    if chunk < stop:  # otherwise this split has no chunk
        base = (cache_row(rows, b) * K + head) * T * E
        l = tl.zeros_like(m)
        acc = tl.zeros((QUERIES, BLOCK_E), tl.float32)
        acc, m, l = attend(
            q, acc, m, l, k_cache + base, v_cache + base, pos, slope, chunk, stop, first, last,
            scale, window, E, SPLITS, CHUNK, BLOCK_E, True, slopes is not None, WINDOW,
        )  # fmt: skip
        e = tl.arange(0, BLOCK_E)
        inside = valid[:, None] & (e < E)[None, :]
        tl.store(parts + place[:, None] * E + e[None, :], acc, mask=inside)
        tl.store(stats + place * 2 + 1, l, mask=valid)
    tl.store(stats + place * 2, m, mask=valid)


@triton.jit
def merge_kernel(parts, stats, out, E, BLOCK_E: tl.constexpr):
    """Merge the splits of a query: grid (B * S * H,). All SPLITS are summed in a fixed order, also
    those without chunks."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    e = tl.arange(0, BLOCK_E)
    m = tl.load(stats + (place * SPLITS + split) * 2)
    seen = m > float("-inf")  # decode_kernel writes nothing but m for a split without chunks
    l = tl.load(stats + (place * SPLITS + split) * 2 + 1, mask=seen, other=0.0)
    where = (place * SPLITS + split)[:, None] * E + e[None, :]
    inside = seen[:, None] & (e < E)[None, :]
    part = tl.load(parts + where, mask=inside, other=0.0)  # (SPLITS,BLOCK_E)

    factor = tl.where(seen, tl.exp2(m - tl.max(tl.where(seen, m, -1e38), 0)), 0.0)
    total = tl.sum(factor * l, 0)
    total = tl.where(total > 0, total, 1.0)  # padding sees no slot; its result is 0
    y = tl.sum(factor[:, None] * part, 0) / total
    tl.store(out + place * E + e, y.to(out.dtype.element_ty), mask=e < E)


@triton.jit(do_not_specialize=["S", "T"])
def prefill_kernel(
    q, k_cache, v_cache, input_pos, rows, slopes, out, S, T, H, E, scale, window,
    HEADS_PER_KV: tl.constexpr, BLOCK_E: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_S: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """FlashAttention-2: grid (tiles of S, B * H). A tile skips the chunks that are in its future or
    before its window, and masks only chunks that are partly visible. Tiles with the most chunks
    start first."""
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    at = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    slope_of = slopes
    if slopes is not None:
        slope_of = slopes + h
    q, pos, slope, place, valid = load_queries(q + h * E, input_pos, slope_of, b, 0, at, S, H, E, 1, BLOCK_E)
    base = (cache_row(rows, b) * (H // HEADS_PER_KV) + h // HEADS_PER_KV) * T * E
    k = k_cache + base
    v = v_cache + base

    last = tl.max(pos, 0)
    oldest = tl.min(tl.where(pos < 0, last, pos), 0)  # the first position that is not padding
    first = 0
    if WINDOW:
        first = tl.maximum(oldest - window + 1, 0)
    begin = first // WIDTH
    stop = (last + WIDTH) // WIDTH
    full = begin  # the first chunk that is within the windows of all queries
    diagonal = (oldest + 1) // WIDTH  # the first chunk that is partly in the future
    diagonal = tl.minimum(tl.maximum(diagonal, begin), stop)

    m = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    l = tl.zeros_like(m)
    acc = tl.zeros((BLOCK_S, BLOCK_E), tl.float32)
    ALIBI: tl.constexpr = slopes is not None
    if WINDOW:
        full = tl.minimum((tl.maximum(last - window + 1, 0) + WIDTH - 1) // WIDTH, stop)
        diagonal = tl.maximum(diagonal, full)
        acc, m, l = attend(
            q, acc, m, l, k, v, pos, slope, begin, full, first, last, scale, window, E,
            1, WIDTH, BLOCK_E, True, ALIBI, WINDOW,
        )  # fmt: skip
    acc, m, l = attend(
        q, acc, m, l, k, v, pos, slope, full, diagonal, first, last, scale, window, E,
        1, WIDTH, BLOCK_E, False, ALIBI, WINDOW,
    )  # fmt: skip
    acc, m, l = attend(
        q, acc, m, l, k, v, pos, slope, diagonal, stop, first, last, scale, window, E,
        1, WIDTH, BLOCK_E, True, ALIBI, WINDOW,
    )  # fmt: skip

    y = tl.where((pos >= 0)[:, None], acc / tl.where(l > 0, l, 1.0)[:, None], 0.0)
    e = tl.arange(0, BLOCK_E)
    where = (place[:, None] + h) * E + e[None, :]
    inside = valid[:, None] & (e < E)[None, :]
    tl.store(out + where, y.to(out.dtype.element_ty), mask=inside)


# ------------------------------------- products: kernels.linear, formats.QuantizedLinear
#
# Quantized weights are packed into 32-bit words (tiles,N,32): a tile holds 128 bytes of each row.
# Field j (4 or 8 bits) of word i holds column 32 j + i of the tile. Field j of all 32 words is
# therefore 32 consecutive columns of one group, in the order that the tensor cores need. Scales are
# (tiles,N,groups of a tile), or (N,) if a row has one. With 4 bits a scale is a 32-bit word, whose
# upper half is the min. Weights that are not quantized are not packed, (N,C).

TILE_BITS = tl.constexpr(1024)


@triton.jit
def load_tile(weight, t, row, N, C, BITS: tl.constexpr, EVEN: tl.constexpr):
    """Load tile t of these rows: words (BLOCK_N,32), or weights (BLOCK_N,columns) that are not
    quantized."""
    if BITS < 16:
        start = (row.to(tl.int64) + t * N) * 32
        where = start[:, None] + tl.arange(0, 32)[None, :]
        tile = tl.load(weight + where, eviction_policy="evict_first")
    else:
        COLUMNS: tl.constexpr = TILE_BITS // BITS
        c = t * COLUMNS + tl.arange(0, COLUMNS)
        where = row.to(tl.int64)[:, None] * C + c[None, :]
        if EVEN:
            tile = tl.load(weight + where, eviction_policy="evict_first")
        else:
            tile = tl.load(weight + where, mask=(c < C)[None, :], other=0.0)
    return tile


@triton.jit
def unpack(words, j: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Field j of all words as numbers of this dtype. For int4 in bfloat16 it returns 128 + q instead
    of q.

    128 is 0x4300 in bfloat16, and the last bit of its fraction has the value 1. So `0x4300 | q` is
    128 + q, and one operation does this for two values. Converting integers would take many times
    as long as the product.
    """
    if BITS >= 16:
        values = words
    elif BITS == 8:
        field = (words << (24 - 8 * j)) >> 24  # these shifts extend the sign
        values = field.to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        two = ((words >> (4 * (j % 4))) & 0x000F000F) | 0x43004300
        values = (two >> (16 * (j // 4))).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        values = ((words >> (4 * j)) & 15).to(tl.float32).to(dtype)
    return values


@triton.jit
def epilogue(
    y, up, squares, bias, residual, out, m, n, M, N, C, eps, GATED: tl.constexpr, GELU: tl.constexpr
):  # fmt: skip
    """Apply the norm's division, bias, SwiGLU (or with GELU: GeGLU) and residual to the sums y and up
    (BLOCK_N,TILE_M), and store the result.

    squares (TILE_M,): the sums of the squares of x."""
    inside = (n < N)[:, None] & (m < M)[None, :]
    place = m.to(tl.int64)[None, :] * N + n[:, None]
    if squares is not None:
        inverse = tl.rsqrt(squares / C + eps)[None, :]
        y = y * inverse
        up = up * inverse
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        z = y
        if GELU:  # tanh-GELU is y sigmoid(z)
            z = 1.5957691216 * (y + 0.044715 * y * y * y)
        y = y / (1 + tl.exp2(-z * LOG2E)) * up
    if residual is not None:
        y += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def apply_scales(y, sum_x, scales, BITS: tl.constexpr, dtype: tl.constexpr):
    """sum x (q * scale + min), from y = sum x u and sum_x = sum x, both (BLOCK_N,...), where u is what
    `unpack` returns for q.

    scales: pointers (BLOCK_N,)."""
    values = tl.load(scales)
    if BITS == 4:
        OFFSET: tl.constexpr = 128 if dtype == tl.bfloat16 else 0  # u - q
        scale = values.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (values >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        y = y * scale[:, None] + sum_x * (minimum - OFFSET * scale)[:, None]
    else:
        y = y * values.to(tl.float32)[:, None]
    return y


@triton.jit
def load_inputs(x, norm, square, m, c, M, C, EVEN: tl.constexpr):
    """x (WIDTH,TILE_M) in these rows and columns, times the norm's weights, and square plus the
    squares of x."""
    inside = (m < M)[None, :]
    if not EVEN:
        inside = inside & (c < C)[:, None]
    part = tl.load(x + m[None, :] * C + c[:, None], mask=inside, other=0.0)
    if norm is not None:
        value = part.to(tl.float32)
        square += value * value
        if EVEN:
            factor = tl.load(norm + c)
        else:
            factor = tl.load(norm + c, mask=c < C, other=0.0)
        part = (value * factor.to(tl.float32)[:, None]).to(part.dtype)
    return part, square


@triton.jit
def parts_row(split, m, M, GATED: tl.constexpr):
    """The rows (TILE_M,) of parts, as (SPLIT_K * 1 or 2 * M,N), that hold the sums y of this split.
    The sums up follow M rows later."""
    row = split * M + m
    if GATED:
        row = split * 2 * M + m
    return row


@triton.jit
def store_parts(
    y, up, square_sum, parts, squares, split, m, n, M, N, GATED: tl.constexpr
):  # fmt: skip
    """Store the sums y and up (BLOCK_N,TILE_M) and square_sum (TILE_M,) of one split of the columns,
    for reduce_kernel."""
    inside = (n < N)[:, None] & (m < M)[None, :]
    at = parts_row(split, m, M, GATED)
    tl.store(parts + at.to(tl.int64)[None, :] * N + n[:, None], y, mask=inside)
    if GATED:
        tl.store(parts + (at + M).to(tl.int64)[None, :] * N + n[:, None], up, mask=inside)
    if square_sum is not None:  # the sum is the same for all tiles of N, and each of them writes it
        tl.store(squares + split * M + m, square_sum, mask=m < M)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, weight, scales, bias, norm, residual, out, parts, squares, M, N, C, eps,
    BITS: tl.constexpr, GROUPSIZE: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x (M,C), after an optional RMSNorm, @ weight (N or 2N,C)^T: grid (tiles of M, tiles of N,
    SPLIT_K).

    GROUPSIZE: columns that share a scale; 0 if a row has one scale or none. EVEN: C is a multiple of
    a tile's columns. SPLIT_K > 1: the columns are split over several programs (split-K), which write
    float32 sums to parts (SPLIT_K,1 or 2,M,N) and squares (SPLIT_K,M); reduce_kernel adds them.
    """
    # The first grid dimension is M, so that tiles with the same weights run together.
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.where(n < N, n, 0)
    tiles = tl.cdiv(C, TILE_BITS // BITS)
    each = tl.cdiv(tiles, SPLIT_K)
    total, total_up, sum_x, square = sum_tiles(
        x, weight, scales, norm, m, row, split * each, tl.minimum(split * each + each, tiles),
        M, N, C, BITS, GROUPSIZE, GATED, EVEN, BLOCK_N,
    )  # fmt: skip
    if scales is not None and GROUPSIZE == 0:
        total = apply_scales(total, sum_x, scales + row, BITS, dtype)
        if GATED:
            total_up = apply_scales(total_up, sum_x, scales + row + N, BITS, dtype)
    square_sum = None
    if norm is not None:
        square_sum = tl.sum(square, 0)

    if SPLIT_K == 1:
        epilogue(total, total_up, square_sum, bias, residual, out, m, n, M, N, C, eps, GATED, False)
    else:
        store_parts(total, total_up, square_sum, parts, squares, split, m, n, M, N, GATED)


@triton.jit
def sum_tiles(
    x, weight, scales, norm, m, row, begin, stop, M, N, C,
    BITS: tl.constexpr, GROUPSIZE: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums (BLOCK_N,TILE_M) of linear_kernel for these rows over the tiles begin..stop, which are
    scaled if GROUPSIZE. Returns the sums of y, up and x, and the sums of squares of x (WIDTH,TILE_M).

    The weights are the left operand of tl.dot, because then 8 rows of x fill a tensor core's operand;
    as the left operand x would need 16 rows.
    """
    COLUMNS: tl.constexpr = TILE_BITS // BITS
    FIELDS: tl.constexpr = 32 // BITS if BITS < 16 else 1
    WIDTH: tl.constexpr = COLUMNS // FIELDS  # columns of one tl.dot
    GROUPS: tl.constexpr = COLUMNS // GROUPSIZE if GROUPSIZE else 1  # groups of a tile
    EACH: tl.constexpr = FIELDS // GROUPS  # fields of a group
    dtype: tl.constexpr = x.dtype.element_ty
    ROWS = 2 * N if GATED else N

    ones = tl.full((BLOCK_N, WIDTH), 1.0, tl.float32).to(dtype)
    zeros = tl.zeros((BLOCK_N, TILE_M), tl.float32)
    total = zeros
    total_up = zeros
    sum_x = zeros
    square = tl.zeros((WIDTH, TILE_M), tl.float32)
    for t in range(begin, stop):
        words = load_tile(weight, t, row, ROWS, C, BITS, EVEN)
        words_up = words
        if GATED:
            words_up = load_tile(weight, t, row + N, ROWS, C, BITS, EVEN)
        for g in tl.static_range(GROUPS):  # fields g * EACH + i
            y = total
            up = total_up
            if GROUPSIZE:  # each group has sums of its own
                y = zeros
                up = zeros
                sum_x = zeros
            for i in tl.static_range(EACH):
                c = t * COLUMNS + (g * EACH + i) * WIDTH + tl.arange(0, WIDTH)
                part, square = load_inputs(x, norm, square, m, c, M, C, EVEN)
                if BITS == 4:  # on the idle tensor cores, which give each thread the sums it needs
                    sum_x = dot(ones, part, sum_x)
                y = dot(unpack(words, g * EACH + i, BITS, dtype), part, y)
                if GATED:
                    up = dot(unpack(words_up, g * EACH + i, BITS, dtype), part, up)
            if GROUPSIZE:
                place = scales + (row.to(tl.int64) + t * ROWS) * GROUPS
                total += apply_scales(y, sum_x, place + g, BITS, dtype)
                if GATED:
                    total_up += apply_scales(up, sum_x, place + N * GROUPS + g, BITS, dtype)
            else:
                total = y
                total_up = up
    return total, total_up, sum_x, square


@triton.jit(do_not_specialize=["M"])
def reduce_kernel(
    parts, squares, bias, residual, out, M, N, C, eps,
    GATED: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the sums of the splits of the columns, in ascending order: grid (tiles of M, tiles of N)."""
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < N)[:, None] & (m < M)[None, :]
    total = tl.zeros((BLOCK_N, TILE_M), tl.float32)
    total_up = total
    square = tl.zeros((TILE_M,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        at = parts_row(split, m, M, GATED)
        where = at.to(tl.int64)[None, :] * N + n[:, None]
        total += tl.load(parts + where, mask=inside, other=0.0)
        if GATED:
            where = (at + M).to(tl.int64)[None, :] * N + n[:, None]
            total_up += tl.load(parts + where, mask=inside, other=0.0)
        if squares is not None:
            square += tl.load(squares + split * M + m, mask=m < M, other=0.0)

    square_sum = None
    if squares is not None:
        square_sum = square
    epilogue(total, total_up, square_sum, bias, residual, out, m, n, M, N, C, eps, GATED, False)


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x, weight, scales, bias, out, M, N, C,
    BITS: tl.constexpr, GROUPSIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x (M,C) with many rows @ quantized weight (N,C)^T: grid (tiles of M, tiles of N).

    It is limited by arithmetic. A weight is unpacked once for BLOCK_M rows, to the reference's value
    in x's dtype.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(n < N, n, 0)
    FIELDS: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = 32 * FIELDS // GROUPSIZE if GROUPSIZE else 1
    one = tl.full((BLOCK_N, 32), 1.0, tl.float32)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for t in range(0, tl.cdiv(C, 32 * FIELDS)):
        words = load_tile(weight, t, row, N, C, BITS, True)
        for j in tl.static_range(FIELDS):
            c = (t * FIELDS + j) * 32 + tl.arange(0, 32)
            inside = (m < M)[:, None] & (c < C)[None, :]
            where = m.to(tl.int64)[:, None] * C + c[None, :]
            part = tl.load(x + where, mask=inside, other=0.0)
            place = scales + row
            if GROUPSIZE:
                place = scales + (row.to(tl.int64) + t * N) * GROUPS + j * GROUPS // FIELDS
            levels = unpack(words, j, BITS, part.dtype).to(tl.float32)
            w = apply_scales(levels, one, place, BITS, part.dtype)
            total = dot(part, tl.trans(w.to(part.dtype)), total)

    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- sparse layers: experts.SparseMLP
#
# A token uses k = n_active of X experts, so M tokens make R = M * k choices; choice c is one of token
# c // k. The plan sorts the choices by their experts, and divides the choices of each expert into tiles of
# TILE_M. It is made on the device, so one captured CUDA graph serves every choice: the grid has as
# many tiles as there may be (`plan_experts`), and programs of tiles that are not used return at once.
#
# An expert's weights are laid out as any other layer's, and the experts follow each other. The
# tiles of an expert run together, so all but the first find its weights in the L2 cache.

PLAN_BLOCK = tl.constexpr(256)  # choices that plan_kernel reads at a time


@triton.jit
def choose_kernel(
    logits, input_pos, choice_bias, scales, ids, weights, stride, X, n_active, scale,
    NORMALIZED: tl.constexpr, SIGMOID: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """experts.SparseMLP.choose: grid (M,). Reads the X logits of a token, 4 X bytes, which are `stride`
    after the logits of the token before it, and writes its ids and weights, 12 n_active bytes. The experts
    with the largest logits are found one after the other."""
    token = tl.program_id(0)
    lane = tl.arange(0, BLOCK_X)
    logit = tl.load(logits + token.to(tl.int64) * stride + lane, mask=lane < X, other=float("-inf"))
    logit = tl.where(logit == logit, logit, float("-inf"))  # with NaN, ids must still name experts
    score = logit
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    preference = score
    if choice_bias is not None:
        preference += tl.load(choice_bias + lane, mask=lane < X, other=0)
    i = tl.arange(0, BLOCK_K)
    chosen = tl.full((BLOCK_K,), -1, tl.int64)
    value = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    is_left = lane < X
    for n in range(0, n_active):
        largest = tl.max(tl.where(is_left, preference, float("-inf")), 0)
        e = tl.min(tl.where(is_left & (preference == largest), lane, BLOCK_X), 0)
        is_left = is_left & (lane != e)
        chosen = tl.where(i == n, e, chosen)
        value = tl.where(i == n, tl.max(tl.where(lane == e, score, float("-inf")), 0), value)

    if SIGMOID:
        weight = tl.where(i < n_active, value, 0)
        total = 1.0
        if NORMALIZED:
            total = tl.sum(weight, 0) + 1e-6  # mixers.experts.MIN_SIGMOID_SUM
    else:
        largest = tl.max(value, 0)
        weight = tl.exp(value - largest)
        total = tl.sum(weight, 0)
        if not NORMALIZED:
            total = tl.sum(tl.exp(logit - largest), 0)
    if scales is not None:
        weight *= tl.load(scales + chosen, mask=i < n_active, other=0)
    is_padding = tl.load(input_pos + token) < 0
    tl.store(ids + token * n_active + i, tl.where(is_padding, -1, chosen), mask=i < n_active)
    tl.store(weights + token * n_active + i, weight / total * scale, mask=i < n_active)


@triton.jit
def load_ids(ids, first, R, X):
    """The experts of the choices from `first` on, (PLAN_BLOCK,) int32; X if a choice is padding."""
    choice = first + tl.arange(0, PLAN_BLOCK)
    e = tl.load(ids + choice, mask=choice < R, other=-1).to(tl.int32)
    return choice, tl.where(e < 0, X, e)


@triton.jit(do_not_specialize=["R", "slots"])
def plan_kernel(ids, counts, experts, choices, R, X, slots, BLOCK_X: tl.constexpr):
    """Plan the products of the R choices in ids: grid (X,).

    Writes experts (slots,), the expert of each tile, or -1 if it is not used; and choices
    (slots,TILE_M), the slots of each tile in ascending order, then -1. Adds the tokens of each expert, and
    the number of experts, to counts (X+1,). Each program reads all ids, 8 R bytes, from the L2 cache.
    """
    e = tl.program_id(0)
    lane = tl.arange(0, BLOCK_X)
    tokens = tl.zeros((BLOCK_X,), tl.int32)  # of each expert
    for first in range(0, R, PLAN_BLOCK):
        _, found = load_ids(ids, first, R, X)
        tokens += tl.histogram(found, BLOCK_X)
    tokens = tl.where(lane < X, tokens, 0)
    tiles = (tokens + TILE_M - 1) // TILE_M
    tile = tl.sum(tl.where(lane < e, tiles, 0), 0)  # the first tile of this expert
    stop = tile + tl.sum(tl.where(lane == e, tiles, 0), 0)
    count = tl.sum(tl.where(lane == e, tokens, 0), 0)

    for i in range(tile, stop):
        tl.store(experts + i, e)
    rank = tl.zeros((), tl.int32)
    for first in range(0, R, PLAN_BLOCK):
        choice, found = load_ids(ids, first, R, X)
        own = (found == e).to(tl.int32)
        place = tile * TILE_M + rank + tl.cumsum(own) - own
        tl.store(choices + place, choice, mask=own != 0)
        rank += tl.sum(own, 0)
    m = tl.arange(0, TILE_M)
    rest = tile * TILE_M + count + m  # what is left of the last tile
    tl.store(choices + rest, -1, mask=rest < stop * TILE_M)

    tl.store(counts + e, tl.load(counts + e) + count)
    if e == X - 1:
        for i in range(stop, slots):
            tl.store(experts + i, -1)
        used = tl.sum((tokens > 0).to(tl.int32), 0)
        tl.store(counts + X, tl.load(counts + X) + used)


@triton.jit(do_not_specialize=["R"])
def expert_kernel(
    x, weight, scales, experts, choices, out, R, n_active, N, C,
    BITS: tl.constexpr, GROUPSIZE: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """linear_kernel with the matrix of an expert, for a tile of the plan: grid (slots, tiles of N).
    Row c // n_active of x is the input of choice c, whose output is row c of out (R,N).

    Reads the matrices of the experts in the plan, and no others: for each, N C bits / 8 bytes and 2 or
    4 more a group, and twice as many if GATED. The sums of a choice have the order of linear_kernel's
    without split-K, whatever other choices its tile has.
    """
    e = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if e < 0:
        return

    choice = tl.load(choices + tl.program_id(0) * TILE_M + tl.arange(0, TILE_M))
    inputs = R // n_active  # rows of x
    m = tl.where(choice < 0, inputs, choice // n_active)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(n < N, n, 0)
    dtype: tl.constexpr = x.dtype.element_ty
    COLUMNS: tl.constexpr = TILE_BITS // BITS
    GROUPS: tl.constexpr = COLUMNS // GROUPSIZE if GROUPSIZE else 1
    ROWS = 2 * N if GATED else N
    tiles = tl.cdiv(C, COLUMNS)
    if BITS < 16:
        weight += e * ROWS * tiles * 32
        if GROUPSIZE:
            scales += e * ROWS * tiles * GROUPS
        else:
            scales += e * ROWS
    else:
        weight += e * ROWS * C

    total, total_up, sum_x, _ = sum_tiles(
        x, weight, scales, None, m, row, 0, tiles, inputs, N, C, BITS, GROUPSIZE, GATED, EVEN, BLOCK_N
    )
    if BITS < 16 and GROUPSIZE == 0:
        total = apply_scales(total, sum_x, scales + row, BITS, dtype)
        if GATED:
            total_up = apply_scales(total_up, sum_x, scales + row + N, BITS, dtype)
    m = tl.where(choice < 0, R, choice)
    epilogue(total, total_up, None, None, None, out, m, n, R, N, C, 0.0, GATED, GELU)


@triton.jit
def expert_sum_kernel(
    products, ids, weights, shared, logits, out, X, D, n_active, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The sum of the products of a token's choices, in their order, and of the shared expert, if there
    is one: grid (M, tiles of D). Reads products (M*n_active,D), and shared (M,D), which counts
    sigmoid(logits (M,X+1)[:, X]) times; each element is read and written once."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(0, n_active):
        choice = token * n_active + i
        is_used = tl.load(ids + choice) >= 0  # padding has no products
        product = tl.load(products + choice * D + d, mask=is_used & (d < D), other=0.0).to(tl.float32)
        total += tl.load(weights + choice) * product
    if shared is not None:
        factor = 1 / (1 + tl.exp2(-tl.load(logits + token * (X + 1) + X) * LOG2E))
        total += factor * tl.load(shared + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=d < D)


# ------------------------------------- positions and norms: positions.rotate, layers.RMSNorm


@triton.jit(do_not_specialize=["S", "T"])
def rotary_kernel(
    qkv, cos, sin, q_norm, k_norm, input_pos, rows, k_cache, v_cache, out, S, T, H, K, E, eps,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """QK-norm and RoPE of one head of one token: grid (B * S, H + 2 K). Writes queries to out
    (B,S,H,E), and keys and values to their cache slots; position -1 is the last slot. Each element
    is read and written once."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    inside = e < E
    pair = (e + E // 2) % E
    start = (token.to(tl.int64) * (H + 2 * K) + head) * E
    value = tl.load(qkv + start + e, mask=inside, other=0.0).to(tl.float32)

    if head < H + K:  # values have neither norm nor RoPE
        other = tl.load(qkv + start + pair, mask=inside, other=0.0).to(tl.float32)
        if q_norm is not None:
            inverse = tl.rsqrt(tl.sum(value * value, 0) / E + eps)
            is_query = (head < H) & inside
            is_key = (head >= H) & inside
            weight = tl.load(q_norm + e, mask=is_query, other=0.0)
            weight += tl.load(k_norm + e, mask=is_key, other=0.0)
            weight_of_pair = tl.load(q_norm + pair, mask=is_query, other=0.0)
            weight_of_pair += tl.load(k_norm + pair, mask=is_key, other=0.0)
            value = value * inverse * weight.to(tl.float32)
            other = other * inverse * weight_of_pair.to(tl.float32)
            value = value.to(qkv.dtype.element_ty).to(tl.float32)
            other = other.to(qkv.dtype.element_ty).to(tl.float32)
        if cos is not None:
            rotated = value * tl.load(cos + token * E + e, mask=inside, other=0.0)
            value = rotated + other * tl.load(sin + token * E + e, mask=inside, other=0.0)

    value = value.to(qkv.dtype.element_ty)
    if head < H:
        tl.store(out + (token.to(tl.int64) * H + head) * E + e, value, mask=inside)
    else:
        position = tl.load(input_pos + token)
        slot = tl.where(position < 0, position + T, position).to(tl.int64)
        row = cache_row(rows, token // S)
        place = ((row * K + (head - H) % K) * T + slot) * E + e
        if head < H + K:
            tl.store(k_cache + place, value, mask=inside)
        else:
            tl.store(v_cache + place, value, mask=inside)


@triton.jit
def norm_kernel(x, weight, bias, out, D, eps, SUBTRACT_MEAN: tl.constexpr, BLOCK_D: tl.constexpr):
    """RMSNorm of a row, or LayerNorm if SUBTRACT_MEAN: grid (M,). The order of a row's sum does not
    depend on M."""
    d = tl.arange(0, BLOCK_D)
    start = tl.program_id(0).to(tl.int64) * D
    value = tl.load(x + start + d, mask=d < D, other=0.0).to(tl.float32)
    if SUBTRACT_MEAN:
        value = tl.where(d < D, value - tl.sum(value, 0) / D, 0.0)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    y = value * inverse * tl.load(weight + d, mask=d < D).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + d, mask=d < D).to(tl.float32)
    tl.store(out + start + d, y.to(out.dtype.element_ty), mask=d < D)


# ---------------------------------------------------------------- the gated delta rule: mixers.recurrent.gated_delta
#
# The columns of a head's matrix (dk,dv) do not depend on each other, so a program has BLOCK_V of
# them, in registers, for all tokens of a batch row. It adds the pending updates and then the tokens,
# and writes the matrix before the tokens that are pending afterwards.
#
# Up to MAX_DECODE_TOKENS tokens a row are added one by one (delta_kernel), so that the verification
# of drafts gives the bits of decoding. More (prefill) are added in chunks of WINDOW, with the
# products of mixers.recurrent.delta_chunks, which tensor cores compute. What these need of the keys and
# queries alone is computed before, for all chunks in parallel (delta_system_kernel).
# delta_chunks_kernel then goes from chunk to chunk. The last chunk ends at the last token, so it has
# the pending tokens and no others. The first may begin before the first token: a token that is
# missing has zeros for q, k, v, log_decay and beta, which change nothing.
#
# delta_commit_kernel stores what several programs have read: the keys and decays of the pending
# tokens, and the base.

WINDOW = tl.constexpr(DELTA_WINDOW)
PART = tl.constexpr(16)  # rows of a matrix that are multiplied at once, the fewest for a tensor core
# Each float32 is split into three numbers in bfloat16. Six products of these give nearly the bits of
# a float32 product (TF32 would keep 11 bits of 24). The interpreter multiplies in float32.
PRECISION = tl.constexpr("ieee" if INTERPRETED.value else "bf16x6")


@triton.jit
def add_update(M, decay, key, delta):
    """The matrix of a head after a token. key: in the shape of M's rows."""
    return M * decay + tl.expand_dims(key, -1) * delta


@triton.jit
def load_matrix(matrix, base, keys, deltas, decays, row, head, start, i, j, n, m, dk, dv):
    """The rows i, of any shape, and columns j of a head's matrix before position `start`, and where
    they are stored."""
    is_row = i < dk
    is_column = j < dv
    place = matrix + ((row * m + head) * dk + tl.expand_dims(i, -1)) * dv + j
    M = tl.load(place, mask=tl.expand_dims(is_row, -1) & is_column & (start > 0), other=0.0)
    pending = tl.where(start > 0, start - tl.load(base + row), 0)
    for p in range(0, pending):
        entry = row * WINDOW + p
        key = tl.load(keys + (entry * n + head % n) * dk + i, mask=is_row, other=0.0)
        delta = tl.load(deltas + (entry * m + head) * dv + j, mask=is_column, other=0.0)
        M = add_update(M, tl.load(decays + entry * m + head), key, delta)
    return M, place


@triton.jit(do_not_specialize=["S"])
def delta_kernel(
    q, k, v, log_decay, beta, matrix, base, keys, deltas, decays, input_pos, rows, counts, out,
    S, n, m, dk, dv, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gated delta rule for one value head of a batch row: grid (B * m, blocks of columns).

    counts (B,): the real tokens of each batch row, up to WINDOW, which are all pending afterwards.
    Reads and writes the matrix once.
    """
    b = (tl.program_id(0) // m).to(tl.int64)
    head = tl.program_id(0) % m
    count = tl.load(counts + b)
    if count == 0:
        return

    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row = i < dk
    is_column = j < dv
    row = cache_row(rows, b)
    start = tl.load(input_pos + b * S)
    M, place = load_matrix(matrix, base, keys, deltas, decays, row, head, start, i, j, n, m, dk, dv)
    tl.store(place, M, mask=is_row[:, None] & is_column[None, :])

    for t in range(0, count):
        token = b * S + t
        query = tl.load(q + (token * n + head % n) * dk + i, mask=is_row, other=0.0)
        key = tl.load(k + (token * n + head % n) * dk + i, mask=is_row, other=0.0)
        value = tl.load(v + (token * m + head) * dv + j, mask=is_column, other=0.0)
        decay = tl.exp(tl.load(log_decay + token * m + head))
        predicted = tl.sum(M * decay * key[:, None], 0)
        delta = tl.load(beta + token * m + head) * (value - predicted)
        M = add_update(M, decay, key, delta)
        tl.store(out + (token * m + head) * dv + j, tl.sum(M * query[:, None], 0), mask=is_column)
        entry = row * WINDOW + t
        tl.store(deltas + (entry * m + head) * dv + j, delta, mask=is_column)


@triton.jit
def product(a, b):
    """a b of float32 matrices, on tensor cores and with nearly the bits of float32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def first_chunk(count):
    """Where the first chunk begins, 0 or less, so that the last one ends after `count` tokens."""
    return count - tl.cdiv(count, WINDOW) * WINDOW


@triton.jit(do_not_specialize=["S"])
def delta_system_kernel(q, k, log_decay, beta, counts, inverses, weights, S, n, m, dk):
    """Solve the triangular systems of mixers.recurrent.delta_chunks for one chunk of a value head: grid
    (chunks, B * m).

    Writes, in (B,m,chunks,WINDOW,WINDOW) each: inverses, (I + system)^-1 with its columns multiplied
    by beta, which maps v - (what the matrix before the chunk predicts) to the deltas; and weights,
    (Q K^T) * ratio, with which the outputs read the deltas.
    """
    b = (tl.program_id(1) // m).to(tl.int64)
    head = tl.program_id(1) % m
    count = tl.load(counts + b)
    r = tl.arange(0, WINDOW)
    t = first_chunk(count) + tl.program_id(0) * WINDOW + r
    is_token = (t >= 0) & (t < count)
    token = b * S + t

    keys_keys = tl.zeros((WINDOW, WINDOW), tl.float32)
    queries_keys = tl.zeros((WINDOW, WINDOW), tl.float32)
    for first in range(0, dk, PART):
        i = first + tl.arange(0, PART)
        where = (token * n + head % n)[:, None] * dk + i[None, :]
        inside = is_token[:, None] & (i < dk)[None, :]
        K = tl.load(k + where, mask=inside, other=0.0)
        Q = tl.load(q + where, mask=inside, other=0.0)
        keys_keys += product(K, tl.trans(K))
        queries_keys += product(Q, tl.trans(K))

    g = tl.cumsum(tl.load(log_decay + token * m + head, mask=is_token, other=0.0))
    rate = tl.load(beta + token * m + head, mask=is_token, other=0.0)[:, None]
    ratio = tl.exp(tl.where(r[:, None] >= r[None, :], g[:, None] - g[None, :], float("-inf")))
    system = tl.where(r[:, None] > r[None, :], rate * keys_keys * ratio, 0.0)

    # Gaussian elimination: row c is final when its multiples are subtracted from the rows below it.
    # (The product (I - A)(I + A^2)(I + A^4)(I + A^8) is the inverse too, but it loses three digits
    # where keys are similar.)
    inverse = tl.where(r[:, None] == r[None, :], rate, 0.0)
    for c in range(0, WINDOW):
        factors = tl.sum(tl.where(r[None, :] == c, system, 0.0), 1)
        final = tl.sum(tl.where(r[:, None] == c, inverse, 0.0), 0)
        inverse -= factors[:, None] * final[None, :]

    chunk = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    place = (chunk * WINDOW + r[:, None]) * WINDOW + r[None, :]
    tl.store(inverses + place, inverse)
    tl.store(weights + place, queries_keys * ratio)


@triton.jit(do_not_specialize=["S"])
def delta_chunks_kernel(
    q, k, v, log_decay, matrix, base, keys, deltas, decays, input_pos, rows, counts, inverses, weights, out,
    S, n, m, dk, dv, PARTS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """delta_kernel for many tokens: mixers.recurrent.delta_chunks with what delta_system_kernel has solved.

    A matrix is (PARTS,PART,BLOCK_V) here. Products with it are computed in parts, each by one warp,
    and summed. With (dk,BLOCK_V) every warp would hold all keys, more than there are registers.
    """
    b = (tl.program_id(0) // m).to(tl.int64)
    head = tl.program_id(0) % m
    count = tl.load(counts + b)
    if count == 0:
        return

    i = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row = i < dk
    is_column = j < dv
    row = cache_row(rows, b)
    start = tl.load(input_pos + b * S)
    M, place = load_matrix(matrix, base, keys, deltas, decays, row, head, start, i, j, n, m, dk, dv)

    r = tl.arange(0, WINDOW)
    solved = tl.program_id(0).to(tl.int64) * tl.cdiv(S, WINDOW) * WINDOW * WINDOW + r[:, None] * WINDOW + r[None, :]
    for first in range(first_chunk(count), count, WINDOW):
        if first == count - WINDOW:
            tl.store(place, M, mask=is_row[:, :, None] & is_column[None, None, :])
        t = first + r
        token = b * S + t
        of_keys = (token * n + head % n)[None, :, None] * dk + i[:, None, :]  # (PARTS,WINDOW,PART)
        is_key = (t >= 0)[None, :, None] & is_row[:, None, :]
        of_values = (token * m + head)[:, None] * dv + j[None, :]  # (WINDOW,BLOCK_V)
        is_value = (t >= 0)[:, None] & is_column[None, :]
        K = tl.load(k + of_keys, mask=is_key, other=0.0)
        Q = tl.load(q + of_keys, mask=is_key, other=0.0)
        V = tl.load(v + of_values, mask=is_value, other=0.0)
        g = tl.cumsum(tl.load(log_decay + token * m + head, mask=t >= 0, other=0.0))
        g_last = tl.sum(tl.where(r == WINDOW - 1, g, 0.0), 0)
        scale = tl.exp(g)[:, None]

        predicted = scale * tl.sum(product(K, M), 0)
        delta = product(tl.load(inverses + solved), V - predicted)
        y = scale * tl.sum(product(Q, M), 0) + product(tl.load(weights + solved), delta)
        decayed = tl.exp(g_last - g)[:, None] * delta  # the updates at the end of the chunk
        decayed = tl.broadcast_to(decayed[None, :, :], (PARTS, WINDOW, BLOCK_V))
        M = tl.exp(g_last) * M + product(tl.permute(K, (0, 2, 1)), decayed)
        solved += WINDOW * WINDOW

        tl.store(out + of_values, y, mask=is_value)
        entry = row * WINDOW + first + r - tl.maximum(count - WINDOW, 0)
        of_deltas = (entry * m + head)[:, None] * dv + j[None, :]
        tl.store(deltas + of_deltas, delta, mask=is_value & (first == count - WINDOW))


@triton.jit(do_not_specialize=["S"])
def delta_commit_kernel(
    k, log_decay, base, keys, decays, input_pos, rows, counts, S, m, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the keys (of `width` elements) and decays of pending tokens, and the base: grid
    (B, WINDOW)."""
    b = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1)
    count = tl.load(counts + b)
    done = tl.maximum(count - WINDOW, 0)
    if p >= count - done:
        return

    row = cache_row(rows, b)
    token = b * S + done + p
    entry = row * WINDOW + p
    for first in range(0, width, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(keys + entry * width + i, tl.load(k + token * width + i, mask=i < width), mask=i < width)
    for first in range(0, m, BLOCK):
        i = first + tl.arange(0, BLOCK)
        decay = tl.exp(tl.load(log_decay + token * m + i, mask=i < m))
        tl.store(decays + entry * m + i, decay, mask=i < m)
    if p == 0:
        tl.store(base + row, tl.load(input_pos + b * S) + done)


# ---------------------------------------------------------------- tile sizes: default or tuned

MIN_TILES_PER_SPLIT = 8  # with fewer tiles, a program ends before enough loads are in flight


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # as many as an H100 has
    return torch.cuda.get_device_properties(device).multi_processor_count


def default_tiles(bits: int, N: int, C: int, processors: int) -> dict:
    """Tile sizes of a product with few rows, chosen by its shape and never by M.

    Tiles are wide, or narrow if wide ones would not occupy all multiprocessors. (A tile of 16
    outputs has one warp, which cannot unpack weights as fast as they arrive, so only weights that
    are not quantized have such tiles.) If narrow tiles are still too few, the columns are split,
    which costs a second launch for the sum."""
    enough = processors * 5 // 4
    blocks = [64, 32]
    if bits >= 16:
        blocks.append(16)
    block = next((block for block in blocks if triton.cdiv(N, block) >= enough), blocks[-1])

    split_k = 1
    programs = triton.cdiv(N, block)
    tiles = triton.cdiv(C * bits, TILE_BITS.value)
    while programs * split_k < enough and split_k < 8 and tiles >= 2 * split_k * MIN_TILES_PER_SPLIT:
        split_k *= 2

    stages = 4
    if block < 64:
        stages = 5 if bits < 16 else 6
    return {"BLOCK_N": block, "SPLIT_K": split_k, "num_warps": block // 16, "num_stages": stages}


def tile_key(bits: int, groupsize: int, N: int, C: int, gated: bool) -> str:
    shape = f"{N} x {C}"
    if gated:
        shape = f"2 x {shape}"
    return f"{bits} bits, groups of {groupsize}, {shape}"


def choose_tiles(bits: int, groupsize: int, N: int, C: int, gated: bool, device: torch.device) -> dict:
    key = tile_key(bits, groupsize, N, C, gated)
    return tuned_tiles(device).get(key) or default_tiles(bits, N, C, multiprocessors(device))


def expert_settings(bits: int, groupsize: int, N: int, C: int, gated: bool, device: torch.device) -> dict:
    """The settings of expert_kernel for a token's experts, which have N outputs together. It has the tiles
    of one product with as many outputs, but its columns are never split."""
    tiles = choose_tiles(bits, groupsize, N, C, gated, device)
    is_even = C % (TILE_BITS.value // bits) == 0
    settings = {"BITS": bits, "GROUPSIZE": groupsize, "GATED": gated, "GELU": False, "EVEN": is_even}
    return settings | {name: tiles[name] for name in ("BLOCK_N", "num_warps", "num_stages")}


def tuning_file(device: torch.device) -> Path:
    name = "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).replace(" ", "-")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastpath"
    return folder / f"triton-tiles-{triton.__version__}-{name}.json"


@functools.cache
def tuned_tiles(device: torch.device) -> dict:
    """The tiles that benchmarks/gpu.py has found on this device, by tile_key. The file is read once."""
    try:
        return json.loads(tuning_file(device).read_text())
    except (OSError, ValueError, RuntimeError):
        return {}


# ---------------------------------------------------------------- the operations: kernels.py declares them


def attention(q, k_cache, v_cache, input_pos, rows, slopes, window, scale):
    """kernels.attention, by decode_kernel for up to MAX_DECODE_TOKENS new tokens a row, or else by
    prefill_kernel."""
    B, S, H, E = q.shape
    K, T = k_cache.shape[1:3]
    group = H // K
    block = max(16, triton.next_power_of_2(E))
    if block > 256 and q.dtype == torch.float32:  # tiles of such heads do not fit into the registers
        return attention_torch(q, k_cache, v_cache, input_pos, rows, slopes, window, scale)
    settings = {"HEADS_PER_KV": group, "BLOCK_E": block, "WINDOW": window is not None}
    window = window or 0
    scale = scale * LOG2E.value
    q = q.contiguous()
    input_pos = input_pos.contiguous()
    out = torch.empty_like(q)

    with torch.cuda.device_of(q):
        if S <= MAX_DECODE_TOKENS:
            splits = SPLITS.value
            parts = q.new_empty(B, S, H, splits, E, dtype=torch.float32)
            stats = q.new_empty(B, S, H, splits, 2, dtype=torch.float32)
            settings |= decode_tiles(block, q.dtype)
            grid = (splits, triton.cdiv(S * group, settings["QUERIES"]), B * K)
            decode_kernel[grid](
                q, k_cache, v_cache, input_pos, rows, slopes, parts, stats, S, T, H, E, scale, window,
                **settings,
            )  # fmt: skip
            merge_kernel[(B * S * H,)](parts, stats, out, E, block, num_warps=4)
        else:
            settings |= prefill_tiles(block, q.dtype)
            grid = (triton.cdiv(S, settings["BLOCK_S"]), B * H)
            prefill_kernel[grid](
                q, k_cache, v_cache, input_pos, rows, slopes, out, S, T, H, E, scale, window,
                **settings,
            )  # fmt: skip
    return out


# The sizes below need at most 99 KB of shared memory on sm_80, because sm_86 and sm_89 have no more. (Decode with
# float32 heads of width 256 needs 104 KB.)


def decode_tiles(block_e: int, dtype: torch.dtype) -> dict:
    """QUERIES: queries in a tile; a query is one head of one token."""
    key_bytes = block_e * dtype.itemsize
    if block_e > 256:
        return {"QUERIES": 16, "num_warps": 8, "num_stages": 1}
    if key_bytes > 512:
        return {"QUERIES": 32, "num_warps": 8, "num_stages": 1}
    if key_bytes > 256:
        return {"QUERIES": 32, "num_warps": 8, "num_stages": 2}
    if key_bytes == 256:
        return {"QUERIES": 32, "num_warps": 4, "num_stages": 2}
    return {"QUERIES": 32, "num_warps": 4, "num_stages": 3}


def prefill_tiles(block_e: int, dtype: torch.dtype) -> dict:
    if dtype == torch.float32:  # without tensor cores, the operands of products fill the registers
        return {"BLOCK_S": 32, "WIDTH": 32, "num_warps": 4, "num_stages": 1 if block_e > 128 else 2}
    if block_e > 256:
        return {"BLOCK_S": 32, "WIDTH": 32, "num_warps": 8, "num_stages": 1}
    if block_e > 128:
        return {"BLOCK_S": 64, "WIDTH": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_S": 128, "WIDTH": 64, "num_warps": 8, "num_stages": 3}


def matmul_tiles(bits: int, dtype: torch.dtype) -> dict:
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2 if bits == 4 else 3}


def linear(x, weight, bias):
    """kernels.linear. A product with many rows is limited by arithmetic; torch's own is the fastest
    there."""
    if x.dim() > 2 and x.shape[-2] > MAX_DECODE_TOKENS:
        return F.linear(x, weight, bias)
    bits = 8 * weight.itemsize
    return fused_linear(x, weight, None, bias, None, None, len(weight), bits, 0, False, 0.0)


def fused_linear(x, weight, scales, bias, norm, residual, N, bits, groupsize, gated, eps):
    """x (...,C) @ weight^T, packed or not, to (...,N) in x's dtype. gated: weight has 2 N rows, gate
    and up.

    norm (C,): the weight of an RMSNorm before the product; residual (...,N) is added after it. With
    more than MAX_DECODE_TOKENS new tokens a row, only packed weights are supported, without norm,
    gate and residual."""
    if x.dim() > 2 and x.shape[-2] > MAX_DECODE_TOKENS:
        return matmul(x, weight, scales, bias, N, bits, groupsize)
    C = x.shape[-1]
    M = x.numel() // C
    x = x.contiguous()
    if residual is not None:
        residual = residual.contiguous()
    out = x.new_empty(*x.shape[:-1], N)

    tiles = choose_tiles(bits, groupsize, N, C, gated, x.device)
    block = tiles["BLOCK_N"]
    split_k = tiles["SPLIT_K"]
    is_even = C % (TILE_BITS.value // bits) == 0
    settings = {"BITS": bits, "GROUPSIZE": groupsize, "GATED": gated, "EVEN": is_even} | tiles
    parts = None
    squares = None
    if split_k > 1:
        sums = 2 if gated else 1
        parts = x.new_empty(split_k, sums, M, N, dtype=torch.float32)
        if norm is not None:
            squares = x.new_empty(split_k, M, dtype=torch.float32)

    grid = (triton.cdiv(M, TILE_M.value), triton.cdiv(N, block))
    with torch.cuda.device_of(x):
        linear_kernel[(*grid, split_k)](
            x, weight, scales, bias, norm, residual, out, parts, squares, M, N, C, eps, **settings
        )
        if split_k > 1:
            sizes = {"GATED": gated, "SPLIT_K": split_k, "BLOCK_N": block}
            reduce_kernel[grid](parts, squares, bias, residual, out, M, N, C, eps, **sizes)
    return out


def matmul(x, weight, scales, bias, N, bits, groupsize):
    """x (...,C) @ packed weight^T, (...,N), for many rows."""
    C = x.shape[-1]
    M = x.numel() // C
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], N)

    sizes = matmul_tiles(bits, x.dtype)
    grid = (triton.cdiv(M, sizes["BLOCK_M"]), triton.cdiv(N, sizes["BLOCK_N"]))
    sizes |= {"BITS": bits, "GROUPSIZE": groupsize}
    with torch.cuda.device_of(x):
        matmul_kernel[grid](x, weight, scales, bias, out, M, N, C, **sizes)
    return out


def choose_experts(logits, input_pos, X, k, normalized, scoring="softmax", choice_bias=None, scale=1.0, scales=None):
    """The experts (B,S,k) of tokens, of which each has X logits in logits (B,S,X or more), and their
    weights."""
    logits = logits.contiguous()
    input_pos = input_pos.contiguous()
    ids = logits.new_empty(*input_pos.shape, k, dtype=torch.int64)
    weights = torch.empty_like(ids, dtype=torch.float32)
    settings = {"NORMALIZED": normalized, "SIGMOID": scoring == "sigmoid"}
    settings |= {"BLOCK_X": triton.next_power_of_2(X), "BLOCK_K": triton.next_power_of_2(k)}
    with torch.cuda.device_of(logits):
        choose_kernel[(input_pos.numel(),)](
            logits, input_pos, choice_bias, scales, ids, weights, logits.shape[-1], X, k, scale, **settings, num_warps=1
        )
    return ids, weights


def plan_experts(ids, counts):
    """The tiles of expert_kernel for these choices: see plan_kernel. Adds to the counts."""
    X = len(counts) - 1
    R = ids.numel()
    # The most tiles there may be: in the last tile of an expert, at most TILE_M - 1 places are free.
    slots = (R + (TILE_M.value - 1) * min(R, X)) // TILE_M.value
    experts = ids.new_empty(slots, dtype=torch.int32)
    choices = ids.new_empty(slots, TILE_M.value, dtype=torch.int32)
    bins = max(64, triton.next_power_of_2(X + 1))  # one for each expert, and one for padding
    with torch.cuda.device_of(ids):
        plan_kernel[(X,)](ids, counts, experts, choices, R, X, slots, BLOCK_X=bins, num_warps=4)
    return experts, choices


def expert_mlp(
    x, ids, weights, counts, gate_up, gate_up_scales, down, down_scales, shared, logits, hidden, bits, groupsizes,
    gelu=False,
):  # fmt: skip
    """The outputs of a sparse layer for tokens x (B,S,D) that use the experts ids (B,S,k), -1 for none.

    gate_up and down: the weights of X experts, packed or not, of the sizes (2 F,D) and (D,F), where
    F = hidden. bits and groupsizes: of gate_up, and of down. gelu: they are GeGLU, and not SwiGLU.
    shared (B,S,D): the output of the shared expert, or None. logits (B,S,X+1): the last one is
    its gate's.
    """
    D = x.shape[-1]
    k = ids.shape[-1]
    X = len(counts) - 1
    R = ids.numel()
    x = x.contiguous()
    weights = weights.contiguous()
    logits = logits.contiguous()
    if shared is not None:
        shared = shared.contiguous()
    act = x.new_empty(R, hidden)
    products = x.new_empty(R, D)
    out = torch.empty_like(x)

    ids = ids.contiguous()
    experts, choices = plan_experts(ids, counts)
    slots = len(experts)
    with torch.cuda.device_of(x):
        settings = expert_settings(bits[0], groupsizes[0], k * hidden, D, True, x.device) | {"GELU": gelu}
        grid = (slots, triton.cdiv(hidden, settings["BLOCK_N"]))
        expert_kernel[grid](x, gate_up, gate_up_scales, experts, choices, act, R, k, hidden, D, **settings)
        settings = expert_settings(bits[1], groupsizes[1], k * D, hidden, False, x.device)
        grid = (slots, triton.cdiv(D, settings["BLOCK_N"]))
        expert_kernel[grid](act, down, down_scales, experts, choices, products, R, 1, D, hidden, **settings)
        block = min(1024, triton.next_power_of_2(D))
        expert_sum_kernel[(R // k, triton.cdiv(D, block))](
            products, ids, weights, shared, logits, out, X, D, k, block, num_warps=4
        )
    return out


def rotary(qkv, cos, sin, q_norm, k_norm, input_pos, rows, k_cache, v_cache, H, eps):
    """qkv (B,S,(H+2K)*E), cos and sin of Positions.ropes -> queries (B,S,H,E); keys and values go to
    the caches."""
    B, S, _ = qkv.shape
    K, T, E = k_cache.shape[1:]
    out = qkv.new_empty(B, S, H, E)
    qkv = qkv.contiguous()
    input_pos = input_pos.contiguous()
    if cos is not None:
        cos = cos.contiguous()
        sin = sin.contiguous()

    block = triton.next_power_of_2(E)
    with torch.cuda.device_of(qkv):
        rotary_kernel[(B * S, H + 2 * K)](
            qkv, cos, sin, q_norm, k_norm, input_pos, rows, k_cache, v_cache, out, S, T, H, K, E, eps,
            block, num_warps=1,
        )  # fmt: skip
    return out


def rms_norm(x, weight, eps):
    return layer_norm(x, weight, None, eps, False)


def layer_norm(x, weight, bias, eps, subtract_mean=True):
    D = x.shape[-1]
    rows = x.numel() // D
    x = x.contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(D)
    warps = min(16, max(1, block // 512))
    with torch.cuda.device_of(x):
        norm_kernel[(rows,)](x, weight, bias, out, D, eps, subtract_mean, block, num_warps=warps)
    return out


def gated_delta(q, k, v, log_decay, beta, matrix, base, keys, deltas, decays, input_pos, rows):
    """mixers.recurrent.gated_delta, for rows that occur once in a batch. It is not checked that a pass begins
    at a position that its state can go on from: the device would have to be waited for."""
    B, S, n, dk = q.shape
    m, dv = v.shape[2:]
    inputs = [x.contiguous() for x in (q, k, v, log_decay, beta)]
    input_pos = input_pos.contiguous()
    counts = (input_pos >= 0).sum(1, dtype=torch.int32)
    out = torch.zeros_like(v)
    block_v = 32
    grid = (B * m, triton.cdiv(dv, block_v))
    state = (matrix, base, keys, deltas, decays, input_pos, rows, counts)
    with torch.cuda.device_of(q):
        if S <= MAX_DECODE_TOKENS:
            block_k = triton.next_power_of_2(dk)
            delta_kernel[grid](*inputs, *state, out, S, n, m, dk, dv, block_k, block_v, num_warps=4)
        else:
            q, k, v, log_decay, beta = inputs
            chunks = triton.cdiv(S, DELTA_WINDOW)
            inverses = q.new_empty(B, m, chunks, DELTA_WINDOW, DELTA_WINDOW)
            weights = torch.empty_like(inverses)
            delta_system_kernel[(chunks, B * m)](
                q, k, log_decay, beta, counts, inverses, weights, S, n, m, dk, num_warps=1
            )
            parts = triton.next_power_of_2(triton.cdiv(dk, PART.value))
            delta_chunks_kernel[grid](
                q, k, v, log_decay, *state, inverses, weights, out, S, n, m, dk, dv, parts, block_v,
                num_warps=8, num_stages=2,
            )  # fmt: skip
        delta_commit_kernel[(B, DELTA_WINDOW)](
            inputs[1], inputs[3], base, keys, decays, input_pos, rows, counts, S, m, n * dk, 256
        )
    return out


def register(library: torch.library.Library, device: str):
    """Register these functions as the operations of a device. device: a dispatch key of torch, such
    as "CUDA"."""
    products = (linear, fused_linear, choose_experts, expert_mlp)
    for function in (attention, *products, rotary, rms_norm, layer_norm, gated_delta):
        library.impl(function.__name__, function, device)


register(LIBRARY, "CUDA")

# ---------------------------------------------------------------- sampling: sampling.py
#
# One program draws one token. It reads its logits once for the maximum and the log-sum-exp. If the
# temperature is not 0, it also writes the adjusted logits to x (B,S,V) float32, and goes over
# x for each filter and for the draw.


@triton.jit
def scramble(x):  # int64 or uint32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


@triton.jit
def noise_key(seed, position, start: tl.constexpr):
    key = scramble((seed & 0xFFFFFFFF) ^ start) ^ ((seed >> 32) & 0xFFFFFFFF)
    return scramble(scramble(scramble(key) ^ position)).to(tl.uint32)  # stream 0


@triton.jit
def exponential_noise(key, key_2, ids):
    """-log(1 - u) for uniform u. For u <= 1/2 it is the series of 2 atanh(u / (2 - u)), because log
    is inexact near 1."""
    bits = scramble(scramble(ids.to(tl.uint32) ^ key) ^ key_2)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    s = u / (2 - u)
    series = tl.zeros_like(u)
    for i in tl.static_range(9):
        series = series * (s * s) + 2 / (17 - 2 * i)
    return tl.where(u <= 0.5, s * series, -tl.log(tl.where(u <= 0.5, 0.5, 1 - u)))


@triton.jit
def load_order(x, start, V, largest, inverse, MASSES: tl.constexpr, BLOCK: tl.constexpr):
    """A block of logits as sampling.float_to_sortable_int (int64), and their masses (int64)."""
    at = start + tl.arange(0, BLOCK)
    logits = tl.load(x + at, mask=at < V, other=float("-inf"))
    bits = (logits + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    order = (bits ^ ((bits >> 63) & 0x7FFFFFFF)) + 2147483648
    if MASSES:
        mass = (tl.exp((logits - largest) * inverse) * 2.0**40).to(tl.int64)
    else:
        mass = (at < V).to(tl.int64)
    return order, mass


@triton.jit
def keep_top_mass(x, V, target, largest, inverse, MASSES: tl.constexpr, BLOCK: tl.constexpr):
    """sampling.top_mass: keep the fewest largest logits of x (V,) whose total mass reaches target; set
    others to -inf.

    A radix select finds the lowest logit that is kept, two bits at a time. MASSES: the mass of a
    logit is its weight; otherwise it is 1.
    """
    lowest = target * 0
    for i in range(16):
        shift = 30 - 2 * i
        one = tl.zeros((BLOCK,), tl.int64)
        two = one
        three = one
        step = (lowest * 0 + 1) << shift
        for start in range(0, V, BLOCK):
            order, mass = load_order(x, start, V, largest, inverse, MASSES, BLOCK)
            one += tl.where(order >= lowest + step, mass, 0)
            two += tl.where(order >= lowest + step * 2, mass, 0)
            three += tl.where(order >= lowest + step * 3, mass, 0)
        reached = (tl.sum(one) >= target).to(tl.int64) + (tl.sum(two) >= target).to(tl.int64)
        lowest += step * (reached + (tl.sum(three) >= target).to(tl.int64))

    above = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        order, mass = load_order(x, start, V, largest, inverse, MASSES, BLOCK)
        above += tl.where(order > lowest, mass, 0)
    missing = target - tl.sum(above)  # the mass that the logits equal to the lowest must add

    for start in range(0, V, BLOCK):
        order, mass = load_order(x, start, V, largest, inverse, MASSES, BLOCK)
        ties = tl.where(order == lowest, mass, 0)  # they are kept in the order of their ids
        kept = (order > lowest) | ((order == lowest) & (tl.cumsum(ties) - ties < missing))
        missing -= tl.sum(ties)
        at = start + tl.arange(0, BLOCK)
        tl.store(x + at, float("-inf"), mask=(at < V) & ~kept)
    tl.debug_barrier()


@triton.jit
def adjust(
    y, at, V, n, counts, drafted, repetition, frequency, presence, has_bias, logit_bias, has_mask, masks
):  # fmt: skip
    """The logits y (BLOCK,) of the tokens `at`, after penalties, biases and masks. drafted: the n
    tokens after those that counts has."""
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        count = tl.load(counts + at, mask=at < V, other=0)
        for i in range(n):
            count += tl.where(tl.load(drafted + i) == at, 2, 0)
        y = tl.where(count > 0, tl.where(y < 0, y * repetition, y / repetition), y)
        y = y - (count >> 1).to(tl.float32) * frequency - tl.where(count > 1, presence, 0.0)
    if has_bias:
        y += tl.load(logit_bias + at, mask=at < V, other=0.0)
    if has_mask:
        bits = tl.load(masks + at // 32, mask=at < V, other=0) >> (at % 32)
        y = tl.where((bits & 1) != 0, y, float("-inf"))
    return y


@triton.jit
def draw(
    x, V, largest, temperature, top_k, top_p, min_p, seed, row, position, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply top-k, top-p and min-p to the adjusted logits x (V,), of which largest is one, and draw
    a token id."""
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    min_ratio = tl.load(min_p + row)
    seed = tl.load(seed + row)
    inverse = tl.minimum(1 / temperature, 3.4028234663852886e38)  # the largest float32
    if (k > 0) & (k < V):
        keep_top_mass(x, V, k, largest, inverse, False, BLOCK)
    if p < 1:
        total = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, V, BLOCK):
            order, mass = load_order(x, start, V, largest, inverse, True, BLOCK)
            total += mass
        target = tl.maximum((tl.sum(total).to(tl.float32) * p).to(tl.int64), 1)
        keep_top_mass(x, V, target, largest, inverse, True, BLOCK)

    key = noise_key(seed, position, 0x3C6EF372)
    key_2 = noise_key(seed, position, 0x1B873593)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -1.0, tl.float32)
    best_at = lane
    for start in range(0, V, BLOCK):
        at = start + lane
        y = tl.load(x + at, mask=at < V, other=float("-inf"))
        weight = tl.exp((y - largest) * inverse)
        ratio = tl.where(weight < min_ratio, 0.0, weight) / exponential_noise(key, key_2, at)
        best_at = tl.where(ratio > best, at, best_at)
        best = tl.where(ratio > best, ratio, best)
    return tl.min(tl.where(best == tl.max(best, 0), best_at, V), 0)


@triton.jit(do_not_specialize=["S", "V", "W", "P", "words", "D", "b_stride", "s_stride"])
def sample_kernel(
    logits, rows, position, drafted, seed, temperature, top_k, top_p, min_p, repetition_penalty,
    frequency_penalty, presence_penalty, counts, biased, logit_bias, masks, mask_start, x, ids,
    logprobs, S, V, W, P, words, D, b_stride, s_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """sampling.sample: grid (B * S,). A lane reads every BLOCK-th logit. It keeps the first of its
    largest adjusted logits, and the running m = max(x) and l = sum exp(x - m) of its raw logits x."""
    b = tl.program_id(0) // S
    s = tl.program_id(0) % S
    lane = tl.arange(0, BLOCK)
    place = tl.load(position + b)
    row = tl.load(rows + b)
    logits += b.to(tl.int64) * b_stride + s.to(tl.int64) * s_stride
    x += tl.program_id(0).to(tl.int64) * V
    repetition = tl.load(repetition_penalty + row)
    frequency = tl.load(frequency_penalty + row)
    presence = tl.load(presence_penalty + row)
    temperature = tl.load(temperature + row)
    has_bias = tl.load(biased + row)
    first_masked = tl.load(mask_start + row)
    counts += row * W
    logit_bias += row * W
    mask = tl.maximum(place + s - first_masked, 0)  # which of the row's P masks
    masks += (row * P + mask) * words
    token = tl.full((), -1, tl.int64)
    logprob = tl.full((), float("nan"), tl.float32)

    if place > 0:
        m = tl.full((BLOCK,), -3.4e38, tl.float32)
        l = tl.zeros((BLOCK,), tl.float32)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_at = lane
        for start in range(0, V, BLOCK):
            at = start + lane
            y = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
            m_new = tl.where(y > m, y, m)
            l = l * tl.exp(m - m_new) + tl.exp(y - m_new)  # stays NaN if any y is NaN
            m = m_new
            y = adjust(
                y, at, V, D - S + 1 + s, counts, drafted + b * D, repetition, frequency, presence,
                has_bias, logit_bias, first_masked >= 0, masks,
            )  # fmt: skip
            best_at = tl.where(y > best, at, best_at)
            best = tl.where(y > best, y, best)
            if temperature > 0:
                tl.store(x + at, y, mask=at < V)
        tl.debug_barrier()

        m_all = tl.max(m, 0)
        largest = tl.max(best, 0)
        log_sum = tl.log(tl.sum(l * tl.exp(m - m_all), 0))
        if (largest > float("-inf")) & (largest < float("inf")) & (log_sum == log_sum):
            chosen = tl.min(tl.where(best == largest, best_at, V), 0)
            if temperature > 0:
                chosen = draw(x, V, largest, temperature, top_k, top_p, min_p, seed, row, place + s, BLOCK)
            token = chosen.to(tl.int64)
            logprob = (tl.load(logits + chosen).to(tl.float32) - m_all) - log_sum

    tl.store(ids + tl.program_id(0), token)
    tl.store(logprobs + tl.program_id(0), logprob)


SAMPLE_BLOCK = 2048  # logits that a program reads at a time, with 16 warps


def sample(logits, rows, position, drafted, *settings):
    """sampling.sample in one launch. Row and token indices are not checked, since that would
    synchronize the device."""
    B, S, V = logits.shape
    if logits.stride(2) != 1:
        logits = logits.contiguous()
    ids = rows.new_empty(B, S)
    logprobs = logits.new_empty(B, S, dtype=torch.float32)
    x = logits.new_empty(B, S, V, dtype=torch.float32)

    named = sampling.Sampling(*settings)
    W = named.counts.shape[1]
    P, words = named.masks.shape[1:]
    D = drafted.shape[1]
    b_stride, s_stride = logits.stride()[:2]
    tensors = [tensor.contiguous() for tensor in (rows, position, drafted, *settings)]
    with torch.cuda.device_of(logits):
        sample_kernel[(B * S,)](
            logits, *tensors, x, ids, logprobs, S, V, W, P, words, D, b_stride, s_stride,
            BLOCK=SAMPLE_BLOCK, num_warps=16,
        )  # fmt: skip
    return ids, logprobs


# The first arguments of sample_kernel are the arguments of the schema, in this order.
if sample_kernel.arg_names[: len(sampling.ARGUMENTS)] == sampling.ARGUMENTS:
    LIBRARY.impl("sample", sample, "CUDA")
else:
    print_status("sample_kernel in kernels_triton.py does not fit its schema: the reference runs")
LIBRARY.impl("probabilities", sampling.probabilities_reference, "CUDA")

# ---------------------------------------------------------------- packing


def pack_words(q: Tensor, bits: int) -> Tensor:
    """q (N,C), int8 or uint8, to words int32 (tiles,N,32); the columns are padded with zeros."""
    fields = 32 // bits
    q = F.pad(q, (0, -q.shape[1] % (32 * fields)))
    q = q.unflatten(1, (-1, fields, 32))  # (N,tiles,fields,32)
    words = q[:, :, 0].int() & (2**bits - 1)
    for j in range(1, fields):
        words |= (q[:, :, j].int() & (2**bits - 1)) << (bits * j)
    return words.transpose(0, 1).contiguous()


def unpack_words(words: Tensor, bits: int, C: int) -> Tensor:
    """words (tiles,...,32) to q (...,C), int32."""
    high = 32 - bits  # shifting up and down extends the sign of an 8-bit field
    fields = [words << (high - bits * j) >> high for j in range(32 // bits)]
    q = torch.stack(fields, -2).movedim(0, -3).flatten(-3)[..., :C]
    if bits == 4:
        return q & 15
    return q


def pack_scales(scales: Tensor, mins: Tensor | None, each: int) -> Tensor:
    """Scales float16 (N,G) to (tiles,N,groups of a tile): float16, or with mins int32, whose upper
    half is the min."""
    if mins is not None:
        scales = torch.stack([scales, mins], -1).view(torch.int32).squeeze(-1)
    scales = F.pad(scales, (0, -scales.shape[1] % each))
    return scales.unflatten(1, (-1, each)).transpose(0, 1).contiguous()


def unpack_scales(packed: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
    """(tiles,...,each) to scales and mins or None, (...,groups) each."""
    values = packed.movedim(0, -2).flatten(-2)[..., :groups]
    if values.dtype == torch.float16:
        return values, None
    pairs = values.contiguous().view(torch.float16).unflatten(-1, (-1, 2))
    return pairs[..., 0], pairs[..., 1]


def split_experts(packed: Tensor, n_expert: int) -> Tensor:
    """The packed tensor (tiles,n_expert * N,...) of a stack, as (n_expert,tiles,N,...). A single matrix
    stays as it is."""
    if n_expert == 1:
        return packed
    return packed.unflatten(1, (n_expert, -1)).transpose(0, 1).contiguous()


# ---------------------------------------------------------------- install the kernels in a model


class PackedLinear(MatrixLayer):
    """A quantized linear layer, with its weights packed for the kernels. A stack of experts has the
    packed matrices of the experts, one after the other."""

    def __init__(self, plain: QuantizedLinear):
        super().__init__(plain.in_features, plain.out_features)
        self.stored_as = plain.stored_as
        self.n_expert = plain.n_expert
        self.bits = plain.format.bits
        self.groupsize = plain.scheme.groupsize  # 0: one scale a row
        groups = 1  # of a tile
        if self.groupsize:
            groups = TILE_BITS.value // self.bits // self.groupsize
        levels, scales, mins = plain.format.decode(plain.parts(), self.in_features)
        self.register_buffer("weight", split_experts(pack_words(levels, self.bits), self.n_expert))
        self.register_buffer("scales", split_experts(pack_scales(scales, mins, groups), self.n_expert))
        self.register_buffer("bias", plain.bias)

    def forward(self, x: Tensor):
        return apply_linear(self, x)

    def multiply_expert(self, x: Tensor, e: int):
        N = self.out_features // self.n_expert
        weight = self.weight.view(self.n_expert, -1, N, 32)[e]
        scales = self.scales.view(self.n_expert, -1, N, self.scales.shape[-1])[e]
        return torch.ops.fastpath.fused_linear.default(
            x, weight, scales, None, None, None, N, self.bits, self.groupsize, False, 0.0
        )


class PackedEmbedding(PackedLinear):
    """A quantized embedding; `logits` uses the same weights as the output head."""

    logits = PackedLinear.forward

    def forward(self, tokens: Tensor):
        C = self.in_features
        groupsize = self.groupsize or C
        q = unpack_words(self.weight[:, tokens], self.bits, C)  # (B,S,C)
        scales, mins = unpack_scales(self.scales[:, tokens], -(-C // groupsize))
        y = q * repeat_groups(scales, groupsize, C)
        if mins is not None:
            y = y + repeat_groups(mins, groupsize, C)
        return y


class FusedExperts:
    """Runs a sparse layer for experts.SparseMLP.run, without waiting for the device.

    It takes seven launches (x in float32, the router, the choice, the plan, gate_up, down, the sum), two
    more for a shared expert, and one for each product of these or of the router whose columns are split.
    """

    def __init__(self, experts: nn.Module):
        self.experts = experts
        self.router = experts.router.weight
        if experts.shared is not None:  # the gate of the shared expert is one more row
            self.router = torch.cat([self.router, experts.shared_gate.weight])

    def __call__(self, x: Tensor, input_pos: Tensor, counts: Tensor) -> Tensor:
        ops = torch.ops.fastpath
        experts = self.experts
        gate_up = experts.gate_up
        down = experts.down
        # (B,S,X), or with a shared expert (B,S,X+1)
        logits = ops.linear.default(experts.router_input(x), self.router, None)
        x = experts.normed(x)
        config = experts.config
        choice_bias = None if experts.choice is None else experts.choice.bias
        ids, weights = ops.choose_experts.default(
            logits,
            input_pos,
            experts.X,
            experts.k,
            experts.normalized,
            config.scoring,
            choice_bias,
            config.scale,
            None if experts.scales is None else experts.scales.weight,
        )
        shared = None
        if experts.shared is not None:
            shared = self.shared_mlp(x)
        bits, groupsizes, scales = zip(storage_of(gate_up), storage_of(down))
        return ops.expert_mlp.default(
            x, ids, weights, counts, gate_up.weight, scales[0], down.weight, scales[1], shared, logits,
            down.in_features, bits, groupsizes, experts.kind == "geglu",
        )  # fmt: skip

    def shared_mlp(self, x: Tensor) -> Tensor:
        shared = self.experts.shared
        if isinstance(shared.gate_up, StackedLinear):  # gate and up have different formats
            return shared(x)
        return apply_linear(shared.down, apply_linear(shared.gate_up, x, gated=True))


class TritonInstaller(Installer):
    """Makes a model on a GPU (`is_supported`) use the kernels. The options have no effect here: they are
    for cpu/install.py.

    Quantized weights are repacked on the device, a layer at a time. In a module that is not a
    Transformer, only the quantized layers use the kernels.
    """

    formats = ("int8", "int4")

    def pack(self, name: str):
        layer = self.model.get_submodule(name)
        names = [name]
        if isinstance(layer, StackedLinear):
            names = [f"{name}.{i}" for i in range(len(layer))]
        for name in names:
            plain = self.model.get_submodule(name)
            if isinstance(plain, QuantizedLinear):
                kind = PackedEmbedding if isinstance(plain, QuantizedEmbedding) else PackedLinear
                self.model.set_submodule(name, kind(plain))

    def finish(self) -> Backend:
        model = self.model
        find_kernels("cuda")
        set_aside(KERNELS.get("cuda", set()), "cuda")
        backend = Backend(name="triton")
        if isinstance(model, Transformer):
            for block in model.all_blocks:
                for layer in block.sparse:
                    prepare_experts(layer)
        # A split model adds up the ranks' parts inside the blocks. In float16, the product of an
        # activation and a norm's weight may overflow, because the kernels divide by the norm only
        # after the matrix product.
        if not isinstance(model, Transformer) or not can_fuse(model.config):
            return backend
        if model.shard.ranks > 1 or model.dtype == torch.float16:
            return backend
        return replace(
            backend,
            run_blocks=fused_blocks,
            max_fused_tokens=MAX_DECODE_TOKENS,
            thread_invariant=True,
        )


def prepare_experts(experts: nn.Module):
    """Let the kernels run passes of few tokens through a sparse layer, unless its gate and up have
    different formats, or its config has a field that they do not know."""
    if isinstance(experts.gate_up, StackedLinear) or not uses_only(experts.config, FUSED_EXPERT_FIELDS):
        return
    experts.run = FusedExperts(experts)
    experts.max_run_tokens = MAX_DECODE_TOKENS


def is_supported(device: torch.device) -> bool:
    """Whether a device can run the kernels."""
    if device.type != "cuda":
        return INTERPRETED.value
    return torch.cuda.get_device_capability(device) >= (8, 0)


def can_fuse(config: Config) -> bool:
    """Whether `fused_blocks` supports this architecture. Other models run operation by operation."""
    if config.norm != "rms" or config.mlp != "swiglu" or config.post_norm_residual:
        return False
    if config.experts is not None and config.experts.beside_mlp:
        return False
    if unusable_operations() & {"blocks", "fused_linear", "rotary", "attention"}:
        return False
    return uses_only(config, (*FUSED_FIELDS, "experts"))


def fused_blocks(blocks, x: Tensor, ropes, input_pos: Tensor, rows: Tensor | None, own_inputs, layers: slice) -> Tensor:
    """The blocks of `layers` for up to MAX_DECODE_TOKENS tokens a row, in few launches: Backend.run_blocks.
    own_inputs: None."""
    for i in range(len(blocks))[layers]:
        x = fused_block(blocks[i], x, ropes[blocks[i].rope_table], input_pos, rows)
    return x


def fused_block(block: Block, x: Tensor, rope, input_pos: Tensor, rows: Tensor | None) -> Tensor:
    ops = torch.ops.fastpath
    attention = block.mixer
    config = attention.config
    cache = attention.cache
    slopes = attention.positions.slopes
    cos, sin = rope or (None, None)
    q_norm = None
    k_norm = None
    if attention.q_norm is not None:
        q_norm = attention.q_norm.weight
        k_norm = attention.k_norm.weight

    qkv = apply_linear(attention.qkv, x, norm=block.attention_norm)  # (B,S,(H+2K)*E)
    q = ops.rotary.default(
        qkv, cos, sin, q_norm, k_norm, input_pos, rows, cache.k, cache.v, config.n_head, config.norm_eps
    )  # (B,S,H,E)
    y = ops.attention.default(q, cache.k, cache.v, input_pos, rows, slopes, attention.window, attention.scale)
    x = apply_linear(attention.out, y.flatten(2), residual=x)
    if block.sparse:
        return x + block.mlp(block.mlp_norm(x), input_pos)
    h = apply_linear(block.mlp.gate_up, x, norm=block.mlp_norm, gated=True)  # (B,S,F)
    return apply_linear(block.mlp.down, h, residual=x)


def apply_linear(layer: nn.Module, x: Tensor, norm: nn.Module | None = None, residual=None, gated=False) -> Tensor:
    """A PackedLinear or a Linear, with an optional RMSNorm before it and SwiGLU or a residual after
    it."""
    bits, groupsize, scales = storage_of(layer)
    factor = None
    eps = 0.0
    if norm is not None:
        factor = norm.weight
        eps = norm.eps
    N = layer.out_features
    if gated:
        N = N // 2
    return torch.ops.fastpath.fused_linear.default(
        x, layer.weight, scales, layer.bias, factor, residual, N, bits, groupsize, gated, eps
    )


def storage_of(layer: nn.Module) -> tuple[int, int, Tensor | None]:
    """The bits of a weight, the columns that share a scale, and the scales, of a PackedLinear or a
    Linear."""
    if isinstance(layer, PackedLinear):
        return layer.bits, layer.groupsize, layer.scales
    return 8 * layer.weight.itemsize, 0, None
