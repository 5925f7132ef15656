"""A shadow of the output head: a copy in fewer bits, which shows which logits of the head are needed.

A step needs a token, and not V logits. cpu/head.h describes the bound that leaves most of them out, and
computes it; `bounds` makes its numbers. A token that is drawn with the shadow is the
token that is drawn with all logits, to the bit.

The source of the bound is the inequality of Cauchy and Schwarz, with a scale for each column: the hidden
states of most models are large in a few columns, for which a good scale is large.
"""

import torch
from torch import Tensor, nn

from cpu.layers import PackedLinear
from formats import QuantizedLinear, Scheme
from model import Transformer

SHADOW_BITS = {"q8_0": 5, "int8": 5, "q6_k": 4}  # by the format of the head: as few as make the bound narrow enough
MIN_TOKENS = 16384  # with fewer logits, choosing among them costs more than it saves
MAX_ROWS = 1  # with more hidden states, the products take longer than reading the weights
SOME_ROWS = 1024
MOST_READ = 0.25  # the share of the head beyond which a shadow costs more than it saves
ENOUGH_PASSES = 8  # after which the share is known
CALIBRATION_TOKENS = 32
ROUNDING = 2.0**-24  # the largest relative error of a float32 operation


class ShadowHead:
    """The output head and its shadow, for Backend.drawable_logits.

    counts (2,2), for passes without and with top-k: how many blocks of 16 tokens they have read of the head,
    and how many it has together. If they had to read many, later passes read all.
    """

    def __init__(self, head: PackedLinear, usual: Tensor, n_token: int, softcap: float | None = None):
        """usual (D,): the usual sizes of hidden states. n_token: the tokens that may be drawn are the first of
        the head. softcap: of the logits."""
        self.head = head
        self.softcap = softcap
        D = head.in_features
        bits = SHADOW_BITS[head.stored_as]
        # The product of the two norms of the bound is smallest if scale^2 is x / error.
        scale = (usual / usual_errors(head, bits).clamp(min=1e-9)).sqrt()
        scale = scale / scale.mean()
        blocks, norms = torch.ops.fastpath.quantize_head(head.prepared.handle, bits, scale)
        with torch.device("meta"):
            layer = QuantizedLinear(D, head.out_features, False, Scheme(f"q{bits}_0", 32))
        layer.load_state_dict({"blocks": blocks}, assign=True)
        self.shadow = PackedLinear(layer, exact=False)
        self.norms = bounds(*norms.unbind(1), groups=-(-D // 32))[:n_token].clone()
        self.inverse_scales = 1 / scale
        self.counts = torch.zeros(2, 2, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return self.shadow.weight.nbytes + self.norms.nbytes

    @property
    def share_read(self) -> float | None:
        """The share of the head's blocks that the passes so far have read; None before the first."""
        read, all_blocks = self.counts.sum(0).tolist()
        return read / all_blocks if all_blocks else None

    def __call__(
        self, x: Tensor, temperature: Tensor, seed: Tensor, top_k: Tensor, min_p: Tensor, position: Tensor
    ) -> Tensor | None:
        """The logits (n,V) of hidden states x (n,D); -inf for tokens that cannot be drawn with these
        settings (n,). None if nothing would be gained: with too many rows, or where passes had to read many
        blocks."""
        counts = self.counts[int(top_k.any())]
        read, all_blocks = counts.tolist()
        if len(x) > MAX_ROWS or read > MOST_READ * max(all_blocks, ENOUGH_PASSES * len(self.norms) // 16):
            return None
        return torch.ops.fastpath.head_logits(
            x, self.head.prepared.handle, self.shadow.prepared.handle, self.norms, self.inverse_scales,
            temperature, seed, top_k, min_p, position, counts, self.softcap or 0.0,
        )  # fmt: skip


def make_shadow(model: Transformer) -> ShadowHead | None:
    """The shadow of a model's head, or None if it would not gain anything. The model has caches, and a
    pass over random tokens in their first row shows the usual sizes of its hidden states."""
    config = model.config
    head = model.embedding if model.output is None else model.output
    n_token = config.n_token or config.vocab_size
    if not isinstance(head, PackedLinear) or head.stored_as not in SHADOW_BITS or head.bias is not None:
        return None
    if model.dtype == torch.float32:  # then activations are not quantized
        return None
    softcap = config.logits_softcap
    if n_token < MIN_TOKENS or config.logits_scale != 1.0 or (softcap is not None and not 1e-3 <= softcap <= 1e4):
        return None
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(n_token, (1, min(CALIBRATION_TOKENS, model.cache_size[1] - 1)), generator=generator)
    x = model.hidden(tokens, torch.arange(tokens.shape[1])[None])[0]  # (S,D)
    usual = x.float().square().mean(0).sqrt().nan_to_num().clamp(1e-6, 1e6)
    return ShadowHead(head, usual, n_token, softcap)


def usual_errors(head: PackedLinear, bits: int) -> Tensor:
    """The usual errors (D,) of the columns in the shadow, from some rows of the head."""
    rows = torch.arange(0, head.out_features, -(-head.out_features // SOME_ROWS))
    D = head.in_features
    weights = torch.ops.fastpath.embed_packed(rows, head.prepared.handle, D)
    groups = nn.functional.pad(weights, (0, -D % 32)).unflatten(1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 0.5)
    error = groups - step * (groups / step).round()
    return error.flatten(1)[:, :D].square().mean(0).sqrt()


def bounds(size: Tensor, error: Tensor, groups: int) -> Tensor:
    """For each row (V,): a bound of |logit - shadow's logit| for hidden states with norm(x / scale) = 1.

    size and error (V,): the norms of the head's row and of its error, times the scales of the columns. The
    bound is the error, and what float32 may add: both products sum up groups of 32 columns, each of which
    is rounded three times at most, and the sum once for each group.
    """
    return (error + 2 * (groups + 4) * ROUNDING * (2 * size + error)) * (1 + 1e-5)
