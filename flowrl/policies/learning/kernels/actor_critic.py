"""Kernels of the losses of SAC and TD3, for Box actions."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.policies.learning.kernels.backprop import Backprop
from flowrl.policies.learning.kernels.q_learning import discounts_numpy
from flowrl.policies.models.fcnet import flatten_numpy, uses_numpy
from flowrl.policies.models.tensor_batch import TensorBatch


class ActorCriticKernel:
    """Computes the critics' and the actor's losses and their gradients.

    See ActorCriticPolicy.loss. A subclass writes `_next_values` and `_actor_loss`.

    Args:
        policy: an actor-critic policy with Box actions whose networks numpy computes.
    """

    def __init__(self, policy: Any):
        self._policy = policy
        self._actor = Backprop(policy.model.actor)
        self._critics = [Backprop(critic) for critic in policy.model.critics]

    def __call__(self, batch: TensorBatch) -> float:
        policy = self._policy
        policy.flat.gradient.zero_()
        targets = self._td_targets(batch)
        obs = flatten_numpy(policy.observation_space, batch.array("obs"))
        inputs = _critic_inputs(obs, batch.array("actions"))
        errors = np.stack([critic.outputs(inputs)[:, 0] for critic in self._critics])
        policy.stats["mean_q"] = float(errors.mean())
        errors -= targets
        policy.record_row_stats(batch, td_error=abs(errors).mean(0))
        policy.stats["mean_td_error"] = float(errors.mean())
        share: Any = np.float32(1.0 / len(targets))
        if "weights" in batch:
            share = share * batch.array("weights").astype(np.float32, copy=False)
        gradients = errors * share
        for critic, gradient in zip(self._critics, gradients, strict=True):
            critic.backward(gradient[:, None])
        loss = 0.5 * float((errors * gradients).sum())
        policy.stats["critic_loss"] = loss
        return loss + self._actor_loss(obs) if policy.updates_actor() else loss

    def _td_targets(self, batch: TensorBatch) -> np.ndarray:
        """Return `ActorCriticPolicy.td_targets`."""
        rewards, next_values = batch.array("rewards"), self._next_values(batch.array("new_obs"))
        discounts = discounts_numpy(batch, self._policy.config.gamma)
        discounted = np.where(discounts > 0, discounts * next_values, 0.0)
        targets: np.ndarray = (rewards + discounted).astype(np.float32)
        return targets

    def _next_values(self, new_obs: Any) -> np.ndarray:
        """Return the policy's `next_values` of arrays [B, …]."""
        raise NotImplementedError

    def _actor_loss(self, obs: np.ndarray) -> float:
        """Return the actor's loss at flat observations [B, size], and write its gradient."""
        raise NotImplementedError

    def _q_and_gradient(
        self, obs: np.ndarray, actions: np.ndarray, num_critics: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the minimum Q-value [B] over the first `num_critics` critics (None: all), and its
        gradient with respect to the actions [B, d], which is valid until the next call."""
        critics, inputs = self._critics[:num_critics], _critic_inputs(obs, actions)
        size = obs.shape[1]
        if len(critics) == 1:
            q = critics[0].outputs(inputs)[:, 0]
            ones = np.ones((len(inputs), 1), np.float32)
            return q, critics[0].input_gradient(ones, slice(None))[:, size:]
        values = np.stack([critic.outputs(inputs)[:, 0] for critic in critics])
        least = values.argmin(0)
        gradients = np.empty_like(actions)
        for number, critic in enumerate(critics):
            rows = np.flatnonzero(least == number)
            ones = np.ones((len(rows), 1), np.float32)
            gradients[rows] = critic.input_gradient(ones, rows)[:, size:]
        return values.min(0), gradients


class SACKernel(ActorCriticKernel):
    """Adds the losses of SAC's actor and temperature; see SACTorchPolicy.actor_loss."""

    def _next_values(self, new_obs: Any) -> np.ndarray:
        policy = self._policy
        outputs = policy.model.outputs_numpy(new_obs)
        actions, logp = policy.dist_class.act(outputs, policy.learner.row_rng, True)
        values: np.ndarray = policy.target_model.q_values_numpy(new_obs, actions).min(0)
        return values - policy.alpha * logp

    def _actor_loss(self, obs: np.ndarray) -> float:
        policy = self._policy
        alpha = policy.alpha
        outputs = self._actor.outputs(obs)
        size = outputs.shape[1] // 2
        noise = policy.learner.row_rng.standard_normal((len(obs), size), dtype=np.float32)
        dist: Any = policy.dist_class
        raw, spread, logp = dist.from_noise(outputs, noise)
        actions = np.tanh(raw)
        q, q_gradients = self._q_and_gradient(obs, actions)
        loss, entropy = float((alpha * logp - q).mean()), -float(logp.mean())
        policy.stats |= {"actor_loss": loss, "entropy": entropy, "alpha": alpha}
        # d log pi / d raw = 2 tanh(raw); d log pi / d log_std has a further -1
        d_raw = 2 * alpha * actions - q_gradients * (1 - actions * actions)
        d_log_std = (d_raw * spread - alpha) * dist.is_log_std_in_bounds(outputs[:, size:])
        d_outputs = np.concatenate([d_raw, d_log_std], 1)
        d_outputs *= np.float32(1.0 / len(obs))
        self._actor.backward(d_outputs)
        if policy.target_entropy is None:
            return loss
        excess = entropy - policy.target_entropy
        log_alpha = policy.model.log_alpha
        log_alpha.grad.fill_(excess)
        return loss + float(log_alpha.detach()) * excess


class TD3Kernel(ActorCriticKernel):
    """Adds the loss of TD3's actor; see TD3TorchPolicy.actor_loss."""

    def _next_values(self, new_obs: Any) -> np.ndarray:
        policy, config = self._policy, self._policy.config
        actions = np.tanh(policy.target_model.outputs_numpy(new_obs))
        if config.target_noise:
            drawn = policy.learner.row_rng.standard_normal(actions.shape, dtype=np.float32)
            limit = config.target_noise_clip
            noise = (drawn * np.float32(config.target_noise)).clip(-limit, limit)
            actions = (actions + noise).clip(-1.0, 1.0)
        values: np.ndarray = policy.target_model.q_values_numpy(new_obs, actions).min(0)
        return values

    def _actor_loss(self, obs: np.ndarray) -> float:
        actions = np.tanh(self._actor.outputs(obs))
        q, q_gradients = self._q_and_gradient(obs, actions, num_critics=1)
        loss = -float(q.mean())
        self._policy.stats["actor_loss"] = loss
        d_outputs = q_gradients * (actions * actions - 1)
        d_outputs *= np.float32(1.0 / len(obs))
        self._actor.backward(d_outputs)
        return loss


def sac_kernel(policy: Any) -> SACKernel | None:
    """Return the kernel of a SAC policy; None if numpy does not compute its networks."""
    return SACKernel(policy) if _is_supported(policy) else None


def td3_kernel(policy: Any) -> TD3Kernel | None:
    """Return the kernel of a TD3 policy; None if numpy does not compute its networks."""
    return TD3Kernel(policy) if _is_supported(policy) else None


def _is_supported(policy: Any) -> bool:
    networks = [policy.model.actor, *policy.model.critics]
    return isinstance(policy.action_space, spaces.Box) and all(map(uses_numpy, networks))


def _critic_inputs(obs: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Concatenate observations and actions to [B, size]."""
    inputs: np.ndarray = np.concatenate([obs, actions.reshape(len(obs), -1)], 1, dtype=np.float32)
    return inputs
