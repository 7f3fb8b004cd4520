"""Checks of what environments return: results, observations, rewards and flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import optree
from gymnasium import spaces

from flowrl.data.spaces import copy_value, leaf_names, leaf_spaces, leaf_values, values_equal
from flowrl.errors import ConfigError

OnInvalidStep = Literal["warn", "raise", "drop", "replace"]

LARGEST_REWARD = float(np.finfo(np.float32).max)  # rewards are stored as float32
RESET_RESULTS = ("observation", "info")
STEP_RESULTS = ("observation", "reward", "terminated", "truncated", "info")
TOLERANCE = 1e-4  # relative slack of float bounds, for rounding errors of environments

_SCALARS = frozenset((bool, int, float, str, np.bool_, np.int64, np.float32, np.float64))

OUTSIDE_WARNING = (
    "worker %d: sub-environment %d returned %s. Such observations are used as they are and not "
    'reported again (on_invalid_step="warn").'
)


class InvalidStepError(ValueError):
    """An observation or reward that is not finite or lies outside its space."""


def invalid_step_error(problem: str, can_drop: bool = True) -> InvalidStepError:
    """Return the error for an invalid step; its message says what can be done.

    Args:
        problem: what the environment returned, and where.
        can_drop: whether to recommend "drop": it is not set already, and supported.
    """
    or_drop = ', "drop" drops the episode' if can_drop else ""
    return InvalidStepError(
        f"{problem}. Correct the environment or its space, or set on_invalid_step: "
        f'"replace" clips such values to their space and sets non-finite ones to 0{or_drop}'
    )


def env_name(env: Any) -> str:
    """Return the id of an environment, or the name of its class or of the user's wrapper around
    it, for messages."""
    while isinstance(env, gym.Wrapper):
        if not type(env).__module__.startswith(("gymnasium.", "flowrl.envs.time_limit")):
            return type(env).__name__
        env = env.env
    env = unwrapped(env)
    spec_id = getattr(getattr(env, "spec", None), "id", None)
    return spec_id if isinstance(spec_id, str) else type(env).__name__


def unwrapped(env: Any) -> Any:
    """Return the environment within all wrappers."""
    return getattr(env, "unwrapped", env)


def space_of(env: Any, name: str) -> Any:
    """Return a space of an environment.

    Args:
        env: the environment.
        name: attribute of the space, such as "observation_space".

    Raises:
        ConfigError: it is missing, or not a gymnasium space.
    """
    space = getattr(env, name, None)
    if not isinstance(space, spaces.Space):
        raise ConfigError(
            f"env: {env_name(env)}.{name} must be a gymnasium space (gymnasium.spaces.Box, "
            f"Discrete, …), got {space!r}"
        )
    return space


def copied_info(info: Any, depth: int = 3) -> Any:
    """Return a copy of an info, with copies of the arrays, lists and dicts in it: an environment
    may reuse them in the next step.

    Copies at most `depth` levels of dicts; the elements of lists are not copied.
    """
    if info.__class__ is dict:  # the check of Mapping is slow
        copied = info.copy()
    elif not isinstance(info, Mapping):
        return info.copy() if isinstance(info, (np.ndarray, list)) else info
    else:
        copied = info.copy() if isinstance(info, dict) else dict(info)
    for key, value in copied.items():
        if value.__class__ not in _SCALARS and depth:
            copied[key] = copied_info(value, depth - 1)
    return copied


class ObservationCheck:
    """Validate observations against one observation space.

    `check_structure` compares shape, dtype and structure, which is needed once per environment;
    `in_bounds` and `is_usable` check the values of every observation.

    Attributes:
        space: the observation space.
        is_array: whether observations are single arrays rather than nested.
        dtype: the space's dtype; None for nested spaces.
    """

    def __init__(self, space: spaces.Space):
        self.space = space
        self._leaves = leaf_spaces(space)
        self.is_array = len(self._leaves) == 1 and self._leaves[0] is space
        self.dtype: Any = space.dtype if self.is_array else None
        self._names = leaf_names(space, "obs")
        self._paths = _leaf_paths(space)
        keys = [path[0] for path in self._paths.leaves if len(path) == 1]
        is_flat = len(keys) == len(self._leaves) > 1
        self._leaves_of_flat = itemgetter(*keys) if is_flat else None
        self._shapes = [leaf.shape for leaf in self._leaves]
        self._dtypes = [leaf.dtype for leaf in self._leaves]
        self._bounds = [_bounds(leaf) for leaf in self._leaves]
        self._usable = [
            _bounds(spaces.Box(-np.inf, np.inf, leaf.shape, leaf.dtype.type))
            if isinstance(leaf, spaces.Box) and leaf.dtype is not None and leaf.dtype.kind == "f"
            else (None if isinstance(leaf, spaces.Box) else bounds)
            for leaf, bounds in zip(self._leaves, self._bounds, strict=True)
        ]

    def check_structure(self, observation: Any) -> None:
        """Compare the structure of an observation with the space.

        Raises:
            ConfigError: shape, dtype or structure differ.
        """
        if self.matches_shape_and_dtype(observation):  # the usual case, quickly
            return
        problem = None if self.is_array else _structure_problem(self.space, observation, "obs")
        if problem is not None:
            hint = ""
            if isinstance(self.space, spaces.Dict) and not isinstance(observation, dict):
                hint = (
                    ". If the keys of the space are ids of agents, set observation_spaces and "
                    "action_spaces of the MultiAgentEnv instead"
                )
            raise ConfigError(
                f"env: an observation does not fit the space {self.space}: {problem}: return it "
                f"with the structure of the space, or correct the space{hint}"
            )
        values = [observation] if self.is_array else leaf_values(self.space, observation)
        for name, space, value in zip(self._names, self._leaves, values, strict=True):
            array = np.asarray(value)
            dtype: Any = space.dtype
            if space.shape is None or dtype is None:
                continue
            if array.shape != space.shape or not np.can_cast(array.dtype, dtype, "same_kind"):
                remedy = f"return it with the dtype, for example by np.asarray(…, np.{dtype})"
                if array.shape != space.shape:
                    remedy = "return it with the shape of the space"
                found = f"has shape {array.shape} and dtype {array.dtype}"
                if value is None or array.dtype.hasobject:
                    found = "is None" if value is None else f"is a {type(value).__name__}"
                raise ConfigError(
                    f"env: an observation does not fit the space {self.space}: {name} {found}, not "
                    f"{space.shape} and {dtype}: {remedy}, or correct the space"
                )

    def matches_shape_and_dtype(self, observation: Any) -> bool:
        """Return whether an observation has arrays with exactly the space's shapes and dtypes, and,
        if it is nested, the structure of the space."""
        if self.is_array:
            dtype = getattr(observation, "dtype", None)
            if dtype is None:  # numpy: None == float64
                return False
            return dtype == self.dtype and observation.shape == self.space.shape
        try:
            for path, kind, size in self._paths.containers:
                container = _at(observation, path) if path else observation
                if not isinstance(container, kind) or len(container) != size:
                    return False
            leaves = self.leaves(observation)
            if [leaf.shape for leaf in leaves] != self._shapes:
                return False
            return [leaf.dtype for leaf in leaves] == self._dtypes
        except (AttributeError, KeyError, IndexError, TypeError):
            return False

    def leaves(self, observation: Any) -> Sequence[Any]:
        """Return the leaves of an observation, with dict keys in sorted order."""
        if self._leaves_of_flat is not None:
            return self._leaves_of_flat(observation)
        found = []
        for path in self._paths.leaves:  # inline, because it is called for every observation
            value = observation
            for key in path:
                value = value[key]
            found.append(value)
        return found

    def copy(self, observation: Any) -> Any:
        """Copy an observation into arrays with the space's dtypes."""
        if self.is_array:
            return np.array(observation, self.dtype)
        return copy_value(self.space, observation)

    def in_bounds(self, observation: Any) -> bool:
        """Return whether an observation, or an array of several, is finite and within bounds."""
        return self._within(self._bounds, observation)

    def is_usable(self, observation: Any) -> bool:
        """Return whether a policy can act on an observation, or an array of several: it is finite
        and within the bounds of discrete spaces, but may be outside those of a Box."""
        return self._within(self._usable, observation)

    def _within(self, bounds: list[tuple[Any, Any] | None], observation: Any) -> bool:
        if self.is_array:
            return _in_bounds(observation, bounds[0])
        pairs = zip(leaf_values(self.space, observation), bounds, strict=True)
        return all(_in_bounds(np.asarray(value), limits) for value, limits in pairs)

    def check_step(self, observation: Any, reward: float, returned: str) -> None:
        """Check what an environment returned, for `on_invalid_step="drop"`.

        Args:
            observation: has the structure of the space.
            reward: 0 for a reset.
            returned: start of the message: the environment, the word returned, the agent.

        Raises:
            InvalidStepError: a value is not finite or outside its space.
        """
        observation = np.asarray(observation) if self.is_array else observation
        if not self.in_bounds(observation):
            problem = self.describe_problem(observation)
        elif not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
            problem = f"a reward that is not finite: {reward}"
        else:
            return
        raise invalid_step_error(f"{returned} {problem}", can_drop=False)

    def invalid_rows(self, observations: Any, axes: int, usable: bool = False) -> np.ndarray:
        """Return which observations are not `in_bounds`, as bools.

        Args:
            observations: [..., *space.shape], or a nest of such arrays.
            axes: number of axes before those of the space.
            usable: return which are not `is_usable` instead.
        """
        leaves = [observations] if self.is_array else leaf_values(self.space, observations)
        invalid = np.zeros(leaves[0].shape[:axes], bool)
        for array, limits in zip(leaves, self._usable if usable else self._bounds, strict=True):
            if limits is not None:
                outside = ~((array >= limits[0]) & (array <= limits[1]))
                invalid |= outside.any(tuple(range(axes, array.ndim)))
        return invalid

    def repair(self, observation: Any) -> Any:
        """Return the observation with non-finite numbers set to 0, clipped to the bounds."""
        if self.is_array:
            return _repair(observation, self.space)
        pairs = zip(leaf_values(self.space, observation), self._leaves, strict=True)
        repaired = iter([_repair(np.asarray(value), space) for value, space in pairs])
        return optree.tree_map(lambda _: next(repaired), observation)

    def equals_saved(self, saved: Any, observation: Any) -> bool:
        """Return whether an observation equals a saved one, which may have been repaired."""
        if values_equal(saved, observation):
            return True
        if not self.is_array and _structure_problem(self.space, observation, "obs") is not None:
            return False
        return values_equal(saved, self.repair(self.copy(observation)))

    def describe_problem(self, observation: Any) -> str:
        """Describe an observation that is not `in_bounds`, for an error message: its first number
        that is not finite, or else its first number out of bounds."""
        values = [observation] if self.is_array else leaf_values(self.space, observation)
        arrays = [np.asarray(value) for value in values]
        for name, array in zip(self._names, arrays, strict=True):
            invalid = ~np.isfinite(array)
            if invalid.any():
                at, place = _first(invalid)
                return f"an observation that is not finite: {name}{place} is {array[at]}"
        for name, space, array, bounds in zip(
            self._names, self._leaves, arrays, self._bounds, strict=True
        ):
            if bounds is None or _in_bounds(array, bounds):
                continue
            at, place = _first(~((array >= bounds[0]) & (array <= bounds[1])))
            limits = (space.low, space.high) if isinstance(space, spaces.Box) else bounds
            low, high = (np.broadcast_to(limit, array.shape)[at] for limit in limits)
            return (
                f"an observation outside its space: {name}{place} is {array[at]}, its bounds are "
                f"{low} and {high}"
            )
        return f"an observation outside its space {self.space}"


