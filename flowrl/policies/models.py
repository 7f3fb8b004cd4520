"""Models: from observations to distribution inputs and values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from flowrl.policies.config import ConfigError, ModelConfig
from flowrl.policies.view_requirement import ViewRequirement

Layer = tuple[nn.Parameter, nn.Parameter]

_TORCH: dict[str, Callable[..., Any]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "silu": F.silu,
    "elu": F.elu,
    "gelu": F.gelu,
}


def _relu(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0, out=out)


_NUMPY: dict[str, Callable[..., Any]] = {"tanh": np.tanh, "relu": _relu}


def feature_size(space: spaces.Space) -> int:
    """Features that one observation of `space` gives to a fully connected network.

    Raises:
        ConfigError: the space is no Box and no Discrete.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Box):
        return int(np.prod(space.shape))
    raise ConfigError(
        f"no model for the observation space {space}: Box and Discrete spaces are supported "
        "(flatten others with gymnasium.wrappers.FlattenObservation)"
    )


def _orthogonal(size_in: int, size_out: int, gain: float, rng: np.random.Generator) -> nn.Linear:
    """A linear layer with an orthogonal weight scaled by `gain` and zero bias."""
    layer = nn.Linear(size_in, size_out)
    normal = rng.standard_normal((max(size_in, size_out), min(size_in, size_out)))
    q, r = np.linalg.qr(normal)
    q = q * np.sign(np.diag(r))
    weight = q if size_out >= size_in else q.T
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(gain * weight))
        layer.bias.zero_()
    return layer


class FullyConnectedNetwork(nn.Module):
    """Policy and value networks of equal-shaped hidden layers, apart or with a shared trunk.

    Initialisation: orthogonal, gain sqrt(2) in hidden layers, 0.01 at the policy head, 1 at the
    value head, biases zero (Engstrom et al. 2020; Andrychowicz et al. 2021).

    Args:
        observation_space: Box (flattened) or Discrete (one-hot).
        num_outputs: inputs of the action distribution.
        config: layer sizes, activation, sharing.
        free_log_std: the second half of the outputs is a parameter, not a function of the
            observation.
        rng: draws the initial weights.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        num_outputs: int,
        config: ModelConfig,
        free_log_std: bool,
        rng: np.random.Generator,
    ):
        super().__init__()
        self.view_requirements = {"obs": ViewRequirement(space=observation_space)}
        self._space = observation_space
        self._activation: Callable[..., Any] = _TORCH[config.fcnet_activation]
        self._numpy_activation = _NUMPY.get(config.fcnet_activation)
        size = feature_size(observation_space)
        hidden = [size, *config.fcnet_hiddens]
        mean_outputs = num_outputs // 2 if free_log_std else num_outputs

        def trunk() -> nn.ModuleList:
            gain = math.sqrt(2.0)
            pairs = itertools.pairwise(hidden)
            return nn.ModuleList(_orthogonal(i, o, gain, rng) for i, o in pairs)

        self.hidden = trunk()
        self.policy_head = _orthogonal(hidden[-1], mean_outputs, 0.01, rng)
        self.value_hidden = self.hidden if config.vf_share_layers else trunk()
        self.value_head = _orthogonal(hidden[-1], 1, 1.0, rng)
        self.log_std = nn.Parameter(torch.zeros(mean_outputs)) if free_log_std else None
        self._shared = config.vf_share_layers
        # Looking parameters up through nn.Module costs more than the arithmetic of a small layer.
        self._policy_layers = _layers([*self.hidden, self.policy_head])
        self._value_layers = _layers([*self.value_hidden, self.value_head])
        self.link()

    def link(self) -> None:
        """Make the numpy side read the parameters' memory; call again when that has moved."""
        self._numpy: dict[str, Any] | None = None
        on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in self.parameters())
        if self._numpy_activation is None or not on_cpu:
            return

        def views(layers: list[Layer]) -> list[tuple[np.ndarray, np.ndarray]]:
            return [(w.detach().numpy().T, b.detach().numpy()) for w, b in layers]

        self._scratch: list[np.ndarray] = []

        self._numpy = {
            "policy": views(self._policy_layers),
            "value": views(self._value_layers),
            "log_std": None if self.log_std is None else self.log_std.detach().numpy(),
        }

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Distribution inputs [B, num_outputs] and values [B] of observations [B, …]."""
        features = self._features(observations)
        hidden = self._run(features, self._policy_layers[:-1])
        outputs = F.linear(hidden, *self._policy_layers[-1])
        if not self._shared:
            hidden = self._run(features, self._value_layers[:-1])
        values = F.linear(hidden, *self._value_layers[-1]).squeeze(-1)
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs, values

    def _run(self, hidden: torch.Tensor, layers: list[Layer]) -> torch.Tensor:
        for weight, bias in layers:
            hidden = self._activation(F.linear(hidden, weight, bias))
        return hidden

    def _features(self, observations: torch.Tensor) -> torch.Tensor:
        if isinstance(self._space, spaces.Discrete):
            return F.one_hot(observations.long() - int(self._space.start), int(self._space.n)).to(
                torch.float32
            )
        return observations.reshape(len(observations), -1).to(torch.float32)

    @property
    def has_numpy(self) -> bool:
        """Whether `forward_numpy` and `values_numpy` work for this network as it is now."""
        return self._numpy is not None

    def forward_numpy(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What `forward` gives, computed by numpy on the same memory, for acting.

        A torch call on a small batch is mostly dispatch: for one CartPole observation this takes
        a fifth of the time.
        """
        assert self._numpy is not None
        features = self._features_numpy(observations)
        hidden = self._run_numpy(features, self._numpy["policy"][:-1])
        weight, bias = self._numpy["policy"][-1]
        outputs = hidden @ weight
        outputs += bias
        if not self._shared:
            hidden = self._run_numpy(features, self._numpy["value"][:-1])
        log_std = self._numpy["log_std"]
        if log_std is not None:
            outputs = np.concatenate([outputs, np.broadcast_to(log_std, outputs.shape)], 1)
        return outputs, self._head_numpy(hidden)

    def values_numpy(self, observations: np.ndarray) -> np.ndarray:
        """Values [B] alone."""
        assert self._numpy is not None
        features = self._features_numpy(observations)
        return self._head_numpy(self._run_numpy(features, self._numpy["value"][:-1]))

    def _head_numpy(self, hidden: np.ndarray) -> np.ndarray:
        assert self._numpy is not None
        weight, bias = self._numpy["value"][-1]
        values = hidden @ weight
        values += bias
        return values[:, 0]

    def _run_numpy(self, hidden: np.ndarray, layers: list[Any]) -> np.ndarray:
        """Activations of the last hidden layer, in memory that the next call writes over."""
        activation = self._numpy_activation
        assert activation is not None
        if not self._scratch or len(self._scratch[0]) != len(hidden):
            self._scratch = [np.empty((len(hidden), b.shape[0]), np.float32) for _, b in layers]
        for (weight, bias), out in zip(layers, self._scratch, strict=True):
            np.dot(hidden, weight, out)
            out += bias
            hidden = activation(out, out)
        return hidden

    def _features_numpy(self, observations: np.ndarray) -> np.ndarray:
        if isinstance(self._space, spaces.Discrete):
            return np.eye(int(self._space.n), dtype=np.float32)[observations - self._space.start]
        return observations.reshape(len(observations), -1).astype(np.float32, copy=False)


def _layers(modules: list[Any]) -> list[Layer]:
    return [(module.weight, module.bias) for module in modules]
