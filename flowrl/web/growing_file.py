"""GrowingFile: read the lines that were added to a file since the last call."""

from __future__ import annotations

from pathlib import Path


class GrowingFile:
    """Reads a file of lines to which another process appends.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path):
        self._path = path
        self._position = 0
        self._last_line = b""  # before the position

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether the file was replaced by another one, and its new complete lines.

        After a replacement, all lines are new.
        """
        try:
            file = open(self._path, "rb")  # noqa: SIM115
        except OSError:  # it does not exist yet, or cannot be read; other runs are shown
            return False, []
        with file:
            # not the inode: a file system may reuse that of a file that was replaced twice
            file.seek(self._position - len(self._last_line))
            replaced = file.read(len(self._last_line)) != self._last_line
            if replaced:
                self._position, self._last_line = 0, b""
                file.seek(0)
            data = file.read()
        end = data.rfind(b"\n") + 1  # the last line may be incomplete
        self._position += end
        lines = data[:end].splitlines(keepends=True)
        if lines:
            self._last_line = lines[-1]
        return replaced, [line.rstrip(b"\r\n") for line in lines]
