"""Compiles the Triton kernels ahead of time, without a GPU, and reports registers, spills and shared memory of each.

    python tests/compile_kernels.py [--all]

It prints one JSON object: "sm_90 linear int4 ...": {"registers", "spills", "shared"}. Without --all it
compiles the heaviest configuration of each kernel for sm_90, and some of them for sm_80, too. With
it, it compiles everything that Llama models of 1B and 8B would run. It is a program of its own
because Triton decides at import whether it interprets.
"""

import argparse
import itertools
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
INTEGERS = ("M", "N", "C", "K", "S", "T", "H", "E", "D", "V", "W", "P")
INTEGERS += ("n", "m", "dk", "dv", "width", "R", "X", "n_active", "slots", "stride")
INTEGERS += ("words", "b_stride", "s_stride", "window")
FLOATS = ("eps", "scale")
ALIGNED = ("N", "C", "K", "T", "E", "H", "dk", "dv")


def compile_kernel(kernel, target: GPUTarget, dtype: torch.dtype, settings: dict, kinds: dict, num_warps, num_stages):
    """settings: its constants (None for an absent tensor). kinds: the types of pointers that do not have dtype."""
    scalars = dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(settings, "constexpr")
    pointers = {name: "*" + kinds.get(name, TYPES[dtype]) for name in kernel.arg_names}
    signature = {name: scalars.get(name, pointers[name]) for name in kernel.arg_names}
    is_aligned = [kind[0] == "*" or name in ALIGNED for name, kind in signature.items()]
    aligned = {(i,): [["tt.divisibility", 16]] for i, yes in enumerate(is_aligned) if yes}  # as in a real launch
    source = ASTSource(fn=kernel, signature=signature, constexprs=settings, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=target, options=options)


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
SHAPES = {
    "qkv 8B": (6144, 4096, False, True), "out 8B": (4096, 4096, False, False), "qkv 1B": (3072, 2048, False, True),
    "gate_up 8B": (14336, 4096, True, True), "down 8B": (4096, 14336, False, False),
    "head 8B": (128256, 4096, False, False),
}  # fmt: skip
FORMATS = ((4, 32), (4, 64), (4, 128), (4, 0), (8, 32), (8, 128), (8, 0), (16, 0))
MORE_LINEARS = {
    f"{bits} bits, groups of {group}, {name}": (bits, group, *shape)
    for (bits, group), (name, shape) in itertools.product(FORMATS, SHAPES.items())
}
# name: (bits, group, N, C, k, gated); one of Qwen3.5-35B-A3B, and one of Mixtral
EXPERTS = {
    "int4 g32 gate_up 35B-A3B": (4, 32, 512, 2048, 8, True),
    "int4 g32 down Mixtral": (4, 32, 4096, 14336, 2, False),
}
EXPERT_SHAPES = {"gate_up 35B-A3B": (512, 2048, 8, True), "down 35B-A3B": (2048, 512, 8, False)}
MORE_EXPERTS = {
    f"{bits} bits, groups of {group}, {name}": (bits, group, *shape)
    for (bits, group), (name, shape) in itertools.product(FORMATS, EXPERT_SHAPES.items())
}
KINDS = dict.fromkeys(("input_pos", "rows"), "i64")
KINDS |= dict.fromkeys(("slopes", "parts", "stats", "squares", "cos", "sin"), "fp32")
DELTA_KINDS = KINDS | {"base": "i64", "counts": "i32"}
EXPERT_KINDS = {"ids": "i64", "input_pos": "i64", "counts": "i64", "experts": "i32", "choices": "i32"}
EXPERT_KINDS |= {"logits": "fp32", "weights": "fp32", "choice_bias": "fp32", "scales": "fp32"}
SAMPLE_KINDS = dict.fromkeys(("rows", "position", "drafted", "seed", "top_k", "ids"), "i64")
SAMPLE_KINDS |= {"counts": "i32", "biased": "i1", "logit_bias": "fp32", "masks": "i32", "mask_start": "i64"}
SAMPLE_KINDS |= dict.fromkeys(("temperature", "top_p", "min_p", "x", "logprobs"), "fp32")
SAMPLE_KINDS |= dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty"), "fp32")


