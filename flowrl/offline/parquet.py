"""Experience in Parquet files: a row per timestep, a column per column of the batch.

Nested columns become one for each leaf, `obs/camera`; arrays become lists of a fixed size, those of
bytes binary strings. What is needed to make the batch again as it was stands in the file's
metadata. Anything that reads Parquet can read the columns.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import optree

from flowrl.data.sample_batch import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from flowrl.data.sequences import without_padding

log = logging.getLogger("flowrl")

FORMAT = 1
_ABOUT = b"flowrl"
_JSON = "json"  # a column of objects: infos


class OfflineDataError(ValueError):
    """Experience that cannot be read or written; says which file and column."""


def write_parquet(
    path: Path | str,
    batch: SampleBatch,
    policy_id: str = DEFAULT_POLICY_ID,
    run: str = "",
) -> None:
    """Write a policy's rows to a file, which is there when it is whole; its folder is made. Numbers
    of episodes (`eps_id`) are those of a run: files of another one may have the same.

    Padding is taken off, and columns with a row per sequence (`seq_lens`, `state_in_…`) are left
    out. Infos are kept as JSON: numpy values in them become plain ones, what JSON has no form for
    its repr; infos that nobody has asked for are left out.

    Raises:
        OfflineDataError: a column has no form in Parquet.
        OSError: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays: dict[str, Any] = {}
    batch = without_padding(batch)
    made = {
        name: _flattened(name, batch[name], arrays)
        for name in batch
        if name != "seq_lens" and not name.startswith("state_in_")
        if name != "infos" or "infos" in batch.without_lazy_columns()
    }
    about = {"format": FORMAT, "policy_id": policy_id, "rows": batch.count, "columns": made}
    about["run"] = run
    table = pa.table(arrays).replace_schema_metadata({_ABOUT: json.dumps(about).encode()})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    pq.write_table(table, part, write_page_checksum=True)
    os.replace(part, path)


def run_of(path: Path | str) -> str:
    """The run that a file's episodes are of, as `write_parquet` was told.

    Raises:
        OfflineDataError: it cannot be read.
    """
    return str(_about(path).get("run", ""))


def policy_of(path: Path | str) -> str:
    """The policy whose rows a file has.

    Raises:
        OfflineDataError: it cannot be read.
    """
    return str(_about(path).get("policy_id", ""))


def _about(path: Path | str) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        told: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {}).get(_ABOUT, b"{}"))
        return told
    except (OSError, ValueError, pa.ArrowException) as error:
        raise OfflineDataError(f"{path}: it cannot be read: {error}") from error


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
    except ValueError as error:  # damaged names
        raise OfflineDataError(f"{path}: it cannot be read: {error}") from error
    if about is None or table is None:
        raise OfflineDataError(
            f"{path}: flowrl did not write it: its columns are "
            f"{', '.join(file.schema_arrow.names)}. Experience from elsewhere is written by "
            "flowrl.offline.parquet.write_parquet(path, SampleBatch(obs=…, actions=…, …))"
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
        texts = [json.dumps(_plain(one)) for one in leaf]
        arrays[name] = pa.array(texts, pa.string())
        return {"dtype": _JSON, "shape": [], "crc": zlib.crc32("".join(texts).encode())}
    if leaf.dtype.kind not in "biuf" or leaf.dtype.itemsize > 8:
        raise OfflineDataError(f"column {name!r}: {leaf.dtype} has no form in Parquet")
    size = int(np.prod(leaf.shape[1:]))
    flat = np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).reshape(-1)
    crc = zlib.crc32(flat.view(np.uint8).data)
    spec = {"dtype": flat.dtype.name, "shape": list(leaf.shape[1:]), "crc": crc}
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
        texts = stored.to_pylist()
        _check_crc(name, spec, "".join(texts).encode())
        column = np.empty(rows, object)
        column[:] = [json.loads(text) for text in texts]
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
    _check_crc(name, spec, np.ascontiguousarray(flat).view(np.uint8).data)
    return flat.reshape(shape)


def _check_crc(name: str, spec: dict[str, Any], data: Any) -> None:
    if zlib.crc32(data) != spec["crc"]:
        raise OfflineDataError(f"column {name!r} was damaged")


