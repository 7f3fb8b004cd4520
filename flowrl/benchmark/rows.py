"""The rows of the benchmark: plans, environments and known scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from flowrl.setting_values import nearest
from flowrl.settings import ConfigError
from flowrl.trainer.tuned_examples import tuned_example, tuned_folder


@dataclass(frozen=True)
class BenchmarkRow:
    """A plan and an environment that it is trained in, with the settings of its tuned example.

    Attributes:
        table: name of the table.
        plan, env: of the tuned example.
        env_steps: length of each run.
        anchors: source -> known score, the mean return of evaluation episodes.
        threshold: mean return of 100 training episodes; the result reports when a run first reaches
            it. None reports nothing.
        explore: sample actions in the evaluation instead of taking the best ones.
    """

    table: str
    plan: str
    env: str
    env_steps: int
    anchors: dict[str, float]
    threshold: float | None = None
    explore: bool = False

    @property
    def name(self) -> str:
        """The name on the command line, such as `ppo/CartPole-v1`."""
        return f"{self.plan}/{self.env}"

    @property
    def known_scores(self) -> str:
        """The known scores with their sources, such as `SB3 zoo -74`."""
        return "; ".join(f"{source} {value:g}" for source, value in self.anchors.items())

    def file_stem(self, library: str = "flowrl") -> str:
        """Return the name in files and folders, such as `ppo-ALE-Pong-v5`; with the name of another
        library before it."""
        stem = self.name.replace("/", "-")
        return stem if library == "flowrl" else f"{library}-{stem}"

    def file_name(self, seed: int, library: str = "flowrl") -> str:
        """Return the name of the file with the result of a seed."""
        return f"{self.file_stem(library)}-seed{seed}.json"

    def settings(self, library: str = "flowrl") -> dict[str, Any]:
        """Return the settings with which a library is trained: those of the tuned example, or those
        of another library in `tuned_examples/<library>.yaml`.

        Raises:
            ConfigError: the row has none.
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

    def checksum(self, library: str = "flowrl") -> str:
        """Return a checksum of the length of the training and of the settings; a result has it, so
        that results of other settings are noticed."""
        trained_with = [self.env_steps, self.explore, self.settings(library)]
        text = json.dumps(trained_with, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def has_settings_of(self, result: dict[str, Any], library: str = "flowrl") -> bool:
        """Return whether a result is of the row's present settings; old ones have no checksum."""
        checksum = self.checksum(library)
        return bool(result.get("settings", checksum) == checksum)

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
        ConfigError: the file cannot be read, or does not contain tables of rows.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"benchmark: {file} cannot be read: {error}") from None
    without_default = [field.name for field in fields(BenchmarkRow) if field.default is MISSING]
    required = set(without_default) - {"table"}
    found: list[BenchmarkRow] = []
    try:
        tables: dict[str, list[dict[str, Any]]] = yaml.safe_load(text)
        for table, rows in tables.items():
            for number, row in enumerate(rows, 1):
                if missing := required - row.keys():
                    lacks = ", ".join(sorted(missing))
                    raise ValueError(f"row {number} of {table!r} lacks {lacks}")
                found.append(BenchmarkRow(table, **row))
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"benchmark: {file} has no tables of rows: {error}") from None
    names = [one.name for one in found]
    for one in found:
        if names.count(one.name) > 1:
            raise ConfigError(f"benchmark: {file}: there are several rows {one.name}")
        if type(one.env_steps) is not int or one.env_steps < 1:
            raise ConfigError(
                f"benchmark: {file}: env_steps of {one.name} must be an int of at least 1, got "
                f"{one.env_steps!r}"
            )
    return found


def rows_named(names: Sequence[str], file: Path) -> list[BenchmarkRow]:
    """Return the rows with these names or in tables with these names; all rows if `names` is empty.

    Raises:
        ConfigError: a name is unknown; see `benchmark_rows`.
    """
    rows = benchmark_rows(file)
    known = list(dict.fromkeys([*(row.table for row in rows), *(row.name for row in rows)]))
    for name in names:
        if name not in known:
            raise ConfigError(
                f"benchmark: there is no table or row {name!r}.{nearest(name, known)} "
                "`flowrl benchmark --list` shows them"
            )
    return [row for row in rows if not names or {row.table, row.name} & set(names)]
