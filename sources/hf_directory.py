"""Reads Hugging Face directories: the Config, the tensors, the tokenizer.

Read down: config.json, in which every field is used, known to be harmless, refused, or warned about; the weights, from
safetensors or .bin files; the tokenizer's settings, from up to five files. Fields have the meaning and the defaults
that they have in transformers. Nothing is guessed from the directory's name.
"""

import json
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from checkpoint import INDEX, Writer, copy_tokenizer, make_config, read_json, read_tensor, weight_files
from cli import UserError, first_line
from model import Config, RopeScaling, check_positive, yarn_attention_factor

# ---------------------------------------------------------------- config.json

FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
FAMILIES |= {"qwen3": "Qwen3ForCausalLM", "bloom": "BloomForCausalLM"}

# Fields that do not change what the model computes: they are for training or other programs, or defaults of sampling.
HARMLESS = """
    _attn_implementation _name_or_path architectures attention_dropout attention_softmax_in_fp32 attn_implementation
    auto_map bad_words_ids begin_suppress_tokens bias_dropout_fusion bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id hidden_dropout hidden_dropout_prob id2label initializer_range is_llama_config label2id
    length_penalty masked_softmax_fusion max_length max_sequence_length max_window_layers min_length
    model_max_length n_inner no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences offset_alibi
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    sep_token_id skip_bias_add skip_bias_add_qkv slow_but_exact suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split()  # noqa: SIM905
# Fields that change what the model computes, with the values at which they have no effect.
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
    """The Config of a Hugging Face directory. UserError for an unknown family or an unsupported value of a field."""
    path = directory / "config.json"
    fields = Fields(path, read_json(path))
    family = fields.take("model_type", None)
    if not isinstance(family, str):
        fields.refuse("model_type", 'is not the name of a model family; expected a string such as "llama"')
    names = fields.all.get("architectures") or [FAMILIES.get(family)]
    if not isinstance(names, list):
        fields.refuse("architectures", "is not a list of names")
    headless = {"BloomModel": "BloomForCausalLM"}  # published BLOOM configs name the model without its tied head
    if headless.get(names[0], str(names[0])).lower() != FAMILIES.get(family, "").lower():
        known = ", ".join(FAMILIES.values())
        raise UserError(f"{path}: architecture {names[0]} (model_type {family}) is not known; known: {known}")
    try:
        config = bloom_fields(fields) if family == "bloom" else hf_fields(family, fields)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:  # such as a string for a number
        raise UserError(f"{path} has a value of the wrong type: {error}") from None
    fields.finish()
    return make_config(path, **config)


def hf_fields(family: str, fields: "Fields") -> dict:
    """The fields of Config for all families but BLOOM."""
    n_head, n_layer = fields.take("num_attention_heads"), fields.take("num_hidden_layers")
    check_positive({"n_layer": n_layer}, (int,))  # first, because hf_window makes a list of this many layers
    base, scaling, context = hf_rope(fields)
    window, sliding_layers = hf_window(fields, family, n_layer)
    bias = family in ("llama", "qwen3") and (fields.take("attention_bias", False) or False)
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
        "tied_embeddings": fields.take("tie_word_embeddings", False) or False,
        "qkv_bias": bias or family == "qwen2",
        "out_bias": bias,
        "mlp_bias": family == "llama" and (fields.take("mlp_bias", False) or False),
        "qk_norm": family == "qwen3",
        "sliding_window": window,
        "sliding_layers": sliding_layers,
    }


def bloom_fields(fields: "Fields") -> dict:
    """The fields of Config for BLOOM. Its context is the length of training sequences, although ALiBi has no limit."""

    def either(old, new):
        """The value of a field that older configs have under the name `old`."""
        a, b = fields.take(old, None), fields.take(new, None)
        if a is not None and b is not None and a != b:
            fields.refuse(old, f"is not equal to {new} = {b!r}, another name for the same field")
        return fields.take(new) if a is None else a

    H, D = either("n_head", "num_attention_heads"), either("n_embed", "hidden_size")
    context = fields.take("seq_length", None)
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
        "tied_embeddings": fields.take("tie_word_embeddings", True) or False,
        "norm": "layer",
        "mlp": "gelu",
        "alibi": True,
        "embedding_norm": True,
        "post_norm_residual": fields.take("apply_residual_connection_post_layernorm", False) or False,
    } | dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)


class Fields:
    """The fields of a source's config.json. It records which ones were taken, and `finish` checks the others."""

    def __init__(self, path: Path, fields: dict):
        self.path, self.all, self.taken = path, fields, set()

    def take(self, name: str, *default):
        """The value of a field, or the default. UserError if the field is missing and there is no default."""
        self.taken.add(name)
        if name not in self.all and not default:
            raise UserError(f"{self.path} lacks {name}")
        return self.all[name] if name in self.all else default[0]

    def refuse(self, name: str, why: str):
        raise UserError(f"{self.path}: {name} = {json.dumps(self.all.get(name))} {why}")

    def finish(self):
        """Refuse the remaining fields that change what the model computes, and warn about unknown ones."""
        for name in sorted(self.all.keys() - self.taken - set(HARMLESS)):
            value = self.all[name]
            if name not in NEUTRAL:
                print(f"warning: {self.path}: {name} = {json.dumps(value)} is unknown and ignored", file=sys.stderr)
            elif value not in NEUTRAL[name]:
                self.refuse(name, "changes what the model computes and is not supported")


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
    for key in ("finetuned", "factor", *ROPE_FIELDS[kind]):  # what remains of them is null or has no effect
        rope.pop(key, None)
    if rope:
        fields.refuse(name, f"has {', '.join(sorted(rope))}, which is not supported with {kind!r}")
    if kind == "default":
        return base, None, context
    if lacking := [key for key in ROPE_FIELDS[kind] if key.endswith("factor") and key not in values and kind != "yarn"]:
        fields.refuse(name, f"lacks {lacking[0]}")
    if kind == "yarn":
        magnitudes = values.pop("mscale", None), values.pop("mscale_all_dim", None)
        values.setdefault("attention_factor", yarn_attention_factor(values.get("factor", 1.0), *magnitudes))
    if kind != "linear":
        values["original_max_seq_length"] = int(original)
    # The scaled context may be used even if max_position_embeddings is still the original one.
    scaled_context = context if context > original else int(original * values.get("factor", 1.0))
    return base, RopeScaling(kind, **values), scaled_context


