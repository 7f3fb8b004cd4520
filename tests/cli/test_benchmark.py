"""`flowrl benchmark`: train rows with several seeds, continue interrupted runs, write tables."""

import json

import pytest

from flowrl.benchmark.rows import BenchmarkRow
from flowrl.benchmark.run import learning_curve, result_of, train
from tests.extras import require_extra

TABLES = """
tiny:
  - {plan: a2c, env: CartPole-v1, env_steps: 256, threshold: 5, anchors: {maximum: 500}}
"""


@pytest.fixture
def tiny_table(tmp_path):
    """Options for a table with a row that trains in a second."""
    (tmp_path / "tables.yaml").write_text(TABLES)
    return ["--tables", "tables.yaml"]


@pytest.mark.slow
def test_result_of_a_training(tmp_path):
    row = BenchmarkRow("t", "a2c", "CartPole-v1", 256, {}, threshold=5.0)
    run_dir = tmp_path / "run"
    seconds = train(row, 3, run_dir)
    result = result_of(row, 3, run_dir, seconds)
    curve = learning_curve(run_dir)
    assert [steps for steps, _, _ in curve][-1] == result["env_steps"] == 256
    assert result["best"] == max(mean for _, mean, _ in curve) >= 5
    assert result["steps_to_threshold"] == next(s for s, mean, _ in curve if mean >= 5)
    assert 8 <= result["score"] <= 500
    assert (result["seed"], result["plan"], result["env"]) == (3, "a2c", "CartPole-v1")
    assert result["seconds"] >= result["seconds_to_threshold"]
    never = BenchmarkRow("t", "a2c", "CartPole-v1", 256, {}, threshold=1e9)
    assert result_of(never, 3, run_dir, seconds)["steps_to_threshold"] is None
    train(row, 3, run_dir)  # its training has ended: nothing is repeated
    assert learning_curve(run_dir) == curve


@pytest.mark.slow
def test_rows_are_trained_once_and_tables_written(cli, tmp_path, tiny_table):
    require_extra("plot")
    code, out, err = cli("benchmark", "tiny", "--seeds", "2", "--jobs", "2", *tiny_table)
    assert (code, err) == (0, "")
    folder = tmp_path / "benchmarks" / "results"
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "a2c-CartPole-v1-seed0.json", "a2c-CartPole-v1-seed1.json", "a2c-CartPole-v1.svg",
        "tiny.md",
    ]  # fmt: skip
    scores = [json.loads((folder / name).read_text())["score"] for name in names[:2]]
    assert f"{sum(scores) / 2:.1f}" in (folder / "tiny.md").read_text()
    assert "seed 0: score" in out
    code, out, _ = cli("benchmark", "tiny", "--seeds", "2", *tiny_table)
    assert code == 0
    assert "seed 0" not in out


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


def test_rows_are_listed(cli):
    code, out, _ = cli("benchmark", "--list")
    assert code == 0
    assert "ppo/CartPole-v1" in out
    code, _, err = cli("benchmark", "clasic")
    assert code == 2
    assert "Did you mean 'classic'" in err


@pytest.mark.parametrize("text", ["[1]", "a: [{plan: ppo}]", "a: {b"])
def test_file_without_tables_is_rejected(text, cli, tmp_path):
    (tmp_path / "tables.yaml").write_text(text)
    code, _, err = cli("benchmark", "--list", "--tables", "tables.yaml")
    assert code == 2
    assert "tables.yaml has no tables of rows" in err
