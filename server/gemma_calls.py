"""Arguments as Gemma 4 writes them, such as {city:<|"|>Paris<|"|>,days:[1,2],at:{hour:9}}.

Read down: gemma_text, which writes them; GemmaReader, which turns them into JSON while they come.

Strings stand between two marks, and nothing in them is escaped, so a string cannot contain the mark. Keys are bare; a
key that could be taken for something else is written as a string, which is read, too. Numbers, true, false and null are
as in JSON.
"""

import json
import re

from server.json_reader import JsonReader
from server.parameters import PYTHON_WORDS

QUOTE = '<|"|>'  # a token of its own
# A key. Its length is limited, as in python_calls.py.
KEY = re.compile(r"""[^\s:,{}\[\]<>"'](?:[^:,{}\[\]<>"'\n]{0,198}[^\s:,{}\[\]<>"'])?""")


def gemma_text(value) -> str:
    """A JSON value as Gemma 4 writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{gemma_key(key)}:{gemma_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_text, value)) + "]"
    return QUOTE + value + QUOTE if isinstance(value, str) else json.dumps(value)


def gemma_key(key: str) -> str:
    return key if KEY.fullmatch(key) else gemma_text(key)


class GemmaReader(JsonReader):
    """Finds the end of a call's arguments, which come in pieces, and turns them into JSON. A trailing comma is left
    out, and the words may be Python's, as templates write None.

    What is not written as it should be stays as it is, so that the text is no JSON.
    """

    REPAIRS = JsonReader.REPAIRS | {
        "quote": lambda piece: '"',
        "key": lambda piece: json.dumps(piece, ensure_ascii=False),
        "word": lambda piece: PYTHON_WORDS.get(piece, piece),
        "text": lambda piece: json.dumps(piece.removesuffix(QUOTE), ensure_ascii=False),
    }
    QUOTE = QUOTE
    IN_STRING = re.compile(rf"""(?P<quote>{re.escape(QUOTE)})|[^<"\\\x00-\x1f]+|(?P<control>["\\\x00-\x1f])|<""")
    # A word is a key if a colon follows it. It is a string if the mark of its end follows: models
    # sometimes leave out the first mark. A word matches once it is known which of these it is. JSON's
    # quotes make the text invalid.
    OUTSIDE = (
        rf"""{JsonReader.OUTSIDE}|(?P<text>(?>{KEY.pattern}){re.escape(QUOTE)})(?=\s{{0,99}}[,}}\]])"""
        rf"""|(?>{KEY.pattern})(?!{re.escape(QUOTE)}\s{{0,99}}(?:[,}}\]]|\Z))"""
        r"""(?:(?=\s{0,99}:)(?P<key>)|(?=\s{0,99}[^\s:]|\s{100})(?P<word>))|(?P<control>["'])"""
    )
    OTHER = r"[\s:<>]"
