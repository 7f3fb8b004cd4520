"""Checkpoints: a folder of state.json, arrays and a manifest with their hashes.

Small arrays lie together in a safetensors file, each large one in a .npy file. Nothing is ever
unpickled. Files have names of their own, and the manifest, which says which ones count, is put in
place last and at once: whoever reads finds the checkpoint before or the new one, never half of one.
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
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib import format as npy
from safetensors.numpy import load, save

from flowrl.data.serialization import Arrays, decoded, encoded

FORMAT = 2
LARGE = 1 << 20  # bytes of an array that gets a file of its own
CHUNK = 8 << 20  # bytes that are written and hashed at once
MANIFEST = "manifest.json"
READ_AGAIN = 5  # times, where another process writes a new checkpoint over the one that is read
_SEAL = b',\n "blake2b": "'  # what follows is the hash of all before it


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: names the file and what is wrong with it."""


def write_checkpoint(path: Path | str, state: dict[str, Any], about: dict[str, Any]) -> Path | str:
    """Write a state tree, replacing the checkpoint at `path`.

    Args:
        path: a folder, or a URI that fsspec knows (`s3://…`).
        state: see `flowrl.data.serialization`.
        about: goes into the manifest (versions, the plan's name and hash).

    Raises:
        TypeError: a leaf cannot be saved, named by its path; nothing was written.
        OSError: the folder cannot be written; what was at `path` is untouched.
    """
    arrays = Arrays()
    tree = json.dumps(encoded(state, "", arrays)).encode()
    json.dumps(about)  # what cannot be told of is refused before anything is written
    place, token = _place(path), secrets.token_hex(4)
    small = {name: array for name, array in arrays.items() if array.nbytes < LARGE}
    large = {name: array for name, array in arrays.items() if array.nbytes >= LARGE}
    contiguous = {name: np.array(array, order="C", copy=None) for name, array in small.items()}
    # numpy's strings are nothing that safetensors knows
    strings = {n: a for n, a in contiguous.items() if a.dtype.kind in "SUc" or not a.dtype.isnative}
    parts: dict[str, Iterable[Any]] = {
        f"state-{token}.json": [tree],
        f"arrays-{token}.safetensors": [
            save({name: array for name, array in contiguous.items() if name not in strings})
        ],
        f"small-{token}.bin": [bytes(arrays.small)],
    }
    held = {}
    for i, (name, array) in enumerate({**large, **strings}.items()):
        parts[f"array-{token}-{i}.npy"] = _npy_chunks(array)
        held[f"array-{token}-{i}.npy"] = name
    written: list[str] = []
    files: dict[str, dict[str, Any]] = {}
    try:
        place.make()
        for file, chunks in parts.items():
            written.append(file)
            size, digest = place.write(file, chunks)
            files[file] = {"bytes": size, "hash": digest}
            if file in held:
                files[file]["array"] = held[file]
        place.publish(MANIFEST, _sealed({"format": FORMAT, **about, "files": files}))
    except BaseException:
        if not _is_published(place, files):
            for file in written:
                place.remove(file)
        raise
    with contextlib.suppress(OSError):  # what is left over is in nobody's way
        for file in place.names():
            if _OURS.fullmatch(file) and file not in files:
                place.remove(file)  # of the checkpoint before, or of a writer that was killed
    return path


def _is_published(place: _Place, files: dict[str, Any]) -> bool:
    """Whether the manifest names these files, whatever went wrong after it was put in place."""
    try:
        return any(name.encode() in bytes(place.read(MANIFEST)) for name in files)
    except (CheckpointError, OSError):
        return False


_OURS = re.compile(
    r"(state|arrays?|small)-[0-9a-f]{8}(-\d+)?\.(json|safetensors|npy|bin)|\.manifest\.json"
)


