"""Errors: the response to each exception, and what the log says of it and of each request.

Read down: the paths of other APIs; an error as its client expects it; OutermostApp, which gives
each request an id, logs its end and catches what nothing else has caught; internal errors; the
handler of all exceptions in endpoints. Knows nothing of what the paths do.
"""

import asyncio
import secrets
import time
import traceback
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cli import first_line, print_status, printable
from server.anthropic import anthropic_error
from server.engine_client import EngineFailure, RequestAborted
from server.request_fields import ApiError, encode_json

ANTHROPIC_PATH = "/v1/messages"
# What other servers offer at paths that begin so, after /v1 if they have it.
NOT_OFFERED = {
    # OpenAI
    "audio": "speech and transcription", "images": "images",
    "videos": "videos", "moderations": "moderations", "realtime": "realtime sessions",
    "files": "files", "uploads": "files", "vector_stores": "vector stores", "batches": "batches",
    "fine_tuning": "fine-tuning", "evals": "evals", "conversations": "conversations",
    "assistants": "assistants", "threads": "assistants",
    # Anthropic, Google, and Ollama (also LM Studio and KoboldCpp)
    "complete": "Anthropic's text completions", "v1beta": "Gemini's API", "api": "Ollama's API",
    # vLLM, SGLang and TGI
    "rerank": "reranking", "score": "scores of texts", "pooling": "vLLM's pooling",
    "classify": "classification", "embed": "TEI's own API", "generate": "SGLang's and TGI's own API",
    "generate_stream": "TGI's own API",
    # llama.cpp
    "completion": "llama.cpp's own API", "embedding": "llama.cpp's own API", "reranking": "reranking",
    "infill": "infilling", "props": "llama.cpp's own API", "slots": "llama.cpp's own API",
}  # fmt: skip


def error_body(error: ApiError, path: str) -> dict:
    """An error as clients of the path expect it."""
    return anthropic_error(error) if path.startswith(ANTHROPIC_PATH) else error.body()


def error_response(error: ApiError, path: str, headers: dict | None = None) -> Response:
    return Response(encode_json(error_body(error, path)), error.status, headers, "application/json")


class OutermostApp:
    """The ASGI application that contains all others. It adds headers to every response: the given
    ones, and the request's id, by the names that OpenAI's and Anthropic's clients know.
    When a request has ended, it calls log(line). The line has no query, which may hold secrets.
    """

    def __init__(self, app, headers: dict[str, str], log: Callable[[str], None] = lambda line: None):
        self.app = app
        self.log = log
        self.common = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        value = request_id.encode()
        return [(b"x-request-id", value), (b"request-id", value), *self.common]

    async def __call__(self, scope, receive, send):
        scope["request_id"] = new_request_id()
        arrived_at = time.perf_counter()
        # Some clients have a base URL without /v1.
        if scope["path"].startswith(("/chat/", "/completions", "/models", "/responses", "/messages", "/embeddings")):
            scope["path"] = f"/v1{scope['path']}"

        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                scope["status"] = message["status"]
                message = message | {"headers": [*message["headers"], *self.headers(scope["request_id"])]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as failure:  # a panic of a library in Rust is not an Exception
            error = internal_error(scope, failure)
            if "status" not in scope:  # Starlette raises again what handle_error has responded to
                await error_response(error, scope["path"])(scope, receive, send_with_headers)
        finally:
            numbers = scope.pop("summary", lambda _: "")(arrived_at)  # the connection may keep the scope for long
            status = "cancelled" if scope.get("status", 499) == 499 else scope["status"]
            # Programs watch these paths, and the page sends some GET requests by itself.
            is_poll = (
                scope["path"] in ("/health", "/metrics") or (b"sec-fetch-site", b"same-origin") in scope["headers"]
            )
            if numbers or not is_poll or status not in (200, 503):
                self.log(
                    f"{scope['request_id']} {scope['method']} {printable(scope['raw_path'].decode())} {status}{numbers}"
                )


def new_request_id() -> str:
    return f"req_{secrets.token_hex(8)}"


def internal_error(scope, failure: BaseException) -> ApiError:
    """Log an internal error once. Returns what the client sees of it: the request's id, by which
    the error can be found in the log."""
    is_engine_failure = isinstance(failure, EngineFailure)
    request_id = scope["request_id"]

    if scope.get("failure") is not failure:
        scope["failure"] = failure
        details = (failure.details or "") if is_engine_failure else "".join(traceback.format_exception(failure))
        print_status(f"a request failed: {first_line(failure)} ({request_id})\n{details}".rstrip())

    if is_engine_failure:
        return ApiError(f"generation failed for this request ({request_id})", 500)
    return ApiError(f"internal server error ({request_id})", 500)


async def handle_error(request: HttpRequest, error: Exception) -> Response:
    """The response to any exception. Internal errors are logged; clients do not see the message."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # the client has gone, so this is not sent, but logged as cancelled

    is_counted = isinstance(error, RequestAborted | EngineFailure)
    headers = None
    if isinstance(error, HTTPException):  # an unknown path, or a method that it does not have
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = error.headers
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
        if error.status_code == 404:
            first_part = request.url.path.removeprefix("/v1/").strip("/").partition("/")[0]
            offered = ", ".join(route.path for route in request.app.routes if "POST" in route.methods)
            message += f"; {NOT_OFFERED.get(first_part, 'this path')} is not offered; {offered} and /v1/models are"
        error = ApiError(message, error.status_code, None, code)
    elif not isinstance(error, ApiError):
        error = internal_error(request.scope, error)
    if error.retry_after is not None:
        headers = {"Retry-After": str(error.retry_after), "x-should-retry": "true"}
    elif error.status == 408:
        headers = {"Connection": "close"}

    if not is_counted:
        outcome = {429: "overloaded"}.get(error.status, "refused" if error.status < 500 else "error")
        request.app.state.metrics.requests.labels(outcome).inc()
    return error_response(error, request.url.path, headers)
