"""The server under load, at its end, with faults, and what it lets in: real processes and sockets."""

import asyncio
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import openai
import pytest
from scripted import Answer, ScriptedEngine, app_settings
from servers import (
    KEY,
    OPTIONS,
    PATIENCE_S,
    RawClient,
    ended,
    greedy_text,
    log_lines,
    longest,
    prompt_ids,
    running,
    wait_for,
)
from starlette.testclient import TestClient
from texts import TEMPLATE

from server import http_server
from server.anthropic import MessageBuilder
from server.api import Choice, CompletionRequest, ServedModel
from server.connections import BodyLimits, body_of
from server.engine_client import EngineClient
from server.http_server import make_app
from server.metrics import Metrics
from server.openai_responses import ItemBuilder
from server.pipe_messages import Cancel, TextRequest, Update
from server.request_fields import ApiError
from server.responses import ResponseBuilder
from text.tokenizer import TextStream

pytestmark = pytest.mark.slow

LIMITS = ["--dtype", "float32", "--max_batch_size", 1, "--max_queue", 2]


@pytest.fixture(scope="module")
def small(checkpoints, tmp_path_factory):
    """A server with one row and two places in its queue, without a key."""
    log = tmp_path_factory.mktemp("log") / "small.txt"
    with running(log, "--checkpoint_path", checkpoints[None], *LIMITS) as server:
        yield server
        assert "Traceback" not in log.read_text()


def answer_of(client: RawClient) -> tuple[int, str]:
    with client.socket.makefile("rb") as answer:
        text = answer.read().decode()
    client.socket.close()
    return int(text.split()[1]), text


def ask(server, prompt: list[int], new: int, **how) -> tuple[int, dict, dict]:
    """Status, headers and JSON of a greedy completion."""
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0} | how
    data = json.dumps(body).encode()
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}"
        client.sendall(f"{head}\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode() + data)
        with client.makefile("rb") as file:
            head, _, answer = file.read().partition(b"\r\n\r\n")
    headers = {name.decode().lower(): value.decode() for name, value in re.findall(rb"\n([^:\r\n]+): ([^\r\n]*)", head)}
    return int(head.split()[1]), headers, json.loads(answer)


def is_full(server):
    return server.health() == (200, "overloaded")


# ---------------------------------------------------------------- more than there is room for


def test_the_queue_is_bounded(small):
    """The next request gets 429 before anybody looks at its body, and all others go on."""
    others = longest(small, stream=True, prompt=[[5, 6, 2 + i] for i in range(100)])  # which take a minute
    wait_for(lambda: is_full(small), "full places")
    status, headers, error = ask(small, [9], 5)
    assert status == 429 and error["error"]["code"] == "overloaded"
    assert "all 1 rows are in use and the queue of 2 requests is full" in error["error"]["message"]
    assert 1 <= int(headers["retry-after"]) <= 30 and headers["x-should-retry"] == "true"
    assert small.request("POST", "/v1/completions", b"{no JSON")[0] == 429
    with small.client() as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert small.request("POST", "/tokenize", {"prompt": "x"})[0] == 200
    assert small.metric('requests_total{outcome="overloaded"}') >= 3
    others.leave(reset=False)
    wait_for(lambda: small.health() == (200, "ready"), "room")
    assert ask(small, [9], 5)[0] == 200


def test_a_flood(small, oracle):
    """Every answer is 200 or 429, and the accepted ones are right."""
    prompts = [prompt_ids(5 + i % 7, i) for i in range(60)]
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda prompt: ask(small, prompt, 8), prompts))
    statuses = [status for status, *_ in found]
    assert set(statuses) == {200, 429}
    for prompt, (status, _, answer) in zip(prompts, found):
        assert status == 429 or answer["choices"][0]["text"] == oracle.text(prompt, 8)


@pytest.fixture(scope="module")
def impatient(checkpoints, tmp_path_factory):
    """A server in whose queue a request waits 0.2 s. Its standard input is closed, and it has few descriptors."""
    log = tmp_path_factory.mktemp("log") / "impatient.txt"
    launcher = ["bash", "-c", 'ulimit -n 128; exec "$0" "$@" <&-', sys.executable]
    arguments = ["--checkpoint_path", checkpoints[None], *LIMITS, "--queue_seconds", 0.2]
    with running(log, *arguments, launcher=launcher) as server:
        yield server
    assert len(log_lines(log.read_text())) == 3  # at the start and at the end


