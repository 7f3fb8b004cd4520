"""Resume a run: its limits, and the files that it wrote after the checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flowrl.data.checkpoint import remove_partial_checkpoints
from flowrl.errors import ConfigError
from flowrl.iter.stage import walk
from flowrl.ops import WriteParquet
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.runs.activity_log import truncate_activities
from flowrl.trainer.runs.formatting import format_count
from flowrl.trainer.runs.recording import end_recording_at
from flowrl.trainer.runs.run_directory import RunDirectory
from flowrl.trainer.runs.saved_run import read_stop_rules, result_at
from flowrl.trainer.runs.stop_rules import StopRules


def limits_of_resumed(
    run_dir: Path | None, config: AlgorithmConfig, new: StopRules
) -> tuple[AlgorithmConfig, StopRules]:
    """Return the settings, with `total_timesteps`, and the limits of a resumed run.

    Args:
        run_dir: the run directory; None for a checkpoint outside of one.
        config: settings of the run.
        new: the new limits; if they are empty, the run keeps its own.

    Raises:
        ConfigError: a limit does not fit the settings, or there are no limits because stop.json is
            missing or damaged.
    """
    saved = StopRules() if run_dir is None else _saved_stop_rules(run_dir, config, new)
    total = _total_of_resumed(config.total_timesteps, new, saved)
    config = config.updated(total_timesteps=total)
    limits = new if new.is_set() else saved
    limits.check(config)
    return config, limits


def _saved_stop_rules(run_dir: Path, config: AlgorithmConfig, new: StopRules) -> StopRules:
    """Return the limits of a run, which apply if it is resumed without new ones.

    If there are new limits, a missing or damaged stop.json counts as one without limits.

    Args:
        run_dir: the run directory.
        config: settings of the run.
        new: the new limits.

    Raises:
        ConfigError: stop.json is missing or damaged, and there are no new limits.
    """
    try:
        stop = StopRules.from_saved(read_stop_rules(run_dir))
    except ConfigError as error:
        if new.is_set():
            return StopRules()
        raise ConfigError(f"{error}. To resume the run without that file, give a limit") from None
    return stop if config.samples else replace(stop, reward=None)  # offline: no returns


def _total_of_resumed(before: int | None, stop: StopRules, saved: StopRules) -> int | None:
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


def reached_limit(algorithm: Any, stop: StopRules, run_dir: Path | None) -> str | None:
    """Return the limit that a run has already reached, or None.

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


def prepare_to_resume(
    algorithm: Any, run: RunDirectory, stop: StopRules, total: int | None
) -> None:
    """Make a run directory ready for a resumed training.

    What the run wrote after the algorithm's iteration is removed, because it is written again; if
    there are newer checkpoints, they are kept with their results in another folder. Experience that
    a copy of the run directory, or the original of a copy, has recorded is not removed. The new
    limits replace the old ones. Checkpoints that a killed process did not complete are removed.

    Args:
        algorithm: the algorithm, with the state of a checkpoint.
        run: its run directory.
        stop: the limits.
        total: the setting `total_timesteps`.
    """
    run.note_resumption(algorithm.config.updated(total_timesteps=total), asdict(stop))
    kept, num_removed = run.truncate(algorithm.iteration)
    truncate_activities(run.path, algorithm.iteration)
    end_recording_at(run.path, algorithm.iteration)
    remove_partial_checkpoints(run.path)
    if kept is not None:
        print(
            f"the checkpoints and results after iteration {algorithm.iteration} are kept in {kept}"
        )
    elif num_removed:
        print(
            f"there is no checkpoint after iteration {algorithm.iteration}: "
            f"{format_count(num_removed, 'result')} will be computed again"
        )
    for writer in experience_writers(algorithm):
        writer.remove_newer_files(run.writer_tags())


def experience_writers(algorithm: Any) -> list[WriteParquet]:
    """Return the operators of a plan that write experience."""
    operators = [getattr(stage, "fn", None) for stage in walk(algorithm.plan.stage)]
    return [operator for operator in operators if isinstance(operator, WriteParquet)]
