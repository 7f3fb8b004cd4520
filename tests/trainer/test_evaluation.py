"""Evaluation during training: in process, on actors, in parallel; by episodes and by steps."""

import json
import os
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
from flowrl.algorithms.a3c import A3CConfig
from flowrl.algorithms.ddppo import DDPPOConfig
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.algorithms.td3 import TD3
from flowrl.data.checkpoint import CheckpointError, list_checkpoints
from flowrl.envs import MultiAgentEnv
from flowrl.iter.ray_runtime import death_errors
from flowrl.policies import ConfigError, PolicySpec, ViewRequirement
from flowrl.sampling.callbacks import DefaultCallbacks
from flowrl.trainer.evaluation import (
    EvaluationWorkers,
    check_evaluation_workers,
    evaluation_settings,
)
from flowrl.trainer.runs.saved_run import best_checkpoint
from tests.extras import require_extra
from tests.policies.fakes import DrawingNetwork


def a2c_config(**settings):
    base = {
        "env": "CartPole-v1",
        "train_batch_size": 32,
        "seed": 2,
        "model": {"fcnet_hiddens": [8]},
    }
    return A2CConfig(**{**base, **settings})


class FixedLength(gym.Env):
    """Episodes of a given length [env steps] and reward per step."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=3, reward=1.0):
        self.length, self.reward = length, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), self.reward, self.t == self.length, False, {}


def test_evaluation_config_overrides_settings():
    config = a2c_config(env=FixedLength).evaluation(
        evaluation_interval=2,
        evaluation_duration=4,
        evaluation_config={"env_config": {"length": 5, "reward": 2.0}},
    )
    with config.build() as algorithm:
        results = [algorithm.train() for _ in range(4)]
        assert ["evaluation" in result for result in results] == [False, True, False, True]
        evaluation = results[3]["evaluation"]
        assert evaluation["episode_reward_mean"] == 10.0
        assert evaluation["episode_len_mean"] == 5.0
        assert evaluation["episodes"] == 4
        assert evaluation["training_iteration"] == 4
        assert results[3]["episode_reward_mean"] == 3.0
        assert algorithm.evaluate(episodes=2)["episode_reward_mean"] == 10.0


class ShortOrLong(FixedLength):
    """Episodes have 1 or 50 env steps."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        self.length = self.np_random.choice([1, 50])
        return result


def test_evaluation_by_steps_ends_the_running_episodes():
    config = a2c_config(
        env=FixedLength, evaluation_duration=17, evaluation_duration_unit="timesteps"
    )
    with config.build() as algorithm:
        evaluation = algorithm.evaluate()
        assert evaluation["episodes"] == 17 // 3 + 1
        assert evaluation["episode_reward_mean"] == 3.0
    with a2c_config(env=FixedLength, env_config={"length": 1000}).build() as algorithm:
        assert algorithm.evaluate(timesteps=10, num_envs=2)["episodes"] == 2


@pytest.mark.parametrize(
    ("timesteps", "num_envs", "per_env"),
    [(64, 1, 7), (65, 1, 7), (70, 1, 7), (5000, 1, 500), (260, 4, 7), (1030, 16, 7)],
)
def test_evaluation_by_steps_starts_no_episodes_after_the_steps(timesteps, num_envs, per_env):
    with a2c_config(env=FixedLength, env_config={"length": 10}).build() as algorithm:
        found = algorithm.evaluate(timesteps=timesteps, num_envs=num_envs)
    assert found["episodes"] == per_env * num_envs


@pytest.mark.parametrize("num_envs", [1, 20, 200])
def test_short_episodes_are_not_overrepresented(num_envs):
    with a2c_config(env=ShortOrLong).build() as algorithm:
        found = algorithm.evaluate(timesteps=4000, num_envs=num_envs)
    error = 24.5 / np.sqrt(found["episodes"])
    assert abs(found["episode_reward_mean"] - 25.5) < 3 * error


@pytest.mark.parametrize("model", [{"fcnet_hiddens": [8]}, {"custom_model": DrawingNetwork}])
def test_evaluation_does_not_change_training(model):
    returns, weights = [], []
    for interval in (None, 1):
        settings = {"evaluation_interval": interval, "evaluation_duration": 2, "model": model}
        with a2c_config(**settings).build() as algorithm:
            returns.append([algorithm.train()["episode_reward_mean"] for _ in range(4)])
            weights.append(algorithm.get_policy().get_weights())
    for name, weight in weights[0].items():
        np.testing.assert_array_equal(weight, weights[1][name])
    assert returns[0] == pytest.approx(returns[1], nan_ok=True)


