"""Serialization of state trees: JSON values and separate arrays, without pickle.

Leaves are JSON values, numpy scalars and arrays, sources, batches with their sources, and objects
of `savable` classes. Inner nodes are dicts (with any such leaf as a key), lists and tuples. A value
without a JSON form becomes a dict with one reserved key. Lazy columns are not saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from flowrl.data.batch_ref import BatchRef
from flowrl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch
from flowrl.source import Source, sources_from_list, sources_to_list

C = TypeVar("C")
B = TypeVar("B", SampleBatch, MultiAgentBatch)

SMALL_BYTES = 1024  # arrays up to this size are packed into one byte string

_ARRAY, _OBJECTS, _SCALAR = "__array__", "__objects__", "__scalar__"
_PACKED = "__packed__"
_TUPLE, _PAIRS, _BATCH, _POLICIES = "__tuple__", "__pairs__", "__batch__", "__policies__"
_SOURCE, _WITH_SOURCES, _RECORD = "__source__", "__with_sources__", "__record__"

_RECORDS: dict[str, Any] = {}  # the savable classes by name


def savable(cls: type[C]) -> type[C]:
    """Let `encode` accept objects of a class, by its methods `state_dict()` and
    `from_state_dict(state)`. A decorator."""
    _RECORDS[cls.__name__] = cls
    return cls


class ArrayStore(dict[str, np.ndarray]):
    """The arrays of a state tree by their path.

    Arrays of up to SMALL_BYTES are appended to the byte string `packed` instead: a tree may have
    thousands of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed = bytearray()

    def put(self, path: str, array: np.ndarray) -> Any:
        """Add an array and return the JSON value that refers to it."""
        if array.nbytes <= SMALL_BYTES and array.dtype.isnative and array.dtype.kind != "U":
            offset = len(self.packed)
            self.packed += array.tobytes()
            return {_PACKED: [str(array.dtype), list(array.shape), offset]}
        name, number = path, 1
        while name in self:
            number += 1
            name = f"{path}~{number}"
        self[name] = array
        return {_ARRAY: name}


