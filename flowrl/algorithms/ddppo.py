"""DD-PPO: decentralized distributed PPO (Wijmans et al. 2019, arXiv 1911.00357).

The loss is PPO's; workers learn from their own samples and average their gradients.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.settings import Count
from flowrl.trainer.algorithm import PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource


class DDPPOConfig(PPOConfig):
    """Settings of DD-PPO."""

    algorithm: ClassVar[str] = "flowrl.algorithms.ddppo:DDPPO"

    plan: PlanSetting = "ddppo"
    rollout_fragment_length: Count | Literal["auto"] = "auto"
    """Env steps of each environment per round; "auto" makes one round of all workers a train
    batch."""

    def check(self) -> None:
        """Check also the settings of each policy; see AlgorithmConfig.check."""
        super().check()
        if self.num_workers:
            self.check_no_microbatches("DD-PPO supports it only with num_workers=0")

    def build(self, plan: PlanSource | None = None) -> DDPPO:
        return self._build(plan)


class DDPPOTorchPolicy(PPOTorchPolicy):
    """PPO's policy with DD-PPO's settings."""

    config_class = DDPPOConfig
    config: DDPPOConfig


class DDPPO(PPO):
    """DD-PPO with the plan `ddppo`; DDPPOConfig has its settings.

    Example:
        >>> algo = DDPPO("CartPole-v1", num_workers=2, seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = DDPPOTorchPolicy
    config_class = DDPPOConfig


DEFAULT_CONFIG = DDPPOConfig()
