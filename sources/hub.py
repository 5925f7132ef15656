"""Chooses the files of a model on the Hugging Face hub. huggingface_hub downloads them to its cache.

Read down: `download`; which files of a repository are wanted; a GGUF file by its format. HF_TOKEN,
HF_HUB_OFFLINE and the other variables of huggingface_hub work.
"""

import re
import warnings
from fnmatch import fnmatch
from pathlib import Path

from checkpoint import DEFAULT_NAME
from cli import UserError, and_more, announced, first_line, print_status, printable, size_text
from sources.gguf_header import split_files

DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
NAME = r"[\w-][\w.-]*"
HUB_NAME = re.compile(
    rf"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/)?(?P<repository>{NAME}/{NAME})(?::(?P<format>.+))?"
)
# The formats to look for, in this order, if none is named. If a repository has none of them, its
# first file is taken.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q8_0", "BF16", "F16")
FORMAT = re.compile(r"(?<![a-z0-9])(?:ud-)?(?:i?q\d\w*|mxfp4\w*|bf16|f16|f32)(?=[-./]|$)", re.I)
NO_MODELS = ("mmproj", "imatrix")  # GGUF files with these words in their names hold something else
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # only files of the first of these are downloaded
SMALL_FILES = ("*.json", "tokenizer.model", "*.jinja")
POOLING = "*_Pooling/config.json"  # how a model of sentence-transformers makes embeddings


def looks_like_hub_id(source: str) -> bool:
    """Whether a text may name a repository: organization/name, maybe with a format after a colon."""
    match = HUB_NAME.fullmatch(source)
    return match is not None and (match["format"] is not None or not source.endswith(".gguf"))


def download(name: str) -> Path:
    """Download a model of the hub. Returns the path of a directory with its safetensors and its
    tokenizer, or of a GGUF file if the name has a format (organization/name:Q4_K_M) or the
    repository has no other weights."""
    match = HUB_NAME.fullmatch(name)
    repository = match["repository"]
    try:
        return fetch(repository, match["format"])
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{repository} {what_failed(error)}; download it elsewhere and give its path") from None


def fetch(repository: str, format: str | None) -> Path:
    """`download` of a repository in a format.

    The hub is asked which files there are, because the file in the cache may be another one in this
    format. Files that are in the cache are not downloaded again.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

    try:
        with announced(f"asking the hub for the files of {repository}"):
            about = HfApi().model_info(repository, timeout=10, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in about.siblings or []}
    except Exception as error:
        files = cached_files().get(repository)
        if files is None:
            raise
        print_status(f"{repository} {what_failed(error)}: what is in the cache is used")

    wanted = []
    if format is None:
        wanted = directory_files(list(files))
    is_directory = len(wanted) > 0
    if not is_directory:
        wanted = gguf_files(list(files), format, repository)
    missing = [name for name in wanted if not isinstance(try_to_load_from_cache(repository, name), str)]
    if missing:
        size = size_text(sum(files[name] for name in missing))
        print_status(printable(f"downloading {repository}: {and_more(missing)} ({size}, once)"))
    with warnings.catch_warnings():
        # huggingface_hub only warns of a disk that is too small, and then fills it.
        warnings.filterwarnings("error", "Not enough free disk space")
        folder = Path(snapshot_download(repository, allow_patterns=wanted, local_files_only=not missing))
    return folder if is_directory else folder / wanted[0]


def what_failed(error: Exception) -> str:
    """The words that follow a repository's name in a message about an error of huggingface_hub."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "is on the hub, but only for those who accept its terms there; then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "is neither a local path nor on the hub (a private one needs HF_TOKEN)"
    return f"is not a local path and cannot be downloaded from the hub ({first_line(error)})"


def cached_files() -> dict[str, dict[str, int]]:
    """repository -> name -> bytes of the files in huggingface_hub's cache that are of a main branch."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError):  # ValueError if the cache is not a folder
        return {}
    found = {}
    for repository in repositories:
        revision = repository.refs.get("main")
        if repository.repo_type == "model" and revision is not None:
            sizes = [(file.file_path.relative_to(revision.snapshot_path), file.size_on_disk) for file in revision.files]
            found[repository.repo_id] = {path.as_posix(): size for path, size in sizes}
    return found


def directory_files(names: list[str]) -> list[str]:
    """A repository's small files, and its weights in one format; [] if it has no other weights than GGUF files."""
    outside = [name for name in names if "/" not in name and not name.startswith("consolidated")]
    for weights in WEIGHTS:
        if any(fnmatch(name, weights) for name in outside):
            patterns = (*SMALL_FILES, weights)
            poolings = [name for name in names if fnmatch(name, POOLING)]
            return [name for name in outside if any(fnmatch(name, pattern) for pattern in patterns)] + poolings
    return []


# ---------------------------------------------------------------- a GGUF file of a repository


def gguf_files(names: list[str], format: str | None, repository: str) -> list[str]:
    """The GGUF file in a format (see choose_gguf), or all files of a split model."""
    first = choose_gguf(names, format, repository)
    parts = [path.as_posix() for path in split_files(Path(first))]
    if missing := [part for part in parts if part not in names]:
        raise UserError(f"{repository} lacks {and_more(missing)} of {len(parts)} files of {first}")
    return parts


def choose_gguf(names: list[str], format: str | None, repository: str) -> str:
    """The name of the GGUF file in a format, or the first name of a split model.

    names: the files of the repository.
    format: such as "Q4_K_M", in any case, or the name of a file. None: the first of PREFERRED that
    is there. A line says which file is taken if there is a choice. UserError if no file fits.
    """
    models = matching(names, "")
    if not models:
        raise UserError(f"{repository} has no GGUF file of a language model")
    if format is None:
        found = [name for preferred in PREFERRED for name in matching(names, preferred)] or models
        if not matching(names, PREFERRED[0]):
            print_status(printable(f"{repository} has no {PREFERRED[0]}: {found[0]} is used"))
        return found[0]

    found = matching(names, format)
    if not found:
        texts = [text for name in models for text in FORMAT.findall(name.removesuffix(".gguf"))]
        formats = sorted({text.upper() for text in texts}) or models
        raise UserError(f"{repository} has no GGUF file in {format}; it has {', '.join(formats)}")
    if len(found) > 1:
        others = ", ".join(found[1:])
        line = f"{repository} has {len(found)} files in {format}: {found[0]} is used, and not {others}"
        print_status(printable(line))
    return found[0]


def matching(names: list[str], format: str) -> list[str]:
    """The names of GGUF files in a format (see choose_gguf; "" means any), the shortest name first.

    Of a split model, only the first file counts.
    """
    wanted = format.lower()
    has_format = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?=[-./]|$)").search
    found = []
    for name in names:
        model = name.lower()
        base = model.rpartition("/")[2]
        is_model = model.endswith(".gguf") and not any(word in base for word in NO_MODELS)
        if not is_model or split_files(Path(base))[0].name != base:
            continue
        if wanted in ("", model, base) or has_format(model.removesuffix(".gguf")):
            found.append(name)
    return sorted(found, key=lambda name: (len(name), name))


def format_of(name: str, names: list[str]) -> str:
    """What to write after the colon for a file: its format, or its name if its format means another
    of the files."""
    formats = FORMAT.findall(name.removesuffix(".gguf"))
    if formats and matching(names, formats[-1])[0] == name:
        return formats[-1].upper()
    return name
