"""A draft model proposes tokens: a small model with the target's tokens, or the target in few bits.

Read down: DraftVocabulary, with which a draft computes the logits of few tokens only;
AutoregressiveDraft, which draws tokens with a model; the two drafts of this kind, SelfDraft with the
target's KV caches and ModelDraft with its own; next_token, one of their steps. Knows nothing of text.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend import synchronize
from costs import weight_reads
from drafts.draft import Draft, Proposal, full_width_choices
from engine import Batch, Engine, common_prefix_length
from formats import QuantizedLinear, Scheme, pack
from model import Transformer, pad_rows, soft_cap
from sampling import Sampling, probabilities, sample

CATCH_UP_TOKENS = 512  # prompt tokens that a draft model reads of each row in one step
# XORed into the seeds, so that the draft's noise is independent of the target's
DRAFT_SEED = 0x5851F42D4C957F2D
AUTO_K = 7  # the largest number of tokens that is proposed if the number is not fixed
GROUPSIZE = 32  # columns of a draft vocabulary that share a scale
UNIT_VECTORS = 64  # hidden states in one pass of `output_head_rows`


# ---------------------------------------------------------------- a draft vocabulary


class DraftVocabulary(nn.Module):
    """The output head for some tokens only, in int8 (arXiv:2502.14856).

    Nearly all text consists of a few thousand tokens, and reading the rows of the output head for
    all others takes a large part of a draft's time. Tokens outside this vocabulary are never
    proposed; only the target generates them.

    ids (W,) int64: the tokens; head_rows (W,D): their rows of the output head; softcap: of the logits.
    """

    def __init__(self, ids: Tensor, head_rows: Tensor, softcap: float | None = None):
        super().__init__()
        self.softcap = softcap
        self.register_buffer("ids", ids)
        self.output = int8_layer(pack(head_rows, "int8", GROUPSIZE))

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def logits(self, x: Tensor, V: int) -> Tensor:
        """The logits (B,V) of hidden states x (B,D); -inf for the tokens outside the vocabulary."""
        logits = soft_cap(self.output(x), self.softcap)  # (B,W)
        return logits.new_full((len(x), V), float("-inf")).index_copy(1, self.ids, logits)

    def likeliest(self, x: Tensor) -> Tensor:
        """The tokens (B,) with the largest logits for hidden states x (B,D)."""
        return self.ids[self.output(x).argmax(-1)]


def int8_layer(packed: dict[str, Tensor]) -> QuantizedLinear:
    """The layer of a packed int8 matrix, whose groups have GROUPSIZE columns."""
    N, C = packed["weight"].shape
    with torch.device("meta"):
        layer = QuantizedLinear(C, N, False, Scheme("int8", GROUPSIZE))
    layer.load_state_dict(packed, assign=True)
    return layer


@torch.no_grad()
def output_head_rows(model: Transformer, ids: Tensor) -> Tensor:
    """The rows (n,D) float32 of the output head for these ids (n,). Their products with a hidden
    state are the logits, without a soft cap.

    The logit of a token for a unit vector is one element of its row. This works in any format, and
    with a split model.
    """
    unit = torch.eye(model.config.dim, dtype=model.dtype, device=ids.device)
    # (UNIT_VECTORS,n) each
    columns = [model.linear_head(part[None])[0, :, ids] for part in unit.split(UNIT_VECTORS)]
    return torch.cat(columns).T.float().contiguous()


# ---------------------------------------------------------------- the drafts


class AutoregressiveDraft(Draft):
    """A draft that draws one token after another with a model that has the target's vocabulary."""

    def __init__(self, model: Transformer, vocabulary: DraftVocabulary | None = None):
        self.model = model
        self.vocabulary = vocabulary
        self.reads = weight_reads(model)
        if vocabulary is not None:  # it is read instead of the output head
            head = model.embedding if model.output is None else model.output
            more = sum(tensor.nbytes for tensor in vocabulary.state_dict().values())
            less = sum(tensor.nbytes for tensor in head.state_dict().values())
            self.reads = self.reads._replace(dense=self.reads.dense + more - less)

    def begin(self, engine: Engine):
        super().begin(engine)
        self.next_token = engine.steps.compile(next_token)

    def draw(self, batch: Batch, inputs: tuple, k: int) -> Proposal:
        """Draw k tokens for each batch row, and propose as many as fit into the cache row.

        inputs: the tokens (B,S) to begin with, their positions (B,S) and their cache rows (B,). For a
        row of padding, nothing is proposed.
        """
        target = self.engine.model
        V = target.config.n_token or target.config.vocab_size
        random = batch.random
        tokens, input_pos, rows = inputs
        position = input_pos[:, -1]
        room = self.engine.length - 1 - position  # in the cache row, beyond the newest token
        lengths = torch.where(position >= 0, room.clamp(max=k), 0)

        drafted = []
        probs = []
        for i in range(k):
            inputs = (tokens, input_pos, rows)
            token, p = self.next_token(self.model, inputs, self.sampling, V, random, self.vocabulary)
            token = token.clone()  # a CUDA graph reuses its outputs
            drafted.append(token)
            if random:
                probs.append(p.clone())
            tokens = token[:, None]  # (B,1)
            input_pos = torch.where(i + 1 < lengths, position + 1 + i, -1)[:, None]

        p_draft = torch.stack(probs, 1) if random else None  # (B,k,V)
        ids = target.shard.broadcast(torch.stack(drafted, 1)).tolist()
        proposed = [row_ids[:n] for row_ids, n in zip(ids, lengths.tolist())]
        return Proposal(proposed[: len(batch.rows)], k, p_draft)  # without padding rows

    def choices(self, k: int) -> list[int]:
        return full_width_choices(min(k, AUTO_K))

    def bytes_read(self, k: int, positions: list[int]) -> tuple[float, float]:
        return k * self.reads.total(len(positions)), k * self.model.kv_bytes(positions)


