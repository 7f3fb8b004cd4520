"""DD-PPO: every worker learns from its own samples with gradients averaged over all workers."""

from flowrl import DDPPOConfig
from flowrl.ops import StandardMetricsReporting, TrainOnWorkers

config = DDPPOConfig(
    env="CartPole-v1",
    num_workers=2,
    num_envs_per_worker=4,
    lr=[("0%", 3e-4), ("100%", 0.0)],
)


def execution_plan(workers, config):
    train = TrainOnWorkers(
        workers,
        num_sgd_iter=config.num_sgd_iter,
        sgd_minibatch_size=config.sgd_minibatch_size,
    )
    return StandardMetricsReporting(train, workers, config)
