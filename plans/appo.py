"""APPO: workers sample without waiting, a learner thread optimizes a clipped loss."""

from flowrl import APPOConfig
from flowrl.ops import (
    AggregateBatches,
    BroadcastUpdateLearnerWeights,
    ConcatBatches,
    Concurrently,
    Dequeue,
    Enqueue,
    MixInReplay,
    ParallelRollouts,
    StandardMetricsReporting,
    UpdateTargetNetwork,
)

config = APPOConfig(
    env="CartPole-v1",
    num_workers=2,
    num_envs_per_worker=4,
    lr=[("0%", 1e-3), ("100%", 0.0)],
)


def execution_plan(workers, config):
    learner = config.learner(workers)
    rollouts = ParallelRollouts(
        workers,
        mode="async",
        num_async=config.max_requests_in_flight_per_worker,
        by_reference=config.num_aggregation_workers > 0,
        **config.staleness(),
    )
    batches = (
        rollouts.for_each(BroadcastUpdateLearnerWeights(workers, config.broadcast_interval))
        .combine(MixInReplay(config.replay_buffer_num_slots, config.replay_proportion, config.seed))
        .combine(ConcatBatches(config.train_batch_size, count_steps_by=config.count_steps_by))
    )
    enqueue = AggregateBatches(batches, config.num_aggregation_workers).for_each(Enqueue(learner))
    learned = Dequeue(learner).for_each(
        UpdateTargetNetwork(workers, config.target_network_update_freq, by_steps_trained=True)
    )
    both = Concurrently([enqueue, learned], mode="async", output_indexes=[1])
    return StandardMetricsReporting(both, workers, config)
