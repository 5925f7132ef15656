"""Tools: how a model writes calls of functions.

Read down: Tool, a function that a request offers; ToolFormat, how a model writes calls;
find_tool_format, which finds this out by rendering conversations with the model's chat template.
answers.py has the parser of answers, and tool_grammars.py the grammars of calls.

Every format that is supported writes a call as

    prefix NAME middle ARGUMENTS suffix

where ARGUMENTS is a JSON object, or arguments that are written one by one as parameters.py
describes, or as Python does (python_calls.py), or as Gemma 4 does (gemma_calls.py). `begin` comes
before the first call of an answer, `between` between two calls, and `end` after the last one. For
Qwen3, the prefix is '<tool_call>\\n{"name": "', the middle '", "arguments": ' and the suffix
'}\\n</tool_call>'. For Qwen3.5, they are '<tool_call>\\n<function=', '>\\n' and
'</function>\\n</tool_call>'. For LFM2, they are '', '(' and ')'.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from os.path import commonprefix

from cli import UserError
from server.gemma_calls import QUOTE, gemma_text
from server.parameters import ParameterFormat, spaced_pattern
from server.python_calls import python_arguments
from text.chat_template import THINKING_MARKS, ChatTemplate
from text.tokenizer import Tokenizer

NAME_PATTERN = "[a-zA-Z0-9_-]{1,128}"  # a function's name: Anthropic's limit, OpenAI's is 64
ID_PATTERN = "[a-zA-Z0-9]{9}"  # a call's id, in the formats that write ids (Mistral's)
PROBE_ID = "aB3dE5gH7"  # stands for the id of a call in the texts of a ToolFormat
CONTENT_MARKS = ("\ufdd0", "\ufdd1")  # around content in a name; Unicode has no characters there


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    schema: dict  # the JSON schema of its arguments, which are an object
    strict: bool = False  # a grammar enforces the schema, even if no call is required
    place: str = ""  # the path of the schema in the request, for messages


# ---------------------------------------------------------------- how a model writes calls


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls, and how its template expects them."""

    prefix: str
    middle: str
    suffix: str
    begin: str = ""
    between: str | None = None  # None: an answer has at most one call
    end: str = ""
    parameters: ParameterFormat | None = None  # None: the arguments are not written one by one
    is_python: bool = False  # as f(x=1); a model may write a JSON object instead
    is_gemma: bool = False  # the arguments are as gemma_calls.py describes, not JSON
    # Marks before a call that the model may write, although the template does not.
    more_openers: tuple[str, ...] = ()
    null_content: bool = False  # the content of a message with calls must be null
    text_arguments: bool = False  # the template needs arguments as JSON text, not as objects
    writes_text: bool = True  # the template also writes arguments that are any text
    in_content: bool = False  # the template ignores calls, so they are written as content
    tools_in: str = "tools"  # the template's variable for tools, or "system" for the system message

    @property
    def keys(self) -> tuple[str, str] | None:
        """The keys of a call's name and arguments; None if a call is not a JSON object."""
        if self.is_python:
            return "name", "arguments"
        name = re.search(r'\{\s*"(\w+)"\s*:\s*"$', self.prefix)
        arguments = re.fullmatch(r'"\s*,\s*"(\w+)"\s*:\s*', self.middle)
        if name is None or arguments is None:
            return None
        return name[1], arguments[1]

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks before a call; none if only an answer that begins with "{" is a call."""
        marks = [self._mark(self.begin + self.prefix), self._mark(self.prefix), *self.more_openers]
        return tuple(dict.fromkeys(mark for mark in marks if mark))

    def _mark(self, text: str) -> str:
        """The part of a text before the JSON object or the array of a call. Without JSON, the whole
        text stands before the name, or its first mark if arguments are written one by one."""
        if self.parameters is not None:
            return re.match(r"\s*(\S*)", text)[1]
        if self.is_python:
            return text.removesuffix("[")
        if self.keys is not None:
            text = re.sub(r'\[?\s*\{\s*"\w+"\s*:\s*"$', "", text)
        return text.strip()

    @property
    def closers(self) -> tuple[str, ...]:
        """The marks after a call."""
        if self.parameters is not None:  # the first one ends the arguments
            return tuple((self.suffix + "\n" + self.end).split())
        if self.is_python:
            return (self.end.removeprefix("]"),)
        marks = [re.sub(r"^[^<\[]*[}\]]", "", text).strip() for text in (self.suffix, self.end)]
        return tuple(mark for mark in marks if mark)

    @property
    def writes_ids(self) -> bool:
        return PROBE_ID in self.middle + self.suffix

    @property
    def marks(self) -> str:
        """All texts that a model may write around names and arguments."""
        texts = [self.begin, self.prefix, self.middle, self.suffix, self.end]
        if self.parameters is not None:
            texts += [self.parameters.before, self.parameters.middle, self.parameters.after]
        if self.is_gemma:
            texts.append(QUOTE)
        return "\n".join([*texts, *self.more_openers])

    def call_start(self, opener: str) -> str:
        """A regular expression for what follows an opener, up to the arguments, if a call is not a
        JSON object. The name is its group."""
        before = ""
        if self.parameters is not None:
            texts = (self.begin + self.prefix, self.prefix, opener)
            whole = next(text.lstrip() for text in texts if text.lstrip().startswith(opener))
            before = spaced_pattern(whole.removeprefix(opener))
        middle = re.escape(self.middle.strip()).replace(PROBE_ID, r"\w*")
        return rf"\s*{before}\s*({NAME_PATTERN})\s*{middle}\s*"

    def arguments_for_template(self, arguments) -> dict | str:
        """The arguments of a call in a message, as the template expects them.

        Arguments that are not an object become text. If the template would fail with text, or would
        not write it, they become an object with this text.
        """
        if isinstance(arguments, dict) and self.is_gemma and self.writes_text:
            return gemma_text(arguments)[1:-1]  # in the model's order; the template would sort the keys
        if isinstance(arguments, dict) and not self.text_arguments:
            return arguments
        text = json_text(arguments)
        return text if self.writes_text else {"arguments": text}

    def content_before_calls(self, text: str) -> str:
        """The text of messages with the content before their calls, as the model wrote it, if each first call's name
        begins with the content between CONTENT_MARKS. Gemma 4's template writes the content after the results."""
        begin, end = CONTENT_MARKS
        text = re.sub(f"{re.escape(self.prefix)}{begin}([^{end}]*){end}", rf"\1{self.prefix}", text)
        return re.sub(f"{begin}[^{end}]*{end}", "", text)  # in the names of results

    def write(self, calls: list[tuple[str, str]]) -> str:
        """The text of calls, given as (name, arguments as JSON text), if a call has these."""
        texts = []
        for name, arguments in calls:
            if self.is_python:
                arguments = python_arguments(json_object(arguments))
            elif self.is_gemma:
                arguments = gemma_text(json_object(arguments))
            texts.append(self.prefix + name + self.middle + arguments + self.suffix)
        between = "\n" if self.between is None else self.between
        return self.begin + between.join(texts) + self.end


