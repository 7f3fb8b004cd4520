"""CQL: learn conservative Q-values offline; the environment is only for evaluation."""

from flowrl.algorithms.cql import CQLConfig
from flowrl.ops import StandardMetricsReporting, TrainOneStep, UpdateTargetNetwork

config = CQLConfig(env="Pendulum-v1", input_="experience")
tuned = {
    "Pendulum-v1": {
        "lr": 1e-3,
        "num_actions": 4,
        "min_q_weight": 1.0,
        "model": {"fcnet_hiddens": [64, 64], "fcnet_activation": "relu"},
    }
}


def execution_plan(workers, config):
    train = (
        config.batches(workers)
        .for_each(TrainOneStep(workers))
        .for_each(UpdateTargetNetwork(workers, config.target_network_update_freq))
    )
    return StandardMetricsReporting(train, workers, config)
