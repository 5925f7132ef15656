"""Grammars that make a model write calls of tools that fit their schemas.

Read down: literal and text_until, expressions of a Lark grammar; ToolGrammar, the expressions for
calls; ArgumentRules, the rules for arguments that are not a JSON object. tools.py describes how a model
writes calls, and text/grammar.py how masks follow a grammar.
"""

import json
import re
from itertools import accumulate

from cli import UserError
from server.gemma_calls import QUOTE, gemma_key, gemma_text
from server.parameters import (
    MAX_DEPTH,
    STRING,
    follow,
    members_of,
    properties_of,
    types_of,
)
from server.python_calls import JSON_WORDS, KEYWORD
from server.tools import ID_PATTERN, PROBE_ID, Tool, ToolFormat
from text.grammar import schema_rule


def literal(text: str, special: dict[str, int]) -> str:
    """A text as an expression of a grammar. PROBE_ID stands for any id. Special
    tokens are named by their token ids, because text does not match them."""
    found = [name for name in special if name in text]
    names = sorted(found, key=len, reverse=True)  # a name may be the beginning of a longer one
    pattern = "|".join(map(re.escape, [*names, PROBE_ID]))
    expressions = {name: f"<[{special[name]}]>" for name in names}
    expressions[PROBE_ID] = f"/{ID_PATTERN}/"
    parts = [part for part in re.split(f"({pattern})", text) if part]
    return " ".join(expressions.get(part) or json.dumps(part) for part in parts)


def text_until(name: str, mark: str) -> str:
    """The rule for a text that ends with the first mark in it."""
    if "<[" in mark:  # a special token ends the text in any case, because TEXT does not match it
        return f"{name}: TEXT {mark}"
    return f"{name}[lazy]: TEXT {mark}"


class ToolGrammar:
    """Expressions of a Lark grammar for calls of tools, and the rules that they refer to. The rule
    TEXT is not among them."""

    def __init__(self, format: ToolFormat, tools: list[Tool], special: dict[str, int], several: bool):
        """special: from special_tokens. several: whether an answer may have more than one call."""
        self.format = format
        self.special = special
        self.several = several and format.between is not None

        middle = literal(format.middle, special)
        suffix = literal(format.suffix, special)
        calls = []
        rules = []
        texts: dict[str, str] = {}
        for i, tool in enumerate(tools):
            calls.append(f"{json.dumps(tool.name)} {middle} arguments_{i} {suffix}")
            if format.is_gemma:
                rules += GemmaRules(format, tool, special, texts).rules(i)
            elif format.is_python or format.parameters is not None:
                rules += ArgumentRules(format, tool, special, texts).rules(i)
            else:
                rule = schema_rule({"type": "object"} | tool.schema, lenient=not tool.strict)
                rules.append(f"arguments_{i}: {rule}")
        rules += [f"{name}: {text}" for text, name in texts.items()]
        self.rules = [f"call: {' | '.join(calls)}", *rules]

    def calls(self) -> str:
        """The expression of an answer's calls."""
        return self._calls_after(self.format.begin + self.format.prefix)

    def _calls_after(self, opening: str) -> str:
        """The expression of calls with `opening` before the first name."""
        parts = [literal(opening, self.special), "call"]
        if self.several:
            separator = literal(self.format.between + self.format.prefix, self.special)
            parts.append(f"({separator} call)*")
        parts.append(literal(self.format.end, self.special))
        return " ".join(parts)

    def text_with_calls(self) -> str:
        """The expression of any text in which everything after the mark of a call is a call."""
        marks = self.format.openers
        if marks == self.format.more_openers:  # an answer that begins with "{" is a call
            self.rules.append(r"no_call: /(\s*[^\s{](.|\n)*)?/")
            tags = "".join(f"({literal(mark, self.special)})? " for mark in marks)
            return f"(no_call | {tags}{self.calls()})"

        self.rules.append(text_until("text_and_mark", literal(marks[0], self.special)))
        opening = self.format.begin + self.format.prefix
        _, _, rest = opening.partition(marks[0])
        calls = f"text_and_mark {self._calls_after(rest)}"
        return f"(({calls})* TEXT)" if self.several else f"(TEXT | {calls})"


