"""What an answer must fit: a JSON schema, a regular expression, a choice of texts, tool calls.

Read down: Constraint and read_constraint, which reads the fields of a request; answer_source, which
writes the grammar of a whole answer; GrammarChecker, which loosens schemas that the library does
not support, and refuses grammars that the engine could not use; the process that tries them.

Sources: response_format is OpenAI's, with llama-server's schema beside the type json_object;
structured_outputs, and before it guided_json, guided_regex and guided_choice, are vLLM's;
json_schema is llama-server's, regex SGLang's, and format Ollama's.
"""

import hashlib
import json
import os
import resource
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from cli import UserError, printable
from grammar import (
    IDENTIFIERS,
    GrammarTokenizer,
    check_size,
    loosen_schema,
    schema_reason,
    schema_rule,
)
from server.request_fields import ApiError, FieldReader, log_once
from server.tool_grammars import ToolGrammar, literal, text_until
from server.tools import Tool
from tokenizer import Tokenizer

MAX_VALID = 256  # grammars that are remembered as valid
MAX_QUICK_BYTES = 1 << 14  # of a grammar that compiles in a few ms, which may delay other requests
MAX_DEATHS = 3  # of the processes that try the schemas of a request
MAX_TRIES = 4  # grammars that are tried at the same time
TRY_WAIT_S = 10  # for a request to wait until its grammar can be tried
TRY_CPU_S = 2  # for a grammar to compile; schemas of 10 KB take some ms
TRY_TIME_S = 30  # the same, on a busy machine
# Less than the threads of the engine's process have, where the grammar is compiled again.
TRY_STACK_BYTES = 1 << 20
NOT_COMPILED = "it is too complex to compile"
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class GivenSchema:
    """A JSON schema of a request."""

    schema: dict | bool
    strict: bool  # False: what the library does not support is left out
    param: str  # the field of the request that has it
    place: str  # its path in the request, for messages
    kind: str = "the schema"  # for messages
    # Whether an answer may fit another schema instead. Then the request is not refused for this one.
    is_optional: bool = False


@dataclass(frozen=True)
class Constraint:
    """What the content of an answer must fit."""

    rule: str  # an expression of a Lark grammar
    param: str  # the field of the request that asks for it
    kind: str  # for messages
    given: GivenSchema | None = None  # what the rule was made of


def read_constraint(fields: FieldReader) -> Constraint | None:
    """The constraint that a request asks for; ApiError if it is malformed, or one of several."""
    kinds = ("json", "regex", "choice")
    found = [read_response_format(fields.read("response_format", dict))]
    outputs = fields.read("structured_outputs", dict) or {}
    for name, value in outputs.items():
        if name not in (*kinds, "json_object") and value not in (None, False):
            raise ApiError(f"structured_outputs.{name} is not supported", param="structured_outputs")
    if outputs.get("json_object"):
        found.append(schema_constraint(ANY_OBJECT, "structured_outputs"))
    found += [make_constraint(kind, outputs.get(kind), "structured_outputs") for kind in kinds]
    for kind in kinds:
        field = f"guided_{kind}"
        found.append(make_constraint(kind, fields.unread.pop(field, None), field))
    found += [read_other_spelling(fields, field) for field in ("json_schema", "regex", "format")]

    given = [constraint for constraint in found if constraint is not None]
    if len(given) > 1:
        params = [constraint.param for constraint in given]
        raise ApiError(f"an answer can fit only one of {' and '.join(params)}", param=params[1])
    return given[0] if given else None


def read_response_format(value: dict | None) -> Constraint | None:
    """The constraint in OpenAI's field."""
    param = "response_format"
    if value is None:
        return None
    kind = value.get("type")
    # type -> the key that may stand beside it
    details = {"text": None, "json_object": "schema", "json_schema": "json_schema"}
    if not isinstance(kind, str) or kind not in details:
        raise ApiError(f"{param}.type must be text, json_object or json_schema", param=param)
    for key, detail in value.items():
        if key not in ("type", details[kind]) and detail is not None:
            raise ApiError(f"{param}.{key[:64]} is not supported if the type is {kind}", param=param)
    if kind == "text":
        return None
    if kind == "json_object":
        return make_constraint("json", object_if_empty(value.get("schema")), param)

    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict | bool):
        raise ApiError(f"{param}.json_schema.schema must be a JSON schema", param=param)
    strict = described.get("strict")
    if not isinstance(strict, bool | None):
        raise ApiError(f"{param}.json_schema.strict must be true or false", param=param)
    return schema_constraint(schema, param, lenient=not strict, place=f"{param}.json_schema.schema")


