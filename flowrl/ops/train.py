"""Operators that train policies on batches and update their target networks."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from flowrl.data import DEFAULT_POLICY_ID, Batch
from flowrl.iter import _get_shared_metrics
from flowrl.iter.stage import describe
from flowrl.learners.actors import make_learner
from flowrl.learners.learner import (
    Learner,
    LocalLearner,
    PolicyUpdate,
    Updates,
    check_policy_ids,
)
from flowrl.ops.plan_metrics import Info, record_updates
from flowrl.sampling.worker_set import WorkerSet, check_workers
from flowrl.setting_values import check_int
from flowrl.state_schema import Fields, Natural

TrainedItem = tuple[Batch, Info]
"""The item of a training operator."""


class TrainOneStep:
    """for_each, batch -> (batch, info): update the local worker's policies from the batch.

    Remote workers get the new weights with their next request. `info` maps policy id ->
    {"learner_stats": {name: mean over the last pass}, "num_agent_steps_trained": rows}, and
    "row_stats": {name: array [rows]} if the policy reports values per row (see Policy.row_stats).
    For batches of fragments, the statistics include `policy_lag_mean` and `policy_lag_max`: the
    number of updates since the fragments were sampled. Rows drawn from a ReplayBuffer have none.

    Counts `num_env_steps_trained` and `num_agent_steps_trained`; times `learn`.

    Args:
        workers: the WorkerSet.
        policies: ids of the policies to update; None updates all policies of the batch that
            `policies_to_train` allows.
        num_sgd_iter: passes over the batch; None uses each policy's own setting.
        sgd_minibatch_size: rows per update, 0 for the whole batch; None uses the setting of each
            policy, at most the number of its rows. Every policy of the batch makes at least one
            update.

    Raises:
        TypeError: `policies` is a string.
        ValueError: a number is out of range.
    """

    chained_with: ClassVar[str] = "for_each"

    trains = True  # see ops.report.training_operators

    def __init__(
        self,
        workers: WorkerSet,
        policies: Collection[str] | None = None,
        num_sgd_iter: int | None = None,
        sgd_minibatch_size: int | None = None,
    ):
        check_workers(workers, type(self).__name__)
        self._set_learner(LocalLearner(workers, policies, num_sgd_iter, sgd_minibatch_size))

    def _set_learner(self, learner: Learner) -> None:
        self.learner = learner
        self.policies = learner.policies

    def __call__(self, batch: Batch) -> TrainedItem:
        metrics = _get_shared_metrics()
        started = time.perf_counter()
        updates = self.learner.update(batch)
        seconds = time.perf_counter() - started
        self.learner.workers.weight_sync.republish()
        if restarts := self.learner.take_restarts():
            metrics.counters["num_learner_restarts"] += restarts
        return batch, record_updates(metrics, self, updates, batch.env_steps(), seconds)

    def __repr__(self) -> str:
        options = {
            "policies": None if self.policies is None else sorted(self.policies),
            "num_sgd_iter": self.learner.num_sgd_iter,
            "sgd_minibatch_size": self.learner.sgd_minibatch_size,
        }
        given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        return f"TrainOneStep({given})"


def record_training(
    operator: Any, batch: Batch, stats: Mapping[str, Mapping[str, float]]
) -> TrainedItem:
    """Count a batch on which an operator of your own has trained, and report its statistics.

    Call it in the operator, which has the attributes `trains = True` and `policies`.

    Args:
        operator: the operator.
        batch: the batch.
        stats: statistics of each policy that was updated, by policy id: numbers by name.

    Returns:
        (batch, info), the item of a training operator.

    Raises:
        KeyError: the batch has no rows of a policy in `stats`.
        TypeError: `stats` is not by policy id, a statistic is not a number, or the operator lacks
            an attribute.
    """
    if not (getattr(operator, "trains", False) and hasattr(operator, "policies")):
        raise TypeError(
            f"record_training: {type(operator).__name__} needs the attributes trains = True and "
            "policies (the ids of the policies that it trains; None for all)"
        )
    if not isinstance(stats, Mapping):
        raise TypeError(f"record_training: stats must be a dict by policy id, got {stats!r}")
    updates: Updates = {}
    for policy_id, values in stats.items():
        where = f"record_training: policy {policy_id!r} has"
        if not isinstance(values, Mapping):
            trained = next(iter(batch.policy_batches), DEFAULT_POLICY_ID)
            example = f"{{{trained!r}: {{{policy_id!r}: …}}}}"
            raise TypeError(
                f"record_training: stats[{policy_id!r}] is {describe(values)}: give the statistics "
                f"of each policy, {example}"
            )
        if policy_id not in batch.policy_batches:
            raise KeyError(
                f"record_training: the batch has no rows of the policy {policy_id!r}, only of "
                f"{sorted(batch.policy_batches)}"
            )
        updates[policy_id] = PolicyUpdate.of(batch.policy_batches[policy_id], values, where)
    metrics = _get_shared_metrics()
    info = record_updates(metrics, operator, updates, batch.env_steps(), None, True)
    return batch, info


class MultiGPUTrainOneStep(TrainOneStep):
    """for_each, batch -> (batch, info): update the policies on several Ray actors.

    Each learner computes the gradient of its share of every minibatch, and the gradients are
    averaged, so updates agree with TrainOneStep's to rounding. If a learner dies, all are restarted
    from the local policies and the batch is learned again; counts `num_learner_restarts`. Counts,
    times and `info` are TrainOneStep's.

    Args:
        workers: the WorkerSet.
        num_gpus: number of learners that have a GPU each.
        num_learners: number of learners without a GPU. If both are 0, the local worker learns.
        num_sgd_iter, sgd_minibatch_size, policies: see TrainOneStep.

    Raises:
        ValueError: both numbers are given, or one is negative.
        RuntimeError (when pulled): the cluster lacks the GPUs.
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
        check_workers(workers, type(self).__name__)
        self._options = {"num_gpus": num_gpus, "num_learners": num_learners}
        self._set_learner(
            make_learner(workers, policies, num_sgd_iter, sgd_minibatch_size, **self._options)
        )

    def stop(self) -> None:
        """Stop the learners."""
        self.learner.stop()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self._options.items() if value)
        return f"MultiGPUTrainOneStep({given})"


