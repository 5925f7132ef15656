"""The model's MTP layer (mixers/mtp.py) proposes tokens.

The proposal is a chain: each token is drafted from the layer's output for the one before it. As with
Medusa heads, a row with a temperature samples its drafts with the target's noise, so that the draft
is deterministic, and the tokens are always the same as in plain decoding.

The output head takes a large part of a draft's time, as it has a row for each of up to 250,000
tokens. So the draft takes only its first rows. A byte-pair vocabulary is in the order of its merges,
and so its first tokens are the most frequent ones (see docs/speculation.md).

Read down: MtpDraft, the draft for speculative.Speculation; ReducedHead; draw_tokens. Knows nothing of
text.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costs import reads_of
from drafts.draft import Draft, Proposal, full_width_choices
from engine import Batch, Engine
from model import Transformer, soft_cap
from sampling import Sampling, sample

HEAD_ROWS = 32768  # tokens from this id on are never proposed
CHOICES = (1, 2, 3, 4, 6)  # numbers of tokens to choose from, if shapes are not fixed


class MtpDraft(Draft):
    """Proposes tokens with the target's mtp.MTPLayer."""

    name = "mtp"
    prior = (0.7, 2.0)
    max_k = CHOICES[-1]

    def __init__(self, model: Transformer):
        self.head = ReducedHead(model)
        layers = [model.mtp.proj, model.mtp.block, self.head.layer]
        self.reads = reads_of(layers, model.mtp.block.sparse)

    def begin(self, engine: Engine):
        super().begin(engine)
        self.draw = engine.steps.compile(draw_tokens)

    def propose(self, batch: Batch, k: int) -> Proposal:
        model = self.engine.model
        k = min(k, self.max_k)
        sampling = self.sampling if batch.random else None
        drafted = self.draw(model, self.head, batch.inputs, sampling, k)
        return Proposal(self.fitting(batch, drafted), k)

    def choices(self, k: int) -> list[int]:
        k = min(k, self.max_k)
        if self.engine.steps.fixed_shapes:
            return full_width_choices(k)
        return [n for n in CHOICES if n < k] + [k]

    def bytes_read(self, k: int, positions: list[int]) -> tuple[float, float]:
        model = self.engine.model
        kv = model.mtp.block.mixer.kv_bytes(positions, model.dtype)
        return k * self.reads.total(len(positions)), k * kv


class ReducedHead(nn.Module):
    """The target's output head for its first tokens."""

    def __init__(self, model: Transformer):
        super().__init__()
        whole = model.embedding if model.output is None else model.output
        self.n = min(HEAD_ROWS, model.config.n_token or model.config.vocab_size)
        part = None
        if model.shard.ranks == 1 and (self.n % 16 == 0 or self.n == whole.out_features):
            part = whole.first_rows(self.n)
        self.is_whole = part is None  # it cannot be divided
        self.layer = whole if self.is_whole else part

    def logits(self, model: Transformer, x: Tensor) -> Tensor:
        """The logits (...,n) for hidden states x (...,D)."""
        if self.is_whole:
            return model.head(x)[..., : self.n]
        return soft_cap(self.layer(x) * model.config.logits_scale, model.config.logits_softcap)


def draw_tokens(model, head: ReducedHead, inputs: Tensor, sampling: Sampling | None, k: int):
    """Draw k tokens (B,k) after the newest token of each row; without `sampling`, the likeliest.

    inputs (3,B) as in engine.decode.
    """
    token, position, rows = inputs.unbind(0)
    hidden = model.mtp.hidden.read_tail(position, rows)  # (B,1,D)
    last_slot = model.cache_size[1] - 1  # it is for padding, and so for drafts that the row has no room for

    drafted = []
    for i in range(k):
        pair_pos = position - 1 + i
        pair_pos = torch.where((position >= 0) & (pair_pos < last_slot), pair_pos, -1)
        hidden = model.mtp(model.block_inputs(token[:, None]), hidden, pair_pos[:, None], rows, model.backend)
        logits = head.logits(model, hidden)  # (B,1,n)
        token = logits[:, 0].float().argmax(-1)  # in bfloat16 it takes as long as the logits
        if sampling is not None:
            others = sampling.counts.shape[1] - head.n
            logits = F.pad(logits, (0, others), value=float("-inf"))  # (B,1,V)
            ids, _ = sample(logits, rows, position + 1 + i, None, sampling)  # (B,1)
            token = ids[:, 0].clamp(min=0)
        drafted.append(token)
    return torch.stack(drafted, 1)
