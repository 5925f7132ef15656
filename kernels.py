"""The operations that have hand-written kernels.

Each has a reference in plain PyTorch, which is its specification, and a schema, under which the C++
of cpu/ and kernels_triton.py (GPUs) register their implementations. PyTorch's dispatcher picks one
by the device of the tensors. Where a device has no kernel for an operation, the reference runs.
(Operations that only one kind of device has need no reference: without their kernels, they are not
called.)

Read down: which implementation runs, attention, linear layers and norms, the operations that only
one kind of device has, top-k and top-p, noise, the AMX guard. Knows nothing of models or files.

Shapes are named as in model.py: B batch rows, S new tokens, T slots of a cache row, H query heads,
K key/value heads, E head width; N rows (outputs), C columns (inputs) and G groups of a matrix.

Importing this file runs one check, `guard_amx`: it must come before the first matmul of the
process.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------- which implementation runs

LIBRARY = torch.library.Library("fastpath", "DEF")
OPERATIONS = []  # the names of all operations
KERNELS = {}  # type of a device -> the names of the operations that have kernels there: see find_kernels
# With more new tokens per row, a pass is a prefill (it reads a prompt), for which a device may have
# other products: on CPUs those of torch, if weights are not packed. (Which product multiplies
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


# The fields of config.Config that the fused operations (all blocks of a model in one call) take
# into account.
FUSED_FIELDS = (
    "n_layer", "n_head", "n_kv_head", "head_dim", "dim", "hidden_dim", "vocab_size", "max_seq_length", "norm_eps",
    "rope_base", "rope_scaling", "tied_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sliding_window",
    "sliding_layers", "norm", "mlp", "alibi", "embedding_norm", "post_norm_residual", "n_token", "layers_without_rope",
    "sliding_rope_base", "rotary_dim", "embedding_scale", "attention_scale", "logits_scale", "mtp",
)  # fmt: skip


@dataclass
class FixedThreads:
    """The number of threads is not tuned. (cpu.threads.Threads tunes it, and has the same members.)"""

    fixed: bool = True
    trials: int = 0

    def of(self, kind, work, fixed=False):
        return nullcontext()

    def used(self):
        return {}

    def others(self):
        return None

    def forget(self):
        pass


@dataclass(frozen=True)
class Backend:
    """What a model and the engine may rely on, as an Installer returns it.

    The default is that of a device without kernels, on which everything runs as plain PyTorch.
    """

    name: str = "torch"  # which kernels run
    # Runs all blocks as one call: run_blocks(blocks, x, ropes, input_pos, rows) -> x
    run_blocks: Callable | None = None
    # The same for the block of the layer that drafts tokens (mtp)
    run_draft: Callable | None = None
    # What mtp.DraftLayer.read does: write_draft_keys(layer, embedded, hidden, input_pos, rows)
    write_draft_keys: Callable | None = None
    max_fused_tokens: int = 0  # these take up to this many new tokens per row
    # A pass of up to MAX_DECODE_TOKENS tokens per row gives the same bits with any number of
    # threads.
    thread_invariant: bool = False
    # Passes of any length give the same K/V and logits, bit for bit, with any number of threads. If
    # False, the K/V of a prompt may differ in the last bits when it is read in other chunks.
    chunk_invariant: bool = False
    # zeros(nbytes, device) returns a function like torch.zeros, for KV caches of nbytes bytes.
    zeros: Callable = lambda nbytes, device: partial(torch.zeros, device=device)
    # make_threads(fixed) returns what sets the number of threads of an engine's steps.
    make_threads: Callable = FixedThreads


class Installer:
    """Puts the kernels of a device into a model, layer by layer while the model is read.

    Each tensor goes through `place`, each layer that has all its tensors through `pack`, and at the
    end `finish` says what the model can rely on. A model that is in memory already needs `finish`
    only.

    These defaults are those of a device without kernels; cpu/install.py and kernels_triton.py have
    others.
    """

    def __init__(self, model, kernels="auto", exact_activations=False):
        """model: may still be empty, on the meta device. The others are options: see
        load.ModelOptions."""
        self.model = model
        self.exact_activations = exact_activations

    @staticmethod
    def prepare_process(threads):
        """Settings of the whole process, for example the number of CPU threads (None: as many as
        are useful)."""

    def reserve(self, nbytes):
        """Make memory for this many bytes of copies, for weights that stay as they are."""

    def place(self, tensor, device, dtype, is_mapped):
        """A tensor on this device. is_mapped: it is in a mapped file, or a part of a larger one, so
        it is copied."""
        return tensor.to(device=device, dtype=dtype, copy=is_mapped)

    def pack(self, name):
        """Replace the layer with this name by one with packed weights, if kernels can use it."""

    def finish(self):
        """Pack the layers that have not been packed yet, and return the Backend."""
        return Backend()


def uses_only(config, known):
    """Whether all fields of a config other than `known` have their default values.

    With known=FUSED_FIELDS: whether the fused operations implement all that a model needs.
    """
    others = [field for field in fields(config) if field.name not in known]
    return all(getattr(config, field.name) == field.default for field in others)


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
    that no token of a row sees. Also which tokens must have NaN in the place of their result, (B,S)
    bool: those with such a query, and those that see such a slot.

    It is needed where tokens of a pass see different slots: see zero_unseen.
    """
    is_bad = ~(k.isfinite() & v.isfinite()).all(3).all(1)  # (B,T)
    is_lost = ~q.isfinite().all(3).all(2) | (visible & is_bad[:, None]).any(2)  # (B,S)
    is_usable = (visible.any(1) & ~is_bad)[:, None, :, None]  # (B,1,T,1)
    q = torch.where(is_lost[:, :, None, None], 0, q)
    return q, torch.where(is_usable, k, 0), torch.where(is_usable, v, 0), is_lost