def test_only_the_first_of_several_prompts_can_wait_for_too_long(impatient):
    """And neither closed standard streams nor more connections than descriptors are a problem."""
    others = [socket.create_connection(("127.0.0.1", impatient.port)) for _ in range(200)]
    for other in others[40:]:
        other.close()
    body = {"prompt": [[5], [6], [7], [8]], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    answer = impatient.post("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 1600
    for other in others[:40]:
        other.close()


def test_waiting_for_too_long(impatient, oracle):
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, impatient, [5, 6, 7], 1300, ignore_eos=True)
        wait_for(lambda: impatient.metric("rows_active") == 1, "a request to run")
        status, headers, error = ask(impatient, [9], 5)
        assert status == 503 and error["error"]["code"] == "queue_timeout" and int(headers["retry-after"]) >= 1
        status, _, answer = first.result()
    assert status == 200 and answer["usage"]["completion_tokens"] == 1300
    assert ask(impatient, [9], 5)[2]["choices"][0]["text"] == oracle.text([9], 5)


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("number, code, quiet", [(signal.SIGTERM, 0, False), (signal.SIGINT, 130, True)])
def test_running_requests_end_before_the_server(checkpoints, tmp_path, oracle, number, code, quiet):
    """The lines of the requests come before the last line, or not at all."""
    arguments = ["--checkpoint_path", checkpoints[None], *LIMITS, "--drain_seconds", 30.5, *["--quiet"] * quiet]
    with running(tmp_path / "log", *arguments) as server:
        http_side = server.processes()[1]
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(ask, server, [5, 6, 7 + i], 500, ignore_eos=True) for i in range(3)]
            wait_for(lambda: is_full(server), "full places")
            server.process.send_signal(number)
            wait_for(lambda: server.health() == (503, "draining"), "the server to drain")
            status, headers, error = ask(server, [9], 5)
            assert status == 503 and error["error"]["code"] == "draining" and "retry-after" in headers
            for i, pending in enumerate(answers):
                status, _, answer = pending.result()
                assert status == 200 and answer["usage"]["completion_tokens"] == 500
                assert answer["choices"][0]["text"].startswith(oracle.text([5, 6, 7 + i], 9)[:5])
        assert server.process.wait(PATIENCE_S) == code
        wait_for(lambda: ended(http_side), "the HTTP process to end")
    text = (tmp_path / "log").read_text()
    start, *end = log_lines(text)
    assert start.startswith("serving ") and text.endswith(f"\n{ENDED}\n")
    assert end == ["shutting down: waiting at most 30.5 s for requests to finish", ENDED]
    found = [line.split()[3].rstrip(":") for line in text.splitlines() if line.startswith("req_")]
    assert found == ([] if quiet else ["503", "200", "200", "200"])


ENDED = "the server has ended"


def test_an_end_that_waits_no_longer(checkpoints, tmp_path):
    """A stream ends with an error event, a whole answer is 503, also to a body that is still coming, and the exit code
    is 0."""
    arguments = ["--checkpoint_path", checkpoints[None], *LIMITS, "--drain_seconds", 0.2]
    with running(tmp_path / "log", *arguments) as server:
        stream, whole = longest(server, stream=True), longest(server, stream=False)
        assert stream.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
        wait_for(lambda: server.metric("requests_waiting") == 1, "a request to wait")
        sending = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
        sending.sendall(head + b'{"prompt"')
        server.health()  # which comes after it
        assert server.stop() == 0
        with closing(sending), sending.makefile("rb") as answer:
            text = answer.read()
        assert text.startswith(b"HTTP/1.1 503") and b'"error": {"message": "the server is shutting down"' in text
        with stream.socket.makefile("rb") as rest:
            assert '{"error": {"message": "the server shut down before the response' in rest.read().decode()
        assert answer_of(whole)[0] == 503
        stream.socket.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.full
