"""ReplayRatio: the ratio of drawn to stored rows."""

from __future__ import annotations

from typing import Any

import numpy as np


class ReplayRatio:
    """Decides whether to store or to draw next, to keep the ratio of drawn to stored rows.

    The ratio is exact to within one batch, whichever side is slower. At any time exactly one of
    storing and drawing is due.

    Args:
        learning_starts: rows stored before the first draw.
        training_intensity: rows drawn per row stored after that; None draws one batch per stored
            batch.

    Attributes:
        stored: rows stored.
        drawn: rows drawn.

    Raises:
        ValueError: learning_starts is negative, or training_intensity is not positive.
    """

    def __init__(self, learning_starts: int = 0, training_intensity: float | None = None):
        if not 0 <= learning_starts < np.inf:
            raise ValueError(f"learning_starts must be at least 0, got {learning_starts}")
        if training_intensity is not None and not 0 < training_intensity < np.inf:
            raise ValueError(f"training_intensity must be above 0, got {training_intensity!r}")
        self.learning_starts = learning_starts
        self.training_intensity = training_intensity
        self.stored = 0
        self.drawn = 0
        self._batches_due = 0

    def note_stored(self, rows: int) -> None:
        """Count a stored batch of `rows` rows."""
        self.stored += rows
        if rows and self.is_learning:
            self._batches_due += 1

    def note_drawn(self, rows: int, batches: int = 1) -> None:
        """Count drawn batches and their rows; negative numbers cancel draws."""
        self.drawn += rows
        self._batches_due = max(0, self._batches_due - batches)

    @property
    def is_learning(self) -> bool:
        """Whether enough rows are stored to draw."""
        return self.stored >= max(1, self.learning_starts)

    def may_draw(self, rows: float) -> bool:
        """Return whether a draw of `rows` rows is due."""
        if not self.is_learning:
            return False
        if self.training_intensity is None:
            return self._batches_due > 0
        stored = self.stored - self.learning_starts
        return self.drawn + rows <= self.training_intensity * stored

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"stored": self.stored, "drawn": self.drawn, "batches_due": self._batches_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.stored, self.drawn = int(state["stored"]), int(state["drawn"])
        self._batches_due = int(state["batches_due"])
