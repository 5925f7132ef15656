"""Draw the JSON files of decode.py, ladder.py (decode beside prefill) and speculation.py, in a PNG beside each file.

pip install -r requirements-bench.txt && python benchmarks/charts.py benchmarks/results/decode_cpu.json
"""

import sys
from pathlib import Path

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError:
    sys.exit("charts.py: error: matplotlib is missing: pip install -r requirements-bench.txt")
from measure import DECODE, PEERS, PREFILL, weight_bits

from cli import ArgumentParser, read_json, run_command

BLUE, ORANGE = "#0072B2", "#E69F00"  # of Okabe and Ito, for colour-blind readers, too
GREY = "#999999"


def colour_of(name: str) -> str:
    return GREY if name.startswith(("transformers", "llama.cpp")) else ORANGE if name.startswith("ik_") else BLUE


def by_width(rows: list[dict]) -> list[dict]:
    """The rows by the width of their weights, widest first. Of several formats of a peer with as many bits, the one
    with the fastest decode."""
    alike = {}
    for row in rows:
        peer, bits = row["name"].split()[0], weight_bits(row["name"])
        alike.setdefault((peer, bits) if peer in PEERS else row["name"], []).append(row)
    chosen = [max(some, key=lambda row: row[DECODE]) for some in alike.values()]
    return sorted(chosen, key=lambda row: -(weight_bits(row["name"]) or 0))


def draw_bars(axes, rows: list[dict], rate: str, bandwidth: float | None):
    """Draw one panel: a bar and a label for each row and, if a bandwidth is given, our rooflines as dashed lines."""
    for y, row in enumerate(rows):
        bar = axes.barh(row["name"], row[rate], color=colour_of(row["name"]), height=0.65)
        gain = row.get(rate.replace("tokens_per_s", "over_before"))
        label = f"{row[rate]:.{1 if row[rate] < 100 else 0}f}" + (f"  {gain:.2f}x" if gain else "")
        axes.bar_label(bar, [label], padding=4, fontsize=10, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
        if bandwidth and "weight_bytes_per_token" in row:
            bound = [bandwidth / row["weight_bytes_per_token"]] * 2
            axes.plot(bound, [y - 0.42, y + 0.42], color="black", linewidth=1.5, linestyle=(0, (2, 1)))
    axes.set_xlim(0, 1.38 * axes.get_xlim()[1])  # room for the labels
    axes.set_xticks([])  # the labels give the numbers
    axes.tick_params(length=0, labelsize=10)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def title(result: dict) -> str:
    machine = result["machine"]
    rows = result.get("batch_size", 1)
    where = f"{machine['gpu'] or machine['cpu']}, threads: {machine['threads']}"
    return f"{rows} row{'s' if rows > 1 else ''}, {where}, {result['date']}"


def draw_gains(result: dict, path: Path):
    """Draw the rows of speculation.py: for each kind of prompts, the gain of every draft in every format."""
    rows = [row for row in result["rows"] if row["draft"] != "plain"]
    kinds = list(dict.fromkeys(row["prompts"] for row in rows))
    figure = Figure(figsize=(9, 1.4 + 0.3 * len(rows) / len(kinds)), dpi=200, layout="constrained", facecolor="white")
    figure.suptitle(f"{result['model']}: {title(result)}", fontsize=11)
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True), kinds):
        mine = [row for row in rows if row["prompts"] == kind]
        names = [f"{row['target']}  {row['draft'].removesuffix(', auto')}" for row in mine]
        bars = axes.barh(names, [row["over_plain"] for row in mine], height=0.65)
        for bar, row in zip(bars, mine):
            bar.set_color(BLUE if row["over_plain"] >= 1 else GREY)
        axes.axvline(1, color="black", linewidth=1, linestyle=(0, (2, 1)), zorder=0)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.bar_label(bars, [f"{row['over_plain']:.2f}x" for row in mine], padding=4, fontsize=9, bbox=box)
        axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
        axes.set_xticks([])
        axes.tick_params(length=0, labelsize=9)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_title(f"{kind} prompts, times plain decoding", fontsize=10, loc="left")
    axes.invert_yaxis()  # of all panels
    figure.savefig(path.with_suffix(".png"), format="png")


def draw(path: Path):
    """Draw the steps of ladder.py in their order, or the rows of decode.py by the width of their weights: a line of two
    panels for each model."""
    result = read_json(path)
    if "draft" in result.get("rows", [{}])[0]:
        return draw_gains(result, path)
    bandwidth, all_rows = None, result.get("steps") or result["rows"]
    footnote = "x: times the step before, the median of the ratios within the rounds"
    if "rows" in result:
        bandwidth = result["read_bytes_per_s"]["dram"]
        footnote = f"dashed: a token's weights at the {bandwidth / 1e9:.0f} GB/s of a plain read in the same rounds"
    models = {}
    for row in all_rows:
        models.setdefault(row.get("model", ""), []).append(row)
    if "rows" in result:
        models = {model: by_width(rows) for model, rows in models.items()}
    heights = [len(rows) + 1.5 for rows in models.values()]
    figure = Figure(figsize=(9, 0.9 + 0.36 * sum(heights)), dpi=200, layout="constrained", facecolor="white")
    figure.suptitle(title(result), fontsize=11)
    lines = figure.subplots(len(models), 2, sharey="row", height_ratios=heights, squeeze=False)
    for (decode, prefill), (model, rows) in zip(lines, models.items()):
        draw_bars(decode, rows, DECODE, bandwidth)
        draw_bars(prefill, rows, PREFILL, None)
        decode.set_title(f"{model}\ndecode, tokens/s", fontsize=10, loc="left")
        prefill.set_title(f"prefill of {result['prompt_tokens']}, tokens/s", fontsize=10, loc="left")
        decode.invert_yaxis()  # of both panels
    figure.supxlabel(footnote, fontsize=8, color="0.35")
    figure.savefig(path.with_suffix(".png"), format="png")


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("json", nargs="+", type=Path, help="the files")
    for path in parser.parse_args().json:
        draw(path)


if __name__ == "__main__":
    run_command(main)
