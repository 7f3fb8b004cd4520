"""Checkpoints: a folder with the state as JSON, its arrays, and a manifest with their hashes.

Small arrays share a safetensors file; each large array has a .npy file. Nothing is unpickled. Each
write uses new file names, and the manifest, which lists the valid files, is replaced atomically
last: a reader finds the previous checkpoint or the new one, never a mixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from safetensors.numpy import load, save

from flowrl.data.checkpoint_storage import (
    DAMAGED,
    CheckpointError,
    Storage,
    digest,
    storage_of,
)
from flowrl.data.json_text import parse_json
from flowrl.data.serialization import ArrayStore, decode, encode
from flowrl.setting_values import expanded_path
from flowrl.state_schema import Fields, Natural, StateError, check_state

__all__ = [
    "DAMAGED",
    "CheckpointError",
    "is_checkpoint",
    "is_run_dir",
    "list_checkpoints",
    "read_checkpoint",
    "read_manifest",
    "remove_checkpoint",
    "remove_partial_checkpoints",
    "resolve_checkpoint",
    "run_dir_of",
    "seal_manifest",
    "write_checkpoint",
]

FORMAT = 13
RESERVED = frozenset({"format", "files", "blake2b"})
"""Names of a manifest that `write_checkpoint` writes."""
_MANIFEST: Fields = {"files": dict[str, dict[str, Any]]}
_FILE: Fields = {"bytes": Natural, "hash": str}
LARGE_BYTES = 1 << 20  # arrays of this size have their own file
CHUNK_BYTES = 8 << 20  # bytes written and hashed at once
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run directory; each checkpoint in it is named by the number of its iteration."""
READ_ATTEMPTS = 5  # while another process replaces the checkpoint
_SEAL = b',\n "blake2b": "'  # followed by the hash of everything before it
_FILE_NAMES = re.compile(
    r"(state|arrays?|packed)-[0-9a-f]{8}(-\d+)?\.(json|safetensors|npy|bin)|\.manifest\.json"
)


def write_checkpoint(
    path: Path | str, state: dict[str, Any], metadata: dict[str, Any]
) -> Path | str:
    """Write a state tree, replacing the checkpoint at `path`.

    Args:
        path: a folder, or a URI that fsspec supports (`s3://…`).
        state: the tree; see `flowrl.data.serialization`.
        metadata: JSON values for the manifest (versions, the plan's name and hash).

    Raises:
        TypeError: a leaf cannot be saved; the message has its path. Nothing is written.
        OSError: the folder cannot be written, or contains another program's manifest. The previous
            checkpoint is untouched.
    """
    path = path if "://" in str(path) else expanded_path(path)
    if isinstance(path, Path) and path.is_file():
        raise FileExistsError(f"{path} is a file; a checkpoint is a folder: pass another path")
    arrays = ArrayStore()
    tree = json.dumps(encode(state, "", arrays)).encode()
    json.dumps(metadata)  # fails before anything is written
    storage, token = storage_of(path), secrets.token_hex(4)
    _check_own_manifest(storage)
    small = {name: array for name, array in arrays.items() if array.nbytes < LARGE_BYTES}
    large = {name: array for name, array in arrays.items() if array.nbytes >= LARGE_BYTES}
    contiguous = {name: np.array(array, order="C", copy=None) for name, array in small.items()}
    # safetensors has no strings, complex numbers or foreign byte orders
    other = {n: a for n, a in contiguous.items() if a.dtype.kind in "SUc" or not a.dtype.isnative}
    contents: dict[str, Iterable[Any]] = {
        f"state-{token}.json": [tree],
        f"arrays-{token}.safetensors": [
            save({name: array for name, array in contiguous.items() if name not in other})
        ],
        f"packed-{token}.bin": [bytes(arrays.packed)],
    }
    array_names = {}
    for i, (name, array) in enumerate({**large, **other}.items()):
        contents[f"array-{token}-{i}.npy"] = _npy_chunks(array)
        array_names[f"array-{token}-{i}.npy"] = name
    written: list[str] = []
    files: dict[str, dict[str, Any]] = {}
    try:
        storage.create()
        for file, chunks in contents.items():
            written.append(file)
            size, file_hash = storage.write(file, chunks)
            files[file] = {"bytes": size, "hash": file_hash}
            if file in array_names:
                files[file]["array"] = array_names[file]
        storage.publish(MANIFEST, seal_manifest({**metadata, "format": FORMAT, "files": files}))
    except BaseException:
        if not _is_published(storage, files):
            for file in written:
                storage.remove(file)
            storage.remove_empty_folder()
        raise
    with contextlib.suppress(OSError):  # remaining files do no harm
        for file in storage.names():
            if _FILE_NAMES.fullmatch(file) and file not in files:
                storage.remove(file)  # of the previous checkpoint, or of a killed writer
    return path


