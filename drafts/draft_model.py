"""A draft model: a small model with the target's vocabulary, or the target itself in fewer bits, proposes tokens.

Read down: DraftVocabulary, with which a draft computes the logits of few tokens only; Drafter, which draws tokens with
a model; the two drafts of this kind: SelfDraft shares the target's KV caches, ModelDraft has its own; next_token, one
step of a drafter. Knows nothing of text.
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafts.draft import Batch, Draft, Proposal, full_width_choices
from engine import Engine
from formats import QuantizedLinear, Scheme, pack
from model import Transformer, pad_rows
from report import synchronize, weight_bytes
from sampling import Sampling, probabilities, sample

CATCH_UP_TOKENS = 512  # prompt tokens that a draft model reads of each row in one step
DRAFT_SEED = 0x5851F42D4C957F2D  # XORed into the seeds, so that the draft's noise is independent of the target's
AUTO_K = 7  # the largest number of tokens that is proposed if the number is not fixed
GROUPSIZE = 32  # columns of a draft vocabulary that share a scale
UNIT_VECTORS = 64  # hidden states in one pass of `output_head_rows`


# ---------------------------------------------------------------- a draft vocabulary


class DraftVocabulary(nn.Module):
    """The output head for some tokens only, in int8 (arXiv:2502.14856).

    Nearly all text consists of a few thousand tokens, and reading the rows of the output head for all others takes a
    large part of a draft's time. Tokens outside are never proposed; only the target generates them.

    ids (W,) int64: the tokens; head_rows (W,D): their rows of the output head.
    """

    def __init__(self, ids: Tensor, head_rows: Tensor):
        super().__init__()
        self.register_buffer("ids", ids)
        self.output = int8_layer(pack(head_rows, "int8", GROUPSIZE))

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def logits(self, x: Tensor, V: int) -> Tensor:
        """The logits (B,V) of hidden states x (B,D), -inf for the tokens that are not in the vocabulary."""
        logits = self.output(x)  # (B,W)
        return logits.new_full((len(x), V), float("-inf")).index_copy(1, self.ids, logits)

    def likeliest(self, x: Tensor) -> Tensor:
        """The token (B,) with the largest logit."""
        return self.ids[self.output(x).argmax(-1)]


def int8_layer(packed: dict[str, Tensor]) -> QuantizedLinear:
    """The layer with these parts of an int8 matrix in groups of GROUPSIZE columns."""
    N, C = packed["weight"].shape
    with torch.device("meta"):
        layer = QuantizedLinear(C, N, False, Scheme("int8", GROUPSIZE))
    layer.load_state_dict(packed, assign=True)
    return layer


@torch.no_grad()
def output_head_rows(model: Transformer, ids: Tensor) -> Tensor:
    """The rows (n,D) float32 of the output head for these ids (n,): their products with a hidden state are the logits.

    The logit of a token for a unit vector is one element of its row. This works in any format, and with a split model.
    """
    unit = torch.eye(model.config.dim, dtype=model.dtype, device=ids.device)
    columns = [model.head(part[None])[0, :, ids] for part in unit.split(UNIT_VECTORS)]  # (64,n) each
    return torch.cat(columns).T.float().contiguous()


# ---------------------------------------------------------------- the drafts


def state_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


class Drafter(Draft):
    """A draft that draws one token after another with a model, which has the target's vocabulary."""

    def __init__(self, model: Transformer, vocabulary: DraftVocabulary | None = None):
        self.model, self.vocabulary = model, vocabulary
        self.weight_bytes = weight_bytes(model, 1)
        if vocabulary is not None:
            head = model.embedding if model.output is None else model.output
            self.weight_bytes += state_bytes(vocabulary) - state_bytes(head)

    def begin(self, engine: Engine):
        super().begin(engine)
        self.next_token = engine.steps.compile(next_token)
        self.sampling = engine.sampling.without_masks()  # what a draft proposes need not fit a grammar

    def draw(self, batch: Batch, inputs: tuple[Tensor, Tensor, Tensor], lengths: Tensor, k: int) -> Proposal:
        """Draw k tokens that follow `inputs`, which are tokens (B,S), their positions (B,S) and cache rows (B,)."""
        target = self.engine.model
        V = target.config.n_token or target.config.vocab_size
        tokens, input_pos, rows = inputs
        position = input_pos[:, -1]
        drafted, probs = [], []
        for i in range(k):
            inputs = tokens, input_pos, rows
            new, p = self.next_token(self.model, inputs, self.sampling, V, batch.random, self.vocabulary)
            drafted.append(new.clone())  # a CUDA graph reuses its outputs
            probs.append(p.clone() if batch.random else None)
            tokens = drafted[-1][:, None]  # (B,1)
            input_pos = torch.where(i + 1 < lengths, position + 1 + i, -1)[:, None]
        drafted = target.shard.broadcast(torch.stack(drafted, 1))
        tokens = [ids[:n] for ids, n, _ in zip(drafted.tolist(), lengths.tolist(), batch.rows)]  # without padding rows
        return Proposal(tokens, k, torch.stack(probs, 1) if batch.random else None)

    def choices(self, k: int) -> list[int]:
        return full_width_choices(min(k, AUTO_K))

    def bytes_read(self, k: int, positions: list[int]) -> tuple[float, float]:
        return k * self.weight_bytes, k * self.model.kv_bytes(positions)


