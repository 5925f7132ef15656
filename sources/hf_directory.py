"""Reads Hugging Face directories: the Config, the tensors, the tokenizer.

Read down: config.json, whose fields the family's record (families.py) interprets; the weights, from safetensors or
.bin files; the tokenizer's settings, from up to five files. Nothing is guessed from the directory's name.
"""

import pickle
import warnings
import zipfile
from pathlib import Path

import torch

from checkpoint import INDEX, make_config, read_tensor, safetensors_header, weight_files
from cli import UserError, first_line, print_status, read_json
from config import Config
from sources.families import FAMILIES, Family, Layout
from sources.fields import Fields
from tokenizer import TokenizerFiles, read_template, read_tokenizer_files

# ---------------------------------------------------------------- config.json


def hf_config(directory: Path) -> Config:
    """The Config of a Hugging Face directory. UserError for an unknown family or an unsupported value of a field."""
    return hf_family(directory)[1]


def hf_family(directory: Path) -> tuple[Family, Config]:
    """The family and the Config of a Hugging Face directory. Errors as in `hf_config`."""
    path = directory / "config.json"
    values = text_fields(read_json(path))
    name = values.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    fields = Fields(path, values, family.defaults if family else {})
    if not isinstance(fields.take("model_type", None), str):
        fields.refuse("model_type", 'is not the name of a model family; expected a string such as "llama"')
    known = family.architectures if family else []
    names = values.get("architectures") or known[:1] or [None]
    if not isinstance(names, list):
        fields.refuse("architectures", "is not a list of names")
    if str(names[0]).lower() not in [architecture.lower() for architecture in known]:
        known = ", ".join(family.architectures[0] for family in FAMILIES.values())
        raise UserError(f"{path}: architecture {names[0]} (model_type {name}) is not known; known: {known}")
    try:
        config = family.read_fields(fields)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:  # such as a string for a number
        raise UserError(f"{path} has a value of the wrong type: {error}") from None
    fields.finish()
    return family, make_config(path, **config)


def text_fields(values: dict) -> dict:
    """The fields of the language model, if a config.json is that of a multimodal model that has one."""
    for family in FAMILIES.values():
        is_multimodal = family.multimodal is not None and values.get("model_type") == family.multimodal
        if is_multimodal and isinstance(values.get("text_config"), dict):
            names = ("architectures", "tie_word_embeddings", "quantization_config")
            outside = {name: values[name] for name in names if name in values}
            return {"model_type": family.model_type} | values["text_config"] | outside
    return values


# ---------------------------------------------------------------- weights


def vocabulary_size(directory: Path, V: int) -> int | None:
    """The tokenizer's highest id plus one, or None if the embedding table of V rows has no padding."""
    if not (directory / "tokenizer.json").exists():
        return None
    size = 1 + max(open_tokenizer(directory).get_vocab(with_added_tokens=True).values(), default=-1)
    return size if 0 < size < V else None


