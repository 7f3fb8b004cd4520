"""`Algorithm.learn`: train in a run directory that is new or continues, or without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.setting_values import expanded_path, whole_number
from flowrl.trainer.runs.continuing import ways_to_continue
from flowrl.trainer.runs.formatting import format_path
from flowrl.trainer.runs.resuming import (
    limits_of_resumed,
    prepare_to_resume,
    reached_limit,
)
from flowrl.trainer.runs.run_directory import RunDirectory, default_run_dir
from flowrl.trainer.runs.run_end import RunEnd, describe_end
from flowrl.trainer.runs.saved_run import read_config
from flowrl.trainer.runs.signal_handler import INTERRUPTED
from flowrl.trainer.runs.stop_rules import StopRules, metric_rules
from flowrl.trainer.runs.training_loop import Display, train_until


def learn(
    algorithm: Any,
    total_timesteps: float | None,
    stop: Mapping[str, float] | None,
    run_dir: Path | str | None,
    command: list[str],
    display: Display,
) -> None:
    """Implement `Algorithm.learn`.

    Args:
        algorithm: the algorithm.
        total_timesteps, stop, run_dir: see `Algorithm.learn`.
        command: the user's program, for the run directory.
        display: how to show the progress.
    """
    config = algorithm.config
    steps = whole_number(total_timesteps)
    is_text = isinstance(total_timesteps, str)
    if total_timesteps is not None and (is_text or steps is None or steps < 1):
        raise ConfigError(
            f"learn: total_timesteps must be a positive whole number, got {total_timesteps!r}"
        )
    if run_dir is not None and not isinstance(run_dir, (str, os.PathLike)):
        raise ConfigError(f'learn: run_dir must be a path, "auto" or None, got {run_dir!r}')
    path = _path_of_run(algorithm, run_dir)
    resume = algorithm.run_dir is not None and path == algorithm.run_dir
    unique = run_dir == "auto" and not resume
    rules = StopRules(timesteps=steps, metrics=[] if stop is None else metric_rules(stop))
    total = None
    if path is not None and resume:
        before = read_config(path).get("total_timesteps") or 0
        longer = before if rules.env_steps else max(before, config.total_timesteps or 0)
        of_run = config.updated(total_timesteps=longer) if longer else config
        of_run, given = limits_of_resumed(path, of_run, rules)
        rules, total = given.with_defaults(of_run), of_run.total_timesteps
    else:
        rules.check(config)
        so_far = algorithm.workers.global_vars["total_timesteps"]
        continues = rules.is_set() and so_far is not None
        of_run = config.updated(total_timesteps=so_far) if continues else config
        given, rules = rules, rules.with_defaults(of_run)
    total = total or rules.env_steps or of_run.total_timesteps
    algorithm.workers.local_worker()  # raises errors of environments before files are written
    previous = algorithm.workers.global_vars["total_timesteps"]
    if total is not None:
        algorithm.workers.set_total_timesteps(total)
    trains = False
    try:
        algorithm.check_start()
        reached = reached_limit(algorithm, rules, path if resume else None)
        if reached is not None:
            hint = "pass a larger total_timesteps or limit"
            if given.is_set() and rules != given:
                hint = "schedules in percent end there: pass total_timesteps, too"
            print(f"already reached: {reached}; {hint}")
            return
        run = None if path is None else RunDirectory(path, config.logged_names, resume, unique)
        trains = True
    finally:
        if not trains:
            algorithm.workers.set_total_timesteps(previous)
    end = _train_in_run(algorithm, rules, run, resume, total, command, display)
    if end.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if end.exit_code:
        raise SystemExit(end.exit_code)


def _path_of_run(algorithm: Any, run_dir: Path | str | None) -> Path | None:
    """Return the run directory of `learn`: exactly `algorithm.run_dir` if the run continues."""
    if run_dir is None:
        return None
    if run_dir == "auto":
        name = type(algorithm).__name__.lower()
        return algorithm.run_dir or default_run_dir(name, algorithm.config.env).absolute()
    path, current = expanded_path(run_dir).absolute(), algorithm.run_dir
    return current if current is not None and path.resolve() == current.resolve() else path


def _train_in_run(
    algorithm: Any,
    stop: StopRules,
    run: RunDirectory | None,
    resume: bool,
    total: int | None,
    command: list[str],
    display: Display,
) -> RunEnd:
    """Train in a run directory that is new or continues, and close it; or without one."""
    if run is None:
        end = train_until(algorithm, stop, None, display)
        if display != "none":
            print(describe_end(end, algorithm))
        return end
    path = run.path
    try:
        if resume:
            prepare_to_resume(algorithm, run, stop, total)
        else:
            run.write_setup(algorithm, total, command, asdict(stop))
        algorithm.run_dir = path
        end = train_until(algorithm, stop, run, display)
    finally:
        run.close()
    if display != "none":
        end_text = describe_end(end, algorithm)
        print(f"{end_text}; run directory: {format_path(path)}")
        if end.checkpoint is not None:
            for way in ways_to_continue(algorithm, path, end.checkpoint, "flowrl", end.needs_limit):
                print(f"continue: {way}")
    return end
