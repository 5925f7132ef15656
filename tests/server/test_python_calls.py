"""Calls that are written as in Python (LFM2's): values, pieces of them, and the grammars that they fit.

The oracles are Python, which writes and reads literals, the template, which writes what is parsed again,
and jsonschema for what the masks let through.
"""

import ast
import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import random_schema

# isort: off
from test_parameters import random_text
from test_tools import BESIDE, NAMES, QUESTION, REQUEST, VALUES, an_object, answered, check_any_cut, content, cut
from test_tools import events_of, fits, function, source_of
from test_tools import compiler as compiler, files as files, served as served  # fixtures
# isort: on

from server.answers import AnswerParser, AnswerSyntax, CallArguments, CallBegins
from server.openai_requests import ChatBody
from server.python_calls import KEYWORD
from server.request_fields import ApiError
from server.tools import LFM2, LFM2_MARKS, Tool

BEGIN, END = LFM2_MARKS
SYNTAX = AnswerSyntax(tools=LFM2, names=frozenset(NAMES))
PLACES = st.lists(st.integers(0, 300), max_size=12)


def arguments_of(text: str, pieces: list[str] | None = None) -> str:
    """The JSON text of a call's arguments, which are written as this text."""
    pieces = [f"{BEGIN}[f({text})]{END}"] if pieces is None else pieces
    (begins, *rest) = events_of(SYNTAX, pieces)
    assert begins == (CallBegins, 0, "f")
    ((kind, _, arguments),) = rest
    assert kind is CallArguments
    return arguments


# ---------------------------------------------------------------- values

KEYS = st.text(max_size=5).filter(KEYWORD.fullmatch)
KEYS |= st.sampled_from(["first-name", "a b", "from", "ä", "\U0001f600", "x" * 200, "5", "a\\b"])
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(CALLS, BESIDE, BESIDE, PLACES)
def test_what_is_written_is_parsed_as_these_calls(calls, before, after, places):
    """Any arguments of calls, beside any text, however the answer is cut."""
    text = before + LFM2.write([(name, json.dumps(arguments)) for name, arguments in calls]) + after
    found = events_of(SYNTAX, [text])
    assert found == events_of(SYNTAX, cut(text, places)) == events_of(SYNTAX, list(text))
    names = [event[2] for event in found if event[0] is CallBegins]
    arguments = [json.loads(event[2]) for event in found if event[0] is CallArguments]
    assert json.dumps(list(zip(names, arguments))) == json.dumps(calls)  # in which 1 and true are not equal
    said = "".join(event[2] for event in found if event[0] not in (CallBegins, CallArguments))
    assert "".join(said.split()) == "".join((before + after).split())


@pytest.mark.parametrize("literal", [
    r'"\x41\u00e4\U0001F600\101\0\7"', r'"\a\b\f\n\r\t\v\\\'\""', r"'\q\8 \. \xg \u12'", '"a\\\nb"', '"\\U00110000"',
    '"""a"b\'c\n"""', "'''a'b'''", '""""a"""', '""', '""""""', "'\\''", '"\\\\"', "-5", "+5", "1_000", "5.", ".5",
    "-0.0", "1e5", "1.5E-7", "-.5e+3", "9" * 200, "[ ]", "{ }", "[1,\n 2 , ]", "{'a' : 1 , }", "[[{}], {'a': []}]",
    "True", "[False, None]", " 5 ", "(1,2)", "()", "((1, 2), [(3,)], {'a': (4,)})", "(5)", '("a")', "((1), (2))",
    "0x1F", "-0XFF_f", "0o17", "0b101", "'a' \"b\"", "'''{'a': \"b\"}) \"\"\" '''", "[" * 90 + "]" * 90,
    "{1: 2, None: 3, True: 4, 1.5: 5}",
])  # fmt: skip
def test_literals(literal):
    try:
        expected = ast.literal_eval(literal.strip())
    except SyntaxError:  # an escape that is cut off stays as it is
        expected = literal[1:-1]
    text = f"{BEGIN}[f(a={literal}, b=1)]{END}"
    written = json.dumps({"a": expected, "b": 1}, ensure_ascii=False)
    assert arguments_of("", [text]) == arguments_of("", list(text)) == written


