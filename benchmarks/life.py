"""The life of a token (docs/life-of-a-token.md): where the time of a prompt, of a decode step and of a request goes.

Read down: Clock, which wraps functions; the hops of a pass, and of a request in both processes of serve.py. Each
part is measured in pairs, without and with the clock. The time of a hop is that of its function without the hops
inside it. Inside the fused operation of all blocks, the kernels take the time (cpu/profile.h). What no hop accounts
for is the time without the clock minus all hops. charts.py draws the result.
"""

import ctypes
import functools
import importlib
import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import measure
import torch

import serve
from cli import UserError, print_status, run_command
from engine import Engine, Request
from load import load_engine, open_checkpoint
from options import ModelOptions


class Hop(NamedTuple):
    function: str
    file: str
    shape: str  # in the letters of model.py
    key: str = ""  # of its time, if that is not simply the time of the function


PASS = [
    Hop("Tokenizer.encode", "text/tokenizer.py", "text to (S)"),
    Hop("Engine.make_plan", "engine.py", "one row"),
    Hop("Engine._read", "engine.py", "a chunk"),
    Hop("Engine._prefill", "engine.py", "ids to (S)"),
    Hop("Engine._decode", "engine.py", "an id to (S)"),
    Hop("PlainDecoding.step", "engine.py", "threads, logits"),
    Hop("Transformer.hidden", "model.py", "(S) to (S,D)"),
    Hop("Transformer.block_inputs", "model.py", "(S) to (S,D)"),
    Hop("Positions.ropes", "positions.py", "(S) to (S,E)"),
    Hop("FusedBlocks.__call__", "cpu/install.py", "arguments, memory"),
    Hop("apply_norm", "cpu/blocks.h", "(S,D)", "norm"),
    Hop("matmul", "cpu/matmul.h", "(S,D) to qkv", "qkv"),
    Hop("run_attention", "cpu/attention.h", "(S,H,E), (T,K,E)", "attention"),
    Hop("run_delta_net", "cpu/blocks.h", "(S,m,dv), (m,dk,dv)", "recurrent"),
    Hop("add_product", "cpu/blocks.h", "heads to (S,D)", "out"),
    Hop("matmul, activate", "cpu/blocks.h", "(S,D) to (S,F)", "up"),
    Hop("add_product", "cpu/blocks.h", "(S,F) to (S,D)", "down"),
    Hop("run_experts", "cpu/blocks.h", "(S,D)", "experts"),
    Hop("RMSNorm.forward", "layers.py", "(S,D)"),
    Hop("Transformer.linear_head", "model.py", "(D) to (V)"),
    Hop("Transformer.drawable_logits", "model.py", "settings"),
    Hop("multiply_units", "cpu/matmul.h", "(D) to (V)", "shadow"),
    Hop("multiply", "cpu/head.h", "(D) to a few", "head"),
    Hop("Barrier", "cpu/barrier.h", "threads meet", "waiting"),
    Hop("draw", "engine.py", "(V) to an id"),
    Hop("Engine._append_tokens", "engine.py", "an id"),
]
REQUEST = [
    Hop("HttpConnection", "server/connections.py", "the socket", "arrives"),
    Hop("HttpConnection.data_received", "server/connections.py", "bytes to a request"),
    Hop("completion_endpoint", "server/http_server.py", "JSON to fields", "routed"),
    Hop("ChatModel.read_conversation", "server/chat_prompts.py", "messages to text"),
    Hop("ChatModel.encode", "server/chat_prompts.py", "text to ids"),
    Hop("ServedModel.parse_chat", "server/api.py", "other fields"),
    Hop("EngineClient.generate", "server/engine_client.py", "a TextRequest"),
    Hop("EngineServer", "serve.py", "the pipe", "to_engine"),
    Hop("Engine.add", "engine.py", "the queue", "queued"),
    Hop("Engine._read", "engine.py", "the prompt's chunks"),
    Hop("Engine._decode", "engine.py", "decode steps"),
    Hop("RunningRequest.update", "serve.py", "after each token", "between"),
    Hop("EngineClient", "server/engine_client.py", "the pipe", "to_http"),
    Hop("EngineClient._read_status", "server/engine_client.py", "an Update"),
    Hop("AnswerText.read", "server/answer_text.py", "an id to text"),
    Hop("ResponseBuilder.stream_update", "server/responses.py", "text to an event"),
    Hop("event_stream", "server/http_server.py", "the socket", "leaves"),
]
# Timed as well, in both processes and in the engine's, to tell where other hops end.
PIPE = Hop("Connection._send_bytes", "multiprocessing/connection.py", "bytes")
ADD = Hop("Engine.add", "engine.py", "a Request")

