"""Tools: formats of calls found from templates, answers parsed in pieces, and grammars that calls must fit.

The oracle of the parser and of the grammars is the template itself: what it writes for an assistant's message with
calls must be parsed as these calls, however the text is cut, and must fit the grammar.
"""

import json
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import transformers
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import served_model
from servers import CONTEXT
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

import server.tools
from checkpoint import read_config
from server.answers import AnswerParser, AnswerSyntax, CallArguments, CallBegins, Content, Reasoning
from server.anthropic import count_tokens, parse_message
from server.api import ServedModel
from server.openai_requests import ChatBody
from server.openai_responses import KeptResponses, parse_response
from server.parameters import ParameterFormat
from server.pipe_messages import Update
from server.request_fields import ApiError
from server.responses import ResponseBuilder
from server.tool_grammars import ToolGrammar
from server.tools import (
    GEMMA,
    GRANITE,
    HERMES,
    LFM2,
    LFM2_MARKS,
    NAME_PATTERN,
    PHI,
    PROBE_ID,
    Tool,
    ToolFormat,
    find_tool_format,
)  # isort: skip  # fmt: skip
from text.chat_template import ChatTemplate
from text.grammar import GrammarTokenizer
from text.tokenizer import Tokenizer, read_tokenizer_files

TEMPLATES = ROOT / "tests" / "data" / "templates"


