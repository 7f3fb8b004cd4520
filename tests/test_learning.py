"""Learning to thresholds, several seeds each. `pytest -m slow`."""

import pytest

from flowrl.algorithms.plans import load_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def steps_to(plan, goal, limit, **settings):
    """Env steps until the mean return of 100 episodes is `goal`, and greedy evaluation."""
    with load_plan(plan).config.updated(**settings).build(plan=plan) as algorithm:
        while True:
            result = algorithm.train()
            full = result["episodes_in_window"] >= 100
            if full and result["episode_reward_mean"] >= goal:
                break
            assert result["timesteps_total"] < limit, result["episode_reward_mean"]
        return result["timesteps_total"], algorithm.evaluate(100, num_envs=16)


@pytest.mark.parametrize("seed", range(10))
def test_ppo_cartpole(seed):
    steps, told = steps_to("ppo", 475, 75_000, seed=seed)
    assert steps <= 75_000
    assert told["episode_reward_mean"] >= 475


@pytest.mark.parametrize("seed", range(3))
def test_ppo_cartpole_two_workers(seed, ray_session):
    steps, told = steps_to("ppo", 475, 75_000, seed=seed, num_workers=2, num_envs_per_worker=4)
    assert steps <= 75_000
    assert told["episode_reward_mean"] >= 475


@pytest.mark.parametrize("seed", range(3))
def test_ppo_acrobot(seed):
    steps, _ = steps_to("ppo", -100, 300_000, env="Acrobot-v1", seed=seed)
    assert steps <= 300_000


@pytest.mark.parametrize("seed", range(3))
def test_ppo_pendulum(seed):
    settings = {
        "env": "Pendulum-v1",
        "gamma": 0.9,
        "lr": 1e-3,
        "clip_param": 0.2,
        "normalize_observations": True,
        "normalize_rewards": True,
    }
    steps, _ = steps_to("ppo", -400, 300_000, seed=seed, **settings)
    assert steps <= 300_000


@pytest.mark.parametrize("seed", range(3))
def test_a2c_cartpole(seed):
    steps, _ = steps_to("a2c", 450, 500_000, seed=seed)
    assert steps <= 500_000
