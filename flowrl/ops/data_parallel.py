"""Operators by which several processes learn as one: learners beside each other on a batch, or the
workers on what each has sampled. Gradients are averaged over torch.distributed."""

from __future__ import annotations

import logging
import sys
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import NOT_READY, LocalIterator, Source, Stage, _get_shared_metrics
from flowrl.iter.errors import ShardFailedError
from flowrl.ops.rollout import CountRollouts
from flowrl.ops.train import (
    Batch,
    Info,
    TrainOneStep,
    batch_to_learn_from,
    note_trained,
    policy_lags,
    told_of,
)

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet

log = logging.getLogger("flowrl")

TIMEOUT_S = 300.0  # for the others of a group to answer; one that is gone is noticed at once
MOST_BROKEN = 5  # groups in a row, without a round
TRIES = 3  # of one batch, with new learners each


def learn_in_group(
    policies: dict[str, Any],
    learning: dict[str, SampleBatch],
    sources: tuple[Source, ...],
    passes: int | None,
    minibatch: int | None,
) -> Info:
    """Let policies, of this and the group's other processes, learn; see `TrainOneStep`."""
    info: Info = {}
    for policy_id, rows in learning.items():
        policy = policies[policy_id]
        size = minibatch
        if size is None or len(learning) > 1:
            size = min(policy.config.sgd_minibatch_size if size is None else size, rows.count)
        lags = policy_lags(policy_id, policy.version, sources)
        stats = policy.learn_on_minibatches(
            rows, policy.config.num_sgd_iter if passes is None else passes, size
        )
        info[policy_id] = told_of(stats, rows.count, lags)
        if "batch_indexes" in rows:
            info[policy_id]["num_agent_steps_replayed"] = rows.count
        if policy.row_stats:
            info[policy_id]["rows"] = policy.row_stats
    return info


# -- learners beside each other --------------------------------------------------------------------


class LearnerActor:
    """One of several learners, on a Ray actor of its own.

    Args:
        policies: policy id -> the policy, as it is now.
        rank, size: of this learner, of how many.
        store: (host, port) where they find each other.
        device: where it learns.
    """

    def __init__(
        self, policies: dict[str, Any], rank: int, size: int, store: tuple[str, int], device: str
    ):
        self.policies = {}
        for policy_id, policy in policies.items():
            config = policy.config.updated(device=device)
            own = type(policy)(policy.observation_space, policy.action_space, config)
            own.set_state(policy.get_state())
            self.policies[policy_id] = own
        self._first = rank == 0
        if size > 1:
            from torch.distributed import TCPStore

            from flowrl.ops.group import Group

            backend = "nccl" if device.startswith("cuda") else "gloo"
            found = TCPStore(*store, is_master=False, wait_for_workers=False)
            group = Group(found, rank, size, backend, TIMEOUT_S, shares=True)
            for policy in self.policies.values():
                policy.group = group

    def take(self, state: bytes) -> None:
        """Learn on from what the local policies are."""
        from flowrl.ops.group import take_learning_state

        take_learning_state(self.policies, state)

    def learn(
        self,
        learning: dict[str, SampleBatch],
        sources: tuple[Source, ...],
        global_vars: dict[str, Any],
        passes: int | None,
        minibatch: int | None,
    ) -> tuple[Info, bytes | None]:
        """Learn with the others from all the rows, of which this one takes its share; the first
        gives the policies' states."""
        from flowrl.ops.group import learning_state

        for policy in self.policies.values():
            policy.on_global_var_update(global_vars)
        info = learn_in_group(self.policies, learning, sources, passes, minibatch)
        learned = {pid: self.policies[pid] for pid in learning}
        return info, learning_state(learned) if self._first else None


