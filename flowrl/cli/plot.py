"""`flowrl plot RUN_DIR …`: draw learning curves as SVG, PNG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.cli.arguments import Parser, add_runs
from flowrl.errors import check_installed
from flowrl.settings import ConfigError
from flowrl.trainer.runs.learning_curves import Curve, find_runs, learning_curves

FORMATS = (".svg", ".png", ".pdf")
# distinguishable also with color vision deficiencies (Okabe and Ito)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def plot_command(arguments: list[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        ConfigError: matplotlib is not installed, a path is no run, or the file cannot be written.
    """
    parser = Parser(
        prog="flowrl plot",
        description="Draw learning curves. Runs that differ only in their seeds are one curve: the "
        "mean with its 95 %% bootstrap interval.",
    )
    add_runs(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("learning_curve.svg"),
        help="file: .svg, .png or .pdf (default: learning_curve.svg)",
    )  # fmt: skip
    parser.add_argument(
        "--metric",
        default="episode_reward_mean",
        help="path a/b/c of the metric in a result (default: episode_reward_mean)",
    )
    options = parser.parse_args(arguments)
    output: Path = options.output.expanduser()
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot: --output must end in {', '.join(FORMATS)}, got {output.name}")
    curves = learning_curves(find_runs(options.runs), options.metric)
    check_installed("matplotlib", "flowrl plot", extra="plot")
    try:
        draw(curves, options.metric, output)
    except OSError as error:
        raise ConfigError(f"plot: cannot write {output}: {error.strerror}") from error
    for curve in curves:
        runs = f"{len(curve.runs)} run{'' if len(curve.runs) == 1 else 's'}"
        print(f"{curve.name}: {runs}, {curve.mean[-1]:.4g} after {curve.steps[-1]:,.0f} env steps")
    print(f"drawn: {output}")
    return 0


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
