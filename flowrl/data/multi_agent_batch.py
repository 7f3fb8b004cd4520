"""MultiAgentBatch: one SampleBatch per policy, with the env steps that they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flowrl.data.sample_batch import DEFAULT_POLICY_ID, SampleBatch

AgentID = Any  # whatever the environment calls its agents: a str or an int, mostly
EpisodeID = int
PolicyID = str
TensorType = Any  # a numpy array, or a framework's tensor


class MultiAgentBatch:
    """Batches by policy id.

    Args:
        policy_batches: policy id -> SampleBatch of that policy's agents' rows.
        env_steps: steps of the environment that the rows come from (several agents may act in
            one).
    """

    def __init__(self, policy_batches: Mapping[str, SampleBatch], env_steps: int):
        self.policy_batches = dict(policy_batches)
        self.sources: tuple[Any, ...] = ()
        self._env_steps = env_steps

    @property
    def count(self) -> int:
        """Env steps."""
        return self._env_steps

    def __len__(self) -> int:
        return self._env_steps

    def __bool__(self) -> bool:
        return self._env_steps > 0

    def env_steps(self) -> int:
        return self._env_steps

    def agent_steps(self) -> int:
        """Rows of all the policies together."""
        return sum(batch.agent_steps() for batch in self.policy_batches.values())

    def steps_by_policy(self) -> dict[str, int]:
        """Policy id -> rows."""
        return {policy_id: rows.count for policy_id, rows in self.policy_batches.items()}

    def size_bytes(self) -> int:
        """Bytes of all the columns."""
        return sum(batch.size_bytes() for batch in self.policy_batches.values())

    def __getitem__(self, policy_id: str) -> SampleBatch:
        if policy_id not in self.policy_batches:
            raise KeyError(
                f"no policy {policy_id!r} in this batch; it has {sorted(self.policy_batches)}"
            )
        return self.policy_batches[policy_id]

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self.policy_batches

    def select(self, policy_ids: Iterable[str]) -> MultiAgentBatch:
        """Only these policies' batches; the env steps stay."""
        wanted = set(policy_ids)
        kept = {pid: batch for pid, batch in self.policy_batches.items() if pid in wanted}
        batch = MultiAgentBatch(kept, self._env_steps)
        batch.sources = self.sources
        return batch

    def with_batches(self, policy_batches: Mapping[str, SampleBatch]) -> MultiAgentBatch:
        """A new batch with other policy batches and the same env steps and sources."""
        batch = MultiAgentBatch(policy_batches, self._env_steps)
        batch.sources = self.sources
        return batch

    def copy(self, shallow: bool = False) -> MultiAgentBatch:
        """A new batch; arrays are copies unless `shallow`."""
        return self.with_batches({p: b.copy(shallow) for p, b in self.policy_batches.items()})

    def isolated(self) -> MultiAgentBatch:
        """A shallow copy whose arrays are read-only views: a reader's own."""
        return self.with_batches({p: b.isolated() for p, b in self.policy_batches.items()})

    def as_multi_agent(self) -> MultiAgentBatch:
        return self

    @staticmethod
    def wrap_as_needed(
        policy_batches: Mapping[str, SampleBatch], env_steps: int
    ) -> SampleBatch | MultiAgentBatch:
        """A SampleBatch if the default policy is the only one, else a MultiAgentBatch."""
        if set(policy_batches) == {DEFAULT_POLICY_ID}:
            return policy_batches[DEFAULT_POLICY_ID]
        return MultiAgentBatch(policy_batches, env_steps)

    @staticmethod
    def concat_samples(batches: Iterable[Any]) -> MultiAgentBatch:
        """One batch: rows joined policy by policy, env steps and sources added up."""
        parts: dict[str, list[SampleBatch]] = {}
        env_steps = 0
        sources: list[Any] = []
        for batch in batches:
            batch = batch.as_multi_agent() if batch.count else None
            if batch is None:
                continue
            env_steps += batch.env_steps()
            sources.extend(batch.sources)
            for policy_id, rows in batch.policy_batches.items():
                parts.setdefault(policy_id, []).append(rows)
        joined = MultiAgentBatch(
            {pid: SampleBatch.concat_samples(rows) for pid, rows in parts.items()}, env_steps
        )
        joined.sources = tuple(sources)
        return joined

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.policy_batches}, env_steps={self._env_steps})"
