"""Names that RLlib and other libraries use for settings, classes and results of flowrl.

`SETTING_ALIASES` are accepted, with a note in the log; the names of `CLASS_HINTS`, and those in
flowrl.setting_hints, are rejected with a hint; `RESULT_ALIASES` and `INFO_COUNTERS` are reported
next to the names of flowrl. Timers have RLlib's names (`sample`, `learn`, `update`,
`compute_grads`, …).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Container, Mapping
from typing import Any

from flowrl.errors import ConfigError
from flowrl.setting_hints import SETTING_HINTS
from flowrl.setting_values import equal, nearest, nearest_name

log = logging.getLogger("flowrl")

_MULTIAGENT_KEYS = ("policies", "policy_mapping_fn", "policies_to_train", "count_steps_by")

# name in RLlib -> name in flowrl
SETTING_ALIASES = {
    "num_env_runners": "num_workers",
    "num_rollout_workers": "num_workers",
    "num_envs_per_env_runner": "num_envs_per_worker",
    "num_cpus_per_env_runner": "num_cpus_per_worker",
    "train_batch_size_per_learner": "train_batch_size",
    "minibatch_size": "sgd_minibatch_size",
    "num_epochs": "num_sgd_iter",
    "lambda": "lambda_",
    "count_steps_as": "count_steps_by",
    "recreate_failed_env_runners": "recreate_failed_workers",
    "restart_failed_env_runners": "recreate_failed_workers",
    "evaluation_num_episodes": "evaluation_duration",
    "evaluation_num_env_runners": "evaluation_num_workers",
    "evaluation_sample_timeout_s": "evaluation_timeout_s",
    "timesteps_per_iteration": "min_sample_timesteps_per_iteration",
    "min_time_s_per_reporting": "min_time_s_per_iteration",
    "callbacks": "callbacks_class",
    "num_steps_sampled_before_learning_starts": "learning_starts",
    "model_config": "model",
    "adam_eps": "adam_epsilon",
}
_SIMILAR, _ALMOST_SAME = 0.7, 0.85  # minimum similarity of a misspelled name to a setting
_SILENT_ALIASES = ("lambda", "callbacks")
_OBSERVATION_FILTERS = {"NoFilter": False, "MeanStdFilter": True}

# class or function of Stable-Baselines3 or RLlib -> what flowrl has instead
CLASS_HINTS = {
    "Rainbow": 'Use Algorithm.from_plan("rainbow"), which is DQN with all options',
    "RecurrentPPO": 'Use PPO(env, model={"use_lstm": True})',
    "MaskablePPO": "Use PPO with a Dict observation that has the key action_mask",
    "QRDQN": "Use DQN(env, num_atoms=51, v_min=…, v_max=…), which is C51",
    "make_vec_env": 'Use PPO("CartPole-v1", num_envs_per_worker=4)',
    "DummyVecEnv": 'Use PPO("CartPole-v1", num_envs_per_worker=4)',
    "SubprocVecEnv": 'Use PPO("CartPole-v1", num_envs_per_worker=4, num_workers=2)',
    "VecNormalize": "Use PPO(env, normalize_observations=True, normalize_rewards=True)",
    "VecFrameStack": 'Use PPO(env, model={"num_framestacks": 4})',
    "evaluate_policy": "Use algorithm.evaluate(episodes=10)",
    "Monitor": "Results of train() have the returns and lengths of episodes",
}

# result name in newer versions of RLlib -> name in flowrl
RESULT_ALIASES = {
    "env_runners/episode_len_mean": "episode_len_mean",
    "env_runners/episode_return_max": "episode_reward_max",
    "env_runners/episode_return_mean": "episode_reward_mean",
    "env_runners/episode_return_min": "episode_reward_min",
    "env_runners/num_episodes": "episodes_this_iter",
    "env_runners/num_episodes_lifetime": "episodes_total",
}
# the same for metrics with one value per policy
POLICY_RESULT_ALIASES = {"env_runners/module_episode_returns_mean": "policy_reward_mean"}

# counter in `info` of RLlib 1.x -> name in flowrl
INFO_COUNTERS = {
    "num_steps_sampled": "num_env_steps_sampled",
    "num_steps_trained": "num_env_steps_trained",
    "num_env_steps_sampled": "num_env_steps_sampled",
    "num_env_steps_trained": "num_env_steps_trained",
    "num_agent_steps_sampled": "num_agent_steps_sampled",
    "num_agent_steps_trained": "num_agent_steps_trained",
}


def setting_hint(name: str, known: Container[str]) -> str | None:
    """Return a sentence about a setting of another library, with a space before it.

    Args:
        name: the other library's name.
        known: the settings of the algorithm.

    Returns:
        None if no other library's name is known; "" if the algorithm has no such setting.
    """
    if name not in SETTING_HINTS and name not in SETTING_ALIASES:
        return None
    renamed = renamed_setting(name, known)
    if renamed is not None:
        return f" Did you mean {renamed!r}?"
    hint = _hint(name, known)
    return f" {hint}." if hint else ""


def renamed_setting(name: str, known: Container[str]) -> str | None:
    """Return the name in flowrl of another library's setting; None if it is not just a rename.

    Args:
        name: the other library's name.
        known: the settings of the algorithm.
    """
    match = re.fullmatch(r"`(\w+)`", _hint(name, known))
    return match and match[1]


def _hint(name: str, known: Container[str]) -> str:
    """Return the hint of `SETTING_HINTS` or `SETTING_ALIASES` that applies, or ""."""
    alias = SETTING_ALIASES.get(name, "")
    hints = SETTING_HINTS.get(name, [(alias, f"`{alias}`")])
    return next((hint for marker, hint in hints if marker in known), "")


def nearest_setting(name: str, known: list[str], settings: Collection[str]) -> str:
    """Return a sentence about the setting that a misspelled name means, with a space before it, or
    "".

    Args:
        name: the misspelled name.
        known: names that may be suggested.
        settings: the settings of the algorithm; names of other libraries that only rename them
            count if they are almost the same.
    """
    renamed = {n: renamed_setting(n, settings) for n in (*SETTING_ALIASES, *SETTING_HINTS)}
    others = [n for n, setting in renamed.items() if setting is not None]
    similar = nearest_name(name, [*known, *others], _ALMOST_SAME)
    similar = similar or nearest_name(name, known, _SIMILAR)
    if similar is None:
        return ""
    return f" Did you mean {similar if similar in known else renamed[similar]!r}?"


def canonical_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings under their names in flowrl; log a note for each alias.

    The entries of RLlib's "multiagent" become settings.

    Raises:
        ConfigError: a setting is given twice, a name is not a string, "multiagent" has an unknown
            entry, or another setting of RLlib has a value that flowrl does not support.
    """
    settings: dict[str, Any] = {}
    given: dict[str, str] = {}  # name in flowrl -> name in `values`
    for alias, value in _flattened(values).items():
        if not isinstance(alias, str):
            raise ConfigError(f"the name of a setting must be a string, got {alias!r}")
        name = SETTING_ALIASES.get(alias, alias)
        if alias == "batch_mode" and value == "truncated_episodes":
            value = "truncate_episodes"
        if alias == "framework":
            if value != "torch":
                raise ConfigError(f"framework: only 'torch' is supported, got {value!r}")
            continue
        if alias == "_use_trajectory_view_api":
            if not value:
                raise ConfigError(f"{alias}: must be True, the only supported value")
            continue
        if alias == "observation_filter":
            if not isinstance(value, str) or value not in _OBSERVATION_FILTERS:
                allowed = " or ".join(map(repr, _OBSERVATION_FILTERS))
                raise ConfigError(f"observation_filter: must be {allowed}, got {value!r}")
            name, value = "normalize_observations", _OBSERVATION_FILTERS[value]
        if name in given:
            raise ConfigError(
                f"{given[name]} and {alias} are the same setting, {name}: give only one of them"
            )
        given[name] = alias
        if name != alias and alias not in _SILENT_ALIASES:
            log.warning("setting %s is called %s in flowrl", alias, name)
        settings[name] = value
    return settings


def _flattened(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the entries of "multiagent" at the top level."""
    if "multiagent" not in values:
        return values
    nested = values["multiagent"] or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"multiagent: must be a mapping of settings, got {nested!r}")
    unknown = sorted(set(nested) - set(_MULTIAGENT_KEYS))
    if unknown:
        hint = nearest(unknown[0], list(_MULTIAGENT_KEYS))
        raise ConfigError(f"multiagent: unknown setting {unknown[0]!r}.{hint}")
    entries = {name: value for name, value in nested.items() if value is not None}
    for name in sorted(entries.keys() & values.keys()):
        if not equal(entries[name], values[name]):
            raise ConfigError(f"{name} is given twice, also in multiagent: give it once")
    return {name: value for name, value in values.items() if name != "multiagent"} | entries
