"""Answers of a running server that must fit a JSON schema or call tools: random schemas, neighbours, hostile input."""

import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from schemas import random_schema
from servers import PATIENCE_S, log_lines, running, wait_for

pytest.importorskip("llguidance")
pytestmark = pytest.mark.full

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]  # 9 heads: 1, 3 or 9
WAYS = {
    "plain": ([], 100),
    "lookup": (["--draft", "prompt-lookup"], 60),
    "compiled": (["--compile", "--dtype", "float32"], 40),
    "ranks": (["--dtype", "float32"], 24),  # in bfloat16, the sum over three ranks depends on the neighbours
}
CHAT = "/v1/chat/completions"
# Short answers before, so that a small model at temperature 1 does not write without end where a schema has no bounds.
EXAMPLES = ["Answer in JSON.", '{"a": 1}', "Shorter.", '"b"', "A number.", "-2.5", "A list.", "[7]", "Short."]
ANSWER_S = 600  # for an answer of 1,500 tokens among eight, on a busy machine


def ask(server, schema: dict | bool, seed: int) -> tuple[str, str]:
    """(finish_reason, text) of an answer that must fit a schema."""
    described = {"name": "answer", "schema": schema, "strict": True}
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(EXAMPLES)]
    body = {"messages": messages, "max_tokens": 1500, "temperature": 1.0}
    body |= {"seed": seed, "response_format": {"type": "json_schema", "json_schema": described}}
    choice = server.post(CHAT, body, ANSWER_S)["choices"][0]
    return choice["finish_reason"], choice["message"]["content"]


def fits(schema: dict | bool, text: str) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def plain_text(server, seed: int) -> str:
    body = {"prompt": f"Once upon {seed} times", "max_tokens": 40, "temperature": 0.9, "seed": seed}
    return server.post("/v1/completions", body)["choices"][0]["text"]


@pytest.mark.parametrize("way", WAYS)
def test_answers_fit_random_schemas_and_neighbours_do_not_notice(way, tmp_path, monkeypatch):
    """Eight at a time at temperature 1, beside plain requests, which get the texts that they get alone."""
    options, n = WAYS[way]
    chance, log = random.Random(5), tmp_path / "log"
    schemas = [random_schema(chance) for _ in range(n)]
    launcher = {"launcher": TORCHRUN} if way == "ranks" else {}
    monkeypatch.setenv("TORCH_LOGS", "recompiles,graph_code")  # each graph is logged
    with running(log, "--max_batch_size", 8, "--max_queue", 100, *options, **launcher) as server:
        if way == "compiled":
            wait_for(lambda: "decode is compiled" in log.read_text(), "compiled steps", 300)
        alone, before = [plain_text(server, seed) for seed in range(6)], log_lines(log.read_text())
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(ask, server, schema, seed) for seed, schema in enumerate(schemas)]
            beside = [pool.submit(plain_text, server, i % 6) for i in range(n // 5)]
            answers, beside = ([future.result() for future in some] for some in (answers, beside))
        assert beside == [alone[i % 6] for i in range(n // 5)]
        assert log_lines(log.read_text()) == before, "something was compiled again"
    assert {reason for reason, _ in answers} <= {"stop", "length"}
    finished = [(schema, text) for schema, (reason, text) in zip(schemas, answers) if reason == "stop"]
    assert [pair for pair in finished if not fits(*pair)] == []
    assert len(finished) >= 0.93 * n


def schema_body(text: str) -> bytes:
    head = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, '
    head += b'"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": '
    return head + text.encode() + b"}}}"


def pattern_body(pattern: str) -> bytes:
    return json.dumps({"prompt": "Hi", "max_tokens": 30, "structured_outputs": {"regex": pattern}}).encode()


MINUTES = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}
HOSTILE = {
    "minutes": (schema_body(json.dumps(MINUTES)), (400,)),
    "depth 10,000": (schema_body('{"properties": {"a": ' * 10_000 + "{}" + "}}" * 10_000), (400,)),
    "1 MB": (schema_body(json.dumps({"enum": [f"value {i}" for i in range(60_000)]})), (400, 413)),
    "catastrophic": (pattern_body("(a+)+(b|c|d)*((x|y)+z?)+"), (200,)),
    "long": (pattern_body("a{9999}{9999}"), (200, 400)),
    "a loop": (schema_body('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'), (400,)),
    "remote": (schema_body('{"$ref": "http://127.0.0.1:1/schema"}'), (400,)),
}


def test_hostile_schemas_are_refused_or_bounded_and_stall_nobody(tmp_path):
    """A probe sends plain requests meanwhile. None of them takes seconds."""
    with running(tmp_path / "log", "--max_batch_size", 8, "--max_queue", 100) as server:
        plain_text(server, 1)
        ask(server, {"type": "boolean"}, 1)  # from now on, the tokenizer of grammars is there
        waits, done = [], threading.Event()

        def probe():
            while not done.is_set():
                start = time.monotonic()
                plain_text(server, 1)
                waits.append(time.monotonic() - start)

        prober = threading.Thread(target=probe)
        prober.start()
        try:
            for name, (body, expected) in HOSTILE.items():
                start = time.monotonic()
                status, answer = server.request("POST", "/v1/completions" if b'"prompt"' in body else CHAT, body)
                assert status in expected, (name, status, answer[:300])
                assert time.monotonic() - start < PATIENCE_S / 4, name
                if status == 400:
                    assert json.loads(answer)["error"]["message"], name
        finally:
            done.set()
            prober.join()
        assert len(waits) > 3 and max(waits) < PATIENCE_S / 4, waits