def named_arguments(schema: dict) -> tuple[dict, list, dict | bool]:
    """The schemas of the arguments that a tool's schema names, the names of the required ones, and
    the schema of any others."""
    top = follow(schema, schema)
    if not isinstance(top, dict):
        top = {}
    required = top.get("required")
    if not isinstance(required, list):
        required = []
    others = top.get("additionalProperties", {})
    properties = dict(properties_of(schema))
    for key in required:
        if isinstance(key, str):
            properties.setdefault(key, True if others is False else others)
    return properties, required, others


def value_rule(schema: dict | bool, root: dict, lenient: bool) -> str:
    """The rule for the JSON of an argument. root: the tool's schema, to which references lead."""
    text = json.dumps(schema)
    if '"$ref": "#' in text:
        whole = json.dumps({key: value for key, value in root.items() if key != "$id"})
        schema = json.loads(text.replace('"$ref": "#', '"$ref": "#/$defs/call'))
        schema["$defs"] = {"call": json.loads(whole.replace('"$ref": "#', '"$ref": "#/$defs/call'))}
    if isinstance(schema, dict) and "$schema" in root:
        schema = schema | {"$schema": root["$schema"]}
    return schema_rule(schema, lenient)


# ---------------------------------------------------------------- arguments that are not a JSON object

