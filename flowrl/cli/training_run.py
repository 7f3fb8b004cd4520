"""Train an algorithm until a stop rule is reached, and write its run directory."""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl.cli.display import ProgressLine, print_failure, program_name
from flowrl.cli.run_directory import RunDirectory, default_run_dir
from flowrl.cli.run_settings import absolute_plan
from flowrl.cli.saved_run import (
    last_intact_checkpoint,
    newest_checkpoint,
    read_command,
    read_stop_rules,
)
from flowrl.cli.signal_handler import SignalHandler, is_termination
from flowrl.cli.stop_rules import PendingMetrics, StopRules
from flowrl.data.checkpoint import CheckpointError
from flowrl.iter.stage import walk
from flowrl.ops import WriteParquet
from flowrl.settings import ConfigError
from flowrl.trainer.trust import untrusted_code


def start_run(
    config: Any, plan: str | None, stop: StopRules, run_dir: Path | None, command: list[str]
) -> int:
    """Train in a new run directory; return the exit code.

    Args:
        config: an AlgorithmConfig. A missing seed is drawn, so that the run can be repeated.
        plan: name or file of the plan; None uses the config's plan.
        stop: when to stop; see `StopRules.with_defaults`.
        run_dir: output folder; None creates one in runs/.
        command: the command line, without a drawn seed.

    Raises:
        ConfigError: the settings are invalid.
    """
    if config.seed is None:
        config = config.updated(seed=secrets.randbits(31))
        command = [*command, "--seed", str(config.seed)]
    stop.check(config)
    if not config.samples:
        config.check_input()
    config = _with_plan(config, plan)
    stop = stop.with_defaults(config)
    if config.total_timesteps is None:
        config = config.updated(total_timesteps=stop.env_steps)
    algorithm, tree = _build(config)
    if algorithm is None:
        return 1
    name = plan or type(algorithm).__name__.lower()
    with ExitStack() as cleanup:
        cleanup.callback(algorithm.stop)
        run = RunDirectory(run_dir or default_run_dir(name, config.env))
        cleanup.callback(run.close)
        run.write_setup(config, command, tree, asdict(stop))
        return _train(algorithm, stop, run, command)


def resume_run(
    config: Any,
    plan: str | None,
    stop: StopRules,
    run_dir: Path,
    checkpoint: Path | None = None,
    replace_plan: bool = False,
) -> int:
    """Continue a run; return the exit code.

    Args:
        config: the run's AlgorithmConfig.
        plan: name or file of the plan; None uses the config's plan.
        stop: when to stop; if empty, the run's own stop rules apply. Schedules in percent follow
            its limit on env steps, so a longer run continues at its share of them.
        run_dir: the run directory.
        checkpoint: checkpoint to continue from; None uses the newest one.
        replace_plan: accept that the text of the plan differs from the run's.

    Raises:
        ConfigError: the settings are invalid, or the run directory cannot be read.
    """
    command, saved_stop = read_command(run_dir), StopRules.from_saved(read_stop_rules(run_dir))
    config = config.updated(total_timesteps=_total_of_resumed(config, stop, saved_stop))
    if not stop.is_set():
        stop = saved_stop
        if not config.samples:  # offline training reports no returns
            stop.reward = None
    checkpoint = checkpoint or newest_checkpoint(run_dir)
    stop.check(config)
    config = _with_plan(config, plan)
    stop = stop.with_defaults(config)
    algorithm, tree = _build(config)
    if algorithm is None:
        return 1
    with ExitStack() as cleanup:
        cleanup.callback(algorithm.stop)
        run = RunDirectory(run_dir, resume=True)
        cleanup.callback(run.close)
        try:
            algorithm.restore(checkpoint, replace_plan)
        except CheckpointError as error:
            print(f"flowrl: {error}", file=sys.stderr)
            _suggest_checkpoint(run.path, checkpoint)
            return 1
        window = config.metrics_num_episodes_for_smoothing
        result = run.result_at(algorithm.iteration)
        reached = None if result is None else stop.reached(result, window, 0.0)
        if reached is not None:
            print(
                f"already reached: {reached}. Set a new limit: --stop-reward, --stop-timesteps, …"
            )
            return 0
        if replace_plan:
            run.replace_plan(config, tree)
        run.truncate(algorithm.iteration)
        for stage in walk(algorithm.plan.stage):
            if isinstance(operator := getattr(stage, "fn", None), WriteParquet):
                operator.remove_newer_files()
        return _train(algorithm, stop, run, command)


