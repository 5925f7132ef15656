"""The engine: requests in, tokens out. This is the only generation loop (continuous batching).

Read down: Request; prefill and decode; PlainDecoding; Row; Plan; Engine, whose `step` is the body of the loop;
`generate`, the loop. Knows token ids only: the caller handles text, in on_token. Speculation and the ranks of a split
model are arguments.

Requests join and leave between steps. A step gives free cache rows to waiting requests, prefills a chunk of one prompt
(or of all prompts while no row is decoding), and decodes one token for every other row, or several with speculation. A
row keeps its keys and values after its request has ended, so that later prompts reuse a common prefix (prefix caching).
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cli import UserError, first_line, progress_bar
from config import Config
from kernels import MAX_DECODE_TOKENS
from model import WHOLE_MODEL, Transformer, pad_rows
from sampling import Sampling, SamplingParams, sample, top_logprobs

CHUNK_TOKENS = 128  # of a prompt, read between two decode steps
PREFILL_TOKENS = 2048  # per prefill pass while no row is decoding: enough to be compute-bound, with bounded memory
MAX_WAIT = 8  # a prompt that has waited for this many chunks of other prompts is read next
SCORED_POSITIONS = 128  # prompt_logprobs are computed for this many positions at once, to bound the (n,V) tensor


@dataclass(eq=False)
class Request:
    """A prompt to continue, and the result, which the engine writes.

    on_token(id) is called with each new token and ends the request by returning True. logprobs=n records the
    log-probability of each new token and of the n likeliest ones, from the logits before penalties and temperature.
    prompt_logprobs=n does the same for the prompt, which is then read in full, even if the cache holds a prefix of it.
    grammar says which tokens may come next, as a grammar.Grammar does; it belongs to this request alone.
    """

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 200  # fewer if the cache row is full; 0 only reads the prompt
    stop_ids: frozenset[int] = frozenset()  # the first of these ends the request, and is its last token
    on_token: Callable[[int], bool] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: object | None = None
    # Written by the engine:
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    error: str | None = None  # a message, if finish_reason is "error"
    failure: BaseException | None = None  # the exception behind the error, if there was one
    cached_tokens: int = 0  # prompt tokens that were reused from a cache row
    # An entry (log-probability of the token, [(id, log-probability), ...] of the likeliest ids) for each new token, and
    # for each prompt token but the first.
    token_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    prompt_token_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)  # time.perf_counter: added, started, first_token, finished


def check_prompt(prompt: list[int], config: Config, length: int):
    """Raise UserError if a cache row of `length` positions cannot serve a prompt."""
    if not prompt:
        raise UserError("the prompt is empty; give at least one token")
    if len(prompt) > length:
        raise UserError(f"the prompt has {len(prompt)} tokens, the context is {length}")
    V = config.vocab_size
    if outside := [token for token in prompt if not 0 <= token < V]:
        raise UserError(f"token id {outside[0]} is outside the vocabulary of {V} (0 to {V - 1})")


def prefill(model: Transformer, tokens: Tensor, input_pos: Tensor, rows: Tensor) -> Tensor:
    """Read tokens (B,S) at positions (B,S) into cache rows (B,). Returns the logits (B,V) after the last tokens."""
    return model(tokens, input_pos, rows)


def decode(model: Transformer, inputs: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """One new token for every row. inputs (3,B) int64: the last token, its position (-1: padding), the cache row.
    Returns ids (B,1), their log-probabilities (B,1) and the logits (B,1,V)."""
    token, position, rows = inputs.unbind(0)
    logits = model(token[:, None], position[:, None], rows)
    return draw(model, logits, rows, position + 1, sampling)


def draw(model: Transformer, logits: Tensor, rows: Tensor, position: Tensor, sampling: Sampling):
    """Sample a token for each row from logits (B,V), for position (B,). All ranks use rank 0's tokens."""
    logits = logits[:, None, : model.config.n_token]  # (B,1,V), without padding of the vocabulary
    ids, logprobs = sample(logits, rows, position, None, sampling)
    return model.shard.broadcast(ids), logprobs, logits


@dataclass
class StepResult:
    """What a decode step has yielded for each row, and what a draft took."""

    new_tokens: list[list[int]]
    logprobs: Tensor  # (B,n): the log-probability of each new token
    logits: Sequence[Tensor]  # B x (n,V)
    draft_prefill_s: float = 0.0  # in which a draft model read prompts
    draft_bytes: float = 0.0  # weights and
    draft_kv_bytes: float = 0.0  # keys and values that the draft read


