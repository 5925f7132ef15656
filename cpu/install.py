"""Builds and installs the C++ kernels of this folder, for x86 processors with AVX-512 or AVX2 under Linux.

Read down: `install`, which makes a loaded model use the kernels; FusedBlocks, which runs all blocks as one operation;
the packed layers; the packing of weights; the instruction sets; the build, which happens at first use. kernels.py says
what each operation computes.

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

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

import sampling  # noqa: F401 (declares two of the operations)
from cli import Stopwatch, UserError, print_status
from config import Config
from cpu.memory import HugePages, keep_freed_memory, release_freed_memory
from cpu.threads import Threads, share_processors
from kernels import (
    FUSED_FIELDS,
    KERNELS,
    MAX_DECODE_TOKENS,
    Backend,
    find_kernels,
    uses_only,
)
from model import Block, Embedding, Linear, Transformer

SOURCES = Path(__file__).resolve().parent
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"]  # and those of an InstructionSet
LANES, GROUP = 16, 32  # rows in a packed block; columns in a packed group
FORMATS_WITH_KERNELS = set()  # names of formats.FORMATS, once the kernels are loaded
# The operations that `blocks` replaces, and its own. If the schema of one was changed in Python only, `blocks` would
# still compute the old operation, so it is not used then.
FUSED_OPERATIONS = {"prepare_layer", "prepare_block", "blocks", "linear", "linear_packed", "rms_norm", "layer_norm"}
FUSED_OPERATIONS |= {"attention"}
# What it computes of model.Config besides kernels.FUSED_FIELDS.
MORE_FUSED_FIELDS = ("qk_norm_whole", "norm_placement", "float32_norms", "residual_scale", "query_scale_beta")

KEPT_BYTES = 1 << 26  # freed memory that is used again while a model is packed
SILENT_TRIES = 10  # attempts to get the lock of the build, 0.1 s apart, before a line says what is waited for

# ---------------------------------------------------------------- install


def prepare_process(threads: int | None):
    """Settings of the whole process: how much freed memory it keeps, and the largest number of threads."""
    keep_freed_memory()
    share_processors() if threads is None else torch.set_num_threads(threads)


def install(model: nn.Module, kernels: str = "auto", exact_activations: bool = False) -> Backend:
    """Load the kernels (`load_kernels`), unless `kernels` is "torch", and pack the model's weights for them, one layer
    at a time. Returns what the model can rely on; where the kernels cannot run, this is only memory in huge pages and
    the tuning of threads.

    Weights (N,K) that are not quantized are packed if they are bfloat16, the processor has AMX, N is a multiple of 16,
    and K of 32. They are packed in place, so no other model may share these tensors. Of a module that is no
    Transformer, only quantized weights are packed.
    """
    backend = Backend(zeros=lambda nbytes, device: HugePages(nbytes).zeros, make_threads=Threads)
    if kernels == "torch" or not load_kernels(kernels):
        return backend
    backend = replace(backend, name=LOADED[0].name)
    if any(is_quantized(module) and not has_format(module) for module in model.modules()):
        from formats import repack_layers

        repack_layers(model, FORMATS_WITH_KERNELS)
    pack = pack_while_reading(model, kernels, exact_activations)
    for name in [name for name, module in model.named_modules() if packed_type(model, module)]:
        pack(name)
    if not isinstance(model, Transformer):
        return backend
    backend = replace(backend, thread_invariant=KERNELS["cpu"] >= {"linear", "attention"})
    if not can_fuse(model.config) or model.shard is not None:  # a split model adds up the ranks' parts in the blocks
        return backend
    all_fused = all(prefills_fast(layer) for block in model.blocks for layer in linears_of(block))
    is_invariant = all_fused and isinstance(model.output or model.embedding, PackedLinear)
    most = sys.maxsize if all_fused else MAX_DECODE_TOKENS
    fused = FusedBlocks(model.blocks, model.dtype)
    return replace(backend, run_blocks=fused, max_fused_tokens=most, chunk_invariant=is_invariant)


def pack_while_reading(model: nn.Module, kernels: str, exact_activations: bool) -> Callable[[str], None]:
    """A function that packs the layer of a name for the kernels, once it has its weights, if they can use it. The
    arguments are those of `install`.

    So a model can be packed while it is read: besides the packed layers, only one is in memory. `model` may be on meta.
    """
    if kernels == "torch" or not load_kernels(kernels):
        return lambda name: None
    ours = [module for module in model.modules() if has_format(module)]
    memory = HugePages(sum(-(-packed_bytes(module) // 64) * 64 for module in ours))  # other tensors are elsewhere

    freed = 0

    def pack(name: str):
        parent = model.get_submodule(name.rpartition(".")[0])
        if is_stack(parent) or isinstance(parent, PackedLinear):  # a stack is packed as a whole
            return
        plain = model.get_submodule(name)
        plain_bytes = sum(tensor.nbytes for tensor in plain.buffers())
        kind = packed_type(model, plain)
        if kind is not None:
            model.set_submodule(name, kind(plain, exact_activations, memory.empty))
            nonlocal freed
            freed += plain_bytes
            if freed > KEPT_BYTES:  # otherwise fragmentation costs up to half the model's size
                freed = 0
                release_freed_memory()

    return pack


def packed_type(model: nn.Module, module: nn.Module) -> type | None:
    """The class of the layer that replaces a module, or None if it stays."""
    if not KERNELS["cpu"] >= {"pack_layer", "prepare_layer", "linear_packed", "embed_packed"}:
        return None
    if has_format(module):
        return PackedEmbedding if hasattr(module, "logits") else PackedLinear
    if is_stack(module) and all(has_format(piece) or not is_quantized(piece) for piece in module):
        return PackedLinear
    if not isinstance(module, (Linear, Embedding)) or not isinstance(model, Transformer) or not allow_amx():
        return None
    is_table = module is model.embedding and model.output is not None  # is looked up, but never multiplied
    N, K = module.weight.shape
    if is_table or N % LANES or K % GROUP or module.weight.dtype != torch.bfloat16:  # padding would make it larger
        return None
    return PackedEmbedding if isinstance(module, Embedding) else PackedLinear


def is_quantized(module: nn.Module) -> bool:
    """Whether this is a formats.QuantizedLinear. (formats.py is imported for quantized checkpoints only.)"""
    return hasattr(module, "scheme")


def has_format(module: nn.Module) -> bool:
    """Whether this is a QuantizedLinear in a format that has kernels."""
    return is_quantized(module) and module.scheme.format in FORMATS_WITH_KERNELS


def prefills_fast(layer: nn.Module) -> bool:
    """Whether prefill uses our products for a layer. If its weights are not packed, those of torch are faster, but for
    bfloat16 on processors that cannot multiply it."""
    if isinstance(layer, PackedLinear):
        return True
    has_fast_bf16 = LOADED[0].name == AVX512.name and "avx512_bf16" in processor_flags()
    return layer.weight.dtype == torch.bfloat16 and not has_fast_bf16


def is_stack(module: nn.Module) -> bool:
    """Whether this is a formats.StackedLinear."""
    return isinstance(module, nn.ModuleList) and hasattr(module, "bias")


def can_fuse(config: Config) -> bool:
    """Whether the fused operation `blocks` supports this architecture; other models run operation by operation."""
    known = uses_only(config, FUSED_FIELDS + MORE_FUSED_FIELDS) and KERNELS["cpu"] >= FUSED_OPERATIONS
    has_norms = config.norm == "rms" or (config.norm == "layer" and config.norm_placement == "before")
    return known and has_norms and config.mlp in ("swiglu", "geglu", "gelu")


class FusedBlocks:
    """All blocks of a model as one operation, for Backend.run_blocks. Hooks of a block or its layers are not called.

    It keeps the weights that the blocks have at this time, so a layer that is replaced later has no effect.
    """

    def __init__(self, blocks: nn.ModuleList, dtype: torch.dtype):
        self.handles = [prepare_block(block, dtype) for block in blocks]
        # Looking up the caches as attributes takes 50 us.
        self.modules = [block.attention._modules for block in blocks]
        weakref.finalize(self, torch.ops.fastpath.release_blocks, self.handles).atexit = False

    def __call__(self, blocks, x: Tensor, ropes: list, input_pos: Tensor, rows: Tensor | None):
        cos, sin = ([], []) if ropes[0] is None else map(list, zip(*ropes))
        caches = [modules["cache"]._buffers for modules in self.modules]
        k_caches, v_caches = ([cache[name] for cache in caches] for name in ("k", "v"))
        positions = self.modules[0]["positions"]
        places = (input_pos, rows, cos, sin, positions.slopes, positions.query_scales)
        return torch.ops.fastpath.blocks.default(x, *places, k_caches, v_caches, self.handles)


def linears_of(block: Block) -> list[nn.Module]:
    """The linear layers of a block: qkv, out, up (or gate and up), down."""
    mlp = block.mlp
    return [block.attention.qkv, block.attention.out, mlp.gate_up if mlp.gated else mlp.up, mlp.down]


def prepare_block(block: Block, dtype: torch.dtype) -> int:
    """Register a block's weights with the kernels, for activations of this dtype; returns a handle to them."""
    attention, mlp = block.attention, block.mlp
    config = attention.config
    norms = [part for norm in (block.attention_norm, block.mlp_norm) for part in (weight_of(norm), biases(norm))]
    others = (attention.q_norm, attention.k_norm, block.attention_post_norm, block.mlp_post_norm)
    norms += [weight_of(norm) for norm in others]
    layers = [PreparedLayer.of(layer) for layer in linears_of(block)]  # the block keeps them when these are released
    sizes = [config.n_head, config.n_kv_head, config.head_dim, config.dim, config.hidden_dim]
    switches = (mlp.kind, config.qk_norm_whole, block.post_norm_residual, block.rope_table)
    settings = (attention.window, attention.scale, config.norm_eps, block.residual_scale, *switches)
    return torch.ops.fastpath.prepare_block(norms, [layer.handle for layer in layers], sizes, dtype, *settings)


