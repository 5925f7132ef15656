"""Two replicas of the server behind nginx with docs/nginx.conf, of which one is killed: no client loses an answer.

Needs nginx (Debian's package nginx-light). It runs as a process of its own, in a temporary folder.
"""

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

import openai
import pytest
from conftest import ROOT
from servers import KEY, OPTIONS, PATIENCE_S, ROWS, Server, ended, running, wait_for

pytestmark = pytest.mark.full

NEW = 1200  # tokens of an answer; the tiny model writes them in a second or two


@cache
def documented_function():
    """The function of docs/scaling.md that repeats streams that break off."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], names)
    return names["streamed_answer"]


def can_connect(port: int) -> bool:
    with closing(socket.socket()) as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def nginx(folder: Path, ports: list[int]):
    """Run nginx with docs/nginx.conf in front of two replicas' ports; gives its own port."""
    program = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    assert program, "nginx is not there: apt-get install nginx-light"
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    text = (ROOT / "docs" / "nginx.conf").read_text(encoding="utf-8")
    for written, real in zip((8000, 8001, 8002), (port, *ports), strict=True):
        assert text.count(f"127.0.0.1:{written}") == 1
        text = text.replace(f"127.0.0.1:{written}", f"127.0.0.1:{real}")
    (folder / "nginx.conf").write_text(text, encoding="utf-8")
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    if os.geteuid() == 0:  # else it would look for its files as "nobody", who may not enter the folder
        command += ["-g", "user root;"]
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
    try:
        wait_for(lambda: process.poll() is not None or can_connect(port), "nginx to start")
        assert process.poll() is None, (folder / "errors").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


class Replicas:
    """Two servers, and the port of nginx in front of them."""

    def __init__(self, servers: list[Server], start, port: int, folder: Path):
        self.servers, self.start, self.port, self.folder = servers, start, port, folder

    def client(self) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=KEY, max_retries=5, timeout=PATIENCE_S)

    def restart(self, i: int):
        """Start a replica that was killed again, on the same port."""
        self.servers[i] = self.start(i, self.servers[i].port)

    def attempts(self) -> list[tuple]:
        """For each line of nginx's log: the conversation, then the ports of the replicas that were tried. A request
        that came while both replicas counted as failed was sent to none, and is left out."""
        log = (self.folder / "access.log").read_text(encoding="utf-8")
        found = re.findall(r'" (.*?) (127\.0\.0\.1:[\d., :]+) \d{3}', log)
        return [(name, *map(int, re.findall(r":(\d+)", tries))) for name, tries in found]

    def homes(self, client: openai.OpenAI, names: list[str]) -> dict[str, int]:
        """The port of the replica that answers each conversation."""
        seen = len(self.attempts())
        for i, name in enumerate(names):
            headers = {"X-Conversation": name}
            client.completions.create(model="tiny", prompt=[5, 6, i + 2], max_tokens=1, extra_headers=headers)

        def found():
            ports = {name: ports[-1] for name, *ports in self.attempts()[seen:]}
            return ports if len(ports) == len(names) else None

        return wait_for(found, "nginx's log")


