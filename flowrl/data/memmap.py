"""MemmapArrays: arrays in files instead of memory, for what is larger than that."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


class MemmapArrays:
    """Arrays in files of a folder, whose pages are in memory while there is room.

    The files have no names: their room is free again when nobody has the arrays any more, even if
    the process is killed.

    Args:
        directory: of the files; made if it is not there. A local disk: over a network every page
            that is not in memory is a request.

    Raises:
        OSError: the folder cannot be made, or nothing can be written there.
    """

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, Any] = {}  # by where the array begins; none ends before this

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of this shape; no room is taken yet."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        file = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115 - as long as the array
        file.truncate(size)
        made = np.frombuffer(mmap.mmap(file.fileno(), size), dtype).reshape(shape)
        self._files[made.ctypes.data] = file
        return made

    def reserve(self, array: np.ndarray, first: int, count: int) -> None:
        """Take room for these rows of an array that `empty` gave: a write where there is none left
        would end the process.

        Raises:
            OSError: there is none left.
        """
        file = self._files.get(array.ctypes.data)
        if file is None or not count or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(file.fileno(), first * array.strides[0], count * array.strides[0])
        except OSError as error:
            wanted = count * array.strides[0] / 1e6
            raise OSError(
                error.errno,
                f"no room for {wanted:.1f} MB more of a replay buffer: {error.strerror}. Make room "
                "there, or the buffer's capacity smaller",
                str(self.directory),
            ) from error
