"""Text to token ids and back, for a checkpoint directory's tokenizer.json or tokenizer.model.

The work is done by the `tokenizers` and `sentencepiece` libraries; this is the one small class in front of them, and
`TextStream`, which turns a growing list of ids into pieces of text. Knows nothing of models.
"""

import re
from pathlib import Path

from checkpoint import UserError, read_json


class Tokenizer:
    """encode and decode, and the ids that mean something: bos_id (or None), eos_ids.

    tokenizer_config.json says what the vocabulary does not: bos_token_id, eos_token_ids, add_bos_token, and for a
    tokenizer.model the special_tokens that are recognized in text (token -> id) and whether spaces are `legacy`.
    """

    def __init__(self, directory: Path):
        directory = Path(directory)
        config = read_json(directory / "tokenizer_config.json")
        self.bos_id: int | None = config.get("bos_token_id")
        self.eos_ids: tuple[int, ...] = tuple(config.get("eos_token_ids") or ())
        self.add_bos: bool = bool(config.get("add_bos_token")) and self.bos_id is not None
        kinds = {"tokenizer.json": JsonVocabulary, "tokenizer.model": SentencePieceVocabulary}
        self.directory, self.vocabulary = directory, None
        path = next((directory / name for name in kinds if (directory / name).exists()), None)
        if path is None:  # a model that only knows ids
            return
        try:
            self.vocabulary = kinds[path.name](path, config)
        except Exception as error:  # the libraries raise bare Exception, RuntimeError, OSError ...
            raise UserError(f"{path} is not a readable tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the beginning token in front where the model is used to one.

        Special tokens written out in the text ("<|im_start|>") become their ids.
        """
        if self.vocabulary is None:
            raise UserError(f"{self.directory} has no tokenizer; give --prompt_ids instead of text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid UTF-8") from None
        return [self.bos_id] * self.add_bos + self.vocabulary.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out; what is not UTF-8 becomes U+FFFD."""
        if self.vocabulary is None:
            return ""
        return self.vocabulary.decode([i for i in ids if i < self.vocabulary.size])


class JsonVocabulary:
    """A tokenizer.json, by the `tokenizers` library."""

    def __init__(self, path: Path, config: dict):
        from tokenizers import Tokenizer as Library

        self.library = Library.from_file(str(path))
        self.library.no_truncation()  # some files carry the limits of the run that wrote them
        self.library.no_padding()
        self.size = max(self.library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=True)


class SentencePieceVocabulary:
    """A tokenizer.model, by the `sentencepiece` library, which knows special tokens but does not look for them in text.

    The text is therefore cut at them first. The library puts a space before every text; after a special token it
    belongs there only in `legacy` vocabularies (transformers' word for it).
    """

    def __init__(self, path: Path, config: dict):
        from sentencepiece import SentencePieceProcessor

        self.library = SentencePieceProcessor(model_file=str(path))
        pieces = self.library.get_piece_size()
        self.special = {self.library.id_to_piece(i): i for i in range(pieces) if self.library.is_control(i)}
        self.special |= config.get("special_tokens") or {}
        self.size = max(self.special.values(), default=-1) + 1
        self.size = max(self.size, pieces)
        self.pieces = pieces
        self.legacy = bool(config.get("legacy", True))
        longest_first = sorted(self.special, key=len, reverse=True)
        self.cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if self.special else None
        self.marker = self.library.encode("\n")  # a line break, with the space the library puts before it

    def encode(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(self.cut.split(text) if self.cut else [text]):
            if i % 2:
                ids.append(self.special[part])
            elif part:
                ids += self.library.encode(part) if self.legacy or not ids else self._encode_inside(part)
        return ids

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of text that does not open the prompt: no space is put before it. A line break joins no piece, so it
        can stand in front and be taken off again."""
        return self.library.encode("\n" + text)[len(self.marker) :]

    def decode(self, ids: list[int]) -> str:
        special = set(self.special.values())
        return self.library.decode([i for i in ids if i not in special and i < self.pieces])


class TextStream:
    """Text of tokens that arrive one by one; the pieces join to the text of the whole.

    A token's text depends on its left neighbours (spaces, bytes of one character), so each piece is the difference
    between two decodings of the last few tokens; it is held back while it ends in half a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]):
        self.tokenizer = tokenizer
        self.ids = prompt_ids[-8:]  # context enough for any tokenizer's spacing
        self.start, self.done = 0, len(self.ids)  # ids[start:done] have been given out

    def add(self, token: int, last: bool = False) -> str:
        """The text that this token completes, possibly empty; `last` gives out what is held back too."""
        self.ids.append(token)
        before = self.tokenizer.decode(self.ids[self.start : self.done])
        text = self.tokenizer.decode(self.ids[self.start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        self.start, self.done = self.done, len(self.ids)
        return text[len(before) :]
