"""RunReplayer: repeat a recorded run in this process, item by item."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.errors import ConfigError
from flowrl.iter.journal import JournalReader, ReplayEnded
from flowrl.iter.stage import NOT_READY, Stage, stages_by_name, walk
from flowrl.monitoring.activity import operator_name
from flowrl.ops.inspection import Breakpoint
from flowrl.trainer.runs.comparison import first_difference
from flowrl.trainer.runs.recording import JOURNAL
from flowrl.trainer.runs.result_files import result_to_json
from flowrl.trainer.runs.saved_run import read_results

# settings of a run that a replay does not use: they write files, evaluate or measure
NOT_REPLAYED: dict[str, Any] = {
    "monitor": False,
    "trace_s": None,
    "log_to": [],
    "log_config": {},
    "output": None,
    "evaluation_interval": None,
    "evaluation_parallel_to_training": False,
    "evaluation_video_dir": None,
    "checkpoint_score_attribute": None,
    "checkpoint_score_order": "max",
    "num_spare_workers": 0,
    "max_worker_memory_mb": None,
    "env_step_timeout_s": None,
    "env_reset_timeout_s": None,
}


class ReplayedResult(NamedTuple):
    """A result of a replay.

    Attributes:
        result: the result.
        is_compared: whether the run has written a result of this iteration.
        difference: the first metric that differs from the run's, with both values, or None.
    """

    result: dict[str, Any]
    is_compared: bool
    difference: str | None


class ItemBreakpoint(NamedTuple):
    """A breakpoint: the `number`-th item of the operator `name`, such as `Enqueue`, or as `stats()`
    names it, such as `for_each(Enqueue)`."""

    name: str
    number: int


class RunReplayer:
    """Run a recorded training again. Its remote workers and replay actors are in this process.

    Args:
        algorithm: a new algorithm with the settings of the run.
        run_dir: the run directory.
        until: where to stop in the debugger; None nowhere.

    Attributes:
        end: why the replay ended; "" before its end.
        num_items: items of the operator of `until` so far.

    Raises:
        ConfigError: the run has no journal, or there is no such operator.
        ReplayError: the journal is damaged.
    """

    def __init__(self, algorithm: Any, run_dir: Path, until: ItemBreakpoint | None = None):
        journal = run_dir / JOURNAL
        if not journal.is_file():
            raise ConfigError(
                f"{run_dir}: it has no {JOURNAL}: only runs of asynchronous plans have one "
                "(impala, appo, a3c, apex, …); the command of a synchronous run repeats it"
            )
        self._algorithm = algorithm
        self._journal = JournalReader(journal)
        self._expected = {r.get("training_iteration"): r for r in read_results(run_dir)}
        self.end = ""
        algorithm.workers.replay_in_process()
        # a resumed run may have a larger total_timesteps than the recording
        algorithm.workers.set_total_timesteps(self._journal.about.get("total_timesteps"))
        algorithm.plan.metrics.journal = self._journal
        self._until_stage: Stage | None = None
        if until is not None:
            self._until_stage = _stop_at(until, algorithm.plan.stage)

    @property
    def num_items(self) -> int:
        return 0 if self._until_stage is None else self._until_stage.items

    def results(self) -> Iterator[ReplayedResult]:
        """Yield each result.

        Raises:
            ReplayError: the replay does something else than the run.
            Exception: the error of an operator or an environment, which the run also had.
        """
        while True:
            try:
                result = self._algorithm.train()
                if self._journal.plan_log.observe("saved", 0):
                    self._algorithm.plan.state_dict()  # a checkpoint collects the pending replies
            except ReplayEnded as end:
                self.end = str(end)
                return
            expected = self._expected.get(result["training_iteration"])
            difference = None
            if expected is not None:
                difference = first_difference(result_to_json(result), expected)
            yield ReplayedResult(result, expected is not None, difference)


def _stop_at(until: ItemBreakpoint, plan: Stage) -> Stage:
    """Set a breakpoint after an item of a stage of a plan that has not been started; return the
    stage."""
    stages = stages_by_name(plan)
    named = [title for title in stages if operator_name(title) == until.name]
    if until.name in stages:
        named = [until.name]
    if not named:
        raise ConfigError(f"there is no operator {until.name!r}, only {', '.join(stages)}")
    if len(named) > 1:
        raise ConfigError(f"several operators are named {until.name}: {', '.join(named)}")
    stage, stop = stages[named[0]], Breakpoint()
    pull = stage.pull

    def pull_and_stop(block: bool) -> Any:
        item = pull(block)
        if item is not NOT_READY and stage.items == until.number:
            stop(item)
        return item

    stage.pull = pull_and_stop  # type: ignore[method-assign]
    # consumers have a reference to the old method
    for consumer in walk(plan):
        consumer.wire([parent.pull for parent in consumer.parents])
    return stage
