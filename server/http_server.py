"""The HTTP process: sockets, paths, streams and errors, and a pipe to the engine's process (serve.py).

Read down: `run_http`, which serve.py calls in a new process; connections and their limits; EngineClient, the other end
of the pipe; UpdateStream, what the engine sends for one HTTP request; the paths; responses; who may use the server;
errors.

The shapes of a request on its way: the body's JSON object; a CompletionRequest, with a Choice for each answer (api.py);
a TextRequest for each Choice, which goes through the pipe (pipe_messages.py); in it, the engine's own Request
(engine.py).

What requests and responses look like is in api.py. The libraries are Starlette and uvicorn.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import math
import os
import re
import resource
import secrets
import signal
import socket
import sys
import time
import traceback
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import h11
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from cli import first_line, open_closed_streams, print_status
from grammar import TOO_COMPLEX
from server.api import Choice, CompletionRequest, ServedModel
from server.metrics import Metrics
from server.pipe_messages import Cancel, EngineStatus, Settings, TextRequest, Update
from server.request_fields import MAX_BODY_BYTES, ApiError, encode_json, parse_object
from server.responses import ResponseBuilder

VERSION = "0.1.0"  # of the API, for /version
BODY_TIMEOUT_S = 30  # for a request's body to arrive
MAX_HEAD_BYTES = 1 << 14  # of a request's line and headers
HEAD_TIMEOUT_S = 60  # for a connection to send the next request's head
MAX_PIPELINED_BYTES = 1 << 16  # of later requests that are read while one is running
READ_BYTES = 1 << 13  # per read: 8 KiB of tiny chunks take h11 40 ms, and a head that is too long is noticed early
PARSER_THREADS = 64
LINGER_S = 2  # input is dropped after a refusal until none has come for this long, so that the client gets the response
RESERVED_FILES = 40  # file descriptors that are not for connections
ENGINE_TIMEOUT_S = 8  # an engine that has sent nothing for this long is reported as broken
MAX_UNSENT_BYTES = 1 << 20  # of a response that its client has not read
ANTHROPIC_PATH = "/v1/messages"
ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#@]+)(|[/?#].*)", re.IGNORECASE)  # without a user name before the host

# ---------------------------------------------------------------- the process


def run_http(listener: socket.socket, connection):
    """Serve until the engine's end of the pipe is closed. The Settings come through the pipe."""
    open_closed_streams()
    try:
        settings = connection.recv()
    except (EOFError, OSError):  # the engine's process has ended already
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # with them, a fork prints a warning
    with suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(serve_http(settings, listener, connection))


async def serve_http(settings: Settings, listener: socket.socket, connection):
    engine = EngineClient(connection, settings.max_batch_size, settings.max_queue)
    # Python's default is a few threads, which hostile schemas could keep busy, so that other requests would wait.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(PARSER_THREADS))
    config = uvicorn.Config(
        make_app(settings, engine, listener.getsockname()[0]),
        http=HttpConnection,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=HEAD_TIMEOUT_S,
        timeout_graceful_shutdown=2,
        backlog=16,  # connections that are accepted at once
    )
    server = HttpServer(config)

    def stop():
        server.should_exit = True

    engine.start(stop)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # from here on, the end of the pipe is noticed (serve.http_process)
    await server.serve(sockets=[listener])


class HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self):
        yield  # uvicorn's signal handlers are not installed: the engine's process handles signals

    async def startup(self, sockets=None):
        await super().startup(sockets)
        for listener in sockets:
            listener.listen(1024)  # connections that wait to be accepted


