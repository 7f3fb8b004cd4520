"""On-policy algorithms: their common settings, and advantages and value targets of fragments."""

from __future__ import annotations

import numpy as np
import torch

from flowrl.data import SampleBatch
from flowrl.policies.returns import discounted_returns, generalized_advantages
from flowrl.policies.schedules import Schedule
from flowrl.policies.torch_policy import TorchPolicy
from flowrl.settings import ConfigError, Fraction
from flowrl.trainer.config import AlgorithmConfig


class OnPolicyConfig(AlgorithmConfig):
    """Settings that the on-policy algorithms share."""

    use_gae: bool = True
    """Generalized advantage estimation; without, advantages are returns minus values."""
    lambda_: Fraction = 0.95
    """GAE's lambda: 0 trusts the values, 1 the returns."""
    entropy_coeff: Schedule = 0.0
    """Weight of the entropy bonus: a number, or a schedule over env steps."""
    vf_loss_coeff: Schedule = 0.5
    """Weight of the value loss: a number, or a schedule over env steps."""
    standardize_advantages: bool = False
    """Advantages of each minibatch to mean 0, standard deviation 1."""
    allow_off_policy: bool = False
    """Take batches from a replay buffer, too, though the loss is for the policy's own, new ones."""


class OnPolicyPolicy(TorchPolicy):
    """Adds the columns `advantages` and `value_targets` to what it samples."""

    config_class = OnPolicyConfig
    config: OnPolicyConfig

    def postprocess_fragment(self, fragment: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """GAE, or discounted returns minus values, over time-major columns [T, N]."""
        if "vf_preds" not in fragment:
            raise ConfigError(
                f"{type(self).__name__} learns from values, but its model gives none: write its "
                "value_function(), or let a plain module give (outputs, values)"
            )
        config, values = self.config, fragment["vf_preds"]
        rewards, dones = fragment["rewards"], fragment["dones"]
        following = fragment["next_values"]
        if config.use_gae:
            advantages = generalized_advantages(
                rewards, values, following, dones, config.gamma, config.lambda_
            )
            return {"advantages": advantages, "value_targets": advantages + values}
        # a truncated episode's last step earns the value of what it did not live to see
        cut = np.where(dones, rewards + config.gamma * following, rewards)
        targets = discounted_returns(cut, dones, following[-1], config.gamma)
        return {"advantages": targets - values, "value_targets": targets}

    def loss_without_rows(self) -> None:
        if self.config.standardize_advantages:
            self.learner.standardize(torch.empty(0))

    def learn_on_minibatches(
        self, batch: SampleBatch, num_sgd_iter: int = 1, sgd_minibatch_size: int = 0
    ) -> dict[str, float]:
        if "batch_indexes" in batch and not self.config.allow_off_policy:
            raise ConfigError(
                f"{type(self).__name__} learns from what it has just sampled, this batch was drawn "
                "from a replay buffer: set allow_off_policy=True if that is meant"
            )
        return super().learn_on_minibatches(batch, num_sgd_iter, sgd_minibatch_size)
