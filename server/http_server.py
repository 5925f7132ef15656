"""The HTTP process: its start, the paths, and the responses to requests that the engine answers.

Read down: `run_http`, which serve.py calls in a new process; the paths; responses. Knows nothing of
sockets and their limits (connections.py), of who may use the server (access.py), of the pipe
(engine_client.py), and of what requests and responses look like (api.py, responses.py). The
libraries are Starlette and uvicorn.

A request is on its way first the body's JSON object, then a CompletionRequest with a Choice for
each answer (api.py). A TextRequest for each Choice goes through the pipe (pipe_messages.py), and
contains the engine's own Request (engine.py).
"""

import asyncio
import base64
import gc
import hashlib
import os
import re
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from cli import VERSION, open_closed_streams, print_status
from server.access import CORS_HEADERS, ApiKey, SameSite, is_loopback
from server.anthropic import MessageBuilder, count_tokens, parse_message
from server.api import ServedModel
from server.connections import BodyLimits, HttpServer, body_of
from server.embeddings import EmbeddingBuilder, parse_embeddings
from server.engine_client import EngineClient, UpdateStream
from server.error_responses import ANTHROPIC_PATH, OutermostApp, handle_error, internal_error
from server.openai_responses import ItemBuilder, KeptResponses, parse_response
from server.pipe_messages import Settings
from server.request_fields import MAX_BODY_BYTES, ApiError, encode_json, parse_object
from server.responses import ResponseBuilder

PARSER_THREADS = 64
FIRST_UPDATE_S = 0.2  # a stream's head is sent after this time, even if there is no update yet
PING_S = 10.0  # between two pings before the first update

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
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    asyncio.run(serve_http(settings, listener, connection))


async def serve_http(settings: Settings, listener: socket.socket, connection):
    engine = EngineClient(connection, settings.max_batch_size, settings.max_queue)
    # Python's default is a few threads, which hostile schemas could keep busy, so that other
    # requests would wait.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(PARSER_THREADS))
    app = make_app(settings, engine, listener.getsockname()[0])
    # A body may have thousands of objects. Python would look at all modules while they are made.
    gc.freeze()
    gc.set_threshold(20_000)
    server = HttpServer(app, app.log)

    def stop():
        server.should_exit = True

    engine.start(stop)
    # From here on, this process notices the end of the pipe, so serve.end_http_process need not
    # end it with this signal.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    await server.serve(sockets=[listener])


# ---------------------------------------------------------------- the paths


def make_app(settings: Settings, engine: EngineClient, address: str) -> OutermostApp:
    """address: the one that the server listens on."""
    model = ServedModel(
        settings.config,
        settings.tokenizer_files,
        settings.model_name,
        settings.context_length,
        settings.strict_model,
        settings.sampling,
    )

    async def health(request: HttpRequest):
        state = engine.health()
        status = 200 if state in ("ready", "overloaded") else 503
        return json_response({"status": state}, status)

    async def metrics(request: HttpRequest):
        return Response(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    generating = partial(completion_endpoint, engine, model)
    limits = BodyLimits(settings.context_length)
    kept = KeptResponses(limits.max_bytes / MAX_BODY_BYTES)
    posts = {
        "/v1/completions": generating(model.parse_completion),
        "/v1/chat/completions": generating(model.parse_chat),
        "/v1/embeddings": generating(partial(parse_embeddings, model), EmbeddingBuilder),
        "/tokenize": post_endpoint(model.tokenize),
        "/detokenize": post_endpoint(model.detokenize),
        ANTHROPIC_PATH: generating(partial(parse_message, model), MessageBuilder),
        f"{ANTHROPIC_PATH}/count_tokens": post_endpoint(partial(count_tokens, model)),
        "/v1/responses": generating(partial(parse_response, model, kept), partial(ItemBuilder, kept)),
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        Route("/v1/responses/{name}", get_endpoint(kept.response)),
        Route("/v1/responses/{name}", get_endpoint(kept.delete), methods=["DELETE"]),
        Route("/tokenizer_info", get_endpoint(model.tokenizer_info)),
        Route("/v1/models", get_endpoint(lambda: {"object": "list", "data": [model.model_card()]})),
        Route("/v1/models/{name:path}", get_endpoint(model.find_model)),
        Route("/version", get_endpoint(lambda: {"version": VERSION})),
        Route("/health", health),
        Route("/metrics", metrics),
        *page_routes(),
    ]
    if settings.api_key:
        access = Middleware(ApiKey, key=settings.api_key)
        headers = CORS_HEADERS
    else:
        access = Middleware(SameSite, local=is_loopback(address))
        headers = {}
    handlers = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), handle_error)
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[access])
    app.router.redirect_slashes = False
    app.state.metrics = engine.metrics
    app.state.bodies = limits
    return OutermostApp(app, headers, (lambda line: None) if settings.quiet else print_status)


