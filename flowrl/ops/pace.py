"""Operators that say when: filters on the steps sampled and the time gone by."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from flowrl.iter import _get_shared_metrics


@dataclass
class WaitUntilTimestepsElapsed:
    """filter, any item: true once `target_num_timesteps` env steps have been sampled."""

    target_num_timesteps: int

    def __post_init__(self) -> None:
        _at_least_0("target_num_timesteps", self.target_num_timesteps)

    def __call__(self, item: Any) -> bool:
        return _steps() >= self.target_num_timesteps


@dataclass
class OncePerTimestepsElapsed:
    """filter, any item: true once for every `delay_steps` env steps sampled, from the first item
    on."""

    delay_steps: int
    _last: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _at_least_0("delay_steps", self.delay_steps)

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
    """filter, any item: true once in every `delay` seconds, from the first item on."""

    delay: float
    _last: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _at_least_0("delay", self.delay)

    def __call__(self, item: Any) -> bool:
        now = time.monotonic()
        if self._last is not None and now - self._last < self.delay:
            return False
        self._last = now
        return True


def _steps() -> int:
    return int(_get_shared_metrics().counters["num_env_steps_sampled"])


def _at_least_0(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} is a number of at least 0, got {value!r}")
