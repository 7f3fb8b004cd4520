"""WorkerSet: one local worker that learns, and remote workers that sample.

Workers are created on first use. Weights are pulled, not broadcast: a request for a fragment
carries the local policies' weights if the worker does not have them yet, so no update waits in an
actor's mailbox and no weights are sent twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, TypeVar

from flowrl.data import Batch
from flowrl.envs.registry import EnvCreator, env_creator_for
from flowrl.errors import ConfigError
from flowrl.iter import ParallelIterator, ray_health
from flowrl.iter.pools import Pool
from flowrl.iter.ray_runtime import actor_class, leave_ray, node_id, start_ray
from flowrl.iter.shards import Shard
from flowrl.policies.policy import Policy
from flowrl.sampling.placement import Placement
from flowrl.sampling.replayed_pool import ReplayedPool
from flowrl.sampling.rollout_pool import LocalRolloutPool, RolloutPool
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.spare_worker import SpareWorkers
from flowrl.sampling.weight_sync import WeightSync, load_weights
from flowrl.sampling.worker_calls import CALL_TIMEOUT_S, WorkerCalls, stop_workers
from flowrl.sampling.worker_config import WorkerConfig, unsendable_setting_named
from flowrl.sampling.worker_states import check_worker_states, highest, send_states
from flowrl.setting_values import check_int

T = TypeVar("T")


class WorkerSet:
    """A local worker and `num_workers` remote ones with the same policies and environments.

    Remote workers are numbered from 0 here; their `worker_index` starts from 1.

    Args:
        env_creator: function from an EnvContext to an environment, or an environment id.
        policy_class: class of the policies whose spec names none, or a mapping from policy id to
            PolicySpec.
        config: settings of the set and its workers (see WorkerConfig) and of the policies, a
            mapping or a record.
        num_workers: overrides the setting. With 0, the local worker samples and Ray is not used.

    Attributes:
        num_workers: number of remote workers.
        failed: remote workers that failed and are not replaced.
        restart_counts: for each remote worker, the number of earlier workers with its index.
        on_recreate: functions called before a failed worker is replaced.
        node: the Ray cluster node of this process; None without Ray.
        nodes: for each remote worker, the node of its latest fragment.
        env_steps_by_worker: counted env steps of each current worker.
        env_steps_of_removed_workers: counted env steps of failed and removed workers.
        num_episodes_restarted: episodes that a loaded state could not resume.
        global_vars: `timestep` (env steps sampled) and `total_timesteps` (the setting), sent along
            with the weights.
        standalone_rollouts: stream of rollouts sampled without a plan; None before the first.
        weight_sync: tracks which weights each remote worker has.
    """

    def __init__(
        self,
        env_creator: EnvCreator | str,
        policy_class: type[Policy] | Mapping[str, Any] | None,
        config: Any = None,
        num_workers: int | None = None,
    ):
        self.config = WorkerConfig.of(config)
        self._policy_config = config
        self._creator = env_creator_for(env_creator)
        self._policy_class = policy_class
        count: Any = self.config.num_workers if num_workers is None else num_workers
        if not isinstance(count, Integral) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"num_workers: must be an int >= 0, got {count!r}")
        self.num_workers = self._num_configured = count = int(count)
        self.failed: set[int] = set()
        self.restart_counts = [0] * count
        self._past_restarts: list[int] = []  # those of a state that was loaded into running workers
        self.on_recreate: list[Callable[[], None]] = []
        self.node: str | None = None
        self.nodes: dict[int, str | None] = {}
        self.env_steps_by_worker: dict[int, int] = {}
        self.env_steps_of_removed_workers = 0
        self.num_episodes_restarted = 0
        total = self.config.total_timesteps
        self.global_vars: dict[str, Any] = {"timestep": 0, "total_timesteps": total}
        self.standalone_rollouts: Any = None
        self._local: RolloutWorker | None = None
        self._stopped = self._owns_ray = False
        self._remote: list[Any] | None = None
        self._pool: Pool | None = None
        self.weight_sync = WeightSync(self.local_worker, self.global_vars)
        self._placement = Placement(self.config)
        self._calls = WorkerCalls(self.config.sample_timeout_s or CALL_TIMEOUT_S)
        self._spares = SpareWorkers(self.config.num_spare_workers)
        self._loaded: list[Any] | None = None  # states for remote workers that have not started

    def steps_per_fragment(self) -> int:
        """Return the env steps of one worker's fragment; whole episodes may give more.

        With `rollout_fragment_length="auto"`, one round of all workers gives at least one train
        batch.
        """
        # a vector environment of the user may have another number than the setting
        num_envs = self.config.num_envs_per_worker if self._local is None else self._local.num_envs
        length = self.config.rollout_fragment_length
        per_env = math.ceil(self._share_of_batch() / num_envs) if length == "auto" else length
        return per_env * num_envs

    def _share_of_batch(self) -> int:
        """Return the env steps of one worker in a train batch."""
        return math.ceil(self.config.train_batch_size / max(1, self._num_configured))

    def replay_in_process(self) -> None:
        """Create the remote workers in this process, one after another, to replay a recorded run.

        Raises:
            RuntimeError: the set is in use.
        """
        if self._pool is not None or self._remote is not None:
            raise RuntimeError("replay_in_process() must be called before the workers start")
        if self.num_workers:
            self._pool = ReplayedPool(self)

    # -- workers -------------------------------------------------------------------------------

    def new_worker(self, worker_index: int) -> RolloutWorker:
        """Return a new worker in this process; `worker_index` is 0 for the local one, else from
        1."""
        return RolloutWorker(**self._worker_arguments(worker_index))

    def _worker_arguments(self, worker_index: int) -> dict[str, Any]:
        return {
            "env_creator": self._creator,
            "policy_spec": self._policy_class,
            "policy_config": self._policy_config,
            "worker_index": worker_index,
            "num_workers": self.num_workers,
            "steps_per_fragment": self._share_of_batch(),
        }

    def local_worker(self) -> RolloutWorker:
        """Return the worker in this process; RuntimeError after `stop()`."""
        if self._stopped:
            raise RuntimeError("the workers were stopped: build a new algorithm or WorkerSet")
        if self._local is None:
            self._local = self.new_worker(0)
        return self._local

    def remote_workers(self) -> list[Any]:
        """Return the Ray actor handles of the remote workers; created on the first call."""
        if isinstance(self._pool, ReplayedPool):
            return []
        if self._remote is None:
            if self.num_workers:
                self.local_worker()  # raises errors of the environment that all would raise
                self._start_ray()
                self._placement.reserve(0, self.num_workers)
            self._remote = [self._create_actor(index) for index in range(self.num_workers)]
            self._start_spares()
        self._load_remote_states()
        return self._remote

    def _start_ray(self) -> None:
        num_cpus = max(os.cpu_count() or 1, self.num_workers)
        self._owns_ray = self._owns_ray or start_ray(self.config.address, num_cpus)
        self.node = node_id()

    def _create_actor(self, index: int) -> Any:
        """Return a new actor for a remote worker; its first request carries weights."""
        self.weight_sync.forget(index)
        restarts = self.restart_counts[index]
        spare = self._spares.take(index + 1, restarts, self.num_workers)
        if spare is not None:
            return spare
        actor = actor_class(RolloutWorker).options(**self._placement.options(index))
        with unsendable_setting_named(self.config):
            return actor.remote(**self._worker_arguments(index + 1), restart_count=restarts)

    def _start_spares(self) -> None:
        if self.num_workers:
            self._spares.start(self._worker_arguments(0))

    def _next_restart(self, index: int) -> None:
        """Give the next worker at an index a restart count that no earlier one had, so that it
        repeats no random streams."""
        self.restart_counts[index] = highest(self.restart_counts, self._past_restarts)[index] + 1

    def recreate(self, index: int) -> Any:
        """Return a new actor that replaces a failed remote worker."""
        self._next_restart(index)
        self.env_steps_of_removed_workers += self.env_steps_by_worker.pop(index, 0)
        for callback in self.on_recreate:
            callback()
        actor = self._create_actor(index)
        self._start_spares()
        return actor

    def add(self, num_workers: int = 1) -> None:
        """Add remote workers, also while a plan runs.

        The plan's next pull sends them requests; they load the newest weights before their first
        step. The fragment length stays as it was.

        Args:
            num_workers: number of workers to add.

        Raises:
            ValueError: `num_workers` is below 1, or the set has no remote workers: its plan samples
                in this process.
            ConfigError: the cluster lacks resources for them.
        """
        _check_resize(num_workers, self.num_workers)
        self._resize(self.num_workers + num_workers)

    def remove(self, num_workers: int = 1) -> None:
        """Remove the last remote workers, also while a plan runs.

        Their unfinished fragments are lost, and so are fragments that stayed on them by reference.

        Args:
            num_workers: number of workers to remove.

        Raises:
            ValueError: `num_workers` is below 1, or no worker would remain.
        """
        _check_removal(num_workers, self.num_workers)
        self._resize(self.num_workers - num_workers)

    def _resize(self, count: int) -> None:
        before = self.num_workers
        if self._remote is not None and count > before:
            self._placement.reserve(before, count - before)
        self.num_workers = count
        known = max(len(self.restart_counts), len(self._past_restarts))
        self.restart_counts += [0] * (max(count, known) - len(self.restart_counts))
        for index in range(before, min(count, known)):
            self._next_restart(index)
        if self._loaded is not None:
            self._loaded = [*self._loaded, *[None] * (count - before)][:count]
        if isinstance(self._pool, RolloutPool):
            self._pool.resize(count)
        if self._remote is not None:
            for index in range(before, count):
                self._remote.append(self._create_actor(index))
            self._start_spares()
            for index in range(count, before):
                self._forget_worker(index)
            removed, self._remote[count:] = self._remote[count:], []
            stop_workers(removed, None, self._placement, count)

    def _forget_worker(self, index: int) -> None:
        """Drop the records of a removed worker; a new one may get its index."""
        self.weight_sync.forget(index)
        self.nodes.pop(index, None)
        self.failed.discard(index)
        self.env_steps_of_removed_workers += self.env_steps_by_worker.pop(index, 0)

    # -- weights and global variables ----------------------------------------------------------

    def set_total_timesteps(self, total_timesteps: int | None) -> None:
        """Replace the setting; remote workers get the number with their next request."""
        self.global_vars["total_timesteps"] = total_timesteps
        for policy in self.local_worker().policy_map.values():
            policy.on_global_var_update(
                {"timestep": policy.timestep, "total_timesteps": total_timesteps}
            )
        self.weight_sync.invalidate()

    def sync_weights(self) -> None:
        """Send the local weights to every working remote worker that lacks them, and wait.

        Raises:
            Exception: an error of a worker.
        """
        sent = [(actor, self.take_weights(index)) for index, actor in self._working()]
        refs = [actor.apply.remote(load_weights, p) for actor, p in sent if p is not None]
        if refs:
            ray_health.get(refs)

    def take_weights(self, index: int) -> Any | None:
        """Return the weights that a remote worker must load before it samples, or None.

        The caller must send them: the worker counts as up to date afterwards.
        """
        return self.weight_sync.take_payload(index, self.node, self.nodes.get(index, self.node))

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the sampling state of all workers; the policies' states are not included.

        The entry of a remote worker that does not answer in time is None; see WorkerCalls.
        """
        remote: list[Any] = [None] * self.num_workers
        if self._remote is None and self._loaded is not None:
            remote = self._loaded
        elif self._remote and not ray_health.is_ray_lost():
            states = self._calls.get_states(self._remote, self.env_steps_by_worker)
            remote[: len(self._remote)] = states
        return {
            "local": self.local_worker().sampling_state_dict(),
            "remote": remote,
            "started": self._remote is not None or self._loaded is not None,
            "restart_counts": highest(self.restart_counts, self._past_restarts),
            "num_configured": self._num_configured,
            "env_steps_by_worker": dict(self.env_steps_by_worker),
            "env_steps_of_removed_workers": self.env_steps_of_removed_workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`; the local policies must be loaded already.

        Sets `num_episodes_restarted`; remote workers that have not started add theirs when they do.

        Raises:
            KeyError, ValueError: the state belongs to another set of workers.
        """
        check_worker_states(state, self.local_worker(), self._num_configured)
        self._loaded = None
        if len(state["remote"]) != self.num_workers:
            self._resize(len(state["remote"]))
        self.env_steps_by_worker = dict(state["env_steps_by_worker"])
        self.env_steps_of_removed_workers = int(state["env_steps_of_removed_workers"])
        counts, has_started = list(state["restart_counts"]), state["started"]
        without_state = [i for i, saved in enumerate(state["remote"]) if saved is None]
        for index in without_state:  # a new worker replaces it
            self.env_steps_of_removed_workers += self.env_steps_by_worker.pop(index, 0)
            counts[index] += has_started
        self.failed.clear()
        self.weight_sync.invalidate()
        self.weight_sync.update_all()
        self.num_episodes_restarted = self.local_worker().load_sampling_state_dict(state["local"])
        if not self._remote:
            self.restart_counts = counts
            self._loaded = list(state["remote"]) if has_started else None
            return
        self._past_restarts = counts
        for index in without_state:
            if not has_started:  # as in a new process
                self._past_restarts[index] = self.restart_counts[index] = counts[index] - 1
            self._replace(index)
        self._loaded = list(state["remote"])
        try:
            self._load_remote_states()
        finally:
            self._loaded = None

    def _load_remote_states(self) -> None:
        """Send the loaded states to the remote workers; after an error, they stay loaded."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            try:
                self.num_episodes_restarted += send_states(self, loaded)
            except BaseException:
                self._loaded = loaded
                raise

    def replace(self, index: int) -> bool:
        """Replace a remote worker; return False if `recreate_failed_workers` is False."""
        if self.config.recreate_failed_workers:
            self._replace(index)
        return self.config.recreate_failed_workers

    def _replace(self, index: int) -> None:
        pool = RolloutPool(self, recreate_failed=True)
        pool.start()
        pool.replace(index)
        if isinstance(self._pool, RolloutPool):
            self._pool.start()  # it knows the new worker

    # -- use -----------------------------------------------------------------------------------

    def foreach_worker(self, fn: Callable[[RolloutWorker], T]) -> list[T]:
        """Return fn(worker) for the local worker, then for the remote ones in order, without those
        that have failed for good. Raises the error of `fn`, or Ray's if a worker has died."""
        results = [fn(self.local_worker())]
        if isinstance(self._pool, ReplayedPool):
            return [*results, *map(fn, self._pool.workers())]
        refs = [actor.apply.remote(fn) for _, actor in self._working()]
        return results + ray_health.get(refs) if refs else results

    def _working(self) -> list[tuple[int, Any]]:
        """Return (number, actor) of the remote workers that have not failed for good."""
        return [pair for pair in enumerate(self.remote_workers()) if pair[0] not in self.failed]

    def foreach_env(self, fn: Callable[[Any], T]) -> list[list[T]]:
        """Return fn(environment) for every environment that is stepped, a list per worker, which is
        empty if the worker has died or does not answer in time."""
        if isinstance(self._pool, ReplayedPool):
            return [worker.foreach_env(fn) for worker in self._pool.workers()]
        if not self.num_workers:
            return [self.local_worker().foreach_env(fn)]
        return self._calls.foreach_env(self.remote_workers(), fn)

    def parallel_iterator(self) -> ParallelIterator[Batch]:
        """Return an endless stream of fragments: one shard per remote worker, or one of the local
        worker."""
        if self._pool is None:
            if self.num_workers:
                self._pool = RolloutPool(self, self.config.recreate_failed_workers)
            else:
                self._pool = LocalRolloutPool(self.local_worker, self.weight_sync, self.global_vars)
        shards = [
            Shard(self._pool, index, adds_joined_workers=True) for index in range(len(self._pool))
        ]
        name = f"rollouts[workers={self.num_workers}]"
        return ParallelIterator(shards, name, self.config.recovery)

    def stop(self) -> None:
        """Stop the workers, close the environments, shut down Ray if this set started it."""
        local, pool = self._local, self._pool
        try:
            if local is not None:
                local.stop()
            if isinstance(pool, ReplayedPool):
                pool.stop_workers()
        finally:
            if self._remote:
                stop_workers(self._remote, self._spares, self._placement)
            if self._owns_ray:
                self._owns_ray = False
                leave_ray()
            self._local, self._remote, self._pool, self._stopped = None, None, None, True
            self.weight_sync.clear()

    def __enter__(self) -> WorkerSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _check_resize(number: Any, num_workers: int) -> None:
    check_int("num_workers to add or remove", number)
    if not num_workers:
        raise ValueError("cannot add or remove workers: num_workers=0 samples in this process")


def _check_removal(number: Any, num_workers: int) -> None:
    _check_resize(number, num_workers)
    if number >= num_workers:
        raise ValueError(f"cannot remove {number} of {num_workers} workers: one must remain")


def check_workers(workers: Any, operator: str) -> None:
    """Check the argument `workers` of an operator.

    Raises:
        TypeError: it is not a WorkerSet, but for example the config, the other argument of a plan.
    """
    if isinstance(workers, RolloutWorker):
        raise TypeError(
            f"{operator} takes the WorkerSet, got a RolloutWorker: pass workers instead of "
            "workers.local_worker()"
        )
    if workers is None or not hasattr(workers, "local_worker"):
        hint = ": pass algorithm.workers" if hasattr(workers, "training_step") else ""
        raise TypeError(
            f"{operator} takes the WorkerSet, the first argument of a plan, got a "
            f"{type(workers).__name__}{hint}"
        )
