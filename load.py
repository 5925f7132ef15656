"""From options to a model: its source, its device and its kernels.

Read down: ModelOptions and the command-line options that it is made of; Checkpoint, an opened source; `load_model`.
start.py makes an engine of it. The kernels' files are imported only if they are used.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path

import torch

from checkpoint import DTYPES, Source, available_memory, is_ours, open_directory, read_model
from cli import UserError, first_line, positive, print_status
from engine import SingleProcess
from formats import QuantizedLinear, repack_layers
from kernels import MAX_DECODE_TOKENS
from model import WHOLE_MODEL, Transformer
from tokenizer import Tokenizer

KERNEL_CHOICES = ("auto", "avx2", "torch")
DEFAULT_HEADS = Path(__file__).parent / "training" / "SmolLM2-135M-Instruct-medusa.safetensors"

# ---------------------------------------------------------------- options


@dataclass(frozen=True)
class DraftOption:
    """A value of --draft."""

    kind: str  # "prompt-lookup", "lookup", "medusa", "int4-self" or "none"
    path: str = ""  # of lookup:FILE or medusa:FILE

    @classmethod
    def parse(cls, text: str) -> "DraftOption":
        kind, _, path = text.partition(":")
        if text in ("none", "prompt-lookup", "medusa", "int4-self") or (kind in ("lookup", "medusa") and path):
            return cls(kind, path)
        kinds = "prompt-lookup, lookup:FILE, medusa, medusa:FILE, int4-self, none"
        raise UserError(f"--draft {text!r} is not one of {kinds}")


@dataclass
class ModelOptions:
    """Which model runs, and how. The fields have the names of the command-line options (`add_model_options`), and take
    their values. UserError if one is wrong, or if some contradict each other."""

    checkpoint_path: str | None = None  # None: the default model
    device: str | None = None  # None: the fastest that is available
    dtype: torch.dtype | str = torch.bfloat16
    dequantize: bool = False
    max_seq_length: int | None = None
    kernels: str = "auto"
    exact_activations: bool = False
    threads: int | None = None
    compile: bool = False
    compile_prefill: bool = False
    draft_checkpoint_path: str | None = None
    draft: list[DraftOption | str] = field(default_factory=list)
    speculate_k: int | str | None = None
    lookup_by_default: bool = False  # prompt lookup is the draft where it cannot change a token; not an option

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, converses: bool = False) -> "ModelOptions":
        """The options of a command line, which may have some of them only. converses: whether the program holds
        conversations, in which prompt lookup is the draft by default."""
        options = cls(**{field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)})
        options.lookup_by_default = converses and not (args.draft or options.draft_checkpoint_path or options.compile)
        return options

    def __post_init__(self):
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
            if not self.speculates:
                raise UserError("--speculate_k needs something that proposes: --draft_checkpoint_path or --draft")
        if len(self.draft) < len(given) and (len(given) > 1 or self.speculates):
            raise UserError("--draft none and other drafts exclude each other")
        kinds = self.draft_kinds
        if twice := [kind for kind in ("prompt-lookup", "medusa", "int4-self") if kinds.count(kind) > 1]:
            raise UserError(f"--draft {twice[0]} is given twice")

    @property
    def draft_kinds(self) -> list[str]:
        """The kinds that --draft asks for."""
        return [draft.kind for draft in self.draft]

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
    """The options that say which model is loaded, and how. Returns the method that adds others to the same group."""
    add = parser.add_argument_group("the model and the machine").add_argument
    what = (
        "a .gguf file, a Hugging Face directory or hub id, a GGUF file of the hub (organization/name:Q4_K_M), a short "
    )
    what += "name (--list), or a checkpoint directory; default: SmolLM2-135M-Instruct, a small demo"
    add("--checkpoint_path", metavar="MODEL", help=what)
    add("--list", action=ListModels, nargs=0, help="list the models that are on this machine, with their sizes")
    add("--device", help="cpu, cuda, cuda:1, mps ...; default: the fastest that is available")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the KV cache, and of weights that are not quantized")
    add("--dequantize", action="store_true", help="unpack quantized weights to --dtype, which takes more memory")
    kernels = "auto: the fastest of our kernels; avx2: those for CPUs without AVX-512; torch: PyTorch's own operations"
    add("--kernels", choices=KERNEL_CHOICES, default="auto", help=kernels)
    exact = "with quantized weights, do not quantize the activations to 8 bits (CPU)"
    add("--exact_activations", action="store_true", help=exact)
    return add


def add_model_options(parser: argparse.ArgumentParser, default_length: str):
    """The options that say which model runs, and how: those of ModelOptions. default_length: of a row, in words."""
    add = add_loading_options(parser)
    add("--max_seq_length", type=positive, help=f"KV cache positions per row; default: {default_length}")
    threads = "CPU threads for each step; default: the number that is fastest at the moment, up to OMP_NUM_THREADS"
    add("--threads", type=int, metavar="N", help=threads)
    add("--compile", action="store_true", help="compile the decode step with torch.compile")
    add("--compile_prefill", action="store_true", help="compile prefill with torch.compile")

    add = parser.add_argument_group("speculation: several tokens per pass over the weights").add_argument
    add("--draft_checkpoint_path", metavar="PATH", help="a smaller model with the same vocabulary proposes tokens")
    kinds = "prompt-lookup: propose what followed the latest tokens earlier in the text; lookup:FILE: search this text"
    heads = DEFAULT_HEADS.relative_to(Path(__file__).parent)
    kinds += f" file, too; medusa or medusa:FILE: heads that were trained for the model (default: {heads}); int4-self: "
    kinds += "the model itself in 4 bits (--draft_checkpoint_path may name that copy). May be repeated; none: no "
    kinds += "draft. Default: prompt-lookup in conversations and in serve.py, with the CPU kernels and without "
    kinds += "--compile; otherwise none"
    add("--draft", metavar="KIND", action="append", default=[], help=kinds)
    how_many = "tokens to propose per step; auto (the default): the number that is fastest, measured while running"
    add("--speculate_k", metavar="N", help=how_many)


def draft_length(given: int | str) -> int | str:
    """The value of --speculate_k."""
    text, most = str(given), MAX_DECODE_TOKENS - 1  # speculative.MAX_K
    if text == "auto" or (text.isdecimal() and 1 <= int(text) <= most):
        return text if text == "auto" else int(text)
    raise UserError(f"--speculate_k must be auto, or between 1 and {most}, not {text}")


# ---------------------------------------------------------------- the checkpoint, before its weights are read


class Checkpoint:
    """An opened model: its options, its source, and its tokenizer."""

    def __init__(self, source: Source, options: ModelOptions | None = None):
        self.source, self.options = source, options or ModelOptions()
        self.path, self.name = source.path, source.name
        self.config = source.config
        self.quantization = None if self.options.dequantize else source.quantization
        self.tokenizer_files = source.tokenizer_files()
        self.tokenizer = Tokenizer(self.tokenizer_files)


def find_source(name: str | None) -> Source:
    """What --checkpoint_path names. All but directories of ours need the files of sources/."""
    if name == "":
        raise UserError("the path of a model is empty; name one, or leave the option out")
    path = Path(os.path.expanduser(name or ""))
    if name and (path / "config.json").exists() and is_ours(path):
        return open_directory(path)
    try:
        from sources.opening import open_source
    except ModuleNotFoundError as error:
        what = f"{path} is not a checkpoint directory" if name else "the default model is a GGUF file"
        raise UserError(f"{what}, and {error.name} is missing to read it") from None
    return open_source(name)


def open_checkpoint(options: ModelOptions, ranks=None) -> Checkpoint:
    """Open the model of these options. A GGUF file that is its own draft in 4 bits is dequantized. ranks: a ranks.Ranks
    if torchrun has started several processes."""
    ranks = ranks or SingleProcess()
    source = ranks.in_turn(lambda: find_source(options.checkpoint_path))
    ranks.check_same(source)
    drafts_itself = "int4-self" in options.draft_kinds and not options.draft_checkpoint_path
    if drafts_itself and source.quantization and source.quantization.bits < 8 and source.path.is_file():
        options = replace(options, dequantize=True)
        if ranks.rank == 0:
            what = f"the model is dequantized, because {source.path.name} itself is the draft"
            print_status(f"--draft int4-self: {what}; the file is faster alone or with other drafts")
    return Checkpoint(source, options)


# ---------------------------------------------------------------- the model


def load_model(source: Source | Path, options: ModelOptions | None = None, shard=WHOLE_MODEL, **fields) -> Transformer:
    """The model of a source or a checkpoint directory (checkpoint.read_model), with kernels as `install_kernels` says.

    options: how to load it; or some of the fields of ModelOptions as keyword arguments. shard: a tp.Shard, to read one
    rank's slices only. On a CPU, this also sets the number of threads, and how much freed memory the process keeps.
    """
    options = options or ModelOptions(**fields)
    device, how = choose_device(options.device), {}
    module = kernels_module(device, options.kernels)
    if device.type == "cpu" and module is not None:
        module.prepare_process(options.threads)
        how["memory"] = module.HugePages
        if not options.dequantize:
            choices = {"kernels": options.kernels, "exact_activations": options.exact_activations}
            how["start"] = partial(module.pack_while_reading, **choices)
    model = read_model(source, device, options.dtype, shard, **how)
    if options.dequantize:
        repack_layers(model, (), "--dequantize")
    return install_kernels(model, options.kernels, options.exact_activations)


def choose_device(name: str | None) -> torch.device:
    name = fastest_device() if name is None else str(name)
    if name.split(":")[0] not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {name} cannot be used here: known are cpu, cuda, cuda:1 (and so on) and mps")
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} cannot be used here: {first_line(error)}") from None


def fastest_device() -> str:
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


@cache  # so that what is missing is reported once
def kernels_module(device: torch.device, kernels: str):
    """The module that installs the kernels for a device: cpu.install for CPUs, which also manages memory and threads;
    kernels_triton for CUDA, unless `kernels` is "torch". None if there is no such module."""
    try:
        if device.type == "cpu":
            from cpu import install as module
        elif kernels == "avx2":
            raise UserError(f"--kernels avx2 is for CPUs, not for {device.type}")
        elif device.type == "cuda" and kernels == "auto":
            import kernels_triton as module
        else:
            return None
    except ModuleNotFoundError as error:  # of Triton or of the file: models run without either
        print_status(f"{error.name} is missing: torch's own operations are used instead of our kernels")
        return None
    return module


def install_kernels(model, kernels: str = "auto", exact_activations: bool = False):
    """Install the kernels for the device of a model (or of its Medusa heads) if they can run there, unless `kernels` is
    "torch". Returns the model.

    exact_activations: quantized layers do not quantize their activations (CPU).
    """
    module = kernels_module(model.device, kernels)
    backend = None if module is None else module.install(model, kernels, exact_activations)
    if isinstance(model, Transformer):
        unpack_without_kernels(model, kernels)
        if backend is not None:
            model.use(backend)
    return model


def unpack_without_kernels(model: Transformer, kernels: str):
    """Unpack the quantized weights for which no kernels are installed, because products with unpacked weights are
    several times as fast as the reference, which unpacks them in every step. With `kernels` "torch" they stay."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if kernels == "torch" or not layers:
        return
    extra = sum(layer.in_features * layer.out_features for layer in layers) * model.dtype.itemsize
    if extra < available_memory(model.device):
        return repack_layers(model, ())
    print_status("no kernels, and no memory to unpack the quantized weights: each step unpacks them, which is slow")