def test_an_end_beside_a_client_that_does_not_read(checkpoints, tmp_path):
    arguments = ["--checkpoint_path", checkpoints[None], *LIMITS, "--drain_seconds", 3]
    with running(tmp_path / "log", *arguments) as server:
        client = longest(server, stream=True, prompt=[5], logprobs=20)
        wait_for(lambda: server.metric("rows_active") == 1, "a request to run")
        wait_for(lambda: server.metric("rows_active") == 0, "more text than the buffers hold")
        start = time.monotonic()
        assert server.stop() == 0
        assert 2 < time.monotonic() - start < 20, "it waits for those who read, and no longer than it should"
        client.socket.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


# ---------------------------------------------------------------- a line for each request

ANSWERED = r": (\d+) prompt tokens \((\d+) reused\), (\d+) new, first after (\d+\.\d\d) s, (\d+\.\d) tokens/s, (\w+)"


def line_of(server, name: str) -> str:
    """What the log says of a request after its id."""
    line = rf"^{name} (.*)\n"
    return wait_for(lambda: re.search(line, server.log.read_text(), re.M), "the line of a request")[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_has_the_numbers_of_the_answer(small, stream):
    wait_for(lambda: small.health() == (200, "ready"), "the server to be ready")
    prompt = prompt_ids(40, 77 + stream)
    body = {"prompt": prompt, "max_tokens": 200, "n": 2, "stream": stream, "ignore_eos": True}
    for reused in (0, 32):
        with closing(http.client.HTTPConnection("127.0.0.1", small.port, timeout=PATIENCE_S)) as client:
            start = time.monotonic()
            client.request("POST", "/v1/completions", json.dumps(body))
            answer = client.getresponse()
            answer.read()
            seconds = time.monotonic() - start
        found = re.fullmatch(rf"POST /v1/completions 200{ANSWERED}", line_of(small, answer.headers["x-request-id"]))
        assert found[1] == "40" and int(found[2]) >= reused and found[3] == "400" and found[6] == "length"
        # The 399 tokens after the first take the rest of the time.
        assert abs(float(found[4]) + 399 / float(found[5]) - seconds) < 0.1 * seconds + 0.1


def test_the_times_in_a_line_are_those_of_the_engine(monkeypatch):
    """Not those of a client that reads slowly. Two answers to one prompt make 7 tokens, 6 of them in 4 s."""
    request = SimpleNamespace(request_id=0, request=SimpleNamespace(prompt=[5] * 9))
    completion = CompletionRequest("a", [Choice(0, request), Choice(1, request)], n=2)
    clock = SimpleNamespace()
    monkeypatch.setattr("server.metrics.time", clock)
    metrics = Metrics()
    for index, seconds, tokens, reason in (
        (0, 11.5, 1, None), (1, 12, 1, None), (0, 13, 3, "stop"), (1, 15.5, 4, "length"),
    ):  # fmt: skip
        clock.perf_counter = lambda seconds=seconds: seconds
        choice, update = completion.choices[index], Update(0, "", tokens, 8, finish_reason=reason)
        metrics.record_update(choice, update)
        choice.updates.append(update)
    numbers = ": 9 prompt tokens (8 reused), 7 new, first after 1.50 s, 1.5 tokens/s, length/stop"
    assert completion.summary(arrived_at=10) == numbers


def test_a_line_for_each_request_that_fails(small):
    text = "do not tell"
    for method, path, body, shown in (
        ("POST", "/v1/chat/completions?key=secret", {"messages": [{"role": text}]}, "/v1/chat/completions 400"),
        ("POST", "/v1/completions", {"prompt": text, "temperature": text}, "/v1/completions 400"),
        ("GET", "/v1/completions", None, "/v1/completions 405"),
        ("GET", "/a%0Ab%1B[31m%20200%FF", None, "/a%0Ab%1B[31m%20200%FF 404"),
        ("GET", "/v1/models/another?api_key=secret", None, "/v1/models/another 404"),
        ("POST", "/tokenize", b" " * (1 << 21), "/tokenize 413"),
    ):
        before = small.log.read_text()
        assert str(small.request(method, path, body)[0]) == shown[-3:]
        line = wait_for(lambda: small.log.read_text()[len(before) :], "a line")  # noqa: B023
        assert re.fullmatch(rf"req_\w{{16}} {method} {re.escape(shown)}\n", line)
    with closing(socket.create_connection(("127.0.0.1", small.port), timeout=PATIENCE_S)) as client:
        client.sendall(b"\0\r\n\r\n")
        name = re.search(rb"x-request-id: (\w+)", client.recv(4096))[1].decode()
    assert line_of(small, name) == "? ? 400"
    assert text not in small.log.read_text() and "secret" not in small.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_for_a_client_that_leaves(small, stream):
    before = small.log.read_text()
    client = longest(small, stream=stream, prompt=[7, 8, 9])
    wait_for(lambda: small.metric("rows_active") == 1, "a request to run")
    if stream:
        assert client.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
    client.leave(reset=False)
    wait_for(small.idle, "the row to be free")
    line = wait_for(lambda: small.log.read_text()[len(before) :], "the line")
    numbers = r": 3 prompt tokens \(\d reused\), \d+ new(, first after .* s, .* tokens/s)?, unfinished"
    assert re.fullmatch(rf"req_\w{{16}} POST /v1/completions cancelled{numbers}\n", line)


def test_no_line_for_programs_that_watch_the_server_and_for_the_page(checkpoints, capsys):
    """Also while the server is not ready. The page's chats have lines."""
    app = InProcess(checkpoints[None], quiet=False)
    app.updates = [Update(0, "Be", 1, 4), Update(0, "cause.", 2, 4, finish_reason="stop")]
    by_page = {"Sec-Fetch-Site": "same-origin"}
    for path, headers in (("/health", {}), ("/metrics", {}), ("/v1/models", by_page), ("/tokenizer_info", by_page)):
        assert app.client.get(path, headers=headers).status_code == 200
    assert capsys.readouterr().err == ""

    name = app.client.get("/v1/models").headers["x-request-id"]
    assert capsys.readouterr().err == f"{name} GET /v1/models 200\n"
    app.client.headers.update(by_page)
    answered = app.chat(CHATS[0], True).headers["x-request-id"]
    app.engine.state = "broken"
    assert app.client.get("/health").status_code == 503
    app.engine.state, app.engine.parsing = "ready", 2
    refused = app.chat(CHATS[0]).headers["x-request-id"]
    first, last = capsys.readouterr().err.splitlines()
    assert last == f"{refused} POST /v1/chat/completions 429"
    found = re.fullmatch(rf"{answered} POST /v1/chat/completions 200{ANSWERED}", first)
    assert found[2] == "4" and found[3] == "2" and found[6] == "stop"


# ---------------------------------------------------------------- paths of other base URLs and of other APIs


def test_a_base_url_without_v1(small, oracle):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{small.port}", api_key="x", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]
        answer = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=9, temperature=0)
        assert answer.choices[0].text == oracle.text([5, 6], 9)
        said = client.responses.create(model="tiny", input="Why?", max_output_tokens=5, temperature=0)
        assert client.responses.retrieve(said.id).output_text == said.output_text
    body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 5, "temperature": 0}
    assert small.post("/messages", body)["content"] == small.post("/v1/messages", body)["content"]
    assert small.post("/chat/completions", body)["choices"] == small.post("/v1/chat/completions", body)["choices"]


