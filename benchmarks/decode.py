"""Speed of one row: ours beside its peers on a real checkpoint, or alone at the sizes of well-known models.

With a checkpoint (--checkpoint_path; without it the embedded default, except on CUDA): fastpath in the formats that
--formats names, eager and with --compile compiled too, against `transformers` in bf16 on the same weights and
llama.cpp's `llama-bench` on GGUF files.
They run in turns, on the same number of threads (OMP_NUM_THREADS sets it): a round runs every contestant once, and each
round begins with another. A first round is warm-up and does not count. Rates are medians over rounds; the ratio of ours
to a peer is the median of the rounds' own ratios. On a machine that does anything else besides they mean nothing: two
busy thread pools on the same cores slow each other down a hundredfold.
  decode   tokens/s over --new_tokens after 5 tokens of prompt (llama-bench's tg has no prompt)
  prefill  tokens/s over --prompt_tokens in one row, up to the first new token
transformers' decode is its time for --new_tokens + 1 tokens less that for 1. Of llama-bench with and without flash
attention the better counts, for each rate by itself. Compilation is in no rate: processes of its own measure it, cold
(an empty cache) and warm (the cache of the cold one).
Each round also reads memory and does nothing else: 256 MB, which come from DRAM, and 1 MB again and again, which the
cores' caches hold. What a token reads of weights, at DRAM's rate, is the roofline: a dashed line in the chart that is
drawn beside the JSON (--draw JSON only draws).

Without a checkpoint (on CUDA, or with --shapes or --smoke): random weights, in the formats and in the shapes of Llama
models; eager, compiled, and compiled without our kernels (--kernels torch); decoding at 0, 8k and 32k tokens of
context, which are random numbers written into the caches. A context beyond what a model was trained for costs what any
other costs, so it is measured too, and marked; what memory does not suffice for is left out. The cache is as long as
needed, rounded up to 512. A step is the loop body of generate(), the token on the host at its end; its bytes are all
weights (of an untied embedding one vector) and the live keys and values. `share` is bytes a second as a part of the
measured copy bandwidth (bytes read plus written); beside it what gpt-fast published, of an A100's peak. `growth` is by
how much longer a step is than at the first context, as a multiple of the time that its further bytes take at that
bandwidth.
"""

import argparse
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import chart
import torch

import generate
from checkpoint import check_memory, empty_model, is_ours, read_config, read_json
from cli import ArgumentParser, UserError, print_status, run_command
from convert_hf_checkpoint import convert, default_gguf, ensure_checkpoint, hf_source
from generate import Steps, compiled_steps
from linear import Quantization
from load import install_kernels, load_model
from model import Config, RopeScaling
from quantize import quantize_checkpoint
from report import Timing, compile_counts, kv_bytes, synchronize, weight_bytes
from sampling import Sampling

ROOT = Path(__file__).resolve().parent.parent
BF16 = torch.bfloat16
SHORT_PROMPT = 5  # tokens before decode
COMPILER_ALONE = "compiled, --kernels torch"
GPT_FAST = {"bf16": 0.69, "int8": 0.52, "int4": 0.42}  # published, of an A100's peak, Llama-2-7B
WARM_UP_STEPS = 8  # of a shape; a CUDA graph is recorded in the second or third
LLAMA31, LLAMA32 = (RopeScaling("llama3", factor, 8192) for factor in (8.0, 32.0))
SHAPES = {  # layers H  K   E    D     F      V      context
    "Llama-3.2-1B": Config(16, 32, 8, 64, 2048, 8192, 128256, 131072, 1e-5, 5e5, LLAMA32, tied_embeddings=True),
    "Llama-3.1-8B": Config(32, 32, 8, 128, 4096, 14336, 128256, 131072, 1e-5, 5e5, LLAMA31),
    "Llama-2-7B": Config(32, 32, 32, 128, 4096, 11008, 32000, 4096, 1e-5),
}
FULL = (0, 8192, 32768), 100, 2**31  # contexts, steps, bytes to copy
SMOKE_SHAPES = {"tiny": Config(2, 6, 3, 10, 44, 76, 131, 32, 1e-5, 5e5, LLAMA31)}
SMOKE = (0, 16, 600), 5, 2**20


