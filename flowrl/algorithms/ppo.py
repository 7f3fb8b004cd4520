"""PPO: proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from flowrl.algorithms.kl_penalty import KLCoeff, KLPenalty
from flowrl.algorithms.on_policy import OnPolicyConfig, OnPolicyPolicy
from flowrl.policies.config import MAX_SGD_ITER
from flowrl.policies.schedules import Schedule
from flowrl.policies.torch_policy import TensorBatch
from flowrl.settings import Count, Needs, NonNegativeInt, Positive
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource


class PPOConfig(OnPolicyConfig):
    """Settings of PPO."""

    algorithm: ClassVar[str] = "flowrl.algorithms.ppo:PPO"
    needs: ClassVar[Needs] = {"kl_target": ("kl_coeff", 0)}

    plan: PlanSetting = "ppo"
    num_sgd_iter: Annotated[Count, Field(le=MAX_SGD_ITER)] = 10
    sgd_minibatch_size: NonNegativeInt = 128
    clip_param: Schedule = 0.2
    """Clip the probability ratio to 1 ± this; a number, or a schedule as for `lr`."""
    vf_clip_param: Positive | None = None
    """Clip new values to the old values ± this; None does not clip."""
    standardize_advantages: bool = True
    kl_coeff: KLCoeff = 0.0
    """Initial weight of the KL penalty; it adapts to `kl_target`, but not in plans that apply
    gradients (ApplyGradients). 0 disables the penalty."""
    kl_target: Positive = 0.01
    """Target KL divergence in nats between the policies before and after training on a batch, to
    which the weight of the penalty adapts."""
    kl_stop: Positive | None = None
    """After each pass, stop training on the batch if the mean KL divergence from the sampling
    policy, in nats, exceeds this; None makes all passes."""

    def build(self, plan: PlanSource | None = None) -> PPO:
        return self._build(plan)


class PPOTorchPolicy(KLPenalty, OnPolicyPolicy):
    """A policy that is trained with PPO's clipped surrogate objective."""

    config_class = PPOConfig
    config: PPOConfig

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the scalar loss of equation 9 of the paper, a mean over rows [B], plus the KL
        penalty of equation 8."""
        config = self.config
        inputs, _ = self.model.from_batch(batch)
        values = self.model.value_function()
        dist = self.dist_class(inputs, self.model)
        clip = self.scheduled(config.clip_param)

        advantages = batch["advantages"]
        if config.standardize_advantages:
            advantages = self.learner.standardize(advantages)
        ratio = torch.exp(dist.logp(batch["actions"]) - batch["action_logp"])
        policy_loss = -clipped_surrogate(ratio, advantages, clip)

        vf_loss = self._value_loss(values, batch)
        loss = policy_loss + self.scheduled(config.vf_loss_coeff) * vf_loss
        entropy_coeff = self.scheduled(config.entropy_coeff)
        if entropy_coeff:
            entropy = dist.entropy().mean()
            loss = loss - entropy_coeff * entropy
            self.stats["entropy"] = entropy
        if self.kl_coeff:
            kl = self.dist_class(batch["action_dist_inputs"], self.model).kl(dist).mean()
            loss = loss + self.kl_coeff * kl
            self.stats["kl"] = kl
        self.stats |= {"policy_loss": policy_loss, "vf_loss": vf_loss}
        return loss

    def loss_coefficients(self) -> tuple[float, ...]:
        config = self.config
        schedules = config.clip_param, config.vf_loss_coeff, config.entropy_coeff
        return (*map(self.scheduled, schedules), self.kl_coeff)

    def _value_loss(self, values: torch.Tensor, batch: TensorBatch) -> torch.Tensor:
        targets, limit = batch["value_targets"], self.config.vf_clip_param
        if limit is None:
            return torch.nn.functional.mse_loss(values, targets)
        old = batch["vf_preds"]
        clipped = old + (values - old).clamp(-limit, limit)
        return torch.maximum((values - targets) ** 2, (clipped - targets) ** 2).mean()

    def end_epoch(self, batch: Any, stats: dict[str, float]) -> bool:
        """Return True, which stops training on the batch, if the KL divergence from the sampling
        policy exceeds `kl_stop`."""
        if self.config.kl_stop is None:
            return False
        kl = self.learner.mean_over_group(None if batch is None else self.batch_stats(batch)["kl"])
        return kl is not None and kl > self.config.kl_stop

    def end_learning(self, batch: Any, stats: dict[str, float]) -> dict[str, float]:
        """Adapt the KL coefficient; return statistics of the whole batch."""
        batch_stats = {} if batch is None else self.batch_stats(batch)
        if self.kl_coeff:
            kl = self.learner.mean_over_group(batch_stats.get("kl"))
            if kl is not None:  # it is None if no process of the group had rows
                self.adapt_kl_coeff(kl)
        clip = self.scheduled(self.config.clip_param)
        return {**batch_stats, "cur_kl_coeff": self.kl_coeff, "cur_clip_param": clip}

    def batch_stats(self, batch: Any) -> dict[str, float]:
        """Return statistics over all rows of a batch: the mean KL divergence from the sampling
        policy [nats], the mean entropy [nats], and the explained variance of the values."""
        size = self.config.microbatch_size
        is_split = 0 < size < batch.count
        parts = self.learner.microbatches(batch, size) if is_split else [batch]
        inference = torch.inference_mode(self.model.has_only_known_modules)
        with inference, torch.no_grad(), self.learner.seeded(self.learner.rng):
            by_part = [self._stats_by_row(self.tensors(part)) for part in parts]
            kl, entropy, targets, residuals = map(torch.cat, zip(*by_part, strict=True))
            variance = float(targets.var(correction=0))
            residual = float(residuals.var(correction=0))
        return {
            "kl": float(kl.mean()),
            "entropy": float(entropy.mean()),
            "vf_explained_var": 1 - residual / variance if variance else float("nan"),
        }

    def _stats_by_row(self, rows: TensorBatch) -> tuple[torch.Tensor, ...]:
        """Return KL divergence, entropy, value target and value error of each row, [B] each."""
        inputs, _ = self.model.from_batch(rows, is_training=False)
        values = self.model.value_function()
        dist = self.dist_class(inputs, self.model)
        kl = self.dist_class(rows["action_dist_inputs"], self.model).kl(dist)
        targets = rows["value_targets"]
        return kl, dist.entropy(), targets, targets - values


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the objective to maximize (equation 7 of the paper), the mean over rows [B]."""
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return torch.minimum(advantages * ratio, advantages * clipped).mean()


class PPO(Algorithm):
    """PPO with the plan `ppo`; PPOConfig has its settings.

    Example:
        >>> algo = PPO("CartPole-v1", num_envs_per_worker=8, seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = PPOTorchPolicy
    config_class = PPOConfig


DEFAULT_CONFIG = PPOConfig()
