"""The server over real sockets, by the official client: its answers are what the engine gives alone.

One server process in float32 and one in int4 serve a tiny random model, whose tokens are often parts of characters.
"""

import asyncio
import json
import multiprocessing.spawn
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from servers import (
    CONTEXT,
    FIXTURES,
    KEY,
    MESSAGES,
    OPTIONS,
    PATIENCE_S,
    ROWS,
    Oracle,
    Server,
    ended,
    greedy_text,
    log_lines,
    longest,
    prompt_ids,
    running,
    take_tokens,
    wait_for,
)
from texts import strings

import serve
from cli import UserError
from engine import Engine, EngineOptions, Request, generate
from evaluate import harness_model
from load import load_model
from server.answer_text import AnswerText
from server.connections import MAX_HEAD_BYTES
from server.pipe_messages import TextRequest
from server.request_fields import MAX_BODY_BYTES
from text.tokenizer import TextStream

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def server(server_with_key):
    yield server_with_key
    assert "Traceback" not in server_with_key.log.read_text()


@pytest.fixture(scope="module")
def int4_server(checkpoints, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "int4.txt"
    with running(log, "--checkpoint_path", checkpoints["int4"], "--api_key", KEY, *OPTIONS) as server:
        yield server
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def int4_oracle(checkpoints):
    return Oracle(checkpoints["int4"])


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, oracle, stream):
    """Several prompts, as text and as ids."""
    texts = ["once upon a time", "the \u20ac sea"]
    ids = [prompt_ids(7), prompt_ids(40, 1)]
    for prompts, encoded in ((texts, [oracle.tokenizer.encode(text) for text in texts]), (ids, ids)):
        answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=30, temperature=0, stream=stream)
        found, reasons = ["", ""], {}
        for part in answer if stream else [answer]:
            assert part.object == "text_completion" and part.model == "tiny" and part.id.startswith("cmpl-")
            for choice in part.choices:
                found[choice.index] += choice.text
                reasons[choice.index] = reasons.get(choice.index) or choice.finish_reason
        assert found == [oracle.text(prompt, 30) for prompt in encoded]
        assert reasons == {0: "length", 1: "length"}


def test_chat(client, oracle):
    prompt = oracle.template.encode(MESSAGES)
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    for messages in (MESSAGES, [MESSAGES[0], {"role": "user", "content": parts}]):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=25, temperature=0
        )
        assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == oracle.text(prompt, 25, context=False)
        assert answer.choices[0].finish_reason == "length"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(prompt), 25, len(prompt) + 25)


def test_chat_streams(client, oracle):
    prompt = oracle.template.encode(MESSAGES)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=25, temperature=0, stream=True, stream_options=options
    )
    *chunks, last = list(stream)
    assert {chunk.id for chunk in chunks} == {last.id} and last.object == "chat.completion.chunk"
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == oracle.text(prompt, 25, context=False)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens == 25
    assert last.choices == [] and last.usage.prompt_tokens == len(prompt)


def test_responses_are_the_answers_of_chats(client, oracle):
    """The second turn, which names the first one, reads only what is new."""
    settings = {"model": "tiny", "max_output_tokens": 25, "temperature": 0, "extra_body": {"ignore_eos": True}}
    messages = [*MESSAGES]
    previous, before = None, 0
    for question in ("Why?", "And then?", "Really?"):
        messages[-1] = {"role": "user", "content": question}
        prompt = oracle.template.encode(messages)
        fields = settings | {"input": question, "instructions": "Be brief.", "previous_response_id": previous}
        *_, last = client.responses.create(**fields, stream=True)
        response = client.responses.create(**fields)
        text = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=25, temperature=0, extra_body={"ignore_eos": True}
        )
        assert response.output_text == last.response.output_text == text.choices[0].message.content
        assert response.incomplete_details.reason == "max_output_tokens" and last.type == "response.incomplete"
        usage = last.response.usage
        assert (usage.input_tokens, usage.output_tokens) == (len(prompt), 25)
        assert usage.input_tokens_details.cached_tokens >= before
        messages += [{"role": "assistant", "content": response.output_text}, {}]
        previous, before = response.id, len(prompt) - 2  # whose end the answer may change, when both are tokenized


def test_a_stream_on_the_wire(server):
    """Nothing but data lines with an empty line after each, and [DONE] at the end; usage only where it is asked for."""
    body = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0, "stream": True}
    status, data = server.request("POST", "/v1/chat/completions", body)
    *events, end, rest = data.decode().split("\n\n")
    assert status == 200 and end == "data: [DONE]" and rest == ""
    assert all(event.startswith("data: {") and "usage" not in json.loads(event[6:]) for event in events)


