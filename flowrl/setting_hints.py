"""Hints for settings of other libraries: what to use instead."""

from __future__ import annotations

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
_RUN_DIR = [
    (
        "train_batch_size",
        "Use algorithm.learn(run_dir=…), on the command line --run-dir, for the folder of a run",
    )
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
    "epochs": [("num_sgd_iter", "`num_sgd_iter`")],
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
    "lam": [("lambda_", "`lambda_`")],
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
    "vf_coeff": [("vf_loss_coeff", "`vf_loss_coeff`")],
    "clip_range": [("clip_param", "`clip_param`")],
    "clip_coef": [("clip_param", "`clip_param`")],
    "clip_range_vf": [("vf_clip_param", "`vf_clip_param`")],
    "clip_vloss": [("vf_clip_param", "Use `vf_clip_param=0.2`, or None not to clip")],
    "normalize_advantage": [("standardize_advantages", "`standardize_advantages`")],
    "norm_adv": [("standardize_advantages", "`standardize_advantages`")],
    "target_kl": [("kl_stop", "Use `kl_stop`; SB3 stops at 1.5 * target_kl")],
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
            "gradient_steps × batch_size / (train_freq × number of environments)",
        ),
    ],
    "train_freq": _TRAIN_FREQ,
    "train_frequency": _TRAIN_FREQ,
    "target_update_interval": [("target_network_update_freq", "`target_network_update_freq`")],
    "target_network_frequency": [("target_network_update_freq", "`target_network_update_freq`")],
    "target_update": [("target_network_update_freq", "`target_network_update_freq`")],
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
    "store_buffer_in_checkpoints": [
        ("replay_buffer_capacity", "Leave it out: checkpoints contain the buffer")
    ],
    # runs
    "input_config": [("input_", "Use `input_`, the folder of the recorded experience")],
    "min_iter_time_s": [("min_time_s_per_iteration", "`min_time_s_per_iteration`")],
    "restart_failed_sub_environments": [
        (
            "max_num_env_restarts",
            "Leave it out: environments that fail are restarted; `max_num_env_restarts` is the "
            "limit",
        )
    ],
    "max_requests_in_flight_per_env_runner": [
        ("max_requests_in_flight_per_worker", "`max_requests_in_flight_per_worker`"),
        ("train_batch_size", "Only A3C, IMPALA, APPO and Ape-X have several requests per worker"),
    ],
    "input": [("input_", "`input_`")],
    "metrics_smoothing_episodes": [
        ("metrics_num_episodes_for_smoothing", "`metrics_num_episodes_for_smoothing`")
    ],
    "max_num_env_runner_restarts": [("max_num_worker_restarts", "`max_num_worker_restarts`")],
    "ignore_worker_failures": [("recreate_failed_workers", "`recreate_failed_workers`")],
    "ignore_env_runner_failures": [("recreate_failed_workers", "`recreate_failed_workers`")],
    "eval_freq": [("evaluation_interval", "Use `evaluation_interval`, in iterations")],
    "save_freq": [("checkpoint_frequency", "Use `checkpoint_frequency`, in iterations")],
    "log_folder": _RUN_DIR,
    "logdir": _RUN_DIR,
    "log_dir": _RUN_DIR,
    "exp_name": _RUN_DIR,
    "multi_agent": [("policies", "Use `policies` and `policy_mapping_fn`")],
    # exploration
    "action_noise": [
        ("policy_delay", 'Use `exploration_config={"type": "GaussianNoise", "scale": 0.1}`'),
    ],
    "exploration_noise": [("policy_delay", 'Use `exploration_config={"scale": 0.1}`')],
    "epsilon": _EPSILON,
    "eps": [*_EPSILON, ("adam_epsilon", "`adam_epsilon`")],
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
    "hidden_sizes": [
        ("model", 'Use `model={"fcnet_hiddens": [64, 64]}`'),
        ("fcnet_hiddens", "Use `fcnet_hiddens`"),
    ],
    "hiddens": [
        ("model", 'Use `model={"fcnet_hiddens": [64, 64]}`'),
        ("fcnet_hiddens", "Use `fcnet_hiddens`"),
    ],
    "layers": [
        ("model", 'Use `model={"fcnet_hiddens": [64, 64]}`'),
        ("fcnet_hiddens", "Use `fcnet_hiddens`"),
    ],
    "frame_stack": [
        (
            "q_model",
            "Use Gymnasium's FrameStackObservation or, for a game of Atari, "
            '`atari={"frame_stack": 4}`',
        ),
        ("model", 'Use `model={"num_framestacks": 4}`'),
    ],
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
    "head_fcnet_hiddens": [
        ("model", 'Use `model={"fcnet_hiddens": [64, 64]}`'),
        ("fcnet_hiddens", "`fcnet_hiddens`"),
    ],
    "policy_model_config": [("q_model", "`model`")],
    "q_model_config": [("q_model", "`q_model`")],
    "rl_module": [("model", "Use `.training(model={…})`")],
    # devices and processes
    "torch_compile_learner": [("compile", "`compile`")],
    "cuda": [("device", "`device`")],
    "use_gpu": [("device", 'Use `device="cuda"`')],
    "num_gpus": [
        (
            "device",
            'Use `device="cuda"` or `device="cpu"`; the default, "auto", uses a GPU only for '
            "observations with images",
        )
    ],
    "num_gpus_per_env_runner": [("num_gpus_per_worker", "`num_gpus_per_worker`")],
    "num_gpus_per_learner": [
        ("num_gpus", "Use `num_gpus`, the number of learners with a GPU each"),
        ("device", 'Use `device="cuda"`'),
    ],
    "num_aggregator_actors_per_learner": [("num_aggregation_workers", "`num_aggregation_workers`")],
    "num_cpus": [
        (
            "num_cpus_per_worker",
            "Use ray.init(num_cpus=…) for the CPUs of the cluster, and `num_cpus_per_worker` for "
            "those that each worker reserves",
        )
    ],
    "local_mode": [("num_workers", "`num_workers=0`, the default, samples in this process")],
    "learners": [
        ("num_learners", "Use `.training(num_learners=…)`"),
        ("device", "Use `.framework(device=…)`; IMPALA, APPO and APEX also have num_learners"),
    ],
    "api_stack": [("device", "Leave it out: there is only one API")],
    "build_algo": [("device", "Use config.build()")],
    "update_from_dict": [("device", "Use config = config.updated(**settings)")],
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
    "env_name": [("env", "`env`")],
    "env_kwargs": [("env_config", "`env_config`")],
    "n_envs": [("num_envs_per_worker", "`num_envs_per_worker`")],
    "num_envs": [("num_envs_per_worker", "`num_envs_per_worker`")],
    "remote_worker_envs": [
        (
            "train_batch_size",
            'Use `vectorization_mode="async"`, which steps environments in other processes',
        )
    ],
    "gym_env_vectorize_mode": [
        ("vectorization_mode", 'Use `vectorization_mode="async"` or another of its values')
    ],
    "max_episode_steps": [("horizon", "`horizon`")],
    "compress_observations": [
        ("train_batch_size", "Leave it out: observations are not compressed")
    ],
    "norm_obs": [("normalize_observations", "`normalize_observations`")],
    "norm_reward": [("normalize_rewards", "`normalize_rewards`")],
    "reward_scaling": [
        (
            "normalize_rewards",
            "Scale them in a wrapper of the environment; `normalize_rewards` divides them by a "
            "running standard deviation",
        )
    ],
    "clip_obs": [
        (
            "normalize_observations",
            "Clip them in a wrapper of the environment; `normalize_observations` normalizes them",
        )
    ],
    "render_mode": [
        (
            "env_config",
            "It is an argument of the environment, set it in `env_config`; "
            "`evaluation_video_dir` and algorithm.evaluate(video_dir=…) record videos",
        )
    ],
    "normalize": [
        ("normalize_observations", "Use `normalize_observations` and `normalize_rewards`"),
    ],
    "config": [
        ("train_batch_size", 'Pass the config as the first argument: PPO({…}, env="CartPole-v1")')
    ],
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
    "wandb": [("train_batch_size", 'Use `log_to=["wandb"]`')],
    "mlflow": [("train_batch_size", 'Use `log_to=["mlflow"]`')],
    "capture_video": [
        ("train_batch_size", 'Use `evaluation_interval=10` and `evaluation_video_dir="videos"`')
    ],
}
