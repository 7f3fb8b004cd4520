"""A run that goes on from a checkpoint is the run that was not interrupted."""

import json
import logging
import os
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CConfig
from flowrl.data.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from flowrl.envs import MultiAgentEnv, make_multi_agent
from flowrl.envs.env_state import pack_actions, unpack_actions
from flowrl.sampling import DefaultCallbacks
from flowrl.trainer.plan_files import load_plan
from tests.data.test_checkpoint import assert_same

TIMES = ("time", "timers", "throughput", "sampler_")


def numbers(result):
    """All that a result says, but for times."""
    told = json.loads(json.dumps(result, default=str))
    return {k: v for k, v in flat(told) if not any(word in k for word in TIMES)}


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", repr(value)


def weights(algorithm):
    policies = algorithm.workers.local_worker().policy_map
    return {
        f"{pid}/{name}": array.tobytes().hex()
        for pid, policy in policies.items()
        for name, array in policy.get_weights().items()
    }


def trained(config, plan, iterations, path=None, save=None):
    """The last five results and the weights of a run, or of one that goes on."""
    with config.build(plan=plan) as algorithm:
        if path is not None:
            algorithm.restore(path)
            assert algorithm.workers.num_episodes_restarted == 0
        results = [numbers(algorithm.train()) for _ in range(iterations)]
        if save is not None:
            algorithm.save(save)
        return results[-5:], weights(algorithm)


SMALL = {
    "ppo": {"train_batch_size": 128, "sgd_minibatch_size": 64, "num_sgd_iter": 2},
    "a2c": {},
    "a2c_replay": {},
    "dqn": {"learning_starts": 100, "min_sample_timesteps_per_iteration": 70},
    "ppo_dqn": {"min_sample_timesteps_per_iteration": 200},
}


def of_plan(plan, num_workers, **settings):
    config = load_plan(plan).config
    return config.updated(seed=3, num_workers=num_workers, **{**SMALL[plan], **settings})


def goes_on_as_if_nothing_had_been(config, plan, path):
    results, after = trained(config, plan, 10)
    trained(config, plan, 5, save=path)
    going_on, same = trained(config, plan, 5, path)
    assert after == same
    for one, two in zip(results, going_on, strict=True):
        assert one == two


@pytest.mark.parametrize("plan", list(SMALL))
def test_in_process_a_resumed_run_is_the_same_run(tmp_path, plan):
    goes_on_as_if_nothing_had_been(of_plan(plan, 0), plan, tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ppo", "a2c", "dqn", "ppo_dqn"])
def test_on_actors_a_resumed_run_is_the_same_run(tmp_path, plan, ray_session):
    goes_on_as_if_nothing_had_been(of_plan(plan, 2), plan, tmp_path / "c")


class Noisy(gym.Env):
    """Random observations, rewards and lengths, from the generator that gymnasium gives it."""

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
        box *= 0.5  # an environment may write into what it is given
        reward = float(box.sum() + number)
        return self._observe(), reward, bool(self.np_random.random() < 0.05), False, {}


class Stateful(gym.Env):
    """Its own random stream, which it can say."""

    observation_space = spaces.Box(0, 1, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, savable=True):
        self._own = np.random.RandomState(7 if savable else None)
        if savable:
            self.get_state = lambda: {"n": self._n, "stream": self._own.get_state(legacy=False)}
            self.set_state = self._take

    def _take(self, state):
        self._n = state["n"]
        self._own.set_state(state["stream"])

    def reset(self, *, seed=None, options=None):
        self._n = 0
        return self._own.random_sample(1), {}

    def step(self, action):
        self._n += 1
        return self._own.random_sample(1), 1.0, self._n == 13, False, {}


class Turns(MultiAgentEnv):
    """Agents named by tuples that come and go, each acting now and then."""

    possible_agents = [("a", 1), ("b", 2), ("c", 3)]
    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Discrete(2)
    np_random = None

    def reset(self, *, seed=None, options=None):
        if seed is not None or self.np_random is None:
            self.np_random = np.random.default_rng(seed)
        self._t, self._there = 0, {("a", 1)}
        return self._observe(), {}

    def _observe(self):
        return {
            a: np.clip(self.np_random.normal(size=2), -9, 9).astype(np.float32)
            for a in sorted(self._there)
        }

    def step(self, actions):
        self._t += 1
        rewards = {a: float(actions[a]) for a in actions}
        over = self._t == 37
        if self._t % 5 == 0:
            self._there = {self.possible_agents[i] for i in self.np_random.permutation(3)[:2]}
        return self._observe(), rewards, {"__all__": over}, {"__all__": False}, {}


class Remembers(DefaultCallbacks):
    def on_episode_step(self, *, episode, **kwargs):
        episode.user_data["steps"] = episode.user_data.get("steps", 0) + 1
        episode.user_data["cannot be saved"] = object()

    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["steps"] = episode.user_data["steps"]


SAMPLING = {
    "normalised": {"normalize_observations": True, "normalize_rewards": True},
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
        "callbacks_class": Remembers,
    },
    "callbacks": {"callbacks_class": Remembers},
    "nested spaces": {"env": Noisy, "normalize_observations": False},
    "nested, whole episodes": {"env": Noisy, "batch_mode": "complete_episodes"},
    "continuous": {"env": "Pendulum-v1"},
    "own state": {"env": Stateful},
    "several agents": {
        "env": make_multi_agent("CartPole-v1"),
        "env_config": {"num_agents": 3},
        "policies": {"p", "q"},
        "policy_mapping_fn": lambda agent_id, *args, **kwargs: "p" if agent_id else "q",
    },
    "agents that come and go": {
        "env": Turns,
        "policies": {"p", "q"},
        "policy_mapping_fn": lambda agent_id, *args, **kwargs: "p" if agent_id[1] > 1 else "q",
        "batch_mode": "complete_episodes",
    },
    "agent steps": {
        "env": Turns,
        "count_steps_by": "agent_steps",
        "policies": {"p"},
        "policy_mapping_fn": lambda *args, **kwargs: "p",
    },
}


