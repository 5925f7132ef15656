"""Splits the text of an answer into thoughts, content and tool calls, while it is being generated.

Read down: the events; AnswerSyntax, what an answer may contain; AnswerParser. tools.py describes how a
model writes calls. This file knows nothing of requests and responses.

Models make mistakes, so the parser is lenient: text that is not a call of a known tool stays
content. The result depends on the text alone, not on the pieces in which it comes.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from server.gemma_calls import GemmaReader
from server.json_reader import JsonReader, is_json
from server.parameters import Types, ValueText, refuse_constant
from server.python_calls import SURROGATE, CallEnd, read_arguments
from server.tools import NAME_PATTERN, ToolFormat
from text.chat_template import CHANNEL_MARKS
from text.tokenizer import StopSearch, ThoughtSearch, start_of_partial

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallBegins:
    index: int  # the call's position among the calls of the answer
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments' JSON text."""

    index: int
    text: str


Event = Reasoning | Content | CallBegins | CallArguments
Fits = Callable[[str, str], bool]  # takes the name and the arguments of a call

# ---------------------------------------------------------------- the parser


@dataclass(frozen=True)
class AnswerSyntax:
    """What an answer may contain besides content.

    An answer that is a single JSON object with a tool's name and arguments, bare or in a code
    block, is a call in every format (`bare_calls`), because small models write calls like that. If
    arguments are written one by one, the first mark of a call may be missing as well.
    """

    thinking: tuple[str, str] | None = None  # the marks before and after thoughts
    begins_inside: bool = False  # the prompt ends with the first mark
    tools: ToolFormat | None = None  # how the model writes calls; None if it has no tools
    names: frozenset[str] = frozenset()  # the names of the tools
    max_calls: int | None = None  # text after this many calls is dropped
    bare_calls: bool = True
    # name -> key -> the types of this argument, if arguments are written one by one
    types: Mapping[str, Mapping[str, Types]] = field(default_factory=dict)


FENCE = re.compile(r"(?:```(?:json)?\s*)?")  # the opening of a code block, or no text
CALL_KEYS = {"name", "arguments", "parameters", "type", "function", "id"}  # first keys of calls
MAX_NAME_AND_MIDDLE = 200  # characters from a mark to the arguments
MAX_KEY = 300  # characters of a key and the mark after it
# The beginning of a call that is written as in Python: a name, and what follows if it is there already.
PYTHON_START = re.compile(rf"({NAME_PATTERN})?\s{{0,99}}(\(|\Z)")


class EndOfAnswer(Exception):
    """The answer ends before its text does, or within a call."""


