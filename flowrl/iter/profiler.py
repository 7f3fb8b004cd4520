"""Where the time of a plan goes: seconds busy, waiting and blocked, stage by stage.

Some pulls of the plan are timed, in all stages at once, by pulling through timing wrappers; the
others cost nothing extra. Where a pull takes long compared with its timing all are timed; in a
stream of quick ones each timed pull stands for up to EVERY.
"""

from __future__ import annotations

import random
import time
from typing import Any

from flowrl.iter.stage import NOT_READY, Pull, Stage, walk
from flowrl.iter.waiting import Waiter

EVERY = 64  # pulls that a timed one stands for, at most
TIMING_S = 1e-6  # what timing a pull costs per stage
COST = 0.01  # of the time since the start that timing may cost


class Cell:
    """Of one stage: seconds in its pulls, of these in its own code, and waiting."""

    __slots__ = ("busy_s", "inside_s", "starved", "waited_s")

    def __init__(self) -> None:
        self.inside_s = 0.0
        self.busy_s = 0.0
        self.waited_s = 0.0  # for the whole plan's sake, after NOT_READY
        self.starved = False


class Profiler:
    """Times the pulls of the plan that ends in `root`.

    `next_timed` counts down to the next pull to be made through `pull`.
    """

    def __init__(self, root: Stage):
        self.stages = list(walk(root))
        self.cells = {stage: Cell() for stage in self.stages}
        self.started = time.perf_counter()
        self.next_timed = 1
        self._interval = 1
        self._weight = 1
        self._pulls = 0
        self._random = random.Random(0)
        self._inner = 0.0
        timed = {stage: self._wrap(stage) for stage in self.stages}
        self._root = timed[root]
        self._wirings = [
            (
                stage,
                [parent.pull for parent in stage.parents],
                [timed[parent] for parent in stage.parents],
            )
            for stage in self.stages
            if stage.parents
        ]

    def _wrap(self, stage: Stage) -> Pull:
        cell, pull, clock = self.cells[stage], stage.pull, time.perf_counter

        def timed(block: bool) -> Any:
            outer, self._inner = self._inner, 0.0
            waited, began = stage.waited_s, clock()
            try:
                item = pull(block)
                if item is NOT_READY:
                    cell.starved = True
                return item
            finally:
                inside = clock() - began
                weight = self._weight
                cell.inside_s += inside * weight
                cell.busy_s += (inside - self._inner - (stage.waited_s - waited)) * weight
                self._inner = outer + inside

        return timed

    def pull(self, block: bool) -> Any:
        """Pull the plan once, timed; it stands for the pulls since the last one that was."""
        self._inner = 0.0
        self._weight = max(self._interval - self.next_timed, 1)
        for stage, _, timed in self._wirings:
            stage.wire(timed)
        try:
            return self._root(block)
        finally:
            self._pulls += self._weight
            mean = (time.perf_counter() - self.started) / self._pulls
            affordable = min(int(TIMING_S * len(self.stages) / (COST * mean)), EVERY)
            # at random, so that it does not keep time with something in the plan that recurs
            interval = self._random.randrange(1, 2 * affordable) if affordable > 1 else 1
            self._interval = self.next_timed = interval
            for stage, plain, _ in self._wirings:
                stage.wire(plain)

    def wait(self, waiter: Waiter, waits: list[Any]) -> None:
        """Wait after a timed pull that gave nothing: so does every stage that had nothing."""
        began = time.perf_counter()
        waiter.wait(waits)
        seconds = time.perf_counter() - began
        for cell in self.cells.values():
            if cell.starved:
                cell.waited_s += seconds
                cell.starved = False

    def of(self, stage: Stage) -> dict[str, float]:
        """Seconds of a stage since the start: `busy_s` in its own code, `waiting_s` for what it
        pulls from, `blocked_s` not asked for anything; and their shares, which sum to 1."""
        cell = self.cells[stage]
        total = max(time.perf_counter() - self.started, 1e-9)
        busy = min(max(cell.busy_s, 0.0), total)
        waiting = min(max(cell.inside_s - cell.busy_s, 0.0) + cell.waited_s, total - busy)
        seconds = {"busy": busy, "waiting": waiting, "blocked": total - busy - waiting}
        return {
            **{f"{name}_s": value for name, value in seconds.items()},
            **{name: value / total for name, value in seconds.items()},
        }