def read_template(name: str) -> str:
    """The source of a template: a model's, or a small one in the form of a family's."""
    small = TEMPLATES / "small" / f"{name}.jinja"
    return (small if small.exists() else TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def an_object(*required: str, **properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TOOL_SOURCES = {"hermes-3": read_template("hermes-3-tool-use")}
SOURCES = {"hermes-3": read_template("openhermes-2.5")} | {name: read_template(name) for name in (
    "phi-4-mini", "smollm3", "mistral-args", "deepseek", "xml", "glm", "lfm2", "lfm2.5", "lfm2.5-calls", "qwen2.5",
    "qwen3", "qwen3.5", "qwen3-coder", "llama-3.1", "llama-3.2", "mistral-nemo", "granite-3.3", "openhermes-2.5",
    "gemma-2", "gemma-4",
)}  # fmt: skip
QWEN_XML = ToolFormat(
    "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", between="\n", more_openers=("<function=",),
    writes_text=False, parameters=ParameterFormat("<parameter=", ">\n", "\n</parameter>\n"),
)  # fmt: skip
JSON_CALLS = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")
FORMATS = {
    "qwen3.5": QWEN_XML,
    "qwen3-coder": QWEN_XML,
    "xml": replace(QWEN_XML, between="", parameters=ParameterFormat("<parameter=", ">", "</parameter>\n")),
    "glm": ToolFormat(
        "<tool_call>", "\n", "</tool_call>", between="\n", writes_text=False,
        parameters=ParameterFormat("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "gemma-4": GEMMA, "lfm2": LFM2, "lfm2.5": LFM2, "lfm2.5-calls": replace(LFM2, in_content=False, writes_text=False),
    **dict.fromkeys(("hermes-3", "qwen2.5", "qwen3"), JSON_CALLS),
    "phi-4-mini": replace(PHI, tools_in="system"),
    "smollm3": replace(HERMES, tools_in="xml_tools"),
    "granite-3.3": GRANITE,
    "llama-3.1": ToolFormat('{"name": "', '", "parameters": ', "}", more_openers=("<|python_tag|>",)),
    "llama-3.2": ToolFormat('{"name": "', '", "parameters": ', "}"),
    "mistral-nemo": ToolFormat(
        '{"name": "', '", "arguments": ', f', "id": "{PROBE_ID}"}}', begin="[TOOL_CALLS][", between=", ", end="]"
    ),
    "mistral-args": ToolFormat("[TOOL_CALLS]", "[ARGS]", "", between=""),
    "deepseek": ToolFormat(
        "<｜call｜>function<｜sep｜>", "\n```json\n", "\n```<｜/call｜>", "<｜calls｜>", "\n", "<｜/calls｜>",
        null_content=True, text_arguments=True,
    ),
}  # fmt: skip
JSON_FORMATS = [
    name for name, format in FORMATS.items() if not (format.parameters or format.is_python or format.is_gemma)
]
ONE_BY_ONE = [name for name, format in FORMATS.items() if format.parameters is not None]
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>", "<|im_end|>"]
SPECIAL += ["<｜calls｜>", "<｜call｜>", "<｜sep｜>", "<｜/call｜>", "<｜/calls｜>", *LFM2_MARKS]
GEMMA_MARKS = ["<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>', "<|channel>", "<channel|>", "<turn|>"]
NAMES = ["get_weather", "f", "A-b_9"]
POINT = an_object("x", x={"type": "integer"}, y={"$ref": "#/$defs/y"}) | {"$defs": {"y": {"enum": ["ä", "bc"]}}}
TOOLS = [Tool("get_weather", {}), Tool("f", POINT, strict=True), Tool("A-b_9", {})]


@pytest.fixture(scope="module")
def files(checkpoints, tmp_path_factory):
    """The files of the tiny model, whose vocabulary has the special tokens of several families."""
    folder = tmp_path_factory.mktemp("tools")
    library = Library.from_file(str(checkpoints[None] / "tokenizer.json"))
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL + GEMMA_MARKS])
    library.save(str(folder / "tokenizer.json"))
    config = json.loads((checkpoints[None] / "config.json").read_text()) | {"vocab_size": 720}
    (folder / "config.json").write_text(json.dumps(config))
    settings_ = json.loads((checkpoints[None] / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_ | {"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="module")
def served(files):
    """name of a template -> ServedModel."""
    made = {}

    def get(name: str) -> ServedModel:
        if name not in made:
            found = read_tokenizer_files(files)
            found.template, found.tool_template = SOURCES.get(name, name), TOOL_SOURCES.get(name)
            made[name] = ServedModel(read_config(files), found, "tiny", CONTEXT)
        return made[name]

    return get


@pytest.fixture(scope="module")
def compiler(files):
    return GrammarTokenizer(Tokenizer(files), 720, [1])


def test_formats_are_found_from_templates(served, checkpoints):
    """And from the vocabulary, if a template without any mark may be LFM2.5's."""
    assert {name: served(name).chat.tool_format for name in SOURCES if name in FORMATS} == FORMATS
    assert {name: served(name).chat.tool_format for name in SOURCES if name not in FORMATS} == {
        "openhermes-2.5": None, "gemma-2": None,
    }  # fmt: skip
    others = [
        "{{ tools }}",
        "{% for m in messages %}{{ m }}{% endfor %}{{ tools }}",
        "{{ 1 / 0 }}",
        read_template("ids"),
    ]
    for source in others:
        plain = read_tokenizer_files(checkpoints[None])  # whose vocabulary has no marks of calls
        plain.template = source
        assert find_tool_format(ChatTemplate(plain, Tokenizer(checkpoints[None]))) is None
    assert [served(source).chat.tool_format for source in others] == [LFM2, None, None, None]
    thinking = [name for name in SOURCES if served(name).chat.thinking]
    assert thinking == [
        "smollm3",
        "glm",
        "lfm2",
        "lfm2.5",
        "lfm2.5-calls",
        "qwen3",
        "qwen3.5",
        "granite-3.3",
        "gemma-4",
    ]


# ---------------------------------------------------------------- the parser

MARKS = sorted({mark for format in FORMATS.values() for mark in (*format.openers, *format.closers)})
MARKS += ["<think>", "</think>"]
STRANGE = ['"}', "{[", '\\"', "]", "`", "}\n", "\u2028", "\r\n", "<tool_", "\\u0041", "{{ x }}", "']"]
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(MARKS + STRANGE)
TEXTS |= st.lists(TEXTS, max_size=4).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
RANDOM_NAMES = st.from_regex(f"\\A{NAME_PATTERN}\\Z") | st.sampled_from(["name", "tool_call", "-", "n" * 128])
CALLS = st.lists(st.tuples(RANDOM_NAMES, st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=4)
# Text beside calls, in which no other call, end of calls or end of thoughts begins.
BESIDE = st.lists(TEXTS.filter(lambda text: not any(mark in text for mark in MARKS)), max_size=3).map("".join)


def events_of(syntax: AnswerSyntax, pieces: list[str]) -> list:
    """The events of an answer that comes in pieces, without empty text, and with neighbours joined."""
    parser = AnswerParser(syntax)
    return joined([event for piece in pieces for event in parser.add(piece)] + parser.end())


def joined(events: list) -> list:
    """Events as tuples, with neighbours of the same kind joined."""
    found = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, CallBegins):
            found.append((CallBegins, event.index, event.name))
        elif last is not None and last[:-1] == (type(event), getattr(event, "index", None)):
            found[-1] = (*last[:-1], last[-1] + event.text)
        else:
            found.append((type(event), getattr(event, "index", None), event.text))
    assert all(event.text for event in events if not isinstance(event, CallBegins))
    return found


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in zip(ends, ends[1:])]


def rendered_answer(model: ServedModel, content: str, calls: list[tuple]) -> str:
    """What the template writes for an assistant's message, which is not the last, with calls."""
    chat = model.chat
    question = {"role": "user", "content": "Hello"}
    listed = [("call_%d" % i, name, arguments) for i, (name, arguments) in enumerate(calls)]  # noqa: UP031
    message = chat.message_for_template({"role": "assistant", "content": content, "tool_calls": listed})
    plain = {"role": "assistant", "content": "#"}
    template = chat.tool_template
    tools = None if template.source == chat.template.source else []  # a template that is only for tools needs a list
    before, _, after = template.render([question, plain], False, tools).rpartition("#")
    text = template.render([question, message], False, tools)
    assert text.startswith(before) or chat.thinking, (text, before)
    text = text.removeprefix(before)
    for end in (after, "<|eot_id|>", "<|eom_id|>", "</s>", "<|tool_response>"):
        text = text.removesuffix(end)
    return text.rstrip()


@st.composite
def answers_with_calls(draw, model: ServedModel) -> tuple[str, list[tuple], str, str, str]:
    """(an answer with calls as the template of a model writes it, the calls, thoughts, text before, text after)."""
    format = model.chat.tool_format
    calls = draw(CALLS)[: 1 if format.between is None else None]
    thoughts = draw(TEXTS.filter(lambda text: "</think>" not in text)) if model.chat.thinking else ""
    before, after = draw(BESIDE), draw(BESIDE)
    if not format.openers:  # an answer with a call is nothing else
        before = ""
    if after.lstrip().startswith((",", "]", "`")):  # which might belong to the calls
        after = f"x{after}"
    text, only_calls = rendered_answer(model, before, calls), rendered_answer(model, "", calls)
    if before.strip() and (text == only_calls or not text.endswith(only_calls)):  # the template writes one of both
        text = before + "".join(format.more_openers) + only_calls
    if thoughts:
        text = f"<think>\n{thoughts}\n</think>\n\n{text}"
    return text + after, calls, thoughts, before, after


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON_FORMATS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_what_the_template_writes_is_parsed_as_these_calls(served, name, data):
    """The calls are parsed as they were, and written again as the same text; and so is the text beside them."""
    model = served(name)
    text, expected, thoughts, before, after = data.draw(answers_with_calls(model))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    body = {"tools": [function(name) for name in dict.fromkeys(name for name, _ in expected)]}
    messages = []
    for pieces in ([text], cut(text, places), list(text)):
        choice = answered(model, body, pieces)
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
        messages.append(message)
    assert message == messages[0] == messages[1]
    calls = [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]]
    assert json.dumps(calls) == json.dumps(expected)  # in which 1 and true are not equal
    assert rendered_answer(model, "", calls) == rendered_answer(model, "", expected)
    after = "" if model.chat.tool_format.between is None else after  # text after the only call is dropped
    assert without_space(message["content"] or "") == without_space(before + after)
    assert message.get("reasoning_content", "").strip() == thoughts.strip()


PARTS = [  # of which models may make any answer
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "x"}}', "{", "}", "[", "]",
    '{"name": "f", "arguments": {', '{"name": "g", "arguments": {}}', '{"arguments": {"b": [1]}, "name": "f"}', "\n",
    "```json\n", "```", "text", ", ", '"', "\\", "[TOOL_CALLS]", "f", "[ARGS]", "<|tool_call|>", '{"a": 1}', "<", " ",
    '{"function": {"name": "f", "parameters": "{}"}}', '", "arguments": ', "<|python_tag|>", "<｜call｜>", "<tool_",
]  # fmt: skip


TYPES = {"a": frozenset({"string"}), "b": frozenset({"integer"}), "c": frozenset({"string", "null"})}
ONE_BY_ONE_PARTS = [
    "<tool_call>", "\n", "<function=f>", "<function=f>\n<parameter=a>\n", "<function=", "f", "g", ">", "x",
    "<parameter=a>\n", "<parameter=", "a", "b>", "<parameter=b>\n1\n</parameter>\n", "\n</parameter>", "</parameter>",
    "<parameter=c>\nnull\n</parameter>", "</par", "</function>", "</function>\n</tool_call>", "</tool_call>",
    "<tool_call>f\n", "<tool_call>f", "<arg_key>", "<arg_key>a</arg_key>\n<arg_value>", "</arg_key>", "</arg_value>",
    "</arg_value>\n", "<think>", "</think>", '{"name": "f", "arguments": {}}', "{", '"', "\\", " ", "nul", "<",
]  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)), st.data(), st.lists(st.integers(0, 200), max_size=9), st.booleans(),
    st.sampled_from([None, 1]), st.booleans(),
)  # fmt: skip
@pytest.mark.slow
def test_any_cut_of_any_answer_gives_the_same_events(name, data, places, inside, most, bare):
    parts = data.draw(st.lists(st.sampled_from(ONE_BY_ONE_PARTS if name in ONE_BY_ONE else PARTS), max_size=12))
    marks = ("<think>", "</think>")
    syntax = AnswerSyntax(marks, inside, FORMATS[name], frozenset(NAMES), most, bare, {"f": TYPES})
    check_any_cut(syntax, "".join(parts), places)


