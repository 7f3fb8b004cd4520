"""Scores over seeds, and the tables and drawings that show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, FiniteFloat

from flowrl.benchmark.rows import BenchmarkRow, benchmark_rows
from flowrl.errors import ConfigError
from flowrl.state_schema import Fields, Natural, check_state
from flowrl.trainer.runs.curve_drawing import draw_panels
from flowrl.trainer.runs.learning_curves import Curve, mean_curve

NUM_RESAMPLES = 10_000
_Point = Annotated[list[FiniteFloat], Field(min_length=2)]  # env steps, mean return, …
_RESULT: Fields = {
    "seed": Natural,
    "env_steps": Natural,
    "settings": str,
    "score": FiniteFloat,
    "seconds": Annotated[FiniteFloat, Field(ge=0)],
    "steps_to_threshold": Natural | None,
    "curve": Annotated[list[_Point], Field(min_length=1)],
}
LIBRARIES = {"flowrl": "", "sb3": " of SB3"}  # library -> what a table adds to the plan


def interquartile_mean(scores: Sequence[float]) -> float:
    """Return the mean of the scores without the lowest and the highest quarter.

    As in Agarwal et al. 2021 (arXiv 2108.13264), floor(n / 4) scores are left out at each end.
    """
    cut = len(scores) // 4
    ordered = np.sort(np.asarray(scores, np.float64))
    return float(ordered[cut : len(ordered) - cut].mean())


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the interquartile mean over runs."""
    rng = np.random.default_rng(0)
    samples = np.sort(rng.choice(np.asarray(scores, float), (NUM_RESAMPLES, len(scores))), axis=1)
    cut = len(scores) // 4
    means = samples[:, cut : len(scores) - cut].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def score_text(scores: Sequence[float]) -> str:
    """Return the interquartile mean of scores with its interval, as tables show it; without an
    interval if there are fewer than three scores."""
    if len(scores) < 3:
        return f"{interquartile_mean(scores):.1f}"
    low, high = interval(scores)
    return f"{interquartile_mean(scores):.1f} ({low:.1f} to {high:.1f})"


def read_result(path: Path) -> dict[str, Any]:
    """Return the result in a file.

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        check_state(result, _RESULT)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"benchmark: {path} contains no result: remove it to train again ({error})"
        ) from None
    return dict(result)


def read_results(row: BenchmarkRow, folder: Path, library: str = "flowrl") -> list[dict[str, Any]]:
    """Return the results of a row with a library, by seed, without those of other settings.

    Raises:
        ConfigError: see `read_result`.
    """
    results = [read_result(path) for path in row.result_files(folder, library)]
    return [result for result in results if row.has_current_settings(result, library)]


COLUMNS = (
    "environment", "plan", "env steps", "published scores", "score (95 % interval)",
    "worst, best seed", "env steps to threshold", "seconds", "seeds",
)  # fmt: skip


def cells(
    row: BenchmarkRow, results: Sequence[dict[str, Any]], library: str = "flowrl"
) -> list[str]:
    """Return the cells of a row of a table with the results of a library; see COLUMNS.

    `seconds` is the median duration of all runs; env steps to the threshold are the median over the
    runs that reached it, of those whose row had the same threshold.
    """
    start = [row.env, row.plan + LIBRARIES[library], f"{row.env_steps:,}", row.scores_text]
    if not results:
        return [*start, "not run", "", "", "", "0"]
    scores = [result["score"] for result in results]
    compared = [r for r in results if r.get("threshold", row.threshold) == row.threshold]
    reached = [r["steps_to_threshold"] for r in compared if r["steps_to_threshold"] is not None]
    threshold = ""
    if row.threshold is not None and compared:
        steps = f"{np.median(reached):,.0f}" if reached else "never"
        share = "" if len(reached) == len(compared) else f" ({len(reached)} of {len(compared)})"
        threshold = f"{row.threshold:g}: {steps}{share}"
    return [
        *start,
        score_text(scores),
        f"{min(scores):.1f}, {max(scores):.1f}",
        threshold,
        f"{np.median([result['seconds'] for result in results]):.0f}",
        str(len(results)),
    ]


def markdown(rows: Sequence[BenchmarkRow], folder: Path) -> str:
    """Return a table of rows in Markdown; rows of other libraries only with results."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for row in rows:
        for library in LIBRARIES:
            results = read_results(row, folder, library)
            if results or library == "flowrl":
                lines.append(cells(row, results, library))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def write_tables(tables: Path, folder: Path) -> None:
    """Write the tables and the learning curves of the rows that have results."""
    all_rows = benchmark_rows(tables)
    for table in dict.fromkeys(row.table for row in all_rows):
        rows = [row for row in all_rows if row.table == table and read_results(row, folder)]
        if rows:
            (folder / f"{table}.md").write_text(markdown(rows, folder), "utf-8")
            panels = [curves_of(row, folder) for row in rows]
            draw_panels(panels, "mean return", folder / f"{table}.svg")


def curves_of(row: BenchmarkRow, folder: Path) -> list[Curve]:
    """Return the learning curve of each library with results of a row."""
    curves = []
    for library, suffix in LIBRARIES.items():
        results = read_results(row, folder, library)
        runs = [np.array(result["curve"], float)[:, :2].T for result in results]
        if runs:
            name = f"{row.plan}{suffix} on {row.env}"
            curves.append(mean_curve(name, [(steps, values) for steps, values in runs]))
    return curves
