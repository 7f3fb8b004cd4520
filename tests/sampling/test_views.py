"""Views of trajectories: equal for acting and training, correct at starts, cuts and ends."""

import gc
import weakref

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms import ppo
from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.policies import ConfigError, ViewRequirement
from flowrl.policies.acting_views import signature_of
from flowrl.policies.models import FullyConnectedNetwork
from flowrl.sampling import RolloutWorker

from .fakes import CountEnv, ObservedValue


class RecordsInputs(ObservedValue):
    """Records its inputs; its actions differ from step to step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.recorded_inputs = []

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        self.recorded_inputs.append({name: value.copy() for name, value in input_dict.items()})
        n = len(next(iter(input_dict.values())))
        actions = (len(self.recorded_inputs) + np.arange(n)) % 2
        return actions, [], {"vf_preds": np.arange(n, dtype=np.float32) + len(self.recorded_inputs)}

    def compute_values_from_input_dict(self, input_dict):
        return np.zeros(len(next(iter(input_dict.values()))), np.float32)


def worker(views, length=3, fragment=5, envs=2, **config):
    w = RolloutWorker(
        lambda context: CountEnv(length),
        RecordsInputs,
        {"num_envs_per_worker": envs, "rollout_fragment_length": fragment, **config},
    )
    w.policy.view_requirements.update(views)
    return w


def expected(run, row, column, shift):
    """Return a view's value, found by a search through all rows of one environment."""
    shape = run[0][column].shape
    zero = np.zeros(shape, run[0][column].dtype)
    episode = {r["t"]: r for r in run if r["eps_id"] == row["eps_id"]}
    t = row["t"] + shift
    if t < 0:
        return episode[0]["obs"] if column == "obs" else zero
    if shift <= 0:
        return episode[t][column]
    last = max(r["t"] for r in episode.values() if r["unroll_id"] == row["unroll_id"])
    if t <= last:
        return episode[t][column]
    if column == "obs" and t == last + 1:
        return episode[last]["new_obs"]
    return zero


SHIFTS = st.one_of(
    st.integers(-4, 3),
    st.lists(st.integers(-4, 3), min_size=1, max_size=3),
    st.tuples(st.integers(-5, 0), st.integers(0, 3)).map(lambda ab: f"{ab[0]}:{ab[1]}"),
)


@given(
    SHIFTS,
    st.sampled_from(["obs", "actions", "rewards", "terminateds", "vf_preds"]),
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(1, 2),
)
@settings(max_examples=60)
def test_views_equal_a_search_through_all_rows(shift, column, length, fragment, envs):
    w = worker({"view": ViewRequirement(column, shift=shift)}, length, fragment, envs)
    if column == "vf_preds":
        w.policy.view_requirements["view"].space = gym.spaces.Box(-1, 1, (), np.float32)
    batches = [w.sample() for _ in range(4)]
    joined = SampleBatch.concat_samples(batches)
    view = w.policy.view_requirements["view"]
    for env in range(envs):
        run = [row for row in joined.rows() if row["env_id"] == env]
        for row in run:
            values = [expected(run, row, column, s) for s in view.shifts]
            value = np.stack(values) if view.is_window else values[0]
            assert np.array_equal(row["view"], value), (row, value)
    assert joined["view"].dtype == joined[column].dtype


@given(st.integers(-4, 0), st.integers(1, 6), st.integers(1, 7), st.integers(1, 3))
@settings(max_examples=40)
def test_views_are_equal_for_acting_and_training(first, length, fragment, envs):
    views = {
        "obs": ViewRequirement("obs", shift=f"{first}:0"),
        "prev_actions": ViewRequirement("actions", shift=-1),
        "prev_rewards": ViewRequirement("rewards", shift=[-2, -1]),
    }
    w = worker(views, length, fragment, envs)
    for number in range(3):
        batch = w.sample()
        steps = w.policy.recorded_inputs[number * fragment : (number + 1) * fragment]
        for name in views:
            inputs = np.stack([step[name] for step in steps], 1)  # [N, T, ...]
            assert np.array_equal(inputs.reshape(-1, *inputs.shape[2:]), batch[name]), name
        assert batch["new_obs"].shape == batch["obs"].shape
        assert np.array_equal(batch["new_obs"][:, -1], batch["obs"][:, -1] + [0, 1])


def test_signature_of_a_view_keeps_its_space_alive():
    view = ViewRequirement("obs", gym.spaces.Box(0, 1, (2,)))
    signature, space = signature_of({"x": view}), weakref.ref(view.space)
    view.space = gym.spaces.Box(0, 1, (3,))
    gc.collect()
    assert space() is not None  # so no other space can have its id
    assert signature_of({"x": view}) != signature


def test_view_added_after_construction():
    action_space = Discrete(2)
    rollout_worker = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v1"),
        policy_config=ppo.DEFAULT_CONFIG,
        policy_spec=ppo.PPOTorchPolicy,
    )
    policy = rollout_worker.policy_map["default_policy"]
    policy.view_requirements["next_actions"] = ViewRequirement(
        SampleBatch.ACTIONS, shift=1, space=action_space
    )
    batch = rollout_worker.sample()
    assert "next_actions" in batch.data
    next_actions = np.append(batch["actions"][1:], 0)
    ends = np.append(batch["eps_id"][1:] != batch["eps_id"][:-1], True)
    assert np.array_equal(batch["next_actions"], np.where(ends, 0, next_actions))
    policy.learn_on_batch(batch)


