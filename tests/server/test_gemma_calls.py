"""Gemma 4: calls in its own notation, thoughts in channels, and the grammars that calls fit.

The oracles are the model's template, which writes what is parsed again, and jsonschema for what the masks let through.
"""

import json
import random

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schemas import random_schema
from scripted import ScriptedEngine, app_settings
from scripted import events_of as events_in
from servers import KEY
from starlette.testclient import TestClient

# isort: off
from test_parameters import random_text
from test_tools import BESIDE, GEMMA_MARKS, MARKS, NAMES, QUESTION, REQUEST, SOURCES, STRANGE, TOOLS, an_object
from test_tools import answered, check_any_cut, content, cut, events_of, fits, function, source_of
from test_tools import compiler as compiler, files as files, served as served  # fixtures
# isort: on

from server import http_server
from server.answers import AnswerParser, AnswerSyntax, CallArguments, CallBegins, Reasoning
from server.gemma_calls import QUOTE, GemmaReader, gemma_text
from server.openai_requests import ChatBody
from server.request_fields import ApiError
from server.tools import GEMMA, Tool
from text.chat_template import CHANNEL_MARKS
from text.tokenizer import Tokenizer

BEGIN, END = GEMMA.prefix, GEMMA.suffix
SYNTAX = AnswerSyntax(CHANNEL_MARKS, tools=GEMMA, names=frozenset(NAMES))
PLACES = st.lists(st.integers(0, 300), max_size=12)


def json_of(text: str, pieces: list[str] | None = None) -> str:
    """The JSON that the reader makes of arguments, which are read to their end."""
    reader = GemmaReader((END,))
    held = ""
    for piece in pieces or [text]:
        held += piece
        held = held[reader.read(held, 0, False)[0] :]
    assert (reader.is_complete, held) == (True, ""), (text, held)
    return reader.text


# ---------------------------------------------------------------- the notation

HOSTILE = st.lists(st.sampled_from([*MARKS, *STRANGE, *GEMMA_MARKS, '<|"', '|">', ",", ":", "}", "<", "'"]), max_size=5)
TEXTS = (st.text(max_size=8) | HOSTILE.map("".join)).filter(lambda text: QUOTE not in text)
TEXTS = TEXTS.filter(lambda text: not text.endswith(("<", "<|", '<|"')))  # whose end may not be told from the mark
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
TEXT = BESIDE.filter(lambda text: not any(mark in text for mark in GEMMA_MARKS))


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS, PLACES)
def test_what_is_written_is_read_as_the_same(arguments, places):
    text = gemma_text(arguments)
    found = json_of(text)
    assert found == json_of(text, list(text)) == json_of(text, cut(text, places))
    assert json.dumps(json.loads(found)) == json.dumps(arguments)  # in which 1 and true are not equal, nor orders


@settings(max_examples=60, deadline=None)
@given(CALLS, TEXT, TEXT, st.none() | TEXT.filter(str.strip), PLACES)
def test_calls_beside_text_and_thoughts(calls, before, after, thoughts, places):
    text = before + GEMMA.write([(name, json.dumps(arguments)) for name, arguments in calls]) + after
    if thoughts is not None:
        text = f"{CHANNEL_MARKS[0]}\n{thoughts}\n{CHANNEL_MARKS[1]}{text}"
    found = events_of(SYNTAX, [text])
    assert found == events_of(SYNTAX, cut(text, places)) == events_of(SYNTAX, list(text))
    names = [event[2] for event in found if event[0] is CallBegins]
    arguments = [json.loads(event[2]) for event in found if event[0] is CallArguments]
    assert json.dumps(list(zip(names, arguments))) == json.dumps(calls)
    assert "".join(event[2] for event in found if event[0] is Reasoning).strip() == (thoughts or "").strip()
    said = "".join(event[2] for event in found if event[0] not in (CallBegins, CallArguments, Reasoning))
    assert "".join(said.split()) == "".join((before + after).split())