def weight_of(norm: nn.Module | None) -> Tensor | None:
    return None if norm is None else norm.weight


def biases(module: nn.Module) -> Tensor | None:
    return getattr(module, "bias", None)


class PreparedLayer:
    """A layer that the kernels know by its handle, which is released with this object."""

    def __init__(self, operation: str, *arguments):
        """operation: prepare_layer or stack_layers, whose argument `layers` is a list of PreparedLayers here."""
        self.arguments = (operation, *arguments)
        handles = ([one.handle for one in given] if isinstance(given, list) else given for given in arguments)
        self.handle = getattr(torch.ops.fastpath, operation)(*handles)
        weakref.finalize(self, torch.ops.fastpath.release_layers, [self.handle]).atexit = False

    def __reduce__(self):  # a copy gets a handle of its own
        return PreparedLayer, self.arguments

    @classmethod
    def of(cls, layer: nn.Module) -> "PreparedLayer":
        """Of a packed layer, or of a Linear or an Embedding as it is."""
        if isinstance(layer, PackedLinear):
            return layer.prepared
        return cls("prepare_layer", "dense", layer.weight, biases(layer), *layer.weight.shape, 0, True)


class PackedLinear(nn.Module):
    """A linear layer, with its weights packed for the kernels. empty: makes the memory for them."""

    def __init__(self, plain: nn.Module, exact: bool, empty: Callable = torch.empty):
        super().__init__()
        self.register_buffer("bias", biases(plain))
        self.stored_as = getattr(plain, "stored_as", None)
        if is_stack(plain):
            # A piece that is not quantized stays as it is.
            pieces = [PackedLinear(piece, exact, empty) if is_quantized(piece) else piece for piece in plain]
            self.pieces = nn.ModuleList(pieces)
            prepared = [PreparedLayer.of(piece) for piece in pieces]
            self.out_features = sum(piece.out_features for piece in pieces)
            self.in_features = pieces[0].in_features
            self.prepared = PreparedLayer("stack_layers", prepared, self.bias)
            return
        if is_quantized(plain):
            self.out_features, self.in_features = plain.out_features, plain.in_features
            format, groupsize = plain.scheme.format, plain.groupsize
            weight = empty((packed_bytes(plain),), dtype=torch.uint8)
            parts = [part.contiguous() for part in plain.parts().values()]
            torch.ops.fastpath.pack_layer(format, parts, self.in_features, groupsize, weight)
        else:
            self.out_features, self.in_features = plain.weight.shape
            format, groupsize = "tiles", 0
            weight = plain.weight.detach().contiguous()
            packed = pack_bfloat16(weight)
            weight = weight.view(packed.shape).copy_(packed)  # in place: two copies may not fit into memory
        self.register_buffer("weight", weight)
        sizes = (self.out_features, self.in_features, groupsize, exact)
        self.prepared = PreparedLayer("prepare_layer", format, weight, self.bias, *sizes)

    def forward(self, x: Tensor):
        return torch.ops.fastpath.linear_packed.default(x, self.prepared.handle, self.out_features)


