"""Fragments that stay where they were sampled, and tasks that join them to train batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from flowrl.data import BatchRef
from flowrl.iter import LocalIterator, Retry, _get_shared_metrics
from flowrl.iter.shards import node_id

if TYPE_CHECKING:
    from flowrl.data.batch_ref import Batch

TRIES = 2  # more, of a task whose process died


def leave_in_store(batch: Batch) -> BatchRef:
    """for_each on the shards, batch -> BatchRef: leaves it in the object store of its node."""
    import ray

    return BatchRef([ray.put(batch)], batch.env_steps(), batch.steps_by_policy(), node_id())


class AggregateBatches(LocalIterator[Any]):
    """Train batches of what ConcatBatches gives for fragments by reference: they are fetched and
    joined by so many tasks at a time, wherever the cluster has room, so that the driver gets one
    batch where it would get its fragments (a tree with one level between workers and learner).

    Batches come as they are done. Without tasks, batches pass, and references are joined here. A
    task whose process dies is run again. Steps of fragments that were lost with their node count as
    `num_env_steps_dropped`.

    Args:
        batches: of batches or BatchRefs, such as ParallelRollouts(by_reference=True), then
            ConcatBatches.
        num_tasks: at a time; 0 for none.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, batches: LocalIterator[Any], num_tasks: int = 0):
        if isinstance(num_tasks, bool) or not isinstance(num_tasks, int) or num_tasks < 0:
            raise ValueError(
                f"AggregateBatches: num_tasks is a whole number from 0, got {num_tasks!r}"
            )
        if num_tasks:
            where = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
            joined = batches.for_each(_join, num_tasks, where, on_error=Retry(TRIES))
        else:
            joined = batches.for_each(_join)
        joined = joined.combine(cast("Any", _count_lost))
        super().__init__(joined.stage, f"AggregateBatches(num_tasks={num_tasks})")
        self.stage.title = self.name


def _join(batch: Batch | BatchRef) -> tuple[Batch, int]:
    """The batch, and how many env steps of it were lost."""
    if not isinstance(batch, BatchRef):
        return batch, 0
    joined = batch.get()
    return joined, batch.env_steps() - joined.env_steps()


def _count_lost(pair: tuple[Batch, int]) -> list[Batch]:
    batch, lost = pair
    if lost:
        _get_shared_metrics().counters["num_env_steps_dropped"] += lost
    return [batch] if batch.count else []
