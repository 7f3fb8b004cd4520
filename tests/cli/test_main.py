"""`flowrl`: version and help, invalid usage, and one run through all commands."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.algorithms.ppo import PPOConfig
from flowrl.cli.arguments import OPTIONS
from flowrl.cli.flags import flag_names
from flowrl.cli.main import main
from flowrl.errors import install_command
from tests.cli.helpers import TWO_ITERATIONS, read_results, read_settings
from tests.extras import require_extra


def test_run_is_trained_evaluated_and_resumed(cli, tmp_path):
    code, out, _ = cli("train", "ppo", "--seed", "1", "--run-dir", "r", *TWO_ITERATIONS)
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
        "setup.json",
        "plan.txt",
        "progress.csv",
        "result.json",
        "stop.json",
        "versions.json",
        "events.jsonl",
    }
    assert [result["timesteps_total"] for result in read_results(tmp_path / "r")] == [64, 128]
    assert read_settings(tmp_path / "r")["seed"] == 1
    code, out, _ = cli("evaluate", "r", "--episodes", "3")
    assert code == 0
    assert out.startswith("greedy")
    assert "3 episodes" in out
    code, out, _ = cli("train", "--resume", "r")
    assert code == 0
    assert "already reached: 2 iterations" in out
    code, out, _ = cli("train", "--resume", "r", "--stop-iters", "3")
    assert code == 0
    assert "repeat:" not in out  # the first command ends after 2 iterations
    assert len((tmp_path / "r/progress.csv").read_text().splitlines()) == 4


def test_version_plans_and_help_are_printed(cli):
    assert cli("version")[1].startswith("flowrl ")
    assert "PPO: " in cli("plans")[1]
    assert cli()[0] == 2
    assert cli("--help")[0] == 0
    code, out, _ = cli("train", "ppo", "--help")
    assert code == 0
    assert "--stop-reward" in out
    assert "--clip-param" in out
    code, out, _ = cli("train", "--help")
    assert code == 0
    assert "500,000 env steps" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("resume", "RUN_DIR is missing (see flowrl resume --help)"),
        ("resume r --stop-iter 3", "unknown option --stop-iter. Did you mean --stop-iters?"),
        ("evaluate r --episodes x", "--episodes: must be a whole number such as 100000 or 1e5"),
        ("evaluate r --render x", "--render: must be human, got x"),
        ("checkpoint list r", "verb: must be inspect, got list"),
        ("plans x", "unexpected argument 'x'"),
    ],
)
def test_problem_of_an_option_is_one_line(cli, command, message):
    code, out, err = cli(*command.split())
    assert code == 2
    assert message in err
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("command", OPTIONS)
def test_options_of_a_command_are_those_of_its_help(cli, command):
    _, out, _ = cli(*command.split(), "--help")
    shown = re.findall(r"^  (?:-\w \w+, )?(--[\w-]+)", out, re.MULTILINE)
    assert sorted(shown) == sorted(OPTIONS[command])


def test_reader_that_closes_the_pipe_causes_no_traceback():
    command = f"{sys.executable} -m flowrl train ppo --help | head -1"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert process.stdout.startswith("usage: flowrl train")
    assert process.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Did you mean 'train'? (see flowrl --help)"),
        (["xyz"], "unknown command 'xyz' (see flowrl --help)"),
        (["ppo", "--lr", "1e-3"], "unknown command 'ppo'. Use flowrl train ppo --lr 1e-3\n"),
        (["mine.py"], "Use flowrl train mine.py\n"),
        (["enjoy", "runs/my run"], "Use flowrl evaluate 'runs/my run'\n"),
        (["train", "ppo", "--algo", "ppo"], "--algo: name the plan after the command"),
        (
            ["resume", "r", "--num-workers", "0"],
            "--num-workers: flowrl resume keeps this setting, because each worker and environment",
        ),
        (
            ["evaluate", "r", "--num-workers=2"],
            "flowrl evaluate plays all episodes in this process",
        ),
        (["resume", "r", "--lr=0.1"], "--lr: flowrl resume uses the settings of the run; to "),
        (["resume", "r", "--checkpoint-frequency", "2"], "Algorithm.from_checkpoint('r', config={"),
        (["resume", "r", "--model.fcnet-hiddens", "2"], "--model.fcnet-hiddens: flowrl resume"),
        (["resume", "r", "--total-timesteps", "9"], "--total-timesteps: use --stop-timesteps 9\n"),
        (
            ["resume", "r", "--env", "X"],
            "Algorithm.from_checkpoint('r', env=…).learn(total_timesteps=…)\n",
        ),
        (["evaluate", "r", "--env", "X"], 'config={"evaluation_config": {"env": …}}).evaluate()\n'),
        (
            ["evaluate", "r", "--run", "PPO"],
            "--run is an option of flowrl train; flowrl evaluate uses the algorithm of the run\n",
        ),
        (["evaluate", "r", "--lr", "1"], "--lr: flowrl evaluate uses the settings of the run; to"),
        (
            ["evaluate", "r", "--stop-iters", "1"],
            "--stop-iters is an option of flowrl train, train FILE.yaml and resume; "
            "flowrl evaluate has --episodes, ",
        ),
        (
            ["plans", "--env", "X"],
            "--env is an option of flowrl train, explain and check; flowrl plans has no options",
        ),
        (
            ["explain", "ppo", "--lr", "1"],
            "--lr is a setting, for flowrl train; flowrl explain has",
        ),
        (["train", "ppo", "--episodes", "3"], "--episodes is an option of flowrl evaluate, not of"),
        (["rollout", "r"], "unknown command 'rollout'. Use flowrl evaluate r\n"),
        (["list"], "unknown command 'list'. Use flowrl plans\n"),
        (["my plan.py"], "unknown command 'my plan.py'. Use flowrl train 'my plan.py'\n"),
        (["export", "r"], "Policy.from_checkpoint(RUN_DIR).export(FILE)\n"),
        (["train", "ppo", "--tuned"], "unknown flag --tuned. Did you mean --no-tuned?\n"),
        (["copy", "ppo", "mine"], "mine: the name of a plan file ends in .py\n"),
        (["train"], "name a plan"),
        (["train", "ppoo"], "'ppo'"),
        (["train", "nope.py"], "no file"),
        (["train", "ppo", "--lrr", "1"], "--lr"),
        (["train", "ppo", "--model.fcnet-hidden", "1"], "model.fcnet-hiddens"),
        (["train", "ppo", "--lr", "abc"], "lr"),
        (["train", "ppo", "--lr", "-1"], "lr"),
        (["train", "ppo", "--num-workers", "-1"], "--num-workers: input should be greater"),
        (
            ["train", "ppo", "--train-batch-size", "32"],
            "--train-batch-size 32 is smaller than --sgd-minibatch-size 64",
        ),
        (["train", "ppo", "--env", "CartPol-v1"], "CartPole-v1"),
        (["train", "ppo", "--stop-iters", "0"], "must be positive"),
        (["train", "ppo", "--run-dir", "/proc/nope"], "cannot write"),
        (["train", "--resume", "nowhere"], "not a run directory"),
        (["evaluate", "nowhere"], "not a run directory"),
        (["explain", "ppoo"], "'ppo'"),
        (["copy", "ppo", "no/such/folder.py"], "cannot write"),
    ],
)
def test_invalid_usage_is_rejected(cli, tmp_path, arguments, message):
    code, _, err = cli(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "ppo", "--run=PPO"], "give either a plan (ppo) or --run"),
        (["train", "ppo_dqn", "--policies.dqnn.config.lr", "1"], "Did you mean 'dqn'?"),
        (["train", "ppo", "--policies.x.config.lr", "1"], "no such policy"),
        (
            ["train", "three_way", "--policies.sac.config.lrr", "5e-4"],
            "unknown flag --policies.sac.config.lrr. Did you mean --policies.sac.config.lr?",
        ),
        (
            ["train", "ppo_dqn", "--policies.dqn.lr", "1"],
            "Did you mean '--policies.dqn.config.lr'?",
        ),
        (
            ["train", "ppo", "--batch-size", "64"],
            "Use --sgd-minibatch-size for the rows per update",
        ),
        (["train", "ppo", "--num-env", "4"], "Did you mean --num-envs-per-worker?"),
        (["train", "ppo", "--learning-starts", "9"], "It is a setting of APEX, DQN, R2D2"),
        (["train", "ppo", "--net_arch", "64"], "Use --model.fcnet-hiddens."),
        (["train", "ppo", "--gae-lambda", "1"], "Did you mean --lambda?"),
        (["train", "sac", "--ent-coef", "auto"], "and --target-entropy=None keeps it fixed"),
        (
            ["train", "three_way", "--policies.sac.config.buffer-size", "5"],
            "Did you mean --policies.sac.config.replay-buffer-capacity?",
        ),
        (["train", "sac", "--q-model.fcnet-hiddens", "8"], "--q-model takes a JSON object"),
        (["train", "sac", "--q-model", '{"fcnet_hidden": [8]}'], "Did you mean 'fcnet_hiddens'?"),
        (["train", "bc"], "experience. To record experience, set `output`"),
        (["train", "bc", "--input_", "nowhere"], "nowhere. To record experience, set `output`"),
        (["train", "dqn", "--env", "Pendulum-v1"], "float32): use PPO, SAC or TD3"),
        (["train", "rainbow", "--num-replay-shards", "3"], "whose buffer is on actors"),
        (["train", "ppo", "--output", "s3://a/b"], "output: must be a folder"),
        (["train", "ppo", "--output", "/dev/null/x"], "output: /dev/null/x cannot be written"),
    ],
)
def test_invalid_settings_are_rejected_before_the_run(cli, tmp_path, command, message):
    code, _, err = cli(*command)
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("evaluation_config", "message"),
    [
        ({"env_config": {"nope": 1}}, "evaluation_config: cannot create its environment"),
        ({"env": "MountainCar-v0"}, "evaluation_config: its environment has the observation_space"),
        ({"model": {"fcnet_hiddens": [8]}}, "do not use the setting 'model'"),
        ({"num_workers": 2}, "do not use the setting 'num_workers'"),
    ],
)
def test_invalid_evaluation_config_is_rejected_before_the_run(
    cli, tmp_path, evaluation_config, message
):
    settings = json.dumps({"evaluation_interval": 3, "evaluation_config": evaluation_config})
    code, _, err = cli("train", "ppo", *TWO_ITERATIONS, "--config", settings, "--run-dir", "r")
    assert code == 2
    assert message in err
    assert not (tmp_path / "r").exists()


def test_help_is_short_by_default_and_has_groups(cli):
    _, short, _ = cli("train", "ppo", "--help")
    _, full, _ = cli("train", "ppo", "--help-all")
    for text in (short, full):
        assert "settings: training:" in text
        assert "--lambda FLOAT" in text
        assert "fixed" not in text
        assert "no-no" not in text
        assert max(map(len, text.splitlines())) <= 130
    assert "more settings: flowrl train ppo --help-all" in short
    assert "--no-done-at-end" not in short
    for name in flag_names(PPOConfig):
        assert name in ("env", "plan", "policies", "policies-to-train") or f"--{name}" in full
    _, out, _ = cli("train", "ppo_dqn", "--help")
    assert "settings: policy dqn:" in out
    assert "--policies.dqn.config.tau FLOAT" in out


def test_names_are_suggested_ignoring_case(cli):
    code, _, err = cli("train", "PPPO")
    assert code == 2
    assert "Did you mean 'ppo'?" in err
    assert cli("train", "PPO", "--run-dir", "r", *TWO_ITERATIONS)[0] == 0
    assert cli("--version") == cli("version")


CODE = """
import gymnasium as gym
import torch
from flowrl.sampling.callbacks import DefaultCallbacks

