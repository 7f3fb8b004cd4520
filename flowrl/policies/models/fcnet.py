"""FullyConnectedNetwork: policy and value networks of linear layers, with a fast way to act."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import ModelV2, State, exact
from flowrl.policies.models.encoders import flat, flat_size

MANY = 4096  # numbers

Layer = tuple[nn.Parameter, nn.Parameter]
NumpyLayer = tuple[np.ndarray, np.ndarray]

_TORCH: dict[str, Callable[..., Any]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "silu": F.silu,
    "elu": F.elu,
    "gelu": F.gelu,
}


def _relu(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    if x is out and x.size > MANY:  # torch's is several times faster, and slower to call
        torch.from_numpy(x).relu_()
        return x
    return np.maximum(x, 0.0, out=out)


NUMPY_ACTIVATIONS: dict[str, Callable[..., Any]] = {"tanh": np.tanh, "relu": _relu}


def orthogonal(size_in: int, size_out: int, gain: float, rng: np.random.Generator) -> nn.Linear:
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


class FullyConnectedNetwork(ModelV2):
    """Policy and value networks of equal-shaped hidden layers, apart or with a shared trunk.

    Initialisation: orthogonal, gain sqrt(2) in hidden layers, 0.01 at the policy head, 1 at the
    value head, biases zero (Engstrom et al. 2020; Andrychowicz et al. 2021).

    Args:
        obs_space, action_space, num_outputs, model_config, name: see ModelV2; spaces that are not
            nested are flattened, or one-hot.
        free_log_std: the second half of the outputs is a parameter, not a function of the
            observation.
        rng: draws the initial weights; None takes the machine's entropy.

    Raises:
        ConfigError: a space that cannot be flattened.
    """

    def __init__(
        self,
        obs_space: spaces.Space,
        action_space: spaces.Space,
        num_outputs: int,
        model_config: ModelConfig,
        name: str = "model",
        free_log_std: bool = False,
        rng: np.random.Generator | None = None,
    ):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        rng = np.random.default_rng() if rng is None else rng
        activation = model_config.fcnet_activation
        self._activation: Callable[..., Any] = _TORCH[activation]
        self._numpy_activation = NUMPY_ACTIVATIONS.get(activation)
        self._frames = frames = model_config.num_framestacks
        hidden = [flat_size(obs_space) * frames, *model_config.fcnet_hiddens]
        mean_outputs = num_outputs // 2 if free_log_std else num_outputs

        def trunk() -> nn.ModuleList:
            gain = math.sqrt(2.0)
            pairs = itertools.pairwise(hidden)
            return nn.ModuleList(orthogonal(i, o, gain, rng) for i, o in pairs)

        self._shared = bool(model_config.vf_share_layers)
        self.hidden = trunk()
        self.policy_head = orthogonal(hidden[-1], mean_outputs, 0.01, rng)
        self.value_hidden = self.hidden if self._shared else trunk()
        self.value_head = orthogonal(hidden[-1], 1, 1.0, rng)
        self.log_std = nn.Parameter(torch.zeros(mean_outputs)) if free_log_std else None
        # Looking parameters up through nn.Module costs more than the arithmetic of a small layer.
        self._policy_layers = _layers([*self.hidden, self.policy_head])
        self._value_layers = _layers([*self.value_hidden, self.value_head])
        self._features: torch.Tensor | None = None
        self.link_numpy()

    def link_numpy(self) -> None:
        """Make the numpy side read the parameters' memory; call again when that has moved."""
        self._numpy: dict[str, list[NumpyLayer]] | None = None
        on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in self.parameters())
        if self._numpy_activation is None or not on_cpu or self._is_other():
            return
        self._scratch: list[np.ndarray] = []
        self._numpy = {
            "policy": numpy_layers(self._policy_layers),
            "value": numpy_layers(self._value_layers),
        }
        self._numpy_log_std = None if self.log_std is None else self.log_std.detach().numpy()

    @classmethod
    def _is_other(cls) -> bool:
        """Whether a subclass computes something else."""
        own = FullyConnectedNetwork
        return cls.forward is not own.forward or cls.value_function is not own.value_function

    # -- learning ----------------------------------------------------------------------------------

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        features = self._flattened(input_dict["obs"])
        hidden = self._run(features, self._policy_layers[:-1])
        self._features = hidden if self._shared else features
        with exact(hidden):
            outputs = F.linear(hidden.float(), *self._policy_layers[-1])
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs, state

    def value_function(self) -> torch.Tensor:
        assert self._features is not None
        hidden = self._features
        if not self._shared:
            hidden = self._run(hidden, self._value_layers[:-1])
        with exact(hidden):
            return F.linear(hidden.float(), *self._value_layers[-1]).squeeze(-1)

    def _run(self, hidden: torch.Tensor, layers: list[Layer]) -> torch.Tensor:
        for weight, bias in layers:
            hidden = self._activation(F.linear(hidden, weight, bias))
        return hidden

    def _flattened(self, observations: torch.Tensor) -> torch.Tensor:
        if isinstance(self.obs_space, (spaces.Discrete, spaces.MultiDiscrete)):
            every = observations.flatten(0, 1) if self._frames > 1 else observations
            return flat(self.obs_space, every).reshape(observations.shape[0], -1)
        return observations.reshape(observations.shape[0], -1).to(torch.float32)

    # -- acting ------------------------------------------------------------------------------------

    @property
    def has_numpy(self) -> bool:
        """Whether `forward_numpy` and `values_numpy` work for this network as it is now."""
        return self._numpy is not None

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        if self._numpy is None:
            return super().compute_outputs(inputs)
        outputs, values = self.forward_numpy(inputs["obs"])
        return outputs, values, []

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        return (
            super().compute_values(inputs)
            if self._numpy is None
            else self.values_numpy(inputs["obs"])
        )

    def forward_numpy(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and values, computed by numpy on the same memory, for acting.

        A torch call on a small batch is mostly dispatch: for one CartPole observation this takes
        a fifth of the time.
        """
        assert self._numpy is not None
        features = self.features_numpy(observations)
        outputs, hidden = self._outputs_numpy(features)
        if not self._shared:
            hidden = self._run_numpy(features, self._numpy["value"][:-1])
        return outputs, self._head_numpy(hidden)

    def outputs_numpy(self, observations: np.ndarray) -> np.ndarray:
        """Outputs [B, num_outputs] alone."""
        return self._outputs_numpy(self.features_numpy(observations))[0]

    def _outputs_numpy(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self._numpy is not None
        hidden = self._run_numpy(features, self._numpy["policy"][:-1])
        weight, bias = self._numpy["policy"][-1]
        outputs = hidden @ weight
        outputs += bias
        if self._numpy_log_std is not None:
            log_std = np.broadcast_to(self._numpy_log_std, outputs.shape)
            outputs = np.concatenate([outputs, log_std], 1)
        return outputs, hidden

    def values_numpy(self, observations: np.ndarray) -> np.ndarray:
        """Values [B] alone."""
        assert self._numpy is not None
        features = self.features_numpy(observations)
        return self._head_numpy(self._run_numpy(features, self._numpy["value"][:-1]))

    def _head_numpy(self, hidden: np.ndarray) -> np.ndarray:
        assert self._numpy is not None
        weight, bias = self._numpy["value"][-1]
        values = hidden @ weight
        values += bias
        return values[:, 0]

    def _run_numpy(self, hidden: np.ndarray, layers: list[NumpyLayer]) -> np.ndarray:
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

    def features_numpy(self, observations: np.ndarray) -> np.ndarray:
        """Observations [B, …] as what the first layer takes, [B, size]."""
        return flat_numpy(self.obs_space, observations)


def flat_numpy(space: spaces.Space, values: np.ndarray) -> np.ndarray:
    """`flat` by numpy: features [rows, size], float32."""
    if isinstance(space, spaces.Discrete):
        numbers = values.reshape(-1) - int(space.start)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < space.n):
            raise ValueError(f"observations {values} are not of {space}")
        one_hot = np.eye(int(space.n), dtype=np.float32)[numbers]
        return one_hot.reshape(values.shape[0], -1)
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec.reshape(-1), space.start.reshape(-1)
        numbers = values.reshape(len(values), -1, len(nvec)) - start
        if ((numbers < 0) | (numbers >= nvec)).any():
            raise ValueError(f"observations {values} are not of {space}")
        numbers = numbers + np.cumsum(nvec) - nvec
        rows = np.zeros((*numbers.shape[:2], int(nvec.sum())), np.float32)
        np.put_along_axis(rows, numbers, 1.0, axis=2)
        return rows.reshape(values.shape[0], -1)
    return values.reshape(values.shape[0], -1).astype(np.float32, copy=False)


def _layers(modules: list[Any]) -> list[Layer]:
    return [(module.weight, module.bias) for module in modules]


def numpy_layers(layers: list[Layer]) -> list[NumpyLayer]:
    """Weights, transposed, and biases as arrays that share the parameters' memory."""
    return [(w.detach().numpy().T, b.detach().numpy()) for w, b in layers]


def is_quick(model: Any) -> TypeGuard[FullyConnectedNetwork]:
    """Whether numpy computes a network, too."""
    return isinstance(model, FullyConnectedNetwork) and model.has_numpy
