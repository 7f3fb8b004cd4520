"""PPO and DQN in one plan: each trains its own policy on the same stream of experience."""

from flowrl import AlgorithmConfig, DQNConfig, PPOConfig
from flowrl.envs import make_multi_agent
from flowrl.ops import (
    ConcatBatches,
    Concurrently,
    ParallelRollouts,
    Replay,
    SelectExperiences,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    TrainOneStep,
    UpdateReplayPriorities,
    UpdateTargetNetwork,
)
from flowrl.policies import PolicySpec

config = AlgorithmConfig(
    env=make_multi_agent("CartPole-v1"),
    env_config={"num_agents": 4, "episode_steps": 500},
    total_timesteps=100_000,
    num_envs_per_worker=4,
    rollout_fragment_length=8,
    policies={
        "ppo": PolicySpec(
            config=PPOConfig(
                train_batch_size=1024,
                gamma=0.98,
                lr=[("0%", 1e-3), ("100%", 0.0)],
                clip_param=[("0%", 0.2), ("100%", 0.0)],
            )
        ),
        "dqn": PolicySpec(
            config=DQNConfig(
                lr=[("0%", 1e-3), ("100%", 5e-5)],
                train_batch_size=64,
                n_step=10,
                target_network_update_freq=0,
                tau=0.005,
                prioritized_replay=False,
                training_intensity=16,
                model={"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"},
                exploration_config={
                    "type": "EpsilonGreedy",
                    "epsilon": [("0%", 1.0), ("1.5%", 0.1), ("10%", 0.01)],
                },
            )
        ),
    },
    policy_mapping_fn=lambda agent_id: "ppo" if agent_id % 2 else "dqn",
    min_sample_timesteps_per_iteration=1000,
    metrics_num_episodes_for_smoothing=20,
)


def execution_plan(workers, config):
    ppo, dqn = config.for_policy("ppo"), config.for_policy("dqn")
    buffer = dqn.replay_buffer(["dqn"])
    rollouts_for_ppo, rollouts_for_dqn = ParallelRollouts(workers, mode="bulk_sync").duplicate(2)
    train_ppo = (
        rollouts_for_ppo.for_each(SelectExperiences(["ppo"]))
        .combine(ConcatBatches(ppo.train_batch_size, count_steps_by="agent_steps"))
        .for_each(TrainOneStep(workers, policies=["ppo"]))
    )
    store = rollouts_for_dqn.for_each(SelectExperiences(["dqn"])).for_each(
        StoreToReplayBuffer(local_buffer=buffer)
    )
    train_dqn = (
        Replay(local_buffer=buffer)
        .for_each(TrainOneStep(workers, policies=["dqn"]))
        .for_each(UpdateReplayPriorities(local_buffer=buffer))
        .for_each(UpdateTargetNetwork(workers, dqn.target_network_update_freq, policies=["dqn"]))
    )
    both = Concurrently([train_ppo, store, train_dqn], mode="round_robin", output_indexes=[0, 2])
    return StandardMetricsReporting(both, workers, config)
