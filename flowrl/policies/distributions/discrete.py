"""Distributions of Discrete, MultiDiscrete and MultiBinary actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flowrl.policies.distributions.base import ActionDistribution, IndependentComponents


class Categorical(ActionDistribution):
    """One of n actions, from n logits.

    Actions are int64 [B], 0 … n - 1; the environment's actions add the space's `start`.
    """

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        # with -inf, which a user's network may return, entropies would be 0 * -inf = NaN
        self.logits = torch.log_softmax(inputs, -1).clamp(min=torch.finfo(inputs.dtype).min)

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return int(space.n)

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        # one row per action: numpy sums long rows faster than long columns
        logits = np.array(inputs.T, order="C")
        logits -= logits.max(0)
        cumulative = np.exp(logits).cumsum(0)
        if explore:
            # inverse transform sampling: count the cumulative sums below a uniform draw
            draws = rng.random(len(inputs), dtype=np.float32) * cumulative[-1]
            actions = (cumulative <= draws).sum(0)
            np.minimum(actions, len(logits) - 1, out=actions)
        else:
            actions = logits.argmax(0)
        chosen = logits[actions, np.arange(len(actions))]
        return actions, chosen - np.log(cumulative[-1])

    def sample(self) -> torch.Tensor:
        return torch.multinomial(self.logits.exp(), 1).squeeze(-1)

    def deterministic_sample(self) -> torch.Tensor:
        return self.logits.argmax(-1)

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        if len(actions) != len(self.logits):
            raise ValueError(f"{len(actions)} actions for {len(self.logits)} rows")
        return self.logits.gather(1, actions.long()[:, None])[:, 0]

    def entropy(self) -> torch.Tensor:
        return -(self.logits.exp() * self.logits).sum(-1)

    def kl(self, other: Any) -> torch.Tensor:
        return (self.logits.exp() * (self.logits - other.logits)).sum(-1)


class MultiCategorical(IndependentComponents):
    """Several independent Categoricals; the inputs are their logits, concatenated.

    Actions are int64 [B, *shape of the space], each from 0; the environment's actions add the
    space's `start`.
    """

    def __init__(self, inputs: torch.Tensor, model: torch.nn.Module | None = None):
        super().__init__(inputs, model)
        split = inputs.split(self._sizes(self.space), -1)
        self.components = [Categorical(logits) for logits in split]

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
        bounds = np.cumsum(cls._sizes(cls.space))[:-1]
        results = [Categorical.act(part, rng, explore) for part in np.split(inputs, bounds, 1)]
        actions = np.stack([actions for actions, _ in results], 1)
        logp = np.stack([logp for _, logp in results]).sum(0)
        return actions.reshape(-1, *cls.space.nvec.shape), logp

    def sample(self) -> torch.Tensor:
        return self._join([component.sample() for component in self.components])

    def deterministic_sample(self) -> torch.Tensor:
        return self._join([component.deterministic_sample() for component in self.components])

    def _join(self, actions: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(actions, 1).reshape(-1, *self.space.nvec.shape)

    def _split_actions(self, actions: torch.Tensor) -> list[torch.Tensor]:
        return list(actions.reshape(actions.shape[0], -1).unbind(1))


class Bernoulli(ActionDistribution):
    """Independent binary actions, from one logit each.

    Actions are int8 [B, *shape of the space].
    """

    @classmethod
    def num_inputs(cls, space: Any) -> int:
        return int(np.prod(space.shape))

    @classmethod
    def act(
        cls, inputs: np.ndarray, rng: np.random.Generator, explore: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        if explore:
            probs = 0.5 * (1 + np.tanh(0.5 * inputs))
            actions = rng.random(inputs.shape, dtype=np.float32) < probs
        else:
            actions = inputs > 0
        logp = -np.logaddexp(0, np.where(actions, -inputs, inputs)).sum(1)
        return actions.astype(np.int8).reshape(-1, *cls.space.shape), logp.astype(np.float32)

    def sample(self) -> torch.Tensor:
        return self._as_actions(torch.bernoulli(torch.sigmoid(self.inputs)))

    def deterministic_sample(self) -> torch.Tensor:
        return self._as_actions(self.inputs > 0)

    def _as_actions(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.to(torch.int8).reshape(-1, *self.space.shape)

    def logp(self, actions: torch.Tensor) -> torch.Tensor:
        flat = actions.reshape(actions.shape[0], -1).to(self.inputs.dtype)
        return -F.binary_cross_entropy_with_logits(self.inputs, flat, reduction="none").sum(-1)

    def entropy(self) -> torch.Tensor:
        probs = torch.sigmoid(self.inputs)
        return (F.softplus(self.inputs) - self.inputs * probs).sum(-1)

    def kl(self, other: Any) -> torch.Tensor:
        probs = torch.sigmoid(self.inputs)
        difference = probs * (self.inputs - other.inputs)
        return (difference + F.softplus(other.inputs) - F.softplus(self.inputs)).sum(-1)
