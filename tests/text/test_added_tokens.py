"""Added tokens: which text around them they take, whether they are shown, which of them end an answer. The oracles are
transformers, for directories with each kind of vocabulary, and llama.cpp for GGUF files.
"""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT
from gguf_writer import bpe_fields, sentencepiece_fields, write_gguf
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from checkpoint import Writer
from convert_hf_checkpoint import convert
from sources.gguf_tokenizer import end_tokens, token_types
from sources.hf_directory import hf_tokenizer_files
from sources.opening import open_gguf
from text.chat_template import ChatTemplate
from text.tokenizer import Tokenizer, read_tokenizer_files

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
PHI3_MARKS = """<|endoftext|> <|assistant|> <|placeholder1|> <|placeholder2|> <|placeholder3|> <|placeholder4|>
    <|system|> <|end|> <|placeholder5|> <|placeholder6|> <|user|>""".split()  # noqa: SIM905
PHI3_TEMPLATE = (ROOT / "tests" / "data" / "templates" / "phi-3-mini.jinja").read_text(encoding="utf-8")
CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "  two\nlines  \n"},
]
# White space, and what looks like it but is not white space to Unicode (\x1c, U+200B)
SPACES = ["", "", " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "\x85", "\u00a0", "\u2028", "\u3000", "\x1c", "\u200b"]
WORDS = ["a", "word", "the", "swordfish", "word_", "wörd", "日本", "é", "_", "1", "."]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def entry(content, **flags):
    """An entry of added_tokens_decoder."""
    return {"content": content} | dict.fromkeys(FLAGS, False) | {"special": True} | flags


def phi3_decoder(first):
    """As in Phi-3's tokenizer_config.json, but for the ids, which begin at `first`."""
    decoder = {"0": entry("<unk>"), "1": entry("<s>"), "2": entry("</s>", rstrip=True, special=False)}
    marks = [entry(mark, rstrip=mark != "<|endoftext|>") for mark in PHI3_MARKS]
    return decoder | {str(first + i): mark for i, mark in enumerate(marks)}


def random_texts(marks, n=40, seed=0, spaces=SPACES):
    chance = random.Random(seed)

    def text():
        parts = [chance.choice([*marks, *marks, *WORDS]) + chance.choice(spaces) for _ in range(chance.randint(1, 9))]
        return "".join(parts)

    return ["x" + text() for _ in range(n)]


def write_directory(folder, vocabulary, **settings):
    """A Hugging Face directory with a vocabulary and a tokenizer_config.json, and nothing else of a model."""
    folder.mkdir()
    shutil.copy(vocabulary, folder)
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    names |= {"add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def our_tokenizers(folder, out):
    """The tokenizer of a Hugging Face directory, and that of the checkpoint directory that it is converted to."""
    files = hf_tokenizer_files(folder)
    out.mkdir()
    directory = SimpleNamespace(path=out, add_json=lambda name, value: write_json(out / name, value))
    Writer.add_tokenizer(directory, files)
    return Tokenizer(files), Tokenizer(out)


def write_json(path, value):
    path.write_text(json.dumps(value))


def equal_texts(tokenizer, oracle, skips: bool) -> int:
    """How many random texts were compared. skips: not those in which a space follows an added token, where
    transformers 5 leaves out the space that sentencepiece adds."""
    texts = random_texts([*PHI3_MARKS, "</s>"])
    if skips:
        splitter = tokenizer.vocabulary.splitter
        texts = [one for one in texts if not any(i is None and s.startswith(" ") for i, s in splitter.split(one))]
    for text in texts:
        ids = oracle(text).input_ids
        assert tokenizer.encode(text, add_bos=False) == ids, repr(text)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    return len(texts)


# ---------------------------------------------------------------- Hugging Face directories


@pytest.mark.parametrize("legacy", [True, False])
def test_phi3s_marks_beside_a_tokenizer_model(sentencepiece_folder, tmp_path, legacy):
    more = {"added_tokens_decoder": phi3_decoder(600), "legacy": legacy, "chat_template": PHI3_TEMPLATE}
    folder = write_directory(tmp_path / "hf", sentencepiece_folder / "tokenizer.model", **more)
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    for tokenizer in our_tokenizers(folder, tmp_path / "ours"):
        template = ChatTemplate(hf_tokenizer_files(folder), tokenizer)
        expected = oracle.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        assert template.encode(CHAT) == expected
        assert tokenizer.encode("<|user|>\n \n<|end|>\u3000<|assistant|>") == [610, 607, 601]
        assert equal_texts(tokenizer, oracle, skips=legacy) > 20


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("seed", range(4))
def test_random_flags_equal_transformers(sentencepiece_folder, byte_level, tmp_path, kind, seed):
    """The flags of tokenizer_config.json, for both kinds of vocabulary. Those of a tokenizer.json are others, and some
    tokens are only in tokenizer_config.json."""
    chance = random.Random(seed)
    marks = chance.sample(["<|user|>", "<|x|>", "word", "foo", "<t>", "word foo", "_:", "<|us", "er|>"], 6)
    first = 600 if kind == "tokenizer.model" else Library.from_file(str(byte_level / kind)).get_vocab_size()

    def random_flags():
        return {flag: chance.random() < 0.5 for flag in FLAGS}

    decoder = {str(first + i): entry(mark, **random_flags()) for i, mark in enumerate(marks)}
    vocabulary, names = sentencepiece_folder / kind, {"eos_token": "</s>"}
    if kind == "tokenizer.json":
        library, vocabulary = Library.from_file(str(byte_level / kind)), tmp_path / kind
        library.add_tokens([AddedToken(mark, **random_flags()) for mark in marks[:3]])
        library.save(str(vocabulary))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
        names |= {"unk_token": None, "clean_up_tokenization_spaces": False}
        decoder["1"] = entry("<|end|>", rstrip=True, special=False)
    folder = write_directory(tmp_path / "hf", vocabulary, added_tokens_decoder=decoder, legacy=False, **names)
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    for tokenizer in our_tokenizers(folder, tmp_path / "ours"):
        for text in random_texts([*marks, names["eos_token"]], seed=seed):
            ids = oracle(text, add_special_tokens=False).input_ids
            assert tokenizer.encode(text, add_bos=False) == ids, repr(text)
            assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_tokens_of_older_files(sentencepiece_folder, byte_level, tmp_path):
    """added_tokens.json has no flags. Neither do checkpoints that an earlier version wrote."""
    for kind, source in (("tokenizer.model", sentencepiece_folder), ("tokenizer.json", byte_level)):
        folder = write_directory(tmp_path / kind, source / kind, bos_token=None, eos_token=None, unk_token=None)
        first = 600 if kind == "tokenizer.model" else Library.from_file(str(source / kind)).get_vocab_size()
        write_json(folder / "added_tokens.json", {"<|user|>": first, "<|end|>": 1 if first != 600 else 601})
        for tokenizer in our_tokenizers(folder, tmp_path / f"ours-{kind}"):
            [user, *rest, end] = tokenizer.encode("<|user|>\na<|end|>", add_bos=False)
            assert (user, end) == (first, 1 if first != 600 else 601)
            assert tokenizer.decode([user, *rest, end]) == "\na"
    settings = {"bos_token_id": 1, "eos_token_ids": [2], "special_tokens": {"<|user|>": 600, "<unk>": 0}}
    write_json(tmp_path / "ours-tokenizer.model" / "tokenizer_config.json", settings)
    old = Tokenizer(tmp_path / "ours-tokenizer.model")
    assert old.encode("<|user|><unk></s>") == [600, 0, 2] and old.vocabulary.special_ids == {0, 1, 2, 600}


# ---------------------------------------------------------------- GGUF files


def spm_fields(sentencepiece_folder, marks: dict, **more):
    """The fields of a file with a sentencepiece vocabulary of 600 tokens, and marks (text -> type) after them."""
    import sentencepiece

    model = str(sentencepiece_folder / "tokenizer.model")
    fields = sentencepiece_fields(sentencepiece.SentencePieceProcessor(model_file=model))
    fields["tokenizer.ggml.tokens"] += list(marks)
    fields["tokenizer.ggml.token_type"] += list(marks.values())
    fields["tokenizer.ggml.scores"] += [-1000.0] * len(marks)
    return fields | more


def tokenizer_of(model, fields, path):
    write_gguf(path, model, fields)
    return open_gguf(path).tokenizer


@pytest.mark.parametrize("family, name, strips", [
    ("phi3-partial", "My model", True), ("llama-mha", "Phi 3 mini", False), ("llama-mha", "Some-Phi-3-mini-4k", True),
])  # fmt: skip
def test_phi3s_marks_in_a_gguf_file(sentencepiece_folder, tiny, tmp_path, family, name, strips):
    """A GGUF file cannot say that a token takes the white space after it. The oracle is transformers with the flags."""
    types = dict.fromkeys(PHI3_MARKS, CONTROL)
    fields = spm_fields(sentencepiece_folder, types, **{"tokenizer.chat_template": PHI3_TEMPLATE})
    fields["tokenizer.ggml.token_type"][2] = USER_DEFINED  # as the converter writes </s>
    fields |= {"tokenizer.ggml.eos_token_id": 600, "general.name": name}
    tokenizer = tokenizer_of(tiny(family)[0], fields, tmp_path / "x.gguf")
    decoder = phi3_decoder(600)
    if not strips:
        decoder = {i: token | {"rstrip": False} for i, token in decoder.items()}
    more = {"added_tokens_decoder": decoder, "legacy": True, "chat_template": PHI3_TEMPLATE}
    folder = write_directory(tmp_path / "hf", sentencepiece_folder / "tokenizer.model", **more)
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder))
    out = convert(open_gguf(tmp_path / "x.gguf", dequantize=True), tmp_path / "out", torch.float32)
    for ours in (tokenizer, Tokenizer(out)):
        ids = oracle.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        if strips:  # else a space follows a token
            assert ChatTemplate(read_tokenizer_files(out), ours).encode(CHAT) == ids
        assert equal_texts(ours, oracle, skips=True) > (20 if strips else 10)
        assert set(ours.eos_ids) == {600, 607}