class PackedEmbedding(PackedLinear):
    """An embedding; if the output head is tied to it, `logits` computes the head with the same weights."""

    logits = PackedLinear.forward

    def forward(self, tokens: Tensor):  # (B,S) to (B,S,D) float32, or bfloat16 if the weights are
        if self.weight.dtype != torch.bfloat16:
            return torch.ops.fastpath.embed_packed.default(tokens, self.prepared.handle, self.in_features)
        return self.weight[tokens // LANES, :, :, tokens % LANES].flatten(-3)


# ---------------------------------------------------------------- packing
#
# formats.h and products.h describe the layouts. Nb: blocks of 16 rows (LANES); Kb: groups of 32 columns (GROUP).


def packed_bytes(plain: nn.Module) -> int:
    """Of the packed matrix of a QuantizedLinear, or of those in a StackedLinear; 0 for other layers."""
    if is_stack(plain):
        return sum(map(packed_bytes, plain))
    if not is_quantized(plain):
        return 0
    sizes = (plain.out_features, plain.in_features, plain.groupsize)
    return torch.ops.fastpath.packed_bytes(plain.scheme.format, *sizes)


def pack_bfloat16(weight: Tensor) -> Tensor:
    """Pack bfloat16 (N,K) to (Nb,Kb,16,16,2): of each group 16 times 2 columns, for 16 rows. N and K are multiples."""
    return weight.view(-1, LANES, weight.shape[1] // GROUP, 16, 2).permute(0, 2, 3, 1, 4).contiguous()


# ---------------------------------------------------------------- the instruction sets


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that the kernels are compiled for."""

    name: str  # as --kernels takes it
    needs: frozenset[str]  # flags of the processor, as Linux names them
    flags: tuple[str, ...]  # of the compiler

    def is_in(self, processor: frozenset[str]) -> bool:
        return self.needs <= processor


# The best one first. With -march=native, the compiler also uses VNNI, BF16 and AMX where the processor has them.
AVX512 = InstructionSet(
    "avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}), ("-march=native", "-DVECTOR_BITS=512")
)
AVX2 = InstructionSet("avx2", frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-march=x86-64-v3", "-DVECTOR_BITS=256"))
AVX2_VNNI = InstructionSet("avx2-vnni", AVX2.needs | {"avx_vnni"}, (*AVX2.flags, "-mavxvnni"))
INSTRUCTION_SETS = [AVX512, AVX2_VNNI, AVX2]
LOADED: list[InstructionSet] = []  # the one of the loaded kernels
INSTEAD = "PyTorch's own operations run instead, which decode several times more slowly"


@cache
def processor_flags() -> frozenset[str]:
    """What /proc/cpuinfo says that the processor can do. Empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), ":").partition(":")[2].split())