def linear_case(bits, groupsize, N, C, gated, normed):
    """(settings, types of pointers, warps, stages) of a product as `linear` launches it on 132 multiprocessors."""
    tiles = kt.default_tiles(bits, N, C, 132)
    is_split = tiles["SPLIT_K"] > 1
    settings = {"BITS": bits, "GROUPSIZE": groupsize, "GATED": gated, "EVEN": True, "bias": None}
    settings |= {"BLOCK_N": tiles["BLOCK_N"], "SPLIT_K": tiles["SPLIT_K"]}
    absent = {"scales": bits >= 16, "norm": not normed, "residual": normed or is_split, "parts": not is_split}
    absent["squares"] = not is_split or not normed
    settings |= {name: None for name, is_absent in absent.items() if is_absent}
    kinds = KINDS | {"scales": "i32" if bits == 4 else "fp16"}
    if bits < 16:
        kinds["weight"] = "i32"
    return settings, kinds, tiles["num_warps"], tiles["num_stages"]


def expert_case(bits, groupsize, N, C, k, gated):
    """(settings, types of pointers, warps, stages) of an expert's product as `expert_mlp` launches it."""
    settings = kt.expert_settings(bits, groupsize, k * N, C, gated, torch.device("cpu"))
    warps = settings.pop("num_warps")
    stages = settings.pop("num_stages")
    kinds = EXPERT_KINDS | {"scales": "i32" if bits == 4 else "fp16"}
    if bits < 16:
        kinds["weight"] = "i32"
    else:
        settings["scales"] = None
    return settings, kinds, warps, stages


def cases(everything: bool):
    """(name, kernel, dtype, settings, kinds, warps, stages) of everything to compile."""
    half = torch.bfloat16
    linears = LINEARS | MORE_LINEARS if everything else LINEARS
    for name, shape in linears.items():
        yield f"linear {name}", kt.linear_kernel, half, *linear_case(*shape)
    quantized = KINDS | {"weight": "i32", "scales": "i32"}
    sums = {"GATED": False, "SPLIT_K": 2, "BLOCK_N": 32, "bias": None, "squares": None}
    yield "reduce", kt.reduce_kernel, half, sums, KINDS, 4, 3
    *sizes, warps, stages = kt.matmul_tiles(4, half).values()
    many = {"BITS": 4, "GROUPSIZE": 32, "BLOCK_M": sizes[0], "BLOCK_N": sizes[1], "bias": None}
    yield "matmul int4 g32", kt.matmul_kernel, half, many, quantized, warps, stages

    experts = EXPERTS | MORE_EXPERTS if everything else EXPERTS
    for name, shape in experts.items():
        yield f"expert {name}", kt.expert_kernel, half, *expert_case(*shape)
    choose = {"NORMALIZED": True, "SIGMOID": True, "BLOCK_X": 256, "BLOCK_K": 8}
    yield "choose", kt.choose_kernel, half, choose, EXPERT_KINDS, 1, 3
    yield "plan", kt.plan_kernel, half, {"BLOCK_X": 512}, EXPERT_KINDS, 4, 3
    yield "expert_sum", kt.expert_sum_kernel, half, {"BLOCK_D": 1024}, EXPERT_KINDS, 4, 3

    for E in (64, 80, 96, 128, 256, 512) if everything else (128,):
        yield from attention_cases(E, ", window, ALiBi", {"HEADS_PER_KV": 1, "WINDOW": True})
        if everything:
            yield from attention_cases(E, "", {"HEADS_PER_KV": 4, "WINDOW": False, "slopes": None})

    yield "merge", kt.merge_kernel, half, {"BLOCK_E": 128}, KINDS, 4, 3
    yield "rotary", kt.rotary_kernel, half, {"BLOCK_E": 128, "rows": None}, KINDS, 1, 3
    delta = {"BLOCK_K": 128, "BLOCK_V": 32, "rows": None}
    yield "delta", kt.delta_kernel, torch.float32, delta, DELTA_KINDS, 4, 3
    yield "delta system", kt.delta_system_kernel, torch.float32, {}, DELTA_KINDS, 1, 3
    delta = {"PARTS": 8, "BLOCK_V": 32, "rows": None}
    yield "delta chunks", kt.delta_chunks_kernel, torch.float32, delta, DELTA_KINDS, 8, 2
    commit = {"BLOCK": 256, "rows": None}
    yield "delta commit", kt.delta_commit_kernel, torch.float32, commit, DELTA_KINDS, 4, 3
    yield "sample", kt.sample_kernel, half, {"BLOCK": kt.SAMPLE_BLOCK}, SAMPLE_KINDS, 16, 3
    norm = {"SUBTRACT_MEAN": False, "BLOCK_D": 4096, "bias": None}
    yield "norm", kt.norm_kernel, half, norm, KINDS, 8, 3
    if everything:
        many = many | {"BITS": 8, "GROUPSIZE": 0}
        yield "matmul int8", kt.matmul_kernel, half, many, quantized | {"scales": "fp16"}, 4, 3
        for E in (128, 256):
            settings = {"HEADS_PER_KV": 4, "WINDOW": False, "slopes": None}
            yield from attention_cases(E, " fp32", settings, torch.float32)
        layer_norm = {"SUBTRACT_MEAN": True, "BLOCK_D": 16384}
        yield "norm LayerNorm", kt.norm_kernel, half, layer_norm, KINDS, 16, 3


