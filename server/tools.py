"""Tools: how a model writes calls of functions, and the grammars that make it write calls that fit.

Read down: Tool, a function that a request offers; ToolFormat, how a model writes calls; find_tool_format, which finds
this out by rendering conversations with the model's chat template; the marks of thoughts; the grammars. The parser of
answers is answers.py.

Every format that is supported writes a call as

    prefix NAME middle ARGUMENTS suffix

where ARGUMENTS is a JSON object, with `begin` before the first call of an answer, `between` between two calls and `end`
after the last one. For Qwen, the prefix is '<tool_call>\\n{"name": "', the middle '", "arguments": ' and the suffix
'}\\n</tool_call>'.
"""

import json
import re
from dataclasses import dataclass, replace
from itertools import product
from os.path import commonprefix

from cli import UserError
from grammar import schema_rule
from tokenizer import THINKING_MARKS, ChatTemplate, Tokenizer

NAME_PATTERN = "[a-zA-Z0-9_-]{1,128}"  # of a function, as Anthropic allows it; OpenAI has a limit of 64
ID_PATTERN = "[a-zA-Z0-9]{9}"  # of a call, in the formats that write ids (Mistral's)
PROBE_ID = "aB3dE5gH7"  # stands for the id of a call in the texts of a ToolFormat


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    schema: dict  # of its arguments, a JSON object
    strict: bool = False  # whether a grammar enforces the schema, even where the model need not call any function
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
    more_openers: tuple[str, ...] = ()  # marks before a call that the model may write, but the template does not
    null_content: bool = False  # the content of a message with calls must be null
    text_arguments: bool = False  # arguments are JSON text, instead of objects
    writes_text: bool = True  # the template also writes arguments that are any text
    in_content: bool = False  # the template does not know calls, so they are written into the content of messages
    tools_in: str = "tools"  # the template's variable for tools; "system": they are JSON text in the system message

    @property
    def keys(self) -> tuple[str, str] | None:
        """The keys of a call's name and arguments in its JSON object; None if a call is not a JSON object."""
        name = re.search(r'\{\s*"(\w+)"\s*:\s*"$', self.prefix)
        arguments = re.fullmatch(r'"\s*,\s*"(\w+)"\s*:\s*', self.middle)
        return (name[1], arguments[1]) if name and arguments else None

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks before a call; none if only an answer that begins with "{" is a call."""
        marks = [self._mark(self.begin + self.prefix), self._mark(self.prefix), *self.more_openers]
        return tuple(dict.fromkeys(mark for mark in marks if mark))

    def _mark(self, text: str) -> str:
        """What stands before the JSON object or the array of a call, or in other formats before the name."""
        return (text if self.keys is None else re.sub(r'\[?\s*\{\s*"\w+"\s*:\s*"$', "", text)).strip()

    @property
    def closers(self) -> tuple[str, ...]:
        """The marks after a call."""
        marks = [re.sub(r"^[^<\[]*[}\]]", "", text).strip() for text in (self.suffix, self.end)]
        return tuple(mark for mark in marks if mark)

    @property
    def writes_ids(self) -> bool:
        return PROBE_ID in self.middle + self.suffix

    @property
    def marks(self) -> str:
        """All texts that a model may write around names and arguments."""
        return "\n".join([self.begin, self.prefix, self.middle, self.suffix, self.end, *self.more_openers])

    def arguments_for_template(self, arguments) -> dict | str:
        """The arguments of a call in a message, as the template expects them. If they are no object, they are text, or
        one argument with this text if the template would fail or write nothing."""
        if isinstance(arguments, dict) and not self.text_arguments:
            return arguments
        text = json_text(arguments)
        return text if self.writes_text else {"arguments": text}

    def write(self, calls: list[tuple[str, str]]) -> str:
        """The text of calls, given as (name, arguments as JSON text)."""
        texts = [self.prefix + name + self.middle + arguments + self.suffix for name, arguments in calls]
        return self.begin + (self.between or "\n").join(texts) + self.end


def json_text(arguments) -> str:
    """Arguments as JSON. A text stays as it is."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


HERMES = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n", in_content=True)
GRANITE = ToolFormat(
    '{"name": "', '", "arguments": ', "}", begin="<|tool_call|>[", between=", ", end="]", in_content=True
)
PHI = replace(GRANITE, end="]<|/tool_call|>")
# The formats of models whose templates do not write calls, by a mark that the template contains. The first one counts.
KNOWN_FORMATS = {
    "<|/tool_call|>": PHI,
    "<|tool_call|>": GRANITE,  # Granite 3
    "<tool_call>": HERMES,  # SmolLM3
    "<|tool|>": PHI,  # Phi-4-mini
}

# ---------------------------------------------------------------- finding a model's format