def read_other_spelling(fields: FieldReader, field: str) -> Constraint | None:
    """The constraint in json_schema, regex or format. An empty text counts as missing."""
    value = fields.unread.pop(field, None)
    if value is None or value == "":
        return None
    if field == "regex":
        return make_constraint("regex", value, field)
    if field == "format" and value == "json":
        value = {}
    return make_constraint("json", object_if_empty(value), field)


def object_if_empty(schema):
    """The schema, but an empty or missing one means any object, as in llama-server."""
    if schema is None or schema == {}:
        return ANY_OBJECT
    return schema


def make_constraint(kind: str, value, param: str) -> Constraint | None:
    """A constraint of vLLM's fields. kind: "json", "regex" or "choice"."""
    if value is None:
        return None

    if kind == "json":
        try:
            schema = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            schema = None
        # OpenAI's json_schema has the schema in an object with a name.
        is_wrapped = isinstance(schema, dict) and isinstance(schema.get("schema"), dict)
        if is_wrapped or not isinstance(schema, dict | bool):
            raise ApiError(f"{param} must have a JSON schema itself, as an object or as JSON text", param=param)
        return schema_constraint(schema, param, lenient=True)

    if kind == "regex":
        if not isinstance(value, str) or not value:
            raise ApiError(f"{param} must have a regular expression as a string", param=param)
        return Constraint(regex_rule(value, param), param, "the regular expression")

    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ApiError(f"{param} must have a list of texts to choose from", param=param)
    return Constraint(f"({' | '.join(map(json.dumps, value))})", param, "the choice")


def regex_rule(pattern: str, param: str) -> str:
    """A text that matches a regular expression, as an expression of a grammar."""
    try:
        from llguidance import LLMatcher

        source = LLMatcher.grammar_from_regex(pattern)
    except ImportError:
        text = f"{param}: regular expressions need llguidance: pip install llguidance"
        raise ApiError(text, param=param) from None
    except ValueError as error:  # such as a lone surrogate
        text = f"{param}: the regular expression is not supported: {error}"
        raise ApiError(text, param=param) from None
    return json.loads(source)["grammars"][0]["lark_grammar"].removeprefix("start: ")


def schema_constraint(schema: dict | bool, param: str, lenient: bool = False, place: str = "") -> Constraint:
    """place: the path of the schema in the request, if it is not just the field."""
    given = GivenSchema(schema, not lenient, param, place or param)
    try:
        return Constraint(schema_rule(schema, lenient), param, "the schema", given)
    except RecursionError:
        raise ApiError(f"{param}: the schema is nested too deeply", param=param) from None


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
    ends with the first of these marks.
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


class TriedSchema(NamedTuple):
    """What was found out about a schema."""

    schema: dict | bool | None  # what replaces it; None if nothing does
    places: dict[str, str]  # the path of what is not supported -> the reason
    path: str = ""  # where the error is in the schema
    error: str = ""  # why the schema is refused, even if it is not strict


