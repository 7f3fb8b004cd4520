"""StepChecks: find invalid observations and rewards in the columns of a fragment."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from flowrl.data.columns import map_leaves
from flowrl.data.fragment_columns import FragmentColumns
from flowrl.envs.validation import (
    OUTSIDE_WARNING,
    ObservationCheck,
    OnInvalidStep,
    invalid_step_error,
)
from flowrl.sampling.segments import Event, Segments

log = logging.getLogger("flowrl")


class StepChecks:
    """Checks the steps of single-agent environments, a fragment at a time.

    Args:
        check: the check of observations.
        on_invalid_step: the setting; "warn" accepts observations outside of the bounds of a Box.
        worker_index: for the warning.
        can_drop: whether the environments support "drop", which messages then recommend.
    """

    def __init__(
        self,
        check: ObservationCheck,
        on_invalid_step: OnInvalidStep,
        worker_index: int,
        can_drop: bool,
    ):
        self._check, self._can_drop = check, can_drop
        self._warn_only = on_invalid_step == "warn"
        self._worker_index = worker_index
        self._warned = False

    def check(
        self, columns: FragmentColumns, first: int, num_rows: int, finals: Any, segments: Segments
    ) -> None:
        """Check the rows of the segments that are not dropped.

        Args:
            columns: the rows.
            first: first row of the fragment, after the rows of running episodes, for messages.
            num_rows: number of rows, with those of running episodes.
            finals: final observations of the episodes that ended, [k, …].
            segments: all segments of the fragment.

        Raises:
            InvalidStepError: of the first step with an invalid value.
        """
        check = self._check
        raw, rewards = (
            columns.part("raw_obs", 0, num_rows + 1),
            columns.part("rewards", 0, num_rows),
        )
        dropped = segments.events == Event.DROPPED
        has_finals = not segments.is_whole_fragment and bool((segments.final_index >= 0).any())
        fits = check.in_bounds(raw) and (not has_finals or check.in_bounds(finals))
        if not fits and self._warn_only and check.is_usable(raw) and check.is_usable(finals):
            self._warn(raw, finals, segments)
            fits = True
        if fits and np.isfinite(rewards).all():
            return
        invalid_raw = check.invalid_rows(raw, 2, self._warn_only)
        invalid_finals = check.invalid_rows(finals, 1, self._warn_only)
        invalid_rewards = ~np.isfinite(rewards)
        problems = []  # row of the step, environment, description
        for index in np.flatnonzero(~dropped).tolist():
            env, begin = int(segments.lanes[index]), int(segments.begins[index])
            end, final = int(segments.ends[index]), int(segments.final_index[index])
            is_open = segments.events[index] == Event.OPEN
            for row in (begin + np.flatnonzero(invalid_rewards[begin:end, env])).tolist():
                problems.append((row, env, f"a reward that is not finite: {rewards[row, env]}"))
            for row in (begin + np.flatnonzero(invalid_raw[begin : end + is_open, env])).tolist():
                step = max(row - 1, first)
                problems.append((step, env, self._describe(raw, (row, env))))
            if final >= 0 and invalid_finals[final]:
                problems.append((end - 1, env, self._describe(finals, final)))
        if problems:
            row, env, what = min(problems)
            raise invalid_step_error(
                f"sub-environment {env} returned {what}, at step {row - first} of a fragment",
                can_drop=self._can_drop,
            )

    def check_observations(self, observations: Any, row: int) -> None:
        """Check the observations that a policy acts on, after it has raised an error.

        Args:
            observations: [envs, …].
            row: number of the step in the fragment.

        Raises:
            InvalidStepError: one is invalid.
        """
        for env in self._check.invalid_rows(observations, 1, self._warn_only).nonzero()[0].tolist():
            what = self._describe(observations, env)
            raise invalid_step_error(
                f"sub-environment {env} returned {what}, before step {row} of a fragment",
                can_drop=self._can_drop,
            )

    def _describe(self, observations: Any, at: Any) -> str:
        return self._check.describe_problem(map_leaves(lambda array: array[at], observations))

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
            env = int(segments.lanes[(segments.final_index == final).argmax()])
            problem = self._describe(finals, final)
        log.warning(OUTSIDE_WARNING, self._worker_index, env, problem)
