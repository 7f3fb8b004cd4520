"""MixInReplayBuffer: each new item once, mixed with old items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import numpy as np

from flowrl.replay.buffers import BufferSettings, ReplayBuffer
from flowrl.setting_values import check_number
from flowrl.state_schema import Fields, Natural


class MixInReplayBuffer(ReplayBuffer):
    """Draws each new item once, in order, mixed with items that were drawn before.

    New items that are overwritten before their turn are skipped. If there are no old items, the new
    items of the same draw count as old, or all items if the draw has none.

    For learners that prefer fresh experience but can reuse some old experience (Espeholt et al.
    2018, section 5.2.2).

    Args:
        capacity: see ReplayBuffer.
        replay_ratio: fraction of old items in a draw: 0 draws new items only, 1 draws uniformly
            from all items. If new items run out, old ones replace them. (`ReplayRatio` limits
            another ratio, that of rows drawn to rows stored.)
        settings: see ReplayBuffer.

    Raises:
        ValueError: replay_ratio is outside [0, 1]; see ReplayBuffer.
    """

    state_fields: ClassVar[Fields] = {"next_new": Natural, "new_due": float}

    def __init__(
        self, capacity: int, *, replay_ratio: float = 0.5, **settings: Unpack[BufferSettings]
    ):
        check_number("replay_ratio", replay_ratio, 0, 1)
        super().__init__(capacity, **settings)
        self.replay_ratio = float(replay_ratio)
        self._next_new = 0  # id of the oldest item not drawn yet
        self._new_due = 0.0  # new items due; draws carry over fractions

    def _draw(self, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if self.replay_ratio == 1:
            return super()._draw(count)
        items = self.item_ids()
        self._new_due += count * (1 - self.replay_ratio)
        due = int(self._new_due + 1e-9)
        self._new_due -= due
        self._next_new = max(self._next_new, items.start)
        new = np.arange(self._next_new, min(self._next_new + due, items.stop))
        old_stop = self._next_new
        self._next_new += len(new)
        if old_stop == items.start:  # no old items
            old_stop = self._next_new if len(new) else items.stop
        old = self.rng.integers(items.start, old_stop, count - len(new))
        return np.concatenate([new, old]) % self.capacity, {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "next_new": self._next_new, "new_due": self._new_due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next_new, self._new_due = int(state["next_new"]), float(state["new_due"])
