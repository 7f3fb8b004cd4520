"""Backprop: gradients of small fully connected networks by numpy, without autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flowrl.policies.models.fcnet import FullyConnectedNetwork


class Backprop:
    """What a FullyConnectedNetwork gives for a batch, and the gradient of a loss on that.

    Autograd costs more than the arithmetic of a small network. Here a policy says itself how its
    loss changes with the network's outputs; the chain rule through the layers is this class's.

    Args:
        network: one whose `has_numpy` is True, without `log_std`; its parameters' gradients stay
            in their memory.
    """

    def __init__(self, network: FullyConnectedNetwork):
        self._network = network
        self._shared = network.value_hidden is network.hidden
        self._tanh = network.model_config.fcnet_activation == "tanh"
        trunks = [network.hidden] if self._shared else [network.hidden, network.value_hidden]
        self._trunks = [[_Layer(linear) for linear in trunk] for trunk in trunks]
        self._heads = [_Layer(network.policy_head), _Layer(network.value_head)]
        self._kept: list[list[np.ndarray]] = []  # inputs of each trunk's layers and of its head

    def forward(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Outputs [B, n] and values [B], and what `backward` needs of them is kept."""
        features = self._network.features_numpy(observations)
        self._kept = [self._run(features, trunk) for trunk in self._trunks]
        outputs, values = self._heads
        return outputs(self._kept[0][-1]), values(self._kept[-1][-1])[:, 0]

    def _run(self, hidden: np.ndarray, trunk: list[_Layer]) -> list[np.ndarray]:
        kept = [hidden]
        for layer in trunk:
            hidden = layer(hidden)
            np.tanh(hidden, out=hidden) if self._tanh else np.maximum(hidden, 0.0, out=hidden)
            kept.append(hidden)
        return kept

    def backward(self, d_outputs: np.ndarray, d_values: np.ndarray | None = None) -> None:
        """Put the gradient of a loss into that of the parameters that it reaches.

        Args:
            d_outputs: how the loss changes with the outputs of the last `forward`, [B, n].
            d_values: and with its values, [B]; None: not at all.
        """
        through = self._heads[0].backward(self._kept[0][-1], d_outputs)
        if d_values is not None:
            other = self._heads[1].backward(self._kept[-1][-1], d_values[:, None])
            if self._shared:
                through += other
            else:
                self._back(other, 1)
        self._back(through, 0)

    def _back(self, gradient: np.ndarray, number: int) -> None:
        kept = self._kept[number]
        for layer, seen, made in zip(
            reversed(self._trunks[number]), reversed(kept[:-1]), reversed(kept), strict=False
        ):
            gradient *= 1.0 - made * made if self._tanh else made > 0
            gradient = layer.backward(seen, gradient)


class _Layer:
    """A linear layer as arrays in the memory of its parameters and of their gradients."""

    def __init__(self, linear: Any):
        weight, bias = linear.weight, linear.bias
        assert weight.grad is not None and bias.grad is not None
        self.weight, self.bias = weight.detach().numpy().T, bias.detach().numpy()
        self.d_weight, self.d_bias = weight.grad.numpy().T, bias.grad.numpy()

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        made: np.ndarray = inputs @ self.weight
        made += self.bias
        return made

    def backward(self, inputs: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Note the gradient of the parameters; that of the inputs."""
        np.dot(inputs.T, gradient, out=self.d_weight)
        gradient.sum(0, out=self.d_bias)
        made: np.ndarray = gradient @ self.weight.T
        return made