def check_any_cut(syntax: AnswerSyntax, text: str, places: list[int]):
    """Also of answers that are malformed. Text is neither lost nor invented where there is no call, and the arguments
    of whole calls that are not written in JSON are JSON."""
    events = events_of(syntax, [text])
    assert events == events_of(syntax, cut(text, places)) == events_of(syntax, list(text))
    parser = AnswerParser(syntax)
    parser.add(text)
    parser.end()
    if parser.has_whole_calls and (syntax.tools.parameters or syntax.tools.is_python):
        arguments = [json.loads(event[2]) for event in events if event[0] is CallArguments]
        assert all(isinstance(value, dict) for value in arguments) and len(arguments) == parser.calls
    if parser.calls == 0:
        assert without_marks("".join(event[-1] for event in events)) == without_marks(text)


def without_marks(text: str) -> str:
    return without_space(text.replace("<think>", "").replace("</think>", ""))


def without_space(text: str) -> str:
    return "".join(text.split())


CALL, ARGUMENTS = '{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'
BEGIN, END = (CallBegins, 0, "f"), (CallArguments, 0, ARGUMENTS)
SECOND = [(CallBegins, 1, "f"), (CallArguments, 1, ARGUMENTS)]
HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call>"


def content(text):
    return (Content, None, text)


