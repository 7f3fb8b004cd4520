"""Run directories: their owner, damaged files, and results after failures."""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

from flowrl.algorithms.ppo import PPO, PPOConfig
from flowrl.data.checkpoint import (
    list_checkpoints,
    read_manifest,
    resolve_checkpoint,
    write_checkpoint,
)
from flowrl.errors import ConfigError
from flowrl.trainer.runs import run_directory
from flowrl.trainer.runs.result_files import result_to_json
from flowrl.trainer.runs.run_directory import RunDirectory
from flowrl.trainer.runs.saved_run import last_intact_checkpoint, read_config, settings_to_json
from tests.cli.helpers import ALGORITHM_FILE, ENVIRONMENT_PLAN, TWO_ITERATIONS, read_results


def test_run_without_a_checkpoint_cannot_be_resumed_but_overwritten(cli, tmp_path):
    cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS)
    shutil.rmtree(tmp_path / "r/checkpoints")
    code, _, err = cli("train", "--resume", "r")
    assert code == 2
    assert "has no checkpoint" in err
    assert cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS)[0] == 0


@pytest.mark.parametrize(
    "command",
    ["resume r", "evaluate r", "evaluate r --checkpoint 5", "evaluate r --checkpoint best"],
)
def test_run_in_use_without_a_checkpoint_is_named(cli, tmp_path, command):
    cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS)
    shutil.rmtree(tmp_path / "r/checkpoints")
    for in_use in (True, False):
        run = RunDirectory(tmp_path / "r") if in_use else None
        code, _, err = cli(*command.split())
        if run is not None:
            run.close()
        assert code == 2
        assert ("in use by another process and has no checkpoint yet" in err) == in_use
        assert ("this run has no checkpoint" in err) != in_use


@pytest.mark.parametrize("name", ["config.json", "checkpoints/000002/state"])
def test_damaged_run_is_rejected(cli, tmp_path, name):
    cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS)
    (path,) = (tmp_path / "r").glob(f"{name}*")
    path.write_text("{")
    for command in (["evaluate", "r"], ["train", "--resume", "r"]):
        code, _, err = cli(*command)
        assert code in (1, 2)
        assert name.split("/")[-1] in err
        assert "Traceback" not in err


def test_new_run_does_not_overwrite_a_run(cli):
    assert cli("train", "ppo", "--run-dir", "my run", *TWO_ITERATIONS)[0] == 0
    code, _, err = cli("train", "ppo", "--run-dir", "my run", *TWO_ITERATIONS)
    assert code == 2
    assert "my run contains a run" in err
    assert re.search(r"`flowrl resume '.*my run'`", err)


def test_run_directory_with_other_files_or_in_use_is_rejected(cli, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    code, _, err = cli("train", "ppo", "--run-dir", "mine", *TWO_ITERATIONS)
    assert code == 2
    assert "not empty and contains no run" in err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]

    assert cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS)[0] == 0
    locked = RunDirectory(tmp_path / "r", resume=True)
    for words, advice in (
        (["--resume", "r", "--stop-iters", "3"], "which must end first"),
        (["ppo", "--run-dir", "r"], "choose another folder"),
    ):
        code, _, err = cli("train", *words)
        assert code == 2
        assert f"in use by another process, {advice}" in err
    locked.close()
    assert cli("train", "--resume", "r", "--stop-iters", "3")[0] == 0


def test_run_starts_while_another_process_looks_at_its_directory(tmp_path, monkeypatch):
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_SH)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            os.close(folder)

    monkeypatch.setattr(run_directory, "LOCK_WAIT_S", 60)
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=sleep)
    monkeypatch.setattr(run_directory, "time", clock)
    RunDirectory(tmp_path).close()
    assert len(waits) == 2