def is_finite(x):
    """Whether all numbers are finite. It may be False for finite numbers with a sum that is not: a sum
    takes less time than a look at each number."""
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
DELTA_CHUNK = 64  # tokens that the version for long prompts without kernels computes at once

define(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor(a!) matrix, Tensor(b!) base, "
    "Tensor(c!) keys, Tensor(d!) deltas, Tensor(e!) decays, Tensor input_pos, Tensor? rows) -> Tensor",
    lambda q, k, v, *rest: torch.empty_like(v, memory_format=torch.contiguous_format),
)


def gated_delta(q, k, v, log_decay, beta, state, input_pos, rows):
    """The gated delta rule (arXiv:2412.06464): each token updates a matrix for each value head, and
    reads it.

    q, k: (B,S,n,dk) float32, for n key heads; q is scaled. Value head h has those of key head h % n.
    v: (B,S,m,dv) float32, for m value heads. log_decay, beta: (B,S,m) float32.
    state: a recurrent.DeltaState, which is written.
    input_pos: (B,S) int64, the position of each token in its own row. -1 is padding, which changes
    nothing. Several batch rows may have tokens of the same row.
    rows: (B,) int64, the row of the state for each batch row; None means rows 0..B-1.

    Returns (B,S,m,dv) float32. For each token in turn and each value head, with its matrix M (dk,dv),
        M = exp(log_decay) M
        M = M + k (beta (v - k^T M))^T
        y = q^T M
    This reads like one step of online least squares: k^T M is what the matrix predicts for the key
    k, and the step moves it towards v by the fraction beta (k has length 1).

    The update is late. A row's matrix holds its tokens before the position `base`. The up to
    DELTA_WINDOW tokens from there on are pending: they have been read, but their updates (key, delta
    beta (v - k^T M), and decay) are stored beside the matrix. A pass that begins at position p
    first adds the p - base pending updates before p. So a pass may go on at any position from `base`
    on, as it does after drafted tokens were rejected, and a pass that is repeated gives the same
    result. Position 0 begins with zeros. RuntimeError if a pass begins before `base`, or skips
    tokens.
    """
    run = gated_delta_torch
    if has_kernel("gated_delta", q.device) or torch.compiler.is_compiling():
        run = torch.ops.fastpath.gated_delta.default
    stored = (state.matrix, state.base, state.keys, state.deltas, state.decays)
    return run(q, k, v, log_decay, beta, *stored, input_pos, rows)