@dataclass
class Timing:
    """Seconds and counts, summed over steps."""

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    kv_bytes: float = 0  # keys and values read by decode steps
    draft_bytes: float = 0.0  # weights of a draft model read by decode steps
    draft_prefill_s: float = 0.0  # in which a draft model read prompts; part of neither prefill_s nor decode_s

    def add_step(self, seconds: float, tokens: int, kv_bytes: int, result: StepResult):
        self.decode_s += seconds - result.draft_prefill_s
        self.decode_tokens += tokens
        self.decode_steps += 1
        self.kv_bytes += kv_bytes + result.draft_kv_bytes
        self.draft_bytes += result.draft_bytes
        self.draft_prefill_s += result.draft_prefill_s


@dataclass
class StepFunctions:
    """The functions that the engine calls for a step: `prefill` and `decode` above, or compiled versions of them."""

    prefill: Callable = prefill
    decode: Callable = decode
    fixed_shapes: bool = False  # decode with 1 row or all rows only, as each number needs its own graph
    compile: Callable = lambda function: function  # what compiled `decode`; speculation compiles its functions with it


# ---------------------------------------------------------------- what the engine is given


class PlainDecoding:
    """Decodes one token for each row. speculative.Speculation has the same members, and decodes several tokens."""

    draft_counts: dict[str, dict] = {}  # the counts of each draft, by its name

    def begin(self, engine: "Engine"):
        """Called once, before all others."""
        self.engine = engine

    def add(self, row: int, tokens: list[int], cached: int):
        """A request has its first new token. tokens: its prompt and this token; `cached` of them were in the cache."""

    def remove(self, row: int):
        """The request in this cache row has ended."""

    def step(self, rows: list["Row"], inputs: Tensor) -> StepResult:
        """The next tokens of these rows, which have their first ones from prefill. inputs: as in `decode`; they may
        include rows of padding behind `rows`."""
        engine = self.engine
        engine.set_masks(rows)
        with engine.threads.of("decode", len(rows), fixed=not engine.model.backend.thread_invariant):
            ids, logprobs, logits = engine.steps.decode(engine.model, inputs, engine.sampling)
        return StepResult(ids.tolist()[: len(rows)], logprobs, logits)

    def rehearsal(self):
        """A context in which each step runs everything that a later step may need, so that it is compiled."""
        return nullcontext()

    def numbers(self, profiled: bool) -> dict:
        """The fields of --json about drafts; without times if they were `profiled`."""
        return {}


class SingleProcess:
    """The interface of ranks.Ranks for a run with one process, without torchrun."""

    rank, size = 0, 1

    def device(self, name: str | None):
        return name

    def portion(self, device: torch.device) -> float:
        return 1.0

    def shard(self, device: torch.device):
        return WHOLE_MODEL

    def share(self, work: Callable = lambda: None):
        return work()

    in_turn = share

    def repeat(self, work: Callable):
        return nullcontext()

    def check_same(self, source):
        pass


@dataclass(frozen=True)
class EngineOptions:
    """How an engine works, apart from its model and the size of its cache."""

    chunk_tokens: int | None = None  # of a prompt, read between two decode steps; None: CHUNK_TOKENS
    always_chunk: bool = False  # read chunks of one prompt also while no row is decoding
    fixed_threads: bool = False  # do not tune the number of threads
    ranks: object = SingleProcess()  # or a ranks.Ranks, if the model is split: rank 0 calls `step`, the others `follow`


# ---------------------------------------------------------------- the engine


@dataclass(eq=False)
class Row:
    """A row of the KV cache."""

    index: int
    tokens: list[int] = field(default_factory=list)  # the tokens whose keys and values the cache holds, from position 0
    request: Request | None = None
    last_used: float = 0.0
    waited: int = 0  # chunks of other prompts read while this one waited

    @property
    def unread(self) -> list[int]:
        """The tokens whose keys and values the cache lacks: a part of the prompt, or while decoding the last token."""
        return (self.request.prompt + self.request.new_tokens)[len(self.tokens) :]

    @property
    def is_decoding(self) -> bool:
        request = self.request
        return bool(request.new_tokens) and len(self.tokens) == len(request.prompt) + len(request.new_tokens) - 1


@dataclass
class Plan:
    """What a step does. Rank 0 sends its plan to the other ranks, which do the same."""

    released: list[int] = field(default_factory=list)  # rows whose requests ended since the last plan
    # (request, row, source, n): the request gets a row, which reuses the first n positions of the row `source`
    admitted: list[tuple[Request, int, int, int]] = field(default_factory=list)
    chunk: dict[int, int] = field(default_factory=dict)  # row -> number of prompt tokens to read; all in one pass
    decoding: list[int] = field(default_factory=list)  # rows to decode


