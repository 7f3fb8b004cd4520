"""PlanFacts: the sizes and settings of a plan that a diagnosis names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowrl.iter import LocalIterator
from flowrl.iter.gather import Gather
from flowrl.iter.ray_runtime import live_nodes
from flowrl.iter.stage import operator_of, walk
from flowrl.learners.thread import LearnerThread
from flowrl.ops.replay import ReplayStage
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


class TrainingFacts(NamedTuple):
    """The updates of one stage; see PlanFacts."""

    minibatch_size: int | None
    num_passes: int


@dataclass(frozen=True)
class PlanFacts:
    """Sizes and settings of a plan.

    Attributes:
        num_cores: processors of this machine, or of all machines of a cluster.
        num_workers: remote workers.
        num_envs: environments of each worker.
        steps_in_turn: whether a worker steps them one after the other.
        num_threads: threads of numerical libraries in each process; None: as many as they choose.
        samples: whether the plan samples.
        horizon: maximum env steps of an episode; None: no limit.
        callbacks: name of the class of the callbacks.
        minibatch_size: the smallest number of rows per update that is set; None if every update
            uses its whole batch.
        num_passes: the largest number of passes over a batch.
        settings: names of the algorithm's settings.
        queue_size: capacity of the queue of a learner thread; None without one.
        replay: of the first replay buffer; None without one, or if its buffer has no ratio.
        training: `minibatch_size` and `num_passes` of each stage that trains, by its id.
    """

    num_cores: int
    num_workers: int
    num_envs: int
    steps_in_turn: bool
    num_threads: int | None
    samples: bool
    horizon: int | None
    callbacks: str
    minibatch_size: int | None
    num_passes: int
    settings: Collection[str]
    queue_size: int | None
    replay: ReplayFacts | None
    training: Mapping[int, TrainingFacts] = field(default_factory=dict)

    def of_training(self, stage_id: int | None) -> TrainingFacts:
        """Return the facts of a stage that trains; those of the whole plan if it has none."""
        whole = TrainingFacts(self.minibatch_size, self.num_passes)
        return whole if stage_id is None else self.training.get(stage_id, whole)


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
    training = {
        stage_id: _training_facts(operator, workers)
        for stage_id, operator in enumerate(operators)
        if getattr(operator, "trains", False)
    }
    sizes = [one.minibatch_size for one in training.values() if one.minibatch_size is not None]
    return PlanFacts(
        num_cores=_cores_of_workers(),
        num_workers=workers.num_workers,
        num_envs=config.num_envs_per_worker,
        steps_in_turn=config.vectorization_mode in ("flowrl", "sync"),
        num_threads=1
        if config.num_threads_per_process == "auto"
        else config.num_threads_per_process,
        samples=any(isinstance(stage, Gather) for stage in walk(plan.stage)),
        horizon=config.horizon,
        callbacks=(config.callbacks_class or object).__name__,
        minibatch_size=min(sizes, default=None),
        num_passes=max((one.num_passes for one in training.values()), default=1),
        settings=settings,
        queue_size=queue_sizes[0] if queue_sizes else None,
        replay=_replay_facts(replays[0].buffer, workers) if replays else None,
        training=training,
    )


def _cores_of_workers() -> int:
    """Return the processors of this machine, or of all machines of a Ray cluster."""
    nodes = live_nodes()
    if len(nodes) > 1:
        return int(sum(node["Resources"].get("CPU", 0) for node in nodes))
    return num_cores()


def _training_facts(operator: Any, workers: WorkerSet) -> TrainingFacts:
    """Return the facts of an operator that trains policies."""
    sizes = _values_of_setting(operator, workers, "sgd_minibatch_size")
    passes = _values_of_setting(operator, workers, "num_sgd_iter")
    return TrainingFacts(min(filter(None, sizes), default=None), max(passes, default=1))


def _values_of_setting(operator: Any, workers: WorkerSet, setting: str) -> list[int]:
    """Return the values of a setting of learning, of each policy that an operator trains."""
    value = getattr(getattr(operator, "learner", None), setting, None)
    policies = workers.local_worker().policy_map
    ids = policies if operator.policies is None else operator.policies
    of_policies = [getattr(getattr(policies[name], "config", None), setting, 0) for name in ids]
    return of_policies if value is None else [value] * len(of_policies)


def _replay_facts(buffer: Any, workers: WorkerSet) -> ReplayFacts | None:
    ratio = getattr(buffer, "ratio", None)
    stored = workers.steps_per_fragment()
    drawn = getattr(buffer, "replay_batch_size", None)
    if ratio is None or not stored or not drawn:
        return None
    return ReplayFacts(ratio.training_intensity, drawn, stored)
