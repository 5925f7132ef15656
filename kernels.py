"""The operations that have hand-written kernels.

Each has a reference in plain PyTorch, which is its specification, and a schema, under which the C++
of cpu/ and kernels_triton.py (GPUs) register their implementations. PyTorch's dispatcher picks one
by the device of the tensors. Where a device has no kernel for an operation, the reference runs.
(Operations that only one kind of device has need no reference: without their kernels, they are not
called.)

Read down: which implementation runs; attention; linear layers and norms; the gated delta rule (only
its schema); the operations that only one kind of device has. Knows nothing of models or files.

Shapes are named as in model.py: B batch rows, S new tokens, T slots of a cache row, H query heads,
K key/value heads, E head width; N rows (outputs), C columns (inputs) and G groups of a matrix.
"""

import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F

import backend  # noqa: F401  its guard against AMX runs before the first matmul

# ---------------------------------------------------------------- which implementation runs

LIBRARY = torch.library.Library("fastpath", "DEF")
OPERATIONS = []  # the names of all operations
KERNELS = {}  # type of a device -> the names of the operations that have kernels there: see find_kernels
# With more new tokens per row, a pass is a prefill (it reads a prompt), for which a device may have
# other products: on CPUs torch's own, if weights are not packed. (Which product multiplies
# packed weights depends on all rows of x: see cpu/matmul.cpp.)
MAX_DECODE_TOKENS = 16


def define(schema, fake=None):
    """Declare an operation torch.ops.fastpath.NAME(...), which the C++ of cpu/ and
    kernels_triton.py implement.

    fake: a function with the same arguments that returns empty tensors of the right shapes, for
    torch.compile.
    """
    LIBRARY.define(schema)
    OPERATIONS.append(schema.partition("(")[0])
    if fake is not None:
        torch.library.register_fake(f"fastpath::{OPERATIONS[-1]}", fake, lib=LIBRARY)


def define_reference(schema, function, fake):
    """Declare an operation that is implemented in Python, on all devices: torch.compile does not look
    into it."""
    define(schema, fake)
    LIBRARY.impl(OPERATIONS[-1], function, "CompositeExplicitAutograd")