class Engine:
    """Serves requests with one model, max_batch_size at a time, each with up to max_seq_length positions of context.

    steps: the functions to call, by default uncompiled ones. decoding: a speculative.Speculation, by default
    PlainDecoding.
    """

    def __init__(self, model, max_batch_size, max_seq_length, steps=None, decoding=None, options=None):
        model.setup_caches(max_batch_size, max_seq_length)
        self.model, self.length = model, max_seq_length
        self.options = options or EngineOptions()
        self.ranks = self.options.ranks
        self.steps = self.next_steps = steps or StepFunctions()
        self.rows, self.waiting = [Row(index) for index in range(max_batch_size)], deque()
        self.threads = model.backend.make_threads(self.options.fixed_threads)
        self.timing = Timing()
        self.sampling = Sampling.make(max_batch_size, model.config.vocab_size, model.device)
        self.finished, self.cancelled = [], []  # requests, since the last step
        self.released: list[int] = []  # rows, since the last step
        self.decoding = decoding or PlainDecoding()
        self.decoding.begin(self)

    def add(self, request: Request):
        """Queue a request until a row is free; raises UserError if no row could serve it."""
        check_prompt(request.prompt, self.model.config, self.length)
        if outside := [
            token for token, _ in request.params.logit_bias if not 0 <= token < self.model.config.vocab_size
        ]:
            raise UserError(f"logit_bias: token id {outside[0]} is outside the vocabulary")
        assert not request.times, "a request is run once"
        request.prompt, request.times["added"] = list(request.prompt), time.perf_counter()
        self.waiting.append(request)

    def cancel(self, request: Request):
        """End a request at the start of the next step. It may be waiting or active; on_token may call this."""
        self.cancelled.append(request)

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or has a row."""
        return bool(self.waiting) or any(row.request is not None for row in self.rows)

    @torch.no_grad()  # not inference_mode, which breaks compiled graphs
    def step(self) -> list[Request]:
        """Do one step, and return the requests that have ended since the last step."""
        plan = self._plan()
        self.ranks.share(lambda: plan)
        self._run(plan)
        finished, self.finished = self.finished, []
        return finished

    def clear(self):
        """Forget the tokens of free rows, so that the next prompts are read from their beginning."""
        for row in [row for row in self.rows if row.request is None]:
            row.tokens = []

    def replace_steps(self, steps: StepFunctions):
        """Call other functions from the next step on. Another thread may call this."""
        self.next_steps = steps

    def reset_timing(self):
        self.timing = Timing()

    @torch.no_grad()
    def follow(self):
        """Do what rank 0 does, until it closes its engine."""
        while (plan := self.ranks.share()) is not None:
            for row in [self.rows[index] for index in plan.released if self.rows[index].request is not None]:
                self._finish(row.request, "cancelled", row)
            for admission in plan.admitted:
                self._start(*admission)
            self._run(plan)
            self.finished, self.released = [], []

    def close(self):
        """End the other ranks' `follow`."""
        if self.ranks.rank == 0:
            self.ranks.share(lambda: None)

    def _plan(self) -> Plan:
        for request in dict.fromkeys(self.cancelled):
            row = next((row for row in self.rows if row.request is request), None)
            if row is not None or request in self.waiting:
                self._finish(request, "cancelled", row)
        self.waiting = deque(request for request in self.waiting if request.finish_reason is None)
        plan = Plan(self.released)
        self.released, self.cancelled = [], []
        while self.waiting and any(row.request is None for row in self.rows):
            request = self.waiting.popleft()
            where = self._choose_row(request)
            self._start(request, *where)
            plan.admitted.append((replace(request, on_token=None, grammar=None), *where))  # which cannot be pickled
        active = [row for row in self.rows if row.request is not None]
        plan.decoding = [row.index for row in active if row.is_decoding]
        plan.chunk = self._choose_chunk([row for row in active if not row.is_decoding], bool(plan.decoding))
        return plan

    def _choose_row(self, request: Request) -> tuple[int, int, int]:
        """The free row for a request, the row that holds the longest prefix of its prompt, and how long that is."""
        # The last token is always read, because its logits are needed. With prompt_logprobs, all tokens are read.
        wanted = request.prompt[:-1] if request.prompt_logprobs is None else []
        common = {row: len(os.path.commonprefix([row.tokens, wanted])) for row in self.rows}
        source = max(self.rows, key=lambda row: (common[row], row.request is None, -row.last_used))
        row = min((row for row in self.rows if row.request is None), key=lambda row: row.last_used)
        if source.request is None and 2 * common[source] >= len(source.tokens):
            row = source  # otherwise copy the prefix: overwriting source would lose more tokens than are reused
        return row.index, source.index, common[source]

    def _start(self, request: Request, index: int, source: int, n: int):
        if index != source and n:
            self.model.copy_cache(source, index, n)
        row = self.rows[index]
        row.request, request.cached_tokens = request, n
        row.tokens, row.waited = request.prompt[:n], 0
        request.times["started"] = time.perf_counter()
        self.sampling.set_row(index, request.params, request.prompt)

    def _choose_chunk(self, reading: list[Row], decoding: bool) -> dict[int, int]:
        """The prompts to read in this step, as row -> number of tokens: all of them, or one while rows are decoding."""
        if not (decoding or self.options.always_chunk):
            return {row.index: min(max(1, PREFILL_TOKENS // len(reading)), len(row.unread)) for row in reading}
        order = sorted(reading, key=lambda row: (row.waited < MAX_WAIT, len(row.unread), -row.waited))
        for row in order[1:]:
            row.waited += 1
        chunk_tokens = self.options.chunk_tokens or CHUNK_TOKENS
        return {row.index: min(chunk_tokens, len(row.unread)) for row in order[:1]}

    def _run(self, plan: Plan):
        self.steps = self.next_steps
        if plan.chunk:  # fixed, because the results of torch's own products may depend on the number of threads
            with self.threads.of("prefill", tuple(plan.chunk.values()), fixed=not self.model.backend.chunk_invariant):
                self._read(plan.chunk)
        if plan.decoding:
            self._decode([self.rows[index] for index in plan.decoding])

    def _read(self, chunk: dict[int, int]):
        """Read a chunk (row -> number of tokens) in one pass, and sample the first new token of complete prompts.
        A prompt's keys and values must not depend on how it was split into chunks. Where short passes would round
        differently (the backend is not chunk_invariant), they are padded."""
        start, model = time.perf_counter(), self.model
        rows = [self.rows[index] for index in chunk]
        parts = [row.unread[:n] for row, n in zip(rows, chunk.values())]
        width = 0 if model.backend.chunk_invariant else MAX_DECODE_TOKENS + 1
        padded = pad_rows(parts, [len(row.tokens) for row in rows], width)
        inputs = [tensor.to(model.device) for tensor in (*padded, torch.tensor(list(chunk)))]
        if any(row.request.prompt_logprobs is not None and not row.request.new_tokens for row in rows):
            x = model.hidden(*inputs)  # (B,S,D)
            self._score_prompts(rows, parts, x)
            logits = model.head(torch.stack([states[len(part) - 1] for states, part in zip(x, parts)]))  # (B,V)
        else:
            logits = self.steps.prefill(model, *inputs)
        for row, part, last in zip(rows, parts, logits[:, : model.config.n_token]):
            row.tokens, row.last_used = row.tokens + part, start
            if not row.unread and row.request.max_new_tokens < 1:
                if last.max().isfinite():
                    self._finish(row.request, "length", row)
                else:
                    self._append_token(row.request, row, -1)
        if done := [i for i, row in enumerate(rows) if row.request is not None and not row.unread]:
            self.set_masks([rows[i] for i in done])
            targets = torch.tensor([(rows[i].index, len(rows[i].tokens)) for i in done], device=model.device)
            ids, logprobs, logits = draw(model, logits[done], *targets.t().contiguous(), self.sampling)
            self._append_tokens([rows[i] for i in done], ids.tolist(), logprobs, logits)
        else:
            logits[0, 0].item()  # waits for a GPU, whose time would count as that of the next decode step
        self.timing.prefill_s += time.perf_counter() - start
        self.timing.prefill_tokens += sum(map(len, parts))

    def _score_prompts(self, rows: list[Row], parts: list[list[int]], x: Tensor):
        """Record prompt_logprobs of a chunk from its hidden states (B,S,D), a few positions at a time."""
        for row, part, states in zip(rows, parts, x):
            following = row.unread[1 : len(part) + 1]  # the tokens whose logits these states give
            for start in range(0, len(following) if row.request.prompt_logprobs is not None else 0, SCORED_POSITIONS):
                ids = following[start : start + SCORED_POSITIONS]
                logits = self.model.head(states[start : start + len(ids)])[:, : self.model.config.n_token]  # (n,V)
                row.request.prompt_token_logprobs += top_logprobs(logits, ids, row.request.prompt_logprobs)

    def set_masks(self, rows: list[Row], drafted: list[list[int]] | None = None):
        """Let the grammars of rows say which tokens may come next, and after each drafted token of a row."""
        if all(row.request.grammar is None for row in rows):
            return
        drafted = drafted or [[]] * len(rows)
        pairs = [(row, row.request, ids) for row, ids in zip(rows, drafted) if row.request.grammar is not None]
        self.sampling.set_masks(
            [(row.index, len(r.prompt) + len(r.new_tokens), r.grammar, ids) for row, r, ids in pairs]
        )

    def _decode(self, rows: list[Row]):
        start = time.perf_counter()
        columns = [(row.request.new_tokens[-1], len(row.tokens), row.index) for row in rows]
        if self.steps.fixed_shapes and len(rows) > 1:  # pad the batch to all rows
            columns += [(0, -1, 0)] * (len(self.rows) - len(rows))
        result = self.decoding.step(rows, torch.tensor(list(zip(*columns)), device=self.model.device))
        for row, tokens in zip(rows, result.new_tokens):
            row.tokens += [row.request.new_tokens[-1], *tokens[:-1]]  # the tokens that this step has read and accepted
            row.last_used = start
        kv = self.model.kv_bytes([len(row.tokens) for row in rows])
        count = self._append_tokens(rows, result.new_tokens, result.logprobs, result.logits)
        self.timing.add_step(time.perf_counter() - start, count, kv, result)

    def _append_tokens(self, rows: list[Row], new_tokens: list[list[int]], logprobs: Tensor, logits: Tensor) -> int:
        """Append new tokens to each row's request until it ends; returns how many. logprobs (B,n), logits B x (n,V)."""
        requests = [row.request for row in rows]
        before = sum(len(request.new_tokens) for request in requests)
        self.sampling.count([(row.index, new) for row, new in zip(rows, new_tokens) if row.request.params.penalizes])
        for i, (row, request) in enumerate(zip(rows, requests)):
            if not request.new_tokens:
                self.decoding.add(row.index, request.prompt + new_tokens[i], request.cached_tokens)
            request.times.setdefault("first_token", time.perf_counter())
            if request.logprobs is not None:  # _finish drops those after the request's last token
                request.token_logprobs += top_logprobs(logits[i], new_tokens[i], request.logprobs, logprobs[i])
            for token in new_tokens[i]:
                if request.finish_reason is None:
                    self._append_token(request, row, token)
        return sum(len(request.new_tokens) for request in requests) - before

    def _append_token(self, request: Request, row: Row, token: int):
        """Append a token (-1: the logits are not finite) to a request, and finish it if this is its last token."""
        if token < 0:
            row.tokens = []  # the cache may hold NaN
            return self._finish(request, "error", row, "the model's logits are not finite")
        request.new_tokens.append(token)
        room = self.length + 1 - len(request.prompt)  # the last token is never read, so it needs no position
        reason = "length" if len(request.new_tokens) >= min(request.max_new_tokens, room) else None
        reason, error = "stop" if token in request.stop_ids else reason, None
        try:
            reason = "stop" if request.grammar is not None and request.grammar.accept(token) else reason
            reason = "stop" if request.on_token is not None and request.on_token(token) else reason
        except Exception as failure:  # an error of the caller's code ends this request only
            reason, error = "error", first_line(failure)
            request.failure = failure
        if reason is not None:
            self._finish(request, reason, row, error)

    def _finish(self, request: Request, reason: str, row: Row | None, error: str | None = None):
        request.finish_reason, request.error = reason, error
        request.times["finished"] = time.perf_counter()
        del request.token_logprobs[len(request.new_tokens) :]
        self.finished.append(request)
        if row is not None:
            row.request = None
            self.released.append(row.index)
            self.decoding.remove(row.index)


def generate(engine: Engine, requests: Iterable[Request]):
    """Run requests until all have finished, as many at a time as the engine has rows."""
    for request in requests:
        engine.add(request)
    while engine.has_requests:
        engine.step()


def read_with_progress(engine: Engine, requests: list[Request]):
    """Do the engine's steps until it has read the prompts of these requests. If that takes long, show how far it is."""
    total = sum(len(request.prompt) for request in requests)
    with progress_bar(total, "reading the prompt", " tokens", delay=2) as bar:
        while not all(request.new_tokens or request.finish_reason for request in requests):
            engine.step()
            reading = [row for row in engine.rows if row.request is not None and not row.is_decoding]
            unread = sum(len(row.unread) for row in reading)
            bar.n = total - unread - sum(len(request.prompt) for request in engine.waiting)
