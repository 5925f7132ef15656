"""Writes a GGUF file of LFM2's architecture with random weights, for measurements of speed.

    python benchmarks/random_lfm2.py QWEN2.gguf random.BF16.gguf
    llama-quantize random.BF16.gguf random.Q4_K_M.gguf Q4_K_M

The sizes are those of LFM2-1.2B, but for the vocabulary, as in random_qwen35.py.
"""

import argparse
from pathlib import Path

import gguf
import torch
from random_qwen35 import add_random, copy_tokenizer, write_file

from cli import run_command

DIM = 2048
HIDDEN = 8192
LAYERS = 16
HEADS = 32
KV_HEADS = 8
HEAD_DIM = 64
CONV = 3
ATTENDING = (2, 5, 8, 10, 12, 14)  # the layers with attention; the others have short convolutions


def fields() -> dict:
    return {
        "block_count": LAYERS,
        "context_length": 128000,
        "embedding_length": DIM,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [KV_HEADS if layer in ATTENDING else 0 for layer in range(LAYERS)],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        "shortconv.l_cache": CONV,
    }


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors. Those with one dimension, and the convolution, are float32."""
    shapes = {
        "attn_norm.weight": (DIM,),
        "ffn_norm.weight": (DIM,),
        "ffn_gate.weight": (HIDDEN, DIM),
        "ffn_up.weight": (HIDDEN, DIM),
        "ffn_down.weight": (DIM, HIDDEN),
    }
    if layer in ATTENDING:
        return shapes | {
            "attn_q.weight": (HEADS * HEAD_DIM, DIM),
            "attn_k.weight": (KV_HEADS * HEAD_DIM, DIM),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, DIM),
            "attn_output.weight": (DIM, HEADS * HEAD_DIM),
            "attn_q_norm.weight": (HEAD_DIM,),
            "attn_k_norm.weight": (HEAD_DIM,),
        }
    return shapes | {
        "shortconv.in_proj.weight": (3 * DIM, DIM),
        "shortconv.conv.weight": (DIM, CONV),
        "shortconv.out_proj.weight": (DIM, DIM),
    }


def main():
    parser = argparse.ArgumentParser(description="Write a GGUF file of LFM2's architecture with random weights.")
    parser.add_argument("vocabulary", type=Path, help="the GGUF file whose tokenizer the model gets")
    parser.add_argument("out", type=Path, help="the file to write, in bfloat16")
    args = parser.parse_args()

    torch.manual_seed(0)
    writer = gguf.GGUFWriter(str(args.out), "lfm2")
    for name, value in fields().items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"lfm2.{name}", value)
    V = copy_tokenizer(writer, gguf.GGUFReader(args.vocabulary))
    writer.add_uint32("lfm2.vocab_size", V)

    add_random(writer, "token_embd.weight", (V, DIM))
    add_random(writer, "token_embd_norm.weight", (DIM,))
    for layer in range(LAYERS):
        for name, shape in layer_shapes(layer).items():
            add_random(writer, f"blk.{layer}.{name}", shape)
    write_file(writer)


if __name__ == "__main__":
    run_command(main)
