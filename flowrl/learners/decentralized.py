"""Decentralized learning: each worker learns from its own fragment; gradients are averaged."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.data import SampleBatch
from flowrl.iter import Source
from flowrl.learners.actors import TIMEOUT_S, check_distributable
from flowrl.learners.group_store import GroupStore
from flowrl.learners.learner import (
    Batch,
    PolicyUpdate,
    ProcessGroupError,
    Updates,
    check_no_target_networks,
    select_rows,
    trainable_policies,
    update_policies,
)
from flowrl.policies.learning.epochs import concat_row_stats, mean_stats
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.seeding import restore_stream, stream_state

if TYPE_CHECKING:
    from flowrl.learners.process_group import ProcessGroup

ARRIVAL_CHECK_S = 0.01  # interval of a worker that waits for the other members of its group


@dataclass
class WorkerUpdate:
    """Report of a worker that has learned from its fragment.

    Attributes:
        updates: policy id -> PolicyUpdate.
        num_env_steps: env steps of the fragment.
        rows_by_policy: policy id -> number of rows in the fragment.
        weights_checksum: checksum of the weights after the update, equal on all workers of a group.
        group_name: name of the group that the worker learned in; "" if it learned alone.
        state: learning state of the policies; None except from the first worker of the group.
        sources: see SampleBatch.sources.
        learn_s: duration of the update [s].
    """

    updates: Updates
    num_env_steps: int
    rows_by_policy: dict[str, int]
    weights_checksum: int
    group_name: str = ""
    state: bytes | None = None
    sources: tuple[Any, ...] = ()
    learn_s: float = 0.0

    def env_steps(self) -> int:
        """See SampleBatch.env_steps."""
        return self.num_env_steps

    def steps_by_policy(self) -> dict[str, int]:
        """See SampleBatch.steps_by_policy."""
        return dict(self.rows_by_policy)

    def size_bytes(self) -> int:
        """Return the size of `state` [bytes]."""
        return len(self.state or b"")


def merge_updates(by_worker: Sequence[Updates]) -> Updates:
    """Return the updates of all workers as one: statistics are means over the rows of all."""
    merged: Updates = {}
    for policy_id in sorted({policy_id for updates in by_worker for policy_id in updates}):
        parts = [updates[policy_id] for updates in by_worker if policy_id in updates]
        stats = mean_stats([part.stats for part in parts], [part.rows for part in parts])
        merged[policy_id] = PolicyUpdate(
            stats,
            sum(part.rows for part in parts),
            sum(part.replayed_rows for part in parts),
            [lag for part in parts for lag in part.policy_lags],
            concat_row_stats([part.row_stats for part in parts]),
        )
    return merged


class LearnOnWorker:
    """for_each on the shards, fragment -> WorkerUpdate: update the worker's own policies.

    Args:
        num_sgd_iter, sgd_minibatch_size, policies: see Learner.
        global_vars: global variables of the WorkerSet if the worker is in this process, else None.
        timeout_s: timeout of the group's collective operations.

    Attributes:
        store_address: address of the GroupStore; None if the worker is in this process and learns
            alone.
    """

    def __init__(
        self,
        num_sgd_iter: int | None,
        sgd_minibatch_size: int | None,
        policies: Collection[str] | None,
        global_vars: dict[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        self.store_address: tuple[str, int] | None = None
        self._timeout_s = timeout_s
        self._global_vars = global_vars
        self.num_sgd_iter, self.sgd_minibatch_size = num_sgd_iter, sgd_minibatch_size
        self._policies = policies
        self._worker: RolloutWorker | None = None  # see bound_to
        self._store: GroupStore | None = None
        self._group_name = ""
        self._group: ProcessGroup | None = None
        self._rank = 0  # in the group

    def bound_to(self, worker: RolloutWorker) -> LearnOnWorker:
        """Return a copy of this operator that is bound to a worker."""
        bound = copy.copy(self)
        bound._worker = worker
        return bound

    def __call__(self, fragment: Batch) -> WorkerUpdate:
        worker = self._worker
        assert worker is not None
        with worker.lock:
            started = time.perf_counter()
            updates = self._update(worker, fragment)
            learn_s = time.perf_counter() - started
            weights_checksum = 0
            for policy_id in sorted(worker.policy_map):
                weights = worker.policy_map[policy_id].get_weights()
                for name in sorted(weights):
                    weights_checksum = zlib.crc32(weights[name].tobytes(), weights_checksum)
            state = None
            if self._group_name and self._rank == 0:
                from flowrl.learners.process_group import learning_state

                state = learning_state(trainable_policies(worker, self._policies))
        return WorkerUpdate(
            updates,
            fragment.env_steps(),
            fragment.steps_by_policy(),
            weights_checksum,
            self._group_name,
            state,
            learn_s=learn_s,
        )

    def _update(self, worker: RolloutWorker, fragment: Batch) -> Updates:
        rows: dict[str, SampleBatch | None] = dict(select_rows(worker, fragment, self._policies))
        check_no_target_networks(worker, rows)
        if self.store_address is not None and self._store is None:
            self._store = GroupStore(self.store_address)
        identity = worker.worker_index, worker.restart_count
        if self._store is not None:
            self._store.set_waiting(*identity, waits=True)
        try:
            if self._store is not None:
                self._join_group(worker, self._store)
                assert self._group is not None
                # all members update the same policies, in the same order
                ids = sorted(trainable_policies(worker, self._policies))
                have_rows = self._group.any_of([policy_id in rows for policy_id in ids])
                rows = {i: rows.get(i) for i, has in zip(ids, have_rows, strict=True) if has}
            for policy in worker.policy_map.values():
                policy.on_global_var_update(self._current_global_vars())
            versions = {pid: policy.version for pid, policy in worker.policy_map.items()}
            source = Source(max(worker.worker_index - 1, 0), tags={"weights_versions": versions})
            return update_policies(
                worker.policy_map,
                rows,
                (source,),
                self.num_sgd_iter,
                self.sgd_minibatch_size,
                clip_minibatch_size=True,  # failures of environments shorten fragments
                on_learn=worker.on_learn_on_batch,
            )
        except ProcessGroupError as error:
            raise ProcessGroupError(str(error), self._leave_group(worker)) from None
        except Exception:
            self._leave_group(worker)  # so that the others do not wait
            raise
        finally:
            if self._store is not None:
                self._store.set_waiting(*identity, waits=False)

    def _current_global_vars(self) -> dict[str, Any]:
        """Return the `global_vars` of the WorkerSet, which are the same on all workers."""
        if self._store is None:
            return self._global_vars or {"timestep": 0}
        return self._store.global_vars()

    def _leave_group(self, worker: RolloutWorker) -> str:
        """Leave the group, which the other members notice; return its name."""
        group_name, self._group_name = self._group_name, ""
        self._group = None
        for policy in worker.policy_map.values():
            learner = getattr(policy, "learner", None)
            if learner is not None and learner.process_group is not None:
                group, learner.process_group = learner.process_group, None
                group.close()
        return group_name

    def _join_group(self, worker: RolloutWorker, store: GroupStore) -> None:
        """Join the newest group and load the state that it starts from."""
        from flowrl.learners.process_group import ProcessGroup, load_learning_state

        if store.newest_group() == self._group_name:
            return
        policies: dict[str, Any] = trainable_policies(worker, self._policies)
        for policy in policies.values():
            check_distributable(policy)
            policy.learner.process_group = None
        group_name = self._wait_for_group(store)
        orders = {name: stream_state(policy.shuffle_rng) for name, policy in policies.items()}
        load_learning_state(policies, store.state(group_name))
        for name, policy in policies.items():  # each worker shuffles rows of its own
            restore_stream(policy.shuffle_rng, orders[name])
        members = store.members(group_name)
        self._group_name, self._rank = group_name, members.index(worker.worker_index)
        rendezvous = store.rendezvous(group_name)
        group = ProcessGroup(rendezvous, self._rank, len(members), timeout_s=self._timeout_s)
        self._group = group
        for policy in policies.values():
            policy.learner.process_group = group

    def _wait_for_group(self, store: GroupStore) -> str:
        """Wait until all members of the newest group have arrived; return its name.

        If a member dies before it arrives, a group without it becomes the newest.

        Raises:
            ProcessGroupError: a member has not arrived in time.
        """
        deadline = time.monotonic() + self._timeout_s
        arrived_in = ""
        while time.monotonic() < deadline:
            newest = store.newest_group()
            if newest != arrived_in:
                store.arrive(newest)
                arrived_in = newest
            if store.is_complete(newest):
                return newest
            time.sleep(ARRIVAL_CHECK_S)  # the store's own wait prints a warning at each timeout
        self._group_name = arrived_in
        raise ProcessGroupError(
            f"group {arrived_in}: a worker did not join within {self._timeout_s:g} s: it has died, "
            "or its machine is overloaded"
        )

    def __repr__(self) -> str:
        return "LearnOnWorker"
