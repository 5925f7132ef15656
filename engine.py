"""The engine: requests in, tokens out. This is the only generation loop (continuous batching).

Read down: Request; `prefill` and `decode`; Row and Batch; PlainDecoding; Plan; Engine, whose `step`
is the body of the loop: `make_plan` decides what it does, and `run` does it; `generate`, the loop.
The engine knows token ids only. Text is up to the caller, in on_token. Speculation and the ranks of
a split model are arguments.

Prefill reads the tokens of a prompt, many in one pass of the model, and yields the first new token.
Decode then reads the newest token, and yields the next one. Both store the keys and values of the
tokens that they read in a row of the KV cache, and each running request has a row.

Requests join and leave between steps. A step gives free rows to waiting requests, prefills a chunk
of one prompt (or of all prompts while no row is decoding), and decodes one token for every other
row, or several with speculation. A row keeps its keys and values after its request has ended, so
that later prompts reuse a common prefix (prefix caching).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cli import UserError, first_line, progress_bar
from config import Config
from kernels import DELTA_WINDOW, MAX_DECODE_TOKENS
from model import WHOLE_MODEL, Transformer, pad_rows
from sampling import Sampling, SamplingParams, sample, top_logprobs

CHUNK_TOKENS = 128  # tokens of a prompt that are read between two decode steps
# Tokens of a prefill pass while no row is decoding: enough to be compute-bound, in bounded memory
PREFILL_TOKENS = 2048
# The same on CPUs for prompts of more than MAX_SINGLE_PASS tokens, so that their progress is seen. Longer passes are
# hardly faster with packed weights (1 %), and somewhat with others.
CPU_PREFILL_TOKENS = 256
CPU_PREFILL_TOKENS_UNPACKED = 1024
MAX_SINGLE_PASS = 512
MAX_WAIT = 8  # a prompt that has waited for this many chunks of other prompts is read next
MIN_SHARED_TOKENS = 64  # a shorter prefix is read again rather than with a pass of its own
SCORED_POSITIONS = 128  # prompt_logprobs are computed for this many at once: (n,V) stays small


@dataclass(eq=False)
class Request:
    """A prompt to continue, and the result, which the engine writes.

    on_token(id) is called with each new token and ends the request by returning True. logprobs=n
    records the log-probability of each new token and of the n likeliest ones, from the logits
    before penalties and temperature. prompt_logprobs=n does the same for the prompt, which is then
    read in full, even if the cache holds a prefix of it. grammar says which tokens may come next,
    as a grammar.Grammar does; it belongs to this request alone.
    """

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 200  # fewer if the cache row is full; 0 only reads the prompt
    stop_ids: frozenset[int] = frozenset()  # the first of these ends the request
    on_token: Callable[[int], bool] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: object | None = None
    embeds: bool = False  # the result is a vector, the hidden state of the prompt's last token; no token follows
    # Written by the engine:
    new_tokens: list[int] = field(default_factory=list)  # with the token of stop_ids at the end
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    error: str | None = None  # a message, if finish_reason is "error"
    failure: BaseException | None = None  # the exception behind the error, if there was one
    cached_tokens: int = 0  # prompt tokens that were reused from a cache row
    # An entry (log-probability of the token, [(id, log-probability), ...] of the likeliest ids) for
    # each new token, and for each prompt token but the first.
    token_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    prompt_token_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    embedding: Tensor | None = None  # if it embeds: (D,) float32 on the CPU, after the last norm of the model
    # time.perf_counter() when it was "added", "started", had its "first_token" and was "finished"
    times: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.prompt, (str, Tensor)) or any(isinstance(token, str) for token in self.prompt):
            raise TypeError(
                f"the prompt {str(self.prompt)[:40]!r} is a {type(self.prompt).__name__}, "
                "expected a list of token ids; tokenizer.encode(text) or tensor.tolist() returns one"
            )


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
    """Read tokens (B,S) at positions (B,S) into cache rows (B,). Returns the logits (B,V) after the
    last token of each row."""
    return model(tokens, input_pos, rows)


def decode(model: Transformer, inputs: Tensor, sampling: Sampling, all_logits: bool = True):
    """Read the newest token of every row, and sample the next one.

    inputs (3,B) int64: the newest token, its position (-1: padding), the cache row. Returns ids
    (B,1), their log-probabilities (B,1) and the logits (B,1,V). all_logits: otherwise some logits may be
    -inf, with which log-probabilities are wrong.
    """
    token, position, rows = inputs.unbind(0)
    if all_logits:
        logits = model(token[:, None], position[:, None], rows)
    else:
        x = model.hidden(token[:, None], position[:, None], rows)[:, 0]  # (B,D)
        logits = model.drawable_logits(x, rows, position + 1, sampling)
    return draw(model, logits, rows, position + 1, sampling)


def draw(model: Transformer, logits: Tensor, rows: Tensor, position: Tensor, sampling: Sampling):
    """Sample a token for each row, from logits (B,V), for position (B,). All ranks use rank 0's
    tokens. Returns what `decode` returns."""
    logits = logits[:, None, : model.config.n_token]  # (B,1,V), without padding of the vocabulary
    ids, logprobs = sample(logits, rows, position, None, sampling)
    return model.shard.broadcast(ids), logprobs, logits


@dataclass
class StepResult:
    """The new tokens of a decode step, and the cost of a draft."""

    new_tokens: list[list[int]]  # of each row
    logprobs: Tensor  # (B,n): the log-probability of each new token
    logits: Sequence[Tensor]  # B x (n,V)
    draft_prefill_s: float = 0.0  # seconds in which a draft model read prompts
    draft_bytes: float = 0.0  # bytes of weights that the draft read
    draft_kv_bytes: float = 0.0  # bytes of keys and values that the draft read


@dataclass
class Timing:
    """Seconds and counts, summed over steps."""

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    row_steps: int = 0  # the rows of all decode steps
    kv_bytes: float = 0  # keys and values read by decode steps
    draft_bytes: float = 0.0  # weights of a draft model read by decode steps
    # In which a draft model read prompts. Neither prefill_s nor decode_s includes it.
    draft_prefill_s: float = 0.0
    # What decode steps have added to Transformer.expert_counts, if the model has experts
    expert_counts: Tensor | None = None

    def add_step(self, seconds: float, tokens: int, kv_bytes: int, result: StepResult):
        self.decode_s += seconds - result.draft_prefill_s
        self.decode_tokens += tokens
        self.decode_steps += 1
        self.row_steps += len(result.new_tokens)
        self.kv_bytes += kv_bytes + result.draft_kv_bytes
        self.draft_bytes += result.draft_bytes
        self.draft_prefill_s += result.draft_prefill_s


@dataclass
class StepFunctions:
    """The functions that the engine calls in a step: `prefill` and `decode`, perhaps compiled."""

    prefill: Callable = prefill
    decode: Callable = decode
    fixed_shapes: bool = False  # decode 1 row or all rows only: each number needs its own graph
    # What compiled `decode`. Speculation compiles its own functions with it.
    compile: Callable = lambda function: function


# ---------------------------------------------------------------- rows


@dataclass(eq=False)
class Row:
    """A row of the KV cache."""

    index: int
    # The tokens whose keys and values the cache holds, from position 0 on
    tokens: list[int] = field(default_factory=list)
    request: Request | None = None  # None: the row is free
    last_used: float = 0.0  # time.perf_counter() at the start of the last pass that wrote to it
    waited: int = 0  # chunks of other prompts that were read while this one waited
    # A prefill pass ends at this position, so that a snapshot of recurrent states can be taken; 0: none does
    snapshot_end: int = 0

    def admit(self, admission: "Admission") -> "Row":
        """This row, when it has the request of an admission."""
        request = admission.request
        reused = request.prompt[: admission.reused]
        return replace(self, tokens=reused, request=request, waited=0, snapshot_end=admission.snapshot_end)

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt is not in the cache yet."""
        return self.request is not None and not self.request.new_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt has been read. The pass that reads its end samples the first token."""
        return self.request is not None and bool(self.request.new_tokens)

    @property
    def unread(self) -> list[int]:
        """The tokens of the prompt that are not in the cache."""
        return self.request.prompt[len(self.tokens) :]

    @property
    def prefill_end(self) -> int:
        """The position at which a prefill pass has to end: snapshot_end, or the end of the prompt."""
        end = len(self.request.prompt)
        return self.snapshot_end if len(self.tokens) < self.snapshot_end < end else end


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """The number of tokens, from the first on, in which two lists are equal."""
    for n, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return n
    return min(len(a), len(b))


@dataclass
class BrokenGrammar:
    """In the place of a grammar whose `fill` raised an exception. The request's next token raises it
    again, which ends the request."""

    error: Exception

    def fill(self, masks: Tensor, drafted: list[int]):
        masks.fill_(-1)

    def accept(self, token: int):
        raise self.error


@dataclass
class GuardedGrammar:
    """Fills masks for a request, whose grammar may fail."""

    request: Request

    def fill(self, masks: Tensor, drafted: list[int]):
        try:
            self.request.grammar.fill(masks, drafted)
        except Exception as error:
            self.request.grammar = BrokenGrammar(error)
            self.request.grammar.fill(masks, drafted)


def set_masks(sampling: Sampling, rows: list[Row], drafted: list[list[int]] | None = None):
    """Let the grammars of rows say which tokens may come next, and after each drafted token."""
    drafted = drafted or [[]] * len(rows)
    masked = []
    for row, ids in zip(rows, drafted):
        if row.request.grammar is not None:
            position = len(row.request.prompt) + len(row.request.new_tokens)
            masked.append((row.index, position, GuardedGrammar(row.request), ids))
    if masked:
        sampling.set_masks(masked)


# ---------------------------------------------------------------- decoding


@dataclass(frozen=True)
class Batch:
    """The rows that a step decodes, and what the step needs of the engine."""

    rows: list[Row]
    # (3,B) as in `decode`: the newest token of each row, its position, the cache row. Padding may follow.
    inputs: Tensor
    model: Transformer
    sampling: Sampling
    steps: StepFunctions
    threads: object  # a cpu.threads.Threads or backend.FixedThreads
    timing: Timing  # of the steps before

    @property
    def needs_all_logits(self) -> bool:
        """Whether a row needs more than its next token, or a token that depends on all logits."""
        if self.model.backend.drawable_logits is None or self.steps.decode is not decode:
            return True
        requests = [row.request for row in self.rows]
        return any(
            request.logprobs is not None or request.grammar is not None or request.params.needs_all_logits
            for request in requests
        )

    @property
    def random(self) -> bool:
        """Whether any row samples at random instead of greedily."""
        return any(row.request.params.temperature > 0 for row in self.rows)

    def with_threads(self, kind: str):
        """A context that runs a pass of this kind with the number of threads that is fastest for it.
        It is always the same if results may depend on it."""
        return self.threads.of(kind, len(self.rows), not self.model.backend.thread_invariant)


class PlainDecoding:
    """Decodes one token for each row.

    speculative.Speculation has the same members, and decodes several tokens.
    """

    draft_counts: dict[str, dict] = {}  # the counts of each draft, by its name

    def begin(self, engine: "Engine"):
        """Called once, before the other methods."""

    def add(self, row: int, tokens: list[int], cached: int):
        """The request in this cache row has its first new token. tokens: the prompt and this token,
        the first `cached` of which were in the cache already."""

    def remove(self, row: int):
        """The request in this cache row has ended."""

    def step(self, batch: Batch) -> StepResult:
        """Decode the next tokens of the rows of a batch."""
        set_masks(batch.sampling, batch.rows)
        with batch.with_threads("decode"):
            if batch.needs_all_logits:
                ids, logprobs, logits = batch.steps.decode(batch.model, batch.inputs, batch.sampling)
            else:
                ids, logprobs, logits = decode(batch.model, batch.inputs, batch.sampling, all_logits=False)
        return StepResult(ids.tolist()[: len(batch.rows)], logprobs, logits)

    def rehearsal(self):
        """A context in which each step runs everything that later steps may need, to compile it."""
        return nullcontext()

    def numbers(self, timing: Timing, profiled: bool) -> dict:
        """The fields of --json about drafts; without times if they were `profiled`."""
        return {}


# ---------------------------------------------------------------- the engine


class SingleProcess:
    """Stands in for tp.Ranks, which explains the methods, in a run without torchrun."""

    rank = 0
    size = 1

    def device(self, name: str | None):
        return name

    def portion(self, device: torch.device) -> float:
        return 1.0

    def shard(self, device: torch.device):
        return WHOLE_MODEL

    def share(self, work: Callable = lambda: None):
        return work()

    open = share


@dataclass(frozen=True)
class EngineOptions:
    """How an engine works, apart from its model and the size of its cache."""

    chunk_tokens: int | None = None  # read between two decode steps; None: CHUNK_TOKENS
    always_chunk: bool = False  # read chunks of one prompt also while no row is decoding
    fixed_threads: bool = False  # do not tune the number of threads
    snapshot_bytes: int | None = None  # for snapshots of recurrent states; None: the usual amount
    # Or a tp.Ranks, if the model is split. Rank 0 then calls `step`, the others `follow`.
    ranks: object = SingleProcess()


@dataclass(frozen=True)
class Admission:
    """A request gets a row of the cache."""

    request: Request
    row: int
    source: int  # the row of which it reuses the first `reused` positions, perhaps the same
    reused: int
    snapshot_end: int  # see Row


@dataclass(frozen=True)
class Plan:
    """What a step does, in this order. Rank 0 makes it, and all ranks run it."""

    ended: list[int]  # rows whose requests have ended, or are cancelled
    admitted: list[Admission]
    chunk: dict[int, int]  # row -> prompt tokens to read, in one pass
    decoding: list[int]  # rows to decode

    def for_other_ranks(self) -> "Plan":
        """The plan without on_token and grammars, which only rank 0 calls: they cannot be pickled."""
        requests = [replace(admission.request, on_token=None, grammar=None) for admission in self.admitted]
        admitted = [replace(admission, request=request) for admission, request in zip(self.admitted, requests)]
        return replace(self, admitted=admitted)


class Engine:
    """Serves requests with one model.

    A model belongs to one engine at a time: another Engine of the same model makes new caches, and the
    first one must not be used again.

    rows: the number of cache rows, and so of requests that run at the same time. length: the
    positions of each row, for a prompt and its new tokens. steps: the functions to call, by default
    uncompiled ones. decoding: a speculative.Speculation, by default PlainDecoding.
    """

    def __init__(self, model, rows, length, steps=None, decoding=None, options=None):
        self.options = options or EngineOptions()
        model.setup_caches(rows, length, self.options.snapshot_bytes)
        self.model = model
        self.length = length
        self.ranks = self.options.ranks
        self.steps = steps or StepFunctions()
        self.next_steps = self.steps  # what the next step calls; another thread may set this
        self.threads = model.backend.make_threads(self.options.fixed_threads)
        self.sampling = Sampling.make(rows, model.config.vocab_size, model.device)
        self.reset_timing()

        self.rows = [Row(index) for index in range(rows)]
        self.waiting: deque[Request] = deque()
        # Since the last step:
        self.cancelled: list[Request] = []
        self.finished: list[Request] = []
        self.released: list[int] = []  # rows

        # For watchdog.py: the step that is running. None while there is none; plan also while it is made.
        self.step_started: float | None = None  # time.perf_counter()
        self.plan: Plan | None = None

        self.decoding = decoding or PlainDecoding()
        self.decoding.begin(self)

    def add(self, request: Request):
        """Queue a request until a row is free. Raises UserError if no row could serve it."""
        V = self.model.config.vocab_size
        check_prompt(request.prompt, self.model.config, self.length)
        if outside := [token for token, _ in request.params.logit_bias if not 0 <= token < V]:
            raise UserError(f"logit_bias: token id {outside[0]} is outside the vocabulary")
        if request.times:
            raise ValueError("this request was added to an engine before, and runs once; make a new Request")

        request.prompt = list(request.prompt)  # a copy: the caller may change its own list
        request.times["added"] = time.perf_counter()
        self.waiting.append(request)

    def cancel(self, request: Request):
        """End a request at the start of the next step. It may be waiting or active; on_token may
        call this."""
        self.cancelled.append(request)

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or has a row."""
        return bool(self.waiting) or any(row.request is not None for row in self.rows)

    @torch.no_grad()  # not inference_mode, which breaks compiled graphs
    def step(self) -> list[Request]:
        """Do one step, and return the requests that have ended since the last step."""
        with self._watched():
            plan = self.make_plan()
            self.ranks.share(plan.for_other_ranks)
            self.run(plan)

        finished = self.finished
        self.finished = []
        return finished

    def clear(self):
        """Forget the tokens of free rows, so that the next prompts are read from the beginning."""
        for row in self.rows:
            if row.request is None:
                row.tokens = []

    def reset_timing(self):
        self.timing = Timing()
        if self.model.expert_counts is not None:
            self.timing.expert_counts = torch.zeros_like(self.model.expert_counts)

    @torch.no_grad()
    def follow(self):
        """Do what rank 0 does, until it closes its engine."""
        while (plan := self.ranks.share()) is not None:
            with self._watched():
                self.run(plan)
            self.finished = []  # rank 0 returns them

    def close(self):
        """End the other ranks' `follow`."""
        if self.ranks.rank == 0:
            self.ranks.share(lambda: None)

    @contextmanager
    def _watched(self):
        """A context that runs a step, so that watchdog.py sees when it has started."""
        self.step_started = time.perf_counter()
        try:
            yield
        finally:
            self.step_started = None
            self.plan = None

    # ------------------------------------------------------------ deciding

    def make_plan(self) -> Plan:
        """Decide what the next step does. Ends waiting requests that were cancelled, and otherwise
        changes nothing."""
        for request in self.cancelled:
            if request in self.waiting:
                self.waiting.remove(request)
                self._finish(request, "cancelled")
        ended = self.released + [row.index for row in self.rows if row.request in self.cancelled]
        self.cancelled = []

        # The rows as they will be, and the rows whose caches hold their tokens until the plan is run
        rows = [replace(row, request=None) if row.index in ended else row for row in self.rows]
        holders = list(range(len(rows)))
        admitted = []
        for request in self.waiting:
            if all(row.request for row in rows):
                break
            admission = self._choose_row(request, rows, holders)
            rows[admission.row] = rows[admission.row].admit(admission)
            holders[admission.row] = holders[admission.source]
            admitted.append(admission)

        decoding = [row.index for row in rows if row.is_decoding]
        chunk = self._choose_chunk([row for row in rows if row.is_reading], bool(decoding))
        return Plan(ended, admitted, chunk, decoding)

    def _choose_row(self, request: Request, rows: list[Row], holders: list[int]) -> Admission:
        """Choose a free row for a request, and the row with the longest prefix of its prompt. rows,
        holders: as in `make_plan`."""
        # The last token is always read, because its logits are needed. With prompt_logprobs, all
        # tokens are read.
        wanted = request.prompt[:-1] if request.prompt_logprobs is None else []
        shared = [common_prefix_length(row.tokens, wanted) for row in rows]
        common = [self.model.restorable(holder, n) for holder, n in zip(holders, shared)]

        # Of equal prefixes, take one in a free row, which the request may then continue in place.
        # Of such rows take the least recently used: its other tokens will be overwritten.
        source = max(rows, key=lambda row: (common[row.index], row.request is None, -row.last_used))
        n = common[source.index]

        # A recurrent state may lack a snapshot where this prompt diverges from an earlier one, as after
        # a system prompt. Then one is taken there, because others may diverge at the same place. It is
        # taken DELTA_WINDOW tokens before the end of a pass.
        snapshot_end = 0
        if max(shared) - n >= MIN_SHARED_TOKENS:
            snapshot_end = max(shared) + DELTA_WINDOW

        row = source
        if source.request is not None or 2 * n < len(source.tokens):
            # Copy the prefix: source is busy, or would lose more tokens than are reused. (If source is
            # the oldest free row, it loses them nevertheless, and nothing is copied.)
            free = [row for row in rows if row.request is None]
            row = min(free, key=lambda row: row.last_used)
        return Admission(request, row.index, source.index, n, snapshot_end)

    def _choose_chunk(self, reading: list[Row], decoding: bool) -> dict[int, int]:
        """Choose what a step reads, as row -> number of prompt tokens: a chunk of one prompt while
        rows are decoding, otherwise a part of each."""
        if not reading:
            return {}
        if decoding or self.options.always_chunk:
            # A prompt that has waited for MAX_WAIT chunks goes first, then the prompt with the fewest tokens.
            first = min(reading, key=lambda row: (row.waited < MAX_WAIT, len(row.unread), -row.waited))
            return {first.index: self._pass_tokens(first, self.options.chunk_tokens or CHUNK_TOKENS)}

        most = max(1, PREFILL_TOKENS // len(reading))
        if self.model.device.type == "cpu" and sum(len(row.unread) for row in reading) > MAX_SINGLE_PASS:
            invariant = self.model.backend.chunk_invariant
            tokens = CPU_PREFILL_TOKENS if invariant else CPU_PREFILL_TOKENS_UNPACKED
            most = min(most, max(64, tokens // len(reading)))
        return {row.index: self._pass_tokens(row, most) for row in reading}

    def _pass_tokens(self, row: Row, most: int) -> int:
        """How many tokens of a row's prompt to read, about `most`.

        A recurrent state can be saved DELTA_WINDOW tokens before the end of a pass, so passes end there
        after each multiple of the snapshots' interval.
        """
        done = len(row.tokens)
        interval = self.model.snapshot_interval
        if interval is not None:
            next_multiple = max(1, (done - DELTA_WINDOW) // interval + 1) * interval
            left = next_multiple + DELTA_WINDOW - done
            if left <= most + DELTA_WINDOW:  # at the beginning, so that no short pass is needed
                most = left
        return min(most, row.prefill_end - done)

    # ------------------------------------------------------------ doing

    def run(self, plan: Plan):
        """Do what a plan says. All ranks do the same."""
        self.plan = plan
        self.steps = self.next_steps
        for row in [self.rows[index] for index in plan.ended]:
            if row.request is not None:  # cancelled, or ended by rank 0 alone: only it calls on_token
                self._finish(row.request, "cancelled", row)
        self.released = []

        for admission in plan.admitted:
            self._admit(admission)
        # A new snapshot may replace an old one, which another request of the plan may have reused.
        for admission in plan.admitted:
            if admission.reused:
                self.model.offer_snapshot(admission.row, 0)

        if plan.chunk:
            # The results of torch's own products may depend on the number of threads.
            fixed = not self.model.backend.chunk_invariant
            with self.threads.of("prefill", tuple(plan.chunk.values()), fixed):
                self._read(plan.chunk)
        if plan.decoding:
            self._decode([self.rows[index] for index in plan.decoding])

    def _admit(self, admission: Admission):
        """Give a row to a request."""
        request = admission.request
        if self.waiting:  # this is rank 0, which has the queue
            self.waiting.popleft()
        self.model.reuse(admission.source, admission.row, admission.reused)
        # Cutting the list of tokens is all that reuse takes in a row itself. The cache still holds older
        # keys and values from there on, but a token attends only to positions up to its own, and by then
        # all of these hold tokens of this request.
        self.rows[admission.row] = self.rows[admission.row].admit(admission)
        request.cached_tokens = admission.reused
        request.times["started"] = time.perf_counter()
        self.sampling.set_row(admission.row, request.params, request.prompt)

    def _read(self, chunk: dict[int, int]):
        """Read a chunk (row -> number of tokens) in one pass, and sample the first new token of
        complete prompts."""
        start = time.perf_counter()
        rows = [self.rows[index] for index in chunk]
        for row in self.rows:
            row.waited += row.is_reading and row.index not in chunk
        parts = [row.unread[:n] for row, n in zip(rows, chunk.values())]
        results = self._prefill(rows, parts)

        for row, part, last in zip(rows, parts, results):
            end = row.prefill_end
            row.tokens += part
            row.last_used = start
            self.model.offer_snapshot(row.index, end - len(row.tokens))
            if not row.unread and (row.request.embeds or row.request.max_new_tokens < 1):
                self._finish_read(row, last)

        complete = [i for i, row in enumerate(rows) if row.request is not None and not row.unread]
        if complete:
            logits = torch.stack([results[i] for i in complete])  # (B,V)
            self._append_first_tokens([rows[i] for i in complete], logits)
        else:
            results[0][0].item()  # wait for a GPU, so that its time is not counted in the next step
        self.timing.prefill_s += time.perf_counter() - start
        self.timing.prefill_tokens += sum(map(len, parts))

    def _finish_read(self, row: Row, last: Tensor):
        """End a request whose prompt was read and that samples nothing. last: its result of `_prefill`."""
        request = row.request
        if request.embeds:
            request.embedding = last.float().cpu()
            is_finite = bool(request.embedding.isfinite().all())
        else:
            is_finite = bool(last[: self.model.config.n_token].max().isfinite())
        if is_finite:
            self._finish(request, "length", row)
        else:
            self._append_token(request, row, -1)

    def _prefill(self, rows: list[Row], parts: list[list[int]]) -> Sequence[Tensor]:
        """Read parts of the prompts of these rows. Returns for each row what follows its last token: the
        logits (V,), or if the request embeds, the hidden state (D,)."""
        model = self.model
        # A prompt's keys and values must not depend on how it is split into chunks. Passes of up to
        # MAX_DECODE_TOKENS run other kernels. If these round differently, such passes are padded.
        width = 0 if model.backend.chunk_invariant else MAX_DECODE_TOKENS + 1
        tokens, input_pos = pad_rows(parts, [len(row.tokens) for row in rows], width)  # (B,S)
        tokens = tokens.to(model.device)
        input_pos = input_pos.to(model.device)
        cache_rows = torch.tensor([row.index for row in rows], device=model.device)
        if all(row.request.prompt_logprobs is None and not row.request.embeds for row in rows):
            return self.steps.prefill(model, tokens, input_pos, cache_rows)

        x = model.hidden(tokens, input_pos, cache_rows)  # (B,S,D)
        self._score_prompts(rows, parts, x)
        results = [states[len(part) - 1] for states, part in zip(x, parts)]
        generating = [i for i, row in enumerate(rows) if not row.request.embeds]
        if generating:
            logits = model.head(torch.stack([results[i] for i in generating]))
            for i, one in zip(generating, logits):
                results[i] = one
        return results

    def _score_prompts(self, rows: list[Row], parts: list[list[int]], x: Tensor):
        """Record the prompt_logprobs of a chunk, from its hidden states (B,S,D)."""
        for row, part, states in zip(rows, parts, x):
            request = row.request
            if request.prompt_logprobs is None:
                continue
            following = row.unread[1 : len(part) + 1]  # the tokens that these states predict
            for start in range(0, len(following), SCORED_POSITIONS):
                ids = following[start : start + SCORED_POSITIONS]
                logits = self.model.head(states[start : start + len(ids)])  # (n,V)
                logits = logits[:, : self.model.config.n_token]
                request.prompt_token_logprobs += top_logprobs(logits, ids, request.prompt_logprobs)

    def _append_first_tokens(self, rows: list[Row], logits: Tensor):
        """Sample the first new token of these rows, from the logits (B,V) after their prompts."""
        set_masks(self.sampling, rows)
        indices = torch.tensor([row.index for row in rows], device=logits.device)
        positions = torch.tensor([len(row.tokens) for row in rows], device=logits.device)
        ids, logprobs, logits = draw(self.model, logits, indices, positions, self.sampling)
        self._append_tokens(rows, ids.tolist(), logprobs, logits)

    def _decode(self, rows: list[Row]):
        start = time.perf_counter()
        # A column of inputs has the newest token of a row, its position, and the cache row.
        columns = [(row.request.new_tokens[-1], len(row.tokens), row.index) for row in rows]
        if self.steps.fixed_shapes and len(rows) > 1:
            # Pad the batch to all rows. Row 0 may be busy, but position -1 is its scratch slot.
            columns += [(0, -1, 0)] * (len(self.rows) - len(rows))
        inputs = torch.tensor(list(zip(*columns)), device=self.model.device)  # (3,B)
        batch = Batch(rows, inputs, self.model, self.sampling, self.steps, self.threads, self.timing)
        counts = self.model.expert_counts  # passes add to it
        if counts is not None:
            self.timing.expert_counts.sub_(counts)
        result = self.decoding.step(batch)
        if counts is not None:
            self.timing.expert_counts.add_(counts)

        for row, new in zip(rows, result.new_tokens):
            # The cache now holds the token that was the newest, and all new tokens but the last:
            # these were drafted, so the same pass has read them. The last was only sampled.
            row.tokens += [row.request.new_tokens[-1], *new[:-1]]
            row.last_used = start

        kv_bytes = self.model.kv_bytes([len(row.tokens) for row in rows])
        count = self._append_tokens(rows, result.new_tokens, result.logprobs, result.logits)
        self.timing.add_step(time.perf_counter() - start, count, kv_bytes, result)

    def _append_tokens(self, rows: list[Row], new_tokens: list[list[int]], logprobs: Tensor, logits: Tensor) -> int:
        """Append new tokens to each row's request until it ends. Returns how many were appended.
        logprobs (B,n), logits B x (n,V)."""
        pairs = zip(rows, new_tokens)
        self.sampling.count([(row.index, new) for row, new in pairs if row.request.params.penalizes])

        count = 0
        for i, row in enumerate(rows):
            request = row.request  # a row whose request ends loses it
            before = len(request.new_tokens)
            if before == 0:
                self.decoding.add(row.index, request.prompt + new_tokens[i], request.cached_tokens)
                request.times["first_token"] = time.perf_counter()
            # The last one may be -1, for logits that are not finite. _finish drops the entries after the
            # request's last token.
            ids = [token for token in new_tokens[i] if token >= 0]
            if request.logprobs is not None and ids:
                entries = top_logprobs(logits[i], ids, request.logprobs, logprobs[i])
                request.token_logprobs += entries
            for token in new_tokens[i]:
                if request.finish_reason is None:
                    self._append_token(request, row, token)
            count += len(request.new_tokens) - before
        return count

    def _append_token(self, request: Request, row: Row, token: int):
        """Append a token to a request, and finish it if this is its last one. -1 stands for logits
        that are not finite."""
        if token < 0:
            row.tokens = []  # the cache may hold NaN
            return self._finish(request, "error", row, "the model's logits are not finite")

        request.new_tokens.append(token)
        room = self.length + 1 - len(request.prompt)  # the last token is not read: no position
        reason = None
        if len(request.new_tokens) >= min(request.max_new_tokens, room):
            reason = "length"
        if token in request.stop_ids:
            reason = "stop"
        try:
            if request.grammar is not None and request.grammar.accept(token):
                reason = "stop"
            if request.on_token is not None and request.on_token(token):
                reason = "stop"
        except Exception as failure:  # an error of the caller's code ends this request only
            request.failure = failure
            return self._finish(request, "error", row, first_line(failure))
        if reason is not None:
            self._finish(request, reason, row)

    def _finish(self, request: Request, reason: str, row: Row | None = None, error: str | None = None):
        """End a request, and free its row, if it has one."""
        request.finish_reason = reason
        request.error = error
        request.times["finished"] = time.perf_counter()
        del request.token_logprobs[len(request.new_tokens) :]
        self.finished.append(request)
        if row is not None:
            row.request = None
            self.released.append(row.index)
            self.decoding.remove(row.index)


def generate(engine: Engine, requests: Iterable[Request]):
    """Run requests until all have finished, as many at a time as the engine has rows. If a step fails, or
    Ctrl-C interrupts it, none of them is left in the engine."""
    added = []
    try:
        for request in requests:
            engine.add(request)
            added.append(request)
        while engine.has_requests:
            engine.step()
    except BaseException:
        for request in added:
            engine.cancel(request)
        raise


def read_with_progress(engine: Engine, requests: list[Request]):
    """Do the engine's steps until it has read the prompts of these requests. If that takes long,
    show how much has been read."""
    total = sum(len(request.prompt) for request in requests)
    with progress_bar(total, "reading the prompt", " tokens", delay=2, line_s=2) as bar:
        while not all(request.new_tokens or request.finish_reason for request in requests):
            engine.step()
            bar.initial = sum(request.cached_tokens for request in requests)
            unread = sum(len(row.unread) for row in engine.rows if row.is_reading)
            bar.n = total - unread - sum(len(request.prompt) for request in engine.waiting)
