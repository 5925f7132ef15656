"""Medusa heads (arXiv:2401.10774): small layers on the target model's last hidden state that guess the next tokens.

The target's hidden state at a token gives the next token, x1. The heads go on from there, one for each further token:

    state_0 = the hidden state that x1 was sampled from
    state_i = state_(i-1) + silu(W_i [norm(state_(i-1)), norm(embedding of x_i)])
    logits of x_(i+1) = state_i times the output vectors of the draft vocabulary

So a head is a residual block of one matrix (D, 2D), and sees the tokens that were proposed before its own, as in Hydra
(arXiv:2402.05109). The draft vocabulary holds the few thousand tokens that the target says most: its whole output
matrix would cost more than the heads gain. The output vectors are the target's own, so the file of the heads holds only
the blocks, in 8 bits. training/medusa.py trains the heads.

The proposal is a chain, not a tree. A row that samples at random proposes with its own noise, that of the target, for
each token. The same noise picks the same token from distributions that are similar, and the target accepts a token if
it samples the same one. So the draft counts as deterministic, and the tokens are always those of plain decoding.

Read down: MedusaHeads; their file; MedusaDraft, the draft for speculative.Speculation.
"""

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from checkpoint import safetensors_header
from cli import UserError
from linear import Int8Linear, pack_int8
from model import Transformer
from sampling import Sampling, sample
from speculative import Batch, Proposal

FORMAT = "fastpath medusa heads 1"  # in the file's metadata
GROUPSIZE = 32  # columns that share a scale
UNIT_VECTORS = 64  # hidden states in one pass of `output_vectors`

# ---------------------------------------------------------------- the heads


def block_input(state: Tensor, embedded: Tensor) -> Tensor:
    """The input (...,2D) of a head's matrix, from the state before it and the embedding of the newest token."""
    return torch.cat([F.rms_norm(state, state.shape[-1:]), F.rms_norm(embedded.to(state.dtype), state.shape[-1:])], -1)


class MedusaHeads(nn.Module):
    """The heads with the output vectors of their vocabulary, all in int8.

    weight (n,D,2D) int8 and scales (n,D,2D/32) float16 are the blocks; vocabulary (W,) int64 are the token ids of the
    draft vocabulary, output (W,D) their output vectors.
    """

    def __init__(self, weight: Tensor, scales: Tensor, vocabulary: Tensor, output: Tensor):
        super().__init__()
        self.blocks = nn.ModuleList(int8_layer({"weight": w, "scales": s}) for w, s in zip(weight, scales, strict=True))
        self.output = int8_layer(pack_int8(output, GROUPSIZE))
        self.register_buffer("vocabulary", vocabulary)

    @property
    def device(self) -> torch.device:
        return self.vocabulary.device

    def forward(self, i: int, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The state (B,D) after head i and the logits (B,W), from the state (B,D) before and an embedding (B,D)."""
        state = state + F.silu(self.blocks[i](block_input(state, embedded)))
        return state, self.output(state)


def int8_layer(packed: dict[str, Tensor]) -> Int8Linear:
    N, K = packed["weight"].shape
    with torch.device("meta"):
        layer = Int8Linear(K, N, False, GROUPSIZE)
    layer.load_state_dict(packed, assign=True)
    return layer


@torch.no_grad()
def output_vectors(model: Transformer, ids: Tensor) -> Tensor:
    """The vectors (n,D) float32 whose products with a hidden state are the logits of these ids (n,).

    Each logit of a unit vector is one element of an output vector: this is true in any format, and of a split model.
    """
    unit = torch.eye(model.config.dim, dtype=model.norm.weight.dtype, device=ids.device)
    columns = [model.head(part[None])[0, :, ids] for part in unit.split(UNIT_VECTORS)]  # (64,n) each
    return torch.cat(columns).T.float().contiguous()


# ---------------------------------------------------------------- the file


def fingerprint(model: Transformer) -> str:
    """A hash that all formats of one model share: of its sizes, and of its norms, which are never quantized."""
    config = model.config
    digest = hashlib.sha256(repr((config.n_layer, config.n_head, config.dim, config.vocab_size)).encode())
    for name, weight in sorted(model.state_dict().items()):
        if "norm" in name:
            digest.update(weight.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def save_heads(path: Path, weights: Tensor, vocabulary: Tensor, model: Transformer, name: str):
    """Write heads with weights (n,D,2D), for the model of this name, to a file, which appears when it is complete."""
    packed = [pack_int8(w, GROUPSIZE) for w in weights.float()]
    tensors = {key: torch.stack([parts[key] for parts in packed]) for key in ("weight", "scales")}
    tensors["vocabulary"] = vocabulary.to(torch.int32)
    temporary = path.with_name(path.name + ".partial")
    save_file(tensors, temporary, {"format": FORMAT, "model": name, "fingerprint": fingerprint(model)})
    temporary.replace(path)


def read_heads(path: Path, model: Transformer, name: str) -> MedusaHeads:
    """The heads in a file, on the model's device. UserError if they are not heads of this model, called `name`."""
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
    right = (weight.dtype, scales.dtype) == (torch.int8, torch.float16) and bool(scales.isfinite().all())
    if not right or len(vocabulary.unique()) < len(vocabulary) or not 0 <= vocabulary.min() <= vocabulary.max() < V:
        raise UserError(f"{path} is damaged: it holds weights or token ids that cannot be")
    tensors = [tensor.to(model.device) for tensor in (weight, scales, vocabulary)]
    return MedusaHeads(*tensors, output_vectors(model, tensors[2]))


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
        state, logits = draft(i, state, model.embedding(token[:, None])[:, 0])  # (B,D), (B,W)
        if random:  # with the noise of the ids in the target's vocabulary
            logits = logits.new_full((len(logits), 1, sampling.counts.shape[1]), float("-inf")).index_copy(
                2, draft.vocabulary, logits[:, None]
            )
            token = sample(logits, rows, position + 1 + i, rows[:, None][:, :0], sampling)[0][:, 0].clamp(min=0)
        else:
            token = draft.vocabulary[logits.argmax(-1)]
        drafted.append(token)
    return torch.stack(drafted, 1)
