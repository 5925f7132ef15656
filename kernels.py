"""The operations worth writing by hand. Each has a reference in plain torch, which is its specification, and a schema,
by which kernels_cpu.py (C++) and kernels_triton.py (GPUs) register theirs; the dispatcher picks by the tensors' device.

Read down: which implementation runs, attention, linear layers and norms, the operations that only one kind of device
has, quantized weights, top-k and top-p, noise. Knows nothing of models or files. Shapes are named as in model.py: B
rows, S new tokens, T cache slots, H query heads, K key/value heads, E head width; of a matrix N rows (outputs), K
columns (inputs), G groups of columns.

Importing this file runs one check, `guard_amx`: it must come before the first matmul of the process.
"""

import os
import signal
import time
from dataclasses import fields

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------- which implementation runs

LIBRARY = torch.library.Library("fastpath", "DEF")
DEVICES_WITH_KERNELS = set()  # "cpu" once kernels_cpu.py has loaded its operations, "cuda" likewise
MAX_DECODE_TOKENS = 16  # new tokens a row up to which a product is bound by reading the weights; more are a prefill


def define(schema, fake=None):
    """Declare an operation torch.ops.fastpath.NAME(...), which kernels_cpu.py and kernels_triton.py implement.

    fake: a function of the same arguments that returns empty tensors in the results' shapes, for torch.compile.
    """
    LIBRARY.define(schema)
    if fake is not None:
        torch.library.register_fake(f"fastpath::{schema.partition('(')[0]}", fake, lib=LIBRARY)


def has_kernels(device):
    """Whether operations on this device are ours; else the references run, and torch.compile sees through them."""
    return device.type in DEVICES_WITH_KERNELS


# The fields of a model's Config that the operations for whole blocks have heard of.
FUSED_FIELDS = (
    "n_layer", "n_head", "n_kv_head", "head_dim", "dim", "hidden_dim", "vocab_size", "max_seq_length", "norm_eps",
    "rope_base", "rope_scaling", "tied_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sliding_window",
    "sliding_layers", "norm", "mlp", "alibi", "embedding_norm", "post_norm_residual", "n_token",
)  # fmt: skip


def uses_only(config, known):
    """Whether a dataclass leaves every field at its default that is not in `known`. Operations for whole blocks ask, so
    that they never run a model with a switch that they have not heard of."""
    others = [field for field in fields(config) if field.name not in known]
    return all(getattr(config, field.name) == field.default for field in others)


