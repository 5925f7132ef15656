"""Medusa heads (arXiv:2401.10774): small layers on the target's hidden state predict the next tokens.

The target's last hidden state gives the next token, x_1. Each head gives one more token:

    state_0     = the hidden state that x_1 was sampled from
    gate, up    = W1 [norm(state_(i-1)), norm(embedding of x_i)]
    state_i     = state_(i-1) + W2 (silu(gate) * up)
    the logits of x_(i+1) are the products of state_i with the output head's rows for the draft
    vocabulary

So a head is a residual block, and sees the tokens that were proposed before its own, as in Hydra
(arXiv:2402.05109). All heads share W1 and W2, as in ReDrafter (arXiv:2403.09919): for the same file
size, one larger shared block was more accurate than one block per head. The draft vocabulary holds
the few thousand tokens that the target generates most: the whole output head would cost more than
the heads gain. Its rows are the target's own, so a file holds W1 and W2 in 8 bits, and the ids of
the vocabulary (see training/medusa.py).

The proposal is a chain, not a tree. For a row with a temperature, the draft samples with the same
noise as the target. From similar distributions, the same noise mostly picks the same token, and the
target accepts a token if it samples the same one. So the draft counts as deterministic, and the
tokens are always the same as in plain decoding.

Read down: MedusaHeads; their file; MedusaDraft, the draft for speculative.Speculation.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from checkpoint import safetensors_header
from cli import UserError
from drafts.draft import Draft, Proposal
from drafts.draft_model import GROUPSIZE, DraftVocabulary, int8_layer, output_head_rows
from engine import Batch, Engine
from formats import pack
from kernels import has_kernel
from layers import Embedding
from model import Transformer
from sampling import Sampling, sample

FORMAT = "fastpath medusa heads 1"  # the key of the file's metadata
# The tensors of a file: the parts of W1 and W2, which are int8 matrices, and the vocabulary
PARTS = ("weight", "scales")
TENSOR_DTYPES = {
    "gate_up.weight": torch.int8,
    "gate_up.scales": torch.float16,
    "down.weight": torch.int8,
    "down.scales": torch.float16,
    "vocabulary": torch.int32,
}

# ---------------------------------------------------------------- the heads


def block_input(state: Tensor, embedded: Tensor) -> Tensor:
    """The input (...,2D) of a head's block, from the state (...,D) before it and the embedding
    (...,D) of the newest token."""
    D = state.shape[-1:]
    return torch.cat([F.rms_norm(state, D), F.rms_norm(embedded.to(state.dtype), D)], -1)


class MedusaHeads(nn.Module):
    """n heads, in int8, and the vocabulary that they propose from. packed: as in HeadsFile."""

    def __init__(self, packed: dict[str, dict[str, Tensor]], n: int, vocabulary: DraftVocabulary):
        super().__init__()
        self.gate_up = int8_layer(packed["gate_up"])
        self.down = int8_layer(packed["down"])
        self.n = n
        self.vocabulary = vocabulary

    @property
    def device(self) -> torch.device:
        return self.vocabulary.device

    def layers_for_kernels(self, model: Transformer) -> list | None:
        """The layers that the CPU kernels' operation `medusa` needs, prepared for it: the model's
        embedding and the layers of the heads. None if the operation cannot be used."""
        if model.shard.ranks > 1 or not has_kernel("medusa", self.device):
            return None
        from cpu.layers import PackedLinear, prepare

        # An embedding of another class is quantized, but not packed
        has_layout = isinstance(model.embedding, (Embedding, PackedLinear))
        own = (self.gate_up, self.down, self.vocabulary.output)
        if not has_layout or not all(isinstance(layer, PackedLinear) for layer in own):
            return None
        return [prepare(layer) for layer in (model.embedding, *own)]

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The next state (B,D), from the state (B,D) before it and the embedding (B,D) of the
        newest token."""
        gate, up = self.gate_up(block_input(state, embedded)).chunk(2, -1)  # (B,F) each
        return state + self.down(F.silu(gate) * up)


# ---------------------------------------------------------------- the file


