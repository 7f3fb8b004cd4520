"""Workers on actors that exceed `max_worker_memory_mb` are replaced between two fragments."""

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.ppo import PPOConfig
from flowrl.errors import ConfigError
from flowrl.process_usage import resident_bytes

SMALL = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 1, "seed": 1}
MB = 1 << 20


class Leaking(gym.Env):
    """Keeps 4 MB more after each step on worker 2."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, context):
        self.leaks, self.kept, self.steps = context.worker_index == 2, [], 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.leaks:
            self.kept.append(np.ones(MB // 2))
        return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}


def memory_of(worker):
    return resident_bytes() / MB


@pytest.mark.slow
def test_leaking_worker_is_replaced_and_no_step_is_lost(ray_session):
    config = PPOConfig(env=Leaking, num_workers=2, **SMALL)
    with config.build() as algorithm:
        algorithm.train()
        base = algorithm.workers.foreach_worker(memory_of)[1]
    limit = int(base) + 400  # about 3 fragments of 32 steps
    with config.updated(max_worker_memory_mb=limit).build() as algorithm:
        first, second = algorithm.workers.remote_workers()
        result = algorithm.train()
        while result["num_remote_worker_restarts"] < 2:
            result = algorithm.train()
        assert algorithm.workers.remote_workers()[0] is first
        assert algorithm.workers.remote_workers()[1] is not second
        assert result["num_env_steps_trained"] == result["num_env_steps_sampled"]
        assert algorithm.workers.foreach_worker(memory_of)[2] < limit + 200


@pytest.mark.slow
def test_limit_below_the_memory_of_a_new_worker_is_an_error(ray_session):
    config = PPOConfig(env="CartPole-v1", num_workers=1, max_worker_memory_mb=10, **SMALL)
    message = "max_worker_memory_mb=10: worker 1 uses .* MB before its first fragment"
    with config.build() as algorithm, pytest.raises(ConfigError, match=message):
        algorithm.train()
