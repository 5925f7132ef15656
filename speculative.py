"""Speculative decoding: several tokens per pass over the weights, distributed as in plain decoding.

A draft proposes k tokens for each row, and the target model reads all of them in one pass. That
pass costs much less than k + 1 passes over one token, because it reads the weights once. The target
model accepts a prefix of each proposal and adds one token of its own (arXiv:2211.17192,
arXiv:2302.01318).

Read down: verify and accept, on which exactness depends; Report; Speculation, whose `step` the
engine calls. drafts/draft.py says what a draft is. The drafts are in draft_model.py (another
model), retrieval.py (earlier text) and heads.py (trained heads) beside it, and controller.py
decides which of them proposes how many tokens. Knows nothing of text.

Why it is exact. A token x that was drawn from p_draft is accepted with probability
min(1, p_target(x) / p_draft(x)). If it is rejected, a token is drawn from the residual
max(0, p_target - p_draft), normalized. So x comes out with probability
  p_draft(x) min(1, p_target(x) / p_draft(x)) + P(rejected) max(0, p_target(x) - p_draft(x)) / sum
  = p_target(x),
because the first term is min(p_draft, p_target)(x), and P(rejected) equals the sum by which the
residual is normalized. For a deterministic draft (retrieval, heads, or a greedy draft model),
p_draft is 1 at its token. Then the rule is: sample from the target model, with the same noise as
plain decoding, and accept the proposed token if it is the sampled one. So with a deterministic
draft even the tokens themselves, not only their distribution, are the same as in plain decoding.

What becomes of rejected tokens. The target's pass writes the keys and values of all proposed tokens
into the cache. The keys and values of rejected tokens stay there, and nothing is rolled back: a
token never attends to positions beyond its own, and the next passes go on at the position of the
first rejected token, so they overwrite each of these positions before a token can see it.

What it gains. If each proposed token is accepted with probability a, a step yields
1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a) tokens. It takes k c + v times as long as a plain step,
where c is the time of drafting one token, and v the time of the target's pass over k + 1 tokens,
both relative to a plain step. The controller estimates a, c and v while it runs.
"""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import mul
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backend import synchronize
from costs import weight_reads
from drafts.controller import Candidate, Controller
from drafts.draft import MAX_K, WIDTHS, Draft, Proposal, full_width_choices, width_of
from engine import Batch, Engine, PlainDecoding, StepResult, Timing, set_masks
from kernels import MAX_DECODE_TOKENS
from sampling import Sampling, exponential_noise, probabilities, sample

MAX_PAUSE = 8  # after n fruitless searches the next n steps do not search, but at most this many
ACCEPT = 1  # the stream of the noise that decides what is accepted; tokens are drawn with stream 0

# ---------------------------------------------------------------- verification


class ProposalTensors(NamedTuple):
    """A Proposal as `verify` takes it."""

    drafted: Tensor  # (B,k) int64
    lengths: Tensor  # (B,) int64: how many tokens of each row are proposed; the rest is padding
    # (B,k,V) float32: the distributions they were drawn from; None if the draft is deterministic
    p_draft: Tensor | None = None


def verify(
    model,
    inputs: Tensor,
    proposal: ProposalTensors,
    sampling: Sampling,
    padded: bool = True,
    all_logits: bool = True,
):
    """Run the target model over the last token and the drafted tokens of each row, and decide which
    drafted tokens to accept.

    inputs (3,B) int64: as in engine.decode. With k = 0 drafted tokens this is a plain decode step.
    If `padded`, the model runs over all (B,k+1) tokens, as fixed shapes require. Otherwise it runs
    over the real tokens only, and the draft must be deterministic; then all_logits as in engine.decode.

    Returns
      tokens (B,k+1): the first `count` of each row are its new tokens, the accepted tokens and one
        that was sampled from the target model;
      count (B,);
      the log-probabilities (B,k+1) of the tokens;
      for each row the logits (k+1,V), or if not `padded` the logits of its real tokens only;
      the hidden states (B,D) that the last new tokens were sampled from.
    """
    drafted, lengths, p_draft = proposal
    token, position, rows = inputs.unbind(0)
    offsets = torch.arange(drafted.shape[1] + 1, device=token.device)
    is_real = (position >= 0)[:, None] & (offsets <= lengths[:, None])  # (B,k+1); else padding
    input_pos = torch.where(is_real, position[:, None] + offsets, -1)
    all_tokens = torch.cat([token[:, None], drafted], 1)
    if not padded:
        return verify_without_padding(model, all_tokens, input_pos, is_real, rows, sampling, all_logits)

    x = model.hidden(all_tokens, input_pos, rows)
    logits = model.head(x)[..., : model.config.n_token]  # (B,k+1,V)

    if p_draft is None:
        tokens, logprobs = sample(logits, rows, position + 1, drafted, sampling)
        tokens = model.shard.broadcast(tokens)
        count = count_leading(drafted == tokens[:, :-1], lengths) + 1
        return tokens, count, logprobs, logits, at_last_token(x, count)

    p_target = probabilities(logits, rows, position + 1, drafted, sampling)
    tokens, count = accept(p_target, proposal, position + 1, sampling.seed[rows])
    tokens = model.shard.broadcast(tokens)
    count = model.shard.broadcast(count)
    logprobs = logits.float().log_softmax(-1).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    return tokens, count, logprobs, logits, at_last_token(x, count)


