"""ReservoirReplayBuffer: a uniform sample of all rows ever stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.replay.buffers import ReplayBuffer
from flowrl.state_schema import Fields, Natural


class ReservoirReplayBuffer(ReplayBuffer):
    """Keeps each row ever stored with equal probability (Vitter 1985, algorithm R).

    Used for the average policy of fictitious self-play. Rows are drawn uniformly. They are not
    linked: each is stored with its next observation, and there are no n-step returns.

    Args:
        capacity: maximum number of rows.
        seed: seed of the selection and of the draws.
    """

    state_fields: ClassVar[Fields] = {"num_added": Natural}

    def __init__(self, capacity: int, *, seed: int | None = None):
        super().__init__(capacity, seed=seed)
        self._num_added = 0

    def _keep(self, batch: SampleBatch) -> None:
        rows, slots = self._select(batch.count)
        if len(rows):
            self._ring.replace(batch.take_rows(rows), slots)
        self._num_added += batch.count

    def _select(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Select rows to keep out of `count` new rows; return them and their slots."""
        row_ids = np.arange(self._num_added, self._num_added + count)
        slots = np.where(row_ids < self.capacity, row_ids, self.rng.integers(0, row_ids + 1))
        rows = np.flatnonzero(slots < self.capacity)
        return rows, slots[rows]

    @property
    def num_added(self) -> int:
        """Rows ever added, also those that were not selected."""
        return self._num_added

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_added": self._num_added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_added = int(state["num_added"])