# ---------------------------------------------------------------- the clock


class Mark(NamedTuple):
    """One call of a function."""

    key: str
    start: float  # time.perf_counter(), which is the same clock in all processes
    end: float
    own: float  # seconds, without the timed functions that it has called
    size: int  # bytes of its last argument, if it is bytes, or of its result


class Inner(threading.local):
    seconds = 0.0  # in timed functions that the running one has called


class Clock:
    """Wraps functions, and marks their calls while `on` is set, which processes may share."""

    def __init__(self, on, take_parts: Callable[[], dict[str, float]] = dict):
        """take_parts() returns the seconds that a function has spent in the parts of a fused operation."""
        self.on = on
        self.take_parts = take_parts
        self.marks: list[Mark] = []
        self.inner = Inner()

    def time(self, hop: Hop):
        *scope, name = hop.function.split(".")
        owner = importlib.import_module(hop.file.removesuffix(".py").replace("/", "."))
        owner = getattr(owner, scope[0]) if scope else owner
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            if not self.on.value:
                return function(*args, **kwargs)
            outer = self.inner.seconds
            self.inner.seconds = 0.0
            start = time.perf_counter()
            result = function(*args, **kwargs)
            end = time.perf_counter()
            parts = self.take_parts()
            own = end - start - self.inner.seconds - sum(parts.values())
            self.marks += [Mark(part, start, end, seconds, 0) for part, seconds in parts.items()]
            data = next((one for one in (result, args[-1]) if isinstance(one, bytes | bytearray | memoryview)), b"")
            self.marks.append(Mark(hop.function, start, end, own, len(data)))
            self.inner.seconds = outer + end - start
            return result

        setattr(owner, name, timed)


class KernelProfile:
    """What cpu/profile.h measures inside the fused operations."""

    def __init__(self):
        library = ctypes.CDLL(next(iter(torch.ops.loaded_libraries)))
        library.part_names.restype = ctypes.c_char_p
        self.names = library.part_names().decode().split()
        self.spent = (ctypes.c_int64 * len(self.names))()
        self.take_profile = library.take_profile

    def take(self, on: bool = True) -> dict[str, float]:
        """The seconds in each part since the last call. on: whether they are measured from now on."""
        self.take_profile(ctypes.c_bool(on), self.spent)
        return {name: ns / 1e9 for name, ns in zip(self.names[1:], self.spent[1:]) if ns}


