"""SampleCollector: what stores experience row by row and gives batches back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from flowrl.data import MultiAgentBatch
from flowrl.data.types import AgentID, EpisodeID, PolicyID
from flowrl.policies.policy import Policy
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.settings import ConfigError


class SampleCollector(ABC):
    """Stores the rows of all agents of all episodes of a worker, and gives batches of them.

    One of your own is named by the setting `sample_collector`; the worker then steps its
    environments row by row and makes one collector (one per environment where whole episodes are
    asked for, `multiple_episodes_in_batch=False`).

    Args:
        policy_map: policy id -> Policy.
        callbacks: whose `on_postprocess_trajectory` is to be called.
        worker: the RolloutWorker; None by hand.
        multiple_episodes_in_batch: whether a batch may hold rows of several episodes.
        rollout_fragment_length, count_steps_by: the settings.
    """

    def __init__(
        self,
        policy_map: Mapping[PolicyID, Policy],
        callbacks: DefaultCallbacks | None = None,
        worker: Any = None,
        multiple_episodes_in_batch: bool = True,
        rollout_fragment_length: int = 200,
        count_steps_by: str = "env_steps",
    ):
        self.policy_map = policy_map
        self.callbacks = callbacks if callbacks is not None else DefaultCallbacks()
        self.worker = worker
        self.multiple_episodes_in_batch = multiple_episodes_in_batch
        self.rollout_fragment_length = rollout_fragment_length
        self.count_steps_by = count_steps_by

    @abstractmethod
    def add_init_obs(
        self, episode_id: EpisodeID, agent_id: AgentID, policy_id: PolicyID, init_obs: Any
    ) -> None:
        """Begin an agent's trajectory with its first observation.

        Called first for each agent of an episode, and again for one that comes back after its end.
        """

    @abstractmethod
    def add_action_reward_next_obs(
        self,
        episode_id: EpisodeID,
        agent_id: AgentID,
        policy_id: PolicyID,
        values: dict[str, Any],
    ) -> None:
        """Add a row to an agent's trajectory.

        Args:
            values: `actions`, `rewards`, `new_obs`, `terminateds`, `truncateds`; besides `t` (env
                steps of the episode before this one), `agent_index`, `env_id`, `infos`, and
                whatever the policy gave with the action (`state_out_0`, `action_logp`, …). It is
                the caller's: not to be changed.
        """

    @abstractmethod
    def total_env_steps(self) -> int:
        """Env steps since the last batch, whoever acted in them."""

    def total_agent_steps(self) -> int:
        """Rows of all agents since the last batch."""
        return self.total_env_steps()

    @abstractmethod
    def get_inference_input_dict(self, model: Any) -> dict[str, Any]:
        """What a policy's views show now, [B, …] each, for the B agents that wait for an action.

        In the order in which their observations were added; they wait no more afterwards.

        Args:
            model: the Policy, or its model.
        """

    @abstractmethod
    def has_non_postprocessed_data(self) -> bool:
        """Whether there are rows that no policy has postprocessed."""

    @abstractmethod
    def postprocess_trajectories_so_far(self, episode: MultiAgentEpisode | None = None) -> None:
        """Let the policies postprocess the rows of an episode (None: of all) that they have not.

        Called at each episode's end, and before a batch is taken. The rows of one call and agent
        are a segment: they have an `unroll_id` of their own.
        """

    @abstractmethod
    def get_multi_agent_batch_and_reset(self) -> MultiAgentBatch:
        """All rows since the last batch, by policy, postprocessed; trajectories go on."""

    @abstractmethod
    def check_missing_dones(self, episode_id: EpisodeID) -> None:
        """An episode is over: look that every agent's last row says so.

        Raises:
            ValueError: an agent's last row is neither terminated nor truncated.
        """

    # -- what a simple collector may leave as it is ------------------------------------------------

    def env_stepped(self, episode_id: EpisodeID, t: int) -> None:  # noqa: B027
        """The episode's environment made its step number `t`; what was observed in it follows."""

    def drop_episode(self, episode_id: EpisodeID) -> None:
        """The episode's environment broke: forget what is not postprocessed yet, and who waits.

        A collector without it stops at the first environment that breaks.
        """
        raise ConfigError(f"{type(self).__name__} has no drop_episode()")

    def continue_episode(self, episode: MultiAgentEpisode, new_episode_id: EpisodeID) -> None:
        """A soft horizon: postprocess the rows so far; the trajectories go on under another
        episode id, with what their views look back on and who waits.

        A collector without it cannot be used with `soft_horizon`.
        """
        raise ConfigError(f"{type(self).__name__} has no continue_episode(), for soft_horizon")

    def get_state(self) -> dict[str, Any] | None:
        """The trajectories in progress, as a checkpoint holds them (see
        `flowrl.data.serialization`); None
        where they cannot be said, so that who goes on from a checkpoint begins new episodes."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave."""
        raise ConfigError(f"{type(self).__name__} has no set_state()")
