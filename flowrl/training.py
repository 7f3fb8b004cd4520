"""A training run from the command line: stop rules, the live line, the run directory."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.policies.config import ConfigError
from flowrl.rundir import RunDirectory, default_run_dir

LIVE_SECONDS = 0.25  # between two redraws on a terminal
PLAIN_SECONDS = 5.0  # between two lines elsewhere
DEFAULT_TIMESTEPS = 500_000  # goal of a run that was given none


@dataclass
class Stop:
    """When a run ends: whichever comes first.

    reward: mean return of the last 100 episodes; timesteps: env steps; iters; time_s: seconds.
    """

    reward: float | None = None
    timesteps: int | None = None
    iters: int | None = None
    time_s: float | None = None

    def with_defaults(self, env: Any) -> Stop:
        """Where nothing is set: the environment's own reward threshold, or a number of steps."""
        if self.reward is not None or self.timesteps or self.iters or self.time_s:
            return self
        return Stop(reward=_threshold(env), timesteps=DEFAULT_TIMESTEPS)

    def reached(self, result: dict[str, Any], window: int, seconds: float) -> str | None:
        """What was reached, in words; None while nothing is."""
        mean = result["episode_reward_mean"]
        full = result["episodes_in_window"] >= window
        if self.reward is not None and full and mean >= self.reward:
            return f"mean return {mean:.1f} of the last {window} episodes >= {self.reward:g}"
        if self.timesteps and result["timesteps_total"] >= self.timesteps:
            return f"{result['timesteps_total']:,} env steps"
        if self.iters and result["training_iteration"] >= self.iters:
            return f"{result['training_iteration']} iterations"
        if self.time_s and seconds >= self.time_s:
            return f"{seconds:.0f} s"
        return None


def _threshold(env: Any) -> float | None:
    import gymnasium as gym

    if not isinstance(env, str) or env not in gym.registry:
        return None
    return gym.spec(env).reward_threshold


def train(
    config: Any,
    plan: str,
    stop: Stop,
    run_dir: Path | None,
    command: list[str],
    resume: bool = False,
) -> int:
    """Train until a stop rule holds; returns the exit code. Leaves a checkpoint, come what may."""
    config = config.updated(plan=str(Path(plan).resolve()) if plan.endswith(".py") else plan)
    algorithm = config.build()
    try:  # an environment or a plan that does not fit shows before any file
        algorithm.workers.local_worker()
        tree = algorithm.plan.explain()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        tell_failure(error)
        return 1
    stop = stop.with_defaults(config.env)
    run = RunDirectory(run_dir or default_run_dir(plan, config.env), resume)
    try:
        if resume:
            from flowrl.algorithms.checkpoint import CheckpointError

            try:
                algorithm.restore(run.checkpoint)
            except CheckpointError as error:
                print(f"flowrl: {error}", file=sys.stderr)
                return 1
        else:
            run.describe(config, command, tree)
        return _loop(algorithm, stop, run, command)
    finally:
        algorithm.stop()
        run.close()


def _loop(algorithm: Any, stop: Stop, run: RunDirectory, command: list[str]) -> int:
    window = algorithm.config.metrics_num_episodes_for_smoothing
    live = LiveLine(stop)
    started = time.perf_counter()
    reached, code, result = None, 0, None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)  # (Ray's own handler exits in the same way)
    try:
        while reached is None:
            result = algorithm.train()
            run.write(result)
            live.show(result)
            reached = stop.reached(result, window, time.perf_counter() - started)
    except KeyboardInterrupt:
        reached, code = "interrupted", 130
    except (Exception, SystemExit) as error:
        # Ray's own handler of SIGTERM exits with the signal's number
        if isinstance(error, SystemExit) and error.code in (143, signal.SIGTERM):
            reached, code = "terminated", 143
        else:
            return _failed(error, algorithm, run, live, result)
    algorithm.save(run.checkpoint)
    live.finish(result)
    seconds = time.perf_counter() - started
    print(f"{'stopped' if code else 'reached'}: {reached}, after {seconds:.1f} s")
    print(f"run directory: {run.path} (checkpoint in {run.checkpoint.name}/)")
    print(f"evaluate:      flowrl evaluate {shlex.quote(str(run.path))} --episodes 100")
    print(f"go on:         flowrl train --resume {shlex.quote(str(run.path))}")
    print(f"repeat:        {shlex.join(command)}")
    return code


def _failed(
    error: BaseException, algorithm: Any, run: RunDirectory, live: LiveLine, result: Any
) -> int:
    live.finish()
    if result is not None:
        algorithm.save(run.checkpoint)
    tell_failure(error)
    print(f"run directory: {run.path}", file=sys.stderr)
    return 1


def _terminated(*_: Any) -> None:
    raise SystemExit(143)


def tell_failure(error: BaseException) -> None:
    """The error with its own traceback from the user's code on, and flowrl's notes."""
    if isinstance(error, ConfigError):
        print(f"flowrl: {error}", file=sys.stderr)
        return
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    foreign = [frame for frame in frames if not frame.filename.startswith(own)]
    print("Traceback (flowrl's own frames left out):", file=sys.stderr)
    print("".join(traceback.format_list(foreign)), end="", file=sys.stderr)
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)


class LiveLine:
    """One line that is redrawn on a terminal; plain lines every few seconds elsewhere."""

    def __init__(self, stop: Stop):
        self._stop = stop
        self._terminal = sys.stdout.isatty()
        self._shown = 0.0
        self._rate: tuple[float, int] | None = None
        self._status: Any = None

    def show(self, result: dict[str, Any]) -> None:
        now = time.perf_counter()
        if self._rate is None:
            self._rate = (now - result["time_this_iter_s"], 0)
            self._first = result["timesteps_total"] - result["timesteps_this_iter"]
        pause = LIVE_SECONDS if self._terminal else PLAIN_SECONDS
        if now - self._shown < pause:
            return
        self._shown = now
        text = self._line(result, now)
        if not self._terminal:
            print(text, flush=True)
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console().status(text)
            self._status.start()
        self._status.update(text)

    def _line(self, result: dict[str, Any], now: float) -> str:
        assert self._rate is not None
        steps = result["timesteps_total"]
        rate = (steps - self._first) / max(now - self._rate[0], 1e-9)
        goal = self._stop.timesteps
        parts = [
            f"iter {result['training_iteration']}",
            f"{steps:,}{f' of {goal:,}' if goal else ''} env steps",
            f"{rate:,.0f} steps/s",
            f"return {result['episode_reward_mean']:.1f}"
            + (f" (goal {self._stop.reward:g})" if self._stop.reward is not None else ""),
        ]
        for stats in result["learners"].values():
            losses = ("policy_loss", "vf_loss", "entropy")
            parts += [f"{name} {stats[name]:.3g}" for name in losses if name in stats]
        if goal and rate > 0:
            parts.append(f"at most {max(goal - steps, 0) / rate:,.0f} s left")
        return " | ".join(parts)

    def finish(self, result: dict[str, Any] | None = None) -> None:
        if self._status is not None:
            self._status.stop()
        if result is not None and self._rate is not None:
            print(self._line(result, time.perf_counter()))
