"""Which model runs, and how: ModelOptions, and the command-line options that it is made of."""

import argparse
import os
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from checkpoint import DTYPES
from cli import UserError, add_model_name, natural, positive
from kernels import MAX_DECODE_TOKENS

DRAFT_KINDS = ("prompt-lookup", "lookup:FILE", "mtp", "medusa", "medusa:FILE", "int4-self", "none")
KERNEL_CHOICES = ("auto", "avx2", "torch")
DEFAULT_HEADS = Path(__file__).parent / "training" / "SmolLM2-135M-Instruct-medusa.safetensors"


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
    all_logits: bool = False
    threads: int | None = None
    compile: bool = False
    compile_prefill: bool = False
    draft_checkpoint_path: str | None = None
    draft: list[DraftOption | str] = field(default_factory=list)
    speculate_k: int | str | None = None
    # Not a command-line option. True: prompt lookup and the MTP layer, if the model has one, are the
    # drafts where they cannot change a token.
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
        """The file of --draft medusa:FILE, by default the heads of the default model."""
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
    """Add the options that say which model is loaded, and how. Returns the method that adds more options
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
    add(
        "--all_logits",
        action="store_true",
        help="read the whole output head in each step (CPU; the tokens are the same)",
    )
    add("--exact_activations", action="store_true", help="do not quantize activations to 8 bits (CPU)")
    return add


def add_model_options(parser: argparse.ArgumentParser, default_length: str):
    """Add the options of ModelOptions. default_length: the default of --max_seq_length, in words."""
    add = add_loading_options(parser)
    length = f"KV cache positions per row; default: {default_length}"
    add("-c", "--max_seq_length", type=positive, help=length)
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
