"""Plan files: copies of shipped plans, their imports and environments, algorithms, errors."""

import os
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

from flowrl.algorithms import Algorithm
from flowrl.data.checkpoint import CheckpointError
from flowrl.trainer.plan_files import load_plan, modules_of, plans_folder
from tests.cli.helpers import ALGORITHM_FILE, ENVIRONMENT_PLAN, REPOSITORY, read_results


def test_copied_plan_trains(cli):
    assert cli("copy", "a2c", "mine.py")[0] == 0
    assert cli("copy", "a2c", "mine.py")[0] == 2  # the file exists
    code, out, _ = cli("explain", "mine.py")
    assert code == 0
    assert "TrainOneStep" in out
    code, _, _ = cli("train", "mine.py", "--stop-iters", "1", "--run-dir", "r")
    assert code == 0


@pytest.mark.slow
def test_plan_imports_modules_from_its_folder(cli, tmp_path, ray_session):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "local_env.py").write_text(
        "import gymnasium as gym\n\n\ndef make(context):\n    return gym.make('CartPole-v1')\n"
    )
    cli("copy", "a2c", "mine/plan_with_env.py")
    plan = folder / "plan_with_env.py"
    text = plan.read_text().replace('env="CartPole-v1"', "env=make")
    plan.write_text("from local_env import make\n\n" + text)
    for workers in ("0", "1"):
        flags = ["--num-workers", workers, "--stop-iters", "1", "--run-dir", f"r{workers}"]
        code, _, err = cli("train", "mine/plan_with_env.py", *flags)
        assert code == 0, err
    evaluate = ["--evaluation-interval", "1", "--evaluation-num-workers", "1"]
    flags = ["--stop-iters", "1", "--run-dir", "evaluated", *evaluate]
    code, _, err = cli("train", "mine/plan_with_env.py", *flags)
    assert code == 0, err
    # a run whose plan has changed can be evaluated but not resumed
    plan.write_text(plan.read_text() + "\n# changed\n")
    assert cli("evaluate", "r0", "--trust", "--episodes", "2")[0] == 0
    code, _, err = cli("train", "--resume", "r0", "--trust", "--stop-iters", "2")
    assert code == 2
    assert "plan.py" in err


def test_modules_of_two_plans_may_have_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    plans = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / "same_folder").mkdir()
        (tmp_path / name / "same_folder" / "inner.py").write_text(f"NAME = {name!r}\n")
        plan = tmp_path / name / "plan.py"
        plan.write_text(
            "from flowrl.algorithms.a2c import A2CConfig\n"
            "from same_name import NAME\n"
            "from same_folder import inner\n\n"
            "config = A2CConfig(env='CartPole-v1')\n\n\n"
            "def execution_plan(workers, config):\n    return NAME\n"
        )
        plans.append(str(plan))
    for plan, expected in [*zip(plans, ("one", "two"), strict=True), (plans[0], "one")]:
        module = load_plan(plan)
        assert (expected, expected) == (module.NAME, module.inner.NAME)


def test_only_modules_of_the_user_are_pickled_by_value(tmp_path, monkeypatch):
    (tmp_path / "plan.py").write_text("")
    plan = ModuleType("flowrl_plan_plan")
    plan.__file__ = str(tmp_path / "plan.py")
    files = {
        "own_helper": "own_helper.py",
        "installed": "lib/python3.11/dist-packages/installed.py",
        "environment": "env/lib/python3.11/site-packages/environment.py",
    }
    for name, file in files.items():
        module = ModuleType(name)
        module.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "blocked", None)
    assert [module.__name__ for module in modules_of(plan)] == ["flowrl_plan_plan", "own_helper"]
    plan.__file__ = "/plan.py"
    names = {module.__name__ for module in modules_of(plan)}
    assert not {"functools", "json", "collections", "flowrl", "numpy"} & names


