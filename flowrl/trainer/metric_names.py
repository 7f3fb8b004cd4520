"""The names that results have: what a stop rule or a score may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID
from flowrl.policies.policy_spec import specs_of
from flowrl.settings import ConfigError, nearest

_EPISODES = ("episode_reward_mean", "episode_reward_min", "episode_reward_max", "episode_len_mean")
ALWAYS = (
    *_EPISODES,
    "agent_timesteps_total",
    "episodes_in_window",
    "episodes_this_iter",
    "episodes_total",
    "num_agent_steps_sampled",
    "num_agent_steps_trained",
    "num_env_restarts",
    "num_env_steps_sampled",
    "num_env_steps_sampled_lifetime",
    "num_env_steps_trained",
    "num_episodes_restarted",
    "num_faulty_episodes",
    "num_healthy_workers",
    "num_remote_worker_restarts",
    "time_this_iter_s",
    "time_total_s",
    "timesteps_this_iter",
    "timesteps_total",
    "training_iteration",
    "env_runners/episode_len_mean",
    "env_runners/episode_return_max",
    "env_runners/episode_return_mean",
    "env_runners/episode_return_min",
    "env_runners/num_episodes",
    "env_runners/num_episodes_lifetime",
    "env_runners/policy_lag_max",
    "env_runners/policy_lag_mean",
)
"""What every result has."""
_OF_POLICIES = (
    "policy_reward_mean",
    "policy_reward_min",
    "policy_reward_max",
    "env_runners/module_episode_returns_mean",
    "learners",
    "info/learner",
)
# what callbacks, operators and environments name
_OPEN = ("custom_metrics", "counters", "timers", "info", "agent_reward_mean", "env_runners/agent")


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`a/b/c` -> leaf for every scalar of a nested dict."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        elif isinstance(value, np.generic):
            yield f"{prefix}{key}", value.item()
        elif isinstance(value, (int, float, str, bool)) or value is None:
            yield f"{prefix}{key}", value


def value_of(result: dict[str, Any], name: str) -> Any:
    """A number of a result by its path `a/b/c`; None where there is none."""
    value: Any = result
    parts = name.split("/")
    while parts:
        if not isinstance(value, dict):
            return None
        # a name may have slashes itself, as counters do
        for end in range(len(parts), 0, -1):
            key = "/".join(parts[:end])
            if key in value:
                value, parts = value[key], parts[end:]
                break
        else:
            return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if number else None


def check_name(name: Any, config: Any, what: str) -> None:
    """Refuse a metric that no result will have.

    Args:
        config: the settings of the run.
        what: who asks for it, for the message.

    Raises:
        ConfigError: naming the nearest.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{what}: the name of a metric is needed, got {name!r}")
    policies = list(specs_of(config.policies or {DEFAULT_POLICY_ID: None}))
    if not config.samples and name.startswith(("episode_", "policy_reward_", "env_runners/")):
        raise ConfigError(
            f"{what}: there is no {name!r} where nothing is sampled: evaluations have "
            "'evaluation/episode_reward_mean' (.evaluation(evaluation_interval=…))"
        )
    known = [*ALWAYS, *(f"{group}/{pid}" for group in _OF_POLICIES[:4] for pid in policies)]
    evaluated = [
        f"evaluation/{n}"
        for n in (*_EPISODES, "episode_reward_std", "episodes", "training_iteration")
    ]
    if config.evaluation_interval is not None:
        known += [*evaluated, *(f"evaluation/policy_reward_mean/{pid}" for pid in policies)]
    elif name in evaluated:
        raise ConfigError(
            f"{what}: there is no {name!r} without evaluations: .evaluation(evaluation_interval=…)"
        )
    if name in known:
        return
    for group in _OF_POLICIES[4:]:
        if name.startswith(f"{group}/"):
            policy_id = name.removeprefix(f"{group}/").split("/")[0]
            if policy_id in policies:
                return  # what a policy tells of its learning shows when it does
            raise ConfigError(
                f"{what}: {name!r}: there is no policy {policy_id!r}.{nearest(policy_id, policies)}"
            )
    if any(name.startswith(f"{group}/") and name != f"{group}/" for group in _OPEN):
        return
    raise ConfigError(f"{what}: no result has a metric {name!r}.{nearest(name, known)}")