class RequestParser(h11.Connection):
    """h11's parser, which also refuses ambiguous lengths and what is too long, and accepts the absolute targets that
    proxies send."""

    request: h11.Request | None = None  # the current one, once its head is complete

    def next_event(self):
        before = len(self.trailing_data[0])
        if self.their_state is h11.IDLE:
            self.request = None
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        self.request = event
        if before - len(self.trailing_data[0]) > MAX_HEAD_BYTES:  # h11 refuses only heads that are not complete
            raise h11.RemoteProtocolError(f"the head has more than {MAX_HEAD_BYTES} bytes", 431)
        fields = dict(event.headers)
        if b"content-length" in fields and b"transfer-encoding" in fields:  # a way to smuggle requests past a proxy
            raise h11.RemoteProtocolError("a request has either Content-Length or Transfer-Encoding, not both")
        if int(fields.get(b"content-length", 0)) > MAX_BODY_BYTES:  # refused before it is sent
            raise h11.RemoteProtocolError(f"the body has more than {MAX_BODY_BYTES} bytes", 413)
        absolute = ABSOLUTE_TARGET.fullmatch(event.target)
        if absolute is None:
            return event
        # The host of the target replaces Host (RFC 9112, section 3.2.2), so SameSite checks the right one.
        headers = [(b"host", absolute[1]), *((name, value) for name, value in event.headers if name != b"host")]
        target = b"/" + absolute[2].removeprefix(b"/")
        return h11.Request(method=event.method, target=target, headers=headers, http_version=event.http_version)


