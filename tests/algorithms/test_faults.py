"""Training continues when workers die, hang or raise; checkpoints; policy lag."""

import contextlib
import os
import signal

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.ppo import PPO, PPOConfig
from flowrl.data.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from flowrl.iter import ShardFailedError
from flowrl.ops import ConcatBatches, ParallelRollouts, StandardMetricsReporting, TrainOneStep


def small(**settings):
    return PPOConfig(
        **{
            "env": "CartPole-v1",
            "train_batch_size": 128,
            "sgd_minibatch_size": 64,
            "num_sgd_iter": 1,
            "num_envs_per_worker": 2,
            "model": {"fcnet_hiddens": [8]},
            "seed": 1,
            "delay_between_worker_restarts_s": 0.01,
            **settings,
        }
    )


def pids(algorithm, ray):
    remote = algorithm.workers.remote_workers()
    return ray.get([worker.apply.remote(lambda w: os.getpid()) for worker in remote])


@pytest.mark.slow
def test_killed_worker_is_replaced_and_no_step_counts_twice(ray_session):
    with small(num_workers=2, wait_for_replaced_workers=True).build() as algorithm:
        first = algorithm.train()
        assert first["num_remote_worker_restarts"] == 0
        victim, survivor = pids(algorithm, ray_session)
        os.kill(victim, signal.SIGKILL)
        result = algorithm.train()
        assert result["num_env_steps_sampled"] == result["num_env_steps_trained"] == 256
        assert result["num_remote_worker_restarts"] == 1
        assert result["num_healthy_workers"] == 2
        new_pids = pids(algorithm, ray_session)
        assert new_pids[1] == survivor
        assert new_pids[0] != victim
        # the replacement has the newest weights
        versions = algorithm.workers.foreach_worker(lambda w: w.policy.version)
        assert versions[1] == versions[2]
        assert algorithm.train()["num_env_steps_sampled"] == 384


@pytest.mark.slow
def test_run_continues_with_the_other_workers_without_recreation(ray_session):
    config = small(num_workers=2, recreate_failed_workers=False)
    with config.build() as algorithm:
        algorithm.train()
        os.kill(pids(algorithm, ray_session)[0], signal.SIGKILL)
        with pytest.raises(
            ShardFailedError,
            match=r"shard 0 of rollouts.* \(worker 1\) .*recreate_failed_workers is False",
        ):
            algorithm.train()
        result = algorithm.train()
        assert result["num_healthy_workers"] == 1
        assert result["num_env_steps_sampled"] == 128 + 128


