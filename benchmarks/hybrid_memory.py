"""Measures and draws what a row of Qwen3.5-4B's size remembers, beside a transformer with attention in all layers.

`python benchmarks/hybrid_memory.py` allocates the caches of both models without memory (on the meta
device), adds up their tensors, writes benchmarks/results/hybrid_memory.json and draws the picture of
docs/hybrid.md. No time is measured, so the result is the same on every machine.
"""

import json
from argparse import RawDescriptionHelpFormatter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from measure import ROOT

from cli import ArgumentParser, UserError, run_command
from config import Config, DeltaNet
from model import Transformer

CONTEXTS = [2**i for i in range(7, 19)]
LAYERS = 32
NET = DeltaNet(
    layers=tuple(i for i in range(LAYERS) if (i + 1) % 4),
    n_key_head=16,
    n_value_head=32,
    key_dim=128,
    value_dim=128,
)
HYBRID = Config(
    n_layer=LAYERS,
    n_head=16,
    n_kv_head=4,
    head_dim=256,
    dim=2560,
    hidden_dim=9216,
    vocab_size=248320,
    max_seq_length=CONTEXTS[-1],
    attention_gate=True,
    rotary_dim=64,
    delta_net=NET,
)
RESULT = ROOT / "benchmarks" / "results" / "hybrid_memory.json"


def row_bytes(model: Transformer, context: int) -> int:
    """The bytes of all states of a row with this many positions."""
    model.setup_caches(1, context, snapshot_bytes=0)
    return sum(tensor.nbytes for block in model.blocks for tensor in block.state.buffers())


def measure() -> dict:
    """The bytes of a row by its length, and of a snapshot, in bfloat16."""
    with torch.device("meta"):
        hybrid = Transformer(HYBRID).to(torch.bfloat16)
        plain = Transformer(replace(HYBRID, delta_net=None)).to(torch.bfloat16)
        hybrid.setup_caches(1, 1, snapshot_bytes=10**8)
        state = hybrid.snapshots.states[0]
        snapshot = len(NET.layers) * (state.saved_matrix[0].nbytes + state.saved_tail[0].nbytes)

        rows = []
        for context in CONTEXTS:
            rows.append({"context": context, "hybrid": row_bytes(hybrid, context), "plain": row_bytes(plain, context)})
    return {"snapshot_bytes": snapshot, "bytes_of_a_row": rows}


def draw(result: dict, path: Path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), dpi=200, layout="constrained", facecolor="white")
    axes = figure.subplots()
    rows = result["bytes_of_a_row"]
    contexts = [row["context"] for row in rows]
    labels = {"plain": ("attention in all layers", "#999999", 6), "hybrid": ("Qwen3.5-4B", "#0072B2", -14)}
    for name, (label, colour, above) in labels.items():
        sizes = [row[name] / 1e6 for row in rows]
        axes.plot(contexts, sizes, color=colour, linewidth=2)
        place = (contexts[-4], sizes[-4])
        side = "right" if above > 0 else "left"
        axes.annotate(label, place, xytext=(0, above), textcoords="offset points", ha=side, color=colour)

    axes.axhline(result["snapshot_bytes"] / 1e6, color="#E69F00", linewidth=1, linestyle="--")
    axes.annotate("a snapshot", (contexts[-1], result["snapshot_bytes"] / 1e6 * 1.1), ha="right", color="#E69F00")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts[::2], [f"{context:,}" for context in contexts[::2]])
    axes.set_yticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
    axes.set_xlabel("positions of a row", color="0.35")
    axes.set_ylabel("MB", color="0.35")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def main():
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    if find_spec("matplotlib") is None:
        raise UserError("the picture needs matplotlib: pip install -r requirements-bench.txt")
    result = measure()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, ROOT / "docs" / "hybrid-memory.png")


if __name__ == "__main__":
    run_command(main)
