"""ActionDistribution: the interface of action distributions."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces


def _not_implemented(cls: type, method: str) -> NotImplementedError:
    return NotImplementedError(f"{cls.__name__} has no {method}(): implement it")


class ActionDistribution:
    """Base class of action distributions.

    Args:
        inputs: model outputs [B, num_inputs].
        model: the model, for distributions that need access to it.

    Attributes:
        space: the action space of the class (see `for_space`).
    """

    space: ClassVar[Any] = None

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        self.inputs = inputs

    @classmethod
    def for_space(cls, space: spaces.Space) -> type[Self]:
        """Return a subclass for one action space."""
        return type(cls.__name__, (cls,), {"space": space, "__module__": cls.__module__})

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        """Return the number of model outputs for one action of `space`."""
        raise _not_implemented(cls, "num_inputs")

    @classmethod
    def act(cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool) -> tuple[Any, Any]:
        """Choose actions with numpy.

        Args:
            inputs: model outputs [B, num_inputs].
            rng: generator to sample with.
            explore: sample from the distribution; False returns its mode.

        Returns:
            actions [B, …] and their log-probabilities [B].
        """
        raise _not_implemented(cls, "act")

    def sample(self) -> Any:
        """Return actions [B, …] sampled with torch; continuous actions are reparameterized."""
        raise _not_implemented(type(self), "sample")

    def deterministic_sample(self) -> Any:
        """Return the modes [B, …]."""
        raise _not_implemented(type(self), "deterministic_sample")

    def logp(self, actions: Any) -> torch.Tensor:
        """Return the log-probabilities [B] of actions [B, …]."""
        raise _not_implemented(type(self), "logp")

    def entropy(self) -> torch.Tensor:
        """Return the entropies [B], in nats."""
        raise _not_implemented(type(self), "entropy")

    def kl(self, other: Any) -> torch.Tensor:
        """Return KL(self || other) [B], in nats."""
        raise _not_implemented(type(self), "kl")


class IndependentComponents(ActionDistribution):
    """Base class of a product of independent distributions, one per component of an action."""

    components: list[Any]

    def logp(self, actions: Any) -> torch.Tensor:
        pairs = zip(self.components, self._split_actions(actions), strict=True)
        return torch.stack([component.logp(action) for component, action in pairs]).sum(0)

    def entropy(self) -> torch.Tensor:
        return torch.stack([component.entropy() for component in self.components]).sum(0)

    def kl(self, other: Any) -> torch.Tensor:
        pairs = zip(self.components, other.components, strict=True)
        return torch.stack([component.kl(others) for component, others in pairs]).sum(0)

    def _split_actions(self, actions: Any) -> list[Any]:
        """Return the actions of each component."""
        raise NotImplementedError
