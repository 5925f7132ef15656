"""Speed of one row beside the peers: fastpath, transformers on the same weights, llama.cpp on GGUF files, in turns.

  decode   tokens/s of --new_tokens steps after 5 tokens of prompt (llama-bench's tg has no prompt)
  prefill  tokens/s of --prompt_tokens in one row, up to the first new token

fastpath runs in the formats of --formats, eager and with --compile compiled too. transformers runs in bf16; its decode
is its time for --new_tokens + 1 tokens less that for 1. Of llama-bench with and without flash attention the better
counts, for each rate by itself. All have the same number of threads (OMP_NUM_THREADS sets it). Compilation is in no
rate: processes of its own measure it, cold (an empty cache) and warm (with the cache that the cold one left).

Each round also reads memory and does nothing else: what a token reads of weights at DRAM's rate is the roofline.
charts.py draws the result.

llama.cpp comes from the source distribution of llama-cpp-python. Name the fastest format of each width, with --gguf:
    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON \\
        -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF
    cmake --build build --target llama-bench llama-quantize
"""

import json
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import measure
import torch
from measure import BF16, DECODE, FORMATS, PREFILL, RATES, ROOT, SHORT_PROMPT, column, ratio, synthetic_prompt

from checkpoint import is_ours, read_config
from cli import UserError, first_line, keep_freed_memory, print_status, run_command
from convert_hf_checkpoint import convert, default_gguf, ensure_checkpoint, hf_source
from engine import Engine, StepFunctions
from load import choose_device, compiled_steps, load_model
from report import weight_bytes

# ---------------------------------------------------------------- the contestants: functions that return their rates


def run_fastpath(args, engine: Engine) -> dict:
    V = engine.model.config.vocab_size
    decode = measure.time_prompt(engine, synthetic_prompt(SHORT_PROMPT, V), args.new_tokens + 1)
    prefill = measure.time_prompt(engine, synthetic_prompt(args.prompt_tokens, V), 1)
    return {DECODE: decode.decode_tokens / decode.decode_s, PREFILL: prefill.prefill_tokens / prefill.prefill_s}


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


