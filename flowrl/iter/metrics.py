"""The metrics context: counters, timers and info that the operators of one plan share.

The outermost pull of a plan makes its context current; operators reach it with
`_get_shared_metrics()`. Outside a pull there is no current context, and asking is an error.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

R = TypeVar("R")

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
    `scope_of(operator)` gives an operator a context of its own, for what another operator of the
    same kind would write over.
    """

    def __init__(self) -> None:
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.timers: defaultdict[str, Timer] = defaultdict(Timer)
        self.info: dict[str, Any] = {}
        self.scopes: dict[str, MetricsContext] = {}
        self._records: dict[type, Any] = {}
        self.on_lost: list[Any] = []  # called with each item that an operator's error has lost
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter, from any thread (`counters[name] += n` is for the plan's own)."""
        with self._lock:
            self.counters[name] += n

    def record(self, cls: type[R]) -> R:
        """Return the plan's only record of a type, made by `cls()` at the first call."""
        if cls not in self._records:
            self._records[cls] = cls()
        record: R = self._records[cls]
        return record

    def scope_of(self, operator: Any) -> MetricsContext:
        """The context of one operator: by its name in the plan, numbered if there are several."""
        name = self._names.get(id(operator), type(operator).__name__)
        if name not in self.scopes:
            self.scopes[name] = MetricsContext()
        return self.scopes[name]

    def name_operators(self, names: dict[str, Any]) -> None:
        """Tell the context the operators of its plan by name."""
        self._names = {id(operator): name for name, operator in names.items()}

    def state_dict(self) -> dict[str, Any]:
        scopes = {name: scope.state_dict() for name, scope in self.scopes.items()}
        return {"counters": dict(self.counters), "scopes": scopes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters.clear()
        self.counters.update(state["counters"])
        for name, saved in state["scopes"].items():
            self.scopes.setdefault(name, MetricsContext()).load_state_dict(saved)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "on_lost": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


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


def current_metrics() -> MetricsContext | None:
    """The context of the plan that is being pulled, or None outside a pull."""
    return _current.get()


@contextmanager
def metrics_scope(context: MetricsContext) -> Iterator[MetricsContext]:
    """Make `context` the current one, for code that calls operators outside a plan."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
