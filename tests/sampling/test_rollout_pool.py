"""The env steps that exploration schedules of all policies follow, in process and on workers."""

import pytest

from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.envs import make_multi_agent

SMALL = {
    "env": make_multi_agent("CartPole-v1"),
    "env_config": {"num_agents": 2, "episode_steps": 20},
    "model": {"fcnet_hiddens": [8]},
    "policies": {"trained", "fixed"},
    "policies_to_train": ["trained"],
    "policy_mapping_fn": lambda agent_id, *args, **kwargs: "fixed" if agent_id else "trained",
    "min_sample_timesteps_per_iteration": 100,
    "rollout_fragment_length": 10,
    "seed": 0,
}


def timesteps(worker):
    return {policy_id: policy.timestep for policy_id, policy in worker.policy_map.items()}


@pytest.mark.slow_on_actors
def test_timestep_of_every_policy_advances_with_the_samples(num_workers):
    with DQNConfig(**SMALL, num_workers=num_workers, learning_starts=200).build() as algorithm:
        for has_learned in (False, True):
            sampled = algorithm.train()["timesteps_total"]
            while has_learned and sampled < 300:
                sampled = algorithm.train()["timesteps_total"]
            assert (algorithm.get_policy("trained").version > 1) == has_learned
            in_flight = 10 * max(num_workers, 1) * 3  # env steps that were requested meanwhile
            for of_worker in algorithm.workers.foreach_worker(timesteps)[-max(num_workers, 1) :]:
                assert of_worker["trained"] == pytest.approx(sampled, abs=in_flight)
                assert of_worker["fixed"] == pytest.approx(sampled, abs=in_flight)


def test_timestep_advances_beside_a_learner_thread():
    with IMPALAConfig(**SMALL, train_batch_size=20, num_workers=0).build() as algorithm:
        sampled = algorithm.train()["timesteps_total"]
        found = algorithm.workers.foreach_worker(timesteps)[0]
    assert found["fixed"] == sampled - 10  # at the start of the last fragment
