"""`flowrl train`: plans, algorithms by name; seeds and repetition."""

import json
import re
import shlex
import shutil

import pytest

from flowrl.algorithms.ppo import PPOConfig
from flowrl.policies import ConfigError
from flowrl.trainer.registry import algorithm_class, register_algorithm
from tests.cli.helpers import (
    ALGORITHM_FILE,
    ENVIRONMENT_PLAN,
    SMALL_BATCHES,
    TWO_ITERATIONS,
    learning_curve,
    read_results,
    read_settings,
)

SETTINGS = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 2}
YAML = """
first:
  run: PPO
  env: CartPole-v1
  stop: {training_iteration: 3}
  config: {train_batch_size: 64, sgd_minibatch_size: 32, num_sgd_iter: 2, seed: 4}
second:
  plan: a2c
  stop: {timesteps_total: 64}
  config: {seed: 1, train_batch_size: 64}
"""


def test_python_command_line_and_yaml_give_the_same_run(cli, tmp_path):
    """tests/test_tune.py compares Ray Tune with Python."""
    config = PPOConfig().environment(env="CartPole-v1").training(**SETTINGS).debugging(seed=4)
    with config.build() as algorithm:
        expected = learning_curve([algorithm.train() for _ in range(3)])
    settings = json.dumps({**SETTINGS, "seed": 4})
    code, _, err = cli(
        "train", "--run=PPO", "--env=CartPole-v1", f"--config={settings}",
        "--stop", '{"training_iteration": 3}', "--run-dir", "r",
    )  # fmt: skip
    assert code == 0, err
    results = read_results(tmp_path / "r")
    assert learning_curve(results) == expected
    assert [result["timesteps_total"] for result in results] == [64, 128, 192]
    (tmp_path / "run.yaml").write_text(YAML)
    code, _, err = cli("train", "run.yaml", "--run-dir", "y")
    assert code == 0, err
    assert learning_curve(read_results(tmp_path / "y/first")) == expected
    assert read_results(tmp_path / "y/second")[-1]["timesteps_total"] == 64
    code, _, err = cli("resume", "y/first", "--stop-iters", "4")
    assert code == 0, err
    assert len(read_results(tmp_path / "y/first")) == 4


def test_run_without_a_seed_can_be_repeated(cli, tmp_path):
    code, _, _ = cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS)
    assert code == 0
    seed = read_settings(tmp_path / "r")["seed"]
    assert f"--seed {seed}" in (tmp_path / "r/command.txt").read_text()
    cli("train", "ppo", "--run-dir", "s", "--seed", str(seed), *TWO_ITERATIONS)

    def losses(run_dir):
        return [result["learners"] for result in read_results(tmp_path / run_dir)]

    assert losses("r") == losses("s")
    for line in (tmp_path / "r/result.json").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN is not valid JSON


def test_algorithm_run_without_a_seed_can_be_resumed_and_repeated(cli, tmp_path):
    settings = json.dumps(SETTINGS)
    flags = ["--run=PPO", "--env=CartPole-v1", f"--config={settings}", "--lr", "1e-3"]
    code, out, err = cli("train", *flags, "--stop-iters", "2", "--run-dir", "r")
    assert code == 0, err
    assert read_settings(tmp_path / "r")["lr"] == 1e-3
    (repeat,) = [line for line in out.splitlines() if line.startswith("repeat:")]
    command = shlex.split(repeat)[2:]
    assert "--run-dir" not in command  # the folder contains a run now
    assert cli(*command, "--run-dir", "repeated")[0] == 0
    curves = [learning_curve(read_results(tmp_path / name)) for name in ("r", "repeated")]
    assert curves[0] == curves[1]
    assert cli("resume", "r", "--stop-iters", "3")[0] == 0
    assert cli("evaluate", "r", "--episodes", "1")[0] == 0
    (tmp_path / "other.py").write_text(
        ALGORITHM_FILE.replace("A2CConfig", "PPOConfig")
        .replace("batch_size=32", "batch_size=256")
        .replace("algorithms.a2c", "algorithms.ppo")
        .replace("A2CTorchPolicy", "PPOTorchPolicy")
    )
    code, _, err = cli("resume", "r", "--plan", "other.py", "--stop-iters", "4")
    assert code == 2
    assert "r is of PPO, but the plan other.py is of Mine" in err
    assert "Traceback" not in err


