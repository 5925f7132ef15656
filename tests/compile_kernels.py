"""Compiles the Triton kernels ahead of time, without a GPU, and reports registers and spills of each.

    python tests/compile_kernels.py [--all]      # one JSON object: "sm_90 linear int4 ...": {"registers", "spills"}

Without --all it compiles the heaviest configuration of each kernel for sm_90, and two of them for sm_80, too. With it,
it compiles everything that Llama models of 1B and 8B would run. It is a program of its own because Triton decides at
import whether it interprets.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

try:
    import triton
except ModuleNotFoundError:
    sys.exit("compile_kernels.py: error: triton is missing: pip install -r requirements-dev.txt")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels_triton as kt

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INTEGERS = ("M", "N", "C", "K", "S", "T", "H", "E", "D", "V", "W", "P", "words", "b_stride", "s_stride", "window")
FLOATS = ("eps", "scale")


def compile_kernel(kernel, target: GPUTarget, dtype: torch.dtype, settings: dict, kinds: dict, num_warps, num_stages):
    """Compile a kernel for a target. settings: its constants (None for an absent tensor). kinds: the types of pointers
    that do not have dtype."""
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in settings:
            signature[name] = "constexpr"
        elif name in INTEGERS or name in FLOATS:
            signature[name] = "i32" if name in INTEGERS else "fp32"
        else:
            signature[name] = "*" + kinds.get(name, TYPES[dtype])
        if signature[name][0] == "*" or name in ("N", "C", "K", "T", "E", "H"):
            aligned[(i,)] = [["tt.divisibility", 16]]  # as in a real launch
    source = ASTSource(fn=kernel, signature=signature, constexprs=settings, attrs=aligned)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})


def resources(ptx: str, architecture: str) -> dict:
    """The registers per thread and the spilled bytes, from ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [PTXAS, "-v", f"-arch={architecture}", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    return {"registers": int(re.search(r"Used (\d+) registers", said)[1]), "spills": sum(spilled)}


# name: (bits, group, N, K, gated, normed); those without a norm before them add a residual
LINEARS = {
    "int4 g32 gate_up 8B": (4, 32, 14336, 4096, True, True),
    "int8 g32 out 8B": (8, 32, 4096, 4096, False, False),
    "bf16 qkv 8B": (16, 0, 6144, 4096, False, True),
}
MORE_LINEARS = {
    f"{bits} bits, groups of {group}, {name}": (bits, group, *shape)
    for bits, group in ((4, 32), (4, 64), (4, 128), (4, 0), (8, 32), (8, 128), (8, 0), (16, 0))
    for name, shape in {
        "qkv 8B": (6144, 4096, False, True),
        "out 8B": (4096, 4096, False, False),
        "gate_up 8B": (14336, 4096, True, True),
        "down 8B": (4096, 14336, False, False),
        "head 8B": (128256, 4096, False, False),
        "qkv 1B": (3072, 2048, False, True),
    }.items()
}
KINDS = {"input_pos": "i64", "rows": "i64", "slopes": "fp32", "parts": "fp32", "stats": "fp32", "squares": "fp32"}
KINDS |= {"cos": "fp32", "sin": "fp32"}
SAMPLE_KINDS = dict.fromkeys(("rows", "position", "drafted", "seed", "top_k", "ids"), "i64") | {"counts": "i32"}
SAMPLE_KINDS |= {"biased": "i1", "logit_bias": "fp32", "masks": "i32", "mask_start": "i64"}
SAMPLE_KINDS |= dict.fromkeys(("temperature", "top_p", "min_p", "x", "logprobs"), "fp32")
SAMPLE_KINDS |= dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty"), "fp32")


def linear_case(bits, groupsize, N, C, gated, normed):
    """(settings, types of pointers, warps, stages) of a product as `linear` launches it on 132 multiprocessors."""
    tiles = kt.default_tiles(bits, N, C, 132)
    settings = {"BITS": bits, "GROUPSIZE": groupsize, "GATED": gated, "EVEN": True, "BLOCK_N": tiles["BLOCK_N"]}
    settings |= {"SPLIT_K": tiles["SPLIT_K"], "bias": None} | ({"scales": None} if bits >= 16 else {})
    settings |= {"residual": None} if normed or tiles["SPLIT_K"] > 1 else {"norm": None}
    settings |= {"parts": None, "squares": None} if tiles["SPLIT_K"] == 1 else {} if normed else {"squares": None}
    settings |= {} if normed else {"norm": None}
    kinds = KINDS | {"scales": "i32" if bits == 4 else "fp16"} | ({"weight": "i32"} if bits < 16 else {})
    return settings, kinds, tiles["num_warps"], tiles["num_stages"]


def cases(everything: bool):
    """(name, kernel, dtype, settings, kinds, warps, stages) of everything to compile."""
    for name, shape in (LINEARS | MORE_LINEARS if everything else LINEARS).items():
        yield f"linear {name}", kt.linear_kernel, torch.bfloat16, *linear_case(*shape)
    half = torch.bfloat16
    quantized = KINDS | {"weight": "i32", "scales": "i32"}
    sums = {"GATED": False, "SPLIT_K": 2, "BLOCK_N": 32, "bias": None, "squares": None}
    yield "reduce", kt.reduce_kernel, half, sums, KINDS, 4, 3
    many = {"BITS": 4, "GROUPSIZE": 32, "BLOCK_M": 64, "BLOCK_N": 128, "bias": None}
    yield "matmul int4 g32", kt.matmul_kernel, half, many, quantized, 4, 3
    for E in (64, 80, 96, 128, 256) if everything else (128,):
        block = triton.next_power_of_2(E)
        for heads, window, alibi in ((1, True, True), (4, False, False))[: 1 + everything]:
            settings = {"HEADS_PER_KV": heads, "BLOCK_E": block, "WINDOW": window, "rows": None}
            settings |= {} if alibi else {"slopes": None}
            name = f"E {E}" + ", window, ALiBi" * window
            yield f"decode {name}", kt.decode_kernel, half, settings, KINDS, *kt.decode_tiles(block, half).values()
            tiles = kt.prefill_tiles(block, half)
            settings = settings | {"BLOCK_S": tiles["BLOCK_S"], "WIDTH": tiles["WIDTH"]}
            warps, stages = tiles["num_warps"], tiles["num_stages"]
            yield f"prefill {name}", kt.prefill_kernel, half, settings, KINDS, warps, stages
    yield "merge", kt.merge_kernel, half, {"BLOCK_E": 128}, KINDS, 4, 3
    yield "rotary", kt.rotary_kernel, half, {"BLOCK_E": 128, "rows": None}, KINDS, 1, 3
    yield "sample", kt.sample_kernel, half, {"BLOCK": kt.SAMPLE_BLOCK}, SAMPLE_KINDS, 16, 3
    yield "norm", kt.norm_kernel, half, {"SUBTRACT_MEAN": False, "BLOCK_D": 4096, "bias": None}, KINDS, 8, 3
    if everything:
        many |= {"BITS": 8, "GROUPSIZE": 0}
        yield "matmul int8", kt.matmul_kernel, half, many, quantized | {"scales": "fp16"}, 4, 3
        settings = {"HEADS_PER_KV": 4, "BLOCK_E": 128, "WINDOW": False, "rows": None, "slopes": None}
        tiles = kt.decode_tiles(128, torch.float32).values()
        yield "decode fp32", kt.decode_kernel, torch.float32, settings, KINDS, *tiles
        yield "norm LayerNorm", kt.norm_kernel, half, {"SUBTRACT_MEAN": True, "BLOCK_D": 16384}, KINDS, 16, 3


TARGETS = ("sm_80", "sm_90", "gfx942")


def compile_case(everything: bool, name: str, target: str) -> dict:
    """Compile one of `cases` for one of TARGETS, and return what is known of the result."""
    _, kernel, dtype, settings, kinds, warps, stages = next(case for case in cases(everything) if case[0] == name)
    if target == "gfx942":
        made = compile_kernel(kernel, GPUTarget("hip", target, 64), dtype, settings, kinds, warps, 2)
        return {"bytes": len(made.asm["hsaco"])}
    made = compile_kernel(kernel, GPUTarget("cuda", int(target[3:]), 32), dtype, settings, kinds, warps, stages)
    return resources(made.asm["ptx"], "sm_90a" if target == "sm_90" else target) | {"shared": made.metadata.shared}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every configuration, and gfx942 too")
    everything = parser.parse_args().all
    jobs = []
    for name, *_ in cases(everything):
        for target in TARGETS:
            if everything or target == "sm_90" or (target == "sm_80" and name.startswith(("linear int4", "prefill"))):
                jobs.append((name, target))
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        found = pool.map(partial(compile_case, everything), *zip(*jobs))
    print(json.dumps({f"{target} {name}": what for (name, target), what in zip(jobs, found)}))


if __name__ == "__main__":
    main()
