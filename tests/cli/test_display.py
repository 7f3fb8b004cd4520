"""Failures of a run: tracebacks of the user's code, notes, missing dependencies."""

import numpy as np
import pytest

from flowrl import PPO
from flowrl.data import SampleBatch
from flowrl.offline.parquet import write_parquet
from flowrl.policies import ConfigError
from tests.cli.helpers import ENVIRONMENT_PLAN, TWO_ITERATIONS

FAILING_OPERATOR_PLAN = '''"""A plan whose operator raises."""
from flowrl.algorithms.ppo import PPOConfig
from flowrl.ops import ParallelRollouts, StandardMetricsReporting

config = PPOConfig(env="CartPole-v1", train_batch_size=128)


def explode(batch):
    raise ArithmeticError("boom")


def execution_plan(workers, config):
    return StandardMetricsReporting(ParallelRollouts(workers).for_each(explode), workers, config)
'''


def test_operator_that_raises_is_located(cli, tmp_path):
    (tmp_path / "broken.py").write_text(FAILING_OPERATOR_PLAN)
    code, _, err = cli("train", "broken.py", "--run-dir", "r")
    assert code == 1
    assert "ArithmeticError: boom" in err
    assert "for_each(explode)" in err
    assert "broken.py:13" in err
    assert "SampleBatch of 128 rows" in err


def test_environment_that_raises_shows_its_own_traceback(cli, tmp_path):
    (tmp_path / "short_env.py").write_text(
        ENVIRONMENT_PLAN.replace("fails = False", "fails = True")
    )
    code, _, err = cli("train", "short_env.py", "--run-dir", "r")
    assert code == 1
    assert "OSError: the simulator is gone" in err
    assert 'raise OSError("the simulator is gone")' in err
    for place in ("sub-environment 0", "of a fragment", "worker 0", "ParallelRollouts"):
        assert place in err
    assert "failed 6 times in a row" in err
    for package in ("iter", "sampling", "trainer"):
        assert f"flowrl/{package}" not in err


def test_unreadable_experience_is_one_line_with_its_place_in_the_plan(cli, tmp_path):
    rows = SampleBatch(obs=np.zeros((4, 4), np.float32), actions=np.array([0, 1, 2, 0]))
    write_parquet(tmp_path / "data/a.parquet", rows)
    code, _, err = cli("train", "bc", "--env", "CartPole-v1", "--input_", "data", "--run-dir", "r")
    assert code == 1
    assert err.startswith("flowrl: ")
    assert "data/a.parquet: the rows do not fit the spaces of the policy: actions" in err
    assert "ReadParquet" in err
    for absent in ("Traceback", "OfflineDataError"):
        assert absent not in err


def test_missing_dependency_of_an_environment_is_one_line(cli, tmp_path):
    cli("copy", "a2c", "mine.py")
    plan = tmp_path / "mine.py"
    body = (
        "def make(context):\n    import gymnasium\n"
        "    raise gymnasium.error.DependencyNotInstalled('install the thing')\n\n\n"
    )
    text = plan.read_text().replace('env="CartPole-v1"', "env=make")
    plan.write_text(text.replace("config = ", body + "config = "))
    code, _, err = cli("train", "mine.py", "--stop-iters", "1")
    assert code == 2
    assert err.strip() == "flowrl: env: install the thing"


@pytest.mark.parametrize("display", ["line", "live", "none"])
def test_display_is_plain_without_a_terminal(cli, display):
    code, out, err = cli("train", "ppo", "--display", display, "--run-dir", "r", *TWO_ITERATIONS)
    assert (code, err) == (0, "")
    assert ("env steps  steps/s" in out) == (display != "none")
    assert ("training PPO" in out) == out.startswith("settings tuned for") == (display != "none")
    assert "reached: " in out
    assert "\x1b" not in out


def test_report_is_written_at_the_end(cli, tmp_path):
    flags = ["--report", "--display", "none", "--run-dir", "r", *TWO_ITERATIONS]
    code, out, _ = cli("train", "ppo", *flags)
    assert code == 0
    assert "report:        r/report.html" in out
    page = (tmp_path / "r" / "report.html").read_text()
    assert "<title>flowrl</title>" in page
    assert '"running": false' in page


def test_unknown_display_is_rejected(cli):
    code, _, err = cli("train", "ppo", "--display", "fancy")
    assert code == 2
    assert "--display" in err
    with PPO("CartPole-v1") as algorithm, pytest.raises(ConfigError, match="progress is a bool"):
        algorithm.learn(100, progress="fancy")
