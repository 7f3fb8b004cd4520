"""Policy.predict: actions for single observations and batches, with recurrent states."""

import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
from flowrl.errors import ConfigError
from flowrl.policies import ViewRequirement

BOX = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2, start=5)


def make_policy(obs_space=BOX, action_space=TWO, **settings):
    return A2CTorchPolicy(obs_space, action_space, A2CConfig(seed=1, **settings))


def test_single_observation_gives_the_action_of_compute_single_action():
    policy = make_policy()
    for obs in np.random.default_rng(0).uniform(-1, 1, (10, 3)).astype(np.float32):
        action, state = policy.predict(obs)
        assert action == policy.compute_single_action(obs)
        assert action in (5, 6)
        assert state is None


def test_batch_gives_the_actions_of_its_rows():
    obs_space = spaces.Dict({"a": BOX, "b": spaces.Tuple([spaces.Discrete(4), BOX])})
    policy = make_policy(obs_space, spaces.Box(-3, 7, (2,), np.float32))
    rows = [obs_space.sample() for _ in range(5)]
    batch = {
        "a": np.stack([row["a"] for row in rows]),
        "b": tuple(np.stack([row["b"][i] for row in rows]) for i in range(2)),
    }
    actions, _ = policy.predict(batch)
    assert actions.shape == (5, 2)
    for row, action in zip(rows, actions, strict=True):
        np.testing.assert_allclose(policy.predict(row)[0], action, rtol=1e-5)


def test_sampled_actions_differ():
    policy = make_policy(action_space=spaces.Box(-1, 1, (1,), np.float32))
    obs = np.zeros((50, 3), np.float32)
    assert len(np.unique(policy.predict(obs)[0])) == 1
    assert len(np.unique(policy.predict(obs, deterministic=False)[0])) > 20


def test_recurrent_state_is_carried():
    policy = make_policy(model={"use_lstm": True, "lstm_cell_size": 4})
    sequence = np.random.default_rng(0).uniform(-1, 1, (6, 3)).astype(np.float32)
    session, state, batch_state = policy.session(), None, None
    for obs in sequence:
        action, state = policy.predict(obs, state)
        actions, batch_state = policy.predict(np.stack([obs, obs]), batch_state)
        assert action == session.compute_single_action(obs)
        assert actions.tolist() == [action, action]
    for part, batch_part in zip(state, batch_state, strict=True):
        np.testing.assert_allclose(part, batch_part[0], rtol=1e-5)
    with pytest.raises(ConfigError, match="state must have 4 parts, got 1"):
        policy.predict(sequence[0], state[:1])
    with pytest.raises(ConfigError, match="the list that the last call returned, got 5"):
        policy.predict(sequence[0], 5)
    with pytest.raises(ConfigError, match=r"state_in_0 has shape \(2, 4\)"):
        policy.predict(np.zeros((3, 3), np.float32), batch_state)


NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (2, 2), np.uint8),
        "arm": spaces.Tuple([BOX, spaces.Discrete(4), spaces.MultiBinary(2)]),
        "speed": spaces.Box(-9, 9, (), np.float64),
    }
)
OBS = {"camera": [[0, 1], [2, 255]], "arm": ([0.5, 0, -1], 3, [True, False]), "speed": 1.5}
ARRAYS = {
    "camera": np.array(OBS["camera"], np.uint8),
    "arm": (np.array([0.5, 0, -1], np.float32), np.int64(3), np.array([1, 0], np.int8)),
    "speed": np.array(1.5),
}


def test_nested_observations_may_be_lists_numbers_and_arrays_of_other_dtypes():
    policy = make_policy(NESTED, spaces.Box(-1, 1, (2,), np.float32))
    expected, _ = policy.predict(ARRAYS)
    wide = {**OBS, "camera": np.array(OBS["camera"]), "arm": list(OBS["arm"])}
    wide["arm"][0] = np.array([0.5, 0, -1], np.float64)
    for obs in (OBS, wide):
        np.testing.assert_array_equal(policy.predict(obs)[0], expected)
        np.testing.assert_array_equal(policy.compute_single_action(obs), expected)
    batch = {
        "camera": [OBS["camera"]] * 3,
        "arm": ([[0.5, 0, -1]] * 3, [3] * 3, [[1, 0]] * 3),
        "speed": np.full(3, 1.5, np.float32),
    }
    for observations in (batch, [OBS, ARRAYS, wide]):
        actions, _ = policy.predict(observations)
        np.testing.assert_allclose(actions, [expected] * 3, rtol=1e-5)