def test_end_tokens(client, oracle):
    """The end token ends the answer and is not in it, unless it is to be ignored; so does any token that is named."""
    prompt = prompt_ids(12, 5)
    request = oracle.run(prompt, 40)
    token = next(i for i in request.new_tokens[5:] if i not in request.new_tokens[:5] and i > 1)
    n = request.new_tokens.index(token)
    extra = {"stop_token_ids": [token]}
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=40, temperature=0, extra_body=extra)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == n + 1
    assert answer.choices[0].text == oracle.text(prompt, n)
    extra["ignore_eos"] = True
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=40, temperature=0, extra_body=extra)
    assert answer.usage.completion_tokens == n + 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, oracle, stream):
    """The text ends before the first of them, and no token of it is told; the request ends with that token."""
    prompt = prompt_ids(9, 3)
    whole = oracle.text(prompt, 60)
    for at in (0, 11, len(whole) // 2):
        stop = [whole[at : at + 3], "never in the text"]
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=60, temperature=0, stop=stop, stream=stream, logprobs=0
        )
        parts = [choice for part in (answer if stream else [answer]) for choice in part.choices]
        text = "".join(part.text for part in parts)
        assert text == whole[: whole.index(stop[0])] and parts[-1].finish_reason == "stop"
        offsets = [offset for part in parts for offset in part.logprobs.text_offset]
        assert all(offset < len(text) for offset in offsets) and offsets == sorted(offsets)
        if not stream:
            assert answer.usage.completion_tokens < 60


def test_seeds(client, oracle):
    def draw(**how):
        answer = client.completions.create(model="tiny", prompt=prompt_ids(6), max_tokens=20, temperature=1.0, **how)
        return answer.choices[0].text

    assert draw(seed=7) == draw(seed=7) == oracle.text(prompt_ids(6), 20, temperature=1.0, seed=7)
    assert len({draw(seed=8), draw(), draw(), draw(seed=-(2**63))}) == 4


def test_sampling_parameters_reach_the_engine(client, oracle):
    params = {"temperature": 0.9, "top_p": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4, "seed": 11}
    extra = {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.3}
    answer = client.completions.create(model="tiny", prompt=prompt_ids(6), max_tokens=30, extra_body=extra, **params)
    assert answer.choices[0].text == oracle.text(prompt_ids(6), 30, **params, **extra)


def test_prefix_reuse(client):
    """A prompt that begins with what was said reads only what is new."""
    prompt = prompt_ids(300, 77)
    first = client.completions.create(model="tiny", prompt=prompt, max_tokens=5)
    again = client.completions.create(model="tiny", prompt=[*prompt, 5, 6], max_tokens=5)
    assert first.usage.prompt_tokens_details.cached_tokens < 5
    assert again.usage.prompt_tokens_details.cached_tokens == 300


def test_models(client, server):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.object == "model" and model.max_model_len == CONTEXT
    assert client.models.retrieve("tiny") == model
    assert json.loads(server.request("GET", "/version")[1]).keys() == {"version"}


# ---------------------------------------------------------------- logprobs


def test_completion_logprobs(client, oracle):
    prompt = prompt_ids(14, 9)
    expected = oracle.run(prompt, 12, logprobs=3)
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx([own for own, _ in expected.token_logprobs], abs=1e-4)
    for own, top, (_, best) in zip(found.token_logprobs, found.top_logprobs, expected.token_logprobs):
        assert sorted(top.values())[-3:] == pytest.approx(sorted(p for _, p in best), abs=1e-4)
        assert own in top.values()
    text = answer.choices[0].text
    for token, start, end in zip(found.tokens, found.text_offset, [*found.text_offset[1:], len(text)]):
        assert token.startswith("bytes:") or text[start:end].endswith(token)  # perhaps after half a character


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(client, oracle, stream):
    """As lm-eval asks: one entry for each token of the prompt, of which the first is null, and one for the new one."""
    prompts = [prompt_ids(n, n) for n in (3, 50, 200)]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, stream=stream
    )
    found = {i: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for i in range(3)}
    texts = ["", "", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            for name, values in found[choice.index].items():
                values += getattr(choice.logprobs, name)
    for i, prompt in enumerate(prompts):
        scored = Request(prompt, max_new_tokens=0, prompt_logprobs=1)
        generate(oracle.engine, [scored])
        own = found[i]["token_logprobs"]
        assert all(len(values) == len(prompt) + 1 for values in found[i].values())
        assert own[0] is None and found[i]["top_logprobs"][0] is None
        assert own[1:-1] == pytest.approx([logprob for logprob, _ in scored.prompt_token_logprobs], abs=1e-4)
        for logprob, top, token, (_, [(best, _)]) in zip(
            own[1:], found[i]["top_logprobs"][1:], prompt[1:], scored.prompt_token_logprobs
        ):
            assert (logprob == max(top.values())) == (token == best)
        shown, offsets = oracle.tokenizer.decode(prompt), found[i]["text_offset"]
        assert texts[i] == shown + oracle.text(prompt, 1)
        assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] == len(shown)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client, oracle, stream):
    prompt = oracle.template.encode(MESSAGES)
    expected = oracle.run(prompt, 15, logprobs=2)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=15, temperature=0, logprobs=True, top_logprobs=2, stream=stream
    )
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    found = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.logprob for entry in found] == pytest.approx([p for p, _ in expected.token_logprobs], abs=1e-4)
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob for entry in found)
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    data = b"".join(bytes(entry.bytes) for entry in found)
    assert data.decode(errors="replace").lstrip(" ") == text.lstrip(" ")


