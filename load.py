"""From the command line's arguments to a model that is ready to run.

Read down: the device, the model with its kernels.
"""

from pathlib import Path

import torch

from checkpoint import read_model
from cli import UserError, first_line, print_status
from model import Transformer


def choose_device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {name} cannot be used here: known are cpu, cuda, cuda:1 (and so on) and mps")
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} cannot be used here: {first_line(error)}") from None


def load_model(
    directory: Path,
    device="cpu",
    dtype=torch.bfloat16,
    kernels: str = "auto",
    exact_activations: bool = False,
    shard=None,
) -> Transformer:
    """The checkpoint's model (checkpoint.read_model), with kernels installed as `install_kernels` says."""
    return install_kernels(read_model(directory, device, dtype, shard), kernels, exact_activations)


def install_kernels(model: Transformer, kernels: str = "auto", exact_activations: bool = False) -> Transformer:
    """The model; if kernels is "auto", with our own for the device that it is on, where they can run there.

    exact_activations: activations are not quantized on their way into quantized layers (CPU).
    """
    if kernels != "auto":
        return model
    try:
        if model.device.type == "cuda":
            from kernels_triton import install
        else:
            from kernels_cpu import install
    except ModuleNotFoundError as error:  # Triton is missing, or the file itself: models run without either
        print_status(f"{error.name} is not there: torch's own operations are used instead of our kernels")
        return model
    if model.device.type == "cuda":
        install(model)
    else:
        install(model, exact_activations)
    return model
