"""ActingViews: build the inputs with which a policy acts from time-major columns.

A view shows rows of a source column at fixed distances from each row. Rows before the episode, and
before the stored rows, are filled: see `ViewRequirement`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from flowrl.data.columns import map_leaves
from flowrl.data.fragment_columns import FragmentColumns, write
from flowrl.data.spaces import zeros_of
from flowrl.errors import ConfigError
from flowrl.policies.views import ViewRequirement, acting_views

DTYPES = {"rewards": np.float32, "terminateds": bool, "truncateds": bool, "dones": bool}


class ViewingPolicy(Protocol):
    """The part of a policy that its views read; see Policy."""

    observation_space: spaces.Space
    action_space: spaces.Space

    @property
    def view_requirements(self) -> Mapping[str, ViewRequirement]: ...

    def get_initial_state(self) -> list[np.ndarray]: ...


def batch_views(requirements: Mapping[str, ViewRequirement]) -> dict[str, ViewRequirement]:
    """Return the views that differ from a column of the same name. If `obs` is one of them, so is
    `new_obs`, which shows one timestep later what `obs` shows."""
    views = {
        name: view
        for name, view in requirements.items()
        if view.shift != 0 or (view.data_col or name) != name or view.agents is not None
    }
    if "obs" in views and "new_obs" not in views:
        shifts = [shift + 1 for shift in views["obs"].shifts]
        shift = shifts if views["obs"].is_window else shifts[0]
        views["new_obs"] = ViewRequirement("obs", views["obs"].space, shift)
    return views


def signature_of(requirements: Mapping[str, ViewRequirement]) -> dict[str, Any]:
    """Return a comparable description of views: equal if they show the same."""
    return {
        name: (
            view.data_col,
            view.shifts,
            view.is_window,
            view.batch_repeat_value,
            view.agents,
            view.used_for_compute_actions,
            view.used_for_training,
            view.space,
        )
        for name, view in requirements.items()
    }


class View:
    """A view resolved to a source column and shifts; `new_obs` is `obs` shifted by one."""

    def __init__(self, name: str, view: ViewRequirement):
        column, shifts = view.data_col or name, view.shifts
        if column in ("new_obs", "next_obs"):
            column, shifts = "obs", tuple(shift + 1 for shift in shifts)
        self.source = column
        self.shifts = shifts
        self.is_window = view.is_window
        self.repeat = view.batch_repeat_value
        self.agents = view.agents
        self.space = view.space
        steps = {after - before for before, after in itertools.pairwise(shifts)}
        self._stride = steps.pop() if len(steps) == 1 and min(steps) > 0 else None

    def rows(self, at: int) -> Any:
        """Return the history rows that the view shows at row `at`: a slice if evenly spaced."""
        if self._stride is None:
            return [at + shift for shift in self.shifts]
        return slice(at + self.shifts[0], at + self.shifts[-1] + 1, self._stride)

    def read(self, array: np.ndarray, at: int) -> np.ndarray:
        """Return a copy of what the view shows of an array [rows, N, …] at row `at`: [N, …] or
        [N, shifts, …]."""
        if not self.is_window:
            return array[at + self.shifts[0]].copy()
        return array[self.rows(at)].swapaxes(0, 1).copy()


class InitialStates:
    """The recurrent states at the start of the episode of each lane.

    The initial states may change while the policy learns: an episode keeps those that it started
    with.

    Args:
        policy: its `get_initial_state` is read at the start of each fragment.
        lanes: number of lanes.
    """

    def __init__(self, policy: ViewingPolicy, lanes: int):
        self._policy = policy
        self._new = [np.asarray(state) for state in policy.get_initial_state()]
        self._by_lane = [np.repeat(state[None], lanes, 0) for state in self._new]
        self._at_start = self._by_lane

    def begin(self) -> None:
        """Start a fragment."""
        self._new = [np.asarray(state) for state in self._policy.get_initial_state()]
        self._at_start = [states.copy() for states in self._by_lane]

    def restart(self, lanes: Any) -> None:
        """Start new episodes in lanes."""
        for states, new in zip(self._by_lane, self._new, strict=True):
            states[lanes] = new

    @property
    def new(self) -> list[np.ndarray]:
        """The initial states of new episodes."""
        return self._new

    def add_lanes(self, count: int) -> None:
        """Add lanes after the present ones."""
        self._by_lane = [
            np.concatenate([states, np.repeat(new[None], count, 0)])
            for states, new in zip(self._by_lane, self._new, strict=True)
        ]

    def of_lanes(self, source: str, lanes: Any) -> np.ndarray:
        """Return the initial states [m, …] of the running episodes of lanes."""
        return self._by_lane[state_index(source)][lanes]

    def of_segments(self, source: str, lanes: np.ndarray, continued: np.ndarray) -> np.ndarray:
        """Return the initial states [segments, …] of parts of episodes.

        Args:
            source: the column of states.
            lanes: the lane of each segment.
            continued: see Segments.
        """
        index = state_index(source)
        states = np.repeat(self._new[index][None], len(lanes), 0)
        states[continued] = self._at_start[index][lanes[continued]]
        return states

    def state_dict(self) -> list[np.ndarray]:
        """Return copies of the states of all lanes."""
        return [states.copy() for states in self._by_lane]

    def load_state_dict(self, state: list[np.ndarray]) -> None:
        """Load the result of `state_dict`."""
        for states, saved in zip(self._by_lane, state, strict=True):
            states[:] = saved


def state_index(source: str) -> int:
    """Return which recurrent state a column `state_out_…` is of."""
    return int(source.removeprefix("state_out_"))


def may_change_inputs(policy: Any) -> bool:
    """Return whether a policy may change its observations in place, or keep them, and therefore
    gets copies: its class is not one of flowrl."""
    return not type(policy).__module__.startswith("flowrl.")


def is_state(view: View) -> bool:
    """Return whether a view shows recurrent states."""
    return view.source.startswith("state_out_")


def fill_value(view: View, find_space: Callable[[str], spaces.Space]) -> Any:
    """Return zeros, which a view shows where there is no row.

    Args:
        view: the view.
        find_space: "obs" or "actions" -> its space.

    Raises:
        ConfigError: the view needs a space.
    """
    if view.space is not None:
        return zeros_of(view.space)
    if view.source in ("obs", "actions"):
        return zeros_of(find_space(view.source))
    if view.source in DTYPES:
        return np.zeros((), DTYPES[view.source])
    raise ConfigError(f"view of {view.source!r}: needs a space, which defines the fill value")


def space_of(policy: ViewingPolicy, source: str) -> spaces.Space:
    """Return the policy's space of "obs" or "actions"."""
    return policy.action_space if source == "actions" else policy.observation_space