@pytest.mark.parametrize("case", list(SAMPLING))
def test_whatever_is_sampled_goes_on_in_the_middle_of_episodes(tmp_path, case):
    settings = {
        "env": "CartPole-v1",
        "num_envs_per_worker": 3,
        "train_batch_size": 48,
        "rollout_fragment_length": 11,
        "seed": 5,
        "model": {"fcnet_hiddens": [8]},
        **SAMPLING[case],
    }
    goes_on_as_if_nothing_had_been(A2CConfig(**settings), "a2c", tmp_path / "c")


CASE = """
import json, sys
from tests.trainer.test_resume import of_plan, trained
plan, workers, iterations, path, save, out = sys.argv[1:]
told = trained(
    of_plan(plan, int(workers)), plan, int(iterations), path or None, save or None
)
json.dump(told, open(out, "w"))
print("done", flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def in_a_process(plan, workers, iterations, out, path="", save=""):
    done = subprocess.run(
        [sys.executable, "-c", CASE, plan, workers, iterations, path, save, out],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "done" in done.stdout, done.stderr
    assert done.returncode == -9
    with open(out) as file:
        return json.load(file)


@pytest.mark.parametrize(
    ("plan", "workers"),
    [
        *(
            pytest.param(plan, workers, marks=pytest.mark.slow)
            for plan in ("ppo", "a2c", "dqn", "ppo_dqn")
            for workers in ("0", "2")
        ),
    ],
)
def test_a_killed_process_is_gone_on_with_by_another_one(tmp_path, plan, workers):
    path, out = str(tmp_path / "c"), str(tmp_path / "told")
    whole = in_a_process(plan, workers, "10", out)
    in_a_process(plan, workers, "5", out, save=path)
    assert in_a_process(plan, workers, "5", out, path=path) == whole


@pytest.mark.parametrize(
    "settings",
    [
        {"env": Stateful, "env_config": {"savable": False}},
        {"vectorization_mode": "sync"},
        {"env": Stateful, "env_config": {"savable": False}, "callbacks_class": Remembers},
    ],
    ids=["another observation", "foreign vector env", "by rows"],
)
def test_episodes_that_cannot_be_played_again_begin_anew_and_are_counted(tmp_path, settings):
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


@pytest.mark.slow
def test_a_worker_that_is_gone_loses_its_episodes_alone(tmp_path, ray_session, caplog):
    config = A2CConfig(
        env="CartPole-v1", num_workers=2, train_batch_size=32, seed=1, sample_timeout_s=30
    )
    with config.build() as algorithm:
        algorithm.train()
        ray_session.kill(algorithm.workers.remote_workers()[0])
        with caplog.at_level(logging.WARNING, "flowrl"):
            algorithm.save(tmp_path / "c")
        assert "worker 1 returned no state" in caplog.text
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        result = algorithm.train()
        assert result["timesteps_total"] == 64


@pytest.mark.slow
def test_with_async_rollouts_counters_go_on_and_what_was_in_flight_is_dropped(
    tmp_path, ray_session
):
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
    config = load_plan(str(file)).config.updated(plan=str(file))
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


def test_another_number_of_workers_or_environments_is_refused(tmp_path):
    config = A2CConfig(env="CartPole-v1", train_batch_size=32, num_envs_per_worker=2)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
    for change, said in (
        ({"num_envs_per_worker": 3}, "num_envs_per_worker"),
        ({"num_workers": 1}, "the state has 0 configured workers, this set 1"),
        ({"batch_mode": "complete_episodes"}, "sampled in columns"),
    ):
        with config.updated(**change).build() as algorithm:
            before = weights(algorithm)
            with pytest.raises(CheckpointError, match=said):
                algorithm.restore(tmp_path / "c")
            assert weights(algorithm) == before
    assert os.listdir(tmp_path) == ["c"]
    assert read_checkpoint(tmp_path / "c", "sampling")[0]["sampling"]["remote"] == []


class Integrates(gym.Env):
    """Deterministic; writes into its action, gives float64 for a float32 space, and now and then
    what is not finite."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, odd=False):
        self.odd = odd

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.normal(size=1) * 0.1
        return self.x.copy(), {"when": np.datetime64("2020-01-01")}

    def step(self, action):
        self.t += 1
        action *= 0.5
        self.x = np.clip(self.x + action, -8, 8)
        seen = np.array([np.nan]) if self.odd and self.t % 4 == 0 else self.x.copy()
        return seen, float(self.x[0]), self.t == 30, False, {"when": np.datetime64("2020-01-01")}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"env_config": {"odd": True}, "on_invalid_step": "replace"},
        {"env_config": {"odd": True}, "on_invalid_step": "replace", "callbacks_class": Remembers},
        {"batch_mode": "complete_episodes", "callbacks_class": Remembers},
    ],
)
def test_going_on_twice_is_going_on(tmp_path, settings):
    """Saved, restored, saved again at once and restored: nothing is altered on the way."""
    base = {"env": Integrates, "num_envs_per_worker": 2, "train_batch_size": 22, "seed": 4}
    config = A2CConfig(**{**base, **settings})
    results, after = trained(config, "a2c", 6)
    trained(config, "a2c", 3, save=tmp_path / "a")
    trained(config, "a2c", 0, tmp_path / "a", tmp_path / "b")
    going_on, same = trained(config, "a2c", 3, tmp_path / "b")
    assert after == same
    assert results[-3:] == going_on


