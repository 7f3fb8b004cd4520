"""Policy.predict: actions for single observations and batches, with recurrent states."""

import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
from flowrl.settings import ConfigError

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
    with pytest.raises(ConfigError, match=r"state_in_0 has shape \(2, 4\)"):
        policy.predict(np.zeros((3, 3), np.float32), batch_state)


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (np.zeros(4, np.float32), "has shape"),
        (np.zeros((2, 4), np.float32), "has shape"),
        (np.full(3, np.nan, np.float32), "not finite"),
    ],
)
def test_invalid_observations_are_rejected(obs, message):
    with pytest.raises(ConfigError, match=message):
        make_policy().predict(obs)
    with pytest.raises(ConfigError, match="is not in Dict"):
        make_policy(spaces.Dict({"a": BOX})).predict(obs)


def test_policy_with_other_views_is_rejected():
    with pytest.raises(ConfigError, match=r"use policy.session\(\)"):
        make_policy(model={"num_framestacks": 4}).predict(np.zeros(3, np.float32))


def test_algorithm_predicts_with_its_policy():
    with A2C("CartPole-v1", seed=1) as algorithm:
        obs = np.zeros((2, 4), np.float32)
        actions, _ = algorithm.predict(obs)
        np.testing.assert_array_equal(actions, algorithm.get_policy().predict(obs)[0])
