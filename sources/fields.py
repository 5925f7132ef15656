"""The fields of a config.json or a GGUF file: which ones were used, which are harmless, and RoPE's.

Every field is used, known to be harmless, refused, or warned about. The tables here are for
Hugging Face's config.json, whose fields have the same meaning and defaults as in transformers.
families.py says which fields a family has.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from cli import UserError, print_status, printable
from config import MAX_NUMBER, RopeScaling

# Fields that do not change what the model computes. They are for training, for sampling, or for
# other programs.
HARMLESS = """
    _attn_implementation _name_or_path _sliding_window_pattern architectures attention_dropout
    attention_softmax_in_fp32 attn_implementation auto_map bad_words_ids begin_suppress_tokens
    bias_dropout_fusion bos_token_id cache_implementation chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init
    conv_dim conv_dim_out conv_use_xavier_init
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    hidden_dropout hidden_dropout_prob id2label initializer_range is_llama_config label2id
    length_penalty masked_softmax_fusion max_length mamba_ssm_dtype max_sequence_length
    max_window_layers min_length model_max_length mtp_num_hidden_layers
    mtp_use_dedicated_embeddings n_inner no_repeat_ngram_size num_beam_groups num_beams
    num_heads num_labels num_return_sequences offset_alibi output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id skip_bias_add skip_bias_add_qkv slow_but_exact suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k
    top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split()  # noqa: SIM905
# Fields that change what the model computes, with the values at which they have no effect.
NEUTRAL = {
    "add_cross_attention": [None, False],
    "attention_bias": [None, False],
    "attention_multiplier": [None],
    "attn_logit_softcapping": [None],
    "attn_output_gate": [None, True],
    "block_use_swiglu": [None, True],
    "clip_qkv": [None],
    "decoder_sparse_step": [None, 1],
    "dual_chunk_attention_config": [None],
    "embedding_multiplier": [None, 1],
    "final_logit_softcapping": [None],
    "full_attn_mod": [None, 1],
    "hidden_act": ["silu", "swish"],
    "hidden_activation": [None, "gelu_pytorch_tanh"],
    "first_k_dense_replace": [None, 0],
    "interpolate_factor": [None, 1],
    "is_causal": [None, True],
    "is_decoder": [None, False, True],
    "is_encoder_decoder": [None, False],
    "lm_head_bias": [None, False],
    "kv_lora_rank": [None],
    "logit_scale": [None, 1],
    "logits_scaling": [None, 1],
    "mlp_bias": [None, False],
    "mlp_only_layers": [None, []],
    "moe_layer_freq": [None, 1],
    "n_group": [None, 0, 1],
    "n_routed_experts": [None, 0],
    "n_shared_experts": [None, 0],
    "no_bias": [None, True],
    "no_rope_layers": [None, []],
    "norm_topk_prob": [None, True],
    "num_experts": [None, 0, 1],
    "num_local_experts": [None, 0, 1],
    "partial_rotary_factor": [None, 1],
    "q_lora_rank": [None],
    "quantization_config": [None],
    "residual_multiplier": [None, 1],
    "rope_interleaved": [None, False],
    "rotary_pct": [None, 1],
    "routed_scaling_factor": [None, 1],
    "scoring_func": [None, "softmax"],
    "shared_expert_intermediate_size": [None, 0],
    "use_bidirectional_attention": [None, False],
    "use_mrope": [None, False],
    "use_pos_enc": [None, True],
}

SHOWN = 150  # characters at either end of a long value in a message


class Fields:
    """The fields of a model. It records which ones were taken, and `finish` checks the others.

    prefix: of the names of all fields that count; callers leave it out.
    defaults: the values of missing fields, where a family has others than its relatives.
    """

    def __init__(self, path: Path, fields: dict, prefix: str = ""):
        self.path = path
        self.all = fields
        self.prefix = prefix
        self.defaults = {}
        self.taken = set()

    def take(self, name: str, *default):
        """The value of a field, or its default. UserError if it is missing and has no default."""
        self.taken.add(name)
        if self.prefix + name in self.all:
            return self.all[self.prefix + name]
        if name in self.defaults:
            return self.defaults[name]
        if not default:
            raise UserError(f"{self.path} lacks {self.prefix}{name}")
        return default[0]

    def refuse(self, name: str, problem: str):
        """Raise the UserError about a field with a value that is not supported."""
        value = json.dumps(self.all.get(self.prefix + name))
        if len(value) > 2 * SHOWN:
            value = f"{value[:SHOWN]} ... {value[-SHOWN:]}"
        raise UserError(f"{self.path}: {self.prefix}{name} = {value} {problem}")

    def finish(self, harmless: Iterable[str] = HARMLESS, neutral: dict[str, list] = NEUTRAL):
        """Refuse the remaining fields that change what the model computes; warn about unknown ones."""
        names = {name.removeprefix(self.prefix) for name in self.all if name.startswith(self.prefix)}
        for name in sorted(names - self.taken - set(harmless)):
            value = self.all[self.prefix + name]
            if name not in neutral:
                line = f"warning: {self.path}: {self.prefix}{name} = {json.dumps(value)} is unknown and ignored"
                print_status(printable(line))
            elif value not in neutral[name]:
                self.refuse(name, "changes what the model computes and is not supported")


# ---------------------------------------------------------------- RoPE

YARN_FIELDS = ["beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"]
ROPE_FIELDS = {
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
    "yarn": ["factor", *YARN_FIELDS],
    "longrope": ["factor", "short_factor", "long_factor", "attention_factor"],
    "proportional": ["factor", "partial_rotary_factor"],
}

