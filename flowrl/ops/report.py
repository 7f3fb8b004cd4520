"""StandardMetricsReporting: the operator that ends a plan and yields its results."""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.iter import LocalIterator, Stage, _get_shared_metrics
from flowrl.iter.metrics import Timer, current_journal
from flowrl.iter.stage import operator_of, walk
from flowrl.iter.stages.function_stage import is_user_defined
from flowrl.ops.plan_metrics import (
    MAX_EPISODES,
    Info,
    PlanMetrics,
    check_episode,
    without_row_stats,
)
from flowrl.sampling.episode import EpisodeMetrics, returns_by_policy
from flowrl.sampling.worker_config import WorkerConfig
from flowrl.sampling.worker_set import WorkerSet, check_workers
from flowrl.setting_aliases import INFO_COUNTERS
from flowrl.setting_values import check_int, nearest
from flowrl.settings import NonNegative, NonNegativeInt, Positive, Settings, setting
from flowrl.state_schema import Fields, Natural, check_state

Result = dict[str, Any]
SelectedWorkers = Collection[int] | Callable[[int], Collection[int] | None] | None
"""Indices of workers, or a function that returns them for a number of workers; None for all."""

MAX_REPORTED_AGENTS = 200  # each has a column in progress.csv, also if its id occurs only once

log = logging.getLogger("flowrl")


class ReportingConfig(Settings):
    """Settings of StandardMetricsReporting."""

    min_time_s_per_iteration: NonNegative | None = setting(None, group="reporting", le=86_400)
    """Minimum seconds between reports; None ignores time, so that the reports of seeded runs are
    reproducible."""
    min_sample_timesteps_per_iteration: NonNegativeInt = setting(0, group="reporting")
    """Minimum env steps between reports. 0 with `min_time_s_per_iteration=None` reports every item
    of the plan."""
    metrics_num_episodes_for_smoothing: int = setting(100, group="reporting", ge=1, le=MAX_EPISODES)
    """Number of most recent episodes that episode statistics are computed over."""
    monitor: bool = setting(True, group="reporting")
    """Measure the plan once per second while it trains, for the `diagnosis` of results and the
    file activity.jsonl of the run directory."""
    trace_s: Positive | None = setting(None, group="reporting")
    """Write the last `trace_s` seconds of a run to trace.json in its run directory, as Chrome
    trace events, which https://ui.perfetto.dev shows; None writes no trace."""
    logged_names: Literal["classic", "nested"] = setting("classic", group="reporting")
    """Names of metrics in TensorBoard, progress.csv, W&B and MLflow, where each metric has one
    name: classic (`episode_reward_mean`, `info/learner/…`) or nested
    (`env_runners/episode_return_mean`, `learners/…`). Results in Python have both."""


class StandardMetricsReporting(LocalIterator[Result]):
    """A stream of result dicts, one per report; the last operator of a plan.

    It reports on the first item after both `min_sample_timesteps_per_iteration` env steps and
    `min_time_s_per_iteration` seconds have passed since the last report. By default it reports on
    every item. Reports of seeded runs repeat exactly only if `min_time_s_per_iteration` is None.

    Args:
        train_op: the stream to report on.
        workers: the WorkerSet.
        config: the algorithm's settings.
        selected_workers: indices (from 0) of the workers that the statistics of episodes cover, for
            plans whose workers explore differently, or a function that returns them for the present
            number of workers; None for all. The numbers of episodes always include all workers.

    Raises:
        TypeError: `train_op` is not a LocalIterator, or `workers` not a WorkerSet.
        ValueError: the stream contains another StandardMetricsReporting; an operator names a policy
            that does not exist; `policies_to_train` names a policy that no operator trains,
            although every training operator names its policies.
    """

    def __init__(
        self,
        train_op: LocalIterator[Any],
        workers: WorkerSet,
        config: Any,
        selected_workers: SelectedWorkers = None,
    ):
        if isinstance(train_op, WorkerSet):
            raise TypeError(
                "StandardMetricsReporting takes (stream, workers, config): the workers are the "
                "second argument"
            )
        if not isinstance(train_op, LocalIterator):
            raise TypeError(
                "StandardMetricsReporting takes a LocalIterator, got a "
                f"{type(train_op).__name__}: chain gather_sync() or gather_async() after "
                'ParallelRollouts(workers, mode="raw")'
            )
        if not isinstance(workers, WorkerSet):
            raise TypeError(
                "StandardMetricsReporting takes (stream, workers, config): workers is a WorkerSet, "
                f"got a {type(workers).__name__}"
            )
        for stage, operator in operators_of(train_op.stage):
            if isinstance(operator, CollectMetrics):
                raise ValueError(
                    f"the stream already has results, of {stage} chained at {stage.line}: a plan "
                    "has one StandardMetricsReporting, at its end. Remove the other one"
                )
        config = ReportingConfig.of(config)
        due = ReportDue(config.min_sample_timesteps_per_iteration, config.min_time_s_per_iteration)
        check_trained_policies(train_op.stage, workers.config)
        window = config.metrics_num_episodes_for_smoothing
        collect = CollectMetrics(workers, window, selected_workers)
        reports = train_op.filter(due).for_each(collect)
        super().__init__(reports.stage, "StandardMetricsReporting")
        self.stage.name, self.stage.title = "StandardMetricsReporting", self.name


