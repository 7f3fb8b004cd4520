"""A2C with replay: store rollouts in a small replay buffer, train on sampled batches."""

from flowrl import A2CConfig
from flowrl.ops import (
    Concurrently,
    ParallelRollouts,
    Replay,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    TrainOneStep,
)
from flowrl.replay import MultiAgentReplayBuffer, ReplayBuffer

config = A2CConfig(
    env="CartPole-v1",
    num_envs_per_worker=8,
    lr=[("0%", 1e-3), ("100%", 0.0)],
    allow_off_policy=True,
)


def execution_plan(workers, config):
    capacity = 4 * config.train_batch_size  # older rows mislead an on-policy loss
    buffer = MultiAgentReplayBuffer(
        lambda policy_id: ReplayBuffer(capacity, seed=config.seed),
        replay_batch_size=config.train_batch_size,
    )
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    store = rollouts.for_each(StoreToReplayBuffer(local_buffer=buffer))
    replay = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
    train = Concurrently([store, replay], mode="round_robin", output_indexes=[1])
    return StandardMetricsReporting(train, workers, config)
