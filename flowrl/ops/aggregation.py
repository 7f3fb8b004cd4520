"""Fragments that stay where they were sampled, and tasks that join them to train batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flowrl.data import BatchRef
from flowrl.iter import LocalIterator, Retry, _get_shared_metrics
from flowrl.iter.ray_runtime import node_id

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
        joined: Any
        if num_tasks:
            where = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
            joined = batches.for_each(_join, num_tasks, where, on_error=Retry(TRIES))
        else:
            joined = batches.for_each(_join)
        joined = joined.combine(_Counted())
        super().__init__(joined.stage, f"AggregateBatches(num_tasks={num_tasks})")
        self.stage.name, self.stage.title = "AggregateBatches", self.name


class _Joined(NamedTuple):
    batch: Batch
    lost: int  # env steps
    came: int  # bytes, from other nodes to the one where it was joined
    node: str | None  # that one


def _join(batch: Batch | BatchRef) -> _Joined:
    own = node_id()
    if not isinstance(batch, BatchRef):
        return _Joined(batch, 0, 0, own)
    joined = batch.get()
    away = sum(node is not None and node != own for node in batch.nodes)
    came = joined.size_bytes() * away // len(batch.nodes)  # parts are of about the same size
    return _Joined(joined, batch.env_steps() - joined.env_steps(), came, own)


class _Counted:
    """combine: the batch, if it has rows; what was lost and what has travelled is counted."""

    def __init__(self) -> None:
        self._node: str | None = None

    def __call__(self, joined: _Joined) -> list[Batch]:
        self._node = self._node or node_id()
        counters = _get_shared_metrics().counters
        sent = joined.batch.size_bytes() if joined.node != self._node else 0
        for name, n in (
            ("num_env_steps_dropped", joined.lost),
            ("num_bytes_between_nodes", joined.came + sent),
        ):
            if n:
                counters[name] += n
        return [joined.batch] if joined.batch.count else []

    def __repr__(self) -> str:
        return "count what was lost"