class ActingViews:
    """The views that a policy acts on.

    Args:
        policy: its `view_requirements` are read once; `signature` tells whether they have changed.
        states: the initial states of the lanes.
        has_agents: whether the caller adds the views of other agents, `agent_views`.

    Attributes:
        sources: names of the columns that the views show.
        lookback: number of earlier rows that the views show.
        agent_views: the views of other agents.

    Raises:
        ConfigError: a view shows other agents, and `has_agents` is False.
    """

    def __init__(self, policy: ViewingPolicy, states: InitialStates, has_agents: bool = False):
        self.policy, self._states = policy, states
        requirements = self.requirements = dict(policy.view_requirements)
        self.signature = signature_of(requirements)
        resolved = {name: View(name, requirement) for name, requirement in requirements.items()}
        self.agent_views = {n: view for n, view in resolved.items() if view.agents is not None}
        self._acting = {
            name: resolved[name]
            for name, requirement in acting_views(requirements).items()
            if requirement.agents is None
        }
        self._use([*self._acting.values(), *self.agent_views.values()])
        self._fills: dict[str, Any] = {}
        self._copies_obs = may_change_inputs(policy)
        if self.agent_views and not has_agents:
            raise ConfigError(
                f"view {next(iter(self.agent_views))!r} shows other agents: this needs a worker, "
                "and views that are set before the first fragment"
            )

    def _use(self, views: Iterable[View]) -> None:
        views = list(views)
        self.sources = {view.source for view in views}
        self.lookback = max([0, *(-min(view.shifts) for view in views)])

    def _fill(self, name: str, view: View, column: Any) -> Any:
        """Return the value that a view shows before the first row of an episode."""
        if name not in self._fills:
            self._fills[name] = self._new_fill(view, column)
        return self._fills[name]

    def _new_fill(self, view: View, column: Any) -> Any:
        if is_state(view):
            return None  # every lane has its own
        if column is not None:
            return map_leaves(lambda array: np.zeros(array.shape[2:], array.dtype), column)
        return fill_value(view, partial(space_of, self.policy))

    def inputs(self, columns: FragmentColumns, t: int, ages: np.ndarray) -> dict[str, Any]:
        """Return the inputs of action computation at row t of all lanes, [N, …].

        Args:
            columns: the rows up to t, with the observation at t.
            t: the row.
            ages: number of earlier rows of each lane's episode, [N].
        """
        at, reach = columns.lookback + t, np.minimum(ages, t + columns.known)
        shortest = int(reach.min())
        inputs: dict[str, Any] = {}
        for name, view in self._acting.items():
            column = columns.get(view.source)
            if view.source == "obs" and not view.is_window and view.shifts == (0,):
                inputs[name] = map_leaves(lambda array: array[at], column)
                if self._copies_obs:
                    inputs[name] = map_leaves(np.copy, inputs[name])
            elif column is None:  # nothing is recorded yet
                inputs[name] = self._blank(name, view, len(ages))
            else:
                values = map_leaves(lambda array, view=view: view.read(array, at), column)
                if shortest < -min(view.shifts):
                    self._fill_start(name, view, column, at, reach, values)
                inputs[name] = values
        return inputs

    def _blank(self, name: str, view: View, lanes: int) -> Any:
        """Return a view of a column without rows."""
        if is_state(view):
            first = self._states.of_lanes(view.source, slice(None))
            return np.repeat(first[:, None], len(view.shifts), 1) if view.is_window else first
        shape = (lanes, len(view.shifts)) if view.is_window else (lanes,)
        return map_leaves(
            lambda fill: np.broadcast_to(fill, (*shape, *fill.shape)).copy(),
            self._fill(name, view, None),
        )

    def _fill_start(
        self, name: str, view: View, column: Any, at: int, reach: np.ndarray, values: Any
    ) -> None:
        """Fill what a view shows before the start of the episodes, in place."""
        for i, shift in enumerate(view.shifts):
            (lanes,) = (reach < -shift).nonzero()
            if not len(lanes):
                continue
            if view.source == "obs":  # the first observation
                fill = map_leaves(lambda a, lanes=lanes: a[at - reach[lanes], lanes], column)
            elif is_state(view):
                fill = self._states.of_lanes(view.source, lanes)
            else:
                fill = self._fill(name, view, column)
            write(values, (lanes, i) if view.is_window else lanes, fill)