@pytest.mark.parametrize("text, expected", [
    ("a=true, b=false, c=null, d=[{'e': null}]", {"a": True, "b": False, "c": None, "d": [{"e": None}]}),
    ("a='x\n\r\n\0\x7f1', b=['\n']", {"a": "x\n\r\n\0\x7f1", "b": ["\n"]}),
    (r'a="\/\ud83d\ude00\477\N{DASH}"', {"a": "/\U0001f600\\477\\N{DASH}"}),  # escapes of JSON, and others
    ("a-b=1, a b=2, größe=3, from=4, 5=6", {"a-b": 1, "a b": 2, "größe": 3, "from": 4, "5": 6}),
    ("\n  a = 1,\n  b = [\n 2 ]\n,", {"a": 1, "b": [2]}),
    ("a=1, b=2, a='(', a='true, x=1'", {"a": "true, x=1", "b": 2}),  # the last value counts
    (r'a="\ud800"', {"a": "\ud800"}),  # which JSON has as an escape
])  # fmt: skip
def test_what_is_not_python_but_was_meant(text, expected):
    whole = f"{BEGIN}[f({text})]{END}"
    assert arguments_of(text) == arguments_of("", list(whole))
    assert json.loads(arguments_of(text).encode()) == expected


# ---------------------------------------------------------------- what models write

CALL = [(CallBegins, 0, "f"), (CallArguments, 0, '{"a": 1}')]
SECOND = [(CallBegins, 1, "get_weather"), (CallArguments, 1, "{}")]
OBJECT = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("text, expected", [
    (f" Sure.\n{BEGIN}[f(a=1), get_weather()]{END}\nDone.", [content(" Sure.\n"), *CALL, *SECOND, content("\nDone.")]),
    (f"{BEGIN}[f(a=1)]{END}{BEGIN}[get_weather()]{END}", CALL + SECOND),
    (f"{BEGIN}\n[\n  f ( a=1 ) ,\n  get_weather()\n]\n{END}", CALL + SECOND),
    # without the brackets of a list, without commas, without the last mark, JSON
    *((text, CALL) for text in (f"{BEGIN}f(a=1){END}", f"{BEGIN}[f(a=1)]", f"{BEGIN}[f(a=1)", f"{BEGIN}{OBJECT}{END}",
                                 OBJECT)),
    (f"{BEGIN}f(a=1)\nget_weather(){END}x", CALL + SECOND + [content("x")]),
    (f"{BEGIN}[f(a=1){END}.", [*CALL, content(".")]), (f"{BEGIN}[{OBJECT}]{END}.", [*CALL, content(".")]),
    (f"{BEGIN}[{OBJECT}, get_weather()]{END}", CALL + SECOND),
    (f"{BEGIN}[f(a='{END}[]')]{END}", [CALL[0], (CallArguments, 0, json.dumps({"a": f"{END}[]"}))]),
    # Other text is content.
    *((text, [content(text)]) for text in (
        f"{BEGIN}[g(a=1)]{END}", f"{BEGIN}[]{END}", f"{BEGIN}[f(5)]{END}", f"{BEGIN}[f]{END}", f"{BEGIN} is a mark",
        f"{BEGIN}[f(a", f"{BEGIN}[" + "f" * 600, "[f(a=1)] <|tool_call",
    )),
    (f"{BEGIN}[f(a=1), g()]{END}", [*CALL, content(f" g()]{END}")]),
    # A call that is broken or cut off is content, up to the mark that ends calls. The next ones are read.
    *((f"{BEGIN}[{broken}{END} {BEGIN}[f(a=1)]{END}", [content(f"{BEGIN}[{broken}{END} "), *CALL]) for broken in (
        "f(a=1, 5)]", "f(a=1]", "f(a=1}", "f(a=[1)]", "f(a=[1] * 2)]", "f(a=x < 5", "f(a=(1, 2", "f(a=[1,", "f(a=)]",
        "f(a=1", "f(,)]", "f(a=1}, {b=2)]", "f(**{'b': 1})]", "f({'b': 1})]", "f(a='b' 'c', d)]", "f(a={x: 1})]",
    )),
    (f"{BEGIN}[f(a=1), f(a=x)]{END}", [*CALL, content(f" f(a=x)]{END}")]),
    *((f"{BEGIN}[{broken}", [content(f"{BEGIN}[{broken}")]) for broken in (
        "f(a=1", "f(a=1,", "f(a='x", "f(a='x'", "f(a='x\\", f"f(a='x{END}.", "f(a='It's')]",
    )),
])  # fmt: skip
def test_what_models_write(text, expected):
    assert events_of(SYNTAX, [text]) == events_of(SYNTAX, list(text)) == expected