def empty_like_first(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- attention

define(
    "attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor input_pos, Tensor? rows, Tensor? slopes, int? window)"
    " -> Tensor",
    empty_like_first,
)
QUERY_BLOCK = 128  # queries: scores of (B,H,128,T) are small beside a model, products of 128 rows are still efficient


def attention(q, k_cache, v_cache, input_pos, rows=None, slopes=None, window=None):
    """Causal attention of new tokens over a static KV cache, at any place in any row.

    q: (B,S,H,E). k_cache, v_cache: (R,K,T,E), already holding the new tokens' keys and values; H is a multiple of K.
    input_pos: (B,S) int64, the position (= cache slot) of each token in its own row; -1 is padding.
    rows: (B,) int64, the cache row of each batch row; None means rows 0..B-1.
    slopes: (H,) float32, ALiBi (arXiv:2108.12409); the score of slot t gains slope * (t - position). Softmax does not
      see what is added to all scores of a query alike, so slope * (t - the row's newest position) serves every query:
      a row of T numbers a head, no (H,S,T) tensor.
    window: int, a token sees only the last `window` positions, its own included.

    Returns (B,S,H,E) in q's dtype; padding gives zeros. Slots that no token of the row sees may hold anything, NaN too.
    """
    if has_kernels(q.device):
        return torch.ops.fastpath.attention.default(q, k_cache, v_cache, input_pos, rows, slopes, window)
    return attention_reference(q, k_cache, v_cache, input_pos, rows, slopes, window)


def attention_reference(q, k_cache, v_cache, input_pos, rows=None, slopes=None, window=None):
    """Eager on CPU goes by blocks of queries, each of which reads only the slots up to its furthest position: twice as
    fast as torch's own at S = 512 in bfloat16. A compiled graph has fixed shapes and reads all T."""
    B, S, H, E = q.shape
    eager_cpu = q.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager_cpu and S > QUERY_BLOCK:
        blocks = [slice(start, start + QUERY_BLOCK) for start in range(0, S, QUERY_BLOCK)]
        parts = [attention_reference(q[:, b], k_cache, v_cache, input_pos[:, b], rows, slopes, window) for b in blocks]
        return torch.cat(parts, dim=1)
    newest = input_pos.amax(1)  # (B,)
    oldest, last, even = 0, k_cache.shape[2], False
    if eager_cpu:  # here a look at the numbers costs nothing, and saves passes over what they show to be whole
        oldest, last = max(int(input_pos.min()), 0), max(int(newest.max()), 0)
        even = window is None and int(newest.min()) == last  # every row sees all slots that are read
        k_cache, v_cache = k_cache[:, :, : last + 1], v_cache[:, :, : last + 1]
        k_cache = k_cache[:B].contiguous() if rows is None else k_cache  # of a slice, bf16 products are 5 times slower
    k, v = (k_cache[:B], v_cache[:B]) if rows is None else (k_cache[rows], v_cache[rows])  # (B,K,T,E)
    slot = torch.arange(k.shape[2], device=q.device)
    bias = None if slopes is None else (slot - newest[:, None, None]).float() * slopes[:, None]  # (B,H,T)
    if even and S == 1:
        return softmax_attention(q, k, v, bias=bias)

    visible = slot <= input_pos[:, :, None]  # (B,S,T), nothing for padding
    if window is not None:
        visible &= slot > input_pos[:, :, None] - window
    if even:
        visible = visible[:, :, oldest:]  # before the first of these tokens all is seen
    else:
        seen = visible.any(1)[:, None, :, None]  # (B,1,T,1)
        k = torch.where(seen, k, 0)  # a slot of weight zero reaches the output all the same if it holds NaN:
        v = torch.where(seen, v, 0)  # NaN - inf in the scores, 0 * NaN in the sum
    # Of no slots padding would get NaN for weights, and with an odd number of slots torch's bfloat16 product lets the
    # first of them into the row before.
    visible = visible | (input_pos < 0)[:, :, None]

    if S > 16 and slopes is None and not eager_cpu:  # torch's own FlashAttention, which never builds the scores
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, visible[:, None], enable_gqa=True).transpose(1, 2)
    else:
        out = softmax_attention(q, k, v, visible, bias)
    return torch.where((input_pos >= 0)[:, :, None, None], out, 0)  # (B,S,H,E)


