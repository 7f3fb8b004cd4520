"""Names that RLlib and other libraries use for our settings, classes and results.

`SETTING_ALIASES` are accepted, with a note in the log; the names of `SETTING_HINTS` and
`CLASS_HINTS` are rejected with a hint; `RESULT_ALIASES` and `INFO_COUNTERS` are reported next to
our names. Timers have RLlib's names (`sample`, `learn`, `update`, `compute_grads`, …).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Container
from typing import Any

from flowrl.errors import ConfigError
from flowrl.setting_values import nearest, nearest_name

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

_TRAIN_FREQ = [
    (
        "training_intensity",
        "Use `rollout_fragment_length`, the env steps sampled between train batches; "
        "`training_intensity` sets the ratio of rows trained on to rows stored",
    )
]
_EPSILON = [
    (
        "max_weight_sync_delay",
        'Each worker has its own: `exploration_config={"epsilon_base": 0.4}`',
    ),
    (
        "double_q",
        'Use a schedule, `exploration_config={"epsilon": [["0%", 1.0], ["10%", 0.05]]}`',
    ),
]
_EPSILON_OF_RLLIB = [
    ("epsilon", "Use a schedule of env steps, `epsilon=[[0, 1.0], [10_000, 0.05]]`"),
    *_EPSILON,
]
# name in Stable-Baselines3, CleanRL or RLlib -> (marker, hint) pairs. The hint of the first marker
# that is a setting of the algorithm applies. Code is in backticks: `name` and `name=value` are
# settings, and a hint that is only a name is a rename.
SETTING_HINTS: dict[str, list[tuple[str, str]]] = {
    # learning
    "learning_rate": [("lr", "`lr`")],
    "anneal_lr": [("lr", 'Use a schedule, `lr=[["0%", 3e-4], ["100%", 0.0]]`')],
    "lr_schedule": [("lr", "Use a schedule of env steps, `lr=[[0, 3e-4], [100_000, 0.0]]`")],
    "discount": [("gamma", "`gamma`")],
    "discount_factor": [("gamma", "`gamma`")],
    "max_grad_norm": [("grad_clip", "`grad_clip`")],
    "batch_size": [
        (
            "lambda_",
            "Use `sgd_minibatch_size` for the rows per update; `train_batch_size` is the "
            "env steps sampled between updates",
        ),
        ("train_batch_size", "`train_batch_size`"),
    ],
    "num_minibatches": [
        (
            "train_batch_size",
            "Use `sgd_minibatch_size`, the rows per update: train_batch_size / num_minibatches",
        ),
    ],
    "n_steps": [
        (
            "n_step",
            "Use `n_step` for the rewards in a target, and `rollout_fragment_length` for "
            "the env steps sampled between updates",
        ),
        (
            "lambda_",
            "Use `train_batch_size`, the env steps per update of all environments "
            "together: n_steps × number of environments",
        ),
    ],
    "num_steps": [
        (
            "lambda_",
            "Use `train_batch_size`, the env steps per update of all environments "
            "together: num_steps × number of environments",
        ),
    ],
    "n_epochs": [("num_sgd_iter", "`num_sgd_iter`")],
    "update_epochs": [("num_sgd_iter", "`num_sgd_iter`")],
    "rms_prop_eps": [("train_batch_size", "The optimizer is Adam: `adam_epsilon`")],
    "use_rms_prop": [
        (
            "train_batch_size",
            "The optimizer is Adam; for another one, override the policy's make_optimizer()",
        )
    ],
    # on-policy algorithms
    "gae_lambda": [("lambda_", "`lambda_`")],
    "ent_coef": [
        ("entropy_coeff", "`entropy_coeff`"),
        (
            "initial_alpha",
            "Use `initial_alpha` for the initial entropy temperature; it adapts to "
            "`target_entropy`, and `target_entropy=None` keeps it fixed",
        ),
    ],
    "entropy_coeff_schedule": [
        ("entropy_coeff", "Use a schedule, `entropy_coeff=[[0, 0.01], [100_000, 0.0]]`"),
    ],
    "vf_coef": [("vf_loss_coeff", "`vf_loss_coeff`"), ("vf_coeff", "`vf_coeff`")],
    "clip_range": [("clip_param", "`clip_param`")],
    "clip_coef": [("clip_param", "`clip_param`")],
    "clip_range_vf": [("vf_clip_param", "`vf_clip_param`")],
    "clip_vloss": [("vf_clip_param", "Use `vf_clip_param=0.2`, or None not to clip")],
    "normalize_advantage": [("standardize_advantages", "`standardize_advantages`")],
    "norm_adv": [("standardize_advantages", "`standardize_advantages`")],
    "target_kl": [("kl_stop", "`kl_stop`")],
    "use_kl_loss": [
        (
            "kl_coeff",
            "Use `kl_coeff`, the initial weight of the penalty; `kl_coeff=0.0` disables it",
        )
    ],
    # off-policy algorithms
    "buffer_size": [("replay_buffer_capacity", "`replay_buffer_capacity`")],
    "replay_buffer_config": [
        (
            "replay_buffer_capacity",
            "Use `replay_buffer_capacity`, `prioritized_replay` and the "
            "other settings whose names begin with replay_ and prioritized_replay_",
        ),
    ],
    "gradient_steps": [
        (
            "training_intensity",
            "Use `training_intensity`, the rows trained on per row stored: "
            "gradient_steps × batch_size / train_freq",
        ),
    ],
    "train_freq": _TRAIN_FREQ,
    "train_frequency": _TRAIN_FREQ,
    "target_update_interval": [("target_network_update_freq", "`target_network_update_freq`")],
    "target_network_frequency": [("target_network_update_freq", "`target_network_update_freq`")],
    "policy_frequency": [("policy_delay", "`policy_delay`")],
    "target_policy_noise": [("target_noise", "`target_noise`")],
    "policy_noise": [("target_noise", "`target_noise`")],
    "noise_clip": [("target_noise_clip", "`target_noise_clip`")],
    "policy_lr": [("actor_lr", "`actor_lr`")],
    "q_lr": [("critic_lr", "`critic_lr`")],
    "alpha": [("initial_alpha", "`initial_alpha`")],
    "alpha_lr": [("entropy_lr", "`entropy_lr`")],
    "autotune": [
        (
            "target_entropy",
            "The entropy temperature adapts to `target_entropy`; "
            "`target_entropy=None` keeps it fixed at `initial_alpha`",
        )
    ],
    # runs
    "input": [("input_", "`input_`")],
    "metrics_smoothing_episodes": [
        ("metrics_num_episodes_for_smoothing", "`metrics_num_episodes_for_smoothing`")
    ],
    "max_num_env_runner_restarts": [("max_num_worker_restarts", "`max_num_worker_restarts`")],
    # exploration
    "action_noise": [
        ("policy_delay", 'Use `exploration_config={"type": "GaussianNoise", "scale": 0.1}`'),
    ],
    "exploration_noise": [("policy_delay", 'Use `exploration_config={"scale": 0.1}`')],
    "epsilon": _EPSILON,
    "exploration_fraction": _EPSILON,
    "exploration_initial_eps": _EPSILON,
    "exploration_final_eps": _EPSILON,
    "initial_epsilon": _EPSILON_OF_RLLIB,
    "final_epsilon": _EPSILON_OF_RLLIB,
    "epsilon_timesteps": _EPSILON_OF_RLLIB,
    "start_e": _EPSILON,
    "end_e": _EPSILON,
    "use_sde": [("train_batch_size", "State-dependent exploration is not available")],
    "sde_sample_freq": [("train_batch_size", "State-dependent exploration is not available")],
    # networks
    "hiddens": [("model", 'Use `model={"fcnet_hiddens": [64, 64]}`')],
    "policy": [
        (
            "model",
            "The type of the network follows from the spaces; its sizes are "
            '`model={"fcnet_hiddens": [64, 64]}`',
        )
    ],
    "policy_kwargs": [
        ("model", 'Use `model={"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"}`')
    ],
    "net_arch": [
        ("model", 'Use `model={"fcnet_hiddens": [64, 64]}`'),
        ("fcnet_hiddens", "`fcnet_hiddens`"),
    ],
    "activation_fn": [
        ("model", 'Use `model={"fcnet_activation": "relu"}`'),
        ("fcnet_activation", "`fcnet_activation`"),
    ],
    "rl_module": [("model", "Use `.training(model={…})`")],
    # devices and processes
    "cuda": [("device", "`device`")],
    "num_gpus": [
        (
            "device",
            'Use `device="cuda"`; the default, "auto", learns on the GPU if there is one',
        )
    ],
    "learners": [
        ("num_learners", "Use `.training(num_learners=…)`"),
        ("device", "Use `.framework(device=…)`; IMPALA, APPO and APEX also have num_learners"),
    ],
    "api_stack": [("device", "Leave it out: there is only one API")],
    "attention_use_n_prev_actions": [
        (
            "use_attention",
            "Attention reads only observations, recurrent cells have `lstm_use_prev_action`",
        )
    ],
    "attention_use_n_prev_rewards": [
        (
            "use_attention",
            "Attention reads only observations, recurrent cells have `lstm_use_prev_reward`",
        )
    ],
    # environments
    "env_id": [("env", "`env`")],
    "env_kwargs": [("env_config", "`env_config`")],
    "n_envs": [("num_envs_per_worker", "`num_envs_per_worker`")],
    "num_envs": [("num_envs_per_worker", "`num_envs_per_worker`")],
    "remote_worker_envs": [
        (
            "train_batch_size",
            'Use `vectorization_mode="async"`, which steps environments in other processes',
        )
    ],
    "clip_rewards": [
        (
            "train_batch_size",
            "Clip them in a wrapper of the environment; `normalize_rewards` scales them",
        )
    ],
    "max_episode_steps": [("horizon", "`horizon`")],
    "norm_obs": [("normalize_observations", "`normalize_observations`")],
    "norm_reward": [("normalize_rewards", "`normalize_rewards`")],
    "normalize": [
        ("normalize_observations", "Use `normalize_observations` and `normalize_rewards`"),
    ],
    "config": [("train_batch_size", "Pass the config as the first argument")],
    # reports
    "timesteps_total": [("total_timesteps", "`total_timesteps`")],
    "log_level": [
        ("train_batch_size", 'Use logging.getLogger("flowrl").setLevel("DEBUG") of Python')
    ],
    "verbose": [("train_batch_size", "`algorithm.learn(progress=False)` prints no progress table")],
    "tensorboard_log": [
        (
            "train_batch_size",
            "`algorithm.learn(run_dir=…)` sets the folder of the results, and "
            "the command `flowrl tensorboard` shows them",
        )
    ],
    "stats_window_size": [("train_batch_size", "`metrics_num_episodes_for_smoothing`")],
    "track": [("train_batch_size", 'Use `log_to=["wandb"]`')],
    "capture_video": [
        ("train_batch_size", 'Use `evaluation_interval=10` and `evaluation_video_dir="videos"`')
    ],
}

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
    """Return our name of a setting of another library, or None if it is not just a rename.

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
        settings: the settings of the algorithm; names of other libraries for them also count.
    """
    others = [n for n in (*SETTING_ALIASES, *SETTING_HINTS) if setting_hint(n, settings)]
    similar = nearest_name(name, [*known, *others])
    if similar is None or similar in known:
        return nearest(name, known)
    return setting_hint(similar, settings) or ""


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
