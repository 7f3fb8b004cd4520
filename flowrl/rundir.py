"""The run directory: what a training run leaves behind, and how it is found again.

config.json, stop.json, command.txt, plan.txt (the tree), plan.py (the text), versions.json,
progress.csv, result.json (a line per iteration), TensorBoard events, checkpoint/.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import math
import os
import platform
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.policies.config import ConfigError

_CODE = "code"  # marks a setting that was code: the plan file has it


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`a/b/c` -> leaf for every scalar of a nested dict."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float, str, bool)) or value is None:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    """A setting as JSON; of code only where it was defined."""
    if hasattr(value, "items"):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
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
            self.last = before[-1] if before else None  # the last result of a resumed run
            self._results = open(path / ".result.json", "w")  # noqa: SIM115
            self._progress = open(path / ".progress.csv", "w", newline="")  # noqa: SIM115
        except BlockingIOError as error:
            raise ConfigError(f"run_dir: {path} is in use by another process") from error
        except OSError as error:
            raise ConfigError(f"run_dir: cannot write {path}: {error.strerror}") from error
        self._columns: list[str] = []
        self._events: Any = None
        for result in before:
            self._write_files(result)
        for name in ("result.json", "progress.csv"):
            os.replace(path / f".{name}", path / name)

    def _check_free(self) -> None:
        """A run that got nowhere may be written over; anything else is left alone."""
        if (self.path / "config.json").exists():
            if self.checkpoint.exists():
                raise ConfigError(f"run_dir: {self.path} holds a run already: --resume {self.path}")
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

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def describe(
        self, config: Any, command: list[str], tree: str, plan: Path, stop: dict[str, Any]
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
            "plan.py": plan.read_text(),
            "versions.json": json.dumps(versions, indent=1),
        }
        for name, text in files.items():
            (self.path / name).write_text(text)

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
        row = dict(flat(result))
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


def default_run_dir(plan: str, env: Any) -> Path:
    """runs/<plan>-<env>-<time>, new."""
    name = env if isinstance(env, str) else getattr(env, "__name__", "env")
    stem = f"{Path(plan).stem}-{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
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
