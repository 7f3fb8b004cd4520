"""Algorithm.learn: limits, run directories, continuing a run, failures and interrupts."""

import functools
import importlib
import json
import os
import re
import signal
import sys
from bdb import BdbQuit
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from flowrl import A2C, BC, PPO, Algorithm, ConfigError
from flowrl.cli.main import main
from flowrl.data.checkpoint import CheckpointError, read_manifest
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.trainer.metric_names import metric_hint
from flowrl.trainer.runs.run_directory import RunDirectory
from flowrl.trainer.runs.run_end import RunEnd, describe_end
from flowrl.trainer.runs.saved_run import is_in_use
from flowrl.trainer.runs.stop_rules import PendingMetrics, StopRules, metric_rules
from tests.extras import require_extra

SMALL = {"train_batch_size": 64, "num_envs_per_worker": 2, "seed": 1}


def read_steps(run_dir):
    lines = (run_dir / "result.json").read_text().splitlines()
    return [json.loads(line)["timesteps_total"] for line in lines]


def test_learn_writes_a_run_directory(tmp_path, capsys):
    with A2C("CartPole-v1", **SMALL) as algorithm:
        assert algorithm.learn(128, run_dir=tmp_path / "r") is algorithm
        assert algorithm.run_dir == tmp_path / "r"
        saved = algorithm.save()
    assert read_steps(tmp_path / "r") == [64, 128]
    assert saved == tmp_path / "r" / "checkpoints" / "000002"
    for name in ("config.json", "progress.csv", "stop.json", "plan.py", "plan.txt"):
        assert (tmp_path / "r" / name).is_file()
    assert list((tmp_path / "r").glob("events.out.tfevents.*"))
    out = capsys.readouterr().out
    assert "env steps" in out
    assert "reached: 128 env steps, after" in out
    assert str(tmp_path / "r") in out


def test_run_directory_stays_where_it_is_if_the_program_changes_its_folder(
    tmp_path, monkeypatch, capsys
):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, run_dir="r")
        assert "run directory: r\n" in capsys.readouterr().out
        monkeypatch.chdir(tmp_path / "second")
        algorithm.learn(128)
    assert read_steps(tmp_path / "first" / "r") == [64, 128]
    assert not list((tmp_path / "second").iterdir())


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, run_dir="~/r", progress=False)
        assert algorithm.run_dir == tmp_path / "r"
        assert algorithm.save("~/c") == tmp_path / "c"
    for name in ("r", "c"):
        with A2C.from_checkpoint(f"~/{name}") as restored:
            assert restored.env_steps == 64
    assert {path.name for path in tmp_path.iterdir()} == {"r", "c"}


def test_save_into_a_run_directory_is_rejected(tmp_path):
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, run_dir=tmp_path / "r", progress=False)
        with pytest.raises(ConfigError, match=r"r is a run directory, .* save\(\) without a path"):
            algorithm.save(tmp_path / "r")
        algorithm.save(tmp_path / "other")
        algorithm.learn(128, progress=False)
    with A2C.from_checkpoint(tmp_path / "r") as restored:
        assert restored.env_steps == 128


def test_learn_without_a_run_directory_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(128, run_dir=None, progress=False)
        assert algorithm.last_result["timesteps_total"] == 128
        assert algorithm.run_dir is None
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_default_run_directory_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with A2C("CartPole-v1", **SMALL) as algorithm:
            algorithm.learn(64, progress=False)
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 2
    assert all(name.startswith("a2c-CartPole-v1-") for name in names)


def test_run_continues_in_its_directory(tmp_path, capsys):
    run_dir = tmp_path / "r"
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, run_dir=run_dir, progress=False)
        algorithm.learn(128, progress=False)
    with A2C.from_checkpoint(run_dir) as algorithm:
        assert algorithm.run_dir == run_dir
        algorithm.learn(128, progress=False)
        assert "already reached: 128 env steps" in capsys.readouterr().out
        algorithm.learn(256, progress=False)
    assert read_steps(run_dir) == [64, 128, 192, 256]
    assert main(["resume", str(run_dir), "--stop-timesteps", "320"]) == 0
    assert main(["evaluate", str(run_dir), "--episodes", "1"]) == 0
    assert read_steps(run_dir)[-1] == 320


def test_results_equal_those_of_an_uninterrupted_run(tmp_path):
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, run_dir=tmp_path / "r", progress=False)
    with A2C.from_checkpoint(tmp_path / "r") as algorithm:
        algorithm.learn(192, progress=False)
        losses = algorithm.last_result["learners"]
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(192, run_dir=None, progress=False)
        assert algorithm.last_result["learners"] == losses


