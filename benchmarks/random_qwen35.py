"""Writes a GGUF file of Qwen3.5's or LFM2-MoE's architecture with random weights, for measurements of speed.

    python benchmarks/random_qwen35.py 0.8B QWEN2.gguf random.BF16.gguf
    llama-quantize random.BF16.gguf random.Q4_K_M.gguf Q4_K_M
    python benchmarks/random_qwen35.py 8B-A1B QWEN2.gguf random.Q4_K_M.gguf --blocks

The vocabulary is that of QWEN2.gguf (for example the file of fetch_models.py), the other sizes are the
model's. The words of such a model mean nothing, but it takes as long as a real one. With --tokens, unused
tokens fill the vocabulary up to a number (Qwen3.5 has 248320). With --blocks, the
matrices are random blocks in the types that Q4_K_M mixes, so a large model needs no llama-quantize.

With --mtp the file has an MTP layer, and this layer is always right: its own weights
and the model's are random, but each token is followed by a fixed one. For that, the matrices that
write to the residual stream are zero, so that the last hidden state is the normalized embedding of
the newest token, and the output head's row of a token is the embedding of the token before it.
benchmarks/draft_layer.py makes the layer err.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import measure  # noqa: F401  (adds the folder above to the path)
import numpy as np
import torch

from cli import run_command


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; those that all have are in `fields`."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    value_heads: int
    interval: int = 4  # every so many layers have attention, the others gated delta nets
    experts: int = 0  # if there are any, the hidden width is that of one expert
    active: int = 8  # experts of a token, besides the shared one
    dense: int = 0  # LFM2-MoE: the hidden width of the first two layers, which have no experts
    head_dim: int = 256


SHAPES = {
    "0.8B": Shape(dim=1024, hidden=3584, layers=24, heads=8, kv_heads=2, value_heads=16),
    "2B": Shape(dim=2048, hidden=6144, layers=24, heads=8, kv_heads=2, value_heads=16),
    "4B": Shape(dim=2560, hidden=9216, layers=32, heads=16, kv_heads=4, value_heads=32),
    # Experts as in Qwen3.5-35B-A3B, but fewer of them in fewer layers; and a dense model of the same active bytes.
    "4B-A1B": Shape(dim=2048, hidden=512, layers=16, heads=16, kv_heads=2, value_heads=32, experts=64),
    "dense-A1B": Shape(dim=2048, hidden=9 * 512, layers=16, heads=16, kv_heads=2, value_heads=32),
    "2B-A0.5B": Shape(dim=1024, hidden=512, layers=16, heads=8, kv_heads=2, value_heads=16, experts=64),
    "dense-A0.5B": Shape(dim=1024, hidden=9 * 512, layers=16, heads=8, kv_heads=2, value_heads=16),
    "8B-A1B": Shape(2048, hidden=1792, layers=24, heads=32, kv_heads=8, value_heads=0, experts=32, active=4, dense=7168,
                    head_dim=64),
}  # fmt: skip
LFM2_ATTENTION = (2, 6, 10, 14, 18, 21)  # the layers of 8B-A1B that have attention
HEAD_DIM = 256
KEY_HEADS = 16
STATE = 128  # the width of keys and values of a gated delta net
CONV = 4
CYCLE = 32768  # the tokens of the cycle of --mtp: those that drafts/mtp.py proposes
STEP = 12345  # in the cycle, this many tokens on
WRITES_TO_RESIDUAL = ("attn_output.weight", "ssm_out.weight", "ffn_down.weight")


def fields(shape: Shape) -> dict:
    sparse = {}
    if shape.experts:
        sparse = {
            "expert_count": shape.experts,
            "expert_used_count": shape.active,
            "expert_feed_forward_length": shape.hidden,
            "expert_shared_feed_forward_length": shape.hidden,
        }
    return sparse | {
        "block_count": shape.layers,
        "context_length": 262144,
        "embedding_length": shape.dim,
        "feed_forward_length": shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD_DIM // 4,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": STATE * shape.value_heads,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.group_count": KEY_HEADS,
        "full_attention_interval": shape.interval,
    }


def lfm2_fields(shape: Shape) -> dict:
    return {
        "block_count": shape.layers,
        "context_length": 128000,
        "embedding_length": shape.dim,
        "feed_forward_length": shape.dense,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": [shape.kv_heads * (i in LFM2_ATTENTION) for i in range(shape.layers)],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        "shortconv.l_cache": 3,
        "leading_dense_block_count": 2,
        "expert_count": shape.experts,
        "expert_used_count": shape.active,
        "expert_feed_forward_length": shape.hidden,
        "expert_gating_func": 2,
    }


def lfm2_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    D = shape.dim
    width = shape.hidden if layer >= 2 else shape.dense
    ending = "_exps" if layer >= 2 else ""
    outer = (shape.experts,) if layer >= 2 else ()
    shapes = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
    if layer >= 2:
        shapes |= {"ffn_gate_inp.weight": (shape.experts, D), "exp_probs_b.bias": (shape.experts,)}
    shapes |= {f"{name}{ending}.weight": (*outer, width, D) for name in ("ffn_gate", "ffn_up")}
    shapes[f"ffn_down{ending}.weight"] = (*outer, D, width)
    if layer not in LFM2_ATTENTION:
        projections = {"shortconv.in_proj.weight": (3 * D, D), "shortconv.out_proj.weight": (D, D)}
        return shapes | projections | {"shortconv.conv.weight": (D, 3)}
    kv = shape.kv_heads * shape.head_dim
    shapes |= {"attn_q_norm.weight": (shape.head_dim,), "attn_k_norm.weight": (shape.head_dim,)}
    shapes |= {"attn_q.weight": (D, D), "attn_output.weight": (D, D)}
    return shapes | {"attn_k.weight": (kv, D), "attn_v.weight": (kv, D)}


def add_blocks(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...]):
    """Add a matrix of random blocks, with small scales, in the type that Q4_K_M has for it, more or less."""
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    is_finer = "token_embd" in name or "attn_v" in name or ("ffn_down" in name and layer % 2)
    types = gguf.GGMLQuantizationType
    kind, scales = (types.Q6_K, {208: 1e-4}) if is_finer else (types.Q4_K, {0: 4e-4, 2: 4e-4})
    if shape[-1] % 256:  # these columns do not fit into the blocks of K-quants
        kind, scales = (types.Q8_0, {0: 1e-4}) if is_finer else (types.Q5_0, {0: 1e-3})
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(len(name)).integers(0, 256, (*shape[:-1], shape[-1] // columns, size), np.uint8)
    for at, scale in scales.items():  # where a float16 begins
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kind)


def layer_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors. Those with one dimension, and the convolution, are float32."""
    values = STATE * shape.value_heads
    shapes = {
        "attn_norm.weight": (shape.dim,),
        "post_attention_norm.weight": (shape.dim,),
    }
    mlp = {
        "ffn_gate": (shape.hidden, shape.dim),
        "ffn_up": (shape.hidden, shape.dim),
        "ffn_down": (shape.dim, shape.hidden),
    }
    if shape.experts:
        shapes |= {"ffn_gate_inp.weight": (shape.experts, shape.dim), "ffn_gate_inp_shexp.weight": (shape.dim,)}
        shapes |= {f"{name}_exps.weight": (shape.experts, *sizes) for name, sizes in mlp.items()}
        shapes |= {f"{name}_shexp.weight": sizes for name, sizes in mlp.items()}
    else:
        shapes |= {f"{name}.weight": sizes for name, sizes in mlp.items()}
    if (layer + 1) % shape.interval == 0:
        return shapes | {
            "attn_q.weight": (2 * shape.heads * HEAD_DIM, shape.dim),
            "attn_k.weight": (shape.kv_heads * HEAD_DIM, shape.dim),
            "attn_v.weight": (shape.kv_heads * HEAD_DIM, shape.dim),
            "attn_output.weight": (shape.dim, shape.heads * HEAD_DIM),
            "attn_q_norm.weight": (HEAD_DIM,),
            "attn_k_norm.weight": (HEAD_DIM,),
        }
    channels = 2 * STATE * KEY_HEADS + values
    return shapes | {
        "attn_qkv.weight": (channels, shape.dim),
        "attn_gate.weight": (values, shape.dim),
        "ssm_alpha.weight": (shape.value_heads, shape.dim),
        "ssm_beta.weight": (shape.value_heads, shape.dim),
        "ssm_conv1d.weight": (channels, CONV),
        "ssm_a": (shape.value_heads,),
        "ssm_dt.bias": (shape.value_heads,),
        "ssm_norm.weight": (STATE,),
        "ssm_out.weight": (shape.dim, values),
    }


