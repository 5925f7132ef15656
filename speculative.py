"""Speculative decoding: several tokens per pass over the weights, with the same output distribution as plain decoding.

A draft proposes k tokens for each row, and the target model reads all of them in one pass. That pass costs much less
than k + 1 passes over one token, because it reads the weights once. The target model accepts a prefix of each proposal
and adds one token of its own (arXiv:2211.17192, arXiv:2302.01318).

Read down: verify and accept, on which exactness depends; Speculation, whose `step` the engine calls. drafts/draft.py
says what a draft is. The others of drafts/ are the drafts, draft_model.py (another model), retrieval.py (earlier text)
and heads.py (trained heads), and controller.py, which decides which draft proposes how many tokens. Knows nothing of
text.

Why it is exact. A token x that was drawn from p_draft is accepted with probability min(1, p_target(x) / p_draft(x)). If
it is rejected, a token is drawn from the residual max(0, p_target - p_draft), normalized. So x comes out with
probability
  p_draft(x) min(1, p_target(x) / p_draft(x)) + P(rejected) max(0, p_target(x) - p_draft(x)) / sum = p_target(x),
because the first term is min(p_draft, p_target)(x), and P(rejected) equals the sum by which the residual is normalized.
For a deterministic draft (retrieval, heads, or a greedy draft model), p_draft is 1 at its token. Then the rule is:
sample from the target model, with the same noise as plain decoding, and accept the proposed token if it is the sampled
one. So with a deterministic draft even the tokens themselves, not only their distribution, are those of plain decoding.

What it gains. If each proposed token is accepted with probability a, a step yields 1 + a + ... + a^k =
(1 - a^(k+1)) / (1 - a) tokens. It takes k c + v times as long as a plain step, where c is the time of drafting one
token, and v that of the target's pass over k + 1 tokens, both relative to a plain step. The controller estimates a, c
and v while it runs.
"""

import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafts.controller import Candidate, Controller
from drafts.draft import MAX_K, WIDTHS, Batch, Draft, Proposal, full_width_choices, width_of
from engine import Engine, PlainDecoding, StepResult
from kernels import MAX_DECODE_TOKENS, exponential_noise
from report import synchronize, weight_bytes
from sampling import Sampling, probabilities, sample

MAX_PAUSE = 8  # steps of a batch without a search, after that many searches whose tokens were not worth proposing
ACCEPT = 1  # the `stream` of the noise that decides what is accepted; tokens are drawn with stream 0

# ---------------------------------------------------------------- verification


class DraftedTokens(NamedTuple):
    """The tokens of a Proposal, for `verify`."""

    drafted: Tensor  # (B,k) int64
    lengths: Tensor  # (B,) int64: how many tokens of each row are proposed; the rest is padding
    p_draft: Tensor | None = None  # (B,k,V) float32: their distributions; None if the draft is deterministic


def verify(model, inputs: Tensor, proposal: DraftedTokens, sampling: Sampling, padded: bool = True):
    """Run the target model over the last token and the drafted tokens of each row, and decide which ones to accept.

    inputs (3,B) int64 are those of engine.decode. With k = 0 drafted tokens this is a plain decode step. padded: run
    the model over the padding as well, which fixed shapes need; otherwise each token is a row of its own, and the draft
    must be deterministic.

    Returns tokens (B,k+1), count (B,), log-probabilities (B,k+1), each row's logits (k+1,V), without padding if not
    padded, and hidden states (B,D). The first `count` tokens of a row are its new tokens: the accepted tokens and one
    token of the target model, which was sampled from the row's hidden state.
    """
    drafted, lengths, p_draft = proposal
    token, position, rows = inputs.unbind(0)
    offsets = torch.arange(drafted.shape[1] + 1, device=token.device)
    is_real = (position >= 0)[:, None] & (offsets <= lengths[:, None])  # (B,k+1); the rest is padding
    input_pos = torch.where(is_real, position[:, None] + offsets, -1)
    all_tokens = torch.cat([token[:, None], drafted], 1)
    if not padded:
        return verify_without_padding(model, all_tokens, input_pos, is_real, rows, sampling)
    x = model.hidden(all_tokens, input_pos, rows)
    logits = model.head(x)[..., : model.config.n_token]  # (B,k+1,V)
    if p_draft is None:
        tokens, logprobs = sample(logits, rows, position + 1, drafted, sampling)
        tokens = model.shard.broadcast(tokens)
        count = count_leading(drafted == tokens[:, :-1], lengths) + 1
        return tokens, count, logprobs, logits, at_last_token(x, count)
    p_target = probabilities(logits, rows, position + 1, drafted, sampling)
    tokens, count = accept(p_target, proposal, position + 1, sampling.seed[rows])
    tokens, count = model.shard.broadcast(tokens), model.shard.broadcast(count)
    logprobs = logits.float().log_softmax(-1).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    return tokens, count, logprobs, logits, at_last_token(x, count)


