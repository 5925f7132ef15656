"""All matrix products of one decode step, by our kernels and by what torch has for the same format, in turns.

Shapes are those of a checkpoint's config.json (SmolLM2-135M's without one), weights random. A turn is every product of
the model, one after the other, so that each reads its weights from memory. torch's: F.linear in bfloat16,
_weight_int8pack_mm (a scale a row), _weight_int4pack_mm_for_cpu (groups of 32). The bound is a plain read of as many
bytes as the weights have in bfloat16.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from measure import BF16, Ratio, about_run, count, make_parser, save, seconds, take_turns

import kernels_cpu
from checkpoint import empty_model, read_config
from cli import UserError, run_command
from convert_hf_checkpoint import ensure_checkpoint
from linear import LINEAR, matrices, pack

Products = tuple[int, list[Callable]]  # bytes of weights, and a function of x for each product


def torch_products(shapes: list[tuple[int, int]], weights: list[torch.Tensor]) -> dict[str, Products]:
    aten, sizes = torch.ops.aten, sum(w.nbytes for w in weights)
    found = {"torch bf16": (sizes, [lambda x, w=w: F.linear(x, w) for w in weights])}
    if not all(N % 16 == 0 and K % 32 == 0 for N, K in shapes):  # others crash in torch's int8, or are refused in int4
        return found
    int8 = [(torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]).to(BF16)) for shape in shapes]
    functions = [lambda x, w=w, s=s: torch._weight_int8pack_mm(x, w, s) for w, s in int8]
    found["torch int8"] = sum(w.nbytes + s.nbytes for w, s in int8), functions
    int4 = []
    for N, K in shapes:
        packed = aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (N, K), dtype=torch.int32), 1)
        int4.append((packed, torch.rand(K // 32, N, 2).to(BF16)))
    functions = [lambda x, w=w, s=s: aten._weight_int4pack_mm_for_cpu(x, w, 32, s) for w, s in int4]
    found["torch int4"] = sum(w.nbytes + s.nbytes for w, s in int4), functions
    return found


def our_products(weights: list[torch.Tensor]) -> dict[str, Products]:
    """exact: activations are not quantized on their way into the product."""
    functions = [lambda x, w=w: torch.ops.fastpath.linear.default(x, w, None) for w in weights]
    found = {"ours bf16": (sum(w.nbytes for w in weights), functions)}
    for format in ("int8", "int4"):
        for exact in (False, True):
            layers = []
            for w in weights:
                plain = LINEAR[format](w.shape[1], w.shape[0], False, 32)
                plain.load_state_dict(pack(w, format, 32))
                layers.append(kernels_cpu.PackedLinear(plain, exact))
            size = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
            found[f"ours {format}" + " exact" * exact] = size, layers
    return found


def run_all(functions: list[Callable], xs: list[torch.Tensor]):
    for function, x in zip(functions, xs):
        function(x)


def measure(products: dict[str, Products], shapes: list[tuple[int, int]], M: int, rounds: int) -> list[dict]:
    """Of M rows of x."""
    inputs = {K: torch.randn(M, K).to(BF16) for _, K in shapes}
    xs = [inputs[K] for _, K in shapes]
    turns = {name: partial(seconds, partial(run_all, functions, xs)) for name, (_, functions) in products.items()}
    numbers = torch.ones(products["ours bf16"][0] // 4)
    turns["read"] = partial(seconds, numbers.sum)
    times, _ = take_turns(turns, rounds, warm_up=2)
    bandwidth, rows = numbers.nbytes / median(times["read"]), []
    for name, (size, _) in products.items():
        row = {"rows": M, "name": name, "seconds": median(times[name]), "bytes": size}
        row["share_of_bandwidth"] = size / row["seconds"] / bandwidth
        line = f"{M:3} rows  {name:16} {row['seconds'] * 1e3:8.2f} ms  {size / 1e6:6.0f} MB"
        line += f"{row['share_of_bandwidth']:6.0%} of {bandwidth / 1e9:.0f} GB/s"
        peer = "torch " + name.split()[1]
        if name.startswith("ours") and peer in times:
            ratio = Ratio.of(times[peer], times[name])
            row |= ratio.fields("over_torch")
            line += f"  {ratio} torch"
        print(line)
        rows.append(row)
    return rows


def main():
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 4, 8, 16], help="of x (1 4 8 16)")
    args = parser.parse_args()
    if not kernels_cpu.load_kernels():
        raise UserError("the kernels cannot run here: they need AVX-512 with VNNI and BF16, and a C++ compiler")
    config = read_config(ensure_checkpoint(args.checkpoint_path))
    modules = matrices(empty_model(config))
    shapes = [tuple(m.weight.shape) for name, m in modules if name != "embedding" or config.tied_embeddings]
    weights = [torch.randn(shape).to(BF16) for shape in shapes]
    products = torch_products(shapes, weights) | our_products(weights)
    rows = [row for M in args.rows for row in measure(products, shapes, M, args.rounds)]
    save(about_run() | {"shapes": sorted(set(shapes)), "rows": rows}, args.out, "linears")


if __name__ == "__main__":
    run_command(main)
