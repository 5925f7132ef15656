"""Each GPU kernel alone: what it reaches of the memory's bandwidth or of arithmetic, beside torch's own.

    python benchmarks/gpu_kernels.py [--tune] [--out JSON]     # on a GPU
    python benchmarks/gpu_kernels.py --smoke                   # tiny sizes in Triton's interpreter: does it run?

products    all shapes of Llama-3.1-8B, 1, 4 and 16 rows, each format: the bytes of the weights a second, as a share of
            the measured copy bandwidth (bytes read plus written). torch: what its compiler makes of the same layer
decode      attention of one token over 1k to 128k live positions of a cache of 131072, bytes of live keys and values a
            second. torch: SDPA over just the live positions
prefill     causal attention of a prompt, TFLOP/s (4 S^2 H E / 2). torch: SDPA
softmax     what fusing mask, bias and softmax between the two products is worth: the two lines of the BLOOM story with
            a product before and after, eager and compiled, against the kernel
packing     seconds to bring the weights of a block into the kernels' order

Time is a CUDA graph's of several calls in turn on different copies of the weights or caches, four times as large as the
cache that the multiprocessors share, so that everything comes from memory; the median of several replays. --tune tries
the tiles of SPACE for each product first, and keeps the fastest where the kernels look for them. It is never done in a
timed region: without it they take their fixed choice.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks as it is imported

import measure
import torch
from measure import BF16
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as SDPA

import kernels_triton as kt
from cli import UserError, print_status, run_command
from linear import LINEAR
from model import alibi_slopes
from report import synchronize

FORMATS = {"bf16": (16, 0), "int8": (8, 32), "int4": (4, 32)}  # bits, columns of a group
FULL = {
    "products": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "rows": (1, 4, 16),
    "heads": (32, 8, 128),  # H, K, E
    "cache": 131072 + 8,
    "decode": (1024, 8192, 32768, 131072),
    "prefill": (2048, 8192, 32768),
    "softmax": 2048,
    "copy": 2**31,
}
FULL["products"]["head"] = (128256, 4096)
SMOKE = {"products": {"gate_up": (48, 64)}, "rows": (1, 3), "heads": (4, 2, 16), "cache": 136, "decode": (70,)}
SMOKE |= {"prefill": (40,), "softmax": 20, "copy": 2**20}
SPACE = [
    {"BLOCK_N": block, "SPLIT_K": cuts, "num_warps": block // rows, "num_stages": stages}
    for block in (16, 32, 64, 128)
    for rows in (16, 32)[: 1 + (block > 16)]  # of outputs a warp: one or two operands of the tensor cores
    for cuts in (1, 2, 4, 8)
    for stages in (3, 4, 6)
]


def seconds(calls: list[Callable]) -> float:
    """Of one of these calls, which do the same on different memory."""
    if not torch.cuda.is_available():
        return measure.seconds(lambda: [call() for call in calls]) / len(calls)
    with torch.cuda.stream(torch.cuda.Stream()):  # compiles, and what else is done once
        for _ in range(3):
            calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return median(times)


def copies(size: int, device: torch.device) -> int:
    """How many things of `size` bytes are too much for the shared cache to hold."""
    if device.type != "cuda":
        return 1
    return max(2, -(-4 * torch.cuda.get_device_properties(device).L2_cache_size // size))


def randn(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=BF16)


def compiled(function: Callable, device: torch.device) -> Callable:
    """By torch's compiler; on a CPU, where it would only take time, as it is."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


# ---------------------------------------------------------------- products


def random_layer(format: str, N: int, K: int, device: torch.device) -> nn.Module:
    """nn.Linear, Int8Linear or Int4Linear of random numbers."""
    if format == "bf16":
        return nn.Linear(K, N, False, device=device, dtype=BF16).requires_grad_(False)
    with torch.device(device):
        layer = LINEAR[format](K, N, False, FORMATS[format][1])
    for tensor in layer.buffers():
        tensor.normal_(0, 0.01) if tensor.is_floating_point() else tensor.random_(-128 if format == "int8" else 0, 127)
    return layer


