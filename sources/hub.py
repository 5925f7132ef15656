"""Downloads models from the Hugging Face hub to huggingface_hub's own cache.

Read down: a repository of safetensors; a GGUF file of a repository, by its format; the download of
one file, which continues an interrupted one. huggingface_hub (2.4) does not do that after the
process has ended, so a file is downloaded here, put where its cache has it, and then linked by it.
HF_TOKEN, HF_HUB_OFFLINE and its other variables work.
"""

import hashlib
import re
import shutil
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from checkpoint import DEFAULT_NAME
from cli import (
    Progress,
    UserError,
    and_more,
    announced,
    first_line,
    locked,
    print_status,
    printable,
    progress_bar,
    size_text,
)
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
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
RETRIES = 5  # after this many attempts in a row that bring nothing, a download fails
BUSY = (408, 429, 500, 502, 503, 504)  # status codes after which another attempt may succeed
PIECE = 1 << 20  # bytes that are read at a time


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
        if match["format"] is None:
            return find_directory(repository)
        return download_gguf(repository, match["format"])
    except UserError:
        raise
    except Exception as error:
        why = what_failed(error)
        raise UserError(f"{repository} {why}; download it elsewhere and give its path") from None


def what_failed(error: Exception) -> str:
    """The words that follow a repository's name in a message about an error of huggingface_hub."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "is on the hub, but only for those who accept its terms there; then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "is neither a local path nor on the hub (a private one needs HF_TOKEN)"
    why = first_line(error)
    if type(error).__name__ in ("ConnectError", "ConnectTimeout"):
        why = f"no connection: {why}"
    return f"is not a local path and cannot be downloaded from the hub ({why})"


def find_directory(repository: str) -> Path:
    """The directory of a repository, or a GGUF file of it if it has no other weights."""
    folder = cached_folder(repository)
    if folder is not None and has_weights([path.name for path in folder.glob("*")]):
        return download_directory(repository)
    if not cached_ggufs(repository) and has_weights(list_files(repository)):
        return download_directory(repository)
    return download_gguf(repository, None)


def list_files(repository: str) -> list[str]:
    """The names of all files of a repository, from the hub."""
    from huggingface_hub import HfApi

    with announced(f"asking the hub for the files of {repository}"):
        return [file.rfilename for file in HfApi().model_info(repository, timeout=10).siblings or []]


def has_weights(names: list[str]) -> bool:
    """Whether there are weights other than GGUF files. Files in folders do not count."""
    return any(fnmatch(name, pattern) and "/" not in name for name in names for pattern in WEIGHTS)


def download_directory(repository: str) -> Path:
    """A repository's small files, and its weights in one format only."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns):
        ignored = ["*/*", "consolidated*"]
        return Path(snapshot_download(repository, allow_patterns=patterns, ignore_patterns=ignored))

    directory = fetch("*.json", "tokenizer.model", "*.jinja", "*.safetensors")
    if any(directory.glob("*.safetensors")):
        return directory
    return fetch("pytorch_model*.bin")


# ---------------------------------------------------------------- a GGUF file of a repository


def download_gguf(repository: str, format: str | None) -> Path:
    """The GGUF file of a repository in a format (see choose_gguf), or the first file of a split model.

    The hub is asked which files there are, because the file in the cache may be another one in this
    format. If the chosen file is in the cache, it is not downloaded.
    """
    in_cache = cached_ggufs(repository)
    if format in in_cache:
        return cached_folder(repository) / format
    try:
        names = list_files(repository)
    except Exception as error:
        if not matching(in_cache, format or ""):
            raise
        print_status(f"{repository} {what_failed(error)}: what is in the cache is used")
        return cached_folder(repository) / choose_gguf(in_cache, format, repository)

    first = choose_gguf(names, format, repository)
    if first in in_cache:
        return cached_folder(repository) / first
    parts = [path.as_posix() for path in split_files(Path(first))]
    if missing := [part for part in parts if part not in names]:
        raise UserError(f"{repository} lacks {and_more(missing)} of {len(parts)} files of {first}")
    paths = [download_file(repository, part) for part in parts]
    return paths[0]


def cache_of(repository: str) -> Path:
    """The folder of a repository in huggingface_hub's cache.

    In it are files by their digests in blobs/, links to them by their names in snapshots/COMMIT/,
    and the commit of the main branch in refs/main.
    """
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def cached_folder(repository: str) -> Path | None:
    """The folder of the cache with the files of a repository's main branch, or None."""
    ref = cache_of(repository) / "refs" / "main"
    if not ref.exists():
        return None
    return cache_of(repository) / "snapshots" / ref.read_text().strip()


def cached_ggufs(repository: str) -> list[str]:
    """The names of a repository's GGUF files in the cache. All files of a split model must be there."""
    folder = cached_folder(repository)
    if folder is None:
        return []
    paths = [path for path in folder.rglob("*.gguf") if all(part.exists() for part in split_files(path))]
    return [path.relative_to(folder).as_posix() for path in paths]