def test_other_runs_are_not_overwritten(tmp_path):
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, run_dir=tmp_path / "r", progress=False)
    with (
        A2C("CartPole-v1", **SMALL) as algorithm,
        pytest.raises(ConfigError, match="contains a run: choose another folder, or") as caught,
    ):
        algorithm.learn(64, run_dir=tmp_path / "r")
    expression = re.search(r"in Python with (Algorithm.*)\.learn\(…\)$", str(caught.value))[1]
    with eval(expression, {"Algorithm": Algorithm}) as algorithm:
        assert type(algorithm) is A2C
        algorithm.learn(128, progress=False)
        assert algorithm.run_dir == tmp_path / "r"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_timesteps": 0}, "positive whole number, got 0"),
        ({"total_timesteps": 0.5}, "positive whole number, got 0.5"),
        ({"total_timesteps": True}, "positive whole number, got True"),
        ({"total_timesteps": "1000"}, "positive whole number, got '1000'"),
        ({"stop": {"episode_reward_meen": 1}}, "Did you mean 'episode_reward_mean'"),
        ({"stop": {"episode_reward_mean": "high"}}, "must be a number"),
        ({"stop": 3}, "must map metrics to values"),
    ],
)
def test_invalid_limits_are_rejected(tmp_path, arguments, message):
    with A2C("CartPole-v1", **SMALL) as algorithm:
        with pytest.raises(ConfigError, match=message):
            algorithm.learn(**arguments, run_dir=tmp_path / "r")
        assert algorithm.iteration == 0
    assert not (tmp_path / "r").exists()


def test_limits_on_other_metrics_stop_the_training():
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(stop={"training_iteration": 3}, run_dir=None, progress=False)
        assert algorithm.iteration == 3
    assert metric_rules({"a/b<=": 2}) == [("a/b", "<=", 2.0)]


def test_limit_on_a_text_is_an_error():
    with (
        A2C("CartPole-v1", **SMALL) as algorithm,
        pytest.raises(ConfigError, match="stop: 'diagnosis' is a str, not a number"),
    ):
        algorithm.learn(stop={"diagnosis": 1}, run_dir=None, progress=False)


@pytest.mark.parametrize(("metric", "end"), [("mine", 3), ("episode_reward_meen", 5)])
def test_metrics_of_on_train_result_can_be_limits(capsys, metric, end):
    class Callbacks(DefaultCallbacks):
        def on_train_result(self, *, algorithm, result, **kwargs):
            result["mine"] = result["training_iteration"]

    with A2C("CartPole-v1", **SMALL, callbacks_class=Callbacks) as algorithm:
        limits = {metric: 3, "training_iteration": 5}
        algorithm.learn(stop=limits, run_dir=None, progress=False)
        assert algorithm.iteration == end
    err = capsys.readouterr().err
    missing = "stop: the first result has no 'episode_reward_meen'. Did you mean 'episode_reward_me"
    assert err.count(missing) == (metric != "mine")


OWN_CODE = """
import gymnasium as gym
import numpy as np
from flowrl import A2C

def make(context):
    return gym.make("CartPole-v1")

class Mine(A2C):
    pass
"""


def learn_in_run(algorithm_class, env, run_dir, **settings):
    with algorithm_class(env, **SMALL, **settings) as algorithm:
        algorithm.learn(64, run_dir=run_dir)


@pytest.mark.parametrize("own", ["environment", "algorithm"])
def test_trusted_code_of_the_current_folder_is_resumed(tmp_path, monkeypatch, capsys, own):
    (tmp_path / "own_code_of_a_run.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_code_of_a_run", raising=False)
    module = importlib.import_module("own_code_of_a_run")
    algorithm_class = module.Mine if own == "algorithm" else A2C
    learn_in_run(algorithm_class, module.make if own == "environment" else "CartPole-v1", "r")
    assert "continue: flowrl resume r --trust --stop-timesteps …" in capsys.readouterr().out
    for command in (["resume", "r", "--stop-timesteps", "128"], ["evaluate", "r"]):
        assert main(command) == 2
        assert "own_code_of_a_run:" in (message := capsys.readouterr().err)
        assert "pass --trust" in message
    assert main(["resume", "r", "--trust", "--stop-timesteps", "128"]) == 0
    out = capsys.readouterr().out
    assert f"{algorithm_class.__name__}.from_checkpoint('r'" in out
    assert "repeat:" not in out
    assert main(["evaluate", "r", "--trust", "--episodes", "1"]) == 0
    assert read_steps(tmp_path / "r") == [64, 128]


