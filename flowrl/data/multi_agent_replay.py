"""MultiAgentReplayBuffer: a buffer for each policy, and how fast they are filled and drawn from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from flowrl.data.multi_agent_batch import MultiAgentBatch
from flowrl.data.replay_buffer import ReplayBuffer
from flowrl.data.sample_batch import SampleBatch

Batch = SampleBatch | MultiAgentBatch


class MultiAgentReplayBuffer:
    """A ReplayBuffer for each policy, made when its first rows come.

    It also says when it is time to store and when to draw: at every moment exactly one of
    `can_add` and `can_sample` is true, so that plans which ask keep the ratio of drawn to stored
    rows to within one batch, whichever side is slow.

    Args:
        make: policy id -> its ReplayBuffer.
        replay_batch_size: rows of each policy in a drawn batch.
        learning_starts: rows stored before the first draw.
        training_intensity: rows drawn for each row stored since then; None draws one batch for
            each batch stored.
        policies: ids of those whose rows are stored; None: all. Rows of others are refused.

    Raises:
        ValueError: a size below 1, a negative learning_starts, an intensity that is not positive.
    """

    def __init__(
        self,
        make: Callable[[str], ReplayBuffer],
        *,
        replay_batch_size: int,
        learning_starts: int = 0,
        training_intensity: float | None = None,
        policies: Collection[str] | None = None,
    ):
        if replay_batch_size < 1 or learning_starts < 0:
            raise ValueError(
                "replay_batch_size is at least 1 and learning_starts at least 0, got "
                f"{replay_batch_size} and {learning_starts}"
            )
        if training_intensity is not None and not 0 < training_intensity < np.inf:
            raise ValueError(f"training_intensity is a number above 0, got {training_intensity!r}")
        if isinstance(policies, str):
            raise TypeError(f"policies is a collection of ids: [{policies!r}]")
        self._make = make
        self.replay_batch_size = replay_batch_size
        self.learning_starts = learning_starts
        self.training_intensity = training_intensity
        self.policies = None if policies is None else sorted(policies)
        self.buffers: dict[str, ReplayBuffer] = {}
        self._counts = dict.fromkeys(("rows_in", "rows_out", "batches_in", "batches_out"), 0)

    # -- storing and drawing -----------------------------------------------------------------------

    def add(self, batch: Batch) -> None:
        """Store each policy's rows in its buffer.

        Raises:
            KeyError: there are rows of a policy that is none of `policies`.
            ValueError: see ReplayBuffer.add.
        """
        parts = {pid: rows for pid, rows in batch.policy_batches.items() if rows.count}
        if self.policies is not None:
            foreign = sorted(set(parts) - set(self.policies))
            if foreign:
                raise KeyError(
                    f"rows of the policies {foreign} for a replay buffer of {self.policies}: select"
                    " those before storing (SelectExperiences)"
                )
        for policy_id, rows in parts.items():
            if policy_id not in self.buffers:
                self.buffers[policy_id] = self._make(policy_id)
            self.buffers[policy_id].add(rows)
            self._note_in(rows.count)
        if parts and self._learning:
            self._counts["batches_in"] += 1

    def _note_in(self, rows: int) -> None:
        before = self.num_added - rows
        self._counts["rows_in"] += rows - max(0, min(rows, self.learning_starts - before))

    @property
    def num_added(self) -> int:
        """Rows that were ever stored."""
        return sum(buffer.num_added for buffer in self.buffers.values())

    @property
    def _learning(self) -> bool:
        return bool(self.buffers) and self.num_added >= max(1, self.learning_starts)

    def can_sample(self) -> bool:
        """Whether it is time to draw a batch."""
        if not self._learning:
            return False
        counts = self._counts
        if self.training_intensity is None:
            return counts["batches_out"] < counts["batches_in"]
        rows = self.replay_batch_size * len(self.buffers)
        return counts["rows_out"] + rows <= self.training_intensity * counts["rows_in"]

    def can_add(self) -> bool:
        """Whether it is time to store a batch."""
        return not self.can_sample()

    def sample(self) -> Batch:
        """`replay_batch_size` rows of each policy.

        Raises:
            ValueError: there are none.
        """
        if not self.buffers:
            raise ValueError("the replay buffer is empty: store something before drawing from it")
        size = self.replay_batch_size
        drawn = {pid: buffer.sample(size) for pid, buffer in self.buffers.items()}
        self._counts["rows_out"] += size * len(drawn)
        self._counts["batches_out"] += 1
        return MultiAgentBatch.wrap_as_needed(drawn, size)

    def update_priorities(
        self, policy_id: str, batch_indexes: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Give a policy's rows new priorities; see PrioritizedReplayBuffer. A buffer without
        priorities takes no notice."""
        self.buffers[policy_id].update_priorities(batch_indexes, priorities)

    def __len__(self) -> int:
        """Rows that are there."""
        return sum(map(len, self.buffers.values()))

    def stats(self) -> dict[str, dict[str, float]]:
        """Each policy's figures; see ReplayBuffer.stats."""
        return {policy_id: buffer.stats() for policy_id, buffer in self.buffers.items()}

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All buffers, and where the ratio is."""
        buffers = {policy_id: buffer.state_dict() for policy_id, buffer in self.buffers.items()}
        return {"buffers": buffers, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, with the same settings.

        Raises:
            ValueError: a buffer does not fit; nothing is changed.
        """
        buffers = {policy_id: self._make(policy_id) for policy_id in state["buffers"]}
        for policy_id, buffer in buffers.items():
            buffer.load_state_dict(state["buffers"][policy_id])
        self.buffers = buffers
        self._counts = {name: int(count) for name, count in state["counts"].items()}

    def __repr__(self) -> str:
        more = "" if self.policies is None else f", policies={self.policies}"
        if self.training_intensity is not None:
            more += f", training_intensity={self.training_intensity:g}"
        return f"MultiAgentReplayBuffer(replay_batch_size={self.replay_batch_size}{more})"
