"""Writes GGUF files for tests as llama.cpp's converter does, from a tiny transformers model and a vocabulary."""

import math

import gguf
import numpy as np
import torch

FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The families that have other names, architectures or fields than Llama.
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OTHER_NAMES = {"gemma3_text": POST_NORMS, "olmo2": POST_NORMS, "olmo3": POST_NORMS}
OTHER_NAMES["phi3"] = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2", "ministral3": "mistral3"}
PAIRED = ("llama", "smollm3", "granite", "mistral3")
SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def family_fields(config, family):
    """The fields that only some families have."""
    rope = config.rope_parameters
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention")
    fields = {}
    if full["rope_type"] in ("linear", "yarn"):
        fields |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if full["rope_type"] == "yarn":
        fields |= {"rope.scaling.original_context_length": full["original_max_position_embeddings"]}
        fields |= {f"rope.scaling.yarn_{key}": full[key] for key in ("beta_fast", "beta_slow") if key in full}
        fields |= {"rope.scaling.yarn_attn_factor": full["attention_factor"]} if "attention_factor" in full else {}
    if config.model_type == "ministral3":
        fields |= {"rope.scaling.yarn_log_multiplier": full["mscale_all_dim"]}
        fields |= {"attention.temperature_scale": full["llama_4_scaling_beta"]}
    if full["rope_type"] == "longrope":
        fields |= {"rope.scaling.original_context_length": full["original_max_position_embeddings"]}
        extension = config.max_position_embeddings / full["original_max_position_embeddings"]
        attention = math.sqrt(1 + math.log(extension) / math.log(full["original_max_position_embeddings"]))
        fields |= {"rope.scaling.attn_factor": attention}
    if sliding is not None:
        fields |= {"attention.sliding_window": config.sliding_window, "rope.freq_base_swa": sliding["rope_theta"]}
        fields |= {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}
    elif config.model_type == "phi3" and config.sliding_window:
        fields |= {"attention.sliding_window": config.sliding_window}
    return fields | {name: float(getattr(config, theirs)) for theirs, name in SCALES.items() if hasattr(config, theirs)}


def family_tensors(config):
    rope = config.rope_parameters
    kinds = ("short", "long") if rope.get("rope_type") == "longrope" else ()
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], dtype=np.float32) for kind in kinds}


def pair_rows(weight, heads):
    """Reorder rows so that those half a head apart (i, i + E/2) become neighbours (2i, 2i+1), as in llama files."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, tokenizer_fields, quantize=None, extra=None, tensors=None, per_file=0):
    """Write a transformers model. quantize(name) -> a GGMLQuantizationType, or None for float32. extra: fields to add.
    tensors: tensors to add or replace, or None to leave one out. per_file: split it into files with so many tensors."""
    config = model.config
    family = ARCHITECTURES.get(config.model_type, config.model_type)
    names = NAMES | OTHER_NAMES.get(config.model_type, {})
    writer = gguf.GGUFWriter(str(path), family, split_max_tensors=per_file)
    for theirs, name in FIELDS.items():
        value = getattr(config, theirs)
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{family}.{name}", value)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_uint32(f"{family}.attention.key_length", head_dim)
    writer.add_uint32(f"{family}.attention.value_length", head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_uint32(f"{family}.rope.dimension_count", int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_float32(f"{family}.rope.freq_base", rope["rope_theta"])
    fields = {f"{family}.{name}": value for name, value in family_fields(config, family).items()}
    for name, value in (tokenizer_fields | fields | (extra or {})).items():
        add_field(writer, name, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.float().numpy()
        stem, kind = name.rsplit(".", 1)
        if family == "gemma3" and stem.endswith("norm"):
            array = array + 1
        if family in PAIRED and stem.split(".")[-1] in heads:
            array = pair_rows(array, heads[stem.split(".")[-1]])
        parts = stem.split(".", 3)
        stem = f"blk.{parts[2]}.{names[parts[3]]}" if parts[1:2] == ["layers"] else names[stem]
        state[f"{stem}.{kind}"] = array
    for name, array in (state | family_tensors(config) | (tensors or {})).items():
        if array is None:
            continue
        kind = quantize(name) if quantize and array.ndim == 2 else None
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            blocks = quantized_blocks(array, kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized_blocks(array, kind):
    """The blocks uint8 of a float32 matrix. Of the types that the gguf package can only read, random blocks."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        from cases import random_blocks  # imports the project, but same_tokens.py runs outside of it

        return random_blocks(kind.name.lower(), *array.shape)["blocks"].numpy()


def add_field(writer, name, value):
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def bpe_fields(library, pre, **more):
    """The metadata of a byte-level BPE of the `tokenizers` library."""
    import json

    model = json.loads(library.to_str())
    vocabulary = sorted(library.get_vocab(), key=library.get_vocab().get)
    special = {token["content"] for token in model["added_tokens"]}
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["model"]["merges"]]
    fields = {"model": "gpt2", "pre": pre, "tokens": vocabulary, "merges": merges}
    fields |= {"token_type": [3 if token in special else 1 for token in vocabulary], "eos_token_id": 1}
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items() if value is not None}


def sentencepiece_fields(library, **more):
    """The metadata of a sentencepiece model."""
    ids = range(library.get_piece_size())

    def kind(i):
        tests = (library.is_unknown, 2), (library.is_control, 3), (library.is_unused, 5), (library.is_byte, 6)
        return next((number for test, number in tests if test(i)), 1)

    fields = {"model": "llama", "tokens": [library.id_to_piece(i) for i in ids]}
    fields |= {"scores": [float(library.get_score(i)) for i in ids], "token_type": [kind(i) for i in ids]}
    fields |= {"bos_token_id": library.bos_id(), "eos_token_id": library.eos_id(), "unknown_token_id": library.unk_id()}
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items()}


def llama3_divisors(config):
    """The tensor rope_freqs.weight that llama.cpp's converter writes for Llama 3's scaling."""
    from positions import rope_frequencies

    plain = torch.tensor(
        [config.rope_base ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)], dtype=torch.float32
    )
    return (plain / rope_frequencies(config.head_dim, *config.rope(0))).numpy()