def seconds(device: torch.device, work: Callable) -> float:
    """That work() takes on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


# ---------------------------------------------------------------- the contestants


@dataclass
class Contestant:
    """One of those that take turns; run() measures once and returns (decode, prefill) in tokens a second."""

    name: str
    run: Callable[[], tuple[float, float]]
    facts: dict = field(default_factory=dict)  # for its row of the JSON
    rounds: list[tuple[float, float]] = field(default_factory=list)


def read_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second of plain sums, the best of several: over what lies in DRAM and what lies in the caches."""
    found = {}
    for name, size, times in (("dram", 2**28, 3), ("cache", 2**20, 300)):
        numbers = torch.ones(size // 8, dtype=torch.int64, device=device)
        found[name] = size / min(seconds(device, numbers.sum) for _ in range(times))
    return found


def prompts(args, V: int) -> list[list[int]]:
    """The short one and the long one; the tokens are those of generate.py --synthetic_prompt."""
    return [[(7 + 31 * i) % V for i in range(n)] for n in (SHORT_PROMPT, args.prompt_tokens)]


def fastpath_run(args, model, steps: Steps) -> Callable:
    short, long = prompts(args, model.config.vocab_size)
    settings = Sampling.make(1, temperature=0.0, device=model.norm.weight.device)

    def run():
        decoding, prefilling = Timing(), Timing()
        generate.generate(model, [short], settings, args.new_tokens + 1, steps=steps, timing=decoding)
        generate.generate(model, [long], settings, 1, steps=steps, timing=prefilling)
        return decoding.decode_tokens / decoding.decode_s, prefilling.prefill_tokens / prefilling.prefill_s

    return run


def transformers_run(args, device: torch.device, V: int) -> Callable:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # The source of our weights: a GGUF file, a Hugging Face directory or a hub id.
    source, options = default_gguf() if args.checkpoint_path is None else Path(args.checkpoint_path).expanduser(), {}
    if source.suffix == ".gguf":
        source, options = source.parent, {"gguf_file": source.name}
    elif not source.exists():
        source = args.checkpoint_path
    else:
        source = source if source.is_dir() else source.parent
        if is_ours(source):
            raise UserError("it cannot load a fastpath checkpoint; give --checkpoint_path what that was converted from")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=BF16, **options).to(device).eval()
    assert model.dtype == BF16, model.dtype
    # Greedy, and no token ends it.
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate_n(prompt: list[int], n: int):
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n)
        assert out.shape[1] == len(prompt) + n, f"{out.shape[1] - len(prompt)} new tokens instead of {n}"

    def run():
        short, long = prompts(args, V)
        more, one = (seconds(device, lambda n=n: generate_n(short, n)) for n in (args.new_tokens + 1, 1))
        return args.new_tokens / (more - one), args.prompt_tokens / seconds(device, lambda: generate_n(long, 1))

    return run


def llama_bench_run(args, gguf: Path, facts: dict) -> Callable:
    command = [args.llama_bench, "-m", str(gguf), "-p", str(args.prompt_tokens), "-n", str(args.new_tokens)]
    command += ["-t", str(torch.get_num_threads()), "-r", "1", "-fa", "0,1", "-o", "json"]

    def run():
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            tests = json.loads(done.stdout)
            build = f"{tests[0]['build_commit']} (build {tests[0]['build_number']})"
            facts.update(llama_bench=build, model_type=tests[0]["model_type"])
            return tuple(max(test["avg_ts"] for test in tests if test[kind]) for kind in ("n_gen", "n_prompt"))
        except (ValueError, KeyError, IndexError, TypeError):
            reason = (done.stderr.strip() or "its output is not the JSON expected").splitlines()[-1]
            raise UserError(f"{shlex.join(command)} failed ({done.returncode}): {reason}") from None

    return run


