"""Medusa heads (arXiv:2401.10774): small layers on the target model's last hidden state that guess the next tokens.

The target's hidden state at a token gives the next token, x1. The heads go on from there, one for each further token:

    state_0 = the hidden state that x1 was sampled from
    state_i = state_(i-1) + silu(W_i [norm(state_(i-1)), norm(embedding of x_i)])
    logits of x_(i+1) = state_i times the output vectors of the draft vocabulary

So a head is a residual block of one matrix (D, 2D), and sees the tokens that were proposed before its own, as in Hydra
(arXiv:2402.05109). The draft vocabulary holds the few thousand tokens that the target says most: its whole output
matrix would cost more than the heads gain. The output vectors are the target's own, so the file of the heads holds only
the matrices, in 8 bits, and the ids of the vocabulary. training/medusa.py trains the heads.

The proposal is a chain, not a tree. A row that samples at random proposes with its own noise, that of the target, for
each token. The same noise picks the same token from distributions that are similar, and the target accepts a token if
it samples the same one. So the draft counts as deterministic, and the tokens are always those of plain decoding.

Read down: MedusaHeads; their file; MedusaDraft, the draft for speculative.Speculation.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from checkpoint import safetensors_header
from cli import UserError
from draft_model import GROUPSIZE, DraftVocabulary, int8_layer, output_vectors
from linear import pack_int8
from model import Transformer
from sampling import Sampling, sample
from speculative import Batch, Proposal

FORMAT = "fastpath medusa heads 1"  # in the file's metadata

# ---------------------------------------------------------------- the heads


def block_input(state: Tensor, embedded: Tensor) -> Tensor:
    """The input (...,2D) of a head's matrix, from the state before it and the embedding of the newest token."""
    return torch.cat([F.rms_norm(state, state.shape[-1:]), F.rms_norm(embedded.to(state.dtype), state.shape[-1:])], -1)


class MedusaHeads(nn.Module):
    """The heads, in int8, and the vocabulary that they propose from.

    weight (n,D,2D) int8 and scales (n,D,2D/32) float16 are the matrices of n heads.
    """

    def __init__(self, weight: Tensor, scales: Tensor, vocabulary: DraftVocabulary):
        super().__init__()
        layers = [int8_layer({"weight": w, "scales": s}) for w, s in zip(weight, scales, strict=True)]
        self.blocks, self.vocabulary = nn.ModuleList(layers), vocabulary

    @property
    def device(self) -> torch.device:
        return self.vocabulary.device

    def forward(self, i: int, state: Tensor, embedded: Tensor) -> Tensor:
        """The state (B,D) after head i, from the state (B,D) before it and the embedding (B,D) of the newest token."""
        return state + F.silu(self.blocks[i](block_input(state, embedded)))


# ---------------------------------------------------------------- the file


