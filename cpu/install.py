"""Builds and installs the C++ kernels of cpu/, for CPUs with AVX-512.

Read down: `install`, which makes a loaded model use the kernels; FusedBlocks, which runs all blocks as one operation;
the packed layers; the packing of weights; the build, which happens at first use. kernels.py says what each operation
computes.

Decoding is memory-bound: its speed is limited by reading the weights. torch's own products with one row use only a part
of the memory bandwidth; these kernels use most of it. The bits of a row's result depend neither on the other rows
nor on the number of threads. bfloat16 weights, and quantized ones with more than eight rows, are multiplied with AMX,
the matrix unit of some Intel processors, if there is one. With other weights that are not quantized, a prefill (more
than 16 new tokens per row) uses torch's own products. Otherwise prefill and decoding use the same kernels, so they give
the same bits.

If the weights are quantized, the activations are quantized as well, to 8 bits in groups of 32 columns, as in llama.cpp:
products are then sums of integers. With exact activations, and always if the activations are float32, the kernels
convert the weights to float32 in registers instead.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cli import HugePages, Stopwatch, print_status, release_freed_memory
from formats import Int4Embedding, Int4Linear, Int8Embedding, Int8Linear
from kernels import DEVICES_WITH_KERNELS, FUSED_FIELDS, MAX_DECODE_TOKENS, unpack_levels, unpack_nibbles, uses_only
from model import Block, Config, Embedding, Linear, Transformer

SOURCES = Path(__file__).resolve().parent
FLAGS = ["-O3", "-march=native", "-std=c++20", "-fopenmp", "-shared", "-fPIC", "-w"]
LANES, GROUP = 16, 32  # rows in a packed block; columns in a packed group

# ---------------------------------------------------------------- install


def install(model: nn.Module, exact_activations: bool = False) -> bool:
    """Load the kernels, pack the model's weights for them one layer at a time, and run its blocks as one operation
    where that is supported. Where the kernels cannot run, change nothing and return False.

    Weights (N,K) that are not quantized are packed if they are bfloat16, the processor has AMX, N is a multiple of 16,
    and K of 32. This happens in the memory of the model's tensors, so nobody else may use them. Of a module that is no
    Transformer, only quantized weights are packed.
    """
    if model.device.type != "cpu" or not load_kernels():
        return False
    layers = {name: module for name, module in model.named_modules() if packed_type(model, module)}
    # Of quantized weights; the extra 5 % are for padded rows and columns. Other tensors are allocated separately.
    memory = HugePages(sum(tensor.nbytes for layer in layers.values() for tensor in layer.buffers()) * 21 // 20)
    for name in list(layers):
        plain = layers.pop(name)
        model.set_submodule(name, packed_type(model, plain)(plain, exact_activations, memory.copy))
        del plain
        release_freed_memory()  # otherwise fragmentation costs up to half the model's size
    if not isinstance(model, Transformer):
        return True
    # A prefill is compute-bound. If weights are not packed, torch's products are faster, so it runs block by block.
    all_packed = all(isinstance(layer, PackedLinear) for block in model.blocks for layer in linears_of(block))
    model.max_kernel_tokens = sys.maxsize if all_packed else MAX_DECODE_TOKENS
    if can_fuse(model.config) and model.split is None:  # tensor parallelism has all-reduces inside the blocks
        model.fused = FusedBlocks(model.blocks)
        model.chunk_invariant = all_packed and isinstance(model.output or model.embedding, PackedLinear)
    return True


def packed_type(model: nn.Module, module: nn.Module) -> type | None:
    """The class of the layer that replaces a module, or None if it stays."""
    if type(module) in PACKED:
        return PACKED[type(module)]
    if type(module) not in PACKED_FOR_AMX or not isinstance(model, Transformer) or not allow_amx():
        return None
    is_table = module is model.embedding and model.output is not None  # is looked up, but never multiplied
    N, K = module.weight.shape
    fits = N % LANES == 0 and K % GROUP == 0  # otherwise the packed weights would be larger
    return PACKED_FOR_AMX[type(module)] if fits and not is_table and module.weight.dtype == torch.bfloat16 else None


def can_fuse(config: Config) -> bool:
    """Whether the fused operation `blocks` supports this architecture; other models run operation by operation."""
    known = uses_only(config, FUSED_FIELDS)
    return known and config.norm in ("rms", "layer") and config.mlp in ("swiglu", "gelu")


class FusedBlocks:
    """All blocks of a model as one operation, for Transformer.fused. Hooks of a block or its layers are not called.

    It keeps the weights that the blocks have at this time, so a layer that is replaced later has no effect.
    """

    def __init__(self, blocks: nn.ModuleList):
        self.handles = [prepare_block(block) for block in blocks]
        self.buffers = [block.attention._buffers for block in blocks]  # looking up the caches as attributes takes 50 us
        weakref.finalize(self, torch.ops.fastpath.release_blocks, self.handles).atexit = False

    def __call__(self, blocks, x: Tensor, rope: tuple[Tensor, Tensor] | None, input_pos: Tensor, rows: Tensor | None):
        cos, sin = rope or (None, None)
        k_caches, v_caches = ([buffers[name] for buffers in self.buffers] for name in ("k_cache", "v_cache"))
        slopes = self.buffers[0]["slopes"]
        places = (input_pos, rows, cos, sin, slopes)
        return torch.ops.fastpath.blocks.default(x, *places, k_caches, v_caches, self.handles)


def linears_of(block: Block) -> list[nn.Module]:
    """The linear layers of a block: qkv, out, up (or gate and up), down."""
    mlp = block.mlp
    return [block.attention.qkv, block.attention.out, mlp.gate_up if mlp.gated else mlp.up, mlp.down]


def prepare_block(block: Block) -> int:
    """Register a block's weights with the kernels; returns a handle to them."""
    attention, mlp, config = block.attention, block.mlp, block.attention.config
    linears, norms = linears_of(block), [block.attention_norm, block.mlp_norm]
    weights = [tensor for norm in norms for tensor in (norm.weight, getattr(norm, "bias", None))]
    weights += [norm and norm.weight for norm in (attention.q_norm, attention.k_norm)]
    for layer in linears:
        weights += [layer.weight, getattr(layer, "scales", None), getattr(layer, "mins", None), layer.bias]
    sizes = [config.n_head, config.n_kv_head, config.head_dim, config.hidden_dim]
    sizes += [getattr(layer, "groupsize", 0) for layer in linears]
    exact = any(getattr(layer, "exact", False) for layer in linears)
    settings = (attention.window, config.norm_eps, mlp.gated, block.post_norm_residual, exact)
    return torch.ops.fastpath.prepare_block(weights, sizes, *settings)