class Says(gym.Env):
    """Says its state, but not its random stream; perhaps within gymnasium's wrappers."""

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


class Clashes(Says):
    def get_state(self, player):
        raise AssertionError


class Objects(Says):
    def get_state(self):
        return {"object": self}


@pytest.mark.parametrize("env", [Says, Clashes, Objects])
@pytest.mark.parametrize("horizon", [None, 9])
def test_environments_that_say_their_state(tmp_path, env, horizon):
    settings = {"num_envs_per_worker": 2, "train_batch_size": 22, "seed": 4, "horizon": horizon}
    goes_on_as_if_nothing_had_been(A2CConfig(env=env, **settings), "a2c", tmp_path / "c")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("iterations", [0, 2])
def test_a_live_algorithm_goes_back(tmp_path, workers, iterations, request):
    if workers:
        request.getfixturevalue("ray_session")
    config = of_plan("a2c", workers)
    with config.build(plan="a2c") as algorithm:
        for _ in range(iterations):
            algorithm.train()
        algorithm.save(tmp_path / "c")
        first = [numbers(algorithm.train()) for _ in range(3)]
        after = weights(algorithm)
        algorithm.restore(tmp_path / "c")
        assert [numbers(algorithm.train()) for _ in range(3)] == first
        assert weights(algorithm) == after


def test_a_run_that_saves_is_the_run_that_does_not(tmp_path):
    results = []
    for saves in (False, True):
        with of_plan("ppo", 0).build(plan="ppo") as algorithm:
            results.append([])
            for _ in range(5):
                results[-1].append(numbers(algorithm.train()))
                if saves:
                    algorithm.save(tmp_path / "c")
    assert results[0] == results[1]


def test_long_journals_are_short_to_save():
    box = [np.full(2, i, np.float32) for i in range(20_000)]
    nested = [{"a": i, "b": (np.float32(i), np.ones(2))} for i in range(5)] + [{"a": 3}]
    for journal in (box, nested, [], list(range(9)), [True, False]):
        again = unpack_actions(pack_actions(journal))
        assert len(again) == len(journal)
        for one, two in zip(again, journal, strict=True):
            assert_same(one, two)
    assert len(pack_actions(box)) == 1


def test_a_restore_that_fails_leaves_the_run_as_it_is(tmp_path):
    config = of_plan("a2c", 0)
    with config.build(plan="a2c") as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        state, manifest = read_checkpoint(tmp_path / "c")
        about = {k: v for k, v in manifest.items() if k not in ("format", "files", "blake2b")}
        expected = [numbers(algorithm.train()) for _ in range(2)]
    for part in ("episodes_ready", "num_envs", "policies"):
        with config.build(plan="a2c") as algorithm:
            algorithm.train()
            local = {k: v for k, v in state["sampling"]["local"].items() if k != part}
            broken = {**state, "sampling": {**state["sampling"], "local": local}}
            write_checkpoint(tmp_path / "broken", broken, about)
            with pytest.raises(CheckpointError, match=part):
                algorithm.restore(tmp_path / "broken")
            assert [numbers(algorithm.train()) for _ in range(2)] == expected


def test_what_samplers_have_ahead_is_counted_as_dropped(tmp_path):
    config = A2CConfig(env="CartPole-v1", sample_async=True, train_batch_size=33, seed=1)
    with config.build() as algorithm:
        algorithm.train()
        time.sleep(0.3)  # it samples ahead
        before = algorithm.train()
        algorithm.save(tmp_path / "c")
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "c")
        after = algorithm.train()
    dropped = after["counters"]["num_env_steps_dropped"]
    assert dropped > 0
    assert after["timesteps_total"] == before["timesteps_total"] + dropped + 33
