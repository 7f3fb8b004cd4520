"""FlatParameters: all parameters of a network in one vector; FlatAdam: Adam on that vector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flowrl.errors import ConfigError

_FUSED: Any = torch._fused_adam_  # four times faster than separate calls


class FlatParameters:
    """All parameters of a module in one vector, and their gradients in another.

    The optimizer step, the norm of the gradient and copies of the weights are single operations.
    Matrices keep their shape but are stored transposed, so that the forward pass reads them in
    memory order. The `grad` of each parameter is a view of `gradient`, so an optimizer of
    only some parameters works, too.

    Args:
        module: its parameters are replaced by views of `vector`.

    Attributes:
        names, parameters: names and tensors of the module's parameters, in order.
        vector: all parameters [n], float32.
        gradient: their gradients [n], float32.

    Raises:
        ConfigError: a parameter is not float32, or has no shape yet.
    """

    def __init__(self, module: torch.nn.Module):
        named = list(module.named_parameters())
        lazy = [n for n, p in named if isinstance(p, torch.nn.parameter.UninitializedParameter)]
        if lazy:
            raise ConfigError(
                f"model: the parameter {lazy[0]!r} has no shape yet: use layers with given sizes "
                "instead of lazy ones"
            )
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        other = [name for name, p in named if p.dtype != torch.float32]
        if other:
            raise ConfigError(f"model: the parameter {other[0]!r} is not float32")
        size = sum(p.numel() for p in self.parameters)
        device = self.parameters[0].device if named else torch.device("cpu")
        self.vector = torch.nn.Parameter(torch.empty(size, device=device))
        self.gradient = torch.zeros(size, device=device)
        self.vector.grad = self.gradient
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            piece = _piece(self.vector.data[start:end], parameter)
            piece.copy_(parameter.data)
            parameter.data = piece
            parameter.grad = _piece(self.gradient[start:end], parameter)
            start = end
        self._addresses = [p.data_ptr() for p in self.parameters]
        self._gradients = [p.grad for p in self.parameters]

    def part(self, parameters: Iterable[torch.nn.Parameter]) -> slice:
        """Return the slice of the vector that has these parameters, which must be consecutive."""
        ids = {id(p) for p in parameters}
        start = end = None
        position = 0
        for parameter in self.parameters:
            if id(parameter) in ids:
                assert end is None or end == position
                start, end = position if start is None else start, position + parameter.numel()
            position += parameter.numel()
        return slice(start, end)

    def gradient_of(self, by_name: Mapping[str, Any]) -> np.ndarray:
        """Return gradients by parameter name as a vector [n], as `gradient` has them; zeros for
        parameters that are missing or None.

        Raises:
            ValueError: there is no such parameter, or a gradient has another shape.
        """
        unknown = sorted(set(by_name) - set(self.names))
        if unknown:
            raise ValueError(
                f"gradients of {unknown}: the parameters of the model are {self.names}"
            )
        vector, start = torch.zeros(self.gradient.shape), 0
        for name, parameter in zip(self.names, self.parameters, strict=True):
            end = start + parameter.numel()
            gradient = by_name.get(name)
            if gradient is not None:
                tensor = torch.as_tensor(gradient).detach()
                if tensor.shape != parameter.shape:
                    raise ValueError(
                        f"the gradient of {name!r} has the shape {tuple(tensor.shape)}, the "
                        f"parameter {tuple(parameter.shape)}"
                    )
                _piece(vector[start:end], parameter).copy_(tensor)
            start = end
        return vector.numpy()

    def restore_views(self) -> bool:
        """Restore the `grad` views of parameters where they were replaced (as torch's zero_grad()
        does).

        Returns:
            whether the parameters themselves are still views of the vector, which cannot be
            restored.
        """
        parts = zip(self.parameters, self._addresses, self._gradients, strict=True)
        for parameter, address, gradient in parts:
            if parameter.data_ptr() != address:
                return False
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return True

    def take_gradient(self, loss: torch.Tensor) -> None:
        """Write d loss / d parameters into `gradient`; zeros for parameters that are not used."""
        self.gradient.zero_()
        if self.gradient.device.type == "cpu":
            loss.backward()
            return
        # backward() would add each gradient on the stream where its parameter was used first, which
        # a CUDA graph cannot do
        trainable = [p for p in self.parameters if p.requires_grad]
        gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
        pairs: list[tuple[Any, torch.Tensor]] = [
            (p.grad, g) for p, g in zip(trainable, gradients, strict=True) if g is not None
        ]
        torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])

    def take_gradients(
        self, losses: Sequence[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Write the gradient of each loss with respect to its group of parameters into
        `gradient`, zeros elsewhere."""
        self.gradient.zero_()
        for loss, group in zip(losses, groups, strict=True):
            trainable = [p for p in group if p.requires_grad]
            if not trainable:
                continue
            gradients = torch.autograd.grad(loss, trainable, allow_unused=True, retain_graph=True)
            for parameter, gradient in zip(trainable, gradients, strict=True):
                if gradient is not None:
                    assert parameter.grad is not None
                    parameter.grad.add_(gradient)