@pytest.mark.parametrize("text, expected", [
    ('{a:<|"|>x<|"|>,b:[1,-2.5e+3,true,false,null],c:{d:{},e:[]}}',
     {"a": "x", "b": [1, -2500.0, True, False, None], "c": {"d": {}, "e": []}}),
    ('{ a : 1 ,\n b : [ <|"|>x<|"|> , {  } , ] , }', {"a": 1, "b": ["x", {}]}),  # spaces, commas before brackets
    ("{a:None,b:[True,False]}", {"a": None, "b": [True, False]}),  # as templates write them
    ('{<|"|>a<|"|>:1,<|"|>b:,{}<|"|>:{<|"|><|"|>:2}}', {"a": 1, "b:,{}": {"": 2}}),  # keys between marks
    ("{first name:1,größe:2,a-b.c:3,$x:4,true:5,6:7,\\:8}",
     {"first name": 1, "größe": 2, "a-b.c": 3, "$x": 4, "true": 5, "6": 7, "\\": 8}),
    ('{a:<|"|>"{}[]:,\\\n\x01 <|tool_call>call:f{} <tool_call|> <| é\u2028<|"|>}',
     {"a": '"{}[]:,\\\n\x01 <|tool_call>call:f{} <tool_call|> <| é\u2028'}),
    # Strings without the first mark:
    ('{a:weather in Tokyo<|"|>,b:[x<|"|>, 1<|"|> ]}', {"a": "weather in Tokyo", "b": ["x", "1"]}),
])  # fmt: skip
def test_what_models_may_write(text, expected):
    assert json.loads(json_of(text)) == json.loads(json_of(text, list(text))) == expected


@pytest.mark.parametrize("text", [
    "{a:Paris}", '{a:"x"}', "{a:'x'}", '{a:"None"}', "{a:1 b:2}", "{a}", "{a:}", "{:1}", "{a:01}", "{a:+1}", "{a:NaN}",
    "{a:Infinity}", "{a:[b:1]}", '{a:<|"|>x<|"|><|"|>y<|"|>}', "{a:1,,b:2}", "{a:<}", "{a:TRUE}", "{a::1}",
    "{a" + " " * 101 + ":1}", "{" + "a" * 201 + ":1}", '{a:{b:<|"|>c<|"|>d}}', '{a:\\"x\\"}',
])  # fmt: skip
def test_a_malformed_call_is_content(text):
    """The next one is read. A streamed one has begun before it is known that it is malformed."""
    parser = AnswerParser(SYNTAX, is_streamed=False)
    events = parser.add(f"{BEGIN}f{text}{END}{BEGIN}f{{a:1}}{END}.") + parser.end()
    assert [event.text for event in events if isinstance(event, CallArguments)] == ['{"a":1}']
    said = "".join(event.text for event in events if not isinstance(event, CallBegins | CallArguments))
    assert said == f"{BEGIN}f{text}{END}."


CALL = [(CallBegins, 0, "f"), (CallArguments, 0, '{"a":1}')]
SECOND = [(CallBegins, 1, "get_weather"), (CallArguments, 1, "{}")]
F = f"{BEGIN}f{{a:1}}{END}"


def thought(text: str) -> tuple:
    return Reasoning, None, text


@pytest.mark.parametrize("text, expected", [
    (f"Sure.{F}{BEGIN}get_weather{{}}{END}", [content("Sure."), *CALL, *SECOND]),
    (f"{F}\n{BEGIN}get_weather {{}}{END}", CALL + SECOND),
    ('{"name": "f", "arguments": {"a": 1}}', [CALL[0], (CallArguments, 0, '{"a": 1}')]),
    (f"<|channel>thought\nHm.\n<channel|>Yes.{F}", [thought("\nHm.\n"), content("Yes."), *CALL]),
    (f"<|channel>thought\n<channel|>{F}", CALL),
    ("Yes.<|channel>thought\n<channel|>", [content("Yes.")]),  # empty thoughts at the end
    (f"Yes.<|channel>thought\nHm.<channel|>No.{F}", [content("Yes."), thought("\nHm."), content("No."), *CALL]),
    (f"{F}<|channel>thought\nHm.<channel|>{BEGIN}get_weather{{}}{END}", [*CALL, thought("\nHm."), *SECOND]),
    (f"<|channel>thought\nI call {F}", [thought("\nI call "), *CALL]),  # thoughts that are not closed
    (f"{F}<|channel>thought\nAlso {BEGIN}get_weather{{}}{END}", [*CALL, thought("\nAlso "), *SECOND]),
    (f"Yes.<channel|>{F}<channel|>", [content("Yes."), *CALL]),  # marks that end no thoughts
    *((text, [content(text)]) for text in (f"{BEGIN}g{{a:1}}{END}", "<|tool_call>f{}", f"{BEGIN}f", BEGIN, "call:f{}")),
    (f'{BEGIN}f{{a:<|"|>x', [CALL[0], (CallArguments, 0, '{"a":"x')]),  # cut off
    (f"{BEGIN}f{{a:1{END}", [CALL[0], (CallArguments, 0, '{"a":1')]),
])  # fmt: skip
def test_what_is_read_of_answers(text, expected):
    assert events_of(SYNTAX, [text]) == events_of(SYNTAX, list(text)) == expected


