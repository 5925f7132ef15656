"""Converts text to token ids and back.

Read down: TokenizerFiles, from which Tokenizer and ChatTemplate (chat_template.py) are made; Tokenizer;
TextStream, which decodes tokens one by one, StopSearch and ThoughtSearch; the two kinds of
vocabulary, which use the `tokenizers` and `sentencepiece` libraries. This file knows nothing of
models.

A vocabulary says which bytes each token stands for, and an incremental UTF-8 decoder turns bytes
into text. Decoding token by token therefore gives the same text as decoding all tokens at once, and
text is held back only while the last bytes of a character are missing. (The libraries decode whole
lists only, and one more token can change the text of the tokens before it.)
"""

import codecs
import itertools
import re
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import UserError, first_line, read_json, read_text

TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "chat_template_tool_use.jinja"


@dataclass(frozen=True)
class Embedding:
    """How a text becomes a vector: it is the last hidden state of the text's last token."""

    normalize: bool = True  # the vector has length 1
    append_ids: tuple[int, ...] | list[int] = ()  # tokens that follow each text
    has_head: bool = True  # False: the model has no output head, and cannot generate text


@dataclass
class TokenizerFiles:
    """What a Tokenizer and a ChatTemplate are made of.

    One of json, library and model is given, or none of them for a model without a tokenizer.
    """

    path: Path  # the directory or file that this was read from, for messages
    settings: dict | None  # the contents of our tokenizer_config.json
    json: bytes | None = None  # the contents of a tokenizer.json
    library: Any = None  # the same as a tokenizers.Tokenizer
    model: bytes | None = None  # the contents of a tokenizer.model
    template: str | None = None  # the chat template
    tool_template: str | None = None  # a second template, for conversations with tools


def read_tokenizer_files(directory: Path, settings: dict | None = None) -> TokenizerFiles:
    """The tokenizer and the chat template in a directory.

    settings: used instead of the directory's tokenizer_config.json, if that is not one of ours.
    """
    directory = Path(directory)
    if settings is None and (directory / "tokenizer_config.json").exists():
        settings = read_json(directory / "tokenizer_config.json")
    files = TokenizerFiles(directory, settings)
    if (directory / "tokenizer.json").is_file():
        files.json = (directory / "tokenizer.json").read_bytes()
    elif (directory / "tokenizer.model").is_file():
        files.model = (directory / "tokenizer.model").read_bytes()
    files.template = read_template(directory / TEMPLATE)
    files.tool_template = read_template(directory / TOOL_TEMPLATE)
    return files


def read_template(path: Path) -> str | None:
    """The text of a chat template, or None if there is no such file."""
    return read_text(path) if path.is_file() else None


