"""The engine, as the HTTP process sees it: the pipe, the unfinished requests, their updates, and
the engine's status.

Read down: EngineClient, the HTTP process's end of the pipe; the exceptions of requests that fail;
UpdateStream, what the engine sends for one HTTP request. Knows nothing of paths, sockets and what
responses look like.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from starlette.requests import ClientDisconnect

from cli import print_status
from server.api import Choice, CompletionRequest
from server.metrics import Metrics
from server.pipe_messages import Cancel, EngineStatus, TextRequest, Update
from server.request_fields import ApiError
from text.grammar import TOO_COMPLEX

ENGINE_TIMEOUT_S = 8  # an engine that has sent nothing for this long is reported as broken
MAX_UNSENT_BYTES = 1 << 20  # of a response that its client has not read


class EngineClient:
    """Sends requests to the engine's process, and gives its updates to the right UpdateStream."""

    def __init__(self, connection, rows: int, max_queue: int):
        """connection: our end of the pipe; rows: requests that the engine runs at the same time."""
        self.connection = connection
        self.rows = rows
        self.capacity = rows + max_queue
        # A thread sends, because a full pipe must not block the event loop, which reads updates.
        self.writer = ThreadPoolExecutor(1)
        self.open_streams: set[UpdateStream] = set()  # of responses that are not complete
        # request_id -> the stream that gets its updates, until the last one
        self.receivers: dict[int, UpdateStream] = {}
        self.parsing = 0  # HTTP requests that are being tokenized
        self.metrics = Metrics()
        gauge = self.metrics.add_gauge
        gauge("requests_unfinished", "Requests that wait or run").set_function(lambda: len(self.receivers))
        self.state = "starting"  # then the state of the latest EngineStatus, or "broken"
        self.last_heard = time.monotonic()  # when the latest EngineStatus came
        age_text = "Since the engine was last heard from; an idle engine does a step every 0.25 s"
        gauge("last_step_age_seconds", age_text).set_function(lambda: time.monotonic() - self.last_heard)
        self.slowest_step_s = 0.0
        self.finish_times: deque[float] = deque(maxlen=32)  # of the latest requests

    def start(self, on_end: Callable[[], None]):
        """Begin to read updates. on_end() is called when the server must exit."""
        self.on_end = on_end
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.connection.fileno(), self._read_status)
        self.watcher = self.loop.create_task(self._watch_engine())

    @property
    def in_use(self) -> int:
        """Prompts that run, wait or are being tokenized."""
        return len(self.receivers) + self.parsing

    def health(self) -> str:
        silent_s = time.monotonic() - self.last_heard
        timeout_s = max(ENGINE_TIMEOUT_S, 3 * self.slowest_step_s)
        if self.state != "starting" and silent_s > timeout_s:
            return "broken"
        if self.state == "ready" and self.in_use >= self.capacity:
            return "overloaded"
        return "draining" if self.state == "ended" else self.state

    def check_room(self):
        """Raise ApiError if no new request can be accepted."""
        if self.health() == "broken":
            raise ApiError("the engine has stopped", 503)
        if self.state in ("draining", "ended"):
            raise ApiError("the server is shutting down", 503, code="draining", retry_after=1)
        if self.in_use >= self.capacity:
            raise ApiError(
                f"all {self.rows} rows are in use and the queue of {self.capacity - self.rows} requests is full",
                429,
                code="overloaded",
                retry_after=self.retry_after(),
            )

    def retry_after(self) -> int:
        """Seconds until half of the waiting requests have a row, at the recent completion rate."""
        if len(self.finish_times) < 2:
            return 1
        interval = (self.finish_times[-1] - self.finish_times[0]) / (len(self.finish_times) - 1)
        waiting = max(1, self.in_use - self.rows)
        return min(30, max(1, math.ceil(interval * waiting / 2)))

    @contextmanager
    def reserve(self):
        """Keep a place for a request while it is parsed."""
        self.check_room()
        self.parsing += 1
        try:
            yield
        finally:
            self.parsing -= 1

    def generate(self, completion: CompletionRequest, receive: Callable) -> "UpdateStream":
        """Send the prompts of a parsed request to the engine.

        receive: the function of ASGI that tells when the client disconnects."""
        stream = UpdateStream(self, completion, receive)
        self.open_streams.add(stream)
        for choice in completion.choices:
            self.receivers[choice.text_request.request_id] = stream
            self._send(choice.text_request)
        return stream

    def cancel(self, request_id: int):
        """Tell the engine to end a request whose result nobody will read."""
        if self.receivers.pop(request_id, None) is not None:
            self.metrics.requests.labels("cancelled").inc()
            self._send(Cancel(request_id))

    def _send(self, message: TextRequest | Cancel):
        self.writer.submit(self.connection.send, message)

    def _read_status(self):
        """The event loop calls this when the engine has sent a status, or its process has ended."""
        try:
            status: EngineStatus = self.connection.recv()
        except (EOFError, OSError):
            return self._engine_has_ended()
        self.last_heard = time.monotonic()
        self.slowest_step_s = max(self.slowest_step_s, status.step_s)
        if self.state != "starting":
            self.metrics.record_step(status)
        self.state = status.state
        self._distribute(status.updates)
        if self._may_exit():
            self.on_end()

    def _engine_has_ended(self):
        self.state = "broken"
        self.loop.remove_reader(self.connection.fileno())
        self._fail_all()
        self.on_end()

    def _distribute(self, updates: list[Update]):
        """Put the updates of one status into the streams of their HTTP requests."""
        by_stream: defaultdict[UpdateStream, list[Update]] = defaultdict(list)
        for update in updates:
            if update.request_id not in self.receivers:  # it was cancelled
                continue
            stream = self.receivers[update.request_id]
            choice = stream.unfinished[update.request_id]
            is_running = update.finish_reason is None
            update = choice.read(update)
            by_stream[stream].append(update)
            self.metrics.record_update(choice, update)
            if update.finish_reason is not None:
                if is_running:  # a stop string has come, or the text cannot be read
                    self._send(Cancel(update.request_id))
                self.finish_times.append(self.last_heard)
                del self.receivers[update.request_id]

        for stream, its_updates in by_stream.items():
            stream.put(its_updates)
        if not self.receivers:  # idle time must not count in retry_after
            self.finish_times.clear()

    def _may_exit(self) -> bool:
        """Whether the server may exit: while it drains, when all responses are sent; after the
        drain time, as soon as the engine has no requests."""
        if self.state == "draining":
            return not self.open_streams and not self.parsing
        return self.state == "ended" and not self.in_use

    async def _watch_engine(self):
        was_broken = False
        while True:
            await asyncio.sleep(1)
            is_broken = self.health() == "broken"
            if is_broken:  # the engine may hang in a step forever, or go on later
                self._fail_all()
            if is_broken and not was_broken and self.state != "broken":
                silent_s = time.monotonic() - self.last_heard
                print_status(f"the engine has sent nothing for {silent_s:.0f} s; until it does, /health answers 503")
            was_broken = is_broken

    def _fail_all(self):
        for stream in self.open_streams:
            stream.fail(RequestAborted("the engine has stopped", 503))


