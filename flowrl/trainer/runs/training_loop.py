"""Train an algorithm until a stop rule is reached, with checkpoints and a progress table."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowrl.iter.ray_health import RayLostError
from flowrl.iter.stage import walk
from flowrl.monitoring.trace import Tracer
from flowrl.ops import WriteParquet
from flowrl.setting_values import whole_number
from flowrl.settings import ConfigError
from flowrl.trainer.runs.activity_log import ActivityLog, truncate_activities
from flowrl.trainer.runs.continuing import ways_to_continue
from flowrl.trainer.runs.formatting import format_count, format_path
from flowrl.trainer.runs.progress import ProgressTable
from flowrl.trainer.runs.recording import Recording, end_recording_at
from flowrl.trainer.runs.run_directory import (
    TRACE,
    RunDirectory,
    default_run_dir,
    name_of_env_setting,
)
from flowrl.trainer.runs.saved_run import read_config, read_stop_rules, result_at
from flowrl.trainer.runs.signal_handler import (
    INTERRUPTED,
    OUTPUT_CLOSED,
    TERMINAL_CLOSED,
    TERMINATED,
    SignalHandler,
    discard_closed_output,
    discard_lost_output,
    is_output_closed,
)
from flowrl.trainer.runs.stop_rules import TIME_LIMIT, PendingMetrics, StopRules, metric_rules

if TYPE_CHECKING:
    from flowrl.trainer.runs.live_view import LiveView

log = logging.getLogger("flowrl")

Display = Literal["auto", "live", "line", "none"]
"""How the progress of a run is shown: "live" and "auto" are the LiveView on a terminal, and "line"
elsewhere; "line" is a table with a row every few seconds; "none" shows nothing."""


@dataclass
class RunEnd:
    """How a run ended.

    Attributes:
        reason: the limit that was reached, "interrupted", "terminated", "terminal closed" or
            "output closed".
        exit_code: 0; INTERRUPTED after Ctrl-C; TERMINATED after SIGTERM; TERMINAL_CLOSED after
            SIGHUP; OUTPUT_CLOSED if the reader of the output closed it, as `head` does.
        checkpoint: the last checkpoint; None if none was written.
        seconds: duration of the training.
    """

    reason: str
    exit_code: int
    checkpoint: Path | None
    seconds: float

    @property
    def needs_limit(self) -> bool:
        """Whether a resumed run needs a larger limit, because it would end at once otherwise.
        Limits of time start again when a run is resumed."""
        return not self.exit_code and not self.reason.startswith(TIME_LIMIT)


def train_until(
    algorithm: Any, stop: StopRules, run: RunDirectory | None, display: Display = "auto"
) -> RunEnd:
    """Train until a limit is reached or a signal arrives.

    Args:
        algorithm: the algorithm.
        stop: the limits.
        run: receives results and checkpoints; None writes nothing.
        display: how to show the progress.

    Raises:
        Exception: the training failed. With `run`, the last result and a checkpoint were written,
            as far as there was a result and the state could be saved.
    """
    config = algorithm.config
    progress: ProgressTable | LiveView | None = None
    files = ExitStack()
    recording = None if run is None else _open_files(algorithm, run, files)
    previous = algorithm.last_result
    pending = PendingMetrics(stop, config.checkpoint_score_attribute)
    started = saved = time.perf_counter()
    exit_code, reason, result, written = 0, None, None, None
    with SignalHandler() as signals:
        try:
            if display != "none":
                _print_start(algorithm, stop, run)
                progress = _new_display(algorithm, stop, display)
            while reason is None:
                result = _train_once(algorithm, signals)
                now = time.perf_counter()
                window = config.metrics_num_episodes_for_smoothing
                reason = stop.reached(result, window, now - started)
                if reason is not None:
                    _finish_evaluation(algorithm, signals, result)
                if run is not None:
                    run.write(result)
                written = result
                if progress is not None:
                    progress.add(result)
                pending.check(result)
                is_due = reason is None and _checkpoint_is_due(algorithm, result, now - saved)
                if run is not None and is_due:
                    run.save(algorithm, result)
                    saved = time.perf_counter()
                if recording is not None:
                    recording.add(is_due)
            signals.raise_pending()
        except BaseException as error:
            stopped = _stopped_by(error, signals)
            if stopped is None:
                result = _write_last_result(algorithm, run, written, previous)
                if run is not None:
                    _save_after_error(algorithm, run, result, error)
                raise
            exit_code, reason = stopped
            if exit_code == OUTPUT_CLOSED:
                discard_closed_output()
        finally:
            files.__exit__(*sys.exc_info())
            _finish_display(progress, algorithm.last_result, exit_code)
        if exit_code:
            result = _write_last_result(algorithm, run, written, previous)
        checkpoint = None if run is None else run.save(algorithm, result)
        exit_code = exit_code or signals.exit_code
        if run is not None:
            run.note("ended", reason)
    return RunEnd(reason, exit_code, checkpoint, time.perf_counter() - started)


def _open_files(algorithm: Any, run: RunDirectory, files: ExitStack) -> Recording:
    """Open the files that a training writes besides its results: journal, activities, trace.

    Args:
        algorithm: the algorithm.
        run: its run directory.
        files: closes the files.

    Returns:
        the journal.
    """
    run.add_writer_tags([writer.tag for writer in _writers(algorithm)])
    recording = Recording(algorithm, run.path)
    listeners, activity_log = algorithm.monitor.listeners, ActivityLog(run.path)
    listeners.append(activity_log.append)
    if (seconds := algorithm.config.trace_s) is not None:
        algorithm.plan.start(algorithm.config.seed)
        files.callback(_write_trace, Tracer(algorithm.plan, seconds), run.path / TRACE)
    files.callback(activity_log.close)
    files.callback(listeners.remove, activity_log.append)
    files.callback(recording.close)
    return recording


def _train_once(algorithm: Any, signals: SignalHandler) -> Any:
    """Run an iteration, which a signal may interrupt, and return its result."""
    signals.raise_pending()
    signals.armed = True
    try:
        return algorithm.train()
    finally:
        signals.armed = False


def _finish_evaluation(algorithm: Any, signals: SignalHandler, result: dict[str, Any]) -> None:
    """Wait for the evaluation that runs parallel to training, which a signal may interrupt, and add
    it to the last result."""
    if signals.exit_code:
        return
    signals.armed = True
    try:
        evaluation = algorithm.finish_evaluation()
    finally:
        signals.armed = False
    if evaluation is not None:
        result["evaluation"] = evaluation


def _finish_display(progress: ProgressTable | LiveView | None, result: Any, exit_code: int) -> None:
    """Show the last result. If the terminal was closed, discard all later output."""
    is_lost = exit_code == TERMINAL_CLOSED
    if progress is not None:
        with suppress(OSError) if is_lost else nullcontext():
            progress.finish(result)
    if is_lost:
        discard_lost_output()


def _stopped_by(error: BaseException, signals: SignalHandler) -> tuple[int, str] | None:
    """Return the exit code and the reason if an exception stops a run from outside, by a signal or
    by closing its output; None for an error of the training."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    is_signal = signals.is_termination(error)
    if signals.terminal_closed and (is_signal or isinstance(error, OSError)):
        return TERMINAL_CLOSED, "terminal closed"
    if isinstance(error, BrokenPipeError) and is_output_closed():
        return OUTPUT_CLOSED, "output closed"
    return (TERMINATED, "terminated") if is_signal else None


