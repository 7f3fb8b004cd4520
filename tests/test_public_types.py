"""The types of the public names, which editors and type checkers read from flowrl/__init__.pyi."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """
from flowrl import DQN, PPO, PPOConfig

config = PPOConfig().environment("CartPole-v1").rollouts(num_workers=2)
config = config.training(lr=[["0%", 1e-3], ["50%", 0]], model={"fcnet_hiddens": [64, 64]})
reveal_type(config.build())
with PPO("CartPole-v1", seed=1, lr=[(0, 1e-3), ("50%", 0.0)]) as algorithm:
    reveal_type(algorithm.learn(1000))
reveal_type(PPO.from_checkpoint("runs/ppo"))
DQN("CartPole-v1", n_step="3")
DQN("CartPole-v1", clip_param=0.2)
PPOConfig().rollouts(num_wokers=2)
PPOConfig().training(model={"fcnet_hidden": [64]})
"""


def test_stub_has_the_present_settings():
    generate = runpy.run_path(str(ROOT / "docs" / "stub.py"))["stub"]
    assert (ROOT / "flowrl" / "__init__.pyi").read_text() == generate(), "run python docs/stub.py"


@pytest.mark.slow
def test_type_checker_knows_settings_and_return_types(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = re.findall(r"^program.py:(\d+): (\w+): (.*)", done.stdout, re.MULTILINE)
    revealed = [message for _, _, message in lines if message.startswith("Revealed")]
    errors = {int(number): message for number, kind, message in lines if kind == "error"}
    assert revealed == ['Revealed type is "flowrl.PPO"'] * 3
    assert sorted(errors) == [10, 11, 12, 13]
    assert 'Argument "n_step" to "DQN" has incompatible type "str"' in errors[10]
    assert 'Unexpected keyword argument "clip_param" for "DQN"' in errors[11]
    assert 'did you mean "num_workers"?' in errors[12]
    assert 'Argument "model" to "training"' in errors[13]
