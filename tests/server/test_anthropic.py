"""Anthropic's Messages API: what requests are translated to, and the messages and streams that answers become.

The app is the server's, with an engine that answers with given texts. Anthropic's own client is in test_clients.py.
"""

import json
import re
from dataclasses import replace

import pytest
from conftest import ROOT
from scripted import TEMPLATE, ScriptedEngine, app_settings, events_of, served_model
from servers import CONTEXT, KEY
from starlette.testclient import TestClient

from server import http_server
from server.anthropic import anthropic_error, chat_body, count_tokens, parse_message
from server.request_fields import ApiError


def text_block(text: str) -> dict:
    return {"type": "text", "text": text}


REFUSED = json.loads((ROOT / "tests" / "data" / "messages.json").read_text())  # (fields, why)
QUESTION = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def settings(checkpoints):
    return app_settings(checkpoints[None], TEMPLATE)


@pytest.fixture(scope="module")
def model(checkpoints):
    return served_model(checkpoints[None], TEMPLATE)


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(settings, engine):
    app = http_server.make_app(settings, engine, "127.0.0.1")
    return TestClient(app, headers={"x-api-key": KEY}, raise_server_exceptions=False)


def ask(client, engine, pieces: list[str], last: dict | None = None, **body):
    """The response to a question, if the engine generates these texts."""
    engine.updates = [{"text": piece} for piece in pieces]
    engine.updates[-1] |= {"finish_reason": "stop"} | (last or {})
    return client.post("/v1/messages", json={"model": "tiny", "max_tokens": 50, "messages": [QUESTION]} | body)


def prompt_of(model, messages: list, **body) -> str:
    completion = parse_message(model, {"messages": messages} | body)
    return model.tokenizer.decode(completion.choices[0].request.prompt)


# ---------------------------------------------------------------- requests


def test_a_conversation_is_that_of_openais_chat(model):
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    result = [text_block("sunny"), text_block("25")]
    messages = [
        {"role": "user", "content": [text_block("a") | {"cache_control": {}}, text_block("b")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            text_block("I see."), call, call | {"id": "toolu_2"},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": result},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True}, text_block("And?"),
        ]},
    ]  # fmt: skip
    body = {"system": [text_block("Be"), text_block("brief.")], "tools": [TOOL], "messages": messages}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    described = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
    written = json.dumps({"name": "weather", "arguments": {"city": "Rome"}})
    calls = f"<tool_call>\n{written}\n</tool_call>" * 2
    prompt = parse_message(model, body).choices[0].request.prompt
    text = model.tokenizer.decode(prompt)
    lines = text.splitlines()
    assert lines[0] == "thinking True" and json.loads(lines[1].partition("] in")[0] + "]") == [described]
    assert text.endswith(
        "[system] Be\nbrief.\n[user] a\nb\n[assistant] <think>Hm.</think>\nI see."
        + f"{calls}\n[tool] sunny\n25\n[tool] \n[user] And?\n[assistant] "
    )
    assert count_tokens(model, body) == {"input_tokens": len(prompt)}


def test_prompts_of_short_requests(model):
    assert prompt_of(model, [QUESTION], system="Hi") == "[system] Hi\n[user] Hello\n[assistant] "
    answer = {"role": "assistant", "content": "The"}  # is continued
    assert prompt_of(model, [QUESTION, answer]) == "[user] Hello\n[assistant] The"
    text = prompt_of(model, [QUESTION], thinking={"type": "disabled"}, metadata={"user_id": "x"})
    assert text == "thinking False\n[user] Hello\n[assistant] "


def document(source: dict, **more) -> dict:
    return {"type": "document", "source": source} | more


PLAIN = {"type": "text", "media_type": "text/plain", "data": "a\nb"}
CONTENT = {"type": "content", "content": [text_block("c"), text_block("d")]}
FOUND = {"type": "search_result", "title": "T", "source": "http://x", "content": [text_block("e")]}
REFERENCE = {"type": "tool_reference", "tool_name": "weather"}


@pytest.mark.parametrize(
    "block, text",
    [
        (document(PLAIN), "a\nb"),
        (document(PLAIN, title="T", context="Of 1900.", citations={"enabled": False}), "T\nOf 1900.\na\nb"),
        (document(CONTENT), "c\nd"),
        (FOUND, "T\nhttp://x\ne"),
    ],
)
def test_documents_are_text(model, block, text):
    """In a message, and in the result of a tool."""
    message = {"role": "user", "content": [block, text_block("hi")]}
    assert prompt_of(model, [message]) == f"[user] {text}\nhi\n[assistant] "
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block, REFERENCE]}
    assert prompt_of(model, [QUESTION, {"role": "user", "content": [result]}]) == (
        f"[user] Hello\n[tool] {text}\nweather\n[assistant] "
    )


SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    "system, messages, text",
    [
        ("Be brief.", [SYSTEM, QUESTION], "[system] Be brief.\nBe kind.\n[user] Hello"),
        (None, [SYSTEM, QUESTION], "[system] Be kind.\n[user] Hello"),
        ("Be brief.", [QUESTION, SYSTEM], "[system] Be brief.\n[user] Hello\n[system] Be kind."),
        ([], [QUESTION, {"role": "system", "content": [text_block("a"), text_block("b")]}, QUESTION],
         "[user] Hello\n[system] a\nb\n[user] Hello"),
    ],
)  # fmt: skip
def test_system_messages_stand_where_they_are(model, system, messages, text):
    """At the beginning they are one with the field `system`."""
    assert prompt_of(model, messages, system=system) == f"{text}\n[assistant] "


HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=a5145;"


@pytest.mark.parametrize(
    "system, messages, text",
    [
        ([text_block(HEADER), text_block("Be brief.")], [], "[system] Be brief.\n"),
        ([text_block(f"{HEADER}\n") | {"cache_control": {}}, text_block("a"), text_block("b")], [], "[system] a\nb\n"),
        (HEADER, [], ""),
        (None, [SYSTEM | {"content": HEADER}, SYSTEM], "[system] Be kind.\n"),
        # Others stay: a later block, a text of several lines, another beginning.
        ([text_block("a"), text_block(HEADER)], [], f"[system] a\n{HEADER}\n"),
        ([text_block(HEADER), text_block(HEADER)], [], f"[system] {HEADER}\n"),
        ([text_block(f"{HEADER}\nBe brief.")], [], f"[system] {HEADER}\nBe brief.\n"),
    ],
)
def test_a_header_line_of_an_agent_is_not_part_of_the_prompt(model, system, messages, text):
    messages = [*messages, QUESTION]
    assert prompt_of(model, messages, system=system) == f"{text}[user] Hello\n[assistant] "


def test_fields_that_an_agent_sends(model):
    """Also those of the published types that do not change the answer, or not for a model here."""
    fields = {
        "model": "", "stop_sequences": ["", *"abcdefgh"], "service_tier": "auto", "inference_geo": "eu",
        "cache_control": {"type": "ephemeral"}, "betas": ["a-1"], "metadata": {"user_id": "x"}, "container": None,
        "speed": "fast",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "mcp_servers": [],
        "output_config": {"effort": "low", "format": None}, "thinking": {"type": "adaptive", "display": "omitted"},
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 10**6,
    }  # fmt: skip
    (choice,) = parse_message(model, {"messages": [QUESTION]} | fields).choices
    params = choice.request.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert choice.request.max_new_tokens == CONTEXT - len(choice.request.prompt)
    assert choice.text_request.stop == tuple("abcdefgh") and choice.text_request.grammar is None
    assert chat_body({"messages": [QUESTION]} | fields)["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    "choice, translated",
    [
        (None, ("auto", True)), ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any"}, ("required", True)), ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "function": {"name": "f"}}, True)),
    ],
)  # fmt: skip
def test_tool_choice(choice, translated):
    body = chat_body({"messages": [QUESTION], "tool_choice": choice})
    assert (body["tool_choice"], body["parallel_tool_calls"]) == translated


def test_the_place_of_what_a_strict_schema_may_not_have_is_named_as_the_client_does(model):
    mail = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\bx"}}}
    fields = {"output_config": {"format": {"type": "json_schema", "schema": mail}}}
    place = "output_config: the schema is not supported: output_config.format.schema.properties.a.pattern: "
    with pytest.raises(ApiError, match=re.escape(place)) as caught:
        parse_message(model, {"messages": [QUESTION]} | fields)
    assert caught.value.status == 400 and anthropic_error(caught.value)["error"]["type"] == "invalid_request_error"
    tools = [TOOL, TOOL | {"name": "f", "input_schema": mail, "strict": True}]
    place = "tools: the schema is not supported: tools[1].input_schema.properties.a.pattern: "
    with pytest.raises(ApiError, match=re.escape(place)):
        parse_message(model, {"messages": [QUESTION], "tools": tools})
    del tools[1]["strict"]
    parse_message(model, {"messages": [QUESTION], "tools": tools, "tool_choice": {"type": "any"}})


