"""RunData: the files of a run directory as the values that the page shows."""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.data.checkpoint import list_checkpoints
from flowrl.data.json_text import parse_json
from flowrl.errors import ConfigError
from flowrl.monitoring.activity import Activity
from flowrl.trainer.metric_names import flatten_result
from flowrl.trainer.runs.activity_log import FILE as ACTIVITY_FILE
from flowrl.trainer.runs.formatting import format_count
from flowrl.trainer.runs.saved_run import is_in_use, read_config, read_events
from flowrl.web.growing_file import GrowingFile

MAX_POINTS = 1000  # of a curve
MAX_HISTORY = 300  # measurements of the operators over time
MAX_ROWS = 50  # of the table of results
MAX_LAG_RESULTS = 200  # results that the histogram of lags is about
TABLE = (
    "training_iteration", "timesteps_total", "episode_reward_mean", "episode_len_mean",
    "time_total_s", "timers/env_steps_per_s",
)  # fmt: skip
_ENDS = ("ended", "failed", "killed")  # kinds of events
_EVENT_COUNTERS = {  # counter -> kind and text of an event
    "num_shard_restarts": ("restart", "worker restart"),
    "num_learner_restarts": ("restart", "learner restart"),
    "num_env_steps_dropped": ("dropped", "dropped env step"),
    "num_shards_failed": ("worker", "permanent worker failure"),
}


class RunData:
    """The data of a run directory. `update` reads the lines that were appended since its last call.

    Args:
        path: the run directory.

    Attributes:
        name: its name on the page; see `name_runs`.

    Raises:
        ConfigError: the path is not a run directory.
    """

    def __init__(self, path: Path):
        self.path, self.name = path, path.resolve().name
        self.config = read_config(path)
        self._result_file = GrowingFile(path / "result.json")
        self._activity_file = GrowingFile(path / ACTIVITY_FILE)
        self._activities: list[Activity] = []
        self._clear()

    def _clear(self) -> None:
        self._num_results = 0
        self._columns: dict[str, array[float]] = {}
        self._last_result: dict[str, Any] = {}
        self._lags: list[list[int]] = []

    def update(self) -> None:
        """Read the settings and new lines; if a resumed run has replaced a file, read it from the
        start."""
        with suppress(ConfigError):  # the run was deleted: show its last settings
            self.config = read_config(self.path)
        replaced, lines = self._result_file.read()
        if replaced:
            self._clear()
        for line in lines:
            with suppress(ValueError, TypeError, AttributeError):
                self._add(parse_json(line))
        replaced, lines = self._activity_file.read()
        if replaced:
            self._activities.clear()
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):
                self._activities.append(Activity.from_json(parse_json(line)))

    def _add(self, result: dict[str, Any]) -> None:
        lags = result.get("hist_stats", {}).get("policy_lags")
        metrics = list(flatten_result(result))
        self._last_result = result
        if lags:
            self._lags = [*self._lags[-MAX_LAG_RESULTS + 1 :], list(lags)]
        for name, value in metrics:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                column = self._columns.setdefault(name, array("d"))
                column.extend([math.nan] * (self._num_results - len(column)))
                column.append(value)
        self._num_results += 1

    def changed(self) -> float:
        """Return when the newest result was written, or else the settings [s since 1970]."""
        for name in ("result.json", "config.json"):
            path = self.path / name
            if path.exists():
                return path.stat().st_mtime
        return 0.0

    def metrics(self) -> list[str]:
        """Return the names of all metrics with values."""
        return sorted(self._columns)

    def curve(self, metric: str, most: int = MAX_POINTS) -> dict[str, list[float]]:
        """Return env steps and finite values of a metric, at most `most` of them, with five
        digits."""
        steps = self._columns.get("timesteps_total", array("d"))
        values = self._columns.get(metric, array("d"))
        points = [(x, y) for x, y in zip(steps, values, strict=False) if math.isfinite(y + x)]
        points = _thinned(points, most)
        return {"x": [x for x, _ in points], "y": [float(f"{y:.5g}") for _, y in points]}

    def to_json(self, metrics: Iterable[str] = (), most: int = MAX_POINTS) -> dict[str, Any]:
        """Return everything that the page shows of the run.

        Args:
            metrics: metrics whose curves are included.
            most: points of each curve.
        """
        running = is_in_use(self.path)
        self.update()
        activities = self._activities
        newest = activities[-1] if activities else None
        result = self._last_result
        events = self._events(activities, running)
        return {
            "name": self.name,
            "running": running,
            "end": _end(events),
            "iteration": result.get("training_iteration", 0),
            "env_steps": result.get("timesteps_total", 0),
            "return": _finite(result.get("episode_reward_mean")),
            "diagnosis": newest.diagnosis if newest else self._diagnosis(running),
            "metrics": self.metrics(),
            "curves": {metric: self.curve(metric, most) for metric in metrics},
            "activity": _shown(newest.to_json()) if newest else None,
            "history": _history(activities),
            "lags": self._lag_counts(),
            "counters": _shown(result.get("counters", {})),
            "workers": {
                "healthy": result.get("num_healthy_workers"),
                "restarts": result.get("num_remote_worker_restarts"),
            },
            "table": self._table(),
            "config": _shown(self.config),
            "command": _text(self.path / "command.txt"),
            "versions": _text(self.path / "versions.json"),
            "plan": _text(self.path / "plan.txt"),
            "source": _text(self.path / "plan.py"),
            "events": events,
        }

    def _diagnosis(self, running: bool) -> str:
        """Return the diagnosis of the newest result; that of a short run only while it trains,
        because it announces a measurement."""
        text = str(self._last_result.get("diagnosis") or "")
        return "" if text.startswith("Nothing was measured") and not running else text

    def _lag_counts(self) -> list[list[int]]:
        """Return (lag in updates, number of fragments), of the last results."""
        return [[lag, n] for lag, n in sorted(Counter(itertools.chain(*self._lags)).items())]

    def _table(self) -> dict[str, Any]:
        names = [name for name in TABLE if name in self._columns]
        first = max(0, self._num_results - MAX_ROWS)
        rows = [
            [
                _finite(self._columns[name][i]) if i < len(self._columns[name]) else None
                for name in names
            ]
            for i in range(self._num_results - 1, first - 1, -1)
        ]
        return {"columns": names, "rows": rows}

    def _events(self, activities: Sequence[Activity], running: bool) -> list[dict[str, Any]]:
        """Return what happened to the run, the newest first."""
        events = read_events(self.path, running)
        for checkpoint in list_checkpoints(self.path):
            with suppress(FileNotFoundError):  # the run has removed it in the meantime
                events.append(
                    {
                        "time": checkpoint.stat().st_mtime,
                        "kind": "checkpoint",
                        "text": f"checkpoints/{checkpoint.name}",
                    }
                )
        for activity in activities:
            for counter, (kind, text) in _EVENT_COUNTERS.items():
                if number := activity.counters.get(counter, 0):
                    events.append(
                        {"time": activity.time, "kind": kind, "text": format_count(number, text)}
                    )
        return sorted(events, key=lambda event: event["time"])[::-1]


