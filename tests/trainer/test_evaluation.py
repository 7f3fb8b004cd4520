"""Evaluation in between, on actors, beside training; by episodes and by steps."""

import threading

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.policies import ConfigError


def small(**settings):
    base = {
        "env": "CartPole-v1",
        "train_batch_size": 32,
        "seed": 2,
        "model": {"fcnet_hiddens": [8]},
    }
    return A2CConfig(**{**base, **settings})


class Counts(gym.Env):
    """Its episodes are as long as it is told, each step worth what it is told."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=3, worth=1.0):
        self.length, self.worth = length, worth

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), self.worth, self.t == self.length, False, {}


def test_in_between_with_settings_of_its_own():
    config = small(env=Counts).evaluation(
        evaluation_interval=2,
        evaluation_duration=4,
        evaluation_config={"env_config": {"length": 5, "worth": 2.0}},
    )
    with config.build() as algorithm:
        results = [algorithm.train() for _ in range(4)]
        assert ["evaluation" in result for result in results] == [False, True, False, True]
        told = results[3]["evaluation"]
        assert told["episode_reward_mean"] == 10.0
        assert told["episode_len_mean"] == 5.0
        assert told["episodes"] == 4
        assert told["training_iteration"] == 4
        assert results[3]["episode_reward_mean"] == 3.0
        assert algorithm.evaluate(episodes=2)["episode_reward_mean"] == 10.0


def test_by_steps_the_episodes_that_ended_count():
    config = small(env=Counts, evaluation_duration=17, evaluation_duration_unit="timesteps")
    with config.build() as algorithm:
        told = algorithm.evaluate()
        assert told["episodes"] >= 17 // 3
        assert told["episode_reward_mean"] == 3.0
        assert np.isnan(
            small(env=Counts, env_config={"length": 1000})
            .build()
            .evaluate(timesteps=10)["episode_reward_mean"]
        )


def test_evaluating_changes_nothing_of_the_run():
    results = []
    for interval in (None, 1):
        with small(evaluation_interval=interval, evaluation_duration=2).build() as algorithm:
            results.append([algorithm.train()["episode_reward_mean"] for _ in range(4)])
    assert results[0] == pytest.approx(results[1], nan_ok=True)


def test_exploring_evaluations():
    with small(evaluation_config={"explore": True}).build() as algorithm:
        assert algorithm.evaluate(episodes=3) == algorithm.evaluate(episodes=3, explore=True)
        assert algorithm.evaluate(episodes=3) != algorithm.evaluate(episodes=3, explore=False)


def test_workers_share_an_evaluation(ray_session):
    config = small(
        evaluation_interval=1, evaluation_duration=5, evaluation_num_workers=2, num_workers=0
    )
    with config.build() as algorithm:
        told = algorithm.train()["evaluation"]
        assert told["episodes"] == 5
        assert told["training_iteration"] == 1
        assert told["episode_reward_max"] > told["episode_reward_min"]  # not the same ones twice


def test_beside_training(ray_session):
    config = small(
        evaluation_interval=2,
        evaluation_duration=2,
        evaluation_num_workers=1,
        evaluation_parallel_to_training=True,
    )
    with config.build() as algorithm:
        told = [algorithm.train().get("evaluation") for _ in range(6)]
    assert told[0] is None
    assert told[1] is None  # it was begun there
    taken = [one["training_iteration"] for one in told if one is not None]
    assert taken == [2, 4] or taken == [2, 4, 6]


class Breaks(gym.Wrapper):
    def step(self, action):
        raise ArithmeticError("broken on purpose")


def test_an_evaluation_that_fails_says_so(ray_session):
    broken = {"env": lambda context: Breaks(gym.make("CartPole-v1")), "max_num_env_restarts": 0}
    for workers in (0, 1):
        config = small(
            evaluation_interval=1, evaluation_num_workers=workers, evaluation_config=broken
        )
        with config.build() as algorithm, pytest.raises(ArithmeticError, match="on purpose"):
            algorithm.train()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"evaluation_config": {"envv": 1}}, "evaluation_config: unknown setting 'envv'"),
        ({"evaluation_config": {"env": "CartPol-v1"}}, "evaluation_config: env"),
        ({"evaluation_config": {"horizon": 0}}, "evaluation_config: horizon"),
        ({"evaluation_config": {"explore": 3}}, "explore is True or False"),
        ({"evaluation_parallel_to_training": True}, "needs workers to evaluate"),
        (
            {"evaluation_parallel_to_training": True, "evaluation_num_workers": 1},
            "needs an evaluation_interval",
        ),
        ({"evaluation_duration": 0}, "evaluation_duration"),
        ({"evaluation_interval": 0}, "evaluation_interval"),
        ({"evaluation_duration_unit": "days"}, "evaluation_duration_unit"),
    ],
)
def test_wrong_settings(settings, said):
    with pytest.raises(ConfigError, match=said):
        small(**settings).build()


def test_no_episodes():
    with small().build() as algorithm, pytest.raises(ConfigError, match="at least 1"):
        algorithm.evaluate(episodes=0)


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_workers_that_do_not_explore_take_the_best_actions(batch_mode):
    config = small(explore=False, batch_mode=batch_mode, train_batch_size=64)
    with config.build() as algorithm:
        policy = algorithm.get_policy()
        batch = algorithm.workers.local_worker().sample()
        best, _, _ = policy.compute_actions(batch["obs"], explore=False)
        np.testing.assert_array_equal(batch["actions"], best)


def test_a_dead_evaluation_worker_is_made_again(ray_session, caplog):
    config = small(evaluation_interval=1, evaluation_duration=1, evaluation_num_workers=1)
    with config.build() as algorithm:
        assert "evaluation" in algorithm.train()
        ray_session.kill(algorithm._evaluation._workers.remote_workers()[0])
        assert "evaluation" not in algorithm.train()
        assert "an evaluation is lost" in caplog.text
        assert algorithm.train()["evaluation"]["training_iteration"] == 3


def test_episodes_or_timesteps():
    with small().build() as algorithm:
        for given in ({"episodes": 1, "timesteps": 2}, {"episodes": "5"}, {"episodes": 1.5}):
            with pytest.raises(ConfigError):
                algorithm.evaluate(**given)


def test_who_learns_beside_the_plan_waits():
    """A learner in a thread has the networks that an evaluation in this process acts with."""
    with small().build() as algorithm:
        worker = algorithm.workers.local_worker()
        policy, free = algorithm.get_policy(), []
        act = policy.compute_actions

        def watched(*args, **more):
            thread = threading.Thread(target=lambda: free.append(worker.lock.acquire(False)))
            thread.start()
            thread.join()
            return act(*args, **more)

        policy.compute_actions = watched
        algorithm.evaluate(1)
    assert len(free) > 5
    assert not any(free)
