"""Filters of a stream by env steps sampled and by elapsed time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flowrl.iter import _get_shared_metrics
from flowrl.iter.metrics import current_journal
from flowrl.setting_values import check_int, check_number
from flowrl.state_schema import Fields, Natural


@dataclass
class WaitUntilTimestepsElapsed:
    """filter, any item: True once `target_num_timesteps` env steps have been sampled.

    Raises:
        ValueError: the number is not an int of at least 0.
    """

    chained_with: ClassVar[str] = "filter"

    target_num_timesteps: int

    def __post_init__(self) -> None:
        check_int("target_num_timesteps", self.target_num_timesteps, 0)

    def __call__(self, item: Any) -> bool:
        return _steps() >= self.target_num_timesteps


@dataclass
class OncePerTimestepsElapsed:
    """filter, any item: True for the first item, then once per `delay_steps` env steps sampled.

    Raises:
        ValueError: the number is not an int of at least 0.
    """

    state_fields: ClassVar[Fields] = {"last": Natural | None}

    chained_with: ClassVar[str] = "filter"

    delay_steps: int
    _last: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_int("delay_steps", self.delay_steps, 0)

    def __call__(self, item: Any) -> bool:
        now = _steps()
        if self._last is not None and now - self._last < self.delay_steps:
            return False
        self._last = now
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state["last"]


@dataclass
class OncePerTimeInterval:
    """filter, any item: True for the first item, then once per `delay` seconds.

    Raises:
        ValueError: the number is not a number of at least 0.
    """

    chained_with: ClassVar[str] = "filter"

    delay: float
    _last: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("delay", self.delay, 0)

    def __call__(self, item: Any) -> bool:
        now = time.monotonic()
        due = self._last is None or now - self._last >= self.delay
        journal = current_journal()
        if journal is not None:
            due = bool(journal.plan_log.observe("OncePerTimeInterval", due))
        if due:
            self._last = now
        return due


def _steps() -> int:
    return int(_get_shared_metrics().counters["num_env_steps_sampled"])
