"""Edges of sampling, each of which was wrong once."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch, chop_into_sequences
from flowrl.envs import MultiAgentEnv
from flowrl.policies import ConfigError, ViewRequirement
from flowrl.sampling import DefaultCallbacks, RolloutWorker, SimpleListCollector

from .fakes import CountEnv, Idle, ObservedValue

WAYS = {"columns": None, "rows": SimpleListCollector}


@pytest.fixture(params=list(WAYS))
def way(request):
    return WAYS[request.param]


def worker(env, policy=Idle, **config):
    return RolloutWorker(lambda context: env(), policy, {"rollout_fragment_length": 6, **config})


class Keeps(MultiAgentEnv):
    """Writes everything into the same dicts and arrays."""

    observation_space = gym.spaces.Box(-1, 100, (1,), np.float32)
    action_space = gym.spaces.MultiDiscrete([4, 4])
    possible_agents = ["a"]

    def __init__(self):
        self.obs, self.infos = {"a": np.zeros(1, np.float32)}, {"a": {}}
        self.rewards = {"a": 0.0}

    def reset(self, *, seed=None, options=None):
        self.n = 0
        self.obs["a"][:] = 0
        return self.obs, self.infos

    def step(self, action_dict):
        self.n += 1
        action_dict["a"][:] = 0
        self.obs["a"][:] = self.infos["a"]["n"] = self.rewards["a"] = self.n
        return self.obs, self.rewards, {"__all__": self.n == 6}, {"__all__": False}, self.infos


class Threes(Idle):
    def compute_actions(self, obs_batch, explore=True):
        return np.full((len(obs_batch), 2), 3), [], {}


def test_an_environment_may_keep_its_dicts():
    rows = worker(Keeps, {"p": Threes}).sample()["p"]
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert rows["new_obs"][:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows["rewards"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (rows["actions"] == 3).all()


def test_what_callbacks_are_given_is_read_only():
    class Rude(DefaultCallbacks):
        def on_episode_step(self, *, episode, **kwargs):
            episode.last_observation_for()[:] = -1

    with pytest.raises(ValueError, match="read-only"):
        worker(CountEnv, callbacks_class=Rude).sample()


class Slow(MultiAgentEnv):
    """`fast` always acts, `slow` every fourth step; never ends, but for `gone` after step 2."""

    observation_space = gym.spaces.Box(-1, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    possible_agents = ["fast", "slow", "gone"]

    def __init__(self, agents=("fast", "slow", "gone")):
        self.agents = agents

    def observe(self):
        there = {"fast": True, "slow": self.n % 4 == 0, "gone": self.n <= 2}
        obs = np.full(1, self.n, np.float32)
        return {agent: obs.copy() for agent in self.agents if there[agent]}

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return self.observe(), {}

    def step(self, action_dict):
        self.n += 1
        ends = {"gone": True} if self.n == 2 and "gone" in self.agents else {}
        return self.observe(), {}, {**ends, "__all__": False}, {"__all__": False}, {}


class Seen(Idle):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        self.seen += [
            {n: v[i].copy() for n, v in input_dict.items()} for i in range(len(input_dict["obs"]))
        ]
        return super().compute_actions_from_input_dict(input_dict, explore)


def test_views_of_others_reach_over_soft_horizons():
    w = worker(Slow, {"p": Seen}, horizon=6, soft_horizon=True, rollout_fragment_length=11)
    policy = w.policy_map["p"]
    policy.view_requirements["others"] = ViewRequirement(
        "obs", agents=["fast", "gone"], shift=[-1, 0]
    )
    rows = SampleBatch.concat_samples([w.sample()["p"] for _ in range(4)])
    acted = {}
    for seen in policy.seen:
        acted.setdefault(seen["obs"][0], []).append(seen)
    for row in rows.rows():
        assert any(
            np.array_equal(seen["others"], row["others"])
            and np.array_equal(seen["others_mask"], row["others_mask"])
            for seen in acted[row["obs"][0]]
        ), row


@pytest.mark.parametrize("fragment", [3, 20])
def test_a_soft_horizon_with_nobody_there(fragment):
    w = worker(
        lambda: Slow(("gone",)), {"p": Idle}, horizon=5, soft_horizon=True,
        rollout_fragment_length=fragment,
    )  # fmt: skip
    assert sum(w.sample().env_steps() for _ in range(6)) == 6 * fragment


def test_sums_of_rewards_reach_over_soft_horizons():
    def seen(**config):
        w = worker(lambda: Slow(("slow",)), {"p": PPOTorchPolicy}, normalize_rewards=True,
                   gamma=1.0, rollout_fragment_length=24, **config)  # fmt: skip
        w.sample()
        return w.reply_tags()["filters"][0]["p"]["rewards"]

    plain, soft = seen(), seen(horizon=2, soft_horizon=True)
    assert plain["count"] == soft["count"] > 3
    assert plain["mean"] == soft["mean"]


def test_a_state_begins_as_the_policy_says_now():
    class Learned(Idle):
        start = 0.0

        def __init__(self, *args):
            super().__init__(*args)
            self.view_requirements |= self.recurrent_views(3)

        def get_initial_state(self):
            return [np.full(1, self.start, np.float32)]

        def compute_actions_from_input_dict(self, input_dict, explore=True):
            states = input_dict["state_in_0"]
            return np.zeros(len(states), np.int64), [states], {"state": states[:, 0]}

    w = worker(lambda: CountEnv(3), Learned)
    w.sample()
    w.policy.start = 7.0
    batch = w.sample()
    # an episode that has begun already goes on with its own
    assert batch["state"].tolist() == [0, 0, 0, 7, 7, 7]
    assert batch["state_in_0"][:, 0].tolist() == [0, 7]


def test_environments_made_anew_have_seeds_of_their_own(way):
    seeds = []

    class Seeded(CountEnv):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed)

    w = worker(lambda: Seeded(20, fail_at=(0, 10)), seed=1, sample_collector=way)
    for _ in range(12):
        w.sample()
    assert len(seeds) == len(set(seeds)) >= 5


def test_windows_of_rewards_have_one_dtype(way):
    w = worker(lambda: CountEnv(5), Seen, sample_collector=way)
    w.policy.view_requirements["r"] = ViewRequirement("rewards", shift="-3:-1")
    batch = w.sample()
    assert batch["r"].dtype == np.float32
    assert {seen["r"].dtype for seen in w.policy.seen} == {np.dtype(np.float32)}


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_infos_are_the_steps_own(mode, way):
    vector = SyncVectorEnv([lambda: CountEnv(3, reuse=False)] * 2, autoreset_mode=mode)
    batch = worker(lambda: vector, sample_collector=way, rollout_fragment_length=8).sample()
    assert [info["n"] for info in batch["infos"]] == (batch["t"] + 1).tolist()


def test_an_environment_may_keep_its_info(way):
    class Keeping(CountEnv):
        told = {}

        def step(self, action):
            *rest, _ = super().step(action)
            self.told["n"] = self.steps
            return (*rest, self.told)

    batch = worker(lambda: Keeping(20), sample_collector=way).sample()
    assert [info["n"] for info in batch["infos"]] == [1, 2, 3, 4, 5, 6]


def test_filters_see_what_is_given_and_no_more(way):
    environments = iter([CountEnv(20, fail_at=(0, 4)), CountEnv(20)])
    w = worker(
        lambda: next(environments),
        PPOTorchPolicy,
        sample_collector=way,
        normalize_observations=True,
        normalize_rewards=True,
        rollout_fragment_length=9,
    )
    assert w.sample().count == 5
    seen = w.reply_tags()["filters"][0]["default_policy"]
    assert (seen["observations"]["count"], seen["rewards"]["count"]) == (5, 5)


def test_padding_does_not_write_over_rows():
    with pytest.raises(ValueError, match="does not fit max_seq_len=3"):
        chop_into_sequences(
            feature_columns=[[1, 2, 3, 4, 5, 6, 7]],
            state_columns=[],
            max_seq_len=3,
            dynamic_max=False,
            seq_lens=[5, 2],
        )


class AlwaysBad(CountEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return (observation, np.nan if self.steps == self.length else reward, *rest)


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_what_is_always_bad_stops_even_where_it_is_dropped(way, mode):
    w = worker(
        lambda: AlwaysBad(3, reuse=False),
        on_invalid_step="drop",
        max_num_env_restarts=3,
        sample_collector=way,
        batch_mode=mode,
    )
    with pytest.raises(ValueError, match="reward that is not finite"):
        SampleBatch.concat_samples(w.sample() for _ in range(10))


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_a_vector_environment_that_raised_is_made_anew(vector):
    made = []

    def creator():
        made.append(1)
        fail_at = (0, 2) if len(made) == 1 else None
        return vector([lambda: CountEnv(3, fail_at=fail_at, reuse=False)] * 2)

    w = worker(creator)
    with pytest.raises(ValueError, match="the environment broke"):
        w.sample()
    assert w.sample().count == 10  # twelve calls, two of which were resets
    w.stop()


def test_views_take_columns_away_either_way(way):
    w = worker(lambda: CountEnv(4), ObservedValue, sample_collector=way)
    w.policy.view_requirements["vf_preds"] = ViewRequirement(used_for_training=False)
    assert "vf_preds" not in w.sample()
    view = w.policy.view_requirements["x"] = ViewRequirement("rewards", shift=-1)
    assert "x" in w.sample()
    view.used_for_training = False
    assert "x" not in w.sample()


def test_a_view_that_comes_too_late_for_columns():
    w = worker(lambda: CountEnv(4))
    w.sample()
    w.policy.view_requirements["x"] = ViewRequirement("obs", agents=["agent0"])
    with pytest.raises(ConfigError, match="before the first fragment"):
        w.sample()


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (gym.spaces.MultiDiscrete([2, 2]), [9, 9]),
        (gym.spaces.Box(-1, 1, (2,)), [np.nan, 0.0]),
        (gym.spaces.MultiBinary(2), [2, 0]),
    ],
    ids=str,
)
def test_actions_that_nobody_takes(way, space, action):
    class Acts(CountEnv):
        action_space = space

    class Odd(Idle):
        def compute_actions(self, obs_batch, explore=True):
            return np.array([action] * len(obs_batch)), [], {}

    with pytest.raises(ValueError, match="the action"):
        worker(Acts, Odd, sample_collector=way).sample()


def test_agents_of_other_actions_need_other_policies():
    class Unequal(Slow):
        def get_action_space(self, agent_id):
            return gym.spaces.Discrete(5 if agent_id == "fast" else 2)

    with pytest.raises(ConfigError, match="agent 'slow' is mapped to policy 'p', whose action"):
        worker(Unequal, {"p": Idle}).sample()


def test_views_of_agents_with_other_shapes():
    class Shapes(Slow):
        def get_observation_space(self, agent_id):
            return gym.spaces.Box(-1, 1e6, (3 if agent_id == "slow" else 1,), np.float32)

        def observe(self):
            return {
                agent: np.full(self.get_observation_space(agent).shape, self.n, np.float32)
                for agent in super().observe()
            }

    def sampled(agents):
        w = worker(
            Shapes,
            {"p": Seen, "q": Idle},
            policy_mapping_fn=lambda agent: "q" if agent == "slow" else "p",
        )
        w.policy_map["p"].view_requirements["x"] = ViewRequirement("obs", agents=agents)
        return w.sample()["p"]["x"]

    assert sampled(["slow"]).shape[1:] == (1, 3)
    with pytest.raises(ConfigError, match="different shapes"):
        sampled(["slow", "fast"])


def test_announcing_environments_changes_nothing_else():
    class Announced(DefaultCallbacks):
        made = []

        def on_sub_environment_created(self, *, env_context, **kwargs):
            self.made.append(env_context.vector_index)

    w = RolloutWorker(
        "CartPole-v1",
        ObservedCartPole,
        {
            "callbacks_class": Announced,
            "vectorization_mode": "vector_entry_point",
            "num_envs_per_worker": 2,
        },
    )
    assert w.sample().count > 300

    class Raising(DefaultCallbacks):
        def on_sub_environment_created(self, **kwargs):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        worker(CountEnv, callbacks_class=Raising)


class ObservedCartPole(Idle):
    pass


def test_a_horizon_sets_every_limit(way):
    def limited():
        return gym.wrappers.TimeLimit(gym.wrappers.TimeLimit(CountEnv(100), 5), 8)

    w = worker(limited, horizon=20, rollout_fragment_length=60, sample_collector=way)
    w.sample()
    assert {e.episode_length for e in w.get_metrics()} == {20}


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_columns_that_come_only_sometimes_can_be_joined(mode):
    class Sometimes(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, **kwargs):
            if postprocessed_batch["obs"][0, 0] == 1:
                postprocessed_batch["x"] = np.ones(postprocessed_batch.count)

    w = worker(lambda: CountEnv(3), callbacks_class=Sometimes, batch_mode=mode)
    both = SampleBatch.concat_samples([w.sample(), w.sample()])
    assert both["x"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_episodes_before_an_error_are_given_afterwards():
    class Once(Idle):
        calls = 0

        def compute_actions(self, obs_batch, explore=True):
            self.calls += 1
            if self.calls == 8:
                raise RuntimeError("once")
            return super().compute_actions(obs_batch, explore)

    w = worker(lambda: CountEnv(3), Once, batch_mode="complete_episodes", rollout_fragment_length=9)
    with pytest.raises(RuntimeError, match="once"):
        w.sample()
    batch = w.sample()
    assert batch.count == 9
    assert w.env_steps == sum(e.episode_length for e in w.get_metrics()) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: (*g[:2], False, *g[3:]), "terminateds as a dict"),
        (lambda g: (*g[:4], None), "infos as a dict"),
        (lambda g: (g[0], {"fast": None}, *g[2:]), "reward is one number"),
    ],
)
def test_wrong_dicts_are_named(change, message):
    class Odd(Slow):
        def step(self, action_dict):
            return change(super().step(action_dict))

    with pytest.raises(ConfigError, match=message):
        worker(Odd, {"p": Idle}).sample()


def test_an_environment_that_is_both():
    class Both(Slow, gym.Env):
        pass

    assert worker(Both, {"p": Idle}).sample().env_steps() == 6
    with pytest.raises(ConfigError, match="requires gymnasium environments"):
        worker(Slow, {"p": Idle}, vectorization_mode="sync")


def test_agents_that_come_and_go_leave_nothing_behind():
    class Endless(Slow):
        def observe(self):
            return {agent: np.zeros(1, np.float32) for agent in (self.n // 3, self.n // 3 + 1)}

        def step(self, action_dict):
            obs, rewards, ends, cuts, infos = super().step(action_dict)
            return obs, rewards, {**ends, **{a: a not in obs for a in action_dict}}, cuts, infos

    w = worker(lambda: Endless(()), {"p": Idle}, rollout_fragment_length=60)
    for _ in range(5):
        w.sample()
    (collector,) = w._source._collectors
    (agents,) = collector._trajectories.values()
    assert len(agents) <= 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rewards": np.ones(2)}, "column 'rewards', which is reserved for the sampler"),
        ({"x": np.ones(3)}, "column 'x' with 3 rows for 2"),
    ],
)
def test_columns_that_a_policy_may_not_give(way, extra, message):
    class Gives(Idle):
        def compute_actions(self, obs_batch, explore=True):
            return np.zeros(len(obs_batch), np.int64), [], extra

    with pytest.raises(ValueError, match=message):
        worker(CountEnv, Gives, sample_collector=way, num_envs_per_worker=2).sample()


@pytest.mark.parametrize(
    "actions", [np.full(2, np.nan), np.full(2, 0.7), np.zeros((2, 1), np.int64), np.zeros(3, int)]
)
def test_actions_of_the_wrong_kind(way, actions):
    class Odd(Idle):
        def compute_actions(self, obs_batch, explore=True):
            return actions, [], {}

    with pytest.raises(ValueError, match="gave"):
        worker(CountEnv, Odd, sample_collector=way, num_envs_per_worker=2).sample()


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (gym.spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1])),
        (gym.spaces.Box(0, 255, (2,), np.uint8), np.array([0.5, 1.0])),
        (gym.spaces.Box(0, 9, (2,), np.float32), 0.5),
        (gym.spaces.Box(0, 9, (2,), np.float32), "ab"),
        (gym.spaces.Discrete(5), 2.7),
        (gym.spaces.Discrete(5), "2"),
    ],
    ids=str,
)
def test_observations_are_not_cast(way, space, wrong):
    class Odd(CountEnv):
        observation_space = space

        def observe(self):
            return wrong if self.steps == 3 else np.zeros(space.shape, space.dtype)

    with pytest.raises(ConfigError, match="does not fit the space"):
        worker(lambda: Odd(5), sample_collector=way).sample()


def test_rewards_must_fit_their_column(way):
    class Rich(CountEnv):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return (observation, 1e300, *rest)

    with np.errstate(over="ignore"), pytest.raises(ValueError, match="reward that is not finite"):
        worker(Rich, sample_collector=way).sample()


def test_a_creator_that_forgets_to_return():
    with pytest.raises(ConfigError, match="does it return the environment"):
        worker(lambda: None)


def test_a_step_of_the_old_kind_is_named(way):
    class Old(CountEnv):
        def step(self, action):
            return super().step(action)[:4]

    with pytest.raises(ConfigError, match=r"step\(\) \(observation"):
        worker(Old, sample_collector=way).sample()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs_per_worker": 0}, "num_envs_per_worker: an int from 1"),
        ({"num_envs_per_worker": True}, "num_envs_per_worker"),
        ({"rollout_fragment_length": "x"}, "rollout_fragment_length"),
        ({"seed": -1}, "seed"),
        ({"no_done_at_end": "no"}, "no_done_at_end: True or False"),
        ({"sample_async": "false"}, "sample_async"),
        ({"env_config": 5}, "env_config: a mapping"),
        ({"callbacks_class": 5}, "callbacks_class"),
    ],
)
def test_plain_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        worker(CountEnv, **settings)


def test_agent_steps_that_never_come():
    w = worker(lambda: Slow(()), {"p": Idle}, count_steps_by="agent_steps")
    with pytest.raises(RuntimeError, match="nobody acted"):
        w.sample()


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_greedy_is_greedy_however_rows_are_collected(mode):
    from flowrl.algorithms.ppo import PPOConfig

    class Zeros(gym.Env):
        """A reward for every 0."""

        observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.n = 0
            return np.ones(1, np.float32), {}

        def step(self, action):
            self.n += 1
            return np.ones(1, np.float32), float(action == 0), self.n == 50, False, {}

    config = PPOConfig(
        env=lambda context: Zeros(),
        seed=1,
        batch_mode=mode,
        train_batch_size=100,
        sgd_minibatch_size=0,
    )
    config.rollouts(rollout_fragment_length=50).callbacks(Ends)
    with config.build() as algorithm:
        algorithm.train()
        greedy = algorithm.evaluate(episodes=2)
        assert greedy["episode_reward_mean"] in (0, 50)
        assert 0 < algorithm.evaluate(episodes=2, explore=True)["episode_reward_mean"] < 50
        assert algorithm.compute_single_action(np.ones(1, np.float32)) in (0, 1)
        with pytest.raises(ConfigError, match="an observation of the shape"):
            algorithm.compute_single_action(np.ones(2, np.float32))


class Ends(DefaultCallbacks):
    def on_episode_end(self, **kwargs):
        pass


def test_an_evaluation_plays_whole_episodes_over_soft_horizons():
    from flowrl.algorithms.ppo import PPOConfig

    config = PPOConfig(env="CartPole-v1", seed=1, horizon=5, soft_horizon=True)
    with config.build() as algorithm:
        assert algorithm.evaluate(episodes=3)["episode_len_mean"] > 5