def encode(value: Any, path: str, arrays: ArrayStore) -> Any:
    """Convert a state tree to JSON and put its arrays into `arrays`.

    Args:
        value: the tree.
        path: its path in the whole state, for names and error messages.
        arrays: receives the arrays.

    Raises:
        TypeError: a leaf cannot be saved; the message has its path.
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
            items = encode(value.reshape(-1).tolist(), path, arrays)
            return {_OBJECTS: [list(value.shape), items]}
        kind = value.dtype.kind
        if kind not in "biufcSU" or (kind in "iuf" and value.dtype.itemsize > 8):
            raise TypeError(
                f"checkpoint: {path} is an array of {value.dtype}, which cannot be saved"
            )
        return arrays.put(path, value)
    if isinstance(value, (SampleBatch, MultiAgentBatch)) and value.sources:
        batch = _encode_batch(value, path, arrays)
        return {_WITH_SOURCES: [batch, encode(sources_to_list(value.sources), path, arrays)]}
    if isinstance(value, (SampleBatch, MultiAgentBatch)):
        return _encode_batch(value, path, arrays)
    if isinstance(value, BatchRef):
        return encode(value.get(), path, arrays)
    if isinstance(value, Source):
        return {_SOURCE: encode(sources_to_list([value])[0], path, arrays)}
    if type(value) in _RECORDS.values():
        return {_RECORD: [type(value).__name__, encode(value.state_dict(), path, arrays)]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("__") for key in value):
            return {k: encode(v, f"{path}/{k}" if path else k, arrays) for k, v in value.items()}
        pairs = [
            [encode(k, f"{path}/key {i}", arrays), encode(v, f"{path}/{i}", arrays)]
            for i, (k, v) in enumerate(value.items())
        ]
        return {_PAIRS: pairs}
    if isinstance(value, (list, tuple)):
        items = [encode(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise TypeError(
        f"checkpoint: {path} is of type {type(value).__name__}, which cannot be saved: convert it "
        "to numbers, strings, NumPy arrays, lists, tuples or dicts"
    )


def _encode_batch(value: Batch, path: str, arrays: ArrayStore) -> dict[str, Any]:
    """Convert a batch without its sources."""
    if isinstance(value, SampleBatch):
        named = dict(value.without_lazy_columns())
        if "infos" in named:
            infos = np.array(named["infos"], object)  # a copy
            for index, info in np.ndenumerate(infos):
                infos[index] = savable_info(info)
            named["infos"] = infos
        columns = encode(named, path, arrays)
        if not value.zero_padded:
            return {_BATCH: columns}
        return {_BATCH: columns, "max_seq_len": value.max_seq_len}
    policies = encode(dict(value.policy_batches), path, arrays)
    return {_POLICIES: policies, "env_steps": value.env_steps()}


def can_be_saved(value: Any) -> bool:
    """Return whether `encode` accepts a value."""
    try:
        encode(value, "", ArrayStore())
    except (TypeError, RecursionError):
        return False
    return True


def savable_info(info: dict[str, Any]) -> dict[str, Any]:
    """Return an info dict of an environment, or an empty one if `encode` does not accept it."""
    return info if can_be_saved(info) else {}


def with_savable_infos(batch: B) -> B:
    """Return a batch with its infos read, because lazy columns are not saved."""
    if isinstance(batch, MultiAgentBatch):
        parts = {policy_id: with_savable_infos(b) for policy_id, b in batch.policy_batches.items()}
        return batch.with_batches(parts)
    if "infos" not in batch:
        return batch
    infos = np.empty(batch.count, object)
    infos[:] = [savable_info(info or {}) for info in batch["infos"]]
    return batch.with_columns(infos=infos)


def decode(tree: Any, arrays: Mapping[str, np.ndarray], packed: Any = b"") -> Any:
    """Convert the result of `encode` back to the state tree.

    Args:
        tree: the JSON value.
        arrays: path -> array.
        packed: byte string with the small arrays.

    Raises:
        KeyError, TypeError, ValueError: `encode` did not produce this tree.
    """
    if isinstance(tree, list):
        return [decode(value, arrays, packed) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) > 2 or not tree:
        return {key: decode(value, arrays, packed) for key, value in tree.items()}
    (kind, inner), *more = tree.items()
    if kind == _POLICIES and len(more) == 1:
        return MultiAgentBatch(decode(inner, arrays, packed), tree["env_steps"])
    if kind == _BATCH and len(more) == 1:
        batch = SampleBatch.unchecked(decode(inner, arrays, packed))
        batch.zero_padded, batch.max_seq_len = True, tree["max_seq_len"]
        return batch
    if more or not kind.startswith("__"):
        return {key: decode(value, arrays, packed) for key, value in tree.items()}
    if kind == _ARRAY:
        return arrays[inner]
    if kind == _PACKED:
        dtype, shape, offset = np.dtype(inner[0]), inner[1], inner[2]
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        return np.frombuffer(packed, dtype, count, offset).reshape(shape).copy()
    if kind == _SCALAR:
        return np.dtype(inner[0]).type(inner[1])
    if kind == _TUPLE:
        return tuple(decode(value, arrays, packed) for value in inner)
    if kind == _PAIRS:
        return {decode(key, arrays, packed): decode(value, arrays, packed) for key, value in inner}
    if kind == _WITH_SOURCES:
        batch = decode(inner[0], arrays, packed)
        batch.sources = sources_from_list(decode(inner[1], arrays, packed))
        return batch
    if kind == _SOURCE:
        return sources_from_list([decode(inner, arrays, packed)])[0]
    if kind == _RECORD:
        return _RECORDS[inner[0]].from_state_dict(decode(inner[1], arrays, packed))
    if kind == _BATCH:
        return SampleBatch(decode(inner, arrays, packed))
    if kind == _OBJECTS:
        shape, items = inner
        column = np.empty(len(items), object)
        column[:] = decode(items, arrays, packed)
        return column.reshape(shape)
    raise ValueError(f"unknown kind of value: {kind}")
