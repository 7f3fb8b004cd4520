"""ReplayRatio: the ratio of drawn to stored rows."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, ClassVar

import numpy as np

from flowrl.setting_values import check_int
from flowrl.state_schema import Fields, Integer, Natural, check_own_state

EMPTY = "the replay buffer is empty: store a batch before drawing from it"
NOTHING_TO_DRAW = "the replay buffer has nothing to draw: store more rows"


class ReplayRatio:
    """Decides whether to store or to draw next, to keep the ratio of drawn to stored rows.

    The ratio is exact to within one batch, whichever side is slower. With a training_intensity, at
    any time exactly one of storing and drawing is due. Without one, the two alternate in a plan
    that does both, and are not limited elsewhere.

    Args:
        learning_starts: rows stored before the first draw.
        training_intensity: rows drawn per row stored after that; None draws one batch per stored
            batch.

    Attributes:
        stored: rows stored.
        drawn: rows drawn.

    Raises:
        ValueError: learning_starts is not an int of at least 0, or training_intensity is not
            positive.
    """

    state_fields: ClassVar[Fields] = {
        "stored": Integer,
        "drawn": Integer,
        "batches_due": Integer,
        "learning_starts": Natural,
        "training_intensity": float | None,
        "rows_allowed_before": float,
    }

    def __init__(self, learning_starts: int = 0, training_intensity: float | None = None):
        check_int("learning_starts", learning_starts, 0)
        if training_intensity is not None and not (
            isinstance(training_intensity, Real) and 0 < training_intensity < np.inf
        ):
            raise ValueError(f"training_intensity must be above 0, got {training_intensity!r}")
        self.learning_starts = learning_starts
        self.training_intensity = training_intensity
        self.stored = 0
        self.drawn = 0
        self._batches_due = 0
        self._rows_allowed_before = 0.0  # that other settings allowed in addition, before a resume

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

    @property
    def _rows_allowed(self) -> float:
        """Rows that the training_intensity allows to draw in total."""
        assert self.training_intensity is not None
        counted = max(0, self.stored - self.learning_starts)
        return self.training_intensity * counted + self._rows_allowed_before

    def may_draw(self, rows: float, alternate: bool = True) -> bool:
        """Return whether a draw of `rows` rows is due.

        Args:
            rows: size of the next batch.
            alternate: without a training_intensity, draw one batch per stored batch; if False,
                draw any number.
        """
        if not self.is_learning:
            return False
        if self.training_intensity is None:
            return self._batches_due > 0 or not alternate
        return self.drawn + rows <= self._rows_allowed

    def may_store(self, rows: float, alternate: bool = True) -> bool:
        """Return whether storing a batch is due; see `may_draw` for the arguments."""
        if self.training_intensity is None and not alternate:
            return True
        return not self.may_draw(rows)

    def missing_stores(self, rows: float) -> str:
        """Return what must be stored before a batch of `rows` rows may be drawn."""
        if not self.is_learning:
            if not self.learning_starts:
                return EMPTY
            return (
                f"learning_starts={self.learning_starts} and {self.stored} rows are stored: store "
                f"{_more_rows(self.learning_starts - self.stored)}"
            )
        if self.training_intensity is None:
            return "one batch is drawn per stored batch: store another batch before drawing again"
        needed = math.ceil((self.drawn + rows - self._rows_allowed) / self.training_intensity)
        return (
            f"training_intensity={self.training_intensity:g} allows {int(self._rows_allowed)} "
            f"drawn rows, and {self.drawn} have been drawn: store {_more_rows(needed)}"
        )

    def missing_draws(self, rows: float) -> str:
        """Return how many batches of `rows` rows must be drawn before the next one is stored."""
        if self.training_intensity is None:
            batches = self._batches_due
            return f"one batch is drawn per stored batch: draw {batches} before storing another one"
        return (
            f"training_intensity={self.training_intensity:g} requires {int(self._rows_allowed)} "
            f"drawn rows, and {self.drawn} have been drawn: draw "
            f"{int((self._rows_allowed - self.drawn) / rows)} batches before storing another one"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the settings that they were made with."""
        intensity = self.training_intensity
        return {
            "stored": self.stored,
            "drawn": self.drawn,
            "batches_due": self._batches_due,
            "learning_starts": self.learning_starts,
            "training_intensity": None if intensity is None else float(intensity),
            "rows_allowed_before": self._rows_allowed_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`.

        If the state was made with other settings, the settings of this object apply to the rows
        that are stored later. Draws that are due stay due, unless one of the two
        training_intensities is None; no others become due.
        """
        check_own_state(self, state)
        self.stored, self.drawn = int(state["stored"]), int(state["drawn"])
        self._batches_due = int(state["batches_due"])
        self._rows_allowed_before = state["rows_allowed_before"]
        saved = ReplayRatio(state["learning_starts"], state["training_intensity"])
        same_intensity = saved.training_intensity == self.training_intensity
        if same_intensity and saved.learning_starts == self.learning_starts:
            return
        saved.stored, saved._rows_allowed_before = self.stored, self._rows_allowed_before
        due = 0.0
        if saved.training_intensity is not None:
            due = saved._rows_allowed - self.drawn
        self._rows_allowed_before = 0.0
        if self.training_intensity is not None:
            self._rows_allowed_before = self.drawn + due - self._rows_allowed
        if not same_intensity:
            self._batches_due = 0


def _more_rows(number: int) -> str:
    return f"{number} more row{'s' if number > 1 else ''}"
