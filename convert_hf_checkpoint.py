"""Writes a Hugging Face directory, a hub id, a GGUF file or the default model as a checkpoint
directory.

No other command requires this: generate.py reads all of these as they are. Of a checkpoint
directory, each of several ranks can read its own slices, and quantize.py can make another one.
"""

from pathlib import Path

import torch

import checkpoint
from checkpoint import DTYPES, Checkpoint, Writer, check_finite, check_target, print_written, tensor_dtypes
from cli import ArgumentParser, UserError, progress_bar, run_command
from costs import total_weight_bytes
from sources import hub
from sources.opening import open_named


def convert(source: Checkpoint, out: Path, dtype: torch.dtype) -> Path:
    """Write a source as a checkpoint directory with weights in dtype, which is complete or does not
    exist in the end."""
    model = source.empty_model()
    dtypes = tensor_dtypes(model, dtype)
    total = total_weight_bytes(model, dtype)
    title = f"converting {source.name}"
    with Writer(out, total) as writer, progress_bar(total, title, "B") as bar:
        weights = source.open_weights(model)
        for name, expected in model.state_dict().items():
            tensor = weights.read(name)
            if expected.dtype == torch.float32:  # the others are quantized, and stay as they are
                tensor = tensor.to(dtypes[name])
                check_finite(tensor, f"{source.path}: {name}")
            writer.add(name, tensor)
            bar.update(tensor.nbytes)
        writer.add_config(source.config, source.quantization, source.recommended)
        writer.add_tokenizer(source.tokenizer_files)
        source.files.check()
    return out


# ---------------------------------------------------------------- command


def main():
    parser = ArgumentParser(description="Convert a model to a fastpath checkpoint directory.")
    add = parser.add_argument
    add("source", help="a Hugging Face directory, a GGUF file, or a name as for generate.py")
    add("--out", type=Path, help="the directory to write (checkpoints/NAME)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the weights written (bfloat16)")
    keep = "keep the quantized tensors of a GGUF file that a format here holds exactly; others are dequantized"
    add("--keep_quantized", action="store_true", help=keep)
    args = parser.parse_args()

    check_target(args.out)
    source = open_named(args.source, dequantize=not args.keep_quantized)
    if args.keep_quantized and source.quantization is None:
        what = ".gguf files with quantized matrices"
        raise UserError(f"--keep_quantized is for {what}, and {args.source} has none")
    out = args.out or default_directory(args.source, source, args.dtype)
    print_written(convert(source, out, DTYPES[args.dtype]))


def default_directory(text: str, source: Checkpoint, dtype: str) -> Path:
    """checkpoints/NAME for a model that is called `text`. The name of a hub id has two parts."""
    name = source.name
    if hub.looks_like_hub_id(text) and ":" not in text and not Path(text).is_file():
        name = text
    name = name.removesuffix(".gguf")
    if source.quantization is not None:
        name += f"-{source.quantization.mode}"
    if dtype != "bfloat16":
        name += f"-{dtype}"
    return checkpoint.CHECKPOINTS / name


if __name__ == "__main__":
    run_command(main)
