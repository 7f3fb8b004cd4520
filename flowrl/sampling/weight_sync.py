"""WeightSync: which weights each remote worker has, and which it must load next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from flowrl.iter.metrics import count_bytes_between_nodes, current_metrics
from flowrl.iter.ray_health import check_ray
from flowrl.sampling.rollout_worker import RolloutWorker

INLINE_BYTES = 100_000  # larger weights go through the object store, one object per version


class _Versions(NamedTuple):
    """The versions of weights and filters, and numbers of loaded states, by policy id."""

    weights: dict[str, int]
    filters: dict[str, int]
    loads: dict[str, int]


class _Snapshot(NamedTuple):
    """Copies of the policies' weights and filters, by policy id."""

    versions: _Versions
    weights: dict[str, Any]
    filters: dict[str, Any]
    learner_step: int = 0  # of the learner thread that published them


class _Payload:
    """The arguments of `RolloutWorker.set_weights`, or a Ray reference to them.

    Attributes:
        versions: of the weights and filters.
        global_vars: a copy of those that are sent along.
        num_bytes: size of the weights [bytes].
        nodes: the cluster nodes that hold the object; None if it is sent inline every time.
        content: the arguments, or the reference.
    """

    def __init__(self, snapshot: _Snapshot, global_vars: dict[str, Any], node: str | None):
        self.versions, self.global_vars = snapshot.versions, dict(global_vars)
        self.num_bytes = sum(
            array.nbytes for weights in snapshot.weights.values() for array in weights.values()
        )
        self.nodes: set[str | None] | None = None
        self.content: Any = (
            snapshot.weights, snapshot.versions.weights, snapshot.filters, self.global_vars,
        )  # fmt: skip
        if self.num_bytes > INLINE_BYTES and node is not None:  # the workers are in processes
            import ray

            check_ray()
            self.content = ray.put(self.content)
            self.nodes = {node}

    def count_transfer(self, from_node: str | None, to_node: str | None) -> None:
        """Add the bytes that this transfer moves between nodes to `num_bytes_between_nodes`."""
        if to_node == from_node:
            return
        if self.nodes is None or to_node not in self.nodes:
            count_bytes_between_nodes(self.num_bytes)
        if self.nodes is not None:
            self.nodes.add(to_node)


class ObservedLearner(Protocol):
    """A learner thread, whose progress the plan observes; see LearnerThread."""

    num_steps: int

    def observe(self, num_steps: int) -> int:
        """Record the number of steps that the plan observes, and return it. In a replay, make the
        recorded number of steps and return that number."""


