"""The server: `python serve.py`, then OpenAI's API at http://127.0.0.1:8000.

Read down: options and `main`; Job, a request with its text; `run_engine`, the loop around the engine's steps. Nothing
of generation is here: that is engine.py.

There are two processes, because a thread beside the engine would take its time: both need Python's lock. The first one
runs the engine (with torchrun it is rank 0). It starts the second one, which has the sockets and knows text and JSON
(http_server.py). Between them is a pipe. Requests go one way; after each step of the engine the news of all of them go
the other way, in one message.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported; run_command takes over from there

import os
import threading
import time
from bisect import bisect_left

from api import Event
from cli import ArgumentParser, HelpFormatter, UserError, number, print_status, run_command
from engine import Engine, Request
from http_server import Settings, http_process, listen
from load import (
    SingleProcess,
    add_model_options,
    check_model_options,
    choose_device,
    compile_while_serving,
    load_engine,
    open_checkpoint,
    warm_up,
)
from tokenizer import TextStream, Tokenizer

CONTEXT = 4096  # positions of a cache row where nothing else is said and the model has as many

# ---------------------------------------------------------------- options and main


def parse_arguments(argv=None):
    count = number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description="Serve a model over HTTP, as OpenAI's API.", formatter_class=HelpFormatter)
    add = parser.add_argument_group("the server").add_argument
    add("--host", default="127.0.0.1", help="the address to bind to; 0.0.0.0: all of this machine's")
    add("--port", type=number(int, "0 to 65535", lambda n: 0 <= n < 65536), default=8000, help="0: any that is free")
    add("--api_key", help="clients must send it (Authorization: Bearer KEY) for every path but /health")
    add("--max_batch_size", type=count, default=8, help="requests that run at the same time; others wait")
    add("--prefill_chunk", type=count, help="tokens of a prompt read in one step (128, or 256 in bf16)")
    add_model_options(parser)
    args = parser.parse_args(argv)
    check_model_options(args)
    if args.api_key == "":
        raise UserError("--api_key is empty; give a key, or leave it away, and nobody needs one")
    return args


def main(ranks=None):
    """ranks: a tp.Ranks, where torchrun has started several of us; the first one serves, the others follow it."""
    ranks = ranks or SingleProcess()
    args = ranks.share(parse_arguments)
    listener = listen(args.host, args.port) if ranks.rank == 0 else None
    checkpoint = open_checkpoint(args, ranks)
    config = checkpoint.config
    length = args.max_seq_length or min(CONTEXT, config.max_seq_length)
    if length > config.max_seq_length and not config.alibi:
        raise UserError(f"--max_seq_length {length} is more than the model's context of {config.max_seq_length}")
    if ranks.rank:
        return load_engine(args, checkpoint, args.max_batch_size, length, ranks)[0].follow()
    settings = Settings(checkpoint.directory, checkpoint.directory.resolve().name, length, args.api_key)
    with http_process(settings, listener) as connection:
        later = compiles_later(args, ranks)
        args.compile = args.compile and not later
        engine, _ = load_engine(args, checkpoint, args.max_batch_size, length, ranks)
        engine.chunk_tokens, engine.always_chunk = args.prefill_chunk or engine.chunk_tokens, True
        for n in (40, 8):  # prefill has a graph for long inputs and one for short ones
            warm_up(args, engine, [[0] * min(n, length)] * args.max_batch_size, random=True)
        if later:
            threading.Thread(target=compile_while_serving, args=(engine,), daemon=True).start()
        host, port = listener.getsockname()[:2]
        print_status(f"serving {settings.name} at http://{f'[{host}]' if ':' in host else host}:{port}")
        run_engine(engine, checkpoint.tokenizer, connection)


def compiles_later(args, ranks) -> bool:
    """Whether --compile runs in a thread while eager steps serve. It does not on GPUs, whose CUDA graphs belong to the
    thread that made them, and not with a draft or several ranks, whose steps are more than one function."""
    on_cpu = choose_device(ranks.device(args.device)).type == "cpu"
    return args.compile and on_cpu and ranks.size == 1 and not (args.draft or args.draft_checkpoint_path)


# ---------------------------------------------------------------- the engine's process


class Job:
    """A request that the engine has, and its text."""

    def __init__(self, key: int, request: Request, stop: tuple[str, ...], continues: bool, tokenizer: Tokenizer):
        """continues: the text goes on where the prompt ends, else it begins anew, as an answer in a chat does."""
        self.key, self.request = key, request
        self.stream = TextStream(tokenizer, request.prompt if continues else (), stop)
        self.text, self.before = "", 0  # text that no event has told yet; the characters before it
        self.offsets: list[int] = []  # in the text, where each token begins
        self.told, self.told_logprobs = 0, 0  # tokens in events
        request.on_token = self.add

    def add(self, token: int) -> bool:
        self.offsets.append(self.before + len(self.text) + len(self.stream.held))
        self.text += self.stream.add(() if token in self.request.stop_ids else (token,))
        return self.stream.stopped

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


def run_engine(engine: Engine, tokenizer: Tokenizer, connection):
    """Step the engine with what comes through the pipe, until EOFError says that the other process has gone.

    An idle engine steps once a second: other ranks get an empty plan then, so that nothing of theirs times out.
    """
    jobs: dict[int, Job] = {}
    connection.send(([], (0.0, 0, 0, 0)))  # ready
    while True:
        waited = 0.0 if engine.active else 1.0
        while connection.poll(waited):
            key, *wish = connection.recv()
            waited = 0.0
            if wish:
                jobs[key] = Job(key, *wish, tokenizer)
                engine.add(jobs[key].request)
            elif key in jobs:
                engine.cancel(jobs[key].request)
        busy, start = engine.active, time.perf_counter()
        engine.step()
        seconds, active = time.perf_counter() - start, sum(row.request is not None for row in engine.rows)
        news = [job for job in jobs.values() if job.told < len(job.request.new_tokens) or job.request.finish_reason]
        events = [job.event() for job in news]
        for job in news:
            if job.request.finish_reason is not None:
                del jobs[job.key]
        if busy or events:
            connection.send((events, (seconds, len(jobs) - active, active, engine.timing.prefill_tokens)))


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun's
        from tp import run_together

        run_together(main)
    run_command(main)