PARTS = [
    BEGIN, END, "f{", "f", "{", "}", "[", "]", "g{a:1}", "f{a:1}", "f{}", "a:", "a : ", "b", ":", ",", ", ", "1",
    "-1.5", "true", "None", "x", 'x<|"|>', QUOTE, '<|"|>x<|"|>', '<|"', '"', "'", "\\", "\n", " ", "é", "<",
    "<|channel>thought", "<|channel>thought\n<channel|>", "<channel|>", "<|tool_", "<tool_call",
    '{"name": "f", "arguments": {}}', "\x01",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=14), PLACES, st.sampled_from([None, 1]), st.booleans(), st.booleans())
def test_any_cut_of_any_answer_gives_the_same_events(parts, places, most, bare, begun):
    text = (f"{BEGIN}f{{" if begun else "") + "".join(parts)
    check_any_cut(AnswerSyntax(None, False, GEMMA, frozenset(NAMES), most, bare), text, places)
    syntax = AnswerSyntax(CHANNEL_MARKS, False, GEMMA, frozenset(NAMES), most, bare)
    assert events_of(syntax, [text]) == events_of(syntax, list(text)) == events_of(syntax, cut(text, places))


def test_arguments_are_streamed():
    """A piece waits only while it may become a mark, or while it is not known whether a word is a key."""
    parser = AnswerParser(SYNTAX)
    texts = []
    pieces = ["Hm", BEGIN, "f", "{", "pa", "th", ":", '<|"', '|>li"ne\n', "two <", "b> <|", '"|>', ",n", ":1", "2", "}"]
    for piece in pieces:
        events = parser.add(piece)
        texts.append("".join(event.text for event in events if not isinstance(event, CallBegins)))
    read = ["", "", '"path":', "", '"li\\"ne\\n', "two ", "<b> ", '"', ",", '"n":', "", "12}"]
    assert texts == ["Hm", "", "", "{", *read]
    assert parser.has_whole_calls and parser.add(END) == []


def test_a_long_hostile_answer_is_parsed_in_time():
    parts = ["x", "{", "[", ":", ",", "<", '"', '<|"', " ", "a ", "a:", "a,", QUOTE, BEGIN, "<|channel>thought"]
    for start in (BEGIN, f"{BEGIN}f{{", f'{BEGIN}f{{a:<|"|>'):
        for part in parts:
            text = start + part * 20_000
            events_of(SYNTAX, [text[at : at + 99] for at in range(0, len(text), 99)])


# ---------------------------------------------------------------- prompts


def prompt(model, messages: list[dict], **fields) -> str:
    return model.chat.read_conversation(ChatBody.read(REQUEST | fields | {"messages": messages})).text


ANSWERS = st.tuples(st.sampled_from(["", "Let me look.\n\n", "Ä <b> {x}, $1 \\1 "]), CALLS)


