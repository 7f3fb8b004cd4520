"""Advantages and returns against plain loops and hand-computed numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.policies.returns import discounted_returns, generalized_advantages


def slow_gae(rewards, values, following, dones, gamma, lambda_):
    """The definition, one environment and one step at a time, in float64."""
    steps, envs = rewards.shape
    advantages = np.zeros((steps, envs))
    for i in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                delta = rewards[k, i] + gamma * following[k, i] - values[k, i]
                advantages[t, i] += weight * delta
                if dones[k, i]:
                    break
                weight *= gamma * lambda_
    return advantages


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.sampled_from([(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.5, 0.3)]),
)
def test_gae_is_its_definition(steps, envs, seed, discounts):
    rng = np.random.default_rng(seed)
    rewards, values, following = rng.standard_normal((3, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    following[terminated] = 0.0
    dones = terminated | truncated
    fast = generalized_advantages(rewards, values, following, dones, *discounts)
    np.testing.assert_allclose(fast, slow_gae(rewards, values, following, dones, *discounts))


@pytest.mark.parametrize(
    ("dones", "following", "expected"),
    [
        # terminated at the end: nothing after; gamma = lambda = 0.5, V = 1, r = 2
        ([False, True], [1.0, 0.0], [1.5 + 0.25 * 1.0, 1.0]),
        # truncated at the end: bootstraps from the final observation's value 4
        ([False, True], [1.0, 4.0], [1.5 + 0.25 * 3.0, 3.0]),
        # an end in the middle cuts the estimate
        ([True, False], [0.0, 4.0], [1.0, 3.0]),
    ],
)
def test_gae_by_hand(dones, following, expected):
    got = generalized_advantages(
        np.full((2, 1), 2.0),
        np.ones((2, 1)),
        np.array(following)[:, None],
        np.array(dones)[:, None],
        0.5,
        0.5,
    )
    assert got[:, 0].tolist() == expected


def test_returns_by_hand():
    got = discounted_returns(
        np.array([[1.0], [2.0], [3.0]]), np.array([[False], [True], [False]]), np.array([10.0]), 0.5
    )
    assert got[:, 0].tolist() == [2.0, 2.0, 8.0]
