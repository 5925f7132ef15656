"""Arguments that a model writes one by one, as plain text between marks, such as Qwen3.5's XML.

Read down: ParameterFormat, the texts around a key and its value; types_of, what a schema says about
a value; ValueText, which turns the text of a value into JSON while it comes.
"""

import json
import re
from dataclasses import dataclass

Types = frozenset[str] | None  # names of JSON's types; None: any type
STRING = frozenset({"string"})
# How templates write these values with Jinja's filter `string`.
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
JSON_SPACE = " \t\r\n"
MAX_DEPTH = 8  # schemas within a schema that types_of looks into


@dataclass(frozen=True)
class ParameterFormat:
    """How a model writes the arguments of a call that are not a JSON object.

    Each argument is written as

        before KEY middle VALUE after

    where a string is written as it is, and other values as JSON. For Qwen3.5, `before` is
    '<parameter=', `middle` '>\\n', and `after` '\\n</parameter>\\n'.
    """

    before: str
    middle: str
    after: str

    @property
    def space(self) -> str:
        """The white space between the mark that ends a key and the value."""
        return self.middle[len(self.middle.rstrip()) :]

    @property
    def value_ends(self) -> tuple[str, str]:
        """What ends a value: the text that the template writes, and its mark alone."""
        return self.after.rstrip(), self.after.strip()

    @property
    def key_pattern(self) -> str:
        """A regular expression for a key, which is its group, and the mark that ends the key."""
        return r"([^\n<]*?)" + spaced_pattern(self.middle)


def spaced_pattern(text: str) -> str:
    """A regular expression for a text with other white space, or none, between its words."""
    return r"\s*".join(map(re.escape, text.split()))


# ---------------------------------------------------------------- types


def types_of(schema, root: dict, depth: int = 0) -> Types:
    """The types of the values that a schema allows. root: the schema with its definitions."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list) and named and all(isinstance(name, str) for name in named):
        return frozenset(named)

    members = members_of(schema)
    if members:
        return frozenset(json_type(json.dumps(member)) for member in members)
    if "$ref" in schema:
        return types_of(follow(schema, root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and parts:
            found = [types_of(part, root, depth + 1) for part in parts]
            if key == "allOf":
                return next((types for types in found if types is not None), None)
            return None if None in found else frozenset().union(*found)
    return None


def members_of(schema: dict) -> list:
    """The values of enum or const; none if the schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    members = schema.get("enum")
    return members if isinstance(members, list) else []


def follow(schema, root: dict):
    """The schema that a schema refers to with a reference within `root`, such as #/$defs/name;
    without a reference itself. True, which allows anything, if there is none at this place."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        found = root
        for part in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name, True) if isinstance(found, dict) else True
        schema = found
    return True


def properties_of(schema: dict) -> dict:
    """The schemas of the arguments that a tool's schema names."""
    top = follow(schema, schema)
    properties = top.get("properties") if isinstance(top, dict) else None
    return properties if isinstance(properties, dict) else {}


def property_types(schema: dict) -> dict[str, Types]:
    """The types of the arguments that a tool's schema names."""
    return {key: types_of(value, schema) for key, value in properties_of(schema).items()}


# ---------------------------------------------------------------- values


class ValueText:
    """Turns the text of a value into JSON text. If the value can only be a string, its text need
    not wait for the end."""

    def __init__(self, types: Types):
        self.types = types
        self.held = ""  # text that was not written yet
        self.is_string = types == STRING
        self.is_open = False  # the quote before the string was written

    def add(self, text: str) -> str:
        self.held += text
        if self.types == {"string", "null"} and not self.is_open:
            self.is_string = not any(word.startswith(self.held) for word in ("null", "None"))
        if not self.is_string or not self.held:
            return ""

        piece = json.dumps(self.held, ensure_ascii=False)[1:-1]
        self.held = ""
        if not self.is_open:
            piece = '"' + piece
            self.is_open = True
        return piece

    def end(self) -> str:
        if self.is_open:
            return '"'
        return value_json(self.held, self.types)


def value_json(text: str, types: Types) -> str:
    """The JSON text of a value: a string, or other JSON if the text is JSON of a type that fits.

    A value that may not be a string is one nevertheless if its text is not JSON.
    """
    stripped = text.strip(JSON_SPACE)
    if types is not None:
        stripped = PYTHON_WORDS.get(stripped, stripped)
    kind = json_type(stripped)
    if kind in (None, "string") or not allows(types, kind):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def allows(types: Types, kind: str) -> bool:
    """Whether a value of this type is taken for JSON, and not for a string."""
    is_only_json = types is None or "string" not in types
    return is_only_json or kind in types or (kind == "integer" and "number" in types)


def refuse_constant(constant: str):
    """The argument parse_constant of json.loads: Python takes NaN and Infinity for JSON."""
    raise ValueError(f"{constant} is not JSON")


def json_type(text: str) -> str | None:
    """The name of the type of JSON text; None if the text is not JSON."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "null" if value is None else "object")
