"""The server's HTTP process: paths, streams and errors over HTTP, and a pipe to the engine's process (serve.py).

Read down: `run_http`, which is called in the new process; connections and their limits; EngineClient, what this process
knows of the engine; Call, a request that is running; the paths; streams; who may ask; errors.

What requests and answers look like is in api.py. The libraries are Starlette and uvicorn.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import itertools
import math
import os
import re
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from checkpoint import TokenizerFiles
from cli import open_closed_streams, print_status
from model import Config
from server.api import (
    MAX_BODY,
    ApiError,
    Ask,
    Event,
    OpenAIAnswer,
    ServedModel,
    TgiAnswer,
    Wishes,
    encode,
    parse_object,
)

try:
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

    from server.metrics import Metrics, Running
except ImportError as error:
    print(f"serve.py: error: {error.name} is not there: pip install -r requirements-serve.txt", file=sys.stderr)
    sys.exit(2)

VERSION = "0.1.0"  # of the API, for /version
BODY_SECONDS = 30  # in which a request's body has to arrive
HEAD_BYTES = 1 << 14  # of a request; up to READ_BYTES more where they come at once
HEAD_SECONDS = 60  # in which a connection has to send the next request's head
MAX_PIPELINED = 1 << 16  # bytes of later requests that are read while one is running
READ_BYTES = 1 << 13  # from a connection at once: tiny chunks take h11 40 ms, and it sees that a head is too long
LINGER_SECONDS = 2  # in which the rest of what is no HTTP is read and dropped, so that its client reads the answer
SPARE_FILES = 40  # descriptors that are no connections
SILENT_SECONDS = 8  # an engine that says nothing for so long is reported as broken
MAX_UNSENT = 1 << 20  # bytes of a stream that its client has not read

# ---------------------------------------------------------------- the process


@dataclass
class Settings:
    """What the HTTP process has to know."""

    config: Config
    tokenizer_files: TokenizerFiles
    name: str  # of the model
    length: int  # positions of context
    rows: int  # requests that run at the same time
    max_queue: int  # requests that may wait for a row
    api_key: str | None


class News(NamedTuple):
    """What the engine's process tells after a step."""

    state: str  # as EngineClient.state
    events: list[Event]
    step_s: float  # seconds; 0 where the engine had nothing to do. The first News has the time of warming up.
    waiting: int = 0  # requests
    active: int = 0  # rows that have a request
    prefill_tokens: int = 0  # prompt tokens that were read so far
    drafts: dict = {}  # with speculation: the counts of each draft so far, as in speculative.Report


def run_http(settings: Settings, listener: socket.socket, connection):
    """Serve until the engine's end of the pipe is closed."""
    open_closed_streams()
    with suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(serve_http(settings, listener, connection))


async def serve_http(settings: Settings, listener: socket.socket, connection):
    client = EngineClient(connection, settings.rows, settings.max_queue)
    config = uvicorn.Config(
        make_app(settings, client, listener.getsockname()[0]),
        http=Connection,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=HEAD_SECONDS,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_graceful_shutdown=2,
        backlog=16,  # connections that are accepted at once
    )
    server = HttpServer(config)

    def stop():
        server.should_exit = True

    client.start(stop)
    await server.serve(sockets=[listener])


class HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self):
        yield  # without handlers of uvicorn

    async def startup(self, sockets=None):
        await super().startup(sockets)
        for listener in sockets:
            listener.listen(1024)  # connections that wait to be accepted


class Connection(H11Protocol):
    """A client's connection. uvicorn's, but a request's head must arrive in time, and errors are as all others."""

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES:
            return transport.abort()
        transport.max_size = READ_BYTES
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # which would keep a connection that was reset in memory until then

    def data_received(self, data: bytes):
        if self.conn.their_state is h11.ERROR:
            return
        self.conn.receive_data(data)
        self.handle_events()  # which ends the timeout when the head of a request is complete
        if self.conn.their_state is not h11.SEND_BODY and len(self.conn.trailing_data[0]) < MAX_PIPELINED:
            self.flow.resume_reading()  # a client that sends its next request early may leave, too

    def send_400_response(self, msg: str):
        failure = sys.exc_info()[1]  # h11's, whose hint is 431 for a head that is too long
        error = ApiError(f"this is not HTTP: {failure}", getattr(failure, "error_status_hint", 400))
        body = encode(error.body())
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        with suppress(h11.LocalProtocolError):  # an answer has begun already
            response = h11.Response(status_code=error.status, headers=headers)
            self.transport.write(b"".join(map(self.conn.send, (response, h11.Data(data=body), h11.EndOfMessage()))))
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
            if self.cycle is not None:  # the request whose body is wrong; its own answer would be a second one
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            return
        self.transport.close()


