"""DD-PPO: decentralized distributed PPO (Wijmans et al. 2019, arXiv 1911.00357).

The loss is PPO's; workers learn from their own samples and average their gradients.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.settings import Count, NonNegativeInt, check_of_settings
from flowrl.trainer.algorithm import PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource, check_device_of_workers


class DDPPOConfig(PPOConfig):
    """Settings of DD-PPO."""

    algorithm: ClassVar[str] = "flowrl.algorithms.ddppo:DDPPO"

    plan: PlanSetting = "ddppo"
    rollout_fragment_length: Count | Literal["auto"] = "auto"
    """Env steps of each environment per round; "auto" makes one round of all workers a train
    batch."""

    sgd_minibatch_size: NonNegativeInt = 128
    """Rows of each worker per update, so an update uses `num_workers` times as many; 0 makes one
    update of the whole fragment. The last minibatch may be smaller. Minibatches of sequences
    consist of whole ones, with at least this many rows."""

    @check_of_settings
    def _check_microbatches(self) -> Self:
        if self.num_workers and self._uses_microbatches():
            raise ValueError("microbatch_size: DD-PPO supports it only with num_workers=0")
        return self

    @check_of_settings
    def _check_device(self) -> Self:
        check_device_of_workers(self, "DD-PPO")
        return self

    def rows_per_train_batch(self) -> int:
        if self.policies is not None:
            return self.train_batch_size
        if self.rollout_fragment_length != "auto":  # whole episodes may have more rows
            return self.rollout_fragment_length * self.num_envs_per_worker
        num_envs = max(self.num_workers, 1) * self.num_envs_per_worker
        return -(-self.train_batch_size // num_envs) * self.num_envs_per_worker

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