REQUIRED_ROPE_FIELDS = {
    "linear": ROPE_FIELDS["linear"],
    "llama3": ROPE_FIELDS["llama3"],
    "longrope": ["short_factor", "long_factor"],
}


def rope_fields(fields: Fields, by_kind: bool = False) -> tuple[str, dict]:
    """(name, value) of the field of config.json that describes RoPE.

    by_kind: RoPE may differ by the kind of attention, and the field for full attention is returned.
    """
    name = "rope_parameters"
    if fields.take(name, None) is None:
        name = "rope_scaling"
    rope = fields.take(name, None) or {}
    if by_kind:
        rope = rope.get("full_attention", rope) or {}
    return name, dict(rope)


def sliding_rope(fields: Fields) -> dict:
    """The field of Config for families that scale RoPE only in layers with full attention."""
    base = fields.take("rope_local_base_freq", fields.take("rope_theta", None))
    rope = (fields.take("rope_parameters", None) or {}).get("sliding_attention") or {}
    if rope.get("rope_type", "default") != "default":
        fields.refuse("rope_parameters", "scales RoPE in layers with sliding attention, which is not supported")
    return {"sliding_rope_base": float(rope.get("rope_theta", base))}


def rotated_dimensions(fields: Fields, head_dim: int, default: float | None = None) -> dict:
    """The field of Config for families in which RoPE rotates only a part of each head. default: the
    part where config.json does not say it."""
    part = fields.take("partial_rotary_factor", default)
    _, rope = rope_fields(fields)
    part = rope.get("partial_rotary_factor", part)
    if part in (None, 1):
        return {}
    return {"rotary_dim": int(head_dim * part)}


def hf_rope(
    fields: Fields, head_dim: int, by_kind: bool = False, own_keys: Sequence[str] = ()
) -> tuple[float, RopeScaling | None, int]:
    """(base, scaling or None, longest context), from rope_parameters as transformers 5 writes it,
    or from rope_theta and rope_scaling as transformers 4 does.

    head_dim: the width of the heads that are rotated.
    by_kind: RoPE may differ in layers with sliding attention; `sliding_rope` reads it for them.
    own_keys: the family's own keys in this field, which the caller reads.
    """
    context = fields.take("max_position_embeddings", 2048)
    base = fields.take("rope_theta", 10000.0)
    name, rope = rope_fields(fields, by_kind)
    base = float(rope.pop("rope_theta", base))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind == "su":  # an older name
        kind = "longrope"
    if kind not in ROPE_FIELDS:
        fields.refuse(name, f"asks for RoPE scaling {kind!r}; known: {', '.join(ROPE_FIELDS)}")

    for key in own_keys:
        rope.pop(key, None)
    if kind != "proportional" and rope.pop("partial_rotary_factor", 1) not in (None, 1):
        fields.refuse(name, "rotates a part of each head, which is not supported")
    original = rope.pop("original_max_position_embeddings", None) or context
    original = fields.take("original_max_position_embeddings", None) or original
    values = {key: rope.pop(key) for key in ROPE_FIELDS[kind] if rope.get(key) is not None}
    # If these keys are still there, they are null or have no effect.
    for key in ("finetuned", "factor", "max_position_embeddings", *ROPE_FIELDS[kind]):
        rope.pop(key, None)
    if rope:
        fields.refuse(name, f"has {', '.join(sorted(rope))}, which is not supported with {kind!r}")

    if kind == "default":
        return base, None, context
    if kind == "proportional":
        return base, proportional(head_dim, **values), context
    for key in REQUIRED_ROPE_FIELDS.get(kind, []):
        if key not in values:
            fields.refuse(name, f"lacks {key}")
    if kind == "yarn":
        values = yarn(values)
    if kind == "longrope":
        values = longrope(values, context / original, original)
    if kind != "linear":
        values["original_max_seq_length"] = int(original)
    if context <= original:  # max_position_embeddings may be the context before it was extended
        context = int(original * values.get("factor", 1.0))
    return base, RopeScaling(kind, **values), context


def proportional(head_dim: int, factor: float = 1.0, partial_rotary_factor: float = 1.0) -> RopeScaling:
    """RoPE that rotates the first dimensions of each half of a head, with the frequencies of the whole head."""
    rotated = int(partial_rotary_factor * head_dim // 2)
    still = head_dim // 2 - rotated
    return RopeScaling("factors", factors=(float(factor),) * rotated + (MAX_NUMBER,) * still)


def yarn(values: dict) -> dict:
    """The fields of a RopeScaling with the kind "yarn", from the fields of config.json."""
    mscale = values.pop("mscale", None)
    mscale_all_dim = values.pop("mscale_all_dim", None)
    attention = yarn_attention_factor(values.get("factor", 1.0), mscale, mscale_all_dim)
    return {"attention_factor": attention} | values


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's factor on cos and sin: 0.1 ln(factor) + 1 (arXiv:2309.00071, eq. 22).

    With mscale and mscale_all_dim, as DeepSeek's models have them, it is the ratio of two such factors.
    """
    if factor <= 1:
        return 1.0

    def magnitude(m):
        return 0.1 * m * math.log(factor) + 1

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def longrope(values: dict, extension: float, original: int) -> dict:
    """The fields of a RopeScaling with the kind "longrope" (arXiv:2402.13753), from the fields
    of config.json. extension: the context as a multiple of the original one."""
    factor = values.get("factor", extension)
    attention = 1.0
    if factor > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "factors": tuple(map(float, values["short_factor"])),
        "long_factors": tuple(map(float, values["long_factor"])),
        "attention_factor": values.get("attention_factor", attention),
    }
