"""Makes a model use the C++ kernels of this folder, for x86 processors with AVX-512 or AVX2 under Linux.

Read down: CpuInstaller, which packs a model's layers one after the other; FusedBlocks, which runs
all blocks as one operation; DraftKeys, which writes the keys and values of the MTP layer.
layers.py has the packed layers, build.py the build; kernels.py says what each operation computes.

Decoding is memory-bound: its speed is limited by reading the weights. torch's own products with one
row use only a part of the memory bandwidth; these kernels use most of it. The bits of a row's result
depend neither on the other rows nor on the number of threads. bfloat16 weights, and quantized ones
with more than eight rows, are multiplied with AMX, the matrix unit of some Intel processors, if
there is one. With other weights that are not quantized, a prefill (more than 16 new tokens per row)
uses torch's own products, unless they are bfloat16 on a processor that cannot multiply it. Otherwise
prefill and decoding give the same bits.

If the weights are quantized, the activations are quantized as well, to 8 bits in groups of 32
columns, as in llama.cpp: products are then sums of integers. With exact activations, and always if
the activations are float32, the kernels convert the weights to float32 in registers instead.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from backend import FUSED_EXPERT_FIELDS, FUSED_FIELDS, Backend, Installer, uses_only
from config import Config
from cpu.build import AVX512, FORMATS_WITH_KERNELS, LOADED, allow_amx, load_kernels, processor_flags
from cpu.layers import (
    GROUP,
    LANES,
    PackedEmbedding,
    PackedLinear,
    PreparedExperts,
    Registered,
    has_format,
    packed_bytes,
    prepare,
)
from cpu.memory import HugePages, keep_freed_memory, release_freed_memory
from cpu.shadow import make_shadow
from cpu.threads import Threads, share_processors
from formats import QuantizedEmbedding, StackedLinear
from kernels import KERNELS, MAX_DECODE_TOKENS
from layers import LAYER_TABLE, Embedding, Linear
from model import Block, Transformer

PACKING = {"pack_layer", "prepare_layer", "linear_packed"}  # what packed layers need
# The operations that `blocks` consists of. If the schema of one of them was changed only in Python,
# that one has no kernel, and `blocks`, which would still compute the old operation, is not used.
FUSED_OPERATIONS = {
    "prepare_layer",
    "sparse_mlp",
    "prepare_block",
    "blocks",
    "linear",
    "linear_packed",
    "rms_norm",
    "layer_norm",
    "attention",
    "gated_delta",
    "write_draft_keys",
}
# The fields of config.Config that `blocks` takes into account, besides backend.FUSED_FIELDS.
MORE_FUSED_FIELDS = (
    "qk_norm_whole",
    "norm_placement",
    "float32_norms",
    "residual_scale",
    "layer_scale",
    "value_norm",
    "full_head_dim",
    "full_kv_head",
    "full_keys_as_values",
    "shared_kv_layers",
    "shared_kv_hidden_dim",
    "per_layer_dim",
    "query_scale_beta",
    "attention_gate",
    "delta_net",
    "short_conv",
    "experts",
)

# The tensors of a recurrent.ConvState (the first two) or DeltaState. `blocks` takes a list of each.
STATE_TENSORS = ("base", "tail", "matrix", "keys", "deltas", "decays")

MAX_CONV_WIDTH = 16  # the widest convolution that `blocks` computes
ALL = slice(None)  # layers
KEPT_BYTES = 1 << 26  # freed memory that is used again while a model is packed


class CpuInstaller(Installer):
    """Packs a model's weights for the kernels, one layer at a time.

    Quantized weights are copied to new memory, self.packed, in the kernels' layout, and the parts that
    were read are freed.

    Weights (N,C) that are not quantized are packed if they are bfloat16, the processor has AMX, N is
    a multiple of 16, and C of 32. They are packed in place, so no other model may share these
    tensors. In a module that is not a Transformer, only quantized weights are packed. With `kernels`
    "torch", and where the kernels cannot run, the model only gets memory in huge pages and the
    tuning of threads.
    """

    def __init__(self, model: nn.Module, kernels: str = "auto", exact_activations: bool = False):
        super().__init__(model, kernels, exact_activations)
        self.has_kernels = kernels != "torch" and load_kernels(kernels)
        if self.has_kernels and KERNELS["cpu"] >= PACKING:
            self.formats = FORMATS_WITH_KERNELS
        self.reserved: HugePages | None = None
        self.freed = 0  # bytes of layers that have been packed since their memory was released
        total = 0
        for name, module in model.named_modules():
            if self.has_kernels and has_format(module) and name != LAYER_TABLE:  # the table stays in its file
                total += -(-packed_bytes(module) // 64) * 64
        self.packed = HugePages(total)

    @staticmethod
    def prepare_process(threads: int | None):
        keep_freed_memory()
        if threads is None:
            share_processors()
        else:
            torch.set_num_threads(threads)

    def reserve(self, nbytes: int):
        self.reserved = HugePages(nbytes)

    def place(self, tensor: Tensor, device, dtype: torch.dtype, is_mapped: bool) -> Tensor:
        if self.reserved is None:
            return tensor.to(dtype, copy=is_mapped)
        return self.reserved.copy(tensor.to(dtype))

    def pack(self, name: str):
        if not self.has_kernels:
            return
        plain = self.model.get_submodule(name)
        kind = packed_type(self.model, plain)
        if kind is None:
            return

        self.model.set_submodule(name, kind(plain, self.exact_activations, self.packed.empty))
        self.freed += sum(tensor.nbytes for tensor in plain.buffers())
        if self.freed > KEPT_BYTES:  # otherwise fragmentation costs up to half the model's size
            self.freed = 0
            release_freed_memory()

    def finish(self) -> Backend:
        model = self.model
        backend = Backend(
            zeros=lambda nbytes, device: HugePages(nbytes).zeros,
            make_threads=Threads,
        )
        if not self.has_kernels:
            return backend

        backend = replace(backend, name=LOADED[0].name)
        if not isinstance(model, Transformer):
            return backend
        if "head_logits" in KERNELS["cpu"] and not self.exact_activations and model.shard.ranks == 1:
            backend = replace(backend, make_shadow=make_shadow)

        for block in model.all_blocks:
            for layer in block.sparse if KERNELS["cpu"] >= FUSED_OPERATIONS else ():
                prepare_experts(layer, model.dtype)
        backend = replace(backend, thread_invariant=KERNELS["cpu"] >= {"linear", "attention"})
        # A split model adds up the ranks' parts in the blocks.
        if not can_fuse(model.config) or model.shard.ranks > 1:
            return backend
        layers = [layer for block in model.blocks for layer in block.linears]
        outside = [model.output or model.embedding]
        if model.layer_inputs is not None:
            layers += [layer for block in model.blocks for layer in (block.layer_input.gate, block.layer_input.proj)]
            outside.append(model.layer_inputs.proj)
        limits = [layer.max_run_tokens for block in model.blocks for layer in block.sparse]
        all_fused = all(map(prefills_fast, layers)) and all(limit == sys.maxsize for limit in limits)
        if model.mtp is not None:
            run = FusedBlocks([model.mtp.block], model.dtype)
            backend = replace(backend, run_draft=run, write_draft_keys=DraftKeys(model.mtp, model.dtype))
        return replace(
            backend,
            run_blocks=FusedBlocks(model.blocks, model.dtype),
            max_fused_tokens=sys.maxsize if all_fused else MAX_DECODE_TOKENS,
            chunk_invariant=all_fused and all(isinstance(layer, PackedLinear) for layer in outside),
        )


def packed_type(model: nn.Module, module: nn.Module) -> type | None:
    """The class of the layer that replaces a module, or None if the module is not replaced."""
    kind = PackedLinear
    needed = PACKING
    if isinstance(module, (Embedding, QuantizedEmbedding)):
        kind = PackedEmbedding
        needed = PACKING | {"embed_packed"}
    if not KERNELS["cpu"] >= needed:
        return None
    if has_format(module):
        return kind
    if isinstance(module, StackedLinear):
        fits = all(has_format(piece) or isinstance(piece, Linear) for piece in module)
        return kind if fits else None

    if not isinstance(module, Linear) or not isinstance(model, Transformer) or not allow_amx():
        return None
    if module is model.embedding and model.output is not None:  # it is looked up, never multiplied
        return None
    N = module.out_features // module.n_expert
    C = module.in_features
    if module.weight.dtype != torch.bfloat16 or N % LANES or C % GROUP:  # padding would enlarge it
        return None
    return kind


def prefills_fast(layer: nn.Module) -> bool:
    """Whether prefill uses our products for a layer. If its weights are not packed, torch's products
    are faster, except for bfloat16 on processors that cannot multiply it."""
    if isinstance(layer, PackedLinear):
        return True
    has_fast_bf16 = LOADED[0].name == AVX512.name and "avx512_bf16" in processor_flags()
    return layer.weight.dtype == torch.bfloat16 and not has_fast_bf16


def can_fuse(config: Config) -> bool:
    """Whether the fused operation `blocks` supports this architecture. Other models run operation by
    operation."""
    if not uses_only(config, FUSED_FIELDS + MORE_FUSED_FIELDS):
        return False
    if not KERNELS["cpu"] >= FUSED_OPERATIONS:
        return False
    if config.norm == "layer" and config.norm_placement != "before":
        return False
    # Each kind of recurrent token mixer in MORE_FUSED_FIELDS has a convolution.
    if config.recurrent is not None and config.recurrent.conv_width > MAX_CONV_WIDTH:
        return False
    return config.norm in ("rms", "layer") and config.mlp in ("swiglu", "geglu", "gelu", "relu2")


def prepare_experts(experts: nn.Module, dtype: torch.dtype):
    """Let the kernels run a sparse layer, if they know all fields of its config; in prefill only if any of
    its weights are packed, or if torch's products are slower."""
    if not uses_only(experts.config, FUSED_EXPERT_FIELDS):
        return
    layers = [experts.router, experts.gate_up, experts.down]
    if experts.shared is not None:
        layers += [experts.shared_gate, experts.shared.gate_up, experts.shared.down]
    more = {"choice_bias": getattr(experts.choice, "bias", None), "scales": getattr(experts.scales, "weight", None)}
    if experts.norm is not None:
        more |= {"router_norm": experts.router_norm.weight, "norm": experts.norm.weight, "eps": experts.norm.eps}
    experts.run = PreparedExperts(layers, experts.config, dtype, more | {"activation": experts.kind})
    stacks = [experts.gate_up, experts.down]
    is_packed = any(isinstance(stack, PackedLinear) for stack in stacks)
    takes_prefill = is_packed or all(prefills_fast(stack) for stack in stacks)
    experts.max_run_tokens = sys.maxsize if takes_prefill else MAX_DECODE_TOKENS


