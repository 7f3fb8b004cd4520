"""GrowingFile: read the lines that were added to a file since the last call."""

from __future__ import annotations

import os
from pathlib import Path


class GrowingFile:
    """Reads a file of lines to which another process appends.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path):
        self._path = path
        self._identity: tuple[int, int] | None = None  # device and inode
        self._position = 0

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether the file was replaced by another one, and its new complete lines.

        After a replacement, all lines are new.
        """
        try:
            file = open(self._path, "rb")  # noqa: SIM115
        except OSError:  # it does not exist yet, or cannot be read; other runs are shown
            return False, []
        with file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino
            replaced = identity != self._identity or status.st_size < self._position
            if replaced:
                self._identity, self._position = identity, 0
            file.seek(self._position)
            data = file.read()
        end = data.rfind(b"\n") + 1  # the last line may be incomplete
        self._position += end
        return replaced, data[:end].splitlines()
