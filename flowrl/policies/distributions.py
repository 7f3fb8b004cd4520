"""Action distributions: learning is torch, acting is numpy.

A distribution object wraps a model's outputs for the loss: `logp`, `entropy`, `kl`, each [B].
The class method `act` draws actions from the same outputs without building anything. Which class an
action space has, says `distribution_for`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces

from flowrl.settings import ConfigError

_LOG_2PI = math.log(2 * math.pi)
_LOG_STD_MIN, _LOG_STD_MAX = -20.0, 2.0  # of the squashed normal (Haarnoja et al. 2018, code)
_INSIDE = 1 - 1e-6  # squashed actions, to have a finite inverse


class ActionDistribution:
    """Base.

    Args:
        inputs: model outputs [B, num_inputs].
        model: the model, for distributions that need more of it.

    Attributes:
        space: the action space that the class is for (see `over`).
    """

    space: ClassVar[Any] = None

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        self.inputs = inputs

    @classmethod
    def over(cls, space: spaces.Space) -> type[Self]:
        """The class for one action space."""
        return type(cls.__name__, (cls,), {"space": space, "__module__": cls.__module__})

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        """Model outputs that one action of `space` needs."""
        raise NotImplementedError

    @classmethod
    def act(cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool) -> tuple[Any, Any]:
        """Actions [B, …] and their log-probabilities [B] for outputs [B, num_inputs].

        Sampled with `rng`; the mode of the distribution if not `explore`.
        """
        raise NotImplementedError

    def sample(self) -> Any:
        """Actions [B, …] drawn by torch; of continuous ones the gradient goes through."""
        raise NotImplementedError

    def deterministic_sample(self) -> Any:
        """The modes, [B, …]."""
        raise NotImplementedError

    def logp(self, actions: Any) -> torch.Tensor:
        """Log-probability of the actions, [B]."""
        raise NotImplementedError

    def entropy(self) -> torch.Tensor:
        """Entropy [nats], [B]."""
        raise NotImplementedError

    def kl(self, other: Any) -> torch.Tensor:
        """KL(self || other) [nats], [B]."""
        raise NotImplementedError


class Categorical(ActionDistribution):
    """One of n actions, from n logits. Actions are int64 0 … n-1 (plus the space's start)."""

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        self.logits = torch.log_softmax(inputs, -1)

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return int(space.n)

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
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

    def sample(self) -> torch.Tensor:
        return torch.multinomial(self.logits.exp(), 1).squeeze(-1)

    def deterministic_sample(self) -> torch.Tensor:
        return self.logits.argmax(-1)

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        return -F.nll_loss(self.logits, actions.long(), reduction="none")

    def entropy(self) -> torch.Tensor:
        return -(self.logits.exp() * self.logits).sum(-1)

    def kl(self, other: Any) -> torch.Tensor:
        return (self.logits.exp() * (self.logits - other.logits)).sum(-1)


class _Parts(ActionDistribution):
    """Independent distributions of parts of an action."""

    parts: list[Any]

    def logp(self, actions: Any) -> torch.Tensor:
        own = [d.logp(a) for d, a in zip(self.parts, self._apart(actions), strict=True)]
        return torch.stack(own).sum(0)

    def entropy(self) -> torch.Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: Any) -> torch.Tensor:
        pairs = zip(self.parts, other.parts, strict=True)
        return torch.stack([part.kl(others) for part, others in pairs]).sum(0)

    def _apart(self, actions: Any) -> list[Any]:
        raise NotImplementedError


class MultiCategorical(_Parts):
    """Several independent choices: the logits of each after those of the one before.

    Actions are int64 [B, *shape of the space], each from 0 (plus the space's start).
    """

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        self.parts = [Categorical(part) for part in inputs.split(self._sizes(self.space), -1)]

    @staticmethod
    def _sizes(space: Any) -> list[int]:
        sizes: list[int] = space.nvec.reshape(-1).tolist()
        return sizes

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return sum(cls._sizes(space))

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        cuts = np.cumsum(cls._sizes(cls.space))[:-1]
        made = [Categorical.act(part, rng, explore) for part in np.split(inputs, cuts, 1)]
        actions = np.stack([actions for actions, _ in made], 1)
        logp = np.stack([logp for _, logp in made]).sum(0)
        return actions.reshape(-1, *cls.space.nvec.shape), logp

    def sample(self) -> torch.Tensor:
        return self._shaped([part.sample() for part in self.parts])

    def deterministic_sample(self) -> torch.Tensor:
        return self._shaped([part.deterministic_sample() for part in self.parts])

    def _shaped(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts, 1).reshape(-1, *self.space.nvec.shape)

    def _apart(self, actions: torch.Tensor) -> list[torch.Tensor]:
        return list(actions.reshape(actions.shape[0], -1).unbind(1))


