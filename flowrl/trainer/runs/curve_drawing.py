"""Draw learning curves with matplotlib (extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.trainer.runs.learning_curves import Curve

# distinguishable also with color vision deficiencies (Okabe and Ito)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MAX_COLUMNS = 3  # of panels


def draw(curves: list[Curve], metric: str, output: Path) -> None:
    """Draw curves into a file, in the format of its suffix."""
    draw_panels([curves], metric, output)


def draw_panels(panels: list[list[Curve]], metric: str, output: Path) -> None:
    """Draw groups of curves side by side into a file, in the format of its suffix."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(panels), MAX_COLUMNS)
    rows = -(-len(panels) // columns)
    width, height = (7, 4.2) if len(panels) == 1 else (4.2, 3)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)  # no window system, whatever the user's settings are
    for number, curves in enumerate(panels):
        _draw_curves(figure.add_subplot(rows, columns, number + 1), curves, metric)
    svg = output.suffix.lower() == ".svg"
    with rc_context({"svg.hashsalt": "flowrl"}):  # the same file from the same curves
        figure.savefig(output, metadata={"Date": None} if svg else None)


def _draw_curves(axes: Any, curves: list[Curve], metric: str) -> None:
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        name = curve.name.replace("$", r"\$")  # no formula
        name = f" {name}" if name.startswith("_") else name  # matplotlib leaves out "_name"
        if len(curve.runs) == 1:
            axes.plot(*curve.runs[0], color=color, label=name)
            continue
        for steps, values in curve.runs:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
        axes.plot(curve.steps, curve.mean, color=color, label=f"{name} ({len(curve.runs)} runs)")
    axes.set_xlabel("env steps")
    axes.set_ylabel(metric)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