class SelfDraft(AutoregressiveDraft):
    """The target model itself, in fewer bits. It uses the target's KV caches, so it need not read
    prompts. The keys and values that it writes are overwritten by the verifying pass."""

    name = "int4-self"
    prior = (0.8, 5.0)  # fewer bits seldom change the likeliest token

    def begin(self, engine: Engine):
        super().begin(engine)
        self.model.share_caches(engine.model)

    def propose(self, batch: Batch, k: int) -> Proposal:
        """Propose up to k tokens for each row, one pass of the draft for each token."""
        token, position, rows = batch.inputs.unbind(0)
        return self.draw(batch, (token[:, None], position[:, None], rows), k)


class ModelDraft(AutoregressiveDraft):
    """A smaller model with the target's vocabulary. It has its own KV caches, so it has to read the
    prompts, too."""

    def __init__(self, model: Transformer, vocabulary: DraftVocabulary | None = None, name="draft model"):
        super().__init__(model, vocabulary)
        self.name = name
        # For each cache row, the tokens whose keys and values the draft's cache holds
        self.cached: list[list[int]] = []
        # Cache row -> how many tokens of its last proposal are in the draft's cache
        self.drafted_in_cache: dict[int, int] = {}

    def begin(self, engine: Engine):
        super().begin(engine)
        self.model.setup_caches(len(engine.rows), engine.length)
        self.cached = [[] for _ in engine.rows]

    def add(self, row: int, tokens: list[int], cached: int):
        # The draft's row may hold the beginning of the prompt from the request before. It is reused
        # as far as the engine has reused it: after Engine.clear, both models read the whole prompt,
        # so that a measurement includes that. A prefix that the engine has copied from another row
        # is not copied in the draft's cache: catch_up reads the missing tokens again.
        n = common_prefix_length(self.cached[row], tokens[:cached])
        self.cached[row] = tokens[:n]

    def remove(self, row: int):
        self.drafted_in_cache.pop(row, None)

    def accepted(self, row: int, tokens: list[int]):
        n = self.drafted_in_cache.pop(row, 0)  # 0 if the draft has not proposed in this step
        drafted = tokens[:-1]  # the last one is the target's own
        self.cached[row] += drafted[:n]

    def is_behind(self, row) -> bool:
        """Whether the draft's cache lacks more of a row (engine.Row) than the two tokens that
        `propose` reads: the last one of row.tokens, and the newest one."""
        return len(self.cached[row.index]) < len(row.tokens) - 1

    def catch_up(self, rows: list) -> float:
        """Prefill the draft: read a chunk of each row that is behind. Returns the seconds that this
        took."""
        behind = [row for row in rows if self.is_behind(row)]
        if not behind:
            return 0.0
        start = time.perf_counter()
        device = self.model.device
        starts = [len(self.cached[row.index]) for row in behind]
        chunks = [row.tokens[n : n + CATCH_UP_TOKENS] for row, n in zip(behind, starts)]
        tokens, input_pos = pad_rows(chunks, starts)
        # The target may have more ids than the draft, which only pad its vocabulary
        tokens = tokens.clamp(max=self.model.config.vocab_size - 1)
        index = torch.tensor([row.index for row in behind], device=device)

        fixed = not self.model.backend.chunk_invariant
        with self.engine.threads.of("draft-prefill", tokens.shape, fixed):
            self.model(tokens.to(device), input_pos.to(device), index)
        for row, chunk in zip(behind, chunks):
            self.cached[row.index] += chunk
        synchronize(device)
        return time.perf_counter() - start

    def propose(self, batch: Batch, k: int) -> Proposal:
        """Propose up to k tokens for each row that is not behind, one pass of the draft for each.

        The first pass reads two tokens of each row, because the draft has never read the newest one
        and perhaps not the one before it: of a proposal that is accepted as a whole, it has not
        read the last token. If it has read the one before the newest, reading that again writes the
        same keys and values.
        """
        token, position, rows = batch.inputs.unbind(0)
        padding = len(token) - len(batch.rows)
        ready = [not self.is_behind(row) for row in batch.rows]
        is_ready = torch.tensor(ready + [False] * padding, device=token.device)
        last = [row.tokens[-1] for row in batch.rows]
        before = torch.tensor(last + [0] * padding, device=token.device)

        tokens = torch.stack([before, token], 1)  # (B,2)
        tokens = tokens.clamp(max=self.model.config.vocab_size - 1)
        input_pos = torch.stack([position - 1, position], 1)
        input_pos = torch.where(is_ready[:, None], input_pos, -1)
        proposal = self.draw(batch, (tokens, input_pos, rows), k)

        for row, drafted in zip(batch.rows, proposal.tokens):
            if drafted:
                self.cached[row.index] = [*row.tokens, row.request.new_tokens[-1]]
                self.drafted_in_cache[row.index] = len(drafted) - 1  # the last one was not read
        return proposal


def next_token(model, inputs: tuple, sampling: Sampling, V: int, random: bool, vocabulary=None):
    """Draw a draft's next token for each row. V is the size of the target's vocabulary.

    inputs: tokens (B,S), their positions (B,S) and cache rows (B,), all int64. Returns the tokens
    (B,), and the distributions (B,V) that they were drawn from, or None if not `random`.
    """
    tokens, input_pos, rows = inputs
    if vocabulary is None:
        logits = model(tokens, input_pos, rows)[:, : model.config.n_token]
        logits = logits[:, :V]  # fewer than V if the draft has fewer ids
    else:
        logits = vocabulary.logits(model.hidden(tokens, input_pos, rows)[:, -1], V)
    sampling = sampling._replace(seed=sampling.seed ^ DRAFT_SEED)
    position = input_pos[:, -1] + 1
    before = tokens[:, :0]  # no tokens
    ids, _ = sample(logits[:, None], rows, position, before, sampling)  # (B,1)
    token = ids[:, 0].clamp(min=0)
    if not random:
        return token, None
    probs = probabilities(logits[:, None], rows, position, before, sampling)[:, 0]
    return token, F.pad(probs, (0, V - probs.shape[1]))
