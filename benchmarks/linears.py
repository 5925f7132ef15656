"""All matrix products of one decode step, by our kernels and by what torch has for the same format, in turns.

Shapes are those of a checkpoint's config.json (SmolLM2-135M's without one), weights random. A round runs everything
once, every product of the model after the other, so that each reads its weights from memory; times are medians over
rounds, gains medians of the rounds' own ratios. torch's: F.linear in bfloat16, _weight_int8pack_mm (a scale a row),
_weight_int4pack_mm_for_cpu (groups of 32). The bound is a plain read of as many bytes, at the bandwidth measured.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from decode import ROOT, circumstances

import kernels_cpu
from checkpoint import empty_model, read_config
from cli import ArgumentParser, UserError, number, print_status, run_command
from convert_hf_checkpoint import ensure_checkpoint
from linear import LINEAR, matrices, pack

BF16 = torch.bfloat16


def packed(format: str, weight, exact: bool) -> kernels_cpu.PackedLinear:
    plain = LINEAR[format](weight.shape[1], weight.shape[0], False, 32)
    plain.load_state_dict(pack(weight, format, 32))
    return kernels_cpu.PackedLinear(plain, exact)


def products(shapes: list[tuple[int, int]]) -> dict:
    """name -> (bytes, [a function of x for each product])."""
    weights = [torch.randn(shape).to(BF16) for shape in shapes]
    found = {
        "torch bf16": [lambda x, w=w: F.linear(x, w) for w in weights],
        "ours bf16": [lambda x, w=w: torch.ops.fastpath.linear.default(x, w, None) for w in weights],
    }
    sizes = dict.fromkeys(found, sum(w.nbytes for w in weights))

    def add(name, functions, size):
        found[name], sizes[name] = functions, size

    int8 = [(torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]).to(BF16)) for shape in shapes]
    add("torch int8", [lambda x, w=w, s=s: torch._weight_int8pack_mm(x, w, s) for w, s in int8],
        sum(w.nbytes + s.nbytes for w, s in int8))  # fmt: skip
    fits = [(N, K) for N, K in shapes if N % 16 == 0 and K % 32 == 0]  # all that torch's int4 takes
    if fits == shapes:
        repack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        int4 = [
            (repack(torch.randint(0, 16, (N, K), dtype=torch.int32), 1), torch.rand(K // 32, N, 2).to(BF16))
            for N, K in shapes
        ]
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        add("torch int4", [lambda x, w=w, s=s: multiply(x, w, 32, s) for w, s in int4],
            sum(w.nbytes + s.nbytes for w, s in int4))  # fmt: skip
    for format in ("int8", "int4"):
        for exact in (False, True):
            layers = [packed(format, w, exact) for w in weights]
            size = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
            add(f"ours {format}" + " exact" * exact, layers, size)
    return {name: (sizes[name], functions) for name, functions in found.items()}


def read_seconds(numbers) -> float:
    """A plain read of all of them."""
    start = time.perf_counter()
    numbers.sum()
    return time.perf_counter() - start


def main():
    count = number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_path", help="whose shapes to take (SmolLM2-135M-Instruct)")
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 4, 8, 16], help="of x (1 4 8 16)")
    parser.add_argument("--rounds", type=count, default=15, help="that count (15)")
    out = ROOT / "benchmarks" / "results" / "linears_cpu.json"
    parser.add_argument("--out", type=Path, default=out, help="the JSON file")
    args = parser.parse_args()
    if not kernels_cpu.load_kernels():
        raise UserError("the kernels cannot run here: they need AVX-512 with VNNI and BF16, and a C++ compiler")
    config = read_config(ensure_checkpoint(args.checkpoint_path))
    modules = matrices(empty_model(config))
    shapes = [tuple(m.weight.shape) for name, m in modules if name != "embedding" or config.tied_embeddings]
    work, table = products(shapes), []
    numbers = torch.ones(work["ours bf16"][0] // 4)
    for M in args.rows:
        xs = {K: torch.randn(M, K).to(BF16) for _, K in shapes}
        times = {name: [] for name in [*work, "read"]}
        for _ in range(args.rounds + 2):
            for name, (_, functions) in work.items():
                start = time.perf_counter()
                for (_, K), function in zip(shapes, functions):
                    function(xs[K])
                times[name].append(time.perf_counter() - start)
            times["read"].append(read_seconds(numbers))
        print_status(f"{M} rows are measured")
        times = {name: series[2:] for name, series in times.items()}  # the first two warm up
        bandwidth = work["ours bf16"][0] / median(times["read"])
        for name, (size, _) in work.items():
            row = {"rows": M, "name": name, "seconds": median(times[name]), "bytes": size}
            row["share_of_bandwidth"] = size / row["seconds"] / bandwidth
            peer = "torch " + name.split()[1]
            if name.startswith("ours") and peer in times:
                row["over_torch"] = median(a / b for a, b in zip(times[peer], times[name]))
            table.append(row)
            gain = f"{row['over_torch']:6.2f}x torch" if "over_torch" in row else ""
            share = f"{row['share_of_bandwidth']:6.0%} of {bandwidth / 1e9:.0f} GB/s"
            print(f"{M:3} rows  {name:16} {row['seconds'] * 1e3:8.2f} ms  {size / 1e6:6.0f} MB  {share}  {gain}")
    result = circumstances(torch.device("cpu"), []) | {"shapes": sorted(set(shapes)), "rows": table}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