def completion_endpoint(engine: EngineClient, model: ServedModel, parse: Callable, builder: Callable = ResponseBuilder):
    """An endpoint whose response the engine generates.

    parse: makes a CompletionRequest of the body's JSON object. builder(model, completion): makes an
    object with the methods of ResponseBuilder, which builds the response.
    """

    async def endpoint(request: HttpRequest):
        engine.check_room()  # now, because the body may come slowly; reserve() checks again
        async with body_of(request) as body:
            with engine.reserve():
                # In a thread, because tokenizing may take long.
                completion = await asyncio.to_thread(lambda: parse(parse_object(body)))
        request.scope["summary"] = completion.summary
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
        async with body_of(request) as body:
            return json_response(await asyncio.to_thread(lambda: work(parse_object(body))))

    return endpoint


def get_endpoint(work: Callable[..., dict]):
    """An endpoint without a body. `work` gets the parameters of the path."""

    async def endpoint(request: HttpRequest):
        return json_response(work(**request.path_params))

    return endpoint


def page_routes() -> list[Route]:
    """The page at /. Its Content-Security-Policy allows only the page's own script and style, and
    requests to this server. No route if page.html is missing."""
    try:
        html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []

    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    policy += "form-action 'none'; frame-ancestors 'none'"
    for tag in ("script", "style"):
        policy += f"; {tag}-src"
        for text in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.S):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            policy += f" 'sha256-{digest}'"
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }

    async def page(request: HttpRequest):
        return Response(html, headers=headers, media_type="text/html")

    return [Route("/", page)]


# ---------------------------------------------------------------- responses


async def respond(updates: UpdateStream, builder: ResponseBuilder):
    """The response to a request, as an ASGI application. A stream waits a moment for its first update, so
    that an error that comes at once has a status code of its own."""
    if builder.completion.stream:
        first = asyncio.ensure_future(anext(updates))
        try:
            done, _ = await asyncio.wait([first], timeout=FIRST_UPDATE_S)
        except asyncio.CancelledError:
            first.cancel()
            raise
        if done:
            first.result()  # raises the error, if it is one
        return event_stream(updates, builder, first)

    async for choice, update in updates:
        choice.updates.append(update)
    updates.close()
    # In a thread, because many log-probabilities take a second.
    return await asyncio.to_thread(lambda: json_response(builder.whole()))


STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def event_stream(updates: UpdateStream, builder: ResponseBuilder, first: asyncio.Future):
    """Server-sent events, as an ASGI application. While a long prompt is read, the client gets a ping from
    time to time, because clients and proxies give up if nothing comes.

    first: of the first (choice, update).
    """

    async def parts(scope) -> AsyncIterator[bytes]:
        try:
            while not first.done():
                yield builder.ping
                await asyncio.wait([first], timeout=PING_S)
            # In a thread, like `whole` above: the first update may have the log-probabilities of a
            # whole prompt. Later updates have a few log-probabilities, which take 0.3 ms each.
            yield await asyncio.to_thread(builder.stream_update, *first.result())
            sent_at = time.monotonic()
            async for choice, update in updates:
                part = builder.stream_update(choice, update)
                if not part and time.monotonic() - sent_at > PING_S:  # the parser holds text back
                    part = builder.ping
                if part:
                    sent_at = time.monotonic()
                    yield part
            yield builder.stream_end()
        except ClientDisconnect:
            raise
        except ApiError as error:
            yield builder.stream_error(error)
        except Exception as error:
            yield builder.stream_error(internal_error(scope, error))

    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            async for data in parts(scope):
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (ClientDisconnect, asyncio.CancelledError):  # uvicorn cancels this if it shuts down
            scope["status"] = "cancelled"
        finally:
            first.cancel()
            updates.close()

    return app


def json_response(value, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")
