"""CollectedTrajectory: one agent's rows in lists; TrajectoryViews: one policy's views of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import optree

from flowrl.data.sample_batch import AgentID, EpisodeID, PolicyID
from flowrl.data.serialization import savable_info
from flowrl.data.spaces import stack_values
from flowrl.errors import ConfigError
from flowrl.policies.acting_views import (
    DTYPES,
    View,
    batch_views,
    fill_value,
    is_state,
    signature_of,
    space_of,
    state_index,
)
from flowrl.policies.policy import Policy
from flowrl.policies.views import acting_views
from flowrl.sampling.agent_views import agent_fill_value, check_shapes, shown_agents
from flowrl.sampling.views import check_repeats, max_seq_len
from flowrl.state_schema import Fields, Natural, check_state

_STATE: Fields = {
    "observations": list[Any],
    "values": list[dict[str, Any]],
    "times": list[Any],
    "begin": Natural,
    "dropped": Natural,
    "ended": bool,
    "initial": list[Any],
    "sums": list[Any],
}


class CollectedTrajectory:
    """One agent's rows in one episode, as dicts.

    Attributes:
        observations: one more than `values`.
        values: the stored rows.
        times: env step of each row's action, and of the next one.
        dropped: number of rows dropped from the front.
        begin: first row that is in no segment.
        ended: whether the last row is terminated or truncated.
        sums: running discounted sum of rewards, for the reward scaler; a list of one array or None,
            shared with the trajectory that this one continues after a soft horizon.
        initial: initial recurrent states.
    """

    def __init__(self, episode_id: EpisodeID, agent_id: AgentID, policy_id: PolicyID):
        self.episode_id, self.agent_id, self.policy_id = episode_id, agent_id, policy_id
        self.observations: list[Any] = []
        self.values: list[dict[str, Any]] = []
        self.times: list[int] = []
        self.begin = self.dropped = 0
        self.ended = False
        self.initial: list[Any] = []
        self.sums: list[Any] = [None]

    @property
    def rows(self) -> int:
        """Number of rows so far, including dropped ones."""
        return self.dropped + len(self.values)

    def cut(self) -> int:
        """Put the rows from `begin` on into a segment; return the former `begin`."""
        begin, self.begin = self.begin, self.rows
        return begin

    def state_dict(self) -> dict[str, Any]:
        """Return all fields for a checkpoint; infos only if they can be saved."""
        fields = {n: list(v) if isinstance(v, list) else v for n, v in vars(self).items()}
        return {**fields, "values": [_without_unsavable_info(row) for row in self.values]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> CollectedTrajectory:
        """Return a trajectory from the result of `state_dict`.

        Raises:
            StateError: a field is missing or of another type.
        """
        check_state(state, _STATE, "trajectory")
        trajectory = cls(state["episode_id"], state["agent_id"], state["policy_id"])
        for name, value in state.items():
            setattr(trajectory, name, list(value) if isinstance(value, list) else value)
        return trajectory

    def value(self, name: str, row: int) -> Any:
        """Return a column's value in a row.

        Raises:
            ConfigError: no row has the column.
        """
        if name == "obs":
            return self.observations[row - self.dropped]
        values = self.values[row - self.dropped]
        if name == "dones":
            return bool(values["terminateds"] or values["truncateds"])
        if name in values:
            return values[name]
        known = next((other[name] for other in self.values if name in other), None)
        if known is None:
            raise ConfigError(f"cannot view column {name!r}: it is not collected")
        return optree.tree_map(np.zeros_like, known)

    def forget(self, lookback: int, since: int | None = None) -> None:
        """Drop rows of finished segments, except the last `lookback` ones and those from env step
        `since` on."""
        count = max(0, self.begin - lookback) - self.dropped
        if since is not None:
            count = min(count, bisect.bisect_left(self.times, since))
        if count > 0:
            del self.values[:count], self.observations[:count], self.times[:count]
            self.dropped += count

    def at_time(self, source: str, now: int, shift: int) -> Any:
        """Return the value of a column `shift` steps from the env step `now`; None if there is no
        such row, or if the outcome of its action was not observed by `now`."""
        times, is_obs = self.times, source == "obs"
        # the last observation has no action; a final one is not shown
        last = len(times) - (not is_obs or self.ended)
        row = bisect.bisect_left(times, now + shift, 0, last)
        if row == last or times[row] != now + shift:
            return None
        if not is_obs and shift < 0 and times[row + 1] > now:
            return None
        return self.value(source, self.dropped + row)


class TrajectoryViews:
    """One policy's views of trajectories, found row by row.

    Args:
        policy: the policy.
        worker: has the agents and their spaces; None outside of a worker.
    """

    def __init__(self, policy: Policy, worker: Any):
        self.policy, self._worker = policy, worker
        self.requirements = dict(policy.view_requirements)
        self.signature = signature_of(self.requirements)
        views = batch_views(self.requirements)
        self.training = {n: View(n, v) for n, v in views.items() if v.used_for_training}
        self.acting = {n: View(n, v) for n, v in acting_views(self.requirements).items()}
        check_repeats(self.training)
        resolved = [*self.training.values(), *self.acting.values()]
        self.lookback = max([0, *(-min(view.shifts) for view in resolved)])
        self.has_agent_views = any(view.agents is not None for view in resolved)
        self.max_seq_len = max_seq_len(policy, self.training)

    def show(self, view: View, trajectory: CollectedTrajectory, row: int, end: int) -> Any:
        """Return what a view shows at a row of a trajectory with the rows before `end`."""
        shown = [self._value(view, trajectory, row + shift, end) for shift in view.shifts]
        return column_of(view.source, shown) if view.is_window else shown[0]

    def _value(self, view: View, trajectory: CollectedTrajectory, row: int, end: int) -> Any:
        first, source = trajectory.dropped, view.source
        if source == "obs" and row <= end:
            return trajectory.value(source, max(row, first))
        if source != "obs" and first <= row < end:
            return trajectory.value(source, row)
        if is_state(view):
            return np.asarray(trajectory.initial[state_index(source)])
        if source not in DTYPES and source != "obs":
            for known in trajectory.values:
                if source in known:
                    return optree.tree_map(np.zeros_like, known[source])
        return fill_value(view, partial(space_of, self.policy))

    def show_agents(
        self, view: View, trajectory: CollectedTrajectory, row: int, by_agent: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what a view shows of other agents at a row: values and mask, [agents, …].

        Args:
            view: the view.
            trajectory, row: the row.
            by_agent: agent -> its trajectories in the episode.
        """
        agents = shown_agents(view, trajectory.agent_id, self._worker)
        time = trajectory.times[row - trajectory.dropped]
        values, mask = [], []
        for agent in agents:
            find_space = partial(space_of, self.policy)
            if self._worker is not None:
                find_space = partial(self._worker.space_of, agent)
            zero = agent_fill_value(view, agent, find_space)
            for shift in view.shifts:
                value = _first(t.at_time(view.source, time, shift) for t in by_agent.get(agent, ()))
                mask.append(value is not None)
                values.append(zero if value is None else value)
        check_shapes(view, map(np.shape, values))
        shape = (len(agents), len(view.shifts)) if view.is_window else (len(agents),)
        column = column_of(view.source, values)
        return column.reshape(*shape, *column.shape[1:]), np.array(mask).reshape(shape)


def column_of(name: str, values: list[Any]) -> Any:
    """Return a column of values."""
    if name == "infos":
        column = np.empty(len(values), object)
        column[:] = values
        return column
    if name in DTYPES:
        return np.array(values, DTYPES[name])
    return stack_values(values)


def copied(observation: Any) -> Any:
    """Return the observation, copied unless it is read-only."""
    if isinstance(observation, np.ndarray):
        return observation.copy() if observation.flags.writeable else observation
    if isinstance(observation, (dict, tuple)):
        nest: Any = observation
        return optree.tree_map(np.array, nest)
    return observation


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _without_unsavable_info(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "infos": savable_info(row["infos"])} if row.get("infos") else row
