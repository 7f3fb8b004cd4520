"""APPO: asynchronous PPO, as in IMPACT (Luo et al. 2020, arXiv 1912.00167).

The loss is PPO's clipped surrogate objective with V-trace advantages and a target network.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import torch

from flowrl.algorithms.kl_penalty import KLCoeff, KLPenalty
from flowrl.algorithms.ppo import clipped_surrogate
from flowrl.algorithms.vtrace import VTraceConfig, VTracePolicy
from flowrl.policies.schedules import Schedule
from flowrl.policies.target_network import TargetNetworkPolicy
from flowrl.policies.torch_policy import TensorBatch
from flowrl.settings import Fraction, Needs, NonNegativeInt, Positive, check_of_settings
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource


class APPOConfig(VTraceConfig):
    """Settings of APPO."""

    algorithm: ClassVar[str] = "flowrl.algorithms.appo:APPO"
    needs: ClassVar[Needs] = {"kl_target": ("kl_coeff", 0)}

    plan: PlanSetting = "appo"
    clip_param: Schedule = 0.2
    """Clip the probability ratio to the target network's policy to 1 ± this; a number, or a
    schedule as for `lr`."""
    clip_sampled_ratio: Positive = 2.0
    """Maximum probability ratio of the sampling policy to the target network's policy (rho in
    IMPACT)."""
    kl_coeff: KLCoeff = 0.0
    """Initial weight of the KL penalty from the target network's policy; it adapts to `kl_target`.
    0 disables the penalty."""
    kl_target: Positive = 0.01
    """Target KL divergence in nats, to which the weight of the penalty adapts."""
    target_network_update_freq: NonNegativeInt = 0
    """Rows trained on between updates of the target network; 0 updates it after every train
    batch."""
    tau: Fraction = 1.0
    """Polyak coefficient of target updates, target = tau * online + (1 - tau) * target; 1
    copies the online weights."""

    @check_of_settings
    def _check_kl_penalty(self) -> Self:
        has_minibatches = 0 < self.sgd_minibatch_size < self.train_batch_size
        copies_always = self.tau == 1 and self.target_network_update_freq <= self.train_batch_size
        if self.kl_coeff and self.num_sgd_iter == 1 and not has_minibatches and copies_always:
            raise ValueError(
                "kl_coeff: the target network almost always equals the online network, so that the "
                "penalty has no effect: set num_sgd_iter, sgd_minibatch_size, tau, or a "
                "target_network_update_freq above train_batch_size"
            )
        return self

    def build(self, plan: PlanSource | None = None) -> APPO:
        return self._build(plan)


class APPOTorchPolicy(KLPenalty, TargetNetworkPolicy, VTracePolicy):
    """A policy that is trained with a clipped surrogate objective on trajectories of older
    policies."""

    config_class = APPOConfig
    config: APPOConfig
    scalar_columns = VTracePolicy.scalar_columns

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return IMPACT's loss (section 3), a scalar: a mean over rows [B].

        V-trace corrects for the target network's policy; ratios are relative to that policy.
        """
        config = self.config
        inputs, _ = self.model.from_batch(batch)
        values = self.model.value_function().float()
        dist = self.dist_class(inputs, self.model)
        with torch.no_grad():
            target_inputs, _ = self.target_model.from_batch(batch, is_training=False)
            target = self.dist_class(target_inputs, self.target_model)
            target_logp = target.logp(batch["actions"])
        targets, advantages = self.vtrace_targets(
            batch, target_logp.cpu().numpy(), values.detach().cpu().numpy()
        )
        advantages_tensor = torch.from_numpy(advantages).to(self.device)
        logp, sampled_logp = dist.logp(batch["actions"]), batch["action_logp"]
        # equals pi / target, unless sampled / target exceeds clip_sampled_ratio; one exponential,
        # because a product of two could be 0 times infinity
        limit = math.log(config.clip_sampled_ratio)
        ratio = torch.exp(logp - sampled_logp + (sampled_logp - target_logp).clamp(max=limit))
        clip = self.scheduled(config.clip_param)
        policy_loss = -clipped_surrogate(ratio, advantages_tensor, clip)
        value_targets = torch.from_numpy(targets).to(self.device)
        vf_loss = torch.nn.functional.mse_loss(values, value_targets)
        entropy, kl = dist.entropy().mean(), target.kl(dist).mean()
        self.stats |= {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy, "kl": kl}
        vf_loss_coeff = self.scheduled(config.vf_loss_coeff)
        entropy_coeff = self.scheduled(config.entropy_coeff)
        return policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy + self.kl_coeff * kl

    def end_learning(self, batch: Any, stats: dict[str, float]) -> dict[str, float]:
        """Adapt the KL coefficient."""
        kl = self.learner.mean_over_group(stats.get("kl")) if self.kl_coeff else None
        if kl is not None:
            self.adapt_kl_coeff(kl)
        return {"cur_kl_coeff": self.kl_coeff}


class APPO(Algorithm):
    """APPO with the plan `appo`; APPOConfig has its settings.

    Example:
        >>> algo = APPO("CartPole-v1", num_workers=2, seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = APPOTorchPolicy
    config_class = APPOConfig


DEFAULT_CONFIG = APPOConfig()
