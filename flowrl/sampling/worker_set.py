"""WorkerSet: one local worker that learns, and remote ones that sample.

A description until a worker is asked for. Weights are pulled, not broadcast: a request for a
fragment carries the local policy's weights if the worker has not got them yet, so nothing waits
in a mailbox and a worker is never sent what it already has.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from flowrl.envs.registry import EnvCreator, env_creator_for
from flowrl.iter import ParallelIterator
from flowrl.iter.metrics import current_metrics
from flowrl.iter.pools import ActorPool, Pool
from flowrl.iter.ray_runtime import leave_ray, node_id, start_ray
from flowrl.iter.recovery import Recovery
from flowrl.iter.shard_server import serve_next, serve_remote
from flowrl.iter.shard_stream import ShardRequest
from flowrl.iter.shards import Shard
from flowrl.policies.policy import Policy
from flowrl.sampling.placement import Placement
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.sampling_settings import DEFAULT_FRAGMENT_LENGTH
from flowrl.settings import ConfigError

T = TypeVar("T")

log = logging.getLogger("flowrl")

STATE_TIMEOUT_S = 60.0  # for a remote worker to say its state

BY_VALUE_BYTES = 100_000  # larger weights go through the object store, one object per version


class WorkerSet:
    """A local worker and `num_workers` remote ones with the same policies and environments.

    Args:
        env_creator: from an EnvContext to an environment; an env id works, too.
        policy_class: of the policies that do not say theirs, or a mapping from policy id to
            PolicySpec.
        config: settings of the policy, the worker and the set (see RolloutWorker); the set reads
            `num_workers`, `address`, `train_batch_size` and what says where workers run (see
            Placement).
        num_workers: if not the settings'. 0 samples in this process, without Ray.
    """

    def __init__(
        self,
        env_creator: EnvCreator | str,
        policy_class: type[Policy] | Mapping[str, Any] | None,
        config: Any = None,
        num_workers: int | None = None,
    ):
        self.config = config if config is not None else {}
        self._creator = env_creator_for(env_creator)
        self._policy_class = policy_class
        wanted = self.config.get("num_workers", 0) if num_workers is None else num_workers
        if not isinstance(wanted, int) or wanted < 0:
            raise ConfigError(f"num_workers: an int of at least 0 is needed, got {wanted!r}")
        self.num_workers = self._configured = wanted
        self._local: RolloutWorker | None = None
        self._remote: list[Any] | None = None
        self._pool: Pool | None = None
        self._sent: dict[int, dict[str, int]] = {}
        self._only: set[int] | None = None  # workers that are to get weights; None: all
        self._payload: tuple[dict[str, int], Any] | None = None
        self._payload_bytes = 0
        self._payload_at: set[str | None] | None = None  # nodes that have it; None: sent each time
        self._published: tuple[dict[str, int], Any] | None = None
        self.times_forgotten = 0  # how often policies were changed without a new version
        self._owns_ray = False
        self._placement = Placement(self.config)
        self.on_remake: list[Callable[[], None]] = []  # before a worker that died is made again
        self.node: str | None = None  # of the Ray cluster, where this process is
        self.nodes: dict[int, str | None] = {}  # where remote workers (from 0) have last been
        self.counted: dict[int, int] = {}  # env steps of each worker that there is, as counted
        self.counted_gone = 0  # those of workers that there were
        self.failed: set[int] = set()  # workers (from 0) that will not come back
        self.incarnations = [0] * self.num_workers  # restarts of each remote worker so far
        self._saved: list[Any] | None = None  # what remote workers that start are to go on from
        self.episodes_begun_anew = 0
        self.global_vars: dict[str, Any] = {"timestep": 0}

    def fragment_length(self) -> int:
        """Env steps of each environment per fragment: the setting, or for "auto" what makes one
        round of all workers a train batch (rounded up)."""
        length = self.config.get("rollout_fragment_length", DEFAULT_FRAGMENT_LENGTH)
        if length != "auto":
            return int(length)
        envs = self.config.get("num_envs_per_worker", 1) * max(1, self._configured)
        return math.ceil(self.config.get("train_batch_size", DEFAULT_FRAGMENT_LENGTH) / envs)

    def steps_per_fragment(self) -> int:
        """Env steps of a fragment of one worker, where episodes do not change it."""
        return self.fragment_length() * int(self.config.get("num_envs_per_worker", 1))

    def _arguments(self, worker_index: int) -> dict[str, Any]:
        return {
            "env_creator": self._creator,
            "policy_spec": self._policy_class,
            "policy_config": self.config,
            "worker_index": worker_index,
            "num_workers": self.num_workers,
            "fragment_length": self.fragment_length(),
        }

    def local_worker(self) -> RolloutWorker:
        """The worker in this process, made when first asked for."""
        if self._local is None:
            self._local = RolloutWorker(**self._arguments(0))
        return self._local

    def remote_workers(self) -> list[Any]:
        """Ray actor handles of the remote workers, made when first asked for."""
        if self._remote is None:
            made: list[Any] = []
            if self.num_workers:
                self._start_ray()
                self._placement.reserve(0, self.num_workers)
                made += [self.make_remote(i, self.incarnations[i]) for i in range(self.num_workers)]
            self._remote = made
            self._restore_remote()
        return self._remote

    def add(self, num_workers: int = 1) -> None:
        """So many more remote workers. A plan that runs asks them with its next pull; they get the
        newest weights before their first step.

        Fragments stay as long as they were planned for the workers that there were.

        Raises:
            ValueError: fewer than 1; this set has no remote workers, so that its plan samples in
                this process.
            ConfigError: the cluster has no place for them.
        """
        self._check_change(num_workers)
        self._change(self.num_workers + num_workers)

    def remove(self, num_workers: int = 1) -> None:
        """The last so many remote workers leave, with what they are sampling, and with fragments
        that have stayed on them by reference.

        Raises:
            ValueError: fewer than 1; none would be left.
        """
        self._check_change(num_workers)
        if num_workers >= self.num_workers:
            raise ValueError(
                f"{num_workers} of {self.num_workers} workers cannot leave: one must stay"
            )
        self._change(self.num_workers - num_workers)

    def _check_change(self, number: Any) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"num_workers that join or leave: at least 1, got {number!r}")
        if not self.num_workers:
            raise ValueError(
                "a set without remote workers (num_workers=0) samples in this process: workers "
                "cannot join or leave"
            )

    def _change(self, wanted: int) -> None:
        before = self.num_workers
        if self._remote is not None and wanted > before:
            self._placement.reserve(before, wanted - before)
        self.num_workers = wanted
        again = len(self.incarnations)  # these were there before: their streams are used up
        for index in range(before, min(wanted, again)):
            self.incarnations[index] += 1
        self.incarnations += [0] * (wanted - again)
        if self._saved is not None:
            self._saved = [*self._saved, *[None] * (wanted - before)][:wanted]
        if self._remote is not None:
            for index in range(before, wanted):
                self._remote.append(self.make_remote(index, self.incarnations[index]))
            for index in range(wanted, before):
                import ray

                self._forget_worker(index)
                ray.kill(self._remote.pop())
            self._placement.release(self.num_workers)
        if isinstance(self._pool, RolloutPool):
            self._pool.change(wanted)

    def _forget_worker(self, index: int) -> None:
        """Another one may take its place."""
        self._sent.pop(index, None)
        self.nodes.pop(index, None)
        self.failed.discard(index)
        self.counted_gone += self.counted.pop(index, 0)

    def _start_ray(self) -> None:
        address = self.config.get("address")
        cores = {} if address else {"num_cpus": max(os.cpu_count() or 1, self.num_workers)}
        try:
            self._owns_ray = self._owns_ray or start_ray(address, **cores)
            self.node = node_id()
        except (ConnectionError, RuntimeError, ValueError) as error:
            if address is None:
                raise
            raise ConfigError(f"address: no Ray cluster at {address!r}: {error}") from error

    def make_remote(self, index: int, incarnation: int = 0) -> Any:
        """A new Ray actor for remote worker `index` (from 0), which has no weights yet."""
        import ray

        where = self._placement.options(index)
        actor = ray.remote(max_restarts=0, max_task_retries=0, **where)(RolloutWorker)
        self._sent.pop(index, None)
        return actor.remote(**self._arguments(index + 1), incarnation=incarnation)

    # -- weights -------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """Versions of the local policies by policy id; of the published ones, if there are any."""
        if self._published is not None:
            return self._published[0]
        return {pid: policy.version for pid, policy in self.local_worker().policy_map.items()}

    def publish(self) -> None:
        """From now on send the weights as they are now, until this is called again: for a learner
        in a thread of its own, which alone may look at weights that it changes."""
        worker = self.local_worker()
        with worker.lock:
            versions = {pid: policy.version for pid, policy in worker.policy_map.items()}
            self._published = versions, self._weights_now()

    def unpublish(self) -> None:
        """Send the weights as they are when they are sent: no other thread changes them."""
        self._published = None

    def _weights_now(self) -> tuple[Any, Any]:
        policies = self.local_worker().policy_map
        weights = {pid: policy.get_weights() for pid, policy in policies.items()}
        return weights, {pid: policy.filter_state() for pid, policy in policies.items()}

    def weights_for(self, index: int) -> Any | None:
        """What remote worker `index` (from 0) must be sent before it samples: None if nothing."""
        versions = self.versions()
        if self._sent.get(index) == versions:
            return None
        if self._only is not None and index in self._sent:
            if index not in self._only:
                return None
            self._only.discard(index)
        self._sent[index] = versions
        if self._payload is None or self._payload[0] != versions:
            published = self._published
            if published is not None:
                versions = self._sent[index] = published[0]
            weights, filters = self._weights_now() if published is None else published[1]
            payload: Any = (weights, versions, filters, dict(self.global_vars))
            size = sum(array.nbytes for own in weights.values() for array in own.values())
            self._payload_bytes, self._payload_at = size, None
            if size > BY_VALUE_BYTES:
                import ray

                payload = ray.put(payload)
                self._payload_at = {self.node}
            self._payload = (versions, payload)
        self._count_transfer(self.nodes.get(index, self.node))
        return self._payload[1]

    def _count_transfer(self, node: str | None) -> None:
        """Weights go to a node."""
        metrics = current_metrics()
        if node == self.node or metrics is None:
            return
        if self._payload_at is None or node not in self._payload_at:
            metrics.counters["num_bytes_between_nodes"] += self._payload_bytes
        if self._payload_at is not None:
            self._payload_at.add(node)

    def update_only(self, indices: Iterable[int]) -> None:
        """From now on send new weights only to workers that this was called for since they were
        last sent some (and to new ones)."""
        self._only = (self._only or set()) | set(indices)

    def update_also(self, indices: Iterable[int]) -> None:
        """Where only some workers are to be sent new weights, these are among them."""
        if self._only is not None:
            self._only |= set(indices)

    def note_weights(self, indices: Iterable[int]) -> None:
        """Remote workers (from 0) have the local policies' weights already: they learn, too."""
        for index in indices:
            self._sent[index] = self.versions()

    def forget_sent(self) -> None:
        """Send every worker the weights again: they changed without a new version."""
        self.times_forgotten += 1
        self._sent.clear()
        self._payload = None
        if self._published is not None:
            self.publish()

    def sync_weights(self) -> None:
        """Send the local policies' weights to every remote worker that has others, and wait.

        Raises:
            what a worker raised.
        """
        if not self.remote_workers():
            return
        import ray

        outdated = [(i, self.weights_for(i)) for i in range(self.num_workers)]
        ray.get(
            [
                self.remote_workers()[index].apply.remote(_take_weights, payload)
                for index, payload in outdated
                if payload is not None
            ]
        )

    # -- state ---------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """What all workers' next samples depend on besides the policies of the local one.

        Waits for the remote ones; None in the place of one that does not answer.
        """
        remote: list[Any] = [None] * self.num_workers
        if self._remote is None and self._saved is not None:
            remote = self._saved
        elif self._remote:
            import ray

            refs = [worker.apply.remote(_sampling_state) for worker in self._remote]
            for index, ref in enumerate(refs):
                try:
                    remote[index] = ray.get(ref, timeout=STATE_TIMEOUT_S)
                except Exception as error:
                    log.warning(
                        "worker %d could not say its state: who goes on from this checkpoint begins"
                        " new episodes there (%r)", index + 1, error,
                    )  # fmt: skip
        return {
            "local": self.local_worker().get_sampling_state(),
            "remote": remote,
            "started": self._remote is not None or self._saved is not None,
            "incarnations": list(self.incarnations),
            "configured": self._configured,
            "counted": dict(self.counted),
            "counted_gone": self.counted_gone,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where other workers were, which had the policies that the local one has now.

        `episodes_begun_anew` counts the episodes that could not be gone on with; those of remote
        workers, once they have started.

        Raises:
            KeyError, ValueError: it is of other workers.
        """
        configured = state.get("configured", len(state["remote"]))
        if configured != self._configured:
            raise ValueError(f"a state of {configured} workers, not {self._configured}")
        for remote in state["remote"]:
            if remote is not None:  # they have what the local worker has
                self.local_worker().check_sampling_state(remote)
        if len(state["remote"]) != self.num_workers:
            self._change(len(state["remote"]))
        self.counted = dict(state.get("counted", {}))
        self.counted_gone = int(state.get("counted_gone", 0))
        self.failed.clear()
        incarnations = list(state["incarnations"])
        self.forget_sent()
        self._only = None
        self.episodes_begun_anew = self.local_worker().set_sampling_state(state["local"])
        self._saved = list(state["remote"])
        if self._remote:
            self._restore_remote()
            return
        for index, remote in enumerate(state["remote"]):
            if remote is None and state["started"]:  # it was gone: another one takes its place
                incarnations[index] += 1
        self.incarnations = incarnations

    def _restore_remote(self) -> None:
        """Hand the remote workers what they are to go on from."""
        if self._saved is None or not self._remote:
            return
        import ray

        versions, refs = self.versions(), []
        for index, (worker, saved) in enumerate(zip(self._remote, self._saved, strict=True)):
            if saved is None:
                self._sent.pop(index, None)
                refs.append(worker.apply.remote(_begin_again))
                continue
            payload = self.weights_for(index)
            told = {pid: own["version"] for pid, own in saved["policies"].items()}
            if told != versions:  # it was behind: it gets the newest with the next request
                self._sent.pop(index, None)
            refs.append(worker.apply.remote(_go_on, payload, saved))
        anew = ray.get(refs)
        self._saved = None
        self.episodes_begun_anew += sum(anew)
        if sum(anew):
            log.warning("%d episodes of remote workers were begun anew", sum(anew))

    # -- use -----------------------------------------------------------------------------------

    def foreach_worker(self, fn: Callable[[RolloutWorker], T]) -> list[T]:
        """fn(worker) in every worker; results local first, then in the remote ones' order."""
        results = [fn(self.local_worker())]
        if self.remote_workers():
            import ray

            results += ray.get([worker.apply.remote(fn) for worker in self.remote_workers()])
        return results

    def parallel_iterator(self) -> ParallelIterator[Any]:
        """The workers' endless fragments: one shard per remote worker, or the local worker's."""
        if self._pool is None:
            remote = self.num_workers > 0
            self._pool = RolloutPool(self) if remote else Pool(lambda: [self.local_worker()], 1)
        shards = [Shard(self._pool, index, followed=True) for index in range(len(self._pool))]
        recovery = Recovery(
            timeout_s=self.config.get("sample_timeout_s"),
            max_restarts=self.config.get("max_num_worker_restarts", 1000),
            backoff_s=self.config.get("delay_between_worker_restarts_s", 0.1),
        )
        return ParallelIterator(shards, f"rollouts[workers={self.num_workers}]", recovery)

    def stop(self) -> None:
        """End the remote workers, close the environments, shut down a Ray started here."""
        if self._local is not None:
            self._local.stop()
        if self._remote:
            import ray

            if ray.is_initialized():
                for worker in self._remote:
                    ray.kill(worker)
            self._placement.release()
        if self._owns_ray:
            self._owns_ray = False
            leave_ray()
        self._local, self._remote, self._pool = None, None, None
        self._sent.clear()

    def __enter__(self) -> WorkerSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class RolloutPool(ActorPool):
    """The remote workers of a set, made and ended by it; an order carries the weights that the
    worker lacks."""

    def __init__(self, workers: WorkerSet):
        recreate = workers.config.get("recreate_failed_workers", True)
        super().__init__(self._remake if recreate else None, workers.num_workers)
        self._owned = set()
        self._workers_of = workers

    def start(self) -> None:
        self._handles = self._workers_of.remote_workers()
        self._incarnations = list(self._workers_of.incarnations)

    def change(self, num_workers: int) -> None:
        """Workers have joined or left."""
        self._count = num_workers
        self._incarnations = list(self._workers_of.incarnations)
        self.changes += 1

    def mark_failed(self, index: int) -> None:
        self._workers_of.failed.add(index)

    def _remake(self, index: int) -> Any:
        workers = self._workers_of
        workers.incarnations[index] = self._incarnations[index] + 1
        workers.counted_gone += workers.counted.pop(index, 0)
        for told in workers.on_remake:
            told()
        return workers.make_remote(index, workers.incarnations[index])

    def submit(self, index: int, request: ShardRequest) -> Any:
        actor = self.handle(index)
        return actor.apply.remote(_serve_with, self._workers_of.weights_for(index), request)

    def next_item_submitter(self, index: int, stream_handle: int) -> Callable[[], Any]:
        actor, weights_for = self.handle(index), self._workers_of.weights_for
        return lambda: actor.apply.remote(_next_with, weights_for(index), stream_handle)

    def stop(self) -> None:
        """The set ends its workers."""


def _take_weights(worker: RolloutWorker, payload: tuple[Any, ...]) -> None:
    worker.set_weights(*payload)


def _sampling_state(worker: RolloutWorker) -> dict[str, Any]:
    return worker.get_sampling_state()


def _go_on(worker: RolloutWorker, payload: tuple[Any, ...] | None, state: dict[str, Any]) -> int:
    if payload is not None:
        weights, versions, filters, _ = payload
        worker.set_weights(weights, versions, filters)
    return worker.set_sampling_state(state)


def _begin_again(worker: RolloutWorker) -> int:
    worker.restart()
    return 0


def _serve_with(
    worker: RolloutWorker, payload: tuple[Any, ...] | None, request: ShardRequest
) -> list[Any]:
    if payload is not None:
        worker.set_weights(*payload)
    return serve_remote(worker, request)


def _next_with(
    worker: RolloutWorker, payload: tuple[Any, ...] | None, stream_handle: int
) -> list[Any]:
    if payload is not None:
        worker.set_weights(*payload)
    return serve_next(worker, stream_handle)
