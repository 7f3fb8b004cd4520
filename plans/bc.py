"""BC: imitate the actions in recorded experience; the environment is only for evaluation."""

from flowrl import BCConfig
from flowrl.ops import StandardMetricsReporting, TrainOneStep

config = BCConfig(env="CartPole-v1", input_="experience", lr=1e-3)


def execution_plan(workers, config):
    train = config.batches(workers).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train, workers, config)
