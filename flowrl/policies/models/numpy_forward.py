"""Forward passes of fully connected networks in numpy, differentiable by autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.matrix_products import Matmul

_threshold_backward = torch.ops.aten.threshold_backward.grad_input

SPARSE_ROWS = 0.75  # below this share of rows with a nonzero gradient, compute with these rows only


class _NumpyForward(torch.autograd.Function):
    """A network's forward pass in numpy, and its backward pass for autograd."""

    @staticmethod
    def forward(ctx: Any, features: Any, activation: str, matmul: Matmul, *parameters: Any) -> Any:
        hidden = features.detach().numpy()
        activations, layers = [hidden], list(zip(parameters[::2], parameters[1::2], strict=True))
        for i, (weight, bias) in enumerate(layers):
            out = np.empty((len(hidden), len(bias)), np.float32)
            hidden = matmul(hidden, weight.detach().numpy().T, out=out)
            hidden += bias.detach().numpy()
            if i < len(layers) - 1:
                tensor = torch.from_numpy(hidden)  # the same memory
                tensor.tanh_() if activation == "tanh" else tensor.relu_()
                activations.append(hidden)
        ctx.activations, ctx.activation, ctx.matmul = activations, activation, matmul
        ctx.weights = [weight.detach() for weight, _ in layers]
        return torch.from_numpy(hidden)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> Any:
        gradient, needed = d_outputs[0].numpy(), ctx.needs_input_grad
        activations, matmul = ctx.activations, ctx.matmul
        gradients: list[Any] = [None] * len(needed)
        rows = None
        if not any(needed[3:]):  # frozen parameters: leave out rows without a gradient
            rows = np.flatnonzero(gradient.any(1))
            if len(rows) < SPARSE_ROWS * len(gradient):
                gradient, activations = gradient[rows], [one[rows] for one in activations]
            else:
                rows = None
        for i in reversed(range(len(ctx.weights))):
            if needed[3 + 2 * i]:
                d_weight = np.empty((activations[i].shape[1], gradient.shape[1]), np.float32)
                matmul(activations[i].T, gradient, out=d_weight)
                gradients[3 + 2 * i] = torch.from_numpy(d_weight.T)
                gradients[4 + 2 * i] = torch.from_numpy(gradient.sum(0))
            if i or needed[0]:
                weight = ctx.weights[i].numpy()
                if len(weight) == 1:  # many times faster without BLAS
                    gradient = gradient * weight
                else:
                    out = np.empty((len(gradient), weight.shape[1]), np.float32)
                    gradient = matmul(gradient, weight, out=out)
            if i:
                is_tanh = ctx.activation == "tanh"
                gradient = activation_gradient(gradient, activations[i], is_tanh)
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

    Products that no gradient needs are skipped.

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
    outputs: Any = _NumpyForward.apply(features, activation, network.matmul, *parameters)
    return outputs


def activation_gradient(gradient: np.ndarray, outputs: np.ndarray, is_tanh: bool) -> np.ndarray:
    """Multiply a gradient, in place, by the derivative of the activation with these outputs."""
    if is_tanh:
        gradient *= 1.0 - outputs * outputs
        return gradient
    tensor = torch.from_numpy(gradient)
    _threshold_backward(tensor, torch.from_numpy(outputs), 0, grad_input=tensor)
    return gradient
