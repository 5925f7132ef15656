"""Token ids against transformers' on many strings, for every kind of tokenizer file; text that comes piece by piece."""

import json
import random
import re

import pytest
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from checkpoint import UserError
from convert_hf_checkpoint import default_gguf
from tokenizer import TextStream, Tokenizer

WORDS = [
    "the", "quick", "brown", "Fox", "jumps", "over", "lazy", "dogs'", "don't", "I'LL", "we've", "it's",
    "naïve", "façade", "Straße", "Ελληνικά", "русский", "язык", "עברית", "العربية", "हिन्दी", "ไทย",
    "日本語のテキスト", "中文字符", "한국어", "éclair", "ﬁne", "½", "²", "٣٤", "Ⅷ", "😀",
    '👩\u200d👩\u200d👧\u200d👦', "🇩🇪",
    "☕️", '\u200b', '\ufeff', '\x00', '\x7f', "3.14159", "1234567890", "0x1F", "1e-9", "2024-01-31",
    "$5,000.00", "100%", "#1", "C++", "a_b", "camelCase", "SCREAMING_CASE", "foo.bar()", '{"k":', "[1,",
    "2]}", "<div", 'class="x">', "https://example.org/?q=1&r=%20", '\\n', "/*", "c", "*/", "//", "#", "'''",
    '"""', "->", "=>", "!=", "<=", "&&", "||", "::", "...", "?!", "--", "—", "“quotes”", "•", "™",
]  # fmt: skip
SPACES = ["", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", " \n ", "\n    ", "\t\t", "        ", "\u3000"]
CODE = [
    "def f(x):\n    return x + 1\n\n\nprint(f(10))\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i] * b[i];\n}\n",
    "    indented\n        deeper\n\n   odd",
    "SELECT * FROM t WHERE id = 42;",
    "\\alpha + \\beta = \\frac{1}{2}",
]


def strings(special=(), n=200):
    """Varied strings: words of many scripts joined by whitespace runs, code, special tokens written out."""
    chance = random.Random(0)
    out = ["", " ", "a", "\n", *SPACES, *CODE, *WORDS]
    while len(out) < n + 60:
        parts = [chance.choice(WORDS) + chance.choice(SPACES) for _ in range(chance.randint(1, 9))]
        if special and chance.random() < 0.4:
            parts.insert(chance.randrange(len(parts)), chance.choice(special))
        out.append(chance.choice(SPACES) + "".join(parts))
    return out


@pytest.fixture(scope="session")
def default_tokenizer(default_checkpoint):
    return Tokenizer(default_checkpoint)


@pytest.fixture(scope="session")
def default_oracle():
    """transformers' tokenizer of the default GGUF file, cutting text as the file says ("smollm": every digit first).

    transformers 5.23 has no entry for "smollm" and cuts as GPT-2 does, so that whitespace before a digit comes out
    otherwise than from the model's own tokenizer.json, or from llama.cpp.
    """
    path = default_gguf()
    oracle = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    return oracle


def test_default_ids_equal_transformers(default_tokenizer, default_oracle):
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"]
    for text in strings(special):
        ids = default_oracle(text).input_ids
        assert default_tokenizer.encode(text) == ids, repr(text)
        assert default_tokenizer.decode(ids) == default_oracle.decode(ids, skip_special_tokens=True)


def test_default_ids_without_digits_equal_plain_transformers(default_tokenizer):
    path = default_gguf()
    oracle = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = [text for text in strings(["<|im_start|>"]) if not any(c.isnumeric() for c in text)]
    texts += ["1234 5678", "a1b2 c3", "In 1999, 3 of 4", "x = 10;\ny = 20;"]
    assert len(texts) > 70
    for text in texts:
        assert default_tokenizer.encode(text) == oracle(text).input_ids, repr(text)


def write_tokenizer_config(folder, **config):
    config = {"bos_token_id": None, "eos_token_ids": [], "add_bos_token": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """A small byte-level BPE that puts its beginning token in front, as Llama 3's does."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(strings(n=100), trainer)
    library.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    folder = tmp_path_factory.mktemp("byte-level")
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory):
    """A small sentencepiece BPE with byte fallback, as Llama 2's is."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_text("\n".join(text.replace("\n", " ") for text in strings(n=150) if text.strip()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    return folder


def test_tokenizer_json_with_a_beginning_token(byte_level, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    write_tokenizer_config(tmp_path, bos_token_id=0, add_bos_token=True)
    ours = Tokenizer(tmp_path)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(byte_level / "tokenizer.json"))
    for text in strings(["<|end|>"]):
        assert ours.encode(text) == oracle(text).input_ids, repr(text)


@pytest.mark.parametrize("legacy", [True, False])
def test_tokenizer_model_equals_sentencepiece_and_transformers(sentencepiece_folder, tmp_path, legacy):
    """The library itself is the oracle where there are no special tokens; with them it is transformers, but for text
    that begins with a space, where transformers 5 leaves out the one that sentencepiece puts in front."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes((sentencepiece_folder / "tokenizer.model").read_bytes())
    write_tokenizer_config(ours, bos_token_id=1, add_bos_token=True, legacy=legacy, special_tokens={"<unk>": 0})
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (theirs / "tokenizer_config.json").write_text(json.dumps(names | {"legacy": legacy, "add_bos_token": True}))
    (theirs / "config.json").write_text('{"model_type": "llama"}')
    tokenizer, oracle = Tokenizer(ours), transformers.AutoTokenizer.from_pretrained(str(theirs))
    library = tokenizer.vocabulary.library
    for text in strings():
        assert tokenizer.encode(text) == [1, *library.encode(text)], repr(text)
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text))
    compared = 0
    for text in strings(["<s>", "</s>", "<unk>"]):
        if not any(part.startswith(" ") for part in re.split("<s>|</s>|<unk>", text)):
            assert tokenizer.encode(text) == oracle(text).input_ids, repr(text)
            compared += "<" in text
    assert compared > 20


def test_stream_pieces_join_to_the_whole(default_tokenizer, byte_level, sentencepiece_folder, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, source in zip(folders, (byte_level / "tokenizer.json", sentencepiece_folder / "tokenizer.model")):
        folder.mkdir()
        (folder / source.name).write_bytes(source.read_bytes())
        write_tokenizer_config(folder)
    for tokenizer in (default_tokenizer, *map(Tokenizer, folders)):
        for text in strings(n=150):
            ids = tokenizer.encode("So " + text)
            for cut in {1, len(ids) // 2}:
                stream = TextStream(tokenizer, ids[:cut])
                pieces = [stream.add(i, last=n == len(ids)) for n, i in enumerate(ids[cut:], cut + 1)]
                start = tokenizer.decode(ids[:cut])
                if not start.endswith("\N{REPLACEMENT CHARACTER}"):
                    assert start + "".join(pieces) == tokenizer.decode(ids), repr(text)


def test_stream_holds_back_half_a_character(default_tokenizer):
    ids = default_tokenizer.encode("日")
    assert len(ids) > 1
    stream = TextStream(default_tokenizer, default_tokenizer.encode("x"))
    assert [stream.add(i) for i in ids] == [""] * (len(ids) - 1) + ["日"]
    assert stream.add(ids[0], last=True) == "\N{REPLACEMENT CHARACTER}"


def test_no_tokenizer_and_a_broken_one(tmp_path):
    write_tokenizer_config(tmp_path, eos_token_ids=[5])
    ours = Tokenizer(tmp_path)
    assert ours.eos_ids == (5,) and ours.decode([1, 2]) == ""
    with pytest.raises(UserError, match="has no tokenizer; give --prompt_ids"):
        ours.encode("text")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="tokenizer.json is not a readable tokenizer"):
        Tokenizer(tmp_path)
