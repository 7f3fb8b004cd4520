"""Flatten values of a space to features: one-hot for integers, by torch and by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch
import torch.nn.functional as F
from gymnasium import spaces

from flowrl.data.spaces import leaf_spaces
from flowrl.errors import ConfigError


def flat_size(space: spaces.Space) -> int:
    """Return the number of features of one value of a space that is not nested.

    Raises:
        ConfigError: values of this space cannot be flattened.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return int(np.prod(space.shape))
    raise ConfigError(
        f"no model for the space {space}: supported are Box, Discrete, MultiDiscrete, MultiBinary, "
        "and Dict and Tuple of those"
    )


def check_supported(space: spaces.Space) -> None:
    """Raise ConfigError for a space whose values are not arrays of one shape."""
    for leaf in leaf_spaces(space):
        if isinstance(leaf, (spaces.Text, spaces.Sequence, spaces.Graph, spaces.OneOf)):
            flat_size(leaf)


def nested_size(space: spaces.Space) -> int:
    """Return the number of features of one value of any space, nested or not."""
    if isinstance(space, spaces.Dict):
        return sum(nested_size(space[key]) for key in space)
    if isinstance(space, spaces.Tuple):
        return sum(map(nested_size, space))
    return flat_size(space)


def flatten(space: spaces.Space, values: Any, zero_based: bool = False) -> torch.Tensor:
    """Return features [rows, size], float32, of values [rows, …].

    Args:
        space: the space, nested or not.
        values: tensors in the structure of the space.
        zero_based: integers start at 0, as in a policy's actions, not at the space's `start`.
    """
    if isinstance(space, spaces.Dict):
        return torch.cat([flatten(space[k], values[k], zero_based) for k in sorted(space)], 1)
    if isinstance(space, spaces.Tuple):
        pairs = zip(space, values, strict=True)
        return torch.cat([flatten(part, v, zero_based) for part, v in pairs], 1)
    if isinstance(space, spaces.Discrete):
        start = 0 if zero_based else int(space.start)
        return F.one_hot(values.reshape(-1).long() - start, int(space.n)).to(torch.float32)
    if isinstance(space, spaces.MultiDiscrete):
        indices = values.reshape(values.shape[0], -1).long()
        starts, sizes = space.start.reshape(-1).tolist(), space.nvec.reshape(-1).tolist()
        parts = zip(indices.unbind(1), starts, sizes, strict=True)
        columns = [F.one_hot(v - (0 if zero_based else start), n) for v, start, n in parts]
        return torch.cat(columns, 1).to(torch.float32)
    return values.reshape(values.shape[0], -1).to(torch.float32)


def flatten_numpy(space: spaces.Space, values: Any) -> np.ndarray:
    """Return features [rows, size], float32, of arrays [rows, …] in the structure of a space.

    Raises:
        ValueError: integers outside the space.
    """
    if type(space) is spaces.Box:  # the checks below are slow
        return values.reshape(values.shape[0], -1).astype(np.float32, copy=False)
    if isinstance(space, spaces.Dict):
        parts = space.spaces
        return np.concatenate([flatten_numpy(parts[k], values[k]) for k in sorted(parts)], 1)
    if isinstance(space, spaces.Tuple):
        pairs = zip(space, values, strict=True)
        return np.concatenate([flatten_numpy(part, v) for part, v in pairs], 1)
    if isinstance(space, spaces.Discrete):
        indices = values.reshape(-1) - int(space.start)
        if indices.size and not (indices.min() >= 0 and indices.max() < space.n):
            raise ValueError(f"observations {values} are not in {space}")
        return _one_hot(indices, int(space.n)).reshape(values.shape[0], -1)
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec.reshape(-1), space.start.reshape(-1)
        indices = values.reshape(len(values), -1, len(nvec)) - start
        if ((indices < 0) | (indices >= nvec)).any():
            raise ValueError(f"observations {values} are not in {space}")
        indices = indices + np.cumsum(nvec) - nvec
        one_hot = np.zeros((*indices.shape[:2], int(nvec.sum())), np.float32)
        np.put_along_axis(one_hot, indices, 1.0, axis=2)
        return one_hot.reshape(values.shape[0], -1)
    return values.reshape(values.shape[0], -1).astype(np.float32, copy=False)


def flatten_actions_numpy(space: spaces.Space, actions: Any) -> np.ndarray:
    """Return features [rows, size], float32, of a policy's zero-based actions, nested or not."""
    if isinstance(space, spaces.Discrete):
        return _one_hot(np.asarray(actions), int(space.n))
    tensors = optree.tree_map(lambda leaf: torch.from_numpy(np.array(leaf)), actions)
    return flatten(space, tensors, zero_based=True).numpy()


def _one_hot(indices: np.ndarray, size: int) -> np.ndarray:
    """Return vectors [*n, size], float32, with 1 at the indices [*n] and 0 elsewhere."""
    vectors = np.zeros((indices.size, size), np.float32)
    vectors[np.arange(indices.size), indices.reshape(-1)] = 1.0
    return vectors.reshape(*indices.shape, size)
