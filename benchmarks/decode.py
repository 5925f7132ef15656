"""Speed of one row beside the peers: fastpath, transformers on the same weights, llama.cpp on GGUF files, in turns.

  decode   tokens/s of --new_tokens steps after 5 tokens of prompt (llama-bench's tg has no prompt)
  prefill  tokens/s of --prompt_tokens in one row, up to the first new token

fastpath runs in the formats of --formats, eager and with --compile compiled too. transformers runs in bf16; its decode
is its time for --new_tokens + 1 tokens less that for 1. Of llama-bench with and without flash attention the better
counts, for each rate by itself. All have the same number of threads (OMP_NUM_THREADS sets it). Compilation is in no
rate: processes of its own measure it, cold (an empty cache) and warm (with the cache that the cold one left).

Each round also reads memory and does nothing else: what a token reads of weights at DRAM's rate is the roofline, the
dashed line in the chart beside the JSON.

llama.cpp comes from the source distribution of llama-cpp-python. Name the fastest format of each width, with --gguf:
    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON \\
        -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF
    cmake --build build --target llama-bench llama-quantize
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import measure
import torch
from measure import BF16, BLUE, FORMATS, GREY, ROOT, Panel, Ratio, count

from checkpoint import is_ours, read_config
from cli import UserError, first_line, keep_freed_memory, print_status, run_command
from convert_hf_checkpoint import convert, default_gguf, ensure_checkpoint, hf_source
from engine import Engine, StepFunctions
from load import choose_device, compiled_steps, load_model
from report import weight_bytes

SHORT_PROMPT = 5  # tokens before decode
KINDS = ("decode", "prefill")

# ---------------------------------------------------------------- the contestants: functions that return their rates


def fastpath_rates(args, engine: Engine) -> Callable[[], dict]:
    V = engine.model.config.vocab_size

    def run():
        decode = measure.time_prompt(engine, measure.synthetic_prompt(SHORT_PROMPT, V), args.new_tokens + 1)
        prefill = measure.time_prompt(engine, measure.synthetic_prompt(args.prompt_tokens, V), 1)
        rates = decode.decode_tokens / decode.decode_s, prefill.prefill_tokens / prefill.prefill_s
        return dict(zip(KINDS, rates))

    return run


def transformers_source(args) -> tuple[Path | str, dict]:
    """Where our weights come from, as transformers takes it: a GGUF file, a Hugging Face directory or a hub id."""
    source = default_gguf() if args.checkpoint_path is None else Path(args.checkpoint_path).expanduser()
    if not source.exists():
        return args.checkpoint_path, {}
    if source.suffix == ".gguf":
        return source.parent, {"gguf_file": source.name}
    source = source if source.is_dir() else source.parent
    if is_ours(source):
        raise UserError("it cannot load a fastpath checkpoint; give --checkpoint_path what that was converted from")
    return source, {}


def transformers_rates(args, device: torch.device, V: int) -> Callable[[], dict]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source, options = transformers_source(args)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=BF16, **options).to(device).eval()
    # Greedy, and no token ends it.
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate_n(prompt: int, n: int) -> float:
        ids = torch.tensor([measure.synthetic_prompt(prompt, V)], device=device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": n, "min_new_tokens": n}
        with torch.no_grad():
            return measure.seconds(lambda: model.generate(ids, **options), device=device)

    def run():
        decode_s = generate_n(SHORT_PROMPT, args.new_tokens + 1) - generate_n(SHORT_PROMPT, 1)
        prefill_s = generate_n(args.prompt_tokens, 1)
        return {"decode": args.new_tokens / decode_s, "prefill": args.prompt_tokens / prefill_s}

    return run


def llama_bench_rates(args, gguf: Path, facts: dict) -> Callable[[], dict]:
    command = [args.llama_bench, "-m", str(gguf), "-p", str(args.prompt_tokens), "-n", str(args.new_tokens)]
    command += ["-t", str(torch.get_num_threads()), "-r", "1", "-fa", "0,1", "-o", "json"]

    def run():
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            tests = json.loads(done.stdout)
            build = f"{tests[0]['build_commit']} (build {tests[0]['build_number']})"
            facts.update(llama_bench=build, model_type=tests[0]["model_type"])
            fields = {"decode": "n_gen", "prefill": "n_prompt"}
            return {kind: max(test["avg_ts"] for test in tests if test[field]) for kind, field in fields.items()}
        except (ValueError, KeyError, IndexError, TypeError):
            reason = (done.stderr.strip() or "its output is not the JSON expected").splitlines()[-1]
            raise UserError(f"llama-bench failed ({done.returncode}): {reason}") from None

    return run


# ---------------------------------------------------------------- the comparison


def compile_seconds(args, directory: Path, device: torch.device) -> dict:
    """Seconds that generate.py takes to compile: cold, with an empty cache, and warm, with what that left there."""
    found = {}
    for flag, sizes in (("--compile", (SHORT_PROMPT, args.new_tokens)), ("--compile_prefill", (args.prompt_tokens, 1))):
        options = f"--checkpoint_path '{directory}' --device {device} {flag}"
        found[flag] = {}
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                print_status(f"generate.py {flag}, {state}")
                result = measure.run_generate(ROOT, options, *sizes, samples=1, TORCHINDUCTOR_CACHE_DIR=cache)
                found[flag][f"{state}_s"] = result["compile_s"]
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


def load_contestants(args, directory: Path, device: torch.device) -> tuple[dict[str, Callable], dict[str, dict]]:
    """What runs, by name, and what the JSON says of each besides its rates."""
    config, needed = read_config(directory), max(args.prompt_tokens, SHORT_PROMPT + args.new_tokens)
    if needed > config.max_seq_length:
        raise UserError(f"{needed} tokens are more than the model's context of {config.max_seq_length}")
    steps = {"eager": StepFunctions()} | ({"compiled": compiled_steps(True, True)} if args.compile else {})
    runs, facts = {}, {}
    for format in args.formats:
        model = load_model(measure.quantized(directory, format), device, BF16)
        for kind, functions in steps.items():
            engine = Engine(model, 1, needed, functions)
            name = f"fastpath {kind} {format}"
            runs[name], facts[name] = fastpath_rates(args, engine), {"weight_bytes": weight_bytes(model, 1)}
    if args.compile:
        facts[f"fastpath compiled {args.formats[0]}"]["compile"] = compile_seconds(args, directory, device)
    try:
        runs["transformers bf16"] = transformers_rates(args, device, config.vocab_size)
    except (UserError, ImportError, OSError, ValueError) as error:
        print_status(f"without transformers: {first_line(error)}")
    files = args.gguf or ([Path(args.checkpoint_path or default_gguf())] if args.llama_bench else [])
    for path in files:
        name = f"llama.cpp {path.name}"
        facts[name] = {}
        runs[name] = llama_bench_rates(args, path, facts[name])
    return runs, facts


def compare(args, device: torch.device) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        if args.random:
            args.checkpoint_path, directory = make_random(args.random, Path(folder))
        else:
            directory = ensure_checkpoint(args.checkpoint_path)
        runs, facts = load_contestants(args, directory, device)
        runs["memory"] = lambda: measure.read_rates(device)
        rounds, left_out = measure.take_turns(runs, args.rounds)
    result, reading = measure.about_run(device), rounds.pop("memory")
    result["read_bytes_per_s"] = {name: median(one[name] for one in reading) for name in reading[0]}
    result["versions"]["llama_bench"] = next((f["llama_bench"] for f in facts.values() if "llama_bench" in f), None)
    rows, ratios = [], []
    rates = {name: {kind: [one[kind] for one in found] for kind in KINDS} for name, found in rounds.items()}
    for name, found in rates.items():
        row = {"name": name} | {f"{kind}_tokens_per_s": median(found[kind]) for kind in KINDS}
        rows.append(row | {f"{kind}_rounds": found[kind] for kind in KINDS} | facts.get(name, {}))
    for our in (name for name in rates if name.startswith("fastpath")):
        for peer in (name for name in rates if not name.startswith("fastpath")):
            ratio = {"ours": our, "peer": peer}
            for kind in KINDS:
                ratio |= Ratio.of(rates[our][kind], rates[peer][kind]).fields(kind)
            ratios.append(ratio)
    counts = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    return result | counts | {"rows": rows, "ratios": ratios, "left_out": left_out}


# ---------------------------------------------------------------- the report


def print_result(result: dict):
    for row in result["rows"]:
        print(f"{row['name']:40} decode {row['decode_tokens_per_s']:8.1f}  prefill {row['prefill_tokens_per_s']:8.1f}")
        for flag, took in row.get("compile", {}).items():
            print(f"generate.py {flag} compiles in {took['cold_s']:.1f} s cold, {took['warm_s']:.1f} s warm")
    dram, cache = (result["read_bytes_per_s"][name] / 1e9 for name in ("dram", "cache"))
    print(f"plain reads: {dram:.0f} GB/s from DRAM, {cache:.0f} from the caches")
    for ratio in result["ratios"]:
        cells = [f"{kind} {Ratio(ratio[kind], *ratio[f'{kind}_spread'])}" for kind in KINDS]
        print(f"{ratio['ours']} to {ratio['peer']}: {', '.join(cells)}")


def draw(result: dict, path: Path):
    """Decode beside prefill, by width of the weights, and how fast decode could be at DRAM's bandwidth."""

    def width(row: dict) -> int:
        name = row["name"].lower()
        return next((i for i, mark in enumerate(("bf16", "8", "4")) if mark in name), 3)

    rows, machine = sorted(result["rows"], key=width), result["machine"]
    dram = result["read_bytes_per_s"]["dram"]
    bounds = [dram / row["weight_bytes"] if "weight_bytes" in row else None for row in rows]
    colours = [BLUE if row["name"].startswith("fastpath") else GREY for row in rows]
    panels = []
    for kind, title, marks in zip(KINDS, ("decode", f"prefill of {result['prompt_tokens']}"), (bounds, None)):
        rates = [row[f"{kind}_tokens_per_s"] for row in rows]
        panels.append(Panel(f"{title}, tokens/s", rates, [f"{rate:.0f}" for rate in rates], colours, marks))
    footnote = f"dashed: a token's weights at the {dram / 1e9:.0f} GB/s of a plain read, measured in the same rounds"
    title = f"One row, {machine['gpu'] or machine['cpu']}, threads: {machine['threads']}, {result['date']}"
    names = [re.sub(r"^(llama.cpp) .*\.(\w+)\.gguf$", r"\1 \2", row["name"]) for row in rows]
    measure.draw_bars(path, title, names, panels, footnote)


