"""Operators that compute gradients and apply them elsewhere."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from flowrl.data import Batch
from flowrl.iter import LocalIterator, Source, _get_shared_metrics
from flowrl.learners.gradients import Gradients
from flowrl.learners.learner import (
    LocalLearner,
    check_policy_ids,
    compute_gradients,
)
from flowrl.ops.plan_metrics import Info, record_updates
from flowrl.ops.rollout import CountRollouts, DropStale, check_lag
from flowrl.ops.staleness import StalenessLimit, check_waiting
from flowrl.ops.weights import contributors
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.worker_set import WorkerSet, check_workers


class ComputeGradients:
    """for_each, batch -> Gradients: compute the local worker's gradients, without an update.

    Times `compute_grads`.

    Args:
        workers: the WorkerSet.
        policies: ids of the policies; None for all policies of the batch that `policies_to_train`
            allows.

    Raises:
        TypeError: `policies` is a string; when called: the item is not a batch.
    """

    chained_with: ClassVar[str] = "for_each"

    def __init__(self, workers: WorkerSet, policies: Collection[str] | None = None):
        check_workers(workers, type(self).__name__)
        check_policy_ids(policies)
        self.workers = workers
        self.policies = policies

    def __call__(self, batch: Batch) -> Gradients:
        gradients = compute_gradients(self.workers.local_worker(), batch, self.policies)
        record_computation(gradients)
        return gradients

    def __repr__(self) -> str:
        only = "" if self.policies is None else f"policies={sorted(self.policies)}"
        return f"ComputeGradients({only})"


def record_computation(gradients: Gradients) -> None:
    """Add the duration of a computation of gradients to the timer `compute_grads`."""
    timer = _get_shared_metrics().timers["compute_grads"]
    timer.push(gradients.seconds)
    timer.push_units_processed(gradients.num_env_steps)


@dataclass(repr=False)
class ComputeGradientsOnWorker:
    """for_each on the shards, fragment -> Gradients: compute the gradients on the worker that
    sampled the fragment."""

    chained_with: ClassVar[str] = "for_each"

    policies: Collection[str] | None = None
    worker: RolloutWorker | None = None

    def bound_to(self, worker: RolloutWorker) -> ComputeGradientsOnWorker:
        """Return the operator for one worker."""
        return ComputeGradientsOnWorker(self.policies, worker)

    def __call__(self, batch: Batch) -> Gradients:
        assert self.worker is not None
        return compute_gradients(self.worker, batch, self.policies)

    def __repr__(self) -> str:
        return "ComputeGradientsOnWorker"


class AsyncGradients(LocalIterator[Gradients]):
    """An endless stream of gradients that workers compute from their own fragments.

    Each worker samples a fragment and computes the gradient of its loss with the newest weights
    that it has received. Gradients are returned in order of arrival. Updates the same counters as
    ParallelRollouts. Times `grad_wait`, the time until the next gradient arrives, and
    `compute_grads`, the time of its computation on the worker. Chain
    `ApplyGradients(workers, update_all=False)`: a worker receives the new weights with its next
    request, which is sent when the plan pulls the next item.

    Args:
        workers: the WorkerSet; without remote workers the local one samples.
        num_async: requests in flight per worker. With n, a gradient is computed with weights that
            lack the updates from the worker's last n - 1 gradients.
        policies: ids of the policies; None for all policies of the fragment that
            `policies_to_train` allows.
        max_policy_lag: maximum policy lag of a gradient, in updates; None for no limit.
        stale_policy: "drop" drops older gradients and counts their env steps as
            `num_env_steps_dropped`; "wait" delays requests so that none becomes older (see
            StalenessLimit), except after fragments that failures of environments have shortened.

    Raises:
        TypeError: `policies` is not a collection.
        ValueError: an option is invalid, `stale_policy="wait"` lacks a `max_policy_lag` or counts
            steps by agent steps, or the setting `output` is set.
        TypeError (when pulled): a policy has a target network, which remote workers would not
            update.
    """

    def __init__(
        self,
        workers: WorkerSet,
        *,
        num_async: int = 1,
        policies: Collection[str] | None = None,
        max_policy_lag: int | None = None,
        stale_policy: Literal["drop", "wait"] = "drop",
    ):
        check_workers(workers, type(self).__name__)
        check_policy_ids(policies)
        check_lag(max_policy_lag)
        if stale_policy not in ("drop", "wait"):
            raise ValueError(f'stale_policy is "drop" or "wait", got {stale_policy!r}')
        if stale_policy == "wait":
            check_waiting(max_policy_lag, workers.config.count_steps_by)
        limit = None
        if max_policy_lag is not None and stale_policy == "wait":
            steps = workers.steps_per_fragment()
            limit, max_policy_lag = StalenessLimit(steps, max_policy_lag, steps), None
        if workers.config.output is not None:
            raise ValueError(
                "output: AsyncGradients keeps fragments on their workers, so nothing can be "
                "written: remove `output`, or use ParallelRollouts and ComputeGradients"
            )
        gradients = workers.parallel_iterator().for_each(ComputeGradientsOnWorker(policies))
        counted = (
            gradients.gather_async(num_async=num_async, limit=limit)
            .zip_with_source()
            .for_each(CountGradients(workers))
        )
        if max_policy_lag is not None:
            counted = counted.filter(DropStale(workers, max_policy_lag))
        super().__init__(counted.stage, f"AsyncGradients(num_async={num_async})")
        self.stage.name, self.stage.title = "AsyncGradients", self.name


class CountGradients(CountRollouts):
    """for_each, (sources, Gradients) -> Gradients: count the fragments that the gradients
    come from.

    Times `grad_wait` and `compute_grads`.
    """

    timer_name = "grad_wait"

    def __call__(self, pair: tuple[tuple[Source, ...], Gradients]) -> Gradients:
        gradients: Gradients = super().__call__(pair)
        record_computation(gradients)
        return gradients

    def __repr__(self) -> str:
        return "CountGradients"


class AverageGradients:
    """for_each, list of Gradients -> Gradients: average the gradients, weighted by their
    numbers of rows.

    This is the gradient of the mean loss over all the rows.

    Raises:
        TypeError (when called): the item is not a list of Gradients, or is empty.
    """

    chained_with: ClassVar[str] = "for_each"

    def __call__(self, items: Sequence[Gradients]) -> Gradients:
        if not isinstance(items, (list, tuple)) or not items:
            raise TypeError(
                "AverageGradients takes a list of Gradients, as .batch(n) makes them, got "
                f"{type(items).__name__}"
            )
        for item in items:
            if not isinstance(item, Gradients):
                raise TypeError(
                    "AverageGradients takes a list of Gradients, got a list with a "
                    f"{type(item).__name__}: chain ComputeGradients before .batch(n)"
                )
        return Gradients.mean(items)

    def __repr__(self) -> str:
        return "AverageGradients"


class ApplyGradients:
    """for_each, Gradients -> (Gradients, info): update the local worker's policies once.

    `info` and counters are those of TrainOneStep. Times `apply_grad`.

    Args:
        workers: the WorkerSet.
        policies: ids of the policies to update; None for all that have gradients.
        update_all: send the new weights to every remote worker with its next request; if False,
            only to the workers whose experience the gradients come from.

    Raises:
        TypeError: `policies` is a string; when pulled: the item is not Gradients.
        KeyError (when pulled): a gradient of a policy that does not exist.
        ValueError (when pulled): `update_all=False`, and the gradients name no worker.
    """

    chained_with: ClassVar[str] = "for_each"

    trains = True  # see ops.report.training_operators

    def __init__(
        self,
        workers: WorkerSet,
        policies: Collection[str] | None = None,
        update_all: bool = True,
    ):
        check_workers(workers, type(self).__name__)
        self.learner = LocalLearner(workers, policies)
        self.policies = policies
        self.update_all = update_all

    def __call__(self, item: Gradients) -> tuple[Gradients, Info]:
        if not isinstance(item, Gradients):
            raise TypeError(
                f"ApplyGradients takes Gradients, got {type(item).__name__}: chain it after "
                "ComputeGradients or AverageGradients"
            )
        metrics = _get_shared_metrics()
        sampled_by = contributors(item, "ApplyGradients")
        if not (self.update_all or sampled_by):
            raise ValueError(
                "ApplyGradients(update_all=False): these gradients name no workers (were their "
                "rows drawn from a buffer?): use update_all=True"
            )
        started = time.perf_counter()
        updates = self.learner.apply_gradients(item)
        timer = metrics.timers["apply_grad"]
        timer.push(time.perf_counter() - started)
        timer.push_units_processed(item.num_env_steps)
        weight_sync = self.learner.workers.weight_sync
        weight_sync.republish()
        if not self.update_all:
            weight_sync.update_only(sampled_by)
        return item, record_updates(metrics, self, updates, item.num_env_steps, None)

    def __repr__(self) -> str:
        only = "" if self.policies is None else f"policies={sorted(self.policies)}, "
        return f"ApplyGradients({only}update_all={self.update_all})"
