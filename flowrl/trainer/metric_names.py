"""Names of the metrics in a result, for stop rules and checkpoint scores.

flowrl.trainer.metric_reference has the unit and the meaning of each metric.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Never

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.errors import ConfigError
from flowrl.policies.policy_spec import specs_of
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.setting_aliases import INFO_COUNTERS, POLICY_RESULT_ALIASES, RESULT_ALIASES
from flowrl.setting_values import nearest
from flowrl.trainer.metric_reference import METRICS, POLICY_METRICS, RESULT_METRICS

_MAX_LISTED_METRICS = 10  # in the message about an unknown one
# statistics that each policy names itself: GROUP/<policy id>/...
_LEARNER_GROUPS = ("learners", "info/learner")
# metrics that callbacks, operators and environments name: GROUP/...
_OPEN_GROUPS = (
    "custom_metrics",
    "trainers",
    "counters",
    "timers",
    "info",
    "agent_reward_mean",
    "env_runners/agent",
)


# groups of metrics with two names, besides those in flowrl.setting_aliases: nested -> classic
_OTHER_ALIASES = {
    "learners": "info/learner",
    "env_runners/agent_episode_returns_mean": "agent_reward_mean",
}


class NamedMetrics(dict[str, Any]):
    """A result; its KeyError names the metric that was probably meant."""

    def __missing__(self, name: Any) -> Never:
        keys = _keys_of(self, str(name))
        if keys is None:
            known = [str(known) for known in self]
            hint = metric_hint(str(name), known)
            if not hint and len(known) <= _MAX_LISTED_METRICS:
                hint = f" Its metrics: {', '.join(known)}"
        else:
            hint = f" Use result{''.join(f'[{key!r}]' for key in keys)}"
        raise KeyError(f"a result has no metric {name!r}.{hint}")


# what users write for the mean return
_MEAN_RETURNS = {"score"} | {
    f"{mean}{kind}"
    for kind in ("reward", "return", "rewards", "returns")
    for mean in ("", "mean_", "avg_", "average_", "ep_", "episode_", "mean_episode_")
}


def metric_hint(name: str, known: list[str]) -> str:
    """Return a sentence about the metric that was probably meant, with a space before it, or "".

    Args:
        name: a name that is not a metric.
        known: names of metrics.
    """
    aliases = {alias.rpartition("/")[2]: metric for alias, metric in RESULT_ALIASES.items()}
    group = "evaluation/" if name.startswith("evaluation/") else ""
    if group and known and not any(one.startswith(group) for one in known):
        return " There was no evaluation so far (setting evaluation_interval)"
    custom = f"{group}custom_metrics/{name.removeprefix(group).removeprefix('custom_metrics/')}"
    for one in (custom, f"{custom}_mean"):
        if one in known:
            return f" Did you mean {one!r}?"
    # SB3's returns are rollout/ep_rew_mean
    last = name.rpartition("/")[2] if group else name.removeprefix("rollout/")
    aliases |= {"ep_rew_mean": "episode_reward_mean", "ep_len_mean": "episode_len_mean"}
    if last in aliases:
        return f" Did you mean {group + aliases[last]!r}?"
    if last in _MEAN_RETURNS:
        return f" Did you mean {group + 'episode_reward_mean'!r}?"
    of_learners = f"learners/<policy>/{last}"
    if of_learners in METRICS and not group:
        inner = [one for one in known if one.startswith("learners/") and one.endswith(f"/{last}")]
        return f" Did you mean {inner[0] if inner else f'learners/{DEFAULT_POLICY_ID}/{last}'!r}?"
    return nearest(name, known)


def flatten_result(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (`a/b/c`, value) for every scalar in a nested result."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from flatten_result(value, f"{prefix}{key}/")
        elif isinstance(value, np.generic):
            yield f"{prefix}{key}", value.item()
        elif isinstance(value, (int, float, str, bool)) or value is None:
            yield f"{prefix}{key}", value


def logged_scalars(result: dict[str, Any], names: str) -> dict[str, Any]:
    """Return the scalars of a result by path `a/b/c`, without second names of most of them, and
    without the diagnosis, which is a sentence.

    Args:
        result: a result.
        names: "classic" or "nested", see the setting `logged_names`.
    """
    aliases = {**RESULT_ALIASES, **POLICY_RESULT_ALIASES, **_OTHER_ALIASES}
    if names == "classic":
        # of the omitted groups of learners, the entry that has no other name is kept
        omitted, own_entry = list(aliases), "num_agent_steps_trained_lifetime"
    else:
        omitted, own_entry = list(aliases.values()), "num_agent_steps_trained"
    omitted += ["num_env_steps_sampled", "num_env_steps_sampled_lifetime"]  # timesteps_total
    omitted.append("diagnosis")
    if len(result.get("trainers", ())) == 1:  # its metrics are those of the learners
        omitted.append("trainers")
    omitted_groups = tuple(f"{name}/" for name in omitted)
    scalars = {}
    for name, value in flatten_result(result):
        group, _, last = name.rpartition("/")
        is_repeated = group in ("counters", "info") and (last in result or last in INFO_COUNTERS)
        is_omitted = name in omitted or name.startswith(omitted_groups)
        is_own = last == own_entry and name.startswith(("learners/", "info/learner/"))
        if is_own or not (is_repeated or is_omitted):
            scalars[name] = value
    return scalars


def metric_value(result: dict[str, Any], name: str) -> Any:
    """Return the number at the path `a/b/c` of a result, or None if it has none."""
    keys = _keys_of(result, name)
    if keys is None:
        return None
    value: Any = functools.reduce(operator.getitem, keys, result)
    if isinstance(value, np.generic):
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None


def _keys_of(result: dict[str, Any], name: str) -> list[str] | None:
    """Return the keys of the value at the path `a/b/c` of a result, or None if it has none."""
    value: Any = result
    keys: list[str] = []
    parts = name.split("/")
    while parts:
        if not isinstance(value, dict):
            return None
        # a key can contain slashes itself, such as the name of a counter: try the longest first
        for end in range(len(parts), 0, -1):
            key = "/".join(parts[:end])
            if key in value:
                keys.append(key)
                value, parts = value[key], parts[end:]
                break
        else:
            return None
    return keys


def policy_of_statistic(name: str, policies: Iterable[str]) -> str | None:
    """Return the policy of a metric `learners/POLICY/…` or `info/learner/POLICY/…`, or None.

    Args:
        name: path of the metric.
        policies: ids of the policies, which may contain slashes; if none fits, the id is the first
            part of the rest of the name.
    """
    for group in _LEARNER_GROUPS:
        if name.startswith(f"{group}/"):
            rest = name.removeprefix(f"{group}/")
            found = [pid for pid in policies if rest.startswith(f"{pid}/")]
            return max(found, key=len, default=rest.split("/")[0])
    return None


def check_metric_name(name: Any, config: Any, setting: str) -> None:
    """Reject a metric that no result of a run can have.

    Args:
        name: path `a/b/c` of the metric.
        config: the run's AlgorithmConfig.
        setting: setting that names the metric, for the error message.

    Raises:
        ConfigError: there is no such metric; the message suggests the nearest name.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{setting}: the name of a metric must be a string, got {name!r}")
    policies = list(specs_of(config.policies))
    if not config.samples and name.startswith(("episode_", "policy_reward_", "env_runners/")):
        raise ConfigError(
            f"{setting}: there is no {name!r} because nothing is sampled; evaluations report "
            "'evaluation/episode_reward_mean' (.evaluation(evaluation_interval=…))"
        )
    known = [*RESULT_METRICS, *(f"{group}/{pid}" for group in POLICY_METRICS for pid in policies)]
    evaluation_metrics = [
        metric for metric in METRICS if metric.startswith("evaluation/") and "<" not in metric
    ]
    if config.evaluation_interval is not None:
        known += evaluation_metrics
        known += [f"evaluation/policy_reward_mean/{pid}" for pid in policies]
    elif name in evaluation_metrics:
        raise ConfigError(
            f"{setting}: {name!r} needs evaluations: set evaluation_interval=1, or more iterations"
        )
    if name in known:
        return
    policy_id = policy_of_statistic(name, policies)
    if policy_id in policies:
        return  # the policy's statistics are known after its first update
    if policy_id is not None:
        raise ConfigError(
            f"{setting}: {name!r}: there is no policy {policy_id!r}.{nearest(policy_id, policies)}"
        )
    if any(name.startswith(f"{group}/") and name != f"{group}/" for group in _OPEN_GROUPS):
        return
    callbacks = config.callbacks_class or DefaultCallbacks
    if callbacks.on_train_result is not DefaultCallbacks.on_train_result:
        return  # it can add any metric
    raise ConfigError(f"{setting}: no result has a metric {name!r}.{metric_hint(name, known)}")