@settings(max_examples=40, deadline=None)
@given(st.lists(ANSWERS, min_size=1, max_size=3), st.booleans())
def test_prompts_of_later_turns_have_what_the_model_has_written(served, answers, thinks):
    """Also the text before the calls, in which the template would put the results. The model goes on after them."""
    model = served("gemma-4")
    body = {"tools": [function(name) for name in NAMES], "enable_thinking": thinks}
    messages = [QUESTION]
    text = prompt(model, messages, **body)
    assert text.endswith("<|turn>model\n" + "<|channel>thought\n<channel|>" * (not thinks))
    text = text.removesuffix("<|channel>thought\n<channel|>")  # which the template leaves out of later prompts
    for before, calls in answers:
        written = GEMMA.write([(name, json.dumps(arguments)) for name, arguments in calls])
        thoughts = "<|channel>thought\nHm.\n<channel|>" if thinks else ""
        choice = answered(model, body | {"messages": messages}, [f"{thoughts}{before}{written}"])
        assert choice["finish_reason"] == "tool_calls"
        made = choice["message"]["tool_calls"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "It rains."} for call in made]
        messages = [*messages, choice["message"], *results]
        text += thoughts + before + written
        for call in made:
            name = call["function"]["name"]
            text += f'<|tool_response>response:{name}{{value:<|"|>It rains.<|"|>}}<tool_response|>'
        assert prompt(model, messages, **body) == text
    last = {"role": "assistant", "content": "It rains."}
    later = prompt(model, [*messages, last, QUESTION], **body)
    thoughtless = text.replace("<|channel>thought\nHm.\n<channel|>", "")  # thoughts of earlier turns are left out
    assert later.startswith(f"{thoughtless}It rains.<turn|>\n<|turn>user\nHello<turn|>\n<|turn>model\n")


def test_special_tokens(served):
    """An answer ends with the mark before results, too. Only marks of calls and thoughts are shown."""
    model = served("gemma-4")
    special = model.chat.special_tokens
    assert {special["<turn|>"], special["<|tool_response>"]} <= model.chat_eos_ids
    shown = model.parse_chat(REQUEST).choices[0].text_request.shown_ids
    names = {"<|tool_call>", "<tool_call|>", QUOTE, "<|channel>", "<channel|>"}
    assert {name for name in GEMMA_MARKS if special[name] in shown} == names
    assert model.tokenizer.decode(model.chat.thinking_end_ids) == "\n"
    assert model.chat.thinking_end_ids[-1] == special["<channel|>"]


# ---------------------------------------------------------------- all APIs

PIECES = [
    "<|channel>thou",
    "ght\nHm.\n<channel|>Sure.",
    BEGIN,
    "f{x",
    ':1,y:<|"|>b',
    'c<|"|>}',
    END + BEGIN,
    "get_weather{}",
    END,
]
CALLED = [("f", {"x": 1, "y": "bc"}), ("get_weather", {})]


@pytest.fixture(scope="module")
def scripted(checkpoints):
    """(a client of the server, its engine)."""
    engine = ScriptedEngine()
    engine.updates = [{"text": piece} for piece in PIECES]
    engine.updates[-1] |= {"finish_reason": "stop"}
    app = http_server.make_app(app_settings(checkpoints[None], SOURCES["gemma-4"]), engine, "127.0.0.1")
    return TestClient(app, headers={"authorization": f"Bearer {KEY}"}), engine


def prompt_of(engine, tokenizer) -> str:
    return tokenizer.decode(engine.completion.choices[0].request.prompt)


