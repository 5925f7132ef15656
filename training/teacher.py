"""What the target model makes of its own text: the last hidden state of every token, computed once and kept in a file.

Both trainers learn from it, medusa.py and distill.py. The head turns a hidden state into the target's distribution of
the next token, so the file holds the targets of both and the inputs of the heads: 2 D bytes per token.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from self_text import read_samples
from torch import Tensor

from cli import UserError, progress_bar
from medusa import fingerprint
from model import Transformer

GROUP = 512  # sequences that are sorted by length, and written together
BATCH = 24  # sequences in one pass


@dataclass
class TeacherText:
    """Sequences of tokens one after the other, and the target's hidden states."""

    tokens: Tensor  # (N,) int64
    hidden: Tensor  # (N,D) bfloat16, after the final norm: model.head(hidden[i]) are the logits of the token after i
    sequences: list[tuple[int, int, int]]  # (start, first_new, end): the prompt, and from first_new on the new tokens


def read_teacher_text(text: Path, model: Transformer, limit: int | None = None) -> TeacherText:
    """The first sequences of a file of self_text.py, up to about `limit` tokens, with the model's hidden states.

    The states are read from a file beside `text` with the model's fingerprint in its name. What is missing there is
    computed and appended, also after an interruption. It takes about as long as reading the text as a prompt.
    """
    samples, total = [], 0
    for sample in read_samples(text):
        total += len(sample["prompt"]) + len(sample["new"])
        if samples and limit is not None and total > limit:
            break
        samples.append(sample)
    if len(samples) < 10:
        raise UserError(f"{text} holds {len(samples)} samples; make more with training/self_text.py")
    # A group at the end that is not full would be sorted in another way when the text has grown.
    samples = samples[: len(samples) // GROUP * GROUP or None]
    samples = [sample for group in groups(samples) for sample in group]
    path = text.with_name(f"{text.stem}-{fingerprint(model)[:12]}.hidden")
    write_hidden_states(model, samples, path)
    tokens = torch.tensor([token for sample in samples for token in sample["prompt"] + sample["new"]])
    hidden = torch.from_file(str(path), size=len(tokens) * model.config.dim, dtype=torch.bfloat16)
    sequences, start = [], 0
    for sample in samples:
        first_new = start + len(sample["prompt"])
        sequences.append((start, first_new, first_new + len(sample["new"])))
        start = sequences[-1][2]
    return TeacherText(tokens, hidden.view(len(tokens), -1), sequences)


def groups(samples: list[dict]) -> Iterator[list[dict]]:
    """Groups of samples, each sorted by length, so that little of a batch is padding."""
    for start in range(0, len(samples), GROUP):
        yield sorted(samples[start : start + GROUP], key=lambda s: len(s["prompt"]) + len(s["new"]))


@torch.no_grad()
def write_hidden_states(model: Transformer, samples: list[dict], path: Path):
    """Append the hidden states that the file does not hold yet. The samples are in the order of `groups`."""
    sequences = [sample["prompt"] + sample["new"] for sample in samples]
    row_bytes = 2 * model.config.dim
    done = path.stat().st_size // row_bytes if path.exists() else 0
    model.setup_caches(BATCH, max(map(len, sequences)))
    with path.open("ab") as file, progress_bar(sum(map(len, sequences)), "hidden states") as bar:
        written, first = 0, 0
        # Only whole batches count: a run that was stopped within one begins it again.
        while first < len(sequences):
            batch = sequences[first : first + BATCH]
            tokens = sum(map(len, batch))
            if written + tokens > done:
                file.truncate(written * row_bytes)
                for states in hidden_states(model, batch):
                    file.write(states.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
            first, written = first + BATCH, written + tokens
            bar.update(tokens)


def hidden_states(model: Transformer, sequences: list[list[int]]) -> list[Tensor]:
    """The hidden states (S,D) of each sequence."""
    width = max(map(len, sequences))
    tokens, input_pos = torch.zeros(len(sequences), width, dtype=torch.int64), torch.full((len(sequences), width), -1)
    for i, sequence in enumerate(sequences):
        tokens[i, : len(sequence)] = torch.tensor(sequence)
        input_pos[i, : len(sequence)] = torch.arange(len(sequence))
    x = model.hidden(tokens, input_pos)  # (B,S,D)
    return [states[: len(sequence)] for states, sequence in zip(x, sequences)]