class _Paths(NamedTuple):
    """Keys of the leaves of a nested space, and of each dict and tuple in it, with the types and
    the length of its values."""

    leaves: list[tuple[Any, ...]]
    containers: list[tuple[tuple[Any, ...], Any, int]]


def _leaf_paths(space: spaces.Space, path: tuple[Any, ...] = ()) -> _Paths:
    if isinstance(space, spaces.Dict):
        kind: Any = dict
        parts: list[tuple[Any, Any]] = [(key, space[key]) for key in sorted(space)]
    elif isinstance(space, spaces.Tuple):
        kind, parts = (tuple, list), list(enumerate(space))
    else:
        return _Paths([path], [])
    inner = [_leaf_paths(part, (*path, key)) for key, part in parts]
    leaves = [leaf for paths in inner for leaf in paths.leaves]
    own = path, kind, len(parts)
    return _Paths(leaves, [own, *(one for paths in inner for one in paths.containers)])


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _structure_problem(space: spaces.Space, value: Any, name: str) -> str | None:
    """Describe where the structure of a value called `name` differs from its space; None if it
    does not."""
    parts: Iterable[tuple[Any, spaces.Space]] = ()
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{name} is of the type {type(value).__name__}, not a dict"
        if value.keys() != space.spaces.keys():
            missing = [key for key in space if key not in value]
            extra = [key for key in value if key not in space.spaces]
            what = f"lacks the key {missing[0]!r}" if missing else f"has the extra key {extra[0]!r}"
            return f"{name} {what} (it has {list(value)})"
        parts = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(space.spaces):
            length = f" of length {len(value)}" if isinstance(value, (tuple, list)) else ""
            kind = f"{type(value).__name__}{length}"
            return f"{name} is a {kind}, not a tuple of length {len(space.spaces)}"
        parts = enumerate(space.spaces)
    problems = (_structure_problem(part, value[key], f"{name}[{key!r}]") for key, part in parts)
    return next(filter(None, problems), None)


