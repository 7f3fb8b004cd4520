"""ProgressRate: how fast a run is, how far it is, and how long it will take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from flowrl.trainer.runs.stop_rules import StopRules

RATE_WINDOW = 50  # iterations that the rate is averaged over


class ProgressRate:
    """Estimates the speed of a run from its last results.

    Args:
        stop: the run's stop rules.
    """

    def __init__(self, stop: StopRules):
        self.stop = stop
        self._started = time.perf_counter()
        # time, env steps, iteration
        self._history: deque[tuple[float, int, int]] = deque(maxlen=RATE_WINDOW)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def add(self, result: Mapping[str, Any]) -> None:
        """Note a result."""
        steps = result["timesteps_total"]
        self._history.append((time.perf_counter(), steps, result["training_iteration"]))

    def steps_per_s(self) -> float:
        """Return env steps per second; the first iteration, in which workers start, is left out."""
        if len(self._history) < 2:
            return 0.0
        (start, before, _), (now, steps, _) = self._history[0], self._history[-1]
        return (steps - before) / max(now - start, 1e-9)

    def seconds_left(self, result: Mapping[str, Any]) -> float | None:
        """Return the seconds until the first limit on env steps, iterations or time is reached;
        None if it is unknown."""
        stop, left = self.stop, []
        if stop.time_s is not None:
            left.append(stop.time_s - self.seconds)
        if rate := self.steps_per_s():
            if stop.env_steps is not None:
                left.append((stop.env_steps - result["timesteps_total"]) / rate)
            if stop.iters is not None:
                (start, _, before), (now, _, iteration) = self._history[0], self._history[-1]
                per_iteration = (now - start) / max(iteration - before, 1)
                left.append((stop.iters - iteration) * per_iteration)
        return max(min(left), 0.0) if left else None

    def share_done(self, result: Mapping[str, Any]) -> float | None:
        """Return how far the run is, from 0 to 1, by the limit on env steps, iterations or time
        that is nearest; None without such a limit."""
        stop, shares = self.stop, []
        if stop.env_steps:
            shares.append(result["timesteps_total"] / stop.env_steps)
        if stop.iters:
            shares.append(result["training_iteration"] / stop.iters)
        if stop.time_s:
            shares.append(self.seconds / stop.time_s)
        return min(max(shares), 1.0) if shares else None
