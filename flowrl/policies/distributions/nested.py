"""Distributions of Dict and Tuple actions, and the distribution class for each action space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces

from flowrl.errors import ConfigError
from flowrl.policies.distributions.base import ActionDistribution, IndependentComponents
from flowrl.policies.distributions.continuous import DiagGaussian
from flowrl.policies.distributions.discrete import Bernoulli, Categorical, MultiCategorical


class Product(IndependentComponents):
    """Independent distributions of the components of a Dict or Tuple action.

    The inputs are those of the components, concatenated; a Dict's keys are sorted.

    Attributes:
        classes: the distribution class of each component, by key.
    """

    classes: ClassVar[dict[Any, type[ActionDistribution]]] = {}

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        pairs = zip(self.classes.values(), inputs.split(self._sizes(), -1), strict=True)
        self.components = [component(part, model) for component, part in pairs]

    @classmethod
    def for_space(cls, space: Any) -> type[Self]:
        subclass = super().for_space(space)
        subclass.classes = {key: distribution_for(space[key]) for key in _keys(space)}
        return subclass

    @classmethod
    def _sizes(cls) -> list[int]:
        return [component.num_inputs(component.space) for component in cls.classes.values()]

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return sum(distribution_for(space[k]).num_inputs(space[k]) for k in _keys(space))

    @classmethod
    def act(cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool) -> tuple[Any, Any]:
        return cls.act_by_component(
            inputs, lambda component, part: component.act(part, rng, explore)
        )

    @classmethod
    def act_by_component(
        cls, inputs: np.ndarray, act: Callable[[Any, np.ndarray], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """Choose the actions of each component with a function.

        Args:
            inputs: model outputs [B, num_inputs].
            act: (component class, its inputs) -> actions [B, …] and log-probabilities [B].

        Returns:
            actions in the structure of the space, and the sums of the log-probabilities [B].
        """
        parts = np.split(inputs, np.cumsum(cls._sizes())[:-1], 1)
        pairs = zip(cls.classes.values(), parts, strict=True)
        results = [act(component, part) for component, part in pairs]
        logp = np.stack([logp for _, logp in results]).sum(0)
        return cls._join([actions for actions, _ in results]), logp

    @classmethod
    def _join(cls, actions: list[Any]) -> Any:
        if isinstance(cls.space, spaces.Tuple):
            return tuple(actions)
        return dict(zip(cls.classes, actions, strict=True))

    def sample(self) -> Any:
        return self._join([component.sample() for component in self.components])

    def deterministic_sample(self) -> Any:
        return self._join([component.deterministic_sample() for component in self.components])

    def _split_actions(self, actions: Any) -> list[Any]:
        return [actions[key] for key in self.classes]


def _keys(space: Any) -> list[Any]:
    return sorted(space) if isinstance(space, spaces.Dict) else list(range(len(space.spaces)))


def distribution_for(space: spaces.Space) -> type[ActionDistribution]:
    """Return the distribution class for an action space.

    Raises:
        ConfigError: no distribution supports the space.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical.for_space(space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical.for_space(space)
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli.for_space(space)
    if isinstance(space, spaces.Box) and np.prod(space.shape) and space.dtype.kind == "f":
        return DiagGaussian.for_space(space)
    if isinstance(space, (spaces.Dict, spaces.Tuple)) and len(space.spaces):
        return Product.for_space(space)
    raise ConfigError(
        f"no action distribution for the action space {space}: supported are Discrete, "
        "MultiDiscrete, MultiBinary, Box of floats that is not empty, and Dict and Tuple of those"
    )