def open_tokenizer(directory: Path):
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_file(str(directory / "tokenizer.json"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of any kind; where Rust code panics, it is no Exception
        raise UserError(f"{directory / 'tokenizer.json'} is not a readable tokenizer: {error}") from None


def weight_paths(directory: Path) -> list[Path]:
    """The files that hold a directory's tensors: the first that is there of model.safetensors, its shards,
    pytorch_model.bin, its shards, as in transformers. UserError if one is missing."""
    if (directory / INDEX).exists() or (directory / "model.safetensors").exists():
        return list(dict.fromkeys(weight_files(directory).values()))
    index, whole = directory / "pytorch_model.bin.index.json", directory / "pytorch_model.bin"
    if index.exists() and not whole.exists():
        weight_map = read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise UserError(f"{index}: weight_map does not say which file of this directory holds each tensor")
        paths = sorted({directory / name for name in names})
    else:
        paths = [whole]
    for path in paths:
        if not path.exists():
            looked_for = f"model.safetensors, {INDEX} or pytorch_model.bin"
            raise UserError(f"{path} is missing" if index.exists() else f"{directory} has no {looked_for}")
    return paths


class HfFiles:
    """The tensors of a directory, by the names that a layout gives them.

    The tensors of a layer may be in several .bin files, and opening a file takes milliseconds. So a
    mapped file stays open until all its tensors have been read. A file in the older format cannot be
    mapped and is read into memory, so only one of them is kept.
    """

    is_mapped = True  # a tensor may be a part of a mapped file

    def __init__(self, directory: Path, layout: Layout):
        self.directory, self.layout = directory, layout
        self.paths = weight_paths(directory)
        self.stored: dict[str, tuple[Path, str]] = {}  # by name: the file that holds it, and its name there
        # The open .bin files, each with the tensors that have not been read yet.
        self.unread: dict[Path, dict[str, torch.Tensor]] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name. UserError if one is there twice."""
        found = {}
        for path in self.paths:
            for stored_name, shape in self.stored_shapes(path).items():
                name = self.layout.renamed(stored_name)
                if name in found:
                    raise UserError(f"{self.directory} holds tensor {name} twice")
                found[name], self.stored[name] = tuple(shape), (path, stored_name)
        return found

    def stored_shapes(self, path: Path) -> dict[str, list[int] | torch.Size]:
        if path.suffix == ".safetensors":
            return {name: entry["shape"] for name, entry in safetensors_header(path).items()}
        return {name: tensor.shape for name, tensor in self.open_bin(path).items()}

    def read(self, name: str, kind: str = "weight") -> torch.Tensor:
        """A tensor that `shapes` has found. It may be a part of a mapped file."""
        path, stored_name = self.stored[name]
        if path.suffix == ".safetensors":
            return read_tensor(path, stored_name)
        if stored_name not in self.unread.get(path, {}):
            self.open_bin(path)
        return self.unread[path].pop(stored_name)

    def open_bin(self, path: Path) -> dict[str, torch.Tensor]:
        """Open a .bin file, and return all its tensors by their names in the file."""
        if not can_map(path):
            self.unread.clear()
        self.unread[path] = read_pickle(path)
        return self.unread[path]


def can_map(path: Path) -> bool:
    """Whether a .bin file is a zip archive, as torch.save has written them since version 1.6."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # torch.load then says what is wrong
        return False


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .bin file, memory-mapped if its format allows this. Code in the file is never run."""
    try:
        with warnings.catch_warnings():  # torch's warnings about unusual files do not help the user
            warnings.simplefilter("ignore")
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map(path))
    except pickle.UnpicklingError:  # torch's own message suggests running the code anyway
        why = "it is damaged, or it would run code"
        raise UserError(f"{path} is not a plain file of tensors and was not loaded: {why}") from None
    except Exception as error:  # damaged files can raise anything
        raise UserError(f"{path} is not a readable PyTorch file: {first_line(error)[:200]}") from None
    plain = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
    if not plain or not all(map(is_plain_tensor, weights.values())):
        raise UserError(f"{path} does not hold plain tensors by name")
    return weights


def is_plain_tensor(value) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_quantized or value.is_meta or value.is_nested)


# ---------------------------------------------------------------- tokenizer


ADDED_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # which text around a token counts as its own


def hf_tokenizer_files(directory: Path) -> TokenizerFiles:
    """The tokenizer and the chat template of a Hugging Face directory."""
    settings = read_tokenizer_settings(directory)
    try:
        files = read_tokenizer_files(directory, hf_special_tokens(directory, settings))
        template = settings.get("chat_template")
        named = template if isinstance(template, list) else [{"name": "default", "template": template}]
        templates = {entry["name"]: entry["template"] for entry in named}
        if files.template is None:
            files.template = templates.get("default") or None
        files.tool_template = read_template(directory / "additional_chat_templates" / "tool_use.jinja")
        if files.tool_template is None:
            files.tool_template = templates.get("tool_use") or None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{directory / 'tokenizer_config.json'} is not valid: {error}") from None
    return files


def read_optional(directory: Path, name: str) -> dict:
    return read_json(directory / name) if (directory / name).exists() else {}


def read_tokenizer_settings(directory: Path) -> dict:
    """tokenizer_config.json, with the special tokens of special_tokens_map.json, where older checkpoints have them."""
    return read_optional(directory, "special_tokens_map.json") | read_optional(directory, "tokenizer_config.json")


def token_names(settings: dict) -> dict[str, str | None]:
    """The special tokens by what they are for ("bos_token" -> "<s>"). Some files have a dictionary with the content."""
    values = {name: value for name, value in settings.items() if name.endswith("_token") and value not in (True, False)}
    return {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}


def added_tokens(directory: Path, settings: dict, library) -> list[dict]:
    """The tokens that the files beside the vocabulary add to it, in the form of the added_tokens of a tokenizer.json.

    As in transformers, the flags in tokenizer_config.json count if a tokenizer.json (library) has others. Older
    checkpoints have a file of tokens without flags.
    """
    named, tokens = set(token_names(settings).values()), []
    for i, entry in sorted((settings.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        token = {"id": int(i), "content": entry["content"]}
        token |= {flag: entry[flag] for flag in ADDED_TOKEN_FLAGS if flag in entry}
        token["special"] = bool(entry.get("special")) or entry["content"] in named
        tokens.append(token)
    known = {token["content"] for token in tokens}
    for text, i in read_optional(directory, "added_tokens.json").items():
        if text not in known and (library is None or library.token_to_id(text) is None):
            tokens.append({"id": i, "content": text, "normalized": False, "special": True})
    return tokens


def hf_special_tokens(directory: Path, settings: dict) -> dict:
    """Our tokenizer_config.json, made from Hugging Face's, the vocabulary, and the model's config.json."""
    generation, config = read_optional(directory, "generation_config.json"), read_json(directory / "config.json")
    library = open_tokenizer(directory) if (directory / "tokenizer.json").exists() else None
    added = added_tokens(directory, settings, library)
    ids = {token["content"]: token["id"] for token in added}
    named = token_names(settings)

    def token_id(token):
        return library.token_to_id(token) if library and token and token not in ids else ids.get(token)

    bos = config.get("bos_token_id")
    if "bos_token" in named:  # null means no BOS token, whatever config.json says
        known = token_id(named["bos_token"])
        bos = None if named["bos_token"] is None else bos if known is None else known
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    # The tokenizer of a chat model may have another EOS token than its config.
    eos = [*(eos if isinstance(eos, list) else [eos]), token_id(named.get("eos_token"))]
    eos = [i for i in eos if i is not None]
    for i in eos if bos is None else [bos, *eos]:
        if type(i) is not int or i < 0:
            raise ValueError(f"{i!r} is not a token id (bos_token_id or eos_token_id, or in generation_config.json)")
    if library is not None:  # transformers ignores add_bos_token and add_eos_token beside a tokenizer.json
        before, after = surrounding_tokens(library)
    else:
        before = [bos] if settings.get("add_bos_token") and bos is not None else []
        after = eos[:1] if settings.get("add_eos_token") else []
    if len(before) > 1 or after:
        many = f"{len(before)} tokens before and {len(after)} after a text"
        print_status(f"{directory}: its tokenizer adds {many}; a prompt here has at most one before it")
    texts = {i: token for token, i in ids.items()}
    by_id = {"bos_token": texts.get(bos), "eos_token": texts.get(eos[0]) if eos else None}  # for files without names
    return {
        "bos_token_id": before[0] if before else bos,
        "eos_token_ids": list(dict.fromkeys(eos)),
        **by_id,
        **named,
        "add_bos_token": bool(before),
        "added_tokens": added,
        "legacy": settings.get("legacy", True) is not False,
    }


def surrounding_tokens(library) -> tuple[list[int], list[int]]:
    """The ids that the post-processor of a tokenizer.json puts before a text, and after it."""
    library.no_truncation()
    library.no_padding()
    encoding = library.encode("a")
    text = [i for i, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
    if not text:  # the vocabulary lacks this letter
        return encoding.ids[:1], encoding.ids[1:]
    return encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]
