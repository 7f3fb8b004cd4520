"""Convert actions between the policy's form and the environment's.

A policy gives continuous actions in [-1, 1] (with `normalize_actions`) and integers from 0; an
environment takes continuous actions within its bounds and integers from the space's start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


def to_env(space: spaces.Space, actions: Any, normalize: bool, clip: bool) -> Any:
    """Convert a policy's actions [B, …] to the environment's form.

    Args:
        space: the environment's action space.
        actions: arrays in the structure of the space.
        normalize: scale continuous actions from [-1, 1] to the bounds.
        clip: clip continuous actions to the bounds.
    """
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        actions = np.asarray(actions)
    if isinstance(space, spaces.Discrete):
        return (actions + space.start if space.start else actions).astype(space.dtype, copy=False)
    if isinstance(space, spaces.MultiDiscrete):
        return (actions + space.start).astype(space.dtype, copy=False)
    if isinstance(space, spaces.Dict):
        return {key: to_env(space[key], actions[key], normalize, clip) for key in sorted(space)}
    if isinstance(space, spaces.Tuple):
        parts = zip(space, actions, strict=True)
        return tuple(to_env(part, action, normalize, clip) for part, action in parts)
    if not isinstance(space, spaces.Box):
        return actions
    if normalize and is_bounded(space):
        low, high = 0.5 * space.low, 0.5 * space.high  # halves, because high - low may overflow
        actions = (high + low) + actions * (high - low)
    if clip:
        actions = np.clip(actions, space.low, space.high)
    return actions.astype(space.dtype, copy=False).reshape(-1, *space.shape)


def from_env(space: spaces.Space, actions: Any, normalize: bool) -> Any:
    """Convert an environment's actions [B, …] to the policy's form; inverse of `to_env`."""
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return actions - space.start
    if isinstance(space, spaces.Dict):
        return {key: from_env(space[key], actions[key], normalize) for key in sorted(space)}
    if isinstance(space, spaces.Tuple):
        parts = zip(space, actions, strict=True)
        return tuple(from_env(part, action, normalize) for part, action in parts)
    if not isinstance(space, spaces.Box):
        return actions
    if normalize and is_bounded(space):
        low, high = 0.5 * space.low, 0.5 * space.high
        width = np.where(high > low, high - low, 1.0)
        actions = (actions - (high + low)) / width
    return actions.astype(np.float32, copy=False)


def is_bounded(space: spaces.Box) -> bool:
    """Return whether all bounds of a space are finite."""
    return bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
