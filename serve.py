"""The server: `python serve.py`, then OpenAI's API at http://127.0.0.1:8000.

Read down: options and `main`; the HTTP process; Job, a request with its text; `run_engine`, the loop around the steps
of the engine. Nothing of generation is here: that is engine.py.

There are two processes, because a thread beside the engine would take its time: both need Python's lock. The first one
runs the engine (with torchrun it is rank 0), and turns new tokens into text. It starts the second one, which has the
sockets, knows JSON and tokenizes prompts (server/http_server.py). Between them is a pipe. One way go requests, as
tuples (key, and the other arguments of Job), and cancellations, (key,). The other way goes a News after each step of
the engine, and four times a second while it is idle.
"""

import os
import signal

if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # torch's threads wait awake for some 0.3 ms, and then sleep
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported; run_command takes over from there

import multiprocessing
import socket
import threading
import time
from bisect import bisect_left
from contextlib import contextmanager

from cli import ArgumentParser, HelpFormatter, UserError, number, print_status, run_command
from engine import Engine, Request
from load import ModelOptions, SingleProcess, add_model_options, choose_device, open_checkpoint
from server.api import Event
from server.http_server import News, Settings, run_http
from start import compile_while_serving, load_engine, warm_up
from tokenizer import TextStream, Tokenizer

STALLED_SECONDS = 30  # a client that reads nothing of its answer for so long is disconnected
SEND_BUFFER = 1 << 18  # bytes of an answer that the system holds for its client
CONTEXT = 4096  # positions of a cache row where nothing else is said and the model has as many
RANK_TIMEOUT_S = 8.0  # a rank that is silent for so long ends the server
HTTP_END_S = 10.0  # after the end of draining, when the HTTP process should have ended
IDLE_S = 0.25  # between steps without a request: other ranks and the HTTP process hear that we are alive

# ---------------------------------------------------------------- options and main


def parse_arguments(argv=None):
    count = number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description="Serve a model over HTTP, as OpenAI's API.", formatter_class=HelpFormatter)
    add = parser.add_argument_group("the server").add_argument
    add("--host", default="127.0.0.1", help="the address to bind to; 0.0.0.0: all of this machine's")
    add("--port", type=number(int, "0 to 65535", lambda n: 0 <= n < 65536), default=8000, help="0: any that is free")
    add("--api_key", help="clients must send it (Authorization: Bearer KEY) for every path but / and /health")
    seconds = number(float, "more than 0", lambda s: s > 0)
    add("--max_batch_size", type=count, default=8, help="requests that run at the same time; others wait")
    natural = number(int, "at least 0", lambda n: n >= 0)
    add("--max_queue", type=natural, help="requests that may wait (4 times --max_batch_size); the next gets status 429")
    add("--queue_seconds", type=seconds, default=60.0, help="a request that has waited for so long gets status 503")
    add("--drain_seconds", type=seconds, default=20.0, help="time that requests have to end in after SIGTERM")
    add("--prefill_chunk", type=count, help="tokens of a prompt read in one step (128, or 256 in bf16)")
    add_model_options(parser)
    args = parser.parse_args(argv)
    args.model = ModelOptions.of(args)
    if args.api_key == "":
        raise UserError("--api_key is empty; give a key, or leave it away, and nobody needs one")
    if args.api_key and (args.api_key != args.api_key.strip() or min(args.api_key) < " "):
        raise UserError("--api_key has white space at an end or control characters, which HTTP cannot transmit")
    return args


