"""Views: build a policy's inputs from stored columns, for acting, for train batches and for the
values after segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import optree

from flowrl.data.columns import map_leaves
from flowrl.data.fragment_columns import FragmentColumns, by_lane, write
from flowrl.data.indexed_columns import NOTHING, IndexedColumn
from flowrl.errors import ConfigError
from flowrl.policies.acting_views import (
    ActingViews,
    InitialStates,
    View,
    batch_views,
    is_state,
    state_index,
)
from flowrl.policies.policy import Policy
from flowrl.policies.views import ViewRequirement, acting_views
from flowrl.sampling.segments import Segments

REQUIRED_COLUMNS = ("rewards", "dones", "terminateds", "truncateds")  # of every train batch


def columns_to_drop(requirements: Mapping[str, ViewRequirement], columns: Any) -> list[str]:
    """Return the columns that train batches do not contain."""
    excluded = [
        name
        for name, view in requirements.items()
        if not view.used_for_training and name not in REQUIRED_COLUMNS
    ]
    states = [n for n in columns if n.startswith("state_out_") and n not in requirements]
    return excluded + states


def check_repeats(views: Mapping[str, View]) -> None:
    """Raise ConfigError if a view has `batch_repeat_value`, but is not of a recurrent state."""
    for name, view in views.items():
        if view.repeat > 1 and not name.startswith("state_in_"):
            raise ConfigError(
                f"view {name!r}: batch_repeat_value is only for views named state_in_*; other "
                "views have a value for each row"
            )


def max_seq_len(policy: Policy, views: Mapping[str, View]) -> int:
    """Return the rows per sequence in train batches; 0 if they are not cut into sequences.

    A policy with burn-in has a state for each row, and cuts sequences when it learns.
    """
    longest = max((v.repeat for n, v in views.items() if n.startswith("state_in_")), default=0)
    return 0 if longest == 1 and policy.config.model.burn_in else longest


class Views(ActingViews):
    """The views of one policy, for acting and training.

    Args:
        policy, states: see ActingViews.
        has_agents: whether the caller adds the views of other agents, `agents_acting` and
            `agents_training`.

    Attributes:
        acts_on_obs_only: whether every view is the column of the same name, so that the policy acts
            on `obs` alone, with its `compute_actions`.
        agents_acting, agents_training: the views of other agents for acting and training.
        defers_values: whether values are computed at the end of the current fragment.

    Raises:
        ConfigError: a view shows other agents without `has_agents`, or `batch_repeat_value` is set
            for other views than those of states.
    """

    policy: Policy

    def __init__(self, policy: Policy, states: InitialStates, has_agents: bool = False):
        super().__init__(policy, states, has_agents)
        self._has_agents = has_agents
        requirements = self.requirements
        views = batch_views({n: view for n, view in requirements.items() if view.agents is None})
        self._training = {n: View(n, v) for n, v in views.items() if v.used_for_training}
        has_obs_only = list(self._acting) == ["obs"] and not views and not self.agent_views
        self.acts_on_obs_only = has_obs_only and not policy.acts_on_views
        check_repeats(self._training)
        agent_views = self.agent_views
        acting = acting_views(requirements)
        self.agents_acting = {n: view for n, view in agent_views.items() if n in acting}
        self.agents_training = {
            name: view for name, view in agent_views.items() if requirements[name].used_for_training
        }
        self._use([*self._acting.values(), *self._training.values(), *agent_views.values()])
        self.begin_fragment()

    def begin_fragment(self) -> None:
        """Decide for the next fragment whether values are computed at its end: the policy supports
        it, and no view reads values before, including views of other policies' agents."""
        can_defer = self.acts_on_obs_only and not self._has_agents
        self.defers_values = can_defer and self.policy.defers_values

    @property
    def replaces_observations(self) -> bool:
        """Whether views replace both `obs` and `new_obs` in train batches."""
        return {"obs", "new_obs"} <= set(self._training)

    @property
    def max_seq_len(self) -> int:
        """Rows per sequence in train batches; 0 if they are not cut into sequences."""
        return max_seq_len(self.policy, self._training)

    def inputs_after(
        self, columns: FragmentColumns, segments: Segments, observations: Any
    ) -> dict[str, Any]:
        """Return the inputs of action computation for the observation after each segment, [m, …].

        Args:
            columns: the rows.
            segments: the segments.
            observations: the observations [m, …].
        """
        ages = segments.rows_before + segments.lengths
        initial = partial(self._initial_states, segments)
        return self.inputs_at(columns, segments.ends, segments.lanes, ages, observations, initial)

    def inputs_at(
        self,
        columns: FragmentColumns,
        rows: np.ndarray,
        lanes: np.ndarray,
        ages: np.ndarray,
        observations: Any,
        initial_states: Callable[[str], np.ndarray],
    ) -> dict[str, Any]:
        """Return the inputs of action computation for m observations, [m, …].

        Args:
            columns: the rows before the observations.
            rows, lanes: the row and lane of each observation, [m].
            ages: number of earlier rows of each episode, [m].
            observations: the observations [m, …].
            initial_states: returns the initial states [m, …] of a column of states.
        """
        reach = np.minimum(ages, rows + columns.known)
        at = columns.lookback + rows

        def values_at(name: str, view: View, shift: int) -> Any:
            """Return the values [m, …] of one shift of a view."""
            if view.source == "obs" and shift == 0:
                return observations
            column = columns.get(view.source)
            if column is None and is_state(view):
                return initial_states(view.source)
            if column is None:  # nothing is recorded yet
                fill = self._fill(name, view, None)
                return map_leaves(lambda leaf: np.repeat(leaf[None], len(rows), 0), fill)
            if view.source == "obs":
                back = np.minimum(-shift, reach)
                values = map_leaves(lambda leaf: leaf[at - back, lanes], column)
                (first,) = (back == 0).nonzero()
                write(values, first, map_leaves(lambda leaf: leaf[first], observations))
                return values
            values = map_leaves(lambda leaf: leaf[np.maximum(at + shift, 0), lanes], column)
            outside = reach < -shift
            if outside.any() and is_state(view):
                write(values, outside, initial_states(view.source)[outside])
            elif outside.any():
                write(values, outside, self._fill(name, view, column))
            return values

        inputs: dict[str, Any] = {}
        for name, view in self._acting.items():
            parts = [values_at(name, view, shift) for shift in view.shifts]
            inputs[name] = (
                optree.tree_map(lambda *leaves: np.stack(leaves, 1), *parts)
                if view.is_window
                else parts[0]
            )
        return inputs

    def _initial_states(self, segments: Segments, source: str) -> np.ndarray:
        """Return the initial states of the episodes of segments, [segments, …]."""
        if segments.initial_states is not None:
            return segments.initial_states[state_index(source)]
        return self._states.of_segments(source, segments.lanes, segments.continued)

    # -- training ----------------------------------------------------------------------------------

    def training_columns(
        self, columns: FragmentColumns, num_rows: int, segments: Segments, observations: Any
    ) -> dict[str, Any]:
        """Return the views for training, [rows, …] each, in the order of the segments.

        Args:
            columns: the rows.
            num_rows: number of rows of the fragment.
            segments: the rows to show.
            observations: the observation after each segment, [segments, …].
        """
        shown: dict[str, Any] = {}
        bases: dict[str, Any] = {}
        rows = columns.lookback + num_rows
        each_row = segments.rows()
        for name, view in self._training.items():
            column = columns.get(view.source)
            if column is None:
                raise ConfigError(f"cannot view column {view.source!r}: it is not collected")
            last: Any = None
            if view.source == "obs":
                last = observations
            elif is_state(view):
                last = self._initial_states(segments, view.source)
            if view.source not in bases:
                bases[view.source] = _joined(
                    map_leaves(lambda array: by_lane(array[:rows]), column), last
                )
            row, segment = each_row if view.repeat == 1 else segments.rows(view.repeat)
            index = _positions(view, columns, num_rows, segments, row, segment)
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
    num_rows: int,
    segments: Segments,
    row: np.ndarray,
    segment: np.ndarray,
) -> np.ndarray:
    """Return the positions in the base of what a view shows at rows, [rows] or [rows, shifts]."""
    lookback = columns.lookback
    lane_rows = lookback + num_rows
    first_row = segments.lanes[segment] * lane_rows  # of the lane
    age = segments.rows_before[segment] + row - segments.begins[segment]
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
            fill = after + segment if is_state(view) else NOTHING
            valid = (age + shift >= 0) & (position >= oldest) & (row + shift < end)
            parts.append(np.where(valid, first_row + position, fill))
    return np.stack(parts, 1) if view.is_window else parts[0]
