"""The model families that can be read: one record each, in the table FAMILIES at the end.

Read down: Layout, which says how the tensors of a kind of file are named and stored; Family; the
functions that read the fields of config.json; the functions that change tensors while they are
read; the table.

A record says everything that the other files need to know about a family. What can be changed while
a tensor is read, such as the order of its rows, needs no switch in the model.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from config import Config, DeltaNet, Experts, ShortConv, check_positive_int
from sources.fields import Fields, hf_rope, rotated_dimensions, sliding_rope


@dataclass(frozen=True)
class Layout:
    """How the tensors of one kind of file are named and stored.

    names: our module name -> the names in the file, without ".weight" and ".bias". If there are
    several, these tensors are stacked by rows, in this order. The matrices of experts have "{}" in
    their names, which stands for the number of an expert, or else one tensor (X,N,C) has the matrices
    of all experts.
    """

    names: dict[str, list[str]]
    layer: str  # the prefix before a layer's number; ours is "blocks."
    # The prefixes of the MTP layer (mtp.MTPLayer), and of its block; "{}" stands for
    # the number of the model's other layers. None: files have no such layer.
    mtp_layer: str | None = None
    draft_block: str | None = None
    # Regular expressions of parts of names in some files -> what replaces them.
    renames: dict[str, str] = field(default_factory=dict)
    # Our module -> the whole name of a tensor that some files have instead of the tensors in `names`:
    # the matrices of all experts, with their rows in our order.
    fused_experts: dict[str, str] = field(default_factory=dict)
    # Our tensor -> its whole name in the file, if that does not end with ".weight" or ".bias".
    whole_names: dict[str, str] = field(default_factory=dict)
    # Our module -> the number that fills its weight, which the files lack: ones, for norms without weights.
    constants: dict[str, float] = field(default_factory=dict)
    # A name in the file -> the function that changes its weight and bias while they are read. If a
    # matrix is quantized, the function gets each of its quantized parts, so it may only move rows.
    folds: dict[str, Callable[[Config, Tensor], Tensor]] = field(default_factory=dict)

    def renamed(self, name: str) -> str:
        """A name in a file, changed as `renames` says."""
        for part, replacement in self.renames.items():
            name = re.sub(part, replacement, name)
        return name


LLAMA_NAMES = {
    "embedding": ["model.embed_tokens"],
    "norm": ["model.norm"],
    "output": ["lm_head"],
    "attention_norm": ["input_layernorm"],
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.out": ["self_attn.o_proj"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
    "mlp_norm": ["post_attention_layernorm"],
    "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}
GGUF_NAMES = {
    "embedding": ["token_embd"],
    "norm": ["output_norm"],
    "output": ["output"],
    "attention_norm": ["attn_norm"],
    "attention.qkv": ["attn_q", "attn_k", "attn_v"],
    "attention.out": ["attn_output"],
    "attention.q_norm": ["attn_q_norm"],
    "attention.k_norm": ["attn_k_norm"],
    "attention_post_norm": ["post_attention_norm"],
    "mlp_norm": ["ffn_norm"],
    "mlp.gate_up": ["ffn_gate", "ffn_up"],
    "mlp.down": ["ffn_down"],
    "mlp_post_norm": ["post_ffw_norm"],
    "experts.router": ["ffn_gate_inp"],
    "experts.choice": ["exp_probs_b"],
    "experts.gate_up": ["ffn_gate_exps", "ffn_up_exps"],
    "experts.down": ["ffn_down_exps"],
    "experts.shared_gate": ["ffn_gate_inp_shexp"],
    "experts.shared.gate_up": ["ffn_gate_shexp", "ffn_up_shexp"],
    "experts.shared.down": ["ffn_down_shexp"],
}
GGUF_FUSED_EXPERTS = {"experts.gate_up": "ffn_gate_up_exps.weight"}
QWEN_EXPERT_NAMES = {
    "experts.router": ["mlp.gate"],
    "experts.gate_up": ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
    "experts.down": ["mlp.experts.{}.down_proj"],
    "experts.shared_gate": ["mlp.shared_expert_gate"],
    "experts.shared.gate_up": ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
    "experts.shared.down": ["mlp.shared_expert.down_proj"],
}
GEMMA4_EXPERT_NAMES = {
    "experts.router": ["router.proj"],
    "experts.gate_up": ["experts.gate_up_proj"],
    "experts.down": ["experts.down_proj"],
    "experts.norm": ["pre_feedforward_layernorm_2"],
    "experts.term_norm": ["post_feedforward_layernorm_2"],
    "experts.mlp_term_norm": ["post_feedforward_layernorm_1"],
}
GEMMA4_FUSED_EXPERTS = {"experts.gate_up": "experts.gate_up_proj", "experts.down": "experts.down_proj"}
LFM2_EXPERT_NAMES = {
    "experts.router": ["feed_forward.gate"],
    "experts.gate_up": ["feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"],
    "experts.down": ["feed_forward.experts.{}.w2"],
}
LFM2_FUSED_EXPERTS = {
    "experts.gate_up": "feed_forward.experts.gate_up_proj",
    "experts.down": "feed_forward.experts.down_proj",
}
QWEN_FUSED_EXPERTS = {"experts.gate_up": "mlp.experts.gate_up_proj", "experts.down": "mlp.experts.down_proj"}
MIXTRAL_EXPERT_NAMES = {
    "experts.router": ["block_sparse_moe.gate"],
    "experts.gate_up": ["block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"],
    "experts.down": ["block_sparse_moe.experts.{}.w2"],
}
MIXTRAL_FUSED_EXPERTS = {
    "experts.gate_up": "block_sparse_moe.experts.gate_up_proj",
    "experts.down": "block_sparse_moe.experts.down_proj",
}
BLOOM_NAMES = {
    "embedding": ["word_embeddings"],
    "embedding_norm": ["word_embeddings_layernorm"],
    "norm": ["ln_f"],
    "output": ["lm_head"],
    "attention_norm": ["input_layernorm"],
    "attention.qkv": ["self_attention.query_key_value"],
    "attention.out": ["self_attention.dense"],
    "mlp_norm": ["post_attention_layernorm"],
    "mlp.up": ["mlp.dense_h_to_4h"],
    "mlp.down": ["mlp.dense_4h_to_h"],
}
POST_NORM_NAMES = LLAMA_NAMES | {
    "attention_post_norm": ["post_attention_layernorm"],
    "mlp_norm": ["pre_feedforward_layernorm"],
    "mlp_post_norm": ["post_feedforward_layernorm"],
}
LLAMA_LAYOUT = Layout(LLAMA_NAMES, "model.layers.")
# AutoModel, which makes embeddings, saves the body of a model without "model.".
QWEN3_LAYOUT = replace(LLAMA_LAYOUT, renames={r"^(?=(embed_tokens|layers|norm)\.)": "model."})
POST_NORM_LAYOUT = Layout(POST_NORM_NAMES, "model.layers.")
GGUF_LAYOUT = Layout(GGUF_NAMES, "blk.", fused_experts=GGUF_FUSED_EXPERTS)


@dataclass(frozen=True)
class Family:
    """What a model family's files mean. The defaults are for Llama and most of its relatives."""

    model_type: str  # the name in config.json
    architectures: list[str]  # the names of its classes in transformers; messages show the first
    read_fields: Callable[[Fields], dict]  # the fields of config.json -> the fields of our Config
    defaults: dict = field(default_factory=dict)  # the values of fields that config.json may lack
    multimodal: str | None = None  # the model_type of multimodal models with such a text_config
    layout: Layout = LLAMA_LAYOUT  # the tensors of Hugging Face files
    padded_vocabulary: bool = False  # the embedding table may have more rows than there are tokens
    gguf_architecture: str | None = None  # None: no GGUF file names this family as its architecture
    gguf_layout: Layout = GGUF_LAYOUT
    partial_rotary: bool = False  # a part of each head may be rotated, in GGUF files
    keys_as_values: bool = False  # GGUF files may lack the values of layers without a sliding window
    gguf_experts: bool = False  # GGUF files may have experts, in all layers except the leading dense ones
    gguf_scoring: str = "softmax"  # of their router: see config.Experts
    # The Config of a GGUF file -> the fields of Config that the metadata lacks.
    gguf_fields: Callable[[Config], dict] = lambda config: {}


