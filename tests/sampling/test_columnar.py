"""Columnar fragments: contents of every column at episode ends, cuts and resets."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.envs import register_env
from flowrl.envs.gymnasium_vector_env import GymnasiumVectorEnv
from flowrl.policies import ConfigError
from flowrl.policies.views import ViewRequirement
from flowrl.sampling import RolloutWorker, SimpleListCollector, WorkerSet

from .fakes import CountEnv, Idle, ObservedValue, WrongEnv


def worker(length=3, fragment=7, envs=1, creator=None, **config):
    return RolloutWorker(
        creator or (lambda context: CountEnv(length, **context)),
        ObservedValue,
        {"num_envs_per_worker": envs, "rollout_fragment_length": fragment, **config},
    )


class ReusedInfos(gym.vector.VectorEnv):
    """Two environments that write their infos into the same array in each step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = 2
    single_observation_space = gym.spaces.Box(-1, 1e6, (2,), np.float32)
    single_action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-1, 1e6, (2, 2), np.float32)
    action_space = gym.spaces.MultiDiscrete([2, 2])

    def reset(self, *, seed=None, options=None):
        self.steps = np.zeros(2, int)
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions):
        self.steps += 1
        nothing = np.zeros(2, bool)
        return np.zeros((2, 2), np.float32), np.ones(2), nothing, nothing, {"n": self.steps}


def test_infos_that_are_not_per_environment_are_those_of_each_one():
    def make_env(context):
        env = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
        step = env.step
        common = {"map": np.arange(5), "name": "a", "size": np.array(7), "of_env": [10, 20]}

        def step_with_infos(actions):
            *results, infos = step(actions)
            return *results, {**infos, **common, "inner": {"map": np.arange(3)}}

        env.step = step_with_infos
        return env

    config = {"rollout_fragment_length": 1, "collect_infos": True}
    infos = RolloutWorker(make_env, Idle, config).sample()["infos"]
    assert [info["of_env"] for info in infos] == [10, 20]
    for info in infos:
        assert info["map"].tolist() == [0, 1, 2, 3, 4]
        assert (info["name"], int(info["size"])) == ("a", 7)
        assert info["inner"]["map"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("collector", [None, SimpleListCollector])
def test_a_vector_environment_may_reuse_its_infos(collector):
    w = worker(creator=lambda context: ReusedInfos(), fragment=3, sample_collector=collector)
    assert [int(info["n"]) for info in w.sample()["infos"]] == [1, 2, 3, 1, 2, 3]


def check_rows(batch, length):
    """Check every row's columns against the rules of CountEnv."""
    for row in batch.rows():
        episode, step = row["obs"]
        end = step + 1 == length
        assert row["t"] == step
        assert row["rewards"] == step + 1
        assert row["new_obs"].tolist() == [episode, step + 1]
        assert row["terminateds"] == (end and episode % 2 == 0)
        assert row["truncateds"] == (end and episode % 2 == 1)
        expected = 0.0 if row["terminateds"] else 100 * episode + step + 1
        assert row["next_values"] == expected, row


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=25)
def test_fragments_continue_each_other(length, fragment, envs):
    w = worker(length, fragment, envs)
    fragments = [w.sample() for _ in range(4)]
    unrolls = set()
    for batch in fragments:
        assert batch.count == fragment * envs
        check_rows(batch, length)
        new = set(batch["unroll_id"].tolist())
        assert not new & unrolls
        unrolls |= new
    joined = SampleBatch.concat_samples(fragments)
    for env in range(envs):
        rows = joined.take_rows(np.flatnonzero(joined["env_id"] == env))
        steps = rows["obs"][:, 0] * length + rows["obs"][:, 1]
        assert steps.tolist() == list(range(4 * fragment))
        episodes = rows.split_by_episode()
        assert all(set(e["obs"][:, 0]) == {i} for i, e in enumerate(episodes))
    assert len(set(joined["eps_id"])) == len(set(zip(joined["env_id"], joined["obs"][:, 0])))  # noqa: B905
    finished = w.get_metrics()
    assert len(finished) == envs * (4 * fragment // length)
    assert all(e[:2] == (length * (length + 1) / 2, length) for e in finished)
    assert w.get_metrics() == []


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("envs", [1, 3])
def test_episodes_do_not_depend_on_autoreset_mode(mode, envs):
    def creator(context):
        # gymnasium keeps the final observation by reference in SAME_STEP mode
        makers = [partial(CountEnv, 3 + i, reuse=False) for i in range(envs)]
        return SyncVectorEnv(makers, autoreset_mode=mode)

    vectorized = worker(fragment=24, envs=envs, creator=creator)
    batches = [vectorized.sample() for _ in range(2)]
    extra = envs if mode is AutoresetMode.NEXT_STEP else 1  # rows of a last step that is not full
    assert all(24 * envs <= batch.count < 24 * envs + extra for batch in batches)
    joined = SampleBatch.concat_samples(batches)
    for env in range(envs):
        check_rows(joined.take_rows(np.flatnonzero(joined["env_id"] == env)), 3 + env)
    tags = vectorized.reply_tags()
    assert tags["env_steps"] == joined.count
    assert all(e[1] in range(3, 3 + envs) for e in tags["episodes"])


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25)
def test_resets_of_vector_environments_cost_no_rows(lengths, fragment, by_row, with_views):
    """Fragments of a NEXT_STEP environment have all their rows and continue each other."""
    envs = len(lengths)
    makers = [partial(CountEnv, length, reuse=False) for length in lengths]
    config = {"sample_collector": SimpleListCollector} if by_row else {}
    w = worker(
        fragment=fragment,
        envs=envs,
        creator=lambda context: SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP),
        **config,
    )
    if with_views:
        w.policy.view_requirements["prev_rewards"] = ViewRequirement("rewards", shift=-1)
    batches = [w.sample() for _ in range(4)]
    for batch in batches:
        assert fragment * envs <= batch.count < fragment * envs + envs
    joined = SampleBatch.concat_samples(batches)
    if with_views:
        expected = np.where(joined["t"] > 0, joined["t"], 0)
        assert joined["prev_rewards"].tolist() == expected.tolist()
    for env, length in enumerate(lengths):
        rows = joined.take_rows(np.flatnonzero(joined["env_id"] == env))
        check_rows(rows, length)
        steps = rows["obs"][:, 0] * length + rows["obs"][:, 1]
        assert steps.tolist() == list(range(rows.count))


