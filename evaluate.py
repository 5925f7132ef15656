"""What a checkpoint is worth: perplexity on a text, and how far it is from a reference, position by position; tasks.

Read up from `main`: it prints what `evaluate` measures over the windows of a text (scoring.py does the arithmetic), and
what a checkpoint reaches in tasks of a public harness (harness.py). Each window is run by itself, in one of two ways
(--path), because a model's operations for many tokens at once and for one at a time round differently:
  prefill  a window in one pass
  decode   a token at a time, several windows side by side

Source: perplexity with a stride (huggingface.co/docs/transformers/perplexity).
"""

import json
import math
from pathlib import Path

from checkpoint import DTYPES, check_memory, read_config, read_quantization
from cli import ArgumentParser, UserError, progress_bar, run_command
from load import load_model
from model import Transformer
from scoring import interval, scores, windows
from tokenizer import Tokenizer

SIDE_BY_SIDE = 8  # windows that are decoded together


def evaluate(models: list[Transformer], tokenizer: Tokenizer, ids: list[int], length: int, stride: int, path: str):
    """The JSON fields of a text, by a model and perhaps a reference."""
    cut, found = windows(ids, length, stride), []
    group = SIDE_BY_SIDE if path == "decode" else 1
    for model in models:
        model.setup_caches(group, length)
    with progress_bar(len(ids), "evaluating", delay=2) as bar:
        for start in range(0, len(cut), group):
            for numbers in scores(models, cut[start : start + group], path):
                found.append(numbers)
                bar.update(len(numbers["loss"]))
    total = float(sum(numbers["loss"].sum() for numbers in found))
    count = sum(len(numbers["loss"]) for numbers in found)
    size = sum(len(tokenizer.vocabulary.token_bytes(i)) for i in ids[1:])
    perplexity = math.exp(total / count) if total / count < 700 else math.inf
    result = {"perplexity": perplexity, "bits_per_byte": total / math.log(2) / size if size else math.nan}
    result["tokens"] = count
    if len(models) == 2:
        result["kl_nats"], result["kl_ci95"] = interval([numbers["kl"] for numbers in found])
        result["top1_agreement"], result["top1_ci95"] = interval([numbers["top1"] for numbers in found])
    return result | {"path": path, "window": length, "stride": stride}


def read_text(path: Path, tokenizer: Tokenizer, most: int | None) -> list[int]:
    try:
        ids = tokenizer.encode(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path} cannot be read: {error}") from None
    if len(ids) < 2:
        raise UserError(f"--text {path} has {len(ids)} tokens; at least 2 are needed")
    return ids[:most]


