"""CapturedUpdates: updates on a GPU, each launched as one CUDA graph.

The networks of reinforcement learning are small: launching the operations of an update one by one
takes the CPU longer than the GPU computes. A CUDA graph launches all of them at once. It reads and
writes the same memory each time, so the columns of a train batch are copied to memory that is kept
(ColumnBuffer), and each minibatch gathers its rows there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optree
import torch

from flowrl.data import SampleBatch
from flowrl.policies.cuda_graphs import (
    ColumnBuffer,
    CudaGraph,
    can_repeat_forward,
    make_stream,
    running_on,
    try_to_capture,
)
from flowrl.policies.learning.epochs import Stats
from flowrl.policies.learning.flat_parameters import FlatAdam
from flowrl.policies.learning.kernels.registry import has_replaced_methods, has_shipped_loss
from flowrl.policies.models.tensor_batch import TensorBatch

MAX_GRAPHS = 16  # a graph keeps the memory of its update
SKIPPED = "skipped"  # the first statistic: 1 if the update was not finite


class CapturedUpdates:
    """Updates a policy on a GPU by minibatches of a train batch.

    The first update of a kind (number of rows, parts of the optimizer, numbers in the loss) is
    launched operation by operation, the second is captured as a CUDA graph, and later ones replay
    the graph. The arithmetic is the same. An update that is not finite changes no weights: the
    optimizer's step is skipped on the GPU, and the statistics, which are read once per pass, report
    it.

    Args:
        learner: the TorchLearner whose policy is updated.

    Attributes:
        uses_graphs: False after a capture has failed.
        stream: the stream of the updates, captured or not.
    """

    def __init__(self, learner: Any):
        self.uses_graphs = True
        self.stream = make_stream(learner.policy.device)
        self._learner = learner
        self._policy = policy = learner.policy
        self._is_supported = _is_supported(learner)
        self._batch: SampleBatch | None = None  # whose columns are in the buffer
        self._buffer: ColumnBuffer | None = None
        self._names: set[str] | None = None
        self._columns: tuple[str, ...] = ()  # of the batch for which the names were found
        self._updates: dict[tuple[Any, ...], _Update] = {}
        self._failed = torch.zeros((), dtype=torch.bool, device=policy.device)
        self._done = torch.zeros((), device=policy.device)  # updates of the pass that were made

    def supports(self, batch: SampleBatch, size: int) -> bool:
        """Return whether updates by minibatches of `size` rows are supported; not for sequences,
        padded batches and microbatches."""
        in_group = self._learner.process_group is not None
        if not self._is_supported or in_group or has_replaced_methods(self._policy):
            return False
        rows = self._policy.config.microbatch_size
        is_plain = "seq_lens" not in batch and "loss_mask" not in batch
        is_whole = not rows or min(size, batch.count) <= rows
        return is_plain and is_whole and all(p.requires_grad for p in self._policy.flat.parameters)

    def tensors(self, batch: SampleBatch) -> TensorBatch | None:
        """Return the columns of the batch that `run_epoch` has copied to the GPU; None for another
        batch."""
        if batch is not self._batch or self._buffer is None:
            return None
        return DeviceRows(self._all_columns(self._buffer), batch.count, self._policy.device)

    def release(self) -> None:
        """Forget the train batch."""
        self._batch = None

    # -- updates -------------------------------------------------------------------------------

    def run_epoch(self, batch: SampleBatch, size: int) -> list[Stats]:
        """Update the policy once by each minibatch of a pass; return the statistics of the updates.

        Raises:
            FloatingPointError: an update is not finite; it and later ones change no weights.
        """
        learner, policy = self._learner, self._policy
        learner.check_model()
        with running_on(self.stream):
            if self._load(batch, size):
                num_updates, version = learner.num_updates, policy.version
                self._done.zero_()
                try:
                    return self._run_epoch(batch, size)
                except BaseException:
                    done = int(self._done)
                    learner.num_updates, policy.version = num_updates + done, version + done
                    self._failed.zero_()
                    raise
        stats: list[Stats] = learner.run_epoch(batch, size)
        return stats

    def _run_epoch(self, batch: SampleBatch, size: int) -> list[Stats]:
        learner, policy = self._learner, self._policy
        order = None
        if size < batch.count:
            order = policy.shuffle_rng.permutation(batch.count)
            order_on_device = torch.from_numpy(order).to(policy.device)
        launched: list[_Update] = []
        reports: list[torch.Tensor] = []
        starts = range(0, batch.count, size)
        for start in starts:
            end = min(start + size, batch.count)
            index = None if order is None else order_on_device[start:end]
            update = self._update_for(end - start, index)
            report = update.launch(index)
            reports.append(report if len(starts) == 1 else report.clone())
            launched.append(update)
            learner.num_updates += 1
            policy.version += 1
        on_cpu = (torch.cat(reports) if len(reports) > 1 else reports[0]).cpu().numpy()
        parts = np.split(on_cpu, np.cumsum([len(report) for report in reports])[:-1])
        stats = [update.stats(part) for update, part in zip(launched, parts, strict=True)]
        if launched[0].row_names:
            indexes = batch["batch_indexes"] if order is None else batch["batch_indexes"][order]
            learner.record_epoch_row_stats(
                {"batch_indexes": indexes[start : start + update.rows], **update.row_stats(part)}
                for start, update, part, one in zip(starts, launched, parts, stats, strict=True)
                if not one[SKIPPED]
            )
        return self._check_finite(stats, batch, order, size)

    def _load(self, batch: SampleBatch, size: int) -> bool:
        """Copy the columns that the loss reads to the GPU; return False if they cannot be found."""
        if batch is self._batch:
            return True
        columns = tuple(sorted(batch.keys()))
        if columns != self._columns:
            names = self._learner.columns_read(batch[:size])
            # the loss reads no batch_indexes on the GPU
            self._names = None if names is None else (names & set(columns)) - {"batch_indexes"}
            self._columns, self._buffer = columns, None
        if self._names is None:
            return False
        if self._buffer is None or not self._buffer.load(batch):
            self._updates.clear()
            self._buffer = ColumnBuffer(batch, self._names, self._policy.device)
            self._buffer.load(batch)
        self._batch = batch
        return True

    def _all_columns(self, buffer: ColumnBuffer) -> dict[str, Any]:
        return {**dict.fromkeys(self._columns), **buffer.columns}

    def _update_for(self, rows: int, index: torch.Tensor | None) -> _Update:
        policy, learner = self._policy, self._learner
        learner.before_step()
        active = tuple(group["active"] for group in learner.optimizers[0].param_groups)
        kind = (rows, index is None, active, *policy.loss_coefficients())
        update = self._updates.get(kind)
        if update is None:
            if len(self._updates) >= MAX_GRAPHS:
                self._updates.pop(next(iter(self._updates)))
            assert self._buffer is not None
            columns = self._all_columns(self._buffer)
            update = _Update(learner, columns, rows, index is None, self._failed, self._done)
            self._updates[kind] = update
        return update

    def _check_finite(
        self, stats: list[Stats], batch: SampleBatch, order: np.ndarray | None, size: int
    ) -> list[Stats]:
        """Return the statistics of the updates; for those that are not finite raise an error or
        return none, by the setting `on_nonfinite_update`."""
        skipped = [number for number, one in enumerate(stats) if one.pop(SKIPPED)]
        if not skipped:
            return stats
        learner, policy = self._learner, self._policy
        if policy.config.on_nonfinite_update == "raise":
            first, rows = skipped[0], batch
            if order is not None:
                rows = batch.take_rows(order[first * size : (first + 1) * size])
            learner.gradient.raise_nonfinite(stats[first], rows)
        learner.num_updates -= len(skipped)
        policy.version -= len(skipped)
        learner.num_skipped_updates += len(skipped)
        return [{} if number in skipped else one for number, one in enumerate(stats)]


class _Update:
    """Updates of one kind, see CapturedUpdates.

    Args:
        learner: the TorchLearner.
        columns: of the train batch, see DeviceRows.
        rows: rows of the minibatch.
        takes_all: whether the minibatch is the first `rows` rows; else it is given by an index.
        failed: whether an earlier update of the pass was not finite, a tensor without axes.
        done: counts the updates that are made, a tensor without axes.

    Attributes:
        rows: rows of the minibatch.
        row_names: names of the values per row that the loss records.
    """

    def __init__(
        self,
        learner: Any,
        columns: Mapping[str, Any],
        rows: int,
        takes_all: bool,
        failed: torch.Tensor,
        done: torch.Tensor,
    ):
        self.rows = rows
        self.row_names: list[str] = []
        self._names: list[str] = []  # of the statistics
        self._learner, self._policy, self._columns = learner, learner.policy, columns
        self._index: torch.Tensor | None = None
        if not takes_all:
            self._index = torch.zeros(rows, dtype=torch.int64, device=self._policy.device)
        self._failed, self._done = failed, done
        self._graph: CudaGraph | None = None
        self._noise: ColumnBuffer | None = None
        self._noise_shapes: list[tuple[int, ...]] = []  # in the order in which the loss draws
        self._was_launched = False

    def launch(self, index: torch.Tensor | None) -> torch.Tensor:
        """Launch an update.

        Returns:
            its report on the GPU, which the next update overwrites: the statistics, and the values
            per row, one name after the other.
        """
        learner, captured = self._learner, self._learner.captured
        if self._index is not None and index is not None:
            self._index.copy_(index)
        learner.optimizers[0].refresh_rates()
        if not self._was_launched:
            self._noise_shapes.clear()
            with learner.draws_noise_with(self._first_noise):
                report = self._run()
            self._was_launched = True
            return report
        self._load_noise()
        if self._graph is None and captured.uses_graphs:
            self._graph = try_to_capture(
                f"the update of {type(self._policy).__name__}",
                lambda: CudaGraph(captured.stream, self._warm_up, self._run),
            )
            captured.uses_graphs = self._graph is not None
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._graph.outputs

    def stats(self, report: np.ndarray) -> Stats:
        """Return the statistics of a report."""
        return dict(zip(self._names, report[: len(self._names)].tolist(), strict=True))

    def row_stats(self, report: np.ndarray) -> dict[str, np.ndarray]:
        """Return the values per row of a report, arrays [rows]."""
        values = report[len(self._names) :].reshape(-1, self.rows)
        return dict(zip(self.row_names, values.copy(), strict=True))

    def _first_noise(self, shape: tuple[int, ...]) -> torch.Tensor:
        self._noise_shapes.append(shape)
        return torch.from_numpy(self._learner.draw_noise(shape)).to(self._policy.device)

    def _load_noise(self) -> None:
        if not self._noise_shapes:
            return
        shapes = enumerate(self._noise_shapes)
        noise = {f"{number:03}": self._learner.draw_noise(shape) for number, shape in shapes}
        if self._noise is None:
            self._noise = ColumnBuffer(noise, noise.keys(), self._policy.device)
        self._noise.load(noise)

    def _run(self) -> torch.Tensor:
        """Update the policy; return the report."""
        policy, learner = self._policy, self._learner
        named = self._compute_gradient()
        norm = named["grad_norm"] = torch.linalg.vector_norm(policy.flat.gradient)
        self._failed.logical_or_(~(norm.isfinite() & named["total_loss"].isfinite()))
        skipped = self._failed.float()
        if policy.config.on_nonfinite_update == "skip":
            self._failed.zero_()
        learner.gradient.clip_on_device(norm)
        learner.optimizers[0].step(skipped=skipped)
        self._done.add_(1 - skipped)
        self._names = [SKIPPED, *named]
        values = [
            v.detach().float() if isinstance(v, torch.Tensor) else torch.full_like(norm, v)
            for v in named.values()
        ]
        report = torch.stack([skipped, *values])
        row_stats: dict[str, torch.Tensor] = {}
        for recorded in learner.gradient.row_stats:
            row_stats |= {n: v.float() for n, v in recorded.items() if isinstance(v, torch.Tensor)}
        self.row_names = list(row_stats)
        return torch.cat([report, *row_stats.values()]) if row_stats else report

    def _warm_up(self) -> None:
        with torch.no_grad():  # networks keep what they computed last, with its autograd graph
            self._with_noise(self._policy.loss)
        self._compute_gradient()

    def _compute_gradient(self) -> dict[str, Any]:
        learner = self._learner
        learner.gradient.row_stats = []
        named: dict[str, Any] = self._with_noise(learner.gradient.differentiate)
        return named

    def _with_noise(self, compute: Callable[[TensorBatch], Any]) -> Any:
        """Return compute(minibatch); the loss receives the noise in memory, if it is drawn."""
        batch = DeviceRows(self._columns, self.rows, self._policy.device, self._index)
        if self._noise is None:
            return compute(batch)
        noise = iter(self._noise.columns.values())
        with self._learner.draws_noise_with(lambda shape: next(noise)):
            return compute(batch)


class DeviceRows(TensorBatch):
    """Rows of a batch whose columns are on a device.

    Args:
        columns: tensors [n, …] by name; None for columns of the batch that are not on the device.
        rows: number of rows.
        device: the device.
        index: the rows, int64 [rows]; None for the first ones.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        rows: int,
        device: torch.device,
        index: torch.Tensor | None = None,
    ):
        super().__init__(SampleBatch.unchecked(dict(columns)), device)
        self._rows, self._index = rows, index

    @property
    def count(self) -> int:
        return self._rows

    def __missing__(self, key: str) -> Any:
        if key == "obs_flat":
            return super().__missing__(key)
        column: Any = self._batch[key]
        if column is None:
            raise KeyError(f"the column {key!r} is not on the GPU")
        self[key] = rows = optree.tree_map(self._select, column)
        return rows

    def _select(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf[: self._rows] if self._index is None else leaf.index_select(0, self._index)


def _is_supported(learner: Any) -> bool:
    """Return whether a graph can repeat the policy's updates; a user's class may read and change
    anything, in a method that the loss calls or between passes."""
    policy = learner.policy
    optimizer = learner.optimizers[0]
    classes = type(policy), type(learner), policy.dist_class
    return (
        policy.config.cuda_graphs
        and policy.device.type == "cuda"
        and has_shipped_loss(policy)
        and all(one.__module__.startswith("flowrl.") for one in classes)
        and len(learner.optimizers) == 1
        and type(optimizer) is FlatAdam
        and can_repeat_forward(policy.model)
        and not learner.draws_from_torch
        and not policy.is_recurrent
    )
