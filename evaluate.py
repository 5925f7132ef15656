"""What a checkpoint is worth: perplexity on a text, and how far it is from a reference, position by position.

Read up from `main`: it prints what `evaluate` measures over the windows of a text. Each window is run by itself, in one
of two ways (--path), because a model's operations for many tokens at once and for one at a time round differently:
  prefill  a window in one pass
  decode   a token at a time, several windows side by side

Sources: perplexity with a stride (huggingface.co/docs/transformers/perplexity); the error of a mean over windows whose
positions depend on each other: cluster-robust standard errors (Liang and Zeger, Biometrika 73, 1986).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import (
    DTYPES,
    ArgumentParser,
    UserError,
    check_memory,
    load_model,
    read_config,
    read_quantization,
    run_command,
)
from model import Transformer
from terminal import progress_bar
from tokenizer import Tokenizer

SIDE_BY_SIDE = 8  # windows that are decoded together
ROWS = 128  # positions whose (ROWS,V) probabilities are held at once


@dataclass(frozen=True)
class Window:
    """Token ids, of which those from `first` on are scored, each by what stands before it in the window."""

    ids: list[int]
    first: int


def windows(ids: list[int], length: int, stride: int) -> list[Window]:
    """Cut ids into windows `stride` (below length) apart, so that each token but the first is scored once, with at
    least length - stride tokens before it where there are as many."""
    found, scored = [], 1
    for start in range(0, len(ids), stride):
        end = min(start + length, len(ids))
        if end > scored:
            found.append(Window(ids[start:end], scored - start))
            scored = end
    return found


@torch.no_grad()
def hidden_states(model: Transformer, batch: list[Window], path: str) -> list[Tensor]:
    """The last hidden state (S,D) of every position of each window."""
    device = model.norm.weight.device
    if path == "prefill":
        rows = [torch.tensor([window.ids], device=device) for window in batch]
        return [model.hidden(ids, torch.arange(ids.shape[1], device=device)[None])[0] for ids in rows]
    longest = max(len(window.ids) for window in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    position = torch.full((len(batch), longest), -1)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.tensor(window.ids)
        position[row, : len(window.ids)] = torch.arange(len(window.ids))
    ids, position = ids.to(device), position.to(device)
    steps = [model.hidden(ids[:, t : t + 1], position[:, t : t + 1]) for t in range(longest)]
    whole = torch.cat(steps, 1)  # (B,S,D)
    return [whole[row, : len(window.ids)] for row, window in enumerate(batch)]


@torch.no_grad()
def scores(models: list[Transformer], batch: list[Window], path: str) -> Iterator[list[Tensor]]:
    """For each window: of every scored position its loss in nats by the first model; with a second one, the reference,
    also KL(reference || model) in nats, and whether both have the same likeliest token (each (n,) float64 on CPU)."""
    states = [hidden_states(model, batch, path) for model in models]
    for i, window in enumerate(batch):
        targets = torch.tensor(window.ids[window.first :], device=states[0][i].device)
        parts = []
        for at in range(0, len(targets), ROWS):
            place = slice(window.first - 1 + at, min(window.first - 1 + at + ROWS, len(window.ids) - 1))
            logs = [model.head(state[i][place]).float().log_softmax(-1) for model, state in zip(models, states)]
            found = [-logs[0].gather(1, targets[at : at + ROWS, None])[:, 0]]
            if len(models) == 2:
                found.append((logs[1].exp() * (logs[1] - logs[0])).nan_to_num(0.0).sum(1))
                found.append(logs[0].argmax(1) == logs[1].argmax(1))
            parts.append([numbers.double().cpu() for numbers in found])
        yield [torch.cat(numbers) for numbers in zip(*parts)]


def interval(clusters: list[Tensor]) -> tuple[float, float]:
    """(mean, half the width of its 95 % confidence interval) of all numbers, those of a tensor not independent."""
    count = sum(map(len, clusters))
    mean = sum(float(numbers.sum()) for numbers in clusters) / count
    residuals = sum(float((numbers - mean).sum()) ** 2 for numbers in clusters)
    n = len(clusters)
    return mean, 1.96 * math.sqrt(residuals * n / (n - 1)) / count if n > 1 else math.nan


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
                bar.update(len(numbers[0]))
    losses = [numbers[0] for numbers in found]
    total, count = float(sum(numbers.sum() for numbers in losses)), sum(map(len, losses))
    size = sum(len(tokenizer.vocabulary.token_bytes(i)) for i in ids[1:])
    result = {"perplexity": math.exp(total / count), "bits_per_byte": total / math.log(2) / size, "tokens": count}
    if len(models) == 2:
        result["kl_nats"], result["kl_ci95"] = interval([numbers[1] for numbers in found])
        result["top1_agreement"], result["top1_ci95"] = interval([numbers[2] for numbers in found])
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
    from generate import number

    above_1 = number(int, "at least 2", lambda n: n >= 2)
    count = number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description="Perplexity of a text, and the distance from a reference.")
    add = parser.add_argument
    add("--checkpoint_path", help="as generate.py takes it; without it SmolLM2-135M-Instruct")
    add("--reference_checkpoint_path", help="the model to compare with: KL divergence and agreement of the top token")
    add("--text", type=Path, required=True, help="a UTF-8 file")
    add("--max_tokens", type=above_1, help="read no more of it")
    add("--window", type=above_1, default=1024, help="tokens in a pass (1024, at most the model's context)")
    add("--stride", type=count, help="tokens from one window to the next (half a window)")
    add("--path", choices=("prefill", "decode"), default="prefill", help="a window at once, or token by token")
    add("--device", help="cpu, cuda ...; without it the fastest there is")
    add("--dtype", choices=DTYPES, default="bfloat16", help="in which to compute (bfloat16)")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


def main():
    args = parse_arguments()
    from convert_hf_checkpoint import ensure_checkpoint
    from generate import choose_device

    device, dtype = choose_device(args.device), DTYPES[args.dtype]
    paths = [args.checkpoint_path] + [args.reference_checkpoint_path] * bool(args.reference_checkpoint_path)
    directories = [ensure_checkpoint(path, args.dtype) for path in paths]
    configs = [read_config(directory) for directory in directories]
    tokenizer = Tokenizer(directories[0])
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
        check_memory(config, device, dtype, slots, read_quantization(directory))
        models.append(load_model(directory, device, dtype))
    result = evaluate(models, tokenizer, ids, length, stride, args.path)
    if args.json:
        print(json.dumps(result))
        return
    print(f"perplexity {result['perplexity']:.4f}, {result['bits_per_byte']:.4f} bits per byte", end="")
    print(f" ({result['tokens']} tokens in windows of {length}, {stride} apart, {args.path}, {args.dtype})")
    if "kl_nats" in result:
        print(f"KL to the reference {result['kl_nats']:.5f} +- {result['kl_ci95']:.5f} nats", end="; ")
        print(f"same top token at {result['top1_agreement']:.2%} +- {result['top1_ci95']:.2%}")


if __name__ == "__main__":
    run_command(main)
