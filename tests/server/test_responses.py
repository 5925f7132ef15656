"""OpenAI's Responses API: what requests are translated to, and the responses and streams that answers become.

The app is the server's, with an engine that answers with given texts. Every response and every event is checked against
the types that the official client publishes. test_serve.py has a running server, test_clients.py real models.
"""

import json
import typing

import openai
import pydantic
import pytest
from conftest import ROOT
from openai.types import responses
from scripted import TEMPLATE, ScriptedEngine, app_settings, events_of, served_model
from servers import CONTEXT, KEY
from starlette.testclient import TestClient

from server import http_server, openai_responses
from server.request_fields import ApiError

TABLES = json.loads((ROOT / "tests" / "data" / "responses.json").read_text())  # of the tests below, by their names
PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
TOOL, CHAT_TOOL = {"type": "function"} | FUNCTION, {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "sunny"}
USER, ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}
EVENTS = {  # the published types of events, by their names
    typing.get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in typing.get_args(typing.get_args(responses.ResponseStreamEvent)[0])
}


@pytest.fixture(scope="module")
def model(checkpoints):
    return served_model(checkpoints[None], TEMPLATE)


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(checkpoints, engine):
    app = http_server.make_app(app_settings(checkpoints[None], TEMPLATE), engine, "127.0.0.1")
    headers = {"authorization": f"Bearer {KEY}"}
    return TestClient(app, "http://localhost", headers=headers, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def official(client):
    """The official client's `responses`, with its arguments."""
    return openai.OpenAI(base_url="http://localhost/v1", api_key=KEY, http_client=client, max_retries=0).responses


def answer_with(engine, text: str, pieces: int = 1, **last):
    """Let the engine answer with a text, in this many pieces."""
    ends = [len(text) * (i + 1) // pieces for i in range(pieces)]
    engine.updates = [{"text": text[start:end]} for start, end in zip([0, *ends], ends)]
    engine.updates[-1] |= {"finish_reason": "stop"} | last


def extra_fields(value, path="") -> list[str]:
    """The fields that no published type has."""
    if isinstance(value, list):
        return [found for i, one in enumerate(value) for found in extra_fields(one, f"{path}[{i}]")]
    if not isinstance(value, pydantic.BaseModel):
        return []
    found = [f"{path}.{name}" for name in value.__pydantic_extra__ or ()]
    for name in type(value).model_fields:
        found += extra_fields(getattr(value, name), f"{path}.{name}")
    return found


def check_published(value: dict, kind: type) -> dict:
    """Check that a value has exactly the fields of a published type."""
    assert extra_fields(kind.model_validate(value, strict=True)) == []
    return value


def whole_response(response) -> dict:
    assert response.status_code == 200, response.text
    return check_published(response.json(), responses.Response)


def streamed_response(response) -> dict:
    """The response at the end of a stream, each event of which is checked: its type, its number, and its place."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response)
    for n, event in enumerate(events):
        check_published(event, EVENTS[event["type"]])
        assert event["sequence_number"] == n
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    first, last = events[0]["response"], events[-1]["response"]
    assert events[1]["response"] == first and first["status"] == "in_progress" and first["output"] == []
    items, rest = [], events[2:-1]
    while rest:
        item, rest = read_item(rest, len(items))
        items.append(item)
    assert last["output"] == items and last.keys() - first.keys() <= {"completed_at"}
    assert names[-1] == last["status"]
    return last


def read_item(events: list[dict], index: int) -> tuple[dict, list[dict]]:
    """The item that a stream goes on with, put together from its events; and the events after it."""
    added = events[0]
    assert added["type"] == "response.output_item.added" and added["item"]["status"] == "in_progress"
    kind = added["item"]["type"]
    name = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}[kind]
    at = 1 if kind == "function_call" else 2
    deltas = []
    while events[at]["type"] == f"response.{name}.delta":
        deltas.append(events[at]["delta"])
        at += 1
    text, done = "".join(deltas), events[at]
    assert done["type"] == f"response.{name}.done" and "" not in deltas
    if kind == "function_call":
        assert done["arguments"] == text and added["item"]["arguments"] == ""
        item = added["item"] | {"arguments": text}
    else:
        part = events[at + 1]["part"]
        begun = events[1]
        assert begun["type"] == "response.content_part.added" and begun["part"] == part | {"text": ""}
        assert events[at + 1]["type"] == "response.content_part.done" and done["text"] == part["text"] == text
        item = added["item"] | {"content": [part]}
        at += 1
    ended = events[at + 1]
    assert ended["type"] == "response.output_item.done"
    assert ended["item"] == item | {"status": ended["item"]["status"]}
    for event in events[: at + 2]:
        assert event["output_index"] == index and event.get("item_id", item["id"]) == item["id"]
        assert event.get("content_index", 0) == 0
    return ended["item"], events[at + 2 :]


# ---------------------------------------------------------------- requests


def prompt_of(model, **body) -> str:
    """The prompt that a request is translated to."""
    kept = openai_responses.KeptResponses()
    completion = openai_responses.parse_response(model, kept, body)
    return model.tokenizer.decode(completion.choices[0].request.prompt)


def chat_prompt(model, messages: list[dict], **body) -> str:
    completion = model.parse_chat({"messages": messages} | body)
    return model.tokenizer.decode(completion.choices[0].request.prompt)


def parts(*texts: str, kind="input_text") -> list[dict]:
    return [{"type": kind, "text": text} for text in texts]


def called(*ids: str) -> list[dict]:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    return [{"id": name, "type": "function", "function": function} for name in ids]


ANSWERED = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
ANSWERED |= {"content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "sunny"}


@pytest.mark.parametrize("given, messages", TABLES["test_a_conversation_has_the_tokens_of_openais_chat"])
@pytest.mark.parametrize("tools", [False, True])
def test_a_conversation_has_the_tokens_of_openais_chat(model, given, messages, tools):
    ours, theirs = ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}) if tools else ({}, {})
    text = chat_prompt(model, messages, **theirs)
    assert prompt_of(model, input=given, **ours) == text
    if messages[0]["role"] == "system":
        instructed = [{"role": "system", "content": f"Always.\n{messages[0]['content']}"}, *messages[1:]]
    else:
        instructed = [{"role": "system", "content": "Always."}, *messages]
    assert prompt_of(model, input=given, instructions="Always.", **ours) == chat_prompt(model, instructed, **theirs)
    assert prompt_of(model, input=given, instructions="", **ours) == text


def test_an_answer_at_the_end_is_not_continued(model):
    """Every response is an item of its own."""
    text = chat_prompt(model, [USER, ASSISTANT], add_generation_prompt=True)
    assert prompt_of(model, input=[USER, ANSWERED]) == text and text.endswith("Hi.\n[assistant] ")


FORMAT = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize("fields, translated", TABLES["test_fields_are_those_of_openais_chat"])
def test_fields_are_those_of_openais_chat(model, client, engine, fields, translated):
    kept = openai_responses.KeptResponses()
    (ours,) = openai_responses.parse_response(model, kept, {"input": "Hello", "seed": 1} | fields).choices
    (theirs,) = model.parse_chat({"messages": [USER], "seed": 1} | translated).choices
    assert vars(ours.request) == vars(theirs.request)
    for name in ("grammar", "stop", "syntax"):
        assert getattr(ours.text_request, name) == getattr(theirs.text_request, name)
    answer_with(engine, "Hi.")
    whole_response(client.post(PATH, json={"input": "Hello"} | fields))  # whose fields are the published ones


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("deep", [300, 975])
@pytest.mark.parametrize("where", ["tools", "tool_choice", "text"])
def test_values_that_the_response_cannot_repeat_are_refused_at_once(client, engine, where, deep, stream):
    """Numbers beyond the range of a double, and values that nest so deeply that writing them may fail later."""
    odd = "[" * deep + "1e400" * (deep == 300) + "]" * deep
    function = {"type": "function", "name": "f"}
    body = {
        "tools": {"tools": [function | {"parameters": {"type": "object", "x": "ODD"}}]},
        "tool_choice": {"tools": [function], "tool_choice": function | {"x": "ODD"}},
        "text": {"text": {"format": {"type": "text", "x": "ODD"}}},
    }[where]
    content = json.dumps({"input": "Hello", "stream": stream} | body).replace('"ODD"', odd)
    answer_with(engine, "Hi.")
    response = client.post(PATH, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 or (deep > 300 and response.status_code == 200)  # depends on the stack's limit
    if response.status_code == 400:
        assert response.json()["error"]["type"] == "invalid_request_error"
    elif stream:
        assert "event: response.completed" in response.text
    else:
        assert client.get(f"{PATH}/{response.json()['id']}").status_code == 200


def items(*more) -> dict:
    return {"input": [USER, *more]}


def tools(*more, **fields) -> dict:
    return {"tools": [TOOL, *more]} | fields


DEEP = json.loads('{"not":' * 400 + "{}" + "}" * 400)
HOSTILE = TABLES["HOSTILE"] + [
    ({"input": [USER] * 2000}, "input", "the prompt has"),
    ({"instructions": "x " * CONTEXT}, "input", "the prompt has"),
    ({"tools": [TOOL | {"name": f"f{i}"} for i in range(129)]}, "tools", "at most 128"),
    ({"text": {"format": FORMAT | {"schema": DEEP}}}, "text.format", "the schema is not supported"),
]


@pytest.mark.parametrize("fields, param, why", HOSTILE)
def test_requests_that_are_refused(client, fields, param, why):
    body = json.dumps({"input": [USER]} | fields)
    response = client.post(PATH, content=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and why in error["message"] and len(error["message"]) <= 500


@pytest.mark.parametrize("name", ["", "resp_" + "0" * 24, "x" * 5000, "../resp", "resp_\ud83d"])
def test_ids_that_nobody_has(client, name):
    response = client.post(PATH, content=json.dumps({"input": "Hello", "previous_response_id": name}))
    error = response.json()["error"]
    assert response.status_code == 404 and error["code"] == "previous_response_not_found"
    assert error["type"] == "invalid_request_error" and error["param"] == "previous_response_id"


# ---------------------------------------------------------------- responses


def message(text: str, status="completed") -> dict:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [part], "status": status}


def thoughts(text: str, status="completed") -> dict:
    return {"type": "reasoning", "summary": [], "content": parts(text, kind="reasoning_text"), "status": status}


def call(arguments='{"city": "Rome"}', status="completed") -> dict:
    return {"type": "function_call", "name": "weather", "arguments": arguments, "status": status}


LENGTH = {"finish_reason": "length"}


@pytest.mark.parametrize(
    "text, last, output",
    [
        ("Hi.", {}, [message("Hi.")]), ("Hi.", LENGTH, [message("Hi.", "incomplete")]), ("", {}, [message("")]),
        ("", LENGTH, []),
        ("<think>Hm.</think>\n\nHi.", {}, [thoughts("Hm."), message("Hi.")]),
        ("<think>Hm.", {}, [thoughts("Hm."), message("")]), ("<think>Hm.", LENGTH, [thoughts("Hm.", "incomplete")]),
        (f"<think>Hm.</think>\nHi.{CALL}\n{CALL}", {}, [thoughts("Hm."), message("Hi."), call(), call()]),
        (f"<think>Hm.</think>{CALL}\nBye.", {}, [thoughts("Hm."), call(), message("\nBye.")]),
        (CALL.partition("Ro")[0], LENGTH, [call('{"city": "', "incomplete")]),
        (CALL.partition("Ro")[0], {}, [call('{"city": "', "incomplete")]),  # a mistake of the model
        (f"{CALL}\n{CALL.partition('Ro')[0]}", LENGTH, [call(), call('{"city": "', "incomplete")]),
    ],
)  # fmt: skip
def test_answers(client, engine, text, last, output):
    """Whole, and streamed in one piece, in three or letter by letter."""
    body = {"input": "Hello", "tools": [TOOL], "metadata": {"a": "b"}, "instructions": "Be brief.", "user": "me"}
    body |= {"max_output_tokens": 50, "prompt_cache_key": "k", "reasoning": {"effort": "low"}}
    answer_with(engine, text, **last)
    found = [whole_response(client.post(PATH, json=body))]
    for pieces in (1, 3, len(text) + 1):
        answer_with(engine, text, pieces, **last)
        found.append(streamed_response(client.post(PATH, json=body | {"stream": True})))
    for response in found:
        assert whole_response(client.get(f"{PATH}/{response['id']}")) == response
        ids = [item.pop("id") for item in response["output"]]
        prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
        assert [name.partition("_")[0] for name in ids] == [prefixes[item["type"]] for item in output]
        calls = [item.pop("call_id") for item in response["output"] if "call_id" in item]
        assert len({*ids, *calls}) == len(ids) + len(calls) and all(name.startswith("call_") for name in calls)
        assert response["output"] == output
        assert response.pop("id").startswith("resp_") and response.pop("created_at") > 0
        assert (response.pop("completed_at", None) is None) == bool(last)
        assert response["status"] == ("incomplete" if last else "completed")
        assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if last else None)
        usage = response["usage"]
        assert usage["input_tokens"] == len(engine.completion.choices[0].request.prompt)
        assert usage["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
        assert usage["output_tokens"] == 9 and usage["total_tokens"] == usage["input_tokens"] + 9
        assert (usage["output_tokens_details"]["reasoning_tokens"] > 0) == ("<think>" in text)
        assert all(response[name] == body[name] for name in body.keys() - {"input", "tools", "reasoning"})
        assert response["tools"] == [TOOL | {"strict": None}] and response["tool_choice"] == "auto"
        assert response["reasoning"] == {"effort": "low", "summary": None} and response["model"] == "tiny"
    assert all(response == found[0] for response in found)


def ask(client, engine, text: str, answer: str, **fields) -> dict:
    answer_with(engine, answer)
    return whole_response(client.post(PATH, json={"input": text} | fields))


def last_prompt(model, engine) -> str:
    return model.tokenizer.decode(engine.completion.choices[0].request.prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_has_the_conversation_before(client, engine, model, stream):
    """But not its instructions and tools. A turn can be continued in several ways."""
    answer_with(engine, f"<think>Hm.</think>Wait.{CALL}")
    body = {"input": [USER], "tools": [TOOL], "instructions": "Be brief.", "stream": stream}
    response = client.post(PATH, json=body)
    first = streamed_response(response) if stream else whole_response(response)
    asked = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": called("a")}
    messages = [USER, asked, RESULT]
    result = OUTPUT | {"call_id": first["output"][2]["call_id"]}
    for _ in range(2):
        second = ask(client, engine, [result], "Sunny.", previous_response_id=first["id"], tools=[TOOL])
        assert last_prompt(model, engine) == chat_prompt(model, messages, tools=[CHAT_TOOL])
        assert second["previous_response_id"] == first["id"] and second["instructions"] is None
    third = ask(client, engine, "Thanks.", "Bye.", previous_response_id=second["id"], instructions="Smile.")
    messages += [{"role": "assistant", "content": "Sunny."}, USER | {"content": "Thanks."}]
    smile = {"role": "system", "content": "Smile."}
    assert last_prompt(model, engine) == chat_prompt(model, [smile, *messages])
    ask(client, engine, [], "More.", previous_response_id=third["id"])
    messages += [{"role": "assistant", "content": "Bye."}]
    assert last_prompt(model, engine) == chat_prompt(model, messages, add_generation_prompt=True)
    # The call of another conversation, or a call that is not answered.
    for given, why in (([OUTPUT], "there is no function_call"), ([], "last one is not a function_call")):
        refused = client.post(PATH, json={"input": given, "previous_response_id": first["id"]})
        assert refused.status_code == 400 and why in refused.json()["error"]["message"]


def is_kept(client, name: str) -> bool:
    found = client.get(f"{PATH}/{name}").status_code
    continued = client.post(PATH, json={"input": "Go on.", "previous_response_id": name, "store": False}).status_code
    assert (found, continued) in ((200, 200), (404, 404))
    return found == 200


def test_responses_are_found_and_deleted(client, engine):
    kept, other = (ask(client, engine, "Hello", "Hi.") for _ in range(2))
    unkept = ask(client, engine, "Hello", "Hi.", store=False)
    assert [is_kept(client, one["id"]) for one in (kept, other, unkept)] == [True, True, False]
    assert client.delete(f"{PATH}/{kept['id']}").json() == {"id": kept["id"], "object": "response", "deleted": True}
    assert not is_kept(client, kept["id"]) and is_kept(client, other["id"])
    for method in ("GET", "DELETE"):
        response = client.request(method, f"{PATH}/{kept['id']}")
        assert response.status_code == 404 and response.json()["error"]["type"] == "invalid_request_error"
        unkeyed = client.request(method, f"{PATH}/{other['id']}", headers={"authorization": "Bearer no"})
        assert unkeyed.status_code == 401 and is_kept(client, other["id"])
    assert client.post(f"{PATH}/{other['id']}/cancel").status_code == 404
    assert client.post(f"{PATH}/{other['id']}").status_code == 405


def test_the_kept_responses_are_bounded(client, engine, monkeypatch):
    """By their number, their bytes and their age."""
    ids = [ask(client, engine, "Hello", "Hi.")["id"] for _ in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(openai_responses, "MAX_KEPT", 2)
        ids.append(ask(client, engine, "Hello", "Hi.")["id"])
        assert [is_kept(client, name) for name in ids] == [False, False, False, True, True]
    with monkeypatch.context() as patch:
        patch.setattr(openai_responses, "MAX_KEPT_BYTES", 5000)
        ids.append(ask(client, engine, "Hello", "Hi.", metadata={str(i): "x" * 500 for i in range(6)})["id"])
        assert [is_kept(client, name) for name in ids[3:]] == [False, False, True]
        ids.append(ask(client, engine, "Hello", "Hi.", metadata={str(i): "x" * 500 for i in range(12)})["id"])
        assert [is_kept(client, name) for name in ids[5:]] == [False, False], "it is too large by itself"
    with monkeypatch.context() as patch:
        patch.setattr(openai_responses, "MAX_KEPT_S", 0)
        assert not is_kept(client, ask(client, engine, "Hello", "Hi.")["id"])


def test_a_huge_history(client, engine, monkeypatch):
    """Otherwise, one that the prompt has little of could grow without end."""
    monkeypatch.setattr(openai_responses, "MAX_BODY_BYTES", 200)
    turns = [None]
    while len(turns) < 9:
        answer_with(engine, "Hi.")
        response = client.post(PATH, json={"input": "Hello", "previous_response_id": turns[-1]})
        if response.status_code != 200:
            break
        turns.append(response.json()["id"])
    assert response.status_code == 400 and len(turns) > 2
    assert response.json()["error"]["message"] == "the conversation has more than 400 bytes"


def test_errors(client, engine):
    body = {"input": "Hello"}
    for status in (429, 503, 500):
        engine.error = ApiError("no", status)
        response = client.post(PATH, json=body)
        engine.error = None
        assert response.status_code == status and response.json()["error"]["message"] == "no"
    assert client.get(PATH).status_code == 405
    for error, code in ((ApiError("no engine", 503), "server_error"), (ApiError("x", 400), "invalid_prompt")):
        engine.updates = [{"text": "Hi. "}, {"text": "You."}, error]
        events = events_of(client.post(PATH, json=body | {"stream": True}))
        for n, event in enumerate(events):
            check_published(event, EVENTS[event["type"]])
            assert event["sequence_number"] == n
        told = {"code": code, "message": str(error)}
        assert events[-2] == told | {"type": "error", "param": None, "sequence_number": len(events) - 2}
        failed = events[-1]["response"]
        assert events[-1]["type"] == "response.failed" and failed["status"] == "failed"
        answer_with(engine, "Hi.")
        assert failed["error"] == told and not is_kept(client, failed["id"])


# ---------------------------------------------------------------- the official client


class Place(pydantic.BaseModel):
    city: str


@pytest.mark.parametrize("pieces", [1, 30])
def test_the_official_client_parses(official, engine, pieces):
    """Schemas and tools, whole and streamed."""
    tools = [{"type": "function"} | openai.pydantic_function_tool(Place, name="weather")["function"]]
    answer_with(engine, '{"city": "Rome"}', pieces)
    assert official.parse(model="tiny", input="Hello", text_format=Place).output_parsed == Place(city="Rome")
    with official.stream(model="tiny", input="Hello", text_format=Place) as stream:
        *_, done, _, _, _ = list(stream)
        assert done.parsed == Place(city="Rome") == stream.get_final_response().output_parsed
    answer_with(engine, f"<think>Hm.</think>Wait.{CALL}", pieces)
    (call,) = official.parse(model="tiny", input="Hello", tools=tools).output[2:]
    assert call.parsed_arguments in (Place(city="Rome"), {"city": "Rome"})
    with official.stream(model="tiny", input="Hello", tools=tools, tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        thoughts, said, call = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds and "response.reasoning_text.delta" in kinds
    assert (thoughts.content[0].text, said.content[0].text, call.name) == ("Hm.", "Wait.", "weather")
    assert json.loads(call.arguments) == {"city": "Rome"}
    answer_with(engine, "Sunny.", pieces)
    turns = [USER, thoughts, said, call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert official.create(model="tiny", input=turns, tools=tools).output_text == "Sunny."
