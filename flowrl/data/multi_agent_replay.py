"""MultiAgentReplayBuffer: a buffer for each policy, and how fast they are filled and drawn from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from flowrl.data.multi_agent_batch import MultiAgentBatch
from flowrl.data.replay_buffer import ReplayBuffer
from flowrl.data.replay_ratio import ReplayRatio
from flowrl.data.sample_batch import SampleBatch

Batch = SampleBatch | MultiAgentBatch


class MultiAgentReplayBuffer:
    """A ReplayBuffer for each policy, made when its first rows come.

    It also says when it is time to store (`can_add`) and when to draw (`can_sample`), so that plans
    which ask keep the ratio of drawn to stored rows: see ReplayRatio.

    Args:
        make: policy id -> its ReplayBuffer.
        replay_batch_size: rows of each policy in a drawn batch.
        learning_starts, training_intensity: see ReplayRatio.
        policies: ids of those whose rows are stored; None: all. Rows of others are refused.

    Raises:
        ValueError: a size below 1; see ReplayRatio.
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
        if replay_batch_size < 1:
            raise ValueError(f"replay_batch_size is at least 1, got {replay_batch_size}")
        if isinstance(policies, str):
            raise TypeError(f"policies is a collection of ids: [{policies!r}]")
        self._make = make
        self.replay_batch_size = replay_batch_size
        self.ratio = ReplayRatio(learning_starts, training_intensity)
        self.policies = None if policies is None else sorted(policies)
        self.buffers: dict[str, ReplayBuffer] = {}

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
        made = {
            policy_id: self.buffers[policy_id]
            if policy_id in self.buffers
            else self._make(policy_id)
            for policy_id in parts
        }
        for policy_id, rows in parts.items():
            made[policy_id].check(rows)  # all of them before any is stored
        for policy_id, rows in parts.items():
            made[policy_id].add(rows)
        self.buffers |= made
        self.ratio.note_stored(sum(rows.count for rows in parts.values()))

    def can_sample(self) -> bool:
        """Whether it is time to draw a batch."""
        return self.ratio.may_draw(self.replay_batch_size * len(self.buffers))

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
        self.ratio.note_drawn(size * len(drawn))
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
        return {"buffers": buffers, "ratio": self.ratio.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, with the same settings.

        Raises:
            ValueError: a buffer does not fit; nothing is changed.
        """
        buffers = {policy_id: self._make(policy_id) for policy_id in state["buffers"]}
        for policy_id, buffer in buffers.items():
            buffer.load_state_dict(state["buffers"][policy_id])
        self.buffers = buffers
        self.ratio.load_state_dict(state["ratio"])

    def __repr__(self) -> str:
        more = "" if self.policies is None else f", policies={self.policies}"
        if self.ratio.training_intensity is not None:
            more += f", training_intensity={self.ratio.training_intensity:g}"
        return f"MultiAgentReplayBuffer(replay_batch_size={self.replay_batch_size}{more})"
