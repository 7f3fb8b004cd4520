"""Backpropagation through fully connected networks with numpy, instead of autograd or inside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flowrl.policies.models.fcnet import FullyConnectedNetwork

_threshold_backward = torch.ops.aten.threshold_backward.grad_input

SPARSE_ROWS = 0.75  # skip rows with zero gradient if fewer than this share have another


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
        trunks = [network.hidden] if self._is_shared else [network.hidden, network.value_hidden]
        self._trunks = [[_Layer(linear) for linear in trunk] for trunk in trunks]
        self._heads = [_Layer(network.policy_head), _Layer(network.value_head)]
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
            np.tanh(hidden, out=hidden) if self._is_tanh else torch.from_numpy(hidden).relu_()
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
            gradient = _activation_gradient(gradient, activations[i + 1], self._is_tanh)
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
            gradient = _activation_gradient(gradient, activation[rows], self._is_tanh)
            gradient = layer.input_gradient(gradient)
        return gradient


class _Layer:
    """A linear layer as arrays that share the memory of its parameters and their gradients."""

    def __init__(self, linear: Any):
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
        outputs: np.ndarray = np.matmul(inputs, self.weight, out=out)
        outputs += self.bias
        return outputs

    def backward(self, inputs: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Write the gradient of the parameters; return that of the inputs."""
        self.write_gradient(inputs, gradient)
        return self.input_gradient(gradient)

    def write_gradient(self, inputs: np.ndarray, gradient: np.ndarray) -> None:
        """Write the gradient of the parameters."""
        np.dot(inputs.T, gradient, out=self._d_weight)
        gradient.sum(0, out=self._d_bias)

    def input_gradient(self, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient of the inputs, valid until the next call."""
        result = self._input_buffer(len(gradient))
        if gradient.shape[1] == 1:  # many times faster without BLAS
            return np.multiply(gradient, self.weight.T, out=result)
        return np.matmul(gradient, self.weight.T, out=result)


def _activation_gradient(gradient: np.ndarray, outputs: np.ndarray, is_tanh: bool) -> np.ndarray:
    """Multiply a gradient, in place, by the derivative of the activation with these outputs."""
    if is_tanh:
        gradient *= 1.0 - outputs * outputs
        return gradient
    tensor = torch.from_numpy(gradient)
    _threshold_backward(tensor, torch.from_numpy(outputs), 0, grad_input=tensor)
    return gradient


class _NumpyForward(torch.autograd.Function):
    """A network's forward pass in numpy, and its backward pass for autograd."""

    @staticmethod
    def forward(ctx: Any, features: Any, activation: str, *parameters: Any) -> Any:
        hidden = features.detach().numpy()
        activations, layers = [hidden], list(zip(parameters[::2], parameters[1::2], strict=True))
        for i, (weight, bias) in enumerate(layers):
            hidden = hidden @ weight.detach().numpy().T
            hidden += bias.detach().numpy()
            if i < len(layers) - 1:
                tensor = torch.from_numpy(hidden)  # the same memory
                tensor.tanh_() if activation == "tanh" else tensor.relu_()
                activations.append(hidden)
        ctx.activations, ctx.activation = activations, activation
        ctx.weights = [weight.detach() for weight, _ in layers]
        return torch.from_numpy(hidden)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> Any:
        gradient, needed = d_outputs[0].numpy(), ctx.needs_input_grad
        activations = ctx.activations
        gradients: list[Any] = [None] * len(needed)
        rows = None
        if not any(needed[2:]):  # frozen parameters: leave out rows without a gradient
            rows = np.flatnonzero(gradient.any(1))
            if len(rows) < SPARSE_ROWS * len(gradient):
                gradient, activations = gradient[rows], [one[rows] for one in activations]
            else:
                rows = None
        for i in reversed(range(len(ctx.weights))):
            if needed[2 + 2 * i]:
                gradients[2 + 2 * i] = torch.from_numpy((activations[i].T @ gradient).T)
                gradients[3 + 2 * i] = torch.from_numpy(gradient.sum(0))
            if i or needed[0]:
                weight = ctx.weights[i].numpy()
                # a product with one column is many times faster without BLAS
                gradient = gradient * weight if len(weight) == 1 else gradient @ weight
            if i:
                is_tanh = ctx.activation == "tanh"
                gradient = _activation_gradient(gradient, activations[i], is_tanh)
        if needed[0]:
            d_features = gradient
            if rows is not None:
                d_features = np.zeros((len(d_outputs[0]), gradient.shape[1]), np.float32)
                d_features[rows] = gradient
            gradients[0] = torch.from_numpy(d_features)
        return tuple(gradients)


def outputs_by_numpy(
    network: FullyConnectedNetwork, features: torch.Tensor, frozen: bool = False
) -> torch.Tensor:
    """Return a network's outputs [B, n] for features [B, size], differentiable by autograd.

    Matrix products use numpy, which is faster than torch on many processors; products that no
    gradient needs are skipped.

    Args:
        network: one that numpy computes (see `uses_numpy`).
        features: flat observations.
        frozen: differentiate with respect to the features only, not the parameters.
    """
    layers = [*network.hidden, network.policy_head]
    parameters: list[Any] = [p for layer in layers for p in (layer.weight, layer.bias)]
    if frozen:
        parameters = [p.detach() for p in parameters]
    activation = network.model_config.fcnet_activation
    outputs: Any = _NumpyForward.apply(features, activation, *parameters)
    return outputs