class Bernoulli(ActionDistribution):
    """Independent yes or no, from a logit each. Actions are int8 [B, *shape of the space]."""

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return int(np.prod(space.shape))

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        if explore:
            chances = 0.5 * (1 + np.tanh(0.5 * inputs))
            actions = rng.random(inputs.shape, dtype=np.float32) < chances
        else:
            actions = inputs > 0
        logp = -np.logaddexp(0, np.where(actions, -inputs, inputs)).sum(1)
        return actions.astype(np.int8).reshape(-1, *cls.space.shape), logp.astype(np.float32)

    def sample(self) -> torch.Tensor:
        return self._shaped(torch.bernoulli(torch.sigmoid(self.inputs)))

    def deterministic_sample(self) -> torch.Tensor:
        return self._shaped(self.inputs > 0)

    def _shaped(self, actions: torch.Tensor) -> torch.Tensor:
        return actions.to(torch.int8).reshape(-1, *self.space.shape)

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        flat = actions.reshape(actions.shape[0], -1).to(self.inputs.dtype)
        return -F.binary_cross_entropy_with_logits(self.inputs, flat, reduction="none").sum(-1)

    def entropy(self) -> torch.Tensor:
        chances = torch.sigmoid(self.inputs)
        return (F.softplus(self.inputs) - self.inputs * chances).sum(-1)

    def kl(self, other: Any) -> torch.Tensor:
        chances = torch.sigmoid(self.inputs)
        left = chances * (self.inputs - other.inputs)
        return (left + F.softplus(other.inputs) - F.softplus(self.inputs)).sum(-1)


class _OfBox(ActionDistribution):
    """Actions float32 [B, *shape of the space]; [B, d] where the class is of no space."""

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return 2 * int(np.prod(space.shape))

    @classmethod
    def _shaped(cls, actions: Any) -> Any:
        if cls.space is None or len(cls.space.shape) == 1:
            return actions
        return actions.reshape(-1, *cls.space.shape)

    @staticmethod
    def _flat(actions: torch.Tensor) -> torch.Tensor:
        return actions if actions.dim() == 2 else actions.reshape(actions.shape[0], -1)


