"""A decoder-only transformer in one file.

Read down: WholeModel, Transformer, Block, Attention, KVCache, MLP, inputs. The hyperparameters are
in config.py, the operations in kernels.py, the layers in layers.py, RoPE and ALiBi in positions.py.
mixers/ has what only some models have: recurrent.py the recurrent token mixers, experts.py the sparse
layers with their router, mtp.py the MTP layer.
Knows nothing of text, sampling, files or devices: kernels.py dispatches each operation to the
kernel of the device.

Shapes, here and in every file:
  B batch rows   S new tokens in this call   R cache rows   T slots of a cache row   D model width   V vocabulary
  H query heads  K key/value heads           E head width   F hidden width
  N rows (outputs), C columns (inputs), G groups of columns that share a scale: of a weight matrix

Sources: Llama (arXiv:2302.13971), grouped-query attention (arXiv:2305.13245), sliding window
(Mistral, arXiv:2310.06825), QK norm (Qwen3, arXiv:2505.09388), BLOOM (arXiv:2211.05100).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend import Backend
from config import Config
from kernels import attention, rms_norm
from layers import VOCABULARY, Embedding, FeedForward, Linear, RMSNorm, Scale, TokenMixer, Units, gated, make_norm
from positions import Positions, rotate

# ---------------------------------------------------------------- a model that is not split


class WholeModel:
    """What a Transformer asks of its shard, for a model that is not split over ranks. tp.Shard has
    the same interface.

    The only rank has everything, so its collectives return what they get.
    """

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
    """Tokens at positions in, logits out. Build it on the meta device, fill it by assignment, then
    set up the caches.

    Each token has its position in its own cache row, so rows may have different lengths (ragged
    prompts, speculation, continuous batching). Padding is on the right and has position -1.

    shard: a tp.Shard, for one rank's part of a split model. own_config has the sizes of this part,
    config the sizes of the whole model.
    """

    # The dtype of the activations. None: the dtype of the norms' weights. (In some families these
    # weights are always float32.)
    activation_dtype: torch.dtype | None = None

    def __init__(self, config: Config, shard=WHOLE_MODEL):
        super().__init__()
        self.config = config
        self.shard = shard
        own = shard.config(config)
        self.own_config = own

        self.embedding = Embedding(own.vocab_size, own.dim)
        self.embedding_norm = make_norm(own) if own.embedding_norm else None
        self.layer_inputs = None if config.per_layer_dim is None else LayerInputs(config)
        ropes = own.different_ropes()
        self.blocks = nn.ModuleList()
        for layer in range(own.n_layer):
            self.blocks.append(Block(own, layer, ropes.index(own.rope(layer)), shard))
            if own.kv_layer(layer) != layer:
                self.blocks[layer].mixer.cache = self.blocks[own.kv_layer(layer)].mixer.cache
        self.norm = make_norm(own)
        self.mtp = None  # the MTP layer: an mtp.MTPLayer
        if own.mtp:
            from mixers.mtp import MTPLayer

            rope_table = ropes.index(own.rope(own.n_layer))
            self.mtp = MTPLayer(own, Block(own, own.n_layer, rope_table, shard))
        vocabulary = [[Units(VOCABULARY, own.vocab_size)]]
        self.output = None if own.tied_embeddings else Linear(own.dim, own.vocab_size, False, vocabulary)

        self.backend = Backend()  # what an Installer returns replaces it
        self.cache_size = (0, 0)  # rows and slots of each row, from setup_caches
        # Snapshots of recurrent states are taken between passes, at multiples of this many tokens; None
        # if there are no such states
        self.snapshot_interval: int | None = None
        self.expert_counts: Tensor | None = None  # (sparse layers, X+1), from setup_caches: see SparseMLP.set_counts
        self.snapshots = None  # a recurrent.Snapshots, from setup_caches, if there are recurrent states

    def setup_caches(self, max_batch_size: int, max_seq_length: int, snapshot_bytes: int | None = None):
        """Allocate the states of all layers for this many rows and positions, on the weights'
        device, in the dtype of the activations, and make the tables of positions.

        snapshot_bytes: the memory for snapshots of recurrent states; None means the usual amount.

        Each row gets T = max_seq_length + 8 slots. The last one is scratch: padding (position -1)
        is written there, and no real token attends to it. With eight extra slots T is a multiple of
        8, as vector code likes it, whenever max_seq_length is. If a model has longrope,
        max_seq_length decides between its two sets of factors.
        """
        T = max_seq_length + SCRATCH_SLOTS
        self.cache_size = (max_batch_size, T)
        # The tables of positions are not made in __init__, where they would be meta tensors that no
        # checkpoint fills.
        heads = self.shard.own(self.config.n_head)
        self.positions = Positions(self.config.for_rows_of(max_seq_length), T, heads, self.device)

        nbytes = sum(state.nbytes(max_batch_size, T, self.dtype) for state in self.states)
        zeros = self.backend.zeros(nbytes, self.device)  # like torch.zeros, in huge pages on CPUs
        for state in self.states:
            state.allocate(max_batch_size, T, zeros, self.dtype)
        for block in self.all_blocks:
            block.mixer.positions = self.positions

        self._make_expert_counts()
        recurrent = self.recurrent_states
        if recurrent:
            from mixers.recurrent import SNAPSHOT_INTERVAL, Snapshots

            slots = self.snapshot_slots(max_batch_size, T, self.dtype, snapshot_bytes)
            self.snapshots = Snapshots(recurrent, slots, max_batch_size)
            self.snapshot_interval = SNAPSHOT_INTERVAL

    def _make_expert_counts(self):
        sparse = [layer for block in self.all_blocks for layer in block.sparse]
        if sparse:
            self.expert_counts = torch.zeros(len(sparse), sparse[0].X + 1, dtype=torch.int64, device=self.device)
            for experts, counts in zip(sparse, self.expert_counts):
                experts.set_counts(counts)

    def remove_mtp(self):
        """Remove the MTP layer."""
        self.mtp = None
        self.config = replace(self.config, mtp=False)
        self.own_config = replace(self.own_config, mtp=False)

    def share_caches(self, other: "Transformer"):
        """Use the KV caches and the tables of positions of another model of the same sizes."""
        self._make_expert_counts()
        self.positions = other.positions
        self.cache_size = other.cache_size
        for block, source in zip(self.blocks, other.blocks):
            block.mixer.cache = source.mixer.cache
            block.mixer.positions = other.positions

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations and of the KV caches."""
        return self.activation_dtype or self.norm.weight.dtype

    @property
    def all_blocks(self) -> list["Block"]:
        """The blocks of the model, then the block of the MTP layer, if there is one."""
        return [*self.blocks] if self.mtp is None else [*self.blocks, self.mtp.block]

    @property
    def states(self) -> list[nn.Module]:
        """What the model remembers of each row: a KVCache or a recurrent.Tail for each layer, or for several."""
        states = [*dict.fromkeys(block.mixer.state for block in self.all_blocks)]
        return states if self.mtp is None else [*states, self.mtp.hidden]

    @property
    def recurrent_states(self) -> list[nn.Module]:
        """The recurrent states: they cannot be cut at any position, so snapshots of them are kept."""
        return [state for state in self.states if state.is_recurrent]

    def cache_bytes(self, rows: int, length: int, dtype: torch.dtype, snapshot_bytes: int | None = None) -> int:
        """The bytes that `setup_caches` takes for rows of this length, with activations of this dtype."""
        T = length + SCRATCH_SLOTS
        total = sum(state.nbytes(rows, T, dtype) for state in self.states)
        if self.recurrent_states:
            snapshot = sum(state.snapshot_bytes(dtype) for state in self.recurrent_states)
            total += self.snapshot_slots(rows, T, dtype, snapshot_bytes) * snapshot
        return total

    def snapshot_slots(self, rows: int, T: int, dtype: torch.dtype, limit: int | None) -> int:
        """How many snapshots of recurrent states are kept. All ranks of a split model keep equally many.
        Arguments as in cache_bytes."""
        from mixers.recurrent import snapshot_slots

        # An MTP layer may be left out, so its cache does not count.
        states = [block.mixer.state for block in self.blocks]
        kv_bytes = sum(state.nbytes(rows, T, dtype) for state in states if not state.is_recurrent)
        if limit is not None:
            limit //= self.shard.ranks
        return snapshot_slots(self.recurrent_states, rows, T, kv_bytes, dtype, limit)

    def restorable(self, row: int, n: int) -> int:
        """The largest m <= n such that `reuse` can take over the first m positions of a row, whose
        tokens the caller knows to be at least n."""
        return n if self.snapshots is None else self.snapshots.restorable(row, n)

    def reuse(self, source_row: int, target_row: int, n: int):
        """Make the target row hold the first n positions of the source row, which may be the same.
        n is a result of `restorable`, or 0."""
        for state in self.states:
            state.copy(source_row, target_row, n)
        if self.snapshots is not None:
            self.snapshots.reuse(source_row, target_row, n)

    def offer_snapshot(self, row: int, unread: int):
        """Say that a row has read the beginning of a prompt, which later prompts may share.
        unread: how many tokens are left of the prompt, or of the part that prompts share."""
        if self.snapshots is not None:
            self.snapshots.offer(row, unread)

    def kv_bytes(self, lengths: list[int]) -> int:
        """Bytes of keys and values that a decode step has to read.

        lengths: the filled positions of each row. The fallbacks in plain PyTorch read more.
        """
        return sum(n * self.blocks[i].mixer.kv_bytes(lengths, self.dtype) for i, n in self.equal_caches.items())

    @cached_property
    def equal_caches(self) -> dict[int, int]:
        """The first layer of each kind that reads equally many keys and values -> the number of such layers."""
        kinds = [block.mixer.kv_kind for block in self.blocks]  # asking every layer would take 5 % of a small step
        return {kinds.index(kind): n for kind, n in Counter(kinds).items()}

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of recurrent states that a decode step reads and writes for each row."""
        return sum(block.mixer.state.step_bytes(self.dtype) for block in self.blocks)

    def forward(
        self, tokens: Tensor, input_pos: Tensor | None = None, rows: Tensor | None = None, all_logits: bool = False
    ) -> Tensor:
        """tokens (B,S) int64; input_pos (B,S) int64, the position of each token in its cache row;
        rows (B,) int64, the cache row of each batch row, or None (rows 0..B-1).

        In a batch row positions are contiguous and padding (-1) is on the right. Several batch rows
        may name the same cache row: every layer writes all new keys and values before it reads any.

        Returns the logits of each batch row's last real token, (B,V), or with all_logits the logits
        of every token, (B,S,V). Logits of padding are undefined. RuntimeError before setup_caches,
        or without input_pos.
        """
        if input_pos is None or not self.cache_size[0]:
            raise RuntimeError(
                "the model has no caches yet, or the call no positions; "
                "call model.setup_caches(rows, length) once, and then model(tokens, input_pos)"
            )
        if all_logits:
            return self.head(self.hidden(tokens, input_pos, rows))
        x = self.hidden(tokens, input_pos, rows, last_only=True)  # (B,1,D): a long prompt never needs an (S,V) tensor
        return self.head(x[:, 0])

    def hidden(self, tokens: Tensor, input_pos: Tensor, rows: Tensor | None = None, last_only: bool = False) -> Tensor:
        """The normalized last hidden state of every token, (B,S,D), or with last_only of each batch row's last
        real token, (B,1,D), which is undefined in a row of padding; writes the caches. Arguments as in forward."""
        if rows is None:
            rows = torch.arange(len(tokens), device=tokens.device)
        embedded = self.block_inputs(tokens)  # (B,S,D)
        x = embedded
        ropes = self.positions.ropes(input_pos)
        own_inputs = None
        if self.layer_inputs is not None:
            own_inputs = self.layer_inputs(tokens, embedded)  # (B,S,layers,P)

        def last(states: Tensor) -> Tensor:  # (B,S,...) to (B,1,...)
            return states[torch.arange(len(states), device=states.device), input_pos.argmax(1)][:, None]

        if last_only and self.mtp is None and self.config.shared_kv_layers and tokens.shape[1] > 1:
            # The last blocks write no keys and values, so no later token reads what they compute for the tokens
            # before the last. (The MTP layer would: it reads the hidden states of all tokens.)
            first = len(self.blocks) - self.config.shared_kv_layers
            x = last(self._run_blocks(slice(first), x, ropes, input_pos, rows, own_inputs))
            ropes = [rope and (last(rope[0]), last(rope[1])) for rope in ropes]
            own_inputs = None if own_inputs is None else last(own_inputs)
            x = self._run_blocks(slice(first, None), x, ropes, last(input_pos), rows, own_inputs)
            return self.norm(x)

        x = self.norm(self._run_blocks(slice(None), x, ropes, input_pos, rows, own_inputs))
        if self.mtp is not None:
            self.mtp.read(embedded, x, input_pos, rows, self.backend)
        return last(x) if last_only else x

    def _run_blocks(self, layers: slice, x: Tensor, ropes: list, input_pos: Tensor, rows: Tensor, own_inputs) -> Tensor:
        """The result (B,S,D) of these blocks for x (B,S,D). own_inputs (B,S,layers,P): of all blocks, or None."""
        backend = self.backend
        # All blocks as one operation: FusedBlocks in cpu/install.py, fused_blocks in kernels_triton.py.
        if backend.run_blocks is not None and x.shape[1] <= backend.max_fused_tokens:
            return backend.run_blocks(self.blocks, x, ropes, input_pos, rows, own_inputs, layers)
        for i in range(len(self.blocks))[layers]:
            block = self.blocks[i]
            own = None if own_inputs is None else own_inputs[:, :, i]
            x = block(x, ropes[block.rope_table], input_pos, rows, own)
        return x

    def block_inputs(self, tokens: Tensor) -> Tensor:
        """The inputs (B,S,D) of the first block for tokens (B,S): their embeddings, which some
        families scale or normalize."""
        x = self.embed(tokens).to(self.dtype)
        if self.config.embedding_scale != 1.0:
            # The scale is rounded to x's dtype, as the authors of Gemma do.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings (B,S,D) of tokens (B,S). If the model is split, every rank gets the
        embeddings of all tokens."""
        return self.shard.embed(self.embedding, self.own_config.vocab_size, tokens)

    def head(self, x: Tensor) -> Tensor:
        """Hidden states (...,D) to logits (...,V). If the model is split, every rank gets all V
        logits."""
        return soft_cap(self.linear_head(x), self.config.logits_softcap)

    def drawable_logits(self, x: Tensor, rows: Tensor, position: Tensor, sampling) -> Tensor:
        """Logits (n,V) of hidden states x (n,D), from which `sampling.sample` draws the same tokens for these
        rows and positions (n,) as from all logits. Tokens that cannot be drawn may have -inf."""
        logits = None
        if self.backend.drawable_logits is not None:
            settings = [one[rows] for one in (sampling.temperature, sampling.seed, sampling.top_k, sampling.min_p)]
            logits = self.backend.drawable_logits(x, *settings, position)
        return self.head(x) if logits is None else logits

    def linear_head(self, x: Tensor) -> Tensor:
        """The logits (...,V) without their soft cap: a linear function of the hidden states."""
        logits = self.embedding.logits(x) if self.output is None else self.output(x)
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        return self.shard.gather(logits, self.config.vocab_size)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Logits that stay between -cap and cap; the same logits if there is no cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


