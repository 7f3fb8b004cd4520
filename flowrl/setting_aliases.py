"""Names that RLlib and other libraries use for our settings and results.

`SETTING_ALIASES` are accepted, with a note in the log; `SETTING_SUGGESTIONS` are rejected, and the
error message suggests our name; `RESULT_ALIASES` and `INFO_COUNTERS` are reported next to our
names. Timers have RLlib's names (`sample`, `learn`, `update`, `compute_grads`, …).
"""

from __future__ import annotations

import logging
from typing import Any

from flowrl.errors import ConfigError

log = logging.getLogger("flowrl")

# RLlib's name -> ours
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
    "timesteps_per_iteration": "min_sample_timesteps_per_iteration",
    "min_time_s_per_reporting": "min_time_s_per_iteration",
    "callbacks": "callbacks_class",
    "num_steps_sampled_before_learning_starts": "learning_starts",
    "model_config": "model",
    "adam_eps": "adam_epsilon",
}
_SILENT_ALIASES = ("lambda", "callbacks")
_OBSERVATION_FILTERS = {"NoFilter": False, "MeanStdFilter": True}

# name in Stable-Baselines3, CleanRL and others -> ours
SETTING_SUGGESTIONS = {
    "learning_rate": "lr",
    "discount": "gamma",
    "discount_factor": "gamma",
    "n_steps": "rollout_fragment_length",
    "num_steps": "rollout_fragment_length",
    "n_epochs": "num_sgd_iter",
    "update_epochs": "num_sgd_iter",
    "gae_lambda": "lambda_",
    "ent_coef": "entropy_coeff",
    "vf_coef": "vf_loss_coeff",
    "clip_range": "clip_param",
    "clip_coef": "clip_param",
    "max_grad_norm": "grad_clip",
    "n_envs": "num_envs_per_worker",
    "num_envs": "num_envs_per_worker",
    "buffer_size": "replay_buffer_capacity",
    "gradient_steps": "training_intensity",
    "train_freq": "training_intensity",
    "exploration_fraction": "exploration_config",
    "exploration_final_eps": "exploration_config",
    "policy_kwargs": "model",
    "net_arch": "model",
    "target_update_interval": "target_network_update_freq",
    "env_id": "env",
    "env_kwargs": "env_config",
}

# result name in newer versions of RLlib -> ours
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

# counter in `info` of RLlib 1.x -> ours
INFO_COUNTERS = {
    "num_steps_sampled": "num_env_steps_sampled",
    "num_steps_trained": "num_env_steps_trained",
    "num_env_steps_sampled": "num_env_steps_sampled",
    "num_env_steps_trained": "num_env_steps_trained",
    "num_agent_steps_sampled": "num_agent_steps_sampled",
    "num_agent_steps_trained": "num_agent_steps_trained",
}


def canonical_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings under our names; log a note for each alias.

    Raises:
        ConfigError: a setting is given under two names, a name is not a string, the framework is
            not torch, or the observation_filter is unknown.
    """
    settings: dict[str, Any] = {}
    for alias, value in values.items():
        if not isinstance(alias, str):
            raise ConfigError(f"the name of a setting must be a string, got {alias!r}")
        name = SETTING_ALIASES.get(alias, alias)
        if alias == "batch_mode" and value == "truncated_episodes":
            value = "truncate_episodes"
        if alias == "framework":
            if value != "torch":
                raise ConfigError(f"framework: only 'torch' is supported, got {value!r}")
            continue
        if alias == "observation_filter":
            if not isinstance(value, str) or value not in _OBSERVATION_FILTERS:
                allowed = " or ".join(map(repr, _OBSERVATION_FILTERS))
                raise ConfigError(f"observation_filter: must be {allowed}, got {value!r}")
            name, value = "normalize_observations", _OBSERVATION_FILTERS[value]
        if name in settings or (name != alias and name in values):
            raise ConfigError(f"{alias} is another name of {name}: give only one of them")
        if name != alias and alias not in _SILENT_ALIASES:
            log.warning("setting %s is called %s in flowrl", alias, name)
        settings[name] = value
    return settings
