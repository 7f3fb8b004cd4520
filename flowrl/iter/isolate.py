"""The same item for several readers: what one changes in place, no other must see."""

from __future__ import annotations

import sys
from typing import Any


def isolated(item: Any) -> Any:
    """A shallow copy whose containers are its own and whose numpy arrays are read-only views.

    Arrays are shared, not copied: writing into one raises numpy's "read-only" error at the
    writer. An object with a method `isolated()` makes its own copy; others that are neither list,
    tuple, dict nor array are shared as they are.
    """
    numpy = sys.modules.get("numpy")  # not imported: no arrays either
    if numpy is not None and isinstance(item, numpy.ndarray):
        view = item.view()
        view.flags.writeable = False
        return view
    if hasattr(item, "isolated"):
        return item.isolated()
    kind = type(item)
    if kind is dict:
        return {key: isolated(value) for key, value in item.items()}
    if kind is list:
        return [isolated(value) for value in item]
    if kind is tuple:
        return tuple(isolated(value) for value in item)
    return item
