"""WorkerConfig: the settings of workers in mappings and records."""

import pytest

from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.policies import ConfigError
from flowrl.policies.config import PolicyConfig
from flowrl.sampling import DefaultCallbacks, RolloutWorker
from flowrl.sampling.worker_config import WORKER_SETTINGS, WorkerConfig


def test_algorithm_config_is_its_own_worker_config():
    config = PPOConfig(env="CartPole-v1")
    assert WorkerConfig.of(config) is config


def test_mapping_may_contain_settings_of_policies():
    config = WorkerConfig.of({"num_envs_per_worker": 3, "clip_param": 0.1, "seed": 5})
    assert (config.num_envs_per_worker, config.seed) == (3, 5)
    assert config.rollout_fragment_length == 200
    assert WorkerConfig.of(None).rollout_fragment_length == 200


def test_record_of_a_policy_sets_only_the_seed():
    config = WorkerConfig.of(PolicyConfig(seed=4, lr=0.5))
    assert (config.seed, config.lr) == (4, WorkerConfig().lr)


def test_aliases_and_nested_multi_agent_settings_are_accepted():
    nested = {"policies_to_train": ["default_policy"], "count_steps_by": "agent_steps"}
    config = WorkerConfig.of({"callbacks": DefaultCallbacks, "multiagent": nested})
    assert config.callbacks_class is DefaultCallbacks
    assert (config.policies_to_train, config.count_steps_by) == (["default_policy"], "agent_steps")
    with pytest.raises(ConfigError, match=r"multiagent: unknown setting 'policys'\. Did you mean"):
        WorkerConfig.of({"multiagent": {"policys": {}}})


def test_mapping_is_split_between_worker_and_policy():
    settings = {"num_envs_per_worker": 2, "clip_param": 0.1, "callbacks": DefaultCallbacks}
    worker = RolloutWorker("CartPole-v1", PPOTorchPolicy, settings)
    assert worker.num_envs == worker.config.num_envs_per_worker == 2
    assert worker.policy.config.clip_param == 0.1
    worker.stop()
    with pytest.raises(ConfigError, match="unknown setting 'clip_parm'"):
        RolloutWorker("CartPole-v1", PPOTorchPolicy, {"clip_parm": 0.1})


def test_worker_settings_are_not_settings_of_policies():
    assert "num_envs_per_worker" in WORKER_SETTINGS
    assert not WORKER_SETTINGS & set(PolicyConfig.model_fields)
