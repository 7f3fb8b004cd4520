"""LiveView: show a running training on a terminal.

What the program prints appears above the view, which keeps its last state
when the run ends.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrl.monitoring.activity import Activity, StageActivity
from flowrl.monitoring.monitor import Monitor
from flowrl.ops.inspection import before_breakpoint
from flowrl.trainer.runs.formatting import format_count, format_number, format_seconds
from flowrl.trainer.runs.progress_rate import ProgressRate
from flowrl.trainer.runs.stop_rules import StopRules

INTERVAL_S = 1.0  # between two updates; longer if an update takes long
MAX_SHARE = 0.005  # of the time that updates may take
MAX_RETURNS = 200  # kept for the sparkline; then every second one is removed
BAR_WIDTH = 20  # characters of the bar of an operator
SPARKLINE = "▁▂▃▄▅▆▇█"
QUEUES = ("queue_size", "queued", "rows", "inqueue_size")  # values of a stage that are shown
VIEW_STATS = ("total_loss", "policy_loss", "vf_loss", "entropy", "kl", "mean_q", "cur_lr")


class LiveView:
    """Shows a run; updated in a thread.

    Args:
        stop: the run's stop rules.
        monitor: measures the plan.
        console: where to show the run; None for standard output.
    """

    def __init__(self, stop: StopRules, monitor: Monitor, console: Console | None = None):
        self._monitor = monitor
        self._rate = ProgressRate(stop)
        self._result: Mapping[str, Any] | None = None
        self._evaluation: Mapping[str, Any] | None = None  # the newest one
        self._returns: list[float] = []
        self._keep_every, self._skipped = 1, 0
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self._stopped = threading.Event()
        before_breakpoint.append(self._pause)
        self._thread = threading.Thread(target=self._run, name="flowrl-view", daemon=True)
        self._thread.start()

    def add(self, result: Mapping[str, Any]) -> None:
        """Show another result."""
        self._rate.add(result)
        self._result = result
        self._evaluation = result.get("evaluation", self._evaluation)
        if result["episodes_in_window"]:
            self._skipped += 1
            if self._skipped >= self._keep_every:
                self._skipped = 0
                self._returns.append(result["episode_reward_mean"])
            if len(self._returns) > MAX_RETURNS:
                self._returns, self._keep_every = self._returns[::2], 2 * self._keep_every

    def finish(self, result: Mapping[str, Any] | None = None) -> None:
        """Show the last state, also after a breakpoint has stopped the view, and stop."""
        self._result = result or self._result
        if self._stopped.is_set():  # by a breakpoint
            self._console.print(self._safely_rendered(ended=True))
        self._pause()
        self._thread.join()

    def _pause(self) -> None:
        """Stop the updates: the terminal is needed for something else."""
        if not self._stopped.is_set():
            self._stopped.set()
            before_breakpoint.remove(self._pause)
            self._live.update(self._safely_rendered(ended=True), refresh=True)
            self._live.stop()

    def _run(self) -> None:
        interval = INTERVAL_S
        while not self._stopped.wait(interval):
            started = time.thread_time()
            self._live.update(self._safely_rendered(), refresh=True)
            interval = max(INTERVAL_S, (time.thread_time() - started) / MAX_SHARE)

    def _safely_rendered(self, ended: bool = False) -> RenderableType:
        """Return the view, or an error in drawing it, which must not end the training."""
        try:
            return self.render(ended)
        except Exception as error:
            return Text(f"the view cannot be drawn: {type(error).__name__}: {error}")

    # -- rendering ---------------------------------------------------------------------------------

    def render(self, ended: bool = False) -> RenderableType:
        """Return the view of the current state."""
        parts: list[RenderableType] = []
        result, activity = self._result, self._monitor.activity
        if result is None:
            parts.append(Text("waiting for the first result …", style="dim"))
        else:
            parts.append(self._summary(result, ended))
        if activity is not None:
            parts += [Text(), _operators(activity), Text()]
            if result is not None and any(worker.index for worker in activity.workers):
                parts.append(_workers(activity, result))
            parts.append(Text(activity.diagnosis, style="yellow"))
        return Group(*parts)

    def _summary(self, result: Mapping[str, Any], ended: bool) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        share, left = self._rate.share_done(result), self._rate.seconds_left(result)
        rate = self._rate.steps_per_s()
        steps = (
            f"iteration {result['training_iteration']:,}, {result['timesteps_total']:,} env steps"
        )
        speed = f", {rate:,.0f} per second" if rate else ""
        time_left = "" if left is None or ended else f", {format_seconds(left)} left"
        grid.add_row("progress", Text(f"{steps}{speed}{time_left}"))
        if share is not None:
            bar = Table.grid(padding=(0, 1))
            bar.add_row(ProgressBar(total=1.0, completed=share, width=40), Text(f"{share:.0%}"))
            grid.add_row("", bar)
        if result["episodes_in_window"]:
            mean = format_number(result["episode_reward_mean"])
            low, high = (format_number(result[f"episode_reward_{kind}"]) for kind in ("min", "max"))
            length = format_number(result["episode_len_mean"])
            line = sparkline(self._returns, 24)
            text = Text(f"{mean} ")
            text.append(line, style="green")
            text.append(f" {low} to {high}, length {length}", style="dim")
            grid.add_row("return", text)
        if self._evaluation is not None:
            mean = format_number(self._evaluation["episode_reward_mean"])
            grid.add_row("evaluation", f"{mean} in {self._evaluation['episodes']:,} episodes")
        for policy_id, stats in result["learners"].items():
            shown = [f"{n} {format_number(stats[n])}" for n in VIEW_STATS if n in stats]
            name = "learner" if len(result["learners"]) == 1 else policy_id
            grid.add_row(name, Text("  ".join(shown), overflow="ellipsis", no_wrap=True))
        return grid


def sparkline(values: list[float], width: int) -> str:
    """Return a line of characters whose heights show values, the newest at the right.

    Args:
        values: numbers; those that are not finite are left out.
        width: number of characters; several values share one if there are more.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    means = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, top = min(means), len(SPARKLINE) - 1
    spread = max(means) - low
    return "".join(SPARKLINE[round((m - low) / spread * top) if spread else 0] for m in means)