@pytest.mark.parametrize("name, text, expected", [
    ("qwen2.5", f" Sure.\n{HERMES_CALL}\nDone. ", [content(" Sure.\n"), BEGIN, END, content("\nDone. ")]),
    ("qwen2.5", CALL, [BEGIN, END]),
    ("qwen2.5", f" ```json\n{CALL}\n```\n", [BEGIN, END]),
    ("qwen2.5", f"{CALL} is a call", [content(f"{CALL} is a call")]),
    ("qwen2.5", '{"name": "f"}', [content('{"name": "f"}')]),
    ("qwen2.5", HERMES_CALL.replace('"f"', '"g"'), [content(HERMES_CALL.replace('"f"', '"g"'))]),
    ("qwen2.5", HERMES_CALL.replace("}}", "}"), [BEGIN, END]),  # a brace is missing, as small models write
    ("qwen2.5", f"{HERMES_CALL}x".replace("}}", ""), [BEGIN, (CallArguments, 0, '{"a": 1\n'), content("x")]),
    ("qwen2.5", "<tool_call>\n{'name': f}\n</tool_call>", [content("<tool_call>\n{'name': f}\n</tool_call>")]),
    ("qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": ', [BEGIN, (CallArguments, 0, '{"a": ')]),
    ("qwen2.5", f"<tool_call>{CALL}\n{CALL}</tool_call>", [BEGIN, END, *SECOND]),
    ("qwen2.5", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}', [BEGIN, END]),
    ("qwen2.5", '<tool_call>{"name": "f"}</tool_call>', [BEGIN, (CallArguments, 0, "{}")]),
    ("llama-3.1", f"<|python_tag|>{CALL}; {CALL}", [BEGIN, END]),
    ("llama-3.1", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [BEGIN, END]),
    ("llama-3.1", f"I call {CALL}", [content(f"I call {CALL}")]),
    ("mistral-args", f"[TOOL_CALLS]g[ARGS]{ARGUMENTS}", [content(f"[TOOL_CALLS]g[ARGS]{ARGUMENTS}")]),
    ("mistral-args", "[TOOL_CALLS]" + "f" * 300, [content("[TOOL_CALLS]" + "f" * 300)]),
])  # fmt: skip
def test_what_models_write(name, text, expected):
    format = FORMATS[name]
    syntax = AnswerSyntax(tools=format, names=frozenset(NAMES), max_calls=1 if format.between is None else None)
    assert events_of(syntax, [text]) == events_of(syntax, list(text)) == expected


def test_thoughts_are_told_apart():
    marks = ("<think>", "</think>")
    outside, inside = AnswerSyntax(marks), AnswerSyntax(marks, begins_inside=True)
    for syntax, text, expected in (
        (outside, "<think>\na b\n</think>\n\n c ", [(Reasoning, None, "\na b\n"), content("c ")]),
        (outside, "\n<think>\n\n</think>\n\nc", [content("c")]),
        (outside, " a <think>b</think>", [content(" a <think>b</think>")]),
        (inside, "a</think>", [(Reasoning, None, "a")]),
        (inside, "a </thin", [(Reasoning, None, "a </thin")]),
        (inside, "</think> a", [content("a")]),
        (AnswerSyntax(), "<think>a</think>", [content("<think>a</think>")]),
    ):
        assert events_of(syntax, [text]) == events_of(syntax, list(text)) == expected


def test_plain_text_is_not_held_back():
    parser = AnswerParser(AnswerSyntax())
    assert [parser.add(text) for text in (" ", "<", "{")] == [[Content(" ")], [Content("<")], [Content("{")]]
    parser = AnswerParser(AnswerSyntax(tools=FORMATS["qwen2.5"], names=frozenset(NAMES)))
    assert [parser.add(text) for text in ("a", " b", '{"na')] == [[Content("a")], [Content(" b")], [Content('{"na')]]
    call, arguments = parser.add('\n<tool_call>\n{"name": "f", "arguments": {"a"')[1:]
    assert (call.name, arguments) == ("f", CallArguments(0, '{"a"'))


def test_a_long_hostile_answer_is_parsed_in_time():
    """The parser reads each character a bounded number of times: what looked like a call is not read again."""
    hostile = {"qwen2.5": "<tool_call>{", "mistral-nemo": "[TOOL_CALLS][{", "mistral-args": "[TOOL_CALLS]"}
    hostile |= {"qwen3.5": "<tool_call>\n<function=f>\n<parameter", "qwen3-coder": "<function="}
    for name, text in hostile.items():
        syntax = AnswerSyntax(tools=FORMATS[name], names=frozenset(NAMES))
        answer = text * 5_000
        assert events_of(syntax, [answer]) == [content(answer)]
    deep = "<tool_call>" + '{"a":' * 20_000 + "}" * 20_000
    assert events_of(AnswerSyntax(tools=FORMATS["qwen2.5"], names=frozenset(NAMES)), [deep]) == [content(deep)]


# ---------------------------------------------------------------- grammars


def source_of(model: ServedModel, name: str, tools: list[Tool], several: bool = True, free: bool = False) -> str:
    """The grammar of calls of these tools, or of free text with such calls."""
    grammar = ToolGrammar(FORMATS[name], tools, model.chat.special_tokens, several)
    start = grammar.text_with_calls() if free else grammar.calls()
    return "\n".join([f"start: {start}", r"TEXT: /(.|\n)*/", *grammar.rules])


def fits(model: ServedModel, compiler, source: str, text: str) -> bool:
    """Whether an answer may be this text and then end. Marks that are special tokens are written as such."""
    grammar = compiler.compile(source)
    ids = model.tokenizer.encode(text, add_bos=False)
    return all(grammar.matcher.try_consume_tokens([i]) == 1 for i in ids) and grammar.matcher.is_accepting()


FITTING = [{"x": 1}, {"x": -2, "y": "ä"}]
NOT_FITTING = [{}, {"x": "one"}, {"x": 1, "y": "no"}, {"x": 1, "z": 1}]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("free", [True, False])
def test_calls_fit_their_grammar_if_their_arguments_do(served, compiler, name, several, free):
    """Alone if a call is required, and within any other text if only a tool is strict."""
    model, format = served(name), FORMATS[name]
    source = source_of(model, name, TOOLS, several, free)

    def fit(text: str) -> bool:
        return fits(model, compiler, source, text)

    for arguments in FITTING + NOT_FITTING:
        text = rendered_answer(model, "", [("f", arguments)])
        assert fit(text) == (arguments in FITTING), text
    assert fit(rendered_answer(model, "", [("A-b_9", {"anything": [1]})]))
    for text in ("", "Hello.\n\nI <tool> [1] ä", "\n x"):
        assert fit(text) == free
    is_marked = bool(format.openers) and not format.more_openers
    may_be_several = is_marked if free else format.between is not None
    if not free or is_marked:
        assert not fit(rendered_answer(model, "", [("unknown", {})]))
    both = [("f", FITTING[0]), ("get_weather", {})]
    if may_be_several:
        assert fit(rendered_answer(model, "", both)) == several
    if free and is_marked:
        assert fit("Sure. " + rendered_answer(model, "", both[:1])) and not fit(format.openers[0] + " no call")


# ---------------------------------------------------------------- requests and responses


def function(name, schema=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema or {"type": "object"}} | more}


QUESTION = {"role": "user", "content": "Hello"}
REQUEST = {"messages": [QUESTION], "tools": [function("get_weather"), function("f", POINT)], "max_tokens": 9}


def answered(model: ServedModel, body: dict, pieces: list[str]) -> dict:
    """The response to a request whose answer is text in pieces. It is checked that the stream has the same."""

    reasons = [None] * (len(pieces) - 1) + ["stop"]
    updates = [Update(0, text, i + 1, finish_reason=reason) for i, (text, reason) in enumerate(zip(pieces, reasons))]
    completion = model.parse_chat(REQUEST | body)
    completion.choices[0].updates += updates
    whole = ResponseBuilder(model, completion).whole()["choices"][0]
    streamed = model.parse_chat(REQUEST | body | {"stream": True})
    builder = ResponseBuilder(model, streamed)
    chunks = [chunk for update in updates for chunk in builder.chunks(streamed.choices[0], update)]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    assert parts[0]["delta"]["role"] == "assistant" and not any("role" in part["delta"] for part in parts[1:])
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (part["delta"] for part in parts):
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"].startswith("call_") and call["function"]["arguments"] == ""
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    found = whole["message"]
    assert message == {
        "content": found["content"] or "",
        "reasoning_content": found.get("reasoning_content", ""),
        "tool_calls": [call["function"] for call in found.get("tool_calls", [])],
    }
    return whole


def test_parallel_tool_calls_and_requests_without_tools(served):
    model = served("qwen3")
    only_call = answered(model, {"parallel_tool_calls": False}, list(f"{HERMES_CALL}\n{HERMES_CALL}"))["message"]
    assert only_call["content"] is None and len(only_call["tool_calls"]) == 1
    assert only_call["tool_calls"][0]["type"] == "function"
    for body in ({"tool_choice": "none"}, {"tools": []}):
        plain = answered(model, body, list(HERMES_CALL))
        assert plain["message"] == {"role": "assistant", "content": HERMES_CALL, "refusal": None}
        assert plain["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "mistral-nemo", "deepseek", "lfm2", "inside"])
def test_strict_calls_without_marks_are_calls_if_they_fit(served, name):
    inside = "{% if add_generation_prompt %}<think>{% endif %}"
    model = served(SOURCES["qwen3"] + inside if name == "inside" else name)
    body = {"tools": [function("get_weather"), function("f", POINT, strict=True)]}
    for arguments in FITTING + NOT_FITTING:
        text = json.dumps({"name": "f", "arguments": arguments}, indent=2, ensure_ascii=False)
        thoughts = "Hm.</think>" if name == "inside" else ""
        for answer in (text, f"```json\n{text}\n```"):
            choice = answered(model, body, list(thoughts + answer))
            assert (choice["finish_reason"] == "tool_calls") == (arguments in FITTING), (name, answer)
            assert choice["message"]["content"] == (None if arguments in FITTING else answer)
    for fields in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        text = '{"name": "f", "arguments": {"x": 1}}'
        assert answered(model, body | fields, [thoughts + text])["message"]["content"] == text


@pytest.mark.slow
def test_thoughts_come_before_what_a_grammar_asks_for(served):
    model, calls = served("qwen3"), "<tool_call>\n" + '{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    for body, text, refused in (
        ({"response_format": {"type": "json_object"}}, "{}", "Hello"),
        ({"response_format": {"type": "json_object"}}, calls, calls.replace("1", "null")),
        ({"tool_choice": "required"}, f"{calls}\n{calls}", f"{calls}{calls}"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, calls, f"{calls}\n{calls}"),
        ({"tool_choice": function("f")}, calls, f"{calls}\n{calls}"),
        ({"tool_choice": function("get_weather")}, calls.replace('"f"', '"get_weather"'), calls),
        ({"tools": [function("f", POINT, strict=True)]}, f"Hello {calls}", "<tool_call>Hello"),
    ):
        grammar = model.parse_chat(REQUEST | body).choices[0].text_request.grammar
        compiler = model.grammars.compiler
        thoughts = "<think>\nI <tool> {}\n</think>\n\n"
        assert fits(model, compiler, grammar, text) and fits(model, compiler, grammar, thoughts + text)
        assert not fits(model, compiler, grammar, refused) and not fits(model, compiler, grammar, thoughts + refused)
        over = REQUEST | body | {"chat_template_kwargs": {"enable_thinking": False}}
        grammar = model.parse_chat(over).choices[0].text_request.grammar
        assert fits(model, compiler, grammar, text) and "thoughts" not in grammar
    assert model.parse_chat(REQUEST).choices[0].text_request.grammar is None


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "phi-4-mini"])
def test_prompts_with_and_without_tools_equal_transformers(served, files, name):
    """A second template is used for requests with tools only. transformers takes SmolLM3's tools under another name."""
    model, place = served(name), FORMATS[name].tools_in
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(files / "tokenizer.json"), **names)
    second = {"tool_use": TOOL_SOURCES[name]} if name in TOOL_SOURCES else {}
    oracle.chat_template = {"default": SOURCES[name]} | second
    schema = {"type": "object", "properties": {"x": {"type": "integer", "description": "an x"}}, "required": ["x"]}
    tool = {"name": "f", "description": "Does it.", "parameters": schema}
    tools = [{"type": "function", "function": tool}, {"type": "function", "function": tool | {"name": "g"}}]
    for fields in ({}, {"tools": tools}):
        variables = {place: tools} if fields else {}
        expected = oracle.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False, **variables)
        conversation = model.chat.read_conversation(ChatBody.read({"messages": [QUESTION]} | fields))
        assert conversation.text == expected and ("Does it." in expected) == bool(fields)


