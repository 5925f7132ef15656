"""Speed of fastpath beside transformers with the same weights, llama.cpp with GGUF files, or another checkout (--old).

  decode   tokens/s of --new_tokens steps after 5 tokens of prompt (llama-bench's tg has no prompt)
  prefill  tokens/s of a prompt of --prompt_tokens, up to the first new token

fastpath is generate.py in the formats of --formats (file: a GGUF file as it is), eager and with --compile compiled too.
A run takes 4 samples, the first of which does not count for prefill. transformers runs in bf16, unless there is only
the format file, or --checkpoint_path is a checkpoint of ours, which it cannot load. llama-bench, of llama.cpp and of
ik_llama.cpp, runs one row, with and without flash attention, and the better rate counts. With --old, the generate.py of
another checkout runs instead of transformers, with the same checkpoints and options.

All programs take turns and use the same number of threads (set by OMP_NUM_THREADS). No rate includes compilation. The
compiler's cache is empty at first, so compile_s is the time of a cold start in the first round, and of a warm start in
the others. Each round also measures a plain read of memory. This bandwidth divided by the bytes of weights per token is
the roofline. charts.py draws the result.
"""

import itertools
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import measure
import torch
from measure import BF16, DECODE, FORMATS, PREFILL, ROOT

from checkpoint import is_ours
from cli import run_command
from cpu.memory import keep_freed_memory
from load import choose_device, find_source
from sources.hub import default_gguf


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
        ids = (torch.arange(prompt, device=device) % 100).expand(args.rows, -1)
        lengths = {"attention_mask": torch.ones_like(ids), "max_new_tokens": n, "min_new_tokens": n}
        with torch.no_grad():
            return measure.seconds(lambda: model.generate(ids, **lengths), device=device)

    def run() -> dict:
        decode_s = (generate_s(5, args.new_tokens + 1) - generate_s(5, 1)) / args.rows
        prefill_s = generate_s(args.prompt_tokens, 1) / args.rows
        return {DECODE: args.new_tokens / decode_s, PREFILL: args.prompt_tokens / prefill_s}

    run()  # a warm-up
    return run


def run_llama_bench(args, program: str, gguf: Path) -> dict:
    sizes = ["-p", args.prompt_tokens, "-n", args.new_tokens, "-t", torch.get_num_threads()]
    tests = json.loads(measure.run_program(program, "-m", gguf, *sizes, "-r", 1, "-fa", "0,1", "-o", "json"))
    decode = max(test["avg_ts"] for test in tests if test["n_gen"])
    return {DECODE: decode, PREFILL: max(test["avg_ts"] for test in tests if test["n_prompt"])}


def make_contestants(args, device: torch.device) -> dict[str, Callable[[], dict]]:
    modes = {"eager": ""} | ({"compiled": "--compile --compile_prefill"} if args.compile else {})
    trees = {"fastpath": ROOT} | ({"old": args.old} if args.old else {})
    contestants = {}
    for format, mode, who in itertools.product(args.formats, modes, trees):
        run = partial(measure.decode_and_prefill, args, format, modes[mode], trees[who], args.rows)
        contestants[f"{who} {mode} {format}"] = run
    path = Path(args.checkpoint_path or "")
    if not (args.old or args.formats == ["file"] or (path / "config.json").exists() and is_ours(path)):
        contestants["transformers bf16"] = transformers_contestant(args, device)
    for path in args.gguf:
        contestants[f"llama.cpp {path.name}"] = partial(run_llama_bench, args, args.llama_bench, path)
        if args.ik_llama_bench:
            contestants[f"ik_llama.cpp {path.name}"] = partial(run_llama_bench, args, args.ik_llama_bench, path)
    numbers = torch.ones(2**25, dtype=torch.int64, device=device)
    contestants["memory"] = lambda: numbers.nbytes / measure.seconds(numbers.sum, 3, device)
    return contestants


def compare(rounds: dict[str, list[dict]]) -> list[dict]:
    """The ratios of both rates of each of our programs to each peer, and to the same program of the old checkout."""
    ours = [name for name in rounds if name.startswith("fastpath")]
    pairs = [(our, our.replace("fastpath", "old")) for our in ours]
    pairs += [(our, peer) for our in ours for peer in rounds if not peer.startswith(("fastpath", "old"))]
    return [
        {"ours": our, "peer": peer} | measure.rate_ratios("", rounds[our], rounds[peer])
        for our, peer in pairs
        if peer in rounds
    ]


def main():
    parser = measure.make_parser(__doc__, {"--rounds": 5, "--prompt_tokens": 512, "--new_tokens": 64, "--rows": 1})
    add = parser.add_argument
    add("--llama_bench", metavar="PROGRAM", default="llama-bench", help="llama.cpp's llama-bench")
    add("--ik_llama_bench", metavar="PROGRAM", help="ik_llama.cpp's llama-bench (on the same files)")
    add("--gguf", nargs="+", type=Path, default=[], help="files for llama-bench")
    add("--formats", nargs="+", choices=(*FORMATS, "file"), default=["bf16"], help="formats of our weights (bf16)")
    add("--compile", action="store_true", help="also measure fastpath compiled")
    add("--old", type=Path, metavar="DIRECTORY", help="another checkout, to compare with")
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
    about = {"model": find_source(args.checkpoint_path).name, "prompt_tokens": args.prompt_tokens}
    about |= {"new_tokens": args.new_tokens, "batch_size": args.rows, "rows": rows, "ratios": ratios}
    measure.save("decode", about | {"read_bytes_per_s": {"dram": bandwidth}}, args.out, device)


if __name__ == "__main__":
    run_command(main)
