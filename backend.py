"""What a model may rely on: the kernels of its device, memory for its caches, and threads.

Read down: Backend and Installer, the interface between a model and the kernels of a device
(cpu/install.py, kernels_triton.py); which models the fused operations know; the AMX guard. Knows
nothing of models, operations or files.

Importing this file runs one check, `guard_amx`: it must come before the first matmul of the
process.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial

import torch


@dataclass
class FixedThreads:
    """The number of threads is not tuned. (cpu.threads.Threads tunes it, and has the same members.)"""

    fixed: bool = True
    trials: int = 0

    def of(self, kind, work, fixed=False):
        return nullcontext()

    def used(self):
        return {}

    def others(self):
        return None

    def forget(self):
        pass


@dataclass(frozen=True)
class Backend:
    """What a model and the engine may rely on, as an Installer returns it.

    The default is for a device without kernels, on which everything runs as plain PyTorch.
    """

    name: str = "torch"  # which kernels run
    # Runs all blocks, or those of some layers (a slice; only if every block has attention), as one call:
    # run_blocks(blocks, x, ropes, input_pos, rows, own_inputs, layers) -> x
    run_blocks: Callable | None = None
    # The same for the block of the MTP layer, without the last two
    run_draft: Callable | None = None
    # What mtp.MTPLayer.read does: write_draft_keys(layer, embedded, hidden, input_pos, rows)
    write_draft_keys: Callable | None = None
    max_fused_tokens: int = 0  # these take up to this many new tokens per row
    # A pass of up to MAX_DECODE_TOKENS tokens per row gives the same bits with any number of
    # threads.
    thread_invariant: bool = False
    # Passes of any length give the same K/V and logits, bit for bit, with any number of threads. If
    # False, the K/V of a prompt may differ in the last bits when it is read in other chunks.
    chunk_invariant: bool = False
    # make_shadow(model) returns drawable_logits, or None if it would not gain anything. The model has caches.
    make_shadow: Callable = lambda model: None
    # drawable_logits(x, temperature, seed, top_k, min_p, position): the logits (n,V) of hidden states x (n,D), in
    # which a token that cannot be drawn with these settings (n,) has -inf. It may return None: take all logits.
    drawable_logits: Callable | None = None
    # zeros(nbytes, device) returns a function like torch.zeros, for KV caches of nbytes bytes.
    zeros: Callable = lambda nbytes, device: partial(torch.zeros, device=device)
    # make_threads(fixed) returns what sets the number of threads of an engine's steps.
    make_threads: Callable = FixedThreads


class Installer:
    """Puts the kernels of a device into a model, layer by layer while the model is read.

    Each tensor goes through `place`, each layer that has all its tensors through `pack`, and at the
    end `finish` says what the model can rely on. In a model that is in memory already, each layer goes
    through `pack` only.

    These defaults are for a device without kernels; cpu/install.py and kernels_triton.py override them.
    """

    formats = ()  # the quantized formats that have kernels on this device (formats.FORMATS)

    def __init__(self, model, kernels="auto", exact_activations=False):
        """model: may still be empty, on the meta device. The others are options: see
        options.ModelOptions."""
        self.model = model
        self.exact_activations = exact_activations

    @staticmethod
    def prepare_process(threads):
        """Settings of the whole process, for example the number of CPU threads (None: as many as
        are useful)."""

    def reserve(self, nbytes):
        """Make memory for this many bytes of copies, for weights that stay as they are."""

    def place(self, tensor, device, dtype, is_mapped):
        """A tensor on this device. is_mapped: it is in a mapped file, or a part of a larger one, so
        it is copied."""
        return tensor.to(device=device, dtype=dtype, copy=is_mapped)

    def pack(self, name):
        """Replace the layer with this name by one with packed weights, if kernels can use it."""

    def finish(self):
        """The Backend, once all layers have gone through `pack`."""
        return Backend()


def synchronize(device: torch.device):
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---------------------------------------------------------------- which models the fused operations know

# The fields of config.Config that the fused operations (all blocks of a model in one call) take
# into account.
FUSED_FIELDS = (
    "n_layer", "n_head", "n_kv_head", "head_dim", "dim", "hidden_dim", "vocab_size", "max_seq_length", "norm_eps",
    "rope_base", "rope_scaling", "tied_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sliding_window",
    "sliding_layers", "norm", "mlp", "alibi", "embedding_norm", "post_norm_residual", "n_token", "layers_without_rope",
    "sliding_rope_base", "rotary_dim", "embedding_scale", "attention_scale", "logits_scale", "logits_softcap", "mtp",
)  # fmt: skip
# The fields of config.Experts that the fused operations take into account.
FUSED_EXPERT_FIELDS = (
    "layers", "n_expert", "n_active", "hidden_dim", "normalized", "shared_dim", "scoring", "choice_bias", "scale",
    "expert_scales", "beside_mlp",
)  # fmt: skip


def uses_only(config, known):
    """Whether all fields of a config, or of its Experts, other than `known` have their default values.

    With known=FUSED_FIELDS: whether the fused operations implement all that a model needs.
    """
    others = [field for field in fields(config) if field.name not in known]
    experts = getattr(config, "experts", None)
    if experts is not None and not uses_only(experts, FUSED_EXPERT_FIELDS):
        return False
    return all(getattr(config, field.name) == field.default for field in others)


# ---------------------------------------------------------------- the AMX guard


def survives(work, timeout_s=20.0):
    """Run work() in a forked child. True if the child ends by itself, False if a signal or the
    timeout ended it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGILL, signal.SIG_DFL)  # no message, even if the parent has a handler
        try:
            work()
        finally:
            os._exit(0)  # no atexit, no flush of the parent's buffers

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.WIFEXITED(status)
        time.sleep(0.002)

    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _small_bf16_matmul():
    torch.set_num_threads(1)  # a forked child must not touch the parent's thread pool
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(a, a)


def guard_amx():
    """Forbid oneDNN to use AMX on machines that advertise AMX but kill a process that uses it
    (SIGILL), as some virtual machines do.

    torch.cpu._init_amx() succeeds even on these, so a child process tries a matmul. The check must
    run before the first matmul of this process, because oneDNN then reads the environment. Without
    AMX, or if the user has set ONEDNN_MAX_CPU_ISA, nothing changes.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not hasattr(os, "fork"):
        return
    if torch.cpu._is_amx_tile_supported() and not survives(_small_bf16_matmul):
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


guard_amx()
