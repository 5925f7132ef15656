"""Grammars: the tokens that may come next, so that an answer fits a JSON schema or a grammar.

Read down: Grammar, which follows one answer; ThinkingLimit, which does the same for the length of
its thoughts; GrammarTokenizer, which compiles grammars;
GrammarThread, which compiles them while the engine goes on; the sources of grammars;
fit_schema, which leaves out of a schema what the library does not support.

A grammar is written in the Lark dialect of llguidance, the library that does the work (in
requirements-serve.txt). It knows the bytes of every token, so the masks are exact: a token is
allowed only if the text with it can still be completed. (Where just one text can follow, only the
tokens into which the tokenizer would split it are allowed.) A request without a grammar does not
need this file.

Source: https://github.com/guidance-ai/llguidance (docs/syntax.md, docs/json_schema.md).
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from cli import UserError, first_line, printable
from config import Config
from text.tokenizer import ThoughtSearch, Tokenizer

NO_TEXT = "no text fits it"
TOO_COMPLEX = "the grammar became too complex"  # an error that begins so is not an internal one
# A longer grammar is refused before it is compiled. Compiling 256 KiB takes up to 1 s.
MAX_SOURCE_BYTES = 1 << 18
# White space between the tokens of JSON: none, a space, or a line break and its indentation.
# Without a bound, a small model may write white space until its answer is cut off.
JSON_OPTIONS = {"whitespace_pattern": r"( |\n {0,40})?"}
# Thoughts may go on for this many tokens until a character is complete: grammars need whole ones.
MAX_OVERRUN = 8
# The beginning of a character in UTF-8, at the end of a text.
CUT_CHARACTER = re.compile(rb"([\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z")
# Keywords whose values have schemas by name.
SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
ANNOTATIONS = {"title", "description", "default", "example", "examples", "$comment"}
ANNOTATIONS |= {"deprecated", "readOnly", "writeOnly"}


class Grammar:
    """Follows one answer token by token, and says which tokens may come next. The engine calls
    `fill` and `accept`."""

    def __init__(self, matcher):
        self.matcher = matcher

    def fill(self, masks: Tensor, drafted: Sequence[int] = ()):
        """Write the masks of the next token and of the token after each drafted token.

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

    search: ThoughtSearch
    tail: bytes = b""  # the latest bytes
    count: int = 0  # tokens of the thoughts
    forced: tuple[int, ...] = ()  # the tokens that must follow, because the budget is used up


