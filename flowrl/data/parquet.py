"""Experience in Parquet files: a row per timestep, a column per column of the batch.

Nested columns become one for each leaf, `obs/camera`; arrays become lists of a fixed size, those of
bytes binary strings. What is needed to make the batch again as it was stands in the file's
metadata. Anything that reads Parquet can read the columns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from flowrl.data.multi_agent_batch import MultiAgentBatch
from flowrl.data.sample_batch import DEFAULT_POLICY_ID, SampleBatch

FORMAT = 1
_ABOUT = b"flowrl"
_JSON = "json"  # a column of objects: infos


class OfflineDataError(ValueError):
    """Experience that cannot be read or written; says which file and column."""


def write_parquet(path: Path | str, batch: SampleBatch, policy_id: str = DEFAULT_POLICY_ID) -> None:
    """Write a policy's rows to a file, which is there when it is whole.

    Columns that nobody has read yet, and those with a row per sequence (`seq_lens`,
    `state_in_…`), are left out.

    Raises:
        OfflineDataError: a column has no form in Parquet.
        OSError: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays: dict[str, Any] = {}
    made = {
        name: _flattened(name, column, arrays)
        for name, column in batch.without_unread().items()
        if name != "seq_lens" and not name.startswith("state_in_")
    }
    about = {"format": FORMAT, "policy_id": policy_id, "rows": batch.count, "columns": made}
    table = pa.table(arrays).replace_schema_metadata({_ABOUT: json.dumps(about).encode()})
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    pq.write_table(table, part, write_page_checksum=True)
    os.replace(part, path)


def read_parquet(path: Path | str) -> tuple[str, SampleBatch]:
    """The policy id and the rows of a file that `write_parquet` wrote.

    Raises:
        OfflineDataError: it cannot be read, was damaged, or was written by something else.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        about = (file.schema_arrow.metadata or {}).get(_ABOUT)
        table = None if about is None else file.read()
    except (OSError, pa.ArrowException) as error:
        raise OfflineDataError(f"{path}: it cannot be read: {error}") from error
    if about is None or table is None:
        raise OfflineDataError(
            f"{path}: flowrl did not write it: its columns are {', '.join(file.schema_arrow.names)}"
        )
    try:
        told = json.loads(about)
        if told["format"] != FORMAT:
            raise OfflineDataError(f"{path}: its format is {told['format']!r}, not {FORMAT}")
        columns = {
            name: _restored(name, spec, table, told["rows"])
            for name, spec in told["columns"].items()
        }
        return told["policy_id"], SampleBatch(columns)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, OfflineDataError):
            raise
        raise OfflineDataError(
            f"{path}: its columns are not what they should be: {error}"
        ) from error


def _flattened(name: str, column: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """Put a column's leaves into `arrays`; how it is made again."""
    import pyarrow as pa

    if isinstance(column, dict):
        if not all(isinstance(key, str) for key in column):
            raise OfflineDataError(
                f"column {name!r}: its keys must be strings, they are {[*column]}"
            )
        return {"dict": {k: _flattened(f"{name}/{k}", v, arrays) for k, v in column.items()}}
    if isinstance(column, tuple):
        return {"tuple": [_flattened(f"{name}/{i}", v, arrays) for i, v in enumerate(column)]}
    if name in arrays:
        raise OfflineDataError(f"two columns are called {name!r}")
    leaf = np.asarray(column)
    if leaf.dtype == object:
        try:
            arrays[name] = pa.array([json.dumps(one, default=_plain) for one in leaf], pa.string())
        except TypeError as error:
            raise OfflineDataError(f"column {name!r}: it has no form as JSON: {error}") from error
        return {"dtype": _JSON, "shape": []}
    if leaf.dtype.kind not in "biuf" or leaf.dtype.itemsize > 8:
        raise OfflineDataError(f"column {name!r}: {leaf.dtype} has no form in Parquet")
    spec = {"dtype": leaf.dtype.name, "shape": list(leaf.shape[1:])}
    size = int(np.prod(leaf.shape[1:]))
    flat = np.ascontiguousarray(leaf).reshape(-1)
    if leaf.ndim == 1:
        arrays[name] = pa.array(flat)
    elif size == 0 or not len(leaf):
        arrays[name] = pa.nulls(len(leaf))
    elif leaf.dtype == np.uint8:
        data = [None, pa.py_buffer(flat)]
        arrays[name] = pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(leaf), data)
    else:
        arrays[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat), size)
    return spec


