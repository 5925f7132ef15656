"""Whatever bytes a client sends: no answer is a 5xx, nothing is printed but single lines, and nobody else notices.

Against a real server over real sockets. Beside each test, a client with good requests compares its answers with what
the engine gives alone.
"""

import asyncio
import errno
import json
import os
import re
import socket
import struct
import threading
import time
from contextlib import closing, contextmanager, suppress
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import FIXTURES, LONG, OPTIONS, PATIENCE_S, Server, log_lines, prompt_ids, running, wait_for
from uvicorn.server import ServerState

from engine import Request
from server.api import Choice, CompletionRequest
from server.connections import LINGER_S, MAX_HEAD_BYTES, HttpConnection, HttpServer
from server.engine_client import EngineClient
from server.http_server import respond
from server.pipe_messages import TextRequest, Update
from server.request_fields import MAX_BODY_BYTES, NEUTRAL_VALUES

LENGTH = 256  # of the context: short, so that a request without max_tokens ends soon
HOST = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /version HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"  # after which the server closes
GOOD = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}


def descriptors(server: Server) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in server.processes())


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    """Without a key, so that hosts and origins are looked at."""
    log = tmp_path_factory.mktemp("log") / "fuzz.txt"
    arguments = ["--checkpoint_path", checkpoints[None], "--max_seq_length", LENGTH, "--max_queue", 200, *OPTIONS]
    with running(log, *arguments) as server:
        wait_for(lambda: server.health() == (200, "ready"), "the server to be ready")
        before = descriptors(server), server.metric("tasks")
        yield server
        wait_for(server.idle, "all rows to be free")
        wait_for(lambda: (descriptors(server), server.metric("tasks")) <= before, "connections and tasks to end")
        assert server.health() == (200, "ready")
        lines = [line for line in log_lines(log.read_text()) if "which is ignored" not in line]
        lines = [line for line in lines if "is not enforced in full" not in line]
        assert len(lines) == 1 and lines[0].startswith("serving "), lines


@pytest.fixture(scope="module")
def good_requests(oracle):
    """(body, the text that answers it) of some requests."""
    bodies = [{"prompt": prompt_ids(n, n), "max_tokens": 12, "temperature": 0} for n in (3, 20, 45)]
    return [(body, oracle.text(body["prompt"], 12)) for body in bodies]


@pytest.fixture(autouse=True)
def good_requests_beside(server, good_requests):
    """A client whose answers are compared while the test runs."""
    found, done = [], threading.Event()

    def work():
        while not found or not done.is_set():
            for body, text in good_requests:
                status, answer = server.request("POST", "/v1/completions", body)
                found.append(status == 200 and json.loads(answer)["choices"][0]["text"] == text or (status, answer))
            done.wait(0.1)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    done.set()
    thread.join()
    assert len(found) >= 3 and all(right is True for right in found), [one for one in found if one is not True][:3]


# ---------------------------------------------------------------- what a client sends


def request(method=b"POST", path=b"/v1/completions", head=b"", body=None, length=None, host=HOST) -> bytes:
    body = json.dumps(GOOD).encode() if body is None else body
    length = b"%d" % len(body) if length is None else length
    return b"%b %b HTTP/1.1\r\n%b%bContent-Length: %b\r\n\r\n%b" % (method, path, host, head, length, body)


def absolute(target: bytes, head=HOST) -> bytes:
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (target, head)


def chunked(body: bytes, method=b"POST", path=b"/v1/completions") -> bytes:
    return b"%b %b HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n%b" % (method, path, HOST, body)