def verify_without_padding(
    model, all_tokens: Tensor, input_pos: Tensor, is_real: Tensor, rows: Tensor, sampling: Sampling, all_logits: bool
):
    """`verify` for proposals of different lengths: each of the n real tokens is a batch row (n,1).

    The tokens of one proposal are then several batch rows that share a cache row, at different
    positions. They can attend to each other, because each layer writes the keys and values of the
    whole batch before it reads any.

    all_tokens (B,k+1): the last token and the drafted tokens of each row; input_pos (B,k+1);
    is_real (B,k+1); rows (B,): the cache rows.
    """
    row, offset = is_real.nonzero().unbind(1)  # (n,) each
    position = input_pos[is_real]
    cache_rows = rows[row]
    x = model.hidden(all_tokens[is_real][:, None], position[:, None], cache_rows)  # (n,1,D)
    if all_logits:
        logits = model.head(x)
    else:
        logits = model.drawable_logits(x[:, 0], cache_rows, position + 1, sampling)[:, None]
    logits = logits[..., : model.config.n_token]  # (n,1,V)

    is_before = torch.arange(1, all_tokens.shape[1], device=row.device) <= offset[:, None]  # (n,k)
    before = torch.where(is_before, all_tokens[row, 1:], -1)  # the tokens drafted before each one
    ids, own_logprobs = sample(logits, cache_rows, position + 1, before, sampling)  # (n,1) each
    ids = model.shard.broadcast(ids)

    tokens = torch.full_like(all_tokens, -1).masked_scatter(is_real, ids)
    zeros = torch.zeros_like(all_tokens, dtype=torch.float32)
    logprobs = zeros.masked_scatter(is_real, own_logprobs)
    lengths = is_real.sum(1)
    count = count_leading(all_tokens[:, 1:] == tokens[:, :-1], (lengths - 1).clamp(min=0)) + 1
    first = lengths.cumsum(0) - lengths  # where the tokens of each row begin in x
    last = (first + count - 1).clamp(max=len(x) - 1)
    return tokens, count, logprobs, logits[:, 0].split(lengths.tolist()), x[last, 0]


def at_last_token(x: Tensor, count: Tensor) -> Tensor:
    """The hidden state (B,D) that each row's last new token was sampled from. x (B,S,D), count (B,)
    as `verify` returns it."""
    return x[torch.arange(len(x), device=x.device), count - 1]


def accept(p_target: Tensor, proposal: ProposalTensors, position: Tensor, seed: Tensor):
    """Accept drafted tokens or resample (arXiv:2211.17192, algorithm 1). Returns tokens and count
    as `verify` does.

    p_target (B,k+1,V) float32 are the target's distributions; the proposal has p_draft. position
    (B,) int64: the position of the first drafted token; seed (B,) int64: the row's seed. If
    p_target is not finite, the row's last new token is -1.
    """
    drafted, lengths, p_draft = proposal
    B, k = drafted.shape
    offsets = torch.arange(k + 1, device=drafted.device)
    zero = torch.zeros_like(drafted)
    noise = exponential_noise(seed[:, None], position[:, None] + offsets[:k], zero, ACCEPT)  # (B,k)
    uniform = torch.exp(-noise)
    target = p_target[:, :k].gather(2, drafted[..., None])[..., 0]  # (B,k): p_target(x)
    draft = p_draft.gather(2, drafted[..., None])[..., 0]  # (B,k): p_draft(x)
    accepted = count_leading(uniform * draft < target, lengths)  # (B,)

    # The distributions (B,V) at the first token that is not accepted, p_draft 0 beyond the proposal
    p_draft = F.pad(p_draft, (0, 0, 0, 1)) * (offsets < lengths[:, None])[..., None]
    row = torch.arange(B, device=drafted.device)
    target = p_target[row, accepted]
    draft = p_draft[row, accepted]
    residual = (target - draft).clamp(min=0)
    # A residual that is 0 everywhere means that both are equal, apart from rounding
    residual = torch.where(residual.amax(1, keepdim=True) > 0, residual, target)

    ids = torch.arange(target.shape[1], device=drafted.device)
    noise = exponential_noise(seed[:, None], (position + accepted)[:, None], ids)
    last = (residual / noise).argmax(1)  # (B,)
    last = torch.where(target.sum(1).isfinite(), last, -1)
    tokens = torch.where(offsets == accepted[:, None], last[:, None], F.pad(drafted, (0, 1)))
    return tokens, accepted + 1


