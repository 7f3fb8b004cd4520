"""From a policy's losses to the gradient of an update: one or several losses, in parts, in half
precision, clipped; refused where it is not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flowrl.data import SampleBatch
from flowrl.data.sequences import sequence_minibatches
from flowrl.settings import ConfigError

if TYPE_CHECKING:
    from flowrl.policies.torch_policy import TorchPolicy


def take_gradient(policy: TorchPolicy, batch: SampleBatch) -> dict[str, float]:
    """Put the gradient of the loss on a batch into `policy.flat.gradient`; statistics.

    Raises:
        ConfigError: the loss is none, or not one for each optimizer.
        FloatingPointError: a loss or the gradient is not finite.
    """
    policy.noted = []
    rows = policy.config.microbatch_size
    if not rows or batch.count <= rows:
        return _take(policy, batch)
    parts = list(
        sequence_minibatches(batch, rows, shuffle=False)
        if "seq_lens" in batch
        else batch.timeslices(size=rows)
    )
    counts = [policy.tensors(part).count for part in parts]  # rows that losses are means over
    total = torch.zeros_like(policy.flat.gradient)
    means: dict[str, float] = {}
    for part, count in zip(parts, counts, strict=True):
        weight = count / sum(counts)
        for name, value in _take(policy, part).items():
            means[name] = means.get(name, 0.0) + weight * value
        total.add_(policy.flat.gradient, alpha=weight)
    policy.flat.gradient.copy_(total)
    return {**means, "grad_norm": float(torch.linalg.vector_norm(total))}


def _take(policy: TorchPolicy, batch: SampleBatch) -> dict[str, float]:
    policy.stats = {}
    by_hand = policy.gradient_by_hand(policy.tensors(batch))
    named = _by_autograd(policy, batch) if by_hand is None else {"total_loss": by_hand}
    named |= policy.stats
    named |= policy.extra_grad_process()
    named["grad_norm"] = torch.linalg.vector_norm(policy.flat.gradient)
    try:
        stats = _numbers(named, policy.device)
    except (RuntimeError, TypeError, ValueError) as error:
        odd = [name for name, value in named.items() if not _is_number(value)]
        raise ConfigError(
            f"{type(policy).__name__}: statistics are numbers, or tensors of one number without "
            f"axes, but not {', '.join(odd)}: {[named[name] for name in odd]}"
        ) from error
    if not (math.isfinite(stats["grad_norm"]) and math.isfinite(stats["total_loss"])):
        _refuse(policy, stats, batch)
    return stats


def _by_autograd(policy: TorchPolicy, batch: SampleBatch) -> dict[str, torch.Tensor | float]:
    """Put the gradient of `policy.loss` into `policy.flat.gradient`; the losses."""
    if policy.config.precision == "bfloat16":
        with torch.autocast(policy.device.type, torch.bfloat16):
            losses = policy.loss(policy.tensors(batch))
    else:
        losses = policy.loss(policy.tensors(batch))
    given = [losses] if isinstance(losses, torch.Tensor) else losses
    _check_losses(policy, given)
    named: dict[str, torch.Tensor | float] = {}
    if isinstance(losses, torch.Tensor):
        named["total_loss"] = losses
    else:
        named["total_loss"] = torch.stack([loss.detach() for loss in losses]).sum()
        named |= {f"loss_{i}": loss for i, loss in enumerate(losses)}
    whole = len(policy.optimizers) == 1 and len(policy.groups[0]) == len(policy.flat.parameters)
    if whole:
        policy.flat.take_gradient(given[0])
    else:
        policy.flat.take_gradients(given, policy.groups)
    return named


def _check_losses(policy: TorchPolicy, losses: Any) -> None:
    who = type(policy).__name__
    for loss in losses if isinstance(losses, (list, tuple)) else [losses]:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            told = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ConfigError(
                f"{who}: a loss is a tensor of one number that depends on the model's parameters, "
                f"or a list of such, got {told}"
            )
    if len(losses) != len(policy.optimizers):
        raise ConfigError(
            f"{who} gave {len(losses)} losses for {len(policy.optimizers)} optimizers: give a list "
            "of one for each"
        )


def _numbers(named: dict[str, Any], device: torch.device) -> dict[str, float]:
    """The values as numbers; from another device all at once."""
    if device.type == "cpu":
        return {name: _number(value) for name, value in named.items()}
    tensors = [torch.as_tensor(v, dtype=torch.float32, device=device) for v in named.values()]
    return dict(zip(named, torch.stack(tensors).tolist(), strict=True))


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise TypeError("a tensor with axes")
        return float(value.item())
    return float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, (bool, int, float, np.number))


def _refuse(policy: TorchPolicy, stats: dict[str, float], batch: SampleBatch) -> None:
    odd = [name for name, value in stats.items() if not np.isfinite(value)]
    columns = [
        name
        for name, column in batch.items()
        if hasattr(column, "dtype") and column.dtype.kind == "f"
        if not np.isfinite(column).all()
    ]
    cause = f" (not finite in it: {', '.join(columns)})" if columns else ""
    raise FloatingPointError(
        f"{', '.join(odd)} of {type(policy).__name__} not finite on a batch of "
        f"{batch.count} rows{cause}: the update was refused and the weights are unchanged"
    )


def clip_gradient(policy: TorchPolicy, norm: float) -> None:
    """Clip `policy.flat.gradient`, of this norm, as the settings say."""
    clip = policy.config.grad_clip
    if clip is None:
        return
    if policy.config.grad_clip_by == "value":
        policy.flat.gradient.clamp_(-clip, clip)
    elif policy.config.grad_clip_by == "norm":
        for parameter in policy.flat.parameters:
            assert parameter.grad is not None
            own = float(torch.linalg.vector_norm(parameter.grad))
            if own > clip:
                parameter.grad.mul_(clip / own)
    elif norm > clip:
        policy.flat.gradient.mul_(clip / norm)
