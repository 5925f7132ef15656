"""Calls whose arguments are written one by one, as Qwen3.5's: values, pieces of them, and the grammars that they fit.

The oracles are the template, which writes what is parsed again, and jsonschema for what the masks let through.
"""

import json
import random

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# isort: off
from test_tools import FORMATS, MARKS, NAMES, ONE_BY_ONE, REQUEST, SOURCES, STRANGE, TYPES, VALUES, an_object
from test_tools import answered, content, cut, events_of, fits, function, rendered_answer, source_of
from test_tools import compiler as compiler, files as files, served as served  # fixtures
# isort: on

from server.answers import AnswerParser, AnswerSyntax, CallArguments, CallBegins
from server.api import ServedModel
from server.parameters import ValueText, property_types, types_of, value_json
from server.tools import Tool

# ---------------------------------------------------------------- values

DEFINED = {"$defs": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/a"}, "c/d": {"const": 1}}}


@pytest.mark.parametrize("schema, types", [
    ({"type": "string"}, ["string"]), ({"type": ["string", "null"]}, ["string", "null"]), ({}, None), (True, None),
    ({"enum": ["a", 1, None]}, ["string", "integer", "null"]), ({"const": 1.5}, ["number"]), ({"enum": []}, None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["string", "null"]), ({"anyOf": [{}, {"type": "x"}]}, None),
    ({"allOf": [{"minLength": 1}, {"type": "string"}]}, ["string"]), ({"oneOf": [{"const": True}]}, ["boolean"]),
    ({"$ref": "#/$defs/b"}, ["string"]), ({"$ref": "#/$defs/c~1d"}, ["integer"]), ({"$ref": "#/x/y"}, None),
    ({"$ref": "#"}, None), ({"type": 5}, None), ({"anyOf": 5}, None), ({"$ref": 5}, None), ({"type": [5]}, None),
])  # fmt: skip
def test_the_types_that_a_schema_allows(schema, types):
    assert types_of(schema, DEFINED) == (None if types is None else set(types))


def test_the_types_of_properties():
    schema = {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"anyOf": [{"$ref": "#/properties/b"}]}}}
    assert property_types(schema) == {"a": None, "b": None}, "a schema that refers to itself"
    schema = {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"const": ""}}}}}
    assert property_types(schema) == {"a": {"string"}} and property_types({"properties": 5}) == {}


@pytest.mark.parametrize("types, values", [
        (["string"], {"5": '"5"', "": '""', " a\n": '" a\\n"', "null": '"null"', '"': '"\\""', "ä": '"ä"'}),
        (["integer"], {"5": "5", " 5\n": "5", "x": '"x"', '"5"': '"\\"5\\""', "[1]": "[1]", "": '""', "1e5": "1e5"}),
        (["boolean"], {"True": "true", "false": "false", "yes": '"yes"'}),
        (["null", "object"], {"None": "null", '{"a": "True"}': '{"a": "True"}', "{a}": '"{a}"', "[": '"["'}),
        (["number"], {"NaN": '"NaN"', "Infinity": '"Infinity"', "-0.5": "-0.5", "9" * 5000: f'"{"9" * 5000}"'}),
        (["string", "null"], {"null": "null", "None": "null", "nulls": '"nulls"', "5": '"5"', "": '""'}),
        (["string", "number"], {"5": "5", "5.5": "5.5", "true": '"true"', "[5]": '"[5]"', "True": '"True"'}),
        (None, {"5": "5", "true": "true", "True": '"True"', "null": "null", '"a"': '"\\"a\\""', "[1, 2]": "[1, 2]"}),
])  # fmt: skip
def test_values(types, values):
    types = None if types is None else frozenset(types)
    for text, expected in values.items():
        for pieces in ([text], list(text)):
            value = ValueText(types)
            assert "".join(map(value.add, pieces)) + value.end() == expected, text
        if types not in ({"string"}, {"string", "null"}):
            assert value_json(text, types) == expected


# ---------------------------------------------------------------- what templates write

LISTS = {
    "string": st.lists(st.text(max_size=5) | st.sampled_from(MARKS + STRANGE), max_size=4).map("".join),
    "integer": st.integers(), "number": st.floats(allow_nan=False, allow_infinity=False), "boolean": st.booleans(),
    "null": st.none(), "array": st.lists(VALUES, max_size=3),
    "object": st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
}  # fmt: skip
KEYS = st.from_regex(r"\A[\w.-]{1,9}\Z") | st.sampled_from(["", " a ", 'a"b', "Ä", "parameter", "=", "x\\"])


