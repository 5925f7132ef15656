"""Converts text to token ids and back, and conversations to text by the model's chat template.

Read down: TokenizerFiles, what the other two are made of; Tokenizer; TextStream, which decodes tokens one by one, and
StopSearch; ChatTemplate; the two kinds of vocabulary, which use the `tokenizers` and `sentencepiece` libraries. This
file knows nothing of models.

A vocabulary says which bytes each token stands for, and an incremental UTF-8 decoder turns bytes into text. Decoding
token by token therefore gives the same text as decoding all tokens at once, and text is held back only while the last
bytes of a character are missing. (The libraries decode whole lists only, and one more token can change the text of the
tokens before it.)
"""

import codecs
import datetime
import itertools
import json
import re
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import UserError, printable, read_json

TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "chat_template_tool_use.jinja"


@dataclass
class TokenizerFiles:
    """What a Tokenizer and a ChatTemplate are made of. At most one of json, library and model is there; a model without
    a tokenizer has none."""

    path: Path  # where this was read, for messages
    settings: dict | None  # the contents of our tokenizer_config.json
    json: bytes | None = None  # of a tokenizer.json
    library: Any = None  # the same as a tokenizers.Tokenizer
    model: bytes | None = None  # of a tokenizer.model
    template: str | None = None  # a chat template
    tool_template: str | None = None  # another one for conversations with tools, which some models have


def read_tokenizer_files(directory: Path, settings: dict | None = None) -> TokenizerFiles:
    """settings: in the place of the directory's tokenizer_config.json, if it is not one of ours."""
    directory, found = Path(directory), {}
    if settings is None and (directory / "tokenizer_config.json").exists():
        settings = read_json(directory / "tokenizer_config.json")
    files = TokenizerFiles(directory, settings)
    for name in ("tokenizer.json", "tokenizer.model"):
        try:
            if (directory / name).is_file():  # reading a device or a pipe might never end
                found[name] = (directory / name).read_bytes()
        except OSError as error:
            raise UserError(f"{directory / name} cannot be read: {error}") from None
    files.json = found.get("tokenizer.json")
    files.model = found.get("tokenizer.model") if files.json is None else None
    files.template, files.tool_template = read_template(directory / TEMPLATE), read_template(directory / TOOL_TEMPLATE)
    return files


def read_template(path: Path) -> str | None:
    """The text of a chat template; None if there is no such file."""
    try:
        return path.read_bytes().decode() if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


class Tokenizer:
    """The tokenizer of a model: encode, decode, and the special ids bos_id (or None) and eos_ids.

    The settings of tokenizer_config.json hold what the vocabulary does not: bos_token_id, eos_token_ids, add_bos_token,
    the tokens that a chat template may name (bos_token, eos_token ...), the added_tokens as a tokenizer.json has them,
    if there is none or it has others, and for a tokenizer.model whether spaces are handled the `legacy` way.
    """

    def __init__(self, source: TokenizerFiles | Path):
        """source: a checkpoint directory, or what was read from another kind of files."""
        files = source if isinstance(source, TokenizerFiles) else read_tokenizer_files(source)
        config, self.path = files.settings, files.path
        if config is None:
            raise UserError(f"{self.path} has no tokenizer_config.json")
        bos, eos = config.get("bos_token_id"), config.get("eos_token_ids") or []
        if not isinstance(eos, list):
            raise UserError(f"{self.path}: eos_token_ids {eos!r} is not a list of token ids")
        for i in eos if bos is None else [bos, *eos]:
            if type(i) is not int or i < 0:
                raise UserError(f"{self.path}: {i!r} is not a token id")
        self.bos_id: int | None = bos
        self.eos_ids: tuple[int, ...] = tuple(eos)
        self.add_bos: bool = bool(config.get("add_bos_token")) and self.bos_id is not None
        texts = {name: text for name, text in config.items() if isinstance(text, str) and text}
        self.named_tokens = {name: text for name, text in texts.items() if name.endswith("_token")}
        self.vocabulary = None  # a model without a tokenizer takes token ids only
        try:
            if files.json is not None or files.library is not None:
                self.vocabulary = JsonVocabulary(files.json, files.library, config.get("added_tokens") or ())
            elif files.model is not None:
                self.vocabulary = SentencePieceVocabulary(files.model, config)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of any kind; where Rust code panics, it is no Exception
            name = "" if self.path.is_file() else "tokenizer.model" if files.model else "tokenizer.json"
            raise UserError(f"{self.path / name} is not a readable tokenizer: {error}") from None

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text. The BOS token comes first if the model expects one and add_bos is True.

        Special tokens written out in the text ("<|im_start|>") become their ids.
        """
        if self.vocabulary is None:
            raise UserError(f"{self.path} has no tokenizer; give --prompt_ids instead of text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the text is not valid UTF-8 (or not in this locale)") from None
        ids = self.vocabulary.encode(text)
        return [self.bos_id, *ids] if add_bos and self.add_bos else ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids without special tokens. Each invalid UTF-8 sequence becomes one U+FFFD."""
        return TextStream(self).add(ids, last=True)

    def difference(self, other: "Tokenizer") -> str | None:
        """A sentence about the first token that differs from the other tokenizer, or None if all tokens are equal."""
        if self.vocabulary is None or other.vocabulary is None:
            neither = self.vocabulary is other.vocabulary
            return None if neither else "only one of them has a tokenizer, so their tokens cannot be compared"
        for i, (mine, theirs) in enumerate(itertools.zip_longest(self.vocabulary.tokens(), other.vocabulary.tokens())):
            if mine != theirs:
                return f"token {i} is {mine!r} there and {theirs!r} here"
        return None