def test_evaluation_config_sets_the_default_of_explore():
    with a2c_config(evaluation_config={"explore": True}).build() as algorithm:
        assert algorithm.evaluate(episodes=3) == algorithm.evaluate(episodes=3, explore=True)
        assert algorithm.evaluate(episodes=3) != algorithm.evaluate(episodes=3, explore=False)


@pytest.mark.parametrize("explore", ["no", 0, np.False_])
def test_other_values_of_explore_are_rejected(explore):
    with a2c_config().build() as algorithm, pytest.raises(ConfigError, match="explore must be"):
        algorithm.evaluate(episodes=1, explore=explore)


class Choices(gym.Env):
    """Has n actions, and observations in a Dict with a given key."""

    def __init__(self, n=6, key="a"):
        self.observation_space = gym.spaces.Dict({key: gym.spaces.Box(0, n, (1,))})
        self.action_space = gym.spaces.Discrete(n)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {key: np.zeros(1, np.float32) for key in self.observation_space}, {}

    def step(self, action):
        return self.reset()[0], 0.0, True, False, {}


@pytest.mark.parametrize(
    ("changed", "name"), [({"n": 2}, "action_space"), ({"key": "b"}, "observation_space")]
)
def test_evaluation_environment_with_other_choices_is_rejected(changed, name):
    config = a2c_config(
        env=Choices, evaluation_interval=1, evaluation_config={"env_config": changed}
    )
    with config.build() as algorithm, pytest.raises(ConfigError, match=f"has the {name}"):
        algorithm.check_start()


def test_evaluation_starts_no_spare_workers():
    config = a2c_config(evaluation_num_workers=1, num_spare_workers=2)
    workers = EvaluationWorkers(config, None)._workers
    assert workers.config.num_spare_workers == 0


@pytest.mark.parametrize(
    "config",
    [
        DDPPOConfig(train_batch_size=200, microbatch_size=50, evaluation_num_workers=1),
        DDPPOConfig(train_batch_size=200, evaluation_num_workers=2),
        DDPPOConfig(train_batch_size=130, num_envs_per_worker=128, sgd_minibatch_size=200),
        A3CConfig(
            num_workers=0,
            max_requests_in_flight_per_worker=1,
            max_policy_lag=0,
            evaluation_num_workers=3,
        ),
        DDPPOConfig(
            policies={"default_policy": PolicySpec(config={"lr": 1e-3})},
            train_batch_size=200,
            microbatch_size=50,
            evaluation_num_workers=1,
        ),
    ],
)
def test_settings_of_training_are_not_checked_again_for_evaluations(config):
    with config.updated(env="CartPole-v1", evaluation_interval=1, seed=0).build() as algorithm:
        algorithm.check_start()
        settings = evaluation_settings(algorithm.config)
        workers = EvaluationWorkers(settings, algorithm.policy_class)._workers
        assert workers.local_worker().get_policy().config.microbatch_size == config.microbatch_size
        assert algorithm.evaluate(episodes=1)["episodes"] == 1


def test_same_seed_plays_the_same_episodes():
    with a2c_config(seed=2).build() as algorithm:
        first = algorithm.evaluate(episodes=4, explore=True)
        assert algorithm.evaluate(episodes=4, explore=True) == first
        assert algorithm.evaluate(episodes=4, explore=True, seed=2) == first
        other = algorithm.evaluate(episodes=4, explore=True, seed=3)
        assert other != first
        assert algorithm.evaluate(episodes=4, explore=True, seed=3) == other
        assert algorithm.evaluate(episodes=4, explore=True) == first
        with pytest.raises(ConfigError, match=r"^seed: "):
            algorithm.evaluate(episodes=4, seed=-1)


@pytest.mark.slow
def test_workers_share_an_evaluation(ray_session):
    config = a2c_config(
        evaluation_interval=1, evaluation_duration=5, evaluation_num_workers=2, num_workers=0
    )
    with config.build() as algorithm:
        evaluation = algorithm.train()["evaluation"]
        assert evaluation["episodes"] == 5
        assert evaluation["training_iteration"] == 1
        # the workers play different episodes
        assert evaluation["episode_reward_max"] > evaluation["episode_reward_min"]