# ---------------------------------------------------------------- config.json

MROPE = ["mrope_section", "mrope_interleaved"]  # which frequencies take the positions of images


def shared_fields(fields: Fields, rope_head_dim: int | None = None, **rope) -> dict:
    """The fields of Config that Llama and its relatives have in common.

    rope_head_dim: the width of the heads that hf_rope's RoPE rotates; None means head_dim. rope: its other arguments.
    """
    n_head = fields.take("num_attention_heads")
    n_layer = fields.take("num_hidden_layers")
    # This is checked first, because the functions below make lists with an entry for each layer.
    check_positive_int("n_layer", n_layer)
    head_dim = fields.take("head_dim", None) or fields.take("hidden_size") // n_head
    base, scaling, context = hf_rope(fields, rope_head_dim or head_dim, **rope)

    return {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": fields.take("num_key_value_heads", None) or n_head,
        "head_dim": head_dim,
        "dim": fields.take("hidden_size"),
        "hidden_dim": fields.take("intermediate_size"),
        "vocab_size": fields.take("vocab_size"),
        "max_seq_length": context,
        "norm_eps": float(fields.take("rms_norm_eps", 1e-6)),
        "rope_base": base,
        "rope_scaling": scaling,
        "tied_embeddings": fields.take("tie_word_embeddings", False) or False,
    }


def attention_bias(fields: Fields) -> dict:
    return dict.fromkeys(("qkv_bias", "out_bias"), fields.take("attention_bias", False) or False)


def biases(fields: Fields) -> dict:
    return attention_bias(fields) | {"mlp_bias": fields.take("mlp_bias", False) or False}


def layers_of_kind(fields: Fields, kind: str, usual: Iterable[int]) -> tuple[int, ...]:
    """The layers that config.json calls `kind`, such as sliding_attention; all others have full
    attention. usual: these layers, if it does not list the kinds."""
    kinds = fields.take("layer_types", None)
    if kinds is None:
        return tuple(usual)
    n_layer = fields.take("num_hidden_layers")
    if len(kinds) != n_layer or set(kinds) - {"full_attention", kind}:
        fields.refuse("layer_types", f"must be full_attention or {kind} for each of {n_layer} layers")
    return tuple(i for i in range(n_layer) if kinds[i] == kind)


def all_but_every(interval: int, n_layer: int) -> tuple[int, ...]:
    """All layers except numbers interval - 1, 2 interval - 1 and so on."""
    return tuple(i for i in range(n_layer) if (i + 1) % interval)


def sliding_layers(fields: Fields, usual: Iterable[int], default: bool = False) -> dict:
    """The fields of Config for a sliding window in some layers, if use_sliding_window is set.

    usual: which layers have the window, if layer_types is missing.
    default: the value of use_sliding_window where it is missing; if True, a window is required.
    """
    window = fields.take("sliding_window", None)
    layers = layers_of_kind(fields, "sliding_attention", usual)
    if default and window is None:
        fields.refuse("sliding_window", "is missing; layers with sliding attention need it")
    if not fields.take("use_sliding_window", default) or window is None or not layers:
        return {}
    return {"sliding_window": window, "sliding_layers": layers}


def mistral_fields(fields: Fields, **rope) -> dict:
    found = shared_fields(fields, **rope)
    all_layers = range(found["n_layer"])
    sliding = layers_of_kind(fields, "sliding_attention", all_layers)
    window = fields.take("sliding_window", None)
    if window is not None and len(sliding) < len(all_layers):
        fields.refuse("layer_types", "has full attention in some layers, which transformers' Mistral ignores")
    return found | {"sliding_window": window}


def ministral3_fields(fields: Fields) -> dict:
    beta = fields.take("rope_parameters").get("llama_4_scaling_beta")
    found = mistral_fields(fields, own_keys=["llama_4_scaling_beta"])
    return found | {"query_scale_beta": beta or None}


