"""Kernels of the losses of SAC and TD3, for Box actions."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.policies.learning.kernels.backprop import Backprop
from flowrl.policies.learning.kernels.q_learning import discounts_numpy
from flowrl.policies.models.actor_critic import ActorCritic
from flowrl.policies.models.fcnet import uses_numpy
from flowrl.policies.models.flatten import flatten_numpy
from flowrl.policies.models.tensor_batch import TensorBatch
from flowrl.threads import BackgroundCall

MIN_BACKGROUND_SIZE = 2**23
"""Rows times weights of the critics. Switching threads costs more than it gains below this size."""


class ActorCriticKernel:
    """Computes the critics' and the actor's losses and their gradients.

    See ActorCriticPolicy.loss. A subclass writes `_next_actions` and `_actor_loss`. The losses of
    the actor and of each critic share no activations, so two threads compute them where a core is
    free (see BackgroundCall).

    Args:
        policy: an actor-critic policy with Box actions whose networks numpy computes.
    """

    def __init__(self, policy: Any):
        self._policy = policy
        self._actor = Backprop(policy.model.actor)
        self._critics = [Backprop(critic) for critic in policy.model.critics]
        self._critics_of_actor = [Backprop(critic) for critic in policy.model.critics]
        self._num_critic_weights = sum(w.numel() for w in policy.model.critics.parameters())

    @property
    def networks(self) -> list[Any]:
        """See Kernel."""
        model = self._policy.model
        return [model.actor, *model.critic_list]

    def __call__(self, batch: TensorBatch) -> float:
        policy = self._policy
        policy.flat.gradient.zero_()
        obs = flatten_numpy(policy.observation_space, batch.array("obs"))
        is_large = len(obs) * self._num_critic_weights >= MIN_BACKGROUND_SIZE
        # the random numbers of both losses are drawn here, always in the same order
        next_actions = self._next_actions(batch.array("new_obs"))
        if not policy.updates_actor():
            return self._critic_loss(batch, obs, next_actions, is_large)
        call = partial(self._actor_loss, obs, self._noise(len(obs)))
        with BackgroundCall(call, is_large) as actor_call:
            critic_loss = self._critic_loss(batch, obs, next_actions, is_large)
            actor_loss, stats = actor_call.result()
        policy.stats |= stats
        return critic_loss + actor_loss

    def _td_targets(self, batch: TensorBatch, next_actions: tuple[np.ndarray, Any]) -> np.ndarray:
        """Return `ActorCriticPolicy.td_targets` [B]; see `_next_actions`."""
        target_model = self._policy.target_model
        actions, next_bonus = next_actions
        next_q = target_model.q_values_numpy(batch.array("new_obs"), actions).min(0)
        discounts = discounts_numpy(batch, self._policy.config.gamma)
        discounted = np.where(discounts > 0, discounts * (next_q + next_bonus), 0.0)
        targets: np.ndarray = (batch.array("rewards") + discounted).astype(np.float32)
        return targets

    def _critic_loss(
        self,
        batch: TensorBatch,
        obs: np.ndarray,
        next_actions: tuple[np.ndarray, Any],
        is_large: bool,
    ) -> float:
        """Return the sum of the critics' losses, and write their gradients.

        Args:
            batch: the rows.
            obs: their flat observations, [B, size].
            next_actions: from `_next_actions`.
            is_large: whether another thread may compute some of the critics.
        """
        policy, targets = self._policy, self._td_targets(batch, next_actions)
        inputs = _critic_inputs(obs, batch.array("actions"))
        share: Any = np.float32(1.0 / len(targets))
        if "weights" in batch:
            share = share * batch.array("weights").astype(np.float32, copy=False)
        first, *others = [
            partial(_values_and_backward, critic, inputs, targets, share)
            for critic in self._critics
        ]
        with ExitStack() as stack:
            calls = [stack.enter_context(BackgroundCall(call, is_large)) for call in others]
            values = np.stack([first(), *(call.result() for call in calls)])
        policy.stats["mean_q"] = float(values.mean())
        errors = values - targets
        policy.record_row_stats(batch, td_error=abs(errors).mean(0))
        policy.stats["mean_td_error"] = float(errors.mean())
        loss = 0.5 * float((errors * (errors * share)).sum())
        policy.stats["critic_loss"] = loss
        return loss

    def _next_actions(self, new_obs: Any) -> tuple[np.ndarray, Any]:
        """Return actions [B, …] for next observations, and what the policy's `next_values` add to
        their Q-values: [B], or a number."""
        raise NotImplementedError

    def _noise(self, rows: int) -> Any:
        """Draw the noise of `_actor_loss`, [rows, d]; None if it needs none."""
        return None

    def _actor_loss(self, obs: np.ndarray, noise: Any) -> tuple[float, dict[str, float]]:
        """Return the actor's loss and its statistics, and write its gradient.

        Args:
            obs: flat observations [B, size].
            noise: from `_noise`.
        """
        raise NotImplementedError

    def _q_and_gradient(
        self, obs: np.ndarray, actions: np.ndarray, num_critics: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the minimum Q-value [B] over the first `num_critics` critics (None: all), and its
        gradient with respect to the actions [B, d], which is valid until the next call."""
        critics, inputs = self._critics_of_actor[:num_critics], _critic_inputs(obs, actions)
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

    def _next_actions(self, new_obs: Any) -> tuple[np.ndarray, Any]:
        policy = self._policy
        outputs = policy.model.outputs_numpy(new_obs)
        actions, logp = policy.dist_class.act(outputs, policy.learner.row_rng, True)
        return actions, -policy.alpha * logp

    def _noise(self, rows: int) -> Any:
        shape = rows, self._policy.model.num_outputs // 2
        return self._policy.learner.draw_noise(shape)

    def _actor_loss(self, obs: np.ndarray, noise: Any) -> tuple[float, dict[str, float]]:
        policy = self._policy
        alpha = policy.alpha
        outputs = self._actor.outputs(obs)
        size = noise.shape[1]
        dist: Any = policy.dist_class
        raw, spread, logp = dist.from_noise(outputs, noise)
        actions = np.tanh(raw)
        q, q_gradients = self._q_and_gradient(obs, actions)
        loss, entropy = float((alpha * logp - q).mean()), -float(logp.mean())
        stats = {"actor_loss": loss, "entropy": entropy, "alpha": alpha}
        # d log pi / d raw = 2 tanh(raw); d log pi / d log_std has a further -1
        d_raw = 2 * alpha * actions - q_gradients * (1 - actions * actions)
        d_log_std = (d_raw * spread - alpha) * dist.is_log_std_in_bounds(outputs[:, size:])
        d_outputs = np.concatenate([d_raw, d_log_std], 1)
        d_outputs *= np.float32(1.0 / len(obs))
        self._actor.backward(d_outputs)
        if policy.target_entropy is None:
            return loss, stats
        excess = entropy - policy.target_entropy
        log_alpha = policy.model.log_alpha
        log_alpha.grad.fill_(excess)
        return loss + float(log_alpha.detach()) * excess, stats


