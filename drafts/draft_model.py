"""A draft model: a small model with the target's vocabulary, or the target itself in fewer bits, proposes tokens.

Read down: DraftVocabulary, with which a draft computes the logits of few tokens only; ModelDraft, the draft for
speculative.Speculation; next_token, one of its steps. Knows nothing of text.
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from formats import QuantizedLinear, Scheme, pack
from model import Transformer
from report import synchronize, weight_bytes
from sampling import Sampling, probabilities, sample
from speculative import Proposal, full_width_choices

CATCH_UP_TOKENS = 512  # prompt tokens that a draft model reads of each row in one step
DRAFT_SEED = 0x5851F42D4C957F2D  # XORed into the seeds, so that the draft's noise is independent of the target's
AUTO_K = 7  # the largest number of tokens that is proposed if the number is not fixed
GROUPSIZE = 32  # columns of a draft vocabulary that share a scale
UNIT_VECTORS = 64  # hidden states in one pass of `output_vectors`


# ---------------------------------------------------------------- a draft vocabulary


class DraftVocabulary(nn.Module):
    """The output head for some tokens only, in int8 (arXiv:2502.14856).

    A model says a few thousand tokens nearly always, and reading the output vectors of all others takes a large part of
    a draft's time. Tokens outside are never proposed; they come from the target's own pass.

    ids (W,) int64: the tokens; vectors (W,D): their output vectors.
    """

    def __init__(self, ids: Tensor, vectors: Tensor):
        super().__init__()
        self.register_buffer("ids", ids)
        self.output = int8_layer(pack(vectors, "int8", GROUPSIZE))

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
    N, K = packed["weight"].shape
    with torch.device("meta"):
        layer = QuantizedLinear(K, N, False, Scheme("int8", GROUPSIZE))
    layer.load_state_dict(packed, assign=True)
    return layer


@torch.no_grad()
def output_vectors(model: Transformer, ids: Tensor) -> Tensor:
    """The vectors (n,D) float32 whose products with a hidden state are the logits of these ids (n,).

    Each logit of a unit vector is one element of an output vector: this is true in any format, and of a split model.
    """
    unit = torch.eye(model.config.dim, dtype=model.norm.weight.dtype, device=ids.device)
    columns = [model.head(part[None])[0, :, ids] for part in unit.split(UNIT_VECTORS)]  # (64,n) each
    return torch.cat(columns).T.float().contiguous()


# ---------------------------------------------------------------- the draft


def state_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


class ModelDraft:
    """A draft model with the target's vocabulary.

    It is either a smaller model with its own KV caches, or, with `shares_caches`, the target model in fewer bits. In
    the second case it uses the target's KV caches: it need not read prompts, and the verifying pass overwrites the keys
    and values that it has written.
    """

    def __init__(
        self,
        draft: Transformer,
        shares_caches: bool,
        vocabulary: DraftVocabulary | None = None,
        name: str = "draft model",
    ):
        self.draft, self.shares_caches, self.vocabulary, self.name = draft, shares_caches, vocabulary, name
        self.weight_bytes = weight_bytes(draft, 1)
        if vocabulary is not None:
            head = draft.embedding if draft.output is None else draft.output
            self.weight_bytes += state_bytes(vocabulary) - state_bytes(head)
        self.cached: list[list[int]] = []  # if it has its own caches: the tokens whose K/V each cache row holds
        self.drafted_in_cache: dict[int, int] = {}  # cache row -> number of tokens of its last proposal in the cache

    def begin(self, engine):
        self.engine, self.sampling = engine, engine.sampling
        self.next_token = engine.steps.compile(next_token)
        if self.shares_caches:
            return self.draft.share_caches(engine.model)
        self.draft.setup_caches(len(engine.rows), engine.length)
        self.cached = [[] for _ in engine.rows]

    def add(self, row: int, tokens: list[int]):
        if not self.shares_caches:
            # Reuse a prefix, but at most the one that the engine has reused: it reuses nothing after Engine.clear.
            reused = tokens[: self.engine.rows[row].request.cached_tokens]
            self.cached[row] = os.path.commonprefix([self.cached[row], reused])

    def remove(self, row: int):
        self.drafted_in_cache.pop(row, None)

    def accepted(self, row: int, tokens: list[int]):
        if not self.shares_caches:
            self.cached[row] = self.cached[row] + tokens[:-1][: self.drafted_in_cache.pop(row, 0)]

    def propose(self, batch, k: int) -> Proposal | None:
        """Propose up to k tokens for each row, one pass of the draft for each token.

        If the draft has its own caches, its first pass always reads the last two tokens: it has not read the newest
        one, and if the target accepted the whole last proposal, it has not read the one before either. If it has,
        reading that token again writes the same K/V.
        """
        token, position, rows = batch.inputs.unbind(0)
        tokens, input_pos = token[:, None], position[:, None]  # (B,1)
        is_ready = position >= 0
        if not self.shares_caches:
            self.catch_up(batch.rows)
            behind = [len(self.cached[row.index]) < len(row.tokens) - 1 for row in batch.rows]
            behind += [True] * (len(token) - len(behind))
            is_ready = ~torch.tensor(behind, device=token.device)
            before = [row.tokens[-1] for row in batch.rows] + [0] * (len(token) - len(batch.rows))
            tokens = torch.stack([torch.tensor(before, device=token.device), token], 1)  # (B,2)
            tokens = tokens.clamp(max=self.draft.config.vocab_size - 1)  # the target's table may have more padding ids
            input_pos = torch.where(is_ready[:, None], torch.stack([position - 1, position], 1), -1)
        lengths = torch.where(is_ready, (self.engine.length - 1 - position).clamp(max=k), 0)  # within the cache row
        fixed = not self.draft.backend.thread_invariant
        with self.engine.threads.of(f"draft {self.name} {k}", len(batch.rows), fixed):
            drafted, p_draft = self._draw(tokens, input_pos, rows, lengths, k, batch.random)
        if not self.shares_caches:
            for row, length in zip(batch.rows, lengths.tolist()):
                if length:
                    n = len(self.cached[row.index])
                    self.cached[row.index] = self.cached[row.index] + [*row.tokens, row.request.new_tokens[-1]][n:]
                    self.drafted_in_cache[row.index] = length - 1
        if self.engine.model.shard is not None:
            drafted = self.engine.model.shard.broadcast(drafted)
        return Proposal(drafted, lengths, p_draft)

    def _draw(self, tokens: Tensor, input_pos: Tensor, rows: Tensor, lengths: Tensor, k: int, random: bool):
        """Draw k tokens (B,k) that follow tokens (B,S). Also returns, if random, their distributions (B,k,V)."""
        V = self.engine.model.config.n_token or self.engine.model.config.vocab_size
        position = input_pos[:, -1]
        drafted, probs = [], []
        for i in range(k):
            new, p = self.next_token(self.draft, tokens, input_pos, rows, self.sampling, V, random, self.vocabulary)
            drafted.append(new.clone())  # a CUDA graph reuses its outputs
            probs.append(p.clone() if random else None)
            tokens = drafted[-1][:, None]  # (B,1)
            input_pos = torch.where(i + 1 < lengths, position + 1 + i, -1)[:, None]
        return torch.stack(drafted, 1), torch.stack(probs, 1) if random else None

    def catch_up(self, rows: list):
        """Prefill the draft: read a chunk of every row in which more than the last two tokens are missing in its cache.

        The time counts as prefill, although the engine measures it as a part of a decode step.
        """
        behind = [row for row in rows if len(self.cached[row.index]) < len(row.tokens) - 1]
        chunks = [row.tokens[len(self.cached[row.index]) :][:CATCH_UP_TOKENS] for row in behind]
        if not behind:
            return
        start = time.perf_counter()
        width, device = max(map(len, chunks)), self.draft.device
        tokens, input_pos = torch.zeros(len(behind), width, dtype=torch.int64), torch.full((len(behind), width), -1)
        for i, (row, chunk) in enumerate(zip(behind, chunks)):
            cached = self.cached[row.index]
            tokens[i, : len(chunk)] = torch.tensor(chunk).clamp(max=self.draft.config.vocab_size - 1)
            input_pos[i, : len(chunk)] = torch.arange(len(cached), len(cached) + len(chunk))
            self.cached[row.index] = cached + chunk
        index = torch.tensor([row.index for row in behind], device=device)
        with self.engine.threads.of("draft-prefill", tokens.shape, fixed=not self.draft.backend.chunk_invariant):
            self.draft(tokens.to(device), input_pos.to(device), index)
        synchronize(device)
        seconds = time.perf_counter() - start
        self.engine.timing.prefill_s += seconds
        self.engine.timing.decode_s -= seconds

    def choices(self, k: int) -> list[int]:
        return full_width_choices(min(k, AUTO_K))

    def bytes_read(self, k: int, positions: list[int]) -> tuple[float, float]:
        return k * self.weight_bytes, k * self.draft.kv_bytes(positions)


def next_token(draft, tokens, input_pos, rows, sampling: Sampling, V: int, random: bool, vocabulary=None):
    """Draw the draft's next token (B,) after tokens (B,S) at positions (B,S) of cache rows (B,), all int64.

    V is the size of the target's vocabulary, to which the token belongs. Also returns the distribution (B,V) that the
    token was drawn from, or None if not random.
    """
    if vocabulary is None:
        logits = draft(tokens, input_pos, rows)[:, : draft.config.n_token][:, :V]  # narrower if the draft has fewer ids
    else:
        logits = vocabulary.logits(draft.hidden(tokens, input_pos, rows)[:, -1], V)
    sampling = sampling._replace(seed=sampling.seed ^ DRAFT_SEED)
    arguments = (logits[:, None], rows, input_pos[:, -1] + 1, tokens[:, :0], sampling)
    token = sample(*arguments)[0][:, 0].clamp(min=0)
    if not random:
        return token, None
    probs = probabilities(*arguments)[:, 0]
    return token, F.pad(probs, (0, V - probs.shape[1]))
