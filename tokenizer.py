"""Text to token ids and back, for a checkpoint directory's tokenizer.json or tokenizer.model.

The work is done by the `tokenizers` and `sentencepiece` libraries; this is the one small class in front of them, and
`TextStream`, which turns ids into text as they come. Knows nothing of models.

Text is made of bytes: a vocabulary says which bytes a token stands for, and one incremental UTF-8 decoder makes text of
them. So what is shown token by token is what the whole decodes to, by construction, and the only thing ever held back
is a character of which some bytes are still to come. (The libraries decode lists only, and a byte more can change what
they made of those before it.)
"""

import codecs
import json
import re
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from checkpoint import read_json
from cli import UserError


class Tokenizer:
    """encode and decode, and the ids that mean something: bos_id (or None), eos_ids.

    tokenizer_config.json says what the vocabulary does not: bos_token_id, eos_token_ids, add_bos_token, the tokens that
    a chat template may name (bos_token, eos_token ...), and for a tokenizer.model the special_tokens that are
    recognized in text (token -> id) and whether spaces are `legacy`.
    """

    def __init__(self, directory: Path):
        directory = Path(directory)
        config = read_json(directory / "tokenizer_config.json")
        bos, ends = config.get("bos_token_id"), config.get("eos_token_ids") or []
        for i in [*(ends if isinstance(ends, list) else [ends]), *([] if bos is None else [bos])]:
            if type(i) is not int or i < 0 or not isinstance(ends, list):
                raise UserError(
                    f"{directory / 'tokenizer_config.json'}: {i!r} is no token id, or not in a list of them"
                )
        self.bos_id: int | None = bos
        self.eos_ids: tuple[int, ...] = tuple(ends)
        self.add_bos: bool = bool(config.get("add_bos_token")) and self.bos_id is not None
        self.named_tokens = {name: text for name, text in config.items() if name.endswith("_token") and text}
        self.named_tokens = {name: text for name, text in self.named_tokens.items() if isinstance(text, str)}
        kinds = {"tokenizer.json": JsonVocabulary, "tokenizer.model": SentencePieceVocabulary}
        self.directory, self.vocabulary = directory, None
        path = next((directory / name for name in kinds if (directory / name).exists()), None)
        if path is None:  # a model that only knows ids
            return
        try:
            self.vocabulary = kinds[path.name](path, config)
        except Exception as error:  # the libraries raise bare Exception, RuntimeError, OSError ...
            raise UserError(f"{path} is not a readable tokenizer: {error}") from None

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a text, with the beginning token in front where the model is used to one (add_bos=False: never).

        Special tokens written out in the text ("<|im_start|>") become their ids.
        """
        if self.vocabulary is None:
            raise UserError(f"{self.directory} has no tokenizer; give --prompt_ids instead of text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the text is not valid UTF-8 (or not in this locale)") from None
        return [self.bos_id] * (add_bos and self.add_bos) + self.vocabulary.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out; each sequence of bytes that is not UTF-8 becomes one U+FFFD."""
        return TextStream(self).add(ids, last=True)

    def difference(self, other: "Tokenizer") -> str | None:
        """The first token that is not the same in both, as a reason not to use them together; None: they are alike."""
        if self.vocabulary is None or other.vocabulary is None:
            both = self.vocabulary is other.vocabulary
            return None if both else "one of them has no tokenizer, so nothing says that their tokens are the same"
        for i, (mine, theirs) in enumerate(zip_longest(self.vocabulary.tokens(), other.vocabulary.tokens())):
            if mine != theirs:
                return f"token {i} is {mine!r} there and {theirs!r} here"
        return None