def test_all_apis(checkpoints, scripted):
    """Each has the thoughts, the text and the calls, whole and streamed. What it has written, sent back with results,
    is in the next prompt."""
    client, engine = scripted
    tokenizer = Tokenizer(checkpoints[None])
    functions = [{"name": tool.name, "parameters": tool.schema} for tool in TOOLS]
    nested = [{"type": "function", "function": one} for one in functions]
    flat = [{"type": "function"} | one for one in functions]
    anthropic = [{"name": tool.name, "input_schema": {"type": "object"} | tool.schema} for tool in TOOLS]
    thinking = {"type": "enabled"}

    body = {"messages": [QUESTION], "tools": nested, "enable_thinking": True}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Rain."} for call in message["tool_calls"]]
    client.post("/v1/chat/completions", json=body | {"messages": [QUESTION, message, *results]})
    prompts = [prompt_of(engine, tokenizer)]
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert (message["reasoning_content"].strip(), message["content"], found) == ("Hm.", "Sure.", CALLED)

    body = {"input": [QUESTION], "tools": flat, "chat_template_kwargs": {"enable_thinking": True}}
    items = client.post("/v1/responses", json=body).json()["output"]
    streamed = events_in(client.post("/v1/responses", json=body | {"stream": True}))[-1]["response"]["output"]
    for output in (items, streamed):
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
        assert [(item["name"], json.loads(item["arguments"])) for item in output[2:]] == CALLED
        assert output[1]["content"][0]["text"] == "Sure." and output[0]["content"][0]["text"].strip() == "Hm."
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."} for item in items[2:]]
    client.post("/v1/responses", json=body | {"input": [QUESTION, *items, *results]})
    prompts.append(prompt_of(engine, tokenizer))

    body = {"messages": [QUESTION], "tools": anthropic, "thinking": thinking, "max_tokens": 50}
    blocks = client.post("/v1/messages", json=body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(block["name"], block["input"]) for block in blocks[2:]] == CALLED and blocks[1]["text"] == "Sure."
    events = events_in(client.post("/v1/messages", json=body | {"stream": True}))
    parts = [
        event["delta"]["partial_json"] for event in events if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert json.loads("[" + "".join(parts).replace("}{", "},{") + "]") == [arguments for _, arguments in CALLED]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "Rain."} for block in blocks[2:]]
    turns = [QUESTION, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    client.post("/v1/messages", json=body | {"messages": turns})
    prompts.append(prompt_of(engine, tokenizer))

    answered = '<|tool_response>response:f{value:<|"|>Rain.<|"|>}<tool_response|>'
    answered += '<|tool_response>response:get_weather{value:<|"|>Rain.<|"|>}<tool_response|>'
    for text in prompts:
        assert text.endswith(f"<|turn>model\n{''.join(PIECES)}{answered}")


# ---------------------------------------------------------------- grammars

NODE = an_object("v", v={"type": "boolean"}, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})
INT = {"type": "integer"}