# ---------------------------------------------------------------- errors


def test_the_answer_to_another_name_has_the_models_own(client):
    assert client.completions.create(model="gpt-4o", prompt=[5, 6], max_tokens=2).model == "tiny"
    chat = client.chat.completions
    assert chat.create(model="an/other", messages=MESSAGES, max_tokens=2).model == "tiny"
    assert {part.model for part in chat.create(model="x", messages=MESSAGES, max_tokens=2, stream=True)} == {"tiny"}


def test_typed_exceptions(client, server):
    def create(**how):
        client.completions.create(**{"model": "tiny", "prompt": [5, 6], "max_tokens": 2} | how)

    with pytest.raises(openai.BadRequestError) as caught:
        create(temperature=-1)
    error = caught.value.body
    assert error["param"] == "temperature" and error["type"] == "invalid_request_error" and error["message"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another/model")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    for key in ("wrong", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError) as caught, server.client(key=key) as other:
            other.models.list()
        assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.APIStatusError) as caught:
        create(prompt="x" * (1 << 20))
    assert caught.value.status_code == 413 and caught.value.code == "request_too_large"
    with pytest.raises(openai.APIStatusError) as caught:
        client.delete("/models", cast_to=object)
    assert caught.value.status_code == 405
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x " * CONTEXT}])
    assert caught.value.code == "context_length_exceeded" and str(CONTEXT) in str(caught.value)


def test_paths_and_keys(server):
    assert server.request("GET", "/health", key="none") == (200, b'{"status": "ready"}')
    for method, path in (("GET", "/metrics"), ("POST", "/v1/completions"), ("GET", "/nowhere"), ("GET", "/v1/models")):
        status, answer = server.request(method, path, key="\u00e9")
        assert status == 401 and json.loads(answer)["error"]["code"] == "invalid_api_key"
    for method, path, expected in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("GET", "/health/", 404)):
        status, answer = server.request(method, path)
        assert status == expected and json.loads(answer)["error"]["type"] == "invalid_request_error"


