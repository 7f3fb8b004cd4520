"""The same item for several readers: what one changes in place, no other must see."""

from __future__ import annotations

import copy
import sys
from collections import deque
from typing import Any


def isolated(item: Any) -> Any:
    """A shallow copy whose containers are its own and whose numpy arrays are read-only views.

    Arrays are shared, not copied: writing into one raises numpy's "read-only" error at the
    writer. Torch tensors, which cannot be read-only, are copied. An object with a method
    `isolated()` makes its own copy; other objects are shared as they are.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # not imported: none either
    if numpy is not None and isinstance(item, numpy.ndarray):
        view = item.view()
        view.flags.writeable = False
        return view
    if torch is not None and isinstance(item, torch.Tensor):
        return item.clone()
    if hasattr(item, "isolated"):
        return item.isolated()
    if isinstance(item, dict):
        mapping = copy.copy(item)
        for key, value in item.items():
            mapping[key] = isolated(value)
        return mapping
    if isinstance(item, (list, deque)):
        sequence = copy.copy(item)
        for index, value in enumerate(item):
            sequence[index] = isolated(value)
        return sequence
    if isinstance(item, tuple):
        values = [isolated(value) for value in item]
        return item._make(values) if hasattr(item, "_make") else tuple(values)
    if isinstance(item, (set, bytearray)):
        return copy.copy(item)
    return item