def products(sizes: dict, device: torch.device, tuning: bool) -> list[dict]:
    found = []
    for format, (name, (N, K)) in ((format, item) for format in FORMATS for item in sizes["products"].items()):
        print_status(f"{format} {name}")
        plain = random_layer(format, N, K, device)
        size = sum(tensor.nbytes for tensor in plain.state_dict().values())
        plains = [plain] + [random_layer(format, N, K, device) for _ in range(copies(size, device) - 1)]
        ours = plains if format == "bf16" else [kt.PackedLinear(layer) for layer in plains]
        gated = name == "gate_up"  # ours with SwiGLU, as a model has it; torch's without
        if tuning:
            tune(ours, format, N, K, gated, device)
        for M in sizes["rows"]:
            x, call = randn(M, K, device=device), compiled(lambda layer, x: layer(x), device)
            row = {"name": f"{format} {name} {K}x{N}", "rows": M, "bytes": size}
            row["ours_s"] = seconds([partial(kt.apply_linear, layer, x, gated=gated) for layer in ours])
            found.append(row | {"torch_s": seconds([partial(call, layer, x) for layer in plains])})
    return found


def tune(layers: list, format: str, N: int, K: int, gated: bool, device: torch.device):
    """Keep the fastest of SPACE for one row, by which all numbers of rows up to 16 then go."""
    x, path, choose = randn(1, K, device=device), kt.tuning_file(device), kt.choose_tiles
    times, space = [], SPACE if device.type == "cuda" else SPACE[::9]
    for tiles in space:
        kt.choose_tiles = lambda *shape, tiles=tiles: tiles
        try:
            times.append(seconds([partial(kt.apply_linear, layer, x, gated=gated) for layer in layers]))
        except Exception as error:  # more shared memory or registers than there are
            if "out of resource" not in str(error):
                raise
            times.append(float("inf"))
    kt.choose_tiles = choose
    known = json.loads(path.read_text()) if path.exists() else {}
    known[kt.tile_key(*FORMATS[format], N // 2 if gated else N, K, gated)] = space[times.index(min(times))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1))
    kt.tuned_tiles.cache_clear()


def packing(sizes: dict, device: torch.device) -> list[dict]:
    found = []
    for format in ("int8", "int4"):
        layers = [random_layer(format, N, K, device) for N, K in sizes["products"].values()]
        kt.PackedLinear(layers[0])  # the first call loads what it needs
        synchronize(device)
        start = time.perf_counter()
        for layer in layers:
            kt.PackedLinear(layer)
        synchronize(device)
        names = ", ".join(sizes["products"])
        found.append({"name": f"packing {format}: {names}", "rows": 0, "ours_s": time.perf_counter() - start})
    return found


# ---------------------------------------------------------------- attention


def decoding(sizes: dict, device: torch.device) -> list[dict]:
    (H, K, E), found = sizes["heads"], []
    for length in sizes["decode"]:
        print_status(f"decode at {length}")
        q, at, size = randn(1, 1, H, E, device=device), torch.tensor([[length - 1]], device=device), 4 * length * K * E
        count = min(copies(size, device), 24)
        pairs = [[randn(1, K, sizes["cache"], E, device=device) for _ in range(2)] for _ in range(count)]
        row = {"name": f"attention, decode at {length}", "rows": 1, "bytes": size}
        row["ours_s"] = seconds([partial(kt.attention, q, k, v, at, None, None, None) for k, v in pairs])
        live = [(k[:, :, :length], v[:, :, :length]) for k, v in pairs]
        row["torch_s"] = seconds([partial(SDPA, q.transpose(1, 2), k, v, enable_gqa=True) for k, v in live])
        found.append(row)
    return found


def prefilling(sizes: dict, device: torch.device) -> list[dict]:
    (H, K, E), found = sizes["heads"], []
    for S in sizes["prefill"]:
        print_status(f"prefill of {S}")
        q, at = randn(1, S, H, E, device=device), torch.arange(S, device=device)[None]
        k, v = (randn(1, K, S + 8, E, device=device) for _ in range(2))
        row = {"name": f"attention, prefill of {S}", "rows": S, "flops": 2 * S * S * H * E}
        row["ours_s"] = seconds([partial(kt.attention, q, k, v, at, None, None, None)] * 2)
        heads = q.transpose(1, 2), k[:, :, :S], v[:, :, :S]
        found.append(row | {"torch_s": seconds([partial(SDPA, *heads, is_causal=True, enable_gqa=True)] * 2)})
    return found


def fusing(sizes: dict, device: torch.device) -> list[dict]:
    """BLOOM's attention of S tokens with ALiBi: the two lines as they stand, and in the kernel."""
    S, (H, _, E) = sizes["softmax"], sizes["heads"]
    print_status(f"softmax of {S}")
    q, k, v = (randn(1, H, S, E, device=device) for _ in range(3))
    slopes, at = alibi_slopes(H).to(device), torch.arange(S, device=device)
    bias = slopes[:, None, None] * (at - (S - 1))  # (H,1,S)
    visible = at <= at[:, None]

    def unfused(q, k, v):
        scores = torch.where(visible, (q @ k.mT).float() * E**-0.5 + bias, float("-inf"))
        return torch.softmax(scores, dim=-1).to(v.dtype) @ v

    row = {"name": f"mask, ALiBi, softmax of {S}", "rows": S, "flops": 4 * S * S * H * E}
    tokens = q.transpose(1, 2).contiguous()
    row["ours_s"] = seconds([partial(kt.attention, tokens, k, v, at[None], None, slopes, None)] * 2)
    row["torch_s"] = seconds([partial(unfused, q, k, v)] * 2)
    row["compiled_s"] = seconds([partial(compiled(unfused, device), q, k, v)] * 2)
    return [row]


def print_row(row: dict, copy_rate: float):
    cells = [f"{row['name']:34}{row['rows'] or '':>7}{row['ours_s'] * 1e6:12.1f} us"]
    for who in (who for who in ("ours", "torch", "compiled") if f"{who}_s" in row):
        if "bytes" in row:
            rate = row["bytes"] / row[f"{who}_s"]
            cells.append(f"{who} {rate / 1e9:.0f} GB/s, {rate / copy_rate:.0%}")
        elif "flops" in row:
            cells.append(f"{who} {row['flops'] / row[f'{who}_s'] / 1e12:.1f} TFLOP/s")
    print("   ".join(cells))


def main():
    parser = measure.make_parser(__doc__, rounds=None, checkpoint=False)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, in the interpreter, on the CPU")
    parser.add_argument("--tune", action="store_true", help="first find the tiles of the products")
    args = parser.parse_args()
    if not (args.smoke or torch.cuda.is_available()):
        raise UserError("there is no GPU that torch can use; --smoke runs tiny sizes without one")
    device, sizes = torch.device("cpu" if args.smoke else "cuda"), SMOKE if args.smoke else FULL
    if args.smoke:
        kt.register(kt.LIBRARY, "CPU")
    torch.manual_seed(0)
    with torch.no_grad():
        copy_rate = measure.copy_bandwidth(device, sizes["copy"])
        print(f"copy bandwidth {copy_rate / 1e9:.0f} GB/s")
        rows = products(sizes, device, args.tune)
        for part in (decoding, prefilling, fusing, packing):
            rows += part(sizes, device)
    for row in rows:
        print_row(row, copy_rate)
    if args.out or not args.smoke:
        about = measure.about_run(device) | {"copy_bytes_per_s": copy_rate}
        measure.save(about | {"rows": rows}, args.out, "gpu_kernels", device)


if __name__ == "__main__":
    run_command(main)