def _operators(activity: Activity) -> RenderableType:
    """Return a row per stage: items per second, a bar of its shares, its queue."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("operator", no_wrap=True, overflow="ellipsis")
    table.add_column("items/s", justify="right", no_wrap=True)
    table.add_column("█ busy ▒ waiting · blocked", no_wrap=True, min_width=BAR_WIDTH)
    table.add_column("busy", justify="right", no_wrap=True)
    table.add_column("queue", no_wrap=True)
    for stage in activity.stages:
        rate = format_number(stage.items / activity.seconds)
        table.add_row(stage.name, rate, _bar(stage), f"{stage.busy:.0%}", _queue(stage))
    return table


def _bar(stage: StageActivity) -> Text:
    busy = round(stage.busy * BAR_WIDTH)
    waiting = min(round(stage.waiting * BAR_WIDTH), BAR_WIDTH - busy)
    text = Text("█" * busy, style="green")
    text.append("▒" * waiting, style="blue")
    text.append("·" * (BAR_WIDTH - busy - waiting), style="dim")
    return text


def _queue(stage: StageActivity) -> str:
    for name in QUEUES:
        if name in stage.values:
            value = stage.values[name]
            return f"{value:,}" if isinstance(value, (int, float)) else str(value)
    return ""


def _workers(activity: Activity, result: Mapping[str, Any]) -> RenderableType:
    """Return the state of the remote workers."""
    working = " ".join(f"{one.busy:.0%}" for one in activity.workers)
    restarts = format_count(result["num_remote_worker_restarts"], "restart")
    healthy = result["num_healthy_workers"]
    return Text(f"{format_count(healthy, 'worker')} healthy, {restarts}; busy: {working}")