def _save_after_error(
    algorithm: Any, run: RunDirectory, result: dict[str, Any] | None, error: BaseException
) -> None:
    """Write the error, and a checkpoint if the state after the error can be saved."""
    stage = getattr(error, "_flowrl_stage", None)
    text = f"{type(error).__name__}: {error}"
    run.note("failed", text, None if stage is None else stage.line)
    if result is None:
        return
    try:
        run.save(algorithm, result)
    except RayLostError:  # the state of an actor cannot be read
        pass
    except Exception as failure:
        log.warning("no checkpoint after the error: %s: %s", type(failure).__name__, failure)


def _write_trace(tracer: Tracer, path: Path) -> None:
    tracer.stop()
    try:
        tracer.write(path)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)


def _new_display(algorithm: Any, stop: StopRules, display: Display) -> ProgressTable | LiveView:
    """Return the display of a run."""
    if display != "line" and sys.stdout.isatty():
        # not imported above: runs without a terminal start faster without rich
        from rich.console import Console

        from flowrl.trainer.runs.live_view import LiveView

        if not Console().is_dumb_terminal:
            return LiveView(stop, algorithm.monitor)
    return ProgressTable(stop, algorithm.plan.metrics.counters)


def _print_start(algorithm: Any, stop: StopRules, run: RunDirectory | None) -> None:
    print(_describe_start(algorithm, stop, run), flush=True)
    if algorithm.config.num_workers:
        workers = format_count(algorithm.config.num_workers, "worker")
        print(f"starting {workers} …", flush=True)


