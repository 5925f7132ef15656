"""The server's page, server/page.html: how it is served, what it may load and run, and the contrast of its colors."""

import asyncio
import base64
import hashlib
import re
from types import SimpleNamespace

from conftest import ROOT
from starlette.applications import Starlette
from starlette.middleware import Middleware

from server import http_server
from server.access import ApiKey

HTML = (ROOT / "server" / "page.html").read_text(encoding="utf-8")


def get(path: str, key: str | None = None) -> SimpleNamespace:
    """The answer to a GET request, of an app that has the page and wants a key for everything else."""
    app = Starlette(routes=http_server.page_routes(), middleware=[Middleware(ApiKey, key="k")])
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    asyncio.run(app(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message["body"] for message in sent[1:])
    return SimpleNamespace(status=sent[0]["status"], headers=headers, body=body)


def test_the_page_alone_is_served_without_a_key():
    answer = get("/")
    assert answer.status == 200 and answer.body.decode() == HTML
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-cache"
    assert get("/metrics").status == 401 and get("//").status == 401
    assert get("/metrics", key="k").status == 404  # the key was right, and this app has nothing there


def test_the_policy_lets_nothing_run_but_the_script_of_the_page():
    directives = [part.split() for part in get("/").headers["content-security-policy"].split(";")]
    policy = {name: values for name, *values in directives}
    assert len(policy) == len(directives)
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == [f"'sha256-{digest}'"]
    none = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), ["'none'"])
    assert policy == none | {"connect-src": ["'self'"], "img-src": ["data:"]}


def test_the_page_loads_nothing_from_elsewhere():
    assert re.findall(r"https?://[^'\" ]*", HTML) == ["http://www.w3.org/2000/svg"]  # a name that no browser loads
    assert re.findall(r"(?:src|href)\s*=\s*[\"']?([^:\"']*)", HTML) == ["data"]
    assert not re.search(r"@import|url\(|import\(|\bimport\b.*\bfrom\b", HTML)


def test_the_page_makes_no_html_of_texts():
    ways = (
        "innerHTML outerHTML insertAdjacentHTML document.write createContextualFragment DOMParser setHTML srcdoc eval("
    )
    assert [way for way in [*ways.split(), "new Function"] if way in HTML] == []
    assert not re.search(r"<[^>]*\son\w+\s*=", HTML.partition("<script>")[0])


def test_without_its_file_there_is_no_page(monkeypatch, tmp_path):
    monkeypatch.setattr(http_server, "__file__", str(tmp_path / "http_server.py"))
    assert get("/").status == 404 and get("/metrics").status == 401


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colors_have_the_contrast_of_wcag():
    """4.5 for texts, https://www.w3.org/TR/WCAG22/#contrast-minimum; in light and in dark."""
    names = ["page", "raised", "quiet", "text", "faint", "accent", "on-accent", "alarm"]
    light, dark = ({name: re.findall(f"--{name}: (#\\w+);", HTML)[i] for name in names} for i in (0, 1))
    assert luminance(light["page"]) > 0.8 and luminance(dark["page"]) < 0.05
    on_pages = [(text, page) for text in ("text", "faint", "accent", "alarm") for page in ("page", "raised", "quiet")]
    for colors in (light, dark):
        for text, page in [*on_pages, ("on-accent", "accent")]:
            low, high = sorted((luminance(colors[text]), luminance(colors[page])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, page)
