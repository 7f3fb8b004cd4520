"""Distributions against torch.distributions, in numpy (acting) and torch (learning)."""

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from flowrl.policies.distributions import (
    Categorical,
    Deterministic,
    DiagGaussian,
    SquashedGaussian,
    distribution_for,
)

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((64, 5)).astype(np.float32) * 2
OTHER = RNG.standard_normal((64, 5)).astype(np.float32)
GAUSS = RNG.standard_normal((64, 6)).astype(np.float32)
OTHER_GAUSS = RNG.standard_normal((64, 6)).astype(np.float32)


def reference(dist_class, inputs):
    tensor = torch.from_numpy(inputs)
    if dist_class is Categorical:
        return torch.distributions.Categorical(logits=tensor)
    mean, log_std = tensor.chunk(2, -1)
    return torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)


@pytest.mark.parametrize(
    ("dist_class", "inputs", "others"),
    [(Categorical, LOGITS, OTHER), (DiagGaussian, GAUSS, OTHER_GAUSS)],
)
def test_logp_entropy_and_kl_equal_torch_distributions(dist_class, inputs, others):
    actions, logp = dist_class.act(inputs, np.random.default_rng(1), explore=True)
    dist, expected = dist_class(torch.from_numpy(inputs)), reference(dist_class, inputs)
    actions, logp = torch.from_numpy(actions), torch.from_numpy(logp)
    expected_logp = expected.log_prob(actions)
    torch.testing.assert_close(dist.logp(actions), expected_logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp, expected_logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dist.entropy(), expected.entropy())
    kl = torch.distributions.kl_divergence(expected, reference(dist_class, others))
    other = dist_class(torch.from_numpy(others))
    torch.testing.assert_close(dist.kl(other), kl, rtol=1e-4, atol=1e-4)


def test_categorical_samples_follow_the_probabilities():
    logits = np.log(np.array([[0.1, 0.2, 0.7]], np.float32)).repeat(30_000, 0)
    actions, _ = Categorical.act(logits, np.random.default_rng(0), explore=True)
    counts = np.bincount(actions, minlength=3)
    expected = 30_000 * np.array([0.1, 0.2, 0.7])
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 dof, p = 0.001


def test_act_without_exploration_returns_the_mode():
    actions, _ = Categorical.act(LOGITS, RNG, explore=False)
    assert (actions == LOGITS.argmax(1)).all()
    actions, _ = DiagGaussian.act(GAUSS, RNG, explore=False)
    assert (actions == GAUSS[:, :3]).all()


def test_gaussian_samples_have_the_mean_and_deviation():
    inputs = np.tile(np.array([[1.0, np.log(2.0)]], np.float32), (20_000, 1))
    actions, _ = DiagGaussian.act(inputs, np.random.default_rng(0), explore=True)
    assert abs(actions.mean() - 1.0) < 0.06
    assert abs(actions.std() - 2.0) < 0.05


def test_num_inputs_and_unsupported_spaces():
    assert Categorical.num_inputs(spaces.Discrete(4)) == 4
    assert DiagGaussian.num_inputs(spaces.Box(-1, 1, (3,))) == 6
    with pytest.raises(ValueError, match="no action distribution"):
        distribution_for(spaces.Text(3))


# -- all spaces ------------------------------------------------------------------------------------

NESTED = spaces.Dict(
    go=spaces.Discrete(3, start=2),
    parts=spaces.Tuple((spaces.Box(-1, 1, (2, 2), np.float32), spaces.MultiBinary(2))),
    pick=spaces.MultiDiscrete([[2, 3], [2, 2]], start=[[1, 0], [0, 0]]),
)
ALL_SPACES = {
    "discrete": spaces.Discrete(4),
    "multi_discrete": spaces.MultiDiscrete([3, 2, 4]),
    "multi_discrete_2d": spaces.MultiDiscrete([[2, 3], [2, 2]]),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box_2d": spaces.Box(-1, 1, (2, 2), np.float32),
    "nested": NESTED,
}


