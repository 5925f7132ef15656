"""The text that drafts learn from, with the hidden states of the model that wrote it: a file of self_text.py, opened.

A hidden state times the output matrix gives the target's distribution of the next token. So the states are what the
trainers of this directory imitate, and for Medusa heads also the input.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from self_text import read_samples, states_path
from torch import Tensor

from cli import UserError
from model import Transformer


@dataclass
class TeacherText:
    """Sequences of tokens one after the other, and the hidden states that their new tokens were sampled from."""

    tokens: Tensor  # (N,) int64
    sequences: list[tuple[int, int, int]]  # (start, first_new, end): the prompt, and from first_new on the new tokens
    hidden: Tensor  # (n,D) bfloat16, for the n new tokens of all sequences
    row: Tensor  # (N,) int64: the row of `hidden` that predicts the token after this one; -1 if there is none

    def states(self, places: Tensor) -> Tensor:
        """The hidden states (n,D) that predict the tokens after places (n,), each the place before a new token."""
        return self.hidden[self.row[places]]


def read_teacher_text(text: Path, model: Transformer, limit: int | None = None) -> TeacherText:
    """The first samples of a file of self_text.py that this model has written, up to about `limit` new tokens.

    The states are mapped from their file, not read.
    """
    tokens, sequences, row, n = [], [], [], 0
    for sample in read_samples(text):
        prompt, new = sample["prompt"], sample["new"]
        if len(sequences) > 1 and limit is not None and n + len(new) > limit:
            break
        first_new = len(tokens) + len(prompt)
        sequences.append((len(tokens), first_new, first_new + len(new)))
        tokens += prompt + new
        row += [-1] * (len(prompt) - 1) + list(range(n, n + len(new))) + [-1]
        n += len(new)
    if len(sequences) < 2:
        raise UserError(f"{text} holds {len(sequences)} samples; make more with training/self_text.py")
    path, D = states_path(text, model), model.config.dim
    if not path.exists() or path.stat().st_size < 2 * D * n:
        raise UserError(f"{path} is missing or too short: {text} is another model's, or should be made again")
    if max(tokens) >= model.config.vocab_size or min(tokens) < 0:
        raise UserError(f"{text} has token ids that the model does not have")
    hidden = torch.from_file(str(path), size=n * D, dtype=torch.bfloat16).view(n, D)
    return TeacherText(torch.tensor(tokens), sequences, hidden, torch.tensor(row))
