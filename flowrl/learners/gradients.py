"""Gradients: the gradients of several policies' losses on one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import optree

from flowrl.data.serialization import savable
from flowrl.iter import Source
from flowrl.policies.learning.epochs import concat_row_stats
from flowrl.state_schema import Amount, Fields, Natural, check_state

_STATE: Fields = {
    "by_policy": dict[str, Any],
    "rows": dict[str, Natural],
    "stats": dict[str, dict[str, Any]],
    "num_env_steps": Natural,
    "sources": tuple[Source, ...],
    "row_stats": dict[str, dict[str, np.ndarray]],
    "rows_by_policy": dict[str, Natural],
    "seconds": Amount,
}


@savable
@dataclass
class Gradients:
    """Gradients of the policies' losses on a batch.

    Attributes:
        by_policy: policy id -> the gradient that the policy's compute_gradients() returned.
        rows: policy id -> number of rows over which the gradient is averaged.
        stats: policy id -> statistics.
        num_env_steps: env steps of the batch.
        sources: fragments that the rows come from.
        row_stats: policy id -> values per row (see Policy.row_stats).
        rows_by_policy: policy id -> number of rows in the batch, also of policies that do not
            learn.
        seconds: duration of the computation [s]; of the mean of several Gradients, their sum.
    """

    by_policy: dict[str, Any]
    rows: dict[str, int]
    stats: dict[str, dict[str, float]]
    num_env_steps: int
    sources: tuple[Source, ...] = field(default=(), repr=False)
    row_stats: dict[str, dict[str, np.ndarray]] = field(default_factory=dict, repr=False)
    rows_by_policy: dict[str, int] = field(default_factory=dict, repr=False)
    seconds: float = field(default=0.0, repr=False, compare=False)

    def env_steps(self) -> int:
        """See SampleBatch.env_steps."""
        return self.num_env_steps

    def agent_steps(self) -> int:
        """See SampleBatch.agent_steps."""
        return sum(self.rows_by_policy.values())

    def steps_by_policy(self) -> dict[str, int]:
        """See SampleBatch.steps_by_policy."""
        return dict(self.rows_by_policy)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in _STATE}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Gradients:
        """Return the gradients of which `state` is the `state_dict()`."""
        check_state(state, _STATE, "gradients")
        return cls(**{name: state[name] for name in _STATE})

    def size_bytes(self) -> int:
        """Return the size of the gradients [bytes]."""
        leaves: list[Any] = optree.tree_leaves(cast("Any", self.by_policy))
        return sum(leaf.nbytes for leaf in leaves)

    @classmethod
    def mean(cls, items: Sequence[Gradients]) -> Gradients:
        """Return the mean, each item weighted by its rows: the gradient of the mean over all rows.

        Statistics are weighted the same way; a statistic that an item lacks is left out.
        """
        num_env_steps = sum(item.num_env_steps for item in items)
        mean = cls({}, {}, {}, num_env_steps, tuple(s for item in items for s in item.sources))
        mean.seconds = sum(item.seconds for item in items)
        for item in items:
            for policy_id, rows in item.rows_by_policy.items():
                mean.rows_by_policy[policy_id] = mean.rows_by_policy.get(policy_id, 0) + rows
        for policy_id in dict.fromkeys(pid for item in items for pid in item.by_policy):
            group = [item for item in items if policy_id in item.by_policy]
            total = sum(item.rows[policy_id] for item in group)
            weights = [item.rows[policy_id] / (total or 1) for item in group]
            parts: Any = [item.by_policy[policy_id] for item in group]
            mean.by_policy[policy_id] = _weighted_sum(parts, weights)
            names = set.intersection(*(set(item.stats[policy_id]) for item in group))
            mean.stats[policy_id] = {
                name: sum(
                    item.stats[policy_id][name] * w for item, w in zip(group, weights, strict=True)
                )
                for name in sorted(names)
            }
            mean.rows[policy_id] = total
            row_stats = [item.row_stats[policy_id] for item in group if policy_id in item.row_stats]
            if row_stats:
                mean.row_stats[policy_id] = concat_row_stats(row_stats)
        return mean


def _weighted_sum(gradients: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted sum of gradients: nests of equal structure, or mappings from names to
    arrays, in which a missing name and None are zeros."""
    if not all(_is_by_name(gradient) for gradient in gradients):
        return optree.tree_map(
            lambda *leaves: sum(g * weight for g, weight in zip(leaves, weights, strict=True)),
            *gradients,
        )
    sums: dict[str, Any] = {}
    for by_name, weight in zip(gradients, weights, strict=True):
        for name, gradient in by_name.items():
            if gradient is not None:
                sums[name] = gradient * weight + sums.get(name, 0.0)
    return sums


def _is_by_name(gradient: Any) -> bool:
    return isinstance(gradient, Mapping) and all(
        part is None or hasattr(part, "dtype") for part in gradient.values()
    )
