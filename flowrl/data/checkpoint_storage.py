"""Where checkpoint files are stored: a local folder, or any file system that fsspec supports."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flowrl.setting_values import expanded_path
from flowrl.whole_files import sync


class CheckpointError(ValueError):
    """A checkpoint cannot be read; the message names the file and the defect."""


DAMAGED = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError,
    MemoryError,
)  # fmt: skip
"""Errors that the contents of a damaged or crafted checkpoint can cause."""


class Storage(Protocol):
    """The files of one checkpoint."""

    def create(self) -> None:
        """Create the folder."""

    def write(self, name: str, chunks: Iterable[Any]) -> tuple[int, str]:
        """Write a file and return its size in bytes and its hash."""

    def publish(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""

    def read(self, name: str) -> Any:
        """Return the bytes of a file as a writable array."""

    def names(self) -> list[str]:
        """List the files."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def remove_empty_folder(self) -> None:
        """Remove the folder if it is a local one without files."""

    def display_name(self, name: str) -> str:
        """Return the full name of a file for messages."""


def storage_of(path: Path | str) -> Storage:
    """Return the storage of a folder, or of a URI such as `s3://…`."""
    if isinstance(path, str) and "://" in path:
        scheme, _, local = path.partition("://")
        return LocalStorage(Path(local)) if scheme in ("file", "local") else RemoteStorage(path)
    return LocalStorage(expanded_path(path))


class LocalStorage:
    """A folder on a local file system."""

    def __init__(self, path: Path):
        self.path = path

    def create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, chunks: Iterable[Any]) -> tuple[int, str]:
        with open(self.path / name, "wb") as file:
            size_and_hash = _write_chunks(name, chunks, file)
            file.flush()
            sync(file.fileno())
        return size_and_hash

    def publish(self, name: str, data: bytes) -> None:
        (self.path / f".{name}").unlink(missing_ok=True)  # it could be a link
        try:
            self.write(f".{name}", [data])
            self._sync()  # the files that it names must be on disk first
            os.replace(self.path / f".{name}", self.path / name)
        except BaseException:
            self.remove(f".{name}")
            raise
        self._sync()

    def _sync(self) -> None:
        for path in (self.path, self.path.parent):
            with contextlib.suppress(PermissionError):  # the folder may not be read
                folder = os.open(path, os.O_RDONLY)
                try:
                    sync(folder)
                finally:
                    os.close(folder)

    def read(self, name: str) -> Any:
        path = self.path / name
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a symbolic link: copy the file itself")
        if not path.is_file():
            raise CheckpointError(f"{path}: file not found")
        try:
            with open(path, "rb") as file:
                data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
                size = file.readinto(data.data)
        except FileNotFoundError:  # a newer checkpoint has replaced it meanwhile
            raise CheckpointError(f"{path}: file not found") from None
        return data[:size]

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_empty_folder(self) -> None:
        with contextlib.suppress(OSError):  # it has files
            self.path.rmdir()

    def display_name(self, name: str) -> str:
        return str(self.path / name)


class RemoteStorage:
    """A folder on a file system of fsspec, where a file appears only once it is complete."""

    def __init__(self, uri: str):
        import fsspec

        self.uri = uri.rstrip("/")
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.uri)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{uri}: {error}") from error

    def create(self) -> None:
        self.files.makedirs(self.root, exist_ok=True)

    def write(self, name: str, chunks: Iterable[Any]) -> tuple[int, str]:
        with self.files.open(f"{self.root}/{name}", "wb") as file:
            return _write_chunks(name, (bytes(chunk) for chunk in chunks), file)

    def publish(self, name: str, data: bytes) -> None:
        self.files.pipe_file(f"{self.root}/{name}", data)

    def read(self, name: str) -> Any:
        try:
            return np.frombuffer(bytearray(self.files.cat_file(f"{self.root}/{name}")), np.uint8)
        except FileNotFoundError:
            raise CheckpointError(f"{self.display_name(name)}: file not found") from None

    def names(self) -> list[str]:
        paths = self.files.ls(self.root, detail=False) if self.files.exists(self.root) else []
        return [str(path).rsplit("/", 1)[-1] for path in paths]

    def remove(self, name: str) -> None:
        if self.files.exists(f"{self.root}/{name}"):
            self.files.rm_file(f"{self.root}/{name}")

    def remove_empty_folder(self) -> None:
        pass  # object stores have no folders

    def display_name(self, name: str) -> str:
        return f"{self.uri}/{name}"


# -- hashes ----------------------------------------------------------------------------------------


class _Crc32:
    """CRC-32 with the interface of hashlib.

    Used for large arrays: ten times as fast as a cryptographic hash, so the disk limits a save.
    """

    def __init__(self) -> None:
        self._sum = 0

    def update(self, data: Any) -> None:
        self._sum = zlib.crc32(data, self._sum)

    def hexdigest(self) -> str:
        return f"crc32:{self._sum:08x}"


def _hasher(name: str) -> Any:
    return _Crc32() if name.endswith(".npy") else hashlib.blake2b(digest_size=32)


def digest(name: str, data: Any) -> str:
    """Return the hash of a file's bytes; the kind of hash depends on the file's suffix."""
    hasher = _hasher(name)
    hasher.update(data)
    return str(hasher.hexdigest())


def _write_chunks(name: str, chunks: Iterable[Any], file: Any) -> tuple[int, str]:
    """Write chunks to a file and hash them in a thread at the same time."""
    size, hasher = 0, _hasher(name)
    with ThreadPoolExecutor(1) as executor:
        for chunk in chunks:
            hashed = executor.submit(hasher.update, chunk)
            file.write(chunk)
            size += len(chunk)
            hashed.result()
    return size, str(hasher.hexdigest())
