"""Samplers, batch modes, horizons and step units."""

import contextlib
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.envs import MultiAgentEnv, make_multi_agent
from flowrl.envs.env_factory import EnvFactory
from flowrl.envs.registry import env_creator_for
from flowrl.policies import ConfigError
from flowrl.sampling import (
    AsyncSampler,
    DefaultCallbacks,
    RolloutWorker,
    SamplerInput,
    SimpleListCollector,
    SyncSampler,
)
from flowrl.sampling.sampler import SampleResult
from tests.extras import require_extra

from .fakes import CountEnv, Idle, ObservedValue

COLLECTORS = {"columns": None, "rows": SimpleListCollector}


@pytest.fixture(params=list(COLLECTORS))
def collector(request):
    """None samples in columns, SimpleListCollector row by row."""
    return COLLECTORS[request.param]


def worker(length=3, fragment=7, envs=1, policy=ObservedValue, **config):
    settings = {"num_envs_per_worker": envs, "rollout_fragment_length": fragment, **config}
    return RolloutWorker(lambda context: CountEnv(length), policy, settings)


# -- complete episodes -----------------------------------------------------------------------------


def test_complete_episodes_example_of_the_rllib_documentation():
    w = worker(98, 100, batch_mode="complete_episodes")
    assert [w.sample().count for _ in range(3)] == [196, 196, 196]
    assert w.sampler.get_data().count == 98  # an item of the sampler is one episode


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=25)
def test_complete_episodes_are_complete_and_none_is_lost(length, fragment, envs):
    w = worker(length, fragment, envs, batch_mode="complete_episodes")
    batches = [w.sample() for _ in range(4)]
    for batch in batches:
        assert fragment * envs <= batch.count < fragment * envs + length
        for episode in batch.split_by_episode():
            assert episode["t"].tolist() == list(range(length))
            assert episode["dones"].tolist() == [False] * (length - 1) + [True]
            assert len(set(episode["unroll_id"])) == 1
    joined = SampleBatch.concat_samples(batches)
    for env in range(envs):
        obs = joined["obs"][joined["env_id"] == env]
        episodes = list(dict.fromkeys(obs[:, 0].tolist()))
        assert episodes == list(range(len(episodes)))  # in order, without a gap
    assert len(w.get_metrics()) == len(set(joined["eps_id"]))


def test_endless_episode_logs_a_warning(caplog):
    w = worker(11_000, 5, batch_mode="complete_episodes")
    assert w.sample().count == 11_000
    assert "10000 env steps without a finished episode" in caplog.text


def test_both_names_of_the_batch_mode():
    assert worker(batch_mode="truncated_episodes").sample().count == 7
    assert PPOConfig(batch_mode="truncated_episodes").batch_mode == "truncate_episodes"
    with pytest.raises(ConfigError, match="batch_mode"):
        worker(batch_mode="complete")
    with pytest.raises(ConfigError, match="batch_mode"):
        PPOConfig(batch_mode="complete")


# -- horizons --------------------------------------------------------------------------------------


def episodes_of(batch):
    return [
        (part["t"].tolist(), part["terminateds"].tolist(), part["truncateds"].tolist())
        for part in batch.split_by_episode()
    ]


F, T = False, True


def test_horizon_settings_and_end_flags(collector):
    """Episodes have 5 steps and alternately terminate and truncate; fragments have 10."""

    def flags(**config):
        batch = worker(5, 10, sample_collector=collector, **config).sample()
        return [(len(t), term[-1], trunc[-1]) for t, term, trunc in episodes_of(batch)]

    assert flags() == [(5, T, F), (5, F, T)]
    assert flags(horizon=3) == [(3, F, T)] * 3 + [(1, F, F)]
    assert flags(horizon=3, soft_horizon=True) == [(3, F, F), (2, T, F), (3, F, F), (2, F, T)]
    assert flags(no_done_at_end=True) == [(5, F, F), (5, F, F)]
    assert flags(horizon=3, no_done_at_end=True) == [(3, F, F)] * 3 + [(1, F, F)]
    assert flags(horizon=3, soft_horizon=True, no_done_at_end=True) == [
        (3, F, F),
        (2, F, F),
        (3, F, F),
        (2, F, F),
    ]
    # the environment ends in the step of the horizon: both flags are set, as by TimeLimit
    assert flags(horizon=5) == [(5, T, T), (5, F, T)]