def choose_gguf(names: list[str], format: str | None, where: str) -> str:
    """The name of the GGUF file in a format, or the first name of a split model.

    names: the files of a repository or a folder. where: its name, for messages.
    format: such as "Q4_K_M", in any case, or the name of a file. None: the first of PREFERRED that
    is there. A line says which file is taken if there is a choice. UserError if no file fits.
    """
    models = matching(names, "")
    if not models:
        raise UserError(f"{where} has no GGUF file of a language model")
    if format is None:
        found = [name for preferred in PREFERRED for name in matching(names, preferred)] or models
        if not matching(names, PREFERRED[0]):
            print_status(printable(f"{where} has no {PREFERRED[0]}: {found[0]} is used"))
        return found[0]

    found = matching(names, format)
    if not found:
        texts = [text for name in models for text in FORMAT.findall(name.removesuffix(".gguf"))]
        formats = sorted({text.upper() for text in texts}) or models
        raise UserError(f"{where} has no GGUF file in {format}; it has {', '.join(formats)}")
    if len(found) > 1:
        others = ", ".join(found[1:])
        line = f"{where} has {len(found)} files in {format}: {found[0]} is used, and not {others}"
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


# ---------------------------------------------------------------- one file


def download_file(repository: str, name: str, sha256: str | None = None) -> Path:
    """A file of a repository in huggingface_hub's cache, which is downloaded if it is not there.

    sha256: the SHA-256 that its authors have published, or None for the one that the hub names.
    UserError if the file has another.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    url = hf_hub_url(repository, name)
    with announced(f"asking the hub for {repository}/{name}"):
        about = get_hf_file_metadata(url)
    # The ETag becomes the name of a file here.
    if about.size is None or re.fullmatch(r"[\w-]+", about.etag or "") is None:
        raise UserError(f"the hub does not say which digest or size {repository}/{name} has")
    if sha256 is not None and about.etag != sha256:
        found = f"{repository}/{name} has the ETag {about.etag} on the hub"
        raise UserError(f"{found}, but SHA-256 {sha256} is expected")

    blobs = cache_of(repository) / "blobs"
    blob = blobs / about.etag
    partial = blobs / f"{about.etag}.partial"
    if not blob.exists():
        blobs.mkdir(parents=True, exist_ok=True)
        with locked(blobs / f"{about.etag}.lock", f"downloads {name}"):
            if not blob.exists():
                size = size_text(about.size)
                print_status(printable(f"downloading {repository}/{name} ({size}, once)"))
                fetch_rest(url, partial, about.size, name)
                # The ETag of small files is a SHA-1 of git instead.
                if re.fullmatch("[0-9a-f]{64}", about.etag):
                    check_sha256(partial, about.etag, name)
                partial.rename(blob)
    return Path(hf_hub_download(repository, name))


def fetch_rest(url: str, path: Path, size: int, name: str):
    """Download what a file lacks of its `size` bytes. After an error of the network, continue."""
    done = path.stat().st_size if path.exists() else 0
    free = shutil.disk_usage(path.parent).free
    if free < size - done:
        need = f"{(size - done) / 1e9:.2f} GB are needed"
        raise UserError(f"{path.parent} has {free / 1e9:.2f} GB free, but {need}")

    attempts = 0  # in a row that brought nothing
    longest = done
    with progress_bar(size, f"downloading {name}", "B", initial=done) as bar, open(path, "ab") as file:
        while file.tell() < size:
            try:
                fetch_once(url, file, bar)
            except Exception as error:
                if is_final(error) or attempts == RETRIES:
                    raise
                time.sleep(attempts)
            attempts += 1
            if file.tell() > longest:
                attempts = 0
                longest = file.tell()
            if attempts > RETRIES:
                raise UserError(f"{name}: the hub sends {file.tell()} of {size} bytes")


def is_final(error: Exception) -> bool:
    """Whether another attempt to download would fail as well."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):  # such an error is an OSError, too
        return error.response.status_code not in BUSY
    return isinstance(error, OSError)


def fetch_once(url: str, file: BinaryIO, bar: Progress):
    """Append to a file what it lacks. A server that does not support ranges sends all of it again."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={file.tell()}-"}
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=30) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            file.seek(0)
            file.truncate()
        bar.n = file.tell()
        for data in response.iter_bytes():
            file.write(data)
            bar.update(len(data))


def check_sha256(path: Path, expected: str, name: str):
    """Delete a file that has another SHA-256, and raise UserError."""
    digest = hashlib.sha256()
    with progress_bar(path.stat().st_size, f"checking {name}", "B", delay=2) as bar, open(path, "rb") as file:
        while data := file.read(PIECE):
            digest.update(data)
            bar.update(len(data))
    if digest.hexdigest() != expected:
        path.unlink()
        raise UserError(f"{name} has SHA-256 {digest.hexdigest()}, expected {expected}; it was deleted")
