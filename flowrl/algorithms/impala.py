"""IMPALA: importance weighted actor-learner (Espeholt et al. 2018, arXiv 1802.01561)."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowrl.algorithms.vtrace import VTraceConfig, VTracePolicy
from flowrl.policies.torch_policy import TensorBatch
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource


class IMPALAConfig(VTraceConfig):
    """Settings of IMPALA."""

    algorithm: ClassVar[str] = "flowrl.algorithms.impala:IMPALA"

    plan: PlanSetting = "impala"

    def build(self, plan: PlanSource | None = None) -> IMPALA:
        return self._build(plan)


class IMPALATorchPolicy(VTracePolicy):
    """A policy that is trained with V-trace's policy gradient."""

    config_class = IMPALAConfig
    config: IMPALAConfig

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the weighted sum of the policy gradient, value and entropy losses (section 4.2 of
        the paper), a scalar: each is a mean over rows [B]."""
        inputs, _ = self.model.from_batch(batch)
        values = self.model.value_function().float()
        dist = self.dist_class(inputs, self.model)
        logp = dist.logp(batch["actions"])
        targets, advantages = self.vtrace_targets(
            batch, logp.detach().cpu().numpy(), values.detach().cpu().numpy()
        )
        policy_loss = -(logp * torch.from_numpy(advantages).to(self.device)).mean()
        value_targets = torch.from_numpy(targets).to(self.device)
        vf_loss = torch.nn.functional.mse_loss(values, value_targets)
        entropy = dist.entropy().mean()
        self.stats |= {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
        vf_loss_coeff = self.scheduled(self.config.vf_loss_coeff)
        entropy_coeff = self.scheduled(self.config.entropy_coeff)
        return policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy


class IMPALA(Algorithm):
    """IMPALA with the plan `impala`; IMPALAConfig has its settings.

    Example:
        >>> algo = IMPALA("CartPole-v1", num_workers=2, seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = IMPALATorchPolicy
    config_class = IMPALAConfig


DEFAULT_CONFIG = IMPALAConfig()
