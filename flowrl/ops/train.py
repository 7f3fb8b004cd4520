"""Operators that improve the policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import MetricsContext, _get_shared_metrics

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet

Batch = SampleBatch | MultiAgentBatch
Info = dict[str, Any]  # policy id -> {"learner_stats": …, "num_agent_steps_trained": n}


@dataclass(repr=False)
class TrainOneStep:
    """for_each, batch -> (batch, info): the local worker's policies learn from the batch.

    Remote workers get the new weights with their next request. `info` maps policy id ->
    {"learner_stats": {name: mean of the last pass}, "num_agent_steps_trained": rows}.
    Counts `num_env_steps_trained` and `num_agent_steps_trained`; times `learn`.

    Args:
        workers: the WorkerSet whose local worker learns.
        policies: ids of those that learn; None for all in the batch that are to (the setting
            `policies_to_train`).
        num_sgd_iter: passes over the batch; None: each policy's own setting.
        sgd_minibatch_size: rows per update, 0 for the whole batch; None: each policy's own
            setting, or the whole batch where that is smaller. Of several policies each makes at
            least one update.
    """

    workers: WorkerSet
    policies: Collection[str] | None = None
    num_sgd_iter: int | None = None
    sgd_minibatch_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.policies, str):
            raise TypeError(f"policies is a collection of ids: [{self.policies!r}]")
        if self.num_sgd_iter is not None and self.num_sgd_iter < 1:
            raise ValueError(f"num_sgd_iter must be at least 1, got {self.num_sgd_iter}")
        if self.sgd_minibatch_size is not None and self.sgd_minibatch_size < 0:
            raise ValueError(
                f"sgd_minibatch_size must be at least 0, got {self.sgd_minibatch_size}"
            )

    def __call__(self, batch: Batch) -> tuple[Batch, Info]:
        metrics = _get_shared_metrics()
        info = train_one_step(
            self.workers,
            batch,
            metrics,
            self.policies,
            self.num_sgd_iter,
            self.sgd_minibatch_size,
        )
        return batch, info

    def __repr__(self) -> str:
        given = {
            "policies": None if self.policies is None else sorted(self.policies),
            "num_sgd_iter": self.num_sgd_iter,
            "sgd_minibatch_size": self.sgd_minibatch_size,
        }
        told = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        return f"TrainOneStep({told})"


def train_one_step(
    workers: WorkerSet,
    batch: Batch,
    metrics: MetricsContext,
    policies: Collection[str] | None = None,
    num_sgd_iter: int | None = None,
    sgd_minibatch_size: int | None = None,
) -> Info:
    """Let the local worker's policies learn from a batch; see TrainOneStep.

    Raises:
        KeyError: `policies` names one, or the batch has rows of one, that the worker has not got.
    """
    if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
        raise TypeError(
            f"TrainOneStep takes a batch, got {type(batch).__name__}: does the operator before it "
            "return what it was given?"
        )
    worker = workers.local_worker()
    policy_map = worker.policy_map
    asked = batch.policy_batches if policies is None else policies
    unknown = sorted(set(asked) - set(policy_map))
    if unknown:
        raise KeyError(f"no policies {unknown} here: there are {sorted(policy_map)}")
    info: Info = {}
    with worker.lock, metrics.timers["learn"] as timer:
        for policy_id, rows in batch.policy_batches.items():
            if (policies is not None and policy_id not in policies) or not rows.count:
                continue
            if policies is None and not worker.is_policy_to_train(policy_id, rows):
                continue
            policy = policy_map[policy_id]
            policy.on_global_var_update(workers.global_vars)
            passes = policy.config.num_sgd_iter if num_sgd_iter is None else num_sgd_iter
            size = sgd_minibatch_size
            if size is None:
                size = min(policy.config.sgd_minibatch_size, rows.count)
            elif isinstance(batch, MultiAgentBatch):
                size = min(size, rows.count)  # one of several policies may have few rows
            told: dict[str, float] = {}
            worker.on_learn_on_batch(policy, rows, told)
            stats = {**policy.learn_on_minibatches(rows, passes, size), **told}
            info[policy_id] = {"learner_stats": stats, "num_agent_steps_trained": rows.count}
    timer.push_units_processed(batch.count)
    metrics.counters["num_env_steps_trained"] += batch.env_steps()
    metrics.counters["num_agent_steps_trained"] += sum(
        one["num_agent_steps_trained"] for one in info.values()
    )
    metrics.info.setdefault("learner", {}).update(info)
    return info
