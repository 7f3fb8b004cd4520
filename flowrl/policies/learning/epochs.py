"""Passes over a batch in minibatches, for policies of any framework."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from flowrl.data import SampleBatch
from flowrl.data.sequences import LOSS_MASK, count_loss_rows, sequence_minibatches
from flowrl.setting_values import check_int

Stats = dict[str, float]


def check_learnable(batch: Any, name: str, scalar_columns: Sequence[str]) -> None:
    """Check that a policy can learn from a batch.

    Args:
        batch: the batch.
        name: of the policy's class.
        scalar_columns: columns that must have one number per row.

    Raises:
        TypeError: it is no SampleBatch.
        ValueError: it has no rows to learn from, or a column has another shape.
    """
    if not isinstance(batch, SampleBatch):
        raise TypeError(f"{name} learns from a SampleBatch, got a {type(batch).__name__}")
    if not batch.count:
        raise ValueError(f"{name}: the batch has no rows")
    if _is_masked(batch) and not count_loss_rows(batch):
        raise ValueError(f"{name}: the batch has no rows to learn from, loss_mask is all False")
    rewards = dict.get(batch, "rewards")  # the number of rows is the sum of the lengths
    has_sequences = "seq_lens" in batch and not batch.zero_padded
    if has_sequences and rewards is not None and len(rewards) != batch.count:
        raise ValueError(
            f"{name}: seq_lens add up to {batch.count}, but the columns have {len(rewards)} rows"
        )
    for column_name in scalar_columns:
        column = dict.get(batch, column_name)  # not computed or fetched
        if column is not None and column.ndim != 1:
            raise ValueError(
                f"the column {column_name!r} has the shape {list(column.shape)}: it must have one "
                f"number per row, [{batch.count}]"
            )


class LearningPolicy(Protocol):
    """The part of a policy that `run_epochs` uses."""

    def end_epoch(self, batch: SampleBatch, stats: Stats) -> bool: ...
    def end_learning(self, batch: SampleBatch, stats: Stats) -> Stats: ...


def run_epochs(
    policy: LearningPolicy,
    run_epoch: Callable[[SampleBatch, int], Sequence[Any]],
    batch: SampleBatch,
    num_sgd_iter: int,
    sgd_minibatch_size: int,
) -> Stats:
    """Update a policy in several passes over a batch; see Policy.learn_on_minibatches.

    Args:
        policy: the policy to update; its `end_epoch` may stop early.
        run_epoch: (batch, size) -> the statistics of one update per minibatch of `size` rows; None
            for updates without statistics.
        batch: the rows.
        num_sgd_iter: passes.
        sgd_minibatch_size: rows per minibatch; 0 for the whole batch.

    Returns:
        the means of the last pass's statistics (see `mean_stats`), and those of `end_learning`.

    Raises:
        ValueError: the minibatch is larger than the batch, or a number is out of range.
    """
    check_int("num_sgd_iter", num_sgd_iter)
    check_int("sgd_minibatch_size", sgd_minibatch_size, 0)
    size = sgd_minibatch_size or batch.count
    if size > batch.count:
        raise ValueError(
            f"sgd_minibatch_size={size} is larger than the batch of {batch.count} rows: set it to "
            f"at most {batch.count}, or make batches larger"
        )
    means: Stats = {}
    for _ in range(num_sgd_iter):
        stats = [
            _numbers(policy, update) for update in run_epoch(batch, size) if update is not None
        ]
        stats = [one for one in stats if one]  # skipped updates report nothing
        means = mean_stats(stats)
        if policy.end_epoch(batch, means):
            break
    return {**means, **policy.end_learning(batch, means)}


def mean_stats(stats: Sequence[Stats], weights: Sequence[float] | None = None) -> Stats:
    """Return the mean of each statistic over the updates or processes that report it.

    Args:
        stats: the statistics of each.
        weights: one weight per entry; None weights all equally, as do weights of 0 for all entries
            that report a statistic.
    """
    if len(stats) == 1:
        return dict(stats[0])
    means: Stats = {}
    for name in dict.fromkeys(name for one in stats for name in one):
        reporting = [i for i, one in enumerate(stats) if name in one]
        values = [stats[i][name] for i in reporting]
        shares = [] if weights is None else [weights[i] for i in reporting]
        if not any(shares) or min(values) == max(values):
            means[name] = math.fsum(values) / len(values)
        else:
            means[name] = math.fsum(map(operator.mul, shares, values)) / math.fsum(shares)
    return means


def concat_row_stats(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the statistics per row of several updates or processes as one; empty parts are left
    out."""
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return dict(parts[0]) if parts else {}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _numbers(policy: LearningPolicy, stats: Any) -> Stats:
    """Return the statistics of an update as floats.

    Raises:
        TypeError: they are not a dict of numbers.
    """
    where = f"{type(policy).__name__}.learn_on_batch()"
    if not isinstance(stats, dict):
        raise TypeError(f"{where} must return a dict of statistics, got a {type(stats).__name__}")
    return checked_numbers(stats, f"{where} returned")


def checked_numbers(stats: Mapping[str, Any], where: str) -> Stats:
    """Return statistics as floats.

    Args:
        where: start of the error message, such as `MyPolicy.learn_on_batch() returned`.

    Raises:
        TypeError: one of them is not a number.
    """
    numbers = {}
    for name, value in stats.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            shape = f" and shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            raise TypeError(
                f"{where} the statistic {name!r} of type {type(value).__name__}{shape}: "
                "statistics are numbers"
            ) from None
    return numbers


def shuffled_minibatches(
    batch: SampleBatch, size: int, rng: np.random.Generator
) -> Iterator[SampleBatch]:
    """Yield the rows of a batch in random order, `size` at a time; the last may be smaller.

    Sequences stay whole. A minibatch of all rows keeps their order. Minibatches without rows to
    learn from, which `loss_mask` selects, are left out.
    """
    if size == batch.count:
        yield batch
        return
    if "seq_lens" in batch:
        yield from sequence_minibatches(batch, size, rng)
    else:
        yield from consecutive_minibatches(batch.take_rows(rng.permutation(batch.count)), size)


def consecutive_minibatches(batch: SampleBatch, size: int) -> Iterator[SampleBatch]:
    """Yield the rows of a batch in order, `size` at a time; the last may be smaller.

    Sequences stay whole. Minibatches without rows to learn from are left out.
    """
    if "seq_lens" in batch:
        yield from sequence_minibatches(batch, size, shuffle=False)
        return
    for start in range(0, batch.count, size):
        rows = batch[start : start + size]
        if not _is_masked(batch) or count_loss_rows(rows):
            yield rows


def share_of_process(count: int, rank: int, num_processes: int) -> tuple[int, int]:
    """Return the begin and the end of the part of `count` items that one of several processes
    takes."""
    return count * rank // num_processes, count * (rank + 1) // num_processes


def _is_masked(batch: SampleBatch) -> bool:
    # `in` would count as reading the column
    return dict.__contains__(batch, LOSS_MASK)
