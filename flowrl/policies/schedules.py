"""Schedules: numbers that depend on the number of sampled env steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator

ScheduleValue = float | list[tuple[int, float]] | dict[str, float]


def _validate_schedule(schedule: ScheduleValue) -> ScheduleValue:
    if isinstance(schedule, list):
        steps = [point[0] for point in schedule]
        if not steps or steps != sorted(set(steps)) or steps[0] < 0:
            raise ValueError(
                "a schedule is a list of (env step, value) with rising steps, none below 0"
            )
    elif isinstance(schedule, dict):
        required = {"initial", "decay", "steps"}
        if not required <= set(schedule) <= required | {"final"}:
            raise ValueError(
                f"an exponential schedule has the keys {', '.join(sorted(required))} and "
                "optionally final"
            )
        if not (0 < schedule["decay"] <= 1 and schedule["steps"] >= 1):
            raise ValueError("an exponential schedule needs a decay in (0, 1] and steps >= 1")
    if not all(0 <= value < float("inf") for value in values_between(schedule)):
        raise ValueError("values must be finite and not negative")
    return schedule


def values_between(schedule: ScheduleValue) -> list[float]:
    """Return the values between which a schedule moves."""
    if isinstance(schedule, list):
        return [value for _, value in schedule]
    if isinstance(schedule, dict):
        return [schedule["initial"], schedule.get("final", 0.0)]
    return [schedule]


Schedule = Annotated[ScheduleValue, AfterValidator(_validate_schedule)]


def value_at(
    schedule: float | Sequence[Sequence[float]] | Mapping[str, float], timestep: int
) -> float:
    """Return the value of a schedule.

    Args:
        schedule: a number is constant. A list of (env step, value) in rising order is interpolated
            linearly, and constant before its first and after its last point. A mapping decays
            exponentially: initial * decay ** (timestep / steps), but not below `final` (default
            0).
        timestep: number of env steps sampled so far.

    >>> value_at([(0, 1.0), (100, 0.0)], 25)
    0.75
    >>> value_at(0.2, 25)
    0.2
    >>> value_at({"initial": 1.0, "decay": 0.5, "steps": 100, "final": 0.1}, 200)
    0.25
    """
    if isinstance(schedule, (int, float)):
        return float(schedule)
    if isinstance(schedule, Mapping):
        value = schedule["initial"] * schedule["decay"] ** (timestep / schedule["steps"])
        return float(max(value, schedule.get("final", 0.0)))
    index = bisect_right([point[0] for point in schedule], timestep)
    if index == 0:
        return float(schedule[0][1])
    if index == len(schedule):
        return float(schedule[-1][1])
    (t0, v0), (t1, v1) = schedule[index - 1], schedule[index]
    return float(v0 + (v1 - v0) * (timestep - t0) / (t1 - t0))
