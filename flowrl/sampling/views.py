"""Views: what a policy's view requirements show of time-major columns, for acting and training.

A view shows rows of a source column at fixed distances from each row. Rows before the episode, and
before the stored rows, are filled: see `ViewRequirement`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from flowrl.data.indexed_columns import NOTHING, IndexedColumn
from flowrl.data.spaces import zeros_of
from flowrl.policies.policy import Policy
from flowrl.policies.views import ViewRequirement
from flowrl.sampling.fragment_columns import FragmentColumns, map_leaves
from flowrl.sampling.segments import Segments
from flowrl.sampling.view_resolver import View, nontrivial_views, signature_of
from flowrl.settings import ConfigError

_DTYPES = {"rewards": np.float32, "terminateds": bool, "truncateds": bool, "dones": bool}


class InitialStates:
    """The recurrent states at the start of the episode of each lane.

    A policy may learn its initial states: an episode keeps those that it started with.

    Args:
        policy: its `get_initial_state` is read at the start of each fragment.
        lanes: number of lanes.
    """

    def __init__(self, policy: Policy, lanes: int):
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

    def of_lanes(self, source: str, lanes: Any) -> np.ndarray:
        """Return the initial states [m, …] of the running episodes of lanes."""
        return self._by_lane[_state_index(source)][lanes]

    def of_segments(self, source: str, segments: Segments) -> np.ndarray:
        """Return the initial states [segments, …]."""
        index = _state_index(source)
        states = np.repeat(self._new[index][None], len(segments), 0)
        continued = segments.continued
        states[continued] = self._at_start[index][segments.lanes[continued]]
        return states

    def state_dict(self) -> list[np.ndarray]:
        """Return copies of the states of all lanes."""
        return [states.copy() for states in self._by_lane]

    def load_state_dict(self, state: list[np.ndarray]) -> None:
        """Load the result of `state_dict`."""
        for states, saved in zip(self._by_lane, state, strict=True):
            states[:] = saved


def _state_index(source: str) -> int:
    return int(source.removeprefix("state_out_"))


def _is_state(view: View) -> bool:
    return view.source.startswith("state_out_")


class Views:
    """The views of one policy.

    Args:
        policy: its `view_requirements` are read once; `signature` tells whether they have changed.
        states: the initial states of the lanes.

    Attributes:
        sources: names of the columns that the views show.
        lookback: number of earlier rows that the views show.
        shows_columns: whether every view is the column of the same name, so that the policy acts on
            `obs` alone.
    """

    def __init__(self, policy: Policy, states: InitialStates):
        self.policy, self._states = policy, states
        requirements = self.requirements = dict(policy.view_requirements)
        self.signature = signature_of(requirements)
        views = nontrivial_views(requirements)
        if "obs" in views and "new_obs" not in views:
            shifts = [shift + 1 for shift in views["obs"].shifts]
            shift = shifts if views["obs"].is_window else shifts[0]
            views["new_obs"] = ViewRequirement("obs", views["obs"].space, shift)
        self._training = {n: View(n, v) for n, v in views.items() if v.used_for_training}
        self._acting = {n: View(n, v) for n, v in requirements.items() if v.known_for_actions(n)}
        self.shows_columns = list(self._acting) == ["obs"] and not views
        for name, requirement in requirements.items():
            if requirement.agents is not None:
                raise ConfigError(
                    f"view {name!r}: set agents before the first fragment, which decides how rows "
                    "are collected"
                )
        for name, view in self._training.items():
            if view.repeat > 1 and not name.startswith("state_in_"):
                raise ConfigError(
                    f"view {name!r}: batch_repeat_value is only for views named state_in_*; other "
                    "views have a value for each row"
                )
        resolved = [*self._training.values(), *self._acting.values()]
        self.sources = {view.source for view in resolved}
        self.lookback = max([0, *(-min(view.shifts) for view in resolved)])
        self._fills: dict[str, Any] = {}

    @property
    def replace_observations(self) -> bool:
        """Whether views replace both `obs` and `new_obs` in train batches."""
        return {"obs", "new_obs"} <= set(self._training)

    @property
    def max_seq_len(self) -> int:
        """Rows per sequence in train batches; 0 if they are not cut into sequences.

        A policy with burn-in has a state for each row, and cuts sequences when it learns.
        """
        states = [view.repeat for n, view in self._training.items() if n.startswith("state_in_")]
        longest = max(states, default=0)
        return 0 if longest == 1 and self.policy.config.model.burn_in else longest

    def _fill(self, name: str, view: View, column: Any) -> Any:
        """Return the value that a view shows before the first row of an episode."""
        if name not in self._fills:
            self._fills[name] = self._new_fill(view, column)
        return self._fills[name]

    def _new_fill(self, view: View, column: Any) -> Any:
        source = view.source
        if _is_state(view):
            return None  # every lane has its own
        if column is not None:
            return map_leaves(lambda array: np.zeros(array.shape[2:], array.dtype), column)
        if view.space is not None:
            return zeros_of(view.space)
        if source in _DTYPES:
            return np.zeros((), _DTYPES[source])
        if source == "actions":
            return zeros_of(self.policy.action_space)
        if source == "obs":
            return zeros_of(self.policy.observation_space)
        raise ConfigError(f"view of {source!r}: needs a space, which defines the fill value")

    # -- acting ------------------------------------------------------------------------------------

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
        if _is_state(view):
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
            elif _is_state(view):
                fill = self._states.of_lanes(view.source, lanes)
            else:
                fill = self._fill(name, view, column)
            _set(values, (lanes, i) if view.is_window else lanes, fill)

    def inputs_at(
        self,
        columns: FragmentColumns,
        segments: Segments,
        observations: Any,
    ) -> dict[str, Any]:
        """Return the inputs of action computation for the observation after each segment, [m, …].

        Args:
            columns: the rows.
            segments: the segments.
            observations: the observations [m, …].
        """
        rows, lanes, ages = segments.ends, segments.lanes, segments.ages + segments.lengths
        reach = np.minimum(ages, rows + columns.known)
        at = columns.lookback + rows
        inputs: dict[str, Any] = {}
        for name, view in self._acting.items():
            parts = []
            for shift in view.shifts:
                if view.source == "obs" and shift == 0:
                    parts.append(observations)
                    continue
                column = columns.get(view.source)
                if view.source == "obs":
                    back = np.minimum(-shift, reach)
                    values = map_leaves(lambda a, back=back: a[at - back, lanes], column)
                    (first,) = (back == 0).nonzero()
                    _set(values, first, map_leaves(lambda a, f=first: a[f], observations))
                else:
                    outside = reach < -shift
                    values = map_leaves(
                        lambda a, shift=shift: a[np.maximum(at + shift, 0), lanes], column
                    )
                    if outside.any():
                        fill = self._fill(name, view, column)
                        if _is_state(view):
                            fill = self._states.of_segments(view.source, segments)[outside]
                        _set(values, outside, fill)
                parts.append(values)
            inputs[name] = (
                optree.tree_map(lambda *leaves: np.stack(leaves, 1), *parts)
                if view.is_window
                else parts[0]
            )
        return inputs

    # -- training ----------------------------------------------------------------------------------

    def columns(
        self, columns: FragmentColumns, used: int, segments: Segments, observations: Any
    ) -> dict[str, Any]:
        """Return the views for training, [rows, …] each, in the order of the segments.

        Args:
            columns: the rows.
            used: number of rows of the fragment.
            segments: the rows to show.
            observations: the observation after each segment, [segments, …].
        """
        shown: dict[str, Any] = {}
        bases: dict[str, Any] = {}
        rows = columns.lookback + used

        def by_lane(array: np.ndarray) -> np.ndarray:
            return array[:rows].swapaxes(0, 1).copy(order="C").reshape(-1, *array.shape[2:])

        each_row = segments.rows()
        for name, view in self._training.items():
            column = columns.get(view.source)
            if column is None:
                raise ConfigError(f"cannot view column {view.source!r}: it is not collected")
            last: Any = None
            if view.source == "obs":
                last = observations
            elif _is_state(view):
                last = self._states.of_segments(view.source, segments)
            if view.source not in bases:
                bases[view.source] = _joined(map_leaves(by_lane, column), last)
            row, segment = each_row if view.repeat == 1 else segments.rows(view.repeat)
            index = _positions(view, columns, used, segments, row, segment)
            shown[name] = map_leaves(
                lambda base, index=index: IndexedColumn(base, index), bases[view.source]
            )
        return shown

    def sequence_lengths(self, segments: Segments) -> np.ndarray | None:
        """Return the number of rows of each sequence; None if rows are not cut into sequences."""
        longest = self.max_seq_len
        if not longest:
            return None
        row, segment = segments.rows(longest)
        return np.minimum(longest, segments.ends[segment] - row).astype(np.int32)


def _set(values: Any, index: Any, new: Any) -> None:
    for array, part in zip(optree.tree_leaves(values), optree.tree_leaves(new), strict=True):
        array[index] = part


def _joined(rows: Any, last: Any) -> Any:
    """Return read-only rows, followed by others."""
    if last is not None:
        rows = optree.tree_map(lambda a, b: np.concatenate([a, b]), rows, last)
    for array in optree.tree_leaves(rows):
        array.flags.writeable = False
    return rows


def _positions(
    view: View,
    columns: FragmentColumns,
    used: int,
    segments: Segments,
    row: np.ndarray,
    segment: np.ndarray,
) -> np.ndarray:
    """Return the positions in the base of what a view shows at rows, [rows] or [rows, shifts]."""
    lookback = columns.lookback
    lane_rows = lookback + used
    first_row = segments.lanes[segment] * lane_rows  # of the lane
    age = segments.ages[segment] + row - segments.begins[segment]
    end = segments.ends[segment]
    oldest = lookback - columns.known
    after = columns.lanes * lane_rows  # what follows the rows in the base
    parts = []
    for shift in view.shifts:
        position = lookback + row + shift
        if view.source == "obs":
            first = np.maximum(lookback + row - age, oldest)
            inside = first_row + np.maximum(position, first)
            later = np.where(row + shift == end, after + segment, NOTHING)
            parts.append(np.where(row + shift < end, inside, later))
        else:
            fill = after + segment if _is_state(view) else NOTHING
            valid = (age + shift >= 0) & (position >= oldest) & (row + shift < end)
            parts.append(np.where(valid, first_row + position, fill))
    return np.stack(parts, 1) if view.is_window else parts[0]
