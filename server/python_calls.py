"""Arguments that a model writes as Python does, such as f(city="Paris", days=3) (LFM2).

Read down: python_arguments, which writes them; PythonArguments, which turns them into JSON while
they come; the JSON of words, numbers, tuples and escapes.

A value is a literal that JSON has, too. Words may also be those of JSON, such as true, and a tuple
becomes an array. Nothing is evaluated: the text of any other expression, such as x.y or {1, 2},
becomes a string. Open brackets are kept in a list, so no text is nested too deeply. A key that
cannot stand before "=" is written as **{"key": value}.
"""

import json
import re
from contextlib import suppress

from server.parameters import PYTHON_WORDS

JSON_WORDS = {json_word: word for word, json_word in PYTHON_WORDS.items()}
WORDS = PYTHON_WORDS | {word: word for word in JSON_WORDS}

# Each of these patterns has a bound, so that the text after which it cannot match any more is short.
KEYWORD = re.compile(r"([^\s=*,()\[\]{}\"'<>][^=,()\[\]{}\"'<>\n]{0,200}?)\s{0,9}=")
MERGED = re.compile(r"\*\*\s{0,9}\{")
SHORT_SPACE = re.compile(r"\s{0,99}")
ARGUMENT_START = rf"(?:\)|{MERGED.pattern}|{KEYWORD.pattern})"
MAX_KEYWORD = 220  # characters that KEYWORD or MERGED may match
ATOM = re.compile(r"[\w.+-]{1,4000}")  # a word or a number
MAX_ATOM = 4000  # characters; Python refuses to read JSON integers of more than 4300 digits
# An open brace, the first key of a dict or the first element of a set, and what follows it.
ELEMENT = r"""\"[^"\\]{0,200}"|'[^'\\]{0,200}'|[^"'()\[\]{},:\s][^"'()\[\]{},:]{0,200}"""
BRACE = re.compile(rf"\{{\s{{0,99}}({ELEMENT})?\s{{0,99}}([:,}}])")
MAX_BRACE = 410  # characters that BRACE may match
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.)|)", re.DOTALL)
MAX_ESCAPE = 10

NUMBER = re.compile(r"([+-]?)(?:([0-9][0-9_]*)(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]+)?")
SPACE = re.compile(r"\s*")
PLAIN_TEXT = re.compile(r"[^\"'\\]*")  # in a string
BASED_NUMBER = re.compile(r"[+-]?0[xXoObB][0-9a-fA-F_]{1,1000}")
WORDS_AND_SPACE = re.compile(r"[\w\s]+")
BEFORE_STRING = re.compile(r"(?:^|\W)[bfru]{0,2}$", re.IGNORECASE)  # it has no word but a prefix before it
MAX_PARENTHESES = 20  # in a tuple
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}
ESCAPED |= {"\\": "\\", "'": "'", '"': '"', "\n": "", "/": "/"}  # the last one is of JSON only
CLOSING = {"(": ")", "[": "]", "{": "}", "**": "}"}  # "**": a dict of further arguments

# ---------------------------------------------------------------- writing


def python_text(value) -> str:
    """A JSON value as a literal of Python. Strings are written as in JSON, which Python reads alike."""
    if isinstance(value, dict):
        items = [f"{python_text(key)}: {python_text(one)}" for key, one in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_text, value)) + "]"
    text = json.dumps(value, ensure_ascii=False)
    return JSON_WORDS.get(text, text)


def python_arguments(arguments: dict) -> str:
    """The arguments of a call, as they stand between its parentheses."""
    written = []
    for key, value in arguments.items():
        written.append(argument_start(key) + python_text(value) + argument_end(key))
    return ", ".join(written)


def argument_start(key: str) -> str:
    """The text before an argument's value."""
    return f"{key}=" if is_keyword(key) else f"**{{{python_text(key)}: "


def argument_end(key: str) -> str:
    """The text after an argument's value."""
    return "" if is_keyword(key) else "}"


