"""ProgressTable: print the progress of a run as the rows of a table."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from flowrl.trainer.runs.formatting import format_number, format_seconds
from flowrl.trainer.runs.progress_rate import ProgressRate
from flowrl.trainer.runs.stop_rules import StopRules

ROW_INTERVAL_S = 5.0  # approximate seconds between two rows
MAX_INTERVAL_S = 10.0  # without a new row or live line, print the env steps so far
LIVE_INTERVAL_S = 0.25  # between two updates of the live line on a terminal
ROWS_PER_HEADER = 20
TABLE_STATS = ("policy_loss", "vf_loss", "entropy", "mean_q", "mean_logp")
_SEPARATOR = "  "


def can_redraw() -> bool:
    """Return whether stdout is a terminal on which rich can replace the lines that it has drawn."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stdout.isatty() and not is_dumb


class ProgressTable:
    """Print a row every few seconds, at regular env steps.

    The first result has a row, too, unless a terminal shows it in the line below the table. The
    distance between rows is the smallest of 1, 2, 5, 10, 20, … env steps that takes at least
    ROW_INTERVAL_S. On a terminal, a line below the table shows the newest result. If no result
    arrives for MAX_INTERVAL_S, this line (or a row, without a terminal) shows the env steps sampled
    so far.

    Args:
        stop: the run's stop rules, for the time that is left.
        counters: the plan's counters, such as `num_env_steps_sampled`.
        iteration: iterations so far, in a run that is continued.
        evaluates: whether the run has evaluations, so that the table has a column for them.
    """

    def __init__(
        self, stop: StopRules, counters: dict[str, Any], iteration: int = 0, evaluates: bool = False
    ):
        self._counters = counters
        self._empty_result = {**_EMPTY_RESULT, "training_iteration": iteration}
        self._is_terminal = can_redraw()
        self._width = shutil.get_terminal_size((80, 24)).columns if self._is_terminal else 80
        self._rate = ProgressRate(stop)
        self._last_row = self._last_live = time.perf_counter()
        self._step_between_rows = 0  # env steps; 0 until the rate is known
        self._next_row_at = 0  # env steps
        self._result: dict[str, Any] | None = None
        self._evaluation: dict[str, Any] | None = None  # the newest one
        self._evaluates = evaluates
        self._printed: dict[str, str] | None = None  # cells of the last row
        self._last_steps = 0  # env steps of the last row without a result
        self._header: list[str] = []
        self._rows_since_header = 0
        self._live: Any = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_while_waiting, daemon=True)
        self._thread.start()

    def add(self, result: dict[str, Any]) -> None:
        """Record a result, and print a row if it is due."""
        now, steps = time.perf_counter(), result["timesteps_total"]
        with self._lock:
            self._rate.add(result)
            self._result = result
            self._evaluation = result.get("evaluation", self._evaluation)
            if self._printed is None and not self._is_terminal:
                self._print_row(self._cells(result))
            if steps >= self._next_row_at and now - self._last_row >= ROW_INTERVAL_S / 5:
                if self._step_between_rows or self._rate.seconds >= ROW_INTERVAL_S:
                    if self._live is not None:  # must not show an older result than the row
                        self._update_live(self._cells(result))
                    self._print_row(self._cells(result))
                self._choose_next_row(steps)
            if self._is_terminal and now - self._last_live >= LIVE_INTERVAL_S:
                self._last_live = now
                self._update_live(self._cells(result))

    def finish(self, result: dict[str, Any] | None = None) -> None:
        """Stop updating; print the row of the last result unless it was already printed."""
        self._ended.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()
        result = result or self._result
        if result is not None:
            cells = self._cells(result, ended=True)
            if self._printed is None or self._printed["iter"] != cells["iter"]:
                self._print_row(cells)

    def _choose_next_row(self, steps: int) -> None:
        rate = self._rate.steps_per_s()
        if rate:
            wanted = max(rate * ROW_INTERVAL_S, self._step_between_rows)
            magnitude = 10 ** math.floor(math.log10(max(wanted, 1)))
            self._step_between_rows = next(
                int(factor * magnitude) for factor in (1, 2, 5, 10) if factor * magnitude >= wanted
            )
        distance = max(self._step_between_rows, 1)
        self._next_row_at = (steps // distance + 1) * distance

    def _print_while_waiting(self) -> None:
        """Print the env steps so far whenever nothing was printed for a while."""
        while not self._ended.wait(1.0):
            # the next row raises the error of a closed output in the main thread
            with self._lock, suppress(BrokenPipeError):
                shown = self._last_live if self._is_terminal else self._last_row
                if time.perf_counter() - max(shown, self._last_row) < MAX_INTERVAL_S:
                    continue
                steps = self._counters.get("num_env_steps_sampled", 0)
                if steps == self._last_steps and not self._is_terminal:
                    continue  # the last row shows this number
                self._last_steps = steps
                result = {**(self._result or self._empty_result), "timesteps_total": steps}
                cells = self._cells(result)
                if self._is_terminal:
                    self._update_live(cells)
                else:
                    self._print_row(cells)

    def _print_row(self, cells: dict[str, str]) -> None:
        names = self._columns(cells)
        if names != self._header or self._rows_since_header >= ROWS_PER_HEADER:
            self._header, self._rows_since_header = names, 0
            print(_SEPARATOR.join(name.rjust(_width(name)) for name in names))
        row = _SEPARATOR.join(cells[name].rjust(_width(name)) for name in names)
        print(row.rstrip(), flush=True)
        self._rows_since_header += 1
        self._last_row, self._printed = time.perf_counter(), cells

    def _columns(self, cells: dict[str, str]) -> list[str]:
        """Return the columns that fit into the width; the last ones are left out first."""
        chosen: list[str] = []
        free = self._width
        for name in sorted(cells, key=lambda name: name not in _FIRST_COLUMNS):
            needed = _width(name) + len(_SEPARATOR)
            if needed <= free + len(_SEPARATOR):
                chosen.append(name)
                free -= needed
        return [name for name in cells if name in chosen]

    def _update_live(self, cells: dict[str, str]) -> None:
        fields = [f"{name} {cells[name]}" for name in self._columns(cells) if cells[name]]
        # a line that wraps would leave rows behind: beside it are the spinner and perhaps ^C
        width = shutil.get_terminal_size((80, 24)).columns - 6
        while len(text := " | ".join(fields)) > width and fields:
            fields.pop()
        if self._live is None:
            from rich.console import Console

            self._live = Console().status(text)
            self._live.start()
        self._live.update(text)

    def _cells(self, result: dict[str, Any], ended: bool = False) -> dict[str, str]:
        """Return column -> text of the row for a result."""
        steps = result["timesteps_total"]
        rate = self._rate.steps_per_s()
        has_episodes = result["episodes_in_window"] > 0
        cells = {
            "iter": f"{result['training_iteration']:,}",
            "env steps": f"{steps:,}",
            "steps/s": f"{rate:,.0f}" if rate else "",
            "return": format_number(result["episode_reward_mean"]) if has_episodes else "",
            "length": format_number(result["episode_len_mean"]) if has_episodes else "",
        }
        by_policy = result["policy_reward_mean"]
        if len(by_policy) > 1:
            means = {policy_id: format_number(mean) for policy_id, mean in by_policy.items()}
            cells = {**cells, **means, **cells}  # a policy may have the name of a column
        if self._evaluation is not None:
            cells["evaluation"] = format_number(self._evaluation["episode_reward_mean"])
        elif self._evaluates:
            cells["evaluation"] = ""
        for stats in result["learners"].values():
            for name in TABLE_STATS:
                if name in stats and name not in cells:
                    cells[name] = format_number(stats[name])
        left = None if ended else self._rate.seconds_left(result)
        cells["time left"] = "" if left is None else format_seconds(left)
        return cells


_FIRST_COLUMNS = ("iter", "env steps", "steps/s", "return", "length", "time left")
_WIDTHS = {"iter": 6, "env steps": 11, "steps/s": 7, "return": 7, "length": 6, "time left": 9}
_EMPTY_RESULT: dict[str, Any] = {
    "episodes_in_window": 0,
    "policy_reward_mean": {},
    "learners": {},
    "episode_reward_mean": math.nan,
    "episode_len_mean": math.nan,
}


def _width(name: str) -> int:
    return _WIDTHS.get(name, max(len(name), 8))
