"""Arguments, plan files and readers for the tests of the command line."""

import json
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SMALL_BATCHES = ["--train-batch-size", "64", "--sgd-minibatch-size", "32"]
SEEDED = [*SMALL_BATCHES, "--seed", "4"]
TWO_ITERATIONS = [*SMALL_BATCHES, "--stop-iters", "2"]

ALGORITHM_FILE = """
from flowrl.algorithms import Algorithm
from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.ops import synchronous_parallel_sample, train_one_step

class MinePolicy(A2CTorchPolicy):
    pass

class Mine(Algorithm):
    policy_class, config_class = MinePolicy, A2CConfig

    def training_step(self):
        batch = synchronous_parallel_sample(worker_set=self.workers, max_env_steps=32)
        results = train_one_step(self, batch)
        self.workers.sync_weights()
        return results

config = A2CConfig(env="CartPole-v1", plan=None, train_batch_size=32)
"""

ENVIRONMENT_PLAN = '''"""A2C on an environment that the plan file defines."""
import gymnasium as gym
import numpy as np
from flowrl.algorithms.a2c import A2CConfig
from flowrl.ops import ParallelRollouts, StandardMetricsReporting, TrainOneStep


class Short(gym.Env):
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    fails = False

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.fails and self.steps == 3:
            raise OSError("the simulator is gone")
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 5, False, {}


config = A2CConfig(env=lambda context: Short(), train_batch_size=20)


def execution_plan(workers, config):
    train = ParallelRollouts(workers).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train, workers, config)
'''


def read_results(run_dir):
    """Return the results of a run."""
    return [json.loads(line) for line in (run_dir / "result.json").read_text().splitlines()]


def read_settings(run_dir):
    """Return the contents of config.json."""
    return json.loads((run_dir / "config.json").read_text())


def learning_curve(results):
    """Return (env steps, mean return) of every result."""
    return [(result["timesteps_total"], result["episode_reward_mean"]) for result in results]
