"""What `Algorithm.training_step` is made of: sampling, learning, and the plan that calls it."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import NOT_READY, LocalIterator, Stage, _get_shared_metrics
from flowrl.iter.errors import note_origin, operator_error
from flowrl.iter.waiting import Waiter
from flowrl.ops.rollout import ParallelRollouts
from flowrl.ops.train import learn_from

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet
    from flowrl.trainer.algorithm import Algorithm

ResultDict = dict[str, Any]
"""What a training step gives: policy id -> {"learner_stats": …, "num_agent_steps_trained": n}, and
whatever else it has to tell."""


class TrainingSteps(LocalIterator[ResultDict]):
    """What `algorithm.training_step()` gives, one call after another, without end.

    Args:
        algorithm: its rounds of rollouts are part of the plan: counted, shown and saved with it.
    """

    def __init__(self, algorithm: Algorithm):
        rollouts = ParallelRollouts(algorithm.workers, mode="bulk_sync")
        super().__init__(TrainingStep(algorithm, rollouts.stage), "training_step")


class TrainingStep(Stage):
    """The stage of TrainingSteps, over the rollouts that `synchronous_parallel_sample` takes."""

    name = "training_step"

    def __init__(self, algorithm: Algorithm, rollouts: Stage):
        super().__init__(rollouts)
        self.title = f"{type(algorithm).__name__}.training_step"
        self._algorithm = algorithm
        self._waiter = Waiter()

    def round_of(self, workers: WorkerSet) -> Any:
        """A round of rollouts; None where these are not the plan's workers."""
        if workers is not self._algorithm.workers:
            return None
        while True:
            self._waiter.clear()
            batch = self._pull_up(True)
            if batch is not NOT_READY:
                return batch
            self._waiter.wait(self.parents[0].waits())

    def pull(self, block: bool) -> Any:
        token = _running.set(self)
        try:
            told = self._algorithm.training_step()
            if not isinstance(told, dict):
                raise TypeError(
                    f"{type(self._algorithm).__name__}.training_step() must return a dict of "
                    f"results, it returned a {type(told).__name__}"
                )
        except BaseException as error:
            note_origin(error, self, None)
            raise operator_error(error) from error.__cause__
        finally:
            _running.reset(token)
        metrics = _get_shared_metrics()
        learned = metrics.info.get("learner", {})
        metrics.info["told"] = {name: value for name, value in told.items() if name not in learned}
        self.items += 1
        return told

    def can_wait(self) -> bool:
        return False


_running: ContextVar[TrainingStep | None] = ContextVar("running", default=None)
_standalone: weakref.WeakKeyDictionary[Any, LocalIterator[Any]] = weakref.WeakKeyDictionary()


def synchronous_parallel_sample(
    *,
    worker_set: WorkerSet,
    max_env_steps: int | None = None,
    max_agent_steps: int | None = None,
    concat: bool = True,
) -> Any:
    """Rounds of one fragment from every worker, with the newest weights, until there are enough.

    Args:
        worker_set: without remote workers the local one samples.
        max_env_steps: stop when there are so many env steps; the last round is kept whole. None,
            with the next one too: one round.
        max_agent_steps: the same for rows of agents.
        concat: join the rounds into one MultiAgentBatch; else a list of them, one for each round.

    Raises:
        ValueError: both limits are given, or one below 1.
    """
    if max_env_steps is not None and max_agent_steps is not None:
        raise ValueError("synchronous_parallel_sample takes max_env_steps or max_agent_steps")
    limit = max_agent_steps if max_env_steps is None else max_env_steps
    if limit is not None and limit < 1:
        raise ValueError(f"synchronous_parallel_sample: at least 1 step is needed, got {limit}")
    rounds: list[MultiAgentBatch] = []
    steps = 0
    while not rounds or (limit is not None and steps < limit):
        batch = _round(worker_set)
        steps += batch.env_steps() if max_agent_steps is None else batch.agent_steps()
        rounds.append(batch.as_multi_agent())
    return SampleBatch.concat_samples(rounds).as_multi_agent() if concat else rounds


def _round(workers: WorkerSet) -> Any:
    running = _running.get()
    batch = None if running is None else running.round_of(workers)
    if batch is not None:
        return batch
    if workers not in _standalone:
        _standalone[workers] = ParallelRollouts(workers, mode="bulk_sync")
    return next(_standalone[workers])


def train_one_step(
    algorithm: Algorithm,
    train_batch: SampleBatch | MultiAgentBatch,
    policies_to_train: Collection[str] | None = None,
) -> ResultDict:
    """Let the local worker's policies learn from a batch, as their settings `num_sgd_iter` and
    `sgd_minibatch_size` say.

    Args:
        algorithm: whose `workers` they are of.
        train_batch: a policy's rows, or those of several.
        policies_to_train: ids; None: all that are to learn (the setting of that name).

    Returns:
        policy id -> {"learner_stats": {name: mean of the last pass}, "num_agent_steps_trained":
        rows}.

    Raises:
        KeyError: a policy is named, or there are rows of one, that there is not.
    """
    called_by_plan = _running.get() is not None
    metrics = _get_shared_metrics() if called_by_plan else algorithm.plan.metrics
    return learn_from(algorithm.workers, train_batch, metrics, policies_to_train)


multi_gpu_train_one_step = train_one_step
"""`train_one_step`: policies learn on the device that they are on."""