# ---------------------------------------------------------------- the engine, as this process sees it


class EngineClient:
    """The engine's process, as the HTTP process sees it."""

    def __init__(self, connection, rows: int, max_queue: int):
        self.connection, self.rows, self.places = connection, rows, rows + max_queue
        self.metrics, self.keys = Metrics(), itertools.count()
        self.writer = ThreadPoolExecutor(1)  # a full pipe must not stop the event loop, which empties the other one
        self.calls: set[Call] = set()  # HTTP requests that have been let in
        self.running: dict[int, Running] = {}
        self.metrics.show("requests_unfinished", "Requests that wait or run", lambda: len(self.running))
        # "starting", "ready", "draining" (no new requests), "ended" (whose time is over) or "broken"
        self.state = "starting"
        self.heard = self.slowest_step = 0.0  # when the engine has spoken last; seconds
        self.finished: deque[float] = deque(maxlen=32)  # when the last requests were

    def start(self, on_end: Callable[[], None]):
        """Listen to the engine; on_end() is called when it has gone."""
        self.loop, self.on_end = asyncio.get_running_loop(), on_end
        self.loop.add_reader(self.connection.fileno(), self._read)
        self.watcher = self.loop.create_task(self._watch())

    @property
    def taken(self) -> int:
        """Prompts that run, wait or are being tokenized."""
        return len(self.running) + sum(call.watcher is None for call in self.calls)

    def health(self) -> str:
        silent = time.monotonic() - self.heard > max(SILENT_SECONDS, 3 * self.slowest_step)
        if silent and self.state != "starting":
            return "broken"
        if self.state == "ready" and self.taken >= self.places:
            return "overloaded"
        return "draining" if self.state == "ended" else self.state

    def check_room(self):
        """Raise ApiError where no request can be taken now."""
        if self.health() == "broken":
            raise ApiError("the engine has stopped", 503)
        if self.state in ("draining", "ended"):
            raise ApiError("the server is ending", 503, code="draining", retry_after=1)
        if self.taken >= self.places:
            text = f"all {self.rows} rows are in use and all {self.places - self.rows} places of the queue are taken"
            raise ApiError(text, 429, code="overloaded", retry_after=self.retry_after())

    def retry_after(self) -> int:
        """Seconds after which half of the requests that wait now will have a row, as fast as they ended lately."""
        if len(self.finished) < 2:
            return 1
        interval = (self.finished[-1] - self.finished[0]) / (len(self.finished) - 1)
        return min(30, max(1, math.ceil(interval * max(1, self.taken - self.rows) / 2)))

    def add(self, ask: Ask, call: "Call", first: bool) -> int:
        key = next(self.keys)
        self.running[key] = Running(call)
        self.writer.submit(self.connection.send, (key, ask.request, ask.stop, ask.continues, first))
        return key

    def cancel(self, key: int):
        """End a request, whose events nobody hears any more."""
        if self.running.pop(key, None) is not None:
            self.metrics.requests.labels("cancelled").inc()
            self.writer.submit(self.connection.send, (key,))

    def _read(self):
        try:
            news = self.connection.recv()
        except (EOFError, OSError):
            self.state = "broken"
            self.loop.remove_reader(self.connection.fileno())
            self._fail_calls()
            return self.on_end()
        self.heard, self.slowest_step = time.monotonic(), max(self.slowest_step, news.step_s)
        if self.state != "starting":
            self.metrics.note_step(news.step_s, news.waiting, news.active, news.prefill_tokens)
            self.metrics.note_drafts(news.drafts)
        self.state = news.state
        for event in news.events:
            if running := self.running.get(event.key):
                if event.reason is not None:
                    self.finished.append(self.heard)
                    del self.running[event.key]
                self.metrics.note_event(running, event)
                running.call.put(event)
        if not self.running:  # so that idle time counts for nothing in retry_after
            self.finished.clear()
        # Answers have their time to be sent. After it, nothing of the engine is missing, and no client is waited for.
        if (self.state == "draining" and not self.calls) or (self.state == "ended" and not self.taken):
            self.on_end()

    async def _watch(self):
        while True:
            await asyncio.sleep(1)
            if self.health() == "broken":  # it may hang in a step for ever, or go on later
                self._fail_calls()

    def _fail_calls(self):
        for call in self.calls:
            call.put(ApiError("the engine has stopped", 503))