def test_special_tokens_of_calls_are_shown(served):
    def shown(name, body):
        model = served(name)
        ids = model.parse_chat(REQUEST | body).choices[0].text_request.shown_ids
        return {token for token, i in model.chat.special_tokens.items() if i in ids}

    assert shown("mistral-nemo", {}) == {"[TOOL_CALLS]"} and shown("mistral-nemo", {"tools": []}) == set()
    assert shown("phi-4-mini", {}) == {"<|tool_call|>", "<|/tool_call|>"}
    assert shown("llama-3.1", {}) == {"<|python_tag|>"} and shown("qwen3", {}) == set()
    assert shown("lfm2", {}) == shown("lfm2.5-calls", {}) == set(LFM2_MARKS) and shown("lfm2", {"tools": []}) == set()


@pytest.mark.parametrize("name", FORMATS)
def test_calls_and_results_in_the_history(served, name):
    """The template writes the calls as the model has, and the results. Ids are those of another server."""
    model = served(name)
    called = {"name": "f", "arguments": '{"x":1}'}
    call = {"id": "call_1", "type": "function", "function": called}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "It rains."}]}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    conversation = model.chat.read_conversation(ChatBody.read(REQUEST | {"messages": messages}))
    if FORMATS[name].parameters is None:
        written = FORMATS[name].write([("f", '{"x": 1}')]).replace(PROBE_ID, model.chat.id_for_template("call_1"))
    else:
        written = rendered_answer(model, "", [("f", {"x": 1})])
    expected, text = without_space(written), conversation.text
    assert expected in without_space(text) and "It rains." in text and "get_weather" in text
    said = [QUESTION, messages[1] | {"content": "Let me look."}, messages[2]]
    text = model.chat.read_conversation(ChatBody.read(REQUEST | {"messages": said})).text
    assert expected in without_space(text)
    by_user = [QUESTION, messages[1] | {"role": "user", "content": "x"}]
    assert refused(model, REQUEST | {"messages": by_user}) == "messages[1].tool_calls"
    for calls, param in (
        (5, ""), ([{"id": "a"}], "[0].function"), ([call | {"id": 5}], "[0].id"),
        ([call | {"function": called | {"name": 'a"\n'}}], "[0].function.name"),
    ):  # fmt: skip
        body = REQUEST | {"messages": [QUESTION, messages[1] | {"tool_calls": calls}, messages[2]]}
        assert refused(model, body) == f"messages[1].tool_calls{param}"
    assert refused(model, REQUEST | {"messages": messages[:2]}) == "messages"


NO_JSON = [
    '{"path": "a.py", "content": "import', "[]", "C:\\Users", '{"a": "x\ny"}', "{'a': 1}", '{"a": 1}{"b": 2}', "{",
    "12", '"{}"', "true", "[" * 10**4, "</tool_call>",
]  # fmt: skip


