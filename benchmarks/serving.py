"""Our server beside those of llama.cpp and ik_llama.cpp: throughput, time of a step, time to the first token.

`python benchmarks/serving.py --llama_server PATH/llama-server --gguf MODEL.gguf` starts our server
and those of the peers that are named, with the options that are given
(--ik_llama_options="-rtr"), and measures them in turns with prompts of the same length and the same
numbers of new tokens: greedy, EOS tokens ignored, streamed. The client is this process, on the same
cores. Read down: Stream (a request), the server's counters, what is measured, the report.

  throughput    of one stream and of eight: the new tokens of all streams, divided by the time from
                the first request to the last token
  step          the time of a step of 8 rows: in the engine alone (generate.py), and in the server
                (from /metrics)
  short beside  the time to the first token of a short prompt that comes while a long prompt is being
                read, beside the time of one chunk of the long prompt
  second turn   the time to the first token of a prompt of which all but 20 tokens are in the cache,
                and of a new prompt of the same length
"""

import asyncio
import itertools
import json
import random
import re
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from measure import (
    DECODE,
    PEERS,
    ROOT,
    add_server_options,
    all_servers,
    column,
    make_parser,
    medians,
    quantized,
    ratio,
    run_generate,
    save,
    take_turns,
)

from cli import UserError, run_command
from load import choose_device, open_checkpoint

STREAMS = 8
ATTEMPTS = 5  # tries of a peer whose answers end too early
ANSWER_S = 600.0  # the longest that all streams of a run may take

# ---------------------------------------------------------------- the client


class TooShort(UserError):
    """An answer has too few tokens."""