class GrammarChecker:
    """Loosens schemas that the library does not support, and refuses grammars that do not compile.
    Several threads, which parse requests, use it at the same time."""

    logged: set[str] = set()  # places of schemas that were loosened; shared by all models

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self.lock = threading.Lock()  # for the next three
        self.compiler: GrammarTokenizer | None = None  # made when first needed: it takes a second
        self.valid: OrderedDict[bytes, None] = OrderedDict()  # hashes of sources, the latest last
        # hash of a schema -> what replaces it, the latest last
        self.loosened: OrderedDict[bytes, TriedSchema] = OrderedDict()
        self.tries = threading.BoundedSemaphore(MAX_TRIES)

    def fit_constraint(self, constraint: Constraint | None) -> Constraint | None:
        """A constraint whose schema the library supports. ApiError if the given one is strict and
        not supported, or if nothing of it can be kept."""
        if constraint is None or constraint.given is None:
            return constraint
        schema = self.fit([constraint.given])[0]
        return replace(constraint, rule=schema_rule(schema, not constraint.given.strict))

    def fit_tools(self, tools: list[Tool]) -> list[Tool]:
        """Tools whose schemas the library supports. ApiError names the unsupported place in the
        schema of a strict tool."""
        given = [
            GivenSchema(ANY_OBJECT | tool.schema, tool.strict, "tools", tool.place, "a schema", len(tools) > 1)
            for tool in tools
        ]
        return [replace(tool, schema=schema) for tool, schema in zip(tools, self.fit(given))]

    def fit(self, given: list[GivenSchema]) -> list[dict | bool]:
        """The schemas, each loosened if it is necessary."""
        try:
            texts = [json.dumps([one.schema, one.strict]) for one in given]
        except RecursionError:
            raise ApiError(f"{given[0].param}: a schema is nested too deeply", param=given[0].param) from None
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]

        compiler = self.get_compiler(given[0].param)
        with self.lock:
            found = {key: self.loosened[key] for key in keys if key in self.loosened}
        unknown = {key: one for key, one in zip(keys, given) if key not in found}
        if unknown:
            with self.slot():
                new = dict(zip(unknown, try_schemas(compiler, list(unknown.values()))))
            found |= new
            with self.lock:
                self.loosened |= {key: one for key, one in new.items() if not one.error}
                while len(self.loosened) > MAX_VALID:
                    self.loosened.popitem(last=False)
        return [self.use(one, found[key]) for key, one in zip(keys, given)]

    def use(self, given: GivenSchema, tried: TriedSchema) -> dict | bool:
        """The schema that a grammar gets. ApiError if the given one is refused; what is not
        enforced is logged."""
        places = dict(tried.places)
        path = tried.path
        error = tried.error
        if given.strict and places:
            path, error = next(iter(places.items()))
        if error and (given.strict or not given.is_optional):
            if path or given.kind == "a schema":
                error = f"{join_places(given.place, path)}: {error}"
            raise ApiError(f"{given.param}: {given.kind} is not supported: {error}", param=given.param)

        if error and not places:
            places[""] = error
        for path, reason in places.items():
            place = printable(join_places(given.place, path))
            log_once(self.logged, place, f"{place} of a request is not enforced: {reason}")
        if tried.schema is not None:
            return tried.schema
        return ANY_OBJECT if error else given.schema

    def get_compiler(self, param: str) -> GrammarTokenizer:
        """The compiler of grammars. ApiError, which names the field, if the library is not
        installed, or if the model has no tokenizer."""
        try:
            with self.lock:
                if self.compiler is None:
                    self.compiler = GrammarTokenizer(self.tokenizer, self.vocab_size, self.end_ids)
                return self.compiler
        except UserError as error:
            message = str(error).replace(f"{self.tokenizer.path} has", "the model has")
            raise ApiError(f"{param}: {message}", param=param) from None

    @contextmanager
    def slot(self):
        """Wait until a process may try a grammar."""
        if not self.tries.acquire(timeout=TRY_WAIT_S):
            text = "too many schemas are being compiled"
            raise ApiError(text, 503, code="overloaded", retry_after=TRY_WAIT_S)
        try:
            yield
        finally:
            self.tries.release()

    def check(self, source: str, param: str, kind: str = "the schema", is_tried: bool = False):
        """Raise ApiError if a grammar is invalid, too large, or too complex.

        param, kind: the field that it comes from, and what the field has, for the message.
        is_tried: whether `fit` has compiled the schema of this grammar, so that only its size is
        to be checked."""
        key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        compiler = self.get_compiler(param)
        with self.lock:
            if key in self.valid:
                return self.valid.move_to_end(key)

        error = ""
        try:
            source.encode()
            check_size(source)
            if not is_tried:
                with self.slot():
                    error = try_grammar(compiler, source)
        except (UnicodeEncodeError, UserError) as failure:
            error = str(failure)
        if error:
            raise ApiError(f"{param}: {kind} is not supported: {error}", param=param)

        with self.lock:
            self.valid[key] = None
            if len(self.valid) > MAX_VALID:
                self.valid.popitem(last=False)

    def accepts(self, source: str, text: str) -> bool:
        """Whether an answer may be this text and nothing more. `source` is a valid grammar. False
        if it takes long to compile."""
        if len(source) > MAX_QUICK_BYTES:
            return False
        matcher = self.compiler.compile(source).matcher
        ids = self.tokenizer.encode(text, add_bos=False)
        return all(matcher.try_consume_tokens([i]) == 1 for i in ids) and matcher.is_accepting()


