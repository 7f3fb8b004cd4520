"""Operators for gradients that are computed in one place and applied in another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import _get_shared_metrics
from flowrl.ops.replay_actors import ORIGIN as REPLAYED
from flowrl.ops.train import Info, batch_to_learn_from, note_trained

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
        env_steps: of the batch.
        sources: fragments that the rows came from.
        row_stats: policy id -> what is told of rows (see Policy.row_stats).
    """

    by_policy: dict[str, Any]
    rows: dict[str, int]
    stats: dict[str, dict[str, float]]
    env_steps: int
    sources: tuple[Any, ...] = field(default=(), repr=False)
    row_stats: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)


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
        if isinstance(self.policies, str):
            raise TypeError(f"policies is a collection of ids: [{self.policies!r}]")

    def __call__(self, batch: Batch) -> Gradients:
        metrics = _get_shared_metrics()
        worker = self.workers.local_worker()
        made = Gradients({}, {}, {}, batch.env_steps(), batch.sources)
        with worker.lock, metrics.timers["compute_gradients"]:
            for policy_id, rows in batch_to_learn_from(worker, batch, self.policies).items():
                policy = worker.policy_map[policy_id]
                policy.on_global_var_update(self.workers.global_vars)
                gradient, stats = policy.compute_gradients(rows)
                made.by_policy[policy_id] = gradient
                made.stats[policy_id] = stats
                made.rows[policy_id] = rows.count
                if policy.row_stats:
                    made.row_stats[policy_id] = policy.row_stats
        return made

    def __repr__(self) -> str:
        only = "" if self.policies is None else f"policies={sorted(self.policies)}"
        return f"ComputeGradients({only})"


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
            {}, {}, {}, sum(one.env_steps for one in items), sum((o.sources for o in items), ())
        )
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
        if isinstance(self.policies, str):
            raise TypeError(f"policies is a collection of ids: [{self.policies!r}]")

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
        sampled_by = [s.worker for s in item.sources if s.origin != REPLAYED]
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
                worker.policy_map[policy_id].apply_gradients(gradient)
                info[policy_id] = {
                    "learner_stats": item.stats[policy_id],
                    "num_agent_steps_trained": item.rows[policy_id],
                }
                if policy_id in item.row_stats:
                    info[policy_id]["rows"] = item.row_stats[policy_id]
        if not self.update_all:
            self.workers.update_only(sampled_by)
        note_trained(metrics, item.env_steps, info)
        return item, info

    def __repr__(self) -> str:
        only = "" if self.policies is None else f"policies={sorted(self.policies)}, "
        return f"ApplyGradients({only}update_all={self.update_all})"