gym.register("Mine-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=5)


class Counting(DefaultCallbacks):
    def on_train_result(self, *, result, **kwargs):
        result["custom_metrics"]["counted"] = 1


class Net(torch.nn.Module):
    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__()
        self.out, self.value = torch.nn.Linear(4, num_outputs), torch.nn.Linear(4, 1)

    def forward(self, obs):
        return self.out(obs), self.value(obs)[:, 0]
"""


def test_code_of_the_current_folder_is_named_by_flags(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_code.py").write_text(CODE)
    flags = ["--env", "my_code:Mine-v0", "--model.custom-model", "my_code:Net"]
    flags += ["--callbacks-class", "my_code:Counting", *TWO_ITERATIONS]
    code, _, err = cli("train", "ppo", *flags, "--run-dir", "r")
    assert code == 0, err
    results = read_results(tmp_path / "r")
    assert results[-1]["custom_metrics"]["counted"] == 1
    assert results[-1]["episode_len_mean"] == 5
    code, _, err = cli("resume", "r", "--stop-iters", "3")
    assert code == 2
    assert "--trust" in err
    code, _, err = cli("resume", "r", "--trust", "--stop-iters", "3")
    assert code == 0, err
    assert read_results(tmp_path / "r")[-1]["custom_metrics"]["counted"] == 1
    for flag in ("--callbacks-class", "--policy-mapping-fn"):
        code, _, err = cli("train", "ppo", flag, "my_code:Nothing")
        assert code == 2
        assert "my_code:Nothing" in err


OWN_ENV = """
import gymnasium as gym

class Short(gym.Wrapper):
    def __init__(self, steps=3):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=steps))

