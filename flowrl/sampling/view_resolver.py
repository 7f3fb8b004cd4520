"""Views of trajectories over time-major arrays: the same rule for acting and for training.

What a view shows is a position in a history array [lookback + T + 1, N, …]; the first rows are
the end of the fragment before. A position may stand for nothing: see `ViewRequirement`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.data.indexed_columns import NOTHING, IndexedColumn
from flowrl.policies.views import ViewRequirement
from flowrl.settings import ConfigError

ALWAYS = ("rewards", "dones", "terminateds", "truncateds")  # in every train batch


def wanted_views(requirements: Mapping[str, ViewRequirement]) -> dict[str, ViewRequirement]:
    """The views that are more than a column as it is."""
    return {
        name: view
        for name, view in requirements.items()
        if view.shift != 0 or (view.data_col or name) != name or view.agents is not None
    }


def signature_of(requirements: Mapping[str, ViewRequirement]) -> dict[str, Any]:
    """What views ask for: equal if they ask for the same."""
    return {
        name: (
            view.data_col,
            view.shifts,
            view.is_window,
            view.batch_repeat_value,
            view.agents,
            view.used_for_compute_actions,
            view.used_for_training,
            id(view.space),
        )
        for name, view in requirements.items()
    }


def not_for_training(requirements: Mapping[str, ViewRequirement], columns: Any) -> list[str]:
    """The columns that a train batch is not to have."""
    unwanted = [
        name
        for name, view in requirements.items()
        if not view.used_for_training and name not in ALWAYS
    ]
    states = [n for n in columns if n.startswith("state_out_") and n not in requirements]
    return unwanted + states


class TrajectoryViews:
    """The views of one collector.

    Args:
        requirements: view name -> ViewRequirement.
        length: timesteps per fragment, T.
        num_envs: N.
        zeros: column -> what a timestep without a value shows, where a view does not say its space.

    Attributes:
        sources: the columns that are to be recorded.
    """

    def __init__(
        self,
        requirements: Mapping[str, ViewRequirement],
        length: int,
        num_envs: int,
        zeros: Mapping[str, np.ndarray],
    ):
        for name, view in requirements.items():
            if view.agents is not None or view.batch_repeat_value > 1:
                raise ConfigError(
                    f"view {name!r}: agents and batch_repeat_value must be asked for before the "
                    "first fragment, which decides how rows are collected"
                )
        self.requirements = dict(requirements)
        self.signature = signature_of(requirements)
        self._length = length
        self._zeros = dict(zeros)
        self._envs = np.arange(num_envs)
        wanted = wanted_views(requirements)
        if "obs" in wanted and "new_obs" not in wanted:
            shifts = [shift + 1 for shift in wanted["obs"].shifts]
            shift = shifts if wanted["obs"].is_window else shifts[0]
            wanted["new_obs"] = ViewRequirement("obs", wanted["obs"].space, shift)
        self._for_training = {n: View(n, v) for n, v in wanted.items() if v.used_for_training}
        self._for_actions = {
            name: View(name, view)
            for name, view in requirements.items()
            if view.known_for_actions(name)
        }
        views = [*self._for_training.values(), *self._for_actions.values()]
        self.sources = {view.source for view in views}
        self.lookback = max((-min(view.shifts) for view in views), default=0)
        self.lookback = max(self.lookback, 0)
        self._history: dict[str, np.ndarray] = {}
        self._known: dict[str, int] = {}  # rows of the lookback that hold something
        self._age = np.zeros(num_envs, np.int64)

    # -- while a fragment is collected -----------------------------------------------------------

    def begin(self, age: np.ndarray) -> None:
        """Start a fragment; `age` [N]: timesteps of each episode before it."""
        self._age = age.copy()
        for name, array in self._history.items():
            array[: self.lookback] = array[self._length : self._length + self.lookback]
            self._known[name] = min(self._known[name] + self._length, self.lookback)

    def forget(self) -> None:
        """New episodes begin everywhere: nothing before them is known."""
        self._known = dict.fromkeys(self._known, 0)

    def get_state(self) -> dict[str, Any]:
        """What the next fragment looks back on."""
        end = slice(self._length, self._length + self.lookback)
        return {
            "known": dict(self._known),
            "history": {name: array[end].copy() for name, array in self._history.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave."""
        self._known = dict(state["known"])
        for name, end in state["history"].items():
            array = np.zeros((self.lookback + self._length, *end.shape[1:]), end.dtype)
            array[self._length :] = end
            self._history[name] = array

    def record(self, name: str, t: int, values: np.ndarray) -> None:
        """Take down a column's values [N, …] at timestep t of the fragment."""
        array = self._history.get(name)
        if array is None:
            rows = self.lookback + self._length
            array = self._history[name] = np.zeros((rows, *values.shape), values.dtype)
            self._known[name] = 0
        array[self.lookback + t] = values

    def step(self, *resets: Any) -> None:
        """A timestep is over, after which the environments `resets` are in a new episode."""
        self._age += 1
        for envs in resets:
            self._age[list(envs)] = 0

    def inputs_now(self, t: int, current: np.ndarray) -> dict[str, Any]:
        """The input of action computation at timestep t, for all environments: [N, …]."""
        made: dict[str, Any] = {}
        for name, view in self._for_actions.items():
            history = self._history.get(view.source)
            if history is None or t == self._length:
                return self.inputs(np.full(len(self._envs), t), self._envs, self._age, current)
            shown = history[view.rows(self.lookback + t)]  # [k, N, …]
            made[name] = array = shown.swapaxes(0, 1).copy()
            reach = np.minimum(self._age, t + self._known[view.source])
            for env in np.flatnonzero(reach < -min(view.shifts)).tolist():
                first = history[self.lookback + t - reach[env], env]
                for i, shift in enumerate(view.shifts):
                    if -shift > reach[env]:
                        array[env, i] = first if view.source == "obs" else 0
            if not view.is_window:
                made[name] = array[:, 0]
        return made

    def inputs(
        self, times: np.ndarray, envs: np.ndarray, ages: np.ndarray, current: np.ndarray
    ) -> dict[str, Any]:
        """The input of action computation where the observations are `current` [m, …].

        Args:
            times, envs: timestep in the fragment and environment of each, [m].
            ages: timesteps of the episode before it, [m].
        """
        made: dict[str, Any] = {}
        for name, view in self._for_actions.items():
            parts = [
                current
                if view.source == "obs" and shift == 0
                else self._at(view, times, envs, ages, shift, current)
                for shift in view.shifts
            ]
            made[name] = np.stack(parts, 1) if view.is_window else parts[0]
        return made

    def _at(
        self,
        view: View,
        times: np.ndarray,
        envs: np.ndarray,
        ages: np.ndarray,
        shift: int,
        current: np.ndarray,
    ) -> np.ndarray:
        source = view.source
        history = self._history.get(source)
        if history is None:  # nothing of it has been seen yet
            if source == "obs":
                return current
            zero = view.zero if view.zero is not None else self._zeros.get(source)
            if zero is None:
                raise ConfigError(f"view of {source!r}: give it a space, to know what is not there")
            return np.broadcast_to(zero, (len(envs), *zero.shape)).copy()
        oldest = self.lookback - self._known[source]
        if source == "obs":
            first = np.maximum(self.lookback + times - ages, oldest)
            position = np.maximum(self.lookback + times + shift, first)
            values = history[np.minimum(position, len(history) - 1), envs]
            young = position == self.lookback + times  # the episode's first is the current one
            values[young] = current[young]
            return values
        position = self.lookback + times + shift
        values = history[np.maximum(position, 0), envs]
        values[(ages + shift < 0) | (position < oldest)] = 0
        return values

    # -- when it is whole --------------------------------------------------------------------------

    @property
    def replace_observations(self) -> bool:
        """Whether views stand for both `obs` and `new_obs`."""
        return {"obs", "new_obs"} <= set(self._for_training)

    def columns(self, observed: np.ndarray, t: np.ndarray, dones: np.ndarray) -> dict[str, Any]:
        """The views for training, rows environment by environment: Windows [N * T, …].

        Args:
            observed: final observations of the segments, in the order of rows.
            t: timesteps of the episode before each row, [T, N].
            dones: [T, N].
        """
        steps, envs = dones.shape
        last = dones.T.copy()
        last[:, -1] = True  # [N, T], True at the end of a segment
        # of each row the timestep at which its segment ends, and the number of that segment
        ends = np.where(last, np.arange(steps), steps)
        ends = np.minimum.accumulate(ends[:, ::-1], 1)[:, ::-1].ravel()
        segment = np.cumsum(last.ravel()) - last.ravel()
        time = np.tile(np.arange(steps), envs)
        env = np.repeat(np.arange(envs), steps)
        age = t.T.ravel()
        bases: dict[str, np.ndarray] = {}
        made: dict[str, Any] = {}
        for name, view in self._for_training.items():
            source = view.source
            if source not in bases:
                bases[source] = self._base(source, observed)
            rows = self.lookback + steps
            oldest = self.lookback - self._known.get(source, 0)
            parts = []
            for shift in view.shifts:
                ahead = time + shift
                position = self.lookback + ahead
                if source == "obs":
                    first = np.maximum(self.lookback + time - age, oldest)
                    stored = env * rows + np.maximum(position, first)
                    final = envs * rows + segment
                    later = np.where(ahead == ends + 1, final, NOTHING)
                    index = np.where(ahead <= ends, stored, later)
                else:
                    there = (age + shift >= 0) & (position >= oldest) & (ahead <= ends)
                    index = np.where(there, env * rows + position, NOTHING)
                parts.append(index)
            made[name] = IndexedColumn(
                bases[source], np.stack(parts, 1) if view.is_window else parts[0]
            )
        return made

    def _base(self, source: str, observed: np.ndarray) -> np.ndarray:
        """The history of a column, environment by environment; of observations the final ones of
        the segments after them."""
        if source not in self._history:
            raise ConfigError(f"no column {source!r} to make a view of: it is not collected")
        history = self._history[source]
        rows, envs = history.shape[:2]
        extra = len(observed) if source == "obs" else 0
        base = np.empty((envs * rows + extra, *history.shape[2:]), history.dtype)
        base[: envs * rows].reshape(envs, rows, *history.shape[2:])[:] = history.swapaxes(0, 1)
        if extra:
            base[envs * rows :] = observed
        base.flags.writeable = False
        return base


class View:
    """A view by what it reads: a column and shifts. The next observations are observations."""

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
        self._even = steps.pop() if len(steps) == 1 and min(steps) > 0 else None
        space = view.space
        known = space is not None and space.shape is not None and space.dtype is not None
        self.zero = np.zeros(space.shape, space.dtype) if known else None  # type: ignore

    def rows(self, at: int) -> Any:
        """The rows of a history that the view shows at row `at`: a slice where they are even."""
        if self._even is None:
            return [at + shift for shift in self.shifts]
        return slice(at + self.shifts[0], at + self.shifts[-1] + 1, self._even)
