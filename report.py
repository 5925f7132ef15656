"""What a run took: seconds and counts, the bytes that each token read, and how near that is to what the machine can do.

Prefill and decode are never mixed, compilation is in no rate, and under the profiler there is no rate at all: each of
these has made somebody believe a wrong number. Knows the model, nothing of text or of the command line.
"""

import resource
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from linear import Quantization, swap
from model import Config, Transformer


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
    draft_bytes: float = 0.0  # of weights that a draft model read

    def add_prefill(self, seconds: float, tokens: int):
        self.first_token_s = seconds if self.first_token_s is None else self.first_token_s
        self.prefill_s += seconds
        self.prefill_tokens += tokens

    def add_step(self, seconds: float, tokens: int, kv_bytes: int):
        self.decode_s += seconds
        self.decode_tokens += tokens
        self.decode_steps += 1
        self.kv_bytes += kv_bytes


def weight_bytes(model: Transformer, rows: float) -> float:
    """Bytes of weights that one decode step reads: everything, but of an embedding table that is not the head too
    only one vector a row."""
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    table = sum(tensor.nbytes for tensor in model.embedding.state_dict().values())
    return total if model.output is None else total - table + rows * table / model.config.vocab_size


def kv_bytes(model: Transformer, lengths: list[int]) -> int:
    """Bytes of live keys and values that one decode step reads, for rows with this many positions filled."""
    config = model.blocks[0].attention.config  # where the model is split over ranks, of this one's heads
    looks = config.n_layer * sum(lengths)
    if config.sliding_window is not None:
        windows = [config.window(layer) for layer in range(config.n_layer)]
        looks = sum(min(length, window or length) for window in windows for length in lengths)
    return looks * 2 * config.n_kv_head * config.head_dim * model.norm.weight.itemsize


def roofline(
    config: Config, bandwidth: float, dtype=torch.bfloat16, context: int = 0, rows: int = 1, quantization=None
) -> dict:
    """What a decode step of `rows` rows, each with `context` positions filled, computes and reads for each token, and
    the tokens a second that no machine reading `bandwidth` bytes a second can exceed.

    FLOPs are two for every weight of a matrix, and for every position that is seen four for each number of a query.
    """
    with torch.device("meta"):
        model = swap(Transformer(config).to(dtype), quantization)
    linears = [module for name, module in model.named_modules() if hasattr(module, "in_features")]
    matrices = sum(module.in_features * module.out_features for module in linears if module is not model.embedding)
    matrices += config.vocab_size * config.dim if model.output is None else 0
    seen = sum(min(context, config.window(layer) or context) for layer in range(config.n_layer))
    weights, kv = weight_bytes(model, rows), kv_bytes(model, [context] * rows)
    return {
        "flops_per_token": 2 * matrices + 4 * config.n_head * config.head_dim * seen,
        "weight_bytes_per_token": weights / rows,
        "kv_bytes_per_token": kv / rows,
        "bandwidth_bytes_per_s": bandwidth,
        "bound_tokens_per_s": bandwidth * rows / (weights + kv),
    }


def rooflines(config: Config, bandwidth: float, dtype: torch.dtype, rows: int, quantization=None) -> list[dict]:
    """`roofline` at several lengths of context, as far as the model's own goes."""
    contexts = [n for n in (1, 512, 2048, 8192, 32768, 131072) if n <= config.max_seq_length]
    return [{"context": n, "rows": rows} | roofline(config, bandwidth, dtype, n, rows, quantization) for n in contexts]


def roofline_text(table: list[dict], dtype: torch.dtype) -> str:
    bandwidth, rows = table[0]["bandwidth_bytes_per_s"] / 1e9, table[0]["rows"]
    lines = [f"{rows} row{'s' * (rows > 1)}, {str(dtype).removeprefix('torch.')}, {bandwidth:,.1f} GB/s"]
    lines += ["context   GFLOPs/token   weights MB/token   KV MB/token   bound tokens/s"]
    for at in table:
        weights, kv = at["weight_bytes_per_token"] / 1e6, at["kv_bytes_per_token"] / 1e6
        line = f"{at['context']:7}   {at['flops_per_token'] / 1e9:12,.3f}   {weights:16,.1f}   {kv:11,.1f}   "
        lines.append(line + f"{at['bound_tokens_per_s']:14,.1f}")
    return "\n".join(lines)


def launches(config: Config, bits: int, head_bits: int, multiprocessors: int) -> int:
    """Launches of our GPU kernels in a decode step of at most 16 tokens a row, with the fixed choice of tiles: what
    torch's compiler adds (embedding, positions, the draw) is not among them."""
    from kernels_triton import can_fuse, fixed_choice

    def product(N, K, bits=bits):
        return 1 if fixed_choice(bits, N, K, multiprocessors)["CUTS"] == 1 else 2

    D, hidden, heads = config.dim, config.hidden_dim, config.n_head * config.head_dim
    block = product(heads + 2 * config.n_kv_head * config.head_dim, D) + product(D, heads)
    block += product(hidden, D) + product(D, hidden) + 2  # attention and its merge
    block += 1 if can_fuse(config) else 2  # rotary with cache write; or two norms, and torch writes to the cache
    return config.n_layer * block + config.embedding_norm + 1 + product(config.vocab_size, D, head_bits)


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


