"""Advantages and returns against plain loops and hand-computed numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.policies.returns import (
    discounted_returns,
    generalized_advantages,
    lambda_returns,
    n_step_returns,
    vtrace,
)


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


# -- n-step, lambda-returns, V-trace ---------------------------------------------------------------


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_n_step_is_its_definition(steps, envs, seed, n, gamma):
    rng = np.random.default_rng(seed)
    rewards = rng.standard_normal((steps, envs))
    dones = rng.random((steps, envs)) < 0.25
    sums, counts = n_step_returns(rewards, dones, n, gamma)
    for i in range(envs):
        for t in range(steps):
            total, k = 0.0, 0
            while k < n and t + k < steps:
                total += gamma**k * rewards[t + k, i]
                k += 1
                if dones[t + k - 1, i]:
                    break
            assert counts[t, i] == k
            np.testing.assert_allclose(sums[t, i], total, atol=1e-12)


def test_n_step_by_hand():
    rewards = np.array([1, 2, 3], np.int64)[:, None]
    before = rewards.copy()
    sums, counts = n_step_returns(rewards, np.zeros((3, 1), bool), 2, 0.5)
    assert sums[:, 0].tolist() == [2.0, 3.5, 3.0]
    assert counts[:, 0].tolist() == [2, 2, 1]
    np.testing.assert_array_equal(rewards, before)
    with pytest.raises(ValueError, match="an int >= 1"):
        n_step_returns(rewards, np.zeros((3, 1), bool), 0, 0.5)


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.sampled_from([(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.5, 0.3)]),
)
def test_lambda_returns_are_advantages_plus_values(steps, envs, seed, discounts):
    rng = np.random.default_rng(seed)
    rewards, values, following = rng.standard_normal((3, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    following[terminated] = 0.0
    dones = terminated | truncated
    # values of states within an episode are one and the same thing
    inside = ~dones[:-1]
    following[:-1][inside] = values[1:][inside]
    got = lambda_returns(rewards, following, dones, *discounts)
    np.testing.assert_allclose(
        got, values + slow_gae(rewards, values, following, dones, *discounts), atol=1e-9
    )


def slow_vtrace(mu, pi, rewards, values, following, dones, gamma, rho_bar, c_bar, lambda_):
    """Equation 1 of the paper as the sum that it is, one step at a time."""
    steps, envs = rewards.shape
    targets = np.zeros((steps, envs))
    ratio = np.exp(pi - mu)
    for i in range(envs):
        for s in range(steps):
            total, weight = values[s, i], 1.0
            for t in range(s, steps):
                delta = rewards[t, i] + gamma * following[t, i] - values[t, i]
                total += weight * min(rho_bar, ratio[t, i]) * delta
                if dones[t, i]:
                    break
                weight *= gamma * lambda_ * min(c_bar, ratio[t, i])
            targets[s, i] = total
    return targets


@given(
    st.integers(1, 10),
    st.integers(1, 3),
    st.integers(0, 2**31),
    st.sampled_from([(0.99, 1.0, 1.0, 1.0), (0.9, 2.0, 0.5, 0.7), (1.0, 0.5, 1.5, 1.0)]),
)
def test_vtrace_is_its_definition(steps, envs, seed, settings):
    gamma, rho_bar, c_bar, lambda_ = settings
    rng = np.random.default_rng(seed)
    rewards, values, following, mu, pi = rng.standard_normal((5, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    following[terminated] = 0.0
    dones = terminated | truncated
    following[:-1] = np.where(dones[:-1], following[:-1], values[1:])
    got, advantages = vtrace(
        mu, pi, rewards, values, following, dones, gamma, rho_bar, c_bar, 1.3, lambda_
    )
    expected = slow_vtrace(
        mu, pi, rewards, values, following, dones, gamma, rho_bar, c_bar, lambda_
    )
    np.testing.assert_allclose(got, expected, atol=1e-9)
    for t in range(steps):
        for i in range(envs):
            after = following[t, i]
            if not dones[t, i] and t + 1 < steps:
                after = expected[t + 1, i]
            ratio = min(1.3, np.exp(pi[t, i] - mu[t, i]))
            own = ratio * (rewards[t, i] + gamma * after - values[t, i])
            np.testing.assert_allclose(advantages[t, i], own, atol=1e-9)


def test_vtrace_on_policy_is_the_n_step_return():
    """Remark 1 of the paper: with pi = mu and no clipping below 1."""
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, 6, 1))
    following = np.concatenate([values[1:], [[0.7]]])
    logp = rng.standard_normal((6, 1))
    got, _ = vtrace(logp, logp, rewards, values, following, np.zeros((6, 1), bool), 0.9)
    expected = discounted_returns(rewards, np.zeros((6, 1), bool), np.array([0.7]), 0.9)
    np.testing.assert_allclose(got, expected)