class SelfDraft(Drafter):
    """The target model itself, in fewer bits. It uses the target's KV caches: it need not read prompts, and the
    verifying pass overwrites the keys and values that it has written."""

    name = "int4-self"
    prior = 0.8, 5.0  # fewer bits seldom change the likeliest token

    def begin(self, engine: Engine):
        super().begin(engine)
        self.model.share_caches(engine.model)

    def propose(self, batch: Batch, k: int) -> Proposal:
        """Propose up to k tokens for each row, one pass of the draft for each token."""
        token, position, rows = batch.inputs.unbind(0)
        room = self.engine.length - 1 - position  # within the cache row
        lengths = torch.where(position >= 0, room.clamp(max=k), 0)
        return self.draw(batch, (token[:, None], position[:, None], rows), lengths, k)


class ModelDraft(Drafter):
    """A smaller model with the target's vocabulary and its own KV caches, which has to read the prompts, too."""

    def __init__(self, model: Transformer, vocabulary: DraftVocabulary | None = None, name: str = "draft model"):
        super().__init__(model, vocabulary)
        self.name = name
        self.cached: list[list[int]] = []  # the tokens whose K/V each cache row holds
        self.drafted_in_cache: dict[int, int] = {}  # cache row -> number of tokens of its last proposal in the cache

    def begin(self, engine: Engine):
        super().begin(engine)
        self.model.setup_caches(len(engine.rows), engine.length)
        self.cached = [[] for _ in engine.rows]

    def add(self, row: int, tokens: list[int], cached: int):
        # Reuse a prefix, but at most the one that the engine has reused: it reuses nothing after Engine.clear.
        self.cached[row] = os.path.commonprefix([self.cached[row], tokens[:cached]])

    def remove(self, row: int):
        self.drafted_in_cache.pop(row, None)

    def accepted(self, row: int, tokens: list[int]):
        self.cached[row] = self.cached[row] + tokens[:-1][: self.drafted_in_cache.pop(row, 0)]

    def catch_up(self, rows: list) -> float:
        """Prefill the draft: read a chunk of every row in which more than the last two tokens are missing in its cache.
        Returns the seconds that it took."""
        behind = [row for row in rows if len(self.cached[row.index]) < len(row.tokens) - 1]
        if not behind:
            return 0.0
        start, device = time.perf_counter(), self.model.device
        starts = [len(self.cached[row.index]) for row in behind]
        chunks = [row.tokens[n:][:CATCH_UP_TOKENS] for row, n in zip(behind, starts)]
        tokens, input_pos = pad_rows(chunks, starts)
        index = torch.tensor([row.index for row in behind], device=device)
        tokens = tokens.clamp(max=self.model.config.vocab_size - 1)  # the target's table may have more padding ids
        fixed = not self.model.backend.chunk_invariant
        with self.engine.threads.of("draft-prefill", tokens.shape, fixed):
            self.model(tokens.to(device), input_pos.to(device), index)
        for row, chunk in zip(behind, chunks):
            self.cached[row.index] = self.cached[row.index] + chunk
        synchronize(device)
        return time.perf_counter() - start

    def propose(self, batch: Batch, k: int) -> Proposal:
        """Propose up to k tokens for each row that has been read, one pass of the draft for each token.

        The first pass always reads the last two tokens: the draft has not read the newest one, and if the target
        accepted the whole last proposal, it has not read the one before either. If it has, reading that token again
        writes the same K/V.
        """
        token, position, rows = batch.inputs.unbind(0)
        padding = len(token) - len(batch.rows)
        behind = [len(self.cached[row.index]) < len(row.tokens) - 1 for row in batch.rows] + [True] * padding
        is_ready = ~torch.tensor(behind, device=token.device)
        before = torch.tensor([row.tokens[-1] for row in batch.rows] + [0] * padding, device=token.device)
        tokens = torch.stack([before, token], 1).clamp(max=self.model.config.vocab_size - 1)  # (B,2)
        input_pos = torch.where(is_ready[:, None], torch.stack([position - 1, position], 1), -1)
        lengths = torch.where(is_ready, (self.engine.length - 1 - position).clamp(max=k), 0)  # within the cache row
        proposal = self.draw(batch, (tokens, input_pos, rows), lengths, k)
        for row, drafted in zip(batch.rows, proposal.tokens):
            if drafted:
                n = len(self.cached[row.index])
                self.cached[row.index] = self.cached[row.index] + [*row.tokens, row.request.new_tokens[-1]][n:]
                self.drafted_in_cache[row.index] = len(drafted) - 1
        return proposal


def next_token(model, inputs: tuple, sampling: Sampling, V: int, random: bool, vocabulary=None):
    """Draw a draft's next token (B,) after tokens (B,S) at positions (B,S) of cache rows (B,), all int64: `inputs`.

    V is the size of the target's vocabulary, to which the token belongs. Also returns the distribution (B,V) that the
    token was drawn from, or None if not random.
    """
    tokens, input_pos, rows = inputs
    if vocabulary is None:
        logits = model(tokens, input_pos, rows)[:, : model.config.n_token][:, :V]  # narrower if the draft has fewer ids
    else:
        logits = vocabulary.logits(model.hidden(tokens, input_pos, rows)[:, -1], V)
    sampling = sampling._replace(seed=sampling.seed ^ DRAFT_SEED)
    arguments = (logits[:, None], rows, input_pos[:, -1] + 1, tokens[:, :0], sampling)
    token = sample(*arguments)[0][:, 0].clamp(min=0)
    if not random:
        return token, None
    probs = probabilities(*arguments)[:, 0]
    return token, F.pad(probs, (0, V - probs.shape[1]))
