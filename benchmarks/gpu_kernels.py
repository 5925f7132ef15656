"""The time of the GPU kernels alone, and of decode with whole models of random weights, beside torch's own.

    python benchmarks/gpu_kernels.py [--tune] [--out JSON]     # on a GPU
    python benchmarks/gpu_kernels.py --smoke                   # tiny sizes in Triton's interpreter

products    all shapes of Llama-3.1-8B, for 1, 4 and 16 rows and each format. torch: the same layer,
            compiled. Bytes: those of the weights
attention   one token over 1k to 128k live positions of a cache of 131072 (torch: SDPA over the live
            positions only), and a causal prompt (torch: SDPA). Bytes: those of the live keys and
            values
decode      compiled steps of whole models, one row, at 0, 8k and 32k positions of context (torch:
            without our kernels). Bytes: those of weights and live keys and values. A model that
            does not fit in memory is left out. A context may be longer than the model supports,
            because the time does not depend on that

A share is bytes per second divided by the copy bandwidth (bytes read plus written), which is
measured first. The time of an operation is the median of several replays of a CUDA graph of calls
on different copies of the weights or caches. Together the copies are four times as large as the L2
cache, so that all data comes from memory. --tune first tries the tiles of SPACE for each product
and stores the fastest, which the kernels use from then on.
"""

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import measure
import torch
from measure import BF16, FORMATS
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as SDPA

try:
    from triton.testing import do_bench_cudagraph
except ModuleNotFoundError:
    sys.exit("gpu_kernels.py: error: triton is missing: it comes with PyTorch for CUDA, and with requirements-dev.txt")

import kernels_triton as kt
from cli import UserError, print_status, run_command
from compile import compiled_steps
from config import Config, RopeScaling
from costs import weight_bytes
from engine import Engine
from formats import Quantization, QuantizedLinear, Scheme, swap
from load import install_kernels
from model import Transformer