def with_arguments(*given) -> list[dict]:
    """A conversation with a call for each of these arguments, one after the other."""
    messages = [QUESTION]
    for i, arguments in enumerate(given):
        call = {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": "It fails."})
    return messages


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_that_are_no_object_are_passed_on_as_text(served, name):
    """As the text itself, or as a string of JSON where the template writes arguments as JSON."""
    model = served(name)
    for arguments in NO_JSON:
        text = model.chat.read_conversation(ChatBody.read({"messages": with_arguments(arguments)})).text
        assert arguments in text or json.dumps(arguments, ensure_ascii=False) in text, arguments
        assert "It fails." in text
    for arguments, written in (([], "[]"), ([1, "ä"], '[1, "ä"]'), (5, "5"), (False, "false")):
        text = model.chat.read_conversation(ChatBody.read({"messages": with_arguments(arguments)})).text
        assert written in text or json.dumps(written, ensure_ascii=False) in text, arguments
    empty = model.chat.read_conversation(ChatBody.read({"messages": with_arguments({})})).text
    for arguments in (None, "", "null", "{}"):
        assert model.chat.read_conversation(ChatBody.read({"messages": with_arguments(arguments)})).text == empty


def test_arguments_that_are_nested_too_deeply_to_be_written(served, monkeypatch):
    """Python may read a body that it cannot write again where less of the stack is left."""
    monkeypatch.setattr(server.tools, "json_text", Mock(side_effect=RecursionError))
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        served("deepseek").chat.read_conversation(ChatBody.read({"messages": with_arguments("{}")}))
    assert (caught.value.status, caught.value.param) == (400, "messages")


WALKING = """{% for t in tools or [] %}{{ t.function.name }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{% set arguments = c.function.arguments %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ '{' }}
{%- for key, value in WALK %}{{ ', ' if not loop.first }}"{{ key }}": {{ value | tojson }}{% endfor %}{{ '}}' }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""


@pytest.mark.parametrize("walk", ["arguments.items()", "(arguments.items() if arguments is mapping else [])"])
def test_a_template_that_walks_through_arguments_gets_the_text_as_one(served, walk):
    model = served(WALKING.replace("WALK", walk))
    assert model.chat.tool_format is not None and not model.chat.tool_format.writes_text
    for arguments in NO_JSON:
        text = model.chat.read_conversation(ChatBody.read({"messages": with_arguments(arguments)})).text
        assert f'"arguments": {{"arguments": {json.dumps(arguments, ensure_ascii=False)}}}' in text
    text = model.chat.read_conversation(ChatBody.read({"messages": with_arguments('{"a": 1, "b": "x"}', "", "{")})).text
    assert '"arguments": {"a": 1, "b": "x"}' in text and '"arguments": {}' in text


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(served, compiler):
    """The model sees all tools, so that its prompt stays the same, but may only call those that are allowed."""
    model = served("qwen2.5")
    plain = model.parse_chat(REQUEST).choices[0].text_request
    calls = {name: call_of(name, '{"x": 1}') for name in ("f", "get_weather")}
    for mode, names in (("auto", ["f"]), ("required", ["f"]), ("required", ["f", "get_weather"])):
        completion = model.parse_chat(REQUEST | {"tool_choice": allowed(mode, *names)})
        message = completion.choices[0].text_request
        assert message.request.prompt == plain.request.prompt
        for name, call in calls.items():
            assert fits(model, compiler, message.grammar, call) == (name in names)
            assert fits(model, compiler, message.grammar, f"{call}\n{call}") == (name in names)
        assert fits(model, compiler, message.grammar, "Hello") == (mode == "auto")
    body = {"tool_choice": allowed("auto", "f")}
    assert answered(model, body, list(calls["f"]))["finish_reason"] == "tool_calls"
    assert answered(model, body, list(calls["get_weather"]))["message"]["content"] == calls["get_weather"]
    all_of_them = model.parse_chat(REQUEST | {"tool_choice": allowed("auto", "f", "get_weather")})
    assert all_of_them.choices[0].text_request.grammar is None
    for choice in (
        allowed("auto"), allowed("none", "f"), allowed("auto", "g"), {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}},
        {"type": "allowed_tools", "allowed_tools": ["f"]}, {"type": "custom", "custom": {"name": "f"}},
    ):  # fmt: skip
        assert refused(model, REQUEST | {"tool_choice": choice}).startswith("tool_choice")


def refused(model: ServedModel, body: dict) -> str:
    """The parameter that is named when a request is refused."""
    with pytest.raises(ApiError) as caught:
        model.parse_chat(body)
    assert caught.value.status == 400 and len(str(caught.value)) <= 500
    return caught.value.param


DEEP = json.loads('{"not":' * 140 + "{}" + "}" * 140)


@pytest.mark.parametrize("fields, param", [
    ({"tools": [5]}, "tools[0]"), ({"tools": {}}, "tools"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
    *(({"tools": [function(name)]}, "tools[0].function.name") for name in ('a"b', "", "x" * 129, "é", 5)),
    *(({"tools": [function("f", schema)]}, "tools[0].function.parameters") for schema in (["x"], {"type": "string"})),
    ({"tools": [function("f", description=5)]}, "tools[0].function.description"),
    ({"tools": [function("f", strict=1)]}, "tools[0].function.strict"),
    ({"tools": [function("f")] * 2}, "tools"), ({"tools": [function(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [function("f", DEEP, strict=True)]}, "tools"),
    ({"tools": [function("f", {"properties": {"a": {"type": "x"}}}, strict=True)]}, "tools"),
    ({"tools": [function("f", {"enum": ["x" * 300_000]}, strict=True)]}, "messages"),  # does not fit the context
    ({"tools": [function("f", description="\ud800")]}, "messages"),
    ({"tool_choice": "always"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    *(({"tool_choice": {"type": "function", "function": {"name": name}}}, param)
      for name, param in (("g", "tool_choice"), (["g"], "tool_choice.function.name"))),
    ({"tool_choice": ["auto"]}, "tool_choice"), ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"), ({"functions": [{"name": "f"}]}, "functions"),
])  # fmt: skip
def test_requests_that_are_refused(served, fields, param):
    assert refused(served("qwen2.5"), REQUEST | fields) == param


MAIL = {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"}
OTHER = an_object("a", a=MAIL)


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_tool_with_an_unsupported_pattern(served):
    """It is loosened there alone, and neither loosens nor refuses what another tool has."""
    model = served("qwen2.5")
    compiler = model.grammars.get_compiler("tools")
    exact = POINT | {"properties": {"x": {"type": "string", "pattern": "^a+$"}}}
    tools = [function("f", OTHER), function("A-b_9", exact)]
    strict = [function("f", OTHER), function("A-b_9", exact, strict=True)]
    a_format = {"response_format": {"type": "json_object"}}
    for fields in ({"tools": tools, "tool_choice": "required"}, {"tools": strict}, {"tools": tools} | a_format):
        grammar = model.parse_chat(REQUEST | fields).choices[0].text_request.grammar
        assert fits(model, compiler, grammar, call_of("f", '{"a": "."}'))
        assert fits(model, compiler, grammar, call_of("A-b_9", '{"x": "aa"}'))
        assert not fits(model, compiler, grammar, call_of("A-b_9", '{"x": "b"}'))
        for arguments in ("{}", '{"a": 5}', '{"a": ".", "b": 1}'):
            assert not fits(model, compiler, grammar, call_of("f", arguments)), (fields, arguments)


def test_the_place_in_a_strict_tool_is_named(served):
    model = served("qwen2.5")
    tools = [function("get_weather", OTHER), function("f", OTHER, strict=True)]
    place = re.escape("tools[1].function.parameters.properties.a.pattern: look-around")
    for fields in ({}, {"tool_choice": "required"}, {"tool_choice": function("f")}):
        with pytest.raises(ApiError, match=place) as caught:
            model.parse_chat(REQUEST | {"tools": tools} | fields)
        assert (caught.value.status, caught.value.param) == (400, "tools")
    for fields in ({"tool_choice": "none"}, {"tool_choice": function("get_weather")}):
        model.parse_chat(REQUEST | {"tools": tools} | fields)


def test_a_template_without_tools_refuses_them(served):
    for name in ("openhermes-2.5", "gemma-2"):
        model = served(name)
        assert refused(model, REQUEST) == "tools"
        model.parse_chat(REQUEST | {"tool_choice": "none"})
        result = {"role": "tool", "tool_call_id": "a", "content": "x"}
        assert refused(model, {"messages": [QUESTION, result]}) == "messages[1].role"


# ---------------------------------------------------------------- system messages that templates refuse

SYSTEM = [{"role": role, "content": f"{role} {i} ."} for i, role in enumerate(("system", "developer", "system"))]
USER, ANSWER = {"role": "user", "content": "question one"}, {"role": "assistant", "content": "answer two"}
LAST = {"role": "user", "content": "question three"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"id": "call00001", "type": "function", "function": {
    "name": "f", "arguments": "{}"}}]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "result four"}
CONVERSATIONS = {
    "two at the beginning": [*SYSTEM[:2], USER],
    "later ones": [SYSTEM[0], USER, SYSTEM[1], SYSTEM[2], ANSWER, SYSTEM[2] | {"content": "late"}, LAST],
    "one at the end": [USER, ANSWER, LAST, SYSTEM[0]],
    "nothing else": [SYSTEM[0]],
    "no message of the user": [SYSTEM[0], ANSWER, SYSTEM[1]],
}
WITH_RESULTS = {
    "qwen3.5": {"after compaction": [SYSTEM[0], CALLING, RESULT, SYSTEM[1]]},
    "mistral-nemo": {"after a result": [SYSTEM[0], USER, CALLING, RESULT, SYSTEM[1]]},
}


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3", "llama-3.1", "mistral-nemo", "gemma-2", "smollm3", "r1-distill"])
@pytest.mark.parametrize("with_tools", [False, True])
def test_system_messages_anywhere(checkpoints, name, with_tools):
    """Each text is in the prompt once, in the order of the messages. A template that takes them is not touched."""
    model = served_model(checkpoints[None], SOURCES.get(name) or read_template("deepseek-r1-distill"))
    with_tools = with_tools and model.chat.tool_format is not None
    for case, messages in (CONVERSATIONS | (WITH_RESULTS.get(name, {}) if with_tools else {})).items():
        body = {"messages": messages} | ({"tools": [FIRST_TOOL]} if with_tools else {})
        prompt = model.tokenizer.decode(engine_prompt(model.parse_chat(body)))
        texts = [message["content"] for message in messages if message["content"]]
        assert [prompt.count(text) for text in texts] == [1] * len(texts), case
        places = [prompt.index(text) for text in texts]
        if name in ("qwen3.5", "qwen3"):
            assert places == sorted(places), case
        plain = [message | {"role": message["role"].replace("developer", "system")} for message in messages]
        if not with_tools and name == "qwen3":
            assert prompt == model.tokenizer.decode(model.chat.template.encode_text(model.template.render(plain)))


FIRST_TOOL = function("f", {"type": "object", "properties": {}})


def engine_prompt(completion) -> list[int]:
    return completion.choices[0].request.prompt


def test_system_messages_in_all_apis(checkpoints):
    """Anthropic's and the Responses API, and the count of tokens. What follows an earlier prompt begins with it."""
    model = served_model(checkpoints[None], SOURCES["qwen3.5"])
    turns = [SYSTEM[0], USER, ANSWER, SYSTEM[2], LAST]
    expected = engine_prompt(model.parse_chat({"messages": turns}))
    assert engine_prompt(parse_message(model, {"messages": turns, "max_tokens": 5})) == expected
    assert count_tokens(model, {"messages": turns}) == {"input_tokens": len(expected)}
    turns[3] = turns[3] | {"role": "developer"}
    assert engine_prompt(parse_response(model, KeptResponses(), {"input": turns})) == expected
    later = engine_prompt(model.parse_chat({"messages": [*turns, ANSWER, SYSTEM[0], LAST]}))
    opening = len(model.tokenizer.encode("<|im_start|>assistant\n<think>\n", add_bos=False))
    assert later[: len(expected) - opening - 5] == expected[: -opening - 5]


def test_a_system_message_stays_one_where_users_must_alternate(checkpoints):
    """Only the later one becomes a part of the user's message."""
    source = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    source += "{% endif %}{% if loop.index0 and m.role == loop.previtem.role %}{{ raise_exception('twice') }}"
    model = served_model(checkpoints[None], source + "{% endif %}{{ m.role ~ ': ' ~ m.content ~ '|' }}{% endfor %}")
    prompt = engine_prompt(model.parse_chat({"messages": [SYSTEM[0], USER, SYSTEM[2]]}))
    assert model.tokenizer.decode(prompt) == "system: system 0 .|user: question one\n\nsystem 2 .|"


def test_what_no_variant_mends_is_refused_with_the_first_reason(checkpoints):
    source = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception(m.role ~ ' is bad') }}{% endif %}"
    model = served_model(checkpoints[None], source + "{{ m.content }}{% endfor %}")
    with pytest.raises(ApiError, match="system is bad"):
        model.parse_chat({"messages": [USER, {"role": "system", "content": "bad"}]})


