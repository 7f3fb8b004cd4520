"""CallbackWorker: the interface of a RolloutWorker for callbacks, episodes and collectors."""

from __future__ import annotations

from typing import Any, Protocol

from gymnasium import spaces

from flowrl.data.sample_batch import AgentID, PolicyID
from flowrl.policies.policy import Policy
from flowrl.sampling.ids import IdCounter


class CallbackWorker(Protocol):
    """The part of a RolloutWorker that callbacks, episodes and sample collectors may use."""

    config: Any
    callbacks: Any
    worker_index: int
    policy_map: dict[PolicyID, Policy]
    possible_agents: list[AgentID]
    is_multi_agent: bool
    no_done_at_end: bool
    clip_rewards: Any

    @property
    def unroll_ids(self) -> IdCounter:
        """Counter for the column `unroll_id`."""

    @property
    def num_envs(self) -> int:
        """Number of environments that the worker steps together."""

    @property
    def env_steps(self) -> int:
        """Env steps returned by `sample()` so far."""

    def get_policy(self, policy_id: PolicyID) -> Policy:
        """Return the policy with this id."""

    def space_of(self, agent_id: AgentID, column: str) -> spaces.Space:
        """Return the environment's space of an agent's `obs` or `actions`."""

    def episode(self, episode_id: int) -> Any | None:
        """Return the MultiAgentEpisode of a running episode, if episodes are recorded."""
