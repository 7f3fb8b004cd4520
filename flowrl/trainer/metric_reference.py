"""The metrics of a result: name, unit and meaning of each; the reference pages are made from it.

`<policy>`, `<agent>`, `<operator>`, `<counter>` and `<metric>` stand for names. Metrics of
callbacks (`custom_metrics`), of environments and of a custom policy's loss are not listed.
"""

from __future__ import annotations

from typing import NamedTuple

from flowrl.ops.report import MAX_REPORTED_AGENTS
from flowrl.setting_aliases import POLICY_RESULT_ALIASES, RESULT_ALIASES


class Metric(NamedTuple):
    """Description of one metric.

    Attributes:
        unit: unit of the value; "" for a number without unit.
        meaning: what it measures.
    """

    unit: str
    meaning: str


_EPISODES = "the last metrics_num_episodes_for_smoothing finished episodes"

RESULT_METRICS = {
    "training_iteration": Metric("results", "Number of this result."),
    "timesteps_total": Metric("env steps", "Env steps sampled since the start of the training."),
    "timesteps_this_iter": Metric("env steps", "Env steps sampled since the last result."),
    "agent_timesteps_total": Metric("agent steps", "Agent steps sampled since the start."),
    "episode_reward_mean": Metric("reward", f"Mean return of {_EPISODES}."),
    "episode_reward_min": Metric("reward", f"Smallest return of {_EPISODES}."),
    "episode_reward_max": Metric("reward", f"Largest return of {_EPISODES}."),
    "episode_len_mean": Metric("env steps", f"Mean length of {_EPISODES}."),
    "episodes_this_iter": Metric("episodes", "Episodes finished since the last result."),
    "episodes_total": Metric("episodes", "Episodes finished since the start."),
    "episodes_in_window": Metric(
        "episodes", "Number of episodes in the window of the episode statistics."
    ),
    "num_env_steps_sampled": Metric("env steps", "The same as timesteps_total."),
    "num_env_steps_sampled_lifetime": Metric("env steps", "The same as timesteps_total."),
    "num_env_steps_trained": Metric(
        "env steps",
        "Env steps trained on since the start; each training operator counts them, replayed ones "
        "each time.",
    ),
    "num_agent_steps_sampled": Metric("agent steps", "The same as agent_timesteps_total."),
    "num_agent_steps_trained": Metric("agent steps", "Agent steps trained on since the start."),
    "num_healthy_workers": Metric("workers", "Remote workers that have not failed permanently."),
    "num_remote_worker_restarts": Metric("restarts", "Restarts of remote workers."),
    "num_env_restarts": Metric("restarts", "Restarts of environments that failed."),
    "num_faulty_episodes": Metric("episodes", "Episodes of which rows were dropped."),
    "num_episodes_restarted": Metric("episodes", "Episodes that a checkpoint could not resume."),
    "env_runners/policy_lag_mean": Metric(
        "updates",
        "Mean policy lag of the fragments trained on; 0 if there are none.",
    ),
    "env_runners/policy_lag_max": Metric(
        "updates",
        "Largest policy lag of the fragments trained on; 0 if there are none.",
    ),
    "diagnosis": Metric("text", "What limited the training in its last ten seconds."),
    "time_this_iter_s": Metric("seconds", "Duration of this iteration, without evaluation."),
    "time_total_s": Metric("seconds", "Duration of all iterations, without evaluations."),
    **{alias: Metric("", f"The same as {name}.") for alias, name in RESULT_ALIASES.items()},
}
"""Metrics of every result."""

POLICY_METRICS = {
    "policy_reward_mean": Metric("reward", f"Mean return of the policy's agents in {_EPISODES}."),
    "policy_reward_min": Metric("reward", "Smallest return of one of the policy's agents."),
    "policy_reward_max": Metric("reward", "Largest return of one of the policy's agents."),
    **{alias: Metric("", f"The same as {name}.") for alias, name in POLICY_RESULT_ALIASES.items()},
}
"""Metrics with one value per policy, NAME/<policy>."""