def operators_of(stage: Stage) -> Iterator[tuple[Stage, Any]]:
    """Yield each stage of a plan with its operator: a learner, a function, or the stage itself."""
    for node in walk(stage):
        yield node, operator_of(node)


def training_operators(stage: Stage) -> list[Any]:
    """Return the operators of a plan that train policies.

    Such an operator has the attributes `trains`, which is True, and `policies`, ids or None.
    """
    return [op for _, op in operators_of(stage) if getattr(op, "trains", False)]


def check_trained_policies(stage: Stage, config: WorkerConfig) -> None:
    """Check that operators name existing policies, and that `policies_to_train` are trained.

    Raises:
        ValueError: see StandardMetricsReporting.
    """
    known = config.policies or (DEFAULT_POLICY_ID,)
    for node, operator in operators_of(stage):
        bases = type(operator).__mro__
        if is_user_defined(operator) and all(map(is_user_defined, bases)):
            if not getattr(operator, "trains", False):
                continue  # these attributes may be something else
            _check_policies_of(operator, node)
        for attribute in ("policies", "policy_ids"):
            ids = getattr(operator, attribute, None)
            if not isinstance(ids, Collection) or isinstance(ids, str):
                continue
            unknown = sorted(set(ids) - set(known))
            if unknown:
                raise ValueError(
                    f"{operator!r}, chained at {node.line}: there is no policy {unknown[0]!r}, "
                    f"only {sorted(known)}.{nearest(unknown[0], list(known))}"
                )
    operators = training_operators(stage)
    trained = {policy_id for op in operators for policy_id in op.policies or ()}
    to_train = config.policies_to_train
    untrained = [] if to_train is None or callable(to_train) else sorted(set(to_train) - trained)
    if untrained and trained and all(op.policies is not None for op in operators):
        raise ValueError(
            f"policies_to_train names {untrained[0]!r}, but the plan only trains "
            f"{sorted(trained)}: add a branch that trains it, or remove it"
        )


def _check_policies_of(operator: Any, node: Stage) -> None:
    """Raise TypeError if an operator of the user that trains does not say which policies."""
    is_given = hasattr(operator, "policies")
    ids = operator.policies if is_given else ""
    if isinstance(ids, str) or not isinstance(ids, Collection | None):
        raise TypeError(
            f"{node}, chained at {node.line}: an operator with trains = True needs the attribute "
            "policies, a list with the ids of the policies that it trains, or None for all, got "
            f"{repr(ids) if is_given else 'none'}"
        )