class Block(nn.Module):
    """A token mixer, usually attention, then an MLP, each with a residual connection and with norms
    before it, after it, or both."""

    def __init__(self, config: Config, layer: int, rope_table: int, shard):
        super().__init__()
        self.config = config
        self.rope_table = rope_table  # an index of Positions.ropes
        self.post_norm_residual = config.post_norm_residual
        self.residual_scale = config.residual_scale
        self.shard = shard

        norm_before = config.norm_placement in ("before", "both")
        norm_after = config.norm_placement in ("after", "both")
        self.attention_norm = make_norm(config) if norm_before else None
        mixer = make_mixer(config, layer, shard)
        self.mixer_name = mixer.name
        self._modules[mixer.name] = mixer
        self.attention_post_norm = make_norm(config) if norm_after else None
        self.mlp_norm = make_norm(config) if norm_before else None
        mlp = make_mlp(config, layer)
        self.mlp_name = mlp.name
        self._modules[mlp.name] = mlp
        self.has_both = config.is_sparse(layer) and config.experts.beside_mlp
        if self.has_both:
            self.experts = make_experts(config)
        self.mlp_post_norm = make_norm(config) if norm_after else None
        self.layer_input = None if config.per_layer_dim is None else LayerInput(config)
        self.scale = Scale() if config.layer_scale else None

    # The tensors of checkpoints are named after the kinds of layers, so the two modules are, too:
    # "attention", "delta_net" or "short_conv"; "mlp" or "experts", or both.

    @property
    def mixer(self) -> TokenMixer:
        return self._modules[self.mixer_name]

    @property
    def mlp(self) -> FeedForward:
        return self._modules[self.mlp_name]

    @property
    def sparse(self) -> list[FeedForward]:
        """The experts, of whose weights a token uses only some: an experts.SparseMLP, or none."""
        return [self._modules["experts"]] if "experts" in self._modules else []

    @property
    def linears(self) -> list[nn.Module]:
        """The linear layers in the order in which fused kernels take them."""
        return [*self.mixer.linears, *self.mlp.linears]

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        input_pos: Tensor,
        rows: Tensor,
        own_input: Tensor | None = None,
    ) -> Tensor:
        """own_input (B,S,P): what LayerInputs gives this block."""
        all_reduce = self.shard.all_reduce  # each rank has computed a part of a sum
        h = x if self.attention_norm is None else self.attention_norm(x)
        y = all_reduce(self.mixer(h, input_pos, rows, rope))
        x = self.add(x, h, y, self.attention_post_norm)

        h = x if self.mlp_norm is None else self.mlp_norm(x)
        y = all_reduce(self.mlp(h, input_pos))
        if self.has_both:
            of_experts = all_reduce(self.experts(x, input_pos))
            y = self.experts.mlp_term_norm(y) + self.experts.term_norm(of_experts)
        x = self.add(x, h, y, self.mlp_post_norm)
        if self.layer_input is not None:
            x = self.layer_input(x, own_input)
        return x if self.scale is None else x * self.scale.weight

    def add(self, x: Tensor, h: Tensor, y: Tensor, post_norm: nn.Module | None) -> Tensor:
        """The residual connection: x, or in some families its norm h, plus the output y of
        attention or MLP."""
        if post_norm is not None:
            y = post_norm(y)
        if self.residual_scale != 1.0:
            y = y * self.residual_scale
        return h + y if self.post_norm_residual else x + y