CHAT = json.dumps({"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 3})
BEARER = f"Authorization: Bearer {KEY}"
CROSS_ORIGIN = [  # (method and path, further lines of the head, body, status)
    ("GET /v1/models", BEARER, "", 200),
    ("GET /health", "X: y", "", 200),
    ("POST /v1/chat/completions", BEARER, CHAT, 200),
    ("POST /v1/chat/completions", BEARER, CHAT.replace("{", '{"stream": true, ', 1), 200),
    ("POST /v1/messages", f"x-api-key: {KEY}", CHAT, 200),
    ("POST /v1/messages", "x-api-key: another", CHAT, 401),
    ("GET /v1/models", "X: y", "", 401),
    ("OPTIONS /v1/models", "X: y", "", 204),
    ("POST /tokenize", BEARER, "{", 400),
    ("DELETE /v1/models", BEARER, "", 405),
    ("POST /tokenize", BEARER, " " * (MAX_BODY_BYTES + 1), 413),
    ("GET /health", "X: " + "y" * MAX_HEAD_BYTES, "", 431),
    ("GET /\0", "X: y", "", 400),
    ("GET /health", "Content-Length: 5", "", 400),
]


def ask_from_another_origin(server, start: str, lines: list[str], body: str = "") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a response to a page of another site."""
    length = len(body.encode())
    head = [f"{start} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", "Origin: https://a.example", "Connection: close"]
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)) as client:
        client.sendall("\r\n".join([*head, *lines, f"Content-Length: {length}", "", body]).encode())
        head, _, answer = client.makefile("rb").read().partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
    assert len(dict(pairs)) == len(pairs), "no header twice"
    return int(first.split()[1]), dict(pairs), answer


@pytest.mark.parametrize("start, line, body, status", CROSS_ORIGIN)
def test_with_a_key_pages_of_any_site_can_read_every_response(server, start, line, body, status):
    """Also errors of requests that could not be parsed. Without a key, there is none of it (test_http_server.py)."""
    found, headers, answer = ask_from_another_origin(server, start, [line], body)
    assert found == status
    assert headers["access-control-allow-origin"] == "*" and "access-control-allow-credentials" not in headers
    exposed = headers["access-control-expose-headers"].split(", ")
    assert {"Retry-After", "x-should-retry", "x-request-id", "request-id"} <= set(exposed)
    name = headers["x-request-id"]
    assert re.fullmatch("req_[0-9a-f]{16}", name) and headers["request-id"] == name
    assert status == 204 or answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/nowhere", "*"])
def test_preflights(server, path):
    """What a browser asks without the key, before it sends a request with it."""
    written = server.metric("tokens_written_total")
    wanted = "authorization,content-type,x-api-key,anthropic-version,x-stainless-lang"
    lines = ["Access-Control-Request-Method: POST", f"Access-Control-Request-Headers: {wanted}"]
    lines += ["Access-Control-Request-Private-Network: true"]
    status, headers, answer = ask_from_another_origin(server, f"OPTIONS {path}", lines, CHAT)
    assert status == 204 and answer == b"" and headers["access-control-allow-origin"] == "*"
    assert headers["access-control-allow-headers"] == wanted and int(headers["access-control-max-age"]) >= 600
    assert {"GET", "POST", "DELETE"} <= set(headers["access-control-allow-methods"].split(", "))
    assert headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in headers
    assert server.metric("tokens_written_total") == written


def test_no_path_of_the_machine_in_an_answer(server, checkpoints):
    for path in ("/v1/models", "/health", "/metrics", "/tokenizer_info", "/version", "/nowhere"):
        assert str(checkpoints[None].parent).encode() not in server.request("GET", path)[1]
    messages = [{"role": "user", "content": "\ud800"}]
    status, answer = server.request("POST", "/v1/chat/completions", {"messages": messages})
    assert status == 400 and b"/" not in json.loads(answer)["error"]["message"].encode()


# ---------------------------------------------------------------- schedules


@st.composite
def planned_requests(draw) -> dict:
    """A request, when it comes, and after how many chunks of a stream or milliseconds its client leaves, if it does."""
    prompt = prompt_ids(draw(st.integers(1, 70)), draw(st.integers(0, 5)))
    if draw(st.booleans()):  # several begin alike
        prompt = prompt_ids(50, 99)[: draw(st.integers(1, 50))] + prompt[:30]
    params = {"temperature": 0.0}
    if draw(st.booleans()):
        params = {"temperature": 0.9, "seed": draw(st.integers(0, 99)), "top_p": draw(st.sampled_from([1.0, 0.8]))}
        params["frequency_penalty"] = draw(st.sampled_from([0.0, 0.6]))
    leaves = draw(st.none() | st.none() | st.integers(0, 12))
    return {
        "prompt": prompt, "new": draw(st.integers(1, 40)), "params": params, "leaves": leaves,
        "stream": draw(st.booleans()), "delay": draw(st.integers(0, 30)),
    }  # fmt: skip


async def one_request(client, planned: dict) -> tuple[str, list[float]]:
    """(the text, the tokens' log-probabilities) of a request, as far as its client hears them."""
    await asyncio.sleep(planned["delay"] / 1000)
    call = client.completions.create(
        model=(await client.models.list()).data[0].id, prompt=planned["prompt"], max_tokens=planned["new"], logprobs=0,
        stream=planned["stream"], **planned["params"],
    )  # fmt: skip
    if not planned["stream"]:
        try:
            answer = await asyncio.wait_for(call, None if planned["leaves"] is None else planned["leaves"] / 1000)
        except asyncio.TimeoutError:
            return "", []
        return answer.choices[0].text, answer.choices[0].logprobs.token_logprobs
    text, logprobs = "", []
    async with await call as stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            logprobs += chunk.choices[0].logprobs.token_logprobs
            if planned["leaves"] is not None and len(logprobs) > planned["leaves"]:
                break
    return text, logprobs


async def all_requests(server: Server, schedule: list[dict]) -> list:
    async with server.client(openai.AsyncOpenAI) as client:
        return await asyncio.gather(*(one_request(client, planned) for planned in schedule))


def check_schedule(server: Server, oracle: Oracle, schedule: list[dict], same_bits: bool):
    for planned, (text, logprobs) in zip(schedule, asyncio.run(all_requests(server, schedule))):
        alone = oracle.run(planned["prompt"], planned["new"], logprobs=0, **planned["params"])
        expected = [own for own, _ in alone.token_logprobs]
        if planned["leaves"] is None:
            assert len(logprobs) == len(expected)
            assert text == oracle.text(planned["prompt"], planned["new"], **planned["params"])
        expected = expected[: len(logprobs)]
        assert logprobs == (expected if same_bits else pytest.approx(expected, abs=1e-4))
    wait_for(server.idle, "all rows to be free")


schedules = st.lists(planned_requests(), min_size=1, max_size=9)


@settings(max_examples=12, deadline=None, suppress_health_check=FIXTURES)
@given(schedule=schedules)
def test_schedules_change_no_tokens(server, oracle, schedule):
    check_schedule(server, oracle, schedule, same_bits=False)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=FIXTURES)
@given(schedule=schedules)
def test_schedules_change_no_bits_of_quantized_models(int4_server, int4_oracle, schedule):
    check_schedule(int4_server, int4_oracle, schedule, same_bits=int4_oracle.model.backend.chunk_invariant)


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_frees_its_row(server, stream, reset):
    """While it waits for a row, while its prompt is read, while it gets tokens."""
    others = [longest(server, stream, prompt=[5, 6, i]) for i in range(ROWS)]
    wait_for(lambda: server.metric("rows_active") == ROWS, "full rows")
    queued = longest(server, stream)
    wait_for(lambda: server.metric("requests_waiting") == 1, "a request to wait")
    queued.leave(reset)
    wait_for(lambda: server.metric("requests_waiting") == 0, "the queue to be empty")
    assert server.metric("rows_active") == ROWS
    for other in others[1:]:
        other.leave(reset)
    wait_for(lambda: server.metric("rows_active") == 1, "rows to be free")
    reading = longest(server, stream, prompt=prompt_ids(CONTEXT - 20, random.randrange(999)), max_tokens=5)
    read = server.metric("prompt_tokens_read_total")
    wait_for(lambda: server.metric("prompt_tokens_read_total") > read, "a prompt to be read")
    reading.leave(reset)
    others[0].leave(reset)
    wait_for(server.idle, "all rows to be free")
    assert server.metric("prompt_tokens_read_total") < read + CONTEXT - 20, "it left while its prompt was read"


# ---------------------------------------------------------------- text as it comes

PIECES = [
    "h\u00e9llo",
    " \u65e5\u672c\u8a9e",
    "\U0001f469\u200d\U0001f467",
    "stop",
    " here",
    "\u20ac",
    "\n\n",
    "sto",
    "p he",
]


@settings(max_examples=150, deadline=None, suppress_health_check=FIXTURES)
@given(data=st.data())
def test_updates_hold_back_parts_of_characters_and_of_stop_strings(oracle, data):
    """However many tokens come in a step: what has been sent is always a prefix of the whole text, which is that of all
    tokens decoded at once; and so are the tokens with log-probabilities."""
    tokenizer = oracle.tokenizer
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8)))
    tokens = tokenizer.encode(text, add_bos=False) + data.draw(st.lists(st.integers(2, 699), max_size=3))
    stop = tuple(data.draw(st.lists(st.sampled_from(["stop here", "\u672c", "\n\n", "\ufffd", "o"]), max_size=2)))
    stream = TextStream(tokenizer, [5], stop)
    whole = stream.add(tokens, last=True)
    request = Request([5], max_new_tokens=len(tokens), logprobs=0)
    text_request = TextRequest(3, request, stop)
    running, answer = serve.RunningRequest(text_request), AnswerText(tokenizer, text_request)
    update = None
    sent, scored = "", []
    while update is None or update.finish_reason is None:
        update = answer.read(take_tokens(running, tokens, data.draw(st.integers(1, 3)), "length"))
        sent, scored = sent + update.text, scored + update.logprobs
        assert whole.startswith(sent)
        assert update.completion_tokens == len(request.new_tokens) or (stream.stopped and update.finish_reason)
        assert all(offset <= len(sent) for *_, offset in scored)
    assert sent == whole and update.finish_reason == ("stop" if stream.stopped else "length")
    assert update.request_id == 3 and [token for token, *_ in scored] == request.new_tokens[: len(scored)]
    assert len(scored) == len(request.new_tokens) or stream.stopped


