"""Exploration and schedules."""

from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.algorithms.td3 import TD3Config, TD3TorchPolicy
from flowrl.policies import ConfigError, ExplorationConfig, PolicyConfig
from flowrl.policies.distributions import distribution_for
from flowrl.policies.exploration import Exploration
from flowrl.policies.schedules import value_at
from flowrl.sampling import RolloutWorker

FOUR = spaces.Discrete(4)
BOX = spaces.Box(-2, 3, (2,), np.float32)


def exploration(space=FOUR, normalize_actions=False, **config):
    dist_class = distribution_for(space)
    return Exploration(ExplorationConfig(**config), space, dist_class, normalize_actions)


def fake_policy(timestep=0, worker_index=0, num_workers=0):
    """The attributes that exploration reads from a policy."""
    rng = np.random.default_rng(0)
    return SimpleNamespace(
        rng=rng,
        timestep=timestep,
        total_timesteps=None,
        worker_index=worker_index,
        num_workers=num_workers,
    )


def act(exploration, count=20_000, explore=True, timestep=0):
    """Act on logits of four actions of which 1 is the best."""
    inputs = np.zeros((count, 4), np.float32)
    inputs[:, 1] = 5.0
    return exploration.act(inputs, fake_policy(timestep), explore)


def test_epsilon_greedy_fractions_and_log_probabilities():
    greedy = exploration(type="EpsilonGreedy", epsilon=[(0, 1.0), (100, 0.2)])
    for timestep, epsilon in ((0, 1.0), (50, 0.6), (1000, 0.2)):
        actions, logp = act(greedy, timestep=timestep)
        fractions = np.bincount(actions, minlength=4) / len(actions)
        expected = np.full(4, epsilon / 4)
        expected[1] += 1 - epsilon
        np.testing.assert_allclose(fractions, expected, atol=0.015)
        np.testing.assert_allclose(np.exp(logp), expected[actions], rtol=1e-5)
    actions, _ = act(greedy, explore=False)
    assert (actions == 1).all()


def test_random_actions_obey_masks():
    greedy = exploration(type="EpsilonGreedy", epsilon=1.0)
    inputs = np.tile(np.array([[0, -1e9, 3, -1e9]], np.float32), (1000, 1))
    actions, logp = greedy.act(inputs, fake_policy(), True)
    assert set(actions) == {0, 2}
    np.testing.assert_allclose(logp, np.log(0.5), rtol=1e-5, atol=1e-6)


def test_each_worker_has_its_own_epsilon():
    """Horgan et al. 2018, section 4: 0.4 ** (1 + 7 i / (N - 1))."""
    per_worker = exploration(type="PerWorkerEpsilonGreedy")
    epsilons = [per_worker.epsilon(fake_policy(0, index, 4)) for index in range(1, 5)]
    np.testing.assert_allclose(epsilons, [0.4 ** (1 + 7 * i / 3) for i in range(4)])
    assert per_worker.epsilon(fake_policy()) == pytest.approx(0.4)  # the only worker samples
    assert per_worker.epsilon(fake_policy(0, 0, 4)) == 0.0  # remote workers sample


def test_epsilon_exponent_spreads_the_epsilons_of_workers():
    spread = exploration(type="PerWorkerEpsilonGreedy", epsilon_base=0.5, epsilon_exponent=3.0)
    epsilons = [spread.epsilon(fake_policy(0, index, 3)) for index in range(1, 4)]
    np.testing.assert_allclose(epsilons, [0.5, 0.5**2.5, 0.5**4])
    equal = exploration(type="PerWorkerEpsilonGreedy", epsilon_exponent=0.0)
    assert {equal.epsilon(fake_policy(0, index, 3)) for index in range(1, 4)} == {0.4}


def test_policy_knows_its_worker_index():
    w = RolloutWorker("CartPole-v1", PPOTorchPolicy, {}, worker_index=2, num_workers=3)
    assert (w.policy.worker_index, w.policy.num_workers) == (2, 3)


@pytest.mark.parametrize("kind", ["StochasticSampling", "EpsilonGreedy"])
def test_first_random_timesteps_draw_uniformly(kind):
    settings = {"epsilon": 0.0} if kind == "EpsilonGreedy" else {}
    random_first = exploration(type=kind, random_timesteps=10, **settings)
    actions, logp = act(random_first, timestep=9)
    np.testing.assert_allclose(np.bincount(actions) / len(actions), 0.25, atol=0.015)
    np.testing.assert_allclose(logp, np.log(0.25), atol=1e-5)
    actions, _ = act(random_first, timestep=10)
    assert (actions == 1).mean() > 0.9


