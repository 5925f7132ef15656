"""The engine: requests in, tokens out. The only generation loop there is.

Read down: Request; prefill and decode; Row; Plan; Engine, whose `step` is the loop's body; `generate`, the loop.
Knows tokens only: text is outside (on_token), and so are drafts and several ranks, which come as arguments.

Requests join and leave between steps. A step gives free cache rows to waiting requests, reads a chunk of one prompt (of
all, while no row decodes), and decodes one token of every other row, or several with speculation. A cache row remembers
the tokens whose keys and values it holds, also after its request has ended. A new request begins with the longest
prefix that any row has in common with its prompt, and reads only what follows: the next turn of a conversation, say.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cli import UserError, first_line
from kernels import MAX_DECODE_TOKENS
from model import Config, Transformer
from report import Timing, kv_bytes
from sampling import Sampling, SamplingParams, sample, top_logprobs

PREFILL_TOKENS = 2048  # of a pass while no row is decoding: enough to be bound by arithmetic, with bounded memory
PATIENCE = 8  # chunks of other prompts that a prompt lets pass before it goes first
SCORED_POSITIONS = 128  # of prompt_logprobs, whose (n,V) log-probabilities are held at once

# ---------------------------------------------------------------- requests


@dataclass(eq=False)
class Request:
    """A prompt to continue, and after that what came of it.

    on_token(id) hears of each new token and ends the request by returning True. logprobs: record the log-probability of
    each new token and of the n likeliest, by the logits before penalties and temperature; prompt_logprobs: the same of
    the prompt, which is then read as a whole, whatever the cache holds.
    """

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 200  # fewer where the cache row is full; 0 only reads the prompt
    stop_ids: frozenset[int] = frozenset()  # the first of these is the last token
    on_token: Callable[[int], bool] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Written by the engine:
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    error: str | None = None  # what went wrong
    cached_tokens: int = 0  # of the prompt, those that a cache row held already
    # Of each new token, and of the prompt from its second on: (its own, [(id, log-probability), ...] best first)
    token_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    prompt_token_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)  # time.perf_counter: added, started, first_token, finished


def check_prompt(prompt: list[int], config: Config, length: int):
    """UserError where a cache row of `length` positions cannot serve a prompt."""
    if not prompt:
        raise UserError("the prompt is empty; give at least one token")
    if len(prompt) > length:
        raise UserError(f"the prompt has {len(prompt)} tokens, the context is {length}")
    V = config.vocab_size
    if outside := [token for token in prompt if not 0 <= token < V]:
        raise UserError(f"token id {outside[0]} is outside the vocabulary of {V} (0 to {V - 1})")


def prefill(model: Transformer, tokens: Tensor, input_pos: Tensor, rows: Tensor) -> Tensor:
    """Read tokens (B,S) at positions (B,S) into cache rows (B,); the logits (B,V) after each row's last token."""
    return model(tokens, input_pos, rows)