class ThinkingLimit:
    """Ends thoughts that have reached their budget: then it allows just one token at a time, so that they
    spell the text that ends thoughts. The engine uses it as a Grammar, and it may have one itself,
    which the answer must fit, too."""

    def __init__(self, budget: ThinkingBudget, vocabulary, grammar: Grammar | None = None):
        """vocabulary: of a Tokenizer."""
        self.budget = budget
        self.vocabulary = vocabulary
        self.grammar = grammar
        self.state = self._limited(ThoughtState(ThoughtSearch(budget.marks, budget.begins_inside)))

    def fill(self, masks: Tensor, drafted: Sequence[int] = ()):
        """Write the masks of the next token and of the token after each drafted token, as Grammar.fill does."""
        if self.grammar is None:
            masks[: len(drafted) + 1] = -1
        else:
            self.grammar.fill(masks, drafted)

        state = self.state
        for m, token in enumerate((*drafted, None)):
            if state.forced:
                forced = state.forced[0]
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
        if state.forced:
            return state._replace(forced=state.forced[1:])
        if state.search.place == "answer":
            return state
        data = self.vocabulary.token_bytes(token)
        if token in self.vocabulary.special_ids:
            data = self.vocabulary.name(token).encode()
        search = copy(state.search)
        search.add(data.decode("latin-1"))  # a character a byte; all marks are ASCII
        count = state.count + (state.search.place == "thoughts")
        return self._limited(ThoughtState(search, (state.tail + data)[-4:], count))

    def _limited(self, state: ThoughtState) -> ThoughtState:
        """The same state, in which thoughts end here if they have reached their budget."""
        overrun = state.count - self.budget.tokens
        may_end = overrun >= MAX_OVERRUN or (overrun >= 0 and not CUT_CHARACTER.search(state.tail))
        if state.search.place != "thoughts" or not may_end:
            return state
        return ThoughtState(ThoughtSearch(None), forced=self.budget.end_ids)


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
            raise UserError(
                f"{tokenizer.path} has no end-of-text token among its {vocab_size} tokens ({named}), "
                "which JSON schemas and grammars need"
            )

        self.llguidance = llguidance
        wrapper = llguidance.TokenizerWrapper(tokens)
        self.tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=tokens.end_ids)
        # Its messages do not quote the whole grammar.
        self.limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile(self, source: str) -> Grammar:
        """The grammar of a new answer; UserError if its source is invalid or too large.

        The library compiles without Python's lock, so this may run in a thread. Its bounds on time
        do not hold for all sources: a server first tries its clients' grammars in another process
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
        """Forget a request, and do not compile its grammar unless that has begun. Returns whether the
        request was waiting for it."""
        future = self.pending.pop(request, None)
        if future is not None:
            future.cancel()
        return future is not None

    def finished(self) -> list[tuple]:
        """(request, its grammar or an exception) for each compilation that has ended since the
        last call."""
        done = [request for request, future in self.pending.items() if future.done()]
        futures = {request: self.pending.pop(request) for request in done}
        return [(request, future.exception() or future.result()) for request, future in futures.items()]


class TokenBytes:
    """A tokenizer as llguidance expects it.

    The bytes of special tokens, and of tokens that end an answer, begin with 0xFF, so that no text
    matches them. Only their names in <angle brackets> do.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        """There may be more tokens than the model has logits, or fewer, and end tokens that do not
        exist. None of them is used."""
        vocabulary = tokenizer.vocabulary
        names = [vocabulary.name(i) for i in range(vocab_size)]  # the masks have a bit for each logit
        self.vocabulary = vocabulary
        self.end_ids = sorted(i for i in set(end_ids) if 0 <= i < vocab_size and names[i])
        self.special_token_ids = sorted(i for i in vocabulary.special_ids if i < vocab_size)

        no_text = {*self.special_token_ids, *self.end_ids}
        self.tokens: list[bytes] = [
            b"\xff" + name.encode() if i in no_text else vocabulary.token_bytes(i) for i, name in enumerate(names)
        ]
        self.ids_of_bytes = {data: i for i, data in enumerate(self.tokens) if len(data) == 1}

        self.eos_token_id = self.end_ids[0] if self.end_ids else vocab_size - 1
        self.bos_token_id = None
        if tokenizer.bos_id is not None and tokenizer.bos_id < vocab_size:
            self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        ids = self.vocabulary.encode(text)
        if max(ids, default=0) >= len(self.tokens):  # the model has no logit for one of them
            parts = [bytes([byte]) for byte in text.encode()]
            ids = [self.ids_of_bytes[part] for part in parts if part in self.ids_of_bytes]
        return ids


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
    UserError if the library does not support the schema."""
    compiler = GrammarTokenizer(tokenizer, config.vocab_size, end_ids)
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
        _, lost = fit_schema(compiler, schema, strict=True)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable JSON schema: {first_line(error)}") from None
    if lost:
        raise UserError(f"{path}: {lost}")
    return lambda: compiler.compile(schema_source(schema))


# ---------------------------------------------------------------- what the library does not support


def refusal(compiler: GrammarTokenizer, source: str) -> str:
    """Why the library does not support a grammar; an empty text if it does."""
    try:
        compiler.compile(source)
    except (UserError, UnicodeEncodeError) as error:  # the latter for a lone surrogate
        text = str(error).partition("failed to compile JSON schema: ")[2] or str(error)
        text = re.split(r" \d+ \| ", text)[0]  # the place in the grammar follows
        if text.startswith("regex parse error"):
            text = text.rpartition(" error: ")[2]
        return text[:200]
    return ""


def fit_schema(
    compiler: GrammarTokenizer, schema: dict | bool, strict: bool, path: str = "$"
) -> tuple[dict | bool, str]:
    """A schema that the library supports; and what is not enforced of the given one, and why.

    Where the library refuses the given schema, keywords that it refuses alone are left out. If it
    refuses the schema even so, only the type at its top is left. strict: the library may not ignore
    anything either, and if something is not enforced, the returned schema must not be used. path:
    of the schema, for the text. A hostile schema may take minutes, or end the process.
    """

    @cache
    def refused(rule: str) -> str:
        return refusal(compiler, f"start: {rule}")

    lenient = not strict
    lost: list[str] = []
    reason = refused(schema_rule(schema, lenient))
    if reason:
        schema = without_refused(schema, lambda alone: refused(schema_rule(alone, lenient)), path, lost)
        if strict and not lost:
            lost.append(f"{path}: {reason}")

    if not strict:
        reason = refused(schema_rule(schema, lenient))
        if reason:
            lost = [f"{path}, except for its type: {reason}"]
            kind = {"type": schema["type"]} if isinstance(schema, dict) and "type" in schema else {}
            schema = {} if refused(schema_rule(kind, lenient)) else kind
        grammar = compiler.compile(f"start: {schema_rule(schema, lenient)}")
        lost += [f"{path}: {ignored}" for ignored in grammar.matcher.get_grammar_warnings()]
    return schema, printable("; ".join(lost))


def without_refused(schema, refused: Callable[[dict], str], path: str, lost: list[str]):
    """A copy of a schema without annotations, and without the keywords that are refused alone.

    refused: says why a schema is refused. lost: gets the path of each such keyword, and the reason.
    """
    if isinstance(schema, list):
        return [without_refused(one, refused, f"{path}[{i}]", lost) for i, one in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        place = f"{path}.{key}"
        if key in ANNOTATIONS:
            continue
        if key in SUBSCHEMA_MAPS and isinstance(value, dict):
            kept[key] = {name: without_refused(one, refused, f"{place}.{name}", lost) for name, one in value.items()}
        elif isinstance(value, dict | list) and key not in ("const", "enum"):
            kept[key] = without_refused(value, refused, place, lost)
        else:
            reason = refused({name: schema[name] for name in ("type", key) if name in schema and key != "$ref"})
            if reason:
                lost.append(f"{place}: {reason}")
            else:
                kept[key] = value
    return kept