def compile_seconds(args, directory: Path, device: torch.device, flag: str, prompt: int, new: int) -> dict:
    """Seconds that generate.py takes to compile: cold, with an empty cache, and warm, with what that left there."""
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint_path", str(directory), "--device", str(device)]
    command += [flag, "--temperature", "0", "--synthetic_prompt", str(prompt), "--max_new_tokens", str(new), "--json"]
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            print_status(f"generate.py {flag}, {state}")
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode:
                raise UserError(f"{shlex.join(command)} failed: {(done.stderr.strip() or '?').splitlines()[-1]}")
            found[f"{state}_s"] = json.loads(done.stdout)["compile_s"]
    return found


def make_random(config: Path, folder: Path) -> tuple[Path, Path]:
    """Random bf16 weights for a Hugging Face config.json: as transformers saves them, and converted."""
    import transformers

    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_bytes(config.read_bytes())
    torch.manual_seed(0)
    shapes = transformers.AutoConfig.from_pretrained(folder / "hf")
    print_status(f"random weights for {config.name}")
    transformers.AutoModelForCausalLM.from_config(shapes, dtype=BF16).save_pretrained(folder / "hf")
    return folder / "hf", convert(hf_source(folder / "hf"), folder / "ours", BF16)


def quantized(directory: Path, mode: str) -> Path:
    """The checkpoint in groups of 32 with an int8 head, made beside it where it is not there."""
    if not (out := directory.with_name(f"{directory.name}-{mode}-g32")).exists():
        print_status(f"quantizing to {out.name}")
        quantize_checkpoint(directory, out, Quantization(mode, 32, "int8"))
    return out


def contestants(args, device: torch.device) -> tuple[list[Contestant], list[Contestant]]:
    """Ours and the peers, with everything loaded."""
    files = args.gguf
    if args.llama_bench and not files:
        files = [Path(args.checkpoint_path).expanduser() if args.checkpoint_path else default_gguf()]
    directory = args.directory or ensure_checkpoint(args.checkpoint_path)
    config, needed = read_config(directory), max(args.prompt_tokens, SHORT_PROMPT + args.new_tokens)
    if needed > config.max_seq_length:
        raise UserError(f"{needed} tokens are more than the model's context of {config.max_seq_length}")
    steps = {"eager": Steps()} | ({"compiled": compiled_steps(True, True)} if args.compile else {})
    ours = []
    for format in args.formats:
        model = load_model(directory if format == "bf16" else quantized(directory, format), device, BF16)
        model.setup_caches(1, generate.cache_length(config, needed, None))
        for kind, taken in steps.items():
            facts = {"weight_bytes": weight_bytes(model, 1)}
            ours.append(Contestant(f"fastpath {kind} {format}", fastpath_run(args, model, taken), facts))
    if args.compile:
        cases = {"--compile": (SHORT_PROMPT, args.new_tokens), "--compile_prefill": (args.prompt_tokens, 1)}
        facts = {flag: compile_seconds(args, directory, device, flag, *case) for flag, case in cases.items()}
        ours[1].facts["compile"] = facts
    peers = []
    try:
        peers.append(Contestant("transformers bf16", transformers_run(args, device, config.vocab_size)))
    except (UserError, ImportError, OSError, ValueError) as error:
        print_status(f"without transformers: {str(error).strip().splitlines()[0]}")
    for path in files:
        facts = {}
        peers.append(Contestant(f"llama.cpp {path.name}", llama_bench_run(args, path, facts), facts))
    return ours, peers


def take_turns(everyone: list[Contestant], rounds: int, device: torch.device) -> dict[str, float]:
    """Fill in the contestants' rounds, after one that does not count; returns the rounds' medians of read_rates."""
    reading = []
    for i in range(rounds + 1):
        print_status(f"round {i} of {rounds}" if i else "warm-up")
        first = i % len(everyone)
        for contestant in everyone[first:] + everyone[:first]:
            gc.collect()
            before = compile_counts()
            rates = contestant.run()
            if i:
                contestant.rounds.append(rates)
                if compile_counts() != before:
                    print_status(f"{contestant.name} was compiling in this round: its rates are too low")
        reading.append(read_rates(device))
    return {name: median(rates[name] for rates in reading) for name in reading[0]}