def test_model_declares_its_views():
    class Model(FullyConnectedNetwork):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.view_requirements["prev_actions"] = ViewRequirement(
                "actions", shift=-1, space=Discrete(2)
            )

    class ModelPolicy(ppo.PPOTorchPolicy):
        def make_model(self):
            rng = np.random.default_rng(0)
            arguments = self.observation_space, self.action_space, 2, self.config.model
            return Model(*arguments, rng=rng)

        def compute_actions_from_input_dict(self, input_dict, explore=True):
            assert set(input_dict) == {"obs", "prev_actions"}
            return super().compute_actions_from_input_dict(input_dict, explore)

    w = RolloutWorker("CartPole-v1", ModelPolicy, {"rollout_fragment_length": 30, "seed": 1})
    batch = w.sample()
    before = np.append(0, batch["actions"][:-1])
    assert np.array_equal(batch["prev_actions"], np.where(batch["t"] == 0, 0, before))
    views = w.policy.model.view_requirements
    assert views is w.policy.view_requirements
    assert repr(views["prev_actions"]) == (
        "ViewRequirement(data_col='actions', shift=-1, space=Discrete(2))"
    )


def test_views_can_be_added_changed_and_removed():
    w = worker({}, length=10, fragment=4, envs=1)
    plain = w.sample()
    assert "view" not in plain
    w.policy.view_requirements["view"] = ViewRequirement("rewards", shift="-2:-1")
    # rows before the view was added are zeros
    assert w.sample()["view"].tolist() == [[0, 0], [0, 5], [5, 6], [6, 7]]
    w.policy.view_requirements["view"] = ViewRequirement("rewards", shift=1)
    assert w.sample()["view"].tolist() == [10, 0, 2, 0]
    del w.policy.view_requirements["view"]
    assert "view" not in w.sample()


def test_views_not_for_acting_are_no_input():
    views = {
        "known": ViewRequirement("rewards", shift=-1),
        "excluded": ViewRequirement("rewards", shift=-1, used_for_compute_actions=False),
        "unknown": ViewRequirement("actions", shift=1),
    }
    w = worker(views)
    assert set(views) <= set(w.sample())
    assert set(w.policy.recorded_inputs[0]) == {"obs", "known"}


def test_views_not_for_training_are_no_column():
    views = {
        "new_obs": ViewRequirement("obs", shift=1, used_for_training=False),
        "rewards": ViewRequirement(used_for_training=False),  # always in batches
    }
    batch = worker(views).sample()
    assert "new_obs" not in batch
    assert "rewards" in batch


def test_windows_stay_in_their_episode_and_copy_memory():
    views = {"window": ViewRequirement("obs", shift="-6:6")}
    w = worker(views, length=4, fragment=11, envs=3)
    for _ in range(3):
        batch = w.sample()
        for row in batch.rows():
            episodes = set(row["window"][row["window"].any(1)][:, 0].tolist())
            assert episodes <= {row["obs"][0], 0.0}
        window = batch["window"]
        window[:] = -1
        assert not (batch["window"] == -1).all()
        assert not (batch["obs"] == -1).any()


def test_frames_are_stored_once():
    class Frames(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
        action_space = Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros((84, 84), np.uint8), {}

        def step(self, action):
            return np.full((84, 84), 1, np.uint8), 0.0, False, False, {}

    w = RolloutWorker(lambda context: Frames(), RecordsInputs, {"rollout_fragment_length": 50})
    w.policy.view_requirements["obs"] = ViewRequirement("obs", shift="-3:0")
    batch = w.sample()
    assert batch["obs"].shape == batch["new_obs"].shape == (50, 4, 84, 84)
    stored = dict(batch.stored())
    assert isinstance(stored["obs"], IndexedColumn)
    assert stored["obs"].base is stored["new_obs"].base
    # 50 frames, the final one, and the lookback of 3
    assert len(stored["obs"].base) == 50 + 1 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shift": "5"}, "range"),
        ({"shift": "3:1"}, "range"),
        ({"shift": "0:4:0"}, "range"),
        ({"shift": []}, "list of ints"),
        ({"shift": [0.5]}, "list of ints"),
        ({"shift": True}, "shift"),
        ({"shift": 1.5}, "shift"),
        ({"data_col": 3}, "column's name"),
    ],
)
def test_malformed_views_raise(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ViewRequirement(**arguments)


def test_impossible_views_raise_with_their_name():
    with pytest.raises(ConfigError, match=r"'next'.*not known when"):
        worker(
            {"next": ViewRequirement("actions", shift=1, used_for_compute_actions=True)}
        ).sample()
    with pytest.raises(ConfigError, match="'nothing'"):
        worker({"view": ViewRequirement("nothing", shift=1)}).sample()


def test_view_shows_its_arguments():
    view = ViewRequirement("actions", Discrete(2), shift="-5:-1:2", used_for_training=False)
    assert view.shifts == (-5, -3, -1)
    assert repr(view) == (
        "ViewRequirement(data_col='actions', shift='-5:-1:2', space=Discrete(2), "
        "used_for_training=False)"
    )