@dataclass
class Stream:
    """A streamed completion, and the times at which its tokens came."""

    prompt: list[int]
    new_tokens: int
    more: dict = field(default_factory=dict)  # further fields of the request
    start: float = 0.0
    times: list[float] = field(default_factory=list)  # also of events without text
    usage: dict = field(default_factory=dict)

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.start

    async def run(self, port: int):
        """Send the request and read the answer.

        UserError if the server refuses it; TooShort if tokens are missing.
        """
        body = {"prompt": self.prompt, "max_tokens": self.new_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body | self.more).encode()
        head = [
            "POST /v1/completions HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            self.start = time.perf_counter()
            writer.write("\r\n".join([*head, "", ""]).encode() + data)
            await self.read(reader)
        finally:
            writer.close()

        made = self.usage.get("completion_tokens", len(self.times))
        if made != self.new_tokens:
            raise TooShort(f"the server wrote {made} tokens, not {self.new_tokens}")

    async def read(self, reader: asyncio.StreamReader):
        """Read the answer to its end, and note when its tokens came."""
        status = await reader.readline()
        if b" 200 " not in status:
            raise UserError(f"the server refused a request: {status.decode().strip()}")
        while line := await reader.readline():
            if line.startswith(b'data: {"error"'):
                raise UserError(f"the server broke off: {line.decode().strip()}")
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                self.usage = event.get("usage") or self.usage
                if event["choices"]:
                    self.times.append(time.perf_counter())


def run_streams(port: int, streams: list[Stream], delay: float = 0.0) -> list[Stream]:
    """Run streams concurrently. Each starts `delay` seconds after the one before it."""

    async def later(i: int, stream: Stream):
        await asyncio.sleep(i * delay)
        await stream.run(port)

    async def all_of_them():
        runs = [later(i, stream) for i, stream in enumerate(streams)]
        await asyncio.wait_for(asyncio.gather(*runs), ANSWER_S)

    asyncio.run(all_of_them())
    return streams


# ---------------------------------------------------------------- the server's counters


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = re.findall(r"^fastpath_(\w+) (\S+)$", answer.read().decode(), re.M)
    return {name: float(value) for name, value in lines}


# ---------------------------------------------------------------- what is measured


class Prompts:
    """Random token ids, new in each call, so that no server has a part of them in its cache."""

    def __init__(self, V: int):
        self.random = random.Random(1)
        self.V = V

    def draw(self, n: int) -> list[int]:
        return [self.random.randrange(20, self.V) for _ in range(n)]

    def streams(self, count: int, prompt: int, new: int) -> list[Stream]:
        return [Stream(self.draw(prompt), new) for _ in range(count)]


def throughput(port: int, streams: list[Stream]) -> dict:
    run_streams(port, streams)
    start = min(stream.start for stream in streams)
    end = max(stream.times[-1] for stream in streams)
    tokens = sum(stream.new_tokens for stream in streams)
    first = median(stream.first_token_s for stream in streams)
    return {"tokens_per_s": tokens / (end - start), "first_token_s": first}


def run_peer(port: int, prompts: Prompts, count: int, prompt: int, new: int) -> dict:
    """The throughput of a peer's server.

    Some servers end an answer at special tokens although they were told to ignore EOS. They get
    other prompts then.
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(TooShort):
            return throughput(port, prompts.streams(count, prompt, new))
    return throughput(port, prompts.streams(count, prompt, new))


def ours(port: int, streams: list[Stream]) -> dict:
    """The throughput of our server, with its own counters. They count steps that read prompts, too."""
    before = metrics(port)
    found = throughput(port, streams)
    after = metrics(port)
    steps = after["step_seconds_count"] - before["step_seconds_count"]
    found["step_s"] = (after["step_seconds_sum"] - before["step_seconds_sum"]) / steps
    gaps = [b - a for stream in streams for a, b in itertools.pairwise(stream.times)]
    found["between_tokens_s"] = median(gaps)
    return found


def short_beside_long(port: int, prompts: Prompts, long: int, chunk: int) -> dict:
    """The times to the first token of a long prompt, and of a short one that is sent 50 ms later.

    They come with the time of one chunk of a long prompt that is read alone.
    """
    alone = run_streams(port, prompts.streams(1, long, 1))[0]
    both = [*prompts.streams(1, long, 1), *prompts.streams(1, 8, 1)]
    reading, short = run_streams(port, both, delay=0.05)
    chunk_s = alone.first_token_s / -(-long // chunk)
    return {"short_s": short.first_token_s, "long_s": reading.first_token_s, "chunk_s": chunk_s}


def second_turn(port: int, prompts: Prompts, history: int) -> dict:
    first = Stream(prompts.draw(history), 1)
    again = Stream(first.prompt + prompts.draw(20), 1)
    new = Stream(prompts.draw(history + 20), 1)
    for stream in (first, again, new):
        run_streams(port, [stream])
    return {"reused_s": again.first_token_s, "new_s": new.first_token_s}


def measure_servers(args, directory: Path, ports: dict[str, int]) -> dict:
    prompts = Prompts(open_checkpoint(str(directory)).config.vocab_size - 1)
    prompt = args.prompt_tokens
    new = args.new_tokens
    long = args.long_prompt
    flags = ["--checkpoint_path", directory]
    port = ports["fastpath"]
    contestants = {
        "engine": lambda: run_generate(ROOT, flags, prompt, new, STREAMS),
        "fastpath 1": lambda: ours(port, prompts.streams(1, prompt, new)),
        f"fastpath {STREAMS}": lambda: ours(port, prompts.streams(STREAMS, prompt, new)),
        "short beside long": lambda: short_beside_long(port, prompts, long, args.prefill_chunk),
        "second turn": lambda: second_turn(port, prompts, args.history),
    }
    for peer, n in itertools.product(PEERS, (1, STREAMS)):
        if peer in ports:
            contestants[f"{peer} {n}"] = partial(run_peer, ports[peer], prompts, n, prompt, new)
    return take_turns(contestants, args.rounds)


# ---------------------------------------------------------------- the report


def report(found: dict[str, list]) -> dict:
    engine_s = [STREAMS / one[DECODE] for one in found.pop("engine")]
    short = found.pop("short beside long")
    turns = found.pop("second turn")
    rates = {name: column(rounds, "tokens_per_s") for name, rounds in found.items()}
    all_streams = f"fastpath {STREAMS}"
    gaps = column(found[all_streams], "between_tokens_s")

    ratios = ratio(f"{STREAMS}_streams_over_1", rates[all_streams], rates["fastpath 1"])
    ratios |= ratio("step_with_client_over_engine", gaps, engine_s)
    ratios |= ratio("short_prompt_over_chunk", column(short, "short_s"), column(short, "chunk_s"))
    ratios |= ratio("second_turn_new_over_reused", column(turns, "new_s"), column(turns, "reused_s"))
    for peer, n in itertools.product(PEERS, (1, STREAMS)):
        if f"{peer} {n}" in rates:
            ratios |= ratio(f"{n}_streams_over_{peer}", rates[f"fastpath {n}"], rates[f"{peer} {n}"])

    for name, value in ratios.items():
        if not name.endswith("_spread"):
            low, high = ratios[f"{name}_spread"]
            print(f"{name}: {value:.2f} ({low:.2f}-{high:.2f})")

    return {
        "servers": {name: medians(rounds) for name, rounds in found.items()},
        "engine_step_s": median(engine_s),
        "short_beside_long": medians(short),
        "second_turn": medians(turns),
        "ratios": ratios,
    }


def main():
    counts = {"--rounds": 5, "--prompt_tokens": 64, "--new_tokens": 128}  # of each stream
    counts |= {"--long_prompt": 2000, "--history": 1000, "--prefill_chunk": 128}
    parser = make_parser(__doc__, counts)
    add_server_options(parser)
    args = parser.parse_args()

    directory = quantized(args.checkpoint_path, args.format)
    out = args.out or ROOT / "benchmarks" / "results" / "serving.json"
    longest = max(args.long_prompt, args.history + 20, args.prompt_tokens + args.new_tokens)
    chunk = ["--prefill_chunk", args.prefill_chunk]
    with all_servers(args, directory, out, STREAMS, longest + 64, chunk) as ports:
        found = measure_servers(args, directory, ports)

    about = {"model": directory.name, "format": args.format}
    shape = ("prompt_tokens", "new_tokens", "long_prompt", "history", "prefill_chunk")
    about |= {key: getattr(args, key) for key in shape}
    save("serving", about | {"streams": STREAMS} | report(found), out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