def test_next_values_at_every_kind_of_end(collector):
    def next_values(**config):
        batch = worker(5, 6, sample_collector=collector, **config).sample()
        return batch["next_values"].tolist()

    # the observed value is 100 * episode + step
    assert next_values() == [1, 2, 3, 4, 0, 101]
    assert next_values(no_done_at_end=True) == [1, 2, 3, 4, 5, 101]
    assert next_values(horizon=2) == [1, 2, 101, 102, 201, 202]
    assert next_values(horizon=2, soft_horizon=True) == [1, 2, 3, 4, 0, 101]


class TimeLimited(gym.Env):
    """Never ends without a time limit."""

    observation_space = gym.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.n += 1
        return np.full(1, self.n, np.float32), 1.0, False, False, {}


gym.register("FlowrlLimited-v0", entry_point=TimeLimited, max_episode_steps=3)


@pytest.mark.parametrize("mode", ["flowrl", "sync", "async"])
def test_horizon_overrides_a_shorter_time_limit(collector, mode):
    def lengths(**config):
        w = RolloutWorker(
            "FlowrlLimited-v0",
            PPOTorchPolicy,
            {
                "num_envs_per_worker": 2,
                "rollout_fragment_length": 24,
                "vectorization_mode": mode,
                "sample_collector": collector,
                "seed": 1,
                **config,
            },
        )
        w.sample()
        return [(e.env_id, e.episode_length) for e in w.get_metrics()]

    assert set(lengths()) == {(0, 3), (1, 3)}
    assert set(lengths(horizon=6)) == {(0, 6), (1, 6)}
    assert set(lengths(horizon=2)) == {(0, 2), (1, 2)}
    assert set(lengths(horizon=6, soft_horizon=True)) == {(0, 6), (1, 6)}
    envs = []

    class RecordsEnvs(DefaultCallbacks):
        def on_sub_environment_created(self, *, sub_environment, **kwargs):
            envs.append(sub_environment)

    settings = {"horizon": 6, "seed": 1, "callbacks_class": RecordsEnvs}
    RolloutWorker("FlowrlLimited-v0", PPOTorchPolicy, settings)
    assert envs[0].unwrapped.spec.max_episode_steps == 6
    assert envs[0].spec.max_episode_steps == 6


def test_horizon_with_vector_entry_point_raises():
    with pytest.raises(ConfigError, match="created elsewhere"):
        RolloutWorker(
            "CartPole-v1",
            PPOTorchPolicy,
            {"vectorization_mode": "vector_entry_point", "horizon": 5},
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"horizon": 0}, "horizon"),
        ({"horizon": 2.5}, "horizon"),
        ({"soft_horizon": True}, "needs a horizon"),
        ({"count_steps_by": "steps"}, "count_steps_by"),
        ({"on_invalid_step": "ignore"}, "on_invalid_step"),
        ({"sample_collector": dict}, "subclass of SampleCollector"),
    ],
)
def test_invalid_settings_raise(config, message):
    with pytest.raises(ConfigError, match=message):
        worker(**config)
    with pytest.raises(ConfigError, match=message):
        PPOConfig(env="CartPole-v1", **config).build()


# -- step units ------------------------------------------------------------------------------------


class TwoOrMoreAgents(MultiAgentEnv):
    """`agents` agents that all act for `length` steps."""

    observation_space = CountEnv.observation_space
    action_space = CountEnv.action_space

    def __init__(self, agents=2, length=10):
        self.possible_agents, self.length = list(range(agents)), length

    def observe(self):
        return {a: np.array([a, self.now], np.float32) for a in self.possible_agents}

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.observe(), {}

    def step(self, action_dict):
        self.now += 1
        flags = {"__all__": self.now == self.length}
        return self.observe(), dict.fromkeys(self.possible_agents, 1.0), flags, {"__all__": F}, {}