class HttpConnection(H11Protocol):
    """uvicorn's connection of a client, with a timeout for a request's head, and errors as error objects."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.conn = RequestParser(h11.SERVER, MAX_HEAD_BYTES)
        self.is_invalid = False  # a request could not be parsed, so the rest of the input means nothing
        self.closing: asyncio.TimerHandle | None = None  # closes the connection after a request that was refused

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES:
            return transport.abort()
        transport.max_size = READ_BYTES
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_TIMEOUT_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # otherwise its timer would keep the connection in memory

    def data_received(self, data: bytes):
        if not self.is_invalid:
            self.conn.receive_data(data)
            self.handle_events()  # which stops the timer when the head of a request is complete
            if self.conn.their_state is not h11.SEND_BODY and len(self.conn.trailing_data[0]) < MAX_PIPELINED_BYTES:
                self.flow.resume_reading()  # so that a client that has sent its next request is seen to disconnect, too
        if self.closing is not None:
            self._linger()

    def send_400_response(self, msg: str):
        """Respond to a request that was refused. The next one is read if only the body was too long, and it is sent."""
        self.is_invalid = True
        try:
            self.transport.write(b"".join(map(self.conn.send, self._refusal(sys.exc_info()[1]))))
        except h11.LocalProtocolError:  # a response has begun already
            return self.transport.close()
        if self.cycle is not None:  # the request with the invalid body must not send a second response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state is h11.DONE:
            self.is_invalid = False
            self.on_response_complete()
            self.handle_events()
        else:
            self.transport.write_eof()
        self._linger()

    def _refusal(self, failure: h11.RemoteProtocolError) -> list[h11.Event]:
        status, request = failure.error_status_hint, self.conn.request  # the status is 431 if a head is too long
        code = "request_too_large" if status == 413 else None
        error = ApiError(f"invalid HTTP request: {failure}", status, code=code)
        body = encode_json(error_body(error, request.target.decode("ascii") if request else ""))

        headers = [(b"Content-Type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
        headers += self.config.app.headers(new_request_id())
        if status != 413:
            headers.append((b"Connection", b"close"))
        if request is not None and request.method == b"HEAD":
            body = b""
        return [h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()]

    def _linger(self):
        """Close the connection when nothing more has come for a moment, unless the next request is awaited. If it were
        closed while the client sends, the client might lose the response."""
        now = self.loop.time()
        if self.closing is None:
            self.latest_close = now + BODY_TIMEOUT_S
        else:
            self.closing.cancel()
            self.closing = None
        if self.is_invalid or self.conn.our_state is h11.DONE:
            self.closing = self.loop.call_at(min(now + LINGER_S, self.latest_close), self.transport.close)


# ---------------------------------------------------------------- the engine, as the HTTP process sees it


class EngineClient:
    """Sends requests to the engine's process, and gives the updates that come back to the right UpdateStream."""

    def __init__(self, connection, rows: int, max_queue: int):
        """connection: our end of the pipe; rows: requests that the engine runs at the same time."""
        self.connection = connection
        self.rows, self.capacity = rows, rows + max_queue
        self.writer = ThreadPoolExecutor(1)  # sends: a full pipe must not block the event loop, which reads updates
        self.open_streams: set[UpdateStream] = set()  # of HTTP requests whose responses are not complete
        self.receivers: dict[int, UpdateStream] = {}  # request_id -> where its updates go, until the last one
        self.parsing = 0  # HTTP requests that are being tokenized
        self.metrics = Metrics()
        self.metrics.add_gauge("requests_unfinished", "Requests that wait or run", lambda: len(self.receivers))
        self.state = "starting"  # then that of EngineStatus, or "broken"
        self.last_heard = self.slowest_step_s = 0.0
        self.finish_times: deque[float] = deque(maxlen=32)  # of the latest requests

    def start(self, on_end: Callable[[], None]):
        """Begin to read updates. on_end() is called when the server must exit."""
        self.loop, self.on_end = asyncio.get_running_loop(), on_end
        self.loop.add_reader(self.connection.fileno(), self._read_status)
        self.watcher = self.loop.create_task(self._watch_engine())

    @property
    def in_use(self) -> int:
        """Prompts that run, wait or are being tokenized."""
        return len(self.receivers) + self.parsing

    def health(self) -> str:
        silent = time.monotonic() - self.last_heard > max(ENGINE_TIMEOUT_S, 3 * self.slowest_step_s)
        if silent and self.state != "starting":
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
            text = f"all {self.rows} rows are in use and the queue of {self.capacity - self.rows} requests is full"
            raise ApiError(text, 429, code="overloaded", retry_after=self.retry_after())

    def retry_after(self) -> int:
        """Seconds until half of the requests that are waiting will have a row, at the recent completion rate."""
        if len(self.finish_times) < 2:
            return 1
        interval = (self.finish_times[-1] - self.finish_times[0]) / (len(self.finish_times) - 1)
        return min(30, max(1, math.ceil(interval * max(1, self.in_use - self.rows) / 2)))

    @contextmanager
    def reserve(self):
        """A place for a request while it is parsed."""
        self.check_room()
        self.parsing += 1
        try:
            yield
        finally:
            self.parsing -= 1

    def generate(self, completion: CompletionRequest, receive: Callable) -> "UpdateStream":
        """Send the prompts of a parsed request to the engine. receive: of ASGI, tells when the client disconnects."""
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
        """Called by the event loop when the engine has sent something, or when its process has ended."""
        try:
            status: EngineStatus = self.connection.recv()
        except (EOFError, OSError):
            return self._engine_has_ended()
        self.last_heard, self.slowest_step_s = time.monotonic(), max(self.slowest_step_s, status.step_s)
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
            by_stream[stream].append(update)
            self.metrics.record_update(stream.unfinished[update.request_id], update)
            if update.finish_reason is not None:
                self.finish_times.append(self.last_heard)
                del self.receivers[update.request_id]
        for stream, some in by_stream.items():
            stream.put(some)
        if not self.receivers:  # idle time must not count in retry_after
            self.finish_times.clear()

    def _may_exit(self) -> bool:
        """While draining, when all responses are sent; after that time, as soon as the engine has no requests."""
        if self.state == "draining":
            return not self.open_streams and not self.parsing
        return self.state == "ended" and not self.in_use

    async def _watch_engine(self):
        while True:
            await asyncio.sleep(1)
            if self.health() == "broken":  # the engine may hang in a step forever, or go on later
                self._fail_all()

    def _fail_all(self):
        for stream in self.open_streams:
            stream.fail(RequestAborted("the engine has stopped", 503))


class RequestAborted(ApiError):
    """The engine ended a request before its answer was complete. The metrics have counted it already."""


class EngineFailure(Exception):
    """An internal error of the engine's process. It ended one request, which the metrics have counted already."""

    def __init__(self, message: str, details: str | None):
        super().__init__(message)
        self.details = details  # the traceback from there, if there was an exception


