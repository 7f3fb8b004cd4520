"""Returns and advantages against loops over their definitions and hand-computed numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.policies.returns import (
    discounted_returns,
    generalized_advantages,
    vtrace,
)


def reference_gae(rewards, values, next_values, dones, gamma, lambda_):
    """The definition, one environment and one step at a time, in float64."""
    steps, envs = rewards.shape
    advantages = np.zeros((steps, envs))
    for i in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                delta = rewards[k, i] + gamma * next_values[k, i] - values[k, i]
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
def test_gae_equals_its_definition(steps, envs, seed, discounts):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.standard_normal((3, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    next_values[terminated] = 0.0
    dones = terminated | truncated
    advantages = generalized_advantages(rewards, values, next_values, dones, *discounts)
    expected = reference_gae(rewards, values, next_values, dones, *discounts)
    np.testing.assert_allclose(advantages, expected)


@pytest.mark.parametrize(
    ("dones", "next_values", "expected"),
    [
        # terminated at the end, no bootstrap; gamma = lambda = 0.5, V = 1, r = 2
        ([False, True], [1.0, 0.0], [1.5 + 0.25 * 1.0, 1.0]),
        # truncated at the end, bootstrapped with the final observation's value 4
        ([False, True], [1.0, 4.0], [1.5 + 0.25 * 3.0, 3.0]),
        # the end of an episode in the middle cuts the estimate
        ([True, False], [0.0, 4.0], [1.0, 3.0]),
    ],
)
def test_gae_of_hand_computed_examples(dones, next_values, expected):
    result = generalized_advantages(
        np.full((2, 1), 2.0),
        np.ones((2, 1)),
        np.array(next_values)[:, None],
        np.array(dones)[:, None],
        0.5,
        0.5,
    )
    assert result[:, 0].tolist() == expected


def test_discounted_returns_of_a_hand_computed_example():
    result = discounted_returns(
        np.array([[1.0], [2.0], [3.0]]), np.array([[False], [True], [False]]), np.array([10.0]), 0.5
    )
    assert result[:, 0].tolist() == [2.0, 2.0, 8.0]


def reference_vtrace(mu, pi, rewards, values, next_values, dones, gamma, rho_bar, c_bar, lambda_):
    """Equation 1 of the paper as a sum, one step at a time."""
    steps, envs = rewards.shape
    targets = np.zeros((steps, envs))
    ratio = np.exp(pi - mu)
    for i in range(envs):
        for s in range(steps):
            total, weight = values[s, i], 1.0
            for t in range(s, steps):
                delta = rewards[t, i] + gamma * next_values[t, i] - values[t, i]
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
def test_vtrace_equals_its_definition(steps, envs, seed, settings):
    gamma, rho_bar, c_bar, lambda_ = settings
    rng = np.random.default_rng(seed)
    rewards, values, next_values, mu, pi = rng.standard_normal((5, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    next_values[terminated] = 0.0
    dones = terminated | truncated
    next_values[:-1] = np.where(dones[:-1], next_values[:-1], values[1:])
    result, advantages = vtrace(
        mu, pi, rewards, values, next_values, dones, gamma, rho_bar, c_bar, 1.3, lambda_
    )
    expected = reference_vtrace(
        mu, pi, rewards, values, next_values, dones, gamma, rho_bar, c_bar, lambda_
    )
    np.testing.assert_allclose(result, expected, atol=1e-9)
    for t in range(steps):
        for i in range(envs):
            next_target = next_values[t, i]
            if not dones[t, i] and t + 1 < steps:
                next_target = expected[t + 1, i]
            ratio = min(1.3, np.exp(pi[t, i] - mu[t, i]))
            advantage = ratio * (rewards[t, i] + gamma * next_target - values[t, i])
            np.testing.assert_allclose(advantages[t, i], advantage, atol=1e-9)


def test_on_policy_vtrace_is_the_n_step_return():
    """Remark 1 of the paper: with pi = mu and no clipping below 1."""
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, 6, 1))
    next_values = np.concatenate([values[1:], [[0.7]]])
    logp = rng.standard_normal((6, 1))
    result, _ = vtrace(logp, logp, rewards, values, next_values, np.zeros((6, 1), bool), 0.9)
    expected = discounted_returns(rewards, np.zeros((6, 1), bool), np.array([0.7]), 0.9)
    np.testing.assert_allclose(result, expected)


# -- inputs ----------------------------------------------------------------------------------------


def test_integer_rewards_have_float_returns():
    ones, zeros = np.ones((4, 1), np.int64), np.zeros((4, 1), np.int64)
    dones = np.zeros((4, 1), bool)
    expected = [[3.439], [2.71], [1.9], [1.0]]
    np.testing.assert_allclose(discounted_returns(ones, dones, np.zeros(1), 0.9), expected)
    advantages = generalized_advantages(ones, zeros, zeros, dones, 0.9, 1)
    np.testing.assert_allclose(advantages, expected)
    targets, _ = vtrace(zeros, zeros, ones, zeros, zeros, dones, 0.9)
    np.testing.assert_allclose(targets, expected)


def test_arrays_of_different_shapes_are_rejected():
    a, b = np.ones((4, 2)), np.ones((4, 1))
    for call in (
        lambda: discounted_returns(a, b, np.zeros(2), 0.9),
        lambda: generalized_advantages(a, a, b, a, 0.9, 1),
        lambda: vtrace(a, a, a, b, a, a, 0.9),
    ):
        with pytest.raises(ValueError, match=r"has the shape \(4, 1\)"):
            call()