class WeightSync:
    """Tracks the weights versions of remote workers; workers are numbered from 0.

    Args:
        local_worker: returns the worker whose policies learn.
        global_vars: sent with the weights, or alone if only they have changed; see
            `Policy.on_global_var_update`.

    Attributes:
        num_invalidations: number of calls of `invalidate`.
        learner_thread: publishes weights, if its progress is recorded or replayed; else None.
    """

    def __init__(self, local_worker: Callable[[], RolloutWorker], global_vars: dict[str, Any]):
        self._local_worker = local_worker
        self._global_vars = global_vars
        self._sent: dict[int, _Versions] = {}  # worker -> versions of its weights
        self._sent_vars: dict[int, dict[str, Any]] = {}  # worker -> its global_vars
        self._selected: set[int] | None = None  # workers that may get new weights; None: all
        self._published: _Snapshot | None = None
        self._payload: _Payload | None = None
        self._filter_updates: list[dict[str, Any]] = []  # not merged yet, by policy id
        self._filter_lock = threading.RLock()  # of `_filter_updates` and `_published`
        self.num_invalidations = 0
        self.learner_thread: ObservedLearner | None = None

    def versions(self) -> dict[str, int]:
        """Return the published versions of the weights by policy id, or else those of the local
        policies."""
        return self._versions_of(self._observed()).weights

    def _versions_of(self, published: _Snapshot | None) -> _Versions:
        return self._local_versions() if published is None else published.versions

    def _local_versions(self) -> _Versions:
        policies = self._local_worker().policy_map
        return _Versions(
            {pid: policy.version for pid, policy in policies.items()},
            {pid: policy.filter_version for pid, policy in policies.items()},
            {pid: policy.num_loads for pid, policy in policies.items()},
        )

    def _observed(self) -> _Snapshot | None:
        """Return the published copy; None if there is none. In a replay, let the learner make the
        recorded steps first."""
        published = self._published
        if published is None or self.learner_thread is None or current_metrics() is None:
            return published
        num_steps = self.learner_thread.observe(published.learner_step)
        return published if published.learner_step == num_steps else self._published

    def observe_learner(self) -> None:
        """Record the steps of the learner thread before the plan changes policies that it trains.

        In a replay, the learner makes as many steps first. The caller holds the lock of the local
        worker.
        """
        if self.learner_thread is not None and current_metrics() is not None:
            self.learner_thread.observe(self.learner_thread.num_steps)

    def add_filter_updates(self, updates: dict[str, Any], wait: bool) -> None:
        """Merge the statistics of a worker's filters into those of the local policies.

        Args:
            updates: policy id -> result of `Policy.take_filter_updates`.
            wait: merge at once, and wait for an update of a learner thread. False: while a learner
                thread publishes weights, merge before the next copy.
        """
        if wait or self._published is None:
            with self._local_worker().lock:
                self.observe_learner()
                self._filter_updates.append(updates)
                self.merge_filter_updates()
            return
        with self._filter_lock:  # the next copy contains these updates, and none before it does
            if self.learner_thread is not None and current_metrics() is not None:
                self.learner_thread.observe(self._published.learner_step)
            self._filter_updates.append(updates)

    def merge_filter_updates(self) -> None:
        """Merge the updates that wait; the caller holds the lock of the local worker."""
        with self._filter_lock:
            for by_policy in self._filter_updates:
                for policy_id, updates in by_policy.items():
                    self._local_worker().policy_map[policy_id].merge_filter_updates(updates)
            self._filter_updates.clear()

    def publish(self, learner_step: int | None = None) -> None:
        """Copy the current weights; workers get this copy until the next call.

        A learner thread calls this after each update, because no other thread may read weights that
        it is changing.

        Args:
            learner_step: number of steps of the learner thread; None: as in the last copy.
        """
        with self._local_worker().lock, self._filter_lock:
            if learner_step is None:
                learner_step = 0 if self._published is None else self._published.learner_step
            self.merge_filter_updates()
            self._published = self._snapshot()._replace(learner_step=learner_step)

    def republish(self) -> None:
        """Call `publish` again if there is a copy, because the plan has changed policies."""
        if self._published is not None:
            self.publish()

    def unpublish(self) -> None:
        """Drop the copy of `publish`: workers get the current weights. No thread may learn."""
        self.merge_filter_updates()
        self._published = self.learner_thread = None

    def _snapshot(self) -> _Snapshot:
        policies = self._local_worker().policy_map
        return _Snapshot(
            self._local_versions(),
            {pid: policy.get_weights() for pid, policy in policies.items()},
            {pid: policy.filter_state_dict() for pid, policy in policies.items()},
        )

    def take_payload(self, index: int, from_node: str | None, to_node: str | None) -> Any | None:
        """Return what a worker must load before it samples, and mark it as sent.

        Adds the preparation of each new version of the weights to the timer `update`.

        Args:
            index: the worker.
            from_node, to_node: cluster nodes of this process and of the worker; transfers between
                different nodes are counted.

        Returns:
            an argument for `load_weights`, without weights if the worker has them or is not
            selected; None if nothing has changed.
        """
        published = self._observed()
        versions = self._versions_of(published)
        if self._sent.get(index) == versions:
            return self._changed_vars(index)
        if self._selected is not None and index in self._sent:
            if index not in self._selected:
                return self._changed_vars(index)
            self._selected.discard(index)
        payload, is_new = self._payload, index not in self._sent
        if (
            payload is None
            or payload.versions != versions
            or (is_new and payload.global_vars != self._global_vars)
        ):
            started = time.perf_counter()
            snapshot = published or self._snapshot()
            payload = self._payload = _Payload(snapshot, self._global_vars, from_node)
            metrics = current_metrics()
            if metrics is not None:
                metrics.timers["update"].push(time.perf_counter() - started)
        self._sent[index], self._sent_vars[index] = payload.versions, payload.global_vars
        payload.count_transfer(from_node, to_node)
        return payload.content

    def _changed_vars(self, index: int) -> tuple[Any, ...] | None:
        """Return a payload of `global_vars` without weights; None if the worker has received the
        current ones."""
        if self._sent_vars.get(index) == self._global_vars:
            return None
        self._sent_vars[index] = dict(self._global_vars)
        return {}, None, None, self._sent_vars[index]

    def update_only(self, indices: Iterable[int]) -> None:
        """Let only these workers and new ones receive the next version, once; calls accumulate."""
        self._selected = (self._selected or set()) | set(indices)

    def update_also(self, indices: Iterable[int]) -> None:
        """Add workers to the selection of `update_only`, if there is one."""
        if self._selected is not None:
            self._selected |= set(indices)

    def update_all(self) -> None:
        """Let every worker receive each new version; undoes `update_only`."""
        self._selected = None

    def mark_synced(self, indices: Iterable[int]) -> None:
        """Mark these workers, which learn themselves, as having the current weights."""
        for index in indices:
            self._sent[index] = self._versions_of(self._observed())

    def forget(self, index: int) -> None:
        """Forget which version a worker has, so that its next request carries weights."""
        self._sent.pop(index, None)
        self._sent_vars.pop(index, None)

    def invalidate(self) -> None:
        """Note that weights changed without a new version: the next requests carry them."""
        self.num_invalidations += 1
        self._sent.clear()
        self._payload = None
        self.republish()

    def clear(self) -> None:
        """Forget the versions of all workers, which have stopped."""
        self._sent.clear()


def load_weights(worker: RolloutWorker, payload: tuple[Any, ...] | None) -> None:
    """Load what `WeightSync.take_payload` returned into a worker; runs on its actor."""
    if payload is not None:
        worker.set_weights(*payload)


def resume_worker(
    worker: RolloutWorker, payload: tuple[Any, ...] | None, state: dict[str, Any]
) -> int:
    """Load weights and a sampling state; return the number of episodes that start again."""
    if payload is not None:
        worker.set_weights(*payload[:3])  # the state has the counters
    return worker.load_sampling_state_dict(state)