class TextStream:
    """Decodes tokens one by one. The pieces that `add` returns, joined, are the text of all tokens.

    With stop strings, the text ends before the first of them, as StopSearch finds it.
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = (), stop: Iterable[str] = (), shown_ids=()):
        """context: the ids before the first added one (leading spaces depend on them). context_text is their text.
        shown_ids: special tokens that count as text (others have none)."""
        self.vocabulary, self.stops = tokenizer.vocabulary, StopSearch(stop)
        self.shown = {i: self.vocabulary.name(i).encode() for i in shown_ids}
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.started = False  # some vocabularies put a space before the first text; decoding drops it
        self.context_text = self._decode(context, last=False)

    def add(self, ids: Iterable[int], last: bool = False) -> str:
        """The text that these ids complete, which may be empty. last=True: also the text that was held back."""
        return self.stops.add(self._decode(ids, last), last)

    @property
    def stopped(self) -> bool:
        return self.stops.stopped

    def _decode(self, ids: Iterable[int], last: bool) -> str:
        if self.vocabulary is None:
            return ""
        data = b"".join(self.shown.get(i) or self.vocabulary.token_bytes(i) for i in ids)
        if data and not self.started:
            self.started = True
            data = data.removeprefix(b" ") if self.vocabulary.begins_with_space else data
        return self.decoder.decode(data, final=last)


class StopSearch:
    """Searches for stop strings in a text that comes in pieces.

    The pieces that `add` returns, joined, are the text before the first stop string, exactly as if the whole text had
    been searched. Text that may be the beginning of a stop string is held back. When one is found, `stop_string` is the
    one (the shortest, if several begin there), and `add` returns no more text.
    """

    def __init__(self, strings: Iterable[str] = ()):
        self.strings = tuple(strings)
        self.held = ""  # text that was not returned; once a stop string is found, it begins with it
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def add(self, text: str, last: bool = False) -> str:
        """The text that is known to come before a stop string. last: nothing follows, so nothing is held back."""
        if self.stopped:
            return ""
        if not self.strings:
            return text

        text = self.held + text
        stop_at = min((at for string in self.strings if (at := text.find(string)) >= 0), default=None)
        end = len(text) if last else start_of_partial(text, self.strings)

        # A complete stop string ends the text only if no other stop string may still turn out to begin before it.
        if stop_at is not None and stop_at <= end:
            end = stop_at
            self.stop_string = min((s for s in self.strings if text.startswith(s, stop_at)), key=len)
        self.held = text[end:]
        return text[:end]


def start_of_partial(text: str, strings: Iterable[str]) -> int:
    """Where one of the strings may have begun whose rest is still to come: the start of the longest suffix of the text
    that is a proper prefix of one of them. The length of the text if there is none."""
    longest = max(map(len, strings), default=0)
    starts = range(max(0, len(text) - longest + 1), len(text))
    return next((at for at in starts if any(string.startswith(text[at:]) for string in strings)), len(text))


# ---------------------------------------------------------------- conversations


MAX_TEMPLATE_S = 2  # of processor time for a template to write a conversation; long ones take some ms
THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # put after the content of a message that is to be continued


class ChatTemplate:
    """The chat template of a model: a Jinja2 program that writes a conversation as the model's text.

    The template is a program by the checkpoint's author. Jinja2's sandbox keeps it from Python's internals and from
    changing its arguments, and time_limit bounds its time. Nothing limits its memory.
    """

    def __init__(self, source: TokenizerFiles | Path, tokenizer: Tokenizer):
        files = source if isinstance(source, TokenizerFiles) else read_tokenizer_files(source)
        self.path, self.source = files.path, files.template
        self.tokenizer = tokenizer
        if self.source is None:
            raise UserError(f"{self.path} has no chat template; use the model without --chat and --system")
        try:
            self.template = template_environment().from_string(self.source)
        except Exception as error:
            raise self._failure(error) from None

    def render(
        self,
        messages: list[dict],
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        variables: dict | None = None,
        continue_last: bool = False,
    ) -> str:
        """The text of messages ({"role": "user", "content": "Hello"}), up to where the assistant's next answer begins.

        tools: functions that the model may call, as in OpenAI's API. variables: further ones for the template, such as
        enable_thinking. continue_last: the text ends with the last message's content, without what the template writes
        after it, so that the model continues this message.

        UserError if the template refuses the messages (some templates refuse a system message) or fails.
        """
        if continue_last:
            add_generation_prompt, last = False, messages[-1]
            messages = [*messages[:-1], last | {"content": last["content"] + CONTINUE_MARK}]
        values = {"documents": None} | (variables or {}) | self.tokenizer.named_tokens
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        try:
            with time_limit(MAX_TEMPLATE_S):
                text = self.template.render(values)
        except Exception as error:
            raise self._failure(error) from None
        return self._cut_at_mark(text) if continue_last else text

    def _cut_at_mark(self, text: str) -> str:
        """The text before CONTINUE_MARK, as transformers cuts it."""
        before, found, after = text.rpartition(CONTINUE_MARK.strip())
        if not found:
            raise UserError(f"{self.path}: the chat template does not write the last message, which is to be continued")
        return before if after.startswith(" ") else before.rstrip()  # the template strips spaces at the end of messages

    def _failure(self, error: Exception) -> UserError:
        """A UserError of one line, without terminal escape sequences, for any exception that the template raised."""
        return UserError(f"{self.path}: the chat template fails: {printable(str(error) or type(error).__name__)}")

    def encode(self, messages: list[dict]) -> list[int]:
        """Token ids of `render`."""
        return self.encode_text(self.render(messages))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a rendered text, with a BOS token only if the template has written one."""
        ids = self.tokenizer.encode(text, add_bos=False)
        if not ids:
            raise UserError(f"{self.path}: the chat template writes no text for this conversation")
        return ids

    def thinking_marks(self) -> tuple[str, str] | None:
        """The marks before and after the thoughts of the model, if its template knows them."""
        return next((marks for marks in THINKING_MARKS if marks[1] in self.source), None)

    def end_ids(self) -> set[int]:
        """The special tokens that the template writes after an answer: the model ends its own answers with them.

        Not every checkpoint lists them among its EOS tokens. There are two if the last answer of a conversation ends in
        another way than those before it, as with OLMo 3, and none if no special token follows.
        """
        answer = "An answer."
        question = {"role": "user", "content": "A question?"}
        messages, ids = [question, {"role": "assistant", "content": answer}], set()
        for conversation in (messages, [*messages, question]):
            try:
                text = self.render(conversation, add_generation_prompt=False)
            except UserError:  # the template accepts no such conversation
                continue
            _, found, rest = text.rpartition(answer)
            after = self.tokenizer.encode(rest, add_bos=False) if found else []
            ids |= set([i for i in after if i in self.tokenizer.vocabulary.special_ids][:1])
        return ids