def torch_distributions(space, inputs):
    """[(torch.distributions object, function that selects its actions)] for a space's leaves."""
    d = torch.distributions
    if isinstance(space, spaces.Discrete):
        return [(d.Categorical(logits=inputs), lambda a: a)]
    if isinstance(space, spaces.MultiDiscrete):
        split = inputs.split(space.nvec.reshape(-1).tolist(), 1)
        return [
            (d.Categorical(logits=part), lambda a, i=i: a.reshape(len(a), -1)[:, i])
            for i, part in enumerate(split)
        ]
    if isinstance(space, spaces.MultiBinary):
        dist = d.Independent(d.Bernoulli(logits=inputs), 1)
        return [(dist, lambda a: a.reshape(len(a), -1).float())]
    if isinstance(space, spaces.Box):
        mean, log_std = inputs.chunk(2, 1)
        dist = d.Independent(d.Normal(mean, log_std.exp()), 1)
        return [(dist, lambda a: a.reshape(len(a), -1))]
    keys = sorted(space) if isinstance(space, spaces.Dict) else range(len(space.spaces))
    sizes = [distribution_for(space[k]).num_inputs(space[k]) for k in keys]
    return [
        (dist, lambda a, k=k, select=select: select(a[k]))
        for k, part in zip(keys, inputs.split(sizes, 1), strict=True)
        for dist, select in torch_distributions(space[k], part)
    ]


@pytest.mark.parametrize("name", list(ALL_SPACES))
@pytest.mark.parametrize("explore", [True, False])
def test_distribution_of_each_space_equals_torch_distributions(name, explore):
    space = ALL_SPACES[name]
    dist_class = distribution_for(space)
    size = dist_class.num_inputs(space)
    rng = np.random.default_rng(3)
    inputs, others = rng.standard_normal((2, 50, size)).astype(np.float32)
    actions, logp = dist_class.act(inputs, rng, explore)
    actions = optree.tree_map(torch.from_numpy, actions)
    dist, other = dist_class(torch.from_numpy(inputs)), dist_class(torch.from_numpy(others))
    references = torch_distributions(space, torch.from_numpy(inputs))
    expected = sum(reference.log_prob(select(actions)) for reference, select in references)
    torch.testing.assert_close(dist.logp(actions), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logp, expected, rtol=1e-4, atol=1e-4)
    assert logp.dtype == np.float32
    entropy = sum(reference.entropy() for reference, _ in references)
    torch.testing.assert_close(dist.entropy(), entropy, rtol=1e-4, atol=1e-4)
    pairs = zip(references, torch_distributions(space, torch.from_numpy(others)), strict=True)
    kl = sum(torch.distributions.kl_divergence(a[0], b[0]) for a, b in pairs)
    torch.testing.assert_close(dist.kl(other), kl, rtol=1e-4, atol=1e-4)
    torch.manual_seed(0)
    samples = dist.sample() if explore else dist.deterministic_sample()
    assert torch.isfinite(dist.logp(samples)).all()
    if not explore:
        torch.testing.assert_close(dist.logp(samples), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(ALL_SPACES))
def test_actions_for_the_environment_are_in_the_space(name):
    from flowrl.algorithms.ppo import PPOTorchPolicy

    space = ALL_SPACES[name]
    policy = PPOTorchPolicy(spaces.Box(-1, 1, (2,), np.float32), space, {"seed": 0})
    for _ in range(5):
        observation = np.zeros(2, np.float32)
        assert space.contains(policy.session().compute_single_action(observation, explore=True))


@pytest.mark.parametrize("dist_class", [DiagGaussian, SquashedGaussian])
def test_continuous_samples_are_reparameterized(dist_class):
    inputs = torch.from_numpy(0.3 * GAUSS).requires_grad_()
    (gradient,) = torch.autograd.grad(dist_class(inputs).sample().sum(), inputs)
    assert (gradient.abs() > 0).all()


