"""Random arguments for the tests of kernels on CPUs and GPUs, models without kernels, and drafts without training."""

import math
import random

import torch

from checkpoint import Checkpoint, Writer, empty_model, open_directory, read_weights
from config import Config, DeltaNet, Experts
from drafts.draft_model import GROUPSIZE, DraftVocabulary, output_head_rows
from drafts.heads import MedusaHeads
from formats import FORMATS, QuantizedLinear, Scheme, StackedLinear, dense_layer, pack
from mixers.recurrent import DeltaState
from model import WHOLE_MODEL

# What may stand in the place of any field of a model's config.
STRANGE_VALUES = [
    None, 0, -1, 1, 3, 2**40, 2**64 - 1, 0.5, math.nan, math.inf, "", "x", True, [], [1], [0.5] * 3, {},
    {"rope_type": "yarn"}, "yarn", "linear", 60000, 2**32 - 1, 0.0, -1.0, [2, 2], [3, 4], ["", "a"],
]  # fmt: skip


def read_model(checkpoint, dtype=torch.bfloat16, shard=WHOLE_MODEL):
    """The model of a checkpoint, or of a directory, without kernels."""
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_directory(checkpoint)
    return read_weights(checkpoint, checkpoint.empty_model(shard), dtype=dtype)


# A model with experts. The first and the last layer are sparse.
EXPERTS = Experts((0, 2), n_expert=5, n_active=2, hidden_dim=35, shared_dim=33)
SPARSE = Config(3, 4, 2, 12, 40, 57, 131, 256, qk_norm=True, experts=EXPERTS)


def write_random(folder, config, seed=0, scales=(0.3, 1.2)):
    """A checkpoint with random weights. scales: of vectors, and of matrices with one column."""
    generator = torch.Generator().manual_seed(seed)
    with Writer(folder) as writer:
        for name, tensor in empty_model(config).state_dict().items():
            scale = scales[0] if tensor.dim() == 1 else scales[1] * tensor.shape[-1] ** -0.5
            weight = torch.randn(tensor.shape, generator=generator) * scale + ("norm" in name and "bias" not in name)
            writer.add(name, -weight.abs() if name.endswith("decay.weight") else weight)
        writer.add_config(config)
        writer.add_json("tokenizer_config.json", {"bos_token_id": 1})
    return folder


def numbers(*shape, seed=0, dtype=torch.float32, offset=0):
    """Random numbers in storage that begins `offset` elements after an aligned address."""
    count = torch.Size(shape).numel()
    flat = torch.randn(count + offset, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return flat[offset:].view(shape)


def random_blocks(format, N, C, seed=0, largest=0.01):
    """Blocks of a GGUF file with random bytes, but with small scales and mins (up to `largest` times 63)."""
    (part,) = FORMATS[format].parts
    generator = torch.Generator().manual_seed(seed)
    shape = (N, -(-C // part.columns), part.count)
    blocks = torch.randint(0, 256, shape, generator=generator).byte()
    for at in FORMATS[format].halves_at:
        values = torch.rand(*blocks.shape[:2], 1, generator=generator) * 2 - 1
        blocks[..., at : at + 2] = (values * largest).half().view(torch.uint8)
    return {"blocks": blocks.flatten(1)}


def quantized(format, N, C, groupsize, bias, dtype, seed=0):
    """A quantized layer, and the float32 matrix that it stands for."""
    if FORMATS[format].quantize is None:
        packed = random_blocks(format, N, C, seed)
    else:
        packed = pack(numbers(N, C, seed=seed), format, groupsize)

    layer = QuantizedLinear(C, N, bias, Scheme(format, groupsize))
    layer.load_state_dict(packed | ({"bias": numbers(N, seed=seed + 1)} if bias else {}))
    if bias:
        layer.bias = layer.bias.to(dtype)
    return layer, FORMATS[format].unpack(packed, groupsize or C, C)


def attention_case(seed, dtype, B, S, K, group, E, T, window, slopes, rows, ragged):
    """Random arguments of attention, sometimes with a full cache. What no token sees of it is NaN."""
    rng = random.Random(seed)
    R = B + 1
    S = min(S, T)
    k_cache, v_cache = torch.full((2, R, K, T + 8, E), float("nan")).to(dtype)
    where = torch.tensor(rng.sample(range(R), B)) if rows else None
    input_pos = torch.full((B, S), -1)

    for b in range(B):
        start = rng.choice([0, T - S, rng.randint(0, T - S)])
        end = start + S
        if ragged:
            end = start + rng.randint(0, S)
        input_pos[b, : end - start] = torch.arange(start, end)
        if end > start:
            seen = slice(max(0, start - (window or T) + 1), end)
            values = numbers(K, T, E, seed=seed + b).to(dtype)[:, seen]
            row = where[b] if rows else b
            k_cache[row, :, seen] = values
            v_cache[row, :, seen] = values

    bias = None
    if slopes:
        bias = torch.rand(K * group, generator=torch.Generator().manual_seed(seed))
    q = numbers(B, S, K * group, E, seed=seed).to(dtype)
    scale = rng.choice([E**-0.5, 0.21])
    return q, k_cache, v_cache, input_pos, where, bias, window, scale


def plain_twin(directory):
    """A plain float32 model with the unpacked weights of a quantized checkpoint."""
    model = read_model(directory, dtype=torch.float32)
    for name, layer in list(model.named_modules()):
        in_stack = isinstance(model.get_submodule(name.rpartition(".")[0]), StackedLinear)
        if isinstance(layer, (QuantizedLinear, StackedLinear)) and not in_stack:
            model.set_submodule(name, dense_layer(layer, torch.float32))
    return model


# ---------------------------------------------------------------- the gated delta rule

NARROW = DeltaNet(layers=(0,), n_key_head=3, n_value_head=6, key_dim=10, value_dim=21, conv_width=4)
WIDE = DeltaNet(layers=(0,), n_key_head=2, n_value_head=2, key_dim=48, value_dim=144, conv_width=3)


def delta_state(net, R, zeros=torch.zeros):
    state = DeltaState(net)
    state.allocate(R, 100, zeros, torch.float32)
    return state


def delta_inputs(net, B, S, seed=0):
    """Random q, k, v, log_decay and beta of a pass, as mixers.recurrent.gated_delta takes them."""
    generator = torch.Generator().manual_seed(seed)
    n = net.n_key_head
    m = net.n_value_head
    shapes = [(n, net.key_dim), (n, net.key_dim), (m, net.value_dim), (m,), (m,)]
    q, k, v, decay, beta = [torch.randn(B, S, *shape, generator=generator) for shape in shapes]
    k = torch.nn.functional.normalize(k, dim=-1)
    return q, k, v, -0.2 * decay.square(), beta.sigmoid()


# ---------------------------------------------------------------- Medusa heads


def random_heads(model, n: int = 4, size: float = 0.05) -> MedusaHeads:
    """Heads that change the hidden state a little. Models with random weights often repeat a token, which these heads
    then propose."""
    D, F = model.config.dim, 21
    chance = torch.Generator().manual_seed(3)
    weights = {"gate_up": torch.randn(2 * F, 2 * D, generator=chance)}
    weights["down"] = size * torch.randn(D, F, generator=chance)
    return MedusaHeads({key: pack(w, "int8", GROUPSIZE) for key, w in weights.items()}, n, some_tokens(model))


def some_tokens(model) -> DraftVocabulary:
    """Three quarters of a model's tokens."""
    V = model.config.n_token or model.config.vocab_size
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(4))[: V * 3 // 4]
    return DraftVocabulary(ids, output_head_rows(model, ids))
