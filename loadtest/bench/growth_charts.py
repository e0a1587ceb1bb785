# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of growth.json: one chart for each quantity that grows."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("#1f5fa8", "#d9822b", "#3a8f4d", "#8a4fa3")
NAMES = {"demo": "demo model (float32)", "0.1b": "0.1B Qwen3 shape (bfloat16)"}
CHARTS = {
    "batch": ("sequences in the batch", "context 64"),
    "context": ("tokens of context", "one sequence"),
    "waiting": ("waiting requests", "8 running sequences, context 64"),
    "output": ("tokens generated so far", "prompt 64"),
}


def draw(report: dict[str, Any], folder: Path) -> None:
    """Write a PNG for each chart."""
    for name in CHARTS:
        draw_growth(report, name, folder / f"{name}.png")
    draw_overhead(report, folder / "overhead.png")


def draw_growth(report: dict[str, Any], name: str, path: Path) -> None:
    """Draw the step time against one quantity, with a panel for each model."""
    label, condition = CHARTS[name]
    shapes = report["shapes"]
    figure, panels = plt.subplots(1, len(shapes), figsize=(5.2 * len(shapes), 3.8), squeeze=False)
    for panel, (shape, found) in zip(panels[0], shapes.items(), strict=True):
        if name == "output":
            line(panel, found["output"], 0, "generated")
            line(panel, found["output_as_prompt"], 1, "prompt of the same length", dashed=True)
            panel.legend(frameon=False, loc="lower right")
        else:
            line(panel, found[name], 0, None)
        values = [int(value) for value in found[name]]
        if name in ("batch", "context"):
            panel.set_xscale("log", base=2)
            panel.set_xticks(values, [f"{value:,}" for value in values])
        elif name == "waiting":
            panel.set_xscale("symlog", linthresh=10)
            panel.set_xticks(values, [f"{value:,}" for value in values])
        panel.minorticks_off()
        panel.set_title(f"{NAMES.get(shape, shape)}, {condition}", fontsize=10)
        panel.set_xlabel(label)
        panel.set_ylabel("milliseconds per step")
        panel.set_ylim(bottom=0)
    finish(figure, report, path)


def draw_overhead(report: dict[str, Any], path: Path) -> None:
    """Draw the time of each part outside the model against the number of sequences."""
    found = report["overhead"]
    counts = [int(count) for count in found]
    parts = list(next(iter(found.values())))
    figure, panel = plt.subplots(figsize=(6.4, 4))
    for number, part in enumerate(parts):
        line(panel, {count: found[count][part] for count in found}, number, part)
    total = {c: {"median": sum(found[c][part]["median"] for part in parts)} for c in found}
    panel.plot(
        counts, [1e3 * point["median"] for point in total.values()], "k--", lw=1.2, label="sum"
    )
    panel.axhline(1, color="grey", lw=0.8, ls=":")
    panel.set_xscale("log", base=4)
    panel.set_yscale("log")
    panel.set_xticks(counts, [f"{count:,}" for count in counts])
    panel.minorticks_off()
    panel.set_yticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    panel.set_title("work outside the model (greedy, vocabulary of 256)", fontsize=10)
    panel.set_xlabel("sequences in the batch")
    panel.set_ylabel("milliseconds per step")
    panel.legend(frameon=False)
    finish(figure, report, path)


def line(
    panel: Axes,
    found: dict[str, dict[str, float]],
    colour: int,
    label: str | None,
    dashed: bool = False,
) -> None:
    """Draw the medians, and a band from the 10th to the 90th percentile."""
    values = [int(value) for value in found]
    marks = {
        key: [1e3 * point[key] for point in found.values()] for key in ("median", "p10", "p90")
    }
    style = "o--" if dashed else "o-"
    panel.plot(values, marks["median"], style, color=COLOURS[colour], ms=4, lw=1.6, label=label)
    panel.fill_between(values, marks["p10"], marks["p90"], color=COLOURS[colour], alpha=0.15, lw=0)


def finish(figure: Any, report: dict[str, Any], path: Path) -> None:  # noqa: ANN401 - untyped
    """Add the machine and the date to the chart, and save the chart."""
    facts = report["machine"]
    for panel in figure.axes:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.text(
        0.01,
        0.01,
        f"{facts['processor']}, {facts['clock']}; "
        f"median and 10th to 90th percentile; {facts['date']}",
        fontsize=7,
        color="dimgrey",
    )
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
