"""Speed of one row: fastpath, transformers with the same weights and llama.cpp with GGUF files, measured alternately.

  decode   tokens/s of --new_tokens steps after 5 tokens of prompt (llama-bench's tg has no prompt)
  prefill  tokens/s of --prompt_tokens in one row, up to the first new token

fastpath is generate.py in the formats of --formats, eager and with --compile compiled too. transformers runs in bf16,
unless --checkpoint_path is a checkpoint of ours, which it cannot load; its decode time is that of --new_tokens + 1
new tokens minus that of one. llama-bench runs with and without flash attention, and the better result counts, for each
rate by itself. All programs use the same number of threads (set by OMP_NUM_THREADS). No rate includes compilation. The
compiler's cache is empty at first, so compile_s is the time of a cold start in the first round, and of a warm start in
the others.

Each round also measures a plain read of memory. This bandwidth divided by the bytes of weights per token is the
roofline.
charts.py draws the result.

llama.cpp comes from the source distribution of llama-cpp-python. Name the fastest format of each width, with --gguf:
    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON \\
        -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF
    cmake --build build --target llama-bench llama-quantize
"""

import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import measure
import torch
from measure import BF16, DECODE, FORMATS, PREFILL, RATES, column, ratio

from checkpoint import is_ours
from cli import keep_freed_memory, run_command
from convert_hf_checkpoint import default_gguf, ensure_checkpoint
from load import choose_device


def transformers_contestant(args, device: torch.device) -> Callable[[], dict]:
    """A function that returns the rates of transformers, on a GGUF file, a Hugging Face directory or a hub id."""
    import transformers

    source, options = args.checkpoint_path or str(default_gguf()), {}
    if source.endswith(".gguf"):
        options["gguf_file"] = source = str(Path(source).resolve())
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=BF16, **options).to(device).eval()
    # Greedy; no token ends the text.
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate_s(prompt: int, n: int) -> float:
        ids = torch.arange(prompt, device=device)[None] % 100
        lengths = {"attention_mask": torch.ones_like(ids), "max_new_tokens": n, "min_new_tokens": n}
        with torch.no_grad():
            return measure.seconds(lambda: model.generate(ids, **lengths), device=device)

    def run() -> dict:
        decode_s = generate_s(5, args.new_tokens + 1) - generate_s(5, 1)
        return {DECODE: args.new_tokens / decode_s, PREFILL: args.prompt_tokens / generate_s(args.prompt_tokens, 1)}

    run()  # a warm-up
    return run


def run_llama_bench(args, gguf: Path) -> dict:
    sizes = ["-p", args.prompt_tokens, "-n", args.new_tokens, "-t", torch.get_num_threads()]
    tests = json.loads(measure.run_program(args.llama_bench, "-m", gguf, *sizes, "-r", 1, "-fa", "0,1", "-o", "json"))
    decode = max(test["avg_ts"] for test in tests if test["n_gen"])
    return {DECODE: decode, PREFILL: max(test["avg_ts"] for test in tests if test["n_prompt"])}


def make_contestants(args, device: torch.device) -> dict[str, Callable[[], dict]]:
    modes = {"eager": ""} | ({"compiled": "--compile --compile_prefill"} if args.compile else {})
    contestants = {}
    for format in args.formats:
        for mode, flags in modes.items():
            name = f"fastpath {mode} {format}"
            contestants[name] = partial(measure.decode_and_prefill, args, format, flags)
    if args.checkpoint_path is None or not is_ours(Path(args.checkpoint_path)):
        contestants["transformers bf16"] = transformers_contestant(args, device)
    for path in args.gguf:
        contestants[f"llama.cpp {path.name}"] = partial(run_llama_bench, args, path)
    numbers = torch.ones(2**25, dtype=torch.int64, device=device)
    contestants["memory"] = lambda: numbers.nbytes / measure.seconds(numbers.sum, 3, device)
    return contestants


def compare(rounds: dict[str, list[dict]]) -> list[dict]:
    """The ratios of both rates of each of our programs to each peer."""
    ratios = []
    for our in (name for name in rounds if name.startswith("fastpath")):
        for peer in (name for name in rounds if not name.startswith("fastpath")):
            pair = {"ours": our, "peer": peer}
            for kind, rate in zip(("decode", "prefill"), RATES):
                pair |= ratio(kind, column(rounds[our], rate), column(rounds[peer], rate))
            ratios.append(pair)
    return ratios


def main():
    parser = measure.make_parser(__doc__, {"--rounds": 5, "--prompt_tokens": 512, "--new_tokens": 64})
    add = parser.add_argument
    add("--llama_bench", metavar="PROGRAM", default="llama-bench", help="llama.cpp's llama-bench")
    add("--gguf", nargs="+", type=Path, default=[], help="files for llama-bench")
    add("--formats", nargs="+", choices=FORMATS, default=["bf16"], help="formats of our weights (bf16)")
    add("--compile", action="store_true", help="also measure fastpath compiled")
    args = parser.parse_args()
    device = choose_device(None)
    keep_freed_memory()  # for transformers, as generate.py does
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # for generate.py
        rounds = measure.take_turns(make_contestants(args, device), args.rounds, warm_up=0)
    bandwidth = median(rounds.pop("memory"))
    rows, ratios = [{"name": name} | measure.medians(mine) for name, mine in rounds.items()], compare(rounds)
    measure.print_table(rows, {"name": "", DECODE: ".1f", PREFILL: ".0f", "compile_s": ".1f"})
    spreads = dict.fromkeys(("decode", "decode_spread", "prefill", "prefill_spread"), ".2f")
    measure.print_table(ratios, {"ours": "", "peer": ""} | spreads)
    about = {"model": ensure_checkpoint(args.checkpoint_path).name, "prompt_tokens": args.prompt_tokens}
    about |= {"new_tokens": args.new_tokens, "rows": rows, "ratios": ratios}
    about |= {"read_bytes_per_s": {"dram": bandwidth}}
    measure.save("decode", about, args.out, device)


if __name__ == "__main__":
    run_command(main)