def _first(mask: np.ndarray) -> tuple[tuple[int, ...], str]:
    """Return the index of the first True element, and the index as text; "" for a scalar."""
    at = tuple(int(i) for i in np.argwhere(mask)[0])
    return at, str(list(at)) if at else ""


def _bounds(space: spaces.Space) -> tuple[Any, Any] | None:
    if isinstance(space, spaces.Box):
        if space.dtype is not None and space.dtype.kind != "f":
            info = np.iinfo(space.dtype) if space.dtype.kind in "iu" else None
            full = info and (space.low <= info.min).all() and (space.high >= info.max).all()
            return None if full or info is None else (space.low, space.high)
        largest = np.finfo(space.dtype).max
        bounds = np.stack([space.low, space.high])
        slack = TOLERANCE * (1 + np.where(np.isfinite(bounds), np.abs(bounds), 0).max(0))
        with np.errstate(over="ignore"):  # near the largest number of the dtype
            low = np.maximum(space.low - slack, -largest)
            high = np.minimum(space.high + slack, largest)
        low, high = low.astype(space.dtype), high.astype(space.dtype)
        if low.size and (low == low.flat[0]).all() and (high == high.flat[0]).all():
            return low.flat[0], high.flat[0]  # comparing with a scalar is faster
        return low, high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    return None


