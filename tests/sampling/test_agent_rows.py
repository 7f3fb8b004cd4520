"""Rows of several agents: their observations, invalid values, states and memory."""

from collections import OrderedDict

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.envs import MultiAgentEnv
from flowrl.envs.validation import InvalidStepError
from flowrl.policies import ConfigError, PolicySpec, ViewRequirement
from flowrl.sampling import RolloutWorker, SimpleListCollector

from .fakes import Idle
from .test_multi_agent_sampler import Crowd, metrics_of, pair, segments_of

BOX = gym.spaces.Box(-1, 1e6, (2,), np.float32)


class Two(MultiAgentEnv):
    """Agents "a" and "b" observe what `observe` returns for a step; episodes have 4 steps."""

    possible_agents = ["a", "b"]
    observation_space = BOX
    action_space = gym.spaces.Discrete(2)

    def observe(self, agent, step):
        return np.array([agent == "b", step], np.float32)

    def rewards(self):
        return {"a": 1.0, "b": 1.0}

    def observations(self):
        return {agent: self.observe(agent, self.steps) for agent in "ab"}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observations(), {}

    def step(self, action_dict):
        self.steps += 1
        over = {"__all__": self.steps == 4}
        return self.observations(), self.rewards(), over, {"__all__": False}, {}


def worker(env, policies=None, **config):
    policies = policies or {"p": Idle}
    mapping = (lambda agent: "p") if len(policies) == 1 else (lambda agent: "pq"[agent == "b"])
    settings = {"rollout_fragment_length": 6, "policy_mapping_fn": mapping, **config}
    return RolloutWorker(lambda context: env(), policies, settings)


COLLECTORS = pytest.mark.parametrize("collector", [None, SimpleListCollector])


class Keys(Two):
    """Returns Dict observations with the keys in another order, and plain lists and numbers."""

    observation_space = gym.spaces.Dict(
        x=gym.spaces.Box(-9, 9, (2,)), y=gym.spaces.Box(0, 99, (2,)), z=gym.spaces.Discrete(9)
    )

    def observe(self, agent, step):
        return OrderedDict(z=step, y=[50.0, step], x=[0.0, float(step)])


@COLLECTORS
@pytest.mark.parametrize("mode", ["warn", "replace"])
def test_nested_observations_may_have_another_order_and_plain_numbers(collector, mode):
    w = worker(Keys, {"p": PPOTorchPolicy}, sample_collector=collector, on_invalid_step=mode)
    obs = w.sample()["p"]["obs"]
    assert (obs["y"][:, 0] == 50).all() and (obs["x"][:, 0] == 0).all()
    assert obs["z"].tolist() == obs["x"][:, 1].tolist() == obs["y"][:, 1].tolist()


class Numbers(Two):
    observation_space = gym.spaces.Discrete(3)

    def observe(self, agent, step):
        return step  # 3 and 4 are outside


@COLLECTORS
def test_plain_numbers_are_replaced(collector):
    w = worker(Numbers, sample_collector=collector, on_invalid_step="replace")
    assert sorted(w.sample()["p"]["new_obs"]) == [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]


class Turns(Two):
    """Agent "b" acts in each step, "a" in every fourth; a reward of "a" in between is invalid."""

    def observations(self):
        return {"a" if self.steps % 4 == 0 else "b": np.full(2, self.steps, np.float32)}

    def rewards(self):
        return {"a": np.nan if self.steps == 2 else 1.0}


@COLLECTORS
def test_an_invalid_reward_does_not_replace_the_sum_of_an_agent_that_waits(collector):
    w = worker(Turns, sample_collector=collector, on_invalid_step="replace")
    rows = w.sample()["p"]
    assert rows["rewards"][rows["agent_index"] == 0].tolist() == [3.0]


class Outside(Two):
    def observe(self, agent, step):
        return np.full(2, -5.0 * step, np.float32)


@pytest.mark.parametrize("env", [Outside, Keys])
def test_an_episode_whose_latest_observation_was_replaced_is_resumed(env):
    settings = {"on_invalid_step": "replace", "rollout_fragment_length": 2}
    saved, restored = (worker(env, {"p": PPOTorchPolicy}, **settings) for _ in range(2))
    saved.sample()
    assert restored.load_sampling_state_dict(saved.sampling_state_dict()) == 0


@COLLECTORS
def test_views_of_other_agents_support_only_arrays(collector):
    w = worker(Keys, {"p": PPOTorchPolicy}, sample_collector=collector)
    w.policy_map["p"].view_requirements["others"] = ViewRequirement("obs", agents="others")
    with pytest.raises(ConfigError, match="of other agents support arrays"):
        w.sample()


class Alone(Two):
    possible_agents = ["a"]

    def observations(self):
        return {"a": self.observe("a", self.steps)}

    def rewards(self):
        return {"a": 1.0}


@COLLECTORS
def test_views_of_all_others_need_another_agent(collector):
    w = worker(Alone, sample_collector=collector)
    w.policy_map["p"].view_requirements["others"] = ViewRequirement("obs", agents="others")
    with pytest.raises(ConfigError, match="needs an environment with other agents"):
        w.sample()


