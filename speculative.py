"""Speculative decoding: several tokens per pass over the weights, with the same output distribution as plain decoding.

A draft proposes k tokens for each row, and the target model reads all of them in one pass. That pass costs little more
than a pass over one token, because both are bound by reading the weights. The target model accepts a prefix of each
proposal and adds one token of its own (arXiv:2211.17192, arXiv:2302.01318).

Read down: verify and accept, on which exactness depends; ModelDraft; DraftLengthController, which decides how many
tokens to propose; Speculation, whose `step` the engine calls. Knows models and sampling, nothing of text.

Why it is exact. A token x that was drawn from p_draft is accepted with probability min(1, p_target(x) / p_draft(x)). If
it is rejected, a token is drawn from the residual max(0, p_target - p_draft), normalized. So x comes out with
probability
  p_draft(x) min(1, p_target(x) / p_draft(x)) + P(rejected) max(0, p_target(x) - p_draft(x)) / sum = p_target(x),
because the first term is min(p_draft, p_target)(x), and P(rejected) equals the sum by which the residual is normalized.
For a deterministic draft (retrieval, or a greedy draft model), p_draft is 1 at its token. Then the rule is: sample
from the target model, with the same noise as plain decoding, and accept the proposed token if it is the sampled one. So
with a deterministic draft even the tokens themselves, not only their distribution, are those of plain decoding.

What it gains. If each proposed token is accepted with probability a, a step yields 1 + a + ... + a^k =
(1 - a^(k+1)) / (1 - a) tokens. It takes k c + v times as long as a plain step, where c is the time of drafting one
token, and v that of the target's pass over k + 1 tokens, both relative to a plain step. The controller measures a, c
and v while it runs.
"""

import os
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import exponential_noise
from model import Transformer
from report import kv_bytes, synchronize, weight_bytes
from sampling import Sampling, probabilities, sample

MAX_K = 15  # the verifying pass then has 16 tokens per row, and is still memory-bound
AUTO_K = 7  # the largest k that --speculate_k auto uses
WIDTHS = (2, 4, 8, 16)  # tokens per row of a verifying pass with fixed shapes: k + 1 is rounded up to one of these
CATCH_UP_TOKENS = 512  # prompt tokens that a draft model reads of each row in one step
DRAFT_SEED = 0x5851F42D4C957F2D  # XORed into the seeds, so that the draft's noise is independent of the target's
ACCEPT = 1  # the `stream` of the noise that decides what is accepted; tokens are drawn with stream 0

# ---------------------------------------------------------------- verification


def verify(model, inputs: Tensor, drafted: Tensor, lengths: Tensor, p_draft: Tensor | None, sampling: Sampling):
    """Run the target model over the last token and the drafted tokens of each row, and decide which ones to accept.

    inputs (3,B) int64 are those of engine.decode. drafted (B,k) int64: the first lengths (B,) tokens of each row are
    its proposal, the rest is padding. p_draft (B,k,V) float32 are the distributions that the tokens were drawn from, or
    None if the draft is deterministic.

    Returns tokens (B,k+1), count (B,), log-probabilities (B,k+1) and logits (B,k+1,V). The first `count` tokens of a
    row are its new tokens: the accepted tokens and one token of the target model.
    """
    token, position, rows = inputs.unbind(0)
    offsets = torch.arange(drafted.shape[1] + 1, device=token.device)
    is_real = (position >= 0)[:, None] & (offsets <= lengths[:, None])  # (B,k+1); the rest is padding
    input_pos = torch.where(is_real, position[:, None] + offsets, -1)
    x = model.hidden(torch.cat([token[:, None], drafted], 1), input_pos, rows)
    logits = model.head(x)[..., : model.config.n_token]  # (B,k+1,V)
    if p_draft is None:
        tokens, logprobs = sample(logits, rows, position + 1, drafted, sampling)
        tokens = tokens if model.split is None else model.split.broadcast(tokens)
        return tokens, count_leading(drafted == tokens[:, :-1], lengths) + 1, logprobs, logits
    p_target = probabilities(logits, rows, position + 1, drafted, sampling)
    tokens, count = accept(p_target, p_draft, drafted, lengths, position + 1, sampling.seed[rows])
    if model.split is not None:
        tokens, count = model.split.broadcast(tokens), model.split.broadcast(count)
    logprobs = logits.float().log_softmax(-1).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    return tokens, count, logprobs, logits


