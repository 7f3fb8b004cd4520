"""RolloutPool: the remote workers of a WorkerSet as a pool of shards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from flowrl.errors import ConfigError
from flowrl.iter.pools import ActorPool, Pool
from flowrl.iter.shard_server import serve_next, serve_remote
from flowrl.iter.shard_stream import Reply, ShardRequest
from flowrl.process_usage import resident_bytes
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.weight_sync import WeightSync, load_weights

log = logging.getLogger("flowrl")

MB = 1 << 20


class RemoteWorkers(Protocol):
    """The part of a WorkerSet that a RolloutPool uses; workers are numbered from 0."""

    num_workers: int
    failed: set[int]
    restart_counts: list[int]

    def remote_workers(self) -> list[Any]:
        """Return the actor handles."""

    def recreate(self, index: int) -> Any:
        """Return a new actor that replaces a failed one."""

    def take_weights(self, index: int) -> Any | None:
        """Return the weights that a worker must load before it samples; None if it needs none."""


class LocalRolloutPool(Pool):
    """The local worker of a WorkerSet as a pool of one shard.

    Args:
        local_worker: returns the worker.
        weight_sync: records the progress of a learner thread that trains the worker's policies.
        global_vars: passed to the policies before each fragment; see
            `Policy.on_global_var_update`.
    """

    keeps_state = True

    def __init__(
        self,
        local_worker: Callable[[], RolloutWorker],
        weight_sync: WeightSync,
        global_vars: dict[str, Any],
    ):
        super().__init__(lambda: [local_worker()], 1)
        self._weight_sync = weight_sync
        self._global_vars = global_vars

    def result(self, ref: Any) -> Reply:
        if self._weight_sync.learner_thread is None:
            with ref.worker.lock:
                self._update_policies(ref.worker)
            return super().result(ref)
        with ref.worker.lock:  # the learner makes no step meanwhile
            self._weight_sync.observe_learner()
            self._update_policies(ref.worker)
            return super().result(ref)

    def _update_policies(self, worker: RolloutWorker) -> None:
        timestep = self._global_vars["timestep"]
        for policy in worker.policy_map.values():
            if policy.timestep != timestep:
                policy.on_global_var_update(self._global_vars)


class RolloutPool(ActorPool):
    """Remote workers that a WorkerSet creates and stops; a request carries missing weights.

    Args:
        workers: the WorkerSet.
        recreate_failed: whether failed workers are replaced.
    """

    keeps_state = True
    why_not_replaced = "recreate_failed_workers is False"

    def __init__(self, workers: RemoteWorkers, recreate_failed: bool):
        super().__init__(workers.recreate if recreate_failed else None, workers.num_workers)
        self._owned = set()
        self._workers_of = workers

    def start(self) -> None:
        # the pool replaces failed actors in the WorkerSet's own list
        self._handles = self._workers_of.remote_workers()
        self._incarnations = list(self._workers_of.restart_counts)

    def resize(self, num_workers: int) -> None:
        """Follow a change of the number of workers."""
        self._count = num_workers
        self._incarnations = list(self._workers_of.restart_counts)
        self.num_membership_changes += 1

    def worker_name(self, index: int) -> str:
        return f"worker {index + 1}"  # as in logs, metrics and the errors of workers

    def mark_failed(self, index: int) -> None:
        self._workers_of.failed.add(index)

    def submit(self, index: int, request: ShardRequest) -> Any:
        actor = self.handle(index)
        return actor.apply.remote(_serve, self._workers_of.take_weights(index), request)

    def next_item_submitter(self, index: int, stream_handle: int) -> Callable[[], Any]:
        actor, take_weights = self.handle(index), self._workers_of.take_weights
        return lambda: actor.apply.remote(_serve_next, take_weights(index), stream_handle)

    def stop(self) -> None:
        """Do nothing: the set stops its workers."""


def _serve(
    worker: RolloutWorker, payload: tuple[Any, ...] | None, request: ShardRequest
) -> list[Any]:
    if (memory := _excessive_memory(worker)) is not None:
        limit = worker.config.max_worker_memory_mb
        raise ConfigError(
            f"max_worker_memory_mb={limit}: worker {worker.worker_index} uses {memory:,.0f} MB "
            "before its first fragment: set a higher limit"
        )
    load_weights(worker, payload)
    return serve_remote(worker, request)


def _serve_next(
    worker: RolloutWorker, payload: tuple[Any, ...] | None, stream_handle: int
) -> list[Any]:
    """Return the next fragment, unless the process has become too large: then end it."""
    if (memory := _excessive_memory(worker)) is not None:
        log.warning(
            "worker %d uses %.0f MB, more than max_worker_memory_mb=%d: it ends and is replaced",
            worker.worker_index, memory, worker.config.max_worker_memory_mb,
        )  # fmt: skip
        import ray

        worker.stop()
        ray.actor.exit_actor()
    load_weights(worker, payload)
    return serve_next(worker, stream_handle)


def _excessive_memory(worker: RolloutWorker) -> float | None:
    """Return the memory of this process [MB] if it exceeds `max_worker_memory_mb`, else None."""
    limit = worker.config.max_worker_memory_mb
    if limit is None:
        return None
    memory = resident_bytes() / MB
    return memory if memory > limit else None
