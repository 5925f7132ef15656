"""Reads GGUF files: the Config and the tensors.

gguf_header.py parses the header, and gguf_tokenizer.py reads the tokenizer. This file knows what
the metadata means (with the names that llama.cpp writes); families.py knows which architectures
there are, and which of their tensors have another layout than ours; formats.py knows the quantized
types. The `gguf` package dequantizes other types. Nothing is guessed from the file's name, except
where the other files of a split model are.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from checkpoint import make_config
from cli import UserError, and_more, check_is_file, first_line, print_status
from config import MAX_NUMBER, Config, DeltaNet, Experts, RopeScaling, ShortConv
from formats import FORMATS, UNPACK_BLOCK, Quantization, Scheme, make_layer
from layers import MatrixLayer
from sources.families import GGUF_FAMILIES
from sources.fields import Fields, yarn_attention_factor
from sources.gguf_header import TensorInfo, read_header, split_files
from sources.gguf_tokenizer import LAST_TOKEN, gguf_tokenizer_files
from text.tokenizer import TokenizerFiles

# The fields that are read or checked. Any other field of the architecture causes a warning.
USED_FIELDS = """block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length
    attention.value_length attention.scale attention.sliding_window
    attention.sliding_window_pattern attention.temperature_scale rope.freq_base rope.freq_base_swa
    rope.dimension_count rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_attn_factor
    rope.scaling.yarn_log_multiplier vocab_size expert_count expert_used_count
    expert_feed_forward_length expert_shared_feed_forward_length leading_dense_block_count
    embedding_scale residual_scale logit_scale ssm.conv_kernel ssm.inner_size
    ssm.state_size ssm.time_step_rank ssm.group_count full_attention_interval
    attention.recurrent_layers rope.dimension_sections nextn_predict_layers shortconv.l_cache
    rope.mrope_section rope.mrope_interleaved mrope_sections ssm.v_head_reordered n_deepstack_layers
    pooling_type attention.key_length_swa attention.value_length_swa rope.dimension_count_swa
    final_logit_softcapping attention.shared_kv_layers embedding_length_per_layer_input"""
SAMPLING_FIELDS = {  # names in generation_config.json and in general.sampling
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# How the names of tensors and fields begin that are not of the language model. Ollama keeps the encoders
# of images and sound in the same file. It has an MTP layer there as well, partly with the names of
# Hugging Face, whose norms are not all stored alike, so that layer is left out, too.
OTHER_TENSORS = ("v.", "a.", "mm.", "resampler.", "mtp.")
OTHER_FIELDS = ("vision", "audio", "image", "mm.")
# Fields that change what the model computes -> the values that are supported.
SUPPORTED_VALUES = {
    "expert_gating_func": [1, 0],  # softmax, or none is named
    "expert_weights_scale": [1.0, 0.0],
    "expert_weights_norm": [True],
    "expert_group_count": [0, 1],
    "expert_group_used_count": [0, 1],
    "expert_shared_count": [0, 1],
    "norm_top_k_prob": [True],
}
ROPE_TYPES = ("none", "linear", "yarn", "longrope")
# Tensors of divisors of RoPE's frequencies: Llama 3 has one, Phi-3 has two.
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS = "rope_factors_short.weight"
LONG_FACTORS = "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """An open GGUF file, or the files of a split model, of which the first has the metadata.

    If anything is wrong, a UserError names the file and the field or tensor.
    """

    is_mapped = False  # a tensor is read into memory of its own

    def __init__(self, path: Path):
        paths = split_files(path)
        if missing := [part.name for part in paths if not part.exists()]:
            raise UserError(f"{path} is one of {len(paths)} files of a model; beside it {and_more(missing)} is missing")
        self.path = paths[0]
        self.files: list[BinaryIO] = []
        self.metadata: dict[str, Any] = {}
        self.infos: dict[str, TensorInfo] = {}
        for part in paths:
            self.open_part(part)
        if self.metadata.get("split.count", 0) not in (0, 1, len(paths)):
            count = self.metadata["split.count"]
            raise UserError(
                f"{path} is one of {count} files of a model, so its name must end as MODEL-00001-of-00003.gguf does"
            )

        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in GGUF_FAMILIES:
            raise UserError(
                f"{path}: architecture {self.architecture} is not known; "
                f"known in GGUF files: {', '.join(GGUF_FAMILIES)}"
            )
        self.family = GGUF_FAMILIES[self.architecture]
        self.fields = Fields(self.path, self.metadata, f"{self.architecture}.")
        self.hyper = self.fields.take  # a hyperparameter
        self.refuse = self.fields.refuse
        renamed = self.family.gguf_layout.renamed
        self.left_out = [name for name in self.infos if name.startswith(OTHER_TENSORS)]
        self.infos = {renamed(name): self.infos[name] for name in self.infos if not name.startswith(OTHER_TENSORS)}

    def open_part(self, path: Path):
        """Open a file, and add its metadata (the first file's count) and its tensors."""
        check_is_file(path)
        try:
            file = path.open("rb")
            self.files.append(file)
            metadata, infos = read_header(file)
        except (LookupError, MemoryError, OSError, OverflowError, ValueError) as error:
            raise UserError(f"{path} is not a readable GGUF file: {error}") from None
        for info in infos.values():
            info.part = len(self.files) - 1
        self.metadata = metadata | self.metadata
        self.infos |= infos

    def recommended(self) -> dict:
        """The sampling settings that the file recommends, under their names in generation_config.json."""
        found = {name: self.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING_FIELDS.items()}
        return {name: round(x, 6) for name, x in found.items() if isinstance(x, int | float)}  # they are float32

    def per_layer(self, name: str, *default, layers: Iterable[int] | None = None):
        """A hyperparameter that may be a list with a value for each layer, if all of them are equal, or
        all of these layers.

        Where some layers have no attention, some values may be 0.
        """
        value = self.hyper(name, *default)
        if not isinstance(value, list):
            return value
        if len(value) not in (self.hyper("block_count"), self.n_layer):
            self.refuse(name, f"does not have a value for each of {self.hyper('block_count')} layers")
        if layers is not None:
            value = [value[i] for i in layers]
        found = [one for one in value if one != 0 or not self.is_hybrid] or value
        if any(other != found[0] for other in found):
            self.refuse(name, "differs by layer, which is not supported")
        return found[0]

    def nonzero(self, name: str, default):
        """A hyperparameter for which 0 means that it is absent, as in llama.cpp."""
        value = self.hyper(name, default)
        return default if value == 0 else value

    # ------------------------------------------------------------ Config

    def config(self) -> Config:
        """The model's Config. UserError if a field is missing, wrong, or not supported."""
        try:
            self.check_fields()
            return self._config()
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
            raise UserError(f"{self.path} has a field of the wrong type or size: {first_line(error)}") from None

    def check_fields(self):
        """Warn about unknown fields; refuse kinds of models that are not supported, and absurd sizes."""
        names = {name.removeprefix(self.fields.prefix) for name in self.metadata}
        others = {name for name in names if name.startswith(OTHER_FIELDS)}
        supported = dict(SUPPORTED_VALUES)
        if self.family.gguf_scoring == "sigmoid":
            supported["expert_gating_func"] = [2]
            self.hyper("expert_weights_scale", 1.0)  # `experts` uses it
        for name in names - others - {*USED_FIELDS.split(), *supported}:
            if name.startswith("expert") and self.hyper(name):
                self.refuse(name, "is not supported")
            if self.left_out and name.startswith("rope."):  # Ollama's name for a field that matters
                self.refuse(name, "is not known")
        self.fields.finish(others.union(USED_FIELDS.split()), supported)

        if self.left_out:
            kinds = ", ".join(sorted({f"{name.partition('.')[0]}.*" for name in self.left_out}))
            print_status(f"{self.path}: left out: tensors that are not of the language model ({kinds})")
            self.hyper("rope.freq_base")  # of Gemma 3, Ollama's program knows it, and its files lack it
        if len(self.shapes().get("token_embd.weight", ())) != 2:
            raise UserError(f"{self.path} lacks tensor token_embd.weight")
        if self.hyper("block_count") > len(self.infos):
            self.refuse("block_count", f"is more than the {len(self.infos)} tensors of the file")
        for name in ("expert_count", "attention.sliding_window", "nextn_predict_layers"):
            if type(self.hyper(name, 0)) is not int:
                self.refuse(name, "is not an integer")
        if not 0 <= self.hyper("nextn_predict_layers", 0) < self.hyper("block_count"):
            self.refuse("nextn_predict_layers", f"does not fit {self.hyper('block_count')} layers")
        if self.hyper("pooling_type", 0) not in (0, LAST_TOKEN):
            self.refuse("pooling_type", "(1 is mean, 2 is CLS, 4 is for rerankers) is not supported; expected 3 (last)")
        if self.hyper("expert_count", 0) and not self.family.gguf_experts:
            self.refuse("expert_count", "makes this a mixture of experts, which is not supported")

    def _config(self) -> Config:
        shapes = self.shapes()
        kinds = {name.split(".", 2)[-1] for name in shapes}  # blk.0.attn_q.bias: attn_q.bias
        n_head = self.per_layer("attention.head_count")
        dim = self.hyper("embedding_length")
        scaling, context = self.rope()
        shared = self.hyper("attention.shared_kv_layers", 0)
        first = self.n_layer - shared  # the first layer without keys and values of its own
        shared_dim = None
        if shared:
            shared_dim = self.per_layer("feed_forward_length", layers=range(first, self.n_layer))
        experts = self.experts()
        width = [] if experts is None else [experts.hidden_dim]  # where no layer has an MLP
        config = make_config(
            self.path,
            n_layer=self.n_layer,
            n_head=n_head,
            dim=dim,
            hidden_dim=self.per_layer("feed_forward_length", *width, layers=range(first)) or sum(width),
            shared_kv_layers=shared,
            shared_kv_hidden_dim=shared_dim,
            per_layer_dim=self.nonzero("embedding_length_per_layer_input", None),
            vocab_size=shapes["token_embd.weight"][0],
            max_seq_length=context,
            # 1e-5 or 1e-6, stored as float32
            norm_eps=round(self.hyper("attention.layer_norm_rms_epsilon"), 12),
            rope_base=float(self.hyper("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            query_scale_beta=self.nonzero("attention.temperature_scale", None),
            tied_embeddings="output.weight" not in shapes,
            qkv_bias="attn_q.bias" in kinds,
            out_bias="attn_output.bias" in kinds,
            mlp_bias="ffn_down.bias" in kinds,
            qk_norm="attn_q_norm.weight" in kinds,
            delta_net=self.delta_net(),
            short_conv=self.short_conv(dim),
            experts=experts,
            sliding_window=self.nonzero("attention.sliding_window", None),
            sliding_layers=self.sliding_layers(),
            sliding_rope_base=self.nonzero("rope.freq_base_swa", None),
            embedding_scale=self.nonzero("embedding_scale", 1.0),
            attention_scale=self.nonzero("attention.scale", None),
            residual_scale=self.nonzero("residual_scale", 1.0),
            logits_scale=1 / self.nonzero("logit_scale", 1.0),
            logits_softcap=self.nonzero("final_logit_softcapping", None),
            **self.heads(n_head, dim),
        )
        return dataclasses.replace(config, **self.family.gguf_fields(config))

    def heads(self, n_head: int, dim: int) -> dict:
        """The fields of Config about heads, which may differ in layers without a sliding window."""
        full_head_dim = self.hyper("attention.key_length", dim // n_head)
        head_dim = self.hyper("attention.key_length_swa", full_head_dim)
        for kind, width in (("_swa", head_dim), ("", full_head_dim)):
            if self.hyper(f"attention.value_length{kind}", width) != width:
                self.refuse(f"attention.value_length{kind}", f"is not the key_length {width}, which is not supported")
            rotary_dim = self.hyper(f"rope.dimension_count{kind}", width)
            if rotary_dim != width and not self.family.partial_rotary:
                self.refuse(f"rope.dimension_count{kind}", f"rotates a part of each head ({width}): not supported")

        sliding = self.sliding_layers() or ()
        full = [i for i in range(self.n_layer) if i not in sliding]
        own = self.n_layer - self.hyper("attention.shared_kv_layers", 0)  # the values of further layers are not read
        has_values = any(f"blk.{i}.attn_v.weight" in self.infos for i in full if i < own)
        full_kv_head = None
        if sliding and full:
            full_kv_head = self.per_layer("attention.head_count_kv", n_head, layers=full)
        return {
            # 0: no layer has attention
            "n_kv_head": self.per_layer("attention.head_count_kv", n_head, layers=sliding or None) or n_head,
            "head_dim": head_dim,
            "rotary_dim": None if rotary_dim == full_head_dim else rotary_dim,
            "full_head_dim": None if full_head_dim == head_dim else full_head_dim,
            "full_kv_head": full_kv_head,
            "full_keys_as_values": self.family.keys_as_values and not has_values,
        }

    @property
    def n_layer(self) -> int:
        """The layers of the model. The file may have more, which only draft tokens (mtp)."""
        return self.hyper("block_count") - self.hyper("nextn_predict_layers", 0)

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have no attention."""
        return any(f"{self.architecture}.{name}" in self.metadata for name in ("ssm.inner_size", "shortconv.l_cache"))

    def is_of_mtp_layer(self, name: str) -> bool:
        """Whether a tensor belongs to the MTP layer."""
        layer = name.removeprefix("blk.").partition(".")[0]
        if not name.startswith("blk.") or not layer.isdecimal():
            return False
        return self.n_layer <= int(layer) < self.hyper("block_count")

    def delta_net(self) -> DeltaNet | None:
        """The sizes of the gated delta nets, which are in all layers without key and value heads, or
        else in all layers except every fourth, unless the file says otherwise."""
        if self.hyper("ssm.inner_size", None) is None:
            return None
        if not self.hyper("ssm.v_head_reordered", True):
            self.refuse("ssm.v_head_reordered", "is not supported; expected true")
        heads = self.hyper("attention.head_count_kv", None)
        interval = self.hyper("full_attention_interval", 4)
        usual = [(i + 1) % interval > 0 for i in range(self.n_layer)]
        if isinstance(heads, list) and 0 in heads:
            usual = [count == 0 for count in heads]
        are_recurrent = self.hyper("attention.recurrent_layers", usual)
        layers = tuple(i for i in range(self.n_layer) if are_recurrent[i])
        if not layers:
            return None
        n_value_head = self.hyper("ssm.time_step_rank")
        return DeltaNet(
            layers=layers,
            n_key_head=self.hyper("ssm.group_count"),
            n_value_head=n_value_head,
            key_dim=self.hyper("ssm.state_size"),
            value_dim=self.hyper("ssm.inner_size") // n_value_head,
            conv_width=self.hyper("ssm.conv_kernel"),
        )

    def experts(self) -> Experts | None:
        """The sizes of the experts, which are in all layers except the leading dense ones. As in
        llama.cpp, their weights are normalized."""
        n_expert = self.hyper("expert_count", 0)
        if n_expert == 0:
            return None
        layers = tuple(range(self.hyper("leading_dense_block_count", 0), self.n_layer))
        if not layers:
            return None
        n_active = self.per_layer("expert_used_count")
        width = self.per_layer("expert_feed_forward_length", 0)
        if width == 0:  # Mixtral, and older files of Qwen3-MoE
            width = self.per_layer("feed_forward_length")
            if self.architecture != "llama":
                width //= n_active
        shared_dim = self.per_layer("expert_shared_feed_forward_length", 0)
        return Experts(
            layers,
            n_expert,
            n_active,
            width,
            shared_dim=shared_dim,
            scoring=self.family.gguf_scoring,
            choice_bias=any(name.endswith(".exp_probs_b.bias") for name in self.infos),
            scale=self.nonzero("expert_weights_scale", 1.0),
        )

    def short_conv(self, dim: int) -> ShortConv | None:
        """The sizes of the short convolutions, which are in the layers without key and value heads."""
        width = self.hyper("shortconv.l_cache", None)
        heads = self.hyper("attention.head_count_kv", None)
        if width is None or not isinstance(heads, list):
            return None
        layers = tuple(i for i in range(self.n_layer) if heads[i] == 0)
        return ShortConv(layers, dim, width) if layers else None

    def sliding_layers(self) -> tuple[int, ...] | None:
        """The layers with a sliding window; None if the file does not say which.

        The field is a list with an entry for each layer, or a number n: every n-th layer does not
        slide, or all layers do if n is 0.
        """
        pattern = self.hyper("attention.sliding_window_pattern", None)
        if pattern is None:
            return None
        layers = range(self.hyper("block_count"))
        if not isinstance(pattern, list):
            return tuple(i for i in layers if pattern == 0 or (i + 1) % pattern)
        return tuple(i for i in layers if pattern[i])

    def divisors(self, name: str) -> tuple[float, ...] | None:
        """A tensor of divisors of RoPE's frequencies, or None if the file does not have it."""
        if name not in self.infos:
            return None
        # llama.cpp writes 1e30, which is more than MAX_NUMBER in float32, for dimensions that are not rotated.
        return tuple(min(divisor, MAX_NUMBER) for divisor in self.read(name).flatten().tolist())

    def rope(self) -> tuple[RopeScaling | None, int]:
        """(scaling, longest context).

        The scalings of Llama 3 and Phi-3 are tensors of divisors, others are fields. As in
        llama.cpp, a factor without a type is linear, and older files have it under another name.
        """
        context = self.hyper("context_length")
        kind = self.hyper("rope.scaling.type", "linear")
        if kind not in ROPE_TYPES:
            self.refuse("rope.scaling.type", f"is not known; known: {', '.join(ROPE_TYPES)}")
        older_factor = self.hyper("rope.scale_linear", 0.0)
        factor = float(self.hyper("rope.scaling.factor", older_factor)) or 1.0
        if kind == "linear" and factor == 1.0:
            kind = "none"

        original = self.nonzero("rope.scaling.original_context_length", context)
        factors = self.divisors(ROPE_FACTORS)
        short_factors = self.divisors(SHORT_FACTORS)
        if factors is not None and kind != "none":
            raise UserError(f"{self.path}: {kind} RoPE scaling and {ROPE_FACTORS} cannot both be used")
        if factors is not None:
            return RopeScaling("factors", factors=factors), context
        if short_factors is not None:
            return RopeScaling(
                "longrope",
                original_max_seq_length=original,
                attention_factor=float(self.hyper("rope.scaling.attn_factor", 1.0)),
                factors=short_factors,
                long_factors=self.divisors(LONG_FACTORS) or (),
            ), context
        if kind == "none":
            return None, context
        if kind == "linear":
            return RopeScaling("linear", factor), max(context, int(context * factor))
        if kind == "longrope":
            self.refuse("rope.scaling.type", f"needs the tensors {SHORT_FACTORS} and {LONG_FACTORS}")

        usual = yarn_attention_factor(factor, 1.0, self.hyper("rope.scaling.yarn_log_multiplier", 0.0))
        attention = float(self.hyper("rope.scaling.yarn_attn_factor", usual))
        scaling = RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=float(self.hyper("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self.hyper("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=attention * float(self.hyper("rope.scaling.attn_factor", 1.0)),
        )
        return scaling, max(context, int(original * factor))

    # ------------------------------------------------------------ tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name."""
        return {name: info.shape for name, info in self.infos.items()}

    def read(self, name: str, kind: str = "weight") -> torch.Tensor:
        """A tensor of floating-point numbers, dequantized if need be. With kind "blocks", the
        quantized part of a format of blocks."""
        info = self.infos[name]
        tensor = self.read_data(info)
        if kind != "blocks":
            return tensor if info.type in DENSE else self.dequantize(info, tensor)
        if not FORMATS[info.type.lower()].is_finite({"blocks": tensor}):
            raise UserError(f"{self.path}: {name} ({info.type}) holds NaN or infinity")
        return tensor

    def read_data(self, info: TensorInfo) -> torch.Tensor:
        """A tensor of floating-point numbers, or the uint8 (rows, bytes) of a quantized one.

        The file is read and not mapped into memory, because a mapped file that somebody truncates
        would kill the process.
        """
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        file = self.files[info.part]
        file.seek(info.start)
        file.readinto(data.numpy())
        if info.type in DENSE:
            return data.view(DENSE[info.type]).view(info.shape)
        return data.view(-1, info.row_bytes)

    def map_layer(self, name: str, layer: MatrixLayer) -> MatrixLayer:
        """An Embedding on the meta device, or a quantized one in its place, filled with a tensor that stays in the
        mapped file. A type that is not in FORMATS is dequantized in memory."""
        info = self.infos[name]
        kind = info.type.lower()
        if kind not in FORMATS and info.type not in DENSE:
            layer.load_state_dict({"weight": self.read(name)}, assign=True)
            return layer
        data = torch.from_numpy(np.memmap(self.files[info.part].name, np.uint8, "c", info.start, info.nbytes))
        if info.type in DENSE:
            layer.load_state_dict({"weight": data.view(DENSE[info.type]).view(info.shape)}, assign=True)
            return layer
        with torch.device("meta"):
            layer = make_layer(layer, Scheme(kind, FORMATS[kind].groupsizes[0]))
        layer.load_state_dict({"blocks": data.view(-1, info.row_bytes)}, assign=True)
        return layer

    def dequantize(self, info: TensorInfo, blocks: torch.Tensor) -> torch.Tensor:
        """A tensor of a type that is not kept, in float32."""
        format = FORMATS.get(info.type.lower())
        if format is not None:
            C = info.shape[-1]
            weight = torch.empty(len(blocks), C)
            step = max(1, UNPACK_BLOCK // C)  # unpacking takes up to 16 bytes per weight
            for rows, part in zip(weight.split(step), blocks.split(step)):
                rows.copy_(format.unpack({"blocks": part}, format.groupsizes[0], C))
            return weight.view(info.shape)
        import gguf

        try:
            with np.errstate(all="ignore"):  # NaN is refused later, by the tensor's name
                array = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[info.type])
        except (NotImplementedError, ValueError, KeyError) as error:
            raise UserError(f"{self.path}: {info.name} ({info.type}) cannot be dequantized: {error}") from None
        return torch.from_numpy(np.ascontiguousarray(array)).view(info.shape)

    def quantization(self, modules: dict[str, list[str]]) -> Quantization | None:
        """The formats in which the file's matrices are kept; None if none is quantized in the blocks.

        modules: our module name -> the names of the file's tensors that are stacked in this module.
        Matrices of types that are not in FORMATS are dequantized, and a line says so.
        """
        formats = {}
        in_blocks = []
        for module, names in modules.items():
            kinds = [self.infos[name].type.lower() for name in names]
            kept = [kind if kind in FORMATS else "none" for kind in kinds]
            if len(set(kept)) == 1:
                kept = kept[:1]
            formats[module] = "+".join(kept)
            if module.startswith("blocks."):
                in_blocks += kept
        known = {*DENSE, *(name.upper() for name in FORMATS)}
        if others := sorted({info.type for info in self.infos.values()} - known):
            kinds = ", ".join(others)
            print_status(f"{self.path}: {kinds} cannot be kept: dequantized, which takes more memory")

        mode = max(FORMATS, key=in_blocks.count)
        if mode not in in_blocks:
            return None
        size = FORMATS[mode].groupsizes[0]
        head = formats.get("output", formats["embedding"])
        usual = Quantization(mode, size, head).usual
        exceptions = {module: format for module, format in formats.items() if format != usual(module)}
        return Quantization(mode, size, head, exceptions)

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer and the chat template, from the metadata."""
        return gguf_tokenizer_files(self.path, self.metadata)
