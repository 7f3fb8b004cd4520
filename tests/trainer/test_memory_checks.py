"""Processes and rows that do not fit into memory are refused before training."""

import gymnasium as gym
import numpy as np
import pytest

from flowrl import memory_limit
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.ppo import PPOConfig
from flowrl.errors import ConfigError
from flowrl.memory_limit import GIB
from flowrl.trainer import memory_checks


class Images(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        raise AssertionError("no step is needed to know the memory")

    def step(self, action):
        raise AssertionError("no step is needed to know the memory")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    monkeypatch.setattr(memory_limit, "machine_memory", lambda: 2 * GIB)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (PPOConfig, {"num_workers": 30}, "num_workers=30: processes: this needs 3.0 GiB"),
        (PPOConfig, {"evaluation_num_workers": 30}, "evaluation_num_workers=30: processes"),
        (
            PPOConfig,
            {"num_workers": 15, "evaluation_num_workers": 15},
            "num_workers=15, evaluation_num_workers=15: processes",
        ),
        (DQNConfig, {"num_replay_shards": 30}, "num_replay_shards=30: processes"),
        (
            PPOConfig,
            {"train_batch_size": 10**9},
            "train_batch_size=1000000000: rows: this needs 15.0 GiB",
        ),
        (DQNConfig, {"replay_buffer_capacity": 10**9}, "replay_buffer_capacity=1000000000: rows"),
        (
            PPOConfig,
            {"rollout_fragment_length": 10**6, "num_envs_per_worker": 200},
            "rollout_fragment_length=1000000 with 200 environments: rows: this needs 3.0 GiB",
        ),
    ],
)
def test_sizes_are_refused_without_an_environment(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        config(env="CartPole-v1", **settings).check()


def test_workers_of_a_cluster_are_not_counted(monkeypatch):
    PPOConfig(env="CartPole-v1", num_workers=30, address="10.0.0.1:6379").check()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    PPOConfig(env="CartPole-v1", num_workers=30).check()
    with pytest.raises(ConfigError, match="num_workers=30"):
        PPOConfig(env="CartPole-v1", num_workers=30, address="local").check()
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(memory_checks, "live_nodes", lambda: [{}, {}])
    PPOConfig(env="CartPole-v1", num_workers=30).check()


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        # a frame of 84 x 84 is stored once: 7,056 bytes
        ({"replay_buffer_capacity": 250_000}, True),
        ({"replay_buffer_capacity": 350_000}, False),
        ({"replay_buffer_capacity": 350_000, "replay_buffer_dir": "buffer"}, True),
    ],
)
def test_observations_of_the_environment_count(settings, accepted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"model": {"conv_filters": [[4, 8, 8]], "post_fcnet_hiddens": [8]}}
    with DQNConfig(env=Images, **small, **settings).build() as algorithm:
        if accepted:
            algorithm.check_start()
            return
        with pytest.raises(
            ConfigError, match=r"rows \(replay_buffer_dir keeps them in files\): this needs 2"
        ):
            algorithm.check_start()