def test_paths_of_other_apis(checkpoints):
    """The answer says what is not offered, and what is."""
    client = InProcess(checkpoints[None]).client
    for path, what in (
        ("/api/chat", "Ollama's API"), ("/embedding", "llama.cpp's own API"), ("/embed", "TEI's own API"),
        ("/v1/audio/speech", "speech and transcription"), ("/completion", "llama.cpp's own API"),
        ("/v1beta/models/a:generateContent", "Gemini's API"), ("/v1/nothing", "this path"), ("/v1", "this path"),
        ("/" + "x" * 9000, "this path"),
    ):  # fmt: skip
        for method in ("GET", "POST"):
            response = client.request(method, path)
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "not_found")
            offered = "/v1/completions, /v1/chat/completions, /v1/embeddings, /tokenize, /detokenize, /v1/messages, "
            offered += "/v1/messages/count_tokens, /v1/responses and /v1/models are"
            told = f"{method} {path[:100]}: Not Found; {what} is not offered; {offered}"
            assert error["message"] == told


# ---------------------------------------------------------------- faults


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs(checkpoints, tmp_path, number):
    """Those who wait hear of it, and the server ends."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with running(tmp_path / "log", "--checkpoint_path", checkpoints[None], *OPTIONS, launcher=launcher) as server:
        client = longest(server, stream=True)
        assert client.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
        workers = subprocess.run(["pgrep", "-P", str(server.process.pid), "-f", "serve.py"], capture_output=True)
        victims = [int(pid) for pid in workers.stdout.split() if rank_of(int(pid)) == 1]
        os.kill(victims[0], number)
        with client.socket.makefile("rb") as rest:
            assert '{"error": {"message": "the engine has stopped"' in rest.read().decode()
        client.socket.close()
        with pytest.raises(OSError):
            wait_for(lambda: server.health()[0] == 200, "what must not be", 1)
        if number == signal.SIGSTOP:
            os.kill(victims[0], signal.SIGKILL)  # torchrun would do so after 30 s
        assert server.process.wait(PATIENCE_S) != 0
        wait_for(lambda: ended(victims[0]), "the rank to end")


@pytest.mark.full
def test_an_engine_that_hangs(checkpoints, tmp_path, oracle):
    """Those who wait hear of it; when the engine goes on, so does the server."""
    with running(tmp_path / "log", "--checkpoint_path", checkpoints[None], *LIMITS) as server:
        stream, whole = longest(server, stream=True), longest(server, stream=False)
        assert stream.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: server.health() == (503, "broken"), "the health to be bad", 10)
        for client in (stream, whole):
            text = b""
            while b'"the engine has stopped"' not in text:
                assert (new := client.socket.recv(1 << 16))
                text += new
            client.socket.close()
        assert ask(server, [9], 5)[0] == 503
        server.process.send_signal(signal.SIGCONT)
        wait_for(server.idle, "all rows to be free")
        assert server.health() == (200, "ready")
        assert ask(server, [9], 5)[2]["choices"][0]["text"] == oracle.text([9], 5)


def rank_of(pid: int) -> int:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return int(re.search(rb"(?:^|\0)RANK=(\d+)", file.read()).group(1))


# Runs serve.py with a model that gives NaN after token 13.
FAULTY = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
import model
forward = model.Transformer.forward

def faulty_forward(self, tokens, input_pos, rows=None):
    logits = forward(self, tokens, input_pos, rows)
    logits[(tokens == 13).any(1)] = float("nan")
    return logits

model.Transformer.forward = faulty_forward
if __name__ == "__main__":
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_request_that_fails_alone(checkpoints, tmp_path, oracle):
    """NaN in the logits of one row."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    launcher = [sys.executable, str(tmp_path / "faulty.py")]
    with running(tmp_path / "log", "--checkpoint_path", checkpoints[None], *OPTIONS, launcher=launcher) as server:
        prompts = [[i, j] for i in range(20, 60) for j in range(20, 60)]
        runs = (oracle.run(prompt, 400) for prompt in prompts)
        other = next(run for run in runs if not {1, 13} & set(run.new_tokens)).prompt
        ids = []
        with ThreadPoolExecutor() as pool:
            beside = pool.submit(greedy_text, server, other, 400)
            for prompt in ([5, 13], [5, 6, 13]):
                status, headers, error = ask(server, prompt, 5)
                ids.append(headers["x-request-id"])
                assert status == 500 and error["error"]["message"] == f"generation failed for this request ({ids[-1]})"
            assert beside.result() == oracle.text(other, 400)
        assert server.metric("rows_active") == 0
    lines = (tmp_path / "log").read_text()
    assert f"a request failed: the model's logits are not finite ({ids[0]})\n" in lines and "Traceback" not in lines


