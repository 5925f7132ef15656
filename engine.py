"""The engine: requests in, tokens out. The only generation loop there is.

Read down: Request (what is asked for, and what came of it), the two steps of a model, Row, Engine, whose `step` is the
loop's body, and `generate`, the loop. Knows tokens only: text, and what may propose tokens or split the model, are
outside (on_token; speculative.py and tp.py, which are arguments).

Requests join and leave between steps. A step is: give free cache rows to waiting requests; read a chunk of a prompt;
decode one token of every other row, or several with speculation. While rows are decoding, prompts are read in small
chunks, so that nobody waits long for a token.

A cache row remembers the tokens whose keys and values it holds (`Row.tokens`), also after its request has ended. A new
request begins with the longest prefix that any row has in common with its prompt, and reads only what follows: the next
turn of a conversation, or a system prompt that many requests share.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from cli import UserError, first_line
from kernels import MAX_DECODE_TOKENS
from model import Config, Transformer
from report import Timing, kv_bytes
from sampling import Sampling, SamplingParams, sample

PREFILL_TOKENS = 2048  # of a pass while no row is decoding: enough to be bound by arithmetic, with bounded memory
PATIENCE = 8  # chunks of others that a prompt lets pass before it goes first
SCORED_POSITIONS = 128  # of prompt_logprobs, whose (n,V) log-probabilities are held at once

# ---------------------------------------------------------------- requests


@dataclass
class Times:
    """When things happened, in seconds of time.perf_counter; None: not yet."""

    added: float | None = None
    started: float | None = None  # it got a cache row
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False)
class Request:
    """A prompt to continue, and after that what came of it.

    on_token(id) hears of each new token as it is decided and ends the request by returning True. logprobs: record the
    log-probability of each new token and of the n likeliest, by the model's logits as they are, before penalties and
    temperature; prompt_logprobs: of the prompt's tokens, which are then all read, whatever the cache holds.
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
    times: Times = field(default_factory=Times)

    def __getstate__(self):  # as it travels to other ranks, which only follow
        return vars(self) | {"on_token": None}


def check_prompt(prompt: list[int], config: Config, length: int):
    """UserError where a cache row of `length` positions cannot serve a prompt."""
    if not prompt:
        raise UserError("the prompt is empty; give at least one token")
    if len(prompt) > length:
        raise UserError(f"the prompt has {len(prompt)} tokens, the context is {length}")
    if outside := [token for token in prompt if not 0 <= token < config.vocab_size]:
        size = config.vocab_size
        raise UserError(f"token id {outside[0]} is outside the vocabulary of {size} (0 to {size - 1})")


# ---------------------------------------------------------------- the two steps


def prefill(model: Transformer, tokens: Tensor, input_pos: Tensor, rows: Tensor) -> Tensor:
    """Read tokens (B,S) at positions (B,S) into cache rows (B,); the logits (B,V) after each row's last token."""
    return model(tokens, input_pos, rows)


