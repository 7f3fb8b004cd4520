"""Settings of plans: for any environment, and tuned for single environments."""

from pathlib import Path

import pytest

from flowrl.cli.main import main
from flowrl.errors import ConfigError
from flowrl.policies.schedules import schedules_in, zero_from
from flowrl.trainer.plan_files import load_plan, shipped_plans
from flowrl.trainer.plan_settings import plan_config
from flowrl.trainer.tuned_examples import tuned_example, tuned_examples, tuned_folder
from tests.extras import require_extra

EXAMPLES = list(tuned_examples())
PLAN = """
from flowrl.algorithms.a2c import A2CConfig
config = A2CConfig(env="CartPole-v1", lr=1e-4, model={"fcnet_hiddens": [8, 8]})
def execution_plan(workers, config):
    pass
"""


@pytest.fixture
def examples_folder(tmp_path, monkeypatch):
    """A folder of tuned examples with one for a2c."""
    folder = tmp_path / "examples"
    (folder / "a2c").mkdir(parents=True)
    (folder / "a2c" / "CartPole-v1.yaml").write_text(
        "{plan: a2c, env: CartPole-v1, stop: {timesteps_total: 3000}, "
        "config: {lr: 0.5, model: {fcnet_activation: relu}}}"
    )
    monkeypatch.setattr("flowrl.trainer.tuned_examples.tuned_folder", lambda: folder)
    return folder


def test_tuned_settings_apply_to_their_plan_and_environment_alone(examples_folder):
    for config in (plan_config("a2c"), plan_config("a2c", "CartPole-v1")):
        assert (config.env, config.lr, config.total_timesteps) == ("CartPole-v1", 0.5, 3000)
        assert config.model.fcnet_hiddens == plan_config("a2c", tuned=False).model.fcnet_hiddens
        assert config.model.fcnet_activation == "relu"
    for plan, env in [("a2c", "Acrobot-v1"), ("a2c", lambda context: None), ("ppo", "CartPole-v1")]:
        config = plan_config(plan, env)
        assert config.env == env
        assert config.lr != 0.5


def test_plan_file_has_no_tuned_settings(examples_folder, tmp_path):
    file = tmp_path / "a2c.py"
    file.write_text(PLAN)
    assert plan_config(str(file)).lr == 1e-4
    assert plan_config(str(file), "Acrobot-v1").env == "Acrobot-v1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{plan: a2c, env: CartPole-v1, config: {lrr: 1}}", "unknown setting 'lrr'"),
        ("[1]", "contains no runs"),
    ],
)
def test_damaged_examples_are_rejected(text, message, examples_folder):
    (examples_folder / "a2c" / "CartPole-v1.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        plan_config("a2c")


@pytest.mark.parametrize("name", list(shipped_plans()))
def test_shipped_settings_learn_until_the_end_of_any_training(name):
    for env in (None, "Acrobot-v1"):
        for total in (20_000, 3_000_000):
            config = plan_config(name, env).updated(total_timesteps=total)
            for policy_id in config.policies or ["default_policy"]:
                for setting, schedule in schedules_in(config.for_policy(policy_id)):
                    assert zero_from(schedule, total) in (None, total), setting


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_shipped_examples_are_valid(example):
    assert example.path.parent == tuned_folder() / example.plan
    assert example.plan in shipped_plans()
    assert tuned_example(example.plan, example.env) == example  # one per environment
    general = plan_config(example.plan, example.env, tuned=False)
    tuned = general.updated(**example.settings)
    assert tuned.diff(general)
    assert example.env.replace("/", "-") == example.path.stem or example.name
    assert load_plan(example.plan).config.algorithm == tuned.algorithm


def test_list_of_examples(capsys):
    assert main(["tuned"]) == 0
    listed = capsys.readouterr().out
    assert all(str(example) in listed for example in EXAMPLES)
    assert main(["tuned", "a2c"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["a2c", "CartPole-v1", "500,000", "a2c/CartPole-v1.yaml"]
    assert Path(lines[-1].removeprefix("in ")).is_dir()
    assert len(lines) == 3
    assert main(["tuned", "Acrobot-v1"]) == 0
    plans = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert plans == ["dqn", "ppo"]
    assert main(["tuned", "ALE/Qbert-v5"]) == 0
    assert "ppo/Atari.yaml" in capsys.readouterr().out
    assert main(["tuned", "Acrobot-v0"]) == 2
    assert "Did you mean 'Acrobot-v1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("ALE/Breakout-v5", "ALE/Breakout-v5"),
        ("ALE/Qbert-v5", "ALE/Breakout-v5"),
        ("MinAtar/Seaquest-v1", "MinAtar/Breakout-v1"),
        ("Blackjack-v1", None),
        ("Other/Game-v0", None),
    ],
)
def test_games_of_a_collection_share_settings(env, expected):
    example = tuned_example("ppo", env)
    assert (example and example.env) == expected
    assert tuned_example("bc", env) is None


@pytest.mark.parametrize("env", ["Breakout-v4", "PongNoFrameskip-v4"])
def test_old_ids_of_games_have_tuned_settings(env):
    require_extra("atari")
    assert tuned_example("ppo", env).env == "ALE/Breakout-v5"
    assert plan_config("ppo", env).train_batch_size == 1024


def test_unknown_plan_has_no_examples(capsys):
    assert main(["tuned", "pppo"]) == 2
    assert "Did you mean 'ppo'" in capsys.readouterr().err