def test_options_may_have_underscores(cli):
    code, _, err = cli("train", "a2c", "--stop_iters", "1", "--run_dir=r", "--num_workers", "0")
    assert (code, err) == (0, "")
    code, out, _ = cli("resume", "r", "--stop_iters=2")
    assert code == 0
    assert "reached: 2 iterations" in out


def test_run_that_a_time_limit_ended_resumes_without_a_limit(cli):
    for flags, hint in ((["--stop-time-s", "0.01"], "resume r"), (["--stop-iters", "1"], "r --st")):
        out = cli("train", "a2c", "--run-dir", "r", *SMALL_BATCHES, *flags)[1]
        (line,) = [line for line in out.splitlines() if line.startswith("resume:")]
        assert hint in line
        assert ("--stop-timesteps" in line) == (flags[0] == "--stop-iters")
        shutil.rmtree("r")


def test_tuned_settings_apply_to_their_environment_alone(cli, tmp_path):
    flags = [*SMALL_BATCHES, "--stop-timesteps", "64"]
    out = cli("train", "ppo", "--run-dir", "r", *flags)[1]
    expected = "settings tuned for CartPole-v1: ppo/CartPole-v1.yaml (--no-tuned: without them)"
    assert out.splitlines()[0] == expected
    others = {"s": ["--env", "FrozenLake-v1"], "t": ["--no-tuned"]}
    for run_dir, options in others.items():
        code, out, _ = cli("train", "ppo", "--run-dir", run_dir, *options, *flags)
        assert code == 0
        assert "tuned" not in out.splitlines()[0]
    tuned = read_settings(tmp_path / "r")
    assert (tuned["gamma"], tuned["lr"]) == (0.98, [["0%", 3e-3], ["25%", 1e-3], ["100%", 0.0]])
    for run_dir in ("t", "s"):
        general = read_settings(tmp_path / run_dir)
        assert (general["gamma"], general["lr"]) == (0.99, [["0%", 3e-4], ["100%", 0.0]])
        assert tuned["total_timesteps"] == general["total_timesteps"] == 64
    (tmp_path / "x.yaml").write_text(
        "{plan: ppo, env: FrozenLake-v1, stop: {timesteps_total: 64}, "
        "config: {train_batch_size: 64, sgd_minibatch_size: 32}}"
    )
    assert cli("train", "x.yaml", "--run-dir", "y")[0] == 0
    ignored = {"seed": None}
    assert {**read_settings(tmp_path / "y"), **ignored} == {**general, **ignored}


@pytest.mark.parametrize(
    ("flags", "stop", "batch_size"),
    [
        ([], "a mean return of 475, or 100,000 env steps", 512),
        (["--env", "FrozenLake-v1"], "a mean return of 0.7, or 500,000 env steps", 4000),
        (["--env", "CliffWalking-v1", "--total-timesteps", "9"], "Default: 9 env steps", 4000),
        (["--config", '{"env": "FrozenLake-v1", "total_timesteps": 9}'], "or 9 env steps", 4000),
    ],
)
def test_help_shows_the_defaults_that_apply(cli, flags, stop, batch_size):
    code, out, _ = cli("train", "ppo", *flags, "--help")
    text = " ".join(out.replace("│", "").split())
    assert code == 0
    assert stop in text
    name = "CartPole-v1" if not flags else re.search(r"\w+-v1", " ".join(flags))[0]
    assert f"The defaults are for {name}; with --env, the help shows those for another" in text
    assert f"Env steps per train batch, at least. (default: {batch_size})" in text