class Tokenizer:
    """The tokenizer of a model: encode, decode, and the special ids bos_id (or None) and eos_ids.

    The settings of tokenizer_config.json hold what the vocabulary does not: bos_token_id,
    eos_token_ids, add_bos_token; the tokens that a chat template may name (bos_token, eos_token
    and so on); the added_tokens, in the form of a tokenizer.json, if there is none or it lacks
    some; for a tokenizer.model, whether spaces are handled in the `legacy` way; and the fields of
    Embedding, as `embedding`, if the model is one that makes embeddings.
    """

    def __init__(self, source: TokenizerFiles | Path):
        """source: a checkpoint directory, or what was read from files of another kind."""
        files = source if isinstance(source, TokenizerFiles) else read_tokenizer_files(source)
        config = files.settings
        self.path = files.path
        if config is None:
            raise UserError(f"{self.path} has no tokenizer_config.json")
        self.bos_id: int | None = config.get("bos_token_id")
        eos = config.get("eos_token_ids") or []
        if not isinstance(eos, list):
            raise UserError(f"{self.path}: eos_token_ids {eos!r} is not a list of token ids")
        self.eos_ids: tuple[int, ...] = tuple(eos)
        for i in eos if self.bos_id is None else [*eos, self.bos_id]:
            if type(i) is not int or i < 0:
                raise UserError(f"{self.path}: {i!r} is not a token id")

        self.add_bos: bool = bool(config.get("add_bos_token")) and self.bos_id is not None
        texts = {name: text for name, text in config.items() if isinstance(text, str) and text}
        self.named_tokens = {name: text for name, text in texts.items() if name.endswith("_token")}
        self.vocabulary = read_vocabulary(files)
        self.embedding: Embedding | None = None
        if config.get("embedding") is not None:
            with tokenizer_errors(self.path):
                self.embedding = Embedding(**config["embedding"])

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text.

        The BOS token comes first if the model expects one and add_bos is True. Special tokens
        written out in the text ("<|im_start|>") become their ids.
        """
        if self.vocabulary is None:
            raise UserError(f"{self.path} has no tokenizer; give --prompt_ids instead of text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the text is not valid UTF-8 (or not in this locale)") from None
        ids = self.vocabulary.encode(text)
        if add_bos and self.add_bos:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids without special tokens. Each invalid UTF-8 sequence becomes one U+FFFD."""
        return TextStream(self).add(ids, last=True)

    def difference(self, other: "Tokenizer") -> str | None:
        """A sentence about the first token that differs from the other tokenizer.

        None if all tokens are equal.
        """
        if self.vocabulary is None and other.vocabulary is None:
            return None
        if self.vocabulary is None or other.vocabulary is None:
            return "only one of them has a tokenizer, so their tokens cannot be compared"
        pairs = itertools.zip_longest(self.vocabulary.tokens(), other.vocabulary.tokens())
        for i, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                return f"token {i} is {mine!r} there and {theirs!r} here"
        return None


class TextStream:
    """Decodes tokens one by one. The pieces that `add` returns, joined, are the text of all tokens.

    With stop strings, the text ends before the first of them, as StopSearch finds it.
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = (), stop: Iterable[str] = (), shown_ids=()):
        """context: the ids before the first added one (leading spaces depend on them).

        context_text becomes their text. shown_ids: special tokens that count as text (others have
        none).
        """
        self.vocabulary = tokenizer.vocabulary
        self.stops = StopSearch(stop)
        self.shown = {i: self.vocabulary.name(i).encode() for i in shown_ids}
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.started = False  # some vocabularies put a space before the first text; decoding drops it
        self.context_text = self._decode(context, last=False)

    def add(self, ids: Iterable[int], last: bool = False) -> str:
        """The text that these ids complete, which may be empty.

        last=True: also the text that was held back.
        """
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
            if self.vocabulary.begins_with_space:
                data = data.removeprefix(b" ")
        return self.decoder.decode(data, final=last)


class StopSearch:
    """Searches for stop strings in a text that comes in pieces.

    The pieces that `add` returns, joined, are the text before the first stop string, exactly as if
    the whole text had been searched. Text that may be the beginning of a stop string is held back.
    When a stop string is found, `stop_string` is set to it (to the shortest, if several begin
    there), and `add` returns no more text.
    """

    def __init__(self, strings: Iterable[str] = ()):
        self.strings = tuple(strings)
        self.held = ""  # text that was not returned; once a stop string is found, it begins with it
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def add(self, text: str, last: bool = False) -> str:
        """The text that is known to come before a stop string.

        last: nothing follows, so nothing is held back.
        """
        if self.stopped:
            return ""
        if not self.strings:
            return text

        text = self.held + text
        found = [text.find(string) for string in self.strings]
        stop_at = min((at for at in found if at >= 0), default=None)
        end = len(text) if last else start_of_partial(text, self.strings)

        # A stop string ends the text only if no other one may still turn out to begin before it.
        if stop_at is not None and stop_at <= end:
            end = stop_at
            self.stop_string = min((s for s in self.strings if text.startswith(s, stop_at)), key=len)
        self.held = text[end:]
        return text[:end]


class ThoughtSearch:
    """Finds the thoughts of an answer that comes in pieces: they stand between two marks at its beginning."""

    def __init__(self, marks: tuple[str, str] | None, begins_inside: bool = False):
        """marks: None if the model has no thoughts. begins_inside: the first mark stands before the answer."""
        self.begin, self.end = marks or ("", "")
        self.place = "thoughts" if begins_inside else "beginning"  # at last "answer"
        if marks is None:
            self.place = "answer"
        self.held = ""  # text that was not returned, because it may be a part of a mark

    def add(self, text: str, last: bool = False) -> list[tuple[str, str]]:
        """The parts of the text, each after its kind, which is "mark", "thoughts" or "answer".

        White space before the first mark belongs to it. last: nothing follows, so nothing is held back.
        """
        text = self.held + text
        self.held = ""
        parts = []
        if self.place == "beginning":
            space, mark, rest = text.partition(self.begin)
            if mark and not space.strip():
                self.place = "thoughts"
                parts.append(("mark", space + mark))
                text = rest
            elif last or not self.begin.startswith(text.lstrip()):
                self.place = "answer"
            else:
                self.held = text
                text = ""
        if self.place == "thoughts":
            thoughts, mark, rest = text.partition(self.end)
            if mark:
                self.place = "answer"
            elif not last:
                thoughts = text[: start_of_partial(text, [self.end])]
                self.held = text[len(thoughts) :]
            parts += [("thoughts", thoughts), ("mark", mark)]
            text = rest
        return [part for part in (*parts, ("answer", text)) if part[1]]


def start_of_partial(text: str, strings: Iterable[str]) -> int:
    """Where the longest suffix of the text starts that is a proper prefix of one of the strings.

    There, a string may have begun whose rest is still to come. The length of the text if there is
    no such suffix.
    """
    longest = max(map(len, strings), default=0)
    first = {string[0] for string in strings}
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if text[at] in first and any(string.startswith(text[at:]) and string != text[at:] for string in strings):
            return at
    return len(text)


# ---------------------------------------------------------------- vocabularies


def read_vocabulary(files: TokenizerFiles):
    """The vocabulary of a tokenizer, or None for a model that takes token ids only."""
    with tokenizer_errors(files.path):
        if files.json is not None or files.library is not None:
            return JsonVocabulary(files.json, files.library, files.settings.get("added_tokens") or ())
        if files.model is not None:
            return SentencePieceVocabulary(files.model, files.settings)
    return None


@contextmanager
def tokenizer_errors(path: Path):
    """A context manager that turns whatever a tokenizer's library raises into a UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust code is not an Exception
        raise UserError(f"the tokenizer of {path} cannot be read: {first_line(error)}") from None