def _in_bounds(array: np.ndarray, bounds: tuple[Any, Any] | None) -> bool:
    if bounds is None:
        return True
    low, high = bounds
    if array.ndim > 2 and array.size > 10_000 and np.ndim(low) == 1:
        # comparing with short rows takes numpy several times as long
        low, high = (np.broadcast_to(limits, array.shape[1:]).copy() for limits in bounds)
    # float bounds are finite, so these two comparisons also reject inf and NaN
    return bool(((array >= low) & (array <= high)).all())


def _repair(array: np.ndarray, space: spaces.Space) -> np.ndarray:
    bounds = _bounds(space)
    if bounds is None:
        return array
    low, high = (space.low, space.high) if isinstance(space, spaces.Box) else bounds
    finite = np.where(np.isfinite(array), array, 0)
    return np.clip(finite, low, high).astype(array.dtype)


FLAG_TYPES = frozenset({bool, np.bool_})
"""The usual types of the flags of an episode's end; `check_flags` decides about others."""


def check_flags(flags: Iterable[Any], names: str) -> None:
    """Check that flags of the end of an episode are bools, or the numbers 0 and 1.

    Args:
        flags: the flags.
        names: names them in the error message.

    Raises:
        ConfigError: one is not.
    """
    for flag in flags:
        is_number = isinstance(flag, (int, np.integer)) and flag in (0, 1)
        if not isinstance(flag, (bool, np.bool_)) and not is_number:
            raise ConfigError(f"env: step() returned the flag {flag!r}: {names} are bools")


def check_result(method: str, result: Any, names: Sequence[str]) -> None:
    """Raise ConfigError if a method of an environment did not return these values."""
    if isinstance(result, (tuple, list)) and len(result) == len(names):
        return
    is_sequence = isinstance(result, (tuple, list))
    found = f"{len(result)} values" if is_sequence else f"a {type(result).__name__}"
    raise ConfigError(
        f"env: {method}() must return ({', '.join(names)}), the environment returned {found}"
    )


NUMBERS = frozenset({float, int, bool, np.float64, np.float32, np.int64})
"""The usual types of a reward; `check_reward` decides about others."""


def check_reward(reward: Any) -> None:
    """Check that a reward is a single number.

    Raises:
        ConfigError: it is not.
    """
    try:
        array = np.asarray(reward)
        is_number = array.ndim == 0 and array.dtype.kind not in "cSU"
        if is_number:
            float(reward)
    except (TypeError, ValueError, OverflowError):  # None, or a nested list
        is_number = False
    if not is_number:
        raise ConfigError(
            f"env: step() returned the reward {reward!r:.60}: a reward is one real number"
        )