# ---------------------------------------------------------------- other clients


@pytest.mark.slow
def test_lm_eval_finds_the_loglikelihoods_of_evaluate(server, checkpoints, oracle, monkeypatch):
    """By its own client for such servers, on token ids, with the tokenizer of the server."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = harness_model(load_model(checkpoints[None], dtype=torch.float32), oracle.tokenizer, 3)
    api = LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{server.port}/v1/completions", model="tiny", tokenizer_backend="remote",
        auth_token=KEY, batch_size=4, max_length=CONTEXT,
    )  # fmt: skip
    assert api.tokenizer.encode("once upon") == oracle.tokenizer.encode("once upon", add_bos=False)
    texts = strings(n=30)
    pairs = [(a, " " + b) for a, b in zip(texts, texts[1:]) if a.strip() and b.strip() and len(a + b) < 500]
    found = api.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    expected = model._loglikelihood_tokens([(None, *api._encode_pair(*pair)) for pair in pairs])
    assert len(found) > 15
    for (score, greedy), (exact, is_greedy) in zip(found, expected):
        assert score == pytest.approx(exact, rel=1e-6, abs=1e-4) and greedy == is_greedy


def test_tokenize(server, oracle):
    text = "once upon a \u20ac"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["tokens"] == oracle.tokenizer.encode(text) and found["count"] == len(found["tokens"])
    assert found["max_model_len"] == CONTEXT and found["token_strs"][0] == "<|begin|>"
    assert server.post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": text}
    assert server.post("/tokenize", {"messages": MESSAGES})["tokens"] == oracle.template.encode(MESSAGES)


# ---------------------------------------------------------------- other ways to run it


@pytest.mark.slow
def test_ranks(checkpoints, tmp_path, oracle):
    """Rank 0 has the queue; the others follow. Ending torchrun ends all."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = ["--checkpoint_path", checkpoints[None], *OPTIONS]
    with running(tmp_path / "log", *arguments, launcher=launcher) as server:
        prompts = [prompt_ids(n, n) for n in (5, 60, 12, 33, 8)]
        asks = [{"prompt": prompt, "new": 20, "params": {"temperature": 0.0}, "leaves": None} for prompt in prompts]
        schedule = [ask | {"stream": i % 2 == 0, "delay": 5 * i} for i, ask in enumerate(asks)]
        schedule[1]["leaves"] = 3
        for i, (text, _) in enumerate(asyncio.run(all_requests(server, schedule))):
            assert i == 1 or text == oracle.text(prompts[i], 20)
        wait_for(server.idle, "all rows to be free")
        time.sleep(1.2)  # while nothing happens
        assert greedy_text(server, prompts[1], 20) == oracle.text(prompts[1], 20)


