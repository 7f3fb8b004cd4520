"""`flowrl diagnose` and `flowrl check`."""

import json
import os
from pathlib import Path

import pytest

from flowrl import PPO
from flowrl.cli.diagnose import _state_of, format_activity
from flowrl.trainer.runs.activity_log import read_activities
from flowrl.trainer.runs.run_directory import RunDirectory
from tests.monitoring.fakes import SMALL, activity, stage, worker

PLAN = """
from flowrl.algorithms.a2c import A2CConfig
from flowrl.ops import ParallelRollouts, StandardMetricsReporting

config = A2CConfig(env="CartPole-v1")


def execution_plan(workers, config):
    return StandardMetricsReporting(ParallelRollouts(workers), workers, config)
"""


def test_figures_are_a_table():
    slow = stage("operator", "Slow", busy=0.5, waiting=0.25, blocked=0.25, items=20)
    one = activity(slow, workers=[worker(3)], diagnosis="Slow is slow.")
    lines = format_activity(one).splitlines()
    assert lines[0] == "Slow is slow."
    rows = [line.split() for line in lines]
    assert ["operator", "items/s", "busy", "waiting", "blocked"] in rows
    assert ["Slow", "2.0", "50%", "25%", "25%"] in rows
    assert ["3", "100", "90%", "30%", "0%", "40%", "0%", "0%", "0%"] in rows


def test_operators_of_the_same_name_show_their_lines():
    stages = [stage("operator", name, busy=0.5) for name in ("Slow", "Print", "Print")]
    stages[1].line, stages[2].line = "plan.py:3", "plan.py:5"
    text = format_activity(activity(*stages))
    assert "Print (plan.py:3)" in text
    assert "Print (plan.py:5)" in text
    assert "Slow (" not in text


def test_run_writes_its_activity_and_flowrl_diagnose_shows_it(cli, tmp_path):
    with PPO("CartPole-v1", **SMALL) as algorithm:
        algorithm.learn(stop={"time_total_s": 3.2}, run_dir=tmp_path / "r", progress=False)
        assert algorithm.monitor.listeners == []
    found = read_activities(tmp_path / "r")
    assert 1 <= len(found) <= 4
    assert found[-1].iteration <= algorithm.iteration
    code, out, _ = cli("diagnose", "r")
    assert code == 0
    state, diagnosis = out.splitlines()[:2]
    assert state.startswith("The run has ended: time_total_s")
    assert diagnosis == found[-1].diagnosis
    assert "TrainOneStep" in out


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        ([], "The run is not training."),
        (["started", "ended"], "The run has ended: text"),
        (["started", "failed"], "The run has failed: text"),
        (["started"], "The run did not end: the process was killed or crashed, or runs on another"),
        (["started", "ended", "resumed"], "The run did not end: "),
    ],
)
def test_state_of_a_run(tmp_path, kinds, state):
    lines = [json.dumps({"time": 1.0, "kind": kind, "text": "text"}) + "\n" for kind in kinds]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    found = _state_of(tmp_path)
    assert found.startswith(state)
    assert ("start it again" in found) == ("not end" in state)
    (tmp_path / "checkpoints" / "000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000001" / "manifest.json").touch()
    assert (f"flowrl resume {tmp_path}" in _state_of(tmp_path)) == ("not end" in state)
    run = RunDirectory(tmp_path, resume=True)
    assert _state_of(tmp_path) == "The run is training."
    run.close()


def test_diagnosis_needs_a_run_with_measurements(cli, tmp_path):
    code, _, err = cli("diagnose", "nothing")
    assert code == 2
    assert "not a run directory" in err
    os.mkdir(tmp_path / "short")
    (tmp_path / "short" / "config.json").write_text("{}")
    code, _, err = cli("diagnose", "short")
    assert code == 2
    assert "no measurements" in err
    assert err.rstrip().endswith("The run is not training.")


def test_check_names_the_line_and_the_remedy(cli, tmp_path):
    (tmp_path / "mine.py").write_text(PLAN)
    code, out, err = cli("check", "mine.py")
    assert (code, err) == (1, "")
    problem, count = out.splitlines()
    assert problem.startswith(f"{tmp_path}/mine.py:9: the plan samples, but has no operator that")
    assert count == "1 problem in mine.py"
    assert cli("check", "impala")[:2] == (0, "no problems in impala\n")
    code, _, err = cli("check", "nothing")
    assert code == 2
    assert "nothing" in err


@pytest.mark.parametrize("command", ["check", "explain"])
def test_plans_that_cannot_be_built_are_wrong_usage(command, cli, tmp_path):
    code, _, err = cli(command, "DQN", "--env", "CartPole-v1")
    assert (code, err) == (0, "")
    Path("bad.py").write_text(
        "from flowrl.ops import ParallelRollouts\n\n\ndef execution_plan(workers, config):\n"
        "    return ParallelRollouts(workers, mode='none')\n"
    )
    code, _, err = cli(command, "bad.py", "--env", "CartPole-v1")
    assert code == 2
    assert "bad.py" in err