class Learners:
    """Learners on Ray actors that learn as one; the local worker's policies are what they have
    become. They are made when they are first needed.

    Args:
        workers: the WorkerSet.
        num_learners: how many.
        gpus: each has a GPU.

    Attributes:
        restarts: how often they were made again.
    """

    def __init__(self, workers: WorkerSet, num_learners: int, gpus: bool):
        self.workers, self.num_learners, self.gpus = workers, num_learners, gpus
        self.restarts = 0
        self._actors: list[Any] = []
        self._known: dict[str, Any] = {}  # what their policies are
        self._store: Any = None
        self._owns_ray = False
        self._closed = False

    def learn(
        self, learning: dict[str, SampleBatch], sources: tuple[Source, ...], passes: int | None,
        minibatch: int | None,
    ) -> Info:  # fmt: skip
        """Learn from rows by policy. Where a learner dies, all are made again and learn from them
        again.

        Raises:
            RuntimeError: the cluster has not got what they need.
            what learning raised; that learners died, the third time in a row.
        """
        import ray

        from flowrl.ops.group import take_learning_state

        worker = self.workers.local_worker()
        told_before: dict[str, dict[str, float]] = {policy_id: {} for policy_id in learning}
        for policy_id, own in learning.items():
            worker.on_learn_on_batch(worker.policy_map[policy_id], own, told_before[policy_id])
        for attempt in range(TRIES):
            if self._closed:
                raise RuntimeError("the learners were closed")
            self._prepare()
            rows = ray.put(learning)
            how = dict(self.workers.global_vars), passes, minibatch
            refs = [actor.learn.remote(rows, sources, *how) for actor in self._actors]
            try:
                told = _all_or_first_error(refs)
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
                self._end_actors()  # the others wait for the one that is gone
                cause = getattr(error, "cause", error)
                if not _is_broken(cause) or attempt + 1 == TRIES or self._closed:
                    raise cause from None
                log.warning("a learner died, all %d are made again: %s", self.num_learners, cause)
                self.restarts += 1
                continue
            with worker.lock:
                take_learning_state(worker.policy_map, told[0][1])
                self._known = self._now()
            info = _joined([info for info, _ in told])
            for policy_id, more in told_before.items():
                info[policy_id]["learner_stats"] |= more
            return info
        raise AssertionError

    def _now(self) -> dict[str, Any]:
        """What tells whether the local policies were changed by somebody else."""
        policies = self.workers.local_worker().policy_map
        return {p: (one.version, getattr(one, "target_updates", 0)) for p, one in policies.items()}

    def _prepare(self) -> None:
        """Make the learners, or let them know what the local policies are now."""
        import ray

        from flowrl.ops.group import learning_state

        worker = self.workers.local_worker()
        now = self._now()
        if not self._actors:
            self._start()
        elif now != self._known:
            state = ray.put(learning_state(worker.policy_map))
            for actor in self._actors:
                actor.take.remote(state)
        self._known = now

    def _start(self) -> None:
        import ray
        from torch.distributed import TCPStore

        if not ray.is_initialized():
            ray.init("local", include_dashboard=False, logging_level=logging.WARNING)
            self._owns_ray = True
        gpus = ray.cluster_resources().get("GPU", 0)
        if self.gpus and gpus < self.num_learners:
            raise RuntimeError(
                f"num_gpus: {self.num_learners} learners with a GPU each are asked for, the "
                f"cluster has {gpus:g} GPUs: use num_learners for learners without"
            )
        policies = self.workers.local_worker().policy_map
        for policy in policies.values():
            _check(policy)
        for module in [m for name, m in sys.modules.items() if name.startswith("flowrl_plan_")]:
            ray.cloudpickle.register_pickle_by_value(module)  # its classes are nowhere else
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        place, given = (host, self._store.port), ray.put(dict(policies))
        make = ray.remote(num_cpus=0, num_gpus=int(self.gpus), max_restarts=0, max_task_retries=0)(
            LearnerActor
        )
        device = "cuda" if self.gpus else "cpu"
        self._actors = [
            make.remote(given, rank, self.num_learners, place, device)
            for rank in range(self.num_learners)
        ]

    def _end_actors(self) -> None:
        import ray

        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        self._actors, self._store = [], None

    def open(self) -> None:
        """Learn, after it was closed, too."""
        self._closed = False

    def close(self) -> None:
        """End the learners, in the middle of an update if need be; none are made again."""
        self._closed = True
        if self._actors:
            self._end_actors()
        if self._owns_ray:
            import ray

            ray.shutdown()
            self._owns_ray = False


def learners_of(workers: WorkerSet, num_gpus: int, num_learners: int) -> Learners | None:
    """The learners on actors that are asked for; None where the local worker is to learn.

    Raises:
        ValueError: both numbers are given, or one below 0.
    """
    for name, value in (("num_gpus", num_gpus), ("num_learners", num_learners)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} is a whole number from 0, got {value!r}")
    if num_gpus and num_learners:
        raise ValueError("num_gpus (learners with a GPU each) or num_learners, not both")
    wanted = num_gpus or num_learners
    return Learners(workers, wanted, bool(num_gpus)) if wanted else None