@pytest.mark.slow
def test_evaluation_parallel_to_training(ray_session):
    config = a2c_config(
        evaluation_interval=2,
        evaluation_duration=2,
        evaluation_num_workers=1,
        evaluation_parallel_to_training=True,
    )
    with config.build() as algorithm:
        evaluations = [algorithm.train().get("evaluation") for _ in range(6)]
    assert evaluations[0] is None
    assert evaluations[1] is None  # the first evaluation starts here
    evaluated = [e["training_iteration"] for e in evaluations if e is not None]
    assert evaluated == [2, 4] or evaluated == [2, 4, 6]


@pytest.mark.slow
def test_end_of_a_run_waits_for_the_evaluation_parallel_to_training(ray_session, tmp_path):
    config = a2c_config(
        evaluation_interval=3,
        evaluation_duration=2,
        evaluation_num_workers=1,
        evaluation_parallel_to_training=True,
    )
    with config.build() as algorithm:
        algorithm.learn(stop={"training_iteration": 3}, run_dir=tmp_path / "r")
        assert algorithm.last_result["evaluation"]["training_iteration"] == 3
        assert algorithm.finish_evaluation() is None
    lines = (tmp_path / "r/result.json").read_text().splitlines()
    assert json.loads(lines[-1])["evaluation"]["training_iteration"] == 3


def test_last_result_is_written_if_the_last_evaluation_fails(tmp_path, monkeypatch):
    with a2c_config().build() as algorithm:

        def fail():
            raise ArithmeticError("the evaluation failed")

        monkeypatch.setattr(algorithm._evaluator, "finish", fail)
        with pytest.raises(ArithmeticError):
            algorithm.learn(stop={"training_iteration": 3}, run_dir=tmp_path / "r", progress=False)
    lines = (tmp_path / "r/result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2, 3]


class FailsAtStepFour(gym.Wrapper):
    def __init__(self, context):
        super().__init__(gym.make("CartPole-v1"))

    def reset(self, **kwargs):
        self.steps, self.length = 0, self.np_random.integers(2, 7)
        return super().reset(**kwargs)

    def step(self, action):
        self.steps += 1
        if self.steps == 4:
            raise ArithmeticError("broken on purpose")
        obs, reward, _, _, info = super().step(action)
        return obs, reward, self.steps == self.length, False, info


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_dropped_episodes_of_an_evaluation_are_counted(workers, ray_session):
    config = a2c_config(
        evaluation_interval=1,
        evaluation_duration=6,
        evaluation_num_workers=workers,
        evaluation_config={"env": FailsAtStepFour, "max_num_env_restarts": 1000},
    )
    with config.build() as algorithm:
        evaluation = algorithm.train()["evaluation"]
    assert evaluation["episodes"] == 6
    assert evaluation["episode_len_mean"] < 4
    assert evaluation["num_faulty_episodes"] > 0


@pytest.mark.slow
def test_workers_without_resources_beside_the_others_are_rejected_at_once(ray_session):
    most_of_a_node = {f"node:{ray_session.util.get_node_ip_address()}": 0.6}
    config = a2c_config(
        num_workers=1,
        custom_resources_per_worker=most_of_a_node,
        evaluation_interval=5,
        evaluation_num_workers=1,
    )
    message = "evaluation_num_workers: all workers and learners together need 1.2 of 'node:.* has 1"
    with config.build() as algorithm, pytest.raises(ConfigError, match=message):
        algorithm.train()


def test_evaluation_workers_leave_the_gpus_of_learners_free(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 3.0})
    monkeypatch.setattr("flowrl.sampling.placement._is_in_placement_group", lambda: False)
    config = IMPALAConfig(
        env="CartPole-v1", num_workers=2, num_gpus_per_worker=0.5, evaluation_num_workers=2
    )
    check_evaluation_workers(config.updated(num_gpus=1))
    message = "all workers and learners together need 4 of .GPU.; the cluster has 3"
    with pytest.raises(ConfigError, match=message):
        check_evaluation_workers(config.updated(num_gpus=2))


class StepFails(gym.Wrapper):
    def step(self, action):
        raise ArithmeticError("broken on purpose")


