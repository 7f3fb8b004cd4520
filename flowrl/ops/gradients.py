"""Operators for gradients that are computed in one place and applied in another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import optree

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import LocalIterator, _get_shared_metrics
from flowrl.ops.rollout import CountRollouts, DropStale, check_lag
from flowrl.ops.staleness import StalenessLimit
from flowrl.ops.train import (
    Info,
    batch_to_learn_from,
    check_ids,
    note_trained,
    policy_lags,
    told_of,
)
from flowrl.ops.weights import contributors

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet

Batch = SampleBatch | MultiAgentBatch


@dataclass
class Gradients:
    """What a batch says of the policies' losses.

    Attributes:
        by_policy: policy id -> the gradient that the policy's compute_gradients() gave.
        rows: policy id -> rows that it is a mean over.
        stats: policy id -> statistics.
        count: env steps of the batch.
        sources: fragments that the rows came from.
        row_stats: policy id -> what is told of rows (see Policy.row_stats).
        sampled: policy id -> rows of the batch, of those too that do not learn.
    """

    by_policy: dict[str, Any]
    rows: dict[str, int]
    stats: dict[str, dict[str, float]]
    count: int
    sources: tuple[Any, ...] = field(default=(), repr=False)
    row_stats: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    sampled: dict[str, int] = field(default_factory=dict, repr=False)

    def env_steps(self) -> int:
        """See SampleBatch.env_steps."""
        return self.count

    def agent_steps(self) -> int:
        """See SampleBatch.agent_steps."""
        return sum(self.sampled.values())

    def steps_by_policy(self) -> dict[str, int]:
        """See SampleBatch.steps_by_policy."""
        return dict(self.sampled)

    def size_bytes(self) -> int:
        """Bytes of the gradients' arrays."""
        leaves: list[Any] = optree.tree_leaves(cast("Any", self.by_policy))
        return sum(leaf.nbytes for leaf in leaves)


def gradients_of(worker: Any, batch: Batch, policies: Collection[str] | None) -> Gradients:
    """The gradients of a worker's policies on a batch; they stay as they are."""
    made = Gradients({}, {}, {}, batch.env_steps(), batch.sources, sampled=batch.steps_by_policy())
    with worker.lock:
        for policy_id, rows in batch_to_learn_from(worker, batch, policies).items():
            policy = worker.policy_map[policy_id]
            made.by_policy[policy_id], made.stats[policy_id] = policy.compute_gradients(rows)
            made.rows[policy_id] = rows.count
            if policy.row_stats:
                made.row_stats[policy_id] = policy.row_stats
    return made


@dataclass(repr=False)
class ComputeGradients:
    """for_each, batch -> Gradients: of the local worker's policies, which stay as they are.

    Times `compute_gradients`.

    Args:
        workers: the WorkerSet.
        policies: ids of those; None for all in the batch that are to learn.
    """

    workers: WorkerSet
    policies: Collection[str] | None = None

    def __post_init__(self) -> None:
        check_ids(self.policies)

    def __call__(self, batch: Batch) -> Gradients:
        worker = self.workers.local_worker()
        for policy in worker.policy_map.values():
            policy.on_global_var_update(self.workers.global_vars)
        with _get_shared_metrics().timers["compute_gradients"]:
            return gradients_of(worker, batch, self.policies)

    def __repr__(self) -> str:
        only = "" if self.policies is None else f"policies={sorted(self.policies)}"
        return f"ComputeGradients({only})"


@dataclass(repr=False)
class GradientsThere:
    """for_each on the shards, fragment -> Gradients: of the policies of the worker that sampled
    it, where that is."""

    policies: Collection[str] | None = None
    worker: Any = None

    def bound_to(self, worker: Any) -> GradientsThere:
        """The same, on this worker."""
        return GradientsThere(self.policies, worker)

    def __call__(self, batch: Batch) -> Gradients:
        return gradients_of(self.worker, batch, self.policies)

    def __repr__(self) -> str:
        return "GradientsThere"


