"""Recurrent token mixers: instead of keys and values, they keep a state of fixed size for each row.

Read down: the mixers GatedDeltaNet (Qwen3.5) and ShortConvolution (LFM2); the convolution of both,
and the decay; their states Tail, ConvState and DeltaState; Snapshots, the copies of states from
which later prompts go on; `gated_delta`, the delta rule, which docs/hybrid.md explains. Its schema
is in kernels.py. A model with attention only needs nothing of this file.

Shapes are explained in model.py. n key heads of width dk have the queries and keys, m value heads
of width dv the values.

Sources: gated delta nets (arXiv:2412.06464), Qwen3-Next and Qwen3.5; LFM2 (arXiv:2511.23404).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config, DeltaNet, ShortConv
from kernels import DELTA_WINDOW, LIBRARY, MAX_DECODE_TOKENS, has_kernel, is_finite
from layers import Linear, RMSNorm, Rows, TokenMixer, Units, empty_parameter

L2_EPS = 1e-6  # added to the squared length of queries and keys
SNAPSHOT_INTERVAL = 512  # tokens between two snapshots of a long prompt
NO_POSITION = 2**62  # after all positions
SNAPSHOT_POSITIONS = 128  # no more snapshots than one for so many positions of the cache
SNAPSHOTS_PER_ROW = 4  # the memory for snapshots is at least enough for this many

# ---------------------------------------------------------------- the layers


class RecurrentMixer(TokenMixer):
    """A token mixer with an input projection, a convolution, a recurrent state and an output projection."""

    @property
    def linears(self) -> list[nn.Module]:
        return [self.inputs, self.out]

    def block_arguments(self) -> dict:
        return {"conv_weight": self.conv.weight.T.contiguous(), "conv_bias": self.conv.bias}


class GatedDeltaNet(RecurrentMixer):
    """A gated delta net (arXiv:2412.06464): like attention, but with a matrix for each value head as
    the only memory of earlier tokens."""

    name = "delta_net"

    def __init__(self, config: Config):
        super().__init__()
        net = config.delta_net
        self.net = net
        # A rank has some key heads, and the value heads that read with their queries and keys.
        n = net.n_key_head
        keys = Units("n_key_head", n, net.key_dim)
        values = [Units("n_key_head", n, net.value_dim)] * (net.n_value_head // n)
        numbers = [Units("n_key_head", n)] * (net.n_value_head // n)  # one for each value head
        mixed = [keys, keys, *values]
        # Rows: queries, keys, values, the gate of the output, beta and the decay's input of each value head
        width = net.conv_channels + net.values_width + 2 * net.n_value_head
        self.inputs = Linear(config.dim, width, False, [mixed, values, numbers, numbers])
        self.conv = Convolution(net.conv_channels, net.conv_width, [mixed])
        self.decay = Decay(net.n_value_head, [numbers])
        self.norm = RMSNorm(net.value_dim, config.norm_eps)  # of each value head's output
        self.out = Linear(net.values_width, config.dim, False, columns=values)
        self.state = DeltaState(net)

    def block_arguments(self) -> dict:
        net = self.net
        return super().block_arguments() | {
            "n": net.n_key_head,
            "m": net.n_value_head,
            "dk": net.key_dim,
            "dv": net.value_dim,
            "decay_weight": self.decay.weight,
            "decay_bias": self.decay.bias,
            "delta_norm": self.norm.weight,
        }

    def flops(self, context: int) -> int:
        return 7 * self.net.matrix_elements

    def forward(self, x: Tensor, input_pos: Tensor, rows: Tensor, rope=None) -> Tensor:
        net = self.net
        B, S, _ = x.shape
        widths = [net.conv_channels, net.values_width, net.n_value_head, net.n_value_head]
        mixed, gate, beta, step = self.inputs(x).split(widths, dim=2)

        mixed = F.silu(self.conv(mixed, self.state, input_pos, rows))  # float32
        q, k, v = mixed.split([net.keys_width, net.keys_width, net.values_width], dim=2)
        q = unit_length(q.reshape(B, S, net.n_key_head, net.key_dim)) * net.key_dim**-0.5
        k = unit_length(k.reshape(B, S, net.n_key_head, net.key_dim))
        v = v.reshape(B, S, net.n_value_head, net.value_dim)

        log_decay = self.decay(step)  # (B,S,m)
        y = gated_delta(q, k, v, log_decay, beta.float().sigmoid(), self.state, input_pos, rows)  # (B,S,m,dv)
        y = self.norm(y) * F.silu(gate.float()).view(y.shape)
        return self.out(y.flatten(2).to(x.dtype))


def unit_length(x: Tensor) -> Tensor:
    """x (...,n) divided by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class ShortConvolution(RecurrentMixer):
    """A short convolution with a gate before it and one after it: like attention, but a token sees
    only the latest few tokens."""

    name = "short_conv"

    def __init__(self, config: Config):
        super().__init__()
        conv = config.short_conv
        channels = Units("dim", conv.conv_channels)
        # Rows: the gate of the inputs, the gate of the outputs, the inputs
        self.inputs = Linear(config.dim, 3 * conv.conv_channels, conv.bias, [[channels, channels, channels]])
        self.conv = Convolution(conv.conv_channels, conv.conv_width, [[channels]], conv.bias)
        self.out = Linear(conv.conv_channels, config.dim, conv.bias, columns=[channels])
        self.state = ConvState(conv)

    def forward(self, x: Tensor, input_pos: Tensor, rows: Tensor, rope=None) -> Tensor:
        gate, out_gate, x = self.inputs(x).chunk(3, dim=2)  # (B,S,channels) each

        self.state.move_base(input_pos, rows)
        y = self.conv(gate * x, self.state, input_pos, rows)  # float32
        return self.out((out_gate.float() * y).to(x.dtype))


