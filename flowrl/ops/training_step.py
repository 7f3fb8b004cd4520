"""The parts of `Algorithm.training_step`: sampling, learning, and the plan that calls it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from contextvars import ContextVar
from typing import Any, Literal, Protocol, overload

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import LocalIterator, Stage, _get_shared_metrics
from flowrl.iter.errors import call_in_stage
from flowrl.iter.metrics import metrics_scope
from flowrl.ops.plan_metrics import PlanMetrics
from flowrl.ops.rollout import ParallelRollouts
from flowrl.ops.train import TrainOneStep
from flowrl.sampling.worker_set import WorkerSet

log = logging.getLogger("flowrl")

MAX_STEPS_WITHOUT_SAMPLES = 20  # calls of training_step() without env steps before a warning

ResultDict = dict[str, Any]
"""Result of a training step: policy id -> {"learner_stats": …, "num_agent_steps_trained": n};
other entries are reported in `info`."""


class AlgorithmLike(Protocol):
    """The attributes of an Algorithm that these functions use."""

    config: Any
    workers: WorkerSet

    @property
    def plan(self) -> LocalIterator[Any]: ...

    def training_step(self) -> ResultDict: ...


class TrainingSteps(LocalIterator[ResultDict]):
    """An endless stream of results of `algorithm.training_step()`, called once per item.

    Args:
        algorithm: the algorithm; its rollouts are a stage of the plan, counted and saved with it.
    """

    def __init__(self, algorithm: AlgorithmLike):
        rollouts = ParallelRollouts(algorithm.workers, mode="bulk_sync")
        super().__init__(TrainingStepsStage(algorithm, rollouts.stage), "training_step")


class TrainingStepsStage(Stage):
    """The stage of TrainingSteps; `synchronous_parallel_sample` pulls its rollouts."""

    name = "training_step"

    def __init__(self, algorithm: AlgorithmLike, rollouts: Stage):
        super().__init__(rollouts)
        self._algorithm = algorithm
        self.title = f"{type(algorithm).__name__}.training_step"

    def sample_round(self, workers: WorkerSet) -> Any:
        """Return a round of rollouts; None if `workers` are not the plan's."""
        if workers is not self._algorithm.workers:
            return None
        return self._pull_up(True)  # a synchronous gather that may block has a batch

    def pull(self, block: bool) -> Any:
        results = call_in_stage(self, self._step)
        plan = PlanMetrics.of(_get_shared_metrics())
        reported = plan.info
        plan.step_results = {name: value for name, value in results.items() if name not in reported}
        self.items += 1
        is_late = self.items == MAX_STEPS_WITHOUT_SAMPLES and self._algorithm.config.samples
        if is_late and not _get_shared_metrics().counters["num_env_steps_sampled"]:
            log.warning(
                "%s() was called %d times, but no env steps were counted, so limits on env steps "
                "are never reached: sample with synchronous_parallel_sample("
                "worker_set=self.workers), which counts them", self.title, self.items,
            )  # fmt: skip
        return results

    def _step(self) -> dict[str, Any]:
        token = _running_step.set(self)
        try:
            results = self._algorithm.training_step()
        finally:
            _running_step.reset(token)
        if not isinstance(results, dict):
            raise TypeError(
                f"{type(self._algorithm).__name__}.training_step() must return a dict of "
                f"results, it returned a {type(results).__name__}"
            )
        return results

    def can_return_not_ready(self) -> bool:
        return False


_running_step: ContextVar[TrainingStepsStage | None] = ContextVar("running_step", default=None)
_train_operators: weakref.WeakKeyDictionary[Any, dict[Any, TrainOneStep]] = (
    weakref.WeakKeyDictionary()
)


@overload
def synchronous_parallel_sample(
    *,
    worker_set: WorkerSet,
    max_env_steps: int | None = ...,
    max_agent_steps: int | None = ...,
    concat: Literal[True] = ...,
) -> MultiAgentBatch: ...


@overload
def synchronous_parallel_sample(
    *,
    worker_set: WorkerSet,
    max_env_steps: int | None = ...,
    max_agent_steps: int | None = ...,
    concat: Literal[False],
) -> list[MultiAgentBatch]: ...


def synchronous_parallel_sample(
    *,
    worker_set: WorkerSet,
    max_env_steps: int | None = None,
    max_agent_steps: int | None = None,
    concat: bool = True,
) -> Any:
    """Sample rounds of one fragment per worker, with the newest weights, until a limit is reached.

    If both limits are None, sample one round.

    Args:
        worker_set: without remote workers the local one samples.
        max_env_steps: stop after at least this many env steps; the last round is kept whole.
        max_agent_steps: the same in agent steps.
        concat: concatenate the rounds into one MultiAgentBatch; else return a list with a
            MultiAgentBatch per round.

    Raises:
        ValueError: both limits are given, or one is below 1.
    """
    if max_env_steps is not None and max_agent_steps is not None:
        raise ValueError(
            "synchronous_parallel_sample takes max_env_steps or max_agent_steps, not both"
        )
    limit = max_agent_steps if max_env_steps is None else max_env_steps
    if limit is not None and limit < 1:
        raise ValueError(f"synchronous_parallel_sample: the limit must be at least 1, got {limit}")
    rounds: list[MultiAgentBatch] = []
    steps = 0
    while not rounds or (limit is not None and steps < limit):
        batch = _sample_round(worker_set)
        steps += batch.env_steps() if max_agent_steps is None else batch.agent_steps()
        rounds.append(batch.as_multi_agent())
    return SampleBatch.concat_samples(rounds).as_multi_agent() if concat else rounds


def _sample_round(workers: WorkerSet) -> Any:
    step = _running_step.get()
    batch = None if step is None else step.sample_round(workers)
    if batch is not None:
        return batch
    if workers.standalone_rollouts is None:
        workers.standalone_rollouts = ParallelRollouts(workers, mode="bulk_sync")
    return next(workers.standalone_rollouts)


def train_one_step(
    algorithm: AlgorithmLike,
    train_batch: SampleBatch | MultiAgentBatch,
    policies_to_train: Collection[str] | None = None,
) -> ResultDict:
    """Update the local worker's policies from a batch.

    Each policy's settings `num_sgd_iter` and `sgd_minibatch_size` apply.

    Args:
        algorithm: the algorithm whose policies learn.
        train_batch: rows of one policy or of several.
        policies_to_train: ids; None for all policies that the setting of that name allows.

    Returns:
        policy id -> {"learner_stats": {name: mean over the last pass}, "num_agent_steps_trained":
        rows}.

    Raises:
        KeyError: `policies_to_train` or the batch names a policy that does not exist.
    """
    operators = _train_operators.setdefault(algorithm, {})
    key = None if policies_to_train is None else tuple(sorted(policies_to_train))
    if key not in operators:
        operators[key] = TrainOneStep(algorithm.workers, policies_to_train)
    if _running_step.get() is not None:
        return operators[key](train_batch)[1]
    with metrics_scope(algorithm.plan.metrics):
        return operators[key](train_batch)[1]


multi_gpu_train_one_step = train_one_step
"""RLlib's other name of `train_one_step`. An update is not shared out over GPUs: use
MultiGPUTrainOneStep for that."""
