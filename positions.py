"""Where a token stands in its row: rotary position embedding (RoPE), its scalings, and ALiBi.

Read down: RoPE's frequencies, its cos and sin, `rotate`; Positions, which has the tables of a
model; what is in them. Shapes are explained in model.py.

Sources: RoPE (arXiv:2104.09864), YaRN (arXiv:2309.00071), ALiBi (arXiv:2108.12409).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import MAX_NUMBER, Config, RopeScaling


def rope_frequencies(E: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """RoPE's E/2 angular frequencies in float32, in radians per position.

    E: the number of dimensions that are rotated. base, scaling: see Config.rope.
    """
    if base == math.inf:  # a layer without RoPE: cos is 1 and sin is 0
        return torch.zeros(E // 2, device="cpu")

    freqs = 1.0 / float(base) ** (torch.arange(0, E, 2, dtype=torch.float32, device="cpu") / E)  # (E/2,)
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind in ("factors", "longrope"):
        divisors = torch.tensor(scaling.factors)
        return torch.where(divisors < MAX_NUMBER, freqs / divisors, 0.0)

    keep = kept_llama3(freqs, scaling) if scaling.kind == "llama3" else kept_yarn(E, base, scaling)
    keep = keep.clamp(0, 1)
    return freqs * keep + freqs / scaling.factor * (1 - keep)


def kept_llama3(freqs: Tensor, scaling: RopeScaling) -> Tensor:
    """The weight (E/2,) of each original frequency; the scaled frequency has the rest, 1 - weight.
    The caller clamps the weights to 0..1.

    Frequencies with more than high_freq_factor rotations in the training context are kept.
    Frequencies with fewer than low_freq_factor are divided by factor. Between, they are interpolated.
    """
    rotations = scaling.original_max_seq_length * freqs / (2 * math.pi)
    return (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)


def kept_yarn(E: int, base: float, scaling: RopeScaling) -> Tensor:
    """As kept_llama3: a linear ramp over the dimensions, from beta_fast to beta_slow rotations in
    the context."""

    def dimension(rotations):  # the index of the frequency with this many rotations in the training context
        return E * math.log(scaling.original_max_seq_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, E - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    return 1 - (torch.arange(E // 2, device="cpu") - low) / (high - low)


def rope_table(freqs: Tensor, scaling: RopeScaling | None, input_pos: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, (B,S,1,E) float32; sin carries the sign that `rotate`
    needs."""
    # In float64: in one of ten processes, the first float32 cosine that torch computed on two
    # threads had other last bits, which changed some tokens.
    angles = (input_pos[:, :, None, None].float() * freqs).double()  # (B,S,1,E/2)
    cos = angles.cos().float()
    sin = angles.sin().float()
    if scaling is not None and scaling.attention_factor != 1.0:
        factor = torch.where(freqs > 0, scaling.attention_factor, 1.0)  # 1 for dimensions that are not rotated
        cos = cos * factor
        sin = sin * factor
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + E/2) of x (B,S,heads,E) by the angles of `rope_table`, in float32;
    returns x's dtype."""
    cos, sin = rope
    y = x.float()  # first, because torch multiplies tensors of different dtypes ten times slower
    return (y * cos + y.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Positions(nn.Module):
    """The tables that all layers of a model look up positions in, for cache rows of T slots.

    rope_cos, rope_sin: (P,T,1,E) float32 for the P different results of Config.rope, in their
    order; None with ALiBi. If heads differ in width, E is the largest, and `widths` has the width of each
    table. They are tables, because a compiled cosine differs from the eager one in the last bit.
    query_scales: (T,1,1) float32, what a query is multiplied by (Ministral 3), or None.
    slopes: (H,) float32, ALiBi's slopes, or None.

    The tables have T entries and not only one for each position, because padding (position -1)
    looks up the last.
    heads: the query heads of this rank.
    """

    def __init__(self, config: Config, T: int, heads: range, device: torch.device):
        super().__init__()
        slots = torch.arange(T, device=device)[None]  # (1,T)
        self.widths = [rope.head_dim for rope in config.different_ropes()]
        cos, sin = rope_tables(config, slots)
        slopes = alibi_slopes(config.n_head)[list(heads)].to(device) if config.alibi else None
        self.register_buffer("query_scales", query_scales(config, slots), persistent=False)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.register_buffer("slopes", slopes, persistent=False)

    def ropes(self, input_pos: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """cos and sin of positions (B,S) from each table, as `rotate` takes them: (B,S,1,E)
        float32. None with ALiBi.

        A block takes ropes[block.rope_table], from its own table.
        """
        if self.rope_cos is None:
            return [None]
        found = []
        for cos, sin, width in zip(self.rope_cos.unbind(), self.rope_sin.unbind(), self.widths):
            found.append((cos[..., :width][input_pos], sin[..., :width][input_pos]))
        return found


def rope_tables(config: Config, slots: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """rope_cos and rope_sin of Positions, (P,T,1,E) each, or None with ALiBi. slots: 0 to T-1,
    (1,T)."""
    if config.alibi:
        return None, None

    ropes = config.different_ropes()
    widest = max(rope.head_dim for rope in ropes)
    tables = []
    for base, scaling, E in ropes:
        rotated = config.rotary_dim or E
        freqs = rope_frequencies(rotated, base, scaling)
        freqs = F.pad(freqs, (0, (E - rotated) // 2))  # the other dimensions are not rotated
        table = torch.stack(rope_table(freqs.to(slots.device), scaling, slots))  # (2,1,T,1,E)
        tables.append(F.pad(table, (0, widest - E)))
    cos, sin = torch.cat(tables, 1)  # (P,T,1,E) each
    return cos, sin


def query_scales(config: Config, slots: Tensor) -> Tensor | None:
    """What Ministral 3 multiplies a query by, at all T slots (1,T): (T,1,1) float32. None for other
    models.

    It is 1 within the original context, and grows with the logarithm of how many times the position
    is beyond it.
    """
    if config.query_scale_beta is None:
        return None
    contexts = torch.floor(slots / config.rope_scaling.original_max_seq_length)
    return (1 + config.query_scale_beta * torch.log(1 + contexts)).view(-1, 1, 1)


def alibi_slopes(H: int) -> Tensor:
    """ALiBi's H slopes in float32 (arXiv:2108.12409).

    The first n heads have 2^(-8/n), 2^(-16/n) ..., where n is the largest power of two up to H. As
    in the authors' code, the other heads have every second slope of the series for 2n.
    """
    n = 2 ** int(math.log2(H))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    slopes += [2 ** (-8 * i / (2 * n)) for i in range(1, 2 * (H - n), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")