def verify_without_padding(model, all_tokens: Tensor, input_pos: Tensor, is_real: Tensor, rows: Tensor, sampling):
    """`verify` for rows with proposals of different lengths: the model sees each real token as a row (n,1).

    all_tokens (B,k+1): the last token and the drafted tokens of each row; input_pos (B,k+1); is_real (B,k+1).
    """
    row, offset = is_real.nonzero().unbind(1)  # (n,) each
    position, cache_rows = input_pos[is_real], rows[row]
    x = model.hidden(all_tokens[is_real][:, None], position[:, None], cache_rows)  # (n,1,D)
    logits = model.head(x)[..., : model.config.n_token]  # (n,1,V)
    before = torch.arange(1, all_tokens.shape[1], device=row.device) <= offset[:, None]  # (n,k)
    before = torch.where(before, all_tokens[row, 1:], -1)  # the tokens drafted before each one
    ids, own_logprobs = sample(logits, cache_rows, position + 1, before, sampling)  # (n,1) each
    ids = model.shard.broadcast(ids)
    tokens = torch.full_like(all_tokens, -1).masked_scatter(is_real, ids)
    logprobs = ids.new_full(all_tokens.shape, 0, dtype=torch.float32).masked_scatter(is_real, own_logprobs)
    lengths = is_real.sum(1)
    count = count_leading(all_tokens[:, 1:] == tokens[:, :-1], (lengths - 1).clamp(min=0)) + 1
    last = (lengths.cumsum(0) - lengths + count - 1).clamp(max=len(x) - 1)
    return tokens, count, logprobs, logits[:, 0].split(lengths.tolist()), x[last, 0]


def at_last_token(x: Tensor, count: Tensor) -> Tensor:
    """The hidden state (B,D) at each row's last accepted token. x (B,S,D), count (B,) as `verify` returns it."""
    return x[torch.arange(len(x), device=x.device), count - 1]


def accept(p_target: Tensor, proposal: DraftedTokens, position: Tensor, seed: Tensor):
    """Accept drafted tokens or resample (arXiv:2211.17192, algorithm 1). Returns tokens and count as `verify` does.

    p_target (B,k+1,V) float32 are the target's distributions; the proposal has p_draft. position (B,) int64: the
    position of the first drafted token; seed (B,) int64: the row's seed. If p_target is not finite, the row's last new
    token is -1.
    """
    drafted, lengths, p_draft = proposal
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
    wrong_at = torch.where(is_right, is_right.shape[1], offsets)
    return torch.cat([wrong_at, lengths[:, None]], 1).amin(1)


# ---------------------------------------------------------------- a step


@dataclass
class Report:
    """Counts and seconds, summed over all steps."""

    steps: int = 0  # with a proposal
    plain_steps: int = 0
    proposed: int = 0  # tokens
    draft_s: float = 0.0
    target_s: float = 0.0  # of the target model's passes, those of plain steps included
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_K)  # tokens, by their position in the proposal
    verified: list[int] = field(default_factory=lambda: [0] * MAX_K)  # accepted tokens, and the first rejected of a row
    # By the draft's name: "steps" that verified its proposals, "proposed_tokens", "accepted_tokens", and the "seconds"
    # that proposing took, unused proposals included
    drafts: dict[str, Counter] = field(default_factory=dict)

    def count(self, draft: str, **counts):
        """Add to the counts of the draft with this name."""
        self.drafts.setdefault(draft, Counter()).update(counts)

    def add(self, draft: str, accepted: list[int], lengths: list[int]):
        """Count a step. accepted, lengths: how many tokens each row accepted, and how many the draft proposed to it."""
        self.steps += 1
        self.proposed += sum(lengths)
        self.count(draft, steps=1, proposed_tokens=sum(lengths), accepted_tokens=sum(accepted))
        for n, length in zip(accepted, lengths):
            for place in range(min(n + 1, length)):
                self.accepted[place] += place < n
                self.verified[place] += 1

    def numbers(self, decode_s: float) -> dict:
        """The fields of --json (docs/speculation.md): means per proposal, acceptance rates by place, shares of decode_s
        seconds, and the counts of each draft."""
        proposals = max(1, self.verified[0])  # the first token of each proposal is always verified
        shares = {"draft": self.draft_s / decode_s, "verify": self.target_s / decode_s} if decode_s else {}
        speculation = {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "mean_proposed_tokens": self.proposed / proposals,
            "acceptance_by_place": [a / b for a, b in zip(self.accepted, self.verified) if b],
            "share_of_time": shares and shares | {"rest": 1 - sum(shares.values())},
            "drafts": [
                {"name": name}
                | {key: counts[key] for key in ("steps", "proposed_tokens", "accepted_tokens")}
                | {"share_of_time": counts["seconds"] / decode_s if decode_s else None}
                for name, counts in self.drafts.items()
            ],
        }
        return {"mean_accepted_tokens": sum(self.accepted) / proposals, "speculation": speculation}


