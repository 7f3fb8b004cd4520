"""RawObservations: write the observations of environments to columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from flowrl.data.columns import map_leaves
from flowrl.data.fragment_columns import FragmentColumns, write
from flowrl.data.spaces import stack_values, zeros_of
from flowrl.envs.validation import ObservationCheck
from flowrl.sampling.policy_outputs import rows_of


class RawObservations:
    """The column `raw_obs`: observations as the environments return them.

    A vector environment writes arrays directly to a row. It puts nested observations into a list;
    `complete` writes them to the row.

    Args:
        columns: the columns of a fragment.
        check: the space of the observations.
        repairs: replace invalid values by valid ones.

    Attributes:
        nested: the list of nested observations, one per environment; None for arrays.
    """

    def __init__(self, columns: FragmentColumns, check: ObservationCheck, repairs: bool):
        self._columns, self._check, self._repairs = columns, check, repairs
        envs = columns.lanes
        self.nested: list[Any] | None = None if check.is_array else [None] * envs
        zeros = zeros_of(check.space)
        columns.allocate_like(
            "raw_obs", map_leaves(lambda zero: np.broadcast_to(zero, (envs, *zero.shape)), zeros)
        )

    def target(self, t: int) -> Any:
        """Return where a vector environment writes the observations of row t."""
        return self._columns.row("raw_obs", t) if self.nested is None else self.nested

    def complete(self, t: int) -> None:
        """Write nested observations to row t; repair invalid values if the setting says so."""
        columns = self._columns
        if self.nested is not None:
            leaves = zip(*map(self._check.leaves, self.nested), strict=True)
            arrays = optree.tree_leaves(columns["raw_obs"])
            for array, values in zip(arrays, leaves, strict=True):
                array[columns.lookback + t] = values
        if self._repairs:
            repaired = self._check.repair(columns.row("raw_obs", t))
            write(columns["raw_obs"], columns.lookback + t, repaired)

    def load(self, t: int) -> Any:
        """Return the observations of row t, restored from a saved state, as `target` does."""
        if self.nested is not None:
            self.nested[:] = rows_of(self._columns.row("raw_obs", t))
        return self.target(t)

    def finals(self, parts: list[Any]) -> Any:
        """Return the final observations of the episodes that ended, [k, …].

        Args:
            parts: those of each step, in order.
        """
        if not parts:
            return map_leaves(lambda array: array[:0, 0], self._columns["raw_obs"])
        if self._check.is_array:
            dtype = self._columns["raw_obs"].dtype
            return np.concatenate([np.asarray(part, dtype) for part in parts])
        return stack_values([self._check.copy(final) for part in parts for final in part])