def all_reduces_s(model: Transformer, times: int = 10) -> float:
    """Seconds that the all-reduces of one decode step take when nothing else happens; all ranks measure together."""
    from tp import all_reduce

    x = model.norm.weight.new_zeros(model.blocks[0].attention.k_cache.shape[0], 1, model.config.dim)  # (B,1,D)
    synchronize(x.device)
    start = time.perf_counter()
    for _ in range(times * (2 * model.config.n_layer + 1)):
        all_reduce(x, model.split.group)
    synchronize(x.device)
    return (time.perf_counter() - start) / times


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
        read = weight_bytes(model, tokens / steps) * steps + timing.draft_bytes
        found["weight_bytes_per_token"] = read / tokens
        found["kv_bytes_per_token"] = timing.kv_bytes / tokens
    if not profiled:
        found["time_to_first_token_s"] = timing.first_token_s
        found["prefill_tokens_per_s"] = timing.prefill_tokens / timing.prefill_s
        found["read_bandwidth_bytes_per_s"] = read_bandwidth(model)
    if tokens and not profiled:
        found["decode_tokens_per_s"] = rate = tokens / timing.decode_s
        found["bandwidth_bytes_per_s"] = (found["weight_bytes_per_token"] + found["kv_bytes_per_token"]) * rate
    if model.split is not None:  # all bytes are those of one rank
        found |= {"ranks": model.split.ranks, "communication_share": None}
        found["weight_bytes_per_rank"] = sum(tensor.nbytes for tensor in model.state_dict().values())
        if tokens and not profiled:
            found["communication_share"] = all_reduces_s(model) * steps / timing.decode_s
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
    if (about := result.get("speculation")) is not None:
        kept = "/".join(f"{share:.0%}" for share in about["acceptance_by_place"]) or "none"
        shares = ", ".join(f"{name} {share:.0%}" for name, share in about["share_of_time"].items())
        of, proposed = result["mean_accepted_tokens"], about["mean_proposed_tokens"]
        lines.append(
            f"speculation: {about['steps']} steps, of {proposed:.1f} tokens proposed {of:.1f} kept "
            f"({kept} by place), {about['plain_steps']} steps without" + f"; {shares}" * bool(shares)
        )
    if "ranks" in result:
        line = f"{result['ranks']} ranks, each with {result['weight_bytes_per_rank'] / 1e6:.1f} MB of weights"
        if (share := result["communication_share"]) is not None:  # may be above 1, where ranks share cores
            step_ms = timing.decode_s / timing.decode_steps * 1e3
            line += f"; the all-reduces of a step take {share * step_ms:.2f} ms by themselves, a step {step_ms:.2f}"
        lines.append(line)
    recompiles, breaks = result["recompiles"], result["graph_breaks"]
    lines.append(
        f"peak memory {result['peak_memory_bytes'] / 1e6:.0f} MB; {recompiles} recompiles, {breaks} graph breaks"
    )
    print("\n".join(lines), file=sys.stderr)


def main():
    """The roofline of a model of which there need be no more than its config.json."""
    from checkpoint import DTYPES, is_ours, read_config, read_quantization
    from cli import ArgumentParser
    from convert_hf_checkpoint import hf_config

    parser = ArgumentParser(description="Tokens a second that a model cannot exceed, by the bytes it has to read.")
    parser.add_argument("directory", type=Path, help="with a config.json, ours or Hugging Face's")
    parser.add_argument("--bandwidth", type=float, required=True, metavar="GB/s", help="that a device reads")
    parser.add_argument("--devices", type=int, default=1, help="which share the weights (1)")
    parser.add_argument("--rows", type=int, default=1, help="that are decoded together (1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache (bfloat16)")
    quantized = "as quantize.py would quantize it, in groups of 32 with a head of 8 bits"
    parser.add_argument("--mode", choices=("int8", "int4"), help=quantized)
    of_gpu = "also count the launches of our GPU kernels in a step, on a GPU with so many"
    parser.add_argument("--multiprocessors", type=int, metavar="N", help=of_gpu)
    args = parser.parse_args()
    if not (0 < args.bandwidth < float("inf") and args.devices > 0 and args.rows > 0):
        parser.error("--bandwidth, --devices and --rows must be above 0")
    if args.multiprocessors and find_spec("triton") is None:
        parser.error("--multiprocessors needs Triton, whose kernels it counts: pip install -r requirements-dev.txt")
    ours, dtype = is_ours(args.directory), DTYPES[args.dtype]
    config = read_config(args.directory) if ours else hf_config(args.directory)
    quantization = Quantization(args.mode, 32, "int8") if args.mode else None
    if ours and quantization is None:
        quantization = read_quantization(args.directory)
    table = rooflines(config, args.bandwidth * 1e9 * args.devices, dtype, args.rows, quantization)
    print(roofline_text(table, dtype))
    if args.multiprocessors:
        formats = [quantization.format(name) if quantization else "none" for name in ("", "output")]
        bits = [8 * dtype.itemsize if name == "none" else int(name[3:]) for name in formats]
        print(f"{launches(config, *bits, args.multiprocessors)} launches a step of our GPU kernels")


if __name__ == "__main__":
    from cli import run_command

    run_command(main)