class RequestAborted(ApiError):
    """The engine ended a request before its answer was complete. The metrics have counted it."""


class EngineFailure(Exception):
    """An internal error of the engine's process. It ended one request, which the metrics have
    counted."""

    def __init__(self, message: str, details: str | None):
        super().__init__(message)
        self.details = details  # the traceback from there, if there was an exception


class UpdateStream:
    """What the engine sends for an HTTP request: an asynchronous iterator of (choice, update).

    It ends when all choices are finished. If the client disconnects, the engine's work is cancelled
    at once, and the iterator raises ClientDisconnect.
    """

    def __init__(self, engine: EngineClient, completion: CompletionRequest, receive: Callable):
        self.engine = engine
        self.queue = asyncio.Queue()  # of updates, and of errors that end the response
        self.unsent_bytes = 0  # of the updates in the queue
        self.unfinished = {choice.text_request.request_id: choice for choice in completion.choices}
        self.is_streamed = completion.stream
        self.watcher = asyncio.create_task(self._watch_client(receive))

    async def _watch_client(self, receive: Callable):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientDisconnect())

    def _cancel(self):
        for request_id in self.unfinished:
            self.engine.cancel(request_id)
        self.unfinished = {}

    def close(self):
        self.watcher.cancel()
        self._cancel()
        self.engine.open_streams.discard(self)

    def put(self, updates: list[Update]):
        """Queue the updates of one status of the engine for the response. If a client reads its
        streamed response so slowly that too much is queued already, the request fails instead."""
        if self.is_streamed and self.unsent_bytes > MAX_UNSENT_BYTES:
            return self.fail(RequestAborted("the client does not read the response", 503))
        for update in updates:
            self.unsent_bytes += estimate_bytes(update)
            self.queue.put_nowait(update)

    def fail(self, error: Exception):
        """End the response with an error, instead of what was not sent yet."""
        self._cancel()
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(error)

    def __aiter__(self):
        return self

    async def __anext__(self) -> tuple[Choice, Update]:
        if not self.unfinished and self.queue.empty():
            raise StopAsyncIteration
        update = await self.queue.get()
        if isinstance(update, Exception):
            raise update

        self.unsent_bytes -= estimate_bytes(update)
        if update.finish_reason in ("error", "cancelled"):
            raise self._aborted(update)
        choice = self.unfinished[update.request_id]
        if update.finish_reason is not None:
            del self.unfinished[update.request_id]
        return choice, update

    def _aborted(self, update: Update) -> Exception:
        """The exception for a request that the engine ended."""
        error = update.error or ""
        if update.finish_reason == "error" and error.startswith(TOO_COMPLEX):
            return RequestAborted(error, 400)
        if update.finish_reason == "error":
            return EngineFailure(error, update.traceback)
        if self.engine.state != "ready":
            return RequestAborted("the server shut down before the response was complete", 503, None, "draining", 1)
        return RequestAborted(
            "the request waited too long in the queue", 503, None, "queue_timeout", self.engine.retry_after()
        )


def estimate_bytes(update: Update) -> int:
    """The size of an update in a response, roughly."""
    likeliest = [best for _, _, best, *_ in update.logprobs]
    likeliest += [best for _, best in update.prompt_logprobs]
    return 200 + len(update.text) + sum(100 * (1 + len(best)) for best in likeliest)
