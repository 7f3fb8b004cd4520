"""MultiAgentEpisode: a running episode, passed to callbacks; EpisodeMetrics of a finished one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowrl.data.sample_batch import AgentID, EpisodeID, PolicyID
from flowrl.data.serialization import can_be_saved, savable_info
from flowrl.errors import ConfigError
from flowrl.sampling.callback_worker import CallbackWorker

log = logging.getLogger("flowrl")
_warned: set[tuple[str, str]] = set()  # names and keys of values that cannot be saved


class EpisodeMetrics(NamedTuple):
    """Metrics of a finished episode.

    episode_return: sum of unscaled rewards of all agents.
    episode_length: env steps.
    env_id: index of the environment in its worker.
    agent_returns: (agent id, policy id, sum of rewards) of every agent; None for a single agent.
    custom_metrics, hist_data: set by callbacks; None if empty.
    """

    episode_return: float
    episode_length: int
    env_id: int
    agent_returns: list[tuple[str, str, float]] | None = None
    custom_metrics: dict[str, float] | None = None
    hist_data: dict[str, list[float]] | None = None


def returns_by_policy(
    episodes: Iterable[EpisodeMetrics], policies: Sequence[str]
) -> dict[str, list[float]]:
    """Return policy id -> returns of its agents. In episodes of single agents, the only policy has
    the returns of the episodes.

    Args:
        episodes: the episodes.
        policies: ids of all policies.
    """
    episodes = list(episodes)
    by_policy: dict[str, list[float]] = {}
    for episode in episodes:
        for _, policy_id, agent_return in episode.agent_returns or ():
            by_policy.setdefault(policy_id, []).append(agent_return)
    if len(policies) == 1 and not by_policy:
        by_policy = {policies[0]: [episode.episode_return for episode in episodes]}
    return by_policy


_STATE_FIELDS = ("length", "total_reward", "custom_metrics", "hist_data", "is_faulty")


@dataclass(slots=True)
class AgentRecord:
    """One agent in an episode.

    Attributes:
        policy_id: the policy that acts for the agent.
        agent_index: number of the agent in the episode, from 0, in the order of appearance.
        alive: whether the agent was observed and has not ended.
        action: latest action without a next observation; None otherwise.
        pending_reward: sum of rewards since that action.
        total_reward: sum of all rewards.
        obs, raw_obs: latest observation, normalized and as the environment returned it.
        info: latest info dict.
        last_action, last_reward: those of the latest complete row.
        prev_action, prev_reward: those of the row before it.
    """

    policy_id: PolicyID
    agent_index: int
    alive: bool = False
    action: Any = None
    pending_reward: float = 0.0
    total_reward: float = 0.0
    obs: Any = None
    raw_obs: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    last_action: Any = None
    prev_action: Any = None
    last_reward: float = 0.0
    prev_reward: float = 0.0


class MultiAgentEpisode:
    """An episode in one environment, of one agent or several.

    Attributes:
        episode_id: as in the column `eps_id`.
        env_id: index of the environment in its worker.
        worker: the RolloutWorker.
        length: env steps so far.
        total_reward: sum of rewards of all agents.
        agent_rewards: (agent id, policy id) -> sum of rewards.
        user_data: storage for callbacks.
        custom_metrics: name -> number; results contain mean, minimum and maximum over the reported
            episodes.
        hist_data: name -> list of numbers; results contain all values.
        is_faulty: whether the environment failed; faulty episodes are not part of any metric.
        records: agent id -> AgentRecord.
    """

    def __init__(
        self,
        episode_id: EpisodeID,
        env_id: int,
        worker: CallbackWorker,
        policy_for: Callable[[AgentID, MultiAgentEpisode], PolicyID],
    ):
        self.episode_id = episode_id
        self.env_id = env_id
        self.worker = worker
        self.length = 0
        self.total_reward = 0.0
        self.user_data: dict[str, Any] = {}
        self.custom_metrics: dict[str, float] = {}
        self.hist_data: dict[str, list[float]] = {}
        self.is_faulty = False
        self.records: dict[AgentID, AgentRecord] = {}
        self._policy_for = policy_for
        self._policy_ids: dict[AgentID, PolicyID] = {}  # chosen before the agent appears
        self._next_index = 0

    @property
    def agent_rewards(self) -> dict[tuple[AgentID, PolicyID], float]:
        """Sums of rewards by (agent id, policy id)."""
        return {(a, r.policy_id): r.total_reward for a, r in self.records.items()}

    def agent_record(self, agent_id: AgentID) -> AgentRecord:
        """Return an agent's record; a new agent gets its policy for the whole episode."""
        record = self.records.get(agent_id)
        if record is None:
            policy_id = self.policy_for(agent_id)
            record = self.records[agent_id] = AgentRecord(policy_id, self._next_index)
            self._next_index += 1
        return record

    def policy_for(self, agent_id: AgentID) -> PolicyID:
        """Return the id of the policy that acts for an agent in this episode."""
        record = self.records.get(agent_id)
        if record is not None:
            return record.policy_id
        if agent_id not in self._policy_ids:
            self._policy_ids[agent_id] = self._policy_for(agent_id, self)
        return self._policy_ids[agent_id]

    def continue_from(self, previous: MultiAgentEpisode) -> None:
        """Continue with the live agents of the episode that a soft horizon ended."""
        self._next_index = previous._next_index
        for agent_id, record in previous.records.items():
            if record.alive:
                record = self.records[agent_id] = copy.copy(record)
                record.total_reward = 0.0

    def metrics(self) -> tuple[dict[str, float] | None, dict[str, list[float]] | None]:
        """Return what callbacks stored for the results: custom metrics and histogram data, each
        None if it is empty.

        Raises:
            ConfigError: a custom metric is not a number, or data of a histogram are not a list of
                numbers.
        """
        metrics = {
            name: self._number(f"custom_metrics[{name!r}]", v)
            for name, v in self.custom_metrics.items()
        }
        histograms = {
            name: self._numbers(f"hist_data[{name!r}]", values)
            for name, values in self.hist_data.items()
        }
        return metrics or None, histograms or None

    def _numbers(self, name: str, values: Any) -> list[float]:
        """Return the data of a histogram as a list of numbers."""
        if isinstance(values, Iterable) and not isinstance(values, str):
            return [self._number(f"an entry of {name}", value) for value in values]
        raise ConfigError(
            f"{type(self.worker.callbacks).__name__}: {name} must be a list of numbers, got "
            f"{values!r}"
        )

    def _number(self, name: str, value: Any) -> float:
        """Return what a callback stored under `name` as a number."""
        try:
            if not isinstance(value, str):
                return float(value)
        except (TypeError, ValueError):
            pass
        raise ConfigError(
            f"{type(self.worker.callbacks).__name__}: {name} must be a number, got {value!r}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the worker, for a checkpoint; values of callbacks and infos only if
        they can be saved."""
        records = {}
        for agent, record in self.records.items():
            fields = {name: getattr(record, name) for name in AgentRecord.__slots__}
            records[agent] = {**fields, "info": savable_info(fields["info"])}
        return {
            **{name: getattr(self, name) for name in _STATE_FIELDS},
            "custom_metrics": _savable("custom_metrics", self.custom_metrics),
            "hist_data": _savable("hist_data", {k: list(v) for k, v in self.hist_data.items()}),
            "user_data": _savable("user_data", self.user_data),
            "records": records,
            "policy_ids": dict(self._policy_ids),
            "next_index": self._next_index,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        for name in (*_STATE_FIELDS, "user_data"):
            setattr(self, name, state[name])
        for agent, fields in state["records"].items():
            values = {name: fields[name] for name in AgentRecord.__slots__}
            self.records[agent] = AgentRecord(**values)
        self._policy_ids, self._next_index = dict(state["policy_ids"]), state["next_index"]

    def get_agents(self) -> list[AgentID]:
        """Return the ids of the agents that have appeared so far."""
        return list(self.records)

    def agent_index(self, agent_id: AgentID) -> int:
        """Return the agent's index, as in the column `agent_index`."""
        return self._record_of(agent_id).agent_index

    def last_observation_for(self, agent_id: AgentID = "agent0") -> Any:
        """Return the agent's latest observation, normalized if the policy has a filter."""
        return self._record_of(agent_id).obs

    def last_raw_obs_for(self, agent_id: AgentID = "agent0") -> Any:
        """Return the agent's latest observation as the environment returned it."""
        return self._record_of(agent_id).raw_obs

    def last_action_for(self, agent_id: AgentID = "agent0") -> Any:
        """Return the agent's latest action as it is stored; None before the first one."""
        record = self._record_of(agent_id)
        return record.last_action if record.action is None else record.action

    def prev_action_for(self, agent_id: AgentID = "agent0") -> Any:
        """Return the agent's action before the latest one."""
        record = self._record_of(agent_id)
        return record.prev_action if record.action is None else record.last_action

    def last_reward_for(self, agent_id: AgentID = "agent0") -> float:
        """Return the reward of the agent's latest action so far."""
        record = self._record_of(agent_id)
        return record.last_reward if record.action is None else record.pending_reward

    def prev_reward_for(self, agent_id: AgentID = "agent0") -> float:
        """Return the reward of the agent's action before the latest one."""
        record = self._record_of(agent_id)
        return record.prev_reward if record.action is None else record.last_reward

    def last_info_for(self, agent_id: AgentID = "agent0") -> dict[str, Any]:
        """Return the agent's latest info."""
        return self._record_of(agent_id).info

    def is_done(self, agent_id: AgentID = "agent0") -> bool:
        """Return whether the agent's part of the episode has ended."""
        return not self._record_of(agent_id).alive

    def _record_of(self, agent_id: AgentID) -> AgentRecord:
        if agent_id not in self.records:
            raise ConfigError(
                f"agent {agent_id!r} has not appeared in this episode; its agents are "
                f"{list(self.records)}"
            )
        return self.records[agent_id]

    def __repr__(self) -> str:
        agents = ", ".join(map(repr, self.records))
        return f"MultiAgentEpisode(episode_id={self.episode_id}, length={self.length}, [{agents}])"


def _savable(name: str, values: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries that checkpoints can contain; warn once of each other one."""
    lost = [key for key, value in values.items() if not can_be_saved({key: value})]
    for key in lost:
        if (name, str(key)) not in _warned:
            _warned.add((name, str(key)))
            log.warning(
                "episode.%s[%r] is a %s, which checkpoints cannot contain: a resumed run "
                "continues the episode without it", name, key, type(values[key]).__name__,
            )  # fmt: skip
    return {key: value for key, value in values.items() if key not in lost}
