"""`flowrl train FILE.yaml`: repeating its runs, and files with errors."""

import os

import pytest

from flowrl.data.checkpoint import list_checkpoints, read_manifest
from tests.cli.helpers import read_settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "contains no runs"),
        ("a: 3", "must be a mapping with run or plan"),
        ("run: PPPO", "unknown algorithm 'PPPO'. Did you mean 'PPO'?"),
        ("{run: PPO, plan: ppo}", "either run (an algorithm) or plan"),
        ("{run: PPO, envv: x}", "run, plan, env, env_config, stop, config. Did you mean 'env'?"),
        ("{run: PPO, lr: 1}", "env_config, stop, config. Settings belong below config."),
        ("{run: PPO, run_dir: x}", "stop, config. The folder is an option, --run-dir."),
        ("{run: PPO, env: CartPole-v1, config: {lrr: 1}}", "unknown setting 'lrr'"),
        ("{run: PPO, env: CartPole-v1, stop: {nothing: 1}}", "no result has a metric 'nothing'"),
        ("{run: PPO, env: CartPole-v1, stop: {timesteps_total: x}}", "must be a number, got 'x'"),
        ("{run: PPO, env: CartPol-v1}", "unknown environment"),
        ("{run: PPO", "cannot be read"),
        ("a: {run: PPO}\na: {run: A2C}", "the key 'a' occurs twice"),
        ("{run: PPO, config: {lr: 1e-3, lr: 1e-4}}", "the key 'lr' occurs twice"),
        ("{run: PPO, stop: 5}", "stop: must be a mapping"),
        ("{run: PPO, config: [1]}", "config: must be a mapping"),
        ("{plan: 5}", "plan: must be a name or a file"),
        ("{run: PPO, stop: {1: 2}}", "the name of a metric must be a string"),
        ("{run: PPO, stop: {training_iteration: }}", "must be a number, got None"),
        ("{run: PPO, config: {1: 2}}", "the name of a setting must be a string"),
        ("{run: PPO, env: A, config: {env: B}}", "env: is given twice"),
        ("../esc: {run: PPO}", "the name of a run must be a plain word"),
        ("2: {run: PPO}", "the name of a run must be a plain word"),
        ("runn: PPO", "Did you mean 'run'"),
    ],
)
def test_invalid_files_are_rejected(cli, tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    code, _, err = cli("train", "x.yaml", "--run-dir", "r")
    assert code == 2
    assert message in err
    assert os.listdir(tmp_path) == ["x.yaml"]


def test_errors_of_an_environment_name_the_run(cli, tmp_path):
    (tmp_path / "x.yaml").write_text("a: {run: TD3, env: CartPole-v1}")
    code, _, err = cli("train", "x.yaml", "--run-dir", "r")
    assert code == 2
    assert err.startswith(
        "flowrl: x.yaml, a: TD3 is for Box actions, not Discrete(2): use PPO, DQN or SAC"
    )


def test_options_of_a_training_apply_to_every_run(cli, tmp_path):
    (tmp_path / "x.yaml").write_text(
        "a: {plan: a2c, config: {num_workers: 2}, stop: {training_iteration: 1}}\n"
        "b: {run: A2C, env: CartPole-v1, stop: {training_iteration: 1}}\n"
    )
    options = ["--in-process", "--trace", "5", "--report", "--display", "none"]
    code, out, err = cli("train", "x.yaml", *options, "--run-dir", "r")
    assert (code, err) == (0, "")
    assert "iter " not in out  # the table of --display line
    for name in "ab":
        run = tmp_path / "r" / name
        assert (run / "trace.json").exists()
        assert (run / "report.html").exists()
        settings = read_settings(run)
        assert (settings["num_workers"], settings["trace_s"]) == (0, 5)


def test_each_run_can_be_repeated_by_its_name(cli, tmp_path):
    (tmp_path / "x.yaml").write_text(
        "a: {plan: a2c, stop: {training_iteration: 1}}\nb: {plan: a2c, stop: {timesteps_total: 64}}"
    )
    code, out, err = cli("train", "x.yaml", "--run-dir", "r")
    assert code == 0, err
    repeats = [line for line in out.splitlines() if line.startswith("repeat:")]
    assert ["--only a" in repeats[0], "--only b" in repeats[1]] == [True, True]
    assert all("--seed" in line for line in repeats)
    code, _, err = cli("train", "x.yaml", "--only", "b", "--seed", "1", "--run-dir", "s")
    assert code == 0, err
    assert (tmp_path / "s/b/result.json").exists()
    code, _, err = cli("train", "x.yaml", "--only", "c")
    assert code == 2
    assert "there is no run 'c'" in err


def test_resumed_run_has_the_algorithm_of_the_file(cli, tmp_path):
    (tmp_path / "x.yaml").write_text(
        "{run: DDPG, env: Pendulum-v1, stop: {training_iteration: 1},\n"
        " config: {learning_starts: 32, min_sample_timesteps_per_iteration: 64}}"
    )
    assert cli("train", "x.yaml", "--run-dir", "r")[0] == 0
    code, _, err = cli("resume", "r", "--stop-iters", "2")
    assert code == 0, err
    newest = list_checkpoints(tmp_path / "r")[-1]
    assert read_manifest(newest)["algorithm"] == "flowrl.algorithms.td3:DDPG"


@pytest.mark.parametrize(
    ("option", "end"), [(["--stop-iters", "1"], 6400), (["--stop-timesteps", "3200"], 3200)]
)
def test_schedules_in_percent_end_at_the_limit_on_env_steps(cli, tmp_path, option, end):
    (tmp_path / "x.yaml").write_text(
        "run: A2C\nenv: CartPole-v1\nstop: {timesteps_total: 6400}\n"
        'config: {train_batch_size: 32, lr: [["0%", 1.0e-3], ["100%", 0]]}\n'
    )
    code, out, err = cli("train", "x.yaml", *option, "--stop-time-s", "0.1", "--run-dir", "r")
    assert (code, err) == (0, "")
    assert f"until {end:,} env steps (where schedules in percent end)" in out
    assert read_settings(tmp_path / "r")["total_timesteps"] == end


def test_numbers_may_have_an_exponent_and_values_an_alias(cli, tmp_path):
    (tmp_path / "runs.yaml").write_text(
        "run: A2C\nenv: CartPole-v1\nstop: {timesteps_total: 6.4e1}\n"
        "config: {train_batch_size: 32e0, lr: &rate 1e-3, gamma: 0.9}\n"
    )
    code, _, err = cli("train", "runs.yaml", "--run-dir", "r")
    assert (code, err) == (0, "")
    settings = read_settings(tmp_path / "r")
    assert [settings[name] for name in ("train_batch_size", "lr", "total_timesteps")] == [
        32, 1e-3, 64,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        (["{run: A2C, config: {seed: 0}}", "{run: A2C, config: {seed: 1}}"], 2),
        (["{run: A2C}", "{run: A2C, config: {seed: 1}}"], 2),
        (["{run: A2C, config: {seed: 0}}", "{run: A2C, config: {seed: 1, lr: 1e-4}}"], 0),
    ],
)
def test_seed_of_the_command_line_does_not_make_runs_equal(cli, tmp_path, runs, code):
    common = "{env: CartPole-v1, stop: {training_iteration: 1}, "
    text = "".join(f"r{i}: {run.replace('{', common, 1)}\n" for i, run in enumerate(runs))
    (tmp_path / "x.yaml").write_text(text)
    actual, _, err = cli("train", "x.yaml", "--seed", "7", "--run-dir", "s")
    assert actual == code
    assert ("x.yaml differ only in their seeds: choose one with --only" in err) == (code == 2)