def find_kernels(device_type):
    """Record which operations have kernels on a type of device ("cpu" or "cuda"). Call it after
    they are registered."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    KERNELS[device_type] = {name for name in OPERATIONS if has_kernel(f"fastpath::{name}", device_type.upper())}


def has_kernel(name, device):
    """Whether an operation has a kernel on this device. Otherwise its reference runs, which
    torch.compile can fuse."""
    return name in KERNELS.get(device.type, ())


@contextmanager
def without_kernels():
    """A context in which all operations run their references, which have gradients, as kernels do
    not."""
    found = dict(KERNELS)
    KERNELS.clear()
    try:
        yield
    finally:
        KERNELS.update(found)


def empty_like_first(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- attention

define(
    "attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor input_pos, Tensor? rows, Tensor? slopes, int? window, "
    "float scale) -> Tensor",
    empty_like_first,
)
# Queries at a time on CPUs: few enough for scores (B,H,128,T) to fit in memory, enough for fast
# products.
QUERY_BLOCK = 128


def attention(q, k_cache, v_cache, input_pos, rows, slopes, window, scale):
    """Causal attention of new tokens over a static KV cache (arXiv:1706.03762), with a position for
    each token.

    q: (B,S,H,E). k_cache, v_cache: (R,K,T,E), already holding the new tokens' keys and values; H is
    a multiple of K.
    input_pos: (B,S) int64, the position (= cache slot) of each token in its own row. -1 is padding,
    whose keys and values are in the last slot, which no other token sees.
    rows: (B,) int64, the cache row of each batch row; None means rows 0..B-1.
    slopes: (H,) float32, for ALiBi (arXiv:2108.12409): slope * (t - position) is added to the score
    of slot t.
    window: int or None. A token sees only the last `window` positions, its own included.
    scale: float, by which the products of queries and keys are multiplied, usually E**-0.5.

    Returns (B,S,H,E) in q's dtype, zeros for padding. A slot may hold anything, even NaN, without
    an effect on the tokens that do not see it, also if other tokens of the pass see it.
    (With kernels_triton.py this holds only for slots that no token of the row sees.)
    """
    if has_kernel("attention", q.device):
        return torch.ops.fastpath.attention.default(q, k_cache, v_cache, input_pos, rows, slopes, window, scale)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        return attention_eager_cpu(q, k_cache, v_cache, input_pos, rows, slopes, window, scale)
    return attention_torch(q, k_cache, v_cache, input_pos, rows, slopes, window, scale)


def attention_reference(q, k_cache, v_cache, input_pos, rows, slopes, window, scale):
    """The specification of `attention`: short, slow, and in float32. Tests compare all other
    versions with it."""
    B, S, H, E = q.shape
    rows = torch.arange(B, device=q.device) if rows is None else rows
    slot = torch.arange(k_cache.shape[2], device=q.device)
    distance = input_pos[:, None, :, None] - slot  # (B,1,S,T): how far back a slot is; negative if it is ahead
    visible = (distance >= 0) & (distance < (window or len(slot)))

    k = k_cache[rows].float().repeat_interleave(H // k_cache.shape[1], dim=1)  # (B,H,T,E)
    v = v_cache[rows].float().repeat_interleave(H // v_cache.shape[1], dim=1)
    is_bad = ~(k.isfinite() & v.isfinite()).all(-1)  # (B,H,T)
    v = v.masked_fill(is_bad[..., None], 0)  # 0 * NaN is NaN, so the scores pass it on
    scores = q.transpose(1, 2).float() @ k.transpose(2, 3) * scale  # (B,H,S,T)
    scores = scores.masked_fill(is_bad[:, :, None], float("nan"))
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    out = (weights @ v).transpose(1, 2)  # (B,S,H,E)
    return torch.where((input_pos >= 0)[:, :, None, None], out, 0).to(q.dtype)


# The same without kernels, faster: for compiled graphs and other devices, and for CPUs in eager
# mode. Query heads of a group share keys and values without copies, and ALiBi's bias has no
# dimension S.


def attention_torch(q, k_cache, v_cache, input_pos, rows, slopes, window, scale):
    """`attention` for compiled graphs, and for devices other than CPUs. It reads all T slots."""
    k, v = read_rows(k_cache, v_cache, rows, len(q))  # (B,K,T,E)
    bias = alibi_bias(slopes, input_pos, k.shape[2])
    visible = visible_slots(input_pos, window, k.shape[2])
    is_lost = torch.zeros_like(input_pos, dtype=torch.bool)
    if q.shape[1] == 1:
        k, v = zero_unseen(k, v, visible)
    else:
        q, k, v, is_lost = zero_bad(q, k, v, visible)
    visible = visible | (input_pos < 0)[:, :, None]  # padding sees all slots: see softmax_attention

    if q.shape[1] > MAX_DECODE_TOKENS and slopes is None:  # torch's FlashAttention, which never stores the scores
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, visible[:, None], scale=scale, enable_gqa=True)
        out = out.transpose(1, 2)
    else:
        out = softmax_attention(q, k, v, scale, visible, bias)
    out = out.masked_fill(is_lost[:, :, None, None], float("nan"))
    return torch.where((input_pos >= 0)[:, :, None, None], out, 0)  # (B,S,H,E)


def attention_eager_cpu(q, k_cache, v_cache, input_pos, rows, slopes, window, scale):
    """`attention` for CPUs in eager mode: blocks of queries, each of which reads only the slots up
    to its last position. It is twice as fast as torch's attention at S = 512 in bfloat16."""
    B, S = input_pos.shape
    if S > QUERY_BLOCK:
        parts = []
        for start in range(0, S, QUERY_BLOCK):
            queries = q[:, start : start + QUERY_BLOCK]
            positions = input_pos[:, start : start + QUERY_BLOCK]
            part = attention_eager_cpu(queries, k_cache, v_cache, positions, rows, slopes, window, scale)
            parts.append(part)
        return torch.cat(parts, dim=1)

    # The values of tensors can be read here without waiting for a device.
    newest = input_pos.amax(1)  # (B,)
    last = max(int(newest.max()), 0)
    k_cache = k_cache[:, :, : last + 1]
    v_cache = v_cache[:, :, : last + 1]
    if rows is None:
        # The product q @ k^T with a slice of the cache is 5 times slower in bfloat16.
        k_cache = k_cache[:B].contiguous()
    k, v = read_rows(k_cache, v_cache, rows, B)  # (B,K,T,E)
    bias = alibi_bias(slopes, input_pos, last + 1)

    # If all rows are equally long, the newest token of each row sees all slots, so that none needs
    # zeros. The slots before the oldest token are seen by all tokens, and need no mask.
    equally_long = window is None and int(newest.min()) == last
    if equally_long and S == 1:
        return softmax_attention(q, k, v, scale, bias=bias)
    visible = visible_slots(input_pos, window, last + 1)
    masked = visible | (input_pos < 0)[:, :, None]  # padding sees all slots: see softmax_attention
    if equally_long:
        oldest = max(int(input_pos.min()), 0)
        masked = masked[:, :, oldest:]
    else:
        k, v = zero_unseen(k, v, visible)
    is_real = (input_pos >= 0)[:, :, None, None]
    out = torch.where(is_real, softmax_attention(q, k, v, scale, masked, bias), 0)  # (B,S,H,E)
    if S == 1 or is_finite(out):
        return out

    # NaN may have reached tokens that do not see it.
    q, k, v, is_lost = zero_bad(q, k, v, visible)
    out = softmax_attention(q, k, v, scale, visible | ~is_real[..., 0], bias)
    out = out.masked_fill(is_lost[:, :, None, None], float("nan"))
    return torch.where(is_real, out, 0)


