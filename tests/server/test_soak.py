"""The server for a long time: clients that vanish, clients that stop reading, and mixed load.

Nothing may be left of a request: no row, task, descriptor, thread or memory. The long ones run under `-m full`.
"""

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import CONTEXT, KEY, LONG, MESSAGES, PATIENCE_S, ROWS, RawClient, Server, prompt_ids, wait_for

from engine import Request
from server.api import Choice, CompletionRequest
from server.engine_client import MAX_UNSENT_BYTES, EngineClient
from server.pipe_messages import TextRequest, Update
from server.request_fields import ApiError

MEBIBYTE = 1 << 20
MEMORY = 24 * MEBIBYTE  # by which a process may grow: the allocator keeps pages, and thread pools grow for a while


@pytest.fixture(scope="module")
def server(server_with_key):
    wait_for(lambda: server_with_key.health() == (200, "ready"), "the server to be ready")
    yield server_with_key
    assert "Traceback" not in server_with_key.log.read_text(), server_with_key.log.read_text()[-2000:]


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(server: Server) -> dict[str, float]:
    """What both processes hold."""
    engine, http_side = server.processes()
    fds, tasks = ([len(os.listdir(f"/proc/{pid}/{kind}")) for pid in (engine, http_side)] for kind in ("fd", "task"))
    names = "rows_active", "requests_waiting", "requests_unfinished", "tasks"
    found = {"descriptors": sum(fds), "threads": sum(tasks)} | {name: server.metric(name) for name in names}
    return found | {"engine": memory(engine), "http": memory(http_side)}


SLACK = {"threads": 6, "engine": MEMORY, "http": MEMORY}  # by which a value may grow


def check_nothing_is_left(server: Server, work: Callable[[int], None], n: int, slack=SLACK):
    """After work(n), a server holds what it held after a short warm-up."""
    work(48)
    wait_for(server.idle, "all rows to be free")
    time.sleep(0.5)  # for the last connections to end
    most = {name: value + slack.get(name, 0) for name, value in held(server).items()}
    work(n)
    wait_for(server.idle, "all rows to be free")
    end = time.monotonic() + PATIENCE_S
    while any(value > most[name] for name, value in held(server).items()):
        assert time.monotonic() < end, f"{held(server)}, at most {most}"
        time.sleep(0.1)


# ---------------------------------------------------------------- clients that vanish


def vanish(server: Server, moment: str, stream: bool, reset: bool, seed: int):
    """A client that leaves in the given moment of its request, or reads the answer first ("end")."""
    body = {"prompt": prompt_ids(30, seed), "max_tokens": 900, "stream": stream, "ignore_eos": True}
    if moment == "prefill":
        body["prompt"] = prompt_ids(CONTEXT - 920, seed)
    if moment == "end":
        body["max_tokens"] = 3
    client = RawClient(server, body)
    if moment == "decode" and stream:
        assert client.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
    elif moment == "end":
        while client.socket.recv(1 << 16)[-5:] not in (b"0\r\n\r\n", b"") and stream:
            pass
    else:
        time.sleep({"at once": 0.0, "prefill": 0.02, "decode": 0.15}[moment])
    client.leave(reset)


