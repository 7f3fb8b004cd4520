"""A run resumed from a checkpoint is identical to the uninterrupted run."""

import json
import logging
import os
import subprocess
import sys
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flowrl import Algorithm
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.data.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from flowrl.envs import MultiAgentEnv, make_multi_agent
from flowrl.envs.env_state import pack_actions, unpack_actions
from flowrl.envs.restarting_envs import RestartingEnvs
from flowrl.errors import ConfigError
from flowrl.iter import ShardFailedError
from flowrl.ops import (
    ApplyGradients,
    AverageGradients,
    ComputeGradients,
    ConcatBatches,
    ParallelRollouts,
    StandardMetricsReporting,
    TrainOneStep,
)
from flowrl.policies import PolicySpec
from flowrl.sampling import DefaultCallbacks
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.worker_states import env_steps_in
from flowrl.trainer.plan_settings import plan_config
from tests.comparisons import assert_same, without_times
from tests.processes import kill_actor


def weights(algorithm):
    policies = algorithm.workers.local_worker().policy_map
    return {
        f"{pid}/{name}": array.tobytes().hex()
        for pid, policy in policies.items()
        for name, array in policy.get_weights().items()
    }


def train(config, plan, iterations, path=None, save=None, save_after=None):
    """Train, after restoring `path` if given; return the last five results and the weights.

    `save` is the path of a checkpoint that is saved after `save_after` iterations, or at the end.
    """
    with config.build(plan=plan) as algorithm:
        if path is not None:
            algorithm.restore(path)
            assert algorithm.workers.num_episodes_restarted == 0
        results = []
        for iteration in range(iterations):
            if iteration == save_after:
                algorithm.save(save)
            results.append(without_times(algorithm.train()))
        if save is not None and save_after is None:
            algorithm.save(save)
        return results[-5:], weights(algorithm)


SMALL = {
    "ppo": {"train_batch_size": 128, "sgd_minibatch_size": 64, "num_sgd_iter": 2},
    "a2c": {},
    "a2c_replay": {},
    "dqn": {"learning_starts": 100, "min_sample_timesteps_per_iteration": 70},
    "ppo_dqn": {"min_sample_timesteps_per_iteration": 200},
}


def small_config(plan, num_workers, **settings):
    return plan_config(plan).updated(seed=3, num_workers=num_workers, **{**SMALL[plan], **settings})


def check_resumed_run_is_identical(config, plan, path):
    results, final_weights = train(config, plan, 9, save=path, save_after=4)
    resumed_results, resumed_weights = train(config, plan, 5, path)
    assert final_weights == resumed_weights
    for result, resumed in zip(results, resumed_results, strict=True):
        assert result == resumed


@pytest.mark.parametrize("plan", list(SMALL))
def test_resumed_run_in_process_is_identical(tmp_path, plan):
    check_resumed_run_is_identical(small_config(plan, 0), plan, tmp_path / "c")


def shuffled_gradients(rollouts, workers):
    gradients = rollouts.shuffle(4).for_each(ComputeGradients(workers))
    return gradients.for_each(ApplyGradients(workers, update_all=False))


def mean_gradients(rollouts, workers):
    gradients = rollouts.for_each(ComputeGradients(workers)).batch(3).for_each(AverageGradients())
    return gradients.for_each(ApplyGradients(workers))


def flattened_batches(rollouts, workers):
    return rollouts.batch(3).flatten().for_each(TrainOneStep(workers))


def slow_child(rollouts, workers):
    fast, slow = rollouts.duplicate(2, max_buffered=4)
    trained = slow.for_each(TrainOneStep(workers))
    return fast.union(trained, round_robin_weights=[3, 1]).filter(lambda item: type(item) is tuple)


def sources_in_a_window(rollouts, workers):
    pairs = rollouts.zip_with_source().shuffle(3)
    return pairs.for_each(lambda pair: pair[1]).for_each(TrainOneStep(workers))