ANY_TEXT = r"(.|\n)*"
MAX_REPEATS = 10_000  # longer texts are not limited
PLAIN = {"type", "title", "description", "default", "examples"}  # keywords of a type and nothing more
JSON_TYPES = {"true": "boolean", "false": "boolean", "null": "null"}
ALL_TYPES = ("array", "boolean", "null", "number", "object", "string")
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class ArgumentRules:
    """The rules for a tool's arguments if they are written one by one, or as in Python: the properties of its schema
    in their order, of which optional ones may be missing, and then any others.

    Not enforced are the schema's keywords about the object as a whole, and if arguments are written one by one, a
    string's format. Values as in Python are written as JSON, which python_calls.py reads, too.
    """

    def __init__(self, format: ToolFormat, tool: Tool, special: dict[str, int], texts: dict[str, str]):
        """texts: gets the expressions of keys and values that are texts, each with the name of a rule for it.
        Several tools may share it."""
        self.tool = tool
        self.root = tool.schema
        self.is_python = format.is_python
        self.special = special
        self.texts = texts
        self.order = lambda item: 0  # what properties are sorted by
        self.named_key = json.dumps  # the expression of a key that the schema names
        self.separator = '", "'
        self.before_key = ""
        self.after_key = json.dumps("=")
        self.other_key = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"  # the key of an argument that the schema does not name
        if format.parameters is not None:
            self.separator = ""
            self.before_key = literal(format.parameters.before, special)
            self.after_key = literal(format.parameters.middle, special)
            self.other_key = r"/[\w.-]{1,64}/"
            self.end = format.parameters.after.strip()
            self.after = literal(format.parameters.after, special)

    def rules(self, number: int) -> list[str]:
        """The rule `arguments_NUMBER`, after the rules that it refers to. UserError if the name of an argument cannot
        be written."""
        rules: list[str] = []
        first = self._members(self.root, str(number), rules)
        return [*rules, f"arguments_{number}: {first}"]

    def _members(self, schema: dict, number: str, rules: list[str]) -> str:
        """The expression of the members of an object. rules: gets the rules that it refers to, with `number` in their
        names."""
        properties, required, others = named_arguments(schema)
        rest = json.dumps("")  # the rule for what follows an argument
        first = rest  # the same, if no argument has come
        if others is not False:
            named = "".join(f" & ~{json.dumps(key)}" for key in properties)
            key = self._name_of(f"{self.other_key}{named}")
            rules.append(f"other_{number}: {self._argument(key, others)}")
            rest = f"({self.separator} other_{number})*"
            first = f"(other_{number} {rest})?"

        properties = dict(sorted(properties.items(), key=self.order))
        for i, (key, value) in enumerate(reversed(properties.items())):
            if value is False:
                continue
            if self.is_python and not KEYWORD.fullmatch(key):
                place = f"{self.tool.place}.properties[{json.dumps(key[:60])}]"
                raise UserError(f"{place}: a call as in Python cannot have an argument of this name")
            here = f"{number}_{i}"
            is_required = key in required
            rules += [
                f"item_{here}: {self._argument(self.named_key(key), value)}",
                f"rest_{here}: ({self.separator} item_{here}){{{int(is_required)},1}} {rest}",
                f"first_{here}: item_{here} {rest}" + ("" if is_required else f" | {first}"),
            ]
            rest = f"rest_{here}"
            first = f"first_{here}"
        return first

    def _argument(self, key: str, schema: dict | bool) -> str:
        """The expression of an argument. Its key is a token of its own: the library does not tell
        tokens apart of which one is the beginning of another."""
        value = self._python_value(schema) if self.is_python else self._value(schema)
        return f"{self.before_key} {key} {self.after_key} ({value})"

    def _json(self, schema: dict | bool) -> str:
        return value_rule(schema, self.root, not self.tool.strict)

    def _python_value(self, schema: dict | bool) -> str:
        """The expression of a value as JSON, or if its schema has just a type, as a word of Python."""
        found = follow(schema, self.root)
        parts = [found]
        if isinstance(found, dict) and set(found) <= {"anyOf", *PLAIN}:
            parts = found.get("anyOf", parts)
        types: set[str] = set()
        for part in (follow(one, self.root) for one in parts):
            if isinstance(part, dict) and set(part) <= PLAIN:
                types |= types_of(part, self.root) or set(JSON_TYPES.values())
        words = [json.dumps(JSON_WORDS[word]) for word, kind in JSON_TYPES.items() if kind in types]
        return " | ".join([self._json(schema), *words])

    # ------------------------------------------------------------ arguments one by one

    def _name_of(self, text: str) -> str:
        """The name of the rule for the expression of a text."""
        return self.texts.setdefault(text, f"TEXT_{len(self.texts)}")

    def _value(self, schema, depth: int = 0) -> str:
        """The expression of a value and of the text after it."""
        schema = follow(schema, self.root)
        types = types_of(schema, self.root)
        if types is None or depth > MAX_DEPTH:
            return self._text({})
        members = members_of(schema)
        if members:
            return self._one_of(members)
        if "string" not in types:
            return f"{self._json(schema)} {self.after}"
        if types == STRING:
            return self._text(schema)

        # Any text fits a string beside other types, so only a choice of texts can be enforced.
        parts = schema.get("anyOf") or schema.get("oneOf") or []
        parts = [follow(part, self.root) for part in parts]
        for part in parts:
            part_types = types_of(part, self.root)
            if part_types is None or ("string" in part_types and not members_of(part)):
                return self._text({})
        values = [self._value(part, depth + 1) for part in parts]
        return f"({' | '.join(values)})" if values else self._text({})

    def _one_of(self, members: list) -> str:
        """One of the values of an enum, and the text after it."""
        texts = [one if isinstance(one, str) else json.dumps(one) for one in members]
        choices = [json.dumps(text) for text in texts if self.end not in text]
        if not choices:
            return self._text({})
        return f"({' | '.join(choices)}) {self.after}"

    def _text(self, schema: dict) -> str:
        """A string, and the text after it, which begins with the first mark."""
        conditions = [f"~(TEXT {json.dumps(self.end)} TEXT)"]
        if "minLength" in schema or "maxLength" in schema:
            low = min(schema.get("minLength", 0), MAX_REPEATS)
            high = schema.get("maxLength", MAX_REPEATS + 1)
            conditions.append(rf"/(.|\n){{{low},{high if high <= MAX_REPEATS else ''}}}/")
        pattern = whole_pattern(schema.get("pattern"))
        if pattern is not None:
            conditions.append(f"/{pattern}/")
        text = f"(TEXT & {' & '.join(conditions)})"
        if "<[" in self.after:  # a special token, which is not text
            return f"{self._name_of(text)} {self.after}"
        return self._name_of(f"{text} {self.after}")


