"""Grammars of arguments that a model writes as Python does (python_calls.py).

Read down: PythonRules, the rules for the arguments of a tool: first those of calls and dicts, then
those of values. tool_grammars.py has the rules around them.

Objects, lists, choices and words have rules of their own, because Python writes True where JSON
writes true, and keys without quotes. Strings and numbers are as in JSON, so the library's rules for
schemas enforce their keywords. Strings without other conditions than a length may also have single
quotes. A part of a schema with other keywords, such as allOf, gets the library's rule as a whole: its
values are written as JSON, which python_calls.py reads, too.
"""

import json

from grammar import ANNOTATIONS, schema_rule
from server.parameters import DEFINITIONS, follow, json_type, members_of, properties_of
from server.python_calls import argument_end, argument_start, is_keyword, python_text

WORDS = {"null": '("None" | "null")', "boolean": '("True" | "true" | "False" | "false")'}
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
ANY_KINDS = ("null", "boolean", "number", "string", "array", "object")
# The keywords that have a rule here, by the type of the values; strings and numbers have any others.
OWN_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
}
# Keywords that do not matter for values of other types.
KEYWORDS = {
    "object": OWN_KEYWORDS["object"]
    | {"minProperties", "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties"},
    "array": OWN_KEYWORDS["array"] | {"prefixItems", "uniqueItems", "contains", "additionalItems"},
    "string": OWN_KEYWORDS["string"] | {"pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
MAX_LENGTH = 10_000  # longer strings have double quotes
SINGLE_QUOTED = r"""([^'\\\x00-\x1f\x7f]|\\['"\\nrt])"""  # a character
OTHER_KEYWORD = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}=/"  # an argument that the schema does not name
OTHER_KEY = r'/"[^"\\\x00-\x1f\x7f]{0,64}": /'  # of a dict
NOTHING = json.dumps("")


class PythonRules:
    """The rules for a tool's arguments: those that its schema names, in their order, of which those
    that are not required may be missing, and then any others.

    Not enforced are the schema's keywords about the object as a whole.
    """

    def __init__(self, schema: dict, number: int, lenient: bool):
        """number: the tool's, in the names of its rules. lenient: keywords that the library does not
        support are ignored."""
        self.root = schema
        self.number = number
        self.lenient = lenient
        self.rules: dict[str, str] = {}  # name -> expression
        self.names: dict[str, str] = {}  # JSON text of a schema -> the name of its rule
        top = follow(schema, schema)
        arguments = self._members(top if isinstance(top, dict) else {}, as_arguments=True)
        self.rules[f"arguments_{number}"] = arguments

    def lines(self) -> list[str]:
        return [f"{name}: {expression}" for name, expression in self.rules.items()]

    def _add(self, kind: str, expression: str) -> str:
        """Add a rule. Returns its name."""
        name = f"{kind}_{self.number}_{len(self.rules)}"
        self.rules[name] = expression
        return name

    # ------------------------------------------------------------ arguments and dicts

    def _members(self, schema: dict, as_arguments: bool) -> str:
        """The expression of a call's arguments, or of what stands between the brackets of a dict."""
        required = schema.get("required")
        if not isinstance(required, list):
            required = []
        others = schema.get("additionalProperties", True)
        properties = dict(properties_of(schema))
        for key in required:
            if isinstance(key, str):
                properties.setdefault(key, True if others is False else others)

        items = []
        for key, value in properties.items():
            if value is not False:
                start, end = member_marks(key, as_arguments)
                items.append((f"{start} {self.value(value)} {end}", key in required))
        other = None
        if others is not False:
            other = self._other_member(list(properties), others, as_arguments)
        return self._listed(items, other)

    def _other_member(self, named: list[str], schema, as_arguments: bool) -> str:
        """An argument or an item of a dict with any other key than those that the schema names."""
        key = OTHER_KEYWORD if as_arguments else OTHER_KEY
        for name in named:
            if not as_arguments:
                key += f" & ~{json.dumps(json.dumps(name, ensure_ascii=False) + ': ')}"
            elif is_keyword(name):
                key += f" & ~{json.dumps(name + '=')}"
        return f"{self._add('KEY', key)} {self.value(schema)}"

    def _listed(self, items: list[tuple[str, bool]], other: str | None) -> str:
        """Items, each with whether it is required, in their order and with commas between them. Then
        any number of others may follow."""
        following = NOTHING  # what follows some item
        first = NOTHING  # the same, if there is no item before
        if other is not None:
            following = f'(", " {other})*'
            first = f"({other} {following})?"
        for item, is_required in reversed(items):
            following = self._add("rest", following)
            with_item = f"{item} {following}"
            if is_required:
                first = with_item
                following = f'", " {with_item}'
            else:
                first = f"{with_item} | {self._add('first', first)}"
                following = f'(", " {item})? {following}'
        return first

    # ------------------------------------------------------------ values

    def value(self, schema) -> str:
        """The name of the rule for a value. A schema that refers to itself has one rule."""
        text = json.dumps(schema)
        if text not in self.names:
            self.names[text] = f"value_{self.number}_{len(self.names)}"
            self.rules[self.names[text]] = self._expression(schema)
        return self.names[text]

    def _expression(self, schema) -> str:
        if not isinstance(schema, dict):
            schema = {}
        keys = set(schema) - ANNOTATIONS
        if keys == {"$ref"}:
            return self.value(follow(schema, self.root))
        parts = schema.get("anyOf")
        if keys == {"anyOf"} and isinstance(parts, list) and parts:
            return " | ".join(self.value(part) for part in parts)
        members = members_of(schema)
        if members and (keys <= {"enum", "type"} or keys <= {"const", "type"}):
            return self._one_of(members, schema)
        if keys - {"type"}.union(*KEYWORDS.values()):
            return self._json(schema)

        kinds = schema.get("type", ANY_KINDS)
        if isinstance(kinds, str):
            kinds = [kinds]
        if not isinstance(kinds, list | tuple) or not all(kind in KINDS for kind in kinds):
            return self._json(schema)
        return " | ".join(self._typed(schema | {"type": kind}) for kind in kinds)

    def _json(self, schema: dict) -> str:
        """A value as the library's rule for the schema writes it."""
        definitions = {key: self.root[key] for key in DEFINITIONS if key in self.root}
        return schema_rule(definitions | schema, self.lenient)

    def _one_of(self, members: list, schema: dict) -> str:
        """One of the values of an enum that have the right type."""
        kinds = schema.get("type", KINDS)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        choices = []
        for member in members:
            text = json.dumps(member, ensure_ascii=False)
            kind = json_type(text)
            if kind not in kinds and not (kind == "integer" and "number" in kinds):
                continue
            choices += [text, python_text(member)]
            if kind == "string" and text[1:-1] == member and "'" not in member:
                choices.append(f"'{member}'")
        if not choices:
            return self._json(schema)
        return " | ".join(json.dumps(text) for text in dict.fromkeys(choices))

    def _typed(self, schema: dict) -> str:
        """A value of a schema with one type."""
        kind = schema["type"]
        keys = set(schema) - ANNOTATIONS - {"type"}
        for other, keywords in KEYWORDS.items():
            if other != kind:
                keys -= keywords
        if keys <= OWN_KEYWORDS.get(kind, set()):
            if kind in WORDS:
                return WORDS[kind]
            if kind == "object":
                return f'"{{" ({self._members(schema, as_arguments=False)}) "}}"'
            if kind == "array":
                return self._list(schema)
            if kind == "string":
                return self._string(schema)
        return self._json(schema)

    def _list(self, schema: dict) -> str:
        low = schema.get("minItems", 0)
        high = schema.get("maxItems")
        items = schema.get("items", True)
        sizes = (low, low if high is None else high)
        if not isinstance(items, dict) and items is not True:
            return self._json(schema)
        if not all(type(size) is int for size in sizes) or not 0 <= low <= sizes[1]:
            return self._json(schema)
        if high == 0:
            return '"[" "]"'

        value = self.value(items)
        most = "" if high is None else high - 1
        elements = f'{value} (", " {value}){{{max(low - 1, 0)},{most}}}'
        return f'"[" {elements} "]"' if low else f'"[" ({elements})? "]"'

    def _string(self, schema: dict) -> str:
        """A string that may have quotes of either kind."""
        low = schema.get("minLength", 0)
        high = schema.get("maxLength")
        sizes = (low, low if high is None else high)
        if not all(type(size) is int for size in sizes) or not 0 <= low <= sizes[1] <= MAX_LENGTH:
            return self._json(schema)
        most = "" if high is None else high
        single = f"/'{SINGLE_QUOTED}{{{low},{most}}}'/"
        return f"{self._json(schema)} | {self._add('SINGLE', single)}"


def member_marks(key: str, as_arguments: bool) -> tuple[str, str]:
    """The expressions before and after the value of an argument, or of an item of a dict."""
    if as_arguments:
        return json.dumps(argument_start(key)), json.dumps(argument_end(key))
    return json.dumps(json.dumps(key, ensure_ascii=False) + ": "), NOTHING
