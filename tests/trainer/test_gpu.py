"""Training with a GPU: where the parts of a plan run, learners and workers with GPUs, resuming."""

import math

import numpy as np
import pytest

from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.apex import APEXConfig
from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.ddppo import DDPPOConfig
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.algorithms.ppo import PPOConfig
from flowrl.algorithms.r2d2 import R2D2Config
from flowrl.algorithms.sac import SACConfig
from flowrl.algorithms.td3 import TD3Config
from flowrl.ops import (
    ConcatBatches,
    MultiGPUTrainOneStep,
    ParallelRollouts,
    StandardMetricsReporting,
)
from flowrl.policies import Policy
from flowrl.trainer.algorithm import Algorithm
from tests.learning_envs import Catch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:The AccumulateGrad node's stream does not match"),
]

ON_POLICY = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 2}
OFF_POLICY = {"learning_starts": 32, "train_batch_size": 32}
FAST = {"seed": 1, "min_sample_timesteps_per_iteration": 64, "rollout_fragment_length": 16}
ASYNC = {**FAST, "num_workers": 2, "train_batch_size": 64}
LEARNERS = {
    "impala": (IMPALAConfig, {"train_batch_size": 64}),
    "appo": (APPOConfig, {"train_batch_size": 64}),
    "apex": (APEXConfig, {**OFF_POLICY, "num_replay_shards": 1}),
}
WORKERS = {
    "a3c": (A3CConfig, {}),
    "ddppo": (DDPPOConfig, {"sgd_minibatch_size": 8, "num_sgd_iter": 2}),
}
VARIANTS = {
    "ppo": (PPOConfig, "CartPole-v1", ON_POLICY),
    "ppo bfloat16": (PPOConfig, "CartPole-v1", {**ON_POLICY, "precision": "bfloat16"}),
    "ppo images": (PPOConfig, Catch, ON_POLICY),
    "ppo images bfloat16": (PPOConfig, Catch, {**ON_POLICY, "precision": "bfloat16"}),
    "ppo lstm bfloat16": (
        PPOConfig, "CartPole-v1",
        {**ON_POLICY, "precision": "bfloat16", "model": {"use_lstm": True}},
    ),
    "ppo microbatches": (PPOConfig, "CartPole-v1", {**ON_POLICY, "microbatch_size": 16}),
    "dqn images": (DQNConfig, Catch, OFF_POLICY),
    "rainbow": (DQNConfig, "CartPole-v1", {**OFF_POLICY, "num_atoms": 5, "noisy": True}),
    "r2d2": (R2D2Config, "CartPole-v1", {**OFF_POLICY, "model": {"use_lstm": True}}),
    "sac": (SACConfig, "Pendulum-v1", OFF_POLICY),
    "sac bfloat16": (SACConfig, "Pendulum-v1", {**OFF_POLICY, "precision": "bfloat16"}),
    "td3": (TD3Config, "Pendulum-v1", OFF_POLICY),
}  # fmt: skip
COMPILED = ["ppo", "sac"]


@pytest.fixture(scope="module")
def gpu_ray():
    """Start Ray with the GPU."""
    import ray
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    ray.shutdown()
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def train(algorithm, iterations=2):
    for _ in range(iterations):
        result = algorithm.train()
    stats = result["info"]["learner"]["default_policy"]["learner_stats"]
    assert all(math.isfinite(value) for value in stats.values()), stats
    return result


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", VARIANTS)
def test_training_stops_and_resumes(name, gpu_ray, tmp_path):
    kind, env, settings = VARIANTS[name]
    config = kind(env=env, num_envs_per_worker=2, device="cuda", **FAST, **settings)
    with config.build() as algorithm:
        train(algorithm)
        assert algorithm.get_policy().device.type == "cuda"
        algorithm.save(tmp_path / "checkpoint")
        weights = algorithm.get_policy().get_weights()
    for device in ("cuda", "cpu"):
        change = {} if device == "cuda" else {"device": device}
        with Algorithm.from_checkpoint(tmp_path / "checkpoint", change, trust=True) as resumed:
            assert resumed.get_policy().device.type == device
            assert_same_weights(resumed.get_policy().get_weights(), weights)
            train(resumed)
    policy = Policy.from_checkpoint(tmp_path / "checkpoint", trust=True)
    assert_same_weights(policy.get_weights(), weights)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_networks_train(name, gpu_ray):
    kind, env, settings = VARIANTS[name]
    with kind(env=env, device="cuda", compile=True, **FAST, **settings).build() as algorithm:
        train(algorithm)


def test_images_use_the_gpu_by_default(gpu_ray):
    with PPOConfig(env=Catch, **FAST, **ON_POLICY).build() as algorithm:
        assert algorithm.get_policy().device.type == "cuda"
        train(algorithm)


def test_remote_workers_without_a_gpu_act_on_the_cpu(gpu_ray):
    config = PPOConfig(
        env=Catch, num_workers=2, evaluation_num_workers=1, device="cuda", **FAST, **ON_POLICY
    )
    with config.build() as algorithm:
        train(algorithm)
        devices = algorithm.workers.foreach_worker(lambda worker: worker.policy.device.type)
        assert devices == ["cuda", "cpu", "cpu"]
        assert algorithm.evaluate(2)["episodes"] == 2


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_on_actors_have_a_gpu(name, gpu_ray, tmp_path):
    kind, settings = LEARNERS[name]
    config = kind(env="CartPole-v1", num_gpus=1, **{**ASYNC, **settings})
    with config.build() as algorithm:
        train(algorithm)
        assert algorithm.get_policy().device.type == "cpu"
        assert gpu_ray.available_resources().get("GPU", 0) == 0
        algorithm.save(tmp_path / "checkpoint")
    weights = Policy.from_checkpoint(tmp_path / "checkpoint", trust=True).get_weights()
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as resumed:
        assert_same_weights(resumed.get_policy().get_weights(), weights)
        train(resumed)


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_a_learner_thread_uses_the_gpu_of_the_driver(name, gpu_ray):
    kind, settings = LEARNERS[name]
    config = kind(env=Catch, device="cuda", **{**ASYNC, **settings})
    with config.build() as algorithm:
        train(algorithm)
        assert algorithm.get_policy().device.type == "cuda"


@pytest.mark.parametrize("name", WORKERS)
def test_workers_that_learn_share_a_gpu(name, gpu_ray):
    kind, settings = WORKERS[name]
    config = kind(
        env="CartPole-v1", num_workers=2, num_gpus_per_worker=0.5, device="cuda", **FAST, **settings
    )
    with config.build() as algorithm:
        train(algorithm)
        devices = algorithm.workers.foreach_worker(lambda worker: worker.policy.device.type)
        assert devices == ["cuda"] * 3


def test_an_operator_that_learns_on_an_actor_with_a_gpu(gpu_ray):
    def plan(workers, config):
        trained = (
            ParallelRollouts(workers, mode="bulk_sync")
            .combine(ConcatBatches(64))
            .for_each(MultiGPUTrainOneStep(workers, num_gpus=1))
        )
        return StandardMetricsReporting(trained, workers, config)

    config = PPOConfig(env="CartPole-v1", num_workers=2, **FAST, **ON_POLICY)
    with config.build(plan=plan) as algorithm:
        before = algorithm.get_policy().get_weights()
        train(algorithm)
        after = algorithm.get_policy().get_weights()
        assert any((before[name] != after[name]).any() for name in before)
