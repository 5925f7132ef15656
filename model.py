"""A decoder-only transformer in one file.

Read down: WholeModel, Transformer, Block, Attention, KVCache, MLP, layers, inputs. The hyperparameters are in
config.py, RoPE and ALiBi in positions.py. Knows nothing of text, sampling, files or devices: kernels.py defines the
operations and dispatches them to the kernels of the device.

Shapes, here and in every file:
  B batch rows   S new tokens in this call   R cache rows   T cache slots a row   D model width   V vocabulary
  H query heads  K key/value heads           E head width    F hidden width
  N rows (outputs), C columns (inputs), G groups of columns that share a scale: of a weight matrix

Sources: Llama (arXiv:2302.13971), grouped-query attention (arXiv:2305.13245), sliding window (Mistral,
arXiv:2310.06825), QK norm (Qwen3, arXiv:2505.09388), BLOOM (arXiv:2211.05100).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config
from kernels import Backend, attention, layer_norm, linear, rms_norm
from positions import Positions, rotate

# ---------------------------------------------------------------- a model that is not split


class WholeModel:
    """What a Transformer asks of its shard, for a model that is not split over ranks: tp.Shard has the same interface.
    The only rank has everything, so its collectives return what they get."""

    rank = 0
    ranks = 1

    def own(self, n: int) -> range:
        """This rank's range of n items."""
        return range(n)

    def config(self, config: Config) -> Config:
        """The Config of this rank's part of a model."""
        return config

    def embed(self, table: nn.Module, rows: int, tokens: Tensor) -> Tensor:
        """The vectors (B,S,D) of tokens (B,S), from a table of which each rank has `rows` rows."""
        return table(tokens)

    def gather(self, logits: Tensor, V: int) -> Tensor:
        """The logits (...,V) of all ranks."""
        return logits

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x."""
        return x

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over a dimension of which each rank has a part."""
        return rms_norm(x, weight, eps)


WHOLE_MODEL = WholeModel()

# ---------------------------------------------------------------- Transformer

SCRATCH_SLOTS = 8  # extra slots at the end of each cache row: see setup_caches