@pytest.mark.parametrize("failing", ["first reset", "reset in a step"])
def test_vector_environment_is_recreated_after_an_error_in_reset(failing):
    made = []

    def make():
        env = gym.make_vec(
            "CartPole-v1", 2, vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.DISABLED},
        )  # fmt: skip
        made.append(env)
        return env

    env = GymnasiumVectorEnv(make(), 3, make)
    observations = np.zeros((2, 4), np.float32)
    ends = np.zeros(2, np.float32), np.zeros(2, bool), np.zeros(2, bool)

    def fails(**kwargs):
        raise OSError("broken")

    if failing == "first reset":
        env.env.reset = fails
        act = partial(env.reset, observations)
    else:
        env.reset(observations)
        env.env.reset = fails

        def act():
            for _ in range(100):
                env.step(np.ones(2, int), observations, *ends)

    with pytest.raises(OSError, match="broken") as raised:
        act()
    assert "raised by reset() of an environment in a SyncVectorEnv" in raised.value.__notes__[0]
    env.reset(observations)
    assert len(made) == 2
    env.close()


def test_restored_vector_environment_replaces_one_that_failed():
    made = []

    def make(*restores):
        made.append(restores)
        return gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")

    env = GymnasiumVectorEnv(make(), 3, make, make)
    observations = np.zeros((2, 4), np.float32)
    env.reset(observations)
    with pytest.raises(AssertionError):
        env.step(np.array([7, 7]), observations, *np.zeros((3, 2)))
    env.load_state_dict({"num_restores": 0}, observations)
    env.close()
    assert made == [(), (1,)]


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_restored_vector_environments_start_the_same_episodes(mode):
    def starts(*earlier):
        env = GymnasiumVectorEnv(gym.make_vec("CartPole-v1", 2, vectorization_mode=mode), seed=3)
        observations = np.zeros((2, 4), np.float32)
        for _ in earlier:
            env.reset(observations)
        env.load_state_dict({"num_restores": 0}, observations)
        env.close()
        return observations.tolist()

    assert starts() == starts("used")
    assert starts()[0] != starts()[1]


@pytest.mark.parametrize("mode", ["sync", "async", "vector_entry_point"])
def test_gymnasium_vectorization_modes_return_whole_fragments(mode):
    w = RolloutWorker(
        "CartPole-v1",
        ObservedValue,
        {
            "seed": 1,
            "num_envs_per_worker": 4,
            "vectorization_mode": mode,
            "rollout_fragment_length": 50,
        },
    )
    batch = w.sample()
    w.stop()
    assert 200 <= batch.count < 204
    assert (batch["rewards"] == 1).all()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_final_observations_survive_a_reset_in_the_same_buffer(mode):
    w = worker(length=3, fragment=7, envs=2, vectorization_mode=mode)
    batch = w.sample()
    w.stop()
    assert batch.count == 14
    check_rows(batch, 3)


