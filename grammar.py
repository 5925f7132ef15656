"""Grammars: the tokens that may come next, so that an answer fits a JSON schema or a grammar.

Read down: Grammar, which follows one answer; ThinkingLimit, which does the same for the length of
its thoughts; GrammarTokenizer, which compiles grammars;
GrammarThread, which compiles them while the engine goes on; the sources of grammars;
SchemaLoosener, which changes schemas that the library does not support.

A grammar is written in the Lark dialect of llguidance, the library that does the work (in
requirements-serve.txt). It knows the bytes of every token, so the masks are exact: a token is
allowed only if the text with it can still be completed. (Where just one text can follow, only the
tokens into which the tokenizer would split it are allowed.) A request without a grammar does not
need this file.

Source: https://github.com/guidance-ai/llguidance (docs/syntax.md, docs/json_schema.md).
"""

import codecs
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from torch import Tensor

from cli import UserError, first_line, printable
from config import Config
from tokenizer import Tokenizer

NO_TEXT = "no text fits it"
TOO_COMPLEX = "the grammar became too complex"  # an error that begins so is not an internal one
# A longer grammar is refused before it is compiled. Compiling 256 KiB takes up to 1 s.
MAX_SOURCE_BYTES = 1 << 18
# White space between the tokens of JSON: none, a space, or a line break and its indentation.
# Without a bound, a small model may write white space until its answer is cut off.
JSON_OPTIONS = {"whitespace_pattern": r"( |\n {0,40})?"}
# Thoughts may go on for this many tokens until a character is complete: grammars need whole ones.
MAX_OVERRUN = 8


class Grammar:
    """Follows one answer token by token, and says which tokens may come next. The engine calls
    `fill` and `accept`."""

    def __init__(self, matcher):
        self.matcher = matcher

    def fill(self, masks: Tensor, drafted: Sequence[int] = ()):
        """Write the masks of the next token and of those after each of the drafted tokens.

        masks (n,W) int32 on the CPU, n > len(drafted): bit i % 32 of masks[m, i // 32] says whether
        token i may follow drafted[:m]. After a drafted token that is not allowed, all tokens are
        allowed, because the draft is rejected there.
        """
        pointer = masks.data_ptr()
        nbytes = 4 * masks.shape[1]
        advanced = 0
        for token in (*drafted, None):
            self.matcher.unsafe_compute_mask_ptr(pointer + advanced * nbytes, nbytes)
            if token is None or not self.matcher.try_consume_tokens([token]):
                break
            advanced += 1

        if advanced < len(drafted):
            masks[advanced + 1 : len(drafted) + 1] = -1
        if advanced:
            self.matcher.rollback(advanced)

    def accept(self, token: int) -> bool:
        """Add a token to the answer. Returns whether the answer is complete, so that no token may
        follow. Raises UserError if the grammar has become too complex for the library's limits."""
        if not self.matcher.consume_token(token):
            raise UserError(f"{TOO_COMPLEX}: {printable(self.matcher.get_error())}")
        return self.matcher.is_stopped()


@dataclass(frozen=True)
class ThinkingBudget:
    """How long the thoughts of an answer may be, and how they end if they would be longer."""

    tokens: int
    marks: tuple[str, str]  # before and after thoughts
    end_ids: tuple[int, ...]  # the tokens of the text that ends them
    begins_inside: bool  # whether the prompt ends with the first mark


class ThoughtState(NamedTuple):
    """Where an answer stands after some of its tokens."""

    place: str  # "before", "inside" or "after" its thoughts, or "ending", within the forced text
    text: bytes  # the latest text, as far as it may be a part of a mark
    count: int  # tokens of the thoughts, or if the place is "ending" of the forced text


