"""Splits the text of an answer into thoughts, content and tool calls, while it is being generated.

Read down: the events; AnswerSyntax, what an answer may contain; AnswerParser; JsonScanner, which finds the end of a
JSON object. How a model writes calls is known from tools.py. This file knows nothing of requests and responses.

Models make mistakes, so the parser is lenient: text that is not a call of a known tool stays content. Whatever it
decides depends on the text alone, not on how the text was cut into pieces.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.tools import NAME_PATTERN, PROBE_ID, ToolFormat
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
    index: int  # among the calls of the answer
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments' JSON text."""

    index: int
    text: str


Event = Reasoning | Content | CallBegins | CallArguments
Fits = Callable[[str, str], bool]  # (name, arguments) of a call

# ---------------------------------------------------------------- the parser


@dataclass(frozen=True)
class AnswerSyntax:
    """What an answer may contain besides content."""

    thinking: tuple[str, str] | None = None  # the marks before and after thoughts
    begins_inside: bool = False  # the prompt ends with the first of these marks
    tools: ToolFormat | None = None  # how the model writes calls; None if it has no tools
    names: frozenset[str] = frozenset()  # of the tools
    max_calls: int | None = None  # text after this many calls is dropped
    # An answer that is one JSON object with a tool's name and arguments, or a code block with it, is a call, whatever
    # the model's format is. Small models do that.
    bare_calls: bool = True


FENCE = re.compile(r"```(?:json)?\s*")
CALL_KEYS = {"name", "arguments", "parameters", "type", "function", "id"}  # a call's object begins with one of them
MAX_NAME_AND_MIDDLE = 200  # characters