@pytest.mark.parametrize(
    ("agents", "fragment", "by", "env_steps", "agent_steps"),
    [
        (2, 3, "env_steps", 3, 6),
        (2, 3, "agent_steps", 2, 4),
        (2, 5, "agent_steps", 3, 6),
        (3, 9, "agent_steps", 3, 9),
        (1, 5, "agent_steps", 5, 5),
    ],
)
def test_fragments_count_env_or_agent_steps(agents, fragment, by, env_steps, agent_steps):
    w = RolloutWorker(
        lambda context: TwoOrMoreAgents(agents),
        ObservedValue,
        {"rollout_fragment_length": fragment, "count_steps_by": by},
    )
    for _ in range(4):
        batch = w.sample()
        assert isinstance(batch, MultiAgentBatch)
        assert (batch.env_steps(), batch.agent_steps()) == (env_steps, agent_steps)
    tags = w.reply_tags()
    assert (tags["env_steps"], tags["agent_steps"]) == (4 * env_steps, 4 * agent_steps)


def test_complete_episodes_count_env_or_agent_steps():
    def env_steps(by):
        w = RolloutWorker(
            lambda context: TwoOrMoreAgents(2, 5),
            ObservedValue,
            {
                "rollout_fragment_length": 12,
                "count_steps_by": by,
                "batch_mode": "complete_episodes",
            },
        )
        return w.sample().env_steps()

    assert env_steps("env_steps") == 15
    assert env_steps("agent_steps") == 10


def test_train_batches_count_env_or_agent_steps():
    def steps_trained(by):
        config = PPOConfig(
            env=lambda context: TwoOrMoreAgents(2),
            train_batch_size=40,
            rollout_fragment_length=10,
            count_steps_by=by,
            sgd_minibatch_size=0,
            seed=1,
        )
        with config.build() as algorithm:
            return algorithm.train()["num_env_steps_trained"]

    assert steps_trained("env_steps") == 40
    assert steps_trained("agent_steps") == 20


# -- samplers --------------------------------------------------------------------------------------


def test_sync_sampler_samples_lazily_and_returns_metrics_once():
    env = CountEnv()
    w = RolloutWorker(lambda context: env, ObservedValue, {"rollout_fragment_length": 7})
    assert isinstance(w.sampler, SyncSampler)
    assert isinstance(w.sampler, SamplerInput)
    assert env.episode == -1  # not reset yet
    batch = w.sampler.next()
    assert batch.count == 7
    assert len(w.sampler.get_metrics()) == 2
    assert w.sampler.get_metrics() == []
    assert w.sampler.get_extra_batches() == []


@pytest.mark.parametrize("is_async", [False, True])
def test_stopped_sampler_does_not_sample(is_async):
    w = worker(sample_async=is_async)
    w.sampler.next()
    w.sampler.stop()
    with pytest.raises(RuntimeError, match="this sampler was stopped"):
        w.sampler.get_data()


@pytest.mark.parametrize("is_async", [False, True])
def test_stopped_worker_does_not_sample(is_async):
    w = worker(sample_async=is_async)
    w.stop()
    with pytest.raises(RuntimeError, match="this sampler was stopped"):
        w.sample()


@pytest.mark.parametrize(
    "config", [{}, {"policies": ["p"], "policy_mapping_fn": lambda agent: "p"}]
)
def test_worker_stops_within_an_episode_that_does_not_end(config):
    env = CountEnv(length=10**9)
    settings = {"batch_mode": "complete_episodes", "sample_async": True, **config}
    w = RolloutWorker(lambda context: env, ObservedValue, settings)

    def sample():
        with contextlib.suppress(RuntimeError):
            w.sample()

    threading.Thread(target=sample, daemon=True).start()
    deadline = time.monotonic() + 20
    while env.steps < 10:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    w.stop()
    steps = env.steps
    time.sleep(0.05)
    assert env.steps == steps


def test_async_sampler_returns_the_same_rows():
    async_worker, sync = worker(sample_async=True), worker()
    assert isinstance(async_worker.sampler, AsyncSampler)
    for _ in range(10):
        a, b = async_worker.sample(), sync.sample()
        for name in b:
            assert np.array_equal(a[name], b[name]), name
    assert async_worker.env_steps == sync.env_steps
    async_worker.stop()


def test_async_sampler_starts_lazily_and_is_bounded():
    env = CountEnv()
    w = RolloutWorker(
        lambda context: env, ObservedValue, {"rollout_fragment_length": 5, "sample_async": True}
    )
    before = threading.active_count()
    assert w.sampler._ready.qsize() == 0
    assert env.episode == -1
    w.sample()
    deadline = time.monotonic() + 10
    while w.sampler._ready.qsize() < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    # four items of 5 steps: one returned, two ready, and one waiting in the thread
    time.sleep(0.05)
    assert 3 * env.episode + env.steps == 20
    w.stop()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="stopped"):
        w.sample()