def parse_arguments():
    from cli import number

    above_1 = number(int, "at least 2", lambda n: n >= 2)
    count = number(int, "at least 1", lambda n: n >= 1)
    about = "Perplexity of a text, and the distance from a reference; tasks of EleutherAI's lm-evaluation-harness."
    parser = ArgumentParser(description=about)
    add = parser.add_argument
    add("--checkpoint_path", help="as generate.py takes it; without it SmolLM2-135M-Instruct")
    add("--reference_checkpoint_path", help="the model to compare with: KL divergence and agreement of the top token")
    add("--text", type=Path, help="a UTF-8 file")
    add("--max_tokens", type=above_1, help="read no more of it")
    add("--window", type=above_1, default=1024, help="tokens in a pass (1024, at most the model's context)")
    add("--stride", type=count, help="tokens from one window to the next (half a window)")
    add("--path", choices=("prefill", "decode"), default="prefill", help="a window at once, or token by token")
    tasks = "of the harness (hellaswag winogrande ...), or .yaml files that define some"
    add("--tasks", nargs="+", default=[], metavar="TASK", help=tasks)
    add("--num_fewshot", type=number(int, "at least 0", lambda n: n >= 0), help="examples before each question")
    add("--limit", type=count, help="documents of each task (all)")
    add("--batch_size", type=count, default=8, help="rows of the tasks' batches (8)")
    add("--chat", action="store_true", help="set the tasks in the model's chat template")
    add("--device", help="cpu, cuda ...; without it the fastest there is")
    add("--dtype", choices=DTYPES, default="bfloat16", help="in which to compute (bfloat16)")
    add("--kernels", choices=("auto", "torch"), default="auto", help="torch: no kernels of our own, only torch's")
    exact = "quantized weights are multiplied with activations as they are, not with 8 bits of them (CPU)"
    add("--exact_activations", action="store_true", help=exact)
    add("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    if not args.text and not args.tasks:
        parser.error("give a --text or --tasks to evaluate on")
    if args.reference_checkpoint_path and not args.text:
        parser.error("a --reference_checkpoint_path is compared on a --text")
    if not args.tasks and (args.chat or args.limit or args.num_fewshot is not None):
        parser.error("--chat, --limit and --num_fewshot are about --tasks")
    return args


def main():
    args = parse_arguments()
    from convert_hf_checkpoint import ensure_checkpoint
    from generate import choose_device

    args.device = choose_device(args.device)
    directory = ensure_checkpoint(args.checkpoint_path, args.dtype)
    result = on_text(args, directory) if args.text else {}
    if args.tasks:
        result["tasks"] = on_tasks(args, directory)
    if args.json:
        print(json.dumps(finite(result), allow_nan=False))
        return
    if args.text:
        print(f"perplexity {result['perplexity']:.4f}, {result['bits_per_byte']:.4f} bits per byte", end="")
        print(f" ({result['tokens']} tokens in windows of {result['window']},", end="")
        print(f" {result['stride']} apart, {args.path}, {args.dtype})")
    if "kl_nats" in result:
        print(f"KL to the reference {result['kl_nats']:.5f} +- {result['kl_ci95']:.5f} nats", end="; ")
        print(f"same top token at {result['top1_agreement']:.2%} +- {result['top1_ci95']:.2%}")
    for task, metrics in result.get("tasks", {}).items():
        print(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def finite(value):
    """As JSON can have it: null for what is not a finite number."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def on_text(args, directory: Path) -> dict:
    """What `evaluate` finds for the command line's text."""
    from convert_hf_checkpoint import ensure_checkpoint

    directories, dtype = [directory], DTYPES[args.dtype]
    if args.reference_checkpoint_path:
        directories.append(ensure_checkpoint(args.reference_checkpoint_path, args.dtype))
    configs = [read_config(directory) for directory in directories]
    tokenizer = Tokenizer(directory)
    ids = read_text(args.text, tokenizer, args.max_tokens)
    length = min(args.window, len(ids), *(config.max_seq_length for config in configs))
    stride = args.stride or max(1, length // 2)
    if stride >= length:
        raise UserError(f"--stride {stride} is no less than the window of {length}: tokens would stand without context")
    if len({config.vocab_size for config in configs}) > 1:
        sizes = " and ".join(str(config.vocab_size) for config in configs)
        raise UserError(f"the two checkpoints have vocabularies of {sizes}: their probabilities cannot be compared")
    if max(ids) >= configs[0].vocab_size:
        raise UserError(f"the tokenizer made id {max(ids)} of the text, the vocabulary has {configs[0].vocab_size}")
    models = []
    for directory, config in zip(directories, configs):
        slots = (length + 8) * (SIDE_BY_SIDE if args.path == "decode" else 1)
        check_memory(config, args.device, dtype, slots, read_quantization(directory))
        models.append(load_model(directory, args.device, dtype, args.kernels, args.exact_activations))
    return evaluate(models, tokenizer, ids, length, stride, args.path)


def on_tasks(args, directory: Path) -> dict:
    """The harness's metrics, by task."""
    from chat_template import ChatTemplate

    try:
        from harness import HarnessModel, run_tasks
    except ImportError as error:
        raise UserError(f"--tasks needs more packages: pip install -r requirements-eval.txt ({error})") from None
    tokenizer = Tokenizer(directory)
    template = ChatTemplate(directory, tokenizer) if args.chat else None
    model = load_model(directory, args.device, DTYPES[args.dtype], args.kernels, args.exact_activations)
    return run_tasks(
        HarnessModel(model, tokenizer, args.batch_size, template), args.tasks, args.num_fewshot, args.limit, args.chat
    )


if __name__ == "__main__":
    run_command(main)
