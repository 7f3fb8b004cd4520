"""Kernels of the losses of PPO and A2C, for Discrete and Box actions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from flowrl.policies.distributions import Categorical, DiagGaussian
from flowrl.policies.distributions.continuous import check_action_size
from flowrl.policies.learning.kernels.backprop import Backprop
from flowrl.policies.learning.kernels.q_learning import action_indexes
from flowrl.policies.models.fcnet import uses_numpy
from flowrl.policies.models.tensor_batch import TensorBatch

_LOG_2PI = np.float32(np.log(2 * np.pi))


class CategoricalRows:
    """Categorical distributions of the rows of a batch, and gradients with respect to the logits.

    Args:
        inputs: logits [B, n].
    """

    def __init__(self, inputs: np.ndarray):
        shifted = inputs - inputs.max(1, keepdims=True)
        self._log_probs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        self._probs = np.exp(self._log_probs)

    def logp(self, actions: np.ndarray) -> np.ndarray:
        """Return the log-probabilities [B] of actions [B].

        Raises:
            IndexError: an action is not in [0, n).
        """
        self._chosen = np.arange(len(actions)), action_indexes(actions, self._probs.shape[1])
        return self._log_probs[self._chosen]

    def entropy(self) -> np.ndarray:
        """Return the entropies [B]."""
        self._entropy = -(self._probs * self._log_probs).sum(1)
        return self._entropy

    def kl_from(self, old: CategoricalRows) -> np.ndarray:
        """Return the KL divergences [B] of these distributions from old ones."""
        kl: np.ndarray = (old._probs * (old._log_probs - self._log_probs)).sum(1)
        return kl

    def logp_gradient(self, share: np.ndarray) -> np.ndarray:
        """Return the gradient [B, n] of sum(share * logp), for shares [B] and the last actions."""
        gradient = self._probs * -share[:, None]
        gradient[self._chosen] += share
        return gradient

    def entropy_gradient(self) -> np.ndarray:
        """Return the gradient [B, n] of the sum of the entropies."""
        return -self._probs * (self._log_probs + self._entropy[:, None])

    def kl_gradient(self, old: CategoricalRows) -> np.ndarray:
        """Return the gradient [B, n] of the sum of `kl_from(old)`."""
        return self._probs - old._probs


class GaussianRows:
    """Independent normal distributions of the rows of a batch; see CategoricalRows.

    Args:
        inputs: means and log standard deviations [B, 2 d].
    """

    def __init__(self, inputs: np.ndarray):
        size = inputs.shape[1] // 2
        self._mean, self._log_std = inputs[:, :size], inputs[:, size:]
        self._inverse_std = np.exp(-self._log_std)

    def logp(self, actions: np.ndarray) -> np.ndarray:
        """Return the log-densities [B] of actions [B, …].

        Raises:
            ValueError: the actions have another number of dimensions than the distributions.
        """
        flat = actions.reshape(len(actions), -1).astype(np.float32, copy=False)
        check_action_size(flat.shape[1], self._mean.shape[1])
        self._scaled = (flat - self._mean) * self._inverse_std
        squares = self._scaled * self._scaled + _LOG_2PI
        logp: np.ndarray = (np.float32(-0.5) * squares - self._log_std).sum(1)
        return logp

    def entropy(self) -> np.ndarray:
        """Return the entropies [B]."""
        entropy: np.ndarray = (self._log_std + np.float32(0.5) * (1 + _LOG_2PI)).sum(1)
        return entropy

    def kl_from(self, old: GaussianRows) -> np.ndarray:
        """Return the KL divergences [B] of these distributions from old ones."""
        ratio = self._variance_ratio(old)
        kl: np.ndarray = (self._log_std - old._log_std + np.float32(0.5) * (ratio - 1)).sum(1)
        return kl

    def _variance_ratio(self, old: GaussianRows) -> np.ndarray:
        difference = old._mean - self._mean
        variance = np.exp(2 * old._log_std) + difference * difference
        ratio: np.ndarray = variance * self._inverse_std * self._inverse_std
        return ratio

    def logp_gradient(self, share: np.ndarray) -> np.ndarray:
        """Return the gradient [B, 2 d] of sum(share * logp), for shares [B] and the last
        actions."""
        scaled = self._scaled
        gradients = scaled * self._inverse_std, scaled * scaled - 1
        return np.concatenate(gradients, 1) * share[:, None]

    def entropy_gradient(self) -> np.ndarray:
        """Return the gradient [B, 2 d] of the sum of the entropies."""
        return np.concatenate([np.zeros_like(self._mean), np.ones_like(self._mean)], 1)

    def kl_gradient(self, old: GaussianRows) -> np.ndarray:
        """Return the gradient [B, 2 d] of the sum of `kl_from(old)`."""
        of_means = (self._mean - old._mean) * self._inverse_std * self._inverse_std
        return np.concatenate([of_means, 1 - self._variance_ratio(old)], 1)


class PolicyGradientKernel:
    """Computes a policy gradient loss and its gradient. A subclass writes `losses`.

    Args:
        policy: an on-policy policy whose network numpy computes.
        rows_class: distributions of its actions.
    """

    def __init__(self, policy: Any, rows_class: Any):
        self._policy = policy
        self.networks = [policy.model]
        self._rows_class = rows_class
        self._backprop = Backprop(policy.model)
        self._log_std = policy.model.log_std

    def __call__(self, batch: TensorBatch) -> float:
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the results
            return self._compute(batch)

    def _compute(self, batch: TensorBatch) -> float:
        self._policy.flat.gradient.zero_()  # also of parameters that are not layers
        outputs, values = self._backprop.forward(batch.array("obs"))
        size = outputs.shape[1]
        if self._log_std is not None:
            log_std = np.broadcast_to(self._log_std.detach().numpy(), outputs.shape)
            outputs = np.concatenate([outputs, log_std], 1)
        loss, d_outputs, d_values = self.losses(batch, self._rows_class(outputs), values)
        if self._log_std is not None:
            d_outputs[:, size:].sum(0, out=self._log_std.grad.numpy())
            d_outputs = np.ascontiguousarray(d_outputs[:, :size])
        self._backprop.backward(d_outputs, d_values)
        return loss

    def losses(
        self, batch: TensorBatch, dist: Any, values: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the loss, and its gradients with respect to the distributions' inputs [B, n] and
        to the values [B]."""
        raise NotImplementedError

    def _advantages(self, batch: TensorBatch) -> np.ndarray:
        advantages = float32(batch, "advantages")
        if not self._policy.config.standardize_advantages:
            return advantages
        if (learner := self._policy.learner).process_group is None:
            return standardized(advantages)
        over_group: np.ndarray = learner.standardize(torch.from_numpy(advantages)).numpy()
        return over_group


