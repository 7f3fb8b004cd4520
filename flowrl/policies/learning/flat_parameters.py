"""All parameters of a network in one vector, and Adam on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from flowrl.settings import ConfigError

_FUSED: Any = getattr(torch, "_fused_adam_", None)  # one call: a quarter of the time


class FlatParameters:
    """All parameters of a module in one vector, and their gradients in another.

    One optimizer call and one norm for the whole network, and weights that copy in one piece.
    Matrices keep their shape but lie transposed, input by input: the products of the forward pass
    then read them in order of memory. The parameters' `grad` share the memory of `gradient`, so
    optimizers of some of them work, too.

    Raises:
        ConfigError: a parameter is not float32.
    """

    def __init__(self, module: torch.nn.Module):
        named = list(module.named_parameters())
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
        self._places = [p.data_ptr() for p in self.parameters]
        self._gradients = [p.grad for p in self.parameters]

    def part(self, parameters: Iterable[torch.nn.Parameter]) -> slice:
        """Where parameters that follow each other lie in the vector."""
        wanted = {id(p) for p in parameters}
        start = end = None
        place = 0
        for parameter in self.parameters:
            if id(parameter) in wanted:
                assert end is None or end == place
                start, end = place if start is None else start, place + parameter.numel()
            place += parameter.numel()
        return slice(start, end)

    def is_intact(self) -> bool:
        """Whether the parameters still lie in the vector; their gradients are put back into the
        other one, if somebody has taken them out (as torch's zero_grad() does)."""
        parts = zip(self.parameters, self._places, self._gradients, strict=True)
        for parameter, place, gradient in parts:
            if parameter.data_ptr() != place:
                return False
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return True

    def take_gradient(self, loss: torch.Tensor) -> None:
        """Put d loss / d parameters into `gradient`; a parameter that loss misses gets zeros."""
        self.gradient.zero_()
        loss.backward()

    def take_gradients(
        self, losses: Sequence[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Put the gradient of each loss with respect to its group of parameters into `gradient`,
        zeros elsewhere."""
        self.gradient.zero_()
        for loss, group in zip(losses, groups, strict=True):
            wanted = [p for p in group if p.requires_grad]
            found = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True)
            for parameter, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    assert parameter.grad is not None
                    parameter.grad.add_(gradient)


def _piece(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if parameter.dim() == 2:
        return flat.view(parameter.shape[::-1]).t()
    return flat.view_as(parameter)


class FlatAdam:
    """Adam (Kingma & Ba 2015, algorithm 1, in the order of its section 2) on one vector.

    A handful of torch calls per step, whatever the number of layers. `param_groups` and
    `state_dict()` have the shape of torch.optim's.

    Args:
        flat: the parameters and their gradient.
        lr: learning rate.
        betas: decay of the mean and of the mean square of gradients.
        eps: added to the root of the mean square.
        parts: (slice of the vector, learning rate) of parameters that are stepped apart, each with
            a group of its own; one whose `active` is False stays as it is. None: all in one.
    """

    def __init__(
        self,
        flat: FlatParameters,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        parts: Sequence[tuple[slice, float]] | None = None,
    ):
        given = [(slice(None), lr)] if parts is None else parts
        self.param_groups: list[dict[str, Any]] = [
            {"lr": rate, "betas": betas, "eps": eps, "active": True} for _, rate in given
        ]
        self._parts = [_AdamPart(flat, where) for where, _ in given]

    def step(self) -> None:
        """One update of the vector from its gradient."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            if group["active"]:
                part.step(group)

    def state_dict(self) -> dict[str, Any]:
        slots = {
            i: {
                "step": torch.tensor(float(part.steps)),
                "exp_avg": part.mean,
                "exp_avg_sq": part.square,
            }
            for i, part in enumerate(self._parts)
        }
        return {"state": slots, "param_groups": self.param_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, part in enumerate(self._parts):
            slot = state["state"].get(i, {})
            if set(slot) != {"step", "exp_avg", "exp_avg_sq"}:
                raise KeyError(f"Adam keeps step, exp_avg and exp_avg_sq, these are {sorted(slot)}")
            part.steps = int(slot["step"])
            part.count.fill_(float(part.steps))
            part.mean.copy_(slot["exp_avg"])
            part.square.copy_(slot["exp_avg_sq"])


class _AdamPart:
    """A piece of the vector, and what Adam knows of it."""

    def __init__(self, flat: FlatParameters, where: slice):
        self.vector = flat.vector.data[where]
        self.gradient = flat.gradient[where]
        self.mean = torch.zeros_like(self.vector)
        self.square = torch.zeros_like(self.vector)
        self.steps = 0
        self.count = torch.zeros((), device=self.vector.device)  # the same, as torch wants it

    def step(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        self.steps += 1
        if _FUSED is not None:
            self.count.add_(1.0)
            _FUSED(
                [self.vector],
                [self.gradient],
                [self.mean],
                [self.square],
                [],
                [self.count],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=0.0,
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            return
        self.mean.lerp_(self.gradient, 1 - beta1)
        self.square.mul_(beta2).addcmul_(self.gradient, self.gradient, value=1 - beta2)
        correction = math.sqrt(1 - beta2**self.steps)
        size = group["lr"] * correction / (1 - beta1**self.steps)
        root = self.square.sqrt().add_(group["eps"] * correction)
        self.vector.addcdiv_(self.mean, root, value=-size)