@pytest.mark.parametrize("normalize_actions", [True, False])
def test_random_continuous_actions_fill_their_bounds(normalize_actions):
    actions, logp = act(exploration(BOX, normalize_actions, type="Random"))
    low, high = (-1, 1) if normalize_actions else (-2, 3)
    assert actions.dtype == np.float32
    assert low <= actions.min() < low + 0.1
    assert high - 0.1 < actions.max() <= high
    np.testing.assert_allclose(logp, -2 * np.log(high - low), rtol=1e-5)


@pytest.mark.parametrize("kind", ["GaussianNoise", "OrnsteinUhlenbeckNoise"])
def test_noise_has_its_scale_and_correlation(kind):
    settings = {"ou_theta": 0.3} if kind == "OrnsteinUhlenbeckNoise" else {}
    noisy = exploration(BOX, True, type=kind, scale=0.2, **settings)
    inputs, policy = np.zeros((1, 4), np.float32), fake_policy()
    noise = np.array([noisy.act(inputs, policy, True)[0][0, 0] for _ in range(5000)])
    correlation = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    if kind == "GaussianNoise":
        assert abs(noise.std() - 0.2) < 0.01
        assert abs(correlation) < 0.05
    else:
        # x' = (1 - theta) x + noise: lag-one correlation 0.7, variance 0.2² / (1 - 0.7²)
        assert abs(correlation - 0.7) < 0.05
        assert abs(noise.std() - 0.2 / np.sqrt(1 - 0.49)) < 0.03
    assert (np.abs(noise) <= 1).all()
    assert (noisy.act(inputs, policy, False)[0] == 0).all()


@pytest.mark.parametrize(
    ("space", "config", "match"),
    [
        (FOUR, {"type": "GaussianNoise"}, "is for Box actions"),
        (BOX, {"type": "EpsilonGreedy"}, "is for Discrete"),
        (FOUR, {"type": "Epsilon"}, "type"),
        (BOX, {"type": "GaussianNoise", "scale": -1.0}, "scale"),
        (FOUR, {"type": "EpsilonGreedy", "epsilon": [(5, 1.0), (3, 0.1)]}, "rising"),
        (FOUR, {"epsilonn": 1.0}, "epsilon"),
    ],
)
def test_unsupported_exploration_is_rejected(space, config, match):
    with pytest.raises(ConfigError, match=match):
        exploration(space, **config)


def test_policy_follows_its_exploration_config():
    config = {"exploration_config": {"type": "Random"}, "seed": 0}
    policy = PPOTorchPolicy(spaces.Box(-1, 1, (2,), np.float32), FOUR, config)
    assert policy.config.exploration_config.epsilon_base == 0.4
    obs = np.ones((8000, 2), np.float32)
    fractions = np.bincount(policy.compute_actions(obs)[0]) / 8000
    np.testing.assert_allclose(fractions, 0.25, atol=0.02)
    assert len(set(policy.compute_actions(obs, explore=False)[0])) == 1


def test_exponential_schedule_decays_to_its_final_value():
    halving = {"initial": 1.0, "decay": 0.5, "steps": 100, "final": 0.1}
    values = [value_at(halving, t) for t in (0, 100, 150, 1000)]
    np.testing.assert_allclose(values, [1.0, 0.5, 0.5**1.5, 0.1])
    assert value_at({"initial": 2.0, "decay": 0.1, "steps": 1}, 5) == pytest.approx(2e-5)
    assert PolicyConfig(lr=halving).lr == halving
    for invalid in (
        {"initial": 1.0},
        {**halving, "decay": 1.5},
        {**halving, "steps": 0},
        {**halving, "start": 1},
        {**halving, "initial": -1.0},
    ):
        with pytest.raises(ConfigError, match="lr"):
            PolicyConfig(lr=invalid)


def test_noise_of_a_state_must_fit_the_actions():
    config = TD3Config(exploration_config={"type": "OrnsteinUhlenbeckNoise"})
    policy = TD3TorchPolicy(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,)), config)
    state = policy.get_state()
    for noise in ({"4": "x"}, {"4": np.zeros((4, 5))}, {"4": np.zeros((4, 1))}):
        with pytest.raises(ValueError, match="must be a float array of shape"):
            policy.set_state({**state, "exploration": noise})
    policy.set_state({**state, "exploration": {"4": np.zeros((4, 2))}})


def test_state_of_a_subclass_may_have_more_entries():
    class Counts(Exploration):
        calls = 3

        def state_dict(self):
            return {**super().state_dict(), "calls": self.calls}

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.calls = state["calls"]

    class Counting(PPOTorchPolicy):
        def make_exploration(self):
            return Counts(self.config.exploration_config, self.action_space, self.dist_class, True)

    policy = Counting(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), {})
    state = policy.get_state()
    policy.exploration.calls = 0
    policy.set_state(state)
    assert policy.exploration.calls == 3