class Convolution(nn.Module):
    """A causal convolution over the latest tokens, for each channel by itself."""

    is_float32 = True  # its weights, in a model of any dtype

    def __init__(self, channels: int, width: int, rows: Rows, bias: bool = False):
        super().__init__()
        self.rows = rows
        self.weight = empty_parameter(channels, width)  # float32; the last column is for the token itself
        self.bias = empty_parameter(channels) if bias else None  # float32
        self.width = width

    def forward(self, x: Tensor, state: "ConvState", input_pos: Tensor, rows: Tensor) -> Tensor:
        """x (B,S,channels) to (B,S,channels) float32. Before the first position there are zeros."""
        S = x.shape[1]
        x = state.with_tail(x, input_pos, rows).float()  # (B,width-1+S,channels)
        y = sum(x[:, i : i + S] * self.weight[:, i] for i in range(self.width))
        return y if self.bias is None else y + self.bias


class Decay(nn.Module):
    """The logarithm of the factor by which a value head's matrix shrinks with a token."""

    is_float32 = True

    def __init__(self, heads: int, rows: Rows):
        super().__init__()
        self.rows = rows
        self.weight = empty_parameter(heads)  # float32, below 0
        self.bias = empty_parameter(heads)  # float32

    def forward(self, x: Tensor) -> Tensor:
        """x (...,m) to (...,m) float32."""
        return self.weight * F.softplus(x.float() + self.bias)


# ---------------------------------------------------------------- what the layers remember


