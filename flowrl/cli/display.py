"""Print the progress and the errors of a run."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import flowrl
from flowrl.cli.stop_rules import StopRules
from flowrl.settings import ConfigError

TERMINAL_INTERVAL_S = 0.25  # between two updates on a terminal
PLAIN_INTERVAL_S = 5.0  # between two lines elsewhere
RATE_WINDOW = 50  # iterations that steps/s are averaged over
PROGRESS_STATS = ("policy_loss", "vf_loss", "entropy", "mean_q", "mean_logp")
_PACKAGE = f"{Path(flowrl.__file__).parent}{os.sep}"


class ProgressLine:
    """A line that is updated in place on a terminal, and printed every few seconds elsewhere."""

    def __init__(self, stop: StopRules):
        self._stop = stop
        self._is_terminal = sys.stdout.isatty()
        self._last_update = 0.0
        self._last_line = ""
        self._history: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)  # time [s], env steps
        self._status: Any = None

    def add(self, result: dict[str, Any]) -> None:
        """Record a result and update the line if it is time."""
        now = time.perf_counter()
        self._history.append((now, result["timesteps_total"]))
        interval = TERMINAL_INTERVAL_S if self._is_terminal else PLAIN_INTERVAL_S
        if now - self._last_update < interval:
            return
        self._last_update = now
        line = self._last_line = self._format(result)
        if not self._is_terminal:
            print(line, flush=True)
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console().status(line)
            self._status.start()
        self._status.update(line)

    def _format(self, result: dict[str, Any]) -> str:
        steps = result["timesteps_total"]
        # the rate leaves out the first iteration, in which workers and environments start
        (start, steps_at_start), (now, _) = self._history[0], self._history[-1]
        rate = (steps - steps_at_start) / max(now - start, 1e-9)
        max_steps = self._stop.timesteps
        parts = [
            f"iter {result['training_iteration']}",
            f"{steps:,}{f' of {max_steps:,}' if max_steps else ''} env steps",
        ]
        if rate:
            parts.append(f"{rate:,.0f} steps/s")
        if result["episodes_in_window"]:
            goal = f" (goal {self._stop.reward:g})" if self._stop.reward is not None else ""
            parts.append(f"return {result['episode_reward_mean']:.1f}{goal}")
            by_policy = result["policy_reward_mean"]
            if len(by_policy) > 1:
                parts.append(" ".join(f"{pid} {mean:.1f}" for pid, mean in by_policy.items()))
        if "evaluation" in result:
            parts.append(f"evaluation {result['evaluation']['episode_reward_mean']:.1f}")
        for stats in result["learners"].values():
            parts += [f"{name} {stats[name]:.3g}" for name in PROGRESS_STATS if name in stats]
        if max_steps and rate > 0:
            parts.append(f"at most {max(max_steps - steps, 0) / rate:,.0f} s left")
        return " | ".join(parts)

    def finish(self, result: dict[str, Any] | None = None) -> None:
        """Stop updating; print the line of a result unless it was already printed."""
        if self._status is not None:
            self._status.stop()
        if result is None or not self._history:
            return
        line = self._format(result)
        if line != self._last_line:
            print(line)


def program_name() -> str:
    """Return how the user calls flowrl: by name if it is on the PATH, else by its path."""
    script, on_path = Path(sys.argv[0]), shutil.which("flowrl")
    if script.name != "flowrl" or (on_path and Path(on_path).resolve() == script.resolve()):
        return "flowrl"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def print_failure(error: BaseException) -> None:
    """Print an error with the user's part of its traceback and its notes.

    Invalid settings are printed as one line.
    """
    if isinstance(error, ConfigError):
        print(f"flowrl: {error}", file=sys.stderr)
        return
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    shown = [f for f in frames if not f.filename.startswith((_PACKAGE, "<frozen importlib"))]
    print("Traceback (without flowrl's frames):", file=sys.stderr)
    print("".join(traceback.format_list(shown)), end="", file=sys.stderr)
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
