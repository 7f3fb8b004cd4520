"""TrainOnWorkers: workers that learn from what they have sampled, as one."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.iter import NOT_READY, LocalIterator, Source, Stage, _get_shared_metrics
from flowrl.iter.errors import ShardFailedError
from flowrl.learners.actors import TIMEOUT_S, check_torch
from flowrl.ops.rollout import CountRollouts
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

MOST_BROKEN = 5  # groups in a row, without a round


@dataclass
class WorkerUpdate:
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

    def size_bytes(self) -> int:
        """Bytes of the policies' state."""
        return len(self.state or b"")


class LearnThere:
    """for_each on the shards, fragment -> WorkerUpdate: the worker's policies learn from it, together
    with those of all other workers.

    Args:
        passes, minibatch, policies: see TrainOneStep.
        place: (host, port) of the store in which `generation` says which group is the valid one;
            None where the worker is in this process.
    """

    def __init__(
        self,
        passes: int | None,
        minibatch: int | None,
        policies: Collection[str] | None,
        global_vars: dict[str, Any] | None = None,
        worker: Any = None,
        place: tuple[str, int] | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        self.place, self.timeout_s = place, timeout_s
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
            passes, minibatch, self._policies, self._global_vars, worker, self.place,
            self.timeout_s,
        )  # fmt: skip

    def __call__(self, batch: Batch) -> WorkerUpdate:
        from flowrl.learners.process_group import ProcessGroupError, learning_state

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
                several = len(learning) > 1
                info = learn_rows(worker.policy_map, learning, own, *self._how, several)
            except ProcessGroupError as error:
                raise ProcessGroupError(str(error), self._leave(worker)) from None
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
        return WorkerUpdate(info, steps, batch.steps_by_policy(), digest, generation, state)

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

        from flowrl.learners.process_group import ProcessGroup, take_learning_state

        if self._store is None:
            assert self.place is not None
            self._store = TCPStore(*self.place, is_master=False, wait_for_workers=False)
        generation = self._store.get("generation")
        if generation == self._generation:
            return
        for policy in worker.policy_map.values():
            check_torch(policy)
            policy.group = None
        name = generation.decode()
        take_learning_state(worker.policy_map, self._store.get(f"state/{name}"))
        size = int(self._store.get(f"size/{name}"))
        self._generation = generation
        group = ProcessGroup(
            PrefixStore(name, self._store), worker.worker_index - 1, size, timeout_s=self.timeout_s
        )
        for policy in worker.policy_map.values():
            policy.group = group

    def __repr__(self) -> str:
        return "LearnThere"


class TrainOnWorkers(LocalIterator[Any]):
    """(WorkerUpdate, info) without end: every worker samples a fragment and learns from it, in as many
    minibatches as the others, whose gradients are averaged over all workers (Wijmans et al. 2019,
    arXiv 1911.00357): all have the same weights after each update, and no rows travel.

    The local worker's policies are what they have become. Counts as ParallelRollouts and
    TrainOneStep do. When a worker dies, the group is formed anew with another one in its place,
    from the state after the last round; counts `num_group_restarts`. So it is when workers join or
    leave.

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
        here = None if workers.num_workers else workers.global_vars
        learn = LearnThere(num_sgd_iter, sgd_minibatch_size, policies, here, timeout_s=timeout_s)
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
        self._members: list[int] = []  # of the group: the restart count of each worker
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
        self.workers.on_recreate.append(self._form_anew)
        self._form()

    def _form(self) -> None:
        """From now on a new group is the valid one, which begins with the policies as they are."""
        from flowrl.learners.process_group import learning_state

        if self._generation > 1:  # somebody may be about to read the last one
            for what in ("state", "size"):
                self._store.delete_key(f"{what}/{self._generation - 1}")
        self._generation += 1
        self._members = self._present()
        self._fresh = True
        self._store.set("timestep", str(self.workers.global_vars["timestep"]))
        name = str(self._generation)
        state = learning_state(self.workers.local_worker().policy_map)
        self._store.set(f"state/{name}", state)
        self._store.set(f"size/{name}", str(len(self._members)))
        self._store.set("generation", name)

    def _present(self) -> list[int]:
        return self.workers.restart_counts[: self.workers.num_workers]

    def _form_anew(self) -> None:
        if self._fresh:
            self._members = self._present()
            return  # whoever is made again comes to a group that waits for it
        _get_shared_metrics().counters["num_group_restarts"] += 1
        self._form()

    def pull(self, block: bool) -> Any:
        while True:
            if self._failed is not None:
                raise self._failed  # the others would wait for it
            if self._store is not None and self._members != self._present():
                self._fresh = False  # nobody waits for those that left
                self._form_anew()
            self._forget_older()
            try:
                # never waits for all: a worker that died is made again while others wait for it
                told = self._pull_up(False)
            except ShardFailedError as error:
                self._failed = error
                raise
            except Exception as error:
                self._broken += 1
                if type(error).__name__ != "ProcessGroupError" or self._broken > MOST_BROKEN:
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

    def _round(self, told: list[WorkerUpdate], sources: tuple[Source, ...]) -> tuple[Any, Info]:
        from flowrl.learners.process_group import take_learning_state

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
                self.workers.weight_sync.mark_synced(range(self.workers.num_workers))
        for one, source in zip(told, sources, strict=True):
            self._count(((source,), one))
            note_trained(metrics, one.count, one.info)
        if self._store is not None:
            self._store.set("timestep", str(self.workers.global_vars["timestep"]))
        return told[0], told[0].info

    def stop(self) -> None:
        if self._form_anew in self.workers.on_recreate:
            self.workers.on_recreate.remove(self._form_anew)
        self._store = None

    def state_name(self) -> str | None:
        return self.kind