def qwen_fields(fields: Fields) -> dict:
    found = shared_fields(fields)
    first = fields.take("max_window_layers", 28)
    return found | sliding_layers(fields, [i for i in range(found["n_layer"]) if i >= first])


def experts(fields: Fields, layers: Iterable[int], n_expert: int, n_active: int, **sizes) -> dict:
    """The field of Config about experts, which are in these layers.

    n_expert, n_active: the defaults of the family. sizes: the other fields of Experts.
    """
    n_expert = fields.take("num_experts", fields.take("num_local_experts", n_expert))
    n_active = fields.take("num_experts_per_tok", n_active)
    if not layers:
        return {"experts": None}
    return {"experts": Experts(tuple(layers), n_expert, n_active, **sizes)}


def mixtral_fields(fields: Fields) -> dict:
    found = mistral_fields(fields)
    return found | experts(fields, range(found["n_layer"]), 8, 2, hidden_dim=found["hidden_dim"])


def qwen3_moe_fields(fields: Fields) -> dict:
    found = shared_fields(fields) | attention_bias(fields) | {"qk_norm": True}
    window = fields.take("sliding_window", 4096)
    if not fields.take("use_sliding_window", False):
        window = None
    all_layers = range(found["n_layer"])
    usual = () if window is None else all_layers
    if layers_of_kind(fields, "sliding_attention", usual) != tuple(usual):
        fields.refuse("layer_types", "is ignored by transformers' Qwen3-MoE, and differs from use_sliding_window")

    width = fields.take("moe_intermediate_size", 768)
    normalized = fields.take("norm_topk_prob", False)
    found |= experts(fields, sparse_layers(fields, all_layers), 128, 8, hidden_dim=width, normalized=normalized)
    return found | {"sliding_window": window}


def sparse_layers(fields: Fields, all_layers: Iterable[int]) -> list[int]:
    step = fields.take("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", None) or []
    return [i for i in all_layers if i not in dense and (i + 1) % step == 0]


def qwen3_vl_fields(fields: Fields) -> dict:
    """The text part of Qwen3-VL: in text, the positions of time, height and width are equal, so its
    interleaved RoPE is the usual one."""
    return shared_fields(fields, own_keys=MROPE) | attention_bias(fields) | {"qk_norm": True}


def qwen3_vl_moe_fields(fields: Fields) -> dict:
    found = qwen3_vl_fields(fields)
    fields.take("sliding_window", None)  # transformers ignores it
    width = fields.take("moe_intermediate_size", 1408)
    return found | experts(fields, sparse_layers(fields, range(found["n_layer"])), 60, 4, hidden_dim=width)


def smollm3_fields(fields: Fields) -> dict:
    found = shared_fields(fields) | biases(fields)
    n_layer = found["n_layer"]
    has_rope = fields.take("no_rope_layers", None)  # despite its name, 1 means that the layer has RoPE
    interval = fields.take("no_rope_layer_interval", 4)
    if has_rope is None:
        has_rope = [int((i + 1) % interval > 0) for i in range(n_layer)]
    without = tuple(i for i in range(n_layer) if not has_rope[i])

    if layers_of_kind(fields, "sliding_attention", ()) and not fields.take("use_sliding_window", False):
        fields.refuse("layer_types", "has sliding_attention, but use_sliding_window is not set")
    return found | sliding_layers(fields, without) | {"layers_without_rope": without}


def gemma3_fields(fields: Fields) -> dict:
    found = shared_fields(fields, by_kind=True) | attention_bias(fields) | sliding_rope(fields)
    usual = all_but_every(fields.take("sliding_window_pattern", 6), found["n_layer"])
    found |= sliding_layers(fields, usual, default=True)
    found |= gemma3_constants(found["dim"])
    found["max_seq_length"] = fields.take("max_position_embeddings")  # the context of the scaled RoPE
    found["attention_scale"] = fields.take("query_pre_attn_scalar") ** -0.5
    return found


def gemma3_constants(dim: int) -> dict:
    return {
        "norm_placement": "both",
        "float32_norms": True,
        "qk_norm": True,
        "mlp": "geglu",
        "embedding_scale": dim**0.5,
    }


def gemma3_gguf_fields(config: Config) -> dict:
    """What a file leaves out, because llama.cpp has it in its program: which layers slide, and scales."""
    width = config.head_dim
    if config.n_layer == 62:  # the 27B model scales its attention scores by another width
        width = config.dim // config.n_head
    found = gguf_windows(config, 6, 10000.0) | gemma3_constants(config.dim)
    found["attention_scale"] = width**-0.5
    if config.rope_scaling is not None:  # the file has the context of the scaled RoPE
        found["max_seq_length"] = int(config.max_seq_length / config.rope_scaling.factor)
    return found


def gemma4_fields(fields: Fields) -> dict:
    # Null stands for the default.
    fields.all = {name: value for name, value in fields.all.items() if value is not None}
    if fields.take("use_bidirectional_attention", "vision") != "vision":
        fields.refuse("use_bidirectional_attention", "is not supported: a token would see later ones")

    n_layer = fields.take("num_hidden_layers")
    check_positive_int("n_layer", n_layer)
    sliding = layers_of_kind(fields, "sliding_attention", all_but_every(6, n_layer))
    sliding = [i for i in sliding if i < n_layer - 1]  # the last layer has full attention, whatever the fields say
    keys_as_values = fields.take("attention_k_eq_v", False)
    heads = gemma4_full_heads(fields, sorted({*range(n_layer)} - {*sliding}), keys_as_values)

    found = shared_fields(fields, heads["head_dim"], by_kind=True) | attention_bias(fields) | sliding_rope(fields)
    return (
        found
        | gemma4_constants(found["dim"])
        | gemma4_small_fields(fields, found)
        | {
            "full_head_dim": heads["head_dim"],
            "full_kv_head": heads["num_key_value_heads"],
            "full_keys_as_values": keys_as_values,
            "sliding_window": fields.take("sliding_window"),
            "sliding_layers": tuple(sliding),
            "max_seq_length": fields.take("max_position_embeddings"),
            "logits_softcap": fields.take("final_logit_softcapping", None),
        }
        | gemma4_experts(fields, n_layer)
    )


