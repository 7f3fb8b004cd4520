"""Exploration: how actions are taken from a distribution's inputs while sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from flowrl.policies.config import ExplorationConfig
from flowrl.policies.distributions import Product
from flowrl.policies.schedules import value_at
from flowrl.settings import ConfigError

if TYPE_CHECKING:
    from flowrl.policies.policy import Policy

FORBIDDEN = -1e8  # logits below are of actions that an action mask forbids


class Exploration:
    """Actions and log-probabilities of a policy, explored as the settings say.

    Args:
        config: the settings.
        action_space: of one agent.
        dist_class: the policy's distribution class.
        stretched: whether actions within bounds are in [-1, 1] for the policy.

    An Ornstein-Uhlenbeck drift belongs to a row of a call, and goes on over episodes.

    Raises:
        ConfigError: noise for actions that are not continuous; a share of random actions where they
            are not Discrete or MultiDiscrete.
    """

    def __init__(
        self,
        config: ExplorationConfig,
        action_space: spaces.Space,
        dist_class: Any,
        stretched: bool,
    ):
        self.config = config
        self._space = action_space
        self._dist_class = dist_class
        self._stretched = stretched
        self._bounded = stretched and isinstance(action_space, spaces.Box)
        if isinstance(action_space, spaces.Box):
            finite = np.isfinite(action_space.low).all() and np.isfinite(action_space.high).all()
            self._bounded = self._bounded and bool(finite)
        self._drifts: dict[str, np.ndarray] = {}  # by the number of rows
        self._known_at: tuple[int, int, int] | None = None
        self._share: float | None = None  # of random actions, then
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

    def act_on_values(self, values: np.ndarray, policy: Policy, explore: bool) -> np.ndarray:
        """Numbers [B] of actions by their values [B, n]: the best ones but for a share of random
        ones. Of other kinds of exploration values are the logits.

        Args:
            values: below -1e8 those of actions that are forbidden.
        """
        actions: np.ndarray = values.argmax(1)
        if not explore:
            return actions
        if self._known_at != (policy.timestep, policy.worker_index, policy.num_workers):
            self._known_at = policy.timestep, policy.worker_index, policy.num_workers
            self._share = self._share_of_random(policy)
        if self._share is None:
            return self.act(values, policy, explore)[0]
        chosen = policy.rng.random(len(values)) < self._share
        if chosen.any():
            # the largest of random numbers, one for each action that is allowed
            draws = policy.rng.random(values.shape)
            actions = np.where(chosen, np.where(values < FORBIDDEN, -1, draws).argmax(1), actions)
        return actions

    def _share_of_random(self, policy: Policy) -> float | None:
        """Of the actions, now; None where actions are drawn from a distribution."""
        kind = self.config.type
        if kind == "Random" or policy.timestep < self.config.random_timesteps:
            return 1.0
        greedy = kind in ("EpsilonGreedy", "PerWorkerEpsilonGreedy")
        return self.epsilon(policy) if greedy else None

    def get_state(self) -> dict[str, np.ndarray]:
        """The drifts."""
        return {rows: drift.copy() for rows, drift in self._drifts.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Take over what `get_state` gave."""
        self._drifts = {rows: np.array(drift) for rows, drift in state.items()}

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
        return self._uniform(self._space, self._dist_class, inputs, rng)

    def _uniform(
        self, space: Any, dist_class: Any, inputs: np.ndarray, rng: np.random.Generator
    ) -> tuple[Any, Any]:
        if issubclass(dist_class, Product):
            return dist_class.act_apart(
                inputs, lambda part, own: self._uniform(part.space, part, own, rng)
            )
        if not isinstance(space, spaces.Box):
            level = np.where(inputs < FORBIDDEN, inputs, np.float32(0))
            return dist_class.act(level, rng, True)
        shape, count = (len(inputs), *space.shape), len(inputs)
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            actions = rng.standard_normal(shape)
            logp = -0.5 * (actions**2 + np.log(2 * np.pi)).reshape(count, -1).sum(1)
            return actions.astype(np.float32), logp.astype(np.float32)
        low: Any = -1.0 if self._stretched else space.low
        high: Any = 1.0 if self._stretched else space.high
        volume = np.broadcast_to(np.subtract(high, low), space.shape)
        logp = np.full(count, -np.log(volume.astype(np.float64)).sum(), np.float32)
        return rng.uniform(low, high, shape).astype(np.float32), logp

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
            drift = self._drifts.get(str(len(actions)), np.zeros(actions.shape))
            noise = drift + noise - self.config.ou_theta * drift
            self._drifts[str(len(actions))] = noise
        noisy = actions + noise
        if self._bounded:
            noisy = noisy.clip(-1, 1)
        return noisy.astype(np.float32)