def compare(args, device: torch.device) -> dict:
    ours, peers = contestants(args, device)
    reading = take_turns(ours + peers, args.rounds, device)
    rows, ratios = [], []
    for one in ours + peers:
        decode, prefill = (list(rates) for rates in zip(*one.rounds))
        row = {"name": one.name, "decode_tokens_per_s": median(decode), "prefill_tokens_per_s": median(prefill)}
        rows.append(row | {"decode_rounds": decode, "prefill_rounds": prefill} | one.facts)
    for our, peer in ((our, peer) for our in ours for peer in peers):
        decode, prefill = (median(a[i] / b[i] for a, b in zip(our.rounds, peer.rounds)) for i in (0, 1))
        ratios.append({"ours": our.name, "peer": peer.name, "decode": decode, "prefill": prefill})
    counts = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    return counts | {"read_bytes_per_s": reading, "rows": rows, "ratios": ratios}


# ---------------------------------------------------------------- the shapes


def random_model(config: Config, slots: int, device: torch.device, format: str, kernels: str):
    """A model of random weights, bf16 or quantized from them in groups of 32 with an int8 head, with random numbers in
    its caches, which is as fast as any other."""
    quantization = None if format == "bf16" else Quantization(format, 32, "int8")
    check_memory(config, device, BF16, slots + 8, quantization)
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
    if kernels == "auto":
        install_kernels(model)
    model.setup_caches(1, slots)
    for block in model.blocks:
        block.attention.k_cache.normal_()
        block.attention.v_cache.normal_()
    return model


def step_seconds(model, decode: Callable, context: int, count: int) -> list[float]:
    """Of each of `count` decode steps of one row, from position `context` on."""
    device = model.norm.weight.device
    settings = Sampling.make(1, temperature=0.0, device=device)
    token, position = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([context], device=device)
    times = []
    synchronize(device)
    for _ in range(count):
        start = time.perf_counter()
        token = decode(model, token, position, None, settings, None).clone()
        position = torch.where(position < 0, -1, position + 1)
        token.tolist()  # waits for the device
        times.append(time.perf_counter() - start)
    return times