def test_plan_defines_its_environment(cli, tmp_path, monkeypatch):
    (tmp_path / "short_env.py").write_text(ENVIRONMENT_PLAN)
    assert cli("train", "short_env.py", "--stop-iters", "2", "--run-dir", "r")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, _ = cli("evaluate", "../r", "--trust", "--episodes", "4")
    assert code == 0
    assert "mean return 5.0" in out
    assert cli("train", "--resume", "../r", "--trust", "--stop-iters", "3")[0] == 0


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_file_with_an_algorithm_trains(cli, tmp_path, workers, ray_session):
    (tmp_path / "mine.py").write_text(ALGORITHM_FILE)
    flags = ["--num-workers", workers, "--seed", "1", "--run-dir", "r"]
    code, out, err = cli("train", "mine.py", *flags, "--stop-iters", "2")
    assert code == 0, err
    assert [r["timesteps_total"] for r in read_results(tmp_path / "r")] == [32, 64]
    assert "resume r --trust" in out
    assert cli("resume", "r", "--trust", "--stop-iters", "3")[0] == 0
    assert cli("evaluate", "r", "--trust", "--episodes", "1")[0] == 0
    code, out, _ = cli("explain", "mine.py")
    assert "Mine.training_step" in out
    (tmp_path / "mine.py").write_text(ALGORITHM_FILE + "\n# changed\n")
    code, _, err = cli("resume", "r", "--trust", "--stop-iters", "4")
    assert code == 2
    assert "has changed since it was written" in err
    assert cli("resume", "r", "--plan", "mine.py", "--stop-iters", "4")[0] == 0
    assert len(read_results(tmp_path / "r")) == 4
    assert "# changed" in (tmp_path / "r/plan.py").read_text()
    (tmp_path / "mine.py").rename(tmp_path / "renamed.py")
    assert cli("resume", "r", "--plan", "renamed.py", "--stop-iters", "5")[0] == 0
    code, _, err = cli("evaluate", "r", "--trust", "--episodes", "1")
    assert code == 0, err


@pytest.mark.parametrize("command", ["explain", "check"])
def test_plan_without_an_environment_is_inspected_with_the_option_env(cli, tmp_path, command):
    text = (plans_folder() / "a2c.py").read_text()
    (tmp_path / "plan.py").write_text(text.replace('env="CartPole-v1",', ""))
    code, _, err = cli(command, "plan.py")
    assert code == 2
    assert "no environment is set" in err
    assert cli(command, "plan.py", "--env", "Acrobot-v1")[0] == 0


@pytest.mark.parametrize("command", ["explain", "check"])
def test_environment_of_the_current_folder_is_found(cli, tmp_path, command):
    module = f"env_for_{command}"
    (tmp_path / f"{module}.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Own(CartPoleEnv): pass\n"
    )
    code, _, err = cli(command, "a2c", "--env", f"{module}:Own")
    assert code == 0, err