def _piece(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if parameter.dim() == 2:
        return flat.view(parameter.shape[::-1]).t()
    return flat.view_as(parameter)


def _start_flushing_denormals() -> bool:
    """Make the processor round numbers below 1e-38 to 0; return whether that was off before."""
    is_on = np.float32(1e-40) * np.float32(1.0) == 0.0
    return not is_on and torch.set_flush_denormal(True)


def with_layout_of(
    parameters: Sequence[torch.Tensor], index: int, array: np.ndarray
) -> torch.Tensor:
    """Return a copy of an array with the memory layout of the parameter with this index, which
    torch's fused optimizers need; parameters are stored transposed, see FlatParameters."""
    tensor = torch.from_numpy(np.array(array))
    if index >= len(parameters) or parameters[index].shape != tensor.shape:
        return tensor
    return torch.empty_like(parameters[index].data, dtype=tensor.dtype, device="cpu").copy_(tensor)


def as_tensor_like(value: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return numbers as a tensor of the dtype of another one, on the CPU; None if they are no
    numbers, or complex ones for a real tensor."""
    array = np.asarray(value)
    is_number = array.dtype.kind in ("biufc" if tensor.is_complex() else "biuf")
    return torch.from_numpy(np.array(array)).to(tensor.dtype) if is_number else None


class FlatAdam:
    """Adam (Kingma & Ba 2015, algorithm 1, reordered as in section 2) on one vector.

    A step takes a few torch calls, independent of the number of layers. `param_groups` and
    `state_dict()` have the same structure as those of torch.optim.

    Args:
        flat: the parameters and their gradient.
        lr: learning rate.
        betas: decay of the mean and of the mean square of gradients.
        eps: added to the root of the mean square.
        parts: (slice of the vector, learning rate) for each parameter group; groups whose
            `active` is False are not updated. None for one group of all parameters.
    """

    def __init__(
        self,
        flat: FlatParameters,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        parts: Sequence[tuple[slice, float]] | None = None,
    ):
        slices = [(slice(None), lr)] if parts is None else parts
        self._parts = [_AdamPart(flat, where) for where, _ in slices]
        self.param_groups: list[dict[str, Any]] = [
            {"params": [part.vector], "lr": rate, "betas": betas, "eps": eps, "active": True}
            for part, (_, rate) in zip(self._parts, slices, strict=True)
        ]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set the gradient to 0."""
        for part in self._parts:
            part.gradient.zero_()

    def step(self, skipped: torch.Tensor | None = None) -> None:
        """Update the vector with its gradient.

        Args:
            skipped: 1 to change nothing, 0 to update; float32 without axes. Unlike a condition in
                Python it needs no copy from a GPU. None updates.
        """
        # moments of units whose gradient stays 0 decay to denormal numbers, with which a step would
        # take up to ten times as long
        stops = _start_flushing_denormals()
        try:
            for part, group in zip(self._parts, self.param_groups, strict=True):
                if group["active"]:
                    part.step(group, skipped)
        finally:
            if stops:
                torch.set_flush_denormal(False)

    def refresh_rates(self) -> None:
        """Copy the learning rates of the groups to where the steps on a GPU read them."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.refresh_rate(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        slots = {
            i: {
                "step": part.count.clone(),
                "exp_avg": part.mean,
                "exp_avg_sq": part.square,
            }
            for i, part in enumerate(self._parts)
        }
        groups = [{**group, "params": [i]} for i, group in enumerate(self.param_groups)]
        return {"state": slots, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, part in enumerate(self._parts):
            slot = state["state"].get(i, {})
            if set(slot) != {"step", "exp_avg", "exp_avg_sq"}:
                raise KeyError(
                    f"the state of Adam has step, exp_avg and exp_avg_sq, got {sorted(slot)}"
                )
            part.count.fill_(float(slot["step"]))
            part.mean.copy_(slot["exp_avg"])
            part.square.copy_(slot["exp_avg_sq"])


class _AdamPart:
    """A slice of the vector, and its moments."""

    def __init__(self, flat: FlatParameters, where: slice):
        self.vector = flat.vector.data[where]
        self.vector.grad = self.gradient = flat.gradient[where]
        self.mean = torch.zeros_like(self.vector)
        self.square = torch.zeros_like(self.vector)
        self.count = torch.zeros((), device=self.vector.device)  # steps
        self._rate: float | None = None
        self._rate_on_device = torch.zeros((), device=self.vector.device)

    def refresh_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._rate = rate
            self._rate_on_device.fill_(rate)

    def step(self, group: dict[str, Any], skipped: torch.Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        self.count.add_(1.0)
        _FUSED(
            [self.vector],
            [self.gradient],
            [self.mean],
            [self.square],
            [],
            [self.count],
            lr=group["lr"] if skipped is None else self._rate_on_device,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=skipped,
        )
        if skipped is not None:
            self.count.sub_(skipped)
