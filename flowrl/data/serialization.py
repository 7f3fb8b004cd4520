"""State as a tree that JSON can hold, and its arrays apart; it comes back as it was.

Leaves are JSON values, numpy scalars and arrays, and batches; between them dicts (of any keys that
are leaves themselves), lists and tuples. What JSON has no form for is a dict of one reserved key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.data.batch_ref import BatchRef
from flowrl.data.multi_agent_batch import MultiAgentBatch
from flowrl.data.sample_batch import SampleBatch

_ARRAY, _OBJECTS, _SCALAR = "__array__", "__objects__", "__scalar__"
_PART = "__part__"
_TUPLE, _PAIRS, _BATCH, _POLICIES = "__tuple__", "__pairs__", "__batch__", "__policies__"

SMALL = 1024  # bytes


class Arrays(dict[str, np.ndarray]):
    """The arrays of a tree by their path; very small ones, of which there may be very many, as
    bytes one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.small = bytearray()

    def put(self, path: str, array: np.ndarray) -> Any:
        """Take an array in; how the tree says where it is."""
        if array.nbytes <= SMALL and array.dtype.isnative and array.dtype.kind != "U":
            begin = len(self.small)
            self.small += array.tobytes()
            return {_PART: [str(array.dtype), list(array.shape), begin]}
        name, number = path, 1
        while name in self:
            number += 1
            name = f"{path}~{number}"
        self[name] = array
        return {_ARRAY: name}


def encoded(value: Any, path: str, arrays: Arrays) -> Any:
    """The value as JSON; its arrays are put into `arrays`, by their path in the tree.

    Raises:
        TypeError: a leaf cannot be saved; it is named by its path.
    """
    if isinstance(value, np.generic):
        kind = value.dtype.kind
        if kind not in "biufU" or (kind != "U" and value.dtype.itemsize > 8):
            raise TypeError(f"checkpoint: {path} is a {value.dtype}, which cannot be saved")
        return {_SCALAR: [str(value.dtype), value.item()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            items = encoded(value.reshape(-1).tolist(), path, arrays)
            return {_OBJECTS: [list(value.shape), items]}
        kind = value.dtype.kind
        if kind not in "biufcSU" or (kind in "iuf" and value.dtype.itemsize > 8):
            raise TypeError(f"checkpoint: {path} is an array of {value.dtype}, which is not saved")
        return arrays.put(path, value)
    if isinstance(value, SampleBatch):
        return {_BATCH: encoded(dict(value.without_unread()), path, arrays)}
    if isinstance(value, BatchRef):
        return encoded(value.get(), path, arrays)
    if isinstance(value, MultiAgentBatch):
        policies = encoded(dict(value.policy_batches), path, arrays)
        return {_POLICIES: policies, "env_steps": value.env_steps()}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("__") for key in value):
            return {k: encoded(v, f"{path}/{k}" if path else k, arrays) for k, v in value.items()}
        pairs = [
            [encoded(k, f"{path}/key {i}", arrays), encoded(v, f"{path}/{i}", arrays)]
            for i, (k, v) in enumerate(value.items())
        ]
        return {_PAIRS: pairs}
    if isinstance(value, (list, tuple)):
        items = [encoded(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise TypeError(f"checkpoint: {path} is a {type(value).__name__}, which cannot be saved")


def can_be_saved(value: Any) -> bool:
    """Whether `encoded` takes it."""
    try:
        encoded(value, "", Arrays())
    except (TypeError, RecursionError):
        return False
    return True


def decoded(tree: Any, arrays: Mapping[str, np.ndarray], small: Any = b"") -> Any:
    """What was encoded.

    Raises:
        KeyError, TypeError, ValueError: it was not made by `encoded`.
    """
    if isinstance(tree, list):
        return [decoded(value, arrays, small) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) > 2 or not tree:
        return {key: decoded(value, arrays, small) for key, value in tree.items()}
    (kind, inner), *more = tree.items()
    if kind == _POLICIES and len(more) == 1:
        return MultiAgentBatch(decoded(inner, arrays, small), tree["env_steps"])
    if more or not kind.startswith("__"):
        return {key: decoded(value, arrays, small) for key, value in tree.items()}
    if kind == _ARRAY:
        return arrays[inner]
    if kind == _PART:
        dtype, shape, begin = np.dtype(inner[0]), inner[1], inner[2]
        count = math.prod(shape)
        return (
            np.frombuffer(small, dtype, count, begin).reshape(shape).copy()
            if count
            else (np.empty(shape, dtype))
        )
    if kind == _SCALAR:
        return np.dtype(inner[0]).type(inner[1])
    if kind == _TUPLE:
        return tuple(decoded(value, arrays, small) for value in inner)
    if kind == _PAIRS:
        return {decoded(key, arrays, small): decoded(value, arrays, small) for key, value in inner}
    if kind == _BATCH:
        return SampleBatch(decoded(inner, arrays, small))
    if kind == _OBJECTS:
        shape, items = inner
        column = np.empty(len(items), object)
        column[:] = decoded(items, arrays, small)
        return column.reshape(shape)
    raise ValueError(f"not known here: {kind}")