@pytest.mark.slow
def test_error_in_an_evaluation_is_raised(ray_session):
    broken_env = {
        "env": lambda context: StepFails(gym.make("CartPole-v1")),
        "max_num_env_restarts": 0,
    }
    for workers in (0, 1):
        config = a2c_config(
            evaluation_interval=1, evaluation_num_workers=workers, evaluation_config=broken_env
        )
        with config.build() as algorithm, pytest.raises(ArithmeticError, match="on purpose"):
            algorithm.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_config": {"envv": 1}}, "evaluation_config: unknown setting 'envv'"),
        ({"evaluation_config": {"env": "CartPol-v1"}}, "evaluation_config: env"),
        ({"evaluation_config": {"horizon": 0}}, "evaluation_config: horizon"),
        ({"evaluation_config": {"explore": 3}}, "explore must be True or False"),
        ({"evaluation_parallel_to_training": True}, "needs evaluation workers"),
        (
            {"evaluation_parallel_to_training": True, "evaluation_num_workers": 1},
            "needs an evaluation_interval",
        ),
        ({"evaluation_duration": 0}, "evaluation_duration"),
        ({"evaluation_interval": 0}, "evaluation_interval"),
        ({"evaluation_duration_unit": "days"}, "evaluation_duration_unit"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        a2c_config(**settings).build()


def test_evaluation_environments_are_checked_before_the_first_iteration():
    changed = {"vectorization_mode": "sync", "on_invalid_step": "drop"}
    config = a2c_config(evaluation_interval=5, evaluation_config=changed)
    message = "evaluation_config: cannot create its environment: on_invalid_step"
    with config.build() as algorithm, pytest.raises(ConfigError, match=message):
        algorithm.train()


def test_zero_episodes_are_rejected():
    with a2c_config().build() as algorithm, pytest.raises(ConfigError, match=">= 1"):
        algorithm.evaluate(episodes=0)


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_workers_without_exploration_sample_greedy_actions(batch_mode):
    config = a2c_config(explore=False, batch_mode=batch_mode, train_batch_size=64)
    with config.build() as algorithm:
        policy = algorithm.get_policy()
        batch = algorithm.workers.local_worker().sample()
        greedy_actions, _, _ = policy.compute_actions(batch["obs"], explore=False)
        np.testing.assert_array_equal(batch["actions"], greedy_actions)


def config_with_evaluation_worker(env, env_config=None, **settings):
    """A config with one evaluation of an episode per iteration, on one worker."""
    return a2c_config(
        env=FixedLength,
        evaluation_interval=1,
        evaluation_duration=1,
        evaluation_num_workers=1,
        evaluation_config={"env": env, "env_config": env_config or {}},
        **settings,
    )


class KillsItsProcessOnce(FixedLength):
    """Ends its process in the first reset after the file `trigger` appears."""

    def __init__(self, trigger):
        super().__init__()
        self.trigger = trigger

    def reset(self, *, seed=None, options=None):
        if os.path.exists(self.trigger):
            os.remove(self.trigger)
            os._exit(1)
        return super().reset(seed=seed, options=options)


@pytest.mark.slow
def test_dead_evaluation_worker_is_replaced(ray_session, caplog, tmp_path):
    trigger = str(tmp_path / "trigger")
    config = config_with_evaluation_worker(KillsItsProcessOnce, {"trigger": trigger})
    with config.build() as algorithm:
        assert "evaluation" in algorithm.train()
        (tmp_path / "trigger").touch()
        assert "evaluation" not in algorithm.train()
        assert "the evaluation is lost because a worker died" in caplog.text
        assert algorithm.train()["evaluation"]["training_iteration"] == 3


class KillsItsProcess(FixedLength):
    """Kills its process in each reset."""

    def reset(self, *, seed=None, options=None):
        os._exit(1)


@pytest.mark.slow
def test_evaluation_workers_that_always_die_end_the_training(ray_session):
    config = config_with_evaluation_worker(KillsItsProcess)
    with config.build() as algorithm:
        for _ in range(2):
            assert "evaluation" not in algorithm.train()
        with pytest.raises(death_errors()) as caught:
            algorithm.train()
        assert "3 evaluations in a row were lost" in "".join(caught.value.__notes__)
        assert "evaluation" not in algorithm.train()  # new workers have started


class HangsOnce(FixedLength):
    """Hangs in the first reset after the file `trigger` appears."""

    def __init__(self, trigger):
        super().__init__()
        self.trigger = trigger

    def reset(self, *, seed=None, options=None):
        if os.path.exists(self.trigger):
            os.remove(self.trigger)
            time.sleep(1000)
        return super().reset(seed=seed, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
def test_hanging_evaluation_is_stopped(ray_session, caplog, tmp_path, parallel):
    trigger = tmp_path / "trigger"
    config = config_with_evaluation_worker(
        HangsOnce,
        {"trigger": str(trigger)},
        evaluation_timeout_s=3.0,
        evaluation_parallel_to_training=parallel,
    )
    with config.build() as algorithm:
        algorithm.train()
        algorithm.finish_evaluation()
        trigger.touch()
        evaluated = [algorithm.train().get("evaluation") for _ in range(3)]
        evaluated.append(algorithm.finish_evaluation())
        assert not trigger.exists()
        assert "it took longer than evaluation_timeout_s=3" in caplog.text
        iterations = [e["training_iteration"] for e in evaluated if e is not None]
        assert iterations == [3, 4]


class AlwaysHangs(FixedLength):
    def reset(self, *, seed=None, options=None):
        time.sleep(1000)


@pytest.mark.slow
def test_workers_that_hang_again_are_stopped_as_soon(ray_session, caplog):
    """With a minute for the start of the workers in each evaluation, this test would take longer
    than its limit."""
    config = a2c_config(
        env=FixedLength,
        evaluation_interval=1,
        evaluation_num_workers=1,
        evaluation_timeout_s=1.0,
        evaluation_config={"env": AlwaysHangs},
    )
    with config.build() as algorithm:
        assert not any("evaluation" in algorithm.train() for _ in range(3))
    assert caplog.text.count("it took longer than evaluation_timeout_s=1") == 3


class Fails(FixedLength):
    def reset(self, *, seed=None, options=None):
        raise TypeError("the simulator has no scene")


@pytest.mark.slow
def test_error_of_an_evaluation_on_a_worker_has_its_own_type(ray_session):
    config = a2c_config(
        env=FixedLength,
        evaluation_interval=1,
        evaluation_num_workers=1,
        evaluation_config={"env": Fails},
    )
    with config.build() as algorithm:
        with pytest.raises(TypeError, match="simulator has no scene") as caught:
            algorithm.train()
        assert type(caught.value) is TypeError  # Ray's own error is a TypeError, too


def test_episodes_and_timesteps_are_validated():
    with a2c_config().build() as algorithm:
        for arguments, message in (
            ({"episodes": 1, "timesteps": 2}, "give episodes or timesteps, not both"),
            ({"episodes": "5"}, "episodes: must be an int >= 1, got '5'"),
            ({"episodes": 1.5}, "episodes: must be an int >= 1, got 1.5"),
            ({"num_envs": 0, "timesteps": 10}, "num_envs: must be an int >= 1, got 0"),
        ):
            with pytest.raises(ConfigError, match=message):
                algorithm.evaluate(**arguments)


def test_evaluation_ends_if_only_the_first_episode_ends(monkeypatch, caplog):
    monkeypatch.setattr("flowrl.trainer.evaluation.MAX_EPISODE_STEPS", 300)
    monkeypatch.setattr("flowrl.trainer.evaluation.LONG_EPISODE_STEPS", 100)

    class EndsOnce(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)
        episodes = 0

        def reset(self, *, seed=None, options=None):
            self.episodes += 1
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.zeros(2, np.float32), 0.0, self.episodes == 1, False, {}

    with a2c_config(env=lambda context: EndsOnce()).build() as algorithm:
        assert algorithm.evaluate(1)["episodes"] == 1
        assert not caplog.messages
        metrics = algorithm.evaluate(2)
    assert (metrics["episodes"], metrics["num_unfinished_episodes"]) == (1, 1)
    first, second = caplog.messages
    assert first.startswith("evaluation: no episode has ended in 1")
    assert second.startswith("evaluation: stopped, because no episode ended in the last 3")


def test_video_folder_that_cannot_be_written_is_rejected_before_training(tmp_path):
    require_extra("video")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"evaluation_video_dir: .* cannot be written"):
        a2c_config(evaluation_video_dir=str(tmp_path / "file/videos")).build()


def test_evaluation_holds_the_lock_of_the_local_worker():
    """A learner thread shares the networks that an evaluation in this process uses."""
    with a2c_config().build() as algorithm:
        worker = algorithm.workers.local_worker()
        policy, acquired = algorithm.get_policy(), []
        compute_actions = policy.compute_actions

        def try_to_lock(*args, **kwargs):
            thread = threading.Thread(target=lambda: acquired.append(worker.lock.acquire(False)))
            thread.start()
            thread.join()
            return compute_actions(*args, **kwargs)

        policy.compute_actions = try_to_lock
        algorithm.evaluate(1)
    assert len(acquired) > 5
    assert not any(acquired)


class NeverEnds(FixedLength):
    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_horizon_of_evaluations_replaces_a_soft_one():
    config = a2c_config(
        env=NeverEnds, horizon=20, soft_horizon=True, evaluation_config={"horizon": 30}
    )
    with config.build() as algorithm:
        assert algorithm.evaluate(episodes=2)["episode_reward_mean"] == 30


def test_weights_of_normalized_observations_need_the_filter(tmp_path):
    with a2c_config(normalize_observations=True).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="need normalize_observations=True"):
        A2C.from_checkpoint(tmp_path / "c", config={"normalize_observations": False})


