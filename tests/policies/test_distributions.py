"""Distributions against torch.distributions, and what numpy draws against what torch scores."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.policies.distributions import Categorical, DiagGaussian, distribution_for

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((64, 5)).astype(np.float32) * 2
OTHER = RNG.standard_normal((64, 5)).astype(np.float32)
GAUSS = RNG.standard_normal((64, 6)).astype(np.float32)
OTHER_GAUSS = RNG.standard_normal((64, 6)).astype(np.float32)


def reference(kind, inputs):
    tensor = torch.from_numpy(inputs)
    if kind is Categorical:
        return torch.distributions.Categorical(logits=tensor)
    mean, log_std = tensor.chunk(2, -1)
    return torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)


@pytest.mark.parametrize(
    ("kind", "inputs", "others"),
    [(Categorical, LOGITS, OTHER), (DiagGaussian, GAUSS, OTHER_GAUSS)],
)
def test_against_torch(kind, inputs, others):
    actions, logp = kind.act(inputs, np.random.default_rng(1), explore=True)
    ours, theirs = kind(torch.from_numpy(inputs)), reference(kind, inputs)
    given = torch.from_numpy(actions)
    torch.testing.assert_close(ours.logp(given), theirs.log_prob(given), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(logp), theirs.log_prob(given), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    kl = torch.distributions.kl_divergence(theirs, reference(kind, others))
    torch.testing.assert_close(ours.kl(kind(torch.from_numpy(others))), kl, rtol=1e-4, atol=1e-4)


def test_categorical_draws_follow_the_probabilities():
    logits = np.log(np.array([[0.1, 0.2, 0.7]], np.float32)).repeat(30_000, 0)
    actions, _ = Categorical.act(logits, np.random.default_rng(0), explore=True)
    counts = np.bincount(actions, minlength=3)
    expected = 30_000 * np.array([0.1, 0.2, 0.7])
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 dof, p = 0.001


def test_modes():
    actions, _ = Categorical.act(LOGITS, RNG, explore=False)
    assert (actions == LOGITS.argmax(1)).all()
    actions, _ = DiagGaussian.act(GAUSS, RNG, explore=False)
    assert (actions == GAUSS[:, :3]).all()


def test_gaussian_draws():
    inputs = np.tile(np.array([[1.0, np.log(2.0)]], np.float32), (20_000, 1))
    actions, _ = DiagGaussian.act(inputs, np.random.default_rng(0), explore=True)
    assert abs(actions.mean() - 1.0) < 0.06
    assert abs(actions.std() - 2.0) < 0.05


def test_spaces():
    assert Categorical.num_inputs(spaces.Discrete(4)) == 4
    assert DiagGaussian.num_inputs(spaces.Box(-1, 1, (3,))) == 6
    with pytest.raises(ValueError, match="no action distribution"):
        distribution_for(spaces.Text(3))
