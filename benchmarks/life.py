"""The life of a token (docs/life-of-a-token.md): where the time of a prompt, of a decode step and of a request goes.

Read down: Clock, which wraps functions of the programs; the hops of a pass and their bytes; the hops of a request,
in both processes of serve.py. Each part is measured in pairs, once without and once with the clock. A hop's time is
that of its function, without the hops inside it; inside the fused operation of all blocks, the kernels
themselves take the time (cpu/profile.h). What no hop accounts for is the time without the clock minus all hops.
charts.py draws the result.
"""

import ctypes
import functools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import measure
import torch

import engine as engine_file
import serve
from cli import UserError, print_status, run_command
from cpu.install import FusedBlocks
from engine import Engine, Request
from layers import RMSNorm
from load import load_engine, open_checkpoint
from model import Transformer
from options import ModelOptions
from positions import Positions
from text.tokenizer import Tokenizer

# ---------------------------------------------------------------- the clock


class Mark(NamedTuple):
    """One call of a function."""

    hop: str
    start: float  # time.perf_counter(), which is the same clock in all processes
    end: float
    own: float  # seconds, without the timed functions that it has called
    size: int  # bytes or tokens


class Inner(threading.local):
    seconds = 0.0  # of the timed functions that the running one has called


class Clock:
    """Wraps functions, and marks their calls while `on` is set."""

    def __init__(self, on, take_parts: Callable[[], dict[str, float]] = dict):
        """on: a RawValue. take_parts() returns the seconds that a function has spent in parts of its own."""
        self.on = on
        self.take_parts = take_parts
        self.marks: list[Mark] = []
        self.inner = Inner()

    def time(self, owner, name: str, size: Callable = lambda arguments, result: 0, hop: str = ""):
        """Mark the calls of owner.name. size(arguments, result): their bytes. hop: another name for the marks."""
        function = getattr(owner, name)
        hop = hop or name

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
            self.marks.append(Mark(hop, start, end, own, size(args, result)))
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


class Hop(NamedTuple):
    key: str  # of its marks
    function: str
    file: str
    shape: str