def test_empty_batch_of_observations_is_rejected():
    with a2c_config().build() as algorithm, pytest.raises(ConfigError, match="batch is empty"):
        algorithm.predict(np.zeros((0, 4)))


def test_evaluation_has_noise_of_its_own():
    noise = {"type": "OrnsteinUhlenbeckNoise", "random_timesteps": 0}
    with TD3("Pendulum-v1", exploration_config=noise, train_batch_size=16, seed=1) as algorithm:
        algorithm.workers.local_worker().sample()
        policy = algorithm.get_policy()
        before = policy.exploration.state_dict()
        assert before
        algorithm.evaluate(episodes=1, explore=True)
        after = policy.exploration.state_dict()
    assert before.keys() == after.keys()
    assert all(np.array_equal(after[name], value) for name, value in before.items())


class RewardsAction(FixedLength):
    """The reward is the action, 0 or 1; all observations are equal."""

    def step(self, action):
        observation, _, *ends = super().step(action)
        return observation, float(action), *ends


@pytest.mark.slow
def test_evaluation_explores_equally_in_process_and_on_workers(ray_session):
    returns = []
    for num_workers in (0, 2):
        config = DQNConfig(
            env=RewardsAction,
            env_config={"length": 100},
            num_workers=num_workers,
            exploration_config={"type": "PerWorkerEpsilonGreedy"},
            seed=1,
        )
        with config.build() as algorithm:
            returns.append(algorithm.evaluate(episodes=5, explore=True)["episode_reward_mean"])
            assert algorithm.evaluate(episodes=5)["episode_reward_mean"] in (0, 100)
            settings = config.updated(evaluation_num_workers=1, evaluation_duration=5)
            workers = EvaluationWorkers(evaluation_settings(settings), algorithm.policy_class)
            workers.start(dict(algorithm.workers.local_worker().policy_map), True, 0)
            returns.append(workers.collect()["episode_reward_mean"])
            workers.stop()
    assert len(set(returns)) == 1
    assert returns[0] not in (0, 100)