class UpdateStream:
    """What the engine sends for an HTTP request: an asynchronous iterator over its updates, as (choice, update).

    It ends when all choices are finished. If the client disconnects, the engine's work is cancelled at once, and the
    iterator raises ClientDisconnect.
    """

    def __init__(self, engine: EngineClient, completion: CompletionRequest, receive: Callable):
        self.engine, self.queue = engine, asyncio.Queue()  # of updates, and of errors that end the response
        self.unfinished = {choice.text_request.request_id: choice for choice in completion.choices}
        self.is_streamed, self.disconnected = completion.stream, False
        self.unsent_bytes = 0  # of the updates in the queue
        self.watcher = asyncio.create_task(self._watch_client(receive))

    async def _watch_client(self, receive: Callable):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self._cancel()
        self.queue.put_nowait(None)

    def _cancel(self):
        for request_id in self.unfinished:
            self.engine.cancel(request_id)
        self.unfinished = {}

    def close(self):
        self.watcher.cancel()
        self._cancel()
        self.engine.open_streams.discard(self)

    def put(self, updates: list[Update]):
        """Queue the updates of one status of the engine for the response. If too much waits already, because the client
        reads a streamed response too slowly, the request fails instead."""
        if self.is_streamed and self.unsent_bytes > MAX_UNSENT_BYTES:
            self._cancel()
            while not self.queue.empty():
                self.queue.get_nowait()
            return self.fail(RequestAborted("the client does not read the response", 503))
        for update in updates:
            self.unsent_bytes += estimate_bytes(update)
            self.queue.put_nowait(update)

    def fail(self, error: ApiError):
        self.queue.put_nowait(error)

    def __aiter__(self):
        return self

    async def __anext__(self) -> tuple[Choice, Update]:
        if not self.unfinished and not self.disconnected and self.queue.empty():
            raise StopAsyncIteration
        update = await self.queue.get()
        if self.disconnected:
            raise ClientDisconnect
        if isinstance(update, ApiError):
            raise update
        self.unsent_bytes -= estimate_bytes(update)
        if update.finish_reason in ("error", "cancelled"):
            raise self._aborted(update)
        choice = self.unfinished[update.request_id]
        if update.finish_reason is not None:
            del self.unfinished[update.request_id]
        return choice, update

    def _aborted(self, update: Update) -> Exception:
        if update.finish_reason == "error" and (update.error or "").startswith(TOO_COMPLEX):
            return RequestAborted(update.error, 400)
        if update.finish_reason == "error":
            return EngineFailure(update.error, update.traceback)
        if self.engine.state != "ready":
            return RequestAborted("the server shut down before the response was complete", 503, None, "draining", 1)
        retry_after = self.engine.retry_after()
        return RequestAborted("the request waited too long in the queue", 503, None, "queue_timeout", retry_after)


def estimate_bytes(update: Update) -> int:
    """The size of an update in a response, roughly."""
    likeliest = [best for _, _, best, *_ in update.logprobs] + [best for _, best in update.prompt_logprobs]
    return 200 + len(update.text) + sum(100 * (1 + len(best)) for best in likeliest)


# ---------------------------------------------------------------- the paths


def make_app(settings: Settings, engine: EngineClient, address: str) -> "OutermostApp":
    """address: the one that the server listens on."""
    model = ServedModel(
        settings.config,
        settings.tokenizer_files,
        settings.model_name,
        settings.context_length,
        settings.strict_model,
    )

    async def health(request: HttpRequest):
        state = engine.health()
        return json_response({"status": state}, 200 if state in ("ready", "overloaded") else 503)

    async def metrics(request: HttpRequest):
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/v1/completions", completion_endpoint(engine, model, model.parse_completion), methods=["POST"]),
        Route("/v1/chat/completions", completion_endpoint(engine, model, model.parse_chat), methods=["POST"]),
        Route("/tokenize", post_endpoint(model.tokenize), methods=["POST"]),
        Route("/detokenize", post_endpoint(model.detokenize), methods=["POST"]),
        Route("/tokenizer_info", get_endpoint(model.tokenizer_info)),
        Route("/v1/models", get_endpoint(lambda: {"object": "list", "data": [model.model_card()]})),
        Route("/v1/models/{name:path}", get_endpoint(model.find_model)),
        Route("/version", get_endpoint(lambda: {"version": VERSION})),
        Route("/health", health),
        Route("/metrics", metrics),
        *anthropic_routes(engine, model),
        *responses_routes(engine, model),
        *page_routes(),
    ]
    handlers = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), handle_error)
    key = settings.api_key
    middleware = [Middleware(ApiKey, key=key) if key else Middleware(SameSite, local=is_loopback(address))]
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
    app.router.redirect_slashes = False
    app.state.metrics = engine.metrics
    return OutermostApp(app, CORS_HEADERS if key else {})