def gemma4_small_fields(fields: Fields, found: dict) -> dict:
    """The fields of Config that only E2B and E4B have."""
    small = {
        "shared_kv_layers": fields.take("num_kv_shared_layers", 0),
        "per_layer_dim": fields.take("hidden_size_per_layer_input", 0) or None,
    }
    if small["shared_kv_layers"] and fields.take("use_double_wide_mlp", False):
        small["shared_kv_hidden_dim"] = 2 * found["hidden_dim"]
    fields.take("use_double_wide_mlp", None)
    if fields.take("vocab_size_per_layer_input", 262144) != found["vocab_size"] and small["per_layer_dim"]:
        fields.refuse("vocab_size_per_layer_input", f"is not the vocab_size {found['vocab_size']}")
    return small


def gemma4_experts(fields: Fields, n_layer: int) -> dict:
    sizes = [fields.take(name, None) for name in ("num_experts", "top_k_experts", "moe_intermediate_size")]
    if not fields.take("enable_moe_block", False):
        return {}
    return {"experts": Experts(tuple(range(n_layer)), *sizes, **GEMMA4_EXPERTS)}


def gemma4_full_heads(fields: Fields, layers: list[int], keys_as_values: bool) -> dict:
    """The fields of config.json about heads, for the layers with full attention. Published files have
    them under other names; transformers writes the fields of each layer that differ from the others'."""
    usual = {name: fields.take(name) for name in ("head_dim", "num_key_value_heads")}
    heads = fields.take("num_global_key_value_heads", None)
    published = {"head_dim": fields.take("global_head_dim", 512)}
    if keys_as_values and heads is not None:
        published["num_key_value_heads"] = heads
    by_layer = fields.take("per_layer_config", dict.fromkeys(layers, published))
    by_layer = {int(layer): usual | values for layer, values in by_layer.items()}
    full = by_layer.get(layers[-1], usual)
    others = {i for i, values in by_layer.items() if values != usual} - {*layers}
    if others or full.keys() != usual.keys() or any(by_layer.get(i, usual) != full for i in layers):
        fields.refuse("per_layer_config", "must change the heads of all layers with full attention, and all alike")
    return full


def gemma4_gguf_fields(config: Config) -> dict:
    found = gguf_windows(config, 6, 10000.0) | gemma4_constants(config.dim)
    return found | {"experts": config.experts and replace(config.experts, **GEMMA4_EXPERTS)}


def gemma4_constants(dim: int) -> dict:
    return gemma3_constants(dim) | {"attention_scale": 1.0, "value_norm": True, "layer_scale": True}


def phi3_fields(fields: Fields) -> dict:
    found = shared_fields(fields, own_keys=["partial_rotary_factor"])
    found |= rotated_dimensions(fields, found["head_dim"])
    return found | {"sliding_window": fields.take("sliding_window", None)}


def granite_fields(fields: Fields) -> dict:
    scales = {
        "embedding_scale": float(fields.take("embedding_multiplier", 1.0)),
        "attention_scale": float(fields.take("attention_multiplier", 1.0)),
        "residual_scale": float(fields.take("residual_multiplier", 1.0)),
        "logits_scale": 1 / fields.take("logits_scaling", 1.0),
    }
    return shared_fields(fields) | biases(fields) | scales


def qwen35_fields(fields: Fields) -> dict:
    found = shared_fields(fields, own_keys=["partial_rotary_factor", *MROPE])
    usual = all_but_every(fields.take("full_attention_interval", 4), found["n_layer"])

    net = DeltaNet(
        layers=layers_of_kind(fields, "linear_attention", usual),
        n_key_head=fields.take("linear_num_key_heads", 16),
        n_value_head=fields.take("linear_num_value_heads", 32),
        key_dim=fields.take("linear_key_head_dim", 128),
        value_dim=fields.take("linear_value_head_dim", 128),
        conv_width=fields.take("linear_conv_kernel_dim", 4),
    )
    found |= attention_bias(fields) | rotated_dimensions(fields, found["head_dim"], default=0.25)
    return found | QWEN35 | {"delta_net": net if net.layers else None}


def qwen35_moe_fields(fields: Fields) -> dict:
    found = qwen35_fields(fields)
    found["hidden_dim"] = fields.take("moe_intermediate_size", 512)  # no layer has an MLP besides the experts
    sizes = {"hidden_dim": found["hidden_dim"], "shared_dim": fields.take("shared_expert_intermediate_size", 512)}
    return found | experts(fields, range(found["n_layer"]), 256, 8, **sizes)


def lfm2_fields(fields: Fields) -> dict:
    found = lfm2_shared_fields(fields)
    return found | {"hidden_dim": lfm2_hidden_dim(fields)}


def lfm2_moe_fields(fields: Fields) -> dict:
    found = lfm2_shared_fields(fields)
    sparse = range(fields.take("num_dense_layers", 2), found["n_layer"])
    sizes = {
        "hidden_dim": fields.take("moe_intermediate_size", 1792),
        "normalized": fields.take("norm_topk_prob", True),
        "scoring": "sigmoid",
        "choice_bias": fields.take("use_expert_bias", True),
        "scale": float(fields.take("routed_scaling_factor", 1.0)),
    }
    return found | experts(fields, sparse, 32, 4, **sizes)


def lfm2_shared_fields(fields: Fields) -> dict:
    """The fields of Config that LFM2 and LFM2-MoE have in common."""
    found = shared_fields(fields)
    found["norm_eps"] = float(fields.take("norm_eps", 1e-5))
    found["tied_embeddings"] = fields.take("tie_embedding", fields.take("tie_word_embeddings")) or False

    all_layers = range(found["n_layer"])
    attending = fields.take("full_attn_idxs", None)
    usual = [i for i in all_layers if attending is not None and i not in attending]
    conv = ShortConv(
        layers=layers_of_kind(fields, "conv", usual),
        conv_channels=found["dim"],
        conv_width=fields.take("conv_L_cache", 3),
        bias=fields.take("conv_bias", False),
    )
    return found | {"qk_norm": True, "short_conv": conv if conv.layers else None}