class Unfinished(ApiError):
    """The engine has ended a request before its answer; the metrics know of it already."""


class ClientGone(Exception):
    """The client has closed its connection, and nobody waits for an answer any more."""


class Call:
    """An HTTP request to the engine, which has a place from here on until it is closed. ApiError where none is free.

    After `begin`, it is an asynchronous iterator of (index of the prompt, Event), until all have ended; ClientGone when
    the client leaves meanwhile, in which moment the engine is told.
    """

    def __init__(self, client: EngineClient):
        client.check_room()
        self.client, self.queue, self.gone, self.unsent = client, asyncio.Queue(), False, 0
        self.running, self.watcher = {}, None
        client.calls.add(self)

    def begin(self, asks: list[Ask], receive: Callable):
        self.running = {self.client.add(ask, self, i == 0): i for i, ask in enumerate(asks)}
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
        if self.watcher is not None:
            self.watcher.cancel()
        self._cancel()
        self.client.calls.discard(self)

    def put(self, event: Event | ApiError):
        """Hear of an event, or of an error that ends all."""
        too_much, self.unsent = self.unsent > MAX_UNSENT, self.unsent + size_of(event)
        if too_much:  # the client reads too slowly, or not at all
            self._cancel()
            while not self.queue.empty():
                self.queue.get_nowait()
            event = ApiError("the answer is not being read", 503)
        self.queue.put_nowait(event)

    def __aiter__(self):
        return self

    async def __anext__(self) -> tuple[int, Event]:
        if not self.running and not self.gone and self.queue.empty():
            raise StopAsyncIteration
        event = await self.queue.get()
        if self.gone:
            raise ClientGone
        if isinstance(event, Exception):
            raise event
        self.unsent -= size_of(event)
        if event.reason == "error":
            print_status(f"a request failed: {event.error}")
            raise Unfinished("the model could not go on with this request", 500)
        if event.reason == "cancelled":  # by the engine
            if self.client.state != "ready":
                raise Unfinished("the server has ended before the answer", 503, code="draining", retry_after=1)
            retry_after = self.client.retry_after()
            raise Unfinished("the request has waited for too long", 503, code="queue_timeout", retry_after=retry_after)
        index = self.running[event.key]
        if event.reason is not None:
            del self.running[event.key]
        return index, event


def size_of(event) -> int:
    """Bytes that an event takes in an answer, about."""
    if isinstance(event, Exception):
        return 0
    scored = [best for _, _, best, *_ in event.logprobs] + [best for _, best in event.prompt_logprobs]
    return 200 + len(event.text) + sum(100 * (1 + len(best)) for best in scored)


# ---------------------------------------------------------------- the paths


def engine_endpoint(client: EngineClient, read: Callable[[dict], Wishes], shape: Callable):
    """An endpoint that asks the engine: `read` makes wishes of the request's body, `shape` the answer's JSON."""

    async def endpoint(request: HttpRequest):
        client.check_room()  # the body may come slowly, so it is asked again when the body is here
        body = await read_body(request)
        call = Call(client)
        try:
            wishes = await asyncio.to_thread(lambda: read(parse_object(body)))  # a long text takes long to tokenize
            call.begin(wishes.asks, request.receive)
            return await answer(call, wishes, shape(wishes))
        except BaseException:
            call.close()
            raise

    return endpoint