class AsyncGradients(LocalIterator[Gradients]):
    """Gradients without end: each worker samples a fragment and computes the gradient of its loss,
    with the newest weights that it was given; they come as they are ready.

    Counts as ParallelRollouts does. Chain ApplyGradients(workers, update_all=False): a worker gets
    the new weights with its next request, which is sent when the item after its own is pulled.

    Args:
        workers: the WorkerSet; without remote workers the local one samples.
        num_async: requests in flight per worker; with more than one, gradients are so many of the
            worker's own updates older.
        policies: ids of those; None for all in the fragment that are to learn.
        max_policy_lag: drop gradients at weights more than so many updates older than the newest;
            their steps count as `num_env_steps_dropped`, too. None: keep all.
        stale_policy: "drop" those, or "wait": ask for no more while one could get that old; see
            StalenessLimit.
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
        check_ids(policies)
        check_lag(max_policy_lag)
        if stale_policy not in ("drop", "wait"):
            raise ValueError(f'stale_policy is "drop" or "wait", got {stale_policy!r}')
        if max_policy_lag is None and stale_policy == "wait":
            raise ValueError('stale_policy="wait" needs a max_policy_lag')
        limit = None
        if max_policy_lag is not None and stale_policy == "wait":
            steps = workers.steps_per_fragment()
            limit, max_policy_lag = StalenessLimit(steps, max_policy_lag, steps), None
        if workers.config.get("output") is not None:
            raise ValueError(
                "output: AsyncGradients keeps fragments on their workers, so nothing can be "
                "written: leave it out, or use ParallelRollouts and ComputeGradients"
            )
        there = workers.parallel_iterator().for_each(GradientsThere(policies))
        counted = (
            there.gather_async(num_async=num_async, limit=limit)
            .zip_with_source()
            .for_each(CountRollouts(workers))
        )
        if max_policy_lag is not None:
            counted = counted.filter(DropStale(workers, max_policy_lag))
        super().__init__(counted.stage, f"AsyncGradients(num_async={num_async})")
        self.stage.name, self.stage.title = "AsyncGradients", self.name


class AverageGradients:
    """for_each, list of Gradients -> Gradients: their mean, each weighted by its rows, which is the
    gradient of the mean over all the rows."""

    def __call__(self, items: Sequence[Gradients]) -> Gradients:
        if not isinstance(items, (list, tuple)) or not items:
            raise TypeError(
                "AverageGradients takes a list of Gradients, as .batch(n) makes them, got "
                f"{type(items).__name__}"
            )
        made = Gradients(
            {}, {}, {}, sum(one.count for one in items), sum((o.sources for o in items), ())
        )
        for one in items:
            for policy_id, rows in one.sampled.items():
                made.sampled[policy_id] = made.sampled.get(policy_id, 0) + rows
        for policy_id in dict.fromkeys(pid for one in items for pid in one.by_policy):
            own = [one for one in items if policy_id in one.by_policy]
            total = sum(one.rows[policy_id] for one in own)
            shares = [one.rows[policy_id] / total for one in own]
            given: Any = [one.by_policy[policy_id] for one in own]
            made.by_policy[policy_id] = optree.tree_map(
                lambda *parts, s=shares: sum(p * w for p, w in zip(parts, s, strict=True)), *given
            )
            names = set.intersection(*(set(one.stats[policy_id]) for one in own))
            made.stats[policy_id] = {
                name: sum(o.stats[policy_id][name] * w for o, w in zip(own, shares, strict=True))
                for name in sorted(names)
            }
            made.rows[policy_id] = total
            told = [one.row_stats[policy_id] for one in own if policy_id in one.row_stats]
            if told:
                made.row_stats[policy_id] = {
                    name: np.concatenate([one[name] for one in told]) for name in told[0]
                }
        return made

    def __repr__(self) -> str:
        return "AverageGradients"


@dataclass(repr=False)
class ApplyGradients:
    """for_each, Gradients -> (Gradients, info): one update of the local worker's policies.

    `info` and what is counted are TrainOneStep's. Times `apply_gradients`.

    Args:
        workers: the WorkerSet.
        policies: ids of those to update; None for all that there are gradients of.
        update_all: every remote worker gets the new weights with its next request; if not, only
            those whose experience the gradients are of.
    """

    workers: WorkerSet
    policies: Collection[str] | None = None
    update_all: bool = True

    def __post_init__(self) -> None:
        check_ids(self.policies)

    def __call__(self, item: Gradients) -> tuple[Gradients, Info]:
        if not isinstance(item, Gradients):
            raise TypeError(
                f"ApplyGradients takes Gradients, got {type(item).__name__}: chain it after "
                "ComputeGradients or AverageGradients"
            )
        metrics = _get_shared_metrics()
        worker = self.workers.local_worker()
        unknown = sorted(set(item.by_policy) - set(worker.policy_map))
        if unknown:
            raise KeyError(f"no policies {unknown} here: there are {sorted(worker.policy_map)}")
        sampled_by = contributors(item)
        if not (self.update_all or sampled_by):
            raise ValueError(
                "ApplyGradients(update_all=False): these gradients do not say which workers their "
                "rows came from (were they drawn from a buffer?): update all"
            )
        info: Info = {}
        with worker.lock, metrics.timers["apply_gradients"]:
            for policy_id, gradient in item.by_policy.items():
                if self.policies is not None and policy_id not in self.policies:
                    continue
                policy = worker.policy_map[policy_id]
                lags = policy_lags(policy_id, policy.version, item.sources)
                policy.on_global_var_update(self.workers.global_vars)
                policy.apply_gradients(gradient)
                info[policy_id] = told_of(item.stats[policy_id], item.rows[policy_id], lags)
                if policy_id in item.row_stats:
                    info[policy_id]["rows"] = item.row_stats[policy_id]
        if not self.update_all:
            self.workers.update_only(sampled_by)
        note_trained(metrics, item.count, info)
        return item, info

    def __repr__(self) -> str:
        only = "" if self.policies is None else f"policies={sorted(self.policies)}, "
        return f"ApplyGradients({only}update_all={self.update_all})"
