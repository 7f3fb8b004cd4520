"""FluentSettings: help, signatures and completion of configs."""

import inspect
import pydoc

import pytest

from flowrl import A2CConfig, AlgorithmConfig, DQNConfig, PPOConfig
from flowrl.policies.config import ModelConfig

CONFIGS = [AlgorithmConfig, A2CConfig, PPOConfig, DQNConfig]


def test_help_of_a_config_describes_every_setting():
    text = PPOConfig.__doc__
    assert text.startswith("Settings of PPO.\n")
    for info in PPOConfig.describe():
        if info.name not in ("model", "exploration_config"):
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
