"""DQN: store rollouts in a replay buffer, train on sampled batches."""

from flowrl.algorithms.dqn import DQNConfig
from flowrl.ops import (
    Concurrently,
    ParallelRollouts,
    Replay,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    TrainOneStep,
    UpdateReplayPriorities,
    UpdateTargetNetwork,
)

config = DQNConfig(
    env="CartPole-v1",
    exploration_config={"type": "EpsilonGreedy", "epsilon": [("0%", 1.0), ("10%", 0.05)]},
)
tuned = {
    "CartPole-v1": {
        "lr": [(0, 1e-3), (100_000, 5e-5)],
        "n_step": 10,
        "dueling": False,
        "target_network_update_freq": 0,
        "tau": 0.01,
        "prioritized_replay": False,
        "model": {"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"},
        "exploration_config": {"epsilon": [(0, 1.0), (3_000, 0.01)]},
    }
}


def execution_plan(workers, config):
    buffer = config.replay_buffer()
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    store = rollouts.for_each(StoreToReplayBuffer(local_buffer=buffer))
    train = (
        Replay(local_buffer=buffer)
        .for_each(TrainOneStep(workers))
        .for_each(UpdateReplayPriorities(local_buffer=buffer))
        .for_each(UpdateTargetNetwork(workers, config.target_network_update_freq))
    )
    both = Concurrently([store, train], mode="round_robin", output_indexes=[1])
    return StandardMetricsReporting(both, workers, config)
