"""Draw the JSON files of decode.py and ladder.py: bars of decode beside bars of prefill, in a PNG beside each file.

pip install -r requirements-bench.txt && python benchmarks/charts.py benchmarks/results/decode_cpu.json
"""

import argparse
import re
from pathlib import Path

from measure import DECODE, RATES

from checkpoint import read_json
from cli import ArgumentParser, UserError, run_command

BLUE, GREY = "#0072B2", "#999999"  # of Okabe and Ito, which colour-blind readers can tell apart


def plain_name(row: dict) -> str:
    """Of a GGUF file, its format alone."""
    return re.sub(r"^(llama.cpp) .*\.(\w+)\.gguf$", r"\1 \2", row["name"])


def width_of_weights(row: dict) -> int:
    return next((i for i, mark in enumerate(("bf16", "8", "4")) if mark in plain_name(row).lower()), 3)


def draw_bars(axes, rows: list[dict], rate: str, bounds: list[float | None]):
    """One panel: a bar for each row, its label, and a dashed line at each bound."""
    values, labels = [row[rate] for row in rows], []
    for row in rows:
        gain = row.get(rate.replace("tokens_per_s", "over_before"))
        labels.append(f"{row[rate]:.{1 if row[rate] < 100 else 0}f}" + (f"  {gain:.2f}x" if gain else ""))
    colours = [GREY if row["name"].startswith(("transformers", "llama.cpp")) else BLUE for row in rows]
    bars = axes.barh([plain_name(row) for row in rows], values, color=colours, height=0.65)
    axes.bar_label(bars, labels, padding=4, fontsize=10, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    for y, bound in enumerate(bounds):
        if bound is not None:
            axes.plot([bound, bound], [y - 0.42, y + 0.42], color="black", linewidth=1.5, linestyle=(0, (2, 1)))
    axes.set_xlim(0, 1.45 * max([*values, *filter(None, bounds)]))  # room for the labels
    axes.set_xticks([])  # the labels say more
    axes.tick_params(length=0, labelsize=10)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def draw(path: Path):
    """The first row on top. UserError without matplotlib, or where the file is of another program."""
    result = read_json(path)
    if "steps" in result:  # of ladder.py
        rows, dram = result["steps"], None
        footnote = "x: times the step before, the median of the ratios within the rounds"
    elif "ratios" in result and "read_bytes_per_s" in result:  # of decode.py
        rows, dram = sorted(result["rows"], key=width_of_weights), result["read_bytes_per_s"]["dram"]
        footnote = f"dashed: a token's weights at the {dram / 1e9:.0f} GB/s of a plain read in the same rounds"
    else:
        raise UserError(f"{path} was not written by decode.py or ladder.py")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("charts need matplotlib: pip install -r requirements-bench.txt") from None
    machine = result["machine"]
    figure = Figure(figsize=(9, 1.5 + 0.42 * len(rows)), dpi=200, layout="constrained", facecolor="white")
    where = f"{machine['gpu'] or machine['cpu']}, threads: {machine['threads']}, {result['date']}"
    figure.suptitle(f"{result.get('model', 'One row')}\n{where}", fontsize=11)
    titles = ("decode, tokens/s", f"prefill of {result['prompt_tokens']}, tokens/s")
    for axes, rate, title in zip(figure.subplots(1, 2, sharey=True), RATES, titles):
        bounds = [dram / row["weight_bytes"] if dram and "weight_bytes" in row else None for row in rows]
        draw_bars(axes, rows, rate, bounds if rate == DECODE else [None] * len(rows))
        axes.set_title(title, fontsize=10, loc="left")
    axes.invert_yaxis()  # of both panels
    figure.supxlabel(footnote, fontsize=8, color="0.35")
    figure.savefig(path.with_suffix(".png"), format="png")


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", type=Path, help="the files")
    for path in parser.parse_args().json:
        draw(path)


if __name__ == "__main__":
    run_command(main)
