"""Policies that were trained on a GPU, on a machine without one."""

import pickle

import pytest
import torch

from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.errors import ConfigError
from flowrl.policies.devices import missing_reason, on_available_device
from flowrl.policies.torch_policy import TorchPolicy

MISSING = "cuda:99"  # also on machines with GPUs


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A checkpoint of a run on a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(TorchPolicy, "_find_device", lambda policy: torch.device("cpu"))
        with PPO("CartPole-v1", device=MISSING, train_batch_size=128, seed=1) as algorithm:
            algorithm.train()
            return algorithm.save(tmp_path / "c")


def test_missing_device_is_replaced_by_the_cpu_with_a_warning(caplog):
    assert missing_reason("cpu") is None
    assert missing_reason(MISSING)
    config = PPOConfig(device=MISSING)
    assert on_available_device(config).device == "cpu"
    assert f"'{MISSING}' is not available, so the CPU is used" in caplog.text
    assert missing_reason("auto") is None
    for device in ("cpu", "auto"):
        config = PPOConfig(device=device)
        assert on_available_device(config) is config


def test_policy_of_a_checkpoint_acts_on_the_cpu(checkpoint, caplog):
    policy = PPOTorchPolicy.from_checkpoint(checkpoint)
    assert policy.device.type == "cpu"
    assert "the CPU is used" in caplog.text
    assert policy.predict([0.0, 0.1, 0.0, -0.1])[0] in (0, 1)
    with pytest.raises(ConfigError, match=f"device: '{MISSING}' is not available"):
        PPOTorchPolicy.from_checkpoint(checkpoint, config={"device": MISSING})


def test_training_is_continued_on_another_device_only_if_it_is_named(checkpoint):
    with pytest.raises(ConfigError, match=f"device: '{MISSING}' is not available"):
        PPO.from_checkpoint(checkpoint)
    with PPO.from_checkpoint(checkpoint, config={"device": "cpu"}) as algorithm:
        assert algorithm.train()["timesteps_total"] == 256


def test_pickled_policy_is_rebuilt_on_the_cpu(checkpoint):
    policy = PPOTorchPolicy.from_checkpoint(checkpoint)
    policy.config = policy.config.updated(device=MISSING)
    copied = pickle.loads(pickle.dumps(policy))
    assert copied.device.type == "cpu"
    assert copied.predict([0.0, 0.1, 0.0, -0.1])[0] == policy.predict([0.0, 0.1, 0.0, -0.1])[0]