@pytest.mark.parametrize("expression", [
    "1+2", "1 -1", "(1 + 2) * 3", "(1, 2) + (3,)", r"r'\d'", r"b'a, \' b'", "f'{x}'", "nan", "-inf", "x.y", "1..real",
    "x(1, [2, {3}])[4]", "{1, 2}", "{'a', ', '}", "{ x.y }", "{*a, 1}", "{(1, 2): 3}", "{[]: 1}", "lambda: 'a, b'",
    "not x", "x['a]']", "5 km", "2024-05-01", "007", "#", "a\nb", "…", "x = 1", "", "True x", "0b12", "1e999", "5j",
    "9" * 5_000, "0x" + "F" * 5_000, "'\ud800'", "a:=1", "-" * 9_000 + "1", "1" + "+1" * 9_000, "(" * 300 + ")" * 300,
    "[" * 9_000 + "]" * 9_000, '"a "b" c"', "\\\n1",
])  # fmt: skip
def test_other_expressions_than_literals_of_json_are_content(expression):
    """Nothing is evaluated. The next calls are read."""
    text = f"{BEGIN}[f(c=2, a={expression}, b=1)]{END}"
    for pieces in ([text, f"{BEGIN}[f(a=1)]{END}."], list(f"{text}{BEGIN}[f(a=1)]{END}.")):
        assert events_of(SYNTAX, pieces) == [content(text), *CALL, content(".")]


PARTS = [
    BEGIN, END, "[", "]", "f(", "f", "(", ")", "g(a=1)", "f(a=1)", "f()", "a=", "a = ", "b=", "1", "-1.5", "True", "x",
    "(1,", "0x1F", "nan", "+", "r'", "{1,", '"', "'", '"x"', "'y'", '""', '"""', "\\", "\\n", ", ", ",", "{", "}", ":",
    '{"a": 1}', "**", "**{", " ", "\n", "é", '{"name": "f", "arguments": {}}', "<|tool_", "<", "=", "get_weather(",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=14), PLACES, st.sampled_from([None, 1]), st.booleans(), st.booleans())
def test_any_cut_of_any_answer_gives_the_same_events(parts, places, most, bare, begun):
    text = (f"{BEGIN}[f(" if begun else "") + "".join(parts)
    check_any_cut(AnswerSyntax(None, False, LFM2, frozenset(NAMES), most, bare), text, places)


def test_a_call_comes_when_it_is_complete():
    """And not at the end of the list. Only the next character tells whether a quote is one of three."""
    parser = AnswerParser(SYNTAX)
    texts = []
    for piece in ("Hm", BEGIN, "[f(", "a=", "'ab)", "c\\", "'d'", ', b=""', ")", ", f (", ")", "]"):
        events = parser.add(piece)
        texts.append("".join(event.text for event in events if not isinstance(event, CallBegins)))
    assert texts == ["Hm", *[""] * 7, '{"a": "ab)c\'d", "b": ""}', "", "{}", ""]
    assert parser.has_whole_calls and parser.add(END) == []


def test_text_that_cannot_become_a_call_is_not_held_back():
    for text in (f"{BEGIN}[f is", f"{BEGIN}[{'f' * 500}", f"{BEGIN}[g(", f"{BEGIN}[f(5)", f"{BEGIN}[é"):
        assert AnswerParser(SYNTAX).add(text)
    for text in (f"{BEGIN}[f (", f"{BEGIN}[f( a", f"{BEGIN} [ "):
        assert AnswerParser(SYNTAX).add(text) == []


def test_a_call_that_has_just_begun_is_dropped_if_the_answer_is_cut_off():
    """The arguments of another are content."""
    for text, said in ((f"Hm. {BEGIN}[get_we", ["Hm. "]), (f"{BEGIN}[f(a=1", [f"{BEGIN}[f(a=1"])):
        parser = AnswerParser(SYNTAX)
        assert [event.text for event in [*parser.add(text), *parser.end(is_cut=True)]] == said


