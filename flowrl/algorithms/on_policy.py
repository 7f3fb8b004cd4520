"""The common part of the on-policy algorithms: settings, advantages and value targets."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import torch

from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.policies.models.fcnet import uses_numpy
from flowrl.policies.returns import discounted_returns, generalized_advantages
from flowrl.policies.schedules import Schedule
from flowrl.policies.torch_policy import TorchPolicy
from flowrl.settings import Fraction, Needs, check_of_settings
from flowrl.trainer.config import AlgorithmConfig

_ACTING = {"compute_actions", "_act", "extra_action_out", "compute_values"}


class OnPolicyConfig(AlgorithmConfig):
    """Settings that the on-policy algorithms share."""

    needs: ClassVar[Needs] = {"lambda_": ("use_gae", False)}

    use_gae: bool = True
    """Use generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438); if False,
    advantages are discounted returns minus values."""
    lambda_: Fraction = 0.95
    """Lambda of GAE: 0 uses one-step value estimates, 1 full returns."""
    entropy_coeff: Schedule = 0.0
    """Weight of the entropy bonus: a number, or a schedule as for `lr`."""
    vf_loss_coeff: Schedule = 0.5
    """Weight of the value loss: a number, or a schedule as for `lr`."""
    standardize_advantages: bool = False
    """Standardize the advantages of each minibatch to mean 0 and standard deviation 1. In a
    minibatch of one row, the advantage becomes 0."""
    allow_off_policy: bool = False
    """Allow batches from a replay buffer, although the loss assumes samples of the current
    policy."""

    @check_of_settings
    def _check_exploration(self) -> Self:
        self.exploration_config.check_has_probabilities()
        return self


class OnPolicyPolicy(TorchPolicy):
    """Adds the columns `advantages` and `value_targets` to sampled fragments."""

    config_class = OnPolicyConfig
    is_on_policy = True
    scalar_columns = ("advantages", "value_targets", "action_logp", "vf_preds")
    config: OnPolicyConfig

    @property
    def defers_values(self) -> bool:
        """Whether values can be computed after sampling: the model is a FullyConnectedNetwork
        without shared layers that acts with numpy, and no method for acting is overridden."""
        cls = type(self)
        is_own = all(getattr(cls, name) is getattr(TorchPolicy, name) for name in _ACTING)
        model = self.acting_model
        return (
            is_own
            and not _ACTING & vars(self).keys()
            and uses_numpy(model)
            and not model.shares_layers
        )

    def compute_actions_only(
        self, obs_batch: Any, explore: bool = True
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        return self._act_by_numpy({"obs": obs_batch}, explore)

    def postprocess_fragment(self, fragment: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute advantages and value targets [T, N] from time-major columns [T, N]."""
        if "vf_preds" not in fragment:
            raise no_values_error(self)
        config, values = self.config, fragment["vf_preds"]
        rewards, dones = fragment["rewards"], fragment["dones"]
        next_values = fragment["next_values"]
        if config.use_gae:
            advantages = generalized_advantages(
                rewards, values, next_values, dones, config.gamma, config.lambda_
            )
            return {"advantages": advantages, "value_targets": advantages + values}
        # bootstrap the last step of an episode; next_values is 0 where it terminated
        bootstrapped = np.where(dones, rewards + config.gamma * next_values, rewards)
        targets = discounted_returns(bootstrapped, dones, next_values[-1], config.gamma)
        return {"advantages": targets - values, "value_targets": targets}

    def loss_without_rows(self) -> None:
        if self.config.standardize_advantages:
            self.learner.standardize(torch.empty(0))

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        self._check_off_policy(batch)
        return super().learn_on_batch(batch)

    def learn_on_minibatches(
        self, batch: SampleBatch, num_sgd_iter: int = 1, sgd_minibatch_size: int = 0
    ) -> dict[str, float]:
        self._check_off_policy(batch)
        return super().learn_on_minibatches(batch, num_sgd_iter, sgd_minibatch_size)

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, dict[str, float]]:
        self._check_off_policy(batch)
        return super().compute_gradients(batch)

    def _check_off_policy(self, batch: SampleBatch | None) -> None:
        """Check that a batch was not drawn from a replay buffer, unless `allow_off_policy` is set.
        The batch is None in a process without rows.

        Raises:
            ConfigError: it was.
        """
        is_drawn = batch is not None and "batch_indexes" in batch
        if is_drawn and not self.config.allow_off_policy:
            raise ConfigError(
                f"{type(self).__name__} is an on-policy algorithm, but this batch was drawn from a "
                "replay buffer: set allow_off_policy=True to allow this"
            )


def no_values_error(policy: TorchPolicy) -> ConfigError:
    """Return the error for a policy whose loss needs values that its model does not return."""
    return ConfigError(
        f"{type(policy).__name__} learns from values, but its model returns none: implement its "
        "value_function(), or let a plain module return (outputs, values)"
    )