_LEARNER_METRICS = {
    "total_loss": Metric("", "The loss that is minimized, with all its terms."),
    "policy_loss": Metric("", "Loss of the policy."),
    "vf_loss": Metric("reward²", "Loss of the value function, without its coefficient."),
    "actor_loss": Metric("", "Loss of the actor."),
    "critic_loss": Metric("reward²", "Loss of the critics."),
    "entropy": Metric("nats", "Mean entropy of the action distribution."),
    "kl": Metric(
        "nats",
        "Mean KL divergence of the trained policy from the sampling policy; APPO: "
        "from the target network's policy.",
    ),
    "vf_explained_var": Metric("", "Explained share of the value targets' variance; 1 is best."),
    "cur_kl_coeff": Metric("", "Coefficient of the KL penalty."),
    "cur_clip_param": Metric("", "Value of clip_param."),
    "cur_lr": Metric(
        "",
        "Learning rate of the last update; that of the actor with SAC, TD3, DDPG and CQL. A3C does "
        "not report it.",
    ),
    "grad_norm": Metric("", "Norm of the gradient before clipping."),
    "mean_q": Metric(
        "reward",
        "Mean Q-value of the actions in the batch; that of R2D2 is rescaled (use_h_function).",
    ),
    "mean_td_error": Metric(
        "reward",
        "Mean temporal-difference error: Q-values minus targets; with num_atoms above 1, the mean "
        "KL divergence [nats] of the distributions from their targets; that of R2D2 is between "
        "rescaled values.",
    ),
    "alpha": Metric("", "Entropy temperature."),
    "cql_gap": Metric("reward", "CQL: soft maximum of the Q-values minus those of the data."),
    "min_q_weight": Metric("", "CQL: weight of the conservative penalty."),
    "mean_logp": Metric("nats", "MARWIL and BC: mean log-probability of the recorded actions."),
    "mean_weight": Metric("", "MARWIL: mean weight of the recorded actions."),
    "policy_lag_mean": Metric("updates", "Mean policy lag of the batch."),
    "policy_lag_max": Metric("updates", "Largest policy lag of the batch."),
    "num_skipped_updates": Metric("updates", "Updates skipped so far for non-finite values."),
    "num_agent_steps_trained_lifetime": Metric("agent steps", "Agent steps trained on so far."),
}

_TIMERS = {
    "env_steps_per_s": Metric("env steps / s", "Env steps sampled per second of the iteration."),
    "checkpoint_time_ms": Metric("ms", "Time spent on checkpoints since the last result."),
    "sample_time_ms": Metric("ms", "Mean time to wait for the items of ParallelRollouts, last 10."),
    "sample_throughput": Metric("env steps / s", "Env steps per second of `sample_time_ms`."),
    "learn_time_ms": Metric("ms", "Mean time of a training step, last 10 steps."),
    "learn_throughput": Metric("rows / s", "Rows trained on per second of `learn_time_ms`."),
    "learn_time_ms/<operator>": Metric(
        "ms", "Mean time of the operator's training steps, if several operators train."
    ),
    "learn_throughput/<operator>": Metric(
        "rows / s", "Rows trained on per second of the operator's `learn_time_ms`."
    ),
    "learner_wait_time_ms": Metric("ms", "Mean time that the learner waits for a batch."),
    "compute_grads_time_ms": Metric("ms", "Mean time to compute gradients on a worker."),
    "compute_grads_throughput": Metric(
        "env steps / s", "Env steps per second of `compute_grads_time_ms`."
    ),
    "grad_wait_time_ms": Metric("ms", "Mean time to wait for a gradient, last 10 gradients."),
    "grad_wait_throughput": Metric("env steps / s", "Env steps per second of `grad_wait_time_ms`."),
    "apply_grad_time_ms": Metric("ms", "Mean time to apply gradients."),
    "apply_grad_throughput": Metric(
        "env steps / s", "Env steps per second of `apply_grad_time_ms`."
    ),
    "update_time_ms": Metric("ms", "Mean time to prepare new weights for the workers, last 10."),
    "sampler_sample_s": Metric(
        "seconds", "Time of sampling of all workers, since the start or the last resume."
    ),
    "sampler_inference_s": Metric("seconds", "Part of `sampler_sample_s` in which policies act."),
    "sampler_env_step_s": Metric(
        "seconds", "Part of `sampler_sample_s` in which environments step, with their resets."
    ),
    "sampler_reset_s": Metric(
        "seconds",
        "Part of `sampler_env_step_s` in which environments are reset; 0 for environments in "
        "processes of their own, and for vector environments of other libraries.",
    ),
    "sampler_collection_s": Metric(
        "seconds", "Part of `sampler_sample_s` in which rows are collected."
    ),
    "sampler_postprocess_s": Metric(
        "seconds", "Part of `sampler_sample_s` in which fragments are finished."
    ),
    "sampler_weights_s": Metric("seconds", "Time in which workers load weights."),
    "operators/<operator>_s": Metric(
        "seconds", "Estimated time in an operator's own code, this iteration."
    ),
}