def summary(hops: Iterable[Hop], pairs: list[tuple[float, float, dict]], sizes: dict[str, float]) -> dict:
    """The table of a part. pairs: seconds without the clock, seconds with it, and those of each hop.

    Means of the pairs in the middle, by their time: a pair in which another program ran does not count.
    """
    pairs = sorted(pairs, key=lambda pair: pair[0] + pair[1])
    pairs = pairs[len(pairs) // 4 : len(pairs) - len(pairs) // 4]
    rows = []
    for hop in hops:
        us = 1e6 * mean(found.get(hop.key, 0.0) for *_, found in pairs)
        if us:
            rows.append(hop._asdict() | {"bytes": round(sizes.get(hop.key, 0)), "us": us})
    wall_us = 1e6 * mean(pair[0] for pair in pairs)
    rest_us = wall_us - sum(row["us"] for row in rows)
    with_clock_us = 1e6 * mean(pair[1] for pair in pairs)
    result = {"hops": rows, "wall_us": wall_us, "rest_us": rest_us, "rest_share": rest_us / wall_us}
    return result | {"clock_us": with_clock_us - wall_us, "clock_share": with_clock_us / wall_us - 1}


# ---------------------------------------------------------------- a prompt and a decode step

PASS = [
    Hop("encode", "Tokenizer.encode", "text/tokenizer.py", "text to (S)"),
    Hop("make_plan", "Engine.make_plan", "engine.py", "who runs"),
    Hop("block_inputs", "Transformer.block_inputs", "model.py", "(S) to (S,D)"),
    Hop("ropes", "Positions.ropes", "positions.py", "(S) to (S,E)"),
    Hop("__call__", "FusedBlocks", "cpu/install.py", "checks, memory, threads"),
    Hop("norm", "apply_norm", "cpu/blocks.h", "(S,D)"),
    Hop("qkv", "matmul", "cpu/matmul.h", "(S,D) to q, k, v"),
    Hop("attention", "run_attention", "cpu/attention.h", "(S,H,E), (T,K,E)"),
    Hop("recurrent", "run_delta_net", "cpu/blocks.h", "(S,m,dv), (m,dk,dv)"),
    Hop("out", "add_product", "cpu/blocks.h", "heads to (S,D)"),
    Hop("up", "activate", "cpu/blocks.h", "(S,D) to (S,F)"),
    Hop("down", "add_product", "cpu/blocks.h", "(S,F) to (S,D)"),
    Hop("experts", "run_experts", "cpu/blocks.h", "(S,D)"),
    Hop("forward", "RMSNorm", "layers.py", "(S,D)"),
    Hop("linear_head", "Transformer.linear_head", "model.py", "(D) to (V)"),
    Hop("drawable_logits", "Transformer.drawable_logits", "model.py", "settings"),
    Hop("shadow", "find_maxima", "cpu/head.h", "(D) to (V)"),
    Hop("head", "needs", "cpu/head.h", "(D) to a few of (V)"),
    Hop("waiting", "wait", "cpu/barrier.h", "between the hops above"),
    Hop("sample", "sample", "sampling.py", "(V) to 1 id"),
    Hop("_append_tokens", "Engine._append_tokens", "engine.py", "1 id"),
]


TIMED = [  # the functions of PASS that are in Python
    (Tokenizer, "encode"),
    (Engine, "make_plan"),
    (Transformer, "block_inputs"),
    (Positions, "ropes"),
    (FusedBlocks, "__call__"),
    (RMSNorm, "forward"),
    (Transformer, "linear_head"),
    (Transformer, "drawable_logits"),
    (engine_file, "sample"),
    (Engine, "_append_tokens"),
]


def bytes_moved(engine: Engine, S: int, context: int, head_share: float) -> dict[str, float]:
    """The bytes that each hop of a pass of S tokens reads and writes: weights, states, inputs and outputs.

    context: the positions that attention reads. head_share: of the output head, besides its shadow.
    """
    model = engine.model
    itemsize = model.dtype.itemsize
    V = model.config.vocab_size
    head = model.embedding if model.output is None else model.output

    def stored(layer) -> int:
        return sum(tensor.nbytes for tensor in layer.buffers())

    def products(index: int) -> int:
        layers = [block.linears[index] for block in model.blocks]
        return sum(stored(one) + S * itemsize * (one.in_features + one.out_features) for one in layers)

    vectors = S * model.config.dim * itemsize  # (S,D)
    shadow = model.backend.drawable_logits
    return {
        "block_inputs": S * stored(model.embedding) / V + vectors,
        "ropes": 2 * S * model.config.head_dim * 4,
        "norm": 4 * len(model.blocks) * vectors,
        **{name: products(index) for index, name in enumerate(("qkv", "out", "up", "down"))},
        "attention": model.kv_bytes([context]),
        "recurrent": model.recurrent_bytes,
        "forward": 2 * vectors,
        "linear_head": stored(head),
        "shadow": shadow.nbytes if shadow else 0,
        "head": head_share * stored(head),
        "sample": V * itemsize,
    }


def own_seconds(marks: list[Mark]) -> Counter:
    found = Counter()
    for mark in marks:
        found[mark.hop] += mark.own
    return found


class Passes:
    """Measures prompts and decode steps in one engine."""

    def __init__(self, args, checkpoint):
        options = ModelOptions(threads=torch.get_num_threads())  # a number that is not tuned meanwhile
        self.engine = load_engine(checkpoint, options, 1, args.prompt_tokens + 2 * args.new_tokens + 2)
        self.tokenizer = checkpoint.tokenizer
        if self.engine.model.backend.run_blocks is None:
            raise UserError(f"{checkpoint.name} does not run as one fused operation, which is what is measured here")
        self.on = RawValue("b", 0)
        self.profile = KernelProfile()
        self.clock = Clock(self.on, self.profile.take)
        for owner, name in TIMED:
            self.clock.time(owner, name)

    def pair(self, work: Callable) -> tuple[float, float, Counter]:
        """Call work() without the clock, then with it."""
        without_s = measure.seconds(work)
        self.on.value = 1
        self.profile.take()
        self.clock.marks.clear()
        with_s = measure.seconds(work)
        self.on.value = 0
        self.profile.take(on=False)
        return without_s, with_s, own_seconds(self.clock.marks)

    def read(self, text: str, new_tokens: int = 1):
        """Read a prompt from its beginning. The pass also samples the first new token."""
        self.engine.clear()
        request = Request(self.tokenizer.encode(text), measure.GREEDY, new_tokens)
        self.engine.add(request)
        self.engine.step()
        return request

    def measure(self, args, text: str) -> dict:
        prompts = [self.pair(lambda: self.read(text)) for _ in range(args.rounds)]
        steps = []
        shadow = self.engine.model.backend.drawable_logits
        before = shadow.counts.sum(0) if shadow else torch.zeros(2)
        for _ in range(args.rounds):
            self.read(text, 2 * args.new_tokens + 1)
            steps += [self.pair(self.engine.step) for _ in range(args.new_tokens)]
        read, blocks = (shadow.counts.sum(0) - before).tolist() if shadow else (0, 0)

        S = len(self.tokenizer.encode(text))
        share = read / max(blocks, 1)
        prompt = summary(PASS, prompts, bytes_moved(self.engine, S, S, share))
        step = summary(PASS, steps, bytes_moved(self.engine, 1, S + args.new_tokens, share))
        return {"prompt": {"tokens": S} | prompt, "step": {"head_share": share} | step}


def letters(config) -> dict[str, int]:
    """The sizes behind the letters in the shapes, as in model.py."""
    H, K, E = config.heads
    found = {"layers": config.n_layer, "D": config.dim, "H": H, "K": K, "E": E, "F": config.hidden_dim}
    found |= {"V": config.vocab_size}
    net = config.delta_net
    return found if net is None else found | {"attention": config.attention_layers}


# ---------------------------------------------------------------- a request

REQUEST = [
    Hop("arrives", "HttpConnection", "server/connections.py", "the request"),
    Hop("data_received", "HttpConnection.data_received", "server/connections.py", "the request"),
    Hop("routed", "completion_endpoint", "server/http_server.py", "the body"),
    Hop("parse_object", "parse_object", "server/request_fields.py", "JSON to a dict"),
    Hop("read_conversation", "ChatModel.read_conversation", "server/chat_prompts.py", "messages to text"),
    Hop("encode", "ChatModel.encode", "server/chat_prompts.py", "text to ids"),
    Hop("parse_chat", "ServedModel.parse_chat", "server/api.py", "a TextRequest"),
    Hop("generate", "EngineClient.generate", "server/engine_client.py", "a TextRequest"),
    Hop("to_engine", "EngineServer", "serve.py", "a TextRequest, pickled"),
    Hop("queued", "Engine.add", "engine.py", "a Request, a Plan"),
    Hop("_read", "Engine._read", "engine.py", "chunks of the prompt"),
    Hop("_decode", "Engine._decode", "engine.py", "decode steps"),
    Hop("between", "EngineServer", "serve.py", "Updates of earlier tokens"),
    Hop("to_http", "EngineClient", "server/engine_client.py", "the last Update, pickled"),
    Hop("_read_status", "EngineClient._read_status", "server/engine_client.py", "an Update"),
    Hop("read", "AnswerText.read", "server/answer_text.py", "1 id to text"),
    Hop("stream_update", "ResponseBuilder.stream_update", "server/responses.py", "text to an event"),
    Hop("leaves", "event_stream", "server/http_server.py", "the event to the client"),
]


def calls_between(marks: list[Mark], start: float, end: float) -> dict[str, list[Mark]]:
    """The calls of each function, in their order, that began in this time."""
    calls = {}
    for mark in sorted(marks, key=lambda mark: mark.start):
        if start <= mark.start < end:
            calls.setdefault(mark.hop, []).append(mark)
    return calls


def request_hops(calls: dict[str, list[Mark]], start: float, end: float) -> dict[str, float]:
    """The seconds of each hop of a request that a client began to send at `start`, and whose answer ended at `end`.

    While the engine decodes a token, the HTTP process sends the one before. So only the last token's way out counts.
    """
    first = {name: some[0] for name, some in calls.items()}
    last = {name: some[-1] for name, some in calls.items()}
    found = {name: mark.own for name, mark in last.items()}
    for name in ("data_received", "_read", "_decode"):
        found[name] = sum(mark.own for mark in calls[name])
    stepping = last["_decode"].end - first["_read"].start
    return found | {
        "arrives": first["data_received"].start - start,
        "routed": first["parse_object"].start - last["data_received"].end,
        "to_engine": first["add"].start - first["generate"].end,
        "queued": first["_read"].start - first["add"].start,
        "between": stepping - found["_read"] - found["_decode"],
        "to_http": last["_read_status"].start - last["_decode"].end,
        "leaves": end - last["stream_update"].end,
    }


def request_sizes(calls: dict[str, list[Mark]], pass_bytes: int) -> dict[str, float]:
    """The bytes that each hop of a request reads. pass_bytes: of each pass of the model."""
    last = {name: some[-1].size for name, some in calls.items()}
    sent = sum(mark.size for mark in calls["data_received"])
    passes = {name: len(calls[name]) * pass_bytes for name in ("_read", "_decode")}
    pipe = {"to_engine": last["sent to engine"], "to_http": last["sent to http"]}
    return last | passes | pipe | {"arrives": sent, "data_received": sent, "leaves": last["stream_update"]}


def run_timed_http(on, path: Path, listener, connection):
    """The HTTP process, whose marks are written to a file when it ends."""
    from server import http_server
    from server.answer_text import AnswerText
    from server.api import ServedModel
    from server.chat_prompts import ChatModel
    from server.connections import HttpConnection
    from server.engine_client import EngineClient
    from server.responses import ResponseBuilder

    clock = Clock(on)
    clock.time(HttpConnection, "data_received", lambda arguments, _: len(arguments[1]))
    clock.time(http_server, "parse_object", lambda arguments, _: len(arguments[0]))
    clock.time(ChatModel, "read_conversation", lambda _, conversation: len(conversation.text))
    clock.time(ChatModel, "encode", lambda _, ids: 8 * len(ids))
    clock.time(ServedModel, "parse_chat")
    clock.time(EngineClient, "generate")
    clock.time(EngineClient, "_read_status")
    clock.time(Connection, "_send_bytes", lambda arguments, _: len(arguments[1]), "sent to engine")
    clock.time(AnswerText, "read")
    clock.time(ResponseBuilder, "stream_update", lambda _, event: len(event))
    http_server.run_http(listener, connection)
    path.write_text(json.dumps(clock.marks))


def run_timed_server(arguments: list[str], on, folder: Path):
    """serve.py, with a clock in both of its processes."""
    add = Engine.add

    def add_to_empty(engine: Engine, request: Request):
        engine.clear()  # otherwise the prompt would be in the cache
        add(engine, request)

    Engine.add = add_to_empty
    clock = Clock(on)
    for name in ("add", "_read", "_decode"):
        clock.time(Engine, name)
    clock.time(Connection, "_send_bytes", lambda arguments, _: len(arguments[1]), "sent to http")
    serve.run_http_process = functools.partial(run_timed_http, on, folder / "http.json")
    sys.argv = ["serve.py", *arguments]
    serve.main()
    (folder / "engine.json").write_text(json.dumps(clock.marks))


class Requests:
    """Measures requests to a server, over one connection."""

    def __init__(self, args, text: str):
        self.args = args
        self.text = text
        self.on = RawValue("b", 0)
        self.times: list[tuple[float, float]] = []  # start and end of each request

    def ask(self):
        """Send a request, and read its answer to the end of the stream."""
        message = {"role": "user", "content": self.text}
        body = {"messages": [message], "max_tokens": self.args.new_tokens, "stream": True}
        data = json.dumps(body | {"temperature": 0, "ignore_eos": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        start = time.perf_counter()
        self.socket.sendall(head.encode() + data)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += self.socket.recv(1 << 16)
        self.times.append((start, time.perf_counter()))
        if b"[DONE]" not in answer:
            raise UserError(f"the server's answer was {answer.decode()}")

    def measure(self, step: dict) -> dict:
        """step: the result for a decode step."""
        port = measure.free_port()
        arguments = ["--port", port, "--draft", "none", "--max_batch_size", 1, "--threads", torch.get_num_threads()]
        arguments += ["--max_seq_length", 2 * self.args.prompt_tokens + self.args.new_tokens, "--quiet"]
        if self.args.checkpoint_path:
            arguments += ["--checkpoint_path", self.args.checkpoint_path]
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as serve.py does
        spawn = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            target = (list(map(str, arguments)), self.on, folder)
            process = spawn.Process(target=run_timed_server, args=target)
            process.start()
            try:
                while not measure.healthy(port):
                    if not process.is_alive():
                        raise UserError("the server did not start")
                    time.sleep(0.1)
                self.socket = socket.create_connection(("127.0.0.1", port))
                for i in range(-2, 2 * self.args.rounds):  # the first two are warm-up
                    self.on.value = i % 2
                    self.ask()
                self.socket.close()
            finally:
                process.terminate()
                process.join()
            files = [folder / "http.json", folder / "engine.json"]
            marks = [Mark(*mark) for file in files for mark in json.loads(file.read_text())]

        pairs = []
        for without, with_clock in zip(self.times[2::2], self.times[3::2]):
            calls = calls_between(marks, *with_clock)
            seconds = [end - start for start, end in (without, with_clock)]
            pairs.append((*seconds, request_hops(calls, *with_clock)))
        sizes = request_sizes(calls, sum(hop["bytes"] for hop in step["hops"]))
        beside = [mark.own for name in ("_read_status", "read", "stream_update") for mark in calls[name][:-1]]
        about = {"tokens": calls["encode"][-1].size // 8, "new_tokens": self.args.new_tokens}
        about["beside_us"] = 1e6 * sum(beside) / (self.args.new_tokens - 1)
        return about | summary(REQUEST, pairs, sizes)


# ---------------------------------------------------------------- main


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {"--rounds": 8, "--prompt_tokens": 256, "--new_tokens": 32})
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.checkpoint_path)
    text = (measure.ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    text = checkpoint.tokenizer.decode(checkpoint.tokenizer.encode(text)[: args.prompt_tokens])

    print_status("a prompt and decode steps")
    result = {"model": checkpoint.name, "letters": letters(checkpoint.config)}
    parts = Passes(args, checkpoint).measure(args, text)
    print_status("requests")
    parts["request"] = Requests(args, text).measure(parts["step"])
    for name, part in parts.items():
        print(f"\n{name}: {part['wall_us']:.0f} us, rest {part['rest_share']:.2%}, clock {part['clock_share']:.2%}\n")
        measure.print_table(part["hops"], {"function": "", "file": "", "shape": "", "bytes": ".3g", "us": ".1f"})
    measure.save("life", result | {"parts": parts}, args.out)


if __name__ == "__main__":
    run_command(main)
