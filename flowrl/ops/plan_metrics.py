"""Typed metrics of one plan: operators write them, StandardMetricsReporting reports them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.iter import MetricsContext
from flowrl.iter.metrics import Timer
from flowrl.learners.learner import Updates
from flowrl.state_schema import Fields, Natural, check_state

log = logging.getLogger("flowrl")

MAX_EPISODES = 10_000  # finished episodes kept for the next report
MANY_UNUSED = 10  # batches in a row without rows to train on, before a warning
MAX_LAGS = 10_000  # policy lags kept for the next report, per training operator

Info = dict[str, Any]
"""Policy id -> {"learner_stats": …, "num_agent_steps_trained": …}, and "row_stats" if the
policy reports values per row; see TrainOneStep."""


_EPISODE: Fields = {  # of EpisodeMetrics
    "episode_return": float | np.floating,
    "episode_length": Natural,
    "env_id": Natural,
    "agent_returns": list[Any] | None,
    "custom_metrics": dict[Any, Any] | None,
    "hist_data": dict[Any, Any] | None,
}
_FIELDS: Fields = {
    "new_episodes": list[list[Any]],
    "num_new_episodes": Natural,
    "trainers": dict[str, dict[str, Any]],
}
_NEW_EPISODE: Fields = {"worker": Natural, "episode": list[Any]}
_TRAINER: Fields = {
    "policies": list[str] | None,
    "num_env_steps_trained": Natural,
    "policy_lags": list[Natural],
    "info": dict[str, dict[str, Any]],
}


def check_episode(fields: Sequence[Any], name: str) -> None:
    """Check the saved fields of an EpisodeMetrics.

    Args:
        fields: the fields, in order.
        name: name of the state in messages.

    Raises:
        ValueError: their number or a type is wrong.
    """
    check_state(dict(zip(_EPISODE, fields, strict=True)), _EPISODE, name)


@dataclass
class TrainerMetrics:
    """Metrics of one training operator.

    Attributes:
        policies: ids of the policies that the operator trains; None for all.
        learn: timer of the updates [s]; its units are rows.
        num_env_steps_trained: env steps trained on since the last report.
        policy_lags: per fragment since the last report, its age in updates when trained on.
        info: the newest entry of each policy.
        num_unused: batches since the last one that the operator trained on.
        has_warned: whether the warning about many such batches was logged.
    """

    policies: Collection[str] | None
    learn: Timer = field(default_factory=Timer)
    num_env_steps_trained: int = 0
    policy_lags: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_LAGS))
    info: Info = field(default_factory=dict)
    num_unused: int = 0
    has_warned: bool = False

    def note_batch(self, operator: Any, is_used: bool) -> None:
        """Note whether a batch had rows to train on; warn once about many without."""
        self.num_unused = 0 if is_used else self.num_unused + 1
        if self.num_unused == MANY_UNUSED and not self.has_warned:
            self.has_warned = True
            log.warning(
                "%r had nothing to train on in %d batches in a row: they are empty, or have no "
                "rows of the policies that it trains (its `policies`, or the setting "
                "policies_to_train)", operator, MANY_UNUSED,
            )  # fmt: skip


@dataclass
class PlanMetrics:
    """Metrics of one plan besides counters and timers; `PlanMetrics.of(context)` returns them.

    Attributes:
        new_episodes: (worker, episode) of episodes that ended since the last report; the last
            MAX_EPISODES. Workers are numbered from 0, as in a WorkerSet.
        num_new_episodes: number of all episodes that ended since the last report.
        sampler_timings: (worker, incarnation) -> seconds per part of sampling.
        trainers: name -> metrics of each training operator that has made an update, in the order of
            the plan.
        step_results: entries of the last result of `training_step` that belong to no policy.
    """

    new_episodes: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EPISODES))
    num_new_episodes: int = 0
    sampler_timings: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    trainers: dict[str, TrainerMetrics] = field(default_factory=dict)
    step_results: dict[str, Any] = field(default_factory=dict)
    _names: dict[str, Any] = field(default_factory=dict, repr=False)  # name -> training operator

    @classmethod
    def of(cls, context: MetricsContext) -> PlanMetrics:
        """Return the metrics of a context's plan."""
        return context.singleton(cls)

    def add_episodes(self, worker: int, episodes: Collection[Any]) -> None:
        """Add episodes of a worker that have ended."""
        self.new_episodes.extend((worker, episode) for episode in episodes)
        self.num_new_episodes += len(episodes)

    def trainer(self, operator: Any, operators: Collection[Any] = ()) -> TrainerMetrics:
        """Return the metrics of a training operator.

        They are stored under its type and policy ids, `TrainOneStep(ppo)`; further operators of
        that name are numbered in the order of the plan, `TrainOneStep(ppo)#2`.

        Args:
            operator: the operator.
            operators: the operators of the plan, in topological order.
        """
        name = self._name_of(operator)
        if name is None:
            for one in (*operators, operator):
                self._set_name(one)
            if operators:  # a loaded state may have operators that the plan has no longer
                names = [name for name in self._names if name in self.trainers]
                self.trainers = {name: self.trainers[name] for name in names}
            name = self._name_of(operator)
            assert name is not None
        if name not in self.trainers:
            order = {name: number for number, name in enumerate(self._names)}
            trainers = {**self.trainers, name: TrainerMetrics(operator.policies)}
            in_order = sorted(trainers, key=lambda name: order.get(name, -1))
            self.trainers = {name: trainers[name] for name in in_order}
        return self.trainers[name]

    def _name_of(self, operator: Any) -> str | None:
        return next((name for name, other in self._names.items() if other is operator), None)

    def _set_name(self, operator: Any) -> None:
        """Give a training operator a name, unless it has one."""
        if self._name_of(operator) is not None or not getattr(operator, "trains", False):
            return
        policies = operator.policies
        only = "" if policies is None else f"({','.join(sorted(policies))})"
        base = name = f"{type(operator).__name__.removesuffix('Stage')}{only}"
        number = 1
        while name in self._names:
            number += 1
            name = f"{base}#{number}"
        self._names[name] = operator

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics since the last report, and the newest info of each operator that
        trains."""
        return {
            "new_episodes": [[worker, list(episode)] for worker, episode in self.new_episodes],
            "num_new_episodes": self.num_new_episodes,
            "trainers": {
                name: {
                    "policies": None if trainer.policies is None else sorted(trainer.policies),
                    "num_env_steps_trained": trainer.num_env_steps_trained,
                    "policy_lags": list(trainer.policy_lags),
                    "info": {
                        policy_id: without_row_stats(entry)
                        for policy_id, entry in trainer.info.items()
                    },
                }
                for name, trainer in self.trainers.items()
            },
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that `load_state_dict` accepts a state.

        Raises:
            ValueError: it does not.
        """
        check_state(state, _FIELDS, "metrics")
        for row in state["new_episodes"]:
            named = dict(zip(_NEW_EPISODE, row, strict=True))
            check_state(named, _NEW_EPISODE, "metrics/new_episodes")
            check_episode(named["episode"], "metrics/new_episodes")
        for name, trainer in state["trainers"].items():
            check_state(trainer, _TRAINER, f"metrics/trainers/{name}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self.new_episodes.clear()
        self.new_episodes.extend((worker, episode) for worker, episode in state["new_episodes"])
        self.num_new_episodes = state["num_new_episodes"]
        self.trainers = {}
        for name, saved in state["trainers"].items():
            trainer = self.trainers[name] = TrainerMetrics(saved["policies"])
            trainer.num_env_steps_trained = saved["num_env_steps_trained"]
            trainer.policy_lags.extend(saved["policy_lags"])
            trainer.info = dict(saved["info"])

    @property
    def info(self) -> Info:
        """The newest entry of each policy. If several operators train a policy, its statistics are
        those of all of them; for equal names, and for other values, the last one in `trainers`
        counts."""
        merged: Info = {}
        for trainer in self.trainers.values():
            for policy_id, entry in trainer.info.items():
                before = merged.get(policy_id, {})
                stats = {**before.get("learner_stats", {}), **entry.get("learner_stats", {})}
                merged[policy_id] = {**before, **entry, "learner_stats": stats}
        return merged


def record_sampled_steps(
    context: MetricsContext, workers: Any, env_steps: int, agent_steps: dict[str, int]
) -> None:
    """Count sampled or recorded steps, and advance `global_vars["timestep"]`, which schedules
    follow.

    Streams that do not belong to the algorithm's plan have their own counters, so the timestep only
    grows here. `Algorithm.train` sets it to the counter of the plan.

    Args:
        context: the metrics of the stream.
        workers: the WorkerSet.
        env_steps: env steps of the batch.
        agent_steps: policy id -> agent steps.
    """
    counters = context.counters
    counters["num_env_steps_sampled"] += env_steps
    for policy_id, rows in agent_steps.items():
        counters["num_agent_steps_sampled"] += rows
        counters[f"num_agent_steps_sampled/{policy_id}"] += rows
    steps = max(workers.global_vars["timestep"], counters["num_env_steps_sampled"])
    workers.global_vars["timestep"] = steps


def without_row_stats(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of `Info` without its values per row."""
    return {name: value for name, value in entry.items() if name != "row_stats"}


def record_updates(
    context: MetricsContext,
    operator: Any,
    updates: Updates,
    env_steps: int,
    learn_s: float | None,
    may_lack_updates: bool = False,
) -> Info:
    """Count the updates of a training operator and return its `info`.

    Also creates the timer `update`, so that it is reported as 0 when no weights are sent.

    Args:
        context: the plan's metrics.
        operator: the training operator.
        updates: policy id -> PolicyUpdate, from the learner.
        env_steps: env steps of the batch; they do not count if the learner updated no policy.
        learn_s: duration of the update [s]; None if unknown.
        may_lack_updates: count the batch as trained on although there are no updates, because an
            operator of the user may have no statistics.
    """
    counters = context.counters
    _ = context.timers["update"]  # WeightSync adds the durations
    trainer = PlanMetrics.of(context).trainer(operator, context.operators)
    is_used = bool(updates) or may_lack_updates
    if not is_used and context.on_lost:  # a StalenessLimit waits for each batch
        # another training operator may use the batch
        num_trainers = sum(getattr(one, "trains", False) for one in context.operators)
        if num_trainers == 1:
            counters["num_env_steps_dropped"] += env_steps
    env_steps = env_steps if is_used else 0
    counters["num_env_steps_trained"] += env_steps
    trainer.num_env_steps_trained += env_steps
    trainer.note_batch(operator, is_used)
    if learn_s is not None:
        trainer.learn.push(learn_s)
        trainer.learn.push_units_processed(sum(update.rows for update in updates.values()))
    info: Info = {}
    for policy_id, update in updates.items():
        counters["num_agent_steps_trained"] += update.rows
        counters[f"num_agent_steps_trained/{policy_id}"] += update.rows
        if update.replayed_rows:
            counters[f"num_agent_steps_replayed/{policy_id}"] += update.replayed_rows
        trainer.policy_lags.extend(update.policy_lags)
        info[policy_id] = update.info()
    trainer.info.update(info)
    return info
