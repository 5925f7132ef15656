"""Measures how good a checkpoint is: perplexity on a text, KL divergence from a reference model, benchmark tasks.

Read down: a Window is a piece of a text, of which some tokens are scored; `scores` runs the models over a batch of
windows; `interval` is the confidence interval of a mean; `evaluate` puts them together; then the command. Tasks are run
by EleutherAI's harness (harness.py).

Windows do not depend on each other. --path says how they are run. The two ways may use different operations, which
round differently:
  prefill  each window in one pass
  decode   one token per pass, with several windows as a batch

Sources: perplexity with a stride (huggingface.co/docs/transformers/perplexity); confidence intervals for
tokens that are not independent within a window: cluster-robust standard errors (Liang and Zeger, Biometrika 73, 1986).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import DTYPES, check_memory, read_config, read_quantization
from cli import ArgumentParser, UserError, number, progress_bar, run_command
from convert_hf_checkpoint import ensure_checkpoint
from load import choose_device, load_model
from model import Transformer
from tokenizer import ChatTemplate, Tokenizer

POSITIONS = 128  # positions whose log-probabilities (POSITIONS,V) are in memory at the same time
DECODED_WINDOWS = 8  # the batch size of --path decode

# ---------------------------------------------------------------- windows of a text


@dataclass(frozen=True)
class Window:
    """Token ids, of which those from index `first` on are scored, given the tokens before them in the window."""

    ids: list[int]
    first: int


def windows(ids: list[int], length: int, stride: int) -> list[Window]:
    """Cut ids into windows that start `stride` (less than length) tokens apart.

    Each token except the first of the text is scored once. At least length - stride tokens are before it in its window,
    or all tokens before it in the text.
    """
    out, scored = [], 1
    for start in range(0, len(ids), stride):
        end = min(start + length, len(ids))
        if end > scored:
            out.append(Window(ids[start:end], scored - start))
            scored = end
    return out


@torch.no_grad()
def hidden_states(model: Transformer, batch: list[Window], path: str) -> list[Tensor]:
    """The last hidden state (S,D) of every position of each window."""
    device = model.norm.weight.device
    longest = max(len(window.ids) for window in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    position = torch.full((len(batch), longest), -1)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.tensor(window.ids)
        position[row, : len(window.ids)] = torch.arange(len(window.ids))
    ids, position = ids.to(device), position.to(device)
    if path == "prefill":
        states = model.hidden(ids, position)  # (B,S,D)
    else:
        states = torch.cat([model.hidden(ids[:, t : t + 1], position[:, t : t + 1]) for t in range(longest)], 1)
    return [states[row, : len(window.ids)] for row, window in enumerate(batch)]


@torch.no_grad()
def scores(models: list[Transformer], batch: list[Window], path: str) -> Iterator[dict[str, Tensor]]:
    """Yield for each window the scores of its n scored tokens: tensors (n,) of float64 on CPU, by name.

    "loss" is the first model's -log p(token), in nats. With a second model, the reference, there are also "kl", which
    is KL(reference || model) in nats, and "top1", whether both models have the same likeliest token.
    """
    states = [hidden_states(model, batch, path) for model in models]
    for i, window in enumerate(batch):
        targets = torch.tensor(window.ids[window.first :], device=states[0][i].device)
        parts = []
        for at in range(0, len(targets), POSITIONS):
            place = slice(window.first - 1 + at, min(window.first - 1 + at + POSITIONS, len(window.ids) - 1))
            logprobs = [model.head(state[i][place]).float().log_softmax(-1) for model, state in zip(models, states)]
            part = {"loss": -logprobs[0].gather(1, targets[at : at + POSITIONS, None])[:, 0]}
            if len(models) == 2:
                p = logprobs[1].exp()
                part["kl"] = torch.where(p == 0, 0, p * (logprobs[1] - logprobs[0])).sum(1)  # 0 log 0 is 0
                part["top1"] = logprobs[0].argmax(1) == logprobs[1].argmax(1)
            parts.append({name: values.double().cpu() for name, values in part.items()})
        yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def interval(clusters: list[Tensor]) -> tuple[float, float]:
    """(mean of all numbers, half the width of its 95 % confidence interval). Numbers in one tensor may be dependent."""
    count = sum(map(len, clusters))
    mean = sum(float(values.sum()) for values in clusters) / count
    residuals = sum(float((values - mean).sum()) ** 2 for values in clusters)
    n = len(clusters)
    return mean, 1.96 * math.sqrt(residuals * n / (n - 1)) / count if n > 1 else math.nan


def evaluate(models: list[Transformer], tokenizer: Tokenizer, ids: list[int], length: int, stride: int, path: str):
    """Score a text's token ids with models[0], against the reference models[1] if given. Returns fields of --json."""
    all_windows, results = windows(ids, length, stride), []
    rows = DECODED_WINDOWS if path == "decode" else 1
    for model in models:
        model.setup_caches(rows, length)
    with progress_bar(len(ids), "evaluating", " tokens", delay=2) as bar:
        for start in range(0, len(all_windows), rows):
            for window_scores in scores(models, all_windows[start : start + rows], path):
                results.append(window_scores)
                bar.update(len(window_scores["loss"]))
    total = float(sum(result["loss"].sum() for result in results))
    count = sum(len(result["loss"]) for result in results)
    size = sum(len(tokenizer.vocabulary.token_bytes(i)) for i in ids[1:])
    perplexity = math.inf if total / count >= 700 else math.exp(total / count)  # NaN stays NaN
    fields = {"perplexity": perplexity, "bits_per_byte": total / math.log(2) / size if size else math.nan}
    fields["tokens"] = count
    if len(models) == 2:
        fields["kl_nats"], fields["kl_ci95"] = interval([result["kl"] for result in results])
        fields["top1_agreement"], fields["top1_ci95"] = interval([result["top1"] for result in results])
    return fields | {"path": path, "window": length, "stride": stride}


