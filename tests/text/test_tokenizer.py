"""Token ids against those of transformers for every kind of tokenizer file, and streaming text."""

import json
import random

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import SPACES, strings
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from cli import UserError
from sources.hf_directory import hf_tokenizer_files
from text.tokenizer import TextStream, Tokenizer


def test_default_ids_equal_transformers(default_tokenizer, default_oracle):
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"]
    for text in strings(special):
        ids = default_oracle(text).input_ids
        assert default_tokenizer.encode(text) == ids, repr(text)
        assert default_tokenizer.decode(ids) == default_oracle.decode(ids, skip_special_tokens=True)


def write_tokenizer_config(folder, **config):
    config = {"bos_token_id": None, "eos_token_ids": [], "add_bos_token": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_tokenizer_json_with_a_bos_token(byte_level, tmp_path):
    """Settings of a converted directory count, also of one that an older version wrote."""
    (tmp_path / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    write_tokenizer_config(tmp_path, bos_token_id=0, add_bos_token=False)
    assert Tokenizer(tmp_path).encode("x")[0] != 0
    write_tokenizer_config(tmp_path, bos_token_id=0, add_bos_token=True)
    ours = Tokenizer(tmp_path)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(byte_level / "tokenizer.json"))
    for text in strings(["<|end|>"]):
        assert ours.encode(text) == oracle(text).input_ids, repr(text)


@pytest.mark.parametrize("legacy", [True, False])
def test_tokenizer_model_equals_sentencepiece(sentencepiece_folder, tmp_path, legacy):
    """For text without special tokens. (test_added_tokens.py has text with them.)"""
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folder / "tokenizer.model").read_bytes())
    write_tokenizer_config(tmp_path, bos_token_id=1, add_bos_token=True, legacy=legacy, special_tokens={"<unk>": 0})
    tokenizer = Tokenizer(tmp_path)
    library = tokenizer.vocabulary.library
    for text in strings():
        assert tokenizer.encode(text) == [1, *library.encode(text)], repr(text)
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text))


POST_PROCESSORS = {
    "none": None, "bos": "<|begin|> $A", "eos": "$A <|end|>", "both": "<|begin|> $A <|end|>",
    "another": "<|end|> $A", "two": "<|end|> <|begin|> $A",
}  # fmt: skip
FLAGS = [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": None}]
FLAGS = [first | second for first in FLAGS for second in ({}, {"add_eos_token": True}, {"add_eos_token": False})]


def write_flags(folder, names, flags, kind):
    """The settings of a Hugging Face directory, without a vocabulary."""
    settings = dict(zip(("bos_token", "eos_token"), names)) | flags | {"tokenizer_class": kind}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama", "bos_token_id": 0, "eos_token_id": 1}')


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("post_processor", POST_PROCESSORS)
def test_beside_a_tokenizer_json_its_post_processor_decides(byte_level, tmp_path, post_processor, kind):
    """As in transformers, whatever add_bos_token and add_eos_token say. But an end token is never put after a prompt,
    which goes on, nor more than one token before it."""
    library = Library.from_file(str(byte_level / "tokenizer.json"))
    template = POST_PROCESSORS[post_processor]
    special = [("<|begin|>", 0), ("<|end|>", 1)]
    saved = json.loads(library.to_str()) | {"post_processor": None}
    if template is not None:
        library.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        saved = json.loads(library.to_str())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    for flags in FLAGS:
        write_flags(tmp_path, ("<|begin|>", "<|end|>"), flags, kind)
        oracle = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        files = hf_tokenizer_files(tmp_path)
        assert files.settings["bos_token"] == "<|begin|>"
        expected = oracle("x").input_ids
        if post_processor in ("eos", "both"):
            assert expected.pop() == 1
        if post_processor == "two":
            assert expected.pop(1) == 0
        assert Tokenizer(files).encode("x") == expected, flags


def test_beside_a_tokenizer_model_alone_the_settings_decide(sentencepiece_folder, tmp_path):
    added = {"added_tokens_decoder": {str(i): {"content": name} for i, name in enumerate(("<unk>", "<s>", "</s>"))}}
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folder / "tokenizer.model").read_bytes())
    for flags in FLAGS:
        write_flags(tmp_path, ("<s>", "</s>"), flags | added, "LlamaTokenizer")
        expected = transformers.AutoTokenizer.from_pretrained(str(tmp_path))("the x").input_ids
        end = expected[-1] == 2
        assert Tokenizer(hf_tokenizer_files(tmp_path)).encode("the x") == expected[: -1 if end else None], flags
    write_flags(tmp_path, (None, "</s>"), added, "LlamaTokenizer")
    assert hf_tokenizer_files(tmp_path).settings["bos_token_id"] is None, "whatever config.json says"


