"""From options to an engine: the checkpoint, the device, the kernels, the weights, the drafts.

Read down: ModelOptions and the command-line options that it is made of; `open_checkpoint`;
`load_engine`; `load_model`; the kernels. The files of optional features are imported only if they
are used.
"""

import argparse
import os
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoint import (
    DTYPES,
    Checkpoint,
    available_memory,
    check_memory,
    is_ours,
    open_directory,
    read_weights,
)
from cli import UserError, add_model_name, first_line, natural, positive, print_status
from compile import compiled_steps
from config import Config
from engine import Engine, EngineOptions, SingleProcess
from formats import QuantizedLinear, repack_layers
from kernels import MAX_DECODE_TOKENS, Installer
from model import WHOLE_MODEL, Transformer, state_bytes
from sampling import SamplingParams, recommended_params
from watchdog import watch

DRAFT_KINDS = ("prompt-lookup", "lookup:FILE", "mtp", "medusa", "medusa:FILE", "int4-self", "none")
KERNEL_CHOICES = ("auto", "avx2", "torch")
DEFAULT_HEADS = Path(__file__).parent / "training" / "SmolLM2-135M-Instruct-medusa.safetensors"
CACHE_LENGTHS = (512, 2048, 8192, 32768, 131072)  # only a few: each needs its own compiled graphs

# ---------------------------------------------------------------- options


@dataclass(frozen=True)
class DraftOption:
    """A value of --draft."""

    kind: str  # one of DRAFT_KINDS, without :FILE
    path: str = ""  # FILE

    @classmethod
    def parse(cls, text: str) -> "DraftOption":
        kind, _, path = text.partition(":")
        form = f"{kind}:FILE" if path else text
        if form not in DRAFT_KINDS:
            raise UserError(f"--draft {text!r} is not one of {', '.join(DRAFT_KINDS)}")
        return cls(kind, path)


@dataclass
class ModelOptions:
    """Which model runs, and how.

    The fields have the names of the command-line options (`add_model_options`), and take their
    values. Raises UserError if one is wrong, or if some contradict each other.
    """

    checkpoint_path: str | None = None  # None: the default model
    device: str | None = None  # None: the fastest that is available
    dtype: torch.dtype | str = torch.bfloat16
    dequantize: bool = False
    max_seq_length: int | None = None
    generation_config: str = "auto"
    snapshot_mb: int | None = None
    kernels: str = "auto"
    exact_activations: bool = False
    threads: int | None = None
    compile: bool = False
    compile_prefill: bool = False
    draft_checkpoint_path: str | None = None
    draft: list[DraftOption | str] = field(default_factory=list)
    speculate_k: int | str | None = None
    # Not a command-line option. True: prompt lookup and the model's layer that drafts tokens, if it has
    # one, are the drafts where they cannot change a token.
    drafts_by_default: bool = False
    from_command_line: bool = field(default=False, compare=False)  # errors name options; otherwise fields

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, converses: bool = False) -> "ModelOptions":
        """The options of a command line, which may have some of them only. converses: whether the
        program holds conversations, in which there are drafts by default."""
        names = [field.name for field in fields(cls) if hasattr(args, field.name)]
        given = {name: getattr(args, name) for name in names}
        asks = given.get("draft") or given.get("draft_checkpoint_path") is not None
        by_default = converses and not asks and not given.get("compile")
        return cls(drafts_by_default=by_default, from_command_line=True, **given)

    def __post_init__(self):
        with self.naming():
            self._check()

    @contextmanager
    def naming(self):
        """A context in which errors name the fields, without dashes, unless a command line gave them."""
        try:
            yield
        except UserError as error:
            if self.from_command_line:
                raise
            raise UserError(re.sub("--(?=[a-z])", "", str(error))) from None

    def _check(self):
        self.dtype = DTYPES.get(self.dtype, self.dtype)
        if self.dtype not in DTYPES.values():
            raise UserError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.kernels not in KERNEL_CHOICES:
            raise UserError(f"--kernels {self.kernels!r} is not one of {', '.join(KERNEL_CHOICES)}")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise UserError(f"--threads must be between 1 and 1024, not {self.threads}")

        given = [DraftOption.parse(draft) if isinstance(draft, str) else draft for draft in self.draft]
        self.draft = [draft for draft in given if draft.kind != "none"]
        if self.speculate_k is not None:
            self.speculate_k = draft_length(self.speculate_k)
            if not self.speculates and not self.drafts_by_default:
                raise UserError("--speculate_k needs something that proposes: --draft_checkpoint_path or --draft")
        if len(self.draft) < len(given) and (len(given) > 1 or self.speculates):
            raise UserError("--draft none and other drafts exclude each other")
        kinds = self.draft_kinds
        if twice := [kind for kind in kinds if kind != "lookup" and kinds.count(kind) > 1]:
            raise UserError(f"--draft {twice[0]} is given twice")

    @property
    def draft_kinds(self) -> list[str]:
        """The kinds that --draft asks for."""
        return [draft.kind for draft in self.draft]

    @property
    def heads_path(self) -> Path:
        """The file of --draft medusa:FILE, by default that of the default model."""
        paths = [draft.path for draft in self.draft if draft.kind == "medusa" and draft.path]
        return Path(os.path.expanduser(paths[0])) if paths else DEFAULT_HEADS

    @property
    def speculates(self) -> bool:
        """Whether there is a draft."""
        return bool(self.draft) or self.draft_checkpoint_path is not None