BITS = {"bf16": (16, 0), "int8": (8, 32), "int4": (4, 32)}  # bits, groupsize
LLAMA31 = RopeScaling("llama3", 8.0, 8192)
LLAMA32 = RopeScaling("llama3", 32.0, 8192)
MODELS = {  # layers  H  K   E    D     F      V      context
    "Llama-3.2-1B": Config(16, 32, 8, 64, 2048, 8192, 128256, 131072, 1e-5, 5e5, LLAMA32, tied_embeddings=True),
    "Llama-3.1-8B": Config(32, 32, 8, 128, 4096, 14336, 128256, 131072, 1e-5, 5e5, LLAMA31),
    "Llama-2-7B": Config(32, 32, 32, 128, 4096, 11008, 32000, 4096, 1e-5),
}
FULL = {
    "products": {  # name: (N, C)
        "qkv": (6144, 4096),
        "out": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "rows": (1, 4, 16),
    "heads": (32, 8, 128),  # H, K, E
    "cache": 131072 + 8,
    "decode": (1024, 8192, 32768, 131072),
    "prefill": (2048, 8192, 32768),
    "copy": 2**31,
    "models": MODELS,
    "contexts": (0, 8192, 32768),
    "steps": 100,
}
SMOKE = {
    "products": {"gate_up": (48, 64)},
    "rows": (1, 3),
    "heads": (4, 2, 16),
    "cache": 136,
    "decode": (70,),
    "prefill": (40,),
    "copy": 2**20,
    "models": {"tiny": Config(2, 6, 3, 10, 44, 76, 131, 32, 1e-5, 5e5, LLAMA31)},
    "contexts": (0, 40),
    "steps": 3,
}
# A warp has 16 or 32 outputs: one or two operands of the tensor cores.
BLOCKS_AND_WARPS = ((16, 1), (32, 2), (32, 1), (64, 4), (64, 2), (128, 8), (128, 4))
SPACE = [
    {"BLOCK_N": block, "SPLIT_K": cuts, "num_warps": warps, "num_stages": stages}
    for (block, warps), cuts, stages in itertools.product(BLOCKS_AND_WARPS, (1, 2, 4, 8), (3, 4, 6))
]


def seconds(calls: list[Callable]) -> float:
    """The time of one of these calls, which do the same work on different memory."""
    all_calls = measure.in_a_row(calls)
    if torch.cuda.is_available():
        return do_bench_cudagraph(all_calls, return_mode="median") / 1e3 / len(calls)
    return measure.seconds(all_calls) / len(calls)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second, read plus written, of copies of `size` bytes within the device's memory."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * size / seconds([partial(target.copy_, source)])


def copies(size: int, device: torch.device) -> int:
    """How many copies of `size` bytes are together four times as large as the L2 cache."""
    if device.type != "cuda":
        return 1
    return max(2, -(-4 * torch.cuda.get_device_properties(device).L2_cache_size // size))


def randn(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=BF16)


def fill(tensors):
    """Fill tensors with random numbers so small that nothing overflows."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.normal_(0, 0.01)
        else:
            tensor.random_()


# ---------------------------------------------------------------- products


def random_layer(format: str, N: int, C: int, device: torch.device) -> nn.Module:
    """An nn.Linear or QuantizedLinear of random numbers."""
    if format == "bf16":
        return nn.Linear(C, N, False, device=device, dtype=BF16).requires_grad_(False)
    with torch.device(device):
        layer = QuantizedLinear(C, N, False, Scheme(format, BITS[format][1]))
    fill(layer.buffers())
    return layer


def random_layers(format: str, N: int, C: int, device: torch.device) -> list:
    """As many layers of random numbers as `copies` says."""
    first = random_layer(format, N, C, device)
    size = sum(tensor.nbytes for tensor in first.state_dict().values())
    return [first] + [random_layer(format, N, C, device) for _ in range(copies(size, device) - 1)]


def packed(layers: list, format: str) -> list:
    """The same layers, with the weights as the kernels read them."""
    return layers if format == "bf16" else [kt.PackedLinear(layer) for layer in layers]


def products(sizes: dict, device: torch.device, tuning: bool) -> Iterator[dict]:
    def multiply(layer, x):
        return layer(x)

    for format, (name, (N, C)) in itertools.product(FORMATS, sizes["products"].items()):
        print_status(f"{format} {name}")
        plains = random_layers(format, N, C, device)
        size = sum(tensor.nbytes for tensor in plains[0].state_dict().values())
        ours = packed(plains, format)
        gated = name == "gate_up"  # ours with SwiGLU, as a model has it; torch's without
        if tuning:
            tune(ours, format, N, C, gated, device)

        for M in sizes["rows"]:
            torch.compiler.reset()
            x = randn(M, C, device=device)
            call = multiply
            if device.type == "cuda":  # on a CPU compiling takes too long
                call = torch.compile(multiply, dynamic=False)
            row = {"name": f"{format} {name} {C}x{N}", "rows": M, "bytes": size}
            row["ours_s"] = seconds([partial(kt.apply_linear, layer, x, gated=gated) for layer in ours])
            row["torch_s"] = seconds([partial(call, layer, x) for layer in plains])
            yield row


def tune(
    layers: list, format: str, N: int, C: int, gated: bool, device: torch.device, limit_s: float = float("inf")
) -> dict:
    """Store the fastest tiles of SPACE for one row, and return how many were tried, and what was gained.

    The kernels use them for all numbers of rows up to 16. The tiles of the fixed rule are tried
    first, and then those that differ from them least. After limit_s seconds no more are tried.
    """
    x = randn(1, C, device=device)
    calls = [partial(kt.apply_linear, layer, x, gated=gated) for layer in layers]
    rows = N // 2 if gated else N
    rule = kt.default_tiles(BITS[format][0], rows, C, kt.multiprocessors(device))
    space = SPACE if device.type == "cuda" else SPACE[::40]
    space = [rule] + sorted(space, key=lambda tiles: sum(tiles[name] != rule[name] for name in rule))
    choose_tiles = kt.choose_tiles
    times = []
    start = time.monotonic()
    for tiles in space:
        if times and time.monotonic() - start > limit_s:
            break
        kt.choose_tiles = lambda *shape, tiles=tiles: tiles
        try:
            times.append(seconds(calls))
        except Exception as error:  # these tiles need more shared memory or registers than there are
            if "out of resource" not in str(error):
                raise
            times.append(float("inf"))
    kt.choose_tiles = choose_tiles

    path = kt.tuning_file(device)
    known = json.loads(path.read_text()) if path.exists() else {}
    best = space[times.index(min(times))]
    known[kt.tile_key(*BITS[format], rows, C, gated)] = best
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1))
    kt.tuned_tiles.cache_clear()
    return {"tried": len(times), "tiles": best, "best_s": min(times), "rule_s": times[0]}


# ---------------------------------------------------------------- attention


def our_attention(q, k, v, input_pos) -> Callable[[], torch.Tensor]:
    """A call of our kernel without rows, slopes or a window."""
    return partial(kt.attention, q, k, v, input_pos, None, None, None, q.shape[-1] ** -0.5)


def decode_attention(sizes: dict, device: torch.device) -> Iterator[dict]:
    H, K, E = sizes["heads"]
    for length in sizes["decode"]:
        print_status(f"decode at {length}")
        q = randn(1, 1, H, E, device=device)
        heads = q.transpose(1, 2)
        input_pos = torch.tensor([[length - 1]], device=device)
        size = 4 * length * K * E
        ours = []
        theirs = []
        for _ in range(min(copies(size, device), 24)):
            k = randn(1, K, sizes["cache"], E, device=device)
            v = randn(1, K, sizes["cache"], E, device=device)
            ours.append(our_attention(q, k, v, input_pos))
            theirs.append(partial(SDPA, heads, k[:, :, :length], v[:, :, :length], enable_gqa=True))

        row = {"name": f"attention, decode at {length}", "rows": 1, "bytes": size}
        yield row | {"ours_s": seconds(ours), "torch_s": seconds(theirs)}


def prefill_attention(sizes: dict, device: torch.device) -> Iterator[dict]:
    H, K, E = sizes["heads"]
    for S in sizes["prefill"]:
        print_status(f"prefill of {S}")
        q = randn(1, S, H, E, device=device)
        heads = q.transpose(1, 2)
        k = randn(1, K, S + 8, E, device=device)
        v = randn(1, K, S + 8, E, device=device)
        ours = our_attention(q, k, v, torch.arange(S, device=device)[None])
        theirs = partial(SDPA, heads, k[:, :, :S], v[:, :, :S], is_causal=True, enable_gqa=True)
        row = {"name": f"attention, prefill of {S}", "rows": S}
        yield row | {"ours_s": seconds([ours]), "torch_s": seconds([theirs])}


# ---------------------------------------------------------------- whole models


def random_model(config: Config, device: torch.device, format: str, kernels: bool) -> Transformer:
    """A model of random weights, in bf16 or quantized in groups of 32 with an int8 head.

    Memory of models that are not used any more is freed first.
    """
    torch.compiler.reset()  # frees CUDA graphs, and forgets sizes of caches of other lengths
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("meta"):
        model = Transformer(config).to(BF16)
    if format != "bf16":
        swap(model, Quantization(format, 32, "int8").scheme)
    model = model.to_empty(device=device).eval()
    fill(model.state_dict().values())
    if kernels and device.type == "cuda":  # a whole step would take minutes in the interpreter
        install_kernels(model)
    return model


def decode_step(model: Transformer, context: int, steps: int, compiled: bool) -> dict:
    """Time and bytes of one decode step."""
    positions = -(-(context + steps + 1) // 512) * 512
    engine = Engine(model, 1, positions, compiled_steps(compiled, False))
    # The warm-up round compiles, and records a CUDA graph.
    turns = {"": lambda: measure.time_decode(engine, context, steps).decode_s / steps}
    step_s = median(measure.take_turns(turns, 3)[""])
    return {"step_s": step_s, "bytes": weight_bytes(model, 1) + engine.timing.kv_bytes / steps}


def decode(sizes: dict, device: torch.device) -> Iterator[dict]:
    for (name, config), format, context in itertools.product(sizes["models"].items(), FORMATS, sizes["contexts"]):
        row = {"name": f"{name} {format} at {context}", "rows": 1}
        for who in ("ours", "torch"):
            print_status(f"{row['name']}, {who}")
            is_gpu = device.type == "cuda"
            try:
                # No name holds a model, so that its memory is free for the next.
                step = decode_step(random_model(config, device, format, who == "ours"), context, sizes["steps"], is_gpu)
            except torch.OutOfMemoryError:
                print_status("left out: too little memory")
                continue
            row |= {f"{who}_s": step["step_s"], "bytes": step["bytes"]}
        yield row


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {})
    add = parser.add_argument
    add("--smoke", action="store_true", help="tiny sizes, in the interpreter, on the CPU")
    add("--tune", action="store_true", help="first find the tiles of the products")
    args = parser.parse_args()
    if args.smoke:
        device = torch.device("cpu")
        sizes = SMOKE
        kt.register(kt.LIBRARY, "CPU")
    elif torch.cuda.is_available():
        device = torch.device("cuda")
        sizes = FULL
    else:
        raise UserError("there is no GPU that torch can use; --smoke runs tiny sizes without one")

    copy_rate = copy_bandwidth(device, sizes["copy"])
    rows = [*products(sizes, device, args.tune)]
    rows += [*decode_attention(sizes, device), *prefill_attention(sizes, device)]
    rows += decode(sizes, device)
    for row, who in itertools.product(rows, ("ours", "torch")):
        if "bytes" in row and f"{who}_s" in row:
            row[f"{who}_share"] = row["bytes"] / row[f"{who}_s"] / copy_rate

    columns = {"name": "", "rows": "", "ours_s": ".3g", "torch_s": ".3g"}
    measure.print_table(rows, columns | {"ours_share": ".0%", "torch_share": ".0%"})
    print(f"copy bandwidth {copy_rate / 1e9:.0f} GB/s")
    if args.out or not args.smoke:
        measure.save("gpu_kernels", {"copy_bytes_per_s": copy_rate, "rows": rows}, args.out, device)


if __name__ == "__main__":
    run_command(main)
