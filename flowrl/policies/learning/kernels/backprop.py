"""Backpropagation through fully connected networks with numpy, instead of autograd."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.policies.models.fcnet import NUMPY_ACTIVATIONS, FullyConnectedNetwork
from flowrl.policies.models.matrix_products import Matmul
from flowrl.policies.models.numpy_forward import activation_gradient


class Backprop:
    """Forward and backward passes of a network in numpy.

    Autograd costs more than the arithmetic of a small network. Here the caller computes the
    gradient of its loss with respect to the outputs, and `backward` applies the chain rule.
    Activations are kept in buffers that the next batch overwrites, because allocating them for
    each batch takes a tenth of the time.

    Args:
        network: one that numpy computes (see `uses_numpy`), without `log_std`. Its parameters and
            their gradients must stay at their addresses.
    """

    def __init__(self, network: FullyConnectedNetwork):
        self._network = network
        self._is_shared = network.value_hidden is network.hidden
        self._is_tanh = network.model_config.fcnet_activation == "tanh"
        self._activation = NUMPY_ACTIVATIONS[network.model_config.fcnet_activation]
        trunks = [network.hidden] if self._is_shared else [network.hidden, network.value_hidden]
        matmul = network.matmul
        self._trunks = [[_Layer(linear, matmul) for linear in trunk] for trunk in trunks]
        self._heads = [_Layer(head, matmul) for head in (network.policy_head, network.value_head)]
        # of each trunk: the inputs of its layers, and of its head
        self._activations: list[list[np.ndarray]] = []

    def forward(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return outputs [B, n] and values [B], and keep the activations for `backward`."""
        features = self._network.features_numpy(observations)
        self._activations = [self._run(features, trunk) for trunk in self._trunks]
        policy_head, value_head = self._heads
        values = value_head(self._activations[-1][-1])[:, 0]
        return policy_head(self._activations[0][-1]), values

    def outputs(self, features: np.ndarray) -> np.ndarray:
        """Return the outputs [B, n] for features [B, size], and keep the activations."""
        self._activations = [self._run(features, self._trunks[0])]
        return self._heads[0](self._activations[0][-1])

    def _run(self, hidden: np.ndarray, trunk: list[_Layer]) -> list[np.ndarray]:
        activations = [hidden]
        for layer in trunk:
            hidden = layer(hidden, out=layer.output_buffer(len(hidden)))
            self._activation(hidden, hidden)
            activations.append(hidden)
        return activations

    def backward(self, d_outputs: np.ndarray, d_values: np.ndarray | None = None) -> None:
        """Write the gradient of a loss into the `grad` of the parameters that it depends on.

        Args:
            d_outputs: gradient with respect to the outputs of the last forward pass, [B, n].
            d_values: gradient with respect to its values, [B]; None if the loss does not use them.
        """
        gradient = self._heads[0].backward(self._activations[0][-1], d_outputs)
        if d_values is not None:
            of_values = self._heads[1].backward(self._activations[-1][-1], d_values[:, None])
            if self._is_shared:
                gradient += of_values
            else:
                self._backward_trunk(of_values, 1)
        self._backward_trunk(gradient, 0)

    def _backward_trunk(self, gradient: np.ndarray, number: int) -> None:
        activations, trunk = self._activations[number], self._trunks[number]
        for i in reversed(range(len(trunk))):
            gradient = activation_gradient(gradient, activations[i + 1], self._is_tanh)
            trunk[i].write_gradient(activations[i], gradient)
            if i:  # the gradient of the features is not needed
                gradient = trunk[i].input_gradient(gradient)

    def input_gradient(self, d_outputs: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
        """Return the gradient with respect to the features of some rows, [n, size].

        The result is valid until the next call. Gradients of parameters do not change.

        Args:
            d_outputs: gradient with respect to these rows' outputs, [n, outputs].
            rows: of the last forward pass: numbers [n], or a slice.
        """
        gradient = self._heads[0].input_gradient(d_outputs)
        layers = zip(reversed(self._trunks[0]), reversed(self._activations[0]), strict=False)
        for layer, activation in layers:
            gradient = activation_gradient(gradient, activation[rows], self._is_tanh)
            gradient = layer.input_gradient(gradient)
        return gradient


class _Layer:
    """A linear layer as arrays that share the memory of its parameters and their gradients."""

    def __init__(self, linear: Any, matmul: Matmul):
        self._matmul = matmul
        weight, bias = linear.weight, linear.bias
        assert weight.grad is not None and bias.grad is not None
        self.weight, self.bias = weight.detach().numpy().T, bias.detach().numpy()
        self._d_weight, self._d_bias = weight.grad.numpy().T, bias.grad.numpy()
        self._inputs = np.empty((0, len(self.weight)), np.float32)
        self._outputs = np.empty((0, len(self.bias)), np.float32)

    def output_buffer(self, rows: int) -> np.ndarray:
        """Return memory for outputs [rows, n], the same at every call."""
        if len(self._outputs) < rows:
            self._outputs = np.empty((rows, self._outputs.shape[1]), np.float32)
        return self._outputs[:rows]

    def _input_buffer(self, rows: int) -> np.ndarray:
        if len(self._inputs) < rows:
            self._inputs = np.empty((rows, self._inputs.shape[1]), np.float32)
        return self._inputs[:rows]

    def __call__(self, inputs: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty((len(inputs), len(self.bias)), np.float32)
        outputs = self._matmul(inputs, self.weight, out=out)
        outputs += self.bias
        return outputs

    def backward(self, inputs: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Write the gradient of the parameters; return that of the inputs."""
        self.write_gradient(inputs, gradient)
        return self.input_gradient(gradient)

    def write_gradient(self, inputs: np.ndarray, gradient: np.ndarray) -> None:
        """Write the gradient of the parameters."""
        self._matmul(inputs.T, gradient, out=self._d_weight)
        np.add.reduce(gradient, 0, out=self._d_bias)

    def input_gradient(self, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient of the inputs, valid until the next call."""
        result = self._input_buffer(len(gradient))
        if gradient.shape[1] == 1:  # many times faster without BLAS
            return np.multiply(gradient, self.weight.T, out=result)
        return self._matmul(gradient, self.weight.T, out=result)