class MultiGPUTrainOneStep:
    """for_each, batch -> (batch, info): several learners, each on a Ray actor of its own, learn
    from shares of the rows as one; the local worker's policies are what they have become.

    Every minibatch is the one that TrainOneStep would take, cut into shares, and so is the update,
    to rounding. Counts and tells what TrainOneStep does; times `learn`. A learner that dies is made
    again with all others from the local policies, and the batch is learned from again; counts
    `num_learner_restarts`.

    Args:
        workers: the WorkerSet.
        num_gpus: learners, each with a GPU.
        num_learners: learners without one. Neither: the local worker learns.
        num_sgd_iter, sgd_minibatch_size, policies: see TrainOneStep.

    Raises:
        ValueError: both numbers are given, or one below 0.
        RuntimeError (when pulled): the cluster has not got what they need.
    """

    def __init__(
        self,
        workers: WorkerSet,
        *,
        num_gpus: int = 0,
        num_learners: int = 0,
        num_sgd_iter: int | None = None,
        sgd_minibatch_size: int | None = None,
        policies: Collection[str] | None = None,
    ):
        self.workers = workers
        self.policies = policies
        self._how = num_sgd_iter, sgd_minibatch_size
        self._local = TrainOneStep(workers, policies, *self._how)
        self.learners = learners_of(workers, num_gpus, num_learners)

    def __call__(self, batch: Batch) -> tuple[Batch, Info]:
        if self.learners is None:
            return self._local(batch)
        if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
            raise TypeError(f"MultiGPUTrainOneStep takes a batch, got {type(batch).__name__}")
        metrics = _get_shared_metrics()
        learning = batch_to_learn_from(self.workers.local_worker(), batch, self.policies)
        with metrics.timers["learn"] as timer:
            info = self.learners.learn(learning, batch.sources, *self._how)
        timer.push_units_processed(batch.count)
        metrics.counters["num_learner_restarts"] += self.learners.restarts
        self.learners.restarts = 0
        note_trained(metrics, batch.env_steps(), info)
        return batch, info

    def stop(self) -> None:
        """End the learners."""
        if self.learners is not None:
            self.learners.close()

    def __repr__(self) -> str:
        if self.learners is None:
            return "MultiGPUTrainOneStep()"
        kind = "num_gpus" if self.learners.gpus else "num_learners"
        return f"MultiGPUTrainOneStep({kind}={self.learners.num_learners})"


TrainTFMultiGPU = MultiGPUTrainOneStep
"""Another name of `MultiGPUTrainOneStep`."""


