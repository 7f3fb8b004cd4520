"""Activity: what a plan, its workers and this process did in a period.

`take_snapshot` reads the cumulative measurements of a plan; the difference of two snapshots is an
Activity. All values can be written as JSON.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

from flowrl.iter import LocalIterator, Source, Stage
from flowrl.iter.gather import Gather
from flowrl.iter.stage import walk
from flowrl.iter.stages.function_stage import is_user_defined
from flowrl.iter.stages.tasks import ForEachConcurrent
from flowrl.ops.concurrency import DequeueStage, Enqueue
from flowrl.ops.plan_metrics import PlanMetrics
from flowrl.ops.replay import ReplayActorsStage, ReplayStage, StoreToReplayBuffer
from flowrl.ops.report import StandardMetricsReporting
from flowrl.ops.rollout import CountRollouts
from flowrl.process_usage import process_usage
from flowrl.sampling.callbacks import callback_seconds
from flowrl.sampling.worker_set import WorkerSet

_WRAPPED = re.compile(
    r"[a-z_]+\(([A-Za-z_<][\w.<>]*)[(),]"
)  # the operator in for_each(TrainOneStep(…))
_NAME_END = re.compile("[( ]")
SHARES = ("busy", "waiting", "blocked")
LEVELS = ("rss_bytes",)  # measurements that are values at a time, not sums since the start


@dataclass
class StageActivity:
    """One stage of the plan in a period.

    Attributes:
        id: number of the stage in `LocalIterator.stats`.
        title: display text of the stage.
        name: name of the stage's operator.
        line: `file:line` where the operator was chained.
        kind: "sampling" (a gather of workers), "rollouts" (concatenates their fragments), "store",
            "replay", "replay_actors", "training", "enqueue", "dequeue" (of a learner thread),
            "tasks" (an operator in Ray tasks), "report" or "operator".
        parents: ids of the stages that the stage pulls.
        items: number of items that the stage returned.
        busy, waiting, blocked: shares of the period: in the stage's own code, waiting for the
            parents, not pulled.
        grown_bytes: growth of the process's memory during the stage's own code [bytes].
        is_own: whether the operator is the user's, not one of flowrl's.
        values: the other values of the stage in `stats()`: queue sizes, and differences of seconds.
    """

    id: int
    title: str
    name: str
    line: str
    kind: str
    parents: list[int]
    items: int
    busy: float
    waiting: float
    blocked: float
    grown_bytes: float
    is_own: bool = False
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class WorkerActivity:
    """One worker in a period.

    Attributes:
        index: `worker_index` of the worker: 0 in process, from 1 on actors.
        restarts: restarts of the worker in the period.
        period_s: length of the measured period [s]: between the ends of the newest fragments of two
            measurements; of the worker in process, which works in turn with the rest of the plan,
            the whole period.
        fragments, env_steps, num_bytes: counts of the returned fragments, their env steps and their
            bytes.
        seconds: seconds per part of the work: `sample_s` in total, and in it `env_step_s` (with
            `reset_s`), `inference_s`, `collection_s`, `postprocess_s`; `weights_s`, loading
            weights.
        callback_s: seconds in each callback, by its name.
        operator_s: seconds in each operator that is chained on the shards, by its title.
        usage: differences of `ProcessUsage.read`, and the newest `rss_bytes`.
    """

    index: int
    restarts: int
    period_s: float
    fragments: int
    env_steps: int
    num_bytes: int
    seconds: dict[str, float]
    callback_s: dict[str, float]
    operator_s: dict[str, float]
    usage: dict[str, float]

    @property
    def busy(self) -> float:
        """Share of the period in which it worked."""
        return min(self.busy_s / self.period_s, 1.0) if self.period_s > 0 else 0.0

    def share_of(self, seconds: float) -> float:
        """Return seconds as a share of the period."""
        return min(seconds / self.period_s, 1.0) if self.period_s > 0 else 0.0

    @property
    def waits_for_env(self) -> bool:
        """Whether it uses a processor in less than half of the time of its work."""
        return bool(self.usage) and self.usage.get("cpu_s", 0.0) < self.busy_s / 2

    @property
    def busy_s(self) -> float:
        """Seconds of work: sampling, loading weights, operators on the shards."""
        parts = self.seconds.get("sample_s", 0.0), self.seconds.get("weights_s", 0.0)
        after_sampling = self.callback_s.get("on_sample_end", 0.0)
        return sum(parts) + after_sampling + sum(self.operator_s.values())


@dataclass
class Activity:
    """What a plan did in a period.

    Attributes:
        time: end of the period, in seconds since 1970.
        seconds: length of the period.
        iteration: number of results at the end.
        env_steps_total: env steps sampled at the end.
        counters: increases of the plan's counters. Those of `Monitor.activity` and activity.jsonl
            are since the measurement before, so that they add up.
        stages: the stages, end of the plan first.
        workers: the workers that returned something.
        usage: of this process: differences of `ProcessUsage.read`, the newest `rss_bytes`, and
            `rss_bytes_added`, the growth of the memory (of a Monitor: the lasting growth).
        weights_s: seconds of preparing weights for the workers.
        outside_s: seconds outside the plan, between two results.
        policy_lag_mean, policy_lag_max: policy lag of the newest trained
            fragments, in updates.
        episodes_total: episodes that have ended since the start; None before the first result.
        callback_s: seconds in each callback of this process, by its name.
        stalled_s: seconds for which the plan has waited for a fragment, if that is much longer than
            before; otherwise 0.
        diagnosis: see `diagnose`.
    """

    time: float
    seconds: float
    iteration: int
    env_steps_total: int
    counters: dict[str, int]
    stages: list[StageActivity]
    workers: list[WorkerActivity]
    usage: dict[str, float]
    weights_s: float
    outside_s: float
    policy_lag_mean: float
    policy_lag_max: float
    episodes_total: int | None
    callback_s: dict[str, float] = field(default_factory=dict)
    stalled_s: float = 0.0
    diagnosis: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the activity as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Activity:
        """Return the activity of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the values are not those of an activity.
        """
        if not values["seconds"] > 0:
            raise ValueError(f"seconds: must be positive, got {values['seconds']!r}")
        return cls(
            **{
                **values,
                "stages": [StageActivity(**stage) for stage in values["stages"]],
                "workers": [WorkerActivity(**worker) for worker in values["workers"]],
            }
        )

    @property
    def has_finished_work(self) -> bool:
        """Whether a worker returned a fragment, or an operator trained."""
        trained = self.counters.get("num_env_steps_trained", 0)
        return bool(trained) or any(worker.fragments for worker in self.workers)

    def stages_of(self, kind: str) -> list[StageActivity]:
        """Return the stages of a kind."""
        return [stage for stage in self.stages if stage.kind == kind]


@dataclass
class Snapshot:
    """Cumulative measurements of a plan; see Activity.

    Attributes:
        clock: time of `time.monotonic`.
        stages: the rows of `LocalIterator.stats`, with the kind of each stage.
        workers: what each worker has done, by its `worker_index`.
        outside_s: seconds outside the plan, between two results.
    """

    clock: float
    time: float
    iteration: int
    counters: dict[str, int]
    stages: list[dict[str, Any]]
    workers: dict[int, dict[str, Any]]
    usage: dict[str, float]
    weights_s: float
    outside_s: float
    policy_lag_mean: float
    policy_lag_max: float
    episodes_total: int | None
    callback_s: dict[str, float]

    @property
    def has_steps(self) -> bool:
        """Whether the plan has sampled or trained."""
        names = "num_env_steps_sampled", "num_env_steps_trained"
        return any(self.counters.get(name, 0) for name in names)


def take_snapshot(
    plan: LocalIterator[Any], workers: WorkerSet, result: Mapping[str, Any], outside_s: float
) -> Snapshot:
    """Return the measurements of a running plan; may be called in another thread.

    Args:
        plan: the plan.
        workers: its WorkerSet.
        result: its newest result; empty before the first one.
        outside_s: seconds outside the plan so far.
    """
    stages = plan.stats()
    for row, stage in zip(stages, walk(plan.stage), strict=True):
        row["kind"] = kind_of(stage)
        row["is_own"] = is_user_defined(getattr(stage, "fn", stage))
    plan_metrics = PlanMetrics.of(plan.metrics)
    reports: dict[int, dict[str, Any]] = {}
    is_remote = workers.num_workers > 0
    for stage in walk(plan.stage):
        for shard in stage.states if isinstance(stage, Gather) else ():
            source = shard.newest
            has_left = shard.status in ("left", "failed")
            # other shards are not rollout workers
            if source is not None and "sampled" in source.tags and not has_left:
                report = _report_of(source, shard.step_stats)
                before = reports.get(source.shard + is_remote)
                if before is None or before["until"] <= report["until"]:
                    reports[source.shard + is_remote] = report  # the newest of several streams
    runners = result.get("env_runners", {})
    timers = plan.metrics.timers
    return Snapshot(
        clock=time.monotonic(),
        time=time.time(),
        iteration=result.get("training_iteration", 0),
        counters=dict(plan.metrics.counters),
        stages=stages,
        workers=reports,
        usage=dict(process_usage().read()),
        weights_s=timers["update"].total_s if "update" in timers else 0.0,
        outside_s=outside_s,
        policy_lag_mean=runners.get("policy_lag_mean", 0.0),
        policy_lag_max=runners.get("policy_lag_max", 0.0),
        episodes_total=result["episodes_total"] + plan_metrics.num_new_episodes if result else None,
        callback_s=dict(callback_seconds(workers.local_worker().callbacks)),
    )


def _report_of(source: Source, step_stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a worker has done since its start.

    Args:
        source: of its newest fragment.
        step_stats: the rows of its stream.
    """
    tags = source.tags
    return {
        "incarnation": source.incarnation,
        **tags["sampled"],
        "until": tags["sampled_at"][1],
        "timings": tags["timings"],
        "callback_s": tags["callback_s"],
        "usage": tags["usage"],
        # the last row is the worker itself
        "operator_s": {_with_line(step): step["busy_s"] for step in step_stats[:-1]},
    }


