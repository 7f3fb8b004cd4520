"""AgentRecords: keep the records of episodes with several agents, and call the callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.data.columns import map_leaves
from flowrl.data.fragment_columns import FragmentColumns, value_at
from flowrl.data.sample_batch import PolicyID
from flowrl.policies.policy import Policy
from flowrl.sampling.callbacks import (
    EPISODE_EVENTS,
    EVENTS_WITH_EPISODE,
    call_for_episode,
    name_of,
    overrides,
)
from flowrl.sampling.episode import AgentRecord, MultiAgentEpisode
from flowrl.sampling.policy_lanes import PolicyLanes
from flowrl.sampling.running_episodes import RunningEpisode, Trajectory
from flowrl.sampling.sampler_worker import SamplerWorker


class AgentRecords:
    """Updates the records of agents from the columns when a callback is called.

    Args:
        worker: its callbacks are called.
        base_env: the environments, passed to the callbacks.
        policies: the rows of each policy.
        is_used: whether records are kept even if no callback of episodes is overridden.

    Attributes:
        needs_steps: whether a callback is called after each step.
        callbacks_name: name of the class of the callbacks.
    """

    def __init__(
        self,
        worker: SamplerWorker,
        base_env: Any,
        policies: Mapping[PolicyID, PolicyLanes],
        is_used: bool,
    ):
        self._worker, self._base_env, self._policies = worker, base_env, policies
        callbacks = worker.callbacks
        self._is_used = is_used or overrides(callbacks, *EVENTS_WITH_EPISODE)
        self._calls = {name for name in EPISODE_EVENTS if overrides(callbacks, name)}
        self.needs_steps = "on_episode_step" in self._calls
        self.callbacks_name = name_of(callbacks)

    def update_record(self, episode: RunningEpisode) -> MultiAgentEpisode | None:
        """Update the record of an episode and return it; None if records are not kept."""
        if not self._is_used:
            return None
        for trajectory in episode.agents.values():
            self.update(trajectory)
        return episode.record

    def call(self, name: str, episode: RunningEpisode) -> None:
        """Call a callback with an episode, if it is overridden."""
        if name in self._calls:
            self.update_record(episode)
            call_for_episode(self._worker, name, self._base_env, episode.record)

    def start_again(self, episode: RunningEpisode) -> None:
        """Start the record of a running episode again: other callbacks have seen its start."""
        record = episode.record
        for values in (record.user_data, record.custom_metrics, record.hist_data):
            values.clear()
        record.total_reward = sum(episode.returns.values())
        for agent, agent_record in record.records.items():
            agent_record.total_reward = episode.returns.get(agent, 0.0)
            agent_record.pending_reward = 0.0  # `update` adds it
        for trajectory in episode.agents.values():
            row = self._policies[trajectory.policy_id].current_rows[trajectory.lane]
            trajectory.recorded = int(row) if trajectory.alive else trajectory.end
        self.call("on_episode_start", episode)

    def update(self, trajectory: Trajectory) -> None:
        """Add the rows of a trajectory that are not in its episode's record yet."""
        if not self._is_used:
            return
        lanes, lane = self._policies[trajectory.policy_id], trajectory.lane
        columns, episode = lanes.columns, trajectory.episode.record
        record = episode.records[trajectory.agent_id]
        end = int(lanes.current_rows[lane]) if trajectory.alive else trajectory.end
        first, trajectory.recorded = trajectory.recorded, end
        if end > first:
            add_rows(episode, record, columns, lane, first, end)
            infos = columns.get("infos")
            record.info = (None if infos is None else infos[columns.lookback + end - 1, lane]) or {}
        if trajectory.alive and not trajectory.needs_action:  # its action has no outcome yet
            record.action = value_at(columns["actions"], (columns.lookback + end, lane))
            added = trajectory.pending_reward - record.pending_reward
            record.pending_reward = trajectory.pending_reward
            record.total_reward += added
            episode.total_reward += added
        record.alive = trajectory.alive
        raw = lanes.observation(trajectory) if trajectory.alive else trajectory.final
        note_observation(record, raw, lanes.policy)


def add_rows(
    episode: MultiAgentEpisode,
    record: AgentRecord,
    columns: FragmentColumns,
    lane: int,
    first: int,
    end: int,
) -> None:
    """Add rows `first` … `end` - 1 of a lane, at least one, to the record of their agent."""
    last = columns.lookback + end - 1
    rewards, actions = columns["rewards"][:, lane], columns["actions"]
    returned = float(rewards[columns.lookback + first : last + 1].sum(dtype=np.float64))
    added = returned - record.pending_reward
    record.total_reward += added
    episode.total_reward += added
    record.prev_action, record.prev_reward = record.last_action, record.last_reward
    if end - first > 1:
        record.prev_action = value_at(actions, (last - 1, lane))
        record.prev_reward = float(rewards[last - 1])
    record.last_action, record.last_reward = value_at(actions, (last, lane)), float(rewards[last])
    record.action, record.pending_reward = None, 0.0


def note_observation(record: AgentRecord, raw: Any, policy: Policy) -> None:
    """Set the latest observation of an agent, whose arrays become read-only."""
    normalize = policy.observation_filter
    record.raw_obs = record.obs = map_leaves(_read_only, raw)
    if normalize is not None:
        record.obs = _read_only(normalize(raw[None])[0])


def _read_only(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    return array