def test_weights_only_change_between_items():
    class Versioned(ObservedValue):
        def compute_actions(self, obs_batch, explore=True):
            time.sleep(0.0005)
            zeros = np.zeros(len(obs_batch), np.int64)
            return zeros, [], {"version": np.full(len(obs_batch), self.version)}

        def postprocess_fragment(self, fragment):
            return {}

    w = worker(fragment=20, policy=Versioned, sample_async=True)
    for version in range(1, 20):
        batch = w.sample()
        assert len(set(batch["version"])) == 1
        assert w.reply_tags()["weights_versions"] == {"default_policy": batch["version"][0]}
        assert version - 1 - batch["version"][0] <= 3  # two items ready, one being sampled
        w.set_weights({"default_policy": {}}, {"default_policy": version})
    w.stop()


def test_training_with_async_sampling():
    config = PPOConfig(
        env="CartPole-v1",
        train_batch_size=200,
        rollout_fragment_length=50,
        sample_async=True,
        normalize_observations=True,
        seed=1,
    )
    with config.build() as algorithm:
        for _ in range(3):
            result = algorithm.train()
        assert result["num_env_steps_trained"] == 600
        assert (
            result["env_runners"]["policy_lag_max"] <= 2 * 16 * 10 * 3
        )  # the updates of three items
        assert np.isfinite(result["episode_reward_mean"])


def test_error_in_the_sampler_thread_is_raised_once():
    environments = iter([CountEnv(fail_at=(3, 2)), CountEnv()])
    w = RolloutWorker(
        lambda context: next(environments),
        ObservedValue,
        {"rollout_fragment_length": 6, "sample_async": True, "max_num_env_restarts": 0},
    )
    assert w.sample().count == 6
    with pytest.raises(ValueError, match="the environment broke"):
        w.sample()
    assert [w.sample().count for _ in range(3)] == [6, 6, 6]
    w.stop()


def test_next_concatenates_ready_items():
    items = iter(range(100))

    def collect():
        n = next(items)
        return SampleResult(SampleBatch(x=np.array([n])), [], {"p": n}, {})

    sampler = AsyncSampler(collect, max_ahead=3)
    first = sampler.next()["x"].tolist()
    assert first == list(range(len(first)))
    deadline = time.monotonic() + 10
    while sampler._ready.qsize() < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    joined = sampler.next()["x"].tolist()
    assert joined == list(range(len(first), len(first) + len(joined)))
    assert len(joined) >= 3
    sampler.stop()
    with pytest.raises(ValueError, match="max_ahead"):
        AsyncSampler(collect, 0)


# -- environments ----------------------------------------------------------------------------------


def test_nested_observations_of_envpool_are_sampled():
    require_extra("envpool")
    settings = {"rollout_fragment_length": 6, "num_envs_per_worker": 2, "seed": 0}
    settings["vectorization_mode"] = "envpool"
    batch = RolloutWorker("MiniGrid-Empty-5x5-v0", PPOTorchPolicy, settings).sample()
    assert {key: column.shape for key, column in batch["obs"].items()} == {
        "direction": (12,), "image": (12, 7, 7, 3), "mission": (12, 96),
    }  # fmt: skip


def test_envpool_batches_have_no_reset_rows():
    require_extra("envpool")
    w = RolloutWorker(
        "CartPole-v1",
        PPOTorchPolicy,
        {
            "vectorization_mode": "envpool",
            "num_envs_per_worker": 4,
            "rollout_fragment_length": 100,
            "seed": 1,
        },
    )
    batch = w.sample()
    assert 400 <= batch.count < 404  # one call per episode is its reset
    assert (batch["rewards"] == 1).all()
    for episode in batch.split_by_episode():
        assert np.array_equal(episode["new_obs"][:-1], episode["obs"][1:])
    with pytest.raises(ConfigError, match="EnvPool has no environment"):
        RolloutWorker("FlowrlLimited-v0", PPOTorchPolicy, {"vectorization_mode": "envpool"})


