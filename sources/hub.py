"""Downloads models from the Hugging Face hub to huggingface_hub's own cache (HF_TOKEN, HF_HUB_OFFLINE etc. work).

Read down: a repository of safetensors; a GGUF file of a repository, by its format; one file, with a bar, which goes on
where an earlier download was interrupted. huggingface_hub (2.4) does not go on after the process has ended, so the file
is downloaded here, put where its cache has it, and then linked by it.
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
# The formats of a file that is taken if no format is named. After them the first file is.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q8_0", "BF16", "F16")
FORMAT = re.compile(r"(?<![a-z0-9])(?:ud-)?(?:i?q\d\w*|mxfp4\w*|bf16|f16|f32)(?=[-./]|$)", re.I)
NO_MODELS = ("mmproj", "imatrix")  # in the names of GGUF files that hold something else
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
RETRIES = 5  # attempts in a row that bring nothing
BUSY = (408, 429, 500, 502, 503, 504)  # status codes after which another attempt may succeed
PIECE = 1 << 20  # bytes


def looks_like_hub_id(source: str) -> bool:
    """Whether a text may name a repository: organization/name, maybe with a format after a colon."""
    match = HUB_NAME.fullmatch(source)
    return match is not None and (match["format"] is not None or not source.endswith(".gguf"))


def download(name: str) -> Path:
    """Download what a name of a hub repository means: its safetensors with the files of the tokenizer, as a directory,
    or a GGUF file if the name has a format (organization/name:Q4_K_M) or the repository has no other weights."""
    match = HUB_NAME.fullmatch(name)
    repository, format = match["repository"], match["format"]
    try:
        return find_directory(repository) if format is None else download_gguf(repository, format)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{repository} {what_failed(error)}; download it elsewhere and give its path") from None


def what_failed(error: Exception) -> str:
    """An error of huggingface_hub or its network library in words that follow the repository's name."""
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
    """Whether there are weights that are no GGUF files, of those outside of folders."""
    return any(fnmatch(name, pattern) and "/" not in name for name in names for pattern in WEIGHTS)


def download_directory(repository: str) -> Path:
    """A repository's small files, and its weights in one format only."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns):
        return Path(snapshot_download(repository, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))

    directory = fetch("*.json", "tokenizer.model", "*.jinja", "*.safetensors")
    return directory if any(directory.glob("*.safetensors")) else fetch("pytorch_model*.bin")


# ---------------------------------------------------------------- a GGUF file of a repository


def download_gguf(repository: str, format: str | None) -> Path:
    """The GGUF file of a repository in a format (see choose_gguf), or the first of the files of a split model. The hub
    is asked which files there are, because in the cache another one may have the format; a file that is there is used.
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
    """The folder of a repository in huggingface_hub's cache: files by their digests in blobs/, links to them by name in
    snapshots/COMMIT/, and the commit of the main branch in refs/main."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def cached_folder(repository: str) -> Path | None:
    """The folder of the cache with the files of a repository's main branch; None if there is none."""
    ref = cache_of(repository) / "refs" / "main"
    return cache_of(repository) / "snapshots" / ref.read_text().strip() if ref.exists() else None


def cached_ggufs(repository: str) -> list[str]:
    """The names of a repository's GGUF files in the cache. Of a split model all must be there."""
    if (folder := cached_folder(repository)) is None:
        return []
    paths = [path for path in folder.rglob("*.gguf") if all(part.exists() for part in split_files(path))]
    return [path.relative_to(folder).as_posix() for path in paths]


def choose_gguf(names: list[str], format: str | None, where: str) -> str:
    """The name of the GGUF file in a format, of those that a repository or a folder has, or the first of a split one.

    format: such as "Q4_K_M", in any case, or the name of a file. None: Q4_K_M, or else what there is, and a line says
    so. where: for messages. A line also says which file is taken if several have the format. UserError if none has it.
    """
    models = matching(names, "")
    if not models:
        raise UserError(f"{where} has no GGUF file of a language model")
    if format is not None:
        found = matching(names, format)
    else:
        found = next(filter(None, (matching(names, preferred) for preferred in PREFERRED)), models)
        if not matching(names, PREFERRED[0]):
            print_status(printable(f"{where} has no {PREFERRED[0]}: {found[0]} is used"))
    if not found:
        formats = sorted({text.upper() for name in models for text in FORMAT.findall(name.removesuffix(".gguf"))})
        raise UserError(f"{where} has no GGUF file in {format}; it has {', '.join(formats or models)}")
    if format is not None and len(found) > 1:
        line = f"{where} has {len(found)} files in {format}: {found[0]} is used, and not {', '.join(found[1:])}"
        print_status(printable(line))
    return found[0]


