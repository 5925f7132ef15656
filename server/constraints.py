"""What an answer must fit: a JSON schema, a regular expression, a choice of texts, tool calls.

Read down: Constraint and read_constraint, which reads the fields of a request; answer_source, which
writes the grammar of a whole answer; GrammarChecker, which refuses schemas and grammars that the
engine could not use; run_apart, the process that tries them.
"""

import hashlib
import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from cli import UserError
from server.openai_requests import ANY_OBJECT, Answers, ResponseFormat
from server.request_fields import ApiError, log_once
from server.tool_grammars import ToolGrammar, escaped_pattern, literal, text_until
from server.tools import Tool
from text.grammar import GrammarTokenizer, check_size, fit_schema, refusal, schema_rule
from text.tokenizer import Tokenizer

MAX_RESULTS = 256  # tries that are remembered
MAX_QUICK_BYTES = 1 << 14  # of a grammar that compiles in a few ms, which may delay other requests
MAX_TRIES = 4  # grammars that are tried at the same time
TRY_WAIT_S = 10  # for a request to wait until its grammar can be tried
TRY_CPU_S = 2  # for the schemas of a request, or a grammar; schemas of 10 KB take some ms
TRY_TIME_S = 30  # the same, on a busy machine
# Less than the threads of the engine's process have, where the grammar is compiled again.
TRY_STACK_BYTES = 1 << 20
MAX_DESCRIPTORS = 1 << 16


@dataclass(frozen=True)
class Constraint:
    """What the content of an answer must fit."""

    kind: str  # "json", "regex" or "choice"
    value: dict | bool | str | list[str]  # the schema, the pattern or the texts
    param: str  # the field of the request that asks for it
    place: str  # the path of the schema in the request, for messages
    strict: bool = False  # False: what the library does not support is left out of the schema

    @property
    def rule(self) -> str:
        """The expression of a Lark grammar."""
        if self.kind == "regex":
            return f"/{escaped_pattern(self.value)}/"
        if self.kind == "choice":
            return f"({' | '.join(map(json.dumps, self.value))})"
        return schema_rule(self.value, lenient=not self.strict)


# Other servers' fields, each with the kind of its constraint.
KINDS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "json_schema": "json", "regex": "regex", "format": "json",
}  # fmt: skip


def read_constraint(request: Answers) -> Constraint | None:
    """The constraint that a request asks for; ApiError if it asks for several."""
    outputs = request.structured_outputs
    for name, value in outputs.model_extra.items():
        if value is not False:
            raise ApiError(f"structured_outputs.{name} is not supported", param="structured_outputs")

    asked = [("structured_outputs", "json", outputs.schema_), ("structured_outputs", "regex", outputs.regex)]
    asked.append(("structured_outputs", "choice", outputs.choice))
    if outputs.json_object:
        asked.append(("structured_outputs", "json", ANY_OBJECT))
    asked += [(name, kind, getattr(request, name)) for name, kind in KINDS.items()]
    found = [make_constraint(kind, value, name) for name, kind, value in asked if value is not None and value != ""]
    if request.response_format is not None and request.response_format.type != "text":
        found.insert(0, format_constraint(request.response_format))
    if len(found) > 1:
        params = [constraint.param for constraint in found]
        raise ApiError(f"an answer can fit only one of {' and '.join(params)}", param=params[1])
    return found[0] if found else None


def format_constraint(format: ResponseFormat) -> Constraint:
    """The constraint in OpenAI's field."""
    param = "response_format"
    named = format.json_schema
    if named is not None:
        return Constraint("json", named.schema_, param, f"{param}.json_schema.schema", named.strict)
    return make_constraint("json", {} if format.schema_ is None else format.schema_, param)


def make_constraint(kind: str, value, param: str) -> Constraint:
    """The constraint in another field. value: the value of the field `param`."""
    # An empty schema means any object there, as in llama-server.
    if value == "json" or (value == {} and param in ("json_schema", "format", "response_format")):
        value = ANY_OBJECT
    return Constraint(kind, value, param, param)


# ---------------------------------------------------------------- the grammar of an answer


def answer_source(
    constraint: Constraint | None,
    special: dict[str, int],
    tools: ToolGrammar | None = None,
    calls_required: bool = False,
    thinking: tuple[str, str] | None = None,
    begins_inside: bool = False,
) -> str:
    """The grammar of an answer, which may have thoughts, and then has content or calls.

    constraint: what the content must fit. special: the ids of the special tokens by their names.
    calls_required: whether the answer must be calls and not content. thinking: the marks around
    thoughts; None if the model has none, or if they are over. begins_inside: whether the prompt
    ends with the first mark.
    """
    if tools is None:
        answer = constraint.rule
    elif calls_required:
        answer = tools.calls()
    elif constraint is not None:
        answer = f"({tools.calls()} | {constraint.rule})"
    else:
        answer = tools.text_with_calls()

    rules = []
    if tools is not None:
        rules += tools.rules
    rules.append(r"TEXT: /(.|\n)*/")
    if thinking is not None:
        begin = literal(thinking[0], special)
        end = literal(thinking[1], special)
        rules += [text_until("text_and_end", end), r"thoughts: text_and_end /\n{0,2}/"]
        answer = f"thoughts {answer}" if begins_inside else f"({begin} thoughts)? {answer}"
    return "\n".join([f"start: {answer}", *rules])


