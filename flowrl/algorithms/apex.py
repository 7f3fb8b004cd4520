"""Ape-X: distributed prioritized replay with DQN's loss (Horgan et al. 2018, arXiv 1803.00933)."""

from __future__ import annotations

from typing import ClassVar, Literal

from flowrl.algorithms.async_learner import AsyncLearnerConfig
from flowrl.algorithms.dqn import DQN, DQNConfig, DQNTorchPolicy
from flowrl.policies.config import ExplorationConfig
from flowrl.settings import Count, NonNegativeInt
from flowrl.trainer.algorithm import PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource


class APEXConfig(DQNConfig, AsyncLearnerConfig):
    """Settings of Ape-X."""

    algorithm: ClassVar[str] = "flowrl.algorithms.apex:APEX"

    plan: PlanSetting = "apex"
    rollout_fragment_length: Count | Literal["auto"] = 50
    train_batch_size: Count = 512
    n_step: Count = 3
    target_network_update_freq: NonNegativeInt = 50_000
    """Rows trained on between updates of the target network; 0 updates it after every train batch:
    use 0 with a `tau` below 1."""
    exploration_config: ExplorationConfig = ExplorationConfig(type="PerWorkerEpsilonGreedy")
    learner_queue_size: Count = 4
    max_weight_sync_delay: NonNegativeInt = 400
    """Env steps that a worker samples between two updates of its weights."""

    def greedy_workers(self, num_workers: int) -> range | None:
        """Return the indices of the workers whose episodes the plan reports: the last third, which
        explores least; None, for all, if all workers explore equally.

        Args:
            num_workers: present number of workers.
        """
        exploration = self.exploration_config
        explores_equally = self.noisy or exploration.epsilon_exponent == 0
        if exploration.type != "PerWorkerEpsilonGreedy" or explores_equally:
            return None
        return range(num_workers - max(num_workers // 3, 1), num_workers)

    def build(self, plan: PlanSource | None = None) -> APEX:
        return self._build(plan)


class APEXTorchPolicy(DQNTorchPolicy):
    """DQN's policy with Ape-X's settings."""

    config_class = APEXConfig
    config: APEXConfig


class APEX(DQN):
    """Ape-X with the plan `apex`; APEXConfig has its settings.

    Example:
        >>> algo = APEX("CartPole-v1", num_workers=2, seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = APEXTorchPolicy
    config_class = APEXConfig


DEFAULT_CONFIG = APEXConfig()
