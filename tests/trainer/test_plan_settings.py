"""Settings of plan files: for any environment, and tuned for single environments."""

import pytest

from flowrl.policies.schedules import schedules_in, zero_from
from flowrl.settings import ConfigError
from flowrl.trainer.plan_files import load_plan, shipped_plans
from flowrl.trainer.plan_settings import plan_config

PLAN = """
from flowrl.algorithms.a2c import A2CConfig
config = A2CConfig(env="CartPole-v1", lr=1e-4, model={"fcnet_hiddens": [8, 8]})
TUNED
def execution_plan(workers, config):
    pass
"""


def write_plan(tmp_path, tuned=""):
    file = tmp_path / "plan.py"
    file.write_text(PLAN.replace("TUNED", tuned))
    return str(file)


def test_tuned_settings_apply_to_their_environment_alone(tmp_path):
    tuned = "tuned = {'CartPole-v1': {'lr': 1e-2, 'model': {'fcnet_activation': 'relu'}}}"
    plan = write_plan(tmp_path, tuned)
    for config in (plan_config(plan), plan_config(plan, "CartPole-v1")):
        assert (config.env, config.lr) == ("CartPole-v1", 1e-2)
        assert config.model.fcnet_hiddens == [8, 8]
        assert config.model.fcnet_activation == "relu"
    for env in ("Acrobot-v1", lambda context: None):
        config = plan_config(plan, env)
        assert (config.env, config.lr) == (env, 1e-4)
        assert config.model.fcnet_activation == "tanh"


def test_plan_without_tuned_settings_keeps_its_config(tmp_path):
    config = plan_config(write_plan(tmp_path), "Acrobot-v1")
    assert (config.env, config.lr) == ("Acrobot-v1", 1e-4)


@pytest.mark.parametrize(
    ("tuned", "message"),
    [
        ("tuned = {'CartPole-v1': 3}", "must map environment ids to settings"),
        ("tuned = {'CartPole-v1': {'lrr': 1}}", "for 'CartPole-v1': unknown setting 'lrr'"),
    ],
)
def test_invalid_tuned_settings_are_rejected(tmp_path, tuned, message):
    with pytest.raises(ConfigError, match=message):
        plan_config(write_plan(tmp_path, tuned))


@pytest.mark.parametrize("name", list(shipped_plans()))
def test_shipped_settings_learn_until_the_end_of_any_training(name):
    module = load_plan(name)
    assert set(getattr(module, "tuned", {})) <= {module.config.env}
    for env in (None, "Acrobot-v1"):
        for total in (20_000, 3_000_000):
            config = plan_config(name, env).updated(total_timesteps=total)
            for policy_id in config.policies or ["default_policy"]:
                for setting, schedule in schedules_in(config.for_policy(policy_id)):
                    assert zero_from(schedule, total) in (None, total), setting