@st.composite
def typed_calls(draw, format) -> tuple[list[dict], list[tuple]]:
    """Tools with a type for each argument, and calls of them, as (name, arguments). No value has the mark that ends
    it, and a string that may be null is not the word null."""
    tools = []
    calls = []
    mark = format.parameters.after.strip()
    for name in NAMES:
        arguments = {}
        properties = {}
        for key in draw(st.lists(KEYS, max_size=3, unique=True)):
            kind = draw(st.sampled_from(sorted(LISTS)))
            value = draw(LISTS[kind])
            if mark in json.dumps(value, ensure_ascii=False):
                continue
            arguments[key] = value
            properties[key] = {"type": kind}
            if kind in ("string", "null") and value not in ("null", "None"):
                properties[key] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
            if kind in ("array", "object") and draw(st.booleans()):
                del properties[key]
        tools.append(function(name, {"type": "object", "properties": properties}))
        calls.append((name, arguments))
    chosen = draw(st.lists(st.sampled_from(calls), min_size=1, max_size=3))
    return tools, chosen[: 1 if format.between is None else None]


@pytest.mark.parametrize("name", ONE_BY_ONE)
@settings(max_examples=14, deadline=None)
@given(data=st.data())
def test_what_the_template_writes_is_parsed_as_these_arguments(served, name, data):
    """However the text is cut. The template writes what was parsed as the same text."""
    model = served(name)
    tools, calls = data.draw(typed_calls(FORMATS[name]))
    text = rendered_answer(model, "", calls)
    thoughts = "<think>Hm. <tool_call>\n</think>\n\n" if model.chat.thinking else ""
    if name == "qwen3.5":  # whose prompt ends with the first mark
        thoughts = thoughts.removeprefix("<think>")
    whole = f"{thoughts}Sure.\n{text}\n"
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=9))
    for pieces in ([whole], cut(whole, places), list(whole)):
        message = answered(model, {"tools": tools}, pieces)["message"]
        found = [call["function"] for call in message["tool_calls"]]
        parsed = [(call["name"], json.loads(call["arguments"])) for call in found]
        assert json.dumps(parsed) == json.dumps(calls)  # in which 1 and true are not equal
        assert message["content"].strip() == "Sure."
        assert ("Hm." in message.get("reasoning_content", "")) == bool(thoughts)
    assert rendered_answer(model, "", parsed) == text


# ---------------------------------------------------------------- what models write


def call(arguments: str, index: int = 0) -> list[tuple]:
    return [(CallBegins, index, "f"), (CallArguments, index, arguments)]


F = "<tool_call>\n<function=f>\n"
END = "</function>\n</tool_call>"
X = "<parameter=a>\nx\n</parameter>\n"


@pytest.mark.parametrize("text, expected", [
    (f"{F}{END}", call("{}")),
    (f"Hm.\n{F}{X}{END}.", [content("Hm.\n"), *call('{"a": "x"}'), content(".")]),
    (f"{F}{X}<parameter=b>\n1\n</parameter>\n{END}", call('{"a": "x", "b": 1}')),
    (f"{F}{X}{END}\n{F}{END}", call('{"a": "x"}') + call("{}", 1)),
    (f"{F}<parameter=c>\nNone\n</parameter>\n{END}", call('{"c": null}')),
    (f"{F}<parameter=a>\n\nx\n\n</parameter>\n{END}", call('{"a": "\\nx\\n"}')),
    (f"{F}<parameter=a>\n\n</parameter>\n{END}", call('{"a": ""}')),
    (f"{F}<parameter=a>\n{END}{F}<b>\n</parameter>\n{END}", call(f'{{"a": {json.dumps(END + F + "<b>")}}}')),
    (f"{F}<parameter=d>\n[1,\n 2]\n</parameter>\n{END}", call('{"d": [1,\n 2]}')),
    # What models get wrong: line breaks, a missing first or last mark, text between arguments.
    *((text, call('{"a": "x"}')) for text in (
        f"{F}<parameter=a>x</parameter>{END}", f"<tool_call><function=f>{X}</function></tool_call>",
        f"<function=f>\n{X}</function>\n", f"{F}{X}</tool_call>", '{"name": "f", "arguments": {"a": "x"}}',
    )),
    (f"{F}{X}</function> Done.", [*call('{"a": "x"}'), content(" Done.")]),
    (f"{F}{X} and <parameter=b>\n1</parameter>{END}", call('{"a": "x", "b": 1}')),
    # Other text is content.
    *((text, [content(text)]) for text in (
        f"<tool_call>\n<function=g>\n{X}{END}", f"<tool_call>\n<function=f>\nHm. {X}", "<tool_call> <function",
        "<tool_call>\nf", "<function=" + "f" * 300,
    )),
    # Answers that are cut off.
    (f"{F}{X}", call('{"a": "x"')), (f"{F}{X}<parameter=", call('{"a": "x"')),
    (f"{F}<parameter=a>\nx", call('{"a": "x')), (f"{F}<parameter=b>\n1", call('{"b": ')),
])  # fmt: skip
def test_what_models_write(text, expected):
    syntax = AnswerSyntax(tools=FORMATS["qwen3.5"], names=frozenset(NAMES), types={"f": TYPES})
    assert events_of(syntax, [text]) == events_of(syntax, list(text)) == expected


