"""Recorded rows: dtypes of observations, values outside of spaces, shapes of columns."""

import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.errors import OfflineDataError
from flowrl.offline.recorded_rows import has_unscaled_actions, rows_for_policy

BOX = spaces.Box(-1, 1, (2,), np.float32)
PIXELS = spaces.Box(0, 255, (2, 2), np.uint8)


def rows(obs, actions=(0, 1), **columns):
    return SampleBatch(obs=obs, new_obs=obs, actions=np.array(actions), **columns)


def policy(observation_space, action_space=None):
    return PPOTorchPolicy(observation_space, action_space or spaces.Discrete(2), {"seed": 0})


def test_observations_get_the_dtype_of_the_space():
    pixels = np.arange(8).reshape(2, 2, 2)
    converted = rows_for_policy(rows(pixels), policy(PIXELS))
    for name in ("obs", "new_obs"):
        assert converted[name].dtype == np.uint8
        np.testing.assert_array_equal(converted[name], pixels)
    nested = policy(spaces.Dict(a=BOX, n=spaces.Discrete(3)))
    obs = {"a": np.ones((2, 2)), "n": np.array([0, 2], np.int8)}
    converted = rows_for_policy(rows(obs), nested)["obs"]
    assert converted["a"].dtype == np.float32
    assert converted["n"].dtype == np.int64
    exact = rows(np.zeros((2, 2, 2), np.uint8))
    assert rows_for_policy(exact, policy(PIXELS))["obs"] is exact["obs"]  # not copied


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (PIXELS, np.full((2, 2, 2), 256), "obs: expected values of Box"),
        (PIXELS, np.zeros((2, 2, 2), np.float32), "obs: expected an array of .* dtype uint8"),
        (BOX, np.full((2, 2), np.nan), "obs is not finite"),
        (spaces.Discrete(3), np.array([0, 3]), r"obs: expected values of Discrete\(3\)"),
        (spaces.Discrete(3, start=1), np.array([0, 1]), "obs: expected values of Discrete"),
        (spaces.MultiDiscrete([2, 3]), np.array([[0, 0], [2, 0]]), "obs: expected values of Multi"),
        (spaces.MultiBinary(2), np.array([[0, 1], [0, 8]]), "obs: expected values of MultiBinary"),
        (BOX, np.zeros((2, 3), np.float32), r"obs: expected an array \[B, 2\]"),
    ],
)
def test_observations_outside_of_the_space_are_rejected(space, obs, message):
    with pytest.raises(OfflineDataError, match=f"do not fit the spaces of the policy: {message}"):
        rows_for_policy(rows(obs), policy(space))


@pytest.mark.parametrize(
    ("space", "actions"),
    [(spaces.Discrete(2), [0, 2]), (spaces.MultiBinary(2), [[0, 1], [4, 0]])],
)
def test_actions_outside_of_the_space_are_rejected(space, actions):
    with pytest.raises(OfflineDataError, match="actions: expected integers from 0 to below 2"):
        rows_for_policy(rows(np.zeros((2, 2), np.float32), actions), policy(BOX, space))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("rewards", np.zeros((2, 1), np.float32)),
        ("action_logp", np.zeros((2, 1), np.float32)),
        ("eps_id", np.array(["a", "b"])),
        ("terminateds", np.array(["False", "True"])),
    ],
)
def test_columns_need_one_number_per_row(name, column):
    batch = rows(np.zeros((2, 2), np.float32), **{name: column})
    with pytest.raises(OfflineDataError, match=rf"column '{name}' must have the shape \(2,\)"):
        rows_for_policy(batch, policy(BOX))


@pytest.mark.parametrize(
    ("high", "scale", "is_gaussian", "expected"),
    [
        (2, 2, False, True),
        (200, 200, False, True),
        (2, 1, False, False),
        (2, 1, True, False),
        (4, 1, True, False),
        (200, 1, True, False),
        (1, 1, False, False),
    ],
)
def test_actions_in_the_bounds_of_the_environment_are_recognized(
    high, scale, is_gaussian, expected
):
    rng = np.random.default_rng(0)
    draw = rng.standard_normal if is_gaussian else (lambda shape: rng.uniform(-1, 1, shape))
    recorded = rows(np.zeros((5000, 2), np.float32), scale * draw((5000, 3)))
    space = spaces.Box(-high, high, (3,), np.float32)
    assert has_unscaled_actions(recorded, policy(BOX, space)) == expected
    as_they_are = PPOTorchPolicy(BOX, space, {"seed": 0, "normalize_actions": False})
    assert not has_unscaled_actions(recorded, as_they_are)
    without_actions = recorded.without_columns("actions")
    assert not has_unscaled_actions(without_actions, policy(BOX, space))


def test_actions_without_bounds_are_not_scaled():
    recorded = rows(np.zeros((200, 2), np.float32), [[5.0], [-7.0]] * 100)
    unbounded = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    assert not has_unscaled_actions(recorded, policy(BOX, unbounded))
    assert has_unscaled_actions(recorded, policy(BOX, spaces.Box(-7, 7, (1,), np.float32)))
    assert not has_unscaled_actions(rows(np.zeros((2, 2), np.float32)), policy(BOX))
