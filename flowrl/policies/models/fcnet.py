"""FullyConnectedNetwork: policy and value networks of linear layers, fast on small batches."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import (
    ModelV2,
    State,
    full_precision,
    hooks_of,
    is_float32_on_cpu,
    last_features,
)
from flowrl.policies.models.flatten import flatten, flatten_numpy, nested_size
from flowrl.policies.models.matrix_products import matmul_for

MAX_BUFFERS = 4  # buffers that are kept, one set per number of rows
MIN_TORCH_RELU_SIZE = 4096  # elements

# methods of the forward pass with torch: if one is replaced, numpy does not compute the same
_WITH_TORCH = ("forward", "value_function", "_flatten", "_run")
# all methods that compute outputs or values
_COMPUTING = (
    *_WITH_TORCH, "from_batch", "compute_outputs", "compute_values", "forward_numpy",
    "outputs_numpy", "values_numpy", "features_numpy",
)  # fmt: skip

Layer = Callable[[torch.Tensor], torch.Tensor]
NumpyLayer = tuple[np.ndarray, np.ndarray]

_TORCH_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "silu": F.silu,
    "elu": F.elu,
    "gelu": F.gelu,
}


def _relu(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    # torch's in-place relu is several times faster, but costs more per call
    if x is out and x.size > MIN_TORCH_RELU_SIZE:
        torch.from_numpy(x).relu_()
        return x
    return np.maximum(x, 0.0, out=out)


NUMPY_ACTIVATIONS: dict[str, Callable[..., Any]] = {"tanh": np.tanh, "relu": _relu}


def orthogonal_linear(
    size_in: int, size_out: int, gain: float, rng: np.random.Generator
) -> nn.Linear:
    """Return a linear layer with an orthogonal weight scaled by `gain` and zero bias."""
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
    """Policy and value networks with the same hidden layers, separate or with a shared trunk.

    With float32 parameters on the CPU and the activation tanh or relu the network acts with numpy
    on the parameters' memory (see `uses_numpy`): for small batches a torch call is mostly dispatch
    overhead.

    Initialization: orthogonal, gain sqrt(2) in hidden layers, 0.01 at the policy head, 1 at the
    value head, biases zero (Engstrom et al. 2020; Andrychowicz et al. 2021).

    Args:
        obs_space, action_space, num_outputs, model_config, name: see ModelV2. Observations are
            flattened or one-hot; the parts of nested ones are concatenated.
        free_log_std: the second half of the outputs is a parameter, independent of the
            observation.
        rng: generator of the initial weights; None seeds it from torch's generator, which has the
            policy's seed.

    Attributes:
        shares_layers: whether the two networks share their hidden layers.

    Raises:
        ConfigError: the observation space cannot be flattened.
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
        if rng is None:  # a user's subclass: torch's generator has the seed of the policy
            rng = np.random.default_rng(int(torch.randint(2**62, ())))
        activation = model_config.fcnet_activation
        self._activation: Callable[..., Any] = _TORCH_ACTIVATIONS[activation]
        self._numpy_activation = NUMPY_ACTIVATIONS.get(activation)
        self._frames = frames = model_config.num_framestacks
        sizes = [nested_size(obs_space) * frames, *model_config.fcnet_hiddens]
        num_means = num_outputs // 2 if free_log_std else num_outputs

        def hidden_layers() -> nn.ModuleList:
            gain = math.sqrt(2.0)
            pairs = itertools.pairwise(sizes)
            return nn.ModuleList(orthogonal_linear(i, o, gain, rng) for i, o in pairs)

        self.shares_layers = bool(model_config.vf_share_layers)
        self.hidden = hidden_layers()
        self.policy_head = orthogonal_linear(sizes[-1], num_means, 0.01, rng)
        self.value_hidden = self.hidden if self.shares_layers else hidden_layers()
        self.value_head = orthogonal_linear(sizes[-1], 1, 1.0, rng)
        self.log_std = nn.Parameter(torch.zeros(num_means)) if free_log_std else None
        self._features: torch.Tensor | None = None
        self.matmul = matmul_for(model_config.matrix_products)
        self._buffers_numpy: dict[tuple[int, int], list[np.ndarray]] = {}
        self._numpy_log_std: np.ndarray | None = None
        self.bind_numpy_views()

    def bind_numpy_views(self) -> None:
        """Refresh the layers and numpy views of their parameters. Called when modules were
        replaced, or the parameters' memory has moved."""
        policy, value = [*self.hidden, self.policy_head], [*self.value_hidden, self.value_head]
        self._policy_layers, self._value_layers = [list(map(_layer, m)) for m in (policy, value)]
        self._hooks = hooks_of(self)
        self._numpy: dict[str, list[NumpyLayer]] | None = None
        self._has_own_methods = _has_methods_of_base(type(self), _COMPUTING)
        is_own = _has_methods_of_base(type(self), _WITH_TORCH)
        is_plain = all(map(is_plain_linear, (*policy, *value)))
        # both networks use the same buffers
        is_plain = is_plain and [m.in_features for m in policy] == [m.in_features for m in value]
        self._num_attributes = 0  # so that the number below includes this attribute
        self._num_attributes = len(vars(self)) - sum(n in vars(self) for n in _COMPUTING)
        if self._numpy_activation is None or not (is_float32_on_cpu(self) and is_own and is_plain):
            return
        # outputs of the hidden layers, by the thread that acts and the number of rows
        self._buffers_numpy = {}
        self._numpy = {"policy": numpy_views(policy), "value": numpy_views(value)}
        self._numpy_log_std = None if self.log_std is None else self.log_std.detach().numpy()

    # -- learning ----------------------------------------------------------------------------------

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        features = self._flatten(input_dict["obs"])
        has_hooks = any(self._hooks)
        layers = [*self.hidden, self.policy_head] if has_hooks else self._policy_layers
        hidden = self._run(features, layers[:-1])
        self._features = hidden if self.shares_layers else features
        with full_precision(hidden):
            outputs = layers[-1](hidden.float())
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs, state

    def value_function(self) -> torch.Tensor:
        hidden = last_features(self._features)
        has_hooks = any(self._hooks)
        layers = [*self.value_hidden, self.value_head] if has_hooks else self._value_layers
        if not self.shares_layers:
            hidden = self._run(hidden, layers[:-1])
        with full_precision(hidden):
            return layers[-1](hidden.float()).squeeze(-1)

    def _run(self, hidden: torch.Tensor, layers: list[Layer]) -> torch.Tensor:
        for layer in layers:
            hidden = self._activation(layer(hidden))
        return hidden

    def _flatten(self, observations: Any) -> torch.Tensor:
        if isinstance(self.obs_space, (spaces.Dict, spaces.Tuple)):
            return flatten(self.obs_space, observations)
        if isinstance(self.obs_space, (spaces.Discrete, spaces.MultiDiscrete)):
            frames = observations.flatten(0, 1) if self._frames > 1 else observations
            return flatten(self.obs_space, frames).reshape(observations.shape[0], -1)
        return observations.reshape(observations.shape[0], -1).to(torch.float32)

    # -- acting ------------------------------------------------------------------------------------

    @property
    def uses_numpy(self) -> bool:
        """Whether the `..._numpy` methods can be called in place of all others that compute outputs
        or values: layers and methods are flowrl's, and the user has registered no hooks."""
        has_own = self._has_own_methods and not self._replaces(_COMPUTING)
        return self._numpy is not None and has_own and not any(self._hooks)

    def _replaces(self, names: Sequence[str]) -> bool:
        """Return whether one of these methods was replaced by assigning to the network."""
        attributes = vars(self)  # of the same number, unless one was added
        return len(attributes) != self._num_attributes and not attributes.keys().isdisjoint(names)

    @property
    def _acts_with_torch(self) -> bool:
        return self._numpy is None or self._replaces(_WITH_TORCH) or any(self._hooks)

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        if self._acts_with_torch:
            return super().compute_outputs(inputs)
        outputs, values = self.forward_numpy(inputs["obs"])
        return outputs, values, []

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        if self._acts_with_torch:
            return super().compute_values(inputs)
        return self.values_numpy(inputs["obs"])

    def forward_numpy(self, observations: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs [B, num_outputs] and values [B], computed with numpy."""
        assert self._numpy is not None
        features = self.features_numpy(observations)
        outputs, hidden = self._policy_numpy(features)
        if not self.shares_layers:
            hidden = self._run_numpy(features, self._numpy["value"][:-1])
        return outputs, self._value_head_numpy(hidden)

    def outputs_numpy(self, observations: Any) -> np.ndarray:
        """Return outputs [B, num_outputs] only."""
        return self._policy_numpy(self.features_numpy(observations))[0]

    def values_numpy(self, observations: Any) -> np.ndarray:
        """Return values [B] only."""
        assert self._numpy is not None
        features = self.features_numpy(observations)
        return self._value_head_numpy(self._run_numpy(features, self._numpy["value"][:-1]))

    def features_numpy(self, observations: Any) -> np.ndarray:
        """Return the first layer's input [B, size], float32, of observations [B, …]."""
        return flatten_numpy(self.obs_space, observations)

    def _policy_numpy(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the outputs and the activations of the last hidden layer."""
        assert self._numpy is not None
        hidden = self._run_numpy(features, self._numpy["policy"][:-1])
        weight, bias = self._numpy["policy"][-1]
        outputs = hidden @ weight
        outputs += bias
        if self._numpy_log_std is not None:
            log_std = np.broadcast_to(self._numpy_log_std, outputs.shape)
            outputs = np.concatenate([outputs, log_std], 1)
        return outputs, hidden

    def _value_head_numpy(self, hidden: np.ndarray) -> np.ndarray:
        assert self._numpy is not None
        weight, bias = self._numpy["value"][-1]
        values = hidden @ weight
        values += bias
        return values[:, 0]

    def _run_numpy(self, hidden: np.ndarray, layers: list[NumpyLayer]) -> np.ndarray:
        """Return activations of the last hidden layer, in memory that a later call in the same
        thread overwrites."""
        activation, matmul = self._numpy_activation, self.matmul
        assert activation is not None
        num_rows = len(hidden)
        key = threading.get_ident(), num_rows
        buffers = self._buffers_numpy.get(key)
        if buffers is None:
            if len(self._buffers_numpy) >= MAX_BUFFERS:
                self._buffers_numpy.clear()
            buffers = [np.empty((num_rows, b.shape[0]), np.float32) for _, b in layers]
            self._buffers_numpy[key] = buffers
        for (weight, bias), out in zip(layers, buffers, strict=True):
            matmul(hidden, weight, out=out)
            out += bias
            hidden = activation(out, out)
        return hidden


def uses_numpy(model: Any) -> TypeGuard[FullyConnectedNetwork]:
    """Return whether a model is a FullyConnectedNetwork that acts with numpy."""
    return isinstance(model, FullyConnectedNetwork) and model.uses_numpy


def _has_methods_of_base(cls: type, names: Sequence[str]) -> bool:
    """Return whether a subclass of FullyConnectedNetwork overrides none of these methods."""
    return all(getattr(cls, name) is getattr(FullyConnectedNetwork, name) for name in names)


def is_plain_linear(module: Any) -> bool:
    """Return whether a module is exactly torch's linear layer: not a subclass, as with
    `torch.nn.utils.parametrizations`, and with a bias."""
    is_linear = type(module) is nn.Linear and "forward" not in vars(module)
    return is_linear and module.bias is not None and not any(hooks_of(module))


def _layer(module: Any) -> Layer:
    """Return a function that computes a layer. Attribute access through nn.Module costs more than
    the arithmetic of a small layer."""
    if not is_plain_linear(module):
        return module
    return partial(F.linear, weight=module.weight, bias=module.bias)


def numpy_views(modules: list[Any]) -> list[NumpyLayer]:
    """Return `numpy_view` of linear layers."""
    return [numpy_view(module.weight, module.bias) for module in modules]


def numpy_view(weight: torch.Tensor, bias: torch.Tensor) -> NumpyLayer:
    """Return a transposed weight and a bias as arrays that share the parameters' memory."""
    return weight.detach().numpy().T, bias.detach().numpy()
