"""PlanFacts: the sizes and settings of a plan that a diagnosis names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flowrl.iter import LocalIterator
from flowrl.iter.gather import Gather
from flowrl.iter.ray_runtime import live_nodes
from flowrl.iter.stage import operator_of, walk
from flowrl.learners.thread import LearnerThread
from flowrl.ops.replay import ReplayStage
from flowrl.ops.report import training_operators
from flowrl.process_usage import num_cores
from flowrl.sampling.worker_set import WorkerSet


@dataclass(frozen=True)
class ReplayFacts:
    """The replay buffer of a plan.

    Attributes:
        training_intensity: rows drawn per row stored; None draws one batch per stored fragment.
        batch_size: rows of a batch.
        fragment_size: rows that are stored at once.
    """

    training_intensity: float | None
    batch_size: int
    fragment_size: int

    @property
    def updates_per_row(self) -> float:
        """Updates per stored row."""
        if self.training_intensity is None:
            return 1 / self.fragment_size
        return self.training_intensity / self.batch_size


@dataclass(frozen=True)
class PlanFacts:
    """Sizes and settings of a plan.

    Attributes:
        num_cores: processors of this machine, or of all machines of a cluster.
        num_workers: remote workers.
        num_envs: environments of each worker.
        num_threads: threads of numerical libraries in each process; None: as many as they choose.
        samples: whether the plan samples.
        horizon: maximum env steps of an episode; None: no limit.
        callbacks: name of the class of the callbacks.
        minibatch_size: the smallest number of rows per update that is set; None if every update
            uses its whole batch.
        num_passes: the largest number of passes over a batch.
        has_learners: whether the algorithm has the setting `num_learners`.
        queue_size: capacity of the queue of a learner thread; None without one.
        replay: of the first replay buffer; None without one, or if its buffer has no ratio.
    """

    num_cores: int
    num_workers: int
    num_envs: int
    num_threads: int | None
    samples: bool
    horizon: int | None
    callbacks: str
    minibatch_size: int | None
    num_passes: int
    has_learners: bool
    queue_size: int | None
    replay: ReplayFacts | None


def facts_of(plan: LocalIterator[Any], workers: WorkerSet, settings: Collection[str]) -> PlanFacts:
    """Return the facts of a plan.

    Args:
        plan: the plan.
        workers: its WorkerSet.
        settings: names of the algorithm's settings.
    """
    config = workers.config
    operators = [operator_of(stage) for stage in walk(plan.stage)]
    queue_sizes = [one.inqueue.maxsize for one in operators if isinstance(one, LearnerThread)]
    replays = [stage for stage in walk(plan.stage) if isinstance(stage, ReplayStage)]
    return PlanFacts(
        num_cores=_cores_of_workers(),
        num_workers=workers.num_workers,
        num_envs=config.num_envs_per_worker,
        num_threads=1
        if config.num_threads_per_process == "auto"
        else config.num_threads_per_process,
        samples=any(isinstance(stage, Gather) for stage in walk(plan.stage)),
        horizon=config.horizon,
        callbacks=(config.callbacks_class or object).__name__,
        minibatch_size=min(
            filter(None, _values_of_setting(plan, workers, "sgd_minibatch_size")), default=None
        ),
        num_passes=max(_values_of_setting(plan, workers, "num_sgd_iter"), default=1),
        has_learners="num_learners" in settings,
        queue_size=queue_sizes[0] if queue_sizes else None,
        replay=_replay_facts(replays[0].buffer, workers) if replays else None,
    )


def _cores_of_workers() -> int:
    """Return the processors of this machine, or of all machines of a Ray cluster."""
    nodes = live_nodes()
    if len(nodes) > 1:
        return int(sum(node["Resources"].get("CPU", 0) for node in nodes))
    return num_cores()


def _values_of_setting(plan: LocalIterator[Any], workers: WorkerSet, setting: str) -> list[int]:
    """Return the values of a setting of learning, of each operator that trains and its policies."""
    policies = workers.local_worker().policy_map
    values = []
    for operator in training_operators(plan.stage):
        value = getattr(getattr(operator, "learner", None), setting, None)
        for policy_id in policies if operator.policies is None else operator.policies:
            policy_value = getattr(getattr(policies[policy_id], "config", None), setting, 0)
            values.append(policy_value if value is None else value)
    return values


def _replay_facts(buffer: Any, workers: WorkerSet) -> ReplayFacts | None:
    ratio = getattr(buffer, "ratio", None)
    stored = workers.steps_per_fragment()
    drawn = getattr(buffer, "replay_batch_size", None)
    if ratio is None or not stored or not drawn:
        return None
    return ReplayFacts(ratio.training_intensity, drawn, stored)