class ListModels(argparse.Action):
    """--list: print the models on this machine, and exit."""

    def __call__(self, parser, *_):
        from sources.names import print_models

        print_models()
        parser.exit()


def add_loading_options(parser: argparse.ArgumentParser) -> Callable:
    """Add the options that say which model is loaded, and how. Returns the method that adds others
    to the same group."""
    add = parser.add_argument_group("the model and the machine").add_argument
    what = (
        "a GGUF file, a Hugging Face directory or hub id, a GGUF file of the hub "
        "(organization/name:Q4_K_M), a short name (--list), or a checkpoint directory; "
        "default: SmolLM2-135M-Instruct, a small demo"
    )
    add_model_name(parser, add, what)
    add("--list", action=ListModels, nargs=0, help="list the models that are on this machine, with their sizes")
    add("--device", help="cpu, cuda, cuda:1, mps ...; default: the fastest that is available")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the KV cache, and of weights that are not quantized")
    add("--dequantize", action="store_true", help="unpack quantized weights to --dtype, which takes more memory")
    kernels = "auto: the fastest of our kernels; avx2: those for CPUs without AVX-512; torch: PyTorch's own operations"
    add("--kernels", choices=KERNEL_CHOICES, default="auto", help=kernels)
    add("--exact_activations", action="store_true", help="do not quantize activations to 8 bits (CPU)")
    return add


def add_model_options(parser: argparse.ArgumentParser, default_length: str):
    """Add the options of ModelOptions. default_length: that of --max_seq_length, in words."""
    add = add_loading_options(parser)
    add("--max_seq_length", type=positive, help=f"KV cache positions per row; default: {default_length}")
    snapshots = (
        "memory for snapshots of recurrent states (Qwen3.5, LFM2), from which later prompts go on; "
        "default: as much as all keys and values take, but enough for 4 snapshots a row, "
        "and no more than for one in 128 positions"
    )
    add("--snapshot_mb", type=natural, metavar="MB", help=snapshots)
    own = "where default sampling settings come from. auto: the model's files; none: the same for all models"
    add("--generation_config", choices=("auto", "none"), default="auto", help=own)
    threads = "CPU threads for each step; default: the number that is fastest at the moment, up to OMP_NUM_THREADS"
    add("--threads", type=int, metavar="N", help=threads)
    add("--compile", action="store_true", help="compile the decode step with torch.compile")
    add("--compile_prefill", action="store_true", help="compile prefill with torch.compile")

    add = parser.add_argument_group("speculation: several tokens per pass over the weights").add_argument
    add("--draft_checkpoint_path", metavar="PATH", help="a smaller model with the same vocabulary proposes tokens")
    heads = DEFAULT_HEADS.relative_to(Path(__file__).parent)
    kinds = (
        "prompt-lookup: propose what followed the latest tokens earlier in the text; "
        "lookup:FILE: search this text file, too; "
        "mtp: the layer of Qwen3.5's checkpoints that was trained for this; "
        f"medusa or medusa:FILE: heads that were trained for the model (default: {heads}); "
        "int4-self: the model itself in 4 bits (--draft_checkpoint_path may name that copy). "
        "May be repeated; none: no draft. Default: prompt-lookup, and mtp if the model has the layer, in "
        "conversations and in serve.py, with the CPU kernels and without --compile; otherwise none"
    )
    add("--draft", metavar="KIND", action="append", default=[], help=kinds)
    add("--speculate_k", metavar="N", help="tokens to propose per step; auto (the default): what is fastest")