class Panic(BaseException):
    """As a library in Rust raises it: not an Exception."""


class InProcess:
    """The app in this process. Its engine sends `updates` for each request."""

    def __init__(self, directory, key=None, quiet=True):
        settings = replace(app_settings(directory, TEMPLATE, key), quiet=quiet)
        self.updates: list[Update] = []
        self.engine = EngineClient(SimpleNamespace(send=self.send), 1, 1)
        self.engine.state, self.engine.last_heard = "ready", math.inf
        self.client = TestClient(make_app(settings, self.engine, "127.0.0.1"), "http://localhost", False)

    def send(self, message):
        if isinstance(message, TextRequest):
            loop = self.engine.receivers[message.request_id].watcher.get_loop()
            for update in self.updates:
                update = replace(update, request_id=message.request_id)
                loop.call_soon_threadsafe(self.engine._distribute, [update])

    def chat(self, path: str, stream: bool = False):
        messages = [{"role": "user", "content": "Why?"}]
        name = "input" if path == "/v1/responses" else "messages"
        return self.client.post(path, json={name: messages, "max_tokens": 9, "stream": stream})


def fails(failure: BaseException, calls: int = 0):
    """A function that fails after this many calls."""
    left = [b"data: {}\n\n"] * calls

    def work(*arguments):
        if not left:
            raise failure
        return left.pop()

    return work