class HangsOnce(gym.Env):
    """Hangs at its 40th step, in the first process that reaches it."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, marker):
        self.marker, self.steps = marker, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        import time

        self.steps += 1
        if self.steps == 40:
            with contextlib.suppress(FileExistsError), open(self.marker, "x"):
                time.sleep(600)
        return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}


@pytest.mark.slow
def test_hanging_worker_is_replaced(ray_session, tmp_path):
    marker = str(tmp_path / "hung")
    config = small(
        env=lambda context: HangsOnce(marker),
        num_workers=2,
        sample_timeout_s=8.0,
        train_batch_size=64,
    )
    with config.build() as algorithm:
        for _ in range(4):
            result = algorithm.train()
        assert os.path.exists(marker)
        assert result["num_remote_worker_restarts"] >= 1  # more if a busy machine delays the other
        assert result["num_env_steps_sampled"] == 256


class Asynchronous(PPO):
    @staticmethod
    def execution_plan(workers, config):
        rollouts = ParallelRollouts(workers, mode="async", num_async=2, max_policy_lag=1)
        train = rollouts.for_each(TrainOneStep(workers))
        return StandardMetricsReporting(train, workers, config)


@pytest.mark.slow
def test_policy_lag_is_bounded_and_zero_in_bulk_sync(ray_session):
    with small(num_workers=2).build() as algorithm:
        for _ in range(2):
            result = algorithm.train()
            assert result["env_runners"]["policy_lag_max"] == 0
    with Asynchronous(small(num_workers=2, rollout_fragment_length=16)) as algorithm:
        results = [algorithm.train() for _ in range(8)]
        assert any(r["env_runners"]["policy_lag_max"] > 0 for r in results)
        lags = [r["learners"]["default_policy"]["policy_lag_max"] for r in results]
        assert max(lags) <= 1  # of the batches that were trained on
        last = results[-1]
        counters = algorithm.plan.metrics.counters
        assert last["num_env_steps_sampled"] == (
            last["num_env_steps_trained"] + counters["num_env_steps_dropped"]
        )


@pytest.mark.parametrize("normalize", ["normalize_observations", "normalize_rewards"])
def test_statistics_of_filters_are_no_updates(normalize):
    with PPO(small(**{normalize: True})) as algorithm:
        for _ in range(3):
            result = algorithm.train()
            assert (
                result["info"]["learner"]["default_policy"]["learner_stats"]["policy_lag_max"] == 0
            )


def test_bulk_sync_rejects_a_lag_limit():
    with pytest.raises(ValueError, match="max_policy_lag"), small().build() as algorithm:
        ParallelRollouts(algorithm.workers, mode="bulk_sync", max_policy_lag=1)


def test_running_algorithm_restores_a_checkpoint(tmp_path):
    with small().build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        weights = algorithm.get_policy().get_weights()
        for _ in range(2):
            algorithm.train()
        algorithm.restore(tmp_path / "c")
        for name, weight in algorithm.get_policy().get_weights().items():
            np.testing.assert_array_equal(weight, weights[name])
        result = algorithm.train()
        assert result["timesteps_total"] == 256
        assert result["training_iteration"] == 2


def test_checkpoint_contains_pending_batches_of_operators(tmp_path):
    class PendingBatches(PPO):
        @staticmethod
        def execution_plan(workers, config):
            rollouts = ParallelRollouts(workers, mode="bulk_sync")
            direct, pending = rollouts.duplicate(2, max_buffered=4)
            pending = pending.combine(ConcatBatches(10_000))
            both = direct.union(pending, deterministic=True)
            return StandardMetricsReporting(both, workers, config)

    with PendingBatches(small()) as original, PendingBatches(small()) as restored:
        for _ in range(3):
            original.train()
        original.save(tmp_path / "c")
        restored.restore(tmp_path / "c")
        concat = "combine(ConcatBatches)"
        saved = original.plan.state_dict()["stages"][concat]["operator"]
        loaded = restored.plan.state_dict()["stages"][concat]["operator"]
        assert saved["steps"] == loaded["steps"] > 0
        pairs = zip(saved["pending"], loaded["pending"], strict=True)
        for saved_batch, loaded_batch in pairs:
            assert saved_batch.sources == loaded_batch.sources != ()
            for name, column in saved_batch.without_lazy_columns().items():
                np.testing.assert_array_equal(column, loaded_batch[name])


@pytest.mark.slow
def test_a2c_continues_after_all_workers_died(ray_session):
    config = A2CConfig(
        env="CartPole-v1",
        num_workers=2,
        train_batch_size=64,
        seed=3,
        delay_between_worker_restarts_s=0.01,
    )
    with config.build() as algorithm:
        algorithm.train()
        for pid in pids(algorithm, ray_session):
            os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            result = algorithm.train()
        assert result["num_remote_worker_restarts"] == 2
        assert result["num_env_steps_trained"] == result["num_env_steps_sampled"]


@pytest.mark.parametrize("missing", ["plan", "worker", "iteration", "global_vars", "time_total_s"])
def test_damaged_state_is_rejected_and_changes_nothing(tmp_path, missing):
    with small().build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        state, manifest = read_checkpoint(tmp_path / "c")
        for broken in ({k: v for k, v in state.items() if k != missing}, {**state, missing: []}):
            metadata = {
                k: v for k, v in manifest.items() if k not in ("format", "files", "blake2b")
            }
            write_checkpoint(tmp_path / "broken", broken, metadata)
            weights = algorithm.get_policy().get_weights()
            if missing == "global_vars" and broken.get(missing) == []:
                continue  # an empty list is read as an empty mapping
            with pytest.raises(CheckpointError, match="does not fit"):
                algorithm.restore(tmp_path / "broken")
            for name, weight in algorithm.get_policy().get_weights().items():
                np.testing.assert_array_equal(weight, weights[name])
        assert algorithm.train()["training_iteration"] == 2


def test_nonfinite_observation_is_rejected():
    with small().build() as algorithm, pytest.raises(ValueError, match="not finite"):
        algorithm.compute_single_action(np.full(4, np.nan))


def test_training_continues_after_an_evaluation_without_end(monkeypatch, caplog):
    monkeypatch.setattr("flowrl.trainer.evaluation.MAX_EPISODE_STEPS", 1000)

    class Endless(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.zeros(2, np.float32), 0.0, False, False, {}

    with small(
        env=lambda c: Endless(), evaluation_interval=1, evaluation_duration=3
    ).build() as algorithm:
        for _ in range(2):
            evaluation = algorithm.train()["evaluation"]
            assert evaluation["num_unfinished_episodes"] == 3
            assert np.isnan(evaluation["episode_reward_mean"])
    assert "set horizon (--horizon of flowrl train)" in caplog.text


@pytest.mark.slow
def test_training_continues_while_a_killed_worker_is_replaced(ray_session):
    with small(num_workers=2).build() as algorithm:
        algorithm.train()
        victim, survivor = pids(algorithm, ray_session)
        os.kill(victim, signal.SIGKILL)
        result = algorithm.train()
        # the other worker sampled the whole batch, and no step is missing or counted twice
        assert result["num_env_steps_sampled"] == result["num_env_steps_trained"] == 256
        while result["num_remote_worker_restarts"] == 0:
            result = algorithm.train()
        new_pids = pids(algorithm, ray_session)
        assert new_pids[1] == survivor
        assert new_pids[0] != victim
        before = dict(algorithm.workers.env_steps_by_worker)
        while algorithm.workers.env_steps_by_worker.get(0, 0) <= before.get(0, 0):
            result = algorithm.train()
        assert result["num_env_steps_sampled"] == result["num_env_steps_trained"]
        versions = algorithm.workers.foreach_worker(lambda w: w.policy.version)
        assert versions[1] == versions[2]
