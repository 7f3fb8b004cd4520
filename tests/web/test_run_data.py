"""What the page shows of a run directory."""

import json
import os
import time

import pytest

from flowrl import PPO
from flowrl.errors import ConfigError
from flowrl.trainer.runs.activity_log import ActivityLog
from flowrl.web.html_report import report_html
from flowrl.web.run_data import MAX_POINTS, RunData, _shown, name_runs
from tests.cli.test_plot import write_run
from tests.monitoring.fakes import SMALL, activity, stage, worker


def append(run, steps, mean):
    result = {"timesteps_total": steps, "episode_reward_mean": mean, "training_iteration": steps}
    with open(run / "result.json", "a") as file:
        file.write(json.dumps(result) + "\n")


def test_new_results_are_read(tmp_path):
    run = write_run(tmp_path / "r", [1.0, 2.0])
    data = RunData(run)
    assert data.to_json()["table"]["rows"] == [[200, 2.0], [100, 1.0]]
    append(run, 300, 3.0)
    with open(run / "result.json", "a") as file:
        file.write('{"timesteps_total": 400, "episode')  # is being written
    shown = data.to_json(["episode_reward_mean"])
    assert shown["curves"]["episode_reward_mean"] == {"x": [100, 200, 300], "y": [1, 2, 3]}
    assert shown["env_steps"] == 300
    with open(run / "result.json", "a") as file:
        file.write('_reward_mean": 4.0}\n')
    assert data.to_json()["env_steps"] == 400


def test_results_of_a_resumed_run_replace_later_ones(tmp_path):
    run = write_run(tmp_path / "r", [1.0, 2.0, 3.0])
    data = RunData(run)
    data.update()
    lines = (run / "result.json").read_text().splitlines(keepends=True)
    (run / "new").write_text(lines[0])
    os.replace(run / "new", run / "result.json")
    append(run, 150, 9.0)
    data.update()
    assert data.curve("episode_reward_mean") == {"x": [100, 150], "y": [1, 9]}


def test_results_that_were_rewritten_into_the_same_file_replace_the_old_ones(tmp_path):
    run = write_run(tmp_path / "r", [1.0, 2.0, 3.0])
    data = RunData(run)
    data.update()
    lines = (run / "result.json").read_text().splitlines(keepends=True)
    (run / "result.json").write_text(lines[0])
    for steps in (150, 160, 170, 180):  # longer than before
        append(run, steps, 9.0)
    data.update()
    assert data.curve("episode_reward_mean")["x"] == [100, 150, 160, 170, 180]


def test_curve_has_only_the_points_with_a_value(tmp_path):
    run = write_run(tmp_path / "r", [None, 2.0])
    with open(run / "result.json", "a") as file:
        file.write(json.dumps({"timesteps_total": 300, "new": {"a": 5}}) + "\n")
        file.write("not json\n[1]\n5\n")
    data = RunData(run)
    assert data.to_json()["env_steps"] == 300
    assert data.curve("new/a") == {"x": [300], "y": [5]}
    assert data.curve("episode_reward_mean") == {"x": [200], "y": [2]}
    assert data.curve("nothing") == {"x": [], "y": []}
    assert {"new/a", "x/y", "timesteps_total"} <= set(data.metrics())


def test_50_000_results_are_thinned_out(tmp_path):
    run = write_run(tmp_path / "r", [float(i) for i in range(50_000)])
    data = RunData(run)
    data.update()
    curve = data.curve("episode_reward_mean")
    assert len(curve["x"]) == len(curve["y"]) <= MAX_POINTS
    assert (curve["x"][0], curve["x"][-1]) == (100, 5_000_000)
    assert len(json.dumps(data.to_json())) < 200_000
    append(run, 5_000_100, 1.0)
    data.update()
    assert data.curve("episode_reward_mean")["x"][-1] == 5_000_100


def test_activity_events_and_lags_are_shown(tmp_path):
    run = write_run(tmp_path / "r", [1.0])
    log = ActivityLog(run)
    slow = stage("operator", "Slow", busy=0.5, items=30)
    log.append(activity(slow, workers=[worker()], diagnosis="Slow."))
    log.append(activity(slow, counters={"num_shard_restarts": 2}, time=7.0, diagnosis="Slower."))
    with open(run / "events.jsonl", "w") as file:
        file.write('{"time": 1, "kind": "started", "text": ""}\nbroken\n')
    with open(run / "result.json", "a") as file:
        for lags in ([1, 1, 2], [2]):
            file.write(
                json.dumps({"timesteps_total": 5, "hist_stats": {"policy_lags": lags}}) + "\n"
            )
    shown = RunData(run).to_json()
    assert shown["diagnosis"] == "Slower."
    assert shown["lags"] == [[1, 2], [2, 2]]
    assert [event["kind"] for event in shown["events"]] == ["killed", "restart", "started"]
    assert shown["events"][1]["text"] == "2 worker restarts"
    assert shown["history"]["stages"]["0"]["busy"] == [0.5, 0.5]
    assert shown["history"]["stages"]["0"].keys() == {"busy", "waiting", "blocked"}
    assert not shown["running"]