@pytest.mark.parametrize("seed", [1, None])
def test_restored_envpool_starts_with_other_seeds(seed):
    require_extra("envpool")
    first, second = (
        EnvFactory(
            env_creator_for("CartPole-v1"), {}, 2, seed=seed, vectorization_mode="envpool"
        ).make_agent_envs()
        for _ in range(2)
    )
    starts = [np.zeros((2, 4), np.float32) for _ in range(3)]
    first.vector_env.reset(starts[0])
    state = first.state_dict()
    for observations in starts[1:]:
        second.vector_env.load_state_dict(state, observations)
    assert np.array_equal(starts[1], starts[2]) == (seed is not None)
    assert not np.isclose(starts[0], starts[1]).any()


class Nested(gym.Env):
    """Nested observation and action spaces; observations reuse the same arrays."""

    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (2, 2), np.uint8),
            "state": gym.spaces.Tuple(
                [gym.spaces.Discrete(100, start=-1), gym.spaces.Box(-1, 1000, (1,), np.float64)]
            ),
        }
    )
    action_space = gym.spaces.Dict(
        {"move": gym.spaces.Discrete(3), "aim": gym.spaces.Box(-1, 1, (2,), np.float32)}
    )

    def __init__(self):
        self.image, self.box = np.zeros((2, 2), np.uint8), np.zeros(1)

    def observe(self):
        self.image[:], self.box[:] = self.n, self.n
        return {"state": (self.n - 1, self.box), "image": self.image}

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.n += 1
        return self.observe(), float(action["move"]), self.n == 4, False, {}


class NestedPolicy(ObservedValue):
    def compute_actions(self, obs_batch, explore=True):
        n = len(obs_batch["image"])
        move = obs_batch["image"][:, 0, 0].astype(np.int64) % 3
        return {"move": move, "aim": np.zeros((n, 2), np.float32)}, [], {}

    def postprocess_fragment(self, fragment):
        return {}

    def actions_for_env(self, actions):
        return actions


@pytest.mark.parametrize("mode", ["flowrl", "sync", "async"])
def test_nested_spaces_keep_their_structure_and_dtypes(mode):
    w = RolloutWorker(
        lambda context: Nested(),
        NestedPolicy,
        {"num_envs_per_worker": 2, "rollout_fragment_length": 10, "vectorization_mode": mode},
    )
    batch = w.sample()
    image, (number, box) = batch["obs"]["image"], batch["obs"]["state"]
    assert (image.dtype, number.dtype, box.dtype) == (np.uint8, np.int64, np.float64)
    assert image[:, 0, 0].tolist() == batch["t"].tolist()
    assert (number + 1).tolist() == box[:, 0].tolist() == batch["t"].tolist()
    assert (batch["new_obs"]["image"][:, 0, 0] == batch["t"] + 1).all()
    assert batch["actions"]["move"].tolist() == (batch["t"] % 3).tolist()
    assert batch["rewards"].tolist() == (batch["t"] % 3).tolist()


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(5, start=2),
        gym.spaces.MultiDiscrete([3, 4]),
        gym.spaces.MultiBinary(3),
        gym.spaces.Box(-3, 3, (2, 2), np.int16),
        gym.spaces.Box(-1, 1, (3,), np.float64),
    ],
    ids=str,
)
def test_spaces_keep_their_dtypes(space, collector):
    class SpaceSamples(gym.Env):
        observation_space = action_space = space

        def reset(self, *, seed=None, options=None):
            return space.sample(), {}

        def step(self, action):
            assert space.contains(action), action
            return space.sample(), 0.0, False, False, {}

    class RandomActions(ObservedValue):
        def compute_actions(self, obs_batch, explore=True):
            samples = np.array([space.sample() for _ in obs_batch])
            if isinstance(space, gym.spaces.Discrete):
                samples -= space.start
            return samples, [], {}

        def postprocess_fragment(self, fragment):
            return {}

    space.seed(1)
    w = RolloutWorker(
        lambda context: SpaceSamples(),
        RandomActions,
        {
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 5,
            "sample_collector": collector,
            "normalize_actions": False,
        },
    )
    batch = w.sample()
    assert batch["obs"].dtype == batch["new_obs"].dtype == space.dtype
    assert batch["obs"].shape == (10, *space.shape)


def test_action_out_of_range_raises(collector):
    class InvalidActions(ObservedValue):
        def compute_actions(self, obs_batch, explore=True):
            actions, state, extra = super().compute_actions(obs_batch)
            return actions + 7, state, extra

    with pytest.raises(ValueError, match="the action"):
        worker(policy=InvalidActions, sample_collector=collector).sample()


