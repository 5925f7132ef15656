"""The server's HTTP process: paths, streams and errors over HTTP, and a pipe to the engine's process (serve.py).

Read down: `http_process`, which starts it; EngineClient, what it knows of the engine; Call, a request that is running;
the paths; streams; keys and errors.

What requests and answers look like is in api.py. The libraries are Starlette and uvicorn.
"""

import asyncio
import hmac
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from api import MAX_BODY, ApiError, Ask, Event, OpenAIAnswer, ServedModel, TgiAnswer, Wishes, encode, parse_object
from cli import UserError, print_status

try:
    import uvicorn
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    print(f"serve.py: error: {error.name} is not there: pip install -r requirements-serve.txt", file=sys.stderr)
    sys.exit(2)

VERSION = "0.1.0"  # of the API, for /version

# ---------------------------------------------------------------- the process


@dataclass
class Settings:
    """What the HTTP process has to know."""

    directory: os.PathLike  # of the checkpoint
    name: str  # of the model
    length: int  # positions of context
    api_key: str | None


def listen(host: str, port: int) -> socket.socket:
    if not host:  # which the system takes for all addresses
        raise UserError("--host is empty; give an address, 0.0.0.0 for all of this machine's")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Not socket.create_server: asyncio switches Nagle's algorithm off (40 ms an answer) where it sees that this is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, TypeError, ValueError) as error:  # the latter two where the host can be no name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port} cannot be listened on: {reason}") from None
    return listener


@contextmanager
def http_process(settings: Settings, listener: socket.socket):
    """The HTTP process while the engine runs; gives our end of the pipe to it. It ends when the pipe is closed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_http, args=(settings, listener, theirs), daemon=True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is our business, also while it starts
    process.start()
    signal.signal(signal.SIGINT, before)
    theirs.close()
    try:
        yield ours
    except (EOFError, BrokenPipeError, ConnectionResetError):
        process.join(5)
        raise UserError(f"the HTTP process has ended (exit code {process.exitcode})") from None
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()


# ---------------------------------------------------------------- the engine, as this process sees it


def run_http(settings: Settings, listener: socket.socket, connection):
    """Serve until the engine's end of the pipe is closed."""
    asyncio.run(serve_http(settings, listener, connection))


async def serve_http(settings: Settings, listener: socket.socket, connection):
    client = EngineClient(connection)
    config = uvicorn.Config(
        make_app(settings, client),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)

    def stop():
        server.should_exit = True

    client.start(stop)
    await server.serve(sockets=[listener])


class EngineClient:
    """The engine's process, as the HTTP process sees it."""

    def __init__(self, connection):
        self.connection, self.metrics, self.keys = connection, Metrics(), itertools.count()
        self.writer = ThreadPoolExecutor(1)  # a full pipe must not stop the event loop, which empties the other one
        self.running: dict[int, Running] = {}
        self.metrics.unfinished.set_function(lambda: len(self.running))
        self.state = "starting"

    def start(self, on_end: Callable[[], None]):
        """Listen to the engine; on_end() is called when it has gone."""
        self.loop, self.on_end = asyncio.get_running_loop(), on_end
        self.loop.add_reader(self.connection.fileno(), self._read)

    def add(self, ask: Ask, queue: asyncio.Queue) -> int:
        if self.state == "broken":
            raise ApiError("the engine has stopped", 503)
        key = next(self.keys)
        self.running[key] = Running(queue)
        self.writer.submit(self.connection.send, (key, ask.request, ask.stop, ask.continues))
        return key

    def cancel(self, key: int):
        """End a request, whose events nobody hears any more."""
        if self.running.pop(key, None) is not None:
            self.metrics.requests.labels("cancelled").inc()
            self.writer.submit(self.connection.send, (key,))

    def _read(self):
        try:
            events, numbers = self.connection.recv()
        except (EOFError, OSError):
            self.state = "broken"
            self.loop.remove_reader(self.connection.fileno())
            for running in self.running.values():
                running.queue.put_nowait(ApiError("the engine has stopped", 503))
            return self.on_end()
        self.state = "ready"
        self.metrics.note_step(*numbers)
        for event in events:
            if running := self.running.get(event.key):
                self.metrics.note_event(running, event)
                running.queue.put_nowait(event)
                if event.reason is not None:
                    del self.running[event.key]


@dataclass
class Running:
    """A request that the engine has, for the HTTP process."""

    queue: asyncio.Queue
    added: float = field(default_factory=time.perf_counter)
    first: float | None = None  # when its first token came


