"""Medusa heads and a draft vocabulary for a tiny model, without training."""

import torch

from drafts.draft_model import GROUPSIZE, DraftVocabulary, output_head_rows
from drafts.heads import MedusaHeads
from formats import pack


def random_heads(model, n: int = 4, size: float = 0.05) -> MedusaHeads:
    """Heads that change the hidden state a little. Models with random weights often repeat a token, which these heads
    then propose."""
    D, F = model.config.dim, 21
    chance = torch.Generator().manual_seed(3)
    weights = {
        "gate_up": torch.randn(2 * F, 2 * D, generator=chance),
        "down": size * torch.randn(D, F, generator=chance),
    }
    return MedusaHeads({key: pack(w, "int8", GROUPSIZE) for key, w in weights.items()}, n, some_tokens(model))


def some_tokens(model) -> DraftVocabulary:
    """Three quarters of a model's tokens."""
    V = model.config.n_token or model.config.vocab_size
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(4))[: V * 3 // 4]
    return DraftVocabulary(ids, output_head_rows(model, ids))
