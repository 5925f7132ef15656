"""A decoder-only transformer in one file.

Read down: Config, Transformer, Block, Attention, KVCache, MLP, layers, inputs. RoPE and ALiBi are in positions.py.
Knows nothing of text, sampling, files or devices: kernels.py defines the operations and dispatches them to the kernels
of the device.

Shapes, here and in every file:
  B batch rows   S new tokens in this call   R cache rows   T cache slots a row   D model width   V vocabulary
  H query heads  K key/value heads           E head width    F hidden width

Sources: Llama (arXiv:2302.13971), grouped-query attention (arXiv:2305.13245), sliding window (Mistral,
arXiv:2310.06825), QK norm (Qwen3, arXiv:2505.09388), BLOOM (arXiv:2211.05100).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cli import check_positive
from kernels import Backend, attention, layer_norm, linear, rms_norm
from positions import RopeScaling, alibi_slopes, rope_frequencies, rope_table, rotate

# ---------------------------------------------------------------- Config


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
    sliding_window: int | None = None  # Mistral: a token attends to this many positions, its own included
    sliding_layers: tuple[int, ...] | None = None  # the layers with a sliding window; None means all
    layers_without_rope: tuple[int, ...] = ()  # SmolLM3: their queries and keys are not rotated
    norm: str = "rms"  # or "layer": LayerNorm, with weight and bias (this and the fields below: BLOOM)
    mlp: str = "swiglu"  # or "gelu": ungated, tanh-GELU
    alibi: bool = False  # ALiBi's linear bias on the attention scores instead of RoPE
    embedding_norm: bool = False
    post_norm_residual: bool = False  # residuals start from the normalized input
    n_token: int | None = None  # if the vocabulary is padded: how many ids are real; the others are never sampled

    def __post_init__(self):
        sizes = ("n_layer", "n_head", "n_kv_head", "head_dim", "dim", "hidden_dim", "vocab_size", "max_seq_length")
        optional = {"sliding_window": self.sliding_window} if self.sliding_window is not None else {}
        optional |= {"n_token": self.n_token} if self.n_token is not None else {}
        check_positive({name: getattr(self, name) for name in sizes} | optional, (int,))
        check_positive({"norm_eps": self.norm_eps, "rope_base": self.rope_base})
        switches = ("tied_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm")
        for name in (*switches, "alibi", "embedding_norm", "post_norm_residual"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for name, known in (("norm", ("rms", "layer")), ("mlp", ("swiglu", "gelu"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.n_token is not None and self.n_token > self.vocab_size:
            raise ValueError(f"n_token {self.n_token} is more than vocab_size {self.vocab_size}")
        for name in ("sliding_layers", "layers_without_rope"):
            if not set(layers := getattr(self, name) or ()) <= set(range(self.n_layer)):
                raise ValueError(f"{name} {layers!r} are not all layers of 0 to {self.n_layer - 1}")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise ValueError(f"RoPE has {len(scaling.factors)} factors for head_dim {self.head_dim}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.head_dim % 2 and not self.alibi:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding turns pairs of dimensions")

    @property
    def heads(self) -> tuple[int, int, int]:
        """H, K, E: the numbers of query heads and of key/value heads, and their width."""
        return self.n_head, self.n_kv_head, self.head_dim

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer; None if it attends to all positions."""
        slides = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if slides else None

    def rope(self, layer: int) -> tuple[float, RopeScaling | None]:
        """The base and the scaling of one layer's RoPE. Layers in which they are equal share a table of cos and sin."""
        return (math.inf, None) if layer in (self.layers_without_rope or ()) else (self.rope_base, self.rope_scaling)


# ---------------------------------------------------------------- Transformer

SCRATCH_SLOTS = 8  # extra slots at the end of each cache row: see setup_caches


