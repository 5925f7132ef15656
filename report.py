"""What a run took: seconds and counts, the bytes that each token read, and how near that is to what the machine can do.

Prefill and decode are never mixed, compilation is in no rate, and under the profiler there is no rate at all: each of
these has made somebody believe a wrong number. Knows the model, nothing of text or of the command line.
"""

import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from model import Transformer


@dataclass
class Timing:
    """Seconds and counts, summed over generations. Prefill and decode are never mixed; kv_bytes are decode's."""

    first_token_s: float | None = None  # of the first generation
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    kv_bytes: int = 0


def weight_bytes(model: Transformer, rows: float) -> float:
    """Bytes of weights that one decode step reads: everything, but of an embedding table that is not the head too
    only one vector a row."""
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    table = model.embedding.weight
    return total if model.output is None else total - table.nbytes + rows * table[0].nbytes


def kv_bytes(model: Transformer, lengths: list[int]) -> int:
    """Bytes of live keys and values that one decode step reads, for rows with this many positions filled."""
    config = model.config
    windows = Counter(config.window(layer) for layer in range(config.n_layer))
    looks = sum(n * min(length, window or length) for window, n in windows.items() for length in lengths)
    return looks * 2 * config.n_kv_head * config.head_dim * model.norm.weight.itemsize


def read_bandwidth(model: Transformer) -> float:
    """Bytes a second at which this machine reads the model's own weights when it does nothing but sum them."""
    weights = [w.view(-1)[: w.numel() // 8 * 8].view(torch.int64) for w in model.state_dict().values()]
    best = float("inf")
    for _ in range(4):
        synchronize(weights[0].device)
        start = time.perf_counter()
        for w in weights:
            w.sum()
        synchronize(weights[0].device)
        best = min(best, time.perf_counter() - start)
    return sum(w.nbytes for w in weights) / best


def synchronize(device: torch.device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(device: torch.device) -> int:
    """Bytes: of the whole process on CPU, of what torch allocated on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:  # getrusage would count what our parent held before it started us
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compile_counts() -> tuple[int, int]:
    """(graphs compiled, graph breaks) in this process so far."""
    if "torch._dynamo" not in sys.modules:  # nothing was; importing it takes a second
        return 0, 0
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def measurements(model: Transformer, timing: Timing, profiled: bool) -> dict:
    """The measured part of --json. Under the profiler no rate is given: it slows every operation."""
    weight = model.norm.weight
    found = {"peak_memory_bytes": peak_memory(weight.device)}  # first: measuring the bandwidth must not count
    names = ("time_to_first_token_s", "prefill_tokens_per_s", "decode_tokens_per_s", "weight_bytes_per_token")
    names += ("kv_bytes_per_token", "bandwidth_bytes_per_s", "read_bandwidth_bytes_per_s")
    found |= dict.fromkeys(names)
    tokens, steps = timing.decode_tokens, timing.decode_steps
    if tokens:
        found["weight_bytes_per_token"] = weight_bytes(model, tokens / steps) * steps / tokens
        found["kv_bytes_per_token"] = timing.kv_bytes / tokens
    if not profiled:
        found["time_to_first_token_s"] = timing.first_token_s
        found["prefill_tokens_per_s"] = timing.prefill_tokens / timing.prefill_s
        found["read_bandwidth_bytes_per_s"] = read_bandwidth(model)
    if tokens and not profiled:
        found["decode_tokens_per_s"] = rate = tokens / timing.decode_s
        found["bandwidth_bytes_per_s"] = (found["weight_bytes_per_token"] + found["kv_bytes_per_token"]) * rate
    return found | {
        "mean_accepted_tokens": None,  # of speculation
        "device": str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def print_report(result: dict, timing: Timing):
    """The numbers of --json in four lines, on stderr."""
    line = f"\nload {result['load_s']:.2f} s, compile {result['compile_s']:.2f} s"
    if result["time_to_first_token_s"] is not None:
        line += f", first token {result['time_to_first_token_s']:.3f} s"
    lines = [line + f" ({result['device']}, {result['dtype']}, torch {result['torch']})"]
    if (rate := result["prefill_tokens_per_s"]) is not None:
        lines.append(f"prefill: {timing.prefill_tokens} tokens, {rate:.1f} tokens/s")
    if (rate := result["decode_tokens_per_s"]) is not None:
        weights, kv = result["weight_bytes_per_token"] / 1e6, result["kv_bytes_per_token"] / 1e6
        got, possible = result["bandwidth_bytes_per_s"] / 1e9, result["read_bandwidth_bytes_per_s"] / 1e9
        lines.append(
            f"decode: {timing.decode_tokens} tokens, {rate:.1f} tokens/s; each reads {weights:.1f} MB of weights and "
            f"{kv:.1f} MB of KV cache: {got:.1f} GB/s, {got / possible:.0%} of the {possible:.1f} GB/s measured here"
        )
    recompiles, breaks = result["recompiles"], result["graph_breaks"]
    lines.append(
        f"peak memory {result['peak_memory_bytes'] / 1e6:.0f} MB; {recompiles} recompiles, {breaks} graph breaks"
    )
    print("\n".join(lines), file=sys.stderr)
