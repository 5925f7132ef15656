"""GGUF files that run as they are: the header's parser, broken and hostile files, files that change, ranks."""

import dataclasses
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from cases import STRANGE_VALUES, read_model
from conftest import ROOT, greedy, random_prompts
from gguf_writer import bpe_fields, model_tensors, sentencepiece_fields, write_gguf
from programs import main
from texts import strings
from tokenizers import Tokenizer as Library

import formats
from cli import UserError
from convert_hf_checkpoint import convert, default_directory
from formats import QuantizedLinear, StackedLinear
from load import load_engine, load_model, open_checkpoint
from options import DraftOption, ModelOptions
from quantize import open_dense
from sources import gguf_header
from sources.gguf_file import GgufFile
from sources.gguf_tokenizer import PRE_TOKENIZERS
from sources.hf_directory import hf_config
from sources.opening import open_gguf, open_hf, open_named
from sources.wheels import default_gguf
from text.tokenizer import Tokenizer
from tp import Shard

Q = gguf.GGMLQuantizationType


def vocabulary(byte_level):
    return bpe_fields(Library.from_file(str(byte_level / "tokenizer.json")), "qwen2")


def kinds_of_a_real_file(name):
    kinds = {"token_embd": Q.Q6_K, "attn_v": Q.Q6_K, "ffn_down": Q.Q5_K if name.startswith("blk.1.") else Q.Q6_K}
    return kinds.get(name.split(".")[-2], Q.Q4_K)


