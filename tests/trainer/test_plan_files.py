"""Plans from Python: imported plan files, paths and functions; none is replaced by another."""

import importlib
import sys

import gymnasium as gym
import pytest

from flowrl.algorithms import Algorithm
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.algorithms.ppo import PPO
from flowrl.data.checkpoint import CheckpointError
from flowrl.errors import ConfigError
from flowrl.ops import ConcatBatches, ParallelRollouts, StandardMetricsReporting, TrainOneStep
from flowrl.trainer.plan_files import load_plan, plan_path

PLAN = """
from flowrl.algorithms.a2c import A2CConfig
from flowrl.ops import ParallelRollouts, StandardMetricsReporting, TrainOneStep

config = A2CConfig(env="CartPole-v1", train_batch_size=32, rollout_fragment_length=32)
built = []


def execution_plan(workers, config):
    built.append(config.lr)
    train_op = ParallelRollouts(workers).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train_op, workers, config)
"""


@pytest.fixture
def my_plan(tmp_path, monkeypatch):
    """An imported plan file."""
    (tmp_path / "my_plan.py").write_text(PLAN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_plan", raising=False)
    return importlib.import_module("my_plan")


def plan_function(workers, config):
    return StandardMetricsReporting(
        ParallelRollouts(workers).for_each(TrainOneStep(workers)), workers, config
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda plan: plan.config.build(),
        lambda plan: plan.config.copy().training(lr=1e-3).build(),
        lambda plan: A2C(plan.config),
        lambda plan: A2C(plan.config, lr=1e-3),
    ],
)
def test_config_of_a_plan_file_is_not_used_with_another_plan(my_plan, build):
    with pytest.raises(ConfigError, match=r"build\(plan=my_plan\).*from_plan"):
        build(my_plan)
    with my_plan.config.build(plan="a2c") as algorithm:  # chosen explicitly
        assert algorithm.config.plan == "a2c"


@pytest.mark.parametrize(
    "build",
    [
        Algorithm.from_plan,
        lambda plan: A2C.from_plan("my_plan.py"),
        lambda plan: plan.config.build(plan=plan),
        lambda plan: plan.config.build(plan=plan.execution_plan),
        lambda plan: A2CConfig(**plan.config.explicit_settings(), plan=plan).build(),
        lambda plan: A2C(plan.config, plan=plan),
    ],
)
def test_plan_of_an_imported_file_is_built(my_plan, build):
    with build(my_plan) as algorithm:
        assert type(algorithm) is A2C
        assert algorithm.train()["timesteps_total"] == 32
        assert "TrainOneStep" in algorithm.plan.explain()
        used = sys.modules[algorithm._plan_builder._execution_plan.__module__]
        assert used.built == [algorithm.config.lr]


def test_settings_of_from_plan_replace_those_of_the_file(my_plan):
    with A2C.from_plan(my_plan, lr=0.5) as algorithm:
        assert algorithm.config.lr == 0.5
    with A2C.from_plan(my_plan, {"lr": 0.5, "gamma": 0.5}, gamma=0.9) as algorithm:
        assert (algorithm.config.lr, algorithm.config.gamma) == (0.5, 0.9)
    config = A2CConfig(env="CartPole-v1", train_batch_size=16, rollout_fragment_length=16)
    with A2C.from_plan(my_plan, config) as algorithm:
        assert algorithm.train()["timesteps_total"] == 16
    with Algorithm.from_plan("a2c", train_batch_size=16) as algorithm:
        assert algorithm.config.env == "CartPole-v1"


def test_function_is_a_plan(tmp_path):
    config = A2CConfig(env="CartPole-v1", rollout_fragment_length=8)
    with config.build(plan=plan_function) as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"as its plan the function .*:plan_function, .*trust=True"
    ):
        A2C.from_checkpoint(tmp_path / "c")
    for arguments in ({"trust": True}, {"config": {"plan": plan_function}}):
        with A2C.from_checkpoint(tmp_path / "c", **arguments) as algorithm:
            assert algorithm.train()["timesteps_total"] == 16


