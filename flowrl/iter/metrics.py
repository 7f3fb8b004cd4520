"""The metrics context: counters, timers and info that the operators of one plan share.

The outermost pull of a plan makes its context current; operators reach it with
`_get_shared_metrics()`. Outside a pull there is no current context, and asking is an error.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_current: ContextVar[MetricsContext | None] = ContextVar("flowrl_metrics", default=None)


class Timer:
    """Durations [s] and the units handled in them, over a sliding window of `window` calls."""

    def __init__(self, window: int = 10):
        self._seconds: deque[float] = deque(maxlen=window)
        self._units: deque[float] = deque(maxlen=window)
        self._started: float | None = None
        self.total_s = 0.0
        self.count = 0

    def __enter__(self) -> Timer:
        if self._started is not None:
            raise RuntimeError("this Timer is already running: a timer cannot be entered twice")
        self._started = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        started, self._started = self._started, None
        assert started is not None
        self.push(time.perf_counter() - started)

    def push(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self.total_s += seconds
        self.count += 1

    def push_units_processed(self, units: float) -> None:
        self._units.append(units)

    def has_units_processed(self) -> bool:
        return bool(self._units)

    @property
    def mean(self) -> float:
        """Mean duration [s] of the window; 0 when nothing was timed."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else 0.0

    @property
    def mean_throughput(self) -> float:
        """Units per second over the window; 0 when nothing was timed."""
        seconds = sum(self._seconds)
        return sum(self._units) / seconds if seconds else 0.0


class MetricsContext:
    """What one plan knows of itself.

    counters: name -> int, only ever grows; timers: name -> Timer; info: name -> anything an
    operator wants in the report (`info["learner"][policy_id]` holds learner statistics).
    """

    def __init__(self) -> None:
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.timers: defaultdict[str, Timer] = defaultdict(Timer)
        self.info: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"counters": dict(self.counters)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters.clear()
        self.counters.update(state["counters"])


def get_metrics() -> MetricsContext:
    """The context of the plan that is being pulled in this thread.

    Raises:
        ValueError: outside a pull.
    """
    context = _current.get()
    if context is None:
        raise ValueError(
            "there is no metrics context outside an iterator: call this from an operator while "
            "its plan is being pulled, or read `iterator.metrics` of the plan itself"
        )
    return context


@contextmanager
def metrics_scope(context: MetricsContext) -> Iterator[MetricsContext]:
    """Make `context` the current one, for code that calls operators outside a plan."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
