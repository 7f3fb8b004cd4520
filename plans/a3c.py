"""A3C: workers compute gradients of their own samples, the learner applies each on arrival."""

from flowrl import A3CConfig
from flowrl.ops import ApplyGradients, AsyncGradients, StandardMetricsReporting

config = A3CConfig(
    env="CartPole-v1",
    num_workers=2,
    num_envs_per_worker=4,
    lr=[("0%", 1e-3), ("100%", 0.0)],
)


def execution_plan(workers, config):
    gradients = AsyncGradients(
        workers, num_async=config.max_requests_in_flight_per_worker, **config.staleness()
    )
    train = gradients.for_each(ApplyGradients(workers, update_all=False))
    return StandardMetricsReporting(train, workers, config)