class AnswerParser:
    """Reads an answer in pieces. `add` and `end` return the events that are new.

    It is a state machine: `read` is the method for the current state. It takes what it can from `text`, sets `read` to
    the method for the next state, and returns False if it needs more text before it can go on.

    The answer ends before the first stop string in its content. Thoughts, calls and white space that is dropped are not
    searched, and neither is text across them.
    """

    def __init__(self, syntax: AnswerSyntax, stop: Iterable[str] = (), fits: Fits | None = None):
        """fits: whether a call without marks fits the answer's grammar; None: any does."""
        self.syntax, self.format = syntax, syntax.tools
        self.stops, self.fits = StopSearch(stop), fits
        self.text, self.ended = "", False  # text that was not read yet; whether it is the last
        self.events: list[Event] = []
        self.calls = self.whole_calls = 0  # the latter have complete arguments
        self.received = 0  # characters
        self.content_end = 0  # how many of them come before the end of the latest content
        self.space, self.is_blank = "", True  # white space that is held back; whether no other text came before it
        self.held = ""  # marks that have been read, and are content if no call follows
        self.in_array = self.is_closed = False  # within an array of calls; after the mark that ends calls
        self.is_bare = self.is_fenced = False  # the answer began with "{"; with a code block
        self.scanner, self.scanned = JsonScanner(), 0
        self.openers = self.format.openers if self.format else ()
        self.closers = self.format.closers if self.format else ()
        self.keys = (self.format and self.format.keys) or ("name", "arguments")
        # The beginning of a call's JSON object, up to where its arguments begin. The group is the name.
        arguments = "|".join(sorted({self.keys[1], "arguments", "parameters"}))
        self.call_start = re.compile(
            rf'\{{\s*"{self.keys[0]}"\s*:\s*"({NAME_PATTERN})"\s*,\s*"(?:{arguments})"\s*:\s*(?=\{{)'
        )
        self.read = self._read_answer
        if syntax.thinking is not None:
            self.read = self._read_thoughts if syntax.begins_inside else self._read_beginning

    def add(self, text: str) -> list[Event]:
        self.text += text
        self.received += len(text)
        return self._read_all()

    def end(self, is_cut: bool = False) -> list[Event]:
        """The events of the text that was held back, after the last piece. is_cut: the limit of tokens has ended the
        answer, so a call that has only just begun is no content."""
        self.ended = True
        before_call = (self._read_opening, self._read_name, self._read_object)
        if is_cut and self.read in before_call and not self.is_bare:
            self.text = self.held = self.space = ""
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
        """How many characters of the answer come before the stop string, or before text that may contain one."""
        if self.stops.stopped:
            return self.content_end - len(self.stops.held)
        return self.received - len(self.text) - len(self.held) - len(self.space) - len(self.stops.held)

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has calls, none of which is cut off."""
        return 0 < self.calls == self.whole_calls

    # ------------------------------------------------------------ thoughts and content

    def _read_beginning(self) -> bool:
        """The beginning of an answer, which may be the mark before its thoughts."""
        stripped, mark = self.text.lstrip(), self.syntax.thinking[0]
        if stripped.startswith(mark):
            self.text, self.read = stripped.removeprefix(mark), self._read_thoughts
            return True
        if mark.startswith(stripped) and not self.ended:
            return False
        self.read = self._read_answer
        return True

    def _read_thoughts(self) -> bool:
        before, mark = self._take_until(self.syntax.thinking[1:])
        self._emit(Reasoning, before)
        if mark:
            self.space, self.is_blank = "", True
            self.read = self._read_after_thoughts
        return bool(mark)

    def _read_after_thoughts(self) -> bool:
        self.text = self.text.lstrip()
        if self.text:
            self.read = self._read_answer
        return bool(self.text)

    def _read_answer(self) -> bool:
        """After the thoughts: content, unless it begins with a JSON object, which may be a call without marks."""
        self.read = self._read_content
        has_own_marks = self.format and self.openers != self.format.more_openers
        if self.format is None or (has_own_marks and not self.syntax.bare_calls):
            return True
        stripped = self.text.lstrip()
        fence = FENCE.match(stripped) if self.syntax.bare_calls else None
        before = fence[0] if fence else ""
        may_be_fence = self.syntax.bare_calls and "```json".startswith(stripped)
        if stripped == before or may_be_fence:
            if not self.ended:
                self.read = self._read_answer
            return self.ended
        if stripped.startswith("{", len(before)):
            start = len(self.text) - len(stripped) + len(before)
            self.held, self.text = self.text[:start], self.text[start:]
            self.is_bare, self.is_fenced = True, bool(before)
            self.read = self._read_whole_object if has_own_marks else self._read_object
        return True

    def _read_content(self) -> bool:
        before, mark = self._take_until(self.openers)
        self.held = mark
        self._emit(Content, before)
        if mark:
            self.in_array = self.is_closed = False
            self.is_bare = self.is_fenced = False
            self.read = self._read_name if self.format.keys is None else self._read_opening
        elif self.ended and self.space and not self.calls:
            space, self.space = self.space, ""
            self._add_content(space)
        return bool(mark)

    def _take_until(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """Take the text before the first of the marks, and the mark itself, which is "" if there is none. What may be
        the beginning of a mark is left."""
        at, mark = min(((self.text.find(mark), mark) for mark in marks if mark in self.text), default=(-1, ""))
        if not mark:
            at = len(self.text) if self.ended else start_of_partial(self.text, marks)
        before, self.text = self.text[:at], self.text[at + len(mark) :]
        return before, mark

    def _emit(self, kind: type, text: str):
        """Add thoughts or content. White space before them is held back, as it is dropped if nothing follows."""
        text, self.space = self.space + text, ""
        if self.is_blank and not text.strip() and (self.format is not None or kind is Reasoning):
            self.space = text
        elif text:
            self.is_blank = False
            if kind is Content:
                self._add_content(text)
            else:
                self.events.append(kind(text))

    def _add_content(self, text: str):
        """Add content, except what may be the beginning of a stop string."""
        self.content_end = self.received - len(self.text) - len(self.held)
        if text := self.stops.add(text):
            self.events.append(Content(text))

    def _release_content(self):
        """Add the content that was held back: the content ends here, or is interrupted by a call."""
        if text := self.stops.add("", last=True):
            self.events.append(Content(text))

    def _refuse(self, text: str) -> bool:
        """What looked like a call is content, up to the end of `text`, which has been taken."""
        self.read = self._read_content
        text, self.held = self.held + text, ""
        self._emit(Content, text)
        return True

    # ------------------------------------------------------------ calls

    def _read_opening(self) -> bool:
        """After a mark: an object, or an array of them."""
        stripped = self.text.lstrip()
        if not stripped and not self.ended:
            return False
        if not stripped.startswith("{") and (self.in_array or not stripped.startswith("[")):
            return self._refuse("")
        self.held += self.text[: len(self.text) - len(stripped)]
        self.text = stripped
        if stripped.startswith("["):
            self.held += "["
            self.in_array, self.text = True, stripped[1:]
            return True
        return self._begin_object()

    def _begin_object(self) -> bool:
        self.scanner, self.scanned = JsonScanner(0, self.closers), 0
        self.read = self._read_object
        return True

    def _read_object(self) -> bool:
        """A call as a JSON object. Its arguments are read piece by piece if the name is known before them."""
        start = self.call_start.match(self.text)
        if start is not None and start[1] in self.syntax.names:
            self.text = self.text[start.end() :]
            return self._begin_call(start[1])
        if self.is_bare and not self._may_be_call():
            return self._refuse(self._take(1))
        self.scanned, is_complete = self.scanner.scan(self.text, self.scanned, self.ended)
        if not is_complete and not self.ended:
            return False
        call = self._parse_call(self.text[: self.scanned]) if is_complete else None
        if call is None:
            return self._refuse(self._take(1 if self.is_bare else self.scanned))
        self.text = self.text[self.scanned :]
        self._begin_call(*call)
        return self._end_call()

    def _take(self, n: int) -> str:
        taken, self.text = self.text[:n], self.text[n:]
        return taken

    def _read_whole_object(self) -> bool:
        """An answer that is nothing but a call, which is not known before its end."""
        if not self._may_be_call():
            return self._refuse(self._take(1))
        is_complete = self.scanner.depth == 0 and self.scanned > 0
        if not is_complete:
            self.scanned, is_complete = self.scanner.scan(self.text, self.scanned, self.ended)
        rest = self.text[self.scanned :].strip()
        may_end = is_complete and rest in (("", "`", "``", "```") if self.is_fenced else ("",))
        if not self.ended and (may_end or not is_complete):
            return False
        ends = is_complete and rest in (("", "```") if self.is_fenced else ("",))
        call = self._parse_call(self.text[: self.scanned]) if ends else None
        if call is None or (self.fits is not None and not self.fits(*call)):
            return self._refuse(self._take(1))
        self._begin_call(*call)
        self.text, self.read = "", self._read_nothing
        return True

    def _may_be_call(self) -> bool:
        """Whether the object that begins here may still turn out to be a call. If not, its text need not wait."""
        first = re.match(r'\{\s*(?:"(\w*)(")?|\S)', self.text)
        if first is not None and (first[1] is None or (first[2] and first[1] not in {*CALL_KEYS, *self.keys})):
            return False
        name = re.match(rf'\{{\s*"{self.keys[0]}"\s*:\s*"([^"]*)"', self.text)
        return name is None or name[1] in self.syntax.names

    def _parse_call(self, text: str) -> tuple[str, str] | None:
        """(name, arguments as JSON text) of a complete object, or None if it is no call of a known tool."""
        try:
            value = json.loads(text)
            if isinstance(value, dict) and isinstance(value.get("function"), dict):
                value = value["function"]
            if not isinstance(value, dict):
                return None
            name = value.get(self.keys[0], value.get("name"))
            found = [value[key] for key in (self.keys[1], "arguments", "parameters") if key in value]
            arguments = found[0] if found else None if self.is_bare else {}
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            is_call = isinstance(name, str) and name in self.syntax.names and isinstance(arguments, dict)
            return (name, json.dumps(arguments, ensure_ascii=False)) if is_call else None
        except (ValueError, RecursionError):
            return None

    def _read_name(self) -> bool:
        """A name and what stands between it and its arguments, in formats whose calls are not JSON objects."""
        at = self.text.find("{")
        if at < 0 and len(self.text) <= MAX_NAME_AND_MIDDLE and not self.ended:
            return False
        middle = re.escape(self.format.middle.strip()).replace(PROBE_ID, r"\w*")
        name = re.fullmatch(rf"\s*({NAME_PATTERN})\s*{middle}\s*", self.text[: max(0, min(at, MAX_NAME_AND_MIDDLE))])
        if name is None or name[1] not in self.syntax.names or at > MAX_NAME_AND_MIDDLE:
            return self._refuse("")
        self.text = self.text[at:]
        return self._begin_call(name[1])

    def _begin_call(self, name: str, arguments: str = "") -> bool:
        """arguments: the whole JSON text, if it is known already."""
        self._release_content()
        if self.stops.stopped:  # what was held back before the call has a stop string
            return False

        self.space, self.is_blank = "", True
        self.held = ""
        self.events.append(CallBegins(self.calls, f"call_{secrets.token_hex(12)}", name))
        if arguments:
            self.events.append(CallArguments(self.calls, arguments))
            self.whole_calls += 1
        self.calls += 1
        self.scanner, self.read = JsonScanner(0, self.closers), self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        at, is_complete = self.scanner.scan(self.text, 0, self.ended)
        if at:
            self.events.append(CallArguments(self.calls - 1, self._take(at)))
        if is_complete and self.scanner.depth <= 0:  # else a mark that ends calls has cut them off
            self.whole_calls += 1
        if is_complete and self.format.keys is None:
            return self._end_call()
        if is_complete:
            self.scanner, self.read = JsonScanner(1, self.closers), self._read_rest_of_object
        return is_complete

    def _read_rest_of_object(self) -> bool:
        at, is_complete = self.scanner.scan(self.text, 0, self.ended)
        self._take(at)
        return self._end_call() if is_complete else False

    def _end_call(self) -> bool:
        is_last = self.calls == self.syntax.max_calls
        self.read = self._read_nothing if is_last else self._read_after_call
        return True

    def _read_after_call(self) -> bool:
        """Marks that end a call or all calls, or the next call of an array, or content."""
        stripped = self.text.lstrip()
        if not stripped:
            return False
        closers = (*self.closers, "```") if self.is_fenced else self.closers
        if closer := next((mark for mark in closers if stripped.startswith(mark)), None):
            self.text, self.is_closed = stripped.removeprefix(closer), True
        elif any(mark.startswith(stripped) for mark in closers):
            return False
        elif self.in_array and stripped[0] in ",]":
            self.text, self.in_array = stripped[1:], stripped[0] == ","
            self.is_closed = not self.in_array
        elif stripped[0] == "{" and self.format.keys is not None and not self.is_closed:
            self.text, self.is_bare = stripped, False
            return self._begin_object()
        else:
            self.read = self._read_content
        return True

    def _read_nothing(self) -> bool:
        self.text = ""
        return False


class JsonScanner:
    """Follows a JSON object to its end. It counts brackets outside of strings, and does not care whether the JSON is
    valid otherwise."""

    def __init__(self, depth: int = 0, closers: tuple[str, ...] = ()):
        """depth: of open brackets. closers: marks that end an object in any case, unless they stand in a string."""
        self.depth, self.closers = depth, closers
        self.longest = max(map(len, closers), default=0)
        self.in_string = self.is_escaped = False

    def scan(self, text: str, at: int, ended: bool) -> tuple[int, bool]:
        """Go on at text[at]. Returns where to go on, and whether the object ends there. A possible beginning of a
        closer at the end of the text is left, unless it is the last text."""
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
            self.depth += (char in "{[") - (char in "}]")
            if char in "}]" and self.depth <= 0:
                return at, True
        return at, False
