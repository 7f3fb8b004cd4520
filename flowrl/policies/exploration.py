"""Exploration: choose actions from distribution inputs while sampling."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from flowrl.errors import ConfigError
from flowrl.policies.action_scaling import is_bounded
from flowrl.policies.config import ExplorationConfig
from flowrl.policies.distributions import Product
from flowrl.policies.schedules import value_at

MASKED_BELOW = -1e8  # outputs below this value belong to masked actions
MASKED_OUTPUT = 10 * MASKED_BELOW  # output of a masked action: exp is 0, differences are finite


class ExploringPolicy(Protocol):
    """The part of a policy that exploration reads."""

    rng: np.random.Generator
    timestep: int
    total_timesteps: int | None
    worker_index: int
    num_workers: int


class Exploration:
    """Choose actions according to an ExplorationConfig.

    Ornstein-Uhlenbeck noise has one process per row of a batch, separately for each batch size;
    it continues across episodes.

    Args:
        config: the settings.
        action_space: action space of one agent.
        dist_class: the policy's distribution class.
        normalize_actions: the policy's actions in [-1, 1] are scaled to the bounds of the space.

    Raises:
        ConfigError: noise for actions that are not continuous, or epsilon-greedy exploration for
            actions that are not Discrete or MultiDiscrete.
    """

    def __init__(
        self,
        config: ExplorationConfig,
        action_space: spaces.Space,
        dist_class: Any,
        normalize_actions: bool,
    ):
        self.config = config
        self._space = action_space
        self._dist_class = dist_class
        self._normalize_actions = normalize_actions
        self._bounds: tuple[Any, Any] | None = None  # lower and upper bounds of actions with noise
        if isinstance(action_space, spaces.Box) and is_bounded(action_space):
            bounds = action_space.low, action_space.high
            self._bounds = (-1.0, 1.0) if normalize_actions else bounds
        self._ou_noise: dict[str, np.ndarray] = {}  # by the number of rows
        # fraction of random actions, and the policy's counters that it is for
        self._random_fraction: float | None = None
        self._random_fraction_at: tuple[int | None, ...] | None = None
        self._has_own_epsilon = type(self).epsilon is not Exploration.epsilon
        self._samples_only = config.type == "StochasticSampling" and not config.random_timesteps
        self._is_greedy = config.type in ("EpsilonGreedy", "PerWorkerEpsilonGreedy")
        continuous = isinstance(action_space, spaces.Box)
        if config.type in ("GaussianNoise", "OrnsteinUhlenbeckNoise") and not continuous:
            raise ConfigError(
                f"exploration_config: {config.type} is for Box actions, not {action_space}"
            )
        discrete = isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete))
        if self._is_greedy and not discrete:
            raise ConfigError(
                f"exploration_config: {config.type} is for Discrete and MultiDiscrete actions, "
                f"not {action_space}"
            )

    def act(self, inputs: np.ndarray, policy: ExploringPolicy, explore: bool) -> tuple[Any, Any]:
        """Choose actions from distribution inputs.

        Args:
            inputs: distribution inputs [B, num_inputs].
            policy: provides the random generator, the counters and the worker's index.
            explore: False returns greedy actions.

        Returns:
            actions [B, …] and their log-probabilities [B], which are exact for StochasticSampling,
            Random and epsilon-greedy exploration; with added noise they belong to the action
            without noise.
        """
        if self._samples_only or not explore:
            return self._dist_class.act(inputs, policy.rng, explore)
        kind, rng, timestep = self.config.type, policy.rng, policy.timestep
        if kind == "Random" or timestep < self.config.random_timesteps:
            return self._random(inputs, rng)
        if kind == "StochasticSampling":
            return self._dist_class.act(inputs, rng, True)
        actions, logp = self._dist_class.act(inputs, rng, False)
        if self._is_greedy:
            return self._epsilon_greedy(actions, inputs, rng, self.epsilon(policy))
        return self._add_noise(actions, rng, self._value(self.config.scale, policy)), logp

    def draw_random_rows(self, count: int, policy: ExploringPolicy) -> np.ndarray | None:
        """Draw which rows of a batch take a random action, bool [count].

        None, without a draw, if actions are sampled or noisy, or if a subclass has its own `act`.
        """
        counters = (
            policy.timestep, policy.total_timesteps, policy.worker_index, policy.num_workers,
        )  # fmt: skip
        if self._random_fraction_at != counters or self._has_own_epsilon:
            self._random_fraction_at = counters
            self._random_fraction = self._compute_random_fraction(policy)
        if self._random_fraction is None:
            return None
        is_random: np.ndarray = policy.rng.random(count) < self._random_fraction
        return is_random

    def act_on_values(
        self, values: np.ndarray, is_random: np.ndarray | None, policy: ExploringPolicy
    ) -> np.ndarray:
        """Choose Discrete actions by their values: the best ones, except in random rows.

        Args:
            values: Q-values [B, n]; those of masked actions are below -1e8.
            is_random: result of `draw_random_rows`; None to use the values as logits.
            policy: see `act`.

        Returns:
            actions, int64 [B].
        """
        if is_random is None:
            actions: np.ndarray = self.act(values, policy, True)[0]
            return actions
        actions = values.argmax(1)
        if is_random.any():
            # a uniform choice: the largest of random numbers, one per allowed action
            draws = policy.rng.random(values.shape)
            random = np.where(values < MASKED_BELOW, -1, draws).argmax(1)
            actions = np.where(is_random, random, actions)
        return actions

    def _compute_random_fraction(self, policy: ExploringPolicy) -> float | None:
        """Return the fraction of random actions; None if actions are sampled or noisy, or if a
        subclass has its own `act`."""
        if type(self).act is not Exploration.act:
            return None
        if self.config.type == "Random" or policy.timestep < self.config.random_timesteps:
            return 1.0
        return self.epsilon(policy) if self._is_greedy else None

    def _value(self, schedule: Any, policy: ExploringPolicy) -> float:
        return value_at(schedule, policy.timestep, policy.total_timesteps)

    def epsilon(self, policy: ExploringPolicy) -> float:
        """Return the fraction of random actions of epsilon-greedy exploration.

        PerWorkerEpsilonGreedy follows Horgan et al. 2018, section 4.
        """
        config = self.config
        if config.type == "EpsilonGreedy":
            return min(1.0, self._value(config.epsilon, policy))
        if policy.num_workers and not policy.worker_index:
            return 0.0  # the local worker, if remote workers sample
        index, last = max(policy.worker_index - 1, 0), max(policy.num_workers - 1, 1)
        return float(config.epsilon_base ** (1 + index / last * config.epsilon_exponent))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Ornstein-Uhlenbeck processes."""
        return {rows: noise.copy() for rows, noise in self._ou_noise.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`.

        Raises:
            ValueError: the noise does not fit the action space.
        """
        # a subclass may add entries
        noise = {rows: np.array(values) for rows, values in state.items() if rows.isdecimal()}
        for rows, values in noise.items():
            shape = (int(rows), *(self._space.shape or ()))
            if values.shape != shape or values.dtype.kind != "f":
                raise ValueError(
                    f"exploration: the noise for {rows} rows must be a float array of shape "
                    f"{shape}, got {values.dtype} {values.shape}"
                )
        self._ou_noise = noise

    def _random(self, inputs: np.ndarray, rng: np.random.Generator) -> tuple[Any, Any]:
        """Return uniform actions, without masked ones, and their log-probabilities."""
        return self._uniform(self._space, self._dist_class, inputs, rng)

    def _uniform(
        self, space: Any, dist_class: Any, inputs: np.ndarray, rng: np.random.Generator
    ) -> tuple[Any, Any]:
        if issubclass(dist_class, Product):
            return dist_class.act_by_component(
                inputs, lambda component, part: self._uniform(component.space, component, part, rng)
            )
        if not isinstance(space, spaces.Box):
            uniform_logits = np.where(inputs < MASKED_BELOW, inputs, np.float32(0))
            return dist_class.act(uniform_logits, rng, True)
        shape, count = (len(inputs), *space.shape), len(inputs)
        if not is_bounded(space):
            actions = rng.standard_normal(shape)
            logp = -0.5 * (actions**2 + np.log(2 * np.pi)).reshape(count, -1).sum(1)
            return actions.astype(np.float32), logp.astype(np.float32)
        low, high, logp = _uniform_bounds(space, self._normalize_actions)
        actions = 2 * rng.uniform(low, high, shape)
        return actions.astype(np.float32), np.full(count, logp, np.float32)

    def _epsilon_greedy(
        self, best: np.ndarray, inputs: np.ndarray, rng: np.random.Generator, epsilon: float
    ) -> tuple[np.ndarray, np.ndarray]:
        random, random_logp = self._random(inputs, rng)
        is_random = rng.random(len(best)) < epsilon
        is_random = is_random.reshape(-1, *([1] * (best.ndim - 1)))
        actions = np.where(is_random, random, best)
        is_best = (actions == best).reshape(len(best), -1).all(1)
        probs = epsilon * np.exp(random_logp) + (1 - epsilon) * is_best
        return actions, np.log(np.maximum(probs, 1e-30)).astype(np.float32)

    def _add_noise(self, actions: np.ndarray, rng: np.random.Generator, scale: float) -> np.ndarray:
        noise = rng.standard_normal(actions.shape) * scale
        if self.config.type == "OrnsteinUhlenbeckNoise":
            previous = self._ou_noise.get(str(len(actions)), np.zeros(actions.shape))
            noise = previous + noise - self.config.ou_theta * previous
            self._ou_noise[str(len(actions))] = noise
        noisy = actions + noise
        if self._bounds is not None:
            noisy = noisy.clip(*self._bounds)
        return noisy.astype(np.float32)


def _uniform_bounds(space: spaces.Box, is_normalized: bool) -> tuple[Any, Any, float]:
    """Return half of the bounds of uniform actions, and their log-density.

    Half, because the width of a Box may be larger than the largest number.
    """
    if is_normalized:
        return -0.5, 0.5, -math.log(2.0) * math.prod(space.shape or ())
    bounds: Any = space.low, space.high
    low, high = (np.multiply(bound, 0.5, dtype=np.float64) for bound in bounds)
    widths = np.broadcast_to(high - low, space.shape or ())
    widths = widths[widths > 0]  # other dimensions have a single value
    return low, high, -float((np.log(widths) + np.log(2)).sum())