PROBE_FUNCTION = {"name": "probe_tool", "description": "A probe.", "parameters": {"type": "object", "properties": {}}}
PROBE_TOOL = {"type": "function", "function": PROBE_FUNCTION}
PROBE_NAMES = ("probe_first", "probe_second")  # of functions that are called
PROBE_CONTENT = "\u00a7\u00a7\u00a7"  # of an answer without calls
QUESTION = {"role": "user", "content": "Hello"}


def find_tool_format(template: ChatTemplate) -> ToolFormat | None:
    """The format of a model's tool calls; None if its template knows no tools, or if the format is not supported."""
    for place in ("tools", "xml_tools", "system"):
        if PROBE_FUNCTION["name"] in try_to_render(template, [QUESTION], place):
            break
    else:
        return None
    for null_content, text_arguments in product((False, True), repeat=2):
        probe = Probe(template, place, null_content, text_arguments)
        found = probe_format(probe)
        if found is not None:
            found = replace(found, tools_in=place, null_content=null_content, text_arguments=text_arguments)
            return replace(found, writes_text=PROBE_CONTENT in probe.render_calls([PROBE_CONTENT]))
    without_calls = Probe(template, place, False, False).render(1)
    if without_calls and PROBE_NAMES[0] not in without_calls:
        for mark, known in KNOWN_FORMATS.items():
            if mark in template.source:
                return replace(known, tools_in=place)
    return None


def place_tools(messages: list[dict], tools: list[dict], place: str) -> tuple[list[dict], dict]:
    """The messages and the template's variables with the tools in their place, which is that of ToolFormat.tools_in."""
    if place != "system":
        return messages, {place: tools}
    has_system = messages[0]["role"] == "system"
    system = messages[0] if has_system else {"role": "system", "content": ""}
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [system | {"tools": text}, *messages[has_system:]], {}


def try_to_render(template: ChatTemplate, messages: list[dict], place: str) -> str:
    """The text with a tool and without a generation prompt, or no text if the template refuses the messages."""
    messages, variables = place_tools(messages, [PROBE_TOOL], place)
    try:
        tools = variables.pop("tools", None)
        return template.render(messages, add_generation_prompt=False, tools=tools, variables=variables)
    except UserError:
        return ""


@dataclass(frozen=True)
class Probe:
    """Renders conversations that end with calls. The fields are those of a ToolFormat that is tried."""

    template: ChatTemplate
    place: str
    null_content: bool
    text_arguments: bool

    def render(self, n: int) -> str:
        """A conversation that ends with n calls, or with a plain answer for n = 0."""
        if not n:
            answer = {"role": "assistant", "content": PROBE_CONTENT}
            return try_to_render(self.template, [QUESTION, answer], self.place)
        arguments = [{"probe_key": name} for name in PROBE_NAMES[:n]]
        return self.render_calls([json.dumps(one) if self.text_arguments else one for one in arguments])

    def render_calls(self, arguments: list) -> str:
        """A conversation that ends with calls with these arguments."""
        functions = [{"name": name, "arguments": one} for name, one in zip(PROBE_NAMES, arguments)]
        calls = [{"id": PROBE_ID, "type": "function", "function": function} for function in functions]
        answer = {"role": "assistant", "content": None if self.null_content else "", "tool_calls": calls}
        return try_to_render(self.template, [QUESTION, answer], self.place)


def probe_format(probe: Probe) -> ToolFormat | None:
    """The format in which the template writes calls; None if it writes none, or not in a format that is supported."""
    header, _, end_of_turn = probe.render(0).rpartition(PROBE_CONTENT)
    single, double = split_at_calls(probe.render(1), PROBE_NAMES[:1]), split_at_calls(probe.render(2), PROBE_NAMES)
    if not header or single is None:
        return None
    start, middle, rest = single
    start = start.removeprefix(common_start(header, start))
    for _, close in THINKING_MARKS:  # some templates write empty thoughts before the last answer
        start = start.rpartition(close)[2].lstrip() if close in start else start
    rest = cut_end_of_turn(rest, end_of_turn, probe.template)
    if rest is None:
        return None
    found = ToolFormat(start, middle, rest)
    if double is not None and double[1] == double[3] == middle:
        found = split_between(start, double[2], rest, middle)
    if "<|python_tag|>" in probe.template.source:  # Llama 3's
        found = replace(found, more_openers=("<|python_tag|>",))
    return found if is_supported(found) else None


def is_supported(format: ToolFormat) -> bool:
    """Whether a call is a JSON object, or a mark shows where its name begins, and another where its arguments do."""
    opening, rest = format.begin + format.prefix, format.middle + format.suffix + format.end
    has_marks = opening[:1] in ("<", "[") and format.middle.strip() != "" and not set('{}"') & set(opening + rest)
    return PROBE_ID not in opening and (format.keys is not None or has_marks)