class PackedLinear(nn.Module):
    """A linear layer, with its weights packed for the kernels. copy: moves a tensor to other memory."""

    def __init__(self, plain: nn.Module, exact: bool, copy: Callable = lambda tensor: tensor):
        super().__init__()
        if isinstance(plain, (Linear, Embedding)):
            self._hold_bfloat16(plain)
        else:
            self._hold_quantized(plain, exact, copy)

    def _hold_bfloat16(self, plain: Linear | Embedding):
        self.out_features, self.in_features = plain.weight.shape
        weight = plain.weight.detach().contiguous()
        packed = pack_bfloat16(weight)
        weight = weight.view(packed.shape).copy_(packed)  # in place: two copies may not fit into memory
        self.register_buffer("weight", weight)
        self.register_buffer("bias", getattr(plain, "bias", None))
        self.mins, self.exact = None, False
        self.operation = torch.ops.fastpath.linear_bfloat16.default
        self.arguments = self.weight, self.bias, self.out_features

    def _hold_quantized(self, plain: Int8Linear | Int4Linear, exact: bool, copy: Callable):
        self.in_features, self.out_features, self.groupsize = plain.in_features, plain.out_features, plain.groupsize
        is_int8 = isinstance(plain, Int8Linear)
        weight = pack_int8(plain.weight) if is_int8 else pack_int4(plain.packed, plain.in_features)
        self.register_buffer("weight", copy(weight))
        self.register_buffer("scales", copy(pack_groups(plain.scales)))
        self.register_buffer("mins", None if is_int8 else copy(pack_groups(plain.mins)))
        self.register_buffer("bias", plain.bias)
        self.operation = torch.ops.fastpath.linear_int8.default if is_int8 else torch.ops.fastpath.linear_int4.default
        # Looking up buffers in an nn.Module takes as long as a small product, so the arguments are collected once.
        tensors = (self.weight, self.scales) if is_int8 else (self.weight, self.scales, self.mins)
        self.exact = exact
        self.arguments = (*tensors, self.groupsize, self.bias, self.out_features, exact)

    def forward(self, x: Tensor):
        return self.operation(x, *self.arguments)