class JsonVocabulary:
    """A tokenizer.json file, read with the `tokenizers` library."""

    def __init__(self, data: bytes | None, library=None, added: Iterable[dict] = ()):
        """data: the contents of the file; or library: the library's object.

        added: tokens that it lacks, or that have other flags there.
        """
        from tokenizers import Tokenizer as Library

        if library is None:
            library = Library.from_buffer(data)
        self.library = library
        library.no_truncation()  # some files contain the length limits of the program that wrote them
        library.no_padding()

        # A token that was special before stays hidden, as in the library.
        before = library.get_added_tokens_decoder()
        library.add_tokens([make_added_token(token) for token in added])
        both = [*before.items(), *library.get_added_tokens_decoder().items()]
        self.special_ids = {i for i, token in both if token.special}

        self.join = library.decoder.decode if library.decoder else " ".join
        kinds = str(library.decoder)  # such as Sequence(decoders=[ByteFallback(), Fuse()])
        self.byte_level = "ByteLevel(" in kinds
        self.byte_fallback = "ByteFallback(" in kinds
        self.byte_of = byte_alphabet()

        # Whether the decoder drops the space before the first token. U+2581 stands for a space.
        words = ("x", "\u2581x")
        self.begins_with_space = any(self.join(["x", w]) == "x x" and self.join([w]) == "x" for w in words)

    def encode(self, text: str) -> list[int]:
        # Unlike `encode`, this lets other threads work meanwhile, and computes no positions.
        return self.library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def name(self, i: int) -> str:
        return self.library.id_to_token(i) or ""

    def tokens(self) -> list[str | None]:
        return [self.library.id_to_token(i) for i in range(self.library.get_vocab_size())]

    def token_bytes(self, i: int) -> bytes:
        """The bytes that a token adds to the text, unless it is the first token."""
        if i in self.special_ids or not 0 <= i < 2**32:
            return b""
        token = self.library.id_to_token(i)
        if token is None:
            return b""
        if self.byte_level and all(c in self.byte_of for c in token):
            return bytes(self.byte_of[c] for c in token)
        if self.byte_level:  # an added token may be plain text
            return token.encode()
        if self.byte_fallback and (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(byte[1])
        return self.join(["x", token]).removeprefix("x").encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes.

    A byte that is a printable character stands for itself. The others are U+0100 and up.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}


