"""OperatorTimes: the seconds that each operator of a plan was busy since the last result."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flowrl.monitoring.activity import operator_name


class OperatorTimes:
    """Turn the cumulative times of `LocalIterator.stats` into times per result."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since_last(self, stats: list[dict[str, Any]]) -> dict[str, float]:
        """Return operator -> seconds busy in its own code since the last call, end of plan first.

        Operators of the same name get a number: `TrainOneStep`, `TrainOneStep_2`.
        """
        busy: dict[str, float] = {}
        counts: Counter[str] = Counter()
        for row in stats:
            name = operator_name(row["stage"])
            counts[name] += 1
            busy[name if counts[name] == 1 else f"{name}_{counts[name]}"] = row.get("busy_s", 0.0)
        since = {name: seconds - self._before.get(name, 0.0) for name, seconds in busy.items()}
        self._before = busy
        return since
