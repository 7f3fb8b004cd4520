"""WorkerConfig: the settings of workers in mappings and records."""

import pytest

from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.ddppo import DDPPOConfig
from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.policies import ConfigError, Policy
from flowrl.policies.config import PolicyConfig
from flowrl.sampling import DefaultCallbacks, RolloutWorker
from flowrl.sampling.worker_config import WORKER_SETTINGS, WorkerConfig
from flowrl.trainer.config import AlgorithmConfig


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


@pytest.mark.parametrize("as_record", [False, True])
@pytest.mark.parametrize(
    ("index", "num_gpus", "device"),
    [(0, 0, "cuda:1"), (1, 0, "cpu"), (1, 0.5, "cuda"), (1, 2, "cuda:1")],
)
def test_remote_workers_use_only_the_gpu_that_they_reserve(index, num_gpus, device, as_record):
    """Ray gives the process of an actor the GPUs that it reserves, from index 0 on."""

    class Acts(Policy):
        def compute_actions(self, obs_batch, explore=True):
            raise NotImplementedError

    settings = {"device": "cuda:1", "num_gpus_per_worker": num_gpus}
    config = AlgorithmConfig(**settings) if as_record else settings
    worker = RolloutWorker("CartPole-v1", Acts, config, worker_index=index)
    assert worker.policy.config.device == device
    worker.stop()


@pytest.mark.parametrize("config_class", [A3CConfig, DDPPOConfig])
def test_workers_that_learn_on_a_gpu_need_one(config_class):
    with pytest.raises(ConfigError, match="device='cuda' needs num_gpus_per_worker above 0"):
        config_class(device="cuda", num_workers=2)
    config_class(device="cuda", num_workers=2, num_gpus_per_worker=1)
    config_class(device="cuda", num_workers=0)
