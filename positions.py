"""Where a token stands in its row: rotary position embedding (RoPE), its scalings, and ALiBi.

Read down: RoPE's frequencies, its cos and sin, `rotate`; Positions, which has the tables of a model; what is in them.
Shapes are explained in model.py.

Sources: RoPE (arXiv:2104.09864), YaRN (arXiv:2309.00071), ALiBi (arXiv:2108.12409).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config, RopeScaling


def rope_frequencies(E: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """RoPE's E/2 angular frequencies in float32, in radians per position, for what Config.rope returns. E is the number
    of dimensions that are rotated."""
    if base == math.inf:  # a layer without RoPE: cos is 1 and sin is 0
        return torch.zeros(E // 2, device="cpu")
    freqs = 1.0 / float(base) ** (torch.arange(0, E, 2, dtype=torch.float32, device="cpu") / E)  # (E/2,)
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind in ("factors", "longrope"):
        return freqs / torch.tensor(scaling.factors)
    context = scaling.original_max_seq_length
    if scaling.kind == "llama3":
        # Frequencies with more than high_freq_factor rotations in the training context are kept; those with fewer than
        # low_freq_factor are divided by factor; those between are interpolated. `keep` is the weight of the original.
        rotations = context * freqs / (2 * math.pi)
        keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:  # yarn

        def dimension(rotations):  # the index of the frequency with this many rotations in the training context
            return E * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, E - 1)
        high += 0.001 * (low == high)  # avoids a division by zero
        keep = 1 - (torch.arange(E // 2, device="cpu") - low) / (high - low)
    keep = keep.clamp(0, 1)
    return freqs * keep + freqs / scaling.factor * (1 - keep)


def rope_table(freqs: Tensor, scaling: RopeScaling | None, input_pos: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, (B,S,1,E) float32; sin carries the sign that `rotate` needs."""
    # In float64: in one of ten processes, the first float32 cosine that torch computed on two threads had other last
    # bits, and some tokens were others.
    angles = (input_pos[:, :, None, None].float() * freqs).double()  # (B,S,1,E/2)
    cos, sin = angles.cos().float(), angles.sin().float()
    if scaling is not None and scaling.attention_factor != 1.0:
        factor = torch.where(freqs > 0, scaling.attention_factor, 1.0)  # 1 for dimensions that are not rotated
        cos, sin = cos * factor, sin * factor
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + E/2) of x (B,S,heads,E) by the angles of `rope_table`, in float32; returns x's dtype."""
    cos, sin = rope
    y = x.float()  # first, because torch multiplies tensors of different dtypes ten times slower
    return (y * cos + y.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Positions(nn.Module):
    """The tables that all layers of a model look up positions in, for cache rows of T slots.

    rope_cos, rope_sin: (P,T,1,E) float32 for the P different results of Config.rope, in their order; None with ALiBi.
    They are tables, because a compiled cosine differs from the eager one in the last bit.
    query_scales: (T,1,1) float32, what a query is multiplied by (Ministral 3).
    slopes: (H,) float32, those of ALiBi.
    Each is None if the model does not have it. heads: the query heads of this rank.
    """

    def __init__(self, config: Config, T: int, heads: range, device: torch.device):
        super().__init__()
        slots = torch.arange(T, device=device)[None]  # (1,T)
        tables = {"query_scales": query_scales(config, slots), "rope_cos": None, "rope_sin": None, "slopes": None}
        if config.alibi:
            tables["slopes"] = alibi_slopes(config.n_head)[list(heads)].to(device)
        else:
            tables["rope_cos"], tables["rope_sin"] = rope_tables(config, slots)
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def ropes(self, input_pos: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """cos and sin of positions (B,S) from each table, as `rotate` takes them: (B,S,1,E) float32. None with ALiBi.
        A block takes those of its own table, ropes[block.rope_table]."""
        if self.rope_cos is None:
            return [None]
        return [(cos[input_pos], sin[input_pos]) for cos, sin in zip(self.rope_cos.unbind(), self.rope_sin.unbind())]


def rope_tables(config: Config, slots: Tensor) -> tuple[Tensor, Tensor]:
    """rope_cos and rope_sin of Positions. slots: 0 to T-1, (1,T)."""
    E, rotated = config.head_dim, config.rotary_dim or config.head_dim

    def table(base, scaling):  # pairs of dimensions from rotary_dim / 2 on are not rotated
        freqs = F.pad(rope_frequencies(rotated, base, scaling), (0, (E - rotated) // 2))
        return rope_table(freqs.to(slots.device), scaling, slots)

    cos, sin = zip(*(table(*rope) for rope in config.different_ropes()))
    return torch.cat(cos), torch.cat(sin)  # (P,T,1,E)


def query_scales(config: Config, slots: Tensor) -> Tensor | None:
    """What Ministral 3 multiplies a query by, at all T slots (1,T): (T,1,1) float32, or None for other models. It is 1
    within the original context, and grows with the logarithm of how many times the position is beyond it."""
    if config.query_scale_beta is None:
        return None
    contexts = torch.floor(slots / config.rope_scaling.original_max_seq_length)
    return (1 + config.query_scale_beta * torch.log(1 + contexts)).view(-1, 1, 1)


def alibi_slopes(H: int) -> Tensor:
    """ALiBi's H slopes in float32 (arXiv:2108.12409). The first n heads, n being the largest power of two up to H, have
    2^(-8/n), 2^(-16/n) ... As in the authors' code, the other heads have every second slope of the series for 2n."""
    n = 2 ** int(math.log2(H))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    slopes += [2 ** (-8 * i / (2 * n)) for i in range(1, 2 * (H - n), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")