_COUNTERS = {
    "num_env_steps_sampled": Metric("env steps", "Env steps sampled since the start."),
    "num_agent_steps_sampled": Metric("agent steps", "Agent steps sampled since the start."),
    "num_agent_steps_stored": Metric("agent steps", "Rows stored in replay buffers."),
    "num_env_steps_trained": RESULT_METRICS["num_env_steps_trained"],
    "num_agent_steps_trained": Metric("agent steps", "Agent steps trained on since the start."),
    "num_agent_steps_replayed/<policy>": Metric(
        "agent steps", "Agent steps drawn from replay buffers."
    ),
    "num_target_updates": Metric("updates", "Updates of target networks."),
    "num_shard_restarts": Metric("restarts", "Restarts of remote workers."),
    "num_env_restarts": Metric("restarts", "The same as num_env_restarts of the result."),
    "num_faulty_episodes": Metric("episodes", "The same as num_faulty_episodes of the result."),
    "num_shards_failed": Metric("workers", "Remote workers that failed permanently."),
    "num_env_steps_dropped": Metric(
        "env steps",
        "Env steps that were not trained on: their policy lag was too large, or they were lost.",
    ),
    "num_learner_restarts": Metric("restarts", "Restarts of learners on actors."),
    "num_group_restarts": Metric(
        "restarts", "Times that workers formed their group again (DDPPO)."
    ),
    "num_replay_shard_restarts": Metric("restarts", "Restarts of replay actors."),
    "num_replay_rows_lost": Metric("agent steps", "Rows lost with replay actors that died."),
    "num_replay_fragments_lost": Metric("fragments", "Fragments lost before they were stored."),
    "num_sampling_waits": Metric("times", "Times that sampling waited for the learner."),
    "num_weight_broadcasts": Metric(
        "times", "Times that new weights were marked for the workers that sampled a batch."
    ),
    "num_weight_syncs": Metric(
        "times", "Updates of the weights of single workers by UpdateWorkerWeights."
    ),
    "num_passes_over_data": Metric("passes", "Passes over recorded experience."),
    "num_bytes_between_nodes": Metric("bytes", "Bytes sent between nodes of the cluster."),
}

METRICS = {
    **RESULT_METRICS,
    **{f"{name}/<policy>": metric for name, metric in POLICY_METRICS.items()},
    "agent_reward_mean/<agent>": Metric(
        "reward",
        f"Mean return of an agent in {_EPISODES}; of the first {MAX_REPORTED_AGENTS} agent ids.",
    ),
    "env_runners/agent_episode_returns_mean/<agent>": Metric(
        "", "The same as agent_reward_mean/<agent>."
    ),
    **{f"learners/<policy>/{name}": metric for name, metric in _LEARNER_METRICS.items()},
    **{f"timers/{name}": metric for name, metric in _TIMERS.items()},
    **{f"counters/{name}": metric for name, metric in _COUNTERS.items()},
    "counters/<counter>/<policy>": Metric("", "The part of a counter that belongs to a policy."),
    "info/<counter>": Metric("", "The same as `counters/<counter>`, under RLlib's name."),
    "info/learner/<policy>/learner_stats/<metric>": Metric(
        "", "The same as `learners/<policy>/<metric>`."
    ),
    "info/learner/<policy>/num_agent_steps_trained": Metric(
        "agent steps", "Agent steps of the last update."
    ),
    "trainers/<operator>/learners/<policy>/<metric>": Metric(
        "", "The same as `learners/<policy>/<metric>`, of one training operator."
    ),
    "trainers/<operator>/num_env_steps_trained": Metric(
        "env steps", "Env steps that a training operator trained on."
    ),
    "trainers/<operator>/policy_lag_mean": RESULT_METRICS["env_runners/policy_lag_mean"],
    "trainers/<operator>/policy_lag_max": RESULT_METRICS["env_runners/policy_lag_max"],
    "evaluation/episode_reward_mean": Metric("reward", "Mean return of the evaluation."),
    "evaluation/episode_reward_min": Metric("reward", "Smallest return of the evaluation."),
    "evaluation/episode_reward_max": Metric("reward", "Largest return of the evaluation."),
    "evaluation/episode_reward_std": Metric("reward", "Standard deviation of the returns."),
    "evaluation/episode_len_mean": Metric("env steps", "Mean length of the episodes."),
    "evaluation/episodes": Metric("episodes", "Number of episodes played."),
    "evaluation/num_faulty_episodes": Metric(
        "episodes", "Episodes that were dropped because their environment failed."
    ),
    "evaluation/num_unfinished_episodes": Metric("episodes", "Episodes that did not end."),
    "evaluation/policy_reward_mean/<policy>": Metric("reward", "Mean return of its agents."),
    "evaluation/training_iteration": Metric("results", "Iteration that was evaluated."),
}
"""Name -> description of the metrics that flowrl reports."""