def test_items_that_are_lost_in_a_checkpoint_are_not_reported_as_sampled():
    config = {"sample_async": True, "rollout_fragment_length": 4, "seed": 1}
    before, after = (RolloutWorker(lambda c: CountEnv(3), Idle, config) for _ in range(2))
    try:
        before.sample()
        assert before.reply_tags()["env_steps"] == 4
        deadline = time.monotonic() + 30
        while (state := before.sampling_state_dict())["returned_steps"][0] <= 4:
            assert time.monotonic() < deadline
        after.load_sampling_state_dict(state)
        after.sample()
        tags = after.reply_tags()
        assert (tags["env_steps"], tags["agent_steps"]) == (4, 4)
    finally:
        before.stop()
        after.stop()


@pytest.mark.parametrize("agents", [1, 2])
def test_infos_of_waiting_episodes_are_saved(agents):
    """Their rows are postprocessed already if a callback receives them."""

    class Receives(DefaultCallbacks):
        def on_postprocess_trajectory(self, **kwargs):
            pass

    env = (lambda c: CountEnv(3)) if agents == 1 else make_multi_agent(lambda c: CountEnv(3))
    config = {
        "num_envs_per_worker": 2, "rollout_fragment_length": 1, "batch_mode": "complete_episodes",
        "collect_infos": True, "callbacks_class": Receives,
    }  # fmt: skip
    before, after = (RolloutWorker(env, Idle, config) for _ in range(2))
    before.sample()
    after.load_sampling_state_dict(before.sampling_state_dict())
    expected, resumed = before.sample(), after.sample()
    for policy_id, rows in expected.policy_batches.items():
        assert list(resumed.policy_batches[policy_id]["infos"]) == list(rows["infos"])


def test_unknown_policies_change_nothing():
    worker = RolloutWorker("CartPole-v1", PPOTorchPolicy, {"rollout_fragment_length": 4})
    weights = worker.get_weights()
    zeros = {name: np.zeros_like(array) for name, array in weights["default_policy"].items()}
    with pytest.raises(KeyError, match="unknown policies"):
        worker.set_weights({"default_policy": zeros, "nope": zeros})
    with pytest.raises(KeyError, match="unknown policies"):
        worker.get_policy("nope")
    batch = worker.sample()
    with pytest.raises(KeyError, match="unknown policies"):
        worker.learn_on_batch(MultiAgentBatch({"default_policy": batch, "nope": batch}, 4))
    for name, array in worker.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(array, weights["default_policy"][name])


def test_sampler_that_hangs_in_the_environment_can_be_stopped(monkeypatch, caplog):
    monkeypatch.setattr("flowrl.sampling.sampler.JOIN_TIMEOUT_S", 0.1)
    hangs, ends = threading.Event(), threading.Event()

    def collect():
        hangs.set()
        ends.wait(60)
        raise RuntimeError("stopped")

    sampler = AsyncSampler(collect)

    def read():
        with pytest.raises(RuntimeError, match="stopped"):
            sampler.get_data()

    reader = threading.Thread(target=read)
    reader.start()
    assert hangs.wait(60)
    sampler.stop()
    assert "the sampler's thread still samples after 0.1 s" in caplog.text
    ends.set()
    reader.join(60)
    assert not reader.is_alive()


def test_environment_is_not_closed_while_a_thread_steps_it(monkeypatch):
    monkeypatch.setattr("flowrl.sampling.sampler.JOIN_TIMEOUT_S", 0.1)
    hangs, ends = threading.Event(), threading.Event()
    closed, errors = [], []

    class Hangs(CountEnv):
        def step(self, action):
            hangs.set()
            ends.wait(60)
            return super().step(action)

        def close(self):
            closed.append(self)

    settings = {"rollout_fragment_length": 5, "sample_async": True}
    worker = RolloutWorker(lambda context: Hangs(), ObservedValue, settings)

    def sample():
        try:
            worker.sample()
        except RuntimeError as error:
            errors.append(error)

    reader = threading.Thread(target=sample)
    reader.start()
    try:
        assert hangs.wait(60)
        worker.stop()
        assert closed == []
    finally:
        ends.set()
    reader.join(60)
    assert [str(error) for error in errors] == ["this sampler was stopped"]
    deadline = time.monotonic() + 60
    while not closed and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(closed) == 1
