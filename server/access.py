"""Who may use the server: clients with the API key, or without a key, the pages of this site alone.

Read down: the headers that let pages of other sites in (CORS); ApiKey, the middleware of a server
with a key; SameSite, the middleware of a server without one. Knows nothing of what the paths do.
"""

import hmac
import ipaddress
import os
import re

from starlette.responses import Response

from server.error_responses import ANTHROPIC_PATH, error_response
from server.request_fields import ApiError

# With a key, pages of any site may use the server (CORS), because they have to send the key. A
# browser keeps it in no cookie, so a page has it only if somebody gave it to the page, and
# Access-Control-Allow-Credentials is not needed.
CORS_HEADERS = {  # of every response
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Expose-Headers": "Retry-After, WWW-Authenticate, x-should-retry, x-request-id, request-id",
}
PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Private-Network": "true",  # for pages of the internet, if this is local
    "Access-Control-Max-Age": "7200",
}


class ApiKey:
    """An ASGI middleware: requests must have the key, except those for /health and the page. It is
    in Authorization, or for Anthropic's paths in x-api-key.

    Before a page of another site may send a key, the browser asks with OPTIONS, without the key (a
    preflight). The answer is the same for all paths, and nothing runs."""

    def __init__(self, app, key: str):
        self.app = app
        self.key = os.fsencode(key)  # the bytes of the command line

    async def __call__(self, scope, receive, send):
        app = self.app
        is_http = scope["type"] == "http"
        if is_http and scope["method"] == "OPTIONS":
            wanted = dict(scope["headers"]).get(b"access-control-request-headers", b"")
            allowed = wanted.decode("latin-1") or "*, Authorization"
            headers = PREFLIGHT_HEADERS | {"Access-Control-Allow-Headers": allowed}
            app = Response(status_code=204, headers=headers)
        elif is_http and scope["path"] not in ("/health", "/") and not self._has_key(scope):
            error = ApiError("the API key is missing or wrong", 401, None, "invalid_api_key")
            app = error_response(error, scope["path"], {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)

    def _has_key(self, scope) -> bool:
        headers = dict(scope["headers"])
        keys = []
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            keys.append(key.strip())
        if scope["path"].startswith(ANTHROPIC_PATH):
            keys.append(headers.get(b"x-api-key", b""))
        return any(hmac.compare_digest(key, self.key) for key in keys)


class SameSite:
    """An ASGI middleware for a server without a key. It refuses the requests that web pages of
    other sites send through the user's browser.

    A browser names the site of a page in Origin, which must be this server. DNS rebinding gets
    around that: a page's own domain is made to point to this address, so that Origin and Host
    agree. So a server that only this machine can reach accepts no domain in Host except localhost.
    """

    def __init__(self, app, local: bool):
        self.app = app
        self.local = local  # whether only this machine can reach the server

    async def __call__(self, scope, receive, send):
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "localhost")
        origin = headers.get(b"origin")
        name = re.sub(r":\d*$", "", host).strip("[]")
        is_qualified = "." in name.rstrip(".") or ":" in name  # not the bare name of a machine

        if self.local and is_qualified and not is_loopback(name):
            reason = f"Host {host[:100]!r} is not this machine (with --api_key, any Host is accepted)"
        elif origin is not None and origin.partition("://")[2].lower() != host.lower():
            reason = f"pages of {origin[:100]} may not use this server (with --api_key, pages that send the key may)"
        else:
            return await self.app(scope, receive, send)
        error = ApiError(reason, 403, None, "forbidden")
        await error_response(error, scope["path"])(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether a host name or an address belongs to the loopback interface."""
    name = host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    # An IPv6 address may hold an IPv4 address, which decides then.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
