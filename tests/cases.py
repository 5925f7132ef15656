"""Random arguments for the tests of kernels on CPUs and GPUs, and models without kernels."""

import math
import random

import torch

from checkpoint import Checkpoint, open_directory, read_weights
from formats import FORMATS, QuantizedLinear, Scheme, StackedLinear, dense_layer, pack
from model import WHOLE_MODEL

# What may stand in the place of any field of a model's config.
STRANGE_VALUES = [None, 0, -1, 1, 3, 2**40, 2**64 - 1, 0.5, math.nan, math.inf, "", "x", True, [], [1], [0.5] * 3, {}]
STRANGE_VALUES += [{"rope_type": "yarn"}, "yarn", "linear", 60000, 2**32 - 1, 0.0, -1.0, [2, 2], [3, 4], ["", "a"]]


def read_model(checkpoint, dtype=torch.bfloat16, shard=WHOLE_MODEL):
    """The model of a checkpoint, or of a directory, without kernels."""
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_directory(checkpoint)
    return read_weights(checkpoint, checkpoint.empty_model(shard), dtype=dtype)


def numbers(*shape, seed=0, dtype=torch.float32, offset=0):
    """Random numbers in storage that begins `offset` elements after an aligned address."""
    count = torch.Size(shape).numel()
    flat = torch.randn(count + offset, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return flat[offset:].view(shape)


def random_blocks(format, N, C, seed=0):
    """Blocks of a GGUF file, of random bytes, but with small scales and mins."""
    (part,), generator = FORMATS[format].parts, torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (N, -(-C // part.columns), part.count), generator=generator).byte()
    for at in FORMATS[format].halves_at:
        values = torch.rand(*blocks.shape[:2], 1, generator=generator) * 0.02 - 0.01
        blocks[..., at : at + 2] = values.half().view(torch.uint8)
    return {"blocks": blocks.flatten(1)}


def quantized(format, N, C, groupsize, bias, dtype, seed=0):
    """(a quantized layer, the float32 matrix that it stands for)."""
    has_encoder = FORMATS[format].quantize is not None
    packed = pack(numbers(N, C, seed=seed), format, groupsize) if has_encoder else random_blocks(format, N, C, seed)
    layer = QuantizedLinear(C, N, bias, Scheme(format, groupsize))
    layer.load_state_dict(packed | ({"bias": numbers(N, seed=seed + 1)} if bias else {}))
    layer.bias = layer.bias.to(dtype) if bias else None
    return layer, FORMATS[format].unpack(packed, groupsize or C, C)


def attention_case(seed, dtype, B, S, K, group, E, T, window, slopes, rows, ragged):
    """Random arguments of attention, with NaN in every slot that no token sees, and sometimes a full cache."""
    rng = random.Random(seed)
    R, S = B + 1, min(S, T)
    k_cache, v_cache = torch.full((2, R, K, T + 8, E), float("nan")).to(dtype)
    where = torch.tensor(rng.sample(range(R), B)) if rows else None
    input_pos = torch.full((B, S), -1)
    for b in range(B):
        start, new = rng.choice([0, T - S, rng.randint(0, T - S)]), rng.randint(0, S) if ragged else S
        input_pos[b, :new] = torch.arange(start, start + new)
        seen = slice(max(0, start - (window or T) + 1), start + new) if new else slice(0)
        for cache in (k_cache, v_cache):
            cache[where[b] if rows else b, :, seen] = numbers(K, T, E, seed=seed + b).to(dtype)[:, seen]
    bias = torch.rand(K * group, generator=torch.Generator().manual_seed(seed)) if slopes else None
    q, scale = numbers(B, S, K * group, E, seed=seed).to(dtype), rng.choice([E**-0.5, 0.21])
    return q, k_cache, v_cache, input_pos, where, bias, window, scale


def plain_twin(directory):
    """A plain float32 model with the unpacked weights of a quantized checkpoint."""
    model = read_model(directory, dtype=torch.float32)
    for name, layer in list(model.named_modules()):
        in_stack = isinstance(model.get_submodule(name.rpartition(".")[0]), StackedLinear)
        if isinstance(layer, (QuantizedLinear, StackedLinear)) and not in_stack:
            model.set_submodule(name, dense_layer(layer, torch.float32))
    return model
