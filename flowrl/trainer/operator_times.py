"""OperatorTimes: the seconds that each operator of a plan was busy since the last result."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flowrl.iter import LocalIterator
from flowrl.iter.stage import topological_order, walk
from flowrl.monitoring.activity import operator_name


class OperatorTimes:
    """Turn the cumulative times of the stages of a plan into times per result."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since_last(self, plan: LocalIterator[Any]) -> dict[str, float]:
        """Return operator -> seconds busy in its own code since the last call, sources first.

        Operators of the same name get a number: `TrainOneStep`, `TrainOneStep#2`.
        """
        rows = dict(zip(walk(plan.stage), plan.stats(), strict=True))
        busy: dict[str, float] = {}
        counts: Counter[str] = Counter()
        for stage in topological_order(plan.stage):
            name = operator_name(rows[stage]["stage"])
            counts[name] += 1
            busy[name if counts[name] == 1 else f"{name}#{counts[name]}"] = rows[stage]["busy_s"]
        since = {name: seconds - self._before.get(name, 0.0) for name, seconds in busy.items()}
        self._before = busy
        return since