class AnswerParser:
    """Reads an answer in pieces. `add` and `end` return the events that are new.

    A generator, `reader`, reads the answer from its beginning to its end. It takes what it can from
    `text`, and yields where it needs more text before it can go on.

    The answer ends before the first stop string in its content. Stop strings are not searched in
    thoughts, in calls or in white space that is dropped, nor across them.
    """

    def __init__(
        self, syntax: AnswerSyntax, stop: Iterable[str] = (), fits: Fits | None = None, is_streamed: bool = True
    ):
        """fits: whether a call without marks fits the answer's grammar; None: every call does.

        is_streamed: the events of a call do not wait for its end. Otherwise a call whose arguments are not JSON is
        content.
        """
        self.syntax = syntax
        self.format = syntax.tools
        self.fits = fits
        self.is_streamed = is_streamed
        self.stops = StopSearch(stop)
        self.events: list[Event] = []
        self.reader = self._read_all()

        self.text = ""  # received, but not read yet
        self.ended = False  # nothing will follow `text`
        self.is_cut = False  # the limit of tokens has ended the answer
        self.received = 0  # characters so far
        self.content_end = 0  # characters up to the end of the latest content
        self.space = ""  # white space that is dropped if nothing but calls follows
        self.is_blank = True  # nothing but white space came since the last thoughts or call
        self.held = ""  # what was read, but is content or thoughts if no call follows

        self.calls = 0
        self.whole_calls = 0  # calls with complete arguments

        self.openers: tuple[str, ...] = ()
        self.closers: tuple[str, ...] = ()
        self.keys = ("name", "arguments")
        if self.format is not None:
            self.openers = self.format.openers
            if self.format.parameters is not None and not syntax.bare_calls:
                further = self.format.more_openers
                self.openers = tuple(mark for mark in self.openers if mark not in further)
            self.closers = self.format.closers
            self.keys = self.format.keys or self.keys
        self.argument_reader = GemmaReader if self.format and self.format.is_gemma else JsonReader
        # The beginning of a call's JSON object, up to its arguments. The group is the name.
        arguments = "|".join(sorted({self.keys[1], "arguments", "parameters"}))
        name = rf'\{{\s*"{self.keys[0]}"\s*:\s*"({NAME_PATTERN})"'
        self.call_start = re.compile(rf'{name}\s*,\s*"(?:{arguments})"\s*:\s*(?=\{{)')

    def add(self, text: str) -> list[Event]:
        self.text += text
        self.received += len(text)
        self.events = []
        next(self.reader, None)
        return self.events

    def end(self, is_cut: bool = False) -> list[Event]:
        """The events of the text that was held back, after the last piece.

        is_cut: the limit of tokens has ended the answer, so a call that has just begun is dropped.
        """
        self.ended = True
        self.is_cut = is_cut
        return self.add("")

    @property
    def decided(self) -> int:
        """How many characters come before the stop string, or before text that may contain one."""
        if self.stops.stopped:
            return self.content_end - len(self.stops.held)
        undecided = (self.text, self.held, self.space, self.stops.held)
        return self.received - sum(map(len, undecided))

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has calls, and all of them are complete."""
        return 0 < self.calls == self.whole_calls

    def _read_all(self) -> Iterator[None]:
        with suppress(EndOfAnswer):
            yield from self._read_thoughts(self.syntax.begins_inside)
            yield from self._read_bare_call()
            yield from self._read_content()
        with suppress(EndOfAnswer):
            self._add_content("", last=True)

    def _read_content(self) -> Iterator[None]:
        """Read the rest of the answer: content, calls after marks, and Gemma 4's later thoughts.

        These may be empty. A mark that ends no thoughts is dropped.
        """
        marks = CHANNEL_MARKS if self.syntax.thinking == CHANNEL_MARKS else ()
        while True:
            before, mark = self._take_until((*self.openers, *marks))
            self.held = mark
            self._emit(Content, before)
            if mark in marks[1:]:
                self.held = ""
            elif mark in marks:
                self._add_content("", last=True)
                self._drop_space()
                yield from self._read_thoughts(begins_inside=True)
            elif mark:
                yield from self._read_calls_after_mark()
            elif self.ended:
                break
            else:
                yield
        if not self.calls:
            self._add_content(self.space)

    # ------------------------------------------------------------ thoughts and content

    def _read_thoughts(self, begins_inside: bool) -> Iterator[None]:
        """Read thoughts, and the white space after them.

        What looks like a call within thoughts is a part of them if they are closed after it. If the model ends its
        answer without closing them, it is a call.
        """
        search = ThoughtSearch(self.syntax.thinking, begins_inside)
        if search.place == "answer":
            return
        has_thoughts = begins_inside
        thoughts = ""  # from the first mark of a call on
        while True:
            found = dict(search.add(self.text, self.ended))
            self.text = found.get("answer", "")
            has_thoughts |= "mark" in found
            thoughts += found.get("thoughts", "")
            at, _ = find_mark(thoughts, self.openers)
            self._emit(Reasoning, thoughts[:at])
            thoughts = thoughts[at:]
            self.held = thoughts + search.held
            if search.place == "answer" or self.ended:
                break
            yield

        self.held = ""
        if search.place == "answer" or self.is_cut or not self._add_calls_in_thoughts(thoughts):
            self._emit(Reasoning, thoughts)
        if has_thoughts:
            self._drop_space()
            while not self.text.strip():
                self.text = ""
                yield from self._more()
            self.text = self.text.lstrip()

    def _add_calls_in_thoughts(self, thoughts: str) -> bool:
        """Add the calls in thoughts that were not closed, and the text beside them. Returns whether there are calls,
        all of which are whole; otherwise adds nothing."""
        parser = AnswerParser(replace(self.syntax, thinking=None, bare_calls=False), is_streamed=False)
        parser.calls = self.calls
        parser.whole_calls = self.whole_calls
        events = parser.add(thoughts) + parser.end()
        new = parser.calls - self.calls
        if not new or parser.whole_calls - self.whole_calls != new:
            return False
        self.calls = parser.calls
        self.whole_calls = parser.whole_calls
        for event in events:
            if isinstance(event, Content):
                self._emit(Reasoning, event.text)
            else:
                self.events.append(event)
        return True

    def _more(self) -> Iterator[None]:
        """Wait for more text, without which the answer has ended."""
        if self.ended:
            raise EndOfAnswer
        yield

    def _take(self, n: int) -> str:
        """Take n characters from the text."""
        taken = self.text[:n]
        self.text = self.text[n:]
        return taken

    def _take_until(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """Take the text before the first of the marks, and the mark, which is "" if there is none.

        What may be the beginning of a mark is left.
        """
        at, mark = find_mark(self.text, marks)
        if self.ended and not mark:
            at = len(self.text)
        before = self._take(at)
        self.text = self.text.removeprefix(mark)
        return before, mark

    def _emit(self, kind: type, text: str):
        """Add thoughts or content. White space that comes first is held back: it is dropped if
        nothing follows it."""
        text = self.space + text
        self.space = ""
        may_drop_space = self.format is not None or kind is Reasoning
        if self.is_blank and not text.strip() and may_drop_space:
            self.space = text
            return
        if not text:
            return
        self.is_blank = False
        if kind is Content:
            self._add_content(text)
        else:
            self.events.append(kind(text))

    def _drop_space(self):
        """Drop the white space that was held back, because thoughts end or a call begins here."""
        self.space = ""
        self.is_blank = True

    def _add_content(self, text: str, last: bool = False):
        """Add content, except what may be the beginning of a stop string.

        last: the content ends here, or is interrupted by a call, so nothing is held back.
        """
        if text:
            self.content_end = self.received - len(self.text) - len(self.held)
        text = self.stops.add(text, last)
        if text:
            self.events.append(Content(text))
        if self.stops.stopped:
            raise EndOfAnswer

    def _refuse(self, n: int) -> bool:
        """Add text that only looked like a call to the content: `held`, and n characters after it."""
        text = self.held + self._take(n)
        self.held = ""
        self._emit(Content, text)
        return False

    # ------------------------------------------------------------ calls

    def _read_bare_call(self) -> Iterator[None]:
        """Read the first text after the thoughts, if it is a JSON object that may be a call."""
        has_own_marks = self.format is not None and self.openers != self.format.more_openers
        if self.format is None or (has_own_marks and not self.syntax.bare_calls):
            return
        while True:
            text = self.text.lstrip()
            fence = FENCE.match(text)[0] if self.syntax.bare_calls else ""
            may_be_fence = self.syntax.bare_calls and "```json".startswith(text)
            if self.ended or not (text == fence or may_be_fence):
                break
            yield

        if not text.startswith("{", len(fence)):
            return
        self.held = self._take(len(self.text) - len(text) + len(fence))
        closing = "```" if fence else ""
        if has_own_marks:
            yield from self._read_whole_object(closing)
        elif (yield from self._read_object(is_bare=True)):
            yield from self._read_more_calls((*self.closers, closing) if fence else self.closers)

    def _read_calls_after_mark(self) -> Iterator[None]:
        """Read calls after a mark, which is held."""
        in_array = False
        if self.format.keys is not None:
            yield from self._hold_space()
            in_array = self.text.startswith("[")
            if in_array:
                self.held += self._take(1)
                yield from self._hold_space()
        if (yield from self._read_call()):
            yield from self._read_more_calls(self.closers, in_array)

    def _hold_space(self) -> Iterator[None]:
        """Take white space, and wait for the text after it."""
        while not self.text.strip() and not self.ended:
            yield from self._more_of_call()
        self.held += self._take(len(self.text) - len(self.text.lstrip()))

    def _more_of_call(self) -> Iterator[None]:
        """Wait for more text of a call that has just begun. It is dropped if the answer is cut off."""
        yield
        if self.is_cut:
            raise EndOfAnswer

    def _read_more_calls(self, closers: tuple[str, ...], in_array: bool = False) -> Iterator[None]:
        """Read what follows a call: marks that end a call or all calls, and further calls."""
        is_closed = False
        while True:
            if self.calls == self.syntax.max_calls:
                self.text = ""
                yield from self._more()
                continue
            text = self.text.lstrip()
            closer = next((mark for mark in closers if text.startswith(mark)), None)
            if closer is not None:
                self._take(len(self.text) - len(text) + len(closer))
                is_closed = True
            elif not text or any(mark.startswith(text) for mark in closers):
                yield from self._more()
            elif in_array and text[0] in ",]":
                self.text = text[1:]
                in_array = text[0] == ","
                is_closed = not in_array
            elif is_closed or self.format.keys is None or not (text[0] == "{" or self.format.is_python):
                return
            else:
                yield from self._hold_space()
                if not (yield from self._read_call()):
                    return

    def _read_call(self) -> Iterator[None]:
        """Read a call. Returns whether there was one."""
        if self.format.keys is None:
            return (yield from self._read_named_call())
        if self.text.startswith("{"):
            return (yield from self._read_object())
        if self.format.is_python:
            return (yield from self._read_python_call())
        return self._refuse(0)

    def _begin_call(self, name: str, n: int):
        """Begin a call, of which n characters come before its arguments."""
        self._take(n)
        self._add_content("", last=True)
        self._drop_space()
        self.held = ""
        self.events.append(CallBegins(self.calls, f"call_{secrets.token_hex(12)}", name))
        self.calls += 1

    def _add_arguments(self, text: str):
        if text:
            self.events.append(CallArguments(self.calls - 1, text))

    def _add_call(self, name: str, arguments: str, n: int) -> bool:
        """Add a whole call, which has n characters."""
        self._begin_call(name, n)
        self._add_arguments(arguments)
        self.whole_calls += 1
        return True

    def _read_object(self, is_bare: bool = False) -> Iterator[None]:
        """Read a call that is a JSON object.

        If its name comes before its arguments, these are read piece by piece. is_bare: the answer
        began with the object.
        """
        reader = JsonReader(self.closers)
        at = 0
        while True:
            start = self.call_start.match(self.text)
            if start is not None and start[1] in self.syntax.names:
                return (yield from self._read_arguments(start[1], start.end()))
            if is_bare and not self._may_be_call():
                return self._refuse(1)
            at, _ = reader.read(self.text, at, self.ended)
            if reader.is_complete or self.ended:
                break
            if is_bare:
                yield
            else:
                yield from self._more_of_call()

        call = self._parse_call(reader.text, None if is_bare else {})
        if call is None:
            return self._refuse(1 if is_bare else at)
        return self._add_call(*call, at)

    def _read_whole_object(self, closing: str) -> Iterator[None]:
        """Read an answer that is a call without marks and nothing else.

        Only the end of the answer tells whether it is one. closing: what ends its code block.
        """
        reader = JsonReader(self.closers)
        at = 0
        rest = ""
        while self._may_be_call():
            at, _ = reader.read(self.text, at, self.ended)
            rest = self.text[at:].strip()
            if self.ended or (reader.is_complete and not closing.startswith(rest)):
                break
            yield

        call = None
        if self.ended and rest in ("", closing):
            call = self._parse_call(reader.text, None)
        if call is None or (self.fits is not None and not self.fits(*call)):
            return self._refuse(1)
        return self._add_call(*call, len(self.text))

    def _may_be_call(self) -> bool:
        """Whether the object that begins here may still become a call. If not, its text need not
        wait."""
        first = re.match(r'\{\s*(?:"(\w*)(")?|\S)', self.text)
        if first is not None:
            key, quote = first.groups()  # the first key, without a quote if it is not complete
            if key is None or (quote and key not in CALL_KEYS and key not in self.keys):
                return False
        name = re.match(rf'\{{\s*"{self.keys[0]}"\s*:\s*"([^"]*)"', self.text)
        return name is None or name[1] in self.syntax.names

    def _parse_call(self, text: str, arguments: dict | None) -> tuple[str, str] | None:
        """(name, arguments as JSON text) of an object; None if it is not a call of a known tool, or
        not complete. arguments: of a call that has none."""
        try:
            value = json.loads(text, parse_constant=refuse_constant)
            if isinstance(value, dict) and isinstance(value.get("function"), dict):
                value = value["function"]
            name = value.get(self.keys[0], value.get("name"))
            for key in ("parameters", "arguments", self.keys[1]):  # the last one counts
                arguments = value.get(key, arguments)
            if isinstance(arguments, str):
                arguments = json.loads(JsonReader().read(arguments, 0, True)[1])
            if name not in self.syntax.names or not isinstance(arguments, dict):
                return None
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite
            return name, json.dumps(arguments) if SURROGATE.search(text) else text
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    def _read_named_call(self) -> Iterator[None]:
        """Read a call that is not a JSON object: its name, the text up to its arguments, and these."""
        starts = ("{",)
        if self.format.parameters is not None:
            starts = self._parameter_marks()
        pattern = f"{self.format.call_start(self.held)}(?={'|'.join(map(re.escape, starts))})"
        longest = MAX_NAME_AND_MIDDLE + max(map(len, starts))
        while True:
            beginning = self.text[:longest]
            if any(mark in beginning for mark in starts) or len(self.text) >= longest or self.ended:
                break
            yield from self._more_of_call()

        start = re.match(pattern, beginning)
        if start is None or start[1] not in self.syntax.names:
            return self._refuse(0)
        if self.format.parameters is None:
            return (yield from self._read_arguments(start[1], start.end()))
        self._begin_call(start[1], start.end())
        return (yield from self._read_parameters(self.syntax.types.get(start[1], {})))

    def _read_arguments(self, name: str, at: int) -> Iterator[None]:
        """Read the arguments of a call from text[at] on, which become JSON, and the rest of its object."""
        reader = self.argument_reader(self.closers)
        end = at
        while not self.is_streamed:
            end, _ = reader.read(self.text, end, self.ended)
            if reader.is_complete or self.ended:
                break
            yield
        if reader.is_complete and reader.depth <= 0 and not is_json(reader.text):
            return self._refuse(end)

        self._begin_call(name, at)
        reader = self.argument_reader(self.closers)
        yield from self._take_json(reader, are_arguments=True)
        if reader.depth <= 0 and is_json(reader.text):  # otherwise a mark that ends calls has cut them off
            self.whole_calls += 1
        if self.format.keys is not None:
            yield from self._take_json(JsonReader(self.closers, depth=1))
        return True

    def _take_json(self, reader: JsonReader, are_arguments: bool = False) -> Iterator[None]:
        while not reader.is_complete:
            at, text = reader.read(self.text, 0, self.ended)
            self._take(at)
            if are_arguments:
                self._add_arguments(text)
            if not reader.is_complete:
                yield from self._more()

    # ------------------------------------------------------------ arguments one by one

    def _parameter_marks(self) -> tuple[str, ...]:
        """The mark before an argument, and the marks that end a call."""
        return (self.format.parameters.before.strip(), *self.closers)

    def _read_parameters(self, types: Mapping[str, Types]) -> Iterator[None]:
        """Read arguments, and the mark that ends the call. Other text between the marks is dropped.

        types: of the arguments.
        """
        marks = self._parameter_marks()
        separator = "{"
        while True:
            _, mark = self._take_until(marks)
            if not mark:
                yield from self._more()
            elif mark != marks[0]:
                break
            elif (key := (yield from self._read_key())) is not None:
                self._add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                separator = ", "
                yield from self._read_value(ValueText(types.get(key)))

        self._add_arguments("{}" if separator == "{" else "}")
        self.whole_calls += 1
        return True

    def _read_key(self) -> Iterator[None]:
        """Read the key of an argument, and what stands between it and the value. Returns None if there is no key."""
        parameters = self.format.parameters
        while True:
            key = re.match(parameters.key_pattern, self.text[:MAX_KEY])
            may_follow = len(self.text) < MAX_KEY
            if key is not None:  # the white space before the value may not be complete
                rest = self.text[key.end() :]
                may_follow = rest != parameters.space and parameters.space.startswith(rest)
            if self.ended or not may_follow:
                break
            yield

        if key is None:
            return None
        self._take(key.end())
        self.text = self.text.removeprefix(parameters.space)
        return key[1]

    def _read_value(self, value: ValueText) -> Iterator[None]:
        while True:
            before, mark = self._take_until(self.format.parameters.value_ends)
            self._add_arguments(value.add(before))
            if mark:
                break
            yield from self._more()
        self._add_arguments(value.end())

    # ------------------------------------------------------------ calls as in Python

    def _read_python_call(self) -> Iterator[None]:
        """Read a name, and arguments once they are complete."""
        while True:
            start = PYTHON_START.match(self.text)
            if start is None or start[2] or self.ended:
                break
            yield from self._more_of_call()
        if start is None or start[1] not in self.syntax.names:
            return self._refuse(0)

        self.held += self._take(start.start(2))
        call_end = CallEnd(self.closers[0])
        while (end := call_end.find(self.text)) is None and not self.ended:
            yield
        n = len(self.text) if end is None else end
        arguments = read_arguments(self.text[:n])
        if arguments is None:
            return self._refuse(n)
        return self._add_call(start[1], arguments, n)


def find_mark(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the marks begins, and the mark. If there is none, where one may begin, and ""."""
    found = [(text.find(mark), mark) for mark in marks if mark in text]
    return min(found, default=(start_of_partial(text, marks), ""))
