"""Parse JSON from files that may be damaged or crafted."""

from __future__ import annotations

import json
import math
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


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value