def lfm2_hidden_dim(fields: Fields) -> int:
    """LFM2's width of the MLP, which usually is a multiple of 256 near two thirds of the field."""
    width = fields.take("block_ff_dim", fields.take("intermediate_size"))
    multiple = fields.take("block_multiple_of", 256)
    multiplier = fields.take("block_ffn_dim_multiplier", 1.0)
    if not fields.take("block_auto_adjust_ff_dim", True):
        return width
    width = int(multiplier * int(2 * width / 3))
    return -(-width // multiple) * multiple


GEMMA4_EXPERTS = {"expert_scales": True, "beside_mlp": True}
QWEN35 = {"qk_norm": True, "attention_gate": True, "float32_norms": True}
OLMO2 = {"norm_placement": "after", "qk_norm": True, "qk_norm_whole": True}


def olmo3_fields(fields: Fields) -> dict:
    found = shared_fields(fields, by_kind=True) | attention_bias(fields) | sliding_rope(fields)
    return found | sliding_layers(fields, all_but_every(4, found["n_layer"]), default=True) | OLMO2


def olmo2_gguf_fields(config: Config) -> dict:
    """Files of OLMo 3 have OLMo 2's architecture. As in llama.cpp, every fourth layer does not slide."""
    return OLMO2 | gguf_windows(config, 4, config.rope_base)


def gguf_windows(config: Config, period: int, base: float) -> dict:
    """The fields of Config about sliding layers that a GGUF file leaves out.

    All layers slide except every period-th, and `base` is RoPE's base in the layers that slide.
    """
    if config.sliding_window is None:
        return {}
    layers = config.sliding_layers
    if layers is None:
        layers = all_but_every(period, config.n_layer)
    return {"sliding_layers": layers, "sliding_rope_base": config.sliding_rope_base or base}


def nanochat_fields(fields: Fields) -> dict:
    if fields.take("hidden_act", "relu2") != "relu2":
        fields.refuse("hidden_act", "is not supported; expected relu2")
    return (
        shared_fields(fields)
        | attention_bias(fields)
        | {
            "mlp": "relu2",
            "qk_norm": True,
            "embedding_norm": True,
            "logits_softcap": fields.take("final_logit_softcapping", 15.0),
        }
    )


def bloom_fields(fields: Fields) -> dict:
    """The fields of Config for BLOOM.

    Its context is the length of the training sequences, although ALiBi has no limit.
    """

    older = {"n_head": "num_attention_heads", "n_embed": "hidden_size", "n_layer": "num_hidden_layers"}
    for old, new in older.items():
        value = fields.take(old, None)
        if value is not None:
            fields.all[new] = value
    H = fields.take("num_attention_heads")
    D = fields.take("hidden_size")
    return {
        "n_layer": fields.take("num_hidden_layers"),
        "n_head": H,
        "n_kv_head": H,
        "head_dim": D // H,
        "dim": D,
        "hidden_dim": 4 * D,
        "vocab_size": fields.take("vocab_size"),
        "max_seq_length": fields.take("seq_length", None) or 2048,
        "norm_eps": float(fields.take("layer_norm_epsilon", 1e-5)),
        "tied_embeddings": fields.take("tie_word_embeddings", True) or False,
        "norm": "layer",
        "mlp": "gelu",
        "alibi": True,
        "embedding_norm": True,
        "post_norm_residual": fields.take("apply_residual_connection_post_layernorm", False) or False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }


# ---------------------------------------------------------------- tensors that are changed while they are read


def separate_pairs(config: Config, tensor: Tensor) -> Tensor:
    """Rows of q or k for RoPE that rotates neighbours (2i, 2i+1), reordered for ours.

    Ours rotates (i, i + E/2).
    """
    E = config.head_dim
    return tensor.reshape(-1, E // 2, 2, tensor[0].numel()).transpose(1, 2).reshape(tensor.shape)


def swapped_halves(config: Config, tensor: Tensor) -> Tensor:
    """Rows of q or k for RoPE that turns by minus the angle: with the two halves of each head swapped,
    that is ours."""
    E = config.head_dim
    return tensor.reshape(-1, 2, E // 2, tensor[0].numel()).flip(1).reshape(tensor.shape)


def separate_qkv(config: Config, tensor: Tensor) -> Tensor:
    """Rows (H,3,E), with q, k and v of each head together, reordered to (3,H,E)."""
    heads = tensor.reshape(config.n_head, 3, config.head_dim, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def plus_one(config: Config, weight: Tensor) -> Tensor:
    """The weight of a norm that multiplies by 1 + weight."""
    return 1 + weight.float()


def router_norm(config: Config, weight: Tensor) -> Tensor:
    """The weight of the norm before a router whose input is also multiplied by D^-0.5."""
    return weight.float() * config.dim**-0.5


def rotated_pairs(config: Config, tensor: Tensor) -> Tensor:
    """Rows of q, k and v for RoPE that rotates (i, i + R/2) in the first R dimensions of each head,
    reordered for ours, which rotates (i, i + E/2)."""
    heads = tensor.reshape(-1, config.head_dim, tensor[0].numel())  # (H+2K,E,...)
    rotated = config.n_head + config.n_kv_head
    return torch.cat([rotated_head(config, heads[:rotated]), heads[rotated:]]).reshape(tensor.shape)


def rotated_head(config: Config, tensor: Tensor) -> Tensor:
    """The dimensions of heads (...,E,C), reordered as in `rotated_pairs`."""
    E = config.head_dim
    R = config.rotary_dim or E
    middle = (E + R) // 2
    order = [*range(R // 2), *range(R, middle), *range(R // 2, R), *range(middle, E)]
    return tensor[..., order, :]


def rotated_keys(config: Config, tensor: Tensor) -> Tensor:
    """Rows of k, or the weight of a norm over a head, reordered as in `rotated_pairs`."""
    heads = tensor.reshape(-1, config.head_dim, tensor[0].numel())
    return rotated_head(config, heads).reshape(tensor.shape)


def gated_queries(config: Config, tensor: Tensor) -> Tensor:
    """Rows (H,2,E), with the query and the gate of each head together, reordered to (2,H,E); the
    dimensions of queries as in `rotated_pairs`."""
    q, gate = tensor.reshape(config.n_head, 2, config.head_dim, tensor[0].numel()).unbind(1)
    return torch.cat([rotated_head(config, q), gate]).reshape(tensor.shape)


def rotated_norm(config: Config, weight: Tensor) -> Tensor:
    return rotated_keys(config, plus_one(config, weight))


def tiled(config: Config, tensor: Tensor, width: int) -> Tensor:
    """Rows of value heads, `width` each, in which the value heads of one key head follow each other,
    reordered to ours: value head h belongs to key head h % n."""
    n = config.delta_net.n_key_head
    heads = tensor.reshape(n, -1, width, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def tiled_values(config: Config, tensor: Tensor) -> Tensor:
    return tiled(config, tensor, config.delta_net.value_dim)


def tiled_qkv(config: Config, tensor: Tensor) -> Tensor:
    """Rows of q, k and v (or channels of their convolution), with the value heads in our order."""
    keys = 2 * config.delta_net.keys_width
    return torch.cat([tensor[:keys], tiled_values(config, tensor[keys:])])


def tiled_heads(config: Config, tensor: Tensor) -> Tensor:
    """A row or a number for each value head, in our order."""
    return tiled(config, tensor, 1)


def tiled_columns(config: Config, weight: Tensor) -> Tensor:
    return tiled_values(config, weight.T).T.contiguous()


def tiled_decay(config: Config, logarithm: Tensor) -> Tensor:
    """The factors of the decays, from the logarithms of their negatives."""
    return -tiled_heads(config, logarithm).float().exp()


PAIRED_GGUF_LAYOUT = replace(GGUF_LAYOUT, folds=dict.fromkeys(("attn_q", "attn_k"), separate_pairs))
BLOOM_LAYOUT = Layout(
    BLOOM_NAMES,
    "h.",
    renames={r"^transformer\.": ""},
    folds={"self_attention.query_key_value": separate_qkv},
)
MULTIMODAL_RENAMES = {r"^language_model\.": "", r"^model\.language_model\.": "model."}
MISTRAL_LAYOUT = replace(LLAMA_LAYOUT, renames=MULTIMODAL_RENAMES)
GEMMA3_NORMS = [names[0] for module, names in POST_NORM_NAMES.items() if module.endswith("norm")]
GEMMA3_LAYOUT = replace(
    POST_NORM_LAYOUT,
    renames=MULTIMODAL_RENAMES,
    folds=dict.fromkeys(GEMMA3_NORMS, plus_one),
)
GEMMA4_LAYOUT = replace(
    POST_NORM_LAYOUT,
    names=POST_NORM_NAMES
    | GEMMA4_EXPERT_NAMES
    | {
        "layer_inputs.table": ["model.embed_tokens_per_layer"],
        "layer_inputs.proj": ["model.per_layer_model_projection"],
        "layer_inputs.norm": ["model.per_layer_projection_norm"],
        "layer_input.gate": ["per_layer_input_gate"],
        "layer_input.proj": ["per_layer_projection"],
        "layer_input.norm": ["post_per_layer_input_norm"],
    },
    renames=MULTIMODAL_RENAMES,
    fused_experts=GEMMA4_FUSED_EXPERTS,
    whole_names={
        "scale.weight": "layer_scalar",
        "experts.router_norm.weight": "router.scale",
        "experts.scales.weight": "router.per_expert_scale",
    },
    constants={"attention.v_norm": 1.0},
    folds={"router.scale": router_norm},
)
GEMMA4_GGUF_LAYOUT = replace(
    GGUF_LAYOUT,
    names=GGUF_NAMES
    | {
        "scale": ["layer_output_scale"],
        "layer_inputs.table": ["per_layer_token_embd"],
        "layer_inputs.proj": ["per_layer_model_proj"],
        "layer_inputs.norm": ["per_layer_proj_norm"],
        "layer_input.gate": ["inp_gate"],
        "layer_input.proj": ["proj"],
        "layer_input.norm": ["post_norm"],
        "experts.norm": ["pre_ffw_norm_2"],
        "experts.term_norm": ["post_ffw_norm_2"],
        "experts.mlp_term_norm": ["post_ffw_norm_1"],
    },
    whole_names={
        "experts.router_norm.weight": "ffn_gate_inp.scale",
        "experts.scales.weight": "ffn_down_exps.scale",
    },
    constants=GEMMA4_LAYOUT.constants,
    folds={"ffn_gate_inp.scale": router_norm},
)
MIXTRAL_LAYOUT = replace(
    LLAMA_LAYOUT,
    names=LLAMA_NAMES | MIXTRAL_EXPERT_NAMES,
    renames={r"\.mlp\.": ".block_sparse_moe."},
    fused_experts=MIXTRAL_FUSED_EXPERTS,
)
QWEN3_MOE_LAYOUT = replace(
    LLAMA_LAYOUT,
    names=LLAMA_NAMES | QWEN_EXPERT_NAMES,
    fused_experts=QWEN_FUSED_EXPERTS,
)
PHI3_LAYOUT = replace(
    LLAMA_LAYOUT,
    names=LLAMA_NAMES | {"attention.qkv": ["self_attn.qkv_proj"], "mlp.gate_up": ["mlp.gate_up_proj"]},
    folds={"self_attn.qkv_proj": rotated_pairs},
)
PHI3_GGUF_LAYOUT = replace(
    GGUF_LAYOUT,
    # ffn_up holds the gate, too.
    names=GGUF_NAMES | {"attention.qkv": ["attn_qkv"], "mlp.gate_up": ["ffn_up"]},
    folds={"attn_qkv": rotated_pairs},
)

QWEN35_LAYOUT = Layout(
    LLAMA_NAMES
    | QWEN_EXPERT_NAMES
    | {
        "delta_net.inputs": [f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")],
        "delta_net.conv": ["linear_attn.conv1d"],
        "delta_net.norm": ["linear_attn.norm"],
        "delta_net.out": ["linear_attn.out_proj"],
        "mtp.embedding_norm": ["pre_fc_norm_embedding"],
        "mtp.hidden_norm": ["pre_fc_norm_hidden"],
        "mtp.proj": ["fc"],
        "mtp.norm": ["norm"],
    },
    "model.layers.",
    mtp_layer="mtp.",
    draft_block="mtp.layers.0.",
    renames=MULTIMODAL_RENAMES | {r"^model\.mtp\.": "mtp."},
    fused_experts=QWEN_FUSED_EXPERTS,
    whole_names={"delta_net.decay.weight": "linear_attn.A_log", "delta_net.decay.bias": "linear_attn.dt_bias"},
    folds=dict.fromkeys(("input_layernorm", "post_attention_layernorm", "model.norm"), plus_one)
    | dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), plus_one)
    | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), rotated_norm)
    | dict.fromkeys(("linear_attn.in_proj_qkv", "linear_attn.conv1d"), tiled_qkv)
    | dict.fromkeys(("linear_attn.in_proj_b", "linear_attn.in_proj_a", "linear_attn.dt_bias"), tiled_heads)
    | {
        "self_attn.q_proj": gated_queries,
        "self_attn.k_proj": rotated_keys,
        "linear_attn.in_proj_z": tiled_values,
        "linear_attn.A_log": tiled_decay,
        "linear_attn.out_proj": tiled_columns,
    },
)
QWEN35_GGUF_LAYOUT = Layout(
    GGUF_NAMES
    | {
        "delta_net.inputs": ["attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"],
        "delta_net.conv": ["ssm_conv1d"],
        "delta_net.norm": ["ssm_norm"],
        "delta_net.out": ["ssm_out"],
        "mlp_norm": ["post_attention_norm"],
        "mtp.embedding_norm": ["nextn.enorm"],
        "mtp.hidden_norm": ["nextn.hnorm"],
        "mtp.proj": ["nextn.eh_proj"],
        "mtp.norm": ["nextn.shared_head_norm"],
    },
    "blk.",
    mtp_layer="blk.{}.",
    draft_block="blk.{}.",
    fused_experts=GGUF_FUSED_EXPERTS,
    renames={r"ssm_dt\.bias": "ssm_dt"},  # llama.cpp writes the first name, Ollama the second
    whole_names={"delta_net.decay.weight": "ssm_a", "delta_net.decay.bias": "ssm_dt"},
    folds={"attn_q": gated_queries} | dict.fromkeys(("attn_k", "attn_q_norm", "attn_k_norm"), rotated_keys),
)

LFM2_LAYOUT = Layout(
    LLAMA_NAMES
    | {
        "norm": ["model.embedding_norm"],  # despite its name, it is behind the last layer
        "attention_norm": ["operator_norm"],
        "attention.out": ["self_attn.out_proj"],
        "attention.q_norm": ["self_attn.q_layernorm"],
        "attention.k_norm": ["self_attn.k_layernorm"],
        "short_conv.inputs": ["conv.in_proj"],
        "short_conv.conv": ["conv.conv"],
        "short_conv.out": ["conv.out_proj"],
        "mlp_norm": ["ffn_norm"],
        "mlp.gate_up": ["feed_forward.w1", "feed_forward.w3"],
        "mlp.down": ["feed_forward.w2"],
    }
    | LFM2_EXPERT_NAMES,
    "model.layers.",
    renames=MULTIMODAL_RENAMES,
    fused_experts=LFM2_FUSED_EXPERTS,
    whole_names={"experts.choice.bias": "feed_forward.expert_bias"},
)
LFM2_GGUF_LAYOUT = Layout(
    GGUF_NAMES
    | {
        "norm": ["token_embd_norm"],  # despite its name, it is behind the last layer
        "short_conv.inputs": ["shortconv.in_proj"],
        "short_conv.conv": ["shortconv.conv"],
        "short_conv.out": ["shortconv.out_proj"],
    },
    "blk.",
    renames={r"^output_norm\.": "token_embd_norm."},  # Ollama's name
    fused_experts=GGUF_FUSED_EXPERTS,
)
# Norms without weights. The norms of queries and keys are behind RoPE, which does not change what they divide by.
NANOCHAT_NORMS = ("embedding_norm", "norm", "attention_norm", "mlp_norm", "attention.q_norm", "attention.k_norm")
NANOCHAT_LAYOUT = replace(
    LLAMA_LAYOUT,
    names=LLAMA_NAMES | {"mlp.up": ["mlp.fc1"], "mlp.down": ["mlp.fc2"]},
    constants=dict.fromkeys(NANOCHAT_NORMS, 1.0),
    folds=dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj"), swapped_halves),
)

# ---------------------------------------------------------------- the table

GEMMA4_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
}

RECORDS = [
    Family(
        "llama",
        ["LlamaForCausalLM"],
        lambda fields: shared_fields(fields) | biases(fields),
        gguf_architecture="llama",
        gguf_layout=PAIRED_GGUF_LAYOUT,
        gguf_experts=True,  # Mixtral
    ),
    # Mistral's GGUF files have the architecture llama.
    Family(
        "mistral",
        ["MistralForCausalLM", "Mistral3ForConditionalGeneration"],
        mistral_fields,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        multimodal="mistral3",
        layout=MISTRAL_LAYOUT,
    ),
    # Mixtral's GGUF files have the architecture llama.
    Family(
        "mixtral",
        ["MixtralForCausalLM"],
        mixtral_fields,
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
        },
        layout=MIXTRAL_LAYOUT,
    ),
    Family(
        "ministral3",
        ["Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"],
        ministral3_fields,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
        },
        multimodal="mistral3",
        layout=MISTRAL_LAYOUT,
        gguf_architecture="mistral3",  # multimodal models with a text_config of Mistral have it, too
        gguf_layout=PAIRED_GGUF_LAYOUT,
    ),
    Family(
        "qwen2",
        ["Qwen2ForCausalLM"],
        lambda fields: qwen_fields(fields) | {"qkv_bias": True},
        defaults={"num_key_value_heads": 32},
        gguf_architecture="qwen2",
    ),
    Family(
        "qwen3",
        ["Qwen3ForCausalLM", "Qwen3Model"],
        lambda fields: qwen_fields(fields) | attention_bias(fields) | {"qk_norm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        layout=QWEN3_LAYOUT,
        gguf_architecture="qwen3",
    ),
    Family(
        "qwen3_vl_text",
        ["Qwen3VLForConditionalGeneration"],
        qwen3_vl_fields,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "rope_theta": 5e5,
        },
        multimodal="qwen3_vl",
        layout=MISTRAL_LAYOUT,
        gguf_architecture="qwen3vl",
    ),
    Family(
        "qwen3_5_text",
        ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        qwen35_fields,
        defaults={"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768},
        multimodal="qwen3_5",
        layout=QWEN35_LAYOUT,
        gguf_architecture="qwen35",
        gguf_layout=QWEN35_GGUF_LAYOUT,
        partial_rotary=True,
        gguf_fields=lambda config: QWEN35,
    ),
    Family(
        "qwen3_moe",
        ["Qwen3MoeForCausalLM"],
        qwen3_moe_fields,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768},
        layout=QWEN3_MOE_LAYOUT,
        gguf_architecture="qwen3moe",
        gguf_experts=True,
    ),
    Family(
        "qwen3_vl_moe_text",
        ["Qwen3VLMoeForConditionalGeneration"],
        qwen3_vl_moe_fields,
        defaults={"num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 5e5},
        multimodal="qwen3_vl_moe",
        layout=replace(QWEN3_MOE_LAYOUT, renames=MULTIMODAL_RENAMES),
        gguf_architecture="qwen3vlmoe",
        gguf_experts=True,
    ),
    Family(
        "qwen3_5_moe_text",
        ["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        qwen35_moe_fields,
        defaults={
            "intermediate_size": 512,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
        },
        multimodal="qwen3_5_moe",
        layout=QWEN35_LAYOUT,
        gguf_architecture="qwen35moe",
        gguf_layout=QWEN35_GGUF_LAYOUT,
        partial_rotary=True,
        gguf_experts=True,
        gguf_fields=lambda config: QWEN35,
    ),
    Family(
        "lfm2",
        ["Lfm2ForCausalLM", "Lfm2VlForConditionalGeneration"],
        lfm2_fields,
        defaults={
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128000,
        },
        multimodal="lfm2_vl",
        layout=LFM2_LAYOUT,
        gguf_architecture="lfm2",
        gguf_layout=LFM2_GGUF_LAYOUT,
    ),
    Family(
        "lfm2_moe",
        ["Lfm2MoeForCausalLM"],
        lfm2_moe_fields,
        defaults={
            "intermediate_size": 7168,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128000,
        },
        layout=LFM2_LAYOUT,
        gguf_architecture="lfm2moe",
        gguf_layout=LFM2_GGUF_LAYOUT,
        gguf_experts=True,
        gguf_scoring="sigmoid",
    ),
    Family(
        "smollm3",
        ["SmolLM3ForCausalLM"],
        smollm3_fields,
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
        gguf_architecture="smollm3",
        gguf_layout=PAIRED_GGUF_LAYOUT,
        # llama.cpp's program has this as a constant.
        gguf_fields=lambda config: {"layers_without_rope": tuple(range(3, config.n_layer, 4))},
    ),
    Family(
        "gemma3_text",
        ["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        gemma3_fields,
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
        multimodal="gemma3",
        layout=GEMMA3_LAYOUT,
        gguf_architecture="gemma3",
        gguf_fields=gemma3_gguf_fields,
    ),
    Family(
        "gemma4_text",
        ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
        gemma4_fields,
        defaults=GEMMA4_DEFAULTS | {"hidden_size_per_layer_input": 256},
        multimodal="gemma4",
        layout=GEMMA4_LAYOUT,
        gguf_architecture="gemma4",
        gguf_layout=GEMMA4_GGUF_LAYOUT,
        keys_as_values=True,
        gguf_experts=True,
        gguf_fields=gemma4_gguf_fields,
    ),
    # Its GGUF files have the architecture gemma4.
    Family(
        "gemma4_unified_text",
        ["Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"],
        gemma4_fields,
        defaults=GEMMA4_DEFAULTS | {"sliding_window": 1024, "max_position_embeddings": 262144},
        multimodal="gemma4_unified",
        layout=GEMMA4_LAYOUT,
    ),
    Family(
        "phi3",
        ["Phi3ForCausalLM"],
        phi3_fields,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        layout=PHI3_LAYOUT,
        gguf_architecture="phi3",
        gguf_layout=PHI3_GGUF_LAYOUT,
        partial_rotary=True,
    ),
    Family(
        "granite",
        ["GraniteForCausalLM"],
        granite_fields,
        gguf_architecture="granite",
        gguf_layout=PAIRED_GGUF_LAYOUT,
    ),
    Family(
        "olmo2",
        ["Olmo2ForCausalLM"],
        lambda fields: shared_fields(fields) | attention_bias(fields) | OLMO2,
        defaults={"rms_norm_eps": 1e-5},
        layout=POST_NORM_LAYOUT,
        gguf_architecture="olmo2",
        gguf_fields=olmo2_gguf_fields,
    ),
    Family(
        "olmo3",
        ["Olmo3ForCausalLM"],
        olmo3_fields,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        layout=POST_NORM_LAYOUT,
    ),
    Family(
        "nanochat",
        ["NanoChatForCausalLM"],
        nanochat_fields,
        defaults={"intermediate_size": 8192, "max_position_embeddings": 2048},
        layout=NANOCHAT_LAYOUT,
        padded_vocabulary=True,
    ),
    Family(
        "bloom",
        ["BloomForCausalLM", "BloomModel"],  # published configs name the class without the tied head
        bloom_fields,
        layout=BLOOM_LAYOUT,
        padded_vocabulary=True,
    ),
]
FAMILIES = {family.model_type: family for family in RECORDS}
GGUF_FAMILIES = {family.gguf_architecture: family for family in RECORDS if family.gguf_architecture}
