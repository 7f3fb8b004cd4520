"""Creation, time limits, checks and saved states of a worker's environments."""

from functools import partial

import gymnasium as gym
import pytest

from flowrl.envs.env_factory import EnvFactory
from flowrl.envs.registry import env_creator_for, env_id_of
from flowrl.settings import ConfigError


def test_only_creators_from_an_env_id_have_one():
    def by_name(name, context):
        return gym.make("CartPole-v1")

    assert env_id_of(env_creator_for("CartPole-v1")) == "CartPole-v1"
    assert env_id_of(partial(by_name, "my-layout")) is None


def test_num_envs_must_be_that_of_a_vector_environment():
    def two(context):
        return gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")

    assert [EnvFactory(two, {}, n).make_vector_env().num_envs for n in (1, 2)] == [2, 2]
    with pytest.raises(ConfigError, match=r"num_envs_per_worker=5.* of 2 environments"):
        EnvFactory(two, {}, 5).make_vector_env()