TrainTFMultiGPU = MultiGPUTrainOneStep
"""RLlib's name of `MultiGPUTrainOneStep`."""


class UpdateTargetNetwork:
    """for_each, (batch, info) -> the same pair: update target networks at intervals.

    Each operator counts the steps of each policy separately. A policy whose `update_target()`
    returns False remains due. Counts `num_target_updates`.

    Args:
        workers: the WorkerSet.
        target_update_freq: steps between two updates; 0 updates after every item.
        by_steps_trained: count the rows that the policy was trained on instead of the env steps
            sampled.
        policies: ids of the policies to update; None for all policies that were trained.

    Raises:
        TypeError: `policies` is a string; when pulled: a policy has no target network.
        ValueError: `target_update_freq` is negative.
    """

    state_fields: ClassVar[Fields] = {
        "rows_trained": dict[str, Natural],
        "last_update": dict[str, Natural],
    }

    chained_with: ClassVar[str] = "for_each"

    def __init__(
        self,
        workers: WorkerSet,
        target_update_freq: int,
        by_steps_trained: bool = False,
        policies: Collection[str] | None = None,
    ):
        check_workers(workers, type(self).__name__)
        check_policy_ids(policies)
        check_int("target_update_freq", target_update_freq, 0)
        self.workers = workers
        self.target_update_freq = target_update_freq
        self.by_steps_trained = by_steps_trained
        self.policies = policies
        self._rows_trained: dict[str, int] = {}
        self._last_update: dict[str, int] = {}  # steps at the last update

    def __call__(self, item: TrainedItem) -> TrainedItem:
        _, info = check_trained(item, "UpdateTargetNetwork")
        due = [
            policy_id
            for policy_id in (info if self.policies is None else self.policies)
            if self._count_and_check(policy_id, info.get(policy_id, {}))
        ]
        num_updates = self._update(due) if due else 0
        _get_shared_metrics().counters["num_target_updates"] += num_updates
        return item

    def _update(self, policy_ids: Collection[str]) -> int:
        """Update the target networks of policies; return how many were updated."""
        worker, num_updates = self.workers.local_worker(), 0
        with worker.lock:
            # records at which step of the learner the target networks are updated
            self.workers.weight_sync.observe_learner()
            for policy_id in policy_ids:
                policy: Any = worker.policy_map[policy_id]
                if policy.update_target() is not False:
                    self._last_update[policy_id] = self._steps(policy_id)
                    num_updates += 1
        return num_updates

    def _count_and_check(self, policy_id: str, entry: dict[str, Any]) -> bool:
        """Count the rows of a training; return whether the interval has passed for a policy."""
        policy = self.workers.local_worker().policy_map[policy_id]
        if not hasattr(policy, "update_target"):
            raise TypeError(
                f"UpdateTargetNetwork: policy {policy_id!r}, a {type(policy).__name__}, has no "
                "target network: leave it out of `policies`"
            )
        rows = self._rows_trained.get(policy_id, 0) + entry.get("num_agent_steps_trained", 0)
        self._rows_trained[policy_id] = rows
        now = self._steps(policy_id)
        last = self._last_update.setdefault(policy_id, 0 if self.by_steps_trained else now)
        return now - last >= self.target_update_freq

    def _steps(self, policy_id: str) -> int:
        """Return the steps that the interval is counted in."""
        if self.by_steps_trained:
            return self._rows_trained[policy_id]
        steps: int = _get_shared_metrics().counters["num_env_steps_sampled"]
        return steps

    def state_dict(self) -> dict[str, Any]:
        return {"rows_trained": dict(self._rows_trained), "last_update": dict(self._last_update)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows_trained = dict(state["rows_trained"])
        self._last_update = dict(state["last_update"])

    def __repr__(self) -> str:
        unit = ", by_steps_trained=True" if self.by_steps_trained else ""
        only = "" if self.policies is None else f", policies={sorted(self.policies)}"
        return f"UpdateTargetNetwork({self.target_update_freq}{unit}{only})"


def check_trained(item: Any, operator: str) -> TrainedItem:
    """Return the item of a training operator; raise TypeError for another item."""
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[1], dict):
        raise TypeError(
            f"{operator} takes (batch, info), got {type(item).__name__}: chain it after "
            "TrainOneStep"
        )
    return item
