"""Decode of one row in the shapes of Llama models, with random weights: tokens/s, and the share of the bandwidth used.

For machines that have no checkpoint at hand, GPUs above all. Eager, compiled, and compiled without our kernels
(--kernels torch), at 0, 8k and 32k positions of context, which are random numbers written into the caches; a context
beyond what a model was trained for costs what any other costs, so it is measured too, and marked. What memory does not
suffice for is left out. `share` is bytes a second, of weights and live keys and values, as a part of the measured copy
bandwidth (bytes read plus written); beside it what gpt-fast published, of an A100's peak. `growth` is by how much
longer a step is than at the first context, as a multiple of the time that its further bytes take at that bandwidth.
"""

import gc
import itertools

import measure
import torch
from measure import BF16, FORMATS, Ratio

from checkpoint import check_memory, empty_model
from cli import UserError, first_line, keep_freed_memory, print_status, run_command
from engine import Engine
from linear import Quantization
from load import choose_device, compiled_steps, install_kernels
from model import SCRATCH_SLOTS, Config, RopeScaling
from report import compile_counts, weight_bytes

COMPILER_ALONE = "compiled, --kernels torch"
GPT_FAST = {"bf16": 0.69, "int8": 0.52, "int4": 0.42}  # published, of an A100's peak, Llama-2-7B
LLAMA31, LLAMA32 = (RopeScaling("llama3", factor, 8192) for factor in (8.0, 32.0))
SHAPES = {  # layers H  K   E    D     F      V      context
    "Llama-3.2-1B": Config(16, 32, 8, 64, 2048, 8192, 128256, 131072, 1e-5, 5e5, LLAMA32, tied_embeddings=True),
    "Llama-3.1-8B": Config(32, 32, 8, 128, 4096, 14336, 128256, 131072, 1e-5, 5e5, LLAMA31),
    "Llama-2-7B": Config(32, 32, 32, 128, 4096, 11008, 32000, 4096, 1e-5),
}
FULL = (0, 8192, 32768), 100, 2**31  # contexts, steps, bytes to copy
SMOKE_SHAPES = {"tiny": Config(2, 6, 3, 10, 44, 76, 131, 32, 1e-5, 5e5, LLAMA31)}
SMOKE = (0, 16, 600), 5, 2**20


def random_engine(config: Config, positions: int, device: torch.device, format: str, mode: str) -> Engine:
    """Of a model of random weights, bf16 or quantized in groups of 32 with an int8 head, which is as fast as any."""
    quantization = None if format == "bf16" else Quantization(format, 32, "int8")
    check_memory(config, device, BF16, positions + SCRATCH_SLOTS, quantization)
    model = empty_model(config, quantization)
    for tensor in (*model.parameters(), *model.buffers()):  # scales of quantized weights stay float16
        tensor.data = tensor.data.to(BF16 if tensor.dtype == torch.float32 else tensor.dtype)
    model = model.to_empty(device=device).eval()
    for weight in model.state_dict().values():
        if not weight.is_floating_point():
            weight.random_(-128 if weight.dtype == torch.int8 else 0, 128 if weight.dtype == torch.int8 else 256)
        elif weight.dtype == torch.float16:  # scales and mins
            weight.normal_(0, 0.002)
        else:
            weight.fill_(1) if weight.dim() == 1 else weight.normal_(0, 0.02)  # vectors are the norms'
    install_kernels(model, "torch" if mode == COMPILER_ALONE else "auto")
    engine = Engine(model, 1, positions, compiled_steps("compiled" in mode, False))
    measure.random_caches(engine)
    return engine