# ---------------------------------------------------------------- the command


def parse_arguments():
    at_least_2 = number(int, "at least 2", lambda n: n >= 2)
    count = number(int, "at least 1", lambda n: n >= 1)
    about = "Perplexity and KL divergence from a reference on a text; tasks of EleutherAI's lm-evaluation-harness."
    parser = ArgumentParser(description=about)
    add = parser.add_argument
    add("--checkpoint_path", help="as for generate.py (default: SmolLM2-135M-Instruct)")
    add("--reference_checkpoint_path", help="the model to compare with, by KL divergence and top token")
    add("--text", type=Path, help="a UTF-8 text file to score")
    add("--max_tokens", type=at_least_2, help="score only this many tokens at the start of the text")
    add("--window", type=at_least_2, default=1024, help="tokens per window (1024, at most the model's context)")
    add("--stride", type=count, help="tokens from the start of one window to the next (half a window)")
    add("--path", choices=("prefill", "decode"), default="prefill", help="run a window in one pass, or token by token")
    tasks = "tasks of the harness (hellaswag winogrande ...), or .yaml files that define tasks"
    add("--tasks", nargs="+", default=[], metavar="TASK", help=tasks)
    add("--num_fewshot", type=number(int, "at least 0", lambda n: n >= 0), help="examples before each question")
    add("--limit", type=count, help="use only this many documents of each task (all)")
    add("--batch_size", type=count, default=8, help="batch size for the tasks (8)")
    add("--chat", action="store_true", help="apply the model's chat template to the tasks")
    add("--device", help="cpu, cuda ... (default: the fastest available)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="dtype of activations and unquantized weights")
    add("--kernels", choices=("auto", "torch"), default="auto", help="torch: use PyTorch's own operations only")
    exact = "do not round the inputs of quantized layers to 8 bits (CPU)"
    add("--exact_activations", action="store_true", help=exact)
    add("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    if not args.text and not args.tasks:
        parser.error("nothing to evaluate: give --text or --tasks")
    if args.reference_checkpoint_path and not args.text:
        parser.error("--reference_checkpoint_path needs a --text to compare the models on")
    if not args.tasks and (args.chat or args.limit or args.num_fewshot is not None):
        parser.error("--chat, --limit and --num_fewshot need --tasks")
    return args


def read_text(path: Path, tokenizer: Tokenizer, max_tokens: int | None) -> list[int]:
    """The token ids of a text file, at most max_tokens."""
    try:
        ids = tokenizer.encode(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path} cannot be read: {error}") from None
    if len(ids) < 2:
        raise UserError(f"--text {path} has {len(ids)} tokens, but at least 2 are needed")
    return ids[:max_tokens]


def evaluate_text(args, directory: Path) -> dict:
    """The result of `evaluate` for the text of the command line."""
    directories, dtype = [directory], DTYPES[args.dtype]
    if args.reference_checkpoint_path:
        directories.append(ensure_checkpoint(args.reference_checkpoint_path, args.dtype))
    configs = [read_config(directory) for directory in directories]
    tokenizer = Tokenizer(directory)
    ids = read_text(args.text, tokenizer, args.max_tokens)
    length = min(args.window, len(ids), *(config.max_seq_length for config in configs))
    stride = args.stride or max(1, length // 2)
    if stride >= length:
        raise UserError(f"--stride {stride} must be less than the window of {length}, or tokens would have no context")
    if len({config.vocab_size for config in configs}) > 1:
        sizes = " and ".join(str(config.vocab_size) for config in configs)
        raise UserError(f"the two checkpoints have vocabularies of {sizes}: their probabilities cannot be compared")
    if max(ids) >= configs[0].vocab_size:
        raise UserError(f"the text has token id {max(ids)}, but the vocabulary has {configs[0].vocab_size} ids")
    models = []
    for directory, config in zip(directories, configs):
        cache_tokens = (length + 8) * (DECODED_WINDOWS if args.path == "decode" else 1)
        check_memory(config, args.device, dtype, cache_tokens, read_quantization(directory))
        models.append(load_model(directory, args.device, dtype, args.kernels, args.exact_activations))
    return evaluate(models, tokenizer, ids, length, stride, args.path)


def evaluate_tasks(args, directory: Path) -> dict:
    """The harness's metrics for each task of the command line."""
    try:
        from harness import HarnessModel, run_tasks
    except ImportError as error:
        raise UserError(f"--tasks needs more packages: pip install -r requirements-eval.txt ({error})") from None
    tokenizer = Tokenizer(directory)
    template = ChatTemplate(directory, tokenizer) if args.chat else None
    model = load_model(directory, args.device, DTYPES[args.dtype], args.kernels, args.exact_activations)
    harness_model = HarnessModel(model, tokenizer, args.batch_size, template)
    return run_tasks(harness_model, args.tasks, args.num_fewshot, args.limit, args.chat)


def without_nan(value):
    """The value with None in the place of NaN and infinity, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main():
    args = parse_arguments()
    args.device = choose_device(args.device)
    directory = ensure_checkpoint(args.checkpoint_path, args.dtype)
    result = evaluate_text(args, directory) if args.text else {}
    if args.tasks:
        result["tasks"] = evaluate_tasks(args, directory)
    if args.json:
        print(json.dumps(without_nan(result), allow_nan=False))
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


if __name__ == "__main__":
    run_command(main)
