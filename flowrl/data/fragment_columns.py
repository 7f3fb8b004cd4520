"""FragmentColumns: rows of N lanes in time-major arrays, after the rows that views look back on."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from flowrl.data.columns import leaves_of, map_leaves
from flowrl.state_schema import Fields, Natural, check_state

OBSERVATIONS = ("raw_obs", "obs")  # columns that have a row after the last step

_STATE: Fields = {
    "lookback": Natural,
    "known": Natural,
    "used": Natural,
    "rows": dict[str, Any],
}


class FragmentColumns:
    """Arrays [lookback + length + 1, N, …] by name; a nested value has a nest of arrays.

    Row t of a fragment is at the index `lookback` + t. The rows before are the last ones of earlier
    fragments.

    Args:
        lanes: number of lanes, N.
        length: number of rows per lane.
        lookback: number of earlier rows.

    Attributes:
        arrays: the columns by name.
        known: number of earlier rows that were collected, at most `lookback`.
    """

    def __init__(self, lanes: int, length: int, lookback: int = 0):
        self.lanes, self.length, self.lookback = lanes, length, lookback
        self.known = 0
        self.arrays: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a column with all its rows."""
        return self.arrays[name]

    def get(self, name: str) -> Any:
        """Return a column with all its rows; None if there is none."""
        return self.arrays.get(name)

    def names(self) -> list[str]:
        """Return the names of all columns."""
        return list(self.arrays)

    def row(self, name: str, t: int) -> Any:
        """Return row t of a column, [N, …], not copied."""
        at, column = self.lookback + t, self.arrays[name]
        return column[at] if isinstance(column, np.ndarray) else map_leaves(lambda a: a[at], column)

    def part(self, name: str, begin: int, end: int) -> Any:
        """Return rows begin … end - 1 of a column, not copied."""
        rows = slice(self.lookback + begin, self.lookback + end)
        return map_leaves(lambda array: array[rows], self.arrays[name])

    def drop(self, name: str) -> None:
        """Drop a column, if there is one."""
        self.arrays.pop(name, None)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return a column for values [N, *shape]; an equal one keeps its rows."""
        array = self.arrays.get(name)
        if array is None or array.shape[2:] != shape or array.dtype != dtype:
            rows = self.lookback + self.length + 1
            array = self.arrays[name] = np.zeros((rows, self.lanes, *shape), dtype)
        return array

    def allocate_like(self, name: str, values: Any) -> Any:
        """Return a column for values [N, …], an array or a nest of arrays."""
        if isinstance(values, np.ndarray):
            return self.allocate(name, values.shape[1:], values.dtype)
        old = self.arrays.get(name)
        same = old is not None and [(a.shape[2:], a.dtype) for a in optree.tree_leaves(old)] == [
            (v.shape[1:], v.dtype) for v in optree.tree_leaves(values)
        ]
        if not same:
            rows = self.lookback + self.length + 1
            self.arrays[name] = map_leaves(
                lambda v: np.zeros((rows, self.lanes, *v.shape[1:]), v.dtype), values
            )
        return self.arrays[name]

    def share(self, name: str, other: str) -> None:
        """Make a column the same arrays as another one."""
        self.arrays[name] = self.arrays[other]

    def resize(self, length: int) -> None:
        """Change the number of rows; keep the first ones."""
        self._replace(lambda a: _resized(a, self.lookback + length + 1))
        self.length = length

    def look_back(self, rows: int) -> None:
        """Change the number of earlier rows; keep the last ones."""
        added = rows - self.lookback
        if added > 0:
            blank = (added, self.lanes)
            self._replace(lambda a: np.concatenate([np.zeros((*blank, *a.shape[2:]), a.dtype), a]))
        elif added < 0:
            self._replace(lambda a: a[-added:].copy())
        self.lookback, self.known = rows, min(self.known, rows)

    def advance(self, first: int, num_rows: int) -> None:
        """Make row `first` the first one. Row `num_rows`, the last one that is kept, has only the
        next observation."""
        kept = self.lookback + num_rows + 1 - first
        if kept == 1:  # only the observations of the next step
            for name in OBSERVATIONS:
                for array in leaves_of(self.arrays.get(name, ())):
                    array[0] = array[first]
            return

        def moved(array: np.ndarray) -> np.ndarray:
            array[:kept] = array[first : first + kept]
            return array

        self._replace(moved)
        self.known = min(self.known + first, self.lookback)

    def advance_lanes(self, firsts: np.ndarray, ends: np.ndarray) -> None:
        """Make another row of each lane its first one; the caller updates `known`.

        Args:
            firsts: the rows, [N].
            ends: the last row of each lane that is kept, [N].
        """
        kept = self.lookback + int((ends - firsts).max(initial=0)) + 1
        lanes = np.arange(self.lanes)

        def moved(array: np.ndarray) -> np.ndarray:
            index = np.minimum(np.arange(kept)[:, None] + firsts, len(array) - 1)
            array[:kept] = array[index, lanes]
            return array

        self._replace(moved)

    def add_lanes(self, count: int) -> None:
        """Add lanes after the present ones, with zeros."""
        self._replace(
            lambda a: np.concatenate([a, np.zeros((len(a), count, *a.shape[2:]), a.dtype)], axis=1)
        )
        self.lanes += count

    def _replace(self, change: Any) -> None:
        changed: dict[int, Any] = {}  # columns may share an array
        for name, column in self.arrays.items():
            if id(column) not in changed:
                changed[id(column)] = map_leaves(change, column)
            self.arrays[name] = changed[id(column)]

    def state_dict(self, num_rows: int) -> dict[str, Any]:
        """Return copies of the rows to `num_rows`, inclusive, and of those that views look back
        on."""
        end = self.lookback + num_rows + 1
        # columns may share arrays: only the first one is saved, the others name it
        first = {id(column): name for name, column in reversed(self.arrays.items())}
        return {
            "lookback": self.lookback,
            "known": self.known,
            "used": num_rows,
            "rows": {
                name: map_leaves(lambda array: array[:end].copy(), column)
                if first[id(column)] == name
                else first[id(column)]
                for name, column in self.arrays.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: a column has another shape or dtype.
        """
        check_state(state, _STATE, "columns")
        lookback, num_rows = state["lookback"], state["used"]
        if num_rows > self.length:
            self.resize(num_rows)
        self.look_back(lookback)
        for name, value in state["rows"].items():
            saved = state["rows"].get(value) if isinstance(value, str) else value
            if saved is None:
                raise ValueError(f"the column {name!r} shares {value!r}, which the state lacks")
            column = self.arrays.get(name)
            if column is None:
                column = self.allocate_like(name, map_leaves(lambda array: array[0], saved))
            for array, rows in zip(
                optree.tree_leaves(column), optree.tree_leaves(saved), strict=True
            ):
                if array.shape[1:] != rows.shape[1:] or array.dtype != rows.dtype:
                    raise ValueError(
                        f"the state has the column {name!r} of shape {rows.shape[1:]} and dtype "
                        f"{rows.dtype}, the environments {array.shape[1:]} and {array.dtype}"
                    )
                array[: lookback + num_rows + 1] = rows
        self.known = state["known"]


def value_at(column: Any, index: Any) -> Any:
    """Return a copy of the value at an index of the first axes of a column."""

    def copied(array: np.ndarray) -> Any:
        value = array[index]
        return value.copy() if isinstance(value, np.ndarray) else value

    return map_leaves(copied, column)


def write(column: Any, index: Any, values: Any) -> None:
    """Write values at an index of the first axes of a column."""
    if isinstance(column, np.ndarray):
        column[index] = values
        return
    for array, value in zip(optree.tree_leaves(column), optree.tree_leaves(values), strict=True):
        array[index] = value


def _resized(array: np.ndarray, rows: int) -> np.ndarray:
    if rows <= len(array):
        return array[:rows]
    larger = np.zeros((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def by_lane(column: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """Return a column [T, N, …] as a new array [rows, …], sorted by lane and time.

    `order` selects from the time-major rows [T * N]; None selects all.
    """
    if order is not None:
        # order is always in range: "clip" skips the check in take
        return column.reshape(-1, *column.shape[2:]).take(order, 0, mode="clip")
    if column.shape[1] == 1:
        return column[:, 0].copy()
    return np.swapaxes(column, 0, 1).copy(order="C").reshape(-1, *column.shape[2:])
