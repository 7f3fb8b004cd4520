"""`flowrl benchmark`: train rows with several seeds, continue interrupted runs, write tables."""

import json
import re
import subprocess

import pytest

from flowrl.benchmark import sb3
from flowrl.benchmark.provenance import commit, joined, present_origin
from flowrl.benchmark.rows import BenchmarkRow, benchmark_rows, shipped_tables
from flowrl.benchmark.run import Outcome, learning_curve, result_of, train_flowrl
from tests.extras import require_extra

TABLES = """
tiny:
  - {plan: a2c, env: CartPole-v1, env_steps: 256, threshold: 5, published_scores: {maximum: 500}}
"""


@pytest.fixture
def tiny_table(tmp_path):
    """Options for a table with a row that trains in a second."""
    (tmp_path / "tables.yaml").write_text(TABLES)
    return ["--tables", "tables.yaml"]


def test_best_and_threshold_are_of_100_episodes():
    row = BenchmarkRow("t", "a2c", "CartPole-v1", 400, {}, threshold=20.0)
    curve = [
        (100, 90.0, 1.0, 9),
        (200, 15.0, 2.0, 100),
        (300, 25.0, 3.0, 100),
        (400, 22.0, 4.0, 100),
    ]
    result = result_of(row, 0, Outcome(curve, 21.0, 1.0, 5.0, present_origin()))
    assert (result["best"], result["steps_to_threshold"]) == (25.0, 300)
    assert result["seconds_to_threshold"] == 3.0
    result = result_of(row, 0, Outcome(curve[:1], 21.0, 1.0, 5.0, present_origin()))
    assert (result["best"], result["steps_to_threshold"]) == (None, None)


@pytest.mark.slow
def test_result_of_a_training(tmp_path, monkeypatch):
    row = BenchmarkRow("t", "a2c", "CartPole-v1", 4096, {}, threshold=15.0)
    run_dir = tmp_path / "run"
    outcome = train_flowrl(row, 3, run_dir)
    result = result_of(row, 3, outcome)
    curve = learning_curve(run_dir)
    full = [point for point in curve if point[3] == 100]
    assert curve[-1][0] == result["env_steps"] == 4096
    assert result["best"] == max(mean for _, mean, *_ in full) >= 15
    assert result["steps_to_threshold"] == next(s for s, mean, *_ in full if mean >= 15)
    assert 8 <= result["score"] <= 500
    assert (result["seed"], result["plan"], result["env"]) == (3, "a2c", "CartPole-v1")
    assert result["seconds"] >= result["seconds_to_threshold"]
    never = BenchmarkRow("t", "a2c", "CartPole-v1", 4096, {}, threshold=1e9)
    assert result_of(never, 3, outcome)["steps_to_threshold"] is None
    monkeypatch.setattr("flowrl.benchmark.run.present_origin", lambda: {"commit": "later"})
    repeated = train_flowrl(row, 3, run_dir)  # its training has ended: nothing is repeated
    assert learning_curve(run_dir) == curve
    assert repeated.origin == outcome.origin


@pytest.mark.slow
def test_rows_are_trained_once_and_tables_written(cli, tmp_path, tiny_table):
    require_extra("plot")
    code, out, err = cli("benchmark", "tiny", "--seeds", "2", "--jobs", "2", *tiny_table)
    assert (code, err) == (0, "")
    folder = tmp_path / "runs" / "benchmark" / "results"
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "a2c-CartPole-v1-seed0.json", "a2c-CartPole-v1-seed1.json", "tiny.md", "tiny.svg",
    ]  # fmt: skip
    scores = [json.loads((folder / name).read_text())["score"] for name in names[:2]]
    assert f"{sum(scores) / 2:.1f}" in (folder / "tiny.md").read_text()
    assert "seed 0: score" in out
    code, out, _ = cli("benchmark", "tiny", "--seeds", "2", *tiny_table)
    assert code == 0
    assert "seed 0" not in out
    assert "a2c/CartPole-v1: 2 results in runs/benchmark/results, not repeated" in out
    text = (tmp_path / "tables.yaml").read_text()
    for changed in (text.replace("256", "512"), text.replace("256", "128")):
        (tmp_path / "tables.yaml").write_text(changed)
        code, _, err = cli("benchmark", "tiny", "--seeds", "2", *tiny_table)
        assert code == 2
        assert "seed0.json is of a training with other settings or fewer env steps" in err


@pytest.mark.parametrize("ended_by", [130, 143])
def test_interrupted_benchmark_trains_no_other_seed(
    cli, tmp_path, tiny_table, monkeypatch, ended_by
):
    require_extra("plot")
    started = []

    def run(processes, command, output):
        started.append(command)
        return ended_by

    monkeypatch.setattr("flowrl.benchmark.processes.Processes.run", run)
    code, out, _ = cli("benchmark", "tiny", "--seeds", "5", *tiny_table)
    assert code == ended_by
    assert out.splitlines() == [
        "a2c/CartPole-v1, seed 0: training for 256 env steps, log: "
        "runs/benchmark/a2c-CartPole-v1/seed-0.log",
        "interrupted: run the same command again to continue",
    ]
    assert len(started) == 1


@pytest.mark.slow
def test_failed_training_is_reported(cli, tmp_path, tiny_table):
    require_extra("plot")
    text = TABLES.replace("CartPole-v1", "Pendulum-v1")
    (tmp_path / "tables.yaml").write_text(text.replace("a2c", "dqn"))
    code, out, _ = cli("benchmark", "--seeds", "1", *tiny_table)
    assert code == 1
    assert "dqn/Pendulum-v1, seed 0: failed, see runs/benchmark/dqn-Pendulum-v1/seed-0.log" in out
    log = (tmp_path / "runs/benchmark/dqn-Pendulum-v1/seed-0.log").read_text()
    assert "DQN is for Discrete actions" in log