DRAFT_COUNTS = ("steps", "proposed_tokens", "accepted_tokens", "seconds")


@pytest.mark.slow
def test_drafts(checkpoints, tmp_path, oracle):
    """With proposals the tokens and their log-probabilities are those of plain decoding."""
    prompt = [7, 8, 9, 10] * 6
    with running(tmp_path / "log", "--checkpoint_path", checkpoints[None], "--draft", "prompt-lookup",
                 "--speculate_k", 4, *OPTIONS) as server:  # fmt: skip
        for params in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}):
            body = {"prompt": prompt, "max_tokens": 40, "logprobs": 0, "seed": 0} | params
            choices = [server.post("/v1/completions", body)["choices"][0] for _ in range(2)]
            expected = oracle.run(prompt, 40, logprobs=0, **params)
            for choice in choices:
                assert choice["text"] == oracle.text(prompt, 40, **params)
                own = [logprob for logprob, _ in expected.token_logprobs]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-4)
        counts = [server.metric(f'draft_{key}_total{{draft="prompt-lookup"}}') for key in DRAFT_COUNTS]
        assert counts[0] > 0 and 0 < counts[2] < counts[1] <= 4 * counts[0] and counts[3] > 0


# ---------------------------------------------------------------- the end


ENDS = ("SIGTERM twice", "the engine dies", "the HTTP process dies")


@pytest.fixture(scope="module")
def doomed(checkpoints, tmp_path_factory):
    """A server for each of ENDS. They start together."""
    folder = tmp_path_factory.mktemp("doomed")
    with ThreadPoolExecutor() as pool:
        arguments = ["--checkpoint_path", checkpoints[None], *OPTIONS]
        starts = {how: pool.submit(Server, folder / how, arguments) for how in ENDS}
    yield {how: start.result() for how, start in starts.items()}
    for start in starts.values():
        if start.exception() is None:
            start.result().stop()


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_both_processes_end_together(doomed, how):
    """And a request that is running hears of it; nothing is printed that is longer than a line."""
    server = doomed[how]
    client = longest(server, stream=True)
    assert client.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
    engine, http_side = server.processes()
    number = signal.SIGTERM if "SIGTERM" in how else signal.SIGKILL
    os.kill(http_side if "HTTP" in how else engine, number)
    if "SIGTERM" in how:
        wait_for(lambda: server.health() == (503, "draining"), "the server to drain")
        os.kill(engine, number)
    code = server.process.wait(PATIENCE_S)
    assert code == (2 if "HTTP" in how else -number)
    wait_for(lambda: ended(http_side), "the HTTP process to end")
    if "HTTP" not in how:
        with client.socket.makefile("rb") as rest:
            text = rest.read().decode()
        assert '"error": {"message": "the engine has stopped"' in text and "data: [DONE]" in text
    client.socket.close()
    assert len(log_lines(server.log.read_text())) <= 2, server.log.read_text()


