"""Environments of other packages by their ids: MinAtar, MiniGrid, and what to install for them."""

import sys

import numpy as np
import pytest
from gymnasium import spaces

from flowrl import PPO
from flowrl.envs.registry import EnvContext, env_creator_for
from flowrl.errors import ConfigError
from tests.extras import require_extra

SMALL = {
    "num_envs_per_worker": 2, "train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 1,
    "seed": 0, "model": {"conv_filters": [[4, 3, 1]], "post_fcnet_hiddens": [8]},
}  # fmt: skip


def make(env_id, **config):
    return env_creator_for(env_id)(EnvContext(config))


@pytest.mark.parametrize(("game", "actions"), [("Breakout-v0", 6), ("Breakout-v1", 3)])
def test_minatar_games_show_grids_of_objects(game, actions):
    require_extra("minatar")
    env = make(f"MinAtar/{game}")
    observation, _ = env.reset(seed=0)
    assert observation.shape == env.observation_space.shape == (10, 10, 4)
    assert env.action_space == spaces.Discrete(actions)  # v1 has those that the game uses


def test_arguments_of_minatar_are_the_env_config():
    require_extra("minatar")
    sticky, free = (make("MinAtar/Breakout-v1", sticky_action_prob=p) for p in (1.0, 0.0))
    frames = []
    for env in (sticky, free):
        env.reset(seed=0)
        frames.append(np.array([env.step(action)[0] for action in (1, 1, 2, 2)]))
    assert not np.array_equal(*frames)  # with probability 1 the first action is repeated


@pytest.mark.parametrize("env", ["MinAtar/Asterix-v1", "MiniGrid-Empty-5x5-v0"])
def test_ppo_trains_on_grids(env):
    require_extra(env[:7].lower() if env.startswith("MinAtar") else "minigrid")
    with PPO(env, **SMALL) as algorithm:
        assert algorithm.train()["timesteps_total"] == 64


@pytest.mark.parametrize(
    "env_id",
    ["MiniGrid-Empty-5x5-v0", "BabyAI-GoToRedBallGrey-v0", "minigrid:MiniGrid-Empty-5x5-v0"],
)
def test_minigrid_leaves_out_the_text_of_the_mission(env_id):
    require_extra("minigrid")
    env = make(env_id)
    assert sorted(env.observation_space.spaces) == ["direction", "image"]
    assert sorted(env.reset(seed=0)[0]) == ["direction", "image"]


@pytest.mark.parametrize(
    ("env_id", "module", "extra"),
    [
        ("MinAtar/Pong-v1", "minatar", "minatar"),
        ("MiniGrid-Other-v0", "minigrid", "minigrid"),
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("ALE/Pong-v5", "cv2", "atari"),
        ("mpe2.simple_spread_v3:parallel_env", "mpe2", "marl"),
        ("pettingzoo.classic.chess_v6:env", "pettingzoo", "marl"),
    ],
)
def test_missing_package_is_named_by_its_extra(env_id, module, extra, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs the extra {extra}: pip install"):
        env_creator_for(env_id)(EnvContext())


def test_old_versions_of_mujoco_environments_name_the_present_one():
    with pytest.raises(ConfigError, match="use version 5, such as Hopper-v5"):
        PPO("Hopper-v2").train()