def accept(p_target: Tensor, p_draft: Tensor, drafted: Tensor, lengths: Tensor, position: Tensor, seed: Tensor):
    """Accept drafted tokens or resample (arXiv:2211.17192, algorithm 1). Returns tokens and count as `verify` does.

    p_target (B,k+1,V) float32 are the target's distributions; p_draft, drafted and lengths are as in `verify`. position
    (B,) int64: the position of the first drafted token; seed (B,) int64: the row's seed. If p_target is not finite, the
    row's last new token is -1.
    """
    B, k = drafted.shape
    offsets = torch.arange(k + 1, device=drafted.device)
    target, draft = (p[:, :k].gather(2, drafted[..., None])[..., 0] for p in (p_target, p_draft))  # (B,k)
    zero = torch.zeros_like(drafted)
    uniform = torch.exp(-exponential_noise(seed[:, None], position[:, None] + offsets[:k], zero, ACCEPT))  # (B,k)
    accepted = count_leading(uniform * draft < target, lengths)  # (B,)
    p_draft = F.pad(p_draft, (0, 0, 0, 1)) * (offsets < lengths[:, None])[..., None]  # 0 where nothing was proposed
    row = torch.arange(B, device=drafted.device)
    target, draft = p_target[row, accepted], p_draft[row, accepted]  # (B,V), at the first token that is not accepted
    residual = (target - draft).clamp(min=0)
    residual = torch.where(residual.amax(1, keepdim=True) > 0, residual, target)  # all 0: equal but for rounding
    ids = torch.arange(target.shape[1], device=drafted.device)
    last = (residual / exponential_noise(seed[:, None], (position + accepted)[:, None], ids)).argmax(1)  # (B,)
    last = torch.where(target.sum(1).isfinite(), last, -1)
    return torch.where(offsets == accepted[:, None], last[:, None], F.pad(drafted, (0, 1))), accepted + 1


def count_leading(is_right: Tensor, lengths: Tensor) -> Tensor:
    """The number of True values before the first False, among the first lengths (B,) values of each row of is_right."""
    offsets = torch.arange(is_right.shape[1], device=is_right.device)
    return (is_right & (offsets < lengths[:, None])).long().cumprod(1).sum(1)


# ---------------------------------------------------------------- drafts
#
# A draft is an object with these functions:
#   begin(engine)            is called once, by Speculation.begin
#   add(row, tokens)         a request has started in this cache row; tokens are its prompt and its first new token
#   propose(batch, k)        returns a Proposal of up to k tokens for each row of a Batch, or None if it has none at all
#   accepted(row, tokens)    the row has these new tokens after a step; the last one is the target model's own
#   remove(row)              the request in this cache row has ended
#   bytes_read(k, lengths)   returns the bytes of weights and of KV cache that drafting k tokens reads, for rows with
#                            these numbers of tokens


@dataclass
class Batch:
    """The rows (engine.Row) of a decode step, and its inputs (3,B) as in engine.decode; B may include padding rows."""

    rows: list
    inputs: Tensor

    @property
    def random(self) -> bool:
        """Whether any row samples at random instead of greedily."""
        return any(row.request.params.temperature > 0 for row in self.rows)


@dataclass
class Proposal:
    drafted: Tensor  # (B,k) int64
    lengths: Tensor  # (B,) int64: how many tokens of each row are proposed; the rest is padding
    p_draft: Tensor | None = None  # (B,k,V) float32: their distributions; None if the draft is deterministic
    chances: Tensor | None = None  # (B,k) float32: estimated P(accepted | those before it are); None if unknown