def summary(hops: list[Hop], pairs: list[tuple[float, float, dict]], sizes: dict[str, float]) -> dict:
    """The table of a part. pairs: seconds without the clock, seconds with it, and those of each hop.

    These are means of the pairs in the middle, by their time: a pair in which another program ran does not count.
    """
    pairs = sorted(pairs, key=lambda pair: pair[0] + pair[1])
    pairs = pairs[len(pairs) // 4 : len(pairs) - len(pairs) // 4]
    rows = []
    for hop in hops:
        key = hop.key or hop.function
        us = 1e6 * mean(found.get(key, 0.0) for *_, found in pairs)
        if us:
            rows.append(hop._asdict() | {"key": key, "bytes": round(sizes.get(key, 0)), "us": us})
    wall_us = 1e6 * mean(pair[0] for pair in pairs)
    clock_us = 1e6 * mean(pair[1] for pair in pairs) - wall_us
    rest_us = wall_us - sum(row["us"] for row in rows)
    shares = {"rest_share": rest_us / wall_us, "clock_share": clock_us / wall_us}
    return {"wall_us": wall_us, "rest_us": rest_us, "clock_us": clock_us} | shares | {"hops": rows}


# ---------------------------------------------------------------- a prompt and a decode step


def bytes_moved(model, S: int, context: int, head_share: float) -> dict[str, float]:
    """The bytes that the hops of a pass of S tokens read and write: weights, states, inputs and outputs.

    context: the positions that attention reads. head_share: of the output head, besides its shadow.
    """
    itemsize = model.dtype.itemsize
    config = model.config
    head = model.embedding if model.output is None else model.output
    vectors = S * config.dim * itemsize  # (S,D)

    def stored(layer) -> int:
        return sum(tensor.nbytes for tensor in layer.buffers())

    def products(index: int) -> int:
        layers = [block.linears[index] for block in model.blocks]
        return sum(stored(one) + S * itemsize * (one.in_features + one.out_features) for one in layers)

    return {name: products(index) for index, name in enumerate(("qkv", "out", "up", "down"))} | {
        "Transformer.block_inputs": S * stored(model.embedding) / config.vocab_size + vectors,
        "Positions.ropes": 2 * S * config.head_dim * 4,
        "norm": 4 * len(model.blocks) * vectors,
        "attention": model.kv_bytes([context]),
        "recurrent": model.recurrent_bytes,
        "RMSNorm.forward": 2 * vectors,
        "Transformer.linear_head": stored(head),
        "shadow": getattr(model.backend.drawable_logits, "nbytes", 0),
        "head": head_share * stored(head),
        "draw": config.vocab_size * itemsize,
    }


class Passes:
    """Measures prompts and decode steps in one engine."""

    def __init__(self, args, checkpoint, text: str):
        options = ModelOptions(threads=torch.get_num_threads())  # a number that is not tuned meanwhile
        self.engine = load_engine(checkpoint, options, 1, args.prompt_tokens + 2 * args.new_tokens + 2)
        if self.engine.model.backend.run_blocks is None:
            raise UserError(f"{checkpoint.name} does not run as one fused operation, which is what is measured here")
        self.tokenizer = checkpoint.tokenizer
        self.text = text
        self.on = RawValue("b", 0)
        self.profile = KernelProfile()
        self.clock = Clock(self.on, self.profile.take)
        for hop in PASS:
            if not hop.key:
                self.clock.time(hop)

    def pair(self, work: Callable) -> tuple[float, float, Counter]:
        """Call work() without the clock, then with it."""
        without_s = measure.seconds(work)
        self.clock.marks.clear()
        self.on.value = 1
        self.profile.take()
        with_s = measure.seconds(work)
        self.on.value = 0
        self.profile.take(on=False)
        found = Counter()
        for mark in self.clock.marks:
            found[mark.key] += mark.own
        return without_s, with_s, found

    def read(self, new_tokens: int = 1):
        """Read the prompt from its beginning. The last pass also samples the first new token."""
        self.engine.clear()
        request = Request(self.tokenizer.encode(self.text), measure.GREEDY, new_tokens)
        self.engine.add(request)
        while not request.new_tokens:
            self.engine.step()

    def measure(self, args) -> dict:
        prompts = [self.pair(self.read) for _ in range(args.rounds)]
        steps = []
        shadow = self.engine.model.backend.drawable_logits
        for _ in range(args.rounds):
            self.read(2 * args.new_tokens + 1)
            steps += [self.pair(self.engine.step) for _ in range(args.new_tokens)]
        share = (shadow and shadow.share_read) or 0.0
        S = len(self.tokenizer.encode(self.text))
        prompt = summary(PASS, prompts, bytes_moved(self.engine.model, S, S, share))
        step = summary(PASS, steps, bytes_moved(self.engine.model, 1, S + args.new_tokens, share))
        return {"prompt": {"tokens": S} | prompt, "step": {"head_share": share} | step}


# ---------------------------------------------------------------- a request


def calls_between(marks: list[Mark], start: float, end: float) -> dict[str, list[Mark]]:
    """The calls of each function that began in this time, in their order."""
    calls = {}
    for mark in sorted(marks, key=lambda mark: mark.start):
        if start <= mark.start < end:
            calls.setdefault(mark.key, []).append(mark)
    return calls


def request_hops(calls: dict[str, list[Mark]], start: float, end: float) -> dict[str, float]:
    """The seconds of each hop of a request that a client began to send at `start`, and whose answer ended at `end`.

    While the engine decodes a token, the HTTP process sends the one before. So only the last token's way out counts.
    """
    found = {name: some[-1].own for name, some in calls.items()}
    for name in ("HttpConnection.data_received", "Engine._read", "Engine._decode"):
        found[name] = sum(mark.own for mark in calls[name])
    came = calls["HttpConnection.data_received"]
    parsed = calls["ServedModel.parse_chat"][0]
    added = calls["Engine.add"][0]
    first_read = calls["Engine._read"][0]
    last_decode = calls["Engine._decode"][-1]
    stepping = last_decode.end - first_read.start
    return found | {
        "arrives": came[0].start - start,
        "routed": parsed.start - came[-1].end,
        "to_engine": added.start - calls["EngineClient.generate"][0].end,
        "queued": first_read.start - added.start,
        "between": stepping - found["Engine._read"] - found["Engine._decode"],
        "to_http": calls["EngineClient._read_status"][-1].start - last_decode.end,
        "leaves": end - calls["ResponseBuilder.stream_update"][-1].end,
    }


def request_sizes(calls: dict[str, list[Mark]], pass_bytes: int) -> dict[str, float]:
    """The bytes that the hops of a request pass on. pass_bytes: of each pass of the model."""
    sent = sum(mark.size for mark in calls["HttpConnection.data_received"])
    event = calls["ResponseBuilder.stream_update"][-1].size
    pickled = [mark.size for mark in calls[PIPE.function]]  # the request, and the updates of all tokens
    return {
        "arrives": sent,
        "HttpConnection.data_received": sent,
        "to_engine": max(pickled),
        "Engine._read": len(calls["Engine._read"]) * pass_bytes,
        "Engine._decode": len(calls["Engine._decode"]) * pass_bytes,
        "to_http": pickled[-1],
        "ResponseBuilder.stream_update": event,
        "leaves": event,
    }


def run_timed(run: Callable, hops: list[Hop], path: Path, on, *arguments):
    """Run one of the two processes to its end, and then write its marks to a file."""
    clock = Clock(on)
    for hop in hops:
        clock.time(hop)
    run(*arguments)
    path.write_text(json.dumps(clock.marks))


def run_http(listener, connection):
    from server.http_server import run_http  # the engine's process imports no web library

    run_http(listener, connection)


def run_server(arguments: list[str], on, folder: Path):
    """serve.py, with a clock in both of its processes."""
    add = Engine.add

    def add_to_empty(engine: Engine, request: Request):
        engine.clear()  # otherwise the prompt would be in the cache
        add(engine, request)

    Engine.add = add_to_empty
    in_http = [hop for hop in REQUEST if hop.file.startswith("server/") and not hop.key]
    in_engine = [hop for hop in REQUEST if hop.file == "engine.py" and not hop.key]
    timed_http = functools.partial(run_timed, run_http, [PIPE, *in_http], folder / "http.json", on)
    serve.run_http_process = timed_http
    sys.argv = ["serve.py", *arguments]
    run_timed(serve.main, [PIPE, ADD, *in_engine], folder / "engine.json", on)


def ask(client: socket.socket, text: str, new_tokens: int) -> tuple[float, float]:
    """Send a request and read its answer to the end of the stream. Returns when it began and ended."""
    fields = {"max_tokens": new_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"messages": [{"role": "user", "content": text}]} | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    start = time.perf_counter()
    client.sendall(head.encode() + body)
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        answer += client.recv(1 << 16)
    end = time.perf_counter()
    if b"[DONE]" not in answer:
        raise UserError(f"the server's answer was {answer.decode()}")
    return start, end


def measure_requests(args, text: str, pass_bytes: int) -> dict:
    """The table of a request to serve.py. pass_bytes: of a pass of the model."""
    port = measure.free_port()
    arguments = ["--port", port, "--draft", "none", "--max_batch_size", 1, "--threads", torch.get_num_threads()]
    arguments += ["--max_seq_length", 2 * args.prompt_tokens + args.new_tokens, "--quiet"]
    if args.checkpoint_path:
        arguments += ["--checkpoint_path", args.checkpoint_path]
    on = RawValue("b", 0)
    with tempfile.TemporaryDirectory() as name:
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=run_server, args=([*map(str, arguments)], on, Path(name)))
        process.start()
        try:
            while not measure.healthy(port):
                if not process.is_alive():
                    raise UserError("the server did not start")
                time.sleep(0.1)
            times = []
            with socket.create_connection(("127.0.0.1", port)) as client:
                for i in range(-2, 2 * args.rounds):  # the first two are warm-up
                    on.value = i % 2
                    times.append(ask(client, text, args.new_tokens))
        finally:
            process.terminate()
            process.join()
        marks = [Mark(*mark) for file in Path(name).glob("*.json") for mark in json.loads(file.read_text())]

    pairs = []
    for (start, end), timed in zip(times[2::2], times[3::2]):
        calls = calls_between(marks, *timed)
        pairs.append((end - start, timed[1] - timed[0], request_hops(calls, *timed)))
    beside = ("EngineClient._read_status", "AnswerText.read", "ResponseBuilder.stream_update")
    beside_s = sum(mark.own for name in beside for mark in calls[name][:-1]) / (args.new_tokens - 1)
    about = {"chunks": len(calls["Engine._read"]), "new_tokens": args.new_tokens, "http_us_per_token": 1e6 * beside_s}
    return about | summary(REQUEST, pairs, request_sizes(calls, pass_bytes))


