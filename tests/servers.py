"""What the tests of the server share: running servers, clients, and the engine alone as the oracle."""

import http.client
import json
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import openai
import torch
from conftest import ROOT
from hypothesis import HealthCheck
from programs import printed_lines

from engine import Engine, EngineOptions, Request, generate
from load import load_model
from sampling import SamplingParams
from serve import RunningRequest
from server.pipe_messages import Update
from text.chat_template import ChatTemplate
from text.tokenizer import TextStream, Tokenizer

CONTEXT = 1600
ROWS = 4
CHUNK = 16
KEY = "a secret"
PATIENCE_S = 60  # A test gives up waiting after this time; nothing takes a tenth of it.
OPTIONS = ["--dtype", "float32", "--max_batch_size", ROWS, "--prefill_chunk", CHUNK, "--max_queue", 1000]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
LONG = {"prompt": [5, 6, 7], "max_tokens": CONTEXT - 200, "temperature": 0, "ignore_eos": True}
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


class Server:
    """A running serve.py."""

    def __init__(self, log: Path, arguments: list, launcher=(sys.executable,)):
        self.log = log
        command = [*launcher, str(ROOT / "serve.py"), "--port", "0", *map(str, arguments)]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            self.port = int(wait_for(self._address, "a server to start", 300).group(1))
        except BaseException:
            self.stop()
            raise

    def _address(self):
        assert self.process.poll() is None, self.log.read_text()
        return re.search(r"serving .* at http://127\.0\.0\.1:(\d+)\n", self.log.read_text())

    def client(self, kind=openai.OpenAI, key=KEY):
        url = f"http://127.0.0.1:{self.port}/v1"
        return kind(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_S)

    def request(self, method: str, path: str, body=None, key=KEY, seconds=PATIENCE_S) -> tuple[int, bytes]:
        """The status and the answer, by a plain HTTP client that waits at most `seconds`."""
        if not isinstance(body, bytes | None):
            body = json.dumps(body)
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)) as connection:
            connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def post(self, path: str, body, seconds=PATIENCE_S) -> dict:
        status, answer = self.request("POST", path, body, seconds=seconds)
        assert status == 200, answer
        return json.loads(answer)

    def metric(self, name: str) -> float:
        text = self.request("GET", "/metrics")[1].decode()
        return float(re.search(rf"^fastpath_{re.escape(name)} (\S+)$", text, re.M).group(1))

    def health(self) -> tuple[int, str]:
        status, answer = self.request("GET", "/health")
        return status, json.loads(answer)["status"]

    def idle(self) -> bool:
        names = ("rows_active", "requests_waiting", "requests_unfinished")
        return all(self.metric(name) == 0 for name in names)

    def processes(self) -> list[int]:
        """The ids of the engine's process and of the HTTP process."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        http = [i for i in children if "spawn_main" in Path(f"/proc/{i}/cmdline").read_text()]
        return [pid, *map(int, http)]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()


def ended(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(found, what: str, seconds: float = PATIENCE_S):
    """Call found() until its value is true, and return the value."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)
    return value


@contextmanager
def running(log: Path, *arguments, **options):
    server = Server(log, arguments, **options)
    try:
        yield server
    finally:
        server.stop()


def log_lines(text: str) -> list[str]:
    """The lines that a server has printed, without the examples at its start and the lines of requests."""
    lines = printed_lines(re.sub(r"\n\nA page to use it .*?\n\n", "\n", text, flags=re.S))
    return [line for line in lines if not re.match("req_[0-9a-f]{16} ", line)]


class Oracle:
    """An engine without a server. Each text is decoded at once."""

    def __init__(self, directory: Path):
        self.tokenizer = Tokenizer(directory)
        self.model = load_model(directory, dtype=torch.float32)
        self.template = ChatTemplate(directory, self.tokenizer)
        self.engine = Engine(self.model, 1, CONTEXT, options=EngineOptions(chunk_tokens=CHUNK))

    def run(self, prompt: list[int], new: int, logprobs=None, **params) -> Request:
        params = SamplingParams(**{"temperature": 0.0} | params)
        request = Request(prompt, params, new, frozenset({1}), logprobs=logprobs)
        self.engine.clear()
        generate(self.engine, [request])
        return request

    def text(self, prompt: list[int], new: int, stop=(), context=True, **params) -> str:
        request = self.run(prompt, new, **params)
        ids = [i for i in request.new_tokens if i != 1]
        return TextStream(self.tokenizer, prompt if context else (), stop).add(ids, last=True)


def take_tokens(running: RunningRequest, tokens: list[int], n: int, reason: str) -> Update:
    """Add the next n of the tokens to a request, as an engine's step does. reason: the finish reason after the last."""
    request = running.request
    for token in tokens[len(request.new_tokens) :][:n]:
        request.new_tokens.append(token)
        request.token_logprobs.append((-1.0, []))
    if len(request.new_tokens) == len(tokens):
        request.finish_reason = reason
    return pickle.loads(pickle.dumps(running.update()))  # as the pipe does


def prompt_ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 700, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class RawClient:
    """A client that can close or reset its connection at any time."""

    def __init__(self, server: Server, body: dict, buffer: int = 0):
        """Send a request. buffer: bytes that the system receives for a client that does not read (0: it chooses)."""
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE_S)
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.connect(("127.0.0.1", server.port))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def leave(self, reset: bool):
        if reset:  # closing then resets the connection at once
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def longest(server: Server, stream: bool, **how) -> RawClient:
    return RawClient(server, LONG | {"stream": stream} | how)


def greedy_text(server: Server, prompt: list[int], new: int) -> str:
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0}
    return server.post("/v1/completions", body)["choices"][0]["text"]
