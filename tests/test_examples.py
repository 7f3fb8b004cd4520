"""The scripts in examples/ run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extras import require_extra

ROOT = Path(__file__).parents[1]
# script -> (extra, arguments of a short run, part of the output)
SCRIPTS = {
    "own_environment": (None, ["--timesteps", "2000"], "return"),
    "own_plan": (None, ["--timesteps", "4000"], "advantages"),
    "custom_network": (None, ["--timesteps", "4000"], "mean return of 20 episodes: "),
    "ppo_and_dqn": (None, ["--timesteps", "3000"], "mean return per agent: PPO "),
    "multi_agent": ("marl", ["--timesteps", "2000"], "mean return of 200 games: "),
    "tune_learning_rate": ("tune", ["--timesteps", "2000"], "best: lr="),
    "learn_offline": ("offline", ["--timesteps", "2000", "--rows", "2000"], "of MARWIL"),
    "deploy_onnx": ("onnx", ["--timesteps", "2000"], "imported: ['numpy', 'onnxr"),
}


def test_every_script_is_tested():
    assert set(SCRIPTS) == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_script_runs(tmp_path, script):
    extra, arguments, expected = SCRIPTS[script]
    if extra is not None:
        require_extra(extra)
    process = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{script}.py", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()
    assert expected in process.stdout
