"""SimpleQ: Q-learning with a network and a replay buffer (Mnih et al. 2013, arXiv 1312.5602) and a
target network (Mnih et al. 2015)."""

from __future__ import annotations

from typing import ClassVar

from flowrl.algorithms.dqn import DQN, DQNConfig, DQNTorchPolicy
from flowrl.trainer.algorithm import PolicyClass
from flowrl.trainer.config import PlanSource


class SimpleQConfig(DQNConfig):
    """DQN's settings without double Q-learning, dueling networks and prioritized replay."""

    algorithm: ClassVar[str] = "flowrl.algorithms.simple_q:SimpleQ"

    double_q: bool = False
    dueling: bool = False
    prioritized_replay: bool = False

    def build(self, plan: PlanSource | None = None) -> SimpleQ:
        return self._build(plan)


class SimpleQTorchPolicy(DQNTorchPolicy):
    """DQN's policy with SimpleQ's settings."""

    config_class = SimpleQConfig


class SimpleQ(DQN):
    """SimpleQ with the plan `dqn`; SimpleQConfig has its settings.

    Example:
        >>> algo = SimpleQ("CartPole-v1", seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = SimpleQTorchPolicy
    config_class = SimpleQConfig


DEFAULT_CONFIG = SimpleQConfig()