def chunks(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


def talk(server: Server, *pieces: bytes, how="read", seconds=PATIENCE_S) -> bytes:
    """What a server answers to bytes that are sent piece by piece. how: "read" until the server closes the connection,
    or for this many seconds; or "half": say first that nothing more will come; or leave by "close" or "reset"."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)) as client:
        with suppress(OSError):  # the server may have had enough already
            for i, piece in enumerate(pieces):
                time.sleep(0.005 * (i > 0))
                client.sendall(piece)
            if how == "half":
                client.shutdown(socket.SHUT_WR)
        answer, end = b"", time.monotonic() + seconds
        with suppress(ConnectionError, TimeoutError):
            while how in ("read", "half"):
                client.settimeout(max(0.001, end - time.monotonic()))
                if not (data := client.recv(1 << 16)):
                    break
                answer += data
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return answer


def head(size: int, kind: str) -> bytes:
    """A GET request of exactly this many bytes: one long header, many short ones, a long query or a long path."""
    if kind == "headers":
        line = b"X-Name: value\r\n"
        start = b"GET /version HTTP/1.1\r\n" + HOST + line * ((size - 70) // len(line))
        return start + b"Y: " + b"y" * (size - len(start) - 7) + b"\r\n\r\n"
    before, after = {
        "header": (b"GET /version HTTP/1.1\r\nX: ", b"\r\n" + HOST + b"\r\n"),
        "query": (b"GET /version?", b" HTTP/1.1\r\n" + HOST + b"\r\n"),
        "path": (b"GET /v1/models/", b" HTTP/1.1\r\n" + HOST + b"\r\n"),
    }[kind]
    return before + b"y" * (size - len(before) - len(after)) + after


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"(?:^|(?<=[}\n]))HTTP/1\.1 (\d{3})", answer)]


def check_answer(status: int, answer: bytes):
    """It is a good one, or OpenAI's or Anthropic's error object, and not the server's fault."""
    assert status < 500 and b"server_error" not in answer and b"api_error" not in answer, (status, answer)
    if status >= 400:
        error = json.loads(answer)["error"]
        assert error["type"] == "invalid_request_error" or (error.keys(), status) == ({"message", "type"}, 404)
        assert error.keys() in ({"message", "type", "param", "code"}, {"message", "type"})
        assert 0 < len(error["message"]) <= 500


# ---------------------------------------------------------------- bodies

# Of each path that reads a body: its fields, as JSON
FIELDS = json.loads((ROOT / "tests" / "data" / "fields.json").read_text())
NEEDED = {"prompt", "messages", "input", "tokens", "max_tokens", "max_output_tokens"}

STRANGE = ["null", "true", "false", "0", "-0", "-1", "0.0", "-0.5", "1e999", "-1e999", "1e-999", "NaN", "-Infinity"]
STRANGE += ["Infinity", str(2**31), str(2**63), str(-(2**63) - 1), str(10**400), "9" * 5000, '""', '"\\u0000"']
STRANGE += ['"\\ud800"', '"a\\udfffb"', '"\ufffe\U0010ffff"', "[]", "[[]]", "{}", "[null]", "[[5], 6]", '["a", 5]']
STRANGE += ["[5, -1]", "[700]", f"[{2**63}]", f"[{10**400}]", "[1e999]", "[true]", '[{"role": "user"}]', "[" * 300]
STRANGE += ["[" * 900 + "]" * 900, "[" * 9000 + "]" * 9000, '{"a":' * 400 + "1" + "}" * 400, '"' + "x" * 3000 + '"']
STRANGE += [json.dumps(["ab"] * 200), json.dumps([5] * (LENGTH + 1)), json.dumps([[5]] * 129), "'x'", "", "01", "+1"]
STRANGE += ['[{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]', '"\t"', "1,", "}"]
STRANGE += ['[{"role": ["user"], "content": {}}]', '[{"role": "user", "content": "\\ud83d"}]', '{"role": "user"}']
STRANGE += [
    '[{"role": "assistant", "content": [{"type": "thinking", "thinking": {}}]}]',
    '{"type": "text", "schema": 1}',
]
STRANGE += ['[{"role": "function", "name": "f", "content": null}]', '[{"role": "assistant", "function_call": [1]}]']
STRANGE += ['[{"role": "user", "content": "x", "": 1, "\\ud800": [], "role2": {}}]', '{"type": [], "format": {}}']
STRANGE += ['[{"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": [1]}}]}]']
STRANGE += ['{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [[]]}}', '[[7, 1], ["a", 2]]']
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
NESTED = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
VALUES = st.sampled_from(STRANGE) | NESTED.map(json.dumps)


def written(fields: list[tuple[str, str]]) -> bytes:
    """A JSON object of (name, value as JSON); names may come twice."""
    return "{{{}}}".format(", ".join(f"{json.dumps(name)}: {value}" for name, value in fields)).encode()


@st.composite
def bodies(draw) -> tuple[str, bytes]:
    """(path, body): a good one with strange values, further fields, fields that are missing or come twice, or with
    other bytes in between."""
    path = draw(st.sampled_from(sorted(FIELDS)))
    good = FIELDS[path]
    names = [name for name in good if name in NEEDED or draw(st.integers(0, 4)) == 0]
    fields = [(name, good[name]) for name in names]
    others = st.sampled_from(sorted(good)) | st.sampled_from(sorted(NEUTRAL_VALUES)) | st.text(max_size=6)
    fields += draw(st.lists(st.tuples(others, VALUES), max_size=3))
    body = written(draw(st.permutations(fields)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(max_size=3)) + body[at + draw(st.integers(0, 3)) :]
    return path, draw(st.sampled_from([body, body, body, body, body[: len(body) // 2], b"\xef\xbb\xbf" + body]))


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=FIXTURES)
@given(sent=bodies())
def test_strange_bodies(server, sent):
    path, body = sent
    check_answer(*server.request("POST", path, body))


@pytest.mark.slow
def test_every_field_with_strange_values(server):
    """One connection for all of a path, which no answer ends."""
    for path, good in FIELDS.items():
        needed = [(name, good[name]) for name in good if name in NEEDED]
        values = STRANGE[:: 3 if len(good) > 9 else 1]
        sent = [written([*needed, (name, value)]) for name, value in product(good, values)]
        pieces = [request(path=path.encode(), body=body) for body in sent]
        found = statuses(talk(server, *(b"".join(pieces[i : i + 20]) for i in range(0, len(pieces), 20)), LAST))
        assert len(found) == len(pieces) + 1 and set(found) <= {200, 400, 404}, (path, set(found))


# ---------------------------------------------------------------- HTTP

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "X!#$%"]
PATHS = [*FIELDS, "/tokenizer_info", "/v1/models", "/v1/models/tiny", "/version", "/health", "/metrics", "/", "*"]
PATHS += ["/nowhere", "/health/", "//[", "/..", "/%ff%00%e2%82%ac%0d%0aX", "/v1/models/%ff%00/%ed%a0%80", "http://[/x"]
PATHS += ["http://localhost/health", "https://user:pw@[::1]:99999/v1?x=[#", "localhost:80", "/health?%ff&&&=", "?", "#"]


@pytest.mark.slow
def test_every_path_with_every_method(server):
    for method, path in product(METHODS, PATHS):
        answer = talk(server, request(method.encode(), path.encode(), head=b"Connection: close\r\n"))
        (status,) = statuses(answer)
        assert status == 200 or (method, path) != ("POST", "/v1/completions")
        assert status in (200, 400, 404, 405), (method, path, answer)


BODY = json.dumps(GOOD).encode()
CLOSE = b"Connection: close\r\n"
KINDS = ["header", "headers", "query", "path"]
CASES = [  # (what is sent, the statuses of the answers before the connection is closed)
    ([request(), HEALTH, request() + HEALTH + LAST], [200] * 5),
    ([request(path=b"/nowhere"), LAST], [404, 200]),  # whose body is dropped
    ([b"GET /health HTTP/1.0\r\n\r\n"], [200]),
    ([b"GET /health HTTP/1.1\r\n\r\n"], [400]),  # no host
    ([request(host=b"Host: [::1]:x\r\nHost: y\r\n")], [400]),
    ([request(host=b"Host: evil.example\r\n") + LAST], [403, 200]),
    ([request(head=b"Origin: http://\xff\xfe\r\n") + LAST], [403, 200]),
    ([b"GET /health\r\n\r\n"], [400]),  # HTTP/0.9
    ([b"GET /health HTTP/9.9\r\n" + HOST + b"\r\n", LAST], [200, 200]),
    ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"], [404, 400]),  # how HTTP/2 begins
    ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200], [400]),  # and TLS
    ([b"\0" * 5000], [400]), ([b"\r\n\r\n" + HEALTH], [400]), ([b"G\xffT / HTTP/1.1\r\n" + HOST + b"\r\n"], [400]),
    ([b"GET /health HTTP/1.1\r\nX: a\0b\r\n" + HOST + b"\r\n"], [400]),
    ([b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", LAST], [404, 200]),
    ([request(head=b"Connection: Upgrade\r\nUpgrade: websocket\r\n"), LAST], [200, 200]),
    ([request(head=b"Expect: 100-continue\r\n", body=b"", length=b"%d" % len(BODY)), BODY, LAST], [100, 200, 200]),
    ([chunked(chunks(BODY, 1)), LAST], [200, 200]),
    ([chunked(chunks(BODY, 7)[:-2] + b"X: y\r\n\r\n"), LAST], [200, 200]),
    ([chunked(b"zz\r\n")], [400]), ([chunked(b"5\r\nabcdefgh\r\n0\r\n\r\n")], [400]), ([chunked(b"-1\r\n")], [400]),
    ([chunked(b"f" * 24 + b"\r\nabc")], [400]), ([chunked(b"5\r\nabcde\r\n"), b"zz\r\n"], [400]),
    ([chunked(b"5;" + b"x" * 50000)], [431]),
    ([chunked(b"zz\r\n", path=b"/nowhere")], [400]), ([chunked(b"zz\r\n", b"GET", b"/health")], [400]),  # not read
    ([chunked(b"5\r\nabcde\r\n", path=b"/nowhere"), b"zz\r\n"], [404]),
    ([request(length=b"3\r\nContent-Length: %d" % len(BODY))], [400]), ([request(length=b"3, 4")], [400]),
    ([request(length=b"-1")], [400]), ([request(length=b"9" * 30)], [400]), ([request(length=b"0x10")], [400]),
    ([request(length=b"%d" % (len(BODY) - 1)) + b"\r\n\r\n"], [400, 400]),
    # Two lengths: a proxy may see one request where the server sees two (request smuggling).
    ([request(head=b"Transfer-Encoding: chunked\r\n", body=chunks(BODY, 9)), LAST], [400]),
    ([request(head=b"Transfer-Encoding: chunked\r\n", length=b"5", body=b"0\r\n\r\n" + HEALTH)], [400]),
    ([HEALTH + chunked(b"0\r\n\r\n").replace(HOST, HOST + b"Content-Length: 5\r\n") + LAST], [200, 400]),
    # Absolute targets, whose host replaces Host (so that it is checked)
    ([request(path=b"http://localhost:80/v1/completions"), LAST], [200, 200]),
    ([absolute(b"HTTP://[::1]:5/v1/models?a=b/c") + LAST], [200, 200]),
    ([absolute(b"http://evil.example/v1/models") + LAST], [403, 200]),
    ([absolute(b"http://localhost/version", b"Host: evil.example\r\n") + LAST], [200, 200]),
    ([absolute(b"http://localhost/version", b"")], [400]),
    ([request(head=b"Transfer-Encoding: gzip, chunked\r\n")], [501]),
    ([request(body=b" " * (MAX_BODY_BYTES + 1)), LAST], [413, 200]),
    ([request(body=b" " * MAX_BODY_BYTES), LAST], [400, 200]),
    ([request(body=b" " * (MAX_BODY_BYTES + 1), head=CLOSE), LAST], [413]),
    ([chunked(chunks(b" " * (MAX_BODY_BYTES + 1), 1 << 16)), LAST], [413, 200]),
    # Refused before the body comes, which never does.
    ([HEALTH, request(length=b"99999999", body=b"", head=CLOSE)], [200, 413]),
    ([request(length=b"9" * 20, head=CLOSE)], [413]), ([request(length=b"00099999999", head=CLOSE)], [413]),
    ([request(length=b"%d" % (10 * MAX_BODY_BYTES + 1), path=b"/tokenize", head=CLOSE)], [413]),
    ([request(length=b"99999999", body=b"", head=CLOSE + b"Expect: 100-continue\r\n")], [413]),
    ([request(length=b"%d" % (MAX_BODY_BYTES + 1), body=b"", head=CLOSE + b"Expect: 100-continue\r\n")], [413]),
    ([request(length=b"+5")], [400]), ([request(length=b"1_0")], [400]), ([request(length=b"")], [400]),
    ([request(length=b"99999999\r\nContent-Length: 3")], [400]), ([request(length=b"99999999, 3")], [400]),
    ([b"GET /health HTTP/1.1\r\n" + HOST + b"".join(b"X-%d: y\r\n" % i for i in range(5000)) + b"\r\n"], [431]),
    ([b"GET /" + b"y" * 10**7], [431]),  # is heard out for a moment, so that its client reads the answer
    *(([head(MAX_HEAD_BYTES, kind), LAST], [404 if kind == "path" else 200, 200]) for kind in KINDS),
    *(([head(MAX_HEAD_BYTES + 1, kind), LAST], [431]) for kind in KINDS),
    *(([HEALTH * 3 + head(size, kind) + LAST], [200, 200, 200, 431]) for kind in KINDS for size in (17001, 40002)),
    *(([head(20003, kind)[i : i + 4000] for i in range(0, 20003, 4000)], [431]) for kind in KINDS),
    ([request(path=b"/tokenize?" + b"y" * 17000)], [431]), ([head(17004, "query")[:-2]], [431]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10))
def test_http(server, start):
    """Errors are error objects, too. Every tenth case."""
    for pieces, expected in CASES[start::10]:
        answer, said = talk(server, *pieces), (b"".join(pieces)[:200], expected)
        assert statuses(answer) == expected, said
        assert answer.count(b'{"error": {"message": "') == sum(status >= 400 for status in expected), said
        if len(pieces) > 1 and expected != [404]:
            assert statuses(talk(server, b"".join(pieces))) == expected, said


@pytest.mark.slow
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_a_body_that_is_too_long_is_refused_before_it_comes(server, expect):
    """A client may send it nevertheless, and then its next request."""
    length = 11 * MAX_BODY_BYTES + 7
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)) as client:
        client.sendall(request(length=b"%d" % length, head=expect, body=b""))
        answer = b""
        while b"}}" not in answer:
            answer += client.recv(1 << 16)
        assert statuses(answer) == [413] and b"Connection: close" not in answer
        assert b'"code": "request_too_large"' in answer and b"the body has more than 1048576 bytes" in answer
        client.sendall(b" " * length + HEALTH + LAST)
        assert statuses(client.makefile("rb").read()) == [200, 200]
    status, answer = server.request("POST", "/v1/messages", b" " * length)
    assert status == 413 and json.loads(answer)["error"]["type"] == "request_too_large"  # as Anthropic has it


@pytest.mark.full
@pytest.mark.parametrize("sent", [head(16385, "header"), b"\0"])
def test_refused_connections_are_closed_when_their_clients_have_become_silent(server, sent):
    """Not before: what a client sends would reset the connection, and the client would not get the response."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)) as client:
        client.sendall(sent)
        for _ in range(2 * LINGER_S):
            time.sleep(0.7)
            client.sendall(b"x" * 1000)
        assert statuses(client.recv(1 << 16)) == [431 if len(sent) > 1 else 400]
        assert client.recv(1 << 16) == b""


@pytest.mark.slow
def test_pipelined_requests_are_answered_in_order(server, oracle):
    prompts = [prompt_ids(n, n) for n in (30, 3, 17, 8)]
    sent = [request(body=json.dumps({"prompt": p, "max_tokens": 9, "temperature": 0}).encode()) for p in prompts]
    answer = talk(server, b"".join(sent) + HEALTH * 50 + LAST)
    found = [json.loads(data)["choices"][0]["text"] for data in re.findall(rb'\{"id": .*?\}\}\}', answer)]
    assert found == [oracle.text(prompt, 9) for prompt in prompts]
    assert statuses(answer) == [200] * 55 and answer.count(b'{"status": "ready"}') == 50


PARTS = [request(), HEALTH, LAST, HEALTH * 3, chunked(chunks(BODY, 9)), request(path=b"/nowhere"), HOST, b"\r\n", BODY]
PARTS += [request(b"GET", b"/health"), request(head=b"Expect: 100-continue\r\n"), b"POST /tokenize HTTP/1.1\r\n"]
PARTS += [b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"0\r\n\r\n", b"5\r\nabcde\r\n", b"\r\n\r\n"]
PARTS += [request(length=b"99999999"), request(length=b"2000000", head=CLOSE), head(17000, "header")]
PARTS += [request(head=CLOSE), request(body=json.dumps(GOOD | {"stream": True}).encode()), b"\0\xff"]


@st.composite
def conversations(draw) -> tuple[list[bytes], str]:
    """What a client sends, in pieces that end anywhere, some with other bytes in between; and how it leaves."""
    data = b"".join(draw(st.lists(st.sampled_from(PARTS) | st.sampled_from(PARTS[:4]), min_size=1, max_size=5)))
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 4)) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
    return [piece for piece in pieces if piece], draw(st.sampled_from(["read", "half", "close", "reset"]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
@given(conversation=conversations())
def test_strange_conversations(server, conversation):
    pieces, how = conversation
    answer = talk(server, *pieces, how=how, seconds=0.1)
    assert all(status < 500 or status == 501 for status in statuses(answer)), answer
    assert b"server_error" not in answer


# ---------------------------------------------------------------- others do not wait


@contextmanager
def counting_health(server: Server):
    """A list that grows by one for each answer of /health meanwhile."""
    found, done = [], threading.Event()

    def work():
        while not done.is_set():
            found.append(server.health())

    thread = threading.Thread(target=work)
    thread.start()
    yield found
    done.set()
    thread.join()


@pytest.mark.slow
def test_others_are_answered_while_a_body_of_tiny_chunks_is_read(server):
    """Parsing it takes seconds."""
    for path in (b"/v1/completions", b"/nowhere"):
        with counting_health(server) as answers:
            talk(server, chunked(chunks(b" " * 50000 + BODY, 1), path=path), LAST)
        assert len(answers) > 3, answers  # all at once, there would be one before and one after


@pytest.mark.slow
def test_a_client_that_has_sent_its_next_request_frees_its_row(server):
    """Its connection is still looked at."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)) as client:
        asked = server.metric("requests_unfinished")
        body = json.dumps(LONG | {"prompt": [[5]] * 8, "max_tokens": LENGTH - 3}).encode()
        client.sendall(request(body=body))
        wait_for(lambda: server.metric("requests_unfinished") >= asked + 8, "the requests to be known")
        client.sendall(HEALTH * 3)
        time.sleep(0.05)
    read = server.metric("tokens_written_total")
    wait_for(server.idle, "all rows to be free")
    assert server.metric("tokens_written_total") < read + 8 * (LENGTH - 3), "its requests went on"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_written_in_a_thread(stream):
    """Many log-probabilities take a second, in which others are answered. Those of a prompt begin a stream."""

    async def written() -> bytes:
        others, sent = threading.Event(), []
        asyncio.get_running_loop().call_later(0.01, others.set)
        completion = CompletionRequest("cmpl-1", [Choice(0, TextRequest(0, Request([5])))], stream=stream)
        builder = SimpleNamespace(completion=completion, whole=lambda: others.wait(PATIENCE_S), stream_end=bytes)
        builder.stream_update = lambda choice, update: json.dumps(builder.whole()).encode()
        engine = EngineClient(SimpleNamespace(send=lambda message: None), 1, 0)
        updates = engine.generate(completion, asyncio.Event().wait)
        updates.put([Update(0, "", 1, finish_reason="length")])

        async def send(message):
            sent.append(message.get("body", b""))

        await (await respond(updates, builder))({"type": "http"}, None, send)
        return b"".join(sent)

    assert asyncio.run(written()) == b"true"


def test_a_reset_while_a_request_is_refused():
    """Saying that nothing more will come fails if the client has reset the connection meanwhile."""

    async def refused() -> bytes:
        connection = HttpConnection(config, ServerState(), {})
        connection.connection_made(transport)
        connection.data_received(b"\0\r\n\r\n")
        return transport.write.call_args[0][0]

    config = HttpServer(SimpleNamespace(headers=lambda request_id: [])).config
    config.load()
    transport = mock.Mock()
    transport.get_extra_info.return_value = None
    transport.write_eof.side_effect = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    assert statuses(asyncio.run(refused())) == [400] and transport.write_eof.called