def _shown(value: Any) -> Any:
    """Return a JSON value with texts instead of infinity and NaN, which browsers do not read."""
    if isinstance(value, dict):
        return {key: _shown(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _end(events: Iterable[dict[str, Any]]) -> str:
    """Return how a run ended: "killed", "failed: " with the error, or "ended".

    Args:
        events: the newest first.
    """
    last = next((event for event in events if event["kind"] in _ENDS), None)
    if last is None:
        return "ended"
    return f"failed: {last['text']}" if last["kind"] == "failed" else str(last["kind"])


def _history(activities: Sequence[Activity]) -> dict[str, Any]:
    """Return the figures of each stage of the newest plan over time, by its id; None where an
    earlier plan of the run had another stage."""
    shown = _thinned(list(activities), MAX_HISTORY)
    by_key = [{(stage.id, stage.title): stage for stage in one.stages} for one in shown]
    stages: dict[str, dict[str, list[float | None]]] = {}
    for key in by_key[-1] if by_key else ():
        found = [stages_of_one.get(key) for stages_of_one in by_key]
        stages[str(key[0])] = {
            name: [None if stage is None else getattr(stage, name) for stage in found]
            for name in ("busy", "waiting", "blocked")
        }
    return {"time": [activity.time for activity in shown], "stages": stages}


def name_runs(runs: Sequence[RunData]) -> None:
    """Name each run by its folder. If several folders have the same name, name these runs by the
    paths from the common parent of the folders."""
    by_name: dict[str, list[tuple[RunData, Path]]] = {}
    for run in runs:
        path = run.path.resolve()
        by_name.setdefault(path.name, []).append((run, path))
    for name, same in by_name.items():
        parent = os.path.commonpath([path for _, path in same])
        for run, path in same:
            run.name = str(path.relative_to(parent)) if len(same) > 1 else name


def _thinned(values: list[Any], max_count: int) -> list[Any]:
    """Return at most `max_count` of the values, with the first and the last one."""
    if len(values) <= max_count:
        return values
    step = len(values) / (max_count - 1)
    return [values[int(i * step)] for i in range(max_count - 1)] + values[-1:]


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.is_file() else ""


def _finite(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
