"""When a run stops: limits on reward, env steps, iterations, time and any other metric."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.setting_values import nearest
from flowrl.settings import MAX_INT
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.metric_names import (
    check_metric_name,
    flatten_result,
    metric_hint,
    metric_value,
    policy_of_statistic,
)
from flowrl.trainer.runs.formatting import format_count, print_warning
from flowrl.trainer.start_checks import has_schedule_in_percent

DEFAULT_TIMESTEPS = 500_000  # env steps of a run without stop rules
MAX_RESULTS_WITHOUT_METRIC = 20  # results without an expected metric before a warning

ENV_STEP_METRICS = (
    "timesteps_total",
    "num_env_steps_sampled",
    "num_env_steps_sampled_lifetime",
    "counters/num_env_steps_sampled",
)

MetricRule = tuple[str, str, float]
"""Path of a metric, ">=" or "<=", limit."""


@dataclass
class StopRules:
    """Limits that end a run; the first one reached counts.

    Args:
        reward: mean return of the last `metrics_num_episodes_for_smoothing` episodes.
        timesteps: env steps.
        iters: iterations.
        time_s: seconds since the run was started or resumed.
        metrics: limits on other metrics.
    """

    reward: float | None = None
    timesteps: int | None = None
    iters: int | None = None
    time_s: float | None = None
    metrics: list[MetricRule] = field(default_factory=list)

    @classmethod
    def from_saved(cls, values: dict[str, Any]) -> StopRules:
        """Return the rules saved in stop.json.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            rules = cls(**values)
            for limit in (rules.reward, rules.timesteps, rules.iters, rules.time_s):
                if limit is not None and not math.isfinite(limit):
                    raise ValueError(f"{limit} is not finite")
            rules.metrics = [(str(n), str(r), float(v)) for n, r, v in rules.metrics]
            return rules
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"stop.json: contains no stop rules: {error}") from None

    def is_set(self) -> bool:
        """Return whether there is any rule."""
        return self != StopRules()

    @property
    def env_steps(self) -> int | None:
        """The limit on env steps, also of a rule on a metric, at most MAX_INT; None if there is
        none."""
        limits = [] if self.timesteps is None else [self.timesteps]
        for name, relation, limit in self.metrics:
            if name in ENV_STEP_METRICS and relation == ">=" and limit >= 1:
                limits.append(math.ceil(limit))
        return min([*limits, MAX_INT]) if limits else None

    def with_defaults(self, config: AlgorithmConfig) -> StopRules:
        """Return these rules, completed by the default ones.

        Without rules, the defaults are the environment's own reward threshold and
        `total_timesteps` of the config, or DEFAULT_TIMESTEPS env steps. With rules, only the
        default limit on env steps is added, and only if the config has schedules in percent.
        """
        timesteps = config.total_timesteps or DEFAULT_TIMESTEPS
        if not self.is_set():
            reward = _reward_threshold(config.env) if config.samples else None
            return StopRules(reward=reward, timesteps=timesteps)
        if self.env_steps is None and has_schedule_in_percent(config):
            return replace(self, timesteps=timesteps)
        return self

    def describe(self, config: AlgorithmConfig, total_timesteps: int | None) -> str:
        """Return the limits as text, such as "500,000 env steps or mean return 475".

        Args:
            config: the run's settings.
            total_timesteps: the env steps that schedules in percent follow.
        """
        limits = []
        if self.timesteps is not None:
            ends = ""
            if has_schedule_in_percent(config) and total_timesteps is not None:
                is_end = total_timesteps == self.timesteps
                end = f"schedules in percent end at {total_timesteps:,}"
                ends = f" ({'where schedules in percent end' if is_end else end})"
            limits.append(f"{format_count(self.timesteps, 'env step')}{ends}")
        if self.reward is not None:
            limits.append(f"mean return {self.reward:g}")
        if self.iters is not None:
            limits.append(format_count(self.iters, "iteration"))
        if self.time_s is not None:
            limits.append(f"{self.time_s:g} s")
        limits += [f"{name} {relation} {limit:g}" for name, relation, limit in self.metrics]
        return " or ".join(limits)

    def check(self, config: AlgorithmConfig) -> None:
        """Check the names of the metrics.

        Raises:
            ConfigError: no result of a run with this config has the metric.
        """
        if self.reward is not None and not config.samples:
            raise ConfigError(
                "--stop-reward: nothing is sampled, so there is no mean return: set "
                "evaluation_interval, and use --stop evaluation/episode_reward_mean=VALUE"
            )
        for name, _, _ in self.metrics:
            check_metric_name(name, config, "stop")

    def reached(self, result: dict[str, Any], window: int, seconds: float) -> str | None:
        """Return a description of the first limit that a result reaches, or None.

        Args:
            result: newest result of the run.
            window: number of episodes over which the mean return is taken; `reward` counts only
                after as many episodes.
            seconds: time since the run was started or resumed.
        """
        mean_return = result["episode_reward_mean"]
        window_is_full = result["episodes_in_window"] >= window
        if self.reward is not None and window_is_full and mean_return >= self.reward:
            episodes = format_count(window, "episode")
            return f"mean return {mean_return:.3g} of the last {episodes} >= {self.reward:g}"
        if self.timesteps and result["timesteps_total"] >= self.timesteps:
            return format_count(result["timesteps_total"], "env step")
        if self.iters and result["training_iteration"] >= self.iters:
            return format_count(result["training_iteration"], "iteration")
        if self.time_s and seconds >= self.time_s:
            return f"the time limit of {self.time_s:g} s"
        for name, value, relation, limit in self._reached_metrics(result):
            return f"{name} {value:g} {relation} {limit:g}"
        return None

    def _reached_metrics(self, result: dict[str, Any]) -> Iterator[tuple[str, Any, str, float]]:
        """Yield (name, value, relation, limit) of the rules on metrics that a result reaches."""
        for name, relation, limit in self.metrics:
            value = metric_value(result, name)
            if value is not None and (value >= limit if relation == ">=" else value <= limit):
                yield name, value, relation, limit

    def is_reached_by_evaluation(self, result: dict[str, Any]) -> bool:
        """Return whether the evaluation in a result reaches a limit; it is then the last one."""
        return any(name.startswith("evaluation/") for name, *_ in self._reached_metrics(result))


