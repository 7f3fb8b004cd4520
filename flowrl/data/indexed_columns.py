"""IndexedColumn: a column that is stored as positions in another array, and read as an array.

Views of a trajectory (the next observation, the last four frames) repeat what is stored already.
An IndexedColumn keeps each stored row once and makes the array when somebody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowrl.data.lazy_columns import LazyColumn

NOTHING = -1  # the position that stands for zeros


class IndexedColumn:
    """Rows of an array by position: `np.asarray(windows)` is base[index], zeros at NOTHING.

    Slices and arrays of row numbers give Windows on the same base; every reading a new array.

    Args:
        base: the stored rows [m, …]. Not copied: it must not change any more. Unread rows are
            made when they are read.
        index: positions [rows] or [rows, k] in it, or NOTHING.
    """

    def __init__(self, base: np.ndarray | LazyColumn, index: np.ndarray):
        self._bases: list[np.ndarray | LazyColumn] = [base]
        self._index: np.ndarray | None = index

    @property
    def index(self) -> np.ndarray:
        """Positions in the base."""
        assert self._index is not None
        return self._index

    @property
    def base(self) -> np.ndarray:
        """The stored rows."""
        if len(self._bases) > 1 or isinstance(self._bases[0], LazyColumn):
            made = [b.array() if isinstance(b, LazyColumn) else b for b in self._bases]
            self._bases = [np.concatenate(made) if len(made) > 1 else made[0]]
        return self._bases[0]  # type: ignore[return-value]

    @property
    def unread(self) -> bool:
        """Whether rows are still to be made or fetched."""
        return any(isinstance(base, LazyColumn) for base in self._bases)

    def left_behind(self, put: Callable[[Any], Any], get: Callable[[Any], Any]) -> IndexedColumn:
        """The column for another process; see `LazyColumn.left_behind`."""
        moved = IndexedColumn(self._bases[0], self.index)
        moved._bases = [
            base.left_behind(put, get) if isinstance(base, LazyColumn) else base
            for base in self._bases
        ]
        return moved

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._bases[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.index.shape, *self._bases[0].shape[1:])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are stored, not those of the array that is read."""
        return self.index.nbytes + sum(base.nbytes for base in self._bases)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, (int, np.integer)):
            return np.asarray(self[rows : rows + 1 or None])[0]
        part = IndexedColumn(self._bases[0], self.index[rows])
        part._bases = self._bases
        return part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("Windows are copied when they are read")
        nothing = self.index == NOTHING
        array = self.base.take(self.index, 0, mode="clip")
        if nothing.any():
            array[nothing] = 0
        return array if dtype is None else array.astype(dtype, copy=False)

    def __reduce__(self) -> Any:
        if self.unread:
            return _rebuilt, (self._bases, self.index)
        return IndexedColumn, (self.base, self.index)

    def __repr__(self) -> str:
        return f"IndexedColumn(shape={self.shape}, dtype={self.dtype})"

    @staticmethod
    def concat(parts: Sequence[IndexedColumn]) -> IndexedColumn:
        """The rows of all; nothing is copied but positions."""
        bases: list[np.ndarray | LazyColumn] = []
        indices = []
        offset = 0
        for part in parts:
            shifted = part.index + offset
            indices.append(np.where(part.index == NOTHING, NOTHING, shifted))
            bases += part._bases
            offset += sum(len(base) for base in part._bases)
        joined = IndexedColumn(bases[0], np.concatenate(indices))
        joined._bases = bases
        return joined


class NextRows(IndexedColumn):
    """What each row led to: the row after it, but for `cuts`, where trajectories end.

    Args:
        base: the rows [rows, …], and after them what those at the cuts led to [cuts, …].
        rows: how many.
        cuts: numbers [cuts] of rows in rising order; the last row is one.
    """

    def __init__(self, base: np.ndarray, rows: int, cuts: np.ndarray):
        self._bases = [base]
        self.rows, self.cuts = rows, cuts
        self._index = None

    @property
    def base(self) -> np.ndarray:
        return self._bases[0]  # type: ignore[return-value]

    @property
    def index(self) -> np.ndarray:
        """Positions [rows] in the base; made when they are asked for."""
        if self._index is None:
            self._index = np.arange(1, self.rows + 1)
            self._index[self.cuts] = np.arange(self.rows, self.rows + len(self.cuts))
        return self._index

    def __len__(self) -> int:
        return self.rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self._bases[0].shape[1:])

    def __reduce__(self) -> Any:
        return NextRows, (self.base, self.rows, self.cuts)


def _rebuilt(bases: list[np.ndarray | LazyColumn], index: np.ndarray) -> IndexedColumn:
    windows = IndexedColumn(bases[0], index)
    windows._bases = bases
    return windows