def _check_own_manifest(storage: Storage) -> None:
    """Check that the manifest that will be replaced, if there is one, belongs to a checkpoint.

    Raises:
        FileExistsError: it belongs to something else.
    """
    try:
        data = bytes(storage.read(MANIFEST))
    except CheckpointError:  # there is none
        return
    if _SEAL not in data:
        raise FileExistsError(
            f"{storage.display_name(MANIFEST)} does not belong to a checkpoint of flowrl: pass "
            "another path"
        )


def _is_published(storage: Storage, files: dict[str, Any]) -> bool:
    """Return whether the manifest names these files, even if an error occurred afterwards."""
    try:
        return any(name.encode() in bytes(storage.read(MANIFEST)) for name in files)
    except (CheckpointError, OSError):
        return False


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing, altered, or of another format version.
    """
    storage = storage_of(path)
    name = storage.display_name(MANIFEST)
    data = bytes(_read(storage, MANIFEST))
    body, seal, rest = data.rpartition(_SEAL)
    sealed = seal and rest == hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b'"\n}\n'
    if not sealed:
        raise CheckpointError(
            f"{name}: the file is incomplete or was altered, or it is not a checkpoint's manifest"
        )
    try:
        manifest = parse_json(data)
        version = manifest.get("format")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{name}: the manifest is damaged: {error}") from None
    if version != FORMAT:
        older = isinstance(version, int) and version < FORMAT
        writer = "the flowrl version that wrote it"
        if "flowrl" in manifest:
            writer = f"flowrl {manifest['flowrl']}, which wrote it"
        remedy = "train again, or read it with" if older else "read it with"
        raise CheckpointError(
            f"{name}: checkpoint format {version} is not supported, this flowrl reads format "
            f"{FORMAT} only: {remedy} {writer}"
        )
    try:
        check_state(manifest, _MANIFEST, name)
        for file, entry in manifest["files"].items():
            check_state(entry, _FILE, f"{name}/files/{file}")
    except StateError as error:
        raise CheckpointError(f"{error}: the manifest is damaged") from None
    return dict(manifest)


def read_checkpoint(
    path: Path | str, part: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state tree and the manifest of a checkpoint.

    Args:
        path: a folder, or a URI that fsspec supports.
        part: top-level key of the state to read, without the large arrays of the other keys; None
            reads the whole state.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, altered, or of another format
            version.
    """
    for attempt in range(READ_ATTEMPTS):
        manifest = read_manifest(path)
        try:
            return _read_files(path, manifest, part), manifest
        except CheckpointError:  # a newer checkpoint may have replaced the files
            if attempt + 1 == READ_ATTEMPTS or read_manifest(path) == manifest:
                raise
    raise AssertionError


def _read(storage: Storage, file: str) -> Any:
    """Return the bytes of a file as a writable array.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    try:
        return storage.read(file)
    except OSError as error:
        raise CheckpointError(f"{storage.display_name(file)}: cannot be read: {error}") from error


def _read_files(path: Path | str, manifest: dict[str, Any], part: str | None) -> dict[str, Any]:
    storage = storage_of(path)
    tree: Any = None
    packed: Any = b""
    arrays: dict[str, np.ndarray] = {}
    for file, entry in manifest["files"].items():
        name, array_name = storage.display_name(file), entry.get("array")
        if not _FILE_NAMES.fullmatch(file):
            raise CheckpointError(
                f"{storage.display_name(MANIFEST)}: {file!r} is not a checkpoint file"
            )
        if array_name is not None and part is not None and not _is_in(part, array_name):
            continue
        data = _read(storage, file)
        if len(data) != entry["bytes"]:
            raise CheckpointError(
                f"{name}: the file is damaged: it has {len(data)} bytes, but {entry['bytes']} were "
                "written"
            )
        if digest(file, data) != entry["hash"]:
            raise CheckpointError(f"{name}: the file was altered (its hash differs)")
        try:
            if array_name is not None:
                arrays[array_name] = _from_npy(data)
            elif file.endswith(".json"):
                tree = parse_json(bytes(data))
            elif file.endswith(".bin"):
                packed = bytes(data)
            else:
                arrays.update(load(bytes(data)))
        except Exception as error:
            raise CheckpointError(f"{name}: cannot be read: {error}") from error
    if tree is None:
        raise CheckpointError(f"{storage.display_name(MANIFEST)}: it names no file with the state")
    try:
        if part is not None:
            tree = {part: tree[part]}
        state: dict[str, Any] = decode(tree, arrays, packed)
        return state
    except DAMAGED as error:
        raise CheckpointError(
            f"{storage.display_name('state')}: not a valid state: {error}"
        ) from error


def _is_in(part: str, array_name: str) -> bool:
    """Return whether an array may belong to a top-level key (see `ArrayStore.put`)."""
    return array_name == part or array_name.startswith((f"{part}/", f"{part}~"))


def is_checkpoint(path: Path | str) -> bool:
    """Return whether a complete checkpoint exists: all files have the hashes of the manifest."""
    try:
        manifest, storage = read_manifest(path), storage_of(path)
        return all(
            _FILE_NAMES.fullmatch(file) and digest(file, storage.read(file)) == entry["hash"]
            for file, entry in manifest["files"].items()
        )
    except (CheckpointError, OSError):
        return False


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint's folder, the manifest first: a partly removed one is not valid."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def seal_manifest(manifest: dict[str, Any]) -> bytes:
    """Return a manifest as JSON, followed by its hash."""
    body = json.dumps(manifest, indent=1).encode().removesuffix(b"\n}")
    seal = hashlib.blake2b(body, digest_size=16).hexdigest().encode()
    return body + _SEAL + seal + b'"\n}\n'


# -- run directories -------------------------------------------------------------------------------


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run directory, oldest first."""
    complete = [path for path in _checkpoint_folders(run_dir) if (path / MANIFEST).exists()]
    return sorted(complete, key=lambda path: int(path.name))


