"""Reads Hugging Face directories: the Config, the tensors, the tokenizer.

Read down: config.json, whose fields the family's record (families.py) interprets; the weights, from
safetensors or .bin files; the tokenizer's settings, from up to five files; how texts become vectors
(sentence-transformers' files). Nothing is guessed from the directory's name.
"""

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint import INDEX, SafetensorsReader, make_config, safetensors_header, weight_paths
from cli import UserError, first_line, read_json, read_text
from config import Config
from layers import MatrixLayer
from sources.families import FAMILIES, Family, Layout
from sources.fields import Fields
from text.tokenizer import TokenizerFiles, read_template, read_tokenizer_files, tokenizer_errors

# ---------------------------------------------------------------- config.json


def hf_config(directory: Path) -> Config:
    """The Config of a Hugging Face directory. Errors as in `hf_family`."""
    return hf_family(directory)[1]


def hf_family(directory: Path) -> tuple[Family, Config]:
    """The family and the Config of a Hugging Face directory. UserError if the family is unknown or
    the value of a field is not supported."""
    path = directory / "config.json"
    fields = Fields(path, text_fields(read_json(path)))
    name = fields.take("model_type", None)
    family = FAMILIES.get(str(name))
    known = [] if family is None else family.architectures
    names = fields.take("architectures", None) or known
    first = names[0] if isinstance(names, list) and names else names
    if str(first).lower() not in [architecture.lower() for architecture in known]:
        first_names = ", ".join(other.architectures[0] for other in FAMILIES.values())
        raise UserError(f"{path}: architecture {first} (model_type {name}) is not known; known: {first_names}")

    fields.defaults = family.defaults
    try:
        config = family.read_fields(fields)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise UserError(f"{path} has a value of the wrong type or size: {error}") from None
    fields.finish()
    return family, make_config(path, **config)


def text_fields(values: dict) -> dict:
    """The fields of the language model: those in text_config, if this is a multimodal model."""
    text = values.get("text_config")
    families = [family for family in FAMILIES.values() if family.multimodal is not None]
    kinds = [family.model_type for family in families if family.multimodal == values.get("model_type")]
    if not kinds or not isinstance(text, dict):
        return values
    names = ("architectures", "tie_word_embeddings", "tie_embedding", "quantization_config")
    outside = {name: values[name] for name in names if name in values}
    # LFM2's name of tie_word_embeddings, for which transformers does not look in text_config.
    text = {name: value for name, value in text.items() if name != "tie_embedding"}
    return {"model_type": kinds[0]} | text | outside


# ---------------------------------------------------------------- weights


def vocabulary_size(directory: Path, V: int) -> int | None:
    """The tokenizer's highest id plus one, or None if an embedding table of V rows has no padding."""
    if not (directory / "tokenizer.json").exists():
        return None
    size = 1 + max(open_tokenizer(directory).get_vocab(with_added_tokens=True).values(), default=-1)
    return size if 0 < size < V else None


def open_tokenizer(directory: Path):
    from tokenizers import Tokenizer as Library

    with tokenizer_errors(directory):
        return Library.from_file(str(directory / "tokenizer.json"))