def matching(names: list[str], format: str) -> list[str]:
    """The names of GGUF files in a format (see choose_gguf; "": in any), those with the shortest names first. Of a
    split model only the first file counts."""
    found = []
    for name in names:
        model, base = name.lower(), name.lower().rpartition("/")[2]
        is_model = model.endswith(".gguf") and not any(word in base for word in NO_MODELS)
        if not is_model or split_files(Path(base))[0].name != base:
            continue
        in_format = rf"(?<![a-z0-9]){re.escape(format.lower())}(?=[-./]|$)"
        if format == "" or format.lower() in (model, base) or re.search(in_format, model.removesuffix(".gguf")):
            found.append(name)
    return sorted(found, key=lambda name: (len(name), name))


def format_of(name: str, names: list[str]) -> str:
    """What names this file after the colon: its format, or the file where others of the names have this format, too."""
    formats = FORMAT.findall(name.removesuffix(".gguf"))
    if formats and matching(names, formats[-1])[0] == name:
        return formats[-1].upper()
    return name


# ---------------------------------------------------------------- one file


def download_file(repository: str, name: str, sha256: str | None = None) -> Path:
    """A file of a repository in huggingface_hub's cache, which is downloaded if it is not there.

    sha256: what its authors have published; None: the SHA-256 that the hub names. UserError if the file has another.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    url = hf_hub_url(repository, name)
    with announced(f"asking the hub for {repository}/{name}"):
        about = get_hf_file_metadata(url)
    if about.size is None or re.fullmatch(r"[\w-]+", about.etag or "") is None:  # it is the name of a file here
        raise UserError(f"the hub does not say which digest or size {repository}/{name} has")
    if sha256 is not None and about.etag != sha256:
        raise UserError(f"{repository}/{name} has the ETag {about.etag} on the hub, but SHA-256 {sha256} is expected")

    blobs = cache_of(repository) / "blobs"
    blob, partial = blobs / about.etag, blobs / f"{about.etag}.partial"
    if not blob.exists():
        blobs.mkdir(parents=True, exist_ok=True)
        with locked(blobs / f"{about.etag}.lock", f"downloads {name}"):
            if not blob.exists():
                print_status(printable(f"downloading {repository}/{name} ({size_text(about.size)}, once)"))
                fetch_rest(url, partial, about.size, name)
                if re.fullmatch("[0-9a-f]{64}", about.etag):  # other files, which are small, have a SHA-1 of git
                    check_sha256(partial, about.etag, name)
                partial.rename(blob)
    return Path(hf_hub_download(repository, name))


def fetch_rest(url: str, path: Path, size: int, name: str):
    """Download what a file lacks of its `size` bytes. After an error of the network, go on where it stopped."""
    from huggingface_hub.errors import HfHubHTTPError

    done = path.stat().st_size if path.exists() else 0
    free = shutil.disk_usage(path.parent).free
    if free < size - done:
        raise UserError(f"{path.parent} has {free / 1e9:.2f} GB free, but {(size - done) / 1e9:.2f} GB are needed")
    attempts = 0
    longest = done
    with progress_bar(size, f"downloading {name}", "B", initial=done) as bar, open(path, "ab") as file:
        while file.tell() < size:
            try:
                fetch_once(url, file, bar)
            except Exception as error:
                is_answer = isinstance(error, HfHubHTTPError)  # which is an OSError, too
                is_final = error.response.status_code not in BUSY if is_answer else isinstance(error, OSError)
                if is_final or attempts == RETRIES:
                    raise
                time.sleep(attempts)
            attempts = 0 if file.tell() > longest else attempts + 1
            longest = max(longest, file.tell())
            if attempts > RETRIES:
                raise UserError(f"{name}: the hub sends {file.tell()} of {size} bytes")


def fetch_once(url: str, file: BinaryIO, bar: Progress):
    """Append to a file what it lacks. A server that does not know ranges sends it all again."""
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