def draft_length(given: int | str) -> int | str:
    """The value of --speculate_k."""
    text = str(given)
    most = MAX_DECODE_TOKENS - 1  # drafts.draft.MAX_K
    if text == "auto":
        return text
    if text.isdecimal() and 1 <= int(text) <= most:
        return int(text)
    raise UserError(f"--speculate_k must be auto, or between 1 and {most}, not {text}")


# ---------------------------------------------------------------- the checkpoint


def open_checkpoint(name: str | None = None, ranks=None, dequantize: bool = False) -> Checkpoint:
    """Open the model that --checkpoint_path names. Only our own directories can be read without the
    files of sources/.

    ranks: a ranks.Ranks if torchrun has started several processes. dequantize: the quantized
    tensors of a .gguf file are read as float32.
    """
    ranks = ranks or SingleProcess()
    return ranks.open(lambda: find_checkpoint(name, dequantize))


def find_checkpoint(name: str | None, dequantize: bool) -> Checkpoint:
    if name == "":
        raise UserError("the path of a model is empty; name one, or leave the option out")
    path = Path(os.path.expanduser(name or ""))
    if name and (path / "config.json").exists() and is_ours(path):
        return open_directory(path)
    try:
        from sources.opening import open_named
    except ModuleNotFoundError as error:
        what = f"{path} is not a checkpoint directory" if name else "the default model is a GGUF file"
        raise UserError(f"{what}, and {error.name} is missing to read it") from None
    return open_named(name, dequantize)


def default_params(checkpoint: Checkpoint, options: ModelOptions) -> SamplingParams:
    """The sampling settings of a request that names none."""
    return recommended_params(checkpoint.recommended if options.generation_config == "auto" else {})


# ---------------------------------------------------------------- the engine


def choose_cache_length(given: int | None, config: Config, needed: int = 1, wanted: int = 0) -> int:
    """Choose the number of cache positions per row.

    given: --max_seq_length, which is returned as it is if the context allows it. If it is None,
    `needed` is rounded up to one of CACHE_LENGTHS, and the result is at least `wanted` and at most
    the context. With longrope, rows longer than the original (training) context have the long
    factors, so the original context is the limit unless more is needed.
    """
    if given is not None:
        check_cache_length(given, config)
        return given
    context = config.max_seq_length
    if needed <= config.short_context:
        context = config.short_context
    common = next((length for length in CACHE_LENGTHS if length >= needed), needed)
    return min(max(common, wanted), context)


def check_cache_length(length: int, config: Config):
    """Raise UserError if rows of this length are longer than the context. With ALiBi any length is
    allowed."""
    if length > config.max_seq_length and not config.alibi:
        context = config.max_seq_length
        raise UserError(f"--max_seq_length {length} is more than the model's context of {context}")


def load_engine(
    checkpoint: Checkpoint, options: ModelOptions, rows: int, length: int, how: EngineOptions | None = None
) -> Engine:
    """Load a model, and its drafts, into an engine with `rows` cache rows of `length` positions."""
    with options.naming():
        return make_engine(checkpoint, options, rows, length, how or EngineOptions())