def hf_weight_paths(directory: Path) -> list[Path]:
    """The files that hold a directory's tensors: safetensors, or else .bin files, as in transformers."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (directory / whole).exists() or (directory / f"{whole}.index.json").exists():
            return weight_paths(directory, whole)
    raise UserError(f"{directory} has no model.safetensors, {INDEX} or pytorch_model.bin")


class HfFiles:
    """The tensors of a directory, by the names that a layout gives them.

    The tensors of a layer may be in several .bin files, and opening a file takes milliseconds. So a
    file stays open until all its tensors have been read.
    """

    is_mapped = True  # a tensor may be a part of a mapped file

    def __init__(self, directory: Path, layout: Layout):
        self.directory = directory
        self.layout = layout
        self.paths = hf_weight_paths(directory)
        # By a tensor's name: the file that holds it, and its name in the file.
        self.stored: dict[str, tuple[Path, str]] = {}
        # The open .bin files, each with the tensors that have not been read yet.
        self.unread: dict[Path, dict[str, torch.Tensor]] = {}
        self.reader = SafetensorsReader()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name. UserError if a tensor is there twice."""
        found = {}
        for path in self.paths:
            if path.suffix == ".safetensors":
                shapes = {name: shape for name, (shape, _) in safetensors_header(path).items()}
            else:
                self.unread[path] = read_pickle(path)
                shapes = {name: tuple(tensor.shape) for name, tensor in self.unread[path].items()}
            for stored_name, shape in shapes.items():
                name = self.layout.renamed(stored_name)
                if name in found:
                    raise UserError(f"{self.directory} holds tensor {name} twice")
                found[name] = shape
                self.stored[name] = (path, stored_name)
        return found

    def read(self, name: str, kind: str = "weight") -> torch.Tensor:
        """A tensor that `shapes` has found. It may be a part of a mapped file."""
        path, stored_name = self.stored[name]
        if path.suffix == ".safetensors":
            return self.reader.read(path, stored_name)
        if stored_name not in self.unread[path]:  # it was read before
            self.unread[path] = read_pickle(path)
        return self.unread[path].pop(stored_name)

    def map_layer(self, name: str, layer: MatrixLayer) -> MatrixLayer:
        """An Embedding on the meta device, filled with a tensor that stays in the mapped file."""
        path, stored_name = self.stored[name]
        whole = SafetensorsReader().read(path, stored_name) if path.suffix == ".safetensors" else self.read(name)
        layer.load_state_dict({"weight": whole}, assign=True)
        return layer


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .bin file, mapped if it is a zip archive, as torch.save writes since version 1.6.
    Code in the file is never run."""
    try:
        with warnings.catch_warnings():  # torch's warnings about unusual files do not help the user
            warnings.simplefilter("ignore")
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:  # torch's own message suggests running the code anyway
        raise UserError(f"{path} was not loaded: it is damaged, or it holds code that would run") from None
    except Exception as error:  # damaged files can raise anything
        raise UserError(f"{path} is not a readable PyTorch file: {first_line(error)[:200]}") from None

    by_name = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
    if not by_name or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise UserError(f"{path} does not hold tensors by name")
    return weights


# ---------------------------------------------------------------- tokenizer


# Which text around an added token belongs to it, and whether it is found in normalized text.
ADDED_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def hf_tokenizer_files(directory: Path, has_head: bool = True) -> TokenizerFiles:
    """The tokenizer and the chat templates of a Hugging Face directory. has_head: see Embedding."""
    older = read_optional(directory, "special_tokens_map.json")  # older checkpoints have it as well
    settings = older | read_optional(directory, "tokenizer_config.json")
    try:
        files = read_tokenizer_files(directory, hf_special_tokens(directory, settings, has_head))
        named = settings.get("chat_template")
        if not isinstance(named, list):
            named = [{"name": "default", "template": named}]
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
    path = directory / name
    return read_json(path) if path.exists() else {}


def token_names(settings: dict) -> dict[str, str | None]:
    """The special tokens by what they are for ("bos_token" -> "<s>")."""
    names = {}
    for name, value in settings.items():
        if name.endswith("_token") and value not in (True, False):  # add_bos_token is a switch
            # Some files have a dictionary with the token and its flags.
            names[name] = value.get("content") if isinstance(value, dict) else value
    return names


def added_tokens(directory: Path, settings: dict, library) -> list[dict]:
    """The tokens that the files beside the vocabulary add to it, in the form of tokenizer.json.

    As in transformers, the flags in tokenizer_config.json take precedence over those in a
    tokenizer.json (library). Older checkpoints have a file of tokens without flags.
    """
    special = set(token_names(settings).values())
    tokens = []
    decoder = settings.get("added_tokens_decoder") or {}
    for i, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        token = {"id": int(i), "content": entry["content"]}
        token |= {flag: entry[flag] for flag in ADDED_TOKEN_FLAGS if flag in entry}
        token["special"] = bool(entry.get("special")) or entry["content"] in special
        tokens.append(token)

    known = {token["content"] for token in tokens}
    for text, i in read_optional(directory, "added_tokens.json").items():
        if text not in known and (library is None or library.token_to_id(text) is None):
            tokens.append({"id": i, "content": text, "normalized": False, "special": True})
    return tokens


def hf_special_tokens(directory: Path, settings: dict, has_head: bool) -> dict:
    """Our tokenizer_config.json, from Hugging Face's, the vocabulary, and the model's config.json."""
    library = None
    if (directory / "tokenizer.json").exists():
        library = open_tokenizer(directory)
    added = added_tokens(directory, settings, library)
    ids = {token["content"]: token["id"] for token in added}
    texts = {i: token for token, i in ids.items()}
    named = token_names(settings)

    def token_id(token):
        if library is None or not token or token in ids:
            return ids.get(token)
        return library.token_to_id(token)

    bos, eos_ids = special_ids(directory, named, token_id)
    if library is not None:  # then transformers ignores add_bos_token
        first, appended = surrounding_tokens(library)
    else:
        first = bos if settings.get("add_bos_token") else None
        appended = [token_id(named.get("eos_token"))] if settings.get("add_eos_token") else []
    return {
        "bos_token_id": bos if first is None else first,
        "eos_token_ids": list(dict.fromkeys(eos_ids)),
        "bos_token": texts.get(bos),  # these two are for files that do not name the tokens
        "eos_token": texts.get(eos_ids[0]) if eos_ids else None,
        **named,
        "add_bos_token": first is not None,
        "added_tokens": added,
        "legacy": settings.get("legacy", True) is not False,
        **hf_embedding(directory, appended, has_head),
    }


def special_ids(directory: Path, named: dict, token_id: Callable) -> tuple[int | None, list[int]]:
    """The id of the BOS token, or None if there is none, and the ids of all EOS tokens.

    named: see `token_names`. token_id: the id of a token by its text.
    """
    generation = read_optional(directory, "generation_config.json")
    config = read_json(directory / "config.json")
    bos = token_id(named.get("bos_token"))
    if bos is None:
        bos = config.get("bos_token_id")
    if named.get("bos_token", "") is None:  # null means no BOS token, whatever config.json says
        bos = None

    eos_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if not isinstance(eos_ids, list):
        eos_ids = [eos_ids]
    # The tokenizer of a chat model may have another EOS token than its config.
    eos_ids = [i for i in (*eos_ids, token_id(named.get("eos_token"))) if i is not None]
    return bos, eos_ids


def surrounding_tokens(library) -> tuple[int | None, list[int]]:
    """The id that the post-processor of a tokenizer.json puts before a text, or None, and the ids that it puts
    after it. (It may put more before it, which no text here has. Only embeddings have those after it.)"""
    library.no_padding()
    encoding = library.encode("a")
    is_added = encoding.special_tokens_mask
    end = max((i + 1 for i, added in enumerate(is_added) if not added), default=len(is_added))
    return encoding.ids[0] if is_added and is_added[0] else None, encoding.ids[end:]


# ---------------------------------------------------------------- embeddings

MODULES = "modules.json"  # only models of sentence-transformers have it


def hf_embedding(directory: Path, append_ids: list[int], has_head: bool) -> dict:
    """The setting `embedding` of a Tokenizer, if sentence-transformers' files say that a text's vector is its
    last hidden state. UserError if they say something else."""
    path = directory / MODULES
    if not path.exists():
        return {}
    try:
        modules = {module["type"].rpartition(".")[2]: module["path"] for module in json.loads(read_text(path))}
        pooling_path = directory / modules.get("Pooling", "") / "config.json"
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a list of modules: {first_line(error)}") from None
    if others := [kind for kind in modules if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise UserError(f"{path}: module {others[0]} is not supported; expected Transformer, Pooling and Normalize")

    # Older files have a switch for each kind. (include_prompt cannot concern the last token.)
    pooling = read_json(pooling_path)
    switches = [name for name, is_on in pooling.items() if name.startswith("pooling_mode_") and is_on is True]
    mode = pooling.get("pooling_mode", [name.removeprefix("pooling_mode_") for name in switches])
    if mode not in ("lasttoken", ["lasttoken"]):
        raise UserError(f"{pooling_path}: pooling {mode} is not supported; expected lasttoken")
    embedding = {"normalize": "Normalize" in modules, "append_ids": append_ids, "has_head": has_head}
    return {"embedding": embedding}
