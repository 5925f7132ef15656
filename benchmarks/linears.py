"""All matrix products of one decode step, by our kernels and by what torch has for the same format, in turns.

The shapes are those of a checkpoint's config.json, the weights random. A turn is every product of the model, one after
the other, so that each reads its weights from memory. torch's are F.linear in bfloat16, _weight_int8pack_mm (one scale
per row) and _weight_int4pack_mm_for_cpu (groups of 32). "exact" products do not round the activations to 8 bits. The
share of the bandwidth is relative to a plain read of as many bytes as the weights have in bfloat16.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import measure
import torch
import torch.nn.functional as F
from measure import BF16, count

import kernels_cpu
from checkpoint import empty_model, read_config
from cli import UserError, run_command
from convert_hf_checkpoint import ensure_checkpoint
from linear import LINEAR, matrices, pack

Products = tuple[int, list[Callable]]  # bytes of weights, and a function of x for each product


def torch_products(shapes: list[tuple[int, int]], weights: list[torch.Tensor]) -> dict[str, Products]:
    aten, sizes = torch.ops.aten, sum(w.nbytes for w in weights)
    products = {"torch bf16": (sizes, [partial(F.linear, weight=w) for w in weights])}
    if not all(N % 16 == 0 and K % 32 == 0 for N, K in shapes):  # others crash in torch's int8, or are refused in int4
        return products
    int8 = [(torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]).to(BF16)) for shape in shapes]
    functions = [lambda x, w=w, s=s: torch._weight_int8pack_mm(x, w, s) for w, s in int8]
    products["torch int8"] = sum(w.nbytes + s.nbytes for w, s in int8), functions
    int4 = []
    for N, K in shapes:
        packed = aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (N, K), dtype=torch.int32), 1)
        int4.append((packed, torch.rand(K // 32, N, 2).to(BF16)))
    functions = [lambda x, w=w, s=s: aten._weight_int4pack_mm_for_cpu(x, w, 32, s) for w, s in int4]
    products["torch int4"] = sum(w.nbytes + s.nbytes for w, s in int4), functions
    return products


def our_products(weights: list[torch.Tensor]) -> dict[str, Products]:
    functions = [lambda x, w=w: torch.ops.fastpath.linear.default(x, w, None) for w in weights]
    products = {"ours bf16": (sum(w.nbytes for w in weights), functions)}
    for format in ("int8", "int4"):
        for name, exact in ((f"ours {format}", False), (f"ours {format} exact", True)):
            layers = []
            for w in weights:
                plain = LINEAR[format](w.shape[1], w.shape[0], False, 32)
                plain.load_state_dict(pack(w, format, 32))
                layers.append(kernels_cpu.PackedLinear(plain, exact))
            products[name] = sum(buffer.nbytes for layer in layers for buffer in layer.buffers()), layers
    return products


def run_all(functions: list[Callable], xs: list[torch.Tensor]):
    for function, x in zip(functions, xs):
        function(x)


def measure_rows(products: dict[str, Products], shapes: list[tuple[int, int]], M: int, rounds: int) -> list[dict]:
    """A row of the table for each kind of products, with M rows of x."""
    inputs = {K: torch.randn(M, K).to(BF16) for _, K in shapes}
    xs = [inputs[K] for _, K in shapes]
    turns = {name: partial(measure.seconds, partial(run_all, each, xs)) for name, (_, each) in products.items()}
    numbers = torch.ones(products["ours bf16"][0] // 4)
    turns["read"] = partial(measure.seconds, numbers.sum)
    times, _ = measure.take_turns(turns, rounds, warm_up=2)
    bandwidth, rows = numbers.nbytes / median(times["read"]), []
    for name, (size, _) in products.items():
        row = {"rows": M, "name": name, "seconds": median(times[name]), "bytes": size}
        row["share_of_bandwidth"] = size / row["seconds"] / bandwidth
        peer = "torch " + name.split()[1]
        if name.startswith("ours") and peer in times:
            row |= measure.ratio("over_torch", times[peer], times[name])
        rows.append(row)
    return rows


def main():
    parser = measure.make_parser(__doc__, rounds=15)
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 4, 8, 16], help="of x")
    args = parser.parse_args()
    if not kernels_cpu.load_kernels():
        raise UserError("the kernels cannot run here: they need AVX-512 with VNNI and BF16, and a C++ compiler")
    config = read_config(ensure_checkpoint(args.checkpoint_path))
    modules = matrices(empty_model(config))
    shapes = [tuple(m.weight.shape) for name, m in modules if name != "embedding" or config.tied_embeddings]
    weights = [torch.randn(shape).to(BF16) for shape in shapes]
    products = torch_products(shapes, weights) | our_products(weights)
    rows = [row for M in args.rows for row in measure_rows(products, shapes, M, args.rounds)]
    columns = {"rows": "", "name": "", "seconds": ".5f", "bytes": ".2e", "share_of_bandwidth": ".0%"}
    measure.print_table(rows, columns | {"over_torch": ".2f", "over_torch_spread": ".2f"})
    measure.save(measure.about_run() | {"shapes": sorted(set(shapes)), "rows": rows}, args.out, "linears")


if __name__ == "__main__":
    run_command(main)