class Metrics:
    """What /metrics tells, in Prometheus's format."""

    def __init__(self):
        self.registry = registry = CollectorRegistry()
        steps = [0.001 * 2**n for n in range(15)]  # 1 ms to 16 s
        waits = [0.01 * 2**n for n in range(14)]  # 10 ms to 82 s

        def counter(name, text, *labels):
            return Counter(f"fastpath_{name}", text, labels, registry=registry)

        def histogram(name, text, buckets):
            return Histogram(f"fastpath_{name}_seconds", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests by outcome", "outcome")
        self.read = counter("prompt_tokens_read", "Tokens of prompts that were read")
        self.reused = counter("prompt_tokens_reused", "Tokens of prompts that a cache row held already")
        self.written = counter("tokens_written", "New tokens")
        self.waiting = Gauge("fastpath_requests_waiting", "Requests that wait for a row", registry=registry)
        self.unfinished = Gauge("fastpath_requests_unfinished", "Requests that wait or run", registry=registry)
        self.active = Gauge("fastpath_rows_active", "Rows that have a request", registry=registry)
        tasks = Gauge("fastpath_tasks", "Asynchronous tasks of the HTTP process", registry=registry)
        tasks.set_function(lambda: len(asyncio.all_tasks()))
        self.first_token = histogram("time_to_first_token", "From the request to its first token", waits)
        self.per_token = histogram("time_per_token", "Of a request's later tokens, on average", steps)
        self.step = histogram("step", "A step of the engine", steps)
        self.prefilled = 0

    def note_step(self, seconds: float, waiting: int, active: int, prefilled: int):
        if seconds:
            self.step.observe(seconds)
        self.waiting.set(waiting)
        self.active.set(active)
        self.read.inc(max(0, prefilled - self.prefilled))
        self.prefilled = prefilled

    def note_event(self, running: Running, event: Event):
        now = time.perf_counter()
        if running.first is None and event.tokens:
            running.first = now
            self.first_token.observe(now - running.added)
            self.reused.inc(event.cached)
        if event.reason is not None:
            self.requests.labels(event.reason).inc()
            self.written.inc(event.tokens)
            if event.tokens > 1:
                self.per_token.observe((now - running.first) / (event.tokens - 1))


class ClientGone(Exception):
    """The client has closed its connection, and nobody waits for an answer any more."""


class Call:
    """What one HTTP request has asked of the engine. An asynchronous iterator of (index of the prompt, Event), until
    all have ended; ClientGone when the client leaves meanwhile, in which step the engine is told."""

    def __init__(self, client: EngineClient, asks: list[Ask], receive: Callable):
        self.client, self.queue, self.gone = client, asyncio.Queue(), False
        self.running = {client.add(ask, self.queue): i for i, ask in enumerate(asks)}
        self.watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Callable):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._cancel()
        self.queue.put_nowait(None)

    def _cancel(self):
        for key in self.running:
            self.client.cancel(key)
        self.running = {}

    def close(self):
        self.watcher.cancel()
        self._cancel()

    def __aiter__(self):
        return self

    async def __anext__(self) -> tuple[int, Event]:
        if not self.running and not self.gone:
            raise StopAsyncIteration
        event = await self.queue.get()
        if self.gone:
            raise ClientGone
        if isinstance(event, Exception):
            raise event
        if event.reason == "error":
            print_status(f"a request failed: {event.error}")
            raise ApiError("the model could not go on with this request", 500)
        index = self.running[event.key]
        if event.reason is not None:
            del self.running[event.key]
        return index, event


# ---------------------------------------------------------------- the paths


