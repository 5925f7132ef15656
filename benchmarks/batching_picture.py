"""Draws the picture of docs/serving.md: what the rows of an engine do in each step while requests come and go.

`python benchmarks/batching_picture.py` runs the default model with the requests below and draws
what each step did. No time is measured, so the picture is the same on every machine.
"""

from argparse import RawDescriptionHelpFormatter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from measure import ROOT

from cli import ArgumentParser, UserError, run_command
from engine import Engine, EngineOptions, Request
from load import load_model, open_checkpoint
from sampling import SamplingParams

ROWS = 3
STEPS = 18
CHUNK = 8  # prompt tokens per step
# The colours of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = {"A": "#0072B2", "B": "#E69F00", "C": "#009E73", "D": "#CC79A7", "E": "#56B4E9"}
ARRIVALS = {  # name: (the step in which the request comes, tokens of its prompt, new tokens)
    "A": (0, 6, 12), "B": (1, 30, 7), "C": (3, 5, 5), "D": (4, 11, 8), "E": (6, 4, 5),
}  # fmt: skip


@dataclass
class Cell:
    """What a row did in a step: its request, the prompt tokens that it read, and the new tokens."""

    row: int
    step: int
    name: str
    read: int
    written: int


def busy_rows(engine: Engine) -> dict[Request, int]:
    """The index of the row of each running request."""
    return {row.request: row.index for row in engine.rows if row.request is not None}


def run(engine: Engine) -> list[Cell]:
    cells = []
    names = {}
    for step in range(STEPS):
        for name, (arrival, n, new) in ARRIVALS.items():
            if arrival == step:
                prompt = [ord(name) * 7 + 31 * i for i in range(n)]  # no two have a common prefix
                request = Request(prompt, SamplingParams(temperature=0.0), new)
                names[request] = name
                engine.add(request)

        rows = busy_rows(engine)
        tokens_before = {request: len(engine.rows[i].tokens) for request, i in rows.items()}
        new_before = {request: len(request.new_tokens) for request in rows}
        finished = engine.step()
        rows |= busy_rows(engine)

        for request, index in rows.items():
            held = len(engine.rows[index].tokens)
            if request in finished or request.new_tokens:
                held = len(request.prompt)
            held_before = tokens_before.get(request, 0)
            n = len(request.prompt)
            read = max(0, min(held, n) - min(held_before, n))
            written = len(request.new_tokens) - new_before.get(request, 0)
            cells.append(Cell(index, step, names[request], read, written))
    return cells


def draw_cell(axes, cell: Cell):
    text = cell.name
    style = {"facecolor": COLOURS[cell.name], "edgecolor": "white", "linewidth": 1.5, "alpha": 1.0}
    if cell.read:
        text = f"{cell.name}\n{cell.read}"
        style["alpha"] = 0.55
    elif not cell.written:  # another prompt was read in this step
        style |= {"facecolor": "white", "edgecolor": COLOURS[cell.name], "linewidth": 1}

    axes.barh(cell.row, 1, left=cell.step, height=0.8, **style)
    axes.text(cell.step + 0.5, cell.row, text, ha="center", va="center", fontsize=8, color="black")


def draw(cells: list[Cell], path: Path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), dpi=200, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for cell in cells:
        draw_cell(axes, cell)
    for name, (arrival, *_) in ARRIVALS.items():
        place = (arrival + 0.1, ROWS - 0.42)
        axes.annotate(f"{name} comes", place, fontsize=7, color=COLOURS[name], rotation=35)

    axes.set_yticks(range(ROWS), [f"row {i}" for i in range(ROWS)])
    axes.set_xlim(0, STEPS)
    axes.set_ylim(-0.6, ROWS + 0.3)
    note = f"steps; pale: the row reads this number of tokens of its prompt (at most {CHUNK})"
    axes.set_xlabel(note, color="0.35", fontsize=8)
    axes.set_xticks(range(0, STEPS + 1, 2))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def main():
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    if find_spec("matplotlib") is None:
        raise UserError("the picture needs matplotlib: pip install -r requirements-bench.txt")
    model = load_model(open_checkpoint(dequantize=True))
    engine = Engine(model, ROWS, 64, options=EngineOptions(CHUNK, always_chunk=True))
    draw(run(engine), ROOT / "docs" / "continuous-batching.png")


if __name__ == "__main__":
    run_command(main)