def _plain(value: Any) -> Any:
    """A value as JSON has it; the repr of what it has no form for."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


_PENDING: dict[int, tuple[int, ParquetWriter]] = {}  # writers with rows, and their processes


@atexit.register
def _write_the_rest() -> None:
    """What writers have left that nobody stopped."""
    for process, writer in list(_PENDING.values()):
        if process != os.getpid():  # a copy of the parent's
            continue
        try:
            if not writer._made_in.exists():
                raise FileNotFoundError(f"{writer._made_in} is gone")
            writer.flush()
        except Exception as error:  # at an exit there is nobody to raise it to
            log.error("%s: rows that were recorded last are lost: %s", writer.folder, error)


class ParquetWriter:
    """Writes what it is given to <folder>/<policy id>-<time and lot>-<number>.parquet; what is left
    when the process ends, too.

    Each writer has files of its own, and never touches another's. One that goes on from a saved
    state begins with new ones; those that the saved one has written since are its `later_files`.

    Args:
        folder: made if it is not there.
        rows_per_file: a file is written when a policy has so many rows, or at `flush()`.

    Raises:
        ValueError: `rows_per_file` below 1.
    """

    def __init__(self, folder: Path | str, rows_per_file: int = 50_000):
        whole = isinstance(rows_per_file, int) and not isinstance(rows_per_file, bool)
        if not whole or rows_per_file < 1:
            raise ValueError(f"rows_per_file must be at least 1, got {rows_per_file!r}")
        self.folder = Path(folder)
        path = self.folder.absolute()
        self._made_in = next(p for p in (path, *path.parents) if p.exists())
        self.rows_per_file = rows_per_file
        self._tag = self._run = _new_tag()
        self._pending: dict[str, list[SampleBatch]] = {}
        self._rows: dict[str, int] = {}  # pending
        self._next: dict[str, int] = {}
        self._later: tuple[str, dict[str, int]] | None = None
        self._used = False

    def add(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Take rows.

        Raises:
            OfflineDataError, OSError: a file that is full cannot be written; its rows are kept.
        """
        import concurrent.futures.thread  # noqa: F401 - an exit is too late

        import pyarrow.parquet  # noqa: F401

        self._used = True
        _PENDING[id(self)] = os.getpid(), self
        for policy_id, rows in batch.policy_batches.items():
            if not rows.count:
                continue
            rows = without_padding(rows)
            pending = self._pending.setdefault(policy_id, [])
            if pending and _kinds(pending[0]) != _kinds(rows):
                self._write(policy_id)  # what does not go together gets a file of its own
                pending = self._pending.setdefault(policy_id, [])
            pending.append(_with_plain_infos(rows))
            self._rows[policy_id] = self._rows.get(policy_id, 0) + rows.count
            if self._rows[policy_id] >= self.rows_per_file:
                self._write(policy_id)

    def flush(self) -> None:
        """Write the rows that no file has yet; of a writer that was given none, those of the state
        that it was to go on from are left to whoever does."""
        for policy_id in list(self._pending) if self._used else ():
            self._write(policy_id)
        _PENDING.pop(id(self), None)

    def _write(self, policy_id: str) -> None:
        joined = SampleBatch.concat_samples(self._pending[policy_id])
        number = self._next.get(policy_id, 0)
        write_parquet(self._file(self._tag, policy_id, number), joined, policy_id, self._run)
        self._next[policy_id] = number + 1
        del self._pending[policy_id], self._rows[policy_id]

    def _file(self, tag: str, policy_id: str, number: int) -> Path:
        return self.folder / f"{quote(policy_id, safe='')}-{tag}-{number:06d}.parquet"

    def later_files(self) -> list[Path]:
        """The files that were written after the state that this writer goes on from: their rows, as
        far as they are the same ones, come again."""
        if self._later is None:
            return []
        tag, first = self._later
        found = []
        for path in sorted(self.folder.glob(f"*-{tag}-*.parquet")):
            policy_id, _, number = path.stem.rpartition(f"-{tag}-")
            if int(number) >= first.get(unquote(policy_id), 0):
                found.append(path)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Rows that no file has yet, and which files there are."""
        pending = {policy_id: list(batches) for policy_id, batches in self._pending.items()}
        where = {"run": self._run, "tag": self._tag, "next": dict(self._next)}
        return {"pending": pending, **where}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, in files of one's own."""
        self._pending = {
            policy_id: list(batches) for policy_id, batches in state["pending"].items()
        }
        self._rows = {pid: sum(b.count for b in own) for pid, own in self._pending.items()}
        self._later = state["tag"], dict(state["next"])
        self._run = state.get("run", state["tag"])
        self._tag, self._next, self._used = _new_tag(), {}, False


def _new_tag() -> str:
    """In the order of time, and no two the same."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def _kinds(batch: SampleBatch) -> Any:
    """What two batches must have alike to be joined."""
    return {
        name: optree.tree_map(lambda leaf: (leaf.dtype, leaf.shape[1:]), column)
        for name, column in batch.stored()
        if name != "infos"
    }


def _with_plain_infos(batch: SampleBatch) -> SampleBatch:
    """The batch with infos that a saved plan can hold, too."""
    if "infos" not in batch.without_lazy_columns():
        return batch.without_columns("infos")
    infos = np.empty(batch.count, object)
    infos[:] = [_plain(one) for one in batch["infos"]]
    return batch.with_columns(infos=infos)


def parquet_files(folder: Path | str) -> Iterator[Path]:
    """The files of a folder, or the one that is named, in the order of their names.

    Raises:
        OfflineDataError: there are none.
    """
    path = Path(folder)
    files = [path] if path.is_file() else sorted(path.glob("*.parquet"))
    if not files:
        what = "there is no .parquet file" if path.exists() else "there is no such folder"
        raise OfflineDataError(f"{folder}: {what}")
    return iter(files)
