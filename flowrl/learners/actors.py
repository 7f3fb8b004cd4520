"""Learners on actors that take shares of each batch; their gradients are averaged, so that they
learn as one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import Source, _get_shared_metrics
from flowrl.iter.shards import leave_ray, start_ray
from flowrl.ops.train import (
    Batch,
    Info,
    TrainOneStep,
    batch_to_learn_from,
    learn_rows,
    note_trained,
)

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet

log = logging.getLogger("flowrl")

TIMEOUT_S = 300.0  # for the others of a group to answer; one that is gone is noticed at once
TRIES = 3  # of one batch, with new learners each


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

            from flowrl.learners.process_group import ProcessGroup

            backend = "nccl" if device.startswith("cuda") else "gloo"
            found = TCPStore(*store, is_master=False, wait_for_workers=False)
            group = ProcessGroup(found, rank, size, backend, TIMEOUT_S, shares=True)
            for policy in self.policies.values():
                policy.group = group

    def take(self, state: bytes) -> None:
        """Learn on from what the local policies are."""
        from flowrl.learners.process_group import take_learning_state

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
        from flowrl.learners.process_group import learning_state

        for policy in self.policies.values():
            policy.on_global_var_update(global_vars)
        several = len(learning) > 1
        info = learn_rows(self.policies, learning, sources, passes, minibatch, several)
        learned = {pid: self.policies[pid] for pid in learning}
        return info, learning_state(learned) if self._first else None


class LearnerGroup:
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

        from flowrl.learners.process_group import take_learning_state

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
        told: dict[str, Any] = {
            p: (one.version, getattr(one, "target_updates", 0)) for p, one in policies.items()
        }
        return {**told, "": self.workers.weight_sync.num_invalidations}

    def _prepare(self) -> None:
        """Make the learners, or let them know what the local policies are now."""
        import ray

        from flowrl.learners.process_group import learning_state

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

        self._owns_ray = self._owns_ray or start_ray(self.workers.config.get("address"))
        gpus = ray.cluster_resources().get("GPU", 0)
        if self.gpus and gpus < self.num_learners:
            raise RuntimeError(
                f"num_gpus: {self.num_learners} learners with a GPU each are asked for, the "
                f"cluster has {gpus:g} GPUs: use num_learners for learners without"
            )
        policies = self.workers.local_worker().policy_map
        for policy in policies.values():
            check_torch(policy)
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
            self._owns_ray = False
            leave_ray()


def learners_of(workers: WorkerSet, num_gpus: int, num_learners: int) -> LearnerGroup | None:
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
    return LearnerGroup(workers, wanted, bool(num_gpus)) if wanted else None


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

    return (
        isinstance(error, ray.exceptions.RayActorError)
        or type(error).__name__ == "ProcessGroupError"
    )


def check_torch(policy: Any) -> None:
    """Refuse a policy that cannot learn with others."""

    if not hasattr(policy, "group"):
        raise TypeError(
            f"{type(policy).__name__} cannot learn in several processes: it is no TorchPolicy"
        )
    if policy.config.microbatch_size:
        raise ValueError("microbatch_size: the processes that learn together share the rows")


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
