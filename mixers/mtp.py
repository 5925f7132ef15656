"""The MTP layer of Qwen3.5 (multi-token prediction), which drafts tokens.

The model's last hidden state h(p), of the token x(p) at position p, gives the next token, x(p+1).
The MTP layer then takes both and gives the token after it:

    z(p) = proj [norm(embedding of x(p+1)), norm(h(p))]
    y(p) = norm(block(z(p))), where the block is one of the model's, with attention over z(0) ... z(p)
    the model's own output head gives the logits of x(p+2) from y(p)

For a further token, the layer takes y(p) instead of the hidden state, and the token that it has
drafted.

The keys and values of z(0) ... z(p) are in a KV cache of the layer's own. They cannot be made again
from tokens alone, because they need the model's hidden states. So each pass of the model writes them
(`read`), and they are copied and reused with the model's own. Drafting writes to the cache, too, and
the pass that verifies the drafted tokens overwrites that.

drafts/mtp.py drafts with this layer. A model without one needs nothing of this file.

Sources: multi-token prediction (arXiv:2404.19737, and as here arXiv:2412.19437); Qwen3.5.
"""

import torch
from torch import Tensor, nn

from backend import Backend
from config import Config
from layers import Linear, make_norm
from mixers.recurrent import Tail


class MTPLayer(nn.Module):
    """The MTP layer: drafts the token after the next one. Shapes as in model.py."""

    def __init__(self, config: Config, block: nn.Module):
        """block: a model.Block with attention."""
        super().__init__()
        self.embedding_norm = make_norm(config)
        self.hidden_norm = make_norm(config)
        self.proj = Linear(2 * config.dim, config.dim, bias=False)
        self.block = block
        self.norm = make_norm(config)
        self.hidden = Tail(config.dim, 1)  # the model's latest hidden states of each row

    def read(self, embedded: Tensor, hidden: Tensor, input_pos: Tensor, rows: Tensor, backend: Backend):
        """Write the keys and values of tokens that the model has read.

        embedded (B,S,D): the tokens' embeddings; hidden (B,S,D): the model's last hidden states of
        the same tokens; input_pos (B,S) and rows (B,): as in Transformer.forward.
        """
        if backend.write_draft_keys is not None and hidden.shape[1] <= backend.max_fused_tokens:
            return backend.write_draft_keys(self, embedded, hidden, input_pos, rows)

        before = self.hidden.with_tail(hidden, input_pos, rows)[
            :, :-1
        ]  # for each token, the state of the token before it
        z = self.join(embedded, before)
        h = self.block.attention_norm(z)
        # The first token of a row has no hidden state before it: its pair goes to the scratch slot.
        pair_pos = (input_pos - 1).clamp(min=-1)
        ropes = self.block.mixer.positions.ropes(pair_pos)
        self.block.mixer.read(h, ropes[self.block.rope_table], pair_pos, rows)

    def forward(self, embedded: Tensor, hidden: Tensor, pair_pos: Tensor, rows: Tensor, backend: Backend) -> Tensor:
        """The normalized outputs (B,S,D) for pairs of a token (its embedding) and the hidden state
        before it, (B,S,D) each. pair_pos (B,S): the positions of the hidden states; -1 is padding.
        """
        z = self.join(embedded, hidden)
        ropes = self.block.mixer.positions.ropes(pair_pos)
        if backend.run_draft is not None and z.shape[1] <= backend.max_fused_tokens:
            y = backend.run_draft([self.block], z, ropes, pair_pos, rows)
        else:
            y = self.block(z, ropes[self.block.rope_table], pair_pos, rows)
        return self.norm(y)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The inputs (B,S,D) of the block: pairs of a token and the hidden state before it."""
        pair = [self.embedding_norm(embedded.to(hidden.dtype)), self.hidden_norm(hidden)]
        return self.proj(torch.cat(pair, dim=-1))
