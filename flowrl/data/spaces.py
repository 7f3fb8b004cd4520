"""Values of gymnasium spaces, which may be nested: zeros, leaves, copies and stacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
from gymnasium import spaces

MIN_IMAGE_SIDE = 7  # for an array with three axes to count as an image
MIN_NATURE_SIDE = 36  # for the filters of Mnih et al. 2015


def zeros_of(space: spaces.Space) -> Any:
    """Return zeros in the shape of one value of the space."""
    if isinstance(space, spaces.Dict):
        return {key: zeros_of(space[key]) for key in sorted(space)}
    if isinstance(space, spaces.Tuple):
        return tuple(zeros_of(part) for part in space)
    return np.zeros(space.shape or (), space.dtype)


def first_value_of(space: spaces.Space) -> Any:
    """Return a value of the space: zeros, but the first choices of spaces with a start."""
    if isinstance(space, spaces.Dict):
        return {key: first_value_of(space[key]) for key in sorted(space)}
    if isinstance(space, spaces.Tuple):
        return tuple(first_value_of(part) for part in space)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return np.asarray(zeros_of(space) + space.start, space.dtype)
    return zeros_of(space)


def leaf_spaces(space: spaces.Space) -> list[spaces.Space]:
    """Return the leaves of a nested space, with dict keys in sorted order."""
    if isinstance(space, spaces.Dict):
        return [leaf for key in sorted(space) for leaf in leaf_spaces(space[key])]
    if isinstance(space, spaces.Tuple):
        return [leaf for part in space for leaf in leaf_spaces(part)]
    return [space]


def leaf_names(space: spaces.Space, name: str) -> list[str]:
    """Return the names of the leaves of a value called `name`, in the order of `leaf_spaces`.

    >>> leaf_names(spaces.Dict({"goal": spaces.Discrete(2)}), "obs")
    ["obs['goal']"]
    """
    if isinstance(space, spaces.Dict):
        parts = [leaf_names(space[key], f"{name}[{key!r}]") for key in sorted(space)]
    elif isinstance(space, spaces.Tuple):
        parts = [leaf_names(part, f"{name}[{i}]") for i, part in enumerate(space)]
    else:
        return [name]
    return [leaf for names in parts for leaf in names]


def leaf_values(space: spaces.Space, value: Any) -> list[Any]:
    """Return the leaves of a nested value, in the order of `leaf_spaces`.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the value does not have the space's structure.
    """
    if isinstance(space, spaces.Dict):
        return [leaf for key in sorted(space) for leaf in leaf_values(space[key], value[key])]
    if isinstance(space, spaces.Tuple):
        if len(value) != len(space.spaces):
            raise ValueError(f"a tuple of length {len(value)} for {space}")
        return [leaf for part, v in zip(space, value, strict=True) for leaf in leaf_values(part, v)]
    return [value]


def copy_value(space: spaces.Space, value: Any) -> Any:
    """Copy a value into plain dicts and tuples of arrays with the dtypes of the space."""
    if isinstance(space, spaces.Dict):
        return {key: copy_value(space[key], value[key]) for key in sorted(space)}
    if isinstance(space, spaces.Tuple):
        return tuple(copy_value(part, v) for part, v in zip(space, value, strict=True))
    return np.array(value, space.dtype) if space.dtype is not None else value


def stack_values(values: list[Any]) -> Any:
    """Stack arrays, numbers or nests of them into arrays [len(values), …]."""
    first = values[0]
    if isinstance(first, (dict, tuple)):
        return optree.tree_map(lambda *leaves: np.array(leaves), *values)
    return np.array(values)


def values_equal(first: Any, second: Any) -> bool:
    """Return whether two values are equal; floats compare NaN as equal.

    `second` is cast to the dtype of `first`.
    """
    if not isinstance(first, (dict, tuple, list)):
        expected, actual = np.asarray(first), np.asarray(second)
        if expected.dtype != actual.dtype:
            actual = actual.astype(expected.dtype)
        return np.array_equal(expected, actual, equal_nan=expected.dtype.kind == "f")
    tree: Any = first
    leaves, structure = optree.tree_flatten(tree)
    other_leaves, other_structure = optree.tree_flatten(second)
    return bool(structure == other_structure) and all(map(values_equal, leaves, other_leaves))


def are_compatible(space: spaces.Space, other: spaces.Space) -> bool:
    """Return whether two spaces are equal, except for the bounds and the precision of Boxes."""
    if isinstance(space, spaces.Box) and isinstance(other, spaces.Box):
        return space.shape == other.shape and space.dtype.kind == other.dtype.kind
    if isinstance(space, spaces.Dict) and isinstance(other, spaces.Dict):
        return space.keys() == other.keys() and all(
            are_compatible(space[key], other[key]) for key in space
        )
    if isinstance(space, spaces.Tuple) and isinstance(other, spaces.Tuple):
        return len(space) == len(other) and all(map(are_compatible, space, other))
    return bool(space == other)


def fits_into(space: spaces.Space, other: spaces.Space, with_bounds: bool) -> bool:
    """Return whether every value of a space can be a value of another one.

    Args:
        space: the space of the values.
        other: the other space.
        with_bounds: whether the values of Boxes must be within the bounds of the other space. If
            not, only their dtype must fit.
    """
    if space == other:
        return True
    if isinstance(space, spaces.Box) and isinstance(other, spaces.Box):
        return _box_fits_into(space, other, with_bounds)
    if isinstance(space, spaces.Discrete) and isinstance(other, spaces.Discrete):
        return _ranges_fit(space.start, space.n, other.start, other.n)
    if isinstance(space, spaces.MultiDiscrete) and isinstance(other, spaces.MultiDiscrete):
        is_similar = space.shape == other.shape
        return is_similar and _ranges_fit(space.start, space.nvec, other.start, other.nvec)
    if isinstance(space, spaces.Dict) and isinstance(other, spaces.Dict):
        return space.keys() == other.keys() and all(
            fits_into(space[key], other[key], with_bounds) for key in space
        )
    if isinstance(space, spaces.Tuple) and isinstance(other, spaces.Tuple):
        pairs = zip(space, other, strict=False)
        return len(space) == len(other) and all(fits_into(*pair, with_bounds) for pair in pairs)
    return False


def _box_fits_into(space: spaces.Box, other: spaces.Box, with_bounds: bool) -> bool:
    is_integer = np.issubdtype(space.dtype, np.integer)
    if space.shape != other.shape or not np.can_cast(space.dtype, other.dtype, "same_kind"):
        return False
    if is_integer and np.issubdtype(other.dtype, np.integer):
        limits = np.iinfo(str(other.dtype))
        if int(space.low.min()) < limits.min or int(space.high.max()) > limits.max:
            return False
    if not with_bounds:
        return True
    kind: Any = object if is_integer else np.float32  # bounds differ by the rounding of float32
    with np.errstate(over="ignore"):
        low, high, least, most = (
            np.asarray(bound, kind) for bound in (space.low, space.high, other.low, other.high)
        )
    return bool(np.all(low >= least) and np.all(high <= most))


def _ranges_fit(start: Any, count: Any, other_start: Any, other_count: Any) -> bool:
    """Return whether the integers from `start` are among those from `other_start`."""
    start, count, other_start, other_count = (
        np.asarray(one, np.int64) for one in (start, count, other_start, other_count)
    )
    ends = start + count <= other_start + other_count
    return bool((other_start <= start).all() and ends.all())


def is_image(space: spaces.Space) -> bool:
    """Return whether an encoder treats a space as an image.

    Images are Boxes of height, width and channels (or channels first) with sides of at least 7
    pixels, and uint8 Boxes of height and width with sides of at least 36 pixels.
    """
    if not isinstance(space, spaces.Box):
        return False
    sides = sorted(space.shape)[-2:]
    if len(space.shape) == 3:
        return sides[0] >= MIN_IMAGE_SIDE
    return len(space.shape) == 2 and space.dtype == np.uint8 and sides[0] >= MIN_NATURE_SIDE


def has_image(space: spaces.Space) -> bool:
    """Return whether a space is an image or a nested space with an image among its leaves."""
    return any(map(is_image, leaf_spaces(space)))
