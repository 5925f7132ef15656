"""Reads JSON that a model writes, piece by piece, and makes it valid.

gemma_calls.py has a reader of the same kind for another notation.
"""

import json
import re

from server.parameters import refuse_constant
from text.tokenizer import start_of_partial


class JsonReader:
    """Finds the end of a JSON object that comes in pieces, by counting the brackets outside of strings.

    It makes valid JSON of what models often write instead: line breaks and other control characters in a
    string, a comma before a closing bracket, a backslash that begins no escape sequence.
    """

    # How a piece of text is mended, by the name of its group in the patterns.
    REPAIRS = {
        "control": lambda piece: json.dumps(piece)[1:-1],
        "backslash": lambda piece: piece * 2,
        "dropped": lambda piece: "",
    }
    QUOTE = '"'
    # What may stand in a string. A backslash matches once it is known what follows it.
    IN_STRING = re.compile(
        r"""(?P<quote>")|[^"\\\x00-\x1f]+|(?P<control>[\x00-\x1f])|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})"""
        r"""|\\(?=['\x00-\x1f])(?P<dropped>)|(?P<backslash>\\)(?=[^"\\/bfnrtu]|u[0-9a-fA-F]{0,3}[^0-9a-fA-F])"""
    )
    # The same outside of strings, for a comma.
    OUTSIDE = (
        r"""(?P<opening>[\[{])|(?P<closing>[\]}])"""
        r"""|,(?=\s{0,99}[}\]])(?P<dropped>)|,(?=\s{0,99}[^\s}\]]|\s{100})"""
    )
    OTHER = r"""[^",\[\]{}]"""  # the other characters outside of strings

    def __init__(self, closers: tuple[str, ...] = (), depth: int = 0):
        """closers: marks that end an object even if brackets are open, unless they stand in a string.

        depth: the number of open brackets.
        """
        self.marks = (*closers, self.QUOTE)
        self.depth = depth
        self.in_string = False
        self.is_complete = False  # the object or a closer was found
        self.text = ""  # what was read, as valid JSON
        marks = "|".join(map(re.escape, closers)) or "(?!)"
        quote = re.escape(self.QUOTE)
        self.outside = re.compile(
            rf"(?P<closer>{marks})|(?P<quote>{quote})|{self.OUTSIDE}|(?:(?!{marks}|{quote}){self.OTHER})+"
        )

    def read(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """Go on at text[at]. Returns where to go on next, and what was read, as valid JSON.

        What may be the beginning of a closer or a quote is left at the end of the text, unless `ended` says
        that nothing follows.
        """
        stop = len(text) if ended else start_of_partial(text, self.marks)
        pieces = []
        while not self.is_complete:
            match = (self.IN_STRING if self.in_string else self.outside).match(text, at, stop)
            if match is None:
                break
            kind = match.lastgroup
            self.is_complete = kind == "closer"
            if self.is_complete:
                break
            at = match.end()
            self.in_string ^= kind == "quote"
            self.depth += (kind == "opening") - (kind == "closing")
            self.is_complete = kind == "closing" and self.depth <= 0
            pieces.append(self.REPAIRS.get(kind, str)(match[0]))
        self.text += "".join(pieces)
        return at, "".join(pieces)


def is_json(text: str) -> bool:
    """Whether a text is valid JSON, however deep or long its values are."""
    try:
        json.loads(text, parse_constant=refuse_constant, parse_int=str)
        return True
    except ValueError:
        return False
    except RecursionError:
        return True
