"""MemmapArrays: arrays in memory-mapped files, for data that exceeds memory."""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.setting_values import check_path, expanded_path


class MemmapArrays:
    """Arrays in memory-mapped files of one directory.

    The files are unlinked as soon as they are open: the disk space of an array is released with it,
    even if the process is killed.

    Args:
        directory: directory of the files, created if missing. Use a local disk: on a network file
            system each page fault is a request.

    Raises:
        TypeError: `directory` is not a path.
        ValueError: `directory` is empty.
        OSError: the directory cannot be created or written.
    """

    def __init__(self, directory: Path | str):
        check_path("directory", directory)
        self.directory = expanded_path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, Any] = {}  # address of an array's first byte -> file

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialized array; no disk space is reserved yet."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        file = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115 - open while mapped
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
        array = np.frombuffer(memory, dtype).reshape(shape)
        self._files[array.ctypes.data] = file
        weakref.finalize(memory, _close, self._files, array.ctypes.data, file)
        return array

    def reserve(self, array: np.ndarray, first: int, count: int) -> None:
        """Reserve disk space for rows first … first+count-1 of an array that `empty` returned.

        A write to unreserved pages of a full disk would kill the process.

        Raises:
            OSError: the disk is full.
        """
        file = self._files.get(array.ctypes.data)
        if file is None or not count or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(file.fileno(), first * array.strides[0], count * array.strides[0])
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return  # the file system cannot reserve space
            megabytes = count * array.strides[0] / 1e6
            raise OSError(
                error.errno,
                f"no disk space for {megabytes:.1f} MB of a replay buffer: {error.strerror}. Free "
                "disk space or reduce the capacity of the buffer",
                str(self.directory),
            ) from error


def _close(files: dict[int, Any], address: int, file: Any) -> None:
    """Close the file of an array that was deleted; another thread may use its address already."""
    if files.get(address) is file:
        del files[address]
    file.close()
