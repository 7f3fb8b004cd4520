"""MixInReplayBuffer: every new row once, among old ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.replay.buffers import ReplayBuffer


class MixInReplayBuffer(ReplayBuffer):
    """Draws give what was stored since the last one, in order and once, mixed with items that were
    given before.

    As for learners that want fresh experience but can make use of some old (Espeholt et al. 2018,
    section 5.2.2).

    Args:
        capacity: rows.
        replay_ratio: the share of old items in a draw: 0 gives what is new as far as there is
            enough of it, 1 draws uniformly from all. What new items there are too few of, old ones
            make up for.
        more: see ReplayBuffer.

    Raises:
        ValueError: a replay_ratio outside [0, 1]; see ReplayBuffer.
    """

    def __init__(self, capacity: int, *, replay_ratio: float = 0.5, **more: Any):
        if not 0 <= replay_ratio <= 1:
            raise ValueError(f"replay_ratio: a number from 0 to 1 is needed, got {replay_ratio!r}")
        super().__init__(capacity, **more)
        self.replay_ratio = float(replay_ratio)
        self._next = 0  # the number of the oldest item that has not been given
        self._owed = 0.0  # new items, of draws whose share was not a whole number

    def _draw(self, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        first, stored = self._items()
        if self.replay_ratio == 1:
            return super()._draw(count)
        self._owed += count * (1 - self.replay_ratio)
        due = int(self._owed + 1e-9)
        self._owed -= due
        self._next = max(self._next, first)
        new = np.arange(self._next, min(self._next + due, stored))
        old_until = self._next
        self._next += len(new)
        if old_until == first:  # nothing is old yet
            old_until = self._next if len(new) else stored
        old = self.rng.integers(first, old_until, count - len(new))
        return np.concatenate([new, old]) % self.capacity, {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "next": self._next, "owed": self._owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next, self._owed = int(state["next"]), float(state["owed"])