class Transformer(nn.Module):
    """Tokens at positions in, logits out. Build it on the meta device, fill it by assignment, then set up the caches.

    Rows are independent: each token has its position in its own row, so rows may have different lengths
    (ragged prompts, speculation, continuous batching). Padding is on the right and has position -1.

    shard: a tp.Shard, for one rank's part of a split model. own_config has the sizes of this part, config of the whole.
    """

    def __init__(self, config: Config, shard=None):
        super().__init__()
        self.config, self.shard = config, shard
        self.own_config = own = config if shard is None else shard.config(config)
        self.embedding = Embedding(own.vocab_size, own.dim)
        self.embedding_norm = make_norm(own) if own.embedding_norm else None
        self.different_ropes = list(dict.fromkeys(own.rope(layer) for layer in range(own.n_layer)))
        self.blocks = nn.ModuleList(
            Block(own, layer, self.different_ropes.index(own.rope(layer)), shard) for layer in range(own.n_layer)
        )
        self.norm = make_norm(own)
        self.output = None if own.tied_embeddings else Linear(own.dim, own.vocab_size, bias=False)
        self.backend = Backend()

    def use(self, backend: Backend):
        """Run with the kernels that `install` of cpu/install.py or kernels_triton.py has installed in this model."""
        self.backend = backend

    def setup_caches(self, max_batch_size: int, max_seq_length: int):
        """Allocate the KV caches for this many rows and positions, on the weights' device and in their dtype.

        T is max_seq_length + 8. The last slot is scratch: padding (position -1) is written there, and no token attends
        to it. The other seven keep T a multiple of 8, for vector code, if max_seq_length is one.
        """
        weight = self.norm.weight  # never quantized, so its dtype is that of the activations
        T = max_seq_length + SCRATCH_SLOTS
        # The position tables are not made in __init__, where they would be meta tensors that no checkpoint fills.
        cos_sin, slopes = (None, None), None
        if self.config.alibi:
            heads = slice(None) if self.shard is None else list(self.shard.own(self.config.n_head))
            slopes = alibi_slopes(self.config.n_head).to(weight.device)[heads]  # one tensor for all layers
        else:  # a table, because a compiled cosine differs from the eager one in the last bit
            slots = torch.arange(T, device=weight.device)[None]  # (1,T)
            freqs = [rope_frequencies(self.config.head_dim, *rope).to(weight.device) for rope in self.different_ropes]
            tables = [rope_table(f, scaling, slots) for f, (_, scaling) in zip(freqs, self.different_ropes)]
            cos_sin = map(torch.cat, zip(*tables))
        for name, table in zip(("rope_cos", "rope_sin"), cos_sin):  # (P,T,1,E) float32, for P different tables
            self.register_buffer(name, table, persistent=False)
        nbytes = len(self.blocks) * KVCache.nbytes(self.own_config, max_batch_size * T, weight.dtype)
        zeros = partial(self.backend.zeros(nbytes, weight.device), dtype=weight.dtype)
        for block in self.blocks:
            block.attention.cache.allocate(max_batch_size, T, zeros)
            block.attention.register_buffer("slopes", slopes, persistent=False)

    def share_caches(self, other: "Transformer"):
        """Use the KV caches and the tables of positions of another model of the same sizes."""
        for name in ("rope_cos", "rope_sin"):
            self.register_buffer(name, getattr(other, name), persistent=False)
        for block, source in zip(self.blocks, other.blocks):
            block.attention.cache = source.attention.cache
            block.attention.register_buffer("slopes", source.attention.slopes, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def copy_cache(self, source_row: int, target_row: int, n: int):
        """Copy the keys and values of the first n positions of one cache row to another, in all layers."""
        for block in self.blocks:
            block.attention.cache.copy(source_row, target_row, n)

    def kv_bytes(self, lengths: list[int]) -> int:
        """Bytes of keys and values that a decode step reads. lengths: the number of filled positions of each row."""
        config, positions = self.own_config, self.own_config.n_layer * sum(lengths)
        if config.sliding_window is not None:
            windows = [config.window(layer) for layer in range(config.n_layer)]
            positions = sum(min(length, window or length) for window in windows for length in lengths)
        return KVCache.nbytes(config, positions, self.norm.weight.dtype)

    def forward(self, tokens: Tensor, input_pos: Tensor, rows: Tensor | None = None, all_logits: bool = False):
        """tokens (B,S) int64, input_pos (B,S) int64, rows (B,) int64 or None (rows 0..B-1).

        Within a row positions are contiguous and padding (-1) is on the right. Returns the logits of each row's last
        real token, (B,V), or with all_logits those of every token, (B,S,V); the logits of padding are undefined.
        """
        x = self.hidden(tokens, input_pos, rows)  # (B,S,D)
        if not all_logits:  # a long prompt then never needs an (S,V) tensor
            last = input_pos.argmax(1)  # padding is -1
            x = x[torch.arange(len(x), device=x.device), last]  # (B,D)
        return self.head(x)

    def hidden(self, tokens: Tensor, input_pos: Tensor, rows: Tensor | None = None):
        """The normalized last hidden state of every token, (B,S,D); writes the caches. Arguments as in forward."""
        x = self.embed(tokens).to(self.norm.weight.dtype)  # (B,S,D)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        ropes = self.ropes(input_pos)
        if self.backend.run_blocks is not None and x.shape[1] <= self.backend.max_fused_tokens:
            x = self.backend.run_blocks(self.blocks, x, ropes, input_pos, rows)
        else:
            for block in self.blocks:
                x = block(x, ropes[block.rope_table], input_pos, rows)
        return self.norm(x)

    def ropes(self, input_pos: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """cos and sin of positions (B,S) from each table, as `rotate` takes them: (B,S,1,E) float32. None with ALiBi.
        A block takes those of its own table, ropes[block.rope_table]."""
        if self.config.alibi:
            return [None]
        tables = zip(self.rope_cos.unbind(), self.rope_sin.unbind())
        return [(cos[input_pos], sin[input_pos]) for cos, sin in tables]

    def embed(self, tokens: Tensor):
        """The embeddings (B,S,D) of tokens (B,S). If the model is split, every rank gets those of all tokens."""
        if self.shard is None:
            return self.embedding(tokens)
        return self.shard.embed(self.embedding, self.own_config.vocab_size, tokens)

    def head(self, x: Tensor):
        """Hidden states (...,D) to logits (...,V). If the model is split, every rank gets all V logits."""
        logits = self.embedding.logits(x) if self.output is None else self.output(x)
        return logits if self.shard is None else self.shard.gather(logits, self.config.vocab_size)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int, rope_table: int, shard=None):
        super().__init__()
        self.rope_table = rope_table  # an index of Transformer.ropes
        self.post_norm_residual, self.shard = config.post_norm_residual, shard
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, input_pos: Tensor, rows: Tensor | None):
        h = self.attention_norm(x)
        x = (h if self.post_norm_residual else x) + self.add_ranks(self.attention(h, rope, input_pos, rows))
        h = self.mlp_norm(x)
        return (h if self.post_norm_residual else x) + self.add_ranks(self.mlp(h))

    def add_ranks(self, x: Tensor) -> Tensor:
        """If the model is split, each rank has computed a part of a sum: the sum over the ranks."""
        return x if self.shard is None else self.shard.all_reduce(x)


