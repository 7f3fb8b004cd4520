"""ViewRequirement: which part of a trajectory a column shows at each timestep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.settings import ConfigError

_RANGE = re.compile(r"\s*(-?\d+)\s*:\s*(-?\d+)\s*(?::\s*(\d+)\s*)?")


class ViewRequirement:
    """A view on the trajectory: at timestep t the rows t + shift of a column.

    Before the episode's first timestep a view of the observations repeats the first one, any
    other shows zeros; so do timesteps after the episode's end, or after the fragment's end where
    they are not known yet (the final observation is). No view reaches into another episode;
    backwards it reaches into earlier fragments of the same one.

    Args:
        data_col: the column that is viewed; None: the one of the view's own name.
        space: of one timestep's value.
        shift: 0 the timestep itself, 1 the next, -1 the one before. A list, or a range
            "first:last" or "first:last:step" (both ends included), gives a window: values
            [rows, k, …] in the order given.
        batch_repeat_value: one value for every so many rows, counted from the start of each
            trajectory's part of a fragment: a recurrent state is needed once per sequence. For
            views named `state_in_…` only.
        agents: ids of agents of the episode, whatever their policies, instead of the row's own:
            values [rows, agents, …] as they were in the same env step (plus shift), zeros for an
            agent that has none then, or (but for observations) has not seen by now what came of
            its action; the column `<name>_mask`, bool [rows, agents, …], says who has. `"others"`:
            all of the environment's `possible_agents` but the row's own.
        used_for_compute_actions: part of the input of action computation. None: wherever it is
            known by then (nothing later than the observation of the timestep).
        used_for_training: part of the train batch.

    Raises:
        ConfigError: a malformed shift; a view of the future that is to be used for actions.
    """

    def __init__(
        self,
        data_col: str | None = None,
        space: spaces.Space | None = None,
        shift: int | Sequence[int] | str = 0,
        batch_repeat_value: int = 1,
        used_for_compute_actions: bool | None = None,
        used_for_training: bool = True,
        agents: Sequence[Any] | str | None = None,
    ):
        if data_col is not None and not isinstance(data_col, str):
            raise ConfigError(f"ViewRequirement: data_col is a column's name, got {data_col!r}")
        self.data_col = data_col
        self.space = space
        self.shifts = _offsets(shift)
        self.shift = shift if isinstance(shift, (int, str)) else list(shift)
        if not isinstance(batch_repeat_value, int) or batch_repeat_value < 1:
            raise ConfigError(
                f"ViewRequirement: batch_repeat_value is an int from 1, got {batch_repeat_value!r}"
            )
        if agents is not None and agents != "others" and not isinstance(agents, (list, tuple)):
            raise ConfigError(
                f'ViewRequirement: agents is a list of agent ids or "others", got {agents!r}'
            )
        self.batch_repeat_value = batch_repeat_value
        self.agents = agents
        self.used_for_compute_actions = used_for_compute_actions
        self.used_for_training = used_for_training

    @property
    def is_window(self) -> bool:
        """Whether the view has an axis of timesteps."""
        return not isinstance(self.shift, int)

    @property
    def lookback(self) -> int:
        """Timesteps before its own that the view shows."""
        return max(0, -min(self.shifts))

    def known_for_actions(self, name: str) -> bool:
        """Whether the view is part of the input of action computation.

        Args:
            name: of the view.

        Raises:
            ConfigError: it shall be, but shows what is not known by then.
        """
        latest = 0 if (self.data_col or name) == "obs" else -1
        known = max(self.shifts) <= latest
        if self.used_for_compute_actions and not known:
            raise ConfigError(
                f"view {name!r}: shift {self.shift!r} of {self.data_col or name!r} is not known "
                "when actions are computed: leave used_for_compute_actions out"
            )
        return known if self.used_for_compute_actions is None else self.used_for_compute_actions

    def to_dict(self) -> dict[str, Any]:
        """The arguments but the space, as JSON."""
        return {
            "data_col": self.data_col,
            "shift": self.shift,
            "batch_repeat_value": self.batch_repeat_value,
            "agents": self.agents if isinstance(self.agents, str | None) else list(self.agents),
            "used_for_compute_actions": self.used_for_compute_actions,
            "used_for_training": self.used_for_training,
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any], space: spaces.Space | None = None) -> ViewRequirement:
        """What `to_dict` gave, as a view again."""
        return cls(space=space, **saved)

    def __repr__(self) -> str:
        parts = [] if self.data_col is None else [f"data_col={self.data_col!r}"]
        parts += [f"shift={self.shift!r}", f"space={self.space}"]
        if self.batch_repeat_value != 1:
            parts.append(f"batch_repeat_value={self.batch_repeat_value}")
        if self.agents is not None:
            parts.append(f"agents={self.agents!r}")
        if self.used_for_compute_actions is not None:
            parts.append(f"used_for_compute_actions={self.used_for_compute_actions}")
        if not self.used_for_training:
            parts.append("used_for_training=False")
        return f"ViewRequirement({', '.join(parts)})"


def _offsets(shift: Any) -> tuple[int, ...]:
    if isinstance(shift, bool):
        raise ConfigError(f"ViewRequirement: shift is an int, a list of ints or a range: {shift!r}")
    if isinstance(shift, int):
        return (shift,)
    if isinstance(shift, str):
        match = _RANGE.fullmatch(shift)
        first, last, step = (int(g) if g else 1 for g in match.groups()) if match else (0, -1, 1)
        if first > last or step < 1:
            raise ConfigError(
                'ViewRequirement: a range is "first:last" or "first:last:step", both ends '
                f"included and in order, got {shift!r}"
            )
        return tuple(range(first, last + 1, step))
    offsets = list(shift) if isinstance(shift, (list, tuple)) else []
    if not offsets or not all(isinstance(o, int) and not isinstance(o, bool) for o in offsets):
        raise ConfigError(f"ViewRequirement: shift is an int, a list of ints or a range: {shift!r}")
    return tuple(offsets)


def misfit(space: spaces.Space, values: Any, name: str) -> str | None:
    """What is wrong with arrays [B, …] of values of a space, in words; None if nothing is."""
    if isinstance(space, spaces.Dict):
        if not isinstance(values, dict) or set(values) != set(space):
            return f"{name}: a dict of arrays for {sorted(space)} is needed, got {_told(values)}"
        found = (misfit(space[key], values[key], f"{name}[{key!r}]") for key in sorted(space))
        return next((problem for problem in found if problem), None)
    if isinstance(space, spaces.Tuple):
        if not isinstance(values, tuple) or len(values) != len(space):
            return f"{name}: a tuple of {len(space)} arrays is needed, got {_told(values)}"
        found = (
            misfit(s, v, f"{name}[{i}]") for i, (s, v) in enumerate(zip(space, values, strict=True))
        )
        return next((problem for problem in found if problem), None)
    shape = "".join(f", {side}" for side in space.shape or ())
    kinds = "biuf" if isinstance(space, spaces.Box) else "biu"
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        return f"{name}: an array of {space.dtype} [B{shape}] is needed, got {_told(values)}"
    if values.ndim == 0 or values.shape[1:] != (space.shape or ()):
        return f"{name}: an array [B{shape}] is needed, got one of shape {list(values.shape)}"
    return None


def beyond(space: spaces.Space, values: Any, name: str) -> str | None:
    """What is wrong with the numbers of a policy's actions [B, …], which fit a space otherwise:
    those of Discrete spaces are from 0. None if nothing is."""
    if isinstance(space, spaces.Dict):
        inner = [(space[key], values[key], f"{name}[{key!r}]") for key in sorted(space)]
    elif isinstance(space, spaces.Tuple):
        inner = [(space[i], values[i], f"{name}[{i}]") for i in range(len(space))]
    else:
        inner = []
    problems = (beyond(*one) for one in inner)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and len(values):
        most = space.n if isinstance(space, spaces.Discrete) else space.nvec
        if ((values < 0) | (values >= most)).any():
            return f"{name}: numbers from 0 to below {most} are needed, there are " + (
                f"{values.min()} to {values.max()}"
            )
    return next((problem for problem in problems if problem), None)


def _told(values: Any) -> str:
    if isinstance(values, dict):
        return f"a dict of {sorted(map(str, values))}"
    if isinstance(values, np.ndarray):
        return f"one of {values.dtype} {list(values.shape)}"
    told = f"a {type(values).__name__}"
    return f"{told} of {len(values)}" if isinstance(values, (list, tuple)) else told
