"""What a draft is.

Read down: Proposal, which a draft makes for an engine.Batch; Draft, the base class of all drafts.
speculative.py verifies proposals, and controller.py decides which draft proposes how many tokens.
The drafts are in the other files of this folder. Knows nothing of text.
"""

from dataclasses import dataclass

from torch import Tensor

from drafts.controller import PRIOR
from engine import Batch, Engine
from kernels import MAX_DECODE_TOKENS

MAX_K = MAX_DECODE_TOKENS - 1  # the verifying pass has one more token per row
WIDTHS = (1, 2, 4, 8, 16)  # with fixed shapes, k + 1 tokens per row are padded to the next of these


@dataclass
class Proposal:
    """The tokens that a draft proposes for a step."""

    tokens: list[list[int]]  # at most k tokens for each row
    k: int
    # (B,k,V) float32: the distributions they were drawn from; None if the draft is deterministic
    p_draft: Tensor | None = None
    # For each token, the estimated probability that it is accepted if those before it are. Needed
    # from free drafts (Draft.is_free).
    probs: list[list[float]] | None = None


class Draft:
    """The base class of drafts. A draft defines `propose`, its name, and what else differs from the
    defaults here.

    If the model is split, each rank has a draft of its own, and all of them must propose the same
    tokens. Before a measurement, the warm-up (compile.py) runs requests like any others.
    """

    name: str  # for the report
    # Whether proposing takes next to no time. Such a draft is deterministic and is asked in every
    # step. Its proposals have `probs`, which decide how many of the tokens are used. Any other
    # draft runs only if it probably gains more than it costs.
    is_free = False
    observes = False  # whether `observe` is called; plain steps then verify proposals of no tokens
    prior = PRIOR  # the expected acceptance rate, as in controller.Controller
    max_k = MAX_K  # the most tokens that it proposes

    def begin(self, engine: Engine):
        """Called once, before all others."""
        self.engine = engine
        self.sampling = engine.sampling.without_masks()  # a proposal need not fit a grammar

    def add(self, row: int, tokens: list[int], cached: int):
        """The prompt of a request has been read into this cache row.

        tokens: the prompt and the first new token (-1 if its logits were not finite). The engine
        reused the keys and values of the first `cached` of them.
        """

    def catch_up(self, rows: list) -> float:
        """Called before `propose`: read what was not read yet of the prompts of these rows
        (engine.Row). Returns the seconds that this took."""
        return 0.0

    def propose(self, batch: Batch, k: int) -> Proposal | None:
        """Propose up to k tokens for each row of a batch. None if there are none for any row.

        A proposal must fit into the cache row, which has room for
        `engine.length - 1 - len(row.tokens)` tokens, where row.tokens lacks the newest token. No
        token may be one of the ids from config.n_token on, which only pad the vocabulary.
        """
        raise NotImplementedError

    def fitting(self, batch: Batch, drafted: Tensor) -> list[list[int]]:
        """The drafted tokens (B,k) of each row, as far as they fit into its cache row. All ranks use
        rank 0's."""
        ids = self.engine.model.shard.broadcast(drafted).tolist()
        return [row_ids[: self.engine.length - 1 - len(row.tokens)] for row, row_ids in zip(batch.rows, ids)]

    def observe(self, rows: list, hidden: Tensor):
        """Called after each step with its rows and the hidden states (B,D) that their last tokens
        were sampled from."""

    def accepted(self, row: int, tokens: list[int]):
        """A step has given this cache row these new tokens: the accepted ones, and one of the
        target model's own. They may go beyond the end of the request, where they are cut off later.
        -1 stands for logits that were not finite."""

    def remove(self, row: int):
        """The request in this cache row has ended, perhaps before `add` was called for it."""

    def choices(self, k: int) -> list[int]:
        """The numbers of tokens, up to k, that are worth choosing from, ascending."""
        return full_width_choices(min(k, self.max_k))

    def bytes_read(self, k: int, positions: list[int]) -> tuple[float, float]:
        """The bytes of weights and of KV cache that proposing k tokens reads. positions: the number
        of filled cache positions of each row."""
        return 0.0, 0.0


def width_of(k: int) -> int:
    """The tokens per row of the pass that verifies k proposed tokens: the next of WIDTHS."""
    return next(width for width in WIDTHS if width > k)


def full_width_choices(k: int) -> list[int]:
    """k, and the smaller numbers of tokens whose verifying pass fills one of WIDTHS, ascending.

    A compiled pass over another number of tokens would cost as much as a full one. And of few
    choices, each is measured sooner.
    """
    return sorted({width - 1 for width in WIDTHS if 1 < width <= k} | {k})
