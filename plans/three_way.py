"""PPO, DQN and discrete SAC in one environment: three sub-plans share one stream."""

from flowrl import AlgorithmConfig, DQNConfig, PPOConfig, SACConfig
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
    env_config={"num_agents": 6, "episode_steps": 500},
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
        "sac": PolicySpec(
            config=SACConfig(
                lr=1e-3,
                train_batch_size=64,
                n_step=10,
                tau=0.01,
                target_entropy=0.3,
                initial_alpha=0.2,
                training_intensity=16,
                model={"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"},
            )
        ),
    },
    policy_mapping_fn=lambda agent_id: ("ppo", "dqn", "sac")[agent_id % 3],
    min_sample_timesteps_per_iteration=1000,
    metrics_num_episodes_for_smoothing=20,
)


def execution_plan(workers, config):
    ppo = config.for_policy("ppo")
    rollouts_for_ppo, rollouts_for_dqn, rollouts_for_sac = ParallelRollouts(
        workers, mode="bulk_sync"
    ).duplicate(3)
    train_ppo = (
        rollouts_for_ppo.for_each(SelectExperiences(["ppo"]))
        .combine(ConcatBatches(ppo.train_batch_size, count_steps_by="agent_steps"))
        .for_each(TrainOneStep(workers, policies=["ppo"]))
    )

    def replayed(rollouts, policy_id):
        own, ids = config.for_policy(policy_id), [policy_id]
        buffer = own.replay_buffer(ids)
        store = rollouts.for_each(SelectExperiences(ids)).for_each(
            StoreToReplayBuffer(local_buffer=buffer)
        )
        train = (
            Replay(local_buffer=buffer)
            .for_each(TrainOneStep(workers, policies=ids))
            .for_each(UpdateReplayPriorities(local_buffer=buffer))
            .for_each(UpdateTargetNetwork(workers, own.target_network_update_freq, policies=ids))
        )
        return store, train

    branches = [train_ppo, *replayed(rollouts_for_dqn, "dqn"), *replayed(rollouts_for_sac, "sac")]
    all_three = Concurrently(branches, mode="round_robin", output_indexes=[0, 2, 4])
    return StandardMetricsReporting(all_three, workers, config)
