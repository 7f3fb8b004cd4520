"""Parse JSON from files that may be damaged or crafted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, it is nested too deeply, or a number in it is too large.
    """
    try:
        return json.loads(text, parse_float=_finite)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"nested too deeply or too large ({type(error).__name__})") from None


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each line of a file; nothing if there is no file.

    Lines that are not JSON, such as one that is being written, are left out.
    """
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield parse_json(line)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value
