"""`flowrl resume`: schedules of a run with a larger limit, plans, older checkpoints."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl import Algorithm
from flowrl.offline.parquet import parquet_files, read_parquet
from flowrl.policies.torch_policy import TorchPolicy
from flowrl.trainer.runs.result_files import event_files
from tests.cli.helpers import ENVIRONMENT_PLAN, SEEDED, read_results, read_settings
from tests.extras import require_extra


def learning_rates(run_dir):
    """Return env steps -> learning rate of the last update, that of the start of its batch."""
    return {
        result["timesteps_total"]: result["learners"]["default_policy"]["cur_lr"]
        for result in read_results(run_dir)
    }


def scheduled(share):
    """Return the tuned learning rate for CartPole after a share of the run."""
    return float(np.interp(share, [0, 0.25, 1], [3e-3, 1e-3, 0]))


def test_schedule_in_percent_follows_a_larger_limit(cli, tmp_path):
    assert cli("train", "ppo", *SEEDED, "--stop-timesteps", "128", "--run-dir", "r")[0] == 0
    rates = learning_rates(tmp_path / "r")
    assert rates == {64: pytest.approx(scheduled(0)), 128: pytest.approx(scheduled(0.5))}
    code, out, _ = cli("resume", "r", "--stop-iters", "9")
    assert code == 0
    assert "already reached: 128 env steps. Schedules in percent" in out
    assert "set a larger --stop-timesteps" in out
    code, out, err = cli("resume", "r", "--stop-timesteps", "512")
    assert code == 0, err
    assert "repeat:" not in out  # the first command ends at other limits
    rates = learning_rates(tmp_path / "r")
    for steps in range(192, 513, 64):
        assert rates[steps] == pytest.approx(scheduled((steps - 64) / 512))


def test_resumed_run_with_its_own_limits_is_identical(cli, tmp_path):
    limits = ["--total-timesteps", "512", "--stop-timesteps", "256"]
    assert cli("train", "ppo", *SEEDED, *limits, "--run-dir", "r")[0] == 0
    assert cli("train", "ppo", *SEEDED, *limits, "--stop-iters", "2", "--run-dir", "s")[0] == 0
    code, _, err = cli("resume", "s", "--stop-timesteps", "256")
    assert code == 0, err
    losses = [[r["learners"] for r in read_results(tmp_path / name)] for name in "rs"]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("new_limit", "new_total"), [("256", 512), ("1024", 1024)])
def test_total_that_was_not_the_limit_only_grows(cli, tmp_path, new_limit, new_total):
    flags = ["--total-timesteps", "512", "--stop-timesteps", "64", "--run-dir", "r"]
    assert cli("train", "ppo", *SEEDED, *flags)[0] == 0
    assert read_settings(tmp_path / "r")["total_timesteps"] == 512
    assert cli("resume", "r", "--stop-timesteps", new_limit)[0] == 0
    rate = learning_rates(tmp_path / "r")[128]
    assert rate == pytest.approx(scheduled(64 / new_total))


def test_newer_checkpoints_are_kept_when_an_older_one_is_resumed(cli, tmp_path):
    flags = ["--checkpoint-frequency", "1", "--checkpoint-num-to-keep", "9", "--run-dir", "r"]
    assert cli("train", "ppo", *SEEDED, *flags, "--stop-iters", "4")[0] == 0
    before = read_results(tmp_path / "r")
    code, out, err = cli("resume", "r/checkpoints/000002", "--stop-iters", "3")
    assert code == 0, err
    assert re.search(r"checkpoints and results after iteration 2 are kept in .*r/replaced-1", out)
    assert [result["training_iteration"] for result in read_results(tmp_path / "r")] == [1, 2, 3]
    assert read_results(tmp_path / "r/replaced-1") == before
    assert len(event_files(tmp_path / "r/replaced-1")) == 1
    kept = sorted(path.name for path in (tmp_path / "r/replaced-1/checkpoints").iterdir())
    assert kept == ["000003", "000004"]
    assert cli("evaluate", "r/replaced-1/checkpoints/000004", "--episodes", "1")[0] == 0


@pytest.mark.parametrize("command", ["resume", "evaluate"])
def test_checkpoint_of_another_algorithm_is_named(cli, tmp_path, command):
    for plan in ("ppo", "dqn"):
        stop = ["--stop-timesteps", "64", "--run-dir", plan, "--env", "CartPole-v1"]
        assert cli("train", plan, *stop, "--min-sample-timesteps-per-iteration", "64")[0] == 0
    (checkpoint,) = (tmp_path / "ppo/checkpoints").iterdir()
    checkpoint.rename(tmp_path / "dqn/checkpoints/000099")
    code, _, err = cli(command, "dqn")
    assert code == 2
    assert "checkpoints/000099 was written by flowrl.algorithms.ppo:PPO, but the run" in err


def test_settings_of_a_changed_plan_file_are_not_used_and_named(cli, tmp_path):
    plan = tmp_path / "mine.py"
    plan.write_text(ENVIRONMENT_PLAN)
    assert cli("train", "mine.py", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    code, _, err = cli("resume", "r", "--plan", "mine.py", "--stop-iters", "2")
    assert (code, err) == (0, "")
    plan.write_text(ENVIRONMENT_PLAN.replace("train_batch_size=20", "train_batch_size=40"))
    code, _, err = cli("resume", "r", "--plan", "mine.py", "--stop-iters", "3")
    assert code == 0
    assert "mine.py: the run keeps its own settings train_batch_size=20; to change train" in err
    changes = {"train_batch_size": 40, "plan": "mine.py"}
    assert f"Algorithm.from_checkpoint('r', config={changes!r})" in err
    with Algorithm.from_checkpoint("r", config=changes) as algorithm:
        assert algorithm.config.train_batch_size == 40


def test_settings_that_a_resumed_run_cannot_change_are_named_without_a_remedy(cli, tmp_path):
    plan = tmp_path / "mine.py"
    plan.write_text(ENVIRONMENT_PLAN)
    assert cli("train", "mine.py", "--stop-timesteps", "20", "--run-dir", "r")[0] == 0
    change = "train_batch_size=20, num_envs_per_worker=2, total_timesteps=900"
    plan.write_text(ENVIRONMENT_PLAN.replace("train_batch_size=20", change))
    code, out, err = cli("resume", "r", "--plan", "mine.py", "--stop-timesteps", "60")
    assert code == 0
    assert "repeat:" not in out  # the first command had other limits
    assert err == (
        "flowrl: mine.py: the run keeps its own settings num_envs_per_worker=1, because each "
        "worker and environment continues from its own state\n"
    )


def test_plan_of_another_algorithm_is_rejected(cli):
    assert cli("train", "ppo", *SEEDED, "--stop-iters", "1", "--run-dir", "r")[0] == 0
    code, _, err = cli("resume", "r", "--plan", "dqn", "--stop-iters", "2")
    assert code == 2
    assert err == "flowrl: --plan: r is of PPO, but the plan dqn is of DQN\n"


def test_checkpoint_outside_a_run_directory_starts_a_run_in_the_given_folder(cli, tmp_path):
    assert cli("train", "ppo", *SEEDED, "--stop-iters", "1", "--run-dir", "r")[0] == 0
    code, _, err = cli("resume", "r", "--run-dir", "other", "--stop-iters", "2")
    assert code == 2
    assert "--run-dir: the run continues in r" in err
    shutil.copytree(tmp_path / "r/checkpoints/000001", tmp_path / "c")
    code, _, err = cli("resume", "c", "--run-dir", "other", "--stop-iters", "2")
    assert code == 0, err
    assert [result["training_iteration"] for result in read_results(tmp_path / "other")] == [2]


def test_folder_that_does_not_exist_is_named(cli):
    code, _, err = cli("resume", "nowhere")
    assert (code, err) == (
        2, "flowrl: nowhere is not a run directory: there is no such folder\n",
    )  # fmt: skip


@pytest.mark.parametrize("command", ["resume", "evaluate", "diagnose"])
def test_folder_of_runs_names_its_newest_run(cli, tmp_path, command):
    for number, name in enumerate(("new", "old")):
        file = tmp_path / "runs" / "ppo" / name / "stop.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        os.utime(file, (1000 - number, 1000 - number))
    code, _, err = cli(command, "runs")
    assert code == 2
    assert err.endswith("it has no config.json. The newest run in it is runs/ppo/new\n")


def test_run_of_a_plan_file_is_evaluated_with_a_file(cli, tmp_path):
    (tmp_path / "mine.py").write_text(ENVIRONMENT_PLAN)
    assert cli("train", "mine.py", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    code, _, err = cli("evaluate", "r", "--episodes", "1")
    assert code == 2
    assert "pass --trust to allow it, or --plan FILE" in err
    code, out, err = cli("evaluate", "r", "--episodes", "1", "--plan", "mine.py")
    assert code == 0, err
    assert "greedy   mean return 5" in out


def test_suggested_command_trusts_code_of_the_settings(cli, tmp_path):
    (tmp_path / "my_callbacks.py").write_text(
        "from flowrl.sampling.callbacks import DefaultCallbacks\n"
        "class Mine(DefaultCallbacks):\n    pass\n"
    )
    flags = [*SEEDED, "--callbacks-class", "my_callbacks:Mine", "--run-dir", "r"]
    _, out, _ = cli("train", "ppo", *flags, "--stop-iters", "1")
    assert "resume r --trust" in out
    code, out, _ = cli("resume", "r", "--trust", "--stop-iters", "2")
    assert code == 0
    assert "resume r --trust" in out
    _, out, _ = cli("train", "ppo", *SEEDED, "--stop-iters", "1", "--run-dir", "s")
    assert "resume s" in out
    assert "--trust" not in out


def test_settings_changed_in_python_stay_changed(cli, tmp_path):
    flags = [*SEEDED, "--no-tuned", "--lr", "1e-3", "--run-dir", "r"]
    assert cli("train", "ppo", *flags, "--stop-iters", "1")[0] == 0
    changes = {"lr": 1e-6, "env_config": {"max_episode_steps": 5}}
    with Algorithm.from_checkpoint("r", config=changes) as algorithm:
        algorithm.learn(stop={"training_iteration": 2}, progress=False)
    assert json.loads((tmp_path / "r/config.json").read_text())["lr"] == 1e-6
    assert cli("resume", "r", "--stop-iters", "3")[0] == 0
    rates = [r["learners"]["default_policy"]["cur_lr"] for r in read_results(tmp_path / "r")]
    assert rates == pytest.approx([1e-3, 1e-6, 1e-6])
    code, out, _ = cli("evaluate", "r", "--episodes", "4")
    assert code == 0
    assert out.count("mean return 5.00 (min 5.00") == 2, out


CUSTOM_MODEL_PLAN = """
import torch
from flowrl.algorithms.a2c import A2CConfig
from flowrl.ops import ParallelRollouts, StandardMetricsReporting, TrainOneStep


