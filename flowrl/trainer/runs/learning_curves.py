"""Learning curves: a metric of several runs over env steps, with mean and interval over seeds."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.trainer.metric_names import flatten_result, metric_hint, metric_value
from flowrl.trainer.plan_files import plan_named
from flowrl.trainer.runs.saved_run import (
    read_command,
    read_config,
    read_results,
    read_setup,
)

log = logging.getLogger("flowrl")

RETURN = "episode_reward_mean"
RETURN_OF_EVALUATION = f"evaluation/{RETURN}"
NUM_POINTS = 200  # of the mean curve of a group
MAX_NAMED = 3  # settings in the name of a curve
MAX_LENGTH = 60  # characters of a setting in the name of a curve
NUM_RESAMPLES = 1000  # of the bootstrap
_OF_ONE_RUN = ("seed", "run_dir", "log_config")  # settings in which runs of one group may differ


@dataclass(frozen=True)
class Curve:
    """The runs with the same settings but for their seeds.

    Attributes:
        name: their algorithm and environment, and what distinguishes them from other groups.
        runs: (env steps, values) of each run, arrays [results].
        steps, mean: the mean over the runs, arrays [NUM_POINTS], where all of them have values.
        low, high: 95 % bootstrap interval of the mean; equal to it with one run.
    """

    name: str
    runs: list[tuple[np.ndarray, np.ndarray]]
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def find_runs(paths: Sequence[Path], warn: bool = True) -> list[Path]:
    """Return run directories, each once: the paths themselves, or the runs in a folder of runs.

    Damaged runs in a folder are left out.

    Args:
        paths: run directories, or folders of them.
        warn: log a warning for each run that is left out.

    Raises:
        ConfigError: a path is neither, or its only runs are damaged.
    """
    found: list[Path] = []
    for path in paths:
        inner = sorted(file.parent for file in path.glob("*/config.json"))
        if (path / "config.json").exists():
            found.append(path)
        elif inner:
            found += _intact(inner, warn)
        else:
            read_config(path)  # raises: it is not a run directory
    return list({path.resolve(): path for path in found}.values())


def _intact(runs: Sequence[Path], warn: bool) -> list[Path]:
    """Return the runs whose settings can be read.

    Raises:
        ConfigError: there is none.
    """
    errors: dict[Path, ConfigError] = {}
    for run in runs:
        try:
            read_config(run)
        except ConfigError as error:
            errors[run] = error
    if len(errors) == len(runs):
        raise errors[runs[0]]
    if warn:
        for reason in errors.values():
            log.warning("left out: %s", reason)
    return [run for run in runs if run not in errors]


def learning_curves(run_dirs: Sequence[Path], metric: str = RETURN) -> list[Curve]:
    """Return a curve for each group of runs with the same settings but for their seeds.

    If the runs of a group have no env steps in common, each run is a curve.

    Args:
        run_dirs: the run directories.
        metric: path of the metric in a result, such as `learners/default_policy/kl`.

    Raises:
        ConfigError: a path is not a run directory, or no run has finite values of the metric.
    """
    groups: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for run_dir in run_dirs:
        settings = read_config(run_dir)
        key = {name: value for name, value in settings.items() if name not in _OF_ONE_RUN}
        with suppress(ConfigError):  # the manifest is missing or damaged
            key["algorithm"] = read_setup(run_dir)["algorithm"]
        # seeds in the texts of PolicySpecs are those of one run, too
        if policies := key.pop("policies", None):
            key["policies"] = re.sub(r"\bseed=\d+,? ?", "", json.dumps(policies))
        text = json.dumps(key, sort_keys=True)
        groups.setdefault(text, []).append((run_dir, key))
    all_settings = [runs[0][1] for runs in groups.values()]
    curves = []
    without: list[Path] = []
    for runs in groups.values():
        all_points = {run_dir: _points(run_dir, metric) for run_dir, _ in runs}
        values = [points for points in all_points.values() if len(points[0])]
        without += [run_dir for run_dir, points in all_points.items() if not len(points[0])]
        if values:
            name = _name(runs[0][1], all_settings, runs[0][0])
            first, last = max(x[0] for x, _ in values), min(x[-1] for x, _ in values)
            groups_of_values = [values] if first <= last else [[one] for one in values]
            curves += [mean_curve(name, one) for one in groups_of_values]
    if not curves:
        results = [result for run_dir in run_dirs for result in read_results(run_dir)]
        known = list(
            dict.fromkeys(
                name
                for one in results
                for name, value in flatten_result(one)
                if isinstance(value, (int, float)) and math.isfinite(value)
            )
        )
        if metric == RETURN and RETURN_OF_EVALUATION not in known:
            raise ConfigError(
                "plot: these runs have no returns: no episode has ended, or they train on recorded "
                "experience without evaluations (--evaluation-interval). Name another metric, for "
                "example --metric learners/default_policy/total_loss"
            )
        hint = metric_hint(metric, known)
        raise ConfigError(f"plot: no result of these runs has a finite {metric!r}.{hint}")
    for run_dir in without:
        log.warning("left out: %s has no finite %r", run_dir, metric)
    return curves


def default_metric(run_dirs: Sequence[Path]) -> str:
    """Return the mean return of training; if the runs, such as offline ones, have only that of
    evaluations, this one."""
    for metric in (RETURN, RETURN_OF_EVALUATION):
        if any(len(_points(run_dir, metric)[0]) for run_dir in run_dirs):
            return metric
    return RETURN


def _plan_of(run_dir: Path, settings: dict[str, Any]) -> str:
    """Return the plan as the command names it, or the setting."""
    words: list[str] = []
    with suppress(ConfigError):  # command.txt is missing or damaged
        words = read_command(run_dir)
    others = (".yaml", ".yml")  # a file of runs, each with a plan of its own
    plans = [w for w in words[2:3] if not w.startswith("-") and not w.endswith(others)]
    if words[:2] == ["flowrl", "train"] and plans:
        return plan_named(plans[0]).removesuffix(".py")
    return str(settings.get("plan") or "").removesuffix(".py")


def _name(settings: dict[str, Any], others: list[dict[str, Any]], run_dir: Path) -> str:
    """Return plan and environment of a group, and its settings that other groups do not have; if
    these are many, the folder of its first run."""
    env = str(settings.get("env") or "")
    if re.fullmatch(r"[\w.]+:[\w.<>-]+", env):
        env = env.rpartition(":")[2]  # without the module of a class
    env = env if len(env) <= MAX_LENGTH else ""  # the text of an object
    name = " ".join(filter(None, (_plan_of(run_dir, settings), env)))
    differing = [
        f"{key}={value}"
        for key, value in settings.items()
        if key not in ("env", "plan") and any(other.get(key) != value for other in others)
    ]
    is_short = len(differing) <= MAX_NAMED and max(map(len, differing), default=0) <= MAX_LENGTH
    shown = ", ".join(differing) if is_short else run_dir.name
    return f"{name or 'run'}{', ' * bool(shown)}{shown}"


def _points(run_dir: Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return env steps and finite values of a metric."""
    points = [
        (result["timesteps_total"], value)
        for result in read_results(run_dir)
        if isinstance(value := metric_value(result, metric), (int, float)) and math.isfinite(value)
    ]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return steps, values


def mean_curve(name: str, runs: list[tuple[np.ndarray, np.ndarray]]) -> Curve:
    """Return the curve of a group of runs.

    Args:
        name: of the group.
        runs: (env steps, values) of each run, arrays [results].
    """
    first, last = max(steps[0] for steps, _ in runs), min(steps[-1] for steps, _ in runs)
    grid = np.linspace(first, last, NUM_POINTS)
    values = np.stack([np.interp(grid, steps, values) for steps, values in runs])
    mean = values.mean(0)
    chosen = np.random.default_rng(0).integers(len(runs), size=(NUM_RESAMPLES, len(runs)))
    means = values[chosen].mean(1)
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return Curve(name, runs, grid, mean, low, high)
