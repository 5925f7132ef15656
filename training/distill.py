"""Trains a small draft model for a target model, on the target's own text and probabilities.

Read up from `main`. The draft is a Llama with a few narrow layers. Its tied embedding starts as the
best low-rank approximation of the target's output head. It learns to predict the target's
probabilities of each next token (distillation, arXiv:1503.02531), because a proposed token is
accepted with probability sum min(p_target, p_draft).

A step computes only the logits of the target's most frequent tokens, and the logits of a random sample
of all other tokens, which are weighted to stand for all others. Without the sample, the logits of
tokens that are never trained would drift upwards.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from common import Trainer, kl_divergence, make_parser
from teacher import Span, TeacherText, frequent_tokens, new_token_positions, read_teacher_text
from torch import Tensor

import checkpoint as ck
from checkpoint import Writer, is_replaceable
from cli import UserError, number, positive, print_status, run_command
from config import Config
from costs import total_weight_bytes
from drafts.draft_model import output_head_rows
from formats import Quantization
from kernels import without_kernels
from load import load_model, open_checkpoint
from model import Transformer, pad_rows, soft_cap
from text.chat_template import answer_end_ids
from text.tokenizer import TokenizerFiles

BATCH_TOKENS = 2048
LEARNING_RATE = 5e-3
FREQUENT = 8192  # tokens that have logits in every step
OTHERS = 2048  # other tokens, sampled for each step, that have logits in it
SAMPLE = 4096  # hidden states of the target from which the draft's initial scale is estimated
# The initial logits are smaller than the target's by this factor: they are still wrong, so they
# should be less confident.
FIRST_SCALE = 0.2
CHECKED = 32  # held-out sequences in the reports during training

# ---------------------------------------------------------------- the draft model


def draft_config(target: Config, layers: int, width: int) -> Config:
    """A Llama of this size for the target's tokens and context."""
    head_dim = 64 if width % 64 == 0 else 32
    heads = width // head_dim
    return Config(
        n_layer=layers,
        n_head=heads,
        n_kv_head=heads,
        head_dim=head_dim,
        dim=width,
        hidden_dim=-(-width * 8 // (3 * 64)) * 64,
        vocab_size=target.vocab_size,
        max_seq_length=target.max_seq_length,
        norm_eps=1e-5,
        rope_base=target.rope_base,
        tied_embeddings=True,
        n_token=target.n_token,
        logits_softcap=target.logits_softcap,
    )


def new_draft(config: Config, head: Tensor, hidden: Tensor, seed: int) -> Transformer:
    """A draft with random blocks, in float32 and with gradients.

    head (V,D) and hidden (n,D) are the target's. With the eigenvectors v (D,width) of head^T head
    that have the largest eigenvalues, head @ v is the embedding. The logits head @ hidden are
    nearly (head @ v) @ (v^T hidden), so the final norm gives the draft's hidden states the scale of
    v^T hidden, times FIRST_SCALE.
    """
    generator = torch.Generator().manual_seed(seed)
    head = head.float()
    v = torch.linalg.eigh(head.t() @ head).eigenvectors.flip(1)  # (D,D), descending
    D = min(config.dim, head.shape[1])
    v = v[:, :D]
    embedding = torch.zeros(config.vocab_size, config.dim)
    embedding[:, :D] = head @ v
    norm = torch.ones(config.dim)
    norm[:D] = FIRST_SCALE * (hidden.float() @ v).square().mean(0).sqrt()

    draft = ck.empty_model(config)
    weights = {"embedding.weight": embedding, "norm.weight": norm}
    for name, parameter in draft.named_parameters():
        if name.endswith("_norm.weight"):
            weights[name] = torch.ones(parameter.shape)
        elif name not in weights:
            terms = parameter.shape[1]  # of the sums that should have a variance of about 1
            if name.endswith(("out.weight", "down.weight")):
                terms *= 2 * config.n_layer  # the outputs of all blocks are added up
            weights[name] = torch.randn(parameter.shape, generator=generator) * terms**-0.5
    draft.load_state_dict(weights, assign=True)
    return draft.requires_grad_()


def draft_hidden_states(draft: Transformer, tokens: Tensor, sequences: list[Span]) -> Tensor:
    """The draft's hidden states (g,D) that predict the next tokens: after the last token of each
    prompt, and after each new token but the last.

    tokens (N,): the text. sequences: a batch of B sequences of at most L tokens.
    """
    parts = [tokens[start:end].tolist() for start, _, end in sequences]
    padded, input_pos = pad_rows(parts, [0] * len(parts))  # (B,L), with padding on the right
    is_predicting = torch.zeros(padded.shape, dtype=torch.bool)
    for row, (start, first_new, end) in enumerate(sequences):
        is_predicting[row, first_new - 1 - start : end - 1 - start] = True

    draft.setup_caches(*padded.shape)  # the caches of the last batch are part of its graph
    with without_kernels():
        x = draft.hidden(padded, input_pos)  # (B,L,D)
    return x[is_predicting]


# ---------------------------------------------------------------- training


class Distillation:
    """The loss of each step, and the quality of the draft on held-out sequences."""

    def __init__(
        self,
        draft: Transformer,
        head: Tensor,
        text: TeacherText,
        special: set[int],
        epochs: int,
        seed: int,
    ):
        """head (V,D): the target's output head. special: tokens that always have logits."""
        self.draft = draft
        self.head = head
        draft.activation_dtype = torch.bfloat16  # as it will run
        self.text = text
        self.seed = seed
        self.batches, self.held_out = text.batches(BATCH_TOKENS, epochs, seed)
        self.frequent = frequent_tokens(text.answers, FREQUENT, special)
        tokens = torch.arange(draft.config.n_token or draft.config.vocab_size)
        self.others = tokens[~torch.isin(tokens, self.frequent)]

    def sample_vocabulary(self, step: int) -> tuple[Tensor, Tensor]:
        """The tokens (m,) that have logits in a step, and biases (m,) of these logits, with which
        the sampled tokens stand for all that were not sampled."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = torch.randperm(len(self.others), generator=generator)[:OTHERS]
        others = self.others[chosen].sort().values
        weight = len(self.others) / max(1, len(others))
        others_bias = torch.full((len(others),), weight).log()
        bias = torch.cat([torch.zeros(len(self.frequent)), others_bias])
        return torch.cat([self.frequent, others]), bias

    def loss(self, step: int) -> Tensor:
        ids, bias = self.sample_vocabulary(step)
        x, hidden = self.hidden_states(self.batches[step])
        matrix = F.embedding(ids, self.draft.embedding.weight)
        return kl_divergence(x, matrix, hidden, self.head[ids], bias, self.draft.config.logits_softcap)

    def hidden_states(self, sequences: list[Span]) -> tuple[Tensor, Tensor]:
        """The hidden states of draft (g,D) and target (g,D') that predict the next tokens of a batch."""
        with torch.autocast("cpu", torch.bfloat16):
            x = draft_hidden_states(self.draft, self.text.tokens, sequences)
        return x, self.text.hidden_states(torch.tensor(new_token_positions(sequences)))

    @torch.no_grad()
    def report(self, sequences: list[Span] | None = None) -> str:
        """Two means over held-out text, by default over few sequences of it: the probability that a
        proposed token is accepted at temperature 1, which is sum min(p_target, p_draft), and how
        often both models have the same likeliest token."""
        if sequences is None:
            sequences = self.held_out[:CHECKED]
        V = self.draft.config.n_token or self.draft.config.vocab_size
        cap = self.draft.config.logits_softcap
        matrix = self.draft.embedding.weight[:V].to(torch.bfloat16)
        head = self.head[:V].to(torch.bfloat16)

        accepted = 0.0
        agreed = 0
        n = 0
        for sequence in sequences:
            x, hidden = self.hidden_states([sequence])
            p_draft = soft_cap((x.to(torch.bfloat16) @ matrix.t()).float(), cap).softmax(-1)
            p_target = soft_cap((hidden.to(torch.bfloat16) @ head.t()).float(), cap).softmax(-1)  # (g,V)
            agreed += (p_draft.argmax(-1) == p_target.argmax(-1)).sum().item()
            accepted += torch.minimum(p_draft, p_target).sum().item()
            n += len(x)
        return f"on held-out text {accepted / n:.3f} accepted, {agreed / n:.3f} equal when greedy"


def write_draft(draft: Transformer, tokenizer_files: TokenizerFiles, out: Path):
    """Write a checkpoint in bfloat16."""
    with Writer(out, total_weight_bytes(draft, torch.bfloat16)) as writer:
        for name, tensor in draft.state_dict().items():
            writer.add(name, tensor.to(torch.bfloat16))
        writer.add_config(draft.config)
        writer.add_tokenizer(tokenizer_files)


# ---------------------------------------------------------------- the command


def main():
    parser = make_parser(__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, help="the directory to write; default: NAME-draft, beside the target")
    add("--layers", type=positive, default=3, help="layers of the draft")
    multiple = number(int, "a positive multiple of 32", lambda n: n > 0 and n % 32 == 0)
    add("--width", type=multiple, default=192, help="width of the draft's hidden states")
    args = parser.parse_args()

    checkpoint = open_checkpoint(args.checkpoint_path)
    source = checkpoint.path.resolve()
    out = args.out or source.with_name(f"{checkpoint.name}-draft")
    if (out.exists() and not is_replaceable(out)) or not out.parent.is_dir():
        raise UserError(f"--out {out} should be a new directory, or a checkpoint to replace, in an existing directory")
    target = load_model(checkpoint)
    text = read_teacher_text(args.text, target)
    config = draft_config(target.config, args.layers, args.width)
    int8 = Quantization("int8", 32, "int8")
    megabytes = total_weight_bytes(ck.empty_model(config, int8), torch.bfloat16) / 1e6
    print_status(f"the draft will have {megabytes:.1f} MB in int8")

    head = output_head_rows(target, torch.arange(config.vocab_size)).to(torch.bfloat16)
    del target
    sample = text.hidden[:: max(1, len(text.hidden) // SAMPLE)]
    draft = new_draft(config, head, sample, args.seed)
    ends = answer_end_ids(checkpoint.tokenizer_files, checkpoint.tokenizer)
    task = Distillation(draft, head, text, ends, args.epochs, args.seed)
    state_path = out.with_name(f"{out.name}.state")
    settings = {name: getattr(args, name) for name in ("layers", "width", "epochs", "seed")}
    settings |= {"checkpoint_path": str(source), "text": text.checksum}
    trainer = Trainer(draft, len(task.batches), LEARNING_RATE, state_path, settings)
    trainer.run(task.loss, task.report)

    print_status(task.report(task.held_out))
    write_draft(draft, checkpoint.tokenizer_files, out)
    state_path.unlink(missing_ok=True)
    print_status(f"to quantize it: python quantize.py --mode int8 --checkpoint_path {out}")
    print_status(f"to use it: python generate.py --checkpoint_path {source} --draft_checkpoint_path {out}-int8-g32")
    print(out)


if __name__ == "__main__":
    run_command(main)