def write_small(path, byte_level, per_file=0):
    """A small model whose layers have several formats, as in a Q4_K_M file. per_file: see write_gguf."""
    config = transformers.Qwen2Config(
        vocab_size=131, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, intermediate_size=768,
        num_hidden_layers=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    write_gguf(path, model, vocabulary(byte_level), quantize=kinds_of_a_real_file, per_file=per_file)


@pytest.fixture(scope="module")
def file(tmp_path_factory, byte_level):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_small(path, byte_level)
    return path


@pytest.fixture(scope="module")
def split(tmp_path_factory, byte_level):
    """The same in files with seven tensors each, as the gguf package writes them."""
    folder = tmp_path_factory.mktemp("split")
    write_small(folder / "small.gguf", byte_level, per_file=7)
    return sorted(folder.glob("*.gguf"))


# ---------------------------------------------------------------- the header


@pytest.mark.parametrize("which", ["small", "default"])
@pytest.mark.slow
def test_the_header_equals_that_of_the_gguf_package(file, which):
    path = file if which == "small" else default_gguf()
    reader, ours = gguf.GGUFReader(path), GgufFile(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in reader.tensors:
        info = ours.infos[tensor.name]
        assert (info.type, info.shape) == (tensor.tensor_type.name, tuple(map(int, tensor.shape[::-1])))
        assert (info.start, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
    assert len(ours.infos) == len(reader.tensors)


# ---------------------------------------------------------------- split files


def test_a_split_model_equals_the_whole_file(file, split):
    whole, prompts = open_gguf(file), random_prompts([5, 9], 131)
    expected = greedy(load_model(whole), prompts, 7)
    assert [path.name for path in split] == [f"small-{i:05}-of-00004.gguf" for i in (1, 2, 3, 4)]
    for path in (split[0], split[2]):
        source = open_named(str(path))
        assert (source.name, source.config, source.path) == ("small", whole.config, split[0])
        assert source.tokenizer.encode("hello") == whole.tokenizer.encode("hello")
        assert greedy(load_model(source), prompts, 7) == expected


BROKEN_SPLITS = {
    "one is missing": (lambda paths: paths[2].unlink(), "is one of 4 files .* beside it small-00003-of-00004.gguf is"),
    "two are missing": (lambda paths: [p.unlink() for p in paths[1:3]], "small-00002-of-00004.gguf and 1 more is"),
    "another name": (lambda paths: paths[0].rename(paths[0].parent / "x.gguf"), "its name must end as MODEL-00001-of"),
    "two are swapped": (lambda paths: shutil.copy(paths[1], paths[2]), "lacks tensor "),
    "one is no part": (
        lambda paths: paths[1].write_bytes(b"GGUF" + bytes(99)),
        "00002-of-00004.gguf is not a readable",
    ),
    "one is truncated": (lambda paths: os.truncate(paths[3], paths[3].stat().st_size - 1), "truncated: tensor "),
}


@pytest.mark.parametrize("damage, why", BROKEN_SPLITS.values(), ids=BROKEN_SPLITS)
def test_broken_splits_are_refused(split, tmp_path, damage, why):
    paths = [Path(shutil.copy(path, tmp_path)) for path in split]
    damage(paths)
    with pytest.raises(UserError, match=why):
        open_named(str(next(path for path in sorted(tmp_path.glob("*.gguf"), reverse=True) if path.stat().st_size)))


def test_a_part_that_changes_while_it_is_read_is_noticed(split, tmp_path):
    paths = [Path(shutil.copy(path, tmp_path)) for path in split]
    source = open_named(str(paths[0]))
    os.utime(paths[2], ns=(1, 1))
    with pytest.raises(UserError, match="was changed while it was read"):
        load_model(source)


def edited(file, name, change):
    """The bytes of a file in which the info of tensor `name` is changed: change(dimensions, type, offset)."""
    raw = bytearray(file.read_bytes())
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (n,) = struct.unpack_from("<I", raw, at)
    info = struct.Struct(f"<{n}QIQ")
    *dimensions, kind, offset = info.unpack_from(raw, at + 4)
    changed = change(dimensions, kind, offset)
    info.pack_into(raw, at + 4, *changed[0], *changed[1:])
    return bytes(raw)


DAMAGES = {
    "beyond the end": (lambda d, kind, offset: (d, kind, 1 << 40), "tensor blk.1.attn_q.weight ends at byte"),
    "huge": (lambda d, kind, offset: ([1 << 62, 1 << 62], kind, offset), "truncated: tensor blk.1.attn_q.weight"),
    "overlapping": (lambda d, kind, offset: (d, kind, offset - 32), "inside the tensor before it"),
    "ragged": (lambda d, kind, offset: ([d[0] - 1, d[1]], kind, offset), "which is not a multiple of 256"),
    "empty": (lambda d, kind, offset: ([0, 1 << 63], kind, offset), r"is \(9223372036854775808, 0\), but"),
    "no type": (lambda d, kind, offset: (d, 77, offset), "blk.1.attn_q.weight has type 77, which is not known"),
}


@pytest.mark.parametrize("change, why", DAMAGES.values(), ids=DAMAGES)
def test_wrong_places_of_tensors_are_refused(file, tmp_path, change, why):
    (tmp_path / "x.gguf").write_bytes(edited(file, "blk.1.attn_q.weight", change))
    with pytest.raises(UserError, match=why):
        open_gguf(tmp_path / "x.gguf")


def test_other_broken_files_are_refused(file, tmp_path):
    raw, path = file.read_bytes(), tmp_path / "x.gguf"
    first, second = b"blk.0.attn_q.weight", b"blk.1.attn_q.weight"
    cases = {
        "lacks tensor blk.0.attn_q.weight": raw.replace(first, second, 1),
        "it does not begin with GGUF": raw[1000:],
        "version 99 is not known": raw[:4] + struct.pack("<I", 99) + raw[8:],
        "truncated: its header ends neither in the file nor in 64 MB": raw[:500],
        "truncated: tensor .* ends at byte": raw[:-40000],
    }
    for why, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(UserError, match=why):
            open_gguf(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="x.gguf is not a regular file"):
        open_gguf(path)
    with pytest.raises(UserError, match="does not exist"):
        open_gguf(tmp_path / "missing.gguf")


@pytest.mark.slow
def test_random_damage_ends_in_one_line_or_not_at_all(file, tmp_path):
    raw, path, rng = file.read_bytes(), tmp_path / "x.gguf", random.Random(5)
    size = min(info.start for info in GgufFile(file).infos.values())
    refused = 0
    for _ in range(150):
        damaged = bytearray(raw)
        for _ in range(rng.choice([1, 1, 3, 20])):
            damaged[rng.randrange(size)] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            source = open_gguf(path)
            _ = source.tokenizer_files
            read_model(source)
        except UserError as error:
            refused += "\n" not in str(error)
    assert refused > 60


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_equals_its_conversion(file, tmp_path, monkeypatch, dtype):
    kept, dense = tmp_path / "kept", tmp_path / "dense"
    convert(open_gguf(file), kept, dtype), convert(open_gguf(file, dequantize=True), dense, dtype)
    prompts = random_prompts((5, 30))

    def tokens(source, **options):
        return greedy(load_model(source, dtype=dtype, **options), prompts, 12)

    expected = tokens(kept)
    assert tokens(open_gguf(file)) == expected
    if dtype == torch.float32:
        monkeypatch.setattr(formats, "UNPACK_BLOCK", 1000)  # a row is unpacked at a time
        assert tokens(dense) == tokens(open_gguf(file), dequantize=True) == expected
        assert tokens(open_gguf(file), kernels="torch") == expected


def test_each_rank_takes_its_slices(file):
    with pytest.raises(UserError, match="n_head 8 is not a multiple of 3"):
        read_model(open_gguf(file), shard=Shard(0, 3))
    whole = read_model(open_gguf(file))
    for rank in range(2):
        shard = Shard(rank, 2)
        part, slices = read_model(open_gguf(file), shard=shard).state_dict(), shard.fit(whole).slices(whole)
        assert part.keys() == whole.state_dict().keys()
        for name, tensor in whole.state_dict().items():
            assert torch.equal(part[name], slices[name].cut(tensor)), name
    stacks = [module for module in whole.modules() if isinstance(module, StackedLinear)]
    assert len(stacks) == 2 and all(isinstance(piece, QuantizedLinear) for stack in stacks for piece in stack)


def test_a_file_that_changes_while_it_is_read(file, tmp_path, monkeypatch):
    """It is replaced, or written to, or cut short: one line, or the model of the old file."""
    path, data = tmp_path / "x.gguf", file.read_bytes()

    def read_with(change):
        path.write_bytes(data)
        source, seen = open_gguf(path), []
        original = GgufFile.read

        def read(self, name, kind):
            seen.append(name)
            if len(seen) == 5:
                change()
            return original(self, name, kind)

        monkeypatch.setattr(GgufFile, "read", read)
        try:
            read_model(source)
        finally:
            monkeypatch.setattr(GgufFile, "read", original)

    def replace():
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").rename(path)

    def overwrite():  # with the time of the old file
        before = path.stat()
        with path.open("r+b") as opened:
            opened.write(data[:-1] + b"x")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    write_again = (lambda: path.write_bytes(b"x" + data[1:])), (lambda: os.truncate(path, 5000))
    for change in (replace, *write_again, path.unlink, overwrite):
        with pytest.raises(UserError, match="was changed while it was read"):
            read_with(change)
    read_with(lambda: None)


def test_a_directory_that_another_model_replaces_while_it_is_read(tiny, tmp_path):
    """After its header was read: the tensors of the other one have other shapes."""
    shutil.copytree(tiny("llama-mha")[1], tmp_path / "hf")
    source = open_hf(tmp_path / "hf")
    weights = source.open_weights(source.empty_model())
    shutil.copy(tiny("llama-gqa-biased")[1] / "model.safetensors", tmp_path / "hf")
    with pytest.raises(UserError, match="was changed while it was read"):
        load_model(dataclasses.replace(source, open_weights=lambda model: weights))


@pytest.mark.slow
def test_nothing_is_written(file, tmp_path):
    def files_of_the_checkout():  # without those of tools that run beside this test
        names = (path.relative_to(ROOT).parts for path in ROOT.rglob("*"))
        return {parts for parts in names if "__pycache__" not in parts and not parts[0].startswith(".")}

    (tmp_path / "home").mkdir()
    before = files_of_the_checkout()
    environment = os.environ | {"HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")}
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint_path", str(file), "--prompt", "ab"]
    done = subprocess.run([*command, "--max_new_tokens", "3"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files_of_the_checkout() <= before
    assert list((tmp_path / "home").iterdir()) == [] and list(file.parent.iterdir()) == [file]


def test_fields_that_do_not_fit_are_refused(file):
    tokens = {f"tokenizer.ggml.{name}": value for name, value in (("tokens", ["a", "b", "c"]), ("merges", ["a b"]))}
    cases = [
        (tokens | {"tokenizer.ggml.token_type": [1, 1, 1]}, "the tokenizer of .* cannot be read"),
        ({"tokenizer.ggml.token_type": [3, 1]}, "token_type does not have a number for each token"),
        ({"tokenizer.ggml.token_type": "abc"}, "token_type does not have a number for each token"),
        ({"qwen2.attention.sliding_window": ""}, 'qwen2.attention.sliding_window = "" is not an integer'),
        ({"qwen2.expert_count": []}, "is not an integer"),
    ]
    for fields, why in cases:
        opened = GgufFile(file)
        opened.metadata |= fields
        with pytest.raises(UserError, match=why):
            opened.config()
            opened.tokenizer_files()


# ---------------------------------------------------------------- metadata of real files


def with_fields(file, **fields):
    """The open file with other fields of metadata. None removes a field."""
    opened = GgufFile(file)
    opened.metadata |= fields
    for name in [name for name, value in fields.items() if value is None]:
        opened.metadata.pop(name)
    return opened


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown"])
@pytest.mark.parametrize("value", [700, 2**32 - 1, -1, "</s>", 1.0, [1]], ids=str)
def test_an_id_outside_the_vocabulary_counts_as_absent(file, capsys, name, value):
    """With one line, also if texts are to begin with it. The file has 700 tokens; <|end|> is known by its name."""
    field = f"tokenizer.ggml.{name}_token_id"
    absent = with_fields(file, **{field: None}).tokenizer_files().settings
    opened = with_fields(file, **{field: value, "tokenizer.ggml.add_bos_token": True})
    assert opened.tokenizer_files().settings == absent
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and f"{field} = {value!r} is not one of the ids of 700 tokens" in line
    assert (absent["bos_token_id"], absent["add_bos_token"], absent["eos_token_ids"]) == (None, False, [1])


def test_an_eos_token_is_not_added(file):
    fields = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_bos_token": True}
    tokenizer = Tokenizer(with_fields(file, **fields, **{"tokenizer.ggml.bos_token_id": 0}).tokenizer_files())
    assert tokenizer.encode("x")[0] == 0 and len(tokenizer.encode("x")) == 2


BROKEN = b"\xff\xfe\xff"


def test_invalid_utf8_in_the_metadata(file, tmp_path, capsys):
    """In a field's name, in general.name, in a token, in a merge: every other text has the same ids, and runs."""
    before = Tokenizer(GgufFile(file).tokenizer_files())
    tokens, merges = (GgufFile(file).metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    longest = max(tokens[2:], key=len).encode()
    merge = max(merges, key=len).encode()
    raw = file.read_bytes()
    for old in (b"general.quantization_version", longest, merge):
        sized = struct.pack("<Q", len(old)) + old
        if sized in raw:
            assert raw.count(sized) == 1
            raw = raw.replace(sized, sized[:-5] + BROKEN + sized[-2:])
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    opened = GgufFile(path)
    after = Tokenizer(opened.tokenizer_files())
    [damaged] = [i for i, token in enumerate(opened.metadata["tokenizer.ggml.tokens"]) if token != tokens[i]]
    assert r"\xff\xfe\xff" in after.decode([damaged]) and after.encode(after.decode([damaged]))
    compared = 0
    for text in strings(["<|end|>"]):
        if damaged not in before.encode(text):
            assert after.encode(text) == before.encode(text)
            compared += 1
    assert compared > 150
    assert re.search(r"\d of \d+ merges are of tokens that the vocabulary lacks", capsys.readouterr().err)
    prompts = random_prompts((5, 30))
    assert greedy(load_model(open_gguf(path)), prompts, 6) == greedy(load_model(open_gguf(file)), prompts, 6)


def test_empty_tokens_get_names_and_of_a_token_twice_the_last_one_is_used(file):
    """Two empty tokens as well. Their merges are left out."""
    tokens = list(GgufFile(file).metadata["tokenizer.ggml.tokens"])
    before = Tokenizer(GgufFile(file).tokenizer_files())
    one, other = (before.encode(text)[0] for text in ("the", "camel"))
    emptied = [token if i not in (one, other) else "" for i, token in enumerate(tokens)]
    after = Tokenizer(with_fields(file, **{"tokenizer.ggml.tokens": emptied}).tokenizer_files())
    assert after.decode([one, other]) == f"[EMPTY_{one}][EMPTY_{other}]"
    assert after.decode(after.encode("the camel 1")) == "the camel 1" and after.encode("<|end|>") == [1]
    emptied[other] = tokens[5]
    twice = Tokenizer(with_fields(file, **{"tokenizer.ggml.tokens": emptied}).tokenizer_files())
    assert (twice.decode([5]), twice.decode([other])) == ("", before.decode([5]))


LAYERED = {"attention.head_count": 8, "attention.head_count_kv": 4, "feed_forward_length": 768}


@pytest.mark.parametrize("name, value", LAYERED.items())
def test_a_list_of_equal_values_is_one_value(file, name, value):
    config, name = GgufFile(file).config(), f"qwen2.{name}"
    assert with_fields(file, **{name: [value, value]}).config() == config
    for other in (2 * value, 0):
        with pytest.raises(UserError, match=rf"{name} = \[{value}, {other}\] differs by layer, which is not supported"):
            with_fields(file, **{name: [value, other]}).config()
    for wrong in ([], [value], [value] * 3):
        with pytest.raises(UserError, match=f"{name} = .* does not have a value for each of 2 layers"):
            with_fields(file, **{name: wrong}).config()


ZEROS = """logit_scale embedding_scale residual_scale attention.scale attention.sliding_window rope.freq_base_swa
    attention.temperature_scale rope.scaling.factor rope.scale_linear expert_count expert_used_count"""


@pytest.mark.parametrize("name", ZEROS.split())
def test_a_zero_counts_as_absent(file, name):
    assert with_fields(file, **{f"qwen2.{name}": 0}).config() == GgufFile(file).config()


FACTOR, OLD, KIND = "qwen2.rope.scaling.factor", "qwen2.rope.scale_linear", "qwen2.rope.scaling.type"


@pytest.mark.parametrize("fields, kind, factor", [
    ({FACTOR: 4.0}, "linear", 4.0), ({OLD: 3.0}, "linear", 3.0), ({OLD: 3.0, FACTOR: 4.0}, "linear", 4.0),
    ({OLD: 3.0, KIND: "linear"}, "linear", 3.0), ({OLD: 3.0, KIND: "yarn"}, "yarn", 3.0),
    ({OLD: 3.0, FACTOR: 4.0, KIND: "none"}, None, None), ({FACTOR: 1.0}, None, None),
    ({KIND: "yarn", FACTOR: 4.0, "qwen2.rope.scaling.original_context_length": 0}, "yarn", 4.0),
], ids=str)  # fmt: skip
def test_a_rope_factor_without_a_type_is_linear(file, fields, kind, factor):
    config, plain = with_fields(file, **fields).config(), GgufFile(file).config()
    found = config.rope_scaling
    assert (found and found.kind, found and found.factor) == (kind, factor)
    assert config.max_seq_length == plain.max_seq_length * (factor or 1)
    assert kind != "yarn" or found.original_max_seq_length == plain.max_seq_length


@pytest.mark.parametrize("kind", ["", "dynamic", "su", 3, [1], "longrope"])
def test_other_types_of_rope_scaling_are_refused(file, kind):
    with pytest.raises(UserError, match=r"qwen2.rope.scaling.type = .* (is not known; known: none, linear|needs the)"):
        with_fields(file, **{KIND: kind, FACTOR: 4.0}).config()


@pytest.mark.parametrize("pattern, layers", [(0, (0, 1)), (2, (0,)), ([False, True], (1,))], ids=str)
def test_a_pattern_says_which_layers_slide(file, pattern, layers):
    """A number n: every n-th layer does not slide, and with 0 all do."""
    fields = {"qwen2.attention.sliding_window": 50, "qwen2.attention.sliding_window_pattern": pattern}
    assert with_fields(file, **fields).config().sliding_layers == layers


RECORDED = json.loads((ROOT / "tests" / "data" / "pre_tokenizers.json").read_text())
# What llama-tokenize gives for the default model's file with another tokenizer.ggml.pre and without add_bos_token.
WORDS = "I'm 12345½, IT'S a=b|c` x-Ray/\n\nHTTPServer:\r\n  internationalization"
OF_LLAMA_CPP = dict(RECORDED["ids of llama-tokenize"])


@pytest.fixture(scope="module")
def default_file():
    return default_gguf()  # before capsys, because it may be downloaded


@pytest.mark.parametrize("pre", OF_LLAMA_CPP)
def test_names_of_pre_tokenizers_have_the_ids_of_llama_cpp(default_file, capsys, pre):
    fields = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": None}
    tokenizer = Tokenizer(with_fields(default_file, **fields).tokenizer_files())
    assert tokenizer.encode(WORDS) == OF_LLAMA_CPP[pre]
    assert ("lacks tokenizer.ggml.pre" in capsys.readouterr().err) == (not pre)


# Between which there are no merges. llama-tokenize has the same ids for 200 texts with each of these.
PIECES = RECORDED["pieces"]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pieces_of_every_pre_tokenizer(file, name):
    library = with_fields(file, **{"tokenizer.ggml.pre": name}).tokenizer_files().library
    pieces = [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str("I'm 1234 aB=c `(d'S/\n\n12")]
    assert "|".join(pieces).replace("\u0120", " ").replace("\u010a", "\n") == PIECES[name]


def test_the_rule_of_qwen35_is_that_of_transformers():
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert PRE_TOKENIZERS["qwen35"] == [PRETOKENIZE_REGEX]


TOKENIZER_FIELDS = """model pre tokens token_type merges scores bos_token_id eos_token_id eot_token_id eom_token_id
    unknown_token_id padding_token_id add_bos_token add_eos_token add_space_prefix remove_extra_whitespaces"""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_strange_values_in_the_tokenizers_fields_end_in_one_line(file, sentencepiece_folder, kind):
    opened = GgufFile(file)
    if kind == "llama":
        library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
        opened.metadata |= sentencepiece_fields(library)
    whole, chance = opened.metadata, random.Random(kind)
    n = len(whole["tokenizer.ggml.tokens"])
    values = [*STRANGE_VALUES, "gpt2", "llama", "default", ["a"] * n, [str(i) for i in range(n)], [3] * n, [1.5] * n]
    used = 0
    for name in TOKENIZER_FIELDS.split():
        for value in chance.sample(values, 6):
            fields = whole | {f"tokenizer.ggml.{name}": value}
            opened.metadata = {name: value for name, value in fields.items() if value is not None}
            try:
                tokenizer = Tokenizer(opened.tokenizer_files())
            except UserError as error:
                assert len(str(error)) < 900 and "\n" not in str(error)
                continue
            ids = tokenizer.encode("The fox <s> 12\n <|end|>")
            assert isinstance(tokenizer.decode([*ids, *tokenizer.eos_ids, 5, 60000]), str)
            used += 1
    assert used > 30


def test_text_of_a_file_is_printed_as_one_short_line(file, capsys):
    opened = GgufFile(file)
    opened.metadata["qwen2.a\nb\x1b[31m"] = [0] * 100_000
    opened.config()
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" ...") and "qwen2.a b[31m = [0, 0" in line and len(line) < 510


def test_an_absurd_header_is_refused_at_once(file, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "LONGEST_HEADER", 1 << 18)
    endless = struct.pack("<QQ", 1 << 40, 0), struct.pack("<QQQ1sIIQ", 0, 1, 1, b"x", 9, 0, 1 << 30)  # tensors; a field
    for start in endless:
        with (tmp_path / "x.gguf").open("wb") as opened:
            opened.write(file.read_bytes()[:8] + start)
            opened.truncate(1 << 31)  # a sparse file
        with pytest.raises(UserError, match="its header ends neither in the file nor in 0 MB"):
            open_gguf(tmp_path / "x.gguf")


def test_a_file_that_drafts_for_itself_is_dequantized(file):
    options = ModelOptions(device="cpu", draft=[DraftOption("int4-self")])
    engine = load_engine(open_checkpoint(str(file)), options, 1, 16)
    assert engine.model.blocks[0].mlp.down.weight.dtype == torch.bfloat16 and not options.dequantize


# ---------------------------------------------------------------- files of Ollama


def ollama_fields(architecture, config):
    """The fields that Ollama writes in other ways than llama.cpp, and those of the encoder of images."""
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    fields = {"attention.head_count_kv": heads, "attention.recurrent_layers": None, "vision.block_count": 12}
    if architecture != "lfm2":
        fields |= {"rope.dimension_sections": [11, 11, 10], "rope.mrope_section": [11, 11, 10]}
        fields |= {"mrope_sections": [11, 11, 10], "rope.mrope_interleaved": True, "ssm.v_head_reordered": True}
    if architecture == "qwen35moe":
        fields |= {"feed_forward_length": 0, "norm_top_k_prob": True}
    fields |= {"vision.image_mean": [0.5, 0.5, 0.5], "image_token_id": 7, "mm.tokens_per_image": 256}
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def other_tensors():
    """Tensors of encoders and of an MTP layer, some named like tensors of a language model."""
    names = ["v.blk.0.attn_q.bias", "mm.0.attn_q.bias", "mm.input_projection.weight"]
    names += ["a.blk.0.ffn_down.bias", "mtp.fc.weight", "mtp.layers.0.attn_q.weight", "mtp.norm.weight"]
    tensors = {name: np.full((3, 5), np.nan, dtype=np.float32) for name in names}
    return tensors | {"v.patch_embd.weight": np.ones((2, 256), dtype=np.float32)}


def ollama_tensors(oracle, architecture):
    """Other tensors, and new names for some: old name -> None, new name -> array."""
    tensors = other_tensors()
    new_names = {".ssm_dt.bias": ".ssm_dt", "token_embd_norm.": "output_norm."}
    for name, array in model_tensors(oracle, architecture).items():
        for old, new in new_names.items():
            if old in name:
                tensors |= {name: None, name.replace(old, new): array}
    return tensors


OF_OLLAMA = {"qwen35-grouped": "qwen35", "qwen35-moe-5": "qwen35moe", "qwen35-moe-8": "qwen35moe", "lfm2-tied": "lfm2"}


@pytest.mark.parametrize("name, architecture", OF_OLLAMA.items())
def test_a_file_of_ollama_equals_that_of_llama_cpp(tiny, byte_level, tmp_path, capsys, name, architecture):
    """The same bits and tokens, and one line. In qwen35-moe-8, the list alone says which layers have attention."""
    oracle = tiny(name)[0]
    paths = [tmp_path / "llama_cpp.gguf", tmp_path / "ollama.gguf"]
    write_gguf(paths[0], oracle, vocabulary(byte_level))
    expected = load_model(open_gguf(paths[0]), dtype=torch.float32)
    capsys.readouterr()

    extra, tensors = ollama_fields(architecture, oracle.config), ollama_tensors(oracle, architecture)
    other_type = {"v.patch_embd.weight": Q.TQ1_0}  # of no format; since it is left out, it is not dequantized
    write_gguf(paths[1], oracle, vocabulary(byte_level), other_type.get, extra, tensors)
    source = open_named(str(paths[1]))
    said = "ollama.gguf: left out: tensors that are not of the language model (a.*, mm.*, mtp.*, v.*)"
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(said) and source.config == expected.config
    found = load_model(source, dtype=torch.float32)
    state = expected.state_dict()
    assert state.keys() == found.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())
    prompts = random_prompts((5, 30))
    assert greedy(found, prompts, 7) == greedy(expected, prompts, 7)


@pytest.mark.parametrize("name", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
@pytest.mark.parametrize("model, architecture", [("qwen35-grouped", "qwen35"), ("lfm2-tied", "lfm2")])
def test_lists_may_have_zeros_where_no_layer_has_attention(tiny, byte_level, tmp_path, model, architecture, name):
    oracle = tiny(model)[0]
    write_gguf(tmp_path / "x.gguf", oracle, vocabulary(byte_level))
    plain = GgufFile(tmp_path / "x.gguf")
    field = f"{architecture}.{name}"
    value = plain.per_layer(name)
    kinds = oracle.config.layer_types
    values = [value if kind == "full_attention" else 0 for kind in kinds]
    assert with_fields(tmp_path / "x.gguf", **{field: values}).config() == plain.config()
    values = [*values[:-1], value + 1]
    with pytest.raises(UserError, match=rf"{field} = \[.*\] differs by layer, which is not supported"):
        with_fields(tmp_path / "x.gguf", **{field: values}).config()


def test_heads_and_experts_in_another_order_are_refused(tiny, byte_level, tmp_path):
    write_gguf(tmp_path / "x.gguf", tiny("qwen35-moe-5")[0], vocabulary(byte_level))
    for name in ("ssm.v_head_reordered", "norm_top_k_prob"):
        with pytest.raises(UserError, match=f"qwen35moe.{name} = false (is not supported|changes what the model)"):
            with_fields(tmp_path / "x.gguf", **{f"qwen35moe.{name}": False}).config()


def test_other_tensors_are_left_out_of_every_family_if_rope_is_known(file, tiny, byte_level, tmp_path):
    """Files of Gemma 3 by Ollama lack the base of RoPE, or name it otherwise: llama.cpp's default would be wrong."""
    oracle, path = tiny("gemma3-untied")[0], tmp_path / "x.gguf"
    write_gguf(path, oracle, vocabulary(byte_level))
    expected = open_gguf(path).config
    write_gguf(path, oracle, vocabulary(byte_level), tensors=other_tensors())
    assert open_gguf(path).config == expected
    with pytest.raises(UserError, match="x.gguf lacks gemma3.rope.freq_base"):
        with_fields(path, **{"gemma3.rope.freq_base": None}).config()
    with pytest.raises(UserError, match="gemma3.rope.local.freq_base = 10000.0 is not known"):
        with_fields(path, **{"gemma3.rope.local.freq_base": 10000.0}).config()


@pytest.mark.parametrize("name", ["gemma4-tied", "gemma4-untied", "gemma4-unified"])
def test_files_of_gemma4(tiny, byte_level, tmp_path, name):
    """They have the config of the directory, with RoPE's divisors of 1e30 for dimensions that are not rotated."""
    oracle, directory, _ = tiny(name)
    write_gguf(tmp_path / "x.gguf", oracle, vocabulary(byte_level))
    assert GgufFile(tmp_path / "x.gguf").config() == hf_config(directory)


@pytest.mark.parametrize("field, value, why", [
    ("attention.head_count_kv", [3, 3, 1, 3, 3, 2, 2], "differs by layer"),
    ("attention.head_count_kv", [3, 3, 3, 3, 3, 2, 3], "differs by layer"),
    ("attention.value_length_swa", 20, "is not the key_length 12"),
    ("rope.dimension_count", 10, r"rotates a part of each head \(20\)"),
])  # fmt: skip
def test_other_files_of_gemma4_are_refused(tiny, byte_level, tmp_path, field, value, why):
    write_gguf(tmp_path / "x.gguf", tiny("gemma4-tied")[0], vocabulary(byte_level))
    with pytest.raises(UserError, match=f"gemma4.{field} = .*{why.removeprefix('= ')}"):
        with_fields(tmp_path / "x.gguf", **{f"gemma4.{field}": value}).config()


def test_values_that_a_file_of_gemma4_lacks_in_one_layer(tiny, byte_level, tmp_path):
    write_gguf(
        tmp_path / "x.gguf", tiny("gemma4-untied")[0], vocabulary(byte_level), tensors={"blk.0.attn_v.weight": None}
    )
    with pytest.raises(UserError, match="lacks tensor blk.0.attn_v.weight"):
        open_gguf(tmp_path / "x.gguf")


# ---------------------------------------------------------------- files without the suffix .gguf


@pytest.mark.parametrize("name", ["blobs/sha256-83c54730", "llama3.2", "model.bin", "MODEL.GGUF"])
@pytest.mark.parametrize("linked", [False, True])
def test_the_first_four_bytes_decide(file, tmp_path, name, linked):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if linked:
        (tmp_path / "blob").write_bytes(file.read_bytes())
        path.symlink_to(tmp_path / "blob")
    else:
        path.write_bytes(file.read_bytes())
    source, expected = open_checkpoint(str(path)), open_gguf(file)
    called = path.stem if path.suffix.lower() == ".gguf" else path.name
    assert (source.config, source.quantization, source.name) == (expected.config, expected.quantization, called)
    prompts = random_prompts([5, 9], 131)
    assert greedy(load_model(source), prompts, 4) == greedy(load_model(expected), prompts, 4)


@pytest.mark.parametrize("data", [b"", b"GGU", b"PK\3\4" + bytes(40)])
def test_files_that_begin_otherwise_are_refused_in_one_line(tmp_path, data):
    path = tmp_path / "sha256-1"
    path.write_bytes(data)
    with pytest.raises(UserError, match="is neither a GGUF file .it does not begin with GGUF. nor the directory"):
        open_checkpoint(str(path))
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + data)
    with pytest.raises(UserError, match="version 50331648 is not known; known: 2 and 3 .little-endian."):
        open_checkpoint(str(path))


def test_a_pipe_is_not_read_and_a_directory_may_be_called_gguf(file, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match="pipe is neither a GGUF file"):
        open_named(str(tmp_path / "pipe"))
    with pytest.raises(UserError, match="pipe.gguf is not a regular file"):
        open_named(str(tmp_path / "pipe.gguf"))
    convert(open_gguf(file), tmp_path / "x.gguf", torch.float32)
    assert open_named(str(tmp_path / "x.gguf")).config == open_gguf(file).config
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "B.GGUF").write_bytes(b"")
    with pytest.raises(UserError, match="has no config.json, but B.GGUF: give the path of that file"):
        open_named(str(tmp_path / "upper"))


def test_blobs_are_sources_and_drafts_of_every_command(file, tmp_path, capsys, monkeypatch):
    """A relative path may look like a name of the hub; the converted checkpoint has the name of the file."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "sha256-1").write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    text = "blobs/sha256-1"
    assert default_directory(text, open_named(text, dequantize=True), "bfloat16").name == "sha256-1"
    assert default_directory(text, open_named(text, dequantize=True), "bfloat16").parent.name == "checkpoints"
    dense = open_dense(text, formats.Quantization("int8", 0, "int8"))
    assert dense.quantization is None and "is quantized already" in capsys.readouterr().err
    args = ["--prompt_ids", "5,6,7", "--max_new_tokens", 8, "--temperature", 0, "--json"]
    drafting = ["--speculate_k", 3]
    plain, _ = main(capsys, monkeypatch, "--checkpoint_path", file, *args)
    blob, _ = main(capsys, monkeypatch, "--checkpoint_path", text, *args, "--draft_checkpoint_path", text, *drafting)
    assert blob["samples"] == plain["samples"] and blob["mean_accepted_tokens"] > 0.5
