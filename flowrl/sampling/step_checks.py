"""StepChecks: find invalid observations and rewards in the columns of a fragment."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from flowrl.data.fragment_columns import FragmentColumns, map_leaves
from flowrl.envs.validation import (
    OUTSIDE_WARNING,
    ObservationCheck,
    OnInvalidStep,
    invalid_step_error,
)
from flowrl.sampling.segments import Event, Segments

log = logging.getLogger("flowrl")


class Problem(NamedTuple):
    """An invalid value: row of the step that returned it, environment, description, and index of
    the segment that contains it."""

    row: int
    env: int
    what: str
    segment: int


class StepChecks:
    """Checks the steps of single-agent environments, a fragment at a time.

    Args:
        check: the check of observations.
        on_invalid_step: the setting; "warn" accepts observations outside of the bounds of a Box.
        worker_index: for the warning.
    """

    def __init__(self, check: ObservationCheck, on_invalid_step: OnInvalidStep, worker_index: int):
        self._check = check
        self._warn_only = on_invalid_step == "warn"
        self._worker_index = worker_index
        self._warned = False

    def find(
        self, columns: FragmentColumns, used: int, finals: Any, segments: Segments
    ) -> list[Problem] | None:
        """Return the invalid values of the segments, in the order of time; None if all rows, also
        those that are lost, are valid.

        Args:
            columns: the rows.
            used: number of rows of the fragment.
            finals: final observations of the episodes that ended, [k, …].
            segments: all segments of the fragment; those that are lost are not checked.
        """
        check = self._check
        raw, rewards = columns.part("raw_obs", 0, used + 1), columns.part("rewards", 0, used)
        fits = check.in_bounds(raw) and check.in_bounds(finals)
        if not fits and self._warn_only and check.is_usable(raw) and check.is_usable(finals):
            self._warn(raw, finals, segments)
            fits = True
        if fits and np.isfinite(rewards).all():
            return None
        invalid_raw = check.invalid_rows(raw, 2, self._warn_only)
        invalid_finals = check.invalid_rows(finals, 1, self._warn_only)
        invalid_rewards = ~np.isfinite(rewards)
        problems = []
        for index in np.flatnonzero(segments.events != Event.LOST).tolist():
            env, begin = int(segments.lanes[index]), int(segments.begins[index])
            end, final = int(segments.ends[index]), int(segments.finals[index])
            is_open = segments.events[index] == Event.OPEN
            for row in (begin + np.flatnonzero(invalid_rewards[begin:end, env])).tolist():
                what = f"a reward that is not finite: {rewards[row, env]}"
                problems.append(Problem(row, env, what, index))
            for row in (begin + np.flatnonzero(invalid_raw[begin : end + is_open, env])).tolist():
                what = self._describe(raw, (row, env))
                problems.append(Problem(max(row - 1, 0), env, what, index))
            if final >= 0 and invalid_finals[final]:
                what = self._describe(finals, final)
                problems.append(Problem(end - 1, env, what, index))
        return sorted(problems)

    def _describe(self, observations: Any, at: Any) -> str:
        return self._check.describe_problem(map_leaves(lambda array: array[at], observations))

    def error_of(self, problem: Problem) -> Exception:
        """Return the error about an invalid value."""
        return invalid_step_error(
            f"sub-environment {problem.env} returned {problem.what}, at step {problem.row} of a "
            "fragment"
        )

    def _warn(self, raw: Any, finals: Any, segments: Segments) -> None:
        """Warn of the first observation outside its space; later ones are not reported."""
        if self._warned:
            return
        self._warned = True
        rows, envs = self._check.invalid_rows(raw, 2).nonzero()
        if len(rows):
            env, problem = int(envs[0]), self._describe(raw, (rows[0], envs[0]))
        else:
            final = int(self._check.invalid_rows(finals, 1).argmax())
            env = int(segments.lanes[(segments.finals == final).argmax()])
            problem = self._describe(finals, final)
        log.warning(OUTSIDE_WARNING, self._worker_index, env, problem)
