"""The hyperparameters of a model: Config, and RopeScaling, which is a part of it; the checks of their values.

Knows nothing of tensors. H, K, E, D, F and V are explained in model.py.
"""

import math
import types
from dataclasses import dataclass, fields, replace
from typing import get_args


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are scaled for contexts beyond the training context. Unused fields keep their default.

    kind: "linear" (divide all frequencies by factor), "llama3" (divide only the low frequencies), "yarn" (a linear ramp
    between frequencies that are kept and those that are divided), "factors" (divide each by a factor of its own),
    "longrope" (the same, with other factors for rows that are longer than the training context: Config.for_rows_of).
    """

    kind: str
    factor: float = 1.0
    original_max_seq_length: int = 0  # llama3, yarn, longrope: the training context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ends of the ramp are rounded to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it
    factors: tuple[float, ...] = ()  # factors, longrope: a divisor for each frequency
    long_factors: tuple[float, ...] = ()  # longrope: those of rows longer than original_max_seq_length

    def __post_init__(self):
        if self.kind not in (kinds := ("linear", "llama3", "yarn", "factors", "longrope")):
            raise ValueError(f"unknown RoPE scaling {self.kind!r}; known: {', '.join(kinds)}")
        numbers = ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"]
        if self.kind in ("llama3", "yarn", "longrope"):
            check_positive({"original_max_seq_length": self.original_max_seq_length}, (int,))
        factors = dict(enumerate(self.factors + self.long_factors))
        check_positive({name: getattr(self, name) for name in numbers} | factors)
        if self.kind == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ValueError(f"low_freq_factor and high_freq_factor are both {self.low_freq_factor}")
        if self.kind == "longrope" and len(self.long_factors) != len(self.factors):
            raise ValueError(f"longrope has {len(self.factors)} factors, but {len(self.long_factors)} long_factors")


@dataclass(frozen=True)
class Config:
    """The hyperparameters of a model; the switches below the sizes tell the families apart."""

    n_layer: int
    n_head: int  # H
    n_kv_head: int  # K: K = H is multi-head attention, K = 1 multi-query, anything between grouped-query
    head_dim: int  # E; not always D / H
    dim: int  # D
    hidden_dim: int  # F
    vocab_size: int  # V
    max_seq_length: int  # the longest context that the model supports
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False  # the output head is the embedding table
    qkv_bias: bool = False  # Qwen2
    out_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm on every query and key head
    qk_norm_whole: bool = False  # OLMo 2: qk_norm is over all query heads together, and over all key heads
    sliding_window: int | None = None  # Mistral: a token attends to this many positions, its own included
    sliding_layers: tuple[int, ...] | None = None  # the layers with a sliding window; None means all
    sliding_rope_base: float | None = None  # Gemma 3: layers with a sliding window have this base, and no rope_scaling
    layers_without_rope: tuple[int, ...] = ()  # SmolLM3: their queries and keys are not rotated
    rotary_dim: int | None = None  # Phi-4-mini: how many dimensions of a head are rotated; None means all
    query_scale_beta: float | None = None  # Ministral 3: queries grow with their position (positions.py)
    norm_placement: str = "before"  # of a block's norms: "before" attention and MLP, "after" (OLMo 2), "both" (Gemma 3)
    float32_norms: bool = False  # Gemma: the norms' weights are float32 in a model of any dtype
    embedding_scale: float = 1.0  # the embeddings are multiplied by it (Gemma; this and the next three: Granite)
    attention_scale: float | None = None  # so are the products of queries and keys; None means head_dim ** -0.5
    residual_scale: float = 1.0  # and the outputs of attention and MLP
    logits_scale: float = 1.0
    mlp: str = "swiglu"  # or "geglu": the same with tanh-GELU (Gemma); or "gelu": tanh-GELU without a gate (BLOOM)
    norm: str = "rms"  # or "layer": LayerNorm, with weight and bias (this and the next three: BLOOM)
    alibi: bool = False  # ALiBi's linear bias on the attention scores instead of RoPE
    embedding_norm: bool = False
    post_norm_residual: bool = False  # residuals start from the normalized input
    n_token: int | None = None  # if the vocabulary is padded: how many ids are real; the others are never sampled

    def __post_init__(self):
        check_fields(self)
        kinds = {"norm": ("rms", "layer"), "mlp": ("swiglu", "geglu", "gelu")}
        for name, known in (kinds | {"norm_placement": ("before", "after", "both")}).items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.n_token is not None and self.n_token > self.vocab_size:
            raise ValueError(f"n_token {self.n_token} is more than vocab_size {self.vocab_size}")
        for name in ("sliding_layers", "layers_without_rope"):
            if not set(layers := getattr(self, name) or ()) <= set(range(self.n_layer)):
                raise ValueError(f"{name} {layers!r} are not all layers of 0 to {self.n_layer - 1}")
        scaling, rotated = self.rope_scaling, self.rotary_dim or self.head_dim
        if scaling is not None and scaling.kind == "yarn" and self.rope_base <= 1:
            raise ValueError(f"rope_base {self.rope_base} is too small: yarn divides by its logarithm")
        if scaling is not None and scaling.kind in ("factors", "longrope") and len(scaling.factors) != rotated // 2:
            raise ValueError(f"RoPE has {len(scaling.factors)} factors for {rotated} dimensions")
        if self.query_scale_beta is not None and not (scaling and scaling.original_max_seq_length):
            raise ValueError("query_scale_beta needs a RoPE scaling with the original context, such as yarn")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.head_dim % 2 and not self.alibi:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding turns pairs of dimensions")
        if rotated > self.head_dim or (rotated % 2 and not self.alibi):
            raise ValueError(f"rotary_dim {rotated} is odd, or more than head_dim {self.head_dim}")

    @property
    def heads(self) -> tuple[int, int, int]:
        """H, K, E: the numbers of query heads and of key/value heads, and their width."""
        return self.n_head, self.n_kv_head, self.head_dim

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer; None if it attends to all positions."""
        slides = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if slides else None

    def rope(self, layer: int) -> tuple[float, RopeScaling | None]:
        """The base and the scaling of one layer's RoPE."""
        if layer in self.layers_without_rope:
            return math.inf, None
        if self.sliding_rope_base is not None and self.window(layer) is not None:
            return self.sliding_rope_base, None
        return self.rope_base, self.rope_scaling

    def different_ropes(self) -> list[tuple[float, RopeScaling | None]]:
        """What `rope` returns for all layers, each value once: layers in which it is equal share a table of cos and
        sin."""
        return list(dict.fromkeys(map(self.rope, range(self.n_layer))))

    @property
    def is_longrope(self) -> bool:
        return self.rope_scaling is not None and self.rope_scaling.kind == "longrope"

    @property
    def short_context(self) -> int:
        """The positions of the longest rows that have longrope's short factors; without longrope, the whole context."""
        if not self.is_longrope:
            return self.max_seq_length
        return min(self.rope_scaling.original_max_seq_length, self.max_seq_length)

    def has_long_factors(self, max_seq_length: int) -> bool:
        """Whether rows of this many positions have longrope's long factors."""
        return self.is_longrope and max_seq_length > self.short_context

    def for_rows_of(self, max_seq_length: int) -> "Config":
        """This config. For rows that have longrope's long factors, these take the place of the short ones."""
        if not self.has_long_factors(max_seq_length):
            return self
        return replace(self, rope_scaling=replace(self.rope_scaling, factors=self.rope_scaling.long_factors))


def check_positive(numbers: dict, kinds: tuple = (int, float)):
    """ValueError if a value (name -> value) is not a number above 0 and not absurdly large."""
    for name, value in numbers.items():
        limit = 1e4 if name == "n_layer" else 1e8 if kinds == (int,) else 1e30
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value <= limit:
            kind = "integer" if kinds == (int,) else "number"
            raise ValueError(f"{name} must be a positive {kind} of at most {limit:g}, not {value!r}")


def check_fields(config: Config):
    """ValueError if a field does not have the type that it is declared with, or is a number that is not positive."""
    for field in fields(config):
        is_union = isinstance(field.type, types.UnionType)
        kinds, value = get_args(field.type) if is_union else (field.type,), getattr(config, field.name)
        if value is None and type(None) in kinds:
            continue
        if bool in kinds and not isinstance(value, bool):
            raise ValueError(f"{field.name} must be true or false, not {value!r}")
        if int in kinds:
            check_positive({field.name: value}, (int,))
        if float in kinds:
            check_positive({field.name: value})
