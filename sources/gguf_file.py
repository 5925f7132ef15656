"""Reads GGUF files of the architectures llama, qwen2 and qwen3: the Config, the tensors, the tokenizer.

The `gguf` package parses the file and dequantizes tensors. This file knows what the metadata means (with the names that
llama.cpp writes), which tensors have another layout than ours, and which quantized tensors can be kept as they are.
Nothing is guessed from the file's name.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from checkpoint import Writer, make_config
from cli import UserError
from formats import Packed, Quantization, pack_nibbles
from model import Config, RopeScaling, yarn_attention_factor

FAMILIES = ("llama", "qwen2", "qwen3")
# The fields that are read or checked. Any other field of the architecture causes a warning.
USED_FIELDS = """block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length
    attention.sliding_window rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow vocab_size expert_count expert_used_count"""

BLOCK = 32  # columns that share a scale, in the formats that can be kept
# GGUF type: our formats that can hold its values exactly.
EXACT_FORMATS = {"Q4_0": ["int4", "int8"], "Q4_1": ["int4"], "Q8_0": ["int8"]}


def repack(blocks: np.ndarray, kind: str, format: str) -> dict[str, torch.Tensor]:
    """Convert a matrix of type (kind) Q4_0, Q4_1 or Q8_0 to our int4 or int8 format (formats.py), with the same values.

    blocks: uint8 (N, bytes). Each block of 32 columns is a float16 scale, in Q4_1 also a float16 minimum, and then the
    columns. In Q8_0 a column is a signed byte. In Q4_0 and Q4_1 the columns are 16 bytes: columns 0 to 15 in the low
    nibbles, 16 to 31 in the high nibbles. A weight of Q4_0 is (q - 8) * scale.
    """
    N = blocks.shape[0]
    n_float16 = 2 if kind == "Q4_1" else 1  # numbers before the columns
    blocks = torch.from_numpy(blocks.copy()).view(N, -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
    head, body = blocks[..., : 2 * n_float16].contiguous().view(torch.float16), blocks[..., 2 * n_float16 :]
    scales = head[..., 0].contiguous()
    if kind == "Q8_0":
        return {"weight": body.reshape(N, -1).view(torch.int8), "scales": scales}
    q = torch.cat([body & 15, body >> 4], dim=-1).reshape(N, -1)  # (N,K)
    if format == "int8":
        return {"weight": q.to(torch.int8) - 8, "scales": scales}
    mins = head[..., 1].contiguous() if kind == "Q4_1" else scales * -8
    return {"packed": pack_nibbles(q), "scales": scales, "mins": mins}


class Reader(gguf.GGUFReader):
    """The reader of the gguf package, with an error that names the tensor at which a file is truncated."""

    def _build_tensors(self, start_offs, fields):
        for entry in fields:
            _, name, _, dims, kind, offset = entry.parts
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            end, have = int(start_offs) + int(offset[0]) + int(dims.prod()) // block * size, len(self.data)
            if end > have:
                raise ValueError(f"truncated: tensor {bytes(name).decode()} ends at byte {end:,}, the file at {have:,}")
        super()._build_tensors(start_offs, fields)


class GgufFile:
    """An open GGUF file. If anything is wrong with it, a UserError names the file and the field or tensor."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.reader = Reader(path)
        except (ValueError, LookupError, OSError, OverflowError, MemoryError) as error:
            raise UserError(f"{path} is not a readable GGUF file: {error}") from None
        self.family = self.value("general.architecture", None)
        if self.family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(f"{path}: architecture {self.family} is not known; known in GGUF files: {known}")

    def value(self, name: str, *default):
        """A field of the metadata, or the default. UserError if the field is missing and there is no default."""
        if name in self.reader.fields:
            return self.reader.fields[name].contents()
        if not default:
            raise UserError(f"{self.path} lacks {name}")
        return default[0]

    def hyper(self, name: str, *default):
        """A hyperparameter: a field whose name begins with the architecture."""
        return self.value(f"{self.family}.{name}", *default)

    def refuse(self, name: str, why: str):
        raise UserError(f"{self.path}: {self.family}.{name} = {self.hyper(name)!r} {why}")

    # ------------------------------------------------------------ Config

    def config(self) -> Config:
        for name in sorted(self.reader.fields):
            family, _, rest = name.partition(".")
            if family == self.family and rest not in USED_FIELDS.split():
                print(f"warning: {self.path}: {name} = {self.value(name)!r} is unknown and ignored", file=sys.stderr)
        shapes = {tensor.name: tensor.shape for tensor in self.reader.tensors}  # the last dimension comes first
        if "token_embd.weight" not in shapes:
            raise UserError(f"{self.path} lacks tensor token_embd.weight")
        for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            if isinstance(self.hyper(name, 0), list):
                self.refuse(name, "differs by layer, which is not supported")
        if self.hyper("expert_count", 0):
            self.refuse("expert_count", "makes this a mixture of experts, which is not supported")
        n_head, dim = self.hyper("attention.head_count"), self.hyper("embedding_length")
        head_dim = self.hyper("attention.key_length", dim // n_head)
        if self.hyper("attention.value_length", head_dim) != head_dim:
            self.refuse("attention.value_length", f"is not attention.key_length = {head_dim}, which is not supported")
        if self.hyper("rope.dimension_count", head_dim) != head_dim:
            self.refuse("rope.dimension_count", f"rotates a part of each head ({head_dim}), which is not supported")
        scaling, context = self.rope()
        return make_config(
            self.path,
            n_layer=self.hyper("block_count"),
            n_head=n_head,
            n_kv_head=self.hyper("attention.head_count_kv", n_head),
            head_dim=head_dim,
            dim=dim,
            hidden_dim=self.hyper("feed_forward_length"),
            vocab_size=int(shapes["token_embd.weight"][1]),
            max_seq_length=context,
            norm_eps=round(self.hyper("attention.layer_norm_rms_epsilon"), 12),  # 1e-5 or 1e-6, stored as float32
            rope_base=float(self.hyper("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            tied_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            out_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            qk_norm="blk.0.attn_q_norm.weight" in shapes,
            sliding_window=self.hyper("attention.sliding_window", None) or None,
        )

    def rope(self) -> tuple[RopeScaling | None, int]:
        """(scaling, longest context). Llama 3's scaling is a tensor of divisors, others are fields."""
        context, kind = self.hyper("context_length"), self.hyper("rope.scaling.type", "none")
        divisors = next((tensor for tensor in self.reader.tensors if tensor.name == "rope_freqs.weight"), None)
        if divisors is not None and kind != "none":
            self.refuse("rope.scaling.type", "and a tensor rope_freqs.weight cannot both be used")
        if divisors is not None:
            return RopeScaling("factors", factors=tuple(map(float, divisors.data))), context
        if kind == "none":
            return None, context
        factor = float(self.hyper("rope.scaling.factor"))
        if kind == "linear":
            return RopeScaling("linear", factor), max(context, int(context * factor))
        if kind != "yarn":
            self.refuse("rope.scaling.type", "is not known; known: none, linear, yarn")
        original = self.hyper("rope.scaling.original_context_length", context)
        scaling = RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=float(self.hyper("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self.hyper("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=yarn_attention_factor(factor) * float(self.hyper("rope.scaling.attn_factor", 1.0)),
        )
        return scaling, max(context, int(original * factor))

    # ------------------------------------------------------------ tensors

    def tensors(self, config: Config, keep: dict[str, str]) -> Iterator[tuple[str, torch.Tensor | Packed]]:
        """Yield the name and value of each tensor, in float32 or, if `keep` has a format for its name, packed in it.

        In files of the llama architecture, RoPE rotates neighbouring rows (2i, 2i+1) of q and k. Our RoPE rotates rows
        that are half a head apart (i, i + E/2), so these rows are reordered.
        """
        heads = {"attn_q": config.n_head, "attn_k": config.n_kv_head} if self.family == "llama" else {}

        def reorder(tensor):
            n = heads.get(entry.name.split(".")[-2])
            if n is None or tensor.shape[0] != n * config.head_dim:  # `convert` refuses a wrong shape
                return tensor
            return tensor.view(n, config.head_dim // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)

        for entry in self.reader.tensors:
            kind = entry.tensor_type.name
            if keep.get(entry.name, "none") != "none":
                parts = repack(np.asarray(entry.data), kind, keep[entry.name])
                if not all(torch.isfinite(part).all() for part in parts.values()):
                    raise UserError(f"{self.path}: {entry.name} ({kind}) holds NaN or infinity")
                shape = torch.Size(int(size) for size in reversed(entry.shape))
                yield entry.name, Packed(shape, {name: reorder(part) for name, part in parts.items()})
                continue
            try:
                array = dequantize(entry.data, entry.tensor_type)
            except (NotImplementedError, ValueError) as error:
                raise UserError(f"{self.path}: {entry.name} ({kind}) cannot be dequantized: {error}") from None
            yield entry.name, reorder(torch.from_numpy(array if array.flags.writeable else array.copy()))

    def quantization(self, modules: dict[str, list[str]]) -> Quantization:
        """The Quantization of a checkpoint that keeps the quantized values of this file where it can.

        modules: our module name -> the names of the file's tensors that are stacked in this module. A module is
        dequantized if no single format of ours can hold all its tensors exactly.
        """
        kinds = {tensor.name: tensor.tensor_type.name for tensor in self.reader.tensors}
        formats = {}
        for module, names in modules.items():
            fitting = [EXACT_FORMATS.get(kinds.get(name), ["none"]) for name in names]
            formats[module] = next((f for f in ("int4", "int8") if all(f in choice for choice in fitting)), "none")
        blocks = [formats[module] for module in modules if module.startswith("blocks.")]
        mode = "int8" if blocks.count("int8") > blocks.count("int4") else "int4"
        if mode not in blocks:
            kept = ", ".join(EXACT_FORMATS)
            raise UserError(f"{self.path} has no matrices of {kept}; convert it without --keep_quantized")
        head = formats.get("output", formats["embedding"])
        without = Quantization(mode, BLOCK, head)
        exceptions = {module: format for module, format in formats.items() if format != without.format(module)}
        return Quantization(mode, BLOCK, head, exceptions)

    # ------------------------------------------------------------ tokenizer

    def write_tokenizer(self, writer: Writer):
        """Write tokenizer.json or tokenizer.model, tokenizer_config.json and the chat template, from the metadata."""

        def get(name, *default):
            return self.value(f"tokenizer.ggml.{name}", *default)

        kind = get("model", None)
        if kind == "gpt2":
            library, add_bos = byte_level_bpe(self.path, get)
            library.save(str(writer.path / "tokenizer.json"))
        elif kind == "llama":
            add_bos = True
            (writer.path / "tokenizer.model").write_bytes(sentencepiece_model(get))
        else:
            raise UserError(f"{self.path}: tokenizer kind {kind!r} is not known; known: gpt2, llama")
        tokens, kinds = get("tokens"), get("token_type", [])
        bos, eos_ids = get("bos_token_id", None), [get(f"{name}_token_id", None) for name in ("eos", "eot", "eom")]
        eos_ids = list(dict.fromkeys(i for i in eos_ids if i is not None))
        settings = {
            "bos_token_id": bos,
            "eos_token_ids": eos_ids,
            "add_bos_token": bool(get("add_bos_token", add_bos)) and bos is not None,
            "bos_token": None if bos is None else tokens[bos],
            "eos_token": tokens[eos_ids[0]] if eos_ids else None,
            "special_tokens": {
                token: i for i, token in enumerate(tokens) if kinds[i : i + 1] in ([CONTROL], [UNKNOWN])
            },
            "legacy": True,
        }
        writer.add_json("tokenizer_config.json", settings)
        template = self.value("tokenizer.chat_template", None)
        if template:
            (writer.path / "chat_template.jinja").write_text(template, encoding="utf-8")


NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types, numbered as in sentencepiece

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
# The regex that splits a text before BPE merges (pre-tokenization), by name in the file; None: GPT-2's regex.
PRE_TOKENIZERS = {
    "gpt-2": None,
    "smollm": None,  # every digit is split off first
    "llama-bpe": _CONTRACTION + _WORD + r"|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTION + _WORD + r"|\p{N}" + _REST,
    "tekken": _CASED_WORD + r"|\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*"),
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def byte_level_bpe(path: Path, get):
    """(a `tokenizers` Tokenizer, whether texts begin with the BOS token if the file does not say so)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = get("pre", None)
    name = ALIASES.get(name, name)
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS | ALIASES))
        raise UserError(f"{path}: tokenizer.ggml.pre {name!r} is not known; known: {known}")
    llama_style = name in ("llama-bpe", "tekken")  # these add a BOS token, and do not merge a word that is a token
    tokens, merges = get("tokens"), [tuple(merge.split(" ", 1)) for merge in get("merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=llama_style))
    regex = PRE_TOKENIZERS[name]
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
    if regex is not None:
        cuts.append(pre_tokenizers.Split(Regex(regex), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None))
    library.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    library.decoder = decoders.ByteLevel()
    if name == "qwen2":
        library.normalizer = normalizers.NFC()
    kinds = list(zip(tokens, get("token_type", [])))
    library.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL])
    library.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
    return library, llama_style


def sentencepiece_model(get) -> bytes:
    """A tokenizer.model file: sentencepiece's ModelProto in protobuf's wire format (see sentencepiece_model.proto).

    A GGUF file has everything that such a file needs. So the sentencepiece library can encode text here as it did when
    the model was trained.
    """

    def varint(number: int) -> bytes:
        number &= 2**64 - 1
        out = bytearray()
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        return bytes([*out, number])

    def field(number: int, value) -> bytes:  # int: varint; float: fixed32; bytes: after their length
        if isinstance(value, float):
            return varint(number << 3 | 5) + torch.tensor(value, dtype=torch.float32).numpy().tobytes()
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        return varint(number << 3 | 2) + varint(len(value)) + value

    tokens = get("tokens")
    kinds, scores = get("token_type", [NORMAL] * len(tokens)), get("scores")
    pieces = b"".join(
        field(1, field(1, token.encode()) + field(2, float(score)) + field(3, int(kind)))
        for token, score, kind in zip(tokens, scores, kinds)
    )
    unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else get("unknown_token_id", 0)
    bos, eos = get("bos_token_id", -1), get("eos_token_id", -1)
    trainer = field(3, 2) + field(35, 1)  # model_type BPE, byte_fallback
    trainer += field(40, int(unknown)) + field(41, int(bos)) + field(42, int(eos)) + field(43, -1)
    prefix = int(bool(get("add_space_prefix", True)))
    normalizer = field(1, b"identity") + field(3, prefix) + field(4, 0) + field(5, 1)  # keeps every space
    return pieces + field(2, trainer) + field(3, normalizer)