class ReportDue:
    """filter, any item: True if enough env steps and seconds have passed since the last report, or
    since the operator was created."""

    state_fields: ClassVar[Fields] = {"last_steps": Natural}

    chained_with: ClassVar[str] = "filter"

    def __init__(self, min_steps: int, min_seconds: float | None):
        self.min_steps = min_steps
        self.min_seconds = min_seconds
        self._last_steps = 0
        self._last_time = time.monotonic()

    def __call__(self, item: Any) -> bool:
        steps = _get_shared_metrics().counters["num_env_steps_sampled"]
        now = time.monotonic()
        if steps - self._last_steps < self.min_steps:
            return False
        if self.min_seconds is not None:
            due = now - self._last_time >= self.min_seconds
            journal = current_journal()
            if journal is not None:
                due = bool(journal.plan_log.observe("ReportDue", due))
            if not due:
                return False
        self._last_steps, self._last_time = steps, now
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"last_steps": self._last_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_steps = state["last_steps"]

    def __repr__(self) -> str:
        return f"ReportDue(min_steps={self.min_steps}, min_seconds={self.min_seconds})"


_TRAINER_TOTALS: Fields = {"num_env_steps_trained": Natural, "learners": dict[str, Any]}


class CollectMetrics:
    """for_each, any item -> result dict: collect counters, episode and learner statistics, and
    timers.

    The classic names (`episode_reward_mean`, `timesteps_total`, …) and the nested ones
    (`env_runners/episode_return_mean`, `learners/<policy>/…`) have the same values. `info` contains
    the counters of steps, the learner statistics, and the values that operators have set in
    `_get_shared_metrics().info`; `counters` all counters of the operators, and `trainers` the
    metrics of each training operator. Episode statistics are over the last `window` episodes, and
    NaN before the first episode ends.

    Args:
        workers: the WorkerSet.
        window: number of last episodes that episode statistics are computed over.
        selected_workers: see StandardMetricsReporting.

    Raises:
        ValueError: `selected_workers` names a worker that does not exist.
    """

    state_fields: ClassVar[Fields] = {
        "window": list[list[Any]],
        "episodes_total": Natural,
        "env_steps_reported": Natural,
        "agents": list[str],
        "info": dict[str, dict[str, Any]],
        "trainers": dict[str, dict[str, Any]],
    }

    chained_with: ClassVar[str] = "for_each"

    def __init__(
        self, workers: WorkerSet, window: int = 100, selected_workers: SelectedWorkers = None
    ):
        check_workers(workers, "CollectMetrics")
        check_int("window", window)
        self._select, self._workers = selected_workers, workers
        if isinstance(selected_workers, int):
            raise TypeError(
                "selected_workers: give a list of indices of workers, such as [1], got "
                f"{selected_workers!r}"
            )
        indices = range(max(workers.num_workers, 1))
        unknown = sorted(set(self._selected_workers() or ()) - set(indices))
        if unknown:
            raise ValueError(
                f"selected_workers: there is no worker {unknown[0]!r}, only {[*indices]}"
            )
        self._window: deque[Sequence[Any]] = deque(maxlen=int(window))
        self._episodes_total = 0
        self._env_steps_reported = 0
        self._agents: dict[str, None] = {}  # ids whose returns are reported
        self._has_left_out_agents = False
        self._info: Info = {}  # newest entry of each policy
        self._trainers: dict[str, dict[str, Any]] = {}  # name -> totals of a training operator

    def __call__(self, item: Any) -> Result:
        context = _get_shared_metrics()
        context.check_counters()
        counters, plan = context.counters, PlanMetrics.of(context)
        finished = self._take_episodes(plan)
        episodes = self._episode_metrics(finished)
        self._info |= plan.info
        info = {policy_id: without_row_stats(entry) for policy_id, entry in self._info.items()}
        lags = [lag for trainer in plan.trainers.values() for lag in trainer.policy_lags]
        episodes["hist_stats"] |= {"policy_lags": lags} if lags else {}
        return {
            **self._step_metrics(counters),
            **episodes,
            **self._worker_metrics(counters),
            "info": {
                **context.info,
                **{alias: counters[name] for alias, name in INFO_COUNTERS.items()},
                **plan.step_results,
                "learner": info,
            },
            "env_runners": {
                "episode_return_mean": episodes["episode_reward_mean"],
                "episode_return_min": episodes["episode_reward_min"],
                "episode_return_max": episodes["episode_reward_max"],
                "episode_len_mean": episodes["episode_len_mean"],
                "num_episodes": finished,
                "num_episodes_lifetime": self._episodes_total,
                "agent_episode_returns_mean": episodes["agent_reward_mean"],
                "module_episode_returns_mean": episodes["policy_reward_mean"],
                **_lag_metrics(lags),
            },
            "counters": dict(counters),
            "learners": {
                policy_id: {
                    **entry["learner_stats"],
                    "num_agent_steps_trained_lifetime": counters[
                        f"num_agent_steps_trained/{policy_id}"
                    ],
                }
                for policy_id, entry in info.items()
            },
            "trainers": self._trainer_metrics(plan),
            "timers": self._timers(context.timers, plan),
        }

    def _step_metrics(self, counters: defaultdict[str, int]) -> Result:
        """Return the numbers of steps sampled and trained on."""
        steps = counters["num_env_steps_sampled"]
        since_last_report, self._env_steps_reported = steps - self._env_steps_reported, steps
        return {
            "timesteps_total": steps,
            "timesteps_this_iter": since_last_report,
            "agent_timesteps_total": counters["num_agent_steps_sampled"],
            "num_env_steps_sampled": steps,
            "num_env_steps_sampled_lifetime": steps,
            "num_env_steps_trained": counters["num_env_steps_trained"],
            "num_agent_steps_sampled": counters["num_agent_steps_sampled"],
            "num_agent_steps_trained": counters["num_agent_steps_trained"],
        }

    def _worker_metrics(self, counters: defaultdict[str, int]) -> Result:
        """Return the numbers of failures and restarts of workers and environments."""
        return {
            "num_healthy_workers": self._workers.num_workers - len(self._workers.failed),
            "num_remote_worker_restarts": counters["num_shard_restarts"],
            "num_env_restarts": counters["num_env_restarts"],
            "num_faulty_episodes": counters["num_faulty_episodes"],
            "num_episodes_restarted": self._workers.num_episodes_restarted,
        }

    def _take_episodes(self, plan: PlanMetrics) -> int:
        """Move the episodes of the selected workers that have ended since the last result to the
        window; return the number of ended episodes of all workers."""
        finished, plan.num_new_episodes = plan.num_new_episodes, 0
        selected = self._selected_workers()
        self._window.extend(
            episode
            for worker, episode in plan.new_episodes
            if selected is None or worker in selected
        )
        plan.new_episodes.clear()
        self._episodes_total += finished
        return finished

    def _selected_workers(self) -> Collection[int] | None:
        """Return the indices of the selected workers; None for all."""
        if callable(self._select):
            return self._select(max(self._workers.num_workers, 1))
        return self._select

    def _episode_metrics(self, finished: int) -> Result:
        episodes = [EpisodeMetrics(*fields) for fields in self._window]
        by_agent: dict[str, list[float]] = {}
        custom: dict[str, list[float]] = {}
        histograms: dict[str, list[float]] = {}
        for episode in episodes:
            for agent_id, _, value in episode.agent_returns or ():
                if self._reports_agent(agent_id):
                    by_agent.setdefault(agent_id, []).append(value)
            for name, value in (episode.custom_metrics or {}).items():
                custom.setdefault(name, []).append(value)
            for name, values in (episode.hist_data or {}).items():
                histograms.setdefault(name, []).extend(values)
        by_policy = returns_by_policy(episodes, list(self._workers.local_worker().policy_map))
        spreads = {policy_id: _spread(values) for policy_id, values in by_policy.items()}
        returns = _spread([episode.episode_return for episode in episodes])
        lengths = _spread([episode.episode_length for episode in episodes])
        return {
            **{f"episode_reward_{kind}": value for kind, value in returns.items()},
            "episode_len_mean": lengths["mean"],
            "episodes_this_iter": finished,
            "episodes_total": self._episodes_total,
            "episodes_in_window": len(self._window),
            **{
                f"policy_reward_{kind}": {pid: spread[kind] for pid, spread in spreads.items()}
                for kind in ("mean", "min", "max")
            },
            "agent_reward_mean": {a: float(np.mean(values)) for a, values in by_agent.items()},
            "custom_metrics": {
                f"{name}_{kind}": value
                for name, values in custom.items()
                for kind, value in _spread(values).items()
            },
            "hist_stats": histograms,
        }

    def _reports_agent(self, agent_id: str) -> bool:
        """Return whether results have the return of an agent: one of the first ids that occur."""
        if agent_id not in self._agents and len(self._agents) < MAX_REPORTED_AGENTS:
            self._agents[agent_id] = None
        if agent_id not in self._agents and not self._has_left_out_agents:
            self._has_left_out_agents = True
            log.warning(
                "agent_reward_mean has only the first %d agent ids of this training; "
                "policy_reward_mean has the returns of all", MAX_REPORTED_AGENTS,
            )  # fmt: skip
        return agent_id in self._agents

    def _trainer_metrics(self, plan: PlanMetrics) -> dict[str, Any]:
        """Return the metrics of each training operator, and reset them for the next report."""
        # a loaded state may have operators that the plan has no longer
        kept = {name: totals for name, totals in self._trainers.items() if name in plan.trainers}
        self._trainers = kept if plan.trainers else self._trainers
        for name, trainer in plan.trainers.items():
            totals = self._trainers.setdefault(name, {"num_env_steps_trained": 0, "learners": {}})
            totals["num_env_steps_trained"] += trainer.num_env_steps_trained
            totals["learners"] |= {pid: e["learner_stats"] for pid, e in trainer.info.items()}
            totals |= _lag_metrics(trainer.policy_lags)
            trainer.num_env_steps_trained = 0
            trainer.policy_lags.clear()
        return {name: {**t, "learners": dict(t["learners"])} for name, t in self._trainers.items()}

    def _timers(self, timers: dict[str, Timer], plan: PlanMetrics) -> dict[str, float]:
        """Return mean times [ms] and throughputs [1/s] of operators, and the samplers' times [s].

        The time of a training step is `learn_time_ms` with one training operator, and
        `learn_time_ms/<name>` for each of several.
        """
        timers_by_name = dict(timers)
        has_several = len(plan.trainers) > 1
        for name, trainer in plan.trainers.items():
            if trainer.learn.count:
                timers_by_name[f"learn/{name}" if has_several else "learn"] = trainer.learn
        result: dict[str, float] = {}
        for name, timer in timers_by_name.items():
            operator, _, trainer_name = name.partition("/")
            suffix = f"/{trainer_name}" if trainer_name else ""
            result[f"{operator}_time_ms{suffix}"] = 1000 * timer.mean
            if timer.has_units_processed():
                result[f"{operator}_throughput{suffix}"] = timer.mean_throughput
        num_workers = max(self._workers.num_workers, 1)  # removed workers are left out
        timings = [s for (worker, _), s in plan.sampler_timings.items() if worker < num_workers]
        for part in dict.fromkeys(part for seconds in timings for part in seconds):
            result[f"sampler_{part}"] = sum(seconds.get(part, 0.0) for seconds in timings)
        return result

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": [list(episode) for episode in self._window],
            "episodes_total": self._episodes_total,
            "env_steps_reported": self._env_steps_reported,
            "agents": list(self._agents),
            "info": {pid: without_row_stats(entry) for pid, entry in self._info.items()},
            "trainers": copy.deepcopy(self._trainers),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for row in state["window"]:
            check_episode(row, "window")
        for name, totals in state["trainers"].items():
            check_state(totals, _TRAINER_TOTALS, f"trainers/{name}")
        self._window.clear()
        self._window.extend(state["window"])
        self._episodes_total = state["episodes_total"]
        self._env_steps_reported = state["env_steps_reported"]
        self._agents = dict.fromkeys(state["agents"])
        self._info = dict(state["info"])
        self._trainers = copy.deepcopy(state["trainers"])

    def __repr__(self) -> str:
        return f"CollectMetrics(window={self._window.maxlen})"


def _lag_metrics(lags: Collection[int]) -> dict[str, float]:
    return {
        "policy_lag_mean": float(np.mean(list(lags))) if lags else 0.0,
        "policy_lag_max": max(lags, default=0),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return the mean, minimum and maximum; NaN without values."""
    array = np.array(values or [np.nan], np.float64)
    return {"mean": float(array.mean()), "min": float(array.min()), "max": float(array.max())}