class TextStream:
    """Text of tokens as they come: the pieces that `add` returns join to the text of the whole.

    With stop strings the text ends before the first of them, as if it had been searched when all was there: what may
    yet become one is held back, `stopped` tells that one was found, and nothing comes after it.
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = (), stop: Iterable[str] = ()):
        """context: the ids before the first one added, on which spaces depend; context_text is what they show."""
        self.vocabulary, self.stop = tokenizer.vocabulary, tuple(stop)
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.started = False  # whether any text has come: the space before the first word is not meant to be seen
        self.held, self.stopped = "", False
        self.context_text = self._decode(context, last=False)

    def add(self, ids: Iterable[int], last: bool = False) -> str:
        """The text that these ids complete, possibly empty; `last` gives out what is held back too."""
        text = self._decode(ids, last)
        if self.stopped or not self.stop:
            return "" if self.stopped else text
        self.held += text
        found = min((at for stop in self.stop if (at := self.held.find(stop)) >= 0), default=None)
        open_from = len(self.held) if last else self._may_become_a_stop()
        # A stop that was found counts once no longer one can begin before it.
        self.stopped = found is not None and found <= open_from
        out, self.held = self.held[: found if self.stopped else open_from], self.held[open_from:]
        return out

    def _decode(self, ids: Iterable[int], last: bool) -> str:
        if self.vocabulary is None:
            return ""
        data = b"".join(map(self.vocabulary.token_bytes, ids))
        if data and not self.started:
            self.started = True
            data = data.removeprefix(b" ") if self.vocabulary.begins_with_space else data
        return self.decoder.decode(data, final=last)

    def _may_become_a_stop(self) -> int:
        """Where the longest end of what is held begins that is the beginning of a stop string."""
        longest = max(map(len, self.stop))
        for at in range(max(0, len(self.held) - longest + 1), len(self.held)):
            if any(stop.startswith(self.held[at:]) for stop in self.stop):
                return at
        return len(self.held)


class JsonVocabulary:
    """A tokenizer.json, by the `tokenizers` library."""

    def __init__(self, path: Path, config: dict):
        from tokenizers import Tokenizer as Library

        self.library = library = Library.from_file(str(path))
        library.no_truncation()  # some files carry the limits of the run that wrote them
        library.no_padding()
        self.special_ids = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
        kinds = decoder_kinds(json.loads(library.decoder.__getstate__())) if library.decoder else set()
        self.byte_level, self.byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self.join = library.decoder.decode if library.decoder else " ".join
        words = ("x", "\u2581x")  # U+2581 stands for a space
        self.begins_with_space = any(self.join(["x", w]) == "x x" and self.join([w]) == "x" for w in words)
        self.byte_of = byte_alphabet() if self.byte_level else {}

    def encode(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def tokens(self) -> list[str | None]:
        return [self.library.id_to_token(i) for i in range(self.library.get_vocab_size())]

    def token_bytes(self, i: int) -> bytes:
        """What a token that is not the first adds to the text."""
        token = self.library.id_to_token(i) if 0 <= i < 2**32 else None
        if token is None or i in self.special_ids:
            return b""
        if self.byte_level:
            known = all(c in self.byte_of for c in token)  # not so in tokens that were added as text
            return bytes(self.byte_of[c] for c in token) if known else token.encode()
        if self.byte_fallback and (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(byte[1])
        return self.join(["x", token]).removeprefix("x").encode()


def decoder_kinds(decoder: dict) -> set[str]:
    """The types of a tokenizer.json's decoder and of those in its sequence."""
    return {decoder["type"]}.union(*map(decoder_kinds, decoder.get("decoders", [])))


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies are written in (GPT-2's): printable bytes are themselves, the others
    follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class SentencePieceVocabulary:
    """A tokenizer.model, by the `sentencepiece` library, which knows special tokens but does not look for them in text.

    The text is therefore cut at them first. The library puts a space before every text; after a special token it
    belongs there only in `legacy` vocabularies (transformers' word for it).
    """

    def __init__(self, path: Path, config: dict):
        from sentencepiece import SentencePieceProcessor

        self.library = SentencePieceProcessor(model_file=str(path))
        self.size = self.library.get_piece_size()
        self.special = {self.library.id_to_piece(i): i for i in range(self.size) if self.library.is_control(i)}
        self.special |= config.get("special_tokens") or {}
        self.special_ids = set(self.special.values())
        self.legacy = bool(config.get("legacy", True))
        longest_first = sorted(self.special, key=len, reverse=True)
        self.cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if self.special else None
        self.marker = self.library.encode("\n")  # a line break, with the space the library puts before it
        ids = self.library.encode("x")
        self.begins_with_space = self.library.id_to_piece(ids[0])[0] == "\u2581" and self.library.decode(ids) == "x"

    def encode(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(self.cut.split(text) if self.cut else [text]):
            if i % 2:
                ids.append(self.special[part])
            elif part:
                ids += self.library.encode(part) if self.legacy or not ids else self._encode_inside(part)
        return ids

    def tokens(self) -> list[str | None]:
        names = {i: self.library.id_to_piece(i) for i in range(self.size)} | {
            i: text for text, i in self.special.items()
        }
        return [names.get(i) for i in range(max(names) + 1)]

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of text that does not open the prompt: no space is put before it. A line break joins no piece, so it
        can stand in front and be taken off again."""
        return self.library.encode("\n" + text)[len(self.marker) :]

    def token_bytes(self, i: int) -> bytes:
        """What a token that is not the first adds to the text."""
        if not 0 <= i < self.size or i in self.special_ids:
            return b""
        piece = self.library.id_to_piece(i)
        if self.library.is_byte(i):
            return bytes.fromhex(piece[3:5])  # <0x0A>
        return (
            self.library.decode([i]).encode() if self.library.is_unknown(i) else piece.replace("\u2581", " ").encode()
        )
