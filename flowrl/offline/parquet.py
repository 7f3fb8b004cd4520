"""Experience in Parquet files: one row per timestep, one Parquet column per array.

Nested columns are stored as one column per leaf, e.g. `obs/camera`; arrays as fixed-size lists,
uint8 arrays as fixed-size binary. The file metadata describes how to rebuild the batch. Any Parquet
reader can read the columns. Needs the extra `offline`.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.data.columns import PER_SEQUENCE, as_arrays
from flowrl.data.sample_batch import DEFAULT_POLICY_ID, SampleBatch
from flowrl.data.sequences import without_padding
from flowrl.errors import OfflineDataError, check_installed
from flowrl.setting_values import expanded_path

FORMAT = 1
_METADATA_KEY = b"flowrl"
_JSON = "json"  # dtype of columns of Python objects, i.e. infos


def import_pyarrow() -> Any:
    """Return the module pyarrow; `pyarrow.parquet` is imported.

    Raises:
        ConfigError: the extra `offline` is not installed.
    """
    check_installed("pyarrow", "recorded experience in Parquet files", extra="offline")
    import pyarrow.parquet

    return pyarrow


def write_parquet(
    path: Path | str,
    batch: SampleBatch,
    policy_id: str = DEFAULT_POLICY_ID,
    run: str = "",
) -> None:
    """Write the rows of one policy to a file, atomically; create its folder if necessary.

    Padding and columns with one row per sequence (`seq_lens`, `state_in_...`) are not written.
    Infos are stored as JSON: numpy values as Python values, other objects as their repr. Infos that
    have not been read are not written.

    Args:
        path: path of the file.
        batch: the rows.
        policy_id: id of the policy that collected them.
        run: id of the run. Episode ids (`eps_id`) are unique within a run only.

    Raises:
        ConfigError: the extra `offline` is not installed.
        OfflineDataError: a column cannot be stored in Parquet.
        OSError: the file cannot be written.
    """
    pa = import_pyarrow()

    arrays: dict[str, Any] = {}
    batch = without_padding(batch)
    columns = {
        name: _flatten(name, batch[name], arrays)
        for name in batch
        if not name.startswith(PER_SEQUENCE)
        if name != "infos" or not batch.is_lazy(name)
    }
    metadata = {
        "format": FORMAT, "policy_id": policy_id, "run": run, "rows": batch.count,
        "columns": columns,
    }  # fmt: skip
    table = pa.table(arrays).replace_schema_metadata({_METADATA_KEY: json.dumps(metadata).encode()})
    path = expanded_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        pa.parquet.write_table(table, temporary, write_page_checksum=True)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError) or error.errno is None:
            raise
        raise OSError(
            error.errno, f"cannot write rows: {os.strerror(error.errno)}", str(path)
        ) from None


def check_storable(batch: SampleBatch) -> None:
    """Check that `write_parquet` can write the columns of a batch.

    Raises:
        OfflineDataError: a column cannot be stored in Parquet.
    """
    arrays: dict[str, Any] = {}
    for name, column in batch[:0].stored():
        if not name.startswith(PER_SEQUENCE):
            _flatten(name, as_arrays(column), arrays)


def read_parquet(path: Path | str) -> tuple[str, SampleBatch]:
    """Read a file that `write_parquet` wrote.

    Returns:
        the policy id and the rows.

    Raises:
        ConfigError: the extra `offline` is not installed.
        OfflineDataError: the file cannot be read, is damaged, or was not written by flowrl.
    """
    pa = import_pyarrow()

    path = expanded_path(path)
    try:
        with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            encoded = (schema.metadata or {}).get(_METADATA_KEY)
            check_no_extension_types(schema)
            table = None if encoded is None else file.read()
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: damaged names
        raise OfflineDataError(f"{path}: cannot be read: {error}") from error
    if encoded is None or table is None:
        raise _foreign_file_error(path, schema)
    try:
        metadata = json.loads(encoded)
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r}, expected {FORMAT}")
        if metadata["columns"] and table.num_rows != metadata["rows"]:
            raise ValueError(
                f"it has {table.num_rows} rows, flowrl wrote {metadata['rows']}: another program "
                "has changed them. Use flowrl.offline.parquet.write_parquet to write changed rows"
            )
        columns = {
            name: _restore(name, spec, table, metadata["rows"])
            for name, spec in metadata["columns"].items()
        }
        return metadata["policy_id"], SampleBatch(columns)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise OfflineDataError(f"{path}: damaged or incompatible: {error}") from error


def read_run_id(path: Path | str) -> str:
    """Return the run id of a file, as passed to `write_parquet`.

    Raises:
        OfflineDataError: the file cannot be read.
    """
    return str(_read_metadata(path)["run"])


def read_policy_id(path: Path | str) -> str:
    """Return the id of the policy that collected the rows of a file.

    Raises:
        OfflineDataError: the file cannot be read.
    """
    return str(_read_metadata(path)["policy_id"])


def read_rows_of(path: Path | str, policy_id: str) -> SampleBatch | None:
    """Return the rows of a file; None if another policy collected them, without reading them.

    Raises:
        OfflineDataError: see `read_parquet`.
    """
    return read_parquet(path)[1] if read_policy_id(path) == policy_id else None


def _read_metadata(path: Path | str) -> dict[str, Any]:
    pa = import_pyarrow()

    path = expanded_path(path)
    try:
        schema = pa.parquet.read_schema(path)
        encoded = (schema.metadata or {}).get(_METADATA_KEY)
        metadata = None if encoded is None else {"run": "", **json.loads(encoded)}
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise OfflineDataError(f"{path}: cannot be read: {error}") from error
    if metadata is None:
        raise _foreign_file_error(path, schema)
    if "policy_id" not in metadata:
        raise OfflineDataError(f"{path}: damaged or incompatible: it names no policy")
    return metadata


def _foreign_file_error(path: Path | str, schema: Any) -> OfflineDataError:
    return OfflineDataError(
        f"{path}: not written by flowrl: its columns are {', '.join(schema.names)}. Write "
        "experience from other sources with flowrl.offline.parquet.write_parquet(path, "
        "SampleBatch(obs=..., actions=..., ...))"
    )


def parquet_files(folder: Path | str) -> list[Path]:
    """Return the Parquet files of a folder, sorted by name; for the path of a file, that file.

    Raises:
        OfflineDataError: the folder does not exist or has no .parquet file.
    """
    path = expanded_path(folder)
    # file systems of other machines add "._NAME" with attributes of the file
    found = (file for file in path.glob("*.parquet") if not file.name.startswith("._"))
    files = [path] if path.is_file() else sorted(found)
    if not files:
        problem = "there is no .parquet file"
        if not path.exists():
            problem = "there is no such folder; a run writes its last rows when it stops"
        raise OfflineDataError(f"{folder}: {problem}")
    return files


def _flatten(name: str, column: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """Add the leaves of a column to `arrays`; return the spec from which `_restore` rebuilds it."""
    pa = import_pyarrow()

    if isinstance(column, dict):
        if not all(isinstance(key, str) for key in column):
            raise OfflineDataError(f"column {name!r}: its keys must be strings, got {[*column]}")
        return {"dict": {k: _flatten(f"{name}/{k}", v, arrays) for k, v in column.items()}}
    if isinstance(column, tuple):
        return {"tuple": [_flatten(f"{name}/{i}", v, arrays) for i, v in enumerate(column)]}
    if name in arrays:
        raise OfflineDataError(f"two columns have the name {name!r}")
    leaf = np.asarray(column)
    if leaf.dtype == object:
        texts = [json.dumps(to_json_value(value)) for value in leaf]
        arrays[name] = pa.array(texts, pa.string())
        return {"dtype": _JSON, "shape": [], "crc": zlib.crc32("".join(texts).encode())}
    if leaf.dtype.kind not in "biuf" or leaf.dtype.itemsize > 8:
        raise OfflineDataError(f"column {name!r}: Parquet cannot store dtype {leaf.dtype}")
    size = int(np.prod(leaf.shape[1:]))
    flat = np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).reshape(-1)
    crc = zlib.crc32(flat.view(np.uint8).data)
    spec = {"dtype": flat.dtype.name, "shape": list(leaf.shape[1:]), "crc": crc}
    if leaf.ndim == 1:
        arrays[name] = pa.array(flat)
    elif size == 0 or not len(leaf):
        arrays[name] = pa.nulls(len(leaf))
    elif leaf.dtype == np.uint8:
        buffers = [None, pa.py_buffer(flat)]
        arrays[name] = pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(leaf), buffers)
    else:
        arrays[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat), size)
    return spec


def _restore(name: str, spec: dict[str, Any], table: Any, rows: int) -> Any:
    """Rebuild a column from its spec and the Parquet table.

    Raises:
        KeyError, TypeError, ValueError: the table does not match the spec.
    """
    if "dict" in spec:
        items = spec["dict"].items()
        return {key: _restore(f"{name}/{key}", inner, table, rows) for key, inner in items}
    if "tuple" in spec:
        parts = enumerate(spec["tuple"])
        return tuple(_restore(f"{name}/{i}", inner, table, rows) for i, inner in parts)
    pa = import_pyarrow()

    stored = table.column(name).combine_chunks()
    if isinstance(stored, pa.ChunkedArray):  # without chunks
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
        raise ValueError(f"column {name!r} has dtype {flat.dtype}, expected {dtype}")
    _check_crc(name, spec, np.ascontiguousarray(flat).view(np.uint8).data)
    return flat.reshape(shape)


def check_no_extension_types(schema: Any) -> None:
    """Check that reading the columns of an Arrow schema executes no code.

    Raises:
        ValueError: a column has an extension type. Ray Data registers some whose values are
            pickles.
    """
    pa = import_pyarrow()

    if any(_has_extension(field.type, pa) for field in schema):
        raise ValueError("columns of Arrow extension types, which may contain pickles")


def _has_extension(kind: Any, pa: Any) -> bool:
    """Return whether an Arrow type is an extension type, or contains one."""
    if isinstance(kind, pa.BaseExtensionType):
        return True
    return any(_has_extension(kind.field(i).type, pa) for i in range(kind.num_fields))


def _check_crc(name: str, spec: dict[str, Any], data: Any) -> None:
    if zlib.crc32(data) != spec["crc"]:
        raise ValueError(f"column {name!r}: wrong checksum")


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON types; objects without a JSON form become their repr."""
    if isinstance(value, dict):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(inner) for inner in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return to_json_value(value.tolist())
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
