"""Splits the text of an answer into thoughts, content and tool calls, while it is being generated.

Read down: the events; AnswerSyntax, what an answer may contain; AnswerParser; JsonScanner, which
finds the end of a JSON object. tools.py describes how a model writes calls. This file knows nothing
of requests and responses.

Models make mistakes, so the parser is lenient: text that is not a call of a known tool stays
content. The result depends on the text alone, not on the pieces in which it comes.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from server.parameters import Types, ValueText, refuse_constant
from server.python_calls import CallEnd, read_arguments
from server.tools import NAME_PATTERN, ToolFormat
from tokenizer import StopSearch, start_of_partial

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
    begins_inside: bool = False  # the prompt ends with the first of these marks
    tools: ToolFormat | None = None  # how the model writes calls; None if it has no tools
    names: frozenset[str] = frozenset()  # the names of the tools
    max_calls: int | None = None  # text after this many calls is dropped
    bare_calls: bool = True
    # name -> key -> the types of this argument, if arguments are written one by one
    types: Mapping[str, Mapping[str, Types]] = field(default_factory=dict)


FENCE = re.compile(r"(?:```(?:json)?\s*)?")  # the opening of a code block, or no text
CALL_KEYS = {"name", "arguments", "parameters", "type", "function", "id"}  # first keys of calls
MAX_NAME_AND_MIDDLE = 200  # characters
MAX_KEY = 300  # characters of a key and the mark after it
PIECE = 256  # characters that are read at once of what looks like a call within thoughts
# The beginning of a call that is written as in Python: a name, and what follows if it is there already.
PYTHON_START = re.compile(rf"({NAME_PATTERN})?\s{{0,99}}(\(|\Z)")


class AnswerParser:
    """Reads an answer in pieces. `add` and `end` return the events that are new.

    It is a state machine: `read` is the method for the current state. It takes what it can from
    `text`, sets `read` to the method for the next state, and returns False if it needs more text
    before it can go on.

    The answer ends before the first stop string in its content. Stop strings are not searched in
    thoughts, in calls or in white space that is dropped, nor across them.
    """

    def __init__(self, syntax: AnswerSyntax, stop: Iterable[str] = (), fits: Fits | None = None):
        """fits: whether a call without marks fits the answer's grammar; None: every call does."""
        self.syntax = syntax
        self.format = syntax.tools
        self.fits = fits
        self.stops = StopSearch(stop)
        self.events: list[Event] = []

        self.text = ""  # received, but not read yet
        self.ended = False  # nothing will follow `text`
        self.is_cut = False  # the limit of tokens has ended the answer
        self.received = 0  # characters
        self.content_end = 0  # characters up to the end of the latest content
        self.space = ""  # white space that is dropped if nothing but calls follows
        self.is_blank = True  # nothing but white space came since the last thoughts or call
        self.held = ""  # marks that have been read, but are content if no call follows

        self.calls = 0
        self.whole_calls = 0  # calls with complete arguments
        self.in_array = False  # within an array of calls
        self.is_closed = False  # after a mark that ends calls
        self.is_bare = False  # the answer began with a JSON object
        self.is_fenced = False  # the answer began with a code block
        self.scanner = JsonScanner()
        self.scanned = 0  # characters of `text` that the scanner has seen
        self.raw = ""  # the text of the current call
        self.arguments = JsonRepair()  # of the current call
        self.broken: dict[int, str] = {}  # index -> the text of a call whose arguments are not JSON
        self.types: Mapping[str, Types] = {}  # of the arguments of the current call
        self.value = ValueText(None)  # of the current argument
        self.is_first = True  # no argument of the current call has been read
        self.name = ""  # of the current call, if it is written as in Python
        self.call_end = CallEnd("")  # finds its end

        self.inner: AnswerParser | None = None  # reads what looks like a call within thoughts
        self.inner_events: list[Event] = []
        self.inner_seen = 0  # characters of `text` that `inner` has read

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
        # The beginning of a call's JSON object, up to its arguments. The group is the name.
        arguments = "|".join(sorted({self.keys[1], "arguments", "parameters"}))
        name = rf'\{{\s*"{self.keys[0]}"\s*:\s*"({NAME_PATTERN})"'
        self.call_start = re.compile(rf'{name}\s*,\s*"(?:{arguments})"\s*:\s*(?=\{{)')

        if syntax.thinking is None:
            self.read = self._read_answer
        elif syntax.begins_inside:
            self.read = self._read_thoughts
        else:
            self.read = self._read_beginning

    def add(self, text: str) -> list[Event]:
        self.text += text
        self.received += len(text)
        return self._read_all()

    def end(self, is_cut: bool = False) -> list[Event]:
        """The events of the text that was held back, after the last piece.

        is_cut: the limit of tokens has ended the answer, so a call that has just begun is dropped.
        """
        self.ended = True
        self.is_cut = is_cut
        before_call = (self._read_opening, self._read_name, self._read_object, self._read_python_call)
        if is_cut and self.read in before_call and not self.is_bare:
            self.text = ""
            self.held = ""
            self.space = ""
        return self._read_all()

    def _read_all(self) -> list[Event]:
        self.events = []
        while not self.stops.stopped and self.read():
            pass
        if self.ended:
            self._release_content()
        return self.events

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

    # ------------------------------------------------------------ thoughts and content

    def _read_beginning(self) -> bool:
        """Read the beginning of an answer, which may be the mark before its thoughts."""
        stripped = self.text.lstrip()
        mark = self.syntax.thinking[0]
        if stripped.startswith(mark):
            self.text = stripped.removeprefix(mark)
            self.read = self._read_thoughts
            return True
        if mark.startswith(stripped) and not self.ended:
            return False
        self.read = self._read_answer
        return True

    def _read_thoughts(self) -> bool:
        before, mark = self._take_until((*self.syntax.thinking[1:], *self.openers))
        self._emit(Reasoning, before)
        if not mark:
            return False
        if mark in self.openers:
            self.text = mark + self.text
            self.inner = AnswerParser(replace(self.syntax, thinking=None, bare_calls=False), fits=self.fits)
            self.inner_events = []
            self.inner_seen = 0
            self.read = self._read_call_in_thoughts
            return True
        return self._end_thoughts()

    def _read_call_in_thoughts(self) -> bool:
        """Read what looks like a call within thoughts. If the thoughts are closed after it, it is one of
        them. If the model ends its answer without closing them, it is a call."""
        if self.syntax.thinking[1] in self.text:
            before, _ = self._take_until(self.syntax.thinking[1:])
            self._emit(Reasoning, before)
            return self._end_thoughts()

        while self.inner_seen < len(self.text):
            if self.inner_events and not self.inner.calls:  # it is no call
                self._emit(Reasoning, self._take(1))
                self.read = self._read_thoughts
                return True
            piece = self.text[self.inner_seen :][:PIECE]
            self.inner_events += self.inner.add(piece)
            self.inner_seen += len(piece)
        if not self.ended:
            return False

        events = self.inner_events + self.inner.end(self.is_cut)
        self.inner.calls -= len(self.inner.broken)
        if self.is_cut or not self.inner.has_whole_calls:
            self._emit(Reasoning, self._take(1))
            self.read = self._read_thoughts
            return True
        self._take(len(self.text))
        for event in without_broken_calls(events, self.inner.broken):
            if isinstance(event, Content):
                self._emit(Reasoning, event.text)
            else:
                self.events.append(event)
        self.calls = self.inner.calls
        self.whole_calls = self.inner.whole_calls
        return False

    def _end_thoughts(self) -> bool:
        self._drop_space()
        self.read = self._read_after_thoughts
        return True

    def _read_after_thoughts(self) -> bool:
        self.text = self.text.lstrip()
        if not self.text:
            return False
        self.read = self._read_answer
        return True

    def _read_answer(self) -> bool:
        """Read the first text after the thoughts: content, or a JSON object that may be a call."""
        has_own_marks = self.format is not None and self.openers != self.format.more_openers
        if self.format is None or (has_own_marks and not self.syntax.bare_calls):
            self.read = self._read_content
            return True

        stripped = self.text.lstrip()
        fence = ""
        may_be_fence = False
        if self.syntax.bare_calls:
            fence = FENCE.match(stripped)[0]
            may_be_fence = "```json".startswith(stripped)
        if not self.ended and (stripped == fence or may_be_fence):
            return False

        if not stripped.startswith("{", len(fence)):
            self.read = self._read_content
            return True
        self.held = self._take(len(self.text) - len(stripped) + len(fence))
        self.is_bare = True
        self.is_fenced = fence != ""
        self.read = self._read_whole_object if has_own_marks else self._read_object
        return True

    def _read_content(self) -> bool:
        before, mark = self._take_until(self.openers)
        self.held = mark
        self._emit(Content, before)
        if mark:
            self.in_array = False
            self.is_closed = False
            self.is_bare = False
            self.is_fenced = False
            self.read = self._read_name if self.format.keys is None else self._read_opening
            return True
        if self.ended and self.space and not self.calls:
            self._add_content(self.space)
            self.space = ""
        return False

    def _take(self, n: int) -> str:
        """Take n characters from the text."""
        taken = self.text[:n]
        self.text = self.text[n:]
        return taken

    def _take_until(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """Take the text before the first of the marks, and the mark, which is "" if there is none.

        What may be the beginning of a mark is left.
        """
        found = [(self.text.find(mark), mark) for mark in marks if mark in self.text]
        at, mark = min(found, default=(len(self.text), ""))
        if not found and not self.ended:
            at = start_of_partial(self.text, marks)
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

    def _add_content(self, text: str):
        """Add content, except what may be the beginning of a stop string."""
        self.content_end = self.received - len(self.text) - len(self.held)
        text = self.stops.add(text)
        if text:
            self.events.append(Content(text))

    def _release_content(self):
        """Add the content that was held back, because it ends here, or is interrupted by a call."""
        text = self.stops.add("", last=True)
        if text:
            self.events.append(Content(text))

    def _refuse(self, taken: str) -> bool:
        """Add text that only looked like a call to the content: `held`, and `taken` after it."""
        text = self.held + taken
        self.held = ""
        self._emit(Content, text)
        self.read = self._read_content
        return True

    # ------------------------------------------------------------ calls

    def _read_opening(self) -> bool:
        """Read what follows a mark: an object or a call as in Python, or an array of these."""
        stripped = self.text.lstrip()
        if not stripped and not self.ended:
            return False
        begins_array = stripped.startswith("[") and not self.in_array
        begins_object = stripped.startswith("{")
        if not begins_object and not begins_array and not self.format.is_python:
            return self._refuse("")
        self.held += self._take(len(self.text) - len(stripped))
        if begins_array:
            self.held += self._take(1)
            self.in_array = True
            return True
        if begins_object:
            return self._begin_object()
        self.read = self._read_python_call
        return True

    def _begin_object(self) -> bool:
        self.scanner = JsonScanner(0, self.closers)
        self.scanned = 0
        self.read = self._read_object
        return True

    def _read_object(self) -> bool:
        """Read a call that is a JSON object.

        If its name comes before its arguments, these are read piece by piece.
        """
        start = self.call_start.match(self.text)
        if start is not None and start[1] in self.syntax.names:
            self.raw = self.held + self._take(start.end())
            return self._begin_call(start[1])
        if self.is_bare and not self._may_be_call():
            return self._refuse(self._take(1))
        self.scanned, is_complete = self.scanner.scan(self.text, self.scanned, self.ended)
        if not is_complete and not self.ended:
            return False

        call = self._parse_call(self.text[: self.scanned])
        if call is None:
            n = 1 if self.is_bare else self.scanned
            return self._refuse(self._take(n))
        self._take(self.scanned)
        self._begin_call(*call)
        return self._end_call()

    def _read_whole_object(self) -> bool:
        """Read an answer that is a call without marks and nothing else.

        Only the end of the answer tells whether it is one.
        """
        if not self._may_be_call():
            return self._refuse(self._take(1))
        is_complete = self.scanner.depth == 0 and self.scanned > 0
        if not is_complete:
            self.scanned, is_complete = self.scanner.scan(self.text, self.scanned, self.ended)
        rest = self.text[self.scanned :].strip()
        closing = "```" if self.is_fenced else ""
        may_be_call = not is_complete or closing.startswith(rest)
        if may_be_call and not self.ended:
            return False

        call = None
        if rest in ("", closing):
            call = self._parse_call(self.text[: self.scanned])
        if call is None or (self.fits is not None and not self.fits(*call)):
            return self._refuse(self._take(1))
        self._begin_call(*call)
        self.text = ""
        self.read = self._read_nothing
        return True

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

    def _parse_call(self, text: str) -> tuple[str, str] | None:
        """(name, arguments as JSON text) of an object; None if it is not a call of a known tool, or
        not complete."""
        try:
            value = json.loads(JsonRepair().add(text), parse_constant=refuse_constant)
            if isinstance(value, dict) and isinstance(value.get("function"), dict):
                value = value["function"]
            if not isinstance(value, dict):
                return None

            name = value.get(self.keys[0], value.get("name"))
            arguments = None if self.is_bare else {}
            for key in ("parameters", "arguments", self.keys[1]):  # the last one counts
                arguments = value.get(key, arguments)
            if isinstance(arguments, str):
                arguments = json.loads(JsonRepair().add(arguments))
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return None
            if name not in self.syntax.names:
                return None
            return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite
        except (ValueError, RecursionError):
            return None

    def _read_name(self) -> bool:
        """Read a name and the text up to its arguments, if calls are not JSON objects."""
        starts = ("{",)
        if self.format.parameters is not None:
            starts = self._parameter_marks()
        longest = MAX_NAME_AND_MIDDLE + max(map(len, starts))
        beginning = self.text[:longest]
        at = min((beginning.find(mark) for mark in starts if mark in beginning), default=-1)
        if at < 0 and len(self.text) < longest and not self.ended:
            return False

        name = None
        if 0 <= at <= MAX_NAME_AND_MIDDLE:
            name = re.fullmatch(self.format.call_start(self.held), self.text[:at])
        if name is None or name[1] not in self.syntax.names:
            return self._refuse("")
        self.raw = self.held + self._take(at)
        return self._begin_call(name[1])

    def _begin_call(self, name: str, arguments: str = "") -> bool:
        """Begin a call. arguments: the whole JSON text, if it is known already."""
        self._release_content()
        if self.stops.stopped:  # there is a stop string in the content that was held back
            return False

        self._drop_space()
        self.held = ""
        self.events.append(CallBegins(self.calls, f"call_{secrets.token_hex(12)}", name))
        if arguments:
            self.events.append(CallArguments(self.calls, arguments))
            self.whole_calls += 1
        self.calls += 1
        self.scanner = JsonScanner(0, self.closers)
        self.arguments = JsonRepair()
        self.read = self._read_arguments
        if self.format.parameters is not None:
            self.types = self.syntax.types.get(name, {})
            self.is_first = True
            self.read = self._read_parameter
        return True

    def _read_arguments(self) -> bool:
        at, is_complete = self.scanner.scan(self.text, 0, self.ended)
        taken = self._take(at)
        self.raw += taken
        self._add_arguments(self.arguments.add(taken))
        if not is_complete:
            return False

        if self.scanner.depth <= 0:  # otherwise a mark that ends calls has cut them off
            if self.arguments.is_valid():
                self.whole_calls += 1
            else:
                self.broken[self.calls - 1] = self.raw
        if self.format.keys is None:
            return self._end_call()
        self.scanner = JsonScanner(1, self.closers)
        self.read = self._read_rest_of_object
        return True

    def _read_rest_of_object(self) -> bool:
        at, is_complete = self.scanner.scan(self.text, 0, self.ended)
        self._add_to_broken_call(self._take(at))
        if not is_complete:
            return False
        return self._end_call()

    def _add_to_broken_call(self, text: str):
        if self.calls - 1 in self.broken:
            self.broken[self.calls - 1] += text

    # ------------------------------------------------------------ arguments one by one

    def _parameter_marks(self) -> tuple[str, ...]:
        """The mark before an argument, and those that end a call."""
        return (self.format.parameters.before.strip(), *self.closers)

    def _add_arguments(self, text: str):
        if text:
            self.events.append(CallArguments(self.calls - 1, text))

    def _read_parameter(self) -> bool:
        """Read up to the key of the next argument, or to the end of the call. Other text between
        the marks is dropped."""
        marks = self._parameter_marks()
        _, mark = self._take_until(marks)
        if not mark:
            return False
        if mark == marks[0]:
            self.read = self._read_key
            return True

        self._add_arguments("{}" if self.is_first else "}")
        self.whole_calls += 1
        return self._end_call()

    def _read_key(self) -> bool:
        parameters = self.format.parameters
        key = re.match(parameters.key_pattern, self.text[:MAX_KEY])
        if key is None and len(self.text) < MAX_KEY and not self.ended:
            return False
        if key is None:
            self.read = self._read_parameter
            return True

        # The white space before the value may not be complete.
        rest = self.text[key.end() :]
        if parameters.space.startswith(rest) and rest != parameters.space and not self.ended:
            return False
        self._take(key.end())
        self.text = self.text.removeprefix(parameters.space)
        separator = "{" if self.is_first else ", "
        self._add_arguments(f"{separator}{json.dumps(key[1], ensure_ascii=False)}: ")
        self.is_first = False
        self.value = ValueText(self.types.get(key[1]))
        self.read = self._read_value
        return True

    def _read_value(self) -> bool:
        before, mark = self._take_until(self.format.parameters.value_ends)
        self._add_arguments(self.value.add(before))
        if not mark:
            return False
        self._add_arguments(self.value.end())
        self.read = self._read_parameter
        return True

    # ------------------------------------------------------------ calls as in Python

    def _read_python_call(self) -> bool:
        """Read a name, up to the parenthesis before the arguments."""
        start = PYTHON_START.match(self.text)
        if start is not None and not start[2] and not self.ended:
            return False
        if start is None or start[1] not in self.syntax.names:
            return self._refuse("")
        self.held += self._take(start.start(2))
        self.name = start[1]
        self.call_end = CallEnd(self.closers[0])
        self.read = self._read_python_arguments
        return True

    def _read_python_arguments(self) -> bool:
        """Read arguments once they are complete."""
        end = self.call_end.find(self.text)
        if end is None and not self.ended:
            return False
        taken = self._take(len(self.text) if end is None else end)
        arguments = read_arguments(taken)
        if arguments is None:
            return self._refuse(taken)
        return self._begin_call(self.name, arguments) and self._end_call()

    def _end_call(self) -> bool:
        is_last = self.calls == self.syntax.max_calls
        self.read = self._read_nothing if is_last else self._read_after_call
        return True

    def _read_after_call(self) -> bool:
        """Read marks that end a call or all calls, the next call of an array, or content."""
        stripped = self.text.lstrip()
        if not stripped:
            return False
        closers = self.closers
        if self.is_fenced:
            closers += ("```",)

        closer = next((mark for mark in closers if stripped.startswith(mark)), None)
        if closer is not None:
            self._add_to_broken_call(self._take(len(self.text) - len(stripped) + len(closer)))
            self.is_closed = True
        elif any(mark.startswith(stripped) for mark in closers):
            return False
        elif self.in_array and stripped[0] in ",]":
            self.text = stripped[1:]
            self.in_array = stripped[0] == ","
            self.is_closed = not self.in_array
        elif stripped[0] == "{" and self.format.keys is not None and not self.is_closed:
            self.text = stripped
            self.is_bare = False
            return self._begin_object()
        elif self.format.is_python and not self.is_closed:
            self.held = self._take(len(self.text) - len(stripped))
            self.read = self._read_python_call
        else:
            self.read = self._read_content
        return True

    def _read_nothing(self) -> bool:
        self.text = ""
        return False


def without_broken_calls(events: list[Event], broken: dict[int, str]) -> list[Event]:
    """The events of a whole answer, with the calls in AnswerParser.broken as content."""
    kept = []
    indices = {}  # of the other calls: before, now
    for event in events:
        index = getattr(event, "index", None)
        if index is None:
            kept.append(event)
        elif index not in broken:
            indices.setdefault(index, len(indices))
            kept.append(replace(event, index=indices[index]))
        elif isinstance(event, CallBegins):
            kept.append(Content(broken[index]))
    return kept


class JsonRepair:
    """Makes valid JSON of what models often write instead: line breaks and other control characters
    in a string, a comma before a closing bracket, a backslash that begins no escape sequence.

    The text may come in pieces. What is not known to be valid yet is held back.
    """

    # What may stand in a string and outside of strings. A backslash or a comma matches once it is known
    # what follows it.
    IN_STRING = re.compile(
        r"""(?P<quote>")|[^"\\\x00-\x1f]+|(?P<control>[\x00-\x1f])|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})"""
        r"""|(?P<backslash>\\)(?=[^"\\/bfnrtu]|u[0-9a-fA-F]{0,3}[^0-9a-fA-F])"""
    )
    OUTSIDE = re.compile(r'(?P<quote>")|[^",]+|(?P<comma>,)(?=\s{0,99}[}\]])|,(?=\s{0,99}[^\s}\]]|\s{100})')

    def __init__(self):
        self.text = ""  # all that was returned
        self.in_string = False
        self.held = ""

    def add(self, text: str) -> str:
        text = self.held + text
        at = 0
        pieces = []
        while (match := (self.IN_STRING if self.in_string else self.OUTSIDE).match(text, at)) is not None:
            pieces.append(self._repaired(match.lastgroup, match[0], text[match.end() : match.end() + 1]))
            at = match.end()
        self.held = text[at:]
        self.text += "".join(pieces)
        return "".join(pieces)

    def _repaired(self, kind: str | None, piece: str, following: str) -> str:
        """A piece of the text as valid JSON. kind: the name of its group; None if it is valid."""
        self.in_string ^= kind == "quote"
        if kind == "control":
            return json.dumps(piece)[1:-1]
        if kind == "backslash":
            return "" if following == "'" or following < " " else r"\\"
        return "" if kind == "comma" else piece

    def is_valid(self) -> bool:
        """Whether the text so far is valid JSON, however deep or long its values are."""
        try:
            json.loads(self.text, parse_constant=refuse_constant, parse_int=str)
            return True
        except ValueError:
            return False
        except RecursionError:
            return True


class JsonScanner:
    """Finds the end of a JSON object by counting the brackets outside of strings. Whether the JSON
    is valid otherwise does not matter."""

    def __init__(self, depth: int = 0, closers: tuple[str, ...] = ()):
        """depth: the number of open brackets. closers: marks that end an object even if brackets
        are open, unless they stand in a string."""
        self.depth = depth
        self.closers = closers
        self.longest = max(map(len, closers), default=0)
        self.in_string = False
        self.is_escaped = False

    def scan(self, text: str, at: int, ended: bool) -> tuple[int, bool]:
        """Go on at text[at]. Returns where to go on next, and whether the object ends there.

        What may be the beginning of a closer is left at the end of the text, unless `ended` says
        that nothing follows.
        """
        while at < len(text):
            char = text[at]
            if self.in_string:
                self.in_string = self.is_escaped or char != '"'
                self.is_escaped = char == "\\" and not self.is_escaped
                at += 1
                continue

            if any(text.startswith(mark, at) for mark in self.closers):
                return at, True
            rest = text[at : at + self.longest]
            if not ended and rest and any(mark.startswith(rest) for mark in self.closers):
                return at, False

            at += 1
            self.in_string = char == '"'
            if char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return at, True
        return at, False
