"""CategoricalQ: projections, expected values and gradients of categorical distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.policies.categorical_q import CategoricalQ
from flowrl.policies.learning.kernels.q_learning import output_gradients, project


def reference_projection(support, probs, reward, discount):
    """Algorithm 1 of Bellemare et al. 2017, one atom at a time."""
    step = (support[-1] - support[0]) / (len(support) - 1)
    projected = np.zeros(len(support))
    for z, prob in zip(support, probs, strict=True):
        b = (min(max(reward + discount * z, support[0]), support[-1]) - support[0]) / step
        lower, upper = int(np.floor(b + 1e-9)), int(np.ceil(b - 1e-9))
        if lower == upper:
            projected[lower] += prob
        else:
            projected[lower] += prob * (upper - b)
            projected[upper] += prob * (b - lower)
    return projected


@given(st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_projection_equals_the_paper(num_atoms, seed):
    rng = np.random.default_rng(seed)
    low = rng.uniform(-20, 0)
    q_function = CategoricalQ(2, num_atoms, low, low + rng.uniform(1, 40), False)
    probs = rng.dirichlet(np.ones(num_atoms), 7).astype(np.float32)
    rewards = rng.normal(0, 10, 7).astype(np.float32)
    discounts = rng.choice([0.0, 0.5, 0.99, 1.0], 7)
    expected = [
        reference_projection(q_function.support.astype(np.float64), *row)
        for row in zip(probs, rewards.astype(np.float64), discounts, strict=True)
    ]
    by_torch = q_function.project(*map(torch.from_numpy, (probs, rewards, discounts))).numpy()
    for projected in (by_torch, project(q_function, probs, rewards, discounts)):
        assert projected.dtype == np.float32
        np.testing.assert_allclose(projected.sum(1), 1, atol=1e-5)
        np.testing.assert_allclose(projected, expected, atol=2e-4)


def test_targets_and_scores_are_exact_under_autocast():
    q_function = CategoricalQ(3, 51, -10, 10, True)
    outputs = torch.randn(16, q_function.num_outputs)
    rest = torch.zeros(16, dtype=torch.int64), torch.randn(16), torch.full((16,), 0.99)
    expected = q_function.td_targets(outputs, None, *rest)
    scores = q_function.greedy_scores_of_tensors(outputs)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(q_function.td_targets(outputs, None, *rest), expected)
        torch.testing.assert_close(q_function.greedy_scores_of_tensors(outputs), scores)


def test_projection_without_reward_and_discount_is_the_identity():
    q_function = CategoricalQ(2, 51, -10, 10, False)
    probs = np.random.default_rng(0).dirichlet(np.ones(51), 3).astype(np.float32)
    projected = q_function.project(torch.from_numpy(probs), torch.zeros(3), torch.ones(3))
    np.testing.assert_allclose(projected, probs, atol=1e-5)


@pytest.mark.parametrize("dueling", [True, False])
def test_greedy_scores_are_expected_values_and_masked_actions_score_lowest(dueling):
    q_function = CategoricalQ(3, 5, 0, 4, dueling)
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((4, q_function.num_outputs)).astype(np.float32)
    outputs[2, 5:10] = -1e9  # action 1 of row 2
    values = q_function.greedy_scores(outputs)
    for row in range(4):
        allowed = [a for a in range(3) if (row, a) != (2, 1)]
        logits_of = {a: outputs[row, 5 * a : 5 * a + 5].astype(np.float64) for a in allowed}
        if dueling:
            mean = sum(logits_of.values()) / len(logits_of)
            logits_of = {a: logits + outputs[row, 15:] - mean for a, logits in logits_of.items()}
        for a, logits in logits_of.items():
            probs = np.exp(logits) / np.exp(logits).sum()
            assert values[row, a] == pytest.approx(probs @ np.arange(5), rel=1e-5)
    assert values[2, 1] < -1e8
    tensors = q_function.logits(torch.from_numpy(outputs)).numpy()
    np.testing.assert_allclose(tensors, q_function.logits(outputs), atol=1e-5)


@pytest.mark.parametrize("dueling", [True, False])
def test_kernel_output_gradients_equal_autograd(dueling):
    q_function = CategoricalQ(3, 5, 0, 4, dueling)
    outputs = torch.randn(6, q_function.num_outputs, requires_grad=True)
    actions, gradients = torch.tensor([0, 1, 2, 0, 1, 2]), torch.randn(6, 5)
    index = actions[:, None, None].expand(-1, 1, 5)
    (q_function.logits(outputs).gather(1, index).squeeze(1) * gradients).sum().backward()
    output_grad, _ = output_gradients(q_function, gradients.numpy(), actions.numpy())
    np.testing.assert_allclose(output_grad, outputs.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_reward_that_is_not_a_number_makes_the_projection_not_a_number():
    q_function = CategoricalQ(2, 5, -1, 1, False)
    probs = np.full((2, 5), 0.2, np.float32)
    rewards, discounts = np.array([np.nan, 0.0], np.float32), np.full(2, 0.9)
    by_torch = q_function.project(*map(torch.from_numpy, (probs, rewards, discounts))).numpy()
    for projected in (by_torch, project(q_function, probs, rewards, discounts)):
        assert np.isnan(projected[0]).any()
        np.testing.assert_allclose(projected[1].sum(), 1, atol=1e-6)
