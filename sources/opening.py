"""Opens what users name as a model: a checkpoint directory, a Hugging Face directory, a .gguf file,
or a name.

The result is a Checkpoint. load.py reads it into a model, and convert_hf_checkpoint.py writes it as
a checkpoint directory.
"""

import dataclasses
import os
import re
from functools import partial
from pathlib import Path

import torch

from checkpoint import (
    DEFAULT_NAME,
    DRAFT_LAYER,
    Checkpoint,
    FileStates,
    is_ours,
    open_directory,
    read_recommended,
)
from cli import UserError, print_status
from config import Config
from formats import matrices, swap
from model import Transformer
from sources import hub, wheels
from sources.assemble import AssembledWeights, with_mtp_layer
from sources.families import Layout
from sources.gguf_header import gguf_name, is_gguf, split_files
from sources.hf_directory import MODULES, HfFiles, hf_family, hf_tokenizer_files, vocabulary_size
from sources.names import find_model

# Tensors of multimodal models that are left out.
OTHER_MODALITIES = (
    "vision_tower.", "multi_modal_projector.", "visual.", "vision_embedder.", "embed_vision.", "audio_tower.",
    "embed_audio.",
)  # fmt: skip
# A file with one of these suffixes stands for its directory.
WEIGHTS_FILES = (".safetensors", ".bin", ".pth", ".pt", ".json")


def open_named(name: str | None, dequantize: bool = False) -> Checkpoint:
    """The model that --checkpoint_path names: a path, or else one of sources/names.py; None is the
    default model.

    dequantize: the quantized tensors of a .gguf file are read as float32.
    """
    if name is None:
        return open_default(dequantize)
    path = Path(os.path.expanduser(name))
    if path.suffix in WEIGHTS_FILES and not path.is_dir() and not is_gguf(path):
        path = path.parent
    if path.exists():
        return open_path(path, dequantize)
    if name == DEFAULT_NAME:
        return open_default(dequantize)
    path, found_name = find_model(name)
    return dataclasses.replace(open_path(path, dequantize), name=found_name)


def open_path(path: Path, dequantize: bool) -> Checkpoint:
    """The model in a GGUF file or in a directory of any kind."""
    if is_gguf(path):
        return open_gguf(path, dequantize)
    if not path.is_dir():
        raise UserError(f"{path} is neither a GGUF file (it does not begin with GGUF) nor the directory of a model")
    files = sorted(path.glob("*.[gG][gG][uU][fF]"))
    if files and not (path / "config.json").exists():
        raise UserError(f"{path} has no config.json, but {files[0].name}: give the path of that file")
    return open_directory(path) if is_ours(path) else open_hf(path)


def open_default(dequantize: bool) -> Checkpoint:
    """The default model: its GGUF file from the wheel, or else the original from the hub."""
    try:
        path = wheels.default_gguf()
    except UserError as error:
        print_status(f"{error}; trying the hub")
        return open_hf(hub.download(hub.DEFAULT_HUB_ID))
    return dataclasses.replace(open_gguf(path, dequantize), name=DEFAULT_NAME)


def open_hf(directory: Path) -> Checkpoint:
    """A directory as transformers' save_pretrained writes it, or as it is downloaded from the hub."""
    files = FileStates(directory)
    family, config = hf_family(directory)
    file = HfFiles(directory, family.layout)
    layout = family.layout
    head = f"{layout.names['output'][0]}.weight"
    has_head = config.tied_embeddings or head in file.shapes() or not (directory / MODULES).exists()
    if not has_head:
        print_status(f"{directory} has no output head: it makes embeddings, and text would be meaningless")
        config = dataclasses.replace(config, tied_embeddings=True)
    elif config.tied_embeddings:
        config, layout = correct_tied_head(config, file)
    if family.padded_vocabulary:
        config = dataclasses.replace(config, n_token=vocabulary_size(directory, config.vocab_size))
    mtp_tensors = {name: shape for name, shape in file.shapes().items() if name.startswith(DRAFT_LAYER)}
    model = with_mtp_layer(directory, config, layout, mtp_tensors)
    config = model.config

    def is_other_modality(name: str) -> bool:
        return family.multimodal is not None and name.removeprefix("model.").startswith(OTHER_MODALITIES)

    def unneeded(name: str) -> bool:
        if config.tied_embeddings and name == "lm_head.weight":  # it has the values of the embedding
            return True
        is_rope_table = name.endswith("rotary_emb.inv_freq")  # old checkpoints contain it
        return is_other_modality(name) or name.startswith(DRAFT_LAYER) or is_rope_table

    def open_weights(model: Transformer) -> AssembledWeights:
        weights = AssembledWeights(directory, HfFiles(directory, layout), model, layout, unneeded)
        if any(map(is_other_modality, weights.left_out)):
            print_status(f"{directory}: left out: tensors of other modalities")
        return weights

    read_tokenizer = partial(hf_tokenizer_files, directory, has_head)
    about = {"recommended": read_recommended(directory), "made_model": model}
    return Checkpoint(directory, config, None, open_weights, read_tokenizer, files, **about)


def correct_tied_head(config: Config, file: HfFiles) -> tuple[Config, Layout]:
    """The Config and the Layout of a model whose config.json calls the head tied to the embedding.

    As in transformers, a head with other values is kept beside the table, and a head without a
    table is the table as well. The two are read only if both are there.
    """
    layout = file.layout
    found = file.shapes()
    table = f"{layout.names['embedding'][0]}.weight"
    head = f"{layout.names['output'][0]}.weight"
    if head in found and table not in found:
        _, stored_name = file.stored[head]
        return config, dataclasses.replace(layout, renames={f"^{re.escape(stored_name)}$": table} | layout.renames)
    if head in found and not same_values(file.read(table), file.read(head)):
        print_status(
            f"{file.directory}: config.json calls the output head tied to the embedding table (tie_word_embeddings), "
            f"but {head} has other values than {table}; both are used"
        )
        return dataclasses.replace(config, tied_embeddings=False), layout
    return config, layout


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a file are equal, possibly in different dtypes."""
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    return torch.equal(one.double(), other.double())


def open_gguf(path: Path, dequantize: bool = False) -> Checkpoint:
    """A .gguf file. Unless dequantize is set, tensors in a format of FORMATS stay as they are."""
    from sources.gguf_file import ROPE_TENSORS, GgufFile

    if not path.exists():
        raise UserError(f"{path} does not exist")
    path, *others = split_files(path)
    files = FileStates(path, *others)
    file = GgufFile(path)
    config = file.config()
    layout = file.family.gguf_layout
    mtp_tensors = {name: shape for name, shape in file.shapes().items() if file.is_of_mtp_layer(name)}
    model = with_mtp_layer(path, config, layout, mtp_tensors)

    def unneeded(name: str) -> bool:
        # The values of RoPE's tensors are in the Config.
        return name in ROPE_TENSORS or file.is_of_mtp_layer(name)

    # This compares the file's shapes with the model's, so it comes before `swap`, which replaces the
    # model's matrices by quantized layers in place.
    weights = AssembledWeights(path, file, model, layout, unneeded)
    quantization = None
    if not dequantize:
        names = [name for name, _ in matrices(model)]
        quantization = file.quantization({name: weights.stacks[f"{name}.weight"] for name in names})
    if quantization is not None:
        swap(model, quantization.scheme)
    about = {"name": gguf_name(path), "recommended": file.recommended(), "made_model": model}
    return Checkpoint(path, model.config, quantization, lambda _: weights, file.tokenizer_files, files, **about)
