"""SampleCollector: the interface of row-by-row storage of experience."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from flowrl.data import MultiAgentBatch
from flowrl.data.sample_batch import AgentID, EpisodeID, PolicyID
from flowrl.errors import ConfigError
from flowrl.policies.policy import Policy
from flowrl.sampling.callback_worker import CallbackWorker
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.sampling.episode import MultiAgentEpisode


class SampleCollector(ABC):
    """Stores the rows of all agents and episodes of a worker, and returns them as batches.

    The setting `sample_collector` selects a subclass; the worker then passes it each row. It
    creates one collector, or one per environment for `batch_mode="complete_episodes"`
    (`multiple_episodes_in_batch=False`).

    Args:
        policy_map: policy id -> Policy.
        callbacks: its `on_postprocess_trajectory` is called.
        worker: the RolloutWorker; None outside of one.
        multiple_episodes_in_batch: whether a batch may hold rows of several episodes.
        rollout_fragment_length, count_steps_by: the settings.
    """

    def __init__(
        self,
        policy_map: Mapping[PolicyID, Policy],
        callbacks: DefaultCallbacks | None = None,
        worker: CallbackWorker | None = None,
        multiple_episodes_in_batch: bool = True,
        rollout_fragment_length: int = 200,
        count_steps_by: str = "env_steps",
    ):
        self.policy_map = policy_map
        self.callbacks = callbacks if callbacks is not None else DefaultCallbacks()
        self.worker: Any = worker
        self.multiple_episodes_in_batch = multiple_episodes_in_batch
        self.rollout_fragment_length = rollout_fragment_length
        self.count_steps_by = count_steps_by

    @abstractmethod
    def add_init_obs(
        self, episode_id: EpisodeID, agent_id: AgentID, policy_id: PolicyID, init_obs: Any
    ) -> None:
        """Start an agent's trajectory with its first observation.

        Called first for each agent of an episode, and again if an agent returns after its end.
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
            values: `actions`, `rewards`, `new_obs`, `terminateds`, `truncateds`, `t` (env steps of
                the episode before this one), `agent_index`, `env_id`, `infos`, and the policy's
                extra outputs (`state_out_0`, `action_logp`, ...). Must not be changed.
        """

    @abstractmethod
    def total_env_steps(self) -> int:
        """Return the env steps since the last batch, regardless of which agents acted.

        Part of RLlib's interface; flowrl does not call it.
        """

    def total_agent_steps(self) -> int:
        """Return the number of rows of all agents since the last batch.

        Part of RLlib's interface; flowrl does not call it.
        """
        return self.total_env_steps()

    @abstractmethod
    def get_inference_input_dict(self, model: Any) -> dict[str, Any]:
        """Return the inputs of a policy, [B, …] each, for the B agents that need an action.

        The order is that in which their observations were added. The call clears the list of these
        agents.

        Args:
            model: the Policy, or its model.
        """

    @abstractmethod
    def has_non_postprocessed_data(self) -> bool:
        """Return whether there are rows that are not postprocessed.

        Part of RLlib's interface; flowrl does not call it.
        """

    @abstractmethod
    def postprocess_trajectories_so_far(self, episode: MultiAgentEpisode | None = None) -> None:
        """Postprocess the rows of an episode, or of all if None, that are not postprocessed.

        Called at the end of each episode; `get_multi_agent_batch_and_reset` must call it for the
        other rows. The rows of one agent in one call are a segment with its own `unroll_id`.
        """

    @abstractmethod
    def get_multi_agent_batch_and_reset(self) -> MultiAgentBatch:
        """Return all rows since the last batch by policy, postprocessed; trajectories continue."""

    @abstractmethod
    def check_missing_dones(self, episode_id: EpisodeID) -> None:
        """Check at the end of an episode that every agent's last row is marked as done.

        Raises:
            ValueError: an agent's last row is neither terminated nor truncated.
        """

    # -- optional methods --------------------------------------------------------------------------

    def env_stepped(self, episode_id: EpisodeID, t: int) -> None:  # noqa: B027
        """Note env step `t` of the episode; its rows are added afterwards."""

    def drop_episode(self, episode_id: EpisodeID) -> None:
        """Drop an episode's rows that are not postprocessed, because its environment failed.

        Without this method, the first environment failure ends sampling, and a resumed run starts
        new episodes in all environments if one of them cannot be restored.
        """
        raise ConfigError(f"{type(self).__name__} has no drop_episode()")

    def continue_episode(self, episode: MultiAgentEpisode, new_episode_id: EpisodeID) -> None:
        """Postprocess an episode's rows at a soft horizon, and continue it under another id.

        The trajectories keep the rows that views look back on, and the agents that need an action.
        Without this method, `soft_horizon` cannot be used.
        """
        raise ConfigError(f"{type(self).__name__} has no continue_episode(), for soft_horizon")

    def state_dict(self) -> dict[str, Any] | None:
        """Return the running trajectories in types of `flowrl.data.serialization`.

        None if they cannot be saved: a resumed run then starts new episodes.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        raise ConfigError(f"{type(self).__name__} has no load_state_dict()")
