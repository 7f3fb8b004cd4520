"""Learners on Ray actors: each takes a share of every batch, and their gradients are averaged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import Source, ray_health
from flowrl.iter.ray_runtime import actor_class, death_errors, leave_ray, start_ray
from flowrl.iter.recovery import original_error
from flowrl.learners.learner import (
    Batch,
    Learner,
    LocalLearner,
    PolicyUpdate,
    ProcessGroupError,
    Updates,
    select_rows,
    trainable_policies,
    update_policies,
)
from flowrl.policies.learning.epochs import concat_row_stats, mean_stats
from flowrl.policies.policy import Policy
from flowrl.sampling.worker_set import WorkerSet
from flowrl.setting_values import check_int
from flowrl.threads import Threads, limit_threads

log = logging.getLogger("flowrl")

TIMEOUT_S = 300.0  # of a collective operation; a dead process is noticed at once
MAX_ATTEMPTS = 3  # per batch; each one after the first has new actors
STOP_TIMEOUT_S = 30.0  # maximum time for which stop() waits for the running update


class LearnerActor:
    """One learner of a group, on a Ray actor.

    Args:
        policies: policy id -> (class, observation space, action space, settings, state). A
            pickled policy would first be built on the device of its settings, not on `device`.
        rank: index of this learner in the group, from 0.
        size: number of learners in the group.
        store_address: (host, port) of the TCPStore through which the learners find each other.
        device: torch device of this learner's networks, "cpu" or "cuda".
        num_threads: see the setting `num_threads_per_process`; "auto" is 1.
    """

    def __init__(
        self,
        policies: dict[str, tuple[Any, ...]],
        rank: int,
        size: int,
        store_address: tuple[str, int],
        device: str,
        num_threads: Threads,
    ):
        limit_threads(num_threads)
        self.policies: dict[str, Any] = {}
        for policy_id, (policy_class, *arguments, config, state) in policies.items():
            policy = policy_class(*arguments, config.updated(device=device))
            policy.set_state(state)
            self.policies[policy_id] = policy
        self._is_first = rank == 0
        if size > 1:
            from torch.distributed import TCPStore

            from flowrl.learners.process_group import ProcessGroup

            backend = "nccl" if device.startswith("cuda") else "gloo"
            store = TCPStore(*store_address, is_master=False, wait_for_workers=False)
            group = ProcessGroup(store, rank, size, backend, timeout_s=TIMEOUT_S, splits_rows=True)
            for policy in self.policies.values():
                policy.learner.process_group = group

    def set_learning_state(self, state: bytes) -> None:
        """Load the state of the local policies, from `learning_state`."""
        from flowrl.learners.process_group import load_learning_state

        load_learning_state(self.policies, state)

    def update(
        self,
        rows: dict[str, SampleBatch],
        sources: tuple[Source, ...],
        timesteps: dict[str, int],
        global_vars: dict[str, Any],
        num_sgd_iter: int | None,
        sgd_minibatch_size: int | None,
        clip_minibatch_size: bool,
    ) -> tuple[Updates, dict[str, int], bytes | None]:
        """Learn from this learner's share of the rows, together with the group.

        Args:
            rows: rows of each policy.
            sources: the fragments that they are from.
            timesteps: timestep of each local policy, which sampling in process advances.
            global_vars: see `Policy.on_global_var_update`; for the time after the update.
            num_sgd_iter, sgd_minibatch_size: see Learner.
            clip_minibatch_size: see `update_policies`.

        Returns:
            the updates; the number of rows of each policy that this learner has learned from, over
            all passes; and the resulting state of the policies, None except on the first learner.
        """
        from flowrl.learners.process_group import learning_state

        for policy_id, timestep in timesteps.items():
            if self.policies[policy_id].timestep != timestep:
                self.policies[policy_id].on_global_var_update({"timestep": timestep})
        updates = update_policies(
            self.policies,
            rows,
            sources,
            num_sgd_iter,
            sgd_minibatch_size,
            clip_minibatch_size,
        )
        for policy in self.policies.values():
            policy.on_global_var_update(global_vars)
        updated = {policy_id: self.policies[policy_id] for policy_id in rows}
        shares = {
            policy_id: policy.learner.gradient.num_rows for policy_id, policy in updated.items()
        }
        return updates, shares, learning_state(updated) if self._is_first else None


class LearnerGroup(Learner):
    """Learners on Ray actors that make each update together.

    The actors split each minibatch that LocalLearner would use, so updates equal LocalLearner's up
    to rounding. The local worker's policies load the result of each update. The actors start with
    the first update. If one dies, all are restarted from the local policies and the batch is
    learned again.

    Args:
        workers, policies, num_sgd_iter, sgd_minibatch_size: see Learner.
        num_learners: number of actors.
        use_gpus: give each actor a GPU.
    """

    def __init__(
        self,
        workers: WorkerSet,
        policies: Collection[str] | None = None,
        num_sgd_iter: int | None = None,
        sgd_minibatch_size: int | None = None,
        *,
        num_learners: int,
        use_gpus: bool = False,
    ):
        super().__init__(workers, policies, num_sgd_iter, sgd_minibatch_size)
        self.num_learners, self.use_gpus = num_learners, use_gpus
        self._restarts = 0
        self._actors: list[Any] = []
        self._actor_versions: dict[str, Any] = {}
        self._store: Any = None
        self._owns_ray = False
        self._stopped = False
        self._lock = threading.Lock()  # held while actors are started or called, or stopped
        self._updating = threading.RLock()  # held during an update

    def update(self, batch: Batch) -> Updates:
        """Update the policies from a batch; see Learner.

        Raises:
            RuntimeError: the cluster lacks the GPUs, or the learners were stopped.
            ProcessGroupError, ray.exceptions.RayActorError: learners died three times in a row.
            Exception: an error that a policy raised.
        """
        with self._updating:
            return self._update(batch)

    def _update(self, batch: Batch) -> Updates:
        import ray

        from flowrl.learners.process_group import load_learning_state

        worker = self.workers.local_worker()
        rows = select_rows(worker, batch, self.policies)
        if not rows:
            return {}
        callback_stats: dict[str, dict[str, float]] = {policy_id: {} for policy_id in rows}
        for policy_id, batch_rows in rows.items():
            policy = worker.policy_map[policy_id]
            worker.on_learn_on_batch(policy, batch_rows, callback_stats[policy_id])
        failures: tuple[type[Exception], ...] = (*death_errors(), ray.exceptions.RayTaskError)
        for attempt in range(MAX_ATTEMPTS):
            with self._lock:
                if self._stopped:
                    raise RuntimeError("the learners were stopped: build a new algorithm to train")
                loads = self._prepare_actors()
                ray_health.check_ray()
                rows_ref = ray.put(rows)
                arguments = (
                    rows_ref,
                    batch.sources,
                    {policy_id: policy.timestep for policy_id, policy in self._policies().items()},
                    dict(self.global_vars),
                    self.num_sgd_iter,
                    self.sgd_minibatch_size,
                    isinstance(batch, MultiAgentBatch),
                )
                refs = [actor.update.remote(*arguments) for actor in self._actors]
            try:
                replies = _get_all_or_first_error([*loads, *refs])[len(loads) :]
            except failures as error:
                self._kill_actors()  # the others wait for the dead one
                cause = getattr(error, "cause", error)
                died = isinstance(cause, (*death_errors(), ProcessGroupError))
                if not died:
                    raise original_error(error) from None
                if attempt + 1 == MAX_ATTEMPTS or self._stopped:
                    raise cause from None
                log.warning("a learner died; restarting all %d: %s", self.num_learners, cause)
                self._restarts += 1
                continue
            with worker.lock:
                load_learning_state(worker.policy_map, replies[0][2])
                self._actor_versions = self._local_versions()
            by_learner, shares, _ = zip(*replies, strict=True)
            updates = _merge_shares(by_learner, shares)
            for policy_id, stats in callback_stats.items():
                updates[policy_id].stats.update(stats)
            return updates
        raise AssertionError

    def take_restarts(self) -> int:
        restarts, self._restarts = self._restarts, 0
        return restarts

    def _policies(self) -> dict[str, Any]:
        """Return the local policies that the actors may update."""
        return trainable_policies(self.workers.local_worker(), self.policies)

    def _local_versions(self) -> dict[str, Any]:
        """Return versions that change whenever other code changes the local policies."""
        policies = self._policies()
        versions: dict[str, Any] = {
            policy_id: (policy.version, policy.num_loads, getattr(policy, "target_version", 0))
            for policy_id, policy in policies.items()
        }
        return {**versions, "": self.workers.weight_sync.num_invalidations}

    def _prepare_actors(self) -> list[Any]:
        """Start the actors, or send them the local policies if those have changed.

        Returns:
            ray.ObjectRefs of the actors' replies, which raise if loading failed.
        """
        import ray

        from flowrl.learners.process_group import learning_state

        versions = self._local_versions()
        loads: list[Any] = []
        if not self._actors:
            self._start_actors()
        elif versions != self._actor_versions:
            state = ray.put(learning_state(self._policies()))
            loads = [actor.set_learning_state.remote(state) for actor in self._actors]
        self._actor_versions = {}  # unknown until the update of the actors was loaded
        return loads

    def _start_actors(self) -> None:
        import ray
        from torch.distributed import TCPStore

        self._owns_ray = self._owns_ray or start_ray(self.workers.config.address)
        self._check_gpus()
        policies = self._policies()
        for policy in policies.values():
            check_distributable(policy)
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        parts = {
            policy_id: (type(p), p.observation_space, p.action_space, p.config, p.get_state())
            for policy_id, p in policies.items()
        }
        address, policies_ref = (host, self._store.port), ray.put(parts)
        actor = actor_class(LearnerActor).options(num_gpus=int(self.use_gpus))
        device = "cuda" if self.use_gpus else "cpu"
        threads = self.workers.config.num_threads_per_process
        self._actors = [
            actor.remote(policies_ref, rank, self.num_learners, address, device, threads)
            for rank in range(self.num_learners)
        ]

    def _kill_actors(self) -> None:
        import ray

        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        self._actors, self._store = [], None

    def _check_gpus(self) -> None:
        """Raise RuntimeError if the cluster lacks the GPUs."""
        import ray

        gpus = ray.cluster_resources().get("GPU", 0)
        of_workers = self.workers.num_workers * self.workers.config.num_gpus_per_worker
        if self.use_gpus and gpus < self.num_learners + of_workers:
            taken, remedy = "", ""
            if of_workers:
                taken = f", of which the workers reserve {of_workers:g}"
                remedy = ", a lower num_gpus_per_worker leaves them more GPUs"
            raise RuntimeError(
                f"num_gpus={self.num_learners}: each learner needs a GPU, the cluster has "
                f"{gpus:g} GPUs{taken}; num_learners={self.num_learners} starts learners on "
                f"CPUs{remedy}"
            )

    def start(self) -> None:
        """Allow updates.

        Raises:
            RuntimeError: the cluster lacks the GPUs; without a cluster, the first update raises it.
        """
        import ray

        self._stopped = False
        if ray.is_initialized():
            self._check_gpus()

    def stop(self) -> None:
        """Kill the actors, even during an update, which raises an error then."""
        self._stopped = True
        with self._lock:
            if self._actors:
                self._kill_actors()
            owns_ray, self._owns_ray = self._owns_ray, False
        try:  # an update in another thread would start Ray again
            if self._updating.acquire(timeout=STOP_TIMEOUT_S):
                self._updating.release()
        finally:
            if owns_ray:
                leave_ray()


def make_learner(
    workers: WorkerSet,
    policies: Collection[str] | None = None,
    num_sgd_iter: int | None = None,
    sgd_minibatch_size: int | None = None,
    *,
    num_gpus: int = 0,
    num_learners: int = 0,
) -> Learner:
    """Return a LearnerGroup if `num_gpus` or `num_learners` is given, else a LocalLearner.

    Args:
        workers, policies, num_sgd_iter, sgd_minibatch_size: see Learner.
        num_gpus: number of learners on actors with a GPU each.
        num_learners: number of learners on actors without GPUs.

    Raises:
        ValueError: both numbers are given, or one is negative.
    """
    for name, value in (("num_gpus", num_gpus), ("num_learners", num_learners)):
        check_int(name, value, 0)
    if num_gpus and num_learners:
        raise ValueError("give num_gpus (learners with a GPU each) or num_learners, not both")
    options = workers, policies, num_sgd_iter, sgd_minibatch_size
    count = num_gpus or num_learners
    if count:
        return LearnerGroup(*options, num_learners=count, use_gpus=bool(num_gpus))
    return LocalLearner(*options)


def check_distributable(policy: Policy) -> None:
    """Raise for a policy that cannot learn in several processes.

    Raises:
        TypeError: it is not a TorchPolicy, or computes or applies gradients with functions of its
            own.
        ValueError: `microbatch_size` is set.
    """
    if not hasattr(policy, "learner"):
        raise TypeError(
            f"{type(policy).__name__} cannot learn in several processes: it is not a TorchPolicy"
        )
    if own := {"compute_gradients_fn", "apply_gradients_fn"} & set(getattr(policy, "hooks", ())):
        raise TypeError(
            f"{type(policy).__name__} cannot learn in several processes: the gradients of its own "
            f"{min(own)} cannot be averaged"
        )
    if policy.config.microbatch_size:
        raise ValueError(
            f"microbatch_size={policy.config.microbatch_size} cannot be combined with several "
            "learning processes: set microbatch_size=0, or learn in one process"
        )


def _get_all_or_first_error(refs: list[Any]) -> list[Any]:
    """Return all results; raise the first error at once, even if other results never come."""
    results: dict[Any, Any] = {}
    while len(results) < len(refs):
        done = ray_health.wait([ref for ref in refs if ref not in results], 1)
        results.update(zip(done, ray_health.get(done, wait_first=False), strict=True))
    return [results[ref] for ref in refs]


def _merge_shares(by_learner: Sequence[Updates], shares: Sequence[dict[str, int]]) -> Updates:
    """Return the updates of learners that shared a batch as one: means of the statistics, weighted
    by the learners' numbers of rows (`shares`), and concatenated statistics of rows."""
    merged: Updates = {}
    for policy_id, first in by_learner[0].items():
        # a learner without rows reports only some of the statistics
        stats = mean_stats(
            [updates[policy_id].stats for updates in by_learner],
            [share[policy_id] for share in shares],
        )
        # each learner reports the values of its own rows
        row_stats = concat_row_stats([updates[policy_id].row_stats for updates in by_learner])
        merged[policy_id] = PolicyUpdate(
            stats, first.rows, first.replayed_rows, first.policy_lags, row_stats
        )
    return merged
