"""Draw learning curves with matplotlib (extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.trainer.runs.learning_curves import Curve

# distinguishable also with color vision deficiencies (Okabe and Ito)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw(curves: list[Curve], metric: str, output: Path) -> None:
    """Draw curves into a file, in the format of its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # no window system, whatever the user's settings are
    axes: Any = figure.add_subplot()
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        if len(curve.runs) == 1:
            axes.plot(*curve.runs[0], color=color, label=curve.name)
            continue
        for steps, values in curve.runs:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
        axes.plot(
            curve.steps, curve.mean, color=color, label=f"{curve.name} ({len(curve.runs)} runs)"
        )
    axes.set_xlabel("env steps")
    axes.set_ylabel(metric)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(output)