def fingerprint(model: Transformer) -> str:
    """A hash that all formats of one model share: of its sizes, and of its norms, which are never quantized."""
    config = model.config
    digest = hashlib.sha256(repr((config.n_layer, config.n_head, config.dim, config.vocab_size)).encode())
    for name, weight in sorted(model.state_dict().items()):
        if "norm" in name:
            digest.update(weight.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


class HeadsFile(NamedTuple):
    """What a file of heads holds."""

    weight: Tensor  # (n,D,2D) int8
    scales: Tensor  # (n,D,2D/32) float16
    vocabulary: Tensor  # (W,) int64: the tokens that the model says most, the most frequent first
    tokens: int  # the heads propose from so many of these; a draft model may use all


def save_heads(path: Path, weights: Tensor, vocabulary: Tensor, tokens: int, model: Transformer, name: str):
    """Write heads with weights (n,D,2D), for the model of this name, to a file, which appears when it is complete."""
    packed = [pack_int8(w, GROUPSIZE) for w in weights.float()]
    tensors = {key: torch.stack([parts[key] for parts in packed]) for key in ("weight", "scales")}
    tensors["vocabulary"] = vocabulary.to(torch.int32)
    about = {"format": FORMAT, "model": name, "fingerprint": fingerprint(model), "tokens": str(tokens)}
    temporary = path.with_name(path.name + ".partial")
    save_file(tensors, temporary, about)
    temporary.replace(path)


def read_heads(path: Path, model: Transformer, name: str) -> HeadsFile:
    """Read a file of heads. UserError if it does not hold heads for this model, which is called `name`."""
    D, V = model.config.dim, model.config.n_token or model.config.vocab_size
    header = safetensors_header(path)
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
        if about.get("format") != FORMAT or header.keys() != {"weight", "scales", "vocabulary"}:
            raise UserError(f"{path} is not a file of Medusa heads (training/medusa.py makes them)")
        if about.get("fingerprint") != fingerprint(model):
            raise UserError(f"{path} holds heads for {about.get('model')}, which is another model than {name}")
        tensors = {key: file.get_tensor(key) for key in header}
    weight, scales, vocabulary = tensors["weight"], tensors["scales"], tensors["vocabulary"].long()
    shapes = {"weight": (len(weight), D, 2 * D), "scales": (len(weight), D, -(-2 * D // GROUPSIZE))}
    shapes["vocabulary"] = (len(vocabulary),)
    for key, shape in shapes.items():
        if tensors[key].shape != shape or 0 in shape:
            raise UserError(f"{path}: {key} is {tuple(tensors[key].shape)}, but for this model it should be {shape}")
    dtypes = tuple(tensors[key].dtype for key in shapes)
    right = dtypes == (torch.int8, torch.float16, torch.int32) and bool(scales.isfinite().all())
    right = right and len(vocabulary.unique()) == len(vocabulary) and 0 <= vocabulary.min() <= vocabulary.max() < V
    tokens = about.get("tokens", "")
    if not right or not tokens.isdecimal() or not 1 <= int(tokens) <= len(vocabulary):
        raise UserError(f"{path} is damaged: it holds weights or token ids that cannot be")
    return HeadsFile(*(tensor.to(model.device) for tensor in (weight, scales, vocabulary)), int(tokens))


def make_heads(file: HeadsFile, model: Transformer) -> MedusaHeads:
    ids = file.vocabulary[: file.tokens]
    return MedusaHeads(file.weight, file.scales, DraftVocabulary(ids, output_vectors(model, ids)))


# ---------------------------------------------------------------- the draft


class MedusaDraft:
    """Proposes up to as many tokens as there are heads, from the hidden state of each row's last step.

    A row's first step is plain: the hidden states of prompts are not kept.
    """

    is_free = False

    def __init__(self, heads: MedusaHeads):
        self.heads = heads
        self.weight_bytes = sum(tensor.nbytes for tensor in heads.buffers())
        self.ready: set[int] = set()  # the cache rows whose hidden state is known

    def begin(self, engine):
        self.engine, self.draw = engine, engine.steps.compile(draw_tokens)
        weight = engine.model.norm.weight
        self.hidden = weight.new_zeros(len(engine.rows), len(weight))  # (R,D)
        self.ready.clear()

    def add(self, row: int, tokens: list[int]):
        self.ready.discard(row)

    def remove(self, row: int):
        self.ready.discard(row)

    def observe(self, rows: list, hidden: Tensor):
        self.hidden[torch.tensor([row.index for row in rows], device=hidden.device)] = hidden[: len(rows)]
        self.ready.update(row.index for row in rows)

    def accepted(self, row: int, tokens: list[int]):
        pass

    def propose(self, batch: Batch, k: int) -> Proposal | None:
        is_ready = [row.index in self.ready for row in batch.rows]
        if not any(is_ready):
            return None
        k = min(k, len(self.heads.blocks))
        drafted = self.draw(
            self.engine.model, self.heads, self.hidden, batch.inputs, self.engine.sampling, k, batch.random
        )
        if self.engine.model.split is not None:
            drafted = self.engine.model.split.broadcast(drafted)
        position, is_ready = batch.inputs[1], is_ready + [False] * (batch.inputs.shape[1] - len(is_ready))
        room = (self.engine.length - 1 - position).clamp(max=k)  # within the cache row
        return Proposal(drafted.clone(), torch.where(torch.tensor(is_ready, device=room.device), room, 0))

    def lengths(self, k: int) -> list[int]:
        """Those that fill a pass of the target: each needs a graph of its own if the steps are compiled."""
        most = min(k, len(self.heads.blocks))
        return sorted({most} | {n for n in (1, 3, 7) if n < most})

    def bytes_read(self, k: int, lengths: list[int]) -> tuple[float, float]:
        return self.weight_bytes, 0.0


def draw_tokens(model, draft: MedusaHeads, hidden: Tensor, inputs: Tensor, sampling: Sampling, k: int, random: bool):
    """Draw k tokens (B,k) after the newest tokens of a batch. hidden (R,D); inputs (3,B) as in engine.decode."""
    token, position, rows = inputs.unbind(0)
    state, drafted = hidden[rows], []  # (B,D)
    for i in range(k):
        state = draft(i, state, model.embedding(token[:, None])[:, 0])
        if random:
            logits = draft.vocabulary.logits(state, sampling.counts.shape[1])[:, None]  # (B,1,V)
            token = sample(logits, rows, position + 1 + i, rows[:, None][:, :0], sampling)[0][:, 0].clamp(min=0)
        else:
            token = draft.vocabulary.likeliest(state)
        drafted.append(token)
    return torch.stack(drafted, 1)
