"""AgentRecords: keep the records of episodes with several agents, and call the callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.data.fragment_columns import map_leaves, value_at
from flowrl.data.types import PolicyID
from flowrl.sampling.callback_worker import CallbackWorker
from flowrl.sampling.callbacks import EPISODE_EVENTS, call, overrides
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.sampling.policy_lanes import PolicyLanes
from flowrl.sampling.running_episodes import RunningEpisode, Trajectory

_EVENTS = ("on_episode_start", "on_episode_step", "on_episode_end")


class AgentRecords:
    """Updates the records of agents from the columns when a callback is called.

    Args:
        worker: its callbacks are called.
        base_env: the environments, passed to the callbacks.
        policies: the rows of each policy.
        is_used: whether records are kept even if no callback of episodes is overridden.

    Attributes:
        needs_steps: whether a callback is called after each step.
    """

    def __init__(
        self,
        worker: CallbackWorker,
        base_env: Any,
        policies: Mapping[PolicyID, PolicyLanes],
        is_used: bool,
    ):
        self._worker, self._base_env, self._policies = worker, base_env, policies
        callbacks = worker.callbacks
        self._is_used = is_used or overrides(callbacks, *EPISODE_EVENTS)
        self._calls = {name for name in _EVENTS if overrides(callbacks, name)}
        self.needs_steps = "on_episode_step" in self._calls

    def updated(self, episode: RunningEpisode) -> MultiAgentEpisode | None:
        """Return the updated record of an episode; None if records are not kept."""
        if not self._is_used:
            return None
        for trajectory in episode.agents.values():
            self.update(trajectory)
        return episode.record

    def call(self, name: str, slot: int, episode: RunningEpisode) -> None:
        """Call a callback with an episode, if it is overridden."""
        if name not in self._calls:
            return
        call(
            self._worker.callbacks,
            name,
            worker=self._worker,
            base_env=self._base_env,
            policies=dict(self._worker.policy_map),
            episode=self.updated(episode),
            env_index=slot,
        )

    def update(self, trajectory: Trajectory) -> None:
        """Add the rows of a trajectory that are not in its episode's record yet."""
        if not self._is_used:
            return
        lanes, lane = self._policies[trajectory.policy_id], trajectory.lane
        columns, episode = lanes.columns, trajectory.episode.record
        record = episode.records[trajectory.agent_id]
        end = int(lanes.rows[lane]) if trajectory.alive else trajectory.end
        first, trajectory.recorded = trajectory.recorded, end
        at = columns.lookback + end
        if end > first:
            rewards = columns["rewards"][columns.lookback + first : at, lane]
            added = float(rewards.sum(dtype=np.float64)) - record.pending_reward
            record.total_reward += added
            episode.total_reward += added
            record.prev_action, record.prev_reward = record.last_action, record.last_reward
            if end - first > 1:
                record.prev_action = value_at(columns["actions"], (at - 2, lane))
                record.prev_reward = float(rewards[-2])
            record.last_action = value_at(columns["actions"], (at - 1, lane))
            record.last_reward = float(rewards[-1])
            record.action, record.pending_reward = None, 0.0
            infos = columns.get("infos")
            record.info = (None if infos is None else infos[at - 1, lane]) or {}
        if trajectory.alive and not trajectory.waits:  # its action has no outcome yet
            record.action = value_at(columns["actions"], (at, lane))
            added = trajectory.pending_reward - record.pending_reward
            record.pending_reward = trajectory.pending_reward
            record.total_reward += added
            episode.total_reward += added
        record.alive = trajectory.alive
        normalize = lanes.policy.observation_filter
        raw = lanes.observation(trajectory) if trajectory.alive else trajectory.final
        record.raw_obs = record.obs = map_leaves(_read_only, raw)
        if normalize is not None:
            record.obs = _read_only(normalize(raw[None])[0])


def _read_only(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    return array