def attention_cases(E: int, suffix: str, settings: dict, dtype: torch.dtype = torch.bfloat16):
    """The two attention kernels, for a head width, as `cases` gives them."""
    block = triton.next_power_of_2(E)
    settings = settings | {"BLOCK_E": block, "rows": None}
    queries, *tiles = kt.decode_tiles(block, dtype).values()
    yield f"decode E {E}{suffix}", kt.decode_kernel, dtype, settings | {"QUERIES": queries}, KINDS, *tiles
    tiles = kt.prefill_tiles(block, dtype)
    settings = settings | {"BLOCK_S": tiles["BLOCK_S"], "WIDTH": tiles["WIDTH"]}
    warps = tiles["num_warps"]
    yield f"prefill E {E}{suffix}", kt.prefill_kernel, dtype, settings, KINDS, warps, tiles["num_stages"]


TARGETS = ("sm_80", "sm_90", "gfx942")


def compile_case(everything: bool, name: str, target: str) -> dict:
    """Compile one of `cases` for one of TARGETS, and return what is known of the result."""
    found = next(case for case in cases(everything) if case[0] == name)
    _, kernel, dtype, settings, kinds, warps, stages = found
    if target == "gfx942":
        gpu = GPUTarget("hip", target, 64)
        made = compile_kernel(kernel, gpu, dtype, settings, kinds, warps, 2)
        return {"bytes": len(made.asm["hsaco"])}

    gpu = GPUTarget("cuda", int(target[3:]), 32)
    made = compile_kernel(kernel, gpu, dtype, settings, kinds, warps, stages)
    architecture = "sm_90a" if target == "sm_90" else target
    return resources(made.asm["ptx"], architecture) | {"shared": made.metadata.shared}


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--all", action="store_true", help="every configuration, and gfx942 too")
    everything = parser.parse_args().all
    jobs = []
    for name, *_ in cases(everything):
        is_heaviest = name.startswith(("linear int4", "expert int4", "plan", "prefill", "matmul", "delta chunks"))
        for target in TARGETS:
            if everything or target == "sm_90" or (target == "sm_80" and is_heaviest):
                jobs.append((name, target))

    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        found = pool.map(partial(compile_case, everything), *zip(*jobs))
        result = {f"{target} {name}": what for (name, target), what in zip(jobs, found)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