def decode(model: Transformer, inputs: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """One new token for every row. inputs (3,B) int64: the last token, its position (-1: padding), the cache row.

    Returns ids (B,1), their log-probabilities (B,1) and the logits (B,1,V).
    """
    token, position, rows = inputs
    logits = model(token[:, None], position[:, None], rows)[:, None]  # (B,1,V)
    return *draw(model, logits, rows, position + 1, token[:, None][:, :0], sampling), logits


def draw(model, logits: Tensor, rows: Tensor, position: Tensor, drafted: Tensor, sampling: Sampling) -> tuple:
    """`sample` among the ids that the vocabulary has (a table may be padded); on several ranks rank 0's tokens."""
    ids, logprobs = sample(logits[..., : model.config.n_token], rows, position, drafted, sampling)
    return ids if model.split is None else model.split.decided(ids), logprobs


@dataclass
class StepFunctions:
    """The steps that the engine calls, as they are here or compiled."""

    prefill: Callable = prefill
    decode: Callable = decode
    fixed_shapes: bool = False  # a step is for 1 row or for all rows: each other number would be another graph
    compile: Callable = lambda function: function  # does to a function (model, ...) what was done to decode


# ---------------------------------------------------------------- rows


@dataclass(eq=False)
class Row:
    """A row of the KV cache."""

    index: int
    tokens: list[int] = field(default_factory=list)  # whose keys and values the cache holds, from position 0
    request: Request | None = None
    last_used: int = 0  # the engine's step
    waited: int = 0  # chunks of other prompts read while this one waited

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are still to be read; 0 once the row is decoding."""
        return len(self.request.prompt) - len(self.tokens) if not self.request.new_tokens else 0

    @property
    def last_token(self) -> int:
        """The newest token, which the next step reads."""
        return self.request.new_tokens[-1]


@dataclass
class Plan:
    """What a step does; it makes the other ranks do the same."""

    released: list[int]  # rows whose requests have ended since the last plan
    admitted: list[tuple[int, int, int, Request]]  # row; another row, whose first n positions it takes over; n
    chunk: dict[int, int]  # row: how many tokens of its prompt to read, all in one pass
    decoding: list[int]  # rows that get new tokens
    draft_length: int = 0  # tokens to propose


@dataclass
class Batch:
    """The rows of a decode step, and its input (3,B) as `decode` takes it: B rows, of which the last may be padding."""

    rows: list[Row]
    inputs: Tensor

    @property
    def random(self) -> bool:
        """Whether any row is drawn at random, not greedily."""
        return any(row.request.params.temperature > 0 for row in self.rows)


# ---------------------------------------------------------------- the engine


class Engine:
    """Serves requests with one model, max_batch_size at a time, each with up to max_seq_length positions of context.

    chunk_tokens: of a prompt, read between two decode steps. speculation: a speculative.Speculation, which may find
    several tokens in a step. ranks: a tp.Ranks, where the model is split over several processes; the first one then
    calls `step` as if it were alone, and the others `follow` it until `close`.
    """

    def __init__(
        self,
        model: Transformer,
        max_batch_size: int,
        max_seq_length: int,
        steps: StepFunctions | None = None,
        chunk_tokens: int = 128,
        speculation: Any = None,
        ranks: Any = None,
    ):
        model.setup_caches(max_batch_size, max_seq_length)
        self.model, self.length, self.steps, self.chunk_tokens = (
            model,
            max_seq_length,
            steps or StepFunctions(),
            chunk_tokens,
        )
        self.speculation, self.ranks = speculation, ranks
        self.rows = [Row(index) for index in range(max_batch_size)]
        self.sampling = Sampling.make(max_batch_size, model.config.vocab_size, model.device)
        self.waiting: deque[Request] = deque()
        self.finished: list[Request] = []  # since the last step
        self.released: list[int] = []  # rows, since the last plan
        self.timing = Timing()
        self.step_count = 0
        if speculation is not None:
            speculation.begin(self)

    # ------------------------------------------------------------ from outside

    def add(self, request: Request):
        """Let a request wait for a row; UserError where it can never have one."""
        check_prompt(request.prompt, self.model.config, self.length)
        request.times.added = time.perf_counter()
        self.waiting.append(request)

    def cancel(self, request: Request):
        """End a request, waiting or not; its row is free from the next step on."""
        if request.finish_reason is None:
            row = next((row for row in self.rows if row.request is request), None)
            if row is None:
                self.waiting.remove(request)
            self._finish(request, "cancelled", row)

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
        finished, self.finished = self.finished, []
        return finished

    def clear(self):
        """Forget what the cache holds, so that the next prompts are read from their beginning."""
        for row in self.rows:
            if row.request is None:
                row.tokens = []

    # ------------------------------------------------------------ several ranks

    @torch.no_grad()
    def follow(self):
        """Do what the first rank does, until it closes its engine."""
        while (plan := self.ranks.share()) is not None:
            for index in plan.released:
                self.rows[index].request = None
            for index, source, n, request in plan.admitted:
                self._start(self.rows[index], self.rows[source], n, request)
            self._run(plan)

    def close(self):
        if self.ranks is not None and self.ranks.rank == 0:
            self.ranks.share(lambda: None)

    @contextmanager
    def idle(self):
        """While the caller waits for something else, send the other ranks an empty plan every second, so that nothing
        of theirs times out."""
        if self.ranks is None:
            yield
            return
        done = Event()

        def send():
            while not done.wait(1.0):
                self.ranks.share(lambda: Plan([], [], {}, []))

        thread = Thread(target=send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    # ------------------------------------------------------------ a step

    def _plan(self) -> Plan:
        plan = Plan(self.released, [], {}, [])
        self.released = []
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
        free = [row for row in self.rows if row.request is None]
        wanted = (
            [] if request.prompt_logprobs is not None else request.prompt[:-1]
        )  # the last token's logits are wanted
        common = {row: len(os.path.commonprefix([row.tokens, wanted])) for row in self.rows}
        source = max(self.rows, key=lambda row: (common[row], row.request is None, -row.last_used))
        row = min(free, key=lambda row: (row.last_used, row.index))
        if source.request is None and 2 * common[source] >= len(source.tokens):
            row = source  # else it would lose more than is gained: another conversation, that began alike
        self._start(row, source, common[source], request)
        return row.index, source.index, common[source], request

    def _start(self, row: Row, source: Row, n: int, request: Request):
        if row is not source and n:
            self.model.copy_cache(source.index, row.index, n)
        row.request, row.tokens, row.waited = request, request.prompt[:n], 0
        request.cached_tokens, request.times.started = n, time.perf_counter()
        self.sampling.set_row(row.index, request.params, request.prompt)

    def _choose_chunk(self, reading: list[Row], decoding: bool) -> dict[int, int]:
        """Which prompts to read now, and how many tokens of each: all, or one of them while rows are decoding."""
        if not reading:
            return {}
        if not decoding:
            each = max(1, PREFILL_TOKENS // len(reading))
            return {row.index: min(each, row.unread) for row in reading}
        first = max(reading, key=lambda row: (row.waited >= PATIENCE, -row.unread, row.waited))
        for row in reading:
            row.waited += row is not first
        return {first.index: min(self.chunk_tokens, first.unread)}

    def _run(self, plan: Plan):
        self.step_count += 1
        decoding = [self.rows[index] for index in plan.decoding]
        if plan.chunk:
            self._read(plan.chunk)
        if decoding := [row for row in decoding if row.request is not None]:  # the user may have cancelled it meanwhile
            self._decode(decoding, plan.draft_length)

    # ------------------------------------------------------------ reading prompts

    def _read(self, chunk: dict[int, int]):
        """Read so many tokens of the prompts of these rows in one pass; those that are read get their first token.

        Up to 16 columns a model may take another way, with other roundings, unless it is chunk_invariant: such passes
        are filled up with padding, so that a prompt's keys and values do not depend on how it was cut.
        """
        start, model = time.perf_counter(), self.model
        rows = [self.rows[index] for index in chunk]
        parts = [row.request.prompt[len(row.tokens) :][: chunk[row.index]] for row in rows]
        width = max(map(len, parts))
        width = width if model.chunk_invariant else max(width, MAX_DECODE_TOKENS + 1)
        tokens, input_pos = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -1)
        for i, (row, part) in enumerate(zip(rows, parts)):
            tokens[i, : len(part)] = torch.tensor(part)
            input_pos[i, : len(part)] = torch.arange(len(row.tokens), len(row.tokens) + len(part))
        numbers = torch.tensor([row.index for row in rows], device=model.device)
        arguments = (tokens.to(model.device), input_pos.to(model.device), numbers)
        if any(row.request.prompt_logprobs is not None for row in rows):
            x = model.hidden(*arguments)  # (B,S,D)
            self._score_prompts(rows, parts, x)
            last = torch.tensor([len(part) - 1 for part in parts], device=model.device)
            logits = model.head(x[torch.arange(len(x), device=model.device), last])  # (B,V)
        else:
            logits = self.steps.prefill(model, *arguments)
        for row, part in zip(rows, parts):
            row.tokens = row.tokens + part
            row.last_used = self.step_count
        whole = [i for i, row in enumerate(rows) if not row.unread]
        if whole:
            index, position = torch.tensor(whole, device=model.device), input_pos.amax(1).to(model.device) + 1
            logits, numbers = logits[index, None], numbers[index]  # (B,1,V), (B,)
            drawn = draw(model, logits, numbers, position[index], numbers[:, None][:, :0], self.sampling)
            self._accept([rows[i] for i in whole], drawn[0].tolist(), drawn[1], logits)
        self.timing.add_prefill(time.perf_counter() - start, sum(map(len, parts)))

    def _score_prompts(self, rows: list[Row], parts: list[list[int]], x: Tensor):
        """Record prompt_logprobs of a chunk by its hidden states (B,S,D), a few positions at a time."""
        for row, part, states in zip(rows, parts, x):
            request, begin = row.request, len(row.tokens)
            if request.prompt_logprobs is None:
                continue
            following = request.prompt[begin + 1 : begin + len(part) + 1]  # of the last token none, or the next chunk's
            for at in range(0, len(following), SCORED_POSITIONS):
                ids = torch.tensor(following[at : at + SCORED_POSITIONS], device=x.device)
                logits = self.model.head(states[at : at + len(ids)])  # (n,V)
                request.prompt_token_logprobs += logprobs_of(logits, ids, request.prompt_logprobs)

    # ------------------------------------------------------------ decoding

    def _decode(self, rows: list[Row], draft_length: int):
        start = time.perf_counter()
        batch = Batch(rows, self._inputs(rows))
        if self.speculation is None:
            ids, logprobs, logits = self.steps.decode(self.model, batch.inputs, self.sampling)
            found = ids[: len(rows)].tolist()
        else:
            found, logprobs, logits = self.speculation.step(batch, draft_length)
        for row, tokens in zip(rows, found):
            row.tokens += [row.last_token, *tokens[:-1]]  # what the step read, and of what was proposed, what is kept
            row.last_used = self.step_count
        kv = kv_bytes(self.model, [len(row.tokens) for row in rows])
        count = self._accept(rows, found, logprobs, logits)
        self.timing.add_step(time.perf_counter() - start, count, kv)

    def _inputs(self, rows: list[Row]) -> Tensor:
        """The input of a decode step; with fixed shapes filled up with padding, to 1 row or all."""
        size = len(rows)
        if self.steps.fixed_shapes and size > 1:
            size = len(self.rows)
        padding = [0] * (size - len(rows))
        tokens = [row.last_token for row in rows] + padding
        positions = [len(row.tokens) for row in rows] + [-1] * len(padding)
        return torch.tensor([tokens, positions, [row.index for row in rows] + padding], device=self.model.device)

    def _accept(self, rows: list[Row], found: list[list[int]], logprobs: Tensor, logits: Tensor) -> int:
        """Give each row's request its new tokens, as far as it wants them; returns how many that are.

        logprobs (B,n) of the tokens, and the logits (B,n,V) that they were drawn from.
        """
        requests, count = [row.request for row in rows], 0
        if penalized := [i for i, request in enumerate(requests) if request.params.penalizes]:
            pairs = [(rows[i].index, token) for i in penalized for token in found[i] if token >= 0]
            index = torch.tensor(pairs, dtype=torch.int64, device=self.model.device).reshape(-1, 2)
            self.sampling.count(index[:, 0], index[:, 1])
        for i, (row, request) in enumerate(zip(rows, requests)):
            if request.finish_reason is not None:  # cancelled by another's on_token
                continue
            if request.logprobs is not None and request.max_new_tokens:
                self._record_logprobs(request, found[i], logprobs[i], logits[i])
            if request.times.first_token is None:
                request.times.first_token = time.perf_counter()
                if self.speculation is not None and request.max_new_tokens:
                    self.speculation.add(row.index, [*request.prompt, found[i][0]])
            for token in found[i] if request.max_new_tokens else ():
                if token < 0:
                    row.tokens = []  # what it holds may be worth nothing
                    self._finish(request, "error", row, "the model's logits are not finite")
                    break
                count += 1
                self._take(request, row, token)
                if request.finish_reason is not None:
                    break
            if not request.max_new_tokens:
                self._finish(request, "length", row)
        return count

    def _take(self, request: Request, row: Row, token: int):
        """A request gets a token; it may be the last."""
        request.new_tokens.append(token)
        stop = token in request.stop_ids
        if request.on_token is not None:
            try:
                stop = request.on_token(token) or stop
            except Exception as error:  # of one request; the others go on
                return self._finish(request, "error", row, first_line(error))
        if request.finish_reason is not None:  # on_token has cancelled it
            return
        if stop:
            self._finish(request, "stop", row)
        elif len(request.new_tokens) >= min(request.max_new_tokens, self.length + 1 - len(request.prompt)):
            self._finish(request, "length", row)

    def _record_logprobs(self, request: Request, tokens: list[int], logprobs: Tensor, logits: Tensor):
        wanted = request.max_new_tokens - len(request.new_tokens)
        tokens = [token for token in tokens if token >= 0][:wanted]
        ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        request.token_logprobs += logprobs_of(logits[: len(tokens)], ids, request.logprobs, logprobs[: len(tokens)])

    def _finish(self, request: Request, reason: str, row: Row | None, error: str | None = None):
        request.finish_reason, request.error, request.times.finished = reason, error, time.perf_counter()
        del request.token_logprobs[len(request.new_tokens) :]
        self.finished.append(request)
        if row is not None:
            row.request = None
            self.released.append(row.index)
            if self.speculation is not None:
                self.speculation.remove(row.index)


def logprobs_of(logits: Tensor, ids: Tensor, n: int, known: Tensor | None = None) -> list:
    """Of ids (m,) after logits (m,V): (log-probability, [(id, log-probability) of the n likeliest]) of each.

    known (m,) are the ids' own, where somebody has worked them out already.
    """
    if known is not None and n == 0:
        return [(own, []) for own in known.tolist()]
    logprobs = logits.float().log_softmax(-1)  # (m,V)
    own = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    values, best = logprobs.topk(min(n, logprobs.shape[1]), dim=1)
    return [(own[i], list(zip(*pair))) for i, pair in enumerate(zip(best.tolist(), values.tolist()))]


def generate(engine: Engine, requests: Iterable[Request]):
    """Run requests to their end, as many at a time as the engine has rows."""
    for request in requests:
        engine.add(request)
    while engine.active:
        engine.step()
