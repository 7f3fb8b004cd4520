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
