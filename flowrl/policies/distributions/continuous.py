"""Distributions of Box actions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flowrl.policies.distributions.base import ActionDistribution

_LOG_2PI = math.log(2 * math.pi)
_LOG_STD_MIN, _LOG_STD_MAX = -20.0, 2.0  # SquashedGaussian (Haarnoja et al. 2018, their code)
_MAX_SQUASHED = 1 - 1e-6  # bound of squashed actions, so that atanh is finite


class BoxDistribution(ActionDistribution):
    """Base class. Actions are float32 [B, *shape of the space]; [B, d] if `space` is None."""

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return 2 * int(np.prod(space.shape))

    @classmethod
    def _as_actions(cls, flat: Any) -> Any:
        """Reshape [B, d] to the shape of the space."""
        if cls.space is None or len(cls.space.shape) == 1:
            return flat
        return flat.reshape(-1, *cls.space.shape)

    @staticmethod
    def _flatten(actions: torch.Tensor, size: int) -> torch.Tensor:
        """Reshape actions to [B, size].

        Raises:
            ValueError: they have another size.
        """
        flat = actions if actions.dim() == 2 else actions.reshape(actions.shape[0], -1)
        check_action_size(flat.shape[1], size)
        return flat


def check_action_size(size: int, expected: int) -> None:
    """Raise ValueError if actions have another number of dimensions than their distribution; torch
    and numpy would broadcast a single one."""
    if size != expected:
        raise ValueError(
            f"actions have size {size}, expected {expected}; the batch may be of another action "
            "space"
        )


class DiagGaussian(BoxDistribution):
    """Independent normal distributions, from d means and d log standard deviations.

    Actions are unbounded; `Policy.actions_for_env` clips them.
    """

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        self.mean, self.log_std = inputs.chunk(2, -1)

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        size = inputs.shape[1] // 2
        mean, log_std = inputs[:, :size], inputs[:, size:]
        logp = -log_std.sum(1) - np.float32(0.5 * size * _LOG_2PI)
        if not explore:
            return cls._as_actions(mean), logp
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        logp = logp - np.float32(0.5) * (noise * noise).sum(1)
        return cls._as_actions(mean + np.exp(log_std) * noise), logp

    def sample(self) -> torch.Tensor:
        normal = self.mean + torch.exp(self.log_std) * torch.randn_like(self.mean)
        actions: torch.Tensor = self._as_actions(normal)
        return actions

    def deterministic_sample(self) -> torch.Tensor:
        actions: torch.Tensor = self._as_actions(self.mean)
        return actions

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        scaled = (self._flatten(actions, self.mean.shape[1]) - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * (scaled * scaled + _LOG_2PI) - self.log_std).sum(-1)

    def entropy(self) -> torch.Tensor:
        return (self.log_std + 0.5 * (1.0 + _LOG_2PI)).sum(-1)

    def kl(self, other: Any) -> torch.Tensor:
        variance = torch.exp(2 * self.log_std) + (self.mean - other.mean) ** 2
        return (
            other.log_std - self.log_std + 0.5 * variance * torch.exp(-2 * other.log_std) - 0.5
        ).sum(-1)


class SquashedGaussian(DiagGaussian):
    """tanh of a DiagGaussian: actions in (-1, 1) (Haarnoja et al. 2018, appendix C).

    Log standard deviations are clamped to [-20, 2]. The KL divergence is the one of the normal
    distributions, which squashing does not change. The entropy has no closed form; it is estimated
    from one sample. `act` clips actions to within 1e-6 of the bounds, and returns the
    log-probabilities of the actions before that.
    """

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        self.log_std = self.log_std.clamp(_LOG_STD_MIN, _LOG_STD_MAX)

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = len(inputs), inputs.shape[1] // 2
        noise = rng.standard_normal(shape, dtype=np.float32) if explore else np.zeros(shape, "f4")
        raw, _, logp = cls.from_noise(inputs, noise)
        return cls._as_actions(np.tanh(raw).clip(-_MAX_SQUASHED, _MAX_SQUASHED)), logp

    @staticmethod
    def from_noise(
        inputs: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the actions sampled with the given standard normal noise.

        Args:
            inputs: model outputs [B, 2 d].
            noise: [B, d].

        Returns:
            actions before tanh [B, d], the noise times the standard deviation [B, d], and the
            log-probabilities of the squashed actions [B].
        """
        size = inputs.shape[1] // 2
        mean, log_std = inputs[:, :size], inputs[:, size:].clip(_LOG_STD_MIN, _LOG_STD_MAX)
        deviation = np.exp(log_std) * noise
        raw = mean + deviation
        logp = -(np.float32(0.5) * (noise * noise + np.float32(_LOG_2PI)) + log_std).sum(1)
        # log(1 - tanh(x)^2) in a form that does not overflow
        log_slope = 2 * (np.float32(math.log(2)) - raw - np.logaddexp(np.float32(0), -2 * raw))
        return raw, deviation, logp - log_slope.sum(1)

    @staticmethod
    def is_log_std_in_bounds(log_std: np.ndarray) -> np.ndarray:
        """Return where log standard deviations [B, d] are not clamped, bool [B, d]."""
        in_bounds: np.ndarray = (log_std >= _LOG_STD_MIN) & (log_std <= _LOG_STD_MAX)
        return in_bounds

    def sample_and_logp(
        self, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return reparameterized actions [B, …] and their log-probabilities [B].

        Args:
            noise: standard normal noise [B, d]; None samples it.
        """
        if noise is None:
            noise = torch.randn_like(self.mean)
        raw = self.mean + torch.exp(self.log_std) * noise
        actions: torch.Tensor = self._as_actions(torch.tanh(raw))
        return actions, self._logp_of_raw(raw, noise)

    def sample(self) -> torch.Tensor:
        return self.sample_and_logp()[0]

    def deterministic_sample(self) -> torch.Tensor:
        actions: torch.Tensor = self._as_actions(torch.tanh(self.mean))
        return actions

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        squashed = self._flatten(actions, self.mean.shape[1]).clamp(-_MAX_SQUASHED, _MAX_SQUASHED)
        raw = torch.atanh(squashed)
        return self._logp_of_raw(raw, (raw - self.mean) * torch.exp(-self.log_std))

    def _logp_of_raw(self, raw: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of tanh(raw), raw being mean + std * scaled."""
        log_slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return (-0.5 * (scaled * scaled + _LOG_2PI) - self.log_std - log_slope).sum(-1)

    def entropy(self) -> torch.Tensor:
        return -self.sample_and_logp()[1]


class Deterministic(BoxDistribution):
    """The inputs are the action. Log-probability, entropy and KL divergence are 0."""

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return int(np.prod(space.shape))

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        return cls._as_actions(inputs), np.zeros(len(inputs), np.float32)

    def sample(self) -> torch.Tensor:
        return self.deterministic_sample()

    def deterministic_sample(self) -> torch.Tensor:
        actions: torch.Tensor = self._as_actions(self.inputs)
        return actions

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        return self.inputs.new_zeros(len(self.inputs))

    def entropy(self) -> torch.Tensor:
        return self.inputs.new_zeros(len(self.inputs))

    def kl(self, other: Any) -> torch.Tensor:
        return self.inputs.new_zeros(len(self.inputs))


class SquashedDeterministic(Deterministic):
    """tanh of the inputs is the action, in (-1, 1)."""

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        return super().act(np.tanh(inputs), rng, explore)

    def sample(self) -> torch.Tensor:
        actions: torch.Tensor = self._as_actions(torch.tanh(self.inputs))
        return actions

    def deterministic_sample(self) -> torch.Tensor:
        return self.sample()