def json_text(arguments) -> str:
    """Arguments as JSON text. Arguments that are text already are not changed."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def json_object(text: str) -> dict:
    """The object that a JSON text describes. Any other text becomes an object with this text."""
    value = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    return value if isinstance(value, dict) else {"arguments": text}


HERMES = ToolFormat(
    prefix='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    suffix="}\n</tool_call>",
    between="\n",
    in_content=True,
)
GRANITE = ToolFormat(
    prefix='{"name": "',
    middle='", "arguments": ',
    suffix="}",
    begin="<|tool_call|>[",
    between=", ",
    end="]",
    in_content=True,
)
PHI = replace(GRANITE, end="]<|/tool_call|>")
LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
LFM2 = ToolFormat(
    prefix="",
    middle="(",
    suffix=")",
    begin=LFM2_MARKS[0] + "[",
    between=", ",
    end="]" + LFM2_MARKS[1],
    is_python=True,
    in_content=True,
)
GEMMA = ToolFormat(prefix="<|tool_call>call:", middle="", suffix="<tool_call|>", between="", is_gemma=True)
# The formats of models whose templates do not write calls. A template has the format of the first
# mark that it contains.
KNOWN_FORMATS = {
    "<|/tool_call|>": PHI,
    "<|tool_call|>": GRANITE,  # Granite 3
    "<tool_call>": HERMES,  # SmolLM3
    "<|tool|>": PHI,  # Phi-4-mini
    "<|tool_list_start|>": LFM2,
}

# ---------------------------------------------------------------- finding a model's format

PROBE_NAME = "probe_tool"  # the function that is offered
NO_PARAMETERS = {"type": "object", "properties": {}}
PROBE_FUNCTION = {"name": PROBE_NAME, "description": "A probe.", "parameters": NO_PARAMETERS}
PROBE_TOOL = {"type": "function", "function": PROBE_FUNCTION}
PROBE_NAMES = ("probe_first", "probe_second")  # the functions that are called
PROBE_KEYS = ("probe_key", "probe_second_key")  # names of arguments
PROBE_VALUES = ("probe_value", "probe_second_value")
PROBE_CONTENT = "\u00a7\u00a7\u00a7"  # the content of an answer without calls
QUESTION = {"role": "user", "content": "Hello"}


def find_tool_format(template: ChatTemplate) -> ToolFormat | None:
    """The format of a model's tool calls; None if the template does not support tools, or the
    format is not supported."""
    place = find_place(template)
    if place is None:
        return None
    for null_content, text_arguments in product((False, True), repeat=2):
        probe = Probe(template, place, null_content, text_arguments)
        found = probe_format(probe)
        if found is not None:
            return replace(
                found,
                tools_in=place,
                null_content=null_content,
                text_arguments=text_arguments,
                writes_text=PROBE_CONTENT in probe.render_calls([PROBE_CONTENT]),
            )

    rendered = Probe(template, place, False, False).render(1)
    if rendered and PROBE_NAMES[0] not in rendered:
        for mark, known in KNOWN_FORMATS.items():
            if mark in template.source:
                return replace(known, tools_in=place)
        # Templates of LFM2.5 may have no marks at all. They write the content as it is.
        if set(LFM2_MARKS) <= set(template.tokenizer.vocabulary.tokens()):
            return replace(LFM2, tools_in=place)
    return None


def find_place(template: ChatTemplate) -> str | None:
    """Where the template takes tools from, as in ToolFormat.tools_in; None if it ignores them."""
    for place in ("tools", "xml_tools", "system"):
        if PROBE_NAME in try_to_render(template, [QUESTION], place):
            return place
    return None


def place_tools(messages: list[dict], tools: list[dict], place: str) -> tuple[list[dict], dict]:
    """The messages and the template's variables with the tools, which stand in a variable or in the
    system message, as ToolFormat.tools_in says."""
    if place != "system":
        return messages, {place: tools}
    system = {"role": "system", "content": ""}
    if messages[0]["role"] == "system":
        system = messages[0]
        messages = messages[1:]
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [system | {"tools": text}, *messages], {}


def try_to_render(template: ChatTemplate, messages: list[dict], place: str) -> str:
    """The text of a conversation with a tool; no text if the template refuses the messages."""
    messages, variables = place_tools(messages, [PROBE_TOOL], place)
    tools = variables.pop("tools", None)
    try:
        return template.render(messages, add_generation_prompt=False, tools=tools, variables=variables)
    except UserError:
        return ""


@dataclass(frozen=True)
class Probe:
    """Renders conversations that end with calls, as a ToolFormat with these fields needs them."""

    template: ChatTemplate
    place: str  # ToolFormat.tools_in
    null_content: bool
    text_arguments: bool

    def render(self, n: int) -> str:
        """The text of a conversation that ends with n calls, or for n = 0 with a plain answer."""
        if n == 0:
            answer = {"role": "assistant", "content": PROBE_CONTENT}
            return try_to_render(self.template, [QUESTION, answer], self.place)
        arguments = [{PROBE_KEYS[0]: name} for name in PROBE_NAMES[:n]]
        if self.text_arguments:
            arguments = [json.dumps(one) for one in arguments]
        return self.render_calls(arguments)

    def render_calls(self, arguments: list) -> str:
        """The text of a conversation that ends with calls with these arguments."""
        calls = []
        for name, one in zip(PROBE_NAMES, arguments):
            function = {"name": name, "arguments": one}
            calls.append({"id": PROBE_ID, "type": "function", "function": function})
        content = None if self.null_content else ""
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        return try_to_render(self.template, [QUESTION, answer], self.place)


def probe_format(probe: Probe) -> ToolFormat | None:
    """The format in which the template writes calls; None if it does not write them, or the format
    is not supported."""
    rendered = probe.render(1)
    for known in (replace(LFM2, in_content=False), GEMMA):  # whose arguments are not JSON
        call = known.write([(PROBE_NAMES[0], json.dumps({PROBE_KEYS[0]: PROBE_NAMES[0]}))])
        if call in rendered.replace("'", '"'):  # templates write strings with quotes of either kind
            return known

    header, _, end_of_turn = probe.render(0).rpartition(PROBE_CONTENT)
    parameters = None
    single = split_at_calls(rendered, PROBE_NAMES[:1])
    if single is None:
        parameters = find_parameters(probe)
        single = split_at_calls(rendered, PROBE_NAMES[:1], parameters)
    double = split_at_calls(probe.render(2), PROBE_NAMES, parameters)
    if not header or single is None:
        return None

    start, middle, rest = single
    start = start.removeprefix(common_start(header, start))
    for _, close in THINKING_MARKS:  # some templates write empty thoughts before the last answer
        if close in start:
            start = start.rpartition(close)[2].lstrip()
    rest = cut_end_of_turn(rest, end_of_turn, probe.template)
    if rest is None:
        return None

    found = ToolFormat(start, middle, rest)
    if double is not None and double[1] == double[3] == middle:
        found = split_between(start, double[2], rest, middle)
    found = replace(found, parameters=parameters)
    if parameters is not None:  # some models leave out the first mark
        found = replace(found, more_openers=tuple(found.prefix.split()[1:][-1:]))
    if "<|python_tag|>" in probe.template.source:  # Llama 3's
        found = replace(found, more_openers=("<|python_tag|>",))
    return found if is_supported(found) else None


def is_supported(format: ToolFormat) -> bool:
    """Whether a call is a JSON object, or marks show where its name and its arguments begin, and
    where each argument ends."""
    opening = format.begin + format.prefix
    if PROBE_ID in opening:
        return False
    if format.keys is not None:
        return True
    begins_with_mark = opening[:1] in ("<", "[")
    characters = set(opening + format.middle + format.suffix + format.end)
    if not begins_with_mark or not characters.isdisjoint('{}"'):
        return False
    if format.parameters is None:
        return format.middle.strip() != ""
    marks = (format.parameters.before, format.parameters.after, format.suffix)
    has_marks = all(mark.strip().startswith(("<", "[")) for mark in marks)
    return has_marks and format.parameters.middle.strip() != "" and not format.writes_ids


def find_parameters(probe: Probe) -> ParameterFormat | None:
    """The format in which the template writes arguments one by one; None if it does not."""
    none = probe.render_calls([{}]).partition(PROBE_NAMES[0])[2]
    text = probe.render_calls([dict(zip(PROBE_KEYS, PROBE_VALUES))])
    parts = []  # the texts before and between the name, the keys and the values, and the rest
    for word in (PROBE_NAMES[0], PROBE_KEYS[0], PROBE_VALUES[0], PROBE_KEYS[1], PROBE_VALUES[1]):
        part, found, text = text.partition(word)
        if not found:
            return None
        parts.append(part)

    _, first, middle, second, same_middle = parts
    before = first.removeprefix(common_start(none, first))
    after = second.removesuffix(before)
    suffix = none.removeprefix(first.removesuffix(before))
    if not before or after == second or middle != same_middle or text != after + suffix:
        return None
    return ParameterFormat(before, middle, after)


def split_at_calls(text: str, names: tuple[str, ...], parameters: ParameterFormat | None = None) -> list[str] | None:
    """The texts before, between and after the names and the arguments of calls, in order.

    None if a name or its arguments are missing, or if the arguments are written in another way.
    """
    parts = []
    key = PROBE_KEYS[0]
    for name in names:
        before, found, text = text.partition(name)
        pattern = rf'\{{\s*"{key}"\s*:\s*"{name}"\s*\}}'
        if parameters is not None:
            written = parameters.before + key + parameters.middle + name + parameters.after
            pattern = re.escape(written)
        arguments = re.search(pattern, text)
        if not found or arguments is None:
            return None
        parts += [before, text[: arguments.start()]]
        text = text[arguments.end() :]
    return [*parts, text]


def common_start(one: str, other: str) -> str:
    """The text with which two texts begin. If it ends with a part of a mark, such as "<tool_", it
    is cut before that."""
    common = commonprefix([one, other])
    if common in (one, other):
        return common
    return re.sub(r"[<\[][^<>\[\]]*$", "", common)


def cut_end_of_turn(text: str, end_of_turn: str, template: ChatTemplate) -> str | None:
    """The text after a call, without what the template writes after an answer; None if the end of
    the turn is not found."""
    if text.endswith(end_of_turn):
        return text.removesuffix(end_of_turn)
    special = special_tokens(template.tokenizer)
    eos_ids = template.tokenizer.eos_ids
    ends = [text.find(name) for name, i in special.items() if i in eos_ids and name in text]

    return text[: min(ends)] if ends else None


def split_between(start: str, between: str, rest: str, middle: str) -> ToolFormat:
    """The format, given the texts before the first call's name (`start`), from the arguments of one
    call to the name of the next (`between`), and after the last arguments (`rest`)."""
    suffix = common_start(rest, between)
    between = between.removeprefix(suffix)
    prefix = commonprefix([between[::-1], start[::-1]])[::-1]  # the text with which both end
    return ToolFormat(
        prefix,
        middle,
        suffix,
        begin=start.removesuffix(prefix),
        between=between.removesuffix(prefix),
        end=rest.removeprefix(suffix),
    )


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens by their names."""
    names = tokenizer.vocabulary.tokens()
    return {names[i]: i for i in tokenizer.vocabulary.special_ids if i < len(names) and names[i]}