class FusedBlocks(Registered):
    """All blocks of a model, or some layers of a model that has attention in all, as one operation, for
    Backend.run_blocks. Hooks of a block or its layers are not called.

    It keeps the weights that the blocks have at this time, so a layer that is replaced later has no
    effect.
    """

    def __init__(self, blocks: Iterable[Block], dtype: torch.dtype):
        self.handles = [prepare_block(block, dtype) for block in blocks]
        # Looking up the caches as attributes takes 50 us.
        mixers = [block.mixer for block in blocks]
        self.modules = [mixer._modules for mixer in mixers if not mixer.state.is_recurrent]
        self.experts = [block.sparse for block in blocks]
        states = [mixer.state for mixer in mixers if mixer.state.is_recurrent]
        # Their tensors do not exist yet.
        self.states = {name: [s for s in states if name in s.shapes(torch.float32)] for name in STATE_TENSORS}
        self.keep(torch.ops.fastpath.release_blocks, self.handles, blocks, dtype)

    def __call__(
        self, blocks, x: Tensor, ropes: list, input_pos: Tensor, rows: Tensor | None, own_inputs=None, layers=ALL
    ):
        tables = [rope for rope in ropes if rope is not None]  # (cos, sin) each; empty with ALiBi
        slopes = None
        query_scales = None
        if self.modules:
            positions = self.modules[0]["positions"]
            slopes = positions.slopes
            query_scales = positions.query_scales
        caches = [modules["cache"]._buffers for modules in self.modules[layers]]
        if own_inputs is not None:
            own_inputs = own_inputs[:, :, layers].contiguous()
        states = [[state._buffers[name] for state in states] for name, states in self.states.items()]
        return torch.ops.fastpath.blocks.default(
            x,
            input_pos,
            rows,
            [cos for cos, _ in tables],
            [sin for _, sin in tables],
            slopes,
            query_scales,
            [cache["k"] for cache in caches],
            [cache["v"] for cache in caches],
            *states,
            [experts.counts for sparse in self.experts[layers] for experts in sparse],
            own_inputs,
            self.handles[layers],
        )