class Tail(nn.Module):
    """The latest vectors that a layer has seen of each row: enough for a pass that begins at the row's
    base (ConvState), or at one of the next W = DELTA_WINDOW positions. It has the interface of
    model.KVCache.

    tail (R,W+before+1,channels): the vectors, each at its position modulo W + before; padding writes
    to the last slot.
    """

    is_recurrent = True

    def __init__(self, channels: int, before: int):
        """before: how many vectors before its first position a pass needs."""
        super().__init__()
        self.channels = channels
        self.before = before

    def shapes(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and the dtype of each tensor, for one row. dtype: the dtype of the vectors."""
        return {"tail": ((DELTA_WINDOW + self.before + 1, self.channels), dtype)}

    def snapshot_shapes(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The same for the tensors of a snapshot: the tail before the base."""
        return {"saved_tail": ((self.before, self.channels), dtype)}

    def allocate(self, R: int, T: int, zeros: Callable, dtype: torch.dtype):
        """Make the states of R rows, of any number T of positions. zeros(shape, dtype=...) makes the
        tensors. dtype: the dtype of the vectors."""
        self.dtype = dtype
        for name, (shape, kind) in self.shapes(dtype).items():
            self.register_buffer(name, zeros((R, *shape), dtype=kind), persistent=False)

    def nbytes(self, R: int, T: int, dtype: torch.dtype) -> int:
        """The bytes that `allocate` takes."""
        return R * bytes_of(self.shapes(dtype))

    def copy(self, source_row: int, target_row: int, n: int):
        """Copy the state of one row to another."""
        if source_row == target_row or n == 0:  # position 0 begins with zeros
            return
        for name in self.shapes(self.dtype):
            tensor = self.get_buffer(name)
            tensor[target_row] = tensor[source_row]

    def write_tail(self, x: Tensor, input_pos: Tensor, rows: Tensor):
        """Keep the vectors x (B,S,channels) at positions (B,S) of rows (B,)."""
        size = self.tail_size
        is_kept = input_pos >= 0
        if input_pos.shape[1] > size:
            newest = input_pos.amax(1, keepdim=True)  # (B,1)
            is_kept = is_kept & (input_pos > newest - size)
        slots = torch.where(is_kept, input_pos % size, size)
        self.tail[rows[:, None], slots] = x.to(self.tail.dtype)

    def read_tail(self, first: Tensor, rows: Tensor) -> Tensor:
        """The vectors (B,before,channels) before positions `first` (B,). Before position 0 there are
        zeros."""
        back = torch.arange(-self.before, 0, device=first.device)
        positions = first[:, None] + back  # (B,before)
        found = self.tail[rows[:, None], positions % self.tail_size]
        return torch.where((positions >= 0)[..., None], found, 0)

    def with_tail(self, x: Tensor, input_pos: Tensor, rows: Tensor) -> Tensor:
        """The earlier vectors, then the new ones x (B,S,channels): (B,before+S,channels). Keeps the
        new ones."""
        S = x.shape[1]
        if S <= MAX_DECODE_TOKENS:  # several batch rows may have tokens of the same row: all are written first
            self.write_tail(x, input_pos, rows)
        tail = self.read_tail(input_pos[:, 0], rows).to(x.dtype)
        if S > MAX_DECODE_TOKENS:  # the new tokens may be more than the tail can hold
            self.write_tail(x, input_pos, rows)
        return torch.cat([tail, x], dim=1)

    @property
    def tail_size(self) -> int:
        """How many of a row's latest vectors are kept."""
        return self.tail.shape[1] - 1

    # ------------------------------------------------------------ snapshots

    def allocate_snapshots(self, slots: int):
        """Make room for this many snapshots."""
        device = next(self.buffers()).device
        for name, (shape, kind) in self.snapshot_shapes(self.dtype).items():
            zeros = torch.zeros(slots, *shape, dtype=kind, device=device)
            self.register_buffer(name, zeros, persistent=False)

    def snapshot_bytes(self, dtype: torch.dtype) -> int:
        """The bytes of a snapshot."""
        return bytes_of(self.snapshot_shapes(dtype))

    def save(self, row: int, slot: int, position: int):
        """Copy the state of a row at its base, which is this position, to a slot."""
        first = torch.tensor([position], device=self.tail.device)
        self.saved_tail[slot] = self.read_tail(first, first.new_tensor([row]))[0]

    def restore(self, slot: int, row: int, position: int):
        """Give a row the state that was saved at this position."""
        positions = torch.arange(position - self.before, position, device=self.tail.device)
        self.tail[row, positions % self.tail_size] = self.saved_tail[slot]


class ConvState(Tail):
    """The state of one short convolution: the latest inputs of its convolution, and R bases.

    base (R,): a pass over a row may begin at this position, or at one of the next W = DELTA_WINDOW
    positions. It is where the row's last pass began, or W tokens before its end if it was longer.
    """

    def __init__(self, net: DeltaNet | ShortConv):
        super().__init__(net.conv_channels, net.conv_width - 1)
        self.net = net

    def shapes(self, dtype):
        return {"base": ((), torch.int64)} | super().shapes(dtype)

    def step_bytes(self, dtype: torch.dtype) -> int:
        """The bytes that a step reads and writes for each row."""
        return self.net.conv_width * self.channels * dtype.itemsize

    def move_base(self, input_pos: Tensor, rows: Tensor):
        """Set the base of the rows of a pass over positions (B,S) of rows (B,). (For a DeltaState,
        mixers.recurrent.gated_delta sets it.)

        RuntimeError if a row cannot go on at its position, as in mixers.recurrent.gated_delta. This is
        checked on CPUs only: elsewhere it would wait for the device.
        """
        is_real = input_pos >= 0
        # Several batch rows may have tokens of one row.
        first = torch.where(is_real, input_pos, NO_POSITION).amin(1)
        starts = torch.full_like(self.base, NO_POSITION).scatter_reduce(0, rows, first, "amin")  # (R,)
        counts = torch.zeros_like(self.base).scatter_add(0, rows, is_real.sum(1))
        if self.base.device.type == "cpu" and not torch.compiler.is_compiling():
            for row in rows.unique().tolist():
                start = int(starts[row])
                if 0 < start < NO_POSITION:
                    check_pending(start - int(self.base[row]), row, start)

        moved = starts + (counts - DELTA_WINDOW).clamp(min=0)
        self.base.copy_(torch.where(counts > 0, moved, self.base))

    def restore(self, slot: int, row: int, position: int):
        super().restore(slot, row, position)
        self.base[row] = position


class DeltaState(ConvState):
    """The state of one gated delta net: R rows.

    matrix (R,m,dk,dv): each row's tokens before its base. keys (R,W,n,dk), deltas (R,W,m,dv) and
    decays (R,W,m): the updates of the W = DELTA_WINDOW tokens from there on, of which the next pass
    applies the accepted ones (mixers.recurrent.gated_delta). All are float32.
    """

    def shapes(self, dtype):
        net = self.net
        floats = {
            "matrix": (net.n_value_head, net.key_dim, net.value_dim),
            "keys": (DELTA_WINDOW, net.n_key_head, net.key_dim),
            "deltas": (DELTA_WINDOW, net.n_value_head, net.value_dim),
            "decays": (DELTA_WINDOW, net.n_value_head),
        }
        return super().shapes(dtype) | {name: (shape, torch.float32) for name, shape in floats.items()}

    def step_bytes(self, dtype):
        return 2 * 4 * self.net.matrix_elements

    def snapshot_shapes(self, dtype):
        net = self.net
        matrix = (net.n_value_head, net.key_dim, net.value_dim)
        return super().snapshot_shapes(dtype) | {"saved_matrix": (matrix, torch.float32)}

    def save(self, row: int, slot: int, position: int):
        super().save(row, slot, position)
        self.saved_matrix[slot] = self.matrix[row]

    def restore(self, slot: int, row: int, position: int):
        super().restore(slot, row, position)
        self.matrix[row] = self.saved_matrix[slot]


def bytes_of(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


# ---------------------------------------------------------------- snapshots


def snapshot_slots(
    states: list[Tail], rows: int, positions: int, kv_bytes: int, dtype: torch.dtype, limit: int | None
) -> int:
    """How many snapshots of these states are kept, for `rows` rows with this many positions each.

    limit: the bytes for them, in all layers. By default as many bytes as the keys and values of all
    rows have (kv_bytes), but at least SNAPSHOTS_PER_ROW snapshots for each row, and no more than one
    for SNAPSHOT_POSITIONS positions: snapshots of short convolutions are small, and would be many.
    """
    size = sum(state.snapshot_bytes(dtype) for state in states)
    if limit is not None:
        return limit // size
    slots = min(kv_bytes // size, rows * positions // SNAPSHOT_POSITIONS)
    return max(slots, SNAPSHOTS_PER_ROW * rows)


@dataclass(eq=False)
class Snapshot:
    """A copy of all layers' states of a row, at a position."""

    position: int
    slot: int
    is_turn: bool  # a turn of a conversation ends about here
    last_used: int  # the number of this use among the uses of all snapshots


class Snapshots:
    """The snapshots of a model's recurrent states.

    Keys and values can be cut at any position, but a state holds all tokens up to its base. So
    copies of it are kept: near the end of each prompt, where an answer ended, and every
    SNAPSHOT_INTERVAL tokens of a long prompt. A snapshot holds no keys and values: these are in the
    rows. So each row has a list of the snapshots for its tokens. A snapshot may be in several lists,
    because rows are copied, and its slot is free when it is in none. If no slot is free, the least
    recently used snapshot is evicted, snapshots within long prompts before the ends of turns.

    All ranks of a split model make the same decisions, because they get the same calls.
    """

    def __init__(self, states: list[Tail], slots: int, rows: int):
        """states: the recurrent state of each layer; the first is a ConvState."""
        self.states = states
        self.rows: list[list[Snapshot]] = [[] for _ in range(rows)]  # of each row
        self.free = list(range(slots))
        self.uses = itertools.count()
        for state in states:
            state.allocate_snapshots(slots)

    def restorable(self, row: int, n: int) -> int:
        """The largest position m <= n to which a row can go back."""
        if n == 0 or self._base(row) <= n:
            return n
        snapshot = self._latest(row, n)
        return 0 if snapshot is None else snapshot.position

    def reuse(self, source: int, target: int, n: int):
        """Give the target row the first n positions of the source row, which may be the same. The
        states of all layers have been copied."""
        shared = [snapshot for snapshot in self.rows[source] if snapshot.position <= n]
        snapshot = self._latest(source, n)
        if snapshot is not None:
            snapshot.last_used = next(self.uses)
        if n > 0 and self._base(source) > n:
            for state in self.states:
                state.restore(snapshot.slot, target, n)
        self._replace(target, shared)

    def offer(self, row: int, unread: int):
        """Take a snapshot of a row at its base, unless there is one not far before it.

        unread: the tokens of the prompt that are not in the row yet. The next turn's prompt may lack
        the last tokens of this one, but seldom more than DELTA_WINDOW: a snapshot so near the end
        counts as the end of a turn.
        """
        position = self._base(row)
        is_turn = unread <= DELTA_WINDOW
        distance = DELTA_WINDOW if is_turn else SNAPSHOT_INTERVAL
        before = self._latest(row, position)
        if position - (0 if before is None else before.position) < distance:
            return
        slot = self._take_slot()
        if slot is None:
            return
        for state in self.states:
            state.save(row, slot, position)
        self.rows[row].append(Snapshot(position, slot, is_turn, next(self.uses)))

    def _base(self, row: int) -> int:
        return int(self.states[0].base[row])

    def _latest(self, row: int, n: int) -> Snapshot | None:
        """The last snapshot of a row at a position of at most n."""
        before = [snapshot for snapshot in self.rows[row] if snapshot.position <= n]
        return max(before, key=lambda snapshot: snapshot.position, default=None)

    def _replace(self, row: int, snapshots: list[Snapshot]):
        """Give a row another list, and free the slots of snapshots that are in no list any more."""
        dropped = self.rows[row]
        self.rows[row] = snapshots
        for snapshot in dropped:
            if not any(snapshot in others for others in self.rows):
                self.free.append(snapshot.slot)

    def _take_slot(self) -> int | None:
        """Returns a free slot. If there is none, evicts a snapshot."""
        if not self.free:
            held = {snapshot for snapshots in self.rows for snapshot in snapshots}
            if not held:  # there is no memory for any
                return None
            least = min(held, key=lambda snapshot: (snapshot.is_turn, snapshot.last_used))
            for row, snapshots in enumerate(self.rows):
                self._replace(row, [snapshot for snapshot in snapshots if snapshot is not least])
        return self.free.pop()


# ---------------------------------------------------------------- the gated delta rule
DELTA_CHUNK = 64  # tokens that the version for long prompts without kernels computes at once


def gated_delta(q, k, v, log_decay, beta, state, input_pos, rows):
    """The gated delta rule (arXiv:2412.06464): each token updates a matrix for each value head, and
    reads it.

    q, k: (B,S,n,dk) float32, for n key heads; q is scaled. Value head h uses key head h % n.
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

    Updates are applied in the next pass. A row's matrix holds its tokens before the position `base`.
    Up to DELTA_WINDOW tokens from there on are pending: they have been read, but their updates (key,
    delta beta (v - k^T M), and decay) are stored beside the matrix. A pass that begins at position p
    first applies the p - base pending updates before p. So a pass may go on at any position from `base`
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
        if not is_finite(y):  # 0 * NaN is NaN, so NaN of a token has reached the tokens before it
            out[chunk], M, all_deltas[chunk] = delta_tokens(M, *[x[chunk] for x in (q, k, v, log_decay, beta)])
            continue
        M = scale[:, -1:] * M + K.mT @ (ratio[:, -1, :, None] * deltas)
        out[chunk] = y.transpose(0, 1)
        all_deltas[chunk] = deltas.transpose(0, 1)
    return out, M, all_deltas