FAILED = Update(0, "", 5, finish_reason="error", error="a secret", traceback="Traceback of a secret")
CHATS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("path", CHATS)
def test_a_token_that_cannot_be_decoded_ends_its_request(checkpoints, monkeypatch, capsys, path):
    """With status 500, a traceback in the log, and a message to the engine."""
    app = InProcess(checkpoints[None])
    sent = []
    send = app.send
    app.engine.connection.send = lambda message: sent.append(message) or send(message)
    decode = TextStream._decode

    def faulty_decode(self, ids, last):
        assert 17 not in ids, "17 came"
        return decode(self, ids, last)

    monkeypatch.setattr(TextStream, "_decode", faulty_decode)
    app.updates = [Update(0, "", 1, token_ids=[17]), Update(0, "", 2, token_ids=[18])]
    response = app.chat(path)
    request_id = response.headers["x-request-id"]
    assert response.status_code == 500
    log = capsys.readouterr().err
    assert log.startswith(f"a request failed: 17 came ({request_id})\nTraceback ") and "in add_token" in log
    wait_for(lambda: [type(message) for message in sent] == [TextRequest, Cancel], "the engine to be told")


@pytest.mark.parametrize("failure", [RuntimeError("a secret"), KeyError("a secret"), Panic("a secret")], ids=repr)
@pytest.mark.parametrize("place", ["tokenize", "parse_chat", "whole", "generate_latest"])
def test_internal_errors_are_logged_with_the_id_of_the_response(checkpoints, monkeypatch, capsys, failure, place):
    """Wherever they come from. Clients do not see them."""
    owner = {"whole": ResponseBuilder, "generate_latest": http_server}.get(place, ServedModel)
    monkeypatch.setattr(owner, place, fails(failure))
    app = InProcess(checkpoints[None])
    app.updates = [Update(0, "Because.", 2, finish_reason="stop")]
    if place == "generate_latest":
        response = app.client.get("/metrics")
    elif place == "tokenize":
        response = app.client.post("/tokenize", json={"prompt": "x"})
    else:
        response = app.chat(CHATS[0])
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    check_failure(response, capsys.readouterr().err, "internal server error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CHATS)
def test_requests_that_fail_in_the_engine_are_logged_with_the_id_of_the_response(checkpoints, capsys, path, stream):
    app = InProcess(checkpoints[None])
    for texts in ([], ["Be", "cause"]):
        app.updates = [*(Update(0, text, n) for n, text in enumerate(texts, 1)), FAILED]
        response = app.chat(path, stream)
        assert response.status_code == (200 if stream and texts else 500)
        if stream and texts:
            assert "Be" in response.text and "cause" in response.text
            assert response.text.endswith("data: [DONE]\n\n" if path == CHATS[0] else "}\n\n")
        check_failure(response, capsys.readouterr().err, "generation failed for this request")
    assert app.engine.metrics.requests.labels("error")._value.get() == 2  # each is counted once


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("path", CHATS)
def test_errors_in_a_stream_are_its_last_event(checkpoints, monkeypatch, capsys, path, calls):
    for builder in (ResponseBuilder, MessageBuilder, ItemBuilder):
        monkeypatch.setattr(builder, "stream_update", fails(ValueError("a secret"), calls))
    app = InProcess(checkpoints[None])
    app.updates = [Update(0, "x", 1), Update(0, "y", 2), Update(0, "z", 3, finish_reason="stop")]
    response = app.chat(path, stream=True)
    assert response.status_code == 200 and response.text.startswith("data: {}\n\n" * calls)
    check_failure(response, capsys.readouterr().err, "internal server error")
    assert not app.engine.open_streams and not app.engine.receivers


def check_failure(response, log: str, message: str):
    name = response.headers["x-request-id"]
    assert f'"message": "{message} ({name})"' in response.text and "secret" not in response.text
    assert re.match(rf"a request failed: '?a secret'? \({name}\)\nTraceback .*a secret'?\n$", log, re.S), log
    assert log.count("Traceback") == 1


def test_a_log_on_a_full_disk(checkpoints):
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "serve.py", "--port", port, "--checkpoint_path", checkpoints[None], *LIMITS]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([*map(str, command)], stdout=full, stderr=full)

    server = SimpleNamespace(port=port)

    def answers():
        assert process.poll() is None
        try:
            return ask(server, [5, 6], 3, unheard_of=1)[0] == 200
        except ConnectionRefusedError:
            return False

    try:
        wait_for(answers, "an answer")
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            process.terminate()  # an idle server ends at once, though a connection is open
            assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()