def _restored(name: str, spec: dict[str, Any], table: Any, rows: int) -> Any:
    """A column as it was."""
    if "dict" in spec:
        inner = spec["dict"].items()
        return {key: _restored(f"{name}/{key}", one, table, rows) for key, one in inner}
    if "tuple" in spec:
        return tuple(
            _restored(f"{name}/{i}", one, table, rows) for i, one in enumerate(spec["tuple"])
        )
    import pyarrow as pa

    stored = table.column(name).combine_chunks()
    if isinstance(stored, pa.ChunkedArray):  # of no chunks
        stored = pa.nulls(0)
    if spec["dtype"] == _JSON:
        column = np.empty(rows, object)
        column[:] = [json.loads(text) for text in stored.to_pylist()]
        return column
    dtype, shape = np.dtype(spec["dtype"]), (rows, *spec["shape"])
    if not np.prod(shape):
        return np.empty(shape, dtype)
    if pa.types.is_fixed_size_binary(stored.type):
        data = np.frombuffer(stored.buffers()[1], np.uint8)
        flat = data[stored.offset * stored.type.byte_width :][: np.prod(shape)]
    else:
        if pa.types.is_fixed_size_list(stored.type):
            stored = stored.flatten()
        flat = stored.to_numpy(zero_copy_only=False)
    if flat.dtype != dtype:
        raise OfflineDataError(f"column {name!r} is {flat.dtype}, it should be {dtype}")
    return flat.reshape(shape)


def _plain(value: Any) -> Any:
    """A numpy value as JSON has it."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


class ParquetWriter:
    """Writes what it is given to <folder>/<policy id>-<number>.parquet.

    Args:
        folder: made if it is not there; files that are there stay, numbers go on.
        rows_per_file: a file is written when a policy has so many rows, or at `flush()`.

    Raises:
        ValueError: `rows_per_file` below 1.
    """

    def __init__(self, folder: Path | str, rows_per_file: int = 50_000):
        if (
            isinstance(rows_per_file, bool)
            or not isinstance(rows_per_file, int)
            or rows_per_file < 1
        ):
            raise ValueError(f"rows_per_file must be at least 1, got {rows_per_file!r}")
        self.folder = Path(folder)
        self.rows_per_file = rows_per_file
        self._pending: dict[str, list[SampleBatch]] = {}
        self._next: dict[str, int] = {}

    def add(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Take rows.

        Raises:
            OfflineDataError, OSError: a file that is full cannot be written; its rows are kept.
        """
        for policy_id, rows in batch.policy_batches.items():
            if rows.count:
                if policy_id not in self._next:  # known before the first file, as a state holds it
                    self._next[policy_id] = self._free_number(policy_id)
                self._pending.setdefault(policy_id, []).append(rows)
                if sum(one.count for one in self._pending[policy_id]) >= self.rows_per_file:
                    self._write(policy_id)

    def flush(self) -> None:
        """Write the rows that no file has yet."""
        for policy_id in list(self._pending):
            self._write(policy_id)

    def _free_number(self, policy_id: str) -> int:
        stem = quote(policy_id, safe="")
        there = [path.stem.rpartition("-") for path in self.folder.glob("*.parquet")]
        numbers = [int(n) for name, _, n in there if name == stem and n.isdecimal()]
        return max(numbers, default=-1) + 1

    def _write(self, policy_id: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        joined = SampleBatch.concat_samples(self._pending[policy_id])
        stem = quote(policy_id, safe="")
        path = self.folder / f"{stem}-{self._next[policy_id]:06d}.parquet"
        write_parquet(path, joined, policy_id)
        self._next[policy_id] += 1
        del self._pending[policy_id]

    def state_dict(self) -> dict[str, Any]:
        """Rows that no file has yet, and the numbers of the next files."""
        return {"pending": {k: list(v) for k, v in self._pending.items()}, "next": dict(self._next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: files that were written since are written over."""
        self._pending = {k: list(v) for k, v in state["pending"].items()}
        self._next = dict(state["next"])


def parquet_files(folder: Path | str) -> Iterator[Path]:
    """The files of a folder, or the one that is named, in the order of their names.

    Raises:
        OfflineDataError: there are none.
    """
    path = Path(folder)
    files = [path] if path.is_file() else sorted(path.glob("*.parquet"))
    if not files:
        raise OfflineDataError(f"{folder}: there is no .parquet file")
    return iter(files)