def completion_endpoint(engine: EngineClient, model: ServedModel, parse: Callable, builder: Callable = ResponseBuilder):
    """An endpoint that generates text. `parse` makes a CompletionRequest of the body's JSON object. builder: makes
    what builds its response, a ResponseBuilder or another object with its methods."""

    async def endpoint(request: HttpRequest):
        engine.check_room()  # now, because the body may come slowly; reserve() checks again
        body = await read_body(request)
        with engine.reserve():
            completion = await asyncio.to_thread(lambda: parse(parse_object(body)))  # tokenizing may take long
        updates = engine.generate(completion, request.receive)
        try:
            return await respond(updates, builder(model, completion))
        except BaseException:
            updates.close()
            raise

    return endpoint


def post_endpoint(work: Callable[[dict], dict]):
    """An endpoint whose JSON response depends on the body alone."""

    async def endpoint(request: HttpRequest):
        body = await read_body(request)
        return json_response(await asyncio.to_thread(lambda: work(parse_object(body))))

    return endpoint


def get_endpoint(work: Callable[..., dict]):
    """An endpoint without a body. `work` gets the parameters of the path."""

    async def endpoint(request: HttpRequest):
        return json_response(work(**request.path_params))

    return endpoint


def anthropic_routes(engine: EngineClient, model: ServedModel) -> list[Route]:
    """The paths of Anthropic's API. No routes if anthropic.py is missing."""
    if not has_anthropic():
        return []
    from server.anthropic import MessageBuilder, count_tokens, parse_message

    messages = completion_endpoint(engine, model, partial(parse_message, model), MessageBuilder)
    return [
        Route(ANTHROPIC_PATH, messages, methods=["POST"]),
        Route(f"{ANTHROPIC_PATH}/count_tokens", post_endpoint(partial(count_tokens, model)), methods=["POST"]),
    ]


def has_anthropic() -> bool:
    return Path(__file__).with_name("anthropic.py").exists()


def responses_routes(engine: EngineClient, model: ServedModel) -> list[Route]:
    """The paths of OpenAI's Responses API. No routes if openai_responses.py is missing."""
    if not Path(__file__).with_name("openai_responses.py").exists():
        return []
    from server.openai_responses import ItemBuilder, KeptResponses, parse_response

    kept = KeptResponses()
    create = completion_endpoint(engine, model, partial(parse_response, model, kept), partial(ItemBuilder, kept))

    async def kept_response(request: HttpRequest):
        name = request.path_params["name"]
        response, _ = kept.find(name)
        if request.query_params.get("stream") in ("true", "1"):
            raise ApiError("a response that is kept cannot be streamed", param="stream")
        if request.method == "DELETE":
            kept.turns.pop(name, None)
            response = {"id": name, "object": "response", "deleted": True}
        return json_response(response)

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{name}", kept_response, methods=["GET", "DELETE"]),
    ]


def page_routes() -> list[Route]:
    """The page at /, with a Content-Security-Policy that allows only the page's own script and style, and requests to
    this server. No route if page.html is missing."""
    try:
        html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    policy += "frame-ancestors 'none'"
    for tag in ("script", "style"):
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.S)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        policy += "".join([f"; {tag}-src", *(f" 'sha256-{digest}'" for digest in hashes)])
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

    async def page(request: HttpRequest):
        return Response(html, headers=headers, media_type="text/html")

    return [Route("/", page)]