def test_run_that_failed_without_a_checkpoint_can_be_repeated(cli, tmp_path):
    (tmp_path / "fails.py").write_text(
        '"""Fails until the file `ok` exists."""\n'
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
    code, _, err = cli("train", "fails.py", "--run-dir", "r", "--stop-iters", "1")
    assert code == 1
    assert "OSError: not yet" in err
    (tmp_path / "ok").touch()
    assert cli("train", "fails.py", "--run-dir", "r", "--stop-iters", "1")[0] == 0


def test_incomplete_lines_of_results_are_removed(cli, tmp_path):
    assert cli("train", "ppo", "--run-dir", "r", *TWO_ITERATIONS)[0] == 0
    with open(tmp_path / "r/result.json", "a") as file:
        file.write('{"training_it')
    (tmp_path / "r/progress.csv").write_bytes(b"\xff\n3,40")
    assert cli("train", "--resume", "r", "--stop-iters", "3")[0] == 0
    assert [r["training_iteration"] for r in read_results(tmp_path / "r")] == [1, 2, 3]
    lines = (tmp_path / "r/progress.csv").read_text().splitlines()
    assert len(lines) == 4
    assert len({line.count(",") for line in lines}) == 1


def test_failing_evaluation_keeps_the_result(cli, tmp_path):
    (tmp_path / "mine.py").write_text(
        ALGORITHM_FILE + "import gymnasium as gym\n"
        "class StepFails(gym.Wrapper):\n"
        "    def step(self, action):\n"
        "        raise ArithmeticError('on purpose')\n"
        "config = config.updated(evaluation_interval=2, max_num_env_restarts=0,\n"
        "    checkpoint_score_attribute='training_iteration', evaluation_config={\n"
        "    'env': lambda context: StepFails(gym.make('CartPole-v1')),\n"
        "    'max_num_env_restarts': 0})\n"
    )
    code, _, err = cli("train", "mine.py", "--stop-iters", "4", "--run-dir", "r")
    assert code == 1
    assert "on purpose" in err
    assert [r["training_iteration"] for r in read_results(tmp_path / "r")] == [1, 2]
    (path,) = list_checkpoints(tmp_path / "r")
    assert read_manifest(path)["score"] == 2
    assert err.splitlines()[-1].split() == ["resume:", "flowrl", "resume", "r", "--trust"]


def test_env_config_that_resembles_code_is_kept(tmp_path):
    settings = settings_to_json({"env_config": {"code": 3}})
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_config(tmp_path) == {"env_config": {"code": 3}}


def test_checkpoints_are_ordered_by_number(tmp_path):
    for name in ("1000000", "999998", "999999"):
        write_checkpoint(tmp_path / "checkpoints" / name, {}, {})
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["999998", "999999", "1000000"]
    newest = tmp_path / "checkpoints/1000000"
    assert resolve_checkpoint(tmp_path) == newest
    assert last_intact_checkpoint(tmp_path, newest).name == "999999"


def test_progress_gets_columns_of_later_results(tmp_path):
    run = RunDirectory(tmp_path / "r")
    run.write({"timesteps_total": 1})
    run.write({"timesteps_total": 2, "info": {"loss": 0.5}})
    run.write({"timesteps_total": 3})
    run.close()
    lines = (tmp_path / "r/progress.csv").read_text().splitlines()
    assert lines == ["timesteps_total,info/loss", "1,", "2,0.5", "3,"]


def test_rejected_run_directory_stops_the_algorithm(cli, tmp_path, monkeypatch):
    from flowrl.trainer.algorithm import Algorithm

    stopped = []
    stop = Algorithm.stop
    monkeypatch.setattr(Algorithm, "stop", lambda self: (stopped.append(self), stop(self)))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert cli("train", "ppo", "--run-dir", "full", *TWO_ITERATIONS)[0] == 2
    assert len(stopped) == 1


@pytest.mark.parametrize("path", ["results", "runs/../results"])
def test_folder_that_existed_is_never_removed(tmp_path, path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty") as caught:
        RunDirectory(tmp_path / path)
    assert str(caught.value).count("run_dir:") == 1
    assert (tmp_path / "results/notes.txt").read_text() == "mine"


def test_folder_that_cannot_be_written_completely_is_removed(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunDirectory(tmp_path / "run")
    with PPOConfig(env="CartPole-v1").build() as algorithm:
        algorithm.plan.explain()
        monkeypatch.setattr(run_directory, "write_whole", full)
        with pytest.raises(ConfigError, match="No space left"):
            run.write_setup(algorithm, None, [], {})
    run.close()
    assert not (tmp_path / "run").exists()


def test_folder_name_that_is_too_long_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        RunDirectory(tmp_path / ("a" * 300))


def test_new_run_removes_the_files_of_the_run_that_it_overwrites(tmp_path):
    path = tmp_path / "r"
    result = {"training_iteration": 1, "timesteps_total": 64, "date": "", "learners": {}}
    run = RunDirectory(path)
    (path / "config.json").write_text("{}")
    run.write(result)
    run.close()
    old = ("activity.jsonl", "trace.json", "report.html", "journal.msgpack")
    for name in old:
        (path / name).write_text("old")
    events = list(path.glob("events.out.tfevents.*"))
    assert events
    run = RunDirectory(path)
    run.close()
    assert not [name for name in old if (path / name).exists()]
    assert not list(path.glob("events.out.tfevents.*"))
    assert len((path / "events.jsonl").read_text().splitlines()) == 1


def test_runs_that_start_at_the_same_time_have_folders_of_their_own(tmp_path):
    runs = [RunDirectory(tmp_path / "r", unique=True) for _ in range(3)]
    assert [run.path.name for run in runs] == ["r", "r-2", "r-3"]
    for run in runs:
        run.close()


@pytest.mark.parametrize("order", ["max", "min"])
def test_checkpoint_that_is_saved_without_a_new_result_keeps_its_score(tmp_path, order):
    score_name = "episode_reward_mean"
    settings = {"checkpoint_score_attribute": score_name, "checkpoint_score_order": order}
    with PPO("CartPole-v1", checkpoint_num_to_keep=1, **settings) as algorithm:
        run = RunDirectory(tmp_path / "r")
        for iteration, score in ((1, 5.0), (2, 5.0 if order == "max" else 7.0)):
            algorithm.iteration = iteration
            run.save(algorithm, {score_name: score})
        algorithm.iteration = 1
        path = run.save(algorithm)
        run.close()
    assert read_manifest(path)["score"] == 5.0


def test_old_checkpoint_that_cannot_be_removed_is_reported_once(tmp_path, monkeypatch, capsys):
    def fails(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(run_directory, "remove_checkpoint", fails)
    with PPO("CartPole-v1", checkpoint_num_to_keep=1) as algorithm:
        run = RunDirectory(tmp_path / "r")
        for algorithm.iteration in (1, 2, 3):
            assert run.save(algorithm) is not None
        run.close()
    assert len(list_checkpoints(tmp_path / "r")) == 3
    assert capsys.readouterr().err.count("cannot remove the old checkpoint") == 1


def test_settings_with_keys_that_json_does_not_have_are_written_as_text(tmp_path):
    settings = {(0, 0): "wall", np.int64(3): 1, "a": {None: 2}}
    text = json.dumps(settings_to_json({"env_config": settings}))
    assert json.loads(text)["env_config"] == {"(0, 0)": "wall", "3": 1, "a": {"None": 2}}


def test_folder_of_a_process_that_ended_before_it_wrote_its_settings_can_be_used(tmp_path):
    RunDirectory(tmp_path / "r").close()
    (tmp_path / "r/checkpoints/000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="contains no run"):
        RunDirectory(tmp_path / "r")
    shutil.rmtree(tmp_path / "r/checkpoints")
    RunDirectory(tmp_path / "r").close()
    (tmp_path / "r/result.json").write_text("mine")
    with pytest.raises(ConfigError, match="contains no run"):
        RunDirectory(tmp_path / "r")
    (tmp_path / "s").mkdir()
    (tmp_path / "s/.result.json").touch()  # the process ended in its first write
    RunDirectory(tmp_path / "s").close()


def test_incomplete_checkpoints_of_a_killed_process_are_removed(tmp_path):
    run = RunDirectory(tmp_path / "r")
    (run.path / "config.json").write_text("{}")
    run.close()
    (tmp_path / "r/checkpoints/000007").mkdir(parents=True)
    RunDirectory(tmp_path / "r").close()
    assert not list((tmp_path / "r/checkpoints").iterdir())


def test_links_are_replaced_and_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    run = RunDirectory(tmp_path / "r")
    for name in ("config.json", "plan.py"):
        (run.path / name).symlink_to(target)
    with PPO("CartPole-v1") as algorithm:
        run.write_setup(algorithm, None, [], {})
        (run.path / "plan.py").unlink()
        (run.path / "plan.py").symlink_to(target)
        run.replace_plan(algorithm)
    run.close()
    assert target.read_text() == "mine"
    (run.path / "activity.jsonl").symlink_to(target)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        RunDirectory(run.path, resume=True)


def test_replaced_results_get_an_unused_number(tmp_path):
    run = RunDirectory(tmp_path / "r")
    (run.path / "replaced-2" / "checkpoints").mkdir(parents=True)
    (run.path / "checkpoints" / "000005").mkdir(parents=True)
    (run.path / "checkpoints" / "000005" / "manifest.json").write_text("{}")
    kept, _ = run.truncate(3)
    run.close()
    assert kept.name == "replaced-3"
    assert (kept / "checkpoints" / "000005").is_dir()


def test_keys_of_results_are_strings_or_numbers():
    assert result_to_json({np.int64(1): {2: 3.0}}) == {"1": {"2": 3.0}}
    with pytest.raises(
        TypeError, match=r"the result has in 'a' the key \(1, 2\): keys must be strings"
    ):
        result_to_json({"a": {(1, 2): 1.0}})


def test_error_of_an_environment_that_cannot_be_created_ends_an_evaluation(cli, tmp_path):
    plan = tmp_path / "short_env.py"
    plan.write_text(ENVIRONMENT_PLAN)
    assert cli("train", "short_env.py", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    plan.write_text(
        ENVIRONMENT_PLAN.replace(
            "    fails = False", "    def __init__(self):\n        raise OSError('no simulator')"
        )
    )
    code, _, err = cli("evaluate", "r", "--trust", "--episodes", "1")
    assert code == 1
    assert "OSError: no simulator" in err