@pytest.fixture(scope="module")
def replicas(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack:

        def start(i: int, port: int = 0) -> Server:
            arguments = ["--checkpoint_path", checkpoints[None], "--api_key", KEY, *OPTIONS, "--port", port]
            arguments += ["--drain_seconds", PATIENCE_S]
            return stack.enter_context(running(folder / f"replica{i}.txt", *arguments))

        servers = [start(i) for i in range(2)]
        port = stack.enter_context(nginx(folder, [server.port for server in servers]))
        yield Replicas(servers, start, port, folder)
    assert "Traceback" not in "".join(path.read_text() for path in folder.glob("replica*.txt"))


@pytest.fixture(autouse=True)
def both_answer(replicas):
    """A test begins when both replicas get requests: one that has failed gets none for 5 seconds."""
    names, client = [f"before {i}" for i in range(16)], replicas.client()
    wait_for(lambda: len({*replicas.homes(client, names).values()}) == 2, "both replicas")


def question(name: str) -> list[dict]:
    return [{"role": "user", "content": f"Why is {name} the sum of {len(name)} and the sea?"}]


def ask(client: openai.OpenAI, name: str, stream: bool) -> str:
    """The answer to a conversation's question."""
    request = {"model": "tiny", "messages": question(name), "max_tokens": NEW, "temperature": 0}
    request |= {"extra_headers": {"X-Conversation": name}, "extra_body": {"ignore_eos": True}}
    if stream:
        return documented_function()(client, **request)
    return client.chat.completions.create(**request).choices[0].message.content


@pytest.fixture(scope="module")
def answers(oracle):
    """name -> the answer that a single idle engine gives."""
    return cache(lambda name: oracle.text(oracle.template.encode(question(name)), NEW, context=False))


def stop(server: Server, how: str):
    """End a replica, of which nobody hears in advance."""
    pids = server.processes()
    if how == "SIGTERM":
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
    for pid in {"SIGTERM": [], "the engine is killed": pids[:1], "all is killed": pids[::-1]}[how]:
        os.kill(pid, signal.SIGKILL)
    server.process.wait(PATIENCE_S)
    for pid in pids:
        wait_for(lambda pid=pid: ended(pid), "its processes to end")


@pytest.mark.parametrize("how", ["all is killed", "the engine is killed", "SIGTERM"])
def test_clients_lose_nothing_when_a_replica_goes(replicas, answers, how):
    """Every answer has the tokens of a single idle server. The replica starts again, and its conversations return."""
    doomed, other = replicas.servers
    names = [f"number {i}" for i in range(40)]
    with replicas.client() as client, ThreadPoolExecutor(4 * ROWS) as pool:
        homes = replicas.homes(client, names)
        seen = len(replicas.attempts())
        chosen = [[name for name in names if homes[name] == server.port][: 2 * ROWS] for server in (doomed, other)]
        assert [len(own) for own in chosen] == [2 * ROWS, 2 * ROWS]

        def submit(own: list[str]):
            return {name: pool.submit(ask, client, name, stream=i % 2 == 0) for i, name in enumerate(own)}

        begun = doomed.metric("time_to_first_token_seconds_count")
        asked = submit([*chosen[0][:ROWS], *chosen[1][:ROWS]])
        wait_for(lambda: doomed.metric("time_to_first_token_seconds_count") == begun + ROWS, "the first tokens")
        doomed.process.send_signal(signal.SIGSTOP)  # so that no answer is complete before the end
        asked |= submit([*chosen[0][ROWS:], *chosen[1][ROWS:]])
        wait_for(lambda: doomed.metric("requests_unfinished") == 2 * ROWS, "requests that wait")
        stop(doomed, how)
        for name, answer in asked.items():
            assert answer.result() == answers(name), name
        check_attempts(replicas.attempts()[seen:], chosen[0], how)
        replicas.restart(0)
        wait_for(lambda: replicas.homes(client, names) == homes, "the conversations to return")


def check_attempts(attempts: list[tuple], names: list[str], how: str):
    """Who repeated the requests to the replica that has gone; names: those that ran, then those that waited."""
    for i, name in enumerate(names):
        ports = [tries for conversation, *tries in attempts if conversation == name]
        if how == "SIGTERM":
            assert [len(tries) for tries in ports] == [1], "the replica has ended what it had begun"
        elif i < ROWS and i % 2 == 0:
            assert len(ports) > 1, "the client repeated the stream"
        else:
            assert len(ports[0]) == 2, "nginx repeated what had no answer yet"


def ready(server: Server) -> bool:
    try:
        return server.health()[0] == 200
    except OSError:  # it has ended
        return False


def test_a_draining_replica_gets_nothing_new(replicas, answers):
    """Its new requests go to the other one, while those that it has end."""
    doomed, other = replicas.servers
    with replicas.client() as client, ThreadPoolExecutor(1) as pool:
        homes = replicas.homes(client, [f"number {i}" for i in range(40)])
        first, second = [name for name in homes if homes[name] == doomed.port][:2]
        seen, begun = len(replicas.attempts()), doomed.metric("time_to_first_token_seconds_count")
        running = pool.submit(ask, client, first, stream=True)
        wait_for(lambda: doomed.metric("time_to_first_token_seconds_count") > begun, "the first token")
        doomed.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not ready(doomed), "the replica to drain")
        assert ask(client, second, stream=False) == answers(second) and running.result() == answers(first)
        wait_for(lambda: len(replicas.attempts()) == seen + 2, "nginx's log")
        assert sorted(replicas.attempts()[seen:]) == sorted([(first, doomed.port), (second, doomed.port, other.port)])
        doomed.process.wait(PATIENCE_S)
        replicas.restart(0)
        wait_for(lambda: replicas.homes(client, list(homes)) == homes, "the conversations to return")