@pytest.mark.parametrize("trust", [[], ["--trust"]])
def test_code_that_only_the_program_has_is_continued_in_python(
    tmp_path, monkeypatch, capsys, trust
):
    in_main = type("MainEnv", (gym.Wrapper,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "MainEnv", in_main, raising=False)
    in_main.__init__ = lambda self: gym.Wrapper.__init__(self, gym.make("CartPole-v1"))
    for name, env in (("main", in_main), ("local", lambda context: gym.make("CartPole-v1"))):
        run_dir = tmp_path / name
        learn_in_run(A2C, env, run_dir)
        hint = capsys.readouterr().out
        assert f"A2C.from_checkpoint({str(run_dir)!r}, config={{'env': …}}).learn(…)" in hint
        assert "flowrl resume" not in hint
        if name == "main":
            monkeypatch.delattr(sys.modules["__main__"], "MainEnv")
        for command in (["resume", "--stop-iters", "2"], ["evaluate"]):
            assert main([command[0], str(run_dir), *command[1:], *trust]) == 2
            message = capsys.readouterr().err
            assert "move code to a module in the current folder, replace objects by" in message
            assert "config={'env': …}" in message
    algorithm_class = type("Mine", (A2C,), {"__qualname__": "f.<locals>.Mine"})
    learn_in_run(algorithm_class, "CartPole-v1", tmp_path / "own")
    assert main(["evaluate", str(tmp_path / "own"), *trust]) == 2
    assert "its algorithm" in capsys.readouterr().err


def test_how_to_continue_is_printed(tmp_path, capsys):
    run_dir = tmp_path / "r"
    learn_in_run(A2C, "CartPole-v1", run_dir)
    out = capsys.readouterr().out
    assert f"continue: A2C.from_checkpoint({str(run_dir)!r}).learn(…)" in out
    assert f"continue: flowrl resume {run_dir} --stop-timesteps …" in out
    assert main(["resume", str(run_dir), "--stop-timesteps", "128"]) == 0
    out = capsys.readouterr().out
    assert f"continue:      A2C.from_checkpoint({str(run_dir)!r}).learn(…)" in out
    assert "repeat:" not in out


def test_start_is_described_in_one_line(tmp_path, capsys):
    run_dir = tmp_path / "r"
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, stop={"episode_reward_mean": 400}, run_dir=run_dir)
        first = capsys.readouterr().out.splitlines()[0]
        limits = "64 env steps or episode_reward_mean >= 400"
        assert first == f"training A2C on CartPole-v1 until {limits}; run directory: {run_dir}"
        algorithm.learn(128, run_dir=None)
        first = capsys.readouterr().out.splitlines()[0]
        assert "from env step 64 until 128 env steps; no run directory" in first
    percent = {"lr": [("0%", 1e-3), ("100%", 0.0)]}
    with A2C(make_cartpole, **SMALL, **percent) as algorithm:
        algorithm.learn(stop={"training_iteration": 1}, run_dir=None)
        first = capsys.readouterr().out.splitlines()[0]
        assert "on make_cartpole until 500,000 env steps (where schedules in percent end)" in first
        assert "or training_iteration >= 1" in first