class Transformer(nn.Module):
    """Tokens at positions in, logits out. Build it on the meta device, fill it by assignment, then set up the caches.

    Rows are independent: each token has its position in its own row, so rows may have different lengths
    (ragged prompts, speculation, continuous batching). Padding is on the right and has position -1.

    shard: a tp.Shard, for one rank's part of a split model. own_config has the sizes of this part, config those of the
    whole.
    """

    activation_dtype: torch.dtype | None = None  # that of the norms' weights, unless these are float32 in any model

    def __init__(self, config: Config, shard=WHOLE_MODEL):
        super().__init__()
        self.config, self.shard = config, shard
        self.own_config = own = shard.config(config)
        self.embedding = Embedding(own.vocab_size, own.dim)
        self.embedding_norm = make_norm(own) if own.embedding_norm else None
        ropes = own.different_ropes()
        self.blocks = nn.ModuleList(
            Block(own, layer, ropes.index(own.rope(layer)), shard) for layer in range(own.n_layer)
        )
        self.norm = make_norm(own)
        self.output = None if own.tied_embeddings else Linear(own.dim, own.vocab_size, bias=False)
        self.backend = Backend()  # what an Installer returns replaces it

    def setup_caches(self, max_batch_size: int, max_seq_length: int):
        """Allocate the KV caches for this many rows and positions, on the weights' device and in their dtype.

        T is max_seq_length + 8. The last slot is scratch: padding (position -1) is written there, and no token attends
        to it. The other seven keep T a multiple of 8, for vector code, if max_seq_length is one. With longrope, rows of
        more positions than the original context have the long factors from their first token on.
        """
        T = max_seq_length + SCRATCH_SLOTS
        heads = self.shard.own(self.config.n_head)
        # Not made in __init__, where its tables would be meta tensors that no checkpoint fills.
        self.positions = Positions(self.config.for_rows_of(max_seq_length), T, heads, self.device)
        nbytes = len(self.blocks) * KVCache.nbytes(self.own_config, max_batch_size * T, self.dtype)
        zeros = partial(self.backend.zeros(nbytes, self.device), dtype=self.dtype)
        for block in self.blocks:
            block.attention.cache.allocate(max_batch_size, T, zeros)
            block.attention.positions = self.positions

    def share_caches(self, other: "Transformer"):
        """Use the KV caches and the tables of positions of another model of the same sizes."""
        self.positions = other.positions
        for block, source in zip(self.blocks, other.blocks):
            block.attention.cache, block.attention.positions = source.attention.cache, other.positions

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations and of the KV caches."""
        return self.activation_dtype or self.norm.weight.dtype

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
        return KVCache.nbytes(config, positions, self.dtype)

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
        x = self.block_inputs(tokens)  # (B,S,D)
        ropes = self.positions.ropes(input_pos)
        # All blocks as one operation: FusedBlocks of cpu/install.py, or that of kernels_triton.py
        if self.backend.run_blocks is not None and x.shape[1] <= self.backend.max_fused_tokens:
            x = self.backend.run_blocks(self.blocks, x, ropes, input_pos, rows)
        else:
            for block in self.blocks:
                x = block(x, ropes[block.rope_table], input_pos, rows)
        return self.norm(x)

    def block_inputs(self, tokens: Tensor):
        """The inputs (B,S,D) of the first block for tokens (B,S): their embeddings, which some families scale or
        normalize."""
        x = self.embed(tokens).to(self.dtype)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded, as the authors of Gemma do
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def embed(self, tokens: Tensor):
        """The embeddings (B,S,D) of tokens (B,S). If the model is split, every rank gets those of all tokens."""
        return self.shard.embed(self.embedding, self.own_config.vocab_size, tokens)

    def head(self, x: Tensor):
        """Hidden states (...,D) to logits (...,V). If the model is split, every rank gets all V logits."""
        logits = self.embedding.logits(x) if self.output is None else self.output(x)
        logits = logits if self.config.logits_scale == 1.0 else logits * self.config.logits_scale
        return self.shard.gather(logits, self.config.vocab_size)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int, rope_table: int, shard):
        super().__init__()
        self.rope_table = rope_table  # an index of Positions.ropes
        self.post_norm_residual, self.residual_scale = config.post_norm_residual, config.residual_scale
        self.shard = shard
        before, after = config.norm_placement != "after", config.norm_placement != "before"
        self.attention_norm = make_norm(config) if before else None
        self.attention = Attention(config, layer, shard)
        self.attention_post_norm = make_norm(config) if after else None
        self.mlp_norm = make_norm(config) if before else None
        self.mlp = MLP(config)
        self.mlp_post_norm = make_norm(config) if after else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, input_pos: Tensor, rows: Tensor | None):
        h = x if self.attention_norm is None else self.attention_norm(x)
        y = self.attention(h, rope, input_pos, rows)
        x = self.add(h if self.post_norm_residual else x, y, self.attention_post_norm)
        h = x if self.mlp_norm is None else self.mlp_norm(x)
        return self.add(h if self.post_norm_residual else x, self.mlp(h), self.mlp_post_norm)

    def add(self, x: Tensor, y: Tensor, post_norm: nn.Module | None) -> Tensor:
        """The residual connection: x plus the output y of attention or MLP, which may have a norm."""
        y = self.shard.all_reduce(y)  # each rank has computed a part of a sum
        y = y if post_norm is None else post_norm(y)
        return x + (y if self.residual_scale == 1.0 else y * self.residual_scale)


class Attention(nn.Module):
    """Grouped-query attention, with RoPE or ALiBi, over the layer's own KV cache."""

    positions: Positions  # setup_caches makes it, for all layers

    def __init__(self, config: Config, layer: int, shard):
        super().__init__()
        self.config, self.cache = config, KVCache(config)
        self.window, self.scale = config.window(layer), config.attention_scale or config.head_dim**-0.5
        H, K, E = config.heads
        self.qkv = Linear(config.dim, (H + 2 * K) * E, bias=config.qkv_bias)  # weight rows: q, then k, then v
        self.out = Linear(H * E, config.dim, bias=config.out_bias)
        self.q_norm, self.k_norm = None, None
        if config.qk_norm and config.qk_norm_whole:
            self.q_norm, self.k_norm = (RMSNorm(heads * E, config.norm_eps, shard) for heads in (H, K))
        elif config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(E, config.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, input_pos: Tensor, rows: Tensor | None):
        B, S, _ = x.shape
        H, K, E = self.config.heads
        qk, v = self.qkv(x).view(B, S, H + 2 * K, E).split([H + K, K], dim=2)  # (B,S,H+K,E), (B,S,K,E)
        if self.q_norm is not None:
            q, k = qk.split([H, K], dim=2)
            if self.config.qk_norm_whole:
                q, k = q.flatten(2), k.flatten(2)  # (B,S,H*E), (B,S,K*E)
            qk = torch.cat([self.q_norm(q).view(B, S, H, E), self.k_norm(k).view(B, S, K, E)], dim=2)
        qk = qk if rope is None else rotate(qk, rope)
        q, k = qk.split([H, K], dim=2)  # (B,S,H,E), (B,S,K,E)
        scales, slopes = self.positions.query_scales, self.positions.slopes
        q = q if scales is None else (q.float() * scales[input_pos]).to(q.dtype)

        self.cache.write(k, v, input_pos, rows)
        y = attention(q, self.cache.k, self.cache.v, input_pos, rows, slopes, self.window, self.scale)
        return self.out(y.reshape(B, S, H * E))