def http_process_by(monkeypatch, path: Path, script: str, settings=b"", shell="/bin/sh"):
    """serve.http_process with a script in the place of the HTTP process. settings: anything."""
    path.write_text(f"#!{shell}\n{script}\n")
    path.chmod(0o755)
    resource_tracker.ensure_running()  # which must be Python
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(path))
    return serve.http_process(settings, socket.create_server(("127.0.0.1", 0)))


@pytest.mark.parametrize("size", [1, 1 << 24])  # of the settings: more than a pipe holds
@pytest.mark.parametrize("script, code", [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("sleep 0.3; exit 1", 1)])
def test_an_http_process_that_ends_while_it_starts(monkeypatch, tmp_path, script, code, size):
    """It reads nothing. The server ends when it writes to the pipe."""
    ended = pytest.raises(UserError, match=rf"^the HTTP process has ended \(exit code {code}\)$")
    with ended, http_process_by(monkeypatch, tmp_path / "http", script, bytes(size)) as connection:
        time.sleep(0.5)
        connection.send("ready")


def test_the_http_process_begins_with_blocked_signals(monkeypatch, tmp_path):
    out = tmp_path / "blocked"
    code = "import os, pathlib, signal\nblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())"
    code += f"\npathlib.Path({str(out)!r}).write_text(' '.join(one.name for one in blocked))"
    with http_process_by(monkeypatch, tmp_path / "http", code, shell=sys.executable):
        wait_for(lambda: out.exists() and out.read_text(), "the process")
    assert set(out.read_text().split()) == {"SIGINT", "SIGTERM"}


def start_of(checkpoints, log) -> subprocess.Popen:
    """A serve.py that has just been started."""
    command = [sys.executable, "serve.py", "--port", "0", "--checkpoint_path", str(checkpoints[None])]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.parametrize("kind, codes", [(signal.SIGINT, (-2, 130)), (signal.SIGTERM, (-15, 143, 0))])
def test_signals_while_the_server_starts(checkpoints, tmp_path, kind, codes):
    """A terminal sends them to all processes."""
    with (tmp_path / "log").open("w+") as log:
        process = start_of(checkpoints, log)
        try:
            time.sleep(1)
            os.killpg(process.pid, kind)
            assert process.wait(PATIENCE_S) in codes
            wait_for(lambda: not group_members(process.pid), "all processes to end")
        finally:
            process.kill()
        log.seek(0)
        # Before the first line of serve.py (line 0), Python itself prints the interrupt.
        printed = log.read().replace(EARLY_INTERRUPT, "")
    assert "Traceback" not in printed


EARLY_INTERRUPT = f"""Traceback (most recent call last):
  File "{ROOT / "serve.py"}", line 0, in <module>
KeyboardInterrupt
"""


