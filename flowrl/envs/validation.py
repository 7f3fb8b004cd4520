"""Whether what environments give is what their spaces promise."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import optree
from gymnasium import spaces

from flowrl.settings import ConfigError

OnInvalidStep = Literal["raise", "drop", "replace"]

LARGEST_REWARD = float(np.finfo(np.float32).max)  # rewards are stored as float32
TOLERANCE = 1e-4  # of a bound's size: environments compute in floats


class BadValueError(ValueError):
    """A value that no policy may learn from: not finite, or outside its space."""


class ObservationCheck:
    """The observations of one space.

    `first` compares everything (shape, dtype, structure), `fits` only what may go wrong later:
    numbers that are not finite or outside the bounds.
    """

    def __init__(self, space: spaces.Space):
        self.space = space
        self.leaves = _leaf_spaces(space)
        self.is_array = len(self.leaves) == 1 and self.leaves[0] is space
        self.dtype: Any = space.dtype if self.is_array else None
        self._bounds = [_bounds(leaf) for leaf in self.leaves]

    def first(self, observation: Any) -> None:
        """Compare an observation with its space.

        Raises:
            ConfigError: shape, dtype or structure differ.
        """
        parts = [observation] if self.is_array else self._parts(observation)
        for space, part in zip(self.leaves, parts, strict=True):
            array = np.asarray(part)
            dtype: Any = space.dtype
            if space.shape is None or dtype is None:
                continue
            if array.shape != space.shape or not np.can_cast(array.dtype, dtype, "same_kind"):
                raise ConfigError(
                    f"env: an observation does not fit the space {self.space}: it has shape "
                    f"{array.shape} and dtype {array.dtype}, not {space.shape} and {dtype}"
                )

    def looks_right(self, observation: Any) -> bool:
        """Whether an observation needs no closer look at its shape and dtype."""
        if not self.is_array:
            return False
        dtype = getattr(observation, "dtype", None)
        return dtype == self.dtype and observation.shape == self.space.shape

    def _parts(self, observation: Any) -> list[Any]:
        try:
            return leaves_of(self.space, observation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"env: an observation does not fit the space {self.space}: it is {observation!r}"
            ) from error

    def taken(self, observation: Any) -> Any:
        """A copy of its own, with the space's dtypes."""
        if self.is_array:
            return np.array(observation, self.dtype)
        return copied(self.space, observation)

    def fits(self, observation: Any) -> bool:
        """Whether an observation, or an array of several, is finite and within the bounds."""
        if self.is_array:
            return _within(observation, self._bounds[0])
        parts = leaves_of(self.space, observation)
        return all(_within(np.asarray(p), b) for p, b in zip(parts, self._bounds, strict=True))

    def outside(self, observations: np.ndarray) -> np.ndarray:
        """Which numbers of an array of observations are not finite or out of bounds."""
        bounds = self._bounds[0]
        if bounds is None:
            return np.zeros(observations.shape, bool)
        return ~((observations >= bounds[0]) & (observations <= bounds[1]))

    def repaired(self, observation: Any) -> Any:
        """The observation with 0 for what is not finite, clipped into the bounds."""
        if self.is_array:
            return _repair(observation, self.space)
        parts = zip(leaves_of(self.space, observation), self.leaves, strict=True)
        fixed = iter([_repair(np.asarray(part), space) for part, space in parts])
        return optree.tree_map(lambda _: next(fixed), observation)

    def describe(self, observation: Any) -> str:
        """What is wrong with an observation that does not fit."""
        parts = [observation] if self.is_array else leaves_of(self.space, observation)
        if any(not np.isfinite(part).all() for part in map(np.asarray, parts)):
            return "an observation that is not finite"
        return f"an observation outside its space {self.space}"


def _bounds(space: spaces.Space) -> tuple[Any, Any] | None:
    if isinstance(space, spaces.Box):
        if space.dtype is not None and space.dtype.kind != "f":
            info = np.iinfo(space.dtype) if space.dtype.kind in "iu" else None
            whole = info and (space.low <= info.min).all() and (space.high >= info.max).all()
            return None if whole or info is None else (space.low, space.high)
        largest = np.finfo(space.dtype).max
        slack = TOLERANCE * (1 + np.maximum(np.abs(space.low), np.abs(space.high)))
        low = np.maximum(space.low - np.where(np.isfinite(slack), slack, 0), -largest)
        high = np.minimum(space.high + np.where(np.isfinite(slack), slack, 0), largest)
        low, high = low.astype(space.dtype), high.astype(space.dtype)
        if low.size and (low == low.flat[0]).all() and (high == high.flat[0]).all():
            return low.flat[0], high.flat[0]  # one comparison with a number is faster
        return low, high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    return None