class Attention(nn.Module):
    """Grouped-query attention, with RoPE or ALiBi, over the layer's own KV cache."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.config, self.cache = config, KVCache(config)
        self.window, self.scale = config.window(layer), config.head_dim**-0.5
        H, K, E = config.heads
        self.qkv = Linear(config.dim, (H + 2 * K) * E, bias=config.qkv_bias)  # weight rows: q, then k, then v
        self.out = Linear(H * E, config.dim, bias=config.out_bias)
        self.q_norm = RMSNorm(E, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(E, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, input_pos: Tensor, rows: Tensor | None):
        B, S, _ = x.shape
        H, K, E = self.config.heads
        qk, v = self.qkv(x).view(B, S, H + 2 * K, E).split([H + K, K], dim=2)  # (B,S,H+K,E), (B,S,K,E)
        if self.q_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, :, :H]), self.k_norm(qk[:, :, H:])], dim=2)
        qk = qk if rope is None else rotate(qk, rope)
        q, k = qk.split([H, K], dim=2)  # (B,S,H,E), (B,S,K,E)

        self.cache.write(k, v, input_pos, rows)
        y = attention(q, self.cache.k, self.cache.v, input_pos, rows, self.slopes, self.window, self.scale)
        return self.out(y.reshape(B, S, H * E))


class KVCache(nn.Module):
    """The keys and values of one layer: R rows of T slots, one slot for each position.

    Only this class and the attention operations know the layout: k and v are (R,K,T,E) each.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.n_kv_head, self.head_dim = config.n_kv_head, config.head_dim

    def allocate(self, R: int, T: int, zeros: Callable = torch.zeros):
        """Make an empty cache. zeros(shape) makes its tensors."""
        for name in ("k", "v"):
            self.register_buffer(name, zeros((R, self.n_kv_head, T, self.head_dim)), persistent=False)

    def write(self, k: Tensor, v: Tensor, input_pos: Tensor, rows: Tensor | None):
        """Store k and v (B,S,K,E) of the tokens at positions (B,S) of rows (B,); None means rows 0..B-1."""
        rows = torch.arange(len(k), device=k.device) if rows is None else rows
        slots = (rows[:, None], slice(None), input_pos)  # selects (B,S,K,E); -1 is the scratch slot
        self.k[slots] = k
        self.v[slots] = v

    def copy(self, source_row: int, target_row: int, n: int):
        """Copy the first n positions of one row to another."""
        for cache in (self.k, self.v):
            cache[target_row, :, :n] = cache[source_row, :, :n]

    @staticmethod
    def nbytes(config: Config, positions: int, dtype: torch.dtype) -> int:
        """The bytes that this many positions take in one layer."""
        return 2 * positions * config.n_kv_head * config.head_dim * dtype.itemsize


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202), or BLOOM's ungated tanh-GELU."""

    def __init__(self, config: Config):
        super().__init__()
        D, hidden = config.dim, config.hidden_dim
        self.gated, bias = config.mlp == "swiglu", config.mlp_bias
        if self.gated:
            self.gate_up = Linear(D, 2 * hidden, bias)  # rows gate, then up
        else:
            self.up = Linear(D, hidden, bias)
        self.down = Linear(hidden, D, bias)

    def forward(self, x: Tensor):
        if not self.gated:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B,S,F) each
        return self.down(F.silu(gate) * up)