class TD3Kernel(ActorCriticKernel):
    """Adds the loss of TD3's actor; see TD3TorchPolicy.actor_loss."""

    def _next_actions(self, new_obs: Any) -> tuple[np.ndarray, Any]:
        policy, config = self._policy, self._policy.config
        actions = np.tanh(policy.target_model.outputs_numpy(new_obs))
        if config.target_noise:
            drawn = policy.learner.draw_noise(actions.shape)
            limit = config.target_noise_clip
            noise = (drawn * np.float32(config.target_noise)).clip(-limit, limit)
            actions = (actions + noise).clip(-1.0, 1.0)
        return actions, 0.0

    def _actor_loss(self, obs: np.ndarray, noise: Any) -> tuple[float, dict[str, float]]:
        actions = np.tanh(self._actor.outputs(obs))
        q, q_gradients = self._q_and_gradient(obs, actions, num_critics=1)
        loss = -float(q.mean())
        d_outputs = q_gradients * (actions * actions - 1)
        d_outputs *= np.float32(1.0 / len(obs))
        self._actor.backward(d_outputs)
        return loss, {"actor_loss": loss}


def sac_kernel(policy: Any) -> SACKernel | None:
    """Return the kernel of a SAC policy; None if numpy does not compute its networks."""
    return SACKernel(policy) if _is_supported(policy) else None


def td3_kernel(policy: Any) -> TD3Kernel | None:
    """Return the kernel of a TD3 policy; None if numpy does not compute its networks."""
    return TD3Kernel(policy) if _is_supported(policy) else None


def _is_supported(policy: Any) -> bool:
    networks = [policy.model.actor, *policy.model.critics]
    is_own = type(policy.model) is ActorCritic  # then the target network is one, too
    return isinstance(policy.action_space, spaces.Box) and is_own and all(map(uses_numpy, networks))


def _values_and_backward(
    critic: Backprop, inputs: np.ndarray, targets: np.ndarray, share: Any
) -> np.ndarray:
    """Return a critic's values [B], and write the gradient of its loss.

    Args:
        critic: the network.
        inputs: observations and actions, [B, size].
        targets: [B].
        share: weight of each row in the loss: [B], or a number.
    """
    values = critic.outputs(inputs)[:, 0]
    critic.backward(((values - targets) * share)[:, None])
    return values


def _critic_inputs(obs: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Concatenate observations and actions to [B, size]."""
    inputs: np.ndarray = np.concatenate([obs, actions.reshape(len(obs), -1)], 1, dtype=np.float32)
    return inputs
