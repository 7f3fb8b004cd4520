"""`flowrl train` and `flowrl resume`: build an algorithm and train it in a run directory."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.display import print_failure, printable, program_name
from flowrl.cli.report import write_report
from flowrl.cli.saved_runs import SavedRun, suggest_intact_checkpoint
from flowrl.data.checkpoint import CheckpointError, list_checkpoints
from flowrl.errors import ConfigError
from flowrl.trainer.checkpoint_saving import OtherSettingsError
from flowrl.trainer.checkpointing import OtherPlanError
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_files import absolute_plan
from flowrl.trainer.runs.continuing import trust_flag, ways_to_continue
from flowrl.trainer.runs.formatting import format_path
from flowrl.trainer.runs.resuming import limits_of_resumed, prepare_to_resume, reached_limit
from flowrl.trainer.runs.run_directory import REPORT, RunDirectory, default_run_dir
from flowrl.trainer.runs.run_end import describe_end
from flowrl.trainer.runs.saved_run import read_command
from flowrl.trainer.runs.signal_handler import INTERRUPTED, StoppedBySignal
from flowrl.trainer.runs.stop_rules import StopRules
from flowrl.trainer.runs.training_loop import Display, train_until

if TYPE_CHECKING:
    from flowrl.trainer.algorithm import Algorithm


def start_run(
    config: AlgorithmConfig,
    plan: str | None,
    stop: StopRules,
    run_dir: Path | None,
    command: list[str],
    display: Display = "auto",
    report: bool = False,
    note: str = "",
) -> int:
    """Train in a new run directory; return the exit code.

    Args:
        config: an AlgorithmConfig.
        plan: name or file of the plan; None uses the config's plan.
        stop: when to stop; see `StopRules.with_defaults`.
        run_dir: output folder; None creates one in runs/.
        command: the command line; a seed that the algorithm draws is added.
        display: how to show the progress.
        report: write report.html at the end.
        note: line to print before the training starts.

    Raises:
        ConfigError: the settings are invalid.
    """
    stop.check(config)
    config.check_input()
    if plan is not None:
        config = config.updated(plan=absolute_plan(plan))
    stop = stop.with_defaults(config)
    if config.total_timesteps is None:
        config = config.updated(total_timesteps=stop.env_steps)
    algorithm = _build(config)
    if algorithm is None:
        return 1
    if config.seed is None:
        command = [*command, "--seed", str(algorithm.config.seed)]
    config = algorithm.config
    name = plan or type(algorithm).__name__.lower()
    with ExitStack() as cleanup:
        cleanup.callback(algorithm.stop)
        run = _new_run(run_dir, name, config)
        cleanup.callback(run.close)
        run.write_setup(algorithm, config.total_timesteps, command, asdict(stop))
        if note and display != "none":
            print(note)
        exit_code = _train(algorithm, stop, run, command, display)
    # not before: the page of a run directory that is in use says that the run trains
    return _report(run.path, exit_code) if report else exit_code


def resume_run(
    saved: SavedRun,
    stop: StopRules,
    command: list[str],
    replace_plan: bool = False,
    new_run_dir: Path | None = None,
    display: Display = "auto",
    report: bool = False,
) -> int:
    """Continue a run; return the exit code.

    Args:
        saved: the run. A checkpoint outside a run directory starts a new one.
        stop: when to stop; if empty, the run's own stop rules apply. Schedules in percent follow
            its limit on env steps, so a longer run continues at its share of them.
        command: the command line, for a new run directory; an existing one has its own.
        replace_plan: accept that the text of the plan differs from the run's.
        new_run_dir: folder of a new run; None creates one in runs/.
        display: how to show the progress.
        report: write report.html at the end. A run that was started with --report always does.

    Raises:
        ConfigError: the settings are invalid, or the run directory cannot be read.
    """
    config, run_dir = saved.config, saved.run_dir
    config, given = limits_of_resumed(run_dir, config, stop)
    stop = given.with_defaults(config)
    if run_dir is not None:
        with suppress(ConfigError):  # only for messages
            command = read_command(run_dir)
    algorithm = _build(config, saved.algorithm)
    if algorithm is None:
        return 1
    report = report or (command[:1] == ["flowrl"] and "--report" in command)
    with ExitStack() as cleanup:
        cleanup.callback(algorithm.stop)
        run = None
        if run_dir is not None:
            run = RunDirectory(run_dir, config.logged_names, resume=True)
            cleanup.callback(run.close)
        try:
            algorithm.restore(saved.checkpoint, replace_plan)
        except CheckpointError as error:
            print(f"flowrl: {printable(error)}", file=sys.stderr)
            if isinstance(error, OtherPlanError):
                return 2
            if isinstance(error, OtherSettingsError):
                start = "To load only its policies, start a new run in Python and call"
                print(f"{start} restore_policies({str(saved.checkpoint)!r})", file=sys.stderr)
            else:
                suggest_intact_checkpoint("resume", saved)
            return 1
        reached = reached_limit(algorithm, stop, run_dir)
        if reached is not None:
            hint = "Set a new limit: --stop-reward, --stop-timesteps, …"
            if given.is_set() and given.env_steps is None and reached.endswith(" env steps"):
                hint = (
                    "Schedules in percent, such as that of the learning rate, end there: to "
                    "continue, also set a larger --stop-timesteps"
                )
            print(f"already reached: {reached}. {hint}")
            exit_code = 0
        else:
            if run is None:
                run = _new_run(new_run_dir, type(algorithm).__name__.lower(), config)
                cleanup.callback(run.close)
                run.write_setup(algorithm, config.total_timesteps, command, asdict(stop))
            else:
                if replace_plan:
                    run.replace_plan(algorithm)
                prepare_to_resume(algorithm, run, stop, config.total_timesteps)
            # the saved command may not repeat the run: limits and settings may have changed since
            exit_code = _train(algorithm, stop, run, command, display, can_repeat=run_dir is None)
    return _report(run.path, exit_code) if report and run is not None else exit_code


def _new_run(run_dir: Path | None, name: str, config: AlgorithmConfig) -> RunDirectory:
    """Return a new run directory; None chooses one in runs/ that does not exist."""
    path = run_dir or default_run_dir(name, config.env)
    return RunDirectory(path, config.logged_names, unique=run_dir is None)


def _build(
    config: AlgorithmConfig, algorithm_class: type[Algorithm] | None = None
) -> Algorithm | None:
    """Return the algorithm, an instance of the class if one is given.

    Creates the environments and the plan, so that their errors appear before any file is written.
    Returns None after printing such an error.
    """
    algorithm = config.updated().build_as(algorithm_class)
    try:
        algorithm.check_start()
        return algorithm
    except ConfigError:
        algorithm.stop()
        raise
    except (Exception, SystemExit) as error:
        algorithm.stop()
        print_failure(error)
        return None


def _train(
    algorithm: Algorithm,
    stop: StopRules,
    run: RunDirectory,
    command: list[str],
    display: Display,
    can_repeat: bool = True,
) -> int:
    """Train until a limit is reached or a signal arrives; return the exit code.

    Args:
        algorithm: the algorithm.
        stop: the limits.
        run: its run directory.
        command: the command that started the run.
        display: how to show the progress.
        can_repeat: whether the command trains until the same limits.
    """
    algorithm.run_dir = run.path
    try:
        end = train_until(algorithm, stop, run, display)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        exit_code = 1
        if isinstance(error, StoppedBySignal):
            exit_code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            exit_code = INTERRUPTED
        if exit_code == 1:
            print_failure(error)
        else:
            print("stopped at once: the last checkpoint may be missing", file=sys.stderr)
        print(f"run directory: {format_path(run.path)}", file=sys.stderr)
        if checkpoints := list_checkpoints(run.path):
            path = shlex.quote(format_path(run.path))
            resume = f"{program_name()} resume {path}{trust_flag(checkpoints[-1])}"
            print(f"resume:        {resume}", file=sys.stderr)
        return exit_code
    print(describe_end(end, algorithm))
    is_complete = not end.exit_code
    if command[:1] == ["flowrl"]:
        _print_next_commands(run.path, end.checkpoint, end.needs_limit)
        if can_repeat:
            repeated = shlex.join(_without_run_dir(command[1:]))
            print(f"repeat:        {program_name()} {repeated}")
    else:
        print(f"run directory: {format_path(run.path)}")
        if end.checkpoint is not None:
            for way in ways_to_continue(
                algorithm, run.path, end.checkpoint, program_name(), end.needs_limit
            ):
                print(f"continue:      {way}")
    return 1 if is_complete and end.checkpoint is None else end.exit_code


def _report(run_dir: Path, exit_code: int) -> int:
    """Write the report of a run; return the run's exit code, or 1 if there is no report."""
    path = run_dir / REPORT
    try:
        write_report([run_dir], path)
    except ConfigError as error:  # the training is complete
        print_failure(error)
        return exit_code or 1
    print(f"report:        {format_path(path)}")
    return exit_code


