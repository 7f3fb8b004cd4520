"""LossGradient: the gradient of a policy's loss on a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from flowrl.data import SampleBatch
from flowrl.errors import ConfigError, add_note
from flowrl.policies.learning.epochs import Stats, mean_stats
from flowrl.policies.learning.kernels.registry import Kernel, has_replaced_methods
from flowrl.policies.learning.protocols import ProcessGroup, TrainablePolicy
from flowrl.policies.models.tensor_batch import TensorBatch


class LossGradient:
    """Writes the gradient of a policy's loss into `policy.flat.gradient`.

    Args:
        policy: the policy whose loss is differentiated.
        parameters: for each optimizer, the parameters that it updates.
        kernel: computes the gradient instead of autograd; None if there is none.
        split: (batch, rows) -> the microbatches of a batch.

    Attributes:
        row_stats: values per row that the loss recorded, one dict per microbatch.
        num_rows: in a group, rows that this process has learned from in the current batch.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        parameters: Sequence[Sequence[torch.Tensor]],
        kernel: Kernel | None,
        split: Callable[[SampleBatch, int], Iterable[SampleBatch]],
    ):
        self.row_stats: list[dict[str, Any]] = []
        self.num_rows = 0
        self._policy = policy
        self._parameters = parameters
        self._kernel = kernel
        self._uses_kernel = kernel is not None
        self._split = split

    def compute(self, batch: SampleBatch) -> Stats:
        """Write the gradient on a batch; return statistics, among them its `grad_norm`.

        A batch of more than `microbatch_size` rows is split, and the gradients are averaged.

        Raises:
            ConfigError: the policy returned no loss, or not one per optimizer.
            FloatingPointError: a loss or the gradient is not finite.
        """
        self.row_stats = []
        rows = self._policy.config.microbatch_size
        is_whole = not rows or batch.count <= rows
        try:
            return self._compute_microbatch(batch) if is_whole else self._compute_parts(batch, rows)
        finally:
            self.row_stats = [
                {name: _as_array(value) for name, value in one.items()} for one in self.row_stats
            ]

    def _compute_parts(self, batch: SampleBatch, rows: int) -> Stats:
        """Write the average of the gradients of microbatches; return the means of statistics."""
        policy = self._policy
        parts = list(self._split(batch, rows))
        counts = [policy.tensors(part).count for part in parts]  # rows that a loss is a mean over
        total = torch.zeros_like(policy.flat.gradient)
        stats = []
        for part, count in zip(parts, counts, strict=True):
            stats.append(self._compute_microbatch(part))
            total.add_(policy.flat.gradient, alpha=count / sum(counts))
        policy.flat.gradient.copy_(total)
        norm = float(torch.linalg.vector_norm(total))
        return {**mean_stats(stats, counts), "grad_norm": norm}

    def compute_over_group(
        self,
        batch: SampleBatch | None,
        group: ProcessGroup,
        rows_of_process: Callable[[SampleBatch, int, int], SampleBatch | None],
    ) -> Stats:
        """Write the gradient over the rows of all processes.

        Args:
            batch: None if this process has no rows.
            group: the processes.
            rows_of_process: (batch, rank, num_processes) -> the rows of one process, used if all
                processes of the group get the same batch.

        Returns:
            the statistics of this process; only `grad_norm` if it has no rows.

        Raises:
            FloatingPointError: the gradient of some process is not finite.
        """
        policy = self._policy
        if group.splits_rows and batch is not None:
            batch = rows_of_process(batch, group.rank, group.size)
        stats: Stats = {}
        cause: FloatingPointError | None = None
        policy.flat.gradient.zero_()
        if batch is None:
            policy.loss_without_rows()
        else:
            try:
                stats = self.compute(batch)
            except FloatingPointError as error:
                cause = error
                policy.flat.gradient.fill_(torch.nan)  # so that every process raises
        count = 0 if batch is None else policy.tensors(batch).count  # without burn-in rows
        group.average_gradient(policy.flat.gradient, count)
        norm = float(torch.linalg.vector_norm(policy.flat.gradient))
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of {type(policy).__name__} over {group.size} processes is not "
                "finite: the update was refused and the weights are unchanged"
            ) from cause
        self.num_rows += count
        return {**stats, "grad_norm": norm}

    def clip(self, norm: float) -> None:
        """Clip the gradient, whose norm is `norm`, by the settings `grad_clip` and
        `grad_clip_by`."""
        config, flat = self._policy.config, self._policy.flat
        limit = config.grad_clip
        if limit is None:
            return
        if config.grad_clip_by == "value":
            flat.gradient.clamp_(-limit, limit)
        elif config.grad_clip_by == "norm":
            for parameter in flat.parameters:
                assert parameter.grad is not None
                parameter_norm = float(torch.linalg.vector_norm(parameter.grad))
                if parameter_norm > limit:
                    parameter.grad.mul_(limit / parameter_norm)
        elif norm > limit:
            flat.gradient.mul_(limit / norm)

    def clip_on_device(self, norm: torch.Tensor) -> None:
        """Clip the gradient, whose norm is a tensor without axes, without waiting for a GPU."""
        config, flat = self._policy.config, self._policy.flat
        limit = config.grad_clip
        if limit is not None and config.grad_clip_by == "global_norm":
            flat.gradient.mul_((limit / norm).clamp(max=1.0))
        elif limit is not None and config.grad_clip_by == "norm":
            for parameter in flat.parameters:
                assert parameter.grad is not None
                parameter_norm = torch.linalg.vector_norm(parameter.grad)
                parameter.grad.mul_((limit / parameter_norm).clamp(max=1.0))
        elif limit is not None:
            flat.gradient.clamp_(-limit, limit)

    def _compute_microbatch(self, batch: SampleBatch) -> Stats:
        policy = self._policy
        named: dict[str, Any]
        try:
            if self._kernel is None or not self._uses_kernel:
                named = self.differentiate(policy.tensors(batch))
            else:
                policy.stats = {}
                named = {"total_loss": self._kernel(policy.tensors(batch))}
                named |= policy.stats
                named |= policy.extra_grad_process()
        except (IndexError, RuntimeError, ValueError) as error:
            if "obs" in batch and "actions" in batch and (found := policy.find_mismatch(batch)):
                add_note(error, f"in the batch: {found}")
            raise
        named["grad_norm"] = torch.linalg.vector_norm(policy.flat.gradient)
        stats = self._as_floats(named)
        if not (math.isfinite(stats["grad_norm"]) and math.isfinite(stats["total_loss"])):
            self.raise_nonfinite(stats, batch)
        return stats

    def choose_kernel(self) -> None:
        """Use autograd instead of the kernel if the user has frozen parameters, registered hooks or
        replaced methods."""
        policy = self._policy
        self._uses_kernel = self._kernel is not None and (
            not has_replaced_methods(policy)
            and all(network.uses_numpy for network in self._kernel.networks)
            and all(
                p.requires_grad and not (p._backward_hooks or p._post_accumulate_grad_hooks)
                for p in policy.flat.parameters
            )
        )

    def differentiate(self, batch: TensorBatch) -> dict[str, Any]:
        """Write the gradient by autograd; return statistics, numbers and tensors without axes."""
        policy = self._policy
        policy.stats = {}
        if policy.config.precision == "bfloat16":
            # a CUDA graph does not support weights that were cast outside of it
            with torch.autocast(policy.device.type, torch.bfloat16, cache_enabled=False):
                losses = policy.loss(batch)
        else:
            losses = policy.loss(batch)
        each = [losses] if isinstance(losses, torch.Tensor) else losses
        self._check_losses(each)
        named: dict[str, Any] = {}
        if isinstance(losses, torch.Tensor):
            named["total_loss"] = losses
        else:
            named["total_loss"] = torch.stack([loss.detach() for loss in losses]).sum()
            named |= {f"loss_{i}": loss for i, loss in enumerate(losses)}
        if len(each) == 1 and len(self._parameters[0]) == len(policy.flat.parameters):
            policy.flat.take_gradient(each[0])
        else:
            policy.flat.take_gradients(each, self._parameters)
        return {**named, **policy.stats, **policy.extra_grad_process()}

    # -- checks --------------------------------------------------------------------------------

    def _check_losses(self, losses: Any) -> None:
        name = type(self._policy).__name__
        for loss in losses if isinstance(losses, (list, tuple)) else [losses]:
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                is_tensor = isinstance(loss, torch.Tensor)
                found = f"shape {list(loss.shape)}" if is_tensor else repr(loss)
                if is_tensor and loss.numel() == 1:
                    found = "one without a gradient (detached, or computed by numpy or argmax)"
                raise ConfigError(
                    f"{name}: a loss is a tensor of one number that depends on the model's "
                    f"parameters, or a list of such tensors, got {found}"
                )
        if len(losses) != len(self._parameters):
            raise ConfigError(
                f"{name} returned {len(losses)} losses for {len(self._parameters)} optimizers: "
                "return a list with one loss per optimizer"
            )

    def _as_floats(self, named: dict[str, Any]) -> Stats:
        """Return statistics as floats; those on another device in one transfer."""
        device = self._policy.device
        try:
            if device.type == "cpu":
                return {name: _as_float(value) for name, value in named.items()}
            tensors = [
                torch.as_tensor(v, dtype=torch.float32, device=device) for v in named.values()
            ]
            return dict(zip(named, torch.stack(tensors).tolist(), strict=True))
        except (RuntimeError, TypeError, ValueError) as error:
            wrong = [name for name, value in named.items() if not _is_number(value)]
            if not wrong:  # an error of the device
                raise
            value = named[wrong[0]]
            shape = getattr(value, "shape", None)
            got = repr(value) if shape is None else f"one of shape {tuple(shape)}: use its mean()"
            raise ConfigError(
                f"{type(self._policy).__name__}: the statistic {wrong[0]!r} must be a number or a "
                f"tensor without axes, got {got}"
            ) from error

    def raise_nonfinite(self, stats: Stats, batch: SampleBatch) -> None:
        """Raise FloatingPointError for an update by the rows of a batch, with its statistics."""
        names = [name for name, value in stats.items() if not np.isfinite(value)]
        columns = [
            name
            for name, column in batch.items()
            if hasattr(column, "dtype") and column.dtype.kind == "f"
            if not np.isfinite(column).all()
        ]
        cause = f" (not finite in it: {', '.join(columns)})" if columns else ""
        raise FloatingPointError(
            f"{', '.join(names)} of {type(self._policy).__name__} not finite on a batch of "
            f"{batch.count} rows{cause}: the update was refused and the weights are unchanged "
            '(on_nonfinite_update="skip" skips such updates)'
        )


def _as_array(value: Any) -> np.ndarray:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    array: np.ndarray = value.detach().float().cpu().numpy()
    return array


def _as_float(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise TypeError("a tensor with axes")
        return float(value.item())
    return float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, (bool, int, float, np.number))