@contextmanager
def time_limit(seconds: float):
    """Raise TimeoutError in a template that needs more processor time. The clock is read at every hundredth line of the
    template or call of a Python function."""
    end, steps = time.thread_time() + seconds, itertools.count()
    others = sys.gettrace()

    def check(frame, event: str, argument):
        if next(steps) % 100 == 0 and time.thread_time() > end:
            raise TimeoutError(f"it takes more than {seconds} s")
        return check if frame.f_code.co_filename == "<template>" else None  # whether its lines are traced, too

    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(others)


def answer_end_ids(source: TokenizerFiles | Path, tokenizer: Tokenizer) -> set[int]:
    """The tokens that may end an answer: the EOS tokens, and what the chat template writes after an answer, if there is
    one."""
    ids = set(tokenizer.eos_ids)
    with suppress(UserError):  # there is no chat template, or it fails
        ids |= ChatTemplate(source, tokenizer).end_ids()
    return ids


def template_environment():
    """A Jinja2 environment with everything that transformers offers to templates (chat_template_utils.py there)."""
    from jinja2 import ext, nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(ext.Extension):
        """{% generation %} marks the assistant's answers for training. Here only its content is rendered."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """Jinja2's namespace without private names, because the sandbox does not check names that a template sets."""

        def __init__(*args, **kwargs):  # as in Jinja2, since a template may set a variable called self
            for name in dict(*args[1:], **kwargs):
                check_name(name)
            Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name, value):
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name):
        if str(name).startswith("_"):
            raise SecurityError(f"may not set {name!r} on a namespace")

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # Jinja2's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [ext.loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["namespace"] = PlainNamespace
    return environment