def _total_of_resumed(config: Any, stop: StopRules, saved_stop: StopRules) -> int | None:
    """Return the `total_timesteps` of a resumed run.

    If it was the limit on env steps, it follows the new limit; otherwise it only grows.
    """
    before: int | None = config.total_timesteps
    if stop.env_steps is None or before is None:
        return stop.env_steps or before
    return stop.env_steps if before == saved_stop.env_steps else max(before, stop.env_steps)


def _with_plan(config: Any, plan: str | None) -> Any:
    return config if plan is None else config.updated(plan=absolute_plan(plan))


def _build(config: Any) -> tuple[Any, str]:
    """Return the algorithm and its plan as text.

    Creates the environments and the plan, so that their errors appear before any file is written.
    Returns (None, "") after printing such an error.
    """
    algorithm = config.build()
    try:
        algorithm.workers.local_worker()
        algorithm.check_evaluation()
        return algorithm, algorithm.plan.explain()
    except ConfigError:
        algorithm.stop()
        raise
    except (Exception, SystemExit) as error:
        algorithm.stop()
        print_failure(error)
        return None, ""


def _suggest_checkpoint(run_dir: Path, damaged: Path) -> None:
    intact = last_intact_checkpoint(run_dir, damaged)
    if intact is not None:
        print(
            f"An older checkpoint is intact: {program_name()} resume {shlex.quote(str(run_dir))} "
            f"--checkpoint {intact.name}",
            file=sys.stderr,
        )


def _train(algorithm: Any, stop: StopRules, run: RunDirectory, command: list[str]) -> int:
    """Train until a limit is reached or a signal arrives; return the exit code."""
    config = algorithm.config
    progress = ProgressLine(stop)
    pending = PendingMetrics(stop, config.checkpoint_score_attribute)
    started = saved = time.perf_counter()
    exit_code, reason, result = 0, None, None
    if config.num_workers:
        print(f"starting {config.num_workers} workers …", flush=True)
    with SignalHandler() as signals:
        try:
            while reason is None:
                signals.raise_pending()
                signals.armed = True
                try:
                    result = algorithm.train()
                finally:
                    signals.armed = False
                run.write(result)
                progress.add(result)
                pending.check(result)
                now = time.perf_counter()
                window = config.metrics_num_episodes_for_smoothing
                reason = stop.reached(result, window, now - started)
                if reason is None and _checkpoint_is_due(algorithm, now - saved):
                    run.save(algorithm, result)
                    saved = time.perf_counter()
        except KeyboardInterrupt:
            exit_code, reason = 130, "interrupted"
        except (Exception, SystemExit) as error:
            if not is_termination(error):
                progress.finish()
                result = _write_last_result(algorithm, run, result)
                if result is not None:
                    run.save(algorithm, result)
                print_failure(error)
                print(f"run directory: {run.path}", file=sys.stderr)
                return 1
            exit_code, reason = 143, "terminated"
        if exit_code:
            result = _write_last_result(algorithm, run, result)
        checkpoint = run.save(algorithm, result)
        progress.finish(result)
        seconds = time.perf_counter() - started
        print(f"{'stopped' if exit_code else 'reached'}: {reason}, after {seconds:.1f} s")
        trust = "" if untrusted_code(config) is None else " --trust"
        _print_next_commands(run.path, checkpoint, command, trust, is_complete=not exit_code)
    return exit_code if exit_code or checkpoint is not None else 1


def _checkpoint_is_due(algorithm: Any, seconds: float) -> bool:
    config = algorithm.config
    frequency = config.checkpoint_frequency
    if frequency and algorithm.iteration % frequency == 0:
        return True
    return config.checkpoint_every_s is not None and seconds > config.checkpoint_every_s


def _write_last_result(algorithm: Any, run: RunDirectory, result: Any) -> Any:
    """Write the algorithm's last result if an error, such as in its evaluation, prevented that.

    Args:
        algorithm: the algorithm that was interrupted.
        run: its run directory.
        result: the last result that was written.

    Returns:
        The last result.
    """
    last = algorithm.last_result
    if last is None or last is result or last["training_iteration"] < algorithm.iteration:
        return result
    run.write(last)
    return last


def _print_next_commands(
    run_dir: Path, checkpoint: Path | None, command: list[str], trust: str, is_complete: bool
) -> None:
    name = (
        "no checkpoint" if checkpoint is None else f"checkpoint {checkpoint.relative_to(run_dir)}"
    )
    path, program = shlex.quote(str(run_dir)), program_name()
    print(f"run directory: {run_dir} ({name})")
    print(f"evaluate:      {program} evaluate {path}{trust} --episodes 100")
    stop = " --stop-timesteps …" if is_complete else ""
    print(f"resume:        {program} resume {path}{trust}{stop}")
    print(f"repeat:        {program} {shlex.join(command[1:])}")
