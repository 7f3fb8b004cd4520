"""Train an algorithm until a stop rule is reached, with checkpoints and a progress table."""

from __future__ import annotations

import logging
import math
import time
from bdb import BdbQuit
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowrl.iter.ray_health import RayLostError
from flowrl.monitoring.trace import Tracer
from flowrl.trainer.runs.activity_log import ActivityLog
from flowrl.trainer.runs.formatting import format_count, format_path
from flowrl.trainer.runs.progress import ProgressTable, can_redraw
from flowrl.trainer.runs.recording import Recording
from flowrl.trainer.runs.resuming import experience_writers
from flowrl.trainer.runs.run_directory import TRACE, RunDirectory, name_of_env_setting
from flowrl.trainer.runs.run_end import RunEnd
from flowrl.trainer.runs.signal_handler import (
    INTERRUPTED,
    OUTPUT_CLOSED,
    TERMINAL_CLOSED,
    TERMINATED,
    SignalHandler,
    StoppedBySignal,
    discard_closed_output,
    discard_lost_output,
    is_output_closed,
)
from flowrl.trainer.runs.stop_rules import PendingMetrics, StopRules

if TYPE_CHECKING:
    from flowrl.trainer.runs.live_view import LiveView

log = logging.getLogger("flowrl")

Display = Literal["auto", "live", "line", "none"]
"""How the progress of a run is shown: "live" and "auto" are the LiveView on a terminal, and "line"
elsewhere; "line" is a table with a row every few seconds; "none" shows nothing."""


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
            if the training had started, there was a result and the state could be saved.
    """
    previous = algorithm.last_result
    failure: BaseException | None = None
    exit_code, reason, checkpoint = 0, "", None
    with SignalHandler() as signals:
        with _end_noted(run, signals):
            loop = _TrainingLoop(algorithm, stop, run)
        try:
            reason = loop.train(signals, display)
        except BaseException as error:
            stopped = _stopped_by(error, signals)
            if stopped is None:
                failure = error
            else:
                exit_code, reason = stopped
        if failure is not None:
            with suppress(KeyboardInterrupt, SystemExit):  # by a signal: the failure is shown
                _save_after_error(algorithm, run, loop.written, previous, failure)
            with suppress(Exception, KeyboardInterrupt, SystemExit):
                loop.close(exit_code)
            raise failure
        if exit_code == OUTPUT_CLOSED:
            discard_closed_output()
        with _end_noted(run, signals):
            loop.close(exit_code)
            if signals.is_repeated:
                raise KeyboardInterrupt  # without the last checkpoint, for which workers may wait
            result = loop.result
            if exit_code:
                result = _write_last_result(algorithm, run, loop.written, previous)
            if run is not None:
                checkpoint = run.save(algorithm, result)
        exit_code = exit_code or signals.exit_code
        if run is not None:
            run.note("ended", reason)
    # limits of time start again when a run is resumed
    needs_limit = not exit_code and bool(result and loop.reached(result, 0.0))
    return RunEnd(reason, exit_code, checkpoint, time.perf_counter() - loop.started, needs_limit)


class _TrainingLoop:
    """Trains, writes results and periodic checkpoints, and shows the progress.

    Args:
        algorithm: the algorithm.
        stop: the limits.
        run: receives results and checkpoints, and further files: journal, activities, trace; None
            writes nothing.

    Attributes:
        started: time of the start, `time.perf_counter()`.
        result: the result of the last iteration; None before its end.
        written: the last result that was written; None before the first one.
    """

    def __init__(self, algorithm: Any, stop: StopRules, run: RunDirectory | None):
        self.started = self._saved = time.perf_counter()
        self.result: dict[str, Any] | None = None
        self.written: dict[str, Any] | None = None
        self._algorithm, self._stop, self._run = algorithm, stop, run
        self._pending = PendingMetrics(stop, algorithm.config.checkpoint_score_attribute)
        self._progress: ProgressTable | LiveView | None = None
        with ExitStack() as files:  # closes them after an error
            self._recording = None if run is None else _open_files(algorithm, run, files)
            self._files = files.pop_all()

    def train(self, signals: SignalHandler, display: Display) -> str:
        """Train until a limit is reached, and return the limit.

        Raises:
            KeyboardInterrupt, SystemExit: a signal was received.
        """
        if display != "none":
            _print_start(self._algorithm, self._stop, self._run)
            self._progress = _new_display(self._algorithm, self._stop, display)
        reason = None
        while reason is None:
            reason = self._iterate(signals)
        signals.raise_pending()
        return reason

    def _iterate(self, signals: SignalHandler) -> str | None:
        """Run an iteration and write its result; return the limit that it has reached, if any."""
        algorithm, run = self._algorithm, self._run
        self.result = result = _train_once(algorithm, signals)
        now = time.perf_counter()
        reason = self.reached(result, now - self.started)
        if reason is not None and not self._stop.is_reached_by_evaluation(result):
            _finish_evaluation(algorithm, signals, result)
        if run is not None:
            run.write(result)
        self.written = result
        if self._progress is not None:
            self._progress.add(result)
        self._pending.check(result, is_last=reason is not None)
        is_due = reason is None and _checkpoint_is_due(algorithm, result, now - self._saved)
        if run is not None and is_due:
            with algorithm.monitor.working():
                run.save(algorithm, result)
            self._saved = time.perf_counter()
        if self._recording is not None:
            self._recording.end_iteration(is_due)
        return reason

    def reached(self, result: dict[str, Any], seconds: float) -> str | None:
        """Return the limit that a result has reached after this time [s], or None."""
        window = self._algorithm.config.metrics_num_episodes_for_smoothing
        return self._stop.reached(result, window, seconds)

    def close(self, exit_code: int) -> None:
        """Close the files, and show the last result.

        Args:
            exit_code: of the run; 0 without a signal.
        """
        self._files.close()
        _finish_display(self._progress, self._algorithm.last_result, exit_code)


@contextmanager
def _end_noted(run: RunDirectory | None, signals: SignalHandler) -> Iterator[None]:
    """Note the end of a run if an error or a signal ends it at its start, or prevents its last
    checkpoint.

    Raises:
        StoppedBySignal: a signal other than Ctrl-C was received, or the output was closed.
    """
    try:
        yield
    except BaseException as error:
        stopped = _stopped_by(error, signals)
        if run is not None and stopped is not None:
            run.note("ended", stopped[1])
        elif run is not None:
            run.note("failed", f"{type(error).__name__}: {error}")
        if stopped is None or isinstance(error, KeyboardInterrupt):
            raise
        raise StoppedBySignal(stopped[0]) from None


def _open_files(algorithm: Any, run: RunDirectory, files: ExitStack) -> Recording:
    """Open the files that a run writes besides its results: journal, activities, trace.

    Args:
        algorithm: the algorithm.
        run: its run directory.
        files: closes the files.

    Returns:
        the journal.
    """
    run.add_writer_tags([writer.tag for writer in experience_writers(algorithm)])
    recording = Recording(algorithm, run.path)
    files.callback(recording.close)
    listeners, activity_log = algorithm.monitor.listeners, ActivityLog(run.path)
    listeners.append(activity_log.append)
    files.callback(activity_log.close)
    files.callback(listeners.remove, activity_log.append)
    if (seconds := algorithm.config.trace_s) is not None:
        algorithm.plan.start(algorithm.config.seed)
        files.callback(_write_trace, Tracer(algorithm.plan, seconds), run.path / TRACE)
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
    """Show the last result. If the terminal or the output was closed, discard all later output."""
    try:
        if progress is not None:
            progress.finish(result)
    except OSError as error:
        if exit_code != TERMINAL_CLOSED:
            if not isinstance(error, BrokenPipeError):
                log.warning("cannot show the last result: %s", error)
            discard_closed_output()
    if exit_code == TERMINAL_CLOSED:
        discard_lost_output()


def _stopped_by(error: BaseException, signals: SignalHandler) -> tuple[int, str] | None:
    """Return the exit code and the reason if an exception stops a run from outside, by a signal or
    by closing its output; None for an error of the training. Leaving the debugger is Ctrl-C."""
    if isinstance(error, (KeyboardInterrupt, BdbQuit)):
        return INTERRUPTED, "interrupted"
    is_signal = signals.is_termination(error)
    if signals.terminal_closed and (is_signal or isinstance(error, OSError)):
        return TERMINAL_CLOSED, "terminal closed"
    if isinstance(error, BrokenPipeError) and is_output_closed():
        return OUTPUT_CLOSED, "output closed"
    return (TERMINATED, "terminated") if is_signal else None


def _save_after_error(
    algorithm: Any, run: RunDirectory | None, written: Any, previous: Any, error: BaseException
) -> None:
    """Write the error, the last result, and a checkpoint if the state after the error can be
    saved; see `_write_last_result`."""
    if run is None:
        return
    stage = getattr(error, "_flowrl_stage", None)
    text = f"{type(error).__name__}: {error}"
    run.note("failed", text, None if stage is None else stage.line)
    result = written
    try:
        result = _write_last_result(algorithm, run, written, previous)
    except Exception as failure:  # such as a value that JSON does not have
        log.warning("the last result is not written: %s: %s", type(failure).__name__, failure)
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
    if display != "line" and can_redraw():
        # not imported above: runs without a terminal start faster without rich
        from flowrl.trainer.runs.live_view import LiveView

        return LiveView(stop, algorithm.monitor)
    evaluates = algorithm.config.evaluation_interval is not None
    return ProgressTable(stop, algorithm.plan.metrics.counters, algorithm.iteration, evaluates)


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
    least = config.min_sample_timesteps_per_iteration
    if size is not None and (stop.timesteps or math.inf) < max(size, least):
        first = f"an iteration has at least {least:,}" if least > size else ""
        limits = f"{limits} ({first or f'the first train batch has {size:,}'})"
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
