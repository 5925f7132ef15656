"""Horizontal bars in panels side by side, in one look for all benchmarks; needs matplotlib."""

from dataclasses import dataclass
from pathlib import Path

from cli import UserError

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"  # of Okabe and Ito, whom nobody confuses
NO_CHART = "the chart needs matplotlib: pip install -r requirements-bench.txt; then --draw JSON makes it"


@dataclass
class Panel:
    """Bars of one unit: a value, what stands behind it and a colour for each name, and perhaps a mark beyond it."""

    title: str
    values: list[float]
    labels: list[str]
    colours: list[str]
    marks: list[float | None] | None = None


def draw(path: Path, title: str, names: list[str], panels: list[Panel], footnote: str):
    """Into a PNG file, first name on top; UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(NO_CHART) from None
    figure = Figure(figsize=(9, 1.5 + 0.42 * len(names)), dpi=200, layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=11)
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        bars = axes.barh(names, panel.values, color=panel.colours, height=0.65)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # a mark
        axes.bar_label(bars, panel.labels, padding=4, fontsize=10, bbox=behind)
        marks = panel.marks or [None] * len(names)
        for y, mark in enumerate(marks):
            if mark is not None:
                axes.plot([mark, mark], [y - 0.42, y + 0.42], color="black", linewidth=1.5, linestyle=(0, (2, 1)))
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_xlim(0, 1.45 * max([*panel.values, *filter(None, marks)]))  # room for the labels
        axes.set_xticks([])  # they say more
        axes.tick_params(length=0, labelsize=10)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.invert_yaxis()  # all panels'
    figure.supxlabel(footnote, fontsize=8, color="0.35")
    figure.savefig(path, format="png")
