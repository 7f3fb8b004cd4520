"""The rows of the benchmark: plans, environments and published scores."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from flowrl.errors import ConfigError
from flowrl.setting_values import nearest
from flowrl.trainer.plan_files import plan_path
from flowrl.trainer.run_files import load_yaml
from flowrl.trainer.tuned_examples import tuned_example, tuned_folder


@dataclass(frozen=True)
class BenchmarkRow:
    """A plan and an environment that it is trained in, with the settings of its tuned example.

    Attributes:
        table: name of the table.
        plan, env: of the tuned example.
        env_steps: length of each run.
        published_scores: source -> published score, the mean return of evaluation episodes.
        threshold: mean return of 100 training episodes; the result reports when a run first reaches
            it. None reports nothing.
        explore: sample actions in the evaluation instead of taking the best ones.
    """

    table: str
    plan: str
    env: str
    env_steps: int
    published_scores: dict[str, float]
    threshold: float | None = None
    explore: bool = False

    @property
    def name(self) -> str:
        """The name on the command line, such as `ppo/CartPole-v1`."""
        return f"{self.plan}/{self.env}"

    @property
    def scores_text(self) -> str:
        """The published scores with their sources, such as `SB3 zoo -74`."""
        return "; ".join(f"{source} {value:g}" for source, value in self.published_scores.items())

    def file_stem(self, library: str = "flowrl") -> str:
        """Return the name in files and folders, such as `ppo-ALE-Pong-v5`; with the name of another
        library before it."""
        stem = self.name.replace("/", "-")
        return stem if library == "flowrl" else f"{library}-{stem}"

    def file_name(self, seed: int, library: str = "flowrl") -> str:
        """Return the name of the file with the result of a seed."""
        return f"{self.file_stem(library)}-seed{seed}.json"

    def settings(self, library: str = "flowrl") -> dict[str, Any]:
        """Return the settings with which a library is trained: those of the tuned example ({}
        without one), or those of another library in `tuned_examples/<library>.yaml`.

        Raises:
            ConfigError: another library has none for the row.
        """
        if library == "flowrl":
            example = tuned_example(self.plan, self.env)
            return {} if example is None else example.settings
        file = tuned_folder() / f"{library}.yaml"
        shipped: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8"))
        if self.name not in shipped:
            raise ConfigError(
                f"benchmark: --against {library} has no settings for {self.name}; those of "
                f"{', '.join(shipped)} are in tuned_examples/{library}.yaml"
            )
        return shipped[self.name]

    def can_train_with(self, library: str) -> bool:
        """Return whether a library has settings for the row."""
        try:
            self.settings(library)
        except ConfigError:
            return False
        return True

    def checksum(self, library: str = "flowrl") -> str:
        """Return a checksum of the length of the training, the settings, `explore` and a plan file.
        It is in a result, so that results of other settings are noticed."""
        trained_with = [self.env_steps, self.explore, self.settings(library)]
        text = json.dumps(trained_with, sort_keys=True, default=str).encode()
        if library == "flowrl" and self.plan.endswith(".py"):
            text += plan_path(self.plan).read_bytes()
        return hashlib.sha256(text).hexdigest()[:12]

    def has_current_settings(self, result: dict[str, Any], library: str = "flowrl") -> bool:
        """Return whether a result is of the row's present settings."""
        return bool(result["settings"] == self.checksum(library))

    def result_files(self, folder: Path, library: str = "flowrl") -> list[Path]:
        """Return the files with the results of a library, by seed."""
        found = {
            int(number): path
            for path in folder.glob(f"{self.file_stem(library)}-seed*.json")
            if (number := path.stem.rpartition("-seed")[2]).isdecimal()
        }
        return [found[number] for number in sorted(found)]


def shipped_tables() -> Path:
    """Return the file with the shipped tables."""
    return tuned_folder() / "benchmark.yaml"


def benchmark_rows(file: Path) -> list[BenchmarkRow]:
    """Return the rows of a file: table -> list of the fields of BenchmarkRow.

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    tables = load_yaml(file)
    if not isinstance(tables, dict) or not all(isinstance(rows, list) for rows in tables.values()):
        raise ConfigError(f"benchmark: {file} must contain tables: name -> list of rows")
    found: list[BenchmarkRow] = []
    for table, rows in tables.items():
        if not isinstance(table, str) or not table or "/" in table or table.startswith("."):
            raise ConfigError(
                f"benchmark: {file}: the name of a table must be a plain word, got {table!r}"
            )
        for number, row in enumerate(rows, 1):
            found.append(_row_of(table, row, f"benchmark: {file}: row {number} of {table!r}"))
    if not found:
        raise ConfigError(f"benchmark: {file} contains no rows")
    names = [one.name for one in found]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ConfigError(f"benchmark: {file}: there are several rows {repeated[0]}")
    return found


def check_settings(rows: Sequence[BenchmarkRow], library: str) -> None:
    """Raise ConfigError if a library has settings for none of the rows."""
    if not any(row.can_train_with(library) for row in rows):
        rows[0].settings(library)  # raises the error


def _row_of(table: str, entry: Any, where: str) -> BenchmarkRow:
    """Return the row with the fields in `entry`; messages begin with `where`.

    Raises:
        ConfigError: a field is missing, unknown or invalid.
    """
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a mapping, got {entry!r}")
    for name in entry:
        if name not in _FIELDS:
            raise ConfigError(f"{where}: unknown field {name!r}.{nearest(str(name), [*_FIELDS])}")
    missing = [
        field.name
        for field in fields(BenchmarkRow)
        if field.default is MISSING and field.name not in {"table", *entry}
    ]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    for name, value in entry.items():
        is_valid, expected = _FIELDS[name]
        if not is_valid(value):
            raise ConfigError(f"{where}: {name} must be {expected}, got {value!r}")
    try:
        plan_path(entry["plan"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return BenchmarkRow(table, **{**entry, "env_steps": int(entry["env_steps"])})


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


# fields of a row in a file: name -> (check of its value, description of valid values)
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "plan": (lambda value: isinstance(value, str), "a string"),
    "env": (lambda value: isinstance(value, str), "a string"),
    "env_steps": (
        lambda value: _is_number(value) and value >= 1 and value == int(value),
        "an int of at least 1",
    ),
    "published_scores": (
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "a mapping: source -> score",
    ),
    "threshold": (lambda value: value is None or _is_number(value), "a number"),
    "explore": (lambda value: isinstance(value, bool), "true or false"),
}


def rows_named(names: Sequence[str], file: Path) -> list[BenchmarkRow]:
    """Return the rows with these names or in tables with these names; all rows if `names` is empty.

    Raises:
        ConfigError: a name is unknown; see `benchmark_rows`.
    """
    rows = benchmark_rows(file)
    known = list(dict.fromkeys([*(row.table for row in rows), *(row.name for row in rows)]))
    for name in names:
        if name not in known:
            of_file = "" if file == shipped_tables() else f" --tables {file}"
            raise ConfigError(
                f"benchmark: there is no table or row {name!r}.{nearest(name, known)} "
                f"`flowrl benchmark --list{of_file}` shows them"
            )
    return [row for row in rows if not names or {row.table, row.name} & set(names)]
