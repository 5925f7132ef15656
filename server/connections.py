"""Connections: sockets, the heads and the bodies of requests, and their limits.

Read down: HttpServer, uvicorn's server with this project's settings; RequestParser; HttpConnection,
one client's connection; reading a body. Knows nothing of what the paths do, of the engine, and of
who may use the server.
"""

import asyncio
import logging
import re
import resource
import sys
from contextlib import asynccontextmanager, contextmanager, suppress

import h11
import uvicorn
from starlette.requests import Request as HttpRequest
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.error_responses import OutermostApp, new_request_id
from server.request_fields import MAX_BODY_BYTES, ApiError, encode_json

# A prompt that fits into the context takes fewer bytes for each of its tokens, even if its text is
# escaped in JSON.
BODY_BYTES_PER_TOKEN = 256
BODIES_AT_ONCE = 4  # so many bodies of the largest size may be in memory at the same time,
MIN_BODIES_BYTES = 128 * MAX_BODY_BYTES  # or this many bytes, if that is more
BODY_TIMEOUT_S = 30  # for a request's body to arrive
MAX_HEAD_BYTES = 1 << 14  # of a request's line and headers
HEAD_TIMEOUT_S = 60  # for a connection to send the next request's head
MAX_PIPELINED_BYTES = 1 << 16  # of later requests that are read while one is running
# One read is small, because 8 KiB of tiny chunks take h11 40 ms, and so that a head that is too
# long is noticed early.
READ_BYTES = 1 << 13
# After a refusal, input is dropped until none has come for this long. If the connection were closed
# while the client sends, the client might lose the response.
LINGER_S = 2
RESERVED_FILES = 40  # file descriptors that are not for connections

# A target that begins with a scheme and a host, without a user name.
ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#@]+)(|[/?#].*)", re.IGNORECASE)