def make_engine(checkpoint: Checkpoint, options: ModelOptions, rows: int, length: int, how: EngineOptions) -> Engine:
    if options.snapshot_mb is not None:
        how = replace(how, snapshot_bytes=options.snapshot_mb * 10**6)
    ranks = how.ranks
    config = checkpoint.config
    check_cache_length(length, config)
    if min(rows, length) < 1:
        raise UserError(f"an engine has at least one row of one position, not {rows} of {length}")
    device = choose_device(ranks.device(options.device))
    is_own = is_own_draft(checkpoint, options)
    options = replace(options, dequantize=options.dequantize or is_own)
    used = with_used_layers(checkpoint, options, device)

    drafts = None
    if options.speculates:  # errors in these options are reported before the model is read
        from drafts.loading import Drafts

        drafts = Drafts(checkpoint, Loader(options, ranks, device))
    if is_own and ranks.rank == 0:
        what = f"the model is dequantized, because {checkpoint.path.name} itself is the draft"
        print_status(f"--draft int4-self: {what}; the file is faster alone or with other drafts")

    quantization = None if options.dequantize else checkpoint.quantization
    caches = state_bytes(used.config, rows, length, options.dtype, how.snapshot_bytes)
    check_memory(used.config, device, options.dtype, caches, quantization, ranks.portion(device))
    model = read_model(used, options, device, ranks.shard(device))
    found = []
    if drafts is not None:
        found = drafts.load(model)
    elif options.drafts_by_default and device.type == "cpu" and model.backend.thread_invariant:
        found = default_drafts(model)
    if not found:
        model.mtp = None  # nothing drafts with it
    decoding = make_speculation(found, options.speculate_k)

    chunk_tokens = how.chunk_tokens or (128 if quantization else 256)
    how = replace(how, chunk_tokens=chunk_tokens, fixed_threads=options.threads is not None)
    steps = compiled_steps(options.compile, options.compile_prefill)
    engine = Engine(model, rows, length, steps, decoding, how)
    watch(engine)
    if config.is_longrope and ranks.rank == 0:
        kind = "long" if config.has_long_factors(length) else "short"
        original = f"the original context is {config.short_context}"
        print_status(f"longrope: the {kind} factors, because rows have {length} positions and {original}")
    return engine


def with_used_layers(checkpoint: Checkpoint, options: ModelOptions, device: torch.device) -> Checkpoint:
    """A checkpoint without its layer that drafts tokens if no draft uses that. UserError if --draft asks
    for it, and the model has none."""
    if "mtp" not in options.draft_kinds:
        is_used = options.drafts_by_default and device.type == "cpu"
        return checkpoint if is_used else checkpoint.without_mtp()
    if not checkpoint.config.mtp:
        import mtp  # noqa: F401  if the file is missing, the error says so

        what = "has no layer that drafts tokens, or one of another kind"
        if checkpoint.config.delta_net is None:
            what = "has no layer that drafts tokens: only Qwen3.5 to 3.8 have one"
        raise UserError(f"--draft mtp: {checkpoint.path} {what}; --draft prompt-lookup works with every model")
    return checkpoint


def is_own_draft(checkpoint: Checkpoint, options: ModelOptions) -> bool:
    """Whether the file of a model is itself the draft of --draft int4-self: a .gguf file of fewer
    than 8 bits, whose dequantized weights are then the target."""
    if "int4-self" not in options.draft_kinds or options.draft_checkpoint_path:
        return False
    quantization = checkpoint.quantization
    return quantization is not None and quantization.bits < 8 and checkpoint.path.is_file()


def make_speculation(drafts: list, speculate_k: int | str | None):
    """A Speculation with these drafts, or None without any. speculate_k: as in ModelOptions."""
    if not drafts and speculate_k is not None:
        raise UserError("--speculate_k: no draft is the default here; name one with --draft, such as prompt-lookup")
    if not drafts:
        return None
    from speculative import Speculation

    if speculate_k in (None, "auto"):
        return Speculation(drafts)
    most = drafts[0].max_k
    if len(drafts) == 1 and most < speculate_k:
        print_status(f"--speculate_k {speculate_k}: {drafts[0].name} proposes at most {most} tokens")
    return Speculation(drafts, speculate_k, automatic=False)


def default_drafts(model: Transformer) -> list:
    """Prompt lookup, and the model's layer that drafts tokens if it is loaded. None of them if their
    files, which are optional, are missing."""
    try:
        from drafts.mtp import MtpDraft
        from drafts.retrieval import RetrievalDraft
    except ModuleNotFoundError:
        return []
    return [RetrievalDraft()] if model.mtp is None else [RetrievalDraft(), MtpDraft(model)]


@dataclass
class Loader:
    """Loads the drafts of a model: on its device, with its kernels."""

    options: ModelOptions
    ranks: Any
    device: torch.device

    def open(self, name: str) -> Checkpoint:
        return open_checkpoint(name, self.ranks)

    def load(self, checkpoint: Checkpoint, shard=WHOLE_MODEL) -> Transformer:
        plain = replace(self.options, dequantize=False)
        return read_model(checkpoint.without_mtp(), plain, self.device, shard)

    def install(self, model: nn.Module) -> nn.Module:
        return install_kernels(model, self.options.kernels, self.options.exact_activations)