def measure_shape(config: Config, device: torch.device, mode: str, format: str, context: int, steps: int) -> dict:
    torch.compiler.reset()  # frees CUDA graphs; and after a cache of another length the graph would be of any length
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    needed = context + max(steps, WARM_UP_STEPS)
    kernels = "torch" if "--kernels torch" in mode else "auto"
    model = random_model(config, (needed + 511) // 512 * 512, device, format, kernels)
    decode = compiled_steps(decoding="compiled" in mode, prefilling=False).decode
    warm_up_s, before = sum(step_seconds(model, decode, context, WARM_UP_STEPS)), compile_counts()
    times = step_seconds(model, decode, context, steps)
    return {
        "context": context,
        "beyond_context": needed > config.max_seq_length,
        "warm_up_s": warm_up_s,  # with compilation, from whatever torch has in its cache on disk
        "recompiles": compile_counts()[0] - before[0],
        "step_s": median(times),
        "step_range_s": [min(times), max(times)],
        "weight_bytes": weight_bytes(model, 1),
        "kv_bytes": kv_bytes(model, [context + (steps + 1) // 2]),  # halfway through the steps
    }


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second, read plus written, of the best of 10 copies of `size` bytes within the device's memory."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(seconds(device, lambda: target.copy_(source)) for _ in range(10))


def measure_shapes(args, device: torch.device) -> dict:
    shapes = SMOKE_SHAPES if args.smoke else {name: SHAPES[name] for name in args.shapes or SHAPES}
    contexts, steps, size = SMOKE if args.smoke else FULL
    copy_rate = copy_bandwidth(device, size)
    modes = ("eager", "compiled", COMPILER_ALONE) if args.compile or not args.smoke else ("eager",)
    rows, ratios = {}, []
    for name, format, mode in itertools.product(shapes, args.formats, modes):
        first = None  # the row of the first context
        for context in contexts:
            print_status(f"{name} {mode} {format} at {context}")
            try:
                row = measure_shape(shapes[name], device, mode, format, context, steps)
            except (UserError, torch.OutOfMemoryError) as error:
                print_status(f"left out: {str(error).splitlines()[0]}")
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
                ratio = our["tokens_per_s"] / peer["tokens_per_s"]
                ratios.append({"ours": our["name"], "peer": peer["name"], "context": context, "decode": ratio})
    if not rows:
        raise UserError("memory does not suffice for any of the shapes")
    return {"copy_bytes_per_s": copy_rate, "rows": list(rows.values()), "ratios": ratios}


# ---------------------------------------------------------------- the report


def circumstances(device: torch.device, rows: list[dict]) -> dict:
    """Date, machine, versions and command, for the JSON."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    machine = {
        "cpu": next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    peers = ("transformers", "triton")  # where they are installed
    versions |= {d.name: d.version for d in importlib.metadata.distributions() if d.name in peers}
    versions["llama_bench"] = next((row["llama_bench"] for row in rows if "llama_bench" in row), None)
    date = datetime.date.today().isoformat()
    return {"date": date, "machine": machine, "versions": versions, "command": shlex.join(["python", *sys.argv])}


def print_report(result: dict):
    scales = {"step_s": 1e3, "weight_bytes": 1e-6, "kv_bytes": 1e-6, "bytes_per_s": 1e-9, "share": 100}
    scales["gpt_fast_share"] = 100
    titles = {"decode_tokens_per_s": "decode tok/s", "prefill_tokens_per_s": "prefill tok/s", "context": "context"}
    titles |= {"step_s": "step ms", "tokens_per_s": "tokens/s", "weight_bytes": "weights MB", "kv_bytes": "KV MB"}
    titles |= {"bytes_per_s": "GB/s", "share": "share %", "growth": "growth", "gpt_fast_share": "gpt-fast's %"}
    keys = [key for key in titles if key in result["rows"][0]]
    width = max(len(row["name"]) for row in result["rows"])
    print(" " * width + "".join(f"{titles[key]:>14}" for key in keys))
    for row in result["rows"]:
        cells = ["" if row.get(key) is None else f"{row[key] * scales.get(key, 1):.5g}" for key in keys]
        print(f"{row['name']:{width}}" + "".join(f"{cell:>14}" for cell in cells))
    for row in result["rows"]:
        for flag, took in row.get("compile", {}).items():
            print(f"generate.py {flag} compiles in {took['cold_s']:.1f} s cold, {took['warm_s']:.1f} s warm")
    if "read_bytes_per_s" in result:
        dram, cache = (result["read_bytes_per_s"][name] / 1e9 for name in ("dram", "cache"))
        print(f"plain reads: {dram:.0f} GB/s from DRAM, {cache:.0f} from the caches")
    if "copy_bytes_per_s" in result:
        print(f"copy bandwidth {result['copy_bytes_per_s'] / 1e9:.1f} GB/s")
    for ratio in result["ratios"]:
        where = f" at {ratio['context']}" if "context" in ratio else ""
        values = ", ".join(f"{key} {ratio[key]:.2f}x" for key in ("decode", "prefill") if key in ratio)
        print(f"{ratio['ours']} to {ratio['peer']}{where}: {values}")


def draw(result: dict, path: Path):
    """Decode beside prefill, by width of the weights, and how fast decode could be at DRAM's bandwidth."""

    def width(row: dict) -> int:
        name = row["name"].lower()
        return next((i for i, marks in enumerate((("bf16",), ("8",), ("4",))) if any(m in name for m in marks)), 3)

    rows, machine = sorted(result["rows"], key=width), result["machine"]
    dram = result["read_bytes_per_s"]["dram"]
    bounds = [dram / row["weight_bytes"] if "weight_bytes" in row else None for row in rows]
    colours = [chart.BLUE if row["name"].startswith("fastpath") else chart.GREY for row in rows]
    panels = []
    titles = {"decode": ("decode", bounds), "prefill": (f"prefill of {result['prompt_tokens']}", None)}
    for kind, (title, marks) in titles.items():
        rates = [row[f"{kind}_tokens_per_s"] for row in rows]
        labels = [f"{rate:.0f}" for rate in rates]
        panels.append(chart.Panel(f"{title}, tokens/s", rates, labels, colours, marks))
    footnote = f"dashed: a token's weights at the {dram / 1e9:.0f} GB/s of a plain read, measured in the same rounds"
    title = f"One row, {machine['gpu'] or machine['cpu']}, threads: {machine['threads']}, {result['date']}"
    names = [re.sub(r"^(llama.cpp) .*\.(\w+)\.gguf$", r"\1 \2", row["name"]) for row in rows]
    chart.draw(path, title, names, panels, footnote)


# ---------------------------------------------------------------- command line


def parse_arguments():
    count = generate.number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint_path", help="a Hugging Face directory, a hub id or a .gguf file (SmolLM2-135M-Instruct)")
    add("--random", type=Path, metavar="CONFIG", help="random weights for this Hugging Face config.json instead")
    add("--llama_bench", help="llama.cpp's llama-bench")
    add("--gguf", nargs="+", type=Path, default=[], help="the files for llama-bench (that of the checkpoint)")
    add("--rounds", type=count, default=5, help="that count (5)")
    add("--prompt_tokens", type=count, default=512, help="of prefill (512)")
    add("--new_tokens", type=count, default=64, help="of decode (64)")
    formats = ("bf16", "int8", "int4")
    add("--formats", nargs="+", choices=formats, default=formats[:1], help="of ours: bf16, int8, int4 (bf16)")
    add("--compile", action="store_true", help="ours compiled, too (as the shapes always are)")
    add("--shapes", nargs="+", choices=SHAPES, help="without a checkpoint: these only")
    add("--smoke", action="store_true", help="a tiny shape, to see that this works; compiled with --compile")
    add("--device", help="cpu, cuda ...; without it the fastest there is")
    add("--out", type=Path, help="the JSON (benchmarks/results/decode_DEVICE.json; none with --smoke)")
    add("--draw", type=Path, metavar="JSON", help="only draw what was measured, beside it")
    args = parser.parse_args()
    args.directory = None  # of our checkpoint, where it is not checkpoint_path's
    if args.random and (args.checkpoint_path or args.shapes or args.smoke):
        raise UserError("--random is a model of its own: no --checkpoint_path, --shapes or --smoke beside it")
    if args.gguf and not args.llama_bench:
        raise UserError("--gguf names files for --llama_bench, which is not given")
    return args


def main():
    args = parse_arguments()
    if args.draw:
        result = read_json(args.draw)
        if "read_bytes_per_s" not in result:
            raise UserError(f"{args.draw} was not written by a comparison of this program")
        return draw(result, args.draw.with_suffix(".png"))
    device = generate.choose_device(args.device)
    if device.type == "cpu":
        generate.keep_freed_memory()  # as the program does; transformers, in this process, has it too
    out = args.out
    if out is None and not args.smoke:
        out = ROOT / "benchmarks" / "results" / f"decode_{device.type}.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    if args.smoke or args.shapes or (device.type == "cuda" and not (args.checkpoint_path or args.random)):
        if args.checkpoint_path or args.llama_bench:
            raise UserError("random weights have no peers: give either --checkpoint_path or --shapes or --smoke")
        torch.manual_seed(0)
        result = measure_shapes(args, device)
    else:
        with tempfile.TemporaryDirectory() as folder:
            if args.random:
                args.checkpoint_path, args.directory = make_random(args.random, Path(folder))
            result = compare(args, device)
    print_report(result)
    if out is not None:
        result = circumstances(device, result["rows"]) | result
        out.write_text(json.dumps(result, indent=2) + "\n")
        print_status(f"written to {out}")
        if "read_bytes_per_s" in result:
            try:
                draw(result, out.with_suffix(".png"))
            except UserError as error:
                print_status(str(error))


if __name__ == "__main__":
    run_command(main)