# ---------------------------------------------------------------- who may ask, and how much


@pytest.mark.parametrize(
    "host, origin, status",
    [
        ("localhost:{port}", None, 200), ("127.7.0.1", None, 200), ("[::1]:{port}", None, 200),
        ("a.localhost:{port}", None, 200), ("LocalHost.:{port}", None, 200),
        ("backend", None, 200),  # a name that a proxy may send, not a domain
        (None, None, 200),  # HTTP/1.0
        ("evil.example:{port}", None, 403), ("localhost.evil.example", None, 403),
        ("127.0.0.1.evil.example", None, 403), ("0.0.0.0", None, 403), ("[::1", None, 403),
        ("localhost:{port}", "http://localhost:{port}", 200), ("127.0.0.1:{port}", "http://127.0.0.1:{port}", 200),
        ("localhost:{port}", "http://evil.example", 403), ("localhost:{port}", "null", 403),
        ("localhost:{port}", "http://localhost:1", 403),  # another program of this machine
        ("localhost:{port}", "http://[", 403), ("evil.example:{port}", "http://evil.example:{port}", 403),
    ],
)  # fmt: skip
def test_pages_of_other_sites(small, host, origin, status):
    """They can neither post nor read, not even errors."""
    lines = [f"{name}: {value}" for name, value in (("Host", host), ("Origin", origin)) if value is not None]
    completion = b'{"prompt": [5], "max_tokens": 1}'
    for method, path, body in (("POST", "/v1/completions", completion), ("GET", "/metrics", b"")):
        head = "\r\n".join([f"{method} {path} HTTP/1.0", *lines, f"Content-Length: {len(body)}", "", ""])
        with closing(socket.create_connection(("127.0.0.1", small.port), timeout=PATIENCE_S)) as client:
            client.sendall(head.format(port=small.port).encode() + body)
            with client.makefile("rb") as answer:
                text = answer.read().decode()
        assert int(text.split()[1]) == status
        assert status == 200 or '"code": "forbidden"' in text
        assert "access-control" not in text.lower()


# ---------------------------------------------------------------- large bodies


@pytest.mark.parametrize("context, largest", [(1600, 1 << 20), (20_000, 5_120_000)])
def test_the_largest_body_follows_from_the_context(checkpoints, context, largest):
    """A prompt of 12,500 tokens as 1.2 MB of escaped JSON is read. A longer body is refused with the bound."""
    settings = replace(app_settings(checkpoints[None], TEMPLATE, None), context_length=context)
    client = TestClient(make_app(settings, ScriptedEngine(), "127.0.0.1"), base_url="http://127.0.0.1")
    body = b'{"prompt": "' + b"\\u00e9" * 200_000 + b'"}'
    answer = client.post("/tokenize", content=body)
    assert answer.status_code == (200 if len(body) <= largest else 413)
    if answer.status_code == 200:
        assert answer.json()["count"] >= 200_000
    for size, status in ((largest, 400), (largest + 1, 413)):
        answer = client.post("/tokenize", content=b" " * size)
        assert answer.status_code == status
    assert f"more than {largest} bytes" in answer.json()["error"]["message"]