def draft_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of the MTP layer: a layer with attention, and some more."""
    return layer_shapes(shape, shape.interval - 1) | {
        "nextn.enorm.weight": (shape.dim,),
        "nextn.hnorm.weight": (shape.dim,),
        "nextn.shared_head_norm.weight": (shape.dim,),
    }


def add_matrix(writer: gguf.GGUFWriter, name: str, matrix: torch.Tensor):
    data = matrix.bfloat16().view(torch.int16).numpy()
    writer.add_tensor(name, data.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_predictable(writer: gguf.GGUFWriter, shape: Shape, V: int):
    """Add the embedding, the output head and the MTP layer, in which a token is followed
    by the next one of a cycle over the first CYCLE tokens."""
    table = 0.02 * torch.randn(V, shape.dim)
    head = 0.02 * torch.randn(V, shape.dim)
    head[:CYCLE] = table[:CYCLE].roll(STEP, 0)
    add_matrix(writer, "token_embd.weight", table)
    add_matrix(writer, "output.weight", head)
    proj = torch.cat([torch.eye(shape.dim), torch.zeros(shape.dim, shape.dim)], dim=1)
    add_matrix(writer, f"blk.{shape.layers}.nextn.eh_proj.weight", proj)


def add_random(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], blocks: bool) -> None:
    """Add norms of ones, decays like those of new models, and all else at random."""
    if name.endswith("norm.weight"):
        writer.add_tensor(name, np.ones(shape, np.float32))
    elif name.endswith("ssm_a"):
        writer.add_tensor(name, -torch.empty(shape).uniform_(0.1, 16).numpy())
    elif "ffn_gate_inp" in name:
        writer.add_tensor(name, 0.02 * torch.randn(shape).numpy())
    elif len(shape) == 1 or "conv" in name.split(".")[-2]:
        writer.add_tensor(name, torch.randn(shape).numpy())
    elif blocks:
        add_blocks(writer, name, shape)
    else:
        add_matrix(writer, name, 0.02 * torch.randn(shape))


def copy_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader, tokens: int) -> int:
    """Copy the fields of a tokenizer, add unused tokens up to a number, and return the number of all."""
    have = len(source.fields["tokenizer.ggml.tokens"].data)
    unused = range(have, tokens)
    more = {
        "tokenizer.ggml.tokens": [f"<unused{i}>" for i in unused],
        "tokenizer.ggml.token_type": [gguf.TokenType.UNUSED] * len(unused),
        "tokenizer.ggml.scores": [0.0] * len(unused),
    }
    for name, field in source.fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = field.contents()
        if name in more:
            value += more[name]
        writer.add_key_value(name, value, kind, sub_type=inner)
    return have + len(unused)


def write_file(writer: gguf.GGUFWriter):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description="Write a GGUF file of Qwen3.5's architecture with random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("vocabulary", type=Path, help="the GGUF file whose tokenizer the model gets")
    parser.add_argument("out", type=Path, help="the file to write, in bfloat16")
    parser.add_argument("--blocks", action="store_true", help="random quantized blocks instead of bfloat16")
    parser.add_argument("--mtp", action="store_true", help="with an MTP layer")
    parser.add_argument("--tokens", type=int, default=0, help="fill the vocabulary up to this number")
    args = parser.parse_args()

    shape = SHAPES[args.shape]
    torch.manual_seed(0)
    architecture = "qwen35moe" if shape.experts else "qwen35"
    if shape.dense:
        architecture = "lfm2moe"
    writer = gguf.GGUFWriter(str(args.out), architecture)
    extra = {}
    if args.mtp:
        extra = {"block_count": shape.layers + 1, "nextn_predict_layers": 1}
    for name, value in ((lfm2_fields if shape.dense else fields)(shape) | extra).items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{name}", value)
    V = copy_tokenizer(writer, gguf.GGUFReader(args.vocabulary), args.tokens)

    add_random(writer, "token_embd_norm.weight" if shape.dense else "output_norm.weight", (shape.dim,), False)
    shapes_of = lfm2_shapes if shape.dense else layer_shapes
    layers = [shapes_of(shape, layer) for layer in range(shape.layers)]
    if args.mtp:
        add_predictable(writer, shape, V)
        layers.append(draft_shapes(shape))
    else:
        add_random(writer, "token_embd.weight", (V, shape.dim), args.blocks)
    for layer, shapes in enumerate(layers):
        for name, tensor_shape in shapes.items():
            if args.mtp and name in WRITES_TO_RESIDUAL:
                add_matrix(writer, f"blk.{layer}.{name}", torch.zeros(tensor_shape))
            else:
                add_random(writer, f"blk.{layer}.{name}", tensor_shape, args.blocks)
    write_file(writer)


if __name__ == "__main__":
    run_command(main)
