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
from flowrl import DQN, PPO, DefaultCallbacks, PPOConfig

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
PPOConfig(lr="abc")
PPOConfig()["lr"] = 0.1
PPOConfig().callbacks(DefaultCallbacks).framework("torch").build(5)
PPOConfig().updated(lr=1e-4, num_wokers=2)
"""

PLAN = """
from flowrl.data import Batch
from flowrl.ops import ConcatBatches, ParallelRollouts, SelectExperiences, TrainOneStep
from flowrl.ops import UpdateReplayPriorities
from flowrl.policies import TensorBatch, TorchPolicy
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer
from flowrl.sampling import WorkerSet


def plan(workers: WorkerSet) -> None:
    rollouts = ParallelRollouts(workers, mode="bulk_sync")
    reveal_type(rollouts)
    reveal_type(ParallelRollouts(workers, mode="raw"))
    batches = rollouts.for_each(SelectExperiences(["p"])).combine(ConcatBatches(64))
    batches.for_each(TrainOneStep(workers))
    rollouts.for_each(ConcatBatches(64)).for_each(TrainOneStep(workers))
    batches.for_each(UpdateReplayPriorities())


class MyPolicy(TorchPolicy):
    def loss(self, batch: TensorBatch) -> int:
        reveal_type(self.model)
        return 1


PrioritizedReplayBuffer(64, n_step=3, storage_unit="rows")
MultiAgentReplayBuffer(
    lambda policy_id: PrioritizedReplayBuffer(64, size=3), replay_batch_size=32
)
"""


def test_stub_has_the_present_settings():
    generate = runpy.run_path(str(ROOT / "docs" / "stub.py"))["stub"]
    assert (ROOT / "flowrl" / "__init__.pyi").read_text() == generate(), "run python docs/stub.py"


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Return mypy's output for the programs and the shipped plans, checked in one run."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "plan.py").write_text(PLAN)
    plans = sorted((ROOT / "plans").glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "--scripts-are-modules"]
    command += ["program.py", "plan.py", *map(str, plans)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def messages(output, name):
    """Return the revealed types in a file, and its errors by line."""
    lines = re.findall(rf"^{name}:(\d+): (\w+): (.*)", output, re.MULTILINE)
    revealed = [message for _, _, message in lines if message.startswith("Revealed")]
    return revealed, {int(number): text for number, kind, text in lines if kind == "error"}


@pytest.mark.slow
def test_type_checker_knows_settings_and_return_types(checked):
    revealed, errors = messages(checked, "program.py")
    assert revealed == ['Revealed type is "flowrl.PPO"'] * 3
    assert sorted(errors) == [10, 11, 12, 13, 14, 15, 16, 17]
    assert 'Argument "n_step" to "DQN" has incompatible type "str"' in errors[10]
    assert 'Unexpected keyword argument "clip_param" for "DQN"' in errors[11]
    assert 'did you mean "num_workers"?' in errors[12]
    assert 'Argument "model" to "training"' in errors[13]
    assert 'Argument "lr" to "PPOConfig" has incompatible type "str"' in errors[14]
    assert "Unsupported target for indexed assignment" in errors[15]
    assert 'Argument 1 to "build" of "PPOConfig" has incompatible type "int"' in errors[16]
    assert 'Unexpected keyword argument "num_wokers" for "updated"' in errors[17]


@pytest.mark.slow
def test_type_checker_knows_the_items_of_streams(checked):
    revealed, errors = messages(checked, "plan.py")
    batch = "SampleBatch | flowrl.data.sample_batch.MultiAgentBatch]"
    assert [text.replace('"', "").split(" is ")[1] for text in revealed] == [
        f"flowrl.iter.local.LocalIterator[flowrl.data.sample_batch.{batch}",
        f"flowrl.iter.parallel.ParallelIterator[flowrl.data.sample_batch.{batch}",
        "flowrl.policies.models.base.ModelV2",
    ]
    assert sorted(errors) == [16, 17, 21, 26, 28]
    assert 'Argument 1 to "for_each"' in errors[16]
    assert 'Argument 1 to "for_each"' in errors[17]
    assert "incompatible with return type" in errors[21]
    assert 'Argument "storage_unit" to "PrioritizedReplayBuffer"' in errors[26]
    assert 'Unexpected keyword argument "size" for "PrioritizedReplayBuffer"' in errors[28]


@pytest.mark.slow
def test_type_checker_finds_no_errors_in_shipped_plans(checked):
    assert "Found 13 errors in 2 files" in checked
