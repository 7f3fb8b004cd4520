"""Operators that leave fragments in Ray's object store and concatenate them in Ray tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from flowrl.data import BatchRef
from flowrl.iter import LocalIterator, Retry, _get_shared_metrics
from flowrl.iter.metrics import count_bytes_between_nodes
from flowrl.iter.ray_runtime import node_id
from flowrl.setting_values import check_int

if TYPE_CHECKING:
    from flowrl.data import Batch

MAX_RETRIES = 2  # of a task whose process dies


def leave_in_store(batch: Batch) -> BatchRef:
    """for_each on the shards, batch -> BatchRef: put the batch into Ray's object store.

    Without Ray (`flowrl replay`), the BatchRef contains the batch.
    """
    import ray

    part = ray.put(batch) if ray.is_initialized() else batch
    return BatchRef([part], batch.env_steps(), batch.steps_by_policy(), node_id())


class AggregateBatches(LocalIterator[Any]):
    """A stream of train batches: fragments given by reference, concatenated in Ray tasks.

    The tasks run on any node of the cluster, so the driver receives one batch instead of its
    fragments. Batches are returned in the order in which the tasks finish. A task whose process
    dies is retried. Env steps of fragments that were lost with their node count as
    `num_env_steps_dropped`.

    Args:
        batches: a stream of batches or BatchRefs, such as ParallelRollouts(by_reference=True)
            followed by ConcatBatches.
        num_tasks: maximum number of tasks in flight; 0 concatenates in this process.

    Raises:
        TypeError: `batches` is not a LocalIterator.
        ValueError: num_tasks is negative.
    """

    def __init__(self, batches: LocalIterator[Any], num_tasks: int = 0):
        check_int("AggregateBatches: num_tasks", num_tasks, 0)
        if not isinstance(batches, LocalIterator):
            raise TypeError(f"AggregateBatches takes a LocalIterator, got {batches!r}")
        joined: Any
        if num_tasks:
            options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
            joined = batches.for_each(_join, num_tasks, options, on_error=Retry(MAX_RETRIES))
        else:
            joined = batches.for_each(_join)
        joined = joined.combine(_Counted())
        super().__init__(joined.stage, f"AggregateBatches(num_tasks={num_tasks})")
        self.stage.name, self.stage.title = "AggregateBatches", self.name


class _Joined(NamedTuple):
    batch: Batch
    lost_steps: int  # env steps
    bytes_received: int  # from other nodes
    node: str | None  # id of the node that concatenated the batch


def _join(batch: Batch | BatchRef) -> _Joined:
    this_node = node_id()
    if not isinstance(batch, BatchRef):
        return _Joined(batch, 0, 0, this_node)
    joined = batch.get()
    num_remote = sum(node is not None and node != this_node for node in batch.nodes)
    bytes_received = joined.size_bytes() * num_remote // len(batch.nodes)  # parts of similar size
    return _Joined(joined, batch.env_steps() - joined.env_steps(), bytes_received, this_node)


class _Counted:
    """combine, _Joined -> [batch] or []: count lost env steps and bytes between nodes; drop empty
    batches."""

    chained_with: ClassVar[str] = "combine"

    def __init__(self) -> None:
        self._node: str | None = None

    def __call__(self, joined: _Joined) -> list[Batch]:
        self._node = self._node or node_id()
        bytes_sent = joined.batch.size_bytes() if joined.node != self._node else 0
        count_bytes_between_nodes(joined.bytes_received + bytes_sent)
        if joined.lost_steps:
            _get_shared_metrics().counters["num_env_steps_dropped"] += joined.lost_steps
        return [joined.batch] if joined.batch.count else []
