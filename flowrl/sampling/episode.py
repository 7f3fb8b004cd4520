"""Episodes: the record of one in progress, which callbacks get; what is told of a finished one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from flowrl.data.serialization import can_be_saved
from flowrl.data.types import AgentID, EpisodeID, PolicyID
from flowrl.settings import ConfigError

IDS_PER_WORKER = 1 << 40  # episode and unroll ids of different workers never meet,
IDS_PER_INCARNATION = 1 << 30  # nor those of a worker and of the one that replaces it


class Ids:
    """Counts up without end, and says what comes next."""

    __slots__ = ("following",)

    def __init__(self, first: int = 0):
        self.following = first

    def __next__(self) -> int:
        self.following += 1
        return self.following - 1


class EpisodeMetrics(NamedTuple):
    """A finished episode.

    episode_return: sum of unscaled rewards, of all agents.
    episode_length: env steps.
    env_id: which of the worker's environments.
    agent_returns: (agent id, policy id, sum of rewards) of every agent; None where there is one.
    custom_metrics, hist_data: what callbacks left in the episode; None for nothing.
    """

    episode_return: float
    episode_length: int
    env_id: int
    agent_returns: list[tuple[str, str, float]] | None = None
    custom_metrics: dict[str, float] | None = None
    hist_data: dict[str, list[float]] | None = None


# EpisodeMetrics(*fields), three times as fast
fast_metrics = partial(tuple.__new__, EpisodeMetrics)


_KEPT = ("length", "total_reward", "custom_metrics", "hist_data", "is_faulty")


class AgentRecord:
    """One agent in an episode."""

    __slots__ = (
        "action", "agent_index", "alive", "extra", "info", "last_action", "last_reward", "obs",
        "pending_reward", "policy_id", "prev_action", "prev_reward", "raw_obs", "total_reward",
    )  # fmt: skip

    def __init__(self, policy_id: PolicyID, agent_index: int):
        self.policy_id = policy_id
        self.agent_index = agent_index
        self.alive = False  # observed, and not at its end
        self.action: Any = None  # chosen, its outcome not observed yet
        self.extra: dict[str, Any] = {}
        self.pending_reward = 0.0
        self.total_reward = 0.0
        self.obs: Any = None
        self.raw_obs: Any = None
        self.info: dict[str, Any] = {}
        self.last_action: Any = None
        self.prev_action: Any = None
        self.last_reward = 0.0
        self.prev_reward = 0.0


class MultiAgentEpisode:
    """An episode in one environment, of one agent or several.

    Attributes:
        episode_id: as in the column `eps_id`.
        env_id: which of the worker's environments.
        worker: the RolloutWorker.
        length: env steps so far.
        total_reward: of all agents.
        agent_rewards: (agent id, policy id) -> sum of rewards.
        user_data: for callbacks to keep what they like.
        custom_metrics: name -> number; means, minima and maxima over the reported episodes are
            part of the results.
        hist_data: name -> list of numbers; reported whole.
        is_faulty: its environment broke; it counts nowhere.
    """

    def __init__(
        self,
        episode_id: EpisodeID,
        env_id: int,
        worker: Any,
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
        self._chosen: dict[AgentID, PolicyID] = {}  # for those who are still to come
        self._next_index = 0

    @property
    def agent_rewards(self) -> dict[tuple[AgentID, PolicyID], float]:
        """Sum of rewards by (agent id, policy id)."""
        return {(a, r.policy_id): r.total_reward for a, r in self.records.items()}

    def record(self, agent_id: AgentID) -> AgentRecord:
        """An agent's record; a new agent is given its policy, for the whole episode."""
        record = self.records.get(agent_id)
        if record is None:
            policy_id = self.policy_for(agent_id)
            record = self.records[agent_id] = AgentRecord(policy_id, self._next_index)
            self._next_index += 1
        return record

    def policy_for(self, agent_id: AgentID) -> PolicyID:
        """The id of the policy that acts for an agent in this episode."""
        record = self.records.get(agent_id)
        if record is not None:
            return record.policy_id
        if agent_id not in self._chosen:
            self._chosen[agent_id] = self._policy_for(agent_id, self)
        return self._chosen[agent_id]

    def take_over(self, before: MultiAgentEpisode) -> None:
        """Go on with the agents that are there, over a soft horizon."""
        self._next_index = before._next_index
        for agent_id, record in before.records.items():
            if record.alive:
                record.total_reward = 0.0
                self.records[agent_id] = record

    def get_state(self) -> dict[str, Any]:
        """All of it but the worker, as a checkpoint holds it. What callbacks left in `user_data`,
        and infos, are in it where they can be saved."""
        records = {}
        for agent, record in self.records.items():
            own = {name: getattr(record, name) for name in AgentRecord.__slots__}
            records[agent] = own if can_be_saved(own["info"]) else {**own, "info": {}}
        return {
            **{name: getattr(self, name) for name in _KEPT},
            "custom_metrics": {k: v for k, v in self.custom_metrics.items() if can_be_saved(v)},
            "hist_data": {k: list(v) for k, v in self.hist_data.items() if can_be_saved(v)},
            "user_data": {k: v for k, v in self.user_data.items() if can_be_saved({k: v})},
            "records": records,
            "chosen": dict(self._chosen),
            "next_index": self._next_index,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave."""
        for name in (*_KEPT, "user_data"):
            setattr(self, name, state[name])
        for agent, own in state["records"].items():
            record = self.records[agent] = AgentRecord(own["policy_id"], own["agent_index"])
            for name, value in own.items():
                setattr(record, name, value)
        self._chosen, self._next_index = dict(state["chosen"]), state["next_index"]

    def get_agents(self) -> list[AgentID]:
        """Ids of the agents seen so far."""
        return list(self.records)

    def agent_index(self, agent_id: AgentID) -> int:
        """The agent's number, as in the column `agent_index`."""
        return self._seen(agent_id).agent_index

    def last_observation_for(self, agent_id: AgentID = "agent0") -> Any:
        """What the policy saw last of an agent; normalised, where observations are."""
        return self._seen(agent_id).obs

    def last_raw_obs_for(self, agent_id: AgentID = "agent0") -> Any:
        """The last observation as the environment gave it."""
        return self._seen(agent_id).raw_obs

    def last_action_for(self, agent_id: AgentID = "agent0") -> Any:
        """The last action, as it is stored; None before the first."""
        return self._seen(agent_id).last_action

    def prev_action_for(self, agent_id: AgentID = "agent0") -> Any:
        """The one before the last."""
        return self._seen(agent_id).prev_action

    def last_reward_for(self, agent_id: AgentID = "agent0") -> float:
        """The last reward."""
        return self._seen(agent_id).last_reward

    def prev_reward_for(self, agent_id: AgentID = "agent0") -> float:
        """The one before the last."""
        return self._seen(agent_id).prev_reward

    def last_info_for(self, agent_id: AgentID = "agent0") -> dict[str, Any]:
        """The last info."""
        return self._seen(agent_id).info

    def is_done(self, agent_id: AgentID = "agent0") -> bool:
        """Whether the agent's part is over."""
        return not self._seen(agent_id).alive

    def _seen(self, agent_id: AgentID) -> AgentRecord:
        if agent_id not in self.records:
            raise ConfigError(
                f"no agent {agent_id!r} in this episode so far: there are {list(self.records)}"
            )
        return self.records[agent_id]

    def __repr__(self) -> str:
        agents = ", ".join(map(repr, self.records))
        return f"MultiAgentEpisode(episode_id={self.episode_id}, length={self.length}, [{agents}])"