def two_trainers(rollouts, workers):
    first, second = rollouts.duplicate(2)
    slow = first.combine(ConcatBatches(84)).for_each(TrainOneStep(workers))
    return slow.union(second.for_each(TrainOneStep(workers)))


@pytest.mark.parametrize(
    "stages",
    [
        shuffled_gradients,
        mean_gradients,
        flattened_batches,
        slow_child,
        sources_in_a_window,
        two_trainers,
    ],
)
def test_items_in_stages_are_resumed_with_their_sources(stages, tmp_path):
    def plan(workers, config):
        trained = stages(ParallelRollouts(workers), workers)
        return StandardMetricsReporting(trained, workers, config)

    settings = {"rollout_fragment_length": 7, "num_envs_per_worker": 2, "train_batch_size": 14}
    config = small_config("a2c", 0, min_sample_timesteps_per_iteration=14, **settings)
    check_resumed_run_is_identical(config, plan, tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ppo", "a2c", "dqn", "ppo_dqn"])
def test_resumed_run_on_actors_is_identical(tmp_path, plan, ray_session):
    check_resumed_run_is_identical(small_config(plan, 2), plan, tmp_path / "c")


class RandomEpisodes(gym.Env):
    """Draws observations, rewards and lengths from gymnasium's generator `np_random`."""

    observation_space = spaces.Dict(
        {"x": spaces.Box(-9, 9, (2,)), "n": spaces.Discrete(9, start=1)}
    )
    action_space = spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3)))

    def _observe(self):
        x = np.clip(self.np_random.normal(size=2), -9, 9).astype(np.float32)
        return {"x": x, "n": np.int64(1 + self.np_random.integers(9))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {"object": self}

    def step(self, action):
        box, number = action
        box *= 0.5  # environments may modify the action in place
        reward = float(box.sum() + number)
        return self._observe(), reward, bool(self.np_random.random() < 0.05), False, {}


class SavesRandomStream(gym.Env):
    """Has its own random stream, which `get_state` returns if `savable`."""

    observation_space = spaces.Box(0, 1, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, savable=True):
        self._stream = np.random.RandomState(7 if savable else None)
        if savable:
            self.get_state = self._save
            self.set_state = self._load

    def _save(self):
        return {"n": self._n, "stream": self._stream.get_state(legacy=False)}

    def _load(self, state):
        self._n = state["n"]
        self._stream.set_state(state["stream"])

    def reset(self, *, seed=None, options=None):
        self._n = 0
        return self._stream.random_sample(1), {}

    def step(self, action):
        self._n += 1
        return self._stream.random_sample(1), 1.0, self._n == 13, False, {}


class ChangingAgents(MultiAgentEnv):
    """Agents with tuples as ids that join and leave during an episode."""

    possible_agents = [("a", 1), ("b", 2), ("c", 3)]
    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Discrete(2)
    np_random = None

    def reset(self, *, seed=None, options=None):
        if seed is not None or self.np_random is None:
            self.np_random = np.random.default_rng(seed)
        self._t, self._present = 0, {("a", 1)}
        return self._observe(), {}

    def _observe(self):
        return {
            a: np.clip(self.np_random.normal(size=2), -9, 9).astype(np.float32)
            for a in sorted(self._present)
        }

    def step(self, actions):
        self._t += 1
        rewards = {a: float(actions[a]) for a in actions}
        done = self._t == 37
        if self._t % 5 == 0:
            self._present = {self.possible_agents[i] for i in self.np_random.permutation(3)[:2]}
        return self._observe(), rewards, {"__all__": done}, {"__all__": False}, {}


class CountsSteps(DefaultCallbacks):
    def on_episode_step(self, *, episode, **kwargs):
        episode.user_data["steps"] = episode.user_data.get("steps", 0) + 1
        episode.user_data["cannot be saved"] = object()

    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["steps"] = episode.user_data["steps"]


SAMPLING = {
    "normalized": {"normalize_observations": True, "normalize_rewards": True},
    "stacked frames": {"model": {"num_framestacks": 3, "fcnet_hiddens": [8]}},
    "recurrent": {"model": {"use_lstm": True, "fcnet_hiddens": [8], "lstm_use_prev_action": True}},
    "attention": {
        "model": {"use_attention": True, "fcnet_hiddens": [8], "attention_memory": 4},
    },
    "whole episodes": {"batch_mode": "complete_episodes", "normalize_rewards": True},
    "soft horizon": {"soft_horizon": True, "horizon": 7, "normalize_rewards": True},
    "soft horizon by rows": {
        "soft_horizon": True,
        "horizon": 7,
        "normalize_rewards": True,
        "callbacks_class": CountsSteps,
    },
    "callbacks": {"callbacks_class": CountsSteps},
    "nested spaces": {"env": RandomEpisodes, "normalize_observations": False},
    "nested, whole episodes": {"env": RandomEpisodes, "batch_mode": "complete_episodes"},
    "continuous": {"env": "Pendulum-v1"},
    "processes": {"env": RandomEpisodes, "vectorization_mode": "async"},
    "environment with get_state": {"env": SavesRandomStream},
    "several agents": {
        "env": make_multi_agent("CartPole-v1"),
        "env_config": {"num_agents": 3},
        "policies": {"p", "q"},
        "policy_mapping_fn": lambda agent_id, *args, **kwargs: "p" if agent_id else "q",
    },
    "changing agents": {
        "env": ChangingAgents,
        "policies": {"p", "q"},
        "policy_mapping_fn": lambda agent_id, *args, **kwargs: "p" if agent_id[1] > 1 else "q",
        "batch_mode": "complete_episodes",
    },
    "agent steps": {
        "env": ChangingAgents,
        "count_steps_by": "agent_steps",
        "policies": {"p"},
        "policy_mapping_fn": lambda *args, **kwargs: "p",
    },
}


@pytest.mark.parametrize("case", list(SAMPLING))
def test_resumed_run_continues_unfinished_episodes(tmp_path, case):
    settings = {
        "env": "CartPole-v1",
        "num_envs_per_worker": 3,
        "train_batch_size": 48,
        "rollout_fragment_length": 11,
        "seed": 5,
        "model": {"fcnet_hiddens": [8]},
        **SAMPLING[case],
    }
    check_resumed_run_is_identical(A2CConfig(**settings), "a2c", tmp_path / "c")


TRAIN_AND_KILL = """
import json, sys
from tests.trainer.test_resume import small_config, train
plan, workers, iterations, path, save, out = sys.argv[1:]
results_and_weights = train(
    small_config(plan, int(workers)), plan, int(iterations), path or None, save or None
)
json.dump(results_and_weights, open(out, "w"))
print("done", flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def train_in_killed_process(plan, workers, iterations, out, path="", save=""):
    process = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_KILL, plan, workers, iterations, path, save, out],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "done" in process.stdout, process.stderr
    assert process.returncode == -9
    with open(out) as file:
        return json.load(file)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plan", "workers"),
    [
        ("ppo", "0"),
        ("dqn", "0"),
        ("ppo_dqn", "2"),
    ],
)
def test_another_process_resumes_the_run_of_a_killed_process(tmp_path, plan, workers):
    path, out = str(tmp_path / "c"), str(tmp_path / "results.json")
    uninterrupted = train_in_killed_process(plan, workers, "8", out)
    train_in_killed_process(plan, workers, "3", out, save=path)
    assert train_in_killed_process(plan, workers, "5", out, path=path) == uninterrupted


@pytest.mark.parametrize(
    "settings",
    [
        {"env": SavesRandomStream, "env_config": {"savable": False}},
        {"vectorization_mode": "sync"},
        {
            "env": SavesRandomStream,
            "env_config": {"savable": False},
            "callbacks_class": CountsSteps,
        },
    ],
    ids=["another observation", "gymnasium vector env", "by rows"],
)
def test_episodes_that_cannot_be_restored_are_restarted_and_counted(tmp_path, settings):
    base = {"env": "CartPole-v1", "num_envs_per_worker": 2, "train_batch_size": 22, "seed": 1}
    config = A2CConfig(**{**base, **settings})
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        result = algorithm.train()
        assert result["num_episodes_restarted"] == 2
        assert result["num_env_steps_trained"] == result["timesteps_total"] > 22
        for _ in range(4):
            result = algorithm.train()
        assert result["episodes_total"] > 0


class FailsAtStepThree(gym.Env):
    observation_space = spaces.Box(0, 10, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            raise OSError("the simulator ended")
        return np.full(1, self.steps, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_failures_of_environments_are_counted_once(tmp_path, request, num_workers):
    if num_workers:
        request.getfixturevalue("ray_session")
    config = A2CConfig(
        env=lambda context: FailsAtStepThree(), num_workers=num_workers, train_batch_size=32,
        max_num_env_restarts=1000, seed=1,
    )  # fmt: skip

    def failures(result):
        assert result["num_faulty_episodes"] == result["num_env_restarts"]
        return result["num_env_restarts"]

    with config.build() as algorithm:
        first = failures(algorithm.train())
        if num_workers:  # the failures that a worker has reported remain when it dies
            kill_actor(algorithm.workers.remote_workers()[0])
        path = algorithm.save(tmp_path)
        uninterrupted = failures(algorithm.train())
    with config.build() as algorithm:
        for _ in range(2):
            algorithm.restore(path)
            resumed = failures(algorithm.train())
            assert 1.9 * first < resumed < 2.1 * first  # of 64 env steps instead of 32
            assert resumed == uninterrupted or num_workers


@pytest.mark.slow
def test_dead_worker_loses_only_its_own_episodes(tmp_path, ray_session, caplog):
    config = A2CConfig(
        env="CartPole-v1", num_workers=2, train_batch_size=32, seed=1, sample_timeout_s=30
    )
    with config.build() as algorithm:
        algorithm.train()
        kill_actor(algorithm.workers.remote_workers()[0])
        with caplog.at_level(logging.WARNING, "flowrl"):
            algorithm.save(tmp_path / "c")
        assert "worker 1 returned no state" in caplog.text
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        result = algorithm.train()
        assert result["timesteps_total"] == 64


class FailsAtFirstRestart(DefaultCallbacks):
    def on_sub_environment_created(self, *, worker, **kwargs):
        if worker.restart_count == 1:
            raise OSError("the port is in use")


@pytest.mark.slow
@pytest.mark.parametrize("recreate", [True, False])
def test_restoring_replaces_workers_that_have_died(tmp_path, ray_session, recreate):
    config = A2CConfig(
        env="CartPole-v1", num_workers=2, train_batch_size=32, seed=1,
        recreate_failed_workers=recreate, callbacks_class=FailsAtFirstRestart,
    )  # fmt: skip
    with config.build() as algorithm:
        for _ in range(3):
            algorithm.train()
        path = algorithm.save(tmp_path)
        saved = algorithm.workers.state_dict()["remote"]
        dead = algorithm.workers.remote_workers()[0]
        kill_actor(dead)
        algorithm.restore(path)
        assert (algorithm.workers.remote_workers()[0] is not dead) == recreate
        restored = algorithm.workers.state_dict()["remote"]
        assert [state is None for state in restored] == [not recreate, False]
        if recreate:
            steps = [RolloutWorker.env_steps_in(states[0]) for states in (restored, saved)]
            assert steps[0] == steps[1] > 0
            assert env_steps_in(algorithm.workers.state_dict()) == algorithm.env_steps
        else:
            with pytest.raises(ShardFailedError, match="recreate_failed_workers is False"):
                algorithm.train()
        steps = algorithm.env_steps
        algorithm.train()
        assert algorithm.env_steps > steps


@pytest.mark.slow
def test_async_rollouts_resume_counters_and_drop_fragments_in_flight(tmp_path, ray_session):
    file = tmp_path / "plan.py"
    file.write_text(
        "from flowrl.algorithms.a2c import A2CConfig\n"
        "from flowrl.ops import ParallelRollouts, StandardMetricsReporting, TrainOneStep\n"
        "config = A2CConfig(env='CartPole-v1', num_workers=2, rollout_fragment_length=16, seed=1)\n"
        "def execution_plan(workers, config):\n"
        "    rollouts = ParallelRollouts(workers, mode='async', num_async=2)\n"
        "    train = rollouts.for_each(TrainOneStep(workers))\n"
        "    return StandardMetricsReporting(train, workers, config)\n"
    )
    config = plan_config(str(file)).updated(plan=str(file))
    with config.build() as algorithm:
        for _ in range(5):
            before = algorithm.train()
        algorithm.save(tmp_path / "c")
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        after = algorithm.train()
    dropped = after["counters"]["num_env_steps_dropped"]
    assert dropped > 0
    assert dropped % 16 == 0
    assert after["timesteps_total"] == before["timesteps_total"] + dropped + 16
    assert after["num_env_steps_sampled"] == after["num_env_steps_trained"] + dropped


def test_restore_rejects_other_numbers_of_workers_or_environments(tmp_path):
    config = A2CConfig(env="CartPole-v1", train_batch_size=32, num_envs_per_worker=2)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    for change, message in (
        ({"num_envs_per_worker": 3}, "num_envs_per_worker"),
        ({"num_workers": 1}, "num_workers is 1, in the checkpoint it is 0"),
        ({"batch_mode": "complete_episodes"}, "batch_mode='truncate_episodes'"),
    ):
        with config.updated(**change).build() as algorithm:
            before = weights(algorithm)
            with pytest.raises(CheckpointError, match=message):
                algorithm.restore(tmp_path / "c")
            assert weights(algorithm) == before
    assert os.listdir(tmp_path) == ["c"]
    assert read_checkpoint(tmp_path / "c", "sampling")[0]["sampling"]["remote"] == []


class Integrates(gym.Env):
    """Modifies its action in place, returns float64 for a float32 space and, if `with_nan`, a NaN
    observation every fourth step."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, with_nan=False):
        self.with_nan = with_nan

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.normal(size=1) * 0.1
        return self.x.copy(), {"when": np.datetime64("2020-01-01")}

    def step(self, action):
        self.t += 1
        action *= 0.5
        self.x = np.clip(self.x + action, -8, 8)
        obs = np.array([np.nan]) if self.with_nan and self.t % 4 == 0 else self.x.copy()
        return obs, float(self.x[0]), self.t == 30, False, {"when": np.datetime64("2020-01-01")}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"env_config": {"with_nan": True}, "on_invalid_step": "replace"},
        {
            "env_config": {"with_nan": True},
            "on_invalid_step": "replace",
            "callbacks_class": CountsSteps,
        },
        {"batch_mode": "complete_episodes", "callbacks_class": CountsSteps},
    ],
)
def test_checkpoint_saved_right_after_restore_resumes_the_same_run(tmp_path, settings):
    base = {"env": Integrates, "num_envs_per_worker": 2, "train_batch_size": 22, "seed": 4}
    config = A2CConfig(**{**base, **settings})
    results, final_weights = train(config, "a2c", 6)
    train(config, "a2c", 3, save=tmp_path / "a")
    train(config, "a2c", 0, tmp_path / "a", tmp_path / "b")
    resumed_results, resumed_weights = train(config, "a2c", 3, tmp_path / "b")
    assert final_weights == resumed_weights
    assert results[-3:] == resumed_results


