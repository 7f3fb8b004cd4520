"""WorkerEnvironments: the environments of one RolloutWorker, created from its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium import spaces

from flowrl.data.sample_batch import AgentID
from flowrl.envs.call_limits import CallLimits
from flowrl.envs.env_factory import EnvFactory
from flowrl.envs.multi_agent_vector_env import MultiAgentVectorEnv
from flowrl.envs.registry import EnvContext, EnvCreator, env_creator_for
from flowrl.envs.single_agent_adapter import SingleAgentAdapter
from flowrl.envs.vector_env import VectorEnv
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.seeding import derive_seed


class WorkerEnvironments:
    """Creates the environments of a worker and can replace them all.

    Args:
        env_creator: function from an EnvContext to an environment, or an environment id.
        config: the worker's settings.
        worker_index, num_workers: passed to the creator.
        seed: seeds the first episode of each environment.
        on_created: called with each new environment and its EnvContext.

    Attributes:
        agent_envs: the environments, stepped with actions by agent id.
        vector_env: the environments, stepped with arrays; None for multi-agent environments.
        is_atari: whether the environments are preprocessed Atari games.
        seed_steps: the argument of the last `reopen`.
    """

    def __init__(
        self,
        env_creator: EnvCreator | str,
        config: WorkerConfig,
        worker_index: int,
        num_workers: int,
        seed: int | None,
        on_created: Callable[[Any, EnvContext], None],
    ):
        self._envs = EnvFactory(
            env_creator_for(env_creator),
            config.env_config,
            config.num_envs_per_worker,
            worker_index,
            num_workers,
            seed=seed,
            vectorization_mode=config.vectorization_mode,
            horizon=config.horizon,
            soft_horizon=config.soft_horizon,
            max_restarts=config.max_num_env_restarts,
            on_env_created=lambda index, env: on_created(env, self._envs.env_context(index)),
            drop_invalid=config.on_invalid_step == "drop",
            atari=config.atari,
            call_limits=CallLimits(config.env_step_timeout_s, config.env_reset_timeout_s),
        )
        self._seed, self.seed_steps = seed, 0
        self.is_atari = self._envs.is_atari
        self._open()

    def _open(self) -> None:
        self.agent_envs: MultiAgentVectorEnv = self._envs.make_agent_envs()
        self.vector_env: VectorEnv | None = None
        if isinstance(self.agent_envs, SingleAgentAdapter):
            self.vector_env = self.agent_envs.vector_env

    def reopen(self, num_steps: int = 0) -> None:
        """Recreate the environments.

        Args:
            num_steps: env steps of the run so far. Their number selects the seeds of the first
                episodes, so that the run does not repeat its first ones; 0: as in a new worker.
        """
        self.close()
        purpose = ("resumed without episodes", num_steps) if num_steps else ()
        self._envs.set_seed(derive_seed(self._seed, *purpose) if purpose else self._seed)
        self._open()
        self.seed_steps = num_steps

    def space_of(self, agent_id: AgentID, column: str) -> spaces.Space:
        """Return the space of an agent's `obs` or `actions`."""
        if column == "obs":
            return self.agent_envs.observation_space(agent_id)
        return self.agent_envs.action_space(agent_id)

    def close(self) -> None:
        """Close the environments."""
        self.agent_envs.close()
