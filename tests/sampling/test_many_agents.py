"""Copies of a single-agent environment as agents of one."""

import numpy as np
import pytest

from flowrl.envs import EnvContext, make_multi_agent
from flowrl.policies import ConfigError
from flowrl.sampling import RolloutWorker

from .fakes import CountEnv, Idle


def creator(context):
    return CountEnv(context.get("length", 3))


def test_the_episode_ends_with_the_last_agent():
    lengths = iter([2, 4])
    env = make_multi_agent(lambda context: CountEnv(next(lengths)))(EnvContext({"num_agents": 2}))
    obs, _ = env.reset(seed=0)
    assert sorted(obs) == [0, 1]
    for step in range(1, 5):
        obs, rewards, terminateds, truncateds, _ = env.step(dict.fromkeys(obs, 0))
        there = [0, 1] if step <= 2 else [1]
        assert sorted(rewards) == there
        over = [a for a in there if terminateds[a] or truncateds[a]]
        assert over == ([0] if step == 2 else [1] if step == 4 else [])
        assert terminateds["__all__"] == (step == 4)
        for agent in over:
            obs.pop(agent)
    assert not obs


def test_agents_begin_anew_under_other_names_until_the_steps_are_over():
    env = make_multi_agent(creator)(EnvContext({"num_agents": 2, "episode_steps": 7}))
    obs, _ = env.reset(seed=0)
    names = []
    for step in range(1, 8):
        obs, _, terminateds, truncateds, _ = env.step(dict.fromkeys(obs, 0))
        for agent in [a for a in obs if terminateds.get(a) or truncateds.get(a)]:
            obs.pop(agent)
        names.append(sorted(obs))
        assert truncateds["__all__"] == (step == 7)
    assert names == [[0, 1], [0, 1], [2, 3], [2, 3], [2, 3], [4, 5], []]


def test_workers_sample_it():
    worker = RolloutWorker(
        make_multi_agent(creator),
        {"even": Idle, "odd": Idle},
        {
            "rollout_fragment_length": 21,
            "env_config": {"num_agents": 3, "episode_steps": 7},
            "policy_mapping_fn": lambda agent_id, *args, **kwargs: ("even", "odd")[
                agent_id % 3 % 2
            ],
        },
    )
    batch = worker.sample()
    assert (batch.env_steps(), batch.agent_steps()) == (21, 63)
    assert (batch["even"].count, batch["odd"].count) == (42, 21)
    assert np.isfinite(batch["odd"]["rewards"]).all()
    worker.stop()


@pytest.mark.parametrize("odd", [{"num_agents": 0}, {"num_agents": "x"}, {"episode_steps": -1}])
def test_numbers_that_cannot_be(odd):
    with pytest.raises(ConfigError, match="a positive integer"):
        make_multi_agent(creator)(EnvContext(odd))
