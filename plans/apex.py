"""Ape-X: workers fill replay buffers on actors, a learner thread trains on samples."""

from flowrl import APEXConfig
from flowrl.ops import (
    Concurrently,
    Dequeue,
    Enqueue,
    ParallelRollouts,
    Replay,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    UpdateReplayPriorities,
    UpdateTargetNetwork,
    UpdateWorkerWeights,
)

config = APEXConfig(env="CartPole-v1", num_workers=2, num_envs_per_worker=4)


def execution_plan(workers, config):
    actors = config.replay_actors()
    learner = config.learner(workers)
    rollouts = ParallelRollouts(
        workers,
        mode="async",
        num_async=config.max_requests_in_flight_per_worker,
        by_reference=True,
    )
    store = rollouts.for_each(StoreToReplayBuffer(actors=actors)).for_each(
        UpdateWorkerWeights(workers, config.max_weight_sync_delay)
    )
    replay = Replay(actors=actors).for_each(Enqueue(learner))
    learned = (
        Dequeue(learner)
        .for_each(UpdateReplayPriorities(actors=actors))
        .for_each(
            UpdateTargetNetwork(workers, config.target_network_update_freq, by_steps_trained=True)
        )
    )
    all_three = Concurrently([store, replay, learned], mode="async", output_indexes=[2])
    return StandardMetricsReporting(
        all_three, workers, config, selected_workers=config.greedy_workers
    )