def test_invalid_plans_are_rejected(my_plan):
    with pytest.raises(ConfigError, match="pass a config with the function plan_function"):
        Algorithm.from_plan(plan_function)
    with pytest.raises(ConfigError, match="belongs to A2C, not to PPO"):
        PPO.from_plan(my_plan)
    with pytest.raises(ConfigError, match="defines neither a function execution_plan"):
        Algorithm.from_plan(gym)
    with pytest.raises(ConfigError, match="has no file"):
        Algorithm.from_plan(sys)
    with pytest.raises(ConfigError, match="unknown plan"):
        Algorithm.from_plan("ppp")
    with pytest.raises(ConfigError, match=r"Did you mean the file '.*/my_plan\.py'"):
        Algorithm.from_plan(my_plan.__file__.removesuffix(".py"))
    with pytest.raises(ConfigError, match="plan: must be a name"):
        A2CConfig(plan=3)
    with pytest.raises(ConfigError, match="no file"):
        A2CConfig(env="CartPole-v1").build(plan="none.py")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("import gymnasium as gym\n\ngym.make('NoSuchEnv-v0')\n", 3, "NameNotFound"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError"),
        ("\nx = (\n", 2, "SyntaxError"),
        ("\n\nfrom flowrl import PPOConfig\nPPOConfig(lrr=1)\n", 4, "unknown setting 'lrr'"),
    ],
)
def test_error_in_a_plan_file_names_the_line_of_the_file(tmp_path, text, line, message):
    file = tmp_path / "wrong.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"wrong\.py, line {line}: {message}"):
        load_plan(str(file))


def test_error_in_a_helper_of_a_plan_file_names_both_lines(tmp_path):
    (tmp_path / "helper_of_wrong.py").write_text("def f():\n    return 1 / 0\n")
    (tmp_path / "wrong.py").write_text("import helper_of_wrong\nhelper_of_wrong.f()\n")
    message = r"wrong\.py, line 2 \(.*helper_of_wrong\.py, line 2\): ZeroDivisionError"
    with pytest.raises(ConfigError, match=message):
        load_plan(str(tmp_path / "wrong.py"))


def test_plan_file_with_a_null_byte_is_named_without_a_line(tmp_path):
    (tmp_path / "wrong.py").write_bytes(b"x = 1\x00\n")
    with pytest.raises(ConfigError, match=r"wrong\.py: SyntaxError"):
        load_plan(str(tmp_path / "wrong.py"))


def test_imported_shipped_plan_is_that_plan():
    plan = load_plan("a2c")
    with Algorithm.from_plan(plan) as algorithm:
        assert algorithm.config.plan == "a2c"
    with plan.config.build():
        pass


def test_name_of_a_shipped_plan_is_not_a_path():
    with pytest.raises(ConfigError, match="unknown plan"):
        plan_path("../plans/a2c")


@pytest.mark.parametrize(
    "env_in_plan", ["lambda: gym.make('CartPole-v1')", "partial(make, 3)", "Env"]
)
def test_checkpoint_of_a_plan_file_with_code_in_its_config_needs_no_code_again(
    tmp_path, monkeypatch, caplog, env_in_plan
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coded.py").write_text(
        f"""
from functools import partial
import gymnasium as gym
from flowrl.algorithms.a2c import A2CConfig
from flowrl.ops import ConcatBatches, ParallelRollouts, StandardMetricsReporting, TrainOneStep


def make(number, context):
    return gym.make("CartPole-v1")


class Env(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))


config = A2CConfig(env={env_in_plan}, train_batch_size=32)


def execution_plan(workers, config):
    rollouts = ParallelRollouts(workers).combine(ConcatBatches(config.train_batch_size))
    return StandardMetricsReporting(rollouts.for_each(TrainOneStep(workers)), workers, config)
"""
    )
    with Algorithm.from_plan("coded.py", seed=1) as algorithm:
        algorithm.save("saved")
    assert "does not contain" not in caplog.text
    with Algorithm.from_plan("coded.py", env=lambda: gym.make("CartPole-v1")) as algorithm:
        algorithm.save("other")
    assert "does not contain the settings ['env']" in caplog.text
    with Algorithm.from_checkpoint("saved", trust=True) as algorithm:
        assert algorithm.train()["timesteps_total"] == 32


OWN_LOSS = """
import torch
from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
from flowrl.ops import ParallelRollouts, StandardMetricsReporting, TrainOneStep


class MyPolicy(A2CTorchPolicy):
    def loss(self, batch):
        self.stats["mine"] = 1.0
        return super().loss(batch)


class MyAlgorithm(A2C):
    policy_class = MyPolicy


config = A2CConfig(env="CartPole-v1", train_batch_size=32)
"""

FUNCTION = """

def execution_plan(workers, config):
    train_op = ParallelRollouts(workers).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train_op, workers, config)
"""


