"""The run directory: what a training run leaves behind, and how it is found again.

config.json, stop.json, command.txt, plan.txt (the tree), plan.py (the text), versions.json,
progress.csv, result.json (a line per iteration), TensorBoard events, and checkpoints/, in which
each has the number of its iteration: the newest ones, and the best one by a score.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import math
import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.data.checkpoint import (
    CheckpointError,
    is_checkpoint,
    read_manifest,
    remove_checkpoint,
)
from flowrl.settings import ConfigError
from flowrl.trainer.metric_names import flatten_result, metric_value

CHECKPOINTS = "checkpoints"
_CODE = "__code__"  # marks a setting that was code: the plan file has it


def _plain(value: Any) -> Any:
    """A setting as JSON; of code only where it was defined."""
    if hasattr(value, "items"):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    place = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', repr(value))}"
    return {_CODE: place}


def _finite(value: Any) -> Any:
    """The value with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunDirectory:
    """Writes a run's files. Rows are flushed as they come; one process at a time.

    Raises:
        ConfigError: the directory cannot be made, is in use, or holds something else.
    """

    def __init__(self, path: Path, resume: bool = False):
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not resume:
                self._check_free()
            self._lock = os.open(path, os.O_RDONLY)  # held while the run lasts
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = self._rows() if resume else []
            self._results = open(path / ".result.json", "w")  # noqa: SIM115
            self._progress = open(path / ".progress.csv", "w", newline="")  # noqa: SIM115
        except BlockingIOError as error:
            raise ConfigError(f"run_dir: {path} is in use by another process") from error
        except OSError as error:
            raise ConfigError(f"run_dir: cannot write {path}: {error.strerror}") from error
        self._said_full = False
        self._columns: list[str] = []
        self._events: Any = None
        for result in before:
            self._write_files(result)
        for name in ("result.json", "progress.csv"):
            os.replace(path / f".{name}", path / name)

    def _check_free(self) -> None:
        """A run that got nowhere may be written over; anything else is left alone."""
        if (self.path / "config.json").exists():
            if checkpoints_of(self.path):
                raise ConfigError(
                    f"run_dir: {self.path} holds a run already: flowrl resume {self.path}"
                )
        elif any(self.path.iterdir()):
            raise ConfigError(f"run_dir: {self.path} is not empty and holds no run: take another")

    def _rows(self) -> list[dict[str, Any]]:
        """The results so far; a line that was cut short by a crash is left out."""
        rows = []
        file = self.path / "result.json"
        for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
        return rows

    def save(self, algorithm: Any, result: dict[str, Any] | None = None) -> Path | None:
        """Write a checkpoint, and let go of those that are not to be kept. A run goes on without
        one where the disk takes none: that is said once.

        Args:
            result: the newest one, for the score.
        """
        config = algorithm.config
        path = self.path / CHECKPOINTS / f"{algorithm.iteration:06d}"
        score = None
        if config.checkpoint_score_attribute is not None and result is not None:
            score = metric_value(result, config.checkpoint_score_attribute)
        try:
            algorithm.save(path, score=score)
        except OSError as error:
            if not self._said_full:
                print(
                    f"flowrl: NO CHECKPOINT: {path} cannot be written: {error}. Training goes on; "
                    "the last checkpoint stays as it is. This is said once.",
                    file=sys.stderr,
                    flush=True,
                )
            self._said_full = True
            return None
        self._prune(config)
        return path

    def _prune(self, config: Any) -> None:
        there = checkpoints_of(self.path)
        kept = set(there[-config.checkpoint_num_to_keep :])
        best = best_of(there, config.checkpoint_score_order)
        for path in there:
            if path not in kept and path != best:
                remove_checkpoint(path)

    def describe(
        self, config: Any, command: list[str], tree: str, plan: Path | None, stop: dict[str, Any]
    ) -> None:
        """Write what repeats the run."""
        import flowrl

        versions = {"flowrl": flowrl.__version__, "python": platform.python_version()}
        for name in ("torch", "numpy", "gymnasium"):
            versions[name] = str(__import__(name).__version__)
        files = {
            "config.json": json.dumps(_plain(config), indent=1),
            "command.txt": shlex.join(command) + "\n",
            "stop.json": json.dumps(stop, indent=1),
            "plan.txt": tree + "\n",
            **({} if plan is None else {"plan.py": plan.read_text()}),
            "versions.json": json.dumps(versions, indent=1),
        }
        for name, text in files.items():
            (self.path / name).write_text(text)

    def replace_plan(self, config: Any, tree: str, plan: Path) -> None:
        """The run goes on with another plan."""
        (self.path / "plan.py").write_text(plan.read_text())
        (self.path / "plan.txt").write_text(tree + "\n")
        (self.path / "config.json").write_text(json.dumps(_plain(config), indent=1))

    def last_until(self, iteration: int) -> dict[str, Any] | None:
        """The last result up to an iteration."""
        kept = [row for row in self._rows() if row.get("training_iteration", 0) <= iteration]
        return kept[-1] if kept else None

    def forget_after(self, iteration: int) -> None:
        """Take the results out that came after the checkpoint that the run goes on from, and the
        checkpoints: they come again."""
        kept = [row for row in self._rows() if row.get("training_iteration", 0) <= iteration]
        for file in (self._results, self._progress):
            file.seek(0)
            file.truncate()
        self._columns = []
        for row in kept:
            self._write_files(row)
        for path in checkpoints_of(self.path):
            if int(path.name) > iteration:
                remove_checkpoint(path)

    def write(self, result: dict[str, Any]) -> None:
        """Add one iteration's result to result.json, progress.csv and TensorBoard."""
        if self._events is None:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(self.path), write_to_disk=True)
        for name, value in self._write_files(result).items():
            if isinstance(value, (int, float)) and value == value:
                self._events.add_scalar(name, value, result["timesteps_total"])

    def _write_files(self, result: dict[str, Any]) -> dict[str, Any]:
        self._results.write(json.dumps(_finite(result), allow_nan=False) + "\n")
        self._results.flush()
        row = dict(flatten_result(result))
        writer = csv.writer(self._progress)
        if not self._columns:
            self._columns = list(row)
            writer.writerow(self._columns)
        writer.writerow([row.get(column, "") for column in self._columns])
        self._progress.flush()
        return row

    def close(self) -> None:
        self._results.close()
        self._progress.close()
        os.close(self._lock)
        if self._events is not None:
            self._events.close()


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoints of a run that were written to the end, oldest first."""
    folder = path / CHECKPOINTS
    found = [one for one in folder.iterdir() if one.name.isdecimal()] if folder.is_dir() else []
    return sorted(one for one in found if (one / "manifest.json").exists())


def best_of(checkpoints: list[Path], order: str = "max") -> Path | None:
    """The one with the best score; None where none has any."""
    scores = {}
    for path in checkpoints:
        with contextlib.suppress(CheckpointError):
            score = read_manifest(path).get("score")
            if score is not None and math.isfinite(score):
                scores[path] = score if order == "max" else -score
    return max(scores, key=scores.__getitem__, default=None)


def newest_checkpoint(path: Path) -> Path:
    """The checkpoint that a run goes on from.

    Raises:
        ConfigError: this run has left none.
    """
    there = checkpoints_of(path)
    if not there:
        raise ConfigError(
            f"{path}: this run has left no checkpoint to go on from: start it again (it may be "
            "written over)"
        )
    return there[-1]


def last_good_checkpoint(path: Path, before: Path) -> Path | None:
    """The newest whole checkpoint of a run before one that is damaged."""
    older = [one for one in checkpoints_of(path) if one < before]
    return next((one for one in reversed(older) if is_checkpoint(one)), None)


def default_run_dir(plan: str, env: Any) -> Path:
    """runs/<plan>-<env>-<time>, new."""
    name = env if isinstance(env, str) else getattr(env, "__name__", "env")
    name = re.sub(r"[^\w.-]+", "-", name).strip("-")
    stem = f"{Path(plan).stem}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


def read_goal(path: Path) -> tuple[list[str], dict[str, Any]]:
    """The command that started a run, and its stop rules.

    Raises:
        ConfigError: the files are not there or were damaged.
    """
    try:
        command = shlex.split((path / "command.txt").read_text())
        return command, dict(json.loads((path / "stop.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: its command or its stop rules cannot be read: {error}"
        ) from None


def _has_code(value: Any) -> bool:
    """Whether a saved setting is code, or has some in it."""
    if isinstance(value, dict):
        return set(value) == {_CODE} or any(map(_has_code, value.values()))
    return isinstance(value, list) and any(map(_has_code, value))


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a run, but those that were code.

    Raises:
        ConfigError: this is no run directory, or config.json was damaged.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} is no run directory: it has no config.json")
    try:
        saved = json.loads(file.read_text())
        return {name: value for name, value in saved.items() if not _has_code(value)}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: not the settings of a run ({error})") from error