def test_flat_observations_may_be_lists():
    policy = make_policy()
    action = policy.predict(np.zeros(3, np.float32))[0]
    assert policy.predict([0.0, 0.0, 0.0])[0] == policy.predict([0, 0, 0])[0] == action
    for wrong in (None, "yes", np.array([False])):
        with pytest.raises(ConfigError, match="predict: deterministic must be a bool, got "):
            policy.predict([0.0, 0.0, 0.0], deterministic=wrong)
    assert policy.predict([[0.0, 0.0, 0.0]] * 2)[0].tolist() == [action, action]
    assert policy.predict(np.zeros((2, 3)))[0].tolist() == [action, action]
    assert make_policy(spaces.Discrete(4)).predict([1, 2, 3])[0].shape == (3,)


def changed(observation, removed="", **changes):
    return {k: v for k, v in observation.items() if k != removed} | changes


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (BOX, np.zeros(4, np.float32), "observation: expected an array of shape (3,) and dtype "
         "float32, got shape (4,) and dtype float32"),
        (BOX, np.zeros((2, 4)), "of shape (B, 3) and dtype float32, got shape (2, 4)"),
        (BOX, np.zeros((2, 2, 3)), "of shape (3,) or (B, 3) and dtype float32, got"),
        (BOX, [0.0, [1.0], 2.0], "of shape (3,) or (B, 3)"),
        (BOX, ["a", "b", "c"], "dtype float32, got a list of length 3"),
        (BOX, None, "dtype float32, got None"),
        (BOX, [0, np.nan, 0], "observation is not finite: nan at [1]"),
        (BOX, [1e300, 0, 0], "a number that float32 cannot represent: 1e+300 at [0]"),
        (spaces.Discrete(4), 4, "observation: expected values of Discrete(4), got 4"),
        (spaces.Discrete(4), 1.0, "dtype int64, got 1.0"),
        (NESTED, np.zeros(3), "observation: expected a dict with ['arm', 'camera', 'speed'], got"),
        (NESTED, [], "observation: expected a dict with ['arm', 'camera', 'speed'], got a list"),
        (NESTED, changed(OBS, "arm"), "expected a dict with ['arm', 'camera', 'speed'], got ["),
        (NESTED, changed(OBS, speed="fast"), "observation['speed']: expected an array of"),
        (NESTED, changed(OBS, arm=OBS["arm"][:2]), "observation['arm']: expected a tuple of 3"),
        (NESTED, changed(OBS, arm=([0, 0, 0], 7, [0, 1])), "observation['arm'][1]: expected va"),
        (NESTED, changed(OBS, arm=([0, 0, 0], 3, [0, 2])), "observation['arm'][2]: expected va"),
        (NESTED, changed(OBS, camera=[[0, 0], [0, 256]]), "observation['camera']: expected va"),
        (NESTED, changed(OBS, camera=np.zeros((2, 2))), "dtype uint8, got shape (2, 2) and dt"),
        (NESTED, [OBS, changed(OBS, camera=[0])], "observation['camera']: expected an array"),
        (
            NESTED,
            {"camera": np.zeros((3, 2, 2), np.uint8), "arm": (np.zeros((3, 3)), [0] * 2,
             np.zeros((3, 2))), "speed": np.zeros(3)},
            "observation: its parts must have the same number of rows, but ",
        ),
    ],
)  # fmt: skip
def test_invalid_observations_are_rejected(space, obs, message):
    with pytest.raises(ConfigError) as error:
        make_policy(space).predict(obs)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({"num_framestacks": 4}, "several steps of obs (model.num_framestacks)"),
        ({"use_attention": True}, "several steps of state_in_0 and state_in_1 (model.use_attenti"),
        ({"use_lstm": True, "lstm_use_prev_action": True}, "acts on obs, prev_actions, state_in_0"),
    ],
)
def test_policy_with_other_views_is_rejected(model, what):
    policy = make_policy(model=model)
    for act in (policy.predict, policy.compute_single_action):
        with pytest.raises(ConfigError) as error:
            act(np.zeros(3, np.float32))
        assert what in str(error.value)
        assert "use policy.session(), which remembers" in str(error.value)


def test_policy_with_a_shifted_observation_is_rejected():
    policy = make_policy()
    policy.view_requirements["obs"] = ViewRequirement(shift=-1)
    for act in (policy.predict, policy.compute_single_action):
        with pytest.raises(ConfigError, match=r"use policy\.session\(\)"):
            act(np.zeros(3, np.float32))


def test_algorithm_predicts_with_its_policy():
    with A2C("CartPole-v1", seed=1) as algorithm:
        obs = np.zeros((2, 4), np.float32)
        actions, _ = algorithm.predict(obs)
        np.testing.assert_array_equal(actions, algorithm.get_policy().predict(obs)[0])