class SentencePieceVocabulary:
    """A tokenizer.model file, read with the `sentencepiece` library.

    The library does not look for added tokens in text, such as the special ones, so the text is
    split at them first. The library also puts a space before every text that it encodes. After an
    added token, only vocabularies that transformers calls `legacy` have this space.
    """

    def __init__(self, data: bytes, config: dict):
        from sentencepiece import SentencePieceProcessor

        self.library = SentencePieceProcessor(model_proto=data)
        self.size = self.library.get_piece_size()
        control = {self.library.id_to_piece(i): i for i in range(self.size) if self.library.is_control(i)}
        control |= config.get("special_tokens") or {}  # in checkpoints of earlier versions
        added = {text: {"content": text, "id": i, "special": True} for text, i in control.items()}
        added |= {token["content"]: token for token in config.get("added_tokens") or []}
        self.added_names = {token["id"]: text for text, token in added.items()}
        self.special_ids = {token["id"] for token in added.values() if token["special"]}
        self.splitter = AddedTokenSplitter(list(added.values()))
        self.legacy = bool(config.get("legacy", True))
        self.newline_ids = self.library.encode("\n")  # with a space before it, as before every text

        ids = self.library.encode("x")
        has_space = self.library.id_to_piece(ids[0])[0] == "\u2581"
        self.begins_with_space = has_space and self.library.decode(ids) == "x"

    def encode(self, text: str) -> list[int]:
        ids = []
        for added_id, part in self.splitter.split(text):
            if added_id is not None:
                ids.append(added_id)
            elif self.legacy or not ids:
                ids += self.library.encode(part)
            else:
                ids += self._encode_inside(part)
        return ids

    def name(self, i: int) -> str:
        name = self.added_names.get(i)
        if not name and i < self.size:
            name = self.library.id_to_piece(i)
        return name or ""

    def tokens(self) -> list[str | None]:
        names = {i: self.library.id_to_piece(i) for i in range(self.size)}
        names |= self.added_names
        return [names.get(i) for i in range(max(names) + 1)]

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of text after an added token, without a space before it.

        A newline is never part of a longer piece, so one can be put before the text and its ids
        removed again.
        """
        return self.library.encode("\n" + text)[len(self.newline_ids) :]

    def token_bytes(self, i: int) -> bytes:
        """The bytes that a token adds to the text, unless it is the first token."""
        if i in self.special_ids:
            return b""
        if i in self.added_names:
            return self.added_names[i].encode()
        if not 0 <= i < self.size:
            return b""
        piece = self.library.id_to_piece(i)
        if self.library.is_byte(i):
            return bytes.fromhex(piece[3:5])  # <0x0A>
        if self.library.is_unknown(i):
            return self.library.decode([i]).encode()
        return piece.replace("\u2581", " ").encode()


class AddedTokenSplitter:
    """Splits a text at added tokens with the `tokenizers` library, which applies their flags.

    `lstrip` and `rstrip` tokens take the white space on their left and right, and a `single_word`
    token is not a part of a word.
    """

    def __init__(self, tokens: list[dict]):
        """tokens: their content, id and flags, as in the added_tokens of a tokenizer.json."""
        from tokenizers import Tokenizer as Library
        from tokenizers import models

        # To this library, the text between two added tokens is one unknown word.
        self.library = Library(models.WordLevel({"": 0}, unk_token=""))
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
