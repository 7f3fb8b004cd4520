"""A2C: synchronous advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783)."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowrl.algorithms.on_policy import OnPolicyConfig, OnPolicyPolicy
from flowrl.policies.torch_policy import TensorBatch
from flowrl.settings import Count
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource


class A2CConfig(OnPolicyConfig):
    """Settings of A2C."""

    algorithm: ClassVar[str] = "flowrl.algorithms.a2c:A2C"

    plan: PlanSetting = "a2c"
    train_batch_size: Count = 500

    def build(self, plan: PlanSource | None = None) -> A2C:
        return self._build(plan)


class A2CTorchPolicy(OnPolicyPolicy):
    """A policy that is trained with the advantage policy gradient."""

    config_class = A2CConfig
    config: A2CConfig

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the weighted sum of the policy gradient, value and entropy losses, a scalar.

        Each is a mean over rows [B].

        Args:
            batch: has `actions` [B, …], and `advantages` and `value_targets`, float32 [B].
        """
        inputs, _ = self.model.from_batch(batch)
        values = self.model.value_function()
        dist = self.dist_class(inputs, self.model)
        advantages = batch["advantages"]
        if self.config.standardize_advantages:
            advantages = self.learner.standardize(advantages)
        policy_loss = -(dist.logp(batch["actions"]) * advantages).mean()
        vf_loss = torch.nn.functional.mse_loss(values, batch["value_targets"])
        entropy = dist.entropy().mean()
        self.stats |= {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
        vf_loss_coeff = self.scheduled(self.config.vf_loss_coeff)
        entropy_coeff = self.scheduled(self.config.entropy_coeff)
        return policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy

    def loss_coefficients(self) -> tuple[float, ...]:
        return tuple(map(self.scheduled, (self.config.vf_loss_coeff, self.config.entropy_coeff)))


class A2C(Algorithm):
    """A2C with the plan `a2c`; A2CConfig has its settings.

    Example:
        >>> algo = A2C("CartPole-v1", num_envs_per_worker=8, seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = A2CTorchPolicy
    config_class = A2CConfig


DEFAULT_CONFIG = A2CConfig()
