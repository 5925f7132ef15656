"""Draw the JSON files of decode.py, ladder.py (decode beside prefill), speculation.py, draft_layer.py, experts.py,
shadow.py, life.py and load_test.py, in a PNG beside each file.

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

# The colours of Okabe and Ito, which colour-blind readers can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREY = "#999999"
WHITE_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # behind the text of a label


def colour_of(name: str) -> str:
    if name.startswith(("transformers", "llama.cpp")):
        return GREY
    return ORANGE if name.startswith("ik_") else BLUE


def by_width(rows: list[dict]) -> list[dict]:
    """The rows by the width of their weights, widest first.

    A peer may have several formats with the same number of bits. Only the one with the fastest
    decode is kept.
    """
    alike = {}
    for row in rows:
        peer = row["name"].split()[0]
        key = (peer, weight_bits(row["name"])) if peer in PEERS else row["name"]
        alike.setdefault(key, []).append(row)
    chosen = [max(some, key=lambda row: row[DECODE]) for some in alike.values()]
    return sorted(chosen, key=lambda row: -(weight_bits(row["name"]) or 0))


def bar_label(value: float, gain: float | None) -> str:
    label = f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return f"{label}  {gain:.2f}x" if gain else label


def draw_bars(axes, rows: list[dict], rate: str, bandwidth: float | None):
    """Draw one panel: a bar and a label for each row.

    If a bandwidth is given, our rooflines are dashed lines.
    """
    for y, row in enumerate(rows):
        bar = axes.barh(row["name"], row[rate], color=colour_of(row["name"]), height=0.65)
        label = bar_label(row[rate], row.get(rate.replace("tokens_per_s", "over_before")))
        axes.bar_label(bar, [label], padding=4, fontsize=10, bbox=WHITE_BOX)
        if bandwidth and "weight_bytes_per_token" in row:
            bound = bandwidth / row["weight_bytes_per_token"]
            axes.plot([bound, bound], [y - 0.42, y + 0.42], color="black", linewidth=1.5, linestyle=(0, (2, 1)))

    axes.set_xlim(0, 1.38 * axes.get_xlim()[1])  # room for the labels
    hide_x_axis(axes, labelsize=10)


def hide_x_axis(axes, labelsize: int):
    """Leave out what the labels of the bars already say."""
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=labelsize)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def title(result: dict) -> str:
    machine = result["machine"]
    rows = result.get("batch_size", 1)
    plural = "s" if rows > 1 else ""
    where = f"{machine['gpu'] or machine['cpu']}, threads: {machine['threads']}"
    return f"{rows} row{plural}, {where}, {result['date']}"


def make_figure(height: float, heading: str) -> Figure:
    figure = Figure(figsize=(9, height), dpi=200, layout="constrained", facecolor="white")
    figure.suptitle(heading, fontsize=11)
    return figure


def draw_gains(result: dict, path: Path):
    """Draw the rows of speculation.py: the gain of every draft in every format, by kind of prompts."""
    rows = [row for row in result["rows"] if row["draft"] != "plain"]
    kinds = list(dict.fromkeys(row["prompts"] for row in rows))
    height = 1.4 + 0.3 * len(rows) / len(kinds)
    figure = make_figure(height, f"{result['model']}: {title(result)}")

    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True), kinds):
        mine = [row for row in rows if row["prompts"] == kind]
        names = [f"{row['target']}  {row['draft'].removesuffix(', auto')}" for row in mine]
        gains = [row["over_plain"] for row in mine]
        colours = [BLUE if gain >= 1 else GREY for gain in gains]
        bars = axes.barh(names, gains, color=colours, edgecolor=colours, height=0.65)
        axes.bar_label(bars, fmt="{:.2f}x", padding=4, fontsize=9, bbox=WHITE_BOX)
        axes.axvline(1, color="black", linewidth=1, linestyle=(0, (2, 1)), zorder=0)
        axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
        hide_x_axis(axes, labelsize=9)
        axes.set_title(f"{kind} prompts, times plain decoding", fontsize=10, loc="left")

    axes.invert_yaxis()  # the panels share it
    figure.savefig(path.with_suffix(".png"), format="png")


def draw_draft_layer(result: dict, path: Path):
    """Draw what draft_layer.py measured: the gain by the share of accepted tokens, and the cost of a step by the number
    of drafted tokens."""
    figure = make_figure(3.6, f"{result['model']}: {title(result)}")
    gains, costs = figure.subplots(1, 2)
    for (rows, runs), colour in zip(result["by_agreement"].items(), (BLUE, ORANGE)):
        points = sorted((run["accepted"], run["over_plain"], run["over_plain_spread"]) for run in runs.values())
        accepted = [point[0] for point in points]
        medians = [point[1] for point in points]
        spread = [[middle - low, high - middle] for _, middle, (low, high) in points]
        label = "1 row" if rows == "1" else f"{rows} rows"
        gains.errorbar(accepted, medians, list(zip(*spread)), marker="o", color=colour, capsize=2, label=label)
    gains.axhline(1, color="black", linewidth=1, linestyle=(0, (2, 1)), zorder=0)
    gains.set_title("times plain decoding", fontsize=10, loc="left")
    gains.set_xlabel("how often a drafted token is accepted", fontsize=9)
    gains.set_ylim(0)
    gains.legend(fontsize=9, frameon=False)

    by_k = result["by_k"]["1"]
    names = list(by_k)
    drafting = [by_k[k]["draft_cost"] for k in names]
    verifying = [by_k[k]["verify_cost"] for k in names]
    costs.bar(names, verifying, color=BLUE, label="verifying")
    costs.bar(names, drafting, bottom=verifying, color=ORANGE, label="drafting")
    costs.axhline(1, color="black", linewidth=1, linestyle=(0, (2, 1)), zorder=0)
    costs.set_title("a step of one row, times a plain step", fontsize=10, loc="left")
    costs.set_xlabel("drafted tokens", fontsize=9)
    costs.legend(fontsize=9, frameon=False)

    for axes in (gains, costs):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    figure.savefig(path.with_suffix(".png"), format="png")


def draw_experts(result: dict, path: Path):
    """Draw what experts.py measured: the bytes of weights of a token, and the time of a step, by the number of rows."""
    rows = result["rows"]
    numbers = [row["rows"] for row in rows]
    X = result["n_expert"]
    where = title(result).partition(", ")[2]  # without the number of rows
    figure = make_figure(3.6, f"{result['model']}: {where}")
    sizes, times = figure.subplots(1, 2)
    for name, colour in (("sparse", BLUE), ("dense", GREY)):
        label = f"{result['n_active']} of {X} experts" if name == "sparse" else "dense"
        sizes.plot(
            numbers, [row[f"{name}_bytes_per_token"] / 1e6 for row in rows], marker="o", color=colour, label=label
        )
        times.plot(numbers, [1e3 * row[f"{name}_step_s"] for row in rows], marker="o", color=colour, label=label)
    whole = [result["total_bytes"] / n / 1e6 for n in numbers]
    sizes.plot(
        numbers, whole, color="black", linewidth=1, linestyle=(0, (2, 1)), label="all experts, once for all rows"
    )
    sizes.set_yscale("log")
    sizes.set_title("MB of weights for each token", fontsize=10, loc="left")
    times.set_title("ms of a step", fontsize=10, loc="left")
    times.set_ylim(0)

    for axes in (sizes, times):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(n) for n in numbers])
        axes.set_xlabel("rows", fontsize=9)
        axes.legend(fontsize=9, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    figure.savefig(path.with_suffix(".png"), format="png")


def draw_shadow(result: dict, path: Path):
    """Draw what shadow.py measured: the bytes of weights of a token, and the share of the head by the token."""
    figure = make_figure(3.6, title(result))
    sizes, shares = figure.subplots(1, 2, width_ratios=(2, 3))
    for model, colour in zip(result["head"], (BLUE, ORANGE, "black")):
        name = model["model"].split("-Instruct")[0].removesuffix(".Q4_K_M")
        blocks = model["weight_bytes"] - model["head_bytes"]
        needed = model["shadow_bytes"] + model["mean_share"] * model["head_bytes"]
        for label, head in (("all logits", model["head_bytes"]), ("with its shadow", needed)):
            bar = f"{name}\n{label}"
            sizes.barh(bar, blocks / 1e6, color=GREY, height=0.65)
            drawn = sizes.barh(bar, head / 1e6, left=blocks / 1e6, color=colour, height=0.65)
            sizes.bar_label(drawn, [f"{(blocks + head) / 1e6:.0f}"], padding=4, fontsize=9)
        shares.plot([100 * share for share in model["shares"]], color=colour, linewidth=0.9, label=name)
    sizes.set_title("MB of weights of a token; grey: the blocks", fontsize=10, loc="left")
    sizes.set_xlim(0, 1.2 * sizes.get_xlim()[1])
    sizes.invert_yaxis()
    hide_x_axis(sizes, labelsize=8)
    shares.set_title("% of the head that is read besides its shadow", fontsize=10, loc="left")
    shares.set_xlabel("tokens of a text", fontsize=9)
    shares.spines[["top", "right"]].set_visible(False)
    shares.legend(fontsize=9, frameon=False)
    figure.savefig(path.with_suffix(".png"), format="png")


def draw_life(result: dict, path: Path):
    """Draw what life.py measured: each hop begins where the one before it has ended."""
    parts = result["parts"]
    heights = [len(part["hops"]) + 4 for part in parts.values()]
    figure = make_figure(0.4 + 0.165 * sum(heights), f"{result['model']}: {title(result)}")
    headings = {
        "prompt": f"a prompt of {parts['prompt']['tokens']} tokens",
        "step": "a decode step",
        "request": f"a request for {parts['request']['new_tokens']} tokens after this prompt",
    }
    for axes, (name, part) in zip(figure.subplots(3, 1, height_ratios=heights), parts.items()):
        spent = [(hop["function"], hop["shape"], hop["us"]) for hop in part["hops"]]
        spent.append(("the rest", "", part["rest_us"]))
        begin = 0.0
        for y, (function, shape, us) in enumerate(spent):
            colour = {"Barrier": ORANGE, "the rest": GREY}.get(function, BLUE)
            width = max(us, 0.0)  # the rest is negative if the clock takes longer than what has no name
            axes.barh(y, width, left=begin, color=colour, edgecolor=colour, height=0.7)
            begin += width
            axes.text(begin + 0.008 * part["wall_us"], y, f"{us:,.0f}  {shape}", va="center", fontsize=7)
        axes.set_yticks(range(len(spent)), [function for function, *_ in spent])
        axes.set_ylim(len(spent) - 0.4, -0.6)
        axes.set_xlim(0, 1.3 * part["wall_us"])
        hide_x_axis(axes, labelsize=7)
        axes.set_title(f"{headings[name]}: {part['wall_us'] / 1e3:.1f} ms, in µs", fontsize=10, loc="left")
    figure.savefig(path.with_suffix(".png"), format="png")


def draw_ramp(result: dict, path: Path):
    """Draw what load_test.py measured: lines of all servers against the number of users."""
    figure = make_figure(6, f"{result['model']}: {title(result | {'batch_size': result['rows']})}")
    panels = {
        "throughput, new tokens/s": (("tokens_per_s",), 1),
        "time to first token, s": (("first_token_p50_s", "first_token_p95_s"), 1),
        "time per later token, ms": (("later_token_p50_s", "later_token_p95_s"), 1e3),
        "refused, % of the responses": (("refused_share",), 100),
    }
    for axes, (heading, (keys, factor)) in zip(figure.subplots(2, 2).flat, panels.items()):
        for name, rows in result["servers"].items():
            users = [row["users"] for row in rows]
            for key, line in zip(keys, ("o-", "o--")):
                values = [float("nan") if row[key] is None else factor * row[key] for row in rows]
                label = name if key == keys[0] else None
                axes.plot(users, values, line, color=colour_of(name), markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(users, [str(n) for n in users], fontsize=8)
        axes.minorticks_off()
        axes.set_ylim(0, 100 if factor == 100 else None)
        axes.set_title(heading, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)

    tokens, first, *_ = figure.axes
    first.set_ylim(auto=True)
    first.set_yscale("log")
    first.yaxis.set_major_formatter("{x:g}")
    tokens.legend(frameon=False, fontsize=9)
    note = "users, each sending one request after another; solid: median or total, dashed: 95th percentile"
    figure.supxlabel(note, fontsize=8, color="0.35")
    figure.savefig(path.with_suffix(".png"), format="png")


def draw(path: Path):
    """Draw one file: one line of panels for each model.

    The steps of ladder.py stay in their order. The rows of decode.py are sorted by the width of
    their weights.
    """
    result = read_json(path)
    if "servers" in result:
        return draw_ramp(result, path)
    if "letters" in result:
        return draw_life(result, path)
    if "by_agreement" in result:
        return draw_draft_layer(result, path)
    if "head" in result:
        return draw_shadow(result, path)
    if "n_expert" in result:
        return draw_experts(result, path)
    if "draft" in result.get("rows", [{}])[0]:
        return draw_gains(result, path)

    models = {}
    for row in result.get("steps") or result["rows"]:
        models.setdefault(row.get("model", ""), []).append(row)
    bandwidth = None
    note = "x: times the step before, the median of the ratios within the rounds"
    if "rows" in result:
        models = {model: by_width(rows) for model, rows in models.items()}
        bandwidth = result["read_bytes_per_s"]["dram"]
        note = f"dashed: a token's weights at the {bandwidth / 1e9:.0f} GB/s of a plain read in the same rounds"

    heights = [len(rows) + 1.5 for rows in models.values()]
    figure = make_figure(0.9 + 0.36 * sum(heights), title(result))
    lines = figure.subplots(len(models), 2, sharey="row", height_ratios=heights, squeeze=False)
    for (decode, prefill), (model, rows) in zip(lines, models.items()):
        draw_bars(decode, rows, DECODE, bandwidth)
        draw_bars(prefill, rows, PREFILL, None)
        decode.set_title(f"{model}\ndecode, tokens/s", fontsize=10, loc="left")
        prefill.set_title(f"prefill of {result['prompt_tokens']}, tokens/s", fontsize=10, loc="left")
        decode.invert_yaxis()  # the two panels share it
    figure.supxlabel(note, fontsize=8, color="0.35")
    figure.savefig(path.with_suffix(".png"), format="png")


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("json", nargs="+", type=Path, help="the files")
    for path in parser.parse_args().json:
        draw(path)


if __name__ == "__main__":
    run_command(main)
