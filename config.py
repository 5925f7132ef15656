"""The hyperparameters of a model: Config, and its parts RopeScaling, DeltaNet, ShortConv and Experts;
the checks of their values.

Knows nothing of tensors. The letters are as in model.py: H query heads, K key/value heads, E head
width, D model width, F hidden width, V vocabulary. A row is one sequence of tokens, such as a
prompt and its answer.
"""

import math
import types
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, get_args, get_origin


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are scaled for contexts beyond the training context. Unused fields
    keep their default.

    kind: "linear" (divide all frequencies by factor), "llama3" (divide only the low frequencies),
    "yarn" (a linear ramp between frequencies that are kept and those that are divided), "factors"
    (divide each by a factor of its own), "longrope" (the same, with other factors for rows that are
    longer than the training context: Config.for_rows_of).
    """

    kind: Literal["linear", "llama3", "yarn", "factors", "longrope"]
    factor: float = 1.0
    original_max_seq_length: int = 0  # llama3, yarn, longrope: the training context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ends of the ramp are rounded to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it
    # factors, longrope: a divisor for each frequency. MAX_NUMBER makes a frequency 0: these dimensions are not rotated
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()  # longrope: the factors for rows longer than original_max_seq_length

    def __post_init__(self):
        check_fields(self)
        if self.kind in ("llama3", "yarn", "longrope"):
            check_positive_int("original_max_seq_length", self.original_max_seq_length)
        for i, factor in enumerate(self.factors + self.long_factors):
            check_positive(f"RoPE factor {i}", factor)

        if self.kind == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ValueError(f"low_freq_factor and high_freq_factor are both {self.low_freq_factor}")
        if self.kind == "longrope" and len(self.long_factors) != len(self.factors):
            raise ValueError(f"longrope has {len(self.factors)} factors, but {len(self.long_factors)} long_factors")


class Rope(NamedTuple):
    """The RoPE of one layer."""

    base: float  # math.inf: queries and keys are not rotated
    scaling: RopeScaling | None
    head_dim: int  # E


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a model's gated delta nets (mixers/recurrent.py), which replace attention in some of
    its layers.

    Value head h reads with the queries and keys of key head h % n_key_head.
    """

    layers: tuple[int, ...]  # the layers that have one
    n_key_head: int  # the heads of queries and keys
    n_value_head: int  # the heads of values, each of which has a matrix as its state
    key_dim: int  # the width of a query or key
    value_dim: int
    # The convolution over queries, keys and values sees this many positions, the token's own included.
    conv_width: int = 4

    def __post_init__(self):
        check_fields(self)
        if self.n_value_head % self.n_key_head:
            raise ValueError(f"n_value_head {self.n_value_head} is not a multiple of n_key_head {self.n_key_head}")

    def of_rank(self, shard) -> "DeltaNet":
        """The sizes of one rank's part (shard: a tp.Shard)."""
        n = len(shard.own(self.n_key_head))
        return replace(self, n_key_head=n, n_value_head=n * (self.n_value_head // self.n_key_head))

    @property
    def keys_width(self) -> int:
        """The width of all keys of a token together, and of all queries."""
        return self.n_key_head * self.key_dim

    @property
    def values_width(self) -> int:
        """The width of all values of a token together."""
        return self.n_value_head * self.value_dim

    @property
    def conv_channels(self) -> int:
        """The width of queries, keys and values together, over which the convolution goes."""
        return 2 * self.keys_width + self.values_width

    @property
    def matrix_elements(self) -> int:
        """The numbers in the matrices of all value heads."""
        return self.n_value_head * self.key_dim * self.value_dim


@dataclass(frozen=True)
class ShortConv:
    """The sizes of a model's short convolutions (mixers/recurrent.py), which replace attention in some of
    its layers."""

    layers: tuple[int, ...]  # the layers that have one
    conv_channels: int  # D, or a rank's part of it
    conv_width: int = 3  # it sees this many positions, the token's own included
    bias: bool = False  # on the convolution, and on the matrices before and after it

    def __post_init__(self):
        check_fields(self)
        if self.conv_width == 1:
            raise ValueError("conv_width 1 is too small: the convolution would see no earlier token")

    def of_rank(self, shard) -> "ShortConv":
        """The sizes of one rank's part (shard: a tp.Shard)."""
        return replace(self, conv_channels=len(shard.own(self.conv_channels)))


@dataclass(frozen=True)
class Experts:
    """The sizes of a model's sparse layers (mixers/experts.py): each has X small MLPs, the experts,
    instead of one large MLP, and each token uses a few of them.

    The MTP layer is sparse, too.
    """

    layers: tuple[int, ...]  # the sparse layers; the others have an MLP
    n_expert: int  # X
    n_active: int  # how many experts a token uses
    hidden_dim: int  # the hidden width of an expert
    normalized: bool = True  # a token's weights of its experts are divided by their sum
    # Qwen3.5: the hidden width of one more expert, which all tokens use, with a gate; 0: there is none
    shared_dim: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # the router's scores; LFM2-MoE: the sigmoids of its logits
    choice_bias: bool = False  # LFM2-MoE: a bias on the scores, which only decides which experts are chosen
    scale: float = 1.0  # LFM2-MoE: the weights of the experts are multiplied by it
    expert_scales: bool = False  # Gemma 4: the weight of each expert is multiplied by a number of its own
    # Gemma 4: the layers have an MLP, too. Experts, router, and the outputs of experts and MLP have norms of their own
    beside_mlp: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.n_active > self.n_expert:
            raise ValueError(f"a token cannot use {self.n_active} of {self.n_expert} experts")
        if self.choice_bias and self.scoring != "sigmoid":
            raise ValueError("choice_bias needs scoring 'sigmoid'")
        if self.beside_mlp and self.shared_dim:
            raise ValueError(f"experts beside an MLP have no shared expert, not one of width {self.shared_dim}")

    def of_rank(self, shard) -> "Experts":
        """The sizes of one rank's part (shard: a tp.Shard)."""
        hidden_dim = len(shard.own_hidden("experts", self.hidden_dim))
        return replace(self, hidden_dim=hidden_dim, shared_dim=len(shard.own_hidden("experts.shared", self.shared_dim)))


@dataclass(frozen=True)
class Config:
    """The hyperparameters of a model. The switches below the sizes tell the families apart."""

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
    value_norm: bool = False  # Gemma 4: RMSNorm on every value head; families without weights for it have ones
    attention_gate: bool = False  # Qwen3.5: the output of attention is multiplied by the sigmoid of a gate
    delta_net: DeltaNet | None = None  # Qwen3.5: some layers have a gated delta net instead of attention
    short_conv: ShortConv | None = None  # LFM2: some layers have a short convolution instead of attention
    experts: Experts | None = None  # Mixtral, Qwen3-MoE: some layers have experts instead of an MLP
    mtp: bool = False  # Qwen3.5: there is an MTP layer, which drafts tokens (mixers/mtp.py)

    sliding_window: int | None = None  # Mistral: a token attends to this many positions, its own included
    sliding_layers: tuple[int, ...] | None = None  # the layers with a sliding window; None means all
    sliding_rope_base: float | None = None  # Gemma 3: layers with a sliding window have this base, and no rope_scaling
    # Gemma 4: the layers without a sliding window have other heads. None: no layer differs
    full_head_dim: int | None = None  # their E
    full_kv_head: int | None = None  # their K
    # Their values are the products of which the norm and RoPE make keys: they have no matrix of values
    full_keys_as_values: bool = False
    # Gemma 4 E2B and E4B: this many of the last layers have queries only. They read the KV cache of the last layer
    # before them that has the same kind of window
    shared_kv_layers: int = 0
    shared_kv_hidden_dim: int | None = None  # the F of these layers, if it differs
    per_layer_dim: int | None = None  # Gemma 4 E2B and E4B: the width of an input that each layer has of its own
    layers_without_rope: tuple[int, ...] = ()  # SmolLM3: their queries and keys are not rotated
    rotary_dim: int | None = None  # Phi-4-mini: how many dimensions of a head are rotated; None means all
    query_scale_beta: float | None = None  # Ministral 3: queries grow with their position (positions.py)

    # Where a block's norms are: before attention and MLP, after (OLMo 2), both (Gemma 3)
    norm_placement: Literal["before", "after", "both"] = "before"
    # Gemma: the norms' weights are float32 in a model of any dtype. A family needs it if its
    # authors compute the weight of a norm, such as 1 + w, in float32.
    float32_norms: bool = False
    embedding_scale: float = 1.0  # Gemma, Granite: the embeddings are multiplied by it
    attention_scale: float | None = None  # Granite: factor of queries times keys; None means head_dim ** -0.5
    residual_scale: float = 1.0  # Granite: factor of the outputs of attention and MLP
    layer_scale: bool = False  # Gemma 4: each block multiplies its result by a number of its own
    logits_scale: float = 1.0  # Granite: factor of the logits
    logits_softcap: float | None = None  # Gemma 4, nanochat: c tanh(logits / c) instead of the logits

    # geglu: swiglu with tanh-GELU (Gemma). Without a gate: gelu, tanh-GELU (BLOOM); relu2, the square of
    # ReLU (nanochat)
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    # The kind of all norms except qk_norm; layer: LayerNorm with a bias (BLOOM)
    norm: Literal["rms", "layer"] = "rms"
    alibi: bool = False  # BLOOM: ALiBi's linear bias on the attention scores instead of RoPE
    embedding_norm: bool = False  # BLOOM: the embeddings are normalized
    post_norm_residual: bool = False  # an option of BLOOM: residuals start from the normalized input
    n_token: int | None = None  # if the vocabulary is padded: how many ids are real; the others are never sampled

    def __post_init__(self):
        check_fields(self)
        self._check_rope()

        if self.n_token is not None and self.n_token > self.vocab_size:
            raise ValueError(f"n_token {self.n_token} is more than vocab_size {self.vocab_size}")
        for name in ("n_kv_head", "full_kv_head"):
            heads = getattr(self, name)
            if heads is not None and self.n_head % heads:
                raise ValueError(f"n_head {self.n_head} is not a multiple of {name} {heads}")
        layers_with = {"sliding_layers": self.sliding_layers, "layers_without_rope": self.layers_without_rope}
        used = [name for name in RECURRENT_PARTS if getattr(self, name) is not None]
        if len(used) > 1:
            raise ValueError(f"{' and '.join(used)} are both given; a model has one kind of recurrent token mixer")
        if self.recurrent is not None:
            layers_with[f"{type(self.recurrent).__name__} layers"] = self.recurrent.layers
        if self.experts is not None:
            layers_with["Experts layers"] = self.experts.layers
            if self.mlp not in ("swiglu", "geglu") or self.mlp_bias:
                raise ValueError("experts need mlp 'swiglu' or 'geglu' without mlp_bias")
        if self.shared_kv_layers and self.recurrent is not None:
            raise ValueError("shared_kv_layers needs attention in all layers")
        for layer in range(self.n_layer - self.shared_kv_layers, self.n_layer):
            if self.kv_layer(layer) < 0:
                raise ValueError(f"shared_kv_layers: layer {layer} has no earlier layer of its kind")
        for name, layers in layers_with.items():
            if not set(layers or ()) <= set(range(self.n_layer)):
                raise ValueError(f"{name} {layers!r} are not all layers of 0 to {self.n_layer - 1}")

    def _check_rope(self):
        """ValueError if the fields of positions do not fit each other."""
        full_head_dim = self.full_head_dim or self.head_dim
        rotated = self.rotary_dim or full_head_dim
        for name, width in (("head_dim", self.head_dim), ("full_head_dim", full_head_dim)):
            if width % 2 and not self.alibi:
                raise ValueError(f"{name} {width} is odd: rotary embedding turns pairs of dimensions")
        if self.full_head_dim is not None and (self.rotary_dim is not None or self.sliding_rope_base is None):
            raise ValueError("full_head_dim needs sliding_rope_base, and no rotary_dim")
        if rotated > full_head_dim or (rotated % 2 and not self.alibi):
            raise ValueError(f"rotary_dim {rotated} is odd, or more than head_dim {full_head_dim}")

        scaling = self.rope_scaling
        if self.query_scale_beta is not None and not (scaling and scaling.original_max_seq_length):
            raise ValueError("query_scale_beta needs a RoPE scaling with the original context, such as yarn")
        if scaling is None:
            return
        if scaling.kind == "yarn" and self.rope_base <= 1:
            raise ValueError(f"rope_base {self.rope_base} is too small: yarn divides by its logarithm")
        if scaling.kind in ("factors", "longrope") and len(scaling.factors) != rotated // 2:
            raise ValueError(f"RoPE has {len(scaling.factors)} factors for {rotated} dimensions")

    def heads(self, layer: int) -> tuple[int, int, int]:
        """H, K, E of one layer: the numbers of query heads and of key/value heads, and their width."""
        K = self.n_kv_head
        E = self.head_dim
        if self.window(layer) is None:
            K = self.full_kv_head or K
            E = self.full_head_dim or E
        return self.n_head, K, E

    def kv_layer(self, layer: int) -> int:
        """The layer whose KV cache one layer reads: itself, or an earlier one (shared_kv_layers); -1 if there
        is none."""
        first = self.n_layer - self.shared_kv_layers
        if layer < first or layer == self.n_layer:  # the MTP layer is number n_layer
            return layer
        slides = self.window(layer) is not None
        return next((i for i in reversed(range(first)) if (self.window(i) is not None) == slides), -1)

    def mlp_width(self, layer: int) -> int:
        """F of one layer."""
        shares = self.kv_layer(layer) != layer
        return self.shared_kv_hidden_dim if shares and self.shared_kv_hidden_dim else self.hidden_dim

    @property
    def recurrent(self) -> DeltaNet | ShortConv | None:
        """The sizes of the recurrent token mixers; None if all layers have attention."""
        parts = [getattr(self, name) for name in RECURRENT_PARTS]
        return next((part for part in parts if part is not None), None)

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention, and so keys and values."""
        return self.recurrent is None or layer not in self.recurrent.layers

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts. The MTP layer is number n_layer."""
        return self.experts is not None and (layer in self.experts.layers or layer == self.n_layer)

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer; None if it attends to all positions."""
        slides = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if slides else None

    def rope(self, layer: int) -> Rope:
        """The RoPE of one layer."""
        E = self.heads(layer)[2]
        if layer in self.layers_without_rope:
            return Rope(math.inf, None, E)
        if self.sliding_rope_base is not None and self.window(layer) is not None:
            return Rope(self.sliding_rope_base, None, E)
        return Rope(self.rope_base, self.rope_scaling, E)

    def different_ropes(self) -> list[Rope]:
        """What `rope` returns for all layers, each value once: a table of cos and sin is made for
        each."""
        return list(dict.fromkeys(map(self.rope, range(self.n_layer))))

    @property
    def is_longrope(self) -> bool:
        return self.rope_scaling is not None and self.rope_scaling.kind == "longrope"

    @property
    def short_context(self) -> int:
        """Rows of up to this many positions have longrope's short factors. Without longrope, the
        whole context."""
        if not self.is_longrope:
            return self.max_seq_length
        return min(self.rope_scaling.original_max_seq_length, self.max_seq_length)

    def has_long_factors(self, max_seq_length: int) -> bool:
        """Whether rows of this many positions have longrope's long factors."""
        return self.is_longrope and max_seq_length > self.short_context

    def for_rows_of(self, max_seq_length: int) -> "Config":
        """This config, for rows of this many positions: with longrope, they decide between the short
        and the long factors."""
        if not self.has_long_factors(max_seq_length):
            return self
        return replace(self, rope_scaling=replace(self.rope_scaling, factors=self.rope_scaling.long_factors))


# The fields of Config that describe a kind of layer
PARTS = {"delta_net": DeltaNet, "short_conv": ShortConv, "experts": Experts}
RECURRENT_PARTS = ("delta_net", "short_conv")  # the recurrent token mixers; a model has one kind of them

MAX_LAYERS = 10_000
MAX_INT = 100_000_000
MAX_NUMBER = 1e30


def check_positive(name: str, value):
    """ValueError if a field's value is not a number above 0, or absurdly large."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_NUMBER:
        raise ValueError(f"{name} must be a positive number of at most {MAX_NUMBER:g}, not {value!r}")


def check_positive_int(name: str, value):
    """ValueError if a field's value is not an integer above 0, or absurdly large."""
    limit = MAX_LAYERS if name == "n_layer" else MAX_INT
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 0 < value <= limit:
        raise ValueError(f"{name} must be a positive integer of at most {limit:g}, not {value!r}")


def check_fields(part):
    """ValueError if a field of a Config or of a part of it does not have the type that it is declared
    with, or is a number that is not positive. (A default of 0 may stay.)"""
    for field in fields(part):
        value = getattr(part, field.name)
        if value == field.default and type(value) is type(field.default):
            continue
        kinds = get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            raise ValueError(f"{field.name} must be one of {', '.join(get_args(field.type))}, not {value!r}")
        if bool in kinds and not isinstance(value, bool):
            raise ValueError(f"{field.name} must be true or false, not {value!r}")
        if int in kinds:
            check_positive_int(field.name, value)
        if float in kinds:
            check_positive(field.name, value)
        if isinstance(value, dict):  # from a config.json
            raise ValueError(f"{field.name} must be a {kinds[0].__name__}, not a dict; is it missing in PARTS?")
