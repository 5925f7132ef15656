"""OpenAI's API as data: what requests are refused and by which name, and what is read of those that are not."""

import asyncio
import json
import math
import re
import resource
import sys
import threading
from contextlib import nullcontext
from functools import partial

import pytest
from conftest import ROOT
from prometheus_client import generate_latest
from scripted import served_model
from servers import CONTEXT, MESSAGES

from checkpoint import read_config
from engine import Request
from server import constraints
from server.anthropic import count_tokens, parse_message
from server.api import CompletionRequest, ServedModel
from server.constraints import GrammarChecker
from server.metrics import Metrics
from server.openai_requests import ChatBody
from server.openai_responses import KeptResponses, parse_response
from server.pipe_messages import EngineStatus, Update
from server.request_fields import NEUTRAL_VALUES, ApiError, Fields, encode_json, parse_object
from server.responses import ResponseBuilder
from text.tokenizer import read_tokenizer_files


@pytest.fixture(scope="module")
def model(checkpoints):
    return ServedModel(read_config(checkpoints[None]), read_tokenizer_files(checkpoints[None]), "tiny", CONTEXT)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["gpt-4o", "tiny:latest", "Tiny", "an/other", " tiny", "x" * 300])
def test_another_name_is_refused_only_if_the_server_is_strict(checkpoints, name, strict):
    """By every path that has the field, but GET /v1/models/NAME, which always says whether there is such a model."""
    files = read_tokenizer_files(checkpoints[None])
    model = ServedModel(read_config(checkpoints[None]), files, "tiny", CONTEXT, strict)
    chat = {"messages": MESSAGES}
    calls = [(model.parse_completion, {"prompt": [5]}), (model.parse_chat, chat), (model.tokenize, {"prompt": "a"})]
    calls += [(model.detokenize, {"tokens": [5]}), (partial(parse_message, model), chat | {"max_tokens": 5})]
    calls += [(partial(count_tokens, model), chat)]
    calls += [(partial(parse_response, model, KeptResponses()), {"input": "Why?"})]
    for call, body in calls:
        for own in ("tiny", "", None):
            call(body | {"model": own})
        with pytest.raises(ApiError, match="does not exist, only 'tiny'") if strict else nullcontext() as refused:
            call(body | {"model": name})
        assert not strict or (refused.value.status, refused.value.code) == (404, "model_not_found")
        with pytest.raises(ApiError, match="model must be a string"):
            call(body | {"model": [name]})

    assert model.find_model("tiny")["id"] == "tiny"
    with pytest.raises(ApiError, match="does not exist, only 'tiny'") as refused:
        model.find_model(name)
    assert refused.value.status == 404


def engine_request(completion: CompletionRequest) -> Request:
    return completion.choices[0].request


def say(content, **more):
    return {"messages": [{"role": "user", "content": content} | more]}