def decode(model: Transformer, inputs: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """One new token for every row. inputs (3,B) int64: the last token, its position (-1: padding), the cache row.
    Returns ids (B,1), their log-probabilities (B,1) and the logits (B,1,V)."""
    token, position, rows = inputs.unbind(0)
    logits = model(token[:, None], position[:, None], rows)
    return draw(model, logits, rows, position + 1, sampling)


def draw(model: Transformer, logits: Tensor, rows: Tensor, position: Tensor, sampling: Sampling):
    """A token for each row by logits (B,V), for position (B,). Several ranks go by the tokens of the first."""
    logits = logits[:, None, : model.config.n_token]  # (B,1,V), without ids that only pad the table
    ids, logprobs = sample(logits, rows, position, rows[:, None][:, :0], sampling)  # drafted: (B,0), nothing
    return ids if model.split is None else model.split.broadcast(ids), logprobs, logits


@dataclass
class StepFunctions:
    """The steps that the engine calls, as they are here or compiled."""

    prefill: Callable = prefill
    decode: Callable = decode
    fixed_shapes: bool = False  # a step is for 1 row or for all rows: each other number would be another graph
    compile: Callable = lambda function: function  # what made this decode of the one above; speculation's functions too


# ---------------------------------------------------------------- the engine


@dataclass(eq=False)
class Row:
    """A row of the KV cache."""

    index: int
    tokens: list[int] = field(default_factory=list)  # whose keys and values the cache holds, from position 0
    request: Request | None = None
    last_used: float = 0.0
    waited: int = 0  # chunks of other prompts read while this one waited

    @property
    def unread(self) -> list[int]:
        """What is still to be read of the prompt."""
        return self.request.prompt[len(self.tokens) :]


@dataclass
class Plan:
    """What a step does. The first of several ranks sends it to the others, which do the same."""

    released: list[int] = field(default_factory=list)  # rows whose requests have ended since the last plan
    admitted: list[tuple] = field(default_factory=list)  # (row, source, n, request): row takes over source's first n
    chunk: dict[int, int] = field(default_factory=dict)  # row: how many tokens of its prompt are read, all in one pass
    decoding: list[int] = field(default_factory=list)  # rows that get new tokens
    draft_length: int = 0  # tokens to propose


class Engine:
    """Serves requests with one model, max_batch_size at a time, each with up to max_seq_length positions of context.

    chunk_tokens: of a prompt, read between two decode steps. speculation: a speculative.Speculation or None. ranks: a
    tp.Ranks where several processes share the model: the first calls `step`, the others `follow` it until it closes.
    """

    def __init__(
        self, model, max_batch_size, max_seq_length, steps=None, chunk_tokens=128, speculation=None, ranks=None
    ):
        model.setup_caches(max_batch_size, max_seq_length)
        self.model, self.length, self.chunk_tokens = model, max_seq_length, chunk_tokens
        self.steps, self.speculation, self.ranks = steps or StepFunctions(), speculation, ranks
        self.rows, self.waiting, self.timing = [Row(index) for index in range(max_batch_size)], deque(), Timing()
        self.sampling = Sampling.make(max_batch_size, model.config.vocab_size, model.device)
        self.finished, self.cancelled, self.released = [], [], []  # requests, requests, rows: news since the last step
        if speculation is not None:
            speculation.begin(self)

    def add(self, request: Request):
        """Let a request wait for a row; UserError where it can never have one."""
        check_prompt(request.prompt, self.model.config, self.length)
        assert not request.times, "a request is run once"
        request.prompt, request.times["added"] = list(request.prompt), time.perf_counter()
        self.waiting.append(request)

    def cancel(self, request: Request):
        """End a request, waiting or not, when the next step begins: on_token may call this in the middle of one."""
        self.cancelled.append(request)

    @property
    def active(self) -> bool:
        return bool(self.waiting) or any(row.request is not None for row in self.rows)

    @torch.no_grad()  # not inference_mode, which compiled graphs trip over
    def step(self) -> list[Request]:
        """Do one step; returns the requests that have ended since the last one."""
        plan = self._plan()
        if self.ranks is not None:
            self.ranks.share(lambda: plan)
        self._run(plan)
        self.finished, finished = [], self.finished
        return finished

    def clear(self):
        """Forget what free rows hold, so that the next prompts are read from their beginning."""
        for row in self.rows:
            if row.request is None:
                row.tokens = []

    @torch.no_grad()
    def follow(self):
        """Do what the first rank does, until it closes its engine."""
        while (plan := self.ranks.share()) is not None:
            for row in [self.rows[index] for index in plan.released if self.rows[index].request is not None]:
                self._finish(row.request, "cancelled", row)
            for index, source, n, request in plan.admitted:
                self._start(self.rows[index], self.rows[source], n, request)
            self._run(plan)
            self.finished, self.released = [], []

    def close(self):
        if self.ranks is not None and self.ranks.rank == 0:
            self.ranks.share(lambda: None)

    def _plan(self) -> Plan:
        for request in dict.fromkeys(self.cancelled):
            row = next((row for row in self.rows if row.request is request), None)
            if row is not None or request in self.waiting:
                self._finish(request, "cancelled", row)
        self.waiting = deque(request for request in self.waiting if request.finish_reason is None)
        plan, self.released, self.cancelled = Plan(self.released), [], []
        while self.waiting and any(row.request is None for row in self.rows):
            plan.admitted.append(self._admit(self.waiting.popleft()))
        active = [row for row in self.rows if row.request is not None]
        plan.decoding = [row.index for row in active if row.request.new_tokens]
        plan.chunk = self._choose_chunk([row for row in active if not row.request.new_tokens], bool(plan.decoding))
        if plan.decoding and self.speculation is not None:
            plan.draft_length = self.speculation.choose_length()
        return plan

    def _admit(self, request: Request) -> tuple[int, int, int, Request]:
        """Give a request a free row, with the longest prefix of its prompt that any row holds."""
        # The last token is always read, for its logits are wanted, and of a prompt to be scored all are.
        wanted = request.prompt[:-1] if request.prompt_logprobs is None else []
        common = {row: len(os.path.commonprefix([row.tokens, wanted])) for row in self.rows}
        source = max(self.rows, key=lambda row: (common[row], row.request is None, -row.last_used))
        row = min((row for row in self.rows if row.request is None), key=lambda row: row.last_used)
        if source.request is None and 2 * common[source] >= len(source.tokens):
            row = source  # else copy: more of what source holds would be lost than reused
        self._start(row, source, common[source], request)
        return row.index, source.index, common[source], replace(request, on_token=None)  # no function can be sent

    def _start(self, row: Row, source: Row, n: int, request: Request):
        if row is not source and n:
            self.model.copy_cache(source.index, row.index, n)
        row.request, row.tokens, row.waited = request, request.prompt[:n], 0
        request.cached_tokens, request.times["started"] = n, time.perf_counter()
        self.sampling.set_row(row.index, request.params, request.prompt)

    def _choose_chunk(self, reading: list[Row], decoding: bool) -> dict[int, int]:
        """Which prompts to read now, and how many tokens of each: all prompts, or one while rows are decoding."""
        if not decoding:
            return {row.index: min(max(1, PREFILL_TOKENS // len(reading)), len(row.unread)) for row in reading}
        order = sorted(reading, key=lambda row: (row.waited < PATIENCE, len(row.unread), -row.waited))
        for row in order[1:]:
            row.waited += 1
        return {row.index: min(self.chunk_tokens, len(row.unread)) for row in order[:1]}

    def _run(self, plan: Plan):
        if plan.chunk:
            self._read(plan.chunk)
        if plan.decoding:
            self._decode([self.rows[index] for index in plan.decoding], plan.draft_length)

    def _read(self, chunk: dict[int, int]):
        """Read so many tokens of these rows' prompts in one pass; prompts that end there get their first new token.
        Short passes round differently in models that are not chunk_invariant, so they are padded: a prompt's keys and
        values must not depend on how it was cut."""
        start, model, rows = time.perf_counter(), self.model, [self.rows[index] for index in chunk]
        parts = [row.unread[:n] for row, n in zip(rows, chunk.values())]
        width = max(map(len, parts)) if model.chunk_invariant else max(MAX_DECODE_TOKENS + 1, *map(len, parts))
        tokens, input_pos = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -1)
        for i, (row, part) in enumerate(zip(rows, parts)):
            tokens[i, : len(part)] = torch.tensor(part)
            input_pos[i, : len(part)] = torch.arange(len(row.tokens), len(row.tokens) + len(part))
        inputs = [tensor.to(model.device) for tensor in (tokens, input_pos, torch.tensor(list(chunk)))]
        if any(row.request.prompt_logprobs is not None for row in rows):
            x = model.hidden(*inputs)  # (B,S,D)
            self._score_prompts(rows, parts, x)
            logits = model.head(torch.stack([states[len(part) - 1] for states, part in zip(x, parts)]))  # (B,V)
        else:
            logits = self.steps.prefill(model, *inputs)
        for row, part in zip(rows, parts):
            row.tokens, row.last_used = row.tokens + part, start
            if not row.unread and row.request.max_new_tokens < 1:
                self._finish(row.request, "length", row)
        if done := [i for i, row in enumerate(rows) if row.request is not None and not row.unread]:
            places = torch.tensor([(rows[i].index, len(rows[i].tokens)) for i in done], device=model.device)
            ids, logprobs, logits = draw(model, logits[done], *places.t().contiguous(), self.sampling)
            self._accept([rows[i] for i in done], ids.tolist(), logprobs, logits)
        self.timing.add_prefill(time.perf_counter() - start, sum(map(len, parts)))

    def _score_prompts(self, rows: list[Row], parts: list[list[int]], x: Tensor):
        """Record prompt_logprobs of a chunk by its hidden states (B,S,D), a few positions at a time."""
        for row, part, states in zip(rows, parts, x):
            following = row.unread[1 : len(part) + 1]  # of the prompt's last token none
            for at in range(0, len(following) if row.request.prompt_logprobs is not None else 0, SCORED_POSITIONS):
                ids = following[at : at + SCORED_POSITIONS]
                logits = self.model.head(states[at : at + len(ids)])[:, : self.model.config.n_token]  # (n,V)
                row.request.prompt_token_logprobs += top_logprobs(logits, ids, row.request.prompt_logprobs)

    def _decode(self, rows: list[Row], draft_length: int):
        start = time.perf_counter()
        columns = [(row.request.new_tokens[-1], len(row.tokens), row.index) for row in rows]
        if self.steps.fixed_shapes and len(rows) > 1:  # a step is for one row, or for all
            columns += [(0, -1, 0)] * (len(self.rows) - len(rows))  # padding
        inputs = torch.tensor(list(zip(*columns)), device=self.model.device)
        if self.speculation is None:
            ids, logprobs, logits = self.steps.decode(self.model, inputs, self.sampling)
            found = ids.tolist()
        else:
            found, logprobs, logits = self.speculation.step(rows, inputs, draft_length)
        for row, tokens in zip(rows, found):
            row.tokens += [row.request.new_tokens[-1], *tokens[:-1]]  # what the step has read, and accepted
            row.last_used = start
        kv, count = kv_bytes(self.model, [len(row.tokens) for row in rows]), self._accept(rows, found, logprobs, logits)
        self.timing.add_step(time.perf_counter() - start, count, kv)

    def _accept(self, rows: list[Row], found: list[list[int]], logprobs: Tensor, logits: Tensor) -> int:
        """Give each row's request its new tokens, as far as it wants them; returns how many. logprobs (B,n), logits
        (B,n,V): of the tokens, and what they were drawn from."""
        requests = [row.request for row in rows]
        before = sum(len(request.new_tokens) for request in requests)
        self.sampling.count([(row.index, new) for row, new in zip(rows, found) if row.request.params.penalizes])
        for i, (row, request) in enumerate(zip(rows, requests)):
            if self.speculation is not None and not request.new_tokens:
                self.speculation.add(row.index, request.prompt + found[i])
            request.times.setdefault("first_token", time.perf_counter())
            if request.logprobs is not None:  # _finish cuts off what the request does not get
                request.token_logprobs += top_logprobs(logits[i], found[i], request.logprobs, logprobs[i])
            for token in found[i]:
                if request.finish_reason is None:
                    self._take(request, row, token)
        return sum(len(request.new_tokens) for request in requests) - before

    def _take(self, request: Request, row: Row, token: int):
        """A request gets a token, which may be its last."""
        if token < 0:
            row.tokens = []  # what the cache holds may be worth nothing
            return self._finish(request, "error", row, "the model's logits are not finite")
        request.new_tokens.append(token)
        room = self.length + 1 - len(request.prompt)  # the last token needs no position
        reason = "length" if len(request.new_tokens) >= min(request.max_new_tokens, room) else None
        reason, error = "stop" if token in request.stop_ids else reason, None
        try:
            reason = "stop" if request.on_token is not None and request.on_token(token) else reason
        except Exception as failure:  # of this request; the others go on
            reason, error = "error", first_line(failure)
        if reason is not None:
            self._finish(request, reason, row, error)

    def _finish(self, request: Request, reason: str, row: Row | None, error: str | None = None):
        request.finish_reason, request.error, request.times["finished"] = reason, error, time.perf_counter()
        del request.token_logprobs[len(request.new_tokens) :]
        self.finished.append(request)
        if row is not None:
            row.request = None
            self.released.append(row.index)
            if self.speculation is not None:
                self.speculation.remove(row.index)


def generate(engine: Engine, requests: Iterable[Request]):
    """Run requests to their end, as many at a time as the engine has rows."""
    for request in requests:
        engine.add(request)
    while engine.active:
        engine.step()
