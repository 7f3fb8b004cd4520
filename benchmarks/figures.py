"""Figures: the rows that a benchmark has measured, in results/NAME.json and results/NAME.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from flowrl.benchmark.provenance import commit, machine

RESULTS = Path(__file__).parent / "results"


class Figures:
    """The rows of a benchmark's table; a row that is measured again replaces the older one.

    Args:
        name: of the two files.
        columns: header of the table.
        cells: function from the figures of a row to its cells.
    """

    def __init__(
        self, name: str, columns: Sequence[str], cells: Callable[[dict[str, Any]], Sequence[str]]
    ):
        self._columns, self._cells = columns, cells
        self._json, self._markdown = RESULTS / f"{name}.json", RESULTS / f"{name}.md"
        self.rows: dict[str, dict[str, Any]] = {}
        if self._json.exists():
            self.rows = json.loads(self._json.read_text())

    def add(self, row: str, figures: dict[str, Any]) -> None:
        """Print the figures of a row and write both files.

        Args:
            row: name of the row.
            figures: values for JSON; `measured` lists how, where and when (see `measured_here`).
        """
        self.rows[row] = figures
        named = zip(self._columns, self._cells(figures), strict=True)
        print(", ".join(map(": ".join, named)), flush=True)
        self._json.write_text(json.dumps(self.rows, indent=1) + "\n")
        lines = [self._columns, ["---"] * len(self._columns), *map(self._cells, self.rows.values())]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        self._markdown.write_text(f"{table}\n{'; '.join(self._notes())}.\n")

    def _notes(self) -> list[str]:
        """Return the notes, each with its rows; one of most rows is about "the other rows"."""
        rows_of: dict[str, list[str]] = {}
        for row, figures in self.rows.items():
            for note in filter(None, figures["measured"]):
                rows_of.setdefault(note, []).append(row)
        of_most = [note for note, rows in rows_of.items() if 2 * len(rows) > len(self.rows)]
        others = [f"{', '.join(rows)}: {n}" for n, rows in rows_of.items() if n not in of_most]
        prefix = "the other rows: " if others else ""
        return [*others, *(f"{prefix}{note}" for note in of_most)]


def measured_here(*how: str) -> str:
    """Return a note: how something was measured, on which machine, when, with which commit."""
    return ", ".join([*how, machine(), str(date.today()), f"commit {commit()}"])
