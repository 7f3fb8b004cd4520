"""Copies of an item for several readers, which do not see each other's in-place changes."""

from __future__ import annotations

import copy
import sys
from collections import deque
from typing import Any


def read_only_copy(item: Any) -> Any:
    """Return a copy of an item with its own containers and with read-only views of its arrays.

    Numpy arrays are shared, not copied: writing into one raises numpy's "read-only" error in the
    writer. Torch tensors, which cannot be read-only, are copied. An object with a method
    `read_only_copy()` creates its own copy; other objects are shared.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # None: no such items exist
    if numpy is not None and isinstance(item, numpy.ndarray):
        view = item.view()
        if item.dtype.hasobject and item.dtype.fields is None:
            view = numpy.empty_like(item)
            for index, value in numpy.ndenumerate(item):
                view[index] = read_only_copy(value)
        view.flags.writeable = False
        return view
    if torch is not None and isinstance(item, torch.Tensor):
        return item.clone()
    if hasattr(item, "read_only_copy"):
        return item.read_only_copy()
    if isinstance(item, dict):
        mapping = copy.copy(item)
        for key, value in item.items():
            mapping[key] = read_only_copy(value)
        return mapping
    if isinstance(item, (list, deque)):
        sequence = copy.copy(item)
        for index, value in enumerate(item):
            sequence[index] = read_only_copy(value)
        return sequence
    if isinstance(item, tuple):
        values = [read_only_copy(value) for value in item]
        if hasattr(item, "_make"):
            return item._make(values)
        # a subclass may have a constructor with other arguments
        return tuple(values) if type(item) is tuple else item
    if isinstance(item, (set, bytearray)):
        return copy.copy(item)
    return item