class DraftKeys(Registered):
    """What mtp.MTPLayer.read does, as one operation, for Backend.write_draft_keys. It keeps weights
    as FusedBlocks does."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype):
        self.block = prepare_block(layer.block, dtype, only_keys=True)
        self.proj = prepare(layer.proj)
        self.embedding_norm = layer.embedding_norm.weight.float()
        self.hidden_norm = layer.hidden_norm.weight.float()
        self.keep(torch.ops.fastpath.release_blocks, [self.block], layer, dtype)

    def __call__(self, layer, embedded: Tensor, hidden: Tensor, input_pos: Tensor, rows: Tensor | None):
        attention = layer.block.mixer
        torch.ops.fastpath.write_draft_keys.default(
            embedded,
            hidden,
            input_pos,
            rows,
            attention.positions.rope_cos,
            attention.positions.rope_sin,
            layer.hidden.tail,
            attention.cache.k,
            attention.cache.v,
            self.embedding_norm,
            self.hidden_norm,
            self.proj.handle,
            self.block,
        )


def prepare_block(block: Block, dtype: torch.dtype, only_keys: bool = False) -> int:
    """Register a block's weights with the kernels, for activations of this dtype, and return a
    handle to them. only_keys: the block writes keys and values, and does nothing else."""
    linears = block.linears[:1] if only_keys else block.linears
    experts = [] if only_keys else [layer.run.handle for layer in block.sparse]
    layers = {name: prepare(layer) for name, layer in zip(("qkv", "out", "up", "down"), linears)}
    own = block.layer_input
    if own is not None:
        layers |= {"own_gate": prepare(own.gate), "own_proj": prepare(own.proj)}
    return torch.ops.fastpath.prepare_block(
        dtype=dtype,
        eps=block.config.norm_eps,
        residual_scale=block.residual_scale,
        post_norm_residual=block.post_norm_residual,
        layer_scale=1.0 if block.scale is None else block.scale.weight.item(),
        activation=block.config.mlp,
        attention_norm=getattr(block.attention_norm, "weight", None),
        attention_norm_bias=getattr(block.attention_norm, "bias", None),
        attention_post_norm=getattr(block.attention_post_norm, "weight", None),
        mlp_norm=getattr(block.mlp_norm, "weight", None),
        mlp_norm_bias=getattr(block.mlp_norm, "bias", None),
        mlp_post_norm=getattr(block.mlp_post_norm, "weight", None),
        mlp_term_norm=block.experts.mlp_term_norm.weight if block.has_both else None,
        experts_term_norm=block.experts.term_norm.weight if block.has_both else None,
        experts=experts[0] if experts else None,
        **{name: layer.handle for name, layer in layers.items()},  # the block keeps the layers
        own_norm=None if own is None else own.norm.weight,
        rope_table=block.rope_table,
        **block.mixer.block_arguments(),
    )