def _with_line(row: Mapping[str, Any]) -> str:
    return f"{operator_name(row['stage'])} (chained at {row['chained_at']})"


def operator_name(title: str) -> str:
    """Return the name of the operator in the title of a stage.

    Example:
        >>> operator_name("for_each(TrainOneStep(num_sgd_iter=10))")
        'TrainOneStep'
    """
    wrapped = _WRAPPED.match(title)
    return wrapped.group(1) if wrapped else _NAME_END.split(title)[0]


def kind_of(stage: Stage) -> str:
    """Return the kind of a stage; see StageActivity."""
    operator = getattr(stage, "fn", stage)
    if isinstance(stage, Gather):
        return "sampling"
    if isinstance(stage, ReplayActorsStage):
        return "replay_actors"
    if isinstance(stage, ReplayStage):
        return "replay"
    if isinstance(stage, DequeueStage) and stage.learner_thread is not None:
        return "dequeue"
    if isinstance(operator, CountRollouts):
        return "rollouts"
    if isinstance(operator, StoreToReplayBuffer):
        return "store"
    if isinstance(operator, Enqueue):
        return "enqueue"
    if getattr(operator, "trains", False):
        return "training"
    if isinstance(stage, ForEachConcurrent):
        return "tasks"
    return "report" if stage.name == StandardMetricsReporting.__name__ else "operator"


