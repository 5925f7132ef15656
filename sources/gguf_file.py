"""Reads GGUF files: the Config and the tensors.

gguf_header.py parses the header, and gguf_tokenizer.py reads the tokenizer. This file knows what the metadata means
(with the names that llama.cpp writes); families.py knows which architectures there are, and which of their tensors have
another layout than ours; formats.py knows the quantized types. The `gguf` package dequantizes other types. Nothing is
guessed from the file's name, except where the other files of a split model are.
"""

import dataclasses
import struct
import weakref
from pathlib import Path

import numpy as np
import torch

from checkpoint import make_config
from cli import UserError, and_more, first_line, print_status, printable
from config import Config, RopeScaling
from formats import FORMATS, Quantization
from sources.families import GGUF_FAMILIES
from sources.fields import yarn_attention_factor
from sources.gguf_header import TensorInfo, open_file, read_header, split_files
from sources.gguf_tokenizer import gguf_tokenizer_files, short
from tokenizer import TokenizerFiles

# The fields that are read or checked. Any other field of the architecture causes a warning.
USED_FIELDS = """block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length
    attention.sliding_window rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor rope.scale_linear
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow vocab_size expert_count expert_used_count embedding_scale residual_scale logit_scale
    attention.scale attention.sliding_window_pattern rope.freq_base_swa
    rope.scaling.yarn_attn_factor rope.scaling.yarn_log_multiplier attention.temperature_scale"""
ROPE_TYPES = ("none", "linear", "yarn", "longrope")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """An open GGUF file, or the files of a split model, of which the first has the metadata. If anything is wrong, a
    UserError names the file and the field or tensor."""

    is_mapped = False  # a tensor is read into memory of its own

    def __init__(self, path: Path):
        self.path, self.files = path, []
        self.metadata, self.infos = self.open_part(path)
        if self.value("split.count", 0) not in (0, 1):
            self.open_split(split_files(path))
        self.architecture = str(self.value("general.architecture", None))
        if self.architecture not in GGUF_FAMILIES:
            raise UserError(
                f"{path}: architecture {self.architecture} is not known; "
                f"known in GGUF files: {', '.join(GGUF_FAMILIES)}"
            )
        self.family = GGUF_FAMILIES[self.architecture]

    def open_part(self, path: Path) -> tuple[dict, dict[str, TensorInfo]]:
        """(metadata, tensors by name) of a file, which stays open."""
        try:
            file = open_file(path)
            weakref.finalize(self, file.close)
            metadata, infos = read_header(file)
        except (ValueError, LookupError, OSError, OverflowError, MemoryError, struct.error) as error:
            raise UserError(f"{path} is not a readable GGUF file: {error}") from None

        for info in infos.values():
            info.part = len(self.files)
        self.files.append(file)
        return metadata, infos

    def open_split(self, paths: list[Path]):
        """Open all files of a split model, after one of them said that it is one."""
        count = self.value("split.count")
        if count != len(paths):
            raise UserError(
                f"{self.path} is one of {count} files of a model, so its name must end as "
                "MODEL-00001-of-00003.gguf does"
            )
        if missing := [path.name for path in paths if not path.is_file()]:
            raise UserError(f"{self.path} is one of {count} files of a model; beside it {and_more(missing)} is missing")

        self.path = paths[0]
        self.files = []
        self.infos = {}
        for number, path in enumerate(paths):
            metadata, infos = self.open_part(path)
            if number == 0:
                self.metadata = metadata
            if (metadata.get("split.no"), metadata.get("split.count")) != (number, count):
                raise UserError(f"{path} is not number {number + 1} of {count} files of a model, as its name says")
            if twice := self.infos.keys() & infos.keys():
                raise UserError(f"{path}: tensor {min(twice)} is in another file of the model, too")
            self.infos |= infos
        total = self.value("split.tensors.count", len(self.infos))
        if total != len(self.infos):
            raise UserError(f"{self.path} names {total} tensors, but its {count} files have {len(self.infos)}")

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
        shapes = self.shapes()
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
        return tuple(self.read(name).float().tolist())

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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name."""
        return {name: info.shape for name, info in self.infos.items()}

    def read(self, name: str, kind: str = "weight") -> torch.Tensor:
        """A tensor in floating-point numbers; with kind "blocks" that of a quantized format as it is."""
        info = self.infos[name]
        tensor = self.read_data(info)
        if kind != "blocks":
            return tensor if info.type in DENSE else self.dequantize(info, tensor)
        if not FORMATS[info.type.lower()].is_finite({"blocks": tensor}):
            raise UserError(f"{self.path}: {name} ({info.type}) holds NaN or infinity")
        return tensor

    def read_data(self, info: TensorInfo) -> torch.Tensor:
        """A tensor: floating-point numbers, or uint8 (rows, bytes). The file is read and not mapped into memory,
        because a mapped file that somebody truncates would kill the process."""
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        file = self.files[info.part]
        file.seek(info.start)
        if file.readinto(data.numpy()) < info.nbytes:
            raise UserError(f"{self.path} was truncated while it was read")
        if info.type in DENSE:
            return data.view(DENSE[info.type]).view(info.shape)
        return data.view(-1, info.row_bytes)

    def dequantize(self, info: TensorInfo, blocks: torch.Tensor) -> torch.Tensor:
        """A tensor of a type that is not kept, in float32."""
        if info.type.lower() in FORMATS:
            format, C = FORMATS[info.type.lower()], info.shape[-1]
            return format.unpack({"blocks": blocks}, format.groupsizes[0], C).view(info.shape)
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

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer and the chat template, from the metadata."""
        return gguf_tokenizer_files(self.path, self.metadata)
