"""Views of trajectories over time-major arrays, with one rule for acting and training.

A view resolves to positions in a history array [lookback + T + 1, N, ...], whose first rows are the
end of the previous fragment. Positions outside of the episode are filled: see `ViewRequirement`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.data.indexed_columns import NOTHING, IndexedColumn
from flowrl.policies.views import ViewRequirement
from flowrl.settings import ConfigError

REQUIRED_COLUMNS = ("rewards", "dones", "terminateds", "truncateds")  # of every train batch


def nontrivial_views(requirements: Mapping[str, ViewRequirement]) -> dict[str, ViewRequirement]:
    """Return the views that differ from a column of the same name."""
    return {
        name: view
        for name, view in requirements.items()
        if view.shift != 0 or (view.data_col or name) != name or view.agents is not None
    }


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


def not_for_training(requirements: Mapping[str, ViewRequirement], columns: Any) -> list[str]:
    """Return the columns that train batches do not contain."""
    excluded = [
        name
        for name, view in requirements.items()
        if not view.used_for_training and name not in REQUIRED_COLUMNS
    ]
    states = [n for n in columns if n.startswith("state_out_") and n not in requirements]
    return excluded + states


class TrajectoryViews:
    """The views of one collector.

    Args:
        requirements: view name -> ViewRequirement.
        length: timesteps per fragment, T.
        num_envs: number of environments, N.
        zeros: column -> fill value of timesteps without a value, for views without a space.

    Attributes:
        sources: the columns to record.
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
                    f"view {name!r}: set agents and batch_repeat_value before the first fragment, "
                    "which decides how rows are collected"
                )
        self.requirements = dict(requirements)
        self.signature = signature_of(requirements)
        self._length = length
        self._zeros = dict(zeros)
        self._envs = np.arange(num_envs)
        views = nontrivial_views(requirements)
        if "obs" in views and "new_obs" not in views:
            shifts = [shift + 1 for shift in views["obs"].shifts]
            shift = shifts if views["obs"].is_window else shifts[0]
            views["new_obs"] = ViewRequirement("obs", views["obs"].space, shift)
        self._for_training = {n: View(n, v) for n, v in views.items() if v.used_for_training}
        self._for_actions = {
            name: View(name, view)
            for name, view in requirements.items()
            if view.known_for_actions(name)
        }
        resolved = [*self._for_training.values(), *self._for_actions.values()]
        self.sources = {view.source for view in resolved}
        self.lookback = max((-min(view.shifts) for view in resolved), default=0)
        self.lookback = max(self.lookback, 0)
        self._history: dict[str, np.ndarray] = {}
        self._known: dict[str, int] = {}  # number of recorded lookback rows, by column
        self._age = np.zeros(num_envs, np.int64)

    # -- during a fragment -------------------------------------------------------------------------

    def begin(self, age: np.ndarray) -> None:
        """Start a fragment; `age` [N] is the number of earlier timesteps of each episode."""
        self._age = age.copy()
        for name, array in self._history.items():
            array[: self.lookback] = array[self._length : self._length + self.lookback]
            self._known[name] = min(self._known[name] + self._length, self.lookback)

    def resize(self, length: int) -> None:
        """Change the timesteps of the current fragment; keep those recorded so far."""
        self._length = length
        for name, array in self._history.items():
            self._history[name] = resized(array, self.lookback + length)

    def forget(self) -> None:
        """Start new episodes in all environments: drop the history."""
        self._known = dict.fromkeys(self._known, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that the next fragment looks back on."""
        end = slice(self._length, self._length + self.lookback)
        return {
            "known": dict(self._known),
            "history": {name: array[end].copy() for name, array in self._history.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._known = dict(state["known"])
        for name, end in state["history"].items():
            array = np.zeros((self.lookback + self._length, *end.shape[1:]), end.dtype)
            array[self._length :] = end
            self._history[name] = array

    def record(self, name: str, t: int, values: np.ndarray) -> None:
        """Record a column's values [N, ...] at timestep t of the fragment."""
        array = self._history.get(name)
        if array is None:
            rows = self.lookback + self._length
            array = self._history[name] = np.zeros((rows, *values.shape), values.dtype)
            self._known[name] = 0
        array[self.lookback + t] = values

    def step(self, *resets: Any) -> None:
        """Finish a timestep; the environments in `resets` start a new episode after it."""
        self._age += 1
        for envs in resets:
            self._age[list(envs)] = 0

    def inputs_now(self, t: int, current: np.ndarray) -> dict[str, Any]:
        """Return the inputs of action computation at timestep t, [N, ...]."""
        inputs: dict[str, Any] = {}
        for name, view in self._for_actions.items():
            history = self._history.get(view.source)
            if history is None or t == self._length:
                return self.inputs(np.full(len(self._envs), t), self._envs, self._age, current)
            values = history[view.rows(self.lookback + t)]  # [k, N, ...]
            inputs[name] = array = values.swapaxes(0, 1).copy()
            reach = np.minimum(self._age, t + self._known[view.source])
            for env in np.flatnonzero(reach < -min(view.shifts)).tolist():
                first = history[self.lookback + t - reach[env], env]
                for i, shift in enumerate(view.shifts):
                    if -shift > reach[env]:
                        array[env, i] = first if view.source == "obs" else 0
            if not view.is_window:
                inputs[name] = array[:, 0]
        return inputs

    def inputs(
        self, times: np.ndarray, envs: np.ndarray, ages: np.ndarray, current: np.ndarray
    ) -> dict[str, Any]:
        """Return the inputs of action computation for the observations `current` [m, ...].

        Args:
            times, envs: timestep in the fragment and environment of each observation, [m].
            ages: number of earlier timesteps in its episode, [m].
            current: the observations.
        """
        inputs: dict[str, Any] = {}
        for name, view in self._for_actions.items():
            parts = [
                current
                if view.source == "obs" and shift == 0
                else self._at(view, times, envs, ages, shift, current)
                for shift in view.shifts
            ]
            inputs[name] = np.stack(parts, 1) if view.is_window else parts[0]
        return inputs

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
        if history is None:  # nothing is recorded yet
            if source == "obs":
                return current
            zero = view.zero if view.zero is not None else self._zeros.get(source)
            if zero is None:
                raise ConfigError(
                    f"view of {source!r}: needs a space, which defines the fill value"
                )
            return np.broadcast_to(zero, (len(envs), *zero.shape)).copy()
        oldest = self.lookback - self._known[source]
        if source == "obs":
            first = np.maximum(self.lookback + times - ages, oldest)
            position = np.maximum(self.lookback + times + shift, first)
            values = history[np.minimum(position, len(history) - 1), envs]
            is_current = position == self.lookback + times
            values[is_current] = current[is_current]
            return values
        position = self.lookback + times + shift
        values = history[np.maximum(position, 0), envs]
        values[(ages + shift < 0) | (position < oldest)] = 0
        return values

    # -- after a fragment --------------------------------------------------------------------------

    @property
    def replace_observations(self) -> bool:
        """Whether views replace both `obs` and `new_obs`."""
        return {"obs", "new_obs"} <= set(self._for_training)

    def columns(self, observed: np.ndarray, t: np.ndarray, dones: np.ndarray) -> dict[str, Any]:
        """Return the views for training as IndexedColumns [N * T, ...], sorted by environment.

        Args:
            observed: final observations of the segments, in the order of the rows.
            t: timesteps of the episode before each row, [T, N].
            dones: segment ends, [T, N].
        """
        steps, envs = dones.shape
        last = dones.T.copy()
        last[:, -1] = True  # [N, T], True at the end of a segment
        # for each row: the last timestep of its segment, and the index of the segment
        ends = np.where(last, np.arange(steps), steps)
        ends = np.minimum.accumulate(ends[:, ::-1], 1)[:, ::-1].ravel()
        segment = np.cumsum(last.ravel()) - last.ravel()
        time = np.tile(np.arange(steps), envs)
        env = np.repeat(np.arange(envs), steps)
        age = t.T.ravel()
        bases: dict[str, np.ndarray] = {}
        columns: dict[str, Any] = {}
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
                    valid = (age + shift >= 0) & (position >= oldest) & (ahead <= ends)
                    index = np.where(valid, env * rows + position, NOTHING)
                parts.append(index)
            columns[name] = IndexedColumn(
                bases[source], np.stack(parts, 1) if view.is_window else parts[0]
            )
        return columns

    def _base(self, source: str, observed: np.ndarray) -> np.ndarray:
        """Return the history of a column, sorted by environment; for observations followed by the
        final ones of the segments."""
        if source not in self._history:
            raise ConfigError(f"cannot view column {source!r}: it is not collected")
        history = self._history[source]
        rows, envs = history.shape[:2]
        extra = len(observed) if source == "obs" else 0
        base = np.empty((envs * rows + extra, *history.shape[2:]), history.dtype)
        base[: envs * rows].reshape(envs, rows, *history.shape[2:])[:] = history.swapaxes(0, 1)
        if extra:
            base[envs * rows :] = observed
        base.flags.writeable = False
        return base


def resized(array: np.ndarray, rows: int) -> np.ndarray:
    """Return an array with this number of rows: the first ones, or new rows at the end."""
    if rows <= len(array):
        return array[:rows]
    larger = np.empty((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


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
        space = view.space
        is_array = space is not None and space.shape is not None and space.dtype is not None
        self.zero = np.zeros(space.shape, space.dtype) if is_array else None  # type: ignore

    def rows(self, at: int) -> Any:
        """Return the history rows that the view shows at row `at`: a slice if evenly spaced."""
        if self._stride is None:
            return [at + shift for shift in self.shifts]
        return slice(at + self.shifts[0], at + self.shifts[-1] + 1, self._stride)
