"""BatchRef: a batch in Ray's object store."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

from flowrl.data.sample_batch import DEFAULT_POLICY_ID, Batch, MultiAgentBatch, SampleBatch
from flowrl.iter import ray_health

log = logging.getLogger("flowrl")


class BatchRef:
    """Step counts of a batch whose rows are in Ray's object store.

    Args:
        parts: object references of batches, or batches.
        env_steps: environment steps of all parts.
        steps_by_policy: policy id -> rows of all parts.
        node: cluster node of the parts, or None if unknown.

    Attributes:
        parts: the object references or batches.
        nodes: cluster node of each part, or None if unknown.
        count: environment steps.
        sources: the fragments that the rows come from (see `flowrl.iter.Source`).
    """

    def __init__(
        self,
        parts: Iterable[Any],
        env_steps: int,
        steps_by_policy: dict[str, int],
        node: str | None = None,
    ):
        self.parts = list(parts)
        self.nodes = [node] * len(self.parts)
        self.count = env_steps
        self.sources: tuple[Any, ...] = ()
        self._steps_by_policy = steps_by_policy

    def env_steps(self) -> int:
        """Return the number of environment steps."""
        return self.count

    def agent_steps(self) -> int:
        """Return the number of rows of all policies."""
        return sum(self._steps_by_policy.values())

    def steps_by_policy(self) -> dict[str, int]:
        """Return policy id -> rows."""
        return dict(self._steps_by_policy)

    def get(self) -> Batch:
        """Fetch the batch.

        Parts that were lost with their process or node are left out, with a warning.

        Raises:
            RayLostError: Ray died meanwhile.
        """
        batches = [batch for batch in map(_fetch, self.parts) if batch is not None]
        if len(batches) == 1:
            batch = batches[0].copy(shallow=True)  # a part may be a batch in use
        else:
            batch = SampleBatch.concat_samples(batches)
        if len(batches) == len(self.parts) and self.sources:
            batch.sources = self.sources
        return batch

    def select(self, policy_ids: Iterable[str]) -> BatchRef:
        """Return a reference to the rows of these policies, with the same env steps and sources;
        Ray tasks select the rows. A batch of a single policy without a name is returned as it
        is."""
        if set(self._steps_by_policy) == {DEFAULT_POLICY_ID}:
            return self
        selected = set(policy_ids)
        steps = {pid: rows for pid, rows in self._steps_by_policy.items() if pid in selected}
        batch = BatchRef((_select(part, selected) for part in self.parts), self.count, steps)
        batch.sources, batch.nodes = self.sources, list(self.nodes)
        return batch

    @staticmethod
    def concat_samples(batches: Iterable[Any]) -> BatchRef:
        """Concatenate batches and BatchRefs without fetching rows."""
        parts: list[Any] = []
        nodes: list[str | None] = []
        env_steps, steps_by_policy, sources = 0, dict[str, int](), list[Any]()
        for batch in batches:
            parts += batch.parts if isinstance(batch, BatchRef) else [batch]
            nodes += batch.nodes if isinstance(batch, BatchRef) else [None]
            env_steps += batch.env_steps()
            for policy_id, rows in batch.steps_by_policy().items():
                steps_by_policy[policy_id] = steps_by_policy.get(policy_id, 0) + rows
            sources += batch.sources
        joined = BatchRef(parts, env_steps, steps_by_policy)
        joined.sources, joined.nodes = tuple(sources), nodes
        return joined

    def __repr__(self) -> str:
        return f"BatchRef(env_steps={self.count}, agent_steps={self.agent_steps()})"


def _select(part: Any, policy_ids: set[str]) -> Any:
    """Return the rows of some policies of a part: a batch, or a reference to it."""
    if not isinstance(part, (SampleBatch, MultiAgentBatch)):
        return _select_task().remote(part, policy_ids)
    return part.select(policy_ids) if isinstance(part, MultiAgentBatch) else part


@functools.cache  # each remote function is sent to all processes once
def _select_task() -> Any:
    import ray

    return ray.remote(_select).options(num_cpus=0)


def _fetch(part: Any) -> Batch | None:
    """Return the batch of a part, or None if it was lost."""
    if isinstance(part, (SampleBatch, MultiAgentBatch)):
        return part
    from ray.exceptions import ObjectLostError

    try:
        batch: Batch = ray_health.get(part)
    except ObjectLostError as error:
        log.warning("a fragment was lost with the process that made it (%s)", type(error).__name__)
        return None
    return batch