@pytest.mark.parametrize("text", [OWN_LOSS, OWN_LOSS + FUNCTION], ids=["shipped plan", "own plan"])
def test_algorithm_of_a_plan_file_trains_with_its_own_loss(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    with Algorithm.from_plan(tmp_path / "mine.py") as algorithm:
        assert type(algorithm).__name__ == "MyAlgorithm"
        result = algorithm.train()
        assert result["learners"]["default_policy"]["mine"] == 1.0
        algorithm.save(tmp_path / "c")
    with Algorithm.from_checkpoint(tmp_path / "c", trust=True) as resumed:
        assert resumed.train()["learners"]["default_policy"]["mine"] == 1.0


@pytest.mark.parametrize("function", ["", FUNCTION], ids=["shipped plan", "own plan"])
def test_class_of_an_imported_plan_file_continues_its_run(tmp_path, monkeypatch, function):
    (tmp_path / "own_loss.py").write_text(OWN_LOSS + function)
    with Algorithm.from_plan(tmp_path / "own_loss.py") as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_loss", raising=False)
    module = importlib.import_module("own_loss")
    with module.MyAlgorithm.from_checkpoint(tmp_path / "c") as resumed:
        assert resumed.train()["timesteps_total"] == 64
    with Algorithm.from_plan(module) as algorithm:
        assert algorithm.train()["learners"]["default_policy"]["mine"] == 1.0


def test_checkpoint_of_a_plan_file_with_another_name_is_loaded(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    with Algorithm.from_plan(tmp_path / "mine.py") as algorithm:
        algorithm.save(tmp_path / "c")
    (tmp_path / "mine.py").rename(tmp_path / "renamed.py")
    changes = {"plan": str(tmp_path / "renamed.py")}
    with Algorithm.from_checkpoint(tmp_path / "c", config=changes) as resumed:
        assert resumed.train()["learners"]["default_policy"]["mine"] == 1.0


def test_file_of_another_algorithm_is_no_plan(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    with Algorithm.from_plan("a2c") as algorithm:
        algorithm.save(tmp_path / "c")
    changes = {"plan": str(tmp_path / "mine.py")}
    with pytest.raises(ConfigError, match="algorithm MyAlgorithm, but this algorithm is A2C"):
        Algorithm.from_checkpoint(tmp_path / "c", config=changes)


@pytest.mark.parametrize("name", ["execution_plan", "training_step"])
def test_file_with_two_plans_is_rejected(tmp_path, name):
    method = "    @staticmethod\n    def execution_plan(workers, config):\n        return None\n"
    if name == "training_step":
        method = "    def training_step(self):\n        return {}\n"
    text = OWN_LOSS.replace("policy_class = MyPolicy\n", f"policy_class = MyPolicy\n{method}\n")
    (tmp_path / "two.py").write_text(text + FUNCTION)
    message = rf"defines two plans, the function execution_plan and MyAlgorithm\.{name}"
    with pytest.raises(ConfigError, match=message):
        load_plan(str(tmp_path / "two.py"))


def test_method_may_be_the_function_of_the_file(tmp_path):
    text = OWN_LOSS + FUNCTION + "\n\nMyAlgorithm.execution_plan = staticmethod(execution_plan)\n"
    (tmp_path / "same.py").write_text(text)
    with Algorithm.from_plan(tmp_path / "same.py") as algorithm:
        assert algorithm.train()["learners"]["default_policy"]["mine"] == 1.0


def test_run_of_a_relative_plan_file_continues_in_another_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Algorithm.from_plan("mine.py") as algorithm:
        assert algorithm.config.plan == str(tmp_path / "mine.py")
        monkeypatch.chdir(tmp_path / "elsewhere")
        algorithm.learn(32, run_dir=tmp_path / "r")
    with Algorithm.from_checkpoint(tmp_path / "r", trust=True) as resumed:
        assert resumed.train()["learners"]["default_policy"]["mine"] == 1.0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda: ConcatBatches(min_batch=9), r"Did you mean '?min_batch_size.* Its arguments are"),
        (lambda: None, r"got NoneType: write `return StandardMetricsReporting\(…\)`"),
    ],
)
def test_mistakes_in_the_function_of_a_plan_are_explained(result, message):
    def plan(workers, config):
        return result()

    with (
        A2CConfig(env="CartPole-v1").build(plan=plan) as algorithm,
        pytest.raises(ConfigError, match=message),
    ):
        algorithm.train()
