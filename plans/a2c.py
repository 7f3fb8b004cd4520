"""A2C: workers sample in parallel, the learner takes one gradient step per train batch."""

from flowrl import A2CConfig
from flowrl.ops import ConcatBatches, ParallelRollouts, StandardMetricsReporting, TrainOneStep

config = A2CConfig(
    env="CartPole-v1",
    num_envs_per_worker=8,
    lr=[("0%", 1e-3), ("100%", 0.0)],
)


def execution_plan(workers, config):
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    train = rollouts.combine(
        ConcatBatches(config.train_batch_size, count_steps_by=config.count_steps_by)
    ).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train, workers, config)
