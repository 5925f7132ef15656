"""From options to an engine: the checkpoint, the plan, the drafts, the model, the kernels.

Read down: `open_checkpoint`; `load_engine`; LoadPlan, which decides everything before weights are
read; the drafts; `load_model`; the kernels. The options are in options.py. The files of optional
features are imported only if they are used.
"""

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backend import Installer
from checkpoint import Checkpoint, is_ours, open_directory, read_weights
from cli import UserError, first_line, print_status
from compile import compiled_steps
from config import Config
from costs import available_memory, check_memory, shadow_bytes, total_weight_bytes, unpacking_bytes
from edits import is_edited, recorded_fingerprints
from engine import Engine, EngineOptions, SingleProcess
from formats import Repacking, whole_layers
from model import WHOLE_MODEL, Transformer
from options import ModelOptions
from sampling import SamplingParams, recommended_params
from watchdog import watch

CACHE_LENGTHS = (512, 2048, 8192, 32768, 131072)  # only a few: each needs its own compiled graphs


# ---------------------------------------------------------------- the checkpoint


def open_checkpoint(name: str | None = None, ranks=None, dequantize: bool = False) -> Checkpoint:
    """Open the model that --checkpoint_path names. Only our own directories can be read without the
    files of sources/.

    ranks: a tp.Ranks if torchrun has started several processes. dequantize: the quantized
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
        if name:
            raise UserError(f"{path} is not a checkpoint directory, and {error.name} is missing to read it") from None
        raise UserError(f"the default model is a GGUF file, and {error.name} is missing to read it") from None
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
    how = how or EngineOptions()
    if options.snapshot_mb is not None:
        how = replace(how, snapshot_bytes=options.snapshot_mb * 10**6)
    with options.naming():
        plan = plan_engine(checkpoint, options, rows, length, how)
        model = load(plan)
        drafts = load_drafts(plan, model)
        decoding = make_speculation(drafts, options.speculate_k)

    chunk_tokens = how.chunk_tokens or (128 if plan.stays_quantized else 256)
    how = replace(how, chunk_tokens=chunk_tokens, fixed_threads=options.threads is not None)
    steps = compiled_steps(options.compile, options.compile_prefill)
    engine = Engine(model, rows, length, steps, decoding, how)
    if not (options.all_logits or options.compile):
        with torch.no_grad():
            model.backend = replace(model.backend, drawable_logits=model.backend.make_shadow(model))
    watch(engine)
    config = model.config
    if config.is_longrope and how.ranks.rank == 0:
        kind = "long" if config.has_long_factors(length) else "short"
        print_status(
            f"longrope: the {kind} factors, because rows have {length} positions and the original context is "
            f"{config.short_context}"
        )
    return engine


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class LoadPlan:
    """What is loaded, and how. Making a plan decides everything and finds all errors of options and
    sizes, before a byte of weights is read."""

    checkpoint: Checkpoint  # without its MTP layer, if nothing drafts with it
    options: ModelOptions
    device: torch.device
    whole: Transformer  # the whole model, on the meta device: names, shapes, dtypes, bytes
    model: Transformer  # what is filled: `whole`, or a rank's part of it
    weights: Any  # reads the tensors of the files: what Checkpoint.open_weights returns
    for_engine: bool = False
    drafts: Any = None  # the drafts that the options ask for: a drafts.loading.Drafts

    @property
    def stays_quantized(self) -> bool:
        return self.checkpoint.quantization is not None and not self.options.dequantize


def plan_engine(checkpoint: Checkpoint, options: ModelOptions, rows: int, length: int, how: EngineOptions) -> LoadPlan:
    """The plan of an engine with `rows` cache rows of `length` positions."""
    ranks = how.ranks
    check_cache_length(length, checkpoint.config)
    if min(rows, length) < 1:
        raise UserError(f"an engine has at least one row of one position, not {rows} of {length}")
    device = choose_device(ranks.device(options.device))
    is_own = is_own_draft(checkpoint, options)
    options = replace(options, dequantize=options.dequantize or is_own)
    used = with_used_layers(checkpoint, options, device)

    drafts = None
    if options.speculates:
        from drafts.loading import Drafts

        drafts = Drafts(checkpoint, Loader(options, ranks, device))
    if is_own and ranks.rank == 0:
        print_status(
            f"--draft int4-self: the model is dequantized, because {checkpoint.path.name} itself is the draft; "
            "the file is faster alone or with other drafts"
        )
    whole = used.empty_model()
    caches = whole.cache_bytes(rows, length, options.dtype, how.snapshot_bytes)
    check_fits(whole, options, device, caches, ranks.portion(device))
    plan = plan_model(used, options, device, ranks.shard(device), whole)
    return replace(plan, drafts=drafts, for_engine=True)


def plan_model(
    checkpoint: Checkpoint, options: ModelOptions, device: torch.device, shard, whole: Transformer | None = None
) -> LoadPlan:
    """The plan of a model alone, or of one rank's part of it (shard: a tp.Shard), with all layers of the
    checkpoint. whole: the whole model on the meta device, if it was made already."""
    whole = whole or checkpoint.empty_model()
    model = whole
    if shard.ranks > 1:
        model = checkpoint.empty_model(shard, whole)
    weights = checkpoint.open_weights(whole)
    return LoadPlan(checkpoint, options, device, whole, model, weights)


def check_fits(whole: Transformer, options: ModelOptions, device: torch.device, caches: int, portion: float = 1.0):
    """UserError if a model and its caches do not fit on a device. portion: the part of them that is there."""
    weights = total_weight_bytes(whole, options.dtype, options.dequantize, device)
    if str(device) == "cpu" and not (options.all_logits or options.dequantize):
        weights += shadow_bytes(whole)
    check_memory(weights * portion, caches * portion, device)


def with_used_layers(checkpoint: Checkpoint, options: ModelOptions, device: torch.device) -> Checkpoint:
    """A checkpoint, without its MTP layer if no draft uses it. UserError if --draft asks for an MTP layer
    that the model lacks."""
    if "mtp" not in options.draft_kinds:
        is_used = options.drafts_by_default and device.type == "cpu"
        return checkpoint if is_used else checkpoint.without_mtp()
    if checkpoint.config.mtp:
        return checkpoint
    import mixers.mtp  # noqa: F401  if the file is missing, the error says so

    if checkpoint.config.delta_net is None:
        raise UserError(
            f"--draft mtp: {checkpoint.path} has no layer that drafts tokens: only Qwen3.5 to 3.8 have one; "
            "--draft prompt-lookup works with every model"
        )
    raise UserError(
        f"--draft mtp: {checkpoint.path} has no layer that drafts tokens, or one of another kind; "
        "--draft prompt-lookup works with every model"
    )


def is_own_draft(checkpoint: Checkpoint, options: ModelOptions) -> bool:
    """Whether the file of a model is itself the draft of --draft int4-self: a .gguf file of fewer
    than 8 bits, whose dequantized weights are then the target."""
    if "int4-self" not in options.draft_kinds or options.draft_checkpoint_path:
        return False
    quantization = checkpoint.quantization
    return quantization is not None and quantization.bits < 8 and checkpoint.path.is_file()


# ---------------------------------------------------------------- drafts


def load_drafts(plan: LoadPlan, model: Transformer) -> list:
    """The drafts that the options ask for, or else the default ones."""
    found = []
    if plan.drafts is not None:
        found = plan.drafts.load(model)
    elif plan.options.drafts_by_default and plan.device.type == "cpu" and model.backend.thread_invariant:
        found = default_drafts(model)
    if not found:
        model.mtp = None  # nothing drafts with it
    return found


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
    """Prompt lookup, and the MTP layer if it is loaded. Empty if the files of these drafts, which are
    optional, are missing."""
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
        return load(plan_model(checkpoint.without_mtp(), plain, self.device, shard))

    def install(self, model: nn.Module) -> nn.Module:
        return install_kernels(model, self.options.kernels, self.options.exact_activations)


# ---------------------------------------------------------------- the model


def load_model(
    checkpoint: Checkpoint | Path, options: ModelOptions | None = None, shard=WHOLE_MODEL, **fields
) -> Transformer:
    """Load the model of a checkpoint or of a checkpoint directory, with the kernels of its device.

    options: how to load it. Instead, some fields of ModelOptions may be given as keyword arguments.
    shard: a tp.Shard, to read one rank's slices only. On a CPU, this also sets the number of
    threads, and how much freed memory the process keeps. The MTP layer is left out if no draft of the
    options uses it.
    """
    options = options or ModelOptions(**fields)
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_directory(checkpoint)
    device = choose_device(options.device)
    return load(plan_model(with_used_layers(checkpoint, options, device), options, device, shard))


def load(plan: LoadPlan) -> Transformer:
    """Read the model of a plan: one tensor after the other goes to its place, and each layer is packed when
    it is whole."""
    options = plan.options
    make_installer = choose_installer(plan.device, options.kernels)
    make_installer.prepare_process(options.threads)
    model = plan.model
    installer = make_installer(model, options.kernels, options.exact_activations)
    if options.dequantize:
        repacking = Repacking((), options.dtype, "--dequantize")
    elif options.kernels == "torch" and not plan.for_engine:
        repacking = None
    else:
        repacking = make_repacking(installer, options.dtype, plan.device)
    read_weights(plan.checkpoint, model, plan.device, options.dtype, installer, repacking, plan.whole, plan.weights)
    if repacking is not None:
        repacking.report()
    model.backend = installer.finish()
    return model


def choose_device(name: str | None) -> torch.device:
    """The device with this name, or the fastest one. UserError if it cannot be used."""
    name = fastest_device() if name is None else str(name)
    if name.split(":")[0] not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {name} cannot be used here: known are cpu, cuda, cuda:1 (and so on) and mps")
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
            from kernels_triton import TritonInstaller, is_supported

            return TritonInstaller if is_supported(device) else Installer
    except ModuleNotFoundError as error:  # Triton or an optional file: models run without them
        print_status(f"{error.name} is missing: torch's own operations are used instead of our kernels")
    return Installer


def install_kernels(
    model: nn.Module, kernels: str = "auto", exact_activations: bool = False, installer: Installer | None = None
) -> nn.Module:
    """Install the kernels of its device in a model (or in Medusa heads) that is in memory already. Returns
    the model.

    kernels, exact_activations: as in ModelOptions. With "torch", quantized weights stay as they are.
    installer: by default the one for the model's device.
    """
    if installer is None:
        installer = choose_installer(model.device, kernels)(model, kernels, exact_activations)
    dtype = model.dtype if isinstance(model, Transformer) else torch.bfloat16
    repacking = None
    if kernels != "torch" and (installer.formats or isinstance(model, Transformer)):
        repacking = make_repacking(installer, dtype, next(iter(model.state_dict().values())).device)
    for name in whole_layers(model):
        if repacking is not None:
            repacking.replace(model, name)
        installer.pack(name)
    if repacking is not None:
        repacking.report()
    backend = installer.finish()
    if isinstance(model, Transformer):
        model.backend = backend
    return model


def make_repacking(installer: Installer, dtype: torch.dtype, device: torch.device) -> Repacking | None:
    """What replaces the layers whose formats have no kernels on this device.

    Where no format has kernels, all are unpacked if memory allows it: products with unpacked weights
    are several times as fast as the reference, which unpacks them in every step.
    """
    if installer.formats:
        return Repacking(installer.formats, dtype)
    if any(is_edited(name) for name in recorded_fingerprints() if name.startswith("formats.Quantized")):
        return None  # unpacked weights would not call the edited code
    packed = sum(tensor.nbytes for tensor in installer.model.state_dict().values() if tensor.device.type == "meta")
    extra = unpacking_bytes(installer.model, dtype)
    if packed + extra < available_memory(device):
        return Repacking((), dtype)
    print_status("no kernels, and no memory to unpack the quantized weights: each step unpacks them, which is slow")
    return None
