"""Numbers that change with the env steps sampled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Scheduled = float | list[tuple[int, float]]


def value_at(schedule: float | Sequence[Sequence[float]], timestep: int) -> float:
    """A constant, or the value at `timestep` [env steps] of a piecewise linear schedule.

    The schedule is a list of (env step, value) in rising order; before the first point its value
    holds, after the last one that value.

    >>> value_at([(0, 1.0), (100, 0.0)], 25)
    0.75
    >>> value_at(0.2, 25)
    0.2
    """
    if isinstance(schedule, (int, float)):
        return float(schedule)
    index = bisect_right([point[0] for point in schedule], timestep)
    if index == 0:
        return float(schedule[0][1])
    if index == len(schedule):
        return float(schedule[-1][1])
    (t0, v0), (t1, v1) = schedule[index - 1], schedule[index]
    return float(v0 + (v1 - v0) * (timestep - t0) / (t1 - t0))