@pytest.fixture
def tiny_fields(sentencepiece_folder, byte_level):
    """tiny_fields(vocabulary, marks) -> the fields of a file with one of two vocabularies, and marks after it."""

    def make(vocabulary: str, marks: dict):
        if vocabulary == "llama":
            return spm_fields(sentencepiece_folder, marks)
        fields = bpe_fields(Library.from_file(str(byte_level / "tokenizer.json")), "gpt-2")
        fields["tokenizer.ggml.tokens"] += list(marks)
        fields["tokenizer.ggml.token_type"] += list(marks.values())
        return fields

    return make


MARKS = ["<end_of_turn>", "<|eot_id|>", "<|end|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<turn|>", "<eos>"]


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
@pytest.mark.parametrize("vocabulary", ["llama", "gpt2"])
def test_the_type_of_an_end_of_a_turn_does_not_matter(tiny_fields, tiny, tmp_path, vocabulary, kind):
    def tokenizer(kind):
        fields = tiny_fields(vocabulary, dict.fromkeys(MARKS, kind))
        return tokenizer_of(tiny("llama-mha")[0], fields, tmp_path / f"{kind}.gguf")

    usual, other = tokenizer(CONTROL), tokenizer(kind)
    for text in random_texts(MARKS):
        ids = usual.encode(text)
        assert other.encode(text) == ids and other.decode(ids) == usual.decode(ids)
    assert other.eos_ids == usual.eos_ids and len(usual.eos_ids) == 1 + len(MARKS)
    assert other.vocabulary.special_ids == usual.vocabulary.special_ids


