"""Creation, time limits, checks and saved states of a worker's environments."""

from functools import partial

import gymnasium as gym

from flowrl.envs.registry import env_creator_for, env_id_of


def test_only_creators_from_an_env_id_have_one():
    def by_name(name, context):
        return gym.make("CartPole-v1")

    assert env_id_of(env_creator_for("CartPole-v1")) == "CartPole-v1"
    assert env_id_of(partial(by_name, "my-layout")) is None