def _print_next_commands(run_dir: Path, checkpoint: Path | None, needs_limit: bool) -> None:
    path, program = shlex.quote(format_path(run_dir)), program_name()
    older = list_checkpoints(run_dir)
    if checkpoint is None and not older:
        print(f"run directory: {format_path(run_dir)} (no checkpoint)")
        return
    if checkpoint is None:
        name = f"{older[-1].relative_to(run_dir)} is the last checkpoint that could be written"
    else:
        name = f"checkpoint {checkpoint.relative_to(run_dir)}"
    print(f"run directory: {format_path(run_dir)} ({name})")
    trust = trust_flag(checkpoint or older[-1])
    print(f"evaluate:      {program} evaluate {path}{trust} --episodes 100")
    stop = " --stop-timesteps …" if needs_limit else ""
    print(f"resume:        {program} resume {path}{trust}{stop}")


def _without_run_dir(arguments: list[str]) -> list[str]:
    """Return the arguments without `--run-dir FOLDER`, which contains a run now."""
    kept, skip = [], False
    for argument in arguments:
        flag, has_value, _ = argument.partition("=")
        is_run_dir = not skip and flag.replace("_", "-") == "--run-dir"
        if not skip and not is_run_dir:
            kept.append(argument)
        skip = is_run_dir and not has_value
    return kept