# ---------------------------------------------------------------- calls within thoughts

BAD_CALL = HERMES_CALL.replace("{", "{'").replace("{'", "{", 1)  # its arguments are not JSON
NO_CALL = HERMES_CALL.replace('"f"', '"g"')


@pytest.mark.parametrize("text, expected", [
    (f"I call {HERMES_CALL}", [(Reasoning, None, "I call "), BEGIN, END]),
    (f"<tool_call> or\n{HERMES_CALL}\n{HERMES_CALL}\n", [(Reasoning, None, "<tool_call> or\n"), BEGIN, END, *SECOND]),
    (f"{HERMES_CALL}</think>\n\nok", [(Reasoning, None, HERMES_CALL), content("ok")]),
    (f"a {HERMES_CALL} b</think>{HERMES_CALL}", [(Reasoning, None, f"a {HERMES_CALL} b"), BEGIN, END]),
    (f"{HERMES_CALL} then", [BEGIN, END, (Reasoning, None, " then")]),
    *((text, [(Reasoning, None, text)]) for text in (NO_CALL, HERMES_CALL[:40], "about <tool_call> marks")),
    (f"{BAD_CALL}{HERMES_CALL}", [(Reasoning, None, BAD_CALL), BEGIN, END]),
])  # fmt: skip
@pytest.mark.parametrize("begins_inside", [True, False])
def test_calls_in_thoughts_that_are_not_closed(text, expected, begins_inside):
    """They are calls, for any cutting of the answer; after closed thoughts, or if tokens ran out, they are thoughts."""
    syntax = AnswerSyntax(("<think>", "</think>"), begins_inside, FORMATS["qwen3"], frozenset(NAMES))
    text = text if begins_inside else f"<think>{text}"
    for size in (1, 2, 7, 300, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert events_of(syntax, pieces) == expected
    if "</think>" not in text:
        parser = AnswerParser(syntax)
        cut_off = parser.add(text) + parser.end(is_cut=True)
        assert joined(cut_off) == [(Reasoning, None, text.removeprefix("<think>"))]


def test_the_finish_reason_of_a_call_in_thoughts(checkpoints):
    """Whole and streamed, the answer finishes with tool_calls, and has no content."""
    model = served_model(checkpoints[None], SOURCES["qwen3.5"])
    text = "I look.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        choice = answered(model, {"messages": [USER], "tools": [FIRST_TOOL]}, pieces)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None and choice["message"]["reasoning_content"] == "I look.\n"
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]