def make_app(settings: Settings, client: EngineClient, address: str) -> Starlette:
    """address: the one that is listened on."""
    model = ServedModel(settings.config, settings.tokenizer_files, settings.name, settings.length)

    def asking(read: Callable[[dict], Wishes], shape: Callable):
        return engine_endpoint(client, read, lambda wishes: shape(model, wishes))

    def reading(work: Callable[[dict], dict]):
        async def endpoint(request: HttpRequest):
            body = await read_body(request)
            return answer_json(await asyncio.to_thread(lambda: work(parse_object(body))))

        return endpoint

    def showing(work: Callable[[HttpRequest], dict]):
        async def endpoint(request: HttpRequest):
            return answer_json(work(request))

        return endpoint

    async def health(request: HttpRequest):
        state = client.health()
        return answer_json({"status": state}, 200 if state in ("ready", "overloaded") else 503)

    async def metrics(request: HttpRequest):
        return Response(client.metrics.text(), media_type=CONTENT_TYPE_LATEST)

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
        *page_routes(),
    ]
    handlers = dict.fromkeys((ApiError, HTTPException, ClientGone, ClientDisconnect, Exception), on_error)
    key = settings.api_key
    middleware = [Middleware(ApiKey, key=key) if key else Middleware(SameSite, local=is_local(address))]
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
    app.router.redirect_slashes = False
    app.state.client = client
    return app


def page_routes() -> list[Route]:
    """The page at /, under a policy that lets nothing run but the page's own script and nothing load from elsewhere;
    no route where page.html is not there."""
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


async def answer(call: Call, wishes: Wishes, shape):
    """The HTTP answer to a call; an ASGI application. A stream begins when its first token is there, so that what goes
    wrong before still has its status code."""
    if wishes.stream:
        return EventStream(call, shape, await anext(call))
    async for i, event in call:
        wishes.asks[i].note(event)
    call.close()
    return await asyncio.to_thread(lambda: answer_json(shape.whole()))  # many log-probabilities take a second


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
        except (ClientGone, asyncio.CancelledError):  # the latter where the server ends, and nobody reads
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


async def read_body(request: HttpRequest) -> bytes:
    try:
        return await asyncio.wait_for(collect_body(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(f"the body has not arrived within {BODY_SECONDS} s", 408, code="timeout") from None
    except asyncio.CancelledError:  # uvicorn ends and does not wait for the rest
        raise ApiError("the engine has stopped", 503) from None


async def collect_body(request: HttpRequest) -> bytes:
    data, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        data += part if size <= MAX_BODY else b""
        if size > 10 * MAX_BODY:  # up to there the client is heard out, so that it reads the answer
            break
    if size > MAX_BODY:
        raise ApiError(f"the body has more than {MAX_BODY} bytes", 413, code="request_too_large")
    return bytes(data)


# ---------------------------------------------------------------- who may ask; errors


class ApiKey:
    """Lets requests pass that send the key, and those for /health and the page. An ASGI middleware."""

    def __init__(self, app, key: str):
        self.app, self.expected = app, os.fsencode(key)  # the bytes of the command line

    async def __call__(self, scope, receive, send):
        app = self.app
        if scope["type"] == "http" and scope["path"] not in ("/health", "/"):
            scheme, _, sent = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(sent.strip(), self.expected):
                error = ApiError("the API key is missing or wrong", 401, None, "invalid_api_key")
                app = answer_json(error.body(), 401, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)


class SameSite:
    """Keeps web pages of other sites from talking to a server without a key behind its user's back. An ASGI middleware.

    A browser names the site of a page in Origin; it must be our own. A page whose domain has been made to point to our
    address (DNS rebinding) is at home here, so where only this machine can reach us, Host may be no domain.
    """

    def __init__(self, app, local: bool):
        self.app, self.local = app, local

    async def __call__(self, scope, receive, send):
        app = self.app
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", "localhost"), headers.get(b"origin")
        name = re.sub(r":\d*$", "", host).strip("[]")
        if self.local and ("." in name.rstrip(".") or ":" in name) and not is_local(name):
            error = f"Host {host[:100]!r} is not this machine (a server with --api_key can have any name)"
        elif origin is not None and origin.partition("://")[2].lower() != host.lower():
            error = f"pages of {origin[:100]} may not use this server (with --api_key, those that know the key may)"
        else:
            error = None
        if error:
            app = answer_json(ApiError(error, 403, None, "forbidden").body(), 403)
        await app(scope, receive, send)


def is_local(host: str) -> bool:
    """Whether a host's name or address means the machine that asks."""
    name = host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


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
    if error.retry_after is not None:
        headers = {"Retry-After": str(error.retry_after), "x-should-retry": "true"}
    elif error.status == 408:
        headers = {"Connection": "close"}
    if not isinstance(error, Unfinished):
        outcome = "overloaded" if error.status == 429 else "refused" if error.status < 500 else "error"
        request.app.state.client.metrics.requests.labels(outcome).inc()
    return answer_json(error.body(), error.status, headers)
