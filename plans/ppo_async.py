"""Asynchronous PPO: sample the next train batch while a learner thread trains on the last one."""

from flowrl import PPOConfig
from flowrl.ops import (
    ConcatBatches,
    Concurrently,
    Dequeue,
    Enqueue,
    LearnerThread,
    ParallelRollouts,
    StandardMetricsReporting,
)

config = PPOConfig(
    env="CartPole-v1",
    num_workers=2,
    num_envs_per_worker=4,
    lr=[("0%", 3e-4), ("100%", 0.0)],
)


def execution_plan(workers, config):
    learner = LearnerThread(
        workers,
        queue_size=1,  # sampling is one train batch ahead of the learner
        num_sgd_iter=config.num_sgd_iter,
        sgd_minibatch_size=config.sgd_minibatch_size,
    )
    enqueue = (
        ParallelRollouts(workers, mode="bulk_sync")
        .combine(ConcatBatches(config.train_batch_size, count_steps_by=config.count_steps_by))
        .for_each(Enqueue(learner))
    )
    both = Concurrently([enqueue, Dequeue(learner)], mode="async", output_indexes=[1])
    return StandardMetricsReporting(both, workers, config)