def _describe_start(algorithm: Any, stop: StopRules, run: RunDirectory | None) -> str:
    """Return the first line of a run: what is trained, on what, until when, and where to."""
    config = algorithm.config
    env = ""
    if config.env is not None:
        env = f" {'on' if config.samples else 'for'} {name_of_env_setting(config.env)}"
    source = "" if config.samples else " from recorded data"
    workers = f" with {format_count(config.num_workers, 'worker')}" if config.num_workers else ""
    step = f" from env step {steps:,}" if (steps := algorithm.env_steps) else ""
    place = "no run directory" if run is None else f"run directory: {format_path(run.path)}"
    limits = stop.describe(config, algorithm.workers.global_vars["total_timesteps"])
    # with several policies, each may have its own train_batch_size
    size = None if config.policies or not config.samples else config.train_batch_size
    if size is not None and (stop.timesteps or math.inf) < size:
        limits = f"{limits} (the first train batch has {size:,})"
        limits = limits.replace(") (", "; ")
    name = type(algorithm).__name__
    if name == "Algorithm" and isinstance(config.plan, str):  # a plan without a class of its own
        name = Path(config.plan).name
    return f"training {name}{env}{source}{workers}{step} until {limits}; {place}"


def _checkpoint_is_due(algorithm: Any, result: Mapping[str, Any], seconds: float) -> bool:
    config = algorithm.config
    if (config.checkpoint_score_attribute or "").startswith("evaluation/"):
        evaluated = result.get("evaluation", {}).get("training_iteration")
        if evaluated == algorithm.iteration:
            return True
    frequency = config.checkpoint_frequency
    if frequency and algorithm.iteration % frequency == 0:
        return True
    return config.checkpoint_every_s is not None and seconds > config.checkpoint_every_s


def _write_last_result(
    algorithm: Any, run: RunDirectory | None, written: Any, previous: Any
) -> Any:
    """Write the algorithm's last result if an error, such as in its evaluation, prevented that.

    Args:
        algorithm: the algorithm that was interrupted.
        run: its run directory, or None.
        written: the last result that was written.
        previous: the last result before this training.

    Returns:
        the last result.
    """
    last = algorithm.last_result
    if last is written or last is previous or last["training_iteration"] < algorithm.iteration:
        return written
    if run is not None:
        run.write(last)
    return last


def reached_limit(algorithm: Any, stop: StopRules, run_dir: Path | None) -> str | None:
    """Return the limit that a training has already reached, or None.

    Args:
        algorithm: the algorithm.
        stop: the limits.
        run_dir: the run directory that the training continues; None if there is none.
    """
    if not algorithm.iteration:
        return None
    result = algorithm.last_result
    if run_dir is not None:
        result = result_at(run_dir, algorithm.iteration)
    if result is None or result.get("training_iteration") != algorithm.iteration:
        result = {}  # it was not written: the checkpoint has the counters only
    result = {
        "episodes_in_window": 0,
        "episode_reward_mean": math.nan,
        "timesteps_total": algorithm.env_steps,
        "training_iteration": algorithm.iteration,
        **result,
    }
    return stop.reached(result, algorithm.config.metrics_num_episodes_for_smoothing, 0.0)


