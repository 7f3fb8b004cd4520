"""The examples of RLlib's documentation of key concepts (docs/reference/compatibility.md)."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from flowrl.algorithms import Algorithm
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.cli.main import main
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.ops import (
    ResultDict,
    multi_gpu_train_one_step,
    synchronous_parallel_sample,
    train_one_step,
)
from flowrl.policies import ConfigError, Policy, build_tf_policy, build_torch_policy
from flowrl.replay import PrioritizedReplayBuffer, ReplayBuffer
from flowrl.sampling import RolloutWorker, WorkerSet

# -- three ways to train ---------------------------------------------------------------------------


def test_algorithm_in_python():
    config = PPOConfig().environment(env="CartPole-v1").training(train_batch_size=400)
    algo = config.build()
    assert isinstance(algo, PPO)
    assert isinstance(algo.config, PPOConfig)
    assert [algo.train()["timesteps_total"] for _ in range(2)] == [400, 800]
    algo.stop()


@pytest.mark.slow
def test_algorithm_with_tune(ray_session):
    from ray import tune

    import flowrl.tune  # registers the names

    assert issubclass(flowrl.tune.PPO, tune.Trainable)
    config = PPOConfig().environment(env="CartPole-v1").training(train_batch_size=400)
    results = tune.run("PPO", config=config, stop={"training_iteration": 2}, verbose=0)
    assert results.trials[0].last_result["timesteps_total"] == 800


def test_algorithm_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--run=PPO", "--env=CartPole-v1", '--config={"train_batch_size": 400}']
    assert main([*command, "--stop-iters", "1", "--run-dir", "r"]) == 0
    assert "reached: 1 iteration" in capsys.readouterr().out


# -- policies --------------------------------------------------------------------------------------


def test_policy_from_a_loss_function():
    def policy_gradient_loss(policy, model, dist_class, train_batch):
        logits, _ = model.from_batch(train_batch)
        action_dist = dist_class(logits, model)
        return -torch.mean(action_dist.logp(train_batch["actions"]) * train_batch["rewards"])

    my_torch_policy = build_torch_policy(name="MyTorchPolicy", loss_fn=policy_gradient_loss)
    assert issubclass(my_torch_policy, Policy)
    assert my_torch_policy.__name__ == "MyTorchPolicy"
    env = gym.make("CartPole-v1")
    policy = my_torch_policy(env.observation_space, env.action_space, {})
    worker = RolloutWorker(lambda context: gym.make("CartPole-v1"), my_torch_policy, {})
    before = policy.get_weights()
    assert np.isfinite(policy.learn_on_batch(worker.sample())["total_loss"])
    assert any((weight != before[name]).any() for name, weight in policy.get_weights().items())
    with pytest.raises(ConfigError, match=r"build_tf_policy.*use build_torch_policy"):
        build_tf_policy(name="MyTFPolicy", loss_fn=policy_gradient_loss)


class CustomPolicy(PPOTorchPolicy):
    pass


@pytest.mark.slow
def test_standalone_rollout_workers(ray_session):
    import ray

    env = gym.make("CartPole-v1")
    policy = CustomPolicy(env.observation_space, env.action_space, {})
    workers = WorkerSet(
        policy_class=CustomPolicy, env_creator=lambda c: gym.make("CartPole-v1"), num_workers=2
    )
    for _ in range(2):
        t1 = SampleBatch.concat_samples(
            ray.get([w.sample.remote() for w in workers.remote_workers()])
        )
        assert t1.count == 400
        policy.learn_on_batch(t1)
        weights = ray.put({"default_policy": policy.get_weights()})
        for w in workers.remote_workers():
            w.set_weights.remote(weights)
    expected = policy.get_weights()
    for w in workers.remote_workers():
        for name, weight in ray.get(w.get_weights.remote())["default_policy"].items():
            np.testing.assert_array_equal(weight, expected[name])
    workers.stop()


def test_sample_batch_has_the_documented_columns():
    worker = RolloutWorker(lambda context: gym.make("CartPole-v1"), PPOTorchPolicy, {})
    batch = worker.sample()
    columns = {
        "action_logp": np.float32,
        "actions": np.int64,
        "dones": np.bool_,
        "infos": object,
        "new_obs": np.float32,
        "obs": np.float32,
        "rewards": np.float32,
        "t": np.int64,
    }
    for name, dtype in columns.items():
        assert batch[name].dtype == dtype, name
        assert len(batch[name]) == 200
    assert batch["obs"].shape == batch["new_obs"].shape == (200, 4)
    assert "'rewards': np.ndarray((200,), dtype=float32, min=1, max=1, mean=1)" in repr(batch)
    ends = np.flatnonzero(batch["dones"])  # the boundaries of episodes
    assert batch["t"][0] == 0
    assert not batch["t"][ends[ends < 199] + 1].any()
    assert list(batch.as_multi_agent().policy_batches) == ["default_policy"]


# -- training_step ---------------------------------------------------------------------------------


class VPG(A2C):
    def training_step(self) -> ResultDict:
        # 1. Sampling.
        train_batch = synchronous_parallel_sample(
            worker_set=self.workers, max_env_steps=self.config["train_batch_size"]
        )
        # 2. Updating the Policy.
        train_results = train_one_step(self, train_batch)
        # 3. Synchronize worker weights.
        self.workers.sync_weights()
        # 4. Return results.
        return train_results


@pytest.mark.slow_on_actors
def test_training_step(num_workers):
    config = A2CConfig(env="CartPole-v1", train_batch_size=100, num_workers=num_workers)
    with VPG(config) as algo:
        result = algo.train()
        learner = result["info"]["learner"]["default_policy"]
        assert learner["num_agent_steps_trained"] == result["info"]["num_steps_trained"] == 100
        assert np.isfinite(learner["learner_stats"]["policy_loss"])
        assert result["timers"]["sample_time_ms"] > 0
        assert len(algo.workers.remote_workers()) == num_workers
        assert algo.workers.local_worker().policy is algo.get_policy()


def test_sampling_returns_one_batch_for_all_policies():
    config = A2CConfig(env="CartPole-v1", rollout_fragment_length=50)
    with WorkerSet("CartPole-v1", PPOTorchPolicy, config) as workers:
        once = synchronous_parallel_sample(worker_set=workers)
        assert isinstance(once, MultiAgentBatch)
        assert once.env_steps() == 50
        assert synchronous_parallel_sample(worker_set=workers, max_env_steps=120).count == 150
        parts = synchronous_parallel_sample(worker_set=workers, max_agent_steps=60, concat=False)
        assert [part.agent_steps() for part in parts] == [50, 50]


def test_training_step_returns_results_by_policy():
    class Reports(Algorithm):
        policy_class, config_class = PPOTorchPolicy, PPOConfig

        def training_step(self):
            batch = synchronous_parallel_sample(worker_set=self.workers)
            multi_gpu_train_one_step(self, batch)
            return {
                "policy_1": {
                    "learner_stats": {"policy_loss": 6.7291455},
                    "num_agent_steps_trained": 32,
                },
                "policy_2": {
                    "learner_stats": {"policy_loss": 3.554927},
                    "num_agent_steps_trained": 32,
                },
            }

    with Reports(PPOConfig(env="CartPole-v1", train_batch_size=200)) as algo:
        info = algo.train()["info"]
        assert info["policy_1"]["learner_stats"] == {"policy_loss": 6.7291455}
        assert info["policy_2"]["num_agent_steps_trained"] == 32
        assert info["num_agent_steps_trained"] == 200


def test_replay_buffers_store_and_sample():
    worker = RolloutWorker(lambda context: gym.make("CartPole-v1"), PPOTorchPolicy, {})
    for buffer in (ReplayBuffer(1000, seed=0), PrioritizedReplayBuffer(1000, seed=0)):
        buffer.add(worker.sample())
        assert buffer.sample(32).count == 32
