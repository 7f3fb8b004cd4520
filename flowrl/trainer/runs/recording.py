"""Recording: the journal of an asynchronous run, for `flowrl replay`."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.iter.journal import JournalWriter, truncate_journal
from flowrl.iter.stage import Stage, walk

JOURNAL = "journal.msgpack"  # file in the run directory

log = logging.getLogger("flowrl")


class Recording:
    """Record the order in which an asynchronous plan runs, unless its run continues another one.

    Args:
        algorithm: the algorithm; its plan has not been started.
        run_dir: the run directory.
    """

    def __init__(self, algorithm: Any, run_dir: Path):
        self._journal: JournalWriter | None = None
        self._algorithm = algorithm
        stages = list(walk(algorithm.plan.stage))
        is_asynchronous = any(stage.is_asynchronous for stage in stages)
        # the order of the threads of sample_async is not recorded
        if is_asynchronous and _is_new(algorithm, stages) and not algorithm.config.sample_async:
            total = algorithm.workers.global_vars["total_timesteps"]
            self._journal = JournalWriter(run_dir / JOURNAL, {"total_timesteps": total})
            algorithm.plan.metrics.journal = self._journal

    def end_iteration(self, saved: bool) -> None:
        """Write the order of the last iteration; an error of the file system ends the recording.

        Args:
            saved: whether it ended with a checkpoint. A checkpoint collects the pending replies of
                the workers, so a replay must do so, too.
        """
        if self._journal is None:
            return
        self._journal.plan_log.observe("saved", saved)
        self._flush()

    def _flush(self) -> None:
        assert self._journal is not None
        try:
            self._journal.flush(self._algorithm.iteration)
        except OSError as error:
            log.warning("the order of the run is not recorded any more: %s", error)
            self._journal.end("the journal could not be written")
            with suppress(OSError):
                self._journal.flush(self._algorithm.iteration)  # the reason
            with suppress(OSError):
                self._journal.close()
            self._journal = None

    def close(self) -> None:
        """Write the rest and close the file."""
        if self._journal is None:
            return
        self._flush()
        if self._journal is not None:
            self._journal.end("the recording was closed")  # the plan may be pulled again
            self._journal.close()


def _is_new(algorithm: Any, stages: list[Stage]) -> bool:
    """Return whether nothing was trained, sampled or loaded yet."""
    policies = algorithm.workers.local_worker().policy_map.values()
    return not (
        algorithm.iteration
        or any(algorithm.plan.metrics.counters.values())
        or any(policy.version for policy in policies)
        or any(stage.started for stage in stages)
    )


def end_recording_at(run_dir: Path, iteration: int) -> None:
    """Remove what the journal of a run has recorded after the iteration of its resume."""
    path = run_dir / JOURNAL
    if not path.is_file():
        return
    try:
        truncate_journal(path, iteration)
    except (OSError, ValueError) as error:
        log.warning("%s cannot be shortened and is removed: %s", path, error)
        path.unlink(missing_ok=True)