def test_a_schema_for_the_answer(model):
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    body = chat_body({"messages": [QUESTION], "output_config": config})
    described = {"name": "format", "schema": SCHEMA, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": described}
    older = chat_body({"messages": [QUESTION], "output_format": config["format"]})
    assert older["response_format"] == body["response_format"]


USE = {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}


def user(*content) -> dict:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize("fields, why", REFUSED)
def test_requests_that_are_refused(client, fields, why):
    response = client.post("/v1/messages", json={"max_tokens": 5, "messages": [QUESTION]} | fields)
    error = response.json()
    assert response.status_code == 400 and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error" and why in error["error"]["message"]


# ---------------------------------------------------------------- responses


def streamed_message(events: list[dict]) -> dict:
    """The message of a stream, as Anthropic's clients put it together."""
    (first, *middle, delta, last), open_block = events, None
    message = first["message"]
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    assert message["content"] == [] and message["stop_reason"] is None
    for event in middle:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block = event["index"]
            message["content"].append(event["content_block"])
            continue
        block = message["content"][open_block]
        assert event["index"] == open_block
        if kind == "content_block_stop":
            open_block = None
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"])
            continue
        piece = event["delta"]
        assert kind == "content_block_delta"
        if piece["type"] == "input_json_delta":
            block["input"] = (block["input"] or "") + piece["partial_json"]
        else:
            field = piece["type"].removesuffix("_delta")
            assert block["type"] == field
            block[field] += piece[field]
    assert open_block is None
    return message | delta["delta"] | {"usage": delta["usage"]}


TEXT, THOUGHTS = {"type": "text", "text": "Hi."}, {"type": "thinking", "thinking": "Hm.", "signature": ""}


@pytest.mark.parametrize(
    "text, last, content, stop_reason",
    [
        ("Hi.", {}, [TEXT], "end_turn"), ("Hi.", {"finish_reason": "length"}, [TEXT], "max_tokens"),
        ("Hi.", {"stop_string": "!"}, [TEXT], "stop_sequence"), ("", {}, [], "end_turn"),
        ("<think>Hm.</think>\n\nHi.", {}, [THOUGHTS, TEXT], "end_turn"), (CALL, {}, [USE], "tool_use"),
        (f"<think>Hm.</think>\nHi.{CALL}\n{CALL}", {}, [THOUGHTS, TEXT, USE, USE], "tool_use"),
    ],
)  # fmt: skip
def test_messages(client, engine, text, last, content, stop_reason):
    """Whole, and streamed in one piece or letter by letter."""
    whole = ask(client, engine, [text], last, tools=[TOOL]).json()
    usage = whole["usage"]
    assert usage["input_tokens"] + 4 == len(engine.completion.choices[0].request.prompt)
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 9)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, last.get("stop_string"))
    messages = [whole]
    for pieces in ([text], [*text, ""]):
        response = ask(client, engine, pieces, last, tools=[TOOL], stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        messages.append(streamed_message(events_of(response)))
    for message in messages:
        ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
        assert len(set(ids)) == len(ids) and message["content"] == content
        assert message.pop("id").startswith("msg_")
    assert messages[0] == messages[1] == messages[2]


def test_a_call_that_is_cut_off_is_text(client, engine):
    cut = CALL.partition("Ro")[0]
    message = ask(client, engine, [cut], {"finish_reason": "length"}, tools=[TOOL]).json()
    assert message["content"] == [{"type": "text", "text": '{"city": "'}] and message["stop_reason"] == "max_tokens"
    broken = CALL.replace('"Rome"', "Rome")
    message = ask(client, engine, [broken], tools=[TOOL]).json()
    assert message["content"] == [{"type": "text", "text": broken}] and message["stop_reason"] == "end_turn"


def test_errors_are_anthropics(client, settings, engine):
    def error_of(response) -> tuple:
        error = response.json()
        assert error["type"] == "error" and error["error"]["message"]
        return response.status_code, error["error"]["type"]

    body = {"max_tokens": 5, "messages": [QUESTION]}
    response = client.post("/v1/messages", json=body, headers={"x-api-key": "no"})
    assert error_of(response) == (401, "authentication_error")
    strict = replace(settings, strict_model=True)
    app = http_server.make_app(strict, engine, "127.0.0.1")
    strict_client = TestClient(app, headers={"authorization": f"Bearer {KEY}"})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert error_of(strict_client.post(path, json=body | {"model": "claude"})) == (404, "not_found_error")
    assert error_of(client.get("/v1/messages")) == (405, "invalid_request_error")
    assert error_of(client.post("/v1/messages/batches", json={})) == (404, "not_found_error")
    for status, kind in ((429, "rate_limit_error"), (503, "overloaded_error"), (500, "api_error")):
        engine.error = ApiError("no", status)
        response = client.post("/v1/messages", json=body)
        engine.error = None
        assert error_of(response) == (status, kind)
    engine.updates = [{"text": "Hi."}, ApiError("the engine has stopped", 503)]
    events = events_of(client.post("/v1/messages", json=body | {"stream": True}))
    assert events[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "the engine has stopped"}}


def test_the_key_may_be_in_either_header(client):
    body = {"messages": [QUESTION]}
    headers = {"x-api-key": "", "authorization": f"Bearer {KEY}"}
    for one, expected in (({}, 200), (headers, 200), (headers | {"authorization": f"Basic {KEY}"}, 401)):
        assert client.post("/v1/messages/count_tokens", json=body, headers=one).status_code == expected
    assert client.get("/v1/models").status_code == 401  # x-api-key is for Anthropic's paths only
    assert client.get("/v1/models", headers=headers).status_code == 200