class Bounds(Two):
    """Agent "b" has larger bounds than the policy, agent "c" of the policy smaller ones."""

    observation_spaces = {"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Box(-50, 50, (2,))}

    def observe(self, agent, step):
        return np.full(2, 5 * step, np.float32)


@COLLECTORS
def test_observations_are_clipped_to_the_bounds_of_the_agent(collector):
    spec = PolicySpec(Idle, gym.spaces.Box(-3, 3, (2,)), gym.spaces.Discrete(2))
    w = worker(Bounds, {"p": spec}, sample_collector=collector, on_invalid_step="replace")
    rows = w.sample()["p"]
    of_b = rows["agent_index"] == 1
    assert rows["new_obs"][of_b, 0].tolist() == [5, 10, 15, 20, 5, 10]
    assert rows["new_obs"][~of_b, 0].tolist() == [1] * 6


class NanAtStep(Two):
    at = 3

    def observe(self, agent, step):
        return np.array([agent == "b", np.nan if step == self.at else step], np.float32)


@COLLECTORS
@pytest.mark.parametrize("at", [2, 3, 4])
def test_nan_does_not_pass_a_soft_horizon(collector, at):
    env = type("Env", (NanAtStep,), {"at": at})
    w = worker(
        env, sample_collector=collector, rollout_fragment_length=at, horizon=at, soft_horizon=True
    )
    with pytest.raises(InvalidStepError, match="for agent 'a' an observation that is not finite"):
        w.sample()


class NanReward(Two):
    def observations(self):
        return {"a": self.observe("a", self.steps)} if self.steps else super().observations()

    def rewards(self):
        NanReward.count += 1
        return {"a": 1.0, "b": np.nan if NanReward.count == 2 else 1.0}


def test_nan_rewards_of_agents_without_an_observation_are_dropped():
    NanReward.count = 0
    w = worker(NanReward, on_invalid_step="drop")
    assert w.sample().env_steps() == 4
    assert w.reply_tags()["faulty_episodes"] == 1


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("model", [{}, {"use_lstm": True, "lstm_cell_size": 3}])
def test_restored_collector_continues_exactly(batch_mode, model):
    config = {"fragment": 5, "batch_mode": batch_mode, "model": {"fcnet_hiddens": [4], **model}}
    whole, restored = pair(**config)[1], pair(**config)[1]
    for _ in range(3):
        whole.sample()
    restored.load_state_dict(whole.state_dict())
    assert restored.load_sampling_state_dict(whole.sampling_state_dict()) == 0
    whole.get_metrics()
    for _ in range(3):
        batch, other = whole.sample(), restored.sample()
        for policy_id, rows in batch.policy_batches.items():
            for name in set(rows) - {"infos"}:
                assert np.array_equal(rows[name], other.policy_batches[policy_id][name]), name
    assert metrics_of(whole) == metrics_of(restored)


@pytest.mark.parametrize("fragment", [5, 24])
@pytest.mark.parametrize("agents", ["others", [0, 3]])
def test_views_of_agents_whose_lanes_are_used_again(fragment, agents):
    for seed in range(2):
        view = ViewRequirement("obs", shift=[-2, 0], agents=agents)
        columns, rows = pair(
            fragment=fragment, seed=seed, views={"others": view}, normalize_observations=True
        )
        for _ in range(4):
            batch, expected = columns.sample(), rows.sample()
            for policy_id, part in batch.policy_batches.items():
                found = segments_of(part)
                for key, segment in segments_of(expected.policy_batches[policy_id]).items():
                    for name in ("others", "others_mask", "advantages"):
                        assert np.allclose(found[key][name], segment[name], atol=1e-4), name


def test_views_set_between_fragments_reach_earlier_ones():
    columns, rows = pair("always", fragment=2, horizon=None)
    for fragment in range(5):
        if fragment == 1:
            for w in (columns, rows):
                for policy in w.policy_map.values():
                    policy.view_requirements["view"] = ViewRequirement("obs", shift="-3:0")
        batch, expected = columns.sample(), rows.sample()
        if fragment < 3:
            continue  # the columns did not keep the rows before
        for policy_id, part in batch.policy_batches.items():
            for key, segment in segments_of(expected.policy_batches[policy_id]).items():
                assert np.array_equal(segments_of(part)[key]["view"], segment["view"])


def test_environment_that_cannot_be_replayed_starts_a_new_episode():
    class Forgets(Two):
        def observe(self, agent, step):
            return np.random.default_rng().random(2, np.float32)

    def make():
        return worker(
            Forgets, num_envs_per_worker=2, batch_mode="complete_episodes",
            rollout_fragment_length=3,
        )  # fmt: skip

    saved, restored = make(), make()
    saved.sample()
    assert restored.load_sampling_state_dict(saved.sampling_state_dict()) == 2
    assert restored.sample().env_steps() >= 6


def test_memory_of_past_agents_with_views_is_released():
    w, _ = pair(
        fragment=20, views={"o": ViewRequirement("obs", agents="others")}, horizon=3,
        soft_horizon=True,
    )  # fmt: skip
    sizes = []
    for _ in range(8):
        w.sample()
        sizes.append(len(w.sampling_state_dict()["env_sampler"]["open"]["trajectories"]))
    assert max(sizes[4:]) <= max(sizes[:4]) + 8


def test_reused_info_dicts_are_copied():
    class Reuses(Two):
        info = {}

        def step(self, action_dict):
            *rest, _ = super().step(action_dict)
            self.info["step"] = self.steps
            return (*rest, dict.fromkeys("ab", self.info))

    rows = worker(Reuses, collect_infos=True).sample()["p"]
    assert [info["step"] for info in rows["infos"]] == (rows["t"] + 1).tolist()


def test_rows_of_the_crowd_are_finite():
    w = RolloutWorker(
        lambda context: Crowd([1]),
        {"p": PPOTorchPolicy},
        {"policy_mapping_fn": lambda agent: "p", "normalize_observations": True},
    )
    for _ in range(3):
        assert all(np.isfinite(w.sample()["p"][n]).all() for n in ("obs", "new_obs", "advantages"))
