"""BatchRef: a batch that is somewhere in Ray's object store."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from flowrl.data.multi_agent_batch import MultiAgentBatch
from flowrl.data.sample_batch import SampleBatch

Batch = SampleBatch | MultiAgentBatch

log = logging.getLogger("flowrl")


class BatchRef:
    """A batch by what is to be known of it, while its rows are in Ray's object store.

    Attributes:
        parts: references of the batches that it is made of; or such batches themselves.
        count: env steps.
        sources: of its rows.
        nodes: of the cluster, where each part was made; None where that is not known.
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
        self._by_policy = steps_by_policy

    def env_steps(self) -> int:
        """See SampleBatch.env_steps."""
        return self.count

    def agent_steps(self) -> int:
        """See SampleBatch.agent_steps."""
        return sum(self._by_policy.values())

    def steps_by_policy(self) -> dict[str, int]:
        """See SampleBatch.steps_by_policy."""
        return dict(self._by_policy)

    def get(self) -> Batch:
        """The batch, fetched. Parts that were lost with the process that made them, or its node,
        are left out, with a warning."""
        batches = [batch for batch in map(_fetched, self.parts) if batch is not None]
        batch = batches[0] if len(batches) == 1 else SampleBatch.concat_samples(batches)
        if len(batches) == len(self.parts):
            batch.sources = self.sources
        return batch

    @staticmethod
    def concat_samples(batches: Iterable[Any]) -> BatchRef:
        """One of the rows of all, which stay where they are; batches may be among them."""
        parts: list[Any] = []
        nodes: list[str | None] = []
        steps, by_policy, sources = 0, dict[str, int](), list[Any]()
        for batch in batches:
            parts += batch.parts if isinstance(batch, BatchRef) else [batch]
            nodes += batch.nodes if isinstance(batch, BatchRef) else [None]
            steps += batch.env_steps()
            for policy_id, rows in batch.steps_by_policy().items():
                by_policy[policy_id] = by_policy.get(policy_id, 0) + rows
            sources += batch.sources
        joined = BatchRef(parts, steps, by_policy)
        joined.sources, joined.nodes = tuple(sources), nodes
        return joined

    def __repr__(self) -> str:
        return f"BatchRef(env_steps={self.count}, agent_steps={self.agent_steps()})"


def _fetched(part: Any) -> Batch | None:
    if isinstance(part, (SampleBatch, MultiAgentBatch)):
        return part
    import ray
    from ray.exceptions import ObjectLostError

    try:
        batch: Batch = ray.get(part)
    except ObjectLostError as error:
        log.warning("a fragment was lost with the process that made it (%s)", type(error).__name__)
        return None
    return batch