def test_arguments_are_streamed():
    syntax = AnswerSyntax(tools=FORMATS["qwen3.5"], names=frozenset(NAMES), types={"f": TYPES})
    parser = AnswerParser(syntax)
    texts = []
    for piece in (F, "<parameter=a>", "\nab", "c\n", "d\n</para", "meter>\n<parameter=b>\n1", "2\n</parameter>\n", END):
        texts.append("".join(event.text for event in parser.add(piece) if isinstance(event, CallArguments)))
    assert texts == ["", "", '{"a": "ab', "c", "\\nd", '", "b": ', "12", "}"]


# ---------------------------------------------------------------- grammars

TEXT = {"type": "string"}


@pytest.mark.parametrize("schema, fitting, others", [
    (an_object(), [{}], [{"a": 1}]),
    (an_object("a", "b", a={}, b={}), [{"a": 1, "b": "x"}], [{}, {"b": 1}, {"b": 1, "a": 1}]),
    (an_object("b", a={}, b={}), [{"b": 1}, {"a": [1], "b": 1}], [{"a": 1}]),
    (an_object(a=TEXT), [{"a": "<b> </a>\n\n5\n"}, {"a": "<parameter=b></parameter"}, {"a": ""}, {}],
     [{"a": "x</parameter>y</arg_value>"}]),  # a value ends with the first mark
    (an_object(a=TEXT | {"enum": ["b", "bc"]}), [{"a": "b"}, {"a": "bc"}], [{"a": "c"}, {"a": ""}]),
    (an_object(a={"enum": ["", 'ä"\n\\', [1], True]}), [{"a": ""}, {"a": 'ä"\n\\'}, {"a": [1]}], [{"a": " "}]),
    (an_object(a={"enum": ["x</parameter>y</arg_value>"]}), [{"a": ""}], []),  # which cannot be written
    (an_object(**{'ä"b\\': {"type": "integer"}}), [{'ä"b\\': 5}], [{'ä"b\\': "x"}, {"a": 5}]),
    (an_object(a={"type": ["string", "null"], "enum": ["b", None]}), [{"a": "b"}], [{"a": "c"}]),
    (an_object(a={"anyOf": [{"enum": ["b"]}, {"type": "integer"}]}), [{"a": "b"}, {"a": 5}], [{"a": "c"}]),
    (an_object(a={"anyOf": [{"type": "array"}, {"type": "integer"}]}), [{"a": []}, {"a": 5}], [{"a": "b"}]),
    (an_object(a=TEXT | {"maxLength": 3, "minLength": 1}), [{"a": "äöü"}], [{"a": ""}, {"a": "bcde"}]),
    (an_object(a=TEXT | {"minLength": 2}), [{"a": "b" * 99}], [{"a": "b"}]),
    (an_object(a=TEXT | {"pattern": "^[a-z/]+$"}), [{"a": "b/c"}], [{"a": ""}, {"a": "b1"}]),
    (an_object(a=TEXT | {"pattern": "^[$^]\\$$"}), [{"a": "^$"}], [{"a": "$"}, {"a": "x^$"}]),
    (an_object(a=TEXT | {"pattern": "b+c"}), [{"a": "1bbc\n2"}], [{"a": "b"}]),
    (an_object(a=TEXT | {"pattern": "^b|c$"}), [{"a": "b1"}, {"a": "1"}], []),  # not enforced
    (an_object(a={"type": "array", "items": {"type": "boolean"}}), [{"a": [True]}, {"a": []}], [{"a": [5]}]),
    (an_object(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": {"const": 5}}}, [{"a": 5}], [{"a": 6}]),
    ({"properties": {"a": {"type": "integer"}}, "required": ["z"]}, [{"a": 1, "z": [1]}, {"z": "", "b.c": "x"}],
     [{}, {"a": 1}]),
    ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "x"}]),
    ({"$ref": "#/$defs/b", "$defs": {"b": an_object("a", a={"const": "b"})}}, [{"a": "b"}], [{}, {"a": "c"}]),
    ({"properties": {"a": False}, "required": 5}, [{}, {"b": 1}], [{"a": 1}]),
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3.5", "glm"])
def test_arguments_that_fit_their_grammar(served, compiler, name, schema, fitting, others):
    model = served(name)
    source = source_of(model, name, [Tool("f", schema), Tool("g", {})])
    for arguments in fitting + others:
        text = rendered_answer(model, "", [("f", arguments)])
        assert fits(model, compiler, source, text) == (arguments in fitting), text


def test_marks_that_are_special_tokens(served, compiler):
    """They are named by their ids in grammars, and their text reaches the parser."""
    source = SOURCES["glm"].replace("<tool_call>", "<｜call｜>").replace("</tool_call>", "<｜/call｜>")
    source = source.replace("<arg_key>", "<|tool_call|>").replace("</arg_value>", "<|/tool_call|>")
    model = served(source)
    assert model.chat.tool_format.parameters.after == "<|/tool_call|>\n"
    tools = [function("f", an_object("a", a={"type": "string"}, b={"type": "integer"}))]
    message = model.parse_chat(REQUEST | {"tools": tools, "tool_choice": "required"}).choices[0].text_request
    shown = {name for name, i in model.chat.special_tokens.items() if i in message.shown_ids}
    assert shown == {"<｜call｜>", "<｜/call｜>", "<|tool_call|>", "<|/tool_call|>"}
    arguments = {"a": "x\n</arg_value>", "b": 5}
    text = rendered_answer(model, "", [("f", arguments)])
    assert fits(model, compiler, message.grammar, text)
    assert not fits(model, compiler, message.grammar, text.replace("5", "x"))
    (called,) = answered(model, {"tools": tools}, list(text))["message"]["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == arguments


KINDS = [
    {"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[ab]{2,3}$"}, {"enum": ["a", "ab", "</", "1"]},
    {"type": "integer", "minimum": -20, "maximum": 300}, {"type": "boolean"}, {"type": "null"}, {"const": "x\ny"},
    {"type": "array", "items": {"enum": ["a", 5]}, "maxItems": 2}, {"anyOf": [{"enum": ["a"]}, {"type": "null"}]},
    an_object("x", x={"type": "boolean"}, y={"enum": ["q"]}),
]  # fmt: skip


def random_tool(chance: random.Random, name: str, kind: dict) -> dict:
    """A strict tool, whose first argument is required and of this kind."""
    keys = chance.sample(["a", "ab", "b-c", "x.y", "Z"], chance.randint(1, 3))
    required = keys[:1] + [key for key in keys[1:] if chance.random() < 0.6]
    properties = {key: chance.choice(KINDS) for key in keys} | {keys[0]: kind}
    return function(name, an_object(*required, **properties), strict=True)


@pytest.mark.parametrize("name", ["qwen3.5", "glm"])
@pytest.mark.slow
def test_random_tokens_that_the_masks_allow_are_calls_that_validate(served, name):
    """The tokens are drawn at random from those that the grammar of the request allows, and parsed as an answer."""
    chance = random.Random(7)
    model = served(name)
    found = set()
    for kind in KINDS:
        tools = [random_tool(chance, one, kind) for one in NAMES[:2]]
        body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        body["chat_template_kwargs"] = {"enable_thinking": False}
        source = model.parse_chat(REQUEST | body).choices[0].text_request.grammar
        if name == "glm":  # whose prompt does not say that thoughts are over
            source = source.replace('("<think>" thoughts)? ', "")
        text = random_text(model, source, chance)
        answer = answered(model, body, [text])
        assert answer["finish_reason"] == "tool_calls", text
        (called,) = answer["message"]["tool_calls"]
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        schema = schemas[called["function"]["name"]]
        arguments = json.loads(called["function"]["arguments"])
        assert jsonschema.Draft202012Validator(schema).is_valid(arguments), (schema, text)
        found |= {type(value) for value in arguments.values()}
    assert {str, int, bool, type(None), list, dict} <= found


def random_text(model: ServedModel, source: str, chance: random.Random) -> str:
    grammar = model.grammars.get_compiler("tools").compile(source)
    masks = torch.zeros(1, 23, dtype=torch.int32)
    data = b""
    for _ in range(600):
        grammar.fill(masks)
        allowed = ((masks[0, :, None] >> torch.arange(32)) & 1).flatten().nonzero()[:, 0].tolist()
        token = chance.choice(allowed)
        if token not in model.chat_eos_ids:
            data += model.token_bytes(token)
        if grammar.accept(token):
            return data.decode()
    raise AssertionError(data)