class ThinkingLimit:
    """Ends thoughts that have reached their budget: then it allows just one token at a time, those
    of the text that ends thoughts. The engine uses it as a Grammar, and it may have one itself,
    which the answer must fit, too."""

    def __init__(self, budget: ThinkingBudget, vocabulary, grammar: Grammar | None = None):
        """vocabulary: of a Tokenizer."""
        self.budget = budget
        self.vocabulary = vocabulary
        self.grammar = grammar
        self.state = ThoughtState("before", b"", 0)
        if budget.begins_inside:
            self.state = self._inside(b"", 0)

    def fill(self, masks: Tensor, drafted: Sequence[int] = ()):
        """Write the masks of the next token and of those after each of the drafted tokens, as
        Grammar.fill does."""
        if self.grammar is None:
            masks[: len(drafted) + 1] = -1
        else:
            self.grammar.fill(masks, drafted)

        state = self.state
        for m, token in enumerate((*drafted, None)):
            if state.place == "ending":
                forced = self.budget.end_ids[state.count]
                bit = 1 << forced % 32
                masks[m] = 0
                masks[m, forced // 32] = (bit ^ 1 << 31) - (1 << 31)  # as a signed number
                if token != forced:
                    break
            if token is not None:
                state = self._after(state, token)

    def accept(self, token: int) -> bool:
        """Add a token to the answer. Returns whether the answer is complete."""
        self.state = self._after(self.state, token)
        return self.grammar is not None and self.grammar.accept(token)

    def _after(self, state: ThoughtState, token: int) -> ThoughtState:
        """The state after one more token."""
        if state.place == "after":
            return state
        if state.place == "ending":
            is_last = state.count + 1 == len(self.budget.end_ids)
            return ThoughtState("after" if is_last else "ending", b"", state.count + 1)

        text = state.text + self._bytes(token)
        if state.place == "inside":
            return self._inside(text, state.count + 1)
        text = text.lstrip()
        begin = self.budget.marks[0].encode()
        if text.startswith(begin):
            return self._inside(text.removeprefix(begin), 0)
        return ThoughtState("before" if begin.startswith(text) else "after", text, 0)

    def _inside(self, text: bytes, count: int) -> ThoughtState:
        """The state within thoughts after `count` of their tokens, which end with this text."""
        end = self.budget.marks[1].encode()
        if end in text:
            return ThoughtState("after", b"", 0)
        overrun = count - self.budget.tokens
        if overrun >= MAX_OVERRUN or (overrun >= 0 and not ends_within_character(text)):
            return ThoughtState("ending", b"", 0)
        return ThoughtState("inside", text[-len(end) :], count)

    def _bytes(self, token: int) -> bytes:
        if token in self.vocabulary.special_ids:
            return self.vocabulary.name(token).encode()
        return self.vocabulary.token_bytes(token)


def ends_within_character(data: bytes) -> bool:
    """Whether the last bytes are the beginning of a character in UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0] != b""


class GrammarTokenizer:
    """Compiles grammars for the tokens of a model. It takes about a second to build for 150,000
    tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        """vocab_size: the number of the model's logits, which may be padded. end_ids: the tokens
        that may end a complete answer."""
        try:
            import llguidance
        except ImportError:
            raise UserError("JSON schemas and grammars need llguidance: pip install llguidance") from None

        if tokenizer.vocabulary is None:
            raise UserError(f"{tokenizer.path} has no tokenizer, which JSON schemas and grammars need")
        tokens = TokenBytes(tokenizer, vocab_size, end_ids)
        if not tokens.end_ids:
            named = ", ".join(map(str, sorted(end_ids))) or "none is named"
            missing = f"no end-of-text token among its {vocab_size} tokens ({named})"
            raise UserError(f"{tokenizer.path} has {missing}, which JSON schemas and grammars need")

        self.llguidance = llguidance
        wrapper = llguidance.TokenizerWrapper(tokens)
        self.tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=tokens.end_ids)
        # Its messages do not quote the whole grammar.
        self.limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile(self, source: str) -> Grammar:
        """The grammar of a new answer; UserError if its source is invalid or too large.

        The library compiles without Python's lock, so this may run in a thread. Its bounds on time
        do not hold for all sources: a server first tries those of its clients in another process
        (server/constraints.py).
        """
        check_size(source)
        matcher = self.llguidance.LLMatcher(self.tokenizer, source, log_level=0, limits=self.limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some errors are found only now
        if matcher.is_error():
            error = printable(matcher.get_error())
            if error.startswith("NoExtension"):
                error = NO_TEXT
            raise UserError(error)
        return Grammar(matcher)


def check_size(source: str):
    if len(source) > MAX_SOURCE_BYTES:
        raise UserError(f"the grammar has {len(source)} bytes, at most {MAX_SOURCE_BYTES} are allowed")


class GrammarThread:
    """Compiles grammars of requests in a thread, one after the other, while the engine goes on."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        """Arguments as for GrammarTokenizer, which the thread begins to build at once."""
        self.thread = ThreadPoolExecutor(1)
        self.tokenizer = self.thread.submit(GrammarTokenizer, tokenizer, vocab_size, end_ids)
        self.pending: dict[object, Future] = {}

    def add(self, request, source: str):
        """Compile a grammar for a request of any kind."""
        self.pending[request] = self.thread.submit(lambda: self.tokenizer.result().compile(source))

    def discard(self, request) -> bool:
        """Forget a request. Returns whether it was still waiting for its grammar."""
        return self.pending.pop(request, None) is not None

    def finished(self) -> list[tuple]:
        """(request, its grammar or an exception) for those whose compilation has ended since the
        last call."""
        done = [request for request, future in self.pending.items() if future.done()]
        futures = {request: self.pending.pop(request) for request in done}
        return [(request, future.exception() or future.result()) for request, future in futures.items()]


class TokenBytes:
    """A tokenizer as llguidance expects it.

    The bytes of special tokens, and of those that end an answer, begin with 0xFF, so that no text
    matches them. Only their names in <angle brackets> do.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        """There may be more tokens than the model has logits, or fewer, and end tokens that do not
        exist. None of them is used."""
        vocabulary = tokenizer.vocabulary
        names = vocabulary.tokens()[:vocab_size]
        # Where ids have gaps, some are larger than the number of tokens.
        names += [vocabulary.name(i) or None for i in range(len(names), vocab_size)]
        while names and names[-1] is None:
            names.pop()
        self.vocabulary = vocabulary
        self.end_ids = sorted(i for i in set(end_ids) if 0 <= i < len(names) and names[i] is not None)
        self.special_token_ids = sorted(i for i in vocabulary.special_ids if i < len(names))

        self.tokens: list[bytes] = []
        no_text = {*self.special_token_ids, *self.end_ids}
        for i, name in enumerate(names):
            if i in no_text:
                self.tokens.append(b"\xff" + (name or "").encode())
            else:
                self.tokens.append(vocabulary.token_bytes(i))
        self.tokens += [b""] * (vocab_size - len(names))  # the masks have a bit for each logit
        self.ids_of_bytes = {data: i for i, data in enumerate(self.tokens) if len(data) == 1}

        self.eos_token_id = self.end_ids[0] if self.end_ids else vocab_size - 1
        self.bos_token_id = None
        if tokenizer.bos_id is not None and tokenizer.bos_id < len(names):
            self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        ids = self.vocabulary.encode(text)
        if max(ids, default=0) < len(self.tokens):
            return ids
        return [known for i in ids for known in self.known_ids(i)]

    def known_ids(self, i: int) -> list[int]:
        """The token itself if the model has a logit for it, otherwise the tokens of its bytes."""
        if i < len(self.tokens):
            return [i]
        data = self.vocabulary.token_bytes(i)
        parts = [data[at : at + 1] for at in range(len(data))]
        return [self.ids_of_bytes[part] for part in parts if part in self.ids_of_bytes]


# ---------------------------------------------------------------- sources


def schema_rule(schema: dict | bool, lenient: bool = False) -> str:
    """A JSON value that fits a JSON schema, as an expression in a Lark grammar.

    lenient: keywords that the library does not support are ignored, instead of refused.
    """
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": JSON_OPTIONS | {"lenient": lenient}}
    return "%json " + json.dumps(schema)


def schema_source(schema: dict | bool) -> str:
    """The grammar of a JSON value that fits a JSON schema."""
    return f"start: {schema_rule(schema)}"


def read_schema(path: Path, tokenizer: Tokenizer, config: Config, end_ids: Iterable[int]) -> Callable[[], Grammar]:
    """A function that returns a new grammar for each answer, made from the JSON schema in a file.
    UserError if the library does not support a place of the schema."""
    compiler = GrammarTokenizer(tokenizer, config.vocab_size, end_ids)
    try:
        loosened = loosen_schema(compiler, json.loads(path.read_text(encoding="utf-8")), strict=True)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable JSON schema: {first_line(error)}") from None
    if loosened.places:
        place, reason = next(iter(loosened.places.items()))
        raise UserError(f"{path}: {place or 'the schema'}: {reason}")

    source = schema_source(loosened.schema)

    def new() -> Grammar:
        try:
            return compiler.compile(source)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    return new


# ---------------------------------------------------------------- schemas that the library does not support

# Keywords of the library whose values are a schema, a list of schemas, or an object of schemas.
SUBSCHEMA = ("items", "additionalItems", "additionalProperties")
SUBSCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SUBSCHEMAS = {*SUBSCHEMA, *SUBSCHEMA_LISTS, *SUBSCHEMA_MAPS}
ANNOTATIONS = {"title", "description", "default", "example", "examples", "$comment"}
ANNOTATIONS |= {"deprecated", "readOnly", "writeOnly"}
IDENTIFIERS = ("$schema", "$id", "id", "$anchor")
# Keywords that the library may refuse beside others, in the order in which they are left out.
COMBINED = ("minProperties", "maxProperties", "minLength", "maxLength", "format", "pattern")
COMBINED += ("multipleOf", "const", "enum")
# The bounds of numbers: -1 where lower values allow more, and 1 where higher ones do.
BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
EXACT = 2**53  # up to here, a float can hold every integer; the library computes with floats
DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06", "draft-04")
TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
BESIDE_REF = "what stands beside $ref"
EDITS = (BESIDE_REF, "oneOf", "allOf", "anyOf", "$ref")  # in the order in which they are left out
NO_FLOAT = "llguidance computes with floats, which cannot hold this number exactly"
NO_SCHEMA = "a schema must be an object, true or false"


class LoosenedSchema(NamedTuple):
    """A schema that allows at least what the given one allows, and where they differ."""

    # The given schema if the library supports it, or just ignores what it does not support.
    schema: dict | bool
    places: dict[str, str]  # the path of what is not supported -> the reason
    mistake: str = ""  # the path of a "type" that JSON Schema does not have


def loosen_schema(compiler: GrammarTokenizer, schema: dict | bool, strict: bool) -> LoosenedSchema:
    """A schema that the library supports, unless its parts are only too large or complex together.

    strict: the library may not ignore anything either, so there is a place for each keyword that it
    does not support. A schema that no document fits counts as supported. Trying its parts takes
    about 1 ms each; a hostile schema may take minutes, or end the process.
    """
    loosener = SchemaLoosener(compiler, strict)
    loosened = loosener.run(schema)
    if not loosener.is_changed:
        loosened = schema
    return LoosenedSchema(loosened, loosener.places, loosener.mistake)


class SchemaLoosener:
    """Finds the smallest parts of a schema that the library does not support, by trying them alone,
    and leaves them out or replaces them. It looks only at places of schemas, not at the values of
    `enum` or `default`."""

    def __init__(self, compiler: GrammarTokenizer, strict: bool):
        self.compiler = compiler
        self.strict = strict
        self.tried: dict[str, str] = {}  # the source of a grammar -> why it is not supported
        self.draft: dict[str, str] = {}  # the schema's own "$schema", which decides on the keywords
        self.places: dict[str, str] = {}
        self.mistake = ""
        self.is_changed = False  # whether there is a place that the library does not just ignore

    def run(self, schema: dict | bool) -> dict | bool:
        check_size(schema_source(schema))
        is_supported = not self.refusal(schema)
        nodes = [node for node, _ in subschemas(schema)]
        if is_supported and all(is_exact(key, node[key], node.get("type")) for node in nodes for key in node):
            return schema

        if isinstance(schema, dict) and "$schema" in schema:
            draft = {"$schema": schema["$schema"]}
            if not self.refusal(draft):
                self.draft = draft
        loosened = self.loosen(schema, "")
        if is_supported or not isinstance(loosened, dict):
            return loosened

        self.loosen_references(loosened)
        loosened = self.loosen_combinations(loosened)
        if not self.is_changed:  # an infinite default, for instance, is in none of the places
            self.is_changed = bool(self.refusal(schema, lenient=True))
        return loosened

    def refusal(self, schema: dict | bool, lenient: bool = False) -> str:
        """Why the library does not support a schema; an empty text if it does."""
        source = f"start: {schema_rule(schema, lenient)}"
        if source not in self.tried:
            reason = ""
            try:
                self.compiler.compile(source)
            except UserError as error:
                if "Unsatisfiable schema: " not in str(error) and NO_TEXT not in str(error):
                    reason = schema_reason(str(error))
            self.tried[source] = reason
        return self.tried[source]

    def add(self, path: str, reason: str, is_ignored: bool = False):
        """Add a place. is_ignored: the library itself ignores it in lenient grammars."""
        self.places.setdefault(path.lstrip("."), reason)
        self.is_changed = self.is_changed or not is_ignored

    # ------------------------------------------------------------ keywords

    def loosen(self, schema, path: str) -> dict | bool:
        """A copy of a schema without annotations, in which all keywords are supported alone, and
        next to those that do not contain schemas."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.add(path, NO_SCHEMA)
            return True

        kept: dict = {}
        for key, value in schema.items():
            place = join_path(path, key)
            if key in SUBSCHEMA_MAPS and isinstance(value, dict):
                kept[key] = {name: self.loosen(one, join_path(place, name)) for name, one in value.items()}
            elif key in SUBSCHEMA_LISTS and isinstance(value, list):
                kept[key] = [self.loosen(one, f"{place}[{i}]") for i, one in enumerate(value)]
            elif key in SUBSCHEMA and isinstance(value, dict | bool):
                kept[key] = self.loosen(value, place)
            elif key == "$ref" and isinstance(value, str):
                kept[key] = value
            elif key not in ANNOTATIONS:
                self.loosen_keyword(kept, schema, key, place)

        self.loosen_patterns(kept, path)
        self.loosen_neighbours(kept, path)
        return kept

    def loosen_keyword(self, kept: dict, schema: dict, key: str, place: str):
        """Put a keyword into `kept`, or what can be kept of it."""
        value = schema[key]
        types = {}
        if key != "type" and "type" in schema and not self.refusal({"type": schema["type"]}):
            types = {"type": schema["type"]}

        alone = self.draft | types | {key: value}
        reason = self.refusal(alone)
        is_ignored = bool(reason) and not self.refusal(alone, lenient=True)
        if not reason and not is_exact(key, value, types.get("type")):
            reason = NO_FLOAT
        if not reason:
            kept[key] = value
            return

        self.add(place, reason, is_ignored)
        if key == "type":
            self.mistake = self.mistake or place.lstrip(".")
        looser = next((one for one in looser_values(key, value) if not self.refusal(alone | {key: one})), None)
        if looser is not None:
            kept[key] = looser
        elif key in ("const", "enum") and not types:
            members = [value] if key == "const" else value
            if isinstance(members, list) and members:
                kept["type"] = sorted({TYPE_NAMES.get(type(one), "null") for one in members})

    def loosen_patterns(self, kept: dict, path: str):
        """Leave out patterns of properties that the library does not support, alone or together.
        Properties that match such a pattern then count as additional ones."""
        given = kept.get("patternProperties", {})
        patterns: dict = {}
        others = []
        for pattern, schema in given.items():
            together = {"patternProperties": dict.fromkeys([*patterns, pattern], True)}
            reason = self.refusal(self.draft | {"type": "object"} | together)
            if reason:
                self.add(join_path(join_path(path, "patternProperties"), pattern), reason)
                others.append(schema)
            else:
                patterns[pattern] = schema
        if not others:
            return

        kept["patternProperties"] = patterns
        additional = kept.get("additionalProperties", True)
        if additional is False:
            kept["additionalProperties"] = {"anyOf": others}
        elif additional is not True:
            kept["additionalProperties"] = {"anyOf": [additional, *others]}

    def loosen_neighbours(self, kept: dict, path: str):
        """Leave out keywords that the library does not support beside each other: one if that is
        enough."""
        others = (*SUBSCHEMAS, *IDENTIFIERS, "$ref")
        alone = self.draft | {key: value for key, value in kept.items() if key not in others}
        for key in ("properties", "patternProperties"):
            if key in kept:
                alone[key] = dict.fromkeys(kept[key], True)
        if kept.get("additionalProperties") is False:
            alone["additionalProperties"] = False
        reason = self.refusal(alone)
        if not reason:
            return

        keys = [key for key in COMBINED if key in alone]
        single = [key for key in keys if not self.refusal(edited(alone, key))]
        for key in single[:1] or keys:
            self.add(join_path(path, key), reason)
            del kept[key]
            del alone[key]
            if not self.refusal(alone):
                return

    # ------------------------------------------------------------ references and combinations

    def loosen_references(self, root: dict):
        """Leave out the references to what is not there."""
        nodes = [(schema, path) for schema, path in subschemas(root) if "$ref" in schema]
        if not self.refusal(skeleton(root, {schema["$ref"] for schema, _ in nodes}), lenient=True):
            return
        for schema, path in nodes:
            reference = schema["$ref"]
            reason = self.refusal(skeleton(root, {reference}), lenient=True)
            if not reason:
                continue
            self.add(join_path(path, "$ref"), reason)
            # A name may have spaces or <brackets>, which the library supports in this form.
            schema["$ref"] = quote(reference, safe="#/%:?&=~@!$'()*+,;")
            if schema["$ref"] == reference or self.refusal(skeleton(root, {schema["$ref"]}), lenient=True):
                del schema["$ref"]

    def loosen_combinations(self, root: dict) -> dict:
        """Leave out what the library supports, but not together: at first what stands beside
        references, which matters where they form a circle, and then the rest. Each of the places is
        needed."""
        lenient = not self.strict
        reason = self.refusal(root, lenient)
        if not reason:
            return root

        nodes = list(subschemas(root))
        edits = [(path, key) for key in EDITS for schema, path in nodes if edited(schema, key) != schema]
        chosen: list[tuple[str, str]] = []
        for edit in edits:
            chosen.append(edit)
            if not self.refusal(with_edits(root, chosen), lenient):
                break
        for edit in chosen[:-1]:
            fewer = [other for other in chosen if other != edit]
            if not self.refusal(with_edits(root, fewer), lenient):
                chosen = fewer

        for path, key in chosen:
            keyword = "$ref" if key == BESIDE_REF else key
            self.add(join_path(path, keyword), reason)
        return with_edits(root, chosen)


def join_path(path: str, key: str) -> str:
    """The path of a keyword or of a property, as JavaScript would write it."""
    if re.fullmatch(r"[$\w-]{1,60}", key):
        return f"{path}.{key}"
    return f"{path}[{json.dumps(key[:60])}]"


def schema_reason(error: str) -> str:
    """The reason in an error of the library, without its place in the grammar."""
    text = error.partition("failed to compile JSON schema: ")[2] or error
    text = re.split(r" \d+ \| ", text)[0]
    if text.startswith("regex parse error"):
        return text.rpartition(" error: ")[2]
    return text[:200]


def is_exact(key: str, value, types=None) -> bool:
    """Whether the library, for which all numbers are floats, allows exactly the numbers that a
    keyword allows. types: the value of "type" beside it."""
    if key in ("const", "enum"):
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return all(is_exact(key, one) for one in value)
        return type(value) is not int or is_float(value)

    if key not in BOUNDS or type(value) not in (int, float) or abs(value) <= EXACT:
        return True
    names = types if isinstance(types, list) else [types]
    is_integer = "integer" in names and "number" not in names
    if key == "maximum" and value == 2**63 - 1:
        return is_integer  # the library's largest integer
    return abs(value) < 2**63 and is_float(value) and not (is_integer and key.startswith("exclusive"))


def is_float(value: int | float) -> bool:
    """Whether a number is the value of a float."""
    return abs(value) <= EXACT or (abs(value) < 2**1023 and int(float(value)) == value)


def looser_values(key: str, value) -> Iterator:
    """Values of a keyword that allow as much as the given one, or a little more. The first is the
    best."""
    if key == "$schema" and isinstance(value, str):
        for draft in DRAFTS:
            if re.fullmatch(f"https?://json-schema.org/{draft}/schema[#/]*", value):
                scheme = "https" if "/" in draft else "http"
                yield f"{scheme}://json-schema.org/{draft}/schema"
    elif key in BOUNDS and type(value) in (int, float):
        more = BOUNDS[key]
        if abs(value) < 2**63:
            near = float(value)
            is_tighter = near < value if more > 0 else near > value
            if is_tighter:
                near = math.nextafter(near, more * math.inf)
            yield int(near)
        if value * more < 0:
            yield -more * EXACT
    elif type(value) is float and value.is_integer():
        yield int(value)


def subschemas(schema, path: str = "") -> Iterator[tuple[dict, str]]:
    """The schema and all schemas in it that are objects, with their paths."""
    if not isinstance(schema, dict):
        return
    yield schema, path
    for key, value in schema.items():
        place = join_path(path, key)
        if key in SUBSCHEMA_MAPS and isinstance(value, dict):
            for name, one in value.items():
                yield from subschemas(one, join_path(place, name))
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            for i, one in enumerate(value):
                yield from subschemas(one, f"{place}[{i}]")
        elif key in SUBSCHEMA:
            yield from subschemas(value, place)


def map_subschemas(schema, change: Callable, path: str = ""):
    """A copy of a schema: what change(schema, path) returns, with copies of the schemas in it."""
    if not isinstance(schema, dict):
        return schema
    copied = dict(change(schema, path))
    for key, value in copied.items():
        place = join_path(path, key)
        if key in SUBSCHEMA_MAPS and isinstance(value, dict):
            copied[key] = {name: map_subschemas(one, change, join_path(place, name)) for name, one in value.items()}
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            copied[key] = [map_subschemas(one, change, f"{place}[{i}]") for i, one in enumerate(value)]
        elif key in SUBSCHEMA:
            copied[key] = map_subschemas(value, change, place)
    return copied


def skeleton(root: dict, references: set[str]) -> dict:
    """A schema of only the keywords that contain schemas, and of these references."""

    def bare(schema: dict, path: str) -> dict:
        kept = {key: value for key, value in schema.items() if key in (*SUBSCHEMAS, *IDENTIFIERS)}
        if schema.get("$ref") in references:
            kept["$ref"] = schema["$ref"]
        return kept

    return map_subschemas(root, bare)


def edited(schema: dict, key: str) -> dict:
    """The schema without what stands beside its reference, or without a keyword."""
    if key == BESIDE_REF:
        outside = ("$ref", "$defs", "definitions", *IDENTIFIERS)
        return {name: value for name, value in schema.items() if name in outside or "$ref" not in schema}
    rest = {name: value for name, value in schema.items() if name != key}
    if key == "oneOf" and key in schema:
        rest["allOf"] = [*schema.get("allOf", []), {"anyOf": schema["oneOf"]}]
    return rest


def with_edits(root: dict, edits: list[tuple[str, str]]) -> dict:
    """A schema with the edits of some places, given as (path, key of `edited`)."""
    keys: dict[str, list[str]] = {}
    for path, key in edits:
        keys.setdefault(path, []).append(key)

    def change(schema: dict, path: str) -> dict:
        for key in keys.get(path, ()):
            schema = edited(schema, key)
        return schema

    return map_subschemas(root, change)