def make(context):
    return Short(**context)

number = 3
"""


@pytest.mark.parametrize("name", ["Short", "make"])
def test_environment_of_the_current_folder_is_named_by_its_import_path(cli, tmp_path, name):
    (tmp_path / "own_env.py").write_text(OWN_ENV)
    env = ["--env", f"own_env:{name}", "--env-config", '{"steps": 4}']
    code, _, err = cli("train", "ppo", *env, *TWO_ITERATIONS, "--run-dir", "r")
    assert code == 0, err
    for command in (["resume", "r", "--stop-iters", "3"], ["evaluate", "r", "--episodes", "1"]):
        code, _, err = cli(*command)
        assert (code, f"own_env:{name}, which is not trusted: pass --trust" in err) == (2, True)
        code, _, err = cli(*command, "--trust")
        assert code == 0, err
    assert read_results(tmp_path / "r")[-1]["episode_len_mean"] == 4


def test_plan_file_is_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["copy", "ppo", "mine.py"]) == 0
    assert main(["copy", str(tmp_path / "mine.py"), "other.py"]) == 0
    assert (tmp_path / "other.py").read_text() == (tmp_path / "mine.py").read_text()


@pytest.mark.parametrize("env", ["own_env:Nothing", "own_env:number", "own_env:", "no_module:Env"])
def test_import_path_without_an_environment_is_rejected(cli, tmp_path, env):
    (tmp_path / "own_env.py").write_text(OWN_ENV)
    code, _, err = cli("train", "ppo", "--env", env)
    assert code == 2
    assert "module:Id" in err
    assert "module:Class" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["train ppo", "train --run=PPO"])
def test_environment_that_needs_an_extra_names_it_once(cli, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    code, out, err = cli(*command.split(), "--env", "LunarLander-v3")
    assert (code, out) == (2, "")
    assert err.count(install_command("box2d")) == 1
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_atari_environment_names_its_extra(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    code, _, err = cli("train", "ppo", "--env", "ALE/Pong-v5")
    assert code == 2
    assert install_command("atari") in err


def test_plan_file_with_settings_only_is_rejected(cli, tmp_path):
    text = "from flowrl.algorithms.ppo import PPOConfig\nconfig = PPOConfig(env='CartPole-v1')\n"
    (tmp_path / "settings.py").write_text(text)
    code, _, err = cli("train", "settings.py")
    assert code == 2
    assert "has a `config`, but neither a function execution_plan(workers, config)" in err


def test_evaluation_can_be_seeded_and_shown(cli, monkeypatch):
    require_extra("video")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert cli("train", "ppo", *TWO_ITERATIONS, "--run-dir", "r")[0] == 0
    outputs = [
        cli("evaluate", "r", "--episodes", "4", "--seed", seed)[1] for seed in ("1", "1", "2")
    ]
    assert outputs[0] == outputs[1] != outputs[2]
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    code, out, err = cli("evaluate", "r", "--episodes", "1", "--render", "human")
    assert code == 0
    assert "there is no display, so no window opens; use --video FOLDER" in err
    assert "greedy" in out
    assert "sampled" not in out


def test_window_without_pygame_names_the_extra(cli, monkeypatch):
    assert cli("train", "ppo", *TWO_ITERATIONS, "--run-dir", "r")[0] == 0
    monkeypatch.setitem(sys.modules, "pygame", None)
    monkeypatch.setenv("DISPLAY", ":0")
    code, out, err = cli("evaluate", "r", "--episodes", "1", "--render", "human")
    assert (code, out) == (2, "")
    assert err == f"flowrl: --render human needs the extra video: {install_command('video')}\n"


def test_video_that_cannot_be_written_is_wrong_usage(cli, tmp_path):
    require_extra("video")
    assert cli("train", "ppo", *TWO_ITERATIONS, "--run-dir", "r")[0] == 0
    (tmp_path / "file").touch()
    code, _, err = cli("evaluate", "r", "--episodes", "1", "--video", "file")
    assert code == 2
    assert err.startswith("flowrl: ")


def test_tensorboard_shows_a_folder_of_runs(cli, tmp_path, monkeypatch):
    code, _, err = cli("tensorboard")
    assert code == 2
    assert "runs: there is no such folder" in err
    require_extra("tensorboard")
    (tmp_path / "runs").mkdir()
    commands = []

    class Ended:
        def __init__(self, command):
            commands.append(command)

        def wait(self, timeout=None):
            return 0

        def terminate(self):
            pass

    monkeypatch.setattr(subprocess, "Popen", Ended)
    assert cli("tensorboard", "--port", "7007")[0] == 0
    assert commands[0][1:] == ["-P", "-m", "tensorboard.main", "--logdir", "runs", "--port", "7007"]
    monkeypatch.undo()
    command = [sys.executable, "-m", "tensorboard.main", "--version_tb"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "ppo"]])
def test_output_in_another_encoding_has_substitutes(arguments):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "flowrl", *arguments]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


@pytest.mark.parametrize("command", [["explain", "ppo"], ["plans"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_output_is_quiet(command, unbuffered):
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "flowrl", *command]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, env=env)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_copied_plan_with_a_space_in_its_name_is_quoted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["copy", "ppo", "my plan.py"]) == 0
    assert "`flowrl train 'my plan.py'`" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plans", "train ppo --stop-iters 1 --run-dir r"])
def test_commands_run_without_standard_output(command, tmp_path):
    program = f'exec "{sys.executable}" -m flowrl {command} >&-'
    ended = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "ppo", "--run-dir", ""], "--run-dir: must be a path, got ''"),
        (["train", "ppo", "--no-lr", "3"], "unknown flag --no-lr"),
        (["explain", "ppo", "--env", "CartPol-v7"], "Did you mean 'CartPole-v1'?"),
        (["train", "list.yaml"], "'a': must be a mapping with run or plan, got [0, 1, 2, 3"),
        (["train", "empty.yaml"], "it needs run or plan at the top level"),
    ],
)
def test_wrong_usage_has_one_short_message(cli, tmp_path, arguments, message):
    (tmp_path / "list.yaml").write_text(f"a: {[*range(300)]}\n")
    (tmp_path / "empty.yaml").write_text("[]\n")
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err) < 300


def test_home_folder_is_expanded(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli("copy", "ppo", "~/mine.py")[0] == 0
    assert (tmp_path / "mine.py").is_file()
    for command in ("diagnose", "evaluate", "resume", "plot"):
        code, _, err = cli(command, "~nobody-has-this-name/r")
        assert code == 2
        assert "~nobody-has-this-name/r" in err


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("evaluate r", "config.json", "config.json: cannot be read: Permission denied"),
        ("report r", "result.json", "cannot access r/result.json: Permission denied"),
        ("plot r", "result.json", "cannot access r/result.json: Permission denied"),
        ("diagnose r", "events.jsonl", "cannot access r/events.jsonl: Permission denied"),
    ],
)
def test_files_that_cannot_be_read_are_named(cli, monkeypatch, command, name, message):
    assert cli("train", "ppo", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    opened = io.open

    def refuse(file, *args, **kwargs):
        if str(file).endswith(name):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    code, out, err = cli(*command.split())
    assert (code, out) == (2, "")
    assert err.startswith("flowrl: ") and message in err


def test_permission_errors_of_users_code_are_not_about_files(cli, monkeypatch):
    def fail(arguments):
        raise PermissionError("the license of the simulator has expired")

    monkeypatch.setattr("flowrl.cli.plans.plans_command", fail)
    with pytest.raises(PermissionError, match="license"):
        cli("plans")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_tensorboard_ends_with_the_command(tmp_path, number, code):
    require_extra("tensorboard")
    module = tmp_path / "tensorboard"  # in place of the package
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "main.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "flowrl", "tensorboard"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment,
        # background processes of shells ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    child = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(20) == code
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_while_modules_are_imported_is_quiet():
    program = (
        "import builtins, sys\n"
        "original = builtins.__import__\n"
        "def interrupted(name, *args, **kwargs):\n"
        "    if name == 'numpy':\n"
        "        raise KeyboardInterrupt\n"
        "    return original(name, *args, **kwargs)\n"
        "builtins.__import__ = interrupted\n"
        "from flowrl.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_error_of_an_option_names_the_command_that_has_it(cli):
    code, _, err = cli("train", "ppo", "--until", "Dequeue:3")
    assert code == 2
    assert "--until is an option of flowrl replay" in err