def hf_window(fields: Fields, family: str, n_layer: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(sliding window or None, the layers that have it or None for all layers)."""
    window = fields.take("sliding_window", 4096 if family == "mistral" else None)
    kinds = fields.take("layer_types", None)
    if kinds is not None and (len(kinds) != n_layer or set(kinds) - {"full_attention", "sliding_attention"}):
        fields.refuse("layer_types", f"must be full_attention or sliding_attention for each of {n_layer} layers")
    if family == "llama" and (window is not None or "sliding_attention" in (kinds or ())):
        fields.refuse("sliding_window", "is ignored by transformers' Llama; remove it if the model has no window")
    if family in ("llama", "mistral"):
        if kinds is not None and window is not None and "full_attention" in kinds:
            fields.refuse("layer_types", "has full attention in some layers, which transformers' Mistral ignores")
        return window, None
    first = fields.take("max_window_layers", 28)
    if not fields.take("use_sliding_window", False) or window is None:
        return None, None
    layers = [i for i in range(n_layer) if (kinds[i] == "sliding_attention" if kinds else i >= first)]
    return (window, tuple(layers)) if layers else (None, None)


# ---------------------------------------------------------------- weights


def bloom_tensors(config: Config, tensors: Callable) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """BLOOM's tensors, with the rows of q, k and v reordered from (H,3,E) in the files to (3,H,E) in our model."""

    def unpacked():
        for name, tensor in tensors():
            name = name.removeprefix("transformer.")  # a prefix only in files that were saved with the head
            if ".query_key_value." in name and tensor.shape[:1] == (3 * config.dim,):
                heads = tensor.view(config.n_head, 3, config.head_dim, *tensor.shape[1:])
                tensor = heads.transpose(0, 1).reshape(tensor.shape)
            yield name, tensor

    return unpacked


def vocabulary_size(directory: Path, V: int) -> int | None:
    """The tokenizer's highest id plus one, or None if the embedding table of V rows has no padding."""
    if not (directory / "tokenizer.json").exists():
        return None
    size = 1 + max(open_tokenizer(directory).get_vocab(with_added_tokens=True).values(), default=-1)
    return size if 0 < size < V else None


def open_tokenizer(directory: Path):
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{directory / 'tokenizer.json'} is not a readable tokenizer: {error}") from None


def hf_tensors(directory: Path) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """The tensors of model.safetensors or its shards, or else of pytorch_model.bin. UserError if a file is missing."""
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
    """The tensors of a .bin file, memory-mapped if its format allows this. Code in the file is never run."""
    try:
        with warnings.catch_warnings():  # torch's warnings about unusual files do not help the user
            warnings.simplefilter("ignore")
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:  # torch's own message suggests running the code anyway
        why = "it is damaged, or it would run code"
        raise UserError(f"{path} is not a plain file of tensors and was not loaded: {why}") from None
    except Exception as error:  # damaged files can raise anything
        raise UserError(f"{path} is not a readable PyTorch file: {first_line(error)[:200]}") from None
    plain = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
    if not plain or not all(map(is_plain_tensor, weights.values())):
        raise UserError(f"{path} does not hold plain tensors by name")
    return weights


def is_plain_tensor(value) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_quantized or value.is_meta or value.is_nested)


