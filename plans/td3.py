"""TD3: store rollouts in a replay buffer, train a deterministic actor and two critics."""

from flowrl import TD3Config
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

config = TD3Config(env="Pendulum-v1")


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