def make_app(settings: Settings, client: EngineClient) -> Starlette:
    model = ServedModel(settings.directory, settings.name, settings.length)

    def asking(read: Callable[[dict], Wishes], shape: Callable):
        """An endpoint that asks the engine: `read` makes wishes of the request's body, `shape` the answer's JSON."""

        async def endpoint(request: HttpRequest):
            body = await read_object(request)
            wishes = await asyncio.to_thread(read, body)  # a long text takes long to tokenize
            return await ask(client, wishes, shape(model, wishes), request.receive)

        return endpoint

    def reading(work: Callable[[dict], dict]):
        async def endpoint(request: HttpRequest):
            return answer_json(await asyncio.to_thread(work, await read_object(request)))

        return endpoint

    def showing(work: Callable[[HttpRequest], dict]):
        async def endpoint(request: HttpRequest):
            return answer_json(work(request))

        return endpoint

    async def health(request: HttpRequest):
        return answer_json({"status": client.state}, 200 if client.state == "ready" else 503)

    async def metrics(request: HttpRequest):
        return Response(generate_latest(client.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def post(path: str, endpoint) -> Route:
        return Route(path, endpoint, methods=["POST"])

    routes = [
        post("/v1/completions", asking(model.completion, OpenAIAnswer)),
        post("/v1/chat/completions", asking(model.chat, OpenAIAnswer)),
        post("/generate", asking(lambda body: model.tgi(body, False), TgiAnswer)),
        post("/generate_stream", asking(lambda body: model.tgi(body, True), TgiAnswer)),
        post("/tokenize", reading(model.tokenize)),
        post("/detokenize", reading(model.detokenize)),
        Route("/tokenizer_info", showing(lambda request: model.tokenizer_info())),
        Route("/v1/models", showing(lambda request: {"object": "list", "data": [model.card()]})),
        Route("/v1/models/{name:path}", showing(lambda request: model.named_card(request.path_params["name"]))),
        Route("/version", showing(lambda request: {"version": VERSION})),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    handlers = dict.fromkeys((ApiError, HTTPException, ClientGone, ClientDisconnect, Exception), on_error)
    middleware = [Middleware(ApiKey, key=settings.api_key)] if settings.api_key else []
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
    app.router.redirect_slashes = False
    app.state.client = client
    return app


async def ask(client: EngineClient, wishes: Wishes, answer, receive: Callable):
    """The HTTP answer to wishes; an ASGI application. A stream begins when its first token is there, so that what goes
    wrong before still has its status code."""
    call = Call(client, wishes.asks, receive)
    try:
        if wishes.stream:
            return EventStream(call, answer, await anext(call))
        async for i, event in call:
            wishes.asks[i].note(event)
    except BaseException:
        call.close()
        raise
    call.close()
    return answer_json(answer.whole())


class EventStream:
    """Server-sent events, an ASGI application."""

    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

    def __init__(self, call: Call, answer, first: tuple[int, Event]):
        self.call, self.answer, self.first = call, answer, first

    async def __call__(self, scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            async for chunks in self._chunks():
                data = b"".join(b"data: %b\n\n" % encode(chunk) for chunk in chunks)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": self.answer.end})
        except ClientGone:
            pass
        finally:
            self.call.close()

    async def _chunks(self) -> AsyncIterator[list[dict]]:
        yield self.answer.chunks(*self.first)
        try:
            async for i, event in self.call:
                yield self.answer.chunks(i, event)
            yield self.answer.last()
        except ApiError as error:
            yield [error.body()]


async def read_object(request: HttpRequest) -> dict:
    """The JSON object that a request's body is."""
    data, size = bytearray(), 0
    try:
        async for part in request.stream():
            size += len(part)
            data += part if size <= MAX_BODY else b""
            if size > 10 * MAX_BODY:  # up to there the client is heard out, so that it reads the answer
                break
    except asyncio.CancelledError:  # uvicorn ends and does not wait for the rest
        raise ApiError("the engine has stopped", 503) from None
    if size > MAX_BODY:
        raise ApiError(f"the body has more than {MAX_BODY} bytes", 413, code="request_too_large")
    return parse_object(data)


# ---------------------------------------------------------------- keys and errors


class ApiKey:
    """Lets requests pass that send the key, and those for /health. An ASGI middleware."""

    def __init__(self, app, key: str):
        self.app, self.expected = app, b"Bearer " + os.fsencode(key)  # the bytes of the command line

    async def __call__(self, scope, receive, send):
        app = self.app
        if scope["type"] == "http" and scope["path"] != "/health":
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self.expected):
                error = ApiError("the API key is missing or wrong", 401, None, "invalid_api_key")
                app = answer_json(error.body(), 401, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)


def answer_json(value, status: int = 200, headers: dict | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


async def on_error(request: HttpRequest, error: Exception) -> Response:
    """The answer to any exception. What the server did wrong itself goes to stderr (by Starlette) and not to others."""
    headers = None
    if isinstance(error, (ClientGone, ClientDisconnect)):
        return Response(status_code=499)  # which nobody reads
    if isinstance(error, HTTPException):  # no such path, or another method
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = error.headers
        error = ApiError(f"{request.method} {request.url.path}: {error.detail}", error.status_code, None, code)
    elif not isinstance(error, ApiError):
        error = ApiError("the server made a mistake", 500)
    request.app.state.client.metrics.requests.labels("refused" if error.status < 500 else "error").inc()
    return answer_json(error.body(), error.status, headers)
