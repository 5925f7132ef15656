"""Writes a GGUF file of Gemma 4's architecture with random weights, for measurements of speed.

    python benchmarks/random_gemma4.py E2B QWEN2.gguf random.Q4_K_M.gguf

The vocabulary is that of QWEN2.gguf (for example the file of fetch_models.py), filled up with unused
tokens. The other sizes are the model's; 26B-A4B has 16 of its 30 layers. The matrices are random blocks
in the types that Q4_K_M mixes. The words of such a model mean nothing, but it takes as long as a real one.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from random_qwen35 import add_blocks, add_matrix, copy_tokenizer, write_file

from cli import run_command

VOCABULARY = 262_144
SLIDING_HEAD = 256
FULL_HEAD = 512
TURNING = 64  # pairs of dimensions of a head with full attention that RoPE turns


@dataclass(frozen=True)
class Shape:
    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    interval: int  # every so many layers, and the last one, have full attention
    window: int
    full_kv_heads: int | None = None  # then the layers with full attention have no matrix of values
    own_inputs: int = 0  # the width of an input that each layer has of its own
    shared: int = 0  # layers that read earlier caches; their MLP is twice as wide
    experts: int = 0
    active: int = 8
    expert_hidden: int = 0

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0 or layer == self.layers - 1

    def width(self, layer: int) -> int:
        return self.hidden * (2 if layer >= self.layers - self.shared else 1)


SHAPES = {
    "E2B": Shape(1536, 6144, 35, heads=8, kv_heads=1, interval=5, window=512, own_inputs=256, shared=20),
    "26B-A4B": Shape(
        2816, 2112, 16, heads=16, kv_heads=8, interval=6, window=1024, full_kv_heads=2, experts=128, expert_hidden=704
    ),
}


def fields(shape: Shape) -> dict:
    layers = range(shape.layers)
    full = [shape.is_full(layer) for layer in layers]
    sparse = {}
    if shape.experts:
        sparse = {
            "expert_count": shape.experts,
            "expert_used_count": shape.active,
            "expert_feed_forward_length": shape.expert_hidden,
        }
    return sparse | {
        "block_count": shape.layers,
        "context_length": 131072,
        "embedding_length": shape.dim,
        "feed_forward_length": [shape.width(layer) for layer in layers],
        "attention.head_count": shape.heads,
        "attention.head_count_kv": [shape.full_kv_heads or shape.kv_heads if one else shape.kv_heads for one in full],
        "attention.key_length": FULL_HEAD,
        "attention.value_length": FULL_HEAD,
        "attention.key_length_swa": SLIDING_HEAD,
        "attention.value_length_swa": SLIDING_HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": [not one for one in full],
        "attention.shared_kv_layers": shape.shared,
        "embedding_length_per_layer_input": shape.own_inputs,
        "final_logit_softcapping": 30.0,
        "rope.dimension_count": FULL_HEAD,
        "rope.dimension_count_swa": SLIDING_HEAD,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }


def layer_shapes(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    D = shape.dim
    F = shape.width(layer)
    E = FULL_HEAD if shape.is_full(layer) else SLIDING_HEAD
    K = shape.full_kv_heads or shape.kv_heads if shape.is_full(layer) else shape.kv_heads
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        yield f"{name}.weight", (D,)
    yield "layer_output_scale.weight", (1,)
    yield "attn_q.weight", (shape.heads * E, D)
    yield "attn_k.weight", (K * E, D)
    if shape.full_kv_heads is None or not shape.is_full(layer):
        yield "attn_v.weight", (K * E, D)
    yield "attn_output.weight", (D, shape.heads * E)
    yield "attn_q_norm.weight", (E,)
    yield "attn_k_norm.weight", (E,)
    yield "ffn_gate.weight", (F, D)
    yield "ffn_up.weight", (F, D)
    yield "ffn_down.weight", (D, F)
    if shape.own_inputs:
        yield "inp_gate.weight", (shape.own_inputs, D)
        yield "proj.weight", (D, shape.own_inputs)
        yield "post_norm.weight", (D,)
    if shape.experts:
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield f"{name}.weight", (D,)
        yield "ffn_gate_inp.weight", (shape.experts, D)
        yield "ffn_gate_inp.scale", (D,)
        yield "ffn_gate_up_exps.weight", (shape.experts, 2 * shape.expert_hidden, D)
        yield "ffn_down_exps.weight", (shape.experts, D, shape.expert_hidden)
        yield "ffn_down_exps.scale", (shape.experts,)


def add_layers(writer: gguf.GGUFWriter, shape: Shape):
    for layer in range(shape.layers):
        for name, sizes in layer_shapes(shape, layer):
            name = f"blk.{layer}.{name}"
            if "ffn_gate_inp.weight" in name:
                writer.add_tensor(name, 0.02 * torch.randn(sizes).numpy())
            elif len(sizes) == 1:
                writer.add_tensor(name, np.ones(sizes, np.float32))
            else:
                add_blocks(writer, name, sizes)


def main():
    parser = argparse.ArgumentParser(description="Write a GGUF file of Gemma 4's architecture with random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("vocabulary", type=Path, help="the GGUF file whose tokenizer the model gets")
    parser.add_argument("out", type=Path, help="the file to write")
    args = parser.parse_args()

    shape = SHAPES[args.shape]
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(str(args.out), "gemma4")
    for name, value in fields(shape).items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"gemma4.{name}", value)
    V = copy_tokenizer(writer, gguf.GGUFReader(args.vocabulary), VOCABULARY)

    writer.add_tensor("output_norm.weight", np.ones(shape.dim, np.float32))
    freqs = [1.0] * TURNING + [1e30] * (FULL_HEAD // 2 - TURNING)
    writer.add_tensor("rope_freqs.weight", np.array(freqs, np.float32))
    add_blocks(writer, "token_embd.weight", (V, shape.dim))
    if shape.own_inputs:
        width = shape.layers * shape.own_inputs
        add_blocks(writer, "per_layer_token_embd.weight", (V, width))
        add_matrix(writer, "per_layer_model_proj.weight", 0.02 * torch.randn(width, shape.dim))
        writer.add_tensor("per_layer_proj_norm.weight", np.ones(shape.own_inputs, np.float32))
    add_layers(writer, shape)
    write_file(writer)


if __name__ == "__main__":
    run_command(main)
