"""Write a file, or append a record, completely or not at all."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

_LOSSES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)  # errors after which the content may be lost


def sync(file: int) -> None:
    """Wait until an open file or folder is on disk, if its file system supports that.

    Raises:
        OSError: the content may be lost, for example because the disk is full.
    """
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno in _LOSSES:
            raise


def append_whole(path: Path, data: bytes) -> None:
    """Append a record to a file; if that fails, the file keeps its earlier length.

    Raises:
        OSError: the record cannot be written.
    """
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except BaseException:
            file.truncate(size)
            raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8; if that fails, an existing file stays as it is.

    A symbolic link at `path` is replaced, not followed.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)  # it could be a link
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            sync(file.fileno())  # else a power failure after the renaming leaves an empty file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
