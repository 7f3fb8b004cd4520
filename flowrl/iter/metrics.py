"""MetricsContext: the counters, timers and info that the operators of one plan share.

The outermost pull of a plan makes its context the current one; operators read it with
`_get_shared_metrics()`, which raises an error outside a pull.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from flowrl.setting_aliases import INFO_COUNTERS
from flowrl.state_schema import Amount, Fields, check_state

if TYPE_CHECKING:
    from flowrl.iter.journal import Journal

R = TypeVar("R")

active_context: ContextVar[MetricsContext | None] = ContextVar("flowrl_metrics", default=None)


class Timer:
    """Durations [s] and units processed, over a sliding window of `window` calls."""

    def __init__(self, window: int = 10):
        self._seconds: deque[float] = deque(maxlen=window)
        self._units: deque[float] = deque(maxlen=window)
        self._started: float | None = None
        self.total_s = 0.0
        self.count = 0

    def __enter__(self) -> Timer:
        if self._started is not None:
            raise RuntimeError("this Timer is already running and cannot be entered twice")
        self._started = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        started, self._started = self._started, None
        assert started is not None
        self.push(time.perf_counter() - started)

    def push(self, seconds: float) -> None:
        """Record one duration [s]."""
        self._seconds.append(seconds)
        self.total_s += seconds
        self.count += 1

    def push_units_processed(self, units: float) -> None:
        """Record the units (rows, steps) processed in the last duration."""
        self._units.append(units)

    def has_units_processed(self) -> bool:
        return bool(self._units)

    @property
    def mean(self) -> float:
        """Mean duration [s] of the window; 0 without a recorded duration."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else 0.0

    @property
    def mean_throughput(self) -> float:
        """Units per second over the window; 0 without a recorded duration."""
        seconds = sum(self._seconds)
        return sum(self._units) / seconds if seconds else 0.0


_FIELDS: Fields = {
    "counters": dict[str, Amount],
    "records": dict[str, dict[str, Any]],
}


class Counters(defaultdict[str, int]):
    """Counters by name; 0 before the first increase.

    Reading a name that RLlib uses for a counter raises a KeyError with the name of flowrl.
    """

    def __missing__(self, name: str) -> int:
        other = INFO_COUNTERS.get(name, name)
        if other != name:
            raise KeyError(f"no counter {name!r}: use {other!r}")
        return super().__missing__(name)


class MetricsContext:
    """The metrics of one plan.

    Attributes:
        counters: name -> int, never decreasing.
        timers: name -> Timer.
        info: name -> number, text, list or dict, reported in `info` of results; not saved.
        operators: the operators of the plan, each after the operators whose items it receives.
        on_lost: functions called with each item that is lost to an exception in an operator.
        journal: records or replays decisions of the plan that depend on time; None does neither.
    """

    def __init__(self) -> None:
        self.counters = Counters(int)
        self.timers: defaultdict[str, Timer] = defaultdict(Timer)
        self.info: dict[str, Any] = {}
        self.operators: list[Any] = []
        self._records: dict[str, Any] = {}  # name of a class -> its instance
        self._record_states: dict[str, Any] = {}  # loaded, of instances that do not exist yet
        self.on_lost: list[Any] = []
        self.journal: Journal | None = None

    def singleton(self, cls: type[R]) -> R:
        """Return the plan's single instance of `cls`, created at the first call.

        Its `state_dict` is part of the state of this context.
        """
        name = cls.__name__
        if name not in self._records:
            record: Any = cls()
            if name in self._record_states:
                record.load_state_dict(self._record_states[name])
                del self._record_states[name]
            self._records[name] = record
        found: R = self._records[name]
        return found

    def report_lost(self, item: Any) -> None:
        """Call the functions of `on_lost` with an item that is lost to an exception."""
        for callback in self.on_lost:
            callback(item)

    def check_counters(self) -> None:
        """Check that all counters can be reported, saved and restored.

        Raises:
            TypeError: a name is not a string.
            ValueError: a value is negative or not a number.
        """
        for name, value in self.counters.items():
            if not isinstance(name, str):
                raise TypeError(f"the name of a counter must be a string, got {name!r}")
            if isinstance(value, bool) or not isinstance(value, Real) or not value >= 0:
                raise ValueError(
                    f"the counter {name!r} is {value!r}: counters are numbers of at least 0; put "
                    "other numbers and texts into `info` of the metrics"
                )

    def state_dict(self) -> dict[str, Any]:
        records = {name: record.state_dict() for name, record in self._records.items()}
        return {
            "counters": dict(self.counters),
            "records": {**self._record_states, **records},
        }

    def check_state(self, state: Any) -> None:
        """Check that `load_state_dict` accepts a state.

        Raises:
            StateError: it does not.
        """
        check_state(state, _FIELDS, "metrics")
        for record_name, record in self._records.items():
            if record_name in state["records"]:
                record.check_state(state["records"][record_name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters.clear()
        self.counters.update(state["counters"])
        self._record_states = dict(state["records"])
        for name in self._records.keys() & self._record_states.keys():
            self._records[name].load_state_dict(self._record_states.pop(name))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "on_lost": [], "journal": None, "operators": []}


def get_metrics() -> MetricsContext:
    """Return the context of the plan that this thread is pulling.

    Raises:
        ValueError: outside a pull.
    """
    context = active_context.get()
    if context is None:
        raise ValueError(
            "there is no metrics context outside an iterator: call this in an operator while its "
            "plan is being pulled, or read `iterator.metrics` of the plan"
        )
    return context


def current_metrics() -> MetricsContext | None:
    """Return the context of the plan that this thread is pulling, None outside a pull."""
    return active_context.get()


def current_journal() -> Journal | None:
    """Return the journal of the plan that this thread is pulling; None if it has none."""
    context = active_context.get()
    return None if context is None else context.journal


def count_bytes_between_nodes(num_bytes: int) -> None:
    """Add to the counter `num_bytes_between_nodes` of the plan that this thread is pulling."""
    metrics = current_metrics()
    if metrics is not None and num_bytes:
        metrics.counters["num_bytes_between_nodes"] += num_bytes


@contextmanager
def metrics_scope(context: MetricsContext) -> Iterator[MetricsContext]:
    """Make `context` the current one, to call operators outside a plan."""
    token = active_context.set(context)
    try:
        yield context
    finally:
        active_context.reset(token)
