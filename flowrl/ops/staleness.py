"""What says when: filters on the steps sampled and the time gone by, a limit on the steps ahead."""

from __future__ import annotations

import time
from collections import deque
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


class StalenessLimit:
    """How far sampling may be ahead of training: so little that no fragment gets old.

    A fragment is asked for only while fewer than (max_batches + 1) train batches of env steps were
    asked for since as many steps were trained on (or dropped) as at the time at which the oldest of
    the fragments was asked for that are not trained on yet. So at most `max_batches` train batches,
    of at least a fragment each, come between the weights of a fragment and its training: a
    staleness control as in AReaL (Fu et al. 2025, arXiv 2505.24298), made to hold for the slowest
    worker, too. Counts `num_sampling_waits`.

    For plans with one source of fragments, each of which is trained on once. What an operator's
    error loses is not waited for; a filter that leaves fragments out is to count their env steps as
    `num_env_steps_dropped`. Of fragments that a saved plan holds the age is not known any more.

    Args:
        batch_size: env steps of a train batch, at least.
        max_batches: see above; 0 samples and trains in turn.
        steps_per_item: env steps of a fragment, about (what it has is counted when it comes);
            ParallelRollouts knows.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(self, batch_size: int, max_batches: int, steps_per_item: int = 1):
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("max_batches", max_batches, 0),
            ("steps_per_item", steps_per_item, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is a whole number from {least}, got {value!r}")
        self.batch_size = batch_size
        self.max_batches = max_batches
        self.steps_per_item = steps_per_item
        self._received: deque[tuple[int, int]] = deque()  # steps up to here, mark
        self._sampled: int | None = None
        self._waits = False
        self._lost = 0
        self._told: Any = None  # the context that tells what was lost

    def mark(self) -> int:
        """Env steps that are done with: trained on, dropped, or lost."""
        metrics = _get_shared_metrics()
        if metrics is not self._told:
            metrics.on_lost.append(self._note_lost)
            self._told = metrics
        counters = metrics.counters
        done = counters["num_env_steps_trained"] + counters["num_env_steps_dropped"]
        return int(done + self._lost)

    def _note_lost(self, item: Any) -> None:
        if hasattr(item, "env_steps"):
            self._lost += item.env_steps()

    def received(self, mark: int, item: Any) -> None:
        """A fragment has come."""
        self._sampled = self._count() + item.env_steps()
        self._received.append((self._sampled, mark))

    def may_request(self, in_flight: int, oldest: int | None) -> bool:
        """Whether to ask for another one."""
        done = self.mark()
        while self._received and self._received[0][0] <= done:
            self._received.popleft()
        since = done if oldest is None else min(done, oldest)
        if self._received:
            since = min(since, self._received[0][1])
        asked = self._count() + in_flight * self.steps_per_item
        waits = asked >= since + (self.max_batches + 1) * self.batch_size
        if not in_flight and self._count() - done < self.batch_size:
            waits = False  # what has come and is to be trained on next is no train batch yet
        if waits and not self._waits:
            _get_shared_metrics().counters["num_sampling_waits"] += 1
        self._waits = waits
        return not waits

    def _count(self) -> int:
        if self._sampled is None:  # what a run that goes on has sampled before
            self._sampled = int(_get_shared_metrics().counters["num_env_steps_sampled"])
        return self._sampled

    def __repr__(self) -> str:
        return f"StalenessLimit({self.batch_size}, {self.max_batches})"


def _steps() -> int:
    return int(_get_shared_metrics().counters["num_env_steps_sampled"])


def _at_least_0(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} is a number of at least 0, got {value!r}")