def _reward_threshold(env: Any) -> float | None:
    import gymnasium as gym

    if not isinstance(env, str) or env not in gym.registry:
        return None
    return gym.spec(env).reward_threshold


def describe_defaults(config: AlgorithmConfig) -> str:
    """Describe the stop rules of a run without stop options, for the help text."""
    rules = StopRules().with_defaults(config)
    reward = "" if rules.reward is None else f"a mean return of {rules.reward:g}, or "
    return f"{reward}{rules.timesteps:,} env steps"


def metric_rule(text: str) -> MetricRule:
    """Parse `METRIC=VALUE`, `METRIC>=VALUE` or `METRIC<=VALUE`; `=` means `>=`.

    Raises:
        ConfigError: the text has another form, or the value is not a finite number.
    """
    match = re.fullmatch(r"\s*([^<>=\s]+)\s*(>=|<=|=)\s*([^=\s]+)\s*", text)
    if match is None:
        raise ConfigError(f"must be METRIC=VALUE, got {text!r}")
    name, relation, value = match.groups()
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ConfigError(f"{name}: must be a finite number, got {value}")
    return name, "<=" if relation == "<=" else ">=", limit


def metric_rules(limits: Any) -> list[MetricRule]:
    """Return the rules of a mapping of metrics (`a/b`, or `a/b<=`) to limits.

    Raises:
        ConfigError: `limits` is not such a mapping.
    """
    if not isinstance(limits, Mapping):
        raise ConfigError(f"stop: must map metrics to values, got {limits!r}")
    rules: list[MetricRule] = []
    for name, limit in limits.items():
        value = limit.item() if isinstance(limit, np.generic) else limit
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"stop: {name}: must be a number, got {limit!r}")
        if not math.isfinite(value):
            raise ConfigError(f"stop: {name}: must be a finite number, got {limit!r}")
        if not isinstance(name, str):
            raise ConfigError(f"stop: the name of a metric must be a string, got {name!r}")
        path = re.sub(r"\s*[<>]?=\s*$", "", name).strip()
        rules.append((path, "<=" if name.rstrip().endswith("<=") else ">=", value))
    return rules


class PendingMetrics:
    """Metrics that a run needs and that no result has contained yet.

    Callbacks, operators and losses name metrics at run time; these names cannot be checked before
    the run.

    Args:
        stop: the run's stop rules.
        score: the run's `checkpoint_score_attribute`.
    """

    def __init__(self, stop: StopRules, score: str | None):
        self._settings = {name: "stop" for name, _, _ in stop.metrics}  # metric -> setting
        if score is not None:
            self._settings.setdefault(score, "checkpoint_score_attribute")
        self._num_results = 0
        self._warned: set[str] = set()

    def check(self, result: dict[str, Any], is_last: bool = False) -> None:
        """Look for the metrics in a result, and warn once of each that is missing: in the first
        result, if it has no group; in a result with a custom metric of almost the same name; and
        otherwise after several results, or in the last one.

        Raises:
            ConfigError: the result has the statistics of the metric's policy but not the metric, or
                the metric is not a number.
        """
        self._num_results += 1
        self._settings = {
            name: setting
            for name, setting in self._settings.items()
            if not has_metric(result, name, setting)
        }
        custom = result.get("custom_metrics") or {}
        known = [path for path, _ in flatten_result({"custom_metrics": custom})]
        for name, setting in self._settings.items():
            if name in self._warned:
                continue
            # an evaluation may be due later
            is_end = is_last and not name.startswith("evaluation/")
            is_late = is_end or self._num_results == MAX_RESULTS_WITHOUT_METRIC
            if self._num_results == 1 and "/" not in name:
                if name in result:
                    value = result[name]
                    remedy = ": set it to float(…)" if isinstance(value, (bool, np.bool_)) else ""
                    found = type(value).__name__
                    raise ConfigError(f"{setting}: {name!r} is a {found}, not a number{remedy}")
                hint = metric_hint(name, [*known, *map(str, result)])
                print_warning(f"{setting}: the first result has no {name!r}.{hint}")
                self._warned.add(name)
            elif is_late or (name.startswith("custom_metrics/") and f"{name}_mean" in known):
                hint = metric_hint(name, [path for path, _ in flatten_result(result)])
                print_warning(f"{setting}: no result has had {name!r} so far.{hint}")
                self._warned.add(name)


def has_metric(result: dict[str, Any], name: str, setting: str) -> bool:
    """Return whether a result has a metric.

    Args:
        result: newest result of the run.
        name: path `a/b/c` of the metric.
        setting: setting that names the metric, for the error message.

    Raises:
        ConfigError: the result has the statistics of the policy without the metric.
    """
    if metric_value(result, name) is not None:
        return True
    if policy_of_statistic(name, result["learners"]) not in result["learners"]:
        return False
    group = name.split("/")[0]
    metrics = flatten_result({group: result[group]})
    known = [path for path, value in metrics if isinstance(value, (int, float))]
    raise ConfigError(
        f"{setting}: there is no metric {name!r}.{nearest(name, known)} Metrics in {group}: "
        f"{', '.join(known) or 'none'}"
    )
