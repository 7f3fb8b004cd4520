"""CQL: learn conservative Q-values offline; the environment is only for evaluation."""

from flowrl import CQLConfig
from flowrl.ops import StandardMetricsReporting, TrainOneStep, UpdateTargetNetwork

config = CQLConfig(env="Pendulum-v1", input_="experience")


def execution_plan(workers, config):
    train = (
        config.batches(workers)
        .for_each(TrainOneStep(workers))
        .for_each(UpdateTargetNetwork(workers, config.target_network_update_freq))
    )
    return StandardMetricsReporting(train, workers, config)