def read_manifest(path: Path | str) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: it is missing, altered, or of another format.
    """
    place = _place(path)
    name = place.name(MANIFEST)
    data = bytes(place.read(MANIFEST))
    body, seal, rest = data.rpartition(_SEAL)
    if not seal or rest != hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b'"\n}\n':
        if b'"format": 1' in data:
            raise CheckpointError(f"{name}: of an older format, which is not read any more")
        raise CheckpointError(f"{name}: the file was altered, or is not of a checkpoint")
    manifest = json.loads(data)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{name}: of format {manifest.get('format')}, not {FORMAT}")
    return dict(manifest)


def read_checkpoint(
    path: Path | str, part: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state tree and the manifest of a checkpoint.

    Args:
        part: of the state's keys this one alone: large arrays of the others are not read.

    Raises:
        CheckpointError: missing, incomplete, altered, or of another format.
    """
    for attempt in range(READ_AGAIN):
        manifest = read_manifest(path)
        try:
            return _read_files(path, manifest, part), manifest
        except CheckpointError:  # its files may have made room for those of a newer one
            if attempt + 1 == READ_AGAIN or read_manifest(path) == manifest:
                raise
    raise AssertionError


def _read_files(path: Path | str, manifest: dict[str, Any], part: str | None) -> dict[str, Any]:
    place = _place(path)
    tree: Any = None
    small: Any = b""
    arrays: dict[str, np.ndarray] = {}
    for file, about in manifest["files"].items():
        name, holds = place.name(file), about.get("array")
        if not _OURS.fullmatch(file):
            raise CheckpointError(f"{place.name(MANIFEST)}: {file!r} is no file of a checkpoint")
        if holds is not None and part is not None and not holds.startswith(f"{part}/"):
            continue
        data = place.read(file)
        if len(data) != about["bytes"] or _digest(file, data) != about["hash"]:
            raise CheckpointError(f"{name}: the file was altered (its hash is another)")
        try:
            if holds is not None:
                arrays[holds] = _from_npy(data)
            elif file.endswith(".json"):
                tree = json.loads(bytes(data))
            elif file.endswith(".bin"):
                small = bytes(data)
            else:
                arrays.update(load(bytes(data)))
        except Exception as error:
            raise CheckpointError(f"{name}: it cannot be read: {error}") from error
    try:
        if part is not None:
            tree = {part: tree[part]}
        state: dict[str, Any] = decoded(tree, arrays, small)
        return state
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{place.name('state')}: not a state: {error}") from error


def is_checkpoint(path: Path | str) -> bool:
    """Whether there is a whole checkpoint, whose files have the hashes that they should have."""
    try:
        manifest, place = read_manifest(path), _place(path)
        return all(
            _OURS.fullmatch(file) and _digest(file, place.read(file)) == about["hash"]
            for file, about in manifest["files"].items()
        )
    except (CheckpointError, OSError):
        return False


# -- files -----------------------------------------------------------------------------------------


def _sealed(manifest: dict[str, Any]) -> bytes:
    body = json.dumps(manifest, indent=1).encode().removesuffix(b"\n}")
    seal = hashlib.blake2b(body, digest_size=16).hexdigest().encode()
    return body + _SEAL + seal + b'"\n}\n'


class _Crc32:
    """A checksum in the manner of hashlib's: of large arrays, which it is ten times as fast for
    as a hash, so that the disk is what a save waits for."""

    def __init__(self) -> None:
        self._sum = 0

    def update(self, data: Any) -> None:
        self._sum = zlib.crc32(data, self._sum)

    def hexdigest(self) -> str:
        return f"crc32:{self._sum:08x}"


def _hasher(name: str) -> Any:
    return _Crc32() if name.endswith(".npy") else hashlib.blake2b(digest_size=32)


def _digest(name: str, data: Any) -> str:
    hasher = _hasher(name)
    hasher.update(data)
    return str(hasher.hexdigest())


