"""Writes GGUF files for tests as llama.cpp's converter does, from a model and a vocabulary."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import torch

# llama.cpp's names of what transformers' configs and models have. Some families have other names than Llama.
TABLES = json.loads((Path(__file__).parent / "data" / "gguf_names.json").read_text())
FIELDS, NAMES, OTHER_NAMES = TABLES["fields"], TABLES["names"], TABLES["other_names"]
ARCHITECTURES, SCALES, YARN_FIELDS = TABLES["architectures"], TABLES["scales"], TABLES["yarn_fields"]
PAIRED = ("llama", "smollm3", "granite", "mistral3")  # architectures that need pair_rows


def family_fields(config):
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    sliding = rope.get("sliding_attention")
    kind = full["rope_type"]
    fields = {}
    if kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": kind, "rope.scaling.factor": float(full["factor"])}
    if kind in ("yarn", "longrope"):
        fields["rope.scaling.original_context_length"] = context = full["original_max_position_embeddings"]
    if kind == "yarn":
        fields |= {name: full[theirs] for theirs, name in YARN_FIELDS.items() if theirs in full}
    if config.model_type == "ministral3":
        fields["rope.scaling.yarn_log_multiplier"] = full["mscale_all_dim"]
        fields["attention.temperature_scale"] = full["llama_4_scaling_beta"]
    if kind == "longrope":
        extension = config.max_position_embeddings / context
        fields["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(extension) / math.log(context))

    if config.model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        fields |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
            "full_attention_interval": 4, "rope.dimension_sections": [11, 11, 10, 0],
        }  # fmt: skip
    if config.model_type == "lfm2_moe":
        fields |= {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
        fields["expert_weights_scale"] = config.routed_scaling_factor
    if config.model_type in ("lfm2", "lfm2_moe"):
        heads = [0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types]
        fields |= {
            "shortconv.l_cache": config.conv_L_cache, "vocab_size": config.vocab_size,
            "attention.head_count_kv": heads, "attention.layer_norm_rms_epsilon": config.norm_eps,
        }  # fmt: skip
    if config.model_type.startswith("gemma4"):
        layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
        wide = layers[-1].head_dim
        heads = [layer.num_key_value_heads for layer in layers]
        fields |= {
            "attention.key_length": wide, "attention.key_length_swa": config.head_dim, "attention.value_length": wide,
            "attention.value_length_swa": config.head_dim, "rope.dimension_count": wide,
            "rope.dimension_count_swa": config.head_dim, "attention.shared_kv_layers": config.num_kv_shared_layers,
            "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", 0),
            "attention.head_count_kv": heads,
        }  # fmt: skip
        if config.use_double_wide_mlp:
            widths = [config.intermediate_size * (1 + (mode == "reuse")) for mode in config.kv_sharing_modes]
            fields["feed_forward_length"] = widths
        if config.final_logit_softcapping:
            fields["final_logit_softcapping"] = config.final_logit_softcapping
    if sliding is not None:
        fields["attention.sliding_window"] = config.sliding_window
        fields["rope.freq_base_swa"] = sliding["rope_theta"]
        fields["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    elif config.model_type in ("phi3", "mixtral", "qwen3_moe") and config.sliding_window:
        fields["attention.sliding_window"] = config.sliding_window
    for theirs, name in SCALES.items():
        if hasattr(config, theirs):
            fields[name] = float(getattr(config, theirs))
    return fields


def family_tensors(config):
    """The factors of longrope, and of RoPE that rotates a part of a head, which llama.cpp reads from tensors."""
    rope = config.rope_parameters
    full = rope.get("full_attention", {})
    if full.get("rope_type") == "proportional":
        E = config.per_layer_config[config.num_hidden_layers - 1].head_dim
        rotated = int(E * full["partial_rotary_factor"] / 2)
        return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (E // 2 - rotated), dtype=np.float32)}
    if rope.get("rope_type") != "longrope":
        return {}
    factors = {"short": rope["short_factor"], "long": rope["long_factor"]}
    return {f"rope_factors_{kind}.weight": np.array(values, dtype=np.float32) for kind, values in factors.items()}


def pair_rows(weight, heads):
    """Reorder rows as in files of llama: the rows i and i + E/2 of a head become its rows 2i and 2i + 1."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, tokenizer_fields, quantize=None, extra=None, tensors=None, per_file=0):
    """Write a transformers model. quantize(name) -> a GGMLQuantizationType, or None for float32. extra, tensors: fields
    and tensors to add or replace, or None to leave one out. per_file: tensors in each of several files; 0: one file."""
    config = getattr(model.config, "text_config", model.config)
    config.tie_word_embeddings = model.config.tie_word_embeddings
    config.allow_global_per_layer_attribute_access = True  # to the heads of most layers
    family = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), family, split_max_tensors=per_file)
    fields = config_fields(config) | family_fields(config)
    if config.model_type == "lfm2":
        fields["feed_forward_length"] = model.model.layers[0].feed_forward.w1.out_features
    fields = {f"{family}.{name}": value for name, value in fields.items()}
    for name, value in (fields | tokenizer_fields | (extra or {})).items():
        if value is not None:
            add_field(writer, name, value)

    state = model_tensors(model, family) | family_tensors(config) | (tensors or {})
    for name, array in state.items():
        if array is None:
            continue
        is_vector = "conv1d" in name or "shortconv.conv" in name or "ffn_gate_inp" in name
        is_matrix = array.ndim > 1 and not is_vector
        kind = quantize(name) if quantize and is_matrix else None
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, quantized_blocks(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def config_fields(config):
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    fields = {name: getattr(config, theirs) for theirs, name in FIELDS.items() if hasattr(config, theirs)}
    return fields | {
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(rope["rope_theta"]),
    }


def model_tensors(model, family):
    config = getattr(model.config, "text_config", model.config)
    names = NAMES | OTHER_NAMES.get(config.model_type, {})
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {}
    for name, weight in model.state_dict().items():
        name = name.replace("language_model.", "")
        if name.startswith("model.visual"):
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.float().numpy()
        stem, kind = name.rsplit(".", 1)
        if kind in ("gate_up_proj", "down_proj", "layer_scalar", "per_expert_scale"):  # of all experts; Gemma 4
            stem = name
            kind = "scale" if kind == "per_expert_scale" else "weight"
        last = stem.split(".")[-1]
        if family == "gemma3" and stem.endswith("norm"):
            array = array + 1
        if family in ("qwen35", "qwen35moe"):
            array = qwen35_array(config, stem, kind, array)
        if family.startswith("lfm2") and stem.endswith("conv.conv"):
            array = array.squeeze(1)
        if family in PAIRED and last in heads:
            array = pair_rows(array, heads[last])
        if stem.startswith("model.layers."):
            _, _, layer, inner = stem.split(".", 3)
            ending = {"A_log": "_a", "dt_bias": "_dt.bias", "expert_bias": ".bias"}.get(kind, f".{kind}")
            if kind == "weight" and inner == "mlp.shared_expert_gate":
                array = array.squeeze(0)
            state[f"blk.{layer}.{names[inner]}{ending}"] = array
        else:
            state[f"{names[stem]}.{kind}"] = array
    return state


def qwen35_array(config, stem, kind, array):
    """A tensor of Qwen3.5: norms hold the 1 that they add, and value heads stand in another order."""
    inner = stem.partition("linear_attn")[2]
    if stem.endswith("norm") and not inner:
        return array + 1
    if "linear_attn" not in stem or inner == ".norm":
        return array
    if kind == "A_log":
        array = -np.exp(array)

    n = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // n
    width = config.linear_value_head_dim
    heads = np.arange(n * per_key).reshape(n, per_key).T.flatten()  # of our file, by their number in the model
    values = (heads[:, None] * width + np.arange(width)).flatten()
    keys = 2 * n * config.linear_key_head_dim
    if inner in (".in_proj_qkv", ".conv1d"):
        return array.squeeze()[np.concatenate([np.arange(keys), keys + values])]
    if inner == ".in_proj_z":
        return array[values]
    if inner == ".out_proj":
        return array[:, values]
    return array[heads]


def quantized_blocks(array, kind):
    """The blocks uint8 of a float32 matrix, random ones if the gguf package cannot write their type."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        from cases import random_blocks  # imports the project, but same_tokens.py runs outside of it

        N = math.prod(array.shape[:-1])
        blocks = random_blocks(kind.name.lower(), N, array.shape[-1])["blocks"].numpy()
        return blocks.reshape(*array.shape[:-1], -1)


def add_field(writer, name, value):
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    getattr(writer, f"add_{kinds.get(type(value), 'array')}")(name, value)


def bpe_fields(library, pre, **more):
    """The metadata of a byte-level BPE of the `tokenizers` library."""
    model = json.loads(library.to_str())
    vocabulary = sorted(library.get_vocab(), key=library.get_vocab().get)
    special = {token["content"] for token in model["added_tokens"]}
    merges = model["model"]["merges"]
    if merges and isinstance(merges[0], list):
        merges = [" ".join(merge) for merge in merges]
    fields = {"model": "gpt2", "pre": pre, "tokens": vocabulary, "merges": merges}
    fields |= {"token_type": [3 if token in special else 1 for token in vocabulary], "eos_token_id": 1}
    fields |= more
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def sentencepiece_fields(library, **more):
    ids = range(library.get_piece_size())
    kinds = ((library.is_unknown, 2), (library.is_control, 3), (library.is_unused, 5), (library.is_byte, 6))
    types = [next((number for is_kind, number in kinds if is_kind(i)), 1) for i in ids]  # 1 is a normal token
    fields = {"model": "llama", "tokens": [library.id_to_piece(i) for i in ids]}
    fields |= {"scores": [float(library.get_score(i)) for i in ids], "token_type": types}
    fields |= {"bos_token_id": library.bos_id(), "eos_token_id": library.eos_id()}
    fields |= {"unknown_token_id": library.unk_id()} | more
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def llama3_divisors(config):
    """The tensor rope_freqs.weight that llama.cpp's converter writes for Llama 3's scaling."""
    from positions import rope_frequencies

    exponents = [-2 * i / config.head_dim for i in range(config.head_dim // 2)]
    plain = torch.tensor([config.rope_base**exponent for exponent in exponents])
    base, scaling, E = config.rope(0)
    return (plain / rope_frequencies(E, base, scaling)).numpy()
