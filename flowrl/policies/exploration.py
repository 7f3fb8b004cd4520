"""Exploration: how actions are taken from a distribution's inputs while sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from flowrl.policies.config import ConfigError, ExplorationConfig
from flowrl.policies.schedules import value_at

if TYPE_CHECKING:
    from flowrl.policies.policy import Policy

_FORBIDDEN = -1e8  # logits below are of actions that an action mask forbids


class Exploration:
    """Actions and log-probabilities of a policy, explored as the settings say.

    Args:
        config: the settings.
        action_space: of one agent.
        dist_class: the policy's distribution class.
        bounded: whether continuous actions are in [-1, 1] for the policy.

    Raises:
        ConfigError: noise for actions that are not continuous; a share of random actions for a
            policy over a nested action space.
    """

    def __init__(
        self, config: ExplorationConfig, action_space: spaces.Space, dist_class: Any, bounded: bool
    ):
        self.config = config
        self._space = action_space
        self._dist_class = dist_class
        self._bounded = bounded
        self._drift = np.zeros(0)
        # what most policies do, found out once
        self._draws = config.type == "StochasticSampling" and not config.random_timesteps
        continuous = isinstance(action_space, spaces.Box)
        if config.type in ("GaussianNoise", "OrnsteinUhlenbeckNoise") and not continuous:
            raise ConfigError(
                f"exploration_config: {config.type} is for Box actions, not {action_space}"
            )
        greedy = config.type in ("EpsilonGreedy", "PerWorkerEpsilonGreedy")
        if greedy and not isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete)):
            raise ConfigError(
                f"exploration_config: {config.type} is for Discrete and MultiDiscrete actions, not "
                f"{action_space}"
            )

    def act(self, inputs: np.ndarray, policy: Policy, explore: bool) -> tuple[Any, Any]:
        """Actions [B, …] and log-probabilities [B].

        The latter are of what was drawn: exact for StochasticSampling, Random and shares of random
        actions; those of the best action where noise is added to it.

        Args:
            inputs: of the distribution, [B, k].
            policy: whose random stream is drawn from, and which says the env steps sampled so far
                and the worker.
            explore: False takes the best action.
        """
        if self._draws or not explore:
            return self._dist_class.act(inputs, policy.rng, explore)
        kind, rng, timestep = self.config.type, policy.rng, policy.timestep
        if kind == "Random" or timestep < self.config.random_timesteps:
            return self._random(inputs, rng)
        if kind == "StochasticSampling":
            return self._dist_class.act(inputs, rng, True)
        actions, logp = self._dist_class.act(inputs, rng, False)
        if kind in ("EpsilonGreedy", "PerWorkerEpsilonGreedy"):
            return self._mostly(actions, inputs, rng, self.epsilon(policy))
        return self._noisy(actions, rng, value_at(self.config.scale, timestep)), logp

    def epsilon(self, policy: Policy) -> float:
        """The share of random actions."""
        config = self.config
        if config.type == "EpsilonGreedy":
            return min(1.0, value_at(config.epsilon, policy.timestep))
        if policy.num_workers and not policy.worker_index:
            return 0.0  # the local worker of others that sample
        first, others = max(policy.worker_index - 1, 0), max(policy.num_workers - 1, 1)
        return float(config.epsilon_base ** (1 + first / others * config.epsilon_exponent))

    def _random(self, inputs: np.ndarray, rng: np.random.Generator) -> tuple[Any, Any]:
        """Uniform actions, of those that are allowed."""
        space = self._space
        if not isinstance(space, spaces.Box):
            level = np.where(inputs < _FORBIDDEN, inputs, np.float32(0))
            return self._dist_class.act(level, rng, True)
        shape = (len(inputs), *space.shape)
        if self._bounded:
            actions, volume = rng.uniform(-1, 1, shape), np.full(space.shape, 2.0)
        elif np.isfinite(space.low).all() and np.isfinite(space.high).all():
            actions, volume = rng.uniform(space.low, space.high, shape), space.high - space.low
        else:
            actions = rng.standard_normal(shape)
            logp = -0.5 * (actions**2 + np.log(2 * np.pi)).reshape(len(inputs), -1).sum(1)
            return actions.astype(np.float32), logp.astype(np.float32)
        logp = np.full(len(inputs), -np.log(volume).sum(), np.float32)
        return actions.astype(np.float32), logp

    def _mostly(
        self, best: np.ndarray, inputs: np.ndarray, rng: np.random.Generator, epsilon: float
    ) -> tuple[np.ndarray, np.ndarray]:
        random, random_logp = self._random(inputs, rng)
        chosen = rng.random(len(best)) < epsilon
        chosen = chosen.reshape(-1, *([1] * (best.ndim - 1)))
        actions = np.where(chosen, random, best)
        is_best = (actions == best).reshape(len(best), -1).all(1)
        chance = epsilon * np.exp(random_logp) + (1 - epsilon) * is_best
        return actions, np.log(np.maximum(chance, 1e-30)).astype(np.float32)

    def _noisy(self, actions: np.ndarray, rng: np.random.Generator, scale: float) -> np.ndarray:
        noise = rng.standard_normal(actions.shape) * scale
        if self.config.type == "OrnsteinUhlenbeckNoise":
            if self._drift.shape != actions.shape:
                self._drift = np.zeros(actions.shape)
            self._drift += noise - self.config.ou_theta * self._drift
            noise = self._drift
        noisy = actions + noise
        if self._bounded:
            noisy = noisy.clip(-1, 1)
        return noisy.astype(np.float32)