class ModelDraft:
    """A draft model with the target's vocabulary.

    It is either a smaller model with its own KV caches, or, with `shares_caches`, the target model in fewer bits. In
    the second case it uses the target's KV caches: it need not read prompts, and the verifying pass overwrites the keys
    and values that it has written.
    """

    def __init__(self, draft: Transformer, shares_caches: bool):
        self.draft, self.shares_caches = draft, shares_caches
        self.weight_bytes = weight_bytes(draft, 1)
        self.cached: list[list[int]] = []  # if it has its own caches: the tokens whose K/V each cache row holds
        self.drafted_in_cache: dict[int, int] = {}  # cache row -> number of tokens of its last proposal in the cache

    def begin(self, engine):
        self.engine, self.sampling = engine, engine.sampling
        self.next_token = engine.steps.compile(next_token)
        if self.shares_caches:
            return share_caches(engine.model, self.draft)
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
        drafted, p_draft = self._draw(tokens, input_pos, rows, lengths, k, batch.random)
        if not self.shares_caches:
            for row, length in zip(batch.rows, lengths.tolist()):
                if length:
                    n = len(self.cached[row.index])
                    self.cached[row.index] = self.cached[row.index] + [*row.tokens, row.request.new_tokens[-1]][n:]
                    self.drafted_in_cache[row.index] = length - 1
        if self.engine.model.split is not None:
            drafted = self.engine.model.split.broadcast(drafted)
        return Proposal(drafted, lengths, p_draft)

    def _draw(self, tokens: Tensor, input_pos: Tensor, rows: Tensor, lengths: Tensor, k: int, random: bool):
        """Draw k tokens (B,k) that follow tokens (B,S). Also returns, if random, their distributions (B,k,V)."""
        V = self.engine.model.config.n_token or self.engine.model.config.vocab_size
        position = input_pos[:, -1]
        drafted, probs = [], []
        for i in range(k):
            new, p = self.next_token(self.draft, tokens, input_pos, rows, self.sampling, V, random)
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
        self.draft(tokens.to(device), input_pos.to(device), index)
        synchronize(device)
        seconds = time.perf_counter() - start
        self.engine.timing.prefill_s += seconds
        self.engine.timing.decode_s -= seconds

    def bytes_read(self, k: int, lengths: list[int]) -> tuple[float, float]:
        return k * self.weight_bytes, k * kv_bytes(self.draft, lengths)


def share_caches(model: Transformer, draft: Transformer):
    """Let the draft use the KV caches, RoPE tables and ALiBi slopes of the target model."""
    for name in ("rope_cos", "rope_sin"):
        draft.register_buffer(name, getattr(model, name), persistent=False)
    for block, target_block in zip(draft.blocks, model.blocks):
        for name in ("k_cache", "v_cache", "slopes"):
            block.attention.register_buffer(name, getattr(target_block.attention, name), persistent=False)


def next_token(draft, tokens: Tensor, input_pos: Tensor, rows: Tensor, sampling: Sampling, V: int, random: bool):
    """Draw the draft's next token (B,) after tokens (B,S) at positions (B,S) of cache rows (B,).

    V is the size of the target's vocabulary, to which the token belongs. Also returns the distribution (B,V) that the
    token was drawn from, or None if not random.
    """
    logits = draft(tokens, input_pos, rows)[:, None, : draft.config.n_token]
    logits = logits[..., :V]  # (B,1,V), or narrower if the draft has fewer ids
    sampling = sampling._replace(seed=sampling.seed ^ DRAFT_SEED)
    arguments = (logits, rows, input_pos[:, -1] + 1, tokens[:, :0], sampling)
    token = sample(*arguments)[0][:, 0].clamp(min=0)
    if not random:
        return token, None
    probs = probabilities(*arguments)[:, 0]
    return token, F.pad(probs, (0, V - probs.shape[1]))


# ---------------------------------------------------------------- how many tokens to propose

# Exploration: in each step, the kind of step that was not run (plain, or with a proposal) is assumed to have become
# faster by this factor, so that it is tried again at some time.
EXPLORATION_FACTOR = 1.005


def expected_tokens(a: float, k: int) -> float:
    """The mean number of new tokens of a step with k proposed tokens, each accepted with probability a < 1."""
    return (1 - a ** (k + 1)) / (1 - a)


def update_estimate(estimate: float, seconds: float) -> float:
    """A running minimum that can rise by an eighth per measurement, so that one slow step hardly changes it."""
    return min(seconds, 1.125 * estimate) if estimate else seconds