def is_keyword(key: str) -> bool:
    found = KEYWORD.fullmatch(f"{key}=")
    return found is not None and found[1] == key


# ---------------------------------------------------------------- reading


class PythonArguments:
    """Turns the text after "f(" into the text of a JSON object, piece by piece.

    It is a state machine: `step` is the method for what comes next. It takes the text and a
    position, and returns the position after what it has read, or None if it needs more text.

    Models forget to escape quotes. So a quote ends a string only if a comma or a bracket follows
    that may stand there. In correct text, one always does.
    """

    def __init__(self, closers: tuple[str, ...]):
        """closers: marks that end a call even if brackets are open, unless they stand in a string."""
        self.closers = closers
        self.longest = max(map(len, closers), default=0)
        self.json = "{"  # the text that was not taken yet
        self.brackets = ["("]  # those that are open
        self.is_first = True  # nothing stands in the latest bracket of the JSON text yet
        self.is_complete = False
        self.is_broken = False  # what comes next is not an argument
        self.step = self._read_argument
        self.delimiter = ""  # of the current string
        self.after_string = self._read_separator
        self.expression = ""  # the text of the current value, if it is not a string, a list or a dict
        self.depth = 0  # of brackets that are open in the expression
        self.quote = ""  # of the string in the expression that is open
        self.has_comma = False  # inside of one bracket of the expression
        self.keywords = set()
        self.is_repeated = False  # the keyword of the current value was there before: the first value counts
        self.ended = False  # nothing follows the text

    def take_json(self) -> str:
        """The JSON text that is new."""
        taken = self.json
        self.json = ""
        return taken

    def read(self, text: str, ended: bool) -> tuple[int, bool]:
        """Read on. Returns how many characters were read, and whether the call ends there, or
        cannot be read further."""
        self.ended = ended
        at = 0
        while not self.is_complete and not self.is_broken:
            if self.step not in (self._read_string, self._read_expression):
                at = SPACE.match(text, at).end()
                closes = self._closes(text, at)
                if closes:
                    return at, True
                if closes is None or at == len(text):
                    return at, False
            after = self.step(text, at)
            if after is None:
                return at, False
            at = after
        return at, True

    def _closes(self, text: str, at: int) -> bool | None:
        """Whether the call ends here with a mark; None if more text is needed."""
        if any(text.startswith(mark, at) for mark in self.closers):
            return True
        rest = text[at : at + self.longest]
        is_partial = rest != "" and any(mark.startswith(rest) for mark in self.closers)
        return None if is_partial and not self.ended else False

    def _is_short(self, text: str, at: int, n: int) -> bool:
        """Whether there are fewer than n characters, and more may follow."""
        return len(text) - at < n and not self.ended

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    # ------------------------------------------------------------ items and brackets

    def _begin_item(self, text: str = ""):
        self.json += text if self.is_first else f", {text}"
        self.is_first = False

    def _open(self, bracket: str, text: str, step):
        self.brackets.append(bracket)
        self.json += text
        self.is_first = self.is_first if bracket == "**" else True
        self.step = step

    def _close(self, at: int) -> int:
        """Close the latest bracket with the character at this position."""
        bracket = self.brackets.pop()
        if bracket != "**":
            self.json += "}" if bracket == "(" else CLOSING[bracket]
            self.is_first = False
        self.is_complete = bracket == "("
        self.step = self._read_separator
        return at + 1

    def _read_argument(self, text: str, at: int) -> int | None:
        """Read a key and "=", or the end of the call."""
        if text[at] == ")":
            return self._close(at)
        merged = MERGED.match(text, at)
        if merged is not None:
            self._open("**", "", self._read_key)
            return merged.end()
        key = KEYWORD.match(text, at)
        if key is None:
            return None if self._is_short(text, at, MAX_KEYWORD) else self._break(at)
        if key[1] in self.keywords:
            self.is_repeated = True
            return self._begin_expression(key.end())
        self.keywords.add(key[1])
        self._begin_item(json.dumps(key[1], ensure_ascii=False) + ": ")
        self.step = self._read_value
        return key.end()

    def _read_key(self, text: str, at: int) -> int | None:
        """Read the key of a dict, or its end."""
        if text[at] == "}":
            return self._close(at)
        if text[at] in "\"'":
            return self._begin_string(text, at, self._read_colon)
        atom = ATOM.match(text, at)
        if atom is None:
            return self._break(at)
        if atom.end() == len(text):  # it may go on
            return None
        key = atom_json(atom[0]) or atom[0]  # as json.dumps writes the key 1 or None
        self._begin_item(json.dumps(key, ensure_ascii=False))
        self.step = self._read_colon
        return atom.end()

    def _read_colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._break(at)
        self.json += ": "
        self.step = self._read_value
        return at + 1

    def _read_element(self, text: str, at: int) -> int:
        """Read the end of a list, or go on to its next element."""
        if text[at] == "]":
            return self._close(at)
        self._begin_item()
        self.step = self._read_value
        return at

    def _read_value(self, text: str, at: int) -> int | None:
        char = text[at]
        if char in "\"'":
            return self._begin_string(text, at, self._read_separator)
        if char == "[":
            self._open(char, char, self._read_element)
            return at + 1
        if char != "{":
            return self._begin_expression(at)

        brace = BRACE.match(text, at)
        if brace is None and self._is_short(text, at, MAX_BRACE):
            return None
        if brace is not None and brace[1] and brace[2] != ":":  # a set
            return self._begin_expression(at)
        self._open(char, char, self._read_key)
        return at + 1

    def _read_separator(self, text: str, at: int) -> int:
        """Read the comma after an item, or the end of what it stands in."""
        bracket = self.brackets[-1]
        if text[at] == CLOSING[bracket]:
            return self._close(at)
        if text[at] != ",":
            return self._break(at)
        steps = {"(": self._read_argument, "[": self._read_element}
        self.step = steps.get(bracket, self._read_key)
        return at + 1

    # ------------------------------------------------------------ expressions

    def _begin_expression(self, at: int) -> int:
        self.expression = ""
        self.has_comma = False
        self.step = self._read_expression
        return at

    def _read_expression(self, text: str, at: int) -> int | None:
        """Read a value that is not a string, a list or a dict, up to the comma or bracket that ends it."""
        if at == len(text):
            return None
        if self.quote:
            return self._read_quoted(text, at)
        end = at + 1
        char = text[at]
        if words := WORDS_AND_SPACE.match(text, at):
            end = words.end()
        else:
            closes = self._closes(text, at)
            if closes is None:
                return None
            if closes or (self.depth == 0 and char in ",)]}"):
                return self._end_expression(at)
            if char in "([{":
                self.depth += 1
            if char in ")]}":
                self.depth -= 1
            self.has_comma = self.has_comma or (char == "," and self.depth == 1)
            if char in "\"'" and BEFORE_STRING.search(self.expression[-3:]):
                self.quote = char
        self.expression += text[at:end]
        return end

    def _read_quoted(self, text: str, at: int) -> int | None:
        """Read on in a string of an expression."""
        end = max(at + 1, PLAIN_TEXT.match(text, at).end())
        if text[at] == "\\":
            if self._is_short(text, at, 2):
                return None
            end = min(at + 2, len(text))
        elif text[at] == self.quote:
            self.quote = ""
        self.expression += text[at:end]
        return end

    def _end_expression(self, at: int) -> int:
        text = self.expression.strip()
        value = atom_json(text)
        if value is None and text[:1] == "(" and text[-1] == ")":
            value = parentheses_json(text, self.has_comma)
        if value is None:
            value = json.dumps(text, ensure_ascii=False)
        if not self.is_repeated:
            self.json += value
        self.is_repeated = False
        self.step = self._read_separator
        return at

    # ------------------------------------------------------------ strings

    def _begin_string(self, text: str, at: int, after) -> int | None:
        """Read the quote, or three of them, before a string. after: the step after the string."""
        quote = text[at]
        is_empty = text.startswith(quote * 2, at)
        if self._is_short(text, at, 2) or (is_empty and self._is_short(text, at, 3)):
            return None
        if after == self._read_colon:
            self._begin_item()
        self.json += '"'
        self.delimiter = quote * 3 if text.startswith(quote * 3, at) else quote
        self.after_string = after
        self.step = self._read_string
        return at + len(self.delimiter)

    def _read_string(self, text: str, at: int) -> int | None:
        end = PLAIN_TEXT.match(text, at).end()
        if end > at:
            return self._add_text(text, at, end)
        if at == len(text):
            return None
        if text[at] == "\\":
            if self._is_short(text, at, MAX_ESCAPE):
                return None
            escape = ESCAPE.match(text, at)
            self.json += escape_json(escape)
            return escape.end()

        if self.delimiter.startswith(text[at:]) and self._is_short(text, at, len(self.delimiter)):
            return None
        if not text.startswith(self.delimiter, at):
            return self._add_text(text, at, at + 1)
        end = at + len(self.delimiter)
        ends = self._string_ends(text, end)
        if ends is None:
            return None
        if not ends:
            return self._add_text(text, at, at + 1)
        self.json += '"'
        self.step = self.after_string
        return end

    def _string_ends(self, text: str, at: int) -> bool | None:
        """Whether what follows the quotes before this position may follow a string; None if more
        text is needed."""
        at = SHORT_SPACE.match(text, at).end()
        if at == len(text):
            return True if self.ended else None
        following = "," + CLOSING[self.brackets[-1]]
        if self.after_string == self._read_colon:
            following = ":"
        if text[at] in following:
            return True
        return self._closes(text, at)

    def _add_text(self, text: str, at: int, end: int) -> int:
        self.json += json.dumps(text[at:end], ensure_ascii=False)[1:-1]
        return end