def gated_delta_torch(q, k, v, log_decay, beta, matrix, base, keys, deltas, decays, input_pos, rows):
    """`gated_delta` where there are no kernels. The compiler sees one operation: a loop over tokens
    would be unrolled."""
    repeats = v.shape[2] // q.shape[2]
    q = q.repeat(1, 1, repeats, 1)  # (B,S,m,dk)
    k = k.repeat(1, 1, repeats, 1)
    out = torch.zeros_like(v)
    for row, places in runs_of(input_pos, rows):
        start = int(input_pos[places[0]])
        pending = 0
        M = torch.zeros_like(matrix[row])  # (m,dk,dv)
        if start > 0:
            pending = start - int(base[row])
            check_pending(pending, row, start)
            M.copy_(matrix[row])
        for i in range(pending):
            M = decays[row, i, :, None, None] * M + outer(keys[row, i].repeat(repeats, 1), deltas[row, i])

        batch_row, column = zip(*places)
        tokens = [x[batch_row, column] for x in (q, k, v, log_decay, beta)]  # (n,m,...) each
        n = len(places)
        done = max(0, n - DELTA_WINDOW)  # the tokens that are not pending after this pass
        y, M, _ = delta_chunks(M, *[x[:done] for x in tokens])
        matrix[row] = M
        base[row] = start + done
        later, _, new_deltas = delta_tokens(M, *[x[done:] for x in tokens])
        out[batch_row, column] = torch.cat([y, later])
        keys[row, : n - done] = tokens[1][done:, : keys.shape[2]]
        deltas[row, : n - done] = new_deltas
        decays[row, : n - done] = tokens[3][done:].exp()
    return out


LIBRARY.impl("gated_delta", gated_delta_torch, "CompositeExplicitAutograd")


def runs_of(input_pos, rows):
    """The tokens of each row in a batch, as (row, [(b,s), ...]) with ascending positions.

    input_pos: (B,S), -1 for padding; rows: (B,), or None for rows 0..B-1.
    """
    row_of = range(len(input_pos)) if rows is None else rows.tolist()
    found = {}
    for b, positions in enumerate(input_pos.tolist()):
        for s, position in enumerate(positions):
            if position >= 0:
                found.setdefault(row_of[b], []).append((position, b, s))
    for row, tokens in found.items():
        yield row, [(b, s) for _, b, s in sorted(tokens)]


def check_pending(pending, row, start):
    """RuntimeError if a pass over a row cannot begin at position `start`, which has this many
    pending tokens before it."""
    if not 0 <= pending <= DELTA_WINDOW:
        raise RuntimeError(f"row {row} cannot go on at position {start}: its state is that of {start - pending}")


def outer(a, b):
    return a[..., :, None] * b[..., None, :]


def delta_tokens(M, q, k, v, log_decay, beta):
    """The gated delta rule for n tokens, one after the other: the specification.

    M: (m,dk,dv); q, k: (n,m,dk); v: (n,m,dv); log_decay, beta: (n,m). Returns the outputs (n,m,dv),
    the matrix after these tokens, and their deltas (n,m,dv).
    """
    out = torch.empty_like(v)
    deltas = torch.empty_like(v)
    for i in range(len(v)):
        M = log_decay[i, :, None, None].exp() * M
        predicted = (k[i, :, None] @ M)[:, 0]  # (m,dv)
        deltas[i] = beta[i, :, None] * (v[i] - predicted)
        M = M + outer(k[i], deltas[i])
        out[i] = (q[i, :, None] @ M)[:, 0]
    return out, M, deltas