def read_rows(k_cache, v_cache, rows, B):
    """The keys and values (B,K,T,E) of the cache rows (B,); None means rows 0..B-1."""
    if rows is None:
        return k_cache[:B], v_cache[:B]
    return k_cache[rows], v_cache[rows]


def visible_slots(input_pos, window, T):
    """Which of the slots 0 to T-1 each token sees, (B,S,T) bool: none for padding."""
    slot = torch.arange(T, device=input_pos.device)
    visible = slot <= input_pos[:, :, None]
    if window is not None:
        visible &= slot > input_pos[:, :, None] - window
    return visible


def zero_unseen(k, v, visible):
    """k and v (B,K,T,E) with zeros in the slots that no token of a row sees.

    NaN in such a slot would reach the output even with weight zero: NaN - inf and 0 * NaN are NaN.
    """
    seen = visible.any(1)[:, None, :, None]  # (B,1,T,1)
    return torch.where(seen, k, 0), torch.where(seen, v, 0)


def zero_bad(q, k, v, visible):
    """q, k and v with zeros for all tokens and slots with numbers that are not finite, and for slots
    that no token of a row sees. Also which tokens must have NaN as their result, (B,S) bool: tokens
    whose query is not finite, and tokens that see a slot that is not finite.

    It is needed where tokens of a pass see different slots: see zero_unseen.
    """
    is_bad = ~(k.isfinite() & v.isfinite()).all(3).all(1)  # (B,T)
    is_lost = ~q.isfinite().all(3).all(2) | (visible & is_bad[:, None]).any(2)  # (B,S)
    is_usable = (visible.any(1) & ~is_bad)[:, None, :, None]  # (B,1,T,1)
    q = torch.where(is_lost[:, :, None, None], 0, q)
    return q, torch.where(is_usable, k, 0), torch.where(is_usable, v, 0), is_lost


def is_finite(x):
    """Whether all numbers are finite. It looks only at their sum, which takes less time, so it is also
    False if the sum of finite numbers is not finite."""
    return math.isfinite(x.detach().sum(dtype=torch.float32))


def alibi_bias(slopes, input_pos, T):
    """ALiBi's bias (B,H,T) float32, or None without slopes. Softmax does not change if the same
    number is added to all scores of a query, so distances may be counted from the newest position
    of the row, for all its queries."""
    if slopes is None:
        return None
    slot = torch.arange(T, device=input_pos.device)
    newest = input_pos.amax(1)  # (B,)
    return (slot - newest[:, None, None]).float() * slopes[:, None]


