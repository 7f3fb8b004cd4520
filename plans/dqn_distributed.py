"""Distributed DQN: store rollouts in replay buffers on actors, which receive them by reference."""

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
    num_workers=2,
    num_envs_per_worker=4,
    rollout_fragment_length=16,
    training_intensity=8,
    exploration_config={"type": "EpsilonGreedy", "epsilon": [("0%", 1.0), ("10%", 0.05)]},
)


def execution_plan(workers, config):
    actors = config.replay_actors()
    rollouts = ParallelRollouts(workers, mode="async", by_reference=True)
    store = rollouts.for_each(StoreToReplayBuffer(actors=actors))
    train = (
        Replay(actors=actors)
        .for_each(TrainOneStep(workers))
        .for_each(UpdateReplayPriorities(actors=actors))
        .for_each(UpdateTargetNetwork(workers, config.target_network_update_freq))
    )
    both = Concurrently([store, train], mode="async", output_indexes=[1])
    return StandardMetricsReporting(both, workers, config)