def test_large_bodies_share_their_memory():
    """It is one amount, at least 128 MiB, and is given back, also after a failure."""
    limits = BodyLimits(200_000)
    assert limits.free_bytes == 4 * 51_200_000 and BodyLimits(1600).free_bytes == 128 << 20
    app = SimpleNamespace(state=SimpleNamespace(bodies=limits))
    whole = limits.free_bytes

    def request(size):
        async def stream():
            yield b" " * (1 << 20)
            yield b" " * (size - (1 << 20))

        return SimpleNamespace(app=app, stream=stream, headers={})

    async def hold(number, size):
        if number == 0:
            return
        async with body_of(request(size)) as body:
            assert len(body) == size
            await hold(number - 1, size)

    most = whole // limits.max_bytes
    asyncio.run(hold(most, limits.max_bytes))
    assert limits.free_bytes == whole
    for number, size, status in ((most + 1, limits.max_bytes, 503), (1, limits.max_bytes + 1, 413)):
        with pytest.raises(ApiError) as caught:
            asyncio.run(hold(number, size))
        assert caught.value.status == status and limits.free_bytes == whole


# ---------------------------------------------------------------- streams while a prompt is read

BODIES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
    "/v1/responses": {"input": "a"},
}


class SlowAnswer(Answer):
    """The first update comes after some time."""

    delay = 0.5

    async def __anext__(self):
        await asyncio.sleep(self.delay)
        self.delay = 0
        return await super().__anext__()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_pings_before_its_first_update(checkpoints, monkeypatch, path):
    """And then what it has without them. Errors that are known at once have their status."""
    monkeypatch.setattr(http_server, "PING_S", 0.05)
    engine = ScriptedEngine()
    settings = app_settings(checkpoints[None], TEMPLATE, None)
    client = TestClient(make_app(settings, engine, "127.0.0.1"), "http://localhost")

    def stream(*updates, answer=Answer):
        engine.updates = updates
        monkeypatch.setattr("scripted.Answer", answer)
        found = client.post(path, json=BODIES[path] | {"stream": True})
        random_ids = r"[a-z]+[_-][0-9a-f]{16,}|\"(created|created_at|completed_at)\": [\d.]+"
        return found.status_code, re.sub(random_ids, "", found.text)

    end = {"text": "b", "finish_reason": "stop"}
    ping = 'event: ping\ndata: {"type": "ping"}\n\n' if path == "/v1/messages" else ": ping\n\n"
    status, without = stream({"text": "a"}, end)
    assert status == 200 and ping not in without
    status, slow = stream({"text": "a"}, end, answer=SlowAnswer)
    assert (status, slow.replace(ping, "")) == (200, without)
    assert slow.startswith(3 * ping) and slow.count(ping) < 12

    failure = ApiError("no", 503)
    assert stream(failure)[0] == 503
    status, late = stream(failure, answer=SlowAnswer)
    assert status == 200 and late.startswith(ping) and "no" in late
    engine.error = ApiError("full", 429, retry_after=1)
    assert stream({"text": "a"}, end)[0] == 429


def test_a_stream_has_pings_while_its_text_is_held_back(checkpoints, monkeypatch):
    """As that of a call is, if it stands in thoughts or has no marks."""

    class Halting(Answer):
        async def __anext__(self):
            await asyncio.sleep(0.06)
            return await super().__anext__()

    monkeypatch.setattr(http_server, "PING_S", 0.1)
    monkeypatch.setattr("scripted.Answer", Halting)
    engine = ScriptedEngine()
    settings = app_settings(checkpoints[None], TEMPLATE, None)
    client = TestClient(make_app(settings, engine, "127.0.0.1"), "http://localhost")
    engine.updates = ({"text": "a"}, *({"text": ""} for _ in range(8)), {"text": "b", "finish_reason": "stop"})
    found = client.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"] | {"stream": True}).text
    held = found[found.index('"a"') : found.index('"b"')]
    assert 2 <= held.count(": ping\n\n") <= 5
