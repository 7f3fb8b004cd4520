"""Columns: a dict of named arrays of equal length."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import optree

from flowrl.data.indexed_columns import IndexedColumn
from flowrl.setting_values import nearest

log = logging.getLogger("flowrl")

PER_SEQUENCE = ("seq_lens", "state_in_")  # prefixes of columns with one row per sequence
# columns with one number per row -> numpy kinds of their dtypes, description
FLAT_KINDS = {
    **dict.fromkeys(("terminateds", "truncateds"), ("b", "booleans")),
    **dict.fromkeys(("eps_id", "t", "agent_index"), ("iu", "integers")),
    "rewards": ("fiu", "numbers"),
}
ALIASES = {"next_obs": "new_obs"}
MISSING: dict[str, Any] = {
    "weights": 1, "n_steps": 1, "batch_indexes": -1, "loss_mask": True, "infos": {},
}  # fmt: skip
"""Values that fill these columns for rows that lack them: rows from no replay buffer, with full
weight, which the loss includes."""

_warned_columns: set[str] = set()  # warn once per column


def leaves_of(column: Any) -> list[np.ndarray]:
    """Return the arrays of a column."""
    if isinstance(column, (np.ndarray, IndexedColumn)):
        return [column]  # type: ignore[list-item]
    return optree.tree_leaves(column)


def map_leaves(fn: Any, column: Any) -> Any:
    """Return fn(array) of an array, or a nest with that of each array."""
    if isinstance(column, (np.ndarray, IndexedColumn)):
        return fn(column)
    if type(column) is dict:  # faster than optree
        return {name: map_leaves(fn, part) for name, part in column.items()}
    return optree.tree_map(fn, column)


def as_arrays(column: Any) -> Any:
    """Return a column with arrays in place of indexed columns."""
    if type(column) is np.ndarray:
        return column
    if isinstance(column, IndexedColumn):
        return np.asarray(column)
    nested = isinstance(column, (dict, tuple))
    if not nested or not any(isinstance(leaf, IndexedColumn) for leaf in leaves_of(column)):
        return column
    return map_leaves(np.asarray, column)


def expand_runs(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions covered by consecutive runs, and each position's offset in its run.

    Args:
        starts: first position [n] of each run.
        lengths: length [n] of each run.

    >>> [positions.tolist() for positions in expand_runs(np.array([5, 0]), np.array([2, 3]))]
    [[5, 6, 0, 1, 2], [0, 1, 0, 1, 2]]
    """
    lengths = lengths.astype(np.int64, copy=False)
    ends = np.cumsum(lengths)
    offsets = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + offsets, offsets


def copied(leaf: Any) -> Any:
    """Return a copy of an array or a tensor."""
    return leaf.clone() if hasattr(leaf, "clone") else np.copy(leaf)


def readonly_view(leaf: Any) -> Any:
    """Return a read-only view of an array; clone a tensor; return any other object itself."""
    if not isinstance(leaf, np.ndarray):
        return leaf.clone() if hasattr(leaf, "clone") else leaf
    view = leaf.view()
    view.flags.writeable = False
    return view


def as_column(name: str, value: Any) -> Any:
    """Convert a value to an array, or to a nest of arrays."""
    if isinstance(value, np.ndarray):
        return value
    if name == "infos":
        column = np.empty(len(value), dtype=object)
        column[:] = value
        return column
    if isinstance(value, (dict, tuple)):
        return optree.tree_map(
            np.asarray,
            value,  # type: ignore[arg-type]
            is_leaf=lambda part: isinstance(part, list),
        )
    if hasattr(value, "shape"):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"column {name!r}: its rows differ in shape: {error}") from None


def summarize(column: Any) -> str:
    """Return shape, dtype and range of a column as one line."""
    if isinstance(column, IndexedColumn):
        if column.is_lazy:
            return f"np.ndarray({column.shape}, dtype={column.dtype}, not read yet)"
        column = np.asarray(column)
    if not isinstance(column, np.ndarray):
        return str(optree.tree_map(summarize, column)) if not hasattr(column, "shape") else "tensor"
    head = f"np.ndarray({column.shape}, dtype={column.dtype}"
    if column.dtype.kind not in "biuf":  # text, objects
        return f"{head}, head={column[0] if len(column) else None})"
    if not column.size:
        return f"{head})"
    numbers = column.astype(np.float64)
    low, high, mean = numbers.min(), numbers.max(), numbers.mean()
    return f"{head}, min={low:.4g}, max={high:.4g}, mean={mean:.4g})"