# ---------------------------------------------------------------- the model


def load_model(
    checkpoint: Checkpoint | Path, options: ModelOptions | None = None, shard=WHOLE_MODEL, **fields
) -> Transformer:
    """Load the model of a checkpoint or of a checkpoint directory, and install its kernels, as
    `install_kernels` does.

    options: how to load it. Instead, some fields of ModelOptions may be given as keyword arguments.
    shard: a tp.Shard, to read one rank's slices only. On a CPU, this also sets the number of
    threads, and how much freed memory the process keeps. The layer that drafts tokens is left out
    if no draft of the options uses it.
    """
    options = options or ModelOptions(**fields)
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_directory(checkpoint)
    device = choose_device(options.device)
    return read_model(with_used_layers(checkpoint, options, device), options, device, shard)


def read_model(checkpoint: Checkpoint, options: ModelOptions, device: torch.device, shard) -> Transformer:
    """`load_model` on a device, with all layers of the checkpoint."""
    make_installer = choose_installer(device, options.kernels)
    make_installer.prepare_process(options.threads)
    model = checkpoint.empty_model(shard)
    installer = None
    if not options.dequantize or checkpoint.quantization is None:
        installer = make_installer(model, options.kernels, options.exact_activations)
    read_weights(checkpoint, model, device, options.dtype, installer)
    if installer is None:
        repack_layers(model, (), "--dequantize")
    return install_kernels(model, options.kernels, options.exact_activations, installer)


def choose_device(name: str | None) -> torch.device:
    """The device with this name, or the fastest one. UserError if it cannot be used."""
    name = fastest_device() if name is None else str(name)
    if name.split(":")[0] not in ("cpu", "cuda", "mps"):
        known = "known are cpu, cuda, cuda:1 (and so on) and mps"
        raise UserError(f"--device {name} cannot be used here: {known}")
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} cannot be used here: {first_line(error)}") from None


def fastest_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


# ---------------------------------------------------------------- the kernels


@cache  # so that a missing module is reported once
def choose_installer(device: torch.device, kernels: str) -> type[Installer]:
    """Choose the class that installs the kernels for a device: CpuInstaller for CPUs, which also
    manages memory and threads; TritonInstaller for CUDA, unless `kernels` is "torch"; otherwise
    Installer, which does nothing."""
    try:
        if device.type == "cpu":
            from cpu.install import CpuInstaller

            return CpuInstaller
        if kernels == "avx2":
            raise UserError(f"--kernels avx2 is for CPUs, not for {device.type}")
        if device.type == "cuda" and kernels == "auto":
            from kernels_triton import TritonInstaller

            return TritonInstaller
    except ModuleNotFoundError as error:  # Triton or an optional file: models run without them
        print_status(f"{error.name} is missing: torch's own operations are used instead of our kernels")
    return Installer


def install_kernels(
    model: nn.Module, kernels: str = "auto", exact_activations: bool = False, installer: Installer | None = None
) -> nn.Module:
    """Install the kernels for the device of a model (or of its Medusa heads) if they can run there,
    unless `kernels` is "torch". Returns the model.

    exact_activations: quantized layers do not quantize their activations (CPU). installer: one that
    has packed layers of this model already.
    """
    installer = installer or choose_installer(model.device, kernels)(model, kernels, exact_activations)
    backend = installer.finish()
    if isinstance(model, Transformer):
        unpack_without_kernels(model, kernels)
        model.backend = backend
    return model


def unpack_without_kernels(model: Transformer, kernels: str):
    """Unpack the quantized weights for which no kernels are installed, if memory allows it.

    Products with unpacked weights are several times as fast as the reference, which unpacks them in
    every step. With `kernels` "torch" the weights stay packed.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if kernels == "torch" or not layers:
        return
    extra = sum(layer.in_features * layer.out_features for layer in layers) * model.dtype.itemsize
    if extra < available_memory(model.device):
        return repack_layers(model, ())
    print_status("no kernels, and no memory to unpack the quantized weights: each step unpacks them, which is slow")