class GemmaRules(ArgumentRules):
    """The rules for a tool's arguments as Gemma 4 writes them (gemma_calls.py). Every object is written like the
    arguments, but the order of its properties is alphabetical, as in the model's template.

    Not enforced are `format`, `prefixItems`, and the schema's keywords about an object as a whole. Of an enum, nothing
    else is looked at. Other keywords beside anyOf or allOf apply if a part does not have them.
    """

    def __init__(self, format: ToolFormat, tool: Tool, special: dict[str, int], texts: dict[str, str]):
        super().__init__(format, tool, special, texts)
        self.order = lambda item: item[0].lower()
        self.named_key = lambda key: literal(gemma_key(key), special)
        self.separator = '","'
        self.after_key = '":"'
        self.end = QUOTE
        self.after = literal(QUOTE, special)
        self.number = ""  # of the tool
        self.values: dict[str, str] = {}  # schema as JSON -> the name of the rule for such a value
        self.found: list[str] = []  # the rules of values

    def rules(self, number: int) -> list[str]:
        """The rule `arguments_NUMBER`, after the rules that it refers to."""
        self.number = str(number)
        try:
            expression = self._value(merged({}, follow(self.root, self.root)) | {"type": "object"})
        except RecursionError:
            raise UserError(f"{self.tool.place} is nested too deeply") from None
        return [*self.found, f"arguments_{number}: {expression}"]

    def _value(self, schema, depth: int = 0) -> str:
        """The name of the rule for a value. Schemas that refer to themselves have rules that do so."""
        schema = follow(schema, self.root)
        text = json.dumps(schema, sort_keys=True)
        if text not in self.values:
            name = f"value_{self.number}_{len(self.values)}"
            self.values[text] = name
            choices = self._choices({} if schema is True else schema, name)
            self.found.append(f"{name}: {' | '.join(choices)}")
        return self.values[text]

    def _choices(self, schema: dict, name: str) -> list[str]:
        """The expressions of the values that fit a schema. name: of the rule."""
        for part in schema.get("allOf", ()):
            schema = merged(schema, follow(part, self.root))
        members = members_of(schema)
        if members:
            return [literal(gemma_text(member), self.special) for member in members]
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                beside = {name: value for name, value in schema.items() if name not in (key, "allOf")}
                return [
                    self._value(merged(beside, follow(part, self.root))) for part in schema[key] if part is not False
                ]
        types = types_of({"type": schema.get("type")}, self.root) or ALL_TYPES
        return [self._of_type(kind, schema, name) for kind in sorted(types)]

    def _of_type(self, kind: str, schema: dict, name: str) -> str:
        """The expression of the values of a type that fit a schema."""
        if kind == "string":
            return f"{self.after} {self._text(schema)}"
        if kind == "object":
            return f'"{{" {self._members(schema, name, self.found)} "}}"'
        if kind != "array":
            return self._json({key: value for key, value in schema.items() if key in OF_NUMBERS} | {"type": kind})
        low = schema.get("minItems", 0)
        high = schema.get("maxItems", "")
        if schema.get("items") is False or high == 0:
            return '"[" "]"'
        items = schema.get("items", True)
        # A list is an old form of prefixItems, which is not enforced.
        item = self._value(items if isinstance(items, dict | bool) else True)
        more = "" if high == 1 else f'("," {item}){{{max(low - 1, 0)},{high and high - 1}}}'
        return f'"[" ({item} {more}){"" if low else "?"} "]"'


def merged(schema: dict, part: dict | bool) -> dict:
    """A schema for what fits two schemas: with the properties of both. Of other keywords, the part's count."""
    if not isinstance(part, dict):
        return schema
    required = {*schema.get("required", ()), *part.get("required", ())}
    properties = schema.get("properties", {}) | part.get("properties", {})
    return schema | part | {"properties": properties, "required": sorted(required)}


def whole_pattern(pattern) -> str | None:
    """A regular expression that matches whole texts, of one that is searched in them. None if
    there is no pattern, or if it has anchors elsewhere than at its ends."""
    if not isinstance(pattern, str):
        return None
    parts = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL)
    before = ANY_TEXT
    after = ANY_TEXT
    if parts[:1] == ["^"]:
        before = ""
        del parts[0]
    if parts[-1:] == ["$"]:
        after = ""
        del parts[-1]

    depths = accumulate((part == "(") - (part == ")") for part in parts)
    is_choice = ("|", 0) in zip(parts, depths) and before + after != ANY_TEXT * 2  # each choice would have its anchors
    if is_choice or not {"^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z"}.isdisjoint(parts):
        return None
    return f"{before}({escaped_pattern(''.join(parts))}){after}"


def escaped_pattern(pattern: str) -> str:
    """A regular expression as it may stand between slashes in a grammar."""
    escapes = {"/": r"\/", "\n": r"\n"}
    return re.sub(r"\\.|[/\n]", lambda part: escapes.get(part[0], part[0]), pattern, flags=re.DOTALL)