def transformers_contestant(args, device: torch.device, V: int) -> Callable[[], dict]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source, options = transformers_source(args)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=BF16, **options).to(device).eval()
    # Greedy, and no token ends it.
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate_s(prompt: int, n: int) -> float:
        ids = torch.tensor([synthetic_prompt(prompt, V)], device=device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": n, "min_new_tokens": n}
        with torch.no_grad():
            return measure.seconds(lambda: model.generate(ids, **options), device=device)

    def run():
        decode_s = generate_s(SHORT_PROMPT, args.new_tokens + 1) - generate_s(SHORT_PROMPT, 1)
        return {DECODE: args.new_tokens / decode_s, PREFILL: args.prompt_tokens / generate_s(args.prompt_tokens, 1)}

    return run


def run_llama_bench(args, gguf: Path, versions: dict) -> dict:
    command = [args.llama_bench, "-m", str(gguf), "-p", str(args.prompt_tokens), "-n", str(args.new_tokens)]
    command += ["-t", str(torch.get_num_threads()), "-r", "1", "-fa", "0,1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        tests = json.loads(done.stdout)
        versions["llama_bench"] = f"{tests[0]['build_commit']} (build {tests[0]['build_number']})"
        fields = {DECODE: "n_gen", PREFILL: "n_prompt"}
        return {rate: max(test["avg_ts"] for test in tests if test[field]) for rate, field in fields.items()}
    except (ValueError, KeyError, IndexError, TypeError):
        reason = (done.stderr.strip() or "its output is not the JSON expected").splitlines()[-1]
        raise UserError(f"llama-bench failed ({done.returncode}): {reason}") from None


# ---------------------------------------------------------------- the comparison


def compile_seconds(args, directory: Path, device: torch.device) -> dict:
    """Seconds that generate.py takes to compile: cold, with an empty cache, and warm, with what that left there."""
    took = {}
    for flag, sizes in (("compile", (SHORT_PROMPT, args.new_tokens)), ("compile_prefill", (args.prompt_tokens, 1))):
        options = f"--checkpoint_path '{directory}' --device {device} --{flag}"
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                print_status(f"generate.py --{flag}, {state}")
                result = measure.run_generate(ROOT, options, *sizes, samples=1, TORCHINDUCTOR_CACHE_DIR=cache)
                took[f"{flag}_{state}_s"] = result["compile_s"]
    return took


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


def load_contestants(args, directory: Path, device: torch.device, versions: dict) -> tuple[dict, dict]:
    """What runs, by name; and what the JSON says of ours besides the rates. llama-bench adds its version."""
    config, needed = read_config(directory), max(args.prompt_tokens, SHORT_PROMPT + args.new_tokens)
    if needed > config.max_seq_length:
        raise UserError(f"{needed} tokens are more than the model's context of {config.max_seq_length}")
    steps = {"eager": StepFunctions()} | ({"compiled": compiled_steps(True, True)} if args.compile else {})
    contestants, facts = {}, {}
    for format in args.formats:
        model = load_model(measure.quantized(directory, format), device, BF16)
        for mode, functions in steps.items():
            name = f"fastpath {mode} {format}"
            contestants[name] = partial(run_fastpath, args, Engine(model, 1, needed, functions))
            facts[name] = {"weight_bytes": weight_bytes(model, 1)}
    if args.compile:
        facts[f"fastpath compiled {args.formats[0]}"] |= compile_seconds(args, directory, device)
    try:
        contestants["transformers bf16"] = transformers_contestant(args, device, config.vocab_size)
    except (UserError, ImportError, OSError, ValueError) as error:
        print_status(f"without transformers: {first_line(error)}")
    if args.llama_bench:
        for path in args.gguf or [Path(args.checkpoint_path or default_gguf())]:
            contestants[f"llama.cpp {path.name}"] = partial(run_llama_bench, args, path, versions)
    return contestants, facts


def compare(args, device: torch.device) -> dict:
    result = measure.about_run(device)
    with tempfile.TemporaryDirectory() as folder:
        if args.random:
            args.checkpoint_path, directory = make_random(args.random, Path(folder))
        else:
            directory = ensure_checkpoint(args.checkpoint_path)
        contestants, facts = load_contestants(args, directory, device, result["versions"])
        contestants["memory"] = partial(measure.read_rates, device)
        rounds, left_out = measure.take_turns(contestants, args.rounds)
    reading = measure.medians(rounds.pop("memory"))
    result["read_bytes_per_s"] = {name: reading[name] for name in ("dram", "cache")}
    rows = [{"name": name} | measure.medians(mine) | facts.get(name, {}) for name, mine in rounds.items()]
    ratios = []
    for our in (name for name in rounds if name.startswith("fastpath")):
        for peer in (name for name in rounds if not name.startswith("fastpath")):
            pair = {"ours": our, "peer": peer}
            for kind, rate in zip(("decode", "prefill"), RATES):
                pair |= ratio(kind, column(rounds[our], rate), column(rounds[peer], rate))
            ratios.append(pair)
    about = {"model": (args.random or directory).name}
    about |= {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    return result | about | {"rows": rows, "ratios": ratios, "left_out": left_out}


def main():
    parser = measure.make_parser(__doc__, rounds=5, prompt_tokens=512, new_tokens=64)
    add = parser.add_argument
    add("--random", type=Path, metavar="CONFIG", help="random weights for this Hugging Face config.json instead")
    add("--llama_bench", metavar="PROGRAM", help="llama.cpp's llama-bench")
    add("--gguf", nargs="+", type=Path, default=[], help="files for llama-bench; without it that of the checkpoint")
    add("--formats", nargs="+", choices=FORMATS, default=["bf16"], help="of our weights")
    add("--compile", action="store_true", help="ours compiled, too")
    args = parser.parse_args()
    if args.random and args.checkpoint_path:
        raise UserError("--random is a model of its own: no --checkpoint_path beside it")
    if args.gguf and not args.llama_bench:
        raise UserError("--gguf names files for --llama_bench, which is not given")
    device = choose_device(None)
    if device.type == "cpu":
        keep_freed_memory()  # as the program does; transformers, in this process, has it too
    result = compare(args, device)
    compiling = (f"{flag}_{state}_s" for flag in ("compile", "compile_prefill") for state in ("cold", "warm"))
    columns = {"name": "", DECODE: ".1f", PREFILL: ".0f"}
    measure.print_table(result["rows"], columns | (dict.fromkeys(compiling, ".1f") if args.compile else {}))
    ratios = dict.fromkeys(("decode", "decode_spread", "prefill", "prefill_spread"), ".2f")
    measure.print_table(result["ratios"], {"ours": "", "peer": ""} | ratios)
    print("plain reads, GB/s:", {name: round(rate / 1e9) for name, rate in result["read_bytes_per_s"].items()})
    measure.save(result, args.out, "decode", device)


if __name__ == "__main__":
    run_command(main)
