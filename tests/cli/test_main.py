"""The command line: what it prints, what it leaves, how it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from flowrl.algorithms.ppo import PPO
from flowrl.cli import train as train_command
from flowrl.cli import training_run as training
from flowrl.cli.main import main

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
        "checkpoints",
        "command.txt",
        "config.json",
        "events",
        "plan.py",
        "plan.txt",
        "progress.csv",
        "result.json",
        "stop.json",
        "versions.json",
    }
    lines = [json.loads(line) for line in (tmp_path / "r/result.json").read_text().splitlines()]
    assert [line["timesteps_total"] for line in lines] == [64, 128]
    assert json.loads((tmp_path / "r/config.json").read_text())["seed"] == 1
    code, out, _ = run(capsys, "evaluate", "r", "--episodes", "3")
    assert code == 0
    assert out.startswith("greedy")
    assert "3 episodes" in out
    code, out, _ = run(capsys, "train", "--resume", "r")
    assert code == 0
    assert "reached already: 2 iterations" in out
    code, out, _ = run(capsys, "train", "--resume", "r", "--stop-iters", "3")
    assert code == 0
    assert "repeat:        flowrl train ppo --seed 1" in out
    assert len((tmp_path / "r/progress.csv").read_text().splitlines()) == 4


def test_policies_have_flags_of_their_own(capsys, tmp_path):
    """Which a resumed run keeps; a flag that no policy would see is refused."""
    given = ("--policies.dqn.config.tau", "0.25", "--seed", "1", "--stop-iters", "1")
    given += ("--min-sample-timesteps-per-iteration", "300")
    code, _, said = run(capsys, "train", "ppo_dqn", "--run-dir", "r", *given)
    assert (code, said) == (0, "")
    code, _, said = run(capsys, "train", "ppo_dqn", "--lr", "1e-4", "--stop-iters", "1")
    assert code == 2
    assert "--policies.ppo.config.lr" in said
    config, _ = train_command.config_of_run(tmp_path / "r")
    assert config.for_policy("dqn").tau == 0.25
    code, out, _ = run(capsys, "evaluate", "r", "--episodes", "1")
    assert code == 0
    assert "policy dqn: mean return" in out
    code, out, _ = run(capsys, "train", "--resume", "r", "--stop-iters", "2")
    assert code == 0
    assert "reached: 2 iterations" in out
    assert "dqn" in out


def test_a_run_without_a_seed_can_be_repeated(capsys, tmp_path):
    code, _, _ = run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)
    assert code == 0
    seed = json.loads((tmp_path / "r/config.json").read_text())["seed"]
    assert f"--seed {seed}" in (tmp_path / "r/command.txt").read_text()
    run(capsys, "train", "ppo", "--run-dir", "s", "--seed", str(seed), *SHORT)

    def losses(name):
        rows = (tmp_path / name / "result.json").read_text().splitlines()
        return [json.loads(row)["learners"] for row in rows]

    assert losses("r") == losses("s")
    for line in (tmp_path / "r/result.json").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no NaN, which is no JSON


def test_a_plan_may_import_what_lies_beside_it(capsys, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "beside_env.py").write_text(
        "import gymnasium as gym\n\n\ndef make(context):\n    return gym.make('CartPole-v1')\n"
    )
    run(capsys, "copy", "a2c", "mine/plan_with_env.py")
    plan = folder / "plan_with_env.py"
    text = plan.read_text().replace('env="CartPole-v1"', "env=make")
    plan.write_text("from beside_env import make\n\n" + text)
    for workers in ("0", "1"):
        flags = ["--num-workers", workers, "--stop-iters", "1", "--run-dir", f"r{workers}"]
        code, _, err = run(capsys, "train", "mine/plan_with_env.py", *flags)
        assert code == 0, err
    # played though the text of the plan has changed since; gone on with it is not
    plan.write_text(plan.read_text() + "\n# another thought\n")
    assert run(capsys, "evaluate", "r0", "--episodes", "2")[0] == 0
    code, _, err = run(capsys, "train", "--resume", "r0", "--stop-iters", "2")
    assert code == 1
    assert "plan.py" in err


def test_a_schedule_as_a_list_or_as_numbers(capsys, tmp_path):
    for name, given in (("a", ["[[0, 0.001], [1000, 0]]"]), ("b", ["0", "0.001", "1000", "0"])):
        code, _, err = run(capsys, "train", "ppo", "--run-dir", name, "--lr", *given, *SHORT)
        assert code == 0, err
        saved = json.loads((tmp_path / name / "config.json").read_text())
        assert saved["lr"] == [[0, 0.001], [1000, 0.0]]
    code, _, err = run(capsys, "train", "ppo", "--lr", "[[0, 0.001]")
    assert code == 2
    assert "not a schedule" in err


def test_a_run_that_left_no_checkpoint_cannot_go_on(capsys, tmp_path):
    run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)
    shutil.rmtree(tmp_path / "r/checkpoints")
    code, _, err = run(capsys, "train", "--resume", "r")
    assert code == 2
    assert "left no checkpoint" in err
    assert run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)[0] == 0


def test_a_reader_that_leaves_is_no_failure():
    command = f"{sys.executable} -m flowrl train ppo --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_what_an_environment_needs_is_said_in_one_line(capsys, tmp_path):
    run(capsys, "copy", "a2c", "mine.py")
    plan = tmp_path / "mine.py"
    body = (
        "def make(context):\n    import gymnasium\n"
        "    raise gymnasium.error.DependencyNotInstalled('install the thing')\n\n\n"
    )
    text = plan.read_text().replace('env="CartPole-v1"', "env=make")
    plan.write_text(text.replace("config = ", body + "config = "))
    code, _, err = run(capsys, "train", "mine.py", "--stop-iters", "1")
    assert code == 1
    assert err.strip() == "flowrl: env: install the thing"


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
    code, out, _ = run(capsys, "train", "--help")
    assert code == 0
    assert "500,000 env steps" in out


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


OWN_ENV = '''"""A2C on an environment that the plan file makes."""
import gymnasium as gym
import numpy as np
from flowrl.algorithms.a2c import A2CConfig
from flowrl.ops import ParallelRollouts, StandardMetricsReporting, TrainOneStep


class Short(gym.Env):
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    fails = False

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.fails and self.steps == 3:
            raise OSError("the simulator is gone")
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 5, False, {}


config = A2CConfig(env=lambda context: Short(), train_batch_size=20)


def execution_plan(workers, config):
    train = ParallelRollouts(workers).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train, workers, config)
'''


def test_a_plan_that_makes_its_environment(capsys, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN_ENV)
    assert run(capsys, "train", "own.py", "--stop-iters", "2", "--run-dir", "r")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, _ = run(capsys, "evaluate", "../r", "--episodes", "4")
    assert code == 0
    assert "mean return 5.0" in out
    assert run(capsys, "train", "--resume", "../r", "--stop-iters", "3")[0] == 0


def test_an_env_that_raises_shows_its_own_traceback(capsys, tmp_path):
    (tmp_path / "own.py").write_text(OWN_ENV.replace("fails = False", "fails = True"))
    code, _, err = run(capsys, "train", "own.py", "--run-dir", "r")
    assert code == 1
    assert "OSError: the simulator is gone" in err
    assert 'raise OSError("the simulator is gone")' in err
    for place in ("sub-environment 0", "of a fragment", "worker 0", "ParallelRollouts"):
        assert place in err
    assert "failed 6 times in a row" in err
    assert "flowrl/iter" not in err


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
def test_plans_and_environments_that_do_not_fit(capsys, tmp_path, old, new, message):
    (tmp_path / "own.py").write_text(OWN_ENV.replace(old, new))
    code, _, err = run(capsys, "train", "own.py", "--run-dir", "r")
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", ["config.json", "checkpoints/000002/state"])
def test_a_damaged_run_is_refused(capsys, tmp_path, name):
    run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)
    (path,) = (tmp_path / "r").glob(f"{name}*")
    path.write_text("{")
    for command in (["evaluate", "r"], ["train", "--resume", "r"]):
        code, _, err = run(capsys, *command)
        assert code in (1, 2)
        assert name.split("/")[-1] in err
        assert "Traceback" not in err


def test_a_run_directory_in_use_is_refused(capsys):
    assert run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)[0] == 0
    code, _, err = run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)
    assert code == 2
    assert "holds a run already" in err


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        pytest.param([signal.SIGINT], 130, "interrupted", marks=pytest.mark.slow),
        ([signal.SIGINT, signal.SIGINT], 130, "interrupted"),  # as `timeout -s INT` does
        ([signal.SIGTERM], 143, "terminated"),
    ],
)
def test_interrupt_leaves_a_checkpoint(tmp_path, sent, code, said):
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", "train", "ppo", "--run-dir", "r"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    results = tmp_path / "r/result.json"
    deadline = time.monotonic() + 60
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in sent:
        process.send_signal(number)
        time.sleep(0.002)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert f"stopped: {said}" in out
    assert list((tmp_path / "r/checkpoints").glob("*/manifest.json"))


def test_every_setting_can_be_given(capsys, tmp_path):
    for number, flag in enumerate(("--lambda", "--lambda_")):
        code, _, err = run(capsys, "train", "ppo", flag, "0.9", "--run-dir", f"r{number}", *SHORT)
        assert code == 0, err
        assert json.loads((tmp_path / f"r{number}/config.json").read_text())["lambda_"] == 0.9


def test_switches_records_and_schedules(capsys, tmp_path):
    flags = ["--double_q", "false", "--dueling=true", "--no-prioritized-replay"]
    code, _, err = run(capsys, "train", "dqn", *flags, "--run-dir", "d", "--stop-iters", "1")
    assert (code, err) == (0, "")
    told = json.loads((tmp_path / "d/config.json").read_text())
    assert (told["double_q"], told["dueling"], told["prioritized_replay"]) == (False, True, False)
    flags = ["--q-model", '{"fcnet_hiddens": [8]}', "--actor-lr", "0", "1e-3", "1000", "0"]
    flags += ["--learning-starts", "300", "--min-sample-timesteps-per-iteration", "310"]
    code, _, err = run(capsys, "train", "sac", *flags, "--run-dir", "s", "--stop-iters", "1")
    assert (code, err) == (0, "")
    told = json.loads((tmp_path / "s/config.json").read_text())
    assert told["q_model"]["fcnet_hiddens"] == [8]
    policy = "--policies.ppo.config"
    flags = [f"{policy}.lambda", "0.5", f"{policy}.use-gae", "false", "--stop-iters", "1"]
    flags += ["--min-sample-timesteps-per-iteration", "300", "--run-dir", "p"]
    code, _, err = run(capsys, "train", "ppo_dqn", *flags)
    assert (code, err) == (0, "")
    own = train_command.config_of_run(tmp_path / "p")[0].for_policy("ppo")
    assert (own.lambda_, own.use_gae) == (0.5, False)
    assert told["actor_lr"] == [[0, 1e-3], [1000, 0.0]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plan", "a2c"], "name the plan after the command"),
        (["--sgd-minibatch-size", "-5"], "sgd_minibatch_size"),
        (["--stop-reward", "nan"], "must be a number"),
        (["--stop-time-s", "inf"], "finite"),
        (["--env-config", '{"nope": 1}'], "env_config: CartPole-v1 does not take it"),
        (["--metrics-num-episodes-for-smoothing", "9999999999999"], "metrics_num_episodes"),
    ],
)
def test_more_wrong_flags(capsys, tmp_path, flags, said):
    code, _, err = run(capsys, "train", "ppo", *flags, "--run-dir", "r")
    assert code == 2
    assert said in err
    assert not (tmp_path / "r").exists()


def test_a_run_directory_is_ours_alone(capsys, tmp_path):
    from flowrl.cli.run_directory import RunDirectory

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    code, _, err = run(capsys, "train", "ppo", "--run-dir", "mine", *SHORT)
    assert code == 2
    assert "not empty and holds no run" in err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]

    assert run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)[0] == 0
    held = RunDirectory(tmp_path / "r", resume=True)
    code, _, err = run(capsys, "train", "--resume", "r", "--stop-iters", "3")
    held.close()
    assert code == 2
    assert "in use by another process" in err
    assert run(capsys, "train", "--resume", "r", "--stop-iters", "3")[0] == 0


def test_a_run_that_got_nowhere_may_be_repeated(capsys, tmp_path):
    (tmp_path / "fails.py").write_text(
        '"""Fails until the file is there."""\n'
        "import os\n"
        "from flowrl.algorithms.a2c import A2CConfig\n"
        "from flowrl.ops import ParallelRollouts, StandardMetricsReporting\n"
        'config = A2CConfig(env="CartPole-v1", train_batch_size=64)\n'
        "def check(batch):\n"
        '    if not os.path.exists("ok"): raise OSError("not yet")\n'
        "    return batch\n"
        "def execution_plan(workers, config):\n"
        "    rollouts = ParallelRollouts(workers).for_each(check)\n"
        "    return StandardMetricsReporting(rollouts, workers, config)\n"
    )
    code, _, err = run(capsys, "train", "fails.py", "--run-dir", "r", "--stop-iters", "1")
    assert code == 1
    assert "OSError: not yet" in err
    (tmp_path / "ok").touch()
    assert run(capsys, "train", "fails.py", "--run-dir", "r", "--stop-iters", "1")[0] == 0


def test_logs_that_were_cut_short_are_mended(capsys, tmp_path):
    assert run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)[0] == 0
    with open(tmp_path / "r/result.json", "a") as file:
        file.write('{"training_it')
    (tmp_path / "r/progress.csv").write_bytes(b"\xff\n3,40")
    assert run(capsys, "train", "--resume", "r", "--stop-iters", "3")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "r/result.json").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 3]
    lines = (tmp_path / "r/progress.csv").read_text().splitlines()
    assert len(lines) == 4
    assert len({line.count(",") for line in lines}) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return 3\n", "it returned a int"),
        ("    return ParallelRollouts(workers)\n", "must end in StandardMetricsReporting"),
        ("    import sys; sys.exit(3)\n", "SystemExit: 3"),
        (
            "    return StandardMetricsReporting(\n"
            "        ParallelRollouts(workers).for_each(lambda b: exit(0)), workers, config)\n",
            "SystemExit: 0",
        ),
    ],
)
def test_plans_that_do_the_wrong_thing(capsys, tmp_path, body, said):
    (tmp_path / "odd.py").write_text(
        '"""Odd."""\n'
        "from flowrl.algorithms.a2c import A2CConfig\n"
        "from flowrl.ops import ParallelRollouts, StandardMetricsReporting\n"
        'config = A2CConfig(env="CartPole-v1", train_batch_size=64)\n'
        "def execution_plan(workers, config):\n" + body
    )
    code, _, err = run(capsys, "train", "odd.py", "--run-dir", "r", "--stop-iters", "1")
    assert code in (1, 2)
    assert said in err


def test_a_run_is_saved_while_it_goes_on(capsys, monkeypatch):
    saved = []
    save = PPO.save
    monkeypatch.setattr(PPO, "save", lambda self, path, **about: saved.append(save(self, path)))
    assert run(capsys, "train", "ppo", "--run-dir", "r", *SHORT)[0] == 0
    assert len(saved) == 1  # at the end: a minute has not gone by
    flags = ["--checkpoint-every-s", "1e-9"]
    assert run(capsys, "train", "ppo", "--run-dir", "s", *SHORT, *flags)[0] == 0
    assert len(saved) == 1 + 2  # after the first of the two iterations, and at the end


def test_signals_raise_in_training_alone_and_a_late_second_one_anywhere(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGINT)
    with training.Signals() as signals:
        signal.raise_signal(signal.SIGINT)  # not armed: noted
        signal.raise_signal(signal.SIGINT)  # the same one
        with pytest.raises(KeyboardInterrupt):
            signals.raise_what_came()
        now[0] = 5.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with training.Signals() as signals:
        signals.armed = True
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 143
