"""SampleCollectors called directly, and custom ones selected by the setting."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.policies import ConfigError, ViewRequirement
from flowrl.sampling import MultiAgentEpisode, RolloutWorker, SampleCollector, SimpleListCollector

from .fakes import CountEnv, DrawEnv, Idle, ObservedValue


def policy(cls=ObservedValue):
    return cls(Box(-1, 1e6, (2,), np.float32), Discrete(2), {})


def obs(t, agent=0):
    return np.array([agent, t], np.float32)


def row(t, agent=0, end=False, **columns):
    return {
        "actions": t % 2,
        "rewards": 1.0,
        "new_obs": obs(t + 1, agent),
        "terminateds": end,
        "truncateds": False,
        "vf_preds": np.float32(t),
        **columns,
    }


def test_example_of_the_rllib_documentation():
    policy_a = policy(Idle)
    collector = SimpleListCollector({"pol0": policy_a})
    collector.add_init_obs(12345, 0, "pol0", obs(0))
    input_dict = collector.get_inference_input_dict(policy_a)
    action = policy_a.compute_actions_from_input_dict(input_dict)[0][0]
    values = {"action": action, "obs": obs(1), "reward": 1.0, "done": False}
    copy = dict(values)
    collector.add_action_reward_next_obs(12345, 0, "pol0", values)
    assert values == copy
    assert collector.get_inference_input_dict(policy_a)["obs"].tolist() == [[0, 1]]
    collector.add_action_reward_next_obs(12345, 0, "pol0", {**values, "obs": obs(2), "done": True})
    collector.check_missing_dones(12345)
    batch = collector.get_multi_agent_batch_and_reset()
    assert isinstance(batch, MultiAgentBatch)
    rows = batch["pol0"]
    assert rows["obs"].tolist() == [[0, 0], [0, 1]]
    assert rows["new_obs"].tolist() == [[0, 1], [0, 2]]
    assert rows["terminateds"].tolist() == [False, True]
    assert (rows["rewards"].dtype, rows["t"].tolist()) == (np.float32, [0, 1])


def test_inference_input_follows_the_order_of_observations():
    policy_a, other = policy(), policy()
    collector = SimpleListCollector({"a": policy_a, "b": other})
    for agent, pid in ((3, "a"), (1, "b"), (2, "a")):
        collector.add_init_obs(1, agent, pid, obs(0, agent))
    assert collector.get_inference_input_dict(policy_a)["obs"][:, 0].tolist() == [3, 2]
    assert collector.get_inference_input_dict(other)["obs"][:, 0].tolist() == [1]
    collector.add_action_reward_next_obs(1, 2, "a", row(0, 2))
    collector.add_action_reward_next_obs(1, 3, "a", row(0, 3, end=True))
    assert collector.get_inference_input_dict(policy_a)["obs"].tolist() == [[2, 1]]
    with pytest.raises(ConfigError, match="no policy of this worker"):
        collector.get_inference_input_dict(object())


def test_collector_counts_env_and_agent_steps():
    policy_a = policy()
    collector = SimpleListCollector({"a": policy_a})
    assert not collector.has_non_postprocessed_data()
    for agent in range(3):
        collector.add_init_obs(1, agent, "a", obs(0, agent))
    assert (collector.total_env_steps(), collector.total_agent_steps()) == (0, 0)
    for t in range(2):
        for agent in range(3):
            collector.add_action_reward_next_obs(1, agent, "a", row(t, agent))
    assert (collector.total_env_steps(), collector.total_agent_steps()) == (2, 6)
    assert collector.has_non_postprocessed_data()
    collector.postprocess_trajectories_so_far()
    assert not collector.has_non_postprocessed_data()
    assert (collector.total_env_steps(), collector.total_agent_steps()) == (2, 6)
    collector.add_action_reward_next_obs(1, 0, "a", row(2, 0))
    batch = collector.get_multi_agent_batch_and_reset()
    assert (batch.env_steps(), batch.agent_steps()) == (3, 7)
    # the row added after the first postprocessing is a separate segment
    rows = batch["a"].take_rows(np.flatnonzero(batch["a"]["obs"][:, 0] == 0))
    assert len(set(rows["unroll_id"])) == 2
    assert (collector.total_env_steps(), collector.total_agent_steps()) == (0, 0)


def test_trajectories_continue_after_a_batch():
    policy_a = policy()
    policy_a.view_requirements["before"] = ViewRequirement("rewards", shift="-3:-1")
    collector = SimpleListCollector({"a": policy_a})
    collector.add_init_obs(1, 0, "a", obs(0))
    seen = []
    for t in range(9):
        collector.add_action_reward_next_obs(1, 0, "a", row(t, rewards=float(t + 1)))
        if t % 2:
            seen += collector.get_multi_agent_batch_and_reset()["a"]["before"].tolist()
    padded = [0, 0, 0, *range(1, 9)]
    assert seen == [padded[t : t + 3] for t in range(8)]


def test_calls_in_wrong_order_raise():
    policy_a = policy()
    collector = SimpleListCollector({"a": policy_a})
    with pytest.raises(ValueError, match="call add_init_obs first"):
        collector.add_action_reward_next_obs(1, 0, "a", row(0))
    collector.add_init_obs(1, 0, "a", obs(0))
    with pytest.raises(ValueError, match="has started already"):
        collector.add_init_obs(1, 0, "a", obs(0))
    with pytest.raises(ConfigError, match="no policy 'b'"):
        collector.add_init_obs(1, 1, "b", obs(0))
    with pytest.raises(ValueError, match=r"lacks \['rewards'\]"):
        collector.add_action_reward_next_obs(1, 0, "a", {"action": 0, "obs": obs(1), "done": False})
    collector.add_action_reward_next_obs(1, 0, "a", row(0))
    with pytest.raises(ValueError, match="neither terminated nor truncated"):
        collector.check_missing_dones(1)
    collector.add_action_reward_next_obs(1, 0, "a", row(1, end=True))
    with pytest.raises(ValueError, match="has ended"):
        collector.add_action_reward_next_obs(1, 0, "a", row(2))


def test_single_episode_can_be_postprocessed():
    policy_a = policy()
    collector = SimpleListCollector({"a": policy_a})
    for episode_id in (1, 2):
        collector.add_init_obs(episode_id, 0, "a", obs(0))
        collector.add_action_reward_next_obs(episode_id, 0, "a", row(0))
    episode = MultiAgentEpisode(1, 0, None, lambda agent, episode: "a")
    collector.postprocess_trajectories_so_far(episode)
    assert collector.has_non_postprocessed_data()
    assert collector.get_multi_agent_batch_and_reset()["a"]["eps_id"].tolist() == [1, 2]


def test_sample_collector_has_eight_abstract_methods():
    with pytest.raises(TypeError, match="abstract"):
        SampleCollector({})
    assert SampleCollector.__abstractmethods__ == {
        "add_init_obs",
        "add_action_reward_next_obs",
        "total_env_steps",
        "get_inference_input_dict",
        "has_non_postprocessed_data",
        "postprocess_trajectories_so_far",
        "get_multi_agent_batch_and_reset",
        "check_missing_dones",
    }


class MinimalCollector(SampleCollector):
    """The eight abstract methods for one agent without views."""

    num_created = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        MinimalCollector.num_created += 1
        self.obs, self.rows, self.pending = {}, [], []

    def add_init_obs(self, episode_id, agent_id, policy_id, init_obs):
        self.obs[episode_id, agent_id] = init_obs
        self.pending.append((episode_id, agent_id))

    def add_action_reward_next_obs(self, episode_id, agent_id, policy_id, values):
        key = episode_id, agent_id
        self.rows.append({"obs": self.obs[key], "eps_id": episode_id, **values})
        self.obs[key] = values["new_obs"]
        if not (values["terminateds"] or values["truncateds"]):
            self.pending.append(key)

    def total_env_steps(self):
        return len(self.rows)

    def get_inference_input_dict(self, model):
        pending, self.pending = self.pending, []
        return {"obs": np.stack([self.obs[key] for key in pending])}

    def has_non_postprocessed_data(self):
        return bool(self.rows)

    def postprocess_trajectories_so_far(self, episode=None):
        pass

    def get_multi_agent_batch_and_reset(self):
        rows, self.rows = self.rows, []
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        columns["custom"] = np.ones(len(rows))
        return MultiAgentBatch({"default_policy": SampleBatch(columns)}, len(rows))

    def check_missing_dones(self, episode_id):
        assert self.rows[-1]["terminateds"] or self.rows[-1]["truncateds"]


@pytest.mark.parametrize("sample_async", [False, True])
def test_custom_collector_is_used(sample_async):
    MinimalCollector.num_created = 0
    worker = RolloutWorker(
        lambda context: CountEnv(3),
        ObservedValue,
        {
            "sample_collector": MinimalCollector,
            "rollout_fragment_length": 7,
            "sample_async": sample_async,
        },
    )
    batches = [worker.sample() for _ in range(2)]
    worker.stop()
    assert MinimalCollector.num_created == 1
    joined = SampleBatch.concat_samples(batches)
    assert joined["custom"].sum() == 14
    assert joined["obs"][:, 1].tolist() == [0, 1, 2] * 4 + [0, 1]
    assert joined["t"].tolist() == joined["obs"][:, 1].tolist()
    assert "vf_preds" in joined


def test_custom_collector_with_complete_episodes():
    MinimalCollector.num_created = 0
    worker = RolloutWorker(
        lambda context: CountEnv(3),
        ObservedValue,
        {
            "sample_collector": MinimalCollector,
            "rollout_fragment_length": 4,
            "num_envs_per_worker": 2,
            "batch_mode": "complete_episodes",
        },
    )
    assert worker.sample().count == 9
    assert MinimalCollector.num_created == 2  # one per environment


def test_whole_episodes_of_a_collector_may_end_at_soft_horizons():
    def batch(**settings):
        worker = RolloutWorker(
            lambda context: CountEnv(11),
            ObservedValue,
            {
                "rollout_fragment_length": 20,
                "batch_mode": "complete_episodes",
                "horizon": 4,
                "soft_horizon": True,
                **settings,
            },
        )
        return SampleBatch.concat_samples([worker.sample() for _ in range(2)])

    rows, columns = batch(sample_collector=SimpleListCollector), batch()
    assert rows.count == columns.count >= 40
    for name in ("obs", "new_obs", "rewards", "terminateds", "truncateds", "t"):
        np.testing.assert_array_equal(rows[name], columns[name], name)


def test_missing_optional_methods_are_named():
    def worker(**config):
        return RolloutWorker(
            lambda context: CountEnv(3, fail_at=(1, 1)),
            ObservedValue,
            {"sample_collector": MinimalCollector, **config},
        )

    with pytest.raises(ConfigError, match="MinimalCollector has no continue_episode"):
        worker(horizon=2, soft_horizon=True)
    with pytest.raises(ValueError, match="the environment broke"):
        worker().sample()


class SavingCollector(MinimalCollector):
    """Can save its trajectories, but not drop an episode."""

    def state_dict(self):
        keys = [list(key) for key in self.obs]
        return {"keys": keys, "obs": [self.obs[tuple(key)].copy() for key in keys]}

    def load_state_dict(self, state):
        for key, value in zip(state["keys"], state["obs"], strict=True):
            self.obs[tuple(key)] = value
            self.pending.append(tuple(key))


class Unrepeatable(CountEnv):
    """The first observation contains the number of the environment."""

    def __init__(self, number):
        super().__init__(length=20)
        self.number = number

    def observe(self):
        return np.array([self.number, self.steps], np.float32)


def collecting_worker(make_env, collector, **settings):
    return RolloutWorker(
        make_env,
        ObservedValue,
        {
            "sample_collector": collector,
            "rollout_fragment_length": 3,
            "num_envs_per_worker": 2,
            "seed": 3,
            **settings,
        },
    )


def test_all_episodes_begin_again_if_one_of_a_collector_cannot_be_dropped():
    # one environment of the resumed worker is another one
    numbers = {0: [0, 0, 0], 1: [1, 9]}

    def make_env(context):
        return Unrepeatable(numbers[context.vector_index].pop(0))

    first, resumed = (collecting_worker(make_env, SavingCollector) for _ in range(2))
    first.sample()
    assert resumed.load_sampling_state_dict(first.sampling_state_dict()) == 2
    assert resumed.sample()["t"].tolist() == [0, 0, 1, 1, 2, 2]


def test_run_without_saved_episodes_does_not_repeat_its_first_ones():
    def make_worker():
        return collecting_worker(lambda context: DrawEnv(20), MinimalCollector)

    first = make_worker()
    numbers = set(first.sample()["obs"][:, 0])
    states = [first.sampling_state_dict()]
    first.sample()
    states.append(first.sampling_state_dict())
    for state in states:
        resumed, again = make_worker(), make_worker()
        assert resumed.load_sampling_state_dict(state) == 2
        again.load_sampling_state_dict(state)
        new = resumed.sample()["obs"][:, 0]
        assert new.tolist() == again.sample()["obs"][:, 0].tolist()
        assert not numbers & set(new)
        numbers |= set(new)


@pytest.mark.parametrize("envs", [1, 2])
def test_stacked_observations_of_a_collector_equal_those_of_columns(envs):
    def batches(collector):
        worker = RolloutWorker(
            lambda context: CountEnv(7),
            Idle,
            {
                "rollout_fragment_length": 5,
                "num_envs_per_worker": envs,
                "sample_collector": collector,
            },
        )
        space = worker.policy.observation_space
        worker.policy.view_requirements["obs"] = ViewRequirement("obs", space, shift="-2:0")
        return [worker.sample() for _ in range(4)]

    for rows, columns in zip(batches(SimpleListCollector), batches(None), strict=True):
        for name in ("obs", "new_obs"):
            assert rows[name].shape == (5 * envs, 3, 2)
            np.testing.assert_array_equal(rows[name], columns[name], name)