def vanish_in_every_way(server: Server, n: int):
    """n clients, eight at a time, of which most wait for a row when they leave: there are four."""
    moments = ["at once", "prefill", "decode", "end"]
    ways = [(moments[i % 4], i // 4 % 2 == 0, i // 8 % 2 == 0, i) for i in range(n)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda way: vanish(server, *way), ways))


@pytest.mark.slow
def test_nothing_is_left_of_clients_that_vanish(server):
    check_nothing_is_left(server, lambda n: vanish_in_every_way(server, n), 64)


# ---------------------------------------------------------------- clients that stop reading


def deaf_clients(server: Server, stream: bool, n: int) -> list[RawClient]:
    """They are there and read nothing of their answers, which are several megabytes."""
    asks = [LONG | {"prompt": [5, 6, i], "logprobs": 20, "stream": stream} for i in range(n)]
    return [RawClient(server, ask, buffer=4096) for ask in asks]


def unsent_bytes(server: Server) -> int:
    """What the system holds of answers for clients, as it lists them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4][:8], 16) for row in rows if row[1].endswith(f":{server.port:04X}"))


@pytest.mark.slow
def test_clients_that_read_nothing_of_their_streams(server, oracle):
    """Their requests are ended when a megabyte waits for them, and they take nobody's place then."""
    prompt, (_, http_side) = prompt_ids(20, 5), server.processes()
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
    before, written = memory(http_side), server.metric("tokens_written_total")
    clients = deaf_clients(server, True, ROWS + 1)
    try:
        wait_for(lambda: server.metric("rows_active") == ROWS, "full rows")
        answer = server.post("/v1/completions", body)
        assert answer["choices"][0]["text"] == oracle.text(prompt, 20)
        wait_for(server.idle, "all rows to be free")
        most = len(clients) * LONG["max_tokens"]
        assert server.metric("tokens_written_total") - written < most, "they were ended early"
        assert memory(http_side) - before < MEMORY + len(clients) * 4 * MEBIBYTE  # a megabyte is more as objects
        assert 0 < unsent_bytes(server) < len(clients) * MEBIBYTE
        more = deaf_clients(server, True, 2)
        clients += more
        assert server.post("/v1/completions", body)["choices"][0]["text"] == oracle.text(prompt, 20)
    finally:
        for client in clients:
            client.leave(reset=True)
    wait_for(server.idle, "all rows to be free")


def test_an_answer_that_is_not_read_takes_nobodys_place():
    """Nor does one that is not read to its end; log-probabilities of the prompt count as well."""

    async def work():
        engine = EngineClient(SimpleNamespace(send=lambda message: None), rows=1, max_queue=1)
        choices = [Choice(0, TextRequest(i, Request([5]))) for i in range(2)]
        completions = [CompletionRequest("cmpl", [choice], stream=True) for choice in choices]
        first, second = (engine.generate(completion, asyncio.Event().wait) for completion in completions)
        assert engine.in_use == 2
        scored = [(-1.0, [(5, -1.0)] * 20)] * (MAX_UNSENT_BYTES // 2000)
        update = Update(0, "", 1, prompt_logprobs=scored)
        for updates in ([update, update], [update], [update]):  # what came with one status counts from the next one on
            first.put(updates)
        assert engine.in_use == 1 and first.queue.qsize() == 1
        with pytest.raises(ApiError, match="does not read"):
            await anext(first)
        del engine.receivers[1]  # as after the last update, which the client has not read yet
        assert engine.in_use == 0
        for stream in (first, second):
            stream.close()

    asyncio.run(work())


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_read_nothing_are_gone_after_30_seconds(server, stream):
    """Also those with whole answers, whose windows are closed, and whose system answers every probe."""
    most = held(server)
    clients = deaf_clients(server, stream, 6)
    try:
        wait_for(lambda: server.metric("rows_active") == ROWS, "full rows")
        wait_for(server.idle, "the engine to be ready with all", 120)
        wait_for(lambda: unsent_bytes(server) > 0, "answers to be written")
        begin = time.monotonic()
        assert held(server)["descriptors"] > most["descriptors"]
        wait_for(lambda: held(server)["descriptors"] <= most["descriptors"], "their connections to be closed", 90)
        print(f"\nconnections without a reader were closed after {time.monotonic() - begin:.0f} s (stream: {stream})")
        wait_for(lambda: server.metric("tasks") <= most["tasks"], "their tasks to end")
        assert unsent_bytes(server) == 0
        assert held(server)["http"] < most["http"] + MEMORY + 6 * 4 * MEBIBYTE
    finally:
        for client in clients:
            client.leave(reset=False)


@pytest.mark.full
def test_slow_heads_and_slow_bodies_are_dropped(server):
    """Although they go on: a head has 60 seconds, a body 30."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()

    def drip(begin: bytes) -> tuple[float, bytes]:
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=0.5)) as client:
            client.sendall(begin)
            start, answer = time.monotonic(), b""
            while time.monotonic() < start + 90:
                try:
                    client.sendall(b"x")
                    if not (data := client.recv(1 << 16)):
                        break
                    answer += data
                except TimeoutError:
                    pass
                except ConnectionError:
                    break
            return time.monotonic() - start, answer

    before = held(server)["descriptors"]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(drip, [head + b"X: ", head + b"Content-Length: 9999\r\n\r\n", b"G"]))
    (slow_head, silence), (slow_body, answer), (first, _) = found
    assert 55 < slow_head < 75 and silence == b"" and 55 < first < 75
    assert 25 < slow_body < 45 and answer.startswith(b"HTTP/1.1 408") and b'"code": "timeout"' in answer
    wait_for(lambda: held(server)["descriptors"] <= before, "their connections to be closed")


# ---------------------------------------------------------------- mixed load

BAD = [b"{", b'{"prompt": [700]}', b"[" * 9000, b'{"prompt": "\\ud800"}', b'{"prompt": [5], "max_tokens": -2}']


def one_of_all_kinds(server: Server, chance: random.Random):
    """A request of any kind."""
    kind = chance.choice(["completion", "completion", "chat", "stream", "echo", "bad", "vanishing", "vanishing"])
    body = {"max_tokens": chance.choice([2, 20, 120]), "temperature": chance.choice([0, 1]), "ignore_eos": True}
    prompt = prompt_ids(chance.choice([3, 40, 300, 1200]), chance.randrange(20))
    if kind == "vanishing":
        moment = chance.choice(["at once", "prefill", "decode"])
        vanish(server, moment, chance.random() < 0.5, chance.random() < 0.5, chance.randrange(99))
    elif kind == "bad":
        assert server.request("POST", "/v1/completions", chance.choice(BAD))[0] == 400
    elif kind == "chat":
        server.post("/v1/chat/completions", body | {"messages": MESSAGES[chance.randrange(2) :]})
    elif kind == "echo":
        server.post("/v1/completions", body | {"prompt": [prompt, prompt[:9]], "echo": True, "logprobs": 5})
    else:
        body |= {"prompt": prompt, "stream": kind == "stream"}
        status, answer = server.request("POST", "/v1/completions", body)
        assert status == 200 and (b"[DONE]" in answer or kind != "stream")


@pytest.mark.full
def test_nothing_is_left_of_mixed_load(server):
    """Of requests of all kinds, by six clients."""

    def work(n: int):
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda seed: one_of_all_kinds(server, random.Random(seed)), range(n)))

    check_nothing_is_left(server, work, 1500, SLACK | {"engine": 3 * MEMORY, "http": 3 * MEMORY})