def test_a_long_hostile_answer_is_parsed_in_time():
    """Neither its depth nor its length matters."""
    starts = (BEGIN, f"{BEGIN}[f(", f"{BEGIN}[", f"{BEGIN}f(a", f"{BEGIN}f(a=x) ", f"{BEGIN}f(a='{END}")
    parts = [
        "x", "(", "x+", "'", "' ", "'\"", "r'", "{x", "{'", "<|tool_call_", "(1,", "\\", "**", "1", ",a=", "'''", "\n",
    ]  # fmt: skip
    texts = [text * 2_000 for text in starts]
    texts += [f"{BEGIN}[f(a={part * 20_000} x{end}" for part in parts for end in ("", ")].", f"'''){END}")]
    for text in texts:
        pieces = [text[at : at + 99] for at in range(0, len(text), 99)]
        assert "".join(event[2] for event in events_of(SYNTAX, pieces)) == text


# ---------------------------------------------------------------- templates, requests and responses


@pytest.mark.parametrize("name", ["lfm2", "lfm2.5", "lfm2.5-calls"])
def test_prompts_of_later_turns_have_what_the_model_has_written(served, name):
    """The next turn's prompt begins with the tokens of the first one and the answer's text. The arguments reach
    clients as JSON, whole and streamed."""
    model = served(name)
    body = REQUEST | {"tools": [function("f"), function("get_weather")]}
    first = model.chat.read_conversation(ChatBody.read(body)).text
    text = f"{BEGIN}[f(a=\"x = 'y'\", b=[True, None]), get_weather()]{END}"
    choice = answered(model, body, list(text))
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert found == [("f", '{"a": "x = \'y\'", "b": [true, null]}'), ("get_weather", "{}")]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "It rains."} for call in calls]
    messages = [QUESTION, choice["message"], *results]
    second = model.chat.read_conversation(ChatBody.read(body | {"messages": messages})).text
    assert second.startswith(first + text) and second.count("It rains.") == 2


# ---------------------------------------------------------------- grammars

NODE = an_object("v", v={"type": "boolean"}, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})
INT = {"type": "integer"}


