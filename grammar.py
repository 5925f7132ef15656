"""Grammars: the tokens that may come next, so that an answer fits a JSON schema, a regular expression or any grammar.

Read down: Grammar, which follows one answer; GrammarTokenizer, which compiles grammars; GrammarThread, which does so
while the engine goes on; the sources of grammars. A grammar is written in the Lark dialect of llguidance, the library
that does the work (in requirements-serve.txt). It knows the bytes of every token, so the masks are exact: a token is
allowed only if the text with it can still be completed. (Where just one text can follow, only the tokens into which the
tokenizer would split it are allowed.) A request without a grammar does not need this file.

Source: https://github.com/guidance-ai/llguidance (docs/syntax.md, docs/json_schema.md).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from cli import UserError, first_line, printable
from config import Config
from tokenizer import Tokenizer

TOO_COMPLEX = "the grammar became too complex"  # the beginning of the error of a request whose grammar failed
MAX_SOURCE_BYTES = 1 << 18  # a longer grammar is refused before it is compiled, which takes up to 1 s for 256 KiB
# White space between the tokens of JSON: none, a space, or a line break and its indentation. Without a bound, a small
# model may write white space until its answer is cut off.
JSON_OPTIONS = {"whitespace_pattern": r"( |\n {0,40})?"}


class Grammar:
    """Follows one answer token by token, and says which tokens may come next. The engine calls `fill` and `accept`."""

    def __init__(self, matcher):
        self.matcher = matcher

    def fill(self, masks: Tensor, drafted: Sequence[int] = ()):
        """Write the masks of the next token and of those after each of the drafted tokens.

        masks (n,W) int32 on the CPU, n > len(drafted): bit i % 32 of masks[m, i // 32] says whether token i may follow
        drafted[:m]. After a drafted token that is not allowed, all tokens are allowed, as the draft is rejected there.
        """
        pointer, nbytes = masks.data_ptr(), 4 * masks.shape[1]
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
        """Add a token to the answer. Returns whether the answer is complete, so that no token may follow. Raises
        UserError if the grammar has become too complex for the library's limits."""
        if not self.matcher.consume_token(token):
            raise UserError(f"{TOO_COMPLEX}: {printable(self.matcher.get_error())}")
        return self.matcher.is_stopped()


class GrammarTokenizer:
    """Compiles grammars for the tokens of a model. Building it takes about a second for 150,000 tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        """vocab_size: that of the model's logits, which may be padded. end_ids: they may end a complete answer."""
        try:
            import llguidance
        except ImportError:
            raise UserError("JSON schemas and grammars need llguidance: pip install llguidance") from None
        if tokenizer.vocabulary is None:
            raise UserError(f"{tokenizer.path} has no tokenizer, which JSON schemas and grammars need")
        if not (end_ids := sorted(end_ids)):
            raise UserError(f"{tokenizer.path} has no end-of-text token, which JSON schemas and grammars need")
        self.llguidance = llguidance
        wrapper = llguidance.TokenizerWrapper(TokenBytes(tokenizer, vocab_size, end_ids))
        self.tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=end_ids)
        self.limits = llguidance.LLParserLimits(verbose_errors=False)  # messages without the whole grammar

    def compile(self, source: str) -> Grammar:
        """The grammar of a new answer; UserError if its source is invalid or too large. The library compiles without
        Python's lock, so this may run in a thread. Its bounds on time do not hold for all sources: a server first tries
        those of its clients in another process (server/constraints.py)."""
        if len(source) > MAX_SOURCE_BYTES:
            raise UserError(f"the grammar has {len(source)} bytes, at most {MAX_SOURCE_BYTES} are allowed")
        matcher = self.llguidance.LLMatcher(self.tokenizer, source, log_level=0, limits=self.limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some errors are found only now
        if matcher.is_error():
            error = printable(matcher.get_error())
            raise UserError("no text fits it" if error.startswith("NoExtension") else error)
        return Grammar(matcher)


class GrammarThread:
    """Compiles the grammars of requests in a thread, one after the other, while the engine goes on."""

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
        """(request, its grammar or a UserError) of those that were waiting and no longer are."""
        done = {request: future for request, future in self.pending.items() if future.done()}
        self.pending = {request: future for request, future in self.pending.items() if request not in done}
        return [(request, future.exception() or future.result()) for request, future in done.items()]


class TokenBytes:
    """A tokenizer as llguidance expects it. The bytes of special tokens begin with 0xFF, so that only their names in
    <angle brackets> match them, and no text does."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: list[int]):
        self.vocabulary, self.bos_token_id = tokenizer.vocabulary, tokenizer.bos_id
        self.eos_token_id = end_ids[0] if end_ids else vocab_size - 1
        self.special_token_ids = sorted(self.vocabulary.special_ids)
        names, special = self.vocabulary.tokens()[:vocab_size], self.vocabulary.special_ids
        self.tokens = [
            b"\xff" + (name or "").encode() if i in special else self.vocabulary.token_bytes(i)
            for i, name in enumerate(names)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        return self.vocabulary.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


# ---------------------------------------------------------------- sources


def schema_rule(schema: dict | bool, lenient: bool = False) -> str:
    """A JSON value that fits a JSON schema, as an expression in a Lark grammar. lenient: keywords that the library does
    not support are ignored, instead of refused."""
    options = JSON_OPTIONS | {"lenient": lenient} if isinstance(schema, dict) else {}
    return "%json " + json.dumps(schema | {"x-guidance": options} if options else schema)


def schema_source(schema: dict | bool) -> str:
    """The grammar of a JSON value that fits a JSON schema."""
    return f"start: {schema_rule(schema)}"


def regex_source(pattern: str) -> str:
    """The grammar of a text that matches a regular expression from its beginning to its end."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def choice_source(texts: list[str]) -> str:
    """The grammar of one of several texts."""
    return "start: " + " | ".join(map(json.dumps, texts))


def read_schema(path: Path, tokenizer: Tokenizer, config: Config, end_ids: Iterable[int]) -> Callable[[], Grammar]:
    """A function that returns a new grammar, of the JSON schema in a file, for each answer."""
    try:
        source = schema_source(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable JSON schema: {first_line(error)}") from None
    compiler = GrammarTokenizer(tokenizer, config.vocab_size, end_ids)

    def new() -> Grammar:
        try:
            return compiler.compile(source)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    return new
