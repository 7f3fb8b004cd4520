"""The abstract sample collector of RLlib: every method, and the example of its docstrings
(docs/reference/compatibility.md)."""

import inspect

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.sample_batch import AgentID, EpisodeID, PolicyID, TensorType
from flowrl.policies import ModelV2
from flowrl.sampling import (
    MultiAgentEpisode,
    RolloutWorker,
    SampleCollector,
    SimpleListCollector,
)

METHODS = {
    "add_init_obs": ["episode_id", "agent_id", "policy_id", "init_obs"],
    "add_action_reward_next_obs": ["episode_id", "agent_id", "policy_id", "values"],
    "total_env_steps": [],
    "get_inference_input_dict": ["model"],
    "has_non_postprocessed_data": [],
    "postprocess_trajectories_so_far": ["episode"],
    "get_multi_agent_batch_and_reset": [],
    "check_missing_dones": ["episode_id"],
}


def test_every_method_is_abstract_with_the_same_arguments():
    assert SampleCollector.__abstractmethods__ == set(METHODS)
    for name, arguments in METHODS.items():
        signature = inspect.signature(getattr(SampleCollector, name))
        assert list(signature.parameters) == ["self", *arguments]
    with pytest.raises(TypeError, match="abstract"):
        SampleCollector({})
    assert None not in (AgentID, EpisodeID, PolicyID, TensorType)


@pytest.mark.parametrize("singular", [False, True])
def test_example_of_the_docstrings(singular):
    env = gym.make("CartPole-v1")
    policy = PPOTorchPolicy(env.observation_space, env.action_space, {})
    assert isinstance(policy.model, ModelV2)
    collector = SimpleListCollector({"pol0": policy})
    obs, _ = env.reset(seed=0)
    collector.add_init_obs(12345, 0, "pol0", obs)
    assert not collector.has_non_postprocessed_data()
    done, steps = False, 0
    while not done:
        input_dict = collector.get_inference_input_dict(policy.model)
        assert input_dict["obs"].tolist() == [obs.tolist()]
        (action,), states, extra = policy.compute_actions_from_input_dict(input_dict)
        assert states == []
        obs, r, terminated, truncated, info = env.step(action)
        done, steps = terminated or truncated, steps + 1
        if singular:
            values = {"action": action, "obs": obs, "reward": r, "done": done}
        else:
            values = {
                SampleBatch.ACTION: action,
                SampleBatch.REWARD: r,
                SampleBatch.NEW_OBS: obs,
                SampleBatch.DONE: done,
                "infos": info,
            }
        extra = {name: column[0] for name, column in extra.items()}
        collector.add_action_reward_next_obs(12345, 0, "pol0", {**values, **extra})
    assert collector.total_env_steps() == steps
    assert collector.has_non_postprocessed_data()
    collector.postprocess_trajectories_so_far()
    assert not collector.has_non_postprocessed_data()
    collector.check_missing_dones(12345)
    batch = collector.get_multi_agent_batch_and_reset()
    assert isinstance(batch, MultiAgentBatch)
    rows = batch["pol0"]
    assert rows["dones"].tolist() == [False] * (steps - 1) + [True]
    assert rows["t"].tolist() == list(range(steps))
    np.testing.assert_array_equal(rows["obs"][1:], rows["new_obs"][:-1])
    assert "advantages" in rows  # added by Policy.postprocess_trajectory
    assert collector.total_env_steps() == 0


def test_missing_dones_are_reported():
    env = gym.make("CartPole-v1")
    policy = PPOTorchPolicy(env.observation_space, env.action_space, {})
    collector = SimpleListCollector({"pol0": policy})
    obs, _ = env.reset(seed=0)
    collector.add_init_obs(12345, 0, "pol0", obs)
    values = {"action": 0, "obs": obs, "reward": 1.0, "done": False, "vf_preds": np.float32(0)}
    collector.add_action_reward_next_obs(12345, 0, "pol0", values)
    with pytest.raises(ValueError, match="12345"):
        collector.check_missing_dones(12345)


class ListOfRows(SampleCollector):
    """A collector of its own data structures, with the documented methods only."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.last, self.rows, self.steps = {}, [], 0

    def add_init_obs(self, episode_id, agent_id, policy_id, init_obs):
        self.last[episode_id, agent_id, policy_id] = init_obs

    def add_action_reward_next_obs(self, episode_id, agent_id, policy_id, values):
        key = episode_id, agent_id, policy_id
        columns = ("actions", "rewards", "new_obs", "terminateds", "truncateds")
        row = {name: values[name] for name in columns}
        self.rows.append({"obs": self.last[key], "eps_id": episode_id, **row})
        self.last[key] = values["new_obs"]
        self.steps += 1

    def total_env_steps(self):
        return self.steps

    def get_inference_input_dict(self, model):
        return {"obs": np.stack(list(self.last.values())[-1:])}

    def has_non_postprocessed_data(self):
        return bool(self.rows)

    def postprocess_trajectories_so_far(self, episode=None):
        assert episode is None or isinstance(episode, MultiAgentEpisode)

    def get_multi_agent_batch_and_reset(self):
        columns = {name: np.array([row[name] for row in self.rows]) for name in self.rows[0]}
        self.rows, steps, self.steps = [], self.steps, 0
        return MultiAgentBatch({"default_policy": SampleBatch(columns)}, steps)

    def check_missing_dones(self, episode_id):
        assert episode_id is not None


def test_workers_use_the_collector_of_the_setting():
    worker = RolloutWorker(
        lambda context: gym.make("CartPole-v1"),
        PPOTorchPolicy,
        {"sample_collector": ListOfRows, "rollout_fragment_length": 30},
    )
    batch = worker.sample()
    assert batch.count == 30
    assert sorted(batch) == [
        "actions", "eps_id", "new_obs", "obs", "rewards", "terminateds", "truncateds"
    ]  # fmt: skip