def test_bernoulli_samples_follow_the_probabilities():
    dist_class = distribution_for(spaces.MultiBinary(2))
    logits = np.tile(np.array([[-1.0, 2.0]], np.float32), (20_000, 1))
    actions, _ = dist_class.act(logits, np.random.default_rng(0), True)
    expected = 1 / (1 + np.exp([1.0, -2.0]))
    np.testing.assert_allclose(actions.mean(0), expected, atol=0.015)


def test_squashed_gaussian_equals_torch_distributions():
    inputs = np.concatenate([0.3 * GAUSS, np.full((4, 6), 9.0, np.float32)])
    actions, logp = SquashedGaussian.act(inputs, np.random.default_rng(0), True)
    assert (np.abs(actions) < 1).all()
    mean, log_std = torch.from_numpy(inputs).double().chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
    squash = torch.distributions.transforms.TanhTransform()
    reference = torch.distributions.TransformedDistribution(normal, [squash])
    expected = reference.log_prob(torch.from_numpy(actions).double()).sum(-1)
    np.testing.assert_allclose(logp[:64], expected[:64], rtol=1e-3, atol=1e-3)
    dist = SquashedGaussian(torch.from_numpy(inputs))
    torch_logp = dist.logp(torch.from_numpy(actions))
    np.testing.assert_allclose(torch_logp[:64], expected[:64], rtol=1e-2, atol=1e-2)
    assert torch.isfinite(torch_logp).all()
    mode, _ = SquashedGaussian.act(inputs, np.random.default_rng(0), False)
    np.testing.assert_allclose(mode, dist.deterministic_sample(), atol=1e-5)
    # the mean of many one-sample estimates of the entropy is the integral
    torch.manual_seed(0)
    many = SquashedGaussian(torch.tensor([[0.3, -0.5]]).repeat(200_000, 1))
    grid = torch.linspace(-0.999999, 0.999999, 400_001, dtype=torch.float64)
    reference = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(
            torch.tensor(0.3, dtype=torch.float64), torch.tensor(-0.5, dtype=torch.float64).exp()
        ),
        [squash],
    )
    density = reference.log_prob(grid)
    integral = -torch.trapezoid(density.exp() * density, grid)
    assert abs(float(many.entropy().mean()) - float(integral)) < 0.01
    actions, logp = many.sample_and_logp()
    torch.testing.assert_close(many.logp(actions), logp, rtol=1e-2, atol=1e-2)


def test_deterministic_distribution():
    dist_class = Deterministic.for_space(spaces.Box(-1, 1, (2, 2), np.float32))
    assert dist_class.num_inputs(dist_class.space) == 4
    inputs = GAUSS[:, :4]
    actions, logp = dist_class.act(inputs, RNG, True)
    np.testing.assert_array_equal(actions, inputs.reshape(-1, 2, 2))
    dist = dist_class(torch.from_numpy(inputs))
    for zero in (logp, dist.logp(actions), dist.entropy(), dist.kl(dist)):
        assert zero.shape == (64,)
        assert not zero.any()


@pytest.mark.parametrize("log_std", [-10.0, -14.0, -18.0])
def test_squashed_log_probability_of_a_sample_is_exact_for_small_deviations(log_std):
    noise = torch.randn(256, 1, generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor([[1.5, log_std]]).repeat(256, 1)
    _, logp = SquashedGaussian(inputs).sample_and_logp(noise)
    np.testing.assert_allclose(
        logp, SquashedGaussian.from_noise(inputs.numpy(), noise.numpy())[2], rtol=1e-5
    )


@pytest.mark.parametrize("action", [-100, -1, 3])
def test_actions_outside_of_a_categorical_have_no_probability(action):
    dist = Categorical(torch.zeros(2, 3))
    with pytest.raises((IndexError, RuntimeError)):
        dist.logp(torch.tensor([action, 0]))


def test_actions_of_other_rows_have_no_probability():
    with pytest.raises(ValueError, match="1 actions for 2 rows"):
        Categorical(torch.zeros(2, 3)).logp(torch.tensor([0]))
