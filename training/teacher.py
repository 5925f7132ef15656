"""Training text for drafts: tokens that the target generated (self_text.py), and its hidden states.

A hidden state times the output head gives the target's distribution of the next token. The drafts
that are trained here learn to predict these distributions. The hidden states are also the input of
Medusa heads.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from self_text import hidden_path, read_samples
from torch import Tensor

from cli import UserError
from model import Transformer

HELD_OUT = 50  # every fiftieth sequence is held out for evaluation

# (start, first_new, end) of a sequence in a text: its prompt, and from first_new on its answer
Span = tuple[int, int, int]


@dataclass
class TeacherText:
    """Sequences of tokens one after the other, and the hidden states that their new tokens were
    sampled from."""

    tokens: Tensor  # (N,) int64
    sequences: list[Span]  # as indices into `tokens`
    hidden: Tensor  # (n,D) bfloat16, for the n new tokens of all sequences
    # (N,) int64: for each token the row of `hidden` that predicts the next one; -1 if there is none
    row: Tensor

    def hidden_states(self, positions: Tensor) -> Tensor:
        """The hidden states (n,D) that predict the tokens after positions (n,) of the text."""
        return self.hidden[self.row[positions]]

    @property
    def answers(self) -> Tensor:
        """All new tokens (n,)."""
        return torch.cat([self.tokens[first_new:end] for _, first_new, end in self.sequences])

    @property
    def checksum(self) -> str:
        """Identifies the text in the state file of a training run."""
        return f"{len(self.tokens)} tokens with sum {self.tokens.sum()}"

    def batches(self, batch_tokens: int, epochs: int, seed: int) -> tuple:
        """All batches of a run, as make_batches returns them, and the held-out sequences."""
        sequences, held_out = split_held_out(self.sequences)
        return make_batches(sequences, batch_tokens, epochs, seed), held_out


def read_teacher_text(text: Path, model: Transformer, limit: int | None = None) -> TeacherText:
    """The first samples of a file of self_text.py that this model has written, up to about `limit`
    new tokens.

    The hidden states are memory-mapped, not read.
    """
    tokens = []
    row = []
    sequences = []
    n = 0  # new tokens
    for sample in read_samples(text):
        prompt = sample["prompt"]
        new = sample["new"]
        if len(sequences) > 1 and limit is not None and n + len(new) > limit:
            break
        first_new = len(tokens) + len(prompt)
        sequences.append((len(tokens), first_new, first_new + len(new)))
        tokens += prompt + new
        row += [-1] * (len(prompt) - 1) + list(range(n, n + len(new))) + [-1]
        n += len(new)
    if len(sequences) < 2:
        raise UserError(f"{text} holds {len(sequences)} samples; make more with training/self_text.py")

    path = hidden_path(text, model)
    D = model.config.dim
    if not path.exists() or path.stat().st_size < 2 * D * n:
        raise UserError(f"{path} is missing or too short: {text} was written by another model, or must be made again")
    hidden = torch.from_file(str(path), size=n * D, dtype=torch.bfloat16).view(n, D)
    return TeacherText(torch.tensor(tokens), sequences, hidden, torch.tensor(row))


# ---------------------------------------------------------------- vocabulary and batches


def frequent_tokens(tokens: Tensor, n: int, always: Iterable[int] = ()) -> Tensor:
    """The ids of `always` in ascending order, followed by the n most frequent tokens of a text.

    The most frequent token comes first; of equally frequent ones, the one with the lowest id. If
    the text has fewer than n different tokens, all of them are returned.
    """
    counts = torch.bincount(tokens)
    order = counts.argsort(descending=True, stable=True)[:n]
    frequent = order[counts[order] > 0].tolist()
    return torch.tensor(list(dict.fromkeys([*sorted(always), *frequent])))


def split_held_out(sequences: list[Span]) -> tuple[list[Span], list[Span]]:
    """(training sequences, held-out sequences). Every fiftieth sequence is held out. The last ones
    would be another kind of text, because long answers finish last."""
    return [s for i, s in enumerate(sequences) if i % HELD_OUT], sequences[::HELD_OUT]


def make_batches(sequences: list[Span], batch_tokens: int, epochs: int, seed: int) -> list[list[Span]]:
    """All batches of a run, of at most `batch_tokens` tokens each. An epoch has each sequence once,
    in random order."""
    batches = []
    for epoch in range(epochs):
        order = list(sequences)
        random.Random(f"{seed} {epoch}").shuffle(order)
        room = 0
        for sequence in order:
            length = sequence[2] - sequence[0]
            if length > room:
                batches.append([])
                room = batch_tokens
            batches[-1].append(sequence)
            room -= length
    return batches


def new_token_positions(batch: list[Span]) -> list[int]:
    """The positions whose next token the teacher generated, where a draft learns to predict it."""
    return [i for _, first_new, end in batch for i in range(first_new - 1, end - 1)]
