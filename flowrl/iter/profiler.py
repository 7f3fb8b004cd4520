"""Profiler: the seconds that each stage of a plan is busy, waiting and blocked.

A timed pull of the plan runs all stages through timing wrappers; other pulls have no overhead. If
a pull takes long compared with its timing, every pull is timed; in a stream of quick pulls a timed
one represents up to MAX_INTERVAL pulls. If quick pulls become slow, the next pull after
MAX_INTERVAL_S is timed.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from flowrl.iter.stage import NOT_READY, Pull, Stage, walk
from flowrl.iter.waiting import Waiter
from flowrl.process_usage import resident_bytes

MAX_INTERVAL = 64  # maximum number of pulls per timed pull
MAX_INTERVAL_S = 1.0  # approximate maximum of the seconds between two timed pulls
MEAN_S = 10.0  # the mean time of a pull is taken over about this many seconds
TIMING_S = 4e-6  # seconds for timing the pull of one stage
MAX_OVERHEAD = 0.007  # maximum share of the time since the start that timing takes
MEMORY_S = 4e-6  # seconds for measuring the memory before and after the pull of one stage
MAX_MEMORY_OVERHEAD = 0.003  # maximum share of the time that measuring the memory takes
MEMORY_INTERVAL_S = 0.05  # minimum seconds between two pulls whose memory is measured


# stage, time of perf_counter at the start, seconds, whether it returned an item
OnPull = Callable[[Stage, float, float, bool], None]
# the pull of the last stage, and for each stage those of its parents
Wiring = tuple[Pull, list[tuple[Stage, list[Pull]]]]


class StageTimes:
    """Seconds in the pulls of one stage, in its own code, and waiting; memory in its own code."""

    __slots__ = ("busy_s", "grown_bytes", "pull_s", "starved", "waited_s")

    def __init__(self) -> None:
        self.pull_s = 0.0
        self.busy_s = 0.0
        self.waited_s = 0.0  # while the whole plan waits, after NOT_READY
        self.starved = False
        self.grown_bytes = 0.0


class Profiler:
    """Times the pulls of the plan that ends in `root`.

    `pulls_until_timed` counts down to the next pull that must go through `pull`. If that takes too
    long, `is_late` is True, and the next pull must go through it. `on_pull`, if set, is called
    after each timed pull of a stage with the stage, the time of its start, its seconds and whether
    it returned an item.
    """

    def __init__(self, root: Stage):
        self.stages = list(walk(root))
        self._times = {stage: StageTimes() for stage in self.stages}
        self._started = time.perf_counter()
        self.on_pull: OnPull | None = None
        self.pulls_until_timed = 1
        self.is_late = False
        self._interval = 1
        self._weight = 1.0
        self._seconds = 0.0  # of the last pulls, with the time outside of the plan
        self._pulls = 0.0  # number of these pulls
        self._last_end = self._started  # of the last timed pull
        self._timed_pulls = 0
        self._timed_stages = 0  # timed pulls, counted for each stage
        self._random = random.Random(0)
        self._parents_s = 0.0  # in the parents of the stage being timed
        self._parents_bytes = 0  # growth of the process in the parents of the stage being measured
        # the stages that are being pulled: start, and seconds in other parents before
        self._stack: list[tuple[Stage, float, float]] = []
        self._waiting_since: float | None = None
        self._pulls_since_memory = 0
        self._memory_due = 0.0
        timed = {stage: self._timed_pull(stage) for stage in self.stages}
        measured = {stage: self._measured_pull(stage, timed[stage]) for stage in self.stages}
        self._plain = self._wiring({stage: stage.pull for stage in self.stages})
        self._timed = self._wiring(timed)
        self._measured = self._wiring(measured)

    def _wiring(self, pulls: dict[Stage, Pull]) -> Wiring:
        """Return the plan's pull, and for each stage those of its parents."""
        parents = [(stage, [pulls[parent] for parent in stage.parents]) for stage in self.stages]
        return pulls[self.stages[0]], [entry for entry in parents if entry[1]]

    def _timed_pull(self, stage: Stage) -> Pull:
        """Return a function that pulls a stage and adds up its seconds."""
        times, pull, clock, stack = self._times[stage], stage.pull, time.perf_counter, self._stack

        def timed(block: bool) -> Any:
            siblings_s, self._parents_s = self._parents_s, 0.0
            waited, started = stage.waited_s, clock()
            stack.append((stage, started, siblings_s))
            item = NOT_READY
            try:
                item = pull(block)
                if item is NOT_READY:
                    times.starved = True
                return item
            finally:
                stack.pop()
                seconds = clock() - started
                weight = self._weight
                times.pull_s += seconds * weight
                times.busy_s += (seconds - self._parents_s - (stage.waited_s - waited)) * weight
                self._parents_s = siblings_s + seconds
                self._timed_stages += 1
                if self.on_pull is not None:
                    self.on_pull(stage, started, seconds, item is not NOT_READY)

        return timed

    def _measured_pull(self, stage: Stage, timed: Pull) -> Pull:
        """Return a function that in addition adds up the growth of the memory."""
        times = self._times[stage]

        def measured(block: bool) -> Any:
            siblings, self._parents_bytes = self._parents_bytes, 0
            before = resident_bytes()
            try:
                return timed(block)
            finally:
                grown = resident_bytes() - before
                times.grown_bytes += (grown - self._parents_bytes) * self._pulls_since_memory
                self._parents_bytes = siblings + grown

        return measured

    def pull(self, block: bool) -> Any:
        """Pull the plan once with timing; this represents all pulls since the last timed one."""
        self._parents_s = 0.0
        pulls = max(self._interval - self.pulls_until_timed, 1)
        is_late, self.is_late = self.is_late, False
        before = self._totals() if is_late else []
        self._weight = 1 if is_late else pulls
        self._pulls_since_memory += pulls
        started = time.perf_counter()
        measures_memory = started >= self._memory_due
        stages_before = self._timed_stages
        pull = _wire(self._measured if measures_memory else self._timed)
        try:
            return pull(block)
        finally:
            if measures_memory:
                self._pulls_since_memory = 0
                cost_s = MEMORY_S * (self._timed_stages - stages_before)
                interval_s = max(MEMORY_INTERVAL_S, cost_s / MAX_MEMORY_OVERHEAD)
                self._memory_due = time.perf_counter() + interval_s
            now = time.perf_counter()
            if is_late:  # it may be slower than the pulls before, which it represents
                longest = (now - self._last_end) / max(now - started, 1e-9)
                self._weight_pull(before, min(pulls, longest))
            self._timed_pulls += 1
            self._seconds += now - self._last_end
            self._pulls += pulls
            self._last_end = now
            self._interval = self.pulls_until_timed = self._next_interval()
            _wire(self._plain)

    def _totals(self) -> list[tuple[StageTimes, float, float]]:
        """Return the seconds of each stage so far, in its pulls and in its own code."""
        return [(times, times.pull_s, times.busy_s) for times in self._times.values()]

    def _weight_pull(self, before: list[tuple[StageTimes, float, float]], weight: float) -> None:
        """Multiply the seconds that the last pull has added by a weight.

        Args:
            before: the result of `_totals` before the pull.
            weight: number of pulls that it represents.
        """
        for times, pull_s, busy_s in before:
            times.pull_s = pull_s + (times.pull_s - pull_s) * weight
            times.busy_s = busy_s + (times.busy_s - busy_s) * weight

    def _next_interval(self) -> int:
        """Return the number of pulls until the next timed one, so that timing takes at most
        MAX_OVERHEAD of the time."""
        if self._seconds > MEAN_S:
            self._seconds, self._pulls = self._seconds / 2, self._pulls / 2
        mean_s = max(self._seconds / self._pulls, 1e-9)
        timing_s = TIMING_S * self._timed_stages / self._timed_pulls
        longest = min(MAX_INTERVAL, int(MAX_INTERVAL_S / mean_s))
        mean_interval = min(int(timing_s / (MAX_OVERHEAD * mean_s)), longest)
        # random, so that it does not coincide with something periodic in the plan
        return self._random.randrange(1, 2 * mean_interval) if mean_interval > 1 else 1

    def wait(self, waiter: Waiter, waits: list[Any]) -> None:
        """Wait after a timed pull that returned NOT_READY; count it for every starved stage."""
        self._waiting_since = started = time.perf_counter()
        waiter.wait(waits)
        self._waiting_since = None
        seconds = time.perf_counter() - started
        for times in self._times.values():
            if times.starved:
                times.waited_s += seconds
                times.starved = False

    def _in_progress(self, stage: Stage, now: float) -> tuple[float, float]:
        """Return the seconds in own code, and in total, of a pull of a stage that has not ended.

        May be called in another thread.
        """
        stack = [*self._stack, (None, now, self._parents_s)]
        for (pulled, started, _), (_, end, parents_s) in itertools.pairwise(stack):
            if pulled is stage:
                since = stage.waiting_since
                waiting_s = 0.0 if since is None else now - since
                return max(end - started - parents_s - waiting_s, 0.0), now - started
        return 0.0, 0.0

    def times(self, stage: Stage) -> dict[str, float]:
        """Return the seconds of a stage since the start, and their shares, which sum to 1.

        `busy_s`: in its own code; `waiting_s`: waiting for its parents; `blocked_s`: not pulled;
        `busy`, `waiting`, `blocked`: the shares. `grown_bytes`: by how much the memory of the
        process has grown in its own code (an estimate; 0 if the system is not Linux).
        """
        times, now = self._times[stage], time.perf_counter()
        self.is_late = now - self._last_end > MAX_INTERVAL_S
        total = max(now - self._started, 1e-9)
        busy_s, pull_s = self._in_progress(stage, now)
        since = self._waiting_since
        waited_s = times.waited_s + (now - since if since is not None and times.starved else 0.0)
        busy_s, pull_s = times.busy_s + busy_s, times.pull_s + pull_s
        busy = min(max(busy_s, 0.0), total)
        waiting = min(max(pull_s - busy_s, 0.0) + waited_s, total - busy)
        seconds = {"busy": busy, "waiting": waiting, "blocked": total - busy - waiting}
        return {
            **{f"{name}_s": value for name, value in seconds.items()},
            **{name: value / total for name, value in seconds.items()},
            "grown_bytes": times.grown_bytes,
        }


def _wire(wiring: Wiring) -> Pull:
    """Let the stages pull their parents through a wiring; return the pull of the last stage."""
    pull, parents = wiring
    for stage, pulls in parents:
        stage.wire(pulls)
    return pull
