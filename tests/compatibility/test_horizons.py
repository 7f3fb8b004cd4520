"""The settings of RLlib's earlier documentation of sample collection: episodes of limited length
(docs/reference/compatibility.md). Its examples are in test_sample_collection.py, too."""

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms import ppo
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.data import SampleBatch
from flowrl.policies import ViewRequirement
from flowrl.sampling import RolloutWorker

from ..sampling.fakes import CountEnv, ObservedValue


def sample(length=10, fragment=12, **config):
    worker = RolloutWorker(
        lambda context: gym.wrappers.TimeLimit(CountEnv(1000), length),
        ObservedValue,
        {"rollout_fragment_length": fragment, **config},
    )
    return worker.sample()


def test_settings_may_be_given_as_a_dict():
    settings = {
        "env": "CartPole-v1",
        "batch_mode": "complete_episodes",
        "rollout_fragment_length": 10,
        "multiagent": {"count_steps_by": "agent_steps"},
        "horizon": 20,
        "soft_horizon": False,
        "no_done_at_end": False,
        "num_workers": 0,
        "train_batch_size": 40,
        "_use_trajectory_view_api": True,
    }
    with A2C(settings) as trainer:
        assert trainer.config["count_steps_by"] == "agent_steps"
        assert 0 < trainer.train()["episode_len_mean"] <= 20
    assert A2CConfig(**settings).batch_mode == "complete_episodes"


def test_each_item_of_complete_episodes_is_one_episode():
    """The fragment length is a minimum of `sample()`, not of the sampler's items."""
    worker = RolloutWorker(
        lambda context: CountEnv(6),
        ObservedValue,
        {"batch_mode": "complete_episodes", "rollout_fragment_length": 10},
    )
    assert worker.sampler.next()["t"].tolist() == list(range(6))
    assert worker.sample()["t"].tolist() == [*range(6), *range(6)]


@pytest.mark.parametrize(("horizon", "ends"), [(None, 10), (4, 4), (12, 12)])
def test_horizon_replaces_the_limit_of_the_environment(horizon, ends):
    batch = sample(horizon=horizon, fragment=24)
    assert np.flatnonzero(batch["dones"]).tolist() == list(range(ends - 1, 24, ends))
    assert batch["t"].max() == ends - 1
    assert not batch["terminateds"].any()  # a limit of time truncates
    assert batch["obs"][ends % 24].tolist()[1] == 0  # the environment was reset


def test_horizon_of_the_original_environment():
    worker = RolloutWorker(
        lambda context: gym.make("MountainCar-v0"),
        ppo.PPOTorchPolicy,
        {"horizon": 300, "rollout_fragment_length": 300},
    )
    assert gym.spec("MountainCar-v0").max_episode_steps == 200
    assert np.flatnonzero(worker.sample()["dones"]).tolist() == [299]


def test_soft_horizon_neither_resets_nor_ends():
    batch = sample(length=1000, horizon=4, soft_horizon=True)
    assert not batch["dones"].any()
    assert batch["obs"][:, 1].tolist() == list(range(12))  # not reset
    assert batch["t"].tolist() == [0, 1, 2, 3] * 3  # an episode of its own
    assert len(set(batch["eps_id"])) == 3


def test_no_done_at_end_hides_every_end():
    batch = sample(length=5, no_done_at_end=True)
    assert not batch["dones"].any()
    assert batch["obs"][:, 1].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]  # reset nevertheless
    batch = sample(length=5, no_done_at_end=True, horizon=3)
    assert not batch["dones"].any()
    assert batch["obs"][:, 1].tolist() == [0, 1, 2] * 4


def test_next_actions_in_the_older_environment():
    rollout_worker = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v0"),
        policy_config=ppo.DEFAULT_CONFIG,
        policy_spec=ppo.PPOTorchPolicy,
    )
    policy = rollout_worker.policy_map["default_policy"]
    policy.view_requirements["next_actions"] = ViewRequirement(
        SampleBatch.ACTIONS, shift=1, space=policy.action_space
    )
    assert "next_actions" in rollout_worker.sample().data