class Columns(dict[str, Any]):
    """A dict of columns [count, …], each a numpy array or a nest of arrays.

    Indexed and lazy columns (`IndexedColumn`) read as arrays. `next_obs` is another name of
    `new_obs`; reading `dones` returns terminated or truncated, if the batch has both columns.
    Columns named `seq_lens` and `state_in_*` have one row per sequence.

    Args:
        columns: name -> array, list, or nest of arrays; None values are skipped.

    Raises:
        ValueError: the columns differ in length, or one is given under both of its names.
    """

    def __init__(self, columns: Mapping[str, Any] | None = None, /, **more: Any):
        super().__init__()
        self.zero_padded: bool = getattr(columns, "zero_padded", False)
        self.max_seq_len: int | None = getattr(columns, "max_seq_len", None)
        for name, value in {**({} if columns is None else columns), **more}.items():
            if value is None:
                continue
            stored_name = ALIASES.get(name, name)
            if super().__contains__(stored_name):
                raise ValueError(f"{name} is another name of a column that is given, too")
            super().__setitem__(stored_name, as_column(name, value))
        self._check_lengths()

    def _check_lengths(self) -> None:
        lengths = {}
        for name, column in self.stored():
            if name.startswith(PER_SEQUENCE):
                continue
            try:
                lengths[name] = set(map(len, leaves_of(column)))
            except TypeError:
                raise ValueError(
                    f"column {name!r} has a single value instead of one per row: give an array or "
                    "a list (a tuple is a nest of columns)"
                ) from None
        all_lengths = set[int]().union(*lengths.values())
        if len(all_lengths) > 1:
            shown = {n: sorted(of) if len(of) > 1 else max(of) for n, of in lengths.items() if of}
            raise ValueError(f"columns of a SampleBatch differ in length: {shown}")
        if "seq_lens" in self and not self.zero_padded and all_lengths:
            rows, total = max(all_lengths), int(np.sum(self["seq_lens"]))
            if np.min(self["seq_lens"], initial=0) < 0:
                raise ValueError(f"seq_lens must not be negative, got {self['seq_lens']}")
            if rows != total:
                raise ValueError(f"seq_lens add up to {total}, but the columns have {rows} rows")

    # -- size ----------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of rows, without padding."""
        if dict.__contains__(self, "seq_lens"):
            return int(np.sum(self["seq_lens"]))
        for column in dict.values(self):
            if type(column) is np.ndarray:
                return len(column)
            for leaf in leaves_of(column):
                return len(leaf)
        return 0

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    def size_bytes(self) -> int:
        """Return the bytes of all arrays in this process."""
        return sum(leaf.nbytes for column in dict.values(self) for leaf in leaves_of(column))

    def _padded_count(self) -> int:
        for name, column in self.stored():
            if not name.startswith(PER_SEQUENCE):
                return len(leaves_of(column)[0])
        return self.count

    # -- reading -------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        return as_arrays(super().__getitem__(key))

    def __missing__(self, key: str) -> Any:
        if key in ALIASES:
            return self[ALIASES[key]]
        if key == "dones" and key in self:
            return np.logical_or(self["terminateds"], self["truncateds"])
        hint = nearest(str(key), list(self))
        if key in ("advantages", "value_targets"):
            hint = (
                " It is estimated for policies that derive from OnPolicyPolicy "
                "(flowrl.algorithms.on_policy): derive from it, or add the column in "
                "postprocess_trajectory (postprocess_fn of build_torch_policy)"
            )
        raise KeyError(f"no column {key!r} in this batch; it has {sorted(self)}.{hint}")

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if key == "dones":
            return super().__contains__("terminateds") and super().__contains__("truncateds")
        return isinstance(key, str) and super().__contains__(ALIASES.get(key, ""))

    def stored(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, column) as stored: some columns may be an `IndexedColumn`."""
        return iter(super().items())

    def is_lazy(self, name: str) -> bool:
        """Return whether a column exists but is not computed or fetched yet."""
        column = dict.get(self, name)
        return isinstance(column, IndexedColumn) and column.is_lazy

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # an override makes dict(batch) use Columns.__getitem__

    def items(self) -> Any:
        """Return a list of (name, column)."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Return a list of the columns."""
        return [self[name] for name in self]

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def columns(self, keys: Sequence[str]) -> list[Any]:
        """Return the named columns in that order."""
        return [self[key] for key in keys]

    # -- rows ----------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rows as dicts, without padding.

        With `seq_lens`, each row is a sequence of length 1 without a state: it has `seq_lens` 1 and
        no `state_in_*`.
        """
        columns = self.items()
        for position in self._row_positions().tolist():
            yield _row(columns, position)

    def row(self, index: int) -> dict[str, Any]:
        """Return one row as in `rows`; a negative index counts from the end.

        Raises:
            IndexError: there is no such row.
        """
        count = self.count
        if not -count <= index < count:
            raise IndexError(f"there is no row {index} in a batch of {count} rows")
        position = int(self._row_positions()[index]) if self.zero_padded else index
        return _row(self.items(), position)

    def _row_positions(self) -> np.ndarray:
        """Return the positions [count] of the rows in the columns, which may have padding."""
        if not self.zero_padded:
            return np.arange(self.count)
        lens = self["seq_lens"]
        return expand_runs(np.arange(len(lens)) * (self.max_seq_len or 0), lens)[0]

    def _episode_ends(self, key: str | None) -> np.ndarray:
        """Return the numbers of the rows that follow the last row of an episode."""
        if key not in (None, "eps_id", "dones"):
            raise ValueError(f'split_by_episode: key is "eps_id", "dones" or None, got {key!r}')
        rows = self._row_positions()
        if key != "dones" and "eps_id" in self:
            ids = self["eps_id"][rows]
            return np.flatnonzero(ids[1:] != ids[:-1]) + 1
        names = ["dones"] if dict.__contains__(self, "dones") else ["terminateds", "truncateds"]
        flags = [self[name][rows] for name in names if name in self]
        if key == "eps_id" or not flags:
            raise KeyError(
                f"split_by_episode: no column {key or 'eps_id, dones, terminateds or truncateds'} "
                f"in this batch; it has {sorted(self)}"
            )
        return np.flatnonzero(np.logical_or.reduce(flags)[:-1]) + 1

    # -- writing -------------------------------------------------------------------------------

    def __setitem__(self, key: str, value: Any) -> None:
        key = ALIASES.get(key, key)
        column = as_column(key, value)
        if not key.startswith(PER_SEQUENCE) and dict.__len__(self):
            for leaf in leaves_of(column):
                if not np.ndim(leaf):
                    raise ValueError(f"column {key!r} has a single value instead of one per row")
                if len(leaf) != self._padded_count():
                    raise ValueError(
                        f"column {key!r} has {len(leaf)} rows, the batch {self._padded_count()}"
                    )
        super().__setitem__(key, column)

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Set columns one after the other; None values are skipped.

        Raises:
            ValueError: a column has another number of rows than the batch.
        """
        for name, value in dict(other, **more).items():
            if value is not None:
                self[name] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return a column; set it first if the batch does not have it."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __delitem__(self, key: str) -> None:
        self._check_is_stored(key)
        super().__delitem__(ALIASES.get(key, key))

    def _check_is_stored(self, key: str) -> None:
        if key == "dones" and key in self and not super().__contains__(key):
            raise KeyError("dones is computed: remove terminateds or truncateds instead")

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a column and return it, or the default if the batch does not have the column.

        Raises:
            KeyError: there is no such column and no default, or the column is `dones` and computed
                from others.
        """
        self._check_is_stored(key)
        return as_arrays(super().pop(ALIASES.get(key, key), *default))

    # -- identity ------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __repr__(self) -> str:
        stored = dict(self.stored())
        lines = ",\n  ".join(f"{name!r}: {summarize(stored[name])}" for name in sorted(self))
        return "{ " + lines + "\n}"


def _row(columns: Sequence[tuple[str, Any]], position: int) -> dict[str, Any]:
    """Return one row of named columns."""
    read = operator.itemgetter(position)
    has_sequences = any(name == "seq_lens" for name, _ in columns)
    row = {
        name: map_leaves(read, column)
        for name, column in columns
        if not (has_sequences and name.startswith(PER_SEQUENCE))
    }
    return {**row, "seq_lens": 1} if has_sequences else row


def concat_columns(batches: Sequence[Columns]) -> dict[str, Any]:
    """Return name -> column with the rows of all batches.

    If some batches lack a column, it is dropped when it is lazy in another batch (checkpoints omit
    lazy columns); otherwise the missing rows are zeros, or the values in MISSING, with a warning.
    """
    names = dict.fromkeys(name for batch in batches for name in batch)
    incomplete = [name for name in names if not all(dict.__contains__(b, name) for b in batches)]
    if incomplete:
        dropped = {name for name in incomplete if any(batch.is_lazy(name) for batch in batches)}
        filled = [name for name in incomplete if name not in dropped]
        if filled and not _warned_columns.issuperset(filled):
            _warned_columns.update(filled)
            values = {name: MISSING.get(name, 0) for name in filled}
            log.warning("columns are missing in some batches: filled there with %s", values)
        names = dict.fromkeys(name for name in names if name not in dropped)
    bases: dict[tuple[int, ...], list[Any]] = {}
    return {name: _concat_column(name, batches, bases) for name in names}


def _concat_column(
    name: str, batches: Sequence[Columns], bases: dict[tuple[int, ...], list[Any]]
) -> Any:
    stored = [dict.get(batch, name) for batch in batches]
    if all(isinstance(part, IndexedColumn) for part in stored):
        return IndexedColumn.concat(stored, bases)  # type: ignore[arg-type]
    parts: list[Any] = [batch[name] for batch in batches if dict.__contains__(batch, name)]
    if len(parts) < len(batches):
        like, present = parts[0], iter(parts)
        parts = [
            next(present)
            if dict.__contains__(batch, name)
            else _filled(batch._padded_count(), like, MISSING.get(name, 0))
            for batch in batches
        ]
    try:
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        return optree.tree_map(lambda *leaves: np.concatenate(leaves), *parts)
    except ValueError as error:
        raise ValueError(f"column {name!r} cannot be concatenated: {error}") from None


def _filled(rows: int, like: Any, value: Any) -> Any:
    if isinstance(value, dict):  # each row has a dict of its own
        column = np.empty(rows, object)
        column[:] = [dict(value) for _ in range(rows)]
        return column
    return map_leaves(lambda leaf: np.full((rows, *leaf.shape[1:]), value, leaf.dtype), like)


# -- pickling --------------------------------------------------------------------------------------


class _Prefix:
    """Placeholder in a pickle for a column that is the first rows of another column's base."""

    def __init__(self, of: str, rows: int):
        self.of = of
        self.rows = rows


def deduplicate(columns: dict[str, Any]) -> dict[str, Any]:
    """Replace columns that share memory with the base of an indexed column by placeholders.

    Changes `columns` in place and returns it; see `restore_duplicates`.
    """
    indexed = {name: c for name, c in columns.items() if isinstance(c, IndexedColumn)}
    bases = {name: c.base for name, c in indexed.items() if not c.is_lazy}
    for name, column in columns.items():
        for of, base in bases.items():
            if isinstance(column, np.ndarray) and column.base is base and _is_prefix(column, base):
                columns[name] = _Prefix(of, len(column))
    return columns


def restore_duplicates(columns: dict[str, Any]) -> dict[str, Any]:
    """Undo `deduplicate`, in place."""
    for name, column in columns.items():
        if isinstance(column, _Prefix):
            columns[name] = columns[column.of].base[: column.rows]
    return columns


def _is_prefix(column: np.ndarray, base: np.ndarray) -> bool:
    same_start = column.__array_interface__["data"] == base.__array_interface__["data"]
    return same_start and column.shape[1:] == base.shape[1:] and column.strides == base.strides
