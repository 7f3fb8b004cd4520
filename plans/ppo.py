"""PPO: workers sample in parallel, the learner takes several epochs over each train batch."""

from flowrl import PPOConfig
from flowrl.ops import ConcatBatches, ParallelRollouts, StandardMetricsReporting, TrainOneStep

config = PPOConfig(
    env="CartPole-v1",
    num_envs_per_worker=8,
    lr=[("0%", 3e-4), ("100%", 0.0)],
)


def execution_plan(workers, config):
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    train = rollouts.combine(
        ConcatBatches(config.train_batch_size, count_steps_by=config.count_steps_by)
    ).for_each(
        TrainOneStep(
            workers,
            num_sgd_iter=config.num_sgd_iter,
            sgd_minibatch_size=config.sgd_minibatch_size,
        )
    )
    return StandardMetricsReporting(train, workers, config)