def split_at_calls(text: str, names: tuple[str, ...]) -> list[str] | None:
    """The texts around the names and the arguments of calls, in order: one more than there are names and arguments.
    None if they are not all there, or if the arguments are not written as JSON."""
    parts = []
    for name in names:
        before, found, text = text.partition(name)
        arguments = re.search(rf'\{{\s*"probe_key"\s*:\s*"{name}"\s*\}}', text)
        if not found or arguments is None:
            return None
        parts += [before, text[: arguments.start()]]
        text = text[arguments.end() :]
    return [*parts, text]


def common_start(one: str, other: str) -> str:
    """What two texts begin with, without the beginning of a mark, such as "<tool_", at the end of it."""
    common = commonprefix([one, other])
    return common if common in (one, other) else re.sub(r"[<\[][^<>\[\]]*$", "", common)


def cut_end_of_turn(text: str, end_of_turn: str, template: ChatTemplate) -> str | None:
    """The text after a call, without what the template writes after an answer; None if there is no end of a turn."""
    if text.endswith(end_of_turn):
        return text.removesuffix(end_of_turn)
    special = special_tokens(template.tokenizer)
    ends = [text.find(name) for name, i in special.items() if i in template.tokenizer.eos_ids]
    # Command-R's template ends no turn after calls. There, an answer ends before what follows any conversation.
    same = commonprefix([text[::-1], end_of_turn[::-1]])[::-1]
    if starts := [same.index(name) for name in special if name in same]:
        ends.append(len(text[: len(text) - len(same) + min(starts)].rstrip()))
    return min((text[:at] for at in ends if at >= 0), key=len, default=None)


def split_between(start: str, between: str, rest: str, middle: str) -> ToolFormat:
    """The format, given what stands before the first call's name, between two calls, and after the last arguments."""
    suffix = common_start(rest, between)
    between = between.removeprefix(suffix)
    prefix = commonprefix([between[::-1], start[::-1]])[::-1]
    begin, end = start.removesuffix(prefix), rest.removeprefix(suffix)
    return ToolFormat(prefix, middle, suffix, begin, between.removesuffix(prefix), end)


# ---------------------------------------------------------------- grammars


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens by their names."""
    names = tokenizer.vocabulary.tokens()
    return {names[i]: i for i in tokenizer.vocabulary.special_ids if i < len(names) and names[i]}


def literal(text: str, special: dict[str, int]) -> str:
    """A text as an expression of a grammar, with any id in the place of PROBE_ID. Special tokens are named by their
    token ids, because no text matches them."""
    longest_first = sorted((name for name in special if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, [*longest_first, PROBE_ID]))})", text)
    expressions = {name: f"<[{i}]>" for name, i in special.items()} | {PROBE_ID: f"/{ID_PATTERN}/"}
    return " ".join(expressions.get(part) or json.dumps(part) for part in parts if part)


def text_until(name: str, mark: str) -> str:
    """The rule for a text that ends with the first mark in it."""
    lazy = "" if "<[" in mark else "[lazy]"  # no text matches a special token, so the text ends there in any case
    return f"{name}{lazy}: TEXT {mark}"


class ToolGrammar:
    """Expressions of a Lark grammar for calls of tools, and the rules that they refer to, besides TEXT."""

    def __init__(self, format: ToolFormat, tools: list[Tool], special: dict[str, int], several: bool):
        """special: as of special_tokens. several: whether an answer may have more than one call."""
        self.format, self.special = format, special
        self.several = several and format.between is not None
        middle, suffix = literal(format.middle, special), literal(format.suffix, special)
        calls = [f"{json.dumps(tool.name)} {middle} arguments_{i} {suffix}" for i, tool in enumerate(tools)]
        schemas = [schema_rule({"type": "object"} | tool.schema, lenient=not tool.strict) for tool in tools]
        self.rules = [f"call: {' | '.join(calls)}", *(f"arguments_{i}: {rule}" for i, rule in enumerate(schemas))]

    def calls(self) -> str:
        """The expression of an answer's calls."""
        return self._calls_after(self.format.begin + self.format.prefix)

    def _calls_after(self, opening: str) -> str:
        """The same, where `opening` stands before the first name."""
        parts = [literal(opening, self.special), "call"]
        if self.several:
            parts.append(f"({literal(self.format.between + self.format.prefix, self.special)} call)*")
        return " ".join([*parts, literal(self.format.end, self.special)])

    def text_with_calls(self) -> str:
        """The expression of any text in which everything after the mark of a call is a call."""
        opening, marks = self.format.begin + self.format.prefix, self.format.openers
        if marks == self.format.more_openers:  # an answer that begins with "{" is a call
            self.rules.append(r"no_call: /(\s*[^\s{](.|\n)*)?/")
            tags = "".join(f"({literal(mark, self.special)})? " for mark in marks)
            return f"(no_call | {tags}{self.calls()})"
        self.rules.append(text_until("text_and_mark", literal(marks[0], self.special)))
        calls = f"text_and_mark {self._calls_after(opening.partition(marks[0])[2])}"
        return f"(({calls})* TEXT)" if self.several else f"(TEXT | {calls})"