def softmax_attention(q, k, v, visible=None, bias=None):
    """Softmax(q k^T / sqrt(E) + bias) v over the visible slots, in the open; scores in float32.

    q (B,S,H,E); k, v (B,K,T,E); visible (B,S,<=T) of the last slots (those before are seen), None: all are; bias
    (B,H,T) float32 or None. The H/K query heads of a group share K and V unrepeated.
    """
    B, S, H, E = q.shape
    K, T = k.shape[1], k.shape[2]
    q = q.view(B, S, K, H // K, E).permute(0, 2, 3, 1, 4).reshape(B, K, -1, E)  # (B,K,H/K*S,E)
    scores = (q @ k.transpose(2, 3)).view(B, H, S, T).float()
    scores = scores * E**-0.5 if bias is None else torch.add(bias[:, :, None], scores, alpha=E**-0.5)
    if visible is not None:
        # Not -inf: padding would have weights of NaN, which torch's bfloat16 product can spread to other rows.
        scores[..., T - visible.shape[2] :].masked_fill_(~visible[:, None], torch.finfo(torch.float32).min)
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    out = weights.view(B, K, -1, T) @ v  # (B,K,H/K*S,E)
    return out.view(B, H, S, E).transpose(1, 2)  # (B,S,H,E)


# ---------------------------------------------------------------- linear layers and norms


def empty_with_columns(x, N):
    return x.new_empty((*x.shape[:-1], N))


define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", lambda x, w, bias: empty_with_columns(x, len(w)))


def linear(x, weight, bias=None):
    """x (...,K) times weight (N,K) transposed, plus bias (N,); (...,N). With S > MAX_DECODE_TOKENS all are torch's."""
    if has_kernels(x.device):
        return torch.ops.fastpath.linear.default(x, weight, bias)
    return F.linear(x, weight, bias)


define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", empty_like_first)


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""
    if has_kernels(x.device):
        return torch.ops.fastpath.rms_norm.default(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


define("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", empty_like_first)


def layer_norm(x, weight, bias, eps):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (arXiv:1607.06450)."""
    if has_kernels(x.device):
        return torch.ops.fastpath.layer_norm.default(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


# ---------------------------------------------------------------- what only one kind of device has
#
# Called by kernels_cpu.py and kernels_triton.py alone, which say what they do. Weights are in a layout of their own.

# CPU. exact: activations are not quantized to 8 bits. A handle stands for a block's weights, prepared once.
define(
    "linear_int8(Tensor x, Tensor weight, Tensor scales, int groupsize, Tensor? bias, int N, bool exact) -> Tensor",
    lambda x, *rest: empty_with_columns(x, rest[-2]),
)
define(
    "linear_int4(Tensor x, Tensor weight, Tensor scales, Tensor mins, int groupsize, Tensor? bias, int N, bool exact)"
    " -> Tensor",
    lambda x, *rest: empty_with_columns(x, rest[-2]),
)
BLOCK_SETTINGS = "int? window, float eps, bool gated, bool post_norm_residual, bool exact"
define(f"prepare_block(Tensor?[] weights, int[] sizes, {BLOCK_SETTINGS}) -> int")
define("release_blocks(int[] handles) -> ()")
define(
    "blocks(Tensor x, Tensor input_pos, Tensor? rows, Tensor? cos, Tensor? sin, Tensor? slopes, "
    "Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, int[] handles) -> Tensor",
    empty_like_first,
)

# GPU. A product with RMSNorm before it, bias, SwiGLU and residual after it; RoPE with the write to the caches.
define(
    "fused_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, Tensor? norm, Tensor? residual, "
    "int N, int bits, int group, bool gated, float eps) -> Tensor",
    lambda x, weight, scales, bias, norm, residual, N, *rest: empty_with_columns(x, N),
)
define(
    "rotary(Tensor qkv, Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, Tensor input_pos, Tensor? rows, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, int H, float eps) -> Tensor",
    lambda qkv, *rest: qkv.new_empty((*qkv.shape[:2], rest[-2], rest[-3].shape[-1])),
)

# ---------------------------------------------------------------- quantized weights

BLOCK = 1 << 22  # weights that are unpacked at once: what is written is still in the cache when it is read


def unpack_int8(weight, scales, groupsize):
    """weight int8 (...,K), scales float16 (...,G) -> q * scale, (...,K) float32."""
    return unpack_levels(weight, scales, None, groupsize)


def unpack_int4(packed, scales, mins, groupsize, K):
    """packed uint8 (...,ceil(K/2)), scales and mins float16 (...,G) -> q * scale + min, (...,K) float32."""
    return unpack_levels(unpack_nibbles(packed, K), scales, mins, groupsize)


def unpack_nibbles(packed, K):
    """uint8 (...,ceil(K/2)) -> uint8 (...,K) of 0..15; the low nibble is the even column."""
    q = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return q if q.shape[-1] == K else q[..., :K]


def unpack_levels(q, scales, mins, groupsize):
    """Levels q (...,K), scales (...,G), mins (...,G) or None -> q * scale + min, (...,K) float32."""
    K = q.shape[-1]
    w = q.float() * spread(scales, groupsize, K)
    return w if mins is None else w + spread(mins, groupsize, K)


def spread(numbers, groupsize, K):
    """A number a group, (...,G), to one a column, (...,K) float32; the last group may be shorter."""
    if K % groupsize == 0:
        return numbers.float()[..., None].expand(*numbers.shape, groupsize).flatten(-2)
    # The same and a slice of it, which torch 2.13 compiles to reads beyond the end.
    return numbers.float()[..., torch.arange(K, device=numbers.device) // groupsize]


def linear_int8(x, weight, scales, groupsize, bias=None):
    """x (...,K) times unpack_int8(weight (N,K), scales (N,G)) transposed, plus bias (N,); (...,N) in x's dtype."""

    def part(rows):
        return F.linear(x, unpack_int8(weight[rows], scales[rows], groupsize).to(x.dtype))

    return in_blocks(part, weight.shape[0], weight.shape[1], bias)


def linear_int4(x, packed, scales, mins, groupsize, bias=None):
    """The same for packed (N,ceil(K/2)), scales and mins (N,G)."""
    K = x.shape[-1]

    def part(rows):
        return F.linear(x, unpack_int4(packed[rows], scales[rows], mins[rows], groupsize, K).to(x.dtype))

    return in_blocks(part, packed.shape[0], K, bias)


def in_blocks(part, N, K, bias):
    """All N columns of a product that part(slice) makes some of, so that no whole matrix is ever unpacked; in a
    compiled graph, which fuses, at once."""
    step = N if torch.compiler.is_compiling() else max(1, BLOCK // K)
    y = torch.cat([part(slice(start, start + step)) for start in range(0, N, step)], dim=-1)
    return y if bias is None else y + bias


# ---------------------------------------------------------------- top-k and top-p


def top_mass(order, mass, target):
    """The shortest run of the largest entries whose masses reach target; of equals the first come first; (...,V) bool.

    order (...,V) int64 in [0,2^32), mass (...,V) int64 >= 0, target (...,1) int64 >= 1. Sums of integers are the same
    in any order, so every implementation agrees. The lowest entry of the run is found by its bits, 8 at a time, in a
    histogram of mass over them: never a sort. With a mass of 1 each it is top-k, with probabilities top-p.
    """
    inside, above = torch.ones_like(order, dtype=torch.bool), torch.zeros_like(target)
    for bits in (24, 16, 8, 0):
        bucket = (order >> bits) & 0xFF
        histogram = mass.new_zeros(*order.shape[:-1], 256).scatter_add(-1, bucket, mass * inside)
        higher = above + histogram.flip(-1).cumsum(-1).flip(-1) - histogram  # (...,256), the mass above each bucket
        edge = 256 - (higher < target).sum(-1, keepdim=True)  # the bucket in which target is reached
        above = higher.gather(-1, edge)
        inside = inside & (bucket == edge)
    lowest = order.masked_fill(~inside, -1).amax(-1, keepdim=True)  # all that is inside is equal by now
    ties = mass * inside
    return (order > lowest) | (inside & (above + ties.cumsum(-1) - ties < target))


def float_to_sortable_int(x):
    """float32 to int64 in [0, 2^32), in the same order exactly."""
    bits = (x + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0: they are equal
    return (bits ^ ((bits >> 63) & 0x7FFFFFFF)) + 2**31  # negative floats count downwards


# ---------------------------------------------------------------- noise


def exponential_noise(seed, position, ids, stream=0):
    """Exponential(1) variates in float32, one for each of the broadcast int64 arguments, a pure function of them.

    stream separates uses that need noise of their own at the same position.
    """
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    keys = []
    for start in (0x3C6EF372, 0x1B873593):  # two chains: a key has 64 bits
        key = low ^ start
        for value in (high, position, torch.full_like(position, stream)):
            key = scramble(key) ^ value
        keys.append(scramble(key))
    bits = scramble(scramble(ids ^ keys[0]) ^ keys[1])  # 32 bits each
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)  # fine-grained near zero, where races are won


def scramble(x):
    """A bijection of 32-bit numbers, held in int64, that flips each output bit half the time for any input bit.

    Its constants (the "lowbias32" search of hash-prospector) are below 2^31, so that no product leaves int64.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


# ---------------------------------------------------------------- the AMX guard


def survives(work, timeout_s=20.0):
    """Run work() in a forked child; True if the child ends by itself, False if a signal or the timeout ended it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGILL, signal.SIG_DFL)  # die quietly, whatever handler the parent has
        try:
            work()
        finally:
            os._exit(0)  # no atexit, no flush of the parent's buffers
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.WIFEXITED(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _small_bf16_matmul():
    torch.set_num_threads(1)  # a forked child must not touch the parent's thread pool
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(a, a)


def guard_amx():
    """Keep oneDNN off AMX where the processor advertises it and then dies of it (SIGILL), as some virtual machines do.

    torch.cpu._init_amx() says yes there all the same, so only a trial tells, and it must come before oneDNN reads the
    environment at its first matmul. A machine without AMX, or a user who set the limit, is left alone.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not hasattr(os, "fork"):
        return
    if torch.cpu._is_amx_tile_supported() and not survives(_small_bf16_matmul):
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


guard_amx()