def choose_instruction_set(kernels: str) -> InstructionSet:
    """The best of INSTRUCTION_SETS that this processor has, or with "avx2" the best one in 256 bits. UserError with the
    reason if there is none."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise UserError(
            f"the CPU kernels are for x86 processors under Linux, not for {platform.machine()} under {sys.platform}"
        )
    choices = [one for one in INSTRUCTION_SETS if one.name.startswith(kernels) or kernels == "auto"]
    found = next((one for one in choices if one.is_in(processor_flags())), None)
    if found is None:
        missing = ", ".join(sorted(choices[-1].needs - processor_flags()))
        raise UserError(f"the CPU kernels need AVX2, and this processor lacks {missing}")
    return found


# ---------------------------------------------------------------- the build


def load_kernels(kernels: str = "auto") -> bool:
    """Build the kernels if no build is cached, and load them: those of choose_instruction_set(kernels). A process has
    only one set. If there is none, print the reason and return False."""
    if LOADED and not LOADED[0].name.startswith(kernels) and kernels != "auto":
        raise UserError(f"--kernels {kernels}: this process has loaded those for {LOADED[0].name} already")
    return bool(LOADED) or try_to_load(kernels)


@cache
def try_to_load(kernels: str) -> bool:
    try:
        chosen, compiler = choose_instruction_set(kernels), find_compiler()
    except UserError as error:
        print_status(f"{error}; {INSTEAD}")
        return False
    try:
        library = str(build(compiler, chosen))
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        print_status(f"the CPU kernels cannot be built with {compiler} (GCC 11 or clang 14 can): {why}; {INSTEAD}")
        return False
    functions = ctypes.CDLL(library)
    for function in (functions.register_kernels, functions.format_names):
        function.restype = ctypes.c_char_p
    FORMATS_WITH_KERNELS.update(functions.format_names().decode().split())
    if misfits := functions.register_kernels().decode():
        print_status(f"kernels in cpu/ do not fit their schemas in Python, so the references run: {misfits}")
    find_kernels("cpu")
    LOADED.append(chosen)
    allow_amx()
    if chosen is not AVX512 and kernels == "auto":
        missing = ", ".join(sorted(AVX512.needs - processor_flags()))
        print_status(f"the CPU kernels for {chosen.name} run: for the faster ones, this processor lacks {missing}")
    return True


def find_compiler() -> str:
    found = next(filter(shutil.which, [os.environ.get("CXX", ""), "g++", "clang++", "c++"]), None)
    if found is None:
        raise UserError("no C++ compiler for the CPU kernels: install g++ (Debian, Ubuntu), gcc-c++ (Fedora) or clang")
    return found


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


def run_compiler(command: list[str]) -> str:
    """Run the compiler and return what it printed. RuntimeError, with its first error, if it fails.

    Its messages are asked for in English. They may quote names and source code in any encoding.
    """
    english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, env=english, encoding="utf-8", errors="replace")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["the compiler failed"]
        raise RuntimeError(errors[0])
    return done.stdout


def wait_for_lock(lock: TextIO):
    """Lock a file against other processes that build the kernels. If this takes long, say so. The lock of a process
    that is killed is free at once."""
    import fcntl  # not on Windows

    for _ in range(SILENT_TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.1)
    with Stopwatch("waiting for another process that builds the CPU kernels"):
        fcntl.flock(lock, fcntl.LOCK_EX)


def build(compiler: str, instructions: InstructionSet) -> Path:
    """Compile the C++ files to a cached library, and return its path. If several processes need it at once, one builds
    it and the others wait. Raises RuntimeError with the compiler's first error."""
    flags = [*FLAGS, *instructions.flags]
    home = Path(torch.__file__).parent
    include = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    link = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    version = run_compiler([compiler, "--version"])
    processor = sorted(processor_flags())  # -march=native depends on it
    paths = sorted([*SOURCES.glob("[!.]*.h"), *SOURCES.glob("[!.]*.cpp")])  # without the hidden files of editors
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
    key = repr((sources, compiler, version, flags, torch.__version__, processor))
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
    path = folder / name
    with lock:
        if path.exists():
            return path
        wait_for_lock(lock)
        if not path.exists():
            with (
                Stopwatch("building the CPU kernels", "some 40 seconds, once"),
                tempfile.TemporaryDirectory(dir=folder, prefix=".build.") as temporary,
                ThreadPoolExecutor() as pool,
            ):
                files = [path for path in paths if path.suffix == ".cpp"]
                objects = [f"{temporary}/{file.stem}.o" for file in files]
                compile_one = [compiler, *flags, *include, "-c"]
                list(pool.map(run_compiler, ([*compile_one, str(f), "-o", o] for f, o in zip(files, objects))))
                run_compiler([compiler, *flags, "-shared", *objects, "-o", f"{temporary}/{name}", *link])
                Path(temporary, name).replace(path)
    return path