def parse_arguments():
    parser = measure.make_parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--random", type=Path, metavar="CONFIG", help="random weights for this Hugging Face config.json instead")
    add("--llama_bench", help="llama.cpp's llama-bench")
    add("--gguf", nargs="+", type=Path, default=[], help="the files for llama-bench (that of the checkpoint)")
    add("--prompt_tokens", type=count, default=512, help="of prefill (512)")
    add("--new_tokens", type=count, default=64, help="of decode (64)")
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS[:1], help="of ours: bf16, int8, int4 (bf16)")
    add("--compile", action="store_true", help="ours compiled, too")
    add("--device", help="cpu, cuda ...; without it the fastest there is")
    add("--draw", type=Path, metavar="JSON", help="only draw what was measured, beside it")
    args = parser.parse_args()
    if args.random and args.checkpoint_path:
        raise UserError("--random is a model of its own: no --checkpoint_path beside it")
    if args.gguf and not args.llama_bench:
        raise UserError("--gguf names files for --llama_bench, which is not given")
    return args


def main():
    args = parse_arguments()
    if args.draw:
        return measure.draw_again(args.draw, "ratios", draw)
    device = choose_device(args.device)
    if device.type == "cpu":
        keep_freed_memory()  # as the program does; transformers, in this process, has it too
    result = compare(args, device)
    print_result(result)
    measure.save(result, args.out, "decode", device, draw)


if __name__ == "__main__":
    run_command(main)