# ---------------------------------------------------------------- tokenizer


def write_hf_tokenizer(directory: Path, writer: Writer):
    """Copy the tokenizer's files, if there are any, and write tokenizer_config.json."""
    copy_tokenizer(directory, writer)
    settings = read_tokenizer_settings(directory)
    try:
        template = settings.get("chat_template")
        if isinstance(template, list):  # several templates, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template and not (writer.path / "chat_template.jinja").exists():
            (writer.path / "chat_template.jinja").write_text(template, encoding="utf-8")
        writer.add_json("tokenizer_config.json", hf_special_tokens(directory, settings))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{directory / 'tokenizer_config.json'} is not valid: {error}") from None


def read_optional(directory: Path, name: str) -> dict:
    return read_json(directory / name) if (directory / name).exists() else {}


def read_tokenizer_settings(directory: Path) -> dict:
    """tokenizer_config.json, with the special tokens of special_tokens_map.json, where older checkpoints have them."""
    return read_optional(directory, "special_tokens_map.json") | read_optional(directory, "tokenizer_config.json")


def hf_special_tokens(directory: Path, settings: dict) -> dict:
    """Our tokenizer_config.json, made from Hugging Face's, the vocabulary, and the model's config.json."""
    generation, config = read_optional(directory, "generation_config.json"), read_json(directory / "config.json")
    ids = {entry["content"]: int(i) for i, entry in settings.get("added_tokens_decoder", {}).items()}
    ids |= read_optional(directory, "added_tokens.json")
    library = open_tokenizer(directory) if (directory / "tokenizer.json").exists() else None
    # "bos_token" -> "<s>". Some files have a dictionary with the content instead.
    values = {name: value for name, value in settings.items() if name.endswith("_token") and value not in (True, False)}
    named = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}

    def token_id(token):
        return library.token_to_id(token) if library and token and token not in ids else ids.get(token)

    bos = config.get("bos_token_id")
    if "bos_token" in named:  # null means no BOS token, whatever config.json says
        known = token_id(named["bos_token"])
        bos = None if named["bos_token"] is None else bos if known is None else known
    if "add_bos_token" in settings:
        add_bos = bool(settings["add_bos_token"])
    elif library is not None:
        add_bos = library.encode("a").ids[:1] == [bos]  # the post-processor in tokenizer.json adds BOS
    else:
        add_bos = (directory / "tokenizer.model").exists()
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    # The tokenizer of a chat model may have another EOS token than its config.
    eos = [*(eos if isinstance(eos, list) else [eos]), token_id(named.get("eos_token"))]
    eos = [i for i in eos if i is not None]
    for i in eos if bos is None else [bos, *eos]:
        if type(i) is not int or i < 0:
            raise ValueError(f"{i!r} is not a token id (bos_token_id or eos_token_id, or in generation_config.json)")
    texts = {i: token for token, i in ids.items()}
    by_id = {"bos_token": texts.get(bos), "eos_token": texts.get(eos[0]) if eos else None}  # for files without names
    return {
        "bos_token_id": bos,
        "eos_token_ids": list(dict.fromkeys(eos)),
        **by_id,
        **named,
        "add_bos_token": add_bos,
        "special_tokens": ids,
        "legacy": settings.get("legacy", True) is not False,
    }
