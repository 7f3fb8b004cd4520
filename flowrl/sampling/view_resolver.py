"""View: a view requirement resolved to a source column and distances from each row."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.policies.views import ViewRequirement

REQUIRED_COLUMNS = ("rewards", "dones", "terminateds", "truncateds")  # of every train batch


def nontrivial_views(requirements: Mapping[str, ViewRequirement]) -> dict[str, ViewRequirement]:
    """Return the views that differ from a column of the same name."""
    return {
        name: view
        for name, view in requirements.items()
        if view.shift != 0 or (view.data_col or name) != name or view.agents is not None
    }


def signature_of(requirements: Mapping[str, ViewRequirement]) -> dict[str, Any]:
    """Return a comparable description of views: equal if they show the same."""
    return {
        name: (
            view.data_col,
            view.shifts,
            view.is_window,
            view.batch_repeat_value,
            view.agents,
            view.used_for_compute_actions,
            view.used_for_training,
            view.space,
        )
        for name, view in requirements.items()
    }


def not_for_training(requirements: Mapping[str, ViewRequirement], columns: Any) -> list[str]:
    """Return the columns that train batches do not contain."""
    excluded = [
        name
        for name, view in requirements.items()
        if not view.used_for_training and name not in REQUIRED_COLUMNS
    ]
    states = [n for n in columns if n.startswith("state_out_") and n not in requirements]
    return excluded + states


class View:
    """A view resolved to a source column and shifts; `new_obs` is `obs` shifted by one."""

    def __init__(self, name: str, view: ViewRequirement):
        column, shifts = view.data_col or name, view.shifts
        if column in ("new_obs", "next_obs"):
            column, shifts = "obs", tuple(shift + 1 for shift in shifts)
        self.source = column
        self.shifts = shifts
        self.is_window = view.is_window
        self.repeat = view.batch_repeat_value
        self.agents = view.agents
        self.space = view.space
        steps = {after - before for before, after in itertools.pairwise(shifts)}
        self._stride = steps.pop() if len(steps) == 1 and min(steps) > 0 else None
        space = view.space
        is_array = space is not None and space.shape is not None and space.dtype is not None
        self.zero = np.zeros(space.shape, space.dtype) if is_array else None  # type: ignore

    def rows(self, at: int) -> Any:
        """Return the history rows that the view shows at row `at`: a slice if evenly spaced."""
        if self._stride is None:
            return [at + shift for shift in self.shifts]
        return slice(at + self.shifts[0], at + self.shifts[-1] + 1, self._stride)

    def read(self, array: np.ndarray, at: int) -> np.ndarray:
        """Return a copy of what the view shows of an array [rows, N, …] at row `at`: [N, …] or
        [N, shifts, …]."""
        if not self.is_window:
            return array[at + self.shifts[0]].copy()
        return array[self.rows(at)].swapaxes(0, 1).copy()
