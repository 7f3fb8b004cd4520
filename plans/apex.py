"""Ape-X: workers fill replay buffers on actors, an asynchronous learner updates priorities."""

from flowrl.algorithms.apex import APEXConfig
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
tuned = {
    "CartPole-v1": {
        "rollout_fragment_length": 16,
        "train_batch_size": 64,
        "lr": [(0, 1e-3), (200_000, 5e-5)],
        "n_step": 5,
        "dueling": False,
        "target_network_update_freq": 0,
        "tau": 0.005,
        "training_intensity": 8,
        "model": {"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"},
    }
}


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
        all_three, workers, config, selected_workers=config.greedy_workers()
    )
