"""What RLlib's versions and others call settings of ours."""

from __future__ import annotations

import logging
from typing import Any

from flowrl.settings import ConfigError

log = logging.getLogger("flowrl")

# other spellings of settings, those of RLlib's versions above all
SPELLINGS = {
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
    "timesteps_per_iteration": "min_sample_timesteps_per_iteration",
    "min_time_s_per_reporting": "min_time_s_per_iteration",
    "callbacks": "callbacks_class",
    "num_steps_sampled_before_learning_starts": "learning_starts",
    "model_config": "model",
    "adam_eps": "adam_epsilon",
}
_FILTERS = {"NoFilter": False, "MeanStdFilter": True}


def our_names(values: dict[str, Any]) -> dict[str, Any]:
    """Settings with our names for them; a note says which ones had others.

    Raises:
        ConfigError: a setting under two names, or another framework than torch.
    """
    made: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise ConfigError(f"the name of a setting is a string, got {name!r}")
        ours = SPELLINGS.get(name, name)
        if name == "batch_mode" and value == "truncated_episodes":
            value = "truncate_episodes"
        if name == "framework":
            if value != "torch":
                raise ConfigError(f"framework: it is torch, there is no {value!r}")
            continue
        if name == "observation_filter":
            if not isinstance(value, str) or value not in _FILTERS:
                allowed = " or ".join(map(repr, _FILTERS))
                raise ConfigError(f"observation_filter: {allowed} is needed, got {value!r}")
            ours, value = "normalize_observations", _FILTERS[value]
        if ours in made or (ours != name and ours in values):
            raise ConfigError(f"{name} is another name of {ours}: give one of them")
        if ours != name and name not in ("lambda", "callbacks"):
            log.warning("the setting %s is called %s here", name, ours)
        made[ours] = value
    return made
