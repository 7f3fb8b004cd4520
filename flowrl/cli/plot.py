"""`flowrl plot RUN_DIR …`: draw learning curves as SVG, PNG or PDF."""

from __future__ import annotations

from pathlib import Path

from flowrl.cli.arguments import Parser, add_runs, file_path
from flowrl.errors import ConfigError, check_installed
from flowrl.trainer.runs.curve_drawing import draw
from flowrl.trainer.runs.formatting import format_count
from flowrl.trainer.runs.learning_curves import default_metric, find_runs, learning_curves

FORMATS = (".svg", ".png", ".pdf")


def plot_command(arguments: list[str]) -> int:
    """Run the command; return the exit code.

    Raises:
        ConfigError: matplotlib is not installed, a path is no run, or the file cannot be written.
    """
    parser = Parser(
        prog="flowrl plot",
        description="Draw learning curves. Runs that differ only in their seeds are one curve: the "
        "mean with its 95 % bootstrap interval.",
    )
    add_runs(parser)
    parser.add_argument(
        "-o", "--output", type=file_path, default=Path("learning_curve.svg"),
        help="file: .svg, .png or .pdf (default: learning_curve.svg)",
    )  # fmt: skip
    parser.add_argument(
        "--metric",
        help="path a/b/c of the metric in a result (default: episode_reward_mean; for offline "
        "training evaluation/episode_reward_mean)",
    )
    options = parser.parse_args(arguments)
    output: Path = options.output
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot: --output must end in {', '.join(FORMATS)}, got {output.name}")
    runs = find_runs(options.runs)
    metric = options.metric or default_metric(runs)
    curves = learning_curves(runs, metric)
    check_installed("matplotlib", "flowrl plot", extra="plot")
    try:
        draw(curves, metric, output)
    except OSError as error:
        raise ConfigError(f"plot: cannot write {output}: {error.strerror}") from error
    for curve in curves:
        count = format_count(len(curve.runs), "run")
        print(f"{curve.name}: {count}, {curve.mean[-1]:.4g} after {curve.steps[-1]:,.0f} env steps")
    print(f"drawn: {output}")
    return 0
