"""Distributions against torch.distributions, and what numpy draws against what torch scores."""

import numpy as np
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


# -- the other spaces ------------------------------------------------------------------------------

NEST = spaces.Dict(
    go=spaces.Discrete(3, start=2),
    parts=spaces.Tuple((spaces.Box(-1, 1, (2, 2), np.float32), spaces.MultiBinary(2))),
    pick=spaces.MultiDiscrete([[2, 3], [2, 2]], start=[[1, 0], [0, 0]]),
)
ALL = {
    "categorical": spaces.Discrete(4),
    "several": spaces.MultiDiscrete([3, 2, 4]),
    "table": spaces.MultiDiscrete([[2, 3], [2, 2]]),
    "yes or no": spaces.MultiBinary((2, 2)),
    "normal": spaces.Box(-1, 1, (3,), np.float32),
    "matrix": spaces.Box(-1, 1, (2, 2), np.float32),
    "nested": NEST,
}


def torchs(space, inputs):
    """[(torch.distributions object, key path, how to flatten)] for a space's leaves."""
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
        own = d.Independent(d.Bernoulli(logits=inputs), 1)
        return [(own, lambda a: a.reshape(len(a), -1).float())]
    if isinstance(space, spaces.Box):
        mean, log_std = inputs.chunk(2, 1)
        own = d.Independent(d.Normal(mean, log_std.exp()), 1)
        return [(own, lambda a: a.reshape(len(a), -1))]
    keys = sorted(space) if isinstance(space, spaces.Dict) else range(len(space.spaces))
    sizes = [distribution_for(space[k]).num_inputs(space[k]) for k in keys]
    return [
        (own, lambda a, k=k, pick=pick: pick(a[k]))
        for k, part in zip(keys, inputs.split(sizes, 1), strict=True)
        for own, pick in torchs(space[k], part)
    ]


def as_tensors(actions):
    if isinstance(actions, dict):
        return {key: as_tensors(part) for key, part in actions.items()}
    if isinstance(actions, tuple):
        return tuple(map(as_tensors, actions))
    return torch.from_numpy(actions)


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("explore", [True, False])
def test_every_space_against_torch(name, explore):
    space = ALL[name]
    kind = distribution_for(space)
    size = kind.num_inputs(space)
    rng = np.random.default_rng(3)
    inputs, others = rng.standard_normal((2, 50, size)).astype(np.float32)
    actions, logp = kind.act(inputs, rng, explore)
    given = as_tensors(actions)
    ours, other = kind(torch.from_numpy(inputs)), kind(torch.from_numpy(others))
    theirs = torchs(space, torch.from_numpy(inputs))
    expected = sum(own.log_prob(pick(given)) for own, pick in theirs)
    torch.testing.assert_close(ours.logp(given), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logp, expected, rtol=1e-4, atol=1e-4)
    assert logp.dtype == np.float32
    entropy = sum(own.entropy() for own, _ in theirs)
    torch.testing.assert_close(ours.entropy(), entropy, rtol=1e-4, atol=1e-4)
    pairs = zip(theirs, torchs(space, torch.from_numpy(others)), strict=True)
    kl = sum(torch.distributions.kl_divergence(a[0], b[0]) for a, b in pairs)
    torch.testing.assert_close(ours.kl(other), kl, rtol=1e-4, atol=1e-4)
    torch.manual_seed(0)
    drawn = ours.sample() if explore else ours.deterministic_sample()
    assert torch.isfinite(ours.logp(drawn)).all()
    if not explore:
        torch.testing.assert_close(ours.logp(drawn), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(ALL))
def test_environments_can_take_the_actions(name):
    from flowrl.algorithms.ppo import PPOTorchPolicy

    space = ALL[name]
    policy = PPOTorchPolicy(spaces.Box(-1, 1, (2,), np.float32), space, {"seed": 0})
    for _ in range(5):
        observation = np.zeros(2, np.float32)
        assert space.contains(policy.session().compute_single_action(observation, explore=True))


@pytest.mark.parametrize("kind", [DiagGaussian, SquashedGaussian])
def test_draws_have_a_gradient(kind):
    inputs = torch.from_numpy(0.3 * GAUSS).requires_grad_()
    (gradient,) = torch.autograd.grad(kind(inputs).sample().sum(), inputs)
    assert (gradient.abs() > 0).all()


def test_bernoulli_draws_follow_the_probabilities():
    kind = distribution_for(spaces.MultiBinary(2))
    logits = np.tile(np.array([[-1.0, 2.0]], np.float32), (20_000, 1))
    actions, _ = kind.act(logits, np.random.default_rng(0), True)
    expected = 1 / (1 + np.exp([1.0, -2.0]))
    np.testing.assert_allclose(actions.mean(0), expected, atol=0.015)


def test_squashed_gaussian_against_torch():
    inputs = np.concatenate([0.3 * GAUSS, np.full((4, 6), 9.0, np.float32)])
    actions, logp = SquashedGaussian.act(inputs, np.random.default_rng(0), True)
    assert (np.abs(actions) < 1).all()
    mean, log_std = torch.from_numpy(inputs).double().chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
    squash = torch.distributions.transforms.TanhTransform()
    own = torch.distributions.TransformedDistribution(normal, [squash])
    expected = own.log_prob(torch.from_numpy(actions).double()).sum(-1)
    np.testing.assert_allclose(logp[:64], expected[:64], rtol=1e-3, atol=1e-3)
    ours = SquashedGaussian(torch.from_numpy(inputs))
    got = ours.logp(torch.from_numpy(actions))
    np.testing.assert_allclose(got[:64], expected[:64], rtol=1e-2, atol=1e-2)
    assert torch.isfinite(got).all()
    mode, _ = SquashedGaussian.act(inputs, np.random.default_rng(0), False)
    np.testing.assert_allclose(mode, ours.deterministic_sample(), atol=1e-5)
    # one draw's estimate of the entropy: its mean over many is the integral
    torch.manual_seed(0)
    many = SquashedGaussian(torch.tensor([[0.3, -0.5]]).repeat(200_000, 1))
    grid = torch.linspace(-0.999999, 0.999999, 400_001, dtype=torch.float64)
    one = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(
            torch.tensor(0.3, dtype=torch.float64), torch.tensor(-0.5, dtype=torch.float64).exp()
        ),
        [squash],
    )
    density = one.log_prob(grid)
    integral = -torch.trapezoid(density.exp() * density, grid)
    assert abs(float(many.entropy().mean()) - float(integral)) < 0.01
    drawn, own_logp = many.sample_and_logp()
    torch.testing.assert_close(many.logp(drawn), own_logp, rtol=1e-2, atol=1e-2)


def test_deterministic():
    kind = Deterministic.over(spaces.Box(-1, 1, (2, 2), np.float32))
    assert kind.num_inputs(kind.space) == 4
    inputs = GAUSS[:, :4]
    actions, logp = kind.act(inputs, RNG, True)
    np.testing.assert_array_equal(actions, inputs.reshape(-1, 2, 2))
    dist = kind(torch.from_numpy(inputs))
    for zero in (logp, dist.logp(actions), dist.entropy(), dist.kl(dist)):
        assert zero.shape == (64,)
        assert not zero.any()
