"""Operators that improve the policy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import MetricsContext, _get_shared_metrics
from flowrl.iter.stage import sources_from_list

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet

Batch = SampleBatch | MultiAgentBatch
LAGS_KEPT = 10_000  # of the trained fragments that no report has taken yet

Info = dict[str, Any]  # policy id -> {"learner_stats": …, "num_agent_steps_trained": n}


@dataclass(repr=False)
class TrainOneStep:
    """for_each, batch -> (batch, info): the local worker's policies learn from the batch.

    Remote workers get the new weights with their next request. `info` maps policy id ->
    {"learner_stats": {name: mean of the last pass}, "num_agent_steps_trained": rows}, and `rows`
    {name: [rows]} where the policy tells something of each (see Policy.row_stats). Of fragments
    that come straight from workers the statistics have `policy_lag_mean` and `policy_lag_max`: how
    many updates of the policy were made since they were sampled.
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
        check_ids(self.policies)
        if self.num_sgd_iter is not None and self.num_sgd_iter < 1:
            raise ValueError(f"num_sgd_iter must be at least 1, got {self.num_sgd_iter}")
        if self.sgd_minibatch_size is not None and self.sgd_minibatch_size < 0:
            raise ValueError(
                f"sgd_minibatch_size must be at least 0, got {self.sgd_minibatch_size}"
            )

    def __call__(self, batch: Batch) -> tuple[Batch, Info]:
        metrics = _get_shared_metrics()
        info = learn_from(
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


@dataclass(repr=False)
class UpdateTargetNetwork:
    """for_each, (batch, info) -> the same: moves target networks towards the online ones, every so
    many steps. Counts `num_target_updates`.

    Every policy has a clock of its own, in each of the operators: none disturbs another.

    Args:
        workers: the WorkerSet whose local worker learns.
        target_update_freq: steps between two updates; 0 updates after every item.
        by_steps_trained: count rows that `policies` were trained on, not env steps sampled.
        policies: ids of those to update; None for all that learn.

    Raises:
        TypeError (when pulled): a policy has no target network.
    """

    workers: WorkerSet
    target_update_freq: int
    by_steps_trained: bool = False
    policies: Collection[str] | None = None

    def __post_init__(self) -> None:
        check_ids(self.policies)
        if self.target_update_freq < 0:
            raise ValueError(
                f"target_update_freq must be at least 0, got {self.target_update_freq}"
            )
        self._trained: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def __call__(self, item: tuple[Batch, Info]) -> tuple[Batch, Info]:
        _, info = trained(item, "UpdateTargetNetwork")
        due = [
            policy_id
            for policy_id in (info if self.policies is None else self.policies)
            if self._is_due(policy_id, info.get(policy_id, {}))
        ]
        worker = self.workers.local_worker()
        with worker.lock if due else nullcontext():
            for policy_id in due:
                policy = worker.policy_map[policy_id]
                if not hasattr(policy, "update_target"):
                    raise TypeError(
                        f"UpdateTargetNetwork: policy {policy_id!r}, a {type(policy).__name__}, "
                        "has no target network: leave it out of `policies`"
                    )
                policy.update_target()
        _get_shared_metrics().counters["num_target_updates"] += len(due)
        return item

    def _is_due(self, policy_id: str, told: dict[str, Any]) -> bool:
        """Whether so many steps have gone by for this policy; then its clock begins again."""
        rows = self._trained.get(policy_id, 0) + told.get("num_agent_steps_trained", 0)
        self._trained[policy_id] = rows
        now = rows
        if not self.by_steps_trained:
            now = _get_shared_metrics().counters["num_env_steps_sampled"]
        since = self._last.setdefault(policy_id, 0 if self.by_steps_trained else now)
        if now - since < self.target_update_freq:
            return False
        self._last[policy_id] = now
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"trained": dict(self._trained), "last": dict(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained, self._last = dict(state["trained"]), dict(state["last"])

    def __repr__(self) -> str:
        unit = ", by_steps_trained=True" if self.by_steps_trained else ""
        only = "" if self.policies is None else f", policies={sorted(self.policies)}"
        return f"UpdateTargetNetwork({self.target_update_freq}{unit}{only})"


def check_ids(policies: Any) -> None:
    """Refuse one policy id where a collection of them is needed."""
    if isinstance(policies, str):
        raise TypeError(f"policies is a collection of ids: [{policies!r}]")


def with_sources(batch: Batch, sources: Any) -> Batch:
    """A batch of a saved plan, which says again where its rows came from."""
    batch.sources = sources_from_list(sources)
    return batch


def trained(item: Any, operator: str) -> tuple[Batch, Info]:
    """What TrainOneStep gives, checked."""
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[1], dict):
        raise TypeError(
            f"{operator} takes (batch, info), got {type(item).__name__}: chain it after "
            "TrainOneStep"
        )
    return item


def learn_from(
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
    started = time.perf_counter()
    info = learn(workers, batch, policies, num_sgd_iter, sgd_minibatch_size)
    metrics.timers["learn"].push(time.perf_counter() - started)
    metrics.timers["learn"].push_units_processed(batch.count)
    note_trained(metrics, batch.env_steps(), info)
    return info


def learn(
    workers: WorkerSet,
    batch: Batch,
    policies: Collection[str] | None = None,
    num_sgd_iter: int | None = None,
    sgd_minibatch_size: int | None = None,
) -> Info:
    """The same, without counting: in any thread."""
    if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
        raise TypeError(
            f"TrainOneStep takes a batch, got {type(batch).__name__}: does the operator before it "
            "return what it was given?"
        )
    worker = workers.local_worker()
    learning = batch_to_learn_from(worker, batch, policies)
    several = isinstance(batch, MultiAgentBatch)
    with worker.lock:
        for policy_id in learning:
            worker.policy_map[policy_id].on_global_var_update(workers.global_vars)
        return learn_rows(
            worker.policy_map, learning, batch.sources, num_sgd_iter, sgd_minibatch_size, several,
            worker.on_learn_on_batch,
        )  # fmt: skip


def learn_rows(
    policy_map: dict[str, Any],
    learning: dict[str, SampleBatch],
    sources: tuple[Any, ...],
    num_sgd_iter: int | None,
    sgd_minibatch_size: int | None,
    several: bool,
    announce: Callable[[Any, SampleBatch, dict[str, float]], None] | None = None,
) -> Info:
    """Let policies learn from their rows, wherever they are.

    Args:
        policy_map, learning: policy id -> the policy, its rows.
        sources: of the rows.
        num_sgd_iter, sgd_minibatch_size: see TrainOneStep.
        several: a policy may have fewer rows than a minibatch: it makes one update at least.
        announce: told of each policy and its rows before; may add statistics.
    """
    info: Info = {}
    for policy_id, rows in learning.items():
        policy = policy_map[policy_id]
        size = (
            policy.config.sgd_minibatch_size if sgd_minibatch_size is None else sgd_minibatch_size
        )
        if several or sgd_minibatch_size is None:
            size = min(size, rows.count)
        told: dict[str, float] = {}
        lags = policy_lags(policy_id, policy.version, sources)
        if announce is not None:
            announce(policy, rows, told)
        passes = policy.config.num_sgd_iter if num_sgd_iter is None else num_sgd_iter
        stats = {**policy.learn_on_minibatches(rows, passes, size), **told}
        info[policy_id] = told_of(stats, rows.count, lags)
        if "batch_indexes" in rows:
            info[policy_id]["num_agent_steps_replayed"] = rows.count
        if policy.row_stats:
            info[policy_id]["rows"] = policy.row_stats
    return info


def policy_lags(policy_id: str, version: int, sources: Iterable[Any]) -> list[int]:
    """Of each fragment that rows are from: how many updates of the policy were made since it was
    sampled. Those that were drawn from a buffer do not say."""
    told = [source.tags.get("weights_versions") for source in sources]
    return [version - versions[policy_id] for versions in told if versions is not None]


def told_of(stats: dict[str, float], rows: int, lags: list[int]) -> dict[str, Any]:
    """What training tells of one policy."""
    if lags:
        mean = sum(lags) / len(lags)
        stats = {**stats, "policy_lag_mean": mean, "policy_lag_max": float(max(lags))}
    return {"learner_stats": stats, "num_agent_steps_trained": rows, "policy_lags": lags}


def batch_to_learn_from(
    worker: Any, batch: Batch, policies: Collection[str] | None
) -> dict[str, SampleBatch]:
    """The rows of a batch by the policies that are to learn from them.

    Raises:
        KeyError: `policies` names one, or the batch has rows of one, that the worker has not got.
    """
    asked = batch.policy_batches if policies is None else policies
    unknown = sorted(set(asked) - set(worker.policy_map))
    if unknown:
        raise KeyError(f"no policies {unknown} here: there are {sorted(worker.policy_map)}")
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


def note_trained(metrics: MetricsContext, env_steps: int, info: Info) -> None:
    """Count what policies were trained on, all together and each."""
    counters = metrics.counters
    counters["num_env_steps_trained"] += env_steps
    for policy_id, told in info.items():
        rows = told["num_agent_steps_trained"]
        counters["num_agent_steps_trained"] += rows
        counters[f"num_agent_steps_trained/{policy_id}"] += rows
        replayed = told.pop("num_agent_steps_replayed", 0)
        if replayed:
            counters[f"num_agent_steps_replayed/{policy_id}"] += replayed
        metrics.info.setdefault("policy_lag", deque(maxlen=LAGS_KEPT)).extend(
            told.pop("policy_lags", ())
        )
    metrics.info.setdefault("learner", {}).update(info)