class PackedEmbedding(PackedLinear):
    """An embedding; if the output head is tied to it, `logits` computes the head with the same weights."""

    logits = PackedLinear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32, or bfloat16 if the weights are
        block, lane = tokens // LANES, tokens % LANES
        q = self.weight[block, :, :, lane].flatten(-3)  # (B,S,Kb*32), or (B,S,Kb*16) with two nibbles per byte
        if q.dtype == torch.bfloat16:
            return q
        if self.mins is None:
            q, mins = q.view(torch.int8) ^ -128, None
        else:
            q = torch.stack([q.unflatten(-1, (-1, GROUP // 2)) & 15, q.unflatten(-1, (-1, GROUP // 2)) >> 4], -2)
            q, mins = q.flatten(-3), self.mins[block, :, lane]
        return unpack_levels(q[..., : self.in_features], self.scales[block, :, lane], mins, self.groupsize)


PACKED = {Int8Linear: PackedLinear, Int4Linear: PackedLinear}
PACKED |= {Int8Embedding: PackedEmbedding, Int4Embedding: PackedEmbedding}
PACKED_FOR_AMX = {Linear: PackedLinear, Embedding: PackedEmbedding}  # in bfloat16

# ---------------------------------------------------------------- packing
#
# cpu/products.h describes the layouts. Nb: blocks of 16 rows (LANES); Kb: groups of 32 columns (GROUP).


def pad_to_multiple(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad x (N,K) with zeros to multiples of `rows` and `columns`."""
    missing = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    return F.pad(x, missing) if any(missing) else x


def pack_bfloat16(weight: Tensor) -> Tensor:
    """Pack bfloat16 (N,K) to (Nb,Kb,16,16,2): of each group 16 times 2 columns, for 16 rows. N and K are multiples."""
    return weight.view(-1, LANES, weight.shape[1] // GROUP, 16, 2).permute(0, 2, 3, 1, 4).contiguous()


def pack_int8(weight: Tensor) -> Tensor:
    """Pack int8 (N,K) to uint8 (Nb,Kb,8,16,4): of each group 8 times 4 columns, for 16 rows."""
    q = pad_to_multiple(weight, LANES, GROUP).view(torch.uint8)
    q = q.view(-1, LANES, q.shape[1] // GROUP, 8, 4).permute(0, 2, 3, 1, 4).contiguous()
    return q.bitwise_xor_(128)  # q + 128, as uint8


def pack_int4(packed: Tensor, K: int) -> Tensor:
    """Repack uint8 (N,ceil(K/2)) to uint8 (Nb,Kb,4,16,4). A byte then holds two columns that are 16 apart."""
    q = pad_to_multiple(unpack_nibbles(packed, K), LANES, GROUP)
    q = q.view(-1, LANES, q.shape[1] // GROUP, 2, 4, 4)  # (Nb,16,Kb,2,4,4)
    return (q[:, :, :, 0] | q[:, :, :, 1] << 4).permute(0, 2, 3, 1, 4).contiguous()


def pack_groups(x: Tensor) -> Tensor:
    """Pack scales or mins, float16 (N,G), to (Nb,G,16)."""
    return pad_to_multiple(x, LANES, 1).view(-1, LANES, x.shape[1]).transpose(1, 2).contiguous()


# ---------------------------------------------------------------- the build


@cache
def load_kernels() -> bool:
    """Build the kernels if no build is cached, and load them. If that fails, print the reason and return False."""
    if not all(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512", "avx512_bf16", "vnni")):
        return False  # without a message, because the user cannot change the CPU
    compiler = next(filter(shutil.which, [os.environ.get("CXX", ""), "g++", "clang++", "c++"]), None)
    if compiler is None:
        print_status("no C++ compiler (g++, clang++, CXX=...): the CPU kernels are not built, torch's own are used")
        return False
    try:
        torch.ops.load_library(str(build(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        why = str(error).strip().splitlines()[-1]
        print_status(f"the CPU kernels cannot be built, torch's own operations are used: {why}")
        return False
    allow_amx()
    DEVICES_WITH_KERNELS.add("cpu")
    return True


@cache
def allow_amx() -> bool:
    """Let the loaded kernels use the processor's matrix unit, AMX, if there is one, ONEDNN_MAX_CPU_ISA does not exclude
    it, and Linux grants it. Returns whether they use it.

    ONEDNN_MAX_CPU_ISA is set by users who do not want AMX, and by kernels.guard_amx where AMX kills the process.
    """
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # the instructions that oneDNN may use as well
    wanted = most in ("", "ALL", "DEFAULT") or "AMX" in most
    works = wanted and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return torch.ops.fastpath.allow_amx(works)


def build(compiler: str) -> Path:
    """Compile the kernels to a cached library, and return its path. If several processes need it at once, one builds
    it and the others wait. Raises RuntimeError with the compiler's first error."""
    home = Path(torch.__file__).parent
    include = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    link = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line for line in lines if line.startswith("flags")), "")  # -march=native depends on the CPU
    paths = sorted([*SOURCES.glob("[!.]*.h"), *SOURCES.glob("[!.]*.cpp")])  # without the hidden files of editors
    sources = [path.read_text() for path in paths if path.is_file()]
    key = repr((sources, compiler, version, FLAGS, torch.__version__, cpu))
    name = f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastpath"
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "kernels.lock", "w")  # noqa: SIM115
    except (OSError, RuntimeError):  # no home directory, or not writable
        folder = Path(tempfile.gettempdir()) / f"fastpath-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if (about := folder.lstat()).st_uid != os.getuid() or about.st_mode & 0o077:
            raise OSError(f"{folder} belongs to somebody else, or lets others write") from None
        lock = open(folder / "kernels.lock", "w")  # noqa: SIM115
    path, temporary = folder / name, folder / f".{name}.{os.getpid()}"
    with lock:
        if path.exists():
            return path
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            command = [compiler, *FLAGS, *include, str(SOURCES / "operations.cpp"), "-o", str(temporary), *link]
            with Stopwatch("building the CPU kernels", "some 15 seconds, once"):
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                temporary.unlink(missing_ok=True)
                errors = [line for line in done.stderr.splitlines() if "error" in line] or ["the compiler failed"]
                raise RuntimeError(errors[0])
            temporary.replace(path)
    return path