SCRIPTS = [*range(0x21, 0xD7A0, 0x200), *range(0xE000, 0x20000, 0x400)]  # the first letters of some parts of Unicode


def every_script():
    """Texts of letters of one or several scripts, with spaces, line breaks, punctuation and emoji between them."""
    chance = random.Random(1)

    def word(script):
        return "".join(chr(script + chance.randrange(24)) for _ in range(chance.randint(1, 6)))

    for i in range(len(SCRIPTS)):
        scripts = [SCRIPTS[i], *chance.sample(SCRIPTS, i % 4)] * 2
        yield chance.choice(SPACES) + "".join(word(script) + chance.choice([" ", *SPACES]) for script in scripts)


@pytest.fixture(scope="session")
def every_kind(default_tokenizer, byte_level, sentencepiece_folder, tmp_path_factory):
    """Each kind of vocabulary with its library's decode: byte-level, sentencepiece, and tokenizer.json files made from
    sentencepiece (the decoders of Llama 2, with and without a space in front, and the older Metaspace)."""
    default = default_tokenizer.vocabulary.library
    kinds = {"default": (default_tokenizer, default.decode)}
    for name, source in (("json", byte_level / "tokenizer.json"), ("model", sentencepiece_folder / "tokenizer.model")):
        folder = tmp_path_factory.mktemp(name)
        (folder / source.name).write_bytes(source.read_bytes())
        write_tokenizer_config(folder)
        tokenizer = Tokenizer(folder)
        kinds[name] = tokenizer, tokenizer.vocabulary.library.decode
    pieces = kinds["model"][0].vocabulary.library
    vocabulary = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    words = sorted((piece for piece in vocabulary if len(piece) == 2 and piece[0] != "<"), key=vocabulary.get)
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    for name, decoder in {
        "fallback": decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)]),
        "gemma": decoders.Sequence(spaces),
        "metaspace": decoders.Metaspace(),
        "no decoder": None,
    }.items():
        merges = [(word[0], word[1]) for word in words if word[0] in vocabulary and word[1] in vocabulary]
        library = Library(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never" if name == "gemma" else "always")
        if decoder is not None:
            library.decoder = decoder
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        library.save(str(folder / "tokenizer.json"))
        write_tokenizer_config(folder)
        kinds[name] = Tokenizer(folder), library.decode
    return kinds


KINDS = ["default", "json", "model", "fallback", "gemma", "metaspace", "no decoder"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_streams_of_every_script_join_to_the_whole_at_any_split(every_kind, kind):
    """Each kind tries every third split, beginning with another one."""
    tokenizer, library_decode = every_kind[kind]
    for text in every_script():
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        if kind != "metaspace" or not text.startswith(" "):  # Metaspace drops all leading spaces, not only its own
            assert whole == library_decode(ids), repr(text)
        if kind in ("default", "json", "model"):
            assert whole == text, "these kinds are lossless"
        for cut in range(KINDS.index(kind) % 3, len(ids) + 1, 3):
            stream = TextStream(tokenizer, ids[:cut])
            pieces = [stream.add([i]) for i in ids[cut:]] + [stream.add([], last=True)]
            assert stream.context_text + "".join(pieces) == whole, repr(text)
            if "\N{REPLACEMENT CHARACTER}" not in whole:
                assert "\N{REPLACEMENT CHARACTER}" not in "".join([stream.context_text, *pieces])


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_stream_to_what_they_decode_to(every_kind, kind):
    """Random ids: broken UTF-8, special tokens in the middle of a character, ids outside the vocabulary."""
    tokenizer, _ = every_kind[kind]
    chance = random.Random(2)
    for _ in range(200):
        ids = [chance.randrange(-2, 900) for _ in range(chance.randint(1, 30))]
        cut = chance.randrange(len(ids))
        stream = TextStream(tokenizer, ids[:cut])
        pieces = [stream.add([i], last=n == len(ids)) for n, i in enumerate(ids[cut:], cut + 1)]
        assert stream.context_text + "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["json", "model", "fallback"])
def test_broken_characters_are_shown_once_and_whole_ones_at_once(every_kind, kind):
    tokenizer, _ = every_kind[kind]
    vocabulary = tokenizer.vocabulary
    token_of = {vocabulary.token_bytes(i): i for i in reversed(range(600)) if len(vocabulary.token_bytes(i)) == 1}

    def stream(data: bytes):
        stream = TextStream(tokenizer, [token_of[b"x"]])
        return [stream.add([token_of[bytes([byte])]]) for byte in data] + [stream.add([], last=True)]

    assert stream("日".encode()) == ["", "", "日", ""]
    assert stream("👍é".encode()) == ["", "", "", "👍", "", "é", ""]
    assert stream(b"\xe6\x97x") == ["", "", "\ufffdx", ""], "a character that is never completed"
    assert stream(b"\xff\xe6\x97\xa5") == ["\ufffd", "", "", "日", ""], "the character after a broken byte is complete"
    assert stream(b"\xf0\x9f") == ["", "", "\ufffd"], "the text ends inside a character"


letters = st.sampled_from("a·")  # characters of one byte and of two


@settings(max_examples=500, deadline=None)
@given(st.text(letters, max_size=20), st.lists(st.text(letters, min_size=1, max_size=6), max_size=4), st.data())
@pytest.mark.slow
def test_stop_strings_equal_a_plain_search_over_the_whole(every_kind, text, stops, data):
    """However the text is cut into pieces, it ends just before the first stop string, of which nothing is shown."""
    tokenizer, _ = every_kind["json"]
    ids = tokenizer.encode(text)
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    stream, shown, position = TextStream(tokenizer, (), stops), "", 0
    while position < len(ids) and not stream.stopped:
        step = data.draw(st.integers(1, 3))
        shown += stream.add(ids[position : position + step], last=position + step >= len(ids))
        position += step
        assert text[:first].startswith(shown)
    assert shown == (text if first is None else text[:first])
    assert stream.stopped == (first is not None)
    there = [] if first is None else [stop for stop in stops if text.startswith(stop, first)]
    assert stream.stops.stop_string == min(there, key=len, default=None)
    assert stream.add(ids, last=True) == "" or not stream.stopped


def test_text_that_cannot_become_a_stop_is_not_held_back(every_kind):
    tokenizer, _ = every_kind["json"]
    stream = TextStream(tokenizer, (), ["User:", "\n\n"])
    out = [stream.add(tokenizer.encode(part)) for part in ("Us", "e", " it\n", "\tnow", "Use", "r", ":")]
    assert out == ["", "", "Use it", "\n\tnow", "", "", ""] and stream.stopped


@pytest.mark.parametrize("config", [
    *({"eos_token_ids": ids} for ids in (5, "12", {"a": 1}, [[1]], [None], [-5], [1.0], [True])),
    *({"bos_token_id": i} for i in ("x", [1], 1.0, True, -1)),
], ids=str)  # fmt: skip
def test_special_ids_that_are_not_ids_are_refused(tmp_path, config):
    write_tokenizer_config(tmp_path, **config)
    with pytest.raises(UserError, match="is not a token id|is not a list of token ids"):
        Tokenizer(tmp_path)


def test_no_tokenizer_and_a_broken_one(tmp_path):
    write_tokenizer_config(tmp_path, eos_token_ids=[5])
    ours = Tokenizer(tmp_path)
    assert ours.eos_ids == (5,) and ours.decode([1, 2]) == ""
    with pytest.raises(UserError, match="has no tokenizer; give --prompt_ids"):
        ours.encode("text")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="the tokenizer of .* cannot be read: "):
        Tokenizer(tmp_path)


WORDS = ["<unk>", "hel", "lo</w>", "world</w>", "a</w>", "\u00e9</w>", "b", "c", "\u2581y", "!", ".</w>"]


def test_spaces_of_another_decoder(tmp_path):
    """Whole and token by token, also after a prompt, the text is that of transformers."""
    library = Library(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    library.decoder = decoders.WordPiece("##", cleanup=True)
    library.save(str(tmp_path / "tokenizer.json"))
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer(tmp_path)
    choose = random.Random(3)
    for _ in range(300):
        ids = [choose.randrange(1, len(WORDS)) for _ in range(choose.randrange(1, 8))]
        text = oracle.decode(ids, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == text
        cut = choose.randrange(len(ids))
        stream = TextStream(tokenizer, ids[:cut])
        pieces = [stream.add([i]) for i in ids[cut:]]
        assert stream.context_text + "".join(pieces) + stream.add([], last=True) == text