class Network(torch.nn.Module):
    def __init__(self, obs_space, action_space, num_outputs, width=8):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, num_outputs + 1)
        )

    def forward(self, obs):
        outputs = self.layers(obs)
        return outputs[:, :-1], outputs[:, -1]


config = A2CConfig(
    env="CartPole-v1",
    train_batch_size=16,
    model={"custom_model": Network},
    env_config={"max_episode_steps": 30},
)


def execution_plan(workers, config):
    train_op = ParallelRollouts(workers).for_each(TrainOneStep(workers))
    return StandardMetricsReporting(train_op, workers, config)
"""


def test_flags_for_a_model_that_the_plan_names_are_kept(cli, tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM_MODEL_PLAN)
    flags = ["--model.custom-model-config", '{"width": 5}', "--run-dir", "r"]
    assert cli("train", "mine.py", *flags, "--stop-iters", "1")[0] == 0
    code, _, err = cli("resume", "r", "--trust", "--stop-iters", "2")
    assert (code, err) == (0, "")


def test_run_whose_plan_file_is_gone_continues_with_the_text_that_it_keeps(cli, tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM_MODEL_PLAN)
    assert cli("train", "mine.py", "--stop-iters", "1", "--run-dir", "r")[0] == 0
    (tmp_path / "mine.py").unlink()
    code, _, err = cli("resume", "r", "--trust", "--stop-iters", "2")
    assert code == 2
    assert "pass --plan r/plan.py" in err
    code, _, err = cli("resume", "r", "--plan", "r/plan.py", "--stop-iters", "2")
    assert (code, err) == (0, "")


def test_limits_of_the_run_are_not_needed_if_there_are_new_ones(cli, tmp_path):
    assert cli("train", "ppo", *SEEDED, "--stop-timesteps", "64", "--run-dir", "r")[0] == 0
    (tmp_path / "r" / "stop.json").unlink()
    code, _, err = cli("resume", "r")
    assert code == 2
    assert "cannot read stop.json" in err
    assert "give a limit" in err
    code, _, err = cli("resume", "r", "--stop-timesteps", "128")
    assert code == 0, err
    assert len(read_results(tmp_path / "r")) == 2
    assert cli("resume", "r")[0] == 0


def test_results_without_a_checkpoint_are_computed_again(cli, tmp_path):
    assert cli("train", "ppo", *SEEDED, "--stop-timesteps", "64", "--run-dir", "r")[0] == 0
    shutil.copytree("r/checkpoints/000001", "one")
    code, out, _ = cli("resume", "r", "--stop-timesteps", "256")
    assert code == 0
    assert "computed again" not in out
    shutil.rmtree("r/checkpoints")
    shutil.copytree("one", "r/checkpoints/000001")
    code, out, _ = cli("resume", "r")
    assert code == 0
    assert "there is no checkpoint after iteration 1: 3 results will be computed again" in out
    assert len(read_results(tmp_path / "r")) == 4


def test_damaged_setup_file_is_not_needed(cli, tmp_path):
    assert cli("train", "a2c", *SEEDED, "--stop-iters", "1", "--run-dir", "r")[0] == 0
    for text in ("[]", "{", '{"a": 1}'):
        (tmp_path / "r/setup.json").write_text(text)
        assert cli("evaluate", "r", "--episodes", "1")[0] == 0


def test_damaged_command_is_not_needed(cli, tmp_path):
    assert cli("train", "a2c", *SEEDED, "--stop-iters", "1", "--run-dir", "r")[0] == 0
    (tmp_path / "r/command.txt").unlink()
    code, out, err = cli("resume", "r", "--stop-iters", "2")
    assert (code, err) == (0, "")
    assert "repeat:" not in out
    assert len(read_results(tmp_path / "r")) == 2


def test_folder_of_videos_is_not_needed_for_an_evaluation(cli, tmp_path):
    require_extra("video")
    flags = ["--evaluation-video-dir", "videos", "--stop-iters", "1", "--run-dir", "r"]
    assert cli("train", "a2c", *SEEDED, *flags)[0] == 0
    (tmp_path / "videos").write_text("no folder")
    assert cli("evaluate", "r", "--episodes", "1")[0] == 0


def test_refused_resumption_is_not_noted(cli, tmp_path):
    assert cli("train", "a2c", *SEEDED, "--stop-iters", "1", "--run-dir", "r")[0] == 0
    before = (tmp_path / "r/events.jsonl").read_text()
    code, out, _ = cli("resume", "r", "--stop-iters", "1")
    assert code == 0
    assert "already reached" in out
    assert (tmp_path / "r/events.jsonl").read_text() == before


def test_resumed_run_replaces_only_what_it_recorded_itself(cli, tmp_path, caplog):
    require_extra("offline")

    def num_rows():
        return sum(read_parquet(path)[1].count for path in parquet_files(tmp_path / "e"))

    def resume(run_dir, steps):
        caplog.clear()
        code, out, err = cli("resume", run_dir, "--stop-timesteps", str(steps))
        assert code == 0, out + err
        return caplog.text

    flags = ["--stop-timesteps", "64", "--run-dir", "r", "--output", "e"]
    assert cli("train", "a2c", *SEEDED, *flags, "--checkpoint-num-to-keep", "5")[0] == 0
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    assert num_rows() == 64
    assert "newer than this checkpoint" in resume("copy", 128)  # the rows of the original are kept
    assert num_rows() == 64 + 128
    assert "newer than this checkpoint" in resume("r", 192)  # the rows of the copy are kept
    assert num_rows() == 192 + 128
    for checkpoint in sorted((tmp_path / "r/checkpoints").iterdir())[1:]:
        shutil.rmtree(checkpoint)  # as if the run had been killed
    resume("r", 192)
    assert num_rows() == 192 + 128
    shutil.move(tmp_path / "r", tmp_path / "moved")
    resume("moved", 256)
    assert num_rows() == 256 + 128


def test_interrupted_evaluation_says_so(cli, monkeypatch):
    assert cli("train", "ppo", *SEEDED, "--stop-iters", "1", "--run-dir", "r")[0] == 0

    def evaluate(algorithm, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("flowrl.trainer.algorithm.Algorithm.evaluate", evaluate)
    code, out, err = cli("evaluate", "r")
    assert (code, out) == (130, "")
    assert err == "interrupted during the greedy episodes: no result\n"


@pytest.mark.slow
def test_run_with_aggregation_workers_is_evaluated(cli, ray_session):
    flags = ["--num-workers", "1", "--num-aggregation-workers", "1", "--stop-timesteps", "500"]
    code, _, err = cli("train", "impala", "--no-tuned", *flags, "--run-dir", "r")
    assert code == 0, err
    code, out, err = cli("evaluate", "r", "--episodes", "1")
    assert code == 0, err
    assert "greedy   mean return" in out


def test_checkpoint_that_a_running_training_has_replaced_is_not_needed(cli, tmp_path, monkeypatch):
    cli("train", "ppo", *SEEDED, "--stop-iters", "1", "--run-dir", "r")
    folder = tmp_path / "r/checkpoints"
    restore_policies, restore = Algorithm.restore_policies, Algorithm.restore

    def replaced(original):
        def restore_after_the_training_has_saved(self, checkpoint):
            (older,) = folder.iterdir()
            if older.name == Path(checkpoint).name < "000003":
                older.rename(folder / f"{int(older.name) + 1:06d}")
            return original(self, checkpoint)

        return restore_after_the_training_has_saved

    monkeypatch.setattr(Algorithm, "restore_policies", replaced(restore_policies))
    code, _, err = cli("evaluate", "r", "--episodes", "1")
    assert code == 0, err
    assert [path.name for path in folder.iterdir()] == ["000003"]
    (folder / "000003").rename(folder / "000001")
    code, _, err = cli("evaluate", "r/checkpoints/000001", "--episodes", "1")
    assert code == 1
    assert "000001" in err
    (folder / "000002").rename(folder / "000001")
    monkeypatch.setattr(Algorithm, "restore", replaced(restore))
    with Algorithm.from_checkpoint("r") as algorithm:
        assert algorithm.run_dir == tmp_path / "r"


def test_run_that_was_trained_on_a_gpu_is_evaluated_on_the_cpu(cli, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(TorchPolicy, "_find_device", lambda policy: torch.device("cpu"))
        options = ["--device", "cuda:9", "--stop-iters", "1", "--run-dir", "r"]
        assert cli("train", "ppo", *SEEDED, *options)[0] == 0
    code, out, err = cli("evaluate", "r", "--episodes", "1")
    assert code == 0, err
    assert "greedy" in out
    assert "'cuda:9' is not available, so the CPU is used" in caplog.text
    code, _, err = cli("resume", "r", "--stop-iters", "2")
    assert code == 2
    assert "the run uses device='cuda:9', which is not available" in err
    assert "Algorithm.from_checkpoint('r', config={'device': 'cpu'}).learn() continues" in err


def test_state_of_another_plan_suggests_to_load_the_policies(cli, tmp_path):
    plan = tmp_path / "mine.py"
    plan.write_text(ENVIRONMENT_PLAN)
    flags = ["--checkpoint-frequency", "1", "--run-dir", "r"]
    assert cli("train", "mine.py", "--stop-iters", "2", *flags)[0] == 0
    plan.write_text(ENVIRONMENT_PLAN.replace(".for_each(Train", ".for_each(bool).for_each(Train"))
    code, _, err = cli("resume", "r", "--plan", "mine.py", "--stop-iters", "3")
    assert code == 1
    assert "does not fit these settings: the saved state is of another plan" in err
    assert "start a new run in Python and call restore_policies('r/checkpoints/000002')" in err
    assert "An older checkpoint" not in err