def _within(array: np.ndarray, bounds: tuple[Any, Any] | None) -> bool:
    # one comparison each finds what is out of bounds and what is not finite
    return bounds is None or bool(((array >= bounds[0]) & (array <= bounds[1])).all())


def _repair(array: np.ndarray, space: spaces.Space) -> np.ndarray:
    bounds = _bounds(space)
    if bounds is None:
        return array
    low, high = (space.low, space.high) if isinstance(space, spaces.Box) else bounds
    finite = np.where(np.isfinite(array), array, 0)
    return np.clip(finite, low, high).astype(array.dtype)


def check_reward(reward: Any) -> None:
    """Refuse what is not one number."""
    if reward is None or isinstance(reward, (str, bytes)) or np.ndim(reward) != 0:
        raise ConfigError(f"env: the reward is one number, step() gave {reward!r}")


# columns that the sampler makes: in every batch, and no policy's to give
RESERVED = {
    "obs",
    "new_obs",
    "actions",
    "rewards",
    "terminateds",
    "truncateds",
    "dones",
    "infos",
    "t",
    "eps_id",
    "unroll_id",
    "agent_index",
    "env_id",
    "seq_lens",
}


def check_columns(policy_id: str, extra: dict[str, Any], count: int) -> None:
    """Refuse columns from a policy that are the sampler's own, or not one row for each agent.

    Raises:
        ValueError: naming policy and column.
    """
    for name, column in extra.items():
        if name in RESERVED:
            raise ValueError(f"policy {policy_id!r} gave a column {name!r}, which is the sampler's")
        leaf = optree.tree_leaves(column)[0]
        if len(leaf) != count:
            raise ValueError(
                f"policy {policy_id!r} gave the column {name!r} with {len(leaf)} rows for {count} "
                "observations"
            )


def odd_actions(space: spaces.Space, actions: Any) -> int | None:
    """The first row of actions [B, …], as a policy gives them, that no environment can take.

    Numbers of Discrete and MultiDiscrete spaces count from 0; a Box's may be out of bounds, but
    must be finite.
    """
    if isinstance(space, spaces.Dict):
        rows = (odd_actions(space[key], actions[key]) for key in space)
    elif isinstance(space, spaces.Tuple):
        rows = (odd_actions(part, own) for part, own in zip(space, actions, strict=True))
    else:
        return _odd_rows(space, np.asarray(actions))
    return next((row for row in rows if row is not None), None)


def _odd_rows(space: spaces.Space, actions: np.ndarray) -> int | None:
    if isinstance(space, spaces.Discrete):
        if actions.ndim != 1 or actions.dtype.kind not in "iu":
            return 0
        odd = (actions < 0) | (actions >= space.n)
    elif isinstance(space, spaces.MultiDiscrete):
        odd = (actions < 0) | (actions >= space.nvec)
    elif isinstance(space, spaces.MultiBinary):
        odd = (actions < 0) | (actions > 1)
    elif actions.dtype.kind == "f":
        odd = ~np.isfinite(actions)
    else:
        return None
    return int(np.argwhere(odd)[0][0]) if odd.any() else None


# -- nested spaces ---------------------------------------------------------------------------------


def _leaf_spaces(space: spaces.Space) -> list[spaces.Space]:
    if isinstance(space, spaces.Dict):
        return [leaf for key in sorted(space) for leaf in _leaf_spaces(space[key])]
    if isinstance(space, spaces.Tuple):
        return [leaf for part in space for leaf in _leaf_spaces(part)]
    return [space]


def leaves_of(space: spaces.Space, value: Any) -> list[Any]:
    """The leaves of a nested value, dict keys in order."""
    if isinstance(space, spaces.Dict):
        return [leaf for key in sorted(space) for leaf in leaves_of(space[key], value[key])]
    if isinstance(space, spaces.Tuple):
        if len(value) != len(space.spaces):
            raise ValueError(f"a tuple of {len(value)} for {space}")
        return [leaf for part, v in zip(space, value, strict=True) for leaf in leaves_of(part, v)]
    return [value]


def copied(space: spaces.Space, value: Any) -> Any:
    """A copy of a nested value: arrays of the leaves' dtypes in plain dicts and tuples."""
    if isinstance(space, spaces.Dict):
        return {key: copied(space[key], value[key]) for key in sorted(space)}
    if isinstance(space, spaces.Tuple):
        return tuple(copied(part, v) for part, v in zip(space, value, strict=True))
    return np.array(value, space.dtype) if space.dtype is not None else value


def stacked(values: list[Any]) -> Any:
    """Arrays [len(values), …] of arrays, numbers or nests of them."""
    first = values[0]
    if isinstance(first, (dict, tuple)):
        return optree.tree_map(lambda *leaves: np.array(leaves), *values)
    return np.array(values)