@dataclass
class DraftLengthController:
    """Decides how many tokens to propose: always k, or if `automatic` the number from 0 to k that is fastest.

    A step with k proposed tokens yields expected_tokens(a, k) tokens and takes k * draft_s + verify_s seconds. Plain
    steps and steps with a proposal are measured only when they are chosen. The longer one kind has not been chosen, the
    faster it is assumed to be (EXPLORATION_FACTOR). Trying a useless draft again costs about 1 % of the time, and more
    if the draft is slow.
    """

    k: int
    automatic: bool
    plain_s: float = 0.0  # estimated seconds of a plain step
    draft_s: float = 0.0  # of the draft, for each proposed token
    verify_s: float = 0.0  # of the rest of a step with a proposal
    accepted: float = 0.0  # accepted tokens; older steps count less
    judged: float = 0.0  # accepted or rejected tokens; those after a rejected token are neither
    plain_bonus: float = 1.0  # assumed speedup of plain steps since the last one
    proposal_bonus: float = 1.0  # assumed speedup of steps with a proposal since the last one
    steps: int = 0

    def choose(self) -> int:
        """The number of tokens to propose in the next step; 0 means a plain step."""
        if not self.automatic:
            return self.k
        if self.steps < 6:  # measure plain steps first, then proposals of one token
            return int(self.steps >= 4)
        k = max(range(1, self.k + 1), key=self.tokens_per_s)
        return k if self.tokens_per_s(k) * self.proposal_bonus > self.tokens_per_s(0) * self.plain_bonus else 0

    def tokens_per_s(self, k: int) -> float:
        a = (self.accepted + 1) / (self.judged + 2)  # Laplace's rule of succession
        return expected_tokens(a, k) / max(1e-9, k * self.draft_s + self.verify_s if k else self.plain_s)

    def update(self, seconds: float, k: int = 0, draft_s: float = 0.0, accepted: list[int] = ()):
        """Update the estimates with a step: its seconds, those of the draft, and how many tokens each row accepted."""
        self.steps += 1
        if k == 0:
            self.plain_s = update_estimate(self.plain_s, seconds)
            self.plain_bonus, self.proposal_bonus = 1.0, self.proposal_bonus * EXPLORATION_FACTOR
            return
        self.plain_bonus, self.proposal_bonus = self.plain_bonus * EXPLORATION_FACTOR, 1.0
        self.draft_s = update_estimate(self.draft_s, draft_s / k)
        self.verify_s = update_estimate(self.verify_s, seconds - draft_s)
        self.accepted = 0.9 * self.accepted + sum(accepted)
        self.judged = 0.9 * self.judged + sum(min(n + 1, k) for n in accepted)  # shorter proposals count as rejected


# ---------------------------------------------------------------- a step


@dataclass
class Report:
    """Counts and seconds, summed over all steps."""

    steps: int = 0  # with a proposal
    plain_steps: int = 0
    proposed: int = 0  # tokens
    draft_s: float = 0.0
    target_s: float = 0.0  # of the target model's passes, those of plain steps included
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_K)  # tokens, by their place in the proposal
    judged: list[int] = field(default_factory=lambda: [0] * MAX_K)  # accepted tokens, and the first rejected of a row

    def add(self, accepted: list[int], lengths: list[int]):
        """Count a step. accepted, lengths: how many tokens each row accepted, and how many were proposed to it."""
        self.steps += 1
        self.proposed += sum(lengths)
        for n, length in zip(accepted, lengths):
            for place in range(min(n + 1, length)):
                self.accepted[place] += place < n
                self.judged[place] += 1

    def numbers(self, decode_s: float) -> dict:
        """The fields of --json: means per proposal, acceptance rates by place, shares of decode_s seconds."""
        proposals = max(1, self.judged[0])  # the first token of each proposal is always judged
        shares = {"draft": self.draft_s / decode_s, "verify": self.target_s / decode_s} if decode_s else {}
        speculation = {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "mean_proposed_tokens": self.proposed / proposals,
            "acceptance_by_place": [a / b for a, b in zip(self.accepted, self.judged) if b],
            "share_of_time": shares and shares | {"rest": 1 - sum(shares.values())},
        }
        return {"mean_accepted_tokens": sum(self.accepted) / proposals, "speculation": speculation}