def test_resuming_a_changed_plan_suggests_the_plan_option(cli, tmp_path):
    text = (plans_folder() / "a2c.py").read_text()
    (tmp_path / "plan.py").write_text(text)
    assert cli("train", "plan.py", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    (tmp_path / "plan.py").write_text(text + "\n# changed\n")
    code, _, err = cli("resume", "r", "--trust", "--stop-iters", "2")
    assert code == 2
    assert "flowrl resume r --plan" in err
    assert "older checkpoint" not in err
    assert cli("resume", "r", "--stop-iters", "2", "--plan", "plan.py")[0] == 0


def test_plan_with_several_policies_is_named_without_a_train_batch_size(cli):
    code, out, err = cli("train", "ppo_dqn", "--stop-timesteps", "64", "--run-dir", "r")
    assert code == 0, err
    assert "training ppo_dqn on " in out
    assert "first train batch" not in out


def test_wrong_setting_in_a_plan_file_is_named_with_its_line(cli, tmp_path):
    text = (plans_folder() / "a2c.py").read_text()
    (tmp_path / "plan.py").write_text(text.replace("A2CConfig(", "A2CConfig(train_batch_sze=9, "))
    code, _, err = cli("explain", "plan.py")
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "A2CConfig(" in row)
    assert code == 2
    assert f"plan.py, line {line}: unknown setting 'train_batch_sze'. Did you mean" in err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "gym.spaces.Box(0, 9, (1,), np.float32)",
            "gym.spaces.Dict()",
            "no model for the space",
        ),
        ("gym.spaces.Discrete(2)", "gym.spaces.Text(2)", "no action distribution"),
        ("env=lambda context: Short()", "env=lambda context: 3", "not a gymnasium Env"),
        ("config = A2CConfig(", "settings = A2CConfig(", "has no `config`"),
        ("def execution_plan", "def plan", "neither a function execution_plan"),
        ("def execution_plan", "def execution_plan(", "line"),
    ],
)
def test_invalid_plans_and_environments_are_rejected(cli, tmp_path, old, new, message):
    (tmp_path / "short_env.py").write_text(ENVIRONMENT_PLAN.replace(old, new))
    code, _, err = cli("train", "short_env.py", "--run-dir", "r")
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    return 3\n", "got int"),
        ("    return ParallelRollouts(workers)\n", "end it with `return StandardMetricsReporting("),
        ("    import sys; sys.exit(3)\n", "SystemExit: 3"),
        (
            "    return StandardMetricsReporting(\n"
            "        ParallelRollouts(workers).for_each(lambda b: exit(0)), workers, config)\n",
            "SystemExit: 0",
        ),
    ],
)
def test_plan_with_an_invalid_result_fails(cli, tmp_path, body, message):
    (tmp_path / "wrong.py").write_text(
        '"""A wrong plan."""\n'
        "from flowrl.algorithms.a2c import A2CConfig\n"
        "from flowrl.ops import ParallelRollouts, StandardMetricsReporting\n"
        'config = A2CConfig(env="CartPole-v1", train_batch_size=64)\n'
        "def execution_plan(workers, config):\n" + body
    )
    code, _, err = cli("train", "wrong.py", "--run-dir", "r", "--stop-iters", "1")
    assert code in (1, 2)
    assert message in err


def test_plan_with_invalid_parameters_is_rejected(cli, tmp_path):
    (tmp_path / "wrong.py").write_text(
        "from flowrl.algorithms.a2c import A2CConfig\n"
        'config = A2CConfig(env="CartPole-v1")\n'
        "def execution_plan(workers):\n    return None\n"
    )
    code, _, err = cli("train", "wrong.py")
    assert code == 2
    assert "must be execution_plan(workers, config): too many positional arguments" in err


def run_python(code, folder):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"},
    )  # fmt: skip


