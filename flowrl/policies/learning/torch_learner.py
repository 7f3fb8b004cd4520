"""TorchLearner: the learning part of a TorchPolicy: gradients, optimizer steps, minibatches."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from flowrl.data import SampleBatch
from flowrl.data.sequences import sequence_minibatches, with_burn_in, without_padding
from flowrl.policies.learning.epochs import run_epochs, shuffled_minibatches
from flowrl.policies.learning.flat_parameters import FlatParameters
from flowrl.policies.learning.kernels.registry import find_kernel
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.tensor_batch import TensorBatch
from flowrl.policies.schedules import value_at
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.settings import ConfigError

Stats = dict[str, float]


class ProcessGroup(Protocol):
    """Processes that learn together; see flowrl.learners.process_group."""

    rank: int
    size: int
    shares_rows: bool

    def average_gradient(self, gradient: torch.Tensor, rows: int) -> int: ...
    def mean(self, value: float | None) -> float | None: ...
    def std_mean(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def pad_minibatches(self, minibatches: Iterator[Any]) -> Iterator[Any]: ...
    def close(self) -> None: ...


class TrainablePolicy(Protocol):
    """What a learner needs of a policy: the network, the loss, and hooks. See TorchPolicy."""

    config: Any
    model: ModelV2
    flat: FlatParameters
    device: torch.device
    shuffle_rng: np.random.Generator
    stats: dict[str, torch.Tensor | float]
    row_stats: dict[str, np.ndarray]
    timestep: int
    version: int

    @property
    def is_recurrent(self) -> bool: ...
    def tensors(self, batch: SampleBatch) -> TensorBatch: ...
    def loss(self, batch: TensorBatch) -> torch.Tensor | Sequence[torch.Tensor]: ...
    def loss_without_rows(self) -> None: ...
    def make_optimizer(self) -> Any: ...
    def extra_grad_process(self) -> dict[str, torch.Tensor]: ...
    def learn_on_batch(self, batch: SampleBatch) -> Stats: ...
    def end_epoch(self, batch: SampleBatch, stats: Stats) -> bool: ...
    def end_learning(self, batch: SampleBatch, stats: Stats) -> Stats: ...


class TorchLearner:
    """Updates a policy's network by its loss.

    The gradient comes from autograd, or from an accelerated kernel where one is proved equal to
    the policy's loss (see flowrl.policies.learning.kernels). Several processes may learn together:
    then gradients are averaged over their `process_group`.

    Args:
        policy: the policy; its `make_optimizer` returns one optimizer or several.

    Attributes:
        optimizers: one for each loss.
        num_updates: optimizer steps so far.
        num_skipped_updates: updates left out because they were not finite.
        process_group: the processes that learn together; None if this process learns alone.
        kernel: computes the gradient instead of autograd; None if there is none.
        rng: random stream of the loss, such as noise on actions.

    Raises:
        ConfigError: `make_optimizer` returned something else, or two optimizers share parameters.
    """

    def __init__(self, policy: TrainablePolicy):
        self.policy = policy
        # apart from shuffle_rng, from which all processes of a group draw the same minibatches
        self.rng = random_stream(policy.config.seed, "policy", "learning")
        optimizers = policy.make_optimizer()
        self.optimizers: list[Any] = (
            list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        )
        if not self.optimizers or not all(hasattr(o, "param_groups") for o in self.optimizers):
            raise ConfigError(
                f"make_optimizer must return an optimizer or several, got {optimizers!r}"
            )
        self.parameters = [self._parameters_of(optimizer) for optimizer in self.optimizers]
        ids = [id(p) for parameters in self.parameters for p in parameters]
        if len(set(ids)) < len(ids):
            raise ConfigError(f"{type(policy).__name__}: two optimizers have the same parameters")
        self._initial_lrs = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self._model = policy.model
        self._buffers = list(policy.model.buffers())
        dropout = any("Dropout" in type(module).__name__ for module in policy.model.modules())
        self._draws_from_torch = dropout
        if policy.config.compile:
            policy.model.compile_for_learning()
        self.process_group: ProcessGroup | None = None
        self.num_updates = 0
        self.num_skipped_updates = 0
        self._row_stats: list[dict[str, np.ndarray]] = []  # of the current update, by microbatch
        self._epoch_row_stats: list[dict[str, np.ndarray]] | None = None  # of all minibatches
        self.kernel = find_kernel(policy, self.has_single_optimizer)

    def _parameters_of(self, optimizer: Any) -> list[torch.Tensor]:
        flat = self.policy.flat
        parameters = [p for group in optimizer.param_groups for p in group.get("params", ())]
        if not parameters or any(p is flat.vector for p in parameters):
            return list(flat.parameters)
        known = {id(p) for p in flat.parameters}
        if not all(id(p) in known for p in parameters):
            raise ConfigError("make_optimizer: an optimizer has parameters that the model lacks")
        return parameters

    @property
    def has_single_optimizer(self) -> bool:
        """Whether one optimizer has all parameters of the network."""
        return len(self.optimizers) == 1 and len(self.parameters[0]) == len(
            self.policy.flat.parameters
        )

    # -- batches -------------------------------------------------------------------------------

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        """Return the batch that minibatches are cut from: unpadded, with burn-in rows."""
        model = self.policy.config.model
        batch = without_padding(batch)
        if not model.burn_in or not self.policy.is_recurrent or "loss_mask" in batch:
            return batch
        return with_burn_in(batch, model.max_seq_len, model.burn_in)

    def minibatches(self, batch: SampleBatch, size: int) -> Iterator[SampleBatch]:
        """Yield the rows of a batch in random order, `size` at a time; the last may be smaller.

        Sequences stay whole. A minibatch of all rows keeps their order.
        """
        yield from shuffled_minibatches(batch, size, self.policy.shuffle_rng)

    def share_of(self, batch: SampleBatch, rank: int, size: int) -> SampleBatch | None:
        """Return the rows that one of several processes learns from, whole sequences if there are
        any; None if there are fewer rows than processes."""
        if "seq_lens" in batch:
            sequences = list(sequence_minibatches(batch, 1, shuffle=False))
            cuts = [len(sequences) * number // size for number in range(size + 1)]
            begin, end = list(itertools.pairwise(cuts))[rank]
            return SampleBatch.concat_samples(sequences[begin:end]) if end > begin else None
        begin, end = (batch.count * number // size for number in (rank, rank + 1))
        return batch[begin:end] if end > begin else None

    # -- updates -------------------------------------------------------------------------------

    def update_minibatches(self, batch: SampleBatch, num_sgd_iter: int, size: int) -> Stats:
        """Update the policy by minibatches; see Policy.learn_on_minibatches."""
        policy = self.policy
        skipped = self.num_skipped_updates
        row_stats = self._epoch_row_stats = []
        try:
            batch = self.prepare_batch(batch)
            stats = run_epochs(policy, self._minibatches_of_group, batch, num_sgd_iter, size)
        finally:
            self._epoch_row_stats = None
        policy.row_stats = _concatenate(row_stats)
        stats["cur_lr"] = float(self.optimizers[0].param_groups[0]["lr"])
        if policy.config.on_nonfinite_update == "skip":
            stats["num_skipped_updates"] = float(self.num_skipped_updates - skipped)
        return stats

    def _minibatches_of_group(self, batch: SampleBatch, size: int) -> Iterator[Any]:
        group, minibatches = self.process_group, self.minibatches(batch, size)
        if group is None or group.shares_rows:
            return minibatches
        return group.pad_minibatches(minibatches)

    def update(self, batch: SampleBatch | None) -> Stats:
        """Make one optimizer step.

        Args:
            batch: None for a process of a group that has no rows left.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; the weights are unchanged.
        """
        return self.skip_nonfinite(self._update, batch)

    def _update(self, batch: SampleBatch | None) -> Stats:
        self.check_model()
        if self.process_group is None:
            assert batch is not None
            stats = self._compute_gradient(batch)
        else:
            stats = self._compute_averaged_gradient(batch, self.process_group)
        self.step(stats["grad_norm"])
        if len(stats) == 1:
            return {}  # this process had no rows
        if self._epoch_row_stats is None:
            self.policy.row_stats = _concatenate(self._row_stats)
        else:
            self._epoch_row_stats += self._row_stats
        return stats

    def skip_nonfinite(self, update: Callable[[Any], Stats], batch: SampleBatch | None) -> Stats:
        """Return update(batch); if it is not finite, undo it, and raise or skip as the setting
        `on_nonfinite_update` says."""
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers]
        try:
            with self._seeded():
                return update(batch if batch is None else self.prepare_batch(batch))
        except FloatingPointError:
            _restore(buffers)
            if self.policy.config.on_nonfinite_update == "raise":
                raise
            self.num_skipped_updates += 1
            return {}

    def step(self, grad_norm: float) -> None:
        """Clip the gradient, which has this norm, and step the optimizers."""
        self.clip_gradient(grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.num_updates += 1
        self.policy.version += 1

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, Stats]:
        """Return the gradient [parameters] of the loss, and statistics; nothing changes."""
        flat = self.policy.flat
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers]
        try:
            with self._seeded():
                self.check_model()
                stats = self._compute_gradient(self.prepare_batch(batch))
        except FloatingPointError:
            if self.policy.config.on_nonfinite_update == "raise":
                raise
            stats = {}
            flat.gradient.fill_(torch.nan)  # apply_gradients skips it
        finally:
            _restore(buffers)
        self.policy.row_stats = _concatenate(self._row_stats)
        return flat.gradient.cpu().numpy().copy(), stats

    def apply_gradients(self, gradients: np.ndarray) -> None:
        """Make one optimizer step with a gradient [parameters].

        Raises:
            ValueError: it has another shape.
            FloatingPointError: it is not finite; the weights are unchanged.
        """
        flat = self.policy.flat
        if gradients.shape != tuple(flat.gradient.shape):
            raise ValueError(
                f"a gradient of shape {gradients.shape} for {len(flat.gradient)} parameters"
            )
        norm = float(np.linalg.norm(gradients))
        if not np.isfinite(norm):
            if self.policy.config.on_nonfinite_update == "raise":
                raise FloatingPointError("the gradient is not finite: the weights are unchanged")
            self.num_skipped_updates += 1
            return
        flat.gradient.copy_(torch.from_numpy(np.array(gradients)))
        self.step(norm)

    # -- gradients -----------------------------------------------------------------------------

    def _compute_gradient(self, batch: SampleBatch) -> Stats:
        """Write the gradient of the loss into `policy.flat.gradient`; return statistics.

        A batch of more than `microbatch_size` rows is cut, and the gradients are averaged.

        Raises:
            ConfigError: the policy returned no loss, or not one per optimizer.
            FloatingPointError: a loss or the gradient is not finite.
        """
        self._row_stats = []
        policy = self.policy
        rows = policy.config.microbatch_size
        if not rows or batch.count <= rows:
            return self._compute_microbatch_gradient(batch)
        parts = list(
            sequence_minibatches(batch, rows, shuffle=False)
            if "seq_lens" in batch
            else batch.timeslices(size=rows)
        )
        counts = [policy.tensors(part).count for part in parts]  # rows that a loss is a mean over
        total = torch.zeros_like(policy.flat.gradient)
        means: Stats = {}
        for part, count in zip(parts, counts, strict=True):
            weight = count / sum(counts)
            for name, value in self._compute_microbatch_gradient(part).items():
                means[name] = means.get(name, 0.0) + weight * value
            total.add_(policy.flat.gradient, alpha=weight)
        policy.flat.gradient.copy_(total)
        return {**means, "grad_norm": float(torch.linalg.vector_norm(total))}

    def _compute_microbatch_gradient(self, batch: SampleBatch) -> Stats:
        policy = self.policy
        policy.stats = {}
        named: dict[str, Any]
        if self.kernel is None:
            named = self._compute_gradient_by_autograd(batch)
        else:
            named = {"total_loss": self.kernel(policy.tensors(batch))}
        named |= policy.stats
        named |= policy.extra_grad_process()
        named["grad_norm"] = torch.linalg.vector_norm(policy.flat.gradient)
        stats = self._as_floats(named)
        if not (math.isfinite(stats["grad_norm"]) and math.isfinite(stats["total_loss"])):
            self._raise_nonfinite(stats, batch)
        return stats

    def _compute_gradient_by_autograd(self, batch: SampleBatch) -> dict[str, torch.Tensor]:
        policy = self.policy
        if policy.config.precision == "bfloat16":
            with torch.autocast(policy.device.type, torch.bfloat16):
                losses = policy.loss(policy.tensors(batch))
        else:
            losses = policy.loss(policy.tensors(batch))
        each = [losses] if isinstance(losses, torch.Tensor) else losses
        self._check_losses(each)
        named: dict[str, torch.Tensor] = {}
        if isinstance(losses, torch.Tensor):
            named["total_loss"] = losses
        else:
            named["total_loss"] = torch.stack([loss.detach() for loss in losses]).sum()
            named |= {f"loss_{i}": loss for i, loss in enumerate(losses)}
        if self.has_single_optimizer:
            policy.flat.take_gradient(each[0])
        else:
            policy.flat.take_gradients(each, self.parameters)
        return named

    def _compute_averaged_gradient(self, batch: SampleBatch | None, group: ProcessGroup) -> Stats:
        """Write the gradient over all processes' rows into `policy.flat.gradient`; return the
        statistics of this process, only `grad_norm` if it has no rows."""
        policy = self.policy
        if group.shares_rows and batch is not None:
            batch = self.share_of(batch, group.rank, group.size)
        stats: Stats = {}
        policy.flat.gradient.zero_()
        if batch is None:
            policy.loss_without_rows()
        else:
            try:
                stats = self._compute_gradient(batch)
            except FloatingPointError:  # so that every process notices
                policy.flat.gradient.fill_(torch.nan)
        group.average_gradient(policy.flat.gradient, 0 if batch is None else batch.count)
        norm = float(torch.linalg.vector_norm(policy.flat.gradient))
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of {type(policy).__name__} over {group.size} processes is not "
                "finite: the update was refused and the weights are unchanged"
            )
        return {**stats, "grad_norm": norm}

    def clip_gradient(self, norm: float) -> None:
        """Clip the gradient, which has this norm, as the settings say."""
        config, flat = self.policy.config, self.policy.flat
        clip = config.grad_clip
        if clip is None:
            return
        if config.grad_clip_by == "value":
            flat.gradient.clamp_(-clip, clip)
        elif config.grad_clip_by == "norm":
            for parameter in flat.parameters:
                assert parameter.grad is not None
                parameter_norm = float(torch.linalg.vector_norm(parameter.grad))
                if parameter_norm > clip:
                    parameter.grad.mul_(clip / parameter_norm)
        elif norm > clip:
            flat.gradient.mul_(clip / norm)

    # -- for losses ----------------------------------------------------------------------------

    def record_row_stats(self, row_stats: dict[str, np.ndarray]) -> None:
        """Keep values per row of the current update; see TorchPolicy.record_row_stats."""
        self._row_stats.append(row_stats)

    def mean_over_group(self, value: float | None) -> float | None:
        """Return the mean of a number over the processes that have it, equal on all of them."""
        return value if self.process_group is None else self.process_group.mean(value)

    def standardize(self, values: torch.Tensor) -> torch.Tensor:
        """Scale the values [B] of a minibatch, over all processes, to mean 0 and standard
        deviation 1."""
        if self.process_group is not None:
            std, mean = self.process_group.std_mean(values)
        elif len(values) < 2:
            return values
        else:
            std, mean = torch.std_mean(values)
        return (values - mean) / (std + 1e-8)

    def columns_read(self, batch: SampleBatch) -> set[str] | None:
        """Return the columns that a call of the loss and the hooks reads; None if it fails."""
        policy: Any = self.policy
        tracked = TrackedBatch(batch)
        group, self.process_group = self.process_group, None
        state, torch_rng = policy.get_state(), torch.get_rng_state()
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers]
        try:
            if policy.config.model.burn_in:
                return None
            policy.loss(policy.tensors(tracked))
            policy.end_epoch(tracked, {})
            policy.end_learning(tracked, {})
        except Exception:
            return None  # the error shows when the policy learns
        finally:
            self.process_group = group
            policy.set_state(state)
            torch.set_rng_state(torch_rng)
            _restore(buffers)
            policy.stats = {}
        return tracked.read

    # -- schedules and state -------------------------------------------------------------------

    def follow_schedules(self) -> None:
        """Set learning rates to their values at the policy's timestep."""
        lr, timestep = self.policy.config.lr, self.policy.timestep
        first, now = value_at(lr, 0), value_at(lr, timestep)
        for optimizer, initial in zip(self.optimizers, self._initial_lrs, strict=True):
            for group, rate in zip(optimizer.param_groups, initial, strict=True):
                if rate == first:  # groups with another rate keep it
                    group["lr"] = now

    def state_dict(self) -> dict[str, Any]:
        optimizers = [
            {
                str(index): {
                    name: v.cpu().numpy().copy() if isinstance(v, torch.Tensor) else v
                    for name, v in slot.items()
                }
                for index, slot in optimizer.state_dict()["state"].items()
            }
            for optimizer in self.optimizers
        ]
        return {
            "optimizers": optimizers,
            "lrs": [[group["lr"] for group in o.param_groups] for o in self.optimizers],
            "num_updates": self.num_updates,
            "num_skipped_updates": self.num_skipped_updates,
            "rng": stream_state(self.rng),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            KeyError: an entry is missing.
            ValueError: it is the state of other optimizers.
        """
        saved = zip(self.optimizers, state["optimizers"], state["lrs"], strict=True)
        for i, (optimizer, slots, lrs) in enumerate(saved):
            whole = optimizer.state_dict()
            whole["state"] = {
                int(index): {
                    name: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v
                    for name, v in slot.items()
                }
                for index, slot in slots.items()
            }
            try:
                optimizer.load_state_dict(whole)
            except (KeyError, TypeError, RuntimeError) as error:
                kind = type(optimizer).__name__
                raise ValueError(
                    f"the state does not fit optimizer {i}, a {kind}: {error}"
                ) from error
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr
        self.num_updates = int(state["num_updates"])
        self.num_skipped_updates = int(state["num_skipped_updates"])
        restore_stream(self.rng, state["rng"])

    # -- checks --------------------------------------------------------------------------------

    def check_model(self) -> None:
        """Raise ConfigError if the policy's model is not the one that the optimizers update."""
        policy = self.policy
        if policy.flat.is_intact() and self._model is policy.model:
            return
        raise ConfigError(
            f"{type(policy).__name__}: the model or the memory of its parameters was replaced "
            "after the policy was made, so learning would not reach it: make the model and its "
            "initial weights in make_model(), or use set_weights()"
        )

    def _check_losses(self, losses: Any) -> None:
        name = type(self.policy).__name__
        for loss in losses if isinstance(losses, (list, tuple)) else [losses]:
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                is_tensor = isinstance(loss, torch.Tensor)
                found = f"shape {list(loss.shape)}" if is_tensor else repr(loss)
                raise ConfigError(
                    f"{name}: a loss is a tensor of one number that depends on the model's "
                    f"parameters, or a list of such tensors, got {found}"
                )
        if len(losses) != len(self.optimizers):
            raise ConfigError(
                f"{name} returned {len(losses)} losses for {len(self.optimizers)} optimizers: "
                "return a list with one loss per optimizer"
            )

    def _as_floats(self, named: dict[str, Any]) -> Stats:
        """Return statistics as floats; those on another device in one transfer."""
        device = self.policy.device
        try:
            if device.type == "cpu":
                return {name: _as_float(value) for name, value in named.items()}
            tensors = [
                torch.as_tensor(v, dtype=torch.float32, device=device) for v in named.values()
            ]
            return dict(zip(named, torch.stack(tensors).tolist(), strict=True))
        except (RuntimeError, TypeError, ValueError) as error:
            wrong = [name for name, value in named.items() if not _is_number(value)]
            raise ConfigError(
                f"{type(self.policy).__name__}: statistics are numbers or tensors without axes, "
                f"but {', '.join(wrong)} is {[named[name] for name in wrong]}"
            ) from error

    def _raise_nonfinite(self, stats: Stats, batch: SampleBatch) -> None:
        names = [name for name, value in stats.items() if not np.isfinite(value)]
        columns = [
            name
            for name, column in batch.items()
            if hasattr(column, "dtype") and column.dtype.kind == "f"
            if not np.isfinite(column).all()
        ]
        cause = f" (not finite in it: {', '.join(columns)})" if columns else ""
        raise FloatingPointError(
            f"{', '.join(names)} of {type(self.policy).__name__} not finite on a batch of "
            f"{batch.count} rows{cause}: the update was refused and the weights are unchanged"
        )

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed torch's random numbers, for dropout, from the policy's seed."""
        if not self._draws_from_torch:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(int(self.policy.shuffle_rng.integers(2**63)))
            yield


class TrackedBatch(SampleBatch):
    """A batch that records which of its columns are read."""

    read: set[str]

    def __init__(self, batch: SampleBatch):
        dict.__init__(self, batch.stored())
        vars(self).update(vars(batch))
        self._num_rows = batch.count
        self.read = set()

    @property
    def count(self) -> int:
        return self._num_rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.read.add(key)
        return super().__contains__(key)

    def stored(self) -> Any:
        """Return all columns; they count as read."""
        self.read |= set(dict.keys(self))
        return super().stored()


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


def _concatenate(row_stats: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(row_stats) < 2:
        return dict(row_stats[0]) if row_stats else {}
    return {name: np.concatenate([one[name] for one in row_stats]) for name in row_stats[0]}


def _restore(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, before in buffers:
        buffer.copy_(before)
