"""Convert observations, as environments and users give them, to arrays of the observation space."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.errors import ConfigError


def convert_observation(
    space: spaces.Space, obs: Any, batch: bool = False, name: str = "observation"
) -> Any:
    """Return an observation as an array of the space's dtype, or dicts and tuples of such arrays.

    Args:
        space: the observation space.
        obs: an observation; leaves may be arrays of other dtypes, numbers or lists of them.
        batch: whether each leaf of `obs` is a batch with shape [B, …].
        name: name of the observation in messages.

    Raises:
        ConfigError: it does not fit the space; the message names the leaf, what the space expects
            and what was given.
    """
    converted = _convert(space, obs, batch, name)
    if batch:
        sizes = {len(leaf): path for path, leaf in _leaves(converted, name)}
        if len(sizes) > 1:
            given = ", ".join(f"{path} has {size}" for size, path in sizes.items())
            raise ConfigError(f"{name}: its parts must have the same number of rows, but {given}")
        if 0 in sizes:
            raise ConfigError(f"{name}: the batch is empty")
    return converted


def is_single_observation(space: spaces.Space, obs: Any) -> bool:
    """Return whether an observation has no batch dimension, judged by its first array.

    Raises:
        ConfigError: the observation does not have the structure or the dimensions of the space.
    """
    name = "observation"
    while isinstance(space, (spaces.Dict, spaces.Tuple)):
        key = next(iter(space)) if isinstance(space, spaces.Dict) else 0
        parts = _parts(space, obs, name)
        parent: Any = space
        space, obs, name = parent[key], parts[key], f"{name}[{key!r}]"
    if space.shape is None:
        return True
    dimensions = _array(space, obs, None, name).ndim
    if dimensions not in (len(space.shape), len(space.shape) + 1):
        raise _error(space, obs, None, name)
    return dimensions == len(space.shape)


def _parts(space: spaces.Dict | spaces.Tuple, obs: Any, name: str) -> Any:
    """Return the parts of an observation in a Dict or a Tuple space."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, dict):
            raise ConfigError(f"{name}: expected a dict with {list(space)}, got {_kind(obs)}")
        if obs.keys() != space.keys():
            raise ConfigError(f"{name}: expected a dict with {list(space)}, got {list(obs)}")
    elif not isinstance(obs, (tuple, list)) or len(obs) != len(space.spaces):
        raise ConfigError(f"{name}: expected a tuple of {len(space.spaces)}, got {_kind(obs)}")
    return obs


def _convert(space: Any, obs: Any, batch: bool, name: str) -> Any:
    if isinstance(space, spaces.Dict):
        parts = _parts(space, obs, name)
        return {k: _convert(space[k], parts[k], batch, f"{name}[{k!r}]") for k in space}
    if isinstance(space, spaces.Tuple):
        parts = _parts(space, obs, name)
        return tuple(_convert(s, parts[i], batch, f"{name}[{i}]") for i, s in enumerate(space))
    if space.shape is None:  # not an array, such as a text
        for value in obs if batch else [obs]:
            if not space.contains(value):
                raise ConfigError(f"{name}: expected a value of {space}, got {value!r}")
        return obs
    array = _array(space, obs, batch, name)
    if array.shape[int(batch) :] != space.shape or array.ndim != len(space.shape) + batch:
        raise _error(space, array, batch, name)
    is_float = space.dtype.kind == "f"
    is_fitting = array.dtype.kind in {"f": "fiub", "b": "b"}.get(space.dtype.kind, "iu")
    if not is_fitting and not isinstance(space, spaces.MultiBinary):
        raise _error(space, array, batch, name)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(space.dtype, copy=False)
    if is_float and not np.isfinite(converted).all():
        index = tuple(np.argwhere(~np.isfinite(converted))[0].tolist())
        place = f" at {list(index)}" if index else ""
        problem = "is not finite"
        if np.isfinite(array[index]):
            problem = f"has a number that {space.dtype} cannot represent"
        raise ConfigError(f"{name} {problem}: {array[index]}{place}")
    bounds = _bounds(space)
    is_lossless = is_float or converted is array or np.array_equal(converted, array)
    if not is_lossless or (bounds and ((array < bounds[0]) | (array > bounds[1])).any()):
        raise ConfigError(f"{name}: expected values of {space}, got {obs!r}")
    return converted


def _array(space: Any, obs: Any, batch: bool | None, name: str) -> np.ndarray:
    """Return an observation as an array of numbers."""
    try:
        array = np.asarray(obs)
    except ValueError:  # lists of different lengths
        raise _error(space, obs, batch, name) from None
    if array.dtype.kind not in "fiub":
        raise _error(space, obs, batch, name)
    return array


def _bounds(space: Any) -> tuple[Any, Any] | None:
    """Return the smallest and the largest value of a space of integers; None for a Box, whose
    bounds are not checked."""
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return (0, 1) if isinstance(space, spaces.MultiBinary) else None


def _error(space: Any, obs: Any, batch: bool | None, name: str) -> ConfigError:
    """Return the error about an array's shape or dtype; `batch` is None if both are possible."""
    single, many = str(space.shape), f"({', '.join(map(str, ('B', *space.shape)))})"
    expected = f"{single} or {many}" if batch is None else (many if batch else single)
    return ConfigError(
        f"{name}: expected an array of shape {expected} and dtype {space.dtype}, got {_kind(obs)}"
    )


def _kind(obs: Any) -> str:
    """Return a description of an observation: its type, or its shape and dtype."""
    if isinstance(obs, np.ndarray) and obs.ndim:
        return f"shape {obs.shape} and dtype {obs.dtype}"
    if isinstance(obs, tuple) and len(obs) == 2 and isinstance(obs[1], dict):
        return "(observation, info), as reset() returns them: pass the observation"
    if isinstance(obs, (dict, list, tuple)):
        return f"a {type(obs).__name__} of length {len(obs)}"
    return repr(obs.item() if isinstance(obs, np.ndarray) else obs)


def _leaves(obs: Any, name: str) -> list[tuple[str, Any]]:
    """Return (name, leaf) for each leaf of a converted observation."""
    if isinstance(obs, (dict, tuple)):
        parts = obs.items() if isinstance(obs, dict) else enumerate(obs)
        return [leaf for key, part in parts for leaf in _leaves(part, f"{name}[{key!r}]")]
    return [(name, obs)]