# ---------------------------------------------------------------- words, numbers, tuples and escapes


def atom_json(text: str) -> str | None:
    """The JSON text of a word or a number; None if it is neither."""
    if len(text) > MAX_ATOM:
        return None
    if BASED_NUMBER.fullmatch(text):
        with suppress(ValueError):  # 0b12
            return str(int(text, 0))
    number = NUMBER.fullmatch(text)
    if number is None:
        return WORDS.get(text)
    sign, digits, fraction, only_fraction, exponent = number.groups(default="")
    whole = digits.replace("_", "").lstrip("0") or "0"
    fraction += only_fraction
    if fraction == ".":
        fraction = ".0"
    return sign.replace("+", "") + whole + fraction + exponent


def parentheses_json(text: str, has_comma: bool) -> str | None:
    """The JSON text of a tuple, or of a value in parentheses; None if it is neither, such as (1 + 2) * 3."""
    if text.count("(") > MAX_PARENTHESES:
        return None
    reader = PythonArguments(())
    reader.json = ""
    reader._open("[", "", reader._read_element)
    reader.read(text[1:-1] + "]", True)
    if reader.is_broken or reader.brackets != ["("]:
        return None
    values = reader.json.removesuffix("]")
    return f"[{values}]" if has_comma or not values else values


def escape_json(escape: re.Match) -> str:
    """The text of an escape in a string of JSON. An escape that Python does not know stays as it is."""
    *codes, octal, char = escape.groups()
    code = next((int(digits, 16) for digits in codes if digits), None)
    if octal:
        code = int(octal, 8)
    text = escape[0]
    if code is not None and code <= 0x10FFFF:
        text = chr(code)
    elif char is not None:
        text = ESCAPED.get(char, text)
    elif text == "\\":  # the answer ends here
        text = ""
    # JSON combines two surrogates, and text cannot have one of them alone.
    is_surrogate = code is not None and 0xD800 <= code < 0xE000
    return json.dumps(text, ensure_ascii=is_surrogate)[1:-1]
