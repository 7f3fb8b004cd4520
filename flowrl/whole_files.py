"""Write a file completely or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
