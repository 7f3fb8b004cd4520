"""Operators that select which workers receive new weights, and how often.

The next request to a selected worker carries the newest weights, unless the worker has them.
By default, all workers receive them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flowrl.data.item_checks import check_batch
from flowrl.iter import Source, _get_shared_metrics
from flowrl.ops.replay_actors import REPLAY_ORIGIN
from flowrl.sampling.worker_set import WorkerSet, check_workers
from flowrl.setting_values import check_int
from flowrl.state_schema import Fields, Natural


class BroadcastUpdateLearnerWeights:
    """for_each, batch -> the same batch: after every `broadcast_interval` batches, send new weights
    to the workers that sampled these batches.

    Counts `num_weight_broadcasts`.

    Args:
        workers: the WorkerSet.
        broadcast_interval: batches between two broadcasts.

    Raises:
        ValueError: broadcast_interval is below 1.
        TypeError (when called): the item is neither a batch nor Gradients.
    """

    state_fields: ClassVar[Fields] = {"since": Natural, "contributed": list[Natural]}

    chained_with: ClassVar[str] = "for_each"

    def __init__(self, workers: WorkerSet, broadcast_interval: int = 1):
        check_workers(workers, type(self).__name__)
        check_int("broadcast_interval", broadcast_interval)
        self.workers = workers
        self.broadcast_interval = broadcast_interval
        self._since = 0
        self._contributed: set[int] = set()

    def __call__(self, batch: Any) -> Any:
        self._contributed |= set(contributors(batch, "BroadcastUpdateLearnerWeights"))
        self._since += 1
        if self._since < self.broadcast_interval:
            self.workers.weight_sync.update_only(())
        else:
            self.workers.weight_sync.update_only(self._contributed)
            _get_shared_metrics().counters["num_weight_broadcasts"] += 1
            self._since, self._contributed = 0, set()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"since": self._since, "contributed": sorted(self._contributed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._since, self._contributed = state["since"], set(state["contributed"])

    def __repr__(self) -> str:
        return f"BroadcastUpdateLearnerWeights({self.broadcast_interval})"


class UpdateWorkerWeights:
    """for_each, batch -> the same batch: send new weights to each worker that has sampled
    `max_weight_sync_delay` env steps since its last update.

    Counts `num_weight_syncs`.

    Args:
        workers: the WorkerSet.
        max_weight_sync_delay: env steps of one worker.

    Raises:
        ValueError: max_weight_sync_delay is negative.
        TypeError (when called): the item is neither a batch nor Gradients.
    """

    state_fields: ClassVar[Fields] = {"steps": dict[int, Natural]}

    chained_with: ClassVar[str] = "for_each"

    def __init__(self, workers: WorkerSet, max_weight_sync_delay: int):
        check_workers(workers, type(self).__name__)
        check_int("max_weight_sync_delay", max_weight_sync_delay, 0)
        self.workers = workers
        self.max_weight_sync_delay = max_weight_sync_delay
        self._steps: dict[int, int] = {}

    def __call__(self, batch: Any) -> Any:
        due = []
        for source in _workers_of(batch, "UpdateWorkerWeights"):
            index = source.shard
            steps = self._steps.get(index, 0) + source.tags.get("env_steps", 0)
            if steps >= self.max_weight_sync_delay:
                due.append(index)
                steps = 0
            self._steps[index] = steps
        self.workers.weight_sync.update_only(due)
        _get_shared_metrics().counters["num_weight_syncs"] += len(due)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"steps": dict(self._steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = dict(state["steps"])

    def __repr__(self) -> str:
        return f"UpdateWorkerWeights({self.max_weight_sync_delay})"


def contributors(item: Any, operator: str) -> list[int]:
    """Return the indices of the workers that sampled the rows of a batch or of Gradients; replayed
    rows have no workers.

    Raises:
        TypeError: the item is something else; the message names the operator.
    """
    return [source.shard for source in _workers_of(item, operator)]


def _workers_of(item: Any, operator: str) -> list[Source]:
    """Return the sources of a batch or of Gradients that are workers."""
    if not hasattr(item, "sources"):
        check_batch(item, operator)
    return [source for source in item.sources if source.origin != REPLAY_ORIGIN]