def group_members(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
    return [stat for stat in stats if int(stat[2]) == group and stat[0] != "Z"]


# Runs serve.py --help, and then serve.py, as if the libraries of requirements-serve.txt were not installed.
WITHOUT_WEB_LIBRARIES = """if True:
    import sys
    sys.modules.update(dict.fromkeys(("starlette", "uvicorn", "h11", "prometheus_client", "pydantic")))
    sys.argv = ["serve.py", "--checkpoint_path", "/nowhere"]
    import serve
    try:
        serve.parse_arguments(["--help"])
    except SystemExit:
        serve.run_command(serve.main)"""


@pytest.mark.slow
def test_without_web_libraries():
    """--help works, and serving ends with one line, before a model is looked for."""
    command = [sys.executable, "-c", WITHOUT_WEB_LIBRARIES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and "--max_queue" in done.stdout
    assert done.stderr == "serve.py: error: starlette is not installed: pip install -r requirements-serve.txt\n"


def test_the_examples_at_the_start_work(server, oracle, capsys):
    """Those with curl and from Python, with the key, which is not printed."""
    said = server.log.read_text()
    assert KEY not in said
    command = re.search(r"^    curl .*?\n .*$", said, re.M | re.S)[0].partition("\nFrom")[0]
    environment = os.environ | {"API_KEY": KEY}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant", done
    code = said.partition("(pip install openai):\n")[2].partition("\n\n")[0]
    exec(code.replace("the key", KEY), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "has_template, api_key, expected",
    [
        (
            True,
            None,
            ["a/v1/chat/completions -H", '"messages": ', r'(model="the \"model", messages=prompt, ', "unused"],
        ),
        (False, None, ["a/v1/completions -H", '{"prompt": ', "client.completions.create(", ", prompt=prompt,"]),
        (True, "secret", ['-H "Authorization: Bearer $API_KEY" ', 'api_key="the key"']),
        (False, "secret", ['a/v1/completions -H "Authorization', "choices[0].text"]),
    ],
)
def test_the_examples_fit_the_model_and_the_key(has_template, api_key, expected):
    files = SimpleNamespace(template="x" if has_template else None)
    tokenizer = SimpleNamespace(vocabulary=object())
    checkpoint = SimpleNamespace(name='the "model', tokenizer=tokenizer, tokenizer_files=files)
    said = serve.examples("a", checkpoint, api_key)
    assert all(one in said for one in expected) and "secret" not in said, said
    compile(said.partition("(pip install openai):\n")[2], "example", "exec")
    tokenizer.vocabulary = None  # then there is no text to ask with
    assert serve.examples("a", checkpoint, api_key) == ""


def test_the_model_may_be_named_without_its_option():
    assert serve.parse_arguments(["some/name:Q4_K_M", "--port", "0"]).model.checkpoint_path == "some/name:Q4_K_M"
    assert serve.parse_arguments(["--port", "0", "a"]).model == serve.parse_arguments(["--checkpoint_path", "a"]).model
    assert serve.parse_arguments([]).model.checkpoint_path is None
    assert serve.parse_arguments([""]).model.checkpoint_path == ""  # which is refused when it is opened
    with pytest.raises(UserError, match="'a' and --checkpoint_path 'b' both name a model; name one"):
        serve.parse_arguments(["a", "--checkpoint_path", "b"])
    with pytest.raises(UserError, match="unrecognized arguments: b"):
        serve.parse_arguments(["a", "b"])


def test_what_cannot_be_served(checkpoints, monkeypatch):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        for arguments, line in (
            (["--port", str(port)], f"--host 127.0.0.1 --port {port} cannot be listened on: Address already in use"),
            (["--api_key", ""], "--api_key is empty"),
            (["--port", "0", "--host", ""], "--host is empty"),
            (["--port", "0", "--host", "\udcff"], "--port 0 cannot be listened on"),
            (["--port", "0", "--max_seq_length", "99999"], f"more than the model's context of {CONTEXT}"),
        ):
            monkeypatch.setattr(sys, "argv", ["serve.py", "--checkpoint_path", str(checkpoints[None]), *arguments])
            with pytest.raises(UserError, match=re.escape(line)):
                serve.main()


# ---------------------------------------------------------------- end tokens that the model does not have


def test_an_end_token_beyond_the_table_and_a_schema(checkpoints, tmp_path):
    """The grammar is built with those that exist. test_api.py has models without any."""
    directory = tmp_path / "hf"
    shutil.copytree(checkpoints[None].parent / "hf", directory)
    generation = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [60000, 1]}))
    integer = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    schema = {"$schema": "https://json-schema.org/draft-07/schema#", "type": "object", "required": ["a"]}
    schema |= {"properties": {"a": integer}, "additionalProperties": False}
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with running(tmp_path / "log", "--checkpoint_path", directory, *OPTIONS) as server:
        (choice,) = server.post("/v1/completions", body)["choices"]
        assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"])["a"], int)
        body["response_format"]["json_schema"]["strict"] = True
        status, answer = server.request("POST", "/v1/completions", body)
        assert status == 400
        assert "response_format.json_schema.schema.$schema: " in json.loads(answer)["error"]["message"]
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_the_time_of_a_chunk_is_told_beforehand(tiny_model):
    """So that the first long prompt does not look like an engine that hangs. The engine is as before."""
    engine = Engine(tiny_model("llama-gqa-biased"), 2, 3000, options=EngineOptions(2000))
    lengths = []
    read = engine.steps.prefill
    engine.steps.prefill = lambda model, ids, *more: lengths.append(ids.numel()) or read(model, ids, *more)
    seconds = [serve.chunk_seconds(engine, length) for length in (3000, 640, 40)]
    assert lengths == [64, 64, 40] and min(seconds) > 0
    assert not any(row.tokens for row in engine.rows) and engine.timing.prefill_tokens == 0
