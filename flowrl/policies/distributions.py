"""Action distributions: learning is torch, acting is numpy.

A distribution object wraps a model's outputs for the loss: `logp`, `entropy`, `kl`, each [B].
The static `act` draws actions from the same outputs without building anything.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces

from flowrl.policies.config import ConfigError

_LOG_2PI = math.log(2 * math.pi)


class ActionDistribution:
    """Base. Subclasses say how many model outputs an action space needs.

    Args:
        inputs: model outputs [B, num_inputs].
        model: the model, for distributions that need more of it.
    """

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        self.inputs = inputs

    @staticmethod
    def num_inputs(space: spaces.Space) -> int:
        """Model outputs that one action of `space` needs."""
        raise NotImplementedError

    @staticmethod
    def act(
        inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions [B, …] and their log-probabilities [B] for outputs [B, num_inputs].

        Sampled with `rng`; the mode of the distribution if not `explore`.
        """
        raise NotImplementedError

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        """Log-probability of the actions, [B]."""
        raise NotImplementedError

    def entropy(self) -> torch.Tensor:
        """Entropy [nats], [B]."""
        raise NotImplementedError

    def kl(self, other: ActionDistribution) -> torch.Tensor:
        """KL(self || other) [nats], [B]."""
        raise NotImplementedError


class Categorical(ActionDistribution):
    """One of n actions, from n logits. Actions are int64 0 … n-1 (plus the space's start)."""

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        self.logits = torch.log_softmax(inputs, -1)

    @staticmethod
    def num_inputs(space: spaces.Space) -> int:
        assert isinstance(space, spaces.Discrete)
        return int(space.n)

    @staticmethod
    def act(
        inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        logits = inputs - inputs.max(1, keepdims=True)
        cumulative = np.exp(logits).cumsum(1)
        if explore:
            # inverse of the distribution function: how many sums lie below a uniform draw
            draws = rng.random((len(inputs), 1), dtype=np.float32) * cumulative[:, -1:]
            actions = (cumulative <= draws).sum(1)
            np.minimum(actions, logits.shape[1] - 1, out=actions)
        else:
            actions = logits.argmax(1)
        chosen = logits[np.arange(len(actions)), actions]
        return actions, chosen - np.log(cumulative[:, -1])

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        return -F.nll_loss(self.logits, actions.long(), reduction="none")

    def entropy(self) -> torch.Tensor:
        return -(self.logits.exp() * self.logits).sum(-1)

    def kl(self, other: ActionDistribution) -> torch.Tensor:
        assert isinstance(other, Categorical)
        return (self.logits.exp() * (self.logits - other.logits)).sum(-1)


class DiagGaussian(ActionDistribution):
    """Independent normal per action dimension: inputs are d means and d log standard deviations.

    Actions are float32 [B, d], unbounded: bounding them is the worker's business.
    """

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        self.mean, self.log_std = inputs.chunk(2, -1)

    @staticmethod
    def num_inputs(space: spaces.Space) -> int:
        assert isinstance(space, spaces.Box)
        return 2 * int(np.prod(space.shape))

    @staticmethod
    def act(
        inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        size = inputs.shape[1] // 2
        mean, log_std = inputs[:, :size], inputs[:, size:]
        logp = -log_std.sum(1) - np.float32(0.5 * size * _LOG_2PI)
        if not explore:
            return mean, logp
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        return mean + np.exp(log_std) * noise, logp - np.float32(0.5) * (noise * noise).sum(1)

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        scaled = (actions - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * (scaled * scaled + _LOG_2PI) - self.log_std).sum(-1)

    def entropy(self) -> torch.Tensor:
        return (self.log_std + 0.5 * (1.0 + _LOG_2PI)).sum(-1)

    def kl(self, other: ActionDistribution) -> torch.Tensor:
        assert isinstance(other, DiagGaussian)
        variance = torch.exp(2 * self.log_std) + (self.mean - other.mean) ** 2
        return (
            other.log_std - self.log_std + 0.5 * variance * torch.exp(-2 * other.log_std) - 0.5
        ).sum(-1)


def distribution_for(space: spaces.Space) -> type[ActionDistribution]:
    """The distribution class for an action space.

    Raises:
        ConfigError: no distribution for this space.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return DiagGaussian
    raise ConfigError(
        f"no action distribution for the action space {space}: Discrete and one-dimensional Box "
        "spaces are supported"
    )
