"""Arguments that a model writes as Python does, such as f(city="Paris", days=3) (LFM2).

Read down: python_arguments, which writes them; CallEnd, which finds the end of a call while it comes;
read_arguments, which turns the arguments into JSON once they are complete.

A value is a literal that JSON has, too; a tuple becomes an array. `ast` reads it, after a few changes:
words may also be JSON's, such as true, strings may have line breaks, and a keyword may be any
name, such as from or first-name. Nothing is evaluated: with any other expression, it is no call.
"""

import ast
import json
import re

from server.parameters import PYTHON_WORDS

JSON_WORDS = {json_word: word for word, json_word in PYTHON_WORDS.items()}
JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*"|true|false|null')
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
# What matters to the end of a call. Whether quotes are three is known once other text follows.
CALL_PART = r"""\\.|"{3}|'{3}|["'](?=[^"']|..)|[()\[\]{}]"""
# A keyword. Its length is limited, so that the text after which it cannot match any more is short.
KEYWORD = re.compile(r"""[^\s=*,()\[\]{}"'<>](?:[^=,()\[\]{}"'<>\n]{0,200}[^\s=,()\[\]{}"'<>])?""")
SEPARATOR = r"(?=\s*[,:)\]}])"  # has to follow a number, so that operators cannot form long chains
# A part of arguments. The last one is no literal.
PART = re.compile(
    rf"""
    (?P<quote>\"{{3}}|'{{3}}|["'])(?P<text>(?:\\.|(?!(?P=quote))[^\\])*)(?P=quote)
    |(?<=[(,])\s*(?P<key>{KEYWORD.pattern})\s{{0,9}}=
    |[+-]?(?:\d\w*(?:\.\w*)?|\.\d\w*)(?:(?<=[eE])[+-]\d+)?{SEPARATOR}
    |(?:True|False|None|true|false|null){SEPARATOR}
    |(?P<other>[^\s,:()\[\]{{}}])
    """,
    re.DOTALL | re.VERBOSE,
)
# An escape in a string, or what has to become one. Python warns of other escapes than these.
ESCAPE = re.compile(
    r"""\\[\\'"abfnrtv\n]|\\(?:[0-3]|[4-7](?![0-7]{2}))|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}"""
    r"""|\\U(?:000[0-9a-fA-F]|0010)[0-9a-fA-F]{4}|\\/|[\\\n\r\0]"""
)
ESCAPED = {r"\/": "/", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\0": r"\x00"}
SURROGATE = re.compile("[\ud800-\udfff]")

# ---------------------------------------------------------------- writing


def python_text(value) -> str:
    """A JSON value as a literal of Python. Strings are written as in JSON, which Python reads alike."""
    text = json.dumps(value, ensure_ascii=False)
    return JSON_PART.sub(lambda part: JSON_WORDS.get(part[0], part[0]), text)


def python_arguments(arguments: dict) -> str:
    """The arguments of a call, as they stand between its parentheses."""
    return ", ".join(f"{key}={python_text(value)}" for key, value in arguments.items())


# ---------------------------------------------------------------- reading


class CallEnd:
    """Finds the end of a call, whose text grows, by counting the brackets outside of strings."""

    def __init__(self, mark: str):
        """mark: what ends a call even if brackets are open, unless it stands in a string."""
        self.mark = mark
        self.parts = re.compile(f"{CALL_PART}|{re.escape(mark)}", re.DOTALL)
        self.at = 0  # how far the text was read
        self.depth = 0  # of brackets that are open
        self.quote = ""  # of the string that is open

    def find(self, text: str) -> int | None:
        """The position after the call; None if its end has not come yet."""
        for part in self.parts.finditer(text, self.at):
            self.at = part.end()
            if self.quote:
                if part[0] == self.quote:
                    self.quote = ""
            elif part[0] == self.mark:
                return part.start()
            elif part[0][0] in "\"'":
                self.quote = part[0]
            elif part[0] in BRACKETS:
                self.depth += BRACKETS[part[0]]
                if self.depth == 0:
                    return self.at
        self.at = max(self.at, len(text) - len(self.mark))  # where a part may have begun
        return None


def read_arguments(text: str) -> str | None:
    """The JSON text of arguments, which are given with their parentheses; None if they are no literals."""
    try:
        literal = PART.sub(python_part, text)
        # As the dict {"a": 1}, because a keyword of Python, such as from, cannot be an argument's name.
        arguments = ast.literal_eval("{" + literal.removeprefix("(").removesuffix(")") + "}")
        if not text.endswith(")") or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite
        # JSON combines two surrogates, and text cannot have one of them alone.
        return json.dumps(arguments) if SURROGATE.search(written) else written
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def python_part(part: re.Match) -> str:
    """A part of arguments as Python has it in a dict."""
    if part["other"]:
        raise ValueError(f"{part['other']} begins no literal")
    if part["key"]:
        return json.dumps(part["key"], ensure_ascii=False) + ":"
    if part["quote"]:
        text = ESCAPE.sub(lambda escape: ESCAPED.get(escape[0], escape[0]), part["text"])
        return part["quote"] + text + part["quote"]
    return JSON_WORDS.get(part[0], part[0])