def count_leading(is_right: Tensor, lengths: Tensor) -> Tensor:
    """The number of True values before the first False, among the first lengths (B,) values of each
    row of is_right."""
    offsets = torch.arange(is_right.shape[1], device=is_right.device)
    wrong_at = torch.where(is_right, is_right.shape[1], offsets)
    return torch.cat([wrong_at, lengths[:, None]], 1).amin(1)


# ---------------------------------------------------------------- the report


@dataclass
class Report:
    """Counts and seconds, summed over all steps."""

    steps: int = 0  # steps that verified a proposal
    plain_steps: int = 0
    proposed: int = 0  # proposed tokens
    draft_s: float = 0.0  # the time of proposing
    target_s: float = 0.0  # the time of the target model's passes, also in plain steps
    # The numbers of accepted and of verified tokens, by their place in the proposal. The accepted
    # tokens of a row and the first rejected one are verified, the tokens after it are not.
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_K)
    verified: list[int] = field(default_factory=lambda: [0] * MAX_K)
    # By the draft's name: the number of "steps" that verified its proposals, "proposed_tokens",
    # "accepted_tokens", and the "seconds" that proposing took, unused proposals included
    drafts: dict[str, Counter] = field(default_factory=dict)

    def count(self, draft: str, **counts):
        """Add to the counts of the draft with this name."""
        self.drafts.setdefault(draft, Counter()).update(counts)

    def add(self, draft: str, accepted: list[int], lengths: list[int]):
        """Count a step. accepted: how many tokens each row accepted; lengths: how many the draft
        proposed for it."""
        self.steps += 1
        self.proposed += sum(lengths)
        self.count(draft, steps=1, proposed_tokens=sum(lengths), accepted_tokens=sum(accepted))
        for n, length in zip(accepted, lengths):
            for place in range(min(n + 1, length)):
                self.accepted[place] += place < n
                self.verified[place] += 1

    def numbers(self, decode_s: float) -> dict:
        """The fields of --json (docs/speculation.md): means per proposal, acceptance rates by
        place, shares of decode_s seconds (if that is not 0), and the counts of each draft."""
        proposals = max(1, self.verified[0])  # the first token of each proposal is always verified
        shares = {}
        if decode_s:
            draft = self.draft_s / decode_s
            target = self.target_s / decode_s
            shares = {"draft": draft, "verify": target, "rest": 1 - draft - target}
        speculation = {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "mean_proposed_tokens": self.proposed / proposals,
            "acceptance_by_place": [a / b for a, b in zip(self.accepted, self.verified) if b],
            "share_of_time": shares,
            "drafts": [self.draft_numbers(name, decode_s) for name in self.drafts],
        }
        return {"mean_accepted_tokens": sum(self.accepted) / proposals, "speculation": speculation}

    def draft_numbers(self, name: str, decode_s: float) -> dict:
        counts = self.drafts[name]
        tokens = {key: counts[key] for key in ("steps", "proposed_tokens", "accepted_tokens")}
        share = counts["seconds"] / decode_s if decode_s else None
        return {"name": name, **tokens, "share_of_time": share}


# ---------------------------------------------------------------- a step


class DraftResult(NamedTuple):
    """What drafting in a step has given. Without a proposal, the step is a plain one."""

    choice: Candidate | None = None
    proposal: Proposal | None = None
    prefill_s: float = 0.0  # the time in which a draft read prompts


