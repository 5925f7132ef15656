"""Writes a Hugging Face directory, a hub id, a GGUF file or the default model as a checkpoint directory.

Nothing needs this: generate.py and the other commands read all of these as they are. A checkpoint directory can be read
by the slices of several ranks, and from it one can make others (quantize.py).
"""

from pathlib import Path

import torch

import checkpoint as ck
from checkpoint import (
    DTYPES,
    Checkpoint,
    dtype_of,
    total_weight_bytes,
)
from cli import ArgumentParser, UserError, progress_bar, run_command
from sources import hub
from sources.opening import open_named
from writer import Writer, print_written


def convert(source: Checkpoint, out: Path, dtype: torch.dtype, replace: bool = True) -> Path:
    """Write a source as a checkpoint directory with weights in dtype. `out` is complete in the end or does not exist.

    replace: whether a checkpoint that is at `out` when the conversion is done is replaced; otherwise it is kept.
    """
    total = total_weight_bytes(source.config, dtype, source.quantization)
    with Writer(out, total, replace) as writer, progress_bar(total, f"converting {source.name}", "B") as bar:
        weights = source.open_weights()
        for name, expected in source.empty_model().state_dict().items():
            tensor = weights.read(name)
            if expected.dtype == torch.float32:
                tensor = in_dtype(source.path, name, tensor, dtype_of(name, expected, source.config, dtype))
            writer.add(name, tensor)
            bar.update(tensor.nbytes)
        writer.add_config(source.config, source.quantization)
        writer.add_tokenizer(source.tokenizer_files)
        source.files.check()
    return out


def in_dtype(source: Path, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A source's tensor in dtype. UserError if it is not finite in dtype."""
    tensor = tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise UserError(f"{source}: {name} holds NaN or infinity as {str(dtype).removeprefix('torch.')}")
    return tensor


# ---------------------------------------------------------------- command


def main():
    parser = ArgumentParser(description="Convert a model to a fastpath checkpoint directory.")
    parser.add_argument("source", help="a Hugging Face directory, a .gguf file, or a name as for generate.py")
    parser.add_argument("--out", type=Path, help="the directory to write (checkpoints/NAME)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the weights written (bfloat16)")
    keep = "keep the quantized tensors of a GGUF file that a format here holds exactly; others are dequantized"
    parser.add_argument("--keep_quantized", action="store_true", help=keep)
    args = parser.parse_args()
    source, out = open_named(args.source, dequantize=not args.keep_quantized), args.out
    if args.keep_quantized and source.quantization is None:
        raise UserError(f"--keep_quantized is for .gguf files with quantized matrices, and {args.source} has none")
    if out is None:
        is_hub_id = hub.looks_like_hub_id(args.source) and ":" not in args.source
        name = args.source if is_hub_id else source.name
        mode = f"-{source.quantization.mode}" if source.quantization else ""
        out = ck.converted_path(name.removesuffix(".gguf") + mode, args.dtype)
    print_written(convert(source, out, DTYPES[args.dtype]))


if __name__ == "__main__":
    run_command(main)