# ---------------------------------------------------------------- layers
#
# The layers of torch.nn are not used, because they initialize their weights. That takes time, and on the meta device it
# imports torch's compiler (1.2 s).


class Linear(nn.Module):
    """y = x weight^T + bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = empty_parameter(out_features, in_features)
        self.register_parameter("bias", empty_parameter(out_features) if bias else None)

    def forward(self, x: Tensor):
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """The embedding table; a tied output head uses it for the logits too."""

    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.weight = empty_parameter(vocab_size, dim)

    def forward(self, tokens: Tensor):
        return F.embedding(tokens, self.weight)

    def logits(self, x: Tensor):
        return linear(x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = empty_parameter(dim), eps

    def forward(self, x: Tensor):
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.bias = empty_parameter(dim), empty_parameter(dim)
        self.eps = eps

    def forward(self, x: Tensor):
        return layer_norm(x, self.weight, self.bias, self.eps)


def make_norm(config: Config) -> nn.Module:
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.dim, config.norm_eps)


def empty_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


# ---------------------------------------------------------------- inputs


def pad_rows(parts: list[list[int]], starts: list[int], width: int = 0) -> tuple[Tensor, Tensor]:
    """tokens and input_pos (B,S) for `forward`: row b has parts[b] from position starts[b] on. S >= width."""
    S = max(width, *map(len, parts))
    tokens = torch.zeros(len(parts), S, dtype=torch.int64)
    input_pos = torch.full((len(parts), S), -1)
    for row, (part, start) in enumerate(zip(parts, starts)):
        tokens[row, : len(part)] = torch.tensor(part)
        input_pos[row, : len(part)] = torch.arange(start, start + len(part))
    return tokens, input_pos
