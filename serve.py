"""The server: `python serve.py NAME`, then OpenAI's API at http://127.0.0.1:8000.

Read down: options and `main`; the HTTP process; RunningRequest, a request in the engine; EngineServer,
the loop around the engine's steps. Generation itself is in engine.py.

There are two processes, because in one process, HTTP and the engine would wait for each other: only
one thread at a time can hold Python's global interpreter lock. The process that was started (with
torchrun, rank 0) runs the engine, and knows tokens and grammars. It starts a second one, which has
the sockets, knows JSON, and turns text into tokens and back (server/http_server.py). They exchange the
messages of server/pipe_messages.py through a pipe. The engine's process imports no web library.
"""

import os
import signal

if __name__ == "__main__":
    # Idle OpenMP threads spin for 0.3 ms, then sleep.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Ctrl-C prints no traceback while torch is imported. Later, run_command handles it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import json
import multiprocessing
import socket
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import resource_tracker

from checkpoint import Checkpoint
from cli import (
    ArgumentParser,
    HelpFormatter,
    UserError,
    first_line,
    natural,
    number,
    positive,
    print_status,
    run_command,
)
from compile import compile_while_serving, warm_up
from engine import CHUNK_TOKENS, Engine, EngineOptions, Request, SingleProcess, generate
from load import choose_cache_length, choose_device, default_params, load_engine, open_checkpoint
from options import ModelOptions, add_model_options
from server.pipe_messages import Cancel, EngineStatus, Settings, TextRequest, Update
from text.chat_template import answer_end_ids
from text.grammar import GrammarThread, ThinkingLimit
from text.tokenizer import Tokenizer

WEB_LIBRARIES = ("starlette", "uvicorn", "h11", "prometheus_client", "pydantic")
STALLED_TIMEOUT_S = 30  # a client that has read nothing for this long is disconnected
SEND_BUFFER_BYTES = 1 << 18  # of a response that the system holds for its client
DEFAULT_CONTEXT = 4096  # positions of a cache row without --max_seq_length, if the model has them
RANK_TIMEOUT_S = 8.0  # the server ends if a rank has sent no heartbeat for this long
PIPE_CLOSED = (EOFError, BrokenPipeError, ConnectionResetError)  # the other process has ended
HTTP_EXIT_TIMEOUT_S = 10.0  # for the HTTP process to exit after the drain time
COMPILING_S = 0.002  # how often an idle engine checks whether a grammar has been compiled
# How often an idle engine does a step, which tells the other ranks and the HTTP process that it is
# alive.
IDLE_S = 0.25

# ---------------------------------------------------------------- options and main


def parse_arguments(argv=None):
    description = "Serve a model over HTTP, with OpenAI's API: text, or embeddings if the model's files name a pooling."
    parser = ArgumentParser(description=description, formatter_class=HelpFormatter)
    port = number(int, "0 to 65535", lambda n: 0 <= n < 65536)
    seconds = number(float, "more than 0", lambda s: s > 0)
    add = parser.add_argument_group("the server").add_argument
    add("--host", default="127.0.0.1", help="the address to bind to; 0.0.0.0 is all interfaces")
    add("--port", type=port, default=8000, help="0 is any free port")
    add("--api_key", help="clients must send it (Authorization: Bearer KEY), except for / and /health")
    add("--strict_model", action="store_true", help="refuse requests that name another model (status 404)")
    add("--max_batch_size", type=positive, default=8, help="requests that run at the same time; others wait")
    add("--max_queue", type=natural, help="waiting requests; more get status 429 (default: 4 times --max_batch_size)")
    add("--queue_seconds", type=seconds, default=60.0, help="a request that has waited this long gets status 503")
    add("--drain_seconds", type=seconds, default=20.0, help="time for requests to finish after Ctrl-C or SIGTERM")
    add("--quiet", action="store_true", help="print no line when a request ends")
    add("--prefill_chunk", type=positive, help="tokens of a prompt read in one step (128, or 256 in bf16)")
    add_model_options(parser, f"{DEFAULT_CONTEXT}, or the model's context if that is less")

    args = parser.parse_args(argv)
    args.model = ModelOptions.from_arguments(args, converses=True)
    if args.max_queue is None:
        args.max_queue = 4 * args.max_batch_size
    key = args.api_key
    if key is not None and (key != key.strip() or min(key, default="") < " "):
        raise UserError(
            "--api_key is empty or has control characters, or white space at an end, which HTTP cannot transmit; "
            "leave the option out to need no key"
        )
    return args