def test_figures_of_a_run_are_those_of_its_files(tmp_path):
    with PPO("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(stop={"time_total_s": 2.5}, run_dir=tmp_path / "r", progress=False)
        result = algorithm.last_result
    shown = RunData(tmp_path / "r").to_json(["episode_reward_mean"])
    assert shown["env_steps"] == result["timesteps_total"]
    assert shown["counters"] == result["counters"]
    assert shown["config"]["seed"] == 0
    assert shown["command"] == (tmp_path / "r" / "command.txt").read_text()
    kinds = [event["kind"] for event in shown["events"]]
    assert kinds[0] == "ended"
    assert {"checkpoint", "started"} <= set(kinds)
    assert abs(shown["events"][0]["time"] - time.time()) < 60
    names = [one["name"] for one in shown["activity"]["stages"]]
    assert names[0] == "StandardMetricsReporting"
    assert "TrainOneStep" in names


def test_failed_run_names_the_operator(tmp_path):
    def fail(batch):
        raise ArithmeticError("</script><b>boom")

    from flowrl.ops import ParallelRollouts, StandardMetricsReporting

    def plan(workers, config):
        return StandardMetricsReporting(ParallelRollouts(workers).for_each(fail), workers, config)

    with (
        PPO.config_class(env="CartPole-v1", **SMALL).build(plan=plan) as algorithm,
        pytest.raises(ArithmeticError),
    ):
        algorithm.learn(64, run_dir=tmp_path / "r", progress=False)
    data = RunData(tmp_path / "r")
    assert data.to_json()["end"] == "failed: ArithmeticError: </script><b>boom"
    (failed,) = [event for event in data.to_json()["events"] if event["kind"] == "failed"]
    assert failed["text"] == "ArithmeticError: </script><b>boom"
    assert failed["stage"].startswith(f"{__file__}:")
    html = report_html([data])
    assert "boom" in html
    assert "</script><b>" not in html


@pytest.mark.slow
def test_report_is_one_small_file(cli_main, tmp_path):
    for name in ("a", "b", "c"):
        run = write_run(tmp_path / "runs" / name, [float(i) for i in range(3000)])
        for number in range(400):
            ActivityLog(run).append(activity(stage("operator", "Slow"), time=float(number)))
    assert cli_main("report", "runs", "-o", "all.html") == 0
    text = (tmp_path / "all.html").read_text()
    assert len(text) < 2_000_000
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").split('id="data"')[0]
    assert cli_main("report", "runs/a") == 0
    assert (tmp_path / "runs" / "a" / "report.html").exists()
    assert cli_main("report", "runs/a", "-o", "missing/x.html") == 2


def test_folder_that_is_no_run_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RunData(tmp_path)


@pytest.fixture
def cli_main(tmp_path, monkeypatch):
    from flowrl.cli.main import main

    monkeypatch.chdir(tmp_path)
    return lambda *arguments: main(arguments)


def test_values_that_are_not_finite_are_texts(tmp_path):
    run = write_run(tmp_path / "r", [1.0])
    log = ActivityLog(run)
    log.append(activity(stage("operator", values={"x": float("nan")})))
    shown = json.dumps(RunData(run).to_json(), allow_nan=False)
    assert '"x": "nan"' in shown
    assert "nan" in report_html([RunData(run)])


def test_infinite_settings_are_texts():
    config = {"env_config": {"limit": float("inf"), "low": [-1.0, float("nan")]}}
    shown = {"env_config": {"limit": "inf", "low": [-1.0, "nan"]}}
    assert _shown(config) == shown


def test_runs_in_folders_of_the_same_name_have_different_names(tmp_path):
    paths = [tmp_path / name for name in ("a/seed0", "b/seed0", "b/seed1")]
    runs = []
    for path in paths:
        write_run(path, [1.0])
        runs.append(RunData(path))
    name_runs(runs)
    assert [run.name for run in runs] == ["a/seed0", "b/seed0", "seed1"]


def test_history_is_that_of_the_newest_plan(tmp_path):
    run = write_run(tmp_path / "r", [1.0])
    log = ActivityLog(run)
    log.append(activity(stage("sampling", "Old", title="Old", busy=0.1)))
    new = stage("sampling", "New", title="New", busy=0.2)
    log.append(activity(new, stage("operator", id=1, busy=0.3)))
    history = RunData(run).to_json()["history"]
    assert len(history["time"]) == 2
    assert {key: values["busy"] for key, values in history["stages"].items()} == {
        "0": [None, 0.2], "1": [None, 0.3],
    }  # fmt: skip


def test_report_has_the_mean_returns_of_many_metrics(tmp_path):
    run = write_run(tmp_path / "r", [1.0])
    learners = {f"p{i}": {f"loss_{j}": 1.0 for j in range(9)} for i in range(9)}
    result = {
        "timesteps_total": 200, "episode_reward_mean": 2.0, "learners": learners,
        "evaluation": {"episode_reward_mean": 3.0}, "custom_metrics": {"x_mean": 1.0},
    }  # fmt: skip
    with open(run / "result.json", "a") as file:
        file.write(json.dumps(result) + "\n")
    page = report_html([RunData(run)])
    for metric in ("evaluation/episode_reward_mean", "custom_metrics/x_mean", "learners/p0/loss_0"):
        assert f'"{metric}": {{"x"' in page
