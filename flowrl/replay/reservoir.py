"""ReservoirReplayBuffer: a uniform sample of all rows that there ever were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.data.sample_batch import SampleBatch
from flowrl.replay.buffers import ReplayBuffer


class ReservoirReplayBuffer(ReplayBuffer):
    """Each row that was ever stored is there with the same chance (Vitter 1985, algorithm R), as
    for the average policy of fictitious self-play; rows are drawn uniformly.

    Rows stand alone, so what each led to is stored with it, and there are no n-step returns.

    Args:
        capacity: rows.
        seed: of what is kept and of the draws.
    """

    def __init__(self, capacity: int, *, seed: int | None = None):
        super().__init__(capacity, seed=seed)
        self._added = 0

    def add(self, batch: SampleBatch) -> None:
        count = batch.count
        if not count:
            return
        self.check(batch)
        kept, slots = self._chosen(count)
        if len(kept):
            self._ring.replace(batch.take_rows(kept), slots)
        self._added += count

    def _chosen(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of `count` new rows are kept, and the slots that they get."""
        numbers = np.arange(self._added, self._added + count)
        slots = np.where(numbers < self.capacity, numbers, self.rng.integers(0, numbers + 1))
        kept = np.flatnonzero(slots < self.capacity)
        return kept, slots[kept]

    @property
    def num_added(self) -> int:
        return self._added

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "added": self._added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._added = int(state["added"])