def join_places(place: str, path: str) -> str:
    """The path of a part of a schema in the request. place: the path of the schema in the request;
    path: the path of the part in the schema."""
    if path.startswith("["):
        return place + path
    return f"{place}.{path}".removesuffix(".")


# ---------------------------------------------------------------- trying schemas and grammars


def try_schemas(compiler: GrammarTokenizer, given: list[GivenSchema]) -> list[TriedSchema]:
    """Loosen schemas in a forked process. If one of them is so complex that it ends the process,
    another process goes on with the next."""
    found: list[TriedSchema] = []
    for _ in range(MAX_DEATHS):
        rest = given[len(found) :]

        def work(write: Callable[[bytes], None], rest=rest):
            for one in rest:
                write(json.dumps(loosen_and_compile(compiler, one)).encode() + b"\n")

        code, sent = run_apart(work)
        lines = sent.split(b"\n")[:-1]  # after the last line break, the text is not complete
        found += [TriedSchema(*json.loads(line)) for line in lines]
        if code == 0:
            return found
        if len(found) < len(given):
            found.append(TriedSchema(None, {}, error=NOT_COMPILED))
    return found + [TriedSchema(None, {}, error=NOT_COMPILED)] * (len(given) - len(found))


def loosen_and_compile(compiler: GrammarTokenizer, given: GivenSchema) -> TriedSchema:
    try:
        schema, places, mistake = loosen_schema(compiler, given.schema, given.strict)
        if not given.strict or not places:
            compiler.compile(f"start: {schema_rule(schema, not given.strict)}")
    except RecursionError:
        return TriedSchema(None, {}, error="it is nested too deeply")
    except UserError as error:
        return TriedSchema(None, {}, error=schema_reason(str(error)))
    if schema is given.schema:
        return TriedSchema(None, places)
    if mistake:
        return TriedSchema(schema, places, mistake, places[mistake])
    if isinstance(schema, dict) and set(schema) <= {*IDENTIFIERS, "$defs", "definitions"}:
        path, error = next(iter(places.items()))  # nothing of the schema is left
        return TriedSchema(schema, places, path, error)
    return TriedSchema(schema, places)


def try_grammar(compiler: GrammarTokenizer, source: str) -> str:
    """Why a grammar does not compile; an empty text if it does."""

    def work(write: Callable[[bytes], None]):
        try:
            compiler.compile(source)
        except UserError as error:
            write(str(error).encode("utf-8", "replace")[:1000])

    code, reason = run_apart(work)
    if code != 0:
        return NOT_COMPILED
    return reason.decode("utf-8", "replace")


def run_apart(work: Callable[[Callable[[bytes], None]], None]) -> tuple[int, bytes]:
    """Run a function in a forked process, because for some schemas of a few bytes the library needs
    minutes, and others overflow the stack, which ends the process.

    work(write) writes bytes with write(data). Returns the exit code of the process, 0 if `work` has
    come to its end, and what it has written.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        work_and_exit(work, writer)
    os.close(writer)
    with open(reader, "rb") as written:
        sent = written.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sent


def work_and_exit(work: Callable[[Callable[[bytes], None]], None], writer: int) -> NoReturn:
    """Run a function in the forked process, for a bounded time, and end the process without any of
    Python's cleanups."""
    exit_code = 1

    def run():
        nonlocal exit_code
        with open(writer, "wb", buffering=0) as pipe:

            def write(data: bytes):
                while data:
                    data = data[pipe.write(data) :]

            work(write)
        exit_code = 0

    try:
        # Others, such as clients' sockets, would stay open as long as this process runs.
        for descriptor in map(int, os.listdir("/dev/fd")):
            if descriptor not in (0, 1, 2, writer):
                with suppress(OSError):
                    os.close(descriptor)
        os.nice(5)  # the engine goes on
        signal.setitimer(signal.ITIMER_REAL, TRY_TIME_S)  # its signal ends the process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (TRY_CPU_S, TRY_CPU_S))
        threading.stack_size(TRY_STACK_BYTES)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        os._exit(exit_code)