def remove_partial_checkpoints(run_dir: Path) -> None:
    """Remove the checkpoints of a run directory that a killed process did not complete."""
    for path in _checkpoint_folders(run_dir):
        is_own = path.name == f"{int(path.name):06d}"  # not a folder of the user
        if is_own and not (path / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)


def _checkpoint_folders(run_dir: Path) -> list[Path]:
    """Return the numbered folders for checkpoints, complete or not."""
    folder = run_dir / CHECKPOINTS
    paths = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def is_run_dir(path: Path | str) -> bool:
    """Return whether a path is a run directory."""
    return "://" not in str(path) and os.path.isfile(expanded_path(path) / "config.json")


def run_dir_of(checkpoint: Path | str) -> Path | None:
    """Return the run directory that contains a checkpoint, or None."""
    folder = expanded_path(checkpoint).absolute().parent
    is_in_run = folder.name == CHECKPOINTS and is_run_dir(folder.parent)
    return folder.parent if is_in_run and "://" not in str(checkpoint) else None


def resolve_checkpoint(path: Path | str) -> Path | str:
    """Return the checkpoint at or inside a path.

    Args:
        path: a checkpoint, a run directory (its newest checkpoint), a checkpoint folder of Ray
            Tune, or a URI.

    Raises:
        CheckpointError: the folder contains no checkpoint.
    """
    folder = expanded_path(path)
    if "://" in str(path) or os.path.exists(folder / MANIFEST):
        return path
    in_tune_folder = folder / "algorithm"
    if os.path.exists(in_tune_folder / MANIFEST):
        return in_tune_folder
    run_checkpoints = list_checkpoints(folder)
    if run_checkpoints:
        return run_checkpoints[-1]
    if folder.is_file():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder")
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    raise CheckpointError(
        f"{path}: it contains no checkpoint: name a run directory, a folder RUN/checkpoints/NUMBER "
        "or a folder that save(path) wrote"
    )


# -- .npy files ------------------------------------------------------------------------------------


def _npy_chunks(array: np.ndarray) -> Iterator[Any]:
    """Iterate over the bytes of a .npy file without copying the whole array."""
    header = io.BytesIO()
    fields = {
        "descr": npy.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": array.shape,
    }
    npy.write_array_header_1_0(header, fields)
    yield header.getvalue()
    if not array.flags.c_contiguous:
        rows = max(1, CHUNK_BYTES // max(1, array.nbytes // max(1, len(array))))
        for start in range(0, len(array), rows):
            part = np.ascontiguousarray(array[start : start + rows])
            yield part.reshape(-1).view(np.uint8).data
        return
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _from_npy(data: Any) -> np.ndarray:
    """Return the array of a .npy file in memory, without a copy."""
    header = io.BytesIO(bytes(data[:4096]))
    if npy.read_magic(header) != (1, 0):
        raise ValueError("not a .npy file of version 1.0")
    shape, fortran_order, dtype = npy.read_array_header_1_0(header)
    if dtype.hasobject or fortran_order:
        raise ValueError(f"arrays of {dtype} are not supported")
    return np.frombuffer(data, dtype, offset=header.tell()).reshape(shape)