class HttpServer(uvicorn.Server):
    def __init__(self, app: OutermostApp, log=lambda line: None):
        config = uvicorn.Config(
            app,
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
        config.log = log  # gets a line for each request that is refused before it reaches the app
        # asyncio's warning that a client has left before all of its response was written
        logging.getLogger("asyncio").addFilter(lambda record: record.msg != "socket.send() raised exception.")
        super().__init__(config)

    @contextmanager
    def capture_signals(self):
        yield  # uvicorn's signal handlers are not installed: the engine's process handles signals

    async def startup(self, sockets=None):
        await super().startup(sockets)
        for listener in sockets:
            listener.listen(1024)  # connections that wait to be accepted


class RequestParser(h11.Connection):
    """h11's parser, which here also refuses ambiguous lengths and heads that are too long, and accepts
    targets that begin with a scheme and a host, as every server must (RFC 9112, section 3.2.2)."""

    def next_event(self):
        bytes_before = len(self.trailing_data[0])
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event

        # h11 itself refuses a long head only while it is not complete.
        if bytes_before - len(self.trailing_data[0]) > MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError(f"the head has more than {MAX_HEAD_BYTES} bytes", 431)
        fields = dict(event.headers)
        # A proxy may believe one of the two and this server the other: then the body of one request
        # can hold another one (request smuggling).
        if b"content-length" in fields and b"transfer-encoding" in fields:
            raise h11.RemoteProtocolError("a request has either Content-Length or Transfer-Encoding, not both")

        absolute = ABSOLUTE_TARGET.fullmatch(event.target)
        if absolute is None:
            return event
        # The host of the target replaces Host, so SameSite checks the right one.
        headers = [(name, value) for name, value in event.headers if name != b"host"]
        return h11.Request(
            method=event.method,
            target=b"/" + absolute[2].removeprefix(b"/"),
            headers=[(b"host", absolute[1]), *headers],
            http_version=event.http_version,
        )


class HttpConnection(H11Protocol):
    """uvicorn's connection of a client, with a timeout for a request's head. Its refusals are error
    objects."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.conn = RequestParser(h11.SERVER, MAX_HEAD_BYTES)
        # Closes the connection some time after a request was refused. The rest of the input means nothing.
        self.closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES:
            return transport.abort()
        transport.max_size = READ_BYTES
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_TIMEOUT_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # its timer would keep the connection in memory

    def data_received(self, data: bytes):
        if self.closing is not None:
            return self._linger()
        self.conn.receive_data(data)
        self.handle_events()  # stops the timer when the head of a request is complete

        # A client that has sent its next request is read on, so that it is seen to disconnect.
        if self.conn.their_state is not h11.SEND_BODY and len(self.conn.trailing_data[0]) < MAX_PIPELINED_BYTES:
            self.flow.resume_reading()

    def send_400_response(self, msg: str):
        """Respond to a request that was refused, and close the connection."""
        events = self._refusal(sys.exc_info()[1])
        try:
            self.transport.write(b"".join(map(self.conn.send, events)))
        except h11.LocalProtocolError:  # a response has begun already
            return self.transport.close()

        if self.cycle is not None:  # the running request must not send a second response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with suppress(OSError):  # the client has closed its end: the response was answered with a reset
            self.transport.write_eof()
        self._linger()

    def _refusal(self, failure: h11.RemoteProtocolError) -> list[h11.Event]:
        """The response to a request that was refused, as h11's events."""
        status = failure.error_status_hint  # h11's own is 431 if a head is too long
        body = encode_json(ApiError(f"invalid HTTP request: {failure}", status).body())
        request_id = new_request_id()
        self.config.log(f"{request_id} ? ? {status}")
        headers = [
            (b"Content-Type", b"application/json"),
            (b"Content-Length", b"%d" % len(body)),
            (b"Connection", b"close"),
            *self.config.app.headers(request_id),
        ]
        return [h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()]

    def _linger(self):
        """Close the connection when nothing more has come for LINGER_S."""
        now = self.loop.time()
        if self.closing is None:
            self.latest_close = now + BODY_TIMEOUT_S
        else:
            self.closing.cancel()
        self.closing = self.loop.call_at(min(now + LINGER_S, self.latest_close), self.transport.close)


class BodyLimits:
    """How many bytes the bodies of requests may have: each, and all that are in memory at once."""

    def __init__(self, context_length: int):
        self.max_bytes = max(MAX_BODY_BYTES, BODY_BYTES_PER_TOKEN * context_length)
        self.free_bytes = max(BODIES_AT_ONCE * self.max_bytes, MIN_BODIES_BYTES)


@asynccontextmanager
async def body_of(request: HttpRequest):
    """A context with the body of a request, which counts as being in memory until the context ends.
    ApiError if the body is too long or too late, or if there is no memory for it."""
    limits = request.app.state.bodies
    data = bytearray()
    try:
        try:
            await asyncio.wait_for(collect_body(request, data, limits), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ApiError(f"the body did not arrive within {BODY_TIMEOUT_S} s", 408, code="timeout") from None
        except asyncio.CancelledError:  # uvicorn shuts down and does not wait for the rest
            raise ApiError("the server is shutting down", 503, code="draining", retry_after=1) from None
        yield data
    finally:
        limits.free_bytes += len(data)


async def collect_body(request: HttpRequest, data: bytearray, limits: BodyLimits):
    """Add the body of a request to `data`."""
    size = 0
    too_long = ApiError(f"the body has more than {limits.max_bytes} bytes", 413, code="request_too_large")
    most = 10 * limits.max_bytes  # that are read, because many clients read the response only when they have sent all
    if "expect" in request.headers:  # the client waits for permission to send
        most = limits.max_bytes
    if int(request.headers.get("content-length", 0)) > most:
        raise too_long
    async for part in request.stream():
        size += len(part)
        if size <= limits.max_bytes:
            if len(part) > limits.free_bytes:
                raise ApiError("too many large bodies at once", 503, code="overloaded", retry_after=1)
            limits.free_bytes -= len(part)
            data += part
        if size > most:
            break
    if size > limits.max_bytes:
        raise too_long