def test_a_stream_that_breaks_off_is_an_error(replicas):
    """And no end of the stream, which a client would take for a whole answer."""
    request = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": NEW, "extra_body": {"ignore_eos": True}}
    with replicas.client() as client, client.completions.create(stream=True, **request) as stream:
        next(stream)
        (busy,) = [i for i, server in enumerate(replicas.servers) if server.metric("rows_active")]
        stop(replicas.servers[busy], "all is killed")
        with pytest.raises(openai.APIConnectionError):
            list(stream)
        replicas.restart(busy)


@pytest.mark.parametrize("by", ["header", "address"])
def test_a_conversation_stays_on_one_replica(replicas, by):
    """Its second turn reads only what is new."""
    homes = set()
    with replicas.client() as client:
        for i in range(8):
            headers = {"X-Conversation": f"{by} {i}"} if by == "header" else {}
            messages = [{"role": "user", "content": f"Conversation {i} begins by {by}. " + "What is the sea? " * 5}]
            held = 0  # tokens of this conversation in the replica's cache
            for _ in range(3):
                seen = len(replicas.attempts())
                answer = client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=20, temperature=0, extra_headers=headers
                )
                (line,) = wait_for(lambda seen=seen: replicas.attempts()[seen:], "nginx's log")
                homes.add((i, *line[1:]))
                assert answer.usage.prompt_tokens_details.cached_tokens >= held
                held = answer.usage.prompt_tokens - 10  # the template ends a message in other tokens than it begins one
                text = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And why?"}]
    assert len(homes) == 8, "each conversation has one replica"
    assert len({port for _, port in homes}) == (2 if by == "header" else 1)


def cancelled(replicas: Replicas) -> float:
    """The number of requests that were cancelled on any replica."""
    texts = [server.request("GET", "/metrics")[1].decode() for server in replicas.servers]
    found = [re.search(r'^fastpath_requests_total{outcome="cancelled"} (\S+)$', text, re.M) for text in texts]
    return sum(float(match[1]) for match in found if match)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(replicas, stream):
    """nginx closes its connection to the replica as well."""
    before = cancelled(replicas)
    request = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": NEW, "extra_body": {"ignore_eos": True}}
    with replicas.client() as client:
        if stream:
            with client.completions.create(stream=True, **request) as answer:
                next(answer)
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.2, max_retries=0).completions.create(**request)
    wait_for(lambda: cancelled(replicas) == before + 1, "the request to be cancelled")
    wait_for(lambda: all(server.idle() for server in replicas.servers), "all rows to be free")


def test_foreign_pages_are_refused_through_nginx(checkpoints, tmp_path):
    """As they are without nginx: a server without a key still sees which site a request comes from."""
    arguments = ["--checkpoint_path", checkpoints[None], *OPTIONS]
    with running(tmp_path / "log", *arguments) as server, nginx(tmp_path, [server.port, server.port]) as port:
        own = f"localhost:{port}"
        for host, origin, expected in (
            (own, None, 200),
            (own, f"http://{own}", 200),
            (own, "https://foreign.example", 403),
            ("foreign.example", None, 403),
            ("foreign.example", "http://foreign.example", 403),
        ):
            headers = {"Host": host} | ({"Origin": origin} if origin else {})
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
                connection.request("GET", "/v1/models", headers=headers)
                assert connection.getresponse().status == expected, headers