class Drafted(NamedTuple):
    """The result of drafting in a step. Without a proposal, the step is a plain one."""

    choice: Candidate | None = None
    proposal: Proposal | None = None
    prefill_s: float = 0.0  # in which a draft read prompts


class Speculation(PlainDecoding):
    """Runs the decode steps of the engine with drafts: propose, verify, and choose what to propose next.

    k is the number of tokens to propose, or if `automatic` the largest number. With a fixed k, the first of the drafts
    that has a proposal is used.
    """

    def __init__(self, drafts: list[Draft], k: int = MAX_K, automatic: bool = True):
        assert 1 <= k <= MAX_K and drafts, k
        self.drafts, self.k = drafts, k
        self.automatic, self.rehearsing = automatic, False
        # Of batches: searches in succession whose tokens were not proposed, at most MAX_PAUSE; steps until the next.
        self.fruitless, self.pause = 0, 0
        self.observers = [draft for draft in drafts if draft.observes]
        self.controller, self.report = Controller([draft.prior for draft in drafts], self._token_s), Report()
        self.draft_counts = self.report.drafts
        for i, draft in enumerate(drafts):
            if draft.name in self.report.drafts:  # a draft model's directory may be called medusa
                draft.name = f"{draft.name} ({i + 1})"
            self.report.count(draft.name)  # so that drafts that never propose are reported, too

    def begin(self, engine: Engine):
        super().begin(engine)
        self.model = engine.model
        self.verify = engine.steps.compile(verify)
        self.candidates: dict[tuple[int, int], list[Candidate]] = {}  # by draft and rows, for `_candidates`
        self.weight_bytes = weight_bytes(engine.model, 1)
        for draft in self.drafts:
            draft.begin(engine)

    def _token_s(self) -> float | None:
        """The seconds that a token of a prompt took. None after a short prompt: reading it takes about as long as a
        plain step, however many tokens it has."""
        timing = self.engine.timing
        return timing.prefill_s / timing.prefill_tokens if timing.prefill_tokens > MAX_DECODE_TOKENS else None

    def add(self, row: int, tokens: list[int], cached: int):
        self.fruitless, self.pause = 0, 0
        for draft in self.drafts:
            draft.add(row, tokens, cached)

    def remove(self, row: int):
        for draft in self.drafts:
            draft.remove(row)

    def numbers(self, profiled: bool) -> dict:
        timing = self.engine.timing
        fields = {"draft_prefill_s": None if profiled else timing.draft_prefill_s}
        return fields | self.report.numbers(0.0 if profiled else timing.decode_s)

    def step(self, rows: list, inputs: Tensor) -> StepResult:
        batch, trials = Batch(rows, inputs), self.engine.threads.trials
        start = time.perf_counter()
        drafted = self._rehearse(batch) if self.rehearsing else self._draft(batch)
        proposal = drafted.proposal
        draft_s = time.perf_counter() - start - drafted.prefill_s

        start = time.perf_counter()
        result = self._run_target(batch, proposal)
        result.draft_prefill_s = drafted.prefill_s
        if proposal is not None:
            positions = [len(row.tokens) for row in rows]
            draft = self.drafts[drafted.choice.draft]
            result.draft_bytes, result.draft_kv_bytes = draft.bytes_read(proposal.k, positions)

        for draft in self.drafts:
            for row, new in zip(rows, result.new_tokens):
                draft.accepted(row.index, new)
        if not self.rehearsing:
            seconds = draft_s, time.perf_counter() - start
            accepted = [len(new) - 1 for new in result.new_tokens]
            self._learn(batch, drafted, accepted, seconds, self.engine.threads.trials != trials)
        return result

    def _draft(self, batch: Batch) -> Drafted:
        """Choose a draft and a number of tokens, and let it propose."""
        if not self.automatic:
            asked = (self._ask(batch, Candidate(i, self.k, 0)) for i in range(len(self.drafts)))
            return next((drafted for drafted in asked if drafted.proposal is not None), Drafted())
        found, candidates = {}, []
        # One row is searched faster than this is decided. Ranks measure different times, but need the same candidates.
        always = len(batch.rows) == 1 or self.model.shard.ranks > 1
        is_worthwhile = always or (self.pause == 0 and self.controller.could_gain(len(batch.rows), self.k))
        for i, draft in enumerate(self.drafts):
            if not draft.is_free:
                candidates += self._candidates(i, batch)
            elif is_worthwhile:
                found[i] = self._ask(batch, Candidate(i, self.k, 0)).proposal
                candidates += self._free_candidates(i, batch, found[i])
        choice = self.controller.choose(len(batch.rows), candidates)
        if self.model.shard.ranks > 1:  # the other ranks have measured other times
            index = torch.tensor(-1 if choice is None else candidates.index(choice), device=self.model.device)
            index = int(self.model.shard.broadcast(index))
            choice = None if index < 0 else candidates[index]
        is_used = choice is not None and choice.draft in found
        if self.pause == 0:
            self.fruitless = 0 if is_used else min(self.fruitless + 1, MAX_PAUSE)
        self.pause = self.pause - 1 if self.pause else self.fruitless
        if choice is None:
            return Drafted()
        if is_used:
            return Drafted(choice, self._likeliest(found[choice.draft], choice))
        return self._ask(batch, choice)

    def _ask(self, batch: Batch, choice: Candidate) -> Drafted:
        """The proposal of a draft. The report counts its time, without that of reading prompts."""
        draft = self.drafts[choice.draft]
        prefill_s, start = draft.catch_up(batch.rows), time.perf_counter()
        with nullcontext() if draft.is_free else self._threads(f"draft {draft.name} {choice.k}", batch):
            proposal = draft.propose(batch, choice.k)
        if not draft.is_free:
            synchronize(self.model.device)
        self.report.count(draft.name, seconds=time.perf_counter() - start)
        return Drafted(None if proposal is None else choice, proposal, prefill_s)

    def _candidates(self, index: int, batch: Batch) -> list[Candidate]:
        """The proposals that a draft can make. They are cached: a step of a small model takes few milliseconds."""
        draft, rows = self.drafts[index], batch.inputs.shape[1]
        if (index, rows) not in self.candidates:
            tokens = {k: width_of(k) - 1 if self.engine.steps.fixed_shapes else k for k in draft.choices(self.k)}
            cost = {k: draft.bytes_read(k, [])[0] / self.weight_bytes for k in tokens}
            self.candidates[index, rows] = [Candidate(index, k, rows * n, None, cost[k]) for k, n in tokens.items()]
        return self.candidates[index, rows]

    def _free_candidates(self, index: int, batch: Batch, proposal: Proposal | None) -> list[Candidate]:
        """A candidate for each n: the n likeliest tokens that a free draft proposes for all rows, or with fixed shapes
        the first n of each row."""
        if proposal is None:
            return []
        cumulative = [cumulative_acceptance(probs) for probs in proposal.probs]
        if self.engine.steps.fixed_shapes:
            sizes = full_width_choices(proposal.k)
            sums = [sum(sum(row[:n]) for row in cumulative) for n in sizes]
            rows = batch.inputs.shape[1]
            return [Candidate(index, n, rows * (width_of(n) - 1), total) for n, total in zip(sizes, sums)]
        sums = accumulate(sorted((p for row in cumulative for p in row), reverse=True))
        return [Candidate(index, n, n, total) for n, total in enumerate(sums, 1)]

    def _likeliest(self, proposal: Proposal, choice: Candidate) -> Proposal:
        """The tokens that a candidate of `_free_candidates` stands for."""
        if self.engine.steps.fixed_shapes:
            return Proposal([tokens[: choice.k] for tokens in proposal.tokens], choice.k)
        cumulative = [cumulative_acceptance(probs) for probs in proposal.probs]
        least = sorted((p for row in cumulative for p in row), reverse=True)[choice.k - 1]
        counts = [sum(p >= least for p in row) for row in cumulative]
        return Proposal([tokens[:n] for tokens, n in zip(proposal.tokens, counts)], max(counts))

    def _learn(self, batch: Batch, drafted: Drafted, accepted: list[int], seconds: tuple, is_trial: bool):
        """Add a step to the report, and to the controller's estimates if it was not a trial of another number of
        threads. seconds: of the draft and of the target."""
        self.report.draft_s += seconds[0]
        self.report.target_s += seconds[1]
        choice, proposal = drafted.choice, drafted.proposal
        lengths = [] if proposal is None else [len(tokens) for tokens in proposal.tokens]
        is_reading = choice is not None and not any(lengths)  # a draft model that is still reading the prompts
        if self.automatic and not is_trial and not is_reading:
            self.controller.update(len(batch.rows), choice, seconds, accepted)
        if choice is None:
            self.report.plain_steps += 1
        else:
            self.report.add(self.drafts[choice.draft].name, accepted, lengths)

    def _run_target(self, batch: Batch, proposal: Proposal | None) -> StepResult:
        """A pass of the target."""
        if proposal is None and not self.observers:
            return super().step(batch.rows, batch.inputs)
        proposal = proposal or Proposal([[] for _ in batch.rows], 0)
        self.engine.set_masks(batch.rows, proposal.tokens)
        tokens, count, logprobs, logits, hidden = self._verify(batch, proposal)
        for draft in self.observers:
            draft.observe(batch.rows, hidden)
        new_tokens = [line[:count] for line, count in zip(tokens.tolist(), count.tolist())]
        return StepResult(new_tokens[: len(batch.rows)], logprobs, logits)

    def _verify(self, batch: Batch, proposal: Proposal) -> tuple:
        """The results of `verify`. With fixed shapes, the proposal is first padded to the next of WIDTHS."""
        fixed_shapes, p_draft = self.engine.steps.fixed_shapes, proposal.p_draft
        k = width_of(proposal.k) - 1 if fixed_shapes else proposal.k
        if p_draft is not None:
            p_draft = F.pad(p_draft, (0, 0, 0, k - proposal.k))
        lengths = [len(tokens) for tokens in proposal.tokens]
        # A GPU would read the keys and values of a row once for each token, and wait to learn the number of tokens.
        is_cpu, same_length = self.model.device.type == "cpu", len({*lengths}) == 1
        padded = fixed_shapes or p_draft is not None or not is_cpu or same_length

        padding = [[]] * (batch.inputs.shape[1] - len(lengths))
        table = [tokens + [0] * (k - len(tokens)) for tokens in proposal.tokens + padding]
        lengths = batch.inputs.new_tensor(lengths + [0] * len(padding))
        drafted = DraftedTokens(batch.inputs.new_tensor(table), lengths, p_draft)
        with self._threads(f"verify {k + 1}", batch):
            return self.verify(self.model, batch.inputs, drafted, self.engine.sampling, padded)

    def _threads(self, kind: str, batch: Batch):
        """A context that runs a step of this kind with the number of threads that is fastest for it (Threads.of)."""
        return self.engine.threads.of(kind, len(batch.rows), not self.model.backend.thread_invariant)

    @contextmanager
    def rehearsal(self):
        self.rehearsing = True
        yield
        self.rehearsing = False

    def _rehearse(self, batch: Batch) -> Drafted:
        """Run each draft in each length, the plain step, and the verification in each width that k can need, with empty
        proposals. Proposes nothing: accepted tokens could end the request before it has seen all graphs."""
        asked = [draft for draft in self.drafts if not draft.is_free]
        proposals = [draft.propose(batch, k) for draft in asked for k in {*draft.choices(self.k), self.k}]
        random = [proposal for proposal in proposals if proposal is not None and proposal.p_draft is not None]
        sizes = [k for draft in asked for k in draft.choices(self.k)]
        if len(asked) < len(self.drafts):
            sizes.append(self.k)
        self._run_target(batch, None)
        for width in [width for width in WIDTHS[1:] if width // 2 <= max(sizes)]:
            nothing = [[] for _ in batch.rows]
            if not random or len(self.drafts) > 1:
                self._verify(batch, Proposal(nothing, width - 1))
            if random:
                self._verify(batch, Proposal(nothing, width - 1, random[0].p_draft[:, :1].repeat(1, width - 1, 1)))
        return Drafted()


def cumulative_acceptance(probs: list[float]) -> list[float]:
    """For each token, the probability that it and all before it are accepted, from those that it is accepted if all
    before it are."""
    return list(accumulate(probs, mul))