class DiagGaussian(_OfBox):
    """Independent normal per action dimension: inputs are d means and d log standard deviations.

    Actions are unbounded: bounding them is the worker's business.
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
            return cls._shaped(mean), logp
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        logp = logp - np.float32(0.5) * (noise * noise).sum(1)
        return cls._shaped(mean + np.exp(log_std) * noise), logp

    def sample(self) -> torch.Tensor:
        drawn: torch.Tensor = self._shaped(self._draw())
        return drawn

    def _draw(self) -> torch.Tensor:
        return self.mean + torch.exp(self.log_std) * torch.randn_like(self.mean)

    def deterministic_sample(self) -> torch.Tensor:
        mean: torch.Tensor = self._shaped(self.mean)
        return mean

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        scaled = (self._flat(actions) - self.mean) * torch.exp(-self.log_std)
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

    The log standard deviations are kept in [-20, 2]. KL is that of the normals, which squashing
    does not change; entropy has no closed form and is estimated from one draw.
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
        raw, _, logp = cls.drawn(inputs, noise)
        return cls._shaped(np.tanh(raw).clip(-_INSIDE, _INSIDE)), logp

    @staticmethod
    def drawn(inputs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a standard normal's noise [B, d] makes: actions before they are squashed [B, d],
        the noise in their units [B, d], and log-probabilities of the squashed ones [B]."""
        size = inputs.shape[1] // 2
        mean, log_std = inputs[:, :size], inputs[:, size:].clip(_LOG_STD_MIN, _LOG_STD_MAX)
        spread = np.exp(log_std) * noise
        raw = mean + spread
        logp = -(np.float32(0.5) * (noise * noise + np.float32(_LOG_2PI)) + log_std).sum(1)
        # log(1 - tanh(x)^2), as it does not overflow
        slope = 2 * (np.float32(math.log(2)) - raw - np.logaddexp(np.float32(0), -2 * raw))
        return raw, spread, logp - slope.sum(1)

    @staticmethod
    def inside(log_std: np.ndarray) -> np.ndarray:
        """Where log standard deviations are not cut off [B, d]."""
        made: np.ndarray = (log_std >= _LOG_STD_MIN) & (log_std <= _LOG_STD_MAX)
        return made

    def sample_and_logp(
        self, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions drawn with a gradient, and their log-probabilities.

        Args:
            noise: of a standard normal, [B, d]; None draws it.
        """
        raw = self._draw() if noise is None else self.mean + torch.exp(self.log_std) * noise
        drawn: torch.Tensor = self._shaped(torch.tanh(raw))
        return drawn, self._logp_of_raw(raw)

    def sample(self) -> torch.Tensor:
        return self.sample_and_logp()[0]

    def deterministic_sample(self) -> torch.Tensor:
        mode: torch.Tensor = self._shaped(torch.tanh(self.mean))
        return mode

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        return self._logp_of_raw(torch.atanh(self._flat(actions).clamp(-_INSIDE, _INSIDE)))

    def _logp_of_raw(self, raw: torch.Tensor) -> torch.Tensor:
        slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        scaled = (raw - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * (scaled * scaled + _LOG_2PI) - self.log_std - slope).sum(-1)

    def entropy(self) -> torch.Tensor:
        return -self.sample_and_logp()[1]


class Deterministic(_OfBox):
    """The outputs are the action: log-probability, entropy and KL are 0."""

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return int(np.prod(space.shape))

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        return cls._shaped(inputs), np.zeros(len(inputs), np.float32)

    def sample(self) -> torch.Tensor:
        return self.deterministic_sample()

    def deterministic_sample(self) -> torch.Tensor:
        action: torch.Tensor = self._shaped(self.inputs)
        return action

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        return self.inputs.new_zeros(len(self.inputs))

    def entropy(self) -> torch.Tensor:
        return self.inputs.new_zeros(len(self.inputs))

    def kl(self, other: Any) -> torch.Tensor:
        return self.inputs.new_zeros(len(self.inputs))


class SquashedDeterministic(Deterministic):
    """tanh of the outputs is the action, in (-1, 1)."""

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        return super().act(np.tanh(inputs), rng, explore)

    def sample(self) -> torch.Tensor:
        made: torch.Tensor = self._shaped(torch.tanh(self.inputs))
        return made

    def deterministic_sample(self) -> torch.Tensor:
        return self.sample()


class Product(_Parts):
    """Independent distributions of the parts of a Dict or Tuple action, in the space's order."""

    classes: ClassVar[dict[Any, type[ActionDistribution]]] = {}

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        split = inputs.split(self._sizes(), -1)
        pairs = zip(self.classes.values(), split, strict=True)
        self.parts = [part(own, model) for part, own in pairs]

    @classmethod
    def over(cls, space: Any) -> type[Self]:
        made = super().over(space)
        made.classes = {key: distribution_for(space[key]) for key in _keys(space)}
        return made

    @classmethod
    def _sizes(cls) -> list[int]:
        return [part.num_inputs(part.space) for part in cls.classes.values()]

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return sum(distribution_for(space[k]).num_inputs(space[k]) for k in _keys(space))

    @classmethod
    def act(cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool) -> tuple[Any, Any]:
        return cls.act_apart(inputs, lambda part, own: part.act(own, rng, explore))

    @classmethod
    def act_apart(
        cls, inputs: np.ndarray, act: Callable[[Any, np.ndarray], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """Joined actions and log-probabilities of act(class, inputs) of each part."""
        split = np.split(inputs, np.cumsum(cls._sizes())[:-1], 1)
        made = [act(part, own) for part, own in zip(cls.classes.values(), split, strict=True)]
        return cls._joined([actions for actions, _ in made]), np.stack([p for _, p in made]).sum(0)

    @classmethod
    def _joined(cls, parts: list[Any]) -> Any:
        if isinstance(cls.space, spaces.Tuple):
            return tuple(parts)
        return dict(zip(cls.classes, parts, strict=True))

    def sample(self) -> Any:
        return self._joined([part.sample() for part in self.parts])

    def deterministic_sample(self) -> Any:
        return self._joined([part.deterministic_sample() for part in self.parts])

    def _apart(self, actions: Any) -> list[Any]:
        return [actions[key] for key in self.classes]


def _keys(space: Any) -> list[Any]:
    return sorted(space) if isinstance(space, spaces.Dict) else list(range(len(space.spaces)))


def distribution_for(space: spaces.Space) -> type[ActionDistribution]:
    """The distribution class for an action space.

    Raises:
        ConfigError: no distribution for this space.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical.over(space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical.over(space)
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli.over(space)
    if isinstance(space, spaces.Box) and np.prod(space.shape) and space.dtype.kind == "f":
        return DiagGaussian.over(space)
    if isinstance(space, (spaces.Dict, spaces.Tuple)) and len(space.spaces):
        return Product.over(space)
    raise ConfigError(
        f"no action distribution for the action space {space}: Discrete, MultiDiscrete, "
        "MultiBinary, Box of floats, and Dict and Tuple of those are supported"
    )