class KVCache(nn.Module):
    """The keys and values of one layer: R rows of T slots, one slot for each position.

    Only this class and the attention operations know the layout: k and v are (R,K,T,E) each.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.n_kv_head, self.head_dim = config.n_kv_head, config.head_dim

    def allocate(self, R: int, T: int, zeros: Callable):
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
    """SwiGLU or GeGLU (arXiv:2002.05202), or BLOOM's ungated tanh-GELU."""

    def __init__(self, config: Config):
        super().__init__()
        D, hidden = config.dim, config.hidden_dim
        self.kind, self.gated = config.mlp, config.mlp != "gelu"
        if self.gated:
            self.gate_up = Linear(D, 2 * hidden, config.mlp_bias)  # rows gate, then up
        else:
            self.up = Linear(D, hidden, config.mlp_bias)
        self.down = Linear(hidden, D, config.mlp_bias)

    def forward(self, x: Tensor):
        if not self.gated:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B,S,F) each
        gate = F.silu(gate) if self.kind == "swiglu" else F.gelu(gate, approximate="tanh")
        return self.down(gate * up)


# ---------------------------------------------------------------- layers
#
# The layers of torch.nn are not used, because they initialize their weights. That takes time, and on the meta device it
# imports torch's compiler (1.2 s).


class MatrixLayer(nn.Module):
    """A layer for a matrix with out_features rows and in_features columns, however the matrix is stored: as it is
    (Linear), quantized (formats.py), or packed for the kernels of a device. Subclasses add its tensors and `bias`."""

    stored_as: str | None = None  # the matrix's format, a name of formats.FORMATS; None if it is not quantized

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features


class Linear(MatrixLayer):
    """y = x weight^T + bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__(in_features, out_features)
        self.weight = empty_parameter(out_features, in_features)
        self.register_parameter("bias", empty_parameter(out_features) if bias else None)

    def forward(self, x: Tensor):
        return linear(x, self.weight, self.bias)


class Embedding(Linear):
    """The embedding table; if the output head is tied to it, `logits` computes the head with the same weights."""

    logits = Linear.forward

    def __init__(self, vocab_size: int, dim: int):
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor):
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """shard: a tp.Shard if each rank has a part of the dimension."""

    bias = None  # LayerNorm has one

    def __init__(self, dim: int, eps: float, shard=WHOLE_MODEL):
        super().__init__()
        self.weight, self.eps = empty_parameter(dim), eps
        self.shard = shard

    def forward(self, x: Tensor):
        return self.shard.rms_norm(x, self.weight, self.eps)


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
