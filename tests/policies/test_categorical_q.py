"""Atoms: distributions of returns, moved and put back on their places."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.policies.categorical_q import CategoricalQ
from flowrl.policies.learning.kernels.q_learning import output_gradients


def plainly_projected(support, probs, reward, discount):
    """Algorithm 1 of Bellemare et al. 2017, an atom at a time."""
    step = (support[-1] - support[0]) / (len(support) - 1)
    made = np.zeros(len(support))
    for z, chance in zip(support, probs, strict=True):
        place = (min(max(reward + discount * z, support[0]), support[-1]) - support[0]) / step
        lower, upper = int(np.floor(place + 1e-9)), int(np.ceil(place - 1e-9))
        if lower == upper:
            made[lower] += chance
        else:
            made[lower] += chance * (upper - place)
            made[upper] += chance * (place - lower)
    return made


@given(st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_a_moved_distribution_is_the_papers(num_atoms, seed):
    rng = np.random.default_rng(seed)
    low = rng.uniform(-20, 0)
    atoms = CategoricalQ(2, num_atoms, low, low + rng.uniform(1, 40), False)
    probs = rng.dirichlet(np.ones(num_atoms), 7).astype(np.float32)
    rewards = rng.normal(0, 10, 7).astype(np.float32)
    discounts = rng.choice([0.0, 0.5, 0.99, 1.0], 7)
    made = atoms.project(probs, rewards, discounts)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made.sum(1), 1, atol=1e-5)
    expected = [
        plainly_projected(atoms.support.astype(np.float64), *row)
        for row in zip(probs, rewards.astype(np.float64), discounts, strict=True)
    ]
    np.testing.assert_allclose(made, expected, atol=2e-4)


def test_a_distribution_that_stays_is_the_same():
    atoms = CategoricalQ(2, 51, -10, 10, False)
    probs = np.random.default_rng(0).dirichlet(np.ones(51), 3).astype(np.float32)
    made = atoms.project(probs, np.zeros(3, np.float32), np.ones(3))
    np.testing.assert_allclose(made, probs, atol=1e-5)


@pytest.mark.parametrize("dueling", [True, False])
def test_values_are_means_and_forbidden_ones_far_below(dueling):
    atoms = CategoricalQ(3, 5, 0, 4, dueling)
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((4, atoms.num_outputs)).astype(np.float32)
    outputs[2, 5:10] = -1e9  # action 1 of row 2
    values = atoms.greedy_scores(outputs)
    for row in range(4):
        allowed = [a for a in range(3) if (row, a) != (2, 1)]
        own = {a: outputs[row, 5 * a : 5 * a + 5].astype(np.float64) for a in allowed}
        if dueling:
            mean = sum(own.values()) / len(own)
            own = {a: logits + outputs[row, 15:] - mean for a, logits in own.items()}
        for a, logits in own.items():
            probs = np.exp(logits) / np.exp(logits).sum()
            assert values[row, a] == pytest.approx(probs @ np.arange(5), rel=1e-5)
    assert values[2, 1] < -1e8
    tensors = atoms.logits(torch.from_numpy(outputs)).numpy()
    np.testing.assert_allclose(tensors, atoms.logits(outputs), atol=1e-5)


@pytest.mark.parametrize("dueling", [True, False])
def test_kernel_output_gradients_equal_autograd(dueling):
    atoms = CategoricalQ(3, 5, 0, 4, dueling)
    outputs = torch.randn(6, atoms.num_outputs, requires_grad=True)
    actions, gradients = torch.tensor([0, 1, 2, 0, 1, 2]), torch.randn(6, 5)
    index = actions[:, None, None].expand(-1, 1, 5)
    (atoms.logits(outputs).gather(1, index).squeeze(1) * gradients).sum().backward()
    made, _ = output_gradients(atoms, gradients.numpy(), actions.numpy())
    np.testing.assert_allclose(made, outputs.grad.numpy(), rtol=1e-5, atol=1e-6)