class RecordsEnvironments(DefaultCallbacks):
    def on_sub_environment_created(self, *, worker, **kwargs):
        (Path(worker.config.env_config["folder"]) / str(os.getpid())).touch()


class WithFolder(FixedLength):
    def __init__(self, folder):
        super().__init__()


@pytest.mark.slow
def test_evaluation_workers_call_no_callbacks(ray_session, tmp_path):
    config = a2c_config(
        env=WithFolder,
        env_config={"folder": str(tmp_path)},
        callbacks_class=RecordsEnvironments,
        evaluation_interval=1,
        evaluation_num_workers=1,
    )
    with config.build() as algorithm:
        assert algorithm.train()["evaluation"]["episodes"] == 10
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_each_evaluated_policy_is_saved_if_evaluations_are_the_score(tmp_path):
    config = A2CConfig(
        env="CartPole-v1",
        train_batch_size=32,
        evaluation_interval=3,
        evaluation_duration=1,
        checkpoint_score_attribute="evaluation/episode_reward_mean",
        checkpoint_num_to_keep=10,
    )
    with config.build() as algorithm:
        algorithm.learn(stop={"training_iteration": 8}, run_dir=tmp_path / "run", progress=False)
    checkpoints = list_checkpoints(tmp_path / "run")
    assert [path.name for path in checkpoints] == ["000003", "000006", "000008"]
    assert best_checkpoint(checkpoints, "max").name in ("000003", "000006")


def make_vector(context):
    """A creator of four environments together, whose number cannot be chosen."""
    make = lambda: gym.make("CartPole-v1")  # noqa: E731
    return gym.vector.SyncVectorEnv([make] * 4)


