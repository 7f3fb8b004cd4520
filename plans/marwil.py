"""MARWIL: imitate recorded actions, weighted by their advantages."""

from flowrl import MARWILConfig
from flowrl.ops import StandardMetricsReporting, TrainOneStep

config = MARWILConfig(env="CartPole-v1", input_="experience", lr=1e-3)


def execution_plan(workers, config):
    train = config.batches(workers).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train, workers, config)