def delta_chunks(M, q, k, v, log_decay, beta):
    """`delta_tokens` with fewer, larger products: DELTA_CHUNK tokens at once (arXiv:2412.06464,
    section 3.3).

    With g the running sum of log_decay in a chunk and M_0 the matrix before it,
        M_t = exp(g_t) M_0 + sum over j <= t of exp(g_t - g_j) k_j delta_j^T
        delta_t = beta_t (v_t - exp(g_t) k_t^T M_0 - sum over j < t of exp(g_t - g_j) (k_t . k_j) delta_j)
    so that the deltas of a chunk solve a triangular system.
    """
    out = torch.empty_like(v)
    all_deltas = torch.empty_like(v)
    for start in range(0, len(v), DELTA_CHUNK):
        chunk = slice(start, start + DELTA_CHUNK)
        Q = q[chunk].transpose(0, 1)  # (m,n,dk)
        K = k[chunk].transpose(0, 1)
        V = v[chunk].transpose(0, 1)  # (m,n,dv)
        g = log_decay[chunk].T.cumsum(1)  # (m,n)
        b = beta[chunk].T[..., None]  # (m,n,1)
        n = g.shape[1]
        ahead = torch.ones(n, n, dtype=torch.bool, device=v.device).triu(1)
        ratio = (g[:, :, None] - g[:, None]).masked_fill(ahead, -torch.inf).exp()  # (m,n,n): exp(g_t - g_j)
        scale = g.exp()[..., None]  # (m,n,1)

        system = (b * (K @ K.mT) * ratio).tril(-1)  # its diagonal counts as ones
        wanted = b * (V - scale * (K @ M))
        deltas = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # (m,n,dv)
        y = scale * (Q @ M) + ((Q @ K.mT) * ratio) @ deltas
        if not is_finite(y):  # 0 * NaN is NaN, so NaN of a token has reached those before it
            out[chunk], M, all_deltas[chunk] = delta_tokens(M, *[x[chunk] for x in (q, k, v, log_decay, beta)])
            continue
        M = scale[:, -1:] * M + K.mT @ (ratio[:, -1, :, None] * deltas)
        out[chunk] = y.transpose(0, 1)
        all_deltas[chunk] = deltas.transpose(0, 1)
    return out, M, all_deltas


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
#   prepare_experts makes the experts of a sparse layer of their layers, and sparse_mlp runs them.
#   prepare_block makes a block of four layers, or of two and experts, and `blocks` runs several blocks.
#   write_draft_keys writes the keys and values of the layer that drafts tokens (mtp.py).
#   medusa draws the greedy tokens of Medusa heads.
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
define("prepare_experts(int[] layers, int[] sizes, bool normalized, ScalarType dtype) -> int")
define("release_experts(int[] handles) -> ()")
define("sparse_mlp(Tensor x, Tensor input_pos, Tensor(a!) counts, int experts) -> Tensor", empty_like_first)
define(
    "prepare_block(Tensor?[] norms, int[] layers, int[] sizes, ScalarType dtype, int? window, float scale, float eps, "
    "float residual_scale, str activation, bool qk_norm_whole, bool post_norm_residual, int rope_table, "
    "int? experts) -> int"
)
define("release_blocks(int[] handles) -> ()")
define("allow_amx(bool allowed) -> bool")
define(
    "blocks(Tensor x, Tensor input_pos, Tensor? rows, Tensor[] cos, Tensor[] sin, Tensor? slopes, "
    "Tensor? query_scales, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor(c!)[] states, "
    "Tensor(d!)[] expert_counts, int[] handles) -> Tensor",
    empty_like_first,
)
define(
    "write_draft_keys(Tensor embedded, Tensor hidden, Tensor input_pos, Tensor? rows, Tensor cos, Tensor sin, "
    "Tensor(a!) tail, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor[] norms, int proj, int block) -> ()",
    lambda *_: None,
)
define("medusa(Tensor states, Tensor tokens, Tensor ids, int[] layers, int k) -> Tensor")

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
    "choose_experts(Tensor logits, Tensor input_pos, int X, int k, bool normalized) -> (Tensor, Tensor)",
    lambda logits, input_pos, X, k, normalized: (
        logits.new_empty((*input_pos.shape, k), dtype=torch.int64),
        logits.new_empty((*input_pos.shape, k)),
    ),
)
define(
    "expert_mlp(Tensor x, Tensor ids, Tensor weights, Tensor(a!) counts, Tensor gate_up, Tensor? gate_up_scales, "
    "Tensor down, Tensor? down_scales, Tensor? shared, Tensor logits, int hidden, int[] bits, int[] groupsizes) "
    "-> Tensor",
    empty_like_first,
)

