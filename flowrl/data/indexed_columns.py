"""IndexedColumn: a column stored as positions in another array, and read as an array.

Views of a trajectory (the next observation, the last four frames) repeat stored rows. An
IndexedColumn stores each row once and builds the array when it is read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowrl.data.lazy_columns import LazyColumn

NOTHING = -1  # position that reads as zeros


class IndexedColumn:
    """Rows of a base array by position: `np.asarray(column)` is base[index], zeros at NOTHING.

    Indexing returns an IndexedColumn on the same base. Each conversion to an array is a new copy.

    Args:
        base: the stored rows [m, …], not copied: they must not change. A LazyColumn is computed
            when rows are read.
        index: positions [rows] or [rows, k] in the base, or NOTHING.
    """

    def __init__(self, base: np.ndarray | LazyColumn, index: np.ndarray):
        self._bases: list[np.ndarray | LazyColumn] = [base]
        self._index: np.ndarray | None = index

    @property
    def index(self) -> np.ndarray:
        """Positions [rows] or [rows, k] in the base."""
        assert self._index is not None
        return self._index

    @property
    def base(self) -> np.ndarray:
        """The stored rows [m, …]; lazy ones are computed."""
        bases = list(self._bases)  # another thread may replace them
        if len(bases) > 1 or isinstance(bases[0], LazyColumn):
            arrays = [b.array() if isinstance(b, LazyColumn) else b for b in bases]
            bases = [np.concatenate(arrays) if len(arrays) > 1 else arrays[0]]
            self._bases[:] = bases  # also for the columns that were sliced from this one
        return bases[0]  # type: ignore[return-value]

    def shares_base(self, other: IndexedColumn) -> bool:
        """Return whether positions of both columns name the same stored rows."""
        mine, others = list(self._bases), list(other._bases)
        return len(mine) == len(others) and all(map(operator.is_, mine, others))

    @property
    def is_lazy(self) -> bool:
        """Whether rows are not computed or fetched yet."""
        return any(isinstance(base, LazyColumn) for base in list(self._bases))

    def to_reference(self, put: Callable[[Any], Any], get: Callable[[Any], Any]) -> IndexedColumn:
        """Return the column for another process; see `LazyColumn.to_reference`."""
        bases = list(self._bases)
        bases = [b.to_reference(put, get) if isinstance(b, LazyColumn) else b for b in bases]
        return _with_bases(bases, self.index)

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
        """Bytes of the stored rows and positions, not of the array that is read."""
        return self.index.nbytes + sum(base.nbytes for base in list(self._bases))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, (int, np.integer)):
            return np.asarray(self[rows : rows + 1 or None])[0]
        return _with_bases(self._bases, self.index[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an IndexedColumn cannot be read without a copy")
        nothing = self.index == NOTHING
        array = self.base.take(self.index, 0, mode="clip")
        if nothing.any():
            array[nothing] = 0
        return array if dtype is None else array.astype(dtype, copy=False)

    def __reduce__(self) -> Any:
        if self.is_lazy:
            return _with_bases, (self._bases, self.index)
        return IndexedColumn, (self.base, self.index)

    def __repr__(self) -> str:
        return f"IndexedColumn(shape={self.shape}, dtype={self.dtype})"

    @staticmethod
    def concat(
        parts: Sequence[IndexedColumn], known: dict[tuple[int, ...], list[Any]] | None = None
    ) -> IndexedColumn:
        """Concatenate columns; only positions are copied.

        Args:
            parts: the columns.
            known: ids of the bases of a column -> list of these bases, filled here. Columns of the
                same batches share a list, so that their bases are joined only once.
        """
        bases: list[np.ndarray | LazyColumn] = []
        indices = []
        offset = 0
        for part in parts:
            shifted = part.index + offset
            indices.append(np.where(part.index == NOTHING, NOTHING, shifted))
            part_bases = list(part._bases)  # another thread may join them
            bases += part_bases
            offset += sum(map(len, part_bases))
        if known is not None:
            bases = known.setdefault(tuple(map(id, bases)), bases)
        return _with_bases(bases, np.concatenate(indices))


class NextRows(IndexedColumn):
    """The row that follows each row: the next one of the base, except at the ends of trajectories.

    Args:
        base: the rows [rows, …], followed by the rows [cuts, …] that follow the trajectory ends.
        rows: number of rows.
        cuts: rows [cuts] where trajectories end, in ascending order, including the last row.
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
        """Positions [rows] in the base; computed on first access."""
        if self._index is None:
            self._index = np.arange(1, self.rows + 1)
            self._index[self.cuts] = np.arange(self.rows, self.rows + len(self.cuts))
        return self._index

    def __len__(self) -> int:
        return self.rows

    @property
    def nbytes(self) -> int:
        return self._bases[0].nbytes  # positions are not stored until they are read

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self._bases[0].shape[1:])

    def __reduce__(self) -> Any:
        return NextRows, (self.base, self.rows, self.cuts)


def _with_bases(bases: list[np.ndarray | LazyColumn], index: np.ndarray) -> IndexedColumn:
    """Create a column whose base is the concatenation of `bases`."""
    column = IndexedColumn(bases[0], index)
    column._bases = bases
    return column