def prepare_to_resume(algorithm: Any, run: RunDirectory, stop: StopRules, total: Any) -> None:
    """Make a run directory ready for a resumed training.

    What the run wrote after the algorithm's iteration is removed, because it is written again; if
    there are newer checkpoints, they are kept with their results in another folder. Experience that
    a copy of the run directory, or the original of a copy, has recorded is not removed. The new
    limits replace the old ones.

    Args:
        algorithm: the algorithm, with the state of a checkpoint.
        run: its run directory.
        stop: the limits.
        total: the setting `total_timesteps`.
    """
    run.note_resumption(algorithm.config.updated(total_timesteps=total), asdict(stop))
    kept = run.truncate(algorithm.iteration)
    truncate_activities(run.path, algorithm.iteration)
    end_recording_at(run.path, algorithm.iteration)
    if kept is not None:
        print(
            f"the checkpoints and results after iteration {algorithm.iteration} are kept in {kept}"
        )
    for writer in _writers(algorithm):
        writer.remove_newer_files(run.writer_tags())


def _writers(algorithm: Any) -> list[WriteParquet]:
    """Return the operators of a plan that write experience."""
    operators = [getattr(stage, "fn", None) for stage in walk(algorithm.plan.stage)]
    return [operator for operator in operators if isinstance(operator, WriteParquet)]


def saved_stop_rules(run_dir: Path, config: Any) -> StopRules:
    """Return the limits of a run, which apply if it is resumed without new ones.

    Raises:
        ConfigError: stop.json is missing or damaged.
    """
    stop = StopRules.from_saved(read_stop_rules(run_dir))
    return stop if config.samples else replace(stop, reward=None)  # offline: no returns


def total_of_resumed(before: int | None, stop: StopRules, saved: StopRules) -> int | None:
    """Return the `total_timesteps` of a resumed run.

    If it was the limit on env steps, it follows the new limit; otherwise it only grows.

    Args:
        before: the saved `total_timesteps` of the run.
        stop: the new limits.
        saved: the saved limits of the run.
    """
    if stop.env_steps is None or before is None:
        return stop.env_steps or before
    return stop.env_steps if before == saved.env_steps else max(before, stop.env_steps)


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
    path = _path_of_run(algorithm, run_dir)
    resume = algorithm.run_dir is not None and path == algorithm.run_dir
    unique = run_dir == "auto" and not resume
    rules = StopRules(timesteps=steps, metrics=[] if stop is None else metric_rules(stop))
    total = None
    if path is not None and resume:
        before = read_config(path)[0].get("total_timesteps")
        saved = saved_stop_rules(path, config)
        total = total_of_resumed(before, rules, saved)
        rules = rules if rules.is_set() else saved
    rules.check(config)
    rules = rules.with_defaults(config)
    total = total or rules.env_steps
    algorithm.workers.local_worker()  # errors of environments and plan appear before files
    if total is not None:
        algorithm.workers.set_total_timesteps(total)
    algorithm.check_start()
    reached = reached_limit(algorithm, rules, path if resume else None)
    if reached is not None:
        print(f"already reached: {reached}; pass a larger total_timesteps or limit")
        return
    run = None
    if path is not None:
        run = RunDirectory(path, config.logged_names, resume, unique)
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
    path, current = Path(run_dir).expanduser().absolute(), algorithm.run_dir
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


def describe_end(end: RunEnd, algorithm: Any) -> str:
    """Return how a run of an algorithm ended, in words."""
    result = algorithm.last_result
    ended = "stopped" if end.exit_code else "reached"
    text = f"{ended}: {end.reason}, after {end.seconds:.1f} s"
    if result is None:
        return text
    restarts = result.get("num_env_restarts", 0)
    if restarts:
        failures = format_count(restarts, "environment failure")
        text += f". {failures}: see the warnings above"
    elif not algorithm.config.samples:
        if (mean := result.get("evaluation", {}).get("episode_reward_mean")) is not None:
            text += f". Mean return of the last evaluation: {mean:,.1f}"
    elif result.get("episodes_total") == 0 and not end.exit_code:
        text += (
            ". No episode has ended, so there are no returns: train longer, or set horizon if the "
            "environment has no limit"
        )
    return text
