"""Trains Medusa heads (drafts/heads.py) for a model, on its own text.

    python training/self_text.py --out self_text.jsonl
    python training/medusa.py --text self_text.jsonl --out heads.safetensors
    python generate.py --draft medusa:heads.safetensors --prompt "Hello"

At each position of the text, head i gets the hidden state of the head before it and the i-th next
token. It learns to predict the target's distribution of the token after that over the draft
vocabulary (distillation), and the target's hidden state, as in EAGLE (arXiv:2401.15077). Only the
matrices of the heads are trained. A run that was stopped can be resumed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from common import Trainer, kl_divergence, make_parser
from teacher import TeacherText, frequent_tokens, new_token_positions, read_teacher_text
from torch import Tensor, nn

from cli import UserError, positive, print_status, run_command
from drafts.draft_model import output_head_rows
from drafts.heads import HeadsFile, block_input, pack_heads, save_heads
from load import load_model, open_checkpoint
from text.chat_template import answer_end_ids

BATCH_TOKENS = 1024
PEAK = 3e-3  # learning rate
# The number of tokens that the file lists for draft models. The heads propose from the first ones.
DRAFT_VOCABULARY_SIZE = 16384
REPORT_POSITIONS = 8192  # held-out positions on which the accuracy is measured


class TrainedHeads(nn.Module):
    """The matrices of the heads, with gradients, and what they are trained against.

    embedding: the target's, a function of tokens (n,). matrix (W,D): the rows of the target's
    output head for the draft vocabulary. softcap: of its logits.
    """

    def __init__(self, n: int, teacher: TeacherText, embedding, matrix: Tensor, seed: int = 0, softcap=None):
        super().__init__()
        D = matrix.shape[1]
        width = -(-4 * D // 96) * 32  # 4/3 D, rounded up to whole groups of 32
        generator = torch.Generator().manual_seed(seed)
        gate_up = torch.randn(2 * width, 2 * D, generator=generator) * (2 * D) ** -0.5
        self.gate_up = nn.Parameter(gate_up)
        self.down = nn.Parameter(torch.zeros(D, width))
        self.n = n
        self.teacher = teacher
        self.embedding = embedding
        self.softcap = softcap
        self.matrix = matrix.to(torch.bfloat16)

    def hidden_states(self, positions: Tensor):
        """Yield for each head its hidden states (n,D) for positions (n,) of the text, and the
        positions whose next tokens these predict."""
        hidden = self.teacher.hidden_states(positions).float()
        for i in range(1, self.n + 1):
            embedded = self.embedding(self.teacher.tokens[positions + i])  # (n,D)
            x = block_input(hidden, embedded).to(torch.bfloat16)
            gate, up = (x @ self.gate_up.to(torch.bfloat16).t()).chunk(2, -1)
            hidden = hidden + ((F.silu(gate) * up) @ self.down.to(torch.bfloat16).t()).float()
            yield hidden, positions + i

    def loss(self, positions: Tensor) -> Tensor:
        losses = []
        for hidden, at in self.hidden_states(positions):
            expected = self.teacher.hidden_states(at)
            divergence = kl_divergence(hidden, self.matrix, expected, self.matrix, softcap=self.softcap)
            losses.append(divergence + F.smooth_l1_loss(hidden, expected.float()))
        return torch.stack(losses).mean()

    @torch.no_grad()
    def accuracy(self, positions: Tensor) -> tuple[list[float], list[float]]:
        """For each head, the KL divergence, and how often its likeliest token is the target's; both
        within the draft vocabulary."""
        head = self.matrix.t()
        losses = []
        hits = []
        for hidden, at in self.hidden_states(positions):
            expected = self.teacher.hidden_states(at)
            losses.append(float(kl_divergence(hidden, self.matrix, expected, self.matrix, softcap=self.softcap)))
            pairs = zip(hidden.to(torch.bfloat16).split(1024), expected.split(1024))
            same = [(x @ head).argmax(1) == (y @ head).argmax(1) for x, y in pairs]
            hits.append(float(torch.cat(same).float().mean()))
        return losses, hits


def positions_of(batch: list, heads: int) -> Tensor:
    """The positions of a batch of sequences at which all heads have a token to predict."""
    shortened = [(start, first_new, end - heads) for start, first_new, end in batch]
    long_enough = [span for span in shortened if span[1] < span[2]]
    return torch.tensor(new_token_positions(long_enough), dtype=torch.int64)


def train(heads: TrainedHeads, epochs: int, seed: int, state_path: Path):
    """Train heads. state_path: the file from which an interrupted run resumes."""
    n = heads.n
    batches, held_out = heads.teacher.batches(BATCH_TOKENS, epochs, seed)
    all_positions = [positions_of(batch, n) for batch in batches]
    all_positions = [positions for positions in all_positions if len(positions)]
    test_positions = positions_of(held_out, n)[:REPORT_POSITIONS]
    if not all_positions or not len(test_positions):
        raise UserError("the text is too short: no answer is longer than the number of heads")

    def loss(step: int) -> Tensor:
        return heads.loss(all_positions[step])

    def report() -> str:
        losses, hits = heads.accuracy(test_positions)
        numbered = enumerate(zip(losses, hits), 1)
        parts = [f"{i}: {loss:.3f}, {hit:.1%}" for i, (loss, hit) in numbered]
        return "held-out loss and accuracy of head " + "; ".join(parts)

    settings = {
        "heads": n,
        "epochs": epochs,
        "seed": seed,
        "vocabulary": len(heads.matrix),
        "text": heads.teacher.checksum,
        "target": float(heads.matrix.float().sum()),
    }
    Trainer(heads, len(all_positions), PEAK, state_path, settings).run(loss, report)


def main():
    parser = make_parser(__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("medusa.safetensors"), help="the file of the heads")
    add("--heads", type=positive, default=3, help="tokens that the heads propose")
    add("--vocabulary", type=positive, default=4096, help="tokens that the heads propose from")
    add("--tokens", type=positive, help="tokens of the text to use; default: all")
    args = parser.parse_args()
    out = args.out
    if out.suffix != ".safetensors" or out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out {out} should be a file in an existing directory, and end in .safetensors")

    checkpoint = open_checkpoint(args.checkpoint_path)
    model = load_model(checkpoint)
    teacher = read_teacher_text(args.text, model, args.tokens)
    answers = teacher.answers
    ends = answer_end_ids(checkpoint.tokenizer_files, checkpoint.tokenizer)
    vocabulary = frequent_tokens(answers, DRAFT_VOCABULARY_SIZE, ends)
    for n in sorted({min(args.vocabulary, len(vocabulary)), len(vocabulary)}):
        covered = torch.isin(answers, vocabulary[:n]).float().mean()
        print_status(f"the {n} most frequent tokens are {covered:.2%} of the text")

    matrix = output_head_rows(model, vocabulary[: args.vocabulary])
    heads = TrainedHeads(args.heads, teacher, model.embedding, matrix, args.seed, model.config.logits_softcap)
    state_path = out.with_suffix(".state")
    train(heads, args.epochs, args.seed, state_path)

    packed = pack_heads({"gate_up": heads.gate_up.detach(), "down": heads.down.detach()})
    file = HeadsFile(packed, vocabulary, heads.n, len(heads.matrix))
    save_heads(out, file, model, checkpoint.name)
    state_path.unlink(missing_ok=True)
    print_status(f"{out} holds {args.heads} heads, {out.stat().st_size / 1e6:.2f} MB")
    print_status(f"to use it: python generate.py --checkpoint_path {checkpoint.path} --draft medusa:{out}")


if __name__ == "__main__":
    run_command(main)