def activity_between(first: Snapshot, last: Snapshot) -> Activity:
    """Return what happened between two snapshots of a plan."""
    seconds = max(last.clock - first.clock, 1e-9)
    before = {row["id"]: row for row in first.stages}
    return Activity(
        time=last.time,
        seconds=seconds,
        iteration=last.iteration,
        env_steps_total=last.counters.get("num_env_steps_sampled", 0),
        counters=_increases(first.counters, last.counters),
        stages=[_stage_activity(before.get(row["id"], {}), row, seconds) for row in last.stages],
        workers=[
            _worker_activity(index, first.workers.get(index), report, seconds)
            for index, report in sorted(last.workers.items())
        ],
        usage=_usage(first.usage, last.usage),
        weights_s=last.weights_s - first.weights_s,
        outside_s=last.outside_s - first.outside_s,
        policy_lag_mean=last.policy_lag_mean,
        policy_lag_max=last.policy_lag_max,
        episodes_total=last.episodes_total,
        callback_s=_increases(first.callback_s, last.callback_s),
    )


def _stage_activity(
    before: Mapping[str, Any], row: Mapping[str, Any], seconds: float
) -> StageActivity:
    shares = {
        name: min(max(row.get(f"{name}_s", 0.0) - before.get(f"{name}_s", 0.0), 0.0) / seconds, 1.0)
        for name in SHARES
    }
    known = {"id", "stage", "chained_at", "parents", "items", "shards", "grown_bytes"}
    known |= {"kind", "is_own"}
    known |= {*SHARES, *(f"{name}_s" for name in SHARES)}
    values = {name: value for name, value in row.items() if name not in known}
    values |= {
        name: value - earlier
        for name, value in values.items()
        if name.endswith("_s")
        and isinstance(value, Real)
        and isinstance(earlier := before.get(name, 0.0), Real)
    }
    return StageActivity(
        id=row["id"],
        title=row["stage"],
        name=operator_name(row["stage"]),
        line=row["chained_at"],
        kind=row["kind"],
        is_own=row["is_own"],
        parents=list(row["parents"]),
        items=row["items"] - before.get("items", 0),
        grown_bytes=row.get("grown_bytes", 0.0) - before.get("grown_bytes", 0.0),
        values=values,
        **shares,
    )


def _worker_activity(
    index: int, before: Mapping[str, Any] | None, report: Mapping[str, Any], seconds: float
) -> WorkerActivity:
    restarts = 0
    if before is not None and before["incarnation"] != report["incarnation"]:
        restarts = report["incarnation"] - before["incarnation"]
        before = None
    old: Mapping[str, Any] = before or {"until": report["since"]}
    return WorkerActivity(
        index=index,
        restarts=restarts,
        period_s=report["until"] - old["until"] if index else seconds,
        **{name: report[name] - old.get(name, 0) for name in _COUNTS},
        seconds=_increases(old.get("timings", {}), report["timings"]),
        callback_s=_increases(old.get("callback_s", {}), report["callback_s"]),
        operator_s=_increases(old.get("operator_s", {}), report["operator_s"]),
        usage=_usage(old.get("usage", {}), report["usage"]),
    )


_COUNTS = ("fragments", "env_steps", "num_bytes")


def _increases(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return by how much values have grown."""
    return {name: max(value - before.get(name, 0), 0) for name, value in after.items()}


def _usage(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    usage = _increases(before, after)
    for name in LEVELS:
        if name in after:
            usage[name] = after[name]
            usage[f"{name}_added"] = after[name] - before.get(name, math.inf)
    return {name: value for name, value in usage.items() if math.isfinite(value)}