def main(ranks=None):
    """Serve until SIGTERM or Ctrl-C.

    ranks: a tp.Ranks if torchrun has started several processes. Rank 0 serves; the others follow it.
    """
    ranks = ranks or SingleProcess()
    args = ranks.share(parse_arguments)
    if ranks.rank == 0:
        check_web_libraries()
        listener = bind(args.host, args.port)

    compiles_later = may_compile_later(args.model, ranks)
    options = replace(args.model, compile=args.model.compile and not compiles_later)
    checkpoint = open_checkpoint(options.checkpoint_path, ranks)
    config = checkpoint.config
    length = choose_cache_length(args.max_seq_length, config, wanted=DEFAULT_CONTEXT)
    how = EngineOptions(args.prefill_chunk, always_chunk=True, ranks=ranks)
    if ranks.rank:
        engine = load_engine(checkpoint, options, args.max_batch_size, length, how)
        # Rank 0 ends this process when its requests have finished.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ranks.timeout_s = RANK_TIMEOUT_S
        return engine.follow()

    settings = Settings(
        config=config,
        tokenizer_files=checkpoint.tokenizer_files,
        model_name=checkpoint.name,
        context_length=length,
        max_batch_size=args.max_batch_size,
        max_queue=args.max_queue,
        api_key=args.api_key,
        strict_model=args.strict_model,
        sampling=default_params(checkpoint, options),
        quiet=args.quiet,
    )
    with http_process(settings, listener) as connection:
        tokenizer = checkpoint.tokenizer
        end_ids = answer_end_ids(checkpoint.tokenizer_files, tokenizer)
        grammars = GrammarThread(tokenizer, config.vocab_size, end_ids)
        engine = load_engine(checkpoint, options, args.max_batch_size, length, how)
        warm_up_s = 0.0
        for n in (40, 8):  # prefill has a graph for long inputs and one for short ones
            warm_up_s += warm_up(engine, [[0] * min(n, length)] * args.max_batch_size, random=True)
        if compiles_later:
            threading.Thread(target=compile_while_serving, args=(engine,), daemon=True).start()

        ranks.timeout_s = RANK_TIMEOUT_S
        shutdown = Shutdown(args.drain_seconds)
        # The HTTP process waits a few times as long for a step before it takes the engine for stuck.
        step_s = warm_up_s or chunk_seconds(engine, length)
        connection.send(EngineStatus("ready", [], step_s))
        status = f"serving {checkpoint.name} ({engine.model.backend.name} kernels) at {url(listener)}"
        print_status(status + examples(url(listener), checkpoint, args.api_key))
        server = EngineServer(engine, tokenizer, connection, grammars)
        server.run(shutdown, args.queue_seconds)
    engine.close()
    print_status("the server has ended")
    return shutdown.exit_code


def chunk_seconds(engine: Engine, length: int) -> float:
    """About how long a step takes that reads a whole chunk of a prompt. It is estimated from a short
    chunk."""
    chunk = min(engine.options.chunk_tokens or CHUNK_TOKENS, length)
    n = min(chunk, 64)
    start = time.perf_counter()
    generate(engine, [Request([0] * n, max_new_tokens=0)])
    seconds = time.perf_counter() - start
    engine.clear()
    engine.reset_timing()
    return seconds * chunk / n


def url(listener: socket.socket) -> str:
    """The URL of the server whose socket this is."""
    host, port = listener.getsockname()[:2]
    if ":" in host:  # IPv6
        host = f"[{host}]"
    return f"http://{host}:{port}"


# Of what a client may ask: the path, the prompt's field, the prompt, and where the answer is.
TEXT_EXAMPLE = ("completions", "prompt", "Once upon a time", "choices[0].text")
QUESTION = {"role": "user", "content": "Why is the sky blue?"}
CHAT_EXAMPLE = ("chat/completions", "messages", [QUESTION], "choices[0].message.content")
EMBEDDING_EXAMPLE = ("embeddings", "input", "Why is the sky blue?", "data[0].embedding")


def examples(address: str, checkpoint: Checkpoint, api_key: str | None) -> str:
    """Lines that say how to ask a server with curl and from Python. They do not contain the key."""
    if checkpoint.tokenizer.vocabulary is None:
        return ""

    path, name, prompt, answer = TEXT_EXAMPLE
    limit = {"max_tokens": 200}
    if getattr(checkpoint.tokenizer, "embedding", None) is not None:
        path, name, prompt, answer = EMBEDDING_EXAMPLE
        limit = {}
    elif checkpoint.tokenizer_files.template is not None:
        path, name, prompt, answer = CHAT_EXAMPLE
    body = json.dumps({name: prompt} | limit)
    arguments = "".join(f", {key}={value}" for key, value in limit.items())
    header = ' -H "Authorization: Bearer $API_KEY"' if api_key else ""
    key = "the key" if api_key else "unused"

    return f"""

A page to use it is at this address. With curl:
    curl {address}/v1/{path}{header} -H "Content-Type: application/json" \\
        -d '{body}'
From Python (pip install openai):
from openai import OpenAI
client = OpenAI(base_url="{address}/v1", api_key="{key}")
prompt = {json.dumps(prompt)}
answer = client.{path.replace("/", ".")}.create(model={json.dumps(checkpoint.name)}, {name}=prompt{arguments})
print(answer.{answer})
"""