async def read_body(request: HttpRequest) -> bytes:
    try:
        return await asyncio.wait_for(collect_body(request), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_TIMEOUT_S} s", 408, code="timeout") from None
    except asyncio.CancelledError:  # uvicorn shuts down and does not wait for the rest
        raise ApiError("the server is shutting down", 503, code="draining", retry_after=1) from None


async def collect_body(request: HttpRequest) -> bytes:
    data, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        data += part if size <= MAX_BODY_BYTES else b""
        if size > 10 * MAX_BODY_BYTES:  # not sooner: many clients read the response only when all is sent
            break
    if size > MAX_BODY_BYTES:
        raise ApiError(f"the body has more than {MAX_BODY_BYTES} bytes", 413, code="request_too_large")
    return bytes(data)


# ---------------------------------------------------------------- responses


async def respond(updates: UpdateStream, builder: ResponseBuilder):
    """The response to a request, as an ASGI application. A stream begins after its first update, so that earlier errors
    have a status code of their own."""
    if builder.completion.stream:
        return EventStream(updates, builder, await anext(updates))
    async for choice, update in updates:
        choice.updates.append(update)
    updates.close()
    return await asyncio.to_thread(lambda: json_response(builder.whole()))  # many log-probabilities take a second


class EventStream:
    """Server-sent events, as an ASGI application."""

    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

    def __init__(self, updates: UpdateStream, builder: ResponseBuilder, first: tuple[Choice, Update]):
        self.updates, self.builder = updates, builder
        self.first = first

    async def __call__(self, scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            async for data in self._parts(scope):
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (ClientDisconnect, asyncio.CancelledError):  # the latter if uvicorn shuts down meanwhile
            pass
        finally:
            self.updates.close()

    async def _parts(self, scope) -> AsyncIterator[bytes]:
        try:
            # In a thread, like `whole` above: the first update may have the log-probabilities of a whole prompt. Later
            # updates have those of a few tokens, which take 0.3 ms each.
            yield await asyncio.to_thread(self.builder.stream_update, *self.first)
            async for choice, update in self.updates:
                yield self.builder.stream_update(choice, update)
            yield self.builder.stream_end()
        except ClientDisconnect:
            raise
        except ApiError as error:
            yield self.builder.stream_error(error)
        except Exception as error:
            yield self.builder.stream_error(internal_error(scope, error))


def error_body(error: ApiError, path: str) -> dict:
    """An error as clients of the path expect it."""
    if path.startswith(ANTHROPIC_PATH) and has_anthropic():
        from server import anthropic

        return anthropic.error_body(error)
    return error.body()


def json_response(value, status: int = 200, headers: dict | None = None) -> Response:
    return Response(encode_json(value), status, headers, "application/json")


# ---------------------------------------------------------------- who may use the server


# With a key, pages of any site may use the server (CORS), because they have to send the key. A browser keeps it in no
# cookie, so no page has it without having been given it, and Access-Control-Allow-Credentials is not needed.
CORS_HEADERS = {  # of every response
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": "Retry-After, WWW-Authenticate, x-should-retry, x-request-id, request-id",
}
PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Private-Network": "true",  # for pages of the internet, to a server of a local network
    "Access-Control-Max-Age": "7200",
}