def fingerprint(model: Transformer) -> str:
    """A hash of the model's sizes and norms, which is the same for all its formats: norms are never
    quantized. (The norms of an MTP layer do not count: it may be left out.)

    The norms are compared in bfloat16. (A model in float16 that was stored in float32 may have
    another hash.)
    """
    config = model.config
    sizes = (config.n_layer, config.n_head, config.dim, config.vocab_size)
    digest = hashlib.sha256(repr(sizes).encode())
    for name, weight in sorted(model.state_dict().items()):
        if "norm" in name and not name.startswith("mtp."):
            bits = weight.detach().to("cpu", torch.bfloat16).view(torch.int16)
            digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


class HeadsFile(NamedTuple):
    """What a file of heads holds."""

    # The parts of the int8 matrices W1 and W2, which are called "gate_up" (2F,2D) and "down" (D,F)
    packed: dict[str, dict[str, Tensor]]
    vocabulary: Tensor  # (W,) int64: the tokens that end an answer, then the most frequent ones
    heads: int  # the number of heads, each of which proposes one token
    head_vocabulary_size: int  # the heads propose from this many of the first ids of `vocabulary`


def save_heads(path: Path, heads: HeadsFile, model: Transformer, name: str):
    """Write heads for the model of this name to a file, which appears when it is complete."""
    tensors = {}
    for key, parts in heads.packed.items():
        tensors |= {f"{key}.{part}": parts[part] for part in PARTS}
    tensors["vocabulary"] = heads.vocabulary.to(torch.int32)
    description = {
        "model": name,
        "fingerprint": fingerprint(model),
        "heads": heads.heads,
        "tokens": heads.head_vocabulary_size,
    }
    metadata = {FORMAT: json.dumps(description)}  # one entry: the library does not sort them
    temporary = path.with_name(path.name + ".partial")
    temporary.write_bytes(save(tensors, metadata))
    temporary.replace(path)


def pack_heads(weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """HeadsFile.packed for W1 and W2, which are called "gate_up" (2F,2D) and "down" (D,F)."""
    return {key: pack(weight.float(), "int8", GROUPSIZE) for key, weight in weights.items()}


def read_heads(path: Path, model: Transformer, name: str) -> HeadsFile:
    """Read a file of heads. UserError if it does not hold heads for this model, which is called
    `name`."""
    description = describe_heads(path)
    if description.get("fingerprint") != fingerprint(model):
        other = description.get("model")
        raise UserError(f"{path} holds heads for {other}, which is another model than {name}")
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in TENSOR_DTYPES}
    check_shapes(path, tensors, model.config.dim)

    vocabulary = tensors["vocabulary"].long()
    heads = description.get("heads")
    tokens = description.get("tokens")
    V = model.config.n_token or model.config.vocab_size
    is_valid = (
        type(heads) is int
        and heads > 0
        and type(tokens) is int
        and 0 < tokens <= len(vocabulary)
        and all(tensor.dtype == TENSOR_DTYPES[key] for key, tensor in tensors.items())
        and all(tensor.isfinite().all() for tensor in tensors.values())
        and len(vocabulary.unique()) == len(vocabulary)
        and 0 <= vocabulary.min() <= vocabulary.max() < V
    )
    if not is_valid:
        raise UserError(f"{path} is damaged: it holds impossible weights or token ids")
    packed = {key: {part: tensors[f"{key}.{part}"].to(model.device) for part in PARTS} for key in ("gate_up", "down")}
    return HeadsFile(packed, vocabulary.to(model.device), heads, tokens)