def make_mixer(config: Config, layer: int, shard) -> TokenMixer:
    """The token mixer of a layer."""
    if config.has_attention(layer):
        return Attention(config, layer, shard)
    from mixers.recurrent import GatedDeltaNet, ShortConvolution

    return ShortConvolution(config) if config.delta_net is None else GatedDeltaNet(config)


def make_mlp(config: Config, layer: int) -> FeedForward:
    """The MLP of a layer, or its experts."""
    if not config.is_sparse(layer) or config.experts.beside_mlp:
        return MLP(config, config.mlp_width(layer))
    return make_experts(config)


def make_experts(config: Config) -> FeedForward:
    from mixers.experts import SparseMLP

    shared_dim = config.experts.shared_dim
    return SparseMLP(config, MLP(config, shared_dim, "experts.shared") if shared_dim else None)


class Attention(TokenMixer):
    """Grouped-query attention, with RoPE or ALiBi, over the layer's own KV cache, or over that of an earlier layer."""

    name = "attention"

    def __init__(self, config: Config, layer: int, shard):
        super().__init__()
        self.config = config
        self.window = config.window(layer)
        self.heads = config.heads(layer)
        H, K, E = self.heads
        self.kv_kind = self.window, K, E
        self.cache = KVCache(K, E)  # Transformer replaces it where layers share one
        self.shares_cache = config.kv_layer(layer) != layer
        self.scale = config.attention_scale or E**-0.5

        # Weight rows: q, then its gate (of the same shape), if there is one, then k, then v, if the layer has these
        # matrices.
        self.gate_heads = H if config.attention_gate else 0
        self.keys_as_values = config.full_keys_as_values and self.window is None
        queries = Units("n_head", H, E)
        keys = Units("n_head", H, E, shared_by=H // K)
        rows = [[queries, queries] if self.gate_heads else [queries], [keys], [keys]]
        if self.shares_cache:
            del rows[1:]
        elif self.keys_as_values:
            del rows[2]
        self.qkv = Linear(config.dim, sum(units.size for piece in rows for units in piece), config.qkv_bias, rows)
        self.out = Linear(H * E, config.dim, config.out_bias, columns=[queries])

        self.q_norm = None
        self.k_norm = None
        if config.qk_norm and config.qk_norm_whole:
            self.q_norm = RMSNorm(H * E, config.norm_eps, shard.rms_norm, [[queries]])
            self.k_norm = RMSNorm(K * E, config.norm_eps, shard.rms_norm, [[keys]])
        elif config.qk_norm:
            self.q_norm = RMSNorm(E, config.norm_eps)
            self.k_norm = RMSNorm(E, config.norm_eps)
        self.v_norm = RMSNorm(E, config.norm_eps) if config.value_norm else None
        if self.shares_cache:
            self.k_norm = None
            self.v_norm = None

    @property
    def state(self) -> "KVCache":
        return self.cache

    @property
    def linears(self) -> list[nn.Module]:
        return [self.qkv, self.out]

    def block_arguments(self) -> dict:
        H, K, E = self.heads
        return {
            "H": H,
            "K": K,
            "E": E,
            "gates": self.gate_heads,
            "scale": self.scale,
            "window": self.window,
            "qk_norm_whole": self.config.qk_norm_whole,
            "q_norm": getattr(self.q_norm, "weight", None),
            "k_norm": getattr(self.k_norm, "weight", None),
            "v_norm": getattr(self.v_norm, "weight", None),
            "keys_as_values": self.keys_as_values,
            "shares_cache": self.shares_cache,
        }

    def flops(self, context: int) -> int:
        H, _, E = self.heads
        return 4 * H * E * min(context, self.window or context)

    def kv_bytes(self, lengths: list[int], dtype: torch.dtype) -> int:
        return sum(min(length, self.window or length) for length in lengths) * self.cache.position_bytes(dtype)

    def forward(self, x: Tensor, input_pos: Tensor, rows: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        q, gate = self.read(x, rope, input_pos, rows)
        slopes = self.positions.slopes
        y = attention(q, self.cache.k, self.cache.v, input_pos, rows, slopes, self.window, self.scale)
        if gate is not None:
            y = y * gate.sigmoid()
        return self.out(y.flatten(2))

    def read(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, input_pos: Tensor, rows: Tensor):
        """Write the keys and values of tokens, unless an earlier layer has written them. Returns the
        tokens' queries (B,S,H,E), and the gate of the output (B,S,H,E) or None."""
        B, S, _ = x.shape
        H, K, E = self.heads
        if self.shares_cache:
            K = 0  # there are only queries
        qkv = self.qkv(x).view(B, S, -1, E)
        v = qkv[:, :, -K:]  # (B,S,K,E); the products for keys, if they are the values, too
        gate = None
        if self.gate_heads:
            q, gate, k = qkv[:, :, : 2 * H + K].split([H, H, K], dim=2)
            qk = torch.cat([q, k], dim=2)
        else:
            qk = qkv[:, :, : H + K]  # (B,S,H+K,E)
        if self.q_norm is not None:
            qk = self.normalize(qk)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if rope is not None:
            qk = rotate(qk, rope)
        q, k = qk.split([H, K], dim=2)  # (B,S,H,E), (B,S,K,E)
        if self.positions.query_scales is not None:
            q = (q.float() * self.positions.query_scales[input_pos]).to(q.dtype)

        if not self.shares_cache:
            self.cache.write(k, v, input_pos, rows)
        return q, gate

    def normalize(self, qk: Tensor) -> Tensor:
        """The norms of queries and keys (B,S,H+K,E): over each head, or over all heads together."""
        B, S = qk.shape[:2]
        H, K, E = self.heads
        q, k = qk.split([H, qk.shape[2] - H], dim=2)  # there may be no keys
        if self.config.qk_norm_whole:
            q = q.flatten(2)  # (B,S,H*E)
            k = k.flatten(2)  # (B,S,K*E)
        q = self.q_norm(q).view(B, S, H, E)
        if self.k_norm is None:
            return q
        k = self.k_norm(k).view(B, S, K, E)
        return torch.cat([q, k], dim=2)  # (B,S,H+K,E)


class KVCache(nn.Module):
    """The keys and values of one layer: R rows of T slots. k and v are (R,K,T,E) each.

    Slot t of a row holds the key and value of the token at position t. (The extra slots at the end
    hold no position.) A token sees only slots up to its own position. So what is in the slots after
    a row's tokens, such as rejected drafts or an earlier request, does no harm until it is
    overwritten: nothing is ever erased, and there is no rollback. Layers with a sliding window keep
    all slots, too, so that a row's prefix can be reused at any length.

    The layout is known here, and to the operations that read and write the caches: attention,
    `blocks` (cpu/blocks.h) and `rotary` (rotary_kernel in kernels_triton.py).
    """

    is_recurrent = False

    def __init__(self, K: int, E: int):
        super().__init__()
        self.n_kv_head = K
        self.head_dim = E

    def allocate(self, R: int, T: int, zeros: Callable, dtype: torch.dtype):
        """Make an empty cache. zeros(shape, dtype=...) makes its tensors."""
        shape = (R, self.n_kv_head, T, self.head_dim)
        self.register_buffer("k", zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v", zeros(shape, dtype=dtype), persistent=False)

    def write(self, k: Tensor, v: Tensor, input_pos: Tensor, rows: Tensor):
        """Store k and v (B,S,K,E) of the tokens at positions (B,S) of rows (B,)."""
        slots = (rows[:, None], slice(None), input_pos)  # selects (B,S,K,E); -1 is the scratch slot
        self.k[slots] = k
        self.v[slots] = v

    def copy(self, source_row: int, target_row: int, n: int):
        """Copy the first n positions of one row to another."""
        if source_row == target_row or n == 0:
            return
        for cache in (self.k, self.v):
            cache[target_row, :, :n] = cache[source_row, :, :n]

    def nbytes(self, R: int, T: int, dtype: torch.dtype) -> int:
        """The bytes that `allocate` takes."""
        return R * T * self.position_bytes(dtype)

    def position_bytes(self, dtype: torch.dtype) -> int:
        """The bytes of the keys and values of one position."""
        return 2 * self.n_kv_head * self.head_dim * dtype.itemsize

    def step_bytes(self, dtype: torch.dtype) -> int:
        """The bytes that each step reads and writes, whatever the length of a row is."""
        return 0


class MLP(FeedForward):
    """SwiGLU or GeGLU (layers.gated); or without a gate, tanh-GELU or the square of ReLU
    (arXiv:2109.08668)."""

    name = "mlp"

    def __init__(self, config: Config, hidden_dim: int, kind: str = "mlp"):
        """kind: which of a rank's hidden widths this is (tp.Shard.own_hidden)."""
        super().__init__()
        self.kind = config.mlp
        self.gated = config.mlp in ("swiglu", "geglu")
        hidden = Units(kind, hidden_dim, even=False)
        if self.gated:
            self.gate_up = Linear(config.dim, 2 * hidden_dim, config.mlp_bias, [[hidden], [hidden]])
        else:
            self.up = Linear(config.dim, hidden_dim, config.mlp_bias, [[hidden]])
        self.down = Linear(hidden_dim, config.dim, config.mlp_bias, columns=[hidden])

    @property
    def linears(self) -> list[nn.Module]:
        return [self.gate_up if self.gated else self.up, self.down]

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        if self.kind == "relu2":
            return self.down(F.relu(self.up(x)).square())
        if self.kind == "gelu":
            return self.down(F.gelu(self.up(x), approximate="tanh"))

        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B,S,F) each
        return self.down(gated(self.kind, gate, up))


class LayerInputs(nn.Module):
    """An input of width P for each layer and token, from a projection of the token's embedding (D,) and a table:

        (norm(proj(embedding) / sqrt(D)) + sqrt(P) table[token]) / sqrt(2)

    The table has L P numbers for each token, together more than all blocks. On CPUs it stays in the mapped file
    (layers.MappedTable).
    """

    def __init__(self, config: Config):
        super().__init__()
        self.P = config.per_layer_dim
        width = config.n_layer * self.P
        self.table = Embedding(config.vocab_size, width)
        self.table.rows = ()  # every rank has all of it
        self.proj = Linear(config.dim, width, bias=False)
        self.norm = RMSNorm(self.P, config.norm_eps)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:  # (B,S), (B,S,D) to (B,S,L,P)
        x = self.proj(embedded) * embedded.shape[-1] ** -0.5
        x = self.norm(x.unflatten(-1, (-1, self.P)))
        # The authors round the root and each step to the dtype.
        vectors = self.table(tokens).to(x.dtype) * torch.tensor(self.P**0.5, dtype=x.dtype)
        return (x + vectors.unflatten(-1, (-1, self.P))) * 2**-0.5


class LayerInput(nn.Module):
    """Adds a block's own input (LayerInputs) to its result: x + norm(proj(gelu(gate(x)) * input)). If the model is
    split, every rank computes it."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = Linear(config.dim, config.per_layer_dim, bias=False)
        self.proj = Linear(config.per_layer_dim, config.dim, bias=False)
        self.norm = make_norm(config)

    def forward(self, x: Tensor, own_input: Tensor) -> Tensor:
        gate = F.gelu(self.gate(x), approximate="tanh")
        return x + self.norm(self.proj(gate * own_input))


# ---------------------------------------------------------------- inputs


def pad_rows(parts: list[list[int]], starts: list[int], width: int = 0) -> tuple[Tensor, Tensor]:
    """tokens and input_pos (B,S) for `forward`: row b has parts[b] from position starts[b] on. S >=
    width."""
    S = max(width, *map(len, parts))
    tokens = torch.zeros(len(parts), S, dtype=torch.int64)
    input_pos = torch.full((len(parts), S), -1)
    for row, (part, start) in enumerate(zip(parts, starts)):
        tokens[row, : len(part)] = torch.tensor(part)
        input_pos[row, : len(part)] = torch.arange(start, start + len(part))
    return tokens, input_pos