def test_warning_about_a_learning_rate_that_reaches_0_is_printed(cli, caplog):
    flags = [*SMALL_BATCHES, "--stop-timesteps", "128", "--lr", "0", "1e-3", "100", "0"]
    assert cli("train", "ppo", "--run-dir", "r", *flags)[0] == 0
    warnings = [text for text in caplog.messages if "nothing is learned" in text]
    assert len(warnings) == 1
    assert "lr is 0 from env step 100 of 128 on" in warnings[0]


def test_registered_algorithms_are_found_by_name():
    from flowrl.algorithms.a2c import A2C

    class Other(A2C):
        pass

    register_algorithm("Other", Other)
    register_algorithm("Other", Other)
    assert algorithm_class("other") is Other
    with pytest.raises(ConfigError, match="'Other' is already registered"):
        register_algorithm("Other", A2C)
    with pytest.raises(ConfigError, match=r"'ppo' is .* flowrl\.algorithms\.ppo:PPO"):
        register_algorithm("ppo", Other)
    register_algorithm("a2c", A2C)
    assert algorithm_class("A2C") is A2C
    with pytest.raises(ConfigError, match="Did you mean 'SimpleQ'"):
        algorithm_class("SimpelQ")


@pytest.mark.parametrize("plan", ["impala", "apex", "dqn_distributed"])
def test_asynchronous_plan_runs_in_process(plan, cli, tmp_path, monkeypatch):
    def start_ray(address):
        raise AssertionError("Ray was started")

    monkeypatch.setattr("flowrl.iter.ray_runtime.start_ray", start_ray)
    monkeypatch.setattr("flowrl.ops.replay_actors.start_ray", start_ray)
    flags = ["--in-process", "--run-dir", "r", "--stop-iters", "2", "--num-workers", "3"]
    small = [] if plan == "impala" else ["--learning-starts", "100"]
    code, out, err = cli("train", plan, *flags, *small)
    assert (code, err) == (0, "")
    assert "starting" not in out
    settings = read_settings(tmp_path / "r")
    assert settings["num_workers"] == settings.get("num_replay_shards", 0) == 0
    assert read_results(tmp_path / "r")[-1]["info"]["learner"]


def test_tuned_settings_of_a_plan_are_listed_in_any_case(cli):
    code, out, _ = cli("tuned", "PPO")
    assert code == 0
    assert "LunarLander-v3" in out
    assert "dqn" not in out.splitlines()[1]


def test_no_tuned_is_rejected_where_no_settings_are_tuned(cli):
    code, _, err = cli("train", "--run=PPO", "--env", "CartPole-v1", "--no-tuned")
    assert code == 2
    assert "--run uses no tuned settings" in err


def test_callback_saves_a_checkpoint_into_the_run_directory(cli, tmp_path):
    (tmp_path / "saving_plan.py").write_text(
        ENVIRONMENT_PLAN.replace(
            "config = A2CConfig(",
            """from flowrl.sampling import DefaultCallbacks


class Saves(DefaultCallbacks):
    def on_train_result(self, *, algorithm, result, **kwargs):
        print("saved", algorithm.save())


config = A2CConfig(callbacks_class=Saves, """,
        )
    )
    code, out, _ = cli("train", "saving_plan.py", "--stop-iters", "2", "--run-dir", "r")
    assert code == 0
    for number in ("000001", "000002"):
        assert f"saved {tmp_path / 'r/checkpoints' / number}" in out


def test_error_of_a_policy_names_it(cli, tmp_path):
    (tmp_path / "two_policies.py").write_text(
        ENVIRONMENT_PLAN.replace(
            "config = A2CConfig(",
            """from flowrl import SACConfig
from flowrl.algorithms.td3 import TD3Config, TD3TorchPolicy
from flowrl.policies import PolicySpec

policies = {"first": PolicySpec(TD3TorchPolicy, config=TD3Config()), "second": PolicySpec()}
config = A2CConfig(policies=policies, policy_mapping_fn=lambda agent_id: "first", """,
        )
    )
    code, _, err = cli("train", "two_policies.py", "--stop-iters", "1", "--run-dir", "r")
    assert code == 2
    assert "TD3 is for Box actions" in err
    assert "policy 'first'" in err
