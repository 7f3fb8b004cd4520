"""The command line: what it prints, what it leaves, how it refuses."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from flowrl.cli import main

SHORT = ["--stop-iters", "2", "--train-batch-size", "64", "--sgd-minibatch-size", "32"]


@pytest.fixture(autouse=True)
def in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *arguments):
    """Exit code, standard output, standard error of a command."""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code or 0
    said = capsys.readouterr()
    return code, said.out, said.err


def test_train_evaluate_resume(capsys, tmp_path):
    code, out, _ = run(capsys, "train", "ppo", "--seed", "1", "--run-dir", "r", *SHORT)
    assert code == 0
    assert "reached: 2 iterations" in out
    assert "repeat:        flowrl train ppo --seed 1" in out
    names = {path.name.split(".out")[0] for path in (tmp_path / "r").iterdir()}
    assert names == {
        "checkpoint",
        "command.txt",
        "config.json",
        "events",
        "plan.txt",
        "progress.csv",
        "result.json",
        "versions.json",
    }
    lines = [json.loads(line) for line in (tmp_path / "r/result.json").read_text().splitlines()]
    assert [line["timesteps_total"] for line in lines] == [64, 128]
    assert json.loads((tmp_path / "r/config.json").read_text())["seed"] == 1
    code, out, _ = run(capsys, "evaluate", "r", "--episodes", "3")
    assert code == 0
    assert out.startswith("greedy")
    assert "3 episodes" in out
    code, out, _ = run(capsys, "train", "--resume", "r", "--stop-iters", "3")
    assert code == 0
    assert len((tmp_path / "r/progress.csv").read_text().splitlines()) == 4


def test_settings_from_flags(capsys, tmp_path):
    flags = ["--lr", "3e-4", "--model.fcnet-hiddens", "8", "8", "--normalize-observations"]
    code, _, _ = run(capsys, "train", "ppo", "--run-dir", "r", *SHORT, *flags)
    assert code == 0
    config = json.loads((tmp_path / "r/config.json").read_text())
    assert config["lr"] == 3e-4
    assert config["model"]["fcnet_hiddens"] == [8, 8]
    assert config["normalize_observations"] is True


def test_own_plan(capsys):
    assert run(capsys, "copy", "a2c", "mine.py")[0] == 0
    assert run(capsys, "copy", "a2c", "mine.py")[0] == 2
    code, out, _ = run(capsys, "explain", "mine.py")
    assert code == 0
    assert "TrainOneStep" in out
    code, _, _ = run(capsys, "train", "mine.py", "--stop-iters", "1", "--run-dir", "r")
    assert code == 0


def test_small_commands(capsys):
    assert run(capsys, "version")[1].startswith("flowrl ")
    assert "PPO: every worker samples" in run(capsys, "plans")[1]
    assert run(capsys)[0] == 2
    assert run(capsys, "--help")[0] == 0
    code, out, _ = run(capsys, "train", "ppo", "--help")
    assert code == 0
    assert "--stop-reward" in out
    assert "--clip-param" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "'train'"),
        (["train"], "name a plan"),
        (["train", "ppoo"], "'ppo'"),
        (["train", "nope.py"], "no file"),
        (["train", "ppo", "--lrr", "1"], "--lr"),
        (["train", "ppo", "--model.fcnet-hidden", "1"], "model.fcnet-hiddens"),
        (["train", "ppo", "--lr", "abc"], "lr"),
        (["train", "ppo", "--lr", "-1"], "lr"),
        (["train", "ppo", "--num-workers", "-1"], "num_workers"),
        (["train", "ppo", "--train-batch-size", "64"], "sgd_minibatch_size=128 is larger"),
        (["train", "ppo", "--env", "CartPol-v1"], "CartPole-v1"),
        (["train", "ppo", "--stop-iters", "0"], "above 0"),
        (["train", "ppo", "--run-dir", "/proc/nope"], "cannot write"),
        (["train", "--resume", "nowhere"], "no run directory"),
        (["evaluate", "nowhere"], "no run directory"),
        (["explain", "ppoo"], "'ppo'"),
        (["copy", "ppo", "no/such/folder.py"], "cannot write"),
    ],
)
def test_wrong_usage(capsys, tmp_path, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


BROKEN = '''"""A plan whose operator raises."""
from flowrl.algorithms.ppo import PPOConfig
from flowrl.ops import ParallelRollouts, StandardMetricsReporting

config = PPOConfig(env="CartPole-v1", train_batch_size=128)


def explode(batch):
    raise ArithmeticError("boom")


def execution_plan(workers, config):
    return StandardMetricsReporting(ParallelRollouts(workers).for_each(explode), workers, config)
'''


def test_an_operator_that_raises(capsys, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    code, _, err = run(capsys, "train", "broken.py", "--run-dir", "r")
    assert code == 1
    assert "ArithmeticError: boom" in err
    assert "for_each(explode)" in err
    assert "broken.py:13" in err
    assert "SampleBatch of 128 rows" in err


def test_a_run_directory_in_use_is_refused(capsys):
    assert run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)[0] == 0
    code, _, err = run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)
    assert code == 2
    assert "holds a run already" in err


def test_interrupt_leaves_a_checkpoint(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl.cli", "train", "ppo", "--run-dir", "r"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    results = tmp_path / "r/result.json"
    deadline = time.monotonic() + 60
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped: interrupted" in out
    assert (tmp_path / "r/checkpoint/manifest.json").is_file()