@pytest.mark.usefixtures("ray_session")
@pytest.mark.slow
def test_start_of_workers_is_printed(capsys):
    with A2C("CartPole-v1", **SMALL, num_workers=1) as algorithm:
        algorithm.learn(64, run_dir=None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("training A2C on CartPole-v1 with 1 worker until")
    assert lines[1] == "starting 1 worker …"


def test_limit_that_is_already_met_is_printed_without_a_run_directory(capsys):
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(6.4e1, run_dir=None, progress=False)
        for limits in ({"total_timesteps": 32}, {"stop": {"training_iteration": 1}}):
            algorithm.learn(**limits, run_dir=None, progress=False)
            assert "already reached: " in capsys.readouterr().out
        assert algorithm.iteration == 1


def test_stopped_algorithm_learns_nothing_and_writes_nothing(tmp_path):
    algorithm = A2C("CartPole-v1", **SMALL)
    algorithm.stop()
    with pytest.raises(RuntimeError, match="was stopped"):
        algorithm.learn(64, run_dir=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def make_cartpole(context):
    return gym.make("CartPole-v1")


class Interrupt(DefaultCallbacks):
    """Sends Ctrl-C to this process in the second iteration."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        if algorithm.iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)


class Fail(DefaultCallbacks):
    """Raises in the second iteration."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        if algorithm.iteration == 2:
            raise ArithmeticError("boom")


@pytest.mark.parametrize(
    ("callbacks", "error"), [(Interrupt, KeyboardInterrupt), (Fail, ArithmeticError)]
)
def test_checkpoint_is_written_before_an_error_is_raised(tmp_path, callbacks, error):
    with (
        A2C("CartPole-v1", **SMALL, callbacks_class=callbacks) as algorithm,
        pytest.raises(error),
    ):
        algorithm.learn(640, run_dir=tmp_path / "r", progress=False)
    assert read_steps(tmp_path / "r") == [64, 128]
    with pytest.raises(CheckpointError, match="trust=True"):
        A2C.from_checkpoint(tmp_path / "r")
    with A2C.from_checkpoint(tmp_path / "r", config={"callbacks_class": None}) as algorithm:
        assert algorithm.iteration == 2


class AddComplex(DefaultCallbacks):
    """Adds a value that JSON does not have to the third result."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        if algorithm.iteration == 3:
            result["own"] = {1: 2j}


def test_result_that_cannot_be_written_leaves_a_checkpoint(tmp_path):
    with (
        A2C("CartPole-v1", **SMALL, callbacks_class=AddComplex) as algorithm,
        pytest.raises(TypeError),
    ):
        algorithm.learn(640, run_dir=tmp_path / "r", progress=False)
    assert read_steps(tmp_path / "r") == [64, 128]
    assert (tmp_path / "r/checkpoints/000003/manifest.json").exists()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "r/events.jsonl").open()]
    assert kinds == ["started", "failed"]


def test_last_checkpoint_that_fails_is_an_event(tmp_path, monkeypatch):
    def save(self, path=None, metadata=None):
        raise TypeError("a state that cannot be saved")

    monkeypatch.setattr(A2C, "save", save)
    with A2C("CartPole-v1", **SMALL) as algorithm, pytest.raises(TypeError, match="a state"):
        algorithm.learn(64, run_dir=tmp_path / "r", progress=False)
    events = [json.loads(line) for line in (tmp_path / "r/events.jsonl").open()]
    assert [event["kind"] for event in events] == ["started", "failed"]


def test_lock_of_a_run_is_released_although_a_forked_process_lives(tmp_path):
    run = RunDirectory(tmp_path / "r")
    release, hold = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(hold)
        os.read(release, 1)
        os._exit(0)
    try:
        assert is_in_use(tmp_path / "r")
        run.close()
        assert not is_in_use(tmp_path / "r")
    finally:
        os.close(hold)
        os.waitpid(pid, 0)


def test_environment_instance_is_copied():
    env = gym.make("CartPole-v1", max_episode_steps=7)
    with A2C(env, **SMALL) as algorithm:
        algorithm.learn(128, run_dir=None, progress=False)
        assert algorithm.last_result["episode_len_mean"] <= 7
        assert algorithm.evaluate(episodes=3)["episode_len_mean"] <= 7
    assert env.unwrapped.state is None  # never reset itself


def test_environments_that_cannot_be_copied_are_rejected():
    class Locked(gym.Env):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle 'Lock'")

        def reset(self, **kwargs): ...

        def step(self, action): ...

    with A2C(Locked()) as algorithm, pytest.raises(ConfigError, match="cannot be copied"):
        algorithm.train()
    with (
        A2C(gym.make("CartPole-v1"), env_config={"a": 1}) as algorithm,
        pytest.raises(ConfigError, match="takes no arguments"),
    ):
        algorithm.train()


def test_run_without_new_limits_continues_to_its_own(tmp_path, capsys):
    run_dir = tmp_path / "r"
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, stop={"training_iteration": 9}, run_dir=run_dir, progress=False)
        algorithm.learn()
    assert "already reached: 64 env steps" in capsys.readouterr().out
    with A2C.from_checkpoint(run_dir) as algorithm:
        algorithm.learn(128, progress=False)
    (run_dir / "result.json").write_text("")  # the checkpoint knows its env steps itself
    with A2C.from_checkpoint(run_dir) as algorithm:
        algorithm.learn()
        assert "already reached: 128 env steps" in capsys.readouterr().out
        assert algorithm.iteration == 2


def test_new_limits_of_a_resumed_run_are_its_own_from_then_on(tmp_path, capsys):
    run_dir = tmp_path / "r"
    percent = {"lr": [("0%", 1e-3), ("100%", 0.0)]}
    with A2C("CartPole-v1", **SMALL, **percent) as algorithm:
        algorithm.learn(64, run_dir=run_dir, progress=False)
    assert main(["resume", str(run_dir), "--stop-timesteps", "128"]) == 0
    capsys.readouterr()
    assert main(["resume", str(run_dir)]) == 0
    assert "already reached: 128 env steps" in capsys.readouterr().out
    with A2C.from_checkpoint(run_dir) as algorithm:
        algorithm.learn(256, progress=False)
    settings = json.loads((run_dir / "config.json").read_text())
    assert settings["total_timesteps"] == 256
    rates = [
        json.loads(line)["learners"]["default_policy"]["cur_lr"]
        for line in (run_dir / "result.json").read_text().splitlines()
    ]
    assert rates[-2:] == [pytest.approx(1e-3 * 128 / 256), pytest.approx(1e-3 * 64 / 256)]
    assert main(["resume", str(run_dir)]) == 0
    assert "already reached: 256 env steps" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", '{"timesteps": "many"}', '{"speed": 1}'])
def test_damaged_limits_of_a_run_are_rejected(tmp_path, text):
    run_dir = tmp_path / "r"
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(64, run_dir=run_dir, progress=False)
        (run_dir / "stop.json").write_text(text)
        with pytest.raises(ConfigError, match=r"stop\.json"):
            algorithm.learn()


def test_training_without_a_run_directory_says_why_it_ended(capsys):
    with PPO("CartPole-v1", train_batch_size=64, sgd_minibatch_size=32) as algorithm:
        algorithm.learn(stop={"episodes_total": 1, "time_total_s": 1000}, run_dir=None)
    assert re.search(r"reached: episodes_total \d+ >= 1, after", capsys.readouterr().out)


def test_start_line_names_the_environment_of_a_partial_and_a_large_first_batch(capsys):
    env = functools.partial(functools.partial(make_cart_pole), render=False)
    with PPO(env, train_batch_size=64, sgd_minibatch_size=32) as algorithm:
        algorithm.learn(10, run_dir=None)
    expected = "training PPO on make_cart_pole until 10 env steps (the first train batch has 64)"
    assert expected in capsys.readouterr().out
    percent = {"lr": [("0%", 1e-3), ("100%", 0.0)]}
    with PPO(env, train_batch_size=64, sgd_minibatch_size=32, **percent) as algorithm:
        algorithm.learn(10, run_dir=None)
    expected = "10 env steps (where schedules in percent end; the first train batch has 64); no run"
    assert expected in capsys.readouterr().out
    settings = {"train_batch_size": 64, "sgd_minibatch_size": 32}
    with PPO(env, min_sample_timesteps_per_iteration=128, **settings) as algorithm:
        algorithm.learn(10, run_dir=None)
    assert "10 env steps (an iteration has at least 128); no run" in capsys.readouterr().out


def make_cart_pole(render):
    return gym.make("CartPole-v1")


class Endless(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


class FailsAlways(Endless):
    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            raise OSError("the simulator is gone")
        return super().step(action)


class ReportsFlag(DefaultCallbacks):
    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["solved"] = 0.0

    def on_train_result(self, *, algorithm, result, **kwargs):
        result["done"] = False


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("solved_mean", "Did you mean 'custom_metrics/solved_mean'?"),
        ("custom_metrics/solved", "Did you mean 'custom_metrics/solved_mean'?"),
    ],
)
def test_custom_metric_that_was_meant_is_named(metric, message, capsys):
    with A2C("CartPole-v1", **SMALL, callbacks_class=ReportsFlag) as algorithm:
        stop = {metric: 1.0, "training_iteration": 4}
        algorithm.learn(stop=stop, run_dir=None, progress=False)
    assert capsys.readouterr().err.count(message) == 1


@pytest.mark.parametrize("known", ["custom_metrics/solved_mean", "evaluation/custom_metrics/a"])
def test_hints_for_custom_metrics_stay_in_their_group(known):
    assert metric_hint("solved", [known]) == (
        " Did you mean 'custom_metrics/solved_mean'?" if known.startswith("custom") else ""
    )
    hint = metric_hint("evaluation/a", [known])
    assert ("evaluation/custom_metrics/a" in hint) == known.startswith("evaluation")


def test_result_without_custom_metrics_is_no_error():
    pending = PendingMetrics(StopRules(metrics=[("custom_metrics/a", ">=", 1.0)]), None)
    pending.check({"learners": {}, "custom_metrics": None})


def test_total_that_the_caller_changes_is_kept(tmp_path):
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(stop={"training_iteration": 1}, run_dir=tmp_path / "r", progress=False)
    changes = {"total_timesteps": 192, "lr": [("0%", 1e-3), ("100%", 0.0)]}
    with A2C.from_checkpoint(tmp_path / "r", config=changes) as algorithm:
        algorithm.learn(stop={"training_iteration": 9}, progress=False)
        assert algorithm.env_steps == 192


def test_flag_as_a_metric_says_how_to_convert_it():
    with (
        A2C("CartPole-v1", **SMALL, callbacks_class=ReportsFlag) as algorithm,
        pytest.raises(ConfigError, match=r"'done' is a bool, not a number: set it to float"),
    ):
        algorithm.learn(stop={"done": 1}, run_dir=None, progress=False)


def test_limit_of_schedules_in_percent_holds_with_another_stop_rule(tmp_path, capsys):
    settings = {**SMALL, "lr": [("0%", 1e-3), ("100%", 0.0)]}
    with A2C("CartPole-v1", **settings) as algorithm:
        algorithm.learn(128, run_dir=tmp_path / "r")
    with A2C.from_checkpoint(tmp_path / "r") as algorithm:
        algorithm.learn(stop={"episode_reward_mean": 500})
        assert algorithm.env_steps == 128  # the learning rate is 0 afterwards
        assert "schedules in percent end there" in capsys.readouterr().out


def test_end_of_a_run_counts_environment_failures(capsys):
    with PPO(FailsAlways, train_batch_size=64, sgd_minibatch_size=64, num_envs_per_worker=16) as a:
        a.learn(64, run_dir=None)
    assert "80 environment failures: see the warnings above" in capsys.readouterr().out


def test_end_of_a_run_counts_restarts_of_workers():
    result = {"num_env_restarts": 2, "num_remote_worker_restarts": 1}
    config = SimpleNamespace(samples=True, evaluation_interval=None)
    algorithm = SimpleNamespace(last_result=result, config=config, iteration=1)
    text = describe_end(RunEnd("1 iteration", 0, None, 1.0, False), algorithm)
    assert "2 environment failures and 1 worker restart: see the warnings above" in text


def test_end_of_a_run_without_episodes_names_a_limit(capsys):
    with PPO(Endless, train_batch_size=64, sgd_minibatch_size=64) as algorithm:
        algorithm.learn(64, run_dir=None)
    assert "No episode has ended, so there are no returns" in capsys.readouterr().out


def test_end_of_a_run_says_that_no_evaluation_took_place(capsys):
    settings = {"train_batch_size": 64, "sgd_minibatch_size": 64, "evaluation_interval": 2}
    with PPO("CartPole-v1", **settings) as algorithm:
        algorithm.learn(64, run_dir=None)
        message = "No evaluation took place: evaluation_interval is 2, and the training had 1 iter"
        assert message in capsys.readouterr().out
        algorithm.learn(192, run_dir=None)  # the last iteration, the third, has no evaluation
        assert "No evaluation took place" not in capsys.readouterr().out


def test_end_of_an_offline_run_names_the_last_evaluation(tmp_path, capsys):
    require_extra("offline")
    small = {"train_batch_size": 64, "sgd_minibatch_size": 64, "output": str(tmp_path)}
    with PPO("CartPole-v1", **small) as algorithm:
        algorithm.train()
    settings = {"input_": str(tmp_path), "train_batch_size": 32}
    settings["min_sample_timesteps_per_iteration"] = 32
    with BC("CartPole-v1", **settings) as algorithm:
        algorithm.learn(32, run_dir=None)
    out = capsys.readouterr().out
    assert "reached: 32 env steps" in out
    assert "No episode" not in out
    settings |= {"evaluation_interval": 1, "evaluation_duration": 1}
    with BC("CartPole-v1", **settings) as algorithm:
        algorithm.learn(32, run_dir=None)
    assert "Mean return of the last evaluation: " in capsys.readouterr().out


class InterruptAtEnd(DefaultCallbacks):
    """Sends SIGINT while the result of the last iteration is made."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        if result["timesteps_total"] >= 128:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_the_last_iteration_is_not_lost(tmp_path):
    with (
        A2C("CartPole-v1", **SMALL, callbacks_class=InterruptAtEnd) as algorithm,
        pytest.raises(KeyboardInterrupt),
    ):
        algorithm.learn(128, run_dir=tmp_path / "r", progress=False)
    assert read_steps(tmp_path / "r") == [64, 128]
    assert (tmp_path / "r" / "checkpoints" / "000002").is_dir()


def test_ctrl_c_during_the_last_checkpoint_is_not_lost(tmp_path, monkeypatch):
    save = A2C.save

    def interrupted(algorithm, *args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return save(algorithm, *args, **kwargs)

    monkeypatch.setattr(A2C, "save", interrupted)
    with A2C("CartPole-v1", **SMALL) as algorithm, pytest.raises(KeyboardInterrupt):
        algorithm.learn(64, run_dir=tmp_path / "r", progress=False)
    assert (tmp_path / "r" / "checkpoints" / "000001").is_dir()


class QuitDebugger(DefaultCallbacks):
    """Leaves the debugger in the second iteration."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        if result["training_iteration"] == 2:
            raise BdbQuit


def test_leaving_the_debugger_ends_the_run_like_ctrl_c(tmp_path, capsys):
    with (
        A2C("CartPole-v1", **SMALL, callbacks_class=QuitDebugger) as algorithm,
        pytest.raises(KeyboardInterrupt),
    ):
        algorithm.learn(640, run_dir=tmp_path / "r")
    assert "stopped: interrupted" in capsys.readouterr().out
    assert (tmp_path / "r" / "checkpoints" / "000002").is_dir()


class QuitInStep(gym.Env):
    """Its code stops in the debugger, which the user leaves in the 100th step."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 100:
            raise BdbQuit
        return np.zeros(1, np.float32), 0.0, self.steps % 10 == 0, False, {}


def test_leaving_the_debugger_in_an_environment_ends_the_run(tmp_path):
    with A2C(QuitInStep, **SMALL) as algorithm, pytest.raises(KeyboardInterrupt):
        algorithm.learn(6400, run_dir=tmp_path / "r", progress=False)
    assert (tmp_path / "r" / "checkpoints").is_dir()


class FailInTraining(DefaultCallbacks):
    """Fails in the second iteration."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        if result["training_iteration"] == 2:
            raise ValueError("the real problem")


def test_failing_checkpoint_does_not_hide_the_error_of_the_training(tmp_path, monkeypatch, caplog):
    def fail(algorithm, *args, **kwargs):
        raise RuntimeError("no state")

    with A2C("CartPole-v1", **SMALL, callbacks_class=FailInTraining) as algorithm:
        monkeypatch.setattr(A2C, "save", fail)
        with pytest.raises(ValueError, match="the real problem"):
            algorithm.learn(128, run_dir=tmp_path / "r", progress=False)
    assert "no checkpoint after the error: RuntimeError: no state" in caplog.text


class RestoreOnce(DefaultCallbacks):
    """Goes back to a checkpoint after the third iteration."""

    def on_train_result(self, *, algorithm, result, **kwargs):
        if result["training_iteration"] == 3 and not getattr(algorithm, "restored", False):
            algorithm.restored = True
            algorithm.restore(algorithm.run_dir / "checkpoints" / "000001")


def test_callback_may_restore_a_checkpoint(tmp_path):
    settings = {"checkpoint_frequency": 1, "checkpoint_num_to_keep": 9}
    with A2C("CartPole-v1", **SMALL, **settings, callbacks_class=RestoreOnce) as algorithm:
        algorithm.learn(256, run_dir=tmp_path / "r", progress=False)
        assert algorithm.restored
        assert algorithm.env_steps == 256


class FailOnce(gym.Wrapper):
    fails = False

    def step(self, action):
        if FailOnce.fails:
            raise AttributeError("a mistake")
        return super().step(action)


def test_result_before_a_failing_iteration_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(FailOnce, "fails", False)
    make = lambda context: FailOnce(gym.make("CartPole-v1"))  # noqa: E731
    with A2C(make, **SMALL, max_num_env_restarts=0) as algorithm:
        algorithm.learn(128, run_dir=tmp_path / "r", progress=False)
        monkeypatch.setattr(FailOnce, "fails", True)
        with pytest.raises(Exception, match="a mistake"):
            algorithm.learn(256, progress=False)
    assert read_steps(tmp_path / "r") == [64, 128]


def test_limit_on_iterations_keeps_the_total_of_schedules(tmp_path):
    with A2C("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(128, run_dir=tmp_path / "r", progress=False)
        algorithm.learn(stop={"training_iteration": 3}, progress=False)
        assert algorithm.workers.global_vars["total_timesteps"] == 128
    settings = json.loads((tmp_path / "r" / "config.json").read_text())
    assert settings["total_timesteps"] == 128


@pytest.mark.parametrize("stop", [[], "", 5])
def test_limits_of_another_type_are_rejected(stop):
    with A2C("CartPole-v1", **SMALL) as algorithm, pytest.raises(ConfigError, match="must map"):
        algorithm.learn(stop=stop, run_dir=None)


def test_limits_may_be_numpy_numbers_and_names_may_have_spaces():
    limits = {"a": np.int64(5), "b<=": np.float32(0.5), "my score >=": 2}
    assert metric_rules(limits) == [("a", ">=", 5), ("b", "<=", 0.5), ("my score", ">=", 2)]
    with pytest.raises(ConfigError, match="a: must be a finite number"):
        metric_rules({"a": np.nan})


def test_schedules_in_percent_continue_with_the_total_of_the_training():
    schedule = [["0%", 1e-3], ["100%", 0]]
    settings = {"train_batch_size": 100, "rollout_fragment_length": 100, "lr": schedule}
    with A2C("CartPole-v1", **settings) as algorithm:
        algorithm.learn(1000, stop={"training_iteration": 2}, run_dir=None, progress=False)
        algorithm.learn(stop={"training_iteration": 4}, run_dir=None, progress=False)
        assert algorithm.workers.global_vars["total_timesteps"] == 1000
        algorithm.learn(stop={"training_iteration": 40}, run_dir=None, progress=False)
        assert algorithm.env_steps == 1000  # where the schedule ends


def test_learn_that_does_not_train_keeps_the_total_of_schedules(tmp_path, capsys):
    settings = {**SMALL, "lr": [("0%", 1e-3), ("100%", 0.0)], "total_timesteps": 10_000}
    with A2C("CartPole-v1", **SMALL) as other:
        other.learn(64, run_dir=tmp_path / "r", progress=False)
    with A2C("CartPole-v1", **settings) as algorithm:
        algorithm.train()
        algorithm.train()
        algorithm.learn(100, run_dir=None)
        assert "already reached: 128 env steps" in capsys.readouterr().out
        with pytest.raises(ConfigError):
            algorithm.learn(200, run_dir=tmp_path / "r")
        rate = algorithm.train()["learners"]["default_policy"]["cur_lr"]
    assert rate == pytest.approx(1e-3 * (1 - 128 / 10_000))


def test_run_keeps_the_total_of_its_settings_without_a_limit_on_env_steps(tmp_path):
    with A2C("CartPole-v1", **SMALL, total_timesteps=10_000) as algorithm:
        algorithm.learn(stop={"training_iteration": 1}, run_dir=tmp_path / "r", progress=False)
    assert json.loads((tmp_path / "r/config.json").read_text())["total_timesteps"] == 10_000


def test_checkpoint_that_the_program_writes_keeps_the_score_of_the_run(tmp_path):
    settings = {**SMALL, "checkpoint_score_attribute": "training_iteration"}
    with A2C("CartPole-v1", **settings) as algorithm:
        algorithm.learn(64, run_dir=tmp_path / "r", progress=False)
        path = algorithm.save()
        assert read_manifest(path)["score"] == 1
        algorithm.train()
        assert "score" not in read_manifest(algorithm.save())


def test_evaluation_that_reaches_the_limit_is_the_last_one(tmp_path, monkeypatch):
    with A2C("CartPole-v1", **SMALL, evaluation_interval=1) as algorithm:
        evaluator = algorithm._evaluator
        evaluation = {"episode_reward_mean": 100.0, "training_iteration": 1}
        monkeypatch.setattr(evaluator, "evaluate_if_due", lambda *_: evaluation)
        later = {"episode_reward_mean": -12.0, "training_iteration": 2}
        monkeypatch.setattr(evaluator, "finish", lambda: later)
        stop = {"evaluation/episode_reward_mean": 50}
        algorithm.learn(stop=stop, run_dir=tmp_path / "r", progress=False)
    (line,) = (tmp_path / "r/result.json").read_text().splitlines()
    assert json.loads(line)["evaluation"] == evaluation
