"""TorchLearner: the learning part of a TorchPolicy: minibatches and optimizer steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from flowrl.data import SampleBatch
from flowrl.data.sequences import sequence_minibatches, with_burn_in, without_padding
from flowrl.errors import ConfigError
from flowrl.policies.cuda_graphs import running_on
from flowrl.policies.learning.captured_update import CapturedUpdates
from flowrl.policies.learning.epochs import (
    Stats,
    check_learnable,
    concat_row_stats,
    consecutive_minibatches,
    run_epochs,
    share_of_process,
    shuffled_minibatches,
)
from flowrl.policies.learning.flat_parameters import FlatAdam, with_layout_of
from flowrl.policies.learning.kernels.registry import find_kernel
from flowrl.policies.learning.loss_gradient import LossGradient
from flowrl.policies.learning.protocols import ProcessGroup, TrainablePolicy
from flowrl.policies.learning.tracked_batch import TrackedBatch
from flowrl.policies.models.buffers import BufferCopy, buffers_of, copy_buffers, restore_buffers
from flowrl.policies.overrides import is_builtin_method
from flowrl.policies.schedules import initial_value
from flowrl.policies.torch_random import torch_seed
from flowrl.seeding import RowNoise, random_stream, restore_stream, stream_state
from flowrl.state_schema import Fields, Natural, check_own_state

log = logging.getLogger("flowrl")

_LAYERS = (
    nn.Linear, nn.Conv2d, nn.LSTM, nn.GRU, nn.LayerNorm, nn.MaxPool2d, nn.Flatten, nn.Sequential,
    nn.ModuleList, nn.Tanh, nn.ReLU, nn.SiLU, nn.ELU, nn.GELU,
)  # fmt: skip
NONFINITE_GRADIENT = "the gradient is not finite: the weights are unchanged"


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
        updates_in_batch: optimizer steps on the last batch.
        num_skipped_updates: updates skipped because they were not finite.
        process_group: the processes that learn together; None if this process learns alone.
        kernel: computes the gradient instead of autograd; None if there is none.
        gradient: the LossGradient.
        captured: the CapturedUpdates, which update on a GPU where they support it.
        draws_from_torch: whether the network draws from torch's random numbers.
        rng: random stream of the loss, such as noise on actions.

    Raises:
        ConfigError: `make_optimizer` returned something else, or two optimizers share parameters.
    """

    state_fields: ClassVar[Fields] = {
        "optimizer_types": list[str],
        "optimizers": list[dict[str, dict[str, Any]]],
        "lrs": list[list[float]],
        "initial_lrs": list[list[float]],
        "num_updates": Natural,
        "updates_in_batch": Natural,
        "num_skipped_updates": Natural,
        "rng": dict[str, Any],
    }

    def __init__(self, policy: TrainablePolicy):
        self.policy = policy
        # not shuffle_rng: that is equal in all processes of a group, for the same minibatches
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
        has_builtin_loss = is_builtin_method(policy, "loss")
        self._scalar_columns = policy.scalar_columns if has_builtin_loss else ()
        self._model = policy.model
        is_known, listed = policy.model.has_only_known_modules, buffers_of(policy.model)
        self._buffers = listed if is_known or not listed else None  # None: they may be replaced
        self.draws_from_torch = any(_may_draw(module) for module in policy.model.modules())
        if policy.config.compile:
            policy.model.compile_for_learning()
        self.process_group: ProcessGroup | None = None
        self.num_updates, self.updates_in_batch = 0, 1
        self.num_skipped_updates = 0
        self._warned_of_buffers = False
        self._epoch_row_stats: list[dict[str, np.ndarray]] | None = None  # of a pass
        self.kernel = find_kernel(policy, self._has_single_optimizer())
        self.gradient = LossGradient(policy, self.parameters, self.kernel, self.microbatches)
        self.captured = CapturedUpdates(self)
        self._noise_source: Callable[[tuple[int, ...]], torch.Tensor] | None = None
        self._row_noise: RowNoise | None = None

    def _parameters_of(self, optimizer: Any) -> list[torch.Tensor]:
        flat = self.policy.flat
        parameters = [p for group in optimizer.param_groups for p in group.get("params", ())]
        is_whole = isinstance(optimizer, FlatAdam) or any(p is flat.vector for p in parameters)
        if is_whole or not parameters:
            return list(flat.parameters)
        known = {id(p) for p in flat.parameters}
        if not all(id(p) in known for p in parameters):
            raise ConfigError("make_optimizer: an optimizer has parameters that the model lacks")
        return parameters

    def _has_single_optimizer(self) -> bool:
        """Return whether one optimizer has all parameters of the network."""
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

    def _begin(self, batch: Any) -> None:
        """Check a batch, and whether the user has changed the policy, before the first update."""
        self.gradient.choose_kernel()
        check_learnable(batch, type(self.policy).__name__, self._scalar_columns)

    def minibatches(self, batch: SampleBatch, size: int) -> Iterator[SampleBatch]:
        """Yield the rows of a batch in random order, `size` at a time; the last may be smaller.

        Sequences stay whole. A minibatch of all rows keeps their order.
        """
        yield from shuffled_minibatches(batch, size, self.policy.shuffle_rng)

    def microbatches(self, batch: SampleBatch, size: int) -> Iterable[SampleBatch]:
        """Return the rows of a batch in order, `size` at a time; sequences stay whole."""
        return consecutive_minibatches(batch, size)

    def rows_of_process(
        self, batch: SampleBatch, rank: int, num_processes: int
    ) -> SampleBatch | None:
        """Return the rows that one of several processes learns from, whole sequences if there are
        any; None if it gets none, because there are fewer rows, or sequences, than processes."""
        if "seq_lens" in batch:
            sequences = list(sequence_minibatches(batch, 1, shuffle=False))
            begin, end = share_of_process(len(sequences), rank, num_processes)
            return SampleBatch.concat_samples(sequences[begin:end]) if end > begin else None
        begin, end = share_of_process(batch.count, rank, num_processes)
        return batch[begin:end] if end > begin else None

    # -- updates -------------------------------------------------------------------------------

    def learn_on_minibatches(self, batch: SampleBatch, num_sgd_iter: int, size: int) -> Stats:
        """Update the policy by minibatches; see Policy.learn_on_minibatches."""
        self._begin(batch)
        policy = self.policy
        self._epoch_row_stats = []
        before = self.num_updates
        self.gradient.num_rows = 0
        try:
            batch = self.prepare_batch(batch)
            is_captured = self.captured.supports(batch, size or batch.count)
            run_epoch = self.captured.run_epoch if is_captured else self.run_epoch
            stats = run_epochs(policy, run_epoch, batch, num_sgd_iter, size)
            policy.row_stats = concat_row_stats(self._epoch_row_stats)
        finally:
            self._epoch_row_stats = None
            self.updates_in_batch = self.num_updates - before
            self.captured.release()
        stats["cur_lr"] = float(self.optimizers[0].param_groups[0]["lr"])
        if policy.config.on_nonfinite_update == "skip":
            stats["num_skipped_updates"] = float(self.num_skipped_updates)
        return stats

    def run_epoch(self, batch: SampleBatch, size: int) -> list[Stats]:
        """Update the policy once by each minibatch of a pass; return the statistics of the
        updates."""
        self._epoch_row_stats = []
        group, minibatches = self.process_group, self.minibatches(batch, size)
        if group is not None and not group.splits_rows:
            minibatches = group.pad_minibatches(minibatches)
        return [self.policy.learn_on_batch(rows) for rows in minibatches]

    def learn_on_batch(self, batch: SampleBatch | None) -> Stats:
        """Make one optimizer step.

        Args:
            batch: None for a process of a group that has no rows left.

        Raises:
            TypeError, ValueError: it is not a batch, has no rows, or a column has not one number
                per row.
            FloatingPointError: the loss or its gradient is not finite; the weights are unchanged.
        """
        if batch is not None and self._epoch_row_stats is None:
            self._begin(batch)
        return self.skip_nonfinite(self._update, batch)

    def _update(self, batch: SampleBatch | None) -> Stats:
        self.check_model()
        if self.process_group is None:
            assert batch is not None
            stats = self.gradient.compute(batch)
        else:
            self._row_noise = self._noise_of_share(batch)
            try:
                stats = self.gradient.compute_over_group(
                    batch, self.process_group, self.rows_of_process
                )
            finally:
                self._row_noise = None
            self._follow_last_process(batch)
        self.step(stats["grad_norm"])
        if len(stats) == 1:
            return {}  # this process had no rows
        if self._epoch_row_stats is None:
            self.policy.row_stats = concat_row_stats(self.gradient.row_stats)
        else:
            self._epoch_row_stats += self.gradient.row_stats
        return stats

    def _noise_of_share(self, batch: SampleBatch | None) -> RowNoise | None:
        """Return the noise of this process's rows, if the group shares out the rows of a batch."""
        group = self.process_group
        if batch is None or group is None or not group.splits_rows or "seq_lens" in batch:
            return None
        begin, end = share_of_process(batch.count, group.rank, group.size)
        return RowNoise(self.rng, begin, end, batch.count)

    def _follow_last_process(self, batch: SampleBatch | None) -> None:
        """Copy the state of `rng` from the group's last process, if the batch has fewer rows or
        sequences than the group has processes: processes without rows have drawn no noise, and the
        last process always has rows.
        """
        group = self.process_group
        if batch is None or group is None or not group.splits_rows:
            return
        if (len(batch["seq_lens"]) if "seq_lens" in batch else batch.count) < group.size:
            restore_stream(self.rng, group.object_of_last(stream_state(self.rng)))

    @property
    def row_rng(self) -> np.random.Generator | RowNoise:
        """The random stream for noise with one entry per row of the minibatch.

        In a group of learners, it returns the entries of this process's rows. Use `rng` for noise
        that all rows share.
        """
        return self._row_noise or self.rng

    def skip_nonfinite(self, update: Callable[[Any], Stats], batch: SampleBatch | None) -> Stats:
        """Return update(batch). On a FloatingPointError, restore the model's buffers, then raise it
        or skip the update, by the setting `on_nonfinite_update`."""
        buffers = self._buffers_before()
        try:
            with self.seeded(self.policy.shuffle_rng):
                return update(batch if batch is None else self.prepare_batch(batch))
        except FloatingPointError:
            restore_buffers(buffers)
            if self.policy.config.on_nonfinite_update == "raise":
                raise
            self.num_skipped_updates += 1
            self.policy.row_stats = {}
            return {}

    def _buffers_before(self) -> list[BufferCopy]:
        return copy_buffers(buffers_of(self._model) if self._buffers is None else self._buffers)

    def before_step(self) -> None:
        """Prepare the optimizers for a step."""

    def fixed_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that the next step must not change: those without
        `requires_grad`."""
        return [p for p in self.policy.flat.parameters if not p.requires_grad]

    def step(self, grad_norm: float) -> None:
        """Clip the gradient, whose norm is `grad_norm`, and step the optimizers."""
        self.before_step()
        self.gradient.clip(grad_norm)
        # the moments of earlier gradients would move fixed parameters, and an optimizer of the flat
        # vector does so even without a gradient
        fixed = self.fixed_parameters()
        before = [(parameter.data, parameter.data.clone()) for parameter in fixed]
        for parameter in fixed:
            parameter.grad = None
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter, values in before:
            parameter.copy_(values)
        if fixed:
            self.policy.flat.restore_views()
        self.num_updates += 1
        self.policy.version += 1

    def learn_without_rows(self, num_sgd_iter: int) -> None:
        """Take part in the passes of the process group over a batch of which this process has no
        rows."""
        assert self.process_group is not None
        for _ in range(num_sgd_iter):
            for no_rows in self.process_group.pad_minibatches(iter(())):
                self.policy.learn_on_batch(no_rows)
            if self.policy.end_epoch(None, {}):
                break
        self.policy.end_learning(None, {})

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, Stats]:
        """Return the gradient [parameters] of the loss, and statistics; weights and buffers do not
        change.

        Raises:
            FloatingPointError: the loss or the gradient is not finite, and `on_nonfinite_update` is
                "raise"; with "skip", the gradient is NaN, which `apply_gradients` skips.
        """
        self._begin(batch)
        flat = self.policy.flat
        buffers = self._buffers_before()
        try:
            with self.seeded(self.policy.shuffle_rng):
                self.check_model()
                stats = self.gradient.compute(self.prepare_batch(batch))
        except FloatingPointError:
            if self.policy.config.on_nonfinite_update == "raise":
                raise
            stats, self.gradient.row_stats = {}, []
            flat.gradient.fill_(torch.nan)  # apply_gradients skips it
        finally:
            self._warn_of_buffers(buffers)
            restore_buffers(buffers)
        self.policy.row_stats = concat_row_stats(self.gradient.row_stats)
        return flat.gradient.cpu().numpy().copy(), stats

    def _warn_of_buffers(self, before: Sequence[BufferCopy]) -> None:
        if self._warned_of_buffers or not any(copied.has_changed for copied in before):
            return
        self._warned_of_buffers = True
        log.warning(
            "the network of %s has buffers that its forward pass changes (BatchNorm?): gradients "
            "do not contain buffers, so they keep their initial values where gradients are applied",
            type(self.policy).__name__,
        )

    def apply_gradients(self, gradients: np.ndarray | torch.Tensor | Mapping[str, Any]) -> None:
        """Make one optimizer step; see TorchPolicy.apply_gradients.

        Raises:
            ValueError: the gradient is no array, has another shape, or is of an unknown parameter.
            FloatingPointError: it is not finite; the weights are unchanged.
        """
        self.check_model()
        flat = self.policy.flat
        if isinstance(gradients, Mapping):
            gradients = flat.gradient_of(gradients)
        if not isinstance(gradients, (np.ndarray, torch.Tensor)):
            raise ValueError(
                f"{type(self.policy).__name__}: the gradient must be an array [parameters], as of "
                f"compute_gradients(), got a {type(gradients).__name__}"
            )
        if gradients.shape != tuple(flat.gradient.shape):
            raise ValueError(
                f"the gradient has shape {gradients.shape}, the policy has {len(flat.gradient)} "
                "parameters: pass a gradient of the same policy"
            )
        if isinstance(gradients, torch.Tensor):
            gradients = gradients.detach().float().cpu().numpy()
        with np.errstate(over="ignore"):  # a large number becomes infinite, and is refused
            gradients = np.array(gradients, np.float32)
        norm = float(np.linalg.norm(gradients))
        if not np.isfinite(norm):
            self.refuse_gradient()
            return
        flat.gradient.copy_(torch.from_numpy(gradients))
        self.step(norm)

    def refuse_gradient(self) -> None:
        """Raise FloatingPointError for a gradient that is not finite, or count a skipped update,
        by the setting `on_nonfinite_update`."""
        if self.policy.config.on_nonfinite_update == "raise":
            raise FloatingPointError(NONFINITE_GRADIENT)
        self.num_skipped_updates += 1

    # -- for losses ----------------------------------------------------------------------------

    def record_row_stats(self, row_stats: dict[str, Any]) -> None:
        """Keep values per row of the current update; see TorchPolicy.record_row_stats."""
        self.gradient.row_stats.append(row_stats)

    def record_epoch_row_stats(self, row_stats: Iterable[dict[str, np.ndarray]]) -> None:
        """Keep values per row of the updates of a pass."""
        self._epoch_row_stats = list(row_stats)

    def mean_over_group(self, value: float | None) -> float | None:
        """Return the mean of a number over the processes that pass one; all get the same mean."""
        return value if self.process_group is None else self.process_group.mean(value)

    def standard_normal(self, *shape: int) -> torch.Tensor:
        """Return standard normal noise of shape [rows, …], float32, on the policy's device."""
        if self._noise_source is not None:
            return self._noise_source(shape)
        return torch.from_numpy(self.draw_noise(shape)).to(self.policy.device)

    def draw_noise(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw standard normal noise [rows, …] from `row_rng`, float32."""
        return self.row_rng.standard_normal(shape, dtype=np.float32)

    @contextlib.contextmanager
    def draws_noise_with(self, source: Callable[[tuple[int, ...]], torch.Tensor]) -> Iterator[None]:
        """Let `standard_normal` return the noise of another source."""
        self._noise_source, before = source, self._noise_source
        try:
            yield
        finally:
            self._noise_source = before

    def standardize(self, values: torch.Tensor) -> torch.Tensor:
        """Scale the values [B] of a minibatch, over all processes, to mean 0 and standard
        deviation 1; a single value becomes 0."""
        values = values if values.is_floating_point() else values.float()
        if self.process_group is not None:
            std, mean = self.process_group.std_mean(values)
        elif len(values) < 2:
            return torch.zeros_like(values)
        else:
            std, mean = torch.std_mean(values)
        return (values - mean) / (std + 1e-8)

    def mean_of_rows(self, values: torch.Tensor) -> float:
        """Return the mean of the values [B] of a minibatch, over all processes."""
        if self.process_group is None:
            return float(values.mean())
        return float(self.process_group.std_mean(values)[1])

    def columns_read(self, batch: SampleBatch) -> set[str] | None:
        """Return the columns that the loss, `end_epoch` and `end_learning` read in a trial call.

        None if the call fails or the model uses burn-in.
        """
        policy: Any = self.policy
        tracked = TrackedBatch(batch)
        group, self.process_group = self.process_group, None
        state, torch_rng = policy.get_state(), torch.get_rng_state()
        num_loads = policy.num_loads
        buffers = self._buffers_before()
        try:
            if policy.config.model.burn_in:
                return None
            with running_on(self.captured.stream):  # networks keep the graph of their last pass
                policy.loss(policy.tensors(tracked))
            policy.end_epoch(tracked, {})
            policy.end_learning(tracked, {})
        except Exception:
            return None  # the error shows when the policy learns
        finally:
            self.process_group = group
            policy.set_state(state)
            policy.num_loads = num_loads
            torch.set_rng_state(torch_rng)
            restore_buffers(buffers)
            policy.stats = {}
        return tracked.read

    # -- schedules and state -------------------------------------------------------------------

    def follow_schedules(self) -> None:
        """Set learning rates to their values at the policy's timestep."""
        lr = self.policy.config.lr
        first, now = initial_value(lr), self.policy.scheduled(lr)
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
            "optimizer_types": self._optimizer_types(),
            "optimizers": optimizers,
            "lrs": [[group["lr"] for group in o.param_groups] for o in self.optimizers],
            "initial_lrs": self._initial_lrs,
            "num_updates": self.num_updates,
            "updates_in_batch": self.updates_in_batch,
            "num_skipped_updates": self.num_skipped_updates,
            "rng": stream_state(self.rng),
        }

    def _optimizer_types(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Learning rates that were created with another value keep the new one.

        Raises:
            ValueError: an entry is missing, or it is the state of other optimizers.
        """
        check_own_state(self, state)
        types, groups = self._optimizer_types(), [len(rates) for rates in self._initial_lrs]
        if types != state["optimizer_types"]:
            raise ValueError(
                f"the state has the optimizers {', '.join(state['optimizer_types'])}, this policy "
                f"has {', '.join(types)}"
            )
        saved_groups = [len(rates) for rates in state["lrs"]]
        if groups != saved_groups:
            raise ValueError(
                f"the optimizers of the state have {saved_groups} parameter groups, those of this "
                f"policy {groups}"
            )
        saved = zip(self.optimizers, state["optimizers"], strict=True)
        for i, (optimizer, slots) in enumerate(saved):
            whole = optimizer.state_dict()
            parameters = [p for group in optimizer.param_groups for p in group.get("params", ())]
            whole["state"] = {
                int(index): {
                    name: with_layout_of(parameters, int(index), v)
                    if isinstance(v, np.ndarray)
                    else v
                    for name, v in slot.items()
                }
                for index, slot in slots.items()
            }
            try:
                optimizer.load_state_dict(whole)
            except (KeyError, TypeError, RuntimeError) as error:
                raise ValueError(
                    f"the state does not fit optimizer {i} ({types[i]}): {error}"
                ) from error
            rates = zip(self._initial_lrs[i], state["initial_lrs"][i], state["lrs"][i], strict=True)
            for group, (initial, saved_initial, rate) in zip(
                optimizer.param_groups, rates, strict=True
            ):
                if initial == saved_initial:
                    group["lr"] = rate
        self.num_updates = int(state["num_updates"])
        self.updates_in_batch = int(state["updates_in_batch"])
        self.num_skipped_updates = int(state["num_skipped_updates"])
        restore_stream(self.rng, state["rng"])

    # -- checks --------------------------------------------------------------------------------

    def check_model(self) -> None:
        """Raise ConfigError if the policy's model is not the one that the optimizers update."""
        policy = self.policy
        if policy.flat.restore_views() and self._model is policy.model:
            return
        raise ConfigError(
            f"{type(policy).__name__}: the model or the memory of its parameters was replaced "
            "after the policy was made, so learning would not reach it: make the model and its "
            "initial weights in make_model(), or use set_weights()"
        )

    @contextlib.contextmanager
    def seeded(self, stream: np.random.Generator) -> Iterator[None]:
        """Seed torch's random numbers, for dropout in the network, from a stream of the policy."""
        if not self.draws_from_torch:
            yield
            return
        with torch_seed(int(stream.integers(2**63))):
            yield


def _may_draw(module: nn.Module) -> bool:
    """Return whether a module may draw from torch's generator: any but flowrl's own and the layers
    that they consist of, because a forward method may call functional.dropout."""
    if type(module) in _LAYERS:
        return bool(getattr(module, "dropout", 0.0))  # of recurrent layers
    return not type(module).__module__.startswith("flowrl.")