# ---------------------------------------------------------------- main


def letters(config) -> dict[str, int]:
    """The sizes behind the letters in the shapes."""
    H, K, E = config.heads(config.n_layer - 1)
    sizes = {"blocks": config.n_layer, "D": config.dim, "H": H, "K": K, "E": E, "F": config.hidden_dim}
    sizes["V"] = config.vocab_size
    net = config.delta_net
    if net is None:
        return sizes
    return sizes | {"nets": len(net.layers), "m": net.n_value_head, "dk": net.key_dim, "dv": net.value_dim}


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {"--rounds": 12, "--prompt_tokens": 256, "--new_tokens": 32})
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.checkpoint_path)
    text = (measure.ROOT / "LICENSE").read_text(encoding="utf-8")  # it does not change
    text = checkpoint.tokenizer.decode(checkpoint.tokenizer.encode(text)[: args.prompt_tokens])

    print_status("a prompt and decode steps")
    parts = Passes(args, checkpoint, text).measure(args)
    print_status("requests")
    pass_bytes = sum(hop["bytes"] for hop in parts["step"]["hops"])
    parts["request"] = measure_requests(args, text, pass_bytes)
    for name, part in parts.items():
        print(f"\n{name}: {part['wall_us']:.0f} us, rest {part['rest_share']:.2%}, clock {part['clock_share']:.2%}\n")
        measure.print_table(part["hops"], {"function": "", "file": "", "shape": "", "bytes": ".3g", "us": ".1f"})
    measure.save("life", {"model": checkpoint.name, "letters": letters(checkpoint.config), "parts": parts}, args.out)


if __name__ == "__main__":
    run_command(main)