class Speculation:
    """Runs the decode steps of the engine with a draft: propose, verify, and choose the next number of tokens.

    k is the number of tokens to propose, or if `automatic` the largest number. While `rehearsing` is True, as in
    load.warm_up, every step runs all graphs that a later step may need, so that they are compiled.
    """

    def __init__(self, draft, k: int = AUTO_K, automatic: bool = True):
        assert 1 <= k <= MAX_K, k
        self.draft, self.controller = draft, DraftLengthController(k, automatic)
        self.report, self.rehearsing = Report(), False

    def begin(self, engine):
        self.engine, self.model, self.steps = engine, engine.model, engine.steps
        self.verify = engine.steps.compile(verify)
        self.draft.begin(engine)

    def choose_length(self) -> int:
        return self.controller.k if self.rehearsing else self.controller.choose()

    def add(self, row: int, tokens: list[int]):
        self.draft.add(row, tokens)

    def remove(self, row: int):
        self.draft.remove(row)

    def step(self, rows: list, inputs: Tensor, k: int) -> tuple[list[list[int]], Tensor, Tensor]:
        """The new tokens of each row, their log-probabilities (B,n) and the logits (B,n,V). Arguments as in Batch."""
        batch, timing = Batch(rows, inputs), self.engine.timing
        start = time.perf_counter() - timing.prefill_s
        proposal = self.draft.propose(batch, k) if k else None
        synchronize(self.model.device)
        start += timing.prefill_s  # the time in which a draft model read a prompt counts as prefill, not here
        drafted = time.perf_counter()
        if self.rehearsing:
            self._rehearse(batch, proposal)
        if proposal is None or self.rehearsing:
            tokens, logprobs, logits = self.steps.decode(self.model, inputs, self.engine.sampling)
            new_tokens = tokens.tolist()[: len(rows)]
        else:
            tokens, count, logprobs, logits = self._verify(batch, proposal)
            new_tokens = [line[:n] for line, n in zip(tokens.tolist(), count.tolist())][: len(rows)]
        for row, new in zip(rows, new_tokens):
            self.draft.accepted(row.index, new)
        if not self.rehearsing:
            accepted = [len(new) - 1 for new in new_tokens]
            self._measure(rows, k, proposal, accepted, drafted - start, time.perf_counter() - drafted)
        return new_tokens, logprobs, logits

    def _measure(self, rows: list, k: int, proposal, accepted: list[int], draft_s: float, target_s: float):
        """Add a step to the report, the controller's estimates and the engine's timing."""
        self.report.draft_s += draft_s
        self.report.target_s += target_s
        if proposal is None:
            self.report.plain_steps += 1
            return self.controller.update(draft_s + target_s)
        lengths = proposal.lengths.tolist()[: len(rows)]
        self.report.add(accepted, lengths)
        if any(lengths):  # a draft model that still reads the prompts proposes nothing
            self.controller.update(draft_s + target_s, k, draft_s, accepted)
        weights, kv = self.draft.bytes_read(k, [len(row.tokens) for row in rows])
        self.engine.timing.draft_bytes += weights
        self.engine.timing.kv_bytes += kv

    def _verify(self, batch, proposal: Proposal):
        """Call `verify`. With fixed shapes, first pad the proposal to the next of WIDTHS."""
        drafted, p_draft = proposal.drafted, proposal.p_draft
        if self.steps.fixed_shapes:
            width = next(width for width in WIDTHS if width > drafted.shape[1])
            missing = width - 1 - drafted.shape[1]
            drafted = F.pad(drafted, (0, missing))
            p_draft = None if p_draft is None else F.pad(p_draft, (0, 0, 0, missing))
        return self.verify(self.model, batch.inputs, drafted, proposal.lengths, p_draft, self.engine.sampling)

    def _rehearse(self, batch, proposal: Proposal | None):
        """Run the verification in each width that k can need, with empty proposals.

        The arguments are new tensors: a slice would have other strides, and the graph would be compiled again for them.
        """
        for width in WIDTHS:
            if width // 2 <= self.controller.k:
                zero = torch.zeros(batch.inputs.shape[1], width - 1, dtype=torch.int64, device=batch.inputs.device)
                p_draft = None
                if proposal is not None and proposal.p_draft is not None:
                    p_draft = proposal.p_draft[:, :1].repeat(1, width - 1, 1)
                self._verify(batch, Proposal(zero, zero.new_zeros(len(zero)), p_draft))