@pytest.mark.parametrize("schema, fitting, others", [
    (an_object(), [""], ["a=1", " ", ","]),
    (an_object("a", "b", a={}, b={}), ['a=1, b="x"', "a=True, b=None"], ["", "b=1, a=1", "a=1,b=1", "a=1, b=1,"]),
    (an_object("b", a={}, b={}, c={}), ["b=1", "a=1, b=1", "b=1, c=2", "a=1, b=1, c=2"], ["a=1, c=2", "b=1, d=1"]),
    (an_object(a=INT, b=INT, c=INT), ["", "a=1", "b=1", "c=1", "a=1, c=1", "b=1, c=1"], ["c=1, a=1", ", a=1"]),
    (an_object(a={"type": "string"}), ['a="x\\"y"', 'a=""', 'a="é"', r'a="\t\n"'], ["a=x", "a=5", "a='x'"]),
    (an_object(a={"type": "string", "pattern": "^b+$"}), ['a="bb"'], ['a="c"', 'a=""']),
    (an_object(a={"enum": ["b", "bc", 1, 12, True, None, "it's", [1]]}),
     ['a="b"', "a=1", "a=12", "a=true", "a=null", 'a="it\'s"', "a=[1]"], ["a=b", 'a="c"', "a=2", "a=False"]),
    (an_object(a={"type": ["string", "null"], "enum": ["b", None, 5]}), ['a="b"', "a=null"], ["a=5"]),
    (an_object(a={"type": ["integer", "null"], "minimum": 3}), ["a=3", "a=null"], ["a=2", 'a="3"']),
    (an_object(a={"minimum": 3}), ["a=3", 'a="x"', "a=true", "a=[null]"], ["a=2"]),
    (an_object(a={"type": "boolean", "title": "A"}), ["a=True", "a=False", "a=true"], ["a=1", "a=TRUE", "a=None"]),
    (an_object(a={"type": ["null", "array"]}), ["a=None", "a=null", "a=[true]"], ["a=True", "a=[True]"]),
    (an_object(a={"anyOf": [INT | {"minimum": 3}, {"type": "null"}], "default": None}), ["a=None", "a=3"], ["a=2"]),
    (an_object(a={"anyOf": [{"const": True}, INT]}), ["a=true", "a=3"], ["a=True", "a=False", "a=false"]),
    (an_object(a=an_object("x", x={"type": "null"}, y=INT)), ['a={"x": null, "y": 1}'], ["a={}", "a={x: 1}"]),
    (an_object(a={"$ref": "#/$defs/n"}) | {"$defs": {"n": NODE}},
     ['a={"v": true, "next": {"v": false, "next": null}}'], ["a={}", 'a={"v": true, "next": {"v": null}}']),
    (an_object(a=INT, b={"$ref": "#/properties/a"}, c={"items": {"$ref": "#"}, "type": "array"}),
     ["a=1, b=2", 'c=[{"b": 1, "c": []}]'], ["b=[]", 'c=[{"b": null}]', "c=[[]]"]),
    (an_object("from", **{"from": INT, "d-e": INT, "f g": INT}), ["from=5, d-e=1", "from=2, f g=1"], ["d-e=1"]),
    ({"properties": {"a": INT}, "required": ["z"]}, ["a=1, z=[1]", 'z=None, b_c="x"'], ["", "a=1", 'z=1, a=""']),
    ({"additionalProperties": INT}, ["", "a=1, b=2"], ['a="x"', "a-b=1"]),
    ({"$ref": "#/$defs/b", "$defs": {"b": an_object("a", a={"const": "b"})}}, ['a="b"'], ["", 'a="c"']),
    ({"properties": {"a": False}}, ["", "b=1"], ["a=1"]),
])  # fmt: skip
def test_arguments_that_fit_their_grammar(served, compiler, schema, fitting, others):
    """What fits is read as arguments that fit the schema. More text never fits."""
    model = served("lfm2")
    source = source_of(model, "lfm2", [Tool("f", schema, strict=True), Tool("g", {})])
    for arguments in fitting + others:
        text = f"{BEGIN}[f({arguments})]{END}"
        assert fits(model, compiler, source, text) == (arguments in fitting), text
        if arguments in fitting:
            jsonschema.Draft202012Validator(schema).validate(json.loads(arguments_of(arguments)))
    called = f"f({fitting[0]})"
    assert fits(model, compiler, source, f"{BEGIN}[{called}, g(), {called}]{END}")
    assert not fits(model, compiler, source, f"{BEGIN}[{called},{called}]{END}")


def test_random_tokens_that_the_masks_allow_are_calls_that_validate(served):
    """The tokens are drawn at random from those that the grammar of a tool allows, and parsed as an answer."""
    chance = random.Random(11)
    model = served("lfm2")
    found = set()
    for _ in range(30):
        keys = chance.sample(["f", "ab", "b-c", "x.y", "from", "a b"], 3)
        properties = {key: random_schema(chance, 2) for key in keys}
        schema = an_object(*keys[: chance.randrange(4)], **properties)
        text = random_text(model, source_of(model, "lfm2", [Tool("f", schema, strict=True)]), chance)
        events = events_of(SYNTAX, [text])
        arguments = [json.loads(event[2]) for event in events if event[0] is CallArguments]
        assert len(events) == 2 * len(arguments), text  # nothing but calls
        for one in arguments:
            assert jsonschema.Draft202012Validator(schema).is_valid(one), (schema, text)
            found |= {type(value) for value in one.values()}
    assert {str, int, float, bool, type(None), list, dict} <= found


@pytest.mark.parametrize("key", ["a=b", 'q"', " a", "a ", "", "(", "*", "x" * 203])
def test_a_schema_with_a_name_that_cannot_be_written_is_refused(served, key):
    for tool in (function("f", an_object(**{key: {}}), strict=True), function("f", {"required": [key]})):
        body = REQUEST | {"tools": [tool], "tool_choice": "required"}
        with pytest.raises(ApiError, match=r"^tools: a schema is not supported: tools\[0\].*\.properties\[") as caught:
            served("lfm2.5").parse_chat(body)
        assert (caught.value.status, caught.value.param) == (400, "tools")