def measure_shape(config: Config, device: torch.device, mode: str, format: str, context: int, steps: int) -> dict:
    torch.compiler.reset()  # frees CUDA graphs; and after a cache of another length the graph would be of any length
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    needed = context + steps + 1
    engine = random_engine(config, (needed + 511) // 512 * 512, device, format, mode)
    measure.time_decode(engine, context, steps)  # warm-up: compiles, and records a CUDA graph
    before = compile_counts()
    each = sorted(measure.time_decode(engine, context, steps).decode_s / steps for _ in range(3))
    return {
        "context": context,
        "beyond_context": needed > config.max_seq_length,
        "recompiles": compile_counts()[0] - before[0],
        "step_s": each[1],
        "step_range_s": [each[0], each[2]],
        "weight_bytes": weight_bytes(engine.model, 1),
        "kv_bytes": engine.timing.kv_bytes / steps,
    }


def measure_all(args, device: torch.device) -> dict:
    shapes = SMOKE_SHAPES if args.smoke else {name: SHAPES[name] for name in args.shapes}
    contexts, steps, size = SMOKE if args.smoke else FULL
    modes = ("eager",) if args.smoke else ("eager", "compiled", COMPILER_ALONE)
    copy_rate, rows, ratios = measure.copy_bandwidth(device, size), {}, []
    for name, format, mode in itertools.product(shapes, args.formats, modes):
        first = None  # the row of the first context
        for context in contexts:
            print_status(f"{name} {mode} {format} at {context}")
            try:
                row = measure_shape(shapes[name], device, mode, format, context, steps)
            except (UserError, torch.OutOfMemoryError) as error:
                print_status(f"left out: {first_line(error)}")
                continue
            first = first or row
            rate = (row["weight_bytes"] + row["kv_bytes"]) / row["step_s"]
            more_s, more_bytes = (row[key] - first[key] for key in ("step_s", "kv_bytes"))
            row |= {"tokens_per_s": 1 / row["step_s"], "bytes_per_s": rate, "share": rate / copy_rate}
            row["growth"] = more_s * copy_rate / more_bytes if more_bytes else None
            published = GPT_FAST[format] if device.type == "cuda" else None
            rows[name, format, mode, context] = {"name": f"{name} {mode} {format}", **row, "gpt_fast_share": published}
    for (name, format, mode, context), our in rows.items():
        for peer in (rows.get((name, format, other, context)) for other in ("eager", COMPILER_ALONE)):
            if mode == "compiled" and peer:
                ratio = Ratio.of([our["tokens_per_s"]], [peer["tokens_per_s"]]).median
                ratios.append({"ours": our["name"], "peer": peer["name"], "context": context, "decode": ratio})
    if not rows:
        raise UserError("memory does not suffice for any of the shapes")
    return {"copy_bytes_per_s": copy_rate, "rows": list(rows.values()), "ratios": ratios}


def print_result(result: dict):
    print(f"copy bandwidth {result['copy_bytes_per_s'] / 1e9:.1f} GB/s")
    for row in result["rows"]:
        growth = "" if row["growth"] is None else f"   growth {row['growth']:.2f}"
        published = "" if row["gpt_fast_share"] is None else f" (gpt-fast {row['gpt_fast_share']:.0%})"
        size = f"{row['weight_bytes'] / 1e6:.0f} + {row['kv_bytes'] / 1e6:.0f} MB"
        rate = f"{row['tokens_per_s']:8.1f} tokens/s {row['bytes_per_s'] / 1e9:8.1f} GB/s {row['share']:.0%}{published}"
        print(f"{row['name']:46} at {row['context']:5}  {size:>16} {rate}{growth}")
    for ratio in result["ratios"]:
        print(f"{ratio['ours']} to {ratio['peer']} at {ratio['context']}: {ratio['decode']:.2f}x")


def main():
    parser = measure.make_parser(__doc__, rounds=None, checkpoint=False)
    add = parser.add_argument
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS[:1], help="bf16, int8, int4 (bf16)")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help=f"of {', '.join(SHAPES)} (all)")
    add("--smoke", action="store_true", help="a tiny shape, eager, to see that this works")
    add("--device", help="cpu, cuda ...; without it the fastest there is")
    args = parser.parse_args()
    device = choose_device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(0)
    result = measure_all(args, device)
    print_result(result)
    if args.out or not args.smoke:
        measure.save(measure.about_run(device) | result, args.out, "shapes", device)


if __name__ == "__main__":
    run_command(main)
