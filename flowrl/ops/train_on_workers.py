"""TrainOnWorkers: workers learn from their own fragments, with averaged gradients (DD-PPO)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from flowrl.iter import NOT_READY, LocalIterator, Source, Stage, _get_shared_metrics
from flowrl.iter.errors import ShardFailedError
from flowrl.learners.actors import TIMEOUT_S
from flowrl.learners.decentralized import LearnOnWorker, WorkerUpdate, merge_updates
from flowrl.learners.group_store import GroupStore
from flowrl.learners.learner import (
    ProcessGroupError,
    check_learning_arguments,
    trainable_policies,
)
from flowrl.ops.plan_metrics import Info, record_updates
from flowrl.ops.rollout import CountRollouts
from flowrl.sampling.worker_set import WorkerSet, check_workers
from flowrl.setting_values import check_number

log = logging.getLogger("flowrl")

MAX_GROUP_FAILURES = 5  # consecutive, without a completed round


class TrainOnWorkers(LocalIterator[Any]):
    """An endless stream of (WorkerUpdate, info): workers learn from their own fragments.

    Each item is a round: every worker samples a fragment and trains on the same number of
    minibatches, with gradients averaged over the workers (Wijmans et al. 2019, arXiv 1911.00357).
    So weights stay equal and no rows are sent. After a round the local worker's policies receive
    the new weights. An item has the first worker's WorkerUpdate, and statistics that are means over
    the rows of all workers. Updates the same counters as ParallelRollouts and TrainOneStep; times
    `learn`, per round. If a worker dies, joins or leaves, a new group is formed from the state
    after the last round; counts `num_group_restarts`. A round that was interrupted is repeated,
    without the dead worker unless the setting `wait_for_replaced_workers` is on; the worker that
    replaces it joins a later round.

    Args:
        workers: the WorkerSet; without remote workers the local one learns alone.
        num_sgd_iter: passes over a fragment; None uses each policy's own setting.
        sgd_minibatch_size: rows of one worker per update; 0, or more rows than a fragment has, uses
            the whole fragment; None uses each policy's own setting.
        policies: ids of the policies to update; None for all that `policies_to_train` allows.
        timeout_s: seconds that workers wait for each other, at least 1; a dead process is noticed
            at once.

    Raises:
        ValueError: a number is out of range, or the setting `output` is set.
        TypeError (when pulled): a policy cannot learn in several processes, or has a target
            network, which remote workers would not update.
        RuntimeError (when pulled): the workers' weights differ.
    """

    def __init__(
        self,
        workers: WorkerSet,
        *,
        num_sgd_iter: int | None = None,
        sgd_minibatch_size: int | None = None,
        policies: Collection[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        check_workers(workers, "TrainOnWorkers")
        check_learning_arguments(policies, num_sgd_iter, sgd_minibatch_size)
        check_number("timeout_s", timeout_s, 1)
        if workers.config.output is not None:
            raise ValueError(
                "output: TrainOnWorkers keeps fragments on their workers, so nothing can be "
                "written: remove `output`, or use the plan ppo"
            )
        global_vars = None if workers.num_workers else workers.global_vars
        learn = LearnOnWorker(
            num_sgd_iter, sgd_minibatch_size, policies, global_vars, timeout_s=timeout_s
        )
        rounds = workers.parallel_iterator().for_each(learn).batch_across_shards()
        stage = TrainOnWorkersStage(rounds.stage, workers, learn, policies)
        super().__init__(stage, "TrainOnWorkers")


class TrainOnWorkersStage(Stage):
    """The stage of TrainOnWorkers."""

    name = "TrainOnWorkers"
    trains = True  # see ops.report.training_operators

    def __init__(
        self,
        rounds: Stage,
        workers: WorkerSet,
        learn: LearnOnWorker,
        policies: Collection[str] | None,
    ):
        super().__init__(rounds)
        self.policies = policies
        self.workers = workers
        self.learn = learn
        self._count = CountRollouts(workers)
        self._store: GroupStore | None = None
        self._group_number = 0  # the name of the group
        self._members: list[tuple[int, int]] = []  # (worker, restart count) in the group
        self._is_new_group = False  # it has not completed a round
        self._group_failures = 0  # since the last round
        self._uncounted_restarts = 0  # of the group, also outside of a pull
        self._failed_shard: ShardFailedError | None = None

    def start(self, seed: str | None) -> None:
        if not self.workers.num_workers:
            return
        import ray

        self.workers.remote_workers()  # starts Ray
        self._store = GroupStore((ray.util.get_node_ip_address(), 0))
        self.learn.store_address = self._store.address
        rounds: Any = self.parents[0]
        rounds.waits_for_others = self._waits_for_others
        rounds.saves_partial_rounds = False  # a resumed run forms a new group
        # announce the group before the new worker reads it
        if self.workers.config.recovery.rounds_wait_for_replacement:
            self.workers.on_recreate.append(self._on_recreate)
        self._form_group(self._store)

    def _waits_for_others(self, shard: int) -> bool:
        """Return whether a worker waits for other members of its group; shards count from 0."""
        restart_count = self.workers.restart_counts[shard]
        return self._store is not None and self._store.is_waiting(shard + 1, restart_count)

    def _form_group(self, store: GroupStore) -> None:
        """Announce a new group to the workers; it starts from the local policies."""
        from flowrl.learners.process_group import learning_state

        if self._group_number > 1:  # a worker may still read the entries of the last group
            store.forget(str(self._group_number - 1))
        self._group_number += 1
        self._members = self._current_members()
        self._is_new_group = True
        store.set_global_vars(self.workers.global_vars)
        members = [worker + 1 for worker, _ in self._members]
        state = learning_state(trainable_policies(self.workers.local_worker(), self.policies))
        store.announce(str(self._group_number), members, state)

    def _current_members(self) -> list[tuple[int, int]]:
        rounds: Any = self.parents[0]
        members = [shard.index for shard in rounds.prepare_members()]
        return [(index, self.workers.restart_counts[index]) for index in members]

    def _on_recreate(self) -> None:
        """Let a new worker join the group that is waiting for it, or form a new group."""
        if self._is_new_group:
            self._members = self._current_members()
        else:
            self._restart_group()

    def _restart_group(self) -> None:
        assert self._store is not None
        self._uncounted_restarts += 1
        self._form_group(self._store)

    def pull(self, block: bool) -> Any:
        try:
            return self._next_round()
        finally:
            if self._uncounted_restarts:
                _get_shared_metrics().counters["num_group_restarts"] += self._uncounted_restarts
                self._uncounted_restarts = 0

    def _next_round(self) -> Any:
        while True:
            if self._failed_shard is not None:
                raise self._failed_shard  # pulling again would block: the other workers wait for it
            if self._store is not None and self._members != self._current_members():
                self._restart_group()  # no member waits for the workers that left or died
            self._discard_updates_of_old_groups()
            updates = self._pull_updates()
            if updates is None:
                continue
            if updates is NOT_READY:
                if self._discard_updates_of_old_groups():
                    continue  # a new group was formed: request these workers again
                return updates
            if self._store is not None and all(update.state is None for update in updates):
                self._drop(zip(updates, self.parents[0].sources, strict=True))  # rank 0 died
                self._restart_group()
                continue
            self.items += 1
            return self._finish_round(updates, self.parents[0].sources)

    def _pull_updates(self) -> Any:
        """Return the updates of a round, or NOT_READY; None if the group broke and a new one was
        formed."""
        try:
            # without blocking: a dead worker is replaced while the others wait for it
            return self._pull_up(False)
        except ShardFailedError as error:
            self._failed_shard = error
            raise
        except ProcessGroupError as error:
            self._group_failures += 1
            if self._group_failures > MAX_GROUP_FAILURES:
                raise
            log.warning("the workers' group broke; forming a new one: %s", error)
            if error.group_name == str(self._group_number):
                self._restart_group()
            return None
        except Exception:
            self._group_failures += 1
            raise

    def _discard_updates_of_old_groups(self) -> bool:
        """Discard updates of earlier groups, so that their workers are requested again.

        Returns:
            whether updates were discarded.
        """
        gather: Any = self.parents[0]
        current = str(self._group_number) if self._store is not None else ""
        discarded = gather.discard(lambda update: update.group_name != current)
        self._drop(discarded)
        return bool(discarded)

    def _drop(self, updates: Iterable[tuple[WorkerUpdate, Source]]) -> None:
        for update, source in updates:
            self._count(((source,), update))
            _get_shared_metrics().counters["num_env_steps_dropped"] += update.num_env_steps

    def _finish_round(
        self, updates: list[WorkerUpdate], sources: tuple[Source, ...]
    ) -> tuple[WorkerUpdate, Info]:
        from flowrl.learners.process_group import load_learning_state

        if len({update.weights_checksum for update in updates}) > 1:
            raise RuntimeError(
                "TrainOnWorkers: the workers' weights differ although all gradients were averaged: "
                "check whether a policy changes its weights outside of its optimizer, or its "
                "network has buffers that the forward pass changes, such as BatchNorm"
            )
        worker = self.workers.local_worker()
        metrics = _get_shared_metrics()
        self._is_new_group, self._group_failures = False, 0
        if self.workers.num_workers:
            state = next(update.state for update in updates if update.state is not None)
            with worker.lock:
                load_learning_state(worker.policy_map, state)
                self.workers.weight_sync.republish()
            if not any(policy.observation_filter for policy in worker.policy_map.values()):
                self.workers.weight_sync.mark_synced(source.shard for source in sources)
        for update, source in zip(updates, sources, strict=True):
            self._count(((source,), update))
        steps = sum(update.num_env_steps for update in updates)
        merged = merge_updates([update.updates for update in updates])
        learn_s = max(update.learn_s for update in updates)  # the workers learn together
        info = record_updates(metrics, self, merged, steps, learn_s)
        if self._store is not None:
            self._store.set_global_vars(self.workers.global_vars)
        return updates[0], info

    def stop(self) -> None:
        if self._on_recreate in self.workers.on_recreate:
            self.workers.on_recreate.remove(self._on_recreate)
        self._store = None