FAKE_PYTHON = """#!/bin/sh
cp "$2" spec.json
echo '{"curve": [[128, 20.0, 1.0, 6], [256, 30.0, 2.0, 12]], "score": 77.5, "score_std": 1.0,
       "seconds": 2.5, "versions": {"torch": "0"}}' > "$3"
"""


@pytest.mark.slow
def test_other_library_is_trained_beside(cli, tmp_path, monkeypatch):
    require_extra("plot")
    (tmp_path / "tables.yaml").write_text(TABLES.replace("a2c", "ppo"))
    environment = tmp_path / "runs" / "benchmark" / sb3.VENV_FOLDER
    (environment / "bin").mkdir(parents=True)
    (environment / "ready").touch()
    python = environment / "bin" / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    options = ["--seeds", "1", "--against", "sb3", "--tables", "tables.yaml"]
    code, out, err = cli("benchmark", "tiny", *options)
    assert (code, err) == (0, "")
    assert "ppo/CartPole-v1 with sb3, seed 0: score 77.5 after 256 env steps in 2 s" in out
    spec = json.loads((tmp_path / "spec.json").read_text())
    assert (spec["algorithm"], spec["env"], spec["env_steps"]) == ("ppo", "CartPole-v1", 256)
    assert spec["settings"]["n_envs"] == 8
    table = (tmp_path / "runs/benchmark/results/tiny.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == ["ppo", "ppo of SB3"]
    assert "77.5" in table[3]
    drawing = tmp_path / "runs/benchmark/results/tiny.svg"
    assert drawing.stat().st_size > 1000


def test_row_without_settings_of_the_other_library_is_rejected(cli, tiny_table, tmp_path):
    require_extra("plot")
    code, _, err = cli("benchmark", "--against", "sb3", *tiny_table)
    assert code == 2
    assert "--against sb3 has no settings for a2c/CartPole-v1" in err
    assert not (tmp_path / "runs" / "benchmark" / sb3.VENV_FOLDER).exists()


def test_shipped_rows_have_settings_of_the_other_library():
    for row in benchmark_rows(shipped_tables()):
        if row.plan not in ("rainbow", "r2d2", "impala"):  # which the other library lacks
            assert row.settings("sb3")


def test_learning_curve_does_not_depend_on_the_names_in_progress_csv(cli, tmp_path):
    flags = ("--seed", "1", "--stop-timesteps", "1000", "--metrics-num-episodes-for-smoothing", "5")
    for names in ("classic", "nested"):
        code, _, err = cli("train", "a2c", "--logged-names", names, "--run-dir", names, *flags)
        assert code == 0, err
    classic, nested = (learning_curve(tmp_path / names) for names in ("classic", "nested"))
    assert [point[:2] for point in nested] == [point[:2] for point in classic] != []


def test_rows_are_listed(cli):
    code, out, _ = cli("benchmark", "--list")
    assert code == 0
    assert "ppo/CartPole-v1" in out
    code, _, err = cli("benchmark", "clasic")
    assert code == 2
    assert "Did you mean 'classic'" in err


def test_origins_of_a_continued_training_are_joined():
    versions = {"torch": "2.13.0", "gymnasium": "1.4.0"}
    first = {"date": "2026-01-01", "machine": "a", "python": "3.11", "commit": "1"}
    first["versions"] = versions
    second = {**first, "date": "2026-01-02", "commit": "2"}
    second["versions"] = versions | {"torch": "2.14.0"}
    assert joined([first]) == first
    assert joined([first, first, second]) == {
        **first,
        "date": "2026-01-02",
        "commit": "1 then 2",
        "versions": versions | {"torch": "2.13.0 then 2.14.0"},
    }


def test_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    files = [tmp_path / "flowrl" / "code.py", tmp_path / "benchmarks" / "results" / "a.json"]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("1")
    assert commit(tmp_path) is None
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    head = commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}", head)
    files[1].write_text("2")
    assert commit(tmp_path) == head
    files[0].write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")  # without git
    assert commit(tmp_path) is None


def test_invalid_tables_are_rejected_before_anything_is_trained(cli, tmp_path):
    (tmp_path / "tables.yaml").write_text("mine:\n- {plan: ppo}\n")
    for option in ("--list", "--seeds=1"):
        code, _, err = cli("benchmark", option, "--tables", "tables.yaml")
        assert code == 2
        assert "tables.yaml: row 1 of 'mine' lacks env, env_steps, published_scores" in err
    _, _, err = cli("benchmark", "--list", "--tables", "missing.yaml")
    assert "missing.yaml: cannot be read" in err
    (tmp_path / "empty.yaml").write_text("mine: []\n")
    code, _, err = cli("benchmark", "--against", "sb3", "--tables", "empty.yaml")
    assert code == 2
    assert "empty.yaml contains no rows" in err


def test_damaged_results_of_any_row_are_rejected_before_anything_is_trained(cli, tmp_path):
    require_extra("plot")
    row = "{env: CartPole-v1, env_steps: 256, published_scores: {}, plan:"
    (tmp_path / "tables.yaml").write_text(f"a: [{row} a2c}}]\nb: [{row} ppo}}]\n")
    results = tmp_path / "runs" / "results"
    results.mkdir(parents=True)
    (results / "ppo-CartPole-v1-seed0.json").write_text("{")
    code, _, err = cli("benchmark", "a", "--tables", "tables.yaml", "--runs", "runs")
    assert code == 2
    assert "ppo-CartPole-v1-seed0.json contains no result: remove it to train again" in err
    assert not list(tmp_path.rglob("*.log"))
