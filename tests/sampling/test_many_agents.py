"""make_multi_agent: copies of a single-agent environment as agents."""

import numpy as np
import pytest

from flowrl.data.fragment_columns import FragmentColumns
from flowrl.envs import EnvContext, make_multi_agent
from flowrl.policies import ConfigError
from flowrl.sampling import RolloutWorker

from .fakes import CountEnv, Idle


def creator(context):
    return CountEnv(context.get("length", 3))


def test_episode_ends_with_its_last_agent():
    lengths = iter([2, 4])
    env = make_multi_agent(lambda context: CountEnv(next(lengths)))(EnvContext({"num_agents": 2}))
    obs, _ = env.reset(seed=0)
    assert sorted(obs) == [0, 1]
    for step in range(1, 5):
        obs, rewards, terminateds, truncateds, _ = env.step(dict.fromkeys(obs, 0))
        agents = [0, 1] if step <= 2 else [1]
        assert sorted(rewards) == agents
        ended = [a for a in agents if terminateds[a] or truncateds[a]]
        assert ended == ([0] if step == 2 else [1] if step == 4 else [])
        assert terminateds["__all__"] == (step == 4)
        for agent in ended:
            obs.pop(agent)
    assert not obs


def test_episode_steps_restart_agents_under_new_ids():
    env = make_multi_agent(creator)(EnvContext({"num_agents": 2, "episode_steps": 7}))
    obs, _ = env.reset(seed=0)
    ids = []
    for step in range(1, 8):
        obs, _, terminateds, truncateds, _ = env.step(dict.fromkeys(obs, 0))
        for agent in [a for a in obs if terminateds.get(a) or truncateds.get(a)]:
            obs.pop(agent)
        ids.append(sorted(obs))
        assert truncateds["__all__"] == (step == 7)
    assert ids == [[0, 1], [0, 1], [2, 3], [2, 3], [2, 3], [4, 5], []]


def test_columns_are_copied_a_few_times_for_many_agents(monkeypatch):
    added, add_lanes = [], FragmentColumns.add_lanes

    def count(columns, number):
        added.append(number)
        add_lanes(columns, number)

    monkeypatch.setattr(FragmentColumns, "add_lanes", count)
    settings = {"rollout_fragment_length": 6, "env_config": {"num_agents": 100}}
    worker = RolloutWorker(make_multi_agent(creator), Idle, settings)
    batch = worker.sample()
    assert batch.agent_steps() == 600
    assert len(set(batch["default_policy"]["agent_index"])) == 100
    assert sum(added) >= 100
    assert len(added) < 15
    worker.sample()
    assert len(added) < 15


def test_worker_samples_all_agents():
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


@pytest.mark.parametrize("name", ["num_agents", "episode_steps"])
@pytest.mark.parametrize("number", [0, -1, "x", True, False])
def test_invalid_numbers_of_agents_and_steps_raise(name, number):
    with pytest.raises(ConfigError, match="a positive integer"):
        make_multi_agent(creator)(EnvContext({name: number}))