def test_vector_env_without_autoreset_mode_is_rejected():
    class Unspecified(SyncVectorEnv):
        metadata = {}

        def __init__(self):
            super().__init__([CountEnv])
            self.metadata = {}

    with pytest.raises(ConfigError, match="autoreset_mode"):
        worker(creator=lambda context: Unspecified())


def test_batches_do_not_share_memory_with_later_ones():
    w = worker()
    first = w.sample()
    copy = first.copy()
    w.sample()
    for name in first:
        assert (first[name] == copy[name]).all(), name


@pytest.mark.parametrize("settings", [{}, {"collect_infos": True}])
def test_infos_are_lazy_unless_collected(settings):
    batch = worker(envs=2, **settings).sample()
    assert dict(batch.stored())["infos"].__class__ is (np.ndarray if settings else IndexedColumn)
    assert batch["infos"].dtype == object
    assert [info["n"] for info in batch["infos"]] == (batch["t"] + 1).tolist()
    plain = RolloutWorker("CartPole-v1", ObservedCartPole, {}).sample()
    assert plain["infos"].tolist() == [{}] * plain.count


class ObservedCartPole(ObservedValue):
    def postprocess_fragment(self, fragment):
        return {}


def test_environment_is_not_reset_before_the_first_sample():
    env = CountEnv()
    w = worker(creator=lambda context: env)
    assert env.episode == -1
    w.sample()
    assert env.episode >= 0


def test_creator_gets_worker_and_vector_index():
    contexts = []

    def creator(context):
        contexts.append((context.worker_index, context.vector_index, context["x"]))
        return CountEnv()

    RolloutWorker(
        creator, ObservedValue, {"num_envs_per_worker": 2, "env_config": {"x": 1}}
    ).sample()
    assert contexts == [(0, 0, 1), (0, 1, 1)]


def test_environments_are_created_by_name_class_or_function():
    register_env("count-env", lambda context: CountEnv(**context))
    batch = worker(creator="count-env", env_config={"length": 2}).sample()
    check_rows(batch, 2)
    check_rows(worker(creator=CountEnv, env_config={"length": 2}).sample(), 2)

    class TwoArguments(CountEnv):
        def __init__(self, length, unused):
            super().__init__(length=length)

    register_env("two-arguments", TwoArguments)
    for creator in (TwoArguments, "two-arguments"):
        config = {"length": 2, "unused": 1}
        check_rows(worker(creator=creator, env_config=config).sample(), 2)
    with pytest.raises(ConfigError, match="Did you mean 'CartPole-v1'"):
        worker(creator="CartPol-v1")
    with pytest.raises(ConfigError, match="creator"):
        register_env("x", 3)
    with pytest.raises(ConfigError, match="name is a string"):
        register_env(3, CountEnv)
    with pytest.raises(ConfigError, match="not a gymnasium Env"):
        worker(creator=lambda context: 5)


def test_observation_outside_its_space_raises():
    class Wrong(CountEnv):
        observation_space = gym.spaces.Box(-1, 1, (5,), np.float32)

    with pytest.raises(ConfigError, match="does not fit the space"):
        worker(creator=lambda context: Wrong()).sample()


def test_worker_set_creates_workers_lazily():
    created = []

    def creator(context):
        created.append(1)
        return CountEnv()

    workers = WorkerSet(creator, ObservedValue, num_workers=0)
    workers.parallel_iterator().gather_sync()
    assert not created
    workers.local_worker()
    assert created
    with pytest.raises(ConfigError, match="num_workers"):
        WorkerSet(creator, ObservedValue, num_workers=-1)


def test_workers_sample_and_receive_weights_without_an_algorithm(ray_session):
    """Sample on actors, learn in this process, send the weights as one object."""
    env = CountEnv()
    policy = ObservedValue(env.observation_space, env.action_space, {})
    workers = WorkerSet(policy_class=ObservedValue, env_creator=lambda c: CountEnv(), num_workers=2)
    for rounds in (1, 2):
        batch = SampleBatch.concat_samples(
            ray_session.get([w.sample.remote() for w in workers.remote_workers()])
        )
        assert batch.count == 400
        # 200 steps are 66 episodes and two steps
        assert len(set(batch["eps_id"])) == 2 * (66 + rounds)
        policy.learn_on_batch(batch)
        weights = ray_session.put({"default_policy": policy.get_weights()})
        for w in workers.remote_workers():
            w.set_weights.remote(weights)
    assert workers.foreach_worker(lambda w: w.worker_index) == [0, 1, 2]
    versions = workers.foreach_worker(lambda w: w.policy.version)
    assert versions == [0, 2, 2]
    workers.sync_weights()
    assert workers.foreach_worker(lambda w: w.policy.version) == [0, 0, 0]
    workers.stop()