class PPOKernel(PolicyGradientKernel):
    """Computes PPO's loss; see PPOTorchPolicy.loss."""

    def losses(
        self, batch: TensorBatch, dist: Any, values: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        policy, count = self._policy, np.float32(len(values))
        clip = np.float32(policy.scheduled(policy.config.clip_param))
        advantages = self._advantages(batch)
        ratio = np.exp(dist.logp(batch.array("actions")) - float32(batch, "action_logp"))
        surrogate = advantages * ratio
        clipped = advantages * np.minimum(np.maximum(ratio, 1 - clip), 1 + clip)
        policy_loss = -mean(np.minimum(surrogate, clipped))
        # the gradient of clipped ratios is 0; of ratios in the bounds, both are equal
        d_outputs = dist.logp_gradient(np.where(surrogate <= clipped, surrogate, 0) / -count)

        vf_loss, d_values = self._value_loss(batch, values)
        vf_loss_coeff = policy.scheduled(policy.config.vf_loss_coeff)
        loss = policy_loss + vf_loss_coeff * vf_loss
        entropy_coeff = policy.scheduled(policy.config.entropy_coeff)
        if entropy_coeff:
            policy.stats["entropy"] = entropy = mean(dist.entropy())
            loss -= entropy_coeff * entropy
            d_outputs -= np.float32(entropy_coeff / count) * dist.entropy_gradient()
        if policy.kl_coeff:
            old = self._rows_class(float32(batch, "action_dist_inputs"))
            policy.stats["kl"] = kl = mean(dist.kl_from(old))
            loss += policy.kl_coeff * kl
            d_outputs += np.float32(policy.kl_coeff / count) * dist.kl_gradient(old)
        policy.stats |= {"policy_loss": policy_loss, "vf_loss": vf_loss}
        return loss, d_outputs, d_values * np.float32(vf_loss_coeff)

    def _value_loss(self, batch: TensorBatch, values: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss, and its gradient [B]."""
        targets, limit = float32(batch, "value_targets"), self._policy.config.vf_clip_param
        if limit is None:
            return squared_errors(values, targets)
        old = float32(batch, "vf_preds")
        change = values - old
        errors, clipped = values - targets, old + change.clip(-limit, limit) - targets
        squares, of_clipped = errors * errors, clipped * clipped
        is_inside = np.abs(change) <= limit
        slope = np.where(squares >= of_clipped, errors, np.where(is_inside, clipped, 0))
        return mean(np.maximum(squares, of_clipped)), slope * np.float32(2 / len(values))


class A2CKernel(PolicyGradientKernel):
    """Computes A2C's loss; see A2CTorchPolicy.loss."""

    def losses(
        self, batch: TensorBatch, dist: Any, values: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        policy, count = self._policy, np.float32(len(values))
        advantages = self._advantages(batch)
        policy_loss = -mean(dist.logp(batch.array("actions")) * advantages)
        vf_loss, d_values = squared_errors(values, float32(batch, "value_targets"))
        entropy = mean(dist.entropy())
        policy.stats |= {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
        vf_loss_coeff = policy.scheduled(policy.config.vf_loss_coeff)
        entropy_coeff = policy.scheduled(policy.config.entropy_coeff)
        d_outputs = dist.logp_gradient(advantages / -count)
        if entropy_coeff:
            d_outputs -= np.float32(entropy_coeff / count) * dist.entropy_gradient()
        loss = policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy
        return loss, d_outputs, d_values * np.float32(vf_loss_coeff)


def mean(values: np.ndarray) -> float:
    """Return the mean of values [B]; faster than `values.mean()`."""
    return float(np.add.reduce(values)) / len(values)


def standardized(values: np.ndarray) -> np.ndarray:
    """Scale values [B] to mean 0 and standard deviation 1; see TorchLearner.standardize."""
    # in float64: rounding errors of constant values would be scaled to 1
    centered = values - np.add.reduce(values, dtype=np.float64) / len(values)
    if len(values) < 2:
        return np.zeros(len(values), np.float32)
    std = math.sqrt(float(centered @ centered) / (len(values) - 1))
    scaled: np.ndarray = (centered / (std + 1e-8)).astype(np.float32)
    return scaled


def float32(batch: TensorBatch, name: str) -> np.ndarray:
    """Return a column as float32."""
    column: np.ndarray = batch.array(name).astype(np.float32, copy=False)
    return column


def squared_errors(values: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean squared error of values [B], and its gradient [B]."""
    errors = values - targets
    return mean(errors * errors), errors * np.float32(2 / len(values))


def ppo_kernel(policy: Any) -> PPOKernel | None:
    """Return the kernel of a PPO policy; None if it does not support its network or actions."""
    rows_class = _rows_class(policy)
    return None if rows_class is None else PPOKernel(policy, rows_class)


def a2c_kernel(policy: Any) -> A2CKernel | None:
    """Return the kernel of an A2C policy; None if it does not support its network or actions."""
    rows_class = _rows_class(policy)
    return None if rows_class is None else A2CKernel(policy, rows_class)


def _rows_class(policy: Any) -> type[CategoricalRows | GaussianRows] | None:
    """Return the class of the distributions; None if numpy does not compute the network, or the
    distribution is another one."""
    if not uses_numpy(policy.model):
        return None
    for base, rows_class in ((Categorical, CategoricalRows), (DiagGaussian, GaussianRows)):
        methods = ("__init__", "logp", "entropy", "kl")
        if all(getattr(policy.dist_class, m) is getattr(base, m) for m in methods):
            return rows_class
    return None
