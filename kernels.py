"""The operations worth writing by hand: each a plain torch reference, which is its specification.

`attention`, products with quantized weights, `top_mass` of top-k and top-p. Knows nothing of models or files.
Shapes are named as in model.py: B rows, S new tokens, T cache slots, H query heads, K key/value heads, E head width; of
a matrix N rows (outputs), K columns (inputs), G groups of columns.

Importing this file runs one check, `guard_amx`: it must come before the first matmul of the process.
"""

import os
import signal
import time

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------- which implementation runs

LIBRARY = torch.library.Library("fastpath", "DEF")
DEVICES_WITH_KERNELS = set()  # "cpu" once kernels_cpu.py has loaded its operations, "cuda" likewise


def define(schema):
    """Declare an operation torch.ops.fastpath.NAME(...), which kernels_cpu.py and kernels_triton.py implement."""
    LIBRARY.define(schema)


def has_kernels(device):
    """Whether the operations on this device are ours; else the references in this file run, and torch.compile sees
    through them."""
    return device.type in DEVICES_WITH_KERNELS


# ---------------------------------------------------------------- attention

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
    Eager on CPU goes by blocks of queries, each of which reads only the slots up to its furthest position: twice as
    fast as torch's own at S = 512 in bfloat16. A compiled graph has fixed shapes and reads all T.
    """
    B, S, H, E = q.shape
    eager_cpu = q.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager_cpu and S > QUERY_BLOCK:
        blocks = [slice(start, start + QUERY_BLOCK) for start in range(0, S, QUERY_BLOCK)]
        parts = [attention(q[:, b], k_cache, v_cache, input_pos[:, b], rows, slopes, window) for b in blocks]
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
        return _attention_reference(q, k, v, bias=bias)

    visible = slot <= input_pos[:, :, None]  # (B,S,T), nothing for padding
    if window is not None:
        visible &= slot > input_pos[:, :, None] - window
    if even:
        visible = visible[:, :, oldest:]  # before the first of these tokens all is seen
    else:
        seen = visible.any(1)[:, None, :, None]  # (B,1,T,1)
        k = torch.where(seen, k, 0)  # a slot of weight zero reaches the output all the same if it holds NaN:
        v = torch.where(seen, v, 0)  # NaN - inf in the scores, 0 * NaN in the sum

    if S > 16 and slopes is None and not eager_cpu:  # torch's own FlashAttention, which never builds the scores
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, visible[:, None], enable_gqa=True).transpose(1, 2)
    else:
        out = _attention_reference(q, k, v, visible, bias)
    return torch.where((input_pos >= 0)[:, :, None, None], out, 0)  # (B,S,H,E)


def _attention_reference(q, k, v, visible=None, bias=None):
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
        scores[..., T - visible.shape[2] :].masked_fill_(~visible[:, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    out = weights.view(B, K, -1, T) @ v  # (B,K,H/K*S,E)
    return out.view(B, H, S, E).transpose(1, 2)  # (B,S,H,E)


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
