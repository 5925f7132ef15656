"""Reads GGUF files: the Config, the tensors, the tokenizer.

gguf_header.py parses the header. This file knows what the metadata means (with the names that llama.cpp writes);
families.py knows which architectures there are, and which of their tensors have another layout than ours; formats.py
knows the quantized types. The `gguf` package dequantizes other types. Nothing is guessed from the file's name.
"""

import dataclasses
import os
import re
import struct
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from checkpoint import TokenizerFiles, make_config
from cli import UserError, first_line, print_status, printable
from config import Config, RopeScaling
from formats import FORMATS, Packed, Quantization, Scheme
from sources.families import GGUF_FAMILIES
from sources.fields import yarn_attention_factor
from sources.gguf_header import TensorInfo, open_file, read_header

# The fields that are read or checked. Any other field of the architecture causes a warning.
USED_FIELDS = """block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length
    attention.sliding_window rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor rope.scale_linear
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow vocab_size expert_count expert_used_count embedding_scale residual_scale logit_scale
    attention.scale attention.sliding_window_pattern rope.freq_base_swa
    rope.scaling.yarn_attn_factor rope.scaling.yarn_log_multiplier attention.temperature_scale"""
TOKEN_IDS = {f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown")}
ROPE_TYPES = ("none", "linear", "yarn", "longrope")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """An open GGUF file. If anything is wrong with it, a UserError names the file and the field or tensor."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = open_file(path)
            weakref.finalize(self, os.close, self.file)
            self.metadata, self.infos = read_header(self.file)
        except (ValueError, LookupError, OSError, OverflowError, MemoryError, struct.error) as error:
            raise UserError(f"{path} is not a readable GGUF file: {error}") from None
        self.architecture = str(self.value("general.architecture", None))
        if self.architecture not in GGUF_FAMILIES:
            known = ", ".join(GGUF_FAMILIES)
            raise UserError(f"{path}: architecture {self.architecture} is not known; known in GGUF files: {known}")
        if (parts := self.value("split.count", 0)) not in (0, 1):
            raise UserError(f"{path} is one of {parts} parts; join them with llama-gguf-split --merge")
        self.family = GGUF_FAMILIES[self.architecture]

    def value(self, name: str, *default):
        """A field of the metadata, or the default. UserError if the field is missing and there is no default."""
        if name in self.metadata:
            return self.metadata[name]
        if not default:
            raise UserError(f"{self.path} lacks {name}")
        return default[0]

    def hyper(self, name: str, *default):
        """A hyperparameter: a field whose name begins with the architecture."""
        return self.value(f"{self.architecture}.{name}", *default)

    def per_layer(self, name: str, *default):
        """A hyperparameter that may be a list with a value for each layer, if all of them are equal."""
        value = self.hyper(name, *default)
        if not isinstance(value, list):
            return value
        if len(value) != self.hyper("block_count"):
            self.refuse(name, f"does not have a value for each of {self.hyper('block_count')} layers")
        if any(other != value[0] for other in value):
            self.refuse(name, "differs by layer, which is not supported")
        return value[0]

    def nonzero(self, name: str, default):
        """A hyperparameter of which 0 counts as absent, as in llama.cpp."""
        value = self.hyper(name, default)
        return default if value == 0 else value

    def refuse(self, name: str, why: str):
        raise UserError(f"{self.path}: {self.architecture}.{name} = {short(self.hyper(name))} {why}")

    # ------------------------------------------------------------ Config

    def config(self) -> Config:
        try:
            return self._config()
        except (TypeError, ValueError, ZeroDivisionError, AttributeError, OverflowError) as error:
            raise UserError(f"{self.path} has a field of the wrong type or size: {first_line(error)}") from None

    def _config(self) -> Config:
        for name in sorted(self.metadata):
            architecture, _, rest = name.partition(".")
            if architecture == self.architecture and rest not in USED_FIELDS.split():
                print_status(printable(f"warning: {self.path}: {name} = {self.value(name)!r} is unknown and ignored"))
        shapes = {name: info.shape for name, info in self.infos.items()}
        if len(shapes.get("token_embd.weight", ())) != 2:
            raise UserError(f"{self.path} lacks tensor token_embd.weight")
        if self.hyper("block_count") > len(self.infos):
            self.refuse("block_count", f"is more than the {len(self.infos)} tensors of the file")
        for name in ("expert_count", "attention.sliding_window"):
            if type(self.hyper(name, 0)) is not int:
                self.refuse(name, "is no whole number")
        if self.hyper("expert_count", 0):
            self.refuse("expert_count", "makes this a mixture of experts, which is not supported")
        n_head, dim = self.per_layer("attention.head_count"), self.hyper("embedding_length")
        head_dim = self.hyper("attention.key_length", dim // n_head)
        if self.hyper("attention.value_length", head_dim) != head_dim:
            self.refuse("attention.value_length", f"is not attention.key_length = {head_dim}, which is not supported")
        if (rotary_dim := self.hyper("rope.dimension_count", head_dim)) != head_dim and not self.family.partial_rotary:
            self.refuse("rope.dimension_count", f"rotates a part of each head ({head_dim}), which is not supported")
        scaling, context = self.rope()
        config = make_config(
            self.path,
            n_layer=self.hyper("block_count"),
            n_head=n_head,
            n_kv_head=self.per_layer("attention.head_count_kv", n_head),
            head_dim=head_dim,
            dim=dim,
            hidden_dim=self.per_layer("feed_forward_length"),
            vocab_size=shapes["token_embd.weight"][0],
            max_seq_length=context,
            norm_eps=round(self.hyper("attention.layer_norm_rms_epsilon"), 12),  # 1e-5 or 1e-6, stored as float32
            rope_base=float(self.hyper("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            rotary_dim=None if rotary_dim == head_dim else rotary_dim,
            query_scale_beta=self.nonzero("attention.temperature_scale", None),
            tied_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            out_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            qk_norm="blk.0.attn_q_norm.weight" in shapes,
            sliding_window=self.nonzero("attention.sliding_window", None),
            sliding_layers=self.sliding_layers(),
            sliding_rope_base=self.nonzero("rope.freq_base_swa", None),
            embedding_scale=self.nonzero("embedding_scale", 1.0),
            attention_scale=self.nonzero("attention.scale", None),
            residual_scale=self.nonzero("residual_scale", 1.0),
            logits_scale=1 / self.nonzero("logit_scale", 1.0),
        )
        return dataclasses.replace(config, **self.family.gguf_fields(config))

    def sliding_layers(self) -> tuple[int, ...] | None:
        """The layers that slide: a list says so for each layer, a number n that every n-th does not (0: all do).
        None if the file does not say it."""
        pattern = self.hyper("attention.sliding_window_pattern", None)
        if pattern is None:
            return None
        layers = range(self.hyper("block_count"))
        if not isinstance(pattern, list):
            return tuple(i for i in layers if pattern == 0 or (i + 1) % pattern)
        if len(pattern) != len(layers):
            self.refuse("attention.sliding_window_pattern", f"does not have a value for each of {len(layers)} layers")
        return tuple(i for i in layers if pattern[i])

    def divisors(self, name: str) -> tuple[float, ...] | None:
        """A tensor of divisors of RoPE's frequencies, or None if the file does not have it."""
        if (info := self.infos.get(name)) is None:
            return None
        if info.type not in DENSE or len(info.shape) != 1:
            raise UserError(f"{self.path}: {name} is {info.type} {info.shape}, not a vector of floating-point numbers")
        return tuple(self.read(info).float().tolist())

    def rope(self) -> tuple[RopeScaling | None, int]:
        """(scaling, longest context). The scalings of Llama 3 and Phi-3 are tensors of divisors, others are fields. As
        in llama.cpp, a factor without a type is linear, and older files have it under another name."""
        context, kind = self.hyper("context_length"), self.hyper("rope.scaling.type", "linear")
        if kind not in ROPE_TYPES:
            self.refuse("rope.scaling.type", f"is not known; known: {', '.join(ROPE_TYPES)}")
        factor = float(self.hyper("rope.scaling.factor", self.hyper("rope.scale_linear", 0.0))) or 1.0
        if kind == "linear" and factor == 1.0:
            kind = "none"
        original = self.nonzero("rope.scaling.original_context_length", context)
        factors, short, long = map(self.divisors, ROPE_TENSORS)
        if factors is not None and kind != "none":
            raise UserError(f"{self.path}: {kind} RoPE scaling and the tensor {ROPE_TENSORS[0]} cannot both be used")
        if factors is not None:
            return RopeScaling("factors", factors=factors), context
        if short is not None:
            return RopeScaling(
                "longrope",
                original_max_seq_length=original,
                attention_factor=float(self.hyper("rope.scaling.attn_factor", 1.0)),
                factors=short,
                long_factors=long or (),
            ), context
        if kind == "none":
            return None, context
        if kind == "linear":
            return RopeScaling("linear", factor), max(context, int(context * factor))
        if kind == "longrope":
            self.refuse("rope.scaling.type", f"needs the tensors {ROPE_TENSORS[1]} and {ROPE_TENSORS[2]}")
        usual = yarn_attention_factor(factor, 1.0, self.hyper("rope.scaling.yarn_log_multiplier", 0.0))
        scaling = RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=float(self.hyper("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self.hyper("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=float(self.hyper("rope.scaling.yarn_attn_factor", usual))
            * float(self.hyper("rope.scaling.attn_factor", 1.0)),
        )
        return scaling, max(context, int(original * factor))

    # ------------------------------------------------------------ tensors

    def tensors(self, keep: dict[str, Scheme | None]) -> Iterator[tuple[str, torch.Tensor | Packed]]:
        """Yield the name and value of each tensor: packed if `keep` has a scheme for its name."""
        for name, info in self.infos.items():
            tensor = self.read(info)
            if keep.get(name) is None:
                yield name, tensor if info.type in DENSE else self.dequantize(info, tensor)
            elif FORMATS[keep[name].format].is_finite({"blocks": tensor}):
                yield name, Packed(torch.Size(info.shape), {"blocks": tensor})
            else:
                raise UserError(f"{self.path}: {name} ({info.type}) holds NaN or infinity")

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A tensor: floating-point numbers, or uint8 (rows, bytes). The file is read and not mapped into memory,
        because a mapped file that somebody truncates would kill the process."""
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        buffer, done = memoryview(data.numpy()), 0
        while done < info.nbytes:
            count = os.preadv(self.file, [buffer[done : done + (1 << 30)]], info.start + done)
            if count == 0:
                raise UserError(f"{self.path} was truncated while it was read")
            done += count
        if info.type in DENSE:
            return data.view(DENSE[info.type]).view(info.shape)
        return data.view(-1, info.row_bytes) if info.row_bytes else data

    def dequantize(self, info: TensorInfo, blocks: torch.Tensor) -> torch.Tensor:
        """A tensor of a type that is not kept, in float32."""
        if info.type.lower() in FORMATS:
            format, K = FORMATS[info.type.lower()], info.shape[-1]
            return format.unpack({"blocks": blocks}, format.groupsizes[0], K).view(info.shape)
        import gguf

        try:
            with np.errstate(all="ignore"):  # NaN is refused later, by the tensor's name
                array = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[info.type])
        except (NotImplementedError, ValueError, KeyError) as error:
            raise UserError(f"{self.path}: {info.name} ({info.type}) cannot be dequantized: {error}") from None
        return torch.from_numpy(np.ascontiguousarray(array)).view(info.shape)

    def quantization(self, modules: dict[str, list[str]]) -> Quantization | None:
        """The Quantization with the types of this file's tensors that are in FORMATS; None if there are none.

        modules: our module name -> the names of the file's tensors that are stacked in this module. Matrices of other
        quantized types are dequantized, after one line that says so.
        """
        formats = {}
        for module, names in modules.items():
            kinds = [self.infos[name].type.lower() if name in self.infos else "none" for name in names]
            own = [kind if kind in FORMATS else "none" for kind in kinds]
            formats[module] = own[0] if len(set(own)) == 1 else "+".join(own)
        self.warn_of_other_types()
        blocks = [format for module, format in formats.items() if module.startswith("blocks.")]
        mode = max(FORMATS, key=lambda name: sum(text.split("+").count(name) for text in blocks))
        if not any(mode in text.split("+") for text in blocks):
            return None
        head, size = formats.get("output", formats["embedding"]), FORMATS[mode].groupsizes[0]
        without = Quantization(mode, size, head)
        exceptions = {module: format for module, format in formats.items() if format != without.usual(module)}
        return Quantization(mode, size, head, exceptions)

    def warn_of_other_types(self):
        others = [info for info in self.infos.values() if info.type.lower() not in FORMATS and info.type not in DENSE]
        if others:
            kinds = ", ".join(sorted({info.type for info in others}))
            elements = sum(torch.Size(info.shape).numel() for info in others)
            extra = 2 * elements - sum(info.nbytes for info in others)
            print_status(f"{self.path}: {kinds} cannot be kept: dequantized, which takes {extra / 1e6:.1f} MB more")

    # ------------------------------------------------------------ tokenizer

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer and the chat template, from the metadata."""
        try:
            return self._tokenizer_files()
        except (UserError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of any kind; where the library's Rust code panics, it is no Exception
            raise UserError(f"{self.path}: the tokenizer's fields do not fit each other: {first_line(error)}") from None

    def tokenizer_fields(self) -> dict:
        """The fields of the tokenizer, by the ends of their names, as llama.cpp reads them: an empty token gets a name,
        and an id outside the vocabulary counts as absent."""
        start = "tokenizer.ggml."
        fields = {name.removeprefix(start): value for name, value in self.metadata.items() if name.startswith(start)}
        tokens = self.value(f"{start}tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError("tokens is not a list of strings")
        tokens = fields["tokens"] = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        if len(set(tokens)) < len(tokens):
            [(twice, _)] = Counter(tokens).most_common(1)
            print_status(f"warning: {self.path}: {start}tokens has {short(twice)} twice; only the last one is used")

        for name in sorted(TOKEN_IDS & fields.keys()):
            if type(fields[name]) is not int:
                raise UserError(f"{self.path}: {start}{name} = {short(fields[name])} is not a token id")
            if not 0 <= fields[name] < len(tokens):
                why = f"is not one of the ids of {len(tokens)} tokens and counts as absent"
                print_status(f"warning: {self.path}: {start}{name} = {fields.pop(name)} {why}")

        for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
            if type(fields.get(name, True)) not in (bool, int):
                raise UserError(f"{self.path}: {start}{name} = {short(fields[name])} is neither true nor false")
        if fields.get("add_eos_token"):
            print_status(f"{self.path}: {start}add_eos_token is ignored: a prompt has no EOS token at its end")
        return fields

    def _tokenizer_files(self) -> TokenizerFiles:
        fields = self.tokenizer_fields()
        get = fields.get
        kind, files = get("model", None), TokenizerFiles(self.path, {})
        if kind == "gpt2":
            files.library, add_bos = byte_level_bpe(self.path, get)
        elif kind == "llama":
            add_sentencepiece_defaults(fields)
            add_bos, files.model = True, sentencepiece_model(get)
        else:
            raise UserError(f"{self.path}: tokenizer kind {short(kind)} is not known; known: gpt2, llama")
        tokens, bos = get("tokens"), get("bos_token_id", None)
        eos_ids = end_tokens(get)
        files.settings = {
            "bos_token_id": bos,
            "eos_token_ids": eos_ids,
            "add_bos_token": bool(get("add_bos_token", add_bos)) and bos is not None,
            "bos_token": None if bos is None else tokens[bos],
            "eos_token": tokens[eos_ids[0]] if eos_ids else None,
        }
        if kind == "llama":
            files.settings |= {"added_tokens": added_tokens(get, self.is_phi3()), "legacy": True}
        templates = [self.value(f"tokenizer.chat_template{name}", None) for name in ("", ".tool_use")]
        files.template, files.tool_template = (text if isinstance(text, str) and text else None for text in templates)
        return files

    def is_phi3(self) -> bool:
        """Whether the tokenizer is that of Phi-3 if it is of the kind llama. (Phi-4 has another kind.)"""
        name = str(self.value("general.name", "")).lower()
        return self.architecture == "phi3" or "phi-3" in name or "phi3" in name


def short(value) -> str:
    """A value of the file as a message shows it."""
    return printable(repr(value))


def end_tokens(get) -> list[int]:
    """The ids of the tokens that end a text: those that the fields name, and special tokens that are known by name. (A
    file names one token only, such as Qwen2.5's <|im_end|>, although a text ends at <|endoftext|>.)"""
    tokens = get("tokens")
    named = [i for i in named_ends(get) if i is not None]
    known = [i for i, kind in enumerate(token_types(get)) if kind in SPECIAL and tokens[i] in END_TOKENS]
    ends = list(dict.fromkeys(named + known))
    texts = {tokens[i] for i in ends}
    if texts & {"<|return|>", "<|flush|>"} and texts & {"<|call|>", "<|calls|>"}:
        return [i for i in ends if tokens[i] != "<|end|>"]  # it ends each of the several messages of an answer there
    return ends


def named_ends(get) -> list[int | None]:
    """The ids of the tokens that the fields name as the ends of a text, a turn and a message."""
    return [get(f"{name}_token_id", None) for name in ("eos", "eot", "eom")]


def token_types(get) -> list[int]:
    """The type of each token. Tokens that are known by their text to be marks are control tokens. Many files say that
    they are user-defined or normal, which is why llama.cpp goes by the text, too."""
    tokens = get("tokens")
    types = list(get("token_type", None) or [NORMAL] * len(tokens))
    if len(types) != len(tokens) or not all(type(kind) is int for kind in types):
        raise ValueError("token_type does not have a number for each token")
    for i, token in enumerate(tokens):
        is_html = token == "</s>" and i not in named_ends(get)  # as in Gemma's and Qwen's vocabularies
        if token in MARKS and types[i] != UNKNOWN and not is_html:
            types[i] = CONTROL
    return types


def added_tokens(get, is_phi3: bool) -> list[dict]:
    """The tokens to look for in text before the rest is encoded by sentencepiece, as in a tokenizer.json. Those with
    spaces are left to sentencepiece, which also finds them beside other spaces.

    is_phi3: most of these tokens take the white space after them. A GGUF file cannot say so.
    """
    added = []
    for i, (token, kind) in enumerate(zip(get("tokens"), token_types(get))):
        if kind in SPECIAL or (kind == USER_DEFINED and " " not in token):
            rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            flags = {"rstrip": rstrip, "normalized": False, "special": kind != USER_DEFINED}
            added.append({"id": i, "content": token} | flags)
    return added


# Tokens that end a text or a turn, in the families that are known here and their relatives.
END_TOKENS = """<|endoftext|> <|im_end|> <|eot_id|> <|eom_id|> <|end_of_text|> <end_of_turn> <|end|> <|return|> <|call|>
    <|calls|> <|flush|> </s> <eos> <EOT> _<EOT> [EOT] [EOS] <|eot|> <|end_of_role|> <end_of_utterance> <turn|>
    <|tool_response> <｜end▁of▁sentence｜> [e~[""".split()  # noqa: SIM905
# Tokens that mark the parts of a file, and the files of a repository, in prompts for infilling.
INFILL_TOKENS = """<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
    <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
    <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
    <|file_sep|>""".split()  # noqa: SIM905
MARKS = {*END_TOKENS, *INFILL_TOKENS}


NORMAL, UNKNOWN = 1, 2  # token types, numbered as in sentencepiece
CONTROL, USER_DEFINED = 3, 4
SPECIAL = (CONTROL, UNKNOWN)  # found in text, and not shown
BYTE = 6

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATH_REST = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_LLAMA3 = _CONTRACTION + _WORD + r"|\p{N}{1,3}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
# The regexes that split a text one after the other before BPE merges (pre-tokenization), by name in the file.
PRE_TOKENIZERS = {
    "default": [r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"],  # llama.cpp's rule for files without a name
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "falcon": [r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"],
    "llama-bpe": [_LLAMA3],
    "glm4": [_LLAMA3],
    "dbrx": [_LLAMA3],
    "minicpm5": [r"\p{N}{1,3}", _CONTRACTION + _WORD + r"|\p{N}+" + _REST],
    "qwen2": [_CONTRACTION + _WORD + r"|\p{N}" + _REST],
    "seed-coder": [_CONTRACTION + _WORD + r"|\p{N}" + _REST.replace(r"[\r\n]*", "")],
    "tekken": [_CASED_WORD + r"|\p{N}" + _PATH_REST],
    "gpt-4o": [_CASED_WORD + rf"(?:{_CONTRACTION.rstrip('|')})?" + r"|\p{N}{1,3}" + _PATH_REST],
}
IGNORE_MERGES = ("llama-bpe", "glm4", "minicpm5", "tekken")  # a word that is a token is not merged from its parts
ADD_BOS = ("llama-bpe", "tekken")  # texts begin with a BOS token, if the file does not say otherwise
NFC = ("qwen2", "deepseek-r1-qwen")  # normalized as by the models' own tokenizer.json; llama.cpp does not do this
# Names that llama.cpp treats as one of these.
SAME_RULE = {
    "gpt-2": """phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe modern-bert gigachat
        a.x-4.0 mellum mpt olmo jais exaone4 trillion granite-docling""",
    "smollm": "refact starcoder command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "glm4": "glm5",
    "dbrx": "smaug-bpe chatglm-bpe",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
}
ALIASES = {name: rule for rule, names in SAME_RULE.items() for name in names.split()}


def byte_level_bpe(path: Path, get):
    """(a `tokenizers` Tokenizer, whether texts begin with the BOS token if the file does not say so)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = get("pre", None)
    if not name:
        print_status(f"warning: {path} lacks tokenizer.ggml.pre: text is split by a default, maybe not as in training")
    rule = ALIASES.get(name, name or "default")
    if rule not in PRE_TOKENIZERS:
        known = f"{', '.join(sorted(PRE_TOKENIZERS))} and {len(ALIASES)} names of the same rules"
        raise UserError(f"{path}: tokenizer.ggml.pre {short(name)} is not known; known: {known}")

    tokens = get("tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = known_merges(path, get("merges", None), vocabulary)
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule in IGNORE_MERGES))
    cuts = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in PRE_TOKENIZERS[rule]]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    library.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    library.decoder = decoders.ByteLevel()
    if name in NFC:
        library.normalizer = normalizers.NFC()
    kinds = list(zip(tokens, token_types(get)))
    special = [token for token, kind in kinds if kind in SPECIAL]
    library.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    library.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
    return library, rule in ADD_BOS


def known_merges(path: Path, merges: list[str] | None, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of two tokens of the vocabulary to a third one. Those of a token that is damaged are left out."""
    if merges is None:
        print_status(f"warning: {path} lacks tokenizer.ggml.merges: each byte of a text becomes a token")
        return []
    pairs = [merge.partition(" ")[::2] for merge in merges]
    known = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary and a + b in vocabulary]
    if len(known) < len(pairs) / 2:
        raise ValueError("most merges are of tokens that the vocabulary lacks")
    if len(known) < len(pairs):
        count = f"{len(pairs) - len(known)} of {len(pairs)} merges"
        print_status(f"warning: {path}: {count} are of tokens that the vocabulary lacks and are left out")
    return known


def add_sentencepiece_defaults(fields: dict):
    """Add what a file may leave out: <unk>, <s> and </s> are the first three tokens, and all scores are equal."""
    tokens = fields["tokens"]
    fields.setdefault("scores", [0.0] * len(tokens))
    if tokens[:3] == ["<unk>", "<s>", "</s>"]:
        is_byte = re.compile("<0x[0-9A-F]{2}>").fullmatch
        others = [BYTE if is_byte(token) else NORMAL for token in tokens[3:]]
        fields.setdefault("token_type", [UNKNOWN, CONTROL, CONTROL, *others])
        fields.setdefault("bos_token_id", 1)
        fields.setdefault("eos_token_id", 2)


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
    kinds, scores = token_types(get), get("scores")
    if len(scores) < len(tokens):
        raise ValueError("scores does not have a number for each token")
    # llama.cpp's converter writes these with plain spaces, as in Gemma's tokens for several spaces.
    tokens = [token.replace(" ", "\u2581") if k == USER_DEFINED else token for token, k in zip(tokens, kinds)]
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