def softmax_attention(q, k, v, scale, visible=None, bias=None):
    """softmax(q k^T * scale + bias) v over the visible slots, with scores in float32: (B,S,H,E).

    q (B,S,H,E); k, v (B,K,T,E); bias (B,H,T) float32 or None. visible: bool, (B,S,n) for the last n
    slots, n <= T (all slots before them are visible), or None if all are. Every token must see a
    slot, also padding: otherwise its softmax would be NaN, which torch's bfloat16 product spreads
    to the row before if the number of slots is odd.
    """
    B, S, H, E = q.shape
    K, T = k.shape[1:3]
    q = q.view(B, S, K, H // K, E).permute(0, 2, 3, 1, 4).reshape(B, K, -1, E)  # (B,K,H/K*S,E)
    scores = (q @ k.transpose(2, 3)).view(B, H, S, T).float()
    scores = scores * scale if bias is None else torch.add(bias[:, :, None], scores, alpha=scale)
    if visible is not None:
        # The lowest finite number, because -inf could give NaN, as above.
        scores[..., T - visible.shape[2] :].masked_fill_(~visible[:, None], torch.finfo(torch.float32).min)
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    out = weights.view(B, K, -1, T) @ v  # (B,K,H/K*S,E)
    return out.view(B, H, S, E).transpose(1, 2)  # (B,S,H,E)


# ---------------------------------------------------------------- linear layers and norms


def empty_with_columns(x, N):
    return x.new_empty((*x.shape[:-1], N))


define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", lambda x, w, bias: empty_with_columns(x, len(w)))


def linear(x, weight, bias=None):
    """x (...,C) @ weight (N,C)^T + bias (N,): (...,N) in x's dtype.

    With S > MAX_DECODE_TOKENS, the kernels call F.linear too, except for bfloat16 on a CPU that
    cannot multiply it.
    """
    if has_kernel("linear", x.device):
        return torch.ops.fastpath.linear.default(x, weight, bias)
    return F.linear(x, weight, bias)


define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", empty_like_first)


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467). The weight may
    be float32."""
    if has_kernel("rms_norm", x.device):
        return torch.ops.fastpath.rms_norm.default(x, weight, eps)
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


define("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", empty_like_first)


def layer_norm(x, weight, bias, eps):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension
    (arXiv:1607.06450)."""
    if has_kernel("layer_norm", x.device):
        return torch.ops.fastpath.layer_norm.default(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


# ---------------------------------------------------------------- the gated delta rule

# The newest tokens of a row, up to this many, can be taken back: see gated_delta.
DELTA_WINDOW = MAX_DECODE_TOKENS

define(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor(a!) matrix, Tensor(b!) base, "
    "Tensor(c!) keys, Tensor(d!) deltas, Tensor(e!) decays, Tensor input_pos, Tensor? rows) -> Tensor",
    lambda q, k, v, *rest: torch.empty_like(v, memory_format=torch.contiguous_format),
)


# ---------------------------------------------------------------- operations of one kind of device
#
# Only cpu/layers.py, cpu/install.py, drafts/heads.py and kernels_triton.py call these operations.
# Each device has its own layout of packed weights, which its file describes.

# CPU:
#   pack_layer packs the parts of a matrix (N,C) in a format of formats.FORMATS into `to`, uint8
#     (packed_bytes,).
#   prepare_layer returns a handle to a linear layer or a table of N outputs and C inputs, which is
#     prepared once. Its format is one of FORMATS, for a packed weight; or "dense", for a plain
#     weight (N,C); or "tiles", for one that is packed for AMX. With `exact`, activations are not
#     quantized to 8 bits.
#   stack_layers makes one layer of several, whose outputs follow each other.
#   prepare_experts makes the experts of a sparse layer from their layers, and sparse_mlp runs them.
#   prepare_block makes a block, whose token mixer is attention, a gated delta net (m > 0) or else a short
#     convolution (conv_weight); `blocks` runs several blocks.
#   write_draft_keys writes the keys and values of the MTP layer (mixers/mtp.py).
#   medusa draws the likeliest tokens of Medusa heads.
#   head_logits computes the logits of tokens that may be drawn, with what quantize_head makes (cpu/shadow.py).
define("packed_bytes(str format, int N, int C, int groupsize) -> int")
define("pack_layer(str format, Tensor[] parts, int C, int groupsize, Tensor(a!) to) -> ()", lambda *_: None)
define("prepare_layer(str format, Tensor weight, Tensor? bias, int N, int C, int groupsize, bool exact) -> int")
define("stack_layers(int[] layers, Tensor? bias) -> int")
define("release_layers(int[] layers) -> ()")
define("linear_packed(Tensor x, int layer, int N) -> Tensor", lambda x, layer, N: empty_with_columns(x, N))
define(
    "embed_packed(Tensor tokens, int layer, int C) -> Tensor",
    lambda t, _, C: t.new_empty((*t.shape, C), dtype=torch.float32),
)
define(
    "prepare_experts(int router, int gate_up, int down, int? shared_gate_up, int? shared_down, int X, int k, "
    "bool normalized, ScalarType dtype, str scoring='softmax', Tensor? choice_bias=None, float scale=1.0, "
    "Tensor? scales=None, Tensor? router_norm=None, Tensor? norm=None, float eps=0.0, str activation='swiglu') -> int"
)
define("release_experts(int[] handles) -> ()")
define("sparse_mlp(Tensor x, Tensor input_pos, Tensor(a!) counts, int experts) -> Tensor", empty_like_first)
define(
    "prepare_block(*, ScalarType dtype, float eps, float residual_scale, bool post_norm_residual, float layer_scale, "
    "str activation, "
    "Tensor? attention_norm, Tensor? attention_norm_bias, Tensor? attention_post_norm, "
    "Tensor? mlp_norm, Tensor? mlp_norm_bias, Tensor? mlp_post_norm, "
    "Tensor? mlp_term_norm, Tensor? experts_term_norm, "
    "int qkv, int? out=None, int? up=None, int? down=None, int? experts=None, "
    "int H=0, int K=0, int E=0, int gates=0, float scale=1.0, int? window=None, int rope_table=0, "
    "bool qk_norm_whole=False, Tensor? q_norm=None, Tensor? k_norm=None, Tensor? v_norm=None, "
    "bool keys_as_values=False, bool shares_cache=False, "
    "int? own_gate=None, int? own_proj=None, Tensor? own_norm=None, "
    "Tensor? conv_weight=None, Tensor? conv_bias=None, "
    "int n=0, int m=0, int dk=0, int dv=0, Tensor? decay_weight=None, Tensor? decay_bias=None, "
    "Tensor? delta_norm=None) -> int"
)
define("release_blocks(int[] handles) -> ()")
define("allow_amx(bool allowed) -> bool")
define(
    "blocks(Tensor x, Tensor input_pos, Tensor? rows, Tensor[] cos, Tensor[] sin, Tensor? slopes, "
    "Tensor? query_scales, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor(c!)[] bases, Tensor(d!)[] tails, "
    "Tensor(e!)[] matrices, Tensor(f!)[] keys, Tensor(g!)[] deltas, Tensor(h!)[] decays, "
    "Tensor(i!)[] expert_counts, Tensor? own_inputs, int[] handles) -> Tensor",
    empty_like_first,
)
define(
    "write_draft_keys(Tensor embedded, Tensor hidden, Tensor input_pos, Tensor? rows, Tensor cos, Tensor sin, "
    "Tensor(a!) tail, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor embedding_norm, Tensor hidden_norm, int proj, "
    "int block) -> ()",
    lambda *_: None,
)
define(
    "medusa(Tensor states, Tensor tokens, Tensor ids, int embedding, int gate_up, int down, int output, "
    "int k) -> Tensor"
)

define(
    "head_logits(Tensor x, int head, int shadow, Tensor norms, Tensor inverse_scales, Tensor temperature, Tensor seed, "
    "Tensor top_k, Tensor min_p, Tensor position, Tensor(a!) counts, float softcap=0.0) -> Tensor",
    lambda x, head, shadow, norms, *rest: empty_with_columns(x, len(norms)),
)
define("quantize_head(int head, int bits, Tensor scale) -> (Tensor, Tensor)")

# GPU:
#   fused_linear is a linear layer with RMSNorm before it, and bias, SwiGLU and residual after it.
#   rotary applies RoPE and writes the KV cache.
#   choose_experts is experts.SparseMLP.choose, from the logits of the router; padding gets -1.
#   expert_mlp is the rest of a sparse layer: the MLPs of the experts, their weighted sum, the shared
#     expert, if there is one, and the counts.
define(
    "fused_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, Tensor? norm, Tensor? residual, "
    "int N, int bits, int groupsize, bool gated, float eps) -> Tensor",
    lambda x, weight, scales, bias, norm, residual, N, *rest: empty_with_columns(x, N),
)
define(
    "rotary(Tensor qkv, Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, Tensor input_pos, Tensor? rows, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, int H, float eps) -> Tensor",
    lambda qkv, *rest: qkv.new_empty((*qkv.shape[:2], rest[-2], rest[-3].shape[-1])),
)
define(
    "choose_experts(Tensor logits, Tensor input_pos, int X, int k, bool normalized, str scoring='softmax', "
    "Tensor? choice_bias=None, float scale=1.0, Tensor? scales=None) -> (Tensor, Tensor)",
    lambda logits, input_pos, X, k, *rest: (
        logits.new_empty((*input_pos.shape, k), dtype=torch.int64),
        logits.new_empty((*input_pos.shape, k)),
    ),
)
define(
    "expert_mlp(Tensor x, Tensor ids, Tensor weights, Tensor(a!) counts, Tensor gate_up, Tensor? gate_up_scales, "
    "Tensor down, Tensor? down_scales, Tensor? shared, Tensor logits, int hidden, int[] bits, int[] groupsizes, "
    "bool gelu=False) -> Tensor",
    empty_like_first,
)