def test_vector_of_environments_is_evaluated_with_its_own_number():
    with a2c_config(env=make_vector).build() as algorithm:
        assert algorithm.evaluate(episodes=5, num_envs=3)["episodes"] == 5
        assert algorithm.evaluate(episodes=2)["episodes"] == 2


def test_evaluation_settings_have_one_environment_unless_they_name_a_number():
    config = a2c_config(num_envs_per_worker=8)
    assert evaluation_settings(config).num_envs_per_worker == 1
    config = a2c_config(num_envs_per_worker=8, evaluation_config={"num_envs_per_worker": 3})
    assert evaluation_settings(config).num_envs_per_worker == 3


def test_requested_evaluations_keep_the_videos_of_the_training(tmp_path):
    require_extra("video")
    settings = {"evaluation_interval": 1, "evaluation_duration": 1}
    config = a2c_config(evaluation_video_dir=str(tmp_path / "videos"), **settings)
    with config.build() as algorithm:
        algorithm.train()
        before = {path: path.read_bytes() for path in (tmp_path / "videos").iterdir()}
        algorithm.evaluate(episodes=2, explore=True)
        assert before
        assert before == {p: p.read_bytes() for p in (tmp_path / "videos").iterdir()}


class Opponents(MultiAgentEnv):
    """One agent; the episode ends at once."""

    possible_agents = ["player"]
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"player": np.zeros(1, np.float32)}, {}

    def step(self, actions):
        obs = {"player": np.zeros(1, np.float32)}
        return obs, {"player": 1.0}, {"__all__": True}, {"__all__": False}, {}


def newest(agent_id, episode, worker, **kwargs):
    """Choose the policy with the largest version."""
    return max(worker.policy_map, key=lambda policy_id: worker.get_policy(policy_id).version)


def test_mapping_function_sees_the_versions_of_the_policies_in_an_evaluation():
    config = a2c_config(env=Opponents, policies=["a", "b", "c"], policy_mapping_fn=newest)
    with config.build() as algorithm:
        weights = algorithm.get_policy("b").get_weights()
        algorithm.get_policy("b").set_weights(weights)  # a new version
        assert set(algorithm.evaluate(episodes=3)["policy_reward_mean"]) >= {"b"}
        rewards = algorithm.evaluate(episodes=3)["policy_reward_mean"]
        assert {pid for pid, mean in rewards.items() if mean == 1.0} == {"b"}


def test_evaluated_policy_sees_its_own_outputs_by_views():
    seen = []

    class SeesLikelihoods(A2CTorchPolicy):
        def __init__(self, *args):
            super().__init__(*args)
            space = gym.spaces.Box(-np.inf, np.inf, (), np.float32)
            self.view_requirements["logp_before"] = ViewRequirement("action_logp", space, shift=-1)

        def compute_actions_from_input_dict(self, input_dict, explore=True):
            seen.append(input_dict["logp_before"].copy())
            return super().compute_actions_from_input_dict(input_dict, explore)

    class Values(A2C):
        policy_class = SeesLikelihoods

    config = a2c_config(env=lambda context: FixedLength(3))
    with Values(config) as algorithm:
        algorithm.evaluate(episodes=1)
    assert [bool(np.any(values)) for values in seen[:4]] == [False, True, True, False]


def test_evaluation_environment_with_other_spaces_is_refused_with_normalization():
    settings = {"normalize_observations": True, "train_batch_size": 32, "evaluation_interval": 1}
    config = A2CConfig(env="CartPole-v1", evaluation_config={"env": "Acrobot-v1"}, **settings)
    message = "its environment has the observation_space"
    with config.build() as algorithm, pytest.raises(ConfigError, match=message):
        algorithm.train()


def test_error_of_an_environment_in_an_evaluation_says_so():
    class FailsAlways(gym.wrappers.TransformReward):
        def step(self, action):
            raise OSError("no simulator")

    def make_env(context):
        env = gym.make("CartPole-v1")
        return FailsAlways(env, float) if context.get("fails") else env

    evaluation = {"env_config": {"fails": True}, "max_num_env_restarts": 0}
    with a2c_config(env=make_env, evaluation_config=evaluation).build() as algorithm:
        algorithm.train()
        with pytest.raises(OSError, match="no simulator") as caught:
            algorithm.evaluate(1)
    assert "during an evaluation" in caught.value.__notes__