class Speculation(PlainDecoding):
    """Runs the decode steps of the engine: drafts propose tokens, and the target verifies them.

    k is the number of tokens to propose, or if `automatic` the largest number. With a fixed k, the
    first of the drafts that has a proposal is used.
    """

    def __init__(self, drafts: list[Draft], k: int = MAX_K, automatic: bool = True):
        assert 1 <= k <= MAX_K and drafts, k
        self.drafts = drafts
        self.k = k
        self.automatic = automatic
        self.rehearsing = False  # whether steps run everything that may have to be compiled
        # Free drafts search for tokens. A search is fruitless if no token that it finds is
        # proposed. With several rows, fruitless searches cost too much time, so they pause.
        self.fruitless = 0  # fruitless searches in succession, at most MAX_PAUSE
        self.pause = 0  # steps until the next search
        self.observers = [draft for draft in drafts if draft.observes]
        self.controller = Controller([draft.prior for draft in drafts], self._extra_share)
        self.report = Report()
        self.draft_counts = self.report.drafts
        for draft in drafts:  # so that drafts that never propose are reported, too
            self.report.count(draft.name)

    def begin(self, engine: Engine):
        self.verify = engine.steps.compile(verify)
        self.reads = weight_reads(engine.model)
        # (index of the draft, number of rows) -> what `_candidates` returns
        self.candidates: dict[tuple[int, int], list[Candidate]] = {}
        for draft in self.drafts:
            draft.begin(engine)

    def add(self, row: int, tokens: list[int], cached: int):
        self.fruitless = 0
        self.pause = 0
        for draft in self.drafts:
            draft.add(row, tokens, cached)

    def remove(self, row: int):
        for draft in self.drafts:
            draft.remove(row)

    def numbers(self, timing: Timing, profiled: bool) -> dict:
        if profiled:
            return {"draft_prefill_s": None} | self.report.numbers(0.0)
        return {"draft_prefill_s": timing.draft_prefill_s} | self.report.numbers(timing.decode_s)

    def step(self, batch: Batch) -> StepResult:
        trials = batch.threads.trials
        self.controller.token_s = prompt_token_s(batch.timing)

        start = time.perf_counter()
        drafted = self._rehearse(batch) if self.rehearsing else self._draft(batch)
        draft_s = time.perf_counter() - start - drafted.prefill_s

        start = time.perf_counter()
        result = self._run_target(batch, drafted.proposal)
        for draft in self.drafts:
            for row, new in zip(batch.rows, result.new_tokens):
                draft.accepted(row.index, new)
        target_s = time.perf_counter() - start

        result.draft_prefill_s = drafted.prefill_s
        if drafted.proposal is not None:
            draft = self.drafts[drafted.choice.draft]
            positions = [len(row.tokens) for row in batch.rows]
            result.draft_bytes, result.draft_kv_bytes = draft.bytes_read(drafted.proposal.k, positions)
        if not self.rehearsing:
            accepted = [len(new) - 1 for new in result.new_tokens]
            is_trial = batch.threads.trials != trials
            self._learn(drafted, accepted, (draft_s, target_s), is_trial)
        return result

    # ------------------------------------------------------------ drafting

    def _draft(self, batch: Batch) -> DraftResult:
        """Choose a draft and a number of tokens, and let it propose."""
        if not self.automatic:
            asked = (self._ask(batch, Candidate(i, self.k, 0)) for i in range(len(self.drafts)))
            return next((drafted for drafted in asked if drafted.proposal is not None), DraftResult())

        rows = len(batch.rows)
        # One row is searched in little time. Ranks need the same candidates, but each has measured
        # other times and so has other pauses: they always search.
        is_searching = self.pause == 0 or rows == 1 or batch.model.shard.ranks > 1
        found = {}  # index of a free draft -> its proposal
        candidates = []
        for i, draft in enumerate(self.drafts):
            if not draft.is_free:
                candidates += self._candidates(i, batch)
            elif is_searching:
                found[i] = self._ask(batch, Candidate(i, self.k, 0)).proposal
                candidates += self._free_candidates(i, batch, found[i])

        choice = self._choose(batch, candidates)
        is_found = choice is not None and choice.draft in found
        if self.pause > 0:
            self.pause -= 1
        elif is_found:
            self.fruitless = 0
        else:
            self.fruitless = min(self.fruitless + 1, MAX_PAUSE)
            self.pause = self.fruitless

        if choice is None:
            return DraftResult()
        if is_found:
            return DraftResult(choice, self._likeliest(batch, found[choice.draft], choice.k))
        return self._ask(batch, choice)

    def _choose(self, batch: Batch, candidates: list[Candidate]) -> Candidate | None:
        """The controller's choice. All ranks use the choice of rank 0: each has measured other times."""
        choice = self.controller.choose(len(batch.rows), candidates)
        shard = batch.model.shard
        if shard.ranks == 1:
            return choice
        choices = [None, *candidates]
        index = torch.tensor(choices.index(choice), device=batch.model.device)
        return choices[int(shard.broadcast(index))]

    def _ask(self, batch: Batch, choice: Candidate) -> DraftResult:
        """The proposal of a draft. The report counts its time, without the time of reading prompts."""
        draft = self.drafts[choice.draft]
        prefill_s = draft.catch_up(batch.rows)

        start = time.perf_counter()
        if draft.is_free:
            proposal = draft.propose(batch, choice.k)
        else:
            with batch.with_threads(f"draft {draft.name} {choice.k}"):
                proposal = draft.propose(batch, choice.k)
            synchronize(batch.model.device)
        self.report.count(draft.name, seconds=time.perf_counter() - start)

        if proposal is None:
            choice = None
        return DraftResult(choice, proposal, prefill_s)

    def _candidates(self, index: int, batch: Batch) -> list[Candidate]:
        """The proposals that a draft can make. They are cached, because a step of a small model
        takes few milliseconds."""
        draft = self.drafts[index]
        rows = batch.inputs.shape[1]
        if (index, rows) not in self.candidates:
            plain = self.reads.total(rows)
            self.candidates[index, rows] = [
                Candidate(index, k, rows * padded_k(batch, k), None, draft.bytes_read(k, [0] * rows)[0] / plain)
                for k in draft.choices(self.k)
            ]
        return self.candidates[index, rows]

    def _free_candidates(self, index: int, batch: Batch, proposal: Proposal | None) -> list[Candidate]:
        """A candidate for each n: the n likeliest tokens that a free draft proposes for all rows,
        or with fixed shapes the first n of each row."""
        if proposal is None:
            return []
        probs = cumulative_acceptance(proposal)
        if not batch.steps.fixed_shapes:
            sums = accumulate(sorted(chain.from_iterable(probs), reverse=True))
            return [Candidate(index, n, n, accepted) for n, accepted in enumerate(sums, 1)]
        rows = batch.inputs.shape[1]
        return [
            Candidate(index, n, rows * padded_k(batch, n), sum(sum(row[:n]) for row in probs))
            for n in full_width_choices(proposal.k)
        ]

    def _likeliest(self, batch: Batch, proposal: Proposal, n: int) -> Proposal:
        """The part of a free draft's proposal that the candidate with n tokens stands for."""
        if batch.steps.fixed_shapes:
            return Proposal([tokens[:n] for tokens in proposal.tokens], n)
        probs = cumulative_acceptance(proposal)
        least = sorted(chain.from_iterable(probs), reverse=True)[n - 1]
        counts = [sum(p >= least for p in row) for row in probs]
        tokens = [tokens[:count] for tokens, count in zip(proposal.tokens, counts)]
        return Proposal(tokens, max(counts))

    def _extra_share(self, rows: int, tokens: int) -> float:
        """The bytes of experts that each of these extra tokens adds to a pass over one token per row,
        divided by all bytes of weights that this pass reads."""
        extra = self.reads.of_experts(rows + tokens) - self.reads.of_experts(rows)
        return extra / tokens / self.reads.total(rows)

    def _learn(self, drafted: DraftResult, accepted: list[int], seconds: tuple, is_trial: bool):
        """Add a step to the report, and to the controller's estimates if it was not a trial of
        another number of threads.

        accepted: the number of accepted tokens of each row. seconds: the times of drafting, and of
        the target's pass.
        """
        draft_s, target_s = seconds
        self.report.draft_s += draft_s
        self.report.target_s += target_s

        choice, proposal, _ = drafted
        lengths = [] if proposal is None else [len(tokens) for tokens in proposal.tokens]
        # A draft model that still reads the prompts proposes nothing
        is_reading = choice is not None and not any(lengths)
        if self.automatic and not is_trial and not is_reading:
            self.controller.update(len(accepted), choice, seconds, accepted)
        if choice is None:
            self.report.plain_steps += 1
        else:
            self.report.add(self.drafts[choice.draft].name, accepted, lengths)

    # ------------------------------------------------------------ verifying

    def _run_target(self, batch: Batch, proposal: Proposal | None) -> StepResult:
        """A pass of the target: the verification of a proposal, or without one a plain step."""
        if proposal is None and not self.observers:
            return super().step(batch)
        proposal = proposal or Proposal([[] for _ in batch.rows], 0)
        set_masks(batch.sampling, batch.rows, proposal.tokens)
        tokens, count, logprobs, logits, hidden = self._verify(batch, proposal)
        for draft in self.observers:
            draft.observe(batch.rows, hidden)
        new_tokens = [line[:n] for line, n in zip(tokens.tolist(), count.tolist())]
        return StepResult(new_tokens[: len(batch.rows)], logprobs, logits)

    def _verify(self, batch: Batch, proposal: Proposal) -> tuple:
        """The results of `verify`."""
        k = padded_k(batch, proposal.k)
        p_draft = proposal.p_draft
        if p_draft is not None:
            p_draft = F.pad(p_draft, (0, 0, 0, k - proposal.k))

        padding_rows = batch.inputs.shape[1] - len(proposal.tokens)
        tokens = proposal.tokens + [[]] * padding_rows
        table = batch.inputs.new_tensor([ids + [0] * (k - len(ids)) for ids in tokens])
        lengths = batch.inputs.new_tensor([len(ids) for ids in tokens])
        tensors = ProposalTensors(table, lengths, p_draft)
        padded = needs_padding(batch, proposal)
        with batch.with_threads(f"verify {k + 1}"):
            return self.verify(batch.model, batch.inputs, tensors, batch.sampling, padded, batch.needs_all_logits)

    # ------------------------------------------------------------ compiling

    @contextmanager
    def rehearsal(self):
        self.rehearsing = True
        yield
        self.rehearsing = False

    def _rehearse(self, batch: Batch) -> DraftResult:
        """Run each draft in each length, the plain step, and the verification in each width that k
        can need, with empty proposals. Propose nothing: accepted tokens could end the request
        before it has seen all graphs."""
        lengths = {draft: [min(self.k, draft.max_k)] for draft in self.drafts}
        if self.automatic:
            lengths = {draft: draft.choices(self.k) for draft in self.drafts}
        proposals = [draft.propose(batch, k) for draft in self.drafts if not draft.is_free for k in lengths[draft]]
        random = [proposal.p_draft for proposal in proposals if proposal and proposal.p_draft is not None]

        self._run_target(batch, None)
        nothing = [[] for _ in batch.rows]
        most = max(max(choices) for choices in lengths.values())
        for width in [width for width in WIDTHS[1:] if width // 2 <= most]:
            if not random or len(self.drafts) > 1:
                self._verify(batch, Proposal(nothing, width - 1))
            if random:
                p_draft = random[0][:, :1].repeat(1, width - 1, 1)
                self._verify(batch, Proposal(nothing, width - 1, p_draft))
        return DraftResult()


def prompt_token_s(timing: Timing) -> float | None:
    """The seconds that a token of a prompt took. None after a short prompt: reading it takes about
    as long as a plain step, however many tokens it has."""
    if timing.prefill_tokens <= MAX_DECODE_TOKENS:
        return None
    return timing.prefill_s / timing.prefill_tokens


def cumulative_acceptance(proposal: Proposal) -> list[list[float]]:
    """For each token of each row, the probability that it and all before it are accepted."""
    return [list(accumulate(probs, mul)) for probs in proposal.probs]


def padded_k(batch: Batch, k: int) -> int:
    """How many drafted tokens per row a pass over k of them has with its padding. With fixed
    shapes, it has one of WIDTHS tokens per row, and the first of these is not a drafted one."""
    return width_of(k) - 1 if batch.steps.fixed_shapes else k


def needs_padding(batch: Batch, proposal: Proposal) -> bool:
    """Whether the target runs over padding of the proposals, too: `padded` of `verify`.

    A GPU always does. Without padding, each token is a batch row of its own. Then a GPU would read
    the keys and values of a cache row once for each of its tokens, and the program would wait until
    the GPU has counted the tokens.
    """
    if batch.steps.fixed_shapes or proposal.p_draft is not None:
        return True
    has_one_length = len({len(tokens) for tokens in proposal.tokens}) == 1
    return has_one_length or batch.model.device.type != "cpu"