REFUSED = json.loads((ROOT / "tests" / "data" / "refused_fields.json").read_text())  # (fields, the one that is refused)
BOTH = REFUSED["BOTH"] + [
    ({"stop": ["a"] * 129}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop_token_ids": [5] * 129}, "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
]  # fmt: skip
DEEP = json.loads('{"not":' * 400 + "{}" + "}" * 400)
SCHEMAS = REFUSED["SCHEMAS"] + [
    *(({"response_format": {"type": kind}}, "response_format.type") for kind in ("xml", "regex", "grammar", ["text"])),
    *(({"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}},
       "response_format")
      for schema in ({"type": "x"}, DEEP, False, {"$ref": "http://127.0.0.1/x"}, {"enum": ["x" * 300_000]})),
    ({"guided_json": "[" * 100_000}, "guided_json"),
]  # fmt: skip
COMPLETIONS = REFUSED["COMPLETIONS"] + [
    ({"prompt": [5] * CONTEXT, "max_tokens": 1}, "prompt"),
    ({"prompt": [5] * (CONTEXT + 1)}, "prompt"),
    ({"prompt": [[5]] * 129}, "prompt"),
    ({"prompt": [[5]] * 65, "n": 2}, "n"),
]  # fmt: skip
CHATS = REFUSED["CHATS"] + [
    (say("x " * CONTEXT), "messages"),
]  # fmt: skip


COMPLETION_CASES = [("parse_completion", *case) for case in BOTH + SCHEMAS + COMPLETIONS]
CHAT_CASES = [("parse_chat", *case) for case in BOTH + SCHEMAS[::3] + CHATS]


@pytest.mark.parametrize("parse, fields, param", COMPLETION_CASES + CHAT_CASES)
def test_requests_that_are_refused(model, parse, fields, param):
    body = {"prompt": [5, 6]} if parse == "parse_completion" else {"messages": MESSAGES}
    with pytest.raises(ApiError) as caught:
        getattr(model, parse)(body | fields)
    assert (caught.value.status, caught.value.param) == (400, param) and len(str(caught.value)) < 600
    json.loads(encode_json(caught.value.body()))


NOTHING = {
    "n": 1, "best_of": 1, "logit_bias": {}, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto",
    "user": "somebody", "store": False, "min_tokens": 0, "chat_template_kwargs": {}, "seed": None, "stop": None,
    "top_k": -1, "metadata": {"a": 1}, "stream": None, "temperature": None, "max_tokens": None, "logprobs": None,
}  # fmt: skip


def test_neutral_values_are_accepted_and_unknown_fields_logged_once(model, capsys):
    for _ in range(2):
        one = engine_request(model.parse_completion({"prompt": [5, 6]} | NOTHING))
        two = engine_request(model.parse_chat({"messages": MESSAGES} | NOTHING))
    assert (one.max_new_tokens, two.max_new_tokens) == (16, CONTEXT - len(two.prompt))
    assert one.params.temperature == two.params.temperature == 1 and one.params.top_k == 0
    assert one.params.seed != two.params.seed and one.logprobs is None
    assert sorted(line.split("'")[1] for line in capsys.readouterr().err.splitlines()) == ["metadata", "store", "user"]


# Fields of NEUTRAL_VALUES that a completion or a chat reads
READ_FIELDS = {"echo", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
READ_FIELDS |= {"add_generation_prompt", "continue_final_message", "thinking_budget"}
# Fields that have a meaning for other servers and none here: they are refused, unless the value is neutral.
REFUSED_FIELDS = """
    functions audio moderation web_search_options verbosity grammar ebnf guided_grammar structural_tag samplers typ_p
    mirostat dynatemp_range xtc_probability dry_multiplier top_n_sigma n_probs lora reasoning_format parse_tool_calls
    thinking_budget_tokens allowed_token_ids stop_regex options template raw images system think thinking reasoning
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", sorted({*REFUSED_FIELDS, *NEUTRAL_VALUES} - READ_FIELDS))
def test_fields_that_would_change_the_answer_are_refused_by_name(model, name):
    for parse, body in ((model.parse_completion, {"prompt": [5, 6]}), (model.parse_chat, {"messages": MESSAGES})):
        for value in NEUTRAL_VALUES[name]:
            parse(body | {name: value})
        for value in (7, 0.5, "other", ["other"], {"other": 1}):
            with pytest.raises(ApiError, match=f"^{name} is not supported") as caught:
                parse(body | {name: value})
            assert caught.value.param == name


def test_numbers_are_neutral_however_they_are_written_but_true_is_none(model):
    fields = {"typical_p": 1.0, "length_penalty": 1.0, "mirostat": 0.0, "dry_multiplier": 0, "min_tokens": 0.0}
    model.parse_chat({"messages": MESSAGES} | fields)
    for name in fields:
        with pytest.raises(ApiError, match=name):
            model.parse_chat({"messages": MESSAGES, name: bool(fields[name])})


def test_fields_under_the_names_of_other_servers(model):
    """And values that others serve: top_p of 0, empty stop strings, many of them, no limit, no name of the model."""

    def both(**fields):
        completion = model.parse_completion({"prompt": [5, 6]} | fields).choices[0].text_request
        chat = model.parse_chat({"messages": MESSAGES} | fields).choices[0].text_request
        return completion, chat

    for fields, name, expected in (
        ({"top_p": 0}, "top_p", 0),
        ({"top_p": 0.0, "temperature": 0}, "top_p", 0),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.0, "repeat_last_n": 64}, "repetition_penalty", 1),
        ({"logit_bias": [[7, -100], [5, 1.5]]}, "logit_bias", ((5, 1.5), (7, -100))),
        ({"logit_bias": {"7": -100, "5": 1.5, "07": 2}}, "logit_bias", ((5, 1.5), (7, 2))),
    ):
        assert [getattr(one.request.params, name) for one in both(**fields)] == [expected] * 2
    for stop, expected in (
        ([""], ()), ("", ()), (["", "a", ""], ("a",)), (list("abcdefg"), tuple("abcdefg")), (["x"] * 128, ("x",) * 128),
    ):  # fmt: skip
        assert [one.stop for one in both(stop=stop)] == [expected] * 2
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        for one in both(**{name: -1}):
            assert one.request.max_new_tokens == CONTEXT - len(one.request.prompt)
        assert [one.request.max_new_tokens for one in both(**{name: 7})] == [7, 7]
    assert model.parse_chat({"messages": MESSAGES, "top_logprobs": 0}).choices[0].request.logprobs is None
    seeds = {one.request.params.seed for _ in range(2) for one in both(seed=-1, model="")}
    assert len(seeds) == 4, "as without a seed"
    for fields in ({"repeat_penalty": 1.1}, {"presence_penalty": 0.1}):
        with pytest.raises(ApiError, match="penalties apply to all tokens") as caught:
            both(**fields, repeat_last_n=64)
        assert caught.value.param == "repeat_last_n"


def test_the_context_bounds_each_prompt(model):
    completion = model.parse_completion({"prompt": [[5] * 100, [6], [7] * CONTEXT], "max_tokens": -1})
    lengths = [choice.request.max_new_tokens for choice in completion.choices]
    assert lengths == [CONTEXT - 100, CONTEXT - 1, 0]
    fits = model.parse_completion({"prompt": [5] * 1000, "max_tokens": CONTEXT - 1000})
    assert engine_request(fits).max_new_tokens == CONTEXT - 1000
    model.parse_completion({"prompt": [5] * CONTEXT, "max_tokens": 0, "echo": True, "logprobs": 0})
    with pytest.raises(ApiError, match=f"the prompt has {CONTEXT} tokens, as many as the context") as caught:
        model.parse_completion({"prompt": [5] * CONTEXT})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("max_tokens", [CONTEXT - 999, CONTEXT, 32000, 2**63])
def test_more_tokens_than_fit_are_cut(model, max_tokens):
    """In all four APIs, by each name of the field. The engine then ends with the finish reason length."""
    parsers = [(model.parse_completion, name, {"prompt": [5] * 1000}) for name in ("max_tokens", "n_predict")]
    parsers += [(model.parse_chat, name, {"messages": MESSAGES}) for name in ("max_tokens", "max_completion_tokens")]
    parsers.append((partial(parse_message, model), "max_tokens", {"messages": MESSAGES[1:]}))
    parsers.append((partial(parse_response, model, KeptResponses()), "max_output_tokens", {"input": MESSAGES}))
    for parse, name, body in parsers:
        request = engine_request(parse(body | {name: max_tokens}))
        assert request.max_new_tokens == min(max_tokens, CONTEXT - len(request.prompt))


def test_ids_that_are_refused_by_their_own_parameter(model):
    for answer, body, param, why in (
        (model.parse_completion, {"prompt": "a", "stop_token_ids": ["1"]}, "stop_token_ids[0]", "an integer: '1'"),
        (model.parse_completion, {"prompt": {}}, "prompt", "prompt must be a string or a list: {}"),
        (model.detokenize, {"tokens": ["a"]}, "tokens[0]", "tokens[0] must be an integer: 'a'"),
        (model.detokenize, {"tokens": [-1]}, "tokens", "token id -1 is outside the vocabulary of 700 (0 to 699)"),
    ):
        with pytest.raises(ApiError) as caught:
            answer(body)
        assert (caught.value.status, caught.value.param) == (400, param) and why in str(caught.value)
    assert model.detokenize({"tokens": model.tokenize({"prompt": "ab"})["tokens"]})["prompt"] == "ab"


def test_several_answers(model):
    """Each has the next seed. The prompt counts once."""
    seeds = 2**63 - 1, -(2**63), 1 - 2**63
    for completion, prompts in (
        (model.parse_completion({"prompt": [[5, 6], [7]], "n": 3, "best_of": 3, "seed": seeds[0], "echo": True}), 2),
        (model.parse_chat({"messages": MESSAGES, "n": 3, "seed": seeds[0]}), 1),
    ):
        assert [choice.index for choice in completion.choices] == list(range(3 * prompts))
        messages = [choice.text_request for choice in completion.choices]
        assert tuple(message.request.params.seed for message in messages) == seeds * prompts
        assert len({message.request_id for message in messages}) == 3 * prompts
        assert [message.can_time_out for message in messages] == [True] + [False] * (3 * prompts - 1)
        lengths = [len(message.request.prompt) for message in messages]
        for choice in completion.choices:
            choice.updates.append(Update(0, "", 5, cached_tokens=1, finish_reason="length"))
        usage = completion.usage()
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(lengths) / 3, 15 * prompts)
        assert usage["prompt_tokens_details"] == {"cached_tokens": prompts}
        assert len({id(message.request.new_tokens) for message in messages}) == 3 * prompts
    with pytest.raises(ApiError, match="^n must be at most 8: 9$"):
        model.parse_completion({"prompt": "a", "n": 9})


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def named(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema} | more}}


@pytest.mark.parametrize(
    "fields, fits, others",
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1]}', "{}"], ["[1]", "a"]),
        (named(POINT, strict=True), ['{"x": 1}'], ['{"x": "a"}', "{}"]),
        (named(POINT, strict=False), ['{"x": 1}'], ['{"x": 1, "y": 2}']),
        (named({}), ['{"a": null}', "1"], ["a"]),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, ['{"x": 1}'], ["{}"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"structured_outputs": {"regex": "a/b+[^/]"}}, ["a/bbc"], ["a/b/"]),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, ["yes", 'n"o'], ["no", "y"]),
        ({"guided_json": POINT}, ['{"x": 1}'], ["{}"]), ({"guided_regex": "(?i)ab"}, ["Ab"], ["b"]),
        ({"guided_choice": ["a\nb"]}, ["a\nb"], ["a"]), ({"json_schema": POINT}, ['{"x": 1}'], ["{}"]),
        ({"response_format": {"type": "json_object", "schema": POINT}}, ['{"x": 1}'], ["{}"]),
        ({"response_format": {"type": "json_object", "schema": {}}}, ["{}"], ["[]"]),
        ({"json_schema": {}}, ["{}"], ["[]"]), ({"format": "json"}, ["{}"], ["[]"]),
        ({"format": POINT, "json_schema": None}, ['{"x": 1}'], ["{}"]),
        ({"regex": "a+b", "format": "", "grammar": "", "ebnf": ""}, ["aab"], ["b"]),
    ],
)  # fmt: skip
def test_the_form_of_an_answer(model, fields, fits, others):
    sources = {model.parse_completion({"prompt": "a"} | fields).choices[0].text_request.grammar}
    chat = model.parse_chat({"messages": MESSAGES, "n": 2} | fields)
    sources |= {choice.text_request.grammar for choice in chat.choices}
    assert len(sources) == 1, "a template without thoughts: the grammar of both"
    for text in fits + others:
        grammar = model.grammars.compiler.compile(*sources)
        ids = model.tokenizer.encode(text, add_bos=False)
        is_accepted = all(grammar.matcher.try_consume_tokens([i]) for i in ids) and grammar.matcher.is_accepting()
        assert is_accepted == (text in fits), text


# ---------------------------------------------------------------- messages

# Writes everything that it gets of a message.
TEMPLATE = (ROOT / "tests" / "data" / "shown.jinja").read_text()


@pytest.fixture(scope="module")
def shown(checkpoints):
    """shown(messages, thoughts, **fields) -> the prompt by the template, whose name for thoughts is `thoughts`."""
    models = {}

    def prompt(messages, thoughts="reasoning_content", **fields):
        if thoughts not in models:
            models[thoughts] = served_model(checkpoints[None], TEMPLATE.replace("THOUGHTS", thoughts))
        return models[thoughts].chat.read_conversation(ChatBody.read({"messages": messages} | fields)).text

    return prompt


HI, AGAIN = {"role": "user", "content": "Hi"}, {"role": "user", "content": "again"}


@pytest.mark.parametrize(
    "message, text",
    [
        ({"content": None}, ""), ({}, ""), ({"content": "Well. ", "refusal": "No."}, "Well. No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."), ({"content": None, "refusal": "No."}, "No."),
        ({"content": "x", "refusal": None, "audio": None, "function_call": None, "tool_calls": None}, "x"),
        ({"content": [{"type": "output_text", "text": "x", "annotations": []}, {"type": "text", "text": "y"}]}, "xy"),
        ({"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "x"}]}, "(Hm.)x"),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]}, "(Hm.)"),
        ({"content": "x", "reasoning": "", "reasoning_content": "Hm."}, "(Hm.)x"),
        ({"content": "x", "reasoning": [{"type": "text", "text": "Hm."}]}, "(Hm.)x"),
        ({"content": "x", "functions": "f()"}, "xf()"),
    ],
)  # fmt: skip
def test_what_an_assistants_message_may_have(shown, message, text):
    prompt = shown([HI, {"role": "assistant"} | message, AGAIN])
    assert prompt == f"[user] Hi\n[assistant] {text}\n[user] again\n[assistant] "


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("known", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_three_names(shown, sent, known):
    """In messages, and in templates."""
    prompt = shown([HI, {"role": "assistant", "content": "x", sent: "Hm."}, AGAIN], known)
    assert prompt == "[user] Hi\n[assistant] (Hm.)x\n[user] again\n[assistant] "


def test_names_of_messages(shown):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    written = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    messages = [
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        HI | {"name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": "Bob"},
        {"role": "tool", "tool_call_id": "a", "content": None},
        {"role": "tool", "tool_call_id": "a", "content": "1", "name": "g"},
    ]
    text = f"[system boss] Be brief.\n[user Ann] Hi\n[assistant Bob] {written}\n[tool f] \n[tool g] 1\n[assistant] "
    assert shown(messages) == text
    older = {"role": "assistant", "content": None, "function_call": call["function"]}
    assert (
        shown([HI, older, {"role": "function", "name": "f", "content": "1"}])
        == f"[user] Hi\n[assistant] {written}\n[tool f] 1\n[assistant] "
    )


def test_keys_of_messages_that_the_template_does_not_know_are_logged_once(shown, model, capsys, monkeypatch):
    monkeypatch.setattr(Fields, "logged", set())
    message = HI | {"weight": 1, "cache_control": {}, "functions": "f()", "prefix": True, "id": None}
    for _ in range(2):
        assert shown([message]) == "[user] Hif()\n[assistant] "
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split("'")[1] for line in lines) == ["cache_control", "prefix", "weight"]
    assert all("the chat template does not know it" in line for line in lines)
    answer = {"role": "assistant", "name": "Bob", "content": "x", "thinking": "Hm.", "reasoning": ""}
    model.parse_chat({"messages": [HI, answer, AGAIN]})
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split("'")[1] for line in lines) == ["name", "thinking"]


def test_fields_about_thinking_are_the_templates_variables(shown, model, capsys, monkeypatch):
    monkeypatch.setattr(Fields, "logged", set())
    for fields, text in (
        ({"reasoning_effort": "low"}, "effort low\n"),
        ({"reasoning_effort": "none"}, "thinking False\n"),
        ({"enable_thinking": True, "reasoning_effort": None}, "thinking True\n"),
        ({"reasoning_effort": "x", "chat_template_kwargs": {"enable_thinking": False}}, "effort x\nthinking False\n"),
    ):
        assert shown([HI], **fields) == f"{text}[user] Hi\n[assistant] "
    assert capsys.readouterr().err == ""
    for _ in range(2):
        model.parse_chat({"messages": MESSAGES, "reasoning_effort": "low"})
    assert "has reasoning_effort, which is ignored: the model's chat template does not" in capsys.readouterr().err


MAIL = {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"}
PERSON = POINT | {"properties": {"mail": MAIL, "x": {"type": "integer"}}}
UNSUPPORTED = [  # (schema, the place, answers that it still allows, others)
    (PERSON, ".properties.mail.pattern", ['{"mail": ".", "x": 1}', '{"x": 1}'], ['{"mail": "a@b"}', '{"x": "1"}']),
    ({"anyOf": [PERSON, {"type": "null"}]}, ".anyOf[0].properties.mail.pattern", ['{"x": 1}', "null"], ["{}"]),
    (POINT | {"properties": {"x": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}},
     ".properties.x.minimum", ['{"x": -9223372036854775808}'], ['{"x": 9223372036854775808}']),
    (POINT | {"properties": {"x": {"$ref": "#/$defs/none"}}}, "", ['{"y": 1}'], ["[]", "1"]),
    (POINT | {"patternProperties": {"(": {}}}, "", ['{"y": 1}'], ["[]", "1"]),
    ({"type": "object", "not": {}}, "", ['{"a": 1}'], ["[]"]),
]  # fmt: skip


@pytest.mark.parametrize("schema, place, fits, others", UNSUPPORTED)
def test_what_the_library_does_not_support_is_left_out_or_named(
    model, capsys, monkeypatch, schema, place, fits, others
):
    monkeypatch.setattr(model.grammars, "logged", set())
    strict = named(schema, strict=True)
    path = re.escape(f"response_format.json_schema.schema{place}: ")
    for parse, body in ((model.parse_completion, {"prompt": "a"}), (model.parse_chat, {"messages": MESSAGES})):
        with pytest.raises(ApiError, match=f"^response_format: the schema is not supported: {path}") as caught:
            parse(body | strict)
        assert caught.value.status == 400 and caught.value.param == "response_format"
    assert capsys.readouterr().err == ""
    fields = [(named(schema), "response_format.json_schema.schema"), (named(schema), "no second line")]
    fields += [({"guided_json": json.dumps(schema)}, "guided_json")]
    fields += [({"structured_outputs": {"json": schema}}, "structured_outputs")]
    for field, name in fields:
        source = model.parse_chat({"messages": MESSAGES} | field).choices[0].text_request.grammar
        assert [text for text in fits + others if model.grammars.accepts(source, text)] == fits
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (name != "no second line")
        assert all(f"of a request is not enforced in full: {name}{place}" in line for line in lines)


def test_what_is_not_enforced_is_logged_in_one_line(model, capsys, monkeypatch):
    monkeypatch.setattr(model.grammars, "logged", set())
    names = ["x" * 500, "\x1b[2J", *map(str, range(150))]
    schema = {"type": "object", "properties": {name: {"pattern": "(?=a)"} for name in names}}
    model.parse_completion({"prompt": "a", "guided_json": schema})
    line = capsys.readouterr().err.rstrip("\n")
    assert line.isprintable() and len(line) < 700


def test_grammars_without_the_library(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(model.grammars, "compiler", None)
    for fields in ({"guided_regex": "a"}, {"guided_json": {}}):
        with pytest.raises(ApiError, match="need llguidance") as caught:
            model.parse_completion({"prompt": "a"} | fields)
        assert caught.value.status == 400 and caught.value.param == next(iter(fields))


@pytest.mark.parametrize("ends", [(), (60000,), (-1, 700)])
def test_grammars_need_a_token_that_ends_answers(model, ends):
    checker = GrammarChecker(model.tokenizer, 700, ends)
    named_ids = ", ".join(map(str, ends)) or "none is named"
    said = re.escape(f"guided_json: the model has no end-of-text token among its 700 tokens ({named_ids}), which")
    for check in (lambda: checker.check('start: "a"', "guided_json"), lambda: checker.fit_constraint(GUIDED)):
        with pytest.raises(ApiError, match=said) as caught:
            check()
        assert caught.value.status == 400
    GrammarChecker(model.tokenizer, 700, (*ends, 1)).check('start: "a"', "guided_json")


def test_valid_grammars_are_remembered(model, monkeypatch):
    body = {"prompt": "a", "guided_choice": ["remembered"]}
    model.parse_completion(body)
    monkeypatch.setattr(model.grammars, "compiler", "not needed")
    model.parse_completion(body)


GUIDED = constraints.make_constraint("json", {"type": "integer"}, "guided_json")
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)} | {"d4000": {}}
TOO_COMPLEX = [  # each would take the library minutes, or end the process by a stack overflow
    {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]},
    {"type": "string", "allOf": [{"pattern": f".*a[ab]{{{n}}}c.*"} for n in range(5, 60)]},
    {"$ref": "#/$defs/d0", "$defs": CHAIN},
]


@pytest.mark.slow
@pytest.mark.parametrize("schema", TOO_COMPLEX)
def test_schemas_that_are_too_complex_are_refused_in_time(model, schema, monkeypatch):
    monkeypatch.setattr(constraints, "TRY_CPU_S", 1)

    def seconds():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = seconds()
    with pytest.raises(ApiError, match="the schema is not supported: it is too complex to compile") as caught:
        model.parse_completion({"prompt": "a", "guided_json": schema})
    assert caught.value.status == 400 and caught.value.param == "guided_json"
    assert seconds() - before < 2 * constraints.TRY_CPU_S


def test_only_a_few_grammars_are_tried_at_a_time(model, monkeypatch):
    monkeypatch.setattr(constraints, "TRY_WAIT_S", 0)
    monkeypatch.setattr(model.grammars, "tries", threading.BoundedSemaphore(1))
    body = {"prompt": "a", "guided_choice": ["tried"]}
    with model.grammars.tries, pytest.raises(ApiError, match="too many schemas") as caught:
        model.parse_completion(body)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    model.parse_completion(body)


def test_a_conversation_that_ends_with_an_answer_is_continued(model):
    messages = [*MESSAGES, {"role": "assistant", "content": "Because "}]

    def text(**fields):
        return model.detokenize({"tokens": model.tokenize({"messages": messages} | fields)["tokens"]})["prompt"]

    assert text() == "[system] Be brief.\n[user] Why?\n[assistant] Because "
    assert text(add_generation_prompt=True) == "[system] Be brief.\n[user] Why?\n[assistant] Because \n[a]"
    assert text(continue_final_message=True, add_generation_prompt=False) == text()
    body = {"messages": messages, "add_generation_prompt": False}
    assert model.parse_chat(body).choices[0].text_request.continues_prompt
    assert not model.parse_chat({"messages": MESSAGES}).choices[0].text_request.continues_prompt


def test_a_lone_surrogate_in_a_long_chat_is_refused(model):
    """JavaScript programs that cut strings send such texts."""
    for n in (1, 50 * CONTEXT):
        with pytest.raises(ApiError) as caught:
            model.parse_chat({"messages": [{"role": "user", "content": "\ud83d " + "x" * n}]})
        assert caught.value.status == 400


def test_what_json_cannot_hold(model):
    """Infinite log-probabilities, lone surrogates in what is quoted, tokens with the same text."""
    completion = model.parse_completion({"prompt": [5, 6], "max_tokens": 1, "logprobs": 2})
    byte, other = [i for i in range(2, 700) if model.token_text(i).startswith("bytes:")][:2]
    best = [(byte, -0.5), (other, -1.0)]
    update = Update(0, "\ufffd", 1, logprobs=[(9, -math.inf, best, 0)], finish_reason="length")
    completion.choices[0].updates.append(update)
    response = json.loads(encode_json(ResponseBuilder(model, completion).whole()))
    found = response["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-9999.0] and max(found["top_logprobs"][0].values()) == -0.5
    assert list(found["top_logprobs"][0]) == [model.token_text(i) for i in (byte, other, 9)]
    assert encode_json({"message": "\ud800"}) == b'{"message": "?"}'
    with pytest.raises(ApiError):
        parse_object(b'{"a": Infinity}')


def test_a_model_without_text(model, checkpoints, tmp_path, monkeypatch):
    """Token ids are served, and text is refused with a reason that names no path."""
    (tmp_path / "config.json").write_text((checkpoints[None] / "config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token_id": null}')
    bare = ServedModel(read_config(tmp_path), read_tokenizer_files(tmp_path), "bare", 50)
    assert engine_request(bare.parse_completion({"prompt": [5, 6], "max_tokens": 3})).prompt == [5, 6]
    for work, body in ((bare.parse_completion, {"prompt": "text"}), (bare.parse_chat, {"messages": MESSAGES})):
        with pytest.raises(ApiError) as caught:
            work(body)
        assert caught.value.status == 400 and str(tmp_path) not in str(caught.value)
    monkeypatch.setattr(model.template, "template", None)  # which then fails
    with pytest.raises(ApiError) as caught:
        model.parse_chat({"messages": MESSAGES})
    assert str(checkpoints[None]) not in str(caught.value) and "template fails" in str(caught.value)


def test_metrics_count_each_draft():
    """They get the sums so far, and count what is new. A file name that is not UTF-8 is shown with question marks."""
    metrics, name = Metrics(), "lookup:\udcff.txt"
    for sums in ({"seconds": 0.25}, {"seconds": 0.5, "steps": 2, "proposed_tokens": 9, "accepted_tokens": 4}):
        metrics.record_step(EngineStatus("ready", [], 0.0, drafts={"medusa": sums, name: {}}))

    async def shown() -> str:
        return generate_latest(metrics.registry).decode()  # counts the tasks of the event loop, too

    text = asyncio.run(shown())
    found = dict(re.findall(r'^fastpath_draft_(\w+)_total{draft="medusa"} (\S+)$', text, re.M))
    assert found == {"steps": "2.0", "proposed_tokens": "9.0", "accepted_tokens": "4.0", "seconds": "0.5"}
    assert 'fastpath_draft_steps_total{draft="lookup:?.txt"} 0.0' in text


def test_a_text_much_longer_than_the_context_is_not_tokenized_whole(model, monkeypatch):
    """Its beginning alone is too long. Long tokens may fill a long text, which is tokenized then."""
    longest = []
    encode = model.tokenizer.encode

    def count(text, *more, **options):
        longest.append(len(text))
        return encode(text, *more, **options)

    monkeypatch.setattr(model.tokenizer, "encode", count)
    text = "word " * 50_000
    for body in ({"prompt": text}, {"prompt": [text]}):
        with pytest.raises(ApiError, match="the prompt has more than the") as caught:
            model.parse_completion(body)
        assert caught.value.code == "context_length_exceeded" and caught.value.status == 400
    with pytest.raises(ApiError, match="more than the"):
        model.parse_chat({"messages": [{"role": "user", "content": text}]})
    assert max(longest) < 20 * CONTEXT
    monkeypatch.setattr(model.tokenizer, "encode", lambda text, *more: [5] * (len(text) // 100))
    assert len(model.parse_completion({"prompt": "x" * 100 * (CONTEXT - 1)}).choices[0].request.prompt) == CONTEXT - 1