def test_tokens_of_other_types(tiny_fields, tiny, tmp_path):
    """User-defined tokens are found and shown, unknown ones found and not shown, normal and unused ones are text."""
    marks = {"<tool>": USER_DEFINED, "<|im_start|>": NORMAL, "<unused>": UNUSED}
    for kind, more in (("llama", {}), ("gpt2", {"<unk>": UNKNOWN})):
        fields = tiny_fields(kind, marks | more)
        tokenizer = tokenizer_of(tiny("llama-mha")[0], fields, tmp_path / f"{kind}.gguf")
        first = fields["tokenizer.ggml.tokens"].index("<tool>")
        unknown = fields["tokenizer.ggml.tokens"].index("<unk>")
        ids = tokenizer.encode("<tool><unk><|im_start|><unused>", add_bos=False)
        assert ids[:2] == [first, unknown] and max(ids[2:]) < first
        assert tokenizer.decode([first, unknown]) == "<tool>"


def test_a_space_follows_a_user_defined_token_as_in_llama_cpp(sentencepiece_folder, tiny, tmp_path):
    """It is put before every text after an added token, whatever its type. Without add_space_prefix there is none."""
    for prefix in (True, False):
        marks = {"<tool>": USER_DEFINED, "<|im_start|>": CONTROL}
        fields = spm_fields(sentencepiece_folder, marks, **{"tokenizer.ggml.add_space_prefix": prefix})
        tokenizer = tokenizer_of(tiny("llama-mha")[0], fields, tmp_path / "x.gguf")
        tool, start = (tokenizer.encode(f"{mark}the", add_bos=False)[1:] for mark in marks)
        assert tool == start == tokenizer.vocabulary.library.encode("the")


@pytest.mark.parametrize("tokens, named, expected", [
    (["<|return|>", "<|end|>", "<|user|>"], 0, "<|return|> <|end|>"),
    (["<|end|>", "<|endoftext|>", "<|fim_pad|>"], 1, "<|endoftext|> <|end|>"),
    (["</s>", "<eos>", "<end_of_turn>", "a"], 1, "<eos> <end_of_turn>"),  # HTML in Gemma's vocabulary
    (["a", "b"], None, ""),
])  # fmt: skip
@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, None])
def test_texts_that_end_an_answer(tokens, named, expected, kind):
    types = None if kind is None else [kind] * len(tokens)  # a file may lack them
    fields = {"tokens": tokens, "token_type": types, "eos_token_id": named}
    found = end_tokens(fields | {"token_type": token_types(fields)})
    assert sorted(tokens[i] for i in found) == sorted(expected.split())
    assert not found or found[0] == named, "templates name the first one"
    assert [*end_tokens({"tokens": ["<|endoftext|>"], "token_type": [UNKNOWN], "eos_token_id": None})] == [0]
