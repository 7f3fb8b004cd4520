"""Learner: update policies from batches. The base class, shared functions and LocalLearner."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flowrl.data import Batch, MultiAgentBatch, SampleBatch
from flowrl.data.item_checks import check_batch
from flowrl.data.sequences import count_loss_rows
from flowrl.errors import add_note
from flowrl.iter import Source
from flowrl.learners.gradients import Gradients
from flowrl.policies.learning.epochs import checked_numbers
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import check_policies_exist
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.worker_set import WorkerSet
from flowrl.setting_values import check_int, check_names
from flowrl.state_schema import Fields, Natural, check_state

OnLearn = Callable[[Policy, SampleBatch, dict[str, float]], None]
"""Callback before a policy learns: (policy, its rows, dict that takes more statistics)."""


_STATE: Fields = {
    "stats": dict[str, Any],
    "rows": Natural,
    "replayed_rows": Natural,
    "policy_lags": list[int],
    "row_stats": dict[str, np.ndarray],
}  # of a PolicyUpdate


class ProcessGroupError(RuntimeError):
    """A process of the group died, or did not answer in time.

    Attributes:
        group_name: name of the group that broke; "" if groups have no names.
    """

    def __init__(self, message: str, group_name: str = ""):
        super().__init__(message, group_name)
        self.group_name = group_name

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class PolicyUpdate:
    """Report of a training step of one policy: all passes over one batch.

    Attributes:
        stats: statistics, means over the minibatches of the last pass; with `policy_lags`, also
            their mean and maximum.
        rows: rows of the policy in the batch, burn-in included.
        replayed_rows: how many of them were drawn from a replay buffer.
        policy_lags: for each fragment that the rows come from, the number of optimizer steps made
            since it was sampled. Rows that were drawn from a ReplayBuffer have none.
        row_stats: values per row, arrays [rows] (see Policy.row_stats).
    """

    stats: dict[str, float]
    rows: int
    replayed_rows: int = 0
    policy_lags: list[int] = field(default_factory=list)
    row_stats: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lags = self.policy_lags
        if lags:
            lag = {"policy_lag_mean": sum(lags) / len(lags), "policy_lag_max": float(max(lags))}
            self.stats = {**self.stats, **lag}

    @classmethod
    def of(cls, rows: SampleBatch, stats: Mapping[str, Any], where: str) -> PolicyUpdate:
        """Return the report of an update by the user's code, from its rows and statistics.

        Raises:
            TypeError: a statistic is not a number; the message starts with `where`.
        """
        replayed = rows.count if "batch_indexes" in rows else 0
        return cls(checked_numbers(stats, where), rows.count, replayed_rows=replayed)

    def info(self) -> dict[str, Any]:
        """Return the policy's entry in a training operator's `info`."""
        info: dict[str, Any] = {
            "learner_stats": self.stats,
            "num_agent_steps_trained": self.rows,
        }
        return {**info, "row_stats": self.row_stats} if self.row_stats else info

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> PolicyUpdate:
        """Return the update of a `state_dict`."""
        check_state(state, _STATE, "the update of a policy")
        return cls(**{name: state[name] for name in _STATE})


Updates = dict[str, PolicyUpdate]
"""Policy id -> PolicyUpdate."""


class Learner:
    """Updates the policies of a WorkerSet.

    Schedules advance after each call of `update`, so all passes over a batch use the same values.

    Args:
        workers: the WorkerSet.
        policies: ids of the policies to update; None updates all policies of a batch that
            `policies_to_train` allows.
        num_sgd_iter: passes over a batch; None uses each policy's own setting.
        sgd_minibatch_size: rows per update, 0 for the whole batch; None uses each policy's own
            setting, or the whole batch if that is smaller.

    Attributes:
        global_vars: global variables of the WorkerSet, passed to the policies after each update.

    Raises:
        TypeError: `policies` is a string.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        workers: WorkerSet,
        policies: Collection[str] | None = None,
        num_sgd_iter: int | None = None,
        sgd_minibatch_size: int | None = None,
    ):
        check_learning_arguments(policies, num_sgd_iter, sgd_minibatch_size)
        self.workers = workers
        self.global_vars = workers.global_vars
        self.policies = policies
        self.num_sgd_iter = num_sgd_iter
        self.sgd_minibatch_size = sgd_minibatch_size

    def update(self, batch: Batch) -> Updates:
        """Update the policies from a batch.

        Returns:
            policy id -> report of its training step, for each policy that had rows to learn from.

        Raises:
            TypeError: `batch` is not a batch.
            KeyError: `policies` or, if it is None, the batch names a policy that does not exist.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update(batch)")

    def start(self) -> None:
        """Allow updates; a learner that was stopped may be started again."""

    def stop(self) -> None:
        """Release processes and connections."""

    def take_restarts(self) -> int:
        """Return the number of learner processes restarted since the last call."""
        return 0


class LocalLearner(Learner):
    """Updates the policies of the local worker, in the calling thread."""

    def update(self, batch: Batch) -> Updates:
        worker = self.workers.local_worker()
        rows = select_rows(worker, batch, self.policies)
        with worker.lock:
            updates = update_policies(
                worker.policy_map,
                rows,
                batch.sources,
                self.num_sgd_iter,
                self.sgd_minibatch_size,
                clip_minibatch_size=isinstance(batch, MultiAgentBatch),
                on_learn=worker.on_learn_on_batch,
            )
            for policy_id in rows:
                worker.policy_map[policy_id].on_global_var_update(self.global_vars)
            return updates

    def apply_gradients(self, gradients: Gradients) -> Updates:
        """Update each policy once with its gradient.

        Raises:
            KeyError: `gradients` names a policy that does not exist.
        """
        worker = self.workers.local_worker()
        check_policies_exist(worker.policy_map, gradients.by_policy)
        updates: Updates = {}
        with worker.lock:
            for policy_id, gradient in gradients.by_policy.items():
                if self.policies is not None and policy_id not in self.policies:
                    continue
                policy = worker.policy_map[policy_id]
                lags = policy_lags(policy_id, policy.version, gradients.sources)
                policy.apply_gradients(gradient)
                policy.on_global_var_update(self.global_vars)
                stats = gradients.stats[policy_id]
                if policy.config.on_nonfinite_update == "skip":
                    skipped = float(getattr(policy, "num_skipped_updates", 0))
                    stats = {**stats, "num_skipped_updates": skipped}
                updates[policy_id] = PolicyUpdate(
                    stats,
                    gradients.rows_by_policy.get(policy_id, gradients.rows[policy_id]),
                    policy_lags=lags,
                    row_stats=gradients.row_stats.get(policy_id, {}),
                )
        return updates


def update_policies(
    policies: Mapping[str, Policy],
    rows: Mapping[str, SampleBatch | None],
    sources: Iterable[Source],
    num_sgd_iter: int | None,
    sgd_minibatch_size: int | None,
    clip_minibatch_size: bool,
    on_learn: OnLearn | None = None,
) -> Updates:
    """Update policies from their rows.

    Args:
        policies: policy id -> policy.
        rows: policy id -> the rows that it learns from; None if only other processes of the group
            have rows: the result does not contain the policy.
        sources: fragments that the rows come from.
        num_sgd_iter, sgd_minibatch_size: see Learner.
        clip_minibatch_size: reduce a minibatch size that exceeds a policy's rows, do not raise.
        on_learn: see OnLearn.
    """
    sources = tuple(sources)
    updates: Updates = {}
    for policy_id, batch in rows.items():
        policy: Any = policies[policy_id]
        passes = policy.config.num_sgd_iter if num_sgd_iter is None else num_sgd_iter
        if batch is None:
            policy.learner.learn_without_rows(passes)
            continue
        size = sgd_minibatch_size
        if size is None:
            size = policy.config.sgd_minibatch_size
        if clip_minibatch_size or sgd_minibatch_size is None:
            size = min(size, batch.count)
        callback_stats: dict[str, float] = {}
        lags = policy_lags(policy_id, policy.version, sources)
        if on_learn is not None:
            on_learn(policy, batch, callback_stats)
        try:
            stats = policy.learn_on_minibatches(batch, passes, size)
        except Exception as error:
            if updates:
                add_note(
                    error,
                    f"raised while policy {policy_id!r} learned; the policies {list(updates)} had "
                    "learned from this batch before",
                )
            raise
        updates[policy_id] = PolicyUpdate(
            {**stats, **callback_stats},
            batch.count,
            replayed_rows=batch.count if "batch_indexes" in batch else 0,
            policy_lags=lags,
            row_stats=policy.row_stats,
        )
    return updates


def compute_gradients(
    worker: RolloutWorker, batch: Batch, policies: Collection[str] | None
) -> Gradients:
    """Return the gradients of a worker's policies on a batch; the policies do not change.

    Raises:
        TypeError, KeyError: see `select_rows` and `check_no_target_networks`.
    """
    started = time.perf_counter()
    rows_by_policy = select_rows(worker, batch, policies)
    check_no_target_networks(worker, rows_by_policy)
    gradients = Gradients(
        {}, {}, {}, batch.env_steps(), batch.sources, rows_by_policy=batch.steps_by_policy()
    )
    with worker.lock:
        for policy_id, rows in rows_by_policy.items():
            policy = worker.policy_map[policy_id]
            callback_stats: dict[str, float] = {}
            worker.on_learn_on_batch(policy, rows, callback_stats)
            gradient, stats = policy.compute_gradients(rows)
            gradients.by_policy[policy_id] = gradient
            gradients.stats[policy_id] = {**stats, **callback_stats}
            gradients.rows[policy_id] = count_loss_rows(rows)
            if policy.row_stats:
                gradients.row_stats[policy_id] = policy.row_stats
    gradients.seconds = time.perf_counter() - started
    return gradients


def select_rows(
    worker: RolloutWorker, batch: Batch, policies: Collection[str] | None
) -> dict[str, SampleBatch]:
    """Return policy id -> the rows that the policy learns from.

    Raises:
        TypeError: `batch` is not a batch.
        KeyError: `policies` or, if it is None, the batch names a policy that the worker does not
            have.
    """
    check_batch(batch, "a learner")
    named = batch.policy_batches if policies is None else policies
    check_policies_exist(worker.policy_map, named)
    return {
        policy_id: rows
        for policy_id, rows in batch.policy_batches.items()
        if rows.count
        and (
            worker.is_policy_to_train(policy_id, rows)
            if policies is None
            else policy_id in policies
        )
    }


def check_no_target_networks(worker: RolloutWorker, policy_ids: Iterable[str]) -> None:
    """Check that a remote worker trains no policy with a target network.

    Remote workers receive weights, not target networks, and UpdateTargetNetwork updates only the
    local policies.

    Args:
        worker: any worker; the local one may train such policies.
        policy_ids: the policies that it trains.

    Raises:
        TypeError: a policy has a target network.
    """
    for policy_id in policy_ids if worker.worker_index else ():
        policy = worker.policy_map[policy_id]
        if hasattr(policy, "update_target"):
            raise TypeError(
                f"policy {policy_id!r} is a {type(policy).__name__}, which has a target network, "
                "and remote workers would never receive its updates: train it with TrainOneStep, "
                "or with num_workers=0"
            )


def trainable_policies(
    worker: RolloutWorker, policies: Collection[str] | None
) -> dict[str, Policy]:
    """Return policy id -> policy for the policies that may be updated.

    Args:
        worker: the worker with the policies.
        policies: ids; None for those that the setting `policies_to_train` names, or all.
    """
    to_train = worker.config.policies_to_train
    ids = policies if policies is not None or callable(to_train) else to_train
    return {pid: p for pid, p in worker.policy_map.items() if ids is None or pid in ids}


def policy_lags(policy_id: str, version: int, sources: Iterable[Source]) -> list[int]:
    """Return, for each source fragment, the number of updates since it was sampled.

    Rows that were drawn from a ReplayBuffer carry no version and are left out; the fragments that
    MixInReplay repeats have one.
    """
    versions = [source.tags.get("weights_versions", {}) for source in sources]
    return [version - by_policy[policy_id] for by_policy in versions if policy_id in by_policy]


def check_learning_arguments(
    policies: Any, num_sgd_iter: int | None, sgd_minibatch_size: int | None
) -> None:
    """Check these arguments of a Learner.

    Raises:
        TypeError, ValueError: see Learner.
    """
    check_policy_ids(policies)
    if num_sgd_iter is not None:
        check_int("num_sgd_iter", num_sgd_iter)
    if sgd_minibatch_size is not None:
        check_int("sgd_minibatch_size", sgd_minibatch_size, 0)


def check_policy_ids(policies: Any) -> None:
    """Check the argument `policies` of an operator that trains.

    Raises:
        TypeError: it is neither a collection of ids nor None.
        ValueError: it is empty.
    """
    if policies is not None:
        check_names("policies", policies, "nothing would be trained: None trains all policies")
