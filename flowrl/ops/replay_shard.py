"""ReplayShard: a replay buffer on a Ray actor, and its replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flowrl.data import Batch
from flowrl.iter.ray_runtime import node_id
from flowrl.replay import MultiAgentReplayBuffer

Update = tuple[str, np.ndarray, np.ndarray]  # policy id, batch_indexes, priorities


class ReplayShard:
    """One shard of a replay buffer; runs on a Ray actor."""

    def __init__(self, make: Callable[[int], MultiAgentReplayBuffer], index: int):
        self.buffer = make(index)
        self._node = node_id()

    def add(self, batch: Batch, node: str | None = None) -> AddReply:
        """Store a batch.

        Args:
            batch: the batch.
            node: id of the node that sent it.
        """
        self.buffer.add(batch)
        bytes_received = 0 if node == self._node else batch.size_bytes()
        return AddReply(len(self.buffer), self.buffer.has_items(), bytes_received, self._node)

    def serve(self, updates: list[Update], num_batches: int) -> DrawReply:
        """Update priorities, then draw `num_batches` batches; none if there is nothing to draw.

        Raises:
            Exception: the error of the first update that failed; the other updates are applied, and
                nothing is drawn.
        """
        first_error: Exception | None = None
        for update in updates:
            try:
                self.buffer.update_priorities(*update)
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        has_items = self.buffer.has_items()
        drawn = [self.buffer.sample() for _ in range(num_batches if has_items else 0)]
        return DrawReply(drawn, len(self.buffer), has_items, self._node)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the buffer; see MultiAgentReplayBuffer.stats."""
        return self.buffer.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the buffer."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Load the state of the buffer; return the number of rows."""
        self.buffer.load_state_dict(state)
        return len(self.buffer)


class DrawReply(NamedTuple):
    """A shard's reply to a request for batches."""

    batches: list[Batch]
    rows: int  # in the shard
    has_items: bool  # it has something to draw
    node: str | None  # of the shard


class AddReply(NamedTuple):
    """A shard's reply after it has stored a batch."""

    rows: int  # in the shard
    has_items: bool  # it has something to draw
    bytes_received: int  # from another node
    node: str | None  # of the shard