# ---------------------------------------------------------------- top-k and top-p


def top_mass(order, mass, target):
    """A mask (...,V) of the fewest largest entries whose total mass reaches `target`. Of equal
    entries, those with lower indices are kept first.

    order (...,V) int64 in [0,2^32), the values to compare; mass (...,V) int64 >= 0; target (...,1)
    int64 >= 1. If every mass is 1, this is top-k; if masses are probabilities, it is top-p. Equal
    entries may have different masses here, but not in the C++. Integer sums do not depend on their
    order, so all implementations agree exactly. Nothing is sorted: a radix select finds the
    smallest entry that is kept, 8 bits at a time, with a histogram of the mass.
    """
    inside = torch.ones_like(order, dtype=torch.bool)  # entries that share the bits chosen so far
    above = torch.zeros_like(target)  # the mass of all larger entries
    for bits in (24, 16, 8, 0):
        bucket = (order >> bits) & 0xFF
        histogram = mass.new_zeros(*order.shape[:-1], 256).scatter_add(-1, bucket, mass * inside)
        # The mass above each bucket (...,256), which falls as the bucket rises. The chosen bucket
        # is the one in which the sum reaches the target.
        higher = above + histogram.flip(-1).cumsum(-1).flip(-1) - histogram
        chosen = 256 - (higher < target).sum(-1, keepdim=True)
        above = higher.gather(-1, chosen)
        inside = inside & (bucket == chosen)

    lowest = order.masked_fill(~inside, -1).amax(-1, keepdim=True)  # all entries inside are equal by now
    ties = mass * inside
    return (order > lowest) | (inside & (above + ties.cumsum(-1) - ties < target))


def float_to_sortable_int(x):
    """Maps float32 to int64 in [0, 2^32) with the same order; -0.0 and 0.0 are equal."""
    bits = (x + 0.0).view(torch.int32).long()  # the sum turns -0.0 into 0.0
    return (bits ^ ((bits >> 63) & 0x7FFFFFFF)) + 2**31  # the bits of negative floats ascend as the floats descend


# ---------------------------------------------------------------- noise


def exponential_noise(seed, position, ids, stream=0):
    """Exponential(1) variates (float32): a pure function of seed, position and token ids, int64
    tensors that broadcast.

    Different values of `stream` (int) give independent noise for the same position.
    """
    low = seed & 0xFFFFFFFF
    high = (seed >> 32) & 0xFFFFFFFF
    keys = []
    for start in (0x3C6EF372, 0x1B873593):  # two keys of 32 bits each
        key = low ^ start
        for value in (high, position, torch.full_like(position, stream)):
            key = scramble(key) ^ value
        keys.append(scramble(key))
    bits = scramble(scramble(ids ^ keys[0]) ^ keys[1])
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)  # most precise near zero, because argmax(p / noise) selects small noise


def scramble(x):
    """A hash of 32-bit integers, held in int64: a bijection where each input bit flips every output
    bit half the time.

    The constants, from the project hash-prospector (lowbias32), are below 2^31, so that no product
    overflows int64.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


# ---------------------------------------------------------------- the AMX guard


def survives(work, timeout_s=20.0):
    """Run work() in a forked child. True if the child ends by itself, False if a signal or the
    timeout ended it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGILL, signal.SIG_DFL)  # no message, even if the parent has a handler
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
    """Forbid oneDNN to use AMX on machines that advertise AMX but kill a process that uses it
    (SIGILL), as some virtual machines do.

    torch.cpu._init_amx() succeeds even on these, so a child process tries a matmul. The check must
    run before the first matmul of this process, because oneDNN then reads the environment. Without
    AMX, or if the user has set ONEDNN_MAX_CPU_ISA, nothing changes.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not hasattr(os, "fork"):
        return
    if torch.cpu._is_amx_tile_supported() and not survives(_small_bf16_matmul):
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


guard_amx()
