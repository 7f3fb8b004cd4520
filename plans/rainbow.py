"""Rainbow: DQN with return distributions, noisy layers, priorities and n-step returns."""

from flowrl import DQNConfig
from flowrl.ops import (
    Concurrently,
    ParallelRollouts,
    Replay,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    TrainOneStep,
    UpdateReplayPriorities,
    UpdateTargetNetwork,
)

config = DQNConfig(
    env="CartPole-v1",
    n_step=3,
    num_atoms=51,
    # the bounds of the discounted returns of CartPole; replace them for other environments
    v_min=0.0,
    v_max=100.0,
    noisy=True,
    exploration_config={"type": "EpsilonGreedy", "epsilon": 0.0},
)


def execution_plan(workers, config):
    buffer = config.replay_buffer()
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    store = rollouts.for_each(StoreToReplayBuffer(local_buffer=buffer))
    train = (
        Replay(local_buffer=buffer)
        .for_each(TrainOneStep(workers))
        .for_each(UpdateReplayPriorities(local_buffer=buffer))
        .for_each(UpdateTargetNetwork(workers, config.target_network_update_freq))
    )
    both = Concurrently([store, train], mode="round_robin", output_indexes=[1])
    return StandardMetricsReporting(both, workers, config)
