"""The operator that ends a plan: what happened, as a stream of result dicts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.iter import LocalIterator, Stage, _get_shared_metrics
from flowrl.iter.stage import walk
from flowrl.learners.actors import MultiGPUTrainOneStep
from flowrl.learners.decentralized import TrainOnWorkersStage
from flowrl.learners.thread import LearnerThread
from flowrl.ops.gradients import ApplyGradients
from flowrl.ops.train import TrainOneStep

if TYPE_CHECKING:
    from flowrl.sampling.worker_set import WorkerSet

Result = dict[str, Any]
TRAINING = (TrainOneStep, ApplyGradients, LearnerThread, MultiGPUTrainOneStep, TrainOnWorkersStage)
"""What policies learn by; each has `policies`, ids or None for all."""


class StandardMetricsReporting(LocalIterator[Result]):
    """One result dict per report, from the last train operator of a plan.

    A report comes with the first item after both `min_sample_timesteps_per_iteration` env steps
    and `min_time_s_per_iteration` seconds have gone by since the last one (by default with every
    item; only with the default does a seeded run repeat its reports exactly).

    Args:
        train_op: the stream to report on.
        workers: the WorkerSet.
        config: read for the two settings above, `metrics_num_episodes_for_smoothing`, and the
            policies that there are.
        selected_workers: indices (from 0) of those whose episodes the means are over; None for
            all. For workers that explore at random to different degrees.

    Raises:
        ValueError: an operator of the plan names a policy that there is not; one of
            `policies_to_train` is trained by no branch, though each says whom it trains.
    """

    def __init__(
        self,
        train_op: LocalIterator[Any],
        workers: WorkerSet,
        config: Any,
        selected_workers: Collection[int] | None = None,
    ):
        due = ReportDue(
            config.get("min_sample_timesteps_per_iteration", 0),
            config.get("min_time_s_per_iteration"),
        )
        check_branches(train_op.stage, config)
        window = config.get("metrics_num_episodes_for_smoothing", 100)
        collect = CollectMetrics(workers, window, selected_workers)
        reports = train_op.filter(due).for_each(collect)
        super().__init__(reports.stage, "StandardMetricsReporting")
        self.stage.title = self.name


def check_branches(stage: Stage, config: Any) -> None:
    """Refuse branches without their policy, and policies without their branch."""
    known = config.get("policies") or (DEFAULT_POLICY_ID,)
    trained: set[str] = set()
    all_say = True
    for node in walk(stage):
        operator: Any = getattr(node, "learner", None) or getattr(node, "fn", node)
        trains = isinstance(operator, TRAINING)
        for field in ("policies", "policy_ids"):
            named = getattr(operator, field, None)
            if not isinstance(named, Collection) or isinstance(named, str):
                continue
            unknown = sorted(set(named) - set(known))
            if unknown:
                raise ValueError(
                    f"{operator!r}, chained at {node.line}: there is no policy {unknown[0]!r}, "
                    f"only {sorted(known)}"
                )
            trained |= set(named) if trains else set()
        if trains and operator.policies is None:
            all_say = False
    wanted = config.get("policies_to_train")
    left = [] if wanted is None or callable(wanted) else sorted(set(wanted) - trained)
    if all_say and trained and left:
        raise ValueError(
            f"policies_to_train names {left[0]!r}, but the plan's branches train {sorted(trained)}"
            " alone: add a branch, or leave it out"
        )


class ReportDue:
    """filter, any item: true when enough env steps and seconds have gone by."""

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
        if self.min_seconds is not None and now - self._last_time < self.min_seconds:
            return False
        self._last_steps, self._last_time = steps, now
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"last_steps": self._last_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_steps = state["last_steps"]

    def __repr__(self) -> str:
        return f"ReportDue(min_steps={self.min_steps}, min_seconds={self.min_seconds})"


class CollectMetrics:
    """for_each, any item -> result dict: counters, episodes, learner statistics, timers.

    The classic names (`episode_reward_mean`, `timesteps_total`, …) and the nested ones
    (`env_runners/episode_return_mean`, `learners/<policy>/…`) hold the same values; `counters` has
    all that operators count. Episode numbers are over the last `window` episodes, NaN before the
    first has ended.
    """

    def __init__(
        self, workers: WorkerSet, window: int = 100, selected_workers: Collection[int] | None = None
    ):
        there = range(max(workers.num_workers, 1))
        odd = sorted(set(selected_workers or ()) - set(there))
        if odd:
            raise ValueError(f"selected_workers: there is no worker {odd[0]}, only {[*there]}")
        self._selected = selected_workers
        self._workers = workers
        self._window: deque[Sequence[Any]] = deque(maxlen=window)
        self._episodes_total = 0
        self._last: dict[str, int] = {}
        self._learner: dict[str, Any] = {}  # policy id -> what its last training told

    def __call__(self, item: Any) -> Result:
        metrics = _get_shared_metrics()
        counters = metrics.counters
        new = metrics.info.get("new_episodes")
        finished = len(new) if new else 0
        if new:
            chosen = self._selected
            self._window.extend(e for worker, e in new if chosen is None or worker in chosen)
            new.clear()
        self._episodes_total += finished
        health = metrics.info.get("health", {}).values()
        restarts = sum(one["env_restarts"] for one in health)
        faulty = sum(one["faulty_episodes"] for one in health)
        steps = counters["num_env_steps_sampled"]
        since = {name: counters[name] - self._last.get(name, 0) for name in counters}
        self._last = dict(counters)
        episodes = self._summary(finished)
        self._learner |= metrics.info.get("learner", {})
        learner = self._learner
        trained = "num_agent_steps_trained/"
        lags = list(metrics.info.get("policy_lag", ()))
        metrics.info.get("policy_lag", deque()).clear()
        return {
            "timesteps_total": steps,
            "timesteps_this_iter": since.get("num_env_steps_sampled", 0),
            "agent_timesteps_total": counters["num_agent_steps_sampled"],
            **episodes,
            "num_env_steps_sampled": steps,
            "num_env_steps_sampled_lifetime": steps,
            "num_env_steps_trained": counters["num_env_steps_trained"],
            "num_agent_steps_sampled": counters["num_agent_steps_sampled"],
            "num_agent_steps_trained": counters["num_agent_steps_trained"],
            "num_healthy_workers": self._workers.num_workers - len(self._workers.failed),
            "num_remote_worker_restarts": counters["num_shard_restarts"],
            "num_env_restarts": restarts,
            "num_faulty_episodes": faulty,
            "num_episodes_restarted": self._workers.num_episodes_restarted,
            "info": {
                **metrics.info.get("told", {}),
                "learner": {pid: _without_rows(one) for pid, one in learner.items()},
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
                "policy_lag_mean": float(np.mean(lags)) if lags else 0.0,
                "policy_lag_max": max(lags, default=0),
            },
            "counters": dict(counters),
            "learners": {
                pid: {
                    **one["learner_stats"],
                    "num_agent_steps_trained_lifetime": counters[trained + pid],
                }
                for pid, one in learner.items()
            },
            "timers": self._timers(),
        }

    def _summary(self, finished: int) -> Result:
        returns = np.array([episode[0] for episode in self._window] or [np.nan])
        lengths = np.array([float(episode[1]) for episode in self._window] or [np.nan])
        by_agent: dict[str, list[float]] = {}
        by_policy: dict[str, list[float]] = {}
        custom: dict[str, list[float]] = {}
        histograms: dict[str, list[float]] = {}
        for _, _, _, agent_returns, metrics, hist_data in map(_whole, self._window):
            for agent_id, policy_id, value in agent_returns or ():
                by_agent.setdefault(agent_id, []).append(value)
                by_policy.setdefault(policy_id, []).append(value)
            for name, value in (metrics or {}).items():
                custom.setdefault(name, []).append(value)
            for name, values in (hist_data or {}).items():
                histograms.setdefault(name, []).extend(values)
        only = self._workers.local_worker().policy_map
        if not by_policy and len(only) == 1:
            by_policy = {next(iter(only)): returns.tolist()}
        return {
            **_spread("episode_reward", returns),
            "episode_len_mean": float(lengths.mean()),
            "episodes_this_iter": finished,
            "episodes_total": self._episodes_total,
            "episodes_in_window": len(self._window),
            **{
                f"policy_reward_{kind}": {
                    pid: _spread("", np.array(values))[f"_{kind}"]
                    for pid, values in by_policy.items()
                }
                for kind in ("mean", "min", "max")
            },
            "agent_reward_mean": {a: float(np.mean(values)) for a, values in by_agent.items()},
            "custom_metrics": {
                key: number
                for name, values in custom.items()
                for key, number in _spread(name, np.array(values)).items()
            },
            "hist_stats": histograms,
        }

    def _timers(self) -> dict[str, float]:
        metrics = _get_shared_metrics()
        timers: dict[str, float] = {}
        for name, timer in metrics.timers.items():
            timers[f"{name}_time_ms"] = 1000 * timer.mean
            if timer.has_units_processed():
                timers[f"{name}_throughput"] = timer.mean_throughput
        there = max(self._workers.num_workers, 1)  # those that left say nothing any more
        told = metrics.info.get("sampler", {})
        per_worker = [own for worker, own in told.items() if worker < there]
        for name in {name for one in per_worker for name in one}:
            timers[f"sampler_{name}"] = sum(one.get(name, 0.0) for one in per_worker)
        return timers

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": [list(episode) for episode in self._window],
            "episodes_total": self._episodes_total,
            "last": self._last,
            "learner": {pid: _without_rows(one) for pid, one in self._learner.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.extend(state["window"])
        self._episodes_total = state["episodes_total"]
        self._last = dict(state["last"])
        self._learner = dict(state["learner"])

    def __repr__(self) -> str:
        return f"CollectMetrics(window={self._window.maxlen})"


def _without_rows(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name != "rows"}


def _whole(episode: Sequence[Any]) -> Sequence[Any]:
    """The fields of an EpisodeMetrics, which may have lost its empty ones."""
    return [*episode, None, None, None][:6]


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_min": float(values.min()),
        f"{name}_max": float(values.max()),
    }