def main(ranks=None):
    """ranks: a ranks.Ranks, where torchrun has started several of us; the first one serves, the others follow it."""
    ranks = ranks or SingleProcess()
    args = ranks.share(parse_arguments)
    listener = bind(args.host, args.port) if ranks.rank == 0 else None
    checkpoint = open_checkpoint(args.model, ranks)
    config = checkpoint.config
    length = args.max_seq_length or min(CONTEXT, config.max_seq_length)
    if length > config.max_seq_length and not config.alibi:
        raise UserError(f"--max_seq_length {length} is more than the model's context of {config.max_seq_length}")
    if ranks.rank:
        engine = load_engine(checkpoint, args.max_batch_size, length, ranks)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 ends us, when its requests have ended
        ranks.timeout_s = RANK_TIMEOUT_S
        return engine.follow()
    max_queue = 4 * args.max_batch_size if args.max_queue is None else args.max_queue
    name = checkpoint.name
    files = (checkpoint.config, checkpoint.tokenizer_files)
    settings = Settings(*files, name, length, args.max_batch_size, max_queue, args.api_key)
    with http_process(settings, listener) as connection:
        later = compiles_later(args.model, ranks)
        args.model.compile = args.model.compile and not later
        engine = load_engine(checkpoint, args.max_batch_size, length, ranks)
        engine.chunk_tokens, engine.always_chunk = args.prefill_chunk or engine.chunk_tokens, True
        before = time.perf_counter()
        for n in (40, 8):  # prefill has a graph for long inputs and one for short ones
            warm_up(engine, [[0] * min(n, length)] * args.max_batch_size, random=True)
        slowest = time.perf_counter() - before  # no step of real requests should take much longer
        if later:
            threading.Thread(target=compile_while_serving, args=(engine,), daemon=True).start()
        host, port = listener.getsockname()[:2]
        ranks.timeout_s, ending = RANK_TIMEOUT_S, Ending(args.drain_seconds)
        connection.send(News("ready", [], slowest))
        print_status(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}")
        run_engine(engine, checkpoint.tokenizer, connection, ending, args.queue_seconds)
    engine.close()


