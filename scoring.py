"""How likely a model finds given tokens: the numbers behind evaluate.py and harness.py.

Read down: a Window says what is scored; `hidden_states` runs the model over a batch of them, `scores` makes log
probabilities of it, `interval` the error of their mean.

Source of the error of a mean over windows whose positions depend on each other: cluster-robust standard errors (Liang
and Zeger, Biometrika 73, 1986).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model import Transformer

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
    longest = max(len(window.ids) for window in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    position = torch.full((len(batch), longest), -1)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.tensor(window.ids)
        position[row, : len(window.ids)] = torch.arange(len(window.ids))
    ids, position = ids.to(device), position.to(device)
    if path == "prefill":
        whole = model.hidden(ids, position)  # (B,S,D)
    else:
        whole = torch.cat([model.hidden(ids[:, t : t + 1], position[:, t : t + 1]) for t in range(longest)], 1)
    return [whole[row, : len(window.ids)] for row, window in enumerate(batch)]


@torch.no_grad()
def scores(models: list[Transformer], batch: list[Window], path: str) -> Iterator[dict[str, Tensor]]:
    """For each window, of every scored position, by the first model: its loss in nats, and whether it is the likeliest
    token (greedy); with a second one, the reference, also kl, KL(reference || model) in nats, and whether both have
    the same likeliest token (top1). Each (n,) float64 on CPU."""
    states = [hidden_states(model, batch, path) for model in models]
    for i, window in enumerate(batch):
        targets = torch.tensor(window.ids[window.first :], device=states[0][i].device)
        parts = []
        for at in range(0, max(1, len(targets)), ROWS):
            place = slice(window.first - 1 + at, min(window.first - 1 + at + ROWS, len(window.ids) - 1))
            logs = [model.head(state[i][place]).float().log_softmax(-1) for model, state in zip(models, states)]
            target, top = targets[at : at + ROWS], logs[0].argmax(1)
            found = {"loss": -logs[0].gather(1, target[:, None])[:, 0], "greedy": top == target}
            if len(models) == 2:
                p = logs[1].exp()
                found["kl"] = torch.where(p == 0, 0, p * (logs[1] - logs[0])).sum(1)  # 0 log 0 is 0
                found["top1"] = top == logs[1].argmax(1)
            parts.append({name: numbers.double().cpu() for name, numbers in found.items()})
        yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def interval(clusters: list[Tensor]) -> tuple[float, float]:
    """(mean, half the width of its 95 % confidence interval) of all numbers, those of a tensor not independent."""
    count = sum(map(len, clusters))
    mean = sum(float(numbers.sum()) for numbers in clusters) / count
    residuals = sum(float((numbers - mean).sum()) ** 2 for numbers in clusters)
    n = len(clusters)
    return mean, 1.96 * math.sqrt(residuals * n / (n - 1)) / count if n > 1 else math.nan
