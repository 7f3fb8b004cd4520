"""Gradients of fully connected networks by numpy: without autograd, or within it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from flowrl.policies.models.fcnet import FullyConnectedNetwork


_THROUGH = torch.ops.aten.threshold_backward.grad_input


class Backprop:
    """What a FullyConnectedNetwork gives for a batch, and the gradient of a loss on that.

    Autograd costs more than the arithmetic of a small network. Here a policy says itself how its
    loss changes with the network's outputs; the chain rule through the layers is this class's.
    What is between the layers lies in memory that the next batch writes over: fresh memory for
    each costs a tenth of the time.

    Args:
        network: one whose `uses_numpy` is True, without `log_std`; its parameters' gradients stay
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

    def outputs(self, features: np.ndarray) -> np.ndarray:
        """`forward` of features [B, size], without values."""
        self._kept = [self._run(features, self._trunks[0])]
        return self._heads[0](self._kept[0][-1])

    def _run(self, hidden: np.ndarray, trunk: list[_Layer]) -> list[np.ndarray]:
        kept = [hidden]
        for layer in trunk:
            hidden = layer(hidden, layer.room(1, len(hidden)))
            np.tanh(hidden, out=hidden) if self._tanh else torch.from_numpy(hidden).relu_()
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
        kept, trunk = self._kept[number], self._trunks[number]
        for i in reversed(range(len(trunk))):
            gradient = _sloped(gradient, kept[i + 1], self._tanh)
            trunk[i].note(kept[i], gradient)
            if i:  # nobody asks for the features' own
                gradient = trunk[i].to_inputs(gradient)

    def to_inputs(self, d_outputs: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
        """How a loss changes with the features of these rows [n, size], until the next call; no
        parameter's gradient is touched.

        Args:
            d_outputs: how it changes with their outputs of the last forward pass, [n, outputs].
            rows: numbers [n], or a slice.
        """
        gradient = self._heads[0].to_inputs(d_outputs)
        layers = zip(reversed(self._trunks[0]), reversed(self._kept[0]), strict=False)
        for layer, made in layers:
            gradient = layer.to_inputs(_sloped(gradient, made[rows], self._tanh))
        return gradient


class _Layer:
    """A linear layer as arrays in the memory of its parameters and of their gradients."""

    def __init__(self, linear: Any):
        weight, bias = linear.weight, linear.bias
        assert weight.grad is not None and bias.grad is not None
        self.weight, self.bias = weight.detach().numpy().T, bias.detach().numpy()
        self.d_weight, self.d_bias = weight.grad.numpy().T, bias.grad.numpy()
        self._rooms = [np.empty((0, len(side)), np.float32) for side in (self.weight, self.bias)]

    def room(self, side: int, rows: int) -> np.ndarray:
        """Memory for so many rows of inputs (0) or outputs (1), the same every time."""
        if len(self._rooms[side]) < rows:
            self._rooms[side] = np.empty((rows, self._rooms[side].shape[1]), np.float32)
        return self._rooms[side][:rows]

    def __call__(self, inputs: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        made: np.ndarray = np.matmul(inputs, self.weight, out=out)
        made += self.bias
        return made

    def backward(self, inputs: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Note the gradient of the parameters; that of the inputs."""
        self.note(inputs, gradient)
        return self.to_inputs(gradient)

    def note(self, inputs: np.ndarray, gradient: np.ndarray) -> None:
        """Put the gradient of the parameters into their memory."""
        np.dot(inputs.T, gradient, out=self.d_weight)
        gradient.sum(0, out=self.d_bias)

    def to_inputs(self, gradient: np.ndarray) -> np.ndarray:
        """The gradient of the inputs, until the next call."""
        made = self.room(0, len(gradient))
        if gradient.shape[1] == 1:  # many times faster without BLAS
            return np.multiply(gradient, self.weight.T, out=made)
        return np.matmul(gradient, self.weight.T, out=made)


def _sloped(gradient: np.ndarray, made: np.ndarray, tanh: bool) -> np.ndarray:
    """A gradient through activations that made these outputs; it is written over."""
    if tanh:
        gradient *= 1.0 - made * made
        return gradient
    to = torch.from_numpy(gradient)
    _THROUGH(to, torch.from_numpy(made), 0, grad_input=to)
    return gradient


SPARSE = 0.75  # share of rows with a gradient below which the others are left out


class _Outputs(torch.autograd.Function):
    """A network's outputs by numpy, with what autograd needs to go on from there."""

    @staticmethod
    def forward(ctx: Any, features: Any, activation: str, *parameters: Any) -> Any:
        hidden = features.detach().numpy()
        kept, layers = [hidden], list(zip(parameters[::2], parameters[1::2], strict=True))
        for i, (weight, bias) in enumerate(layers):
            hidden = hidden @ weight.detach().numpy().T
            hidden += bias.detach().numpy()
            if i < len(layers) - 1:
                made = torch.from_numpy(hidden)  # the same memory
                made.tanh_() if activation == "tanh" else made.relu_()
                kept.append(hidden)
        ctx.kept, ctx.activation = kept, activation
        ctx.weights = [weight.detach() for weight, _ in layers]
        return torch.from_numpy(hidden)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> Any:
        gradient, wanted, kept = d_outputs[0].numpy(), ctx.needs_input_grad, ctx.kept
        found: list[Any] = [None] * len(wanted)
        rows = None
        if not any(wanted[2:]):  # rows that nobody asks about are left out
            rows = np.flatnonzero(gradient.any(1))
            if len(rows) < SPARSE * len(gradient):
                gradient, kept = gradient[rows], [one[rows] for one in kept]
            else:
                rows = None
        for i in reversed(range(len(ctx.weights))):
            if wanted[2 + 2 * i]:
                found[2 + 2 * i] = torch.from_numpy((kept[i].T @ gradient).T)
                found[3 + 2 * i] = torch.from_numpy(gradient.sum(0))
            if i or wanted[0]:
                weight = ctx.weights[i].numpy()
                # a product with one column is many times faster without BLAS
                gradient = gradient * weight if len(weight) == 1 else gradient @ weight
            if i:
                gradient = _sloped(gradient, kept[i], ctx.activation == "tanh")
        if wanted[0]:
            whole = gradient
            if rows is not None:
                whole = np.zeros((len(d_outputs[0]), gradient.shape[1]), np.float32)
                whole[rows] = gradient
            found[0] = torch.from_numpy(whole)
        return tuple(found)


def outputs_by_numpy(
    network: FullyConnectedNetwork, features: torch.Tensor, frozen: bool = False
) -> torch.Tensor:
    """Outputs [B, n] of a network that numpy computes, for features [B, size], with gradients.

    Its products of matrices are faster than torch's on many processors, and those whose result
    nobody asks for are left out.

    Args:
        frozen: the gradient goes to the features alone.
    """
    layers = [*network.hidden, network.policy_head]
    parameters: list[Any] = [p for layer in layers for p in (layer.weight, layer.bias)]
    if frozen:
        parameters = [p.detach() for p in parameters]
    activation = network.model_config.fcnet_activation
    made: Any = _Outputs.apply(features, activation, *parameters)
    return made