def check_shapes(path: Path, tensors: dict[str, Tensor], D: int):
    """UserError if the tensors of a file of heads do not fit a model of width D."""
    hidden = tensors["down.weight"].numel() // D
    shapes = {
        "gate_up.weight": (2 * hidden, 2 * D),
        "gate_up.scales": (2 * hidden, -(-2 * D // GROUPSIZE)),
        "down.weight": (D, hidden),
        "down.scales": (D, -(-hidden // GROUPSIZE)),
        "vocabulary": (tensors["vocabulary"].numel(),),
    }
    for key, shape in shapes.items():
        found = tuple(tensors[key].shape)
        if found != shape or 0 in shape:
            raise UserError(f"{path}: {key} is {found}, but for this model it should be {shape}")


def describe_heads(path: Path) -> dict:
    """The description in a file of heads. UserError if it is another kind of file."""
    header = safetensors_header(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    try:
        description = json.loads(metadata.get(FORMAT, "null"))
    except (ValueError, RecursionError):
        description = None
    if not isinstance(description, dict) or header.keys() != TENSOR_DTYPES.keys():
        raise UserError(f"{path} is not a file of Medusa heads (training/medusa.py makes them)")
    return description


def make_heads(file: HeadsFile, model: Transformer) -> MedusaHeads:
    ids = file.vocabulary[: file.head_vocabulary_size]
    vocabulary = DraftVocabulary(ids, output_head_rows(model, ids), model.config.logits_softcap)
    return MedusaHeads(file.packed, file.heads, vocabulary)


# ---------------------------------------------------------------- the draft


class MedusaDraft(Draft):
    """Proposes a token with each head, from the hidden state of each row's last step.

    A row's first step is plain, because the hidden states of prompts are not kept.
    """

    name = "medusa"
    observes = True

    def __init__(self, heads: MedusaHeads):
        self.heads = heads
        self.max_k = heads.n
        self.weight_bytes = sum(tensor.nbytes for tensor in heads.buffers())
        self.states: dict[int, Tensor] = {}  # cache row -> the hidden state (D,) of its last step

    def begin(self, engine: Engine):
        super().begin(engine)
        self.draw = engine.steps.compile(draw_tokens)
        self.no_state = torch.zeros_like(engine.model.norm.weight, dtype=engine.model.dtype)
        self.layers = self.heads.layers_for_kernels(engine.model)
        self.states.clear()

    def add(self, row: int, tokens: list[int], cached: int):
        self.states.pop(row, None)

    def remove(self, row: int):
        self.states.pop(row, None)

    def observe(self, rows: list, hidden: Tensor):
        hidden = hidden.clone()  # the next step of a CUDA graph overwrites its results
        self.states.update(zip([row.index for row in rows], hidden.unbind()))

    def propose(self, batch: Batch, k: int) -> Proposal | None:
        if not any(row.index in self.states for row in batch.rows):
            return None
        states = [self.states.get(row.index, self.no_state) for row in batch.rows]
        padding = [self.no_state] * (batch.inputs.shape[1] - len(states))
        hidden = torch.stack(states + padding)  # (B,D)

        k = min(k, self.heads.n)
        model = self.engine.model
        if self.layers is not None and not batch.random:
            ids = self.heads.vocabulary.ids
            handles = [layer.handle for layer in self.layers]
            drafted = torch.ops.fastpath.medusa(hidden, batch.inputs[0], ids, *handles, k)
        else:
            sampling = self.sampling if batch.random else None
            drafted = self.draw(model, self.heads, hidden, batch.inputs, sampling, k)

        tokens = self.fitting(batch, drafted)
        return Proposal([ids if row.index in self.states else [] for row, ids in zip(batch.rows, tokens)], k)

    def bytes_read(self, k: int, positions: list[int]) -> tuple[float, float]:
        return k * self.weight_bytes, 0.0


def draw_tokens(model, heads: MedusaHeads, hidden: Tensor, inputs: Tensor, sampling: Sampling | None, k: int):
    """Draw k tokens (B,k) after the newest token of each row; without `sampling`, the likeliest.

    hidden (B,D): the states that the newest tokens were sampled from; inputs (3,B) as in
    engine.decode.
    """
    token, position, rows = inputs.unbind(0)
    state = hidden
    drafted = []
    for i in range(k):
        state = heads(state, model.embed(token[:, None])[:, 0])
        if sampling is not None:
            logits = heads.vocabulary.logits(state, sampling.counts.shape[1])  # (B,V)
            ids, _ = sample(logits[:, None], rows, position + 1 + i, None, sampling)  # (B,1)
            token = ids[:, 0].clamp(min=0)
        else:
            token = heads.vocabulary.likeliest(state)
        drafted.append(token)
    return torch.stack(drafted, 1)