class GrammarChecker:
    """Refuses schemas and grammars that do not compile, and leaves out of schemas that are not
    strict what the library does not support. Several threads, which parse requests, use it at the
    same time."""

    logged: set[str] = set()  # what is not enforced; shared by all models

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self.compiler: GrammarTokenizer | None = None  # made when first needed: it takes a second
        self.results: dict[bytes, str | list] = {}  # hash of what was tried -> what was found
        self.tries = threading.BoundedSemaphore(MAX_TRIES)

    def fit_constraint(self, constraint: Constraint | None) -> Constraint | None:
        """A constraint whose schema the library supports. ApiError if the given one is strict and
        not supported."""
        if constraint is None or constraint.kind != "json":
            return constraint
        (schema,) = self.fit([(constraint.value, constraint.strict, constraint.place)], constraint.param)
        return replace(constraint, value=schema)

    def fit_tools(self, tools: list[Tool]) -> list[Tool]:
        """Tools whose schemas the library supports. ApiError if the schema of a strict tool is not
        supported."""
        schemas = self.fit([(ANY_OBJECT | tool.schema, tool.strict, tool.place) for tool in tools], "tools")
        return [replace(tool, schema=schema) for tool, schema in zip(tools, schemas)]

    def fit(self, given: list[tuple[dict | bool, bool, str]], param: str) -> list[dict | bool]:
        """The schemas as fit_schema returns them, given as (schema, whether it is strict, its path). What is not
        enforced is logged, or if the schema is strict, an ApiError."""

        def work(compiler: GrammarTokenizer) -> list:
            return [fit_schema(compiler, *one) for one in given]

        try:
            found = self.tried(json.dumps(given), param, work)
        except RecursionError:
            raise ApiError(f"{param}: a schema is nested too deeply", param=param) from None
        except UserError as error:
            raise ApiError(f"{param}: the schema is not supported: {error}", param=param) from None
        for (_, strict, _), (_, lost) in zip(given, found):
            if lost and strict:
                raise ApiError(f"{param}: the schema is not supported: {lost}", param=param)
            if lost:
                log_once(self.logged, lost, f"the schema of a request is not enforced in full: {lost}")
        return [schema for schema, _ in found]

    def get_compiler(self, param: str) -> GrammarTokenizer:
        """The compiler of grammars. ApiError, which names the field, if the library is not
        installed, or if the model has no tokenizer."""
        try:
            if self.compiler is None:
                self.compiler = GrammarTokenizer(self.tokenizer, self.vocab_size, self.end_ids)
            return self.compiler
        except UserError as error:
            message = str(error).replace(f"{self.tokenizer.path} has", "the model has")
            raise ApiError(f"{param}: {message}", param=param) from None

    def tried(self, text: str, param: str, work: Callable[[GrammarTokenizer], str | list]) -> str | list:
        """What work(compiler) returns. It runs in another process, once for each text. UserError if it takes too
        long or too much memory."""
        compiler = self.get_compiler(param)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if key in self.results:
            return self.results[key]

        if not self.tries.acquire(timeout=TRY_WAIT_S):
            raise ApiError("too many schemas are being compiled", 503, code="overloaded", retry_after=TRY_WAIT_S)
        try:
            found = run_apart(lambda: work(compiler))
        finally:
            self.tries.release()
        if len(self.results) >= MAX_RESULTS:
            self.results.clear()
        self.results[key] = found
        return found

    def check(self, source: str, param: str, is_tried: bool = False):
        """Raise ApiError if a grammar is invalid, too large, or too complex.

        param: the field that it comes from. is_tried: whether `fit` has compiled the schema of this grammar, so that
        only its size is to be checked."""
        try:
            check_size(source)
            reason = "" if is_tried else self.tried(source, param, lambda compiler: refusal(compiler, source))
        except UserError as error:
            reason = str(error)
        if reason:
            raise ApiError(f"{param}: the grammar of the answer is not supported: {reason}", param=param)

    def accepts(self, source: str, text: str) -> bool:
        """Whether an answer may be this text and nothing more. `source` is a valid grammar. False
        if it takes long to compile, or if the text is no valid UTF-8."""
        if len(source) > MAX_QUICK_BYTES:
            return False
        matcher = self.compiler.compile(source).matcher
        try:
            ids = self.tokenizer.encode(text, add_bos=False)
        except UserError:
            return False
        return all(matcher.try_consume_tokens([i]) == 1 for i in ids) and matcher.is_accepting()


# ---------------------------------------------------------------- trying schemas and grammars


def run_apart(work: Callable[[], str | list]) -> str | list:
    """What a function returns; UserError if it does not come to its end.

    It runs in a forked process of bounded time. For some schemas of a few bytes, the library needs
    minutes in spite of its own limits, and others overflow the stack, which ends the process.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run_bounded(work, writer)
        finally:
            os._exit(0)  # without any of Python's cleanups
    os.close(writer)
    with open(reader, "rb") as pipe:
        sent = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not sent or status != 0:
        raise UserError("it is too complex to compile")
    return json.loads(sent)


def run_bounded(work: Callable[[], str | list], writer: int):
    """Run a function in the forked process, and write what it returns as JSON."""

    def run():
        with suppress(RecursionError), open(writer, "wb") as pipe:
            pipe.write(json.dumps(work()).encode())

    # Others, such as clients' sockets, would stay open as long as this process runs.
    os.closerange(3, writer)
    os.closerange(writer + 1, MAX_DESCRIPTORS)
    os.nice(5)  # the engine goes on
    signal.alarm(TRY_TIME_S)  # its signal ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRY_CPU_S, TRY_CPU_S))
    threading.stack_size(TRY_STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