@pytest.mark.slow
def test_checkpoint_of_an_algorithm_file_opens_in_python(cli, tmp_path):
    (tmp_path / "mine_again.py").write_text(ALGORITHM_FILE.replace("Mine", "Again"))
    assert cli("train", "mine_again.py", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    with_trust = textwrap.dedent(
        """
        from flowrl.algorithms import Algorithm
        with Algorithm.from_checkpoint("r", trust=True) as algorithm:
            print(type(algorithm).__name__, algorithm.iteration)
        """
    )
    with_class = textwrap.dedent(
        """
        from mine_again import Again
        with Again.from_checkpoint("r") as algorithm:
            print(type(algorithm).__name__, algorithm.iteration)
        """
    )
    for code in (with_trust, with_class):
        process = run_python(code, tmp_path)
        assert process.stdout == "Again 1\n", process.stderr
    with pytest.raises(CheckpointError, match="trust=True"):
        Algorithm.from_checkpoint("r")
    with pytest.raises(CheckpointError, match="no such folder"):
        Algorithm.from_checkpoint("none")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        Algorithm.from_checkpoint(tmp_path)


@pytest.mark.slow
def test_imported_algorithm_class_needs_no_trust(tmp_path):
    (tmp_path / "algorithm_file.py").write_text(ALGORITHM_FILE)
    code = textwrap.dedent(
        """
        from algorithm_file import Mine, config
        with Mine(config) as algorithm:
            algorithm.train()
            algorithm.save("c")
        with Mine.from_checkpoint("c") as algorithm:
            print(algorithm.iteration)
        """
    )
    process = run_python(code, tmp_path)
    assert process.stdout == "1\n", process.stderr


@pytest.mark.slow
def test_run_of_a_file_with_its_own_config_and_policy_opens_with_its_class(cli, tmp_path):
    (tmp_path / "own.py").write_text(
        textwrap.dedent(
            """
            from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy

            class OwnConfig(A2CConfig):
                extra: float = 0.5

            class OwnPolicy(A2CTorchPolicy):
                config_class = OwnConfig

            class Own(A2C):
                config_class = OwnConfig
                policy_class = OwnPolicy

            config = OwnConfig(env="CartPole-v1", train_batch_size=64, extra=0.25)
            """
        )
    )
    code, _, err = cli("train", "own.py", "--stop-iters", "1", "--run-dir", "r")
    assert code == 0, err
    code = textwrap.dedent(
        """
        from own import Own
        with Own.from_checkpoint("r") as algorithm:
            policy = algorithm.get_policy()
            print(algorithm.iteration, algorithm.config.extra, type(policy).__name__)
        """
    )
    process = run_python(code, tmp_path)
    assert process.stdout == "1 0.25 OwnPolicy\n", process.stderr
    code = "from flowrl.policies import Policy; Policy.from_checkpoint('r', trust=True)"
    process = run_python(code, tmp_path)
    assert (
        "use Algorithm.from_checkpoint(…, trust=True).get_policy('default_policy')"
        in process.stderr
    )


def test_errors_of_a_training_environment_say_where_it_failed(cli, tmp_path):
    (tmp_path / "wrong_env.py").write_text(
        textwrap.dedent(
            """
            from flowrl.envs import register_env
            import gymnasium as gym
            import numpy as np

            class Wrong(gym.Env):
                observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
                action_space = gym.spaces.Discrete(2)

                def reset(self, *, seed=None, options=None):
                    self.steps = 0
                    return np.zeros(2, np.float32), {}

                def step(self, action):
                    self.steps += 1
                    size = 3 if self.steps == 7 else 2
                    return np.zeros(size, np.float32), 1.0, False, False, {}

            register_env("FlowrlWrongLater-v0", lambda context: Wrong())
            """
        )
    )
    code, _, err = cli("train", "a2c", "--env", "wrong_env:FlowrlWrongLater-v0", "--run-dir", "r")
    assert code in (1, 2)
    assert "flowrl: env: an observation does not fit the space" in err
    assert "raised by sub-environment" in err
    assert "while worker 0 was sampling" in err
    assert "Traceback" not in err


POLICY_OF_PLAN = '''"""A policy class in the specification of a policy."""
from flowrl.ops import ParallelRollouts, StandardMetricsReporting, TrainOneStep
from flowrl.policies import PolicySpec, TorchPolicy
from flowrl.trainer.config import AlgorithmConfig


class Mine(TorchPolicy):
    def loss(self, batch):
        outputs, _ = self.model.from_batch(batch)
        logp = self.dist_class(outputs, self.model).logp(batch["actions"])
        return -(logp * batch["rewards"]).mean()


config = AlgorithmConfig(
    env="CartPole-v1",
    train_batch_size=32,
    policies={"default_policy": PolicySpec(policy_class=Mine, config={"lr": 1e-3})},
)


def execution_plan(workers, config):
    train = ParallelRollouts(workers).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train, workers, config)
'''


@pytest.mark.parametrize("flags", [[], ["--policies.default-policy.config.lr", "1e-4"]])
def test_run_with_a_policy_class_of_the_plan_file_continues(cli, tmp_path, flags):
    (tmp_path / "mine.py").write_text(POLICY_OF_PLAN)
    command = ["train", "mine.py", "--stop-iters", "1", "--run-dir", "r", *flags]
    code, out, err = cli(*command)
    assert code == 0, err
    assert "does not contain" not in err
    assert "resume r --trust" in out
    for command in (["resume", "r", "--stop-iters", "2"], ["evaluate", "r", "--episodes", "1"]):
        code, _, err = cli(*command, "--trust")
        assert code == 0, err