def test_weights_are_sent_once_per_version():
    workers = WorkerSet("CartPole-v1", ObservedValue, num_workers=2)
    assert workers.take_weights(0) is not None
    assert workers.take_weights(0) is None
    workers.local_worker().policy.version += 1
    assert workers.take_weights(0) is not None
    workers.num_workers = 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"obs": np.zeros(5, np.float32)}, "shape"),
        ({"obs": np.array(["a", "b"])}, "dtype"),
        ({"obs": 1.0}, "shape"),
        ({"reward": "3.5"}, "reward is one real number"),
        ({"reward": [1.0]}, "reward is one real number"),
        ({"terminated": "False"}, "are bools"),
        ({"terminated": float("nan")}, "are bools"),
        ({"terminated": None}, "are bools"),
        ({"truncated": None}, "are bools"),
    ],
)
@pytest.mark.parametrize("at", [1, 3])
def test_values_of_wrong_type_are_not_cast(wrong, message, at):
    with pytest.raises(ConfigError, match=message):
        worker(creator=lambda c: WrongEnv(at=at, **wrong)).sample()


def test_sub_environments_with_different_spaces_raise():
    def creator(context):
        env = CountEnv()
        if context.vector_index == 1:
            env.action_space = gym.spaces.Discrete(5)
        return env

    with pytest.raises(ConfigError, match="sub-environment 1 has the spaces"):
        worker(creator=creator, envs=2).sample()


def test_stop_closes_every_environment_despite_errors(caplog):
    closed = []

    class FailsToClose(CountEnv):
        def close(self):
            closed.append(1)
            raise OSError("cannot close")

    w = worker(creator=lambda c: FailsToClose(), envs=2)
    w.sample()
    w.stop()
    assert len(closed) == 2
    assert "cannot close" in caplog.text


def test_creator_that_returns_none_is_rejected_by_sync():
    settings = {"num_envs_per_worker": 2, "vectorization_mode": "sync"}
    with pytest.raises(ConfigError, match=r"requires gymnasium environments, .* a NoneType"):
        RolloutWorker(lambda context: None, A2CTorchPolicy, settings)


@pytest.mark.parametrize("mode", ["flowrl", "sync"])
def test_creator_that_returns_one_environment_twice_is_rejected(mode):
    one = gym.make("CartPole-v1")
    with pytest.raises(ConfigError, match="the same environment"):
        RolloutWorker(
            lambda context: gym.wrappers.TimeLimit(one, 10),
            A2CTorchPolicy,
            {"num_envs_per_worker": 2, "vectorization_mode": mode},
        ).sample()


class WrongVector(gym.vector.VectorEnv):
    """Returns wrong results of `step`."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    num_envs = 2
    single_observation_space = gym.spaces.Discrete(3)
    single_action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.MultiDiscrete([3, 3])
    action_space = gym.spaces.MultiDiscrete([2, 2])

    def __init__(self, **wrong):
        self.results = {
            "obs": np.zeros(2, np.int64),
            "rewards": np.ones(2),
            "terminateds": np.zeros(2, bool),
            "truncateds": np.zeros(2, bool),
            "infos": {},
            **wrong,
        }

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.int64), {}

    def step(self, actions):
        return tuple(self.results.values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rewards": 1.0}, r"returned 1.0 as rewards, expected an array of 2 numbers"),
        ({"rewards": np.ones(1)}, "as rewards"),
        ({"rewards": [None, 1.0]}, "as rewards"),
        ({"terminateds": np.ones(1, bool)}, "as terminateds, expected an array of 2 bools"),
        ({"truncateds": None}, "as truncateds"),
        ({"truncateds": np.full(2, 0.3)}, "as truncateds"),
        ({"obs": np.full(2, 0.7)}, "observations of type float64, expected int64"),
        ({"infos": [{}, {}]}, "remove the wrapper DictInfoToList"),
        ({"terminateds": np.ones(2, bool)}, r'returned no infos\["final_obs"\]'),
    ],
)
def test_wrong_results_of_a_vector_environment_are_rejected(wrong, message):
    w = RolloutWorker(
        lambda context: WrongVector(**wrong), A2CTorchPolicy, {"num_envs_per_worker": 2}
    )
    with pytest.raises(ConfigError, match=message):
        w.sample()


def test_vector_environment_may_return_lists():
    vector = WrongVector(rewards=[1, 2], terminateds=[False, False], truncateds=[0, 0])
    w = RolloutWorker(lambda context: vector, A2CTorchPolicy, {"num_envs_per_worker": 2})
    assert set(w.sample()["rewards"]) == {1.0, 2.0}