def _all_or_first_error(refs: list[Any]) -> list[Any]:
    """All results; the first error as soon as it is there, though others never answer."""
    import ray

    waiting = list(refs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        ray.get(done)
    told: list[Any] = ray.get(refs)
    return told


def _is_broken(error: BaseException) -> bool:
    """Whether a process is gone, rather than that its code raised."""
    import ray

    return isinstance(error, ray.exceptions.RayActorError) or type(error).__name__ == "GroupBroken"


def _check(policy: Any) -> None:
    """Refuse a policy that cannot learn with others."""

    if not hasattr(policy, "group"):
        raise TypeError(
            f"{type(policy).__name__} cannot learn in several processes: it is no TorchPolicy"
        )
    if policy.config.accumulate_rows:
        raise ValueError("accumulate_rows: the processes that learn together share the rows")


def _joined(told: list[Info]) -> Info:
    """What all learners tell of the same rows as one."""
    joined: Info = {}
    for policy_id, first in told[0].items():
        names = [set(one[policy_id]["learner_stats"]) for one in told]
        stats = {
            name: sum(one[policy_id]["learner_stats"][name] for one in told) / len(told)
            for name in sorted(set.intersection(*names))
        }
        joined[policy_id] = {**first, "learner_stats": stats}
        rows = [one[policy_id]["rows"] for one in told if "rows" in one[policy_id]]
        if rows:  # each has told of its own
            joined[policy_id]["rows"] = {
                name: np.concatenate([one[name] for one in rows]) for name in rows[0]
            }
    return joined


# -- workers that learn ----------------------------------------------------------------------------


@dataclass
class Trained:
    """What a worker that has learned from its fragment tells of it; see Gradients."""

    info: Info
    count: int
    sampled: dict[str, int]
    digest: int  # of the weights
    generation: str = ""  # of the group that it learned in
    state: bytes | None = None  # of the policies, of the first worker
    sources: tuple[Any, ...] = ()

    def env_steps(self) -> int:
        """See SampleBatch.env_steps."""
        return self.count

    def steps_by_policy(self) -> dict[str, int]:
        """See SampleBatch.steps_by_policy."""
        return dict(self.sampled)


class LearnThere:
    """for_each on the shards, fragment -> Trained: the worker's policies learn from it, together
    with those of all other workers.

    Args:
        size: workers.
        passes, minibatch, policies: see TrainOneStep.
        place: (host, port) of the store in which `generation` says which group is the valid one;
            None where there is but one worker.
    """

    def __init__(
        self,
        size: int,
        passes: int | None,
        minibatch: int | None,
        policies: Collection[str] | None,
        global_vars: dict[str, Any] | None = None,
        worker: Any = None,
        place: tuple[str, int] | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        self.size, self.place, self.timeout_s = size, place, timeout_s
        self._global_vars = global_vars  # where the worker is in this process
        self._how = passes, minibatch
        self._policies = policies
        self._worker = worker
        self._store: Any = None
        self._generation = b""

    def bound_to(self, worker: Any) -> LearnThere:
        """The same, on this worker."""
        passes, minibatch = self._how
        return LearnThere(
            self.size, passes, minibatch, self._policies, self._global_vars, worker, self.place,
            self.timeout_s,
        )  # fmt: skip

    def __call__(self, batch: Batch) -> Trained:
        from flowrl.ops.group import GroupBroken, learning_state

        worker = self._worker
        with worker.lock:
            learning = batch_to_learn_from(worker, batch, self._policies)
            try:
                if self.place is not None:
                    self._join(worker)
                for policy in worker.policy_map.values():
                    policy.on_global_var_update(self._seen())
                told = {pid: policy.version for pid, policy in worker.policy_map.items()}
                own = (Source(worker.worker_index, tags={"weights_versions": told}),)
                info = learn_in_group(worker.policy_map, learning, own, *self._how)
            except GroupBroken as error:
                raise GroupBroken(str(error), self._leave(worker)) from None
            except Exception:
                self._leave(worker)  # so that the others do not wait
                raise
            digest = 0
            for policy_id in sorted(worker.policy_map):
                weights = worker.policy_map[policy_id].get_weights()
                for name in sorted(weights):
                    digest = zlib.crc32(weights[name].tobytes(), digest)
            first = worker.worker_index <= 1
            state = learning_state(worker.policy_map) if first else None
        generation = self._generation.decode()
        steps = batch.env_steps()
        return Trained(info, steps, batch.steps_by_policy(), digest, generation, state)

    def _seen(self) -> dict[str, Any]:
        """The env steps sampled so far, which schedules follow: the same in all workers."""
        if self._store is None:
            return self._global_vars or {"timestep": 0}
        return {"timestep": int(self._store.get("timestep"))}

    def _leave(self, worker: Any) -> str:
        """Leave the group, which the others notice; its generation."""
        generation, self._generation = self._generation.decode(), b""
        for policy in worker.policy_map.values():
            group, policy.group = getattr(policy, "group", None), None
            if group is not None:
                group.close()
        return generation

    def _join(self, worker: Any) -> None:
        """Be in the group that is the valid one, with the state that it began with."""
        from torch.distributed import PrefixStore, TCPStore

        from flowrl.ops.group import Group, take_learning_state

        if self._store is None:
            assert self.place is not None
            self._store = TCPStore(*self.place, is_master=False, wait_for_workers=False)
        generation = self._store.get("generation")
        if generation == self._generation:
            return
        for policy in worker.policy_map.values():
            _check(policy)
            policy.group = None
        take_learning_state(worker.policy_map, self._store.get(f"state/{generation.decode()}"))
        store = PrefixStore(generation.decode(), self._store)
        self._generation = generation
        group = Group(store, worker.worker_index - 1, self.size, timeout_s=self.timeout_s)
        for policy in worker.policy_map.values():
            policy.group = group

    def __repr__(self) -> str:
        return "LearnThere"


class TrainOnWorkers(LocalIterator[Any]):
    """(Trained, info) without end: every worker samples a fragment and learns from it, in as many
    minibatches as the others, whose gradients are averaged over all workers (Wijmans et al. 2019,
    arXiv 1911.00357): all have the same weights after each update, and no rows travel.

    The local worker's policies are what they have become. Counts as ParallelRollouts and
    TrainOneStep do. When a worker dies, the group is formed anew with another one in its place,
    from the state after the last round; counts `num_group_restarts`.

    Args:
        workers: the WorkerSet; without remote workers the local one learns alone.
        num_sgd_iter: passes over a fragment; None: each policy's own setting.
        sgd_minibatch_size: rows of one worker per update, 0 for the whole fragment; None: each
            policy's own setting.
        policies: ids of those that learn; None for all that are to.
        timeout_s: that workers wait for each other; one that is gone is noticed at once.

    Raises (when pulled):
        TypeError: a policy that cannot learn in several processes.
        RuntimeError: workers do not have the same weights any more.
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
        TrainOneStep(workers, policies, num_sgd_iter, sgd_minibatch_size)  # looks at these
        if workers.config.get("output") is not None:
            raise ValueError("output: fragments stay on their workers, so nothing can be written")
        size = max(workers.num_workers, 1)
        here = None if workers.num_workers else workers.global_vars
        learn = LearnThere(
            size, num_sgd_iter, sgd_minibatch_size, policies, here, timeout_s=timeout_s
        )
        rounds = workers.parallel_iterator().for_each(learn).batch_across_shards()
        stage = TrainOnWorkersStage(rounds.stage, workers, learn, policies)
        super().__init__(stage, "TrainOnWorkers")


class TrainOnWorkersStage(Stage):
    """The stage of TrainOnWorkers."""

    kind = "TrainOnWorkers"

    def __init__(
        self,
        rounds: Stage,
        workers: WorkerSet,
        learn: LearnThere,
        policies: Collection[str] | None,
    ):
        super().__init__(rounds)
        self.policies = policies
        self._failed: ShardFailedError | None = None
        self._broken = 0  # groups since the last round
        self.workers = workers
        self._learn = learn
        self._count = CountRollouts(workers)
        self._store: Any = None
        self._generation = 0
        self._fresh = False  # no round of this generation has been completed

    def start(self, seed: str | None) -> None:
        if not self.workers.num_workers:
            return
        import ray
        from torch.distributed import TCPStore

        self.workers.remote_workers()  # so that there is a Ray
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._learn.place = host, self._store.port
        self.workers.on_remake.append(self._form_anew)
        self._form()

    def _form(self) -> None:
        """From now on a new group is the valid one, which begins with the policies as they are."""
        from flowrl.ops.group import learning_state

        if self._generation > 1:  # somebody may be about to read the last one
            self._store.delete_key(f"state/{self._generation - 1}")
        self._generation += 1
        self._fresh = True
        self._store.set("timestep", str(self.workers.global_vars["timestep"]))
        name = str(self._generation)
        state = learning_state(self.workers.local_worker().policy_map)
        self._store.set(f"state/{name}", state)
        self._store.set("generation", name)

    def _form_anew(self) -> None:
        if self._fresh:
            return  # whoever is made again comes to a group that waits for it
        _get_shared_metrics().counters["num_group_restarts"] += 1
        self._form()

    def pull(self, block: bool) -> Any:
        while True:
            if self._failed is not None:
                raise self._failed  # the others would wait for it
            self._forget_older()
            try:
                # never waits for all: a worker that died is made again while others wait for it
                told = self._pull_up(False)
            except ShardFailedError as error:
                self._failed = error
                raise
            except Exception as error:
                self._broken += 1
                if type(error).__name__ != "GroupBroken" or self._broken > MOST_BROKEN:
                    raise
                log.warning("workers lost each other, the group is formed anew: %s", error)
                if error.args[-1] == str(self._generation):
                    self._fresh = False
                    self._form_anew()
                continue
            if told is NOT_READY:
                if self._forget_older():
                    continue  # a group was formed just now: those that are done are asked again
                return told
            self.items += 1
            return self._round(told, self.parents[0].sources)

    def _forget_older(self) -> bool:
        """What a worker learned in a group that is no more is undone, so it is asked again; whether
        there was any."""
        gather: Any = self.parents[0]
        current = str(self._generation) if self._store is not None else ""
        gone = gather.forget(lambda item: item.generation != current)
        for one, source in gone:
            self._count(((source,), one))
            _get_shared_metrics().counters["num_env_steps_dropped"] += one.count
        return bool(gone)

    def _round(self, told: list[Trained], sources: tuple[Source, ...]) -> tuple[Any, Info]:
        from flowrl.ops.group import take_learning_state

        if len({one.digest for one in told}) > 1:
            raise RuntimeError(
                "TrainOnWorkers: the workers' weights differ though all gradients were averaged: "
                "does a policy change them besides?"
            )
        worker = self.workers.local_worker()
        metrics = _get_shared_metrics()
        self._fresh, self._broken = False, 0
        if self.workers.num_workers:
            state = next(one.state for one in told if one.state is not None)
            with worker.lock:
                take_learning_state(worker.policy_map, state)
            if not any(policy.observation_filter for policy in worker.policy_map.values()):
                self.workers.note_weights(range(self.workers.num_workers))
        for one, source in zip(told, sources, strict=True):
            self._count(((source,), one))
            note_trained(metrics, one.count, one.info)
        if self._store is not None:
            self._store.set("timestep", str(self.workers.global_vars["timestep"]))
        return told[0], told[0].info

    def stop(self) -> None:
        if self._form_anew in self.workers.on_remake:
            self.workers.on_remake.remove(self._form_anew)
        self._store = None

    def state_name(self) -> str | None:
        return self.kind
