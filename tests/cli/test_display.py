"""Failures of a run: tracebacks of the user's code, notes, missing dependencies."""

from tests.cli.helpers import ENVIRONMENT_PLAN

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
