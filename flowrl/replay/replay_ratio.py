"""ReplayRatio: when it is time to store experience, and when to draw."""

from __future__ import annotations

from typing import Any

import numpy as np


class ReplayRatio:
    """Keeps the ratio of drawn to stored rows, to within one batch, whichever side is slow.

    At every moment exactly one of storing and drawing is due.

    Args:
        learning_starts: rows stored before the first draw.
        training_intensity: rows drawn for each row stored since then; None draws one batch for
            each batch stored.

    Raises:
        ValueError: a negative learning_starts, an intensity that is not positive.
    """

    def __init__(self, learning_starts: int = 0, training_intensity: float | None = None):
        if not 0 <= learning_starts < np.inf:
            raise ValueError(f"learning_starts is at least 0, got {learning_starts}")
        if training_intensity is not None and not 0 < training_intensity < np.inf:
            raise ValueError(f"training_intensity is a number above 0, got {training_intensity!r}")
        self.learning_starts = learning_starts
        self.training_intensity = training_intensity
        self.stored = 0
        self.drawn = 0
        self._owed = 0  # batches to be drawn

    def note_stored(self, rows: int) -> None:
        """A batch of so many rows was stored."""
        self.stored += rows
        if rows and self.is_learning:
            self._owed += 1

    def note_drawn(self, rows: int) -> None:
        """A batch of so many rows is drawn."""
        self.drawn += rows
        self._owed = max(0, self._owed - 1)

    def take_back(self, rows: int) -> None:
        """A batch that was to be drawn was not there after all."""
        self.drawn -= rows
        self._owed += 1

    def correct(self, rows: int) -> None:
        """A batch that was noted had so many rows more."""
        self.drawn += rows

    @property
    def is_learning(self) -> bool:
        """Whether there are rows enough to begin."""
        return self.stored >= max(1, self.learning_starts)

    def may_draw(self, rows: float) -> bool:
        """Whether it is time to draw a batch of so many rows."""
        if not self.is_learning:
            return False
        if self.training_intensity is None:
            return self._owed > 0
        since = self.stored - self.learning_starts
        return self.drawn + rows <= self.training_intensity * since

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored, "drawn": self.drawn, "owed": self._owed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored, self.drawn = int(state["stored"]), int(state["drawn"])
        self._owed = int(state["owed"])