def check_web_libraries():
    """Raise UserError if a library of the HTTP process is missing."""
    missing = [name for name in WEB_LIBRARIES if find_spec(name) is None]
    if missing:
        raise UserError(f"{missing[0]} is not installed: pip install -r requirements-serve.txt")


def may_compile_later(options: ModelOptions, ranks) -> bool:
    """Whether --compile runs in a thread while eager steps serve.

    It does not on GPUs, where a CUDA graph belongs to the thread that captured it, and not with a
    draft or several ranks, whose steps are more than one function.
    """
    is_plain = options.compile and not options.speculates and ranks.size == 1
    return is_plain and choose_device(options.device).type == "cpu"


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address. It refuses connections until `http_process` listens on it."""
    if not host:  # the system would take it for all addresses
        raise UserError("--host is empty; give an address, or 0.0.0.0 for all interfaces")

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # socket.create_server would leave the protocol at 0. Only for a socket with IPPROTO_TCP does
    # asyncio turn off Nagle's algorithm, which delays responses by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_TIMEOUT_S * 1000)

    try:
        listener.bind((host, port))
    except (OSError, TypeError, ValueError) as error:  # the last two: an impossible host name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port} cannot be listened on: {reason}") from None
    return listener


def run_http_process(listener: socket.socket, connection):
    """The HTTP process from start to end. The web libraries are imported only here."""
    from server.http_server import run_http

    run_http(listener, connection)


@contextmanager
def http_process(settings: Settings, listener: socket.socket):
    """Run the HTTP process, and yield our end of the pipe to it.

    It exits when the pipe is closed, or by itself if the server is shutting down and all requests
    have been answered.
    """
    listener.listen(1024)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_http_process, args=(listener, theirs), daemon=True)

    try:
        with blocked_signals():
            process.start()
        theirs.close()
        # They are not an argument of the process, because start() would wait forever for a
        # process that has died to read them.
        ours.send(settings)
        yield ours

        ours.close()
        process.join(5)
        if process.exitcode:
            raise EOFError
    except PIPE_CLOSED:
        process.join(5)
        raise UserError(f"the HTTP process has ended (exit code {process.exitcode})") from None
    finally:
        ours.close()
        end_http_process(process)


@contextmanager
def blocked_signals():
    """Handle Ctrl-C and SIGTERM only when this block ends.

    A process that is started in it never gets them: Ctrl-C in a terminal sends SIGINT to both
    processes, and only this one should handle it.
    """
    # multiprocessing would start the tracker in this block, and unblock the signals.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def end_http_process(process: multiprocessing.Process):
    """Wait for the end of the HTTP process, which notices that the pipe is closed, and first
    answers its clients."""
    if not process.is_alive():
        return
    # This ends a process that does not yet watch the pipe. Later, it is ignored.
    os.kill(process.pid, signal.SIGUSR1)
    process.join(5)
    process.kill()


# ---------------------------------------------------------------- the engine's process


class RunningRequest:
    """A request of the HTTP process, and how many of its tokens were sent back."""

    def __init__(self, text_request: TextRequest):
        self.request_id = text_request.request_id
        self.can_time_out = text_request.can_time_out
        self.request = text_request.request  # the engine's
        self.sent_tokens = 0

    def has_update(self) -> bool:
        return self.sent_tokens < len(self.request.new_tokens) or self.request.finish_reason is not None

    def has_timed_out(self, now: float, queue_seconds: float) -> bool:
        """Whether the request has waited too long for a row."""
        times = self.request.times
        waited = now - times.get("added", now)
        return self.can_time_out and "started" not in times and waited > queue_seconds

    def update(self) -> Update:
        """What is new since the last update."""
        request = self.request
        failure = request.failure
        start = self.sent_tokens
        self.sent_tokens = len(request.new_tokens)
        token_ids = request.new_tokens[start:]
        scored = zip(token_ids, request.token_logprobs[start:])
        vector = request.embedding
        return Update(
            self.request_id,
            "",
            self.sent_tokens,
            request.cached_tokens,
            logprobs=[(token, own, best) for token, (own, best) in scored],
            prompt_logprobs=request.prompt_token_logprobs if start == 0 else [],
            finish_reason=request.finish_reason,
            error=request.error,
            traceback="".join(traceback.format_exception(failure)) if failure else None,
            token_ids=token_ids,
            embedding=None if vector is None else vector.numpy().tobytes(),
        )


class Shutdown:
    """SIGTERM or Ctrl-C gives running requests some seconds to finish. A second one ends the
    process."""

    def __init__(self, drain_seconds: float):
        self.drain_seconds = drain_seconds
        self.deadline: float | None = None  # set by the first signal
        self.exit_code = 0  # of the process, when the requests have finished
        signal.signal(signal.SIGTERM, self._begin)
        # With several ranks, Ctrl-C ends all of them at once (tp.py), because a terminal sends it to all.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._begin)

    def _begin(self, kind: int, _):
        self.exit_code = 130 if kind == signal.SIGINT else 0
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.SIG_DFL)
        self.deadline = time.perf_counter() + self.drain_seconds

    def state(self, now: float) -> str:
        """The state of EngineStatus."""
        if self.deadline is None:
            return "ready"
        return "draining" if now <= self.deadline else "ended"


class EngineServer:
    """The loop of the engine's process: runs the requests that come through the pipe, and sends
    back what is new."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, connection, grammars: GrammarThread):
        self.engine = engine
        self.tokenizer = tokenizer
        self.connection = connection
        self.grammars = grammars
        self.running: dict[int, RunningRequest] = {}  # by request_id

    def run(self, shutdown: Shutdown, queue_seconds: float):
        """Run until the HTTP process has exited, which it does when the server is shutting down and
        all requests have been answered."""
        try:
            while shutdown.deadline is None:
                self._run_step(shutdown, queue_seconds)
            print_status(f"shutting down: waiting at most {shutdown.drain_seconds:g} s for requests to finish")
            while time.perf_counter() < shutdown.deadline + HTTP_EXIT_TIMEOUT_S:  # or the HTTP process hangs
                self._run_step(shutdown, queue_seconds)
        except PIPE_CLOSED:
            if shutdown.deadline is None:
                raise

    def _run_step(self, shutdown: Shutdown, queue_seconds: float):
        self._receive()
        self._add_compiled()
        start = time.perf_counter()
        state = shutdown.state(start)
        self._step(state)
        for running in self.running.values():
            if state == "ended" or running.has_timed_out(start, queue_seconds):
                self.engine.cancel(running.request)

    def _receive(self):
        """Handle the messages that have come. An idle engine waits for them, but not for long."""
        timeout = IDLE_S
        if self.engine.has_requests:
            timeout = 0.0
        elif self.grammars.pending:
            timeout = COMPILING_S

        while self.connection.poll(timeout):
            timeout = 0.0
            message = self.connection.recv()
            if isinstance(message, TextRequest):
                running = RunningRequest(message)
                self.running[message.request_id] = running
                if message.thinking is not None:
                    vocabulary = self.tokenizer.vocabulary
                    running.request.grammar = ThinkingLimit(message.thinking, vocabulary)
                if message.grammar is None:
                    self.engine.add(running.request)
                else:
                    self.grammars.add(running.request, message.grammar)
            elif isinstance(message, Cancel) and message.request_id in self.running:
                request = self.running[message.request_id].request
                if self.grammars.discard(request):
                    del self.running[message.request_id]
                else:
                    self.engine.cancel(request)

    def _add_compiled(self):
        """Pass requests whose grammars have been compiled on to the engine."""
        for request, grammar in self.grammars.finished():
            # This is not expected, because the HTTP process has compiled the grammar before.
            if isinstance(grammar, BaseException):
                request.finish_reason = "error"
                request.error = first_line(grammar)
                request.failure = grammar
                continue
            if request.grammar is None:
                request.grammar = grammar
            else:  # a ThinkingLimit
                request.grammar.grammar = grammar
            self.engine.add(request)

    def _step(self, state: str):
        """Do a step of the engine, and send a status with the updates of all requests."""
        had_requests = self.engine.has_requests
        start = time.perf_counter()
        self.engine.step()
        step_s = time.perf_counter() - start

        updates = [running.update() for running in self.running.values() if running.has_update()]
        for update in updates:
            if update.finish_reason is not None:
                del self.running[update.request_id]

        active_rows = sum(row.request is not None for row in self.engine.rows)
        status = EngineStatus(
            state,
            updates,
            step_s if had_requests else 0.0,
            waiting=len(self.running) - active_rows,
            active_rows=active_rows,
            prefill_tokens=self.engine.timing.prefill_tokens,
            drafts=self.engine.decoding.draft_counts,
        )
        self.connection.send(status)


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun's
        from tp import run_together

        run_together(main)
    run_command(main)