@pytest.mark.parametrize("schema, fitting, others", [
    (an_object("b", b=INT, A=INT, c=INT), ["{b:1}", "{A:1,b:2,c:3}", "{b:1,c:2}"],
     ["{}", "{b:1,A:2}", "{b:1,}", "{ b:1}"]),
    (an_object(a={"type": "string"}), ['{a:<|"|>"x\\\n<tool_call> é<|"|>}', '{a:<|"|><|"|>}'],
     ['{a:"x"}', "{a:x}", '{a:<|"|>x}', '{a:<|"|>x<|"|>y<|"|>}', '{a:<|"|><tool_call|><|"|>}']),
    (an_object(a={"type": "string", "pattern": "^b+$"}), ['{a:<|"|>bb<|"|>}'], ['{a:<|"|>c<|"|>}', '{a:<|"|><|"|>}']),
    (an_object(a={"type": "string", "minLength": 2, "maxLength": 3}), ['{a:<|"|>äbc<|"|>}'],
     ['{a:<|"|>a<|"|>}', '{a:<|"|>abcd<|"|>}']),
    (an_object(a={"enum": ["b", "b,c", 1, 12, True, None, [1, {"k": "}"}]]}),
     ['{a:<|"|>b<|"|>}', '{a:<|"|>b,c<|"|>}', "{a:1}", "{a:12}", "{a:true}", "{a:null}", '{a:[1,{k:<|"|>}<|"|>}]}'],
     ["{a:b}", '{a:<|"|>c<|"|>}', "{a:2}", "{a:false}", "{a:[1]}"]),
    (an_object(a={"type": ["integer", "null"], "minimum": 3}), ["{a:3}", "{a:null}"], ["{a:2}", "{a:3.5}", "{a:None}"]),
    (an_object(a={"minimum": 3}), ["{a:3}", '{a:<|"|>x<|"|>}', "{a:true}", "{a:[null,{b:{}}]}"], ["{a:2}"]),
    (an_object(a={"type": "array", "items": INT, "minItems": 1, "maxItems": 2}), ["{a:[1]}", "{a:[1,2]}"],
     ["{a:[]}", "{a:[1,2,3]}", "{a:[null]}", "{a:[1,]}"]),
    (an_object(a={"type": "array", "maxItems": 0}), ["{a:[]}"], ["{a:[1]}"]),
    (an_object(a={"type": "array", "maxItems": 1}), ["{a:[]}", "{a:[{}]}"], ["{a:[1,2]}"]),
    (an_object(a=an_object("x", x={"type": "null"}, y=INT)), ["{a:{x:null,y:1}}"], ["{a:{}}", "{a:{y:1,x:null}}"]),
    (an_object(a={"anyOf": [INT | {"minimum": 3}, {"const": "x"}], "title": "A"}), ["{a:3}", '{a:<|"|>x<|"|>}'],
     ["{a:2}"]),
    (an_object(a={"type": "object", "allOf": [{"properties": {key: INT}, "required": [key]} for key in "xy"]}),
     ["{a:{x:1,y:2}}", "{a:{x:1,y:2,z:[]}}"], ["{a:{x:1}}", "{a:{y:1}}", "{a:{x:1,y:[]}}"]),
    (an_object(a={"$ref": "#/$defs/n"}) | {"$defs": {"n": NODE}}, ["{a:{next:{next:null,v:false},v:true}}"],
     ["{a:{}}", "{a:{next:{v:null},v:true}}"]),
    (an_object(a=INT, b={"$ref": "#/properties/a"}, c={"items": {"$ref": "#"}, "type": "array"}),
     ["{a:1,b:2}", "{c:[{b:1,c:[]}]}"], ["{b:[]}", "{c:[{b:null}]}", "{c:[[]]}"]),
    (an_object("d:e", **{"d:e": INT, "f g": INT, "": INT, "true": INT}),
     ['{<|"|>d:e<|"|>:5}', '{<|"|><|"|>:1,<|"|>d:e<|"|>:1,f g:2,true:3}'], ["{d:e:5}", '{<|"|>f g<|"|>:5}']),
    ({"properties": {"a": INT}, "required": ["z"]}, ["{a:1,z:[1]}", '{z:null,z_c:<|"|>x<|"|>}'],
     ["{a:1}", "{z:1,a:{}}"]),
    ({"additionalProperties": INT}, ["{}", "{a:1,b:2}"], ['{a:<|"|>x<|"|>}', "{a}"]),
    ({"$ref": "#/$defs/b", "$defs": {"b": an_object("a", a={"const": "b"})}}, ['{a:<|"|>b<|"|>}'],
     ["{}", '{a:<|"|>c<|"|>}']),
    ({"properties": {"a": False}}, ["{}", "{b:1}"], ["{a:1}"]),
    (NODE | {"properties": NODE["properties"] | {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
     ["{next:{next:null,v:true},v:true}"], ["{next:{},v:true}"]),
])  # fmt: skip
def test_arguments_that_fit_their_grammar(served, compiler, schema, fitting, others):
    """What fits is read as arguments that fit the schema. More text never fits."""
    model = served("gemma-4")
    source = source_of(model, "gemma-4", [Tool("f", schema, strict=True), Tool("g", {})])
    for arguments in fitting + others:
        text = f"{BEGIN}f{arguments}{END}"
        assert fits(model, compiler, source, text) == (arguments in fitting), text
        if arguments in fitting:
            jsonschema.Draft202012Validator(schema).validate(json.loads(json_of(arguments)))
    called = f"{BEGIN}f{fitting[0]}{END}"
    assert fits(model, compiler, source, f"{called}{BEGIN}g{{}}{END}{called}")
    assert not fits(model, compiler, source, f"{called},{called}")


@settings(max_examples=60, deadline=None)
@given(arguments=st.dictionaries(st.from_regex(r"\A[\w.-]{1,9}\Z"), VALUES, max_size=3))
def test_whatever_is_written_fits_a_schema_that_allows_it(served, compiler, arguments):
    """Except special tokens in a string."""
    model = served("gemma-4")
    assume(not any(name in gemma_text(arguments).replace(QUOTE, "") for name in model.chat.special_tokens))
    schema = an_object(**{key: schema_of(value) for key, value in arguments.items()})
    text = GEMMA.write([("f", json.dumps(in_order(arguments)))])
    assert fits(model, compiler, source_of(model, "gemma-4", [Tool("f", schema, strict=True)]), text), (schema, text)


def schema_of(value) -> dict:
    """The schema of values like this one."""
    if isinstance(value, dict):
        return an_object(*value, **{key: schema_of(one) for key, one in value.items()})
    if isinstance(value, list):
        return {"type": "array", "items": {"anyOf": list(map(schema_of, value))} if value else {}}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names.get(type(value), "null")}


def in_order(value):
    """A value with the keys of objects in the order of the template."""
    if isinstance(value, list):
        return list(map(in_order, value))
    if not isinstance(value, dict):
        return value
    return {key: in_order(one) for key, one in sorted(value.items(), key=lambda item: item[0].lower())}


def test_random_tokens_that_the_masks_allow_are_calls_that_validate(served):
    """The tokens are drawn at random from those that the grammar of a tool allows, and parsed as an answer."""
    chance = random.Random(12)
    model = served("gemma-4")
    found = set()
    for _ in range(30):
        keys = chance.sample(["f", "ab", "b-c", "x.y", "from", "a b", "a:b"], 3)
        properties = {key: random_schema(chance, 2) for key in keys}
        schema = an_object(*keys[: chance.randrange(4)], **properties)
        text = random_text(model, source_of(model, "gemma-4", [Tool("f", schema, strict=True)]), chance)
        events = events_of(SYNTAX, [text])
        arguments = [json.loads(event[2]) for event in events if event[0] is CallArguments]
        assert len(events) == 2 * len(arguments), text  # nothing but calls
        for one in arguments:
            assert jsonschema.Draft202012Validator(schema).is_valid(one), (schema, text)
            found |= {type(value) for value in one.values()}
    assert {str, int, float, bool, type(None), list, dict} <= found


def test_choices_of_tools(served, compiler):
    """A tool that is forced, or required, or strict, after thoughts if the model may think."""
    model = served("gemma-4")
    one, other = f"{BEGIN}f{{x:1}}{END}", f"{BEGIN}get_weather{{}}{END}"
    thoughts = "<|channel>thought\nHm.\n<channel|>"
    strict = {"tools": [function("get_weather"), function("f", TOOLS[1].schema, strict=True)]}
    for body, fitting, others in (
        ({"tool_choice": "required"}, [one, other, one + other], ["", "Hello", f"{BEGIN}f{{}}{END}", "Hello" + one]),
        ({"tool_choice": function("f")}, [one], [other, one + one]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [one, other], [one + other]),
        (strict, ["Hello", "Hello" + one, one + other, "<|tool_ca"], [f"{BEGIN}f{{}}{END}", f"Hello {BEGIN}"]),
    ):
        for thinks in (True, False):
            fields = REQUEST | body | {"enable_thinking": thinks}
            grammar = model.parse_chat(fields).choices[0].text_request.grammar
            for text in fitting + others:
                for before in ("", thoughts):
                    fit = text in fitting and (thinks or not before)
                    assert fits(model, compiler, grammar, before + text) == fit, (body, before + text)


def test_items_that_are_a_list_allow_any_item(served, compiler):
    model = served("gemma-4")
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": [{"type": "string"}]}}}
    grammar = source_of(model, "gemma-4", [Tool("f", schema, strict=True)])
    assert fits(model, compiler, grammar, f'{BEGIN}f{{a:[1,<|"|>x<|"|>]}}{END}')
    assert not fits(model, compiler, grammar, f"{BEGIN}f{{a:1}}{END}")


@pytest.mark.parametrize("depth", [100, 150, 400])
def test_a_schema_that_is_nested_deeply_is_supported_or_refused(served, depth):
    schema = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    try:
        served("gemma-4").parse_chat(REQUEST | {"tools": [function("f", schema)], "tool_choice": "required"})
    except ApiError as error:
        assert (error.status, error.param in ("messages", "tools")) == (400, True)