class SavesState(gym.Env):
    """`get_state` returns the state without the random stream."""

    observation_space = spaces.Box(-9, 9, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.normal(size=1)
        return self.x.copy(), {}

    def step(self, action):
        self.t += 1
        self.x = np.clip(self.x * 0.9 + action * 0.1, -9, 9)
        return self.x.copy(), 1.0, self.t == 17, False, {}

    def get_state(self):
        return {"t": self.t, "x": self.x}

    def set_state(self, state):
        self.t, self.x = state["t"], np.array(state["x"])


class GetStateTakesArgument(SavesState):
    def get_state(self, player):
        raise AssertionError


class StateCannotBeSaved(SavesState):
    def get_state(self):
        return {"object": self}


class DrawsInSteps(SavesState):
    """Its episodes start with the same observation: only steps use the random stream."""

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.t, self.x = 0, np.zeros(1)
        return self.x.copy(), {}

    def step(self, action):
        self.x = self.x + 0.1 * self.np_random.normal(size=1)
        return super().step(action)


class StatelessDraws(DrawsInSteps):
    get_state = set_state = None


class ScalesRewards(gym.Wrapper):
    """Scales rewards by the number of steps in all episodes, which only the wrapper knows."""

    def __init__(self):
        super().__init__(StatelessDraws())
        self.count = 0

    def step(self, action):
        observation, reward, *ends = self.env.step(action)
        self.count += 1
        return observation, reward * self.count, *ends

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


class WidensStart(gym.Wrapper):
    """A curriculum: the start of CartPole's episodes varies more from episode to episode."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.width = 0.01

    def reset(self, *, seed=None, options=None):
        self.width += 0.01
        return self.env.reset(seed=seed, options={"low": -self.width, "high": self.width})

    def get_state(self):
        return {"width": self.width}

    def set_state(self, state):
        self.width = state["width"]


@pytest.mark.parametrize(
    "env",
    [
        *(SavesState, GetStateTakesArgument, StateCannotBeSaved, DrawsInSteps),
        *(ScalesRewards, WidensStart),
    ],
)
@pytest.mark.parametrize("horizon", [None, 9])
def test_environments_with_get_state_resume(tmp_path, env, horizon):
    settings = {"num_envs_per_worker": 2, "train_batch_size": 22, "seed": 4, "horizon": horizon}
    check_resumed_run_is_identical(A2CConfig(env=env, **settings), "a2c", tmp_path / "c")


def test_wrapper_whose_episode_could_not_be_repeated_resumes_again():
    """Its next reset has a seed, but the wrapper is not new."""

    def envs():
        return RestartingEnvs(lambda index: WidensStart(), 1, 7, 5)

    def resumed(state, matches):
        copy = envs()
        copy.load_state_dict(state)
        return copy, copy.replay(0, state, matches)

    first = envs()
    for _ in range(3):
        first.reset(0)
    second, is_repeated = resumed(first.state_dict(), lambda observation: False)
    assert not is_repeated
    observation, _ = second.reset(0)
    _, is_repeated = resumed(second.state_dict(), lambda other: np.array_equal(other, observation))
    assert is_repeated


def test_get_state_that_needs_a_reset_resumes():
    class NeedsReset(WidensStart):
        def reset(self, **kwargs):
            self.episode = getattr(self, "episode", 0) + 1
            return super().reset(**kwargs)

        def get_state(self):
            return {"width": self.width, "episode": self.episode}

        def set_state(self, state):
            self.width, self.episode = state["width"], state["episode"]

    envs = RestartingEnvs(lambda index: NeedsReset(), 1, 7, 5)
    for _ in range(2):
        observation, _ = envs.reset(0)
        copy = RestartingEnvs(lambda index: NeedsReset(), 1, 7, 5)
        copy.load_state_dict(envs.state_dict())
        assert copy.replay(0, envs.state_dict(), partial(np.array_equal, observation))
        assert copy.envs[0].episode == envs.envs[0].episode


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("iterations", [0, 2])
def test_running_algorithm_restores_an_earlier_state(tmp_path, workers, iterations, request):
    if workers:
        request.getfixturevalue("ray_session")
    config = small_config("a2c", workers)
    with config.build(plan="a2c") as algorithm:
        for _ in range(iterations):
            algorithm.train()
        algorithm.save(tmp_path / "c")
        results = [without_times(algorithm.train()) for _ in range(3)]
        final_weights = weights(algorithm)
        algorithm.restore(tmp_path / "c")
        assert algorithm.last_result is None
        restored = [algorithm.train() for _ in range(3)]
        assert list(map(without_times, restored)) == results
        assert min(restored[0]["timers"]["operators"].values()) >= 0
        assert weights(algorithm) == final_weights


def test_saving_does_not_change_training(tmp_path):
    results = []
    for saves in (False, True):
        with small_config("ppo", 0).build(plan="ppo") as algorithm:
            results.append([])
            for _ in range(5):
                results[-1].append(without_times(algorithm.train()))
                if saves:
                    algorithm.save(tmp_path / "c")
    assert results[0] == results[1]


def test_packed_actions_are_small_and_restore_exactly():
    box = [np.full(2, i, np.float32) for i in range(20_000)]
    nested = [{"a": i, "b": (np.float32(i), np.ones(2))} for i in range(5)] + [{"a": 3}]
    without_agents = [{}, {"a": 1}, {}, {}, {"a": 2}]
    for actions in (box, nested, [], list(range(9)), [True, False], without_agents):
        unpacked = unpack_actions(pack_actions(actions))
        assert len(unpacked) == len(actions)
        for action, expected in zip(unpacked, actions, strict=True):
            assert_same(action, expected)
    assert len(pack_actions(box)) == 1


def test_failed_restore_does_not_change_the_run(tmp_path):
    config = small_config("a2c", 0)
    with config.build(plan="a2c") as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        state, manifest = read_checkpoint(tmp_path / "c")
        metadata = {k: v for k, v in manifest.items() if k not in ("format", "files", "blake2b")}
        expected = [without_times(algorithm.train()) for _ in range(2)]
    for part in ("episodes_ready", "num_envs", "policies"):
        with config.build(plan="a2c") as algorithm:
            algorithm.train()
            local = {k: v for k, v in state["sampling"]["local"].items() if k != part}
            broken = {**state, "sampling": {**state["sampling"], "local": local}}
            write_checkpoint(tmp_path / "broken", broken, metadata)
            with pytest.raises(CheckpointError, match=part):
                algorithm.restore(tmp_path / "broken")
            assert [without_times(algorithm.train()) for _ in range(2)] == expected


def test_fragments_sampled_ahead_count_as_dropped_after_restore(tmp_path):
    config = A2CConfig(env="CartPole-v1", sample_async=True, train_batch_size=33, seed=1)
    with config.build() as algorithm:
        before = algorithm.train()
        ready = algorithm.workers.local_worker().sampler._ready
        deadline = time.monotonic() + 60
        while not ready.full():  # the sampler works ahead
            assert time.monotonic() < deadline
            time.sleep(0.01)
        algorithm.save(tmp_path / "c")
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        after = algorithm.train()
    dropped = after["counters"]["num_env_steps_dropped"]
    assert dropped > 0
    assert after["timesteps_total"] == before["timesteps_total"] + dropped + 33


def test_settings_of_one_policy_change_in_a_checkpoint(tmp_path):
    small = {"ppo": {"config": {"train_batch_size": 64, "sgd_minibatch_size": 32}}}
    plan = {"policies": small, "total_timesteps": 1000, "min_sample_timesteps_per_iteration": 64}
    with Algorithm.from_plan("ppo_dqn", **plan) as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "c")
    changes = {"policies": {"dqn": {"config": {"lr": 1e-4}}}}
    with Algorithm.from_checkpoint(path, config=changes) as changed:
        policies = changed.workers.local_worker().policy_map
        assert policies["dqn"].config.lr == 1e-4
        assert policies["ppo"].config.train_batch_size == 64
        changed.train()


def test_a_change_without_effect_is_rejected_if_policies_have_their_own_settings(tmp_path):
    policies = {"ppo": PolicySpec(config=A2CConfig(seed=0))}
    config = A2CConfig(env="CartPole-v1", policies=policies)
    message = r"^lr: every policy of this plan has its own settings: policies=\{'ppo': \{'config':"
    with pytest.raises(ConfigError, match=message):
        Algorithm.from_plan("a2c", config, lr=1e-4)
    with config.build() as algorithm:
        path = algorithm.save(tmp_path / "c")
    with pytest.raises(ConfigError, match=message):
        Algorithm.from_checkpoint(path, config={"lr": 1e-4})


def test_other_way_to_step_the_environments_is_named(tmp_path):
    config = A2CConfig(env="CartPole-v1", train_batch_size=40, num_envs_per_worker=2, seed=1)
    for before, after in (("flowrl", "sync"), ("sync", "flowrl")):
        path = tmp_path / before
        with config.updated(vectorization_mode=before).build() as algorithm:
            algorithm.train()
            algorithm.save(path)
        message = f"vectorization_mode is {after}, in the checkpoint it is {before}"
        with pytest.raises(CheckpointError, match=message):
            A2C.from_checkpoint(path, config={"vectorization_mode": after})


def test_dropped_steps_count_as_steps_of_the_single_agent(tmp_path):
    config = A2CConfig(env="CartPole-v1", sample_async=True, train_batch_size=40, seed=1)
    with config.build() as algorithm:
        algorithm.train()
        ready = algorithm.workers.local_worker().sampler._ready
        deadline = time.monotonic() + 60
        while not ready.full():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        algorithm.save(tmp_path / "c")
        algorithm.restore(tmp_path / "c")
        result = algorithm.train()
    assert result["counters"]["num_env_steps_dropped"] > 0
    assert result["num_agent_steps_sampled"] == result["num_env_steps_sampled"]


def test_changed_seed_of_a_checkpoint_is_reported(tmp_path, caplog):
    with A2C("CartPole-v1", seed=1) as algorithm:
        algorithm.save(tmp_path / "c")
    for seed, is_reported in ((1, False), (2, True)):
        caplog.clear()
        A2C.from_checkpoint(tmp_path / "c", config={"seed": seed}).stop()
        assert ("seed: the training continues" in caplog.text) == is_reported


def test_length_that_learn_has_extended_is_restored_unless_it_is_set_again(tmp_path):
    settings = {"train_batch_size": 64, "lr": [["0%", 1e-3], ["100%", 0.0]], "seed": 1}
    with A2CConfig(env="CartPole-v1", total_timesteps=256, **settings).build() as algorithm:
        algorithm.learn(1024, stop={"training_iteration": 2}, run_dir=None, progress=False)
        algorithm.save(tmp_path)
        algorithm.train()
        weights = algorithm.get_policy().get_weights()
    with A2C.from_checkpoint(tmp_path) as resumed:
        resumed.train()
        assert_same(resumed.get_policy().get_weights(), weights)
    for total in (512, 256):
        with A2C.from_checkpoint(tmp_path, config={"total_timesteps": total}) as changed:
            assert changed.workers.global_vars["total_timesteps"] == total
    with A2CConfig(env="CartPole-v1", total_timesteps=256, **settings).build() as other:
        other.learn(2048, stop={"training_iteration": 1}, run_dir=None, progress=False)
        other.restore(tmp_path)
        assert other.workers.global_vars["total_timesteps"] == 1024


@pytest.mark.parametrize("lr", [1e-3, [["0%", 1e-3], ["100%", 0.0]]])
def test_learning_on_without_a_run_directory_keeps_the_extended_length(lr):
    settings = {"train_batch_size": 64, "lr": lr, "seed": 1}
    with A2CConfig(env="CartPole-v1", total_timesteps=64, **settings).build() as algorithm:
        for iterations in (1, 3):
            stop = {"training_iteration": iterations}
            steps = 512 if iterations == 1 else None
            algorithm.learn(steps, stop=stop, run_dir=None, progress=False)
        assert algorithm.iteration == 3
        assert algorithm.workers.global_vars["total_timesteps"] == 512
