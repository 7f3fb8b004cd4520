"""TrackedBatch: a batch that records which of its columns are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flowrl.data import SampleBatch


class TrackedBatch(SampleBatch):
    """A copy of a batch that records in `read` the names of the columns that are read."""

    read: set[str]

    def __init__(self, batch: SampleBatch):
        dict.__init__(self, batch.stored())
        vars(self).update(vars(batch))
        self._num_rows = batch.count
        self.read = set()

    @property
    def count(self) -> int:
        return self._num_rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.read.add(key)
        return super().__contains__(key)

    def map_rows(
        self,
        fn: Callable[[np.ndarray], np.ndarray],
        sequences: slice | np.ndarray | None = None,
    ) -> TrackedBatch:
        """Return rows whose columns count as read when they are read."""
        before = set(self.read)
        part = TrackedBatch(super().map_rows(fn, sequences))
        self.read.intersection_update(before)  # copying the rows is not reading them
        part.read = self.read
        return part

    def stored(self) -> Any:
        """Return all columns; they count as read."""
        self.read |= set(dict.keys(self))
        return super().stored()