def compiles_later(options: ModelOptions, ranks) -> bool:
    """Whether --compile runs in a thread while eager steps serve. It does not on GPUs, whose CUDA graphs belong to the
    thread that made them, and not with a draft or several ranks, whose steps are more than one function."""
    on_cpu = choose_device(ranks.device(options.device)).type == "cpu"
    return options.compile and on_cpu and ranks.size == 1 and not options.speculates


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which refuses connections until the HTTP process is there."""
    if not host:  # which the system takes for all addresses
        raise UserError("--host is empty; give an address, 0.0.0.0 for all of this machine's")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Not socket.create_server: asyncio switches Nagle's algorithm off (40 ms an answer) where it sees that this is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_SECONDS * 1000)
    try:
        listener.bind((host, port))
    except (OSError, TypeError, ValueError) as error:  # the latter two where the host can be no name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port} cannot be listened on: {reason}") from None
    return listener


@contextmanager
def http_process(settings: Settings, listener: socket.socket):
    """The HTTP process while the engine runs; gives our end of the pipe to it. It ends when the pipe is closed, or by
    itself when the engine has said that the server ends, and all requests have been answered."""
    listener.listen(1024)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_http, args=(settings, listener, theirs), daemon=True)
    # Inherited: signals to the whole group are our business, also while it starts.
    before = {kind: signal.signal(kind, signal.SIG_IGN) for kind in (signal.SIGINT, signal.SIGTERM)}
    process.start()
    for kind, handler in before.items():
        signal.signal(kind, handler)
    theirs.close()
    try:
        yield ours
    except (EOFError, BrokenPipeError, ConnectionResetError):
        process.join(5)
        if process.exitcode != 0:
            raise UserError(f"the HTTP process has ended (exit code {process.exitcode})") from None
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()


# ---------------------------------------------------------------- the engine's process


class Job:
    """A request that the engine has, and its text."""

    def __init__(self, tokenizer: Tokenizer, key: int, request: Request, stop=(), continues=True, first=True):
        """continues: the text goes on where the prompt ends, else it begins anew, as an answer in a chat does.
        first: it is not one of several prompts of an HTTP request, or it is the first of them."""
        self.key, self.request, self.first = key, request, first
        self.stream = TextStream(tokenizer, request.prompt if continues else (), stop)
        self.text, self.before = "", 0  # text that no event has told yet; the characters before it
        self.offsets: list[int] = []  # in the text, where each token begins
        self.told, self.told_logprobs = 0, 0  # tokens in events
        request.on_token = self.add

    def add(self, token: int) -> bool:
        self.offsets.append(self.before + len(self.text) + len(self.stream.held))
        self.text += self.stream.add(() if token in self.request.stop_ids else (token,))
        return self.stream.stopped

    def waited(self, now: float) -> float:
        """Seconds that it has been waiting for a row; 0 if it has one."""
        times = self.request.times
        return 0.0 if "started" in times else now - times["added"]

    def event(self) -> Event:
        request, reason, first = self.request, self.request.finish_reason, self.told == 0
        if reason is not None:
            self.text += self.stream.add((), last=True)
            reason = "stop" if self.stream.stopped and reason == "length" else reason
        text, self.text, self.before = self.text, "", self.before + len(self.text)
        self.told, told, n = len(request.new_tokens), self.told_logprobs, len(self.offsets)
        if reason is None or self.stream.stopped:  # nothing is told of tokens that may be part of a stop string
            n = bisect_left(self.offsets, self.before)
        self.told_logprobs = max(told, n)
        logprobs = [
            (token, *scored, offset)
            for token, scored, offset in zip(
                request.new_tokens[told:n], request.token_logprobs[told:n], self.offsets[told:n]
            )
        ]
        of_prompt = request.prompt_token_logprobs if first else []
        return Event(self.key, text, self.told, request.cached_tokens, logprobs, of_prompt, reason, request.error)


class Ending:
    """What SIGTERM begins: no new requests, and some seconds for the others. A second SIGTERM ends at once."""

    def __init__(self, seconds: float):
        self.seconds, self.deadline = seconds, None
        signal.signal(signal.SIGTERM, self._begin)

    def _begin(self, *_):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.deadline = time.perf_counter() + self.seconds


def run_engine(engine: Engine, tokenizer: Tokenizer, connection, ending: Ending, queue_seconds: float):
    """Step the engine with what comes through the pipe, until EOFError says that the other process has gone. It goes
    when the server ends and it has answered all requests."""
    jobs: dict[int, Job] = {}
    while True:
        receive(engine, jobs, tokenizer, connection)
        now, deadline = time.perf_counter(), ending.deadline
        busy = engine.active
        engine.step()
        seconds, active = time.perf_counter() - now, sum(row.request is not None for row in engine.rows)
        news = [job for job in jobs.values() if job.told < len(job.request.new_tokens) or job.request.finish_reason]
        events = [job.event() for job in news]
        for job in news:
            if job.request.finish_reason is not None:
                del jobs[job.key]
        state = "ready" if deadline is None else "draining" if now <= deadline else "ended"
        step_s = seconds if busy else 0.0
        drafts = engine.speculation.report.drafts if engine.speculation is not None else {}
        connection.send(News(state, events, step_s, len(jobs) - active, active, engine.timing.prefill_tokens, drafts))
        if state == "ended" and now > deadline + HTTP_END_S:
            return  # the other process hangs
        for job in jobs.values():  # of several prompts, the first one tells how long all have been waiting
            if state == "ended" or (job.first and job.waited(now) > queue_seconds):
                engine.cancel(job.request)


def receive(engine: Engine, jobs: dict[int, Job], tokenizer: Tokenizer, connection):
    """Give the engine what has come through the pipe; an idle engine waits for it, for a moment."""
    waited = 0.0 if engine.active else IDLE_S
    while connection.poll(waited):
        key, *wish = connection.recv()
        waited = 0.0
        if wish:
            jobs[key] = Job(tokenizer, key, *wish)
            engine.add(jobs[key].request)
        elif key in jobs:
            engine.cancel(jobs[key].request)


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun's
        from ranks import run_together

        run_together(main)
    run_command(main)