# ---------------------------------------------------------------- vocabularies


class JsonVocabulary:
    """A tokenizer.json file, read with the `tokenizers` library."""

    def __init__(self, data: bytes | None, library=None, added: Iterable[dict] = ()):
        """data: the contents of the file; or library: the library's object. added: tokens that it lacks, or that have
        other flags there."""
        from tokenizers import Tokenizer as Library

        self.library = library = library or Library.from_buffer(data)
        library.no_truncation()  # some files contain the length limits of the program that wrote them
        library.no_padding()
        before = library.get_added_tokens_decoder()
        library.add_tokens([make_added_token(token) for token in added])
        both = [*before.items(), *library.get_added_tokens_decoder().items()]
        self.special_ids = {i for i, token in both if token.special}  # the library, too, hides a token that was special
        kinds = decoder_kinds(json.loads(library.decoder.__getstate__())) if library.decoder else set()
        self.byte_level, self.byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self.join = library.decoder.decode if library.decoder else " ".join
        # Whether the decoder drops the space before the first token. U+2581 stands for a space.
        words = ("x", "\u2581x")
        self.begins_with_space = any(self.join(["x", w]) == "x x" and self.join([w]) == "x" for w in words)
        self.byte_of = byte_alphabet() if self.byte_level else {}

    def encode(self, text: str) -> list[int]:
        # Unlike `encode`, this lets other threads of a server work meanwhile, and does not compute positions.
        return self.library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def name(self, i: int) -> str:
        return self.library.id_to_token(i) or ""

    def tokens(self) -> list[str | None]:
        return [self.library.id_to_token(i) for i in range(self.library.get_vocab_size())]

    def token_bytes(self, i: int) -> bytes:
        """The bytes that a token adds to the text, unless it is the first token."""
        token = self.library.id_to_token(i) if 0 <= i < 2**32 else None
        if token is None or i in self.special_ids:
            return b""
        if self.byte_level:
            in_alphabet = all(c in self.byte_of for c in token)  # added tokens may be plain text
            return bytes(self.byte_of[c] for c in token) if in_alphabet else token.encode()
        if self.byte_fallback and (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(byte[1])
        return self.join(["x", token]).removeprefix("x").encode()


def decoder_kinds(decoder: dict) -> set[str]:
    """The type of a tokenizer.json's decoder, and of all decoders in it if it is a sequence."""
    return {decoder["type"]}.union(*map(decoder_kinds, decoder.get("decoders", [])))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable bytes stand for themselves, the others are U+0100 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class SentencePieceVocabulary:
    """A tokenizer.model file, read with the `sentencepiece` library.

    The library does not look for added tokens in text, such as the special ones, so the text is split at them first.
    The library also puts a space before every text that it encodes. After an added token, only vocabularies that
    transformers calls `legacy` have this space.
    """

    def __init__(self, data: bytes, config: dict):
        from sentencepiece import SentencePieceProcessor

        self.library = SentencePieceProcessor(model_proto=data)
        self.size = self.library.get_piece_size()
        control = {self.library.id_to_piece(i): i for i in range(self.size) if self.library.is_control(i)}
        control |= config.get("special_tokens") or {}  # of checkpoints of earlier versions
        added = {text: {"content": text, "id": i, "special": True} for text, i in control.items()}
        added |= {token["content"]: token for token in config.get("added_tokens") or []}
        self.added_names = {token["id"]: text for text, token in added.items()}
        self.special_ids = {token["id"] for token in added.values() if token["special"]}
        self.splitter = AddedTokenSplitter(list(added.values()))
        self.legacy = bool(config.get("legacy", True))
        self.newline_ids = self.library.encode("\n")  # with the space that the library puts before every text
        ids = self.library.encode("x")
        self.begins_with_space = self.library.id_to_piece(ids[0])[0] == "\u2581" and self.library.decode(ids) == "x"

    def encode(self, text: str) -> list[int]:
        ids = []
        for added_id, part in self.splitter.split(text):
            if added_id is not None:
                ids.append(added_id)
            else:
                ids += self.library.encode(part) if self.legacy or not ids else self._encode_inside(part)
        return ids

    def name(self, i: int) -> str:
        return self.added_names.get(i) or (self.library.id_to_piece(i) if i < self.size else "")

    def tokens(self) -> list[str | None]:
        names = {i: self.library.id_to_piece(i) for i in range(self.size)}
        names |= self.added_names
        return [names.get(i) for i in range(max(names) + 1)]

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of text after an added token, without a space before it.

        A newline is never part of a longer piece, so one can be put before the text and its ids removed again.
        """
        return self.library.encode("\n" + text)[len(self.newline_ids) :]

    def token_bytes(self, i: int) -> bytes:
        """The bytes that a token adds to the text, unless it is the first token."""
        if i in self.added_names:
            return b"" if i in self.special_ids else self.added_names[i].encode()
        if not 0 <= i < self.size:
            return b""
        piece = self.library.id_to_piece(i)
        if self.library.is_byte(i):
            return bytes.fromhex(piece[3:5])  # <0x0A>
        if self.library.is_unknown(i):
            return self.library.decode([i]).encode()
        return piece.replace("\u2581", " ").encode()


class AddedTokenSplitter:
    """Splits a text at added tokens as the `tokenizers` library does, which knows what their flags mean: `lstrip` and
    `rstrip` tokens take the white space on their left and right, and a `single_word` token is not a part of a word."""

    def __init__(self, tokens: list[dict]):
        """tokens: their content, id and flags, as in the added_tokens of a tokenizer.json."""
        from tokenizers import Tokenizer as Library
        from tokenizers import models

        self.library = Library(models.WordLevel({"": 0}, unk_token=""))  # text between two tokens is one unknown word
        self.library.add_tokens([make_added_token(token) for token in tokens])
        self.ids = {self.library.token_to_id(token["content"]): token["id"] for token in tokens if token["content"]}

    def split(self, text: str) -> list[tuple[int | None, str]]:
        """The parts of the text, each with the id of the added token that it is, or None."""
        found = self.library.encode_batch([text], add_special_tokens=False)[0]
        return [(self.ids.get(i), text[start:end]) for i, (start, end) in zip(found.ids, found.offsets)]


def make_added_token(token: dict):
    """The `tokenizers` library's object for an entry of the added_tokens of a tokenizer.json."""
    from tokenizers import AddedToken

    return AddedToken(**{name: value for name, value in token.items() if name != "id"})