def _npy_chunks(array: np.ndarray) -> Iterator[Any]:
    """An array as a .npy file, without a copy of it all."""
    header = io.BytesIO()
    about = {"descr": npy.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    npy.write_array_header_1_0(header, about)
    yield header.getvalue()
    if not array.flags.c_contiguous:
        rows = max(1, CHUNK // max(1, array.nbytes // max(1, len(array))))
        for begin in range(0, len(array), rows):
            part = np.ascontiguousarray(array[begin : begin + rows])
            yield part.reshape(-1).view(np.uint8).data
        return
    data = array.reshape(-1).view(np.uint8).data
    for begin in range(0, len(data), CHUNK):
        yield data[begin : begin + CHUNK]


def _from_npy(data: Any) -> np.ndarray:
    """The array of a .npy file in memory, without a copy."""
    head = io.BytesIO(bytes(data[:4096]))
    if npy.read_magic(head) != (1, 0):
        raise ValueError("not a .npy file of version 1.0")
    shape, fortran, dtype = npy.read_array_header_1_0(head)
    if dtype.hasobject or fortran:
        raise ValueError(f"an array of {dtype} is not read")
    return np.frombuffer(data, dtype, offset=head.tell()).reshape(shape)


class _Place(Protocol):
    """Where the files of a checkpoint are."""

    def make(self) -> None:
        """Make the folder."""

    def write(self, name: str, chunks: Iterable[Any]) -> tuple[int, str]:
        """Write a file; its size and hash."""

    def publish(self, name: str, data: bytes) -> None:
        """Put a small file in place at once."""

    def read(self, name: str) -> Any:
        """A file's bytes, which may be written to."""

    def names(self) -> list[str]:
        """The files that there are."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def name(self, name: str) -> str:
        """What a file is called in messages."""


def _place(path: Path | str) -> _Place:
    if isinstance(path, str) and "://" in path:
        return _Remote(path)
    return _Folder(Path(path))


def _copy(name: str, chunks: Iterable[Any], file: Any) -> tuple[int, str]:
    """Write chunks to a file, hashing each in a thread while it is written."""
    size, digest = 0, _hasher(name)
    with ThreadPoolExecutor(1) as hasher:
        for chunk in chunks:
            hashed = hasher.submit(digest.update, chunk)
            file.write(chunk)
            size += len(chunk)
            hashed.result()
    return size, str(digest.hexdigest())


class _Folder:
    """On this machine's disk."""

    def __init__(self, path: Path):
        self.path = path

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, chunks: Iterable[Any]) -> tuple[int, str]:
        with open(self.path / name, "wb") as file:
            told = _copy(name, chunks, file)
            file.flush()
            os.fsync(file.fileno())
        return told

    def publish(self, name: str, data: bytes) -> None:
        self.write(f".{name}", [data])
        self._sync()  # the files that it names are there before it is
        os.replace(self.path / f".{name}", self.path / name)
        self._sync()

    def _sync(self) -> None:
        for path in (self.path, self.path.parent):
            folder = os.open(path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def read(self, name: str) -> Any:
        path = self.path / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: there is no such file")
        data = np.empty(path.stat().st_size, np.uint8)
        with open(path, "rb") as file:
            got = file.readinto(data.data)
        return data[:got]

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def name(self, name: str) -> str:
        return str(self.path / name)


class _Remote:
    """Anywhere that fsspec can write to; a file is there when it is whole."""

    def __init__(self, uri: str):
        import fsspec

        self.uri = uri.rstrip("/")
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.uri)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{uri}: {error}") from error

    def make(self) -> None:
        self.files.makedirs(self.root, exist_ok=True)

    def write(self, name: str, chunks: Iterable[Any]) -> tuple[int, str]:
        with self.files.open(f"{self.root}/{name}", "wb") as file:
            return _copy(name, (bytes(chunk) for chunk in chunks), file)

    def publish(self, name: str, data: bytes) -> None:
        self.files.pipe_file(f"{self.root}/{name}", data)

    def read(self, name: str) -> Any:
        try:
            return np.frombuffer(bytearray(self.files.cat_file(f"{self.root}/{name}")), np.uint8)
        except FileNotFoundError:
            raise CheckpointError(f"{self.name(name)}: there is no such file") from None

    def names(self) -> list[str]:
        found = self.files.ls(self.root, detail=False) if self.files.exists(self.root) else []
        return [str(path).rsplit("/", 1)[-1] for path in found]

    def remove(self, name: str) -> None:
        if self.files.exists(f"{self.root}/{name}"):
            self.files.rm_file(f"{self.root}/{name}")

    def name(self, name: str) -> str:
        return f"{self.uri}/{name}"


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint's folder, the manifest first: what is left is none."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