class ApiKey:
    """An ASGI middleware: requests must have the key, except those for /health and the page. It is in Authorization, or
    for Anthropic's paths in x-api-key.

    Before a page of another site may send a key, the browser asks with OPTIONS, without the key (a preflight). The
    answer is the same for all paths, and nothing runs."""

    def __init__(self, app, key: str):
        self.app, self.key = app, os.fsencode(key)  # the bytes of the command line

    async def __call__(self, scope, receive, send):
        app = self.app
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            wanted = dict(scope["headers"]).get(b"access-control-request-headers", b"").decode("latin-1")
            headers = {"Access-Control-Allow-Headers": wanted or "*, Authorization"}
            app = Response(status_code=204, headers=PREFLIGHT_HEADERS | headers)
        elif scope["type"] == "http" and scope["path"] not in ("/health", "/") and not self._has_key(scope):
            error = ApiError("the API key is missing or wrong", 401, None, "invalid_api_key")
            app = json_response(error_body(error, scope["path"]), 401, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)

    def _has_key(self, scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = [key.strip()] if scheme.lower() == b"bearer" else []
        if scope["path"].startswith(ANTHROPIC_PATH):
            keys.append(headers.get(b"x-api-key", b""))
        return any(hmac.compare_digest(key, self.key) for key in keys)


class SameSite:
    """An ASGI middleware for a server without a key. It refuses the requests that web pages of other sites send through
    the user's browser.

    A browser names the site of a page in Origin, which must be this server. DNS rebinding gets around that: a page's
    own domain is made to point to this address, so that Origin and Host agree. So a server that only this machine can
    reach accepts no domain in Host except localhost.
    """

    def __init__(self, app, local: bool):
        self.app, self.local = app, local

    async def __call__(self, scope, receive, send):
        app = self.app
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", "localhost"), headers.get(b"origin")
        name = re.sub(r":\d*$", "", host).strip("[]")
        if self.local and ("." in name.rstrip(".") or ":" in name) and not is_loopback(name):
            error = f"Host {host[:100]!r} is not this machine (with --api_key, any Host is accepted)"
        elif origin is not None and origin.partition("://")[2].lower() != host.lower():
            error = f"pages of {origin[:100]} may not use this server (with --api_key, pages that send the key may)"
        else:
            error = None
        if error:
            app = json_response(error_body(ApiError(error, 403, None, "forbidden"), scope["path"]), 403)
        await app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether a host name or an address is one of the loopback interface."""
    name = host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# ---------------------------------------------------------------- errors


class OutermostApp:
    """The ASGI application that contains all others. Its headers are in every response: the request's id, by the names
    that clients of OpenAI and Anthropic know, and those that it is made with."""

    def __init__(self, app, headers: dict[str, str]):
        self.app = app
        self.common = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        value = request_id.encode()
        return [(b"x-request-id", value), (b"request-id", value), *self.common]

    async def __call__(self, scope, receive, send):
        scope["request_id"] = new_request_id()
        has_started = False

        async def send_with_headers(message):
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message = message | {"headers": [*message["headers"], *self.headers(scope["request_id"])]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as failure:  # not only Exception: that of a library in Rust that panics is none
            error = internal_error(scope, failure)
            if not has_started:  # Starlette also raises exceptions to which handle_error has responded
                await json_response(error_body(error, scope["path"]), 500)(scope, receive, send_with_headers)


def new_request_id() -> str:
    return f"req_{secrets.token_hex(8)}"


def internal_error(scope, failure: BaseException) -> ApiError:
    """What the client sees of an internal error: the request's id, with which the error is in the log."""
    request_id = scope["request_id"]
    if scope.get("failure") is not failure:
        scope["failure"] = failure  # logged once
        if isinstance(failure, EngineFailure):
            details = failure.details or ""
        else:
            details = "".join(traceback.format_exception(failure))
        print_status(f"a request failed: {first_line(failure)} ({request_id})\n{details}".rstrip())
    what = "generation failed for this request" if isinstance(failure, EngineFailure) else "internal server error"
    return ApiError(f"{what} ({request_id})", 500)


async def handle_error(request: HttpRequest, error: Exception) -> Response:
    """The response to any exception. Internal errors are logged; clients do not see their messages."""
    headers, is_counted = None, isinstance(error, RequestAborted | EngineFailure)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # the client has gone, so this is not sent
    if isinstance(error, HTTPException):  # an unknown path, or a method that it does not have
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = error.headers
        error = ApiError(f"{request.method} {request.url.path}: {error.detail}", error.status_code, None, code)
    elif not isinstance(error, ApiError):
        error = internal_error(request.scope, error)
    if error.retry_after is not None:
        headers = {"Retry-After": str(error.retry_after), "x-should-retry": "true"}
    elif error.status == 408:
        headers = {"Connection": "close"}
    if not is_counted:
        outcome = "overloaded" if error.status == 429 else "refused" if error.status < 500 else "error"
        request.app.state.metrics.requests.labels(outcome).inc()
    return json_response(error_body(error, request.url.path), error.status, headers)