# ---------------------------------------------------------------- arguments that are nearly JSON

NEARLY_JSON = [  # what a model writes, and the arguments
    ('{"a": "x\r\n\ty\x01"}', {"a": "x\r\n\ty\x01"}),
    ('{"a": [1, 2, ], "b": {"c": "d",\n},\n}', {"a": [1, 2], "b": {"c": "d"}}),
    (r'{"a": "\d+ \_ \\ \" it\'s \u00e9 \n"}', {"a": "\\d+ \\_ \\ \" it's \u00e9 \n"}),
    ('{"a": "x, }", "b": ",]"}', {"a": "x, }", "b": ",]"}),
    ('{"a": "x\\\ny"}', {"a": "x\ny"}),  # a backslash before a line break
    (r'{"a": "C:\users\u00e9\u12"}', {"a": r"C:\users" + "\u00e9" + r"\u12"}),
]
BROKEN_JSON = [
    '{"a": NaN}', '{"a": [1, -Infinity]}', "{'a': 1}", '{"a": 1 "b": 2}', '{"a": "say "hi""}', '{"a": }',
]  # fmt: skip
CALLS_WITH = {  # the template, and a call with these arguments as its models write it
    "qwen2.5": '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
    "mistral-args": "[TOOL_CALLS]f[ARGS]ARGUMENTS",
    "llama-3.1": '<|python_tag|>{"type": "function", "name": "f", "parameters": ARGUMENTS}',
    "mistral-nemo": '[TOOL_CALLS][{"name": "f", "arguments": ARGUMENTS}]',
}


@pytest.mark.parametrize("name", CALLS_WITH)
@pytest.mark.parametrize("written, arguments", NEARLY_JSON)
def test_arguments_that_are_nearly_json(checkpoints, name, written, arguments):
    """They are JSON for the client, for any cutting of the answer, whole and streamed."""
    model = served_model(checkpoints[None], SOURCES[name])
    text = CALLS_WITH[name].replace("ARGUMENTS", written)
    for pieces in ([text], list(text), [text[i : i + 5] for i in range(0, len(text), 5)]):
        choice = answered(model, {}, pieces)
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == arguments
        assert (call["function"]["name"], choice["finish_reason"]) == ("f", "tool_calls")


def whole_answer(model: ServedModel, text: str) -> dict:
    completion = model.parse_chat(REQUEST)
    completion.choices[0].updates.append(Update(0, text, 9, finish_reason="stop"))
    return ResponseBuilder(model, completion).whole()["choices"][0]


@pytest.mark.parametrize("name", CALLS_WITH)
@pytest.mark.parametrize("written", BROKEN_JSON)
def test_arguments_that_are_no_json(checkpoints, name, written):
    """The answer has content instead of the call, and does not finish with tool_calls."""
    model = served_model(checkpoints[None], SOURCES[name])
    text = CALLS_WITH[name].replace("ARGUMENTS", written)
    choice = whole_answer(model, text)
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    assert written in choice["message"]["content"]


def test_a_broken_call_between_others(checkpoints):
    """The others keep their order, and are numbered anew."""
    model = served_model(checkpoints[None], SOURCES["qwen2.5"])
    call = CALLS_WITH["qwen2.5"]
    text = "".join(call.replace("ARGUMENTS", one) for one in ('{"a": 1}', "{'a': 2}", '{"a": 3,}'))
    choice = whole_answer(model, text)
    message = choice["message"]
    assert [json.loads(one["function"]["arguments"]) for one in message["tool_calls"]] == [{"a": 1}, {"a": 3}]
    assert "{'a': 2}" in message["content"] and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("arguments", ['{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 1500 + "]" * 1500 + "}"])
def test_values_that_are_long_or_deep_are_passed_on(checkpoints, arguments):
    model = served_model(checkpoints[None], SOURCES["qwen2.5"])
    choice = answered(model, {}, [CALLS_WITH["qwen2.5"].replace("ARGUMENTS", arguments)])
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    assert choice["finish_reason"] == "tool_calls"
