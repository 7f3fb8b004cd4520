"""AgentViews: views of the rows of other agents of the same episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.errors import ConfigError
from flowrl.policies.acting_views import View, fill_value
from flowrl.policies.policy import Policy
from flowrl.sampling.callback_worker import CallbackWorker
from flowrl.sampling.running_episodes import RunningEpisode, Segment, Trajectory


def has_agent_views(policies: Mapping[PolicyID, Policy]) -> bool:
    """Return whether a policy has views of other agents."""
    views = [view for policy in policies.values() for view in policy.view_requirements.values()]
    return any(view.agents is not None for view in views)


class AgentViews:
    """Finds rows of other agents by the env step of their observation.

    Rows that do not exist are filled with zeros, and False in the column `<view>_mask`. The action
    and reward of an agent are shown once the observation after them is known.

    Args:
        worker: has the agents and their spaces.
        policies: the rows of each policy, in a dict that is filled later.
    """

    def __init__(self, worker: CallbackWorker, policies: Mapping[PolicyID, Any]):
        self._worker, self._policies = worker, policies

    def inputs(self, views: Mapping[str, View], waiting: list[Trajectory]) -> dict[str, np.ndarray]:
        """Return views and masks at the current rows of trajectories, [m, agents, …] each."""
        requests = []
        for trajectory in waiting:
            row = self._policies[trajectory.policy_id].current_rows[trajectory.lane]
            times = self._times(trajectory, np.array([row]))
            requests.append((trajectory, trajectory.episode, times))
        return self._columns(views, requests)

    def inputs_after(
        self, views: Mapping[str, View], segments: list[Segment]
    ) -> dict[str, np.ndarray]:
        """Return views and masks at the observation after each segment, [segments, agents, …]."""
        requests = []
        for segment in segments:
            trajectory = segment.trajectory
            times = self._times(trajectory, np.array([segment.end]))
            if segment.final is not None:
                times = np.array([trajectory.end_time])
            requests.append((trajectory, segment.episode, times))
        return self._columns(views, requests)

    def rows(self, views: Mapping[str, View], segments: list[Segment]) -> dict[str, np.ndarray]:
        """Return views and masks of the rows of segments, [rows, agents, …] each."""
        requests = []
        for segment in segments:
            times = self._times(segment.trajectory, np.arange(segment.begin, segment.end))
            requests.append((segment.trajectory, segment.episode, times))
        return self._columns(views, requests)

    def _times(self, trajectory: Trajectory, rows: np.ndarray) -> np.ndarray:
        columns = self._policies[trajectory.policy_id].columns
        return columns["time"][columns.lookback + rows, trajectory.lane]

    def _columns(self, views: Mapping[str, View], requests: list[Any]) -> dict[str, np.ndarray]:
        shown: dict[str, np.ndarray] = {}
        for name, view in views.items():
            parts = [self._view(view, *request) for request in requests]
            check_shapes(view, (values.shape[1:] for values, _ in parts))
            shown[name] = np.concatenate([values for values, _ in parts])
            shown[f"{name}_mask"] = np.concatenate([mask for _, mask in parts])
        return shown

    def _view(
        self,
        view: View,
        trajectory: Trajectory,
        episode: RunningEpisode,
        times: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a view and its mask at env steps of a trajectory, [times, agents, …] each."""
        values, masks = [], []
        for agent in shown_agents(view, trajectory.agent_id, self._worker):
            shifted = [self._of_agent(view, episode, agent, times, shift) for shift in view.shifts]
            if view.is_window:
                values.append(np.stack([value for value, _ in shifted], 1))
                masks.append(np.stack([mask for _, mask in shifted], 1))
            else:
                values.append(shifted[0][0])
                masks.append(shifted[0][1])
        check_shapes(view, (value.shape[1:] for value in values))
        return np.stack(values, 1), np.stack(masks, 1)

    def _of_agent(
        self, view: View, episode: RunningEpisode, agent: AgentID, times: np.ndarray, shift: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return an agent's values `shift` env steps from times, and which of them exist."""
        fill = agent_fill_value(view, agent, partial(self._worker.space_of, agent))
        values = np.repeat(fill[None], len(times), 0)
        mask = np.zeros(len(times), bool)
        is_obs = view.source == "obs"
        for other in episode.history.get(agent, ()):
            lanes = self._policies[other.policy_id]
            columns, begin = lanes.columns, lanes.columns.lookback
            first = max(other.begin - other.age, -begin)
            last = int(lanes.current_rows[other.lane]) if other.alive else other.end
            if last < first:
                continue
            row_times = self._times(other, np.arange(first, last + 1))
            has_final = other.final is not None  # a dropped trajectory has no final observation
            if has_final:
                row_times[-1] = other.end_time
            count = len(row_times) - (not is_obs or has_final)
            positions = np.searchsorted(row_times[:count], times + shift)
            found = positions < count
            found[found] = row_times[positions[found]] == (times + shift)[found]
            if not is_obs and shift < 0:  # the outcome of the action is known
                found[found] = row_times[positions[found] + 1] <= times[found]
            if not found.any():
                continue
            column = columns.get(view.source)
            if column is None:
                raise ConfigError(f"cannot view column {view.source!r}: it is not collected")
            found_values = column[begin + first + positions[found], other.lane]
            check_shapes(view, (found_values.shape[1:], values.shape[1:]))
            values = values.astype(np.result_type(values, found_values), copy=False)
            values[found], mask[found] = found_values, True
        return values, mask


def possible_agents(worker: CallbackWorker | None) -> list[AgentID]:
    """Return the agents that a view with agents="others" shows.

    Raises:
        ConfigError: the environment does not name them.
    """
    if worker is None or not worker.possible_agents:
        raise ConfigError('a view with agents="others" needs an environment with possible_agents')
    return worker.possible_agents


def shown_agents(view: View, agent: AgentID, worker: CallbackWorker | None) -> list[AgentID]:
    """Return the agents whose rows a view of an agent shows.

    Raises:
        ConfigError: the view shows all others, and the environment does not name its agents or has
            no other ones.
    """
    if view.agents != "others":
        return list(view.agents or ())
    others = [other for other in possible_agents(worker) if other != agent]
    if not others:
        raise ConfigError('a view with agents="others" needs an environment with other agents')
    return others


def agent_fill_value(
    view: View, agent: AgentID, find_space: Callable[[str], spaces.Space]
) -> np.ndarray:
    """Return zeros, which a view shows where an agent has no row.

    Args:
        view: the view.
        agent: the agent whose rows it shows.
        find_space: "obs" or "actions" -> its space.

    Raises:
        ConfigError: the space is a Dict or a Tuple.
    """
    fill = fill_value(view, find_space)
    if isinstance(fill, (dict, tuple)):
        raise ConfigError(
            f"view of {view.source!r} of the agents {view.agents}: views of other agents support "
            f"arrays, but the space of agent {agent!r} is a {type(fill).__name__.capitalize()}"
        )
    return np.asarray(fill)


def check_shapes(view: View, shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise ConfigError if the values that a view shows have different shapes."""
    different = set(shapes)
    if len(different) > 1:
        raise ConfigError(
            f"view of {view.source!r} of the agents {view.agents}: the values have different "
            f"shapes, {sorted(different)}"
        )
