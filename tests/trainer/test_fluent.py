"""FluentSettings: help, signatures and completion of configs."""

import inspect
import pydoc

import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from flowrl import PPO, A2CConfig, AlgorithmConfig, DQNConfig, PPOConfig
from flowrl.policies.config import ModelConfig

CONFIGS = [AlgorithmConfig, A2CConfig, PPOConfig, DQNConfig]


def test_help_of_a_config_describes_every_setting():
    text = PPOConfig.__doc__
    assert text.startswith("Settings of PPO.\n")
    for info in PPOConfig.describe():
        if info.name not in ("model", "exploration_config", "atari"):
            assert f"    {info.name}: {info.type} = {info.default!r}" in text
    for name in ModelConfig.model_fields:
        assert f"    model.{name}: " in text
    assert "clip_param" not in DQNConfig.__doc__


@pytest.mark.parametrize("config", CONFIGS)
def test_help_of_a_config_begins_with_its_summary(config):
    assert str(inspect.signature(config)) == "(**settings: Any)"
    lines = [line.strip(" |") for line in pydoc.plain(pydoc.render_doc(config)).splitlines()]
    assert lines[3] == f"{config.__name__}(**settings: Any)"
    assert lines[5] == config.__doc__.splitlines()[0]
    assert inspect.signature(config.training).parameters["lr"].default == config().lr


def test_dir_of_a_config_lists_settings_and_methods_only():
    config = PPOConfig()
    names = {name for name in dir(config) if not name.startswith("_")}
    assert names >= {*config.keys(), *config.groups(), "build", "copy", "validate", "to_dict"}
    assert not [n for n in names if n.startswith("model_") or n in ("json", "parse_obj", "dict")]


def test_repr_of_a_config_shows_what_differs_from_the_defaults():
    assert repr(PPOConfig()) == str(PPOConfig(lr=3e-4)) == "PPOConfig()"
    config = DQNConfig(env="CartPole-v1", model={"fcnet_hiddens": [8]}).training(lr=1e-4)
    name, _, arguments = repr(config)[:-1].partition("(")
    assert name == "DQNConfig"
    expected = ["env='CartPole-v1'", "lr=0.0001", "model=ModelConfig(fcnet_hiddens=[8])"]
    assert sorted(arguments.split(", ")) == expected
    assert eval(repr(config), {"DQNConfig": DQNConfig, "ModelConfig": ModelConfig}) == config
    assert repr(config.frozen()) == repr(config)


def test_repr_of_an_algorithm_shows_its_progress():
    settings = {"train_batch_size": 200, "min_sample_timesteps_per_iteration": 0}
    with PPO("CartPole-v1", seed=1, **settings) as algorithm:
        assert repr(algorithm) == "PPO(env='CartPole-v1', iteration=0, env_steps=0)"
        algorithm.train()
        assert str(algorithm) == "PPO(env='CartPole-v1', iteration=1, env_steps=200)"
    with PPO(CartPoleEnv, **settings) as algorithm:
        assert repr(algorithm) == "PPO(env=CartPoleEnv, iteration=0, env_steps=0)"
